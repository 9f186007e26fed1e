"""Options of the policy loss and of the correction for samples that are not quite from the policy they train.

Two blocks of a method that compares completions in groups; trainer/rl/step.py is what they steer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, ClassVar, Literal

import tyro

from data.errors import UserError
from data.formats.template_settings import JsonObject
from data.hints import suggest
from data.user_code import find_record
from losses.importance import SEQUENCE_CORRECTIONS
from losses.policy import OPTIONS, POLICY_LOSSES, PolicyLoss
from trainer.config.checks import check_numbers, reject_unused

NO_SEQUENCE_LEVEL = {
    "completion": "its ratio is that of the whole completion",
    "weight": "its weight is that of the whole completion",
    "none": "it has no ratio",
}


def _option_flags() -> list[tuple[str, Any, Any]]:
    """One flag for each option of a built-in loss, its default that of the function."""
    defaults = {name: p.default for record in POLICY_LOSSES.values() for name, p in record.options.items()}
    flags = []
    for name, option in OPTIONS.items():
        kind = float | None if defaults[name] is None else float
        flags.append((name, Annotated[kind, tyro.conf.arg(help=option.help)], defaults[name]))
    return flags


_Options = dataclasses.make_dataclass(
    "_Options",
    [("loss_type", str, "dapo"), *_option_flags()],
    namespace={"__module__": __name__},
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(_Options):
    """The policy loss."""

    loss: ClassVar[PolicyLoss]  # set from loss_type, not flags
    loss_options: ClassVar[dict[str, Any]]

    loss_type: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(POLICY_LOSSES)}}}|MODULE.FUNCTION")] = "dapo"
    """Policy loss: the loss of a token and how it is averaged (table in losses/policy.py), or my_module.my_loss."""
    loss_kwargs: JsonObject = dataclasses.field(default_factory=dict)
    """Options of your own loss that are not flags, as a JSON object."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per completion: the geometric mean over its tokens (GSPO)."""
    beta: float = 0.0
    """Weight of the KL divergence to the reference model. 0: no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token: k1 (unbiased), k2 (squared log-ratio), k3 (unbiased and never negative)."""
    use_bias_correction_kl: bool = True
    """Weight the KL estimate by the importance ratio, so that its gradient is that of the KL."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, the mean entropy of trained tokens. 0: off. With entropy_target, where it starts."""
    entropy_target: float | None = None
    (
        "Hold the mean entropy of trained tokens, in nats, at this or above: the weight of the bonus grows while it is "
        "lower and falls while it is higher, and there is no bonus then. 0.2 in Skywork-OR1. None: a fixed weight."
    )
    entropy_coef_step: float = 1e-4
    """With entropy_target: how far its weight moves after each optimizer step."""
    entropy_coef_max: float | None = None
    """With entropy_target: upper bound of the weight. None: no bound."""
    top_entropy_quantile: float = 1.0
    (
        "Train only on this fraction of the step's tokens, those of highest entropy (0.2 in the paper); ties are "
        "included. 1: all tokens."
    )
    mask_truncated_completions: bool = False
    (
        "Leave completions cut off at max_completion_length out of the loss and its denominators. Their rewards still "
        "count in the advantages of their group; with kl_in_reward (RLOO) so does their KL to the reference, which TRL "
        "sets to 0."
    )
    skip_zero_advantage_batches: bool = True
    """Skip completions whose advantage is 0 where they add nothing to the gradient."""

    def __post_init__(self) -> None:
        rules = {
            "0 or above": "beta entropy_coef",
            "above 0 and at most 1": "top_entropy_quantile",
            "above 0 and finite": "entropy_target entropy_coef_step entropy_coef_max",
        }
        check_numbers(self, rules)
        for name, option in OPTIONS.items():
            rule = "0 or above" if option.at_least is not None else "above 0 and finite"
            check_numbers(self, {rule: name} if option.at_least is not None or option.above is not None else {})
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.epsilon > 1:
            raise UserError(f"epsilon={self.epsilon}: must be at most 1, a ratio has nothing below 0; try 0.2")
        if self.delta is not None and not 1 + high < self.delta < math.inf:
            raise UserError(f"delta={self.delta}: must be above 1 + epsilon_high = {1 + high:g}; try 4")
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise UserError(f"dual_clip={self.dual_clip}: must be above 1, else nothing on policy is learned; try 3")
        if self.delta is not None and self.dual_clip is not None:
            raise UserError(
                f"dual_clip={self.dual_clip}: bounds the same tokens as delta={self.delta}; set one of them"
            )
        self._resolve_loss()
        if self.beta == 0:
            why = "with beta=0; set --beta, or leave it out"
            reject_unused(self, why, ("kl_estimator", "use_bias_correction_kl"))

        if self.entropy_target is None:
            reject_unused(self, "without entropy_target; set it, too", ("entropy_coef_step", "entropy_coef_max"))
        if self.entropy_coef_max is not None and self.entropy_coef > self.entropy_coef_max:
            raise UserError(
                f"entropy_coef={self.entropy_coef}: is above entropy_coef_max={self.entropy_coef_max}; lower it"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """Of the ratio."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def cap(self) -> float | None:
        """Bound of the loss in units of the advantage, where that is negative: delta and dual_clip are the same."""
        return self.delta if self.dual_clip is None else self.dual_clip

    def _resolve_loss(self) -> None:
        """Find `loss`, the record, and `loss_options`, its keyword arguments; refuse what the loss does not read."""
        loss = find_record("loss_type", self.loss_type, POLICY_LOSSES, PolicyLoss, "loss")
        flags = {
            name: getattr(self, name)
            for name in OPTIONS
            if name in loss.options and not _keeps_default(loss.options[name], getattr(self, name), name)
        }
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "loss_options", flags | self.loss_kwargs)
        for name in OPTIONS:
            if name not in loss.options and getattr(self, name) != getattr(PolicyLossConfig, name):
                readers = [kind for kind, other in POLICY_LOSSES.items() if name in other.options]
                advice = "its bound is cispo_cap" if self.loss_type == "cispo" else f"it is for {', '.join(readers)}"
                raise UserError(
                    f"{name}={getattr(self, name)}: has no effect with loss_type={self.loss_type}; {advice}"
                )
        for name in self.loss_kwargs:
            if name in OPTIONS or name not in loss.options:
                advice = f"use --{name.replace('_', '-')}" if name in OPTIONS else suggest(name, loss.options)
                raise UserError(
                    f"loss_kwargs.{name}: not an option of loss_type={self.loss_type} to set here; {advice}"
                )
        missing = [name for name, p in loss.options.items() if p.default is p.empty and name not in self.loss_options]
        if missing:
            raise UserError(f"loss_type={self.loss_type}: needs {missing[0]}; set it in --loss-kwargs")
        if self.importance_sampling_level == "sequence" and loss.ratio != "token":
            raise UserError(
                f"importance_sampling_level=sequence: has no effect with loss_type={self.loss_type}, "
                f"{NO_SEQUENCE_LEVEL[loss.ratio]}; leave it out"
            )


def without_skips() -> PolicyLossConfig:
    """For a method that learns from completions whose rewards say nothing, too."""
    return PolicyLossConfig(skip_zero_advantage_batches=False)


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Correction for the difference between the trained policy and the engine that sampled."""

    is_on: ClassVar[bool]  # whether there is a weight for the gap; these three follow from the flags
    bounds: ClassVar[tuple[float | None, float | None]]  # of that weight
    has_geometric_filter: ClassVar[bool]

    @property
    def by_completion(self) -> bool:
        """The ratio to the engine is that of the whole completion, not of each token."""
        return self.vllm_importance_sampling_mode in SEQUENCE_CORRECTIONS

    @property
    def drops(self) -> bool:
        """Tokens beyond the bounds are left out, not weighted by the bound."""
        return not self.vllm_importance_sampling_mode.endswith("_truncate")

    vllm_importance_sampling_correction: bool = True
    """Weight tokens by the ratio of their probability in the trainer to that in the engine that sampled."""
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop"
    ] = "token_truncate"
    """Ratio per token or per completion; outside the bounds it is clamped (truncate) or left out (mask)."""
    vllm_importance_sampling_cap: float | None = 3.0
    """Upper bound of that ratio. None: no bound."""
    vllm_importance_sampling_min: float | None = None
    """Lower bound of that ratio. None: no bound, or 0.5 for icepop."""
    geometric_min: float | None = None
    """Leave out completions whose geometric mean ratio is below this. None: no such bound."""
    geometric_max: float | None = None
    """Leave out completions whose geometric mean ratio is above this. None: no such bound."""
    off_policy_mask_threshold: float | None = None
    """Leave out completions of negative advantage whose log-prob fell by more than this per token. None: off."""
    proximal_policy: Literal["step", "behaviour"] = "step"
    (
        "Denominator of the clipped ratio. step: the weights before the first step on the batch, with a correction "
        "weight for the engine; behaviour: the engine's own log-probs, without such a weight."
    )

    def __post_init__(self) -> None:
        bounds = ("vllm_importance_sampling_cap", "vllm_importance_sampling_min", "geometric_min", "geometric_max")
        check_numbers(self, {"above 0 and finite": " ".join(bounds), "0 or above": "off_policy_mask_threshold"})
        reason = "" if self.vllm_importance_sampling_correction else "vllm_importance_sampling_correction=False"
        reason = "proximal_policy=behaviour, which has no weights" if self.proximal_policy == "behaviour" else reason
        if reason:
            reject_unused(self, f"with {reason}; leave one of them out", ("vllm_importance_sampling_mode", *bounds))
        low, high = self.vllm_importance_sampling_min, self.vllm_importance_sampling_cap
        if low is None and self.vllm_importance_sampling_mode == "icepop":
            low = 0.5
        object.__setattr__(self, "bounds", (low, high))
        object.__setattr__(self, "is_on", self.vllm_importance_sampling_correction and self.proximal_policy == "step")
        filters = self.geometric_min is not None or self.geometric_max is not None
        object.__setattr__(self, "has_geometric_filter", filters)
        if low is None and high is None:
            raise UserError(
                f"vllm_importance_sampling_cap=None: {self.vllm_importance_sampling_mode} needs a bound; set the cap, "
                "or vllm_importance_sampling_min"
            )
        if self.vllm_importance_sampling_mode == "icepop" and high is None:
            raise UserError("vllm_importance_sampling_cap=None: icepop masks on both sides; set it, or use token_mask")
        _check_order("vllm_importance_sampling_min", low, "vllm_importance_sampling_cap", high)
        _check_order("geometric_min", self.geometric_min, "geometric_max", self.geometric_max)


