"""Seconds from the command to the end of the first GRPO step: without compiled code on disk, then with it.

    python -m bench.runs.startup --model SmolLM2-135M-Instruct [--compile] [--out rows.jsonl]

Each run is a process of its own, whose cache folder is empty only in the first. Parts are those of the run's `startup:`
line. The error is the share of the time from the start of the process that this line does not contain.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

from bench import common
from bench.common import Timing, emit, make_row, require_commit

DATA = ("--data", "task:addition:split=train,size=512", "--per-device-train-batch-size", "64")
SHORT = ("--max-completion-length", "64", "--rollout.engine", "local", "--save-steps", "0", "--max-steps", "1")


def startup(folder: str, *flags: str) -> tuple[float, dict[str, float]]:
    """Return the seconds to the end of the first step, and its parts."""
    command = [sys.executable, "-u", "-m", "trainer", "--method", "grpo", *DATA, *SHORT, *flags]
    environment = common.environment(XDG_CACHE_HOME=folder)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        environment.pop(name, None)
    started = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as child:
        lines = []
        for line in child.stdout:
            lines.append(line)
            if line.startswith("startup: "):
                seconds = time.perf_counter() - started
                child.communicate()
                return seconds, {name: float(value) for name, value in re.findall(r"[:,] ([a-z ]+) ([\d.]+)", line)}
    raise SystemExit("no startup line:\n" + "".join(lines[-20:]))


def main(model: str, out: Path | None = None, compile: bool = False, runs: int = 2) -> None:
    """Measure the runs in order.

    Args:
        model: A model folder or hub id.
        out: File to append the rows to.
        compile: Compile the model's blocks.
        runs: Runs, of which the first compiles everything.
    """
    require_commit()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            flags = ("--model", model, "--compile", str(compile).lower(), "--output-dir", f"{folder}/run{number}")
            seconds, parts = startup(folder, *flags)
            row = make_row(
                "startup", f"{'cached' if number else 'first'}{', compile' if compile else ''}",
                Timing([1000 * seconds], None), shape={"completions": 64}, dtype="bfloat16", work=1, unit="runs",
                errors={"unnamed": 1 - sum(parts.values()) / seconds},
                extra={f"{name.replace(' ', '_')}_s": value for name, value in parts.items()},
            )  # fmt: skip
            emit([row], out)


if __name__ == "__main__":
    tyro.cli(main)
