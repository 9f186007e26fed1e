"""Proofs with several ranks: the grid of methods, and faults. Each also returns a table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.entry import ROOT, environment, metrics, repeatable, run_ok
from tests.ranks.grid import METHODS
from tests.test_ranks import ASLEEP, SFT, TORCHRUN, rank_1_of, two, two_ok
from tests.test_survival import START
from trainer.run.checkpoint import find_problem, list_checkpoints

LIMIT_64, LIMIT_32, LIMIT_METRICS = 1e-9, 1e-5, 1e-5


def grid(scratch: Path) -> tuple[str, bool, str]:
    """Compare two gloo ranks with one for every method: 20 steps of SGD in float64, and a float32 gradient."""
    rows, worst = [], {"weights": 0.0, "float32": 0.0, "metrics": 0.0}
    for mode in ("replicate", "fsdp"):
        done = two_ok("tests.ranks.grid", mode, cwd=scratch, timeout=3600)
        for result in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
            worst = {name: max(value, result[name]) for name, value in worst.items()}
            figures = " | ".join(f"{result[name]:.1e}" for name in ("moved", "weights", "metrics", "float32"))
            rows.append(f"| {result['method']} | {mode} | {result['trains']} | {figures} |")
    table = [
        "| method | mode | trains | moved | weights after 20 steps | metrics | float32 gradient |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    figure = (
        f"{len(rows)} entries; maximum differences: weights {worst['weights']:.1e} of their total change, metrics "
        f"{worst['metrics']:.1e}, float32 gradient {worst['float32']:.1e}"
    )
    passed = len(rows) == 4 * len(METHODS) and worst["weights"] < LIMIT_64 and worst["float32"] < LIMIT_32
    return figure, passed and worst["metrics"] < LIMIT_METRICS, "\n".join(table)


class Fault(NamedTuple):
    """A fault, the run's message, and the result of resuming."""

    name: str
    exit_code: int | str
    message: str
    saved: int | None  # last step reported as saved before the fault
    resumed: int | None  # step that the next start resumed from
    equal: bool | None  # metrics equal those of a run without a fault; None: nothing was resumed

    @property
    def passed(self) -> bool:
        return self.equal is not False and (self.saved is None or (self.resumed or 0) >= self.saved)


STEPS = 6
ONE = (*SFT, "--per-device-train-batch-size", "16", "--max-steps", str(STEPS))
EACH = (*SFT, "--per-device-train-batch-size", "8", "--max-steps", str(STEPS))


def faults(scratch: Path) -> tuple[str, bool, str]:
    """Inject every fault into an SFT run with a checkpoint every two steps; one table row each."""
    run_ok(*ONE, "--output-dir", scratch / "whole", cwd=scratch)
    two_ok("trainer", *EACH, "--output-dir", scratch / "whole-two", cwd=scratch)
    results = [fault(scratch) for fault in FAULTS]
    lines = ["| fault | exit code | message | saved | resumed from | metrics |", "|---|---|---|---|---|---|"]
    for fault in results:
        equal = {True: "equal", False: "DIFFER", None: "-"}[fault.equal]
        steps = ["-" if step is None else f"step {step}" for step in (fault.saved, fault.resumed)]
        message = fault.message.replace("|", "/").replace(f"{scratch}/", "")
        message = message if len(message) < 260 else f"{message[:100]} ... {message[-120:]}"
        lines.append(f"| {fault.name} | {fault.exit_code} | {message} | {' | '.join(steps)} | {equal} |")
    passed = sum(fault.passed for fault in results)
    figure = f"{passed} of {len(results)} faults: no saved checkpoint was lost"
    return figure, passed == len(results), "\n".join(lines)


def saved_in(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    steps = [step for step, path in list_checkpoints(folder / "checkpoints") if not find_problem(path)]
    return max(steps, default=None)


def resume(folder: Path, *flags: str) -> int | None:
    """Resume on one rank and run to the end; return the step that it resumed from."""
    done = run_ok("--resume", folder, *flags, cwd=folder.parent)
    return resumed_from(done.stderr)


def resumed_from(text: str) -> int | None:
    match = re.search(r"resuming after step (\d+)", text)
    return int(match[1]) if match else None


def same(folder: Path, whole: str) -> bool:
    return repeatable(metrics(folder)) == repeatable(metrics(folder.parent / whole))


def last_line(text: str, part: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if part in line), "none")


def patched(scratch: Path, patch: str, *argv: Any) -> subprocess.CompletedProcess[str]:
    """Run the real entry point in one process, after the code in `patch`."""
    command = [sys.executable, "-c", START.format(patch=patch), *map(str, argv)]
    return subprocess.run(command, cwd=scratch, env=environment(), capture_output=True, text=True, timeout=600)


def killed_rank(scratch: Path) -> Fault:
    folder = scratch / "killed"
    command = [*TORCHRUN, "--max-restarts", "1", "-m", "trainer", *EACH, "--output-dir", str(folder)]
    log = scratch / "killed.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=scratch, env=environment(), stdout=file, stderr=file, text=True)
        while saved_in(folder) is None:
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.02)
        saved = saved_in(folder)
        os.kill(rank_1_of(process.pid), signal.SIGKILL)
        code = process.wait(timeout=600)
    text = log.read_text()
    return Fault("`kill -9` of rank 1 of 2, `torchrun --max-restarts 1`", code, last_line(text, "resuming after"),
                 saved, resumed_from(text), same(folder, "whole-two"))  # fmt: skip


