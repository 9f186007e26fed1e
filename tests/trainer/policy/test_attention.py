"""Packed batches and shared prompts vs. single sequences, and the choice of the attention implementation."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from data.packing import Batch, Item, make_batches
from kernels import attention as kernel_attention
from kernels import reference
from kernels.attention import block_mask, dense_mask
from rollout.engine import Request, Sampling
from rollout.engines.local import LocalEngine
from tests.kernels.layouts import flex_settings
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy import attention
from trainer.policy.attention import attend, attention_masks, choose_attention, flex_obstacle, load_name, use_flex
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, check_logps, predictor_states, reference_logps, token_logps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # the choice needs only the device's name, no GPU
VOCAB = 60
WINDOW = 4  # shorter than the prompts and completions below
COMMON = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2, bos_token_id=None,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),  # norms on queries and keys
    "mistral": ("mistral", {"sliding_window": WINDOW}),  # every layer slides
    "gemma3": ("gemma3_text", {**SLIDING, "query_pre_attn_scalar": 16}),  # one layer slides
    "gemma2": ("gemma2", {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gpt2": ("gpt2", dict(n_embd=64, n_layer=2, n_head=4, n_positions=512, initializer_range=0.2)),
    "gpt_oss": ("gpt_oss", {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
DENSE = [("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("mistral", "sdpa"), ("gemma3", "sdpa"),
         ("gemma3", "eager"), ("gemma2", "eager"), ("gpt_oss", "eager")]  # fmt: skip
FLEX = ["llama", "qwen3", "mistral", "gemma3", "gemma2", "gpt_oss"]
ONLY_EAGER = ("gemma2", "gpt_oss")  # without sdpa in transformers


def make_model(kind: str, attn_implementation: str = "sdpa", **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    name, settings = KINDS[kind]
    config = AutoConfig.for_model(name, **{**COMMON, **settings, **changes})
    torch.manual_seed(0)
    if kind in ONLY_EAGER and attn_implementation == "sdpa":
        attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    if kind == "gpt_oss":
        model.set_experts_implementation("eager")  # others need bfloat16 on some GPUs
    return model


def policy_of(model: Any, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Policy:
    return Policy(model=model.to(device), tokenizer=None, source="test", device=device, compute_dtype=dtype)


def make_items(scale: int = 1) -> list[Item]:
    """Two groups with a shared prompt, one of them with an empty completion, and a single sequence."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> list[int]:
        return torch.randint(VOCAB, (length * scale,), generator=generator).tolist()

    items = []
    for num_prompt, lengths in ((9, (5, 1, 0, 7)), (3, (6, 2)), (4, (3,))):
        prompt = ids(num_prompt)
        for completion in map(ids, lengths):
            mask = [False] * len(prompt) + [True] * len(completion)
            items.append(Item(prompt + completion, mask, len(prompt)))
    return items


def batches_of(policy: Policy, layout: str, items: list[Item] | None = None) -> list[Batch]:
    batches = make_batches(
        items or make_items(), max_tokens=10_000, packing=layout != "padded", share_prompt=layout == "shared",
        multiple=policy.row_multiple,
    )  # fmt: skip
    return [batch.to(policy.device) for batch in batches]


def one_by_one(model: Any, items: list[Item], batch: Batch) -> tuple[Tensor, Tensor]:
    """Predicting states and log-probs of the batch's tokens, from transformers' forward on each sequence alone."""
    states, logps = [], []
    for i in batch.rows:
        ids = torch.tensor([items[i].ids], device=batch.input_ids.device)
        trained = torch.tensor(items[i].mask[1:], device=ids.device)
        states.append(model.base_model(input_ids=ids).last_hidden_state[0, :-1][trained])
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        logps.append(logp.gather(1, ids[0, 1:, None]).squeeze(1)[trained])
    return torch.cat(states), torch.cat(logps)


def assert_same(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-5)


