"""Outcome for every known key of an axolotl config. axolotl.py reads the translated keys.

Blocks and lists of blocks are written as trl.beta and datasets[].path. docs/from_axolotl.md shows this table.
"""

from __future__ import annotations

from trainer.translate.keys import EIGHT_BITS, FULL, SAME, Key, Why, each, idle, rejected, to

# More reasons why a key has no effect.
LOADING = "read from the model"
SERVING = "settings of axolotl's own server or commands"
FLOAT32 = "trained weights are float32, unless trained_dtype is set"
SAVES = "checkpoints are saved by steps or epochs, and can be resumed"
PLUGIN = "setting of a plugin that strop does not have"
OPTIMIZER = "setting of an optimizer that strop does not have"


_TRAINS_OTHERWISE = "changes what is trained, and is not supported; remove it"
_QUANTISED_MODEL = "quantised checkpoints cannot be trained; use the unquantised model, and remove it"
_SAMPLING = f"{FULL}; remove it"

MODEL: dict[str, Key] = {
    **each("trust_remote_code gradient_checkpointing chat_template eot_tokens neftune_noise_alpha load_in_4bit", SAME),
    "base_model": to("model"),
    "lora_model_dir": to("model (an adapter folder, which names its base), and lora.* as the adapter has them"),
    "bf16": to("dtype: auto or bfloat16; full: trained_dtype bfloat16 too; false: float32"),
    "bfloat16": to("dtype, trained_dtype: bfloat16"),
    "float32": to("dtype: float32"),
    "torch_dtype": to("dtype"),
    **each("fp16 float16", rejected("float16 is not supported; use bf16: true")),
    "fp8": rejected("fp8 is not supported; use bf16: true"),
    **each("attn_implementation sdp_attention eager_attention flash_attention flex_attention xformers_attention "
           "sage_attention", to("attn_implementation: sdpa and eager; any other kernel: auto")),
    "torch_compile": to("compile"),
    "chat_template_jinja": to("chat_template: FILE.jinja, or the template itself"),
    "default_system_message": idle("replaces a sentence that is no longer in axolotl's chatml; use --system-prompt"),
    **each("* pad_token eos_token bos_token unk_token", to("special_tokens"), "special_tokens."),
    "noisy_embedding_alpha": to("neftune_noise_alpha"),
    "model_config.output_router_logits": to("router_aux_loss_coef: 0.001"),
    "model_config.router_aux_loss_coef": to("router_aux_loss_coef"),
    **each("model_config.* overrides_of_model_config.*", rejected("the model's own config is used; remove it")),
    **each("model_kwargs.* overrides_of_model_kwargs.*", rejected("loading arguments are not supported; remove it")),
    "load_in_8bit": to(EIGHT_BITS),
    **each("model_type type_of_model tokenizer_type cls_model_config tokenizer_use_fast tokenizer_legacy "
           "tokenizer_save_jinja_files is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
           "is_qwen_derived_model num_labels mean_resizing_embeddings low_cpu_mem_usage", idle(LOADING)),
    "processor_type": rejected("images and audio are not supported; remove it to train on text"),
    "processor_kwargs": idle("part of processor_type"),
    **each("embeddings_skip_upcast fp32_norms fp32_norm_classes", idle(FLOAT32)),
    "freeze_mm_modules": idle("only the text part of a model has gradients"),
    "tokenizer_config": to("tokenizer"),
    "base_model_config": to("the config of base_model; any other is rejected"),
    **each("revision_of_model model_revision", to("revision")),
    **each("tokens added_tokens_overrides.* resize_token_embeddings_to_32x shrink_embeddings fix_untrained_tokens",
           rejected("embeddings are never resized here; use tokens that the tokenizer has")),
    "tokenizer_use_mistral_common": rejected("only transformers' tokenizers are supported; remove it"),
    **each("model_quantization_config model_quantization_config_kwargs.* gptq gptq_groupsize gptq_model_v1 "
           "quantize_moe_experts use_onebitllms nonexpert_quantization gemma4_fp8_nonexpert gemma4_nf4_nonexpert "
           "nvfp4_merge_aware nvfp4_merge_aware_start_step", rejected(_QUANTISED_MODEL)),
    **each("qat.* quantization.*", rejected("quantisation-aware training is not supported; remove it")),
    **each("bnb_config_kwargs.* nf4_backend", idle(Why.QUANTISED)),
    **each("fp8_config.* fp8_enable_fsdp_float8_all_gather", idle("part of fp8")),
    **each("reinit_weights scaling_softmax scaling_softmax_factor scaling_softmax_bias trainer_cls dense_mixer "
           "use_eaft diffusion.* diffusion_lm.* diffusion_decision.*", rejected(_TRAINS_OTHERWISE)),
    **each("eaft_alpha eaft_k", idle("part of use_eaft")),
    **each("image_size image_resize_algorithm role_boundaries[].*", rejected("rows are text here; remove it")),
    **each("rope_scaling use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks s2_attention",
           rejected("rescaled positions for longer contexts are not supported; remove it")),
    "unfrozen_parameters": to("trained_parameters; ranges of rows and adapters are rejected"),
    **each("experts_implementation use_kernels use_scattermoe use_sonicmoe llama4_linearized_experts "
           "gemma4_hybrid_attn_impl fused_attn_kernel flex_attn_compile_kwargs.* lora_mlp_kernel lora_qkv_kernel "
           "lora_o_kernel lora_embedding_kernel unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv "
           "unsloth_lora_o unsloth_rms_norm unsloth_rope flash_attn_cross_entropy flash_attn_rms_norm "
           "flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum liger_rms_norm liger_glu_activation "
           "liger_layer_norm liger_rope liger_rms_norm_gated liger_fused_linear_cross_entropy liger_cross_entropy "
           "cut_cross_entropy torch_compile_backend torch_compile_mode tf32 "
           "gradient_checkpointing_kwargs.* activation_offloading layer_offloading gc_steps "
           "chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards "
           "tiled_mlp_use_original_mlp torch_compile_options torch_compile_regional torch_empty_cache_steps "
           "gc_collect_steps selective_checkpointing selective_checkpointing.* pad_to_multiple_of "
           "fa_varlen_kwargs_in_collator large_head_attention flash_attn_d512 sdpa_varlen deepcompile ple_cpu_offload "
           "autotune_cache_path autotune_profiles autotune_neighborhood cut_cross_entropy_accum_c_fp32 "
           "cut_cross_entropy_c_grad_chunk_size liger_swiglu liger_kernel_impl expert_backend moe_grouped_backend "
           "moe_dequant_chunk_size moe_bnb_fast use_dsv4_kernels use_glm_dsa_kernels dsv4_fp8_nonexpert_mode "
           "dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode", idle(Why.SPEED)),
}  # fmt: skip

