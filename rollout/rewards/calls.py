"""One call of a reward function: build its arguments, classify its faults, and find the row that caused a fault.

A function is called on lists. The outcome is one score or fault (a NaN) per row, or one fault for the whole call (it
raised, hung or died). A failed call is retried on halves down to single rows, so that a bad row loses only its own
reward.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from data.hints import some_rows
from data.types import Prompt
from data.user_code import describe_error, where_raised
from rollout.engine import Completion

OFFERED = ("prompts", "completions", "completion_ids")  # arguments available to every function
RESERVED = (*OFFERED, "prompt", "completion")  # never passed as columns
TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")  # TRL's; passed only to functions that name them
IMMUTABLE = frozenset((str, int, float, bool, type(None), bytes))
MIN_TIME_FRACTION = 1 / 8  # minimum fraction of the time limit for a retry on few rows
MAX_REWARD = 1e15  # the sum of squares over a batch still fits float32
MAX_RETRY_LIMITS = 4.0  # time limits spent searching for rows that hang; rows not reached count as hanging


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A loaded function: `spec` is what the user typed, `name` its name in metrics."""

    name: str
    spec: str
    call: Callable[..., Any]
    in_process: bool = False  # must run in the trainer's process, even with workers
    setting: str = "reward_funcs"  # flag that names the function, for messages


class Fault(NamedTuple):
    """A failure, as the parts of a message around the row: {what} on {row}{rest}."""

    kind: str  # raised, returned, length, timeout, died, memory
    what: str
    rest: str

    def message(self, function: RewardFunction, prompts: Sequence[Prompt]) -> str:
        """Return the error message. `prompts`: the failing row, or all rows of the call."""
        where, sources = "", [prompt.source for prompt in prompts]
        if self.kind == "length":
            where = f" ({some_rows(sources)})"
        elif len(sources) == 1:
            where = f" {'for' if self.kind == 'returned' else 'on'} {sources[0]}"
        hint = self._type_hint(function, prompts[0])
        return f"{function.setting}={function.spec}: {self.what}{where}{self.rest}{hint}"

    def _type_hint(self, function: RewardFunction, prompt: Prompt) -> str:
        """Return a hint whether completions are strings or messages, for errors that confusing the two raises."""
        is_likely = self.what.startswith(("raised TypeError:", "raised AttributeError:", "raised KeyError:"))
        if not is_likely or not any(p.name == "completions" or p.kind is p.VAR_KEYWORD for p in parameters(function)):
            return ""
        name = "completions" if function.setting == "reward_funcs" else "completions[i]"  # a judge gets groups
        if isinstance(prompt.prompt, str):
            return f"; {name} are strings, because the prompts are text"
        return f"; {name} are lists of messages, because the prompts are chats"


Score = float | None | Fault
Outcome = list[Score] | Fault


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Progress of the run, for functions with a parameter trainer_state; names as in transformers."""

    global_step: int = 0  # optimizer steps done
    max_steps: int = 0  # optimizer steps in the whole run
    epoch: float = 0.0  # epochs done
    num_train_epochs: float = 0.0  # epochs in the whole run


@dataclass
class CallLog:
    """Values that a function logs in one call through log_extra and log_metric."""

    extra: dict[str, list[Any]] = field(default_factory=dict)  # samples.jsonl column -> one value per completion
    metrics: dict[str, list[float]] = field(default_factory=dict)  # name -> values; their mean is logged

    def log_extra(self, column: str, values: Any) -> None:
        values = values.tolist() if hasattr(values, "tolist") else values
        self.extra.setdefault(str(column), []).extend(_as_json(value) for value in values)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def arguments(self, call: Callable[..., Any], state: TrainerState) -> dict[str, Any]:
        """Return the TRAINER_ARGUMENTS that the function names."""
        offered = {"trainer_state": state, "log_extra": self.log_extra, "log_metric": self.log_metric}
        return {name: offered[name] for name in trainer_arguments(call)}

    def check(self, outcome: Outcome, num_rows: int) -> Outcome:
        """Return the outcome of the call, or a fault if it logged the wrong number of values."""
        for column, values in self.extra.items() if not isinstance(outcome, Fault) else ():
            if len(values) != num_rows:
                what = f"logged {len(values)} values of {column!r} for {num_rows} completions"
                return Fault("length", what, "; pass log_extra one value per completion")
        return outcome


def trainer_arguments(call: Callable[..., Any]) -> list[str]:
    parameters = named_parameters(inspect.signature(call).parameters.values())
    return [p.name for p in parameters if p.name in TRAINER_ARGUMENTS]


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch
        value = value.tolist()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


class BatchLog:
    """Values that the functions logged for the rows of a batch."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
        self.metrics: dict[str, list[float]] = {}

    def add(self, parts: Sequence[CallScores]) -> None:
        """Add the logs of one function; the parts cover consecutive rows."""
        first = 0
        for part in parts:
            for low, log in part.logs:
                for column, values in log.extra.items():
                    for row, value in zip(self.rows[first + low :], values, strict=False):
                        row[column] = value
                for name, values in log.metrics.items():
                    self.metrics.setdefault(name, []).extend(values)
            first += len(part.scores)


