"""Metrics: the glossary of names, sums over micro-batches, log files and services, run counters, step timer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from data.errors import UserError
from data.packing import to_device
from rollout.engines.memory import highest_peak
from trainer.parallel.comm import all_gather, all_max, all_sum, data_size, pick_device

# One line per name; `*` matches any text. Built-in methods log no other names (tests/test_smoke.py).
GLOSSARY: dict[str, str] = {
    "step": "Optimizer steps done; the x axis of every curve. Step 0 is the model before training.",
    "reward/mean": "Total reward, the weighted sum over reward functions; mean over the step's completions.",
    "reward/trained_mean": "reward/mean over the groups trained on, if some were replaced (resampled or replayed).",
    "reward/std": "Standard deviation of the total reward over all completions of the step.",
    "reward/zero_std_frac": "Fraction of groups whose completions all got the same reward: no signal within the group.",
    "reward/*/mean": "Mean of this reward function, unweighted, over the completions it applies to.",
    "reward/*/std": "Standard deviation of this reward function, unweighted, over the completions it applies to.",
    "reward/log/*": "Logged by a reward function with log_metric; mean over its calls in the step.",
    "reward/cfm": "Squared distance of a prompt's mean rollout feature to the target's, not whitened; mean.",
    "reward/cfm_unbiased": "reward/cfm minus the bias from the spread of the few rollouts; may be below 0.",
    "reward/failed_rows": "Completions without a reward because a function failed on them (reward_on_error none).",
    "reward/chosen": "Implicit reward of chosen or desirable responses, as the method defines it; mean over them.",
    "reward/rejected": "Implicit reward of rejected or undesirable responses; mean over them.",
    "reward/judge_failed_rows": "Completions without a verdict because the judge failed on their prompt.",
    "pairs/ties_frac": "Fraction of prompts without a pair, because their completions are all equally good.",
    "pairs/reward_gap": "Reward of a prompt's best completion minus the reward of its worst; mean over pairs.",
    "reward/margin": "Reward of the chosen response minus reward of the rejected response; mean over pairs.",
    "reward/accuracy": "Fraction of pairs whose chosen response has the higher reward; a tie counts as wrong.",
    "reward/step_accuracy": "Fraction of labelled solution steps that the model classifies as labelled.",
    "policy/logp_chosen": "Log-prob of chosen or desirable responses, summed over their tokens; mean over them.",
    "policy/logp_rejected": "Log-prob of rejected or undesirable responses, summed over their tokens; mean over them.",
    "policy/log_odds": "ORPO's log odds ratio of chosen vs. rejected; mean over pairs.",
    "policy/kto_z0": "KTO's reference point: mean log-ratio of mismatched rows over the step, never below 0.",
    "policy/entropy": "Entropy of the next-token distribution, -sum_v p(v) log p(v) in nats; mean over trained tokens.",
    "policy/clip_frac": "Fraction of trained tokens whose ratio is clipped, so they give no gradient.",
    "policy/clip_low_frac": "Fraction of trained tokens clipped for a ratio below the range (advantage below 0).",
    "policy/clip_high_frac": "Fraction of trained tokens clipped for a ratio above the range (advantage above 0).",
    "policy/clip_capped_frac": "Fraction of trained tokens beyond delta or dual_clip (advantage below 0).",
    "rollout/reprompted_frac": "SDPO: fraction of completions with a solution or feedback for the teacher.",
    "policy/dppo_masked_frac": "Fraction of tokens beyond dppo_threshold that their advantage pushes further away.",
    "policy/cispo_cap_frac": "Fraction of tokens whose ratio is above cispo_cap, which bounds their weight.",
    "policy/vespo_phi": "VESPO's weight of a completion; mean over tokens.",
    "policy/behaviour_ratio": "Trainer vs. engine: exp(old_logp - behaviour_logp) before any bound; token mean.",
    "policy/behaviour_chi2": "Spread of policy/behaviour_ratio: mean of its square, minus 1.",
    "policy/behaviour_sequence_ratio": "Product of a completion's token ratios to the engine; mean over completions.",
    "policy/behaviour_geometric_ratio": "Geometric mean of a completion's ratios to the engine; mean over completions.",
    "policy/correction": "Weight that corrects for the gap between trainer and engine, bounded; mean over tokens.",
    "policy/correction_zero_frac": "Fraction of tokens that the correction drops.",
    "policy/correction_bound_frac": "Fraction of tokens whose correction was clamped to a bound.",
    "policy/geometric_dropped_frac": "Fraction of completions dropped by geometric_min or geometric_max.",
    "policy/off_policy_dropped_frac": "Fraction of completions dropped by off_policy_mask_threshold.",
    "policy/entropy_kept_frac": "Fraction of tokens that top_entropy_quantile trains on.",
    "policy/entropy_coef": "Weight of the entropy bonus in this step, as entropy_target has adapted it.",
    "policy/ess_frac": "Effective sample size of the raw token ratios to the engine, (sum w)^2 / (n sum w^2).",
    "policy/ess_sequence_frac": "policy/ess_frac for the ratios of whole completions.",
    "policy/advantage_std": "Standard deviation of the advantages of the step.",
    "policy/skipped_frac": "Fraction of completions not computed because their advantage is 0.",
    "policy/ratio": "Importance ratio exp(logp - old_logp); mean over trained tokens, 1 when on policy.",
    "policy/behaviour_kl": "Engine vs. trainer, k3: token mean of exp(d) - 1 - d, d = old_logp - behaviour_logp.",
    "policy/behaviour_gap": "Engine vs. trainer: mean over trained tokens of abs(old_logp - behaviour_logp).",
    "policy/adapter_retained_frac": "Share of a LoRA adapter's effect on log-probs that the in-process engine keeps "
    "in less than float32; at steps 2, 5, 10, 20, 50, 100, 150 etc.",
    "policy/sync_gap": "Servers vs. trainer on fixed tokens after the last weight sync that was checked, in nats.",
    "policy/ref_kl": "KL of a completion to the reference, k1 summed over its tokens (kl_in_reward); mean over them.",
    "policy/ref_kl_k3": "KL to the reference, k3: mean over trained tokens of exp(d) - 1 - d, d = ref_logp - logp.",
    "policy/reverse_kl": "Student to teacher: token mean of logp - teacher_logp, minus the weighted reward advantage.",
    "policy/jsd": "Divergence of student and teacher over the whole vocabulary, by jsd_beta; mean over trained tokens.",
    "value/mean": "Critic: value before a trained token, under the weights at the start of the rollout; mean.",
    "value/explained_variance": "Critic: 1 - var(return - value) / var(return) over trained tokens; 1 is perfect.",
    "value/clip_frac": "Critic: fraction of trained tokens without gradient, clipped by cliprange_value.",
    "loss/total": "The minimised loss: weighted sum of the loss terms, each averaged over the whole step.",
    "loss/policy": "Policy loss of loss_type, by default -min(ratio * A, clip(ratio) * A), with loss_type's average.",
    "loss/kl": "KL term before its weight beta, by default k3 times ratio, with loss_type's average.",
    "loss/value": "Critic: half the squared error of a value, clipped; mean over trained tokens.",
    "loss/router_aux": "Load-balancing loss before its weight; equals the experts per token if perfectly balanced.",
    "loss/dft": "Negative log-likelihood weighted by the token's own probability; mean over trained tokens.",
    "loss/nll": "Negative log-likelihood, -logp of the target in nats; mean over trained tokens.",
    "loss/*": "Loss term of this name before its weight; mean over its unit (pairs, rows or tokens).",
    "optim/grad_norm": "Global L2 norm of the gradient before clipping.",
    "optim/lr": "Learning rate of this step.",
    "optim/skipped_steps": "Steps skipped so far because loss or gradient was not finite; absent while 0.",
    "rollout/len_mean": "Completion length in tokens, end token included; mean over completions.",
    "rollout/len_max": "Longest completion of the step, in tokens.",
    "rollout/truncated_frac": "Fraction of completions cut off at max_completion_length, without a stop token.",
    "rollout/staleness_max": "Age of the weights that sampled a completion, in optimizer steps; largest of the batch.",
    "rollout/staleness_mean": "Age of the weights that sampled a completion, in optimizer steps; mean.",
    "rollout/queued_groups": "Groups of later batches that are being sampled or wait to be trained on.",
    "rollout/queued_ready_frac": "Fraction of the groups of later batches that are complete.",
    "rollout/continued_frac": "Partial rollouts: fraction of completions sampled by more than one weight version.",
    "rollout/resampled_groups": "Groups sampled to replace groups with equal rewards (dynamic_sampling).",
    "rollout/replayed_groups": "Groups of earlier steps that replace groups with equal rewards.",
    "rollout/replay_size": "Groups in the replay buffer.",
    "rollout/rerolled_groups": "Groups whose prompt was sampled again because no earlier completion was rewarded.",
    "rollout/reroll_waiting": "Prompts waiting to be sampled again.",
    "rollout/num_turns": "Turns of the model in an episode; mean over episodes.",
    "rollout/tool_calls": "Tool calls in an episode; mean over episodes.",
    "rollout/tool_errors": "Failed tool calls in an episode, reported to the model; mean over episodes.",
    "rollout/env_done": "Fraction of episodes that the environment ended.",
    "rollout/env_refused": "Actions in an episode that could not be parsed; mean over episodes.",
    "rollout/env_failed": "Fraction of episodes lost because their environment failed; they are not trained on.",
    "rollout/branches": "Branches per episode: how often a client rewrote its history; mean over episodes.",
    "rollout/retokenised_frac": "Fraction of completions that a rollout function returned as text, tokenised again.",
    "rollout/anchors": "Positions in the step's documents from which completions were sampled.",
    "rollout/servers_ready": "Servers that accept requests at the end of the step.",
    "rollout/server_out": "Number of times a failed server was removed from the pool, since the start.",
    "rollout/server_restarts": "Number of restarts of servers that the run had started, since the start.",
    "rollout/retries": "Requests resent because a server failed, since the start.",
    "rollout/resumed_samples": "Completions interrupted by new weights and continued with them, since the start.",
    "rollout/sync_mb": "Megabytes of weights sent in the last sync.",
    "time/sync_s": "Seconds spent sending weights to the servers since the last step.",
    "time/step_s": "Wall time of the step in seconds, without evaluation and checkpoints.",
    "time/wait_s": "Seconds the trainer waited for completions in this step.",
    "time/rollout_s": "Seconds spent generating completions in this step.",
    "time/reward_s": "Seconds spent in reward functions in this step.",
    "time/train_s": "Seconds spent in forward, backward and optimizer in this step.",
    "time/wall_s": "Seconds since training began, with evaluation and checkpoints; summed over resumes.",
    "perf/tokens_per_s": "Tokens trained on in this step (prompts and completions, no padding) / time/step_s.",
    "mem/peak_gib": "Peak memory of a rank so far in GiB (GPU memory, or resident without a GPU); maximum over ranks.",
    "data/epoch": "Passes over the training rows so far.",
    "data/tokens_total": "Tokens trained on since the run began, prompts and completions.",
    "data/shared_frac": "Fraction of the step's tokens saved by computing a shared prompt, or turns of branches, once.",
    "data/prompts_total": "Rows drawn from the training data since the run began.",
    "eval/reward/mean": "Total reward, the weighted sum over reward functions; mean over the held-out completions.",
    "eval/reward/best_of_*": "Highest total reward among a held-out row's completions; mean over rows.",
    "eval/*/mean": "Mean of this reward function on the held-out rows.",
    "eval/log/*": "Logged by a reward function with log_metric on the held-out rows; mean over its calls.",
    "eval/cfm": "reward/cfm of held-out prompts, with fixed seeds.",
    "eval/cfm_unbiased": "reward/cfm_unbiased of held-out prompts.",
    "eval/len_mean": "Completion length in tokens on the held-out rows; mean over rows.",
    "eval/nll": "Negative log-likelihood on the held-out rows, -logp in nats; mean over their trained tokens.",
    "eval/loss": "The training loss on the held-out rows, computed as one step over all of them.",
    "eval/reward/accuracy": "Fraction of held-out pairs whose chosen response has the higher reward.",
    "eval/reward/margin": "Reward of the chosen minus reward of the rejected response; mean over held-out pairs.",
    "eval/reward/chosen": "Implicit reward of held-out chosen or desirable responses; mean over them.",
    "eval/reward/rejected": "Implicit reward of held-out rejected or undesirable responses; mean over them.",
    "eval/reward/auc": "Probability that a held-out desirable row has a higher reward than an undesirable one.",
    "eval/reward/step_accuracy": "Fraction of labelled held-out solution steps that the model classifies as labelled.",
    "eval/reward/macro_f1": "F1 of classifying held-out steps, mean of the classes right and wrong.",
    "eval/reward/macro_f1_majority": "Baseline for macro_f1: every step gets the more frequent label.",
    "eval/rows": "Number of held-out rows evaluated.",
    "health/*": "1 while this finding of the health monitor is active; absent otherwise.",
}


@cache
def _pattern(name: str) -> re.Pattern[str]:
    # `*` crosses slashes: a reward function's name may be a path or contain a regular expression
    return re.compile(".+".join(re.escape(part) for part in name.split("*")), re.DOTALL)


def describe(name: str) -> str | None:
    """Return the glossary's line for a metric, or None; an exact entry wins over a wildcard."""
    if name in GLOSSARY:
        return GLOSSARY[name]
    return next((text for key, text in GLOSSARY.items() if "*" in key and _pattern(key).fullmatch(name)), None)


