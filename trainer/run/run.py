"""A run is a folder: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/, final/, report.html.

    with open_run(cfg, "grpo") as run:                       # chooses and checks the folder; writes nothing yet
        ...load model and data...
        run.begin(total_steps, title)                        # creates the folder
        state = {"loader": loader, "rewards": rewards, "counters": counters}
        first = run.restore(policy, optimizer, schedule, state)
        for step in range(first + 1, total_steps + 1):
            ...
            run.log(step, metrics)
            run.sample(step, rows)
            run.maybe_save(step, policy, optimizer, schedule, state)
        run.finish(policy)

A killed run resumes from its last checkpoint. Metrics and samples reach the disk before the checkpoint that covers
them, and a resume cuts off later lines, so each step is written once. `state` is what a checkpoint contains in addition
to weights, optimizer and schedule.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from data.command.config_file import (
    PER_CALL,
    SEGMENTS,
    earlier_settings,
    flatten,
    load_config,
    read_segments,
    save_config,
)
from data.command.flags import config_to_tree
from data.errors import UserError
from data.user_code import PYTHON, describe_error, users_part
from trainer.config.blocks import MethodConfig, RunConfig, check_4bit, check_fp8
from trainer.config.defaults import default_tree
from trainer.config.learning_rates import far_off
from trainer.config.old_flags import without_old_defaults
from trainer.files.atomic_folder import remove_folder, remove_leftovers
from trainer.files.tensor_files import TensorFiles
from trainer.metrics.console import Console, evaluation_lines
from trainer.metrics.health import Watch, replay
from trainer.metrics.metrics import JsonlLog, Sink, check_sinks, open_sinks, read_jsonl, truncate_after
from trainer.parallel.comm import any_rank, from_main, on_main, world_size
from trainer.parallel.watch import log
from trainer.policy.logps import Policy
from trainer.policy.optim import check_installed
from trainer.run import determinism, stop
from trainer.run.checkpoint import (
    Saver,
    check_state,
    latest_valid,
    list_checkpoints,
    load_checkpoint,
    restore_rng,
    save_checkpoint,
    set_aside_after,
)
from trainer.run.export import describe_model, export_model

# Everything a run writes into its folder; --overwrite-output-dir deletes nothing else.
FILES = ("config.yaml", SEGMENTS, "metrics.jsonl", "samples.jsonl", "report.html", "run_id", "wandb_run_id",
         "evaluations.jsonl")  # fmt: skip
FOLDERS = ("checkpoints", "final", "logs", "tensorboard", "wandb")
PER_EPOCH = {"saves_per_epoch": "--save-steps", "evals_per_epoch": "--eval-steps"}
T = TypeVar("T")


def open_run(cfg: MethodConfig, method: str = "") -> Run:
    """Choose the folder of a new run, or find the checkpoint to resume from. Raise if the folder contains another run.

    `method` is the name in folder and title; config.yaml keeps the value of --method. Also seed the global generators,
    which adapter initialisation and dropout use, and set torch's deterministic algorithms until the run is closed.
    """
    settings = cfg.run
    method = method or method_of(cfg)
    check_sinks(settings.report_to)
    # A Config outside the repository needs only model and run.
    if hasattr(cfg, "lora"):
        check_4bit(cfg.model, cfg.lora, getattr(cfg, "parallel", None))
        check_fp8(cfg.model, cfg.lora, getattr(cfg, "parallel", None))
    if hasattr(cfg, "optim"):
        check_installed(cfg.optim)
    random.seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    torch.manual_seed(settings.seed % 2**64)
    run = on_main(lambda: _open(cfg, method))  # verifying a large checkpoint is slow
    paths = None if run is None else [str(run.dir), None if run.checkpoint is None else str(run.checkpoint)]
    folder, checkpoint = from_main(paths, "run folder")
    run = run or OtherRank(cfg, method, Path(folder), Path(checkpoint) if checkpoint else None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run.keep(determinism.Algorithms(device, settings.deterministic))
    if settings.deterministic:
        run.note(determinism.ON_CPU if device == "cpu" else determinism.ON_GPU)
    return run


def method_of(cfg: MethodConfig) -> str:
    """Return --method, or the module of the Config's class if the run was started from Python."""
    return cfg.run.method or type(cfg).__module__.removeprefix("trainer.methods.")