ROW_KEYS: dict[str, Key] = {
    "datasets[].path": to("data: path"),
    "datasets[].type": to("data: format; a mapping of fields: user_defined"),
    **each("field_prompt field_system field_chosen field_rejected field_completion field_label prompt_format "
           "chosen_format rejected_format completion_format field_instruction field_input field_output format "
           "no_input_format system_prompt system_format", to("data: options of user_defined"), "datasets[].type."),
    "datasets[].data_files": to("data: an entry for each file"),
    "datasets[].ds_type": to("data: the file type, which is read from the name"),
    **each("field text_column", to("data: field_text"), "datasets[]."),
    "datasets[].drop_system_message": to("data: system_message: drop"),
    **each("split name field_messages field_chosen field_rejected", to("data: the option of that name"), "datasets[]."),
    **each("message_property_mappings.role message_field_role", to("data: role_key"), "datasets[]."),
    **each("message_property_mappings.content message_field_content", to("data: content_key"), "datasets[]."),
    "datasets[].message_property_mappings.*": to("data: role_key, content_key; other keys keep their names"),
    **each("* user assistant system tool", to("data: roles"), "datasets[].roles."),
    "datasets[].weight": to("data: weight, of the rows of every epoch (sft, rm, prm)"),
    **each("roles_to_train train_on_eos chat_template step_separator max_completion_length train_on_last_step_only",
           to("the flag of that name, the same for all datasets"), "datasets[]."),
    "datasets[].train_on_eot": to("train_on_eos, the same for all datasets"),
    "datasets[].chat_template_jinja": to("chat_template, the same for all datasets"),
    "datasets[].field_tools": to("the column tools"),
    **each("field_thinking template_thinking_key", to("the key reasoning_content of a message"), "datasets[]."),
    **each("preprocess_shards trust_remote_code", idle(Why.ROWS), "datasets[]."),
    **each("conversation input_format field_human field_model", idle("axolotl does not read it"), "datasets[]."),
    **each("shards shards_idx", rejected("select part of a dataset with a split; write split: train[:10%]"),
           "datasets[]."),
    "datasets[].revision": rejected("the newest revision is loaded; download the revision you want, and name the file"),
    **each("message_field_training message_field_training_detail split_thinking input_transform "
           "logprobs_field temperature",
           rejected("rows cannot be changed this way; use a transform, type: my_module.my_transform"), "datasets[]."),
    "datasets[].train_on_split": rejected("axolotl does not read it; write split"),
    **each("input_fraction length max_input_id max_turns min_input_id min_turn_length min_turns seed sequence_length",
           rejected("rows of random tokens are not supported; name a file of rows"), "datasets[]."),
    "pretraining_dataset[].type": to("data: format: completion"),
    "pretraining_dataset[].field": idle("axolotl does not read it"),
    "pretraining_dataset[].skip": rejected("skip rows with a split; write split: train[1000:]"),
    "val_set_size": to("val_set_size"),
    "dataset_exact_deduplication": to("dedup"),
    **each("dataset_shard_num dataset_shard_idx", to("sft, rm, prm: rejected; axolotl's rl does not read it")),
    "train_on_inputs": to("train_on_inputs (type completion: always so)"),
    **each("roles_to_train train_on_eos", idle("axolotl reads it only in datasets[]")),
    "chat_template_kwargs": to("chat_template_kwargs (sft; axolotl's other methods do not read it)"),
    "sequence_len": to("max_length"),
    "max_prompt_len": idle("axolotl does not read it"),
    "sample_packing": to("packing (a batch counts sequences here, not packed rows)"),
    "excess_length_strategy": to("long_rows: drop (axolotl's default) or truncate; raise: rejected"),
    "shuffle_merged_datasets": to("rows are always shuffled, by seed; false is rejected"),
    **each("dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset "
           "push_dataset_to_hub hf_use_auth_token dataloader_pin_memory dataloader_num_workers "
           "dataloader_prefetch_factor remove_unused_columns shuffle_before_merging_datasets "
           "num_dataset_shards_to_save streaming streaming_multipack_buffer_size total_num_tokens "
           "total_supervised_tokens is_preprocess preprocess_iterable axolotl_config_path "
           "pretrain_multipack_buffer_size pretrain_multipack_attn pretraining_sample_concatenation", idle(Why.ROWS)),
    **each("eval_sample_packing pad_to_sequence_len group_by_length sample_packing_group_size sample_packing_bin_size "
           "sample_packing_sequentially sample_packing_eff_est sample_packing_mp_start_method multipack_real_batches "
           "batch_flattening dpo_padding_free", idle(Why.SPEED)),
    "label_balance_window_optim_steps": idle("part of balance_labels"),
    **each("curriculum_sampling min_sample_len balance_labels",
           rejected("rows are shuffled, and all are used; remove it, and filter the file yourself")),
    "max_packed_sequence_len": rejected("axolotl no longer reads it; use sequence_len and sample_packing"),
}  # fmt: skip
# test_datasets and pretraining_dataset have the keys of datasets
ROW_KEYS = {key.replace("datasets[]", "pretraining_dataset[]"): entry for key, entry in ROW_KEYS.items()
            if key.startswith("datasets[]")} | ROW_KEYS  # fmt: skip