class MetricSums:
    """(sum, count) pairs added over micro-batches and divided once, after the cross-rank reduce."""

    def __init__(self) -> None:
        self.pairs: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> None:
        """Add one micro-batch, without a host sync. Plain numbers work too."""
        for name, (total, count) in metrics.items():
            total = _scalar(total, torch.device("cpu"))
            pair = torch.stack([total, to_device(_scalar(count, total.device), total.device)])  # (2,)
            self.pairs[name] = self.pairs[name] + pair if name in self.pairs else pair

    def means(self) -> dict[str, float]:
        """Return global sum / global count per name; names with a count of zero are dropped."""
        return self.later()()

    def later(self) -> Callable[[], dict[str, float]]:
        """Sum over ranks and start a copy to the host; the returned function waits for the copy and returns means()."""
        names = self._names()  # all ranks must reduce the same names in the same order
        if not names:
            return dict
        devices = [pair.device for pair in self.pairs.values()] or [pick_device()]
        device = next((device for device in devices if device.type == "cuda"), devices[0])
        zeros = torch.zeros(2, device=device)
        pairs = [to_device(self.pairs[name], device) if name in self.pairs else zeros for name in names]
        copy = HostCopy(all_sum(torch.stack(pairs), "metrics"))  # (num_metrics, 2)

        def means() -> dict[str, float]:
            pairs = zip(names, copy.read().tolist(), strict=True)
            return {name: total / count for name, (total, count) in pairs if count > 0}

        return means

    def _names(self) -> list[str]:
        """Return the names of all ranks; some names may exist on one rank only, and only then they are gathered."""
        if data_size() == 1:
            return sorted(self.pairs)
        text = json.dumps(sorted(self.pairs)).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:7])
        highest, lowest = all_max(torch.tensor([digest, -digest]), "names of metrics").tolist()
        if highest == -lowest:
            return sorted(self.pairs)
        gathered = all_gather(torch.tensor(list(text), dtype=torch.uint8), "different names of metrics")
        return sorted({name for names in gathered for name in json.loads(bytes(names.tolist()))})