def terminated(scratch: Path) -> Fault:
    folder = scratch / "terminated"
    patch = (
        "import trainer.run.run as r\nlog = r.Run.log\nr.Run.log = lambda self, step, m: (log(self, step, m), step == 3"
    )
    patch += " and os.kill(os.getpid(), signal.SIGTERM))"
    done = patched(scratch, patch, *ONE, "--output-dir", folder)
    saved = saved_in(folder)
    return Fault("SIGTERM in step 3", done.returncode, last_line(done.stderr, "stopped by"), saved, resume(folder),
                 same(folder, "whole"))  # fmt: skip


NAN = """
import trainer.methods.sft as sft
num_passes = [0]
backward = sft.backward
def poisoned(policy, *rest):
    metrics = backward(policy, *rest)
    num_passes[0] += 1
    if num_passes[0] == 4:
        next(p for p in policy.model.parameters() if p.grad is not None).grad.fill_(float("nan"))
    return metrics
sft.backward = poisoned
"""


def not_a_number(scratch: Path) -> Fault:
    """The NaN does not recur after resuming, so the metrics equal those of an unbroken run."""
    folder = scratch / "nan"
    done = patched(scratch, NAN, *ONE, "--output-dir", folder)
    saved = saved_in(folder)
    return Fault("NaN in the gradient of step 4, `--nan-policy stop`", done.returncode,
                 last_line(done.stderr, "not finite"), saved, resume(folder), same(folder, "whole"))  # fmt: skip


def skipped(scratch: Path) -> Fault:
    folder = scratch / "skipped"
    done = patched(scratch, NAN, *ONE, "--nan-policy", "skip", "--output-dir", folder)
    rows, expected = (repeatable(metrics(path)) for path in (folder, scratch / "whole"))
    assert rows[:4] == expected[:4] and saved_in(folder) == STEPS, "equal until the NaN; then the run finishes"
    return Fault("the same, `--nan-policy skip`", done.returncode, last_line(done.stdout + done.stderr, "not finite"),
                 None, None, None)  # fmt: skip


def no_space(scratch: Path) -> Fault:
    """Hit a file-size limit during the second checkpoint."""
    folder = scratch / "full"
    run_ok(*ONE, "--max-steps", "2", "--output-dir", folder, cwd=scratch)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    done = patched(scratch, limit, "--resume", folder, "--max-steps", STEPS)
    saved = saved_in(folder)
    return Fault("no space left while step 4 is saved (RLIMIT_FSIZE)", done.returncode,
                 last_line(done.stderr, "could not be"), saved, resume(folder, "--max-steps", str(STEPS)),
                 same(folder, "whole"))  # fmt: skip


def asleep(scratch: Path) -> Fault:
    (scratch / "asleep.py").write_text(ASLEEP)
    done = two("asleep", cwd=scratch, timeout=280, PYTHONPATH=f"{ROOT}{os.pathsep}{scratch}")
    return Fault("rank 1 sleeps before its third micro-batch, limit 4 s", code_of(done.stderr),
                 last_line(done.stderr, "has waited"), None, None, None)  # fmt: skip


SLEEPY = """
import os, signal, sys, time
from trainer import __main__ as entry
from trainer.parallel import comm
import trainer.methods.sft as sft
backward, num_passes = sft.backward, [0]
def late(policy, *rest):
    num_passes[0] += 1
    if num_passes[0] == 4 and comm.rank() == 1 and not os.path.exists("slept"):
        open("slept", "w").write(max(os.listdir("sleepy/checkpoints")))
        time.sleep(600)
    return backward(policy, *rest)
sft.backward = late
sys.exit(entry.main())
"""


def sleeping_rank(scratch: Path) -> Fault:
    """The launcher restarts all ranks after the waiting rank times out."""
    folder = scratch / "sleepy"
    (scratch / "sleepy_entry.py").write_text(SLEEPY)
    done = two("sleepy_entry", *EACH, "--parallel.timeout-s", "40", "--output-dir", folder, cwd=scratch, timeout=580,
               launcher=("--max-restarts", "1"), PYTHONPATH=f"{ROOT}{os.pathsep}{scratch}")  # fmt: skip
    saved = int((scratch / "slept").read_text().removeprefix("step-"))
    message = last_line(done.stderr, "has waited")
    return Fault("rank 1 sleeps in step 4, limit 40 s, `torchrun --max-restarts 1`", done.returncode, message, saved,
                 resumed_from(done.stderr), same(folder, "whole-two"))  # fmt: skip


def code_of(text: str) -> int | str:
    """Return the exit code of the first failed process, as torchrun reports it."""
    codes = re.findall(r"exitcode\s*: (-?\d+)", text)
    return int(codes[-1]) if codes else "none"


FAULTS: list[Callable[[Path], Fault]] = [
    killed_rank, terminated, not_a_number, skipped, no_space, asleep, sleeping_rank
]  # fmt: skip
