"""Packed rows for models with layers that carry state from token to token: linear attention, Mamba, convolutions.

    carried_state(config, model_class)      # "linear_attention", "conv", ...; None: the model can share prompts
    separate_convolutions(lm)               # once, after loading
    lm.base_model(..., **boundaries(batch, masks))

transformers passes the boundaries of sequences to these layers: `cu_seq_lens_q` to flash-linear-attention, `seq_idx` to
mamba-ssm and causal-conv1d. Without these packages transformers (from 5.20) raises an error, or ignores the boundaries,
which check_logps() detects. Convolutions work without a package, because their state spans only a few tokens; on a GPU
flash-linear-attention's kernel is used if it is installed, because torch's depthwise convolution is slow.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from data.packing import Batch, to_device

STATEFUL = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba"}  # layer_types of recurrent models
CONVOLUTION = "causal_conv1d_fn"  # global function that transformers' layers call


def carried_state(config: Any, model_class: Any) -> str | None:
    """Return the kind of layers that carry state from one token to the next, or None."""
    layer_types = getattr(config.get_text_config(), "layer_types", None)
    kinds = sorted(STATEFUL.intersection(layer_types or ()))
    if kinds or layer_types is not None:
        return kinds[0] if kinds else None
    return "recurrent" if getattr(model_class, "_is_stateful", False) else None


def boundaries(batch: Batch, masks: Any) -> dict[str, Any]:
    """Return the model's arguments for one row of packed sequences. `masks`: for its attention layers."""
    assert len(batch.used) == 1 and batch.num_computed == batch.num_tokens, "one row without shared prompts"
    length, device = batch.input_ids.shape[1], batch.input_ids.device
    ends = list(itertools.accumulate(batch.lengths, initial=0))
    if ends[-1] < length:
        ends.append(length)  # padding is a sequence of its own
    if not isinstance(masks, dict):
        masks = {"full_attention": masks, "sliding_attention": masks}
    is_start = batch.own_start == torch.arange(length, device=device)
    return {
        "attention_mask": {**masks, **dict.fromkeys(STATEFUL)},
        "position_ids": batch.position_ids,
        "cu_seq_lens_q": to_device(torch.tensor(ends), device),  # (sequences + 1,)
        "seq_idx": is_start.cumsum(dim=1, dtype=torch.int32) - 1,  # (1, T)
    }


def separate_convolutions(lm: nn.Module) -> None:
    """Make the model's convolutions stop at boundaries, in the transformers file that defines its layers."""
    if find_spec("causal_conv1d") is not None:  # its kernel stops at boundaries
        return
    for name in {type(module).__module__ for module in lm.modules()}:
        code = vars(sys.modules[name])
        if CONVOLUTION in code and not hasattr(code[CONVOLUTION], "joined"):
            code[CONVOLUTION] = separated(code[CONVOLUTION])


def separated(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the convolution with an argument seq_idx, as in causal-conv1d."""
    kernel = None
    if find_spec("fla"):  # as its other functions, not traced by the compiler
        kernel = torch.compiler.disable(import_module("fla.modules.causal_conv1d").causal_conv1d)

    @functools.wraps(convolution)
    def convolve(
        x: Tensor,  # (1, C, T)
        weight: Tensor,  # (C, K)
        *args: Any,
        seq_idx: Tensor | None = None,  # (1, T) int32, from 0
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # (1, C, T)
        if x.is_cuda and kernel is not None and (seq_idx is None) == (cu_seq_lens_q is None):
            return kernel(x.mT, weight, *args, cu_seqlens=cu_seq_lens_q, **kwargs)[0].mT
        if seq_idx is None:
            return convolution(x, weight, *args, **kwargs)
        num_gaps = int(seq_idx[0, -1]) if cu_seq_lens_q is None else len(cu_seq_lens_q) - 2
        gap = weight.shape[-1] - 1  # zeros between sequences, so that no output covers two of them
        place = torch.arange(x.shape[-1], device=x.device) + gap * seq_idx[0]
        apart = x.new_zeros(*x.shape[:-1], x.shape[-1] + gap * num_gaps).index_copy(2, place, x)
        return convolution(apart, weight, *args, **kwargs)[:, :, place]

    convolve.joined = convolution  # type: ignore[attr-defined]
    return convolve
