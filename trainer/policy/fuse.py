"""Fused operations (kernels/block.py) in the norms, gated MLPs and rotations of a transformers model, and no needless
casts in its adapters.

    fuse(lm)          # every module that computes what one of them does
    unfuse(lm)        # before its blocks are compiled: the compiler fuses by itself

A module is recognised by what it computes, not by its name: on random numbers on the CPU it must give the same bits as
the operation's reference, in bfloat16 and in float32. One that does not (Gemma's norm multiplies by 1 + weight) stays
as it is. A recognised module gets a subclass of its class with another forward: weights, their names, hooks and copies
stay, and what is inside an MLP (adapters, 4-bit layers) is called as before. Other models of the process, among them
the copies of the in-process engine, are not touched.
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

from kernels.block import rms_norm, rms_norm_reference, rotate, rotate_reference, silu_mul, silu_mul_reference

MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROTATION = "apply_rotary_pos_emb"  # of transformers: a global name that attention modules call
DTYPES = (  # of activations and weights: float32 weights meet bfloat16 activations under autocast
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


def fuse(lm: nn.Module) -> None:
    for module in lm.modules():
        if is_norm(module):
            module.__class__ = norm_class(type(module), eps_of(module))
        elif is_gated_mlp(module):
            module.__class__ = mlp_class(type(module))
        elif rotates(type(module)):
            module.__class__ = attention_class(type(module))
        elif is_adapter(module):
            module.__class__ = adapter_class(type(module))


def unfuse(lm: nn.Module) -> None:
    for module in lm.modules():
        if is_fused(module):
            module.__class__ = type(module)._unfused


def is_fused(module: nn.Module) -> bool:
    return hasattr(type(module), "_unfused")


# modules with another forward ------------------------------------------------------------------------------------


@functools.cache
def norm_class(cls: type, eps: float) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps)

    return subclass(cls, forward=forward)


@functools.cache
def mlp_class(cls: type) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))

    return subclass(cls, forward=forward)


@functools.cache
def attention_class(cls: type) -> type:
    """The class's own forward, for which the name of the rotation stands for ours."""
    own: Any = cls.forward
    names = own.__globals__ | {ROTATION: rotation(own.__globals__[ROTATION])}
    forward = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return subclass(cls, forward=forward)


@functools.cache
def adapter_class(cls: type) -> type:
    """A LoRA layer that leaves its input to autocast.

    peft casts it to the float32 of the adapter, and autocast back to what it was before both products: two passes over
    the activations that change nothing, and two more over their gradients.
    """

    def cast(self: Any, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if x is not None and torch.is_autocast_enabled(x.device.type):
            return x
        return cls._cast_input_dtype(self, x, dtype)

    return subclass(cls, _cast_input_dtype=cast)


def rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or q.dim() != 4 or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
            return own(q, k, cos, sin, *more, **options)
        return rotate(q, k, cos, sin)

    return apply


def subclass(cls: type, **methods: Callable[..., Any]) -> type:
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "_unfused": cls})


# what a module computes ------------------------------------------------------------------------------------------


def eps_of(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def is_norm(module: nn.Module) -> bool:
    eps, weight = eps_of(module), module._parameters.get("weight")
    if eps is None or weight is None or weight.dim() != 1 or not plain(module, parameters={"weight"}):
        return False

    def agrees(dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        scale = torch.tensor([[eps**0.5], [1.0], [30.0]])  # eps counts in the first row
        x, other = (scale * numbers(3, len(weight), seed=1)).to(dtype), numbers(len(weight), seed=2).to(weight_dtype)
        probe = with_parts(module, _parameters={"weight": nn.Parameter(other)})
        return same(type(module).forward(probe, x), rms_norm_reference(x, other, eps))

    return agree(agrees)


def is_gated_mlp(module: nn.Module) -> bool:
    if not plain(module, children=MLP):
        return False

    def agrees(dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        sizes = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
        layers = {name: skip_init(nn.Linear, *size, bias=False, dtype=dtype) for name, size in sizes.items()}
        for seed, layer in enumerate(layers.values()):
            layer.weight = nn.Parameter(numbers(*layer.weight.shape, seed=seed).to(dtype))
        x = numbers(5, 8, seed=3).to(dtype)
        probe = with_parts(module, _modules={**layers, "act_fn": module.act_fn})
        want = layers["down_proj"](silu_mul_reference(layers["gate_proj"](x), layers["up_proj"](x)))
        return same(type(module).forward(probe, x), want)

    return agree(agrees)


@functools.cache
def rotates(cls: type) -> bool:
    """Whether its forward calls a rotation by that name, and it is ours. One behind a decorator is not seen."""
    forward = getattr(cls, "forward", None)
    if not inspect.isfunction(forward) or ROTATION not in forward.__code__.co_names or hasattr(cls, "_unfused"):
        return False

    def agrees(dtype: torch.dtype, angle_dtype: torch.dtype) -> bool:
        query, key = numbers(2, 3, 5, 8, seed=1).to(dtype), numbers(2, 1, 5, 8, seed=2).to(dtype)
        cos, sin = (numbers(2, 5, 8, seed=seed).to(angle_dtype) for seed in (3, 4))
        given = forward.__globals__[ROTATION](query, key, cos, sin)
        return all(map(same, given, rotate_reference(query, key, cos, sin)))

    return agree(agrees)


def is_adapter(module: nn.Module) -> bool:
    """Whether it is a LoRA layer of peft around a linear one. DoRA and other variants use the input for more."""
    if not hasattr(module, "lora_A") or not hasattr(module, "_cast_input_dtype") or is_fused(module):
        return False
    return isinstance(module.get_base_layer(), nn.Linear) and not module.lora_variant


def plain(module: nn.Module, *, parameters: set[str] = frozenset(), children: set[str] = frozenset()) -> bool:
    """Whether it has these parts and no others, and its forward takes one argument."""
    forward = type(module).forward
    return (
        set(module._parameters) == parameters
        and set(module._modules) == children
        and not module._buffers
        and not is_fused(module)
        and len(inspect.signature(forward).parameters) == 2
    )


@torch.no_grad()
def agree(check: Callable[[torch.dtype, torch.dtype], bool]) -> bool:
    try:
        with torch.device("cpu"):
            return all(check(*dtypes) for dtypes in DTYPES)
    except Exception:  # a model's own code may raise anything for inputs that it was not made for
        return False


def with_parts(module: nn.Module, **parts: dict[str, Any]) -> nn.Module:
    """The module with other parts; it stays as it is, and its weights are not read: they may not be there yet."""
    probe = copy.copy(module)
    probe.__dict__.update(parts)
    return probe


def numbers(*shape: int, seed: int) -> Tensor:  # of that shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