@pytest.fixture
def flex_calls(monkeypatch) -> list[tuple[torch.dtype, ...]]:
    """Replace flex_attend by a dense version; return the dtypes of every call."""
    calls: list[tuple[torch.dtype, ...]] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, **options: Any) -> Tensor:
        calls.append((query.dtype, key.dtype, value.dtype))
        assert query.shape[2] % 128 == 0 and tuple(mask.shape) == (len(query), 1, query.shape[2], key.shape[2])
        return reference.attention(query, key, value, dense_mask(mask.mask_mod.spans, key.shape[2]), **options)

    monkeypatch.setattr(attention, "flex_attend", counted)
    return calls


@pytest.mark.parametrize(("kind", "implementation"), DENSE)
@torch.no_grad()
def test_dense_batches_match_single_sequences(kind, implementation):
    model, items = make_model(kind, implementation).eval(), make_items()
    policy = policy_of(model)
    for layout in ("shared", "packed", "padded") if kind == "llama" else ("shared", "padded"):
        (batch,) = batches_of(policy, layout)
        assert (batch.num_computed < batch.num_tokens) == (layout == "shared")
        states, logps = one_by_one(model, items, batch)
        assert logps.std() > 0.1 and len(logps) == 24
        assert_same(predictor_states(policy, model, batch), states)
        assert_same(token_logps(policy, batch).logp, logps)


@torch.no_grad()
def test_shared_prompts_of_the_builtin_model_match_single_sequences():
    policy = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=False)
    assert policy.model.config._attn_implementation == "sdpa" and policy.row_multiple == 1
    (batch,) = batches_of(policy, "shared")
    states, logps = one_by_one(policy.model, make_items(), batch)
    assert_same(predictor_states(policy, policy.model, batch), states)
    assert_same(token_logps(policy, batch).logp, logps)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
@torch.no_grad()
def test_sliding_windows_matter_at_these_lengths(kind):
    """Without its window the model's output differs, so the tests above cover positions outside the window."""
    policy = policy_of(make_model(kind).eval())
    (batch,) = batches_of(policy, "shared")
    with_window = token_logps(policy, batch).logp
    policy.model.config.sliding_window = 1000
    assert (token_logps(policy, batch).logp - with_window).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", "padded"), ("qwen3", "packed"), ("mistral", "shared"), ("gemma3", "shared"), ("gemma2", "shared"),
     ("gpt_oss", "shared")],
)  # fmt: skip
def test_registered_flex_matches_dense_masks_in_every_layer(kind, layout, flex_calls):
    results = []
    for flex in (False, True):
        policy = policy_of(make_model(kind).train())
        if flex:
            use_flex(policy.model)
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        (batch,) = batches_of(policy, layout)
        assert batch.input_ids.shape[1] % 128 == 0 or not flex
        logp = token_logps(policy, batch).logp
        (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
        results.append((logp.detach(), {name: p.grad for name, p in policy.model.named_parameters()}))
        assert len(flex_calls) == (2 * policy.model.config.num_hidden_layers if flex else 0)  # recomputed once
    (want, want_grads), (got, got_grads) = results
    assert_same(got, want)
    for name, gradient in got_grads.items():
        assert (gradient - want_grads[name]).norm() <= 1e-4 * want_grads[name].norm(), name
        assert not name.endswith("sinks") or gradient.norm() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("qwen3", 1), ("gemma3", 2)])  # gemma3: two layer types
