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
    """The 0.9999 quantile by Wilson and Hilferty; z = 3.719."""
    return df * (1 - 2 / (9 * df) + 3.719 * (2 / (9 * df)) ** 0.5) ** 3


def chi_square(counts: Counter, exact: dict) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells expected fewer than 5 times are put together."""
    total = sum(counts.values())
    cells = [(counts[key], total * p) for key, p in exact.items() if total * p >= 5]
    rest = [(counts[key], total * p) for key, p in exact.items() if total * p < 5]
    if rest:
        cells.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    return sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1


@pytest.mark.parametrize(
    ("kind", "attention", "temperature"), [("llama", "sdpa", 0.7), ("llama", "eager", 1.0), ("qwen3", "sdpa", 1.0)]
)
def test_log_probs_equal_a_plain_forward_pass(make_model, tokenizer, kind, attention, temperature):
    model = make_model(kind, attn_implementation=attention)
    sampling = Sampling(temperature=temperature, max_tokens=12, stop_ids=tuple(range(0, 258, 11)))
    completions = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS, copies=4), sampling)
    assert {c.finish_reason for c in completions} == {"stop", "length"}, "both ways to finish must be covered"
    for completion in completions:
        expected = plain_logps(model, completion, temperature)
        assert torch.allclose(torch.tensor(completion.logps).double(), expected, atol=1e-5, rtol=0)


def test_log_probs_with_a_sliding_window(make_model, tokenizer):
    extra = dict(use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    model = make_model("qwen3", **extra)
    completions = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS, copies=3), Sampling(max_tokens=10))
    for completion in completions:
        expected = plain_logps(model, completion, 1.0)
        assert torch.allclose(torch.tensor(completion.logps).double(), expected, atol=1e-5, rtol=0)


def test_score_equals_generate_and_a_plain_forward_pass(make_model, tokenizer, monkeypatch):
    model, temperature = make_model(), 0.7
    engine = LocalEngine(model, tokenizer, max_batch_size=3)
    completions = engine.generate(requests_for(PROMPTS, 2), Sampling(temperature=temperature, max_tokens=9))
    pairs = [(c.prompt_ids, c.ids) for c in completions]
    for limit in (2**26, 20 * 258):
        monkeypatch.setattr("rollout.engines.local.SCORE_LOGITS", limit)
        for completion, logps in zip(completions, engine.logps(pairs, temperature), strict=True):
            assert logps == pytest.approx(completion.logps, abs=1e-5)
            assert logps == pytest.approx(plain_logps(model, completion, temperature).tolist(), abs=1e-5)


def test_sampled_tokens_follow_the_exact_distribution(make_model, tokenizer):
    """The joint law of the first two tokens over a vocabulary of 16, from 20,000 seeds."""
    model, temperature = make_model(vocab_size=16, seed=3), 0.7
    prompt = [3, 1, 4]
    exact: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        first = torch.softmax(model.eval()(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
        batch = torch.tensor([[*prompt, a] for a in range(16)])
        second = torch.softmax(model(batch).logits[:, -1].double() / temperature, -1)
    for a in range(16):
        for b in range(16):
            exact[a, b] = float(first[a] * second[a, b])

    engine = LocalEngine(model, tokenizer, max_batch_size=2500)
    requests = [Request(prompt_ids=prompt, seed=seed) for seed in range(20_000)]
    completions = engine.generate(requests, Sampling(temperature=temperature, max_tokens=2))
    pairs = Counter(tuple(c.ids) for c in completions)
    statistic, df = chi_square(pairs, exact)
    assert df > 60 and statistic < chi_square_limit(df)
    firsts = Counter(c.ids[0] for c in completions)
    statistic, df = chi_square(firsts, dict(enumerate(first.tolist())))
    assert statistic < chi_square_limit(df)
    # The test must have teeth: the wrong temperature is refused by a wide margin.
    wrong = dict(enumerate(torch.softmax(first.log() * 1.1, -1).tolist()))
    assert chi_square(firsts, wrong)[0] > chi_square_limit(df)


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
    made = engine.generate([Request(prompt_ids=[5, 6], seed=s) for s in seeds], Sampling(max_tokens=8))
    assert made[0].ids == made[4].ids, "-1 and 2**64 - 1 are the same 64 bits"
    assert len({tuple(c.ids) for c in made}) == 5


def test_a_stop_id_is_kept_and_ends_the_completion(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    free = engine.generate(requests_for(PROMPTS, 6), Sampling(max_tokens=12))
    assert all(c.finish_reason == "length" and len(c.ids) == len(c.logps) == 12 for c in free)
    stop_ids = tuple({c.ids[i % 12] for i, c in enumerate(free)})
    for before, after in zip(
        free, engine.generate(requests_for(PROMPTS, 6), Sampling(max_tokens=12, stop_ids=stop_ids)), strict=True
    ):
        at = [i for i, token in enumerate(before.ids) if token in stop_ids]
        expected = before.ids[: at[0] + 1] if at else before.ids
        assert after.ids == expected and len(after.logps) == len(expected)
        assert after.logps == pytest.approx(before.logps[: len(expected)], abs=1e-5)
        assert after.finish_reason == ("stop" if at else "length")
        assert after.text == tokenizer.decode(expected[:-1] if at else expected, skip_special_tokens=True)
        assert after.versions == [(0, len(expected))]


def test_a_stop_id_on_the_last_token_counts_as_stop(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    (free,) = engine.generate([Request(prompt_ids=[5, 6], seed=1)], Sampling(max_tokens=4))
    stop_id = free.ids[-1]
    assert stop_id not in free.ids[:-1]
    (stopped,) = engine.generate([Request(prompt_ids=[5, 6], seed=1)], Sampling(max_tokens=4, stop_ids=(stop_id,)))
    assert stopped.ids == free.ids and stopped.finish_reason == "stop"


def test_a_stop_string_over_several_tokens_ends_the_completion(make_model, tokenizer):
    engine = LocalEngine(make_model(vocab_size=258), tokenizer)
    requests = requests_for(PROMPTS, 4)
    free = engine.generate(requests, Sampling(max_tokens=30))
    texts = [tokenizer.decode(c.ids, skip_special_tokens=True) for c in free]
    chosen = next(t for t in texts if t[9:12].isascii() and t.find(t[9:12]) == 9)
    strings = (chosen[9:12], "never seen")
    hits = 0
    for before, text, after in zip(
        free, texts, engine.generate(requests, Sampling(max_tokens=30, stop=strings)), strict=True
    ):
        if strings[0] not in text:
            assert after.ids == before.ids and after.finish_reason == "length"
            continue
        hits += 1
        assert after.finish_reason == "stop" and after.text == text[: text.find(strings[0])]
        assert after.ids == before.ids[: len(after.ids)]
        assert tokenizer.decode(after.ids, skip_special_tokens=True).endswith(strings[0])
        assert strings[0] not in tokenizer.decode(after.ids[:-1], skip_special_tokens=True)
    assert hits >= 1


def test_a_stop_string_that_is_a_special_token_is_seen(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    requests = [Request(prompt_ids=[5, 6], seed=s) for s in range(300)]
    by_id = engine.generate(requests, Sampling(max_tokens=8, stop_ids=(257,)))
    by_string = engine.generate(requests, Sampling(max_tokens=8, stop=("<eos>",)))
    assert [c.ids for c in by_id] == [c.ids for c in by_string]
    assert any(c.finish_reason == "stop" and "<eos>" not in c.text for c in by_string)


def test_greedy_takes_the_best_token_with_its_full_log_prob(make_model, tokenizer):
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


def test_top_k_and_top_p_keep_only_the_likeliest_tokens(make_model, tokenizer):
    model = make_model(vocab_size=16, seed=3)
    engine = LocalEngine(model, tokenizer, max_batch_size=3000)
    requests = [Request(prompt_ids=[3, 1, 4], seed=s) for s in range(3000)]
    with torch.no_grad():
        probs = torch.softmax(model.eval()(torch.tensor([[3, 1, 4]])).logits[0, -1].double(), -1)
    ranked, order = probs.sort(descending=True)
    by_k = [int(i) for i in order[:3]]
    top_p = float(ranked[:2].sum()) + 1e-3  # two ids are just too few
    for sampling in (Sampling(top_k=3, max_tokens=1), Sampling(top_p=top_p, max_tokens=1)):
        made = engine.generate(requests, sampling)
        counts = Counter(c.ids[0] for c in made)
        exact = {i: float(probs[i] / probs[by_k].sum()) for i in by_k}
        assert set(counts) == set(by_k)
        assert chi_square(counts, exact)[0] < chi_square_limit(2)
        assert made[0].logps == pytest.approx([float(probs[made[0].ids[0]].log())], abs=1e-5)
    both = engine.generate(requests, Sampling(top_k=3, top_p=0.01, max_tokens=1))
    assert {c.ids[0] for c in both} == {by_k[0]}


def test_a_peft_model_samples_from_the_adapted_weights(make_model, tokenizer):
    from peft import LoraConfig, get_peft_model

    base = make_model("qwen3")
    sampling = Sampling(max_tokens=10)
    plain = LocalEngine(base, tokenizer).generate(requests_for(PROMPTS, 3), sampling)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    untouched = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS, 3), sampling)
    assert [c.ids for c in untouched] == [c.ids for c in plain], "a fresh adapter changes nothing"
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS, 3), sampling)
    assert [c.ids for c in adapted] != [c.ids for c in plain]
    for completion in adapted:
        expected = plain_logps(model, completion, 1.0)
        assert torch.allclose(torch.tensor(completion.logps).double(), expected, atol=1e-5, rtol=0)


def test_training_mode_comes_back_and_gradient_checkpointing_keeps_the_cache(make_model, tokenizer):
    model = make_model(attention_dropout=0.5)
    expected = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS), Sampling(max_tokens=8))
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.train()
    model.model.layers[1].eval()  # a part someone froze must stay frozen
    engine = LocalEngine(model, tokenizer)
    made = engine.generate(requests_for(PROMPTS), Sampling(max_tokens=8))
    assert [c.ids for c in made] == [c.ids for c in expected]
    assert model.training and model.model.layers[0].self_attn.training
    assert not model.model.layers[1].self_attn.training
    with pytest.raises(ValueError):
        engine.generate([Request(prompt_ids=[999], seed=0)], Sampling(max_tokens=8))
    assert model.training
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("grows", [False, True])
def test_what_training_compiled_does_not_run(make_model, tokenizer, grows):
    """With a cache every layer would be compiled on its own, during the rollout."""
    model, graphs = make_model(), []
    want = LocalEngine(model, tokenizer).generate(requests_for(PROMPTS[:2]), Sampling(max_tokens=3))
    for block in model.model.layers:
        block.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    calls = [block._compiled_call_impl for block in model.model.layers]
    engine = LocalEngine(model, tokenizer)
    engine._grows = grows
    got = engine.generate(requests_for(PROMPTS[:2]), Sampling(max_tokens=3))
    assert [c.ids for c in got] == [c.ids for c in want] and graphs == []
    assert all(call is not None for call in calls)
    assert [block._compiled_call_impl for block in model.model.layers] == calls


def test_weights_are_shared_and_the_version_is_recorded(make_model, tokenizer):
    model = make_model()
    engine = LocalEngine(model, tokenizer)
    before = engine.generate(requests_for(PROMPTS), Sampling(max_tokens=8))
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    engine.load(7)
    after = engine.generate(requests_for(PROMPTS), Sampling(max_tokens=8))
    assert [c.ids for c in before] != [c.ids for c in after]
    assert {v for c in before for v in c.versions} == {(0, 8)} and {v for c in after for v in c.versions} == {(7, 8)}


def test_bfloat16_autocast_reports_what_it_sampled_from(make_model, tokenizer):
    model = make_model()
    engine = LocalEngine(model, tokenizer, autocast_dtype=torch.bfloat16)
    for completion in engine.generate(requests_for(PROMPTS, 3), Sampling(max_tokens=8)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = plain_logps(model, completion, 1.0)
        assert completion.logps == pytest.approx(expected.tolist(), abs=0.3)
    assert next(model.parameters()).dtype == torch.float32


def test_large_vocabularies_are_sampled_in_slabs(make_model, tokenizer, monkeypatch):
    engine = LocalEngine(make_model(), tokenizer)
    whole = engine.generate(requests_for(PROMPTS, 4), Sampling(max_tokens=8))
    monkeypatch.setattr("kernels.draw.SLAB", 258 * 3)
    assert [c.ids for c in engine.generate(requests_for(PROMPTS, 4), Sampling(max_tokens=8))] == [c.ids for c in whole]


def test_no_requests_make_no_completions(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    assert engine.generate([], Sampling()) == [] and engine.logps([], 1.0) == []


def test_what_cannot_work_is_refused(make_model, tokenizer):
    engine = LocalEngine(make_model(), tokenizer)
    for prompt, sampling, sentence in (
        ([], {}, "prompt_ids=\\[\\] \\(request 0\\): an empty prompt"),
        ([1] * 120, {"max_tokens": 9}, "max_tokens=9 .*120 tokens .* context of 128"),
        ([258], {}, "outside the model's vocabulary of 258"),
        ([1], {"temperature": -0.5}, "temperature=-0.5"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1], {"top_p": 0.0}, "top_p=0.0"),
        ([1], {"top_k": -1}, "top_k=-1"),
        ([1], {"stop": ("",)}, "stop=''"),
    ):
        with pytest.raises(ValueError, match=sentence):
            engine.generate([Request(prompt_ids=prompt, seed=0)], Sampling(**{"max_tokens": 8, **sampling}))


def test_diverged_weights_are_refused(make_model, tokenizer):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(ValueError, match="logits are not finite"):
        LocalEngine(model, tokenizer).generate([Request(prompt_ids=[1], seed=0)], Sampling(max_tokens=2))
