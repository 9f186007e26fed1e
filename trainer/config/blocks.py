"""Config blocks that methods share. Each field is a flag; the text under it is its help.

A method's own Config (in trainer/methods/) nests these blocks. A block wrapped in `Flat` shows its flags without
a prefix (`--learning-rate`), the others with one (`--lora.r`). Blocks only validate; anything derived is a property.
Help longer than a line is written as strings in parentheses: tyro keeps the line breaks of a long docstring.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeVar

import tyro

from data.formats.template_settings import JsonObject
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.parallel.ranks import TIMEOUT_S, world_size

T = TypeVar("T")
Flat = tyro.conf.OmitArgPrefixes[T]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Several processes, started by torchrun."""

    mode: Literal["auto", "replicate", "fsdp"] = "auto"
    """replicate: a full copy on every rank; fsdp: sharded weights; auto: replicate if a copy fits."""
    shard: int | None = None
    """fsdp: ranks that one copy is sharded over, for example those of a node; None: all ranks."""
    reshard_after_forward: bool = True
    """fsdp: free gathered weights between forward and backward; less memory, one more gather."""
    reduce_once: bool = False
    """fsdp: reduce gradients once per step, not after each micro-batch; less traffic, unsharded gradients in memory."""
    cpu_offload: bool = False
    """fsdp: keep shards and optimizer state in main memory."""
    context: int = 1
    """Ranks that share every micro-batch, each a slice of its rows, for long sequences; 1: no sharing."""
    timeout_s: float = TIMEOUT_S
    """Seconds that a rank waits for the others before it logs where each of them is, and exits."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"parallel.timeout_s={self.timeout_s}: must be above 0")
        world = world_size()
        for field in fields(self):
            value = getattr(self, field.name)
            if world == 1 and value != field.default:
                raise ValueError(
                    f"parallel.{field.name}={value}: has no effect with one process; start several with torchrun"
                )
            of_all = ("mode", "context", "timeout_s")
            if self.mode == "replicate" and field.name not in of_all and value != field.default:
                raise ValueError(f"parallel.{field.name}={value}: has no effect with parallel.mode=replicate")
        if self.shard is not None and (self.shard < 1 or world % self.shard):
            raise ValueError(f"parallel.shard={self.shard}: must divide the {world} processes")
        if self.context < 1 or world % self.context:
            raise ValueError(f"parallel.context={self.context}: must divide the {world} processes")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters through peft; off unless r is set."""

    r: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = 32
    """Scale: adapter output is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout on adapter inputs."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Module names to adapt, e.g. q_proj v_proj; all-linear means every linear layer but the head."""

    def __post_init__(self) -> None:
        if self.r < 0:
            raise ValueError(f"lora.r={self.r}: a rank cannot be negative; use 0 to train all weights")
        if self.alpha < 1:
            raise ValueError(f"lora.alpha={self.alpha}: must be 1 or more, 0 would switch the adapters off")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout={self.dropout}: must be in [0, 1)")
        if not self.target_modules or not all(self.target_modules):
            raise ValueError("lora.target_modules: empty; name modules such as q_proj v_proj, or leave it out")
        for name in ("alpha", "dropout", "target_modules"):
            if self.r == 0 and getattr(self, name) != getattr(LoraConfig, name):  # the class holds the default
                value = getattr(self, name)
                raise ValueError(f"lora.{name}={value}: has no effect with lora.r=0, all weights; set --lora.r")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held."""

    model: str
    (
        "Hub id, local folder, finished run folder, adapter folder, or builtin:tiny. Given nowhere, the recipe of the "
        "built-in tiny model (trainer/recipes/METHOD_tiny.yaml) fills in whatever is not set."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the matrix products. auto: float32 on CPU, else bfloat16."""
    trained_dtype: Literal["float32", "bfloat16"] = "float32"
    (
        "Dtype that trained weights, their gradients and AdamW's moments are kept in. bfloat16: half the memory; an "
        "update is rounded up or down at random, so that small ones are not lost. LoRA: adapters are always float32."
    )
    attn_implementation: Literal["auto", "flex", "sdpa", "eager"] = "auto"
    (
        "Attention code. flex: compiled kernels that skip what a token does not see, CUDA only; sdpa and eager: those "
        "of transformers, with a dense mask. auto: flex on CUDA where the architecture allows it, else sdpa."
    )
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a fifth to a third more time."""
    load_in_4bit: bool = False
    """Refused: a 4-bit base is not supported."""
    chat_template: str = "tokenizer_default"
    """tokenizer_default, chatml, llama3, gemma, or a FILE.jinja; saved with the trained model."""
    chat_template_kwargs: JsonObject = dataclasses.field(default_factory=dict)
    (
        "Settings that the chat template reads, as a JSON object (a mapping in YAML): '{\"enable_thinking\": false}'. "
        "A row's own column chat_template_kwargs wins over them, name by name."
    )
    system_prompt: str | None = None
    """System message put before every conversation that has none of its own."""
    trust_remote_code: bool = False
    """Let the hub's own Python code for this model run."""
    merge_lora: bool = False
    """Export merged weights rather than an adapter."""

    compile: bool = False
    """Compile the model's blocks with torch.compile: half a minute at the start, faster steps on a GPU."""

    def __post_init__(self) -> None:
        if self.trained_dtype == "bfloat16" and self.dtype == "float32":
            raise ValueError("trained_dtype=bfloat16: holds less than dtype=float32 multiplies; leave one of them out")
        if self.load_in_4bit:
            raise ValueError(
                "load_in_4bit=True: a 4-bit base is not supported, its products would not match the engine's; "
                "use --lora.r 16 on a bfloat16 base"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Rows to train on and rows to hold out."""

    data: tuple[str, ...]
    (
        "Where rows come from, one or several: FILE.jsonl (json, csv, tsv, parquet, .gz), a hub id, or task:NAME. "
        "Options follow after a colon: PATH:format=F,split=train[:500],name=main,weight=0.5, and those of the format, "
        "such as field_messages=a.b; task:addition:difficulty=2,split=train. Repeatable."
    )
    data_format: str = "auto"
    """How rows are read: auto, a format name, or my_module.my_transform; format=... in --data wins."""
    eval_data: tuple[str, ...] = ()
    """Held-out rows, in the same form; empty means no evaluation."""
    max_eval_rows: int = 500
    """At most this many held-out rows are used, from the first on."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data: empty; name at least one FILE, hub id or task:NAME")
        if self.max_eval_rows < 1:
            raise ValueError(f"max_eval_rows={self.max_eval_rows}: must be 1 or more; leave out eval_data for none")