class HostCopy:
    """An asynchronous copy of a tensor to the host; read() waits for the copy, but not for work launched after it."""

    def __init__(self, x: Tensor) -> None:
        self.host, self.event = x, None
        if x.is_cuda:
            self.host, self.event = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
            self.host.copy_(x, non_blocking=True)
            self.event.record()

    def read(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.host


def _scalar(x: Tensor | float, device: torch.device) -> Tensor:  # ()
    """Return a tensor on its device, or a number as a tensor filled on `device`, which avoids a synchronous copy."""
    return x.detach().float() if isinstance(x, Tensor) else torch.full((), float(x), device=device)


class JsonlLog:
    """A file with one JSON object per line, written unbuffered, so a killed run loses none."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append the line {"step": step, **record}. JSON has no inf or nan: they are written as null."""
        assert record.get("step", step) == step, f"record of step {record['step']} written as step {step}"
        line = json.dumps(_finite({"step": step, **record}), ensure_ascii=False, allow_nan=False)
        unwritten = line.encode("utf-8", errors="replace") + b"\n"
        self._find()
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]

    def _find(self) -> None:
        """Raise if the file is gone, because lines written to it would be lost; reopen one that an editor replaced."""
        try:
            same = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            raise UserError(
                f"{self.path}: removed or moved during the run; if the run folder was moved, continue with --resume "
                "and its new path"
            ) from None
        if not same:
            self._file.close()
            self._file = self.path.open("ab", buffering=0)

    def flush_to_disk(self) -> None:
        """Sync to disk, before a checkpoint that relies on these lines."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _parse_lines(path: Path) -> Iterable[tuple[bytes, dict[str, Any]]]:
    """Yield (line without its newline, record) for every complete line; skip a last line truncated by a crash."""
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # includes UnicodeDecodeError
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record
        elif number < len(lines):
            raise UserError(f"{path}:{number}: not a JSON object with a step; remove the line or restore the file")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl or samples.jsonl, even of a running or killed run; [] if the file does not exist."""
    path = Path(path)
    return [record for _, record in _parse_lines(path)] if path.exists() else []


