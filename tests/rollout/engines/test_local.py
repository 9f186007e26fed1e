from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from rollout.engine import Completion, Request, Sampling
from rollout.engines.local import LocalEngine

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], [40, 41, 42], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5]]


def requests_for(prompts: list[list[int]], copies: int = 1) -> list[Request]:
    return [Request(prompt_ids=p, seed=100 * i + c) for i, p in enumerate(prompts) for c in range(copies)]


def plain_logps(model, completion: Completion, temperature: float) -> torch.Tensor:
    """One unpadded forward pass over prompt and completion."""
    ids = torch.tensor([completion.prompt_ids + completion.ids])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0, :-1]
    logps = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logps[len(completion.prompt_ids) - 1 :].gather(1, torch.tensor(completion.ids)[:, None])[:, 0]


def chi_square_limit(df: int) -> float:
    """The 0.9999 quantile (Wilson-Hilferty, z = 3.719)."""
    return df * (1 - 2 / (9 * df) + 3.719 * (2 / (9 * df)) ** 0.5) ** 3


def chi_square(counts: Counter, exact: dict) -> tuple[float, int]:
    """Return (statistic, degrees of freedom); cells with an expected count below 5 are merged."""
    total = sum(counts.values())
    cells = [(counts[key], total * p) for key, p in exact.items() if total * p >= 5]
    rest = [(counts[key], total * p) for key, p in exact.items() if total * p < 5]
    if rest:
        cells.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    return sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1


