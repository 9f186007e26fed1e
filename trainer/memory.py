"""What a run holds on its device, from its Config alone; nothing is loaded.

    s = sizes_for(cfg)
    work = work_of(cfg, s)                     # at the largest micro-batch that the settings admit
    num_bytes = planned_peak(cfg, tokens)      # of a step that has so many tokens

The counting itself is in trainer/plan_memory.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.servers.model_folder import read_adapter, resolve_model
from trainer.config.errors import why
from trainer.parallel.ranks import world_size
from trainer.plan_memory import METHODS, Method, Sizes, Work, kept, peak, sampling, sizes_of

ANY = Method("any loss")  # a method that is not ours


def meta_model(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model without its numbers."""
    from transformers import AutoConfig

    path = resolve_model(model)
    if (Path(path) / "adapter_config.json").exists():
        path = resolve_model(read_adapter(path)["base_model_name_or_path"])
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as error:  # damaged files make transformers raise anything
        raise ValueError(f"model={model}: its config.json cannot be read: {why(error, path)}") from None
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            raise ValueError(f"model={model}: a mixture of experts, which is not planned for")
    lacking = [x for x in ("num_attention_heads", "intermediate_size", "num_hidden_layers") if not hasattr(config, x)]
    if lacking:
        raise ValueError(f"model={model}: its config has no {lacking[0]}; only decoder models are planned for")
    return build(config, trust_remote_code=trust_remote_code)


def build(config: Any, *, trust_remote_code: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def sizes_for(cfg: Any) -> Sizes:
    return sizes_of(meta_model(cfg.model.model, trust_remote_code=cfg.model.trust_remote_code))


def planned_peak(cfg: Any, tokens: int, *, trained_tokens: int | None = None) -> float:
    """Bytes that tensors take on this device at the peak of a step which has so many tokens here, sampling included."""
    s, parts = sizes_for(cfg), cfg.run.gradient_accumulation_steps
    most = min(math.ceil(tokens / parts), max(cfg.run.max_tokens_per_micro_batch, longest(cfg) or 0))
    trained = None if trained_tokens is None else math.ceil(most * trained_tokens / tokens)
    work = replace(work_of(cfg, s), tokens=most, trained_tokens=trained, accumulates=most < tokens)
    cached = cached_tokens(cfg)
    return max(peak(s, work), sampling(s, work, cached) if cached else 0.0)


def work_of(cfg: Any, s: Sizes, device: str | None = None) -> Work:
    """This run as plan_memory takes it, at the most tokens that its settings admit, on cuda or cpu; None: as here."""
    device = device or device_type()
    tokens, steps = micro_batch_tokens(cfg), cfg.run.gradient_accumulation_steps
    head, context = method_of(cfg).head, cfg.parallel.context
    work = Work(
        tokens=tokens, lora_r=cfg.lora.r, held=2 if cfg.model.trained_dtype == "bfloat16" else 4,
        compute=compute_bytes(cfg, device), checkpointing=cfg.model.gradient_checkpointing, context=context,
        head="any loss" if context > 1 and head == "one pass" else head,  # model.token_loss
        has_reference=has_reference(cfg), others=other_models(cfg, compute_bytes(cfg, device)), optim=cfg.optim.optim,
        triton=has_triton_head(device), accumulates=steps > 1 or tokens < step_tokens(cfg),
    )  # fmt: skip
    return replace(work, shards=shards_of(cfg, s, work, device))


def method_of(cfg: Any) -> Method:
    """By the module of its Config, or of one that this is derived from."""
    names = (kind.__module__.rpartition(".")[2] for kind in type(cfg).__mro__)
    return next((METHODS[name] for name in names if name in METHODS), ANY)


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_bytes(cfg: Any, device: str) -> int:
    """Of one number in a matrix product."""
    if cfg.model.dtype == "auto":
        return 4 if device == "cpu" else 2
    return 4 if cfg.model.dtype == "float32" else 2


def has_triton_head(device: str) -> bool:
    """kernels/linear_logprob_triton.py runs on Hopper and Blackwell, which a GPU that is not here is taken for."""
    import torch

    return device == "cuda" and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10))


def shards_of(cfg: Any, s: Sizes, work: Work, device: str) -> int:
    """GPUs that one copy is divided over, by the settings and, for auto, as the trainer decides."""
    import torch

    from trainer.sharding import room_for_a_copy

    parallel, world = cfg.parallel, world_size()
    if world == 1 or parallel.mode == "replicate":
        return 1
    if parallel.mode == "auto":
        whole = kept(s, replace(work, optim="adamw", others=0.0))
        if sum(whole.values()) <= room_for_a_copy(torch.device(device)):
            return 1
    return parallel.shard or world


def has_reference(cfg: Any) -> bool:
    """Whether the run compares with its starting point as it trains; without LoRA that is a second model."""
    wants, beta = method_of(cfg).reference, cfg.policy_loss.beta if hasattr(cfg, "policy_loss") else 0.0
    if wants == "always" and hasattr(cfg, "features"):
        return cfg.features.feature_model is None or beta > 0
    if wants == "always":
        is_free = getattr(cfg, "reference_free", False)
        return not is_free and cfg.reference.ref != "precomputed" and cfg.reference.ref_model is None
    return wants == "with beta" and beta > 0


def other_models(cfg: Any, compute: int) -> float:
    """Bytes of models named beside --model, which do not train."""
    reference, features = getattr(cfg, "reference", None), getattr(cfg, "features", None)
    trusts, total = cfg.model.trust_remote_code, 0.0
    if reference is not None and reference.ref_model is not None and reference.ref != "precomputed":
        total += compute * sizes_of(meta_model(reference.ref_model, trust_remote_code=trusts)).params
    if features is not None and features.feature_model is not None:
        total += compute * sizes_of(meta_model(features.feature_model, trust_remote_code=trusts)).params
    return total


def micro_batch_tokens(cfg: Any) -> int:
    """The most one forward holds: what is allowed, or one long sequence, or all there is of an accumulation step."""
    limit, length = cfg.run.max_tokens_per_micro_batch, longest(cfg)
    if length is None:
        return limit
    return min(max(limit, length), sequences(cfg) * length)


def step_tokens(cfg: Any) -> float:
    """The most of one accumulation step on this device, or on those that share it."""
    length = longest(cfg)
    return math.inf if length is None else sequences(cfg) * length


def sequences(cfg: Any) -> int:
    """Of one accumulation step on this device, or on those that share it."""
    return cfg.run.per_device_train_batch_size * method_of(cfg).sequences * cfg.parallel.context


def longest(cfg: Any) -> int | None:
    """Tokens of the longest sequence that the settings admit, prompts as far as bound; None where they do not say."""
    if getattr(cfg, "mode", None) == "strided":
        return None  # rows of continuations side by side
    if hasattr(cfg, "rollout"):
        return (cfg.max_prompt_length or 0) + cfg.max_completion_length
    return cfg.response.max_length if hasattr(cfg, "response") else getattr(cfg, "max_length", None)


def cached_tokens(cfg: Any) -> int:
    """Of what the local engine samples at a time, at their longest; 0 where it does not sample."""
    if not hasattr(cfg, "rollout") or cfg.rollout.engine != "local":
        return 0
    return completions(cfg) * (longest(cfg) or 0)


def completions(cfg: Any) -> int:
    """Sampled by the local engine at a time."""
    return min(cfg.rollout.max_batch_size, cfg.run.sequences_per_step)
