"""Batches in which no completion gets a reward: they teach nothing, so they are reported, and too many stop the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.rewards.table import RewardTable
from trainer.metrics.counters import Counters


class Unrewarded:
    """Counts them in a row, in the checkpoint: a resumed run stops where an unbroken one would. Rank 0 only."""

    def __init__(
        self,
        specs: Sequence[str],  # of the reward functions, as the user named them
        counters: Counters,
        note: Callable[[str], None],
        *,
        limit: int,  # batches in a row; 0: never stop
        num_batches: int,  # of the whole run: one without a single reward does not pass for finished
    ) -> None:
        self.specs, self.counters, self.note, self.limit = tuple(specs), counters, note, limit
        self.most = min(limit, num_batches)
        self._silent: dict[str, int] = {}  # batches in a row without a score, of each function
        self._told: set[str] = set()

    def sampled(self, step: int, tables: Sequence[RewardTable], *, rewarded: bool, env_failed: int = 0) -> None:
        """A batch for this step; `env_failed` of its completions have no reward because their environment failed."""
        self._count_silent(tables)
        if rewarded:
            self._tell_silent(tables)
            self.counters.unrewarded_in_a_row = 0
            return
        self.counters.unrewarded_in_a_row += 1
        where = f"step {step}: none of {_num_rows(tables)} completions got a reward"
        self._judge("batches", where, reasons(tables, env_failed), self.counters.unrewarded_in_a_row, self.most)

    def evaluated(self, step: int, table: RewardTable) -> None:
        """A held-out evaluation."""
        if any(total is not None for total in table.totals):
            self.counters.unrewarded_evaluations = 0
            return
        self.counters.unrewarded_evaluations += 1
        where = f"evaluation at step {step}: none of {len(table.totals)} held-out completions got a reward"
        self._judge("evaluations", where, reasons([table]), self.counters.unrewarded_evaluations, self.limit)

    def _judge(self, what: str, where: str, why: str, count: int, most: int) -> None:
        if self.limit and count >= most:
            raise ValueError(
                f"reward_funcs={' '.join(self.specs)}: {where}, number {count} of such {what} in a row ({why}); check "
                "them with python -m rollout.rewards --check, or set --reward-none-limit 0 to go on without rewards"
            )
        if what not in self._told:
            self._told.add(what)
            stops = f"; the run stops after {most} such {what} in a row" if self.limit else ""
            self.note(f"warning: {where} ({why}){stops}")

    def _count_silent(self, tables: Sequence[RewardTable]) -> None:
        for place, name in enumerate(tables[0].names):
            scored = any(row[place] is not None for table in tables for row in table.values)
            self._silent[name] = 0 if scored else self._silent.get(name, 0) + 1

    def _tell_silent(self, tables: Sequence[RewardTable]) -> None:
        """One of several rewards may not apply to a batch; to none of many batches is worth a word."""
        for name, count in self._silent.items():
            if self.limit and count >= self.limit and name not in self._told:
                self._told.add(name)
                why = reasons(tables, only=name)
                self.note(f"warning: the reward {name} gave no score in {count} batches in a row ({why})")


def reasons(tables: Sequence[RewardTable], env_failed: int = 0, *, only: str | None = None) -> str:
    """What each function said instead of a score."""
    told = [f"{env_failed} environments failed"] if env_failed else []
    num_rows = _num_rows(tables)
    for place, name in enumerate(tables[0].names if tables else ()):
        gaps = [table.gaps[place] for table in tables if table.gaps]
        if only not in (None, name) or not gaps:
            continue
        none, failed = sum(gap.none for gap in gaps), sum(gap.failed for gap in gaps)
        last = next((gap.last for gap in reversed(gaps) if gap.last), None)
        if none:
            told.append(f"{name} returned None for {_of(none, num_rows)}")
        if failed:
            told.append(f"{name} failed on {_of(failed, num_rows)}, the last: {last}")
    return "; ".join(told) or "no function gave a number"


def _of(count: int, num_rows: int) -> str:
    return f"all {num_rows} rows" if count == num_rows else f"{count} of {num_rows} rows"


def _num_rows(tables: Sequence[RewardTable]) -> int:
    return sum(len(table.values) for table in tables)
