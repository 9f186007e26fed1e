"""Pack the completions of one optimizer step into micro-batches, with columns of per-token numbers.

    batch = pack(cfg, policy, completions, advantage)         # MiniBatch: on the device, counted over all ranks
    for mb in passes(cfg, policy, batch): ...                 # its micro-batches; the last loop of the step
    mb.advantage, mb.engine_logp                              # (N,) columns
    t = mb.at(rows)                                           # the columns of n of its tokens

The head calls the loss on n tokens at a time, cut anywhere (trainer.policy.logps.token_loss). Numbers that concern a
whole completion or the step are therefore columns, filled in before the training pass (trainer/rl/lookahead.py).

Shapes: N = trained tokens of a micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.errors import UserError
from data.packing import Batch, Item, Plan, empty_batch, plan_batches, to_device
from kernels.linear_logprob import TokenLogps
from rollout.engine import Completion
from trainer.config.blocks import RunConfig
from trainer.config.groups import PolicyGradientConfig
from trainer.parallel.comm import all_count, all_sum
from trainer.policy.logps import Policy, token_logps
from trainer.policy.sharding import Passes, final_passes, pad_to_equal_count, to_device_and_pad

T = TypeVar("T")
Advantages = Tensor | Sequence[Sequence[float]]  # (B,), or for each completion one number per id


@dataclass
class MicroBatch:
    """One forward pass, and columns with one number for each of its N trained tokens. None: not needed."""

    batch: Batch
    is_idle: bool  # zero advantage throughout; only statistics of the step need it
    advantage: Tensor  # (N,)
    length: Tensor  # (N,) trained tokens of the token's completion
    engine_logp: Tensor  # (N,) log-prob by the engine that sampled; NaN = not reported
    replayed_logp: Tensor | None = None  # (N,) from the first use of a replayed group; NaN = not replayed
    # Filled in before the first step on the rollout: logps_at_start in trainer/methods/grpo.py.
    old_logp: Tensor | None = None  # (N,) denominator of the ratio; None: the current policy
    ref_logp: Tensor | None = None  # (N,) reference
    # Filled in before each training pass: look_ahead in trainer/rl/lookahead.py.
    mean_log_ratio: Tensor = field(init=False)  # (N,) mean of logp - old_logp over the completion, for GSPO
    total_log_ratio: Tensor = field(init=False)  # (N,) their sum, for rloo and vespo
    engine_gap: Tensor | None = None  # (N,) log-ratio of trainer to engine; None: old_logp - engine_logp of the token
    keep_geometric: Tensor | None = None  # (N,) bool; None: keep all
    keep_on_policy: Tensor | None = None  # (N,) bool
    keep_entropy: Tensor | None = None  # (N,) bool
    # Set inside the training pass.
    logp: Tensor = field(init=False)  # (n,) current policy, with gradient
    entropy: Tensor = field(init=False)  # (n,) with gradient
    log_ratio: Tensor = field(init=False)  # (n,) logp - old_logp, of the token or its completion, with gradient
    extra: dict[str, Tensor] = field(default_factory=dict)  # (N,) columns of the method

    def __post_init__(self) -> None:
        self.num_trained = len(self.batch.target)  # N, even after at()

    def at(self, rows: Tensor) -> MicroBatch:
        """The columns of the tokens with these indices."""
        selected = copy.copy(self)
        for name, column in vars(self).items():
            if isinstance(column, Tensor):
                setattr(selected, name, column[rows])
        selected.extra = {name: column[rows] for name, column in self.extra.items()}
        return selected


class MadeOnUse(Sequence[T]):
    """Objects that are made when they are first read, so that the GPU computes one while the host makes the next."""

    def __init__(self, makers: Sequence[Callable[[], T]]) -> None:
        self._makers, self._made = makers, dict[int, T]()

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        if index not in self._made:
            self._made[index] = self._makers[index]()
        return self._made[index]

    def __iter__(self) -> Iterator[T]:  # Sequence's own would end at an IndexError of a maker
        return map(self.__getitem__, range(len(self)))


@dataclass
class MiniBatch:
    """The micro-batches of one optimizer step on this rank, and counts over the whole step."""

    micro_batches: Sequence[MicroBatch]  # made when they are first read
    completions: list[Completion]  # the completions that are computed; those without signal are skipped
    rows: list[int]  # their indices in pack()'s completions
    num_tokens: Tensor  # () trained tokens, all ranks
    num_completions: Tensor  # () completions with a trained token, all ranks
    num_micro_batches: Tensor  # () micro-batches with a trained token, all ranks
    rank_tokens: Tensor  # () trained tokens of this rank
    rank_completions: Tensor  # ()
    skipped: int  # completions of this rank that are counted but not computed
    skipped_tokens: int
    has_replays: bool  # some rank has replayed groups with log-probs of an earlier policy
    entropy_coef: float  # weight of the entropy bonus
    num_uncertain: Tensor  # () tokens that the bonus averages over, all ranks (--top-entropy-quantile)
    number: int = 0  # index among the mini-batches of its rollout
    is_first: bool = True  # no optimizer step has been taken on the rollout yet
    at_start: list[TokenLogps] | None = None  # of the policy before that step; None: not computed

    @property
    def batches(self) -> list[Batch]:
        """The forward passes, without columns."""
        batches = [mb.batch for mb in self.micro_batches]
        return Passes(self.micro_batches.policy, batches) if isinstance(self.micro_batches, Passes) else batches

    @property
    def computed_tokens(self) -> int:
        """Tokens of all forward passes of this rank, prompts included."""
        return sum(mb.batch.num_tokens for mb in self.micro_batches)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to train on: no micro-batch, or only idle ones."""
        return all(mb.is_idle for mb in self.micro_batches)


