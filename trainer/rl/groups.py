"""From prompts to groups of rewarded completions, and from rewards to advantages.

    groups = Groups(cfg, producer, rewards, replay)
    batch = groups.next(step, engine.version)   # P groups: sampled, rewarded, resampled or replayed where that is on
    advantage = groups.advantage(batch)         # (B,), or a number for each id: the estimator of the run

The same estimator judges which groups teach nothing, for dynamic sampling and replay. Statistics over a batch
(scale_rewards batch, GDPO's last stage) are over all its groups and ranks, replayed and resampled ones included.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from data.types import Prompt
from losses.advantage import NOTHING, Advantage, GroupRewards, nan_std, overlong_penalty, weighted_sum
from losses.kl import k1, reward_minus_kl
from rollout.engine import Completion, Group
from rollout.rewards.table import Rewards, RewardTable
from rollout.schedule.producer import Producer
from rollout.schedule.replay import Replay
from trainer.config.groups import PolicyGradientConfig
from trainer.metrics.metrics import Counters
from trainer.parallel.comm import all_sum
from trainer.policy.logps import Policy, reference_logps
from trainer.rl.evaluate import logged_metrics
from trainer.rl.minibatch import pack_completions, score


@dataclass(frozen=True)
class GroupBatch:
    """What a rollout is trained on: P groups of G completions, and how they were obtained."""

    groups: list[Group]
    names: list[str]  # of the rewards
    weights: list[float]
    metrics: dict[str, float]  # of sampling, replay and rewards
    sampled: GroupBatch | None = None  # all that was sampled for it, before anything was replaced
    reward_s: float = 0.0  # seconds in reward functions
    part_sizes: tuple[int, ...] = ()  # groups of each mini-batch, one after the other; none: they are all one

    @property
    def parts(self) -> list[GroupBatch]:
        """Mini-batches (--minibatches-per-rollout): the groups of each optimizer step."""
        sizes = self.part_sizes or (len(self.groups),)
        assert sum(sizes) == len(self.groups), f"{len(self.groups)} groups in mini-batches of {sizes}"
        ends = itertools.accumulate(sizes)
        return [
            replace(self, groups=self.groups[end - size : end], part_sizes=())
            for size, end in zip(sizes, ends, strict=True)
        ]

    @property
    def prompts(self) -> list[Prompt]:  # one for each completion
        return [group.prompt for group in self.groups for _ in group.completions]

    @property
    def completions(self) -> list[Completion]:
        return [completion for group in self.groups for completion in group.completions]

    @property
    def values(self) -> Tensor:  # (P, G, K) NaN = the reward does not apply
        rows = [[[float("nan") if x is None else x for x in row] for row in group.values] for group in self.groups]
        return torch.tensor(rows, dtype=torch.float32) if rows else torch.empty(0, 0, len(self.weights))

    @property
    def reward(self) -> Tensor:  # (P, G)
        return weighted_sum(self.values, torch.tensor(self.weights))

    def for_advantage(
        self,
        kl: Tensor | None = None,  # (B,) of each completion to the reference, where it is a cost in the reward
        *,
        beta: float = 0.0,
        all_sum: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> GroupRewards:
        total = self.reward
        if kl is not None:
            total = reward_minus_kl(total, kl.view_as(total).to(total), beta=beta)
        return GroupRewards(self.values, torch.tensor(self.weights), total, self.completions, all_sum)

    @property
    def rows(self) -> list[list[float | None]]:  # of each completion: each reward, None = does not apply
        return [row for group in self.groups for row in group.values]

    @property
    def extra(self) -> list[dict[str, Any]]:  # of each completion: what reward functions logged
        return [row for group in self.groups for row in group.extra or [{}] * len(group.values)]

    def old_logps(self, recompute: bool) -> list[list[float] | None] | None:
        """Log-probs that the ratios of replayed groups are taken against, if not those of the current weights."""
        if recompute or not any(group.replayed for group in self.groups):
            return None
        return [c.logps if group.replayed else None for group in self.groups for c in group.completions]


class Groups:
    """Batches of rewarded groups, one after the other."""

    def __init__(
        self,
        cfg: Any,
        producer: Producer,
        rewards: Rewards,
        replay: Replay,
        estimate: Callable[[GroupRewards], Advantage] | None = None,  # of a method that has its own
        missing_rewards: MissingRewards | None = None,  # where rewards may be missing
    ) -> None:
        self.cfg, self.producer, self.rewards, self.replay = cfg, producer, rewards, replay
        self.missing_rewards = missing_rewards
        self._tables: list[RewardTable] = []  # of the current batch
        self.estimate = estimate or cfg.advantage.estimate
        self.has_penalty = cfg.advantage.overlong_margin > 0
        self.names = [*rewards.names, *(["overlong"] if self.has_penalty else [])]
        self._weights: list[float] = []  # of the rewards, at the current step
        self._reward_s = 0.0
        self._logged: dict[str, list[float]] = {}  # by the reward functions, in the current step

    def next(self, step: int, version: int) -> GroupBatch:
        """The batch for the next update, after `step` optimizer steps; `version` is that of the engine's weights."""
        self._reward_s, self._logged, self._tables = 0.0, {}, []
        self.producer.begin(step, version)
        groups = self._rewarded(self.producer.arrived(), step)
        sampled = list(groups)
        overlap = self.cfg.overlap
        for _ in range(overlap.dynamic_sampling_max_rounds if overlap.dynamic_sampling else 0):
            places = [place for place, group in enumerate(groups) if not self._teaches(group)]
            if not places:
                break
            fresh = self._rewarded(self.producer.more(len(places)), step)
            sampled += fresh
            for place, group in zip(places, [g for g in fresh if self._teaches(g)], strict=False):
                groups[place] = group
        if self.missing_rewards is not None:
            scores = [x for group in sampled for row in group.values for x in row[: len(self.rewards.names)]]
            failed = sum(bool(c.columns.get("env_failed")) for group in sampled for c in group.completions)
            rewarded = any(x is not None for x in scores)  # the overlong penalty is no reward
            self.missing_rewards.sampled(step + 1, self._tables, rewarded=rewarded, env_failed=failed)
        for group in sampled:
            self._tell_planner(group)
        metrics = self._replay(groups, step) | logged_metrics(self._logged, "reward")
        everything = GroupBatch(sampled, self.names, self._weights, {})
        batch = GroupBatch(groups, self.names, self._weights, metrics, everything, self._reward_s)
        if groups != sampled:
            metrics["reward/trained_mean"] = batch.reward.nanmean().item()
        return batch

    def _rewarded(self, arriving: Iterable[Group], step: int) -> list[Group]:
        """Reward groups, as they arrive or all at once; returned in the order they were planned."""
        overlap = self.cfg.overlap
        pending: list[tuple[list[Group], Any]] = []
        waiting: list[Group] = []
        for group in arriving:
            waiting.append(group)
            if overlap.streaming_partial_batch and len(waiting) >= overlap.streaming_min_groups:
                pending.append((waiting, self._submit(waiting, step)))
                waiting = []
        if waiting:
            pending.append((waiting, self._submit(waiting, step)))
        started = time.perf_counter()
        groups = []
        for part, future in pending:
            table = future.result()
            self._tables.append(table)
            self._weights = [*table.weights, *([1.0] if self.has_penalty else [])]
            for name, numbers in table.logged.items():
                self._logged.setdefault(name, []).extend(numbers)
            rows, extra = iter(table.values), iter(table.extra or ())
            for group in part:
                values = [self._values(next(rows), completion) for completion in group.completions]
                own = [next(extra) for _ in group.completions] if table.extra else None
                groups.append(replace(group, values=values, extra=own))
        self._reward_s += time.perf_counter() - started
        return sorted(groups, key=lambda group: group.number)

    def _submit(self, groups: Sequence[Group], step: int) -> Any:
        started = time.perf_counter()
        prompts = [group.prompt for group in groups for _ in group.completions]
        future = self.rewards.submit(prompts, [c for group in groups for c in group.completions], step=step)
        if future.done():
            future.result()  # computed in this thread, while other groups are being sampled
        self._reward_s += time.perf_counter() - started
        return future

    def _values(self, scores: list[float | None], completion: Completion) -> list[float | None]:
        """All rewards of a completion: none where its environment failed, which says nothing about the policy."""
        if completion.columns.get("env_failed"):
            return [None] * len(self.names)
        if not self.has_penalty:
            return scores
        limits = {"max_length": self.cfg.max_completion_length, "margin": self.cfg.advantage.overlong_margin}
        return [*scores, *overlong_penalty(torch.tensor([float(len(completion.ids))]), **limits).tolist()]

    def advantage(
        self,
        batch: GroupBatch,
        kl: Tensor | None = None,  # (B,) of each completion to the reference, with kl_in_reward
    ) -> Tensor | list[list[float]]:  # (B,), or for each completion one number per id
        """Called on all ranks, whose groups together are the batch that statistics are taken over."""
        beta = 0.0 if kl is None else self.cfg.policy_loss.beta
        return checked_advantage(self.estimate(batch.for_advantage(kl, beta=beta, all_sum=all_sum)), batch)

    def _advantage_alone(self, group: Group) -> Tensor:  # (any,)
        """The advantage of one group by itself, on rank 0 alone."""
        batch = GroupBatch([group], self.names, self._weights, {})
        advantage = checked_advantage(self.estimate(batch.for_advantage()), batch)
        return advantage if isinstance(advantage, Tensor) else torch.tensor([x for own in advantage for x in own])

    def _teaches(self, group: Group) -> bool:
        """Whether any of its completions has an advantage."""
        return bool(self._advantage_alone(group).count_nonzero())

    def _tell_planner(self, group: Group) -> None:
        """A prompt that earned nothing is planned again later; the curriculum learns the mean reward."""
        planner = self.producer.planner
        earned = [x for row in group.values for x in row if x is not None]
        if earned and max(map(abs, earned)) < NOTHING:
            planner.reroll(group)
        totals = [x for x in GroupBatch([group], self.names, self._weights, {}).reward.flatten().tolist() if x == x]
        if totals:
            planner.observe(group, statistics.fmean(totals))

    def _replay(self, groups: list[Group], step: int) -> dict[str, float]:
        """Replace groups without signal by stored ones, then store the groups of this batch that have it."""
        if not self.replay.size:
            return {}
        fresh = [group for group in groups if self._teaches(group)]
        for place, group in enumerate(groups):
            stored = None if self._teaches(group) else self.replay.draw(step=step, number=place)
            groups[place] = stored or group
        for group in fresh:
            batch = GroupBatch([group], self.names, self._weights, {})
            spread = nan_std(batch.values[0].T, dim=1).nansum().item()  # of each reward, added up
            size = self._advantage_alone(group).abs().sum().item()
            # Rewards may be equal, or too few to have a deviation, and the estimator still tells completions apart.
            score = (spread or 1.0) * size
            if score > 0:
                self.replay.add(group, score=score, step=step)
        replayed = sum(group.replayed for group in groups)
        return {"rollout/replayed_groups": float(replayed), "rollout/replay_size": float(len(self.replay))}