def check_policy_options(
    loss: PolicyLossConfig,
    correction: CorrectionConfig,
    *,
    num_iterations: int,
    minibatches: int = 1,
    kl_in_reward: bool = False,
) -> None:
    """What neither block can see alone. Every Config with both calls this."""
    if kl_in_reward and loss.beta == 0:
        raise UserError("kl_in_reward=True: has no effect with beta=0; set --beta too")
    if kl_in_reward:
        why = "with kl_in_reward=True, the loss has no KL term then; leave it out"
        reject_unused(loss, why, ("kl_estimator", "use_bias_correction_kl"))
    for name, value in (("num_iterations", num_iterations), ("minibatches_per_rollout", minibatches)):
        if loss.loss.ratio == "none" and value > 1:
            raise UserError(
                f"{name}={value}: loss_type={loss.loss_type} has no ratio, so only the first step on a batch is "
                "right; use 1, or loss_type=dapo"
            )
    if loss.loss.ratio == "none" and correction.proximal_policy == "behaviour":
        raise UserError(f"proximal_policy=behaviour: loss_type={loss.loss_type} has no ratio to take; leave it out")


def _keeps_default(parameter: Parameter, value: Any, name: str) -> bool:
    """A loss from outside may have a default of its own for a flag: it holds unless the flag is set."""
    return parameter.default not in (parameter.empty, value) and value == getattr(PolicyLossConfig, name)


def _check_order(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        raise UserError(f"{low_name}={low}: must be below {high_name}={high}")
