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

from data.formats.template_settings import JsonObject
from data.hints import suggest
from data.user_code import find_record
from losses.policy import OPTIONS, POLICY_LOSSES, PolicyLoss

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
    """What is minimised over the completions of a step."""

    loss: ClassVar[PolicyLoss]  # set from loss_type, not flags
    loss_options: ClassVar[dict[str, Any]]

    loss_type: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(POLICY_LOSSES)}}}|MODULE.FUNCTION")] = "dapo"
    """Loss of a token and what it is averaged over: losses/policy.py has the table. Or my_module.my_loss."""
    loss_kwargs: JsonObject = dataclasses.field(default_factory=dict)
    """Options of a loss of your own that are no flags, as a JSON object."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or one for the completion, the geometric mean of its tokens' (GSPO)."""
    beta: float = 0.0
    """Weight of the KL term to the reference model; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL of a token: k1 unbiased, k2 square of the log-ratio, k3 unbiased and never negative."""
    use_bias_correction_kl: bool = True
    """Weigh the KL estimate by the ratio, so that its gradient is that of the KL."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of trained tokens, which is maximised; 0 is off."""
    top_entropy_quantile: float = 1.0
    (
        "Train on this fraction of the step's tokens, those of highest entropy (0.2 in the paper), and on tokens equal "
        "to the last of them but for rounding; 1 trains on all."
    )
    mask_truncated_completions: bool = False
    (
        "Leave completions that ran into max_completion_length out of the loss and of every denominator. Their rewards "
        "still count in the advantages of their group; with kl_in_reward (RLOO) those include their KL to the "
        "reference, which TRL sets to 0 for them."
    )
    skip_zero_advantage_batches: bool = True
    """Do not compute completions of advantage 0 where they add nothing: the gradient is the same."""

    def __post_init__(self) -> None:
        for name in ("beta", "entropy_coef"):
            _check_number(self, name, at_least=0.0)
        for name, option in OPTIONS.items():
            _check_number(self, name, above=option.above, at_least=option.at_least)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.epsilon > 1:
            raise ValueError(f"epsilon={self.epsilon}: must be at most 1, a ratio has nothing below 0; try 0.2")
        if self.delta is not None and not 1 + high < self.delta < math.inf:
            raise ValueError(f"delta={self.delta}: must be above 1 + epsilon_high = {1 + high:g}; try 4")
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"dual_clip={self.dual_clip}: must be above 1, else nothing on policy is learned; try 3")
        if self.delta is not None and self.dual_clip is not None:
            raise ValueError(
                f"dual_clip={self.dual_clip}: bounds the same tokens as delta={self.delta}; set one of them"
            )
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(
                f"top_entropy_quantile={self.top_entropy_quantile}: must be above 0 and at most 1; 1 trains on all"
            )
        self._resolve_loss()
        for name in ("kl_estimator", "use_bias_correction_kl"):
            if self.beta == 0 and getattr(self, name) != getattr(PolicyLossConfig, name):
                raise ValueError(
                    f"{name}={getattr(self, name)}: has no effect with beta=0; set --beta, or leave it out"
                )

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
                raise ValueError(
                    f"{name}={getattr(self, name)}: has no effect with loss_type={self.loss_type}; {advice}"
                )
        for name in self.loss_kwargs:
            if name in OPTIONS or name not in loss.options:
                advice = f"use --{name.replace('_', '-')}" if name in OPTIONS else suggest(name, loss.options)
                raise ValueError(
                    f"loss_kwargs.{name}: is no option of loss_type={self.loss_type} to set here; {advice}"
                )
        missing = [name for name, p in loss.options.items() if p.default is p.empty and name not in self.loss_options]
        if missing:
            raise ValueError(f"loss_type={self.loss_type}: needs {missing[0]}; set it in --loss-kwargs")
        if self.importance_sampling_level == "sequence" and loss.ratio != "token":
            raise ValueError(
                f"importance_sampling_level=sequence: has no effect with loss_type={self.loss_type}, "
                f"{NO_SEQUENCE_LEVEL[loss.ratio]}; leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """The gap between the policy that is trained and the engine that sampled."""

    is_on: ClassVar[bool]  # whether there is a weight for the gap; these three follow from the flags
    bounds: ClassVar[tuple[float | None, float | None]]  # of that weight
    has_geometric_filter: ClassVar[bool]

    vllm_importance_sampling_correction: bool = True
    """Weigh tokens by the ratio of the trainer's log-probs to those of the engine that sampled."""
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop"
    ] = "token_truncate"
    """Ratio of each token or of the completion; beyond the bounds bring it back (truncate) or leave it out (mask)."""
    vllm_importance_sampling_cap: float | None = 3.0
    """Upper bound of that ratio; None leaves it open."""
    vllm_importance_sampling_min: float | None = None
    """Lower bound of that ratio; None leaves it open, for icepop 0.5."""
    geometric_min: float | None = None
    """Leave out completions whose tokens' ratios have a geometric mean below this; None: no such bound."""
    geometric_max: float | None = None
    """Leave out completions whose tokens' ratios have a geometric mean above this; None: no such bound."""
    off_policy_mask_threshold: float | None = None
    """Leave out bad completions (advantage below 0) that lost more than this many nats per token since; None: off."""
    proximal_policy: Literal["step", "behaviour"] = "step"
    (
        "What the clipped ratio is taken against. step: the weights the step began with, and the gap from them to the "
        "engine is a weight; behaviour: the engine's own log-probs, and there is no weight."
    )

    def __post_init__(self) -> None:
        for name in ("vllm_importance_sampling_cap", "vllm_importance_sampling_min", "geometric_min", "geometric_max"):
            _check_number(self, name, above=0.0)
        _check_number(self, "off_policy_mask_threshold", at_least=0.0)
        reason = "" if self.vllm_importance_sampling_correction else "vllm_importance_sampling_correction=False"
        reason = "proximal_policy=behaviour, which has no weights" if self.proximal_policy == "behaviour" else reason
        for name in ("vllm_importance_sampling_mode", "vllm_importance_sampling_cap", "vllm_importance_sampling_min",
                     "geometric_min", "geometric_max"):  # fmt: skip
            if reason and getattr(self, name) != getattr(CorrectionConfig, name):
                raise ValueError(f"{name}={getattr(self, name)}: has no effect with {reason}; leave one of them out")
        low, high = self.vllm_importance_sampling_min, self.vllm_importance_sampling_cap
        if low is None and self.vllm_importance_sampling_mode == "icepop":
            low = 0.5
        object.__setattr__(self, "bounds", (low, high))
        object.__setattr__(self, "is_on", self.vllm_importance_sampling_correction and self.proximal_policy == "step")
        filters = self.geometric_min is not None or self.geometric_max is not None
        object.__setattr__(self, "has_geometric_filter", filters)
        if low is None and high is None:
            raise ValueError(
                f"vllm_importance_sampling_cap=None: {self.vllm_importance_sampling_mode} needs a bound; set the cap, "
                "or vllm_importance_sampling_min"
            )
        if self.vllm_importance_sampling_mode == "icepop" and high is None:
            raise ValueError("vllm_importance_sampling_cap=None: icepop masks on both sides; set it, or use token_mask")
        _check_order("vllm_importance_sampling_min", low, "vllm_importance_sampling_cap", high)
        _check_order("geometric_min", self.geometric_min, "geometric_max", self.geometric_max)


