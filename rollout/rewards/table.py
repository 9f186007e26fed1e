"""Rewards: call a run's reward functions on batches, check their scores and combine them in a RewardTable.

    rewards = load_rewards(["exact_match", "my_rewards.polite"], weights=[1.0, 0.2])
    table = rewards.score(prompts, completions)                # one Prompt and one Completion per row
    scoring = rewards.submit(prompts, completions, step=7)     # same, in the background
    table = scoring.result()
    rewards.close()

A user function names the arguments it wants: `completions`, `prompts`, `completion_ids`, or data columns:

    def polite(completions, prompts=None, answer=None, **columns) -> list[float | None]:

It may also name TRL's `trainer_state` (global_step, max_steps, epoch), `log_extra(column, values)`, which adds a column
to samples.jsonl, and `log_metric(name, value)`, which logs its mean over a step as the metric reward/log/NAME.

With num_workers, functions run in worker processes (rollout/rewards/workers.py), unless they have a state_dict or a
model. A row on which a function fails stops the run. With on_error "none" the row gets no reward at all, because a sum
without one of its terms would mean something else.

To test a function without training: python -m rollout.rewards --check my_rewards.polite --data rows.jsonl
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
from dataclasses import dataclass, field, replace
from typing import Any

from data.errors import UserError
from data.types import Prompt
from data.user_code import PYTHON, import_name
from rollout.engine import Completion
from rollout.rewards.calls import (
    MAX_REWARD,
    OFFERED,
    RESERVED,
    BatchLog,
    CallLog,
    CallScores,
    Fault,
    MissingColumnError,
    Outcome,
    RewardFunction,
    TrainerState,
    arguments,
    check_scores,
    fault_of,
    log_to_stderr,
    reads_ids,
    required_columns,
    score_rows,
)
from rollout.rewards.loading import find_reward, runs_in_trainer
from rollout.rewards.options import DEFAULT_REWARD, TIMEOUT, OnError, RewardConfig
from rollout.rewards.weights import Weight, parse_weights
from rollout.rewards.workers import WorkerPool, shards


@dataclass(frozen=True)
class Gap:
    """Number of rows in a batch without a score from one function."""

    none: int  # rows for which the function returned None
    failed: int  # rows on which it raised, hung, died or returned something else than a number
    last: str | None  # message of the last failure


@dataclass(frozen=True, kw_only=True)
class RewardTable:
    """Scores of one batch; `values[i][k]` is function k on completion i."""

    names: list[str]
    values: list[list[float | None]]  # None: the function does not apply to this row
    weights: list[float]
    totals: list[float | None]  # weighted sum of the scores; None if the row has no score
    failed: int = 0  # rows without any reward because a function failed on them
    extra: list[dict[str, Any]] | None = None  # log_extra values, one dict per completion
    logged: dict[str, list[float]] = field(default_factory=dict)  # log_metric values from all calls
    gaps: Sequence[Gap] = ()  # one per function


def load_rewards(
    names: Sequence[str | Callable[..., Any]],
    weights: Sequence[float | str] | None = None,
    *,
    num_workers: int = 0,
    timeout: float = TIMEOUT,
    memory_gb: float | None = None,
    on_error: OnError = "stop",
    log: Callable[[str], None] = log_to_stderr,
    trust_remote_code: bool = False,
) -> Rewards:
    """Load every function, so that a wrong name stops the run before anything is sampled.

    A name is a built-in, `module.function` (the working folder is searched first) or `path/to/file.py:function`. From
    Python, pass a name or the function itself.
    """
    if not names:
        raise UserError("reward_funcs=(): no reward function; name at least one, for example exact_match")
    parsed = parse_weights(weights, len(names))
    functions: list[RewardFunction] = []
    for function in names:
        name, call = find_reward(function, trust_remote_code=trust_remote_code)
        spec = import_name(function) if callable(function) else function
        if num_workers and spec.startswith(f"{PYTHON}:"):
            raise UserError(
                f"reward_funcs={spec}: a worker cannot import this function; define it at the top level of a module, "
                "or set --reward-num-workers 0"
            )
        used = {function.name for function in functions}
        unique = next(x for x in (name, *(f"{name}_{n}" for n in range(2, len(names) + 1))) if x not in used)
        functions.append(RewardFunction(name=unique, spec=spec, call=call, in_process=runs_in_trainer(spec, call)))
    remote = [function.spec for function in functions if not function.in_process]
    pool = None
    if num_workers and remote:
        stop = on_error == "stop"
        pool = WorkerPool(remote, num_workers=num_workers, timeout=timeout, memory_gb=memory_gb, stop=stop)
    return Rewards(functions, parsed, pool=pool, on_error=on_error, log=log)


def open_rewards(
    cfg: RewardConfig, log: Callable[[str], None] = log_to_stderr, *, trust_remote_code: bool = False
) -> Rewards:
    """Call load_rewards with the flags of a run."""
    rewards = load_rewards(
        cfg.reward_funcs or (DEFAULT_REWARD,),
        cfg.reward_weights,
        num_workers=cfg.reward_num_workers,
        timeout=cfg.reward_timeout,
        memory_gb=cfg.reward_memory_gb,
        on_error=cfg.reward_on_error,
        log=log,
        trust_remote_code=trust_remote_code,
    )
    rewards.defaulted = not cfg.reward_funcs
    return rewards


class Rewards:
    """A list of reward functions with their weights."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[Weight],
        *,
        pool: WorkerPool | None = None,
        on_error: OnError = "stop",
        log: Callable[[str], None] = log_to_stderr,
    ) -> None:
        assert len(functions) == len(weights), (len(functions), len(weights))
        self.functions = list(functions)
        self._weights = list(weights)
        self._pool = pool
        self._on_error = on_error
        self._log = log
        self._reported: set[tuple[str, str]] = set()  # (function, kind of fault) already logged
        self._failed = 0  # failed rows since the last metrics()
        self._columns: list[str] = []  # columns in any row of the run; set by check_columns
        self._loop: asyncio.AbstractEventLoop | None = None
        self.defaulted = False  # True: the user named no function
        self.run = TrainerState()  # max_steps and num_train_epochs of the run

    def state_at(self, step: int) -> TrainerState:
        progress = step / self.run.max_steps if self.run.max_steps else 0.0
        return replace(self.run, global_step=step, epoch=self.run.num_train_epochs * progress)

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    @property
    def reads_ids(self) -> bool:
        """Whether a function receives the ids of completions."""
        return any(map(reads_ids, self.functions))

    def weights_at(self, step: int) -> list[float]:
        return [weight.at(step) for weight in self._weights]

    def check_columns(self, prompts: Sequence[Prompt], what: str, added: Sequence[str] | None = ()) -> None:
        """Raise if no row has a column that a function requires; `what` names the data in messages.

        A column that only some rows have is None in the other rows, like a null in the file, and this is logged.
        It is None even in batches where no row has it, so whether a batch fails does not depend on its rows.
        added: columns that completions add (an environment's); None: not known yet.
        """
        if not prompts:
            return
        if self.defaulted:
            self.defaulted = False
            num_answers = sum(prompt.columns.get("answer") is not None for prompt in prompts)
            self._log(
                f"no --reward-funcs: using {DEFAULT_REWARD}, which is 1 if the completion equals the row's 'answer'; "
                f"{num_answers} of {len(prompts)} rows have one"
            )
        columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name not in RESERVED)
        for function in self.functions:
            for name in required_columns(function):
                if name in OFFERED or name in (added or ()):
                    continue
                if name not in columns and added is None:
                    self._columns.append(name)
                    continue
                if name not in columns:
                    raise UserError(
                        f"{function.setting}={function.spec}: requires {name!r}, which no row of {what} has (first: "
                        f"{prompts[0].source}); available: {', '.join((*OFFERED, *columns, *added))}"
                    )
                without = [prompt.source for prompt in prompts if name not in prompt.columns]
                if without:
                    print(
                        f"{what}: {len(without)} of {len(prompts)} rows have no {name!r} (first: {without[0]}); "
                        f"reward {function.name} gets None for these rows",
                        file=sys.stderr,
                    )
        self._columns = list(dict.fromkeys([*self._columns, *columns, *(added or ())]))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int = 0) -> RewardTable:
        """Score the batch with every function and the weights at `step`. Async functions run concurrently."""
        return self.submit(prompts, completions, step=step).result()

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int = 0) -> Scoring:
        """Start scoring: workers start immediately; other functions run in the thread that calls result().

        Consecutive rows of the same prompt form a group, and one worker scores the whole group.
        """
        assert len(prompts) == len(completions), (len(prompts), len(completions))
        scoring = Scoring(self, list(prompts), list(completions), step)
        for index, function in enumerate(self.functions):
            if self._pool is not None and prompts and not function.in_process:
                scoring.remote[index] = self._submit(self._pool, function, scoring)
        return scoring

    def metrics(self) -> dict[str, float]:
        """Return the number of failed rows since the last call."""
        failed, self._failed = self._failed, 0
        return {"reward/failed_rows": float(failed)} if self._on_error == "none" else {}

    def close(self) -> None:
        """Stop the workers and the event loop."""
        if self._pool is not None:
            self._pool.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(_end, self._loop)
            self._loop = None

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state of each function that has one, by name."""
        states = {}
        for function in self.functions:
            if hasattr(function.call, "state_dict"):
                state = function.call.state_dict()
                try:
                    states[function.name] = json.loads(json.dumps(state))
                except (TypeError, ValueError) as error:
                    raise UserError(
                        f"reward_funcs={function.spec}: state_dict() cannot be saved as JSON ({error}); return "
                        "numbers, strings, lists and dicts"
                    ) from None
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        stateful = {function.name: function for function in self.functions if hasattr(function.call, "state_dict")}
        if states.keys() != stateful.keys():
            raise UserError(
                f"reward_funcs={self.names}: the checkpoint contains state for {sorted(states)}, but "
                f"functions with state are {sorted(stateful)}; resume with the same reward functions"
            )
        for name, state in states.items():
            stateful[name].call.load_state_dict(state)

    def _submit(self, pool: WorkerPool, function: RewardFunction, scoring: Scoring) -> list[Future[CallScores]]:
        prompts, completions, state = scoring.prompts, scoring.completions, self.state_at(scoring.step)
        index = [other for other in self.functions if not other.in_process].index(function)
        try:
            batch = arguments(function, prompts, completions, self._columns)
        except MissingColumnError as error:
            raise UserError(str(error)) from None
        return [
            pool.submit(index, {name: values[low:high] for name, values in batch.items()}, high - low, state)
            for low, high in shards(prompts, pool.num_workers)
        ]

    def _table(self, scoring: Scoring) -> RewardTable:
        prompts, weights = scoring.prompts, self.weights_at(scoring.step)
        if not prompts:
            return RewardTable(names=self.names, values=[], weights=weights, totals=[])
        first_logs, logged = [CallLog() for _ in self.functions], BatchLog(len(prompts))
        pending = {
            index: self._start(self._run_async(function, scoring, first_logs[index]))
            for index, function in enumerate(self.functions)
            if index not in scoring.remote and _is_async(function.call)
        }
        scored = {  # functions of this thread first, while async functions and workers run
            index: [self._score_here(self.functions[index], scoring, pending.get(index), first_logs[index])]
            for index in sorted(range(len(self.functions)), key=lambda index: index in pending)
            if index not in scoring.remote
        }
        scored |= {index: [future.result() for future in futures] for index, futures in scoring.remote.items()}
        columns: list[list[float | None]] = []
        gaps: list[Gap] = []
        bad: set[int] = set()
        for index, function in enumerate(self.functions):
            parts = scored[index]
            logged.add(parts)
            column, last = self._without_faults(function, parts, prompts, bad)
            failed = sum(isinstance(score, Fault) for part in parts for score in part.scores)
            gaps.append(Gap(column.count(None) - failed, failed, last))
            columns.append(column)
        values = [list(row) if i not in bad else [None] * len(row) for i, row in enumerate(zip(*columns, strict=True))]
        self._failed += len(bad)
        totals = [_total(row, weights) for row in values]
        largest = max((abs(total) for total in totals if total is not None), default=0.0)
        if largest > MAX_REWARD:
            raise UserError(
                f"reward_weights={' '.join(f'{weight:g}' for weight in weights)}: total reward {largest:.3g} is out of "
                f"range; rewards are float32 and limited to +-{MAX_REWARD:g}"
            )
        extra = logged.rows if any(logged.rows) else None
        return RewardTable(
            names=self.names, values=values, weights=weights, totals=totals, failed=len(bad), extra=extra,
            logged=logged.metrics, gaps=gaps,
        )  # fmt: skip

    def _without_faults(
        self, function: RewardFunction, parts: Sequence[CallScores], prompts: list[Prompt], bad: set[int]
    ) -> tuple[list[float | None], str | None]:
        """Return (scores of all parts, message of the last fault). A fault stops the run or adds its row to `bad`."""
        column: list[float | None] = []
        last = None
        for part in parts:
            low, rows = len(column), prompts[len(column) : len(column) + len(part.scores)]
            faulty = [i for i, score in enumerate(part.scores) if isinstance(score, Fault)]
            row = part.row if part.fault is not None else next(iter(faulty), None)
            fault = part.scores[row] if row is not None else part.fault
            if isinstance(fault, Fault):
                blamed = rows if row is None else [rows[row]]
                if self._on_error == "stop":
                    raise UserError(fault.message(function, blamed))
                if (function.name, fault.kind) not in self._reported:
                    self._reported.add((function.name, fault.kind))
                    self._log(
                        f"{fault.message(function, blamed)}; {len(faulty)} of {len(rows)} rows in this call get no "
                        "reward, and later faults of this kind are only counted (reward_on_error=none)"
                    )
            if faulty:
                last = part.scores[faulty[-1]].message(function, [rows[faulty[-1]]])
            bad.update(low + i for i in faulty)
            column += [None if isinstance(score, Fault) else score for score in part.scores]
        return column, last

    def _score_here(
        self, function: RewardFunction, scoring: Scoring, pending: Future[Any] | None, first_log: CallLog
    ) -> CallScores:
        """Run one function on all rows in this process, where a call that hangs cannot be stopped."""
        logs: list[tuple[int, CallLog]] = []

        def call(low: int, high: int, log: CallLog, pending: Future[Any] | None = None) -> Outcome:
            try:
                if pending:
                    returned = pending.result()
                else:
                    returned = self.resolve(self._call(function, scoring, log, low, high))
                outcome = log.check(check_scores(returned, high - low), high - low)
            except MissingColumnError as error:
                raise UserError(str(error)) from None
            except (Exception, SystemExit) as error:  # user code may raise anything
                return fault_of(error, function.call)
            if not isinstance(outcome, Fault):
                logs.append((low, log))
            return outcome

        num_rows, stop = len(scoring.prompts), self._on_error == "stop"
        first = call(0, num_rows, first_log, pending)
        retry = lambda low, high, _seconds: call(low, high, CallLog())  # noqa: E731
        scored = score_rows(retry, num_rows, first=first, timeout=math.inf, stop=stop)
        return scored._replace(logs=logs)

    def _call(self, function: RewardFunction, scoring: Scoring, log: CallLog, low: int, high: int | None) -> Any:
        batch = arguments(function, scoring.prompts[low:high], scoring.completions[low:high], self._columns)
        return function.call(**batch, **log.arguments(function.call, self.state_at(scoring.step)))

    def resolve(self, returned: Any) -> Any:
        """Wait for a return value that is awaitable; return any other value unchanged."""
        return self._start(_awaited(returned)).result() if inspect.isawaitable(returned) else returned

    async def _run_async(self, function: RewardFunction, scoring: Scoring, log: CallLog) -> Any:
        return await _awaited(self._call(function, scoring, log, 0, None))

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run the coroutine on an event loop that lives as long as this object, so clients can keep connections."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class Scoring:
    """Scores of a batch, in progress."""

    def __init__(self, rewards: Rewards, prompts: list[Prompt], completions: list[Completion], step: int) -> None:
        self.prompts, self.completions, self.step = prompts, completions, step
        self.remote: dict[int, list[Future[CallScores]]] = {}  # function index -> one future per shard
        self._rewards = rewards
        self._lock = threading.Lock()
        self._table: RewardTable | None = None

    def done(self) -> bool:
        """Return whether all workers have finished."""
        return all(future.done() for futures in self.remote.values() for future in futures)

    def result(self) -> RewardTable:
        """Return the table, the same one on every call. A UserError names the failing function and row."""
        with self._lock:
            if self._table is None:
                self._table = self._rewards._table(self)
            return self._table


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (KeyboardInterrupt, SystemExit) as error:  # would end the loop, and the caller would wait forever
        raise RuntimeError(f"{type(error).__name__} in an async function") from error


def _end(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):  # left over after Ctrl-C
        task.cancel()
    loop.call_soon(loop.stop)


def _total(values: list[float | None], weights: list[float]) -> float | None:
    parts = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    if any(abs(part) > MAX_REWARD for part in parts):
        return max(parts, key=abs)  # rejected by the caller; the sum might be NaN
    return math.fsum(parts) if parts else None


def _is_async(call: Callable[..., Any]) -> bool:
    method = type(call).__call__  # for callable objects
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(method)
