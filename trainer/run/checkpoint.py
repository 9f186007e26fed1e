"""Checkpoints: everything a run needs to resume with the same numbers, as safetensors and JSON.

    checkpoints/step-00000020/
        model.safetensors       all parameters by transformers' names; adapter_model.safetensors: the trained ones by
                                peft's
        config.json, ...        make the folder loadable by transformers or peft (written by trainer/run/export.py)
        optimizer.safetensors   per parameter: exp_avg, exp_avg_sq, step
        rng.safetensors         torch generators, CPU and CUDA
        extra.safetensors       other tensors of the run, if any (a moving reference)
        state.json              step, schedule, Python and numpy generators, state of loader, rewards, counters
        manifest.json           size and sha256 of every other file

With a sharded model every rank writes a shard file, which replaces model, optimizer and extra.safetensors:

        shard-00000-of-00002.safetensors    parts of weights/NAME, moments/NAME.exp_avg, extra/NAME
        shards.json                         shape of each tensor and the file of each of its parts

Any number of ranks can load either kind, sharded or not. Every byte is checked against the manifest, then each rank
reads the parts it needs. Hyperparameters (rates, betas, schedule shape) are not saved: they come from the config, so a
flag changed at --resume takes effect.

torch.distributed.checkpoint is not used: its safetensors storage writes no checksums, serialises a rank's whole shard
in memory, and takes the dtype from the first part. Its async_save runs collectives (pickled plans) in threads, where a
dead rank makes the others hang. Atomic folders and old checkpoints would still need the code here.

Saving is asynchronous: the step takes a copy, and a thread (Saver) writes it. On a GPU the copy is asynchronous too
(Copies): a separate stream copies to pinned memory during training. The next optimizer step waits for the copy on the
device, and the thread waits for it before it writes.

    saver = Saver()
    saver.begin(target, snapshot, describe, after, in_background=True)    # waits for the previous save
    saver.poll()                                                          # after each step; raises if the save failed
    saver.wait()                                                          # until the save is complete or has failed

Every rank writes its shard file into a temporary folder next to `target`, on a shared file system, then a note that
lists the file. The thread of rank 0 waits for all notes, writes index and manifest, syncs, and renames the folder, so a
checkpoint is complete or absent. If killed during a save, the run resumes from the previous checkpoint. Threads call no
collectives: the main threads agree in poll() and wait(), which all ranks call at the same points, on whether a save is
complete or has failed on any rank.
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

FORMAT = 1  # manifest version
INDEX = "shards.json"
MANIFEST = "manifest.json"
FILES = {"rng.safetensors", "state.json"}  # in every checkpoint, in addition to the tensors
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")  # one of the two
HASHERS = 8  # threads that verify files
POLL_S = 0.05
LOCKED = 0.25  # fraction of main memory that all ranks of a machine together may pin for saves
CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # memory limit files
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

    `describe` adds the files that make the folder loadable by transformers or peft. A `saver` writes a copy in the
    background; without a saver the checkpoint is complete on return.
    """
    target = checkpoints / f"step-{step:08d}"
    check_state(state)
    reshard(model)
    if saver is not None:
        saver.wait()  # at most one copy in memory
    schedule_state = {"last_epoch": schedule.last_epoch, "step_count": schedule._step_count}
    record = {"step": step, "schedule": schedule_state, "rng": _python_rng(), "run": state, "processes": world_size()}
    groups = {
        "extra": {name: value.detach() for name, value in (tensors or {}).items()},
        "weights": {_name_on_disk(model, name): p.detach() for name, p in _saved(model)},
        "moments": {f"{name}.{key}": value for name, slots in _slots(model, optimizer) for key, value in slots.items()},
    }
    copies = None if saver is None else saver.copies()
    snapshot = _snapshot(groups, WEIGHTS[hasattr(model, "peft_config")], copies)
    if saver is not None:
        saver.order(optimizer, snapshot.copied)
        if hasattr(optimizer, "_new_buffer"):  # torchao: these dequantised moments exist only for this save; free them
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
    """Collect what this rank writes: its shards or, if nothing is sharded, everything on rank 0, as a model folder.

    With `copies` training can continue. Extra tensors are copied first: the device waits for them here, while weights
    and moments only have to be copied before the next optimizer step.
    """

    def stored(tensor: Tensor) -> Tensor | Copy:
        return local(tensor) if copies is None else copies.add(local(tensor))

    snapshot = Snapshot(copies=copies)
    is_sharded = any(is_dtensor(tensor) for group in groups.values() for tensor in group.values())
    names = {"weights": weights_file, "moments": "optimizer.safetensors", "extra": "extra.safetensors"}
    for group, tensors in groups.items():
        if is_sharded:
            for name, tensor in tensors.items():
                if is_first_copy(tensor) if is_dtensor(tensor) else is_main():
                    start = tuple(piece.start for piece in local_slices(tensor))
                    snapshot.shards[f"{group}/{name}"] = Shard(stored(tensor), start, tuple(tensor.shape))
        elif is_main() and (tensors or group != "extra"):
            snapshot.files[names[group]] = {name: stored(tensor) for name, tensor in tensors.items()}
        if copies is not None:
            snapshot.copied = copies.event()
            if group == "extra":
                wait_on_device(snapshot.copied)
    return snapshot


