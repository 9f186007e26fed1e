"""One optimizer step of strided energy-based fine-tuning: continue documents at their anchors, compute gradients.

    step = continue_all(cfg, policy, documents, numbers=...)        # rows of documents with their continuations
    step = add_rewards(network, step)                               # and advantages
    sums = backward(cfg, policy, step)                              # gradients; the caller clips and steps

Training is on-policy with one update per sample: the ratio is 1 and nothing is clipped. The gradient does not depend on
how documents are assigned to rows: the policy loss is a mean over all generated tokens of the step, the cross-entropy a
mean over all document tokens. Each rank has its own documents, or none, and is padded with empty rows to the same
number of rows. Sampling uses gathered weights, since the number of forward passes differs between ranks.

Shapes, per row: A anchors, n continuations of each, G tokens per continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from data.packing import Item, make_batches, to_device
from data.strided import Document, StridedBatch, empty_strided, make_strided
from kernels.decode.draw import signed_64
from kernels.linear_logprob import TokenLogps, linear_logprob_loss
from losses import ebft
from losses.importance import log_difference
from losses.types import Metrics
from rollout.engines.strided import continue_documents
from rollout.schedule.planner import sample_seed
from trainer.config.ebft import EbftConfig
from trainer.ebft.features import FeatureNetwork, MeasuredFeatures, measured_metrics, of_all_ranks, read_numbers
from trainer.metrics.metrics import MetricSums
from trainer.offline.rows import indices_of_this_rank, rows_of_this_rank
from trainer.parallel.comm import all_sum, world_size
from trainer.policy.attention import span_masks
from trainer.policy.logps import Policy, as_head_takes, causal_lm, head_of, hidden_states, skips, token_logps
from trainer.policy.sharding import final_passes, gathered_weights, pad_to_equal_count, to_device_and_pad

EVAL_SEED = -1  # for held-out continuations; the seed of a run is 0 or more


@dataclass(frozen=True)
class StridedStep:
    """The documents of a step; lists have one entry per row."""

    rows: list[StridedBatch]  # with generated tokens
    behaviour: list[Tensor]  # (A, n, G) log-probs at sampling time
    measured: list[MeasuredFeatures] = field(default_factory=list)
    advantage: list[Tensor] = field(default_factory=list)  # (A, n)

    @property
    def num_computed(self) -> int:
        return sum(row.num_computed for row in self.rows)


def continue_all(
    cfg: EbftConfig,
    policy: Policy,
    documents: Sequence[Document],
    *,
    seed: int,
    numbers: Sequence[int],
    multiple: int = 1,
) -> StridedStep:
    """Rows of documents, each continued from all its anchors. `numbers` index the documents within the run.

    Row lengths are padded to a multiple of `multiple` too, since the feature network may use another attention
    implementation than the policy.

    The seed of a continuation depends only on the number of its document, its anchor and its sample index, not on the
    row, the rank, or whether the run was resumed.
    """
    lm, plan = causal_lm(policy.model), cfg.strided.plan
    of_document = [signed_64(sample_seed(seed, number)) for number in numbers]
    of_document = to_device(torch.tensor(of_document, dtype=torch.int64), policy.device)
    of_sample = torch.arange(plan.n_samples_per_prompt, device=policy.device)
    multiple = max(multiple, policy.row_multiple)
    planned = make_strided(documents, plan, max_tokens=cfg.run.max_tokens_per_micro_batch, multiple=multiple)
    rows, behaviour = pad_to_equal_count(policy, planned, empty_strided(plan, multiple=multiple)), []
    with gathered_weights(policy):
        for number in range(len(rows)):  # ranks run different numbers of passes here
            row = rows[number].to(policy.device)
            offset = row.anchor.unsqueeze(1) * plan.n_samples_per_prompt + of_sample
            continued = continue_documents(
                lm, row, partial(span_masks, lm.config), seeds=of_document[row.document].unsqueeze(1) + offset,
                temperature=cfg.temperature, autocast_dtype=policy.autocast_dtype,
            )  # fmt: skip
            rows[number] = row.with_generated(continued.ids)
            behaviour.append(continued.logps)
    return StridedStep(rows, behaviour)


def add_rewards(network: FeatureNetwork, step: StridedStep) -> StridedStep:
    """Add the rewards of all continuations, and advantages within the group of each anchor."""
    measured = [network.measure(network.of_blocks(row)) for row in step.rows]
    estimator = network.cfg.advantage_estimator
    advantage = [ebft.advantage_of(features.reward, advantage_estimator=estimator) for features in measured]
    return replace(step, measured=measured, advantage=advantage)


def backward(cfg: EbftConfig, policy: Policy, step: StridedStep) -> MetricSums:
    """Gradients of one optimizer step."""
    features, lm = cfg.features, causal_lm(policy.model)
    generated, text = (
        all_sum(torch.full((), float(count), device=policy.device))
        for count in (sum(row.place.numel() for row in step.rows), sum(len(row.ce_target) for row in step.rows))
    )
    divisors = {"policy": generated, "ce": text}  # () of the step, all ranks
    sums = MetricSums()

    def policy_loss(tokens: TokenLogps, rows: Tensor, advantage: Tensor, behaviour: Tensor) -> tuple[Tensor, Metrics]:
        loss, count = (-tokens.logp * advantage[rows]).sum(), len(rows)  # on policy: no ratio, no clip
        gap = log_difference(tokens.logp.detach(), behaviour[rows])
        return features.rl_coef * loss / generated.clamp(min=1), {
            "loss/policy": (loss, count),
            "policy/entropy": (tokens.entropy.sum(), count),
            "policy/behaviour_gap": (gap.abs().sum(), count),
            "policy/behaviour_kl": ((torch.expm1(gap) - gap).sum(), count),
        }

    def target_loss(tokens: TokenLogps, rows: Tensor) -> tuple[Tensor, Metrics]:
        loss = -tokens.logp.sum()
        return features.ce_coef * loss / text.clamp(min=1), {"loss/ce": (loss, len(rows))}

    rows = final_passes(policy, step.rows)
    for row, behaviour, advantage in zip(rows, step.behaviour, step.advantage, strict=True):
        losses, options = [], {"ignore_index": None, "skip": skips(policy)}
        hidden = hidden_states(policy, lm, row)  # (T, D)
        generated_at, predictor, of_token = (x.flatten() for x in (row.place, row.predictor, row.per_token(advantage)))
        if features.rl_coef:
            loss_fn = partial(policy_loss, advantage=of_token, behaviour=behaviour.flatten())
            losses.append(linear_logprob_loss(
                as_head_takes(policy, hidden[predictor]), target=row.input_ids[0, generated_at], loss_fn=loss_fn,
                temperature=cfg.temperature, **options, **head_of(lm),
            ))  # fmt: skip
        if features.ce_coef:
            losses.append(linear_logprob_loss(
                as_head_takes(policy, hidden[row.ce_index]), target=row.ce_target, loss_fn=target_loss, **options,
                **head_of(lm),
            ))  # fmt: skip
        total = torch.stack([loss for loss, _ in losses]).sum()
        total.backward()
        for _, pieces in losses:
            for metrics in pieces:
                sums.add(metrics)
        sums.add({"loss/total": (total.detach(), 0.0)})
    for name, coef in (("policy", features.rl_coef), ("ce", features.ce_coef)):
        if coef:  # 0 if the step has no such token
            sums.add({f"loss/{name}": (torch.zeros_like(generated), divisors[name] == 0)})
    share = 1 / world_size()  # sums to 1 over ranks
    sums.add({"loss/total": (torch.zeros((), device=policy.device), share)})
    return sums


def check_gap(cfg: EbftConfig, policy: Policy, sums: MetricSums, step: int) -> None:
    """Raise if log-probs in training differ from those in sampling: same weights, two attention implementations."""
    gap = sums.means().get("policy/behaviour_gap", 0.0)
    limit = 1e-3 if policy.compute_dtype == torch.float32 else 0.25
    if cfg.lora.dropout == 0 and not gap < limit:  # dropout is active in training only
        raise UserError(
            f"step {step}: log-probs differ by {gap:.3g} between sampling and training (limit {limit}); "
            f"model={policy.source} computes different results from a cache; use --mode structured"
        )


def sample_rows(policy: Policy, documents: Sequence[Document], step: StridedStep) -> list[dict[str, Any]]:
    """Rows for samples.jsonl: the continuations of one anchor in the middle of the step."""
    rows = [number for number, row in enumerate(step.rows) if len(row.anchor)]
    if not rows:
        return []
    number = rows[len(rows) // 2]
    row, place = step.rows[number], len(step.rows[number].anchor) // 2
    number_of_document, anchor = torch.stack([row.document[place], row.anchor[place]]).tolist()
    document = documents[number_of_document]

    def text(ids: list[int]) -> str:
        return policy.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    reward = step.measured[number].reward
    completions = row.input_ids[0, row.place[place]].tolist()  # (n, G)
    scores = (reward.alignment[place], reward.diversity[place], step.advantage[number][place])  # (n,) each
    alignment, diversity, advantage = torch.stack([x.double() for x in scores]).tolist()
    return [
        {
            "prompt": text(document.ids[:anchor]),
            "completion": text(completions[sample]),
            "truth": text(document.ids[anchor : anchor + row.place.shape[2]]),
            "rewards": {
                "alignment": alignment[sample],
                "diversity": diversity[sample],
            },
            "advantage": advantage[sample],
            "source": document.source,
        }
        for sample in range(row.place.shape[1])
    ]


def step_metrics(network: FeatureNetwork, step: StridedStep) -> dict[str, float]:
    """Metrics of the step's continuations on all ranks; only rollout/anchors if there are none."""
    measured = of_all_ranks(step.measured)
    if not len(measured.cfm):
        return {"rollout/anchors": 0.0}
    advantage = ebft.advantage_of(measured.reward, advantage_estimator=network.cfg.advantage_estimator)
    return {
        **measured_metrics([measured], "reward"),
        **read_numbers(
            {
                "policy/advantage_std": advantage.std(correction=0),
                "reward/zero_std_frac": (advantage.abs().amax(dim=1) < 1e-6).float().mean(),
            }
        ),
        "rollout/anchors": float(len(measured.cfm)),
    }


