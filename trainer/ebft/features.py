"""Features of a frozen network for energy-based fine-tuning: one vector for each sequence or block.

    network = FeatureNetwork(cfg.features, policy)
    found = network.of_groups(prompts, completions, num_generations=4)      # whole completions
    found = network.of_blocks(batch)                                        # continuations within documents
    measured = network.measure(found)                                       # rewards, and how far the two are apart

The network is the policy's reference: a frozen copy of what it was when the run began, or, with LoRA, the base with the
adapter switched off. Equal rollouts of a prompt have equal features to the last digit, however they were batched:
whitening tells a duplicate from a near one by that.

Shapes: P prompts or anchors, G rollouts of each, D = width of a feature.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data.packing import Item, make_batches
from data.strided import StridedBatch
from data.types import TruthPrompt
from losses import ebft
from rollout.engine import Completion
from trainer.config.blocks import ModelConfig, ParallelConfig, RunConfig
from trainer.config.ebft import FeatureConfig
from trainer.parallel.comm import all_gather
from trainer.policy.load import blocks_of
from trainer.policy.logps import Policy, as_reference, causal_lm, hidden_states
from trainer.policy.reference import load_frozen
from trainer.policy.sharding import to_device_and_pad


class Found(NamedTuple):
    """Features of rollouts and of what the data has in their place."""

    rollout: Tensor  # (P, G, D)
    truth: Tensor  # (P, D)


class Measured(NamedTuple):
    """What the features of a batch come to."""

    reward: ebft.Reward  # two parts, (P, G) each
    cfm: Tensor  # (P,) squared distance of the mean rollout to the truth, of features that are not whitened
    cfm_unbiased: Tensor | None  # (P,) less what the spread of G rollouts adds to it; None for one alone


def feature_policy(cfg: FeatureConfig, model: ModelConfig, policy: Policy, parallel: ParallelConfig) -> Policy:
    """The policy whose reference is the feature network: that of the run, unless another model is named.

    That one lies in shards over ranks where the policy does.
    """
    if cfg.feature_model is None:
        return policy
    source = load_frozen("feature_model", cfg.feature_model, model, policy, parallel)
    return dataclasses.replace(source, reference=source.model)


class FeatureNetwork:
    def __init__(self, cfg: FeatureConfig, run: RunConfig, policy: Policy) -> None:
        self.cfg, self.run, self.policy = cfg, run, policy
        with as_reference(policy) as model:
            self.layers = ebft.layer_indices(cfg.feature_layers, len(blocks_of(causal_lm(model), policy.source)))

    def of_groups(
        self, prompts: Sequence[TruthPrompt], completions: Sequence[Completion], *, num_generations: int
    ) -> Found:
        """One prompt for each completion, groups side by side."""
        return self.of_items(self.items_of(prompts, completions, num_generations=num_generations), num_generations)

    def items_of(
        self, prompts: Sequence[TruthPrompt], completions: Sequence[Completion], *, num_generations: int
    ) -> list[list[Item]]:
        """For each group its rollouts, and behind them the truth."""
        assert len(prompts) == len(completions) and len(prompts) % num_generations == 0, (len(prompts), num_generations)
        groups = []
        for first in range(0, len(prompts), num_generations):
            made, prompt = completions[first : first + num_generations], prompts[first]
            truth = self._item(prompt.ids, prompt.truth_ids, prompt.truth_mask)
            groups.append([*(self._item(c.prompt_ids, c.ids, c.mask) for c in made), truth])
        return groups

    @torch.no_grad()
    def of_items(self, groups: Sequence[Sequence[Item]], num_generations: int) -> Found:
        """Every distinct sequence is computed once. Ranks call this together, each with groups of its own or none."""
        items = [item for group in groups for item in group]
        # The tokens and which of them are wanted make the feature; where the prompt ends does not by itself.
        number: dict[tuple[int, ...], int] = {}
        rows = [number.setdefault((*item.ids, *item.mask), len(number)) for item in items]
        distinct = dict(zip(rows, items, strict=True))
        features = self._of_items([distinct[row] for row in range(len(distinct))])[rows]  # (P * (G + 1), D)
        features = features.view(len(groups), num_generations + 1, features.shape[1])
        return Found(features[:, :-1], features[:, -1])

    @torch.no_grad()
    def of_blocks(self, batch: StridedBatch) -> Found:
        """Of the continuations in a row, and of the document's own tokens in their places."""
        place, truth = batch.place, batch.truth
        if self.cfg.embed_method == "last_token":
            place, truth = place[:, :, -1:], truth[:, -1:]
        states = self._states(batch, torch.cat([place.flatten(), truth.flatten()]))
        rollout, true = states.split([place.numel(), truth.numel()])
        width = states.shape[1]
        rollout, true = rollout.view(*place.shape, width), true.view(*truth.shape, width)
        pooled = self._pool(rollout, torch.ones_like(place, dtype=torch.bool))  # (A, n, D)
        ids = batch.input_ids[0, batch.place]  # (A, n, G)
        equal = (ids.unsqueeze(2) == ids.unsqueeze(1)).all(dim=-1)  # (A, n, n)
        twin = equal.int().argmax(dim=-1)  # (A, n) the first with the same tokens, in most cases itself
        pooled = pooled.gather(1, twin.unsqueeze(-1).expand_as(pooled))
        return Found(pooled, self._pool(true, torch.ones_like(truth, dtype=torch.bool)))

    def measure(self, found: Found) -> Measured:
        cfg, (rollout, truth) = self.cfg, found
        features = ebft.plain(rollout, truth)
        if cfg.use_whitening:
            features = ebft.whiten(rollout, truth, whiten_truth=cfg.whiten_gt)
        reward = ebft.feature_reward(
            features, alignment_coef=cfg.alignment_coef, diversity_coef=cfg.diversity_coef, alignment=cfg.alignment
        )
        unbiased = ebft.cfm_unbiased(rollout, truth) if rollout.shape[1] > 1 else None
        return Measured(reward, ebft.cfm_distance(rollout, truth), unbiased)

    def _item(self, prompt: list[int], ids: list[int], mask: list[bool] | None) -> Item:
        """Of prompt ids, ids that follow, and which of those count as completion.

        A batch knows where the states lie that predict its trained tokens. The state at a token is what predicts the
        next one, so the tokens behind those we want are the trained ones, and a last one is added that nobody reads.
        """
        whole = self.cfg.embed_method in ("mean_pooling", "concat")  # the prompt too, so it cannot be shared
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
            items, max_tokens=self.run.max_tokens_per_micro_batch, share_prompt=True, multiple=self.policy.row_multiple
        )
        parts: dict[int, Tensor] = {}
        last = (self.policy.context_length or sys.maxsize) - 1
        for batch in to_device_and_pad(self.policy, batches):
            # What nobody reads may lie one behind the context, and position embeddings end there.
            batch = dataclasses.replace(batch, position_ids=batch.position_ids.clamp(max=last))
            states = self._states(batch, batch.index)
            for row, own in zip(batch.rows, states.split([sum(items[row].mask) for row in batch.rows]), strict=True):
                parts[row] = self._pool(own, torch.ones_like(own[:, 0], dtype=torch.bool))
        return torch.stack([parts[row] for row in range(len(items))]) if items else states

    def _pool(self, features: Tensor, mask: Tensor) -> Tensor:
        """(..., T, D) to (..., D): whatever the method leaves out has been left out already."""
        return ebft.pool(features, mask, mask, embed_method=self.cfg.embed_method)

    def _states(self, batch: Any, places: Tensor) -> Tensor:  # (M, layers * D)
        """Hidden states of the chosen blocks at these places of a batch, side by side."""
        with as_reference(self.policy) as model:
            lm = causal_lm(model)
            blocks = blocks_of(lm, self.policy.source)
            with states_of([blocks[number - 1] for number in self.layers], places) as states:
                hidden_states(self.policy, lm, batch)
        return ebft.token_features(states, normalize=self.cfg.feature_norm)


