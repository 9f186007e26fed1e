"""Checkpoints: everything a run needs to go on with the same numbers, as safetensors and JSON.

    checkpoints/step-00000020/
        model.safetensors       trained parameters as transformers names them, or adapter_model.safetensors as peft does
        config.json, ...        what makes the folder loadable by them (trainer/export.py writes these)
        optimizer.safetensors   per parameter: exp_avg, exp_avg_sq, step
        rng.safetensors         torch generators, CPU and CUDA
        extra.safetensors       tensors of other parts of the run, where there are any (a moving reference)
        state.json              step, schedule, Python and numpy generators, state of loader, rewards, counters
        manifest.json           size and sha256 of every other file

A checkpoint is written beside its place, brought to disk, and renamed: it is whole or it is not there. Reading checks
every byte against the manifest first. Hyperparameters (rates, betas, schedule shape) are not in it: they come from the
config, so a flag changed at --resume takes effect.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainer.dist import barrier, is_main, world_size
from trainer.shards import full, is_dtensor, put, settle
from trainer.small_state import SCALE, as_held, as_saved

FORMAT = 1
FILES = {"optimizer.safetensors", "rng.safetensors", "state.json"}  # beside the weights
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")  # one of the two
ADAPTER = "default"  # peft's name for the adapter under training
TMP = ".tmp-"  # what a crash may leave behind starts with this
_STEP_NAME = re.compile(r"step-(\d{8,})")


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
) -> Path:
    """Write checkpoints/step-NNNNNNNN, then remove all but the newest `keep`. `state` is JSON: loader, counters, ...

    `describe` adds the files that make the folder loadable by transformers or peft.
    """
    target = checkpoints / f"step-{step:08d}"
    check_state(state)
    settle(model)
    moments = {f"{name}.{key}": value for name, slots in _slots(model, optimizer) for key, value in slots.items()}
    weights = {_name_on_disk(model, name): p.detach() for name, p in _trained(model)}
    extra = {name: value.detach() for name, value in (tensors or {}).items()}
    weights, moments, extra = on_main(weights), on_main(moments), on_main(extra)
    if not is_main():
        barrier("checkpoint")
        return target
    record = {"step": step, "schedule": _schedule_state(schedule), "rng": _python_rng(), "run": state}
    with atomic_folder(target, "checkpoint") as folder:
        describe(folder)
        _save_tensors(folder / WEIGHTS[_is_lora(model)], weights)
        _save_tensors(folder / "optimizer.safetensors", moments)
        if extra:
            _save_tensors(folder / "extra.safetensors", extra)
        _save_tensors(folder / "rng.safetensors", _torch_rng())
        (folder / "state.json").write_text(json.dumps(record))
        files = sorted(path for path in folder.iterdir() if path.is_file())
        sums = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files}
        (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": sums}, indent=1))
    older = [folder for at, folder in list_checkpoints(checkpoints) if at <= step]
    for folder in older[:-keep]:
        remove_folder(folder)
    barrier("checkpoint")
    return target


def on_main(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in main memory on rank 0, one after the other; nothing elsewhere, but every rank takes part."""
    gathered = {}
    for name, tensor in tensors.items():
        whole = full(tensor)
        if is_main():
            gathered[name] = whole.cpu() if world_size() > 1 else whole
    return gathered


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, schedule: LambdaLR, *, verified: bool = False
) -> dict[str, Any]:
    """Put a checkpoint into the given objects and the global generators; returns {"step", "run": state, "tensors"}.

    Nothing is touched unless everything fits. verified: latest_valid has just read every byte of it.
    """
    problem = None if verified else find_problem(folder)
    if problem:
        raise ValueError(f"checkpoint={folder}: damaged, {problem}; resume from another one")
    settle(model)
    trained = dict(_trained(model))
    on_disk = load_file(folder / next(name for name in WEIGHTS if (folder / name).exists()))
    names = {_name_on_disk(model, name): name for name in trained}
    weights = {names.get(name, name): value for name, value in on_disk.items()}
    _check_fit(folder, trained, weights)
    moments = load_file(folder / "optimizer.safetensors")
    record = json.loads((folder / "state.json").read_text())
    assert {name.rpartition(".")[0] for name in moments} <= trained.keys(), f"{folder}: moments of unknown parameters"

    with torch.no_grad():
        for name, parameter in trained.items():
            put(parameter, weights[name])
    _restore_slots(optimizer, trained, moments)
    _restore_schedule(schedule, record["schedule"])
    restore_rng(folder)
    tensors = load_file(folder / "extra.safetensors") if (folder / "extra.safetensors").exists() else {}
    return {"step": record["step"], "run": record["run"], "tensors": tensors}


