"""Structured EBFT against plain loops: rewards, advantages, gradients, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.types import TargetPrompt
from losses.ebft import ADVANTAGES
from rollout.engine import Completion, Group, Request, Sampling, finished
from rollout.engines.local import LocalEngine
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.target import TargetEpisode
from tests.trainer.ebft import naive_ebft
from tests.trainer.ebft.test_features import SIZE, draw, vector
from tests.trainer.ebft.test_strided import gradients, make_policy
from tests.trainer.rl.group_cases import prepare
from trainer.config.blocks import LoraConfig, ModelConfig, RunConfig
from trainer.config.ebft import FeatureConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.ebft.features import FeatureNetwork
from trainer.ebft.structured import FeatureRewards, add_target, estimate, evaluate
from trainer.methods.grpo import backward
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy
from trainer.rl.groups import Rollout
from trainer.rl.rank0_rollout import Rank0Rollout

TEMPERATURE = 0.7
LENGTHS = ((3, 5), (1, 4), (6, 7))  # of prompts and targets


def make_cfg(
    *, max_tokens: int = 4096, accumulation: int = 1, packing: bool = True, share_prompt: bool = True, **options: Any
) -> Any:
    run = RunConfig(
        max_tokens_per_micro_batch=max_tokens, gradient_accumulation_steps=accumulation, packing=packing,
        per_device_train_batch_size=len(LENGTHS) * SIZE // accumulation,
    )  # fmt: skip
    return SimpleNamespace(
        features=FeatureConfig(**{"feature_layers": (0.4, 0.7), **options}), run=run, temperature=TEMPERATURE,
        policy_loss=PolicyLossConfig(), correction=CorrectionConfig(), advantage=SimpleNamespace(kl_in_reward=False),
        share_prompt=share_prompt, num_iterations=1, max_completion_length=9,
    )  # fmt: skip


def make_groups(policy: Policy) -> tuple[list[TargetPrompt], list[list[Completion]]]:
    """Three groups of four sampled by the policy, with two turns, a truncated completion and two equal completions."""
    generator, prompts, groups = torch.Generator().manual_seed(9), [], []
    for row, (head, tail) in enumerate(LENGTHS):
        mask = [True, True, False, False, True, True, True] if row == 2 else None
        prompt = TargetPrompt(
            source=f"rows:{row}",
            prompt="",
            ids=draw(generator, head),
            target_ids=draw(generator, tail),
            target_mask=mask,
        )
        ids = [draw(generator, length) for length in (1, 8, tail, 5)]
        if row == 1:
            ids[2] = ids[1]
        masks = [None, [True] * 3 + [False] * 2 + [True] * 3 if row == 2 else None, None, None]
        prompts.append(prompt)
        groups.append([make_completion(policy, prompt, *both) for both in zip(ids, masks, strict=True)])
    return prompts, groups


def make_completion(policy: Policy, prompt: TargetPrompt, ids: list[int], mask: list[bool] | None) -> Completion:
    with torch.no_grad():
        logps = naive_ebft.logps(policy.model, [*prompt.ids, *ids], len(prompt.ids), TEMPERATURE).tolist()
    logps = [logp if trained else 0.0 for logp, trained in zip(logps, mask or [True] * len(ids), strict=True)]
    return Completion(
        prompt_ids=prompt.ids, ids=ids, logps=logps, finish_reason="length" if len(ids) == 8 else "stop", text="",
        versions=[(0, len(ids))], mask=mask,
    )  # fmt: skip


def flat(prompts: list[TargetPrompt], groups: list[list[Completion]]) -> tuple[list[TargetPrompt], list[Completion]]:
    return [prompt for prompt in prompts for _ in range(SIZE)], [one for group in groups for one in group]


def rewards_of(cfg: Any, policy: Policy) -> FeatureRewards:
    return FeatureRewards(FeatureNetwork(cfg.features, cfg.run, policy), num_generations=SIZE)


def take_step(cfg: Any, policy: Policy, prompts: list[TargetPrompt], groups: list[list[Completion]]):
    """One step of trainer/methods/ebft.py with float64 rewards; return metrics, advantages and target tokens."""
    measured = rewards_of(cfg, policy).measure(*flat(prompts, groups))
    values = torch.stack(measured.reward, dim=-1)  # (P, G, 2)
    advantage = estimate(cfg, SimpleNamespace(rewards=values))
    batch = prepare(cfg, policy, flat(prompts, groups)[1], advantage.flatten() * cfg.features.rl_coef)
    sums = backward(cfg, policy, batch)
    num_tokens = add_target(cfg, policy, prompts, sums)
    return sums.means(), advantage, num_tokens


def feature(policy: Policy, cfg: Any, prompt: TargetPrompt, ids: list[int], mask: list[bool] | None) -> Tensor:
    if cfg.features.embed_method != "completion_mean" or mask is None:
        return vector(policy.reference, [1, 2], cfg.features, prompt.ids, ids)
    with torch.no_grad():
        tokens = naive_ebft.token_vectors(policy.reference, [*prompt.ids, *ids], [1, 2], cfg.features.feature_norm)
    trained = [tokens[len(prompt.ids) + i] for i, is_trained in enumerate(mask) if is_trained]
    return sum(trained) / len(trained)


def by_hand(cfg: Any, policy: Policy, prompts: list[TargetPrompt], groups: list[list[Completion]]):
    """Loss, cross-entropy and advantages, with one forward pass per sequence."""
    options = cfg.features
    policy_sum, num_sampled, ce_sum, num_target, advantages = 0.0, 0, 0.0, 0, []
    for prompt, group in zip(prompts, groups, strict=True):
        rollout = torch.stack([feature(policy, cfg, prompt, c.ids, c.mask) for c in group])
        target = feature(policy, cfg, prompt, prompt.target_ids, prompt.target_mask)
        alignment, diversity, _ = naive_ebft.reward_parts(rollout, target, options)
        advantages.append(naive_ebft.advantages(alignment, diversity, options.advantage_estimator))
        for c, a in zip(group, advantages[-1], strict=True):
            logps = naive_ebft.logps(policy.model, [*prompt.ids, *c.ids], len(prompt.ids), TEMPERATURE)
            for logp, trained in zip(logps, c.mask or [True] * len(c.ids), strict=True):
                if trained:
                    policy_sum, num_sampled = policy_sum - a * logp, num_sampled + 1
        logps = naive_ebft.logps(policy.model, [*prompt.ids, *prompt.target_ids], len(prompt.ids), 1.0)
        for logp, trained in zip(logps, prompt.target_mask or [True] * len(prompt.target_ids), strict=True):
            if trained:
                ce_sum, num_target = ce_sum - logp, num_target + 1
    ce = ce_sum / num_target
    return options.rl_coef * policy_sum / num_sampled + options.ce_coef * ce, ce.item(), advantages


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# Gradients.

OPTIONS = [
    {},
    {"ce_coef": 0.03},
    {"rl_coef": 0.3, "ce_coef": 0.5, "embed_method": "completion_mean", "advantage_estimator": "rloo"},
    {"rl_coef": 2.0, "feature_norm": "layer", "embed_method": "mean_pooling", "advantage_estimator": "grpo"},
    {"use_whitening": True, "embed_method": "concat", "advantage_estimator": "reinforce", "ce_coef": 1.0},
    {"use_whitening": True, "whiten_gt": "sample", "feature_norm": "none", "diversity_coef": 0.4, "ce_coef": 0.1},
    {"alignment": "dot", "alignment_coef": 1.7},
    {"rl_coef": 0.0, "ce_coef": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "default")
def test_gradients_match_plain_loops(options):
    cfg, policy, slow = make_cfg(**options), make_policy(), make_policy()
    prompts, groups = make_groups(policy)
    logged, advantage, num_tokens = take_step(cfg, policy, prompts, groups)
    loss, ce, want = by_hand(cfg, slow, prompts, groups)
    loss.backward()
    close(advantage, torch.tensor(want, dtype=torch.float64))
    close(gradients(policy.model), gradients(slow.model))
    assert gradients(slow.model).norm() > 1e-3
    if cfg.features.ce_coef:
        assert logged["loss/ce"] == pytest.approx(ce, rel=1e-6)
        assert num_tokens == sum(map(sum, LENGTHS))
    else:
        assert "loss/ce" not in logged and num_tokens == 0
    # At ratio 1 the policy loss is -A, with the gradient of -A logp but not its value.
    expected = cfg.features.ce_coef * ce + logged.get("loss/policy", 0.0)
    assert logged["loss/total"] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    if cfg.features.rl_coef:
        assert logged["policy/behaviour_gap"] < 1e-9


CUTS = [
    {"max_tokens": 1}, {"accumulation": 4, "max_tokens": 25}, {"accumulation": 3, "share_prompt": False},
    {"packing": False, "share_prompt": False, "max_tokens": 40},
]  # fmt: skip


def test_the_gradient_does_not_depend_on_micro_batches_or_group_order():
    options, order = {"ce_coef": 0.2, "embed_method": "completion_mean"}, [2, 0, 1]
    expected = make_policy()
    prompts, groups = make_groups(expected)
    want, there, _ = take_step(make_cfg(**options), expected, prompts, groups)
    prompts, groups = [prompts[i] for i in order], [groups[i] for i in order]
    for cut in CUTS:
        policy = make_policy()
        got, back, _ = take_step(make_cfg(**cut, **options), policy, prompts, groups)
        close(back, there[order], 1e-12)
        close(gradients(policy.model), gradients(expected.model), 1e-12)
        for name in ("loss/total", "loss/ce", "loss/policy", "policy/entropy"):
            assert got[name] == pytest.approx(want[name], rel=1e-6, abs=1e-9), (cut, name)


def test_without_a_policy_loss_completions_are_skipped():
    cfg, policy = make_cfg(rl_coef=0.0, ce_coef=0.5), make_policy()
    prompts, groups = make_groups(policy)
    batch = prepare(cfg, policy, flat(prompts, groups)[1], torch.zeros(len(LENGTHS) * SIZE))
    assert not batch.micro_batches
    logged, *_ = take_step(cfg, policy, prompts, groups)
    assert logged["loss/total"] == pytest.approx(0.5 * logged["loss/ce"]) and logged["policy/skipped_frac"] == 1.0


@pytest.mark.parametrize("targets", [True, False])
def test_masked_completions_add_only_the_cross_entropy(targets):
    """Truncated completions are masked; if the targets have no trained token either, nothing is trained."""
    cfg, policy = make_cfg(ce_coef=0.5), make_policy()
    cfg.policy_loss = PolicyLossConfig(mask_truncated_completions=True)
    prompts, groups = make_groups(policy)
    if not targets:
        prompts = [replace(prompt, target_mask=[False] * len(prompt.target_ids)) for prompt in prompts]
    cut = [[replace(one, finish_reason="length") for one in group] for group in groups]
    batch = prepare(cfg, policy, flat(prompts, cut)[1], torch.ones(len(LENGTHS) * SIZE))
    sums = backward(cfg, policy, batch)
    add_target(cfg, policy, prompts, sums)
    logged, (_, ce, _) = sums.means(), by_hand(make_cfg(ce_coef=0.5), make_policy(), *make_groups(policy))
    ce = ce if targets else 0.0
    losses = {name: value for name, value in logged.items() if name.startswith("loss/")}
    assert losses == pytest.approx({"loss/policy": 0.0, "loss/ce": ce, "loss/total": 0.5 * ce})


# Rewards and advantages.


def rollout_of(cfg: Any, policy: Policy, prompts: list[TargetPrompt], groups: list[list[Completion]]) -> Rollout:
    table = rewards_of(cfg, policy).submit(*flat(prompts, groups), step=1).result()
    rewarded = [
        Group(row, prompt, row, completions=group, values=table.values[row * SIZE : (row + 1) * SIZE])
        for row, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]
    return Rollout(rewarded, table.names, torch.tensor(table.weights), {})


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_advantages_match_plain_loops(estimator):
    whitening = list(ADVANTAGES).index(estimator) % 2 == 0
    cfg = make_cfg(advantage_estimator=estimator, use_whitening=whitening, alignment_coef=1.2, diversity_coef=0.7)
    policy = make_policy()
    prompts, groups = make_groups(policy)
    _, _, want = by_hand(cfg, policy, prompts, groups)
    rollout = rollout_of(cfg, policy, prompts, groups)
    advantage = estimate(cfg, rollout).double()
    close(advantage, torch.tensor(want, dtype=torch.float64), 1e-5)  # rewards are float32
    totals = [[a - d for a, d in group.values] for group in rollout.groups]
    close(rollout.reward.double(), torch.tensor(totals, dtype=torch.float64), 1e-6)


def test_the_reward_table_has_alignment_diversity_and_their_difference():
    cfg, policy = make_cfg(alignment_coef=1.2, diversity_coef=0.7), make_policy()
    prompts, groups = make_groups(policy)
    rewards = rewards_of(cfg, policy)
    assert rewards.feature_metrics() == {}
    future = rewards.submit(*flat(prompts, groups), step=1)
    assert isinstance(future, Future) and future.done()
    table = future.result()
    assert table.names == ["alignment", "diversity"] and table.weights == [1.0, -1.0] and table.failed == 0
    distances = []
    for row, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        rollout = torch.stack([feature(policy, cfg, prompt, c.ids, c.mask) for c in group])
        target = feature(policy, cfg, prompt, prompt.target_ids, prompt.target_mask)
        alignment, diversity, distance = naive_ebft.reward_parts(rollout, target, cfg.features)
        spread = float(rollout.var(dim=0, correction=1).sum())
        distances.append((distance, distance - spread / SIZE))
        for i in range(SIZE):
            values, total = table.values[row * SIZE + i], table.totals[row * SIZE + i]
            assert values == pytest.approx([alignment[i], diversity[i]], rel=1e-9)
            assert total == pytest.approx(alignment[i] - diversity[i], rel=1e-9)
    mean = [sum(column) / len(distances) for column in zip(*distances, strict=True)]
    logged = rewards.feature_metrics()
    assert logged == pytest.approx({"reward/cfm": mean[0], "reward/cfm_unbiased": mean[1]}, rel=1e-9)
    assert rewards.feature_metrics() == {}


def test_metrics_cover_everything_sampled_since_the_last_call():
    cfg, policy = make_cfg(), make_policy()
    prompts, groups = make_groups(policy)
    whole, parts = rewards_of(cfg, policy), rewards_of(cfg, policy)
    whole.submit(*flat(prompts, groups), step=1)
    parts.submit(*flat(prompts[:1], groups[:1]), step=1)  # as groups arrive, one by one
    parts.submit(*flat(prompts[1:], groups[1:]), step=1)
    assert parts.feature_metrics() == pytest.approx(whole.feature_metrics(), rel=1e-9)


# Evaluation.


class Writer:
    """Source and engine whose completions depend only on the seed of the request."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.calls = policy, []

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        self.requests = [request for group in groups for request in group]
        return [finished([self.write(request) for request in group]) for group in groups]

    def write(self, request: Request) -> Completion:
        ids = draw(torch.Generator().manual_seed(request.seed), 1 + request.seed % 7)
        return make_completion(self.policy, request.prompt, ids, None)

    def load(self, version: int) -> None:
        self.calls.append(f"load {version}")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def poll(self) -> None: ...


