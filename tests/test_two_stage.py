"""Stages chain by run folders: the second starts from what the first exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entry import ROOT, metrics, run_ok

RECIPES = ROOT / "trainer" / "recipes"
SMALL = ["--eval-data", "task:addition:split=eval,size=24", "--per-device-train-batch-size", "32", "--save-steps", "0"]


def stages(tmp_path: Path, first: list[str], second: list[str]) -> tuple[list[dict], list[dict]]:
    run_ok(
        "--config", RECIPES / "two_stage_1_format.yaml", "--output-dir", tmp_path / "a", *SMALL, *first, cwd=tmp_path
    )
    run_ok(
        "--config", RECIPES / "two_stage_2_correct.yaml", "--model", tmp_path / "a", "--output-dir", tmp_path / "b",
        *SMALL, *second, cwd=tmp_path,
    )  # fmt: skip
    return metrics(tmp_path / "a"), metrics(tmp_path / "b")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([], [], marks=pytest.mark.slow, id="full"),
        pytest.param(
            ["--lora.r", "8", "--learning-rate", "5e-3"],
            ["--lora.r", "8", "--beta", "0.01"],
            id="lora goes on with its adapter",
        ),
    ],
)
def test_second_stage_starts_where_the_first_ended(first, second, tmp_path):
    a, b = stages(tmp_path, [*first, "--max-steps", "15"], [*second, "--max-steps", "2"])
    assert a[0]["eval/regex/mean"] < 0.1
    assert a[-1]["eval/regex/mean"] > 0.5, "15 steps are enough to learn the brackets"
    assert b[0]["eval/regex/mean"] == a[-1]["eval/regex/mean"]
    assert {"eval/last_number/mean", "eval/regex/mean"} <= b[-1].keys()
    if second:
        assert b[1]["policy/ref_kl_k3"] < 1e-6, "the reference is the first stage's adapter, not the bare base"
