"""Models whose layers carry state, in float64: rows, packing, padding and sampling do not change log-probs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.runs.hybrid_gradients import InFloat64
from data.errors import UserError
from data.packing import Batch, Item, make_batches
from kernels.nf4 import Linear4bit
from rollout import state_layers
from rollout.engine import Request, Sampling
from rollout.engines.local import LocalEngine
from tests.models import COMMON, RECURRENT, SAMPLED, each_segment, make_model, policy_of, save, segment_kernels
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.adapters import add_adapter
from trainer.policy.load import compile_blocks, load_policy, quantize_layers
from trainer.policy.logps import Policy, check_logps, share_batches, token_logps, values_without_leak
from trainer.rl.servers import reject_text_part
from trainer.tiny.build import make_tokenizer

ALWAYS = ("lfm2", "qwen3_5_text", "nemotron_h")
# transformers gives no boundaries to the layers of other models.
PACKED = [*(kind for kind in SAMPLED if kind != "kimi_linear"), "zamba2"]
BRANCHING = ["lfm2", "qwen3_5_text", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"]  # share prompts


def kinds(names: Sequence[str]) -> Any:
    return pytest.mark.parametrize(
        "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in ALWAYS)) for k in names]
    )


def policy_in_float64(model: Any) -> Policy:
    """A policy that has passed the probe."""
    policy = policy_of(model, "float32")
    check_logps(policy)
    policy.model.set_experts_implementation("eager")  # grouped matmuls do not run in float64
    policy.model.double()
    policy.compute_dtype = torch.float64
    return policy


def make_items() -> list[Item]:
    return [
        Item([(step * i + 1) % 275 for i in range(n)], [False] + [True] * (n - 1))
        for step, n in ((7, 9), (5, 3), (11, 14), (13, 6))
    ]


def gradients(policy: Policy, items: Sequence[Item], batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs in item order, and the gradient of their sum with a different weight for each token."""
    policy.model.zero_grad()
    logps: dict[int, Tensor] = {}
    for batch in batches:
        own = token_logps(policy, batch).logp.split([sum(items[row].mask) for row in batch.rows])
        logps |= zip(batch.rows, own, strict=True)
    flat = torch.cat([logps[row] for row in range(len(items))])
    (flat * torch.linspace(1, 2, len(flat))).sum().backward()
    return flat.detach(), {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def assert_equal(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert got[0].dtype == torch.float64 and got[1].keys() == want[1].keys()
    torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-10)
    scale = max(gradient.abs().max() for gradient in want[1].values())
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).abs().max() < 1e-10 * scale, name


