"""Suggest a valid name for an unknown one in error messages: the nearest name, or strop's name for another library's.

KEYS and METHODS contain names from TRL, axolotl and verl. They are only hints; trainer/translate converts whole files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

# key of another library -> strop's keys; the first that the method has is suggested; (): no equivalent
KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("base_model", "model_name", "model_name_or_path", "model_id", "model_path",
                     "pretrained_model_name_or_path"), ("model",)),
    **dict.fromkeys(("revision_of_model", "model_revision"), ("revision",)),
    **dict.fromkeys(("tokenizer_config", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"), ("tokenizer",)),
    **dict.fromkeys(("unfrozen_parameters", "trainable_parameters"), ("trained_parameters",)),
    **dict.fromkeys(("train_data", "dataset", "datasets", "dataset_name", "dataset_path", "train_dataset", "train_file",
                     "train_files", "data_path", "data_files"), ("data",)),
    **dict.fromkeys(("eval_dataset", "eval_datasets", "test_data", "test_dataset", "test_datasets", "val_data",
                     "val_files", "eval_file"), ("eval_data",)),
    **dict.fromkeys(("dataset_type", "data_type", "type"), ("data_format",)),
    **dict.fromkeys(("rl", "algorithm", "algo", "trainer"), ("method",)),
    **dict.fromkeys(("batch_size", "micro_batch_size", "train_batch_size", "per_device_batch_size"),
                    ("per_device_train_batch_size",)),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "total_epochs"), ("num_train_epochs",)),
    **dict.fromkeys(("lr", "learn_rate"), ("learning_rate",)),
    **dict.fromkeys(("lr_scheduler", "scheduler"), ("lr_scheduler_type",)),
    "optimizer": ("optim",),
    **dict.fromkeys(("gradient_clipping", "max_norm", "clip_grad"), ("max_grad_norm",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision", "tf32"), ("dtype",)),
    **dict.fromkeys(("sequence_len", "max_seq_length", "max_seq_len", "seq_length", "cutoff_len", "model_max_length"),
                    ("max_length", "max_completion_length")),
    "rollout_max_length": ("max_prompt_length",),  # of python -m trainer.plan before it took the flags of a run
    **dict.fromkeys(("sample_packing", "pad_to_sequence_len"), ("packing",)),
    **dict.fromkeys(("adapter", "use_peft", "use_lora", "lora_rank", "peft", "qlora"), ("lora.r",)),
    "lora_target_linear": ("lora.target_modules",),
    "lora_model_dir": ("model",),
    **dict.fromkeys(("flash_attention", "flash_attn", "use_flash_attention_2", "attn_impl"), ("attn_implementation",)),
    **dict.fromkeys(("output", "out", "out_dir", "output_path", "save_dir", "run_name"), ("output_dir",)),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), ("resume",)),
    "eval_strategy": ("eval_steps",),
    "max_completion_length": ("max_tokens",),
    "save_strategy": ("save_steps",),
    **dict.fromkeys(("wandb_project", "wandb_name", "wandb_mode", "use_wandb", "use_tensorboard"), ("report_to",)),
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_version", "deepspeed"), ("parallel.mode",)),
    "context_parallel_size": ("parallel.context",),
    "dp_shard_size": ("parallel.shard",),
    **dict.fromkeys(("n", "group_size", "num_samples", "n_samples_per_prompt", "rollout_n"), ("num_generations",)),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size", "ppo_mini_batch_size", "num_mini_batches"),
                    ("minibatches_per_rollout",)),
    **dict.fromkeys(("entropy_coeff", "entropy_bonus"), ("entropy_coef",)),
    **dict.fromkeys(("target_entropy", "entropy_coeff_target"), ("entropy_target",)),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "response_length", "max_response_length"),
                    ("max_completion_length",)),
    **dict.fromkeys(("kl_coef", "kl_beta", "kl_loss_coef", "init_kl_coef", "rl_beta", "dpo_beta"), ("beta",)),
    **dict.fromkeys(("clip_ratio", "clip_range", "cliprange", "clip_eps", "epsilon_low"), ("epsilon",)),
    **dict.fromkeys(("reward_function", "reward_functions", "reward_fn", "rewards", "reward"), ("reward_funcs",)),
    "reward_model": ("reward_funcs", "method"),
    **dict.fromkeys(("lam", "gae_lam", "lambda_"), ("gae_lambda",)),
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs", "noptepochs"), ("num_iterations",)),
    "mini_batch_size": ("minibatches_per_rollout",),
    **dict.fromkeys(("value_clip", "clip_range_vf", "cliprange_vf"), ("cliprange_value",)),
    **dict.fromkeys(("critic_model", "critic_pretrain", "value_model_name_or_path"), ("value_model",)),
    "critic_lr": ("critic_learning_rate",),
    **dict.fromkeys(("use_vllm", "vllm_mode"), ("rollout.engine",)),
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host", "vllm_server_port"), ("vllm.url",)),
    **dict.fromkeys(("ref_model_name_or_path", "reference_model"), ("ref_model",)),
    "kto_desirable_weight": ("desirable_weight",),
    "kto_undesirable_weight": ("undesirable_weight",),
    **dict.fromkeys(("load_in_8bit", "model_type", "tokenizer_type", "plugins"), ()),
}  # fmt: skip
# key of another library -> hint, if the name of strop's key is not enough
NOTES: dict[str, str] = {
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
                    "no upload during a run, use python -m trainer.push"),
    "datasets": "use data (an entry's type is called format)",
}  # fmt: skip
# method of another library -> hint
METHODS = {
    **dict.fromkeys(("reward", "reward_model", "reward_trainer", "bradley_terry"), "did you mean rm?"),
    **dict.fromkeys(("process_reward_model", "process_reward", "stepwise"), "did you mean prm?"),
    **dict.fromkeys(("finetune", "finetuning", "supervised", "pretrain", "completion", "full"), "did you mean sft?"),
    **dict.fromkeys(("lora", "qlora"), "LoRA is a setting of every method: --method sft --lora.r 16"),
    **dict.fromkeys(("dapo", "dr_grpo", "bnpo", "luspo", "cispo", "sapo", "vespo", "reinforce"),
                    "it is a loss of grpo: --method grpo --loss-type NAME"),
    "gspo": "it is a setting of grpo: --method grpo --importance-sampling-level sequence",
    **dict.fromkeys(("bco", "sppo", "apo", "exo", "nca", "aot", "discopop"),
                    "it is a loss of dpo: --method dpo --loss-type NAME (--help lists them)"),
    **dict.fromkeys(("gkd", "gold", "minillm", "distill", "distillation"), "did you mean opd?"),
    "rpo": "it is a setting of dpo: --method dpo --rpo-alpha 1",
    **dict.fromkeys(("xpo", "nash_md"), "it is not built in; docs/extending.md shows how to write a method"),
}  # fmt: skip
# (columns present, columns absent, methods that read such rows); the first match is used
PAIR_METHODS = "dpo, ipo, cpo, simpo, orpo and rm"
ROW_KINDS: tuple[tuple[set[str], set[str], str], ...] = (
    ({"prompt", "completions", "labels"}, set(), "prm"),
    ({"chosen", "rejected"}, set(), PAIR_METHODS),
    ({"prompt", "completion", "label"}, set(), "kto"),
    ({"messages", "label"}, set(), "kto"),
    ({"prompt", "completion"}, {"label"}, "sft"),
    ({"messages"}, {"label"}, "sft"),
    ({"prompt", "answer"}, {"completion"}, "grpo, rloo, gdpo, ppo, online_dpo, opd and sdpo"),
)


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return a hint: "did you mean 'split'? (format, name, split, weight)"."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}? ({', '.join(names)})" if close else f"use one of {', '.join(names)}"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that a mistyped word most likely means, or None."""
    plain = {name.replace(".", "_").lower(): name for name in sorted(names, key=lambda name: "." in name)}
    word = word.replace("-", "_").replace(".", "_").lower()
    if word in KEYS or word.removeprefix("trl_") in KEYS:
        keys = KEYS.get(word, KEYS.get(word.removeprefix("trl_"), ()))
        match = next((name for name in keys if name in plain.values()), None)
        if match or not keys:
            return match
    if word.removeprefix("trl_") in plain:
        return plain[word.removeprefix("trl_")]
    if len(word) <= 4:  # in a short name, one different letter is a different name: ppo is not ipo
        close = [name for name in plain if sorted(name) == sorted(word)]
        close += difflib.get_close_matches(word, plain, n=1, cutoff=0.75)
    else:
        close = difflib.get_close_matches(word, plain, n=1, cutoff=0.8)
    close += [name for name in plain if "".join(part[0] for part in name.split("_") if part) == word]
    close += [name for name in plain if name.endswith(f"_{word}") or name.startswith(f"{word}_")]
    if len(word) > 4:
        close += difflib.get_close_matches(word, plain, n=1, cutoff=0.7)
    return plain[close[0]] if close else None


