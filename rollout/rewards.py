"""Reward functions: found by name, called on lists, checked before a number of theirs is believed.

    rewards = load_rewards(["exact_match", "my_rewards.polite"], weights=[1.0, 0.2])
    table = rewards.score(prompts, completions)     # one Prompt and one Completion per row

A user's function takes the names it wants of `completions`, `prompts`, `completion_ids` and the columns of the data:

    def polite(completions, prompts=None, answer=None, **columns) -> list[float | None]:

Test one without training: python -m rollout.rewards --check my_rewards.polite --data rows.jsonl
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any

from data.types import Prompt
from data.user_code import place, told
from rollout.reward_loading import find_reward
from rollout.types import Completion

OFFERED = ("prompts", "completions", "completion_ids")  # what every function can ask for
RESERVED = (*OFFERED, "prompt", "completion")  # never passed on as columns


@dataclass(frozen=True, kw_only=True)
class RewardTable:
    """Scores of one batch; `values[i][k]` is function k on completion i."""

    names: list[str]
    values: list[list[float | None]]  # None = the function does not apply to this row
    weights: list[float]
    totals: list[float | None]  # weighted sum over what applies; None where nothing does


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """One loaded function: `spec` is what the user typed, `name` is what metrics say."""

    name: str
    spec: str
    call: Callable[..., Any]


def load_rewards(names: Sequence[str], weights: Sequence[float] | None = None) -> Rewards:
    """Find every function now, so that a wrong name stops the run before anything is sampled.

    A name is a built-in, `module.function` (a file in the working folder first), or `path/to/file.py:function`.
    """
    if not names:
        raise ValueError("reward_funcs=(): no reward function; name at least one, for example exact_match")
    if weights is None or len(weights) == 0:
        weights = [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights={list(weights)}: {len(weights)} weights for {len(names)} reward functions; give one each"
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward_weights={list(weights)}: every weight must be a finite number")
    functions: list[RewardFunction] = []
    for spec in names:
        name, call = find_reward(spec)
        taken = {function.name for function in functions}
        count = 2
        unique = name
        while unique in taken:
            unique, count = f"{name}_{count}", count + 1
        functions.append(RewardFunction(name=unique, spec=spec, call=call))
    return Rewards(functions, [float(weight) for weight in weights])


class Rewards:
    """A list of reward functions with their weights."""

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float]) -> None:
        assert len(functions) == len(weights), (len(functions), len(weights))
        self.functions = list(functions)
        self.weights = list(weights)
        self._columns: list[str] = []  # of all rows there will be, once check_columns has seen them
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    def check_columns(self, prompts: Sequence[Prompt], what: str) -> None:
        """Refuse rows of which none has a column that a function cannot do without; what: their name, "data" say.

        A column that only some rows have is None in the others, as a null in the file would be: that is counted aloud.
        Batches without any row of the kind then get it too, so no batch fails for what it happens to hold.
        """
        if not prompts:
            return
        columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name not in RESERVED)
        for function in self.functions:
            for name in _required(function):
                if name in OFFERED:
                    continue
                if name not in columns:
                    raise ValueError(
                        f"reward_funcs={function.spec}: asks for {name!r}, which no row of {what} has (not "
                        f"{prompts[0].source}, the first); it can ask for {', '.join((*OFFERED, *columns))}"
                    )
                without = [prompt.source for prompt in prompts if name not in prompt.columns]
                if without:
                    print(
                        f"{what}: {len(without)} of {len(prompts)} rows have no {name!r} (the first: {without[0]}); "
                        f"the reward {function.name} gets None there",
                        file=sys.stderr,
                    )
        self._columns = list(dict.fromkeys([*self._columns, *columns]))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> RewardTable:
        """Call every function once on the whole batch; async ones run together while the others take their turn."""
        assert len(prompts) == len(completions), (len(prompts), len(completions))
        if not prompts:
            return RewardTable(names=self.names, values=[], weights=list(self.weights), totals=[])
        pending: dict[str, Future[Any]] = {}
        for function in self.functions:
            if _is_async(function.call):
                pending[function.name] = self._submit(self._run_async(function, prompts, completions))
        columns = [
            self._checked(function, prompts, completions, pending.get(function.name)) for function in self.functions
        ]
        values = [list(row) for row in zip(*columns, strict=True)]
        totals = [_total(row, self.weights) for row in values]
        return RewardTable(names=self.names, values=values, weights=list(self.weights), totals=totals)

    def state_dict(self) -> dict[str, Any]:
        """State of the objects that have one, by name: plain JSON."""
        states = {}
        for function in self.functions:
            if hasattr(function.call, "state_dict"):
                state = function.call.state_dict()
                try:
                    states[function.name] = json.loads(json.dumps(state))
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"reward_funcs={function.spec}: its state_dict() cannot be saved as JSON ({error}); "
                        "return numbers, strings, lists and dicts"
                    ) from None
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        stateful = {function.name: function for function in self.functions if hasattr(function.call, "state_dict")}
        if states.keys() != stateful.keys():
            raise ValueError(
                f"reward_funcs={self.names}: the checkpoint holds the state of {sorted(states)}, these functions keep "
                f"that of {sorted(stateful)}; resume with the same reward functions"
            )
        for name, state in states.items():
            stateful[name].call.load_state_dict(state)

    def _checked(
        self,
        function: RewardFunction,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        pending: Future[Any] | None,
    ) -> list[float | None]:
        """The function's scores, or a sentence that names it and the row."""
        try:
            returned = pending.result() if pending else self._run(function, prompts, completions)
        except _Refused as error:
            raise ValueError(str(error)) from None
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            row = self._row_that_fails(function, prompts, completions)
            where = f" on {row}" if row else ""
            raise ValueError(
                f"reward_funcs={function.spec}: raised {told(error)}{where}{place(error, function.call)}; fix it, or "
                "return None where it does not apply"
            ) from None
        return _numbers(function, returned, [prompt.source for prompt in prompts])

    def _run(self, function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Any:
        returned = function.call(**_arguments(function, prompts, completions, self._columns))
        return self._submit(_awaited(returned)).result() if inspect.isawaitable(returned) else returned

    async def _run_async(
        self, function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> Any:
        return await function.call(**_arguments(function, prompts, completions, self._columns))

    def _row_that_fails(
        self, function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> str | None:
        """Source of a row that raises on its own, by halving; None when no half raises by itself."""
        low, high = 0, len(prompts)
        while high - low > 1:
            middle = (low + high) // 2
            if self._raises(function, prompts[low:middle], completions[low:middle]):
                high = middle
            elif self._raises(function, prompts[middle:high], completions[middle:high]):
                low = middle
            else:
                return None
        return prompts[low].source

    def _raises(self, function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> bool:
        try:
            self._run(function, prompts, completions)
        except (Exception, SystemExit):  # which one does not matter: the first is reported
            return True
        return False

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start it on one event loop that lives as long as this object, so that clients can keep connections."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class _Refused(Exception):
    """A call that was never made: the function asks for something the rows do not have."""


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    return list(inspect.signature(function.call).parameters.values())


def _named(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _required(function: RewardFunction) -> list[str]:
    return [p.name for p in _named(_parameters(function)) if p.default is p.empty]


def _arguments(
    function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion], known: Sequence[str]
) -> dict[str, list[Any]]:
    """Fresh lists for one call, one entry per completion, cut down to what the signature takes.

    known: columns that other rows of the data have, None in these.
    """
    found = (name for prompt in prompts for name in prompt.columns if name not in RESERVED)
    columns = dict.fromkeys([*found, *known])
    offered: dict[str, list[Any]] = {
        "prompts": [prompt.prompt for prompt in prompts],
        "completions": [
            [{"role": "assistant", "content": completion.text}] if prompt.conversational else completion.text
            for prompt, completion in zip(prompts, completions, strict=True)
        ],
        **{name: [prompt.columns.get(name) for prompt in prompts] for name in columns},
    }
    if any(completion.ids for completion in completions):  # texts read from a file have no ids
        offered["completion_ids"] = [list(completion.ids) for completion in completions]
    missing = [name for name in _required(function) if name not in offered]
    if missing:
        raise _Refused(
            f"reward_funcs={function.spec}: asks for {missing[0]!r}, which {prompts[0].source} does not have; it can "
            f"ask for {', '.join(offered)}"
        )
    parameters = _parameters(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    return {p.name: offered[p.name] for p in _named(parameters) if p.name in offered}


def _numbers(function: RewardFunction, returned: Any, sources: list[str]) -> list[float | None]:
    """Plain floats, one per row, or a sentence about what came back instead."""
    label = f"reward_funcs={function.spec}"
    if hasattr(returned, "tolist"):  # numpy and torch
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise ValueError(
            f"{label}: returned {type(returned).__name__}, not a list; return one number per completion "
            f"({len(sources)} here)"
        )
    if len(returned) != len(sources):
        raise ValueError(
            f"{label}: returned {len(returned)} scores for {len(sources)} completions (rows {sources[0]} to "
            f"{sources[-1]}); return one per completion, None where it does not apply"
        )
    scores: list[float | None] = []
    for value, source in zip(returned, sources, strict=True):
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy and torch scalars
            value = value.item()
        if value is not None and not isinstance(value, Real):
            shown = repr(value) if len(repr(value)) <= 60 else type(value).__name__
            raise ValueError(f"{label}: returned {shown} for {source}, not a number; return a float or None")
        if value is not None and not math.isfinite(value):
            raise ValueError(
                f"{label}: returned {float(value)} for {source}; return a finite number, or None if it does not apply"
            )
        scores.append(None if value is None else float(value))
    return scores


def _total(values: list[float | None], weights: list[float]) -> float | None:
    parts = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return math.fsum(parts) if parts else None


def _is_async(call: Callable[..., Any]) -> bool:
    method = type(call).__call__  # of a callable object
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(method)


if __name__ == "__main__":
    from rollout.rewards_check import main

    sys.exit(main())
