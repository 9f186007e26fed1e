"""The gradient of an optimizer step depends only on its completions, not on micro-batches.

Every layout is compared with the formula, computed with the model's forward on one completion at a time.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from data.types import Example
from rollout.engine import Completion
from tests.trainer.rl.group_cases import prepare
from trainer.config.blocks import DataConfig, ModelConfig, RunConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.methods import grpo, sft
from trainer.methods.grpo import backward
from trainer.policy.logps import Policy

VOCAB = 37
BATCH = 8
# Lengths differ a lot, so that a mean of micro-batch means would be far from the global mean.
PROMPT_LENGTHS = (3, 3, 3, 3, 6, 6, 6, 6)  # two groups with one prompt each
COMPLETION_LENGTHS = (1, 9, 4, 2, 12, 1, 7, 3)
ADVANTAGE = torch.tensor([1.3, -0.4, -1.1, 0.2, -0.7, 0.9, 0.0, 1.6])
EPSILON = 0.1
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}

TOTAL = sum(PROMPT_LENGTHS) + sum(COMPLETION_LENGTHS)
BUDGETS = {"one sequence": 1, "half": TOTAL // 2, "all": 4 * TOTAL}  # all: padded rows need more than TOTAL
ACCUMULATIONS, LAYOUTS = (1, 2, 4), ("shared", "packed", "padded")
# Nine of the 27 combinations, which cover all pairs of two settings.
CUTS = [
    pytest.param(
        BUDGETS[name], accumulation, LAYOUTS[(i + j) % 3], id=f"{name}, {accumulation}, {LAYOUTS[(i + j) % 3]}"
    )
    for i, name in enumerate(BUDGETS)
    for j, accumulation in enumerate(ACCUMULATIONS)
]
CASES = [(iterations, beta, torch.float64) for iterations in (1, 2) for beta in (0.0, 0.1)] + [(2, 0.1, torch.float32)]


@functools.cache
def make_llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # Llama's norm rounds to float32, which would make the gradients of shared and repeated prompts differ.
    for module in (model.model, *model.model.layers):
        for name in [name for name, _ in module.named_children() if "norm" in name]:
            setattr(module, name, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model


def make_policy(dtype: torch.dtype) -> Policy:
    model, reference = (copy.deepcopy(make_llama(seed)).to(dtype) for seed in (0, 1))
    reference.eval().requires_grad_(False)
    return Policy(
        model=model.train(), tokenizer=None, source="test", device=torch.device("cpu"), compute_dtype=dtype,
        reference=reference,
    )  # fmt: skip


def make_completions() -> list[Completion]:
    generator = torch.Generator().manual_seed(2)

    def ids(length: int) -> list[int]:
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    prompts = {length: ids(length) for length in PROMPT_LENGTHS}
    return [
        Completion(
            prompt_ids=prompts[p], ids=ids(c), logps=[-1.0 - 0.1 * t for t in range(c)], finish_reason="stop", text="",
            versions=[(0, c)],
        )
        for p, c in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)
    ]  # fmt: skip


def make_config(budget: int, accumulation: int, layout: str, num_iterations: int, beta: float) -> grpo.Config:
    run = RunConfig(
        per_device_train_batch_size=BATCH // accumulation, gradient_accumulation_steps=accumulation,
        max_tokens_per_micro_batch=budget, packing=layout != "padded",
    )  # fmt: skip
    return grpo.Config(
        model=ModelConfig(model="test"), data=DataConfig(data=("test",)), run=run, num_generations=4,
        num_iterations=num_iterations, temperature=0.8, share_prompt=layout == "shared",
        policy_loss=PolicyLossConfig(beta=beta, epsilon=EPSILON, skip_zero_advantage_batches=False),
        correction=CorrectionConfig(vllm_importance_sampling_correction=False),  # the engine's log-probs are invented
    )  # fmt: skip


def nudge(model: Any) -> None:
    """Move the weights like an optimizer step: ratios differ from 1, and some tokens are clipped."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def grpo_step(
    dtype: torch.dtype, *cut: Any, num_iterations: int, beta: float, attention: str = "sdpa"
) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of the first step, or with two iterations of the second."""
    policy, cfg = make_policy(dtype), make_config(*cut, num_iterations, beta)
    for model in (policy.model, policy.reference):
        model.set_attn_implementation(attention)
    batch = prepare(cfg, policy, make_completions(), ADVANTAGE.to(dtype))
    if num_iterations > 1:
        nudge(policy.model)
    metrics = backward(cfg, policy, batch).means()
    return gradient(policy.model), metrics


def slow_logps(model: Any, prompt: list[int], ids: list[int], temperature: float) -> Tensor:
    """Log-probs of a completion from the model's forward."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def grpo_by_hand(num_iterations: int, beta: float) -> tuple[Tensor, float, float]:
    """Gradient, loss and clipped fraction from the formula alone, in float64."""
    policy, completions = make_policy(torch.float64), make_completions()

    def logps(model: Any) -> Tensor:
        return torch.cat([slow_logps(model, c.prompt_ids, c.ids, 0.8) for c in completions])

    with torch.no_grad():
        ref_logp, old_logp = logps(policy.reference), logps(policy.model)
    if num_iterations > 1:
        nudge(policy.model)
    logp = logps(policy.model)
    ratio = (logp - (old_logp if num_iterations > 1 else logp.detach())).exp()
    advantage = torch.cat([a.double().expand(n) for a, n in zip(ADVANTAGE, COMPLETION_LENGTHS, strict=True)])
    clipped = (ratio > 1 + EPSILON) & (advantage > 0) | (ratio < 1 - EPSILON) & (advantage < 0)
    loss = torch.where(clipped, ratio.detach().clamp(1 - EPSILON, 1 + EPSILON), ratio) * -advantage
    d = ref_logp - logp
    total = (loss + beta * ratio * (d.exp() - d - 1)).sum() / sum(COMPLETION_LENGTHS)
    total.backward()
    return gradient(policy.model), total.item(), clipped.double().mean().item()


