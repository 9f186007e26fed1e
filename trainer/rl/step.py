"""One optimizer step on scored completions: from advantages to gradients, for every loss of losses/policy.py.

    batch = prepare(cfg, policy, completions, advantage)      # pack, and passes without gradient, where needed
    for part in session.updates(batch):                       # session.prepare does so for each mini-batch
        sums = backward(cfg, policy, part)                    # gradients; the session clips and steps

`cfg` is a method's Config with policy_loss, correction, advantage, run, temperature, share_prompt, num_iterations and
max_completion_length. The gradient is the same however the completions are cut into micro-batches, ordered or dealt to
ranks (bnpo excepted, which is about the cut).

The head hands a loss only some tokens at a time, cut anywhere. What has to be known of whole completions or of the step
(TokenInputs) is therefore computed before the pass with gradient. The passes besides that one:

    of the reference     beta above 0                                                          prepare
    of the old policy    several steps on a rollout, unless the ratio is against the engine    prepare
    of the policy now    what concerns whole completions or the step: a sequence ratio that    backward, unless that is
                         is not 1, a sequence correction, a geometric or off-policy filter,    the old policy, scored
                         the entropy quantile (extra_passes)                                   in prepare

so none with the defaults. The old policy is the one that prepare sees, before the first step on the rollout. On that
step the policy is still the old one: its ratio is 1, and the correction of a token needs only the log-prob that the
loss has.

Shapes: N = trained tokens of a micro-batch, K = completions trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.packing import Batch, Item, make_batches, to_device
from kernels.linear_logprob import TokenLogps
from losses import importance
from losses.advantage import effective_sample_frac, moments
from losses.entropy import adapted_coef, entropy_bonus, keep_top_entropy
from losses.importance import sequence_mean, sequence_sum
from losses.kl import KL_ESTIMATORS, MAX_LOG_RATIO, kl_penalty
from losses.policy import MIN_LOG_WEIGHT, Tokens, sequence_log_ratio, token_log_ratio
from losses.types import LossOut, merge
from rollout.engine import Completion
from trainer.config.blocks import RunConfig
from trainer.config.policy import PolicyLossConfig
from trainer.metrics.metrics import MetricSums
from trainer.parallel.comm import all_count, all_sum, data_size
from trainer.parallel.quantile import tolerance_of, top_threshold
from trainer.policy.logps import Policy, reference_logps, token_logps, token_loss
from trainer.policy.optim import total_loss
from trainer.policy.sharding import final_passes, to_device_and_pad


@dataclass(frozen=True)
class StepBatch:
    """Completions ready to train on. Lists are per micro-batch."""

    completions: list[Completion]  # K of those that prepare got: the rest has nothing to teach and is not computed
    rows: list[int]  # their places in what prepare got
    micro_batches: list[Batch]
    advantage: list[Tensor]  # (N,)
    idle: list[bool]  # micro-batches without advantage: only statistics of the step need them
    behaviour: list[Tensor]  # (N,) log-probs of the engine; NaN = it gave none
    old: list[TokenLogps] | None  # of the old policy; None: there is only one step, or ratios are against the engine
    has_earlier: bool  # `old` holds log-probs of a policy before the old one, for replayed groups
    reference: list[Tensor] | None  # (N,)
    local: dict[str, Tensor]  # () counts of this rank, as PolicyLoss.denominator takes them
    total: dict[str, Tensor]  # () the same over all ranks
    skipped: int  # completions of this rank that are counted but not computed
    skipped_tokens: int
    first: bool = True  # the weights are still those that prepare saw
    number: int = 0  # of the mini-batch: batch.parts[number] are its groups
    entropy_coef: float | None = None  # weight of the entropy bonus; None: that of the config


def prepare(
    cfg: Any,
    policy: Policy,
    completions: Sequence[Completion],
    advantage: Tensor | Sequence[Sequence[float]],  # (B,), or for each completion one number per id
    *,
    old_logps: Sequence[Sequence[float] | None] | None = None,
    num_steps: int | None = None,
) -> StepBatch:
    """Micro-batches, the same for every step on them, and what has to be known before the first step.

    `old_logps` are log-probs that the ratio is taken against, one list per completion as long as its ids (a replayed
    group brings those of its first use); None for a completion, or NaN for a token, means the current weights. They
    are not read where the ratio is against the engine anyway. `num_steps` is the number of optimizer steps of the whole
    rollout, if not num_iterations: with more than one, the log-probs of the current weights are kept.
    """
    options, correction = cfg.policy_loss, cfg.correction
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
    teaches = (advantage != 0).tolist() if is_tensor else [any(x != 0 for x in own) for own in advantage]
    rows = [row for row in trained if not can_skip or needs_all or teaches[row]]
    kept = [completions[row] for row in rows]
    of_kept = advantage[rows] if is_tensor else [advantage[row] for row in rows]
    micro_batches = pack_completions(cfg.run, policy, kept, share_prompt=cfg.share_prompt)
    # Ranks of a sharded model must run the same passes, empty ones too.
    skips = can_skip and not policy.is_sharded
    idle = [skips and not any(teaches[rows[i]] for i in mb.rows) for mb in micro_batches]
    computed = {i for mb, skip in zip(micro_batches, idle, strict=True) if not skip for i in mb.rows}
    num_tokens = sum(completions[row].trained for row in trained)
    num_micro_batches = sum(len(mb.target) > 0 for mb in micro_batches)  # without the empty ones that pad the list
    names = ("num_tokens", "num_completions", "num_micro_batches")
    counts = torch.tensor([num_tokens, len(trained), num_micro_batches], dtype=torch.float32)
    counts = to_device(counts, policy.device)
    batch = StepBatch(
        completions=kept, rows=rows, micro_batches=micro_batches, idle=idle,
        advantage=token_advantages(policy, kept, micro_batches, of_kept),
        behaviour=[per_token(policy, kept, mb, [c.logps for c in kept]) for mb in micro_batches],
        old=None, has_earlier=False, reference=None,
        local=dict(zip(names, counts, strict=True)), total=dict(zip(names, all_sum(counts), strict=True)),
        skipped=len(trained) - len(computed), skipped_tokens=num_tokens - sum(kept[i].trained for i in computed),
    )  # fmt: skip
    earlier = [None if old_logps is None else old_logps[row] for row in rows]
    has_earlier = all_count(any(x is not None for x in earlier), "replayed log-probs") > 0  # ranks do the same passes
    if correction.proximal_policy == "step" and ((num_steps or cfg.num_iterations) > 1 or has_earlier):
        batch = replace(batch, old=_score_old(cfg, policy, batch, earlier), has_earlier=has_earlier)
    if has_kl_term(cfg):
        reference = [reference_logps(policy, mb, temperature=cfg.temperature) for mb in micro_batches]
        batch = replace(batch, reference=reference)
    return batch


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


def token_advantages(
    policy: Policy,
    kept: list[Completion],
    micro_batches: Sequence[Batch],
    advantage: Tensor | Sequence[Sequence[float]],  # (K,), or for each completion one number per id
) -> list[Tensor]:  # (N,) of each micro-batch
    if not isinstance(advantage, Tensor):
        return [per_token(policy, kept, mb, advantage) for mb in micro_batches]
    own = to_device(advantage.to(_wide(policy)), policy.device)
    return [own[mb.sequence] for mb in micro_batches]


def _score_old(cfg: Any, policy: Policy, batch: StepBatch, earlier: list[Sequence[float] | None]) -> list[TokenLogps]:
    """Log-probs of the current policy, except where there are earlier ones."""
    scored = score(cfg, policy, batch.micro_batches)
    unknown = float("nan")
    values = [[unknown] * len(c.ids) if x is None else x for c, x in zip(batch.completions, earlier, strict=True)]
    known = [per_token(policy, batch.completions, mb, values) for mb in batch.micro_batches]
    return [now._replace(logp=torch.where(x.isnan(), now.logp, x)) for now, x in zip(scored, known, strict=True)]


@torch.no_grad()
def score(cfg: Any, policy: Policy, micro_batches: Sequence[Batch]) -> list[TokenLogps]:
    """Log-probs and entropies of the current policy, without an adapter's dropout."""
    was_training = policy.model.training
    policy.model.eval()
    try:
        return [token_logps(policy, mb, temperature=cfg.temperature) for mb in micro_batches]
    finally:
        policy.model.train(was_training)


