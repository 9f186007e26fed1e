"""From prompts to rollouts: groups of rewarded completions, and their advantages.

    groups = Groups(cfg, producer, rewards, replay)
    rollout = groups.next(step, engine.version)   # P groups: sampled, rewarded, and resampled or replayed if enabled
    advantage = groups.advantage(rollout)         # (B,), or one number per id: the estimator of the run

Dynamic sampling and replay use the same estimator to find groups without signal: on each group alone, or on the whole
rollout if the estimator compares groups (REINFORCE++). Statistics over a rollout (scale_rewards batch, GDPO's last
stage) cover all its groups on all ranks, including replayed and resampled groups.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from data.types import Prompt
from data.user_code import name_of
from losses.advantage import NOTHING, Advantage, Rewards, nan_std, overlong_penalty, weighted_sum
from losses.kl import k1, reward_minus_kl
from rollout.engine import Completion, Group
from rollout.rewards.table import Rewards as RewardFunctions
from rollout.rewards.table import RewardTable
from rollout.schedule.producer import Producer
from rollout.schedule.replay import Replay
from trainer.config.groups import GroupConfig, PolicyGradientConfig
from trainer.metrics.metrics import Counters
from trainer.metrics.trajectory import branches_of
from trainer.parallel.comm import all_sum
from trainer.policy.logps import Policy, reference_logps
from trainer.rl.evaluate import logged_metrics
from trainer.rl.minibatch import Advantages, pack_completions, policy_logps

Estimator = Callable[[Rewards], Advantage]
SAMPLES_PER_STEP = 4  # completions written to samples.jsonl
EXPECTED = ("answer", "ground_truth", "solution")  # columns with the expected answer; the first is written too


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass
class Rollout:
    """P groups of G completions with K rewards each: the data of one or more optimizer steps.

    An advantage estimator reads `rewards`, `weights`, `reward`, `completions` and `all_sum` (losses.advantage.Rewards).
    """

    groups: list[Group]
    names: list[str]  # K reward names
    weights: Tensor  # (K,)
    metrics: dict[str, float]  # of sampling, replay and rewards
    sampled: Rollout | None = None  # everything sampled for it, before groups were replaced
    reward_s: float = 0.0  # seconds in reward functions
    minibatch_sizes: tuple[int, ...] = ()  # groups per mini-batch, in order; empty: one mini-batch
    reward: Tensor = None  # type: ignore[assignment]  # (P, G) weighted sum of the rewards; NaN = none applies
    all_sum: Callable[[Tensor], Tensor] = _unchanged  # sums a tensor over the ranks that have groups of it

    def __post_init__(self) -> None:
        if self.reward is None:
            self.reward = weighted_sum(self.rewards, self.weights)

    @property
    def minibatches(self) -> list[Rollout]:
        """The groups of each mini-batch (--minibatches-per-rollout)."""
        sizes = self.minibatch_sizes or (len(self.groups),)
        assert sum(sizes) == len(self.groups), f"{len(self.groups)} groups in mini-batches of {sizes}"
        ends = itertools.accumulate(sizes)
        return [
            Rollout(self.groups[end - size : end], self.names, self.weights, self.metrics)
            for size, end in zip(sizes, ends, strict=True)
        ]

    @property
    def prompts(self) -> list[Prompt]:
        """One prompt per completion."""
        return [group.prompt for group in self.groups for _ in group.completions]

    @property
    def completions(self) -> list[Completion]:
        """B completions, in group order."""
        return [completion for group in self.groups for completion in group.completions]

    @property
    def rewards(self) -> Tensor:  # (P, G, K) NaN = the reward does not apply
        rows = [[[float("nan") if x is None else x for x in row] for row in group.values] for group in self.groups]
        return torch.tensor(rows, dtype=torch.float32) if rows else torch.empty(0, 0, len(self.weights))

    @property
    def values(self) -> list[list[float | None]]:
        """For each completion its K rewards; None = the reward does not apply."""
        return [row for group in self.groups for row in group.values]

    @property
    def extra(self) -> list[dict[str, Any]]:
        """For each completion what reward functions logged with log_extra."""
        return [row for group in self.groups for row in group.extra or [{}] * len(group.values)]

    def replayed_logps(self, recompute: bool) -> list[list[float] | None] | None:
        """Old log-probs for replayed groups; None: use the current weights."""
        if recompute or not any(group.replayed for group in self.groups):
            return None
        return [c.logps if group.replayed else None for group in self.groups for c in group.completions]


class Groups:
    """Sample and reward one rollout after another, on rank 0."""

    def __init__(
        self,
        cfg: GroupConfig,
        producer: Producer,
        rewards: RewardFunctions,
        replay: Replay,
        estimate: Estimator | None = None,  # None: --advantage-estimator
        missing_rewards: MissingRewards | None = None,  # None: every completion has a reward
    ) -> None:
        self.cfg, self.producer, self.rewards, self.replay = cfg, producer, rewards, replay
        self.missing_rewards = missing_rewards
        self._tables: list[RewardTable] = []  # of the current rollout
        self.estimate = estimate or cfg.advantage.estimate
        self.has_penalty = cfg.advantage.overlong_margin > 0
        self.names = [*rewards.names, *(["overlong"] if self.has_penalty else [])]
        self._weights: list[float] = []  # reward weights at the current step
        self._reward_s = 0.0
        self._logged: dict[str, list[float]] = {}  # by reward functions, in the current step

    def next(self, step: int, version: int) -> Rollout:
        """Return the next rollout, after `step` optimizer steps; `version` is the engine's weight version."""
        self._reward_s, self._logged, self._tables = 0.0, {}, []
        self.producer.begin(step, version)
        groups = self._rewarded(self.producer.arrived(), step)
        sampled = list(groups)
        overlap = self.cfg.overlap
        for _ in range(overlap.dynamic_sampling_max_rounds if overlap.dynamic_sampling else 0):
            flat = [index for index, size in enumerate(self._sizes(groups)) if not size]
            if not flat:
                break
            fresh = self._rewarded(self.producer.more(len(flat)), step)
            sampled += fresh
            kept = [group for index, group in enumerate(groups) if index not in flat]
            useful = [group for group, size in zip(fresh, self._sizes([*fresh, *kept]), strict=False) if size]
            for index, group in zip(flat, useful, strict=False):
                groups[index] = group
        if self.missing_rewards is not None:
            # The overlong penalty, the last column, does not count as a reward.
            values = [x for group in sampled for row in group.values for x in row[: len(self.rewards.names)]]
            failed = sum(bool(c.columns.get("env_failed")) for group in sampled for c in group.completions)
            rewarded = any(x is not None for x in values)
            self.missing_rewards.sampled(step + 1, self._tables, rewarded=rewarded, env_failed=failed)
        everything = self._rollout(sampled)
        for group, totals in zip(sampled, everything.reward.tolist(), strict=True):
            self._update_planner(group, totals)
        metrics = self._replay(groups, step) | logged_metrics(self._logged, "reward")
        rollout = replace(self._rollout(groups), metrics=metrics, sampled=everything, reward_s=self._reward_s)
        if groups != sampled:
            metrics["reward/trained_mean"] = rollout.reward.nanmean().item()
        return rollout

    def _rollout(self, groups: list[Group]) -> Rollout:
        return Rollout(groups, self.names, torch.tensor(self._weights), {})

    def _rewarded(self, arriving: Iterable[Group], step: int) -> list[Group]:
        """Reward groups as they arrive, or all together; return them in planning order."""
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
        for submitted, future in pending:
            table = future.result()
            self._tables.append(table)
            self._weights = [*table.weights, *([1.0] if self.has_penalty else [])]
            for name, numbers in table.logged.items():
                self._logged.setdefault(name, []).extend(numbers)
            rows, extra = iter(table.values), iter(table.extra or ())
            for group in submitted:
                values = [self._values(next(rows), completion) for completion in group.completions]
                logged = [next(extra) for _ in group.completions] if table.extra else None
                groups.append(replace(group, values=values, extra=logged))
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

    def _values(self, rewards: list[float | None], completion: Completion) -> list[float | None]:
        """All rewards of a completion; None if its environment failed, which is no signal about the policy."""
        if completion.columns.get("env_failed"):
            return [None] * len(self.names)
        if not self.has_penalty:
            return rewards
        limits = {"max_length": self.cfg.max_completion_length, "margin": self.cfg.advantage.overlong_margin}
        return [*rewards, *overlong_penalty(torch.tensor([float(len(completion.ids))]), **limits).tolist()]

    def advantage(
        self,
        rollout: Rollout,
        kl: Tensor | None = None,  # (B,) of each completion to the reference, with kl_in_reward
    ) -> Advantages:
        """Return the advantages. All ranks call it: together, their groups are the rollout."""
        rollout = replace(rollout, all_sum=all_sum)
        if kl is not None:  # --kl-in-reward
            if not kl.isfinite().all():  # NaN would mean that the completion has no reward
                raise UserError("kl_in_reward=True: a KL is not finite; check the weights of --model and --ref-model")
            reward = rollout.reward
            rollout.reward = reward_minus_kl(reward, kl.view_as(reward).to(reward), beta=self.cfg.policy_loss.beta)
        return self._estimate(rollout)

    def _estimate(self, rollout: Rollout) -> Advantages:
        if self.cfg.advantage.record.nonnegative and (rollout.reward < 0).any():
            found = rollout.reward[rollout.reward < 0].min().item()
            raise UserError(
                f"advantage_estimator={self.cfg.advantage.advantage_estimator}: divides by the mean reward of a group, "
                f"so rewards must be 0 or above (found {found:g}); use rewards of 0 and 1, or another estimator"
            )
        # A method's own estimator calls the one of --advantage-estimator if the flag is set.
        function = self.estimate if self.cfg.advantage.is_default else self.cfg.advantage.estimate
        return checked_advantage(self.estimate(rollout), rollout, function)

    def _sizes(self, groups: Sequence[Group]) -> list[float]:
        """Sum of |advantage| over each group, on rank 0; 0: no signal. Each group alone, unless they are compared."""
        parts = [groups] if self.cfg.advantage.record.across_groups else [[group] for group in groups]
        sizes = []
        for part in parts:
            advantage = iter(self._estimate(self._rollout(list(part))))  # of each completion
            for group in part:
                values = [torch.as_tensor(next(advantage)).flatten() for _ in group.completions]
                sizes.append(torch.cat(values).abs().sum().item())
        return sizes

    def _update_planner(self, group: Group, totals: list[float]) -> None:
        """Replan a prompt that earned nothing, and report the mean reward to the curriculum."""
        planner = self.producer.planner
        earned = [x for row in group.values for x in row if x is not None]
        if earned and max(map(abs, earned)) < NOTHING:
            planner.reroll(group)
        if known := [x for x in totals if x == x]:
            planner.observe(group, statistics.fmean(known))

    def _replay(self, groups: list[Group], step: int) -> dict[str, float]:
        """Replace groups without signal by stored groups, then store the groups of this rollout that have signal."""
        if not self.replay.size:
            return {}
        fresh, sizes = list(groups), self._sizes(groups)
        for index, (group, size) in enumerate(zip(fresh, sizes, strict=True)):
            stored = None if size else self.replay.draw(step=step, number=index)
            groups[index] = stored or group
        for group, size in zip(fresh, sizes, strict=True):
            spread = nan_std(self._rollout([group]).rewards[0].T, dim=1).nansum().item()  # summed over rewards
            # Rewards may be equal, or too few for a deviation, while the estimator still tells completions apart.
            score = (spread or 1.0) * size
            if score > 0:
                self.replay.add(group, score=score, step=step)
        replayed = sum(group.replayed for group in groups)
        return {"rollout/replayed_groups": float(replayed), "rollout/replay_size": float(len(self.replay))}


