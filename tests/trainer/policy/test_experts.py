"""Experts that the sampler recorded, replayed in training; grouped matmuls under autocast."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from data.packing import Batch, Item, make_batches
from kernels.attention import share_graphs
from rollout.engine import Completion, Request, Sampling
from rollout.engines.forward import BlockForward, TransformersForward
from rollout.engines.local import LocalEngine
from rollout.episodes.turns import Transcript
from rollout.routes import expert_blocks, from_server, join, recording, stack
from rollout.schedule.replay import as_json, completion_of
from trainer.config.blocks import LoraConfig
from trainer.policy.adapters import add_adapter
from trainer.policy.experts import prepare_replay, use_grouped_matmuls
from trainer.policy.load import BUILTIN, recompute_inside
from trainer.policy.logps import Policy, reference_logps, token_logps
from trainer.rl.minibatch import completion_item
from trainer.rl.rank0_rollout import packed, unpacked

CPU, VOCAB, EXPERTS = torch.device("cpu"), 64, 8
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts_per_tok=2, initializer_range=0.2,
             max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=0)  # fmt: skip
GROUPS = dict(n_routed_experts=EXPERTS, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MODELS = {
    "qwen3_moe": dict(num_experts=EXPERTS, norm_topk_prob=True),
    "glm4_moe": GROUPS,
    "deepseek_v3": GROUPS | LATENT,
    "minimax_m2": dict(num_local_experts=EXPERTS),
    "gpt_oss": dict(num_local_experts=EXPERTS),
}


def make(kind: str = "qwen3_moe", dtype: torch.dtype = torch.float64, **changed: Any) -> Policy:
    from transformers import AutoConfig, AutoModelForCausalLM

    use_grouped_matmuls()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | MODELS[kind] | changed)
    # torch's grouped matmul does not support float64.
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
    model.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    for block in expert_blocks(model):  # some models start with zeros, which choose the same experts for all tokens
        torch.nn.init.normal_(next(x for x in block.children() if hasattr(x, "weight")).weight)
    if dtype == torch.float64:  # transformers' norms round to float32
        for module in (model.model, *model.model.layers):
            for name in [name for name, _ in module.named_children() if "norm" in name]:
                setattr(module, name, torch.nn.RMSNorm(config.hidden_size, eps=1e-6, dtype=dtype))
    policy = Policy(model=model.train(), tokenizer=None, source=kind, device=CPU, compute_dtype=dtype)
    policy.replays_routes = prepare_replay(policy, model.model.layers, lambda text: pytest.fail(text))
    return policy


def sequences(routes: torch.Tensor | None = None) -> list[Item]:
    """Two groups of completions with one prompt each; `routes` (N, L, k) in order, equal for equal prompts."""
    generator, items = torch.Generator().manual_seed(1), []
    for prompt_length, lengths in ((4, (5, 2, 7)), (6, (3, 4))):
        prompt = torch.randint(VOCAB, (prompt_length,), generator=generator).tolist()
        for length in lengths:
            ids = prompt + torch.randint(VOCAB, (length,), generator=generator).tolist()
            items.append(Item(ids, [False] * prompt_length + [True] * length, prompt_length))
    if routes is None:
        return items
    array = routes.numpy()
    return [Item(x.ids, x.mask, x.prompt_length, array[: len(x.ids)]) for x in items]


def batch_of(items: list[Item]) -> Batch:
    (batch,) = make_batches(items, max_tokens=1000, share_prompt=True)
    return batch


def gradients(policy: Policy, batches: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs in the order of the items, and the gradient of a weighted sum of them."""
    policy.model.zero_grad()
    logps = {}
    for batch in batches:
        logp = token_logps(policy, batch).logp
        (logp * torch.cos(batch.target + 1.0)).sum().backward()
        logps |= {i: logp.detach()[batch.sequence == i] for i in batch.rows}
    return torch.cat([logps[i] for i in sorted(logps)]), {
        name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None
    }


def run_recorded(policy: Policy, batch: Batch) -> torch.Tensor:  # (N, L, k)
    with recording(policy.model) as chosen, torch.no_grad():
        token_logps(policy, batch)
    return stack(chosen, EXPERTS)


@pytest.mark.parametrize(("kind", "checkpointing"), [*((kind, False) for kind in MODELS), ("qwen3_moe", True)])
def test_replayed_routes_give_the_gradients_of_the_model_that_chose_them(kind, checkpointing):
    policy = make(kind)
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = batch_of(sequences())
    own = run_recorded(policy, batch)
    want, want_gradients = gradients(policy, [batch])
    replayed = Batch(**vars(batch) | {"routes": own.unflatten(0, batch.input_ids.shape)})
    got, got_gradients = gradients(policy, [replayed])
    assert torch.equal(got, want)
    assert want_gradients.keys() == got_gradients.keys()
    assert all(torch.equal(got_gradients[name], grad) for name, grad in want_gradients.items())
    # Other experts: the layers follow them, and the router gets another gradient.
    other = Batch(**vars(batch) | {"routes": (own.unflatten(0, batch.input_ids.shape) + 3) % EXPERTS})
    assert torch.equal(run_recorded(policy, other), other.routes.flatten(0, 1))
    moved, moved_gradients = gradients(policy, [other])
    routers = [name for name in got_gradients if name.endswith(("gate.weight", "router.weight"))]
    assert routers and not torch.allclose(moved, want)
    assert all(
        moved_gradients[x].abs().sum() > 0 and not torch.equal(moved_gradients[x], got_gradients[x]) for x in routers
    )
    # Unrecorded tokens choose their experts, and the reference always does.
    none = Batch(**vars(batch) | {"routes": torch.full_like(other.routes, 255)})
    assert torch.equal(token_logps(policy, none).logp, token_logps(policy, batch).logp)
    policy.reference = policy.model
    assert torch.equal(reference_logps(policy, other), token_logps(policy, batch).logp)