def checked_advantage(advantage: Advantage, batch: GroupBatch) -> Tensor | list[list[float]]:
    """What an estimator returned, as (B,) or as one list of numbers per completion; 0 where it has no number."""
    shape = (len(batch.groups), len(batch.groups[0].completions)) if batch.groups else (0, 0)
    if isinstance(advantage, Tensor):
        if tuple(advantage.shape) != shape and batch.groups:
            raise UserError(
                f"advantage_estimator: returned shape {tuple(advantage.shape)}; (groups, completions) is {shape}"
            )
        return torch.where(advantage.isnan(), 0.0, advantage).flatten()
    rows = [[0.0 if x != x else x for x in torch.as_tensor(own).tolist()] for own in advantage]
    wanted = [len(completion.ids) for completion in batch.completions]
    if [len(row) for row in rows] != wanted:
        raise UserError(
            f"advantage_estimator: returned {len(rows)} lists of lengths {[len(row) for row in rows][:4]}..; a number "
            f"per token of each completion would be {len(wanted)} lists of lengths {wanted[:4]}.."
        )
    return rows


def per_completion(advantage: Tensor | Sequence[Sequence[float]]) -> list[float]:
    """For samples.jsonl: the mean of a completion where there is a number for each id."""
    if isinstance(advantage, Tensor):
        return advantage.tolist()
    return [statistics.fmean(own) if own else 0.0 for own in advantage]


