"""A whole run of structured energy-based fine-tuning on a server, its rollouts ahead of training."""

from __future__ import annotations

from rollout.servers.command import TOKEN
from tests.entry import metrics
from tests.rollout.vllm.test_runs import log_of, start

STEPS, DEPTH = 4, 2
FLAGS = (
    "--method", "ebft", "--max-steps", STEPS, "--async-prefetch", "--prefetch-depth", DEPTH, "--ce-coef", 0.03,
    "--per-device-train-batch-size", 32, "--max-completion-length", 96,
    "--data", "task:addition:split=train,size=256", "--eval-data", "task:addition:split=eval,size=8",
)  # fmt: skip


def test_rollouts_that_run_ahead_are_drawn_to_the_target(tied_server, tmp_path):
    """Turns end after 64 tokens: the true sums are short, and no turn may be cut below that."""
    run = tmp_path / "ebft"
    process = start(run, *FLAGS, "--vllm.url", tied_server.url, **{TOKEN: tied_server.token})
    try:
        assert process.wait(timeout=240) == 0, log_of(run)[-3000:]
    finally:
        process.kill()
    first, *rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["reward/cfm"] < 4 and 0 < row["rollout/len_max"] <= 64 for row in rows)
    staleness = [row["rollout/staleness_max"] for row in rows]
    assert staleness[0] == 0 and 0 < max(staleness) <= DEPTH
    assert rows[0]["policy/behaviour_gap"] < 1e-3  # of later ones it is what training has changed since
    assert all(row["loss/ce"] > 0 for row in rows)
    assert first["eval/cfm"] > 0 and rows[-1]["eval/cfm"] > 0 and rows[-1]["eval/rows"] == first["eval/rows"] == 8
