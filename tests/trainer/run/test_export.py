from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

from trainer.policy.adapters import freeze_except
from trainer.policy.model_files import ExportedModel, write_model
from trainer.run import export
from trainer.run.checkpoint import save_checkpoint
from trainer.run.export import (
    ExportConfig,
    describe_model,
    dtype_on_disk,
    export_checkpoint,
    export_model,
    loadable_base,
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IDS = torch.arange(3, 15).view(1, -1)


def byte_tokenizer() -> Any:
    """256 bytes and three special tokens; eos (<|end|>) differs from the template's end of turn (<|im_end|>)."""
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama(tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def with_lora(model: nn.Module) -> Any:
    """Add an adapter with an effect: peft initialises B to zero."""
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return peft_model.eval()


@pytest.fixture
def base(tmp_path: Path) -> str:
    tiny_llama().save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_full_export_loads_with_equal_logits(tmp_path, tied):
    model, folder = tiny_llama(tied), tmp_path / "final"
    model.save_pretrained(tmp_path / "base")
    for parameter in model.parameters():
        parameter.data.add_(0.01)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    export_model(model, byte_tokenizer(), folder, merge_lora=False, base=str(tmp_path / "base"))

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (config, generation) == (model.config.to_dict(), model.generation_config.to_dict())
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.pt"))
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_export_keeps_tokenizer_template_and_every_stop_id(tmp_path, base):
    model, tokenizer = tiny_llama(), byte_tokenizer()
    model.generation_config.eos_token_id = 7
    export_model(model, tokenizer, tmp_path / "final", merge_lora=False, base=base)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "final")
    messages = [{"role": "user", "content": "caf\u00e9 12+3="}]
    rendered = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert rendered == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    generation = json.loads((tmp_path / "final" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [7, 0, 2]
    assert generation["pad_token_id"] == 0


def test_pipeline_answers_messages_and_stops_at_the_end_of_turn(tmp_path, base):
    """The head always prefers one byte, then the end of turn, so the answer must be exactly that byte."""
    model, tokenizer = tiny_llama(tied=False), byte_tokenizer()
    letter, end = tokenizer.convert_tokens_to_ids("A"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()  # disable the layers: the next token depends only on the last token
        model.model.embed_tokens.weight.zero_()[:, 0] = 1.0
        model.model.embed_tokens.weight[letter] = torch.eye(16)[1]
        model.lm_head.weight.zero_()
        model.lm_head.weight[letter, 0] = 1.0
        model.lm_head.weight[end, 1] = 1.0
    export_model(model, tokenizer, tmp_path / "final", merge_lora=False, base=base)
    chat = pipeline("text-generation", model=str(tmp_path / "final"))
    answer = chat([{"role": "user", "content": "hello"}], max_new_tokens=20, do_sample=False)
    assert answer[0]["generated_text"][-1] == {"role": "assistant", "content": "A"}


def test_export_has_the_dtype_of_the_base_on_disk(tmp_path):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.lm_head.weight.data.add_(1e-4)
    export_model(model, byte_tokenizer(), tmp_path / "final", merge_lora=False, base=str(tmp_path / "base"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16)), name


def test_dtype_of_a_deleted_base_is_unknown(tmp_path):
    assert dtype_on_disk(str(tmp_path / "gone")) is None


def test_adapter_export_loads_with_its_base(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = with_lora(AutoModelForCausalLM.from_pretrained("base"))
    export_model(model, byte_tokenizer(), tmp_path / "final", merge_lora=False, base="base")
    config = json.loads((tmp_path / "final" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base
    assert not (tmp_path / "final" / "README.md").exists()
    monkeypatch.chdir("/")  # from anywhere
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final")
    assert torch.equal(logits(loaded), logits(model))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "final")
    assert torch.equal(logits(plain), logits(model))
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == TEMPLATE
    answer = pipeline("text-generation", model=str(tmp_path / "final"))(
        [{"role": "user", "content": "hello"}], max_new_tokens=2, do_sample=False
    )
    assert answer[0]["generated_text"][-1]["role"] == "assistant"


def test_adapter_export_excludes_a_reference_adapter(tmp_path, base):
    model = with_lora(AutoModelForCausalLM.from_pretrained(base))
    export_model(model, byte_tokenizer(), tmp_path / "one", merge_lora=False, base=base)
    model.load_adapter(tmp_path / "one", "reference", is_trainable=False)
    export_model(model, byte_tokenizer(), tmp_path / "two", merge_lora=False, base=base)
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == sorted(p.name for p in (tmp_path / "two").iterdir())
    export_model(model, byte_tokenizer(), tmp_path / "merged", merge_lora=True, base=base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-4)


def test_merged_export_is_a_plain_model_and_leaves_the_live_model_unchanged(tmp_path, base):
    model = with_lora(AutoModelForCausalLM.from_pretrained(base))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = logits(model)
    export_model(model, byte_tokenizer(), tmp_path / "final", merge_lora=True, base=base)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model), expected)
    assert not (tmp_path / "final" / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-4)
    unadapted = logits(AutoModelForCausalLM.from_pretrained(base))
    assert (unadapted - expected).abs().max() > 0.01, "the adapter of this test must do something"


def test_merged_export_rounds_once_to_the_dtype_on_disk(tmp_path):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = with_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16))
    export_model(model, byte_tokenizer(), tmp_path / "final", merge_lora=True, base=str(tmp_path / "base"))
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    exact = layer.base_layer.weight.float() + (b @ a) * layer.scaling["default"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final").model.layers[0].mlp.up_proj.weight
    assert torch.equal(saved, exact.to(torch.bfloat16))


def test_export_replaces_an_older_export(tmp_path, base):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "adapter_config.json").write_text("{}")
    export_model(tiny_llama(), byte_tokenizer(), tmp_path / "final", merge_lora=False, base=base)
    assert not (tmp_path / "final" / "adapter_config.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "final"]


def test_failed_export_keeps_the_older_export(tmp_path, base, monkeypatch):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "old").touch()
    tokenizer = byte_tokenizer()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(ValueError, match=r"export=.*final: could not be written \(No space left on device\)"):
        export_model(tiny_llama(), tokenizer, tmp_path / "final", merge_lora=False, base=base)
    assert [p.name for p in (tmp_path / "final").iterdir()] == ["old"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "final"]


def test_contradictory_generation_config_does_not_stop_an_export(tmp_path, base):
    model = tiny_llama()
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.6
    export_model(model, byte_tokenizer(), tmp_path / "final", merge_lora=False, base=base)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final").generation_config.eos_token_id == [0, 2]


def test_base_names_load_from_anywhere(tmp_path, monkeypatch, base):
    monkeypatch.chdir(tmp_path)
    assert loadable_base("base") == base
    assert loadable_base("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert loadable_base("builtin:tiny") == str(Path(export.__file__).parents[1] / "tiny")


def checkpoint_of(run: Path, model: Any, base: str) -> None:
    """Write the files of a run folder that an export reads."""
    run.mkdir()
    (run / "config.yaml").write_text(f"method: sft\nmodel: {base}\n")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    save_checkpoint(
        run / "checkpoints", 3, model, optimizer, schedule, {}, keep=1,
        describe=lambda folder: describe_model(model, byte_tokenizer(), folder, base=base),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["full", "part", "adapter", "merged"])
def test_checkpoint_export_equals_the_live_export(tmp_path, kind):
    is_full = kind in ("full", "part")
    tiny_llama(tied=is_full).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    dtype = torch.float32 if is_full else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if is_full:
        model.model.norm.weight.data.add_(1e-3)
        freeze_except(model, ("model.norm",) if kind == "part" else ())
    else:
        model = with_lora(model)
    checkpoint_of(tmp_path / "run", model, base)
    export_model(model, byte_tokenizer(), tmp_path / "live", merge_lora=kind == "merged", base=base)
    out = ExportConfig(source=str(tmp_path / "run"), out=str(tmp_path / "out"), merge_lora=kind == "merged")
    export_checkpoint(out)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in (tmp_path / "live").iterdir())
    for path in (tmp_path / "live").iterdir():
        if path.suffix == ".safetensors":
            exported, live = load_file(tmp_path / "out" / path.name), load_file(path)
            assert exported.keys() == live.keys() and all(torch.equal(exported[name], live[name]) for name in live)
        else:
            assert (tmp_path / "out" / path.name).read_text() == path.read_text(), path.name
    with pytest.raises(ValueError, match="out=.*out: already exists"):
        export_checkpoint(out)


def test_large_model_is_written_in_several_files(tmp_path):
    model = tiny_llama(tied=False)
    whole = ExportedModel(model, torch.float32, model.state_dict().__getitem__)
    write_model(tmp_path, whole, limit=10_000)
    model.config.save_pretrained(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(len(load_file(tmp_path / name)) == 1 or (tmp_path / name).stat().st_size < 12_000 for name in files)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_source_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="not a run folder with a checkpoint"):
        export_checkpoint(ExportConfig(source=str(tmp_path), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
