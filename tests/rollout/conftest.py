"""Tiny random models and a byte tokenizer, built in code without downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One id per byte (0 to 255), then <pad> 256 and <eos> 257."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """make_model("llama" | "qwen3", vocab_size=.., seed=..): random weights, large enough to be far from uniform."""

    def build(kind: str = "llama", *, vocab_size: int = 258, seed: int = 0, **extra: Any) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

        config_class, model_class = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        }[kind]
        settings = dict(
            vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3,
            attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(seed)
        return model_class(config_class(**{**settings, **extra}))

    return build
