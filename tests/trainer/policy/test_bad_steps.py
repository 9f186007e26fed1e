"""Non-finite steps: a skipped step changes nothing, is counted and logged, and too many of them stop the run."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entry import metrics, repeatable, small_model
from trainer.__main__ import main
from trainer.config.blocks import OptimConfig
from trainer.metrics.metrics import Counters, MetricSums, describe
from trainer.policy.optim import BadSteps, build_optimizer, launch_step, not_finite, takes_gate
from trainer.run import training
from trainer.run.run import Run

SMALL = ["--max-steps", "4", "--save-steps", "2", "--per-device-train-batch-size", "8", "--lr-scheduler-type", "linear",
         "--learning-rate", "1e-3", "--eval-data", "task:addition:split=eval,size=4"]  # fmt: skip
DATA = {"sft": "task:addition:split=sft,size=32", "grpo": "task:addition:split=train,size=32"}


class Poison:
    """Sets a gradient to NaN in the given steps, and records weights and moments after each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
        self.bad, self.after = bad, {}
        monkeypatch.setattr(training, "build_optimizer", self.build)
        log = Run.log

        def record(run: Run, step: int, line: dict[str, float]) -> None:
            self.after[step] = everything(self.model, self.optimizer)
            log(run, step, line)

        monkeypatch.setattr(Run, "log", record)

    def build(self, model: torch.nn.Module, *args: Any) -> Any:
        self.model = model
        self.optimizer, schedule = build_optimizer(model, *args)
        first = next(p for p in model.parameters() if p.requires_grad)
        first.register_hook(lambda grad: grad * math.nan if schedule.last_epoch + 1 in self.bad else grad)
        return self.optimizer, schedule


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value.clone() for slots in optimizer.state.values() for value in slots.values()]
    return [p.detach().clone() for p in model.parameters()] + moments


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("method", DATA)  # offline and sampling
def test_skipped_step_keeps_weights_and_moments_and_the_run_continues(method, tmp_path, monkeypatch, capfd):
    poison = Poison(monkeypatch, {2})
    argv = ["--method", method, "--data", DATA[method], *SMALL, "--nan-policy", "skip"]
    assert main([*argv, "--output-dir", str(tmp_path / "run")]) == 0
    after = poison.after
    assert same(after[2], after[1]) and not same(after[1], after[0])
    assert not same(after[3], after[2]) and all(x.isfinite().all() for x in after[4])
    rows = metrics(tmp_path / "run")
    assert [row.get("optim/skipped_steps") for row in rows] == [None, None, 1, 1, 1]
    assert rows[2]["optim/grad_norm"] is None and rows[3]["optim/grad_norm"] > 0
    assert [row["optim/lr"] for row in rows[1:]] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert describe("optim/skipped_steps")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "skipped step" in line]
    assert line.startswith("skipped step 2, rank 0, ") and "gradient norm nan is not finite (1 in a row" in line


GATED = ["--trained-dtype", "bfloat16", "--dtype", "bfloat16"]  # the optimizer itself skips non-finite steps


@pytest.fixture
def deferred(monkeypatch):
    """As on a GPU: the outcome and metrics of a step are read after the next step has started."""
    monkeypatch.setattr(Run, "_defers", property(lambda run: True, lambda run, value: None), raising=False)


@pytest.mark.parametrize(("saves", "dtypes"), [("1", GATED), ("3", GATED), ("0", GATED), ("0", [])])
def test_deferred_check_changes_nothing(saves, dtypes, tmp_path, request, monkeypatch):
    Poison(monkeypatch, {2, 4})
    argv = ["--method", "sft", "--data", DATA["sft"], *SMALL, *dtypes, "--nan-policy", "skip", "--save-steps", saves]
    argv += ["--model", small_model(tmp_path / "model")]
    for name in ("immediate", "deferred"):
        if name == "deferred":
            request.getfixturevalue("deferred")
        assert main([*argv, "--output-dir", str(tmp_path / name)]) == 0
    rows, weights = ([read(tmp_path / name) for name in ("immediate", "deferred")] for read in (metrics, final_weights))
    assert repeatable(rows[1]) == repeatable(rows[0]) and weights[1] == weights[0]
    assert [row.get("optim/skipped_steps") for row in rows[1]] == [None, None, 1, 1, 2]
    assert [row.get("optim/grad_norm", 0) is None for row in rows[1]] == [False, False, True, False, True]


def final_weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("bad", [2, 4])  # a middle step and the last step
def test_deferred_stop_names_the_bad_step_and_does_not_save_it(bad, deferred, tmp_path, monkeypatch, capfd):
    Poison(monkeypatch, {bad})
    argv = ["--method", "sft", "--data", DATA["sft"], *SMALL, *GATED, "--save-steps", "1"]
    argv += ["--model", small_model(tmp_path / "model")]
    assert main([*argv, "--output-dir", str(tmp_path / "run")]) == 2
    assert f"error: step {bad}, rank 0, rows " in capfd.readouterr().err
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(saved) == f"step-{bad - 1:08d}" and not (tmp_path / "run" / "final").exists()


def test_run_stops_after_the_limit(tmp_path, monkeypatch, capfd):
    poison = Poison(monkeypatch, set(range(1, 10)))
    argv = ["--method", "sft", "--data", DATA["sft"], *SMALL, "--nan-policy", "skip", "--nan-skip-limit", "2"]
    assert main([*argv, "--output-dir", str(tmp_path / "run")]) == 2
    err = capfd.readouterr().err
    assert "error: step 3, rank 0, rows " in err and "gradient norm nan is not finite" in err
    assert "after 2 consecutive skipped steps" in err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    assert same(poison.after[2][: len(poison.after[0])], poison.after[0])


