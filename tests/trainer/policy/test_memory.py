"""Out of memory: a run in the terms of the planner (checked in tests/trainer/test_plan.py), advice and message."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.entry import metrics
from trainer.__main__ import main
from trainer.config.blocks import DataConfig, LoraConfig, ModelConfig, ParallelConfig, PromptConfig, RunConfig
from trainer.methods import cpo, dpo, ebft, gdpo, grpo, kto, prm, rm, sft
from trainer.policy import sharding
from trainer.policy.memory import (
    METHODS,
    advice,
    asked_for,
    at_peak,
    cached_tokens,
    is_out_of_memory,
    method_of,
    peak,
    planned_peak,
    sampling,
    saved,
    sizes_for,
    work_of,
)

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


def folder_of(tmp_path) -> str:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


DATA = DataConfig(data=("x",))


def test_a_run_in_the_terms_of_the_planner(tmp_path):
    model = ModelConfig(model=folder_of(tmp_path))
    run = RunConfig(max_tokens_per_micro_batch=4096)
    cfg = dpo.Config(model=model, data=DATA, run=run)
    s = sizes_for(cfg)
    count = 6 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160 + 2 * 64) + 64 * 64 + 64
    assert (s.params, s.adapter(2)) == (count, 2 * 6 * (128 + 96 + 96 + 128 + 3 * 224))
    work = work_of(cfg, s, "cuda")
    assert (work.tokens, work.accumulates, work.head, work.has_reference) == (4096, True, "any loss", True)
    assert (work.held, work.compute, work.shards) == (4, 2, 1)
    parts = at_peak(s, work)
    assert [parts[x] / count for x in ("weights", "gradients", "optimizer state", "reference")] == [4, 4, 8, 2]
    assert sum(parts.values()) == peak(s, work)

    low = replace(model, trained_dtype="bfloat16", gradient_checkpointing=True)
    small = work_of(replace(cfg, model=low, optim=replace(cfg.optim, optim="adamw_8bit")), s, "cuda")
    assert (small.held, small.optim, small.checkpointing) == (2, "adamw_8bit", True)
    free = (replace(cfg, reference=replace(cfg.reference, ref="precomputed")), replace(cfg, reference_free=True))
    assert not any(work_of(x, s, "cuda").has_reference for x in free)
    other = replace(cfg.reference, ref_model="builtin:tiny")
    tiny = sizes_for(sft.Config(model=ModelConfig(model="builtin:tiny"), data=DATA)).params
    assert work_of(replace(cfg, reference=other, lora=LoraConfig(r=4)), s, "cuda").others == 2 * tiny


def test_every_method_has_its_terms():
    for method in (cpo, dpo, ebft, gdpo, grpo, kto, prm, rm, sft):
        data = PromptConfig(data=("x",)) if method in (grpo, gdpo) else DATA
        cfg = method.Config(model=ModelConfig(model="builtin:tiny"), data=data)
        assert method_of(cfg) is METHODS[method.__name__.rpartition(".")[2]]
        assert work_of(cfg, sizes_for(cfg), "cuda").tokens > 0
        assert (cached_tokens(cfg) > 0) == method_of(cfg).samples
        assert planned_peak(cfg, 1000) > 0


def test_planned_peak_splits_a_step_as_the_run_does():
    run = RunConfig(max_tokens_per_micro_batch=2048, per_device_train_batch_size=64)
    cfg = grpo.Config(model=ModelConfig(model="builtin:tiny"), data=PromptConfig(data=("x",)), run=run)
    s = sizes_for(cfg)
    work = work_of(cfg, s)
    whole = replace(work, tokens=1500, trained_tokens=500, accumulates=False)
    made = sampling(s, work, cached_tokens(cfg))  # 64 completions of 256 tokens in the cache
    assert planned_peak(cfg, 1500, trained_tokens=500) == max(peak(s, whole), made)
    served = replace(cfg, rollout=replace(cfg.rollout, engine="vllm"))
    assert planned_peak(served, 1500, trained_tokens=500) == peak(s, whole)
    part = replace(work, tokens=2048, trained_tokens=1024, accumulates=True)
    assert planned_peak(served, 6000, trained_tokens=3000) == peak(s, part)
    halves = replace(served, run=replace(run, gradient_accumulation_steps=2))
    part = replace(work, tokens=750, trained_tokens=250, accumulates=True)
    assert planned_peak(halves, 1500, trained_tokens=500) == peak(s, part)


def test_shards_follow_the_processes(monkeypatch, tmp_path):
    cfg = dpo.Config(model=ModelConfig(model=folder_of(tmp_path)), data=DATA)
    s = sizes_for(cfg)
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = {}
    for name, options in (("auto", {}), ("replicate", {}), ("fsdp", {}), ("fsdp", {"shard": 2})):
        work = work_of(replace(cfg, parallel=ParallelConfig(mode=name, **options)), s, "cpu")
        found[name, *options.values()] = work.shards
    assert found == {("auto",): 1, ("replicate",): 1, ("fsdp",): 4, ("fsdp", 2): 2}
    monkeypatch.setattr(sharding, "SMALL", 16 * s.params)  # no room for the reference beside it
    assert work_of(cfg, s, "cpu").shards == 4


def test_processes_that_share_rows_hold_a_part_each_and_all_keys(monkeypatch, tmp_path):
    run = RunConfig(max_tokens_per_micro_batch=4096, per_device_train_batch_size=1)
    cfg = sft.Config(model=ModelConfig(model=folder_of(tmp_path)), data=DATA, run=run, max_length=2048)
    monkeypatch.setenv("WORLD_SIZE", "2")
    s = sizes_for(cfg)
    copies = [ParallelConfig(mode="replicate", context=size) for size in (1, 2)]
    alone, ours = (work_of(replace(cfg, parallel=sharding), s, "cuda") for sharding in copies)
    assert (alone.tokens, ours.tokens, ours.own, ours.rows) == (2048, 4096, 2048, 2048)  # two rows, a half of each
    assert (alone.head, ours.head) == ("one pass", "any loss")
    assert saved(s, ours) - saved(s, alone) == 6 * 2048 * 2 * 2 * 16 * 2  # keys and values in bfloat16


def test_advice_says_what_the_planner_says(tmp_path):
    model = ModelConfig(model=folder_of(tmp_path))
    cfg = dpo.Config(model=model, data=DATA, run=RunConfig(max_tokens_per_micro_batch=4096))
    s = sizes_for(cfg)
    work = work_of(cfg, s, "cuda")
    flags = {one.flag: one.saves for one in advice(s, work, cfg)}
    assert flags["--max-tokens-per-micro-batch 2048"] == peak(s, work) - peak(s, replace(work, tokens=2048))
    assert flags["--gradient-checkpointing"] == peak(s, work) - peak(s, replace(work, checkpointing=True))
    assert flags["--ref precomputed"] == 2 * s.params
    large = s.params - 13 * 64 - 12 * 32 * 64  # norms, keys and values are below 4096
    assert flags["--optim adamw_8bit"] == pytest.approx((8 - 2 * (1 + 4 / 256)) * large)
    assert flags["--trained-dtype bfloat16"] > 8 * s.params and flags["--lora.r 16"] > 0
    assert list(flags.values()) == sorted(flags.values(), reverse=True)


def test_advice_is_about_this_run():
    model = ModelConfig(model="builtin:tiny", gradient_checkpointing=True)
    run = RunConfig(max_tokens_per_micro_batch=512)
    cfg = sft.Config(model=model, data=DATA, run=run, lora=LoraConfig(r=8), max_length=1024)
    s = sizes_for(cfg)
    flags = [one.flag for one in advice(s, work_of(cfg, s, "cuda"), cfg)]
    # one sequence fills a micro-batch; adapters are too small for 8-bit moments; the rest is set
    assert sorted(flags) == ["--lora.r 4", "--max-length 512"]


def test_full_device_is_told_in_one_message_and_the_run_can_be_resumed(tmp_path, monkeypatch, capfd):
    argv = ["--method", "grpo", "--max-steps", "2", "--save-steps", "1", "--per-device-train-batch-size", "16",
            "--max-eval-rows", "1", "--output-dir", str(tmp_path / "run")]  # fmt: skip
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
    assert not is_out_of_memory(RuntimeError("other"))
