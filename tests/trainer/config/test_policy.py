"""Options of the policy loss and the correction: what they refuse, in one sentence that names the setting."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import pytest

from losses.importance import CORRECTIONS
from losses.kl import KL_ESTIMATORS
from losses.policy import OPTIONS, POLICY_LOSSES
from trainer.config.policy import CorrectionConfig, PolicyLossConfig, check_policy_options

BAD_LOSS = [
    ({"epsilon": -0.1}, "epsilon=-0.1: must be 0 or above"),
    ({"epsilon": 1.5}, "epsilon=1.5: must be at most 1"),
    ({"epsilon_high": math.inf}, "epsilon_high=inf: must be 0 or above"),
    ({"beta": math.nan}, "beta=nan: must be 0 or above"),
    ({"entropy_coef": -1.0}, "entropy_coef=-1.0: must be 0 or above"),
    ({"entropy_target": 0.0}, "entropy_target=0.0: must be above 0 and finite"),
    ({"entropy_target": 0.2, "entropy_coef_step": 0.0}, "entropy_coef_step=0.0: must be above 0 and finite"),
    ({"entropy_coef_step": 0.1}, "entropy_coef_step=0.1: has no effect without entropy_target; set it, too"),
    ({"entropy_coef_max": 0.1}, "entropy_coef_max=0.1: has no effect without entropy_target; set it, too"),
    (
        {"entropy_target": 0.2, "entropy_coef": 0.2, "entropy_coef_max": 0.1},
        "entropy_coef=0.2: is above entropy_coef_max=0.1; lower it",
    ),
    ({"delta": 1.2}, "delta=1.2: must be above 1 + epsilon_high = 1.2"),
    ({"delta": 1.25, "epsilon_high": 0.28}, "delta=1.25: must be above 1 + epsilon_high = 1.28"),
    ({"dual_clip": 1.0}, "dual_clip=1.0: must be above 1"),
    ({"dual_clip": 3.0, "delta": 4.0}, "dual_clip=3.0: bounds the same tokens as delta=4.0"),
    ({"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0: must be above 0"),
    ({"top_entropy_quantile": 1.1}, "top_entropy_quantile=1.1: must be above 0 and at most 1"),
    ({"loss_type": "cispo", "cispo_cap": 0.0}, "cispo_cap=0.0: must be above 0"),
    ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg=0.0: must be above 0"),
    ({"loss_type": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos=-1.0: must be above 0"),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "epsilon_high=5.0: has no effect with loss_type=cispo; its bound is"),
    ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon=0.1: has no effect with loss_type=sapo; it is for grpo"),
    ({"cispo_cap": 3.0}, "cispo_cap=3.0: has no effect with loss_type=dapo; it is for cispo"),
    ({"vespo_lambda_neg": 3.0}, "vespo_lambda_neg=3.0: has no effect with loss_type=dapo; it is for vespo"),
    *(
        ({"loss_type": kind, "importance_sampling_level": "sequence"}, f"has no effect with loss_type={kind}, {why}")
        for kind, why in (("rloo", "its ratio"), ("vespo", "its weight"), ("reinforce", "it has no ratio"))
    ),
    ({"kl_estimator": "k2"}, "kl_estimator=k2: has no effect with beta=0"),
    ({"use_bias_correction_kl": False}, "use_bias_correction_kl=False: has no effect with beta=0"),
]
BAD_CORRECTION = [
    ({"vllm_importance_sampling_cap": 0.0}, "vllm_importance_sampling_cap=0.0: must be above 0"),
    ({"vllm_importance_sampling_cap": None}, "vllm_importance_sampling_cap=None: token_truncate needs a bound"),
    (
        {"vllm_importance_sampling_mode": "icepop", "vllm_importance_sampling_cap": None},
        "vllm_importance_sampling_cap=None: icepop masks on both sides",
    ),
    ({"vllm_importance_sampling_min": 3.0}, "vllm_importance_sampling_min=3.0: must be below"),
    (
        {"vllm_importance_sampling_mode": "icepop", "vllm_importance_sampling_cap": 0.4},
        "vllm_importance_sampling_min=0.5: must be below vllm_importance_sampling_cap=0.4",
    ),
    ({"geometric_min": 1.1, "geometric_max": 1.0}, "geometric_min=1.1: must be below geometric_max=1.0"),
    ({"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold=-0.1: must be 0 or above"),
    *(
        ({name: value, **off}, f"{name}={value}: has no effect with {why}")
        for name, value in (("vllm_importance_sampling_mode", "icepop"), ("vllm_importance_sampling_cap", 2.0),
                            ("vllm_importance_sampling_min", 0.5), ("geometric_max", 1.5))
        for off, why in (({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=False"),
                         ({"proximal_policy": "behaviour"}, "proximal_policy=behaviour"))
    ),
]  # fmt: skip
BAD_TOGETHER = [
    ({"loss_type": "reinforce"}, {}, {"num_iterations": 2}, "num_iterations=2: loss_type=reinforce has no ratio"),
    (
        {"loss_type": "reinforce"},
        {},
        {"num_iterations": 1, "minibatches": 2},
        "minibatches_per_rollout=2: loss_type=reinforce has no ratio",
    ),
    (
        {"loss_type": "reinforce"},
        {"proximal_policy": "behaviour"},
        {"num_iterations": 1},
        "proximal_policy=behaviour: loss_type=reinforce has no ratio",
    ),
    ({}, {}, {"num_iterations": 1, "kl_in_reward": True}, "kl_in_reward=True: has no effect with beta=0"),
    (
        {"beta": 0.1, "kl_estimator": "k1"},
        {},
        {"num_iterations": 1, "kl_in_reward": True},
        "kl_estimator=k1: has no effect with kl_in_reward=True",
    ),
]


def refusal(make: Any) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


def test_a_setting_that_cannot_work_is_refused_by_name():
    for block, cases in ((PolicyLossConfig, BAD_LOSS), (CorrectionConfig, BAD_CORRECTION)):
        for settings, start in cases:
            said = refusal(lambda block=block, settings=settings: block(**settings))
            assert start in said and "\n" not in said, settings
    for loss, correction, rest, start in BAD_TOGETHER:
        blocks = PolicyLossConfig(**loss), CorrectionConfig(**correction)
        assert refusal(lambda blocks=blocks, rest=rest: check_policy_options(*blocks, **rest)).startswith(start)


def test_settings_that_go_together_are_taken():
    check_policy_options(PolicyLossConfig(), CorrectionConfig(), num_iterations=4)
    check_policy_options(PolicyLossConfig(loss_type="reinforce"), CorrectionConfig(), num_iterations=1)
    check_policy_options(PolicyLossConfig(beta=0.05), CorrectionConfig(), num_iterations=1, kl_in_reward=True)
    PolicyLossConfig(epsilon=0.2, epsilon_high=0.28, delta=4.0)
    CorrectionConfig(vllm_importance_sampling_cap=None, vllm_importance_sampling_min=0.1)


def test_every_loss_estimator_and_mode_has_a_choice():
    loss, correction = get_type_hints(PolicyLossConfig), get_type_hints(CorrectionConfig)
    assert set(get_args(loss["kl_estimator"])) == set(KL_ESTIMATORS)
    assert set(get_args(correction["vllm_importance_sampling_mode"])) == set(CORRECTIONS)


def test_defaults_are_those_of_the_loss_functions():
    """A default that differs from the function's would be a silent third opinion."""
    for kind, record in POLICY_LOSSES.items():
        wanted = {name: p.default for name, p in record.options.items()}
        assert PolicyLossConfig(loss_type=kind).loss_options == wanted, kind
        assert wanted.keys() <= OPTIONS.keys(), "an option without help"


def test_icepop_has_a_lower_bound_of_its_own():
    assert CorrectionConfig(vllm_importance_sampling_mode="icepop").bounds == (0.5, 3.0)
    assert CorrectionConfig(vllm_importance_sampling_mode="token_mask").bounds == (None, 3.0)
