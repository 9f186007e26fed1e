"""Compare a config as translated here with what axolotl trains: the arguments of its trainer, and its rows."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from tests.compat.axolotl_oracle import STEPS

# Arguments of axolotl's trainer that have the same name and meaning here.
SAME = """learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm gradient_accumulation_steps
    per_device_train_batch_size seed save_total_limit neftune_noise_alpha max_length beta loss_type loss_weights
    label_smoothing use_weighting ld_alpha desirable_weight undesirable_weight cpo_alpha simpo_gamma
    center_rewards_coefficient num_generations max_completion_length temperature epsilon epsilon_high num_iterations
    scale_rewards importance_sampling_level mask_truncated_completions reward_weights entropy_coef sync_ref_model
    async_prefetch top_p top_k min_p""".split()
# Arguments compared below under other names.
OTHERS = """lr_scheduler_type lr_scheduler_kwargs cosine_min_lr_ratio warmup_steps max_steps num_train_epochs optim
    save_strategy save_steps eval_strategy eval_steps gradient_checkpointing bf16 sample_packing max_seq_length qlora
    precompute_ref_log_probs report_to generation_batch_size steps_per_generation use_vllm vllm_mode vllm_server_timeout
    chat_template_kwargs""".split()
# Arguments that do not change what is trained, or that row by row comparison covers.
NEUTRAL = """output_dir average_tokens_across_devices tf32 gradient_checkpointing_kwargs logging_steps disable_tqdm
    per_device_eval_batch_size eval_on_start eval_accumulation_steps accelerator_config dataloader_num_workers
    dataloader_prefetch_factor debug do_eval model_type sample_packing_drop_attention_mask eval_sample_packing
    dataset_num_proc dion_rank_fraction dion_rank_multiple_of remove_unused_columns multipack_real_batches pretraining
    logging_first_step pad_to_multiple_of chat_template fsdp fsdp_config push_to_hub hub_private_repo hub_model_id
    hub_always_push torch_compile torch_compile_backend torch_compile_mode train_sampling_strategy run_name ddp_timeout
    activation_offloading layer_offloading include_tkps log_completions num_completions_to_print save_only_model
    dataloader_drop_last batch_flattening ddp_find_unused_parameters bf16_full_eval generation_kwargs""".split()
# Intended differences: the paragraph of docs/from_axolotl.md, and a word that the console must show ("" if none).
DOCUMENTED = {
    "alpaca headings": ("alpaca", "alpaca"),
    "BOS of phi_3": ("Templates", "phi_3"),
    "empty thoughts": ("Empty thoughts", "think"),
    "end of EBFT documents": ("EBFT rows", ""),
    "end of responses": ("Preference rows", "end-of-turn"),
    "end-of-turn tokens": ("End-of-turn tokens", "eot_tokens"),
    "evaluation": ("Evaluation", ""),
    "packing": ("Packing", "sample_packing"),
    "precision": ("Precision", ""),
    "8-bit base": ("Quantised bases", "load_in_8bit"),
    "pretraining text": ("Plain text", "pretraining_dataset"),
    "reward models": ("Reward models", "bradley_terry"),
    "warm-up": ("Warm-up", ""),
    "weight of a dataset": ("Settings of a dataset", ""),
}
ADAMW = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit", "adamw_hf", "adamw_apex_fused", "optimi_adamw")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCHEDULES = {"constant_with_warmup": "constant"}


def settings(cfg: Any, args: Any, tree: Mapping[str, Any], method: str) -> dict[str, tuple[Any, Any]]:
    """Name -> (axolotl's value, ours) of settings that differ; `tree` is our complete config."""
    theirs, ours = _theirs(cfg, args, method), _ours(tree, method)
    found = {name: (value, ours.get(name)) for name, value in theirs.items() if not _same(value, ours.get(name))}
    for field in dataclasses.fields(args):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(args, field.name)
        known = field.name in (*SAME, *OTHERS, *NEUTRAL) or field.name.startswith(("ebft_", "dion_"))
        if not known and value != default and value is not None:
            found[f"{field.name} (not compared)"] = value, None
    return found


def _theirs(cfg: Any, args: Any, method: str) -> dict[str, Any]:
    made = {name: getattr(args, name) for name in SAME if getattr(args, name, None) is not None}
    made |= {name.removeprefix("ebft_"): value for name, value in vars(args).items() if name.startswith("ebft_")}
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    floor = (args.lr_scheduler_kwargs or {}).get("min_lr_rate")
    if schedule == "cosine":
        floor = getattr(args, "cosine_min_lr_ratio", None) or floor
    made["lr_scheduler_type"] = (
        "cosine_with_min_lr" if floor and schedule == "cosine" else SCHEDULES.get(schedule, schedule)
    )
    made["min_lr_ratio"] = floor or 0.0
    made["warmup"] = 0 if schedule == "constant" else round(args.warmup_steps)
    made["max_steps"] = cfg.max_steps or None
    made["num_train_epochs"] = None if cfg.max_steps else args.num_train_epochs
    optim = cfg.optimizer if isinstance(cfg.optimizer, str) else getattr(cfg.optimizer, "value", "adamw_torch")
    made["optim"] = "adamw" if optim in ADAMW else "adamw_8bit" if "8bit" in optim and "adamw" in optim else optim
    made["saves"] = _interval(args.save_strategy, args.save_steps, args)
    made["evals"] = _interval(args.eval_strategy, args.eval_steps, args)
    if not getattr(args, "activation_offloading", None):
        checkpoints = (cfg.fsdp_config or {}).get("activation_checkpointing")
        made["gradient_checkpointing"] = bool(args.gradient_checkpointing or checkpoints)
    made["dtype"] = "bfloat16" if args.bf16 or cfg.bf16 == "full" else "float32"
    made["load_in_4bit"] = bool(cfg.load_in_4bit and cfg.adapter)
    made["dedup"] = bool(cfg.dataset_exact_deduplication)
    made["val_set_size"] = cfg.val_set_size or 0.0
    made["report_to"] = sorted(set(args.report_to) & {"wandb", "tensorboard"})
    if method in ("sft", "prm"):
        made["max_length"] = cfg.sequence_len
    if method == "sft":
        made["sft_loss"] = "dft" if cfg.use_dft else "nll"
    if method == "orpo":
        made["orpo_alpha"] = made.pop("beta")
    if method == "ebft":  # structured: GRPO's advantages; strided: its own
        scaled = made.pop("scale_rewards", None)
        if scaled is not None:
            made["advantage_estimator"] = "grpo" if scaled not in (False, "none") else "rloo"
        made = {name: value for name, value in made.items() if name not in ("top_p", "top_k", "min_p")}  # rejected
    if method in ("grpo", "gdpo", "ebft") and getattr(args, "num_generations", None):
        made["chat_template_kwargs"] = getattr(args, "chat_template_kwargs", None) or {}
        made["minibatches_per_rollout"] = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
        made["rollout.engine"] = "vllm" if args.use_vllm else "local"
        if args.use_vllm:
            made["vllm_importance_sampling_mode"] = args.vllm_importance_sampling_mode
            cap = getattr(args, "vllm_importance_sampling_cap", None) or args.vllm_importance_sampling_clip_max
            made["vllm_importance_sampling_cap"] = cap
    return made | (_lora(cfg, args) if cfg.adapter else {"lora.r": 0})


def _lora(cfg: Any, args: Any) -> dict[str, Any]:
    from axolotl.loaders.adapter import _build_lora_config_kwargs

    extra = _build_lora_config_kwargs(cfg)
    targets = cfg.lora_target_modules or []
    targets = {targets} if isinstance(targets, str) else set(targets)
    made = {"lora.r": cfg.lora_r, "lora.alpha": cfg.lora_alpha, "lora.dropout": cfg.lora_dropout or 0.0}
    if getattr(args, "disable_dropout", False):  # by default so in TRL's preference and reward trainers
        made["lora.dropout"] = 0.0
    made["lora.target_modules"] = _all_linear(targets, cfg.lora_target_linear)
    made["lora.modules_to_save"] = sorted(cfg.lora_modules_to_save or [])
    made["lora.rslora"], made["lora.dora"] = (bool(extra.pop(key, None)) for key in ("use_rslora", "use_dora"))
    made["lora: other settings"] = extra or None
    return made


def _all_linear(targets: Iterable[str], everywhere: Any) -> list[str]:
    """Names without those that all-linear includes."""
    return sorted(set(targets) - set(LINEAR if everywhere else ()) | ({"all-linear"} if everywhere else set()))


def _interval(strategy: Any, steps: Any, args: Any) -> Any:
    """Steps, or a text such as 4 per epoch."""
    strategy = str(getattr(strategy, "value", strategy))
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return "1 per epoch"
    if steps >= 1:
        return steps
    per_epoch = f"{round(1 / (steps * args.num_train_epochs), 3):g} per epoch"
    return per_epoch if args.max_steps == STEPS else math.ceil(steps * args.max_steps)  # of max_steps if it is set


def _ours(tree: Mapping[str, Any], method: str) -> dict[str, Any]:
    flat = dict(tree)
    for block, values in tree.items():
        if block in ("lora", "rollout", "format", "parallel", "vllm", "sync"):
            flat |= {f"{block}.{key}": value for key, value in values.items()}
    flat["warmup"] = flat["warmup_steps"]
    if flat["warmup"] is None:
        flat["warmup"] = round((flat["warmup_ratio"] or 0) * (flat["max_steps"] or STEPS))
    if flat["max_steps"] is not None:
        flat["num_train_epochs"] = None
    for name, steps, per_epoch in (
        ("saves", "save_steps", "saves_per_epoch"),
        ("evals", "eval_steps", "evals_per_epoch"),
    ):
        flat[name] = f"{flat[per_epoch]:g} per epoch" if flat.get(per_epoch) else flat.get(steps)
    if flat["dtype"] == "auto":
        flat["dtype"] = "bfloat16"  # on a GPU
    flat["report_to"] = sorted(set(flat["report_to"]) - {"none"})
    flat["lora.modules_to_save"] = sorted(flat["lora.modules_to_save"])
    flat["lora.target_modules"] = _all_linear(flat["lora.target_modules"], "all-linear" in flat["lora.target_modules"])
    return flat


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, (int, float)):
        return abs(theirs - ours) <= 1e-9 * max(abs(theirs), abs(ours))
    if isinstance(theirs, list) and theirs and isinstance(theirs[0], float):
        return theirs == [float(value) for value in ours or ()]
    if isinstance(ours, list | tuple) and not isinstance(theirs, list | tuple):
        ours = ours[0] if len(ours) == 1 else ours
    if isinstance(theirs, list | tuple) and isinstance(ours, str):
        theirs = theirs[0] if len(theirs) == 1 else theirs
    return theirs == ours or (not theirs and not ours)


