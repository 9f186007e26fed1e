"""Checkpoints: everything a run needs to resume with the same numbers, as safetensors and JSON.

    checkpoints/step-00000020/
        model.safetensors       trained parameters as transformers names them, or adapter_model.safetensors as peft does
        config.json, ...        make the folder loadable by them (written by trainer/run/export.py)
        optimizer.safetensors   per parameter: exp_avg, exp_avg_sq, step
        rng.safetensors         torch generators, CPU and CUDA
        extra.safetensors       tensors of other parts of the run, if any (a moving reference)
        state.json              step, schedule, Python and numpy generators, state of loader, rewards, counters
        manifest.json           size and sha256 of every other file

With a sharded model every rank writes its shards, in place of model, optimizer and extra.safetensors:

        shard-00000-of-00002.safetensors    parts of weights/NAME, moments/NAME.exp_avg, extra/NAME
        shards.json                         shape of each tensor, and which file holds which part of it

Any number of processes can load either kind, sharded or not; each reads the parts it needs, after every byte has been
checked against the manifest. Hyperparameters (rates, betas, schedule shape) are not saved: they come from the config,
so a flag changed at --resume takes effect.

Why not torch.distributed.checkpoint: its safetensors storage writes no checksums, serialises a rank's shard in memory
as a whole, and takes its dtype from the first part; async_save runs collectives (pickled plans) in its threads, where a
rank that dies leaves the others waiting; folders would still be made atomic here, and old checkpoints read here.

Saving is asynchronous: the step takes a copy, and a thread (Saver) writes it. On a GPU not even the copy is waited for
(Copies): it goes to page-locked memory on a stream of its own, while training goes on. The next optimizer step waits
for it on the device, the thread before it writes.

    saver = Saver()
    saver.begin(target, snapshot, describe, after, in_background=True)    # waits for the previous save
    saver.poll()                                                          # after each step: has it failed?
    saver.wait()                                                          # until it is complete, or failed

Every rank writes its shards into a temporary folder beside `target`, on a shared file system, then a note of what it
has written. The thread of rank 0 waits for the notes, writes index and manifest, syncs, and renames the folder, so a
checkpoint is complete or absent; if killed during a save, the run resumes from the previous one. Threads call no
collectives: in poll() and wait(), which all ranks call at the same places, the main threads agree on whether a save is
complete or has failed on some rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from data.errors import UserError
from rollout.tensor_header import aligned
from trainer.files.atomic_folder import TMP, could_not_write, reason_of, remove_folder, sync
from trainer.files.tensor_files import (
    Part,
    Record,
    TensorFiles,
    records_from_json,
    records_of_file,
    records_to_json,
    specs_of,
    write_tensors,
)
from trainer.parallel.comm import is_main, of_all, rank, world_size
from trainer.parallel.dtensor import is_dtensor, is_first_copy, local, local_slices, reshard
from trainer.parallel.watch import log
from trainer.policy.adapters import ADAPTER, adapter_name
from trainer.policy.offload import SLAB, Slabs, bytes_of
from trainer.policy.optim import SCALE, as_held, as_saved, restore_schedule
from trainer.run import stop

FORMAT = 1  # of the manifest
INDEX = "shards.json"  # which file holds which part of which tensor
MANIFEST = "manifest.json"
FILES = {"rng.safetensors", "state.json"}  # besides the tensors
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")  # one of the two
HASHERS = 8  # files verified at the same time
POLL_S = 0.05
LOCKED = 0.25  # of main memory that saves may keep locked, on all ranks of a machine together
CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # files with its limit
ALIGNED = 64  # bytes
_STEP_NAME = re.compile(r"step-(\d{8,})")


# save ------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    checkpoints: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LambdaLR,
    state: dict[str, Any],
    *,
    keep: int,
    describe: Callable[[Path], None] = lambda folder: None,
    tensors: dict[str, Tensor] | None = None,
    saver: Saver | None = None,
) -> Path:
    """Write checkpoints/step-NNNNNNNN, then remove all but the newest `keep`. `state` is JSON: loader, counters, ...

    `describe` adds the files that make the folder loadable by transformers or peft. A `saver` writes from a copy, in
    the background; without one the checkpoint is complete on return.
    """
    target = checkpoints / f"step-{step:08d}"
    check_state(state)
    reshard(model)
    if saver is not None:
        saver.wait()  # hold at most one copy at a time
    record = {"step": step, "schedule": _schedule_state(schedule), "rng": _python_rng(), "run": state}
    record["processes"] = world_size()
    groups = {
        "extra": {name: value.detach() for name, value in (tensors or {}).items()},
        "weights": {_name_on_disk(model, name): p.detach() for name, p in _trained(model)},
        "moments": {f"{name}.{key}": value for name, slots in _slots(model, optimizer) for key, value in slots.items()},
    }
    copies = None if saver is None else saver.copies()
    snapshot = _snapshot(groups, WEIGHTS[hasattr(model, "peft_config")], copies)
    if saver is not None:
        saver.order(optimizer, snapshot.copied)
        if hasattr(optimizer, "_new_buffer"):  # torchao's: these moments exist for this save alone, and are to go now
            wait_on_device(snapshot.copied)
            copies.sources.clear()
    if is_main():
        snapshot.files["rng.safetensors"] = _torch_rng()
        snapshot.texts["state.json"] = json.dumps(record)

    def remove_older() -> None:
        older = [folder for at, folder in list_checkpoints(checkpoints) if at <= step]
        for folder in older[:-keep]:
            remove_folder(folder)

    (saver or Saver()).begin(target, snapshot, describe, remove_older, in_background=saver is not None)
    return target


def _snapshot(groups: dict[str, dict[str, Tensor]], weights_file: str, copies: Copies | None) -> Snapshot:
    """What this rank writes: its shards, or, if nothing is sharded, everything on rank 0, as a model folder.

    With `copies` training can go on: the optimizer changes weights and moments, others the rest, which comes first.
    """

    def held(tensor: Tensor) -> Tensor | Copy:
        return local(tensor) if copies is None else copies.add(local(tensor))

    snapshot = Snapshot(copies=copies)
    is_sharded = any(is_dtensor(tensor) for group in groups.values() for tensor in group.values())
    names = {"weights": weights_file, "moments": "optimizer.safetensors", "extra": "extra.safetensors"}
    for group, tensors in groups.items():
        if is_sharded:
            for name, tensor in tensors.items():
                if is_first_copy(tensor) if is_dtensor(tensor) else is_main():
                    start = tuple(piece.start for piece in local_slices(tensor))
                    snapshot.shards[f"{group}/{name}"] = Shard(held(tensor), start, tuple(tensor.shape))
        elif is_main() and (tensors or group != "extra"):
            snapshot.files[names[group]] = {name: held(tensor) for name, tensor in tensors.items()}
        if copies is not None:
            snapshot.copied = copies.event()
            if group == "extra":
                wait_on_device(snapshot.copied)
    return snapshot


def check_state(state: dict[str, Any]) -> None:
    """Refuse what does not survive JSON (tensors, tuples, keys that are not text)."""
    for name, value in state.items():
        problem = _json_problem(value)
        if problem:
            raise UserError(
                f"state_dict of {name}: holds {problem}, which a checkpoint cannot give back as it was; "
                "return only dicts with text keys, lists, text, numbers, booleans and None"
            )


def _json_problem(value: Any) -> str | None:
    if value is None or type(value) in (bool, int, float, str):
        return None
    if type(value) is list:
        return next((problem for item in value if (problem := _json_problem(item))), None)
    if type(value) is dict:
        keys = [f"the key {key!r}" for key in value if type(key) is not str]
        return keys[0] if keys else _json_problem(list(value.values()))
    return f"a {type(value).__name__}"


# find and load ---------------------------------------------------------------------------------------------------


def latest_valid(checkpoints: Path, log: Callable[[str], None], *, at_most: int | None = None) -> Path | None:
    """The newest undamaged checkpoint (not after step `at_most`), or None if there is none at all.

    Damaged ones are skipped and logged; if all are damaged, that is an error.
    """
    found = [folder for at, folder in list_checkpoints(checkpoints) if at_most is None or at <= at_most]
    for folder in reversed(found):
        problem = find_problem(folder)
        if problem is None:
            return folder
        log(f"checkpoint {folder} is damaged ({problem}); trying the one before it")
    if found:
        raise UserError(
            f"resume={checkpoints}: no undamaged checkpoint ({len(found)} tried); restore one from a backup, "
            "or start again with --overwrite-output-dir"
        )
    return None


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, oldest first; not yet verified."""
    if not checkpoints.is_dir():
        return []
    matches = [(_STEP_NAME.fullmatch(folder.name), folder) for folder in checkpoints.iterdir() if folder.is_dir()]
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def find_problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint on disk, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return f"manifest.json is not of format {FORMAT}"
        sums = manifest.get("files")
        if not isinstance(sums, dict) or not _lists_a_checkpoint(sums):
            return "manifest.json does not list the files of a checkpoint"
        for name in sums:
            size = (folder / name).stat().st_size
            if not isinstance(sums[name], dict) or size != sums[name].get("size"):
                return f"{name} has {size} bytes, not what manifest.json says"
        with ThreadPoolExecutor(HASHERS) as threads:
            found = dict(zip(sums, threads.map(lambda name: sha256_of(folder / name), sums), strict=True))
        for name, sha256 in found.items():
            if sha256 != sums[name].get("sha256"):
                return f"{name} has changed since it was written"
        if INDEX in sums and {p.file for r in stored_tensors(folder).records.values() for p in r.parts} - sums.keys():
            return "manifest.json does not list the files of a checkpoint"
        return _state_problem(folder, json.loads((folder / "state.json").read_bytes()))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return "manifest.json or state.json is not JSON"