def _open(cfg: MethodConfig, method: str) -> Run:
    settings = cfg.run
    if settings.resume is None:
        folder = expand(settings.output_dir, method)
        if not is_new_each_time(settings):
            check_unused(folder, settings.overwrite_output_dir)
        return Run(cfg, method, folder, None)
    folder, newest = resumed_folder(settings)
    lock = lock_folder(folder)
    remove_leftovers(folder)
    remove_leftovers(folder / "checkpoints")
    checkpoint = latest_valid(folder / "checkpoints", log, at_most=newest)
    if checkpoint is None and (folder / "final").is_dir():
        raise UserError(
            f"resume={folder}: this run has finished and has no checkpoint to resume from; "
            f"start a new run from its model with --model {folder}"
        )
    return Run(cfg, method, folder, checkpoint, lock)


class Run:
    """One training run and its folder. begin() creates `dir`; `start_step` is known before."""

    def __init__(
        self, cfg: MethodConfig, method: str, folder: Path, checkpoint: Path | None, lock: IO[bytes] | None = None
    ) -> None:
        self.cfg, self.method, self.dir, self.checkpoint = cfg, method, folder, checkpoint
        self.start_step = step_of(checkpoint) if checkpoint else 0
        # Random, stored in RUN/run_id and unchanged by a resume: servers identify runs by it.
        self.id = (read_id(folder) if lock is not None else None) or secrets.token_hex(8)
        self.total_steps = 0
        self.steps_per_epoch: Fraction | None = None
        self._high_losses = 0  # consecutive steps with a loss above loss_watchdog_threshold, on rank 0
        self._title = method
        self._lock = lock
        self._resumed = lock is not None
        self._save_step = self.start_step  # last save, which may still be running
        self._saver = Saver()
        self._last_step = -1
        self._pending: tuple[int, Callable[[], Mapping[str, float]]] | None = None  # step and metrics of log_later
        self._defers = torch.cuda.is_available()
        self._watch = Watch()
        self._console: Console | None = None
        self._metrics: JsonlLog | None = None
        self._samples: JsonlLog | None = None
        self._sinks: list[Sink] = []
        self._closed_at_end: list[Any] = []

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, ended_by: BaseException | None = None, *_: object) -> None:
        try:
            self._write_last(failed=kind is not None)
            self._saver.wait() if kind is None else self._saver.end()
        finally:
            try:
                self.close()
            except OSError as error:
                if kind is None:
                    raise UserError(_could_not_write(self.dir, error)) from None
                log(_could_not_write(self.dir, error))  # the error that ended the run is reported after this
            if isinstance(ended_by, KeyboardInterrupt) and not ended_by.args:
                ended_by.args = (self._interrupted_message(),)  # trainer/__main__.py prints it

    def _interrupted_message(self) -> str:
        if self._metrics is None:
            return "interrupted while loading; no step was done"
        done = f"interrupted after step {max(self._last_step, 0)}"
        command = f"python -m trainer --resume {shlex.quote(str(self.dir))}"
        if f"'{PYTHON}:" in str(self._config_tree()):  # the command cannot find objects from Python
            command = f"the same call and resume={str(self.dir)!r}"
        if saved := list_checkpoints(self.dir / "checkpoints"):
            return f"{done}; continue from step {saved[-1][0]} with: {command}"
        return f"{done}; no checkpoint yet, so this restarts at step 0: {command}"

    @stop.uninterrupted()
    def begin(self, total_steps: int, title: str, steps_per_epoch: Fraction | None = None) -> None:
        """Create the folder and write config.yaml. Call this after reading all input: bad input leaves no folder."""
        self._title = title
        self._set_length(total_steps, steps_per_epoch)
        settings = self.cfg.run
        try:
            if self._resumed:  # config.yaml is replaced after the checkpoint is loaded
                (self.dir / "run_id").write_text(self.id)
                return
            self.dir = make_folder(self.dir, may_exist=not is_new_each_time(settings))
            self._lock = lock_folder(self.dir)
            check_unused(self.dir, settings.overwrite_output_dir)
            for name in FILES:
                (self.dir / name).unlink(missing_ok=True)
            for name in FOLDERS:
                remove_folder(self.dir / name)
            remove_leftovers(self.dir)
            (self.dir / "run_id").write_text(self.id)
            save_config(self.dir / "config.yaml", self._config_tree())
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); choose another folder"
            raise UserError(f"output_dir={self.dir}: {reason}") from None

    def restore(self, policy: Policy, optimizer: Optimizer, schedule: LambdaLR, state: State) -> int:
        """Load the checkpoint, if any, and open the logs. Return the number of steps already done."""
        assert self._lock is not None, "begin() comes before restore()"
        self._load(policy, optimizer, schedule, state)
        with _writing(self.dir):
            if self._resumed:
                self._continue_folder()
            self._metrics = JsonlLog(self.dir / "metrics.jsonl")
            self._samples = JsonlLog(self.dir / "samples.jsonl")
        records = read_jsonl(self.dir / "metrics.jsonl")
        self._watch, _ = replay(records)
        self._last_step = records[-1]["step"] if records else -1
        for record in records:
            self._watch_loss(record)
        tree = self._config_tree()
        self._sinks = open_sinks(self.cfg.run.report_to, self.dir, tree, start_step=self.start_step)
        self._console = Console(self.total_steps, self.start_step, self._title, self.cfg.run.logging_steps, config=tree)
        if self._console.is_notebook:
            from trainer.metrics.figure import LiveFigure

            self._console.figure = LiveFigure(self.total_steps)
        self._console.start()
        if text := far_off(self.cfg, sum(p.numel() for p in policy.model.parameters())):
            self.note(text)
        self._note_epochs()
        if self.checkpoint is not None:
            restore_rng(self.checkpoint)  # again, last: a user's load_state_dict or a sink may have drawn numbers
        stop.work_begins()
        return self.start_step

    def eval_due(self, step: int) -> bool:
        settings = self.cfg.run
        every, per_epoch = settings.eval_steps, settings.evals_per_epoch
        return step == self.total_steps or self._marks(step, every, per_epoch) > self._marks(step - 1, every, per_epoch)

    def _set_length(self, total_steps: int, steps_per_epoch: Fraction | None) -> None:
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        for name in PER_EPOCH if steps_per_epoch is None else ():
            if getattr(self.cfg.run, name):
                value, flag = getattr(self.cfg.run, name), PER_EPOCH[name]
                raise UserError(f"{name}={value}: this method does not define the length of an epoch; use {flag}")

    def _marks(self, step: int, every: int, per_epoch: int | None) -> int:
        """Count the marks up to this step: one every `every` steps, or `per_epoch` per epoch."""
        if per_epoch is None:
            return step // every if every else 0
        return math.floor(step * per_epoch / self.steps_per_epoch) if per_epoch else 0

    def _note_epochs(self) -> None:
        for name in PER_EPOCH:
            if times := getattr(self.cfg.run, name):
                gap = max(1.0, float(self.steps_per_epoch / times))
                self.note(f"{name}={times}: every {gap:.4g} steps ({float(self.steps_per_epoch):.6g} per epoch)")

    def log_later(self, step: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Call log(step, metrics()); on a GPU, only after the next step is launched, to avoid a host sync.

        The line is written before the next line, a checkpoint and the end of the run. A method that evaluates calls
        write_pending() first.
        """
        self.write_pending()
        if self._defers:
            self._pending = (step, metrics)
        else:
            self.log(step, metrics())

    def write_pending(self) -> None:
        """Write the line deferred by log_later, if any."""
        if self._pending is not None:
            (step, metrics), self._pending = self._pending, None
            self.log(step, metrics())

    def _write_last(self, *, failed: bool) -> None:
        """Write the pending line at the end of the run. If the run has failed, only log an error."""
        step = self._pending and self._pending[0]
        try:
            self.write_pending()
        except Exception as error:
            if not failed:
                raise
            log(f"metrics of step {step} could not be read or written ({describe_error(error)})")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show the metrics of this step as one line, including health findings."""
        self.write_pending()
        assert self._metrics is not None and self._console is not None, "restore() comes before log()"
        assert step > self._last_step, f"step {step} logged after step {self._last_step}: one line per step, in order"
        metrics = dict(metrics)
        findings = self._watch.observe(step, metrics)
        self._write(self._metrics, step, [metrics])
        self._last_step = step
        self._watch_loss(metrics)
        for sink in self._sinks:
            sink.write(step, metrics)
        self._console.step(step, metrics)
        for finding in findings:
            self._console.warn(finding)
        if step == 0 and stop.asked():  # do not take a step only to save the first evaluation
            raise stop.Stopped(f"stopped by SIGTERM before the first step; continue with --resume {self.dir}")

    def sample(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows of {"prompt", "completion", "rewards", "advantage", ...}, and show the first."""
        assert self._samples is not None and self._console is not None, "restore() comes before sample()"
        rows = list(rows)
        self._write(self._samples, step, rows)
        if rows:
            self._console.sample(rows[0])

    def note(self, text: str) -> None:
        """Log a line to the console."""
        if self._console is None:
            log(text)
        else:
            self._console.note(text)

    def keep(self, resource: T) -> T:
        """Close the resource when the run ends, even after an error."""
        self._closed_at_end.append(resource)
        return resource

    def maybe_save(self, step: int, policy: Policy, optimizer: Optimizer, schedule: LambdaLR, state: State) -> bool:
        """Save if a multiple of save_steps was passed since the last save, and at the last step, so that a finished
        run can be extended. Return whether it saved. A method with several steps per rollout calls this only between
        rollouts.

        After SIGTERM, or if the loss stays above loss_watchdog_threshold, always save and end the run. Raise if the
        previous save failed.
        """
        self._saver.poll()
        settings = self.cfg.run
        watches = settings.loss_watchdog_threshold is not None
        if watches:
            self.write_pending()
        every, per_epoch = settings.save_steps, settings.saves_per_epoch
        due = self._marks(step, every, per_epoch) > self._marks(self._save_step, every, per_epoch)
        last = step == self.total_steps and (every if per_epoch is None else per_epoch)
        if due or last:
            self.save(step, policy, optimizer, schedule, state)
        end: Exception | None = None
        if watches and any_rank(self._high_losses >= settings.loss_watchdog_patience):
            end = UserError(
                f"loss_watchdog_threshold={settings.loss_watchdog_threshold:g}: the loss was higher in "
                f"{settings.loss_watchdog_patience} consecutive steps, up to step {step}, which is saved; check the "
                f"data and the learning rate, then continue with --resume {self.dir}"
            )
        elif stop.asked():
            end = stop.Stopped(f"stopped by SIGTERM after step {step}, saved; continue with --resume {self.dir}")
        if end is not None:
            if self._save_step < step:
                self.save(step, policy, optimizer, schedule, state)
            self._saver.wait()
            raise end
        return bool(due or last)

    def _watch_loss(self, metrics: Mapping[str, float]) -> None:
        """Count consecutive steps with a loss above the threshold; a resume recounts them from metrics.jsonl."""
        limit, loss = self.cfg.run.loss_watchdog_threshold, metrics.get("loss/total")
        if limit is not None and loss is not None:
            self._high_losses = 0 if loss <= limit else self._high_losses + 1

    def save(self, step: int, policy: Policy, optimizer: Optimizer, schedule: LambdaLR, state: State) -> None:
        """Write checkpoints/step-N, in the background by default. Log the step first: a resumed run does not log it."""
        self.write_pending()
        assert step == self._last_step, f"checkpoint of step {step}, but the last step logged is {self._last_step}"
        self._flush()
        settings = self.cfg.run
        save_checkpoint(
            self.dir / "checkpoints", step, policy.model, optimizer, schedule, states_of(state),
            keep=settings.save_total_limit,
            describe=lambda folder: describe_model(policy.model, policy.tokenizer, folder, base=policy.source),
            tensors=tensors_of(state),
            saver=self._saver if settings.save_async else None,
        )  # fmt: skip
        self._save_step = step

    def finish(self, policy: Policy) -> None:
        """Export the model to final/, write the report, and log their paths and the evaluation."""
        from trainer.metrics.report import write_report  # the training core does not depend on the report

        assert self._console is not None, "restore() comes before finish()"
        self.write_pending()
        self._saver.wait()
        self._console.stop()
        self._flush()
        self._export(policy)
        tree = self._config_tree()
        report = write_report(self.dir, default_tree(type(self.cfg), tree))
        evaluation = evaluation_lines(read_jsonl(self.dir / "metrics.jsonl"), tree, earlier_settings(self.dir))
        for line in (*evaluation, f"model: {self.dir / 'final'}", f"report: {report}"):
            self._console.note(line)
        self.close()

    def _export(self, policy: Policy) -> None:
        export_model(
            policy.model, policy.tokenizer, self.dir / "final", merge_lora=self.cfg.model.merge_lora,
            base=policy.source, revision=policy.revision,
        )  # fmt: skip

    def close(self) -> None:
        """Release the terminal, and close files and kept resources; may be called twice."""
        if self._console is not None:
            self._console.stop()
        opened = (self._lock, self._samples, self._metrics, *self._sinks, *self._closed_at_end)
        self._sinks, self._closed_at_end = [], []
        with contextlib.ExitStack() as stack:  # closes in reverse order, and all of them even if one fails
            for target in opened:
                if target is not None:
                    stack.callback(target.close)

    def _load(self, policy: Policy, optimizer: Optimizer, schedule: LambdaLR, state: State) -> None:
        assert policy.files is None, "parallelize() comes after load_policy(): the weights are not loaded yet"
        check_state(states_of(state))  # fail now, not at the first save
        if self.checkpoint is not None:
            loaded = load_checkpoint(self.checkpoint, policy.model, optimizer, schedule, verified=True)
            assert loaded["step"] == self.start_step, f"{self.checkpoint} contains step {loaded['step']}"
            load_states(state, loaded["run"], loaded["tensors"], self.checkpoint)

    def _continue_folder(self) -> None:
        """Restore the folder to its state at the checkpoint."""
        if self.start_step > self.total_steps:
            raise UserError(
                f"resume={self.dir}: step {self.start_step} is done, more than the {self.total_steps} steps to train; "
                "raise or remove --max-steps or --num-train-epochs"
            )
        set_aside_after(self.dir / "checkpoints", self.start_step, log)
        last_step = self.start_step if self.checkpoint is not None else -1
        for name in ("metrics.jsonl", "samples.jsonl"):
            truncate_after(self.dir / name, last_step)
        steps = {record["step"] for record in read_jsonl(self.dir / "metrics.jsonl")}
        if num_lost := self.start_step - len(steps - {0}):
            log(
                f"resume={self.dir}: {num_lost} of {self.start_step} steps are missing in metrics.jsonl, which was "
                "deleted or truncated; they will be missing in curves and report"
            )
        before = self._rows_before()
        self._save_segments()  # first: a run killed between the two files loses no earlier setting
        save_config(self.dir / "config.yaml", self._config_tree())
        if before not in (None, self.cfg.run.sequences_per_step):
            factors = "--per-device-train-batch-size x --gradient-accumulation-steps x ranks"  # rows or completions
            log(f"resume={self.dir}: {factors} changed from {before} to {self.cfg.run.sequences_per_step}")
        if self.checkpoint is None:
            log(f"resume={self.dir}: no checkpoint yet; starting at step 0 in the same folder")
        elif self.start_step >= self.total_steps:
            done = f"all {self.total_steps} steps are done"
            log(f"resume={self.dir}: {done}; raise --max-steps or --num-train-epochs to continue")
        else:
            remove_folder(self.dir / "final")  # the result of fewer steps
            log(f"resume={self.dir}: resuming after step {self.start_step} of {self.total_steps}")

    def _save_segments(self) -> None:
        """Record the settings that this resume changes, and forget the changes at steps that are trained again."""
        path, tree = self.dir / SEGMENTS, self._config_tree()
        segments = {step: changed for step, changed in read_segments(self.dir).items() if step < self.start_step}
        if not segments:  # a setting that config.yaml lacks is newer than the run
            before = without_old_defaults(load_config(self.dir / "config.yaml"))
            segments = {0: dict(flatten(default_tree(type(self.cfg), tree))) | dict(flatten(before))}
        settings = {key: value for changed in segments.values() for key, value in changed.items()}
        removed = {key: "none" for key in settings if key.partition(".")[0] in tree}  # such as loss_kwargs.x
        new = {
            key: value
            for key, value in (removed | dict(flatten(tree))).items()
            if key not in PER_CALL and settings.get(key, "none") != value
        }
        if new and self.start_step:
            changes = ", ".join(f"{key} {settings.get(key, 'none')} -> {value}" for key, value in new.items())
            log(f"resume={self.dir}: settings changed after step {self.start_step}: {changes}")
            save_config(path, segments | {self.start_step: new})
        elif path.is_file():
            save_config(path, segments) if self.start_step else path.unlink()

    def _rows_before(self) -> int | None:
        """Return the rows per step when the checkpoint was saved, from its settings and number of ranks, if known."""
        state = {} if self.checkpoint is None else json.loads((self.checkpoint / "state.json").read_text())
        settings = load_config(self.dir / "config.yaml")
        factors = [settings.get("per_device_train_batch_size"), settings.get("gradient_accumulation_steps")]
        factors.append(state.get("processes"))
        return math.prod(factors) if all(isinstance(x, int) for x in factors) else None

    def _config_tree(self) -> dict[str, Any]:
        tree = {**config_to_tree(self.cfg), "method": method_of(self.cfg)}
        if self._resumed:
            # A resume sets output_dir to the folder; keep the original, so that --config starts a new run elsewhere.
            before = load_config(self.dir / "config.yaml")
            tree["output_dir"] = before.get("output_dir", tree["output_dir"])
            if world_size() == 1 and "parallel" in before:  # several ranks may resume the run later
                tree["parallel"] = before["parallel"]
        return tree

    def _write(self, file: JsonlLog, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        with _writing(file.path):
            for row in rows:
                file.write(step, row)

    def _flush(self) -> None:
        assert self._metrics is not None and self._samples is not None, "restore() comes before save() and finish()"
        for file in (self._metrics, self._samples):
            with _writing(file.path):
                file.flush_to_disk()


class OtherRank(Run):
    """The run on ranks other than 0: joins collectives and writes only its shards."""

    def begin(self, total_steps: int, title: str, steps_per_epoch: Fraction | None = None) -> None:
        self._set_length(total_steps, steps_per_epoch)

    def restore(self, policy: Policy, optimizer: Optimizer, schedule: LambdaLR, state: State) -> int:
        self._load(policy, optimizer, schedule, state)
        if self.checkpoint is not None:
            restore_rng(self.checkpoint)
        stop.work_begins()
        return self.start_step

    def log_later(self, step: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        self._last_step = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last_step = step
        if step == 0 and stop.asked():
            raise stop.Stopped("stopped by SIGTERM before the first step")

    def sample(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, policy: Policy) -> None:
        self._saver.wait()
        self._export(policy)
        self.close()

    def _flush(self) -> None:
        pass


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(_could_not_write(path, error)) from None


def _could_not_write(path: Path, error: OSError) -> str:
    return f"{path}: could not be written ({error.strerror}); free up disk space, then continue with --resume"


# the run folder --------------------------------------------------------------------------------------------------


def expand(output_dir: str, method: str, now: time.struct_time | None = None) -> Path:
    """Expand runs/{method}-{time} to runs/grpo-20261115-093000; a dotted method name is cut to its last part."""
    stamp = time.strftime("%Y%m%d-%H%M%S", now or time.localtime())
    return Path(output_dir.replace("{method}", method.rpartition(".")[2]).replace("{time}", stamp)).expanduser()


def is_new_each_time(settings: RunConfig) -> bool:
    return "{time}" in settings.output_dir


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def resumed_folder(settings: RunConfig) -> tuple[Path, int | None]:
    """Return the folder and the last step allowed, if any, for --resume RUN, CHECKPOINT or latest (output_dir)."""
    folder = Path(settings.output_dir if settings.resume == "latest" else str(settings.resume)).expanduser()
    newest = None
    if not folder.is_dir():
        raise UserError(f"resume={settings.resume}: no folder {folder}; pass a run folder or a checkpoint in it")
    if re.fullmatch(r"step-\d+", folder.resolve().name):
        newest = step_of(folder.resolve())
        folder = folder.resolve().parents[1]
    if not (folder / "config.yaml").is_file():
        raise UserError(f"resume={settings.resume}: {folder} has no config.yaml; pass a run folder")
    return folder, newest


def read_id(folder: Path) -> str | None:
    """Return the random id of the run in this folder; None if it is missing or damaged."""
    try:
        run_id = (folder / "run_id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return run_id if re.fullmatch(r"[0-9a-f]{8,64}", run_id) else None


def check_unused(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir={folder}: is a file; pass a folder")
    for path in (folder / name for name in (*FILES, *FOLDERS)):  # before anything is deleted
        is_folder = path.is_dir() and not path.is_symlink()
        if os.path.lexists(path) and is_folder != (path.name in FOLDERS):
            kind = "a folder" if is_folder else "a symbolic link" if path.is_symlink() else "a file"
            raise UserError(f"output_dir={folder}: {path.name} in it is {kind}; move it, or choose another folder")
    if not overwrite and _has_results(folder):
        raise UserError(
            f"output_dir={folder}: already contains a run; continue it with --resume {folder}, delete it with "
            "--overwrite-output-dir, or choose another folder"
        )


def _has_results(folder: Path) -> bool:
    """Return whether the folder contains training results; a run that failed before its first step has none."""
    if any((folder / name).exists() for name in ("checkpoints", "final")):
        return True
    return (folder / "metrics.jsonl").exists() and any(row["step"] > 0 for row in read_jsonl(folder / "metrics.jsonl"))


def make_folder(folder: Path, *, may_exist: bool) -> Path:
    """Create the folder; append -2, -3, ... if another run started in the same second."""
    if may_exist:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for i in range(1, 1000):
        candidate = folder if i == 1 else folder.with_name(f"{folder.name}-{i}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
    raise UserError(f"output_dir={folder}: a thousand runs started there in the same second; try again")


def lock_folder(folder: Path) -> IO[bytes]:
    """Lock the folder against other processes; the OS releases the lock when this process ends."""
    try:
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise UserError(f"output_dir={folder}: cannot be written ({error.strerror}); fix the permissions") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return file  # the file system has no locks
        file.close()
        raise UserError(f"output_dir={folder}: another process is training in it; wait for it or stop it") from None
    return file


# state in a checkpoint -------------------------------------------------------------------------------------------


class Stateful(Protocol):
    """An object whose state is saved in a checkpoint; a plain dict works too.

    state_dict is JSON; an object with tensors also has tensors() and load_tensors(mapping).
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


State = Mapping[str, Stateful | dict[str, Any]]  # e.g. {"loader": loader}


def states_of(state: State) -> dict[str, Any]:
    return {name: dict(item) if isinstance(item, dict) else item.state_dict() for name, item in state.items()}


def tensors_of(state: State) -> dict[str, Tensor]:
    with_tensors = {name: item for name, item in state.items() if hasattr(item, "tensors")}
    return {f"{name}/{key}": value for name, item in with_tensors.items() for key, value in item.tensors().items()}


def load_states(state: State, saved: dict[str, Any], tensors: TensorFiles, checkpoint: Path) -> None:
    if state.keys() != saved.keys():
        raise UserError(
            f"resume={checkpoint}: contains the state of {', '.join(sorted(saved))}, but this method expects "
            f"{', '.join(sorted(state))}; resume with the version of the method that wrote the checkpoint"
        )
    for name, item in state.items():
        try:
            if isinstance(item, dict):
                item.clear()
                item.update(saved[name])
            else:
                item.load_state_dict(saved[name])
            if hasattr(item, "load_tensors"):
                item.load_tensors(tensors.below(f"{name}/"))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if isinstance(error, UserError) or users_part(error):
                raise
            raise UserError(
                f"resume={checkpoint}: invalid state of {name} in state.json ({describe_error(error)}); "
                "resume from another checkpoint"
            ) from error
