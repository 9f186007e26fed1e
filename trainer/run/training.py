"""Training: optimizer steps on batches from a source, with schedule, metrics, evaluation and checkpoints.

    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg)
        training = Training(run, cfg, policy, source)     # plans the run; nothing is written yet
        for batch in training.batches():                  # creates the run folder, restores a checkpoint, evaluates
            ...                                           # the method's passes: gradients, and metrics in `sums`
            training.clip_and_step(sums)
            training.log(sums, num_tokens)                # one line of metrics.jsonl; evaluates if due
                                                          # after the body: saves a checkpoint if due

A source supplies the batches: Rows (trainer/offline/rows.py) for fixed rows, one optimizer step per batch, or Rollouts
(trainer/rl/rollouts.py) for sampled completions, several steps per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from data.loader import Loader
from trainer.config.blocks import MethodConfig, MovingReferenceConfig, OptimConfig, steps_per_epoch
from trainer.metrics.metrics import Counters, MetricSums, Timer
from trainer.metrics.startup import startup
from trainer.parallel.comm import all_count, any_rank, pick_device, rank, world_size
from trainer.policy.compile_choice import resolve_compile
from trainer.policy.experts import RouterLoss
from trainer.policy.load import load_policy, make_policy_exact
from trainer.policy.logps import Policy
from trainer.policy.noise import add_noise
from trainer.policy.optim import BadSteps, PendingStep, TrainedModule, build_optimizer, check_groups, launch_step
from trainer.policy.reference import MovingReference
from trainer.policy.sharding import parallelize
from trainer.run.callbacks import Best, Callback, load_callbacks
from trainer.run.run import Run

Evaluate = Callable[[], dict[str, float]]
OPENED: ContextVar[list[Training] | None] = ContextVar("OPENED", default=None)  # read by train() in trainer/api.py


class Source(Protocol):
    """Supplies the batches of a run."""

    loader: Loader[Any]
    rows_per_batch: int
    steps_per_batch: int  # optimizer steps on each batch
    holds_out: bool  # there are rows to evaluate on

    @property
    def epoch(self) -> float:
        """Passes over the rows so far."""

    def resolve(self, modules: list[nn.Module]) -> MethodConfig:
        """Return the config, with settings that depend on the input resolved, such as --rollout.engine auto."""

    def plan(self, training: Training) -> dict[str, Any]:
        """Check everything that can fail before the run folder exists; return the state that checkpoints contain."""

    def start(self) -> None:
        """Start what the run folder is needed for, such as the engine. Called before a checkpoint is restored."""

    def next(self) -> Any:
        """Return the next batch of this rank."""

    def finish(self) -> None:
        """Mark the batch as consumed."""

    def describe(self) -> str:
        """Name the rows of the current batch, for errors."""

    def metrics(self, sums: MetricSums) -> dict[str, float]:
        """Metrics of the current batch and step."""

    def engine_metrics(self) -> dict[str, float]:
        """Metrics to read after an evaluation."""

    def evaluate(self) -> dict[str, float]:
        """The default evaluation."""


def open_policy(cfg: MethodConfig, *, with_reference: bool = False) -> Policy:
    """Load the model to train and distribute it over the ranks; `with_reference`: with a frozen copy of it."""
    policy = load_policy(cfg.model, cfg.lora, pick_device(), with_reference=with_reference)
    if getattr(cfg, "exact_sampling", False):
        make_policy_exact(policy)
    return parallelize(cfg.parallel, policy)


class Training:
    """`step` counts optimizer steps.

    `evaluate` replaces the source's evaluation. `modules` are trained alongside the policy, by name: each has its own
    optimizer (from cfg.optim, or from the OptimConfig of a pair), is stepped with the policy, clipped separately and
    checkpointed. All ranks start from rank 0's weights, and gradients are summed over ranks: divide by a count over all
    ranks. `state` is added to checkpoints, by name: anything with state_dict and load_state_dict.
    """

    def __init__(
        self,
        run: Run,
        cfg: MethodConfig,
        policy: Policy,
        source: Source,
        *,
        evaluate: Evaluate | None = None,
        modules: Mapping[str, nn.Module | tuple[nn.Module, OptimConfig]] | None = None,
        state: Mapping[str, Any] | None = None,
        moving: MovingReferenceConfig | None = None,
    ) -> None:
        self.run, self.policy, self.source, self.step = run, policy, source, 0
        if (opened := OPENED.get()) is not None:
            opened.append(self)
        self.evaluate = (evaluate or source.evaluate) if source.holds_out else None
        pairs = {name: x if isinstance(x, tuple) else (x, cfg.optim) for name, x in (modules or {}).items()}
        cfg = source.resolve([module.to(policy.device) for module, _ in pairs.values()])
        if cfg.model.neftune_noise_alpha is not None:
            run.keep(add_noise(policy, cfg.model.neftune_noise_alpha))
        if cfg.model.router_aux_loss_coef is not None:
            policy.router = run.keep(RouterLoss(policy, cfg.model.router_aux_loss_coef))
        # The noise scale depends on the length of each sequence, and the router's loss is a mean over all tokens.
        policy.shares_prompts = cfg.model.neftune_noise_alpha is None and policy.router is None
        sizes = (source.loader.rows_per_epoch, source.rows_per_batch, source.steps_per_batch)
        self.total_steps, self.steps_per_epoch = cfg.run.total_steps(*sizes), steps_per_epoch(*sizes)
        self.cfg = run.cfg = resolve_compile(cfg, policy, self.total_steps)
        check_groups(policy.model, cfg.optim)
        self.optimizer, self.schedule = build_optimizer(policy.model, cfg.optim, self.total_steps)
        self.modules = [
            TrainedModule(name, module, optim, self.total_steps, run.note) for name, (module, optim) in pairs.items()
        ]
        self.counters = Counters()
        self.bad_steps = BadSteps(cfg.optim, self.counters, run.note)
        self.state = {"counters": self.counters, **source.plan(self), **(state or {})}
        self.state |= {f"trained.{module.name}": module for module in self.modules}
        startup.lap("rows")
        self.moving: MovingReference | None = None
        if moving is not None and moving.sync_ref_model:  # --sync-ref-model
            settings = moving.ref_model_mixup_alpha, moving.ref_model_sync_steps
            self.moving = MovingReference(policy, *settings, exact=moving.exact)
            self.state["reference"] = self.moving
        self.callbacks: list[Callback] = load_callbacks(cfg.run.callbacks)
        self.best: Best | None = None
        if cfg.run.metric_for_best_model is not None:
            self.best = Best(cfg.run, self)
            self.callbacks.append(self.best)
            self.state["best"] = self.best
        self._stop = ""  # why a callback stops the run
        self._pending: PendingStep | None = None  # the last optimizer step
        # On one GPU the host reads during the next step whether this one was finite, unless more depends on it.
        self._defers = not self.modules and self.moving is None and world_size() == 1

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the run. After each body, save a checkpoint if due; after the last, export the model."""
        self.begin()
        while self.step < self.total_steps:
            self.timer = Timer()
            batch = self.source.next()
            if hasattr(self.source, "rollout"):
                self._call("on_rollout", batch)
            yield batch
            self.source.finish()
            if self.callbacks and any_rank(bool(self._stop)):
                self.run.note(f"stopped after step {self.step}: {self._stop}")
                self.total_steps = self.run.total_steps = self.step
            if self.run.maybe_save(self.step, self.policy, self.optimizer, self.schedule, self.state):
                self._call("on_save", self.run.dir / "checkpoints" / f"step-{self.step:08d}")
        self._wait()
        if self.best is not None and self.best.keeps:
            self.best.restore()
        self.run.finish(self.policy)
        self._call("on_end")

    def stop(self, why: str) -> None:
        """End the run after the current batch, saved and exported as at its normal end."""
        self._stop = why or "by a callback"

    def _call(self, point: str, *values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, point)(self, *values)

    def steps(self) -> Iterator[Any]:
        """Yield batches with one optimizer step each."""
        for batch in self.batches():
            self.step += 1
            yield batch

    def begin(self) -> None:
        """Create the run folder, or restore the checkpoint; evaluate the initial model as step 0."""
        self.run.begin(
            self.total_steps, f"{self.run.method} {self.cfg.model.model.removeprefix('python:')}", self.steps_per_epoch
        )
        self.source.start()
        self.step = self.run.restore(self.policy, self.optimizer, self.schedule, self.state)
        startup.lap("run folder and engine")
        if self.step == 0 and self.evaluate is not None:
            self.run.log(0, self._evaluate())
            startup.lap("first evaluation")

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Evaluate with dropout off. All ranks call it, even a rank without held-out rows."""
        assert self.evaluate is not None
        self.policy.model.eval()
        metrics = self.evaluate()
        self.policy.model.train()
        self._call("on_eval", metrics)
        return metrics

    def clip_and_step(self, sums: MetricSums) -> None:
        """Clip, check and apply the gradients of the policy, then those of the other trained modules."""
        self._wait()
        self._learning_rate = float(self.schedule.get_last_lr()[0])
        where = f"step {self.step}, rank {rank()}, {self.source.describe()}"
        self._pending = launch_step(
            self.policy.model, self.optimizer, self.schedule, self.cfg.optim.max_grad_norm, where, sums, self.bad_steps
        )
        if not self._defers:
            self._wait()
        for module in self.modules:
            module.step(where, skip=self.counters.skipped_in_a_row > 0)  # --nan-policy skip
        if self.moving is not None:
            self.moving.after_step(self.step)

    def _wait(self) -> None:
        """Wait until it is known whether the last step was finite. Whatever depends on that comes after this call."""
        if self._pending is not None:
            self._pending.wait()

    def log(self, sums: MetricSums, num_tokens: int, more: Mapping[str, float] | None = None) -> None:
        """Write one line of metrics.jsonl, and evaluate if due. `num_tokens`: tokens computed on this rank."""
        self.timer.lap("train_s")
        num_tokens = all_count(num_tokens, "tokens of the step")
        self.counters.tokens += num_tokens
        extra = {**self.source.metrics(sums), **(more or {})}
        if self.policy.router is not None:
            extra |= self.policy.router.end()
        means, pending = sums.later(), self._pending
        assert pending is not None, "clip_and_step() comes before log()"
        known = {
            "optim/lr": self._learning_rate,
            "data/epoch": self.source.epoch,
            **self.counters.metrics(),
        }
        times = self.timer.later(num_tokens)

        def metrics() -> dict[str, float]:
            norm = {"optim/grad_norm": pending.wait()}
            return {**extra, **means(), **known, **norm, **pending.skipped, **times()}

        if startup.parts is not None:
            pending.wait()  # the device has finished the step
            self.run.note(startup.end())
        is_due = self.evaluate is not None and self.run.eval_due(self.step)
        if is_due or self.callbacks:
            self.run.write_pending()
            line = metrics() | (self._evaluate() if is_due else {}) | self.source.engine_metrics()
            self.run.log(self.step, line)
            self._call("on_step", line)
        else:
            engine = self.source.engine_metrics()
            self.run.log_later(self.step, lambda: metrics() | engine)
        self.timer = Timer()
