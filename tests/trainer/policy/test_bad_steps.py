"""NaN on purpose: what a skipped step leaves as it was, what it counts and says, and when the run stops."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import trainer.offline.loop
from tests.entry import metrics
from trainer.__main__ import main
from trainer.config.blocks import OptimConfig
from trainer.metrics.metrics import Counters, MetricSums, describe
from trainer.policy.optim import BadSteps, build_optimizer, clip_and_step, not_finite
from trainer.rl import session
from trainer.run.run import Run

SMALL = ["--max-steps", "4", "--save-steps", "2", "--per-device-train-batch-size", "8", "--lr-scheduler-type", "linear",
         "--learning-rate", "1e-3", "--eval-data", "task:addition:split=eval,size=4"]  # fmt: skip
DATA = {"sft": "task:addition:split=sft,size=32", "grpo": "task:addition:split=train,size=32"}


class Poison:
    """Makes a gradient NaN in the given steps, and keeps weights and moments as they are after each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
        self.bad, self.after = bad, {}
        for module in (session, trainer.offline.loop):
            monkeypatch.setattr(module, "build_optimizer", self.build)
        log = Run.log

        def kept(run: Run, step: int, line: dict[str, float]) -> None:
            self.after[step] = self.state()
            log(run, step, line)

        monkeypatch.setattr(Run, "log", kept)

    def build(self, model: torch.nn.Module, *args: Any) -> Any:
        self.model = model
        self.optimizer, schedule = build_optimizer(model, *args)
        first = next(p for p in model.parameters() if p.requires_grad)
        first.register_hook(lambda grad: grad * math.nan if schedule.last_epoch + 1 in self.bad else grad)
        return self.optimizer, schedule

    def state(self) -> list[torch.Tensor]:
        moments = [value.clone() for slots in self.optimizer.state.values() for value in slots.values()]
        return [p.detach().clone() for p in self.model.parameters()] + moments


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("method", DATA)  # the offline loop, and the sampling one
def test_skipped_step_leaves_weights_and_moments_and_the_run_goes_on(method, tmp_path, monkeypatch, capfd):
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
    (said,) = [line for line in capfd.readouterr().out.splitlines() if "skipped step" in line]
    assert said.startswith("skipped step 2, rank 0, ") and "gradient norm nan is not finite (1 in a row" in said


def test_run_stops_after_the_limit(tmp_path, monkeypatch, capfd):
    poison = Poison(monkeypatch, set(range(1, 10)))
    argv = ["--method", "sft", "--data", DATA["sft"], *SMALL, "--nan-policy", "skip", "--nan-skip-limit", "2"]
    assert main([*argv, "--output-dir", str(tmp_path / "run")]) == 2
    err = capfd.readouterr().err
    assert "error: step 3, rank 0, rows " in err and "gradient norm nan is not finite" in err
    assert "after 2 skipped steps in a row" in err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    assert same(poison.after[2][: len(poison.after[0])], poison.after[0])


def test_count_in_a_row_ends_with_a_good_step_and_survives_a_resume():
    counters, said = Counters(), []
    cfg = OptimConfig(nan_policy="skip", nan_skip_limit=2)
    steps = BadSteps(cfg, counters, said.append)
    steps.skip("loss nan", "step 1")
    steps.end()
    steps.skip("loss nan", "step 3")
    steps.skip("loss nan", "step 4")
    resumed = Counters()
    resumed.load_state_dict(counters.state_dict())
    assert resumed.metrics()["optim/skipped_steps"] == 3 and len(said) == 3
    with pytest.raises(ValueError, match="step 5: loss nan is not finite, after 2 skipped steps in a row"):
        BadSteps(cfg, resumed).skip("loss nan", "step 5")
    resumed.load_state_dict({"prompts": 1, "tokens": 2, "wall_s": 3.0})  # of a checkpoint from before
    assert "optim/skipped_steps" not in resumed.metrics()


def test_infinite_loss_with_a_finite_gradient_is_bad_too():
    sums = MetricSums()
    assert not_finite(1.0, None) is None and not_finite(1.0, sums) is None
    sums.add({"loss/total": (3.0, 2.0)})
    assert not_finite(1.0, sums) is None and not_finite(math.nan, sums) == "gradient norm nan"
    sums.add({"loss/total": (math.inf, 1.0)})
    assert not_finite(1.0, sums) == "loss inf"


def test_first_step_skipped_warns_of_nothing():
    model = torch.nn.Linear(2, 1)
    optimizer, schedule = build_optimizer(model, OptimConfig(lr_scheduler_type="linear"), 4)
    model.weight.grad = torch.full_like(model.weight, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_and_step(model, optimizer, schedule, 1.0, "step 1", None, BadSteps(OptimConfig(nan_policy="skip")))
    assert model.weight.grad is None and not optimizer.state and schedule.last_epoch == 1


def test_without_skip_the_first_bad_step_stops_and_a_limit_is_refused():
    with pytest.raises(ValueError, match="^step 1: loss nan is not finite; lower --learning-rate"):
        BadSteps(OptimConfig()).skip("loss nan", "step 1")
    with pytest.raises(ValueError, match="nan_skip_limit=5: has no effect with nan_policy=stop; set --nan-policy skip"):
        OptimConfig(nan_skip_limit=5)
