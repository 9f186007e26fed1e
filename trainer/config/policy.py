"""Flags of the policy loss, and of the correction for completions that the engine sampled from a different policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Annotated, Any, ClassVar, Literal

import tyro

from data.command.checks import check_number, check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError
from data.formats.template_settings import JsonObject
from data.hints import suggest
from data.user_code import find_record
from losses.importance import SEQUENCE_CORRECTIONS
from losses.policy import OPTIONS, POLICY_LOSSES, PolicyLoss

NO_SEQUENCE_LEVEL = {
    "token_only": "its mask is per token",
    "completion": "its ratio is per completion",
    "weight": "its weight is per completion",
    "none": "it has no ratio",
}
LOSS_FLAGS = ("epsilon", "epsilon_high", "delta", "dual_clip")  # options of several losses; others: --loss-kwargs
READERS = {name: [kind for kind, loss in POLICY_LOSSES.items() if name in loss.options] for name in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """The policy loss."""

    loss: ClassVar[PolicyLoss]  # set from loss_type, not flags
    loss_options: ClassVar[dict[str, Any]]

    loss_type: Annotated[Common[str], tyro.conf.arg(metavar=f"{{{','.join(POLICY_LOSSES)}}}|MODULE.FUNCTION")] = "dapo"
    """Policy loss: the per-token loss and its average (table in losses/policy.py), or my_module.my_loss."""
    loss_kwargs: JsonObject = field(default_factory=dict)
    (
        "Options of the loss that are not flags, as a JSON object (a mapping in YAML): '{\"cispo_cap\": 5}'. Built in: "
        "cispo_cap; sapo_temperature_pos, sapo_temperature_neg; vespo_k_pos, vespo_k_neg, vespo_lambda_pos, "
        "vespo_lambda_neg; dppo_threshold. For a custom loss, its keyword arguments."
    )
    epsilon: Common[float] = 0.2
    """Clip range of the importance ratio, below and above 1."""
    epsilon_high: float | None = None
    """Clip range above 1 if it differs (DAPO: 0.28). None: use epsilon."""
    delta: float | None = None
    """Two-sided clip: maximum ratio for negative advantages (INTELLECT-2: 4). None: no limit."""
    dual_clip: float | None = None
    """Dual clip: maximum loss for negative advantages, in units of the advantage (3 is typical). None: no limit."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per completion: the geometric mean over its tokens (GSPO)."""
    beta: Common[float] = 0.0
    """Weight of the KL divergence from the reference model. 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token: k1 (unbiased), k2 (squared log-ratio), k3 (unbiased and never negative)."""
    use_bias_correction_kl: bool = True
    """Weight the KL estimate by the importance ratio, which makes its gradient the gradient of the KL."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (mean entropy of trained tokens). 0: off. With entropy_target, the initial weight."""
    entropy_target: float | None = None
    (
        "Keep the mean entropy of trained tokens (nats) at or above this value: the weight of the bonus grows while "
        "the entropy is lower and falls while it is higher, without a bonus. Skywork-OR1: 0.2. None: a fixed weight."
    )
    entropy_coef_step: float = 1e-4
    """With entropy_target: change of the weight per optimizer step."""
    entropy_coef_max: float | None = None
    """With entropy_target: maximum weight. None: no limit."""
    top_entropy_quantile: float = 1.0
    (
        "Train only on the tokens of highest entropy, this fraction of the step's tokens (0.2 in the paper), including "
        "ties. 1: all tokens."
    )
    mask_truncated_completions: bool = False
    (
        "Mask completions truncated at max_completion_length in the loss and its denominators. Their rewards still "
        "count in the advantages of their group; with kl_in_reward (RLOO) so does their KL, which TRL sets to 0."
    )
    skip_zero_advantage_batches: bool = True
    """Skip completions with zero advantage if they add nothing to the gradient."""

    def __post_init__(self) -> None:
        rules = {
            "0 or above": "beta entropy_coef epsilon epsilon_high",
            "above 0 and at most 1": "top_entropy_quantile",
            "above 0 and finite": "entropy_target entropy_coef_step entropy_coef_max",
        }
        check_numbers(self, rules)
        for name in [name for name in self.loss_kwargs if name in OPTIONS]:
            if type(value := self.loss_kwargs[name]) not in (int, float):
                raise UserError(f"loss_kwargs.{name}={value}: expected a number")
            rule = "above 0 and finite" if OPTIONS[name].above == 0 else "0 or above"
            check_number(f"loss_kwargs.{name}", value, rule)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.epsilon > 1:
            raise UserError(f"epsilon={self.epsilon}: must be at most 1, because a ratio is never below 0; try 0.2")
        if self.delta is not None and not 1 + high < self.delta < math.inf:
            raise UserError(f"delta={self.delta}: must be above 1 + epsilon_high = {1 + high:g}; try 4")
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise UserError(
                f"dual_clip={self.dual_clip}: must be above 1, otherwise on-policy tokens have no gradient; try 3"
            )
        if self.delta is not None and self.dual_clip is not None:
            raise UserError(
                f"dual_clip={self.dual_clip}: bounds the same tokens as delta={self.delta}; set one of them"
            )
        self._resolve_loss()
        if self.beta == 0:
            reject_unused(self, "with beta=0; set --beta", ("kl_estimator", "use_bias_correction_kl"))
        if self.entropy_target is None:
            reject_unused(self, "without --entropy-target", ("entropy_coef_step", "entropy_coef_max"))
        if self.entropy_coef_max is not None and self.entropy_coef > self.entropy_coef_max:
            raise UserError(
                f"entropy_coef={self.entropy_coef}: must be at most entropy_coef_max={self.entropy_coef_max}"
            )

    def _resolve_loss(self) -> None:
        """Set `loss`, the record, and `loss_options`, its keyword arguments; reject options that the loss ignores."""
        loss = find_record("loss_type", self.loss_type, POLICY_LOSSES, PolicyLoss, "loss")
        flags = {
            name: getattr(self, name)
            for name in LOSS_FLAGS
            if name in loss.options and not _keeps_default(loss.options[name], getattr(self, name), name)
        }
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "loss_options", flags | self.loss_kwargs)
        for name in LOSS_FLAGS:
            if name not in loss.options and getattr(self, name) != getattr(PolicyLossConfig, name):
                advice = f"it is for {', '.join(READERS[name])}"
                if self.loss_type == "cispo":
                    advice = "its bound is --loss-kwargs '{\"cispo_cap\": 5}'"
                raise UserError(
                    f"{name}={getattr(self, name)}: has no effect with loss_type={self.loss_type}; {advice}"
                )
        for name, value in self.loss_kwargs.items():
            if name in LOSS_FLAGS or name not in loss.options:
                advice = suggest(name, loss.options) if loss.options else "it has none"
                if name in READERS:
                    advice = f"it is for {', '.join(READERS[name])}"
                if name in LOSS_FLAGS:
                    advice = f"use --{name.replace('_', '-')}"
                raise UserError(f"loss_kwargs.{name}={value}: not an option of loss_type={self.loss_type}; {advice}")
        missing = [name for name, p in loss.options.items() if p.default is p.empty and name not in self.loss_options]
        if missing:
            raise UserError(f"loss_type={self.loss_type}: needs {missing[0]}; set it in --loss-kwargs")
        if self.importance_sampling_level == "sequence" and loss.ratio != "token":
            raise UserError(
                f"importance_sampling_level=sequence: has no effect with loss_type={self.loss_type}, because "
                f"{NO_SEQUENCE_LEVEL[loss.ratio]}"
            )