def _state_problem(folder: Path, state: Any) -> str | None:
    """What is wrong with the parts of state.json that every checkpoint has, or None if nothing."""
    number = _STEP_NAME.fullmatch(folder.name)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        return "state.json names no step"
    if number and int(number[1]) != state["step"]:
        return f"it is step {state['step']} under another number"
    schedule = state.get("schedule")
    counts = [schedule.get(name) for name in ("last_epoch", "step_count")] if isinstance(schedule, dict) else [None]
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(state.get("run"), dict):
        return "state.json lacks the schedule or the state of the run"
    try:
        python, numpy = _generator_states(state["rng"])
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return "state.json holds no states of random generators"
    return None


def _lists_a_checkpoint(names: dict[str, Any]) -> bool:
    unsharded = "optimizer.safetensors" in names and bool(names.keys() & set(WEIGHTS))
    return names.keys() >= FILES and (unsharded or INDEX in names)


def set_aside_after(checkpoints: Path, step: int, log: Callable[[str], None]) -> None:
    """Rename checkpoints of later steps when a run resumes from `step`: the next resume would pick them."""
    for at, folder in list_checkpoints(checkpoints):
        if at > step:
            aside = folder.with_name(f"{folder.name}.old")
            remove_folder(aside)
            folder.rename(aside)
            log(f"checkpoint {folder.name} is later than step {step}, where this run resumes; kept as {aside}")
    if checkpoints.is_dir():
        sync(checkpoints)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, schedule: LambdaLR, *, verified: bool = False
) -> dict[str, Any]:
    """Load a checkpoint into the given objects and the global generators; returns {"step", "run": state, "tensors"}.

    Changes nothing unless everything fits. verified: latest_valid has just checked every byte.
    """
    problem = None if verified else find_problem(folder)
    if problem:
        raise UserError(f"checkpoint={folder}: damaged, {problem}; resume from another one")
    reshard(model)
    trained = dict(_trained(model))
    stored = stored_tensors(folder)
    weights, moments = stored.below("weights/"), stored.below("moments/")
    names = {_name_on_disk(model, name): name for name in trained}
    _check_fit(folder, trained, {names.get(name, name): found for name, found in weights.records.items()})
    record = json.loads((folder / "state.json").read_text())
    assert {name.rpartition(".")[0] for name in moments} <= trained.keys(), f"{folder}: moments of unknown parameters"

    with torch.no_grad():
        for name, own in names.items():
            local(trained[own]).copy_(weights.read(name, local_slices(trained[own])))
    _restore_slots(optimizer, trained, moments)
    restore_schedule(schedule, **record["schedule"])
    restore_rng(folder)
    return {"step": record["step"], "run": record["run"], "tensors": stored.below("extra/")}