def _wide(policy: Policy) -> torch.dtype:
    return torch.promote_types(policy.compute_dtype, torch.float32)


def backward(
    cfg: Any,
    policy: Policy,
    batch: StepBatch,
    *,
    value_loss: Callable[[int, Tensor], LossOut] | None = None,
    is_last: bool = False,
) -> MetricSums:
    """Gradients of one optimizer step, and its metrics.

    `value_loss(number, states)` is a further term named value: the loss of a head on the (N, D) states that predict the
    tokens of micro-batch `number`, averaged over the tokens of the step. It needs skip_zero_advantage_batches off.

    `is_last`: nothing else adds to the gradients of the policy in this step, so ranks can sum them during the passes.
    """
    now = scores_beforehand(cfg, policy, batch)
    threshold, num_kept = _entropy_threshold(cfg, policy, batch, now)
    shared = cfg.policy_loss.loss.denominator(max_completion_length=cfg.max_completion_length, **batch.total)
    denominators = {"policy": shared, "kl": shared, "entropy": num_kept, "value": batch.total["num_tokens"]}
    bonus = cfg.policy_loss.entropy_coef if batch.entropy_coef is None else batch.entropy_coef
    sums, ratios = MetricSums(), torch.zeros(2, 3, dtype=torch.float64, device=policy.device)
    sparse = threshold is not None and not has_kl_term(cfg)  # few tokens are trained on
    for number, mb in enumerate(final_passes(policy, batch.micro_batches) if is_last else batch.micro_batches):
        if batch.idle[number]:
            continue
        inputs = token_inputs(cfg, batch, number, None if now is None else now[number], threshold)
        num_tokens = torch.full((), len(mb.target), device=policy.device)

        def loss_of(tokens: TokenLogps, rows: Tensor, inputs=inputs, num_tokens=num_tokens) -> tuple[Tensor, Any]:
            out = loss(cfg, tokens, inputs.at(rows), num_tokens, entropy_coef=bonus)
            return total_loss(out, denominators), (out, tokens.logp.detach())

        def value_of(states: Tensor, number=number) -> Tensor:
            out = value_loss(number, states)
            add_loss_metrics(sums, out)
            return total_loss(out, denominators)

        options = {"temperature": cfg.temperature, "sparse": sparse}
        total, parts = token_loss(policy, mb, loss_of, states_loss=value_loss and value_of, **options)
        total.backward()
        for out, _ in parts:
            add_loss_metrics(sums, out)
        logp = torch.cat([logp for _, logp in parts])
        ratios += add_gap_metrics(cfg, sums, inputs, logp, mb.slot, len(mb.rows))
        sums.add({"loss/total": (total, torch.zeros_like(total))})
    if all(batch.idle):  # or there is no micro-batch at all
        _leave_zero_gradients(policy)
        add_names(cfg, sums, policy.device, entropy_coef=bonus)
    add_step_metrics(sums, batch, denominators, all_sum(ratios))
    return sums