class MissingColumnError(Exception):
    """The function was not called because the rows lack a column that it requires."""


def parameters(function: RewardFunction) -> list[inspect.Parameter]:
    return list(inspect.signature(function.call).parameters.values())


def named_parameters(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def required_columns(function: RewardFunction) -> list[str]:
    """Return the required parameters, plus columns that an environment must provide."""
    names = [p.name for p in named_parameters(parameters(function)) if p.default is p.empty]
    return [name for name in names if name not in TRAINER_ARGUMENTS] + [*getattr(function.call, "episode_columns", ())]


def reads_ids(function: RewardFunction) -> bool:
    """Return whether the function receives completion_ids."""
    return any(p.name == "completion_ids" or p.kind is p.VAR_KEYWORD for p in parameters(function))


def arguments(
    function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion], known: Sequence[str]
) -> dict[str, list[Any]]:
    """Build the arguments of one call: lists with one entry per completion, limited to what the signature accepts.

    Every entry is a copy, so a function may modify its arguments without affecting the data, other functions or later
    steps. Columns from the completion's episode override data columns. `known` columns that these rows lack are None.
    """
    rows = [{**prompt.columns, **completion.columns} for prompt, completion in zip(prompts, completions, strict=True)]
    taken = {*RESERVED, *trainer_arguments(function.call)}
    columns = dict.fromkeys(name for name in [*(name for row in rows for name in row), *known] if name not in taken)
    offered: dict[str, list[Any]] = {
        "prompts": [prompt.prompt for prompt in prompts],
        "completions": [format_completion(*pair) for pair in zip(prompts, completions, strict=True)],
        **{name: [row.get(name) for row in rows] for name in columns},
    }
    if all(completion.ids or not completion.text for completion in completions):  # texts read from a file have no ids
        listed = completions if reads_ids(function) else ()  # rank 0 may not have the ids if no function reads them
        offered["completion_ids"] = [list(completion.ids) for completion in listed]
    accepted = named_parameters(parameters(function))
    required = (p.name for p in accepted if p.default is p.empty)
    missing = next((name for name in required if name not in (*offered, *TRAINER_ARGUMENTS)), None)
    if missing is not None:
        raise MissingColumnError(
            f"{function.setting}={function.spec}: requires {missing!r}, which {prompts[0].source} does not have; "
            f"available: {', '.join(offered)}"
        )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters(function)):
        offered = {p.name: offered[p.name] for p in accepted if p.name in offered}
    return {n: values if n == "completion_ids" else [deep_copy(x) for x in values] for n, values in offered.items()}


