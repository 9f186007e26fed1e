"""Scorers vs. plain transformers: packed, padded, single sequences, and loaded from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.chat import stop_ids
from data.packing import Item, make_batches
from tests.models import make_model, save
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.heads import KINDS, NEW_PAD, check_scores, head_of, load_scorer, marked_last, scores_at, start_head
from trainer.policy.logps import Policy
from trainer.run.export import export_model
from trainer.tiny.build import make_tokenizer

CPU = torch.device("cpu")
COMMON = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.2, bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen3": {**COMMON, "head_dim": 8},
    "mistral": {**COMMON, "sliding_window": 4},  # shorter than the sequences below
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, eos_token_id=2, pad_token_id=0,
                 bos_token_id=None, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
}  # fmt: skip
SEQUENCES = [[5, 9, 31, 4, 77, 8, 2], [6, 2], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 2], [90, 91, 92, 2]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[..., Path]:
    """folder_of("qwen3"): a random language model of that architecture, with a byte tokenizer."""

    def build(name: str, tokenizer: Any = None, **changes: Any) -> Path:
        tokenizer = tokenizer or make_tokenizer()
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(name)
        config = transformers.AutoConfig.for_model(
            name, **{"vocab_size": len(tokenizer), **ARCHITECTURES[name], **changes}
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return build


def load(folder: Path | str, kind: str, lora: LoraConfig | None = None, **settings: Any) -> Policy:
    torch.manual_seed(1)
    scorer = load_scorer(ModelConfig(model=str(folder), **settings), lora or LoraConfig(), CPU, kind=kind)
    with torch.no_grad():  # move every trained parameter, even an adapter's zeros
        for parameter in scorer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return scorer


def export(scorer: Policy, folder: Path) -> Path:
    export_model(scorer.model, scorer.tokenizer, folder, merge_lora=False, base=scorer.source)
    return folder


def packed_scores(scorer: Policy, items: list[Item], **how: Any) -> Tensor:
    """Return the scores in the order of the items."""
    scores: dict[tuple[int, int], Tensor] = {}
    for batch in make_batches(items, max_tokens=how.pop("max_tokens", 1000), **how):
        for i, score in enumerate(scores_at(scorer, batch)):
            scores[int(batch.sequence[i]), i] = score
    return torch.stack([scores[key] for key in sorted(scores)])


@torch.no_grad()
def plain_scores(folder: Path, kind: str, sequences: list[list[int]], side: str) -> Tensor:
    """Score an export with plain transformers: the tokenizer pads, the model's forward scores."""
    model = getattr(transformers, KINDS[kind].auto_class).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    batch = tokenizer.pad({"input_ids": sequences}, return_tensors="pt")
    position_ids = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)  # gpt2 would count padding
    logits = model(**batch, position_ids=position_ids).logits
    if kind == "sequence":
        return logits
    last = batch["attention_mask"].flip(1).argmax(dim=1)
    return logits[torch.arange(len(logits)), logits.shape[1] - 1 - last]


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "token"), ("qwen3", "sequence"), ("mistral", "token"), ("gpt2", "sequence")]
)
def test_packed_padded_and_plain_transformers_agree(name, kind, folder_of, tmp_path):
    scorer = load(folder_of(name), kind)
    items = [marked_last(ids) for ids in SEQUENCES]
    packed = packed_scores(scorer, items)
    assert packed.shape == (len(SEQUENCES), len(KINDS[kind].labels)) and packed.std() > 0.05
    torch.testing.assert_close(packed_scores(scorer, items, packing=False), packed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed_scores(scorer, items, max_tokens=12), packed, rtol=1e-5, atol=1e-5)
    export(scorer, tmp_path / "final")
    for side in ("right", "left"):
        plain = plain_scores(tmp_path / "final", kind, SEQUENCES, side)
        torch.testing.assert_close(plain, packed, rtol=1e-5, atol=1e-5)


