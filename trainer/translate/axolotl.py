"""Translate an axolotl config: python -m trainer --config their.yml, and --dry-run to print the result.

    if is_axolotl(tree):
        made = translate(tree)
        made.tree, made.idle, made.notes, made.environment

axolotl_table.py lists the outcome for every key. If a missing key has a different default in axolotl, axolotl's default
is set; docs/from_axolotl.md lists those keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.hints import suggest
from data.sources import SUFFIXES
from rollout.gyms.options import ENV, VERIFY
from rollout.model_folder import read_adapter
from trainer.parallel.ranks import world_size
from trainer.translate import keys
from trainer.translate.axolotl_notes import differences
from trainer.translate.axolotl_rows import (
    OWN_TEMPLATE,
    PLAIN,
    SHARED,
    datasets_of,
    fallback_note,
    rows_of,
    shared_of,
    template_of,
)
from trainer.translate.axolotl_table import IDLE_PLUGINS, TABLE
from trainer.translate.keys import FULL, Theirs, Translation, listed, number

# A file with one of these and none of OURS is axolotl's.
THEIRS = ("base_model", "rl", "datasets", "reward_model", "process_reward_model", "micro_batch_size", "sequence_len")
OURS = ("method", "model", "data", "lora", "parallel", "rollout", "per_device_train_batch_size", "num_train_epochs",
        "lr_scheduler_type")  # fmt: skip
METHODS = ("dpo", "ipo", "simpo", "kto", "orpo", "grpo", "gdpo", "ebft")  # values of rl
SAMPLING = ("grpo", "gdpo", "rloo")
PAIRS = ("dpo", "ipo")
NO_DROPOUT = (*PAIRS, "simpo", "kto", "orpo", "rm", "prm")  # their trainers set disable_dropout, also for adapters
ONLY_ASYNC = (  # keys of trl that axolotl reads only with async_prefetch or use_data_producer
    "streaming_partial_batch", "replay_buffer_size", "reroll_start_fraction", "vllm_sync_interval",
)  # fmt: skip
BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")  # the first that is set is read
WARMUP = 0.03  # fraction of the steps, at most MAX_WARMUP steps, if the file has no warm-up
MAX_WARMUP = 100

REWARDS = {
    "axolotl.integrations.nemo_gym.rewards.reward_nemo_gym_verify": VERIFY,
    "axolotl.integrations.nemo_gym.rewards.reward_env": ENV,
}
# Flags of one name in axolotl's trl block and here.
SAME_TRL = (
    "num_iterations", "temperature", "epsilon", "epsilon_high", "loss_type", "importance_sampling_level",
    "mask_truncated_completions", "entropy_coef", "streaming_partial_batch", "off_policy_mask_threshold",
    "replay_buffer_size",
)  # fmt: skip
SAME_VLLM = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager", "dtype")
SAME_EBFT = (
    "mode", "feature_layers", "embed_method", "use_whitening", "alignment_coef", "diversity_coef", "ce_coef",
)  # fmt: skip
STRIDED = ("stride", "context_length", "generate_max_len", "n_samples_per_prompt", "min_completion_prefix", "rl_coef")


TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("base_model", "tokenizer_config", "datasets[].path"), (str,)),
    **dict.fromkeys(("plugins", "eot_tokens", "pretraining_dataset", "datasets[].roles_to_train", "trl.reward_funcs",
                     "trl.reward_weights"), (list,)),
    "lora_target_modules": (list, str),
}  # fmt: skip


def is_axolotl(tree: Mapping[str, Any]) -> bool:
    return any(key in tree for key in THEIRS) and not any(key in tree for key in OURS)


def translate(
    tree: Mapping[str, Any], *, method: str | None = None, engine: str | None = None, max_steps: str | None = None
) -> Translation:
    """Translate a file; method, engine and max_steps are those of the command line and affect its meaning."""
    return _Axolotl(tree, method, engine, max_steps).made


def translate_server(tree: Mapping[str, Any]) -> Translation:
    """Translate a file for python -m rollout.serve: the vllm block is the server's, for any trainer."""
    Theirs(tree, TABLE, "axolotl")  # raises if a block is not a block
    vllm, trl = tree.get("vllm") or {}, tree.get("trl") or {}
    trl = {**trl, "use_vllm": True, "vllm_server_host": None, "vllm_server_port": None}
    made = translate({**tree, "trl": trl, "vllm": {**vllm, "host": None}})
    made.set("vllm.host", vllm.get("host"))
    return made


