"""A step of structured energy-based fine-tuning against plain loops: rewards, advantages, gradients, held-out rows."""

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
    """Three groups of four as sampled by the policy: two turns, a truncated one, two equal ones."""
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
        groups.append([make_completion(policy, prompt, *own) for own in zip(ids, masks, strict=True)])
    return prompts, groups


def make_completion(policy: Policy, prompt: TargetPrompt, ids: list[int], mask: list[bool] | None) -> Completion:
    with torch.no_grad():
        logps = naive_ebft.logps(policy.model, [*prompt.ids, *ids], len(prompt.ids), TEMPERATURE).tolist()
    logps = [logp if own else 0.0 for logp, own in zip(logps, mask or [True] * len(ids), strict=True)]
    return Completion(
        prompt_ids=prompt.ids, ids=ids, logps=logps, finish_reason="length" if len(ids) == 8 else "stop", text="",
        versions=[(0, len(ids))], mask=mask,
    )  # fmt: skip


def flat(prompts: list[TargetPrompt], groups: list[list[Completion]]) -> tuple[list[TargetPrompt], list[Completion]]:
    return [prompt for prompt in prompts for _ in range(SIZE)], [one for group in groups for one in group]


def rewards_of(cfg: Any, policy: Policy) -> FeatureRewards:
    return FeatureRewards(FeatureNetwork(cfg.features, cfg.run, policy), num_generations=SIZE)


def take_step(cfg: Any, policy: Policy, prompts: list[TargetPrompt], groups: list[list[Completion]]):
    """What trainer/methods/ebft.py does with a batch, with rewards in float64. Returns metrics and advantages."""
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
    mine = [tokens[len(prompt.ids) + place] for place, own in enumerate(mask) if own]
    return sum(mine) / len(mine)


def by_hand(cfg: Any, policy: Policy, prompts: list[TargetPrompt], groups: list[list[Completion]]):
    """Loss, its two parts and advantages, in plain loops: one forward pass per sequence."""
    options = cfg.features
    policy_sum, num_made, ce_sum, num_true, found = 0.0, 0, 0.0, 0, []
    for prompt, group in zip(prompts, groups, strict=True):
        rollout = torch.stack([feature(policy, cfg, prompt, c.ids, c.mask) for c in group])
        target = feature(policy, cfg, prompt, prompt.target_ids, prompt.target_mask)
        alignment, diversity, _ = naive_ebft.reward_parts(rollout, target, options)
        found.append(naive_ebft.advantages(alignment, diversity, options.advantage_estimator))
        for c, a in zip(group, found[-1], strict=True):
            logps = naive_ebft.logps(policy.model, [*prompt.ids, *c.ids], len(prompt.ids), TEMPERATURE)
            for logp, own in zip(logps, c.mask or [True] * len(c.ids), strict=True):
                if own:
                    policy_sum, num_made = policy_sum - a * logp, num_made + 1
        logps = naive_ebft.logps(policy.model, [*prompt.ids, *prompt.target_ids], len(prompt.ids), 1.0)
        for logp, own in zip(logps, prompt.target_mask or [True] * len(prompt.target_ids), strict=True):
            if own:
                ce_sum, num_true = ce_sum - logp, num_true + 1
    ce = ce_sum / num_true
    return options.rl_coef * policy_sum / num_made + options.ce_coef * ce, ce.item(), found


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
def test_the_whole_gradient_is_that_of_plain_loops(options):
    cfg, policy, slow = make_cfg(**options), make_policy(), make_policy()
    prompts, groups = make_groups(policy)
    logged, advantage, num_tokens = take_step(cfg, policy, prompts, groups)
    loss, ce, found = by_hand(cfg, slow, prompts, groups)
    loss.backward()
    close(advantage, torch.tensor(found, dtype=torch.float64))
    close(gradients(policy.model), gradients(slow.model))
    assert gradients(slow.model).norm() > 1e-3
    if cfg.features.ce_coef:
        assert logged["loss/ce"] == pytest.approx(ce, rel=1e-6)
        assert num_tokens == sum(map(sum, LENGTHS))
    else:
        assert "loss/ce" not in logged and num_tokens == 0
    # At ratio 1 the surrogate is -A: it has the gradient of -A logp, but not its value.
    expected = cfg.features.ce_coef * ce + logged.get("loss/policy", 0.0)
    assert logged["loss/total"] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    if cfg.features.rl_coef:
        assert logged["policy/behaviour_gap"] < 1e-9


CUTS = [
    {"max_tokens": 1}, {"accumulation": 4, "max_tokens": 25}, {"accumulation": 3, "share_prompt": False},
    {"packing": False, "share_prompt": False, "max_tokens": 40},
]  # fmt: skip


def test_the_gradient_depends_neither_on_how_a_step_is_split_nor_on_the_order_of_groups():
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


def test_without_a_policy_loss_no_completion_is_computed():
    """That the gradient is that of the cross-entropy alone is the last case above."""
    cfg, policy = make_cfg(rl_coef=0.0, ce_coef=0.5), make_policy()
    prompts, groups = make_groups(policy)
    batch = prepare(cfg, policy, flat(prompts, groups)[1], torch.zeros(len(LENGTHS) * SIZE))
    assert batch.micro_batches == []
    logged, *_ = take_step(cfg, policy, prompts, groups)
    assert logged["loss/total"] == pytest.approx(0.5 * logged["loss/ce"]) and logged["policy/skipped_frac"] == 1.0


