"""A judge: a user function that compares the completions of a prompt, for --method online_dpo --judge.

    def shortest(completions, prompts=None, answer=None, **columns):
        return [sorted(range(len(group)), key=lambda i: len(group[i])) for group in completions]

Its arguments have one entry per prompt. `completions[i]` is the list of completions of `prompts[i]`, as strings or
messages. Data columns are passed by name. Episode columns (num_turns) and `completion_ids` are lists of lists, like
`completions`. For each prompt the judge returns one of

    [2, 0, 3, 1]      indices of at least two completions from best to worst; the others are not compared
    0 or 1            index of the better completion, if there are two
    None or -1        a tie

The verdict becomes a column of the reward table: 1 for the best completion to 0 for the worst, 0.5 for a tie. It is
therefore stored and logged like a reward. --reward-on-error decides what happens to a prompt on which the judge fails.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from data.errors import UserError
from data.types import Prompt
from data.user_code import find_callable
from rollout.engine import Completion
from rollout.rewards.calls import (
    CallLog,
    CallScores,
    Fault,
    MissingColumnError,
    RewardFunction,
    Score,
    TrainerState,
    arguments,
    fault_of,
    log_to_stderr,
    score_rows,
)
from rollout.rewards.options import RewardConfig
from rollout.rewards.table import Rewards, RewardTable, Scoring, open_rewards
from rollout.rewards.weights import parse_weights

NAME, TIE = "judge", 0.5


def open_judged(
    cfg: RewardConfig,
    spec: str,
    num_generations: int,
    log: Callable[[str], None] = log_to_stderr,
    *,
    trust_remote_code: bool = False,
) -> Judge | JudgedRewards:
    """Load the judge, and the reward functions if there are any."""
    judge = Judge(spec, num_generations, on_error=cfg.reward_on_error, log=log)
    if not cfg.reward_funcs:
        return judge
    return JudgedRewards(open_rewards(cfg, log, trust_remote_code=trust_remote_code), judge)


class Judge(Rewards):
    """Rewards from a ranking. Rows are whole groups of `num_generations` completions of one prompt."""

    def __init__(self, spec: str, num_generations: int, **options: Any) -> None:
        _, function = find_callable(spec, f"judge={spec}")

        @functools.wraps(function)  # keeps the signature; a coroutine is awaited below
        def call(**arguments: Any) -> Any:
            return function(**arguments)

        reward = RewardFunction(name=NAME, spec=spec, call=call, in_process=True, setting="judge")
        super().__init__([reward], parse_weights(None, 1), **options)
        self.size = num_generations

    def _score_here(self, function: RewardFunction, scoring: Scoring, pending: Any, first_log: CallLog) -> CallScores:
        """Score as with a reward function, but with prompts as rows: a failed call is retried on fewer prompts."""
        num_prompts = len(scoring.prompts) // self.size
        assert num_prompts * self.size == len(scoring.prompts), (len(scoring.prompts), self.size)

        def call(low: int, high: int, _seconds: float = math.inf) -> Any:
            part = slice(low * self.size, high * self.size)
            try:
                by_prompt = self._by_prompt(function, scoring.prompts[part], scoring.completions[part])
                return verdicts(self.resolve(function.call(**by_prompt)), high - low, self.size)
            except MissingColumnError as error:
                raise UserError(str(error)) from None
            except (Exception, SystemExit) as error:  # user code may raise anything
                return fault_of(error, function.call)

        stop = self._on_error == "stop"
        result = score_rows(call, num_prompts, first=call(0, num_prompts), timeout=math.inf, stop=stop)
        scores = [x for group in result.scores for x in ([group] * self.size if isinstance(group, Fault) else group)]
        return CallScores(scores, result.fault, None if result.row is None else result.row * self.size)

    def _by_prompt(
        self, function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        """Return arguments with one entry per prompt: a list for values that differ between its completions."""
        grouped = {"completions", "completion_ids", *(name for c in completions for name in c.columns)}
        flat, size = arguments(function, prompts, completions, self._columns), self.size
        return {
            name: [values[i : i + size] for i in range(0, len(values), size)] if name in grouped else values[::size]
            for name, values in flat.items()
        }


def verdicts(returned: Any, num_prompts: int, size: int) -> list[list[Score] | Fault] | Fault:
    """Return the scores of each prompt's completions, or the fault of the judge's verdict on it."""
    if hasattr(returned, "tolist"):  # numpy and torch
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)) or len(returned) != num_prompts:
        is_list = isinstance(returned, (list, tuple))
        what = f"{len(returned)} verdicts for {num_prompts} prompts" if is_list else f"{type(returned).__name__}"
        return Fault("length", f"returned {what}", "; return a list with one verdict per prompt")
    return [_scores(verdict, size) for verdict in returned]


def _scores(verdict: Any, size: int) -> list[Score] | Fault:
    if hasattr(verdict, "tolist"):
        verdict = verdict.tolist()
    if verdict is None or (_is_int(verdict) and verdict == -1):
        return [TIE] * size
    if _is_int(verdict) and size == 2 and verdict in (0, 1):
        return [float(index == verdict) for index in range(2)]
    ranking = list(verdict) if isinstance(verdict, (list, tuple)) else []
    if not all(_is_int(i) and 0 <= i < size for i in ranking) or not 2 <= len(ranking) == len(set(ranking)):
        shown = repr(verdict) if len(repr(verdict)) <= 60 else type(verdict).__name__
        either = "0 or 1, " if size == 2 else ""
        rest = f", not a verdict on {size} completions; return {either}their indices from best to worst, or None"
        return Fault("returned", f"returned {shown}", rest)
    scores: list[Score] = [None] * size
    for rank, index in enumerate(ranking):
        scores[index] = 1 - rank / (len(ranking) - 1)
    return scores


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class JudgedRewards:
    """Reward functions that are only logged, plus a judge that decides; its column is the last, with weight 0."""

    def __init__(self, rewards: Rewards, judge: Judge) -> None:
        self.rewards, self.judge = rewards, judge
        self.names, self.functions = [*rewards.names, *judge.names], [*rewards.functions, *judge.functions]
        self.score = rewards.score  # for evaluation, where a prompt has one completion and no comparison
        self.state_dict, self.load_state_dict = rewards.state_dict, rewards.load_state_dict

    @property
    def run(self) -> TrainerState:
        return self.rewards.run

    @run.setter
    def run(self, state: TrainerState) -> None:
        self.rewards.run = state

    def check_columns(self, prompts: Sequence[Prompt], what: str, added: Sequence[str] | None = ()) -> None:
        self.rewards.check_columns(prompts, what, added)
        self.judge.check_columns(prompts, what, added)

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int) -> Judging:
        return Judging(*(part.submit(prompts, completions, step=step) for part in (self.rewards, self.judge)))

    def metrics(self) -> dict[str, float]:
        failed = self.judge.metrics().items()
        return self.rewards.metrics() | {name.replace("reward/", "reward/judge_"): count for name, count in failed}

    def close(self) -> None:
        self.rewards.close()
        self.judge.close()


class Judging:
    """Rewards and verdicts of a batch, in progress."""

    def __init__(self, rewards: Scoring, verdicts: Scoring) -> None:
        self.rewards, self.verdicts = rewards, verdicts

    def done(self) -> bool:
        return self.rewards.done()

    def result(self) -> RewardTable:
        table, verdict = self.rewards.result(), self.verdicts.result()
        return RewardTable(
            names=[*table.names, *verdict.names],
            values=[[*row, *verdicts] for row, verdicts in zip(table.values, verdict.values, strict=True)],
            weights=[*table.weights, 0.0], totals=table.totals, failed=table.failed + verdict.failed,
            extra=table.extra, logged=table.logged, gaps=[*table.gaps, *verdict.gaps],
        )  # fmt: skip
