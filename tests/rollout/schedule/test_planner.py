"""Planner: loader order, rerolls, resamples, curriculum and resume."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from data.loader import Loader
from data.types import Prompt
from rollout.schedule.planner import Planner, sample_seed
from trainer.run.checkpoint import check_state


def prompts(count: int) -> list[Prompt]:
    return [Prompt(source=f"rows:{i}", prompt=str(i), ids=[i + 1]) for i in range(count)]


def make_planner(count: int = 12, batch_size: int = 4, **options: Any) -> Planner:
    options = {"num_generations": 2, "seed": 3, **options}
    return Planner(Loader(prompts(count), batch_size=batch_size, seed=3), **options)


def resumed(planner: Planner, **options: Any) -> Planner:
    """Return the planner of a resumed run, restored from checkpoint JSON."""
    other = make_planner(len(planner.loader.rows), planner.batch_size, **options)
    check_state({"planner": planner.state_dict()})  # a checkpoint must accept it
    other.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    return other


def test_batches_follow_the_loader_and_seeds_the_group_number():
    planner, loader = make_planner(), Loader(prompts(12), batch_size=4, seed=3)
    for batch in range(5):
        groups, rows = planner.next_batch(), loader.next()
        assert [group.prompt for group in groups] == rows
        assert [planner.loader.rows[group.row] for group in groups] == rows
        assert [group.number for group in groups] == [4 * batch + i for i in range(4)]
        assert {group.kind for group in groups} == {"fresh"}
        planner.done()
    seeds = [request.seed for request in planner.requests(groups[1])]
    assert seeds == [sample_seed(3, 2 * groups[1].number), sample_seed(3, 2 * groups[1].number + 1)]
    assert sample_seed(0, 0) == 3153696582655363665  # must never change: resumed runs depend on it
    assert planner.epoch == loader.epoch == 1 + 8 / 12


def test_unrewarded_prompts_are_rerolled_once_at_the_end_of_a_batch():
    planner = make_planner(reroll_from=2, reroll_max_groups=2)
    first = planner.next_batch()
    for group in (first[2], first[0], first[2]):  # one group twice
        planner.reroll(group)
    planner.done()
    second = planner.next_batch()
    assert {group.kind for group in second} == {"fresh"}, "batch 1 is before reroll_from"
    planner.done()
    third = planner.next_batch()
    assert [group.kind for group in third] == ["fresh", "fresh", "reroll", "reroll"]
    assert [group.row for group in third[2:]] == [first[2].row, first[0].row], "oldest first"
    assert [group.number for group in third] == [8, 9, 10, 11]
    assert planner.requests(third[2])[0].seed != planner.requests(first[2])[0].seed
    assert planner.metrics() == {"rollout/rerolled_groups": 2.0, "rollout/reroll_waiting": 0.0}
    planner.reroll(third[2])  # a rerolled prompt is not rerolled again
    planner.done()
    fourth = planner.next_batch()
    assert {group.kind for group in fourth} == {"fresh"}
    fresh = [group.row for batch in (first, second, third, fourth) for group in batch if group.kind == "fresh"]
    assert Counter(fresh[:12]) == Counter(range(12)), "an epoch still contains every row once"


def test_a_row_is_queued_once_and_the_queue_is_limited():
    planner = make_planner(3, batch_size=6, reroll_from=100, reroll_limit=2)
    for group in planner.next_batch():  # every row twice
        planner.reroll(group)
    planner.done()
    assert planner.metrics()["rollout/reroll_waiting"] == 2.0
    off = make_planner()
    off.reroll(off.next_batch()[0])
    off.done()
    assert off.state_dict()["reroll"] == [] and off.metrics() == {}


def test_resamples_are_fresh_rows_of_the_oldest_batch():
    planner = make_planner()
    planner.next_batch()
    ahead = planner.next_batch()
    extra = planner.resample(3)
    assert [group.number for group in extra] == [8, 9, 10] and {group.kind for group in extra} == {"resample"}
    assert planner.metrics() == {"rollout/resampled_groups": 3.0}
    assert len(planner.done()) == 7 and planner.pending == ahead
    assert (planner.planned, planner.consumed) == (11, 7)


def test_a_resumed_run_first_repeats_pending_groups_with_the_same_numbers():
    planner = make_planner(reroll_from=0)
    planner.next_batch()
    planner.done()
    now, ahead = planner.next_batch(), planner.next_batch()
    extra = planner.resample(2)
    planner.reroll(now[0])  # its batch is not done, so it is sampled again
    other = resumed(planner, reroll_from=0)
    assert other.pending == now + ahead + extra and other.consumed == 4
    assert other.next_batch() == now
    assert other.resample(1) == extra[:1]
    assert other.next_batch() == ahead
    following = other.next_batch()
    assert following[0] == extra[1], "an unused resample must not be lost"
    assert [group.number for group in following[1:]] == [14, 15, 16]
    assert {group.kind for group in following[1:]} == {"fresh"}


def test_a_resume_between_batches_changes_nothing():
    options = {"reroll_from": 1, "reroll_max_groups": 1}
    planner = make_planner(**options)
    for _ in range(3):
        for group in planner.next_batch():
            planner.reroll(group)
        planner.done()
    other = resumed(planner, **options)
    for _ in range(6):
        assert planner.next_batch() == other.next_batch()
        planner.done()
        other.done()
    assert planner.state_dict() == other.state_dict()


def test_a_curriculum_selects_rows_and_sees_their_rewards():
    calls = []

    def easy_first(batch: int, rows: Any, rewards: Any) -> list[int]:
        calls.append((batch, dict(rewards)))
        return [row for row in range(len(rows)) if row < 4 * (batch + 1)]

    planner = make_planner(order=easy_first)
    first = planner.next_batch()
    assert sorted(group.row for group in first) == [0, 1, 2, 3]
    planner.observe(first[1], 0.75)
    planner.done()
    other = resumed(planner, order=easy_first)
    second = planner.next_batch()
    assert other.next_batch() == second, "a resumed run draws the same"
    assert max(group.row for group in second) < 8
    assert calls == [(0, {}), (1, {first[1].row: 0.75}), (1, {first[1].row: 0.75})]
    assert planner.epoch == 8 / 12


def test_a_small_curriculum_repeats_its_rows():
    planner = make_planner(order=lambda batch, rows, rewards: [5, 7])
    assert Counter(group.row for group in planner.next_batch()) == {5: 2, 7: 2}


def test_invalid_curriculums_and_a_changed_group_size_are_rejected():
    for rows in ([], [12], [-1], ["0"]):
        planner = make_planner(order=lambda batch, prompts, rewards, rows=rows: rows)
        with pytest.raises(ValueError, match=r"curriculum=<lambda>: .*batch 0; .*from 0 to 11"):
            planner.next_batch()
    with pytest.raises(ValueError, match=r"num_generations=4: .*2"):
        resumed(make_planner(), num_generations=4)


def test_every_group_is_consumed_or_pending_after_random_actions():
    for seed in range(60):
        play(random.Random(seed))


def play(rng: random.Random) -> None:
    """Run sixty random actions."""
    options = {"reroll_from": rng.choice([None, 0, 2]), "reroll_max_groups": rng.randint(1, 3)}
    planner = make_planner(rng.randint(3, 9), rng.randint(1, 4), **options)
    pending, consumed = [], []
    for _ in range(60):
        action = rng.choice(["next", "next", "done", "done", "resample", "reroll", "resume"])
        if action == "next" and len(pending) < 4:
            pending.append(planner.next_batch())
        elif action == "done" and pending:
            consumed += planner.done()
            pending.pop(0)
        elif action == "resample" and pending:
            planner.resample(rng.randint(0, 3))
        elif action == "reroll" and pending:
            planner.reroll(rng.choice(pending[0]))
        elif action == "resume":
            planner, pending = resumed(planner, **options), []
        numbers = [group.number for group in consumed + planner.pending]
        assert sorted(numbers) == list(range(planner.planned))
        assert planner.consumed == len(consumed)
        assert all(len(batch) == planner.batch_size for batch in pending)
    rerolled = [group.row for group in consumed if group.kind == "reroll"]
    assert bool(rerolled) <= (options["reroll_from"] is not None)


def test_batches_keep_their_size_with_fewer_rerolls_after_a_resume():
    planner = make_planner(reroll_from=1, reroll_max_groups=3)
    for group in planner.next_batch():
        planner.reroll(group)
    planner.done()
    assert [group.kind for group in planner.next_batch()] == ["fresh", "reroll", "reroll", "reroll"]
    planner.reroll(planner.pending[0])
    other = resumed(planner, reroll_from=1, reroll_max_groups=1)
    assert len(other.next_batch()) == len(other.next_batch()) == 4
