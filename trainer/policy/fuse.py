"""Fuse norms, gated MLPs and rotations of a transformers model (kernels/block.py), and adapters with their layers.

    fuse(lm)             # every module that computes one of the fused operations
    join_adapters(lm)    # adapters of linear layers (kernels/lora.py), with or without fuse()
    make_exact(lm)       # after fuse() on a GPU: the in-process engine computes the same bits (kernels/exact.py)
    unfuse(lm)           # all of them; before blocks are compiled, because the compiler does the fusing

A module is recognised by its output, not by its name: on random CPU inputs it must match the operation's reference bit
for bit, in bfloat16 and in float32. A module that does not match is unchanged.
A recognised module gets a subclass of its class with a different forward: weights, names, hooks and copies stay, and
the layers inside an MLP (adapters, 4-bit layers) are called as before. Other models in the process, including the
copies of the in-process engine, are not modified.

In Llama blocks under autocast, rotations and the norms that only linear layers read return rounded outputs; otherwise
each reader would round them itself. A forward pass without dropout keeps its bits; in the backward pass, the gradients
of a norm's readers are added in bfloat16.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from kernels.block import (
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
    rotate,
    rotate_reference,
    silu_mul,
    silu_mul_reference,
)
from kernels.exact import ExactLinear, row_by_row
from kernels.lora import fits, lora_linear
from rollout.engines.forward import block_obstacle, windows_of

MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROTATION = "apply_rotary_pos_emb"  # global function that transformers' attention modules call
DTYPES = (  # (activations, weights); autocast combines bfloat16 activations with float32 weights
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


def fuse(lm: Any) -> None:
    rounded = rounded_by_readers(lm)
    for module in lm.modules():
        if (plus_one := norm_kind(module)) is not None:
            module.__class__ = norm_class(type(module), eps_of(module), plus_one, module in rounded)
        elif is_gated_norm(module):
            module.__class__ = gated_norm_class(type(module), eps_of(module))
        elif is_gated_mlp(module):
            module.__class__ = mlp_class(type(module))
        elif rotates(type(module)):
            module.__class__ = attention_class(type(module), module in rounded)


def rounded_by_readers(lm: Any) -> set[nn.Module]:
    """Return the norms in Llama blocks that feed only linear layers, and the attention modules.

    Other models may scale or normalise a rotated query before attention rounds it (Ministral 3, HunYuan).
    """
    if block_obstacle(lm) is not None:
        return set()
    layers = lm.base_model.layers
    dense = [layer for layer in layers if not hasattr(layer.mlp, "experts")]
    norms = {norm for layer in dense for norm in (layer.input_layernorm, layer.post_attention_layernorm)}
    return norms | {layer.self_attn for layer in layers}


def join_adapters(lm: nn.Module) -> None:
    for module in lm.modules():
        if is_adapter(module):
            module.__class__ = adapter_class(type(module))


def make_exact(lm: Any, device: torch.device) -> None:
    """Make each token's result independent of the batch, for a model that exact_obstacle() accepts."""
    base = lm.base_model
    for layer in base.layers:
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = ExactLinear
    if device.type != "cuda":
        for module in {*norms_of(base), *(layer.mlp.act_fn for layer in base.layers)}:
            module.__class__ = row_class(type(module))
        base.rotary_emb.__class__ = rotary_class(type(base.rotary_emb))


def exact_obstacle(lm: Any, device: torch.device) -> str | None:
    """Return why make_exact() does not support this model, or None."""
    if (obstacle := block_obstacle(lm)) is not None:
        return obstacle
    if any(hasattr(layer.mlp, "experts") for layer in lm.base_model.layers):
        return "it has experts"
    if any(window is not None for window in windows_of(lm)):
        return "it has sliding windows"
    # On a GPU only fused norms have a fixed order; activations and rotations have no sums.
    known = (
        is_fused(norm) if device.type == "cuda" else norm_kind(norm) is not None for norm in norms_of(lm.base_model)
    )
    if not all(known):
        return "its norms are not known"
    return None


def unfuse(lm: nn.Module) -> None:
    for module in lm.modules():
        if is_fused(module):
            module.__class__ = type(module)._unfused


