"""Test the planner against autograd on a CPU and peaks on an H200, and the out-of-memory message."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kernels.linear_logprob import BLOCK_ELEMENTS, linear_logprob_loss
from kernels.nf4 import BYTES_PER_WEIGHT
from rollout.engines import local
from rollout.servers.command import _memory_share
from rollout.servers.options import VllmConfig
from tests.entry import metrics
from trainer import plan
from trainer.__main__ import main as train
from trainer.cli import load_method, method_names
from trainer.config.blocks import (
    DataConfig,
    LoraConfig,
    MethodMemory,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PromptConfig,
    RunConfig,
)  # fmt: skip
from trainer.methods import dpo, grpo, sft
from trainer.plan import (
    CARDS,
    GIB,
    KNOWN,
    PlanConfig,
    Sizes,
    Work,
    activation_bytes,
    critic_bytes,
    main,
    peak,
    persistent_bytes,
    planned_run,
    sizes_of,
)  # fmt: skip
from trainer.policy import sharding
from trainer.policy.experts import use_grouped_matmuls
from trainer.policy.fuse import join_adapters
from trainer.policy.load import quantize_layers
from trainer.policy.optim import build_optimizer
from trainer.rl import engine_choice

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 4}
WIDE = {"hidden_size": 192, "intermediate_size": 448, "num_attention_heads": 6, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}


def tiny(kind: str, numbers: dict[str, int], dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, **numbers, num_hidden_layers=2, head_dim=32, vocab_size=300, tie_word_embeddings=True
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def saved_bytes(model: nn.Module, num_tokens: int, *, autocast: bool) -> int:
    """Return the bytes of all storages except parameters that autograd saves in a forward up to the head."""
    parameters = {x.untyped_storage().data_ptr() for x in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is reused

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return x

    ids = torch.arange(num_tokens)[None] % 300
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model.base_model(input_ids=ids, position_ids=torch.arange(num_tokens)[None], use_cache=False)
    return sum(x.nbytes() for x in saved.values())


@pytest.fixture(scope="module")
def sizes() -> dict[str, Sizes]:
    names = ("qwen3-0.6b", "qwen3-1.7b", "llama-3.1-8b")
    return {name: sizes_of(plan.build(plan.known_config(name))) for name in names}


def test_known_shapes_have_the_published_number_of_parameters():
    assert PUBLISHED.keys() == KNOWN.keys()
    for name, published in PUBLISHED.items():
        config, counts = plan.known_config(name), []
        layers = config.num_hidden_layers
        for num in (1, 2):  # all layers have the same size
            config.num_hidden_layers = num
            counts.append(sizes_of(plan.build(config)).params)
        assert counts[0] + (layers - 1) * (counts[1] - counts[0]) == published, name


ALL: dict[str, Any] = {"checkpointing": True}
FIRST = ALL | {"recomputed": 1}
SAVED = [
    ("llama", SMALL, {}), ("qwen3", WIDE, {}), ("qwen3", SMALL, {"compute": 4}), ("qwen3", SMALL, {"weight_bytes": 2}),
    ("llama", WIDE, {"compute": 4, "checkpointing": True}), ("qwen3", SMALL, {"checkpointing": True}),
    ("qwen3", SMALL, {"checkpointing": True, "recomputed": 2}), ("llama", SMALL, {"lora_r": 8, **FIRST}),
    ("llama", WIDE, {"compute": 4, **FIRST}), ("qwen3_moe", SMALL | EXPERTS, FIRST),
    ("llama", SMALL, {"lora_r": 8}), ("qwen3", WIDE, {"lora_r": 8}), ("llama", WIDE, {"lora_r": 8, "compute": 4}),
    ("qwen3", SMALL, {"lora_r": 8, "compute": 4}), ("qwen3", WIDE, {"lora_r": 8, "in_4bit": True}),
    ("llama", SMALL, {"lora_r": 8, "compute": 4, "in_4bit": True}), ("llama", WIDE, {"lora_r": 8, "is_wide": True}),
    ("qwen3", SMALL, {"lora_r": 8, "is_wide": True, **FIRST}),
    ("qwen3_moe", SMALL | EXPERTS, {}), ("qwen3_moe", WIDE | EXPERTS, {"compute": 4}),
    ("qwen3_moe", SMALL | EXPERTS, {"lora_r": 8}), ("qwen3_moe", WIDE | EXPERTS, {"lora_r": 8, "compute": 4}),
    ("qwen3_moe", WIDE | EXPERTS, {"lora_r": 8, "is_wide": True}),
]  # fmt: skip


def checkpoint(model: Any, work: Work) -> None:
    if work.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for block in model.model.layers[work.recomputed :] if work.recomputed else ():
            block.gradient_checkpointing = False


def test_activations_match_autograd():
    from peft import LoraConfig, get_peft_model

    use_grouped_matmuls()
    for kind, numbers, options in SAVED:
        work = Work(tokens=64, **options)
        is_low = work.weight_bytes == 2 or (work.lora_r and work.compute == 2)
        model = tiny(kind, numbers, torch.bfloat16 if is_low else torch.float32)
        s = sizes_of(model)
        assert (s.qk_norm, s.params) == (kind != "llama", sum(x.numel() for x in model.parameters()))
        checkpoint(model, work)
        if work.in_4bit:
            quantize_layers(model, torch.device("cpu"))
            assert persistent_bytes(s, work)["weights"] == sum(x.nbytes for x in model.parameters())
        if work.lora_r:
            wrapped = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
            assert s.adapter(8) == sum(x.numel() for x in wrapped.parameters() if x.requires_grad)
            model = wrapped.get_base_model()
            join_adapters(model)
        if work.is_wide:
            model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.float())
        saved = saved_bytes(model, 64, autocast=work.compute == 2)
        if plan.num_recomputed(s, work) == s.layers:  # the rotary table is an argument that hooks do not see
            saved += 64 * 2 * 4 * s.head_dim
        assert activation_bytes(s, work) == pytest.approx(saved, rel=0.01), (kind, options)


# bench/results/h200/train_step.jsonl: 8 completions of 512 tokens after a prompt of 2048, Qwen3-1.7B shape, bfloat16,
# checkpointing, one micro-batch, no optimizer: computed tokens, GiB in addition to weights and gradients.
MEASURED_STEPS = [("shared prompt", 6144, 0.7828), ("packed", 20480, 2.7334), ("rows, sdpa", 20480, 2.7247)]


def test_peak_of_a_step_matches_the_measurement(sizes):
    s = sizes["qwen3-1.7b"]
    for layout, tokens, gib in MEASURED_STEPS:
        work = Work(tokens=tokens, trained_tokens=8 * 512, checkpointing=True, weight_bytes=2, accumulates=False)
        fullest = plan.fullest_point(s, work)
        assert fullest.name == "backward of the first block", layout
        assert (fullest.total - 2 * s.params) / GIB == pytest.approx(gib, rel=0.03), layout


# bench/results/h200/vs_trl.jsonl: a DPO step of 8 pairs, Qwen3-1.7B shape, bfloat16 weights, nothing recomputed: GiB
# compiled and not, in the step with the most tokens.
MEASURED_DPO = [27.6330, 27.5615]


def test_peak_of_a_step_with_fused_blocks_matches_the_measurement(sizes):
    sequences, computed = 16, 8 * 256 + 8870 - 16 * 256  # the prompt of a pair is computed once
    work = Work(
        tokens=computed, trained_tokens=8870 - sequences * 256, weight_bytes=2, head="any loss", fused=True,
        has_reference=True, accumulates=False,
    )  # fmt: skip
    assert [peak(sizes["qwen3-1.7b"], work) / GIB] * 2 == pytest.approx(MEASURED_DPO, rel=0.03)


# bench/results/h200/linear_logprob.jsonl, bfloat16: N, D, V; GiB in addition to inputs and gradients for one pass, any
# loss, a frozen head, and torch with stored logits (None: not measured).
MEASURED_HEADS = [
    ((8192, 2048, 151936), 1.7468, 0.8140, 1.1672, 13.2993),
    ((8192, 4096, 128256), 1.9886, 1.1263, 1.0099, 10.7012),
    ((32768, 1536, 151936), 1.5973, 0.7369, 1.1626, None),
]


def test_head_buffers_match_the_measurements(sizes):
    for (n, d, v), one_pass, any_loss, frozen, torch_path in MEASURED_HEADS:
        s = replace(sizes["qwen3-1.7b"], width=d, vocab=v)
        dx, dw = 2 * n * d, 2 * v * d
        for options, gradients, gib in (
            ({"head": "one pass", "weight_bytes": 2}, dx + dw, one_pass),
            ({"head": "any loss", "weight_bytes": 2}, dx + dw, any_loss),
            ({"lora_r": 8}, dx, frozen),
        ):
            got = plan.head_bytes(s, Work(tokens=n, **options)) - gradients
            assert got / GIB == pytest.approx(gib, rel=0.01), (n, options)
        if torch_path is not None:
            assert (plan.logits_bytes(s, n) - dx - dw) / GIB == pytest.approx(torch_path, rel=0.001)


def test_measurements_are_in_the_bench_results():
    folder = ROOT / "bench" / "results" / "h200"
    files = [folder / f"{name}.jsonl" for name in ("train_step", "linear_logprob", "vs_trl")]
    results = {round(json.loads(row)["peak_gib"], 4) for file in files for row in file.open()}
    copied = {gib for *_, gib in MEASURED_STEPS} | {x for _, *gibs in MEASURED_HEADS for x in gibs if x}
    copied |= {*MEASURED_DPO}
    assert copied <= results, copied - results


def test_persistent_bytes_by_hand(sizes):
    s = sizes["llama-3.1-8b"]
    full = persistent_bytes(s, Work(tokens=1, has_reference=True))
    assert list(full.values()) == [4 * s.params, 0, 4 * s.params, 8 * s.params, 2 * s.params]
    shard = persistent_bytes(s, Work(tokens=1, has_reference=True, shards=8))
    assert {name: 8 * x for name, x in shard.items()} == full
    assert s.adapter(16) == 41_943_040  # rank 16 on all linear layers
    lora = persistent_bytes(s, Work(tokens=1, lora_r=16, has_reference=True))
    assert list(lora.values()) == [2 * s.params, *(x * s.adapter(16) for x in (4, 4, 8)), 0]
    assert list(persistent_bytes(s, Work(tokens=1, weight_bytes=2)).values()) == [x * s.params for x in (2, 0, 2, 4, 0)]
    assert persistent_bytes(s, Work(tokens=1, other_bytes=8.0, shards=8))["reference"] == 1.0
    copies = Work(tokens=1, weight_bytes=2, shards=8, has_copies=True)  # float32 until the last micro-batch
    for accumulates, size in ((True, 4), (False, 2)):
        work = replace(copies, accumulates=accumulates)
        assert 8 * persistent_bytes(s, work)["gradients"] == size * s.params


def test_only_trained_parameters_have_gradients_and_moments(capsys):
    part, trained = ("model.layers.0.mlp", "model.norm"), 3 * 128 * 352 + 128
    s = plan.sizes_for(sft.Config(model=ModelConfig(model="builtin:tiny", trained_parameters=part), data=DATA))
    work = Work(tokens=1, weight_bytes=2)
    assert list(persistent_bytes(s, work).values()) == [2 * s.params, 0, 2 * trained, 4 * trained, 0]
    single = plan.peak_parts(s, replace(work, accumulates=False))  # a step that starts without gradients
    assert 0 < single["gradients"] <= 2 * trained
    assert main(["--model", "builtin:tiny", "--trained-parameters", *part]) == 0
    assert f"parameters, {trained:,} trained; sft" in capsys.readouterr().out
    assert main(["--model", "builtin:tiny", "--trained-parameters", *part, "--lora.r", "4"]) == 2
    assert "trained_parameters" in capsys.readouterr().err


def test_a_critic_is_not_sharded(sizes):
    s, small = sizes["llama-3.1-8b"], sizes["qwen3-0.6b"]
    work = Work(tokens=1, shards=8)
    head = critic_bytes(s, work, None)
    assert head == 16 * (4096 * 8192 + 8192 + 8192 + 1)  # two layers with biases; weights, gradients, two moments
    model = critic_bytes(s, work, small)
    assert model == 16 * small.params
    assert critic_bytes(s, replace(work, lora_r=16), small) == 2 * small.params + 16 * small.adapter(16)
    assert persistent_bytes(s, replace(work, critic=model)) == persistent_bytes(s, work) | {"critic": model}


def test_8_bit_moments_by_hand(sizes):
    s = sizes["qwen3-0.6b"]
    norms = 28 * (2 * 1024 + 2 * 128) + 1024  # tensors too small for 8 bits
    small = persistent_bytes(s, Work(tokens=1, optim="adamw_8bit"))["optimizer state"]
    assert small == 2 * (1 + 4 / 256) * (s.params - norms) + 8 * norms
    lower = persistent_bytes(s, Work(tokens=1, optim="adamw_8bit", weight_bytes=2))["optimizer state"]
    assert lower == small - 4 * norms
    lora = persistent_bytes(s, Work(tokens=1, optim="adamw_8bit", lora_r=1))
    assert lora["optimizer state"] == 8 * s.adapter(1)  # all tensors are small


@pytest.mark.parametrize("optim, dtype", [("adamw", "float32"), ("adamw", "bfloat16"), ("adamw_8bit", "float32"),
                                          ("adamw_8bit", "bfloat16")])  # fmt: skip
def test_optimizer_state_matches_the_optimizer(optim, dtype):
    if optim == "adamw_8bit":
        pytest.importorskip("torchao", reason="torchao is not installed; it is an extra, pip install torchao")
    model = tiny("qwen3", WIDE | {"intermediate_size": 450}, getattr(torch, dtype))
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    optimizer, _ = build_optimizer(model, OptimConfig(optim=optim), 2)
    torch.compiler.set_stance("force_eager")  # compiling torchao's code takes a minute on a CPU
    try:
        optimizer.step()
    finally:
        torch.compiler.set_stance("default")
    slots = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    allocated = sum(sum(y.nbytes for y in (x.codes, x.scale)) if hasattr(x, "codes") else x.nbytes for x in slots)
    work = Work(tokens=1, optim=optim, weight_bytes=getattr(torch, dtype).itemsize)
    assert persistent_bytes(sizes_of(model), work)["optimizer state"] == allocated


def peak_bytes(step) -> int:
    """Return the peak of the bytes that a call allocates, from torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# model, vocabulary, checkpointing, accumulates, point of the peak