def pack(
    cfg: PolicyGradientConfig,
    policy: Policy,
    completions: Sequence[Completion],
    advantage: Advantages,
    *,
    replayed_logps: Sequence[Sequence[float] | None] | None = None,
    extra: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> MiniBatch:
    """Pack completions into micro-batches that every step on them uses, and count them over all ranks.

    `replayed_logps`: log-probs from the first use of replayed groups; None for a completion, or NaN for a token, means
    the current weights. `extra`: columns of the method, for each completion one number per id.
    """
    options = cfg.policy_loss
    assert len(advantage) == len(completions), f"{len(advantage)} advantages for {len(completions)} completions"
    owner = [row for row, c in enumerate(completions) for _ in (c, *c.branches)]  # completion of each row
    has_branches = len(owner) > len(completions)
    if has_branches:  # each branch is a separate row
        if not isinstance(advantage, Tensor) or extra:
            raise UserError(
                f"completions: {len(owner) - len(completions)} branches (a client has rewritten its history), but this "
                "method has an advantage per token, only for the last branch; use a method with one per completion"
            )
        completions, advantage = [part for c in completions for part in (c, *c.branches)], advantage[owner]
        if replayed_logps is not None:
            pairs = zip(owner, completions, strict=True)
            replayed_logps = [None if replayed_logps[row] is None else part.logps for row, part in pairs]
    length = [0] * len(owner)  # trained tokens of each completion with its branches
    for row, c in zip(owner, completions, strict=True):
        length[row] += c.trained
    trained = [
        row
        for row, c in enumerate(completions)
        if c.trained and not (options.mask_truncated_completions and c.finish_reason == "length")
    ]
    can_skip = options.skip_zero_advantage_batches and not has_kl_term(cfg) and not has_entropy_bonus(cfg)
    # Both depend on all tokens of the micro-batch or step, so only micro-batches with zero advantage are skipped.
    needs_all = options.loss.average == "micro_batch" or options.top_entropy_quantile < 1
    if isinstance(advantage, Tensor):
        has_signal = (advantage != 0).tolist()
    else:
        has_signal = [any(x != 0 for x in values) for values in advantage]
    rows = [row for row in trained if not can_skip or needs_all or has_signal[row]]
    kept = [completions[row] for row in rows]
    episodes = [owner[row] for row in rows] if has_branches else None
    planned = plan_completions(cfg.run, policy, kept, share_prompt=cfg.share_prompt, episodes=episodes)
    empty = Plan([], partial(empty_batch, policy.row_multiple))
    plans = pad_to_equal_count(policy, [plan.to(policy.device) for plan in planned], empty)
    can_idle = can_skip and not policy.is_sharded  # ranks of a sharded model must run the same number of passes
    idle = [can_idle and not any(has_signal[rows[i]] for i in plan.rows) for plan in plans]
    computed = {i for plan, skip in zip(plans, idle, strict=True) if not skip for i in plan.rows}
    num_tokens = sum(completions[row].trained for row in trained)
    num_micro_batches = sum(len(plan.rows) > 0 for plan in plans)  # excluding padding micro-batches
    num_completions = len({owner[row] for row in trained})
    counts = torch.tensor([num_tokens, num_completions, num_micro_batches], dtype=torch.float32)
    counts = to_device(counts, policy.device)
    totals = all_sum(counts)
    replayed = [None if replayed_logps is None else replayed_logps[row] for row in rows]
    has_replays = all_count(any(x is not None for x in replayed), "replayed log-probs") > 0  # the same on all ranks
    unknown = [[float("nan")] * len(c.ids) if x is None else x for c, x in zip(kept, replayed, strict=True)]
    of_completion, of_ids = None, []  # the advantage: (K,), or for each completion one number per id
    if isinstance(advantage, Tensor):
        of_completion = to_device(advantage[rows].to(_wide(policy)), policy.device)
    else:
        of_ids = [advantage[row] for row in rows]

    def micro_batch(plan: Plan, is_idle: bool) -> MicroBatch:
        batch = plan.build()

        def flat(values: Sequence[Sequence[float]]) -> Tensor:
            return per_token(policy, kept, batch, values)

        lengths = torch.tensor([length[owner[rows[row]]] for row in batch.rows])
        lengths = to_device(lengths, batch.target.device)
        return MicroBatch(
            batch, is_idle,
            advantage=flat(of_ids) if of_completion is None else of_completion[batch.sequence],
            length=lengths[batch.slot],
            engine_logp=flat([c.logps for c in kept]),
            replayed_logp=flat(unknown) if has_replays else None,
            extra={name: flat([values[row] for row in rows]) for name, values in (extra or {}).items()},
        )  # fmt: skip

    packed = MadeOnUse([partial(micro_batch, plan, skip) for plan, skip in zip(plans, idle, strict=True)])
    return MiniBatch(
        micro_batches=Passes(policy, packed) if isinstance(plans, Passes) else packed,
        completions=kept, rows=[owner[row] for row in rows], has_replays=has_replays, entropy_coef=options.entropy_coef,
        num_tokens=totals[0], num_completions=totals[1], num_micro_batches=totals[2], num_uncertain=totals[0],
        rank_tokens=counts[0], rank_completions=counts[1],
        skipped=num_completions - len({owner[rows[i]] for i in computed}),
        skipped_tokens=num_tokens - sum(kept[i].trained for i in computed),
    )  # fmt: skip


def pack_completions(
    run: RunConfig, policy: Policy, completions: Sequence[Completion], *, share_prompt: bool
) -> list[Batch]:
    """The micro-batches of plan_completions, on the device."""
    plans = plan_completions(run, policy, completions, share_prompt=share_prompt)
    return to_device_and_pad(policy, [plan.build() for plan in plans])


def plan_completions(
    run: RunConfig, policy: Policy, completions: Sequence[Completion], *, share_prompt: bool,
    episodes: Sequence[int] | None = None,
) -> list[Plan]:  # fmt: skip
    """Micro-batches of prompts and completions; only completions are trained. A group may share one prompt.

    `episodes`: of each completion, if some are branches of one episode, which also share their turns.
    """
    items = [completion_item(c) for c in completions]
    return plan_batches(
        items if episodes is None else episode_items(items, episodes),
        accumulation=run.gradient_accumulation_steps,
        max_tokens=run.max_tokens_per_micro_batch,
        **policy.layout(packing=run.packing, share_prompt=share_prompt),
    )


def episode_items(items: Sequence[Item], episodes: Sequence[int]) -> list[Item]:
    """Assign items to episodes. The prompt of a branch becomes that of the first turn it continues."""
    prompts: dict[int, list[list[int]]] = {}
    for item, episode in zip(items, episodes, strict=True):
        prompts.setdefault(episode, []).append(item.ids[: item.prompt_length])
    for known in prompts.values():
        known.sort(key=len)
    made = []
    for item, episode in zip(items, episodes, strict=True):
        length = next(len(prompt) for prompt in prompts[episode] if item.ids[: len(prompt)] == prompt)
        made.append(replace(item, episode=episode, prompt_length=length))
    return made


def completion_item(c: Completion) -> Item:
    """Prompt and completion; the tokens that the model sampled are trained."""
    mask = bytes(len(c.prompt_ids)) + (bytes(c.mask) if c.mask else b"\1" * len(c.ids))  # faster than lists
    return Item([*c.prompt_ids, *c.ids], mask, len(c.prompt_ids), c.routes, c.sets)


def per_token(
    policy: Policy, completions: list[Completion], batch: Batch, values: Sequence[Sequence[float]]
) -> Tensor:  # (N,)
    """Flatten values per id to the trained tokens of a micro-batch."""
    flat = [np.zeros(0)]  # for a micro-batch without rows
    for i in batch.rows:
        numbers = np.fromiter(values[i], dtype=np.float64)
        assert len(numbers) == len(completions[i].ids), (len(numbers), len(completions[i].ids))
        flat.append(numbers[np.array(completions[i].mask, dtype=bool)] if completions[i].mask else numbers)
    column = torch.from_numpy(np.concatenate(flat))
    assert len(column) == len(batch.target), (len(column), len(batch.target))
    return to_device(column.to(_wide(policy)), policy.device)


@torch.no_grad()
def policy_logps(policy: Policy, batches: Sequence[Batch], *, temperature: float) -> list[TokenLogps]:
    """Log-probs and entropies under the current weights, with dropout off."""
    was_training = policy.model.training
    policy.model.eval()
    try:
        return [token_logps(policy, batch, temperature=temperature) for batch in batches]
    finally:
        policy.model.train(was_training)


def passes(
    cfg: PolicyGradientConfig, policy: Policy, batch: MiniBatch, *, is_last: bool = True
) -> Iterator[MicroBatch]:
    """Yield the micro-batches to run forward and backward.

    If there are none, yield one without tokens, so that all parameters get a gradient and all metrics a name.
    `is_last`: nothing else adds to the gradients of this step, so ranks sum them during the last backward pass.
    """
    micro_batches = [no_tokens(cfg, policy)] if batch.is_idle else batch.micro_batches
    for mb in final_passes(policy, micro_batches) if is_last else micro_batches:
        if not mb.is_idle:
            yield mb


def no_tokens(cfg: PolicyGradientConfig, policy: Policy) -> MicroBatch:
    none = torch.zeros(0, dtype=_wide(policy), device=policy.device)
    kept, correction = none.bool(), cfg.correction
    mb = MicroBatch(
        empty_batch(policy.row_multiple).to(policy.device), is_idle=False, advantage=none, length=none.long(),
        engine_logp=none, old_logp=none, ref_logp=none if has_kl_term(cfg) else None,
        keep_geometric=kept if correction.has_geometric_filter else None,
        keep_on_policy=None if correction.off_policy_mask_threshold is None else kept,
        keep_entropy=kept if cfg.policy_loss.top_entropy_quantile < 1 else None,
    )  # fmt: skip
    mb.mean_log_ratio = mb.total_log_ratio = none
    return mb


def has_kl_term(cfg: PolicyGradientConfig) -> bool:
    return cfg.policy_loss.beta > 0 and not cfg.advantage.kl_in_reward


def has_entropy_bonus(cfg: PolicyGradientConfig) -> bool:
    """True if the loss has an entropy bonus, now or later in the run."""
    return cfg.policy_loss.entropy_coef > 0 or cfg.policy_loss.entropy_target is not None


def _wide(policy: Policy) -> torch.dtype:
    return torch.promote_types(policy.compute_dtype, torch.float32)