@pytest.fixture(scope="module")
def by_hand() -> dict[tuple[int, float], tuple[Tensor, float, float]]:
    return {case: grpo_by_hand(*case) for case in itertools.product((1, 2), (0.0, 0.1))}


@pytest.mark.parametrize(("budget", "accumulation", "layout"), CUTS)
def test_the_grpo_gradient_does_not_depend_on_micro_batches(budget, accumulation, layout, by_hand):
    for num_iterations, beta, dtype in CASES:
        want, loss, clip_frac = by_hand[num_iterations, beta]
        got, metrics = grpo_step(dtype, budget, accumulation, layout, num_iterations=num_iterations, beta=beta)
        case = (num_iterations, beta, dtype)
        assert (got.double() - want).norm() < TOLERANCE[dtype] * want.norm(), case
        assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4, abs=1e-6), case
        assert metrics["policy/clip_frac"] == pytest.approx(clip_frac), case


def test_the_grpo_gradient_is_the_same_with_eager_attention(by_hand):
    want, _, _ = by_hand[2, 0.1]
    for layout in LAYOUTS:
        got, _ = grpo_step(torch.float64, TOTAL // 2, 2, layout, num_iterations=2, beta=0.1, attention="eager")
        assert (got - want).norm() < 1e-6 * want.norm(), layout  # its softmax is rounded to float32


def test_the_cases_are_not_trivial(by_hand):
    """Layouts differ, some ratios are clipped, and the KL term changes the gradient."""
    policy, completions, batches = make_policy(torch.float32), make_completions(), {}
    for (name, budget), accumulation, layout in itertools.product(BUDGETS.items(), ACCUMULATIONS, LAYOUTS):
        batch = prepare(make_config(budget, accumulation, layout, 1, 0.0), policy, completions, ADVANTAGE)
        batches[f"{name}, {accumulation}, {layout}"] = batch.batches
    numbers = {name: len(passes) for name, passes in batches.items()}
    assert numbers["all, 1, shared"] == numbers["all, 1, packed"] == numbers["all, 1, padded"] == 1
    assert numbers["one sequence, 1, packed"] == numbers["one sequence, 4, padded"] == BATCH
    assert numbers["all, 4, packed"] == 4 and 1 < numbers["half, 1, packed"] < BATCH
    assert 1 < numbers["half, 1, shared"] <= numbers["half, 1, packed"]
    computed = {name: sum(mb.num_computed for mb in passes) for name, passes in batches.items()}
    assert computed["all, 1, shared"] == TOTAL - 3 * 3 - 3 * 6 and computed["all, 1, packed"] == TOTAL
    assert computed["all, 1, shared"] < computed["all, 4, shared"] < computed["one sequence, 1, shared"] == TOTAL
    assert 0.1 < by_hand[2, 0.0][2] < 0.9
    for a, b in itertools.combinations([want for want, _, _ in by_hand.values()], 2):
        assert (a - b).norm() > 1e-2 * a.norm()


def test_grpo_metrics_do_not_depend_on_micro_batches():
    _, want = grpo_step(torch.float64, 4 * TOTAL, 1, "packed", num_iterations=2, beta=0.1)
    for cut in ((1, 1, "packed"), (TOTAL // 2, 2, "padded"), (4 * TOTAL, 4, "packed"), (4 * TOTAL, 1, "shared")):
        _, got = grpo_step(torch.float64, *cut, num_iterations=2, beta=0.1)
        assert got == pytest.approx(want, rel=1e-5)
    assert {"loss/policy", "loss/kl", "policy/entropy", "policy/behaviour_kl", "policy/ref_kl_k3"} <= want.keys()


def test_behaviour_kl_is_0_if_engine_and_trainer_logps_are_equal():
    """Each token is compared with its own log-prob in every layout."""
    policy = make_policy(torch.float32)
    completions = []
    for c in make_completions():
        with torch.no_grad():
            logps = slow_logps(policy.model, c.prompt_ids, c.ids, 0.8).tolist()
        completions.append(Completion(**{**vars(c), "logps": logps}))
    for cut in ((1, 1, "packed"), (TOTAL // 2, 2, "padded"), (4 * TOTAL, 1, "packed"), (TOTAL // 2, 1, "shared")):
        cfg = make_config(*cut, 1, 0.0)
        batch = prepare(cfg, policy, completions, ADVANTAGE)
        assert backward(cfg, policy, batch).means()["policy/behaviour_kl"] < 1e-9


@pytest.mark.parametrize(("budget", "layout"), [(1, "packed"), (4 * TOTAL, "shared")])
def test_completions_without_tokens_do_not_change_the_gradient(budget, layout):
    cfg = make_config(budget, 1, layout, 1, 0.0)
    gradients = []
    for extra in (0, 2):
        policy, completions = make_policy(torch.float64), make_completions()
        prompt_ids = completions[-1].prompt_ids
        empty = Completion(prompt_ids=prompt_ids, ids=[], logps=[], finish_reason="stop", text="", versions=[])
        advantage = torch.cat([ADVANTAGE, torch.ones(extra)])
        backward(cfg, policy, prepare(cfg, policy, completions + [empty] * extra, advantage))
        gradients.append(gradient(policy.model))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-14, rtol=0)


def make_examples() -> list[Example]:
    """Some have two trained spans, like conversations with two assistant turns."""
    examples = []
    for number, c in enumerate(make_completions()):
        ids = [*c.prompt_ids, *c.ids]
        mask = [False] * len(c.prompt_ids) + [True] * len(c.ids)
        mask[1] = number % 2 == 0
        examples.append(Example(ids=ids, mask=mask, source=f"test:{number}"))
    return examples


def sft_step(dtype: torch.dtype, budget: int, accumulation: int, layout: str) -> tuple[Tensor, dict[str, float]]:
    run = make_config(budget, accumulation, layout, 1, 0.0).run
    cfg = sft.Config(model=ModelConfig(model="test"), data=DataConfig(data=("test",)), run=run)
    policy = make_policy(dtype)
    metrics = sft.backward(policy, sft.pack(cfg, policy, make_examples(), accumulation)).means()
    return gradient(policy.model), metrics


@pytest.fixture(scope="module")
def sft_by_hand() -> tuple[Tensor, float]:
    model, nll, count = make_policy(torch.float64).model, torch.zeros((), dtype=torch.float64), 0
    for example in make_examples():
        logps = slow_logps(model, example.ids[:1], example.ids[1:], 1.0)
        trained = torch.tensor(example.mask[1:])
        nll = nll - logps[trained].sum()
        count += sum(example.mask)
    (nll / count).backward()
    return gradient(model), (nll / count).item()


def test_the_sft_gradient_does_not_depend_on_micro_batches(sft_by_hand):
    want, nll = sft_by_hand
    cuts = [cut.values for cut in CUTS if cut.values[-1] != "shared"]  # sft has no prompts to share
    for dtype, cut in [(torch.float64, cut) for cut in cuts] + [(torch.float32, cuts[-1])]:
        got, metrics = sft_step(dtype, *cut)
        assert (got.double() - want).norm() < TOLERANCE[dtype] * want.norm(), (dtype, cut)
        assert metrics["loss/nll"] == metrics["loss/total"] == pytest.approx(nll, rel=1e-5), (dtype, cut)
