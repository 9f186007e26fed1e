"""What structured energy-based fine-tuning adds to a step of GRPO: rewards from features, and the true completions.

    rewards = FeatureRewards(network, num_generations=4)       # instead of reward functions
    batch = groups.next(step, engine.version)
    advantage = groups.advantage(batch)                        # (B,), by `estimate`
    sums = backward(cfg, policy, rollout)                      # trainer/rl/step.py
    add_target(cfg, policy, targets, sums)                     # adds gradients of the cross-entropy

Alignment and diversity are two rewards, the second with weight -1, so that everything that looks at groups (replay,
dynamic sampling, samples.jsonl) sees them apart and their sum as the reward.

Over several processes rank 0 asks for rewards, and all ranks measure a part of the groups (rl/rank0_rollout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from data.packing import Batch, Item
from data.types import TargetPrompt
from kernels.linear_logprob import TokenLogps
from losses import ebft
from losses.advantage import GroupRewards
from rollout.engine import Completion, Request, Source, run_groups
from rollout.rewards.table import RewardTable
from trainer.ebft.features import FeatureNetwork, MeasuredFeatures, measured_metrics, of_all_ranks
from trainer.metrics.metrics import MetricSums
from trainer.offline.loop import pack_items, rows_of_this_rank
from trainer.parallel import comm
from trainer.parallel.comm import all_sum
from trainer.policy.logps import Policy, token_logps, token_loss
from trainer.policy.optim import total_loss
from trainer.policy.sharding import final_passes
from trainer.rl.groups import GroupBatch
from trainer.rl.rank0_rollout import Rank0Rollout

MEASURE = "measure"  # rank 0's command when it wants rewards


class FeatureRewards:
    """Rewards from the feature networks of all ranks, in the form that trainer/rl/groups.py reads."""

    names = ["alignment", "diversity"]
    weights = [1.0, -1.0]

    def __init__(self, network: FeatureNetwork, *, num_generations: int) -> None:
        self.network, self.num_generations = network, num_generations
        self.handlers = {MEASURE: self.follow}  # of the other ranks
        self._measured: list[MeasuredFeatures] = []  # since the last call of metrics

    def submit(
        self, prompts: Sequence[TargetPrompt], completions: Sequence[Completion], *, step: int
    ) -> Future[RewardTable]:
        """Computes at once, on whole groups: the future has its result."""
        measured = self.measure(prompts, completions)
        self._measured.append(measured)
        parts = torch.stack(measured.reward, dim=-1).flatten(0, 1).tolist()  # (P * G, 2)
        totals = [alignment - diversity for alignment, diversity in parts]
        future: Future[RewardTable] = Future()
        future.set_result(RewardTable(names=self.names, values=parts, weights=self.weights, totals=totals))
        return future

    def measure(self, prompts: Sequence[TargetPrompt], completions: Sequence[Completion]) -> MeasuredFeatures:
        """Of whole groups, one prompt for each completion; on rank 0, while the other ranks wait for commands."""
        groups = self.network.items_of(prompts, completions, num_generations=self.num_generations)
        if comm.world_size() == 1:
            return self.network.measure(self.network.of_items(groups, self.num_generations))
        comm.send_command(MEASURE)
        return self._measure_part([[list(vars(item).values()) for item in group] for group in groups])

    def follow(self) -> None:
        """What another rank does at the command."""
        self._measure_part(None)

    def _measure_part(self, sent: list[list[list[Any]]] | None) -> MeasuredFeatures:
        """Measure this rank's part of rank 0's groups; returns all of them, in their order."""
        groups = [[Item(*item) for item in group] for group in comm.from_main(sent, "groups to measure")]
        dealt = comm.balanced_shards([sum(len(item.ids) for item in group) for group in groups], comm.world_size())
        own = [groups[number] for number in dealt[comm.rank()]]
        found = of_all_ranks([self.network.measure(self.network.of_items(own, self.num_generations))])
        order = torch.tensor([number for part in dealt for number in part]).argsort().to(found.cfm.device)
        unbiased = None if found.cfm_unbiased is None else found.cfm_unbiased[order]
        return MeasuredFeatures(ebft.Reward(*(part[order] for part in found.reward)), found.cfm[order], unbiased)

    def metrics(self) -> dict[str, float]:
        return {}

    def feature_metrics(self) -> dict[str, float]:
        """Of everything sampled since the last call; what is trained on may be fewer groups, or replayed ones."""
        measured, self._measured = self._measured, []
        metrics = measured_metrics(measured, "reward") if measured else {}
        return {name: value for name, value in metrics.items() if "cfm" in name}


def feature_metrics(cfg: Any, rewards: FeatureRewards, batch: GroupBatch | None) -> dict[str, float]:
    """Metrics of the whole batch, for every step on it; on rank 0, which writes them."""
    if batch is None:
        return {}
    advantage = estimate(cfg, batch.for_advantage())
    return {
        **rewards.feature_metrics(),
        "policy/advantage_std": advantage.std(correction=0).item(),
        "reward/zero_std_frac": (advantage == 0).all(dim=1).float().mean().item(),  # by advantages: rewards round
    }


def estimate(cfg: Any, r: GroupRewards) -> Tensor:  # (P, G)
    """Advantages from the two parts of the reward, by the chosen estimator."""
    reward = ebft.Reward(*r.rewards.unbind(dim=-1))
    return ebft.advantage_of(reward, advantage_estimator=cfg.features.advantage_estimator)


def target_batches(cfg: Any, policy: Policy, prompts: Sequence[TargetPrompt], accumulation: int) -> list[Batch]:
    """Prompts with their targets, which are the trained tokens."""
    items = [
        Item(
            [*prompt.ids, *prompt.target_ids],
            [False] * len(prompt.ids) + (prompt.target_mask or [True] * len(prompt.target_ids)),
        )
        for prompt in prompts
    ]
    return pack_items(cfg.run, policy, items, accumulation=accumulation)


def add_target(cfg: Any, policy: Policy, prompts: Sequence[TargetPrompt], sums: MetricSums) -> int:
    """Add the gradients of the cross-entropy and its metrics; returns the number of tokens computed."""
    if not cfg.features.ce_coef:
        return 0
    micro_batches = target_batches(cfg, policy, prompts, cfg.run.gradient_accumulation_steps)
    count = all_sum(torch.full((), float(sum(len(mb.target) for mb in micro_batches)), device=policy.device))

    def loss_of(tokens: TokenLogps, rows: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        out = ebft.target_loss(tokens.logp, torch.ones_like(rows, dtype=torch.bool), ce_coef=cfg.features.ce_coef)
        term = out.terms["ce"]
        return total_loss(out, {"ce": count}), {"loss/ce": (term.sum.detach(), term.count)}

    for mb in final_passes(policy, micro_batches):
        total, parts = token_loss(policy, mb, loss_of)
        total.backward()
        for metrics in parts:
            sums.add(metrics)
        sums.add({"loss/total": (total.detach(), torch.zeros_like(total))})
    sums.add({"loss/ce": (torch.zeros_like(count), count == 0)})  # 0 where no target has a trained token
    return sum(mb.num_tokens for mb in micro_batches)


@torch.no_grad()
def evaluate(
    cfg: Any,
    policy: Policy,
    rank0: Rank0Rollout,
    source: Source,
    rewards: FeatureRewards,
    prompts: Sequence[TargetPrompt],
    *,
    version: int,
) -> dict[str, float]:
    """Sample groups of held-out prompts with the current weights and fixed seeds, and score the targets."""
    size, engine = rewards.num_generations, rank0.engine

    def of_groups() -> dict[str, float]:
        engine.load(version)
        requests = [[Request.of(prompt, row * size + i) for i in range(size)] for row, prompt in enumerate(prompts)]
        groups = run_groups(source, requests, engine.poll)
        engine.sleep()
        completions = [completion for group in groups for completion in group]
        measured = rewards.measure([prompt for prompt in prompts for _ in range(size)], completions)
        length = sum(len(c.ids) for c in completions) / len(completions)
        return {**measured_metrics([measured], "eval"), "eval/len_mean": length}

    metrics = rank0.run(of_groups) or {}
    was_training = policy.model.training
    policy.model.eval()
    sums = MetricSums()
    for mb in target_batches(cfg, policy, rows_of_this_rank(prompts), accumulation=1):
        logp = token_logps(policy, mb).logp
        sums.add({"eval/nll": (-logp.sum(), torch.tensor(float(len(logp)), device=logp.device))})
    policy.model.train(was_training)
    return {**metrics, **sums.means(), "eval/rows": len(prompts)}
