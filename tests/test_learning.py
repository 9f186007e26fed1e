"""Short runs whose outcome is known: sampling, log-probs, advantage, sign and step must all be right to get there."""

from __future__ import annotations

import pytest

from tests.entry import metrics, run_ok
from trainer.tiny.build import make_model, make_tokenizer


@pytest.mark.slow
def test_reward_for_brevity_leads_to_an_immediate_end(tmp_path):
    """reward = -length, from random weights: completions shrink from the limit to almost nothing but the end token."""
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "random")
    tokenizer.save_pretrained(tmp_path / "random")
    run_ok(
        "--method", "grpo", "--model", tmp_path / "random", "--data", "task:addition", "--reward-funcs", "length",
        "--reward-weights", "-1", "--max-completion-length", 16, "--per-device-train-batch-size", 128,
        "--num-generations", 32, "--max-steps", 60, "--learning-rate", "3e-3", "--lr-scheduler-type", "constant",
        "--max-tokens-per-micro-batch", 1024, "--save-steps", 0, "--output-dir", tmp_path / "run", cwd=tmp_path,
    )  # fmt: skip
    lengths = [row["rollout/len_mean"] for row in metrics(tmp_path / "run")]
    assert lengths[0] > 12
    assert lengths[-1] < 2, lengths


@pytest.mark.slow
def test_sft_loss_falls(tmp_path):
    run_ok("--method", "sft", "--max-steps", 30, "--save-steps", 0, "--output-dir", tmp_path / "run", cwd=tmp_path)
    rows = metrics(tmp_path / "run")
    assert rows[-1]["eval/nll"] < 0.7 * rows[0]["eval/nll"]
