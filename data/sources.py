"""Read rows from local files, hub datasets and built-in tasks.

    load_rows(parse_spec("sums.jsonl:split=train[:500],weight=0.5"))
    load_rows(parse_spec("chats.ndjson:format=chat_template,field_messages=request.input,roles=user=human|person"))
    load_rows(parse_spec("openai/gsm8k:name=main,split=train[:1%]"))
    load_rows(parse_spec("task:addition:difficulty=3,split=eval"))
    load_rows(parse_spec("reasoning_gym:chain_sum:size=500,max_terms=2"))

A row's source, such as "sums.jsonl:17", names its file and line in later error messages.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import io
import itertools
import json
import math
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data import reasoning_gym, tasks
from data.chat import ROLES
from data.errors import UserError
from data.format_options import FormatOptions
from data.hints import suggest
from data.hub import check_hub
from data.limits import input_limit
from data.user_code import PythonObject, refuse_python_object

TASK_OPTIONS: dict[str, Callable[[str], Any]] = {"size": int, "seed": int, "difficulty": int, "sloppy": float,
                                                  "boxed": float}  # fmt: skip
TASKS = ("task:", reasoning_gym.PREFIX)  # path prefixes of built-in tasks
BOM = b"\xef\xbb\xbf"  # some editors write it at the start of UTF-8 text
UNPACKED = "STROP_MAX_UNPACKED_GIB"
KEYS = ("format", "split", "name", "weight")
FORMAT_KEYS = tuple(FormatOptions.__dataclass_fields__)  # format options: field_messages, roles, ...
VERBATIM = {key for key in FORMAT_KEYS if key.endswith("_format")} | {"default_system"}  # with their white space
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES))
_FIRST_OPTION = re.compile(r":(?=[A-Za-z_]+=)")
_COMMA = re.compile(r"(?<!\\),")  # separates options; \, is a comma inside a value
# The split syntax of the datasets library (train, train[:500], train[10%:20%], train[-5:]), parsed here because
# importing that library takes two seconds.
_SLICE = re.compile(
    r"(?P<split>\w+(?:\.\w+)*)(?:\[(?:(?P<start>-?\d+)(?P<pct1>%)?)?:(?:(?P<stop>-?\d+)(?P<pct2>%)?)?\])?"
)


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """One --data value."""

    path: str  # file, hub id, task:NAME or reasoning_gym:NAME
    format: str | None = None
    split: str | None = None
    name: str | None = None  # configuration of a hub dataset
    weight: float = 1.0
    rows: Sequence[Any] | None = None  # rows passed from Python; `path` is only their name
    options: dict[str, Any] = field(default_factory=dict)  # task options: size, seed, difficulty, sloppy, boxed, ...
    format_options: dict[str, str] = field(default_factory=dict)  # FormatOptions of this entry


@dataclass(frozen=True, kw_only=True)
class Row:
    source: str
    columns: dict[str, Any]


class LazyRows(Sequence[Row]):
    """Rows that are read or parsed when they are accessed, so that a large source is never in memory as objects."""

    def __init__(
        self,
        path: str,
        read: Callable[[int], Any],  # index -> columns
        numbers: Sequence[int],  # row or line numbers in the source, for messages
        chosen: Sequence[int] | None = None,  # indices of these rows among all rows
    ) -> None:
        self.path, self.read, self.numbers = path, read, numbers
        self.chosen = range(len(numbers)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazyRows(self.path, self.read, self.numbers, self.chosen[index])
        row = self.chosen[index]
        return _object_row(self.path, self.numbers[row], self.read(row))


def _numbered(path: str, table: Iterable[dict[str, Any]]) -> list[Row]:
    return [Row(source=f"{path}:{number}", columns=columns) for number, columns in enumerate(table, 1)]


def parse_spec(text: str) -> DataSpec:
    """Parse PATH[:key=value,...]; the path ends at the first `:key=`. A comma inside a value is written \\,"""
    if isinstance(text, PythonObject):
        return DataSpec(path=str(text), rows=text.value)
    refuse_python_object(text, "data")
    path, *rest = _FIRST_OPTION.split(text, maxsplit=1)
    path = path.strip()
    if not path:
        raise UserError(f"data={text!r}: no path; pass a file, a hub id or task:NAME")
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    format_options: dict[str, str] = {}
    for option in _COMMA.split(rest[0]) if rest else []:
        option = option.replace("\\,", ",")
        key, equals, value = option.partition("=")
        key, value = key.strip(), value if key.strip() in VERBATIM else value.strip()
        if not equals or not value:
            raise UserError(f"data={text}: {option!r} is not key=value")
        if key in values or key in options or key in format_options:
            raise UserError(f"data={text}: {key} is set twice")
        if key in FORMAT_KEYS:
            format_options[key] = value
        elif key in ROLES and next(reversed(format_options), None) == "roles":  # roles=user=human,assistant=gpt
            format_options["roles"] += f",{key}={value}"
        elif key in KEYS:
            values[key] = _number(text, key, value, float) if key == "weight" else value
        elif path.startswith(reasoning_gym.PREFIX) and key not in ("size", "seed"):
            options[key] = value  # the task validates its own settings
        elif key in TASK_OPTIONS:
            options[key] = _number(text, key, value, TASK_OPTIONS[key])
        else:
            raise UserError(f"data={text}: unknown key {key!r}; {suggest(key, (*KEYS, *TASK_OPTIONS, *FORMAT_KEYS))}")
    weight = values.get("weight", 1.0)
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"data={text}: weight={weight} must be above 0")
    if options and not path.startswith(TASKS):
        raise UserError(
            f"data={text}: {next(iter(options))} is only for built-in tasks (task:NAME); use split=train[:N]"
        )
    if "name" in values and not is_hub(path):
        raise UserError(f"data={text}: name={values['name']} is only for hub datasets; remove it")
    return DataSpec(path=path, options=options, format_options=format_options, **values)


def spec_entry(text: str) -> str | dict[str, Any]:
    """Convert a --data value to its YAML form: a path, or a mapping with its options."""
    spec = parse_spec(text)
    named = {key: getattr(spec, key) for key in KEYS if getattr(spec, key) not in (None, 1.0)}
    options = {**named, **spec.options, **spec.format_options}
    return {"path": spec.path, **options} if options else spec.path


def load_rows(spec: DataSpec) -> Sequence[Row]:
    """Return all rows of the spec's split, in order; an invalid line raises when it is accessed."""
    if (table := spec.rows) is not None:
        clean = without_fillers if hasattr(table, "features") else copy  # a Dataset has a schema
        rows = LazyRows(spec.path.rpartition(":")[2], lambda index: clean(table[index]), range(1, len(table) + 1))
    elif spec.path.startswith(TASKS):
        rows = _task_rows(spec)
    elif is_hub(spec.path):
        rows = _hub_rows(spec)
    else:
        rows = _take(spec, _file_rows(spec.path), base="train")
    if not rows:
        raise UserError(f"data={spec.path}: {f'split={spec.split} ' if spec.split else ''}contains no rows")
    return rows


