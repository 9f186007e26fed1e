"""Config blocks that methods share. Each field is a flag; the text under it is its help.

A method's Config (in trainer/methods/) nests these blocks. The flags of a block in `Flat` have no prefix
(`--learning-rate`), other flags have one (`--lora.r`). --help shows flags of type `Common[...]`, --help-all shows all.
Blocks only validate; derived values are properties. Help longer than a line is written as strings in parentheses,
because tyro keeps the line breaks of a docstring.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import tyro

from data.command.checks import check_number, check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError
from data.formats.template_settings import JsonObject
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.parallel.ranks import TIMEOUT_S, world_size

T = TypeVar("T")
REGEX = re.compile(r"[*+?()\[\]{}|^$\\]")  # no module name has these
NO_HELD_OUT = "without held-out rows; set --eval-data"
Flat = tyro.conf.OmitArgPrefixes[T]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Several processes, started by torchrun."""

    mode: Common[Literal["auto", "replicate", "fsdp"]] = "auto"
    """How ranks store the model. replicate: a full copy each; fsdp: sharded weights; auto: replicate if a copy fits."""
    shard: int | None = None
    """fsdp: number of ranks to shard one copy over, for example the ranks of a node. None: all ranks."""
    reshard_after_forward: bool = True
    """fsdp: free gathered weights between forward and backward. Less memory, one more gather."""
    reduce_once: bool = False
    """fsdp: reduce gradients once per step, not per micro-batch: less traffic, but full gradients in memory."""
    cpu_offload: bool = False
    """fsdp: keep shards and optimizer state in main memory instead of on the GPU."""
    context: int = 1
    """Number of ranks that split the tokens of each micro-batch, for long sequences. 1: no splitting."""
    timeout_s: float = TIMEOUT_S
    """Seconds that a rank waits for other ranks before it logs where each of them is and exits."""

    def __post_init__(self) -> None:
        check_numbers(self, {"above 0": "timeout_s"}, "parallel.")
        world = world_size()
        if world == 1:
            why = "with one process; start several with torchrun, or plan them with trainer.plan --gpus"
            reject_unused(self, why, prefix="parallel.")
        if self.mode == "replicate":
            names = ("shard", "reshard_after_forward", "reduce_once", "cpu_offload")
            reject_unused(self, "with parallel.mode=replicate", names, "parallel.")
        for name in ("shard", "context"):
            value = getattr(self, name)
            if value is not None and (value < 1 or world % value):
                raise UserError(f"parallel.{name}={value}: must divide the {world} processes")

    @property
    def must_shard(self) -> bool:
        """Whether a setting needs fsdp, so that mode=auto has no choice."""
        return self.mode == "fsdp" or self.shard is not None or self.reduce_once or self.cpu_offload


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters through peft; off unless r is set."""

    r: Common[int] = 0
    """Rank of the adapters. 0: train all weights."""
    alpha: Common[int] = 32
    """Scale of the adapters: their output is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout probability on the input of the adapters."""
    target_modules: tuple[str, ...] = ("all-linear",)
    (
        "Modules to adapt, such as q_proj v_proj, or one regular expression that must match whole names, "
        "such as '.*layers\\.(3|7)\\.self_attn\\.q_proj'. all-linear: every linear layer except the head."
    )
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full alongside the adapters, e.g. embed_tokens lm_head. Not with vLLM servers or fsdp."""
    rslora: bool = False
    """Rank-stabilised LoRA (arXiv:2312.03732): multiply the output by alpha / sqrt(r) instead of alpha / r."""
    dora: bool = False
    """DoRA (arXiv:2402.09353): train the norm of each weight row separately. Not with vLLM servers or fsdp."""

    def __post_init__(self) -> None:
        if self.r < 0:
            raise UserError(f"lora.r={self.r}: a rank cannot be negative; use 0 to train all weights")
        if self.alpha < 1:
            raise UserError(f"lora.alpha={self.alpha}: must be 1 or more, because 0 would disable the adapters")
        check_numbers(self, {"in [0, 1)": "dropout"}, "lora.")
        if not self.target_modules or not all(self.target_modules):
            raise UserError("lora.target_modules: empty; name modules such as q_proj v_proj")
        if self.pattern is not None:
            self._check_pattern()
        if self.r == 0:
            others = ("alpha", "dropout", "target_modules", "modules_to_save", "rslora", "dora")
            reject_unused(self, "with lora.r=0, which trains all weights; set --lora.r", others, "lora.")

    @property
    def pattern(self) -> str | None:
        """target_modules if it is a regular expression, otherwise None."""
        return next((name for name in self.target_modules if REGEX.search(name)), None)

    @property
    def plain(self) -> bool:
        """True if the adapted weight is W + scaling B A and nothing else is trained."""
        return not (self.dora or self.modules_to_save)

    def _check_pattern(self) -> None:
        if len(self.target_modules) > 1:
            raise UserError(
                f"lora.target_modules={' '.join(self.target_modules)}: {self.pattern} is a regular expression and "
                "must be the only entry; join all names with |"
            )
        check_regex("lora.target_modules", str(self.pattern))