def check_state(state: dict[str, Any]) -> None:
    """Raise if a value does not survive JSON: a tensor, a tuple, a key that is not a string."""
    for name, value in state.items():
        problem = _json_problem(value)
        if problem:
            raise UserError(
                f"state_dict of {name}: contains {problem}, which JSON cannot restore; "
                "return only dicts with string keys, lists, strings, numbers, booleans and None"
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
    """Return the newest undamaged checkpoint up to step `at_most`, or None if there are no checkpoints.

    Log and skip damaged checkpoints; raise if all are damaged.
    """
    folders = [folder for step, folder in list_checkpoints(checkpoints) if at_most is None or step <= at_most]
    for folder in reversed(folders):
        problem = find_problem(folder)
        if problem is None:
            return folder
        log(f"checkpoint {folder} is damaged ({problem}); trying the previous one")
    if folders:
        raise UserError(
            f"resume={checkpoints}: no undamaged checkpoint ({len(folders)} tried); restore one from a backup, "
            "or start again with --overwrite-output-dir"
        )
    return None


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every complete checkpoint, oldest first; not yet verified."""
    if not checkpoints.is_dir():
        return []
    matches = [(_STEP_NAME.fullmatch(folder.name), folder) for folder in checkpoints.iterdir() if folder.is_dir()]
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def find_problem(folder: Path) -> str | None:
    """Describe what is wrong with a checkpoint on disk; None if nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return f"manifest.json is not of format {FORMAT}"
        files = manifest.get("files")
        if not isinstance(files, dict) or not _is_complete(files):
            return "manifest.json does not list the files of a checkpoint"
        for name in files:
            size = (folder / name).stat().st_size
            if not isinstance(files[name], dict) or size != files[name].get("size"):
                return f"{name} has {size} bytes, unlike in manifest.json"
        with ThreadPoolExecutor(HASHERS) as threads:
            checksums = dict(zip(files, threads.map(lambda name: sha256_of(folder / name), files), strict=True))
        for name, sha256 in checksums.items():
            if sha256 != files[name].get("sha256"):
                return f"{name} has changed since it was written"
        if INDEX in files and {p.file for r in stored_tensors(folder).records.values() for p in r.parts} - files.keys():
            return "manifest.json does not list the files of a checkpoint"
        return _state_problem(folder, json.loads((folder / "state.json").read_bytes()))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return "manifest.json or state.json is not JSON"


def _state_problem(folder: Path, state: Any) -> str | None:
    """Describe what is wrong with the parts of state.json that every checkpoint has; None if nothing is."""
    match = _STEP_NAME.fullmatch(folder.name)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        return "state.json has no step"
    if match and int(match[1]) != state["step"]:
        return f"the folder's step differs from step {state['step']} in state.json"
    schedule = state.get("schedule")
    counts = [schedule.get(name) for name in ("last_epoch", "step_count")] if isinstance(schedule, dict) else [None]
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(state.get("run"), dict):
        return "state.json lacks the schedule or the state of the run"
    try:
        python, numpy = _generator_states(state["rng"])
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return "state.json has no valid generator states"
    return None


def _is_complete(names: dict[str, Any]) -> bool:
    unsharded = "optimizer.safetensors" in names and bool(names.keys() & set(WEIGHTS))
    return names.keys() >= FILES and (unsharded or INDEX in names)


def set_aside_after(checkpoints: Path, step: int, log: Callable[[str], None]) -> None:
    """Rename checkpoints after `step`, from which a run resumes: the next resume would choose them."""
    for later_step, folder in list_checkpoints(checkpoints):
        if later_step > step:
            renamed = folder.with_name(f"{folder.name}.old")
            remove_folder(renamed)
            folder.rename(renamed)
            log(f"checkpoint {folder.name} is later than step {step}, where this run resumes; kept as {renamed}")
    if checkpoints.is_dir():
        sync(checkpoints)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, schedule: LambdaLR, *, verified: bool = False
) -> dict[str, Any]:
    """Load a checkpoint into these objects and the global generators; return {"step", "run": state, "tensors"}.

    Nothing is changed unless everything fits. verified: latest_valid has just checked every byte.
    """
    problem = None if verified else find_problem(folder)
    if problem:
        raise UserError(f"checkpoint={folder}: damaged, {problem}; resume from another checkpoint")
    reshard(model)
    saved, trained = dict(_saved(model)), dict(_trained(model))
    stored = stored_tensors(folder)
    weights, moments = stored.below("weights/"), stored.below("moments/")
    names = {_name_on_disk(model, name): name for name in saved}
    _check_fit(folder, saved, {names.get(name, name): record for name, record in weights.records.items()})
    record = json.loads((folder / "state.json").read_text())
    assert {name.rpartition(".")[0] for name in moments} <= saved.keys(), f"{folder}: moments of unknown parameters"

    with torch.no_grad():
        for name_on_disk, name in names.items():
            local(saved[name]).copy_(weights.read(name_on_disk, local_slices(saved[name])))
    _restore_slots(optimizer, trained, moments)
    restore_schedule(schedule, **record["schedule"])
    restore_rng(folder)
    return {"step": record["step"], "run": record["run"], "tensors": stored.below("extra/")}


