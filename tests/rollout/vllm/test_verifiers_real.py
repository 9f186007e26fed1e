"""Two GRPO steps in a two-turn verifiers environment, with a real vLLM server as the model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.entry import ROOT, metrics
from trainer.__main__ import main

TOY = Path(ROOT, "tests", "rollout", "gyms", "toy_verifiers.py")


@pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed: pip install -e '.[verifiers]'"
)
def test_two_grpo_steps_in_a_verifiers_environment(vllm_python, tmp_path):
    run = tmp_path / "run"
    argv = ("--method", "grpo", "--model", "builtin:tiny", "--verifiers.env", TOY, "--reward-funcs", "env",
            "--verifiers.args", '{"taskset": {"rows": 10}}', "--val-set-size", 2, "--num-generations", 4,
            "--per-device-train-batch-size", 16, "--max-completion-length", 48, "--max-steps", 2,
            "--rollout.engine", "vllm", "--output-dir", run)  # fmt: skip
    assert main([str(word) for word in argv]) == 0
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["eval/rows"] == 2 and "eval/env/mean" in rows[-1]
    for row in rows[1:]:
        assert row["rollout/num_turns"] == 2 and row["rollout/env_failed"] == 0
        assert row["rollout/branches"] < 1
        assert 1.0 <= row["reward/env/mean"] <= 2.0 and row["reward/std"] > 0
        assert row["optim/grad_norm"] > 0
        assert row["policy/behaviour_gap"] < 1e-4
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [m["role"] for m in samples[0]["messages"]] == ["assistant", "user", "assistant"]