def check_file(path: str) -> None:
    """Raise if the path of a spec names a local file that does not exist."""
    if not (path.startswith(TASKS) or is_hub(path) or Path(path).expanduser().is_file()):
        where = "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"data={path}: no such file{where}; check the path")


def slice_rows(split: str, num_rows: int) -> tuple[set[str], list[int]]:
    """Return the split names and row indices of a split expression, by the rules of the datasets library.

    >>> slice_rows("train[:2]+train[90%:]", 10)
    ({'train'}, [0, 1, 9])
    """
    names, chosen = set(), []
    for expression in re.split(r"\s*\+\s*", split.strip()):
        match = _SLICE.fullmatch(expression)
        if match is None:
            raise UserError(f"split={split}: invalid; write train, train[:500], train[10:20] or train[:1%]")
        start, stop = (None if match[end] is None else int(match[end]) for end in ("start", "stop"))
        if match["pct1"] or match["pct2"]:
            if any(bound is not None and abs(bound) > 100 for bound in (start, stop)):
                raise UserError(f"split={split}: a percentage must be between -100 and 100")
            start, stop = (None if bound is None else round(bound * num_rows / 100) for bound in (start, stop))
        names.add(match["split"])
        chosen += range(num_rows)[start:stop]
    return names, chosen


def _number(text: str, key: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"data={text}: {key}={value} is not {'an integer' if kind is int else 'a number'}") from None


def is_hub(path: str) -> bool:
    """Return whether the datasets library reads this path: a hub id, or a folder."""
    if path.startswith(TASKS) or path.lower().endswith(SUFFIXES):
        return False
    local = Path(path).expanduser()
    return local.is_dir() or not (local.exists() or path.startswith(("/", "./", "../", "~")))


