"""Engine and trainer with the interpreted kernels of kernels/exact.py."""

from __future__ import annotations

import importlib.util

import pytest

from kernels import exact
from rollout.engine import Request, Sampling
from tests.kernels.interpreter import interpreted
from tests.trainer.rl.test_exact_sampling import open_engine, open_exact
from trainer.policy.logps import logps_in_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("nan_in_unwritten_memory"),
]


@interpreted
def test_sampler_and_trainer_with_the_kernels(monkeypatch, tmp_path):
    """What runs on a GPU, except for its norms, rotations, activations and head."""
    monkeypatch.setattr(exact, "_runs_kernels", lambda x: True)
    monkeypatch.setattr(exact, "linear_tile", lambda rows, columns: (64, 32, 4))
    policy = open_exact(tmp_path, "qwen3", "bfloat16")
    requests = [Request(prompt_ids=[3 + i for i in range(n)], seed=n) for n in (1, 5, 5, 66)]
    completions = open_engine(policy).generate(requests, Sampling(max_tokens=4))
    want = logps_in_training(policy, [(c.prompt_ids, c.ids) for c in completions])
    assert [c.logps for c in completions] == want