def stored_tensors(folder: Path) -> TensorFiles:
    """The tensors of a checkpoint by group and name: weights/..., moments/..., extra/...; none is read yet."""
    if (folder / INDEX).exists():
        return TensorFiles(folder, records_from_json(json.loads((folder / INDEX).read_text())))
    names = {name: "weights/" for name in WEIGHTS}
    names |= {"optimizer.safetensors": "moments/", "extra.safetensors": "extra/"}
    records: dict[str, Record] = {}
    for name, group in names.items():
        if (folder / name).exists():
            records |= records_of_file(folder, name, group)
    return TensorFiles(folder, records)


def _check_fit(folder: Path, trained: dict[str, nn.Parameter], weights: dict[str, Record]) -> None:
    differences = [f"it lacks {name}" for name in trained.keys() - weights.keys()]
    differences += [f"{name} is not trained here" for name in weights.keys() - trained.keys()]
    for name in trained.keys() & weights.keys():
        ours, saved = _describe(trained[name]), _describe(weights[name])
        differences += [f"{name} is {saved} there and {ours} here"] if ours != saved else []
    if differences:
        raise UserError(
            f"resume={folder}: its weights do not fit this model ({min(differences)}; {len(differences)} differences "
            "in all); resume with the model, --lora and --dtype settings the run was started with"
        )