def setting_kind(name: str, theirs: Any, ours: Any) -> str:
    """Name in DOCUMENTED of a setting that differs, or an empty text."""
    if name == "evals" and theirs == 0:  # axolotl never evaluates if that is once per run
        return "evaluation"
    rounded = name == "warmup" and abs(theirs - ours) <= 1  # truncated there, and two steps for one
    return "warm-up" if rounded else ""


def always(cfg: Any) -> Iterator[str]:
    """Names in DOCUMENTED that follow from axolotl's settings alone."""
    if cfg.sample_packing:
        yield "packing"
    if cfg.load_in_8bit and cfg.adapter:
        yield "8-bit base"
    if cfg.bf16 and not cfg.adapter:
        yield "precision"


# rows ------------------------------------------------------------------------------------------------------------

Tokens = tuple[list[int], list[bool]]  # ids, and which are trained


def rows(oracle: Any, theirs: Any, cfg: Any, method: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name in DOCUMENTED or "", the difference) for each row that differs."""
    if method in ("grpo", "gdpo") or theirs.skip_prepare_dataset:
        return  # the user's transform makes the prompts; a processor makes the rows
    tokenizer, here = our_rows(cfg, method)
    there = their_rows(oracle, theirs, tokenizer, method)
    kinds = {str(part.get("type")) for part in tree.get("datasets") or [{"type": "pretraining_dataset"}]}
    if any(part.get("weight") for part in tree.get("datasets") or ()):
        yield "weight of a dataset", "weight: a part of the rows there"
        return
    if len(there) != len(here):
        yield row_kind(([], []), ([], []), kinds, tokenizer, method), f"rows: there {len(there)}, here {len(here)}"
    for number, (their_row, our_row) in enumerate(zip(there, here, strict=False)):
        for (ids, mask), ours in zip(their_row, our_row, strict=True):
            side = ids, [False, *mask[1:]]  # nothing predicts the first token
            if side != ours:
                shown = f"row {number} ({', '.join(sorted(kinds))}):\n    there {_shown(tokenizer, *side)}"
                yield row_kind(side, ours, kinds, tokenizer, method), f"{shown}\n    here  {_shown(tokenizer, *ours)}"


def row_kind(there: Tokens, here: Tokens, kinds: set[str], tokenizer: Any, method: str) -> str:
    """Name in DOCUMENTED of a row that differs, or an empty text."""
    (ids, mask), (our_ids, our_mask) = there, here
    if kinds == {"pretraining_dataset"}:
        return "pretraining text"
    if ids != our_ids:
        text, ours = tokenizer.decode(ids), tokenizer.decode(our_ids)
        if all(kind.startswith("alpaca") for kind in kinds):
            return "alpaca headings"
        if text == f"{tokenizer.bos_token}{ours}" and ours.startswith(("<|user|>", "<|system|>")):
            return "BOS of phi_3"
        if method == "ebft" and our_ids == [*ids, tokenizer.eos_token_id]:
            return "end of EBFT documents"
        if method == "rm" and text.split("user\n")[1:] == (ours + "\n" * text.endswith("\n")).split("user\n")[1:]:
            return "reward models"
        is_pair = method in ("dpo", "ipo", "orpo", "simpo", "kto")
        return "end of responses" if is_pair and text.rstrip() == f"{ours}\n{tokenizer.eos_token}" else ""
    extra = tokenizer.decode([token for token, flag, ours in zip(ids, mask, our_mask, strict=True) if ours > flag])
    if any(flag > ours for flag, ours in zip(mask, our_mask, strict=True)):  # trained there only
        return ""
    if re.fullmatch(r"(<think>\n(\n</think>\n\n)?)+", extra):
        return "empty thoughts"
    ends = "|".join(re.escape(token) for token in tokenizer.all_special_tokens if token != tokenizer.eos_token)
    return "end-of-turn tokens" if re.fullmatch(f"({ends})+", extra) else ""


def _shown(tokenizer: Any, ids: list[int], mask: list[bool]) -> str:
    """The text, with the trained parts in double brackets."""
    made, trained = "", False
    for token, flag in zip(ids, mask or [False] * len(ids), strict=True):
        made += ("[[" if flag else "]]") if flag != trained else ""
        made, trained = made + tokenizer.decode([token]), flag
    return repr(made + ("]]" if trained else ""))


def their_rows(oracle: Any, cfg: Any, tokenizer: Any, method: str) -> list[list[Tokens]]:
    prepared = oracle.rows(cfg)
    if method in ("sft", "prm") or (method == "ebft" and "input_ids" in prepared[0]):
        made = []
        for row in prepared:
            length = sum(row.get("attention_mask") or [1] * len(row["input_ids"]))
            labels = row.get("labels") or row["input_ids"]
            made.append([(row["input_ids"][:length], [label != -100 for label in labels[:length]])])
        return made
    if method == "rm":
        return [
            [(row[f"{side}_ids"], _last(row[f"{side}_ids"])) for side in ("chosen", "rejected")] for row in prepared
        ]
    if method == "ebft":
        settings = (cfg.trl or {}).get("chat_template_kwargs") or {}
        return [[_target(row, tokenizer, settings)] for row in prepared]
    sides = ("completion",) if method == "kto" else ("chosen", "rejected")
    return [[_response(row["prompt"], row[side], tokenizer) for side in sides] for row in prepared]


def _response(prompt: str, answer: str, tokenizer: Any) -> Tokens:
    """As TRL tokenises text: prompt and answer together, with an end token, and one BOS token."""
    answer = answer if answer.endswith(tokenizer.eos_token) else answer + tokenizer.eos_token
    ids, start = tokenizer(prompt + answer)["input_ids"], len(tokenizer(prompt)["input_ids"])
    double = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[double:], [False] * (start - double) + [True] * (len(ids) - start)


def _target(row: Mapping[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> Tokens:
    """The prompt as TRL renders it, and the text of the target as axolotl's reward encodes it."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False, **settings)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    target = tokenizer(row["ground_truth"], add_special_tokens=False)["input_ids"]
    target.append(tokenizer.eos_token_id)  # which axolotl leaves out, see docs/ebft.md
    return ids + target, [False] * len(ids) + [True] * len(target)


