"""The in-process engine on small random models, on the CPU and (with `-m gpu`) on CUDA.

float32 runs without TF32. Tests of GPU-only behaviour (allocator memory, bfloat16 matmuls) are marked gpu.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.engine import Completion, Request, Sampling
from rollout.engines.forward import PrefillBatch, attend_prefill
from rollout.engines.local import LocalEngine
from tests.rollout.engines.test_local import chi_square, chi_square_limit
from trainer.config.blocks import LoraConfig
from trainer.policy.adapters import add_adapter

KINDS = ("llama", "qwen2", "qwen3", "mistral")  # mistral with a sliding window shorter than the rows
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
# On the CPU one kind is enough: test_scheduler.py covers the others.
KIND_AND_DEVICE = [("mistral", "cpu"), *(pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in KINDS)]
LIMITS = {"float32": 1e-4, "bfloat16": 0.02}  # mean log-prob gap to a plain forward pass
CONTEXT = 256  # tokens
WINDOW = 24


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Disable TF32, and free GPU memory after the test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def build(
    kind: str, device: str, *, vocab_size: int = 258, dtype: torch.dtype = torch.float32, seed: int = 0,
    scale: float = 1.7,  # roughly the standard deviation of the logits
    attn_implementation: str = "sdpa", **changes: Any,
) -> Any:  # fmt: skip
    """Build a random model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    width, head = (32, 8) if device == "cpu" else (256, 64)
    window = {"sliding_window": WINDOW} if kind == "mistral" else {}
    settings = dict(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head, max_position_embeddings=CONTEXT,
        initializer_range=scale / width**0.5, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    config = AutoConfig.for_model(kind, **{**settings, **window, **changes})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).to(device, dtype)


