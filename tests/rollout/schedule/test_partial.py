"""Partial rollouts: tokens, log-probs and versions of continued completions, limits, and what a checkpoint contains."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.engine import Completion, Request, Sampling, join_versions
from rollout.engines.local import LocalEngine
from rollout.schedule.partial import PartialProducer
from rollout.schedule.planner import Planner
from tests.rollout.schedule.test_producer import make_planner, take

SAMPLING = Sampling(max_tokens=40, for_training=True, stop_ids=tuple(range(0, 258, 17)))


def producer_of(
    engine: Any, state: str | None = None, sampling: Sampling = SAMPLING, **options: Any
) -> PartialProducer:
    planner = make_planner(num_queued=2)
    if state:
        planner.load_state_dict(json.loads(state))
    return PartialProducer(engine, sampling, planner, **options)


def change(model: Any) -> dict[str, torch.Tensor]:
    """Take a small random step; return the weights after it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("growing", [False, True])
def test_with_frozen_weights_completions_are_those_of_full_rollouts(make_model, tokenizer, monkeypatch, growing):
    model = make_model()
    if growing:
        monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    engine = LocalEngine(model, tokenizer, log=lambda _: None)
    producer, trained, continued = producer_of(engine), [], []
    for step in range(3):
        engine.load(step)
        groups = take(producer, step)
        metrics, versions = producer.metrics(), [c.versions for group in groups for c in group.completions]
        assert len(groups) == 3 and metrics["rollout/queued_groups"] == 2 == len(producer.planner.queued)
        assert metrics["rollout/staleness_max"] == step - min(version for each in versions for version, _ in each)
        assert metrics["rollout/continued_frac"] == sum(len(each) > 1 for each in versions) / 6
        continued.append(metrics["rollout/continued_frac"])
        trained += groups
        in_flight = [group.number for group in (*trained, *producer.planner.queued)]
        assert sorted(in_flight) == list(range(3 * step + 5)), "others have not been started"
        producer.done()
    assert engine._uses_growing_cache == growing and max(continued) > 0, "otherwise nothing was tested"
    full = engine.generate([request for group in trained for request in make_planner().requests(group)], SAMPLING)
    for completion, whole in zip([c for group in trained for c in group.completions], full, strict=True):
        assert (completion.ids, completion.text) == (whole.ids, whole.text)
        assert completion.finish_reason == whole.finish_reason
        torch.testing.assert_close(completion.logps, whole.logps, rtol=0, atol=1e-4)
        assert sum(count for _, count in completion.versions) == len(whole.ids)


def test_each_token_has_the_log_prob_of_the_version_that_sampled_it_and_resume_is_exact(make_model, tokenizer):
    model = make_model()
    engine, twin = (LocalEngine(model, tokenizer, log=lambda _: None) for _ in range(2))
    producer, resumed = producer_of(engine, max_staleness=2), None
    torch.manual_seed(0)
    weights, trained = [], []
    for step in range(6):
        weights.append(change(model))
        engine.load(step)
        groups = take(producer, step)
        if resumed is not None:  # by a new process with the same weights
            twin.load(step)
            assert take(resumed, step) == groups
            assert resumed.metrics() == producer.metrics() | {"time/wait_s": resumed.metrics()["time/wait_s"]}
        assert producer.metrics()["rollout/staleness_max"] <= 2
        trained += [completion for group in groups for completion in group.completions]
        producer.done()
        resumed = producer_of(twin, json.dumps(producer.planner.state_dict()), max_staleness=2)
    assert sum(len(c.versions) > 1 for c in trained) > 2 and max(len(c.versions) for c in trained) > 2
    for version, state in enumerate(weights):
        model.load_state_dict(state)
        for c, logps in zip(trained, engine.logps([(c.prompt_ids, c.ids) for c in trained], 1.0), strict=True):
            by_token = [v for v, count in c.versions for _ in range(count)]
            pairs = [(a, b) for a, b, v in zip(c.logps, logps, by_token, strict=True) if v == version]
            assert all(abs(a - b) < 1e-4 for a, b in pairs)


