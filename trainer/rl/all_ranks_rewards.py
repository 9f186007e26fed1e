"""--reward-on-all-ranks: every rank calls the reward functions on a share of the groups.

    rewards = AllRanksRewards(rewards)                    # on every rank, instead of the rewards themselves
    rank0.handlers |= rewards.handlers
    table = rewards.score(prompts, completions)           # on rank 0, while the other ranks serve its commands

A function sees whole groups, but not the whole batch, as with --reward-num-workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from data.errors import UserError
from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.table import Gap, Rewards, RewardTable
from rollout.rewards.workers import shards
from trainer.parallel import comm
from trainer.rl.rank0_rollout import packed, unpacked


class AllRanksRewards(Rewards):
    """The same functions, called on all ranks. Prompts are sent as indices: every rank has the data."""

    def __init__(self, rewards: Rewards) -> None:
        vars(self).update(vars(rewards))
        self.handlers = {"reward": self._score_share}
        self._prompts: list[Prompt] = []
        for function in self.functions:
            if function.in_process and function.spec != "env":
                raise UserError(
                    f"reward_on_all_ranks=True: {function.setting}={function.spec} has state, a model or connections, "
                    "so it runs only on rank 0; remove --reward-on-all-ranks"
                )

    def check_columns(self, prompts: Sequence[Prompt], what: str, added: Sequence[str] | None = ()) -> None:
        super().check_columns(prompts, what, added)
        self._prompts += prompts

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int = 0) -> Any:
        """Score the batch now, on all ranks; the future has its result."""
        sent = list(map(packed, completions))
        for completion, (*_, messages, columns) in zip(completions, sent, strict=True):
            lost = [name for name in completion.columns if name not in columns]
            if lost or (messages is None and completion.messages is not None):
                raise UserError(
                    f"reward_on_all_ranks=True: {lost[0] if lost else 'messages'!r} of a completion is not JSON, so "
                    "other ranks cannot receive it; remove --reward-on-all-ranks"
                )
        comm.send_command("reward")
        index = {id(prompt): i for i, prompt in enumerate(self._prompts)}
        rows = [index[id(prompt)] for prompt in prompts]
        spans = shards(prompts, comm.world_size())
        spans += [(0, 0)] * (comm.world_size() - len(spans))
        tables = self._score_share([(rows[low:high], sent[low:high], step) for low, high in spans])
        errors = [table for table in tables if isinstance(table, str)]
        if errors:
            raise UserError(errors[0])
        self._failed += sum(table.failed for table in tables[1:])
        future: Future[RewardTable] = Future()
        future.set_result(joined(tables))
        return future

    def _score_share(self, shares: Sequence[Any] | None = None) -> list[Any]:
        """Return on rank 0 the table of each rank, or the message of its error."""
        nothing: list[Any] = [None] * comm.world_size()
        rows, sent, step = comm.exchange(shares or nothing, "completions to reward")[0]
        prompts = [self._prompts[row] for row in rows]
        completions = [unpacked(fields, prompt.ids) for fields, prompt in zip(sent, prompts, strict=True)]
        if not comm.is_main():
            self._log = comm.log_once  # the run's log of other ranks is not shown
        try:
            scored: RewardTable | str = super().submit(prompts, completions, step=step).result()
        except UserError as error:  # rank 0 raises it
            scored = str(error)
        return comm.exchange([scored, *nothing[1:]], "rewards")


def joined(tables: Sequence[RewardTable]) -> RewardTable:
    """Join the tables of consecutive rows."""
    logged: dict[str, list[float]] = {}
    for table in tables:
        for name, values in table.logged.items():
            logged.setdefault(name, []).extend(values)
    extra = [row for table in tables for row in table.extra or [{}] * len(table.values)]
    gaps = [
        Gap(sum(g.none for g in each), sum(g.failed for g in each), next((g.last for g in each[::-1] if g.last), None))
        for each in zip(*(table.gaps for table in tables if table.gaps), strict=True)
    ]
    return RewardTable(
        names=tables[0].names, weights=tables[0].weights, failed=sum(table.failed for table in tables), logged=logged,
        values=list(itertools.chain.from_iterable(table.values for table in tables)),
        totals=list(itertools.chain.from_iterable(table.totals for table in tables)),
        extra=extra if any(extra) else None, gaps=gaps,
    )  # fmt: skip
