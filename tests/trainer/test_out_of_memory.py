"""Out of memory: the estimates against what autograd keeps, and the message against a run that is told it is full."""

from __future__ import annotations

import json

import pytest
import torch

from rollout.model_folder import BUILTIN
from tests.entry import metrics
from trainer.__main__ import main
from trainer.config import DataConfig, LoraConfig, ModelConfig, RunConfig
from trainer.memory import GIB, activations, estimate, sizes_of
from trainer.methods import dpo, grpo, sft
from trainer.out_of_memory import advice, asked_for, is_out_of_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.50 GiB is "
    "free. Including non-PyTorch memory, this process has 138.30 GiB memory in use. Of the allocated memory 130.11 GiB "
    "is allocated by PyTorch, and 5.52 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
SHAPE = {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 6, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def folder_of(tmp_path, kind: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [KINDS[kind]], **SHAPE}))
    return str(tmp_path)


def kept_bytes(model: torch.nn.Module, num_tokens: int, dtype: torch.dtype) -> int:
    """Storage that the backward pass of the layers needs, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x  # alive, so that no two share an address
        return x

    autocast = torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast:
        model(input_ids=torch.arange(num_tokens)[None] % 64, use_cache=False)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_keeps(kind, rank, dtype, tmp_path):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModel

    cfg = sft.Config(
        model=ModelConfig(model=folder_of(tmp_path, kind), dtype=dtype), data=DataConfig(data=("x",)),
        lora=LoraConfig(r=rank),
    )  # fmt: skip
    model = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation="sdpa").train()
    if rank:
        model = get_peft_model(model.to(getattr(torch, dtype)), PeftConfig(r=rank, target_modules="all-linear"))
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    few, many = (kept_bytes(model, n, getattr(torch, dtype)) for n in (64, 192))
    guess = activations(sizes_of(cfg.model), cfg, "cpu", 128)
    assert guess == pytest.approx(many - few, rel=0.15)  # casts of weights, the same for both, are not in it


def test_estimate_by_hand(tmp_path):
    model = ModelConfig(model=folder_of(tmp_path, "llama"))
    cfg = dpo.Config(model=model, data=DataConfig(data=("x",)), run=RunConfig(max_tokens_per_micro_batch=4096))
    sizes = sizes_of(model)
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160 + 2 * 64
    count = 6 * layer + 64 * 64 + 64
    assert (sizes.parameters, sizes.query, sizes.key, sizes.has_qk_norm) == (count, 64, 32, False)
    assert sizes.adapter_per_rank == 6 * (128 + 96 + 96 + 128 + 3 * 224)
    parts = estimate(sizes, cfg, "cuda")
    kept = 6 * (26 * 64 + 8 * 160 + 4 * 128)
    assert parts == {
        "weights": 6 * count, "gradients": 4 * count, "optimizer": 8 * count, "reference": 2 * count,
        "activations": 4096 * kept,
    }  # fmt: skip
    flags = {one.flag: one.saves for one in advice(sizes, cfg, "cuda")}
    assert flags["--max-tokens-per-micro-batch 2048"] == 2048 * kept
    assert flags["--ref precomputed"] == 2 * count
    assert flags["--gradient-checkpointing"] == 4096 * (kept - 6 * 4 * 64 - kept / 6)
    assert list(flags.values()) == sorted(flags.values(), reverse=True)


def test_advice_is_about_this_run(tmp_path):
    model = ModelConfig(model=str(BUILTIN["builtin:tiny"]), gradient_checkpointing=True)
    run = RunConfig(max_tokens_per_micro_batch=512)
    cfg = sft.Config(model=model, data=DataConfig(data=("x",)), run=run, lora=LoraConfig(r=8), max_length=1024)
    flags = [one.flag for one in advice(sizes_of(model), cfg, "cuda")]
    assert sorted(flags) == ["--lora.r 4", "--max-length 512"]  # one sequence fills a micro-batch; the rest is set


def test_full_device_is_told_in_one_message_and_the_run_can_be_resumed(tmp_path, monkeypatch, capfd):
    argv = ["--method", "grpo", "--max-steps", "2", "--save-steps", "1", "--per-device-train-batch-size", "16",
            "--max-eval-rows", "4", "--output-dir", str(tmp_path / "run")]  # fmt: skip
    backward = grpo.backward
    calls = iter([backward])

    def full(*args, **options):
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(grpo, "backward", lambda *args, **options: next(calls, full)(*args, **options))
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert "error: out of memory: tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.81 GiB" in err
    assert "PYTORCH_CUDA_ALLOC_CONF" not in err and "Traceback" not in err
    assert "this run holds about, in GiB: weights" in err and "cache" in err
    for flag in ("--gradient-checkpointing", "--lora.r 16", "--rollout.max-batch-size 8", "--max-tokens-per-micro"):
        assert flag in err, err
    monkeypatch.setattr(grpo, "backward", backward)
    assert main(["--resume", str(tmp_path / "run"), "--gradient-checkpointing"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]


def test_cause_is_found_behind_another_error():
    try:
        try:
            raise torch.OutOfMemoryError(CUDA)
        except torch.OutOfMemoryError as inner:
            raise RuntimeError("prompt=a: its completions could not be made") from inner
    except RuntimeError as error:
        assert is_out_of_memory(error) and "2.32 GiB" in asked_for(error)
    assert not is_out_of_memory(RuntimeError("other")) and GIB == 2**30
