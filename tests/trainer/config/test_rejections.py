"""Settings that are out of range, contradict each other or have no effect: the error names the setting."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from data.errors import UserError
from rollout.episodes.options import ToolConfig
from trainer.config.blocks import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    MovingReferenceConfig,
    OptimConfig,
    PromptConfig,
    RolloutConfig,
    RunConfig,
    check_evaluation,
)
from trainer.config.groups import AdvantageConfig, AsyncConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig, check_policy_options
from trainer.methods import ebft, gdpo, grpo, rloo, sft

MODEL = ModelConfig(model="m")
HELD_OUT = PromptConfig(data=("d",), eval_data=("e",))
MOVING = MovingReferenceConfig(sync_ref_model=True)
WITH_KL = PolicyLossConfig(beta=0.1)
PARTIAL = RolloutConfig(partial=0.5)
STREAMING = AsyncConfig(streaming_partial_batch=True)
DATA = partial(DataConfig, data=("a",))
SFT = partial(sft.Config, model=MODEL, data=DataConfig(data=("a",)))
GRPO, GDPO, EBFT = (partial(method.Config, **{"model": MODEL, "data": PromptConfig(data=("d",))})
                    for method in (grpo, gdpo, ebft))  # fmt: skip
OFF = {"vllm_importance_sampling_correction": False}
BEHAVIOUR = {"proximal_policy": "behaviour"}

REJECTED: list[tuple[Any, dict[str, Any], str]] = [
    (DATA, {"val_set_size": -1}, "val_set_size=-1: must be 0"),
    (DATA, {"val_set_size": math.nan}, "val_set_size=nan: must be 0"),
    (DATA, {"val_set_size": 1.5}, "val_set_size=1.5: "),
    (DATA, {"val_set_size": 0.1, "eval_data": ("b",)}, "val_set_size=0.1: conflicts with eval_data=b"),
    (OptimConfig, {"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup_steps=3 conflicts with warmup_ratio=0.1"),
    (OptimConfig, {"warmup_steps": -1}, "warmup_steps=-1: must be 0 or more"),
    (OptimConfig, {"min_lr_ratio": 0.1}, "min_lr_ratio=0.1: has no effect with lr_scheduler_type=cosine"),
    (OptimConfig, {"decay_ratio": 0.2}, "decay_ratio=0.2: has no effect with lr_scheduler_type=cosine"),
    (OptimConfig, {"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type=cosine_with_min_lr: needs"),
    (OptimConfig, {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.0}, "decay_ratio=0.0: must be above 0"),
    (RunConfig, {"saves_per_epoch": 1, "save_steps": 5}, "save_steps=5: has no effect with saves_per_epoch=1"),
    (RunConfig, {"evals_per_epoch": 4, "eval_steps": 5}, "eval_steps=5: has no effect with evals_per_epoch=4"),
    (RunConfig, {"evals_per_epoch": -1}, "evals_per_epoch=-1: must be 0"),
    (RunConfig, {"loss_watchdog_patience": 5}, "loss_watchdog_patience=5: has no effect without"),
    (RunConfig, {"loss_watchdog_threshold": 5, "loss_watchdog_patience": 0}, "loss_watchdog_patience=0: must be 1"),
    (RunConfig, {"loss_watchdog_threshold": math.nan}, "loss_watchdog_threshold=nan: "),
    (SFT, {"run": RunConfig(evals_per_epoch=4)}, "evals_per_epoch=4: has no effect without held-out rows"),
    (SFT, {"roles_to_train": ("human",)}, "roles_to_train=human: "),
    (SFT, {"roles_to_train": ()}, "roles_to_train is empty"),
    (SFT, {"roles_to_train": ("user",), "train_on_inputs": True}, "roles_to_train=user: has no effect with train_on"),
    (MovingReferenceConfig, {"sync_ref_model": True, "ref_model_sync_steps": 0}, "ref_model_sync_steps=0: must be"),
    (MovingReferenceConfig, {"sync_ref_model": True, "ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha=1.5: must"),
    (MovingReferenceConfig, {"ref_model_mixup_alpha": 0.5}, "ref_model_mixup_alpha=0.5: has no effect"),
    (MovingReferenceConfig, {"ref_model_sync_steps": 5}, "ref_model_sync_steps=5: has no effect"),
    (PolicyLossConfig, {"epsilon": -0.1}, "epsilon=-0.1: must be 0 or above"),
    (PolicyLossConfig, {"epsilon": 1.5}, "epsilon=1.5: must be at most 1"),
    (PolicyLossConfig, {"epsilon_high": math.inf}, "epsilon_high=inf: must be 0 or above"),
    (PolicyLossConfig, {"beta": math.nan}, "beta=nan: must be 0 or above"),
    (PolicyLossConfig, {"entropy_coef": -1.0}, "entropy_coef=-1.0: must be 0 or above"),
    (PolicyLossConfig, {"entropy_target": 0.0}, "entropy_target=0.0: must be above 0"),
    (PolicyLossConfig, {"entropy_target": 0.2, "entropy_coef_step": 0.0}, "entropy_coef_step=0.0: must be above 0"),
    (PolicyLossConfig, {"entropy_coef_step": 0.1}, "entropy_coef_step=0.1: has no effect without --entropy-target"),
    (PolicyLossConfig, {"entropy_coef_max": 0.1}, "entropy_coef_max=0.1: has no effect without --entropy-target"),
    (PolicyLossConfig, {"entropy_target": 0.2, "entropy_coef": 0.2, "entropy_coef_max": 0.1},
     "entropy_coef=0.2: must be at most entropy_coef_max=0.1"),
    (PolicyLossConfig, {"delta": 1.2}, "delta=1.2: must be above 1 + epsilon_high = 1.2"),
    (PolicyLossConfig, {"delta": 1.25, "epsilon_high": 0.28}, "delta=1.25: must be above 1 + epsilon_high = 1.28"),
    (PolicyLossConfig, {"dual_clip": 1.0}, "dual_clip=1.0: must be above 1"),
    (PolicyLossConfig, {"dual_clip": 3.0, "delta": 4.0}, "dual_clip=3.0: bounds the same tokens as delta=4.0"),
    (PolicyLossConfig, {"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0: must be above 0"),
    (PolicyLossConfig, {"top_entropy_quantile": 1.1}, "top_entropy_quantile=1.1: must be above 0 and at most 1"),
    *((PolicyLossConfig, {"loss_type": kind, "loss_kwargs": {name: 0.0}}, f"loss_kwargs.{name}=0.0: must be above 0")
      for kind, name in (("cispo", "cispo_cap"), ("sapo", "sapo_temperature_neg"), ("vespo", "vespo_k_pos"))),
    (PolicyLossConfig, {"loss_type": "cispo", "loss_kwargs": {"cispo_cap": "5"}},
     "loss_kwargs.cispo_cap=5: expected a"),
    (PolicyLossConfig, {"loss_kwargs": {"cispo_cap": 3}},
     "loss_kwargs.cispo_cap=3: not an option of loss_type=dapo; it is for cispo"),
    (PolicyLossConfig, {"loss_kwargs": {"epsilon": 0.1}},
     "loss_kwargs.epsilon=0.1: not an option of loss_type=dapo; use --"),
    (PolicyLossConfig, {"loss_type": "cispo", "epsilon_high": 5.0},
     "epsilon_high=5.0: has no effect with loss_type=cispo"),
    (PolicyLossConfig, {"loss_type": "sapo", "epsilon": 0.1},
     "epsilon=0.1: has no effect with loss_type=sapo; it is for grpo"),
    *((PolicyLossConfig, {"loss_type": kind, "importance_sampling_level": "sequence"},
       f"importance_sampling_level=sequence: has no effect with loss_type={kind}")
      for kind in ("rloo", "vespo", "reinforce", "dppo_tv")),
    (PolicyLossConfig, {"loss_type": "dppo_kl", "epsilon": 0.1}, "epsilon=0.1: has no effect with loss_type=dppo_kl"),
    (PolicyLossConfig, {"loss_type": "dppo_tv", "loss_kwargs": {"dppo_threshold": 0}}, "loss_kwargs.dppo_threshold=0"),
    (PolicyLossConfig, {"kl_estimator": "k2"}, "kl_estimator=k2: has no effect with beta=0"),
    (PolicyLossConfig, {"use_bias_correction_kl": False}, "use_bias_correction_kl=False: has no effect with beta=0"),
    (CorrectionConfig, {"vllm_importance_sampling_cap": 0.0}, "vllm_importance_sampling_cap=0.0: must be above 0"),
    (CorrectionConfig, {"vllm_importance_sampling_cap": None},
     "vllm_importance_sampling_cap=None: token_truncate needs"),
    (CorrectionConfig, {"vllm_importance_sampling_mode": "icepop", "vllm_importance_sampling_cap": None},
     "vllm_importance_sampling_cap=None: icepop"),
    (CorrectionConfig, {"vllm_importance_sampling_min": 3.0}, "vllm_importance_sampling_min=3.0: must be below"),
    (CorrectionConfig, {"vllm_importance_sampling_mode": "icepop", "vllm_importance_sampling_cap": 0.4},
     "vllm_importance_sampling_min=0.5: must be below vllm_importance_sampling_cap=0.4"),
    (CorrectionConfig, {"geometric_min": 1.1, "geometric_max": 1.0},
     "geometric_min=1.1: must be below geometric_max=1.0"),
    (CorrectionConfig, {"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold=-0.1: must be 0 or above"),
    *((CorrectionConfig, {name: value, **off}, f"{name}={value}: has no effect with {next(iter(off))}")
      for name, value in (("vllm_importance_sampling_mode", "icepop"), ("vllm_importance_sampling_cap", 2.0),
                          ("vllm_importance_sampling_min", 0.5), ("geometric_max", 1.5)) for off in (OFF, BEHAVIOUR)),
    (AdvantageConfig, {"advantage_estimator": "normalize_then_sum", "scale_rewards": "batch"},
     "scale_rewards=batch: has no effect with advantage_estimator=normalize_then_sum"),
    (AdvantageConfig, {"advantage_estimator": "normalize_then_sum", "kl_in_reward": True}, "kl_in_reward=True: "),
    (AdvantageConfig, {"advantage_estimator": "max_rl", "kl_in_reward": True}, "kl_in_reward=True: advantage_est"),
    (AdvantageConfig, {"advantage_estimator": "max_rl", "scale_rewards": "none"}, "scale_rewards=none: has no ef"),
    (AdvantageConfig, {"advantage_estimator": "reinforce_plus_plus", "kl_in_reward": True}, "kl_in_reward=True: adv"),
    (GRPO, {"advantage": AdvantageConfig(advantage_estimator="reinforce_plus_plus_baseline"), "num_generations": 1},
     "num_generations=1: a group needs"),
    (AdvantageConfig, {"advantage_kwargs": {"keep": 1}},
     "advantage_kwargs.keep: not an option of advantage_estimator=group"),
    (AsyncConfig, {"prefetch_depth": 0}, "prefetch_depth=0: must be 1 or more"),
    (AsyncConfig, {"prefetch_depth": 2}, "prefetch_depth=2: has no effect without --async-prefetch"),
    (RolloutConfig, {"partial": 1.5}, "rollout.partial=1.5: must be between 0 and 1"),
    (GRPO, {"rollout": RolloutConfig(partial=0.5, engine="vllm")}, "rollout.partial=0.5: has no effect with rol"),
    (GRPO, {"rollout": PARTIAL, "overlap": AsyncConfig(async_prefetch=True)}, "rollout.partial=0.5: has no effect"),
    (GRPO, {"rollout": PARTIAL, "tools": ToolConfig(rollout_func="a.b")}, "rollout.partial=0.5: has no effect"),
    (GRPO, {"rollout": PARTIAL, "overlap": AsyncConfig(max_staleness=1), "num_iterations": 2}, "max_staleness=1: with"),
    (GRPO, {"rollout": PARTIAL, "overlap": STREAMING}, "streaming_partial_batch=True: has"),
    (GRPO, {"overlap": AsyncConfig(max_staleness=1)}, "max_staleness=1: has no effect without --async-pre"),
    (GRPO, {"moving": MOVING}, "sync_ref_model=True: there is no reference to move with beta=0"),
    (GRPO, {"moving": MOVING, "policy_loss": WITH_KL, "lora": LoraConfig(r=4)}, "sync_ref_model=True: with LoRA"),
    (GRPO, {"num_generations_eval": 0}, "num_generations_eval=0: must be 1 or more"),
    (GRPO, {"num_generations_eval": 4}, "num_generations_eval=4: has no effect without held-out rows"),
    (GRPO, {"num_generations_eval": 4, "data": HELD_OUT}, "num_generations_eval=4: greedy completions"),
    (GRPO, {"policy_loss": PolicyLossConfig(loss_type="reinforce"), "num_iterations": 2},
     "num_iterations=2: loss_type=reinforce has no importance ratio"),
    (GRPO, {"policy_loss": PolicyLossConfig(loss_type="reinforce"), "minibatches_per_rollout": 2},
     "minibatches_per_rollout=2: loss_type=reinforce has no importance ratio"),
    (GRPO, {"policy_loss": PolicyLossConfig(loss_type="reinforce"), "correction": CorrectionConfig(**BEHAVIOUR)},
     "proximal_policy=behaviour: loss_type=reinforce has no ratio"),
    (GRPO, {"advantage": AdvantageConfig(kl_in_reward=True)}, "kl_in_reward=True: has no effect with beta=0"),
    (GRPO, {"advantage": AdvantageConfig(kl_in_reward=True),
            "policy_loss": PolicyLossConfig(beta=0.1, kl_estimator="k1")},
     "kl_estimator=k1: has no effect with kl_in_reward=True"),
    (GDPO, {"advantage": AdvantageConfig()}, "advantage_estimator=group: gdpo is normalize_then_sum"),
    (EBFT, {"moving": MOVING}, "sync_ref_model=True: there is no KL"),
    (EBFT, {"moving": MOVING, "policy_loss": WITH_KL},
     "sync_ref_model=True: the reference is also the feature network"),
    (EBFT, {"num_generations_eval": 4}, "num_generations_eval=4: has no effect here"),
    (EBFT, {"num_generations_eval": 4, "mode": "strided"}, "num_generations_eval=4: has no effect in mode=strided"),
    (EBFT, {"moving": MOVING, "mode": "strided"}, "sync_ref_model=True: has no effect in mode=strided"),
]  # fmt: skip


def test_the_error_names_the_setting():
    for config, settings, start in REJECTED:
        with pytest.raises(UserError) as error:
            config(**settings)
        assert str(error.value).startswith(start) and "\n" not in str(error.value), (settings, str(error.value))


def test_valid_combinations_are_accepted():
    check_policy_options(PolicyLossConfig(), CorrectionConfig(), num_iterations=4)
    check_policy_options(PolicyLossConfig(loss_type="reinforce"), CorrectionConfig(), num_iterations=1)
    check_policy_options(PolicyLossConfig(beta=0.05), CorrectionConfig(), num_iterations=1, kl_in_reward=True)
    PolicyLossConfig(epsilon=0.2, epsilon_high=0.28, delta=4.0)
    CorrectionConfig(vllm_importance_sampling_cap=None, vllm_importance_sampling_min=0.1)
    check_evaluation(DATA(), RunConfig(evals_per_epoch=0))
    check_evaluation(DATA(val_set_size=0.1), RunConfig(evals_per_epoch=4))
    cfg = GRPO(rollout=PARTIAL, overlap=AsyncConfig(max_staleness=2), num_generations=2, minibatches_per_rollout=2)
    assert cfg.queued_groups == cfg.prompts_per_step  # half of two mini-batches
    assert GRPO(moving=MOVING, policy_loss=WITH_KL).has_reference and not GRPO().has_reference
    assert rloo.Config(model=MODEL, data=PromptConfig(data=("d",)), moving=MOVING).has_reference


def test_rows_are_held_out_by_either_setting():
    assert not DATA().holds_out and DATA(eval_data=("b",)).holds_out and DATA(val_set_size=5).holds_out
