"""What one optimizer step trains on: completions packed into micro-batches, with columns of numbers for each token.

    batch = pack(cfg, policy, completions, advantage)         # a MiniBatch: on the device, counted over all ranks
    for mb in passes(policy, batch): ...                      # its micro-batches, the last loop of the step
    mb.advantage, mb.engine_logp, mb.at(rows).length, ...     # (N,) columns; at(rows): of some of the tokens

The loss sees only some tokens at a time, cut anywhere (trainer.policy.logps.token_loss). Whatever it needs of a whole
completion or of the step is therefore a column, filled in before the pass with gradient (trainer/rl/lookahead.py).

Shapes: N = trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.packing import Batch, Item, empty_batch, make_batches, to_device
from kernels.linear_logprob import TokenLogps
from rollout.engine import Completion
from trainer.config.blocks import RunConfig
from trainer.config.groups import PolicyGradientConfig
from trainer.parallel.comm import all_count, all_sum
from trainer.policy.logps import Policy, token_logps
from trainer.policy.sharding import Passes, final_passes, to_device_and_pad


@dataclass
class MicroBatch:
    """One forward pass, and columns with a number for each of its N trained tokens; None: nothing needs it."""

    batch: Batch
    idle: bool  # without any advantage: only statistics of the step need it
    advantage: Tensor  # (N,)
    length: Tensor  # (N,) trained tokens of the token's completion
    engine_logp: Tensor  # (N,) log-prob by the engine that sampled; NaN = it gave none
    earlier_logp: Tensor | None = None  # (N,) of a replayed group, as on its first use; NaN = not replayed
    # Before the first step on the rollout (trainer/methods/grpo.py).
    old_logp: Tensor | None = None  # (N,) what the ratio is against; None: the current policy
    ref_logp: Tensor | None = None  # (N,) of the reference
    # Before the pass with gradient, for what concerns whole completions or the step (trainer/rl/lookahead.py).
    mean_log_ratio: Tensor | None = None  # (N,) of logp - old_logp over the completion, for GSPO
    total_log_ratio: Tensor | None = None  # (N,) their sum, for rloo and vespo
    engine_gap: Tensor | None = None  # (N,) log-ratio of trainer to engine; None: old_logp - engine_logp of the token
    keep_geometric: Tensor | None = None  # (N,) bool; None: all
    keep_on_policy: Tensor | None = None
    keep_entropy: Tensor | None = None
    own: dict[str, Tensor] = field(default_factory=dict)  # (N,) columns that only this method has

    def __post_init__(self) -> None:
        self.num_trained = len(self.batch.target)  # N, also after at()

    def at(self, rows: Tensor) -> MicroBatch:
        """Columns of the tokens with these indices."""
        columns = {x.name: getattr(self, x.name) for x in fields(self)}
        some = {name: x[rows] for name, x in columns.items() if isinstance(x, Tensor)}
        return replace(self, **some, own={name: x[rows] for name, x in self.own.items()})


class Counts(NamedTuple):
    """Of completions with a trained token. All ()."""

    tokens: Tensor
    completions: Tensor
    micro_batches: Tensor


@dataclass
class MiniBatch:
    """One optimizer step of this rank."""

    micro_batches: list[MicroBatch]
    completions: list[Completion]  # those of them that are computed: others have nothing to teach
    rows: list[int]  # their places in what pack got
    counts: Counts
    total: Counts  # over all ranks
    skipped: int  # completions that are counted but not computed
    skipped_tokens: int
    replays: bool  # some rank has replayed groups with log-probs of an earlier policy
    entropy_coef: float  # weight of the entropy bonus
    num_uncertain: Tensor  # () tokens that it averages over, all ranks: those of --top-entropy-quantile
    number: int = 0  # of the mini-batch in its rollout
    first: bool = True  # the weights are still those that the rollout began with
    at_start: list[TokenLogps] | None = None  # by those weights; None: not computed

    @property
    def batches(self) -> list[Batch]:
        """The passes alone, watched like the micro-batches of a sharded model."""
        batches = [mb.batch for mb in self.micro_batches]
        return Passes(self.micro_batches.policy, batches) if isinstance(self.micro_batches, Passes) else batches

    @property
    def is_idle(self) -> bool:
        """Nothing to train on: no micro-batch, or all without advantage."""
        return all(mb.idle for mb in self.micro_batches)


def pack(
    cfg: PolicyGradientConfig,
    policy: Policy,
    completions: Sequence[Completion],
    advantage: Tensor | Sequence[Sequence[float]],  # (B,), or for each completion one number per id
    *,
    old_logps: Sequence[Sequence[float] | None] | None = None,
    own: dict[str, Sequence[Sequence[float]]] | None = None,
) -> MiniBatch:
    """Micro-batches, the same for every step on them. Counts are those of the completions given here, on all ranks.

    `old_logps`: of a replayed group, those of its first use; None for a completion, or NaN for a token, means the
    current weights. `own`: further columns, for each completion one number per id.
    """
    options = cfg.policy_loss
    assert len(advantage) == len(completions), f"{len(advantage)} advantages for {len(completions)} completions"
    trained = [
        row
        for row, c in enumerate(completions)
        if c.trained and not (options.mask_truncated_completions and c.finish_reason == "length")
    ]
    can_skip = options.skip_zero_advantage_batches and not has_kl_term(cfg) and not has_bonus(cfg)
    # These two depend on all tokens of a micro-batch or step: only whole micro-batches without advantage are skipped.
    needs_all = options.loss.average == "micro_batch" or options.top_entropy_quantile < 1
    is_tensor = isinstance(advantage, Tensor)
    teaches = (advantage != 0).tolist() if is_tensor else [any(x != 0 for x in each) for each in advantage]
    rows = [row for row in trained if not can_skip or needs_all or teaches[row]]
    kept = [completions[row] for row in rows]
    batches = pack_completions(cfg.run, policy, kept, share_prompt=cfg.share_prompt)
    skips = can_skip and not policy.is_sharded  # ranks of a sharded model must run the same passes, empty ones too
    idle = [skips and not any(teaches[rows[i]] for i in mb.rows) for mb in batches]
    computed = {i for mb, skip in zip(batches, idle, strict=True) if not skip for i in mb.rows}
    num_tokens = sum(completions[row].trained for row in trained)
    num_micro_batches = sum(len(mb.target) > 0 for mb in batches)  # without the empty ones that pad the list
    counts = torch.tensor([num_tokens, len(trained), num_micro_batches], dtype=torch.float32)
    counts = to_device(counts, policy.device)
    total = all_sum(counts)
    earlier = [None if old_logps is None else old_logps[row] for row in rows]
    replays = all_count(any(x is not None for x in earlier), "replayed log-probs") > 0  # ranks do the same passes
    unknown = [[float("nan")] * len(c.ids) if x is None else x for c, x in zip(kept, earlier, strict=True)]
    if is_tensor:
        of_completion = to_device(advantage[rows].to(_wide(policy)), policy.device)  # (K,)

    def columns(mb: Batch) -> dict[str, Tensor]:
        def each(values: Sequence[Sequence[float]]) -> Tensor:
            return per_token(policy, kept, mb, values)

        lengths = to_device(torch.tensor([kept[row].trained for row in mb.rows]), mb.target.device)
        return {
            "advantage": of_completion[mb.sequence] if is_tensor else each([advantage[row] for row in rows]),
            "length": lengths[mb.slot],
            "engine_logp": each([c.logps for c in kept]),
            "earlier_logp": each(unknown) if replays else None,
            "own": {name: each([values[row] for row in rows]) for name, values in (own or {}).items()},
        }

    packed = [MicroBatch(mb, skip, **columns(mb)) for mb, skip in zip(batches, idle, strict=True)]
    return MiniBatch(
        micro_batches=Passes(policy, packed) if isinstance(batches, Passes) else packed,
        completions=kept, rows=rows, counts=Counts(*counts), total=Counts(*total), replays=replays,
        skipped=len(trained) - len(computed), skipped_tokens=num_tokens - sum(kept[i].trained for i in computed),
        entropy_coef=options.entropy_coef, num_uncertain=total[0],
    )  # fmt: skip


def pack_completions(
    run: RunConfig, policy: Policy, completions: Sequence[Completion], *, share_prompt: bool
) -> list[Batch]:
    """Micro-batches of prompts and completions; only completions are trained. A group may share one prompt."""
    batches = make_batches(
        [completion_item(c) for c in completions],
        accumulation=run.gradient_accumulation_steps,
        max_tokens=run.max_tokens_per_micro_batch,
        packing=run.packing,
        share_prompt=share_prompt,
        multiple=policy.row_multiple,
        one_row=policy.packs_one_row,
    )
    return to_device_and_pad(policy, batches)


def completion_item(c: Completion) -> Item:
    """Prompt and completion; what the model sampled is trained."""
    mask = [False] * len(c.prompt_ids) + (c.mask or [True] * len(c.ids))
    return Item([*c.prompt_ids, *c.ids], mask, len(c.prompt_ids))


def per_token(policy: Policy, kept: list[Completion], mb: Batch, values: Sequence[Sequence[float]]) -> Tensor:  # (N,)
    """A number for each id of each completion, as a tensor over the trained tokens of a micro-batch."""
    parts = [np.zeros(0)]  # for a micro-batch without rows
    for i in mb.rows:
        own = np.fromiter(values[i], dtype=np.float64)
        assert len(own) == len(kept[i].ids), (len(own), len(kept[i].ids))
        parts.append(own[np.array(kept[i].mask, dtype=bool)] if kept[i].mask else own)
    flat = torch.from_numpy(np.concatenate(parts))
    assert len(flat) == len(mb.target), (len(flat), len(mb.target))
    return to_device(flat.to(_wide(policy)), policy.device)


@torch.no_grad()
def score(policy: Policy, batches: Sequence[Batch], *, temperature: float) -> list[TokenLogps]:
    """Log-probs and entropies of the current policy, without an adapter's dropout."""
    was_training = policy.model.training
    policy.model.eval()
    try:
        return [token_logps(policy, mb, temperature=temperature) for mb in batches]
    finally:
        policy.model.train(was_training)