def _take(spec: DataSpec, rows: Sequence[Row], base: str) -> Sequence[Row]:
    """Apply the split to rows that all belong to the split `base`."""
    if spec.split is None:
        return rows
    names, chosen = slice_rows(spec.split, len(rows))
    if names != {base}:
        other = next(iter(names - {base}))
        raise UserError(
            f"data={spec.path}: split={other} does not exist; use split={base}, the only one, or {base}[:N]"
        )
    if isinstance(rows, LazyRows):
        return LazyRows(rows.path, rows.read, rows.numbers, chosen)
    return [rows[number] for number in chosen]


def _task_rows(spec: DataSpec) -> Sequence[Row]:
    split = spec.split or "train"
    names, _ = slice_rows(split, 0)
    if len(names) > 1:
        raise UserError(f"data={spec.path}: split={split} joins splits; pass one --data entry per split")
    base = names.pop()
    if spec.path.startswith("task:"):
        table = tasks.make_rows(spec.path.removeprefix("task:"), split=base, **spec.options)
    else:
        options = dict(spec.options)
        common = {key: options.pop(key) for key in ("size", "seed") if key in options}
        name = spec.path.removeprefix(reasoning_gym.PREFIX)
        table = reasoning_gym.make_rows(name, split=base, options=options, **common)
    return _take(spec, _numbered(spec.path, table), base=base)


