"""Tiny random models of current architectures, and the table of docs/models.md.

    python -m tests.models                          # print the table (takes about two minutes)
    python -m tests.models --write docs/models.md   # replace the text between the two markers

Every cell is the result of running the trainer or the engine on such a model, except for the column of vLLM, which is
the content of its model registry (in .venv-vllm).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.table import between_markers
from data.errors import UserError
from data.packing import Item, make_batches
from rollout.engine import Request, Sampling
from rollout.engines.forward import BlockForward, TransformersForward, block_obstacle
from rollout.engines.local import LocalEngine
from rollout.routes import expert_blocks
from tests.entry import ROOT, run_ranks
from tests.rollout.engines.test_states import gap
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.parallel import comm
from trainer.policy import attention
from trainer.policy.compile_choice import obstacle
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, causal_lm, check_logps, token_logps
from trainer.tiny.build import make_tokenizer

MARKERS = "<!-- models -->", "<!-- /models -->"
VLLM = ROOT / ".venv-vllm/bin/python"
CPU = torch.device("cpu")

COMMON = dict(
    vocab_size=275, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
HEAD = dict(head_dim=16)  # at least 16, for flex attention
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1,
              topk_group=1)  # fmt: skip
LATENT = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
              v_head_dim=16)  # fmt: skip
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
ATTENTION: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": HEAD,
    "qwen3_moe": HEAD | EXPERTS,
    "mistral": dict(sliding_window=4),
    "smollm3": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "ministral3": HEAD,
    "granite": {},
    "glm4": HEAD,
    "glm4_moe": HEAD | ROUTED,
    "gemma2": HEAD | dict(query_pre_attn_scalar=16, sliding_window=4),
    "gemma3_text": HEAD | dict(query_pre_attn_scalar=16, sliding_window=4),
    "gemma4_text": HEAD | dict(global_head_dim=16, sliding_window=4, hidden_size_per_layer_input=8,
                               vocab_size_per_layer_input=275, num_kv_shared_layers=0),
    "deepseek_v3": ROUTED | LATENT,
    "minimax_m2": HEAD | LOCAL,
    "gpt_oss": HEAD | LOCAL | dict(sliding_window=4),
    "gpt2": dict(num_key_value_heads=4),
}  # fmt: skip

LINEAR = dict(layer_types=["linear_attention", "full_attention"])
HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
DELTA = HEAD | LINEAR | HEADS
SHARED = EXPERTS | dict(shared_expert_intermediate_size=16)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16)
CONV = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | SHARED,
    "qwen3_next": DELTA | SHARED,
    "olmo_hybrid": LINEAR | HEADS | dict(linear_num_key_heads=4),
    "nemotron_h": HEAD | ROUTED | dict(
        layers_block_type=["mamba", "moe", "attention", "mlp"], mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16,
        n_groups=2, chunk_size=16, n_shared_experts=1, moe_shared_expert_intermediate_size=16, time_step_min=0.7),
    "granitemoehybrid": MAMBA | LOCAL | dict(layer_types=["mamba", "attention"], shared_intermediate_size=32,
                                             position_embedding_type="rope"),
    "lfm2": CONV,
    "lfm2_moe": CONV | EXPERTS | dict(num_dense_layers=1),
    "falcon_h1": HEAD | MAMBA | dict(mamba_d_ssm=128),  # attention and Mamba-2 in every layer
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "kimi_linear": LINEAR | LATENT | LOCAL | dict(linear_head_dim=8, linear_num_heads=2, moe_intermediate_size=16),
    "jamba": dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "zamba2": dict(n_mamba_heads=4, layers_block_type=["mamba", "hybrid"], mamba_d_state=8, mamba_ngroups=1,
                   chunk_size=16),
    "mamba": {},
    "mamba2": dict(num_heads=4, head_dim=32, state_size=8, n_groups=1, chunk_size=16),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], lru_width=64, attention_window_size=8),
    "rwkv": dict(attention_hidden_size=64, context_length=64),
    "minimax": HEAD | LINEAR | LOCAL,
    "xlstm": dict(num_heads=4),
}  # fmt: skip
SAMPLED = list(RECURRENT)[: list(RECURRENT).index("jamba")]  # with pages; the others may give a one-line error


def make_model(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = COMMON | (ATTENTION | RECURRENT).get(kind, {}) | changes  # any model_type
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def policy_of(model: Any, dtype: str) -> Policy:
    return Policy(model=model, tokenizer=None, source="tiny", device=CPU, compute_dtype=getattr(torch, dtype))


# stand-ins for kernels of a GPU ----------------------------------------------------------------------------------

# transformers' function, and the package that replaces it on a GPU
KERNELS = {"torch_chunk_gated_delta_rule": "flash-linear-attention", "mamba2_chunk_scan": "mamba-ssm"}
FUSED = "mamba2_split_conv1d_scan_combined"


def segment_kernels(code: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return replacements for functions of a model's file that run each packed sequence alone, as GPU kernels do."""
    kernels = {name: each_segment(getattr(code, name)) for name in KERNELS if hasattr(code, name)}
    return kernels | ({FUSED: lambda *args, **kwargs: None} if hasattr(code, FUSED) else {})