def rollouts_of(cfg: Any, policy: Policy, prompts: list[TargetPrompt], engine: Any, source: Any, step: int) -> Any:
    return SimpleNamespace(
        rewards=rewards_of(cfg, policy), held_out=prompts, engine=engine, held_out_source=source,
        training=SimpleNamespace(step=step), rank0=Rank0Rollout(policy, engine, prompts),
    )  # fmt: skip


@torch.no_grad()
def test_evaluation_metrics_match_plain_loops():
    cfg, policy = make_cfg(use_whitening=True, max_tokens=20), make_policy()
    prompts, _ = make_groups(policy)
    writer = Writer(policy)
    logged = evaluate(cfg, policy, rollouts_of(cfg, policy, prompts, writer, writer, 7))
    assert writer.calls == ["load 7", "sleep"]
    assert [request.seed for request in writer.requests] == list(range(len(prompts) * SIZE))
    aligned, spread, distances, total, count = [], [], [], 0.0, 0
    for row, prompt in enumerate(prompts):
        group = [writer.write(Request.of(prompt, row * SIZE + i)) for i in range(SIZE)]
        rollout = torch.stack([feature(policy, cfg, prompt, c.ids, None) for c in group])
        target = feature(policy, cfg, prompt, prompt.target_ids, prompt.target_mask)
        alignment, diversity, distance = naive_ebft.reward_parts(rollout, target, cfg.features)
        aligned, spread, distances = aligned + alignment, spread + diversity, [*distances, distance]
        logps = naive_ebft.logps(policy.model, [*prompt.ids, *prompt.target_ids], len(prompt.ids), 1.0)
        for logp, trained in zip(logps.tolist(), prompt.target_mask or [True] * len(prompt.target_ids), strict=True):
            total, count = total - logp * trained, count + trained
    assert logged["eval/cfm"] == pytest.approx(sum(distances) / len(distances), rel=1e-9)
    assert logged["eval/nll"] == pytest.approx(total / count, rel=1e-6)
    assert logged["eval/alignment/mean"] == pytest.approx(sum(aligned) / len(aligned), rel=1e-9)
    assert logged["eval/diversity/mean"] == pytest.approx(sum(spread) / len(spread), rel=1e-9, abs=1e-12)
    difference = (sum(aligned) - sum(spread)) / len(aligned)
    assert logged["eval/reward/mean"] == pytest.approx(difference, rel=1e-9)
    lengths = [1 + seed % 7 for seed in range(len(prompts) * SIZE)]
    assert logged["eval/len_mean"] == sum(lengths) / len(lengths) and logged["eval/rows"] == 3


