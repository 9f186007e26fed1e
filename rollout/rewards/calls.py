"""One call of a reward function: its arguments, the faults it can have, and which row caused one.

A function is called on lists. The outcome is a score per row, some of which may be faults (a NaN), or one fault of the
whole call (it raised, hung, died). A failed call is repeated on its halves down to single rows, so that a bad row costs
only itself.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from data.types import Prompt
from data.user_code import describe_error, where_raised
from rollout.engine import Completion

OFFERED = ("prompts", "completions", "completion_ids")  # arguments that every function can have
RESERVED = (*OFFERED, "prompt", "completion")  # never passed as columns
OF_TRAINER = ("trainer_state", "log_extra", "log_metric")  # TRL's, passed to functions with such a parameter
IMMUTABLE = frozenset((str, int, float, bool, type(None), bytes))
SMALLEST_SHARE = 1 / 8  # of the time limit, for a repeated call on few rows
LARGEST = 1e15  # largest reward: the sum of squares over a batch still fits float32
RECOVERY = 4.0  # time limits spent on finding the rows that hang; rows not reached count as hanging too


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """One loaded function: `spec` is what the user typed, `name` its name in metrics."""

    name: str
    spec: str
    call: Callable[..., Any]
    in_process: bool = False  # must run in the trainer's process, even if there are workers
    setting: str = "reward_funcs"  # that names it, for messages


class Fault(NamedTuple):
    """What went wrong, as parts of a message around the row: {what} on {row}{rest}."""

    kind: str  # raised, returned, length, timeout, died, memory
    what: str
    rest: str

    def sentence(self, function: RewardFunction, prompts: Sequence[Prompt]) -> str:
        """`prompts`: the row at fault, or the rows of the call."""
        where, sources = "", [prompt.source for prompt in prompts]
        if self.kind == "length":
            rows = f"rows {sources[0]} to {sources[-1]}" if len(sources) > 1 else f"row {sources[0]}"
            where = f" ({rows})"
        elif len(sources) == 1:
            where = f" {'for' if self.kind == 'returned' else 'on'} {sources[0]}"
        return f"{function.setting}={function.spec}: {self.what}{where}{self.rest}{self._form(function, prompts[0])}"

    def _form(self, function: RewardFunction, prompt: Prompt) -> str:
        """Whether completions are text or messages, for an error that a function of the other would raise."""
        is_likely = self.what.startswith(("raised TypeError:", "raised AttributeError:", "raised KeyError:"))
        if not is_likely or not any(p.name == "completions" or p.kind is p.VAR_KEYWORD for p in parameters(function)):
            return ""
        them = "completions are" if function.setting == "reward_funcs" else "completions[i] are"  # a judge's
        if isinstance(prompt.prompt, str):
            return f"; {them} strings, because the prompts are text"
        return f"; {them} lists of messages, because the prompts are chats"


Score = float | None | Fault
Outcome = list[Score] | Fault


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Progress of the run, for functions with a parameter trainer_state; names as in transformers."""

    global_step: int = 0  # optimizer steps done
    max_steps: int = 0  # optimizer steps of the whole run
    epoch: float = 0.0  # passes over the data done
    num_train_epochs: float = 0.0  # passes over the data of the whole run


@dataclass
class CallLog:
    """What a function logs in one call through log_extra and log_metric."""

    extra: dict[str, list[Any]] = field(default_factory=dict)  # column of samples.jsonl -> a value per completion
    metrics: dict[str, list[float]] = field(default_factory=dict)  # name -> values, whose mean is logged

    def log_extra(self, column: str, values: Any) -> None:
        values = values.tolist() if hasattr(values, "tolist") else values
        self.extra.setdefault(str(column), []).extend(_as_json(value) for value in values)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def arguments(self, call: Callable[..., Any], state: TrainerState) -> dict[str, Any]:
        """The arguments of OF_TRAINER that the function names."""
        offered = {"trainer_state": state, "log_extra": self.log_extra, "log_metric": self.log_metric}
        return {name: offered[name] for name in asked_of_trainer(call)}

    def checked(self, outcome: Outcome, num_rows: int) -> Outcome:
        """The outcome of the call, or a fault if the values that it logged do not fit."""
        for column, values in self.extra.items() if not isinstance(outcome, Fault) else ():
            if len(values) != num_rows:
                what = f"logged {len(values)} values of {column!r} for {num_rows} completions"
                return Fault("length", what, "; give log_extra one value per completion")
        return outcome