def truncate_after(path: Path, step: int) -> None:
    """Drop the lines after `step` and keep the others byte for byte, so that a resumed run writes each step once."""
    path = Path(path)
    if not path.exists():
        return
    kept = [line + b"\n" for line, record in _parse_lines(path) if record["step"] <= step]
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename must survive a power failure
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


SINKS = ("tensorboard", "wandb", "trackio")  # extras of the same names


class Sink(Protocol):
    """A service that receives the metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorboardSink:
    """Event files in RUN/tensorboard; tensorboard hides steps that are repeated after a resume."""

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = start_step + 1 if start_step else None
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One wandb run per run folder: its id is in RUN/wandb_run_id, so a resume continues the same curves."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = run_dir / "wandb_run_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "strop"),
            name=run_dir.name,
            dir=str(run_dir),
            id=id_file.read_text().strip(),
            resume="allow",
            config=dict(config),
        )
        # wandb's step counter cannot decrease, as it must after a resume: plot against the logged step
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A trackio run with the name of the run folder, or a new name if that is taken; a resume continues it."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], start_step: int) -> None:
        import trackio

        project, resume = os.environ.get("TRACKIO_PROJECT", "strop"), "allow" if start_step else "never"
        self._run = trackio.init(project=project, name=run_dir.name, resume=resume, config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def check_sinks(report_to: Iterable[str]) -> None:
    """Raise for an unknown service or a missing package, before a run folder is created."""
    for name in set(report_to) - {"none"}:
        if name not in SINKS:
            raise UserError(f"report_to={name}: unknown service; use {', '.join(SINKS)} or none")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder wandb/ from earlier runs has no origin
            raise UserError(f"report_to={name}: not installed; pip install {name}, or use --report-to none")


def open_sinks(
    report_to: Iterable[str], run_dir: Path, config: Mapping[str, Any], *, start_step: int = 0
) -> list[Sink]:
    """Open the sinks named by --report-to, which check_sinks has checked."""
    tensorboard = [TensorboardSink(run_dir, start_step)] if "tensorboard" in report_to else []
    wandb = [WandbSink(run_dir, config)] if "wandb" in report_to else []
    return [*tensorboard, *wandb, *([TrackioSink(run_dir, config, start_step)] if "trackio" in report_to else [])]


class Timer:
    """Seconds of one step by part. On a GPU laps are events: only reading the times waits for the device."""

    def __init__(self) -> None:
        self._start = self._last = _mark()
        self._laps: list[tuple[str, Any, Any]] = []  # name, begin, end
        self._moved: dict[int, list[tuple[str, str, float]]] = {}  # by number of laps: from, to, seconds

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        begin, self._last = self._last, _mark()
        self._laps.append((name, begin, self._last))

    def move(self, from_name: str, to_name: str, seconds: float) -> None:
        """Move some time of one part to another."""
        self._moved.setdefault(len(self._laps), []).append((from_name, to_name, seconds))

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last lap."""
        return _between(self._start, self._last)

    @property
    def parts(self) -> dict[str, float]:
        parts: dict[str, float] = {}
        for num_laps, (name, begin, end) in enumerate(self._laps, start=1):
            parts[name] = parts.get(name, 0.0) + _between(begin, end)
            for from_name, to_name, seconds in self._moved.get(num_laps, []):
                # These are host seconds, in which the device may still have worked on the previous step.
                parts[from_name] = max(0.0, parts[from_name] - seconds)
                parts[to_name] = parts.get(to_name, 0.0) + seconds
        return parts

    def later(self, num_tokens: int) -> Callable[[], dict[str, float]]:
        """Reduce the peak memory over all ranks; the returned function waits for the device and returns the metrics."""
        peak = float(all_max(torch.tensor(peak_gib()), "peak memory"))

        def metrics() -> dict[str, float]:
            seconds = self.seconds
            return {
                **{f"time/{name}": part for name, part in self.parts.items()},
                "time/step_s": seconds,
                "perf/tokens_per_s": num_tokens / seconds,
                "mem/peak_gib": peak,
            }

        return metrics