def extra_passes(cfg: Any) -> set[str]:
    """What the loss, the correction and the filters must know before the pass with gradient; see scores_beforehand."""
    loss, correction = cfg.policy_loss.loss, cfg.correction
    by_completion = correction.vllm_importance_sampling_mode in importance.SEQUENCE_CORRECTIONS
    needs = {
        "ratio of a completion": cfg.policy_loss.importance_sampling_level == "sequence"
        or loss.ratio in ("completion", "weight"),
        "gap of a completion": correction.is_on
        and (by_completion or correction.has_geometric_filter or loss.ratio == "weight"),
        "policy of the step": cfg.policy_loss.top_entropy_quantile < 1
        or correction.off_policy_mask_threshold is not None,
    }
    return {name for name, needed in needs.items() if needed}


def scores_beforehand(cfg: Any, policy: Policy, batch: StepBatch) -> list[TokenLogps] | None:
    """Log-probs and entropies of the current policy over whole completions; None where nothing needs them.

    The ratio of a completion is 1, and needs no pass, where it is taken against the policy itself. The gap to the
    engine is that of the old policy, where that was scored.
    """
    against_itself = batch.old is None and cfg.correction.proximal_policy == "step"
    known = {"ratio of a completion": against_itself, "gap of a completion": batch.old is not None}
    if all(known.get(need) for need in extra_passes(cfg)):
        return None
    return batch.old if batch.first and not batch.has_earlier and batch.old else score(cfg, policy, batch.micro_batches)


