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


FEATURES = {
    "a layer above the last": ({"feature_layers": (0.5, 1.5)}, "feature_layers=1.5:"),
    "a layer below the first": ({"feature_layers": (-0.1,)}, "feature_layers=-0.1:"),
    "a layer that is no number": ({"feature_layers": (float("nan"),)}, "feature_layers=nan:"),
    "no layer": ({"feature_layers": ()}, "feature_layers=[]:"),
    "nothing to learn from": ({"rl_coef": 0.0, "ce_coef": 0.0}, "rl_coef=0, ce_coef=0: there is nothing to learn from"),
    "no reward": ({"alignment_coef": 0.0, "diversity_coef": 0.0}, "alignment_coef=0, diversity_coef=0: every reward"),
    "a weight below 0": ({"ce_coef": -0.1}, "ce_coef=-0.1: must be 0 or above"),
    "a weight without end": ({"rl_coef": float("inf")}, "rl_coef=inf: must be 0 or above"),
    "a weight that is no number": ({"diversity_coef": float("nan")}, "diversity_coef=nan: must be 0 or above"),
    "a way to whiten without whitening": ({"whiten_gt": "sample"}, "whiten_gt=sample: has no effect without whitening"),
}


def test_features():
    for name, (settings, sentence) in FEATURES.items():
        with pytest.raises(ValueError) as caught:
            FeatureConfig(**settings)
        assert str(caught.value).startswith(sentence), name


def test_rewards_of_no_weight_are_good_where_nothing_is_made_of_them():
    assert FeatureConfig(alignment_coef=0.0, diversity_coef=0.0, rl_coef=0.0, ce_coef=1.0).ce_coef == 1.0


@pytest.mark.parametrize(("mode", "estimator"), [("structured", "rloo"), ("strided", "grpo")])
def test_one_rollout_cannot_be_compared(mode, estimator):
    strided = mode == "strided"
    one = {"strided": StridedConfig(n_samples_per_prompt=1)} if strided else {"num_generations": 1}
    name = "n_samples_per_prompt" if strided else "num_generations"
    with pytest.raises(ValueError, match=rf"^{name}=1: advantage_estimator={estimator} compares .* draw 2 or more"):
        make(mode=mode, **one, **features(advantage_estimator=estimator))
    with pytest.raises(ValueError, match=rf"^{name}=1: use_whitening scales .* draw 2 or more, or leave it off$"):
        make(mode=mode, **one, **features(advantage_estimator="reinforce", use_whitening=True))


STRIDED = {
    "stride": ({"stride": 0}, "stride=0: must be 1 or more"),
    "context": ({"context_length": 0}, "context_length=0: must be 1 or more"),
    "block": ({"generate_max_len": 0}, "generate_max_len=0: must be 1 or more"),
    "samples": ({"n_samples_per_prompt": 0}, "n_samples_per_prompt=0: must be 1 or more"),
    "prefix": ({"min_completion_prefix": -1}, "min_completion_prefix=-1: must be 0 or more"),
    "no room": ({"max_length": 15}, "max_length=15: has no room for context_length + generate_max_len = 16 tokens"),
}


def test_strided():
    for name, (settings, sentence) in STRIDED.items():
        with pytest.raises(ValueError) as caught:
            StridedConfig(**settings)
        assert str(caught.value).startswith(sentence), name
    assert StridedConfig(max_length=16).max_length == 16


STRUCTURED: dict[str, tuple[dict[str, Any], str]] = {
    "groups that do not divide": ({"num_generations": 3}, "num_generations=3: .* = 8 completions a step .*=3$"),
    "no completions": ({"num_generations": 0}, "num_generations=0: must be 1 or more"),
    "no tokens": ({"max_completion_length": 0}, "max_completion_length=0: must be 1 or more"),
    "no iterations": ({"num_iterations": 0}, "num_iterations=0: must be 1 or more"),
    "no mini-batches": ({"minibatches_per_rollout": 0}, "minibatches_per_rollout=0: must be 1 or more"),
    "empty stop": ({"stop": ("",)}, "stop='': an empty stop string"),
    "temperature 0": ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
    "temperature nan": ({"temperature": float("nan")}, "temperature=nan: must be above 0"),
    "temperature inf": ({"temperature": float("inf")}, "temperature=inf: must be above 0"),
    "a target times nothing": ({"gt_length_multiplier": 0.0}, "gt_length_multiplier=0.0: must be 0.1 or more"),
    "a target times nan": ({"gt_length_multiplier": float("nan")}, "gt_length_multiplier=nan: must be 0.1 or more"),
    "a length that is not asked for": (
        {"gt_length_multiplier": 2.0, "adaptive_max_tokens": False},
        "gt_length_multiplier=2.0: has no effect without adaptive_max_tokens",
    ),
    "greedy evaluation": (
        {"rollout": RolloutConfig(eval_temperature=0.5)},
        "rollout.eval_temperature=0.5: has no effect here, held-out groups are sampled as those of training are",
    ),
    "servers for local": (
        {"rollout": RolloutConfig(engine="local"), "vllm": VllmConfig(replicas=2)},
        "vllm.replicas=2: has no effect with rollout.engine=local",
    ),
    "evaluation of nothing": ({"run": RunConfig(eval_steps=2)}, "eval_steps=2: has no effect without held-out rows"),
}  # fmt: skip


def test_structured():
    for settings, sentence in STRUCTURED.values():
        with pytest.raises(ValueError, match=f"^{sentence}"):
            make(**settings)
    with pytest.raises(ValueError, match=r"^temperature=0\.0: must be above 0"):
        make(mode="strided", temperature=0.0)


# A setting of the other mode -> how the sentence begins.
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


def test_what_one_mode_reads_is_refused_by_name_in_the_other():
    for settings, start in OF_STRUCTURED:
        with pytest.raises(ValueError) as caught:
            make(mode="strided", **settings)
        assert str(caught.value) == f"{start}: has no effect in mode=strided; leave it out"
    for settings, start in OF_STRIDED:
        with pytest.raises(ValueError) as caught:
            make(strided=StridedConfig(**settings))
        assert str(caught.value) == f"{start}: has no effect in mode=structured; leave it out"


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


def test_what_can_have_no_effect_is_refused():
    with pytest.raises(ValueError, match=r"^reroll_start_fraction=0\.5: has no effect here"):
        make(overlap=AsyncConfig(reroll_start_fraction=0.5))
    alone = features(advantage_estimator="reinforce", diversity_coef=0.5)
    with pytest.raises(ValueError, match=r"^diversity_coef=0\.5: has no effect with num_generations=1"):
        make(num_generations=1, **alone)