STEPS = [("llama", 300, {}, True, "log-prob head"), ("llama", 40, {}, False, "backward of a block"),
         ("llama", 40, ALL, True, "backward of a block"), ("llama", 40, ALL, False, "backward of the first block"),
         ("llama", 3000, ALL, False, "log-prob head"), ("qwen3_moe", 40, ALL, True, "backward of a block"),
         ("qwen3_moe", 40, ALL, False, "backward of the first block"),
         ("llama", 40, FIRST, True, "backward of a block"),
         ("qwen3_moe", 40, FIRST, True, "backward of a block")]  # fmt: skip


@pytest.mark.parametrize("kind, vocab, checkpointing, accumulates, fullest", STEPS)
def test_peak_of_a_step_on_a_cpu_matches_the_profiler(kind, vocab, checkpointing, accumulates, fullest):
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = SMALL | (EXPERTS if kind == "qwen3_moe" else {})
    config = AutoConfig.for_model(
        kind, **numbers, num_hidden_layers=3, head_dim=32, vocab_size=vocab, tie_word_embeddings=True
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    work = Work(tokens=128, compute=4, accumulates=accumulates, triton=False, **checkpointing)
    checkpoint(model, work)
    ids = torch.arange(128) % vocab

    def step() -> None:
        states = model.base_model(input_ids=ids[None], position_ids=torch.arange(128)[None], use_cache=False)
        hidden, head = states.last_hidden_state[0], model.get_output_embeddings().weight
        linear_logprob_loss(hidden, head, ids, lambda tokens, rows: (-tokens.logp.sum(), None))[0].backward()

    step()
    if not accumulates:
        model.zero_grad(set_to_none=True)
    s = sizes_of(model)
    assert plan.fullest_point(s, work).name == fullest
    assert plan.fullest_point(s, work).total == pytest.approx(peak_bytes(step), rel=0.15)
    weights = sum(x.nbytes for x in model.parameters())
    total = weights * (3 + accumulates) + plan.fullest_point(s, work).total  # with two moments
    assert peak(s, work) == pytest.approx(total)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_of_a_step_with_experts_on_a_gpu(checkpointing):
    from transformers import AutoConfig, AutoModelForCausalLM

    use_grouped_matmuls()
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16, head_dim=64,
        num_key_value_heads=8, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, vocab_size=32768,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to("cuda").train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    num = 8192
    ids = torch.arange(num, device="cuda") % 32768
    for _ in range(2):  # the second step has gradients of the first
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            states = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0].bfloat16()
        head = model.get_output_embeddings().weight
        linear_logprob_loss(states, head, ids, lambda tokens, rows: (-tokens.logp.sum(), None))[0].backward()
    work = Work(tokens=num, checkpointing=checkpointing, optim="adamw")
    s = sizes_of(model)
    planned = peak(s, work) - persistent_bytes(s, work)["optimizer state"]
    assert planned == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.15)