ROW_KEYS |= {key.replace("datasets[]", "test_datasets[]"): Key(entry.outcome, entry.text.replace("data:", "eval_data:"))
             for key, entry in ROW_KEYS.items() if key.startswith("datasets[]")}  # fmt: skip

RUN: dict[str, Key] = {
    **each("gradient_accumulation_steps max_steps learning_rate warmup_ratio warmup_steps output_dir save_steps "
           "save_total_limit eval_steps logging_steps seed loss_watchdog_threshold loss_watchdog_patience "
           "weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm", SAME),
    "micro_batch_size": to("per_device_train_batch_size"),
    "batch_size": to("gradient_accumulation_steps, if the file sets that to null; otherwise axolotl ignores it, and a "
                     "value that differs from micro_batch_size is rejected"),
    "num_epochs": to("num_train_epochs"),
    "lr_scheduler": to("lr_scheduler_type"),
    "lr_scheduler_kwargs.min_lr_rate": to("min_lr_ratio"),
    "lr_scheduler_kwargs.*": rejected("this setting of a schedule is not supported; remove it"),
    "cosine_min_lr_ratio": to("min_lr_ratio"),
    "optimizer": to("optim: adamw, adamw_8bit or muon"),
    "resume_from_checkpoint": to("resume"),
    "auto_resume_from_checkpoints": to("resume: latest, if output_dir contains a run"),
    "saves_per_epoch": to("saves_per_epoch; with max_steps: save_steps, as part of the run"),
    "save_strategy": to("save_steps, saves_per_epoch"),
    "evals_per_epoch": to("evals_per_epoch; with max_steps: eval_steps, as part of the run"),
    **each("eval_strategy evaluation_strategy", to("eval_steps, evals_per_epoch")),
    "full_determinism": to("deterministic"),
    "wandb_project": to("report_to: wandb, and the variable WANDB_PROJECT"),
    "use_wandb": to("report_to: wandb"),
    "wandb_entity": to("the variable WANDB_ENTITY"),
    "wandb_mode": to("the variable WANDB_MODE"),
    "use_tensorboard": to("report_to: tensorboard"),
    "use_trackio": to("report_to: trackio"),
    "trackio_project_name": to("the variable TRACKIO_PROJECT"),
    "trackio_space_id": to("the variable TRACKIO_SPACE_ID"),
    **each("wandb_name wandb_run_id trackio_run_name", idle("a run has the name of its folder")),
    **each("wandb_watch wandb_log_model swanlab_experiment_name swanlab_project swanlab_description swanlab_mode "
           "swanlab_workspace swanlab_log_model swanlab_log_completions swanlab_completion_log_interval "
           "swanlab_completion_max_buffer swanlab_api_key swanlab_web_host swanlab_api_host swanlab_lark_webhook_url "
           "swanlab_lark_secret use_swanlab use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
           "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key "
           "comet_mode comet_online comet_experiment_config.* "
           "use_otel_metrics otel_metrics_host otel_metrics_port profiler_steps "
           "profiler_steps_start include_tokens_per_second include_tkps generate_samples num_generation_samples "
           "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
           "generation_prompt_ratio generation_do_sample eval_table_size eval_max_new_tokens logging_nan_inf_filter "
           "sync_profiler_steps sync_profiler_start_step debug", idle(Why.LOGS)),
    **each("save_safetensors strict", idle(Why.INSIDE)),
    "plugins": idle("kernels, logs and gyms need no plugin; any other is rejected"),
    "dataloader_drop_last": idle("no row is dropped at the end of an epoch"),
    **each("eta_min adam_eps base_model_ignore_patterns", idle("axolotl does not read it")),
    **each("save_only_model save_first_step dynamic_checkpoint.*", idle(SAVES)),
    "eval_on_start": idle("held-out rows are always evaluated before training"),
    "eval_sequence_len": rejected("held-out rows have the limit of all rows; remove it, or use sequence_len"),
    **each("eval_batch_size auto_find_batch_size", idle(Why.SPEED)),
    **each("hub_model_id hub_strategy hub_revision", idle(Why.HUB)),
    **each("early_stopping_patience load_best_model_at_end greater_is_better loraplus_lr_ratio", SAME),
    "metric_for_best_model": to("metric_for_best_model: a name in metrics.jsonl, such as eval/nll for loss"),
    **each("do_bench_eval bench_dataset bench_split do_causal_lm_eval eval_causal_lm_metrics",
           rejected("not supported; remove it, and run trainer.evaluate after training")),
    **each("optim_args optim_target_modules lr_groups lr_groups[].* embedding_lr embedding_lr_scale "
           "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor adam_beta3 adam_epsilon2 jagged_restart_steps "
           "jagged_restart_warmup_steps jagged_restart_anneal_steps dion_lr dion_momentum dion_rank_fraction "
           "dion_rank_multiple_of", rejected("this setting of an optimizer or schedule is not supported; remove it")),
    **each("relora relora_prune_ratio relora_cpu_offload relora_steps relora_warmup_steps lisa_n_layers "
           "lisa_step_interval lisa_layers_attribute", rejected(_TRAINS_OTHERWISE)),
    "relora_prune_method": idle("part of relora"),
    "loraplus_lr_embedding": idle("adapters of an embedding have the rates of other adapters"),
    **each("torchdistx_path qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant "
           "qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size",
           idle(OPTIMIZER)),
    **each("kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url "
           "kd_online_topk kd_online_server kd_online_timeout kd_temperature_min grokfast_alpha grokfast_lamb "
           "spectrum_top_fraction spectrum_model_name mora.* llmcompressor.* hatchery.* coreweave.*", idle(PLUGIN)),
}  # fmt: skip

