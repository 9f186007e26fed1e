"""Built-in procedural tasks: rows with exact answers, so that a run needs no download.

    make_rows("addition", split="train", size=2, seed=0)
    -> [{"prompt": [{"role": "user", "content": "37+58="}], "answer": "95", "completion": "95",
         "chosen": "95", "rejected": "85"}, ...]

The answers of the task `lookup` are in a `table` that only the tool `lookup` can read, so the model has to call it. A
rejected answer is wrong and as long as the chosen answer, so that length does not distinguish them. The task `steps`
adds a solution in steps, `completions`, with `labels` that are True up to the first wrong step.

A task numbers its problems 0 .. space - 1. A stable hash of a problem's key assigns it to exactly one split, so `sft`,
`train` and `eval` share no key for any seed or size; the seed only selects and orders the problems.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import add, mul, sub
from typing import Any

from data.errors import UserError
from data.hints import suggest

SPLITS = {"sft": range(0, 50), "train": range(50, 90), "eval": range(90, 100)}  # percent of the keys
DEFAULT_SIZE = {"train": 4096, "sft": 8192, "eval": 500}
# Spaces up to this size are enumerated; larger spaces are sampled, and the rare repeats are redrawn.
LIST_LIMIT = 200_000

GIVES_UP = "?"  # the sloppy teacher's answer in lookup

Problem = tuple[str, str, str]  # content, answer, key; problems with the same key are always in the same split


@dataclass(frozen=True)
class Task:
    """A family of problems, each determined by its number."""

    about: str
    difficulty: int  # default difficulty
    space: Callable[[int], int]  # difficulty -> number of problems
    problem: Callable[[int, int], Problem]  # number, difficulty -> problem
    reject: Callable[[str, str], str]  # content, answer -> a wrong answer of the same length
    tool: bool = False  # the answer is only in the row's table
    solve: Callable[[str], list[str]] | None = None  # content -> steps to the answer


def _pairs(difficulty: int) -> int:
    return 10 ** (2 * difficulty)


def _arithmetic(sign: str, operator: Callable[[int, int], int], number: int, difficulty: int) -> Problem:
    a, b = divmod(number, 10**difficulty)
    key = f"{min(a, b)},{max(a, b)}"  # unordered: 37+58 and 58+37 must be in the same split
    return f"{a}{sign}{b}=", str(operator(a, b)), key


def _reverse(number: int, difficulty: int) -> Problem:
    letters = []
    for _ in range(difficulty):
        number, letter = divmod(number, 26)
        letters.append(chr(ord("a") + letter))
    word = "".join(letters)
    return f"reverse {word}=", word[::-1], min(word, word[::-1])


def _sort(number: int, difficulty: int) -> Problem:
    digits = f"{number:0{difficulty}d}"
    answer = "".join(sorted(digits))
    return f"sort {digits}=", answer, answer


def _chain(number: int, difficulty: int) -> Problem:
    terms = f"{number:0{difficulty + 1}d}"
    return "+".join(terms) + "=", str(sum(map(int, terms))), "".join(sorted(terms))


def _lookup(number: int, difficulty: int) -> Problem:
    key = f"{number:0{difficulty}d}"
    # The = marks the value in the tool's result: a small model rarely learns to copy bare digits.
    return f"{key}?", f"={10 + _stable(f'lookup/{key}') % 90}", key


def add_up(content: str, slip: int | None = None) -> list[str]:
    """Return the additions that solve "a+b+c=", one per step. Step `slip` is wrong, and later steps build on it.

    >>> add_up("3+8+5="), add_up("3+8+5=", slip=0)
    (['3+8=11', '11+5=16'], ['3+8=17', '17+5=22'])
    """
    total, *terms = content.rstrip("=").split("+")
    steps = []
    for number, term in enumerate(terms):
        result = str(int(total) + int(term))
        if number == slip:
            result = change_digit(f"{total}+{term}=", result)
        steps.append(f"{total}+{term}={result}")
        total = result
    return steps


def change_digit(content: str, answer: str) -> str:
    """Change one digit of the answer, chosen by a hash of the content; never to a leading zero."""
    draw = _stable(f"{content}{answer}")
    positions = [i for i, character in enumerate(answer) if character.isdigit()]
    i = positions[draw % len(positions)]
    lowest = 1 if i == positions[0] and len(positions) > 1 else 0
    others = [digit for digit in "0123456789"[lowest:] if digit != answer[i]]
    return answer[:i] + others[draw // len(positions) % len(others)] + answer[i + 1 :]


def _without_carries(content: str, answer: str) -> str:
    """Return the sum without carries if it is wrong and as long as the answer; otherwise change one digit."""
    slip = forget_carries(content)
    return slip if slip != answer and len(slip) == len(answer) else change_digit(content, answer)


def _swap(content: str, answer: str) -> str:
    """Swap two adjacent characters of the answer; if all characters are equal, change one."""
    positions = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
    if not positions:
        return chr(ord(answer[0]) + (-1 if answer[0] in "z9" else 1)) + answer[1:]
    i = positions[_stable(content) % len(positions)]
    return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]


def _slip_last(content: str, answer: str) -> str:
    return "\n".join(add_up(content, slip=content.count("+") - 1))


TASKS = {
    "addition": Task(
        "sum of two numbers; difficulty = digits of the operands", 2, _pairs, partial(_arithmetic, "+", add),
        _without_carries,
    ),
    "subtraction": Task(
        "difference, may be negative; difficulty = digits of the operands", 2, _pairs, partial(_arithmetic, "-", sub),
        change_digit,
    ),
    "multiplication": Task(
        "product; difficulty = digits of the operands", 2, _pairs, partial(_arithmetic, "*", mul), change_digit
    ),
    "reverse": Task("reverse a word; difficulty = letters", 4, lambda difficulty: 26**difficulty, _reverse, _swap),
    "sort": Task("sort digits; difficulty = digits", 5, lambda difficulty: 10**difficulty, _sort, _swap),
    "steps": Task(
        "sum of several digits, step by step; difficulty = additions", 3,
        lambda difficulty: 10 ** (difficulty + 1), _chain, _slip_last, solve=add_up,
    ),
    "lookup": Task(
        "a value that only the tool lookup returns; difficulty = digits of the key", 3,
        lambda difficulty: 10**difficulty, _lookup, change_digit, tool=True,
    ),
}  # fmt: skip


def make_rows(
    name: str, *, split: str = "train", size: int | None = None, seed: int = 0, difficulty: int | None = None,
    sloppy: float = 0.0, boxed: float = 0.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Generate rows of a built-in task: `prompt`, `answer`, the `completion` to imitate, `chosen` and `rejected`.

    Rows repeat if size exceeds the number of problems, except in `eval`, where that is an error. Two options add errors
    to the completions of an `sft` split, so that RL has something to improve. `sloppy` is the probability that addition
    forgets its carries (37+58= 85), or that lookup answers "?" without calling the tool. `boxed` (addition only) is the
    probability that the answer is in brackets ([95]).
    """
    if name not in TASKS:
        raise UserError(f"task:{name}: no such built-in task; {suggest(name, TASKS)}")
    if split not in SPLITS:
        raise UserError(f"task:{name}: split={split} does not exist; {suggest(split, SPLITS)}")
    if size is not None and size < 1:
        raise UserError(f"task:{name}: size={size} must be 1 or more")
    for option, chance, tasks in (("sloppy", sloppy, ("addition", "lookup")), ("boxed", boxed, ("addition",))):
        if not 0.0 <= chance <= 1.0:
            raise UserError(f"task:{name}: {option}={chance} must be between 0 and 1")
        if chance > 0 and (name not in tasks or split != "sft"):
            readers = " and ".join(f"task:{task}:split=sft" for task in tasks)
            raise UserError(f"task:{name}: {option}={chance} has no effect here; it is for {readers}")
    task = TASKS[name]
    difficulty = task.difficulty if difficulty is None else difficulty
    if not 1 <= difficulty <= 100:
        raise UserError(f"task:{name}: difficulty={difficulty} must be between 1 and 100")
    rng = random.Random(f"{name}/{split}/{difficulty}/{seed}")
    problems = _choose(name, task, split, size, difficulty, rng)
    rows = [_row(task, content, answer) for content, answer, _ in problems]
    if task.solve:
        _add_steps(rows, random.Random(f"{name}/{split}/{difficulty}/{seed}/steps"))
    # Separate random streams: problems and their order do not depend on sloppy and boxed.
    slips, boxes = (random.Random(f"{name}/{split}/{difficulty}/{seed}/{what}") for what in ("sloppy", "boxed"))
    for row in rows:
        if slips.random() < sloppy:
            row["completion"] = GIVES_UP if task.tool else forget_carries(row["prompt"][0]["content"])
        if boxes.random() < boxed:
            row["completion"] = f"[{row['completion']}]"
    return rows