def _mark() -> Any:
    """Return the host time, or on a GPU an event after all work launched so far."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000


class Counters:
    """Totals of a run, saved in its checkpoint."""

    KEPT = ("prompts", "tokens", "skipped_steps", "skipped_in_a_row", "unrewarded_in_a_row", "unrewarded_evaluations")

    def __init__(self) -> None:
        self.prompts = 0
        self.tokens = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0  # consecutive steps up to the last
        self.unrewarded_in_a_row = 0  # consecutive batches up to the last
        self.unrewarded_evaluations = 0  # consecutive
        self.started = time.perf_counter()
        self.earlier_s = 0.0  # before the checkpoint that this run resumed from

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.perf_counter() - self.started

    def metrics(self) -> dict[str, float]:
        return {
            "data/prompts_total": self.prompts,
            "data/tokens_total": self.tokens,
            "time/wall_s": self.wall_s,
            **self.skipped(),
        }

    def skipped(self) -> dict[str, float]:
        return {"optim/skipped_steps": self.skipped_steps} if self.skipped_steps else {}

    def state_dict(self) -> dict[str, float]:
        return {"wall_s": self.wall_s, **{name: getattr(self, name) for name in self.KEPT}}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.earlier_s, self.prompts, self.tokens = state["wall_s"], state["prompts"], state["tokens"]
        for name in self.KEPT:
            setattr(self, name, state.get(name, 0))  # older checkpoints have fewer


def peak_gib() -> float:
    """Return the peak memory so far: of the GPU or, without one, of this process."""
    if torch.cuda.is_available():
        return highest_peak() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