def _entropy_threshold(
    cfg: Any, policy: Policy, batch: StepBatch, now: list[TokenLogps] | None
) -> tuple[Tensor | None, Tensor]:  # (), ()
    """Least entropy of a token that is trained on, None for all; and how many such tokens the step has."""
    if cfg.policy_loss.top_entropy_quantile == 1:
        return None, batch.total["num_tokens"]
    assert now is not None, "the entropy quantile needs a pass beforehand"
    entropy = torch.cat([torch.zeros(0, dtype=_wide(policy), device=policy.device), *(x.entropy for x in now)])
    tolerance = tolerance_of(policy.compute_dtype)
    threshold = top_threshold(entropy, top=cfg.policy_loss.top_entropy_quantile, tolerance=tolerance)
    return threshold, all_sum(keep_top_entropy(entropy, threshold).sum())


def token_inputs(
    cfg: Any,
    batch: StepBatch,
    number: int,
    now: TokenLogps | None,
    threshold: Tensor | None,  # ()
) -> TokenInputs:
    """What the loss of a micro-batch needs, from what was computed before it."""
    options, correction = cfg.policy_loss, cfg.correction
    mb, behaviour = batch.micro_batches[number], batch.behaviour[number]
    mask = torch.ones_like(mb.target, dtype=torch.bool)
    per_completion = {"mask": mask, "sequence": mb.slot, "num_sequences": len(mb.rows)}
    trainer_old = None if batch.old is None else batch.old[number].logp
    old = behaviour if correction.proximal_policy == "behaviour" else trainer_old
    lengths = to_device(torch.tensor([batch.completions[row].trained for row in mb.rows]), mb.target.device)
    reference = None if batch.reference is None else batch.reference[number]
    inputs = TokenInputs(batch.advantage[number], lengths[mb.slot], behaviour, old, reference)
    trainer_logp = trainer_old if trainer_old is not None or now is None else now.logp
    if correction.is_on and trainer_logp is not None:
        m = importance.mismatch(trainer_logp, behaviour, **per_completion)
        inputs = inputs._replace(correction=correct(cfg, m))
        if correction.has_geometric_filter:
            keep = importance.keep_geometric(m, low=correction.geometric_min, high=correction.geometric_max)
            inputs = inputs._replace(keep_geometric=keep)
    if now is not None and old is not None:
        moved = importance.log_difference(now.logp, old, mask)
        inputs = inputs._replace(
            mean=sequence_mean(moved, **per_completion)[mb.slot], total=sequence_sum(moved, **per_completion)[mb.slot]
        )
    if now is not None and correction.off_policy_mask_threshold is not None:
        sampled = behaviour if trainer_old is None else torch.where(behaviour.isnan(), trainer_old, behaviour)
        drift = importance.sequence_drift(now.logp, sampled, **per_completion)[mb.slot]
        keep = importance.keep_on_policy(inputs.advantage, drift, threshold=correction.off_policy_mask_threshold)
        inputs = inputs._replace(keep_on_policy=keep)
    if threshold is not None:
        inputs = inputs._replace(keep_entropy=keep_top_entropy(now.entropy, threshold))
    if options.loss.ratio == "weight" and inputs.correction is not None:
        # The weight of the completion takes the place of the correction, and includes it.
        log_weight = inputs.correction.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
        if correction.vllm_importance_sampling_mode not in importance.SEQUENCE_CORRECTIONS:
            log_weight = sequence_sum(log_weight, **per_completion)[mb.slot]
        total = log_weight if inputs.total is None else inputs.total + log_weight
        inputs = inputs._replace(total=total, correction=None)
    return inputs


def _leave_zero_gradients(policy: Policy) -> None:
    """No token has a gradient: the optimizer steps as for gradients of zero."""
    for p in policy.model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


# The loss of some trained tokens.


class TokenInputs(NamedTuple):
    """What the loss needs of each trained token besides the pass itself. All (N,)."""

    advantage: Tensor
    length: Tensor  # trained tokens of the token's completion
    behaviour: Tensor
    old: Tensor | None = None  # what the ratio is against; None: the current policy
    reference: Tensor | None = None
    correction: Tensor | None = None  # weight for the gap to the engine; None: none, or the loss takes the token's own
    mean: Tensor | None = None  # of logp - old over the completion; None: 0
    total: Tensor | None = None  # log of the completion's own ratio or weight, for rloo and vespo; None: 0
    keep_geometric: Tensor | None = None  # bool; None: all
    keep_on_policy: Tensor | None = None
    keep_entropy: Tensor | None = None

    def at(self, rows: Tensor) -> TokenInputs:
        return TokenInputs(*(None if x is None else x[rows] for x in self))


