"""Short runs whose outcome is known: sampling, log-probs, advantage, sign and step must all be right to get there."""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest

from tests.entry import ROOT, metrics, run_ok, run_python
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


# A user's own text: docs/quickstart.md.

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAGE = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "quickstart.md").read_text())
TRAIN, ASK = (shlex.split(words) for words in re.findall(r"python -m (trainer.* runs/shop\b.*)", PAGE))


def test_the_rows_of_the_page_ask_for_known_answers_in_other_words():
    train, test = ([json.loads(line)["messages"] for line in (ROOT / TRAIN[TRAIN.index(flag) + 1]).open()]
                   for flag in ("--data", "--eval-data"))  # fmt: skip
    assert (len(train), len(test)) == (60, 12) and SMOLLM2 in TRAIN
    assert {answer["content"] for _, answer in test} == {answer["content"] for _, answer in train}
    assert not {question["content"] for question, _ in test} & {question["content"] for question, _ in train}
    assert ASK[-1] in {question["content"] for question, _ in test}


@pytest.mark.slow
def test_the_commands_of_the_page_learn_a_users_text(tmp_path):
    """STROP_SMOLLM2 names a folder with SmolLM2-135M-Instruct in float32; 30 steps take minutes on a CPU."""
    model = os.environ.get("STROP_SMOLLM2")
    if not model:
        pytest.skip("STROP_SMOLLM2 is unset: it names a folder with SmolLM2-135M-Instruct")
    values = {SMOLLM2: model, "runs/shop": str(tmp_path / "run")}
    run_ok(*(values.get(word, word) for word in TRAIN[1:]), cwd=ROOT, timeout=7200, threads=os.cpu_count() or 1)
    rows = metrics(tmp_path / "run")
    assert rows[0]["eval/nll"] > 3 and rows[-1]["eval/nll"] < 0.5
    done = run_python("-m", *(values.get(word, word) for word in ASK), cwd=ROOT, timeout=3600)
    assert "0117 496 0842" in done.stdout, done.stdout + done.stderr