def test_finite_step_resets_the_consecutive_count_and_resume_keeps_it():
    counters, lines = Counters(), []
    cfg = OptimConfig(nan_policy="skip", nan_skip_limit=2)
    steps = BadSteps(cfg, counters, lines.append)
    steps.skip("loss nan", "step 1")
    steps.end()
    steps.skip("loss nan", "step 3")
    steps.skip("loss nan", "step 4")
    resumed = Counters()
    resumed.load_state_dict(counters.state_dict())
    assert resumed.metrics()["optim/skipped_steps"] == 3 and len(lines) == 3
    with pytest.raises(ValueError, match="^step 5: loss nan .*2 consecutive"):
        BadSteps(cfg, resumed).skip("loss nan", "step 5")
    resumed.load_state_dict({"prompts": 1, "tokens": 2, "wall_s": 3.0})  # from an old checkpoint
    assert "optim/skipped_steps" not in resumed.metrics()


def test_infinite_loss_with_finite_gradient_is_reported():
    assert not_finite(1.0) is None and not_finite(1.0, 3.0) is None
    assert not_finite(math.nan, 3.0) == "gradient norm nan" and not_finite(1.0, math.inf) == "loss inf"


def gradients(model: torch.nn.Module, value: float) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


KINDS = ("float32", "float32 fused", "bfloat16")  # torch's AdamW, as on a GPU, and RoundedAdamW
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def trained_module(kind: str, device: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
    model = model.to(device, getattr(torch, kind.split()[0]))
    optimizer, schedule = build_optimizer(model, OptimConfig(learning_rate=0.1, lr_scheduler_type="constant"), 4)
    if "fused" in kind:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert takes_gate(optimizer) == (kind != "float32" or device == "cuda")
    return model, optimizer, schedule


@on_both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_bad_step_changes_nothing_with_any_optimizer(kind, gradient, loss, max_grad_norm, device):
    model, optimizer, schedule = trained_module(kind, device)
    bad_steps = BadSteps(OptimConfig(nan_policy="skip"))
    for good_before in (0, 1):
        before = everything(model, optimizer)
        step_metrics = MetricSums()
        step_metrics.add({"loss/total": (loss, 1.0)})
        gradients(model, gradient)
        norm = launch_step(model, optimizer, schedule, max_grad_norm, "step 1", step_metrics, bad_steps).wait()
        assert same(everything(model, optimizer), before) and len(optimizer.state) == 4 * good_before
        assert math.isfinite(norm) == (gradient == 1.0) and bad_steps.counters.skipped_steps == good_before + 1
        assert all(p.grad is None for p in model.parameters()) and schedule.last_epoch == 2 * good_before + 1
        step_metrics = MetricSums()
        step_metrics.add({"loss/total": (1.0, 1.0)})
        gradients(model, 1.0)
        launch_step(model, optimizer, schedule, max_grad_norm, "step 2", step_metrics, bad_steps).wait()
        assert not same(everything(model, optimizer), before) and bad_steps.counters.skipped_in_a_row == 0
        assert {float(slots["step"]) for slots in optimizer.state.values()} == {good_before + 1.0}
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


@on_both
@pytest.mark.parametrize("kind", KINDS)
def test_bad_step_stops_the_run_without_moments(kind, device):
    model, optimizer, schedule = trained_module(kind, device)
    before = everything(model, optimizer)
    gradients(model, math.inf)
    with pytest.raises(ValueError, match="^step 1: gradient norm inf .*--learning-rate"):
        launch_step(model, optimizer, schedule, 1.0, "step 1").wait()
    assert same(everything(model, optimizer), before) and not optimizer.state


@on_both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_gradients_are_clipped_with_any_optimizer(kind, max_grad_norm, device):
    """The first moment after the first step is a tenth of the gradient."""
    model, optimizer, schedule = trained_module(kind, device)
    gradients(model, 2.0)
    norm = 2.0 * math.sqrt(sum(p.numel() for p in model.parameters()))
    assert launch_step(model, optimizer, schedule, max_grad_norm, "step 1").wait() == pytest.approx(norm, rel=1e-6)
    moments = torch.cat([slots["exp_avg"].flatten().double() for slots in optimizer.state.values()])
    expected = 0.1 * (0.5 if max_grad_norm == 0.5 else norm)
    assert moments.norm().item() == pytest.approx(expected, rel=1e-5 if kind != "bfloat16" else 3e-3)


def test_skipping_the_first_step_does_not_warn():
    model = torch.nn.Linear(2, 1)
    optimizer, schedule = build_optimizer(model, OptimConfig(lr_scheduler_type="linear"), 4)
    model.weight.grad = torch.full_like(model.weight, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch_step(model, optimizer, schedule, 1.0, "step 1", None, BadSteps(OptimConfig(nan_policy="skip"))).wait()
    assert model.weight.grad is None and not optimizer.state and schedule.last_epoch == 1


def test_default_policy_stops_and_rejects_a_limit():
    with pytest.raises(ValueError, match="^step 1: loss nan .*--learning-rate"):
        BadSteps(OptimConfig()).skip("loss nan", "step 1")
    with pytest.raises(ValueError, match="nan_skip_limit=5.*nan_policy=stop"):
        OptimConfig(nan_skip_limit=5)