def pad_is_eos(tokenizer: Any) -> Any:
    """As in TRL, the padding token also ends every sequence."""
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def no_pad(tokenizer: Any) -> Any:
    tokenizer.pad_token = None
    return tokenizer


def with_reserved(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>"]})
    return pad_is_eos(tokenizer)


@pytest.mark.parametrize(("change", "room"), [(pad_is_eos, 0), (no_pad, 8), (with_reserved, 0)])
def test_score_is_read_at_the_end_token_even_if_it_was_the_padding(change, room, folder_of, tmp_path):
    tokenizer = change(make_tokenizer())
    folder = folder_of("llama", tokenizer, vocab_size=len(tokenizer) + room, pad_token_id=tokenizer.pad_token_id)
    scorer = load(folder, "sequence")
    assert scorer.tokenizer.pad_token_id not in stop_ids(scorer.tokenizer)
    assert scorer.tokenizer.pad_token == ("<|reserved_0|>" if change is with_reserved else NEW_PAD)
    rows = scorer.model.get_input_embeddings().weight.shape[0]
    assert rows == len(tokenizer) + room + (1 if room == 0 and change is not with_reserved else 0)

    packed = packed_scores(scorer, [marked_last(ids) for ids in SEQUENCES])
    plain = plain_scores(export(scorer, tmp_path / "final"), "sequence", SEQUENCES, "right")
    torch.testing.assert_close(plain, packed, rtol=1e-5, atol=1e-5)
    before_end = packed_scores(scorer, [marked_last(ids[:-1]) for ids in SEQUENCES if len(ids) > 2])
    assert (before_end - packed[[0, 2, 3]]).abs().min() > 1e-3, "the token before the end must have another score"


def test_padding_that_never_ends_a_sequence_is_kept(folder_of):
    scorer = load(folder_of("llama"), "sequence")
    assert scorer.tokenizer.pad_token_id == scorer.model.config.pad_token_id == 0


def test_scores_are_read_at_the_marked_tokens(folder_of):
    scorer = load(folder_of("llama"), "token")
    ids = SEQUENCES[2]
    marked = [3, 7, 10]
    item = Item(ids=ids, mask=[i in marked for i in range(len(ids))])
    scores = packed_scores(scorer, [marked_last(SEQUENCES[0]), item])
    logits = scorer.model.eval()(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(scores[1:], logits[marked], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_trains_adapters_and_the_full_head_and_exports_merged(kind, folder_of, tmp_path):
    scorer = load(folder_of("llama"), kind, LoraConfig(r=2))
    trained = {name for name, p in scorer.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "score.modules_to_save" in name for name in trained)
    assert any("score.modules_to_save" in name for name in trained) and not any("score.lora" in n for n in trained)
    packed = packed_scores(scorer, [marked_last(ids) for ids in SEQUENCES])
    plain = plain_scores(export(scorer, tmp_path / "final"), kind, SEQUENCES, "right")
    torch.testing.assert_close(plain, packed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "settings", "message"),
    [
        (LoraConfig(r=2, target_modules=("q_proj", "score")), {}, "lora.target_modules=score"),
        (LoraConfig(r=2), {"dtype": "bfloat16", "trained_dtype": "bfloat16"}, "trained_dtype=bfloat16"),
        (LoraConfig(), {"merge_lora": True}, "merge_lora=True.*lora.r=0"),
        (LoraConfig(r=2), {"load_in_4bit": True}, "load_in_4bit=True"),
    ],
)
def test_unsupported_settings_are_rejected(lora, settings, message, folder_of):
    with pytest.raises(ValueError, match=message):
        load(folder_of("llama"), "sequence", lora, **settings)


def test_bfloat16_keeps_the_head_in_float32(folder_of):
    scorer = load(folder_of("llama"), "sequence", LoraConfig(r=2), dtype="bfloat16")
    assert scorer.model.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    assert {p.dtype for p in head_of(scorer.model).parameters()} == {torch.float32}
    exact = load(folder_of("llama"), "sequence", LoraConfig(r=2))
    items = [marked_last(ids) for ids in SEQUENCES]
    rounded = packed_scores(scorer, items)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - packed_scores(exact, items)).abs().max() < 0.3


def test_bfloat16_weights_and_compiled_blocks_are_in_the_trunk_only(folder_of):
    scorer = load(folder_of("llama"), "sequence", dtype="bfloat16", trained_dtype="bfloat16", compile=True)
    assert {p.dtype for p in scorer.model.base_model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in head_of(scorer.model).parameters()} == {torch.float32}
    assert all(hasattr(block.forward, "_torchdynamo_orig_callable") for block in scorer.model.base_model.layers)


def test_language_model_adapter_is_merged_into_the_trunk(folder_of, tmp_path):
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    folder = folder_of("llama")
    lm = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), PeftLora(r=2, task_type="CAUSAL_LM"))
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    lm.save_pretrained(tmp_path / "adapter")
    make_tokenizer().save_pretrained(tmp_path / "adapter")
    scorer = load_scorer(ModelConfig(model=str(tmp_path / "adapter")), LoraConfig(), CPU, kind="sequence")
    ids = torch.tensor([SEQUENCES[0]])
    want = lm.merge_and_unload().base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(scorer.model.base_model(input_ids=ids).last_hidden_state, want)