def test_experts_count_once_for_memory_and_by_use_for_speed():
    s = sizes_of(tiny("qwen3_moe", SMALL | EXPERTS))
    assert s.experts[:5] == (2, 8, 3, 96, 0) and s.expert_params == 2 * 8 * 3 * 96 * 128
    assert persistent_bytes(s, Work(tokens=1))["weights"] == 4 * s.params
    used = s.params - s.expert_params * 5 // 8
    assert plan.flops_per_token(s, Work(tokens=1)) == 6 * used
    assert plan.gathered_bytes(s, Work(tokens=1, shards=2))[0] > 3 * 2 * s.expert_params / 2


def test_a_checkpointed_forward_keeps_the_casts_of_all_weights(sizes):
    s = sizes["llama-3.1-8b"]
    points = {x.name: x for x in plan.step_points(s, Work(tokens=1024, checkpointing=True))}
    assert points["forward, casts of all weights"].buffers > 2 * s.matrices
    sharded = {x.name: x for x in plan.step_points(s, Work(tokens=1024, checkpointing=True, shards=8))}
    assert sharded["forward, casts of all weights"].buffers < 2 * s.matrices


def test_largest_micro_batch_is_the_last_that_fits(sizes):
    s = sizes["qwen3-1.7b"]
    all_options = [{"checkpointing": True}, {"head": "any loss"}, {"shards": 8}, {"lora_r": 16}, {"triton": False}]
    for options in ({}, *all_options):
        work = Work(tokens=1, **options)
        tokens = plan.largest_micro_batch(s, work, 60.0)
        assert tokens >= 256, options
        assert peak(s, replace(work, tokens=tokens)) <= 60 * GIB < peak(s, replace(work, tokens=tokens + 256)), options
        assert plan.largest_micro_batch(s, work, 0.5) == 0, options


