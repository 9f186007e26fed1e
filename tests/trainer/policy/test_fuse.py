"""Fused operations in tiny transformers models; on a CPU their references must not change a bit of a gradient."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from data.packing import Item, make_batches
from kernels.fp8 import Linear8
from rollout.engines.forward import Copies, unchanged
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy import fuse as fuse_module
from trainer.policy.fuse import fuse, is_fused, join_adapters, unfuse
from trainer.policy.load import compile_blocks, load_policy, quantize_layers
from trainer.policy.logps import causal_lm, reference_logps, token_logps

CPU = torch.device("cpu")
SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, initializer_range=0.2,
)  # fmt: skip
NORMS, MLP, ATTENTION = {"input_layernorm", "post_attention_layernorm", "norm"}, "mlp", "self_attn"
LIKE_LLAMA = {*NORMS, MLP, ATTENTION}
# Config changes, and the modules that are fused (last component of their names).
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, LIKE_LLAMA),
    "qwen2": ({}, LIKE_LLAMA),
    "mistral": ({}, LIKE_LLAMA),
    "granite": ({}, LIKE_LLAMA),
    "qwen3": ({"head_dim": 10}, LIKE_LLAMA | {"q_norm", "k_norm"}),
    "gemma": ({"head_dim": 8}, {*NORMS, ATTENTION}),  # norms multiply by 1 + weight; the activation is not SiLU
    "gemma3_text": (
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
        {*NORMS, ATTENTION, "q_norm", "k_norm", "pre_feedforward_layernorm", "post_feedforward_layernorm"},
    ),
    "qwen3_5_text": (
        {
            "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        },  # fmt: skip
        LIKE_LLAMA | {"q_norm", "k_norm"},
    ),
    "olmo2": ({}, {MLP}),  # norms and rotations round only once
    "cohere": ({}, {MLP}),  # layer norms; rotates adjacent pairs, not halves
    "phi3": ({}, {*NORMS, ATTENTION}),  # one projection for gate and up
    "hunyuan_v1_dense": ({"head_dim": 8}, LIKE_LLAMA | {"query_layernorm", "key_layernorm"}),  # norms of rotated heads
}  # fmt: skip


def make(kind: str, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **MODELS[kind][0]))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() == 1:  # norm weights, initialised to 1
                parameter.add_(0.3 * torch.randn_like(parameter))
    return lm


def fused(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_fused(module)]


def step(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, under autocast if a dtype is given."""
    ids = torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(got[0], want[0]) and got[1].keys() == want[1].keys() and len(want[1]) > 0
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name


def distance(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    norm = sum(x.square().sum() for x in exact.values())
    return float((sum((x - exact[name]).square().sum() for name, x in gradients.items()) / norm).sqrt())


@pytest.mark.parametrize("kind", MODELS)
def test_fusing_changes_no_bit_of_the_loss_or_float32_gradients(kind):
    lm = make(kind)
    names = list(lm.state_dict())
    addresses = {name: x.data_ptr() for name, x in lm.state_dict().items()}
    want = {dtype: step(lm, dtype) for dtype in (None, torch.bfloat16)}
    random_state = torch.get_rng_state()
    fuse(lm)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name.rpartition(".")[2] for name in fused(lm)} == MODELS[kind][1]
    assert list(lm.state_dict()) == names and {name: x.data_ptr() for name, x in lm.state_dict().items()} == addresses
    assert_same(step(lm), want[None])
    autocast = step(lm, torch.bfloat16)
    assert torch.equal(autocast[0], want[torch.bfloat16][0])
    got, old = (distance(result[1], want[None][1]) for result in (autocast, want[torch.bfloat16]))
    assert got < 1.1 * old, "gradients that are added in bfloat16 are about as exact"
    rounded = step(make(kind).bfloat16())
    lm = make(kind).bfloat16()
    fuse(lm)
    assert_same(step(lm), rounded)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_fused_operations_are_called_in_every_layer(kind, monkeypatch):
    """In each of the two blocks, and for the final norm."""
    called: list[str] = []
    for name in ("rms_norm", "rotate", "silu_mul"):
        plain = getattr(fuse_module, name)
        monkeypatch.setattr(fuse_module, name, lambda *x, plain=plain, name=name: called.append(name) or plain(*x))
    lm = make(kind)
    fuse(lm)
    step(lm)
    heads = ["rms_norm"] * 2 * (kind == "qwen3")
    assert called == ["rms_norm", *heads, "rotate", "rms_norm", "silu_mul"] * 2 + ["rms_norm"]


def test_gated_norms_are_fused():
    lm = make("qwen3_5_text")
    fuse(lm)
    assert "model.layers.0.linear_attn.norm" in fused(lm)