@pytest.mark.parametrize(
    ("kind", "temperature", "extra"),
    [
        ("llama", 0.7, {}),
        ("llama", 1.0, {"attn_implementation": "eager"}),
        ("qwen3", 1.0, {}),
        ("qwen3", 1.0, {"use_sliding_window": True, "sliding_window": 6,
                        "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)  # fmt: skip
def test_log_probs_match_a_plain_forward_pass(make_model, tokenizer, kind, temperature, extra):
    model = make_model(kind, **extra)
    sampling = Sampling(temperature=temperature, max_tokens=12, stop_ids=tuple(range(0, 258, 11)))
    completions = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS, copies=4), sampling)
    assert {c.finish_reason for c in completions} == {"stop", "length"}, "both finish reasons must occur"
    for completion in completions:
        expected = plain_logps(model, completion, temperature)
        assert torch.allclose(torch.tensor(completion.logps).double(), expected, atol=1e-5, rtol=0)


def test_logps_match_generate_and_a_plain_forward_pass(make_model, tokenizer, monkeypatch):
    model, temperature = make_model(), 0.7
    engine = LocalEngine(model, tokenizer, max_batch_size=3)
    completions = engine.generate(requests_for(PROMPTS, 2), Sampling(temperature=temperature, max_tokens=9))
    pairs = [(c.prompt_ids, c.ids) for c in completions]
    for limit in (2**26, 20 * 258):
        monkeypatch.setattr("rollout.engines.local.LOGITS_PER_PASS", limit)
        for completion, logps in zip(completions, engine.logps(pairs, temperature), strict=True):
            assert logps == pytest.approx(completion.logps, abs=1e-5)
            assert logps == pytest.approx(plain_logps(model, completion, temperature).tolist(), abs=1e-5)


def test_a_seed_gives_the_same_completion_in_any_batch(make_model, tokenizer):
    model = make_model()
    sampling = Sampling(max_tokens=10, stop_ids=tuple(range(0, 258, 17)))
    requests = requests_for(PROMPTS, copies=2)
    together = LocalEngine(model, tokenizer).generate(requests, sampling)
    assert len({tuple(c.ids) for c in together}) > 8, "different seeds must differ"

    for request, expected in zip(requests, together, strict=True):
        (alone,) = LocalEngine(model, tokenizer).generate([request], sampling)
        assert (alone.ids, alone.text, alone.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
        assert alone.logps == pytest.approx(expected.logps, abs=1e-5)
    order = list(range(len(requests)))
    for chunk_size in (3, 1000):
        random.Random(chunk_size).shuffle(order)
        engine = LocalEngine(model, tokenizer, max_batch_size=chunk_size)
        shuffled = engine.generate([requests[i] for i in order], sampling)
        assert [c.ids for c in shuffled] == [together[i].ids for i in order]
        assert [c.prompt_ids for c in shuffled] == [requests[i].prompt_ids for i in order]


def test_a_seed_may_be_any_integer(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    seeds = [-1, 0, 2**63 - 1, 2**63, 2**64 - 1, 2**70 + 5]
    completions = engine.generate([Request(prompt_ids=[5, 6], seed=s) for s in seeds], Sampling(max_tokens=8))
    assert completions[0].ids == completions[4].ids, "-1 and 2**64 - 1 are the same 64 bits"
    assert len({tuple(c.ids) for c in completions}) == 5


def test_a_stop_id_on_the_last_token_counts_as_stop(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    (free,) = engine.generate([Request(prompt_ids=[5, 6], seed=1)], Sampling(max_tokens=4))
    stop_id = free.ids[-1]
    assert stop_id not in free.ids[:-1]
    (stopped,) = engine.generate([Request(prompt_ids=[5, 6], seed=1)], Sampling(max_tokens=4, stop_ids=(stop_id,)))
    assert stopped.ids == free.ids and stopped.finish_reason == "stop"


def test_a_special_token_works_as_a_stop_string(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    requests = [Request(prompt_ids=[5, 6], seed=s) for s in range(300)]
    by_id = engine.generate(requests, Sampling(max_tokens=8, stop_ids=(257,)))
    by_string = engine.generate(requests, Sampling(max_tokens=8, stop=("<eos>",)))
    assert [c.ids for c in by_id] == [c.ids for c in by_string]
    assert any(c.finish_reason == "stop" and "<eos>" not in c.text for c in by_string)


def test_greedy_selects_the_most_likely_token_with_its_full_log_prob(make_model, tokenizer):
    model = make_model()
    completions = LocalEngine(model, tokenizer).generate(
        requests_for(PROMPTS, 2), Sampling(temperature=0, max_tokens=6)
    )
    assert completions[0].ids == completions[1].ids
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        with torch.no_grad():
            best = model.eval()(ids).logits[0, :-1].argmax(-1).tolist()
        assert completion.ids == best[len(completion.prompt_ids) - 1 :]
        assert completion.logps == pytest.approx(plain_logps(model, completion, 1.0).tolist(), abs=1e-5)


def test_top_k_and_top_p_keep_only_the_most_likely_tokens(make_model, tokenizer):
    model = make_model(vocab_size=16, seed=3)
    engine = LocalEngine(model, tokenizer, max_batch_size=3000)
    requests = [Request(prompt_ids=[3, 1, 4], seed=s) for s in range(3000)]
    with torch.no_grad():
        probs = torch.softmax(model.eval()(torch.tensor([[3, 1, 4]])).logits[0, -1].double(), -1)
    ranked, order = probs.sort(descending=True)
    by_k = [int(i) for i in order[:3]]
    top_p = float(ranked[:2].sum()) + 1e-3  # two ids are just too few
    for sampling in (Sampling(top_k=3, max_tokens=1), Sampling(top_p=top_p, max_tokens=1)):
        completions = engine.generate(requests, sampling)
        counts = Counter(c.ids[0] for c in completions)
        exact = {i: float(probs[i] / probs[by_k].sum()) for i in by_k}
        assert set(counts) == set(by_k)
        assert chi_square(counts, exact)[0] < chi_square_limit(2)
        assert completions[0].logps == pytest.approx([float(probs[completions[0].ids[0]].log())], abs=1e-5)
    both = engine.generate(requests, Sampling(top_k=3, top_p=0.01, max_tokens=1))
    assert {c.ids[0] for c in both} == {by_k[0]}


def test_training_mode_is_restored_and_gradient_checkpointing_allows_a_cache(make_model, tokenizer):
    model = make_model(attention_dropout=0.5)
    expected = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS), Sampling(max_tokens=8))
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.train()
    model.model.layers[1].eval()  # a frozen layer must stay frozen
    engine = LocalEngine(model, tokenizer)
    completions = engine.generate(requests_for(PROMPTS), Sampling(max_tokens=8))
    assert [c.ids for c in completions] == [c.ids for c in expected]
    assert model.training and model.model.layers[0].self_attn.training
    assert not model.model.layers[1].self_attn.training
    with pytest.raises(ValueError):
        engine.generate([Request(prompt_ids=[999], seed=0)], Sampling(max_tokens=8))
    assert model.training
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("grows", [False, True])
def test_compiled_layers_run_uncompiled(make_model, tokenizer, grows):
    """With a cache, every layer would be recompiled during the rollout."""
    model, graphs = make_model(), []
    expected = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS[:2]), Sampling(max_tokens=3))
    for block in model.model.layers:
        block.forward = torch.compile(
            block.forward, backend=lambda graph, inputs: graphs.append(graph) or graph.forward
        )
    forwards = [block.forward for block in model.model.layers]
    engine = LocalEngine(model, tokenizer)
    engine._uses_growing_cache = grows
    completions = engine.generate(requests_for(PROMPTS[:2]), Sampling(max_tokens=3))
    assert [c.ids for c in completions] == [c.ids for c in expected] and graphs == []
    assert [block.forward for block in model.model.layers] == forwards


def test_bfloat16_log_probs_match_autocast(make_model, tokenizer):
    model = make_model()
    engine = LocalEngine(model, tokenizer, autocast_dtype=torch.bfloat16)
    for completion in engine.generate(requests_for(PROMPTS, 3), Sampling(max_tokens=8)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = plain_logps(model, completion, 1.0)
        assert completion.logps == pytest.approx(expected.tolist(), abs=0.3)
    assert next(model.parameters()).dtype == torch.float32


def test_sampling_in_slabs_gives_the_same_completions(make_model, tokenizer, monkeypatch):
    engine = LocalEngine(make_model(), tokenizer)
    expected = engine.generate(requests_for(PROMPTS, 4), Sampling(max_tokens=8))
    monkeypatch.setattr("kernels.decode.draw.SLAB", 258 * 3)
    completions = engine.generate(requests_for(PROMPTS, 4), Sampling(max_tokens=8))
    assert [c.ids for c in completions] == [c.ids for c in expected]


def test_an_empty_batch_returns_no_completions(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    assert engine.generate([], Sampling()) == [] and engine.logps([], 1.0) == []


def test_invalid_requests_are_rejected(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    for prompt, settings, match in (
        ([], {}, r"prompt_ids=\[\] \(request 0\)"),
        ([1] * 120, {"max_tokens": 9}, "max_tokens=9 .*120 .*128"),
        ([258], {}, r"prompt_ids \(request 0\): .*258"),
        ([1], {"temperature": -0.5}, "temperature=-0.5"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1], {"top_p": 0.0}, "top_p=0.0"),
        ([1], {"top_k": -1}, "top_k=-1"),
        ([1], {"stop": ("",)}, "stop=''"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.generate([Request(prompt_ids=prompt, seed=0)], Sampling(**{"max_tokens": 8, **settings}))
    for limit in (0, -1):
        requests = [Request(prompt_ids=[1], seed=0), Request(prompt_ids=[1], seed=0, max_tokens=limit)]
        with pytest.raises(ValueError, match=rf"max_tokens={limit} \(request 1\)"):
            engine.generate(requests, Sampling())


def test_diverged_weights_are_rejected(make_model, tokenizer):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        LocalEngine(model, tokenizer).generate([Request(prompt_ids=[1], seed=0)], Sampling(max_tokens=2))
