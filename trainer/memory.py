"""What a run holds on its device, in bytes, from the model's config and the run's settings alone. Nothing is loaded.

    sizes = sizes_of(cfg.model)
    estimate(sizes, cfg, "cuda") -> {"weights": ..., "gradients": ..., "optimizer": ..., "activations": ..., ...}

Activations are what a forward pass keeps for the backward pass, counted with torch's saved_tensors_hooks on Llama and
Qwen3 layers (a test counts again); what kernels need for a moment, and dense masks of sdpa, come on top. The head keeps
no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout.model_folder import read_adapter, resolve_model
from trainer.config import ModelConfig

GIB = 2**30
# Bytes kept per token and layer for each number of: the residual stream, the MLP, queries keys and values (without and
# with a norm of their own). Under autocast the residual stream is float32 and every product has a bfloat16 copy.
KEPT = {
    ("full", 2): (26, 8, 4, 10),
    ("full", 4): (24, 16, 8, 16),
    ("lora", 2): (18, 8, 5, 8),
    ("lora", 4): (16, 16, 8, 16),
}


@dataclass(frozen=True)
class Sizes:
    """Of a model, as far as memory goes."""

    parameters: int
    adapter_per_rank: int  # parameters of adapters on all linear layers, for each unit of rank
    layers: int
    width: int
    mlp: int
    query: int  # heads x head size
    key: int  # heads of keys x head size; as much again for values
    has_qk_norm: bool


def sizes_of(cfg: ModelConfig) -> Sizes:
    """Reads config.json and builds the model without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = resolve_model(cfg.model)
    if (Path(path) / "adapter_config.json").exists():
        path = read_adapter(path)["base_model_name_or_path"]
    config = AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=cfg.trust_remote_code)
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        adapter_per_rank=sum(m.in_features + m.out_features for m in linear),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        mlp=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        query=heads * head_size,
        key=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        has_qk_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
    )


def estimate(sizes: Sizes, cfg: Any, device_type: str) -> dict[str, float]:
    """Bytes of each kind; those a run does not have are left out. The cache is there only while local samples."""
    product = product_bytes(cfg, device_type)
    rank = cfg.lora.r
    trained = rank * sizes.adapter_per_rank if rank else sizes.parameters
    # autocast makes a bfloat16 copy of every float32 weight, kept for the backward pass
    copies = 2 * sizes.parameters if not rank and product == 2 else 0
    parts = {
        "weights": 4 * trained + (product * sizes.parameters if rank else copies),
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "reference": product * sizes.parameters if copies_reference(cfg) else 0,
        "activations": activations(sizes, cfg, device_type, micro_batch_tokens(cfg)),
        "cache": cache(sizes, cfg, device_type),
    }
    return {name: float(value) for name, value in parts.items() if value}


def activations(sizes: Sizes, cfg: Any, device_type: str, num_tokens: int, *, recomputed: bool | None = None) -> float:
    """Of one micro-batch. Recomputed, only the residual stream between layers is kept, and one layer in full."""
    product = product_bytes(cfg, device_type)
    width, mlp, plain, normed = KEPT["lora" if cfg.lora.r else "full", product]
    attention = (normed if sizes.has_qk_norm else plain) * (sizes.query + 2 * sizes.key)
    layer = width * sizes.width + mlp * sizes.mlp + attention
    recomputed = cfg.model.gradient_checkpointing if recomputed is None else recomputed
    stream = (product if cfg.lora.r else 4) * sizes.width
    return num_tokens * (sizes.layers * stream + layer if recomputed else sizes.layers * layer)


def cache(sizes: Sizes, cfg: Any, device_type: str) -> float:
    """Keys and values of what the local engine samples at a time, at their longest; prompts as far as bound."""
    if not hasattr(cfg, "rollout") or cfg.rollout.engine != "local":
        return 0
    completions = min(cfg.rollout.max_batch_size, cfg.run.sequences_per_step)
    per_token = 2 * sizes.layers * sizes.key * product_bytes(cfg, device_type)
    return completions * (longest(cfg) or 0) * per_token


def product_bytes(cfg: Any, device_type: str) -> int:
    """Of one number in a matrix product."""
    if cfg.model.dtype == "auto":
        return 4 if device_type == "cpu" else 2
    return 4 if cfg.model.dtype == "float32" else 2


def micro_batch_tokens(cfg: Any) -> int:
    """The most one forward holds: what is allowed, or all there is of an accumulation step."""
    limit, length = cfg.run.max_tokens_per_micro_batch, longest(cfg)
    if length is None:
        return limit
    sequences = cfg.run.per_device_train_batch_size * (2 if hasattr(cfg, "response") else 1)  # pairs have two
    return max(min(limit, sequences * length), min(length, sequences * length))


def longest(cfg: Any) -> int | None:
    """Tokens of the longest sequence that the settings admit; None where they do not say."""
    if hasattr(cfg, "max_completion_length"):
        return (cfg.max_prompt_length or 0) + cfg.max_completion_length
    return cfg.response.max_length if hasattr(cfg, "response") else getattr(cfg, "max_length", None)


def copies_reference(cfg: Any) -> bool:
    """Whether a second model is held to compare with."""
    if cfg.lora.r:
        return False
    if hasattr(cfg, "reference"):
        return cfg.reference.ref in ("auto", "copy") and not getattr(cfg, "reference_free", False)
    return hasattr(cfg, "policy_loss") and cfg.policy_loss.beta > 0