def _describe(tensor: Tensor | Record) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# parameters, optimizer, schedule, generators ---------------------------------------------------------------------


def _name_on_disk(model: nn.Module, name: str) -> str:
    if not hasattr(model, "peft_config"):
        return name
    name = adapter_name(name)
    if model.peft_config[ADAPTER].task_type == "CAUSAL_LM":  # as peft names modules that are trained in full
        name = name.replace(".modules_to_save.", ".")
    return name


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters; a tied one once, under its first name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _slots(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, dict[str, Tensor]]]:
    """(parameter name, its optimizer state), for parameters that have been updated."""
    names = {p: name for name, p in _trained(model)}
    rows = []
    for parameter, slots in optimizer.state.items():
        assert parameter in names, f"the optimizer holds an untrained parameter of shape {tuple(parameter.shape)}"
        assert all(isinstance(value, Tensor) for value in slots.values()), f"{names[parameter]}: {slots.keys()}"
        rows.append((names[parameter], as_saved(slots)))
    return rows


def _restore_slots(optimizer: Optimizer, trained: dict[str, nn.Parameter], moments: TensorFiles) -> None:
    optimizer.state.clear()
    for name, record in moments.records.items():
        owner, _, key = name.rpartition(".")
        parameter = trained[owner]
        if is_dtensor(parameter) and key != "step" and not key.endswith(SCALE):
            slot = torch.zeros_like(parameter, dtype=record.dtype, requires_grad=False)
            local(slot).copy_(moments.read(name, local_slices(parameter)))
        else:
            slot = moments.read(name)
        optimizer.state[parameter][key] = slot
    for parameter, slots in optimizer.state.items():
        optimizer.state[parameter] = as_held(optimizer, parameter, slots)


