"""Measure what README.md and docs/ claim: the commands of bench/claims.py, one process each.

    python -m bench --list                                  # names, time, packages, targets
    python -m bench --only kernels/                         # make bench
    python -m bench --minutes 9 --out rows.jsonl --only hybrids/ agents/
    python -m bench --out rows.jsonl --only sampling/ --old ../OLDER_COMMIT
    python -m bench --smoke --out /tmp/rows.jsonl           # the same commands in small, on any machine

Each command appends its rows to --out as soon as it has them, and then its outcome. A command starts only if its time
fits into --minutes; it is killed with all of its processes after twice its time. Commands whose outcome in --out is
`done` at this commit are skipped, so the same command continues after an interruption. Output goes to a file next to
--out. `--old` also measures another checkout, whose folder is named after its commit, before the current one.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from bench.claims import CLAIMS, Claim, Target
from bench.common import ROOT, Row, append, commit, read, require_commit

SMOKE_SECONDS = 600
GRACE_S = 10  # from SIGTERM to SIGKILL


@dataclass
class Settings:
    only: tuple[str, ...] = ()
    """Measure only names that begin with one of these, in this order."""
    out: Path | None = None
    """JSON lines: rows, and the outcome of each command. Default: a new file in the temporary folder."""
    minutes: float | None = None
    """Time limit for everything. None: no limit."""
    old: Path | None = None
    """Another checkout, which also measures the claims on sampling."""
    smoke: bool = False
    """Run small versions, also without a GPU."""
    list: bool = False
    """Print the selected claims and exit."""


def main(cfg: Settings) -> int:
    """Measure, print a table, and return 1 if a command failed."""
    patterns = cfg.only or ("",)
    chosen = list({c.name: c for p in patterns for c in CLAIMS if c.name.startswith(p)}.values())
    if unknown := [p for p in patterns if not any(c.name.startswith(p) for c in CLAIMS)]:
        raise ValueError(f"only={unknown[0]}: no claim begins with it; python -m bench --list prints all")
    if cfg.old and not (cfg.old / "bench").is_dir():
        raise ValueError(f"old={cfg.old}: not a checkout of this project")
    if cfg.list:
        for claim in chosen:
            print(f"{claim.name:22} {claim.seconds:4} s  {obstacle(claim, cfg) or 'can run':28} {claim.shows}")
            for target in claim.targets:
                print(f"{'':32} {target.provider}: {shown(target)}")
        return 0
    require_commit()
    out = (cfg.out or Path(tempfile.mkdtemp(prefix="strop-bench-")) / "rows.jsonl").absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * (cfg.minutes or 1e6)
    ended = [x for x in records(out) if x.get("outcome") == "done"]
    done = {x["claim"] for x in ended if (x["commit"], x["smoke"]) == (commit(), cfg.smoke)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the running command is killed, too
    failed = False
    for claim in chosen:
        left, seconds = deadline - time.monotonic(), claim.seconds * (2 if cfg.old and claim.compares else 1)
        if reason := "already measured" if claim.name in done else obstacle(claim, cfg):
            print(f"{claim.name}: skipped, {reason}", flush=True)
        elif not cfg.smoke and seconds > left:
            print(f"{claim.name}: not started, takes {seconds} of {left:.0f} s left", flush=True)
        else:
            limit = min(left, SMOKE_SECONDS if cfg.smoke else 2 * seconds)
            failed |= measure(claim, cfg, out, limit)["outcome"] != "done"
    print_table(out)
    print(f"rows: {out}", flush=True)
    return int(failed)


def obstacle(claim: Claim, cfg: Settings) -> str | None:
    """Return why the claim cannot be measured here, or None."""
    command = claim.smoke if cfg.smoke else claim.command
    if not command:
        return "has no small version"
    if "cuda" in claim.needs and not cfg.smoke and not torch.cuda.is_available():
        return "needs a GPU"
    if missing := [w for w in shlex.split(command) if w.startswith("$") and not os.environ.get(w[1:])]:
        return f"needs {missing[0]}"
    packages = [] if cfg.smoke else [name for name in claim.needs if name != "cuda"]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"needs the package {missing[0]}" if missing else None


def measure(claim: Claim, cfg: Settings, out: Path, limit: float) -> dict[str, Any]:
    """Run the claim's commands; append and return the outcome."""
    print(f"{claim.name}: {claim.shows} ...", flush=True)
    started = time.monotonic()
    append(out, {"claim": claim.name, "outcome": "started"})
    begin = out.stat().st_size
    words = [os.path.expandvars(word) for word in shlex.split(claim.smoke if cfg.smoke else claim.command)]
    words += ["--out", str(out)] if words[0].startswith("bench") else []
    checkouts = [ROOT] if not (cfg.old and claim.compares) else [cfg.old.absolute(), ROOT]
    with out.with_suffix(".log").open("a+") as log:
        log_begin = log.seek(0, os.SEEK_END)
        for root in checkouts:
            own = {"STROP_COMMIT": commit() if root == ROOT else root.name, "PYTHONUNBUFFERED": "1", **claim.env}
            outcome = run([sys.executable, "-m", *words], root, own, log, limit - (time.monotonic() - started))
            if outcome != "done":
                break
        log.seek(log_begin)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if outcome != "done":
        print("\n".join(lines[-15:]), flush=True)
    num_rows = out.read_bytes()[begin:].count(b"\n")
    result = {
        "claim": claim.name, "outcome": outcome, "seconds": round(time.monotonic() - started, 1), "rows": num_rows,
        "commit": commit(), "smoke": cfg.smoke, "last_line": lines[-1][:300] if lines else "",
    }  # fmt: skip
    append(out, result)
    last = f"; {result['last_line']}" if words[0] == "pytest" else ""
    print(f"{claim.name}: {outcome} after {result['seconds']} s, {num_rows} rows{last}", flush=True)
    return result


