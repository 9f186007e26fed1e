"""Preference pairs in micro-batches: both responses of a pair are in the same one, chosen first.

If packed, the prompt of a pair is computed once and both responses attend to it (data/packing.py).

Shapes: N trained tokens of a micro-batch, P its pairs; sums over responses are (P, 2), chosen first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.packing import Batch, Item, empty_batch, to_device
from data.rows.pairs import load_pairs
from data.types import Pair
from losses.types import LossOut
from trainer.config.blocks import RunConfig
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import PreferenceConfig
from trainer.offline.rows import begin_router, make_host_batches, read_responses
from trainer.parallel.comm import all_count
from trainer.policy.logps import Policy, token_logps
from trainer.policy.optim import term_metrics, total_loss
from trainer.policy.sharding import final_passes, pad_to_equal_count


@dataclass(frozen=True)
class PairBatch:
    """One micro-batch of complete pairs."""

    batch: Batch
    pairs: Tensor  # (P,) indices of its pairs within the step
    offset: Tensor  # (N,) index of each trained token within its response; negative in the prompt
    lengths: Tensor  # (P, 2) trained tokens of the responses
    chosen: Tensor  # (C,) indices of the trained tokens of the chosen side, prompt tokens included

    def sums(self, values: Tensor) -> Tensor:  # (N,) -> (P, 2)
        """Sum over the tokens of each response, excluding prompt tokens."""
        values = torch.where(self.offset >= 0, values, 0.0).double()  # in float32 the order of additions matters
        return values.new_zeros(len(self.batch.rows)).index_add(0, self.batch.slot, values).view(-1, 2)

    def to(self, device: torch.device | str) -> PairBatch:
        tensors = {name: to_device(x, device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, batch=self.batch.to(device), **tensors)


def pairs_of(cfg: PreferenceConfig, policy: Policy, specs: Sequence[str]) -> Sequence[Pair]:
    return read_responses(load_pairs, cfg, policy, specs)


def pair_items(pairs: Sequence[Pair], *, train_prompt: bool = False) -> list[Item]:
    """Two sequences per pair. train_prompt: also train the prompt of the chosen sequence (ORPO's likelihood)."""
    items = []
    for pair in pairs:
        num_prompt = len(pair.prompt_ids)
        for response, with_prompt in ((pair.chosen_ids, train_prompt), (pair.rejected_ids, False)):
            mask = [False] + [with_prompt] * (num_prompt - 1) + [True] * len(response)
            items.append(Item(ids=[*pair.prompt_ids, *response], mask=mask, prompt_length=num_prompt))
    return items


def pack_pairs(
    run: RunConfig, policy: Policy, pairs: Sequence[Pair], *, accumulation: int, train_prompt: bool = False
) -> list[PairBatch]:
    return pack_pair_items(run, policy, pair_items(pairs, train_prompt=train_prompt), accumulation=accumulation)


def pack_pair_items(run: RunConfig, policy: Policy, items: Sequence[Item], *, accumulation: int) -> list[PairBatch]:
    """Pack complete pairs into micro-batches, equally many on every rank. `items`: two per pair, chosen first."""
    batches = make_host_batches(
        run, policy, items, accumulation=accumulation, together=2, share_prompt=policy.shares_prompts
    )
    micro_batches = [pair_batch(batch, items).to(policy.device) for batch in batches]
    micro_batches = pad_to_equal_count(policy, micro_batches, pair_batch(empty_batch(policy.row_multiple), items))
    begin_router(policy, [mb.batch for mb in micro_batches])
    return micro_batches


def pair_batch(batch: Batch, items: Sequence[Item]) -> PairBatch:
    """Index a batch in main memory: on a GPU, counting the chosen tokens would be a host sync."""
    integers = {"dtype": torch.int64}  # even without pairs
    of_prompt = torch.tensor([sum(items[row].mask[: items[row].prompt_length]) for row in batch.rows], **integers)
    trained = torch.bincount(batch.slot, minlength=len(batch.rows))  # (2P,) including trained prompt tokens
    first = trained.cumsum(0) - trained  # (2P,) trained tokens are in row order
    return PairBatch(
        batch=batch,
        pairs=torch.tensor([row // 2 for row in batch.rows[::2]], **integers),
        offset=torch.arange(len(batch.slot)) - (first + of_prompt)[batch.slot],
        lengths=(trained - of_prompt).view(-1, 2),
        chosen=(batch.slot % 2 == 0).nonzero().flatten(),
    )


def sum_losses(
    policy: Policy,
    micro_batches: Sequence[PairBatch],
    loss_of: Callable[[PairBatch, Tensor], LossOut],  # from (N,) log-probs
    divisors: dict[str, Tensor],  # () of each term, over the whole step
    num_pairs: Tensor,  # () pairs of the whole step
    *,
    train: bool,
) -> MetricSums:
    """Loss, metrics and (train) gradients over all micro-batches of one step."""
    sums = MetricSums()
    for mb in final_passes(policy, micro_batches) if train else micro_batches:
        logp, entropy = token_logps(policy, mb.batch)  # (N,), (N,)
        out = loss_of(mb, logp)
        total = total_loss(out, divisors)
        if train:
            total.backward()
        sums.add({**out.metrics, **term_metrics(out)})
        sums.add({"loss/total": (total * num_pairs, len(mb.pairs)), "policy/entropy": (entropy.sum(), len(entropy))})
    return sums


def pair_evaluation(sums: MetricSums, num_rows: int) -> dict[str, float]:
    """Turn step metrics into held-out metrics."""
    means = sums.means()
    names = ("reward/accuracy", "reward/margin", "reward/chosen", "reward/rejected")
    return {
        "eval/loss": means["loss/total"],
        **{f"eval/{name}": means[name] for name in names},
        "eval/rows": all_count(num_rows),
    }
