"""Rows, pages, evictions and conversations of the in-process engine, on the CPU (no CUDA graphs)."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from data.errors import UserError
from rollout.engine import Request, Sampling
from rollout.engines import decoder as decoder_module
from rollout.engines import forward as forward_module
from rollout.engines import local as local_engine
from rollout.engines.forward import BlockForward, TransformersForward, adapters_obstacle, block_obstacle
from rollout.engines.local import LocalEngine, cache_pages
from rollout.engines.scheduler import TILE_ROWS, Job, Prefix, tiles_of

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], [40, 41, 42], [9] * 40, list(range(1, 18))]


def requests_for(copies: int, *, limits: bool = True) -> list[Request]:
    """Groups of equal prompts with random limits."""
    rng = random.Random(0)
    return [
        Request(prompt_ids=prompt, seed=100 * i + c, max_tokens=rng.randint(1, 40) if limits else None)
        for i, prompt in enumerate(PROMPTS)
        for c in range(copies)
    ]


def alone(model, tokenizer, requests, sampling):
    """Sample each request alone; any batch must give the same completions."""
    engine = LocalEngine(model, tokenizer)
    return [engine.generate([request], sampling)[0] for request in requests]


def assert_same(completions, expected) -> None:
    assert [c.ids for c in completions] == [c.ids for c in expected]
    assert [c.finish_reason for c in completions] == [c.finish_reason for c in expected]
    for one, other in zip(completions, expected, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=3e-5)


def test_refilled_rows_sample_as_if_alone(make_model, tokenizer, monkeypatch):
    model, sampling = make_model("qwen3"), Sampling(max_tokens=40, stop_ids=tuple(range(0, 258, 29)))
    requests = requests_for(3)
    expected = alone(model, tokenizer, requests, sampling)
    assert {c.finish_reason for c in expected} == {"stop", "length"}
    for steps_per_sync, lag, page, rows in ((1, 0, 16, 256), (5, 1, 16, 3), (8, 2, 32, 7)):
        monkeypatch.setitem(local_engine.STEPS_PER_SYNC, "cpu", steps_per_sync)
        monkeypatch.setitem(local_engine.LAG, "cpu", lag)
        monkeypatch.setitem(local_engine.PAGE, "cpu", page)
        engine = LocalEngine(model, tokenizer, max_batch_size=rows)
        assert_same(engine.generate(requests, sampling), expected)
        scheduler = engine._scheduler
        assert len(scheduler.free) == scheduler.decoder.cache.num_pages - 1, "all pages except scratch must be free"
        assert not scheduler.prefixes and not scheduler.conversations


def test_rows_without_free_pages_are_requeued(make_model, tokenizer, monkeypatch):
    """They are prefilled again in parts, and with masks for a few queries."""
    model, sampling = make_model(), Sampling(max_tokens=40)
    requests = requests_for(2, limits=False)
    expected = alone(model, tokenizer, requests, sampling)
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 24)
    monkeypatch.setattr(forward_module, "MASK", 1000)
    sizes, prefill = [], TransformersForward.prefill
    monkeypatch.setattr(
        TransformersForward, "prefill", lambda *args: sizes.append(args[1].ids.numel()) or prefill(*args)
    )
    least, _ = cache_pages([Job(r.prompt_ids, 0, 40) for r in requests], page=16, rows=256)
    monkeypatch.setitem(local_engine.STEPS_PER_SYNC, "cpu", 8)
    monkeypatch.setitem(local_engine.LAG, "cpu", 1)
    for pages in (least, least + 3):
        monkeypatch.setattr(LocalEngine, "_page_budget", lambda self, pages=pages: pages)
        engine = LocalEngine(model, tokenizer)
        assert_same(engine.generate(requests, sampling), expected)
        assert engine._scheduler.num_evicted > 0, "the cache must be too small for all rows"
        assert len(engine._scheduler.free) == pages - 1
    assert 12 < max(sizes) <= 24


def test_a_request_larger_than_the_cache_is_rejected(make_model, tokenizer, monkeypatch):
    monkeypatch.setattr(LocalEngine, "_page_budget", lambda self: 5 if self._scheduler is None else 0)
    engine = LocalEngine(make_model(), tokenizer)
    with pytest.raises(ValueError, match="rollout.engine=local: .* GiB .* GiB"):
        engine.generate([Request(prompt_ids=[1] * 50, seed=0)], Sampling(max_tokens=60))
    engine.generate([Request(prompt_ids=[1] * 3, seed=0)], Sampling(max_tokens=4))


def test_tokens_after_a_stop_string_are_dropped(make_model, tokenizer, monkeypatch):
    model, requests = make_model(vocab_size=258), requests_for(3, limits=False)
    free = LocalEngine(model, tokenizer).generate(requests, Sampling(max_tokens=30))
    text = next(c.text for c in free if c.text[9:12].isascii() and c.text.find(c.text[9:12]) == 9)
    sampling = Sampling(max_tokens=30, stop=(text[9:12], "never seen"), stop_ids=(257,))
    expected = alone(model, tokenizer, requests, sampling)
    assert any(c.finish_reason == "stop" for c in expected)
    monkeypatch.setitem(local_engine.STEPS_PER_SYNC, "cpu", 4)
    monkeypatch.setitem(local_engine.LAG, "cpu", 1)
    assert_same(LocalEngine(model, tokenizer).generate(requests, sampling), expected)


def count_prefilled(monkeypatch) -> list[int]:
    """Record the token count of every prefill from now on."""
    from rollout.engines.decoder import Decoder

    counts, prefill = [], Decoder.prefill

    def spy(self, fills):
        counts.append(sum(len(fill.ids) for fill in fills))
        prefill(self, fills)

    monkeypatch.setattr(Decoder, "prefill", spy)
    return counts


def test_equal_prompts_are_prefilled_once(make_model, tokenizer, monkeypatch):
    engine = LocalEngine(make_model(), tokenizer, max_batch_size=4)
    engine.generate(requests_for(1), Sampling(max_tokens=2))
    counts = count_prefilled(monkeypatch)
    engine.generate([Request(prompt_ids=[3] * 30, seed=s) for s in range(20)], Sampling(max_tokens=2))
    assert sum(counts) == 29, "the first decode step runs the last prompt token"


def test_the_next_turn_reuses_the_cached_conversation(make_model, tokenizer, monkeypatch):
    model, sampling = make_model(), Sampling(max_tokens=60, stop_ids=tuple(range(0, 258, 9)))
    engine = LocalEngine(model, tokenizer)
    first = [Request(prompt_ids=prompt, seed=i, conversation=i) for i, prompt in enumerate(PROMPTS * 2)]
    completions = engine.generate(first, sampling)
    assert all(len(c.ids) < 45 for c in completions) and len({len(c.ids) for c in completions}) > 3
    counts = count_prefilled(monkeypatch)
    second = [
        Request(prompt_ids=c.prompt_ids + c.ids + [77, 78, 79], seed=50 + i, conversation=i, max_tokens=10)
        for i, c in enumerate(completions)
    ]
    plain = [Request(prompt_ids=r.prompt_ids, seed=r.seed, max_tokens=10) for r in second]
    expected = alone(model, tokenizer, plain, sampling)
    counts.clear()
    assert_same(engine.generate(second, sampling), expected)
    assert sum(counts) == 3 * len(second), "the last sampled token and two of three new tokens"
    counts.clear()
    plain = Request(prompt_ids=[250] * 20, seed=1)
    other = replace(plain, conversation=0)  # not a continuation: nothing is reused
    assert_same(engine.generate([other], sampling), alone(model, tokenizer, [plain], sampling))
    engine.forget()
    assert len(engine._scheduler.free) == engine._scheduler.decoder.cache.num_pages - 1


@pytest.mark.slow
def test_idle_conversations_are_evicted_if_pages_run_out(make_model, tokenizer, monkeypatch):
    model, sampling = make_model(), Sampling(max_tokens=20)
    engine = LocalEngine(model, tokenizer)
    first = engine.generate([Request(prompt_ids=[i] * 20, seed=i, conversation=i) for i in range(6)], sampling)
    engine._is_full = True  # no larger cache
    scheduler = engine._scheduler
    many = [Request(prompt_ids=[9, i], seed=i) for i in range(25)]
    assert_same(engine.generate(many, sampling), alone(model, tokenizer, many, sampling))
    second = [Request(prompt_ids=c.prompt_ids + c.ids + [5], seed=9, conversation=i) for i, c in enumerate(first)]
    plain = [Request(prompt_ids=r.prompt_ids, seed=r.seed) for r in second]
    assert_same(engine.generate(second, sampling), alone(model, tokenizer, plain, sampling))
    assert engine._scheduler is scheduler


def test_a_cache_limited_by_memory_is_not_reallocated(make_model, tokenizer, monkeypatch):
    monkeypatch.setattr(LocalEngine, "_page_budget", lambda self: 14)
    engine = LocalEngine(make_model(), tokenizer)
    schedulers = set()
    for _ in range(3):
        engine.generate([Request(prompt_ids=[i] * 20, seed=i) for i in range(9)], Sampling(max_tokens=20))
        schedulers.add(engine._scheduler)
    assert len(schedulers) == 1


def test_a_row_continues_when_its_page_table_is_enlarged(make_model, tokenizer):
    model = make_model()
    engine = LocalEngine(model, tokenizer)
    engine.generate([Request(prompt_ids=[i], seed=i) for i in range(9)], Sampling(max_tokens=2))
    scheduler, request = engine._scheduler, Request(prompt_ids=[5, 6, 7], seed=1)
    num_pages = scheduler.decoder.state.table.shape[1]
    long = engine.generate([request], Sampling(max_tokens=70))
    assert engine._scheduler is scheduler and scheduler.decoder.state.table.shape[1] > num_pages
    assert_same(long, alone(model, tokenizer, [request], Sampling(max_tokens=70)))


def test_new_weights_invalidate_the_cache(make_model, tokenizer):
    model, sampling = make_model(), Sampling(max_tokens=6)
    engine = LocalEngine(model, tokenizer)
    (first,) = engine.generate([Request(prompt_ids=[5, 6, 7], seed=1, conversation="a")], sampling)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine.load(1)
    ids = first.prompt_ids + first.ids + [8]
    turn = engine.generate([Request(prompt_ids=ids, seed=2, conversation="a")], sampling)
    assert_same(turn, alone(model, tokenizer, [Request(prompt_ids=ids, seed=2)], sampling))


def test_an_interrupted_run_leaves_the_engine_usable(make_model, tokenizer, monkeypatch):
    model, sampling, requests = make_model(), Sampling(max_tokens=12), requests_for(2)
    engine = LocalEngine(model, tokenizer)
    expected = engine.generate(requests, sampling)
    launch = engine._scheduler.decoder.launch

    def interrupted(*arguments):
        raise KeyboardInterrupt

    engine._scheduler.decoder.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests, sampling)
    engine._scheduler.decoder.launch = launch
    assert len(engine._scheduler.free) == engine._scheduler.decoder.cache.num_pages - 1
    assert_same(engine.generate(requests, sampling), expected)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6,
                   "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)  # fmt: skip
def test_block_forward_matches_the_model(make_model, tokenizer, monkeypatch, kind, extra):
    model = make_model(kind, **extra)
    sampling, requests = Sampling(max_tokens=20), requests_for(3)
    expected = LocalEngine(model, tokenizer).generate(requests, sampling)
    assert block_obstacle(model) is None
    engine = LocalEngine(model, tokenizer, max_batch_size=4)
    ways = [lambda: BlockForward(model, torch.float32)]
    monkeypatch.setattr(LocalEngine, "_ways", lambda self: ways)
    assert_same(engine.generate(requests, sampling), expected)
    assert type(engine._forward) is BlockForward


def test_block_forward_follows_the_adapters(make_model, tokenizer):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model("qwen3"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    sampling, requests = Sampling(max_tokens=12), requests_for(2)
    plain, copied = LocalEngine(model, tokenizer), LocalEngine(model, tokenizer)
    copied._ways = lambda: [lambda: BlockForward(model.get_base_model(), torch.float32)]
    for version in range(3):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1 * version)
        plain.load(version)
        copied.load(version)
        assert_same(copied.generate(requests, sampling), plain.generate(requests, sampling))
    assert type(copied._forward) is BlockForward


def test_a_copy_is_filled_from_the_full_tensor_of_every_shard(make_model):
    """Each weight once: all ranks of a sharded model gather them in the same order."""
    model = make_model("qwen3")
    for make in (BlockForward, lambda *args, **options: TransformersForward(*args, copied=True, **options)):
        gathered: list[int] = []
        forward = make(model, torch.float32, gather=lambda x, seen=gathered: seen.append(x.data_ptr()) or x + 1)
        forward.refresh()
        assert sorted(gathered) == sorted(p.data_ptr() for p in model.parameters())
    assert torch.equal(forward.lm.model.norm.weight, model.model.norm.weight + 1)


def test_a_copy_is_freed_before_the_trainer_gathers_its_weights(make_model, tokenizer, monkeypatch):
    model, sampling, requests = make_model("qwen3"), Sampling(max_tokens=8), requests_for(2)
    expected = LocalEngine(model, tokenizer).generate(requests, sampling)
    monkeypatch.setattr(LocalEngine, "_is_sharded", True)
    engine, has_copy = LocalEngine(model, tokenizer), []
    engine._ways = lambda: [lambda: BlockForward(model, torch.float32)]

    @contextmanager
    def gathered():
        has_copy.append(engine.has_copy)
        yield

    engine.choose_forward(gathered)
    assert has_copy == [False]
    assert_same(engine.generate(requests, sampling), expected)
    assert engine.has_copy


def test_if_the_first_forward_fails_the_second_gets_current_weights(make_model, tokenizer, monkeypatch):
    model, sampling, requests = make_model("qwen3"), Sampling(max_tokens=8), requests_for(2)
    expected = LocalEngine(model, tokenizer).generate(requests, sampling)
    lines: list[str] = []
    engine = LocalEngine(model, tokenizer, log=lines.append)
    engine._ways = lambda: [
        lambda: Wrong(model, torch.float32),
        lambda: TransformersForward(model, torch.float32, copied=True),
    ]
    assert_same(engine.generate(requests, sampling), expected)
    assert type(engine._forward) is TransformersForward and not engine._forward.in_place
    assert len(lines) == 1 and "transformers forward" in lines[0] and "log-probs" in lines[0]


class Wrong(BlockForward):
    """A forward with wrong weights."""

    def refresh(self) -> bool:
        super().refresh()
        self.head.mul_(2.0)
        return True


@pytest.mark.parametrize(
    ("settings", "is_plain"),
    [
        ({"target_modules": ["q_proj", "down_proj"]}, True),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj"], "lora_bias": True}, False),
        ({"target_modules": ["q_proj"], "use_dora": True}, False),
    ],
)  # fmt: skip
def test_a_copy_computes_only_plain_adapters(make_model, settings, is_plain):
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(make_model("qwen3"), LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    model = peft.get_base_model()
    assert (adapters_obstacle(model) is None) == is_plain
    assert (block_obstacle(model) is None) == is_plain
    peft.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    assert (adapters_obstacle(model) is None) == is_plain  # it is not active
    peft.base_model.set_adapter(["default", "other"])
    assert adapters_obstacle(model) is not None


def test_stream_restores_gradients_and_training_mode_at_each_yield(make_model, tokenizer):
    model = make_model().train()
    for _ in LocalEngine(model, tokenizer).stream(requests_for(2), Sampling(max_tokens=40)):
        assert torch.is_grad_enabled() and model.training


def test_models_without_paged_attention_sample_with_a_growing_cache(make_model, tokenizer, monkeypatch):
    model, sampling, requests = make_model("qwen3"), Sampling(max_tokens=12, stop_ids=(3, 5, 90)), requests_for(3)
    expected = LocalEngine(model, tokenizer).generate(requests, sampling)
    for obstacle in ("attention", "parity"):
        lines: list[str] = []
        engine = LocalEngine(model, tokenizer, max_batch_size=4, log=lines.append)
        with monkeypatch.context() as patch:
            if obstacle == "attention":
                patch.setattr(type(model), "_supports_attention_backend", False)
            else:
                engine._ways = lambda: [lambda: Wrong(model, torch.float32)]
            assert_same(engine.generate(requests, sampling), expected)
        assert engine._uses_growing_cache and len(lines) == 1 and "without a paged KV cache" in lines[0]


@pytest.mark.parametrize(
    ("name", "settings", "obstacle"),
    [
        ("Mamba", {"state_size": 4}, "ignore the state"),
        ("RecurrentGemma", {}, "it has recurrent layers"),
        ("MiniMax", {"num_local_experts": 2}, "fails with a paged KV cache .ValueError"),  # has its own cache
    ],
)
def test_models_that_cannot_be_sampled_with_a_cache_give_a_one_line_error(tokenizer, name, settings, obstacle):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | settings)
    engine = LocalEngine(transformers.AutoModelForCausalLM.from_config(config), tokenizer, max_batch_size=4)
    for _ in range(2):  # the second call must not sample either
        with pytest.raises(UserError, match=f"^rollout.engine=local: {name}[^\n]*{obstacle}"):
            engine.generate(requests_for(1), Sampling(max_tokens=2))


def test_a_tile_contains_rows_of_one_prefix():
    prefixes = [Prefix((i,), []) for i in range(3)]
    rows = [prefixes[0]] * 10 + [prefixes[1]] + [prefixes[0]] + [prefixes[2]] * 2
    tiles = tiles_of(rows)
    assert tiles.shape == (len(rows), TILE_ROWS)
    listed = [[row for row in tile if row >= 0] for tile in tiles.tolist()]
    assert [tile for tile in listed if tile] == [list(range(8)), [8, 9, 11], [10], [12, 13]]


SMALL = dict(vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3)  # fmt: skip
GPT2 = dict(vocab_size=258, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SINKS = {"attn_implementation": "eager", "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 9}
MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=16, mamba_chunk_size=16)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, n_group=1,
              topk_group=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)  # fmt: skip
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                            "original_max_position_embeddings": 32}}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("Qwen2", SMALL, "blocks"),
        ("Mistral", SMALL | {"sliding_window": 9}, "blocks"),
        ("Llama", SMALL | YARN, "blocks"),
        ("Qwen3Moe", SMALL | EXPERTS, "blocks"),
        ("Gemma", SMALL, "transformers"),
        ("Olmo2", {key: value for key, value in SMALL.items() if key != "head_dim"}, "transformers"),
        ("GPT2", GPT2, "transformers"),
        ("Gemma2", SMALL | {"attn_implementation": "eager", "attn_logit_softcapping": 1.0}, "transformers"),
        ("GptOss", SMALL | SINKS, "transformers"),
        ("DeepseekV3", SMALL | LATENT | {"num_key_value_heads": 4}, "transformers"),  # values narrower than keys
        ("FalconH1", SMALL | MAMBA, "transformers"),  # test_states.py has more models with states
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_architectures_use_the_fastest_forward_and_sample_correctly(tokenizer, name, settings, expected):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    engine = LocalEngine(model, tokenizer, max_batch_size=4, log=lambda line: None)
    completions = engine.generate(requests_for(2), Sampling(max_tokens=40, stop_ids=(3, 90)))
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        with torch.no_grad():
            logps = model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(dim=-1)
        chosen = logps[len(completion.prompt_ids) - 1 :].gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert completion.logps == pytest.approx(chosen.tolist(), abs=1e-4)
    assert not engine._uses_growing_cache
    assert (block_obstacle(model) is None) == (expected == "blocks")
    if expected == "blocks":
        merged = LocalEngine(model, tokenizer, max_batch_size=4)
        merged._ways = lambda: [lambda: BlockForward(model, torch.float32)]
        assert_same(merged.generate(requests_for(2), Sampling(max_tokens=40, stop_ids=(3, 90))), completions)
        assert type(merged._forward) is BlockForward