def test_a_base_in_4_bits_unpacks_one_matrix_at_a_time(sizes):
    s = sizes["llama-3.1-8b"]
    work = Work(tokens=8192, lora_r=16, checkpointing=True, head="any loss")
    less = (2 - plan.PACKED) * s.matrices
    weights = [persistent_bytes(s, x)["weights"] for x in (work, replace(work, in_4bit=True))]
    assert weights[0] - weights[1] == less
    assert peak(s, work) - peak(s, replace(work, in_4bit=True)) == less - 2 * 4096 * 14336 > 9 * GIB


def test_offloading_keeps_the_inputs_of_two_blocks_on_the_gpu(sizes):
    s = sizes["qwen3-1.7b"]
    for options, width in (({"weight_bytes": 2}, 2), ({}, 4), ({"lora_r": 16}, 2)):
        work = Work(tokens=65536, checkpointing=True, **options)
        less, one = replace(work, offloading=True), 65536 * width * 2048
        assert activation_bytes(s, work) - activation_bytes(s, less) == 26 * one
        assert plan.offloaded_bytes(s, less) == 27 * one and plan.offloaded_bytes(s, work) == 0
        at_head = [plan.step_points(s, x)[0].activations for x in (work, less)]
        assert at_head[0] - at_head[1] == 27 * one
        assert 25 * one < peak(s, work) - peak(s, less) <= 27 * one
    alone = replace(s, layers=1)
    work = Work(tokens=64, checkpointing=True)
    assert activation_bytes(alone, replace(work, offloading=True)) == activation_bytes(alone, work)


def test_command_counts_offloaded_activations(capsys):
    argv = ["--shape", "qwen3-1.7b", "--gpu", "h200", "--max-tokens-per-micro-batch", "65536"]
    peaks = []
    for more in (["--gradient-checkpointing"], ["--gradient-checkpointing", "--activation-offloading"]):
        assert plan.main([*argv, *more]) == 0
        text = capsys.readouterr().out
        peaks.append([float(x) for x in re.search(r"^peak +([\d.]+) +([\d.]+)$", text, flags=re.MULTILINE).groups()])
    assert "replicate + gc 13.50." in text
    # at least 26 block inputs, plus the attention of 28 blocks: with offloading, compiled blocks do not keep it
    attention = 28 * 65536 * 16 * (2 * 128 + 4) / plan.GIB
    assert peaks[0][0] == peaks[1][0] and 12.5 < peaks[0][1] - peaks[1][1] - attention <= 13.5
    assert plan.main([*argv, "--activation-offloading"]) == 0
    assert capsys.readouterr().out == text


def test_flops_per_token(sizes):
    s = sizes["llama-3.1-8b"]
    num = s.params - s.embedding
    assert plan.flops_per_token(s, Work(tokens=1)) == 6 * num
    assert plan.flops_per_token(s, Work(tokens=1, checkpointing=True)) == 8 * num
    assert plan.flops_per_token(s, Work(tokens=1, lora_r=8, has_reference=True)) == 6 * num
    tied = sizes["qwen3-0.6b"]
    assert plan.flops_per_token(tied, Work(tokens=1)) == 6 * tied.params


def test_copied_constants_match_their_source():
    triton_head = pytest.importorskip("kernels.linear_logprob_triton")
    assert (triton_head.CHUNK, triton_head.PART, triton_head.SLICE) == (plan.CHUNK, plan.PART, plan.SLICE)
    assert (BLOCK_ELEMENTS, BYTES_PER_WEIGHT) == (plan.TORCH_BLOCK, plan.PACKED)
    assert (local.PAGE["cuda"], engine_choice.SPARE) == (plan.PAGE, plan.RESERVE * GIB)
    assert (local.ROWS, _memory_share(VllmConfig(), "cuda", colocate=True)) == (plan.ROWS, plan.SHARE)


def printed_table(text: str) -> dict[str, list[str]]:
    return {line[:36].strip(): line[36:].split() for line in text.splitlines() if len(line) > 36}


