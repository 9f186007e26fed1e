"""Groups from a scripted source, with the real planner and rewards: resampling, replay, re-rolls and advantages."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.loader import Loader
from data.types import Prompt
from rollout.engine import Completion, Sampling
from rollout.rewards.table import load_rewards
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer
from rollout.schedule.replay import Replay
from trainer.config.groups import AdvantageConfig, AsyncConfig
from trainer.rl.groups import Groups, Rollout

G = 2
PROMPTS = [Prompt(source=f"rows:{row}", prompt=f"{row}?", ids=[1], columns={"answer": "yes"}) for row in range(64)]


class Scripted:
    """Completes with yes or no, one entry of `script` per group: "ny" is a group of no and yes."""

    def __init__(self, script: list[str], tokens: int = 1) -> None:
        self.script, self.tokens, self.prompts = list(script), tokens, []

    def start(self, groups: Any) -> list[Future]:
        futures = []
        for group in groups:
            self.prompts.append(group[0].prompt.source)
            words = self.script.pop(0) if self.script else "ny"
            future: Future = Future()
            future.set_result([self.completion(word) for word in words])
            futures.append(future)
        return futures

    def completion(self, word: str) -> Completion:
        return Completion(
            prompt_ids=[1], ids=[5] * self.tokens, logps=[-1.0] * self.tokens, finish_reason="stop",
            text={"y": "yes", "n": "no"}[word], versions=[],
        )  # fmt: skip

    def close(self) -> None:
        pass


def settings(advantage: AdvantageConfig | None = None, **overlap: Any) -> Any:
    return SimpleNamespace(
        overlap=AsyncConfig(**overlap), advantage=advantage or AdvantageConfig(), max_completion_length=10,
        reward=SimpleNamespace(reward_num_workers=0), policy_loss=SimpleNamespace(beta=0.5),
    )  # fmt: skip


def groups_of(cfg: Any, script: list[str], *, num_prompts: int = 3, reroll_from: int | None = None, **source: Any):
    loader = Loader(PROMPTS, batch_size=num_prompts, seed=0)
    planner = Planner(loader, num_generations=G, seed=0, reroll_from=reroll_from)
    producer = Producer(Scripted(script, **source), planner)
    size = cfg.overlap.replay_buffer_size
    replay = Replay(size=size, max_age=100, seed=0, prompts=PROMPTS, sampling=Sampling())
    return Groups(cfg, producer, load_rewards(["exact_match"]), replay)


def advantages(cfg: Any, rollout: Rollout, kl: torch.Tensor | None = None) -> torch.Tensor:  # (P, G)
    advantage = Groups(cfg, None, SimpleNamespace(names=[]), None).advantage(rollout, kl)
    return advantage.view_as(rollout.reward)


def words(rollout: Rollout) -> list[str]:
    return ["".join(c.text[0] for c in group.completions) for group in rollout.groups]


def test_a_rollout_has_the_planned_groups_in_order_with_their_rewards():
    for streaming in (False, True):
        groups = groups_of(settings(streaming_partial_batch=streaming), ["yn", "nn", "yy"])
        rollout = groups.next(0, 0)
        assert words(rollout) == ["yn", "nn", "yy"]
        assert rollout.reward.tolist() == [[1, 0], [0, 0], [1, 1]]
        assert rollout.values == [[1], [0], [0], [0], [1], [1]] and rollout.names == ["exact_match"]
        assert [p.source for p in rollout.prompts[::G]] == groups.producer.source.prompts


def test_the_curriculum_gets_the_mean_of_the_rewards_that_apply(monkeypatch):
    groups = groups_of(settings(), ["yn", "nn", "yy"])
    rows = [None, 0.5, None, None, 1.0, 0.0]
    score = groups.rewards.functions[0]
    monkeypatch.setattr(groups.rewards, "functions", [replace(score, call=lambda completions, **columns: rows)])
    seen = []
    monkeypatch.setattr(groups.producer.planner, "observe", lambda group, reward: seen.append((group.number, reward)))
    groups.next(0, 0)
    assert seen == [(0, 0.5), (2, 0.5)]


def test_streaming_does_not_change_advantages():
    for options in (
        AdvantageConfig(scale_rewards="batch"),
        AdvantageConfig(advantage_estimator="normalize_then_sum"),
    ):
        cfgs = [settings(options), settings(options, streaming_partial_batch=True)]
        together, streamed = (advantages(cfg, groups_of(cfg, ["yn", "nn", "yy"]).next(0, 0)) for cfg in cfgs)
        assert torch.equal(together, streamed) and together.abs().sum() > 0


def test_dynamic_sampling_replaces_groups_without_signal():
    groups = groups_of(settings(dynamic_sampling=True), ["nn", "yn", "yy", "yy", "ny", "yn"])
    # Round 1 replaces two groups by yy, again without signal, and ny; round 2 replaces yy.
    assert words(groups.next(0, 0)) == ["ny", "yn", "yn"]
    assert groups.producer.metrics()["rollout/resampled_groups"] == 3


def test_dynamic_sampling_and_replay_see_the_statistics_of_the_batch():
    """Alone, a group of equal rewards has no signal; in a batch with other rewards REINFORCE++ trains on it."""
    cfg = AdvantageConfig(advantage_estimator="reinforce_plus_plus")
    groups = groups_of(settings(cfg, dynamic_sampling=True), ["nn", "ny", "yy"])
    assert words(groups.next(0, 0)) == ["nn", "ny", "yy"] and len(groups.producer.source.prompts) == 3
    # All equal: all replaced. A new group has signal if the new groups differ from each other.
    groups = groups_of(settings(cfg, dynamic_sampling=True), ["nn", "nn", "nn", "yy", "yy", "nn"])
    assert words(groups.next(0, 0)) == ["yy", "yy", "nn"]
    groups = groups_of(settings(cfg, replay_buffer_size=4), ["nn", "yn", "yy", "nn", "nn", "nn"])
    assert groups.next(0, 0).metrics["rollout/replay_size"] == 3
    groups.producer.done()
    assert sum(group.replayed for group in groups.next(1, 1).groups) == 3


def test_dynamic_sampling_stops_after_its_rounds_and_keeps_the_number_of_groups():
    groups = groups_of(settings(dynamic_sampling=True, dynamic_sampling_max_rounds=2), ["nn"] * 20)
    assert words(groups.next(0, 0)) == ["nn"] * 3
    assert len(groups.producer.source.prompts) == 3 + 2 * 3


def test_replay_replaces_groups_without_signal_by_groups_of_earlier_rollouts_only():
    groups = groups_of(settings(replay_buffer_size=4), ["yn", "nn", "nn", "nn", "yy", "ny"])
    first = groups.next(0, 0)
    assert words(first) == ["yn", "nn", "nn"] and first.metrics["rollout/replay_size"] == 1
    groups.producer.done()
    second = groups.next(1, 1)
    assert words(second) == ["yn", "yn", "ny"]
    assert [group.replayed for group in second.groups] == [True, True, False]
    assert second.metrics == {"rollout/replayed_groups": 2.0, "rollout/replay_size": 2.0, "reward/trained_mean": 0.5}
    assert words(second.sampled) == ["nn", "yy", "ny"]  # reward/mean is the mean of these
    assert second.replayed_logps(recompute=True) is None
    assert second.replayed_logps(recompute=False) == [[-1.0]] * 4 + [None] * 2


def test_only_prompts_without_reward_are_planned_again():
    groups = groups_of(settings(reroll_start_fraction=0.0), ["nn", "yn", "yy"] + ["yn"] * 9, reroll_from=1)
    groups.next(0, 0)
    groups.producer.done()
    groups.next(1, 1)
    prompts = groups.producer.source.prompts
    assert prompts[5] == prompts[0] and not set(prompts[3:5]) & set(prompts[:3])


def test_the_overlong_penalty_is_an_additional_reward():
    cfg = settings(AdvantageConfig(overlong_margin=4, scale_rewards="none"))
    rollout = groups_of(cfg, ["yn"], num_prompts=1, tokens=8).next(0, 0)
    assert rollout.names == ["exact_match", "overlong"]
    assert rollout.groups[0].values == [[1.0, -0.5], [0.0, -0.5]]  # 8 tokens: half of the last 4 of 10
    assert rollout.reward.tolist() == [[0.5, -0.5]]


def rollout_of(values: list[list[list[float | None]]], weights: list[float]) -> Rollout:
    groups = [
        SimpleNamespace(values=group, completions=[None] * len(group), replayed=False, extra=None) for group in values
    ]
    return Rollout(groups, [f"r{k}" for k in range(len(weights))], torch.tensor(weights), {})


def test_gdpo_distinguishes_rewards_with_the_same_sum():
    rollout = rollout_of([[[0.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]], [1.0, 1.0])
    summed = advantages(settings(), rollout)
    apart = advantages(settings(AdvantageConfig(advantage_estimator="normalize_then_sum")), rollout)
    assert summed.abs().flatten().tolist() == pytest.approx([0.7071] * 4, abs=2e-4)
    assert apart.flatten().tolist() == pytest.approx([-0.5477, 0.5477, -1.0954, 1.0954], abs=3e-4)  # by hand


def test_leave_one_out_with_and_without_a_kl_in_the_reward():
    cfg = settings(AdvantageConfig(advantage_estimator="leave_one_out", scale_rewards="none", kl_in_reward=True))
    rollout = rollout_of([[[1.0], [0.0], [0.0], [0.5]]], [1.0])
    without = advantages(cfg, rollout, torch.zeros(4))
    assert without[0].tolist() == pytest.approx([0.8333, -0.5, -0.5, 0.1667], abs=1e-4)
    kl = torch.tensor([2.0, 0.0, 0.0, 0.0])  # beta 0.5: the first reward becomes 0
    assert advantages(cfg, rollout, kl)[0].tolist() == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0.5], abs=1e-6)
    assert rollout.reward[0, 0] == 1, "the logged reward does not include the KL"


def test_the_sum_ignores_rewards_that_do_not_apply():
    rollout = rollout_of([[[1.0, None], [0.0, 2.0], [None, None]]], [1.0, 0.5])
    assert rollout.reward[0, :2].tolist() == [1.0, 1.0] and math.isnan(rollout.reward[0, 2])
    assert advantages(settings(), rollout).tolist() == [[0.0, 0.0, 0.0]]


def test_max_rl_rejects_rewards_below_0():
    with pytest.raises(UserError, match=r"advantage_estimator=max_rl: .* 0 or above \(found -0.5\)"):
        advantages(settings(AdvantageConfig(advantage_estimator="max_rl")), rollout_of([[[1.0], [-0.5]]], [1.0]))


def test_advantages_are_nan_only_where_a_reward_is_missing():
    def fill(value):
        return lambda r: torch.where(r.reward.isnan(), math.nan, value)

    def as_rows(values):
        return lambda r: [row.tolist() for row in values(r).view(-1, 1)]

    def estimate(function, group):
        cfg = settings(AdvantageConfig(advantage_estimator=function))
        rollout = rollout_of([group], [1.0])
        rollout.groups[0].completions[:] = [Scripted([]).completion("y") for _ in group]
        return Groups(cfg, None, SimpleNamespace(names=[]), None).advantage(rollout)

    missing, full = [[1.0], [None], [0.0]], [[1.0], [0.5], [0.0]]
    assert estimate(fill(2.0), missing).tolist() == [2.0, 0.0, 2.0]
    assert estimate(as_rows(fill(2.0)), missing) == [[2.0], [0.0], [2.0]]
    for function, group, found in (
        (fill(math.nan), full, "nan for completion 0"),
        (as_rows(fill(math.nan)), full, "nan for completion 0"),
        (lambda r: r.reward - r.reward.mean(), missing, "nan for completion 0"),  # nanmean would skip the missing one
        (lambda r: r.reward / 0, full, "inf for completion 0"),
        (lambda r: None, full, "NoneType"),
        (lambda r: r.reward[0], full, "shape"),
    ):
        with pytest.raises(UserError, match=f"advantage_estimator=test_groups.py:.*lambda.*: returned {found}"):
            estimate(function, group)
    kl = torch.tensor([0.0, math.nan, 0.0])
    with pytest.raises(UserError, match="kl_in_reward"):
        advantages(settings(AdvantageConfig(kl_in_reward=True)), rollout_of([full], [1.0]), kl)


def test_a_rank_without_groups_has_empty_rewards():
    rollout = rollout_of([], [1.0, 0.5])
    assert rollout.rewards.shape == (0, 0, 2) and rollout.reward.shape == (0, 0)


def test_reward_weights_follow_their_schedule():
    groups = groups_of(settings(), ["yn"], num_prompts=1)
    groups.rewards = load_rewards(["exact_match"], ["0:1.0,10:0.0"])
    assert groups.next(5, 5).weights.tolist() == [0.5]