def value_hint(key: str, value: str) -> str:
    """Return a hint for another library's value: "; flex attention ..."."""
    if key == "attn_implementation" and "flash" in value:
        return "; flex attention takes its place on CUDA (auto)"
    return ""


def method_hint(name: str, methods: Iterable[str]) -> str:
    """Suggest a replacement for an unknown method."""
    methods, word = list(methods), name.rpartition(".")[2].replace("-", "_").lower()
    if word in METHODS:
        return METHODS[word].replace("NAME", word)
    match = nearest(word, methods)
    return f"did you mean {match}?" if match else f"methods: {', '.join(methods)}"


def other_methods(columns: Mapping[str, Any], error: str) -> str:
    """Return "; rows with ... are for --method kto" if a row lacks columns and clearly belongs to another method."""
    message, _, listed = error.partition(" (its columns: ")
    missing = set(re.findall(r"'(\w+)'", message))
    present = {name for name, value in columns.items() if value is not None}
    if listed and missing & set().union(*(required for required, _, _ in ROW_KINDS)):
        for required, absent, methods in ROW_KINDS:
            if required <= present and not absent & present:
                names = ", ".join(name for name in columns if name in required)
                return f"; rows with {names} are for --method {methods}"
    return ""


def some_rows(sources: Iterable[str]) -> str:
    """Name up to three rows: "row a", "rows a, b, c and 5 more"."""
    names = list(dict.fromkeys(sources))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"row{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"