def checked_advantage(advantage: Advantage, rollout: Rollout, estimator: Estimator) -> Advantages:
    """Check and flatten what the estimator returned; NaN becomes 0 for a completion that lacks a reward."""

    def error(returned: str) -> UserError:
        return UserError(f"advantage_estimator={name_of(estimator)}: returned {returned}")

    shape = (len(rollout.groups), len(rollout.groups[0].completions)) if rollout.groups else (0, 0)
    if isinstance(advantage, Tensor):
        if tuple(advantage.shape) != shape and rollout.groups:
            raise error(f"shape {tuple(advantage.shape)} for (groups, completions) = {shape}")
        rows = advantage.reshape(-1, 1).tolist()
    elif isinstance(advantage, Sequence):
        rows = [torch.as_tensor(values).tolist() for values in advantage]
        found, lengths = [len(row) for row in rows], [len(completion.ids) for completion in rollout.completions]
        if found != lengths:
            raise error(
                f"{len(rows)} lists of lengths {found[:4]}..; one number per token needs {len(lengths)} lists of "
                f"lengths {lengths[:4]}.."
            )
    else:
        raise error(f"{type(advantage).__name__}; return a tensor of shape {shape}")
    for index, (row, rewards) in enumerate(zip(rows, rollout.values, strict=True)):
        odd = next((x for x in row if not math.isfinite(x)), 0.0)
        if math.isinf(odd) or (math.isnan(odd) and rewards and None not in rewards):
            raise error(f"{odd} for completion {index}, although it has rewards {rewards}; return finite numbers")
    if isinstance(advantage, Tensor):
        return torch.where(advantage.isnan(), 0.0, advantage).flatten()
    return [[0.0 if x != x else x for x in row] for row in rows]


