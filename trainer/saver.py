"""Checkpoints written while training goes on: a copy of everything is taken in the step, a thread brings it to disk.

    saver = Saver()
    saver.begin(target, snapshot, describe, after, in_background=True)    # waits for the one before it
    saver.poll()                                                          # after each step: has it failed?
    saver.wait()                                                          # until it is in place, or failed

Every rank writes its shards into one folder beside `target` (the file system is shared by all of them) and then a note
of what it has written. The thread of rank 0 waits for the notes, writes the index and the manifest, and renames the
folder: it is whole or it is not there. Threads issue no collectives. That a save is in place, or has failed on some
rank, is agreed on by the main threads in poll() and wait(), which all ranks call at the same places.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trainer import stop
from trainer.files.folders import TMP, remove_folder, sync
from trainer.files.tensor_files import (
    Part,
    Record,
    Spec,
    aligned,
    records_from_json,
    records_to_json,
    specs_of,
    write_tensors,
)
from trainer.parallel.comm import is_main, of_all, rank, world_size
from trainer.parallel.watch import say

INDEX = "shards.json"  # which file holds which part of which tensor
MANIFEST = "manifest.json"
POLL_S = 0.05


@dataclass
class Shard:
    """What a rank holds of a tensor."""

    tensor: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole


@dataclass
class Snapshot:
    """What one rank writes of a checkpoint."""

    texts: dict[str, str] = field(default_factory=dict)  # by file name
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)


class Saver:
    """At most one save at a time is under way."""

    def __init__(self) -> None:
        self._save: Save | None = None

    def begin(
        self,
        target: Path,
        snapshot: Snapshot,
        describe: Callable[[Path], None],
        after: Callable[[], None],
        *,
        in_background: bool,
    ) -> None:
        """Write `target`; on rank 0 `describe` adds files of its own, at once, and `after` follows once it is there."""
        self.wait()
        save = Save(target, snapshot, after)
        stop.save_begins()
        error = save.prepare(describe) if is_main() else None
        told = of_all([error, bool(snapshot.shards)], "begin of a save")
        problems = [(number, found) for number, (found, _) in enumerate(told) if found]
        if problems:
            stop.save_ends()
            raise ValueError(could_not_write(target, problems))
        save.start([number for number, (_, writes) in enumerate(told) if writes])
        self._save = save
        if not in_background:
            self.wait()

    def poll(self) -> None:
        """Look after the save under way; an error when it has failed on any rank."""
        save = self._save
        if save is None:
            return
        ended = not save.thread.is_alive()
        told = of_all([ended, save.error and reason_of(save.error)], "state of a save")
        problems = [(number, found) for number, (_, found) in enumerate(told) if found]
        if problems:
            self._save = None
            save.cancelled.set()
            save.thread.join()
            of_all(None, "end of a failed save")  # nobody writes there any more
            if is_main():
                shutil.rmtree(save.tmp, ignore_errors=True)
            if save.error is not None and not isinstance(save.error, OSError | SafetensorError):
                raise save.error
            raise ValueError(could_not_write(save.target, problems))
        if told[0][0]:  # rank 0 ends last, once it has the notes of all others
            save.thread.join()
            self._save = None

    def wait(self) -> None:
        """Until nothing is under way."""
        while self._save is not None:
            self._save.thread.join(POLL_S if world_size() > 1 else None)
            self.poll()

    def end(self) -> None:
        """Let the save under way come to its end when the run has failed: other ranks may not be there to agree.

        Rank 0 gives the others as long as SIGTERM would.
        """
        save, self._save = self._save, None
        if save is None:
            return
        save.thread.join(stop.STOP.grace_s if world_size() > 1 and is_main() else None)
        if save.thread.is_alive():
            save.cancelled.set()
            say(f"checkpoint={save.target}: not written, as not all ranks have written their part")
        elif save.error is not None:
            if is_main():
                shutil.rmtree(save.tmp, ignore_errors=True)
            say(could_not_write(save.target, [(rank(), reason_of(save.error))]))


class Cancelled(Exception):
    """Some other rank has failed."""


class Save:
    """One save: the folder it is written in, and the thread that writes."""

    def __init__(self, target: Path, snapshot: Snapshot, after: Callable[[], None]) -> None:
        self.target, self.snapshot, self.after = target, snapshot, after
        self.tmp = target.with_name(f"{TMP}{target.name}")
        self.writers: list[int] = []  # ranks that have shards
        self.error: Exception | None = None
        self.cancelled = threading.Event()
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def prepare(self, describe: Callable[[Path], None]) -> str | None:
        """Make the folder and write what is small, in the main thread; why that failed, or None."""
        try:
            shutil.rmtree(self.tmp, ignore_errors=True)
            self.tmp.mkdir(parents=True)
            describe(self.tmp)
            for name, text in self.snapshot.texts.items():
                (self.tmp / name).write_text(text)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self.tmp, ignore_errors=True)
            return reason_of(error)
        except BaseException:
            shutil.rmtree(self.tmp, ignore_errors=True)
            stop.save_ends()
            raise
        return None

    def start(self, writers: list[int]) -> None:
        self.writers = writers
        self.thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Cancelled:
            return
        except Exception as error:  # told by the main thread, at the next poll
            self.error = error
        finally:
            self.snapshot = Snapshot()  # its memory is free from here on
            stop.save_ends()

    def _write(self) -> None:
        if not is_main() and not self.snapshot.shards:
            return
        if not self.tmp.is_dir():
            raise OSError(f"it does not see {self.tmp}; all ranks need one file system for the run folder")
        sums = {name: self._write_file(name, specs_of(parts), parts) for name, parts in self.snapshot.files.items()}
        records: dict[str, Record] = {}
        if self.snapshot.shards:
            name = f"shard-{self.writers.index(rank()):05d}-of-{len(self.writers):05d}.safetensors"
            parts = {key: shard.tensor for key, shard in self.snapshot.shards.items()}
            sums[name] = self._write_file(name, specs_of(parts), parts)
            for key, shard in self.snapshot.shards.items():
                part = Part(name, key, shard.start, tuple(shard.tensor.shape))
                records[key] = Record(shard.shape, shard.tensor.dtype, [part])
        if is_main():
            self._finish(sums, records)
        else:
            note = self._note(rank())
            scratch = note.with_suffix(".part")
            scratch.write_text(json.dumps({"files": sums, "tensors": records_to_json(records)}))
            sync(scratch)
            scratch.rename(note)

    def _write_file(self, name: str, specs: dict[str, Spec], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        order = aligned(specs)
        path = self.tmp / name
        size, sha256 = write_tensors(path, order, (tensors[key] for key in order), self._go_on)
        sync(path)
        return {"size": size, "sha256": sha256}

    def _go_on(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled

    def _note(self, writer: int) -> Path:
        return self.tmp / f".written-{writer:05d}.json"

    def _finish(self, sums: dict[str, Any], records: dict[str, Record]) -> None:
        """On rank 0: everybody's files listed, everything on disk, and the folder in its place."""
        for note in [self._note(writer) for writer in self.writers if writer != rank()]:
            while not note.exists():
                self.cancelled.wait(POLL_S)
                self._go_on()
            told = json.loads(note.read_text())
            sums |= told["files"]
            for name, record in records_from_json(told["tensors"]).items():
                whole = records.setdefault(name, Record(record.shape, record.dtype))
                # 8-bit moments are written in float32, and those of a shard that is too small for them as they are.
                whole.dtype = torch.promote_types(whole.dtype, record.dtype)
                whole.parts.extend(record.parts)
            note.unlink()
        assert all(record.is_whole for record in records.values()), f"{self.target}: some part belongs to no rank"
        if records:
            (self.tmp / INDEX).write_text(json.dumps(records_to_json(records)))
        for path in sorted(self.tmp.iterdir()):
            if path.name not in sums:
                sync(path)
                sums[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        sums = dict(sorted(sums.items()))
        (self.tmp / MANIFEST).write_text(json.dumps({"format": 1, "files": sums}, indent=1))
        sync(self.tmp / MANIFEST)
        sync(self.tmp)
        self._go_on()
        remove_folder(self.target)
        self.tmp.rename(self.target)
        sync(self.target.parent)
        self.after()


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def could_not_write(target: Path, problems: list[tuple[int, str]]) -> str:
    number, reason = problems[0]
    where = f"rank {number}: " if world_size() > 1 else ""
    return (
        f"checkpoint={target}: could not be written ({where}{reason}); free space or permit writing there, then use "
        "--resume: earlier checkpoints are as they were"
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