def test_with_gradient_checkpointing():
    lm = make("qwen3")
    want = step(lm)
    fuse(lm)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    assert_same(step(lm), want)


@contextmanager
def casts() -> Iterator[list[torch.dtype]]:
    """Record the dtypes that activations are cast to."""
    dtypes: list[torch.dtype] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator is torch.ops.aten._to_copy.default and args[0].dim() == 3:
                dtypes.append((kwargs or {}).get("dtype"))
            return operator(*args, **(kwargs or {}))

    with Watch():
        yield dtypes


@pytest.mark.parametrize(("kind", "num"), [("llama", (16, 10)), ("gemma", (16, 16))])  # 5 casts per block, or 2 + 3
def test_norms_round_once_for_all_their_readers(kind, num):
    counts = []
    for function in (lambda lm: None, fuse):
        lm = make(kind)
        function(lm)
        with casts() as dtypes:
            step(lm, torch.bfloat16)
        counts.append(dtypes.count(torch.bfloat16))
    assert tuple(counts) == num


def with_adapters(lm: Any, *, in_4bit: bool) -> Any:
    """Add float32 adapters to attention and MLP, around frozen plain or 4-bit layers."""
    if in_4bit:
        with torch.no_grad():
            quantize_layers(lm, CPU)
    model = get_peft_model(lm, PeftLora(r=3, target_modules=["q_proj", "gate_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def assert_near(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]], limit: float) -> None:
    assert got[1].keys() == want[1].keys() and (got[0] - want[0]).abs() < limit * want[0].abs()
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).norm() < limit * gradient.norm(), name


@pytest.mark.parametrize("in_4bit", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])  # qwen2 has biases
def test_joined_adapters_compute_what_peft_computes(kind, in_4bit):
    model = with_adapters(make(kind), in_4bit=in_4bit)
    names, want = list(model.state_dict()), step(model)
    ids = torch.tensor([[1, 2, 3]])
    join_adapters(causal_lm(model))
    assert len(fused(model)) == 2 * 3 and list(model.state_dict()) == names
    assert_near(step(model), want, 1e-5)
    fuse(causal_lm(model))
    assert_near(step(model), want, 1e-5)
    with model.disable_adapter():  # the reference of a LoRA run
        bare = model(input_ids=ids).logits
    for name, parameter in model.named_parameters():
        parameter.data *= "lora_B" not in name
    assert torch.equal(model(input_ids=ids).logits, bare)
    unfuse(model)
    assert fused(model) == [] and (model(input_ids=ids).logits - bare).abs().max() < 1e-5


@pytest.mark.parametrize("in_4bit", [False, True])
def test_joined_adapters_of_a_bfloat16_base_do_not_cast_their_input(in_4bit):
    model = with_adapters(make("qwen3").bfloat16(), in_4bit=in_4bit)
    with casts() as before:
        rounded = step(model, torch.bfloat16)
    join_adapters(causal_lm(model))
    with casts() as after:
        got = step(model, torch.bfloat16)
    assert_near(got, rounded, 0.2)
    # Inputs of six adapters to float32 and back, and five gradients: the first input needs no gradient.
    assert len(before) - len(after) >= 6 * 2 + 5 * 2
    ids = torch.tensor([[1, 2, 3]])
    logits = model(input_ids=ids).logits  # without autocast, x and W are bfloat16 and the adapter float32
    unfuse(model)
    assert (logits - model(input_ids=ids).logits).abs().max() < 0.1


def test_a_small_adapter_survives_rounding_to_bfloat16():
    """peft keeps less than half of it. Outputs equal those of the sampler, which also rounds the sum once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
    model = get_peft_model(model, PeftLora(r=16, lora_alpha=32, target_modules=["0"])).requires_grad_(False)
    layer, x, shares, equal = model.base_model.model[0], torch.randn(1024, 256).bfloat16(), [], []
    a, b = (factor["default"].weight for factor in (layer.lora_A, layer.lora_B))
    nn.init.normal_(b, std=1e-4)
    exact = 2 * x.double() @ a.double().T @ b.double().T
    copies = Copies(torch.bfloat16, CPU, unchanged)
    sampler = copies.linear(layer)
    copies.refresh()
    for install in (lambda lm: None, join_adapters):
        install(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            with model.disable_adapter():
                change = y.double() - layer(x).double()
        shares.append(float((change * exact).sum() / exact.square().sum()))
        equal.append(float((sampler(x) == y).float().mean()))
    assert shares[0] < 0.5 and 0.99 < shares[1] < 1.01, shares
    assert equal[0] < 0.9 and equal[1] > 0.998, equal  # the sampler does not round the adapter's output


def test_other_adapters_are_left_to_peft():
    """DoRA and FP8; layers with several active adapters; dropout is computed."""
    lm = make("llama").requires_grad_(False)
    model = get_peft_model(lm, PeftLora(target_modules=["q_proj"], use_dora=True))
    join_adapters(model)
    assert fused(model) == []
    model = with_adapters(make("llama"), in_4bit=False)
    model.add_adapter("second", PeftLora(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    want = step(model)
    join_adapters(model)
    assert_near(step(model), want, 1e-5)
    Linear8.of(model.base_model.model.model.layers[0].mlp.down_proj.base_layer)
    got = step(model)
    unfuse(model)
    assert_near(got, step(model), 1e-5)


def test_models_without_weights_are_fused():
    """With several ranks, models are built without weights and filled after sharding."""
    with torch.device("meta"):
        lm = make("qwen3")
    fuse(lm)
    assert len(fused(lm)) == 2 * 6 + 1
    assert all(parameter.is_meta for parameter in lm.parameters())


def test_other_models_and_copies_are_independent():
    lm, other = make("qwen3"), make("qwen3", seed=1)
    fuse(lm)
    assert fused(other) == [] and fused(type(lm)(lm.config)) == []
    copied = copy.deepcopy(lm)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    want = step(lm)
    before = step(copied)
    assert fused(copied) == fused(lm) and not torch.equal(before[0], want[0])
    unfuse(copied)
    assert_same(step(copied), before)
    assert fused(copied) == [] and len(fused(lm)) == 2 * 6 + 1
    fuse(lm)  # no effect the second time
    assert_same(step(lm), want)


def test_fused_model_is_freed_without_garbage_collection():
    """Its weights take most of the GPU."""
    lm = make("qwen3")
    fuse(lm)
    refs = [weakref.ref(module) for module in lm.modules() if is_fused(module)]
    gc.collect()
    gc.disable()
    try:
        del lm
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


class WithGate(nn.Module):
    """Llama's norm with an optional second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x if gate is None else x * gate


class Scaled(WithGate):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Failing(WithGate):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("any error")


@pytest.mark.parametrize("kind", [WithGate, Scaled, Failing, lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 8)])
def test_other_modules_are_not_fused(kind):
    lm = make("cohere")
    lm.other = kind()
    fuse(lm)
    assert not any(name.startswith("other") for name in fused(lm))


