"""Translate the fields of TRL's config classes (trl_kinds.KINDS).

    made, without = translate(tree, kind)        # `without`: a sentence for each field without an equivalent

The file may also contain fields of TRL's ModelConfig and ScriptArguments, like the YAML of TRL's commands. If a
missing field has a different default in TRL, TRL's default is set (DEFAULTS).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.command.checks import check_number
from data.errors import UserError
from data.sources import SUFFIXES
from rollout.model_folder import read_local
from trainer.config.old_flags import OLD_FLAGS
from trainer.translate import keys
from trainer.translate.keys import (
    FULL,
    SAME,
    Key,
    Theirs,
    Translation,
    Why,
    each,
    idle,
    listed,
    number,
    rejected,
    shown,
    to,
)
from trainer.translate.trl_kinds import KINDS

LAUNCH = "start strop with torchrun; ZeRO and FSDP become --parallel.mode fsdp"

GROUPED = ("grpo", "rloo")
DISTILLING = ("distillation", "gkd")
SAMPLING = (*GROUPED, "online_dpo", "ppo", *DISTILLING)

# Flags to set for missing fields, because TRL's default differs.
EVERYWHERE: dict[str, Any] = {"num_train_epochs": 3.0, "lr_scheduler_type": "linear", "seed": 42, "logging_steps": 10,
                              "save_steps": 500, "gradient_checkpointing": True}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {**EVERYWHERE, "learning_rate": 1e-6, "max_completion_length": 512},
    "rloo": {**EVERYWHERE, "learning_rate": 1e-6, "max_completion_length": 512, "num_generations": 2},
    "dpo": {**EVERYWHERE, "learning_rate": 1e-6},
    "kto": {**EVERYWHERE, "learning_rate": 1e-6},
    "sft": {**EVERYWHERE, "learning_rate": 2e-5},
    "reward": {**EVERYWHERE, "learning_rate": 1e-4},
    "online_dpo": {**EVERYWHERE, "learning_rate": 5e-7, "num_generations": 2, "per_device_train_batch_size": 16,
                   "max_completion_length": 64, "temperature": 0.9},
    "ppo": {**EVERYWHERE, "learning_rate": 3e-6, "critic_learning_rate": 3e-6, "max_completion_length": 53,
            "temperature": 0.7, "num_iterations": 4, "minibatches_per_rollout": 1, "beta": 0.05, "kl_in_reward": True},
    "distillation": {**EVERYWHERE, "learning_rate": 1e-6, "max_completion_length": 512, "jsd_beta": 1.0},
    "gkd": {**EVERYWHERE, "learning_rate": 2e-5, "max_completion_length": 128, "temperature": 0.9, "jsd_beta": 0.5,
            "student_data_fraction": 0.5},
    "orpo": {**EVERYWHERE, "learning_rate": 1e-6},
    "cpo": {**EVERYWHERE, "learning_rate": 1e-6},
    "prm": {**EVERYWHERE, "learning_rate": 1e-5},
}  # fmt: skip
LORA_DEFAULTS: dict[str, Any] = {"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05,
                                 "lora.target_modules": ["q_proj", "v_proj"]}  # fmt: skip
VLLM_DEFAULTS: dict[str, Any] = {"vllm_importance_sampling_mode": "sequence_mask", "vllm.colocate": True,
                                 "vllm.gpu_memory_utilization": 0.3}  # fmt: skip


SAME_EVERYWHERE = ("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
                   "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed",
                   "trust_remote_code", "gradient_checkpointing", "save_total_limit", "neftune_noise_alpha",
                   "warmup_ratio")  # fmt: skip
SAME_GROUPED = ("num_generations", "max_completion_length", "max_prompt_length", "temperature",
                 "beta", "num_iterations", "epsilon", "epsilon_high", "mask_truncated_completions", "reward_weights",
                 "chat_template_kwargs", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")  # fmt: skip
LOSS_KWARGS = ("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
               "vespo_lambda_neg")  # fmt: skip
SAME_GRPO = ("delta", "importance_sampling_level", "scale_rewards", "loss_type", "top_entropy_quantile", "entropy_coef",
             "off_policy_mask_threshold", "use_bias_correction_kl")  # fmt: skip
SAME_OF = {
    "grpo": (*SAME_GROUPED, *SAME_GRPO),
    "rloo": SAME_GROUPED,
    "dpo": ("max_length", "max_prompt_length", "loss_type", "loss_weights", "ld_alpha", "f_divergence_type",
            "f_alpha_divergence_coef", "label_smoothing", "beta", "use_weighting", "discopop_tau", "rpo_alpha",
            "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "reference_free"),
    "kto": ("max_length", "max_prompt_length", "loss_type", "beta", "desirable_weight", "undesirable_weight"),
    "sft": ("max_length",),
    "reward": ("max_length", "center_rewards_coefficient"),
    "online_dpo": ("beta", "loss_type", "temperature", "reward_weights", "missing_eos_penalty"),
    "ppo": ("temperature", "gamma", "cliprange_value"),
    "distillation": ("max_completion_length", "temperature", "chat_template_kwargs"),
    "gkd": ("temperature",),
    "orpo": ("max_length", "max_prompt_length"),
    "cpo": ("max_length", "max_prompt_length", "beta", "label_smoothing", "loss_type", "cpo_alpha"),
    "prm": ("max_length", "max_completion_length", "step_separator", "train_on_last_step_only"),
}  # fmt: skip
TEACHER = {"teacher_model_name_or_path": "teacher", "beta": "jsd_beta"}
RENAMED = {
    "online_dpo": {"max_new_tokens": "max_completion_length"},
    "ppo": {"response_length": "max_completion_length", "num_ppo_epochs": "num_iterations", "lam": "gae_lambda",
            "cliprange": "epsilon", "kl_coef": "beta"},
    "distillation": TEACHER,
    "gkd": {**TEACHER, "lmbda": "student_data_fraction", "max_new_tokens": "max_completion_length"},
    "orpo": {"beta": "orpo_alpha"},
}  # fmt: skip
# TRL's defaults of fields without effect; only other values are reported.
UNCHANGED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("remove_unused_columns", "disable_dropout", "dataloader_pin_memory"), (True, False)),
    **dict.fromkeys(("average_tokens_across_devices", "accelerator_config.even_batches", "log_on_each_node",
                     "accelerator_config.use_seedable_sampler", "logging_nan_inf_filter", "skip_memory_metrics",
                     "eval_do_concat_batches", "dataloader_in_order", "ds3_gather_for_generation", "log_multimodal",
                     "vllm_importance_sampling_correction", "save_safetensors"), (True,)),
    "ddp_timeout": (1800,), "local_rank": (-1, 0), "logging_strategy": ("steps",), "log_level": ("passive",),
    "include_num_input_tokens_seen": ("no", False), "log_level_replica": ("warning",), "project": ("huggingface",),
    "per_device_eval_batch_size": (8,), "hub_strategy": ("every_save",),
    "eval_delay": (0,), "length_column_name": ("length",), "packing_strategy": ("bfd",), "vllm_model_impl": ("vllm",),
    "vllm_group_port": (51216,), "vllm_mode": ("colocate",), "vllm_server_host": ("0.0.0.0",),
    "vllm_server_port": (8000,), "vllm_server_timeout": (240,), "vllm_gpu_memory_utilization": (0.3, 0.55),
    "vllm_tensor_parallel_size": (1,), "vllm_importance_sampling_mode": ("sequence_mask",),
    "vllm_importance_sampling_clip_max": (3,), "lora_r": (16,), "lora_alpha": (32,), "lora_dropout": (0.05,),
    "lora_task_type": ("CAUSAL_LM",), "bnb_4bit_quant_type": ("nf4",), "num_sample_generations": (10,),
    "local_rollout_forward_batch_size": (64,), "vf_coef": (0.1,), "max_length": (1024, 512), "loss_type": ("nll",),
    "dataset_text_field": ("text",), "truncation_mode": ("keep_start",), "model_revision": ("main",),
}  # fmt: skip
REWARDS = {"accuracy_reward": "math_verify", "think_format_reward": "regex:^<think>(?!.*<think>).*?</think>.*$",
           "get_soft_overlong_punishment": "soft_overlong:1280,256"}  # fmt: skip
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
BOOLS = {"yes": True, "true": True, "no": False, "false": False}
LISTS = ("datasets", "loss_type", "reward_funcs", "report_to")  # or a single one
PLACEHOLDERS = ("<EOS_TOKEN>", "<PAD_TOKEN>", "<HUB_TOKEN>")  # to_dict() writes them for unset tokens
DTYPES = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
UNLIMITED = 1 << 20  # tokens, for max_length: null; the model's context is the limit then

TABLE: dict[str, Key] = {
    **dict.fromkeys((*SAME_EVERYWHERE, *(name for names in SAME_OF.values() for name in names)), SAME),
    "epsilon": to("epsilon; above 1: 1, and epsilon_high"),
    "epsilon_high": to("epsilon_high; with loss_type cispo: loss_kwargs.cispo_cap"),
    "loss_type": to("loss_type; SFT: sft_loss"),
    "beta": to("beta; distillation and GKD: jsd_beta; ORPO: orpo_alpha"),
    "router_aux_loss_coef": to("router_aux_loss_coef; 0.001, the default of TRL 1.10: only for a model that is "
                               "known to have experts"),
    **each(" ".join(LOSS_KWARGS), to("loss_kwargs")),
    "multi_objective_aggregation": to("advantage_estimator: normalize_then_sum"),
    "max_seq_length": to("max_length"),
    "truncation_mode": to("rows are truncated on the right; keep_end: a note"),
    **each("num_train_epochs max_steps load_in_4bit lr_scheduler_type logging_steps report_to reward_funcs "
           "vllm_importance_sampling_correction vllm_importance_sampling_mode", SAME),
    "model_name_or_path": to("model"),
    **each("model_revision model_init_kwargs.revision", to("revision")),
    **each(" ".join(DTYPES), to("trained_dtype, dtype")),
    "bf16": to("dtype"),
    **each("attn_implementation model_init_kwargs.attn_implementation",
           to("attn_implementation: sdpa and eager; any other kernel: auto")),
    **each("use_peft lora_r", to("lora.r")),
    "lora_alpha": to("lora.alpha"),
    "lora_dropout": to("lora.dropout"),
    "lora_target_modules": to("lora.target_modules"),
    "lora_modules_to_save": to("lora.modules_to_save"),
    "use_rslora": to("lora.rslora"),
    "use_dora": to("lora.dora"),
    "load_in_8bit": to(keys.EIGHT_BITS),
    **each("dataset_name datasets[].path", to("data: path")),
    **each("dataset_config datasets[].name", to("data: name")),
    **each("dataset_train_split datasets[].split", to("data: split")),
    "datasets[].data_files": to("data: an entry for each file"),
    "dataset_test_split": to("eval_data: split"),
    "test_split_size": to("val_set_size"),
    "lr_scheduler_kwargs.min_lr_rate": to("min_lr_ratio"),
    "lr_scheduler_kwargs.*": rejected("this setting of a schedule is not supported"),
    "warmup_steps": to("warmup_steps; below 1: warmup_ratio"),
    "optim": to("optim: adamw, adamw_8bit or muon"),
    **each("save_steps save_strategy", to("save_steps, saves_per_epoch")),
    **each("eval_steps eval_strategy evaluation_strategy", to("eval_steps, evals_per_epoch")),
    **each("load_best_model_at_end greater_is_better", SAME),
    "metric_for_best_model": to("metric_for_best_model: a name in metrics.jsonl, such as eval/nll for loss"),
    "torch_compile": to("compile"),
    "activation_offloading": to("activation_offloading, with gradient_checkpointing"),
    "resume_from_checkpoint": to("resume"),
    "full_determinism": to("deterministic"),
    # sampling
    **each("generation_batch_size steps_per_generation", to("minibatches_per_rollout")),
    "use_vllm": to("rollout.engine: vllm or local"),
    "vllm_mode": to("vllm.colocate"),
    "vllm_server_base_url": to("vllm.url"),
    **each("vllm_server_host vllm_server_port", to("vllm.url for another machine; here vllm.port")),
    "vllm_server_timeout": to("vllm.timeout"),
    "vllm_gpu_memory_utilization": to("vllm.gpu_memory_utilization"),
    **each("vllm_max_model_length vllm_max_model_len", to("vllm.max_model_len")),
    "vllm_tensor_parallel_size": to("vllm.tensor_parallel_size"),
    **each("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", to("vllm_importance_sampling_cap")),
    "vllm_importance_sampling_clip_min": to("vllm_importance_sampling_min"),
    "reward_model_name_or_path": to("reward_funcs: model:NAME"),
    "max_tool_calling_iterations": to("a note: max_turns, one more, together with tools"),
    **each("use_adaptive_entropy entropy_target", to("entropy_target")),
    "entropy_coef_delta": to("entropy_coef_step, with use_adaptive_entropy"),
    "entropy_coef_max": to("entropy_coef_max, with use_adaptive_entropy"),
    "entropy_coef_min": to("0; more has no equivalent"),
    **each("top_p top_k min_p", to("the flag of that name, with grpo and rloo; with another method, a value that "
                                   "limits the distribution has no equivalent")),
    "repetition_penalty": to("1; another value has no equivalent"),
    # preferences, SFT
    "precompute_ref_log_probs": to("ref: precomputed"),
    "packing_strategy": to("bfd: longer sequences are truncated; another has no equivalent"),
    "packing": to("packing (a batch counts sequences, not packed rows)"),
    "dataset_text_field": to("data: format: completion, field_text"),
    "chat_template_path": to("chat_template"),
    **each("eos_token pad_token", to("special_tokens")),
    **each("completion_only_loss assistant_only_loss", to("train_on_inputs")),
    # distillation, PPO, online DPO, CPO
    "teacher_model_name_or_path": to("teacher"),
    "lmbda": to("student_data_fraction"),
    **each("max_new_tokens response_length", to("max_completion_length")),
    "sft_model_path": to("model"),
    "reward_model_path": to("reward_funcs: model:NAME; PPO: also value_model"),
    "num_ppo_epochs": to("num_iterations"),
    "num_mini_batches": to("minibatches_per_rollout, beyond gradient_accumulation_steps"),
    "total_episodes": to("max_steps"),
    "lam": to("gae_lambda"),
    "cliprange": to("epsilon"),
    "kl_coef": to("beta, with kl_in_reward"),
    **each("simpo_gamma alpha", to("the flag of that name, with a loss_type that reads it")),
    "kl_estimator": to("k1; k3 has no equivalent"),
    "stop_token": to("the end token always ends a completion"),
    "vf_coef": to("vf_coef, if there is no value_model"),
    **each("shuffle_dataset train_sampling_strategy", to("rows are drawn in random order; another order has no "
                                                          "equivalent")),
    # no effect
    **each("world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size "
           "mini_batch_size", idle("computed from the batch size")),
    **each("remove_unused_columns dataset_num_proc dataset_kwargs.* dataset_streaming streaming ignore_bias_buffers "
           "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
           "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order data_seed "
           "ignore_data_skip group_by_length length_column_name label_names datasets[].columns", idle(Why.ROWS)),
    **each("per_device_eval_batch_size eval_accumulation_steps torch_compile_backend torch_compile_mode tf32 "
           "use_liger_kernel liger_kernel_config.* use_cache torch_empty_cache_steps gradient_checkpointing_kwargs.* "
           "padding_free pad_to_multiple_of eval_packing precompute_ref_batch_size cast_lm_head_to_fp32 "
           "ds3_gather_for_generation cache_implementation use_transformers_paged use_transformers_continuous_batching "
           "transformers_continuous_batching_config.* vllm_enable_sleep_mode vllm_model_impl vllm_group_port "
           "auto_find_batch_size eval_do_concat_batches eval_use_gather_object batch_eval_metrics bf16_full_eval "
           "fp16_full_eval local_rollout_forward_batch_size", idle(Why.SPEED)),
    **each("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage", idle(Why.QUANTISED)),
    **each("log_completions num_completions_to_print log_unique_prompts log_multimodal wandb_log_unique_prompts "
           "log_completions_hub_repo num_sample_generations", idle(Why.SAMPLES)),
    **each("run_name project trackio_space_id trackio_bucket_id trackio_static_space_id logging_dir "
           "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
           "disable_tqdm include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics debug "
           "prediction_loss_only include_for_metrics eval_on_start eval_delay env.*", idle(Why.LOGS)),
    **each("push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
           idle(Why.HUB)),
    **each("local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
           "ddp_backend ddp_timeout accelerator_config.* use_cpu save_on_each_node average_tokens_across_devices",
           idle(Why.PROCESSES)),
    **each("do_train do_eval do_predict save_only_model save_safetensors overwrite_output_dir disable_dropout "
           "lora_task_type enable_jit_checkpoint restore_callback_states_from_checkpoint", idle(Why.INSIDE)),
    # of older versions
    **each("padding_value label_pad_token_id is_encoder_decoder dataset_batch_size num_of_sequences chars_per_token "
           "max_target_length dispatch_batches split_batches", idle(Why.ROWS)),
    **each("use_logits_to_keep use_liger_loss vllm_enable_prefix_caching vllm_dtype half_precision_backend "
           "fp16_backend fp16_opt_level torchdynamo jit_mode_eval use_ipex past_index", idle(Why.SPEED)),
    **each("generate_during_eval include_inputs_for_metrics tpu_metrics_debug", idle(Why.LOGS)),
    **each("vllm_device no_cuda use_mps_device tpu_num_cores tp_size mp_parameters ray_scope sharded_ddp "
           "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap", idle(Why.PROCESSES)),
    **each("push_to_hub_model_id push_to_hub_organization push_to_hub_token", idle(Why.HUB)),
    "use_legacy_prediction_loop": idle(Why.INSIDE),
    "force_use_ref_model": to("ref: copy"),
    **each("model_adapter_name ref_adapter_name", rejected("named adapters are not supported; the reference is the "
                                                            "base or --ref-model")),
    "ref_model_init_kwargs.*": rejected("the model is loaded with its own config"),
    "adafactor": rejected("this optimizer is not supported; AdamW is used"),
    # no equivalent
    "fp16": rejected("float16 is not supported; bfloat16 is used on a GPU"),
    "label_smoothing_factor": rejected("smoothing of the cross-entropy is not supported"),
    **each("optim_args optim_target_modules", rejected("this setting of an optimizer is not supported")),
    **each("model_init_kwargs.* teacher_model_init_kwargs.*", rejected("the model is loaded with its own config")),
    "teacher_model_revision": rejected("main is loaded"),
    **each("accelerate_config num_processes", rejected(LAUNCH)),
    "seq_kd": rejected("the teacher's completions are not sampled; write them to the data"),
    "whiten_rewards": rejected("rewards are not whitened, advantages are"),
    "stop_token_id": rejected("pass the token's text with --stop"),
    "lora_target_parameters": rejected("only whole linear layers have adapters"),
    **each("fsdp fsdp_config.* parallelism_config.* deepspeed",
           rejected("start with torchrun, and add --parallel.mode fsdp")),
    **each("generation_kwargs.* vllm_structured_outputs_regex vllm_guided_decoding_regex", rejected(FULL)),
    "num_generations_eval": rejected("evaluation is greedy; --num-generations-eval needs --rollout.eval-temperature"),
    **each("normalize_advantages reward_clip_range", rejected("RLOO does not clip or scale rewards in strop")),
    **each("datasets[].data_dir datasets[].fraction", rejected("name a file, or a part by split=train[:10%]")),
    "max_grad_value": rejected("gradients are clipped by their norm"),
}  # fmt: skip


def translate(
    tree: Mapping[str, Any], kind: str, *, held_out: bool = False, ranks: int | None = None
) -> tuple[Translation, list[str]]:
    """Return the translation, and a sentence for each field without an equivalent.

    `held_out`: held-out rows are passed separately. `ranks`: number of processes, if it is known.
    """
    work = _Trl(tree, kind, held_out, ranks)
    return work.made, [*work.theirs.rejections, *work.without]


def ranks_for_groups(tree: Mapping[str, Any], ranks: int = 1) -> int:
    """Return the factor on the number of processes with which a step has whole groups."""
    step = tree.get("per_device_train_batch_size", 8) * tree.get("gradient_accumulation_steps", 1) * ranks
    return math.lcm(step, tree.get("num_generations", 8 if tree["method"] == "grpo" else 1)) // step


def _experts_loss(model: str | None) -> float | None:
    """Return the weight of the load-balancing loss in the model's config.json; None if it has none or is not local."""
    try:
        return json.loads(read_local(str(model), "config.json") or "{}").get("router_aux_loss_coef")
    except (ValueError, AttributeError):  # AttributeError: not a mapping
        return None


