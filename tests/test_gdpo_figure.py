"""bench/gdpo_two_rewards.py: the figure's claims about one batch, and drawing it from its rows."""

from __future__ import annotations

import json
import statistics

import pytest

from bench import gdpo_two_rewards as bench

ROWS = [
    {"method": method, "seed": seed, "step": step, "brackets": level * step / 10, "distance": 40 - step}
    for method, level in (("grpo", 0.1), ("gdpo", 0.9))
    for seed in (0, 1)
    for step in (0, 10)
]


@pytest.fixture(scope="module")
def effects():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(bench, "NUM_PROMPTS", 8)
        return bench.effects()


def test_grpo_loses_the_brackets_and_gdpo_does_not(effects):
    """The same completions of the untrained model, with and without brackets, at the same distance."""
    medians = {method: statistics.median(effects[method]) for method in bench.METHODS}
    assert 0 < medians["grpo"] < 0.2, medians
    assert medians["gdpo"] > 1.5, medians
    assert len(effects["grpo"]) == len(effects["gdpo"]) == 8 * bench.GROUP


def test_committed_rows_show_equal_distance_and_that_grpo_forgets_the_brackets():
    path = bench.ROOT / "docs" / "gdpo_two_rewards.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = max(row["step"] for row in rows)
    for seed in (0, 1, 2):
        end = {row["method"]: row for row in rows if row["seed"] == seed and row["step"] == last}
        start = {row["method"]: row for row in rows if row["seed"] == seed and row["step"] == 0}
        assert start["grpo"]["brackets"] == start["gdpo"]["brackets"]
        assert end["grpo"]["brackets"] <= start["grpo"]["brackets"]
        assert end["gdpo"]["brackets"] > 0.8


def test_figure_is_reproducible(effects, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        bench.draw_figure(ROWS, effects, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert "answers in brackets, held out" in text and "GDPO" in text


def test_summary_averages_over_seeds():
    assert bench.summary(ROWS).splitlines() == [
        "grpo: brackets 0.00 -> 0.10, distance 40.00 -> 30.00 after 10 steps, 2 seeds",
        "gdpo: brackets 0.00 -> 0.90, distance 40.00 -> 30.00 after 10 steps, 2 seeds",
    ]
