"""A small policy, completions that cover all special cases, and one optimizer step on them.

Special cases: two turns with environment text in between, truncated, no tokens, no trained tokens, a missing engine
log-prob, zero advantage.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from losses.policy import POLICY_LOSSES
from rollout.engine import Completion
from tests.trainer.rl.naive_groups import Padded, naive_loss, padded, padded_logps
from trainer.config.blocks import RunConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.methods.grpo import backward, logps_at_start
from trainer.policy.logps import Policy
from trainer.rl.minibatch import MiniBatch, pack

VOCAB = 29
TEMPERATURE = 0.8
PROMPT_LENGTHS = (3, 3, 3, 3, 6, 6, 6, 6, 4, 4, 4, 4)  # three groups
LENGTHS = (1, 9, 4, 2, 12, 1, 7, 3, 5, 2, 0, 6)
ADVANTAGE = torch.tensor([1.3, -0.4, -1.1, 0.2, -0.7, 0.9, 0.0, 1.6, 0.0, 0.0, 0.8, -0.8], dtype=torch.float64)
TWO_TURNS, FAILED, TRUNCATED, NO_LOGP = 4, 11, (4, 9), (1, 2)
TOTAL = sum(PROMPT_LENGTHS) + sum(LENGTHS)
WHOLE = (8 * TOTAL, 1, "packed")
# Options low enough that some tokens are beyond them.
BINDING = {"cispo": {"cispo_cap": 1.05}, "dppo_tv": {"dppo_threshold": 0.002}, "dppo_kl": {"dppo_threshold": 2e-4}}
# Micro-batch size, accumulation, layout.
CUTS = [
    (1, 1, "packed"), (TOTAL // 2, 2, "padded"), (TOTAL // 3, 1, "shared"), (8 * TOTAL, 1, "shared"),
    (8 * TOTAL, 4, "packed"), (8 * TOTAL, 1, "padded"),
]  # fmt: skip


@functools.cache
def make_llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # Llama's own norm rounds to float32.
    for module in (model.model, *model.model.layers):
        for name in [name for name, _ in module.named_children() if "norm" in name]:
            setattr(module, name, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model.double()


@functools.cache
def moved_llama() -> Any:
    """The model after an optimizer step: ratios differ from 1, and some tokens are clipped."""
    model, generator = copy.deepcopy(make_llama(0)), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def make_policy(model: Any | None = None) -> Policy:
    reference = make_llama(1).eval().requires_grad_(False)
    return Policy(
        model=(model or make_llama(0)).train(), tokenizer=None, source="test", device=torch.device("cpu"),
        compute_dtype=torch.float64, reference=reference,
    )  # fmt: skip


@functools.cache
def make_completions() -> list[Completion]:
    generator = torch.Generator().manual_seed(2)

    def ids(length: int) -> list[int]:
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    prompts = {length: ids(length) for length in dict.fromkeys(PROMPT_LENGTHS)}
    completions = [
        Completion(
            prompt_ids=prompts[p], ids=ids(n), logps=[0.0] * n, versions=[(0, n)], text="",
            finish_reason="length" if row in TRUNCATED else "stop", mask=mask_of(row, n),
        )
        for row, (p, n) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True))
    ]  # fmt: skip
    with torch.no_grad():
        logp = padded_logps(make_llama(0), completions, TEMPERATURE).logp
    noise = 0.3 * torch.randn(logp.shape, generator=generator, dtype=torch.float64)
    logps = [row[:n].tolist() for row, n in zip(logp + noise, LENGTHS, strict=True)]
    logps[NO_LOGP[0]][NO_LOGP[1]] = math.nan
    return [replace(c, logps=row) for c, row in zip(completions, logps, strict=True)]


def mask_of(row: int, length: int) -> list[bool] | None:
    if row == TWO_TURNS:
        return [not 3 <= position < 7 for position in range(length)]
    return [False] * length if row == FAILED else None


def iterations(kind: str) -> int:
    """Steps per rollout: 2, or 1 for a loss without a ratio."""
    return 1 if kind == "reinforce" else 2


def make_config(cut: tuple[int, int, str] = WHOLE, *, num_iterations: int = 2, correction: Any = None, **loss: Any):
    budget, accumulation, layout = cut
    run = RunConfig(
        per_device_train_batch_size=len(LENGTHS) // accumulation, gradient_accumulation_steps=accumulation,
        max_tokens_per_micro_batch=budget, packing=layout != "padded",
    )  # fmt: skip
    known = POLICY_LOSSES.get(loss.get("loss_type", "dapo"), POLICY_LOSSES["dapo"])  # a custom loss has no record
    options = {"epsilon": 0.1} if "epsilon" in known.options else {}
    options |= {"loss_kwargs": BINDING[loss["loss_type"]]} if loss.get("loss_type") in BINDING else {}
    return SimpleNamespace(
        policy_loss=PolicyLossConfig(**{**options, **loss}), correction=CorrectionConfig(**(correction or {})), run=run,
        advantage=SimpleNamespace(kl_in_reward=False), temperature=TEMPERATURE, share_prompt=layout == "shared",
        num_iterations=num_iterations, max_completion_length=12,
    )  # fmt: skip


def prepare(
    cfg: Any,
    policy: Policy,
    completions: Sequence[Completion],
    advantage: Any,
    *,
    replayed_logps: Any = None,
    num_steps: int | None = None,
) -> MiniBatch:
    """Pack, and compute the log-probs that all steps share."""
    batch = pack(cfg, policy, completions, advantage, replayed_logps=replayed_logps)
    logps_at_start(cfg, policy, [batch], num_steps or cfg.num_iterations)
    return batch


def gradient(model: Any) -> Tensor:
    """Return all gradients as one vector, and reset them."""
    vector = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return vector


def step(
    cfg: Any,
    completions: Sequence[Completion] | None = None,
    advantage: Tensor = ADVANTAGE,
    **more: Any,
) -> tuple[Tensor, dict[str, float], MiniBatch]:
    """Gradient, metrics and batch of the first step, or with num_iterations > 1 of a later step."""
    policy = make_policy()
    completions = make_completions() if completions is None else completions
    policy.model.zero_grad(set_to_none=True)
    batch = prepare(cfg, policy, completions, advantage, **more)
    if cfg.num_iterations > 1:
        policy.model = moved_llama().train()
    sums = backward(cfg, policy, replace(batch, is_first=cfg.num_iterations == 1))
    return gradient(policy.model), sums.means(), batch


@functools.cache
def logps_of(which: str) -> Padded:
    """Log-probs under the initial weights, the weights after a step, or the reference, with their graph."""
    model = {"start": make_llama(0), "moved": moved_llama(), "reference": make_llama(1)}[which]
    return padded_logps(model, make_completions(), TEMPERATURE)


def by_hand(
    cfg: Any, micro_batches: Sequence[Sequence[int]] = (), old: Tensor | None = None, advantage: Tensor = ADVANTAGE
) -> tuple[Tensor, float]:
    """Gradient and loss from the formulas of naive_groups.py."""
    which = "moved" if cfg.num_iterations > 1 else "start"
    graph = logps_of(which)
    now = Padded(graph.logp.detach().requires_grad_(), graph.entropy.detach().requires_grad_(), graph.mask)
    completions = make_completions()
    loss = naive_loss(
        cfg,
        now,
        logps_of("start").logp.detach() if old is None else old,
        padded(completions, [c.logps for c in completions]),
        logps_of("reference").logp.detach(),
        advantage,
        torch.tensor([c.finish_reason == "length" for c in completions]),
        micro_batches,
    )
    slopes = torch.autograd.grad(loss, [now.logp, now.entropy], allow_unused=True)
    outputs = [(x, g) for x, g in zip([graph.logp, graph.entropy], slopes, strict=True) if g is not None]
    model = moved_llama() if which == "moved" else make_llama(0)
    gradients = torch.autograd.grad(
        [x for x, _ in outputs], list(model.parameters()), [g for _, g in outputs], retain_graph=True
    )
    return torch.cat([g.flatten() for g in gradients]), loss.item()


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).norm() <= 1e-9 * want.norm())


def micro_batch_rows(batch: MiniBatch) -> list[list[int]]:
    return [[batch.rows[i] for i in mb.batch.rows] for mb in batch.micro_batches]