def _schedule_state(schedule: LambdaLR) -> dict[str, int]:
    return {"last_epoch": schedule.last_epoch, "step_count": schedule._step_count}


def _python_rng() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    numpy_state = [kind, keys.tolist(), position, has_gauss, cached]
    return {"python": [version, list(words), gauss], "numpy": numpy_state}


def _torch_rng() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _generator_states(record: dict[str, Any]) -> tuple[Any, Any]:
    """The states saved by _python_rng, as random and numpy take them."""
    version, words, gauss = record["python"]
    kind, keys, *rest = record["numpy"]
    return (version, tuple(words), gauss), (kind, np.array(keys, dtype=np.uint32), *rest)


def restore_rng(folder: Path) -> None:
    """Restore Python's, numpy's and torch's global generators."""
    python, numpy = _generator_states(json.loads((folder / "state.json").read_text())["rng"])
    states = load_file(folder / "rng.safetensors")
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(states["cpu"].clone())
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{i}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{i}"].clone(), i)


# write in the background -----------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A tensor in page-locked memory, once its copies have ended."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[Tensor]  # uint8

    def tensor(self) -> Tensor:
        whole = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)
        return whole.view(self.dtype).view(self.shape)


class Copies:
    """The copies of one save, in slabs: behind what has been computed so far, on a stream of their own."""

    def __init__(self, slabs: Slabs, stream: torch.cuda.Stream | None) -> None:
        self.slabs, self.stream = slabs, stream
        self.used: list[Tensor] = []  # slabs
        self.filled = SLAB  # bytes of the last one
        self.sources: list[Tensor] = []  # held until they are copied
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())

    def add(self, tensor: Tensor) -> Tensor | Copy:
        """A copy in main memory; a Copy may still be under way."""
        fits = tensor.numel() and tensor.is_contiguous() and self.slabs.has(tensor.nbytes, locked_share())
        if not (fits and is_copied_aside(tensor)):
            return tensor.to("cpu", copy=True)
        self.sources.append(tensor)
        rest, pieces = bytes_of(tensor), []
        with torch.cuda.stream(self.stream):
            while len(rest):
                if self.filled == SLAB:
                    self.used += self.slabs.take(1)
                    self.filled = 0
                size = min(len(rest), SLAB - self.filled)
                pieces.append(self.used[-1][self.filled : self.filled + size].copy_(rest[:size], non_blocking=True))
                rest, self.filled = rest[size:], min(SLAB, self.filled + -(-size // ALIGNED) * ALIGNED)
        return Copy(tensor.shape, tensor.dtype, pieces)

    def event(self) -> torch.cuda.Event | None:
        """Of the end of the copies added so far."""
        return self.stream.record_event() if self.stream is not None and self.used else None

    def free(self) -> None:
        """The next save copies on the same stream, so behind any copy that is still under way."""
        self.slabs.give_back(self.used)
        self.used, self.sources = [], []


def wait_on_device(event: torch.cuda.Event | None) -> None:
    """What the GPU computes from now on comes after the event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def is_copied_aside(tensor: Tensor) -> bool:
    """Whether its copy need not be waited for."""
    return tensor.is_cuda


def locked_share() -> float:
    """Bytes that this rank may lock."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    return LOCKED * main_memory() / ranks


def main_memory() -> int:
    """Bytes of the machine, or what a container may have of them."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTAINER:
        with contextlib.suppress(OSError, ValueError):  # not there, or no limit
            found.append(int(Path(path).read_text()))
    return min(found)


@dataclass
class Shard:
    """This rank's part of a tensor."""

    tensor: Tensor | Copy
    start: tuple[int, ...]
    shape: tuple[int, ...]  # of the full tensor


@dataclass
class Snapshot:
    """What one rank writes of a checkpoint."""

    texts: dict[str, str] = field(default_factory=dict)  # by file name
    files: dict[str, dict[str, Tensor | Copy]] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    copies: Copies | None = None
    copied: torch.cuda.Event | None = None  # the end of these copies


class Saver:
    """Runs at most one save at a time."""

    def __init__(self) -> None:
        self._save: Save | None = None
        self._slabs = Slabs(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._stream: torch.cuda.Stream | None = None  # of copies
        self._copied: torch.cuda.Event | None = None  # for the next optimizer step to wait for
        self._optimizer: Optimizer | None = None  # that does

    def copies(self) -> Copies:
        """For the save that begins."""
        if self._stream is None and torch.cuda.is_available():  # not before: a rank picks its device late
            self._stream = torch.cuda.Stream()
        return Copies(self._slabs, self._stream)

    def order(self, optimizer: Optimizer, copied: torch.cuda.Event | None) -> None:
        """The optimizer's next step comes after this event."""
        self._copied = copied
        if optimizer is not self._optimizer:
            self._optimizer = optimizer
            optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def _before_step(self) -> None:
        copied, self._copied = self._copied, None
        wait_on_device(copied)

    def begin(
        self,
        target: Path,
        snapshot: Snapshot,
        describe: Callable[[Path], None],
        after: Callable[[], None],
        *,
        in_background: bool,
    ) -> None:
        """Write `target`. On rank 0 `describe` adds its files at once, and `after` runs at the end."""
        self.wait()
        save = Save(target, snapshot, after)
        stop.save_begins()
        error = save.prepare(describe) if is_main() else None
        reports = of_all([error, bool(snapshot.shards)], "begin of a save")
        problems = [(number, found) for number, (found, _) in enumerate(reports) if found]
        if problems:
            stop.save_ends()
            save.free()
            raise UserError(failed(target, problems))
        save.start([number for number, (_, writes) in enumerate(reports) if writes])
        self._save = save
        if not in_background:
            self.wait()

    def poll(self) -> None:
        """Check the running save; raises if it has failed on any rank."""
        save = self._save
        if save is None:
            return
        ended = not save.thread.is_alive()
        reports = of_all([ended, save.error and reason_of(save.error)], "state of a save")
        problems = [(number, found) for number, (_, found) in enumerate(reports) if found]
        if problems:
            self._save = None
            save.cancelled.set()
            save.thread.join()
            of_all(None, "end of a failed save")  # no rank writes there any more
            if is_main():
                shutil.rmtree(save.tmp, ignore_errors=True)
            if save.error is not None and not isinstance(save.error, OSError | SafetensorError):
                raise save.error
            raise UserError(failed(save.target, problems))
        if reports[0][0]:  # rank 0 finishes last, once it has all notes
            save.thread.join()
            self._save = None

    def wait(self) -> None:
        """Wait until no save is running."""
        while self._save is not None:
            self._save.thread.join(POLL_S if world_size() > 1 else None)
            self.poll()

    def end(self) -> None:
        """After the run has failed, let the running save finish without collectives: other ranks may be gone.

        Rank 0 waits for the others as long as after SIGTERM.
        """
        save, self._save = self._save, None
        if save is None:
            return
        save.thread.join(stop.STOP.grace_s if world_size() > 1 and is_main() else None)
        if save.thread.is_alive():
            save.cancelled.set()
            log(f"checkpoint={save.target}: not written, as not all ranks have written their part")
        elif save.error is not None:
            if is_main():
                shutil.rmtree(save.tmp, ignore_errors=True)
            log(failed(save.target, [(rank(), reason_of(save.error))]))


class Cancelled(Exception):
    """Another rank has failed."""


class Save:
    """One save: its temporary folder and the thread that writes."""

    def __init__(self, target: Path, snapshot: Snapshot, after: Callable[[], None]) -> None:
        self.target, self.snapshot, self.after = target, snapshot, after
        self.tmp = target.with_name(f"{TMP}{target.name}")
        self.writers: list[int] = []  # ranks that have shards
        self.error: Exception | None = None
        self.cancelled = threading.Event()
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def prepare(self, describe: Callable[[Path], None]) -> str | None:
        """Make the folder and write the small files, in the main thread; returns why that failed, or None."""
        try:
            shutil.rmtree(self.tmp, ignore_errors=True)
            self.tmp.mkdir(parents=True)
            describe(self.tmp)
            for name, text in self.snapshot.texts.items():
                (self.tmp / name).write_text(text)
        except BaseException as error:
            shutil.rmtree(self.tmp, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                return reason_of(error)
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
        except Exception as error:  # raised by the main thread, at the next poll
            self.error = error
        finally:
            self.free()
            stop.save_ends()

    def free(self) -> None:
        """Free the memory of the snapshot."""
        if self.snapshot.copies is not None:
            self.snapshot.copies.free()
        self.snapshot = Snapshot()

    def _write(self) -> None:
        if self.snapshot.copied is not None:
            torch.cuda.set_device(self.snapshot.copies.stream.device)  # of this thread; CUDA would open the first one
            self.snapshot.copied.synchronize()
            self.snapshot.copies.sources.clear()
        if not is_main() and not self.snapshot.shards:
            return
        if not self.tmp.is_dir():
            raise OSError(f"it does not see {self.tmp}; all ranks need one file system for the run folder")
        sums = {name: self._write_file(name, parts) for name, parts in self.snapshot.files.items()}
        records: dict[str, Record] = {}
        if self.snapshot.shards:
            name = f"shard-{self.writers.index(rank()):05d}-of-{len(self.writers):05d}.safetensors"
            sums[name] = self._write_file(name, {key: shard.tensor for key, shard in self.snapshot.shards.items()})
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

    def _write_file(self, name: str, tensors: Mapping[str, Tensor | Copy]) -> dict[str, Any]:
        order = aligned(specs_of(tensors))
        path = self.tmp / name
        found = (tensors[key] for key in order)
        whole = (x.tensor() if isinstance(x, Copy) else x for x in found)
        size, sha256 = write_tensors(path, order, whole, self._go_on)
        sync(path)
        return {"size": size, "sha256": sha256}

    def _go_on(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled

    def _note(self, writer: int) -> Path:
        return self.tmp / f".written-{writer:05d}.json"

    def _finish(self, sums: dict[str, Any], records: dict[str, Record]) -> None:
        """On rank 0: list the files of all ranks, sync everything, and rename the folder."""
        for note in [self._note(writer) for writer in self.writers if writer != rank()]:
            while not note.exists():
                self.cancelled.wait(POLL_S)
                self._go_on()
            written = json.loads(note.read_text())
            sums |= written["files"]
            for name, record in records_from_json(written["tensors"]).items():
                merged = records.setdefault(name, Record(record.shape, record.dtype))
                # 8-bit moments are saved as float32; shards too small for 8 bit keep their own dtype.
                merged.dtype = torch.promote_types(merged.dtype, record.dtype)
                merged.parts.extend(record.parts)
            note.unlink()
        assert all(record.is_complete for record in records.values()), f"{self.target}: some part belongs to no rank"
        if records:
            (self.tmp / INDEX).write_text(json.dumps(records_to_json(records)))
        for path in sorted(self.tmp.iterdir()):
            if path.name not in sums:
                sync(path)
                sums[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        sums = dict(sorted(sums.items()))
        (self.tmp / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": sums}, indent=1))
        sync(self.tmp / MANIFEST)
        sync(self.tmp)
        self._go_on()
        remove_folder(self.target)
        self.tmp.rename(self.target)
        sync(self.target.parent)
        self.after()


def failed(target: Path, problems: list[tuple[int, str]]) -> str:
    number, reason = problems[0]
    return could_not_write("checkpoint", target, f"rank {number}: {reason}" if world_size() > 1 else reason)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
