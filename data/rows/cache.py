"""Keep converted rows on disk: runs with the same rows, tokenizer and settings map the same files.

    rows = load_cached(load_examples, specs, tokenizer, folder="~/.cache/strop/rows", max_length=1024)

An entry is a folder named by a hash of everything that determines the rows: the content of the data files, the settings
of the loader, the tokenizer with its chat template, strop's code in data/, and the versions of libraries. The first
process that needs an entry builds it, with all cores of the machine. Other processes, such as the other ranks of the
run, wait for its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.formats.registry import parse_specs
from data.rows.collect import using_entry
from data.rows.stored import Stored
from data.rows.transforms import uses_transform
from data.sources import DataSpec, hub_table, is_hub

MIN_BYTES = 2**20  # smaller sources are converted in about a second
TASK_ROW = 512  # bytes that are converted in the time of a task's row
LIBRARIES = ("transformers", "tokenizers", "jinja2")


def load_cached(
    load: Callable[..., Stored[Any]], specs: Sequence[str], tokenizer: Any, *, folder: str, **options: Any
) -> Stored[Any]:
    """Return load(specs, tokenizer, **options), with its records from the cache if possible. folder=none: no cache."""
    key = None if folder == "none" else cache_key(load, specs, tokenizer, options)
    if key is None:
        return load(specs, tokenizer, **options)
    home = os.environ.get("XDG_CACHE_HOME")
    entry = Path(folder.replace("~/.cache", home, 1) if home else folder).expanduser() / key
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = (entry.parent / f"{key}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        print(f"data: row_cache={folder}: cannot be used ({error}); continuing without it", file=sys.stderr)
        return load(specs, tokenizer, **options)
    with lock, using_entry(entry):
        return load(specs, tokenizer, **options)


def cache_key(load: Callable[..., Any], specs: Sequence[str], tokenizer: Any, options: dict[str, Any]) -> str | None:
    """Return the hash of everything that determines the rows; None if they are few or may change without notice."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = {name: value for name, value in options.items() if name != "cfg"}  # only user's transforms read it
    is_known = backend is not None and type(tokenizer).__module__.startswith("transformers.")  # not a model's own code
    if not is_known or not specs or uses_transform(specs, options.get("data_format", "auto")):
        return None
    contents = [_content(spec) for spec in parse_specs(specs)]
    if None in contents or sum(size for _, size in contents) < MIN_BYTES:
        return None
    state = [tokenizer.chat_template, tokenizer.special_tokens_map, tokenizer.init_kwargs, len(tokenizer),
             *(getattr(tokenizer, name, None) for name in ("strop_eot_ids", "strop_allow_special"))]  # fmt: skip
    parts = [f"{load.__module__}.{load.__qualname__}", list(specs), contents, settings, type(tokenizer).__name__, state,
             backend.to_str(), _code(), [version(name) for name in LIBRARIES]]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _content(spec: DataSpec) -> tuple[str, int] | None:
    """Return a hash of the rows' source and its size in bytes; None if its rows may change without notice."""
    if spec.rows is not None:
        return None
    if spec.path.startswith("task:"):
        return "", TASK_ROW * spec.options.get("size", 0)  # determined by the spec and _code()
    if is_hub(spec.path):
        table = hub_table(spec)
        return table._fingerprint, table.data.nbytes
    file = Path(spec.path).expanduser()
    if not file.is_file():
        return None  # another source, or missing: the loader reports it
    with file.open("rb") as content:  # all of it: size and time would miss an edit by a tool that keeps both
        return hashlib.file_digest(content, "sha256").hexdigest(), file.stat().st_size


@cache
def _code() -> str:
    """Hash strop's code that converts rows."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".jinja"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
