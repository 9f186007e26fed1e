"""Replay buffer: which groups are stored, for how long, and resume."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from data.types import Prompt
from rollout.engine import Completion, Group, Sampling
from rollout.schedule.replay import Replay
from trainer.run.checkpoint import check_state

PROMPTS = [Prompt(source=f"rows:{row}", prompt=f"{row}?", ids=[row + 1]) for row in range(9)]


def group(row: int) -> Group:
    completions = [
        Completion(
            prompt_ids=[row + 1], ids=[7, i], logps=[-0.5, -1.25], finish_reason="stop", text=f"{row}.{i}",
            versions=[(3, 1), (4, 1)], mask=[True, False], columns={"num_turns": 2},
        )
        for i in range(2)
    ]  # fmt: skip
    completions[1] = replace(completions[1], branches=(completions[0],))
    return Group(10 + row, PROMPTS[row], row, "fresh", completions, values=[[1.0], [None]])


def replay(size: int = 2, max_age: int = 100, **sampling: float) -> Replay:
    options = {"sampling": Sampling(for_training=True, **sampling)}
    return Replay(size=size, max_age=max_age, seed=0, prompts=PROMPTS, **options)


def rows(buffer: Replay, step: int = 0, times: int = 200) -> Counter[int]:
    groups = [buffer.draw(step=step, number=number) for number in range(times)]
    return Counter(group.row for group in groups if group is not None)


def test_the_highest_scores_are_kept():
    buffer = replay(2)
    for row, score in ((1, 1.0), (3, 3.0), (2, 2.0)):
        buffer.add(group(row), score=score, step=0)
    assert rows(buffer).keys() == {2, 3}


def test_the_older_of_equal_scores_is_kept():
    buffer = replay(1)
    buffer.add(group(1), score=1.0, step=0)
    buffer.add(group(2), score=1.0, step=0)
    assert rows(buffer).keys() == {1}


def test_a_buffer_of_size_0_stores_and_returns_nothing():
    buffer = replay(0)
    buffer.add(group(1), score=1.0, step=0)
    assert len(buffer) == 0 and buffer.draw(step=0, number=0) is None


def test_groups_are_drawn_in_proportion_to_their_score_with_replacement():
    buffer = replay(2)
    buffer.add(group(1), score=1.0, step=0)
    buffer.add(group(2), score=3.0, step=0)
    counts = rows(buffer, times=2000)
    assert counts[2] / 2000 == pytest.approx(0.75, abs=0.03)


def test_groups_older_than_max_age_are_dropped():
    buffer = replay(2, max_age=5)
    buffer.add(group(1), score=9.0, step=0)
    buffer.add(group(2), score=1.0, step=3)
    assert rows(buffer, step=5).keys() == {1, 2}
    assert rows(buffer, step=6).keys() == {2}
    assert buffer.draw(step=9, number=0) is None and len(buffer) == 0


def test_a_drawn_group_is_unchanged_but_marked_as_replayed():
    buffer = replay()
    buffer.add(group(4), score=1.0, step=0)
    drawn = buffer.draw(step=1, number=0)
    assert drawn.replayed and not group(4).replayed
    assert replace(drawn, replayed=False) == group(4)


def test_a_resumed_buffer_draws_the_same_groups():
    buffer = replay(3)
    for row in range(5):
        buffer.add(group(row), score=1.0 + row, step=row)
    resumed = replay(3)
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    drawn = [(buffer.draw(step=6, number=n), resumed.draw(step=6, number=n)) for n in range(50)]
    assert all(a == b for a, b in drawn)
    buffer.add(group(5), score=3.5, step=6)
    resumed.add(group(5), score=3.5, step=6)
    assert rows(buffer, step=7) == rows(resumed, step=7)


def test_columns_that_json_cannot_represent_are_dropped_from_the_checkpoint():
    buffer = replay()
    odd = group(3)
    odd.completions[0].columns["seen"] = {1, 2}  # not JSON
    buffer.add(odd, score=1.0, step=0)
    check_state({"replay": buffer.state_dict()})
    resumed = replay()
    resumed.load_state_dict(buffer.state_dict())
    assert resumed.draw(step=0, number=0).completions[0].columns == {"num_turns": 2}


def test_a_smaller_buffer_after_a_resume_keeps_the_highest_scores():
    buffer = replay(3)
    for row in range(3):
        buffer.add(group(row), score=1.0 + row, step=0)
    smaller = replay(1)
    smaller.load_state_dict(buffer.state_dict())
    assert rows(smaller).keys() == {2}


def test_a_resume_that_starts_or_ends_recording_sets_drops_groups():
    """A micro-batch has sets for all of its tokens or for none."""
    limited, buffer = group(2), replay()
    sets = np.array([~7, 3], np.int32)
    branch = replace(limited.completions[0], sets=sets)
    limited.completions[:] = [branch, replace(limited.completions[1], sets=sets, branches=(branch,))]
    buffer.add(group(1), score=1.0, step=0)
    buffer.add(limited, score=1.0, step=0)
    for filters, row in (({}, 1), ({"top_p": 0.5}, 2)):
        resumed = replay(**filters)
        resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
        assert rows(resumed).keys() == {row}
