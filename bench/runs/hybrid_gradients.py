"""Gradients of a hybrid model in float32: sequences in one row, also after one copy of their prompt, vs. separate ones.

    python -m bench.runs.hybrid_gradients [--out rows.jsonl]          # a small Qwen3.5; needs flash-linear-attention

Float64 is transformers' torch code, one sequence per row. The error of a way is the largest relative error of a
parameter's gradient; `to_separate` is the largest distance to the gradient of separate rows. On a CPU packed rows need
the package's kernels, too, so only separate rows are measured. TRITON_F32_DEFAULT=tf32x3 makes the package's products
more exact than TF32. Kernels are compiled with one of their configurations each, because all of them take minutes; the
times are therefore not those of training.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bench.common import alternate, emit, make_row, relative_error, require_commit, torch_code
from data.packing import Item, make_batches
from rollout.state_layers import has, prepare_layers
from trainer.parallel.comm import pick_device
from trainer.policy.attention import choose_attention
from trainer.policy.logps import Policy, token_logps

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "vocab_size": 1024, "tie_word_embeddings": True,
    "layer_types": ["linear_attention", "full_attention"] * 2, "initializer_range": 0.1,
}  # fmt: skip
PROMPT, LENGTHS = 70, (200, 64, 130, 30)  # tokens of the prompt and the completions
NUM_TOKENS = len(LENGTHS) * PROMPT + sum(LENGTHS)


class InFloat64(TorchFunctionMode):
    """Context manager: compute in float64 where a model asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


@contextmanager
def one_configuration() -> Iterator[None]:
    """Let kernels that are defined in this block try only the configuration that needs the least shared memory.

    Larger ones do not fit with TF32X3. Of those with equal needs it has the most warps, because code for few warps
    takes minutes to assemble.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:  # no Triton, no kernels
        yield
        return
    init = Autotuner.__init__

    def size(config: Any) -> tuple[int, int]:
        numbers = (x for x in config.kwargs.values() if isinstance(x, int))
        return config.num_stages * math.prod(numbers), -config.num_warps

    def smallest(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        init(self, fn, arg_names, [min(configs, key=size)], *args, **kwargs)

    with patch.object(Autotuner, "__init__", smallest):
        yield


def solve_exactly() -> None:
    """Let the package solve its triangular systems with TF32X3; it asks for TF32, whatever TRITON_F32_DEFAULT says."""
    if has("fla"):
        from triton.language import constexpr

        import_module("fla.ops.gated_delta_rule.chunk_fwd").SOLVE_TRIL_DOT_PRECISION = constexpr("tf32x3")


def make_model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SHAPE), attn_implementation="sdpa")


def policy_of(lm: Any, attention: str, dtype: torch.dtype) -> Policy:
    """Prepare the model for packed rows, as load_policy does."""
    choose_attention(lm, attention, lm.device)
    prepare_layers(lm)
    return Policy(model=lm, tokenizer=None, source="random", device=lm.device, compute_dtype=dtype)


def make_items() -> list[Item]:
    ids = torch.randint(1024, (PROMPT + sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).tolist()
    prompt, *ends = (ids[first:last] for first, last in itertools.pairwise(itertools.accumulate((0, PROMPT, *LENGTHS))))
    return [Item(prompt + x, [False] * PROMPT + [True] * len(x), PROMPT) for x in ends]


def gradients(policy: Policy, items: list[Item], *, packing: bool, share_prompt: bool = False) -> dict[str, Tensor]:
    """Return, by name, the gradients of the sum of all log-probs, with weights from 1 to 2 within each sequence."""
    policy.model.zero_grad()
    layout = policy.layout(packing=packing, share_prompt=share_prompt)
    for batch in make_batches(items, max_tokens=2**16 if packing else 1, **layout):
        batch = batch.to(policy.device)
        weight = torch.cat([torch.linspace(1, 2, sum(items[row].mask)) for row in batch.rows]).to(policy.device)
        (token_logps(policy, batch).logp * weight).sum().backward()
    return {name: x.grad.clone() for name, x in policy.model.named_parameters() if x.grad is not None}


def main(out: Path | None = None, seconds: float = 1.0) -> None:
    """Print the table; append every row as JSON to `out`."""
    require_commit()
    with one_configuration():
        model, items = make_model(), make_items()
        solve_exactly()
    wide = copy.deepcopy(model).double()
    policies = {
        "float32": policy_of(model.to(device := pick_device()), "auto", torch.float32),
        "float64": policy_of(wide, "sdpa", torch.float64),
    }
    with torch_code(model), InFloat64():
        exact = gradients(policies["float64"], items, packing=False)

    def separate() -> dict[str, Tensor]:
        return gradients(policies["float32"], items, packing=False)

    def with_torch_code() -> dict[str, Tensor]:
        with torch_code(model):
            return separate()

    calls = {"separate, torch": with_torch_code, "separate": separate}
    if device.type == "cuda":
        calls["packed"] = lambda: gradients(policies["float32"], items, packing=True)
        calls["shared prompt"] = lambda: gradients(policies["float32"], items, packing=True, share_prompt=True)
    alone, timings, rows = separate(), alternate(calls, seconds=seconds, rounds=2), []
    for name, timing in timings.items():
        found = calls[name]()
        errors = {key: relative_error(x.cpu(), exact[key]) for key, x in found.items()}
        apart = {key: relative_error(x, alone[key]) for key, x in found.items()}
        worst = max(apart, key=apart.get)
        print(f"{name}: largest error {max(errors, key=errors.get)}, farthest from separate rows {worst}", flush=True)
        above = sum(x > 1e-3 for x in apart.values())
        rows.append(make_row(
            "hybrid_gradients", name, timing, dtype="float32",
            shape={"T": NUM_TOKENS, "D": SHAPE["hidden_size"], "layers": 4},
            work=NUM_TOKENS, unit="tokens", errors={"worst_parameter": max(errors.values())}, against=timings,
            extra={"to_separate": apart[worst], "above_1e-3": above, "parameters": len(apart)},
        ))  # fmt: skip
    emit(rows, out)


if __name__ == "__main__":
    tyro.cli(main)
