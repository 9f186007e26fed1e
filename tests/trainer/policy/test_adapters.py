"""Adapters by pattern, rsLoRA, DoRA and fully trained modules: train, sample, save, load and merge."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.packing import Item, make_batches
from rollout.engines.adapter_share import sampler_logps
from rollout.engines.forward import BlockForward, TransformersForward
from tests.entry import metrics, repeatable
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.load import BUILTIN, load_policy
from trainer.policy.logps import Policy, causal_lm, reference_logps
from trainer.policy.model_files import ExportedModel
from trainer.run.export import export_model

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 40, 7, 100, 3]])
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, initializer_range=0.2, vocab_size=275, bos_token_id=None, eos_token_id=2,
             pad_token_id=0)  # fmt: skip
KINDS = {
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "saved": {"modules_to_save": ("embed_tokens", "lm_head")},
    "all": {"rslora": True, "dora": True, "modules_to_save": ("lm_head", "norm")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama with an untied head."""
    return make_model(tmp_path_factory.mktemp("model"), tie=False)


def make_model(folder: Path, *, tie: bool) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=tie)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN["builtin:tiny"]).save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> Policy:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, alpha=8, **settings)
    return load_policy(ModelConfig(model=str(folder)), lora, CPU, with_reference=False)


def change(policy: Policy) -> Policy:
    """Move every trained parameter, as training would."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    policy.model.eval()
    return policy


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits[0]


def merged_weights(policy: Policy) -> dict[str, Tensor]:
    lm = causal_lm(policy.model)
    return dict(ExportedModel(lm, torch.float32, lm.state_dict().get).tensors())


@pytest.mark.parametrize(
    "pattern", [r".*layers\.1\.self_attn\.(q|v)_proj", r"model\.layers\.\d+\.mlp\..*_proj", r".*\.(up|down)_proj"]
)
def test_pattern_matches_full_module_names(pattern, folder):
    policy, base = load(folder, target_modules=(pattern,)), load(folder)
    linear = [name for name, module in causal_lm(base.model).named_modules() if hasattr(module, "lora_A")]
    expected = {name for name in linear if re.fullmatch(pattern, name)}
    assert expected and expected != set(linear)
    assert {name for name, m in causal_lm(policy.model).named_modules() if hasattr(m, "lora_A")} == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ("q_proj", "(up|down)_proj")}, r"\(up\|down\)_proj"),
        ({"target_modules": ("(q_proj",)}, r"lora.target_modules=\(q_proj: .*missing \)"),
        ({"target_modules": (".*nothing",)}, "lora.target_modules=.*nothing: "),
        ({"target_modules": ("no_such",)}, "lora.target_modules=no_such: "),
        ({"target_modules": ("lm_head",)}, "lora.target_modules: .*lm_head"),
        ({"target_modules": (".*lm_head|.*q_proj",)}, "lora.target_modules: .*lm_head"),
        ({"modules_to_save": ("embeddings",)}, "lora.modules_to_save=embeddings: "),
    ],
)
def test_invalid_targets_are_rejected(settings, message, folder):
    with pytest.raises(ValueError, match=message):
        load(folder, **settings)


def test_tied_head_or_embedding_cannot_be_trained_in_full(tmp_path):
    tied = make_model(tmp_path, tie=True)
    for names in (("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")):
        with pytest.raises(ValueError, match=f"lora.modules_to_save={' '.join(names)}: .*--lora.r 0"):
            load(tied, modules_to_save=names)
    assert load(tied, modules_to_save=("norm",))


def test_rslora_scales_by_alpha_over_sqrt_rank(folder):
    policy = change(load(folder, rslora=True))
    layer = causal_lm(policy.model).model.layers[0].self_attn.q_proj
    b, a = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    want = layer.base_layer.weight + 8 / math.sqrt(4) * b @ a
    assert torch.allclose(merged_weights(policy)["model.layers.0.self_attn.q_proj.weight"], want, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_export_and_load_reproduce_the_trained_model(name, folder, tmp_path):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    before = logits(load(folder).model.eval())
    policy = change(load(folder, **KINDS[name]))
    assert all(p.dtype == torch.float32 for p in policy.model.parameters() if p.requires_grad)
    want = logits(policy.model)
    assert (want - before).abs().max() > 0.1
    for merge in (False, True):
        out = tmp_path / str(merge)
        export_model(policy.model, policy.tokenizer, out, merge_lora=merge, base=policy.source)
        kind = AutoModelForCausalLM if merge else AutoPeftModelForCausalLM
        assert torch.allclose(logits(kind.from_pretrained(out).eval()), want, atol=2e-5), merge
    saved, lora = ModelConfig(model=str(tmp_path / "False")), LoraConfig(r=4, alpha=8, **KINDS[name])
    again = load_policy(saved, lora, CPU, with_reference=True)
    assert torch.allclose(logits(again.model.eval()), want, atol=1e-6)
    merged = load_policy(saved, LoraConfig(), CPU, with_reference=False)
    assert torch.allclose(logits(merged.model.eval()), want, atol=2e-5)


def test_continued_adapter_keeps_its_settings(folder, tmp_path):
    policy = load(folder, rslora=True, modules_to_save=("norm",))
    export_model(policy.model, policy.tokenizer, tmp_path / "a", merge_lora=False, base=policy.source)
    model = ModelConfig(model=str(tmp_path / "a"))
    for settings, message in (
        ({"modules_to_save": ("norm",)}, "lora.rslora=False: .* has True"),
        ({"rslora": True}, "lora.modules_to_save=: .* has norm"),
    ):
        with pytest.raises(ValueError, match=message):
            load_policy(model, LoraConfig(r=4, alpha=8, **settings), CPU, with_reference=False)


def test_reference_is_the_untrained_base(folder):
    plain, changed = load(folder), change(load(folder, **KINDS["all"]))
    (batch,) = make_batches([Item(ids=IDS[0].tolist(), mask=[False] + [True] * 5)], max_tokens=64)
    plain.model.eval()
    assert torch.equal(reference_logps(plain, batch), reference_logps(changed, batch))


@pytest.mark.parametrize("name", ["rslora", "saved"])
def test_engine_copies_follow_fully_trained_modules(name, folder):
    """On a GPU the engine samples from these copies, which are refreshed after the weights change."""
    policy = load(folder, **KINDS[name])
    lm = causal_lm(policy.model)
    block, copied = BlockForward(lm, torch.float32), TransformersForward(lm, torch.float32, copied=True)
    change(policy)
    for forward in (block, copied):
        forward.refresh()
    want = logits(policy.model.eval()).log_softmax(dim=-1)
    block.cover(IDS.shape[1])
    with torch.no_grad():
        assert torch.allclose(sampler_logps(block, IDS), want, atol=1e-4)
        assert torch.allclose(copied.lm(input_ids=IDS).logits.log_softmax(dim=-1), want, atol=1e-4)


ARGV = ["--method", "grpo", "--lora.r", "4", "--lora.dora", "--lora.modules-to-save", "lm_head",
        "--per-device-train-batch-size", "8", "--num-generations", "4", "--max-completion-length", "8", "--save-steps",
        "2", "--learning-rate", "0.05", "--reward-funcs", "regex:[a-m]", "--data", "task:addition:split=train,size=16",
        "--beta", "0.1", "--lr-scheduler-type", "constant"]  # fmt: skip


@pytest.mark.slow
def test_run_samples_from_trained_weights_and_resumes(folder, tmp_path, capfd):
    argv = [*ARGV, "--model", str(folder)]
    assert main([*argv, "--max-steps", "4", "--output-dir", str(tmp_path / "whole")]) == 0
    assert main([*argv, "--max-steps", "2", "--output-dir", str(tmp_path / "half")]) == 0
    assert main(["--resume", str(tmp_path / "half"), "--max-steps", "4"]) == 0
    whole = repeatable(metrics(tmp_path / "whole"))
    assert repeatable(metrics(tmp_path / "half")) == whole
    kl = [row["policy/ref_kl_k3"] for row in whole if row["step"]]
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[-1] > 0.01, "the policy left the base"
    assert all(row["policy/behaviour_gap"] < 1e-4 for row in whole if row["step"]), "the engine has the same weights"
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000004"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["use_dora"]
    lora = LoraConfig(r=4, dora=True, modules_to_save=("lm_head",))
    loaded = load_policy(ModelConfig(model=str(checkpoint)), lora, CPU, with_reference=False)
    final = load_policy(ModelConfig(model=str(tmp_path / "whole")), LoraConfig(), CPU, with_reference=False)
    assert torch.allclose(logits(loaded.model.eval()), logits(final.model.eval()), atol=1e-4)
