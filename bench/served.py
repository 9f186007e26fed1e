"""A policy with random weights and a vLLM server for it, for the benchmarks of rollout and weight sync."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.common import QWEN3_0_6B, QWEN3_1_7B
from rollout.engines.local import LocalEngine
from rollout.engines.vllm import VllmEngine
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.config.blocks import LoraConfig
from trainer.parallel.comm import pick_device
from trainer.policy.adapters import add_adapter
from trainer.policy.attention import choose_attention
from trainer.policy.load import BUILTIN
from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights

SHAPES = {
    "tiny": {
        "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 256, "vocab_size": 275, "tie_word_embeddings": True, "max_position_embeddings": 512,
    },
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-1.7b": QWEN3_1_7B,
}  # fmt: skip
CONTEXT = 2048  # tokens; the tiny model has 512


@contextlib.contextmanager
def serving(
    shape: str, *, vllm: VllmConfig, sync: SyncConfig, lora_rank: int, max_model_len: int = CONTEXT
) -> Iterator[tuple[Policy, VllmEngine]]:
    """The policy, held in float32 and computed in bfloat16 on a GPU, and its server, both gone at the end."""
    device = pick_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    folder = Path(tempfile.mkdtemp(prefix="strop-bench-"))
    try:
        policy = random_policy(shape, folder, device, dtype, lora_rank)
        engine = VllmEngine(
            vllm,
            sync,
            model=str(folder / "model"),
            source=PolicyWeights(policy, dtype),
            local=LocalEngine(policy.model, policy.tokenizer, autocast_dtype=policy.autocast_dtype),
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            lora_rank=lora_rank,
            log_dir=folder / "logs",
            max_model_len=min(max_model_len, SHAPES[shape]["max_position_embeddings"]),
        )
        with contextlib.closing(engine):
            yield policy, engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def random_policy(shape: str, folder: Path, device: torch.device, dtype: torch.dtype, lora_rank: int) -> Policy:
    """Random weights, the same in the policy and in folder/model, with the tokenizer of the built-in model."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**SHAPES[shape], attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN["builtin:tiny"])
    tokenizer.save_pretrained(folder / "model")
    choose_attention(model, "auto", device)
    policy = Policy(model=model, tokenizer=tokenizer, source=str(folder / "model"), device=device, compute_dtype=dtype)
    policy.model = add_adapter(model, LoraConfig(r=lora_rank)).to(device) if lora_rank else model.float()
    return policy


def change(policy: Policy, seed: int) -> None:
    """Other trained weights, as after an optimizer step but larger, so that a sync that did nothing would show."""
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter.add_(noise.to(parameter.dtype), alpha=0.005)


def free_gib() -> float:
    """Memory of the GPU that nobody holds."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30
