"""Sampling from models that mix attention with recurrent layers: each row has states alongside its cache pages."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.engine import Request, Sampling
from rollout.engines import decoder as decoder_module
from rollout.engines import local as local_engine
from rollout.engines.decoder import PrefillJob, by_length
from rollout.engines.forward import StateShape, TransformersForward, paged_obstacle
from rollout.engines.local import LocalEngine, cache_pages
from rollout.engines.scheduler import Job
from tests.models import SAMPLED, full_logps, gap, make_model
from tests.rollout.engines.test_scheduler import count_prefilled, requests_for

ROUNDING = 1e-5  # mean; the full forward's largest error is 4e-4 (Qwen3_5Text in float32 vs. float64)
ALWAYS = ("lfm2", "qwen3_5_text", "nemotron_h")
HYBRIDS = [kind for kind in SAMPLED if kind not in ("jamba", "kimi_linear", "zamba2")]  # these three use growing.py


def build(kind: str) -> Any:
    settings = {"vocab_size": 258, "max_position_embeddings": 256, "initializer_range": 0.15}
    return make_model(kind, **settings).eval()


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


@pytest.mark.parametrize(
    "name", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ALWAYS)) for kind in HYBRIDS]
)
def test_hybrids_sample_with_their_full_forward_log_probs(tokenizer, monkeypatch, name):
    """Groups, unequal prompts, more requests than rows, requeued rows, stop ids, turns and new weights."""
    model, sampling, lines = build(name), Sampling(max_tokens=20), []
    monkeypatch.setitem(local_engine.STEPS_PER_SYNC, "cpu", 5)  # rows run on after their end
    plain = [replace(request, max_tokens=None) for request in requests_for(2)]
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
@pytest.mark.parametrize("name", HYBRIDS)
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
    engine.choose_forward()
    sampled.clear()
    for request, completion in zip(requests, engine.generate(requests, Sampling(max_tokens=40)), strict=True):
        logps = [sampled[request.seed, step] for step in range(len(completion.ids))]
        assert full_logps(model, completion).tolist() == pytest.approx(logps, abs=1e-10)
    assert not engine._uses_growing_cache


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


def test_layers_that_cannot_continue_from_a_state_use_no_pages():
    assert "Mamba-1" in (paged_obstacle(build("jamba"), needs_kernels=False) or "")


def test_states_take_at_most_half_of_the_cache_memory(tokenizer):
    engine = LocalEngine(build("lfm2"), tokenizer)
    engine._forward = TransformersForward(engine.lm, torch.float32)
    # One attention layer with 2 key heads of 16: 16 tokens take 2 * 2 * 16 * 4 * 16 = 4,096 bytes.
    assert engine._forward.states == [StateShape((64, 3), torch.float32)] * 2  # 1,536 bytes per sequence
    assert engine._fit_states(4, 3, 100) == (4, 3, 97)
    assert engine._fit_states(400, 100, 100) == (106, 26, 50)


def test_a_copy_keeps_decay_rates_in_float32():
    """bfloat16 would change them by up to 0.4 %, at every token."""
    forward = TransformersForward(build("qwen3_5_text"), torch.bfloat16, copied=True)
    kinds = {name.rpartition(".")[2]: x.dtype for name, x in forward.lm.named_parameters() if "linear_attn" in name}
    assert kinds.pop("A_log") == kinds.pop("dt_bias") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