def test_compiled_block_with_attention_is_one_graph_for_all_masks(kind, most):
    """Forward only: flex_attention has no backward on a CPU."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plain, flex = (policy_of(make_model(kind, initializer_range=0.1)) for _ in range(2))
    use_flex(flex.model)
    for block in flex.model.base_model.layers:
        block.compile(backend=count, dynamic=True, fullgraph=True)
    with flex_settings(), torch.no_grad():
        for length in (150, 300, 200, 500, 260):
            items = [Item([i % VOCAB for i in range(n)], [False] + [True] * (n - 1)) for n in (length, 31, 70)]
            (batch,) = make_batches(items, max_tokens=4096, multiple=128)
            assert_same(predictor_states(flex, flex.model, batch), predictor_states(plain, plain.model, batch))
    assert 1 <= len(graphs) <= most


def test_flex_failure_suggests_sdpa_or_eager(monkeypatch, capsys):
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(attention, "flex_attend", broken)
    for kind, other in (("llama", "sdpa"), ("gemma2", "eager")):
        policy = policy_of(make_model(kind))
        check_logps(policy)
        use_flex(policy.model)
        check_logps(policy)
        assert not policy.packs
        assert re.search(f"one sequence per row.*no compiler.*--attn-implementation {other}", capsys.readouterr().err)


def test_each_implementation_gets_its_kind_of_mask():
    (batch,) = batches_of(policy_of(make_model("llama")), "shared")
    spans = batch.spans
    want = dense_mask(spans, batch.input_ids.shape[1])
    assert torch.equal(attention_masks(make_model("llama").config, batch), want)
    eager = attention_masks(make_model("llama", "eager").config, batch)
    assert torch.equal(eager == 0, want) and (eager[~want] < -1e38).all()
    by_layer = attention_masks(make_model("gemma3").config, batch)
    assert by_layer.keys() == {"full_attention", "sliding_attention"}
    assert torch.equal(by_layer["full_attention"], want)
    assert by_layer["sliding_attention"].sum(dim=-1).max() == WINDOW
    model = make_model("gemma3")
    use_flex(model)
    assert all(isinstance(mask, BlockMask) for mask in attention_masks(model.config, batch).values())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a warning on CPUs without bfloat16 instructions
def test_passes_over_a_batch_share_block_masks_but_not_dense_masks(monkeypatch):
    built = []
    monkeypatch.setattr(attention, "block_mask", lambda *args: built.append("block") or block_mask(*args))
    monkeypatch.setattr(attention, "dense_mask", lambda *args: built.append("dense") or dense_mask(*args))
    ids = [[1] * 100, [2] * 60, [3] * 96]
    batch = make_batches([Item(x, [False] + [True] * (len(x) - 1)) for x in ids], max_tokens=256)[0]
    policy, reference_model = make_model("gemma3"), make_model("llama")
    for model in (policy, reference_model):
        use_flex(model)
    first = attention_masks(policy.config, batch)
    assert built == ["block"] * 2 and first["full_attention"] is attention_masks(reference_model.config, batch)
    assert attention_masks(policy.config, batch)["sliding_attention"] is first["sliding_attention"] and len(built) == 2
    attention_masks(policy.config, dataclasses.replace(batch))
    assert len(built) == 4, "another batch"
    for _ in range(2):
        attention_masks(make_model("llama").config, batch)
    assert built[4:] == ["dense"] * 2


def test_the_reference_uses_the_masks_of_the_policy(flex_calls, monkeypatch):
    built = []
    monkeypatch.setattr(attention, "block_mask", lambda *args: built.append(args) or block_mask(*args))
    policy = policy_of(make_model("llama"))
    policy.reference = make_model("llama")
    for model in (policy.model, policy.reference):
        use_flex(model)
    (batch,) = batches_of(policy, "shared")
    assert torch.equal(token_logps(policy, batch).logp, reference_logps(policy, batch)) and len(built) == 1


def test_flex_casts_queries_and_keys_to_the_dtype_of_the_values(flex_calls):
    """Under autocast the norms on queries and keys return float32."""
    model = make_model("qwen3")
    use_flex(model)
    policy = policy_of(model, dtype=torch.bfloat16)
    with torch.no_grad():
        token_logps(policy, batches_of(policy, "shared")[0])
    assert flex_calls == [(torch.bfloat16,) * 3] * 2


def test_generation_with_flex_matches_sdpa_bit_for_bit(flex_calls):
    """Prefill, decoding and plain forwards have no block masks, so they run transformers' sdpa."""
    tokenizer = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=False).tokenizer
    outputs, logits = [], []
    for flex in (False, True):
        model = make_model("gemma3").eval()
        if flex:
            use_flex(model)
        engine = LocalEngine(model, tokenizer)
        requests = [Request(prompt_ids=[5, 6, 7, 8, 9][: 3 + i % 3], seed=i) for i in range(6)]
        outputs.append([(c.ids, c.logps) for c in engine.generate(requests, Sampling(max_tokens=12, stop_ids=(2,)))])
        logits.append(model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]])).logits)
    assert outputs[0] == outputs[1] and torch.equal(*logits)
    assert not flex_calls


