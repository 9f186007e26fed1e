"""Sampling ahead of training: hundreds of random schedules on a simulated clock, and runs with the local engine."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.loader import Loader
from data.types import Prompt
from rollout.engine import Completion, EngineSource, Group, Request, Sampling, finished, run_groups
from rollout.engines.local import LocalEngine
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer, sync_due


class World:
    """Simulated time, an engine whose weights change, and completions of random duration. Nothing really waits."""

    def __init__(self, rng: random.Random, *, slowest: float) -> None:
        self.rng, self.slowest = rng, slowest
        self.now, self.version = 0.0, 0
        self.loads = [(0.0, 0)]  # time, version
        self.running: list[tuple[float, int, Future, list[Request], float]] = []
        self.order = itertools.count()
        self.polls = 0

    def clock(self) -> float:
        return self.now

    def load(self, version: int) -> None:
        self.version = version
        self.loads.append((self.now, version))

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        futures: list[Future] = [Future() for _ in groups]
        for group, future in zip(groups, futures, strict=True):
            end = self.now + self.rng.choice([0.0, 1.0, self.slowest]) * self.rng.random()
            heapq.heappush(self.running, (end, next(self.order), future, list(group), self.now))
        return futures

    def pass_time(self, seconds: float) -> None:
        """Finish the groups that end in this time, with the versions that were loaded while they ran."""
        until = self.now + seconds
        while self.running and self.running[0][0] <= until:
            self.now, _, future, group, started = heapq.heappop(self.running)
            first = max(i for i, (at, _) in enumerate(self.loads) if at <= started)
            spans = [(version, 1) for at, version in self.loads[first:] if at < self.now or at <= started]
            spans = [span for i, span in enumerate(spans) if i == 0 or self.rng.random() < 0.7]
            if not future.cancelled():
                future.set_result([completion_of(request, spans) for request in group])
        self.now = until

    def wait(self, futures: list[Future], *, timeout: float, return_when: str) -> tuple[set[Future], set[Future]]:
        if not any(future.done() for future in futures):
            ends = [end for end, _, future, _, _ in self.running if future in futures]
            assert ends, "deadlock: waiting for groups that are not running"
            self.pass_time(min(timeout, min(ends) - self.now))
        return {f for f in futures if f.done()}, {f for f in futures if not f.done()}

    def poll(self, step: int) -> None:
        self.polls += 1

    def close(self) -> None:
        pass


def take(producer: Producer, step: int, version: int | None = None) -> list[Group]:
    """Return all groups of the next batch, in planned order."""
    producer.begin(step, version)
    return sorted(producer.arrived(), key=lambda group: group.number)


def completion_of(request: Request, spans: list[tuple[int, int]]) -> Completion:
    count = sum(n for _, n in spans)
    return Completion(
        prompt_ids=request.prompt.ids, ids=[request.seed] * count, logps=[0.0] * count, finish_reason="stop", text="",
        versions=spans,
    )  # fmt: skip


def make_planner(num_rows: int = 7, batch_size: int = 3, num_generations: int = 2, **options: Any) -> Planner:
    prompts = [Prompt(source=f"rows:{i}", prompt=str(i), ids=[i + 1]) for i in range(num_rows)]
    loader = Loader(prompts, batch_size=batch_size, seed=0)
    return Planner(loader, num_generations=num_generations, seed=0, **options)


class Schedule:
    """One run with random settings, sometimes killed and resumed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.depth, self.iterations, self.interval = rng.randint(0, 3), rng.randint(1, 3), rng.randint(1, 3)
        self.bound = rng.choice([None, *range(self.interval - 1, 7)])
        self.total = self.iterations * rng.randint(1, 8) - rng.randint(0, self.iterations - 1)
        self.streaming, self.dynamic = rng.random() < 0.5, rng.random() < 0.4
        self.between = rng.random() < 0.5  # also load weights between the steps on one batch
        self.training_s = rng.choice([0.0, 0.1, 3.0])
        self.options = {
            "num_rows": rng.randint(4, 9), "batch_size": rng.randint(1, 3), "num_generations": rng.randint(1, 2),
            "reroll_from": rng.choice([None, 0, 2]),
        }  # fmt: skip
        self.restart(None, 0)
        self.consumed: list[Group] = []
        self.trained: list[list[int]] = []  # group numbers of each batch
        self.ages: list[int] = []
        self.most_ahead = 0

    def restart(self, state: str | None, step: int) -> None:
        """Start a new process from a checkpoint."""
        self.world = World(self.rng, slowest=self.rng.choice([1.0, 20.0]))
        self.planner = make_planner(**self.options)
        if state:
            self.planner.load_state_dict(json.loads(state))
        self.world.load(step)
        self.producer = Producer(
            self.world, self.planner, depth=self.depth, max_staleness=self.bound, steps_per_batch=self.iterations,
            last_step=self.total, poll=self.world.poll, clock=self.world.clock, wait=self.world.wait,
        )  # fmt: skip
        self.step = step

    def run(self) -> None:
        saved, counts = (json.dumps(self.planner.state_dict()), 0), (0, 0)
        while self.step < self.total:
            trained = self.batch()
            if self.rng.random() < 0.5:  # a checkpoint, possibly in the middle of a batch
                saved = json.dumps(self.planner.state_dict()), self.step
                counts = len(self.consumed), len(self.trained)
            if not trained or self.rng.random() < 0.1:
                del self.consumed[counts[0] :], self.trained[counts[1] :]
                self.restart(*saved)
            self.account()

    def batch(self) -> bool:
        """Sample and train; return False if killed on the way."""
        if sync_due(self.step, self.world.version, self.interval):
            self.world.load(self.step)
        groups = self.take()
        numbers = [group.number for group in groups]
        if self.dynamic:
            groups += self.producer.more(self.rng.randint(0, 2))
        if groups and self.rng.random() < 0.5:
            self.planner.reroll(self.rng.choice(groups))
        if self.rng.random() < 0.05:
            return False
        self.check(groups)
        for _ in range(min(self.iterations, self.total - self.step)):
            self.world.pass_time(self.training_s * self.rng.random())
            self.step += 1
            if self.between and sync_due(self.step, self.world.version, self.interval):
                self.world.load(self.step)
                self.producer.top_up(self.world.version)
        self.producer.done()
        self.consumed += groups
        self.trained.append(numbers)
        return True

    def take(self) -> list[Group]:
        if not self.streaming:
            return take(self.producer, self.step, self.world.version)
        self.producer.begin(self.step, self.world.version)
        groups = []
        for group in self.producer.arrived():
            groups.append(group)
            self.world.pass_time(0.2 * self.rng.random())  # rewards
        return sorted(groups, key=lambda group: group.number)

    def check(self, groups: list[Group]) -> None:
        ages = [self.step - min(v for v, _ in c.versions) for group in groups for c in group.completions]
        limit = self.depth * self.iterations + self.interval - 1 if self.bound is None else self.bound
        assert 0 <= min(ages) and max(ages) <= limit
        metrics = self.producer.metrics()
        assert metrics["rollout/staleness_max"] == max(ages)
        assert metrics["rollout/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        ahead = metrics.get("rollout/queued_groups", 0.0) / self.options["batch_size"]
        assert ahead == int(ahead) <= self.depth
        if self.bound is None:  # limited only by depth and the end of the run
            assert ahead == min(self.depth, -(-self.total // self.iterations) - self.step // self.iterations - 1)
        self.ages += ages
        self.most_ahead = max(self.most_ahead, int(ahead))
        for group in groups:
            seeds = [request.seed for request in self.planner.requests(group)]
            assert [c.ids[0] for c in group.completions] == seeds

    def account(self) -> None:
        """Check that every planned group is consumed or pending, exactly once."""
        numbers = [group.number for group in (*self.consumed, *self.planner.pending)]
        assert sorted(numbers) == list(range(self.planner.planned))
        assert self.planner.consumed == len(self.consumed)
        firsts = [batch[0] for batch in self.trained]
        assert firsts == sorted(firsts), "batches must come in planned order"


def test_no_schedule_exceeds_the_bound_loses_a_group_or_deadlocks():
    schedules = []
    for seed in range(400):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        assert len(schedule.trained) == -(-schedule.total // schedule.iterations)
        schedules.append(schedule)
    # The bound is reached, and with bound 0 nothing runs ahead.
    assert any(s.bound and max(s.ages) == s.bound for s in schedules)
    assert all(set(s.ages) == {0} for s in schedules if s.bound == 0 or (s.depth == 0 and s.interval == 1))
    assert max(s.most_ahead for s in schedules) == 3


def fixed(seconds: float, **options: Any) -> tuple[World, Producer]:
    """A world in which every group takes the same time."""
    world = World(random.Random(0), slowest=0.0)
    world.rng.choice, world.rng.random = lambda seq: seconds, lambda: 1.0
    planner = make_planner()
    clock = {"clock": world.clock, "wait": world.wait, "poll": world.poll}
    return world, Producer(world, planner, **{"depth": 0, **clock, **options})


def trained_for(world: World, producer: Producer, steps: int, seconds: float) -> float:
    """Return the duration of a run in which each step takes `seconds`."""
    for step in range(steps):
        world.load(step)
        take(producer, step)
        world.pass_time(seconds)
        producer.done()
    return world.now


def test_sampling_and_training_overlap_only_with_depth():
    assert trained_for(*fixed(2.0), 10, 2.0) == 10 * (2.0 + 2.0)
    assert trained_for(*fixed(2.0, depth=1, max_staleness=1), 10, 2.0) == 2.0 + 10 * 2.0
    assert trained_for(*fixed(2.0, depth=4, max_staleness=0), 10, 2.0) == 10 * (2.0 + 2.0)
    slow_sampling = trained_for(*fixed(8.0, depth=3), 10, 2.0)  # four batches in parallel
    assert slow_sampling == 8.0 + 10 * 2.0 + 2 * 2.0, slow_sampling


def test_the_engine_is_polled_twice_a_second_and_the_wait_is_measured():
    world, producer = fixed(10.0)
    take(producer, 0)
    assert (world.polls, producer.metrics()["time/wait_s"]) == (19, 10.0)


def test_new_weights_between_steps_let_the_next_batch_start():
    _, producer = fixed(1.0, depth=1, max_staleness=1, steps_per_batch=3)
    take(producer, 0)
    queued = []
    for version in range(1, 4):
        queued.append(producer.metrics()["rollout/queued_groups"])
        producer.top_up(version)
    assert queued == [0, 0, 3], "trained after step 3: version 2 may start it, version 1 may not"


def test_no_batch_starts_beyond_the_end_of_the_run():
    world, producer = fixed(1.0, depth=5, last_step=2)
    take(producer, 0)
    assert producer.metrics()["rollout/queued_groups"] == 3
    assert producer.metrics()["rollout/queued_ready_frac"] == 1.0
    producer.done()
    take(producer, 1)
    producer.done()
    assert producer.planner.pending == [] and not world.running


def test_sync_due_does_not_miss_a_multiple_of_the_interval():
    version, loads = 0, []
    for step in (0, 3, 6, 9):  # a batch every third step, an interval of two
        if sync_due(step, version, 2):
            version = step
            loads.append(step)
    assert loads == [3, 6, 9]


def test_stale_weights_are_rejected_before_sampling():
    _, producer = fixed(1.0, max_staleness=1)
    with pytest.raises(AssertionError, match="step 6 .*version 3, .*max_staleness=1"):
        take(producer, 5, version=3)
    assert producer.planner.planned == 0


class Scripted:
    """A source whose futures are finished by the test, or after a delay."""

    def __init__(self, delays: dict[int, float] | None = None) -> None:
        self.delays = delays or {}  # seconds by future index
        self.futures: list[Future] = []
        self.groups: list[list[Request]] = []
        self.closed = 0

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        new: list[Future] = [Future() for _ in groups]
        self.futures += new
        self.groups += [list(group) for group in groups]
        for i in range(len(self.futures) - len(new), len(self.futures)):
            if i in self.delays:
                threading.Timer(self.delays[i], self.finish, (i,)).start()
        return new

    def finish(self, i: int) -> None:
        self.futures[i].set_result([completion_of(request, [(0, 1)]) for request in self.groups[i]])

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("error", "kind"), [(UserError("no server"), UserError), (KeyError("x"), RuntimeError)])
def test_a_failed_group_raises_with_its_prompt(error, kind):
    source = Scripted()
    producer = Producer(source, make_planner(), depth=1)
    producer.begin(0)
    source.finish(0)
    source.futures[1].set_exception(error)
    arrived = producer.arrived()
    assert next(arrived).number == 0
    with pytest.raises(kind, match=rf"^prompt=rows:\d: .*{error}") as raised:
        next(arrived)
    assert raised.value.__cause__ is error
    producer.close()
    assert [future.cancelled() for future in source.futures] == [False, False, True, True, True, True]


def test_close_cancels_running_groups_and_they_stay_pending():
    source = Scripted()
    producer = Producer(source, make_planner(), depth=1)
    producer.begin(0)
    threading.Timer(0.05, producer.close).start()
    with pytest.raises(RuntimeError, match="CancelledError"):
        list(producer.arrived())
    producer.close()
    assert source.closed == 2 and all(future.cancelled() for future in source.futures)
    assert [group.number for group in producer.planner.pending] == list(range(6))


def test_groups_arrive_as_they_finish():
    source = Scripted({5: 0.02, 3: 0.06, 4: 0.1})
    producer = Producer(source, make_planner())
    producer.begin(0)
    arrived = producer.arrived()
    for i in (2, 0, 1):
        source.finish(i)
        assert next(arrived).number == i
    producer.done()
    assert [group.number for group in take(producer, 1, version=0)] == [3, 4, 5]
    assert producer.metrics(step=2)["rollout/staleness_max"] == 2.0, "the second step on the same batch"


def test_run_groups_keeps_the_order_and_polls_while_waiting():
    source, polls = Scripted({0: 0.8, 1: 0.1}), []
    request = Request.of(Prompt(source="rows:0", prompt="", ids=[1]), 5)
    groups = run_groups(source, [[request, request], [request]], lambda: polls.append(time.monotonic()))
    assert [len(group) for group in groups] == [2, 1] and polls


def test_run_groups_cancels_the_other_groups_if_one_fails():
    source = Scripted({1: 0.05})
    source.finish = lambda i: source.futures[i].set_exception(ValueError("no"))
    request = Request.of(Prompt(source="rows:0", prompt="", ids=[1]), 5)
    with pytest.raises(ValueError, match="^no$"):
        run_groups(source, [[request]] * 3)
    assert [future.cancelled() for future in source.futures] == [True, False, True]


@pytest.fixture
def engine(make_model: Any, tokenizer: Any) -> LocalEngine:
    return LocalEngine(make_model(), tokenizer)


@pytest.mark.parametrize(("depth", "bound"), [(0, None), (2, 0)])
def test_in_process_batches_match_generate(engine, depth, bound):
    sampling = Sampling(max_tokens=6, for_training=True)
    producer = Producer(EngineSource(engine, sampling), make_planner(), depth=depth, max_staleness=bound)
    twin = make_planner()
    for step in range(3):
        engine.load(step)
        groups = take(producer, step)
        plain = engine.generate([request for group in twin.next_batch() for request in twin.requests(group)], sampling)
        assert [completion for group in groups for completion in group.completions] == plain
        assert {version for c in plain for version, _ in c.versions} == {step}
        producer.done()


def test_in_process_batches_sampled_ahead_are_one_version_older(engine):
    engine.load(0)
    producer = Producer(EngineSource(engine, Sampling(max_tokens=3)), make_planner(), depth=1, max_staleness=1)
    ages = []
    for step in range(3):
        engine.load(step)
        take(producer, step)
        ages.append(producer.metrics()["rollout/staleness_max"])
        producer.done()
    assert ages == [0.0, 1.0, 1.0]


def test_submit_of_the_local_engine_returns_a_finished_future(engine):
    request = Request(prompt_ids=[5, 6], seed=1)
    future = engine.submit([request], Sampling(max_tokens=3))
    assert future.done() and future.result() == engine.generate([request], Sampling(max_tokens=3))
    assert finished([]).result() == [] and engine.poll() is None


def test_in_process_groups_arrive_while_others_are_being_sampled(engine):
    sampling = Sampling(max_tokens=40, for_training=True, stop_ids=tuple(range(0, 258, 3)))
    source, planner, twin = EngineSource(engine, sampling, streams=True), make_planner(), make_planner()
    producer = Producer(source, planner)
    for step in range(2):
        engine.load(step)
        producer.begin(step)
        arrived, still_sampling = [], []
        for group in producer.arrived():
            arrived.append(group)
            still_sampling.append(source._sampling is not None)
        assert still_sampling[0], "the first group arrives before the last token is sampled"
        assert torch.is_grad_enabled() and engine.model.training, "sampling must restore gradients and training mode"
        plain = engine.generate([request for group in twin.next_batch() for request in twin.requests(group)], sampling)
        arrived.sort(key=lambda group: group.number)
        assert [completion for group in arrived for completion in group.completions] == plain
        producer.done()
    engine.load(2)
    producer.begin(2)
    next(producer.arrived())
    producer.close()
    assert torch.is_grad_enabled() and engine.model.training, "even if it is stopped in between"
