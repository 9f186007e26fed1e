"""Policies of tiny random models vs. plain transformers and peft."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.errors import UserError
from data.packing import Batch, Item, make_batches
from rollout.engines.adapter_share import sampler_logps
from rollout.engines.forward import TransformersForward
from rollout.engines.load import load_model
from rollout.sync.choose import check_served
from tests.models import make_model, policy_of
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy import attention, logps
from trainer.policy.adapters import add_adapter
from trainer.policy.load import (
    BUILTIN,
    carry_float32,
    load_hollow,
    load_policy,
    recomputing,
    release,
    resolve_model,
)
from trainer.policy.logps import Policy, causal_lm, check_logps, reference_logps, reject_gap, token_logps
from trainer.tiny.build import make_tokenizer

CPU = torch.device("cpu")
WINDOW = 4  # shorter than the sequences below
LENGTHS = (13, 3, 9, 2)
VOCAB = 275  # size of make_tokenizer()
OFF = LoraConfig()
RANK = 4
SAVED = LoraConfig(r=RANK, alpha=8, dropout=0.5)  # settings of the fixture `adapter`

# The large initializer_range moves log-probs far from uniform, so that comparisons are meaningful.
COMMON = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.2, bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
# test_attention.py has more.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "llama-tied": ("llama", {**COMMON, "tie_word_embeddings": True}),
    "gemma2-eager": (  # one sliding and one full layer; caps on attention scores and logits
        "gemma2",
        {**COMMON, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "final_logit_softcapping": 3.0,
         "attn_logit_softcapping": 2.0, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma3-nested": (  # a model of text and images, with a separate text config
        "gemma3",
        {"text_config": {**COMMON, "vocab_size": VOCAB, "head_dim": 8, "query_pre_attn_scalar": 8,
                         "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
         "vision_config": dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                               image_size=28, patch_size=14),
         "mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7,
         "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "gpt2": (  # learned positions, dropout everywhere, a fused projection
        "gpt2",
        dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, bos_token_id=None, eos_token_id=2,
             pad_token_id=0, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    ),
    "gpt_oss": (  # attention sinks
        "gpt_oss",
        {**COMMON, "intermediate_size": 64, "head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 2,
         "num_experts_per_tok": 1},
    ),
    "cohere": ("cohere", {**COMMON, "logit_scale": 0.3}),
    "granite": ("granite", {**COMMON, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
}  # fmt: skip


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """folder_of("llama"): a folder with random weights of that architecture, and a byte tokenizer."""
    folders: dict[str, Path] = {}

    def build(name: str) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        if name not in folders:
            tokenizer = make_tokenizer()
            kind, settings = ARCHITECTURES[name]
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(name)
            config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **settings)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            folders[name] = folder
        return folders[name]

    return build


@pytest.fixture(scope="session")
def adapter(folder_of, tmp_path_factory) -> Path:
    """A saved adapter of the llama above, with dropout and nonzero weights."""
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    config = PeftLora(r=RANK, lora_alpha=8, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(plain_model(folder_of("llama")), config)
    shake(model, 1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, lora: LoraConfig = OFF, *, with_reference: bool = False, **settings: Any) -> Policy:
    if folder.name.split("0")[0].endswith("-eager"):
        settings["attn_implementation"] = "eager"
    return load_policy(ModelConfig(model=str(folder), **settings), lora, CPU, with_reference=with_reference)


def plain_model(folder: Path, attn_implementation: str = "eager") -> Any:
    """Load the model with plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attn_implementation)
    return model.eval()


