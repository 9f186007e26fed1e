"""The planner against what autograd saves on a CPU, and peaks measured on an H200; the out-of-memory message."""

from __future__ import annotations

import json
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
from tests.entry import metrics
from trainer import plan
from trainer.__main__ import main as train
from trainer.config.blocks import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PromptConfig,
    RolloutConfig,
    RunConfig,
)  # fmt: skip
from trainer.config.groups import GroupConfig
from trainer.methods import cpo, dpo, ebft, gdpo, grpo, kto, prm, rm, sft
from trainer.plan import (
    CARDS,
    GIB,
    KNOWN,
    METHODS,
    Parallel,
    PlanConfig,
    Sizes,
    Work,
    critic_bytes,
    kept,
    main,
    peak,
    saved,
    sizes_of,
)
from trainer.policy import sharding
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


def tiny(kind: str, numbers: dict[str, int], dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, **numbers, num_hidden_layers=2, head_dim=32, vocab_size=300, tie_word_embeddings=True
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def saved_bytes(model: nn.Module, num_tokens: int, *, autocast: bool) -> int:
    """Of every storage that autograd saves in a forward up to the head, once, but for parameters."""
    own = {x.untyped_storage().data_ptr() for x in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}  # holding them, so that no address is used twice

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return x

    ids = torch.arange(num_tokens)[None] % 300
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model.base_model(input_ids=ids, position_ids=torch.arange(num_tokens)[None], use_cache=False)
    return sum(x.nbytes() for x in found.values())


@pytest.fixture(scope="module")
def sizes() -> dict[str, Sizes]:
    names = ("qwen3-0.6b", "qwen3-1.7b", "llama-3.1-8b")
    return {name: sizes_of(plan.build(plan.known_config(name))) for name in names}


def test_known_shapes_have_the_published_number_of_parameters():
    assert PUBLISHED.keys() == KNOWN.keys()
    for name, published in PUBLISHED.items():
        config, counts = plan.known_config(name), []
        layers = config.num_hidden_layers
        for num in (1, 2):  # every layer has the same number
            config.num_hidden_layers = num
            counts.append(sizes_of(plan.build(config)).params)
        assert counts[0] + (layers - 1) * (counts[1] - counts[0]) == published, name


SAVED = [
    ("llama", SMALL, {}), ("qwen3", WIDE, {}), ("qwen3", SMALL, {"compute": 4}), ("qwen3", SMALL, {"held": 2}),
    ("llama", WIDE, {"compute": 4, "checkpointing": True}), ("qwen3", SMALL, {"checkpointing": True}),
    ("llama", SMALL, {"lora_r": 8}), ("qwen3", WIDE, {"lora_r": 8}), ("llama", WIDE, {"lora_r": 8, "compute": 4}),
    ("qwen3", SMALL, {"lora_r": 8, "compute": 4}), ("qwen3", WIDE, {"lora_r": 8, "in_4bit": True}),
    ("llama", SMALL, {"lora_r": 8, "compute": 4, "in_4bit": True}),
]  # fmt: skip


def test_saved_activations_are_those_of_autograd():
    from peft import LoraConfig, get_peft_model

    for kind, numbers, options in SAVED:
        work = Work(tokens=64, **options)
        is_low = work.held == 2 or (work.lora_r and work.compute == 2)
        model = tiny(kind, numbers, torch.bfloat16 if is_low else torch.float32)
        s = sizes_of(model)
        assert (s.qk_norm, s.params) == (kind == "qwen3", sum(x.numel() for x in model.parameters()))
        if work.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if work.in_4bit:
            quantize_layers(model, torch.device("cpu"))
            assert kept(s, work)["weights"] == sum(x.nbytes for x in model.parameters())
        if work.lora_r:
            wrapped = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
            assert s.adapter(8) == sum(x.numel() for x in wrapped.parameters() if x.requires_grad)
            model = wrapped.get_base_model()
        found = saved_bytes(model, 64, autocast=work.compute == 2)
        found += 64 * 2 * 4 * s.head_dim * work.checkpointing  # the rotary table: kept as an argument, unseen by hooks
        assert saved(s, work) == pytest.approx(found, rel=0.01), (kind, options)


# bench/results/h200/train_step.jsonl: 8 completions of 512 tokens behind a prompt of 2048, Qwen3-1.7B shape, bfloat16,
# activations checkpointed, one micro-batch, no optimizer; GiB beyond weights and gradients, by tokens computed.
MEASURED_STEPS = [("shared prompt", 6144, 0.7828), ("packed", 20480, 2.7334), ("rows, sdpa", 20480, 2.7247)]


def test_peak_of_a_step_is_the_measured_one(sizes):
    s = sizes["qwen3-1.7b"]
    for layout, tokens, gib in MEASURED_STEPS:
        work = Work(tokens=tokens, trained_tokens=8 * 512, checkpointing=True, held=2, accumulates=False)
        fullest = plan.busiest(s, work)
        assert fullest.name == "backward of the first block", layout
        assert (fullest.total - 2 * s.params) / GIB == pytest.approx(gib, rel=0.03), layout


# bench/results/h200/linear_logprob.jsonl, bfloat16: N, D, V; GiB beyond inputs and gradients of one pass, of any loss,
# of a frozen head, and of torch with stored logits (None: not measured there).
MEASURED_HEADS = [
    ((8192, 2048, 151936), 1.7468, 0.8140, 1.1672, 13.2993),
    ((8192, 4096, 128256), 1.9886, 1.1263, 1.0099, 10.7012),
    ((32768, 1536, 151936), 1.5973, 0.7369, 1.1626, None),
]


def test_buffers_of_the_head_are_the_measured_ones(sizes):
    for (n, d, v), one_pass, any_loss, frozen, torch_path in MEASURED_HEADS:
        s = replace(sizes["qwen3-1.7b"], width=d, vocab=v)
        dx, dw = 2 * n * d, 2 * v * d
        for options, gradients, gib in (
            ({"head": "one pass", "held": 2}, dx + dw, one_pass),
            ({"head": "any loss", "held": 2}, dx + dw, any_loss),
            ({"lora_r": 8}, dx, frozen),
        ):
            got = plan.head_bytes(s, Work(tokens=n, **options)) - gradients
            assert got / GIB == pytest.approx(gib, rel=0.01), (n, options)
        if torch_path is not None:
            assert (plan.logits_bytes(s, n) - dx - dw) / GIB == pytest.approx(torch_path, rel=0.001)


def test_measured_facts_are_those_in_the_bench_results():
    folder = ROOT / "bench" / "results" / "h200"
    rows = [json.loads(x) for name in ("train_step", "linear_logprob") for x in (folder / f"{name}.jsonl").open()]
    there = {round(row["peak_gib"], 4) for row in rows}
    facts = {gib for *_, gib in MEASURED_STEPS} | {x for _, *gibs in MEASURED_HEADS for x in gibs if x}
    assert facts <= there, facts - there


def test_what_is_kept_by_hand(sizes):
    s = sizes["llama-3.1-8b"]
    full = kept(s, Work(tokens=1, has_reference=True))
    assert list(full.values()) == [4 * s.params, 0, 4 * s.params, 8 * s.params, 2 * s.params]
    shard = kept(s, Work(tokens=1, has_reference=True, shards=8))
    assert {name: 8 * x for name, x in shard.items()} == full
    assert s.adapter(16) == 41_943_040  # of a rank-16 adapter on all linear layers
    lora = kept(s, Work(tokens=1, lora_r=16, has_reference=True))
    assert list(lora.values()) == [2 * s.params, *(x * s.adapter(16) for x in (4, 4, 8)), 0]
    assert list(kept(s, Work(tokens=1, held=2)).values()) == [x * s.params for x in (2, 0, 2, 4, 0)]
    assert kept(s, Work(tokens=1, others=8.0, shards=8))["reference"] == 1.0


def test_a_critic_is_whole_on_every_gpu(sizes):
    s, small = sizes["llama-3.1-8b"], sizes["qwen3-0.6b"]
    work = Work(tokens=1, shards=8)
    head = critic_bytes(s, work, None)
    assert head == 16 * (4096 * 8192 + 8192 + 8192 + 1)  # two layers with biases; weights, gradients, two moments
    model = critic_bytes(s, work, small)
    assert model == 16 * small.params
    assert critic_bytes(s, replace(work, lora_r=16), small) == 2 * small.params + 16 * small.adapter(16)
    assert kept(s, replace(work, critic=model)) == kept(s, work) | {"critic": model}


def test_8_bit_moments_by_hand(sizes):
    s = sizes["qwen3-0.6b"]
    norms = 28 * (2 * 1024 + 2 * 128) + 1024  # tensors too small for scales
    small = kept(s, Work(tokens=1, optim="adamw_8bit"))["optimizer state"]
    assert small == 2 * (1 + 4 / 256) * (s.params - norms) + 8 * norms
    lower = kept(s, Work(tokens=1, optim="adamw_8bit", held=2))["optimizer state"]
    assert lower == small - 4 * norms
    assert kept(s, Work(tokens=1, optim="adamw_8bit", lora_r=1))["optimizer state"] == 8 * s.adapter(1)  # all are small


@pytest.mark.parametrize("optim, dtype", [("adamw", "float32"), ("adamw", "bfloat16"), ("adamw_8bit", "float32"),
                                          ("adamw_8bit", "bfloat16")])  # fmt: skip
def test_optimizer_state_is_what_the_optimizer_holds(optim, dtype):
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
    found = sum(sum(y.nbytes for y in (x.codes, x.scale)) if hasattr(x, "codes") else x.nbytes for x in slots)
    work = Work(tokens=1, optim=optim, held=getattr(torch, dtype).itemsize)
    assert kept(sizes_of(model), work)["optimizer state"] == found


def peak_bytes(step) -> int:
    """Most that a call has beyond what was there before, by torch's own record of each allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [x for x in found.profiler.kineto_results.events() if x.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# vocabulary, checkpointed, later micro-batch: the head, a block's backward, the first block's, the embedding's gradient
STEPS = [(300, False, True, "log-prob head"), (40, False, False, "backward of a block"),
         (40, True, True, "backward of a block"), (40, True, False, "backward of the first block"),
         (3000, True, False, "log-prob head")]  # fmt: skip


@pytest.mark.parametrize("vocab, checkpointing, accumulates, fullest", STEPS)
def test_peak_of_a_step_on_a_cpu_is_the_one_that_torch_records(vocab, checkpointing, accumulates, fullest):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", **SMALL, num_hidden_layers=3, head_dim=32, vocab_size=vocab, tie_word_embeddings=True
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.arange(128) % vocab

    def step() -> None:
        states = model.base_model(input_ids=ids[None], position_ids=torch.arange(128)[None], use_cache=False)
        hidden, head = states.last_hidden_state[0], model.get_output_embeddings().weight
        linear_logprob_loss(hidden, head, ids, lambda tokens, rows: (-tokens.logp.sum(), None))[0].backward()

    step()
    if not accumulates:
        model.zero_grad(set_to_none=True)
    s = sizes_of(model)
    work = Work(tokens=128, compute=4, checkpointing=checkpointing, accumulates=accumulates, triton=False)
    assert plan.busiest(s, work).name == fullest
    assert plan.busiest(s, work).total == pytest.approx(peak_bytes(step), rel=0.15)
    weights = sum(x.nbytes for x in model.parameters())
    total = weights * (3 + accumulates) + plan.busiest(s, work).total  # with two moments
    assert peak(s, work) == pytest.approx(total)


def test_casts_of_all_weights_are_there_until_a_checkpointed_forward_ends(sizes):
    s = sizes["llama-3.1-8b"]
    found = {x.name: x for x in plan.moments(s, Work(tokens=1024, checkpointing=True))}
    assert found["forward, casts of all weights"].passing > 2 * s.matrices
    sharded = {x.name: x for x in plan.moments(s, Work(tokens=1024, checkpointing=True, shards=8))}
    assert sharded["forward, casts of all weights"].passing < 2 * s.matrices


def test_largest_micro_batch_is_the_last_that_fits(sizes):
    s = sizes["qwen3-1.7b"]
    for options in (
        {},
        {"checkpointing": True},
        {"head": "any loss"},
        {"shards": 8},
        {"lora_r": 16},
        {"triton": False},
    ):
        work = Work(tokens=1, **options)
        tokens = plan.largest(s, work, 60.0)
        assert tokens >= 256, options
        assert peak(s, replace(work, tokens=tokens)) <= 60 * GIB < peak(s, replace(work, tokens=tokens + 256)), options
        assert plan.largest(s, work, 0.5) == 0, options


def test_a_base_in_4_bits_saves_its_matrices_but_for_one(sizes):
    s = sizes["llama-3.1-8b"]
    work = Work(tokens=8192, lora_r=16, checkpointing=True, head="any loss")
    less = (2 - plan.PACKED) * s.matrices
    weights = [kept(s, x)["weights"] for x in (work, replace(work, in_4bit=True))]
    assert weights[0] - weights[1] == less
    assert peak(s, work) - peak(s, replace(work, in_4bit=True)) == less - 2 * 4096 * 14336 > 9 * GIB


def test_offloading_leaves_two_inputs_of_blocks_on_the_gpu(sizes):
    s = sizes["qwen3-1.7b"]
    for options, width in (({"held": 2}, 2), ({}, 4), ({"lora_r": 16}, 2)):
        work = Work(tokens=65536, checkpointing=True, **options)
        less, one = replace(work, offloading=True), 65536 * width * 2048
        assert saved(s, work) - saved(s, less) == 26 * one
        assert plan.offloaded(s, less) == 27 * one and plan.offloaded(s, work) == 0
        at_head = [plan.moments(s, x)[0].activations for x in (work, less)]
        assert at_head[0] - at_head[1] == 27 * one
        assert 25 * one < peak(s, work) - peak(s, less) <= 27 * one
    alone = replace(s, layers=1)
    work = Work(tokens=64, checkpointing=True)
    assert saved(alone, replace(work, offloading=True)) == saved(alone, work)


def test_command_counts_offloaded_activations(capsys):
    asked = ["--shape", "qwen3-1.7b", "--gpu", "h200", "--max-tokens-per-micro-batch", "65536"]
    peaks = []
    for more in (["--gradient-checkpointing"], ["--gradient-checkpointing", "--activation-offloading"]):
        assert plan.main([*asked, *more]) == 0
        text = capsys.readouterr().out
        peaks.append([float(x) for x in re.search(r"^peak +([\d.]+) +([\d.]+)$", text, flags=re.MULTILINE).groups()])
    assert "Offloaded activations take page-locked main memory, in GiB for each GPU: replicate + gc 13.50." in text
    # the inputs of 26 blocks or more, and the attention of 28: blocks whose inputs leave are compiled without it
    attention = 28 * 65536 * 16 * (2 * 128 + 4) / plan.GIB
    assert peaks[0][0] == peaks[1][0] and 12.5 < peaks[0][1] - peaks[1][1] - attention <= 13.5
    assert plan.main([*asked, "--activation-offloading"]) == 2
    assert "activation_offloading=True: moves what gradient checkpointing saves; add" in capsys.readouterr().err


def test_flops_per_token(sizes):
    s = sizes["llama-3.1-8b"]
    num = s.params - s.embedding
    assert plan.flops_per_token(s, Work(tokens=1)) == 6 * num
    assert plan.flops_per_token(s, Work(tokens=1, checkpointing=True)) == 8 * num
    assert plan.flops_per_token(s, Work(tokens=1, lora_r=8, has_reference=True)) == 6 * num
    tied = sizes["qwen3-0.6b"]
    assert plan.flops_per_token(tied, Work(tokens=1)) == 6 * tied.params


def test_numbers_copied_from_elsewhere_are_still_those():
    triton_head = pytest.importorskip("kernels.linear_logprob_triton")
    assert (triton_head.CHUNK, triton_head.PART, triton_head.SLICE) == (
        plan.CHUNK, plan.PART, plan.SLICE
    )  # fmt: skip
    assert (BLOCK_ELEMENTS, BYTES_PER_WEIGHT) == (plan.TORCH_BLOCK, plan.PACKED)
    assert RunConfig.max_tokens_per_micro_batch == PlanConfig.max_tokens_per_micro_batch
    assert OptimConfig.optim == PlanConfig.optim
    assert (local.PAGE["cuda"], engine_choice.SPARE) == (plan.PAGE, plan.RESERVE * GIB)
    assert local.ROWS == plan.ROWS
    for name in ("engine", "max_batch_size", "cache_gib"):
        assert getattr(RolloutConfig, name) == getattr(plan.Rollout, name)
    for name in ("num_generations", "max_completion_length"):
        assert getattr(GroupConfig, name) == getattr(PlanConfig, name)
    assert ModelConfig.trained_dtype == PlanConfig.trained_dtype
    files = {path.stem for path in (ROOT / "trainer" / "methods").glob("*.py")} - {"__init__"}
    assert files == METHODS.keys()


def test_command_prints_table_and_verdict(capsys):
    asked = ["--shape", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100", "--method", "dpo", "--gradient-checkpointing"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    rows = {x[:36].strip(): x[36:].split() for x in text.splitlines() if len(x) > 36}
    assert "8,030,261,248 parameters; dpo, bfloat16, adamw" in text
    assert rows["weights"] == ["29.92", "29.92", "3.74", "3.74"]
    assert rows["reference"] == ["14.96", "14.96", "1.87", "1.87"]
    assert rows["fits"] == ["no", "no", "yes", "yes"]
    assert "with gradient checkpointing: replicate does not fit, fsdp fits." in text
    assert "storing their logits would take 11.74 (avoided)" in text
    kept_rows = ("weights", "gradients", "optimizer state", "reference")
    for i, total in enumerate(map(float, rows["peak"])):
        backward = float(rows["activations"][i]) + float(rows["passing buffers beside them"][i])
        assert sum(float(rows[name][i]) for name in kept_rows) + backward == pytest.approx(total, abs=0.05)


def test_command_takes_a_folder_lora_and_a_colocated_server(capsys, tmp_path):
    plan.known_config("qwen3-0.6b").save_pretrained(tmp_path)  # a config.json alone
    asked = "--method grpo --lora.r 16 --rollout.engine vllm --gpu h200".split()
    assert main(["--model", str(tmp_path), *asked]) == 0
    text = capsys.readouterr().out
    assert "596,049,920 parameters, 10,092,544 in adapters" in text
    sampling = next(x for x in text.splitlines() if x.startswith("while sampling, vLLM's share")).split()[-1]
    held = (2 * 596_049_920 + 12 * 10_092_544) / GIB
    assert float(sampling) == pytest.approx(held + 0.35 * CARDS["h200"].gib, abs=0.01)
    assert main(["--model", "builtin:tiny", "--method", "grpo", "--gpu", "4090"]) == 0
    text = capsys.readouterr().out
    assert "while sampling, local cache" in text and "That stays while training: replicate" in text
    assert next(x for x in text.splitlines() if x.startswith("engine  ")).split() == ["engine", "local", "local"]
    assert plan.pick_card(PlanConfig(shape="qwen3-8b", gpu="a100")) == ("a100-80", CARDS["a100-80"])


def test_command_says_which_engine_auto_takes_and_what_it_holds(capsys):
    def table_of(*argv: str) -> tuple[dict[str, list[str]], str]:
        assert main(["--method", "grpo", *argv]) == 0
        text = capsys.readouterr().out
        return {x[:36].strip(): x[36:].split() for x in text.splitlines() if len(x) > 36}, text

    rows, text = table_of("--shape", "qwen3-8b", "--gpus", "4", "--gpu", "a100")
    assert rows["engine"] == ["vllm", "vllm", "local", "local"] and rows["while sampling"]
    assert rows["fits"] == ["no", "no", "no", "yes"]
    assert "The engine of fsdp holds 44.80 GiB: a copy of the weights 15.26, a cache for 512 rows at once" in text
    assert "That is freed while training: fsdp, fsdp + gc." in text
    rows, text = table_of("--shape", "llama-3.1-8b", "--gpu", "h200")  # no room for a token beside a copy
    assert rows["engine"] == ["vllm", "vllm"] and "engine of" not in text
    bounded = ("--shape", "qwen3-0.6b", "--lora.r", "16", "--gpu", "4090", "--rollout.cache-gib", "4")
    rows, text = table_of(*bounded)
    assert "a cache for 88 rows at once 4.00" in text and rows["engine"] == ["local", "local"]
    rows, _ = table_of(*bounded[:-2], "--rollout.engine", "vllm")
    assert rows["engine"] == ["vllm", "vllm"]
    main(["--shape", "qwen3-0.6b", "--method", "sft"])
    assert "engine" not in capsys.readouterr().out


def test_columns_are_those_of_the_parallel_flags():
    def columns_of(**parallel: Any) -> dict[str, Work]:
        cfg = PlanConfig(shape="qwen3-8b", gpus=8, gpu="h200", parallel=Parallel(**parallel))
        return {name: work for name, work in plan.columns(cfg, CARDS["h200"]).items() if "gc" not in name}

    assert {name: work.shards for name, work in columns_of().items()} == {"replicate": 1, "fsdp": 8}
    assert {name: work.shards for name, work in columns_of(mode="replicate").items()} == {"replicate": 1}
    assert {name: work.shards for name, work in columns_of(shard=4).items()} == {"fsdp": 4}
    shared = columns_of(mode="fsdp", context=4)["fsdp"]
    assert (shared.shards, shared.own, shared.head) == (8, 8192 // 4, "any loss")


IN_4BIT = {"shape": "qwen3-0.6b", "load_in_4bit": True, "lora": plan.Lora(r=8)}


def test_a_base_in_4_bits_is_never_sharded(capsys):
    argv = ["--shape", "llama-3.1-8b", "--gpu", "h200", "--gpus", "8", "--lora.r", "16", "--load-in-4bit"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "base in 4 bits" in printed and "fsdp" not in printed


def test_command_refuses_in_one_sentence(capsys, tmp_path):
    for argv, said in (
        (["--model", str(tmp_path)], "holds neither config.json"),
        (["--shap", "qwen3-8b"], "--shap: unknown flag; did you mean --shape?"),
        (["--shape", "qwen3-8b", "--gpus", "x"], "--gpus=x: expected a whole number"),
        (["--shape", "qwen3-8b", "--gpu", "tpu"], "--gpu=tpu: expected one of here, h200"),
        (["--shape", "qwen3-8b", "--gpus", "0"], "gpus=0: must be 1 or more"),
    ):
        assert main(argv) == 2
        said_there = capsys.readouterr().err
        assert said_there.startswith("error: ") and said in said_there and said_there.count("\n") == 1
    for wrong, said in (
        ({"model": "a", "shape": "b"}, "one of --model and --shape"),
        ({"shape": "llama-9"}, "there is qwen3-0.6b"),
        ({"shape": "qwen3-0.6b", "method": "gspo"}, "there is sft"),
        ({"shape": "qwen3-0.6b", "method": "grpo", "value_model": "x"}, "value_model=x: grpo has no critic"),
        ({"shape": "qwen3-0.6b", "beta": 0.1}, "has no effect on the memory of sft"),
        ({"shape": "qwen3-0.6b", "gpus": 8, "parallel": Parallel(shard=3)}, "parallel.shard=3: must divide the 8"),
        ({"shape": "qwen3-0.6b", "gpus": 8, "parallel": Parallel(context=5)}, "parallel.context=5: must divide"),
        ({"shape": "qwen3-0.6b", "parallel": Parallel(mode="fsdp")}, "parallel.mode=fsdp: has no effect with one GPU"),
        ({"shape": "qwen3-0.6b", "gpus": 2, "parallel": Parallel(mode="replicate", shard=2)}, "parallel.shard=2: has"),
        ({"shape": "qwen3-0.6b", "load_in_4bit": True}, "train adapters with --lora.r 16"),
        (IN_4BIT | {"gpus": 2, "parallel": Parallel(mode="fsdp")}, "not supported with fsdp"),
        (IN_4BIT | {"gpus": 2, "parallel": Parallel(context=2)}, "not supported with parallel.context=2"),
        (IN_4BIT | {"method": "rm"}, "not for reward models"),
        ({"shape": "qwen3-0.6b", "trained_dtype": "bfloat16", "dtype": "float32"}, "trained_dtype=bfloat16"),
    ):
        with pytest.raises(ValueError, match=said):
            PlanConfig(**wrong)


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


def test_a_run_in_the_terms_of_the_planner(tmp_path):
    model = ModelConfig(model=folder_of(tmp_path))
    run = RunConfig(max_tokens_per_micro_batch=4096)
    cfg = dpo.Config(model=model, data=DATA, run=run)
    s = plan.sizes_for(cfg)
    count = 6 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160 + 2 * 64) + 64 * 64 + 64
    assert (s.params, s.adapter(2)) == (count, 2 * 6 * (128 + 96 + 96 + 128 + 3 * 224))
    work = plan.work_of(cfg, s, "cuda")
    assert (work.tokens, work.accumulates, work.head, work.has_reference) == (4096, True, "any loss", True)
    assert (work.held, work.compute, work.shards) == (4, 2, 1)
    parts = plan.at_peak(s, work)
    assert [parts[x] / count for x in ("weights", "gradients", "optimizer state", "reference")] == [4, 4, 8, 2]
    assert sum(parts.values()) == peak(s, work)

    low = replace(model, trained_dtype="bfloat16", gradient_checkpointing=True)
    small = plan.work_of(replace(cfg, model=low, optim=replace(cfg.optim, optim="adamw_8bit")), s, "cuda")
    assert (small.held, small.optim, small.checkpointing) == (2, "adamw_8bit", True)
    free = (replace(cfg, reference=replace(cfg.reference, ref="precomputed")), replace(cfg, reference_free=True))
    assert not any(plan.work_of(x, s, "cuda").has_reference for x in free)
    other = replace(cfg.reference, ref_model="builtin:tiny")
    tiny = plan.sizes_for(sft.Config(model=ModelConfig(model="builtin:tiny"), data=DATA)).params
    assert plan.work_of(replace(cfg, reference=other, lora=LoraConfig(r=4)), s, "cuda").others == 2 * tiny


def test_every_method_has_its_terms():
    for method in (cpo, dpo, ebft, gdpo, grpo, kto, prm, rm, sft):
        data = PromptConfig(data=("x",)) if method in (grpo, gdpo) else DATA
        cfg = method.Config(model=ModelConfig(model="builtin:tiny"), data=data)
        assert plan.method_of(cfg) is METHODS[method.__name__.rpartition(".")[2]]
        assert plan.work_of(cfg, plan.sizes_for(cfg), "cuda").tokens > 0
        s = plan.sizes_for(cfg)
        assert (plan.engine_of(cfg, s, plan.work_of(cfg, s)) is not None) == plan.method_of(cfg).samples
        assert plan.planned_peak(cfg, 1000) > 0


def test_planned_peak_splits_a_step_as_the_run_does():
    run = RunConfig(max_tokens_per_micro_batch=2048, per_device_train_batch_size=64)
    cfg = grpo.Config(model=ModelConfig(model="builtin:tiny"), data=PromptConfig(data=("x",)), run=run)
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s)
    whole = replace(work, tokens=1500, trained_tokens=500, accumulates=False)
    held = plan.engine_of(cfg, s, work)  # 64 completions of 257 tokens, in five pages each
    assert held == (0, plan.cache_bytes(s, 4, 64 * 320), 4 * 64 * s.vocab)
    made = plan.sampling(s, work, held)
    assert plan.planned_peak(cfg, 1500, trained_tokens=500) == max(peak(s, whole), made)
    served = replace(cfg, rollout=replace(cfg.rollout, engine="vllm"))
    assert plan.planned_peak(served, 1500, trained_tokens=500) == peak(s, whole)
    part = replace(work, tokens=2048, trained_tokens=1024, accumulates=True)
    assert plan.planned_peak(served, 6000, trained_tokens=3000) == peak(s, part)
    halves = replace(served, run=replace(run, gradient_accumulation_steps=2))
    part = replace(work, tokens=750, trained_tokens=250, accumulates=True)
    assert plan.planned_peak(halves, 1500, trained_tokens=500) == peak(s, part)


def test_engine_on_a_gpu_holds_a_copy_pages_and_logits(monkeypatch, sizes):
    s, work = sizes["qwen3-0.6b"], Work(tokens=8192)
    asked = plan.Asked(rows=512, prompts=64, prompt_length=255, completion_length=256)
    assert asked.tokens == 64 * 256 + 512 * 320
    held = plan.held_by_engine(s, work, asked, "cuda")
    assert held == (2 * s.params, 2 * 28 * 8 * 128 * 2 * asked.tokens, 512 * 151936 * 4)
    assert plan.held_by_engine(s, work, asked, "cpu") == held._replace(copy=0)
    assert plan.held_by_engine(s, work, asked, "cuda", GIB).cache == GIB
    rows = plan.rows_within(s, work, asked, GIB)
    assert rows == 26  # with four prompts: 9344 of the 9362 tokens that are 1 GiB
    assert plan.rows_within(s, work, asked, held.cache) == 512 and plan.rows_within(s, work, asked, 0) == 0

    kept_there = kept(s, work)
    sampling = plan.sampling(s, work, held)
    assert sampling == sum(kept_there.values()) - kept_there["gradients"] + sum(held)
    room = peak(s, work) + sum(held)
    assert plan.beside_engine(s, work, held, room) == room  # it stays where it fits
    assert plan.beside_engine(s, work, held, room - 1) == peak(s, work)
    assert plan.beside_engine(s, work, None, room) == peak(s, work)
    assert plan.room_for_cache(s, work, asked, sampling) == held.cache and plan.room_for_cache(s, work, asked, 0) == 0
    group = asked._replace(rows=8, prompts=1)
    needed = sum(kept_there.values()) + plan.casts(s, work) + 2 * s.params + plan.cache_bytes(s, 2, group.tokens)
    assert plan.fits_in_process(s, work, group, needed) and not plan.fits_in_process(s, work, group, needed - 1)


def test_engine_of_a_run_on_a_gpu(monkeypatch, tmp_path):
    run = RunConfig(per_device_train_batch_size=1024)
    model = ModelConfig(model=folder_of(tmp_path))
    cfg = grpo.Config(model=model, data=PromptConfig(data=("x",)), run=run, max_prompt_length=100)
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s, "cuda")
    assert plan.asked_of(cfg, "cuda") == (512, 128, 100, 256) and plan.asked_of(cfg, "cpu").rows == 256

    def held(gib=10.0, **rollout: Any) -> Any:
        monkeypatch.setattr(plan, "room_here", lambda: gib * GIB)
        return plan.engine_of(replace(cfg, rollout=replace(cfg.rollout, **rollout)), s, work, "cuda")

    cache = plan.cache_bytes(s, 2, 128 * 128 + 512 * 320)
    assert held() == held(engine="local") == (2 * s.params, cache, 4 * 512 * 64)
    assert held(max_batch_size=64).cache == plan.cache_bytes(s, 2, 128 * 128 + 64 * 320)
    assert held(cache_gib=0.01).cache == 0.01 * GIB and held(engine="vllm") is None
    small = held(gib=(plan.sampling(s, work, held()) - 1e6) / GIB)
    assert cache - 1e6 == pytest.approx(small.cache, abs=1)
    assert held(gib=16 * s.params / GIB) is None  # auto: too small, so servers sample
    assert plan.engine_of(replace(cfg, overlap=replace(cfg.overlap, async_prefetch=True)), s, work, "cuda") is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert plan.asked_of(replace(cfg, num_generations=64), "cuda") == (512, 16, 100, 256)  # each process its part


def test_shards_follow_the_processes(monkeypatch, tmp_path):
    cfg = dpo.Config(model=ModelConfig(model=folder_of(tmp_path)), data=DATA)
    s = plan.sizes_for(cfg)
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = {}
    for name, options in (("auto", {}), ("replicate", {}), ("fsdp", {}), ("fsdp", {"shard": 2})):
        work = plan.work_of(replace(cfg, parallel=ParallelConfig(mode=name, **options)), s, "cpu")
        found[name, *options.values()] = work.shards
    assert found == {("auto",): 1, ("replicate",): 1, ("fsdp",): 4, ("fsdp", 2): 2}
    monkeypatch.setattr(sharding, "SMALL", 16 * s.params)  # no room for the reference beside it
    assert plan.work_of(cfg, s, "cpu").shards == 4


def test_processes_that_share_rows_hold_a_part_each_and_all_keys(monkeypatch, tmp_path):
    run = RunConfig(max_tokens_per_micro_batch=4096, per_device_train_batch_size=1)
    cfg = sft.Config(model=ModelConfig(model=folder_of(tmp_path)), data=DATA, run=run, max_length=2048)
    monkeypatch.setenv("WORLD_SIZE", "2")
    s = plan.sizes_for(cfg)
    copies = [ParallelConfig(mode="replicate", context=size) for size in (1, 2)]
    alone, ours = (plan.work_of(replace(cfg, parallel=sharding), s, "cuda") for sharding in copies)
    assert (alone.tokens, ours.tokens, ours.own, ours.rows) == (2048, 4096, 2048, 2048)  # two rows, a half of each
    assert (alone.head, ours.head) == ("one pass", "any loss")
    assert saved(s, ours) - saved(s, alone) == 6 * 2048 * 2 * 2 * 16 * 2  # keys and values in bfloat16


def test_advice_says_what_the_planner_says(tmp_path):
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
    # one sequence fills a micro-batch; adapters are too small for 8-bit moments; the rest is set
    assert sorted(flags) == ["--load-in-4bit", "--lora.r 4", "--max-length 512"]
    packed = replace(cfg, model=replace(model, load_in_4bit=True))
    flags = [one.flag for one in plan.advice(s, plan.work_of(packed, s, "cuda"), packed)]
    assert sorted(flags) == ["--lora.r 4", "--max-length 512"]


def test_advice_names_offloading_on_a_gpu(monkeypatch):
    model = ModelConfig(model="builtin:tiny", gradient_checkpointing=True)
    cfg = sft.Config(model=model, data=DATA, max_length=1024)
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s, "cuda")
    assert "--activation-offloading" not in [one.flag for one in plan.advice(s, work, cfg)]  # refused on a CPU
    monkeypatch.setattr(plan, "device_here", lambda: "cuda")
    found = {one.flag: one for one in plan.advice(s, work, cfg)}["--activation-offloading"]
    assert found.saves == peak(s, work) - peak(s, replace(work, offloading=True))
    assert found.remark == f", and takes {work.own * 4 * s.width * (s.layers - 1) / GIB:.3g} of main memory"


def test_full_device_is_told_in_one_message_and_the_run_can_be_resumed(tmp_path, monkeypatch, capfd):
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
    assert "this run holds about, in GiB: weights" in err and "cache" in err
    for flag in ("--gradient-checkpointing", "--lora.r 16", "--rollout.max-batch-size 8", "--max-tokens-per-micro"):
        assert flag in err, err
    monkeypatch.setattr(grpo, "backward", backward)
    assert train(["--resume", str(tmp_path / "run"), "--gradient-checkpointing"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]


def test_cause_is_found_behind_another_error():
    try:
        try:
            raise torch.OutOfMemoryError(CUDA)
        except torch.OutOfMemoryError as inner:
            raise RuntimeError("prompt=a: its completions could not be made") from inner
    except RuntimeError as error:
        assert plan.is_out_of_memory(error) and "2.32 GiB" in plan.asked_for(error)
    assert not plan.is_out_of_memory(RuntimeError("other"))