def _last(ids: list[int]) -> list[bool]:
    return [False] * (len(ids) - 1) + [True]  # a reward model's score is read there


def our_rows(cfg: Any, method: str) -> tuple[Any, list[list[Tokens]]]:
    """The tokenizer, and the rows of cfg.data as the method reads them."""
    from trainer.methods import ebft, prm, rm, sft
    from trainer.offline import labelled, pairs
    from trainer.policy.load import load_tokenizer

    policy = SimpleNamespace(tokenizer=load_tokenizer(cfg.model.model, cfg.model), context_length=None)
    network = SimpleNamespace(policy=policy)
    with contextlib.redirect_stderr(io.StringIO()):
        if method == "ebft":
            read = ebft.documents_of if cfg.mode == "strided" else ebft.targets_of
            found: list[Any] = read(cfg, policy, network, cfg.data.data)
        elif method == "prm":
            found = prm.solutions_of(cfg, policy, cfg.data.data, last_step_only=cfg.train_on_last_step_only)
        else:
            read = {"sft": sft.examples_of, "rm": rm.pairs_of, "kto": labelled.load_rows}.get(method, pairs.pairs_of)
            found = read(cfg, policy, cfg.data.data)
    return policy.tokenizer, [_tokens(row, method) for row in found]


def _tokens(row: Any, method: str) -> list[Tokens]:
    if hasattr(row, "target_ids"):
        return [(row.ids + row.target_ids, [False] * len(row.ids) + [True] * len(row.target_ids))]
    if hasattr(row, "labels"):
        return [(row.ids, [label != -100 for label in row.labels])]
    if hasattr(row, "ids"):
        start = max(1, getattr(row, "prompt_length", 0))
        return [(row.ids, row.mask or [False] * start + [True] * (len(row.ids) - start))]
    answers = [row.completion_ids] if hasattr(row, "completion_ids") else [row.chosen_ids, row.rejected_ids]
    made = [(row.prompt_ids + ids, [False] * len(row.prompt_ids) + [True] * len(ids)) for ids in answers]
    return [(ids, _last(ids)) for ids, _ in made] if method == "rm" else made
