"""What can be set for energy-based fine-tuning, and what is refused, in one sentence each and before any work."""

from __future__ import annotations

from typing import Any

import pytest

from data.format_options import FormatOptions
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.cli import parse
from trainer.config.blocks import DataConfig, ModelConfig, RolloutConfig, RunConfig
from trainer.config.ebft import EbftConfig, FeatureConfig, StridedConfig
from trainer.config.groups import AsyncConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig


def make(**settings: Any) -> EbftConfig:
    return EbftConfig(model=ModelConfig(model="m"), data=DataConfig(data=("d",)), **settings)


def features(**settings: Any) -> dict[str, FeatureConfig]:
    return {"features": FeatureConfig(**settings)}


def test_defaults_are_good_in_both_modes():
    assert make().prompts_per_step == 8 // 4
    cfg = make(mode="strided")
    assert cfg.strided.plan.n_samples_per_prompt == 4 and cfg.features.advantage_estimator == "rloo_split"
    one = make(num_generations=1, **features(advantage_estimator="reinforce"))
    assert one.prompts_per_step == 8
    alone = StridedConfig(n_samples_per_prompt=1)
    assert make(mode="strided", strided=alone, **features(advantage_estimator="reinforce")).strided is alone


REJECTED: list[tuple[Any, dict[str, Any], str]] = [
    (FeatureConfig, {"feature_layers": (0.5, 1.5)}, "feature_layers=1.5: "),
    (FeatureConfig, {"feature_layers": (-0.1,)}, "feature_layers=-0.1: "),
    (FeatureConfig, {"feature_layers": (float("nan"),)}, "feature_layers=nan: "),
    (FeatureConfig, {"feature_layers": ()}, "feature_layers=[]: "),
    (FeatureConfig, {"rl_coef": 0.0, "ce_coef": 0.0}, "rl_coef=0, ce_coef=0: "),
    (FeatureConfig, {"alignment_coef": 0.0, "diversity_coef": 0.0}, "alignment_coef=0, diversity_coef=0: "),
    (FeatureConfig, {"ce_coef": -0.1}, "ce_coef=-0.1: must be 0 or above"),
    (FeatureConfig, {"rl_coef": float("inf")}, "rl_coef=inf: must be 0 or above"),
    (FeatureConfig, {"diversity_coef": float("nan")}, "diversity_coef=nan: must be 0 or above"),
    (FeatureConfig, {"whiten_gt": "sample"}, "whiten_gt=sample: has no effect without --use-whitening"),
    (StridedConfig, {"stride": 0}, "stride=0: "),
    (StridedConfig, {"context_length": 0}, "context_length=0: "),
    (StridedConfig, {"generate_max_len": 0}, "generate_max_len=0: "),
    (StridedConfig, {"n_samples_per_prompt": 0}, "n_samples_per_prompt=0: "),
    (StridedConfig, {"min_completion_prefix": -1}, "min_completion_prefix=-1: "),
    (StridedConfig, {"max_length": 15}, "max_length=15: must be at least context_length + generate_max_len = 16"),
    (make, {"num_generations": 3}, "num_generations=3: 8 completions per step"),
    (make, {"num_generations": 0}, "num_generations=0: must be 1 or more"),
    (make, {"max_completion_length": 0}, "max_completion_length=0: must be 1 or more"),
    (make, {"num_iterations": 0}, "num_iterations=0: must be 1 or more"),
    (make, {"minibatches_per_rollout": 0}, "minibatches_per_rollout=0: must be 1 or more"),
    (make, {"stop": ("",)}, "stop='': "),
    (make, {"temperature": 0.0}, "temperature=0.0: must be above 0"),
    (make, {"temperature": 0.0, "mode": "strided"}, "temperature=0.0: must be above 0"),
    (make, {"temperature": float("nan")}, "temperature=nan: must be above 0"),
    (make, {"temperature": float("inf")}, "temperature=inf: must be above 0"),
    (make, {"gt_length_multiplier": 0.0}, "gt_length_multiplier=0.0: must be 0.1 or more"),
    (make, {"gt_length_multiplier": float("nan")}, "gt_length_multiplier=nan: must be 0.1 or more"),
    (make, {"gt_length_multiplier": 2.0, "adaptive_max_tokens": False}, "gt_length_multiplier=2.0: has no effect"),
    (make, {"rollout": RolloutConfig(eval_temperature=0.5)}, "rollout.eval_temperature=0.5: has no effect"),
    (make, {"rollout": RolloutConfig(engine="local"), "vllm": VllmConfig(replicas=2)},
     "vllm.replicas=2: has no effect with rollout.engine=local"),
    (make, {"run": RunConfig(eval_steps=2)}, "eval_steps=2: has no effect without held-out rows"),
    (make, {"overlap": AsyncConfig(reroll_start_fraction=0.5)}, "reroll_start_fraction=0.5: has no effect"),
    (make, {"num_generations": 1, **features(advantage_estimator="reinforce", diversity_coef=0.5)},
     "diversity_coef=0.5: has no effect with num_generations=1"),
]  # fmt: skip