def run(command: list[str], root: Path, env: dict[str, str], log: Any, limit: float) -> str:
    """Run the command in a process group of its own; return `done`, `failed` or `killed`."""
    log.write(f"\n# {shlex.join(command)}\n")
    log.flush()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(command, cwd=root, env=os.environ | env, process_group=0, **pipes)
    try:
        code = child.wait(limit)
        return "done" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        return f"killed after {limit:.0f} s"
    finally:  # also on Ctrl-C; processes that the command has left behind would disturb the next one
        for number, wait in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            try:
                os.killpg(child.pid, number)
                child.wait(wait)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def records(out: Path) -> list[dict[str, Any]]:
    return read(out) if out.exists() else []


def print_table(out: Path) -> None:
    """Print the rows of each command in the file, with ratios and targets."""
    known, rows, name = {c.name: c for c in CLAIMS}, [], ""
    for record in [*records(out), {"claim": "", "outcome": "started"}]:
        if "claim" not in record:
            rows.append(Row(**record))
            continue
        ended = record["outcome"] != "started"
        if rows:
            outcome = record["outcome"] if ended else "interrupted"
            print(f"\n{name}, {outcome}, {rows[0].hardware}, commit {rows[-1].commit}")
        for i, row in enumerate(rows):
            measured = ended and name in known and not record["smoke"] and row.commit == record["commit"]
            print_row(row, rows[:i], known[name].targets if measured else ())
        name, rows = record["claim"], []


def print_row(row: Row, earlier: list[Row], targets: tuple[Target, ...]) -> None:
    ratios = [f"{1 / x:.2f} x {name}" for name, x in row.ratio_to.items()]
    what = (row.bench, row.provider, row.shape)
    others = {r.commit: r for r in earlier if r.commit != row.commit and (r.bench, r.provider, r.shape) == what}
    ratios += [f"{row.rate / other.rate:.3f} x {name}" for name, other in others.items()]
    shape = " ".join(f"{key}={value}" for key, value in row.shape.items())
    print(f"  {row.provider:40} {shape:45} {row.rate:12,.1f} {row.unit}/s  {', '.join(ratios)}")
    for target in targets:
        value = value_of(row, target)
        if value is not None:
            print(f"    {value:.4g}, {'met' if target.holds(value) else 'MISSED'}: {shown(target)}")


def value_of(row: Row, target: Target) -> float | None:
    """Return the target's quantity, or None if the target is of another row."""
    if row.provider != target.provider or not target.shape.items() <= row.shape.items():
        return None
    if target.quantity.startswith("x "):
        ratio = row.ratio_to.get(target.quantity[2:])
        return None if ratio is None else 1 / ratio
    values = {**row.extra, **row.errors, "rate": row.rate, "seconds": row.ms_p50 / 1000}
    return values.get(target.quantity)


def shown(target: Target) -> str:
    shape = "".join(f" {key}={value}" for key, value in target.shape.items())
    bound = f">= {target.least:g}" if target.least is not None else f"<= {target.most:g}"
    return f"{target.quantity} {bound}{shape}"


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Settings)))
    except ValueError as error:
        sys.exit(f"error: {error}")