def loss(
    cfg: Any, tokens: TokenLogps, inputs: TokenInputs, micro_batch_tokens: Tensor, *, entropy_coef: float
) -> LossOut:
    """The policy loss, and KL and entropy terms where they are asked for, over some trained tokens."""
    options, logp = cfg.policy_loss, tokens.logp
    now, mask = logp.detach(), torch.ones_like(logp, dtype=torch.bool)
    old = now if inputs.old is None else torch.where(inputs.old.isnan(), now, inputs.old)
    nothing = torch.zeros_like(now)
    if options.importance_sampling_level == "sequence":
        log_ratio = sequence_log_ratio(logp, nothing if inputs.mean is None else inputs.mean, mask)
    else:
        log_ratio = token_log_ratio(logp, old, mask)
    total = None  # not 0: a loss whose record does not ask for it would train on a number that no pass has computed
    if options.loss.ratio in ("completion", "weight"):
        total = nothing if inputs.total is None else inputs.total
    t = Tokens(
        logp=logp, log_ratio=log_ratio, advantage=inputs.advantage, mask=mask, length=inputs.length,
        weight=_weight(cfg, inputs, now, mask), sequence_log_ratio=total,
    )  # fmt: skip
    sizes = {"micro_batch_tokens": micro_batch_tokens, "max_completion_length": cfg.max_completion_length}
    out = options.loss(t, **options.loss_options, **sizes)
    if inputs.reference is not None:
        share = options.loss.share(t, **sizes)
        penalty = kl_penalty(
            logp, old, inputs.reference, mask, beta=options.beta, ratio_weighted=options.use_bias_correction_kl,
            estimator=KL_ESTIMATORS[options.kl_estimator], share=share.weight, count=share.count,
        )  # fmt: skip
        out = merge(out, penalty)
    if entropy_coef:
        out = merge(out, entropy_bonus(tokens.entropy, mask, coef=entropy_coef, keep=inputs.keep_entropy))
    out.metrics["policy/entropy"] = (tokens.entropy.detach().sum(), mask.sum())
    return out


def _weight(cfg: Any, inputs: TokenInputs, now: Tensor, mask: Tensor) -> Tensor | None:  # (N,)
    """Correction times filters. The correction of a token on the first step needs no pass of its own."""
    weight = inputs.correction
    if weight is None and cfg.correction.is_on and cfg.policy_loss.loss.ratio != "weight":
        d = importance.log_difference(now, inputs.behaviour, mask)
        weight = correct(cfg, importance.Mismatch(token=d, total=d, mean=d, length=inputs.length))  # reads the token's
    for keep in (inputs.keep_geometric, inputs.keep_on_policy, inputs.keep_entropy):
        if keep is not None:
            weight = keep.to(now.dtype) if weight is None else weight * keep
    return weight


def correct(cfg: Any, m: importance.Mismatch) -> Tensor:  # (N,)
    """Weight for the gap between trainer and engine."""
    low, high = cfg.correction.bounds
    return importance.CORRECTIONS[cfg.correction.vllm_importance_sampling_mode](m, low=low, high=high)


def has_kl_term(cfg: Any) -> bool:
    return cfg.policy_loss.beta > 0 and not cfg.advantage.kl_in_reward


def has_bonus(cfg: Any) -> bool:
    """Whether the loss may have an entropy bonus, now or later in the run."""
    return cfg.policy_loss.entropy_coef > 0 or cfg.policy_loss.entropy_target is not None


class EntropyTarget:
    """The weight of an entropy bonus that holds the entropy at a target or above, from step to step; see
    losses/entropy.py. It follows the metrics of the last step, which are the same on all ranks and read anyway."""

    def __init__(self, options: PolicyLossConfig) -> None:
        assert options.entropy_target is not None
        self.options, self.weight = options, options.entropy_coef
        self.is_low = False  # the entropy of the last step: at most the target

    @property
    def coef(self) -> float:
        """Of the next step."""
        return self.weight if self.is_low else 0.0

    def observe(self, entropy: float) -> None:
        options = self.options
        self.is_low = entropy <= options.entropy_target
        limits = {"delta": options.entropy_coef_step, "most": options.entropy_coef_max}
        self.weight = adapted_coef(self.weight, entropy, target=options.entropy_target, **limits)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "is_low": self.is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.is_low = state["weight"], state["is_low"]


# Metrics: sums and counts, of the tokens that were computed unless said otherwise.