def without_skips() -> PolicyLossConfig:
    """The default of methods that also learn from completions with zero advantage."""
    return PolicyLossConfig(skip_zero_advantage_batches=False)


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Correction for the mismatch between the trained policy and the engine that sampled."""

    is_on: ClassVar[bool]  # whether tokens are weighted; these three follow from the flags
    bounds: ClassVar[tuple[float | None, float | None]]  # bounds of the weight
    has_geometric_filter: ClassVar[bool]

    @property
    def by_completion(self) -> bool:
        """True if the ratio to the engine is per completion, not per token."""
        return self.vllm_importance_sampling_mode in SEQUENCE_CORRECTIONS

    @property
    def drops(self) -> bool:
        """True if tokens beyond the bounds are masked rather than clamped."""
        return not self.vllm_importance_sampling_mode.endswith("_truncate")

    vllm_importance_sampling_correction: bool = True
    """Weight tokens by the ratio of their probability in the trainer to their probability in the engine."""
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop"
    ] = "token_truncate"
    """Ratio per token or per completion; outside the bounds it is clamped (truncate) or masked (mask)."""
    vllm_importance_sampling_cap: float | None = 3.0
    """Maximum ratio. None: no limit."""
    vllm_importance_sampling_min: float | None = None
    """Minimum ratio. None: no limit, or 0.5 for icepop."""
    geometric_min: float | None = None
    """Drop completions whose geometric mean ratio is below this. None: off."""
    geometric_max: float | None = None
    """Drop completions whose geometric mean ratio is above this. None: off."""
    off_policy_mask_threshold: float | None = None
    """Drop completions of negative advantage whose log-prob fell by more than this per token. None: off."""
    proximal_policy: Literal["step", "behaviour"] = "step"
    (
        "Denominator of the clipped ratio. step: the policy before the first step on the batch, with a correction "
        "weight for the engine; behaviour: the engine's log-probs, without a correction weight."
    )

    def __post_init__(self) -> None:
        bounds = ("vllm_importance_sampling_cap", "vllm_importance_sampling_min", "geometric_min", "geometric_max")
        check_numbers(self, {"above 0 and finite": " ".join(bounds), "0 or above": "off_policy_mask_threshold"})
        reason = "" if self.vllm_importance_sampling_correction else "vllm_importance_sampling_correction=False"
        reason = "proximal_policy=behaviour, which has no weights" if self.proximal_policy == "behaviour" else reason
        if reason:
            reject_unused(self, f"with {reason}", ("vllm_importance_sampling_mode", *bounds))
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
            raise UserError(
                "vllm_importance_sampling_cap=None: icepop masks on both sides; set a cap, or use token_mask"
            )
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
    """Check both blocks together."""
    if kl_in_reward and loss.beta == 0:
        raise UserError("kl_in_reward=True: has no effect with beta=0; set --beta")
    if kl_in_reward:
        why = "with kl_in_reward=True, which removes the KL term from the loss"
        reject_unused(loss, why, ("kl_estimator", "use_bias_correction_kl"))
    for name, value in (("num_iterations", num_iterations), ("minibatches_per_rollout", minibatches)):
        if loss.loss.ratio == "none" and value > 1:
            raise UserError(
                f"{name}={value}: loss_type={loss.loss_type} has no importance ratio and allows one step per batch; "
                "use 1, or loss_type=dapo"
            )
    if loss.loss.ratio == "none" and correction.proximal_policy == "behaviour":
        raise UserError(f"proximal_policy=behaviour: loss_type={loss.loss_type} has no ratio; remove --proximal-policy")


def _keeps_default(parameter: Parameter, value: Any, name: str) -> bool:
    """Return whether the flag is unset and a custom loss has a different default for it."""
    return parameter.default not in (parameter.empty, value) and value == getattr(PolicyLossConfig, name)


def _check_order(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        raise UserError(f"{low_name}={low}: must be below {high_name}={high}")
