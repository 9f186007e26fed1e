"""Generate rows of reasoning-gym's procedural tasks (extra `rewards`), and score answers with its verifiers.

    make_rows("chain_sum", split="train", size=1, seed=0, options={"max_terms": "2"})
    -> [{"prompt": [{"role": "user", "content": "... 4 - 1 ="}], "answer": "3", "metadata": {...},
         "reasoning_gym": {"task": "chain_sum", "options": {"max_terms": 2}}}]

Rows are generated in a separate process with a fixed hash seed: several tasks iterate over sets of strings, so their
rows differ between Python processes, and a resumed run would train on other prompts. A row is skipped, and counted, if
its answer does not score 1. A stable hash assigns a question to `train` or `eval`, independent of the seed.
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
# Problems generated per requested row: one in ten belongs to eval, and eval has no question twice.
TRIES = {"train": 4, "eval": 40}
# Verifiers that compare boards with tuples. JSON turns tuples into lists, so a correct answer would score 0.05.
TUPLES = ("arc_agi", "rearc")
NONSENSE = "strop strop"
USAGE = """usage: python -m data.reasoning_gym REQUEST FILE

Writes the rows described by REQUEST (JSON) to FILE; make_rows starts this process.
To show rows: python -m data.show --data reasoning_gym:chain_sum"""


def check_installed(what: str) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"{what}: the package reasoning-gym is not installed; pip install -e '.[rewards]'")


def make_rows(
    task: str, *, split: str = "train", size: int | None = None, seed: int = 0, options: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Generate rows of a task; options are the task's settings as text, with lists as a|b."""
    label = f"data={PREFIX}{task}"
    check_installed(label)
    if split not in SPLITS:
        raise UserError(f"{label}: split={split} does not exist; {suggest(split, SPLITS)}")
    if size is not None and size < 1:
        raise UserError(f"{label}: size={size} must be 1 or more")
    request = {"task": task, "split": split, "size": size, "seed": seed, "options": options or {}}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.json"
        process = subprocess.run(
            [sys.executable, "-m", "data.reasoning_gym", json.dumps(request), str(file)],
            cwd=Path(__file__).resolve().parents[1],  # to import this `data`, not one in the user's folder
            env={**os.environ, "PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if not file.exists():
            last = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise UserError(f"{label}: generating rows failed ({last}); try other settings or another task")
        reply = json.loads(file.read_text(encoding="utf-8"))
    if "error" in reply:
        raise UserError(f"{label}: {reply['error']}")
    for note in reply["notes"]:
        print(f"{label}: {note}", file=sys.stderr)
    return reply["rows"]


def score_answer(task: str, options: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
    """Return the verifier's score of an answer to the entry {"answer", "metadata"}; 0 if the verifier raises.

    Many verifiers give partial credit for a wrong answer.
    """
    if task in TUPLES:
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    verifier = _dataset(task, json.dumps(options, sort_keys=True))
    try:
        return float(verifier.score_answer(answer=answer, entry=entry))
    except Exception:  # some verifiers parse without checks: if they raise, the answer is wrong
        return 0.0


def known_tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})  # composite combines tasks: use several --data entries


@lru_cache(maxsize=32)
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    # A verifier reads the settings of its rows (such as the number of decimals), never the size.
    return reasoning_gym.create_dataset(task, **{"seed": 0, **json.loads(options)})


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# In the process that generates rows.


def _generate(task: str, split: str, size: int | None, seed: int, options: dict[str, str]) -> dict[str, Any]:
    if task not in known_tasks():
        hint = suggest(task, known_tasks()).partition(" (")[0]  # without the list of all names
        raise UserError(f"reasoning-gym has no such task; {hint} (its README lists them)")
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
        random.seed(f"{seed}/{index}")  # some tasks use the global random state
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
        raise UserError(f"only {len(rows)} rows for split={split} with these settings; set size={len(rows)} or less")
    return {"rows": rows, "notes": _notes(task, typed, rows, wrong)}


def _notes(task: str, options: dict[str, Any], rows: list[dict[str, Any]], wrong: int) -> list[str]:
    notes = []
    if wrong:
        notes.append(f"skipped {wrong} rows whose reference answer does not score 1")
    highest = max(score_answer(task, options, NONSENSE, row) for row in rows[:20])
    if highest >= 0.5:
        notes.append(f"its verifier scores nonsense up to {highest:g}; check its scores before you trust it")
    return notes


def _typed(task: str, options: dict[str, str]) -> dict[str, Any]:
    """Convert settings to the types of the task's config class."""
    from reasoning_gym.factory import DATASETS

    fields = {field.name: field for field in dataclasses.fields(DATASETS[task][1])}
    typed = {}
    for key, text in options.items():
        if key not in fields or key in ("size", "seed"):
            raise UserError(f"unknown key {key!r}; {suggest(key, fields)}")
        field = fields[key]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        is_list = isinstance(default, (list, tuple))
        typed[key] = [_scalar(item) for item in text.split("|")] if is_list else _scalar(text)
    return typed


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) else text  # "-" is a list in YAML but an operator here


def _create(task: str, settings: dict[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, **settings)
    except Exception as error:  # reasoning-gym checks settings with assertions
        raise UserError(f"rejects these settings ({error or type(error).__name__}); change them") from None


def main(request: str, file: str) -> None:
    try:
        reply = _generate(**json.loads(request))
    except UserError as error:
        reply = {"error": str(error)}
    Path(file).write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(USAGE)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    main(*sys.argv[1:])