def test_replayed_gradients_do_not_depend_on_the_layout():
    policy = make("gpt_oss")  # its router and attention never round to float32
    routes = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(64 * 2)]).view(64, 2, 2).to(torch.uint8)
    items = sequences(routes)
    want, want_gradients = gradients(policy, make_batches(items, max_tokens=1))  # one sequence per pass
    for options in (
        {"max_tokens": 1000, "share_prompt": True}, {"max_tokens": 1000}, {"max_tokens": 20, "share_prompt": True},
        {"max_tokens": 1000, "packing": False}, {"max_tokens": 1000, "one_row": False, "multiple": 8},
    ):  # fmt: skip
        got, got_gradients = gradients(policy, make_batches(items, **options))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        for name, gradient in want_gradients.items():
            torch.testing.assert_close(got_gradients[name], gradient, rtol=0, atol=1e-10)


def sample(
    policy: Policy,
    *,
    limit: int = 12,
    rows: int | None = None,
    make_forward: Any = None,
    so_far: Sequence[Completion | None] = (None,) * 8,
) -> list[Completion]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN["builtin:tiny"])
    engine = LocalEngine(
        policy.model, tokenizer, autocast_dtype=policy.autocast_dtype, records_routes=True, max_batch_size=rows
    )
    if make_forward is not None:
        engine._ways = lambda: [make_forward]
    prompts = [[3, 9, 14, 5, 33], [7, 21]]
    requests = [Request(prompt_ids=ids, seed=seed) for seed in range(4) for ids in prompts]
    requests = [replace(request, so_far=each) for request, each in zip(requests, so_far, strict=True)]
    return engine.generate(requests, Sampling(max_tokens=limit, for_training=True))


def test_the_engine_records_the_routes_that_the_trainer_chooses_in_float32():
    policy = make(dtype=torch.float32)
    for completion in sample(policy, rows=3):
        length = len(completion.prompt_ids) + len(completion.ids)
        assert completion.routes.shape == (length, 2, 2) and completion.routes.dtype == np.uint8
        assert (completion.routes[-1] == 255).all() and (completion.routes[:-1] < EXPERTS).all()
        item = completion_item(completion)
        own = run_recorded(policy, batch_of([Item(item.ids, item.mask)]))
        assert torch.equal(own[:-1], torch.from_numpy(completion.routes[:-1]))
    short = sample(policy, limit=5)
    changed = [replace(c, routes=np.where(c.routes < 255, 1 - c.routes % 2, 255).astype(np.uint8)) for c in short]
    for begun, c, full in zip(changed, sample(policy, so_far=changed), sample(policy), strict=True):
        first = len(begun.routes) - 1  # what was recorded first counts
        assert c.ids == full.ids and np.array_equal(c.routes[:first], begun.routes[:first])
        assert np.array_equal(c.routes[first:], full.routes[first:])


def measure(policy: Policy, completions: list[Completion]) -> dict[str, float]:
    """Fraction of tokens with the sampler's experts in all layers, and the mean gap of log-probs to the sampler."""
    items = [completion_item(c) for c in completions]
    (batch,) = make_batches(items, max_tokens=10**6, share_prompt=True)
    sampled = torch.tensor([logp for i in batch.rows for logp in completions[i].logps])
    recorded, result = batch.routes.flatten(0, 1), {}
    known = (recorded != 255).all(dim=(1, 2))
    for name, routes in (("own", None), ("replayed", batch.routes)):
        mb = Batch(**vars(batch) | {"routes": routes})
        with torch.no_grad():
            gap = (token_logps(policy, mb).logp.float() - sampled).abs().mean()
        same = (run_recorded(policy, mb)[known] == recorded[known]).all(dim=(1, 2)).float().mean()
        result |= {f"{name} gap": gap.item(), f"{name} same": same.item()}
    return result


def test_replay_uses_the_samplers_experts_for_every_token_in_bfloat16():
    policy = make(dtype=torch.bfloat16, num_experts=64, num_experts_per_tok=8)
    found = measure(policy, sample(policy, limit=10))
    assert found["replayed same"] == 1
    assert found["own same"] < 1
    assert found["replayed gap"] < found["own gap"] + 1e-3


