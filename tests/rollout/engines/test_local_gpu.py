"""The in-process engine on small random models, on the CPU and with `-m gpu` on a CUDA device: the same assertions.

float32 is compared with TF32 off. What only a GPU has (memory of the allocator, bfloat16 products) is marked gpu.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

from rollout.engine import Completion, Request, Sampling
from rollout.engines.local import LocalEngine
from tests.rollout.engines.test_local import chi_square, chi_square_limit
from trainer.config.blocks import LoraConfig
from trainer.policy.adapters import add_adapter

KINDS = ("llama", "qwen2", "qwen3", "mistral")  # mistral with a sliding window shorter than the rows
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
# On the CPU one kind is enough here: test_scheduler.py has the others.
PLACED = [("mistral", "cpu"), *(pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in KINDS)]
LIMITS = {"float32": 1e-4, "bfloat16": 0.02}  # mean distance of a log-prob from that of a plain forward pass
PLACES = 256  # of the models' context
WINDOW = 24
HAS_LIMITS = "max_tokens" in {field.name for field in fields(Request)}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """No TF32, whatever a test before has left; and nothing is left on the GPU for the next one."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def build(
    kind: str, device: str, *, vocab_size: int = 258, dtype: torch.dtype = torch.float32, seed: int = 0,
    scale: float = 1.7,  # about the standard deviation of the logits
) -> Any:  # fmt: skip
    """Random weights; on a GPU with heads of a size that kernels take."""
    from transformers import AutoConfig, AutoModelForCausalLM

    width, head = (32, 8) if device == "cpu" else (256, 64)
    window = {"sliding_window": WINDOW} if kind == "mistral" else {}
    config = AutoConfig.for_model(
        kind, vocab_size=vocab_size, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head, max_position_embeddings=PLACES,
        initializer_range=scale / width**0.5, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, **window,
    )  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device, dtype)