def evaluate(
    cfg: EbftConfig, policy: Policy, network: FeatureNetwork, documents: Sequence[Document], *, batch_size: int
) -> dict[str, float]:
    """Continue held-out documents with fixed seeds, and compute the cross-entropy of their tokens.

    Every rank gets all documents and evaluates its share.
    """
    measured, sums, multiple = [], MetricSums(), network.policy.row_multiple
    for first in range(0, len(documents), batch_size):
        chunk = documents[first : first + batch_size]
        indices = indices_of_this_rank(chunk, cfg.strided.plan.size)
        step = continue_all(
            cfg, policy, [chunk[i] for i in indices], seed=EVAL_SEED,
            numbers=[first + i for i in indices], multiple=multiple,
        )  # fmt: skip
        measured += add_rewards(network, step).measured
    items = [Item(document.ids, trained_mask(document)) for document in rows_of_this_rank(documents)]
    batches = make_batches(items, max_tokens=cfg.run.max_tokens_per_micro_batch, **policy.layout())
    for batch in to_device_and_pad(policy, batches):
        logp = token_logps(policy, batch).logp
        sums.add({"eval/nll": (-logp.sum(), torch.tensor(float(len(logp)), device=policy.device))})
    return {**measured_metrics([of_all_ranks(measured)], "eval"), **sums.means(), "eval/rows": len(documents)}


def trained_mask(document: Document) -> list[bool]:
    """True at the tokens of a document that the cross-entropy covers."""
    trained = set(document.trained())
    return [position in trained for position in range(len(document.ids))]