def stored_tensors(folder: Path) -> TensorFiles:
    """Index the tensors of a checkpoint as weights/NAME, moments/NAME and extra/NAME, without reading them."""
    if (folder / INDEX).exists():
        return TensorFiles(folder, records_from_json(json.loads((folder / INDEX).read_text())))
    names = {name: "weights/" for name in WEIGHTS}
    names |= {"optimizer.safetensors": "moments/", "extra.safetensors": "extra/"}
    records: dict[str, Record] = {}
    for name, group in names.items():
        if (folder / name).exists():
            records |= records_of_file(folder, name, group)
    return TensorFiles(folder, records)


def _check_fit(folder: Path, parameters: dict[str, nn.Parameter], weights: dict[str, Record]) -> None:
    differences = [f"{name} is missing" for name in parameters.keys() - weights.keys()]
    differences += [f"{name} is not trained here" for name in weights.keys() - parameters.keys()]
    for name in parameters.keys() & weights.keys():
        here, saved = _describe(parameters[name]), _describe(weights[name])
        differences += [f"{name} is {saved} in the checkpoint and {here} here"] if here != saved else []
    if differences:
        raise UserError(
            f"resume={folder}: its weights do not match this model ({min(differences)}; {len(differences)} differences "
            "in total); resume with the run's original --model, --lora and --dtype settings"
        )


def _describe(tensor: Tensor | Record) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# parameters, optimizer, schedule, generators ---------------------------------------------------------------------


def _name_on_disk(model: nn.Module, name: str) -> str:
    if not hasattr(model, "peft_config"):
        return name
    name = adapter_name(name)
    if model.peft_config[ADAPTER].task_type == "CAUSAL_LM":  # peft's name for modules trained in full
        name = name.replace(".modules_to_save.", ".")
    return name


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters; a tied parameter once, under its first name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _saved(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a checkpoint: those of the adapter, or all, even if a part is frozen."""
    return _trained(model) if hasattr(model, "peft_config") else list(model.named_parameters())


def _slots(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, dict[str, Tensor]]]:
    """Return (parameter name, optimizer state) for parameters that have been updated."""
    names = {p: name for name, p in _trained(model)}
    states = []
    for parameter, slots in optimizer.state.items():
        assert parameter in names, f"the optimizer has an untrained parameter of shape {tuple(parameter.shape)}"
        assert all(isinstance(value, Tensor) for value in slots.values()), f"{names[parameter]}: {slots.keys()}"
        states.append((names[parameter], as_saved(slots)))
    return states


def _restore_slots(optimizer: Optimizer, trained: dict[str, nn.Parameter], moments: TensorFiles) -> None:
    optimizer.state.clear()
    for name, record in moments.records.items():
        owner, _, key = name.rpartition(".")
        if owner not in trained:  # resumed with fewer --trained-parameters
            continue
        parameter = trained[owner]
        if is_dtensor(parameter) and key != "step" and not key.endswith(SCALE):
            slot = torch.zeros_like(parameter, dtype=record.dtype, requires_grad=False)
            local(slot).copy_(moments.read(name, local_slices(parameter)))
        else:
            slot = moments.read(name)
        optimizer.state[parameter][key] = slot
    for parameter, slots in optimizer.state.items():
        optimizer.state[parameter] = as_held(optimizer, parameter, slots)


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
    """Convert the states saved by _python_rng to the types that random and numpy expect."""
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
    """A tensor in pinned memory, valid after its copies have ended."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[Tensor]  # uint8

    def tensor(self) -> Tensor:
        joined = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)
        return joined.view(self.dtype).view(self.shape)


