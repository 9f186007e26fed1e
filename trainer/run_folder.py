"""The folder of a run: its name, whether it may be used, and that one process has it."""

from __future__ import annotations

import errno
import fcntl
import re
import time
from pathlib import Path
from typing import IO

from trainer.config.blocks import RunConfig
from trainer.metrics.metrics import read_jsonl


def expand(output_dir: str, method: str, now: time.struct_time | None = None) -> Path:
    """runs/{method}-{time} -> runs/grpo-20261115-093000; the method by the last part of its dotted name."""
    stamp = time.strftime("%Y%m%d-%H%M%S", now or time.localtime())
    return Path(output_dir.replace("{method}", method.rpartition(".")[2]).replace("{time}", stamp)).expanduser()


def is_new_each_time(settings: RunConfig) -> bool:
    return "{time}" in settings.output_dir


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def resumed_folder(settings: RunConfig) -> tuple[Path, int | None]:
    """(run folder, last step that may be resumed from). `latest` is that of output_dir; else a run or checkpoint."""
    folder = Path(settings.output_dir if settings.resume == "latest" else str(settings.resume)).expanduser()
    newest = None
    if not folder.is_dir():
        raise ValueError(f"resume={settings.resume}: no such folder {folder}; name a run folder or a checkpoint in it")
    if re.fullmatch(r"step-\d+", folder.resolve().name):
        newest = step_of(folder.resolve())
        folder = folder.resolve().parents[1]
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"resume={settings.resume}: {folder} holds no run (no config.yaml); name a run folder")
    return folder, newest


def read_id(folder: Path) -> str | None:
    """The random id of the run in this folder; None for one of before there were ids, or where it was damaged."""
    try:
        found = (folder / "run_id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return found if re.fullmatch(r"[0-9a-f]{8,64}", found) else None


def refuse_other_run(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={folder}: is a file; name a folder")
    if not overwrite and _holds_run(folder):
        raise ValueError(
            f"output_dir={folder}: already holds a run; continue it with --resume {folder}, delete it with "
            "--overwrite-output-dir, or name another folder"
        )


def _holds_run(folder: Path) -> bool:
    """Whether training left anything there; a start that failed before its first step did not."""
    if any((folder / name).exists() for name in ("checkpoints", "final")):
        return True
    return (folder / "metrics.jsonl").exists() and any(row["step"] > 0 for row in read_jsonl(folder / "metrics.jsonl"))


def make_folder(folder: Path, *, may_exist: bool) -> Path:
    """The folder itself, or with -2, -3, ... added where two runs began in the same second."""
    if may_exist:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for again in range(1, 1000):
        tried = folder if again == 1 else folder.with_name(f"{folder.name}-{again}")
        try:
            tried.mkdir(parents=True)
            return tried
        except FileExistsError:
            continue
    raise ValueError(f"output_dir={folder}: exists a thousand times over; clear the folder above it")


def lock_folder(folder: Path) -> IO[bytes]:
    """Hold the folder against other processes; the system lets go when this one ends, however it ends."""
    try:
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise ValueError(f"output_dir={folder}: cannot be written ({error.strerror}); permit it") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return file  # a file system without locks
        file.close()
        raise ValueError(f"output_dir={folder}: another process is training in it; wait for it, or end it") from None
    return file
