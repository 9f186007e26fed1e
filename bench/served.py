"""A policy with random weights and a vLLM server for it, for the benchmarks of rollout and weight sync."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rollout.engines.local import LocalEngine
from rollout.engines.vllm import VllmEngine
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.config.blocks import LoraConfig
from trainer.parallel.comm import pick_device
from trainer.plan import FIELDS, KNOWN, known_config
from trainer.policy.adapters import add_adapter
from trainer.policy.attention import choose_attention
from trainer.policy.load import BUILTIN
from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights

# Shapes in addition to trainer.plan's: model type, the values of its FIELDS, and the context length.
OWN = {
    "tiny": ("qwen3", 128, 256, 3, 4, 2, 32, 275, True, 512),
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True, 8192),
}
# Models whose layers carry state or have experts: model type and config. They have the proportions of Qwen3.5, of LFM2,
# and of Qwen3-30B-A3B with a sixth of its layers.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-1b": ("qwen3_5_text", {
        "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    }),
    "lfm2-1.2b": ("lfm2", {
        "hidden_size": 2048, "intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "tie_word_embeddings": True,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        "conv_dim": 2048, "block_dim": 2048,  # in released files; vLLM reads them
    }),
    "qwen3-moe-5b": ("qwen3_moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "tiny-qwen3-moe": ("qwen3_moe", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "vocab_size": 512, "tie_word_embeddings": True,
    }),
    "tiny-qwen3.5": ("qwen3_5_text", {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention"],
    }),
}  # fmt: skip
CONTEXT = 2048  # tokens; the tiny model has 512


@contextlib.contextmanager
def serving(shape: str, *, vllm: VllmConfig, sync: SyncConfig, lora_rank: int) -> Iterator[tuple[Policy, VllmEngine]]:
    """Create the policy (float32 weights, bfloat16 compute on a GPU) and its server, and remove both at the end."""
    with scratch() as folder:
        policy = random_policy(shape, folder, lora_rank=lora_rank)
        with server_of(policy, folder, vllm=vllm, sync=sync, lora_rank=lora_rank) as engine:
            yield policy, engine


@contextlib.contextmanager
def server_of(
    policy: Policy,
    folder: Path,
    *,
    vllm: VllmConfig,
    sync: SyncConfig,
    lora_rank: int = 0,
    max_model_len: int = CONTEXT,
) -> Iterator[VllmEngine]:
    """Start a server of the model in folder/model, and its client."""
    dtype = policy.compute_dtype
    engine = VllmEngine(
        vllm,
        sync,
        model=str(folder / "model"),
        source=PolicyWeights(policy, dtype),
        local=LocalEngine(policy.model, policy.tokenizer, autocast_dtype=policy.autocast_dtype),
        device=policy.device,
        dtype=str(dtype).removeprefix("torch."),
        lora_rank=lora_rank,
        log_dir=folder / "logs",
        max_model_len=min(max_model_len, policy.model.config.max_position_embeddings),
    )
    with contextlib.closing(engine):
        yield engine


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="strop-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def shape_config(shape: str) -> Any:
    """Return the transformers config of a shape."""
    from transformers import AutoConfig

    if shape in OWN:
        kind, *values = OWN[shape]
        return AutoConfig.for_model(kind, **dict(zip((*FIELDS, "max_position_embeddings"), values, strict=True)))
    if shape not in {**KNOWN, **HYBRIDS}:
        raise ValueError(f"shape={shape}: must be one of {', '.join([*OWN, *KNOWN, *HYBRIDS])}")
    kind, values = HYBRIDS.get(shape, ("", {}))
    config = AutoConfig.for_model(kind, **values) if kind else known_config(shape)
    config.max_position_embeddings = 40960
    return config


def random_policy(shape: str, folder: Path | None, *, lora_rank: int = 0, held: torch.dtype = torch.float32) -> Policy:
    """Create random weights with the tokenizer of the built-in model, and save them in folder/model if given.

    Products are in bfloat16 on a GPU. Weights are rounded to that first, so that `held` changes no product.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = pick_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=dtype, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN["builtin:tiny"])
    source = str(folder / "model") if folder else shape
    if folder:
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    choose_attention(model, "auto", device)
    policy = Policy(model=model, tokenizer=tokenizer, source=source, device=device, compute_dtype=dtype)
    if lora_rank:
        policy.model = add_adapter(model, LoraConfig(r=lora_rank)).to(device)
        return policy
    for parameter in model.parameters():  # not model.to(held): rotary frequencies stay float32, as in a loaded model
        parameter.data = parameter.data.to(held)
    return policy


def change(policy: Policy, seed: int) -> None:
    """Change the trained weights by more than an optimizer step would, so that a missing sync is detected."""
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter.add_(noise.to(parameter.dtype), alpha=0.005)


def free_gib() -> float:
    """Return the free GPU memory."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30