@pytest.mark.parametrize("targets", [True, False])
def test_completions_that_are_all_masked_leave_the_cross_entropy_and_losses_of_zero(targets):
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


# Rewards and advantages, as trainer/rl/groups.py passes them.


def group_batch(cfg: Any, policy: Policy, prompts: list[TargetPrompt], groups: list[list[Completion]]) -> Rollout:
    table = rewards_of(cfg, policy).submit(*flat(prompts, groups), step=1).result()
    made = [
        Group(row, prompt, row, completions=group, values=table.values[row * SIZE : (row + 1) * SIZE])
        for row, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]  # fmt: skip
    return Rollout(made, table.names, table.weights, {})


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_advantages_are_those_of_plain_loops(estimator):
    whitening = list(ADVANTAGES).index(estimator) % 2 == 0
    cfg = make_cfg(advantage_estimator=estimator, use_whitening=whitening, alignment_coef=1.2, diversity_coef=0.7)
    policy = make_policy()
    prompts, groups = make_groups(policy)
    _, _, found = by_hand(cfg, policy, prompts, groups)
    batch = group_batch(cfg, policy, prompts, groups)
    advantage = estimate(cfg, batch.for_advantage()).double()
    close(advantage, torch.tensor(found, dtype=torch.float64), 1e-5)  # tables are float32
    totals = [[a - d for a, d in group.values] for group in batch.groups]
    close(batch.reward.double(), torch.tensor(totals, dtype=torch.float64), 1e-6)


def test_the_table_has_both_parts_and_their_difference():
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
        for place in range(SIZE):
            values, total = table.values[row * SIZE + place], table.totals[row * SIZE + place]
            assert values == pytest.approx([alignment[place], diversity[place]], rel=1e-9)
            assert total == pytest.approx(alignment[place] - diversity[place], rel=1e-9)
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


# Held-out rows.


class Writer:
    """A source and an engine in one, whose completions depend on the seed of the job."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.calls = policy, []

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        self.jobs = [job for group in groups for job in group]
        return [finished([self.write(job) for job in group]) for group in groups]

    def write(self, job: Request) -> Completion:
        ids = draw(torch.Generator().manual_seed(job.seed), 1 + job.seed % 7)
        return make_completion(self.policy, job.prompt, ids, None)

    def load(self, version: int) -> None:
        self.calls.append(f"load {version}")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def poll(self) -> None: ...


def test_held_out_numbers_are_those_of_plain_loops():
    cfg, policy = make_cfg(use_whitening=True, max_tokens=20), make_policy()
    prompts, _ = make_groups(policy)
    writer = Writer(policy)
    logged = evaluate(
        cfg, policy, Rank0Rollout(policy, writer, prompts), writer, rewards_of(cfg, policy), prompts, version=7
    )
    assert writer.calls == ["load 7", "sleep"] and policy.model.training
    assert [job.seed for job in writer.jobs] == list(range(len(prompts) * SIZE))
    aligned, spread, distances, total, count = [], [], [], 0.0, 0
    for row, prompt in enumerate(prompts):
        group = [writer.write(Request.of(prompt, row * SIZE + place)) for place in range(SIZE)]
        rollout = torch.stack([feature(policy, cfg, prompt, c.ids, None) for c in group])
        target = feature(policy, cfg, prompt, prompt.target_ids, prompt.target_mask)
        alignment, diversity, distance = naive_ebft.reward_parts(rollout, target, cfg.features)
        aligned, spread, distances = aligned + alignment, spread + diversity, [*distances, distance]
        with torch.no_grad():
            logps = naive_ebft.logps(policy.model, [*prompt.ids, *prompt.target_ids], len(prompt.ids), 1.0)
        for logp, own in zip(logps.tolist(), prompt.target_mask or [True] * len(prompt.target_ids), strict=True):
            total, count = total - logp * own, count + own
    assert logged["eval/cfm"] == pytest.approx(sum(distances) / len(distances), rel=1e-9)
    assert logged["eval/nll"] == pytest.approx(total / count, rel=1e-6)
    assert logged["eval/alignment/mean"] == pytest.approx(sum(aligned) / len(aligned), rel=1e-9)
    assert logged["eval/diversity/mean"] == pytest.approx(sum(spread) / len(spread), rel=1e-9, abs=1e-12)
    difference = (sum(aligned) - sum(spread)) / len(aligned)
    assert logged["eval/reward/mean"] == pytest.approx(difference, rel=1e-9)
    lengths = [1 + seed % 7 for seed in range(len(prompts) * SIZE)]
    assert logged["eval/len_mean"] == sum(lengths) / len(lengths) and logged["eval/rows"] == 3


def test_held_out_groups_have_fixed_seeds_and_follow_the_weights():
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
    rewards = rewards_of(cfg, policy)

    def look() -> dict[str, float]:
        return evaluate(cfg, policy, Rank0Rollout(policy, engine, prompts), source, rewards, prompts, version=0)

    first = look()
    assert look() == first and policy.model.training
    assert 0 < first["eval/cfm"] and first["eval/rows"] == 2
    assert rewards.metrics() == {}  # separate from those of training
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    after = look()
    assert abs(after["eval/nll"] - first["eval/nll"]) > 1e-3 and after["eval/cfm"] != first["eval/cfm"]
    policy.model.eval()
    look()
    assert not policy.model.training