class _Trl:
    """One file; each method translates a section of it."""

    def __init__(self, tree: Mapping[str, Any], kind: str, held_out: bool, ranks: int | None) -> None:
        self.made, self.kind, self.held_out, self.ranks = Translation(), kind, held_out, ranks
        self.set, self.note = self.made.set, self.made.note
        dropped = ("config_class", *(() if tree.get("use_adaptive_entropy") else (*keys.ADAPTIVE, "entropy_coef_min")))
        tree = {name: None if value in PLACEHOLDERS else value for name, value in tree.items() if name not in dropped}
        for name, value in tree.items():
            if isinstance(value, str) and value.lower() in BOOLS and not name.endswith("_strategy"):
                tree[name] = BOOLS[value.lower()]
            elif value is False and name.endswith("_strategy"):
                tree[name] = "no"  # which YAML reads as false
        for name in LISTS:
            item, what = (Mapping, "mappings") if name == "datasets" else (str, "names")
            if not all(isinstance(one, item) for one in listed(tree.get(name))):
                raise UserError(f"{name}={shown(tree[name])}: expected a list of {what}")
        if tree.get("evaluation_strategy") is not None and tree.get("eval_strategy") is None:
            tree = {**tree, "eval_strategy": tree["evaluation_strategy"]}  # the old name
        self.theirs = Theirs(tree, TABLE, "TRL", strict=False, unchanged=UNCHANGED)
        self.take, self.number = self.theirs.take, self.theirs.number
        self.without: list[str] = []
        self.set("method", KINDS[kind].method)
        self._model()
        self._rows()
        for name in (*SAME_EVERYWHERE, *SAME_OF[kind]):
            self._same(name)
        for name, ours in RENAMED.get(kind, {}).items():
            self._same(name, ours)
        for name in COUNTS:
            if name in self.made.tree:
                self.set(name, count := number(self.made.tree[name], name, int))
                check_number(name, count, "1 or more")
        self._experts()
        self._lengths()
        self._run()
        if kind in SAMPLING:
            self._sampling()
        if kind in GROUPED:
            self._policy_gradient()
        methods = {"sft": self._sft, "dpo": self._reference, "kto": self._reference, "online_dpo": self._online_dpo,
                   "ppo": self._ppo, "gkd": self._gkd, "cpo": self._cpo}  # fmt: skip
        methods.get(kind, lambda: None)()
        for name, value in DEFAULTS[kind].items():
            if not self._has(name):
                self.set(name, value)
        self._groups()
        self._unused()

    def _has(self, name: str) -> bool:
        stands_for = {"num_train_epochs": "max_steps", "save_steps": "saves_per_epoch"}
        return any(key in self.made.tree for key in (name, stands_for.get(name, name)))

    def _same(self, name: str, ours: str | None = None) -> None:
        value = self.take(name)
        if isinstance(value, str) and name != "step_separator":  # YAML reads 1e-6 as text
            try:
                value = float(value)
            except ValueError:
                value = self.take(name)
        if value is False and name not in ("gradient_checkpointing", "use_bias_correction_kl", "scale_rewards"):
            return  # also strop's default
        self.set(ours or name, value)

    def _model(self) -> None:
        self.set("model", self.take("model_name_or_path"))
        revision = self.take("model_revision") or self.take("model_init_kwargs.revision")
        self.set("revision", None if revision in (None, "main") else str(revision))
        eos, pad = self.take("eos_token"), self.take("pad_token")
        self.set("special_tokens", {k: v for k, v in (("eos_token", eos), ("pad_token", pad)) if v} or None)
        name = next((name for name in DTYPES if self.take(name) is not None), "dtype")
        weights, trains_base = self.take(name), not self.take("use_peft")
        if weights == "bfloat16":
            self.set("trained_dtype", "bfloat16" if trains_base else None)
            self.set("dtype", "bfloat16")
        elif weights == "auto" and trains_base:
            self.note(
                f"{name}=auto: TRL trains weights in the checkpoint's dtype, strop in float32; for a bfloat16 "
                "checkpoint add --trained-dtype bfloat16"
            )
        elif weights not in (None, "auto", "float32"):
            self.without.append(f"{name}={weights}: not supported; float32 weights are trained")
        if self.take("bf16") is False and not self.theirs.tree.get("fp16") and "dtype" not in self.made.tree:
            self.set("dtype", "float32")
        kernel = self.take("attn_implementation") or self.take("model_init_kwargs.attn_implementation")
        self.set("attn_implementation", kernel if kernel in keys.KERNELS else None)
        self.set("compile", self.take("torch_compile") or None)
        if self.take("activation_offloading") and self.take("gradient_checkpointing") is not False:
            self.set("activation_offloading", True)
        if self.take("use_peft"):
            self._lora()
        self.set("load_in_4bit", self.take("load_in_4bit") or None)
        if self.take("load_in_8bit"):
            self.note(keys.EIGHT_BITS_NOTE)

    def _lora(self) -> None:
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            ours = name.replace("_", ".", 1)
            given = self.take(name)
            given = [given] if isinstance(given, str) else given
            self.set(ours, LORA_DEFAULTS[ours] if given is None else given)
        if self.made.tree["lora"]["target_modules"] == ["all-linear"]:
            del self.made.tree["lora"]["target_modules"]
        self.set("lora.modules_to_save", self.take("lora_modules_to_save") or None)
        for name in ("rslora", "dora"):
            self.set(f"lora.{name}", self.take(f"use_{name}") or None)

    def _rows(self) -> None:
        self.theirs.take_all("datasets")
        entries = []
        name, mixture = self.take("dataset_name"), listed(self.theirs.tree.get("datasets"))
        if name is not None and mixture:
            self.note(f"dataset_name={name}: datasets is read instead, as in TRL")
            name = None
        if name is not None:
            entries.append(
                {"path": name, "name": self.take("dataset_config"), "split": self.take("dataset_train_split")}
            )
        for dataset in mixture:
            for path in listed(dataset.get("data_files") or dataset.get("path")):
                entries.append({"path": path, "name": dataset.get("name"), "split": dataset.get("split")})
        if self.kind == "sft" and self.take("dataset_text_field") not in (None, "text"):
            for entry in entries:
                entry |= {"format": "completion", "field_text": self.take("dataset_text_field")}
        entries = [{key: value for key, value in entry.items() if value is not None} for entry in entries]
        self.set("data", entries or None)
        if self.kind in DISTILLING and self._evaluates():
            self.without.append("eval_strategy: evaluations measure rewards, which distillation does not have")
            return
        size, split = self.take("test_split_size"), str(self.take("dataset_test_split") or "test")
        is_file = str(name).lower().endswith(SUFFIXES)  # which has one split, train
        if size:
            self.set("val_set_size", number(size, "test_split_size"))
            self.held_out = True
        elif name is not None and self._evaluates() and not (is_file and not split.startswith("train")):
            self.set("eval_data", [{**entries[0], "split": split}])
            self.held_out = True

    def _evaluates(self) -> bool:
        return str(self.take("eval_strategy") or "no") != "no"

    def _experts(self) -> None:
        """TRL's default is the weight in the model's config; in 1.10 it was 0.001, which dense models ignored."""
        given = self.number("router_aux_loss_coef")
        own = _experts_loss(self.take("model_name_or_path"))
        weight = own if given is None and "router_aux_loss_coef" in KINDS[self.kind].fields else given
        if weight == 0.001 and own is None:
            advice = "it is not supported" if self.kind in SAMPLING else "add --router-aux-loss-coef 0.001"
            self.note(f"router_aux_loss_coef=0.001: only for models with experts; if this model has some, {advice}")
        elif weight and self.kind in SAMPLING:
            self.without.append(f"router_aux_loss_coef={weight}: only for offline methods")
        elif weight:
            self.set("router_aux_loss_coef", weight)
        if self.kind in SAMPLING and self.made.tree.pop("neftune_noise_alpha", None):
            self.without.append(f"neftune_noise_alpha={self.take('neftune_noise_alpha')}: only for offline methods")

    def _lengths(self) -> None:
        if self.kind in ("sft", "dpo") and self.take("truncation_mode") == "keep_end":
            self.note("truncation_mode=keep_end: not supported; responses beyond max_length are truncated at the end")
        if self.kind == "sft" and self.take("max_seq_length") is not None and "max_length" not in self.made.tree:
            self.set("max_length", self.take("max_seq_length"))
        if self.theirs.tree.get("max_length", 0) is None and "max_length" in SAME_OF[self.kind]:
            self.set("max_length", UNLIMITED)
        if self.take("train_sampling_strategy") == "sequential" and self.kind != "kto":
            self.without.append("train_sampling_strategy=sequential: rows are drawn in random order")
        if self.take("shuffle_dataset") is False and self.kind in (*GROUPED, "distillation"):
            self.without.append("shuffle_dataset=False: rows are drawn in random order")
        if not self.made.tree.get("sync_ref_model"):
            for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
                self.take(name)
                self.made.tree.pop(name, None)

    def _run(self) -> None:
        steps = self.number("max_steps", int)
        if steps is not None and steps > 0:
            self.set("max_steps", steps)
            self.take("num_train_epochs")
        else:
            self.set("num_train_epochs", self.number("num_train_epochs"))
        self._schedule()
        strategy, every = str(self.take("save_strategy") or "steps"), self.number("save_steps")
        if strategy == "no":
            self.set("save_steps", 0)
        elif strategy == "epoch":
            self.set("saves_per_epoch", 1)
        elif every is not None:
            self._steps("save_steps", every)
        self.take("evaluation_strategy")
        strategy, every = str(self.take("eval_strategy") or "no"), self.number("eval_steps")
        logged = self.number("logging_steps")
        if logged is not None:
            self._steps("logging_steps", logged)
        if strategy == "steps" and self.held_out:
            self._steps("eval_steps", every or logged or 10)
        elif strategy == "epoch" and self.held_out:
            self.set("evals_per_epoch", 1)
        elif self._evaluates():
            when = "--evals-per-epoch 1" if strategy == "epoch" else f"--eval-steps {every or logged or 10:g}"
            rows, split = self.take("dataset_name"), self.take("dataset_test_split") or "test"
            why = f"{rows} is a file, which has no split {split}" if rows else "the config names no held-out rows"
            self.note(f"eval_strategy={strategy}: {why}; add --eval-data FILE or --val-set-size 0.1, and {when}")
        best = keys.set_best(self.made, self.take, held_out=self.held_out)
        self.without += [best] if best else []
        services = listed(self.take("report_to"))
        known = [name for name in services if name in keys.SERVICES]
        self.without += [f"report_to={name}: not supported" for name in services
                         if name not in (*known, "none", "all")]  # fmt: skip
        self.set("report_to", ([*filter(find_spec, keys.SERVICES)] if "all" in services else known) or None)
        resume = self.take("resume_from_checkpoint")
        self.set("resume", "latest" if resume is True else resume or None)
        if self.take("full_determinism"):
            self.set("deterministic", True)

    def _steps(self, name: str, value: float) -> None:
        if 0 < value < 1:
            self.without.append(f"{name}={value}: a fraction of the run is not supported; use steps")
        else:
            self.set(name, int(value))

    def _schedule(self) -> None:
        name = self.take("lr_scheduler_type")
        if name is not None and str(name) not in keys.SCHEDULES:
            self.without.append(f"lr_scheduler_type={name}: not supported; linear is used")
        elif name is not None:
            self.set("lr_scheduler_type", keys.SCHEDULES[str(name)])
        self.set("min_lr_ratio", self.number("lr_scheduler_kwargs.min_lr_rate"))
        warmup = self.number("warmup_steps")
        if warmup is not None and 0 < warmup < 1:
            self.set("warmup_ratio", warmup)
        elif warmup:
            self.made.tree.pop("warmup_ratio", None)  # transformers prefers the steps
            self.set("warmup_steps", int(warmup))
        if str(name) == "constant" and (warmup or self.made.tree.get("warmup_ratio")):
            for key in ("warmup_ratio", "warmup_steps"):
                self.made.tree.pop(key, None)
            self.note("lr_scheduler_type=constant: no warm-up, as in TRL; use constant_with_warmup for a warm-up")
        optimizer = str(self.take("optim") or "adamw_torch_fused")
        if optimizer not in keys.OPTIMIZERS:
            self.without.append(f"optim={optimizer}: not supported; AdamW is used")
        self.set("optim", {"adamw": None}.get(kept := keys.OPTIMIZERS.get(optimizer, "adamw"), kept))

    # methods

    def _sampling(self) -> None:
        for name, full in keys.UNRESTRICTED.items():
            value = self.take(name)
            if value is None or value in full:
                continue
            if self.kind in GROUPED and name in keys.FILTERS:
                self.set(name, self.number(name, int if name == "top_k" else float))
            else:
                self.without.append(f"{name}={value}: {FULL}")
        turns = self.number("max_tool_calling_iterations", int)
        if turns is not None:  # the answer comes after the last call
            self.note(f"max_tool_calling_iterations={turns}: with --tools, add --max-turns {turns + 1}")
        rewards = []
        for name in listed(self.take("reward_funcs")):
            if name == "reasoning_accuracy_reward":
                self.without.append(f"reward_funcs={name}: not supported; math_verify also reads the reasoning")
            else:
                rewards.append(REWARDS.get(str(name), str(name)))
        model = self.take("reward_model_name_or_path") or self.take("reward_model_path")
        if model:
            rewards.insert(0, f"model:{model}")
        if "math_verify" in rewards:
            self.note("accuracy_reward: math_verify reads the column answer; TRL reads solution")
        self.set("reward_funcs", rewards or None)
        self._servers()

    def _policy_gradient(self) -> None:
        tree = self.made.tree
        keys.set_cispo_cap(self.made)
        if (number(tree.get("epsilon"), "epsilon") or 0) > 1:  # no ratio is below 0
            tree.setdefault("epsilon_high", tree["epsilon"])
            self.set("epsilon", 1.0)
        for name in (*LOSS_KWARGS, "multi_objective_aggregation") if self.kind == "grpo" else ():
            if self.take(name) is not None:
                for key, value in OLD_FLAGS[name].convert(str(self.take(name))).items():
                    self.set(key, tree.get(key, {}) | value if isinstance(value, dict) else value)
        if self.take("use_adaptive_entropy"):
            lowest = keys.set_adaptive_entropy(self.made, self.take)
            self.without += [lowest] if lowest else []
        if not tree.get("beta", 0.05 if self.kind == "rloo" else 0):
            tree.pop("use_bias_correction_kl", None)
        elif self.kind == "grpo" and "use_bias_correction_kl" not in tree:
            self.note(
                "use_bias_correction_kl: on, as in TRL 1.16; for TRL 1.10's default add --no-use-bias-correction-kl"
            )
        micro = tree.get("per_device_train_batch_size", 8)
        accumulation = tree.get("gradient_accumulation_steps", 1)
        steps = self.number("steps_per_generation", int)
        size = self.number("generation_batch_size", int)
        rounds = steps / accumulation if steps else size / (micro * accumulation) if size else 1
        if rounds > 1 and rounds == int(rounds):
            self.set("minibatches_per_rollout", int(rounds))
        elif rounds > 1:
            self.without.append(
                f"steps_per_generation={rounds * accumulation:g}: not a multiple of gradient_accumulation_steps"
            )

    def _groups(self) -> None:
        """Report steps of incomplete groups, which both trainers reject; accumulate more if `ranks` is known."""
        tree, ranks = self.made.tree, self.ranks or 1
        if self.kind not in GROUPED or (times := ranks_for_groups(tree, ranks)) == 1:
            return
        micro, size = tree.get("per_device_train_batch_size", 8), tree.get("num_generations", 8)
        step = micro * tree.get("gradient_accumulation_steps", 1) * ranks
        what = (
            f"num_generations={size}: {step} completions per step (per_device_train_batch_size x "
            "gradient_accumulation_steps x processes) are not whole groups"
        )
        if self.ranks is None:
            fitting = math.lcm(size, micro) // micro
            self.note(
                f"{what} on one process; start a multiple of {times} processes with torchrun, or set "
                f"--gradient-accumulation-steps {fitting}"
            )
        else:
            self.set("gradient_accumulation_steps", times * tree.get("gradient_accumulation_steps", 1))
            self.note(f"{what}; gradient_accumulation_steps={tree['gradient_accumulation_steps']} is used")

    def _unused(self) -> None:
        """List fields that the class has in TRL and that nothing above read."""
        kind = KINDS[self.kind]
        self.made.idle = self.theirs.idle(kind.method)
        values = dict(self.theirs.leaves)
        for key in self.made.idle.pop(f"not used by {kind.method}", []):
            name = key.partition(".")[0]
            if name.startswith("vllm_") and not self.take("use_vllm"):
                reason = "without use_vllm"
            elif name.startswith(("lora_", "use_rslora", "use_dora")) and not self.take("use_peft"):
                reason = "without use_peft"
            elif name in kind.fields or not any(name in other.fields for other in KINDS.values()):
                self.without.append(f"{key}={shown(values[key])}: has no equivalent in --method {kind.method}")
                continue
            else:
                reason = f"not a field of {kind.config}"
            self.made.idle.setdefault(reason, []).append(key)

    def _servers(self) -> None:
        if not self.take("use_vllm"):
            self.set("rollout.engine", "local")
            return
        self.set("rollout.engine", "vllm")
        if self.kind == "rloo" or self.kind == "grpo" and self.take("vllm_importance_sampling_correction") is False:
            self.set("vllm_importance_sampling_correction", False)  # RLOOConfig has none
        elif self.kind == "grpo":
            mode = self.take("vllm_importance_sampling_mode")
            self.set("vllm_importance_sampling_mode", mode or VLLM_DEFAULTS["vllm_importance_sampling_mode"])
            cap = self.take("vllm_importance_sampling_clip_max") or self.take("vllm_importance_sampling_cap")
            self.set("vllm_importance_sampling_cap", cap)
            self.set("vllm_importance_sampling_min", self.take("vllm_importance_sampling_clip_min"))
        self.set("vllm.timeout", self.number("vllm_server_timeout"))
        if (self.take("vllm_mode") or "colocate") == "colocate":
            self.set("vllm.colocate", True)
            share = self.number("vllm_gpu_memory_utilization")
            default = 0.55 if self.kind == "online_dpo" else VLLM_DEFAULTS["vllm.gpu_memory_utilization"]
            self.set("vllm.gpu_memory_utilization", share or default)
            older = self.take("vllm_max_model_len")
            self.set("vllm.max_model_len", self.take("vllm_max_model_length") or older)
            self.set("vllm.tensor_parallel_size", self.take("vllm_tensor_parallel_size"))
            return
        url, host = self.take("vllm_server_base_url"), self.take("vllm_server_host")
        port = self.take("vllm_server_port")
        if url is None and host not in (None, *keys.LOCAL_HOSTS):
            url = f"http://{host}:{port or 8000}"
        self.set("vllm.url", [url] if url else None)
        self.set("vllm.port", port if url is None else None)

    def _sft(self) -> None:
        packing, strategy = self.take("packing"), self.take("packing_strategy")
        if packing and strategy not in (None, "bfd"):
            self.without.append(f"packing_strategy={strategy}: a sequence longer than max_length is truncated")
        if packing:
            self.note("packing: a batch has per_device_train_batch_size sequences; in TRL it has as many full rows")
        if self.theirs.tree.get("loss_type") == "dft":
            self.set("sft_loss", "dft")
        self.theirs.take_all("loss_type")
        template = self.take("chat_template_path")
        if template is not None and Path(str(template)).suffix != ".jinja":
            self.without.append(f"chat_template_path={template}: write its template to a FILE.jinja, and pass that")
        else:
            self.set("chat_template", template)
        whole, assistant = self.take("completion_only_loss"), self.take("assistant_only_loss")
        if whole is False:
            self.set("train_on_inputs", True)
        elif not assistant:
            self.note(
                "assistant_only_loss: off by default in TRL, which then trains every token of messages; strop trains "
                "only the assistant's unless --train-on-inputs is set"
            )

    def _reference(self) -> None:
        tree = self.made.tree
        if self.take("precompute_ref_log_probs"):
            self.set("ref", "precomputed")
        elif self.take("force_use_ref_model"):
            self.set("ref", "copy")
        if tree.get("f_divergence_type") != "alpha_divergence":
            tree.pop("f_alpha_divergence_coef", None)
        if "discopop" not in listed(tree.get("loss_type")):
            tree.pop("discopop_tau", None)

    def _cpo(self) -> None:
        loss = self.made.tree.get("loss_type")
        for name, losses, default in (("simpo_gamma", ("simpo", "alphapo"), 0.5), ("alpha", ("alphapo",), 0.0)):
            given = self.number(name)
            if loss in losses:
                self.set(name, default if given is None else given)

    def _online_dpo(self) -> None:
        tree, beta = self.made.tree, self.take("beta")
        if isinstance(beta, list) and beta:
            tree["beta"] = beta[0]
            if len(beta) > 1:
                self.without.append(f"beta={beta}: a value per epoch is not supported; {beta[0]} is used")
        if self.take("loss_type") == "ipo":
            self.note("loss_type=ipo: compares log-probs per token; OnlineDPOTrainer compares their sums")
        self.set("num_generations", 2)
        self.set("per_device_train_batch_size", 2 * tree.get("per_device_train_batch_size", 8))
        self.note("per_device_train_batch_size: doubled, because OnlineDPOConfig counts prompts, strop completions")

    def _ppo(self) -> None:
        tree = self.made.tree
        if self.take("sft_model_path") and tree.get("model") not in (None, self.take("sft_model_path")):
            self.note(f"model_name_or_path={tree['model']}: only TRL's tokenizer for PPO; sft_model_path is trained")
        self.set("model", self.take("sft_model_path"))
        micro, accumulation = tree.get("per_device_train_batch_size", 8), tree.get("gradient_accumulation_steps", 1)
        parts = self.number("num_mini_batches", int) or 1
        parts = max(1, parts // accumulation)  # micro-batches up to gradient_accumulation_steps make one step
        if micro % parts:
            given = self.take("num_mini_batches")
            self.without.append(
                f"num_mini_batches={given}: does not divide per_device_train_batch_size={micro}; 1 is used"
            )
            parts = 1
        self.set("minibatches_per_rollout", parts)
        self.set("per_device_train_batch_size", micro // parts)
        episodes = self.number("total_episodes", int)
        if episodes is not None:
            steps = math.ceil(episodes / (micro * accumulation)) * tree.get("num_iterations", 4) * parts
            self.set("max_steps", steps)
            self.note(f"total_episodes={episodes}: {steps} steps on one process; on N, divide --max-steps by N")
        if not tree.get("beta", 0.05):
            self.set("kl_in_reward", False)
        if self.take("kl_estimator") == "k3":
            self.without.append("kl_estimator=k3: the KL in the reward is k1")
        if self.take("stop_token") != "eos":
            self.note("stop_token: completions have response_length tokens in TRL, here they end at the end token")
        self.set("critic_learning_rate", tree.get("learning_rate"))
        if self.take("reward_model_path"):
            self.set("value_model", self.take("reward_model_path"))
        else:
            self._same("vf_coef")
            self.note("value_model: is an argument of PPOTrainer; add --value-model, or the critic is a head here")

    def _gkd(self) -> None:
        temperature = self.number("temperature")
        temperature = 0.9 if temperature is None else temperature
        if temperature != 1:
            self.note(
                f"temperature={temperature:g}: GKDTrainer samples at it and takes log-probs at 1; here both are at it"
            )
