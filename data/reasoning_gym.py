"""Rows of reasoning-gym's procedural tasks (extra `rewards`), and its verifiers.

    make_rows("chain_sum", split="train", size=1, seed=0, options={"max_terms": "2"})
    -> [{"prompt": [{"role": "user", "content": "... 4 - 1 ="}], "answer": "3", "metadata": {...},
         "reasoning_gym": {"task": "chain_sum", "options": {"max_terms": 2}}}]

Rows are made in a separate process with a fixed hash seed: several tasks iterate over sets of strings, so their rows
differ between Python processes, and a resumed run would train on other prompts. A row whose own answer does not score 1
is left out, and counted. A stable hash assigns a question to `train` or `eval`, whatever the seed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from data.hints import suggest
from data.tasks import bucket

PREFIX = "reasoning_gym:"
SPLITS = {"train": range(0, 90), "eval": range(90, 100)}  # percent of the questions
DEFAULT_SIZE = {"train": 1000, "eval": 100}
# Problems tried per row wanted: one in ten is an eval row, and eval takes no question twice.
TRIES = {"train": 4, "eval": 40}
# Verifiers that compare boards with tuples, which JSON returns as lists: the right answer would score 0.05.
TUPLES = ("arc_agi", "rearc")
NONSENSE = "strop strop"
USAGE = """usage: python -m data.reasoning_gym REQUEST FILE

Makes the rows described by REQUEST (JSON) and writes them to FILE: the process that make_rows starts.
To look at rows: python -m data.show --data reasoning_gym:chain_sum"""


def check_installed(what: str) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"{what}: the package reasoning-gym is not installed; pip install -e '.[rewards]'")


def make_rows(
    task: str, *, split: str = "train", size: int | None = None, seed: int = 0, options: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Rows of a task; options are the task's settings as text, lists as a|b."""
    label = f"data={PREFIX}{task}"
    check_installed(label)
    if split not in SPLITS:
        raise UserError(f"{label}: split={split} does not exist; {suggest(split, SPLITS)}")
    if size is not None and size < 1:
        raise UserError(f"{label}: size={size} must be 1 or more")
    request = {"task": task, "split": split, "size": size, "seed": seed, "options": options or {}}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "rows.json"
        done = subprocess.run(
            [sys.executable, "-m", "data.reasoning_gym", json.dumps(request), str(place)],
            cwd=Path(__file__).resolve().parents[1],  # imports this `data`, whatever is in the user's folder
            env={**os.environ, "PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if not place.exists():
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise UserError(f"{label}: its rows could not be made ({last}); try other settings or another task")
        made = json.loads(place.read_text(encoding="utf-8"))
    if "refused" in made:
        raise UserError(f"{label}: {made['refused']}")
    for note in made["notes"]:
        print(f"{label}: {note}", file=sys.stderr)
    return made["rows"]


def score_answer(task: str, options: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
    """The verifier's score of an answer to the entry {"answer", "metadata"}; 0 if it raises on the answer.

    Scores are not only 0 and 1: many verifiers give partial credit for a wrong answer.
    """
    if task in TUPLES:
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    verifier = _dataset(task, json.dumps(options, sort_keys=True))
    try:
        return float(verifier.score_answer(answer=answer, entry=entry))
    except Exception:  # some verifiers parse without checks: text they raise on is a wrong answer
        return 0.0


def known_tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})  # which holds other tasks: give --data once for each instead


@lru_cache(maxsize=32)
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    # A verifier reads the settings of its rows (how many decimals count, say), never the size.
    return reasoning_gym.create_dataset(task, **{"seed": 0, **json.loads(options)})


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# In the process that makes rows.


class _Refused(Exception):
    """An error message for the user."""


def _make(task: str, split: str, size: int | None, seed: int, options: dict[str, str]) -> dict[str, Any]:
    if task not in known_tasks():
        near = suggest(task, known_tasks()).partition(" (")[0]  # without the list of all names
        raise _Refused(f"no such task of reasoning-gym; {near} (its README lists them)")
    typed = _typed(task, options)
    wanted = size or DEFAULT_SIZE[split]
    limit = max(wanted, 25) * TRIES[split]
    dataset = _create(task, {**typed, "size": limit, "seed": seed})
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    wrong = 0
    for index in range(limit):
        if len(rows) == wanted:
            break
        random.seed(f"{seed}/{index}")  # some tasks use the global generator
        item = json.loads(json.dumps(dataset[index], default=str))
        question = item["question"]
        if bucket(PREFIX + task, question) not in SPLITS[split] or (split == "eval" and question in seen):
            continue
        seen.add(question)
        if item["answer"] is not None and score_answer(task, typed, item["answer"], item) < 1:
            wrong += 1
            continue
        prompt = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt, "answer": item["answer"], "metadata": item["metadata"],
                     "reasoning_gym": {"task": task, "options": typed}})  # fmt: skip
    if not rows or (size is not None and len(rows) < size):
        raise _Refused(f"only {len(rows)} rows for split={split} with these settings; give size={len(rows)} or less")
    return {"rows": rows, "notes": _notes(task, typed, rows, wrong)}


def _notes(task: str, options: dict[str, Any], rows: list[dict[str, Any]], wrong: int) -> list[str]:
    notes = []
    if wrong:
        notes.append(f"left out {wrong} rows whose own answer does not score 1")
    fooled = [score_answer(task, options, NONSENSE, row) for row in rows[:20]]
    if max(fooled) >= 0.5:
        notes.append(f"its verifier gives up to {max(fooled):g} for nonsense; look at its scores before you trust it")
    return notes


def _typed(task: str, options: dict[str, str]) -> dict[str, Any]:
    """Settings with the types of the task's config class."""
    from reasoning_gym.factory import DATASETS

    fields = {field.name: field for field in dataclasses.fields(DATASETS[task][1])}
    typed = {}
    for key, text in options.items():
        if key not in fields or key in ("size", "seed"):
            raise _Refused(f"unknown key {key!r}; {suggest(key, fields)}")
        field = fields[key]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        listed = isinstance(default, (list, tuple))
        typed[key] = [_scalar(part) for part in text.split("|")] if listed else _scalar(text)
    return typed


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) else text  # "-" is a list in YAML, an operator here


def _create(task: str, settings: dict[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, **settings)
    except Exception as error:  # its checks are assertions
        raise _Refused(f"refuses these settings ({error or type(error).__name__}); change them") from None


def main(request: str, place: str) -> None:
    try:
        made = _make(**json.loads(request))
    except _Refused as error:
        made = {"refused": str(error)}
    Path(place).write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(USAGE)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    main(*sys.argv[1:])
