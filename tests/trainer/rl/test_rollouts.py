"""When the engine gets weights, moving references and entropy targets. Other runs: tests/test_smoke.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.entry import metrics
from trainer.__main__ import main
from trainer.rl.rollouts import Rollouts


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
    (0, -1, False, 4, [0]),  # a server without weights, if no evaluation precedes the first rollout
    (2, -1, False, 8, [2]),  # the same in a resumed run
]


def test_weights_are_sent_if_due_asleep_or_never_sent():
    for step, version, asleep, interval, loaded in CASES:
        engine = Engine(version, asleep)
        overlap = SimpleNamespace(vllm_sync_interval=interval)
        Rollouts._sync_weights(SimpleNamespace(engine=engine, training=SimpleNamespace(step=step), overlap=overlap))
        assert engine.loaded == loaded, (step, version, asleep, interval)


GRPO = (
    "--method", "grpo", "--model", "builtin:tiny", "--data", "task:addition:split=train,size=64", "--learning-rate",
    3e-4, "--reward-funcs", "exact_match", "--num-generations", 4, "--max-completion-length", 8, "--max-steps", 4,
)  # fmt: skip


def run(folder: Path, *argv: Any) -> list[dict[str, Any]]:
    assert main([*map(str, (*GRPO, *argv)), "--output-dir", str(folder)]) == 0
    return metrics(folder)


@pytest.mark.slow
def test_a_moving_reference_with_alpha_1_equals_the_policy(tmp_path):
    """The KL is 0 at every step after a sync; without one it is above 0 from the second step on."""
    still = run(tmp_path / "still", "--beta", 0.1)
    moving = ("--sync-ref-model", "--ref-model-mixup-alpha", 1.0, "--ref-model-sync-steps")
    synced = run(tmp_path / "with", "--beta", 0.1, *moving, 1)
    late = run(tmp_path / "late", "--beta", 0.1, *moving, 2)
    assert [row["policy/ref_kl_k3"] > 0 for row in still] == [False, True, True, True]
    assert [row["policy/ref_kl_k3"] for row in synced] == [0.0] * 4
    assert [row["policy/ref_kl_k3"] > 0 for row in late] == [False, True, False, True]
    in_reward = ("--beta", 0.1, "--kl-in-reward", *moving, 1)
    assert [abs(row["policy/ref_kl"]) < 1e-6 for row in run(tmp_path / "reward", *in_reward)] == [True] * 4


def check_bonus(plain: list[dict[str, Any]], targeted: list[dict[str, Any]], target: float) -> None:
    assert "policy/entropy_coef" not in plain[-1] and targeted[0]["policy/entropy_coef"] == 0
    for before, row in zip(targeted, targeted[1:], strict=False):  # a bonus only after a step at or below the target
        assert (row["policy/entropy_coef"] > 0) <= (before["policy/entropy"] <= target), row["step"]
        assert ("loss/entropy" in row) == (row["policy/entropy_coef"] > 0)


def test_the_entropy_bonus_is_active_below_the_target(tmp_path):
    short = ("--lr-scheduler-type", "constant", "--save-steps", 0, "--per-device-train-batch-size", 16)
    plain = run(tmp_path / "plain", *short)
    for target, is_active in ((0.01, False), (5.0, True)):
        targeted = run(tmp_path / f"{target}", *short, "--entropy-target", target, "--entropy-coef-step", 0.05)
        check_bonus(plain, targeted, target)
        assert [row["policy/entropy_coef"] > 0 for row in targeted] == [False, *[is_active] * 3]


@pytest.mark.slow
def test_entropy_stays_at_its_target(tmp_path):
    """Without a target, the demo's entropy falls as it learns."""
    longer = (
        "--data", "task:addition:split=train,size=4096", "--num-generations", 8, "--per-device-train-batch-size", 64,
        "--max-steps", 60, "--lr-scheduler-type", "constant", "--learning-rate", 2e-4, "--save-steps", 0,
    )  # fmt: skip
    target = 0.3
    falling = run(tmp_path / "falling", *longer)
    targeted = run(tmp_path / "targeted", *longer, "--entropy-target", target, "--entropy-coef-step", 0.05)
    means = [statistics.fmean(row["policy/entropy"] for row in rows[-20:]) for rows in (falling, targeted)]
    assert means[0] < 0.7 * target < 0.9 * target < means[1] < 2 * target, means
    check_bonus(falling, targeted, target)