class _Axolotl:
    """One file; each method translates a section of it."""

    def __init__(self, tree: Mapping[str, Any], method: str | None, engine: str | None, max_steps: str | None) -> None:
        self.made, self.max_steps = Translation(), max_steps
        self.set, self.note = self.made.set, self.made.note
        self.theirs = Theirs(tree, TABLE, "axolotl")
        for key, value in self.theirs.leaves:
            kinds = TYPES.get(key.removeprefix("test_"), (object,))
            if not isinstance(value, kinds):
                what = " or ".join({list: "a list", str: "text"}[kind] for kind in kinds)
                raise UserError(f"{key}={keys.shown(value)}: must be {what}")
        self.take, self.number = self.theirs.take, self.theirs.number
        named = self._method()
        self.method = method or named
        self.set("method", self.method)
        self.strided = self.method == "ebft" and self.take("ebft.mode") == "strided"
        self.samples = self.method in SAMPLING or (self.method == "ebft" and not self.strided)
        self.gym = self._uses_gym()
        self._model()
        self._rows()
        self._length()
        self._batches()
        self._schedule()
        self._saves_and_evals()
        self._services()
        self._lora()
        self._parallel()
        self._preferences()
        if self.method == "ebft":
            self._ebft()
        if self.samples:
            self._sampling()
            self._servers(engine)
        if self.gym:
            self._nemo_gym()
        found = [f"trl.{key}" for key in ONLY_ASYNC if self.made.tree.get(key)]
        if found and not self._is_async():
            self.note(f"{', '.join(found)}: axolotl reads only with trl.use_data_producer or trl.async_prefetch")
        self._unused()

    def copy(self, key: str, name: str | None = None, *, unless: Any = None) -> None:
        """Set the flag to the value of the key, if the file has it and it is not the default."""
        value = self.take(key)
        if value is not None and value != unless:
            self.set(name or key.rpartition(".")[2], value)

    def copy_number(self, key: str, name: str | None = None, kind: type = float) -> None:
        self.set(name or key.rpartition(".")[2], self.number(key, kind))

    # method and model

    def _method(self) -> str:
        named, outcome, process = (self.take(key) for key in ("rl", "reward_model", "process_reward_model"))
        if named is None:
            return "prm" if process else "rm" if outcome else "sft"
        if str(named).lower() not in METHODS:
            raise UserError(f"rl={named}: is not a method of axolotl; {suggest(str(named), METHODS)}")
        return str(named).lower()

    def _model(self) -> None:
        self.copy("base_model", "model")
        adapter = self.take("lora_model_dir")
        if adapter:
            self.set("model", str(adapter))
            self.note(f"lora_model_dir: training continues from {adapter}, on the base that it names")
        self.copy("trust_remote_code", unless=False)
        self._sources()
        self._unfrozen()
        self._dtype()
        self._attention()
        if self.take("gradient_checkpointing"):
            self.set("gradient_checkpointing", True)
        self.set("compile", self.take("torch_compile"))
        special = self.take("special_tokens")
        self.theirs.take_all("special_tokens")
        if special:
            self.set("special_tokens", {name: token for name, token in special.items() if token is not None})
        self.copy("eot_tokens")
        if self.method in ("sft", "rm", "prm"):  # the others ignore it
            noise = self.take("neftune_noise_alpha"), self.take("noisy_embedding_alpha")
            self.set("neftune_noise_alpha", number(noise[0] or noise[1], "neftune_noise_alpha"))
        weight = self.number("model_config.router_aux_loss_coef")
        if self.take("model_config.output_router_logits"):
            self.set("router_aux_loss_coef", 0.001 if weight is None else weight)

    def _sources(self) -> None:
        """Translate revision and tokenizer. axolotl reads both tokenizer and config of another base_model_config."""
        base = self.take("base_model")
        revision = self.take("revision_of_model") or self.take("model_revision")
        if self.take("base_model_config") not in (None, base):
            raise UserError(
                f"base_model_config={self.take('base_model_config')}: differs from base_model={base}, whose config is "
                "used; remove it, and set another tokenizer with tokenizer_config"
            )
        tokenizer = self.take("tokenizer_config")
        if tokenizer != base:
            self.set("tokenizer", tokenizer)
        if revision is None:
            return
        self.set("revision", str(revision))
        if self.take("lora_model_dir"):
            raise UserError(
                f"revision_of_model={revision}: the adapter in lora_model_dir names the revision of its base; remove it"
            )
        if tokenizer not in (None, base) and not Path(str(tokenizer)).expanduser().is_dir():
            raise UserError(
                f"revision_of_model={revision}: axolotl reads tokenizer_config={tokenizer} at this revision, strop "
                "only the model; download the tokenizer and name its folder"
            )

    def _unfrozen(self) -> None:
        """axolotl matches from the start of a name, and escapes every dot that no + follows."""
        patterns, adapter = list(map(str, listed(self.take("unfrozen_parameters")))), self.take("adapter")
        for pattern in patterns:
            if re.fullmatch(r".+\[[0-9]*(:[0-9]*)?\]", pattern):
                raise UserError(
                    f"unfrozen_parameters={pattern}: training some rows of a parameter is not supported; remove [...]"
                )
        if patterns and adapter:
            raise UserError(
                f"unfrozen_parameters={keys.shown(patterns)}: not supported with adapter={adapter}, which axolotl "
                "then freezes; remove one of the two"
            )
        self.set("trained_parameters", [re.sub(r"\.(?!\+)", r"\.", pattern) for pattern in patterns] or None)

    def _dtype(self) -> None:
        mixed, pure, full, torch_dtype = (self.take(key) for key in ("bf16", "bfloat16", "float32", "torch_dtype"))
        if mixed is None and "bf16" in self.theirs.tree:
            mixed = False  # `bf16:` without a value is float32 in axolotl, no bf16 at all is auto
        name = str(torch_dtype).removeprefix("torch.") if torch_dtype is not None else None
        if name not in (None, "auto", "bfloat16", "float32"):
            raise UserError(f"torch_dtype={torch_dtype}: is not supported; use bfloat16 or float32")
        if full is True or (mixed is False and not pure) or (mixed is None and name == "float32"):
            self.set("dtype", "float32")
        elif mixed is True or pure is True or mixed == "full" or name == "bfloat16":
            self.set("dtype", "bfloat16")
        if (pure is True or mixed == "full") and not self.take("adapter"):
            self.set("trained_dtype", "bfloat16")

    def _attention(self) -> None:
        given = self.take("attn_implementation")
        for key, name in (("sdp_attention", "sdpa"), ("eager_attention", "eager"), ("flash_attention", "flash"),
                          ("flex_attention", "flex"), ("xformers_attention", "xformers"),
                          ("sage_attention", "sage")):  # fmt: skip
            if self.take(key) and given is None:
                given = name
        self.set("attn_implementation", given if given in keys.KERNELS else None)

    # rows

    def _rows(self) -> None:
        tree = self.theirs.tree
        self.theirs.take_all("test_datasets")
        self.theirs.take_all("pretraining_dataset")
        held_out = datasets_of(tree, "test_datasets")
        trained = {}
        if not self.gym:  # axolotl's plugin replaces the rows by the gym's rows
            self.theirs.take_all("datasets")
            trained = datasets_of(tree, "datasets")
        pretraining = tree.get("pretraining_dataset") or []
        if len(pretraining) + bool(trained) > 1:
            raise UserError(
                "pretraining_dataset: axolotl reads only its first dataset, and no datasets; keep one of them"
            )
        for dataset in pretraining:
            label = "pretraining_dataset[0]"
            trained[label] = {"type": "completion", **({"path": dataset} if isinstance(dataset, str) else dataset)}
            self.note(
                f"{label}: not streamed; long texts are split into chunks, with eos after the last one (axolotl: "
                "overlapping chunks that all end with eos; without sample_packing only the first)"
            )
        entries, eval_entries = rows_of(trained, self.method), rows_of(held_out, self.method)
        self.set("data", entries or None)
        self._one_split(eval_entries, {entry["path"] for entry in entries})
        self.set("eval_data", eval_entries or None)
        shared, notes = shared_of(tree, {**trained, **held_out}, self.method)
        self._shared(shared)
        for note in (*notes, *differences(self.made.tree)):
            self.note(note)
        shards = self.take("dataset_shard_num") if self.method in ("sft", "rm", "prm") else None
        if shards and self.take("dataset_shard_idx") is not None:  # axolotl's rl does not read them
            raise UserError(
                f"dataset_shard_num={shards}: shards of the shuffled rows are not supported; remove it, and write a "
                "split for each dataset, such as split: train[:25%]"
            )
        if self.take("shuffle_merged_datasets") is False:
            raise UserError("shuffle_merged_datasets=False: rows are shuffled by seed here; remove it")
        if self.take("dataset_exact_deduplication"):
            self.set("dedup", True)
        size = self.number("val_set_size")
        self.held_out = bool(held_out)
        if size and held_out:
            raise UserError(f"val_set_size={size:g}: conflicts with test_datasets; remove one of the two")
        if size and not self.gym:
            self.set("val_set_size", size)
            self.held_out = True

    def _one_split(self, held_out: list[dict[str, Any]], trained: set[str]) -> None:
        """Drop the split of held-out files: a file has one split, so `split: test` means all of its rows."""
        for entry in held_out:
            path, split = entry["path"], entry.get("split")
            if path.lower().endswith(SUFFIXES) and path not in trained and str(split).isidentifier():
                if entry.pop("split", "train") != "train":
                    self.note(f"test_datasets: {path} is one file, without a split {split}; all of its rows are used")

    def _shared(self, shared: dict[str, Any]) -> None:
        """Set the flags that axolotl's file has per dataset, and the template of the run."""
        name = self.take("chat_template")
        jinja = self.take("chat_template_jinja") if name in (None, "jinja") else None  # not read with another template
        template = shared.pop("chat_template", None) or template_of(name, jinja)
        self.set("chat_template", template if template != OWN_TEMPLATE else None)
        if str(name).startswith(f"{OWN_TEMPLATE}_fallback"):
            self.note(fallback_note(name))
        for key, value in shared.items():
            self.set(key, value if value != SHARED[self.method][key] else None)
        if self.method == "sft":
            formats = self._formats()
            if self.take("train_on_inputs") and formats != {"completion"}:  # of plain text all is trained anyway
                self.set("train_on_inputs", True)
            if formats.difference(PLAIN):
                self.set("chat_template_kwargs", self.take("chat_template_kwargs") or None)
            if self.take("use_dft"):
                self.set("sft_loss", "dft")

    def _formats(self) -> set[str | None]:
        return {entry.get("format") for entry in self.made.tree.get("data", ())}

    def _length(self) -> None:
        policy = str(self.take("excess_length_strategy") or "drop").lower()
        if policy == "raise":
            raise UserError("excess_length_strategy=raise: long rows are truncated or skipped, and counted; remove it")
        if not self.samples:
            self.set("max_length", self.number("sequence_len", int) or 512)
        has_limit = self.method in ("sft", *PAIRS, "simpo", "orpo", "kto")
        if has_limit and policy != "truncate" and self._formats() != {"completion"}:
            self.set("long_rows", "drop")
        packing = self.take("sample_packing")
        if self.method == "sft":
            self.set("packing", packing)
            if packing:
                self.note("sample_packing: a batch has micro_batch_size sequences; in axolotl it has as many full rows")

    # run

    def _batches(self) -> None:
        micro = self.number("micro_batch_size", int)
        steps = self.number("gradient_accumulation_steps", int)
        total = self.number("batch_size", int)
        if total is not None and steps is None and "gradient_accumulation_steps" in self.theirs.tree:
            steps = max(1, total // (micro or 1))
        elif total not in (None, (micro or 1) * (steps or 1)):
            raise UserError(
                f"batch_size={total}: has no effect in axolotl, where gradient_accumulation_steps is 1 by default; "
                f"remove it, or write gradient_accumulation_steps: {max(1, total // (micro or 1))}"
            )
        self.set("per_device_train_batch_size", micro or (1 if steps else self._smallest_batch()))
        self.set("gradient_accumulation_steps", steps)
        epochs = self.number("num_epochs")
        limit = self.number("max_steps", int)
        if limit is not None and limit > 0:
            self.set("max_steps", limit)
        else:
            self.set("num_train_epochs", epochs)
        self.set("seed", 42 if self.take("seed") is None else self.number("seed", int))
        self.copy("full_determinism", "deterministic", unless=False)
        self.copy("output_dir")
        self._resume()
        self.copy_number("loss_watchdog_threshold")
        self.copy_number("loss_watchdog_patience", kind=int)

    def _smallest_batch(self) -> int:
        """Rows per process if the file has no batch size; axolotl's default of 1 is an error for groups and KTO."""
        if not self.samples and self.method != "kto":
            return 1
        rows, reason = (self._group_size(), "trl.num_generations") if self.samples else (2, "KTO's minimum")
        self.note(f"micro_batch_size is not set: {rows} per process is used ({reason}); axolotl's default is 1")
        return rows

    def _group_size(self) -> int:
        return self.number("trl.num_generations", int) or 8

    def _resume(self) -> None:
        checkpoint, output_dir = self.take("resume_from_checkpoint"), self.take("output_dir")
        has_run = output_dir is not None and (Path(str(output_dir)) / "config.yaml").is_file()
        if checkpoint is True or (self.take("auto_resume_from_checkpoints") and has_run and not checkpoint):
            self.set("resume", "latest")
        elif checkpoint:
            self.set("resume", str(checkpoint))

    def _schedule(self) -> None:
        self.copy_number("learning_rate")
        name = self.take("lr_scheduler") or "cosine"
        floor = self.number("lr_scheduler_kwargs.min_lr_rate")
        if name == "cosine" and self.take("cosine_min_lr_ratio") is not None:  # other schedules ignore it
            floor = self.number("cosine_min_lr_ratio")
        if name not in keys.SCHEDULES:
            raise UserError(f"lr_scheduler={name}: is not supported; {suggest(str(name), keys.SCHEDULES)}")
        has_warmup = name != "constant"  # which has none in transformers; constant_with_warmup has
        name = "cosine_with_min_lr" if floor and name == "cosine" else keys.SCHEDULES[name]
        self.set("lr_scheduler_type", None if name == "cosine" else name)
        self.set("min_lr_ratio", floor or None)
        steps = self.number("warmup_steps", int)
        ratio = self.number("warmup_ratio")
        if not has_warmup and (steps or ratio):
            self.note("lr_scheduler=constant: no warm-up, as in axolotl; write constant_with_warmup for a warm-up")
        elif steps:
            self.set("warmup_steps", steps)
        elif has_warmup and ratio is None and steps is None:
            total = str(self.made.tree.get("max_steps") if self.max_steps is None else self.max_steps)
            is_long = total.isdigit() and WARMUP * int(total) > MAX_WARMUP
            self.set("warmup_steps" if is_long else "warmup_ratio", MAX_WARMUP if is_long else WARMUP)
        elif has_warmup and steps is None:
            self.set("warmup_ratio", ratio or None)
        optimizer = self.take("optimizer") or "adamw_torch_fused"
        if optimizer not in keys.OPTIMIZERS:
            raise UserError(f"optimizer={optimizer}: is not supported; {suggest(str(optimizer), keys.OPTIMIZERS)}")
        self.set("optim", None if keys.OPTIMIZERS[optimizer] == "adamw" else keys.OPTIMIZERS[optimizer])
        for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "loraplus_lr_ratio"):
            self.copy_number(key)

    def _saves_and_evals(self) -> None:
        steps, per_epoch = self.take("save_steps"), self.take("saves_per_epoch")
        strategy = self.take("save_strategy")
        strategy = "no" if strategy is False else str(strategy or "")  # YAML reads no as false
        if strategy == "best":
            raise UserError("save_strategy=best: checkpoints are saved by steps; use saves_per_epoch")
        if steps or per_epoch:
            self._every("save", steps, per_epoch)
        elif strategy in ("no", "steps"):
            self.set("save_steps", 0 if strategy == "no" else 500)
        else:
            self.set("saves_per_epoch", 1)
        self.set("save_total_limit", self.number("save_total_limit", int) or 4)
        every = self.number("logging_steps", int)
        self.set("logging_steps", every if every and every > 1 else None)
        steps, per_epoch = self.take("eval_steps"), self.take("evals_per_epoch")
        strategy = str(self.take("eval_strategy") or self.take("evaluation_strategy") or "")
        if self.held_out and (steps or per_epoch):
            self._every("eval", steps, per_epoch)
        elif self.held_out and strategy == "epoch":
            self.set("evals_per_epoch", 1)
        elif self.held_out and strategy == "steps":
            if not every:
                raise UserError("eval_strategy=steps: needs eval_steps; add it, or write evals_per_epoch")
            self.set("eval_steps", every)
        patience = self.number("early_stopping_patience", int)
        if wrong := keys.set_best(self.made, self.take, held_out=self.held_out, patience=patience):
            raise UserError(wrong)

    def _every(self, what: str, steps: Any, per_epoch: Any) -> None:
        """Set the steps between saves or evaluations.

        In axolotl a fraction is a fraction of the run, and a number per epoch becomes one if the run has several
        epochs: with max_steps that is a number of steps, whatever the length of an epoch.
        """
        every, total = number(steps, f"{what}_steps"), self.max_steps or self.made.tree.get("max_steps")
        if every is None:
            count = number(per_epoch, f"{what}s_per_epoch", int)
            times = count * (self.number("num_epochs") or 1.0)
            if total is None or times <= 1:
                self.set(f"{what}s_per_epoch", count)
                return
            every = 1.0 / times
        if every < 1 and total is None:
            raise UserError(
                f"{what}_steps={steps}: a fraction of the run needs max_steps; use steps, or {what}s_per_epoch"
            )
        self.set(f"{what}_steps", math.ceil(int(total) * every) if every < 1 else int(every))

    def _services(self) -> None:
        services = []
        project, wanted = self.take("wandb_project"), self.take("use_wandb")
        if (project or wanted) and wanted is not False:
            services.append("wandb")
            for key, variable in (("wandb_project", "WANDB_PROJECT"), ("wandb_entity", "WANDB_ENTITY"),
                                  ("wandb_mode", "WANDB_MODE")):  # fmt: skip
                if self.take(key):
                    self.made.environment[variable] = str(self.take(key))
        services += [name for name in ("tensorboard", "trackio") if self.take(f"use_{name}")]
        for key, variable in (("trackio_project_name", "TRACKIO_PROJECT"), ("trackio_space_id", "TRACKIO_SPACE_ID")):
            if self.take(key):
                self.made.environment[variable] = str(self.take(key))
        self.set("report_to", services or None)
        for name in listed(self.theirs.tree.get("plugins")):
            if not any(known in str(name) for known in IDLE_PLUGINS):
                raise UserError(f"plugins={name}: may change what is trained, and is not supported; remove it")

    # adapters and processes

    def _lora(self) -> None:
        adapter = self.take("adapter")
        four, eight = self.take("load_in_4bit"), self.take("load_in_8bit")
        if adapter not in (None, "lora", "qlora"):
            raise UserError(f"adapter={adapter}: is not supported; use lora or qlora")
        if adapter == "qlora" or four:
            self.set("load_in_4bit", True)
        elif eight:
            self.note(keys.EIGHT_BITS_NOTE)
        saved = self.take("lora_model_dir")
        if adapter is None and saved:
            raise UserError(f"lora_model_dir={saved}: has no effect without an adapter; add adapter: lora")
        if adapter is None:
            return
        self.copy("merge_lora", unless=False)
        if saved and (Path(str(saved)) / "adapter_config.json").is_file():
            self._saved_adapter(str(saved))
            return
        self.set("lora.r", self.number("lora_r", int) or 8)
        self.set("lora.alpha", self.number("lora_alpha", int) or 8)
        if self.method not in NO_DROPOUT:
            self.set("lora.dropout", self.number("lora_dropout") or None)
        linear, names = self.take("lora_target_linear"), listed(self.take("lora_target_modules"))
        more = [str(name) for name in names if linear and not str(name).endswith("_proj")]
        if more:
            raise UserError(
                f"lora_target_modules={' '.join(more)}: lora_target_linear adds all linear layers; remove it if they "
                "are linear layers, or list all modules here and remove lora_target_linear"
            )
        if not linear:
            self.set("lora.target_modules", names or ["q_proj", "v_proj"])
        self.copy("lora_modules_to_save", "lora.modules_to_save", unless=[])
        for key, name in (("peft_use_dora", "lora.dora"), ("peft_use_rslora", "lora.rslora")):
            self.copy(key, name, unless=False)

    def _saved_adapter(self, folder: str) -> None:
        """Keep the settings of an existing adapter; axolotl ignores the file's."""
        adapter = read_adapter(folder)
        self.set("lora.r", adapter["r"])
        self.set("lora.alpha", adapter["lora_alpha"])
        self.set("lora.dropout", adapter.get("lora_dropout") or None)
        self.set("lora.modules_to_save", adapter.get("modules_to_save") or None)
        for key in ("rslora", "dora"):
            self.set(f"lora.{key}", adapter.get(f"use_{key}") or None)
        rank = self.take("lora_r")
        if rank not in (None, adapter["r"]):
            self.note(f"lora_r={rank}: ignored, the adapter in {folder} has rank {adapter['r']}")
        if adapter.get("lora_dropout") and self.method in NO_DROPOUT:
            self.note(f"lora_model_dir: its dropout of {adapter['lora_dropout']} is applied here; axolotl turns it off")
        for key in ("lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules", "lora_modules_to_save",
                    "peft_use_dora", "peft_use_rslora"):  # fmt: skip
            self.take(key)

    def _parallel(self) -> None:
        """Translate sharding; with one process these settings have no effect."""
        several = world_size() > 1
        for key in ("tensor_parallel_size", "expert_parallel_size"):
            size = self.take(key)
            if size not in (None, 1):
                raise UserError(f"{key}={size}: is not supported; use FSDP, and context_parallel_size for length")
        sizes = [self.take(f"context_parallel{key}") for key in ("_size", ".size")]
        context = next((size for size in [*sizes, self.take("sequence_parallel_degree")] if size), None)
        self.set("parallel.context", context if context not in (None, 1) else None)
        if self._fsdp("activation_checkpointing"):
            self.set("gradient_checkpointing", True)
        strategy = str(self._fsdp("sharding_strategy") or "FULL_SHARD").upper()
        wanted = bool(self.theirs.tree.get("fsdp") or self.theirs.tree.get("fsdp_config"))
        stage, offload = self._zero()
        size = self.take("dp_shard_size") if several else None
        if stage is not None and several:
            self.take("deepspeed")
            stage = 0 if self.made.tree.get("load_in_4bit") else stage  # 4-bit weights cannot be sharded
            self.note(f"deepspeed: {f'ZeRO-{stage} runs on FSDP' if stage else 'each process has a copy of the model'}")
            strategy, wanted = {0: "NO_SHARD", 3: "FULL_SHARD"}.get(stage, "SHARD_GRAD_OP"), True
        if not several or not (wanted or size not in (None, 1)):
            return
        self.theirs.take_all("fsdp")
        if strategy in ("NO_SHARD", "3"):
            self.set("parallel.mode", "replicate")
            return
        self.set("parallel.mode", "fsdp")
        self.set("parallel.shard", size if size not in (None, -1) else None)
        if self._fsdp("reshard_after_forward") is False or strategy in ("SHARD_GRAD_OP", "2", "HYBRID_SHARD_ZERO2"):
            self.set("parallel.reshard_after_forward", False)
        if self._fsdp("offload_params") or offload:
            self.set("parallel.cpu_offload", True)

    def _zero(self) -> tuple[int | None, bool]:
        """Return the ZeRO stage of a DeepSpeed file, mapping or file name, and whether it offloads to the CPU."""
        given = self.theirs.tree.get("deepspeed")
        if not given:
            return None, False
        if isinstance(given, str) and Path(given).is_file():
            try:
                given = json.loads(Path(given).read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"deepspeed={given}: is not JSON ({error}); check the file") from None
        if isinstance(given, Mapping):
            zero = given.get("zero_optimization") or {}
            offload = any((zero.get(f"offload_{part}") or {}).get("device") == "cpu" for part in ("param", "optimizer"))
            stage = number(zero.get("stage", 0), "deepspeed: zero_optimization.stage", int)
            offload = offload or bool(zero.get("cpu_offload"))
        else:
            named = re.search("zero_?([0-3])", str(given))
            stage, offload = int(named[1]) if named else None, "offload" in str(given)
        if stage not in (0, 1, 2, 3):
            raise UserError(
                f"deepspeed={keys.shown(given)}: neither an existing file nor named after a ZeRO stage, such as "
                "zero2.json; remove it, or write fsdp_config"
            )
        return stage, offload

    def _fsdp(self, name: str) -> Any:
        """Take a key of fsdp_config, which may have its old prefix fsdp_."""
        new, old = self.take(f"fsdp_config.{name}"), self.take(f"fsdp_config.fsdp_{name}")
        return old if new is None else new

    # methods

    def _preferences(self) -> None:
        beta = self._beta() if self.method in (*PAIRS, "kto", "orpo", "simpo") else None
        if self.method in (*PAIRS, "kto"):
            self.set("beta", beta)
            if self.take("precompute_ref_log_probs"):
                self.set("ref", "precomputed")
            elif self.take("rl_adapter_ref_model"):
                self.set("ref", "copy")
        if self.method == "dpo":
            loss = self.take("dpo_loss_type")
            self.set("loss_type", [loss] if isinstance(loss, str) else loss or None)
            self.set("loss_weights", self.take("dpo_loss_weights") or None)
            self.set("label_smoothing", self.number("dpo_label_smoothing") or None)
        elif self.method == "ipo" and self.theirs.tree.get("dpo_loss_type"):
            loss = keys.shown(self.theirs.tree["dpo_loss_type"])
            raise UserError(f"dpo_loss_type={loss}: has no effect with rl: ipo; remove it, or write rl: dpo")
        if self.method in PAIRS:
            self.copy("dpo_use_weighting", "use_weighting", unless=False)
            self.copy_number("dpo_ld_alpha", "ld_alpha")
            self.copy_number("rpo_alpha")
        elif self.method == "kto":
            for side in ("desirable_weight", "undesirable_weight"):
                self.set(side, self.number(f"kto_{side}") or None)  # 0 is 1 there, too
        elif self.method == "orpo":
            self.set("orpo_alpha", beta)
        elif self.method == "simpo":  # axolotl trains CPO's SimPO: its defaults are not those of the paper
            self.set("beta", 0.1 if beta is None else beta)
            for key, default in (("cpo_alpha", 1.0), ("simpo_gamma", 0.5)):
                given = self.number(key)
                self.set(key, default if given is None else given)
        elif self.method == "rm":
            self.copy_number("center_rewards_coefficient")

    def _beta(self) -> float | None:
        given = (self.number(key) for key in BETAS)
        return next((beta for beta in given if beta is not None), None)

    def _ebft(self) -> None:
        for key in SAME_EBFT:
            self.copy(f"ebft.{key}")
        if self.strided:
            estimator = self.take("ebft.advantage_estimator")
            self.set("advantage_estimator", {"group_norm": "grpo", None: "rloo"}.get(estimator, estimator))
            self.set("feature_norm", "layer")
            for key in STRIDED:
                self.copy(f"ebft.{key}")
            temperature = self.number("ebft.temperature")
            self.set("temperature", 0.6 if temperature is None else temperature)
            self._check_full("ebft.top_p", (1,))
        else:  # advantages are GRPO's
            scaled = self.take("trl.scale_rewards")
            if scaled == "batch":
                raise UserError("trl.scale_rewards=batch: is not supported by ebft; use group or none")
            self.set("advantage_estimator", "rloo" if scaled in (False, "none") else "grpo")
            self.copy("ebft.adaptive_max_tokens", unless=True)
            if self.take("ebft.adaptive_max_tokens") is not False:
                self.copy("ebft.gt_length_multiplier")

    def _sampling(self) -> None:
        for key in SAME_TRL:
            self.copy(f"trl.{key}")
        keys.set_cispo_cap(self.made)
        for key, full in keys.UNRESTRICTED.items():
            if self.method == "ebft" or key not in keys.FILTERS:
                self._check_full(f"trl.{key}", full)
            elif (value := self.number(f"trl.{key}", int if key == "top_k" else float)) not in full:
                self.set(key, value)
        self.set("num_generations", self._group_size())
        length = self.number("trl.max_completion_length", int)
        self.set("max_completion_length", length or 512)
        if not length and self.method != "ebft":
            self.note("trl.max_completion_length is not set: 512 tokens are the limit; axolotl sets none then")
        if self.take("trl.use_adaptive_entropy"):
            lowest = keys.set_adaptive_entropy(self.made, lambda name: self.take(f"trl.{name}"))
            if lowest:
                raise UserError(f"trl.{lowest}; remove it")
        self._kl()
        self._rollouts()
        template_kwargs = self.take("trl.chat_template_kwargs")
        self.theirs.take_all("trl.chat_template_kwargs")
        self.set("chat_template_kwargs", template_kwargs or None)
        if template_kwargs and self.method != "ebft":
            self.note("trl.chat_template_kwargs: is used here; axolotl reads it only with rl: ebft")
        if self.take("trl.streaming_partial_batch"):
            self.copy("trl.streaming_min_groups")
        if self.take("trl.replay_buffer_size"):
            self.copy("trl.replay_recompute_logps", unless=True)
        self.copy("trl.skip_zero_advantage_batches", unless=True)
        if self.method == "ebft":
            return
        self._rewards()
        self.copy("trl.scale_rewards", unless=True)
        if self.method == "gdpo" and self.take("trl.multi_objective_aggregation") == "sum_then_normalize":
            raise UserError("trl.multi_objective_aggregation=sum_then_normalize: is grpo; write rl: grpo")
        if self.method == "grpo" and self.take("trl.multi_objective_aggregation") == "normalize_then_sum":
            self.set("advantage_estimator", "normalize_then_sum")
        if self.method != "grpo" or "advantage_estimator" in self.made.tree:
            self.made.tree.pop("scale_rewards", None)  # has no effect there
        start = self.number("trl.reroll_start_fraction")
        if start is not None and start < 1:
            self.set("reroll_start_fraction", start)
            self.copy("trl.reroll_max_groups")

    def _kl(self) -> None:
        beta = self._beta()
        self.set("beta", beta)
        if not beta:
            return
        corrected = self.take("trl.use_bias_correction_kl")
        if corrected is False or (corrected is None and self._is_async()):
            self.set("use_bias_correction_kl", False)
        if self.take("trl.sync_ref_model"):
            self.set("sync_ref_model", True)
            self.set("ref_model_mixup_alpha", self.number("trl.ref_model_mixup_alpha") or 0.9)
            self.set("ref_model_sync_steps", self.number("trl.ref_model_sync_steps", int) or 64)

    def _is_async(self) -> bool:
        """Whether axolotl would use its asynchronous trainer, which has other defaults and more settings."""
        trl = self.theirs.tree.get("trl") or {}
        return bool(trl.get("async_prefetch") or trl.get("use_data_producer"))

    def _rollouts(self) -> None:
        """Set the number of mini-batches if a rollout has more completions than an optimizer step."""
        size = self.number("trl.generation_batch_size", int)
        if size is None:
            return
        tree = self.made.tree
        step = tree["per_device_train_batch_size"] * tree.get("gradient_accumulation_steps", 1) * world_size()
        if size % step:
            raise UserError(
                f"trl.generation_batch_size={size}: is not a multiple of the {step} completions of a step "
                "(micro_batch_size x gradient_accumulation_steps x processes); change it, or remove it"
            )
        self.set("minibatches_per_rollout", size // step if size > step else None)

    def _rewards(self) -> None:
        named = [REWARDS.get(str(name), str(name)) for name in listed(self.take("trl.reward_funcs"))]
        named = [f"model:{name}" if "/" in name and ":" not in name else name for name in named]
        if self.gym:  # the plugin adds its reward by itself
            own = ENV if self.take("nemo_gym_multi_turn") else VERIFY
            named = [name for name in named if name not in (ENV, VERIFY)] + [own]
        self.set("reward_funcs", named or None)
        weights = self.take("trl.reward_weights")
        self.set("reward_weights", weights or None)
        workers = self.number("trl.reward_num_workers", int)
        self.set("reward_num_workers", workers if workers and workers > 1 else None)
        self.copy("trl.rollout_func")

    def _check_full(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.take(key)
        if value is not None and value not in allowed:
            raise UserError(f"{key}={value}: {FULL}; remove it")

    # servers

    def _servers(self, engine: str | None) -> None:
        wanted = self.take("trl.use_vllm")
        client = {name: self.take(f"trl.vllm_server_{name}") for name in ("host", "port")}
        server = {name: self.take(f"vllm.{name}") for name in ("host", "port")}
        port = number(client["port"] or server["port"], "trl.vllm_server_port", int)
        by_gym = self.gym and self.take("nemo_gym_multi_turn") and self.take("nemo_gym_auto_start") is False
        if by_gym:  # its model server expects the model there; the endpoint forwards its requests to the run's servers
            self.set("nemo_gym.endpoint_port", port or 8000)
        if engine == "local" or not wanted:
            self.set("rollout.engine", "local" if engine is None else engine)
            return
        self.set("rollout.engine", "vllm")
        host = client["host"] or server["host"] or "0.0.0.0"
        if str(host) in keys.LOCAL_HOSTS:
            self.set("vllm.port", None if by_gym else port)
            for key in SAME_VLLM:
                self.copy(f"vllm.{key}", f"vllm.{key}", unless="auto" if key == "dtype" else None)
            self.copy("vllm.data_parallel_size", "vllm.replicas")
            if self.take("trl.vllm_mode") == "colocate":
                self.set("vllm.colocate", True)
        else:
            self.set("vllm.url", [f"http://{host}:{port or 8000}"])
        self.copy_number("trl.vllm_server_timeout", "vllm.timeout")
        self.copy("trl.vllm_sync_interval", unless=1)
        if self.take("trl.async_prefetch"):
            self.set("async_prefetch", True)
            self.copy("trl.prefetch_depth", unless=1)
        if self.take("trl.vllm_lora_sync"):
            self.set("sync.backend", "lora")
        self._correction()

    def _unused(self) -> None:
        """List keys without effect; those that another setting makes unused have that as their reason."""
        self.made.idle = self.theirs.idle(self.method)
        reasons = {"there is one process; torchrun starts several":
                   ("fsdp", "dp_shard_size", "deepspeed") if world_size() == 1 else ()}  # fmt: skip
        if self.samples:
            reasons |= {"no server is used": ("vllm.", "trl.vllm_", "trl.async_prefetch", "trl.prefetch_depth"),
                        "without trl.use_adaptive_entropy": ("trl.entropy_",)}  # fmt: skip
        if {"beta", "orpo_alpha"} & self.made.tree.keys():
            reasons["another key sets beta"] = BETAS
        for key in self.made.idle.pop(f"not used by {self.method}", []):
            reason = next((reason for reason, prefixes in reasons.items() if key.startswith(prefixes)), None)
            self.made.idle.setdefault(reason or f"not used by {self.method}", []).append(key)

    def _correction(self) -> None:
        if self.take("trl.vllm_importance_sampling_correction") is False:
            self.set("vllm_importance_sampling_correction", False)
            return
        mode = self.take("trl.vllm_importance_sampling_mode")
        mode = mode or ("token_truncate" if self._is_async() else "sequence_mask")
        self.set("vllm_importance_sampling_mode", mode)
        self.copy_number("trl.vllm_importance_sampling_cap")
        self.copy_number("trl.vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
        self.copy_number("trl.vllm_importance_sampling_clip_min", "vllm_importance_sampling_min")

    def _uses_gym(self) -> bool:
        plugged = any("nemo_gym" in str(name) for name in self.theirs.tree.get("plugins") or ())
        enabled, rows = self.take("nemo_gym_enabled"), self.theirs.tree.get("nemo_gym_datasets")
        return bool((plugged or enabled) and enabled is not False and rows)

    def _nemo_gym(self) -> None:
        self.theirs.take_all("nemo_gym_datasets")
        specs = []
        for number_, row in enumerate(self.theirs.tree["nemo_gym_datasets"]):
            if not row.get("path"):
                raise UserError(f"nemo_gym_datasets[{number_}]: has no path; name a file of rows")
            part = f":split=train[:{row['max_samples']}]" if row.get("max_samples") else ""
            server = f"@{row['server_name']}" if row.get("server_name") else ""
            specs.append(f"{row['path']}{part}{server}")
        self.set("nemo_gym.datasets", specs)
        self.set("nemo_gym.dir", self.take("nemo_gym_dir") or "~/Gym")
        port = self.take("nemo_gym_head_port")
        if self.take("nemo_gym_auto_start") is False:
            self.set("nemo_gym.head_port", port if port != 11000 else None)
        else:
            self.set("nemo_gym.auto_start", True)
            self.set("nemo_gym.config_paths", self.take("nemo_gym_config_paths") or None)
            if port not in (None, 11000):
                self.note(f"nemo_gym_head_port={port}: servers that the run starts need no head server; dropped")
        self.copy("nemo_gym_multi_turn", "nemo_gym.multi_turn", unless=False)
        self.set("nemo_gym.server_timeout", self.take("nemo_gym_server_timeout") or 360)
        for key in ("verify_timeout", "run_timeout", "model_name"):
            self.copy(f"nemo_gym_{key}", f"nemo_gym.{key}")
