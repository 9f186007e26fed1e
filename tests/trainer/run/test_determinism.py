"""Test that equal commands give equal numbers, regardless of the machine's load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.entry import metrics, repeatable
from trainer.__main__ import main
from trainer.config.blocks import RunConfig
from trainer.run import determinism
from trainer.run.run import open_run

SMALL = [
    "--method", "sft", "--max-steps", "1", "--per-device-train-batch-size", "4",
    "--data", "task:addition:split=sft,size=16", "--eval-data", "task:addition:split=eval,size=4",
]  # fmt: skip


def switches() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a run trains on the GPU here")
def test_gradients_of_repeated_rows_are_added_in_order(two_threads, tmp_path):
    """With the sizes of the tiny recipe, two threads would add them in arrival order."""
    draw = torch.Generator().manual_seed(0)
    index = torch.randint(0, 483, (330,), generator=draw)
    index[:60] = 7  # the last prompt token, shared by all completions of a group
    grad = torch.randn(330, 128, generator=draw)
    assert grad.numel() >= 32768, "torch uses one thread below that"

    def backward() -> torch.Tensor:
        x = torch.zeros(483, 128, requires_grad=True)
        x[index].backward(grad)
        return x.grad

    in_order = torch.zeros(483, 128)
    for i, row in zip(index.tolist(), grad, strict=True):
        in_order[i] += row
    before = switches()
    with open_run(SimpleNamespace(run=RunConfig(output_dir=str(tmp_path / "run"))), "grpo"):
        assert switches() == (True, True, False)
        assert all(torch.equal(backward(), in_order) for _ in range(50))
    assert switches() == before, "what a run sets ends with it"


def test_the_flag_is_logged_saved_and_kept_by_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = switches()
    line = determinism.ON_GPU if torch.cuda.is_available() else determinism.ON_CPU
    assert main([*SMALL, "--deterministic", "--output-dir", "run", "--save-steps", "1"]) == 0
    assert line in capsys.readouterr().err
    assert main(["--resume", "run", "--max-steps", "2"]) == 0
    assert line in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["deterministic"] is True
    assert switches() == before


@pytest.mark.parametrize("strict", [False, True])
def test_on_a_gpu_only_the_flag_chooses_algorithms(strict, monkeypatch):
    name, value = determinism.CUBLAS
    monkeypatch.setenv(name, "")  # so that monkeypatch restores it
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = switches()
    chosen = determinism.Algorithms("cuda", strict)
    try:
        assert switches() == ((True, False, False) if strict else before)
        assert torch.backends.cudnn.benchmark is not strict
        assert determinism.os.environ.get(name) == (value if strict else None)
    finally:
        chosen.close()
    assert switches() == before and torch.backends.cudnn.benchmark


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    [
        ["--method", "grpo", "--beta", "0.1", "--top-entropy-quantile", "0.5"],
        ["--method", "grpo", "--attn-implementation", "sdpa", "--lora.r", "4"],
        ["--method", "ebft", "--mode", "strided"],
        ["--method", "dpo"],
        ["--method", "sft"],
    ],
    ids=" ".join,
)
def test_two_runs_on_a_gpu_are_equal(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        assert main([*flags, "--deterministic", "--max-steps", "4", "--output-dir", name]) == 0
    assert repeatable(metrics(tmp_path / "one")) == repeatable(metrics(tmp_path / "two"))