def test_the_error_names_the_setting():
    for config, settings, start in REJECTED:
        with pytest.raises(ValueError) as caught:
            config(**settings)
        assert str(caught.value).startswith(start), (settings, str(caught.value))
    assert StridedConfig(max_length=16).max_length == 16


def test_rewards_of_no_weight_are_good_where_nothing_is_made_of_them():
    assert FeatureConfig(alignment_coef=0.0, diversity_coef=0.0, rl_coef=0.0, ce_coef=1.0).ce_coef == 1.0


@pytest.mark.parametrize(("mode", "estimator"), [("structured", "rloo"), ("strided", "grpo")])
def test_one_rollout_cannot_be_compared(mode, estimator):
    strided = mode == "strided"
    one = {"strided": StridedConfig(n_samples_per_prompt=1)} if strided else {"num_generations": 1}
    name = "n_samples_per_prompt" if strided else "num_generations"
    with pytest.raises(ValueError, match=rf"^{name}=1: advantage_estimator={estimator} compares"):
        make(mode=mode, **one, **features(advantage_estimator=estimator))
    with pytest.raises(ValueError, match=rf"^{name}=1: use_whitening"):
        make(mode=mode, **one, **features(advantage_estimator="reinforce", use_whitening=True))


# Setting of the other mode -> start of the error.
OF_STRUCTURED: list[tuple[dict[str, Any], str]] = [
    ({"format": FormatOptions(field_chosen="best")}, "format.field_chosen=best"),
    ({"rollout": RolloutConfig(engine="vllm")}, "rollout.engine=vllm"),
    ({"rollout": RolloutConfig(max_batch_size=8)}, "rollout.max_batch_size=8"),
    ({"rollout": RolloutConfig(cache_gib=8.0)}, "rollout.cache_gib=8.0"),
    ({"vllm": VllmConfig(url=("http://here",))}, "vllm.url=http://here"),
    ({"sync": SyncConfig(bucket_mb=7)}, "sync.bucket_mb=7"),
    ({"policy_loss": PolicyLossConfig(beta=0.1)}, "beta=0.1"),
    ({"policy_loss": PolicyLossConfig(loss_type="cispo")}, "loss_type=cispo"),
    ({"correction": CorrectionConfig(vllm_importance_sampling_cap=5.0)}, "vllm_importance_sampling_cap=5.0"),
    ({"overlap": AsyncConfig(replay_buffer_size=4)}, "replay_buffer_size=4"),
    ({"num_generations": 8}, "num_generations=8"),
    ({"max_prompt_length": 9}, "max_prompt_length=9"),
    ({"max_completion_length": 9}, "max_completion_length=9"),
    ({"adaptive_max_tokens": False}, "adaptive_max_tokens=False"),
    ({"gt_length_multiplier": 2.0}, "gt_length_multiplier=2.0"),
    ({"stop": ("a", "b")}, "stop=a b"),
    ({"share_prompt": False}, "share_prompt=False"),
    ({"num_iterations": 2}, "num_iterations=2"),
    ({"minibatches_per_rollout": 2}, "minibatches_per_rollout=2"),
    ({"run": RunConfig(packing=False)}, "packing=False"),
]
OF_STRIDED = [
    ({"stride": 2}, "stride=2"),
    ({"context_length": 4}, "context_length=4"),
    ({"generate_max_len": 4}, "generate_max_len=4"),
    ({"n_samples_per_prompt": 2}, "n_samples_per_prompt=2"),
    ({"min_completion_prefix": 1}, "min_completion_prefix=1"),
    ({"max_length": 64}, "max_length=64"),
]


def test_settings_of_one_mode_are_rejected_in_the_other():
    for settings, start in OF_STRUCTURED:
        with pytest.raises(ValueError) as caught:
            make(mode="strided", **settings)
        assert str(caught.value) == f"{start}: has no effect in mode=strided"
    for settings, start in OF_STRIDED:
        with pytest.raises(ValueError) as caught:
            make(strided=StridedConfig(**settings))
        assert str(caught.value) == f"{start}: has no effect in mode=structured"


# Bare commands.


def test_each_mode_has_a_recipe_of_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    _, cfg, _ = parse(["--method", "ebft", "--mode", "strided"])
    assert "ebft_strided_tiny.yaml" in capsys.readouterr().err
    assert (cfg.mode, cfg.model.model, cfg.strided.stride, cfg.features.ce_coef) == ("strided", "builtin:tiny", 2, 0.03)
    for argv in (["--method", "ebft"], ["--method", "ebft", "--mode", "structured"]):
        _, cfg, _ = parse(argv)
        assert "ebft_tiny.yaml" in capsys.readouterr().err
        assert (cfg.mode, cfg.model.model, cfg.num_generations) == ("structured", "builtin:tiny", 8)
    _, cfg, _ = parse(["--method", "ebft", "--mode", "strided", "--model", "m", "--data", "d"])
    assert cfg.strided.stride == 8 and capsys.readouterr().err == ""