@dataclass(frozen=True, kw_only=True)
class PromptConfig(DataConfig):
    """Rows to train on and rows to hold out; an environment may bring rows of its own."""

    data: tuple[str, ...] = ()
    (
        "Where rows come from, one or several: FILE.jsonl (json, csv, tsv, parquet, .gz), a hub id, task:NAME, or "
        "reasoning_gym:NAME. Options follow after a colon: PATH:format=F,split=train[:500],name=main,weight=0.5, and "
        "those of the format, such as field_messages=a.b; task:addition:difficulty=2,split=train. Repeatable."
    )

    def __post_init__(self) -> None:
        if self.data:
            super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    learning_rate: float = 1e-6
    (
        "Peak learning rate. The default is the method's for all weights (sft 2e-5; rm, prm 1e-5; orpo 8e-6; others "
        "1e-6); with --lora.r it is 2e-4 for sft, 1e-4 for rm and prm, 8e-5 for orpo, 5e-6 for dpo, ipo and kto, and "
        "1e-5 for the others. Sources: trainer/config/learning_rates.py. config.yaml has the number that was used."
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after warm-up: constant, or down to zero linearly or along a cosine."""
    warmup_ratio: float = 0.0
    """Fraction of all steps spent rising to the peak."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; norms and biases are never decayed."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw, or adamw_8bit: its two moments in 8 bit with a scale for each 256, a quarter of the memory (torchao)."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this global norm; 0 does not clip."""
    nan_policy: Literal["stop", "skip"] = "stop"
    """When loss or gradient are not finite: stop the run, or skip the step; either names the step and its rows."""
    nan_skip_limit: int = 3
    """Steps in a row that nan_policy=skip may leave out; one more stops the run."""

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate}: must be above 0 and finite")
        if not 0.0 <= self.warmup_ratio <= 1.0:
            raise ValueError(f"warmup_ratio={self.warmup_ratio}: a fraction of all steps, between 0 and 1")
        for name in ("weight_decay", "adam_epsilon"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or above")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must be in [0, 1)")
        if not self.max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}: must be 0 (off) or above")
        if self.nan_skip_limit < 1:
            raise ValueError(f"nan_skip_limit={self.nan_skip_limit}: must be 1 or more; for none, --nan-policy stop")
        if self.nan_policy == "stop" and self.nan_skip_limit != OptimConfig.nan_skip_limit:  # the class's default
            raise ValueError(f"nan_skip_limit={self.nan_skip_limit}: has no effect; set --nan-policy skip")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, in what portions, and where it is written."""

    method: Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """Training method: the name of a file in trainer/methods/, or the dotted path of a module of yours."""
    output_dir: str = "runs/{method}-{time}"
    """Run folder; {method} and {time} are filled in."""
    max_steps: int | None = None
    """Optimizer steps; None lets num_train_epochs decide."""
    num_train_epochs: float = 1.0
    """Passes over the data when max_steps is None."""
    per_device_train_batch_size: int = 8
    """Sequences (completions for GRPO) per device in one accumulation step."""
    gradient_accumulation_steps: int = 1
    """Accumulation steps in one optimizer step; the gradient depends only on the product of these two."""
    max_tokens_per_micro_batch: int = 8192
    """Split each accumulation step further, so that one forward holds at most this many tokens or one sequence."""
    packing: bool = True
    """Put sequences end to end with a block-diagonal mask; --no-packing pads each to the longest instead."""
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    deterministic: bool = False
    (
        "On a GPU, use only algorithms that repeat bit for bit, at some cost in time; an operation that has none is an "
        "error. On a CPU runs repeat without it, and it only makes such an operation an error."
    )
    resume: str | None = None
    """Continue a run: bare --resume takes the newest run and its latest checkpoint; or name a run or checkpoint."""
    overwrite_output_dir: bool = False
    """Delete an earlier run found in output_dir."""
    save_steps: int = 100
    """Steps between checkpoints; 0 saves only the final model."""
    save_total_limit: int = 3
    """Checkpoints kept, newest first."""
    save_async: bool = True
    """Write checkpoints in the background, from a copy in main memory; --no-save-async waits and needs no copy."""
    stop_grace_s: float = 60.0
    """Seconds that SIGTERM leaves for the step under way and its checkpoint; then the process ends as it is."""
    logging_steps: int = 1
    """Steps between lines on the console; metrics.jsonl always gets every step."""
    eval_steps: int = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    report_to: tuple[Literal["tensorboard", "wandb", "none"], ...] = ("none",)
    """Curves elsewhere besides metrics.jsonl and report.html."""

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_micro_batch",
                     "save_total_limit", "logging_steps"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        for name in ("save_steps", "eval_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 (off) or more")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps}: must be 1 or more, or None for whole epochs")
        if not 0.0 <= self.stop_grace_s < math.inf:
            raise ValueError(f"stop_grace_s={self.stop_grace_s}: must be 0 or above and finite")
        if not 0.0 < self.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs={self.num_train_epochs}: must be above 0 and finite")
        if "none" in self.report_to and len(self.report_to) > 1:
            raise ValueError(
                f"report_to={' '.join(self.report_to)}: none together with a service; name one or the other"
            )
        if not self.output_dir.strip():
            raise ValueError("output_dir: empty; name a folder")

    @property
    def sequences_per_step(self) -> int:
        """Over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size()

    def total_steps(self, rows_per_epoch: int, rows_per_step: int, steps_per_batch: int = 1) -> int:
        """max_steps, or the steps of num_train_epochs."""
        return self.max_steps or math.ceil(self.num_train_epochs * rows_per_epoch / rows_per_step) * steps_per_batch