def test_command_prints_table_and_verdict(capsys):
    argv = ["--shape", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100", "--method", "dpo", "--gradient-checkpointing"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    rows = printed_table(text)
    assert "8,030,261,248 parameters; dpo, bfloat16, adamw" in text
    assert rows["weights"] == ["29.92", "29.92", "3.74", "3.74"]
    assert rows["reference"] == ["14.96", "14.96", "1.87", "1.87"]
    assert rows["fits"] == ["no", "no", "yes", "yes"]
    assert "replicate does not fit, fsdp fits" in text
    assert "11.74 GiB" in text  # stored logits
    names = ("weights", "gradients", "optimizer state", "reference", "activations", "temporary buffers")
    for i, total in enumerate(map(float, rows["peak"])):
        assert sum(float(rows[name][i]) for name in names) == pytest.approx(total, abs=0.05)


def test_command_takes_a_folder_lora_and_a_colocated_server(capsys, tmp_path):
    plan.known_config("qwen3-0.6b").save_pretrained(tmp_path)  # only a config.json
    argv = "--method grpo --lora.r 16 --rollout.engine vllm --gpu h200".split()
    assert main(["--model", str(tmp_path), *argv]) == 0
    text = capsys.readouterr().out
    assert "596,049,920 parameters, 10,092,544 in adapters" in text
    sampling = next(x for x in text.splitlines() if x.startswith("while sampling, vLLM's share")).split()[-1]
    trainer = (2 * 596_049_920 + 12 * 10_092_544) / GIB
    assert float(sampling) == pytest.approx(trainer + 0.35 * CARDS["h200"].gib, abs=0.01)
    assert main(["--model", "builtin:tiny", "--method", "grpo", "--gpu", "4090"]) == 0
    text = capsys.readouterr().out
    assert "while sampling, local cache" in text and "kept during training: replicate" in text
    assert printed_table(text)["engine"] == ["local", "local"]
    assert plan.pick_card(PlanConfig(gpu="a100")) == ("a100-80", CARDS["a100-80"])


def test_command_prints_the_engine_that_auto_chooses_and_its_memory(capsys):
    def table_of(*argv: str) -> tuple[dict[str, list[str]], str]:
        assert main(["--method", "grpo", *argv]) == 0
        text = capsys.readouterr().out
        return printed_table(text), text

    rows, text = table_of("--shape", "qwen3-8b", "--gpus", "4", "--gpu", "a100")
    assert rows["engine"] == ["vllm", "vllm", "local", "local"] and rows["while sampling"]
    assert rows["fits"] == ["no", "no", "yes", "yes"]
    assert "Engine of fsdp: 49.31 GiB (copy of the weights 15.26, cache for 512 concurrent rows" in text
    assert "freed during training: fsdp, fsdp + gc." in text
    rows, text = table_of("--shape", "llama-3.1-8b", "--gpu", "h200")  # no room for a copy of the weights and a token
    assert rows["engine"] == ["vllm", "vllm"] and "Engine of" not in text
    bounded = ("--shape", "qwen3-0.6b", "--lora.r", "16", "--gpu", "4090", "--rollout.cache-gib", "4")
    rows, text = table_of(*bounded)
    assert "cache for 77 concurrent rows 4.00" in text and rows["engine"] == ["local", "local"]
    rows, _ = table_of(*bounded[:-2], "--rollout.engine", "vllm")
    assert rows["engine"] == ["vllm", "vllm"]
    main(["--shape", "qwen3-0.6b", "--method", "sft"])
    assert "engine" not in capsys.readouterr().out.lower()


def test_columns_follow_the_parallel_flags():
    def columns_of(*argv: str) -> dict[str, Work]:
        with planned_run(["--model", "builtin:tiny", "--gpus", "8", *argv]) as (_, cfg):
            columns = plan.columns(cfg, plan.sizes_for(cfg), CARDS["h200"])
        return {x.name: x.work for x in columns if "gc" not in x.name}

    assert {name: work.shards for name, work in columns_of().items()} == {"replicate": 1, "fsdp": 8}
    assert columns_of("--parallel.mode", "replicate").keys() == {"replicate"}
    sharded = columns_of("--parallel.shard", "4")
    assert [(name, x.shards, x.has_copies) for name, x in sharded.items()] == [("fsdp", 4, True)]
    shared = columns_of("--parallel.mode", "fsdp", "--parallel.context", "4")["fsdp"]
    assert (shared.shards, shared.local_tokens, shared.head) == (8, 8192 // 4, "any loss")
    for flag in ("--load-in-4bit", "--fp8-base"):
        assert columns_of("--lora.r", "8", flag).keys() == {"replicate"}, "never sharded"


def test_the_command_takes_the_flags_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = tmp_path / "run.yaml"
    config.write_text("method: sft\nmodel: builtin:tiny\ndata: rows.jsonl\nmax_length: 256\nlearning_rate: 1e-5\n")
    argv = ["--config", str(config), "--per-device-train-batch-size", "2", "--dry-run"]
    with planned_run([*argv, "--gpus", "4", "--gpu", "h100"]) as (own, cfg):
        assert os.environ["WORLD_SIZE"] == "4" and cfg.run.sequences_per_step == 8
        assert (own.gpu, cfg.optim.learning_rate, cfg.data.data) == ("h100", 1e-5, ("rows.jsonl",))
        work = plan.unsharded_work(cfg, plan.sizes_for(cfg), "cuda")
        assert (work.tokens, work.accumulates, work.compute) == (2 * 256, False, 2), "the batch of this run"
    assert os.environ["WORLD_SIZE"] == "2"
    assert main(argv) == 0 and "2 x h200" in capsys.readouterr().out
    with planned_run(["--shape", "qwen3-0.6b", "--config", str(config), "--method", "sft"]) as (_, cfg):
        assert cfg.model.model == "qwen3-0.6b" and plan.sizes_for(cfg).params == PUBLISHED["qwen3-0.6b"]


def test_without_rows_or_limits_the_command_plans_full_batches():
    with planned_run(["--model", "builtin:tiny", "--method", "grpo"]) as (_, cfg):
        work = plan.unsharded_work(cfg, plan.sizes_for(cfg), "cuda")
        assert (work.tokens, work.accumulates) == (8192, True)
        assert plan.rollout_size_of(cfg, "cuda") == (512, 64, 768, 256)
    with planned_run(["--model", "builtin:tiny", "--method", "grpo", "--num-generations", "12"]) as (_, cfg):
        assert plan.rollout_size_of(cfg, "cuda") == (512, 43, 768, 256), "whole groups"
    with planned_run(["--model", "builtin:tiny", "--per-device-train-batch-size", "4"]) as (_, cfg):
        assert plan.unsharded_work(cfg, plan.sizes_for(cfg), "cuda").tokens == 4 * 1024
    argv = ["--model", "builtin:tiny", "--method", "grpo", "--data", "rows.jsonl", "--max-prompt-length", "64"]
    with planned_run(argv) as (_, cfg):
        assert plan.rollout_size_of(cfg, "cuda") == (8, 1, 64, 256)
    with planned_run(["--method", "sft"]) as (_, cfg):
        assert cfg.model.model == "builtin:tiny" and cfg.run.per_device_train_batch_size == 128, "the recipe"


def test_every_method_can_be_planned_without_rows(capsys):
    for name in method_names():
        more = ["--teacher", "builtin:tiny"] if name == "opd" else []
        assert main(["--model", "builtin:tiny", "--method", name, *more]) == 0, name
    assert main(["--model", "builtin:tiny", "--method", "ebft", "--mode", "strided"]) == 0
    assert "engine" not in capsys.readouterr().out.rpartition("ebft,")[2]


BARE = """
from trainer.config.blocks import MethodConfig, ModelConfig, Flat, RunConfig
from dataclasses import dataclass
@dataclass(frozen=True, kw_only=True)
class Config:
    model: Flat[ModelConfig]
    run: Flat[RunConfig]
def train(cfg): ...
"""


def test_invalid_settings(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare_algo.py").write_text(BARE)
    shape = ["--shape", "qwen3-0.6b"]
    in_4bit = [*shape, "--load-in-4bit", "--lora.r", "8"]
    for argv, words in (
        (["--model", str(tmp_path)], "neither config.json"),
        (["--shap", "qwen3-8b"], "--shap: unknown flag; did you mean --shape?"),
        ([*shape, "--gpus", "x"], "--gpus=x: expected a whole number"),
        ([*shape, "--gpu", "tpu"], "--gpu=tpu: expected one of here, h200"),
        ([*shape, "--gpus", "0"], "gpus=0: must be 1 or more"),
        ([*shape, "--model", "a"], "model=a, shape=qwen3-0.6b: pass only one"),
        (["--shape", "llama-9"], "--shape=llama-9: expected one of qwen3-0.6b"),
        ([*shape, "--method", "gspo"], "--method=gspo: unknown method; it is a setting of grpo"),
        ([*shape, "--resume", "runs/a"], "--resume: a plan resumes nothing"),
        (["grpo", *shape], "grpo: write --method grpo"),
        (["run.yaml"], "run.yaml: write --config run.yaml"),
        ([*shape, "--method", "grpo", "--rollout.max-length", "9"], "did you mean --max-prompt-length?"),
        ([*shape, "--method", "grpo", "--value-model", "x"], "--value-model: unknown flag; only ppo has it"),
        ([*shape, "--gpus", "8", "--parallel.shard", "3"], "parallel.shard=3: must divide the 8"),
        ([*shape, "--parallel.mode", "fsdp"], "or plan them with trainer.plan --gpus"),
        ([*shape, "--gpus", "2", "--parallel.mode", "replicate", "--parallel.shard", "2"], "parallel.shard=2"),
        ([*shape, "--load-in-4bit"], "load_in_4bit=True: 4-bit weights cannot be trained; train adapters"),
        ([*in_4bit, "--gpus", "2", "--parallel.mode", "fsdp"], "load_in_4bit=True: FSDP cannot shard"),
        ([*in_4bit, "--gpus", "2", "--parallel.context", "2"], "not supported with parallel.context=2"),
        ([*in_4bit, "--method", "rm"], "load_in_4bit=True: a reward model is exported merged"),
        ([*shape, "--trained-dtype", "bfloat16", "--dtype", "float32"], "trained_dtype=bfloat16"),
        ([*shape, "--method", "bare_algo"], "method=bare_algo: cannot be planned, because its Config is not a Method"),
    ):
        assert main(argv) == 2, argv
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1, error


# out of memory

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


def test_work_of_a_run(tmp_path):
    model = ModelConfig(model=folder_of(tmp_path))
    run = RunConfig(max_tokens_per_micro_batch=4096)
    cfg = dpo.Config(model=model, data=DATA, run=run)
    s = plan.sizes_for(cfg)
    count = 6 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160 + 2 * 64) + 64 * 64 + 64
    assert (s.params, s.adapter(2)) == (count, 2 * 6 * (128 + 96 + 96 + 128 + 3 * 224))
    work = plan.work_of(cfg, s, "cuda")
    assert (work.tokens, work.accumulates, work.head, work.has_reference) == (4096, True, "any loss", True)
    assert (work.weight_bytes, work.compute, work.shards) == (4, 2, 1)
    parts = plan.peak_parts(s, work)
    assert [parts[x] / count for x in ("weights", "gradients", "optimizer state", "reference")] == [4, 4, 8, 2]
    assert sum(parts.values()) == peak(s, work)

    low = replace(model, trained_dtype="bfloat16", gradient_checkpointing=True)
    small = plan.work_of(replace(cfg, model=low, optim=replace(cfg.optim, optim="adamw_8bit")), s, "cuda")
    assert (small.weight_bytes, small.optim, small.checkpointing) == (2, "adamw_8bit", True)
    free = (replace(cfg, reference=replace(cfg.reference, ref="precomputed")), replace(cfg, reference_free=True))
    assert not any(plan.work_of(x, s, "cuda").has_reference for x in free)
    other = replace(cfg.reference, ref_model="builtin:tiny")
    tiny = plan.sizes_for(sft.Config(model=ModelConfig(model="builtin:tiny"), data=DATA)).params
    assert plan.work_of(replace(cfg, reference=other, lora=LoraConfig(r=4)), s, "cuda").other_bytes == 2 * tiny


def test_blocks_are_recomputed_by_memory(tmp_path, monkeypatch):
    cfg = dpo.Config(model=ModelConfig(model=folder_of(tmp_path)), data=DATA)
    s = plan.sizes_for(cfg)

    def chosen(room: float, **settings: Any) -> tuple[int, Work]:
        monkeypatch.setattr(plan, "memory_here", lambda: room / plan.USABLE)
        work = plan.work_of(replace(cfg, model=replace(cfg.model, **settings)), s, "cuda")
        return plan.num_recomputed(s, work), work

    none, whole = chosen(GIB)
    assert none == 0 and not whole.checkpointing
    least = peak(s, replace(whole, checkpointing=True))
    counts = []
    for share in (1.0, 0.999, 0.5, 0.0, -0.5):  # of the memory that recomputing all blocks saves
        room = least + share * (peak(s, whole) - least)
        num, work = chosen(room)
        counts.append(num)
        assert peak(s, work) <= room + 1 or num == s.layers
        fewer = replace(work, checkpointing=num > 1, recomputed=num - 1)
        assert num == 0 or peak(s, fewer) > room, "one block less does not fit"
    assert counts[0] == 0 < counts[1] < counts[2] < counts[3] <= counts[4] == s.layers, counts
    assert chosen(0, gradient_checkpointing=False)[0] == 0 and chosen(GIB, gradient_checkpointing=True)[0] == s.layers
    assert chosen(GIB, activation_offloading=True)[1].checkpointing


ONE_PASS, ANY_LOSS = MethodMemory("one pass"), MethodMemory("any loss")
FACTS = {
    **dict.fromkeys(("sft", "grpo", "gdpo", "rloo", "opd", "ppo", "ebft", "sdpo"), ONE_PASS),
    **dict.fromkeys(("kto", "online_dpo"), ANY_LOSS),
    **dict.fromkeys(("dpo", "ipo", "cpo", "simpo", "orpo"), ANY_LOSS._replace(sequences=2)),
    "rm": MethodMemory("none", sequences=2),
    "prm": MethodMemory("none"),
}


def test_facts_of_every_method():
    assert {name: load_method(name).Config.memory for name in method_names()} == FACTS


@pytest.mark.parametrize("name", ["cpo", "dpo", "ebft", "gdpo", "grpo", "kto", "prm", "rm", "sft"])
def test_every_kind_of_method_can_be_planned(name):
    data = PromptConfig(data=("x",)) if name in ("grpo", "gdpo") else DATA
    cfg = load_method(name).Config(model=ModelConfig(model="builtin:tiny"), data=data)
    s = plan.sizes_for(cfg)
    assert plan.work_of(cfg, s, "cuda").tokens > 0
    assert (plan.engine_memory_of(cfg, s, plan.work_of(cfg, s)) is not None) == (name in ("ebft", "gdpo", "grpo"))
    assert plan.planned_peak(cfg, 1000) > 0


def test_planned_peak_splits_a_step_as_the_run_does():
    run = RunConfig(max_tokens_per_micro_batch=2048, per_device_train_batch_size=64)
    cfg = grpo.Config(model=ModelConfig(model="builtin:tiny"), data=PromptConfig(data=("x",)), run=run)
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s)
    whole = replace(work, tokens=1500, trained_tokens=500, accumulates=False)
    engine = plan.engine_memory_of(cfg, s, work)  # 64 completions of 257 tokens, six pages each
    assert engine == (0, plan.cache_bytes(s, 4, 64 * 384 + 64), 4 * 64 * s.vocab)
    sampling = plan.sampling_bytes(s, work, engine)
    assert plan.planned_peak(cfg, 1500, trained_tokens=500) == max(peak(s, whole), sampling)
    served = replace(cfg, rollout=replace(cfg.rollout, engine="vllm"))
    assert plan.planned_peak(served, 1500, trained_tokens=500) == peak(s, whole)
    part = replace(work, tokens=2048, trained_tokens=1024, accumulates=True)
    assert plan.planned_peak(served, 6000, trained_tokens=3000) == peak(s, part)
    halves = replace(served, run=replace(run, gradient_accumulation_steps=2))
    part = replace(work, tokens=750, trained_tokens=250, accumulates=True)
    assert plan.planned_peak(halves, 1500, trained_tokens=500) == peak(s, part)


def test_engine_memory_on_a_gpu_is_a_copy_pages_and_logits(sizes):
    s, work = sizes["qwen3-0.6b"], Work(tokens=8192)
    size = plan.RolloutSize(rows=512, prompts=64, prompt_length=255, completion_length=256)
    assert size.tokens == 64 * 256 + 512 * 384 + 64
    engine = plan.engine_memory(s, work, size, "cuda")
    assert engine == (2 * s.params, 2 * 28 * 8 * 128 * 2 * size.tokens, 512 * 151936 * 4)
    assert plan.engine_memory(s, work, size, "cpu") == engine._replace(copy=0)
    assert plan.engine_memory(s, work, size, "cuda", GIB).cache == GIB
    # 1 GiB is 9362 tokens: 22 rows and three prompts take 9280
    assert [plan.rows_that_fit(s, work, size, cache) for cache in (GIB, engine.cache, 0)] == [22, 512, 0]

    persistent = persistent_bytes(s, work)
    sampling = plan.sampling_bytes(s, work, engine)
    assert sampling == sum(persistent.values()) - persistent["gradients"] + sum(engine)
    room = peak(s, work) + sum(engine)
    assert plan.peak_with_engine(s, work, engine, room) == room  # both fit
    assert plan.peak_with_engine(s, work, engine, room - 1) == peak(s, work)
    assert plan.peak_with_engine(s, work, None, room) == peak(s, work)
    assert [plan.room_for_cache(s, work, size, room) for room in (sampling, 0)] == [engine.cache, 0]
    group = size._replace(rows=8, prompts=1)
    needed = sum(persistent.values()) + plan.cast_bytes(s, work) + 2 * s.params + plan.cache_bytes(s, 2, group.tokens)
    assert plan.fits_in_process(s, work, group, needed) and not plan.fits_in_process(s, work, group, needed - 1)


@pytest.mark.parametrize("shards", [2, 4])
def test_sharded_weights_are_gathered_one_at_a_time_to_sample(sizes, shards):
    s = sizes["qwen3-0.6b"]
    full, lora = (Work(tokens=1, shards=shards, lora_r=r) for r in (0, 16))
    engine, none = plan.EngineMemory(2 * s.params, 1e9, 1e8), plan.EngineMemory(1, 0, 0)
    for work, gathered in ((full, (2 + 2 / shards) * s.embedding), (lora, 2 * s.embedding)):
        persistent = plan.persistent_without_gradients(s, work)
        assert plan.copied_bytes(s, work) == gathered
        assert plan.sampling_bytes(s, work, none) == persistent + 1 + gathered
        assert plan.sampling_bytes(s, work, engine) == persistent + sum(engine)  # the copy is filled before
        assert plan.sampling_bytes(s, work, none._replace(copy=0)) == persistent + 2 * s.params  # gathered in full


def test_engine_of_a_run_on_a_gpu(monkeypatch, tmp_path):
    run = RunConfig(per_device_train_batch_size=1024)
    model = ModelConfig(model=folder_of(tmp_path))
    cfg = grpo.Config(model=model, data=PromptConfig(data=("x",)), run=run, max_prompt_length=100)
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s, "cuda")
    assert plan.rollout_size_of(cfg, "cuda") == (512, 128, 100, 256) and plan.rollout_size_of(cfg, "cpu").rows == 256

    def memory(gib=10.0, **rollout: Any) -> Any:
        monkeypatch.setattr(plan, "memory_here", lambda: gib * GIB)
        return plan.engine_memory_of(replace(cfg, rollout=replace(cfg.rollout, **rollout)), s, work, "cuda")

    cache = plan.cache_bytes(s, 2, 128 * 128 + 512 * 384 + 64)
    assert memory() == memory(engine="local") == (2 * s.params, cache, 4 * 512 * 64)
    assert memory(max_batch_size=64).cache == plan.cache_bytes(s, 2, 128 * 128 + 64 * 384 + 64)
    assert memory(cache_gib=0.01).cache == 0.01 * GIB and memory(engine="vllm") is None
    small = memory(gib=(plan.sampling_bytes(s, work, memory()) - 1e6) / GIB)
    assert cache - 1e6 == pytest.approx(small.cache, abs=1)
    assert memory(gib=16 * s.params / GIB) is None  # auto: too small for the local engine
    ahead = replace(cfg, overlap=replace(cfg.overlap, async_prefetch=True))
    assert plan.engine_memory_of(ahead, s, work, "cuda") is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert plan.rollout_size_of(replace(cfg, num_generations=64), "cuda") == (512, 16, 100, 256)  # per rank