def each_segment(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        *args: Any,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_state: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        assert cu_seqlens is None or seq_idx is None or len(cu_seqlens) == seq_idx[0, -1] + 2
        if cu_seqlens is None and seq_idx is not None:
            cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), seq_idx[0].bincount().cumsum(0)])
        if cu_seqlens is None:
            return kernel(*args, **kwargs | ({} if initial_state is None else {"initial_state": initial_state}))
        outputs = []
        for i, own in enumerate(itertools.starmap(slice, itertools.pairwise(cu_seqlens.tolist()))):

            def cut(x: Any, own: slice = own) -> Any:
                return x[:, own] if isinstance(x, Tensor) and x.shape[:2] == (1, cu_seqlens[-1]) else x

            state = {} if initial_state is None else {"initial_state": initial_state[i : i + 1]}
            outputs.append(kernel(*map(cut, args), **{name: cut(x) for name, x in kwargs.items()}, **state))
        if isinstance(outputs[0], tuple):
            states = [state for _, state in outputs]
            return torch.cat([x for x, _ in outputs], dim=1), None if states[0] is None else torch.cat(states)
        return torch.cat(outputs, dim=1)

    return call


# rows of the table -----------------------------------------------------------------------------------------------


def row_of(kind: str, folder: Path) -> dict[str, str]:
    """Return the cells that one process can compute, and save the model."""
    save(make_model(kind), folder)
    policy = load_policy(ModelConfig(model=str(folder)), LoraConfig(r=0), CPU, with_reference=False)
    policy.compute_dtype = torch.bfloat16  # the default on a GPU, where models are compiled
    with_kernels, package = policy_with_kernels(kind)
    return {
        "packed": "yes" if policy.packs else package if with_kernels.packs else "no",
        "shared prompt": "yes" if policy.can_share else package if with_kernels.can_share else "no",
        "LoRA": train_adapter(folder),
        "4 bits": train_adapter(folder, load_in_4bit=True),
        "compile": "no" if obstacle(policy) else "yes",
        "local engine": sample(make_model(kind, initializer_range=0.2)),
    }


def policy_with_kernels(kind: str) -> tuple[Policy, str]:
    """Return a policy after a probe with stand-ins for the kernels of a GPU, and the package with these kernels."""
    policy = policy_of(make_model(kind), "float32")
    code = sys.modules[type(policy.model).__module__]
    packages = [package for name, package in KERNELS.items() if hasattr(code, name)]
    with patch.multiple(code, **segment_kernels(code)) if packages else contextlib.nullcontext():
        check_logps(policy)
    return policy, f"with {packages[0]}" if packages else "no"


def train_adapter(folder: Path, **options: Any) -> str:
    """Take one step: the adapter's weights must change, and no others."""
    try:
        policy = load_policy(ModelConfig(model=str(folder), **options), LoraConfig(r=2), CPU, with_reference=False)
    except UserError as error:
        print(f"{folder.name}: {error}", file=sys.stderr)
        return "no"
    items = [Item([5, 6, 7, 8, 9], [False] + [True] * 4), Item([7, 8, 9], [False, True, True])]
    for batch in make_batches(items, max_tokens=64, **policy.layout()):
        token_logps(policy, batch).logp.sum().backward()
    before = {name: x.clone() for name, x in policy.model.state_dict().items()}
    trained = [x for x in policy.model.parameters() if x.grad is not None]
    assert trained and all(x.grad.isfinite().all() for x in trained), folder.name
    torch.optim.SGD(trained, lr=1.0).step()
    changed = {name for name, x in policy.model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed and all("lora_" in name for name in changed), (folder.name, changed)
    stacked = [
        x for block in expert_blocks(causal_lm(policy.model)) for x in block.experts.parameters() if x.dim() == 3
    ]
    are_adapted = not options and any(".experts." in name for name in changed)  # options: 4 bits
    return "except experts" if stacked and not are_adapted else "yes"


def sample(model: Any) -> str:
    """Sample with the forward pass that the engine would choose on a GPU, and compare log-probs with a full pass."""
    engine = LocalEngine(model.eval(), make_tokenizer(), log=lambda line: print(line, file=sys.stderr))
    ways: list[Callable[[], Any]] = [lambda: TransformersForward(model, torch.float32)]
    if block_obstacle(model) is None:
        ways.insert(0, lambda: BlockForward(model, torch.float32))
    engine._ways = lambda: ways  # type: ignore[method-assign]
    prompts = ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [11, 12], list(range(20, 30)))
    requests = [Request(prompt_ids=prompt, seed=i, max_tokens=3 + 2 * i) for i, prompt in enumerate(prompts)]
    try:
        completions = engine.generate(requests, Sampling())
    except UserError as error:
        print(error, file=sys.stderr)
        return "no"
    assert gap(model, completions) < 1e-4
    if engine._uses_growing_cache:
        return "growing"
    assert engine._forward is not None
    return "blocks" if type(engine._forward) is BlockForward else "paged, states" if engine._forward.states else "paged"