@torch.no_grad()
def test_evaluation_has_fixed_seeds_and_uses_the_current_weights():
    policy = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), torch.device("cpu"), with_reference=True)
    prompts = []
    for row, (text, answer) in enumerate((("17+25=", "42"), ("8+3=", "11"))):
        ids, target = (policy.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, answer))
        target = [*target, policy.tokenizer.eos_token_id]
        prompts.append(TargetPrompt(source=f"rows:{row}", prompt=text, ids=ids, target_ids=target))
    cfg = make_cfg()
    engine = LocalEngine(policy.model, policy.tokenizer)
    sampling = Sampling(temperature=1.0, max_tokens=6, stop_ids=(policy.tokenizer.eos_token_id,), for_training=True)
    source = EpisodeSource(engine, sampling, TargetEpisode(policy.tokenizer, gt_length_multiplier=1.5))
    rollouts = rollouts_of(cfg, policy, prompts, engine, source, 0)
    first = evaluate(cfg, policy, rollouts)
    assert evaluate(cfg, policy, rollouts) == first
    assert 0 < first["eval/cfm"] and first["eval/rows"] == 2
    assert rollouts.rewards.feature_metrics() == {}  # only training counts
    for p in policy.model.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    after = evaluate(cfg, policy, rollouts)
    assert abs(after["eval/nll"] - first["eval/nll"]) > 1e-3 and after["eval/cfm"] != first["eval/cfm"]