def is_fused(module: nn.Module) -> bool:
    return hasattr(type(module), "_unfused")


# fused modules ---------------------------------------------------------------------------------------------------


@functools.cache
def norm_class(cls: type, eps: float, plus_one: bool, rounds: bool) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps, plus_one, autocast_dtype(x) if rounds else None)

    return subclass(cls, forward=forward)


@functools.cache
def gated_norm_class(cls: type, eps: float) -> type:
    def forward(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, eps)

    return subclass(cls, forward=forward)


@functools.cache
def mlp_class(cls: type) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))

    return subclass(cls, forward=forward)


@functools.cache
def attention_class(cls: type, rounds: bool) -> type:
    """Copy the class's forward with the rotation's name bound to the fused rotation."""
    old: Any = cls.forward
    names = old.__globals__ | {ROTATION: rotation(old.__globals__[ROTATION], rounds)}
    forward = types.FunctionType(old.__code__, names, old.__name__, old.__defaults__, old.__closure__)
    forward.__kwdefaults__ = old.__kwdefaults__
    return subclass(cls, forward=forward)


@functools.cache
def adapter_class(cls: type) -> type:
    """Return a LoRA layer class that rounds the sum of base and adapter once (kernels/lora.py).

    Without an adapter it gives the same bits as with B = 0. Layers that lora_linear cannot compute (FP8, several active
    adapters) are added by peft, without its casts under autocast: they go to the adapter's float32 and back.
    """

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base, names = self.base_layer, [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.merged or len(names) != 1 or not fits(base, autocast_dtype(x) or x.dtype):
            return cls.forward(self, x, *args, **kwargs)
        name = names[0]
        a, b, dropout = self.lora_A[name].weight, self.lora_B[name].weight, self.lora_dropout[name]
        if self.disable_adapters:
            return lora_linear(x, base, a, b, 0.0)
        drops = self.training and isinstance(dropout, nn.Dropout)
        return lora_linear(x, base, a, b, self.scaling[name], dropout(x) if drops else None)

    def cast(self: Any, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if x is not None and autocast_dtype(x) is not None:
            return x
        return cls._cast_input_dtype(self, x, dtype)

    return subclass(cls, forward=forward, _cast_input_dtype=cast)


def norms_of(base: Any) -> list[nn.Module]:
    """Return the norms of a model with Llama blocks."""
    names = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    found = (dict(layer.named_modules()).get(name) for layer in base.layers for name in names)
    return [base.norm, *(norm for norm in found if norm is not None)]


@functools.cache
def row_class(cls: type) -> type:
    """Return a class that applies the module to one token (or head) at a time."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return row_by_row(functools.partial(cls.forward, self), x, *self.parameters())

    return subclass(cls, forward=forward)


@functools.cache
def rotary_class(cls: type) -> type:
    """Return a class that computes the angles of one position at a time."""

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        parts = [cls.forward(self, x, position) for position in position_ids.reshape(-1, 1, 1)]  # (1, 1, K) each
        return tuple(torch.cat(part).view(*position_ids.shape, -1) for part in zip(*parts, strict=True))

    return subclass(cls, forward=forward)


def rotation(unfused: Callable[..., Any], rounds: bool) -> Callable[..., Any]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or q.dim() != 4 or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
            return unfused(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin, autocast_dtype(q) if rounds else None)

    return apply


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def subclass(cls: type, **methods: Callable[..., Any]) -> type:
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "_unfused": cls})


# recognising modules ---------------------------------------------------------------------------------------------


def eps_of(module: nn.Module) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def is_norm(module: nn.Module, *, inputs: int = 1) -> bool:
    weight = module._parameters.get("weight")
    has_scale = eps_of(module) is not None and weight is not None and weight.dim() == 1
    return has_scale and plain(module, parameters={"weight"}, inputs=inputs)


def norm_kind(module: nn.Module) -> bool | None:
    """Return rms_norm's plus_one for this module, or None if it computes something else."""
    if not is_norm(module):
        return None
    eps, weight = eps_of(module), module.weight

    def agrees(dtype: torch.dtype, weight_dtype: torch.dtype, plus_one: bool) -> bool:
        scale = torch.tensor([[eps**0.5], [1.0], [30.0]])  # eps matters in the first row
        x, other = (scale * randn(3, len(weight), seed=1)).to(dtype), randn(len(weight), seed=2).to(weight_dtype)
        probe = with_parts(module, _parameters={"weight": nn.Parameter(other)})
        return same(type(module).forward(probe, x), rms_norm_reference(x, other, eps, plus_one))

    return next((kind for kind in (False, True) if agree(functools.partial(agrees, plus_one=kind))), None)


def is_gated_norm(module: nn.Module) -> bool:
    if not is_norm(module, inputs=2):
        return False
    eps, width = eps_of(module), len(module.weight)

    def agrees(dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        scale = torch.tensor([[eps**0.5], [1.0], [30.0]])
        x, gate = ((scale * randn(3, width, seed=seed)).to(dtype) for seed in (1, 3))
        weight = randn(width, seed=2).to(weight_dtype)
        probe = with_parts(module, _parameters={"weight": nn.Parameter(weight)})
        return same(type(module).forward(probe, x, gate), gated_rms_norm_reference(x, gate, weight, eps))

    return agree(agrees)


def is_gated_mlp(module: nn.Module) -> bool:
    if not plain(module, children=MLP):
        return False

    def agrees(dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        sizes = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
        layers = {name: skip_init(nn.Linear, *size, bias=False, dtype=dtype) for name, size in sizes.items()}
        for seed, layer in enumerate(layers.values()):
            layer.weight = nn.Parameter(randn(*layer.weight.shape, seed=seed).to(dtype))
        x = randn(5, 8, seed=3).to(dtype)
        probe = with_parts(module, _modules={**layers, "act_fn": module.act_fn})
        want = layers["down_proj"](silu_mul_reference(layers["gate_proj"](x), layers["up_proj"](x)))
        return same(type(module).forward(probe, x), want)

    return agree(agrees)


@functools.cache
def rotates(cls: type) -> bool:
    """Return whether the class's forward calls ROTATION and it matches; a decorated forward is not recognised."""
    forward = getattr(cls, "forward", None)
    if not inspect.isfunction(forward) or ROTATION not in forward.__code__.co_names or hasattr(cls, "_unfused"):
        return False

    def agrees(dtype: torch.dtype, angle_dtype: torch.dtype) -> bool:
        query, key = randn(2, 3, 5, 8, seed=1).to(dtype), randn(2, 1, 5, 8, seed=2).to(dtype)
        cos, sin = (randn(2, 5, 8, seed=seed).to(angle_dtype) for seed in (3, 4))
        rotated = forward.__globals__[ROTATION](query, key, cos, sin)
        return all(map(same, rotated, rotate_reference(query, key, cos, sin)))

    return agree(agrees)


def is_adapter(module: nn.Module) -> bool:
    """Return whether this is peft's plain LoRA around a linear layer. DoRA and other variants reuse the input."""
    if not hasattr(module, "lora_A") or not hasattr(module, "_cast_input_dtype") or is_fused(module):
        return False
    has_bias = any(layer.bias is not None for layer in module.lora_B.values())
    return isinstance(module.get_base_layer(), nn.Linear) and not module.lora_variant and not has_bias


def plain(
    module: nn.Module, *, parameters: set[str] = frozenset(), children: set[str] = frozenset(), inputs: int = 1
) -> bool:
    """Return whether the module has exactly these parameters and children, and its forward takes `inputs` arguments."""
    forward = type(module).forward
    return (
        set(module._parameters) == parameters
        and set(module._modules) == children
        and not module._buffers
        and not is_fused(module)
        and len(inspect.signature(forward).parameters) == 1 + inputs
    )


@torch.no_grad()
def agree(check: Callable[[torch.dtype, torch.dtype], bool]) -> bool:
    try:
        with torch.device("cpu"):
            return all(check(*dtypes) for dtypes in DTYPES)
    except Exception:  # model code may raise any error on unexpected inputs
        return False


def with_parts(module: nn.Module, **parts: dict[str, Any]) -> nn.Module:
    """Return a copy of the module with other parts. The module's weights are not read: they may not be loaded yet."""
    probe = copy.copy(module)
    probe.__dict__.update(parts)
    return probe


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
