"""What structured energy-based fine-tuning adds to GRPO: rewards from features, and the cross-entropy of the targets.

    rewards = FeatureRewards(network, num_generations=4)       # instead of reward functions
    add_target(cfg, policy, targets, sums)                     # adds the gradients of the cross-entropy

Alignment and diversity are two rewards, the second with weight -1, so that everything that reads groups (replay,
dynamic sampling, samples.jsonl) sees both of them, and their weighted sum as the reward.

With several ranks, rank 0 requests rewards and every rank measures its share of the groups (rl/rank0_rollout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from data.packing import Batch, Item
from data.types import TargetPrompt
from kernels.linear_logprob import TokenLogps
from losses import ebft
from losses.advantage import Rewards
from losses.types import Metrics
from rollout.engine import Completion, Request, finished, run_groups
from rollout.rewards.table import RewardTable
from trainer.config.ebft import EbftConfig
from trainer.ebft.features import FeatureNetwork, MeasuredFeatures, measured_metrics, of_all_ranks
from trainer.metrics.metrics import MetricSums
from trainer.offline.rows import pack_items, rows_of_this_rank
from trainer.parallel import comm
from trainer.parallel.comm import all_sum
from trainer.policy.logps import Policy, token_logps, token_loss
from trainer.policy.sharding import final_passes
from trainer.rl.groups import Rollout
from trainer.rl.rollouts import Rollouts

MEASURE = "measure"  # rank 0's command to measure rewards


class FeatureRewards:
    """Rewards from the feature networks of all ranks, with the interface that trainer/rl/groups.py reads."""

    names = ["alignment", "diversity"]
    weights = [1.0, -1.0]

    def __init__(self, network: FeatureNetwork, *, num_generations: int) -> None:
        self.network, self.num_generations = network, num_generations
        self.handlers = {MEASURE: self.follow}  # run on the other ranks
        self._measured: list[MeasuredFeatures] = []  # since the last call of feature_metrics

    def submit(
        self, prompts: Sequence[TargetPrompt], completions: Sequence[Completion], *, step: int
    ) -> Future[RewardTable]:
        """Measure whole groups immediately; the future has its result."""
        measured = self.measure(prompts, completions)
        self._measured.append(measured)
        values = torch.stack(measured.reward, dim=-1).flatten(0, 1).tolist()  # (P * G, 2)
        totals = [alignment - diversity for alignment, diversity in values]
        return finished(RewardTable(names=self.names, values=values, weights=self.weights, totals=totals))

    def measure(self, prompts: Sequence[TargetPrompt], completions: Sequence[Completion]) -> MeasuredFeatures:
        """Measure whole groups, with one prompt per completion; on rank 0, while other ranks serve commands."""
        groups = self.network.items_of(prompts, completions, num_generations=self.num_generations)
        if comm.world_size() == 1:
            return self.network.measure(self.network.of_items(groups, self.num_generations))
        comm.send_command(MEASURE)
        dealt = comm.balanced_shards([sum(len(item.ids) for item in group) for group in groups], comm.world_size())
        measured = self._measure_share([[groups[index] for index in indices] for indices in dealt])
        order = torch.tensor([index for indices in dealt for index in indices]).argsort().to(measured.cfm.device)
        unbiased = None if measured.cfm_unbiased is None else measured.cfm_unbiased[order]
        return MeasuredFeatures(ebft.Reward(*(x[order] for x in measured.reward)), measured.cfm[order], unbiased)

    def follow(self) -> None:
        """Execute rank 0's command on another rank."""
        self._measure_share([None] * comm.world_size())

    def _measure_share(self, shares: Sequence[list[list[Item]] | None]) -> MeasuredFeatures:
        """Measure this rank's share of rank 0's groups; return the features of all ranks."""
        share = comm.exchange(shares, "groups to measure")[0]
        return of_all_ranks([self.network.measure(self.network.of_items(share, self.num_generations))])

    def metrics(self) -> dict[str, float]:
        return {}

    def feature_metrics(self) -> dict[str, float]:
        """Metrics of everything sampled since the last call, including groups that are not trained on."""
        measured, self._measured = self._measured, []
        metrics = measured_metrics(measured, "reward") if measured else {}
        return {name: value for name, value in metrics.items() if "cfm" in name}


