"""Features of a frozen network for energy-based fine-tuning: one vector per sequence or block.

    network = FeatureNetwork(cfg.features, cfg.run, policy)
    groups = network.items_of(prompts, completions, num_generations=4)
    features = network.of_items(groups, 4)      # whole completions
    features = network.of_blocks(batch)         # continuations within documents
    measured = network.measure(features)        # rewards, and feature distances

The network is the policy's reference: a frozen copy of its initial weights, or, with LoRA, the base model with the
adapter disabled. Equal rollouts of a prompt have bit-identical features, however they were batched: whitening relies on
that to detect duplicates.

Shapes: P prompts or anchors, G rollouts of each, D feature width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data.packing import Item, make_batches
from data.strided import StridedBatch
from data.types import TargetPrompt
from losses import ebft
from rollout.engine import Completion
from trainer.config.blocks import ModelConfig, ParallelConfig, RunConfig
from trainer.config.ebft import FeatureConfig
from trainer.parallel.comm import all_gather
from trainer.policy.load import blocks_of
from trainer.policy.logps import Policy, as_reference, causal_lm, hidden_states
from trainer.policy.reference import load_frozen
from trainer.policy.sharding import to_device_and_pad


class Features(NamedTuple):
    """Features of rollouts, and of the targets they are compared with."""

    rollout: Tensor  # (P, G, D)
    target: Tensor  # (P, D)


class MeasuredFeatures(NamedTuple):
    """Rewards and distances computed from features."""

    reward: ebft.Reward  # two parts, (P, G) each
    cfm: Tensor  # (P,) squared distance from the mean rollout to the target, without whitening
    cfm_unbiased: Tensor | None  # (P,) cfm minus its bias from the variance of G rollouts; None for G = 1


def feature_policy(cfg: FeatureConfig, model: ModelConfig, policy: Policy, parallel: ParallelConfig) -> Policy:
    """A policy whose reference is the feature network: the run's own, or the model of feature_model.

    That model is sharded over ranks if the policy is.
    """
    if cfg.feature_model is None:
        return policy
    source = load_frozen("feature_model", cfg.feature_model, model, policy, parallel)
    policy.companions.append(source)
    return dataclasses.replace(source, reference=source.model)


class FeatureNetwork:
    """Computes features with the policy's frozen reference, and rewards from them."""

    def __init__(self, cfg: FeatureConfig, run: RunConfig, policy: Policy) -> None:
        self.cfg, self.run, self.policy = cfg, run, policy
        with as_reference(policy) as model:
            self.layers = ebft.layer_indices(cfg.feature_layers, len(blocks_of(causal_lm(model), policy.source)))

    def items_of(
        self, prompts: Sequence[TargetPrompt], completions: Sequence[Completion], *, num_generations: int
    ) -> list[list[Item]]:
        """For each group its rollouts, then the target. One prompt per completion; those of a group are adjacent."""
        assert len(prompts) == len(completions) and len(prompts) % num_generations == 0, (len(prompts), num_generations)
        groups = []
        for first in range(0, len(prompts), num_generations):
            group, prompt = completions[first : first + num_generations], prompts[first]
            target = self._item(prompt.ids, prompt.target_ids, prompt.target_mask)
            groups.append([*(self._item(c.prompt_ids, c.ids, c.mask) for c in group), target])
        return groups

    @torch.no_grad()
    def of_items(self, groups: Sequence[Sequence[Item]], num_generations: int) -> Features:
        """Computes every distinct sequence once. All ranks call this together, each with its own groups or none."""
        items = [item for group in groups for item in group]
        # Features depend on the tokens and on which are wanted, not on where the prompt ends.
        number: dict[tuple[int, ...], int] = {}
        rows = [number.setdefault((*item.ids, *item.mask), len(number)) for item in items]
        distinct = dict(zip(rows, items, strict=True))
        features = self._of_items([distinct[row] for row in range(len(distinct))])[rows]  # (P * (G + 1), D)
        features = features.view(len(groups), num_generations + 1, features.shape[1])
        return Features(features[:, :-1], features[:, -1])

    @torch.no_grad()
    def of_blocks(self, batch: StridedBatch) -> Features:
        """Features of the continuations in a row, and of the document's own tokens at the same positions."""
        place, target_place = batch.place, batch.target_place
        if self.cfg.embed_method == "last_token":
            place, target_place = place[:, :, -1:], target_place[:, -1:]
        states = self._states(batch, torch.cat([place.flatten(), target_place.flatten()]))
        rollout, target = states.split([place.numel(), target_place.numel()])
        width = states.shape[1]
        rollout, target = rollout.view(*place.shape, width), target.view(*target_place.shape, width)
        pooled = self._pool(rollout, torch.ones_like(place, dtype=torch.bool))  # (A, n, D)
        ids = batch.input_ids[0, batch.place]  # (A, n, G)
        equal = (ids.unsqueeze(2) == ids.unsqueeze(1)).all(dim=-1)  # (A, n, n)
        twin = equal.int().argmax(dim=-1)  # (A, n) the first continuation with the same tokens, usually itself
        pooled = pooled.gather(1, twin.unsqueeze(-1).expand_as(pooled))
        return Features(pooled, self._pool(target, torch.ones_like(target_place, dtype=torch.bool)))

    def measure(self, features: Features) -> MeasuredFeatures:
        """Rewards, and distances from the mean rollout to the target."""
        cfg, (rollout, target) = self.cfg, features
        paired = ebft.plain(rollout, target)
        if cfg.use_whitening:
            paired = ebft.whiten(rollout, target, whiten_target=cfg.whiten_gt)
        reward = ebft.feature_reward(
            paired, alignment_coef=cfg.alignment_coef, diversity_coef=cfg.diversity_coef, alignment=cfg.alignment
        )
        unbiased = ebft.cfm_unbiased(rollout, target) if rollout.shape[1] > 1 else None
        return MeasuredFeatures(reward, ebft.cfm_distance(rollout, target), unbiased)

    def _item(self, prompt: list[int], ids: list[int], mask: list[bool] | None) -> Item:
        """Item of a prompt and the ids after it; `mask` says which of those count as completion.

        A batch indexes the states that predict its trained tokens. The state at a token predicts the next one, so the
        token after each wanted one is marked as trained, and a dummy token is appended.
        """
        # With the prompt, which therefore cannot be shared.
        whole = self.cfg.embed_method in ("mean_pooling", "concat")
        wanted = [True] * (len(prompt) + len(ids))
        if not whole:
            wanted[: len(prompt)] = [False] * len(prompt)
        if self.cfg.embed_method == "completion_mean" and mask is not None:
            wanted[len(prompt) :] = mask
        if self.cfg.embed_method == "last_token":
            wanted = [False] * (len(wanted) - 1) + [True]
        return Item([*prompt, *ids, 0], [False, *wanted], 0 if whole else len(prompt))

    def _of_items(self, items: Sequence[Item]) -> Tensor:  # (B, D)
        batches = make_batches(
            items, max_tokens=self.run.max_tokens_per_micro_batch, **self.policy.layout(share_prompt=True)
        )
        parts: dict[int, Tensor] = {}
        last = (self.policy.context_length or sys.maxsize) - 1
        for batch in to_device_and_pad(self.policy, batches):
            # The dummy token may be one past the context, where position embeddings end.
            batch = dataclasses.replace(batch, position_ids=batch.position_ids.clamp(max=last))
            states = self._states(batch, batch.index)
            for row, own in zip(batch.rows, states.split([sum(items[row].mask) for row in batch.rows]), strict=True):
                parts[row] = self._pool(own, torch.ones_like(own[:, 0], dtype=torch.bool))
        return torch.stack([parts[row] for row in range(len(items))]) if items else states

    def _pool(self, features: Tensor, mask: Tensor) -> Tensor:
        """(..., T, D) to (..., D); tokens that the method ignores are already removed."""
        return ebft.pool(features, mask, mask, embed_method=self.cfg.embed_method)

    def _states(self, batch: Any, places: Tensor) -> Tensor:  # (M, layers * D)
        """Hidden states of the chosen blocks at these positions of a batch, concatenated."""
        with as_reference(self.policy) as model:
            lm = causal_lm(model)
            blocks = blocks_of(lm, self.policy.source)
            with states_of([blocks[number - 1] for number in self.layers], places) as states:
                hidden_states(self.policy, lm, batch)
        return ebft.token_features(states, normalize=self.cfg.feature_norm)


