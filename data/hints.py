"""What a wrong name most likely meant, for error messages: the nearest valid name, or ours for that of another library.

KEYS and METHODS hold the names that people bring from TRL, axolotl and verl. They are hints only, for a file or a
command that is half ours; trainer/translate converts whole files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

# key of another library -> our keys, of which the first that the method has is suggested; none: nothing is like it
KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("base_model", "model_name", "model_name_or_path", "model_id", "model_path",
                     "pretrained_model_name_or_path"), ("model",)),
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
    **dict.fromkeys(("sample_packing", "pad_to_sequence_len"), ("packing",)),
    **dict.fromkeys(("adapter", "use_peft", "use_lora", "lora_rank", "peft", "qlora"), ("lora.r",)),
    "lora_target_linear": ("lora.target_modules",),
    "lora_model_dir": ("model",),
    **dict.fromkeys(("flash_attention", "flash_attn", "use_flash_attention_2", "attn_impl"), ("attn_implementation",)),
    **dict.fromkeys(("output", "out", "out_dir", "output_path", "save_dir", "run_name"), ("output_dir",)),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), ("resume",)),
    "eval_strategy": ("eval_steps",),
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
# key of another library -> what to do, where the name of one of our keys does not say it
NOTES: dict[str, str] = {
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
                    "no upload by a run, python -m trainer.push does it"),
    "datasets": "use data (an entry's type is format here)",
}  # fmt: skip
# method of another library -> what to use here
METHODS = {
    **dict.fromkeys(("reward", "reward_model", "reward_trainer", "bradley_terry"), "did you mean rm?"),
    **dict.fromkeys(("process_reward_model", "process_reward", "stepwise"), "did you mean prm?"),
    **dict.fromkeys(("finetune", "finetuning", "supervised", "pretrain", "completion", "full"), "did you mean sft?"),
    **dict.fromkeys(("lora", "qlora"), "LoRA is a setting of every method: --method sft --lora.r 16"),
    **dict.fromkeys(("dapo", "dr_grpo", "bnpo", "luspo", "cispo", "sapo", "vespo", "reinforce"),
                    "it is a loss of grpo: --method grpo --loss-type NAME"),
    "gspo": "it is a setting of grpo: --method grpo --importance-sampling-level sequence",
    **dict.fromkeys(("bco", "sppo", "apo", "exo", "nca", "aot", "discopop"),
                    "it is a loss of dpo: --method dpo --loss-type NAME, as --help lists them"),
    **dict.fromkeys(("gkd", "gold", "minillm", "distill", "distillation"), "did you mean opd?"),
    "rpo": "it is a setting of dpo: --method dpo --rpo-alpha 1",
    **dict.fromkeys(("xpo", "nash_md"),
                    "it is not built in; docs/extending.md shows how to write a method"),
}  # fmt: skip
# What the columns of a row are for, the first that fits: (columns it has, columns it has not, methods)
PAIR_METHODS = "dpo, ipo, cpo, simpo, orpo and rm"
ROW_KINDS: tuple[tuple[set[str], set[str], str], ...] = (
    ({"prompt", "completions", "labels"}, set(), "prm"),
    ({"chosen", "rejected"}, set(), PAIR_METHODS),
    ({"prompt", "completion", "label"}, set(), "kto"),
    ({"messages", "label"}, set(), "kto"),
    ({"prompt", "completion"}, {"label"}, "sft"),
    ({"messages"}, {"label"}, "sft"),
    ({"prompt", "answer"}, {"completion"}, "grpo, rloo, gdpo, online_dpo and ppo"),
)


def suggest(name: str, valid: Iterable[str]) -> str:
    """A hint: "did you mean 'split'? (format, name, split, weight)"."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}? ({', '.join(names)})"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that a mistyped word most likely meant; None if no name is near."""
    plain = {name.replace(".", "_").lower(): name for name in sorted(names, key=lambda name: "." in name)}
    word = word.replace("-", "_").replace(".", "_").lower()
    if word in KEYS or word.removeprefix("trl_") in KEYS:
        known = KEYS.get(word, KEYS.get(word.removeprefix("trl_"), ()))
        found = [name for name in known if name in plain.values()]
        if found or not known:
            return found[0] if found else None
    if word.removeprefix("trl_") in plain:
        return plain[word.removeprefix("trl_")]
    if len(word) <= 4:  # in so short a name one other letter is another name: ppo is not ipo
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
    """What to add to the error for a value of another library: "; flex attention ..."."""
    if key == "attn_implementation" and "flash" in value:
        return "; flex attention takes its place on CUDA (auto)"
    return ""


def method_hint(name: str, methods: Iterable[str]) -> str:
    """What to write instead of an unknown method."""
    methods, word = list(methods), name.rpartition(".")[2].replace("-", "_").lower()
    if word in METHODS:
        return METHODS[word].replace("NAME", word)
    found = nearest(word, methods)
    return f"did you mean {found}?" if found else f"there are {', '.join(methods)}"


def other_methods(columns: Mapping[str, Any], error: str) -> str:
    """For a row that lacks columns: "; rows with ... are for --method kto", if its columns are clearly for another."""
    lacking, _, listed = error.partition(" (its columns: ")
    named = set(re.findall(r"'(\w+)'", lacking))
    present = {name for name, value in columns.items() if value is not None}
    if listed and named & set().union(*(has for has, _, _ in ROW_KINDS)):
        for has, lacks, methods in ROW_KINDS:
            if has <= present and not lacks & present:
                return f"; rows with {', '.join(name for name in columns if name in has)} are for --method {methods}"
    return ""