def add_loss_metrics(sums: MetricSums, out: LossOut) -> None:
    """Sums of terms without their counts: add_step_metrics adds what they are divided by, skipped tokens included."""
    sums.add(out.metrics)
    sums.add({f"loss/{name}": (term.sum, torch.zeros_like(term.sum)) for name, term in out.terms.items()})


def add_gap_metrics(
    cfg: Any, sums: MetricSums, inputs: TokenInputs, logp: Tensor, slot: Tensor, num_sequences: int
) -> Tensor:  # (2, 3) moments of the raw ratios of tokens and of completions
    """How far the engine is from the trainer, and what is done about it."""
    correction = cfg.correction
    mask = torch.ones_like(slot, dtype=torch.bool)
    old = logp if inputs.old is None or correction.proximal_policy == "behaviour" else inputs.old
    m = importance.mismatch(old, inputs.behaviour, mask, slot, num_sequences=num_sequences)
    count, one = mask.sum(), 1 / m.length.to(m.token.dtype)  # adds up to 1 for each completion
    sums.add(importance.mismatch_metrics(m, mask))
    sums.add(
        {
            "policy/behaviour_kl": ((torch.expm1(m.token) - m.token).sum(), count),
            "policy/behaviour_gap": (m.token.abs().sum(), count),
        }
    )
    if correction.is_on:
        by_completion = correction.vllm_importance_sampling_mode in importance.SEQUENCE_CORRECTIONS
        sums.add(importance.correction_metrics(correct(cfg, m), m.total if by_completion else m.token, mask))
    for name, keep in (("geometric", inputs.keep_geometric), ("off_policy", inputs.keep_on_policy)):
        if keep is not None:
            sums.add({f"policy/{name}_dropped_frac": ((one * ~keep).sum(), one.sum())})
    if inputs.keep_entropy is not None:
        sums.add({"policy/entropy_kept_frac": (inputs.keep_entropy.sum(), count)})
    return torch.stack([moments(m.token.exp()), moments(m.total.exp(), one)])


def add_names(cfg: Any, sums: MetricSums, device: torch.device, *, entropy_coef: float) -> None:
    """Metrics of no tokens: ranks must reduce the same names, also one that had nothing to compute."""
    none = torch.zeros(0, device=device)
    kept = none.bool()
    inputs = TokenInputs(
        advantage=none, length=none.long(), behaviour=none, old=none, reference=none if has_kl_term(cfg) else None,
        correction=none, mean=none, total=none, keep_geometric=kept if cfg.correction.has_geometric_filter else None,
        keep_on_policy=None if cfg.correction.off_policy_mask_threshold is None else kept,
        keep_entropy=kept if cfg.policy_loss.top_entropy_quantile < 1 else None,
    )  # fmt: skip
    zero = none.sum()
    add_loss_metrics(sums, loss(cfg, TokenLogps(none, none), inputs, zero + 1, entropy_coef=entropy_coef))
    add_gap_metrics(cfg, sums, inputs, none, none.long(), 0)
    sums.add({"loss/total": (zero, zero)})


def add_step_metrics(
    sums: MetricSums,
    batch: StepBatch,
    denominators: dict[str, Tensor],  # () what each term is divided by, over all ranks
    ratios: Tensor,  # (2, 3) moments from add_gap_metrics, over all ranks
) -> None:
    """What losses are divided by, numbers of the whole step, and completions that were not computed."""
    # Adds up to 1 over ranks, also where all completions are masked: then losses are written as 0.
    own, of_step = batch.local["num_tokens"], batch.total["num_tokens"]
    share = torch.where(of_step > 0, own / of_step.clamp(min=1), 1 / data_size())
    nothing = torch.zeros_like(share)
    sums.add({"loss/total": (nothing, share)})
    for name, count in denominators.items():
        if f"loss/{name}" in sums.pairs:
            sums.add({f"loss/{name}": (nothing, count.clamp(min=1) * share)})  # clamped as in total_loss
    for name, row in (("ess_frac", ratios[0]), ("ess_sequence_frac", ratios[1])):
        sums.add({f"policy/{name}": (effective_sample_frac(row).nan_to_num(), row[0] > 0)})
    # Skipped tokens count as unclipped.
    sums.add({name: (nothing, batch.skipped_tokens) for name in list(sums.pairs) if name.startswith("policy/clip_")})
    sums.add({"policy/skipped_frac": (nothing + batch.skipped, batch.local["num_completions"])})
