"""Load a policy: model, adapter, tokenizer, reference.

    policy = load_policy(cfg.model, cfg.lora, device, with_reference=True)
    policy = parallelize(cfg.parallel, policy)          # trainer/policy/sharding.py

Trained weights are float32, or bfloat16 with --trained-dtype; matmuls run in `compute_dtype` (autocast if bfloat16).
Frozen weights (the base of a LoRA run, a reference copy) are stored in `compute_dtype`; with --load-in-4bit the linear
layers of the base, except its head, are stored in NF4 (kernels/nf4.py). Dropout of the base model is off, so that the
trainer and the rollout engine compute the same log-probs from the same weights.

With several ranks the model is built without its weights, and each rank reads its shards once they are known:

    lm = load_causal_lm(path, cfg, dtype, device, on_meta=True)
    files = files_of(lm, path)           # None if the file layout differs from memory: every rank loads the checkpoint
    make_hollow(lm)                      # parameters of the right shape and dtype that take no memory
    ...add adapters, shard...
    fill(lm, files, device)              # allocate this rank's shards and read them from the files

A hollow parameter is one number expanded to a full tensor (all strides 0). Unlike on the meta device, peft adds real
adapters to it, initialised from the same random numbers as for a loaded parameter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from data.chat import set_chat_template, set_special_tokens
from data.errors import UserError
from data.formats.template_settings import check_kwargs
from data.hub import check_hub
from data.user_code import PYTHON, PythonObject
from kernels.attention import share_graphs
from kernels.fp8 import Linear8, has_tensor_cores
from kernels.fp8 import fits as fits_fp8
from kernels.nf4 import Linear4bit, is_4bit, make_known_to_inductor
from rollout.engines.forward import block_obstacle, widen
from rollout.model_folder import (
    BUILTIN,
    INDEX,
    ONE_FILE,
    check_base,
    find_base,
    find_tokenizer,
    finish_dequantised,
    loading_options,
    read_settings,
    reject_reward_model,
    resolve_model,
)
from rollout.routes import expert_blocks
from rollout.state_layers import carried_state
from trainer.config.blocks import LoraConfig, ModelConfig, check_4bit, check_fp8
from trainer.config.errors import load_error
from trainer.files.tensor_files import Record, TensorFiles, records_of_file
from trainer.metrics.startup import startup
from trainer.parallel.comm import context_size, is_main, world_size
from trainer.parallel.dtensor import local, local_slices
from trainer.parallel.watch import log
from trainer.policy.adapters import (
    REFERENCE,
    add_adapter,
    attach_adapter,
    continue_adapter,
    continue_object,
    freeze_except,
    read_by_kernels,
)
from trainer.policy.attention import choose_attention, load_name, use_exact
from trainer.policy.experts import use_grouped_matmuls
from trainer.policy.fuse import exact_obstacle, fuse, join_adapters, make_exact, unfuse
from trainer.policy.logps import Policy, causal_lm, check_logps, reject_context
from trainer.policy.offload import offload_inputs, offloads

_RECOMPUTED: ContextVar[int] = ContextVar("blocks to recompute with gradient_checkpointing=auto", default=0)
# The policy and the reference are different graphs, and must match bit for bit as long as their weights are equal.
COMPILER_OPTIONS = {
    "emulate_precision_casts": True,  # round between fused operations as separate kernels would
    # Choose block sizes of norms by rule: chosen by timing, two equal kernels may sum in different orders. Set for each
    # block, because Dynamo resets the process-wide setting after every graph.
    "deterministic": True,
}


# the policy ------------------------------------------------------------------------------------------------------


def load_policy(
    cfg: ModelConfig, lora: LoraConfig, device: torch.device, *, with_reference: bool, load_now: bool = False
) -> Policy:
    """Load the policy. With several ranks, parallelize() reads the weights later unless `load_now`."""
    import_libraries(lora)
    check_adapters(cfg, lora)
    check_offloading(cfg, device)
    compute_dtype = pick_dtype(cfg.dtype, device)
    path, base, adapter, revision = find_model(cfg.model, cfg.revision)
    cfg = dataclasses.replace(cfg, revision=revision)
    trains_base = lora.r == 0
    base_dtype = trained_dtype(cfg, compute_dtype) if trains_base else compute_dtype
    tokenizer = load_tokenizer(path, cfg)
    # Quantising, merging, DoRA magnitudes and copied modules need the weights now.
    is_object = isinstance(cfg.model, PythonObject)
    needs_all = is_object or cfg.load_in_4bit or cfg.fp8_base or (adapter and trains_base) or not lora.plain
    later = world_size() > 1 and not load_now and not needs_all
    model, files = load_hollow(base, cfg, base_dtype, device) if later else (None, None)
    if files is None:
        model = load_causal_lm(base, cfg, base_dtype, device)
    check_tokenizer(cfg, tokenizer, model)
    if cfg.load_in_4bit:
        quantize_layers(model, device)
    policy = Policy(
        model=model, tokenizer=tokenizer, source=base, revision=revision, device=device, compute_dtype=compute_dtype,
        files=files,
    )  # fmt: skip
    if isinstance(cfg.model, PythonObject) and hasattr(cfg.model.value, "peft_config"):
        policy.model = cfg.model.value
        policy.reference_adapter = continue_object(policy.model, lora, with_reference=with_reference)
    elif adapter and trains_base:
        # peft freezes the base when it attaches the adapter, and leaves it frozen.
        policy.model = attach_adapter(model, adapter).merge_and_unload().requires_grad_(True)
    elif adapter:
        policy.model = continue_adapter(model, adapter, lora)
        if with_reference:  # a frozen copy of the adapter, not the base
            policy.model.load_adapter(adapter, REFERENCE, is_trainable=False)
            policy.reference_adapter = REFERENCE
    elif not trains_base:
        policy.model = add_adapter(model, lora, revision)
    freeze_except(policy.model, cfg.trained_parameters)
    if with_reference and trains_base:
        if files is None:
            policy.reference = load_causal_lm(base, cfg, compute_dtype, device, is_copy=True)
        else:
            policy.reference, _ = load_hollow(base, cfg, compute_dtype, device)
        if adapter:
            policy.reference.load_state_dict(policy.model.state_dict())
        policy.reference.eval().requires_grad_(False)
    if files is None:
        for model in (policy.model, policy.reference):
            if model is not None:
                model.to(device)
    if cfg.fp8_base:
        multiply_in_fp8(causal_lm(policy.model), base, device)
    checkpoint_blocks(causal_lm(policy.model), cfg, base, device)
    policy.model.train()
    if files is None:
        check_logps(policy)
    for model in (policy.model, policy.reference):
        if model is not None:
            speed_up(causal_lm(model), cfg, base, device)
    policy.is_compiled = cfg.compile is True
    startup.lap("weights")
    return policy


def import_libraries(lora: LoraConfig) -> None:
    """Import the libraries that loading needs, to time them separately."""
    import transformers.modeling_utils  # noqa: F401

    if lora.r:
        import peft  # noqa: F401
    startup.lap("imports")


def find_model(name: str, revision: str | None = None) -> tuple[str, str, str | None, str | None]:
    """Return the folder or hub id of the model and of its base weights, its adapter folder, and the base's revision."""
    if isinstance(name, PythonObject):
        base = name.removeprefix(f"{PYTHON}:")
        return base, base, None, revision
    path = resolve_model(name)
    base, revision = find_base(path, revision)
    return path, base, None if base == path else path, revision


