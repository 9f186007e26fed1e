"""Groups from a scripted source, through real planning and rewards: resampling, replay, re-rolls, and advantages."""

from __future__ import annotations

import math
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.loader import Loader
from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.table import load_rewards
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer
from rollout.schedule.replay import Replay
from trainer.config.groups import AdvantageConfig, AsyncConfig
from trainer.rl.groups import GroupBatch, Groups

G = 2
PROMPTS = [Prompt(source=f"rows:{row}", prompt=f"{row}?", ids=[1], columns={"answer": "yes"}) for row in range(64)]


class Scripted:
    """Answers yes or no as told, group by group in the order they are asked for; "ny" is a group of no and yes."""

    def __init__(self, script: list[str], tokens: int = 1) -> None:
        self.script, self.tokens, self.asked = list(script), tokens, []

    def start(self, groups: Any) -> list[Future]:
        futures = []
        for group in groups:
            self.asked.append(group[0].prompt.source)
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
    replay = Replay(size=cfg.overlap.replay_buffer_size, max_age=100, seed=0, prompts=PROMPTS)
    return Groups(cfg, producer, load_rewards(["exact_match"]), replay)


def advantages(cfg: Any, batch: GroupBatch, kl: torch.Tensor | None = None) -> torch.Tensor:  # (P, G)
    return cfg.advantage.estimate(batch.for_advantage(kl, beta=cfg.policy_loss.beta))


def words(batch: GroupBatch) -> list[str]:
    return ["".join(c.text[0] for c in group.completions) for group in batch.groups]


def test_a_batch_is_what_was_planned_in_order_with_its_rewards():
    for streaming in (False, True):
        groups = groups_of(settings(streaming_partial_batch=streaming), ["yn", "nn", "yy"])
        batch = groups.next(0, 0)
        assert words(batch) == ["yn", "nn", "yy"]
        assert batch.reward.tolist() == [[1, 0], [0, 0], [1, 1]]
        assert batch.rows == [[1], [0], [0], [0], [1], [1]] and batch.names == ["exact_match"]
        assert [p.source for p in batch.prompts[::G]] == groups.producer.source.asked


def test_streaming_gives_the_advantages_of_the_whole_batch():
    script = ["yn", "nn", "yy"]
    for options in (
        AdvantageConfig(scale_rewards="batch"),
        AdvantageConfig(advantage_estimator="normalize_then_sum"),
    ):
        cfgs = [settings(options), settings(options, streaming_partial_batch=True)]
        whole, streamed = (advantages(cfg, groups_of(cfg, script).next(0, 0)) for cfg in cfgs)
        assert torch.equal(whole, streamed) and whole.abs().sum() > 0


def test_dynamic_sampling_replaces_flat_groups_until_all_teach():
    groups = groups_of(settings(dynamic_sampling=True), ["nn", "yn", "yy", "yy", "ny", "yn"])
    batch = groups.next(0, 0)
    # First round: two flat, replaced by yy (flat again) and ny; second round: the last one.
    assert words(batch) == ["ny", "yn", "yn"]
    assert batch.reward.std(dim=1).min() > 0
    assert groups.producer.metrics()["rollout/resampled_groups"] == 3


def test_dynamic_sampling_gives_up_after_its_rounds_and_keeps_the_size_of_the_batch():
    groups = groups_of(settings(dynamic_sampling=True, dynamic_sampling_max_rounds=2), ["nn"] * 20)
    assert words(groups.next(0, 0)) == ["nn"] * 3
    assert len(groups.producer.source.asked) == 3 + 2 * 3