class Lengths:
    """An engine whose completions have a random number of tokens: their seeds."""

    def __init__(self, rng: random.Random, slowest: int) -> None:
        self.lengths = {}
        self.rng, self.slowest, self.version = rng, slowest, 0

    def generate_groups(
        self, groups: Sequence[Sequence[Request]], sampling: Sampling, *, count: int, due: Collection[int]
    ) -> list[list[Completion]]:
        assert all(group for group in groups) and (count or due)
        sampled = [[len(request.so_far.ids) for request in group] for group in groups]
        for group in groups:
            for request in group:
                length = self.rng.choice([1, 3, self.slowest])
                self.lengths.setdefault(request.seed, self.rng.randint(1, length))
        ends = [[self.lengths[request.seed] for request in group] for group in groups]

        def has_ended(g: int) -> bool:
            return sampled[g] == ends[g]

        while sum(map(has_ended, range(len(groups)))) < count or not all(map(has_ended, due)):
            for counts, limits in zip(sampled, ends, strict=True):
                counts[:] = [min(n + 1, limit) for n, limit in zip(counts, limits, strict=True)]
        return [list(map(self._completion, group, counts)) for group, counts in zip(groups, sampled, strict=True)]

    def _completion(self, request: Request, count: int) -> Completion:
        reason = "stop" if count == self.lengths[request.seed] else "unfinished"
        versions = join_versions([*request.so_far.versions, (self.version, count)], count)
        return Completion(prompt_ids=request.prompt_ids, ids=[request.seed] * count, logps=[-1.0] * count,
                          finish_reason=reason, text="", versions=versions)  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_no_group_is_lost_repeated_or_older_than_the_limit(seed):
    rng = random.Random(seed)
    batch_size, per_batch = rng.randint(1, 4), rng.randint(1, 3)
    limit = rng.choice([None, *(n * per_batch for n in (1, 2, 5))])
    options = {"batch_size": batch_size, "num_queued": rng.randint(1, batch_size), "reroll_from": rng.choice([None, 1])}
    engine, state, step, trained = Lengths(rng, rng.choice([3, 30])), None, 0, []

    def planner(**changed: int) -> Planner:
        planner = make_planner(**options | changed)
        if state is not None:
            planner.load_state_dict(state)
        return planner

    producer = PartialProducer(engine, SAMPLING, planner(), max_staleness=limit, steps_per_batch=per_batch)
    for _ in range(8):
        engine.version = step
        groups = take(producer, step)
        assert len(groups) == batch_size
        if rng.random() < 0.3:  # dynamic sampling
            groups += (more := producer.more(rng.randint(1, batch_size)))
            assert producer.metrics()["rollout/resampled_groups"] == len(more)
        for group in groups:
            assert all(c.finish_reason == "stop" and len(c.ids) == engine.lengths[c.ids[0]] for c in group.completions)
            assert [c.ids[0] for c in group.completions] == [r.seed for r in producer.planner.requests(group)]
        ages = [step - version for group in groups for c in group.completions for version, _ in c.versions]
        assert limit is None or max(ages) <= limit
        assert producer.metrics()["rollout/staleness_max"] == max(ages)
        producer.planner.reroll(groups[0])
        trained += [group.number for group in groups]
        producer.done()
        step += per_batch
        if rng.random() < 0.3:
            state = json.loads(json.dumps(producer.planner.state_dict()))
            producer = PartialProducer(engine, SAMPLING, planner(), max_staleness=limit, steps_per_batch=per_batch)
    planned = [*trained, *(group.number for group in producer.planner.pending)]
    assert sorted(planned) == list(range(producer.planner.planned)) and producer.planner.consumed == len(trained)


def test_a_resumed_run_may_lower_the_limits_or_sample_full_rollouts():
    engine = Lengths(random.Random(0), 50)
    producer = producer_of(engine)
    for step in range(4):
        engine.version = step
        take(producer, step)
        producer.done()
    queued = producer.planner.queued
    assert min(version for group in queued for c in group.completions for version, _ in c.versions) < 3
    state = json.dumps(producer.planner.state_dict())
    engine.version = 4
    lower = producer_of(engine, state, max_staleness=1)
    take(lower, 4)
    assert lower.metrics()["rollout/staleness_max"] <= 1
    full = make_planner()
    full.load_state_dict(json.loads(state))
    batch = full.next_batch()
    assert [group.number for group in batch[:2]] == [group.number for group in queued] and not batch[0].completions


def test_a_resumed_run_may_change_the_limits_of_sampling(make_model, tokenizer):
    """A queued completion without sets, or with too many tokens, starts again; others continue."""
    engine, few = LocalEngine(make_model(), tokenizer), replace(SAMPLING, top_k=4)
    for before, now in ((SAMPLING, few), (few, SAMPLING), (few, replace(few, max_tokens=5)), (few, few)):
        producer, longest = producer_of(engine, sampling=before), 0
        while longest <= 5:  # tokens of an unfinished completion
            take(producer, 0)
            producer.done()
            in_flight = [c for group in producer.planner.queued for c in group.completions]
            longest = max((len(c.ids) for c in in_flight if c.finish_reason == "unfinished"), default=0)
        resumed = producer_of(engine, json.dumps(producer.planner.state_dict()), now)
        engine.load(1)
        groups = take(resumed, 1)
        engine.load(0)
        assert before.top_k == now.top_k or resumed.metrics()["rollout/staleness_max"] == 0
        for c in (c for group in groups for c in group.completions):
            assert c.finish_reason == "stop" or len(c.ids) >= now.max_tokens
            assert (c.sets is not None and (c.sets < 0).sum() == len(c.ids)) == (now.top_k > 0)