def test_auto_is_flex_on_cuda_and_sdpa_elsewhere(capsys):
    for kind in FLEX:
        for device, want in ((CPU, "eager" if kind in ONLY_EAGER else "sdpa"), (CUDA, "strop")):
            model = make_model(kind, load_name("auto", device))
            choose_attention(model, "auto", device)
            assert model.config._attn_implementation == model.base_model.config._attn_implementation == want
    lines = capsys.readouterr().err.splitlines()
    assert all("using eager" in line for line in lines) and len(lines) <= len(ONLY_EAGER)  # logged once per process


def test_models_that_flex_or_sdpa_cannot_run_are_rejected():
    for choice, kind, changes, message in (
        ("flex", "llama", {"head_dim": 8}, "attn_implementation=flex: head size 8 "),
        ("flex", "gpt2", {}, "attn_implementation=flex: GPT2LMHeadModel"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_attention(make_model(kind, load_name(choice, CUDA), **changes), choice, CUDA)
    model = make_model("gemma2")
    model.config._attn_implementation = "sdpa"  # newer transformers reject it while loading
    with pytest.raises(ValueError, match="attn_implementation=sdpa: Gemma2ForCausalLM .* use eager"):
        choose_attention(model, "sdpa", CUDA)
    choose_attention(model, "auto", CPU)
    assert model.config._attn_implementation == model.base_model.config._attn_implementation == "eager"


def test_flash_attention_is_used_only_on_request(monkeypatch):
    monkeypatch.setattr(attention, "flash_obstacle", lambda size: None if size == 64 else f"head size {size} is not 64")
    for choice, want in (("auto", False), ("flash", True), ("flex", False)):
        model = make_model("llama", load_name(choice, CUDA), head_dim=64)
        choose_attention(model, choice, CUDA)
        assert model.config._attn_implementation == "strop" and kernel_attention._flash_is_on == want
    with pytest.raises(ValueError, match="^attn_implementation=flash: head size 16 is not 64; use auto or eager$"):
        choose_attention(make_model("llama"), "flash", CUDA)


@pytest.mark.parametrize(("kind", "changes", "why"), [("llama", {"head_dim": 8}, "size 8"), ("gpt2", {}, "interface")])
def test_auto_falls_back_to_sdpa_and_logs_it_once(kind, changes, why, capsys):
    model = make_model(kind, load_name("auto", CUDA), **changes)
    attention._log_once.cache_clear()
    for _ in range(2):  # a policy and its reference
        choose_attention(model, "auto", CUDA)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("attention: ") and "sdpa" in err and why in err
    assert model.config._attn_implementation == "sdpa"


def test_flex_obstacle_checks_the_heads_of_latent_attention():
    model = make_model("llama", head_dim=80)
    model.config.qk_head_dim, model.config.v_head_dim = 192, 128
    assert flex_obstacle(model) is None
    model.config.v_head_dim = 8
    assert "head size 8 " in flex_obstacle(model)


@pytest.mark.parametrize("choice", ["flex", "flash"])
def test_flex_on_a_cpu_is_rejected(choice):
    cfg = ModelConfig(model="builtin:tiny", attn_implementation=choice)
    with pytest.raises(ValueError, match=f"^attn_implementation={choice}: .* cpu; use auto$"):
        load_policy(cfg, LoraConfig(), CPU, with_reference=False)


@pytest.mark.parametrize("option", [{"position_bias": torch.ones(2)}, {"dropout": 0.1}], ids=str)
def test_options_that_flex_does_not_support_are_rejected(option, flex_calls):
    x = torch.randn(1, 2, 128, 16)
    zero = torch.zeros(1, 128, dtype=torch.int64)
    mask = block_mask((zero, zero, zero, torch.arange(1, 129).view(1, -1)), 128)
    with pytest.raises(ValueError, match=f"^Identity: .*{next(iter(option))}"):
        attend(torch.nn.Identity(), x, x, x, mask, scaling=0.25, **option)
    out, _ = attend(torch.nn.Identity(), x, x, x, mask)
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert_same(out, want.transpose(1, 2))
    assert len(flex_calls) == 1


@pytest.mark.parametrize("kind", ONLY_EAGER)
@torch.no_grad()
def test_plain_forwards_with_flex_cap_scores_and_have_sinks(kind, flex_calls):
    """Without block masks: whole rows, left-padded rows and a decode step with a cache."""
    ids = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0] * 3 + [1] * 8, [1] * 11])
    outputs = []
    for flex in (False, True):
        model = make_model(kind).eval()
        if flex:
            use_flex(model)
        cached = model(ids[:, :-1])
        step = model(ids[:, -1:], past_key_values=cached.past_key_values)
        padded = model(ids, attention_mask=mask).logits[mask.bool()]
        outputs.append(torch.cat([model(ids).logits.flatten(0, 1), padded, step.logits[:, 0]]))
    assert_same(*outputs)
    assert not flex_calls


