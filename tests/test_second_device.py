"""No method mixes CPU and GPU tensors; tested without a GPU (tests/second_device.py)."""

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
# These run a subset of the code of an EXTRA case (simpo: of cpo), or the same code with another formula.
COVERED = ("dpo", "ipo", "simpo", "kto", "grpo", "ebft-structured")
CASES = {name: (name,) for name in METHODS if name not in COVERED} | EXTRA


def test_second_device_rejects_mixed_operations():
    with second_device():
        cpu, gpu = torch.arange(3), torch.arange(3, device=DEVICE)
        assert (cpu + cpu).device == torch.device("cpu") and (gpu * 2).device == DEVICE
        assert gpu.cpu().device == torch.device("cpu") and cpu.to(DEVICE).device == gpu.device != cpu.device
        assert torch.equal(gpu[cpu == 1], cpu[cpu == 1].to(DEVICE)), "an index may be on the CPU"
        for mix in (lambda: cpu[gpu == 1], lambda: cpu + gpu, lambda: torch.cat([cpu, gpu]), gpu.numpy):
            with pytest.raises(RuntimeError, match="second device|both devices"):
                mix()
        weight = torch.nn.Linear(3, 2).to(DEVICE).weight
        (weight * torch.ones(3, device=DEVICE)).sum().backward()
        assert weight.device == weight.grad.device == DEVICE


@pytest.mark.parametrize("case", CASES)
def test_step_does_not_mix_devices(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in method_names():  # second_device patches pick_device in every imported module
        import_module(f"trainer.methods.{name}")
    method, *flags = CASES[case]
    with second_device():
        assert main([*METHODS[method], *STEP, *flags, "--output-dir", "run"]) == 0
    rows = metrics(Path("run"))
    assert [row["step"] for row in rows] == [0, 1] and rows[1]["optim/grad_norm"] > 0