def shake(model: nn.Module, seed: int) -> None:
    """Move every trained weight, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p.dtype))


def make_items(vocab: int = VOCAB) -> list[Item]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    return [Item(ids=x, mask=[False] + [(t % 4) != 2 for t in range(1, len(x))]) for x in ids]


def batch_of(*, packing: bool = True) -> Batch:
    (batch,) = make_batches(make_items(), max_tokens=1000, packing=packing)
    return batch


@torch.no_grad()
def plain_logps(model: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from transformers' forward on each sequence alone, in the order of batch_of()."""
    items, logps, entropies = make_items(), [], []
    for i in batch_of().rows:
        ids, mask = torch.tensor(items[i].ids), torch.tensor(items[i].mask)
        logp = (model(input_ids=ids.unsqueeze(0)).logits[0, :-1].float() / temperature).log_softmax(dim=-1)
        logps.append(logp.gather(1, ids[1:].unsqueeze(1)).squeeze(1)[mask[1:]])
        entropies.append(-(logp.exp() * logp).sum(dim=-1)[mask[1:]])
    return torch.cat(logps), torch.cat(entropies)


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Gradients of a sum of log-probs and entropies."""
    logp, entropy = token_logps(policy, batch_of())
    (logp * torch.linspace(-1, 1, len(logp)) + 0.3 * entropy).sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_and_padded_logps_match_transformers(folder_of, name):
    policy, plain = load(folder_of(name)), plain_model(folder_of(name))
    assert policy.model.training  # dropout must be off even in training: the engine samples without it
    for temperature in (1.0, 0.7):
        want_logp, want_entropy = plain_logps(plain, temperature)
        assert want_logp.std() > 0.1
        for packing in (True, False):
            logp, entropy = token_logps(policy, batch_of(packing=packing), temperature=temperature)
            assert logp.dtype == entropy.dtype == torch.float32
            assert_same(logp, want_logp)
            assert_same(entropy, want_entropy)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2-eager"])
def test_gradients_match_transformers(folder_of, name):
    policy, plain = load(folder_of(name)), plain_model(folder_of(name))
    items, logps, entropies = make_items(), [], []
    for i in batch_of().rows:
        ids, mask = torch.tensor(items[i].ids), torch.tensor(items[i].mask)[1:]
        logp = plain(input_ids=ids.unsqueeze(0)).logits[0, :-1].log_softmax(dim=-1)[mask]
        logps.append(logp.gather(1, ids[1:][mask].unsqueeze(1)).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(dim=-1))
    logp = torch.cat(logps)
    (logp * torch.linspace(-1, 1, len(logp)) + 0.3 * torch.cat(entropies)).sum().backward()
    want = {key: p.grad for key, p in plain.named_parameters()}
    got = gradients(policy)
    assert got.keys() == want.keys()
    for key, gradient in got.items():
        assert (gradient - want[key]).norm() < 1e-4 * want[key].norm(), key


@pytest.mark.parametrize("lora", [OFF, LoraConfig(r=RANK)], ids=["full", "lora"])
def test_gradient_checkpointing_gives_the_same_gradient(folder_of, lora):
    folder, calls, results = folder_of("llama"), [], []
    for checkpointing, num in ((False, 1), (True, 0), ("auto", 0), ("auto", 1)):
        torch.manual_seed(0)  # for the adapter's initialisation
        with recomputing(num):
            policy = load(folder, lora, gradient_checkpointing=checkpointing)
        shake(policy.model, 2)
        counts = []
        for layer in causal_lm(policy.model).model.layers:
            count: list[int] = []
            layer.mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
            counts.append(count)
        results.append(gradients(policy))
        calls.append([len(count) for count in counts])
    assert calls == [[1, 1], [2, 2], [1, 1], [2, 1]]  # recomputed in the backward pass
    for other in results[1:]:
        assert results[0].keys() == other.keys() and other
        assert all(torch.equal(other[key], gradient) for key, gradient in results[0].items())


def test_dropout_of_the_base_is_off(folder_of):
    policy = load(folder_of("gpt2"))
    assert policy.model.training
    assert {m.p for m in policy.model.modules() if isinstance(m, nn.Dropout)} == {0.0}
    assert torch.equal(token_logps(policy, batch_of()).logp, token_logps(policy, batch_of()).logp)


def test_lora_reference_is_the_base_model(folder_of):
    policy = load(folder_of("llama"), LoraConfig(r=RANK), with_reference=True)
    want, _ = plain_logps(plain_model(folder_of("llama")))
    assert policy.is_lora and policy.reference is None  # no second model in memory
    assert_same(token_logps(policy, batch_of()).logp, want)  # a new adapter has no effect
    shake(policy.model, 3)
    assert (token_logps(policy, batch_of()).logp - want).abs().max() > 0.1
    assert_same(reference_logps(policy, batch_of()), want)
    assert (token_logps(policy, batch_of()).logp - want).abs().max() > 0.1  # the adapter is on again


def test_lora_trains_only_the_adapter(folder_of):
    policy = load(folder_of("llama"), LoraConfig(r=RANK))
    assert {name for name, p in policy.model.named_parameters() if p.requires_grad} == {
        name for name, _ in policy.model.named_parameters() if "lora_" in name
    }
    assert all("lora_" in name for name in gradients(policy))


def adapter_logps(folder_of, adapter: Path, temperature: float = 1.0) -> Tensor:
    from peft import PeftModel

    return plain_logps(PeftModel.from_pretrained(plain_model(folder_of("llama")), str(adapter)).eval(), temperature)[0]


def test_continued_adapter_is_the_start_and_the_reference(folder_of, adapter):
    policy = load(adapter, SAVED, with_reference=True)
    want = adapter_logps(folder_of, adapter)
    assert (want - plain_logps(plain_model(folder_of("llama")))[0]).abs().max() > 0.1
    policy.model.eval()  # in training the adapter has dropout
    assert_same(token_logps(policy, batch_of()).logp, want)
    policy.model.train()
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    shake(policy.model, 4)
    policy.model.eval()
    moved = token_logps(policy, batch_of()).logp
    assert (moved - want).abs().max() > 0.1
    assert_same(reference_logps(policy, batch_of()), want)
    assert torch.equal(token_logps(policy, batch_of()).logp, moved)  # the reference pass had no side effect
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == trained
    assert trained and all(".default." in name for name in trained)


def test_reference_adapter_has_no_dropout_in_training(folder_of, adapter):
    policy = load(adapter, SAVED, with_reference=True)
    assert policy.model.training
    assert_same(reference_logps(policy, batch_of()), adapter_logps(folder_of, adapter))
    assert policy.model.training


def test_reference_pass_between_forward_and_backward_keeps_the_gradient(folder_of, adapter):
    """The order of a GRPO step with a KL term: policy, reference, backward."""
    results = []
    for with_pass in (False, True):
        torch.manual_seed(0)
        policy = load(adapter, SAVED, with_reference=True, gradient_checkpointing=True)
        policy.model.eval()
        logp = token_logps(policy, batch_of()).logp
        if with_pass:
            reference_logps(policy, batch_of())
        logp.square().sum().backward()
        results.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
    assert results[0] and all(".default." in name for name in results[0])
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[1][name], gradient) for name, gradient in results[0].items())


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(r=16), r"lora\.r=16: .*--lora.r 4"),
        (LoraConfig(r=RANK, dropout=0.5), r"lora\.alpha=32: .* has 8"),
        (
            LoraConfig(r=RANK, alpha=8, dropout=0.5, target_modules=("q_proj",)),
            r"lora\.target_modules=q_proj: .*v_proj",
        ),
    ],
)
def test_settings_that_differ_from_the_saved_adapter_are_rejected(adapter, lora, message):
    with pytest.raises(ValueError, match=message):
        load(adapter, lora)


def test_adapter_is_merged_to_train_all_weights(folder_of, adapter):
    policy = load(adapter, OFF, with_reference=True)
    want = adapter_logps(folder_of, adapter)
    assert not policy.is_lora and all(p.requires_grad for p in policy.model.parameters())
    assert not any("lora" in name for name, _ in policy.model.named_parameters())
    assert_same(token_logps(policy, batch_of()).logp, want)
    shake(policy.model, 5)
    assert (token_logps(policy, batch_of()).logp - want).abs().max() > 0.1
    assert_same(reference_logps(policy, batch_of()), want)


def test_training_does_not_change_the_reference_of_a_full_finetune(folder_of):
    policy = load(folder_of("llama-tied"), with_reference=True)
    want, _ = plain_logps(plain_model(folder_of("llama-tied")))
    assert not any(p.requires_grad for p in policy.reference.parameters()) and not policy.reference.training
    assert not {p.data_ptr() for p in policy.reference.parameters()} & {p.data_ptr() for p in policy.model.parameters()}
    shake(policy.model, 6)
    assert (token_logps(policy, batch_of()).logp - want).abs().max() > 0.1
    got = reference_logps(policy, batch_of())
    assert_same(got, want)
    assert not got.requires_grad


def test_no_reference_is_loaded_unless_requested(folder_of):
    policy = load(folder_of("llama"))
    assert policy.reference is None and policy.reference_adapter is None
    with pytest.raises(AssertionError, match="with_reference"):
        reference_logps(policy, batch_of())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a warning on CPUs without bfloat16 instructions
def test_bfloat16_compute_keeps_float32_weights(folder_of):
    policy = load(folder_of("llama"), dtype="bfloat16", with_reference=True)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert {p.dtype for p in policy.reference.parameters()} == {torch.bfloat16}
    assert policy.autocast_dtype == torch.bfloat16
    want, _ = plain_logps(plain_model(folder_of("llama")))
    logp = token_logps(policy, batch_of()).logp
    assert logp.dtype == torch.float32
    assert 1e-5 < (logp - want).abs().max() < 0.25  # rounded to bfloat16
    assert (reference_logps(policy, batch_of()) - want).abs().max() < 0.25
    got = gradients(policy)
    assert {g.dtype for g in got.values()} == {torch.float32} and all(g.isfinite().all() for g in got.values())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a warning on CPUs without bfloat16 instructions
def test_a_float32_stream_gives_lora_the_log_probs_of_a_fully_trained_model(folder_of):
    full = load(folder_of("llama"), dtype="bfloat16")
    with torch.no_grad():
        for p in full.model.parameters():
            p.copy_(p.bfloat16())
    lora, batch = load(folder_of("llama"), LoraConfig(r=RANK), dtype="bfloat16"), batch_of()
    lm = causal_lm(lora.model)
    before, want = (token_logps(policy, batch).logp for policy in (lora, full))
    assert not torch.equal(before, want)
    carry_float32(lora)
    assert torch.equal(token_logps(lora, batch).logp, want)
    release(lora)
    assert not lm.get_input_embeddings()._forward_hooks and torch.equal(token_logps(lora, batch).logp, before)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_transformers_copy_for_sampling_has_the_stream_of_training(kind):
    """The new adapter has no effect yet: only the trainer rounds to bfloat16 before it adds an adapter's output."""
    model = add_adapter(make_model(kind, num_hidden_layers=4).to(torch.bfloat16), LoraConfig(r=RANK)).eval()
    policy = policy_of(model, "bfloat16")
    lm, ids = causal_lm(policy.model), torch.randint(3, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    before = TransformersForward(lm, torch.bfloat16, copied=True)
    carry_float32(policy)
    after = TransformersForward(lm, torch.bfloat16, copied=True)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = lm(input_ids=ids).logits.float().log_softmax(dim=-1)
        for forward in (before, after):
            forward.refresh()
        assert torch.equal(sampler_logps(after, ids), want)
        assert (sampler_logps(before, ids) - want).abs().mean() > 2e-4, "its stream is bfloat16"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_lora_has_a_bfloat16_base_and_a_float32_adapter(folder_of):
    policy = load(folder_of("llama"), LoraConfig(r=RANK), dtype="bfloat16")
    dtypes = {p.requires_grad: p.dtype for p in policy.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    want, _ = plain_logps(plain_model(folder_of("llama")))
    assert (token_logps(policy, batch_of()).logp - want).abs().max() < 0.25
    assert {g.dtype for g in gradients(policy).values()} == {torch.float32}


def test_policy_knows_its_context_and_end_ids(folder_of):
    for name, lora in itertools.product(("gpt2", "gemma3-nested"), (OFF, LoraConfig(r=RANK))):
        policy = load(folder_of(name), lora)
        assert policy.context_length == 64 and policy.generation_eos == 2 and policy.autocast_dtype is None


def test_longrope_limits_the_context_to_the_length_of_pretraining():
    """A longer sequence would change the log-probs of all others in its micro-batch, by their rotary frequencies."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 16, "initializer_range": 0.2}
    policy = policy_of(make_model("phi3", **settings), "float32")
    assert policy.context_length == 16 and policy_of(make_model("phi3"), "float32").context_length == 64
    items = [Item([7 * i + 1 for i in range(n)], [False] + [True] * (n - 1)) for n in (10, 16, 17)]
    want, short, long = (
        token_logps(policy, make_batches(chosen, max_tokens=64)[0]).logp.detach()[-9:]
        for chosen in (items[:1], items[1::-1], items[2::-2])
    )
    torch.testing.assert_close(short, want)
    assert (long - want).abs().max() > 0.01


def test_a_window_that_counts_positions_of_the_row_gets_one_sequence_per_row(capsys):
    """GPT-Neo's own code has a window of 256 and a mask of 2048 positions, longer than the rows of the probe."""
    settings = dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], initializer_range=0.3)
    policy = policy_of(make_model("gpt_neo", window_size=40, **settings), "float32")
    check_logps(policy)
    assert not policy.packs and "one sequence per row, and prompts are not shared: window_" in capsys.readouterr().err
    prompt, ids = [(3 * i + 1) % 275 for i in range(10)], [[(k * i + 1) % 275 for i in range(20)] for k in (5, 7)]
    items = [Item(prompt + own, [False] * 10 + [True] * 20, 10) for own in ids]

    def logps(**options: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([token_logps(policy, batch).logp for batch in make_batches(items, **options)])

    alone = logps(max_tokens=1, **policy.layout())
    torch.testing.assert_close(logps(max_tokens=64, **policy.layout(share_prompt=True)), alone)
    policy.packs = True
    assert (logps(max_tokens=64, share_prompt=True) - alone).abs().max() > 0.1


def test_resolve_model_finds_weights_adapters_runs_and_hub_ids(folder_of, adapter, tmp_path):
    llama = folder_of("llama")
    assert resolve_model(str(llama)) == str(llama) and resolve_model(str(adapter)) == str(adapter)
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert resolve_model("gpt2") == "gpt2"
    assert resolve_model("builtin:tiny") == str(BUILTIN["builtin:tiny"])
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "config.yaml").touch()
    assert resolve_model(str(run)) == str(run / "final")