def without_fillers(columns: dict[str, Any]) -> dict[str, Any]:
    """Remove the nulls that a table's schema added to tool calls, tools and template settings.

    A table gives every struct in a column the same keys, so a null there may be an absent key. Nulls in a JSON file are
    intentional and are kept.
    """

    def clean(name: str, value: Any) -> Any:
        if name in ("tools", "chat_template_kwargs"):
            return _without_nulls(value)
        return [clean_calls(item) for item in value] if isinstance(value, list) else clean_calls(value)

    def clean_calls(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if "tool_calls" in message:
            return {**message, "tool_calls": _without_nulls(message["tool_calls"])}
        return {name: clean(name, value) for name, value in message.items()}  # an object that contains a conversation

    return {name: clean(name, value) for name, value in columns.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _hub_rows(spec: DataSpec) -> LazyRows:
    table = hub_table(spec)
    return LazyRows(spec.path, lambda index: without_fillers(table[index]), range(1, len(table) + 1))


def hub_table(spec: DataSpec) -> Any:
    import datasets

    is_folder = Path(spec.path).expanduser().is_dir()
    if not is_folder:
        check_hub("data", spec.path)
    try:
        return datasets.load_dataset(str(Path(spec.path).expanduser()), spec.name, split=spec.split or "train")
    except Exception as error:  # network, hub, unknown split or configuration, broken file: for the user to fix
        reason = " ".join(str(error).split()) or type(error).__name__
        what = "not a local file, and loading it as a hub dataset failed"
        remedy = "check the path, name=, split= and the network"
        if is_folder:
            what, remedy = "a folder that the datasets library cannot load", "name its files instead, or check split="
        raise UserError(f"data={spec.path}: {what} ({reason}); {remedy}") from None


def _file_rows(path: str) -> Sequence[Row]:
    """Read without datasets, which adds nulls, guesses the types of CSV columns, and does not report broken lines."""
    file = Path(path).expanduser()
    kind = next((suffix.split(".")[1] for suffix in SUFFIXES if path.lower().endswith(suffix)), None)
    check_file(path)
    if kind is None:
        if path.lower().endswith((".txt", ".txt.gz", ".md")):
            raise UserError(
                f'data={path}: plain text has no rows; convert it to .jsonl with a line {{"text": ...}} per document'
            )
        raise UserError(f"data={path}: unknown file type; use one of {', '.join(SUFFIXES)}")
    try:
        if kind == "parquet":
            return _read_parquet(path, file)
        if kind in ("jsonl", "ndjson"):
            return _read_jsonl(
                path, io.BytesIO(_unpack(path, file)) if path.lower().endswith(".gz") else file.open("rb")
            )
        content = _unpack(path, file) if path.lower().endswith(".gz") else file.read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data={path}: not UTF-8 text (byte {error.start} of the file); convert it") from None
    except (OSError, EOFError, zlib.error) as error:  # unreadable, or a damaged gzip
        raise UserError(f"data={path}: cannot be read ({error})") from None
    if kind in ("csv", "tsv"):
        return _read_csv(path, text, delimiter="," if kind == "csv" else "\t")
    return _read_json(path, text)


def _unpack(path: str, file: Path) -> bytes:
    with gzip.open(file) as unpacked:
        content = unpacked.read(int(input_limit(UNPACKED) * 2**30) + 1)
    _check_unpacked(path, len(content))
    return content


def _check_unpacked(path: str, num_bytes: int) -> None:
    if num_bytes > input_limit(UNPACKED) * 2**30:
        raise UserError(f"data={path}: larger than {input_limit(UNPACKED):g} GiB unpacked; split it, or set {UNPACKED}")


def _read_jsonl(path: str, file: BinaryIO) -> LazyRows:
    """Find the lines and keep the file open; a line is parsed when it is accessed."""
    starts, lengths, numbers = array("q"), array("q"), array("q")
    start = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(start)
    for number, line in enumerate(file, 1):  # lines end at \n only: a JSON string may contain U+2028
        if line.startswith(b"{") or line.decode(errors="replace").strip():
            starts.append(start)
            lengths.append(len(line))
            numbers.append(number)
        start += len(line)
    unpacked = file.getvalue() if isinstance(file, io.BytesIO) else None

    def read(index: int) -> Any:
        start, length = starts[index], lengths[index]
        # pread: forked processes share the file's position
        line = os.pread(file.fileno(), length, start) if unpacked is None else unpacked[start : start + length]
        try:
            return json.loads(line.removesuffix(b"\n").decode())
        except UnicodeDecodeError as error:
            where = f"{path}:{numbers[index]}"
            raise UserError(f"{where}: not UTF-8 text (byte {start + error.start} of the file); convert it") from None
        except (ValueError, RecursionError) as error:
            raise _not_json(f"{path}:{numbers[index]}", error) from None

    return LazyRows(path, read, numbers)


def _read_json(path: str, text: str) -> Sequence[Row]:
    """Read a list of objects, {"data": [...]}, or one object per line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _read_jsonl(path, io.BytesIO(text.encode()))
        raise _not_json(f"{path}:{error.lineno}", error) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(f"data={path}", error) from None
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list):
        raise UserError(f"data={path}: must contain a list of objects, not {type(value).__name__}")
    return [_object_row(path, number, columns) for number, columns in enumerate(value, 1)]


def _not_json(where: str, error: Exception) -> UserError:
    if isinstance(error, json.JSONDecodeError):
        return UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno}); fix it")
    return UserError(f"{where}: cannot be read as JSON ({error}); fix it")  # too many digits, or nested too deep


def _object_row(path: str, number: int, columns: Any) -> Row:
    if not isinstance(columns, dict):
        raise UserError(f"{path}:{number}: must be a JSON object, not {type(columns).__name__}")
    return Row(source=f"{path}:{number}", columns=columns)


def _read_csv(path: str, text: str, delimiter: str) -> list[Row]:
    csv.field_size_limit(2**31 - 1)  # long prompts exceed the default of 128 KiB
    rows = []
    try:
        table = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
        for number, columns in enumerate(table, 1):
            if None in columns or None in columns.values():
                raise UserError(f"{path}:{number}: the number of fields differs from the header; fix the row")
            rows.append(Row(source=f"{path}:{number}", columns=columns))
    except csv.Error as error:
        kind = "CSV" if delimiter == "," else "TSV"
        raise UserError(f"{path}:{len(rows) + 1}: not valid {kind} ({error}); fix the row") from None
    return rows


def _read_parquet(path: str, file: Path) -> LazyRows:
    import pyarrow
    import pyarrow.parquet

    batches, num_bytes = [], 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024):
            num_bytes += batch.nbytes
            _check_unpacked(path, num_bytes)
            batches.append(batch)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data={path}: cannot be read as parquet ({reason})") from None
    ends = list(itertools.accumulate(map(len, batches)))

    def read(index: int) -> dict[str, Any]:
        number = bisect.bisect_right(ends, index)
        (columns,) = batches[number].slice(index - (ends[number] - len(batches[number])), 1).to_pylist()
        return without_fillers(columns)

    return LazyRows(path, read, range(1, len(ends) and ends[-1] + 1))