LORA: dict[str, Key] = {
    "adapter": to("lora.r; qlora: also load_in_4bit"),
    "lora_r": to("lora.r"),
    "lora_alpha": to("lora.alpha"),
    "lora_dropout": to("lora.dropout; preference methods and reward models have none, as in axolotl"),
    "lora_target_linear": to("lora.target_modules: all-linear"),
    "lora_target_modules": to("lora.target_modules, names or a pattern; with lora_target_linear only names that it "
                              "includes"),
    "lora_modules_to_save": to("lora.modules_to_save"),
    "peft_use_dora": to("lora.dora"),
    "peft_use_rslora": to("lora.rslora"),
    "merge_lora": to("merge_lora"),
    **each("lora_fan_in_fan_out merge_method lora_on_cpu qlora_sharded_model_loading peft_ensure_weight_tying",
           idle(Why.INSIDE)),
    **each("peft_autocast_adapter_dtype lora_fp32_gradients", idle(FLOAT32)),
    **each("lora_target_parameters peft_layers_to_transform peft_layers_pattern peft_layer_replication "
           "peft_init_lora_weights peft_trainable_token_indices peft.* loftq_config.* lora_rank_pattern "
           "lora_alpha_pattern",
           rejected("adapters are on whole linear layers, of one rank, initialised as usual; remove it, or use a "
                     "pattern in lora_target_modules")),
    **each("mixlora_num_experts mixlora_top_k mixlora_router_aux_loss_coef mixlora_router_init_range "
           "mixlora_jitter_noise mixlora_expert_lora_r mixlora_expert_lora_alpha mixlora_expert_lora_dropout",
           idle("part of adapter: mixlora, which is rejected")),
}  # fmt: skip

