"""When a session gives its engine weights. Whole runs: tests/test_smoke.py, test_extending.py, test_resume.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.entry import metrics
from trainer.__main__ import main
from trainer.rl.session import Session


class Engine:
    def __init__(self, version: int, asleep: bool) -> None:
        self.version, self.asleep, self.loaded = version, asleep, []

    def load(self, version: int) -> None:
        self.loaded.append(version)


CASES = [
    (0, 0, False, 1, []),
    (1, 0, False, 1, [1]),
    (1, 1, True, 1, [1]),
    (3, 0, False, 4, []),
    (4, 0, False, 4, [4]),
    (0, -1, False, 4, [0]),  # a server that has no weights yet, without an evaluation before the first rollout
    (2, -1, False, 8, [2]),  # the same in a run that was resumed
]


def test_weights_are_loaded_when_due_asleep_or_never_loaded():
    for step, version, asleep, interval, loaded in CASES:
        engine = Engine(version, asleep)
        session = SimpleNamespace(engine=engine, step=step, overlap=SimpleNamespace(vllm_sync_interval=interval))
        Session._sync(session)
        assert engine.loaded == loaded, (step, version, asleep, interval)


GRPO = (
    "--method", "grpo", "--model", "builtin:tiny", "--data", "task:addition:split=train,size=64", "--learning-rate",
    3e-4, "--reward-funcs", "exact_match", "--num-generations", 4, "--max-completion-length", 8, "--max-steps", 4,
)  # fmt: skip


def run(folder: Path, *argv: Any) -> list[dict[str, Any]]:
    assert main([*map(str, (*GRPO, *argv)), "--output-dir", str(folder)]) == 0
    return metrics(folder)


def test_a_moving_reference_is_the_policy_when_it_moves_all_the_way(tmp_path):
    """Then there is no KL before a step, where it is above 0 from the second step on otherwise."""
    still = run(tmp_path / "still", "--beta", 0.1)
    moving = ("--sync-ref-model", "--ref-model-mixup-alpha", 1.0, "--ref-model-sync-steps")
    with_it = run(tmp_path / "with", "--beta", 0.1, *moving, 1)
    late = run(tmp_path / "late", "--beta", 0.1, *moving, 2)
    assert [row["policy/ref_kl_k3"] > 0 for row in still] == [False, True, True, True]
    assert [row["policy/ref_kl_k3"] for row in with_it] == [0.0] * 4
    assert [row["policy/ref_kl_k3"] > 0 for row in late] == [False, True, False, True]
    in_reward = ("--beta", 0.1, "--kl-in-reward", *moving, 1)
    assert [abs(row["policy/ref_kl"]) < 1e-6 for row in run(tmp_path / "reward", *in_reward)] == [True] * 4


def check_bonus(plain: list[dict[str, Any]], held: list[dict[str, Any]], target: float) -> None:
    assert "policy/entropy_coef" not in plain[-1] and held[0]["policy/entropy_coef"] == 0
    for before, row in zip(held, held[1:], strict=False):  # the bonus acts after a step below the target alone
        assert (row["policy/entropy_coef"] > 0) <= (before["policy/entropy"] <= target), row["step"]
        assert ("loss/entropy" in row) == (row["policy/entropy_coef"] > 0)


def test_a_bonus_for_entropy_acts_below_its_target(tmp_path):
    short = ("--lr-scheduler-type", "constant", "--save-steps", 0, "--per-device-train-batch-size", 16)
    plain = run(tmp_path / "plain", *short)
    for target, acts in ((0.01, False), (5.0, True)):
        held = run(tmp_path / f"{target}", *short, "--entropy-target", target, "--entropy-coef-step", 0.05)
        check_bonus(plain, held, target)
        assert [row["policy/entropy_coef"] > 0 for row in held] == [False, *[acts] * 3]


@pytest.mark.slow
def test_entropy_is_held_at_its_target(tmp_path):
    """The demo's entropy falls as it learns; with a target it stays there, and the coefficient is what it takes."""
    longer = (
        "--data", "task:addition:split=train,size=4096", "--num-generations", 8, "--per-device-train-batch-size", 64,
        "--max-steps", 60, "--lr-scheduler-type", "constant", "--learning-rate", 2e-4, "--save-steps", 0,
    )  # fmt: skip
    target = 0.3
    falling = run(tmp_path / "falling", *longer)
    held = run(tmp_path / "held", *longer, "--entropy-target", target, "--entropy-coef-step", 0.05)
    without, with_it = (statistics.fmean(row["policy/entropy"] for row in rows[-20:]) for rows in (falling, held))
    assert without < 0.7 * target < 0.9 * target < with_it < 2 * target, (without, with_it)
    check_bonus(falling, held, target)