def check_evaluation(data: DataConfig, run: RunConfig) -> None:
    """Checks across blocks, which cannot see each other; every Config with both calls this."""
    if run.eval_steps and not data.eval_data:
        raise ValueError(
            f"eval_steps={run.eval_steps}: has no effect without held-out rows; name them with --eval-data"
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are made."""

    engine: Literal["local", "vllm"] = "local"
    """local: batched sampling inside this process; vllm: servers, started with the run or given by --vllm.url."""
    max_batch_size: int = 256
    """Completions sampled at the same time by local; lower it when the key-value cache does not fit."""
    eval_temperature: float = 0.0
    """Temperature of held-out completions; 0 is greedy. Training samples always come from the full distribution."""
    eval_top_p: float = 1.0
    """Nucleus of held-out completions, when eval_temperature is above 0; 1 keeps all."""
    eval_top_k: int = 0
    """Number of tokens to choose from in held-out completions, when eval_temperature is above 0; 0 keeps all."""

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"rollout.max_batch_size={self.max_batch_size}: must be 1 or more")
        if self.eval_temperature == 0 and (self.eval_top_p, self.eval_top_k) != (1.0, 0):
            raise ValueError(
                "rollout.eval_top_p, eval_top_k: have no effect on greedy evaluation; set eval_temperature"
            )


def check_engine(rollout: RolloutConfig, vllm: VllmConfig, sync: SyncConfig) -> None:
    """Refuse server settings without servers. Every Config with these blocks calls this."""
    if rollout.engine == "vllm":
        if rollout.max_batch_size != RolloutConfig.max_batch_size:
            raise ValueError(
                f"rollout.max_batch_size={rollout.max_batch_size}: has no effect with rollout.engine=vllm; "
                "use --vllm.max-in-flight"
            )
        return
    for prefix, block in (("vllm", vllm), ("sync", sync)):
        for field in dataclasses.fields(block):
            value = getattr(block, field.name)
            if value != field.default:
                raise ValueError(
                    f"{prefix}.{field.name}={value}: has no effect with rollout.engine=local; set --rollout.engine vllm"
                )


@dataclass(frozen=True, kw_only=True)
class ResponseConfig:
    """How long rows may be, and what happens to broken ones."""

    max_length: int = 1024
    """Tokens of prompt and response together; a longer response is cut on the right, and counted."""
    max_prompt_length: int | None = None
    """Rows whose prompt has more tokens are left out, and counted; None keeps all that leave room for a response."""
    bad_rows: Literal["error", "skip"] = "error"
    """error stops at the first broken row and names it; skip leaves them out, counts them and shows the first."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: must be 2 or more, nothing predicts the first token")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen model that log-ratios are taken against."""

    ref: Literal["auto", "adapter_off", "copy", "precomputed"] = "auto"
    (
        "adapter_off asks the base of a LoRA run, copy holds a second model, precomputed scores all rows once and "
        "keeps the numbers on disk. auto: adapter_off with LoRA, else copy."
    )
    ref_model: str | None = None
    """Another model as reference, in any form --model takes; None means the starting point of this run."""
    ref_cache: str = "~/.cache/strop/reference"
    """Folder of precomputed log-probs, named after what they were computed from."""