def check_policy_options(
    loss: PolicyLossConfig, correction: CorrectionConfig, *, num_iterations: int, kl_in_reward: bool = False
) -> None:
    """What neither block can see alone. Every Config with both calls this."""
    if kl_in_reward and loss.beta == 0:
        raise ValueError("kl_in_reward=True: has no effect with beta=0; set --beta too")
    for name in ("kl_estimator", "use_bias_correction_kl"):
        if kl_in_reward and getattr(loss, name) != getattr(PolicyLossConfig, name):
            raise ValueError(
                f"{name}={getattr(loss, name)}: has no effect with kl_in_reward=True, the loss has no KL term then; "
                "leave it out"
            )
    if loss.loss.ratio == "none" and num_iterations > 1:
        raise ValueError(
            f"num_iterations={num_iterations}: loss_type={loss.loss_type} has no ratio, so only the first step on a "
            "batch is right; use 1, or loss_type=dapo"
        )
    if loss.loss.ratio == "none" and correction.proximal_policy == "behaviour":
        raise ValueError(f"proximal_policy=behaviour: loss_type={loss.loss_type} has no ratio to take; leave it out")


def _keeps_default(parameter: Parameter, value: Any, name: str) -> bool:
    """A loss from outside may have a default of its own for a flag: it holds unless the flag is set."""
    return parameter.default not in (parameter.empty, value) and value == getattr(PolicyLossConfig, name)


def _check_number(block: Any, name: str, *, above: float | None = None, at_least: float | None = None) -> None:
    assert name in {field.name for field in dataclasses.fields(block)}, name
    value = getattr(block, name)
    if value is None:
        return
    if above is not None and not above < value < math.inf:
        raise ValueError(f"{name}={value}: must be above {above:g} and finite")
    if at_least is not None and not at_least <= value < math.inf:
        raise ValueError(f"{name}={value}: must be {at_least:g} or above")


def _check_order(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        raise ValueError(f"{low_name}={low}: must be below {high_name}={high}")
