"""Weights for servers vs. transformers' saved models and peft's merged adapters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights

CPU = torch.device("cpu")
COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "llama-tied": ("llama", {**COMMON, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", COMMON),
    "qwen3-tied": ("qwen3", {**COMMON, "head_dim": 8, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {**COMMON, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}),
}


def make_model(kind: str) -> Any:
    name, settings = KINDS[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings))


def policy_of(model: nn.Module) -> Policy:
    return Policy(model=model, tokenizer=None, source="/somewhere/base", device=CPU, compute_dtype=torch.float32)


def with_lora(model: nn.Module, **settings: Any) -> Any:
    """Add an adapter with nonzero weights: peft initialises B, and an embedding's A, to zero."""
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    )
    wrapped = get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_match_save_pretrained(kind, tmp_path):
    model = make_model(kind)
    tensors = dict(PolicyWeights(policy_of(model), torch.float32).tensors())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
def test_specs_match_tensors_in_order(kind):
    source = PolicyWeights(policy_of(make_model(kind)), torch.bfloat16)
    specs = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in source.tensors()]
    assert [(spec.name, spec.shape, spec.dtype) for spec in source.specs()] == specs
    assert {dtype for _, _, dtype in specs} == {torch.bfloat16}
    layers = [name.split(".")[2] for name, _, _ in specs if name.startswith("model.layers.")]
    assert layers == sorted(layers)  # a server can finish each layer before the next


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "target_modules": ["q_proj", "embed_tokens"]},
        {"alpha_pattern": {"q_proj": 32}, "rank_pattern": {"q_proj": 2}},
    ],
)
def test_merged_adapter_matches_peft_and_does_not_change_the_policy(settings):
    model = with_lora(make_model("llama-tied"), **settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = dict(PolicyWeights(policy_of(model), torch.float32).tensors())
    merged = copy.deepcopy(model).merge_and_unload()
    expected = {name: tensor.detach() for name, tensor in merged.named_parameters()}
    assert tensors.keys() == expected.keys()
    assert max(float((tensors[name] - expected[name]).abs().max()) for name in tensors) < 1e-6
    base = {name: tensor.detach() for name, tensor in make_model("llama-tied").named_parameters()}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (tensors[name] - base[name]).abs().max() > 0.01
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_bfloat16_base_is_merged_in_float32_and_rounded_once():
    model = with_lora(make_model("llama"))
    name, layer = next((n, m) for n, m in model.get_base_model().named_modules() if n.endswith("layers.0.mlp.up_proj"))
    layer.base_layer.weight.data = layer.base_layer.weight.data.bfloat16()
    merged = dict(PolicyWeights(policy_of(model), torch.bfloat16).tensors())[f"{name}.weight"]
    exact = layer.base_layer.weight.double() + layer.get_delta_weight("default").double()
    assert torch.equal(merged, exact.float().bfloat16())


def test_adapter_folder_loads_in_peft_and_names_its_base(tmp_path):
    model = with_lora(make_model("llama"))
    PolicyWeights(policy_of(model), torch.float32).save_adapter(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "/somewhere/base"
    peft_names = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == peft_names
    again = PeftModel.from_pretrained(make_model("llama"), tmp_path)
    ids = torch.arange(3, 13).view(1, -1)
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_only_the_trained_adapter_is_used(tmp_path):
    model = with_lora(make_model("llama"))
    alone = dict(PolicyWeights(policy_of(model), torch.float32).tensors())
    model.add_adapter("reference", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    both = PolicyWeights(policy_of(model), torch.float32)
    assert all(torch.equal(alone[name], tensor) for name, tensor in both.tensors())
    both.save_adapter(tmp_path)
    assert not any("reference" in path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_adapter_that_vllm_cannot_serve_is_rejected(settings, message):
    with pytest.raises(ValueError, match=f"^{message}.*--rollout.engine local"):
        PolicyWeights(policy_of(with_lora(make_model("llama"), **settings)), torch.float32)


def test_adapter_with_several_ranks_is_merged_but_not_saved_for_vllm(tmp_path):
    source = PolicyWeights(policy_of(with_lora(make_model("llama"), rank_pattern={"q_proj": 2})), torch.float32)
    with pytest.raises(ValueError, match="rank_pattern=.*use --sync.backend"):
        source.save_adapter(tmp_path)


def test_abandoned_source_keeps_gradients_enabled():
    source = PolicyWeights(policy_of(with_lora(make_model("llama"))), torch.float32)
    tensors = source.tensors()
    next(tensors)
    assert torch.is_grad_enabled()
    assert not next(tensors)[1].requires_grad


def test_weights_are_read_again_for_each_sync():
    model = make_model("llama")
    source = PolicyWeights(policy_of(model), torch.float32)
    first = {name: tensor.clone() for name, tensor in source.tensors()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(first[name] + 1.0, tensor) for name, tensor in source.tensors())


def test_saving_an_adapter_is_deterministic(tmp_path: Path):
    model = with_lora(make_model("llama"))
    for name in ("a", "b"):
        PolicyWeights(policy_of(model), torch.float32).save_adapter(tmp_path / name)
    assert [p.read_bytes() for p in sorted((tmp_path / "a").iterdir())] == [
        p.read_bytes() for p in sorted((tmp_path / "b").iterdir())
    ]
