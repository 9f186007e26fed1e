"""Choices and defaults of the policy loss and the correction."""

from __future__ import annotations

from typing import get_args, get_type_hints

from losses.importance import SEQUENCE_CORRECTIONS
from losses.kl import KL_ESTIMATORS
from losses.policy import OPTIONS, POLICY_LOSSES
from trainer.config.old_flags import OLD_FLAGS
from trainer.config.policy import LOSS_FLAGS, CorrectionConfig, PolicyLossConfig


def test_every_loss_estimator_and_mode_has_a_choice():
    loss, correction = get_type_hints(PolicyLossConfig), get_type_hints(CorrectionConfig)
    assert set(get_args(loss["kl_estimator"])) == set(KL_ESTIMATORS)
    assert SEQUENCE_CORRECTIONS < set(get_args(correction["vllm_importance_sampling_mode"]))


def test_defaults_are_those_of_the_loss_functions():
    for kind, record in POLICY_LOSSES.items():
        defaults = {name: p.default for name, p in record.options.items()}
        assert PolicyLossConfig(loss_type=kind).loss_options == {k: v for k, v in defaults.items() if k in LOSS_FLAGS}
        assert defaults.keys() <= OPTIONS.keys(), "an option without help"
        for name in defaults.keys() - {*LOSS_FLAGS}:  # flags of earlier versions
            assert name not in OLD_FLAGS or OLD_FLAGS[name].convert(str(defaults[name])) == {}
            assert PolicyLossConfig(loss_type=kind, loss_kwargs={name: 2}).loss_options[name] == 2


def test_icepop_has_a_lower_bound_of_its_own():
    assert CorrectionConfig(vllm_importance_sampling_mode="icepop").bounds == (0.5, 3.0)
    assert CorrectionConfig(vllm_importance_sampling_mode="token_mask").bounds == (None, 3.0)
