"""Cases of tests/ranks/main.py in which ranks share rows: short rows, sliding windows, shared prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from data.types import Example
from tests.ranks import worker
from tests.ranks.worker import Case, config, ids, make_policy, with_sets
from tests.trainer.rl.group_cases import ADVANTAGE, TOTAL, make_completions, make_config, prepare
from trainer.methods.grpo import backward
from trainer.parallel.comm import context_size
from trainer.parallel.dtensor import reshard
from trainer.policy.attention import use_sliced_attention
from trainer.policy.logps import Policy, causal_lm


def sft_rows_case(lengths: list[int], *, policy: Callable[[], Policy] = make_policy, packing: bool = True) -> Case:
    """Rows of these lengths, about 40 tokens per micro-batch."""
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
    """Layers alternate between sliding-window and full attention."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=worker.VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, initializer_range=0.4, use_sliding_window=True, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"], bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    for module in (model.model, *model.model.layers):  # Qwen's norm rounds to float32
        for child in [child for child, _ in module.named_children() if "norm" in child]:
            setattr(module, child, torch.nn.RMSNorm(8, eps=1e-6))
    if context_size() > 1:
        use_sliced_attention(model)
    return worker.to_policy(model.double())


def recomputed(policy: Policy) -> Policy:
    """Gradient checkpointing: blocks and their collectives run again in the backward pass."""
    causal_lm(policy.model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


def grpo_case(layout: str, *, lora: bool = False, max_tokens: int = 8 * TOTAL, **options: Any) -> Case:
    cfg = make_config((max_tokens, 1, layout), **options)
    rows = [
        SimpleNamespace(completion=with_sets(c) if layout == "shared" else c, advantage=a, ids=[*c.prompt_ids, *c.ids])
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
        return backward(cfg, policy, replace(batch, is_first=cfg.num_iterations == 1)).means()

    return Case(rows, lambda: make_policy(reference=True, lora=lora), step)


STATISTICS = {"beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.7}
CASES: dict[str, Callable[[], Case]] = {
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