def test_trained_head_is_kept_and_an_untrained_head_is_initialised(folder_of, tmp_path):
    first = load(folder_of("llama"), "sequence")
    folder = export(first, tmp_path / "final")
    again = load_scorer(ModelConfig(model=str(folder)), LoraConfig(), CPU, kind="sequence")
    assert torch.equal(again.model.score.weight, first.model.score.weight)
    for value in (float("nan"), 1e5, 0.0):
        weights = load_file(folder / "model.safetensors")
        weights["score.weight"] = torch.full_like(weights["score.weight"], value)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        torch.manual_seed(3)
        fresh = load_scorer(ModelConfig(model=str(folder)), LoraConfig(), CPU, kind="sequence").model.score.weight
        assert fresh.std().item() == pytest.approx(0.2, rel=0.4), value  # initializer_range
    other = load_scorer(ModelConfig(model=str(folder)), LoraConfig(), CPU, kind="token")  # two outputs instead of one
    assert other.model.score.weight.shape == (2, 32) and other.model.score.bias.abs().max() == 0


def test_missing_weights_are_rejected(folder_of):
    folder = folder_of("llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"config.json: 1 tensors .* model.norm.weight"):
        load(folder, "sequence")


def test_models_that_attend_ahead_are_rejected(tmp_path):
    tokenizer = make_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForTokenClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^model={tmp_path}: .*not supported"):
        load(tmp_path, "token")


def test_architectures_without_a_classification_class_are_rejected_by_name(tmp_path):
    folder = save(make_model("lfm2"), tmp_path)
    for kind, name in (("sequence", "Sequence"), ("token", "Token")):
        message = f"^model={folder}: transformers has no {name}Classification class for model_type=lfm2; use another"
        with pytest.raises(ValueError, match=message):
            load(folder, kind)


def test_small_leak_into_the_next_sequence_is_found(folder_of, capsys):
    scorer = load(folder_of("llama"), "sequence")
    check_scores(scorer)

    def leak(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-6 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]  # from the position before

    scorer.model.base_model.layers[0].mlp.register_forward_hook(leak)
    check_scores(scorer)
    assert not scorer.packs
    assert f"model={scorer.source}: one sequence per row, and prompts are not shared: packed sequences leak" in (
        capsys.readouterr().err
    )


def test_new_head_has_the_same_weights_in_any_dtype():
    """So that a run starts with the same head on a GPU and on a CPU."""
    heads = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        heads.append(torch.nn.Linear(8, 2, dtype=dtype))
        torch.manual_seed(1)
        start_head(heads[-1], std=0.5)
    assert torch.equal(heads[0].weight.bfloat16(), heads[1].weight) and heads[0].weight.std() > 0.2
    assert not heads[0].bias.any()