def feature_metrics(cfg: EbftConfig, rewards: FeatureRewards, rollout: Rollout | None) -> dict[str, float]:
    """Metrics of the rollout of all ranks, for every step on it; on rank 0, which writes them."""
    if rollout is None:
        return {}
    advantage = estimate(cfg, rollout)
    return {
        **rewards.feature_metrics(),
        "policy/advantage_std": advantage.std(correction=0).item(),
        "reward/zero_std_frac": (advantage == 0).all(dim=1).float().mean().item(),  # of advantages: rewards round
    }


def estimate(cfg: EbftConfig, r: Rewards) -> Tensor:  # (P, G)
    """Advantages from alignment and diversity, by --advantage-estimator."""
    reward = ebft.Reward(*r.rewards.unbind(dim=-1))
    return ebft.advantage_of(reward, advantage_estimator=cfg.features.advantage_estimator)


def target_batches(cfg: EbftConfig, policy: Policy, prompts: Sequence[TargetPrompt], accumulation: int) -> list[Batch]:
    """Pack prompts with their targets, whose tokens are trained."""
    items = [
        Item(
            [*prompt.ids, *prompt.target_ids],
            [False] * len(prompt.ids) + (prompt.target_mask or [True] * len(prompt.target_ids)),
        )
        for prompt in prompts
    ]
    return pack_items(cfg.run, policy, items, accumulation=accumulation)


def add_target(cfg: EbftConfig, policy: Policy, prompts: Sequence[TargetPrompt], sums: MetricSums) -> int:
    """Add the gradients of the cross-entropy and its metrics; return the number of tokens computed."""
    if not cfg.features.ce_coef:
        return 0
    micro_batches = target_batches(cfg, policy, prompts, cfg.run.gradient_accumulation_steps)
    count = all_sum(torch.full((), float(sum(len(mb.target) for mb in micro_batches)), device=policy.device))

    def loss_of(tokens: TokenLogps, rows: Tensor) -> tuple[Tensor, Metrics]:
        loss = -tokens.logp.sum()
        return cfg.features.ce_coef * loss / count.clamp(min=1), {"loss/ce": (loss, len(rows))}

    for mb in final_passes(policy, micro_batches):
        total, pieces = token_loss(policy, mb, loss_of)
        total.backward()
        for metrics in pieces:
            sums.add(metrics)
        sums.add({"loss/total": (total.detach(), torch.zeros_like(total))})
    sums.add({"loss/ce": (torch.zeros_like(count), count == 0)})  # 0 if no target has a trained token
    return sum(mb.num_tokens for mb in micro_batches)


def evaluate(cfg: EbftConfig, policy: Policy, rollouts: Rollouts) -> dict[str, float]:
    """Sample groups of held-out prompts with the current weights and fixed seeds, and measure their targets."""
    rewards, prompts, engine = rollouts.rewards, rollouts.held_out, rollouts.engine
    size = rewards.num_generations

    def of_groups() -> dict[str, float]:
        engine.load(rollouts.training.step)
        requests = [[Request.of(prompt, row * size + i) for i in range(size)] for row, prompt in enumerate(prompts)]
        groups = run_groups(rollouts.held_out_source, requests, engine.poll)
        engine.sleep()
        completions = [completion for group in groups for completion in group]
        measured = rewards.measure([prompt for prompt in prompts for _ in range(size)], completions)
        length = sum(len(c.ids) for c in completions) / len(completions)
        return {**measured_metrics([measured], "eval"), "eval/len_mean": length}

    metrics = rollouts.rank0.run(of_groups) or {}
    sums = MetricSums()
    for mb in target_batches(cfg, policy, rows_of_this_rank(prompts), accumulation=1):
        logp = token_logps(policy, mb).logp
        sums.add({"eval/nll": (-logp.sum(), len(logp))})
    return {**metrics, **sums.means(), "eval/rows": len(prompts)}