def deep_copy(value: Any) -> Any:
    """Copy like copy.deepcopy, in half the time."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is list:
        return [item if type(item) in IMMUTABLE else deep_copy(item) for item in value]
    if kind is dict:
        return {key: item if type(item) in IMMUTABLE else deep_copy(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a lock or a client cannot be copied
        return value


def format_completion(prompt: Prompt, completion: Completion) -> str | list[dict[str, Any]]:
    """Return the completion as messages if the prompt is messages, otherwise as text."""
    if isinstance(prompt.prompt, str):
        return completion.text
    if completion.messages is not None:
        return completion.messages
    return [{"role": "assistant", "content": completion.text}]


def fault_of(error: BaseException, call: Callable[..., Any] | None) -> Fault:
    where = where_raised(error, call)
    if isinstance(error, MemoryError):
        return Fault("memory", "ran out of memory", f"{where}; use less memory, or return None for such rows")
    return Fault("raised", f"raised {describe_error(error)}", f"{where}; fix it, or return None for such rows")


def check_scores(returned: Any, num_rows: int) -> Outcome:
    """Convert the return value to one float per row, or return its fault."""
    if hasattr(returned, "tolist"):  # numpy and torch
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        rest = f"; return one number per completion ({num_rows} here)"
        return Fault("length", f"returned {type(returned).__name__}, not a list", rest)
    if len(returned) != num_rows:
        rest = "; return one per completion, or None for a completion without a score"
        return Fault(
            "length", f"returned {len(returned)} score{'s' * (len(returned) != 1)} for {num_rows} completions", rest
        )
    return [_score(value) for value in returned]


def _score(value: Any) -> Score:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy and torch scalars
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, Real):
        shown = repr(value) if len(repr(value)) <= 60 else type(value).__name__
        return Fault("returned", f"returned {shown}", ", not a number; return a float or None")
    if abs(value) > MAX_REWARD and not (isinstance(value, float) and math.isinf(value)):
        digits = 0 if isinstance(value, float) else int(int(abs(value)).bit_length() * math.log10(2)) + 1
        shown = f"a number of {digits} digits" if digits else f"{value:.3g}"
        return Fault("returned", f"returned {shown}", f"; rewards are float32 and limited to +-{MAX_REWARD:g}")
    if not math.isfinite(value):
        return Fault("returned", f"returned {float(value)}", "; return a finite number or None")
    return float(value)


class CallScores(NamedTuple):
    """Scores from one call, including its retries."""

    scores: list[Score]
    fault: Fault | None = None  # of the whole call
    row: int | None = None  # first row that fails when called alone
    logs: Sequence[tuple[int, CallLog]] = ()  # (first row, log) of each successful call


def score_rows(
    call: Callable[[int, int, float], Outcome], num_rows: int, *, first: Outcome, timeout: float, stop: bool
) -> CallScores:
    """Return the scores of all rows. `first` is the outcome of the call on all of them; a fault is bisected by retries.

    call(low, high, seconds) calls the function on rows low to high. Halves that succeed keep their scores. With `stop`
    the search ends at the first failing row, because the run stops anyway.
    """
    if not isinstance(first, Fault):
        return CallScores(first)
    scores: list[Score] = [first] * num_rows
    if num_rows == 1 or (stop and first.kind == "length"):
        return CallScores(scores, first, 0 if num_rows == 1 else None)
    spent, row = 0.0, None
    ranges = [(num_rows // 2, num_rows), (0, num_rows // 2)]
    while ranges and spent < MAX_RETRY_LIMITS * timeout:
        low, high = ranges.pop()
        started_at = time.monotonic()
        seconds = timeout * max((high - low) / num_rows, MIN_TIME_FRACTION)
        outcome = call(low, high, seconds)
        spent += min(seconds, time.monotonic() - started_at)  # starting a new process may take longer
        if not isinstance(outcome, Fault):
            scores[low:high] = outcome
        elif high - low > 1:
            middle = (low + high) // 2
            ranges += [(middle, high), (low, middle)]
        else:
            # A row that times out alone also timed out in the first call: report that fault, with the user's limit.
            scores[low] = first if outcome.kind == first.kind == "timeout" else outcome
            if row is None and (outcome.kind != "length" or first.kind == "length"):
                row = low
            if stop and row is not None:
                break
    return CallScores(scores, first, row)


def log_to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
