"""A judge: a function of the user's that compares the completions of a prompt, for --method online_dpo --judge.

    def shortest(completions, prompts=None, answer=None, **columns):
        return [sorted(range(len(group)), key=lambda i: len(group[i])) for group in completions]

It gets one entry for each prompt: `completions[i]` is the list of those of `prompts[i]`, as strings or as messages, and
columns of the row come by name; columns of an episode (num_turns) and `completion_ids` are lists like `completions`.
For each prompt it returns

    [2, 0, 3, 1]      places of completions from best to worst, at least two; those left out are not compared
    0 or 1            the better one, if there are two
    None or -1        a tie

The verdict is one more column in the table of rewards, 1 for the best to 0 for the worst and 0.5 for a tie. So it
travels, is stored and is logged as rewards are. A prompt on which the judge fails follows --reward-on-error.
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
    Fault,
    Refused,
    RewardFunction,
    Score,
    Scored,
    TrainerState,
    arguments,
    log_to_stderr,
    raised,
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
    """The judge, beside the reward functions if there are any."""
    judge = Judge(spec, num_generations, on_error=cfg.reward_on_error, log=log)
    if not cfg.reward_funcs:
        return judge
    return JudgedRewards(open_rewards(cfg, log, trust_remote_code=trust_remote_code), judge)


class Judge(Rewards):
    """Scores by rank. Rows are whole groups of `num_generations` completions of one prompt."""

    def __init__(self, spec: str, num_generations: int, **options: Any) -> None:
        _, found = find_callable(spec, f"judge={spec}")

        @functools.wraps(found)  # keeps the signature; a coroutine is waited for below
        def call(**given: Any) -> Any:
            return found(**given)

        function = RewardFunction(name=NAME, spec=spec, call=call, in_process=True, setting="judge")
        super().__init__([function], parse_weights(None, 1), **options)
        self.size = num_generations

    def _score_here(self, function: RewardFunction, scoring: Scoring, pending: Any, first_log: CallLog) -> Scored:
        """As for a reward function, prompt by prompt: a call that fails is repeated on fewer of them."""
        num_prompts = len(scoring.prompts) // self.size
        assert num_prompts * self.size == len(scoring.prompts), (len(scoring.prompts), self.size)

        def call(low: int, high: int, _seconds: float = math.inf) -> Any:
            part = slice(low * self.size, high * self.size)
            try:
                given = self._by_prompt(function, scoring.prompts[part], scoring.completions[part])
                return verdicts(self.awaited(function.call(**given)), high - low, self.size)
            except Refused as error:
                raise UserError(str(error)) from None
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                return raised(error, function.call)

        stop = self._on_error == "stop"
        found = score_rows(call, num_prompts, first=call(0, num_prompts), timeout=math.inf, stop=stop)
        scores = [x for one in found.scores for x in ([one] * self.size if isinstance(one, Fault) else one)]
        return Scored(scores, found.fault, None if found.row is None else found.row * self.size)

    def _by_prompt(
        self, function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        """One entry for each prompt; a list of them for what completions differ in."""
        of_each = {"completions", "completion_ids", *(name for c in completions for name in c.columns)}
        flat, size = arguments(function, prompts, completions, self._columns), self.size
        return {
            name: [values[i : i + size] for i in range(0, len(values), size)] if name in of_each else values[::size]
            for name, values in flat.items()
        }


def verdicts(returned: Any, num_prompts: int, size: int) -> list[list[Score] | Fault] | Fault:
    """For each prompt the scores of its completions, or the fault of what the judge returned for it."""
    if hasattr(returned, "tolist"):  # numpy and torch
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)) or len(returned) != num_prompts:
        is_list = isinstance(returned, (list, tuple))
        what = f"{len(returned)} verdicts for {num_prompts} prompts" if is_list else f"{type(returned).__name__}"
        return Fault("length", f"returned {what}", "; return a list with one verdict for each prompt")
    return [_scores(verdict, size) for verdict in returned]


def _scores(verdict: Any, size: int) -> list[Score] | Fault:
    if hasattr(verdict, "tolist"):
        verdict = verdict.tolist()
    if verdict is None or (_is_int(verdict) and verdict == -1):
        return [TIE] * size
    if _is_int(verdict) and size == 2 and verdict in (0, 1):
        return [float(place == verdict) for place in range(2)]
    places = list(verdict) if isinstance(verdict, (list, tuple)) else []
    if not all(_is_int(p) and 0 <= p < size for p in places) or not 2 <= len(places) == len(set(places)):
        shown = repr(verdict) if len(repr(verdict)) <= 60 else type(verdict).__name__
        either = "0 or 1, " if size == 2 else ""
        rest = f", which is no verdict on {size} completions; return {either}their places from best to worst, or None"
        return Fault("returned", f"returned {shown}", rest)
    scores: list[Score] = [None] * size
    for rank, place in enumerate(places):
        scores[place] = 1 - rank / (len(places) - 1)
    return scores


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class JudgedRewards:
    """Reward functions that measure, and a judge that decides: its column is the last, with weight 0."""

    def __init__(self, rewards: Rewards, judge: Judge) -> None:
        self.rewards, self.judge = rewards, judge
        self.names, self.functions = [*rewards.names, *judge.names], [*rewards.functions, *judge.functions]
        self.score = rewards.score  # of an evaluation: one completion of a prompt has nothing to be compared with
        self.state_dict, self.load_state_dict = rewards.state_dict, rewards.load_state_dict

    @property
    def run(self) -> TrainerState:
        return self.rewards.run

    @run.setter
    def run(self, state: TrainerState) -> None:
        self.rewards.run = state

    def check_columns(self, prompts: Sequence[Prompt], what: str, made: Sequence[str] | None = ()) -> None:
        self.rewards.check_columns(prompts, what, made)
        self.judge.check_columns(prompts, what, made)

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int) -> Judging:
        return Judging(*(part.submit(prompts, completions, step=step) for part in (self.rewards, self.judge)))

    def metrics(self) -> dict[str, float]:
        failed = self.judge.metrics().items()
        return self.rewards.metrics() | {name.replace("reward/", "reward/judge_"): count for name, count in failed}

    def close(self) -> None:
        self.rewards.close()
        self.judge.close()


class Judging:
    """Scores and verdicts of a batch, in progress."""

    def __init__(self, measured: Scoring, judged: Scoring) -> None:
        self.measured, self.judged = measured, judged

    def done(self) -> bool:
        return self.measured.done()

    def result(self) -> RewardTable:
        table, verdict = self.measured.result(), self.judged.result()
        return RewardTable(
            names=[*table.names, *verdict.names],
            values=[[*row, *own] for row, own in zip(table.values, verdict.values, strict=True)],
            weights=[*table.weights, 0.0], totals=table.totals, failed=table.failed + verdict.failed,
            extra=table.extra, logged=table.logged, gaps=[*table.gaps, *verdict.gaps],
        )  # fmt: skip