def test_shards_follow_the_number_of_ranks(monkeypatch, tmp_path):
    cfg = dpo.Config(model=ModelConfig(model=folder_of(tmp_path)), data=DATA)
    s = plan.sizes_for(cfg)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for mode, shard, expected in (("auto", None, 1), ("replicate", None, 1), ("fsdp", None, 4), ("fsdp", 2, 2),
                                  ("auto", 2, 2)):  # fmt: skip
        parallel = ParallelConfig(mode=mode, shard=shard)
        work = plan.work_of(replace(cfg, parallel=parallel), s, "cpu")
        assert (work.shards, work.has_copies) == (expected, expected == 2), (mode, shard)
    monkeypatch.setattr(sharding, "SMALL", 16 * s.params)  # room for the policy, but not for the reference
    assert plan.work_of(cfg, s, "cpu").shards == 4
    monkeypatch.setattr(sharding, "SMALL", 0)
    fp8 = replace(cfg, model=replace(cfg.model, fp8_base=True), lora=LoraConfig(r=4))
    assert plan.work_of(fp8, s, "cpu").shards == 1, "FP8 weights are not sharded"


def test_ranks_that_share_rows_split_tokens_but_not_keys(monkeypatch, tmp_path):
    run = RunConfig(max_tokens_per_micro_batch=4096, per_device_train_batch_size=1)
    cfg = sft.Config(model=ModelConfig(model=folder_of(tmp_path)), data=DATA, run=run, max_length=2048)
    monkeypatch.setenv("WORLD_SIZE", "2")
    s = plan.sizes_for(cfg)
    copies = [ParallelConfig(mode="replicate", context=size) for size in (1, 2)]
    alone, pair = (plan.work_of(replace(cfg, parallel=parallel), s, "cuda") for parallel in copies)
    assert (alone.tokens, pair.tokens) == (2048, 4096)  # pair: two rows, half of each per rank
    assert pair.local_tokens == pair.local_trained_tokens == 2048
    assert (alone.head, pair.head) == ("one pass", "any loss")
    assert activation_bytes(s, pair) - activation_bytes(s, alone) == 6 * 2048 * 2 * 2 * 16 * 2  # bfloat16 keys, values


