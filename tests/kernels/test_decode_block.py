"""Block operations for decoding: references against float64 loops and transformers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.decode import block as decode_block
from tests.kernels.decode_problems import error

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}  # the interpreter rounds towards zero


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Heads(NamedTuple):
    """Inputs of rotate_append."""

    qkv: Tensor  # (N, (H + 2 H_kv) K)
    cos: Tensor  # (T, K)
    sin: Tensor  # (T, K)
    position: Tensor  # (N,)
    place: Tensor  # (N,)
    keys: Tensor  # (H_kv, S, K)
    values: Tensor  # (H_kv, S, K)
    options: dict[str, Any]

    def run(self, function) -> dict[str, Tensor]:
        keys, values = self.keys.clone(), self.values.clone()
        return {"query": function(*self[:5], keys, values, **self.options), "keys": keys, "values": values}

    def to(self, device: str) -> Heads:
        options = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in self.options.items()}
        return Heads(*(x.to(device) for x in self[:7]), options)


def make_heads(
    num_tokens: int,
    heads: tuple[int, int, int],
    *,
    norm: bool = True,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Heads:
    """Build a case with positions and slots in random order; the second token is padding."""
    num_heads, key_heads, head_dim = heads
    wide = torch.promote_types(dtype, torch.float32)
    angle = torch.arange(50)[:, None] * 10.0 ** -torch.linspace(0, 3, head_dim // 2)  # (T, K / 2)
    cos, sin = (x.repeat(1, 2).to(wide) for x in (angle.cos(), angle.sin()))
    place = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(1))[:num_tokens]
    place[1:2] = -1
    position = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    cache = draw(2, key_heads, 2 * num_tokens, head_dim, seed=3, dtype=cache_dtype or dtype)
    weights = 1 + 0.2 * draw(2, head_dim, seed=4, dtype=wide)
    options = {"num_heads": num_heads, "eps": 1e-5, "q_weight": None, "k_weight": None}
    if norm:
        options |= {"q_weight": weights[0], "k_weight": weights[1]}
    qkv = draw(num_tokens, (num_heads + 2 * key_heads) * head_dim, dtype=dtype)
    return Heads(qkv, cos, sin, position, place, cache[0], cache[1], options)


def naive_heads(case: Heads) -> dict[str, Tensor]:
    """Compute token by token and head by head, in float64."""
    key_heads, _, size = case.keys.shape
    num_heads = case.options["num_heads"]
    query = torch.zeros(len(case.qkv), num_heads, size, dtype=torch.float64)
    keys, values = case.keys.double(), case.values.double()
    for n in range(len(case.qkv)):
        at, cos, sin = int(case.place[n]), *(x[int(case.position[n])].double() for x in (case.cos, case.sin))
        for h in range(num_heads + 2 * key_heads):
            x = case.qkv[n, h * size : (h + 1) * size].double()
            if h >= num_heads + key_heads:
                if at >= 0:
                    values[h - num_heads - key_heads, at] = x
                continue
            weight = case.options["q_weight" if h < num_heads else "k_weight"]
            if weight is not None:
                x = x / math.sqrt((x @ x).item() / size + case.options["eps"]) * weight.double()
            turned = x.clone()
            for i in range(size):
                partner = -x[i + size // 2] if i < size // 2 else x[i - size // 2]
                turned[i] = x[i] * cos[i] + partner * sin[i]
            if h < num_heads:
                query[n, h] = turned
            elif at >= 0:
                keys[h - num_heads, at] = turned
    return {"query": query, "keys": keys, "values": values}


def split(x: Tensor) -> Tensor:  # (3, N, D) float32
    """Return parts of x. Their sum is exact in any order, because x has no more bits than bfloat16."""
    whole = draw(*x.shape, seed=6).round()
    return torch.stack([x.float() - whole, whole, torch.zeros_like(whole)])


def check_parts_of_heads(function, case: Heads) -> None:
    case = case._replace(qkv=case.qkv.to(torch.bfloat16).to(case.keys.dtype))
    want = case.run(function)
    for name, got in case._replace(qkv=split(case.qkv)).run(function).items():
        assert torch.equal(got, want[name]), name


def check_heads(function, case: Heads) -> None:
    got, want = case.run(function), naive_heads(case)
    for name, exact in want.items():
        assert got[name].dtype == case.keys.dtype
        assert error(got[name], exact) < LIMITS[case.keys.dtype], name
    written = case.place[case.place >= 0]
    other = torch.ones(case.keys.shape[1], dtype=torch.bool)
    other[written] = False
    assert torch.equal(got["keys"][:, other], case.keys[:, other])
    assert torch.equal(got["values"][:, other], case.values[:, other])
    if case.qkv.dtype == case.keys.dtype:
        check_parts_of_heads(function, case)


def check_norm_of_parts(function, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    weight, stream = 1 + 0.2 * draw(width, seed=1, dtype=wide), draw(num_tokens, width, seed=2, dtype=wide)
    delta = draw(num_tokens, width, seed=3, dtype=torch.bfloat16)
    ours, theirs = stream.clone(), stream.clone()
    got = function(ours, split(delta), weight, 1e-6, dtype)
    assert torch.equal(got, function(theirs, delta.to(dtype), weight, 1e-6, dtype)) and torch.equal(ours, theirs)
    for num_parts in (1, 4):
        parts = draw(num_parts, num_tokens, width + 3, seed=4, dtype=wide)[..., :width]
        total = torch.zeros_like(stream)
        function(total, parts, weight, 1e-6, dtype)
        assert torch.equal(total.to(dtype).to(wide), total), "the sum of the parts is rounded"
        assert error(total, parts.double().sum(0)) < LIMITS[dtype]


def check_norm(function, num_tokens: int, width: int, dtype: torch.dtype, stream_dtype=torch.float32) -> None:
    weight = 1 + 0.2 * draw(width, seed=1, dtype=stream_dtype)
    stream = 30 * draw(num_tokens, width, seed=2, dtype=stream_dtype)
    for delta in (draw(num_tokens, width + 3, seed=3, dtype=dtype)[:, :width], None):
        total = stream.double() + (0 if delta is None else delta.double())
        exact = total / (total.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight.double()
        held = stream.clone()
        got = function(held, delta, weight, 1e-6, dtype)
        assert got.dtype == dtype and got.shape == (num_tokens, width)
        assert error(got, exact) < LIMITS[dtype] and error(held, total) < LIMITS[stream_dtype]
    check_norm_of_parts(function, num_tokens, width, dtype)


def check_silu(function, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (20 * draw(num_tokens, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    got = function(gate_up)
    assert got.dtype == dtype and error(got, gate / (1 + (-gate).exp()) * up) < LIMITS[dtype]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", LIMITS)
def test_reference_rotates_and_appends(dtype, norm):
    check_heads(decode_block.rotate_append_reference, make_heads(7, (6, 2, 10), norm=norm, dtype=dtype))


@pytest.mark.parametrize("dtype", LIMITS)
def test_references_norm_and_activation(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    check_norm(decode_block.add_rms_norm_reference, 5, 37, dtype, stream_dtype=wide)
    check_silu(decode_block.silu_mul_reference, 5, 37, dtype)


def test_public_functions_run_on_a_cpu():
    case = make_heads(5, (4, 2, 16))
    want = case.run(decode_block.rotate_append_reference)
    assert all(torch.equal(x, want[name]) for name, x in case.run(decode_block.rotate_append).items())
    check_norm(decode_block.add_rms_norm, 3, 20, torch.bfloat16)
    check_silu(decode_block.silu_mul, 3, 20, torch.bfloat16)


def test_rounding_matches_transformers_under_autocast():
    """bfloat16 projections, float32 norm weights, stream, cos and sin."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    case = make_heads(6, (4, 2, 16), dtype=torch.bfloat16)
    got = case.run(decode_block.rotate_append)
    heads = case.qkv.view(1, 6, 8, 16).transpose(1, 2)  # (1, H + 2 H_kv, N, K)
    norms = []
    for name in ("q_weight", "k_weight"):
        norm = Qwen3RMSNorm(16, eps=case.options["eps"])
        norm.weight.data = case.options[name]
        norms.append(norm)
    cos, sin = (x[case.position.long()].unsqueeze(0) for x in (case.cos, case.sin))
    query, key = apply_rotary_pos_emb(norms[0](heads[:, :4]), norms[1](heads[:, 4:6]), cos, sin)
    assert query.dtype == torch.float32
    assert torch.equal(got["query"], query[0].transpose(0, 1).to(torch.bfloat16))
    real = case.place >= 0
    assert torch.equal(got["keys"][:, case.place[real]], key[0, :, real].to(torch.bfloat16))
    stream = draw(6, 16, seed=5)
    want = norms[0](stream + case.qkv[:, :16]).to(torch.bfloat16)
    weight = case.options["q_weight"]
    got = decode_block.add_rms_norm(stream, case.qkv[:, :16], weight, case.options["eps"], torch.bfloat16)
    assert torch.equal(got, want.detach())