def passes(
    cfg: PolicyGradientConfig, policy: Policy, batch: MiniBatch, *, is_last: bool = True
) -> Iterator[MicroBatch]:
    """The micro-batches to run forward and backward; one without tokens if there are none, so that all parameters get
    a gradient and all metrics their names. `is_last`: nothing adds to the gradients of this step after them, so that
    ranks sum them during the last backward pass."""
    micro_batches = [no_tokens(cfg, policy)] if batch.is_idle else batch.micro_batches
    for mb in final_passes(policy, micro_batches) if is_last else micro_batches:
        if not mb.idle:
            yield mb


def no_tokens(cfg: PolicyGradientConfig, policy: Policy) -> MicroBatch:
    none = torch.zeros(0, dtype=_wide(policy), device=policy.device)
    kept, correction = none.bool(), cfg.correction
    return MicroBatch(
        empty_batch(policy.row_multiple).to(policy.device), idle=False, advantage=none, length=none.long(),
        engine_logp=none, old_logp=none, ref_logp=none if has_kl_term(cfg) else None, mean_log_ratio=none,
        total_log_ratio=none, keep_geometric=kept if correction.has_geometric_filter else None,
        keep_on_policy=None if correction.off_policy_mask_threshold is None else kept,
        keep_entropy=kept if cfg.policy_loss.top_entropy_quantile < 1 else None,
    )  # fmt: skip


def has_kl_term(cfg: PolicyGradientConfig) -> bool:
    return cfg.policy_loss.beta > 0 and not cfg.advantage.kl_in_reward


def few_tokens_teach(cfg: PolicyGradientConfig) -> bool:
    """Most tokens have no gradient, so that the head had better leave them out."""
    return cfg.policy_loss.top_entropy_quantile < 1 and not has_kl_term(cfg)


def has_bonus(cfg: PolicyGradientConfig) -> bool:
    """Whether the loss may have an entropy bonus, now or later in the run."""
    return cfg.policy_loss.entropy_coef > 0 or cfg.policy_loss.entropy_target is not None


def _wide(policy: Policy) -> torch.dtype:
    return torch.promote_types(policy.compute_dtype, torch.float32)