def test_advice_matches_the_planner(tmp_path):
    model = ModelConfig(model=folder_of(tmp_path))
    cfg = dpo.Config(model=model, data=DATA, run=RunConfig(max_tokens_per_micro_batch=4096))
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s, "cuda")
    flags = {one.flag: one.saves for one in plan.advice(s, work, cfg)}
    assert flags["--max-tokens-per-micro-batch 2048"] == peak(s, work) - peak(s, replace(work, tokens=2048))
    assert flags["--gradient-checkpointing"] == peak(s, work) - peak(s, replace(work, checkpointing=True))
    assert flags["--ref precomputed"] == 2 * s.params
    large = s.params - 13 * 64 - 12 * 32 * 64  # norms, keys and values are below 4096
    assert flags["--optim adamw_8bit"] == pytest.approx((8 - 2 * (1 + 4 / 256)) * large)
    assert flags["--trained-dtype bfloat16"] > 8 * s.params and flags["--lora.r 16"] > 0
    assert list(flags.values()) == sorted(flags.values(), reverse=True)


def test_advice_is_about_this_run():
    model = ModelConfig(model="builtin:tiny", gradient_checkpointing=True, activation_offloading=True)
    run = RunConfig(max_tokens_per_micro_batch=512)
    cfg = sft.Config(model=model, data=DATA, run=run, lora=LoraConfig(r=8), max_length=1024)
    s = plan.sizes_for(cfg)
    flags = [one.flag for one in plan.advice(s, plan.work_of(cfg, s, "cuda"), cfg)]
    # one sequence fills a micro-batch; adapters are too small for 8-bit moments; the other flags are set
    assert sorted(flags) == ["--load-in-4bit", "--lora.r 4", "--max-length 512"]
    packed = replace(cfg, model=replace(model, load_in_4bit=True))
    flags = [one.flag for one in plan.advice(s, plan.work_of(packed, s, "cuda"), packed)]
    assert sorted(flags) == ["--lora.r 4", "--max-length 512"]