def test_routes_travel_with_completions():
    routes = np.arange(7 * 2 * 2, dtype=np.int16).reshape(7, 2, 2)
    plain = dict(
        prompt_ids=[1, 2, 3], ids=[4, 5, 6, 7], logps=[-1.0] * 4, finish_reason="stop", text="", versions=[(0, 4)]
    )
    completions = [Completion(**plain, routes=routes), Completion(**plain), Completion(**plain, routes=routes + 100)]
    sent = [unpacked(pickle.loads(pickle.dumps(packed(c))), c.prompt_ids) for c in completions]
    saved = [completion_of(as_json(c)) for c in completions]
    for got in (sent, saved):
        assert got[1].routes is None
        assert (
            all(np.array_equal(got[i].routes, completions[i].routes) for i in (0, 2))
            and got[2].routes.dtype == np.int16
        )
    old = as_json(completions[1])
    del old["routes"]
    assert completion_of(old).routes is None
    # A second turn runs the tokens of the first again; the routes of the pass that sampled them count.
    transcript = Transcript([1, 2, 3])
    first = routes[:5].copy()
    first[4] = np.iinfo(np.int16).max
    transcript.add(Completion(**plain | {"ids": [4, 5], "logps": [-1.0] * 2}, routes=first))
    transcript.insert([6])
    transcript.add(
        Completion(**plain | {"prompt_ids": [1, 2, 3, 4, 5, 6], "ids": [7], "logps": [-1.0]}, routes=routes + 50)
    )
    transcript.insert([8])
    got = transcript.completion("stop", text="").routes
    assert np.array_equal(got[:4], routes[:4]) and np.array_equal(got[4:7], routes[4:7] + 50)
    assert len(got) == 8 and (got[7] == np.iinfo(np.int16).max).all()
    assert join([], 3) is None
    # vLLM reports all layers, and glm4_moe's first layer has no experts.
    reported = np.arange(5 * 2 * 2, dtype=np.uint16).reshape(5, 2, 2)
    got = from_server(reported, make("glm4_moe").model)
    assert got.dtype == np.uint8 and np.array_equal(got, reported[:, 1:])


def test_experts_compute_in_the_dtype_of_autocast():
    policy = make(dtype=torch.bfloat16)
    experts = expert_blocks(policy.model)[0].experts
    hidden, weights = torch.randn(5, 32), torch.full((5, 2), 0.5)
    index = torch.tensor([[0, 1], [1, 2], [7, 3], [4, 0], [2, 5]])
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(hidden, index, weights)
        config = policy.model.config
        config._experts_implementation_internal = (
            "eager"  # a loop over experts, with linear layers that autocast rounds
        )
        want = experts(hidden, index, weights)
    exact = experts(hidden, index, weights)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert (got - exact).abs().max() > 1e-4  # it did round


def test_the_engines_copy_has_the_adapters_of_experts_and_routers():
    policy = make(dtype=torch.float32)
    model = add_adapter(policy.model, LoraConfig(r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert any(".experts." in name for name, x in model.named_parameters() if x.requires_grad)
    forward = TransformersForward(model.get_base_model(), torch.float32, copied=True)
    forward.refresh()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        want = model(input_ids=ids).logits
        torch.testing.assert_close(forward.lm(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
    policy.model = model
    completions = sample(policy, limit=4)
    blocks = sample(
        policy, limit=4, make_forward=partial(BlockForward, model.get_base_model(), torch.float32, records_routes=True)
    )
    for got, completion in zip(blocks, completions, strict=True):
        assert got.ids == completion.ids and got.logps == pytest.approx(completion.logps, abs=1e-4)
        assert np.array_equal(np.sort(got.routes), np.sort(completion.routes))
    # Such a model takes routes as well.
    batch = batch_of(sequences())
    other = Batch(**vars(batch) | {"routes": (run_recorded(policy, batch).unflatten(0, batch.input_ids.shape) + 3) % 8})
    assert torch.equal(run_recorded(policy, other), other.routes.flatten(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_share_graphs_and_replay_routes(checkpointing):
    """aot_eager: the graphs of inductor, without its code generation."""
    from torch._dynamo.utils import counters

    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        policy = make(dtype=torch.bfloat16, num_hidden_layers=12)
        for layer in policy.model.model.layers if compiled else ():
            if checkpointing:
                recompute_inside(layer)
            layer.compile(dynamic=True, backend="aot_eager")
        share_graphs()
        found = []
        for items in (sequences(), sequences()[:3]):
            batch = batch_of(items)
            num = batch.input_ids.numel()
            torch.manual_seed(num)
            routes = torch.rand(num, 12, EXPERTS).topk(2).indices.to(torch.uint8).unflatten(0, batch.input_ids.shape)
            found += [gradients(policy, [Batch(**vars(batch) | {"routes": routes})]), gradients(policy, [batch])]
        results.append(found)
    assert counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"]
    for (want, want_gradients), (got, got_gradients) in zip(*results, strict=True):
        assert torch.equal(got, want)
        assert all(torch.equal(got_gradients[name], gradient) for name, gradient in want_gradients.items())