def context_cells(folders: Iterable[str]) -> None:
    """Run in each of two ranks: print whether they can share the rows of each model."""

    def choose(model: Any, choice: str, device: torch.device) -> None:
        if attention.flex_obstacle(model) is None:
            model.config._attn_implementation = attention.NAME

    # As on a GPU, but with dense masks: flex attention needs CUDA.
    no_blocks = patch.object(attention, "uses_flex", lambda config: False)
    with comm.process_group(60, context=2), patch.object(attention, "_choose_kernel", choose), no_blocks:
        for folder in folders:
            try:
                cfg = ModelConfig(model=folder)
                load_policy(cfg, LoraConfig(r=0), CPU, with_reference=False, load_now=True)
                cell = "yes"
            except UserError as error:
                print(error, file=sys.stderr)
                cell = "no"
            if comm.is_main():
                print(json.dumps({"kind": Path(folder).name, "context": cell}), flush=True)


@functools.cache
def vllm_cells() -> tuple[str, dict[str, str]]:
    """Return vLLM's version, and a cell for each architecture in its registry."""
    code = (
        "import json, vllm; from vllm.model_executor.models.registry import ModelRegistry as registry\n"
        "print(json.dumps([vllm.__version__, {name: getattr(m, 'module_name', '') for name, m in "
        "registry.models.items()}]))"
    )
    done = subprocess.run([VLLM, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    version, modules = json.loads(done.stdout.splitlines()[-1])
    return version, {
        name: "via transformers" if module.endswith(".transformers") else "yes" for name, module in modules.items()
    }


def all_rows(kinds: Iterable[str], root: Path) -> dict[str, dict[str, str]]:
    rows = {}
    for kind in kinds:
        rows[kind] = row_of(kind, root / kind)
        print(kind, rows[kind], file=sys.stderr)
    done = run_ranks("-m", "tests.models", "--ranks", *(str(root / kind) for kind in rows), cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            cell = json.loads(line)
            rows[cell["kind"]]["context"] = cell["context"]
    if VLLM.exists():
        _, known = vllm_cells()
        for kind, row in rows.items():
            row["vLLM"] = known.get(type(make_model(kind)).__name__, "no")
    return rows


def render(rows: dict[str, dict[str, str]]) -> str:
    import transformers

    columns = list(next(iter(rows.values())))
    lines = [f"| model_type | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| `{kind}` | {' | '.join(row.values())} |" for kind, row in rows.items()]
    versions = f"Generated with transformers {transformers.__version__}, torch {torch.__version__}"
    if "vLLM" in columns:
        versions += f" and vLLM {vllm_cells()[0]}"
    return "\n".join(["", f"{versions}.", "", *lines, ""])


def read_rows(page: str) -> dict[str, dict[str, str]]:
    """Return the rows of a page's table."""
    table = [line.strip("| ").split(" | ") for line in between_markers(page, *MARKERS)[1].splitlines() if "|" in line]
    return {row[0].strip("`"): dict(zip(table[0][1:], row[1:], strict=True)) for row in table[2:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ranks", nargs="+")
    args = parser.parse_args()
    if args.ranks:
        return context_cells(args.ranks)
    with tempfile.TemporaryDirectory() as root:
        table = render(all_rows(ATTENTION | RECURRENT, Path(root)))
    if args.write:
        before, _, after = between_markers(args.write.read_text(encoding="utf-8"), *MARKERS)
        args.write.write_text(before + table + after, encoding="utf-8")
    else:
        print(table)


if __name__ == "__main__":
    main()
