"""Groups kept for later: which, for how long, and the same after a resume."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from data.types import Prompt
from rollout.engine import Completion, Group
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
    return Group(10 + row, PROMPTS[row], row, "fresh", completions, values=[[1.0], [None]])


def replay(size: int = 2, max_age: int = 100) -> Replay:
    return Replay(size=size, max_age=max_age, seed=0, prompts=PROMPTS)


def rows(kept: Replay, step: int = 0, times: int = 200) -> Counter[int]:
    drawn = [kept.draw(step=step, number=number) for number in range(times)]
    return Counter(found.row for found in drawn if found is not None)


def test_scores_1_3_2_into_a_buffer_of_two_keep_3_and_2():
    kept = replay(2)
    for row, score in ((1, 1.0), (3, 3.0), (2, 2.0)):
        kept.add(group(row), score=score, step=0)
    assert rows(kept).keys() == {2, 3}


def test_of_equal_scores_the_older_stays():
    kept = replay(1)
    kept.add(group(1), score=1.0, step=0)
    kept.add(group(2), score=1.0, step=0)
    assert rows(kept).keys() == {1}


def test_a_buffer_of_size_0_keeps_nothing_and_an_empty_one_gives_nothing():
    kept = replay(0)
    kept.add(group(1), score=1.0, step=0)
    assert len(kept) == 0 and kept.draw(step=0, number=0) is None


def test_groups_are_drawn_in_proportion_to_their_score_with_replacement():
    kept = replay(2)
    kept.add(group(1), score=1.0, step=0)
    kept.add(group(2), score=3.0, step=0)
    counts = rows(kept, times=2000)
    assert counts[2] / 2000 == pytest.approx(0.75, abs=0.03)


def test_a_group_past_its_age_is_forgotten_even_if_it_was_the_best():
    kept = replay(2, max_age=5)
    kept.add(group(1), score=9.0, step=0)
    kept.add(group(2), score=1.0, step=3)
    assert rows(kept, step=5).keys() == {1, 2}
    assert rows(kept, step=6).keys() == {2}
    assert kept.draw(step=9, number=0) is None and len(kept) == 0


def test_what_is_drawn_is_as_it_was_sampled_and_says_that_it_is_replayed():
    kept = replay()
    kept.add(group(4), score=1.0, step=0)
    found = kept.draw(step=1, number=0)
    assert found.replayed and not group(4).replayed
    assert replace(found, replayed=False) == group(4)


def test_after_a_resume_it_draws_what_it_would_have_drawn():
    kept = replay(3)
    for row in range(5):
        kept.add(group(row), score=1.0 + row, step=row)
    again = replay(3)
    again.load_state_dict(json.loads(json.dumps(kept.state_dict())))
    drawn = [(kept.draw(step=6, number=n), again.draw(step=6, number=n)) for n in range(50)]
    assert all(a == b for a, b in drawn)
    kept.add(group(5), score=3.5, step=6)
    again.add(group(5), score=3.5, step=6)
    assert rows(kept, step=7) == rows(again, step=7)


def test_a_checkpoint_takes_its_state_also_where_an_environment_left_odd_things():
    kept = replay()
    odd = group(3)
    odd.completions[0].columns["seen"] = {1, 2}  # no JSON, and of no use later
    kept.add(odd, score=1.0, step=0)
    check_state({"replay": kept.state_dict()})
    again = replay()
    again.load_state_dict(kept.state_dict())
    assert again.draw(step=0, number=0).completions[0].columns == {"num_turns": 2}


def test_a_smaller_buffer_after_a_resume_keeps_the_best():
    kept = replay(3)
    for row in range(3):
        kept.add(group(row), score=1.0 + row, step=0)
    smaller = replay(1)
    smaller.load_state_dict(kept.state_dict())
    assert rows(smaller).keys() == {2}