class Copies:
    """The copies of one save, in slabs, on a separate stream and after all work launched so far."""

    def __init__(self, slabs: Slabs, stream: torch.cuda.Stream | None) -> None:
        self.slabs, self.stream = slabs, stream
        self.used: list[Tensor] = []  # slabs
        self.filled = SLAB  # bytes used in the last slab
        self.sources: list[Tensor] = []  # kept alive until they are copied
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())

    def add(self, tensor: Tensor) -> Tensor | Copy:
        """Copy the tensor to main memory; a returned Copy may still be in flight."""
        fits = tensor.numel() and tensor.is_contiguous() and self.slabs.has(tensor.nbytes, locked_share())
        if not (fits and is_copied_async(tensor)):
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
        """Record an event after the copies added so far."""
        return self.stream.record_event() if self.stream is not None and self.used else None

    def free(self) -> None:
        """Release the slabs. The next save copies on the same stream, so after any copy still in flight."""
        self.slabs.give_back(self.used)
        self.used, self.sources = [], []


def wait_on_device(event: torch.cuda.Event | None) -> None:
    """Make later GPU work wait for the event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def is_copied_async(tensor: Tensor) -> bool:
    return tensor.is_cuda


def locked_share() -> float:
    """Return the bytes that this rank may pin."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    return LOCKED * main_memory() / ranks


def main_memory() -> int:
    """Return the bytes of main memory, or the container's limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTAINER:
        with contextlib.suppress(OSError, ValueError):  # no file or no limit
            limits.append(int(Path(path).read_text()))
    return min(limits)


@dataclass
class Shard:
    """This rank's part of a tensor."""

    tensor: Tensor | Copy
    start: tuple[int, ...]
    shape: tuple[int, ...]  # full tensor