def test_resolve_model_rejects_other_names(tmp_path):
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "metrics.jsonl").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    a_file = tmp_path / "weights.safetensors"
    a_file.touch()
    for name, message in [
        ("builtin:huge", "model=builtin:huge: .*builtin:tiny"),
        (str(tmp_path / "nowhere"), f"model={tmp_path}/nowhere: "),
        ("./nowhere", "model=./nowhere: "),
        ("runs/grpo/first", "model=runs/grpo/first: "),
        (str(a_file), f"model={a_file}: "),
        (str(unfinished), f"model={unfinished}: .*--resume"),
        (str(empty), f"model={empty}: .*config.json.*adapter_config.json"),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve_model(name)


def test_folder_without_weights_or_tokenizer_gives_a_one_line_error(folder_of, tmp_path):
    (tmp_path / "config.json").write_text((folder_of("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=f"^model={tmp_path}: the tokenizer [^\n]*$"):
        load(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^model={tmp_path}: could not be loaded[^\n]*$"):
        load(tmp_path)


def test_auto_uses_eager_attention_for_models_without_sdpa_and_logs_it(folder_of, capsys):
    attention._log_once.cache_clear()
    for name in ("gemma2-eager", "gpt_oss"):
        for attn in ("auto", "sdpa"):
            cfg = ModelConfig(model=str(folder_of(name)), attn_implementation=attn)
            if attn == "sdpa":
                with pytest.raises(ValueError, match="scaled_dot_product_attention|Gemma2.* caps attention scores"):
                    load_policy(cfg, OFF, CPU, with_reference=False)
            else:
                policy = load_policy(cfg, OFF, CPU, with_reference=False)
                assert policy.model.config._attn_implementation == "eager"
                assert f"using eager: {type(policy.model).__name__}" in capsys.readouterr().err


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks (E, out, in / 32, 16), scales (E, out, in / 32) and the rounded weight (E, in, out)."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = groups.abs().amax(dim=3).log2().floor() - 2
    code = (groups / exponent.exp2().unsqueeze(3)).unsqueeze(4).sub(FP4).abs().argmin(dim=4)
    blocks = (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8)
    rounded = (FP4[code] * exponent.exp2().unsqueeze(3)).flatten(2).transpose(1, 2)
    return blocks, (exponent + 127).to(torch.uint8), rounded


def test_released_mxfp4_files_are_dequantised(folder_of, tmp_path):
    """gpt-oss as released: experts in blocks and scales. Exports are ordinary models."""
    from safetensors.torch import load_file, save_file

    source = folder_of("gpt_oss")
    files, want = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj") and ".experts." in name:
            files[f"{name}_blocks"], files[f"{name}_scales"], want[name] = to_mxfp4(tensor)
        else:
            files[name] = want[name] = tensor
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((source / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    lm = load(tmp_path).model
    assert load_hollow(str(tmp_path), ModelConfig(model=str(tmp_path)), torch.float32, CPU) == (None, None)
    sampled, _ = load_model(str(tmp_path))
    lm.save_pretrained(tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for tensors in (lm.state_dict(), sampled.state_dict(), exported):
        assert tensors.keys() == want.keys()
        assert all(torch.equal(tensors[name].cpu(), want[name]) for name in want)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    with pytest.raises(UserError, match="^model=.*MXFP4"):
        check_served(str(tmp_path), None, lora_rank=0)
    check_served(str(tmp_path), None, lora_rank=8)  # only the adapter is sent
    check_served(str(source), None, lora_rank=0)


class ChangedLogits(nn.Module):
    """A model that changes its logits after the head."""

    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.change, self.config = model, change, model.config
        self.base_model, self.get_output_embeddings = model.base_model, model.get_output_embeddings
        self.get_input_embeddings = model.get_input_embeddings

    def forward(self, **inputs: Any) -> Any:
        out = self.model(**inputs)
        out.logits = self.change(out.logits)
        return out


def test_changed_logits_are_rejected(folder_of):
    plain = plain_model(folder_of("llama"), "sdpa")

    def policy_with(change: Callable[[Tensor], Tensor]) -> Policy:
        model = ChangedLogits(plain, change)
        return Policy(model=model, tokenizer=None, source="changed", device=CPU, compute_dtype=torch.float32)

    check_logps(policy_with(lambda x: x))
    for change in (lambda x: 1.1 * x, lambda x: x.clamp(max=0.5), lambda x: x.roll(1, dims=-1)):
        with pytest.raises(ValueError, match="^model=changed: log-probs .*not supported"):
            check_logps(policy_with(change))


def test_the_accepted_rounding_grows_with_the_log_probs(folder_of):
    policy = Policy(model=plain_model(folder_of("llama"), "sdpa"), tokenizer=None, source="tiny", device=CPU,
                    compute_dtype=torch.float32)  # fmt: skip
    want = torch.tensor([-3.0, -40.0])
    reject_gap(policy, want + 3e-3, want, "log-probs")
    for size, gap in ((-40.0, 5e-3), (-3.0, 3e-3), (-3.0, math.nan)):
        with pytest.raises(UserError, match="differ from transformers"):
            reject_gap(policy, torch.tensor([size + gap]), torch.tensor([size]), "log-probs")


class Counting(nn.Module):
    """A model that counts positions from each 0, like architectures with cumulative states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.get_output_embeddings, self.get_input_embeddings = model.get_output_embeddings, model.get_input_embeddings

    def base_model(self, position_ids: Tensor, **inputs: Any) -> Any:
        position = torch.arange(position_ids.shape[1])
        start = torch.where(position_ids == 0, position, 0).cummax(dim=1).values
        return self.model.base_model(position_ids=position - start, **inputs)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def test_models_that_can_be_packed_but_cannot_share_a_prompt_copy_it(folder_of, capsys):
    model = Counting(plain_model(folder_of("llama"), "sdpa"))
    policy = Policy(model=model, tokenizer=None, source="counting", device=CPU, compute_dtype=torch.float32)
    assert_same(token_logps(policy, batch_of()).logp, plain_logps(model.model)[0])
    check_logps(policy)
    assert policy.packs and not policy.layout(share_prompt=True)["share_prompt"]
    assert capsys.readouterr().err.startswith("model=counting: prompts are not shared: packed log-probs differ ")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a warning on CPUs without bfloat16 instructions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [7, 20], ids=["sibling", "neighbour"])
def test_small_leak_into_a_sibling_or_neighbour_is_found(folder_of, dtype, start, capsys):
    """Far below the tolerance for log-probs. The row of check_logps: a prompt of 4, 3 completions of 3, 3 times 7."""
    model = plain_model(folder_of("llama"), "sdpa")
    policy = Policy(model=model, tokenizer=None, source="leaky", device=CPU, compute_dtype=dtype)
    check_logps(policy)
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training

    def leak(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if len(output) == 1:  # packed
            output = output.clone()
            for place in (start, 28):  # 28: the start of a sequence if prompts are not shared
                output[:, place] += 1e-6 * output[:, place - 1]
        return output

    model.base_model.layers[0].mlp.register_forward_hook(leak)
    capsys.readouterr()
    check_logps(policy)
    assert policy.layout(share_prompt=True) == dict(
        packing=False, share_prompt=False, multiple=1, one_row=False, max_padding=0.1, small=0
    )
    line = capsys.readouterr().err
    assert re.fullmatch("model=leaky: one sequence per row.*: packed sequences leak .*gradient .*\n", line), line


@pytest.mark.parametrize(
    ("kind", "settings", "layer"),
    [
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv"),
        ("falcon_h1", {}, "hybrid"),
        ("qwen3_5", {}, "linear_attention"),  # text and images, with a separate text config
        ("rwkv", {}, "recurrent"),  # without layer_types
        ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}, "linear_attention|mamba"),
        ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["attention"] * 2}, None),
    ],
)
def test_recurrent_architectures_are_rejected_by_name_with_context_parallelism(
    tmp_path, kind, settings, layer, monkeypatch
):
    """Before weights are read."""
    from transformers import AutoConfig

    monkeypatch.setattr(logps, "context_size", lambda: 2)
    AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    message = f"^model={tmp_path}: could not be loaded"  # no weights
    if layer:
        message = f"^parallel.context=2: model={tmp_path} .*({layer}) .*model_type={kind} [^\n]*--parallel.context$"
    with pytest.raises(ValueError, match=message):
        load_policy(ModelConfig(model=str(tmp_path)), OFF, CPU, with_reference=False)


def test_architecture_that_cannot_be_packed_gets_one_sequence_per_row(tmp_path, capsys):
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    config = AutoConfig.for_model("bloom", vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # positions only from a 2D mask
    tokenizer.save_pretrained(tmp_path)
    assert not load(tmp_path).packs
    assert f"model={tmp_path}: one sequence per row" in capsys.readouterr().err


def test_adapter_names_a_base_that_loads(folder_of, adapter):
    saved = json.loads((adapter / "adapter_config.json").read_text())
    policy = load(adapter, SAVED)
    assert policy.source == saved["base_model_name_or_path"] == str(folder_of("llama"))