def of_all_ranks(measured: Sequence[Measured]) -> Measured:
    """What ranks have measured, in the order of ranks. One that has nothing brings that: a Measured of no prompts."""
    columns = [[*found.reward, *(x.unsqueeze(1) for x in found[1:] if x is not None)] for found in measured]
    sizes = [column.shape[1] for column in columns[0]]
    table = torch.cat(all_gather(torch.cat([torch.cat(row, dim=1) for row in columns]), "rewards"))  # (P, 2 * G + 2)
    alignment, diversity, cfm, *unbiased = table.split(sizes, dim=1)
    return Measured(ebft.Reward(alignment, diversity), cfm[:, 0], unbiased[0][:, 0] if unbiased else None)


def measured_metrics(measured: Sequence[Measured], area: str) -> dict[str, float]:
    """Means over all rollouts, and the two distances over all prompts; `area` is reward or eval."""
    alignment = torch.cat([found.reward.alignment for found in measured])
    diversity = torch.cat([found.reward.diversity for found in measured])
    prefix = "eval/reward" if area == "eval" else "reward"
    metrics = {
        f"{prefix}/mean": (alignment - diversity).mean().item(),
        f"{area}/alignment/mean": alignment.mean().item(),
        f"{area}/diversity/mean": diversity.mean().item(),
        f"{area}/cfm": torch.cat([found.cfm for found in measured]).mean().item(),
    }
    if area == "reward":
        metrics["reward/std"] = (alignment - diversity).std(correction=1).item() if alignment.numel() > 1 else 0.0
    unbiased = [found.cfm_unbiased for found in measured if found.cfm_unbiased is not None]
    if unbiased:
        metrics[f"{area}/cfm_unbiased"] = torch.cat(unbiased).mean().item()
    return metrics


@contextlib.contextmanager
def states_of(blocks: Sequence[nn.Module], places: Tensor) -> Iterator[list[Tensor]]:
    """What these blocks put out at the places, in the order of the blocks, once a forward pass has run within."""
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