PARALLEL: dict[str, Key] = {
    "fsdp": to("parallel.mode: fsdp"),
    "fsdp_config.*": idle("strop chooses how layers are wrapped and saved"),
    **each("reshard_after_forward fsdp_reshard_after_forward", to("parallel.reshard_after_forward"), "fsdp_config."),
    **each("offload_params fsdp_offload_params", to("parallel.cpu_offload"), "fsdp_config."),
    **each("activation_checkpointing fsdp_activation_checkpointing", to("gradient_checkpointing"), "fsdp_config."),
    **each("sharding_strategy fsdp_sharding_strategy",
           to("parallel.mode, parallel.shard, parallel.reshard_after_forward"), "fsdp_config."),
    "dp_shard_size": to("parallel.shard"),
    **each("context_parallel_size sequence_parallel_degree context_parallel.size", to("parallel.context")),
    "tensor_parallel_size": to("1; more is rejected: use FSDP and context_parallel_size"),
    "expert_parallel_size": to("1; more is rejected"),
    "deepspeed": to("parallel.mode: fsdp; ZeRO-1, ZeRO-2: parallel.reshard_after_forward false; offload: "
                    "parallel.cpu_offload"),
    "accelerator_config.split_batches": rejected("a batch is per process here; remove it, and divide micro_batch_size"),
    **each("ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters dp_replicate_size "
           "device device_map device_map.* max_memory.* gpu_memory_limit world_size local_rank fsdp_version "
           "fsdp_final_state_dict_type accelerator_config.* experimental_skip_move_to_device heads_k_stride "
           "ring_attn_func context_parallel.* use_ray ray_run_name ray_num_workers resources_per_worker.* "
           "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
           "expert_parallel_token_capacity expert_parallel_fallback_on_unsupported expert_parallel_save_dispatch "
           "expert_parallel_dispatch_chunks", idle(Why.PROCESSES)),
}  # fmt: skip

