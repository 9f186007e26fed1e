"""Count host syncs between packing and the end of the optimizer step, for every method.

    pytest -m gpu -s tests/test_gpu_syncs.py             # -s prints the counts and the lines that wait
    STROP_RUNS_ON=cpu pytest tests/test_gpu_syncs.py     # on any machine: only checks the flags

torch warns about each synchronizing operation (set_sync_debug_mode). Explicit waits, about which it does not warn, are
wrapped and counted. The first two steps, which compile kernels and fill caches, are not counted. The count must be the
same with one and with four micro-batches per step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.packing import Item, make_batches
from kernels.linear_logprob import linear_logprob, linear_logprob_loss
from tests.test_gpu_runs import LOCAL, METHODS
from trainer.__main__ import main
from trainer.ebft import strided
from trainer.metrics.metrics import MetricSums
from trainer.rl.rollouts import Rollouts
from trainer.run.training import Training

ON_CPU = os.environ.get("STROP_RUNS_ON") == "cpu"
pytestmark = [] if ON_CPU else pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cpu" if ON_CPU else "cuda"

NUM_STEPS, WARM_UP = 5, 2
OFFLINE, SAMPLED = 2, 4  # maximum syncs per step: methods on fixed rows, and the training part of methods that sample
VARIANTS = {
    "bfloat16": ("--dtype", "bfloat16", "--trained-dtype", "bfloat16"),
    "lora": ("--dtype", "bfloat16", "--lora.r", "4"),
}
MORE = {
    "dpo-precomputed": (*METHODS["dpo"], "--ref", "precomputed"),
    "dpo-aot": (*METHODS["dpo"], "--loss-type", "aot"),
    "dpo-wpo-ld": (*METHODS["dpo"], "--use-weighting", "--ld-alpha", "0.5", "--rpo-alpha", "0.5"),
    "kto-apo": (*METHODS["kto"], "--loss-type", "apo_zero_unpaired"),
    "grpo-kl": (*METHODS["grpo"], "--beta", "0.05"),
    "grpo-two-steps": (*METHODS["grpo"], "--num-iterations", "2"),
}
COMMANDS = {name: tuple(words) for name, words in (METHODS | MORE).items()}
SAMPLING = {name for name, words in COMMANDS.items() if LOCAL[0] in words} | {"ebft-strided"}


class Waits:
    """Counts host syncs while `on`; `steps` has the lines that waited in each counted interval."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self.on = False
        self._show: Any = None  # the original warnings.showwarning

    def begin(self) -> None:
        if self.on:
            return
        self.steps.append(Counter())
        self.on = True
        # Not in a fixture: pytest resets the filters in each phase of a test.
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
        self._show, warnings.showwarning = warnings.showwarning, self._warned
        self._mode("warn")

    def end(self) -> None:
        if self.on:
            self._mode("default")
            warnings.showwarning, self.on = self._show, False

    def _warned(self, message: Any, *rest: Any, **more: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.add("operation")

    def add(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack()[:-2] if Path(f.filename).is_relative_to(ROOT)]
        frames = [f for f in frames if "tests" not in Path(f.filename).relative_to(ROOT).parts] or frames
        where = f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "?"
        self.steps[-1][f"{where} {what}"] += 1

    def _mode(self, mode: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()


@pytest.fixture
def waits(monkeypatch) -> Iterator[Waits]:
    found = Waits()

    def counted(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not found.on:
                return plain(*args, **kwargs)
            found.add(name)
            found._mode("default")  # other torch versions also warn, which would count it twice
            try:
                return plain(*args, **kwargs)
            finally:
                found._mode("warn")

        return call

    for owner in (torch.cuda, torch.cuda.Event):
        monkeypatch.setattr(owner, "synchronize", counted(owner.synchronize, "synchronize"))
    if torch.cuda.is_available():
        stream = torch.cuda.Stream
        monkeypatch.setattr(stream, "synchronize", counted(stream.synchronize, "synchronize"))
    yield found
    found.end()


@pytest.fixture
def intervals(waits, monkeypatch) -> Waits:
    """Count from packing, or from the end of the rollout, to the end of the optimizer step."""
    steps, clip_and_step, backward = Training.steps, Training.clip_and_step, strided.backward
    sample, updates = Rollouts.next, Rollouts.updates

    def counted_steps(self: Training) -> Iterator[Any]:
        for batch in steps(self):
            if self.cfg.run.method != "ebft":
                waits.begin()
            yield batch

    def counted_sample(self: Rollouts) -> Any:
        rollout = sample(self)
        waits.begin()
        return rollout

    def counted_updates(self: Rollouts, *batches: Any) -> Iterator[Any]:
        for batch in updates(self, *batches):
            waits.begin()  # does nothing before the first step, whose interval began after sampling
            yield batch

    def counted_backward(*args: Any) -> MetricSums:
        waits.begin()
        return backward(*args)

    def counted_step(self: Training, sums: MetricSums) -> None:
        clip_and_step(self, sums)
        waits.end()

    monkeypatch.setattr(Training, "steps", counted_steps)
    monkeypatch.setattr(Training, "clip_and_step", counted_step)
    monkeypatch.setattr(Rollouts, "next", counted_sample)
    monkeypatch.setattr(Rollouts, "updates", counted_updates)
    monkeypatch.setattr(strided, "backward", counted_backward)
    return waits


def run_of(name: str, variant: str, micro_batches: int, folder: Path) -> list[str]:
    """Return the command without held-out rows and checkpoints."""
    words = list(COMMANDS[name])
    at = words.index("--eval-data")
    del words[at : at + 2]
    words[words.index("--per-device-train-batch-size") + 1] = str(32 // micro_batches if name in SAMPLING else 8)
    if name == "ebft-strided":
        words[words.index("--per-device-train-batch-size") + 1] = "4"
    if "precomputed" in words:
        words += ["--ref-cache", str(folder / "cache")]
    accumulation = ["--gradient-accumulation-steps", str(micro_batches)]
    steps = ["--max-steps", str(NUM_STEPS), "--save-steps", "0"]
    return [*words, *accumulation, *steps, *VARIANTS[variant], "--output-dir", str(folder / f"run-{micro_batches}")]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_syncs_per_step(name, variant, intervals, tmp_path, capsys):
    found: dict[int, Counter[str]] = {}
    for micro_batches in (1, 4):
        intervals.steps.clear()
        assert main(run_of(name, variant, micro_batches, tmp_path)) == 0
        assert len(intervals.steps) == NUM_STEPS, len(intervals.steps)
        found[micro_batches] = max(intervals.steps[WARM_UP:], key=Counter.total)
    with capsys.disabled():
        for micro_batches, lines in found.items():
            shown = ", ".join(f"{count} x {line}" for line, count in sorted(lines.items())) or "none"
            print(f"\n{name} {variant}, {micro_batches} micro-batches: {lines.total()} host syncs ({shown})", end="")
        sys.stdout.flush()
    limit = SAMPLED if name in SAMPLING else OFFLINE
    assert all(lines.total() <= limit for lines in found.values()), found
    assert found[1].total() == found[4].total(), found


# Single parts, to locate a sync.


@pytest.mark.parametrize("lift", [0.0, -150.0], ids=["ordinary", "overflowing"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_the_head_never_syncs(lift, dtype, waits):
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64, device=DEVICE), torch.randn(1000, 64, device=DEVICE) / 8
    target = torch.randint(1000, (300,), device=DEVICE)
    row = weight[target]
    hidden[::7] += (lift / row.square().sum(1, keepdim=True) * row)[::7]
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    options = {"ignore_index": None, "skip": False}
    for counted in (False, True):
        with waits.counting() if counted else contextlib.nullcontext():
            for frozen in (False, True):
                head = weight.detach() if frozen else weight
                logp, _ = linear_logprob(hidden, head, target, **options)
                logp.sum().backward()
                total, _ = linear_logprob_loss(
                    hidden, head, target, lambda tokens, index: (-tokens.logp.sum(), None), **options
                )
                total.backward()
    if lift:
        assert logp.min() < -80
    assert not waits.steps[-1], waits.steps[-1]


def test_packing_and_metrics_never_sync(waits):
    items = [Item([1, 2, 3, 4], [False, True, True, True])] * 5
    x = torch.ones((), device=DEVICE)
    for counted in (False, True):
        with waits.counting() if counted else contextlib.nullcontext():
            batches = [batch.to(DEVICE) for batch in make_batches(items, accumulation=2, max_tokens=64)]
            sums = MetricSums()
            for batch in batches:
                sums.add({"loss/nll": (x, len(batch.rows)), "loss/total": (x, 0.5), "policy/entropy": (x, x)})
            means = sums.later()
    assert not waits.steps[-1], waits.steps[-1]
    assert means() == {"loss/nll": 0.4, "loss/total": 2.0, "policy/entropy": 1.0}


def test_repeated_warnings_are_all_counted(waits):
    for _ in range(2):
        with waits.counting():
            for _ in range(3):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert [step.total() for step in waits.steps] == [3, 3], waits.steps


@pytest.mark.skipif(ON_CPU, reason="nothing waits on a CPU")
def test_explicit_and_implicit_syncs_are_counted(waits):
    x = torch.ones(3, device=DEVICE)
    with waits.counting():
        x.sum().item()
        torch.cuda.synchronize()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        torch.tensor([1.0, 2.0], device=DEVICE)
    assert waits.steps[-1].total() == 4, waits.steps[-1]