def asked_of_trainer(call: Callable[..., Any]) -> list[str]:
    found = named(list(inspect.signature(call).parameters.values()))
    return [p.name for p in found if p.name in OF_TRAINER]


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch
        value = value.tolist()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


class Logged:
    """What the functions logged for the rows of a batch."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
        self.metrics: dict[str, list[float]] = {}

    def add(self, parts: Sequence[Scored]) -> None:
        """Add the logs of one function, whose parts are consecutive rows."""
        first = 0
        for part in parts:
            for low, log in part.logs:
                for column, values in log.extra.items():
                    for number, value in enumerate(values, start=first + low):
                        self.rows[number][column] = value
                for name, numbers in log.metrics.items():
                    self.metrics.setdefault(name, []).extend(numbers)
            first += len(part.scores)


class Refused(Exception):
    """The call was not made: the function needs a column that the rows do not have."""


def parameters(function: RewardFunction) -> list[inspect.Parameter]:
    return list(inspect.signature(function.call).parameters.values())


def named(found: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def required(function: RewardFunction) -> list[str]:
    """Required parameters, and columns that an environment has to provide."""
    made = getattr(function.call, "made_by_episodes", ())
    needed = [p.name for p in named(parameters(function)) if p.default is p.empty and p.name not in OF_TRAINER]
    return needed + list(made)


def arguments(
    function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion], known: Sequence[str]
) -> dict[str, list[Any]]:
    """Arguments of one call: new lists with one entry per completion, reduced to what the signature takes.

    Every entry is a copy, so that a function may change its arguments without effect on the data, other functions or
    later steps. Columns of the completion's episode take precedence over those of the data. known: columns of other
    rows, None in these.
    """
    rows = [{**prompt.columns, **completion.columns} for prompt, completion in zip(prompts, completions, strict=True)]
    taken = {*RESERVED, *asked_of_trainer(function.call)}
    columns = dict.fromkeys(name for name in [*(name for row in rows for name in row), *known] if name not in taken)
    offered: dict[str, list[Any]] = {
        "prompts": [prompt.prompt for prompt in prompts],
        "completions": [as_completed(*pair) for pair in zip(prompts, completions, strict=True)],
        **{name: [row.get(name) for row in rows] for name in columns},
    }
    if any(completion.ids for completion in completions):  # texts read from a file have no ids
        offered["completion_ids"] = [list(completion.ids) for completion in completions]
    found = parameters(function)
    missing = [p.name for p in named(found) if p.default is p.empty and p.name not in (*offered, *OF_TRAINER)]
    if missing:
        raise Refused(
            f"{function.setting}={function.spec}: asks for {missing[0]!r}, which {prompts[0].source} does not have; it "
            f"can ask for {', '.join(offered)}"
        )
    if not any(p.kind is p.VAR_KEYWORD for p in found):
        offered = {p.name: offered[p.name] for p in named(found) if p.name in offered}
    return {n: values if n == "completion_ids" else [copied(x) for x in values] for n, values in offered.items()}


def copied(value: Any) -> Any:
    """A deep copy, in half the time of copy.deepcopy."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is list:
        return [item if type(item) in IMMUTABLE else copied(item) for item in value]
    if kind is dict:
        return {key: item if type(item) in IMMUTABLE else copied(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a lock, a client: cannot be copied
        return value


def as_completed(prompt: Prompt, completion: Completion) -> str | list[dict[str, Any]]:
    """The completion as messages if the prompt is messages, else as text."""
    if isinstance(prompt.prompt, str):
        return completion.text
    if completion.messages is not None:
        return completion.messages
    return [{"role": "assistant", "content": completion.text}]


def raised(error: BaseException, call: Callable[..., Any] | None) -> Fault:
    where = where_raised(error, call)
    if isinstance(error, MemoryError):
        return Fault("memory", "ran out of memory", f"{where}; use less, or return None where it does not apply")
    return Fault(
        "raised", f"raised {describe_error(error)}", f"{where}; fix it, or return None where it does not apply"
    )


def checked(returned: Any, num_rows: int) -> Outcome:
    """Plain floats, one per row, or the fault of the return value."""
    if hasattr(returned, "tolist"):  # numpy and torch
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        rest = f"; return one number per completion ({num_rows} here)"
        return Fault("length", f"returned {type(returned).__name__}, not a list", rest)
    if len(returned) != num_rows:
        rest = "; return one per completion, None where it does not apply"
        return Fault("length", f"returned {len(returned)} scores for {num_rows} completions", rest)
    return [_score(value) for value in returned]


def _score(value: Any) -> Score:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy and torch scalars
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, Real):
        shown = repr(value) if len(repr(value)) <= 60 else type(value).__name__
        return Fault("returned", f"returned {shown}", ", not a number; return a float or None")
    if abs(value) > LARGEST and not (isinstance(value, float) and math.isinf(value)):
        digits = 0 if isinstance(value, float) else int(int(abs(value)).bit_length() * math.log10(2)) + 1
        shown = f"a number of {digits} digits" if digits else f"{value:.3g}"
        return Fault("returned", f"returned {shown}", f"; rewards are float32, return one within +-{LARGEST:g}")
    if not math.isfinite(value):
        return Fault("returned", f"returned {float(value)}", "; return a finite number, or None if it does not apply")
    return float(value)


class Scored(NamedTuple):
    """Scores of the rows of one call, the fault of the whole call if any, and the first row that causes it alone."""

    scores: list[Score]
    fault: Fault | None = None
    row: int | None = None
    logs: Sequence[tuple[int, CallLog]] = ()  # (first row, log) of each call that worked


def score_rows(
    call: Callable[[int, int, float], Outcome], num_rows: int, *, first: Outcome, timeout: float, stop: bool
) -> Scored:
    """Scores of the rows, given the outcome `first` of the call on all of them; a fault is bisected by further calls.

    call(low, high, seconds) calls the function on rows low to high. Parts that work keep their scores. With `stop` the
    search ends at the first row at fault, since the run stops anyway.
    """
    if not isinstance(first, Fault):
        return Scored(first)
    scores: list[Score] = [first] * num_rows
    if num_rows == 1 or (stop and first.kind == "length"):
        return Scored(scores, first, 0 if num_rows == 1 else None)
    spent, row = 0.0, None
    parts = [(num_rows // 2, num_rows), (0, num_rows // 2)]
    while parts and spent < RECOVERY * timeout:
        low, high = parts.pop()
        started = time.monotonic()
        share = timeout * max((high - low) / num_rows, SMALLEST_SHARE)
        outcome = call(low, high, share)
        spent += min(share, time.monotonic() - started)  # a new process may take longer to start
        if not isinstance(outcome, Fault):
            scores[low:high] = outcome
        elif high - low > 1:
            middle = (low + high) // 2
            parts += [(middle, high), (low, middle)]
        else:
            # A row that times out alone also did in the first call: report that fault, with the limit the user set.
            scores[low] = first if outcome.kind == first.kind == "timeout" else outcome
            if row is None and (outcome.kind != "length" or first.kind == "length"):
                row = low
            if stop and row is not None:
                break
    return Scored(scores, first, row)


def log_to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