def test_advice_names_offloading_on_a_gpu(monkeypatch):
    model = ModelConfig(model="builtin:tiny", gradient_checkpointing=True)
    cfg = sft.Config(model=model, data=DATA, max_length=1024)
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s, "cuda")
    assert "--activation-offloading" not in [x.flag for x in plan.advice(s, work, cfg)]  # not supported on a CPU
    monkeypatch.setattr(plan, "device_here", lambda: "cuda")
    advice = {x.flag: x for x in plan.advice(s, work, cfg)}["--activation-offloading"]
    assert advice.saves == peak(s, work) - peak(s, replace(work, offloading=True))
    assert f" {work.local_tokens * 4 * s.width * (s.layers - 1) / GIB:.3g} GiB" in advice.remark


@pytest.mark.slow
def test_out_of_memory_is_one_message_and_the_run_can_be_resumed(tmp_path, monkeypatch, capfd):
    argv = ["--method", "grpo", "--max-steps", "2", "--save-steps", "1", "--per-device-train-batch-size", "16",
            "--max-eval-rows", "1", "--output-dir", str(tmp_path / "run")]  # fmt: skip
    backward = grpo.backward
    calls = iter([backward])

    def full(*args, **options):
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(grpo, "backward", lambda *args, **options: next(calls, full)(*args, **options))
    assert train(argv) == 2
    err = capfd.readouterr().err
    assert "error: out of memory: tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.81 GiB" in err
    assert "PYTORCH_CUDA_ALLOC_CONF" not in err and "Traceback" not in err
    assert "GiB: weights" in err and "cache" in err
    for flag in ("--gradient-checkpointing", "--lora.r 16", "--rollout.max-batch-size 8", "--max-tokens-per-micro"):
        assert flag in err, err
    monkeypatch.setattr(grpo, "backward", backward)
    assert train(["--resume", str(tmp_path / "run"), "--gradient-checkpointing"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]


def test_an_out_of_memory_error_may_be_the_cause_of_another_error():
    try:
        try:
            raise torch.OutOfMemoryError(CUDA)
        except torch.OutOfMemoryError as inner:
            raise RuntimeError("prompt=a: its completions could not be made") from inner
    except RuntimeError as error:
        assert plan.is_out_of_memory(error) and "2.32 GiB" in plan.allocation_error(error)
    assert not plan.is_out_of_memory(RuntimeError("other"))
