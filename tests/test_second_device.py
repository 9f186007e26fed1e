"""No tensor in main memory meets one on the device, in any method: held without a GPU (tests/second_device.py)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.entry import metrics
from tests.second_device import DEVICE, second_device
from tests.test_gpu_runs import METHODS
from trainer.__main__ import main
from trainer.cli import method_names

STEP = ("--max-steps", "1", "--save-steps", "1")
EXTRA = {
    "dpo-precomputed": ("dpo", "--ref", "precomputed", "--ref-cache", "cache"),
    "dpo-sorted": ("dpo", "--loss-type", "aot", "sft", "--ld-alpha", "0.5"),
    "dpo-weighted": ("dpo", "--use-weighting", "--sync-ref-model", "--ref-model-sync-steps", "1"),
    "kto-precomputed-lora": ("kto", "--lora.r", "4", "--ref", "precomputed", "--ref-cache", "cache"),
    "grpo-all": (
        "grpo", "--beta", "0.1", "--entropy-coef", "0.01", "--top-entropy-quantile", "0.5", "--loss-type", "vespo",
        "--vllm-importance-sampling-mode", "sequence_mask", "--geometric-min", "0.5", "--off-policy-mask-threshold",
        "0.1",
    ),
    "ppo-model": ("ppo", "--value-model", "builtin:tiny", "--lora.r", "4", "--beta", "0.1", "--kl-in-reward"),
    "ebft-white": ("ebft-structured", "--use-whitening", "--ce-coef", "0.1", "--embed-method", "mean_pooling"),
}  # fmt: skip
# The rest runs code of one of EXTRA (simpo that of cpo) with another formula, or less of it.
LESS = ("dpo", "ipo", "simpo", "kto", "grpo", "ebft-structured")
CASES = {name: (name,) for name in METHODS if name not in LESS} | EXTRA


def test_the_two_devices_are_kept_apart():
    with second_device():
        near, far = torch.arange(3), torch.arange(3, device=DEVICE)
        assert (near + near).device == torch.device("cpu") and (far * 2).device == DEVICE
        assert far.cpu().device == torch.device("cpu") and near.to(DEVICE).device == far.device != near.device
        assert torch.equal(far[near == 1], near[near == 1].to(DEVICE)), "an index may be in main memory"
        for meet in (lambda: near[far == 1], lambda: near + far, lambda: torch.cat([near, far]), far.numpy):
            with pytest.raises(RuntimeError, match="second device|both devices"):
                meet()
        weight = torch.nn.Linear(3, 2).to(DEVICE).weight
        (weight * torch.ones(3, device=DEVICE)).sum().backward()
        assert weight.device == weight.grad.device == DEVICE


@pytest.mark.parametrize("case", CASES)
def test_a_step_keeps_to_its_device(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in method_names():  # so that all that name pick_device are there
        import_module(f"trainer.methods.{name}")
    method, *flags = CASES[case]
    with second_device():
        assert main([*METHODS[method], *STEP, *flags, "--output-dir", "run"]) == 0
    rows = metrics(Path("run"))
    assert [row["step"] for row in rows] == [0, 1] and rows[1]["optim/grad_norm"] > 0