# ---- loading a policy ----


def test_nothing_is_fused_on_a_cpu():
    policy = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=True)
    assert fused(policy.model) == fused(policy.reference) == []


def test_compiling_blocks_unfuses_the_model(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    lm = make("qwen3")
    fuse(lm)
    compile_blocks(lm, "test")
    assert fused(lm) == []


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Record the bytes that autograd saves, keyed by address."""
    alive: list[Tensor] = []  # keeps addresses unique
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        alive.append(x)
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield sizes


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "limit"), [({"dtype": "float32"}, 1e-3), ({"trained_dtype": "bfloat16"}, 0.1)], ids=["fp32", "bf16"]
)
def test_on_a_gpu_uncompiled_models_are_fused(settings, limit):
    """The policy (with gradients) and its reference (without) agree bit for bit."""
    device = torch.device("cuda")
    cfg = ModelConfig(model="builtin:tiny", **settings)
    policy = load_policy(cfg, LoraConfig(), device, with_reference=True)
    for model in (policy.model, policy.reference):
        assert LIKE_LLAMA <= {name.rpartition(".")[2] for name in fused(model)}
    items = [Item(list(range(1, n)), [False] + [True] * (n - 2)) for n in (40, 77, 5)]
    (batch,) = make_batches(items, max_tokens=256, multiple=policy.row_multiple)
    batch = batch.to(device)
    with saved_bytes() as saved_fused:
        logp = token_logps(policy, batch).logp
    assert torch.equal(logp.detach(), reference_logps(policy, batch))
    names = [name for name, _ in policy.model.named_parameters()]
    got = torch.autograd.grad(logp.sum(), list(policy.model.parameters()))
    unfuse(policy.model)
    with saved_bytes() as saved_unfused:
        plain = token_logps(policy, batch).logp
    assert sum(saved_fused.values()) < sum(saved_unfused.values())  # trainer/plan.py counts the latter
    assert (logp - plain).abs().mean() < limit
    for name, x, y in zip(names, got, torch.autograd.grad(plain.sum(), list(policy.model.parameters())), strict=True):
        assert (x - y).float().norm() <= 2 * limit * y.float().norm() + 1e-6, name


@pytest.mark.gpu
def test_on_a_gpu_compiled_models_are_not_fused():
    cfg = ModelConfig(model="builtin:tiny", compile=True)
    policy = load_policy(cfg, LoraConfig(), torch.device("cuda"), with_reference=True)
    assert fused(policy.model) == fused(policy.reference) == []