def per_completion(advantage: Advantages) -> list[float]:
    """One number per completion for samples.jsonl: the mean, if there is a number per id."""
    if isinstance(advantage, Tensor):
        return advantage.tolist()
    return [statistics.fmean(values) if values else 0.0 for values in advantage]


def sample_rows(rollout: Rollout, advantage: Advantages, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows for samples.jsonl, from groups spread over the rollout."""
    prompts, completions, values, extra = rollout.prompts, rollout.completions, rollout.values, rollout.extra
    means, rows = per_completion(advantage), []
    for i in range(0, len(completions), max(1, len(completions) // SAMPLES_PER_STEP))[:SAMPLES_PER_STEP]:
        prompt, c = prompts[i], completions[i]
        row: dict[str, Any] = {"prompt": prompt.prompt, "completion": c.text}
        expected = next((prompt.columns[name] for name in EXPECTED if name in prompt.columns), None)
        if expected is not None:
            row["truth"] = str(expected)
        row |= {"rewards": dict(zip(rollout.names, values[i], strict=True)), "advantage": means[i]}
        row |= {"source": prompt.source, "finish_reason": c.finish_reason}
        if c.messages:
            row["messages"] = c.messages
        if c.messages or c.mask or c.branches:  # an episode
            row["branches"] = branches_of(c, tokenizer, None if isinstance(advantage, Tensor) else advantage[i])
        rows.append(row | ({"extra": extra[i]} if extra[i] else {}))
    return rows


@torch.no_grad()
def sequence_kl(cfg: PolicyGradientConfig, policy: Policy, completions: Sequence[Completion]) -> Tensor:  # (B,)
    """k1 of each completion: logp - ref_logp under the current policy, summed over its tokens."""
    total = torch.zeros(len(completions), device=policy.device)
    batches = pack_completions(cfg.run, policy, completions, share_prompt=cfg.share_prompt)
    for batch, now in zip(batches, policy_logps(policy, batches, temperature=cfg.temperature), strict=True):
        ref_logp = reference_logps(policy, batch, temperature=cfg.temperature)
        total = total.index_add(0, batch.sequence, k1(now.logp, ref_logp).float())
    return total.cpu()


# Rollouts without any reward.


class MissingRewards:
    """Warn about rollouts in which no completion got a reward, and stop the run after too many. On rank 0.

    Checkpoints contain the count, so a resumed run stops at the same step.
    """

    def __init__(
        self,
        specs: Sequence[str],  # reward functions as the user named them
        counters: Counters,
        note: Callable[[str], None],
        *,
        limit: int,  # consecutive batches; 0: never stop
        num_batches: int,  # of the whole run: a run without a single reward must not end as finished
    ) -> None:
        self.specs, self.counters, self.note, self.limit = tuple(specs), counters, note, limit
        self.batch_limit = min(limit, num_batches)
        self._silent: dict[str, int] = {}  # consecutive batches without a value, per function
        self._warned: set[str] = set()

    def sampled(self, step: int, tables: Sequence[RewardTable], *, rewarded: bool, env_failed: int = 0) -> None:
        """Check the rollout of this step; `env_failed` completions have no reward because their environment failed."""
        self._count_silent(tables)
        if rewarded:
            self._warn_silent(tables)
            self.counters.unrewarded_in_a_row = 0
            return
        self.counters.unrewarded_in_a_row += 1
        where = f"step {step}: none of {_num_rows(tables)} completions got a reward"
        count = self.counters.unrewarded_in_a_row
        self._warn_or_stop("batches", where, reasons(tables, env_failed), count, self.batch_limit)

    def evaluated(self, step: int, table: RewardTable) -> None:
        """Check a held-out evaluation."""
        if any(total is not None for total in table.totals):
            self.counters.unrewarded_evaluations = 0
            return
        self.counters.unrewarded_evaluations += 1
        where = f"evaluation at step {step}: none of {len(table.totals)} held-out completions got a reward"
        self._warn_or_stop("evaluations", where, reasons([table]), self.counters.unrewarded_evaluations, self.limit)

    def _warn_or_stop(self, kind: str, where: str, why: str, count: int, limit: int) -> None:
        if self.limit and count >= limit:
            raise UserError(
                f"reward_funcs={' '.join(self.specs)}: {where}, for {count} consecutive {kind} ({why}); check "
                "them with python -m rollout.rewards --check, or set --reward-none-limit 0 to train without rewards"
            )
        if kind not in self._warned:
            self._warned.add(kind)
            stops = f"; the run stops after {limit} consecutive {kind}" if self.limit else ""
            self.note(f"warning: {where} ({why}){stops}")

    def _count_silent(self, tables: Sequence[RewardTable]) -> None:
        for index, name in enumerate(tables[0].names):
            has_value = any(row[index] is not None for table in tables for row in table.values)
            self._silent[name] = 0 if has_value else self._silent.get(name, 0) + 1

    def _warn_silent(self, tables: Sequence[RewardTable]) -> None:
        """Warn if a reward applied to none of many batches; missing one batch is normal."""
        for name, count in self._silent.items():
            if self.limit and count >= self.limit and name not in self._warned:
                self._warned.add(name)
                why = reasons(tables, only=name)
                self.note(f"warning: reward {name} returned no value in {count} consecutive batches ({why})")


def reasons(tables: Sequence[RewardTable], env_failed: int = 0, *, only: str | None = None) -> str:
    """Describe what each function returned or raised instead of a reward."""
    causes = [f"{env_failed} environments failed"] if env_failed else []
    num_rows = _num_rows(tables)
    for index, name in enumerate(tables[0].names if tables else ()):
        gaps = [table.gaps[index] for table in tables if table.gaps]
        if only not in (None, name) or not gaps:
            continue
        none, failed = sum(gap.none for gap in gaps), sum(gap.failed for gap in gaps)
        last = next((gap.last for gap in reversed(gaps) if gap.last), None)
        if none:
            causes.append(f"{name} returned None for {_of(none, num_rows)}")
        if failed:
            causes.append(f"{name} failed on {_of(failed, num_rows)}, most recently: {last}")
    return "; ".join(causes) or "no function returned a number"


def _of(count: int, num_rows: int) -> str:
    return f"all {num_rows} rows" if count == num_rows else f"{count} of {num_rows} rows"


def _num_rows(tables: Sequence[RewardTable]) -> int:
    return sum(len(table.values) for table in tables)