def bucket(name: str, key: str) -> int:
    """Return 0..99, the same on every machine and Python version."""
    return _stable(f"{name}/{key}") % 100


def _stable(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def forget_carries(content: str) -> str:
    """Compute "a+b=" without carries: 37+58 -> 85.

    >>> forget_carries("37+58="), forget_carries("9+1=")
    ('85', '0')
    """
    a, b = content.rstrip("=").split("+")
    width = max(len(a), len(b))
    digits = [(int(x) + int(y)) % 10 for x, y in zip(a.zfill(width), b.zfill(width), strict=True)]
    return str(int("".join(map(str, digits))))


def _row(task: Task, content: str, answer: str) -> dict[str, Any]:
    if task.tool:
        return _tool_row(content, answer)
    completion = "\n".join(task.solve(content)) if task.solve else answer
    prompt = [{"role": "user", "content": content}]
    rejected = task.reject(content, answer)
    return {"prompt": prompt, "answer": answer, "completion": completion, "chosen": completion, "rejected": rejected}


def _tool_row(content: str, answer: str) -> dict[str, Any]:
    """Write the call as tool_format=pythonic: few tokens, even for a byte tokenizer."""
    key = content.rstrip("?")
    turns = (("assistant", f"[lookup('{key}')]"), ("tool", answer), ("assistant", answer))
    completion = [{"role": role, "content": text} for role, text in turns]
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "answer": answer, "table": {key: answer}, "completion": completion}


