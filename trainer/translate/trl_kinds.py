"""TRL's config classes: the fields of supported classes, and the names of others.

    kind, note = find_kind(tree)     # from config_class, or from the fields; `note` reports what was assumed

Fields are TRL 1.16's, without transformers' TrainingArguments, plus fields of earlier versions. PPO and PRM, which were
removed before 1.16, have the fields of 1.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from data.errors import UserError
from trainer.config.preference import PairLossType


class Kind(NamedTuple):
    config: str  # TRL's class
    method: str  # strop's method
    fields: frozenset[str]


def _kind(config: str, method: str, *fields: str) -> Kind:
    return Kind(config, method, frozenset(" ".join(fields).split()))


VLLM = (
    "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_tensor_parallel_size vllm_max_model_length vllm_max_model_len vllm_dtype vllm_device "
    "vllm_enable_prefix_caching vllm_guided_decoding_regex"
)
GENERATION = (
    "temperature top_p top_k min_p repetition_penalty generation_kwargs cache_implementation ds3_gather_for_generation "
    "disable_dropout"
)
LOGGED = "log_completions num_completions_to_print log_unique_prompts"
MOVING = "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
GROUPS = (
    "router_aux_loss_coef num_generations num_generations_eval max_completion_length max_prompt_length shuffle_dataset "
    "pad_to_multiple_of generation_batch_size steps_per_generation chat_template_kwargs beta num_iterations epsilon "
    "epsilon_high reward_weights mask_truncated_completions log_multimodal use_transformers_continuous_batching "
    "transformers_continuous_batching_config use_transformers_paged wandb_log_unique_prompts reward_funcs "
    "reward_model_name_or_path"
)
LENGTHS = "max_length max_prompt_length disable_dropout dataset_num_proc"
REFERENCE = (
    "router_aux_loss_coef pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size beta "
    "activation_offloading padding_value label_pad_token_id is_encoder_decoder generate_during_eval "
    "model_adapter_name ref_adapter_name force_use_ref_model ref_model_init_kwargs"
)
TEXT = (
    "router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token max_length "
    "truncation_mode shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of eval_packing "
    "completion_only_loss assistant_only_loss loss_type activation_offloading pad_token max_seq_length "
    "dataset_batch_size num_of_sequences chars_per_token"
)
PAIRS = "max_completion_length beta padding_value label_pad_token_id generate_during_eval is_encoder_decoder"
TEACHER = "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs"

KINDS = {
    "grpo": _kind(
        "GRPOConfig", "grpo", GROUPS, VLLM, GENERATION, LOGGED, MOVING,
        "cast_lm_head_to_fp32 delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg "
        "vespo_lambda_neg importance_sampling_level multi_objective_aggregation scale_rewards loss_type "
        "top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta "
        "entropy_target max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap "
        "off_policy_mask_threshold use_bias_correction_kl log_completions_hub_repo use_liger_loss",
    ),
    "rloo": _kind(
        "RLOOConfig", "rloo", GROUPS, VLLM, GENERATION, LOGGED, MOVING, "normalize_advantages reward_clip_range",
    ),
    "dpo": _kind(
        "DPOConfig", "dpo", LENGTHS, REFERENCE, MOVING,
        "truncation_mode padding_free loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef "
        "label_smoothing use_weighting discopop_tau pad_token rpo_alpha reference_free max_target_length "
        "use_logits_to_keep use_liger_loss max_completion_length",
    ),
    "kto": _kind(
        "KTOConfig", "kto", LENGTHS, REFERENCE, MOVING,
        "loss_type desirable_weight undesirable_weight max_completion_length",
    ),
    "sft": _kind("SFTConfig", "sft", TEXT, "use_liger_loss"),
    "reward": _kind(
        "RewardConfig", "rm", "chat_template_path disable_dropout dataset_num_proc eos_token max_length "
        "pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token",
    ),
    "online_dpo": _kind(
        "OnlineDPOConfig", "online_dpo", VLLM, GENERATION,
        "reward_model_path max_new_tokens max_length missing_eos_penalty beta loss_type reward_weights "
        "dataset_num_proc",
    ),
    "ppo": _kind(
        "PPOConfig", "ppo", "dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size "
        "num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty "
        "sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size "
        "local_mini_batch_size mini_batch_size reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs "
        "whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam ds3_gather_for_generation",
    ),
    "distillation": _kind(
        "DistillationConfig", "opd", VLLM, GENERATION, LOGGED, TEACHER,
        "max_completion_length shuffle_dataset pad_to_multiple_of chat_template_kwargs beta "
        "max_tool_calling_iterations",
    ),
    "gkd": _kind(
        "GKDConfig", "opd", TEXT, TEACHER, "temperature lmbda beta max_new_tokens disable_dropout seq_kd",
    ),
    "orpo": _kind("ORPOConfig", "orpo", LENGTHS, PAIRS),
    "cpo": _kind("CPOConfig", "cpo", LENGTHS, PAIRS, "label_smoothing loss_type cpo_alpha simpo_gamma alpha"),
    "prm": _kind(
        "PRMConfig", "prm", "max_length max_completion_length max_prompt_length disable_dropout dataset_num_proc "
        "step_separator train_on_last_step_only",
    ),
}  # fmt: skip
# Other classes, with fields that only they have.
UNSUPPORTED = {
    "A2POConfig": "num_value_samples beta1 filter_all_incorrect beta2",
    "AsyncDistillationConfig": "teacher_server_urls teacher_temperature teacher_top_k add_tail_bucket",
    "AsyncGRPOConfig": "fork_threshold_tokens max_inflight_tasks queue_maxsize weight_sync_steps token_budget "
    "heartbeat_stale_after_s request_timeout weight_sync_timeout max_staleness",
    "BCOConfig": "prompt_sample_size min_density_ratio max_density_ratio",
    "GMPOConfig": "",
    "GOLDConfig": "use_uld_loss uld_token_merge_strategy use_extended_uld uld_use_hybrid_loss uld_crossentropy_weight "
    "uld_distillation_weight uld_student_temperature uld_teacher_temperature teacher_tokenizer_name_or_path",
    "GRPOWithReplayBufferConfig": "replay_buffer_size",
    "IWOPDConfig": "distillation_objective iw_opd_gamma iw_opd_epsilon",
    "MiniLLMConfig": "rkl_advantage single_step_decomposition kd_temperature length_normalization",
    "NashMDConfig": "mixture_coef",
    "SDFTConfig": "generate_from_teacher teacher_prompt_template num_loss_tokens_to_skip",
    "SDPOConfig": "dont_reprompt_on_self_success use_successful_as_teacher success_reward_threshold reprompt_template",
    "SSDConfig": "filter_empty",
    "ServerDistillationConfig": "teacher_model_server_url",
    "TPOConfig": "tpo_alpha tpo_l_gamma",
    "XPOConfig": "",
}
LOSSES = {"kto": ("kto", "apo_zero_unpaired"), "sft": ("nll", "dft", "chunked_nll"), "gkd": ("nll", "chunked_nll"),
          "grpo": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
          "dpo": get_args(PairLossType), "cpo": ("sigmoid", "hinge", "ipo", "simpo", "alphapo"),
          "online_dpo": ("sigmoid", "ipo")}  # fmt: skip
ELSEWHERE = {
    "GRPOWithReplayBufferConfig": "use --method grpo --replay-buffer-size N",
    "AsyncGRPOConfig": "use --method grpo --async-prefetch",
    "ServerDistillationConfig": "use --method opd --teacher-url URL",
}


def kind_of_class(name: str) -> str:
    found = next((kind for kind, entry in KINDS.items() if entry.config == name), None)
    if found is None:
        advice = ELSEWHERE.get(name, "docs/extending.md shows how to write a method")
        if name not in UNSUPPORTED:
            advice = f"if it extends a class of TRL, add --kind {', '.join(KINDS)}"
        raise UserError(f"{name}: strop has no such method; {advice}")
    return found


def find_kind(tree: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the kind of a config, and a sentence if it was assumed; ask for --kind if three or more kinds fit."""
    if tree.get("config_class") is not None:
        return kind_of_class(str(tree["config_class"])), None
    given = {key for key, value in tree.items() if value is not None}
    for name, fields in UNSUPPORTED.items():
        if own := sorted(given & set(fields.split())):
            advice = ELSEWHERE.get(name, "docs/extending.md shows how to write a method")
            raise UserError(f"{own[0]} is a field of {name}: strop has no such method; {advice}")
    if "mixture_coef" not in given and {"alpha", "reward_model_path"} <= given:
        return kind_of_class("XPOConfig"), None
    loss = tree.get("loss_type")
    losses = {str(one) for one in (loss if isinstance(loss, list) else [loss])}
    fits = {kind: len(given & entry.fields) for kind, entry in KINDS.items()
            if loss is None or kind not in LOSSES or losses <= set(LOSSES[kind])}  # fmt: skip
    most = max(fits.values(), default=0)
    best = [kind for kind, count in fits.items() if count == most]
    if most == 0:
        raise UserError(f"no field identifies the TRL config class; add --kind {', '.join(KINDS)}")
    if len(best) > 2:
        names = ", ".join(KINDS[kind].config for kind in best)
        raise UserError(f"the fields fit {names}; choose one with --kind, for example --kind {best[0]}")
    others = f", which has the same fields as {KINDS[best[1]].config}" if len(best) == 2 else ""
    return best[0], f"read as {KINDS[best[0]].config}{others}; if it is another, add --kind NAME"