METHODS: dict[str, Key] = {
    **each("rpo_alpha simpo_gamma cpo_alpha center_rewards_coefficient", SAME),
    "rl": to("method"),
    "reward_model": to("method: rm"),
    "process_reward_model": to("method: prm"),
    "rl_beta": to("beta; orpo: orpo_alpha"),
    **each("dpo_beta orpo_alpha", to("beta, if neither trl.beta nor rl_beta is set; orpo: orpo_alpha")),
    "kto_desirable_weight": to("desirable_weight"),
    "kto_undesirable_weight": to("undesirable_weight"),
    "dpo_loss_type": to("loss_type"),
    "dpo_loss_weights": to("loss_weights"),
    "dpo_label_smoothing": to("label_smoothing"),
    "dpo_ld_alpha": to("ld_alpha"),
    "dpo_use_weighting": to("use_weighting"),
    "precompute_ref_log_probs": to("ref: precomputed"),
    "rl_adapter_ref_model": to("ref: copy"),
    "dpo_norm_loss": rejected("axolotl no longer reads it; write dpo_loss_type: [sigmoid_norm]"),
    **each("dpo_use_liger_kernel dpo_use_logits_to_keep", idle(Why.SPEED)),
    "dpo_generate_during_eval": idle(Why.LOGS),
    "liger_use_token_scaling": rejected("weights each token by its probability; write use_dft: true"),
    "use_dft": to("sft_loss: dft"),
}  # fmt: skip

TRL: dict[str, Key] = {
    "trl.beta": to("beta, instead of rl_beta; orpo: orpo_alpha"),
    **each("max_completion_length num_generations num_iterations temperature epsilon epsilon_high loss_type "
           "importance_sampling_level scale_rewards mask_truncated_completions reward_weights reward_funcs "
           "rollout_func sync_ref_model ref_model_mixup_alpha ref_model_sync_steps async_prefetch prefetch_depth "
           "vllm_sync_interval streaming_partial_batch streaming_min_groups vllm_importance_sampling_correction "
           "vllm_importance_sampling_mode vllm_importance_sampling_cap off_policy_mask_threshold "
           "use_bias_correction_kl replay_buffer_size replay_recompute_logps reroll_start_fraction reroll_max_groups "
           "skip_zero_advantage_batches entropy_coef", SAME, "trl."),
    "trl.multi_objective_aggregation": to("advantage_estimator: normalize_then_sum"),
    "trl.vllm_importance_sampling_clip_max": to("vllm_importance_sampling_cap"),
    "trl.vllm_importance_sampling_clip_min": to("vllm_importance_sampling_min"),
    **each("use_adaptive_entropy entropy_target", to("entropy_target"), "trl."),
    "trl.entropy_coef_delta": to("entropy_coef_step, with trl.use_adaptive_entropy"),
    "trl.entropy_coef_max": to("entropy_coef_max, with trl.use_adaptive_entropy"),
    "trl.entropy_coef_min": to("0; more is rejected"),
    "trl.vllm_lora_sync": to("sync.backend: lora"),
    "trl.reward_num_workers": to("reward_num_workers (1: 0, in the trainer)"),
    **each("* enable_thinking", to("chat_template_kwargs"), "trl.chat_template_kwargs."),
    "trl.generation_batch_size": to("minibatches_per_rollout"),
    "trl.use_vllm": to("rollout.engine: vllm or local"),
    "trl.vllm_mode": to("vllm.colocate"),
    "trl.vllm_server_host": to("vllm.url for another machine; here the run starts the server"),
    "trl.vllm_server_port": to("vllm.port, or the port of vllm.url"),
    "trl.vllm_server_timeout": to("vllm.timeout"),
    **each("use_data_producer vllm_enable_sleep_mode", idle(Why.INSIDE), "trl."),
    "trl.use_liger_loss": idle(Why.SPEED),
    **each("log_completions num_completions_to_print log_multimodal", idle(Why.SAMPLES), "trl."),
    "trl.generation_kwargs.stop_token_ids": idle("the model's own end tokens, and eot_tokens, end a completion"),
    "trl.generation_kwargs.*": rejected(_SAMPLING),
    **each("top_p top_k min_p", to("the flag of that name; ebft: a value that limits the distribution is rejected"),
           "trl."),
    "trl.repetition_penalty": to("1; another value is rejected: " + _SAMPLING),
    **each("vllm_guided_decoding_regex vllm_structured_outputs_regex", rejected(_SAMPLING), "trl."),
}  # fmt: skip