@dataclass
class Snapshot:
    """The part of a checkpoint that one rank writes."""

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
        self._stream: torch.cuda.Stream | None = None  # for copies
        self._copied: torch.cuda.Event | None = None  # the next optimizer step waits for it
        self._optimizer: Optimizer | None = None  # has the hook that waits

    def copies(self) -> Copies:
        """Return the Copies of a new save."""
        if self._stream is None and torch.cuda.is_available():  # not in __init__: a rank chooses its device later
            self._stream = torch.cuda.Stream()
        return Copies(self._slabs, self._stream)

    def order(self, optimizer: Optimizer, copied: torch.cuda.Event | None) -> None:
        """Make the optimizer's next step wait for this event."""
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
        """Write `target`. On rank 0 `describe` adds its files immediately, and `after` runs at the end."""
        self.wait()
        save = Save(target, snapshot, after)
        stop.save_begins()
        error = save.prepare(describe) if is_main() else None
        reports = of_all([error, bool(snapshot.shards)], "begin of a save")
        problems = [(rank, problem) for rank, (problem, _) in enumerate(reports) if problem]
        if problems:
            stop.save_ends()
            save.free()
            raise UserError(failed(target, problems))
        save.writers = [rank for rank, (_, writes) in enumerate(reports) if writes]
        save.thread.start()
        self._save = save
        if not in_background:
            self.wait()

    def poll(self) -> None:
        """Check the running save; raise if it has failed on any rank."""
        save = self._save
        if save is None:
            return
        ended = not save.thread.is_alive()
        reports = of_all([ended, save.error and reason_of(save.error)], "state of a save")
        problems = [(rank, problem) for rank, (_, problem) in enumerate(reports) if problem]
        if problems:
            self._save = None
            save.cancelled.set()
            save.thread.join()
            of_all(None, "end of a failed save")  # no rank writes to the folder any more
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
        """After the run has failed, finish the running save without collectives: other ranks may be gone.

        Rank 0 waits for the other ranks as long as after SIGTERM.
        """
        save, self._save = self._save, None
        if save is None:
            return
        save.thread.join(stop.STOP.grace_s if world_size() > 1 and is_main() else None)
        if save.thread.is_alive():
            save.cancelled.set()
            log(f"checkpoint={save.target}: not saved, because not all ranks have written their shard")
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
        """Create the folder and write the small files, in the main thread; return the reason of a failure, or None."""
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

    def _run(self) -> None:
        try:
            self._write()
        except Cancelled:
            return
        except Exception as error:  # the main thread raises it at the next poll
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
            torch.cuda.set_device(self.snapshot.copies.stream.device)  # a new thread's default is the first device
            self.snapshot.copied.synchronize()
            self.snapshot.copies.sources.clear()
        if not is_main() and not self.snapshot.shards:
            return
        if not self.tmp.is_dir():
            raise OSError(f"cannot see {self.tmp}; all ranks need a shared file system for the run folder")
        files = {name: self._write_file(name, parts) for name, parts in self.snapshot.files.items()}
        records: dict[str, Record] = {}
        if self.snapshot.shards:
            name = f"shard-{self.writers.index(rank()):05d}-of-{len(self.writers):05d}.safetensors"
            files[name] = self._write_file(name, {key: shard.tensor for key, shard in self.snapshot.shards.items()})
            for key, shard in self.snapshot.shards.items():
                part = Part(name, key, shard.start, tuple(shard.tensor.shape))
                records[key] = Record(shard.shape, shard.tensor.dtype, [part])
        if is_main():
            self._finish(files, records)
        else:
            note = self._note(rank())
            scratch = note.with_suffix(".part")
            scratch.write_text(json.dumps({"files": files, "tensors": records_to_json(records)}))
            sync(scratch)
            scratch.rename(note)

    def _write_file(self, name: str, tensors: Mapping[str, Tensor | Copy]) -> dict[str, Any]:
        order = aligned(specs_of(tensors))
        path = self.tmp / name
        in_order = (tensors[key] for key in order)
        in_memory = (x.tensor() if isinstance(x, Copy) else x for x in in_order)
        size, sha256 = write_tensors(path, order, in_memory, self._check_cancelled)
        sync(path)
        return {"size": size, "sha256": sha256}

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled

    def _note(self, writer: int) -> Path:
        return self.tmp / f".written-{writer:05d}.json"

    def _finish(self, files: dict[str, Any], records: dict[str, Record]) -> None:
        """List the files of all ranks, sync everything, and rename the folder. Rank 0 only."""
        for note in [self._note(writer) for writer in self.writers if writer != rank()]:
            while not note.exists():
                self.cancelled.wait(POLL_S)
                self._check_cancelled()
            written = json.loads(note.read_text())
            files |= written["files"]
            for name, record in records_from_json(written["tensors"]).items():
                merged = records.setdefault(name, Record(record.shape, record.dtype))
                # 8-bit moments are saved as float32; shards too small for 8 bits keep their dtype.
                merged.dtype = torch.promote_types(merged.dtype, record.dtype)
                merged.parts.extend(record.parts)
            note.unlink()
        assert all(record.is_complete for record in records.values()), f"{self.target}: some part belongs to no rank"
        if records:
            (self.tmp / INDEX).write_text(json.dumps(records_to_json(records)))
        for path in sorted(self.tmp.iterdir()):
            if path.name not in files:
                sync(path)
                files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        files = dict(sorted(files.items()))
        (self.tmp / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
        sync(self.tmp / MANIFEST)
        sync(self.tmp)
        self._check_cancelled()
        remove_folder(self.target)
        self.tmp.rename(self.target)
        sync(self.target.parent)
        self.after()


def failed(target: Path, problems: list[tuple[int, str]]) -> str:
    failed_rank, reason = problems[0]
    return could_not_write("checkpoint", target, f"rank {failed_rank}: {reason}" if world_size() > 1 else reason)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