def run_segments_alone(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    code = sys.modules[type(model).__module__]
    for name, kernel in segment_kernels(code).items():
        monkeypatch.setattr(code, name, kernel)


@kinds(RECURRENT)
def test_one_sequence_per_row_equals_separate_rows(kind):
    policy, items = policy_in_float64(make_model(kind)), make_items()
    options = policy.layout(packing=False) | {"max_padding": 1.0}
    (padded,), alone = make_batches(items, max_tokens=64, **options), make_batches(items, max_tokens=1, **options)
    assert padded.input_ids.shape == (4, 14) and len(alone) == 4
    with InFloat64():
        assert_equal(gradients(policy, items, [padded]), gradients(policy, items, alone))


@kinds(PACKED)
def test_packed_rows_equal_separate_rows(kind, monkeypatch):
    """With a reference that runs each segment alone instead of the kernels of a GPU."""
    run_segments_alone(monkeypatch, model := make_model(kind))
    policy, items = policy_in_float64(model), make_items()
    assert policy.packs and policy.can_share == (kind in BRANCHING)
    (packed,) = make_batches(items, max_tokens=64, **policy.layout(share_prompt=True) | {"multiple": 5})
    assert packed.input_ids.shape == (1, 35) and packed.used == [32]
    alone = make_batches(items, max_tokens=1, **policy.layout(packing=False))
    with InFloat64():
        assert_equal(gradients(policy, items, [packed]), gradients(policy, items, alone))
        values_without_leak(policy, packed, (0, 3), lambda policy, batch: token_logps(policy, batch).logp)


@kinds(BRANCHING)
@pytest.mark.parametrize("together", [1, 2])
def test_shared_prompts_equal_separate_rows(kind, together, monkeypatch):
    """Completions of a group, pairs, and a sequence of its own between them; prompts below and above a convolution."""
    run_segments_alone(monkeypatch, model := make_model(kind))
    policy, items = policy_in_float64(model), []
    for length, sizes in ((9, (4, 1, 6, 3)), (1, (5, 2)), (2, (3, 7))):
        prompt = [(7 * i + length) % 275 for i in range(length)]
        for size in sizes:
            own = [(11 * i + 5 * size + length) % 275 for i in range(size)]
            items.append(Item(prompt + own, [False] * length + [True] * size, length))
    assert policy.can_share
    options = policy.layout(share_prompt=True) | {"multiple": 5, "together": together}
    (packed,) = make_batches(items, max_tokens=128, **options)
    alone = make_batches(items, max_tokens=1, **policy.layout(packing=False))
    assert packed.num_computed < packed.num_tokens
    with InFloat64():
        assert_equal(gradients(policy, items, [packed]), gradients(policy, items, alone))
        values_without_leak(policy, packed, (0, 5), lambda policy, batch: token_logps(policy, batch).logp)


@kinds(BRANCHING)
def test_episodes_as_trees_equal_separate_rows(kind, monkeypatch):
    """Branches leave their episode in the middle of what an earlier branch computed, less than a convolution apart."""
    run_segments_alone(monkeypatch, model := make_model(kind))
    policy, trunk = policy_in_float64(model), [(3 * i + 1) % 275 for i in range(20)]
    items = []
    for episode, shares in enumerate(((20, 5, 6, 14, 13), (12, 4))):
        for n, shared in enumerate(shares):
            ids = [*trunk[:shared], *((13 * i + n + 40 * episode) % 275 for i in range(3 + n))]
            items.append(Item(ids, [False] * 4 + [True] * (len(ids) - 4), 3, episode=episode))
    (packed,) = make_batches(items, max_tokens=128, **policy.layout(share_prompt=True))
    alone = make_batches(items, max_tokens=1, **policy.layout(packing=False))
    assert len(packed.spans) > 4
    with InFloat64():
        assert_equal(gradients(policy, items, [packed]), gradients(policy, items, alone))


@kinds(SAMPLED)
def test_sampled_log_probs_equal_trained_log_probs(kind):
    policy = policy_in_float64(make_model(kind))
    prompts = ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [11, 12], list(range(20, 30)))
    requests = [Request(prompt_ids=prompt, seed=i, max_tokens=3 + 2 * i) for i, prompt in enumerate(prompts)]
    with InFloat64():
        engine = LocalEngine(policy.model, make_tokenizer(), log=lambda line: None)
        sampled = engine.generate(requests, Sampling())
        items = [Item([*c.prompt_ids, *c.ids], [False] * len(c.prompt_ids) + [True] * len(c.ids)) for c in sampled]
        batches = make_batches(items, max_tokens=256, **policy.layout())
        trained, _ = gradients(policy, items, batches)
    logps = torch.tensor([logp for c in sampled for logp in c.logps], dtype=torch.float64)
    torch.testing.assert_close(logps, trained, rtol=0, atol=1e-10)