VLLM: dict[str, Key] = {
    **each("tensor_parallel_size gpu_memory_utilization max_model_len enforce_eager dtype",
           to("vllm: the flag of that name"), "vllm."),
    "vllm.data_parallel_size": to("vllm.replicas"),
    "vllm.port": to("vllm.port"),
    "vllm.host": to("vllm.url for another machine; here the run starts the server. rollout.serve: vllm.host"),
    **each("device enable_prefix_caching enable_reasoning reasoning_parser serve_module worker_extension_cls",
           idle(SERVING), "vllm."),
}  # fmt: skip

EBFT: dict[str, Key] = {
    **each("mode feature_layers embed_method use_whitening alignment_coef diversity_coef ce_coef rl_coef stride "
           "context_length generate_max_len n_samples_per_prompt min_completion_prefix temperature "
           "adaptive_max_tokens gt_length_multiplier", SAME, "ebft."),
    "ebft.advantage_estimator": to("advantage_estimator (group_norm: grpo)"),
    "ebft.top_p": to("1; less is rejected: " + _SAMPLING),
    "ebft.mask_thinking_ce": rejected("thoughts are part of the completion; use type: "
                                     "ebft_reasoning.transform_answer_only"),
}  # fmt: skip

NEMO_GYM: dict[str, Key] = {
    "nemo_gym_enabled": to("nemo_gym.*; false: all of it is dropped"),
    "nemo_gym_dir": to("nemo_gym.dir"),
    "nemo_gym_auto_start": to("nemo_gym.auto_start (true unless the file sets false)"),
    "nemo_gym_config_paths": to("nemo_gym.config_paths, with nemo_gym_auto_start"),
    "nemo_gym_head_port": to("nemo_gym.head_port, without nemo_gym_auto_start"),
    "nemo_gym_multi_turn": to("nemo_gym.multi_turn"),
    **each("nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_model_name",
           to("nemo_gym: the flag of that name")),
    **each("path server_name max_samples", to("nemo_gym.datasets"), "nemo_gym_datasets[]."),
    "nemo_gym_auto_clone": idle("nothing is downloaded by a run"),
    "nemo_gym_max_turns": idle("the gym's agent limits its turns"),
}  # fmt: skip

# Keys of axolotl's inference and other commands, which a training file may contain.
COMMANDS: dict[str, Key] = each(
    "inference gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
    "gradio_temperature export.* shard cli_args lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model "
    "cloud.* use_telemetry", idle(SERVING)
)  # fmt: skip

TABLE: dict[str, Key] = {**METHODS, **MODEL, **ROW_KEYS, **RUN, **LORA, **PARALLEL, **TRL, **VLLM, **EBFT, **NEMO_GYM,
                         **COMMANDS}  # fmt: skip
SECTIONS: dict[str, dict[str, Key]] = {
    "Method and its settings": METHODS, "trl": TRL, "vllm": VLLM, "ebft": EBFT, "NeMo Gym": NEMO_GYM,
    "Model": MODEL, "Rows": ROW_KEYS, "Run, optimizer and logs": RUN, "Adapters": LORA, "Several processes": PARALLEL,
    "Other commands": COMMANDS,
}  # fmt: skip
# Plugins that change nothing in what is trained, by a part of their dotted name; any other is rejected.
IDLE_PLUGINS = ("kernels", "liger", "cut_cross_entropy", "swanlab", "nemo_gym", "lm_eval", "wandb",
                "mlflow", "trackio", "context_parallel")  # fmt: skip
