"""Run by torchrun: one optimizer step by ranks that share rows, against the same step in one process.

    torchrun --nproc-per-node 2 -m tests.ranks.context_worker SIZE [replicate:CASE|fsdp:CASE ...]

SIZE ranks share the rows; those of tests/ranks/worker.py, and some that are about slices. Prints its JSON lines, with
the number of positions that went through the model of rank 0 ("computed") and of one process ("positions").
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from data.types import Example
from tests.ranks import worker
from tests.ranks.worker import CASES, Case, compare, config, ids, make_policy
from tests.trainer.rl.group_cases import ADVANTAGE, TOTAL, make_completions, make_config
from trainer.parallel.comm import context_size, is_main, process_group
from trainer.parallel.dtensor import reshard
from trainer.policy.attention import use_slices
from trainer.policy.logps import Policy, causal_lm
from trainer.rl.step import backward, prepare


def sft_rows_case(lengths: list[int], *, policy: Callable[[], Policy] = make_policy, packing: bool = True) -> Case:
    """Rows of these lengths, a micro-batch for about 40 tokens."""
    module, cfg = config("sft", max_tokens=40)
    cfg = replace(cfg, run=replace(cfg.run, packing=packing))
    rng = random.Random(5)
    rows = [
        Example(source=f"row {n}", ids=ids(rng, length), mask=[False] + [rng.random() < 0.8 for _ in range(length - 2)]
                + [True])
        for n, length in enumerate(lengths)
    ]  # fmt: skip

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        return module.backward(policy, module.pack(cfg, policy, rows, 1)).means()

    return Case(rows, policy, step)


def windows() -> Policy:
    """Layers with a sliding window and without, in turns."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=worker.VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, initializer_range=0.4, use_sliding_window=True, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"], bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    for module in (model.model, *model.model.layers):  # its own norm rounds to float32
        for child in [child for child, _ in module.named_children() if "norm" in child]:
            setattr(module, child, torch.nn.RMSNorm(8, eps=1e-6))
    if context_size() > 1:
        use_slices(model)
    return Policy(model=model.double().train(), tokenizer=None, source="test", device=torch.device("cpu"),
                  compute_dtype=torch.float64)  # fmt: skip


def recomputed(policy: Policy) -> Policy:
    """Blocks run again in the backward pass, with their collectives."""
    causal_lm(policy.model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


def grpo_case(layout: str, *, lora: bool = False, max_tokens: int = 8 * TOTAL, **options: Any) -> Case:
    cfg = make_config((max_tokens, 1, layout), **options)
    rows = [
        SimpleNamespace(completion=c, advantage=a, ids=[*c.prompt_ids, *c.ids])
        for c, a in zip(make_completions(), ADVANTAGE.tolist(), strict=True)
    ]

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        advantage = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
        batch = prepare(cfg, policy, [row.completion for row in rows], advantage)
        if cfg.num_iterations > 1:
            reshard(policy.model)
            with torch.no_grad():
                for p in policy.model.parameters():
                    p.mul_(1.02)
        return backward(cfg, policy, replace(batch, first=cfg.num_iterations == 1)).means()

    return Case(rows, lambda: make_policy(reference=True, lora=lora), step)


STATISTICS = {"beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.7}
MORE: dict[str, Callable[[], Case]] = {
    "sft-short": lambda: sft_rows_case([2, 3, 2, 40, 39]),  # 40, 39 and 7 positions
    "sft-tiny": lambda: sft_rows_case([2]),
    "sft-padded": lambda: sft_rows_case([9, 2, 13, 4, 5], packing=False),
    "sft-windows": lambda: sft_rows_case([23, 11, 4], policy=windows),
    "sft-recomputed": lambda: sft_rows_case([23, 11, 4], policy=lambda: recomputed(make_policy())),
    "grpo-packed": lambda: grpo_case("packed", **STATISTICS),
    "grpo-shared": lambda: grpo_case("shared", **STATISTICS),
    "grpo-first": lambda: grpo_case("shared", num_iterations=1, max_tokens=TOTAL // 3),
    "grpo-lora": lambda: grpo_case("shared", lora=True, beta=0.1, max_tokens=TOTAL // 2),
    "gspo": lambda: grpo_case("shared", importance_sampling_level="sequence", loss_type="grpo"),
}


def counted(case: Case, seen: list[int]) -> Case:
    """Positions that go through each policy it makes, added up in `seen`."""

    def policy() -> Policy:
        made = case.policy()
        number = len(seen)
        seen.append(0)

        def count(module: Any, inputs: Any, output: torch.Tensor) -> None:
            seen[number] += output.shape[:2].numel()

        causal_lm(made.model).get_input_embeddings().register_forward_hook(count)
        return made

    return case._replace(policy=policy)


def main(size: int, names: list[str]) -> None:
    both = [f"{mode}:{name}" for mode in ("replicate", "fsdp") for name in (*CASES, *MORE)]
    with process_group(60.0, size):
        for mode, name in (word.split(":") for word in names or both):
            worker.MODES["shared"] = {"mode": mode, "context": size}
            seen: list[int] = []
            result = compare(counted({**CASES, **MORE}[name](), seen), "shared")
            if is_main():
                result = {"case": name, "mode": mode, **result, "positions": seen[0], "computed": seen[1]}
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