def test_a_flat_group_is_replaced_by_one_of_an_earlier_batch_never_of_its_own():
    groups = groups_of(settings(replay_buffer_size=4), ["yn", "nn", "nn", "nn", "yy", "ny"])
    first = groups.next(0, 0)
    assert words(first) == ["yn", "nn", "nn"] and first.metrics["rollout/replay_size"] == 1
    groups.producer.done()
    second = groups.next(1, 1)
    assert words(second) == ["yn", "yn", "ny"]
    assert [group.replayed for group in second.groups] == [True, True, False]
    assert second.metrics == {"rollout/replayed_groups": 2.0, "rollout/replay_size": 2.0, "reward/trained_mean": 0.5}
    assert words(second.sampled) == ["nn", "yy", "ny"], "what was sampled is what reward/mean is about"
    assert second.old_logps(True) is None
    assert second.old_logps(False) == [[-1.0]] * 4 + [None] * 2


def test_prompts_that_earned_nothing_come_again_and_those_that_earned_do_not():
    groups = groups_of(settings(reroll_start_fraction=0.0), ["nn", "yn", "yy"] + ["yn"] * 9, reroll_from=1)
    groups.next(0, 0)
    groups.producer.done()
    groups.next(1, 1)
    asked = groups.producer.source.asked
    assert asked[5] == asked[0] and not set(asked[3:5]) & set(asked[:3])


def test_the_overlong_penalty_is_one_more_reward():
    cfg = settings(AdvantageConfig(overlong_margin=4, scale_rewards="none"))
    batch = groups_of(cfg, ["yn"], num_prompts=1, tokens=8).next(0, 0)
    assert batch.names == ["exact_match", "overlong"]
    assert batch.groups[0].values == [[1.0, -0.5], [0.0, -0.5]]  # 8 tokens: half of the last 4 of 10
    assert batch.reward.tolist() == [[0.5, -0.5]]


def batch_of(values: list[list[list[float | None]]], weights: list[float]) -> GroupBatch:
    groups = [SimpleNamespace(values=group, completions=[], replayed=False, extra=None) for group in values]
    return GroupBatch(groups, [f"r{k}" for k in range(len(weights))], weights, {})


def test_gdpo_keeps_apart_what_a_sum_makes_equal():
    # Two groups of two, rewards (form, correct): behaviours of both orders as worked out by hand.
    values = [[[0.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]]
    batch = batch_of(values, [1.0, 1.0])
    summed = advantages(settings(), batch)
    apart = advantages(settings(AdvantageConfig(advantage_estimator="normalize_then_sum")), batch)
    assert summed.abs().flatten().tolist() == pytest.approx([0.7071] * 4, abs=2e-4)
    assert apart.flatten().tolist() == pytest.approx([-0.5477, 0.5477, -1.0954, 1.0954], abs=3e-4)


def test_leave_one_out_and_a_kl_in_the_reward():
    cfg = settings(AdvantageConfig(advantage_estimator="leave_one_out", scale_rewards="none", kl_in_reward=True))
    batch = batch_of([[[1.0], [0.0], [0.0], [0.5]]], [1.0])
    none = advantages(cfg, batch, torch.zeros(4))
    assert none[0].tolist() == pytest.approx([0.8333, -0.5, -0.5, 0.1667], abs=1e-4)
    kl = torch.tensor([2.0, 0.0, 0.0, 0.0])  # beta 0.5: the first has reward 0 then
    assert advantages(cfg, batch, kl)[0].tolist() == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0.5], abs=1e-6)


def test_a_reward_that_does_not_apply_is_left_out_of_the_sum():
    batch = batch_of([[[1.0, None], [0.0, 2.0], [None, None]]], [1.0, 0.5])
    assert batch.reward[0, :2].tolist() == [1.0, 1.0] and math.isnan(batch.reward[0, 2])
    assert advantages(settings(), batch).tolist() == [[0.0, 0.0, 0.0]]


def test_a_rank_without_groups_has_rewards_of_none():
    batch = GroupBatch([], ["right", "form"], [1.0, 0.5], {})
    assert batch.values.shape == (0, 0, 2) and batch.reward.shape == (0, 0)


def test_rewards_and_planner_see_the_weights_of_their_step():
    cfg = settings()
    groups = groups_of(cfg, ["yn"], num_prompts=1)
    groups.rewards = load_rewards(["exact_match"], ["0:1.0,10:0.0"])
    assert groups.next(5, 5).weights == [0.5]
