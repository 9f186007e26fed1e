"""Measure how much of a LoRA adapter's effect the in-process engine keeps.

    share = adapter_share(model, forward, ids)
    share.retained, share.error

A sampler that merges adapters into bfloat16 weights loses changes below half a unit in the last place of a weight,
while the trainer keeps them. Over the log-probs of all tokens at a few positions,

    d = with the adapter - without it,    retained = <d_sampler, d_exact> / <d_exact, d_exact>

where the sampler is the engine's forward pass, on weights refreshed with and without the adapter, and exact is the
trainer's model in float32. All V log-probs of a position are compared, not only the sampled token's, because bfloat16
activations add noise that V numbers average out.

Shapes: R rows, T positions per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from kernels.nf4 import Linear4bit
from rollout.engines.forward import Cache, Forward, PrefillBatch

SMALL = 1e-4  # standard deviation of B in small_adapter(); a merge into bfloat16 keeps little of it
LOW = 0.9  # a lower share means that the engine samples from another policy
CHUNK = 2**26  # elements of a weight in float32 at a time: 256 MB
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.addmm, F.layer_norm}  # no mixed dtypes


class AdapterShare(NamedTuple):
    retained: float
    error: float  # standard error of `retained`, from its spread over positions


@torch.no_grad()
def adapter_share(
    model: Any,  # PeftModel in evaluation mode
    forward: Forward,
    ids: Tensor,  # (R, T)
) -> AdapterShare | None:
    """Return the share, or None if the adapter has no effect yet."""
    try:
        with model.disable_adapter():
            forward.refresh()
            sampler, exact = sampler_logps(forward, ids), exact_logps(model, ids)
    finally:
        forward.refresh()
    sampler, exact = sampler_logps(forward, ids) - sampler, exact_logps(model, ids) - exact
    kept, full = ((x * exact).sum(dim=2, dtype=torch.float64).flatten() for x in (sampler, exact))  # (R * T,) each
    if not full.sum() > 0:
        return None
    retained = kept.sum() / full.sum()
    return AdapterShare(retained.item(), ((kept - retained * full).norm() / full.sum()).item())


@contextmanager
def small_adapter(model: Any) -> Iterator[None]:
    """Context manager: replace every B, which is 0 before training, by small random values."""
    weights = [parameter.data for name, parameter in model.named_parameters() if ".lora_B." in name]
    before = [weight.clone() for weight in weights]
    generator = torch.Generator().manual_seed(0)
    try:
        for weight in weights:
            weight.copy_(SMALL * torch.randn(weight.shape, generator=generator))
        yield
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)


def sampler_logps(
    forward: Forward,
    ids: Tensor,  # (R, T)
) -> Tensor:  # (R, T, V)
    """Log-probs of the next token at each position, by the engine's forward pass with a small cache."""
    rows, length = ids.shape
    cache = Cache(forward.shape, rows + 1, length, states=forward.states)  # one page per row, after the scratch page
    slot = torch.arange(length, (rows + 1) * length, device=ids.device).view(rows, length)
    position = (slot % length).int()
    logits = forward.logits(forward.prefill(PrefillBatch(ids, position, slot, slot, fresh=True), cache))
    logits = logits.view(rows, length, -1).float() * forward.scale
    if forward.softcap is not None:
        logits = forward.softcap * torch.tanh(logits / forward.softcap)
    return logits.log_softmax(dim=-1)


def exact_logps(
    model: Any,
    ids: Tensor,  # (R, T)
) -> Tensor:  # (R, T, V)
    """The same log-probs by the trainer's model, in float32."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, "eager"  # has sinks and softcap
    packed = [(module, module.dtype) for module in model.modules() if isinstance(module, Linear4bit)]
    try:
        for module, _ in packed:
            module.dtype = torch.float32
        # With --compile, the mode and the dtype would compile every block again.
        with torch.compiler.set_stance("force_eager"), torch.autocast(ids.device.type, enabled=False), Float32():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        config._attn_implementation = before
        for module, dtype in packed:
            module.dtype = dtype
    return logits.float().log_softmax(dim=-1)


class Float32(TorchFunctionMode):
    """Run a model in float32, whatever the dtype of its weights.

    Embeddings return float32, and matrix products convert their weight, one piece at a time: a float32 copy of a large
    model may not fit. Elementwise operations on float32 activations promote their weights themselves.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return func(*args, **kwargs).float()
        if func is F.linear:
            x, weight, bias = (*args, *kwargs.values(), None)[:3]
            pieces = weight.split(max(1, CHUNK // weight.shape[1]))
            out = torch.cat([F.linear(x.float(), piece.float()) for piece in pieces], dim=-1)
            return out if bias is None else out + bias
        if func in PRODUCTS:
            return func(*tree_map(widened, args), **tree_map(widened, kwargs))
        return func(*args, **kwargs)


def widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x