def test_adapters_and_4_bits_skip_weights_that_mamba_kernels_read():
    lora = LoraConfig(r=2)
    model = add_adapter(make_model("nemotron_h"), lora)
    adapted = {name.split(".")[-2] for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert "in_proj" in adapted and "out_proj" not in adapted
    with pytest.raises(ValueError, match=r"^lora.target_modules=out_proj: .*Mamba"):
        add_adapter(make_model("granitemoehybrid"), replace(lora, target_modules=("q_proj", "out_proj")))
    model = make_model("nemotron_h")
    quantize_layers(model, torch.device("cpu"))
    mixer = model.base_model.layers[0].mixer
    assert isinstance(mixer.in_proj, Linear4bit) and type(mixer.out_proj) is torch.nn.Linear
    model = add_adapter(make_model("qwen3_5_text"), lora)  # gated delta nets call their layers
    assert any(name.endswith("linear_attn.out_proj.lora_A") for name, _ in model.named_modules())


def test_models_that_run_the_same_batches_share_a_layout(capsys):
    policy, other = (policy_of(make_model(kind), "float32") for kind in ("llama", "qwen3_5_text"))
    for each in (policy, other):
        check_logps(each)
    assert policy.packs and policy.can_share and not other.packs
    assert "model_type=qwen3_5_text" in capsys.readouterr().err
    share_batches(policy, other)
    assert policy.layout(share_prompt=True) == other.layout(share_prompt=True) | {"one_row": False}
    items = make_items()
    batches = make_batches(items, max_tokens=64, **policy.layout())
    assert all(len(batch.rows) == len(batch.input_ids) for batch in batches)
    assert all(token_logps(each, batch).logp.isfinite().all() for each in (policy, other) for batch in batches)


def test_the_text_part_of_a_model_with_images_is_trained_but_not_served(tmp_path):
    """Released Qwen3.5 files contain both parts; vLLM would load both, under other names."""
    from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

    text, vision = COMMON | RECURRENT["qwen3_5_text"], dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=64)
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    both = Qwen3_5ForConditionalGeneration(config).eval()
    cfg = ModelConfig(model=str(save(both, tmp_path)))
    policy = load_policy(cfg, LoraConfig(), torch.device("cpu"), with_reference=False)
    items = make_items()[:1]
    (batch,) = make_batches(items, max_tokens=64, **policy.layout())
    ids = torch.tensor([items[0].ids])
    want = both(input_ids=ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(token_logps(policy, batch).logp, want)
    with pytest.raises(UserError, match=r"^rollout.engine=vllm: .*Qwen3_5ForConditionalGeneration.*Qwen3_5ForCausalLM"):
        reject_text_part(policy)
    policy.model.save_pretrained(tmp_path)
    reject_text_part(policy)


@pytest.mark.slow
def test_recomputed_blocks_are_compiled_around_their_kernels(monkeypatch):
    """A checkpoint inside the graph would run uncompiled: the compiler does not trace the kernels of a GPU."""
    model = make_model("qwen3_5_text", num_hidden_layers=1, layer_types=["linear_attention"])
    policy, linears = policy_of(model, "float32"), []

    def backend(graph: Any, inputs: Any) -> Any:
        linears.extend(node for node in graph.graph.nodes if node.target is torch._C._nn.linear)
        return graph.forward

    code, plain = sys.modules[type(model).__module__], torch.compile
    for name, kernel in segment_kernels(code).items():
        monkeypatch.setattr(code, name, torch.compiler.disable(kernel))
    monkeypatch.setattr(torch, "compile", lambda forward, options, **o: plain(forward, backend=backend, **o))
    check_logps(policy)
    items = make_items()
    batches = make_batches(items, max_tokens=64, **policy.layout())
    logps, want = gradients(policy, items, batches)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compile_blocks(model, "tiny")
    compiled_logps, got = gradients(policy, items, batches)
    torch._dynamo.reset()
    block = model.base_model.layers[0]
    assert len(linears) == sum(type(module) is nn.Linear for module in block.modules()) == 8
    assert torch.equal(compiled_logps, logps)
    assert want and all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_a_folder_in_the_working_directory_is_not_a_package(tmp_path, monkeypatch):
    (tmp_path / "unpacked").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not state_layers.has("unpacked") and not state_layers.has("absent") and state_layers.has("torch")


@pytest.mark.gpu
def test_rows_of_a_gated_delta_net_run_as_one_packed_row_on_a_gpu(monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as code

    plain, lengths = inspect.unwrap(code.torch_chunk_gated_delta_rule), []

    def kernel(*args: Any, cu_seqlens: Tensor, **kwargs: Any) -> Any:
        lengths.append(cu_seqlens.diff().tolist())
        return each_segment(plain)(*args, cu_seqlens=cu_seqlens, **kwargs)

    monkeypatch.setattr(state_layers, "has", lambda package: True)
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 70, 2, size, device="cuda") for size in (8, 8, 16))
    g, beta = -torch.rand(3, 70, 2, device="cuda"), torch.rand(3, 70, 2, device="cuda")
    more = {"initial_state": torch.randn(3, 2, 8, 16, device="cuda"), "output_final_state": True}
    outputs = state_layers.by_level(kernel)(query, key, value, g=g, beta=beta, **more)
    assert lengths == [[70, 70, 70]]
    torch.testing.assert_close(outputs, plain(query, key, value, g=g, beta=beta, **more), rtol=1e-4, atol=1e-4)