def check_regex(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{name}={pattern}: not a regular expression ({error})") from None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train, and its precision."""

    model: Common[str]
    (
        "Model to train: a hub id, a model folder, a finished run, a LoRA adapter folder, or builtin:tiny, which can "
        "learn arithmetic but no words. Without it, unset flags come from the tiny recipe "
        "(trainer/recipes/METHOD_tiny.yaml)."
    )
    revision: str | None = None
    """Branch, tag or commit of --model on the hub. None: its main branch."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's: a folder or a hub id. Its ids must fit the model's embeddings."""
    trained_parameters: tuple[str, ...] = ()
    (
        "Train only these parameters and freeze all others: regular expressions that must match a name from its start, "
        "such as 'model.layers.2[0-9]' lm_head. Not with LoRA. Empty: train all weights."
    )
    dtype: Common[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Compute dtype (matmuls). auto: bfloat16 on GPU, float32 on CPU."""
    trained_dtype: Literal["float32", "bfloat16"] = "float32"
    (
        "Dtype of trained weights, their gradients and AdamW's moments. bfloat16 halves the memory; updates are "
        "rounded stochastically, so that small updates are not lost. LoRA adapters are always float32."
    )
    attn_implementation: Literal["auto", "flex", "flash", "sdpa", "eager"] = "auto"
    (
        "Attention implementation. flex: compiled Triton kernels that skip masked blocks, CUDA only; flash: the same "
        "with FlashAttention 4 (flash-attn-4) on Hopper or later; sdpa, eager: from transformers, with a dense mask. "
        "auto: flex on CUDA if the architecture supports it; otherwise sdpa, or eager for architectures without sdpa."
    )
    gradient_checkpointing: Common[Literal["auto"] | bool] = "auto"
    (
        "Recompute activations in the backward pass: less memory, 20-33% slower if all blocks are recomputed. auto: as "
        "many blocks as the GPU's memory requires, none on a CPU. --gradient-checkpointing without a value means true."
    )
    activation_offloading: bool = False
    (
        "On a GPU: recompute all blocks, and store their saved inputs in pinned main memory. For long micro-batches; "
        "gradients are the same."
    )
    load_in_4bit: Common[bool] = False
    (
        "Store the frozen base of a LoRA run in 4-bit NF4, about a quarter of the memory. Exports the adapter, for use "
        "with the full base. Each rank keeps a full copy."
    )
    fp8_base: bool = False
    (
        "Multiply with the frozen base of a LoRA run in FP8, on Hopper GPUs and later. A layer's output is off by "
        "about 4 %. Takes 2 more bytes per weight. Exports are not affected. Offline methods only."
    )
    chat_template: Common[str] = "tokenizer_default"
    (
        "Chat template: tokenizer_default, chatml, llama3, gemma, qwen_25, qwen3, phi_3, phi_4, or a FILE.jinja. Saved "
        "with the trained model."
    )
    chat_template_kwargs: JsonObject = dataclasses.field(default_factory=dict)
    (
        "Variables for the chat template, as a JSON object (a mapping in YAML): '{\"enable_thinking\": false}'. The "
        "column chat_template_kwargs of a row overrides them, name by name."
    )
    system_prompt: Common[str | None] = None
    """System message for conversations without one."""
    special_tokens: JsonObject = dataclasses.field(default_factory=dict)
    (
        "Tokens of the tokenizer to use as pad_token, eos_token, bos_token or unk_token, as a JSON object (a mapping "
        'in YAML): \'{"pad_token": "<|endoftext|>"}\'. The tokenizer must have the token.'
    )
    eot_tokens: tuple[str, ...] = ()
    """Additional end-of-turn tokens, on top of eos and the chat template's, in data and in sampling."""
    allow_special_tokens: bool = False
    (
        "Read special tokens in messages, tool results and observations as tokens. By default they are split into "
        "plain text, because they could forge a turn."
    )
    neftune_noise_alpha: float | None = None
    (
        "NEFTune (arXiv:2310.05914): add uniform noise of this size / sqrt(tokens * width) to the embeddings of every "
        "training sequence. 5 is typical. Offline methods only. None: off."
    )
    router_aux_loss_coef: float | None = None
    (
        "Models with experts: weight of the load-balancing loss, over all tokens of a step. Steps of several "
        "micro-batches take one more forward pass. Offline methods only. None: off."
    )
    trust_remote_code: bool = False
    """Allow running Python code that comes with the model on the hub."""
    merge_lora: bool = False
    """Export weights with the adapter merged in, instead of the adapter."""

    compile: Literal["auto"] | bool = "auto"
    (
        "Compile the model's blocks with torch.compile: 30 to 60 s at the start, then faster steps if the GPU waits "
        "for the host. auto: on a GPU, for runs of 200 steps or more, unless the model has recurrent layers, or "
        "experts in float32. --compile without a value means true."
    )

    def __post_init__(self) -> None:
        check_numbers(self, {"above 0 and finite": "neftune_noise_alpha router_aux_loss_coef"})
        for pattern in self.trained_parameters:
            check_regex("trained_parameters", pattern)
        if self.trained_dtype == "bfloat16" and self.dtype == "float32":
            raise UserError("trained_dtype=bfloat16 is narrower than dtype=float32; remove one of the two flags")
        if self.activation_offloading and self.gradient_checkpointing is False:
            raise UserError(
                "activation_offloading=True: only applies to checkpointed blocks; remove --gradient-checkpointing false"
            )
        if self.load_in_4bit and self.merge_lora:
            raise UserError(
                "load_in_4bit=True: merge_lora would export a rounded base; remove --merge-lora, and merge into the "
                "full base later with python -m trainer.export RUN OUT --merge-lora"
            )

    def for_model(self, name: str, **changes: Any) -> ModelConfig:
        """Return the settings for another model of the run; revision and tokenizer apply only to this one."""
        own: dict[str, Any] = {} if name == self.model else {"revision": None, "tokenizer": None}
        return dataclasses.replace(self, model=name, trained_parameters=(), **own, **changes)


def reject_offline_only(model: ModelConfig) -> None:
    """Reject settings of offline methods in a method that samples."""
    reject_unused(model, "on methods that sample", ("neftune_noise_alpha", "router_aux_loss_coef", "fp8_base"))


def check_4bit(model: ModelConfig, lora: LoraConfig, parallel: ParallelConfig | None = None) -> None:
    """Check load_in_4bit against the other blocks."""
    if not model.load_in_4bit:
        return
    if lora.r == 0:
        raise UserError("load_in_4bit=True: 4-bit weights cannot be trained; train adapters with --lora.r 16")
    if lora.dora:
        raise UserError(
            "load_in_4bit=True: not supported with lora.dora, which needs the full weights; remove one of the two flags"
        )
    if parallel is None:
        return
    if parallel.context > 1:
        raise UserError(f"load_in_4bit=True: not supported with parallel.context={parallel.context}")
    fsdp = {"mode": "fsdp", "reduce_once": True, "cpu_offload": True}
    settings = [f"{name}={value}" for name, value in fsdp.items() if getattr(parallel, name) == value]
    settings += [] if parallel.shard is None else [f"shard={parallel.shard}"]
    if settings:
        raise UserError(
            f"load_in_4bit=True: FSDP cannot shard 4-bit weights (parallel.{settings[0]}); use --parallel.mode "
            "replicate"
        )


def check_fp8(model: ModelConfig, lora: LoraConfig, parallel: ParallelConfig | None = None) -> None:
    """Check fp8_base against the other blocks."""
    if not model.fp8_base:
        return
    if lora.r == 0:
        raise UserError("fp8_base=True: only for frozen weights; train adapters with --lora.r 16")
    if model.load_in_4bit:
        raise UserError("fp8_base=True: not supported with load_in_4bit; remove one of the two flags")
    if lora.dora:
        raise UserError("fp8_base=True: not supported with lora.dora; remove one of the two flags")
    if parallel is not None and parallel.must_shard:
        raise UserError("fp8_base=True: FSDP does not shard the FP8 weights; use --parallel.mode replicate")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data and held-out data."""

    data: Common[tuple[str, ...]]
    (
        "Training data, one or more sources: FILE.jsonl (json, csv, tsv, parquet, .gz), a hub id or task:NAME. "
        "Options follow a colon: PATH:format=F,split=train[:500],name=main,weight=0.5, options of the "
        "format such as field_messages=a.b, or task:addition:difficulty=2,split=train. Repeatable."
    )
    data_format: Common[str] = "auto"
    """Row format: auto, a format name or my_module.my_transform. Overridden per source by format=... in --data."""
    eval_data: Common[tuple[str, ...]] = ()
    """Held-out data, same syntax as --data. Empty: no evaluation."""
    max_eval_rows: int = 500
    """Maximum number of held-out rows; the first rows are used."""
    val_set_size: float = 0.0
    (
        "Hold out rows of --data instead of setting --eval-data: a fraction if below 1, otherwise a number of rows, "
        "drawn with --seed. 0: off."
    )
    dedup: bool = False
    (
        "Drop duplicate rows over all sources, and held-out rows that are also trained on. The number of dropped rows "
        "is logged."
    )
    row_cache: str = "~/.cache/strop/rows"
    (
        "Folder for tokenised rows; runs with the same rows, tokenizer and settings reuse them. Rows are deleted after "
        "30 days without use. none: no cache."
    )

    def __post_init__(self) -> None:
        if not self.data:
            raise UserError("--data is empty; pass a file, a hub id or task:NAME")
        check_numbers(self, {"0 (none) or above": "val_set_size"})
        if self.val_set_size > 1 and self.val_set_size != int(self.val_set_size):
            raise UserError(f"val_set_size={self.val_set_size}: must be a fraction below 1 or a whole number of rows")
        if self.val_set_size and self.eval_data:
            raise UserError(
                f"val_set_size={self.val_set_size:g}: conflicts with eval_data={' '.join(self.eval_data)}; set only one"
            )
        if self.max_eval_rows < 1:
            raise UserError(
                f"max_eval_rows={self.max_eval_rows}: must be 1 or more; to skip evaluation remove --eval-data"
            )

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out rows to evaluate on."""
        return bool(self.eval_data) or self.val_set_size > 0

    @property
    def held_out_by(self) -> str:
        """The setting that selects held-out rows, as name=value."""
        return f"eval_data={' '.join(self.eval_data)}" if self.eval_data else f"val_set_size={self.val_set_size:g}"


@dataclass(frozen=True, kw_only=True)
class PromptConfig(DataConfig):
    """Training data and held-out data; an environment may provide its own rows."""

    data: Common[tuple[str, ...]] = ()
    (
        "Training data, one or more sources: FILE.jsonl (json, csv, tsv, parquet, .gz), a hub id, task:NAME or "
        "reasoning_gym:NAME. Options follow a colon: PATH:format=F,split=train[:500],name=main,weight=0.5, options "
        "of the format such as field_messages=a.b, or task:addition:difficulty=2,split=train. Repeatable."
    )

    def __post_init__(self) -> None:
        if self.data:
            super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    learning_rate: Common[float] = 1e-6
    (
        "Peak learning rate. The default depends on the method, and is higher with LoRA (table in docs/quickstart.md). "
        "config.yaml records the value used."
    )
    lr_scheduler_type: Common[
        Literal["constant", "linear", "cosine", "cosine_with_min_lr", "warmup_stable_decay", "inverse_sqrt"]
    ] = "cosine"
    (
        "Learning rate after the warm-up. constant; linear, cosine: decay to 0; cosine_with_min_lr: cosine decay to "
        "min_lr_ratio of the peak; warmup_stable_decay: constant, then cosine decay to min_lr_ratio in the last "
        "decay_ratio of all steps; inverse_sqrt: peak times sqrt(w / step), w = warm-up steps, or 10000 without one."
    )
    min_lr_ratio: float = 0.0
    """cosine_with_min_lr, warmup_stable_decay: final learning rate as a fraction of its peak."""
    decay_ratio: float = 0.1
    """warmup_stable_decay: fraction of all steps over which the learning rate decays."""
    warmup_ratio: Common[float] = 0.0
    """Fraction of all steps over which the learning rate rises to its peak."""
    warmup_steps: int | None = None
    """Number of steps over which the learning rate rises to its peak, instead of warmup_ratio."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases are never decayed."""
    adam_beta1: float = 0.9
    """AdamW: decay rate of the first moment."""
    adam_beta2: float = 0.999
    """AdamW: decay rate of the second moment."""
    adam_epsilon: float = 1e-8
    """AdamW: added to the square root of the second moment."""
    optim: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    (
        "Optimizer. adamw_8bit: both moments in 8 bits, a quarter of the memory (needs torchao). muon: torch's Muon "
        "for the matrices of the blocks, scaled to AdamW's learning rate, and AdamW for all other weights."
    )
    loraplus_lr_ratio: float | None = None
    """LoRA+ (arXiv:2402.12354): learning rate of the adapters' B matrices divided by that of A; 16 is typical."""
    param_groups: JsonObject = dataclasses.field(default_factory=dict)
    (
        "Learning rate and weight decay of some parameters: a JSON object (a mapping in YAML) of regular expressions "
        "that are searched in names; the first match counts. "
        '\'{"embed_tokens": {"learning_rate": 1e-5, "weight_decay": 0}}\', for example.'
    )
    max_grad_norm: float = 1.0
    """Clip the gradient to this global norm. 0: no clipping."""
    nan_policy: Literal["stop", "skip"] = "stop"
    """If the loss or gradient is not finite: stop the run, or skip the step. Both log the rows involved."""
    nan_skip_limit: int = 3
    """Maximum consecutive steps that nan_policy=skip may skip; one more stops the run."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {
                "above 0 and finite": "learning_rate loraplus_lr_ratio",
                "between 0 and 1": "warmup_ratio min_lr_ratio",
                "above 0 and at most 1": "decay_ratio",
                "0 or more": "warmup_steps",
                "0 or above": "weight_decay adam_epsilon",
                "in [0, 1)": "adam_beta1 adam_beta2",
                "0 (off) or above": "max_grad_norm",
                "1 or more": "nan_skip_limit",
            },
        )
        self._check_schedule()
        for pattern, options in self.param_groups.items():
            check_regex("param_groups", pattern)
            if not isinstance(options, dict) or not options or options.keys() - {"learning_rate", "weight_decay"}:
                raise UserError(f"param_groups={pattern}: needs learning_rate, weight_decay or both, not {options}")
            for name, value in options.items():
                try:
                    number = float(value)  # YAML reads 1e-5 as text
                except (TypeError, ValueError):
                    raise UserError(f"param_groups={pattern}: {name}={value} is not a number") from None
                rule = "above 0 and finite" if name == "learning_rate" else "0 or above"
                check_number(f"param_groups={pattern}: {name}", number, rule)
        if self.optim == "muon" and (self.param_groups or self.loraplus_lr_ratio):
            raise UserError("optim=muon: not supported with param_groups and loraplus_lr_ratio; use --optim adamw")
        if self.nan_policy == "stop":
            reject_unused(self, "with nan_policy=stop; set --nan-policy skip", ("nan_skip_limit",))

    def _check_schedule(self) -> None:
        kind = self.lr_scheduler_type
        if self.warmup_steps is not None and self.warmup_ratio:
            raise UserError(
                f"warmup_steps={self.warmup_steps} conflicts with warmup_ratio={self.warmup_ratio:g}; set only one"
            )
        if kind not in ("cosine_with_min_lr", "warmup_stable_decay"):
            reject_unused(self, f"with lr_scheduler_type={kind}; use cosine_with_min_lr", ("min_lr_ratio",))
        if kind != "warmup_stable_decay":
            reject_unused(self, f"with lr_scheduler_type={kind}; use warmup_stable_decay", ("decay_ratio",))
        if kind == "cosine_with_min_lr" and self.min_lr_ratio == 0:
            raise UserError(
                "lr_scheduler_type=cosine_with_min_lr: needs a minimum; set --min-lr-ratio 0.1, for example"
            )

    def num_warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps."""
        return round(self.warmup_ratio * total_steps) if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length of the run, batch sizes, checkpoints, logs and folders."""

    method: Annotated[Common[str], tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """Training method: a built-in method (`python -m trainer` lists them) or the dotted path of a module."""
    output_dir: Common[str] = "runs/{method}-{time}"
    """Folder of the run. {method} and {time} are filled in."""
    max_steps: Common[int | None] = None
    """Number of optimizer steps. None: use num_train_epochs."""
    num_train_epochs: Common[float] = 1.0
    """Passes over the data, if max_steps is None."""
    per_device_train_batch_size: Common[int] = 8
    """Sequences (completions, for RL methods) per device and accumulation step."""
    gradient_accumulation_steps: Common[int] = 1
    """Accumulation steps per optimizer step. Only its product with the batch size affects the gradient."""
    max_tokens_per_micro_batch: Common[int] = 8192
    """Maximum tokens per forward pass. Larger batches are split; a longer sequence runs alone."""
    packing: bool = True
    """Put sequences end to end with a block-diagonal mask. --no-packing pads them to the longest instead."""
    seed: Common[int] = 0
    """Seed of data order, sampling and initialization."""
    deterministic: bool = False
    (
        "Use only deterministic GPU algorithms, which are slower; an operation without one is an error. Runs on a CPU "
        "are always deterministic."
    )
    resume: Common[str | None] = None
    """Resume a run folder or checkpoint. Without a value: the latest checkpoint of the newest run."""
    overwrite_output_dir: bool = False
    """Delete an earlier run in output_dir."""
    save_steps: Common[int] = 100
    """Steps between checkpoints. 0: only the final model is saved."""
    saves_per_epoch: int | None = None
    """Checkpoints in each pass over the data, evenly spaced, instead of save_steps."""
    save_total_limit: int = 3
    """Number of checkpoints to keep; older checkpoints are deleted."""
    save_async: bool = True
    """Write checkpoints in the background, from a copy in main memory. --no-save-async: wait, without a copy."""
    stop_grace_s: float = 60.0
    """Seconds after SIGTERM to finish the current step and its checkpoint; then the process exits."""
    logging_steps: int = 1
    """Steps between lines on the console. metrics.jsonl has every step."""
    eval_steps: Common[int] = 0
    """Steps between evaluations. 0: only before and after training."""
    evals_per_epoch: int | None = None
    """Evaluations in each pass over the data, evenly spaced, instead of eval_steps."""
    loss_watchdog_threshold: float | None = None
    """Save and stop if loss/total exceeds this for loss_watchdog_patience consecutive steps. None: never."""
    loss_watchdog_patience: int = 3
    """Consecutive steps with a loss above loss_watchdog_threshold that stop the run."""
    callbacks: tuple[str, ...] = ()
    """Classes or objects to call during the run (docs/python.md): my_module.MyCallback or FILE.py:MyCallback."""
    metric_for_best_model: str | None = None
    """Metric of the evaluation that decides which weights are best, such as eval/reward/mean."""
    greater_is_better: bool | None = None
    """Whether a higher metric_for_best_model is better. None: unless its name contains loss, nll or cfm."""
    load_best_model_at_end: bool = False
    """Export the weights of the best evaluation instead of the last; keeps a copy of the trained weights in memory."""
    early_stopping_patience: int | None = None
    """Stop after this many consecutive evaluations without a better metric_for_best_model. None: never."""
    report_to: Common[tuple[Literal["tensorboard", "wandb", "trackio", "none"], ...]] = ("none",)
    """Services to send metrics to, in addition to metrics.jsonl and report.html."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {
                "1 or more": "per_device_train_batch_size gradient_accumulation_steps max_tokens_per_micro_batch "
                "save_total_limit logging_steps max_steps loss_watchdog_patience early_stopping_patience",
                "0 (off) or more": "save_steps eval_steps saves_per_epoch evals_per_epoch",
                "0 or above": "stop_grace_s",
                "above 0 and finite": "num_train_epochs",
            },
        )
        if "none" in self.report_to and len(self.report_to) > 1:
            raise UserError(f"report_to={' '.join(self.report_to)}: none cannot be combined with a service")
        if not self.output_dir.strip():
            raise UserError("output_dir: empty; name a folder")
        for name, other in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
            value = getattr(self, name)
            if value is not None:
                reject_unused(self, f"with {name}={value}; set only one", (other,))
        if self.loss_watchdog_threshold is None:
            why = "without a threshold; set --loss-watchdog-threshold"
            reject_unused(self, why, ("loss_watchdog_patience",))
        elif math.isnan(self.loss_watchdog_threshold):
            raise UserError("loss_watchdog_threshold=nan: must be a number")

        if self.metric_for_best_model is None:
            names = ("greater_is_better", "load_best_model_at_end", "early_stopping_patience")
            reject_unused(self, "without a metric; set --metric-for-best-model", names)
        elif not self.load_best_model_at_end and self.early_stopping_patience is None:
            raise UserError(f"metric_for_best_model={self.metric_for_best_model}: has no effect alone; add "
                            "--load-best-model-at-end or --early-stopping-patience")  # fmt: skip

    @property
    def is_greater_better(self) -> bool:
        """Whether a higher metric_for_best_model is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not re.search("loss|nll|cfm", str(self.metric_for_best_model))

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size()

    def total_steps(self, rows_per_epoch: int, rows_per_step: int, steps_per_batch: int = 1) -> int:
        """Return max_steps, or the number of steps of num_train_epochs."""
        return self.max_steps or math.ceil(self.num_train_epochs * rows_per_epoch / rows_per_step) * steps_per_batch


def steps_per_epoch(rows_per_epoch: int, rows_per_step: int, steps_per_batch: int = 1) -> Fraction:
    """Return the optimizer steps per pass over the data."""
    return Fraction(rows_per_epoch * steps_per_batch, rows_per_step)


def check_evaluation(data: DataConfig, run: RunConfig) -> None:
    """Reject evaluation intervals without held-out rows."""
    if not data.holds_out:
        reject_unused(run, NO_HELD_OUT, ("eval_steps", "metric_for_best_model"))
        if run.evals_per_epoch:
            reject_unused(run, NO_HELD_OUT, ("evals_per_epoch",))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    engine: Common[Literal["auto", "local", "vllm"]] = "auto"
    (
        "Sampling engine. local: in the trainer process; vllm: servers at --vllm.url, or started by the run. auto: "
        "vllm if a setting needs servers or local does not fit on the GPU, otherwise local; config.yaml records it."
    )
    max_batch_size: int | None = None
    (
        "local: maximum concurrent completions; other completions start as running completions finish. None: 512 on a "
        "GPU, or as many as fit in the KV cache, and 256 on a CPU."
    )
    cache_gib: float | None = None
    """local, on a GPU: maximum size of the KV cache. None: the free memory, at most what the largest batch needs."""
    partial: float = 0.0
    (
        "local: partial rollouts. Groups sampled in addition to those of a batch, as a fraction of a batch: a batch is "
        "the groups that finish first, and the others continue with the next weights. 0: off; at most 1."
    )
    replay_routes: bool = True
    (
        "Models with experts: train each token with the experts that the sampler used for it, if it recorded them. The "
        "router is still trained."
    )
    eval_temperature: float = 0.0
    """Temperature for evaluation. 0: greedy."""
    eval_top_p: float = 1.0
    """Top-p for evaluation, if eval_temperature is above 0. 1: all tokens."""
    eval_top_k: int = 0
    """Top-k for evaluation, if eval_temperature is above 0. 0: all tokens."""

    def __post_init__(self) -> None:
        rules = {"1 or more": "max_batch_size", "above 0": "cache_gib", "between 0 and 1": "partial"}
        check_numbers(self, rules, "rollout.")
        if self.eval_temperature == 0:
            why = "on greedy evaluation; set --rollout.eval-temperature"
            reject_unused(self, why, ("eval_top_p", "eval_top_k"), "rollout.")


def check_engine(rollout: RolloutConfig, vllm: VllmConfig, sync: SyncConfig, asked: str | None = None) -> None:
    """Reject server settings with the local engine, and settings of the local engine with servers.

    `asked`: the setting for which engine=auto uses servers.
    """
    if rollout.engine == "local":
        for prefix, block in (("vllm.", vllm), ("sync.", sync)):
            reject_unused(block, "with rollout.engine=local; set --rollout.engine vllm", prefix=prefix)
    elif rollout.engine == "vllm" or asked is not None:
        servers = "rollout.engine=vllm" if rollout.engine == "vllm" else f"vLLM servers, which {asked} needs"
        reject_unused(rollout, f"with {servers}; use --vllm.max-in-flight", ("max_batch_size",), "rollout.")
        reject_unused(rollout, f"with {servers}; use --vllm.gpu-memory-utilization", ("cache_gib",), "rollout.")
        reject_unused(rollout, f"with {servers}; use --async-prefetch", ("partial",), "rollout.")


@dataclass(frozen=True, kw_only=True)
class ResponseConfig:
    """Length limits, and rows that cannot be used."""

    max_length: Common[int] = 1024
    """Maximum tokens of prompt plus response. Longer responses are truncated on the right; the count is logged."""
    long_rows: Literal["truncate", "drop"] = "truncate"
    """Rows longer than max_length: truncate the response, or drop the row."""
    max_prompt_length: Common[int | None] = None
    """Skip rows with longer prompts (tokens) and log how many. None: skip only rows without room for a response."""
    bad_rows: Common[Literal["error", "skip"]] = "error"
    """For a row that cannot be read: stop with an error that names it, or skip it and log the count."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError(
                f"max_length={self.max_length}: must be 2 or more, because the first token cannot be trained"
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen reference model."""

    ref: Common[Literal["auto", "adapter_off", "copy", "precomputed"]] = "auto"
    (
        "How reference log-probs are computed. adapter_off: with the base of a LoRA run; copy: with a second model in "
        "memory; precomputed: once for all rows, stored on disk. auto: adapter_off with LoRA, otherwise copy."
    )
    ref_model: str | None = None
    """Reference model, in any form that --model accepts. None: the initial weights of this run."""
    ref_cache: str = "~/.cache/strop/reference"
    """Folder for precomputed log-probs; runs with the same model and rows reuse them."""


@dataclass(frozen=True, kw_only=True)
class MovingReferenceConfig:
    """A reference that follows the policy (TR-DPO)."""

    exact: ClassVar[bool] = False  # average in float32

    sync_ref_model: bool = False
    """Move the reference towards the policy every ref_model_sync_steps steps."""
    ref_model_mixup_alpha: float = 0.6
    """Weight of the policy in an updated reference."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between updates of the reference."""

    def __post_init__(self) -> None:
        check_numbers(self, {"above 0": "ref_model_sync_steps", "above 0 and at most 1": "ref_model_mixup_alpha"})
        if not self.sync_ref_model:
            reject_unused(self, "without sync_ref_model", ("ref_model_mixup_alpha", "ref_model_sync_steps"))


class MethodMemory(NamedTuple):
    """Memory needs of a method, for trainer/plan.py."""

    head: Literal["one pass", "any loss", "none"] = "any loss"  # one pass: the head computes the gradient, too
    sequences: int = 1  # per row

    def head_for(self, context: int) -> str:
        """Return the head's path; ranks that share a row cannot use the fused one (logps.token_loss)."""
        return "any loss" if context > 1 and self.head == "one pass" else self.head


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base of all methods: run.py, plan.py and the command line read no other blocks."""

    rows: ClassVar[str] = "auto"  # rows that the method reads: sft, pairs, unpaired, stepwise, prompts or truths
    lora_learning_rate: ClassVar[float | None] = None  # default with LoRA; None: the same as for all weights
    memory: ClassVar[MethodMemory] = MethodMemory()

    model: Flat[ModelConfig]
    data: Flat[DataConfig]
    run: Flat[RunConfig] = dataclasses.field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = dataclasses.field(default_factory=OptimConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