@torch.no_grad()
def sequence_kl(cfg: PolicyGradientConfig, policy: Policy, completions: Sequence[Completion]) -> Tensor:  # (B,)
    """k1 of each completion, summed over its tokens: log-prob of the current policy minus that of the reference."""
    total = torch.zeros(len(completions), device=policy.device)
    micro_batches = pack_completions(cfg.run, policy, completions, share_prompt=cfg.share_prompt)
    for mb, now in zip(micro_batches, score(policy, micro_batches, temperature=cfg.temperature), strict=True):
        ref_logp = reference_logps(policy, mb, temperature=cfg.temperature)
        total = total.index_add(0, mb.sequence, k1(now.logp, ref_logp).float())
    return total.cpu()


# Batches without any reward.


class MissingRewards:
    """Warns of batches in which no completion got a reward, and stops the run after too many in a row. On rank 0.

    Checkpoints keep the count, so a resumed run stops at the same step.
    """

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
        self._warned: set[str] = set()

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
            raise UserError(
                f"reward_funcs={' '.join(self.specs)}: {where}, number {count} of such {what} in a row ({why}); check "
                "them with python -m rollout.rewards --check, or set --reward-none-limit 0 to go on without rewards"
            )
        if what not in self._warned:
            self._warned.add(what)
            stops = f"; the run stops after {most} such {what} in a row" if self.limit else ""
            self.note(f"warning: {where} ({why}){stops}")

    def _count_silent(self, tables: Sequence[RewardTable]) -> None:
        for place, name in enumerate(tables[0].names):
            scored = any(row[place] is not None for table in tables for row in table.values)
            self._silent[name] = 0 if scored else self._silent.get(name, 0) + 1

    def _tell_silent(self, tables: Sequence[RewardTable]) -> None:
        """One of several rewards may not apply to a batch; to none of many batches deserves a warning."""
        for name, count in self._silent.items():
            if self.limit and count >= self.limit and name not in self._warned:
                self._warned.add(name)
                why = reasons(tables, only=name)
                self.note(f"warning: the reward {name} gave no score in {count} batches in a row ({why})")


def reasons(tables: Sequence[RewardTable], env_failed: int = 0, *, only: str | None = None) -> str:
    """What each function returned or raised instead of a score."""
    parts = [f"{env_failed} environments failed"] if env_failed else []
    num_rows = _num_rows(tables)
    for place, name in enumerate(tables[0].names if tables else ()):
        gaps = [table.gaps[place] for table in tables if table.gaps]
        if only not in (None, name) or not gaps:
            continue
        none, failed = sum(gap.none for gap in gaps), sum(gap.failed for gap in gaps)
        last = next((gap.last for gap in reversed(gaps) if gap.last), None)
        if none:
            parts.append(f"{name} returned None for {_of(none, num_rows)}")
        if failed:
            parts.append(f"{name} failed on {_of(failed, num_rows)}, the last: {last}")
    return "; ".join(parts) or "no function gave a number"


def _of(count: int, num_rows: int) -> str:
    return f"all {num_rows} rows" if count == num_rows else f"{count} of {num_rows} rows"


def _num_rows(tables: Sequence[RewardTable]) -> int:
    return sum(len(table.values) for table in tables)