def test_export_does_not_contain_the_attention_name(tmp_path):
    model = make_model("llama")
    use_flex(model)
    model.save_pretrained(tmp_path)
    assert attention.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FLEX)
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_flex_on_cuda_matches_single_sequences(kind, layout):
    """Float32: states, log-probs and gradients of batches longer than a tile vs. each sequence alone."""
    plain = make_model(kind, sliding_window=100) if "sliding_window" in KINDS[kind][1] else make_model(kind)
    plain = plain.to(CUDA).eval()
    policy = policy_of(copy.deepcopy(plain), CUDA)
    use_flex(policy.model)
    items = make_items(scale=37)
    (batch,) = batches_of(policy, layout, items)
    want_states, want = one_by_one(plain, items, batch)
    got = token_logps(policy, batch).logp
    assert_same(predictor_states(policy, policy.model, batch), want_states, atol=1e-3)
    assert_same(got, want, atol=1e-3)
    weight = torch.linspace(-1, 1, len(want), device=CUDA)
    for logp in (got, want):
        (logp * weight).sum().backward()
    for (name, p), q in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        limit = 3e-3 if name.endswith("sinks") else 1e-3  # a sum over all tokens that almost cancels: 1.6e-3
        assert (p.grad - q.grad).norm() <= limit * q.grad.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_flex_on_cuda_in_bfloat16_is_as_accurate_as_sdpa(kind):
    """With autocast and checkpointing, gradients of shared prompts are as close to float32 as with sdpa."""
    items, gradients = make_items(scale=37), {}
    for name in ("float32", "sdpa", "flex"):
        model = make_model(kind).to(CUDA).train()
        if name == "flex":
            use_flex(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = policy_of(model, CUDA, torch.float32 if name == "float32" else torch.bfloat16)
        (batch,) = batches_of(policy, "shared" if name == "flex" else "padded", items)
        logp = token_logps(policy, batch).logp
        by_item = torch.tensor([0.3 * i - 1 for i in range(len(items))], device=CUDA)
        (logp * by_item[batch.sequence]).sum().backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    exact = gradients["float32"]
    error = {name: ((gradients[name] - exact).norm() / exact.norm()).item() for name in ("sdpa", "flex")}
    assert error["flex"] < 1.5 * error["sdpa"] + 1e-3, error