def latest_valid(checkpoints: Path, say: Callable[[str], None], *, at_most: int | None = None) -> Path | None:
    """The newest undamaged checkpoint (not after step `at_most`), or None when there is none at all.

    A damaged one is passed over with a word about it; when all are damaged that is an error.
    """
    found = [folder for at, folder in list_checkpoints(checkpoints) if at_most is None or at <= at_most]
    for folder in reversed(found):
        problem = find_problem(folder)
        if problem is None:
            return folder
        say(f"checkpoint {folder} is damaged ({problem}); trying the one before it")
    if found:
        raise ValueError(
            f"resume={checkpoints}: no undamaged checkpoint ({len(found)} tried); restore one from a backup, "
            "or start again with --overwrite-output-dir"
        )
    return None


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every finished save, oldest first; not yet checked for damage."""
    if not checkpoints.is_dir():
        return []
    matches = [(_STEP_NAME.fullmatch(folder.name), folder) for folder in checkpoints.iterdir() if folder.is_dir()]
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def find_problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint on disk, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return f"manifest.json is not of format {FORMAT}"
        sums = manifest.get("files")
        if not isinstance(sums, dict) or not sums.keys() >= FILES or not sums.keys() & set(WEIGHTS):
            return "manifest.json does not list the files of a checkpoint"
        for name in sums:
            size = (folder / name).stat().st_size
            if not isinstance(sums[name], dict) or size != sums[name].get("size"):
                return f"{name} has {size} bytes, not what manifest.json says"
            if _sha256(folder / name) != sums[name].get("sha256"):
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError:  # not JSON, or not even UTF-8
        return "manifest.json is not JSON"
    return None


def set_aside_after(checkpoints: Path, step: int, say: Callable[[str], None]) -> None:
    """Take checkpoints of later steps out of the way of a run that goes back to `step`.

    They belong to steps that will be done again: left in place, the next resume would pick them.
    """
    for at, folder in list_checkpoints(checkpoints):
        if at > step:
            aside = folder.with_name(f"{folder.name}.old")
            remove_folder(aside)
            folder.rename(aside)
            say(f"checkpoint {folder.name} is later than step {step}, where this run goes on; kept as {aside}")
    if checkpoints.is_dir():
        sync(checkpoints)


@contextmanager
def atomic_folder(target: Path, what: str) -> Iterator[Path]:
    """A folder to write into; on leaving, its files are brought to disk and it takes the place of `target`.

    When writing fails, `target` stays as it was and what was written is removed.
    """
    tmp = target.with_name(f"{TMP}{target.name}-{os.getpid()}")
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        yield tmp
        for path in sorted(tmp.rglob("*"), reverse=True):  # files and inner folders before the folder they are in
            if path.is_file():  # safetensors lets only the owner read; the folder was made as the user's umask wants
                path.chmod(tmp.stat().st_mode & 0o666)
            sync(path)
        sync(tmp)
        remove_folder(target)
        tmp.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(tmp, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{what}={target}: could not be written ({reason}); free space or permit writing there, then use --resume: "
            "earlier checkpoints are as they were"
        ) from None
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete a folder if it is there; renamed first, so that a crash never leaves half of one under its name."""
    if folder.exists():
        doomed = folder.with_name(f"{TMP}{folder.name}-{os.getpid()}-removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Delete what an interrupted write left in `parent`. Only for the process that owns the run folder."""
    for path in parent.glob(f"{TMP}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to disk: a rename or a new file is safe only after this."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _is_lora(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _name_on_disk(model: nn.Module, name: str) -> str:
    """peft leaves its name for the adapter out of the files."""
    return name.replace(f".{ADAPTER}.", ".") if _is_lora(model) else name


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters under training; a tied one comes once, under its first name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _slots(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, dict[str, Tensor]]]:
    """(parameter name, its optimizer state), for those that have been stepped."""
    names = {p: name for name, p in _trained(model)}
    rows = []
    for parameter, slots in optimizer.state.items():
        assert parameter in names, f"the optimizer holds an untrained parameter of shape {tuple(parameter.shape)}"
        assert all(isinstance(value, Tensor) for value in slots.values()), f"{names[parameter]}: {slots.keys()}"
        rows.append((names[parameter], as_saved(slots)))
    return rows


def _restore_slots(optimizer: Optimizer, trained: dict[str, nn.Parameter], moments: dict[str, Tensor]) -> None:
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    optimizer.state.clear()
    for name, value in moments.items():
        owner, _, key = name.rpartition(".")
        parameter = trained[owner]
        # AdamW counts steps on the CPU unless told otherwise. Clones, because load_file's tensors lie on the file.
        device = parameter.device if key != "step" or parameter in on_device else torch.device("cpu")
        value = value.clone().to(device)
        if key != "step" and not key.endswith(SCALE) and is_dtensor(parameter):
            slot = torch.zeros_like(parameter)
            put(slot, value)
            value = slot
        optimizer.state[parameter][key] = value
    for parameter, slots in optimizer.state.items():
        optimizer.state[parameter] = as_held(optimizer, parameter, slots)


def _schedule_state(schedule: LambdaLR) -> dict[str, int]:
    return {"last_epoch": schedule.last_epoch, "step_count": schedule._step_count}


def _restore_schedule(schedule: LambdaLR, state: dict[str, int]) -> None:
    """Count from where it was; the rate follows from the count, as LambdaLR itself computes it."""
    schedule.last_epoch = state["last_epoch"]
    schedule._step_count = state["step_count"]
    groups = schedule.optimizer.param_groups
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        rate = base * factor(schedule.last_epoch)
        if isinstance(group["lr"], Tensor):  # torchao's optimizers hold on to it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    schedule._last_lr = [float(group["lr"]) for group in groups]


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


def restore_rng(folder: Path) -> None:
    """Put Python's, numpy's and torch's global generators where they were when this checkpoint was saved."""
    record = json.loads((folder / "state.json").read_text())["rng"]
    states = load_file(folder / "rng.safetensors")
    version, words, gauss = record["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = record["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["cpu"].clone())
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{i}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{i}"].clone(), i)


def check_state(state: dict[str, Any]) -> None:
    """Refuse what JSON would not give back as it was (tensors, tuples, keys that are not text)."""
    for name, value in state.items():
        problem = _json_problem(value)
        if problem:
            raise ValueError(
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


def _check_fit(folder: Path, trained: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
    differences = [f"it lacks {name}" for name in trained.keys() - weights.keys()]
    differences += [f"{name} is not trained here" for name in weights.keys() - trained.keys()]
    for name in trained.keys() & weights.keys():
        ours, saved = _describe(trained[name]), _describe(weights[name])
        differences += [f"{name} is {saved} there and {ours} here"] if ours != saved else []
    if differences:
        raise ValueError(
            f"resume={folder}: its weights do not fit this model ({min(differences)}; {len(differences)} differences "
            "in all); resume with the model, --lora and --dtype settings the run was started with"
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
