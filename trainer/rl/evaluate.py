"""Metrics of sampled completions, and the evaluation on held-out prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from torch import Tensor

from data.packing import Batch
from data.types import Prompt
from losses.advantage import nan_std, zero_std_frac
from rollout.engine import Completion, Engine, Request, Source, run_groups
from rollout.rewards.table import Rewards, RewardTable
from trainer.parallel.comm import all_count

EPISODE_COLUMNS = ("num_turns", "tool_calls", "tool_errors", "env_done", "env_refused", "env_failed", "branches",
                   "retokenised")  # fmt: skip


def reward_metrics(
    names: Sequence[str],
    values: Sequence[Sequence[float | None]],  # per completion and reward; None = does not apply
    total: Tensor,  # (P, G) NaN = no reward applies
) -> dict[str, float]:
    if not names:  # a method that needs no rewards
        return {}
    metrics = {
        "reward/mean": total.nanmean().item(),
        "reward/std": nan_std(total.flatten(), dim=0).item(),
    }
    if total.shape[1] > 1:  # meaningless for groups of one
        metrics["reward/zero_std_frac"] = zero_std_frac(total).item()
    for name, scores in scores_by_function(names, values).items():
        metrics[f"reward/{name}/mean"] = statistics.fmean(scores)
        metrics[f"reward/{name}/std"] = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return metrics


def scores_by_function(names: Sequence[str], values: Sequence[Sequence[float | None]]) -> dict[str, list[float]]:
    """Rewards per function, without the completions and functions that none applied to."""
    columns = zip(names, zip(*values, strict=True), strict=True)
    applied = {name: [score for score in scores if score is not None] for name, scores in columns}
    return {name: scores for name, scores in applied.items() if scores}


def logged_metrics(logged: dict[str, list[float]], kind: str) -> dict[str, float]:
    """Means of what reward functions logged with log_metric, over the calls of a step or evaluation."""
    return {f"{kind}/log/{name}": statistics.fmean(values) for name, values in logged.items() if values}


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    lengths = [len(completion.ids) for completion in completions]
    return {
        "rollout/len_mean": statistics.fmean(lengths),
        "rollout/len_max": float(max(lengths)),
        "rollout/truncated_frac": statistics.fmean(c.finish_reason == "length" for c in completions),
        **episode_metrics(completions),
    }


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Means of the columns that episodes report."""
    metrics = {}
    for name in EPISODE_COLUMNS:
        values = [float(c.columns[name]) for c in completions if c.columns.get(name) is not None]
        if values:
            name = {"retokenised": "retokenised_frac"}.get(name, name)
            metrics[f"rollout/{name}"] = statistics.fmean(values)
    return metrics


def packing_metrics(micro_batches: Sequence[Batch]) -> dict[str, float]:
    num_tokens = all_count(sum(mb.num_tokens for mb in micro_batches), "tokens")
    num_computed = all_count(sum(mb.num_computed for mb in micro_batches), "computed tokens")
    return {"data/shared_frac": 1 - num_computed / num_tokens} if num_tokens else {}


def evaluate_rewards(
    engine: Engine,
    source: Source,
    version: int,
    prompts: Sequence[Prompt],
    rewards: Rewards,
    check: Callable[[int, RewardTable], None] | None = None,  # warns of evaluations without any reward
    num_generations: int = 1,  # completions per prompt
) -> dict[str, float]:
    """Complete the held-out prompts with the current weights and fixed seeds, and reward the completions."""
    engine.load(version)
    seeds = [range(row, num_generations * len(prompts), len(prompts)) for row in range(len(prompts))]
    requests = [[Request.of(prompt, seed) for seed in each] for prompt, each in zip(prompts, seeds, strict=True)]
    groups = run_groups(source, requests, engine.poll)
    engine.sleep()
    completions = [completion for group in groups for completion in group]
    repeated = [prompt for prompt in prompts for _ in range(num_generations)]
    table = rewards.score(repeated, completions, step=version)
    if check is not None:
        check(version, table)
    totals = [total for total in table.totals if total is not None]
    metrics = {"eval/reward/mean": statistics.fmean(totals) if totals else float("nan")}
    if num_generations > 1:
        metrics[f"eval/reward/best_of_{num_generations}"] = best_of(table.totals, num_generations)
    scored = scores_by_function(table.names, table.values)
    metrics |= {f"eval/{name}/mean": statistics.fmean(scores) for name, scores in scored.items()}
    metrics |= logged_metrics(table.logged, "eval")
    return {**metrics, "eval/len_mean": statistics.fmean(len(c.ids) for c in completions), "eval/rows": len(prompts)}


def best_of(totals: Sequence[float | None], count: int) -> float:
    """Mean over prompts of the highest reward among `count` completions; prompts without a reward are skipped."""
    groups = [[x for x in totals[first : first + count] if x is not None] for first in range(0, len(totals), count)]
    best = [max(group) for group in groups if group]
    return statistics.fmean(best) if best else float("nan")
