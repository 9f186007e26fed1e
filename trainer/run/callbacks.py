"""Callbacks of a run: --callbacks my_module.MyCallback, or callbacks=[MyCallback()] in train().

    class Stop(Callback):
        def on_step(self, training, metrics):
            if metrics["reward/mean"] > 0.95:
                training.stop("the reward is high enough")

Methods are called on every rank, with the same metrics. If one calls training.stop(why), all ranks stop after the
current rollout, and the run is saved and exported as at its normal end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from data.user_code import find_callable
from trainer.config.blocks import RunConfig
from trainer.parallel.dtensor import copy_into_shard


class Callback:
    """Override methods to be called at these points of a run, with its Training (trainer/run/training.py)."""

    def on_rollout(self, training: Any, rollout: Any) -> None:
        """After completions were sampled and rewarded, before their first step."""

    def on_step(self, training: Any, metrics: Mapping[str, float]) -> None:
        """After the metrics of a step were written."""

    def on_eval(self, training: Any, metrics: Mapping[str, float]) -> None:
        """After an evaluation, including the one before the first step."""

    def on_save(self, training: Any, folder: Path) -> None:
        """After a checkpoint was begun; with --save-async it may still be written."""

    def on_end(self, training: Any) -> None:
        """After the model was exported."""


def load_callbacks(specs: Sequence[Any]) -> list[Callback]:
    """Return the callbacks that --callbacks names; classes are constructed without arguments."""
    found: list[Callback] = []
    for spec in specs:
        value = find_callable(spec, f"callbacks={spec}")[1]
        found.append(value() if inspect.isclass(value) else value)
        if not isinstance(found[-1], Callback):
            kind = type(found[-1]).__name__
            raise UserError(f"callbacks={spec}: must be a trainer.run.callbacks.Callback, not {kind}")
        for name in dir(found[-1]):
            if name.startswith("on_") and not hasattr(Callback, name):
                points = ", ".join(point for point in dir(Callback) if point.startswith("on_"))
                raise UserError(f"callbacks={spec}: {name} would never be called; use one of {points}, or rename it")
    return found


class Best(Callback):
    """Keeps a copy of the weights of the best evaluation; stops the run after evaluations without improvement.

    The copy is on the weights' device; checkpoints contain it.
    """

    def __init__(self, cfg: RunConfig, training: Any) -> None:
        self.metric, self.patience = str(cfg.metric_for_best_model), cfg.early_stopping_patience
        self.sign = 1.0 if cfg.is_greater_better else -1.0
        self.keeps, self.training = cfg.load_best_model_at_end, training
        self.value, self.step, self.waited = -math.inf, 0, 0
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_eval(self, training: Any, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            known = ", ".join(name for name in metrics if name.startswith("eval/"))
            raise UserError(f"metric_for_best_model={self.metric}: not in the evaluation; use one of {known}")
        value = self.sign * metrics[self.metric]
        if value > self.value:
            self.value, self.step, self.waited = value, training.step, 0
            if self.keeps:
                self.weights = {name: p.detach().clone() for name, p in self._trained()}
            return
        self.waited += 1
        if self.patience is not None and self.waited >= self.patience:
            best = f"{self.metric} {self.sign * self.value:.4g} at step {self.step}"
            training.stop(f"{self.waited} evaluation{'s' * (self.waited != 1)} without improvement over {best}")

    def _trained(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.training.policy.model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the best weights into the model."""
        for name, parameter in self._trained() if self.weights and self.step != self.training.step else ():
            parameter.copy_(self.weights[name])
        exported = "; its weights are exported" if self.weights else ""
        self.training.run.note(f"best: {self.metric} {self.sign * self.value:.4g} at step {self.step}{exported}")

    def state_dict(self) -> dict[str, float]:
        value = None if math.isinf(self.value) else self.value
        return {"value": value, "step": self.step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = -math.inf if state["value"] is None else state["value"]
        self.step, self.waited = state["step"], state["waited"]

    def tensors(self) -> dict[str, Tensor]:
        return self.weights

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.weights = {name: p.detach().clone() for name, p in self._trained() if name in tensors}
        for name, copy in self.weights.items():
            copy_into_shard(copy, tensors[name])