def check_adapters(cfg: ModelConfig, lora: LoraConfig) -> None:
    """Raise if a setting has no effect with, or without, adapters."""
    check_4bit(cfg, lora)
    check_fp8(cfg, lora)
    if cfg.trained_parameters and lora.r > 0:
        raise UserError(
            f"trained_parameters={' '.join(cfg.trained_parameters)}: not supported with LoRA (lora.r={lora.r}); use "
            "--lora.r 0, or train modules in full alongside the adapters with --lora.modules-to-save"
        )
    if cfg.merge_lora and lora.r == 0:
        raise UserError(
            "merge_lora=True has no effect with lora.r=0 (all weights); set --lora.r or remove --merge-lora"
        )
    if cfg.trained_dtype != "float32" and lora.r > 0:
        raise UserError(f"trained_dtype={cfg.trained_dtype}: adapters are always float32; remove --trained-dtype")


def check_offloading(cfg: ModelConfig, device: torch.device) -> None:
    if cfg.activation_offloading and device.type == "cpu":
        raise UserError(
            "activation_offloading=True has no effect on a CPU: activations are already in main memory; remove "
            "--activation-offloading"
        )


def quantize_layers(lm: Any, device: torch.device) -> None:
    """Replace the linear layers, except the head, by 4-bit layers on `device`.

    Layers are quantised one at a time from main memory, so the device never contains the full base.
    """
    kept = {lm.get_output_embeddings(), *(lm.get_submodule(name) for name in read_by_kernels(lm))}
    for module in list(lm.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child not in kept:
                setattr(module, name, Linear4bit.of(child, device))
    if not is_4bit(lm):
        raise UserError(
            f"load_in_4bit=True: {type(lm).__name__} has no nn.Linear layers to store in 4 bits; remove --load-in-4bit"
        )


def multiply_in_fp8(lm: Any, source: str, device: torch.device) -> None:
    """Make the frozen linear layers of the blocks multiply in FP8 (kernels/fp8.py)."""
    if device.type == "cuda" and not has_tensor_cores(device):
        raise UserError(
            f"fp8_base=True: needs a Hopper GPU or later; {torch.cuda.get_device_name(device)} multiplies FP8 rows in "
            "float32; remove --fp8-base"
        )
    kept = {lm.get_submodule(name) for name in read_by_kernels(lm)}
    num = 0
    for name, module in list(blocks_of(lm, source).named_modules()):
        is_frozen = type(module) is nn.Linear and not module.weight.requires_grad and "lora_" not in name
        if is_frozen and module not in kept and fits_fp8(module):
            Linear8.of(module)
            num += 1
    if not num:
        raise UserError(f"fp8_base=True: {type(lm).__name__} has no frozen nn.Linear layers; remove --fp8-base")
    if is_main():
        log(f"fp8_base: {num} layers multiply in FP8")


def trained_dtype(cfg: ModelConfig, compute_dtype: torch.dtype) -> torch.dtype:
    if cfg.trained_dtype == "bfloat16" and compute_dtype != torch.bfloat16:
        raise UserError("trained_dtype=bfloat16: matmuls would run in float32 on this device; add --dtype bfloat16")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[cfg.trained_dtype]


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_tokenizer(path: str, cfg: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    revision = cfg.revision
    label = f"model={cfg.model}" if revision is None else f"model={cfg.model} (revision={revision})"
    if isinstance(cfg.tokenizer, PythonObject):
        return finish_tokenizer(copy.deepcopy(cfg.tokenizer.value), cfg)  # its template and tokens may change
    if cfg.tokenizer is not None:
        path, label, revision = find_tokenizer(cfg.tokenizer), f"tokenizer={cfg.tokenizer}", None
    elif not Path(path).is_dir():
        check_hub("model", path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:  # the tokenizers library raises a bare Exception for a damaged file
        also = "; pass tokenizer=" if isinstance(cfg.model, PythonObject) else ""
        raise UserError(f"{label}: the tokenizer could not be loaded: {load_error(error, path)}{also}") from None
    return finish_tokenizer(tokenizer, cfg)


def finish_tokenizer(tokenizer: Any, cfg: ModelConfig) -> Any:
    set_special_tokens(tokenizer, cfg.special_tokens, cfg.eot_tokens, allow_in_text=cfg.allow_special_tokens)
    set_chat_template(tokenizer, cfg.chat_template)
    check_kwargs(tokenizer, cfg.chat_template_kwargs)
    return tokenizer


def check_tokenizer(cfg: ModelConfig, tokenizer: Any, lm: Any) -> None:
    """Raise if the ids of another tokenizer do not fit the model."""
    if cfg.tokenizer is None:
        return
    last, rows = max(tokenizer.get_vocab().values()), lm.get_input_embeddings().weight.shape[0]
    if last >= rows:
        raise UserError(
            f"tokenizer={cfg.tokenizer}: its largest id is {last}, and model={cfg.model} has {rows} embeddings (ids 0 "
            f"to {rows - 1}); use a tokenizer that fits"
        )


def load_causal_lm(
    path: str, cfg: ModelConfig, dtype: torch.dtype, device: torch.device, *, on_meta: bool = False,
    is_copy: bool = False,
) -> nn.Module:  # fmt: skip
    """Load the model in main memory, or on the meta device, with the attention that `device` will use.

    A model object from Python is not loaded but changed in place, unless `is_copy`.
    """
    if isinstance(cfg.model, PythonObject):
        return adopt(cfg.model.value, cfg, dtype, device, is_copy=is_copy)
    options = {"device_map": "meta"} if on_meta else {}
    model, mismatched = load_model("AutoModelForCausalLM", path, cfg, dtype, device, **options)
    reject_mismatched(cfg, mismatched)
    return model


def load_model(
    auto_class: str, path: str, cfg: ModelConfig, dtype: torch.dtype, device: torch.device, **options: Any
) -> tuple[Any, list[str]]:
    """Load a transformers model with dropout off; also return the names of missing or mismatched tensors."""
    import transformers

    check_base(path, cfg.revision)
    settings = read_settings(path, cfg.revision)
    dequantised = loading_options(settings)
    if not dequantised:
        reject_quantised(cfg.model, settings)
    if auto_class == "AutoModelForCausalLM":
        reject_reward_model(cfg.model, settings)
    model_class = class_of(getattr(transformers, auto_class), path, cfg)
    attn_implementation = load_name(
        cfg.attn_implementation, device, has_sdpa=getattr(model_class, "_supports_sdpa", True)
    )
    if path in map(str, BUILTIN.values()) or not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        model, info = getattr(transformers, auto_class).from_pretrained(
            path,
            revision=cfg.revision,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=cfg.trust_remote_code,
            use_safetensors=True,  # .bin files are pickles, which strop never loads
            ignore_mismatched_sizes=True,  # the caller reports the tensor's name
            output_loading_info=True,
            **options,
            **dequantised,
        )
    except Exception as error:  # transformers raises arbitrary errors for damaged files and remote code
        raise UserError(f"model={cfg.model}: could not be loaded: {load_error(error, path)}") from None
    if dequantised:
        finish_dequantised(model, dtype)
    prepare_modules(model, cfg, device)
    return model, sorted(info["missing_keys"]) + sorted(name for name, *_ in info["mismatched_keys"])


def prepare_modules(model: Any, cfg: ModelConfig, device: torch.device) -> None:
    """Turn dropout off, and choose the attention and the experts' matmuls."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    choose_attention(model, cfg.attn_implementation, device)
    if expert_blocks(model):
        use_grouped_matmuls()


@torch.no_grad()
def adopt(given: Any, cfg: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_copy: bool) -> nn.Module:
    """Prepare a model object from Python as load_model() prepares a loaded model; the object itself is trained."""
    lm = given.get_base_model() if hasattr(given, "peft_config") else given
    if not hasattr(lm, "get_output_embeddings") or lm.get_output_embeddings() is None:
        raise UserError(f"model={cfg.model}: {type(lm).__name__} is not a causal language model of transformers")
    reject_quantised(cfg.model, lm.config.to_dict())
    if len(devices := {str(place) for place in getattr(lm, "hf_device_map", {}).values()}) > 1:
        raise UserError(
            f"model={cfg.model}: split over {', '.join(sorted(devices))} by device_map; load it without device_map"
        )
    if kind := carried_state(lm.config, type(lm)):
        reject_context(cfg.model, f"{kind} layers of model_type={lm.config.model_type} carry state between tokens")
    lm = copy.deepcopy(lm) if is_copy else lm
    for parameter in lm.parameters():  # not .to(dtype), which would round the buffers (rotary frequencies)
        is_trained = parameter.requires_grad and lm is not given and not is_copy  # an adapter, always float32
        parameter.data = parameter.data.to(torch.float32 if is_trained else dtype)
    if lm is given:
        lm.requires_grad_(True)
    lm.set_attn_implementation(load_name(cfg.attn_implementation, device, has_sdpa=getattr(lm, "_supports_sdpa", True)))
    prepare_modules(lm, cfg, device)
    return lm


def release(policy: Policy) -> None:
    """Undo the changes that speed up training: the result is an ordinary transformers or peft model."""
    lm = causal_lm(policy.model)
    unfuse(lm)
    for block in blocks_of(lm, policy.source) if policy.is_compiled else ():
        vars(block).pop("forward", None)
    if policy.wide_stream is not None:
        policy.wide_stream.remove()
    lm.gradient_checkpointing_disable()
    if policy.reference_adapter is not None:
        policy.model.delete_adapter(policy.reference_adapter)
    policy.reference, policy.reference_adapter = None, None
    policy.companions.clear()
    policy.model.eval()


def reject_mismatched(cfg: ModelConfig, names: list[str]) -> None:
    """Raise for these tensors, which transformers would initialise at random."""
    if names:
        raise UserError(
            f"model={cfg.model}: weights do not match config.json: {len(names)} tensors are missing or misshapen, "
            f"e.g. {names[0]}; download both again from one source"
        )


def reject_quantised(name: str, settings: Mapping[str, Any]) -> None:
    if quantised := settings.get("quantization_config"):
        kind = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"model={name}: quantised checkpoints ({kind}) are not supported; use the unquantised model, with "
            "--lora.r 16 to save memory"
        )


def class_of(auto: Any, path: str, cfg: ModelConfig) -> Any:
    """Return the class that transformers will load, or None if that is unknown before loading."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code)
    except Exception:  # loading the model gives a better error
        return None
    model_class = auto._model_mapping.get(type(config), None)
    if model_class is None and not hasattr(config, "auto_map"):
        raise UserError(
            f"model={cfg.model}: transformers has no {auto.__name__.removeprefix('AutoModelFor')} class for "
            f"model_type={config.model_type}; use another model"
        )
    if kind := carried_state(config, model_class):
        reject_context(cfg.model, f"{kind} layers of model_type={config.model_type} carry state between tokens")
    return model_class


def blocks_of(lm: Any, source: str) -> nn.ModuleList:
    """Return the decoder blocks: the module list whose length is the config's number of layers."""
    num_layers = lm.config.get_text_config().num_hidden_layers
    for child in lm.base_model.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise UserError(f"model={source}: no list of {num_layers} decoder blocks; this architecture is not supported")


@contextlib.contextmanager
def recomputing(num: int) -> Iterator[None]:
    """Checkpoint the first `num` blocks of models that are loaded with gradient_checkpointing=auto."""
    token = _RECOMPUTED.set(num)
    try:
        yield
    finally:
        _RECOMPUTED.reset(token)


def checkpoint_blocks(lm: Any, cfg: ModelConfig, source: str, device: torch.device) -> None:
    is_all = cfg.gradient_checkpointing is True or cfg.activation_offloading
    if cfg.gradient_checkpointing is False or not (is_all or _RECOMPUTED.get()):
        return
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    blocks = blocks_of(lm, source)
    is_each = all(hasattr(block, "_gradient_checkpointing_func") for block in blocks)
    if cfg.activation_offloading:
        if not is_each:
            raise UserError(
                f"activation_offloading=True: {source} does not checkpoint each block; remove --activation-offloading"
            )
        offload_inputs(blocks, device)
    elif not is_all and is_each:  # otherwise the model checkpoints all blocks or none
        for block in blocks[_RECOMPUTED.get() :]:
            block.gradient_checkpointing = False


def speed_up(lm: Any, cfg: ModelConfig, source: str, device: torch.device) -> None:
    """Compile the blocks, or on a GPU fuse their small operations, which compiled blocks do not need."""
    if cfg.compile is True:  # auto is resolved when the number of steps is known (trainer/policy/compile_choice.py)
        compile_blocks(lm, source)
        return
    join_adapters(lm)
    if device.type == "cuda":
        fuse(lm)


def carry_float32(policy: Policy) -> None:
    """Keep the residual stream of a LoRA run in float32, as the in-process engine does for Llama blocks.

    Frozen bfloat16 embeddings would start a bfloat16 stream, which rounds after every block.
    """
    lm = causal_lm(policy.model)
    if policy.wide_stream is None and policy.autocast_dtype and not policy.is_sharded and block_obstacle(lm) is None:
        policy.wide_stream = lm.get_input_embeddings().register_forward_hook(widen)


def make_policy_exact(policy: Policy) -> None:
    """Make the policy and its reference compute what the in-process engine computes, bit for bit."""
    for model in filter(None, (policy.model, policy.reference)):
        lm = causal_lm(model)
        if obstacle := exact_obstacle(lm, policy.device) or head_obstacle(policy, lm):
            raise UserError(f"exact_sampling=True: not supported with model={policy.source}: {obstacle}")
        make_exact(lm, policy.device)
        use_exact(lm)


def head_obstacle(policy: Policy, lm: Any) -> str | None:
    """Return why the head or the layout of rows is not exact, or None."""
    if policy.is_lora:
        return "it has adapters"
    if not policy.packs:
        return "its sequences cannot be packed"
    if policy.device.type != "cuda":
        return None
    if policy.compute_dtype != torch.bfloat16:
        return "on a GPU it needs --dtype bfloat16"
    from kernels.linear_logprob_triton import obstacle

    width = lm.get_output_embeddings().weight.shape[1]
    return obstacle(torch.empty(0, width, dtype=policy.compute_dtype, device=policy.device))


def compile_blocks(lm: Any, source: str) -> None:
    """Compile the blocks in place, which keeps names. All blocks, lengths and masks share one graph with attention.

    Only forward is compiled: hooks, such as those that gather sharded weights, run outside of the graph.
    """
    share_graphs()
    if is_4bit(lm):
        make_known_to_inductor()
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_not_inplace_reminder)
    unfuse(lm)
    join_adapters(lm)
    has_states = carried_state(lm.config, type(lm)) is not None
    for block in blocks_of(lm, source):
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules())
        fits = context_size() == 1 and not offloads(block) and not drops and not has_states
        if getattr(block, "gradient_checkpointing", False) and fits:
            recompute_inside(block)
        block.forward = torch.compile(block.forward, dynamic=True, options=COMPILER_OPTIONS)


def recompute_inside(block: nn.Module) -> None:
    """Checkpoint within the block's graph instead of around it.

    The compiler then does not recompute what the backward pass does not need, such as the block's last matmul. Outputs
    of flex attention are saved: they are as large as the block's input and the slowest to recompute for their size.
    Blocks with offloaded inputs keep the outer checkpoint, and so do blocks with collectives (context parallelism) or
    an adapter's dropout: torch 2.11 fails to compile a graph that recomputes random numbers of a symbolic length. In
    models whose layers carry state, kernels break the graph, and a checkpoint with a break inside runs uncompiled.
    """
    forward, block.gradient_checkpointing = block.forward, False
    contexts = functools.partial(create_selective_checkpoint_contexts, save_attention)

    def call(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        return forward(*args, **kwargs)

    block.forward = call


def is_not_inplace_reminder(record: logging.LogRecord) -> bool:
    """Filter out torch's reminder not to modify saved outputs in place: no code modifies attention outputs."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def save_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = operation is torch.ops.higher_order.flex_attention
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


# weights that each rank reads after sharding ---------------------------------------------------------------------


def load_hollow(
    path: str, cfg: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Any, TensorFiles | None]:
    """Return the model without its weights and the files to read them from; (None, None) if it must load in full."""
    model = load_causal_lm(path, cfg, dtype, device, on_meta=True)
    files = files_of(model, path, cfg.revision)
    if files is None:
        if is_main():
            log(f"model={cfg.model}: file layout differs from memory; every rank loads the full checkpoint")
        return None, None
    make_hollow(model)
    return model, files


def model_tensors(path: str, revision: str | None = None) -> TensorFiles:
    """Find the tensors of a model folder or hub id as transformers does, without reading them."""
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        return None if file is None else Path(file)

    index = None if find(ONE_FILE) else find(INDEX)
    names = [ONE_FILE] if index is None else sorted(set(json.loads(index.read_text())["weight_map"].values()))
    records: dict[str, Record] = {}
    folder = Path()
    for name in names:
        file = find(name)
        if file is None:
            raise UserError(f"model={path}: {name} is missing; download the model again")
        folder = file.parent
        records |= records_of_file(folder, name)
    return TensorFiles(folder, records)


def files_of(lm: Any, path: str, revision: str | None = None) -> TensorFiles | None:
    """Return the files that contain each tensor of `lm` (on the meta device) under the same name, or None."""
    files = model_tensors(path, revision)
    wanted: dict[int, tuple[str, Tensor]] = {}  # tied tensors once, under their first name
    for name, tensor in lm.state_dict(keep_vars=True).items():
        wanted.setdefault(id(tensor), (name, tensor))
    named = dict(wanted.values())
    if not same_layout(lm, named):
        return None
    records = [files.records.get(name) for name in named]
    fits = all(r is not None and r.shape == tuple(t.shape) for r, t in zip(records, named.values(), strict=True))
    return files if fits and compute_buffers(lm) else None


def same_layout(lm: Any, named: dict[str, Tensor]) -> bool:
    """Return whether files store these tensors as they are in memory; fused experts, for example, differ."""
    from transformers.core_model_loading import revert_weight_conversion

    converted = revert_weight_conversion(lm, dict(named))
    return converted.keys() == named.keys() and all(converted[name] is tensor for name, tensor in named.items())


@torch.no_grad()
def compute_buffers(lm: Any) -> bool:
    """Compute the buffers that are in no file (rotary frequencies) with transformers' initialisation.

    Return whether it wrote every element of them.
    """
    for module in lm.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name in names:
            buffer = module._buffers[name]
            if not buffer.is_floating_point():
                return False  # NaN cannot mark unwritten elements
            module._buffers[name] = torch.full_like(buffer, torch.nan, device="cpu")
        if names:
            lm._init_weights(module)
        if any(module._buffers[name].isnan().any() for name in names):
            return False
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            return False
    return True


def make_hollow(lm: nn.Module) -> None:
    """Move tensors from the meta device to main memory, with storage for one number each."""

    def hollow(tensor: Tensor) -> Tensor:
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if tensor.is_meta else tensor

    _replace(lm, hollow, {name for name, _ in lm.named_parameters()} | {name for name, _ in lm.named_buffers()})


def to_meta(lm: nn.Module, files: TensorFiles) -> None:
    """Move hollow parameters, but not adapters, back to the meta device, where sharding costs nothing."""
    _replace(lm, lambda tensor: torch.empty_like(tensor, device="meta"), set(_from_files(lm, files)))


@torch.no_grad()
def fill(lm: nn.Module, files: TensorFiles, device: torch.device) -> None:
    """Allocate all tensors on the meta device, full or sharded, and read this rank's slices from the files."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}  # several for a tied parameter
    for module in lm.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    lm._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for (first, first_name), *others in owners.values():  # tie parameters again
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    tensors = lm.state_dict(keep_vars=True)
    for name, on_disk in _from_files(lm, files).items():
        local(tensors[name]).copy_(files.read(on_disk, local_slices(tensors[name])))


def _from_files(lm: nn.Module, files: TensorFiles) -> dict[str, str]:
    """Map the names of tensors that are in the files to their names there; tied tensors once, under the first name."""
    seen: set[int] = set()
    names = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        on_disk = name.replace(".base_layer.", ".")
        if on_disk in files.records and id(tensor) not in seen:
            names[name] = on_disk
            seen.add(id(tensor))
    return names


def _replace(lm: nn.Module, change: Any, names: set[str]) -> None:
    """Replace parameters and buffers by change(tensor); tied tensors stay tied."""
    known: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (old, new); keeping the old tensor alive keeps its id unique
    for prefix, module in lm.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if tensor is None or (full_name not in names and id(tensor) not in known):
                    continue
                if id(tensor) not in known:
                    new = change(tensor.detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    known[id(tensor)] = tensor, nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                tensors[name] = known[id(tensor)][1]