def _add_steps(rows: list[dict[str, Any]], rng: random.Random) -> None:
    """Add solutions, half of them right; the others fail at a random step, and all labels from there on are False."""
    for row in rows:
        content = row["prompt"][0]["content"]
        num_steps = content.count("+")
        slip = rng.randrange(num_steps) if rng.random() < 0.5 else num_steps
        row["completions"] = add_up(content, slip)
        row["labels"] = [number < slip for number in range(num_steps)]


def _choose(name: str, task: Task, split: str, size: int | None, difficulty: int, rng: random.Random) -> list[Problem]:
    space = task.space(difficulty)
    wanted = DEFAULT_SIZE[split] if size is None else size
    if space > max(LIST_LIMIT, 20 * wanted):
        return _sample(name, task, split, wanted, difficulty, rng)
    pool = [problem for n in range(space) if bucket(name, (problem := task.problem(n, difficulty))[2]) in SPLITS[split]]
    if not pool:
        raise UserError(f"task:{name}: split={split} is empty at difficulty={difficulty}; raise the difficulty")
    if split == "eval" and wanted > len(pool):
        if size is not None:
            raise UserError(
                f"task:{name}: size={size} exceeds the {len(pool)} problems of split=eval at difficulty={difficulty}; "
                "lower the size or raise the difficulty"
            )
        wanted = len(pool)
    chosen: list[Problem] = []
    while len(chosen) < wanted:  # whole passes over the pool, each reshuffled
        rng.shuffle(pool)
        chosen += pool[: wanted - len(chosen)]
    return chosen


def _sample(name: str, task: Task, split: str, size: int, difficulty: int, rng: random.Random) -> list[Problem]:
    """Sample distinct problems of a space too large to enumerate; the split has at least twice as many as wanted."""
    space = task.space(difficulty)
    chosen: dict[int, Problem] = {}
    while len(chosen) < size:
        number = rng.randrange(space)
        problem = task.problem(number, difficulty)
        if number not in chosen and bucket(name, problem[2]) in SPLITS[split]:
            chosen[number] = problem
    return list(chosen.values())
