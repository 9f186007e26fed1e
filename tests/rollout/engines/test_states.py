"""Sampling from models that mix attention with recurrent layers: each row has states alongside its cache pages."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.engine import Completion, Request, Sampling
from rollout.engines import decoder as decoder_module
from rollout.engines import local as local_engine
from rollout.engines.decoder import PrefillJob, by_length
from rollout.engines.forward import StateShape, TransformersForward
from rollout.engines.local import LocalEngine, cache_pages
from rollout.engines.scheduler import Job
from tests.rollout.engines.test_scheduler import count_prefilled, requests_for

ROUNDING = 1e-5  # mean; the full forward's largest error is 4e-4 (Qwen3_5Text in float32 vs. float64)
SMALL = dict(vocab_size=258, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, initializer_range=0.2)  # fmt: skip
THREE = {"num_hidden_layers": 3}
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
             layer_types=["linear_attention", "linear_attention", "full_attention"])  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": THREE | DELTA | {"head_dim": 8},
    "NemotronH": dict(layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], head_dim=8,
                      mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=16, n_groups=2, chunk_size=16, expand=2,
                      n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
                      moe_shared_expert_intermediate_size=16, time_step_min=0.7),
}  # fmt: skip
MORE_HYBRIDS: dict[str, dict[str, Any]] = {
    "FalconH1": THREE | MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},  # attention and Mamba-2 in every layer
    "Lfm2": THREE | CONV,
    "Lfm2Moe": THREE | CONV | EXPERTS | {"num_dense_layers": 1},
    "Qwen3_5MoeText": THREE | DELTA | EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 16},
    "Qwen3Next": THREE | DELTA | EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 16},
    "OlmoHybrid": THREE | DELTA | {"linear_num_key_heads": 4, "pad_token_id": 0},
    "Bamba": THREE | MAMBA | {"attn_layer_indices": [1], "pad_token_id": 0},
    "GraniteMoeHybrid": THREE | MAMBA | {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                                         "num_local_experts": 4, "num_experts_per_tok": 2,
                                         "shared_intermediate_size": 32, "position_embedding_type": "rope"},
    "Mamba2": THREE | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16},
}  # fmt: skip


def build(name: str, *, seed: int = 0, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SMALL | (HYBRIDS | MORE_HYBRIDS)[name] | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def build_float64(name: str) -> Any:
    """The model from a copy of its source without conversions to float32, which bound the exactness of states."""
    model = build(name)
    module = sys.modules[type(model).__module__]
    source = inspect.getsource(module).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    copy = types.ModuleType(f"{module.__name__}_float64")
    copy.__package__, copy.__file__ = module.__package__, module.__file__
    sys.modules[copy.__name__] = copy
    exec(compile(source, copy.__name__, "exec"), copy.__dict__)
    model.config._experts_implementation = "eager"  # grouped matmuls take no float64
    exact = getattr(copy, type(model).__name__)(model.config)
    exact.load_state_dict(model.state_dict())
    return exact.double().eval()


@torch.no_grad()
def full_logps(model: Any, completion: Completion) -> torch.Tensor:  # (T,) float64
    """One forward pass over prompt and completion, without a cache."""
    ids = torch.tensor([completion.prompt_ids + completion.ids])
    logps = model.eval()(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(dim=-1)
    return logps[len(completion.prompt_ids) - 1 :].gather(1, torch.tensor(completion.ids)[:, None])[:, 0]


def gap(model: Any, completions: list[Completion]) -> float:
    return float(torch.cat([(full_logps(model, c) - torch.tensor(c.logps).double()).abs() for c in completions]).mean())


@pytest.mark.parametrize("name", [*HYBRIDS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_HYBRIDS)])
def test_hybrids_sample_with_their_full_forward_log_probs(tokenizer, monkeypatch, name):
    """Groups, unequal prompts, more requests than rows, requeued rows, stop ids, turns and new weights."""
    model, sampling, lines = build(name).train(), Sampling(max_tokens=20), []
    model.gradient_checkpointing_enable()  # in training mode it would disable caches
    monkeypatch.setitem(local_engine.STEPS_PER_SYNC, "cpu", 5)  # rows run on after their end
    monkeypatch.setitem(local_engine.LAG, "cpu", 1)
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 16)  # prompts of 40 tokens run in parts
    plain = [replace(r, max_tokens=None) for r in requests_for(2) if len(r.prompt_ids) in (1, 17, 40)]
    least, _ = cache_pages([Job(r.prompt_ids, 0, 20) for r in plain], page=16, rows=3)
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "_fit_states", lambda self, rows, prefixes, budget: (min(rows, 3), 2, least))
        engine = LocalEngine(model, tokenizer, max_batch_size=4, log=lines.append)
        completions = engine.generate(plain, sampling)
    assert gap(model, completions) < ROUNDING
    assert engine._scheduler.decoder.max_rows == 3 and engine._scheduler.num_evicted > 0
    assert not engine._uses_growing_cache and lines == []

    engine, sampling = LocalEngine(model, tokenizer), Sampling(max_tokens=20, stop_ids=tuple(range(0, 258, 9)))
    first = engine.generate([replace(request, conversation=i) for i, request in enumerate(plain)], sampling)
    assert gap(model, first) < ROUNDING and any(c.finish_reason == "stop" for c in first)
    assert all(c.ids == other.ids[: len(c.ids)] for c, other in zip(first, completions, strict=True))
    counts = count_prefilled(monkeypatch)
    turns = [
        Request(prompt_ids=c.prompt_ids + c.ids + [77, 78], seed=50 + i, conversation=i, max_tokens=3)
        for i, c in enumerate(first)
    ]
    assert gap(model, engine.generate(turns, sampling)) < ROUNDING
    new = sum(len(turn.prompt_ids) - len(request.prompt_ids) for turn, request in zip(turns, plain, strict=True))
    assert sum(counts) == new, "a turn starts from the state after the first prompt"

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.load(1)
    assert gap(model, engine.generate(turns, sampling)) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HYBRIDS, *MORE_HYBRIDS])
def test_hybrids_are_exact_in_float64(tokenizer, monkeypatch, name):
    model, sampled, draw = build_float64(name), {}, decoder_module.draw

    def spy(logits, seed, drawn, temperature, *, scale, **options):
        ids, logps = draw(logits, seed, drawn, temperature, scale=scale, **options)
        exact = (logits * scale).log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
        for key, step, logp in zip(seed.tolist(), drawn.tolist(), exact.tolist(), strict=True):
            sampled.setdefault((key, step), logp)
        return ids, logps.float()

    monkeypatch.setattr(decoder_module, "draw", spy)
    engine, requests = LocalEngine(model, tokenizer, max_batch_size=4), requests_for(3)
    least, _ = cache_pages([Job(r.prompt_ids, 0, 40) for r in requests], page=16, rows=3)
    monkeypatch.setattr(LocalEngine, "_fit_states", lambda self, rows, prefixes, budget: (min(rows, 3), 2, least))
    engine.choose_forward()
    sampled.clear()
    for request, completion in zip(requests, engine.generate(requests, Sampling(max_tokens=40)), strict=True):
        logps = [sampled[request.seed, step] for step in range(len(completion.ids))]
        assert full_logps(model, completion).tolist() == pytest.approx(logps, abs=1e-10)
    assert not engine._uses_growing_cache and engine._scheduler.num_evicted > 0


def test_prompts_of_many_lengths_are_prefilled_in_few_passes():
    def jobs(*lengths: int) -> list[PrefillJob]:
        return [PrefillJob(list(range(n)), 2, torch.arange(n + 2).numpy(), [], 9, row) for row, n in enumerate(lengths)]

    assert [len(group) for group in by_length(jobs(5, 7, 5))] == [2, 1]
    fills = jobs(*range(1, 14))
    groups, seen = by_length(fills), {fill.target: (9, []) for fill in fills}
    assert [{len(part.ids) for part in group} for group in groups] == [{8}, {4}, {2}, {1}]
    for part in sum(groups, []):
        source, ids = seen[part.target]
        assert (part.source, part.start, len(part.slots)) == (source, 2 + len(ids), 2 + len(ids) + len(part.ids))
        seen[part.target] = part.target, ids + part.ids
    assert [ids for _, ids in seen.values()] == [fill.ids for fill in fills]


def test_states_take_at_most_half_of_the_cache_memory(tokenizer):
    engine = LocalEngine(build("Lfm2"), tokenizer)
    engine._forward = TransformersForward(engine.lm, torch.float32)
    # One attention layer with 2 key heads of 8: 16 tokens take 2 * 2 * 8 * 4 * 16 = 2,048 bytes.
    assert engine._forward.states == [StateShape((32, 3), torch.float32)] * 2  # 768 bytes per sequence
    assert engine._fit_states(4, 3, 100) == (4, 3, 97)
    assert engine._fit_states(400, 100, 100) == (106, 26, 50)


def test_a_copy_keeps_decay_rates_in_float32():
    """bfloat16 would change them by up to 0.4 %, at every token."""
    forward = TransformersForward(build("Qwen3_5Text"), torch.bfloat16, copied=True)
    kinds = {name.rpartition(".")[2]: x.dtype for name, x in forward.lm.named_parameters() if "linear_attn" in name}
    assert kinds.pop("A_log") == kinds.pop("dt_bias") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}


WIDE = dict(hidden_size=256, intermediate_size=512, max_position_embeddings=512)
ON_GPU: dict[str, dict[str, Any]] = {
    "Lfm2": WIDE | {"initializer_range": 0.1},
    "Qwen3_5Text": WIDE | {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "FalconH1": WIDE | {"head_dim": 64, "mamba_d_ssm": 512, "mamba_d_head": 64},
    "NemotronH": WIDE | {"head_dim": 64, "mamba_head_dim": 64,
                         "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ON_GPU)
def test_hybrids_sample_with_cuda_graphs(tokenizer, monkeypatch, name, dtype):
    """As rows end, graphs of smaller batches are captured while the states of other rows are in use."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model, lines = build(name, **{"initializer_range": 0.08} | ON_GPU[name]).cuda(), []
    limit, autocast_dtype = (1e-4, None) if dtype == "float32" else (0.05, torch.bfloat16)
    engine = LocalEngine(model, tokenizer, max_batch_size=20, autocast_dtype=autocast_dtype, log=lines.append)
    prompts = [[(17 * i + 5 * j) % 258 for j in range(1 + 13 * i)] for i in range(10)]
    requests = [
        Request(prompt_ids=prompt, seed=10 * i + c, conversation=(i, c), max_tokens=20 + 9 * c)
        for i, prompt in enumerate(prompts)
        for c in range(6)
    ]
    for version in range(2):
        engine.load(version)
        first = engine.generate(requests, Sampling(stop_ids=tuple(range(0, 258, 43))))
        turns = [
            Request(prompt_ids=c.prompt_ids + c.ids + [7, 8], seed=i, conversation=request.conversation, max_tokens=9)
            for i, (request, c) in enumerate(zip(requests, first, strict=True))
        ]
        completions = first + engine.generate(turns, Sampling())
        logps = engine.logps([(c.prompt_ids, c.ids) for c in completions], 1.0)
        gaps = [
            abs(x - y) for c, row in zip(completions, logps, strict=True) for x, y in zip(c.logps, row, strict=True)
        ]
        print(f"{name} {dtype}: mean gap {sum(gaps) / len(gaps):.1e}, largest {max(gaps):.1e}")
        assert sum(gaps) / len(gaps) < limit
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
    assert len(engine._scheduler.decoder.graphs) >= 3
    assert not engine._uses_growing_cache and lines == []