def prompts_of(count: int, longest: int, *, vocab_size: int = 258, seed: int = 0) -> list[list[int]]:
    """Return prompts with lengths from 1 to the longest, shuffled."""
    rng = random.Random(seed)
    lengths = [longest - i * (longest - 1) // max(1, count - 1) for i in range(count)]
    rng.shuffle(lengths)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def requests_of(prompts: Sequence[list[int]], copies: int = 1) -> list[Request]:
    return [Request(prompt_ids=p, seed=100 * i + c) for i, p in enumerate(prompts) for c in range(copies)]


def gaps(engine: LocalEngine, completions: Sequence[Completion], temperature: float = 1.0) -> list[float]:
    logps = engine.logps([(c.prompt_ids, c.ids) for c in completions], temperature)
    return [abs(a - b) for c, row in zip(completions, logps, strict=True) for a, b in zip(c.logps, row, strict=True)]


def mean_gap(engine: LocalEngine, completions: Sequence[Completion], temperature: float = 1.0) -> float:
    return statistics.fmean(gaps(engine, completions, temperature))


def equal_frac(some: Sequence[Completion], others: Sequence[Completion]) -> float:
    return sum(a.ids == b.ids for a, b in zip(some, others, strict=True)) / len(some)


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


@torch.no_grad()
def next_logps(model: Any, ids: list[int]) -> torch.Tensor:  # (V,) float64
    device = next(model.parameters()).device
    return torch.log_softmax(model.eval()(torch.tensor([ids], device=device)).logits[0, -1].double(), dim=-1).cpu()


@pytest.mark.parametrize(("kind", "device"), KIND_AND_DEVICE)
def test_float32_log_probs_match_a_forward_pass(tokenizer, kind, device):
    engine = LocalEngine(build(kind, device), tokenizer)
    engine.load(0)
    sampling = Sampling(temperature=0.8, max_tokens=40, stop_ids=tuple(range(0, 258, 43)))
    completions = engine.generate(requests_of(prompts_of(12, 50), copies=4), sampling)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert mean_gap(engine, completions, 0.8) < LIMITS["float32"]
    assert max(gaps(engine, completions, 0.8)) < 30 * LIMITS["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_log_probs_approximate_a_forward_pass(tokenizer, kind, weights):
    model = build(kind, "cuda", dtype=getattr(torch, weights), scale=1.0)
    engine = LocalEngine(model, tokenizer, autocast_dtype=torch.bfloat16)
    engine.load(0)
    completions = engine.generate(requests_of(prompts_of(16, 60), copies=4), Sampling(max_tokens=64))
    assert mean_gap(engine, completions) < LIMITS["bfloat16"]


EAGER = {"attn_implementation": "eager", "sliding_window": WINDOW}
SPECIAL = {
    "gemma2": ("gemma2", EAGER | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64}),
    "gpt_oss": ("gpt_oss", EAGER | {"num_local_experts": 4, "num_experts_per_tok": 4}),  # all: routes cannot flip
    "llama, heads of 80": ("llama", {"head_dim": 80}),  # BlockForward
    "gemma, heads of 96": ("gemma", {"head_dim": 96}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", SPECIAL)
def test_capped_scores_sinks_and_odd_heads_use_the_paged_cache(tokenizer, name, dtype):
    """Prompts are longer than a tile of flex attention and than the window."""
    kind, settings = SPECIAL[name]
    model = build(kind, "cuda", scale=1.7 if dtype == "float32" else 1.0, **settings)
    model.set_experts_implementation("batched_mm")  # a loop over experts cannot be captured
    lines: list[str] = []
    engine = LocalEngine(
        model, tokenizer, log=lines.append, autocast_dtype=torch.bfloat16 if dtype == "bfloat16" else None
    )
    engine.load(0)
    completions = engine.generate(requests_of(prompts_of(12, 200), copies=4), Sampling(max_tokens=40))
    assert not engine._uses_growing_cache and lines == []
    gap = mean_gap(engine, completions)
    print(f"{name} {dtype}: mean gap {gap:.1e}")
    assert gap < 1.5 * LIMITS[dtype]  # gpt-oss in bfloat16: 1.06 times


@pytest.mark.parametrize(("kind", "device"), KIND_AND_DEVICE)
def test_float32_completions_do_not_depend_on_the_batch_size(tokenizer, kind, device):
    model = build(kind, device)
    requests = requests_of(prompts_of(50 if device == "cuda" else 10, 40), copies=4)
    runs = []
    for size in (8, 128):
        engine = LocalEngine(model, tokenizer, max_batch_size=size)
        engine.load(0)
        runs.append(engine.generate(requests, Sampling(max_tokens=40)))
    # Other sums in other orders: a draw rarely lies between the two, but 8,000 draws on a GPU do it one to three times.
    assert equal_frac(*runs) >= 0.97
    assert len({tuple(c.ids) for c in runs[0]}) > 0.95 * len(requests), "seeds must differ"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_completions_first_differ_at_a_boundary(tokenizer, kind):
    """Equal draws give different tokens only if the draw is close to a boundary of the cumulative distribution."""
    model = build(kind, "cuda", dtype=torch.bfloat16, scale=1.0)
    requests = requests_of(prompts_of(50, 40), copies=4)
    runs, largest = [], 0.0
    for size in (8, 128):
        engine = LocalEngine(model, tokenizer, max_batch_size=size, autocast_dtype=torch.bfloat16)
        engine.load(0)
        runs.append(engine.generate(requests, Sampling(max_tokens=40)))
        largest = max(largest, *gaps(engine, runs[-1]))
    for one, other in zip(*runs, strict=True):
        if (at := first_difference(one.ids, other.ids)) is not None:
            low, high = sorted((one.ids[at], other.ids[at]))
            between = next_logps(model, one.prompt_ids + one.ids[:at]).exp()[low + 1 : high].sum()
            assert between < 2 * largest, f"token {at}: {between:.3g} of the probability lies between the two"


@pytest.mark.parametrize(("kind", "device"), KIND_AND_DEVICE)
def test_float32_greedy_matches_transformers(tokenizer, kind, device):
    model = build(kind, device)
    engine = LocalEngine(model, tokenizer)
    engine.load(0)
    prompts = prompts_of(200 if device == "cuda" else 24, 40 if device == "cuda" else 8)
    completions = engine.generate(requests_of(prompts), Sampling(temperature=0, max_tokens=24))
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    for rows in by_length.values():  # without padding
        ids = torch.tensor([prompts[i] for i in rows], device=device)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, pad_token_id=0)
        for i, row in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
            at = first_difference(completions[i].ids, row)
            if at is not None:  # allowed between equally likely tokens
                logps = next_logps(model, prompts[i] + row[:at])
                assert abs(logps[row[at]] - logps[completions[i].ids[at]]) < 1e-4, f"prompt {i}, token {at}"


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_follow_the_exact_distribution(tokenizer, device):
    """Joint distribution of the first two tokens over a vocabulary of 16, from 20,000 seeds."""
    model, prompt, temperature = build("llama", device, vocab_size=16, seed=3), [3, 1, 4], 0.7
    first = torch.softmax(next_logps(model, prompt) / temperature, -1)
    second = torch.stack([torch.softmax(next_logps(model, [*prompt, a]) / temperature, -1) for a in range(16)])
    exact = {(a, b): float(first[a] * second[a, b]) for a in range(16) for b in range(16)}
    engine = LocalEngine(model, tokenizer, max_batch_size=1000)
    engine.load(0)
    requests = [Request(prompt_ids=prompt, seed=seed) for seed in range(20_000)]
    completions = engine.generate(requests, Sampling(temperature=temperature, max_tokens=2))
    statistic, df = chi_square(Counter(tuple(c.ids) for c in completions), exact)
    assert df > 20 and statistic < chi_square_limit(df)
    # Check the test itself: a wrong temperature fails.
    counts, wrong = Counter(c.ids[0] for c in completions), torch.softmax(first.log() * 1.1, -1)
    statistic, df = chi_square(counts, dict(enumerate(wrong.tolist())))
    assert statistic > chi_square_limit(df)


@pytest.mark.parametrize("device", DEVICES)
def test_more_requests_than_rows_with_different_lengths(tokenizer, device):
    model = build("qwen3", device)
    rng, requests = random.Random(0), requests_of(prompts_of(15, 30), copies=4)
    requests = [replace(request, max_tokens=rng.choice([None, 1, 2, 7, 33])) for request in requests]
    sampling = Sampling(max_tokens=40, stop_ids=tuple(range(0, 258, 37)))
    runs = []
    for size in (7, 64):
        engine = LocalEngine(model, tokenizer, max_batch_size=size)
        engine.load(0)
        runs.append(engine.generate(requests, sampling))
        assert mean_gap(engine, runs[-1]) < LIMITS["float32"]
        for request, completion in zip(requests, runs[-1], strict=True):
            limit = request.max_tokens or 40
            assert completion.prompt_ids == request.prompt_ids and len(completion.ids) <= limit
            stopped = completion.ids[-1] in sampling.stop_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(completion.ids) == limit
            assert not set(completion.ids[:-1]) & set(sampling.stop_ids)
            assert len(completion.logps) == len(completion.ids) and completion.versions == [(0, len(completion.ids))]
    assert equal_frac(*runs) >= 0.98


@pytest.mark.parametrize("device", DEVICES)
def test_after_sleep_the_engine_samples_the_same_without_touching_other_memory(tokenizer, device):
    engine = LocalEngine(build("llama", device), tokenizer)
    requests = requests_of(prompts_of(8, 30), copies=2)
    engine.load(0)
    before = engine.generate(requests, Sampling(max_tokens=20))
    for version in (1, 2):
        engine.sleep()
        others = [torch.full((4 << 20,), 7.0, device=device) for _ in range(64 if device == "cuda" else 1)]
        engine.load(version)
        after = engine.generate(requests, Sampling(max_tokens=20))
        assert all(bool((other == 7).all()) for other in others)
        assert [c.ids for c in after] == [c.ids for c in before]
        for a, b in zip(after, before, strict=True):
            assert a.logps == pytest.approx(b.logps, abs=1e-5) and a.versions == [(version, len(a.ids))]


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["in place", "replaced"])
def test_log_probs_follow_changed_weights(tokenizer, way, device, precision):
    if precision == "bfloat16" and device == "cpu":
        pytest.skip("bfloat16 matmuls are tested on a GPU")
    autocast = torch.bfloat16 if precision == "bfloat16" else None
    model = build("qwen3", device, scale=1.0 if autocast else 1.7)
    engine = LocalEngine(model, tokenizer, autocast_dtype=autocast)
    requests = requests_of(prompts_of(8, 30), copies=2)
    for version in range(3):
        engine.load(version)
        completions = engine.generate(requests, Sampling(max_tokens=20))
        assert mean_gap(engine, completions) < LIMITS[precision]
        engine.sleep()
        generator = torch.Generator(device).manual_seed(version)
        with torch.no_grad():
            for p in model.parameters():
                moved = p + 0.3 * p.std().nan_to_num() * torch.randn(p.shape, generator=generator, device=device)
                if way == "in place":
                    p.copy_(moved)
                else:
                    p.data = moved
        assert mean_gap(engine, completions) > 5 * LIMITS[precision], "the weight change must be visible"


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_uses_the_adapter(tokenizer, device):
    model = add_adapter(build("qwen3", device), LoraConfig(r=4)).to(device)
    generator = torch.Generator(device).manual_seed(0)
    engine = LocalEngine(model, tokenizer)
    requests = requests_of(prompts_of(8, 30), copies=2)
    runs = []
    for version in range(2):
        engine.load(version)
        runs.append(engine.generate(requests, Sampling(max_tokens=20)))
        assert mean_gap(engine, runs[-1]) < LIMITS["float32"]
        engine.sleep()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.2, generator=generator)
    assert equal_frac(*runs) < 1
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_stop_ids_and_stop_strings_truncate_completions(tokenizer, device):
    engine = LocalEngine(build("llama", device), tokenizer)
    engine.load(0)
    requests = requests_of(prompts_of(10, 20), copies=4)
    free = engine.generate(requests, Sampling(max_tokens=40))
    assert all(c.finish_reason == "length" and len(c.ids) == 40 for c in free)
    stop_ids = {c.ids[(7 * i) % 40] for i, c in enumerate(free[:12])}
    by_id = engine.generate(requests, Sampling(max_tokens=40, stop_ids=tuple(stop_ids)))
    ends = set()
    for before, after in zip(free, by_id, strict=True):
        at = next((i for i, token in enumerate(before.ids) if token in stop_ids), None)
        assert after.ids == (before.ids if at is None else before.ids[: at + 1])
        assert after.finish_reason == ("length" if at is None else "stop")
        assert after.logps == pytest.approx(before.logps[: len(after.ids)], abs=1e-4)
        assert after.text == tokenizer.decode(after.ids[: 40 if at is None else -1], skip_special_tokens=True)
        ends.add(len(after.ids))
    assert len(ends) > 5, "lengths must vary"
    texts = [tokenizer.decode(c.ids, skip_special_tokens=True) for c in free]
    string = next(t[17:19] for t in texts if t[17:19].isascii() and t.find(t[17:19]) == 17)
    by_text = engine.generate(requests, Sampling(max_tokens=40, stop=(string,)))
    for before, text, after in zip(free, texts, by_text, strict=True):
        assert after.ids == before.ids[: len(after.ids)]
        if string in text:
            assert after.finish_reason == "stop" and after.text == text[: text.find(string)]
            assert string in tokenizer.decode(after.ids, skip_special_tokens=True)
            assert string not in tokenizer.decode(after.ids[:-1], skip_special_tokens=True)
        else:
            assert after.finish_reason == "length" and len(after.ids) == 40


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_and_training_alternate_without_side_effects(tokenizer, device):
    """Modes, gradients and attention stay unchanged, and training steps change the samples."""
    model = build("qwen3", device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = LocalEngine(model, tokenizer)
    ids = torch.tensor(prompts_of(1, 32), device=device).view(4, 8)
    losses = []
    for version in range(3):
        engine.load(version)
        completions = engine.generate(requests_of(prompts_of(6, 20), copies=2), Sampling(max_tokens=12))
        assert mean_gap(engine, completions) < LIMITS["float32"]
        engine.sleep()
        assert model.training and model.config._attn_implementation == "sdpa"
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("sleeps", [False, True])
def test_memory_does_not_grow_over_calls_of_changing_lengths(tokenizer, sleeps):
    engine = LocalEngine(build("qwen3", "cuda"), tokenizer, max_batch_size=16)
    rng = random.Random(0)
    allocated = []
    for call in range(300 if not sleeps else 60):
        engine.load(call)
        count = 1 + call if call < 20 else rng.randint(1, 20)  # first all batch sizes and the longest rows
        longest, most = (100, 60) if call in (0, 19) else (rng.randint(1, 100), rng.randint(1, 60))
        prompts = prompts_of(count, longest, seed=call)
        completions = engine.generate(requests_of(prompts), Sampling(max_tokens=most))
        assert all(len(c.ids) == most for c in completions)
        if sleeps:
            engine.sleep()
        gc.collect()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[20:]) <= max(allocated[:20]) + (1 << 20), allocated


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (4, 2, 80), (8, 1, 256)])
@pytest.mark.parametrize("window", [None, 300])
def test_later_prefills_attend_without_a_mask(num_heads, num_kv_heads, head_dim, window):
    for starts, width in (([0, 5, 700], 129), ([1000], 1), ([37, 64], 640)):
        slots = torch.stack([torch.randperm(4000, device="cuda")[: max(starts) + width] for _ in starts])
        keys, values = torch.randn(2, num_kv_heads, 4000, head_dim, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(len(starts), num_heads, width, head_dim, device="cuda", dtype=torch.bfloat16)
        position = (torch.tensor(starts)[:, None] + torch.arange(width)).int().cuda()
        batch = PrefillBatch(position.long(), position, position.long(), slots, fresh=False)
        options = {"scale": head_dim**-0.5, "window": window}
        out = attend_prefill(query, keys, values, batch, **options).double()
        exact = attend_prefill(query.double(), keys.double(), values.double(), batch, **options)
        assert float((out - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.gpu
def test_a_long_row_is_prefilled_again_in_little_memory(tokenizer):
    """A dense mask of 16,000 x 16,000 would take 256 MB."""
    model = build("qwen3", "cuda", dtype=torch.bfloat16, scale=1.0, max_position_embeddings=20_000)
    engine = LocalEngine(model, tokenizer, autocast_dtype=torch.bfloat16)
    engine.prepare(prompt_length=17_000, max_tokens=100, prompts=1, group=1)
    (first,) = engine.generate([Request(prompt_ids=[5], seed=0, conversation=0)], Sampling(max_tokens=2))
    ids = first.prompt_ids + first.ids + prompts_of(1, 16_000)[0]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (second,) = engine.generate([Request(prompt_ids=ids, seed=1, conversation=0)], Sampling(max_tokens=64))
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / 2**20:.0f} MiB, counted {engine._prefill_bytes() / 2**20:.0f} MiB")
    assert peak < engine._prefill_bytes() + 2**26 and engine._prefill_bytes() < 2**28
    assert mean_gap(engine, [second]) < LIMITS["bfloat16"]