def prompts_of(count: int, longest: int, *, vocab_size: int = 258, seed: int = 0) -> list[list[int]]:
    """Lengths from 1 to the longest, in an order that says nothing."""
    rng = random.Random(seed)
    lengths = [longest - i * (longest - 1) // max(1, count - 1) for i in range(count)]
    rng.shuffle(lengths)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def requests_of(prompts: Sequence[list[int]], copies: int = 1) -> list[Request]:
    return [Request(prompt_ids=p, seed=100 * i + c) for i, p in enumerate(prompts) for c in range(copies)]


def gaps(engine: LocalEngine, completions: Sequence[Completion], temperature: float = 1.0) -> list[float]:
    own = engine.logps([(c.prompt_ids, c.ids) for c in completions], temperature)
    return [abs(a - b) for c, row in zip(completions, own, strict=True) for a, b in zip(c.logps, row, strict=True)]


def mean_gap(engine: LocalEngine, completions: Sequence[Completion], temperature: float = 1.0) -> float:
    found = gaps(engine, completions, temperature)
    return sum(found) / len(found)


def equal_frac(some: Sequence[Completion], others: Sequence[Completion]) -> float:
    return sum(a.ids == b.ids for a, b in zip(some, others, strict=True)) / len(some)


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


@torch.no_grad()
def next_logps(model: Any, ids: list[int]) -> torch.Tensor:  # (V,) float64
    device = next(model.parameters()).device
    return torch.log_softmax(model.eval()(torch.tensor([ids], device=device)).logits[0, -1].double(), dim=-1).cpu()


@pytest.mark.parametrize(("kind", "device"), PLACED)
def test_float32_log_probs_are_those_of_a_forward_pass(tokenizer, kind, device):
    engine = LocalEngine(build(kind, device), tokenizer)
    engine.load(0)
    sampling = Sampling(temperature=0.8, max_tokens=40, stop_ids=tuple(range(0, 258, 43)))
    completions = engine.generate(requests_of(prompts_of(12, 50), copies=4), sampling)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert mean_gap(engine, completions, 0.8) < LIMITS["float32"]
    assert max(gaps(engine, completions, 0.8)) < 30 * LIMITS["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_log_probs_are_about_those_of_a_forward_pass(tokenizer, kind, held):
    model = build(kind, "cuda", dtype=getattr(torch, held), scale=1.0)
    engine = LocalEngine(model, tokenizer, autocast_dtype=torch.bfloat16)
    engine.load(0)
    completions = engine.generate(requests_of(prompts_of(16, 60), copies=4), Sampling(max_tokens=64))
    assert mean_gap(engine, completions) < LIMITS["bfloat16"]


@pytest.mark.parametrize(("kind", "device"), PLACED)
def test_float32_completions_do_not_depend_on_the_batch_size(tokenizer, kind, device):
    model = build(kind, device)
    requests = requests_of(prompts_of(50 if device == "cuda" else 10, 40), copies=4)
    made = []
    for size in (8, 128):
        engine = LocalEngine(model, tokenizer, max_batch_size=size)
        engine.load(0)
        made.append(engine.generate(requests, Sampling(max_tokens=40)))
    assert equal_frac(*made) >= 0.99
    assert len({tuple(c.ids) for c in made[0]}) > 0.95 * len(requests), "seeds must differ"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_completions_first_differ_at_a_boundary(tokenizer, kind):
    """Two draws by the same number differ only where a sum of probabilities up to a token is that number, nearly."""
    model = build(kind, "cuda", dtype=torch.bfloat16, scale=1.0)
    requests = requests_of(prompts_of(50, 40), copies=4)
    made, largest = [], 0.0
    for size in (8, 128):
        engine = LocalEngine(model, tokenizer, max_batch_size=size, autocast_dtype=torch.bfloat16)
        engine.load(0)
        made.append(engine.generate(requests, Sampling(max_tokens=40)))
        largest = max(largest, *gaps(engine, made[-1]))
    for one, other in zip(*made, strict=True):
        if (at := first_difference(one.ids, other.ids)) is not None:
            low, high = sorted((one.ids[at], other.ids[at]))
            between = next_logps(model, one.prompt_ids + one.ids[:at]).exp()[low + 1 : high].sum()
            assert between < 2 * largest, f"token {at}: {between:.3g} of the distribution lies between the two"


@pytest.mark.parametrize(("kind", "device"), PLACED)
def test_float32_greedy_is_that_of_transformers(tokenizer, kind, device):
    model = build(kind, device)
    engine = LocalEngine(model, tokenizer)
    engine.load(0)
    prompts = prompts_of(200 if device == "cuda" else 24, 40 if device == "cuda" else 8)
    made = engine.generate(requests_of(prompts), Sampling(temperature=0, max_tokens=24))
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    for rows in by_length.values():  # without padding
        ids = torch.tensor([prompts[i] for i in rows], device=device)
        mask = torch.ones_like(ids)
        theirs = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, pad_token_id=0)
        for i, row in zip(rows, theirs[:, ids.shape[1] :].tolist(), strict=True):
            at = first_difference(made[i].ids, row)
            if at is not None:  # allowed between two tokens of the same probability
                logps = next_logps(model, prompts[i] + row[:at])
                assert abs(logps[row[at]] - logps[made[i].ids[at]]) < 1e-4, f"prompt {i}, token {at}"


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_follow_the_exact_distribution(tokenizer, device):
    """The joint law of the first two tokens over a vocabulary of 16."""
    model, prompt = build("llama", device, vocab_size=16, seed=3), [3, 1, 4]
    first = next_logps(model, prompt).exp()
    second = torch.stack([next_logps(model, [*prompt, a]).exp() for a in range(16)])
    exact = {(a, b): float(first[a] * second[a, b]) for a in range(16) for b in range(16)}
    engine = LocalEngine(model, tokenizer, max_batch_size=1000)
    engine.load(0)
    count = 20_000 if device == "cuda" else 4_000
    requests = [Request(prompt_ids=prompt, seed=seed) for seed in range(count)]
    pairs = Counter(tuple(c.ids) for c in engine.generate(requests, Sampling(max_tokens=2)))
    statistic, df = chi_square(pairs, exact)
    assert df > 20 and statistic < chi_square_limit(df)


@pytest.mark.parametrize("device", DEVICES)
def test_more_requests_than_slots_with_uneven_ends(tokenizer, device):
    model = build("qwen3", device)
    requests = requests_of(prompts_of(15, 30), copies=4)
    if HAS_LIMITS:
        rng = random.Random(0)
        requests = [
            Request(prompt_ids=r.prompt_ids, seed=r.seed, max_tokens=rng.choice([None, 1, 2, 7, 33])) for r in requests
        ]
    sampling = Sampling(max_tokens=40, stop_ids=tuple(range(0, 258, 37)))
    made = []
    for size in (7, 64):
        engine = LocalEngine(model, tokenizer, max_batch_size=size)
        engine.load(0)
        made.append(engine.generate(requests, sampling))
        assert mean_gap(engine, made[-1]) < LIMITS["float32"]
        for request, completion in zip(requests, made[-1], strict=True):
            limit = getattr(request, "max_tokens", None) or 40
            assert completion.prompt_ids == request.prompt_ids and len(completion.ids) <= limit
            stopped = completion.ids[-1] in sampling.stop_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(completion.ids) == limit
            assert not set(completion.ids[:-1]) & set(sampling.stop_ids)
            assert len(completion.logps) == len(completion.ids) and completion.versions == [(0, len(completion.ids))]
    assert equal_frac(*made) >= 0.98


@pytest.mark.parametrize("device", DEVICES)
def test_after_sleep_it_samples_the_same_and_writes_into_nobody_else(tokenizer, device):
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
        pytest.skip("bfloat16 products are for a GPU")
    autocast = torch.bfloat16 if precision == "bfloat16" else None
    model = build("qwen3", device, scale=1.0 if autocast else 1.7)
    engine = LocalEngine(model, tokenizer, autocast_dtype=autocast)
    requests = requests_of(prompts_of(8, 30), copies=2)
    for version in range(3):
        engine.load(version)
        made = engine.generate(requests, Sampling(max_tokens=20))
        assert mean_gap(engine, made) < LIMITS[precision]
        engine.sleep()
        generator = torch.Generator(device).manual_seed(version)
        with torch.no_grad():
            for p in model.parameters():
                moved = p + 0.3 * p.std().nan_to_num() * torch.randn(p.shape, generator=generator, device=device)
                if way == "in place":
                    p.copy_(moved)
                else:
                    p.data = moved
        assert mean_gap(engine, made) > 5 * LIMITS[precision], "the change must show"


@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter_is_part_of_what_samples(tokenizer, device):
    model = add_adapter(build("qwen3", device), LoraConfig(r=4)).to(device)
    generator = torch.Generator(device).manual_seed(0)
    engine = LocalEngine(model, tokenizer)
    requests = requests_of(prompts_of(8, 30), copies=2)
    made = []
    for version in range(2):
        engine.load(version)
        made.append(engine.generate(requests, Sampling(max_tokens=20)))
        assert mean_gap(engine, made[-1]) < LIMITS["float32"]
        engine.sleep()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.2, generator=generator)
    assert equal_frac(*made) < 1
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_stop_ids_and_stop_strings_cut_what_is_sampled_without_them(tokenizer, device):
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
        ends.add(len(after.ids))
    assert len(ends) > 5, "ends at different places"
    texts = [tokenizer.decode(c.ids, skip_special_tokens=True) for c in free]
    string = next(t[17:19] for t in texts if t[17:19].isascii() and t.find(t[17:19]) == 17)
    by_text = engine.generate(requests, Sampling(max_tokens=40, stop=(string,)))
    for before, text, after in zip(free, texts, by_text, strict=True):
        assert after.ids == before.ids[: len(after.ids)]
        if string in text:
            assert after.finish_reason == "stop" and after.text == text[: text.find(string)]
            assert string not in tokenizer.decode(after.ids[:-1], skip_special_tokens=True)
        else:
            assert after.finish_reason == "length" and len(after.ids) == 40


@pytest.mark.parametrize("device", DEVICES)
def test_training_between_samples_leaves_both_alone(tokenizer, device):
    """Modes, gradients and the attention of the module are as before; a step of it changes what is sampled."""
    model = build("qwen3", device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = LocalEngine(model, tokenizer)
    ids = torch.tensor(prompts_of(1, 32), device=device).view(4, 8)
    losses = []
    for version in range(3):
        engine.load(version)
        made = engine.generate(requests_of(prompts_of(6, 20), copies=2), Sampling(max_tokens=12))
        assert mean_gap(engine, made) < LIMITS["float32"]
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
    held = []
    for call in range(300 if not sleeps else 60):
        engine.load(call)
        count = 1 + call if call < 20 else rng.randint(1, 20)  # the first calls have all sizes, and the longest rows
        longest, most = (100, 60) if call in (0, 19) else (rng.randint(1, 100), rng.randint(1, 60))
        prompts = prompts_of(count, longest, seed=call)
        made = engine.generate(requests_of(prompts), Sampling(max_tokens=most))
        assert all(len(c.ids) == most for c in made)
        if sleeps:
            engine.sleep()
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held[20:]) <= max(held[:20]) + (1 << 20), held