def of_all_ranks(measured: Sequence[MeasuredFeatures]) -> MeasuredFeatures:
    """The measurements of all ranks, in rank order. A rank without prompts passes an empty MeasuredFeatures."""
    columns = [[*part.reward, *(x.unsqueeze(1) for x in part[1:] if x is not None)] for part in measured]
    sizes = [column.shape[1] for column in columns[0]]
    table = torch.cat(all_gather(torch.cat([torch.cat(row, dim=1) for row in columns]), "rewards"))  # (P, 2 * G + 2)
    alignment, diversity, cfm, *unbiased = table.split(sizes, dim=1)
    return MeasuredFeatures(ebft.Reward(alignment, diversity), cfm[:, 0], unbiased[0][:, 0] if unbiased else None)


def measured_metrics(measured: Sequence[MeasuredFeatures], area: str) -> dict[str, float]:
    """Means of the rewards over rollouts, and of the distances over prompts; `area` is reward or eval."""
    alignment = torch.cat([part.reward.alignment for part in measured])
    diversity = torch.cat([part.reward.diversity for part in measured])
    prefix = "eval/reward" if area == "eval" else "reward"
    metrics = {
        f"{prefix}/mean": (alignment - diversity).mean(),
        f"{area}/alignment/mean": alignment.mean(),
        f"{area}/diversity/mean": diversity.mean(),
        f"{area}/cfm": torch.cat([part.cfm for part in measured]).mean(),
    }
    if area == "reward":
        several = alignment.numel() > 1
        metrics["reward/std"] = (alignment - diversity).std(correction=1) if several else alignment.new_zeros(())
    unbiased = [part.cfm_unbiased for part in measured if part.cfm_unbiased is not None]
    if unbiased:
        metrics[f"{area}/cfm_unbiased"] = torch.cat(unbiased).mean()
    return read_numbers(metrics)


def read_numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:  # () each
    """All of them in one copy from the device."""
    return dict(zip(metrics, torch.stack([x.double() for x in metrics.values()]).tolist(), strict=True))


@contextlib.contextmanager
def states_of(blocks: Sequence[nn.Module], places: Tensor) -> Iterator[list[Tensor]]:
    """Collect the outputs of these blocks at the places, in block order, during one forward pass in the context."""
    states: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # (R, T, D)
        states.append(hidden.flatten(0, 1)[places])

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
    assert len(states) == len(blocks), (len(states), len(blocks))
