"""Packed rows for models with layers that carry state from token to token: linear attention, Mamba, convolutions.

    carried_state(config, model_class)      # "linear_attention", "conv", ...; None: no layer carries state
    can_share = prepare_layers(lm)          # once, after loading; whether sequences can share a prompt
    lm.base_model(..., **boundaries(batch, masks))

transformers passes the boundaries of sequences to these layers: `cu_seq_lens_q` to flash-linear-attention, `seq_idx` to
mamba-ssm and causal-conv1d. Without these packages transformers (from 5.20) raises an error, or ignores the boundaries,
which check_logps() detects. Convolutions work without a package, because their state spans only a few tokens; on a GPU
flash-linear-attention's kernel is used if it is installed, because torch's depthwise convolution is slow.

If sequences share tokens, a row is a tree of pieces, each of which follows another piece or none. Convolutions get the
last tokens before each piece again. The gated delta rule runs once per level of the tree: its kernel returns the state
after each piece, which the next level begins with, and the gradient flows back through it. mamba-ssm does not return
the states of packed sequences with a gradient, so its models do not share.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from data.packing import Batch, to_device
from kernels.tuning import limit_configurations, tune_in_parallel

STATEFUL = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba"}  # layer_types of recurrent models
CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # functions that transformers' layers call
SLOW_TO_TUNE = (  # files of flash-linear-attention
    "modules.causal_conv1d.ops",
    "ops.common.chunk_o",
    "ops.common.chunk_delta_h",
    "ops.gated_delta_rule.wy_fast",
)
BRANCHING = {"conv": CONVOLUTION, "linear_attention": DELTA_RULE}  # layers whose sequences can share tokens


def carried_state(config: Any, model_class: Any) -> str | None:
    """Return the kind of layers that carry state from one token to the next, or None."""
    layer_types = getattr(config.get_text_config(), "layer_types", None)
    kinds = sorted(STATEFUL.intersection(layer_types or ()))
    if kinds or layer_types is not None:
        return kinds[0] if kinds else None
    return "recurrent" if getattr(model_class, "_is_stateful", False) else None


def boundaries(batch: Batch, masks: Any) -> dict[str, Any]:
    """Return the model's arguments for one row of packed sequences. `masks`: for its attention layers."""
    assert len(batch.used) == 1, "one row"
    length, device = batch.input_ids.shape[1], batch.input_ids.device
    runs = batch.runs if batch.used[0] == length else [*batch.runs, (batch.used[0], -1)]  # padding is a run of its own
    tree = Tree(runs, length, device)
    starts = np.array(sorted(tree.before))
    arguments = packed_arguments(np.diff(starts, append=length), device)
    if any(column >= 0 for column in tree.before.values()):
        for tensor in arguments.values():  # transformers passes the tensors on, not other arguments
            tensor.tree = tree  # type: ignore[attr-defined]
    if not isinstance(masks, dict):
        masks = {"full_attention": masks, "sliding_attention": masks}
    return {"attention_mask": {**masks, **dict.fromkeys(STATEFUL)}, "position_ids": batch.position_ids, **arguments}


def packed_arguments(lengths: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Return the boundaries of adjacent sequences: (sequences + 1,) and (1, T)."""
    ends, index = np.cumsum([0, *lengths]), np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return {
        "cu_seq_lens_q": to_device(torch.from_numpy(ends), device),
        "seq_idx": to_device(torch.from_numpy(index)[None], device),
    }


class Level(NamedTuple):
    """Pieces at one depth of a tree."""

    num_tokens: int
    ends: Tensor  # (pieces + 1,) int64
    parents: Tensor | None  # (pieces,) int64 indices into the pieces of all levels before; None in the first level


class Context(NamedTuple):
    """A row's pieces, each after the last tokens before it; int64."""

    columns: Tensor  # (T',) of the row
    places: Tensor  # (T,) of the row's columns in `columns`
    repeats: Tensor  # (T' - T,) places of the tokens before pieces
    repeated: Tensor  # (T' - T,) their columns


class Tree:
    """Pieces of one row's sequences. A piece ends where another run continues from it."""

    def __init__(self, runs: Sequence[tuple[int, int]], length: int, device: torch.device) -> None:
        self.before = dict(runs)  # first column of each piece -> column of the token that it follows, or -1
        for column in [*self.before.values()]:
            self.before.setdefault(column + 1, column)
        self.stops = dict(itertools.pairwise([*sorted(self.before), length]))
        self.first = {stop: start for start, stop in self.stops.items()}
        self.device, self.contexts = device, {}  # of with_context, by size

    @functools.cached_property
    def levels(self) -> list[Level]:
        levels, number = [], {start: i for i, start in enumerate(self._depth)}
        for _, group in itertools.groupby(self._depth, key=lambda start: self._depth[start]):
            starts = list(group)
            ends = np.cumsum([0, *(self.stops[start] - start for start in starts)])
            parents = [number[self.first[self.before[start] + 1]] for start in starts if self.before[start] >= 0]
            levels.append(
                Level(int(ends[-1]), self._tensor(ends), self._tensor(np.array(parents)) if parents else None)
            )
        return levels

    @functools.cached_property
    def by_level(self) -> tuple[Tensor, Tensor]:
        """Return the columns in the order of the levels, and the inverse permutation: (T,) int64 each."""
        columns = np.concatenate([np.arange(start, self.stops[start]) for start in self._depth])
        return self._tensor(columns), self._tensor(columns.argsort())

    @functools.cached_property
    def _depth(self) -> dict[int, int]:
        """The depth of each piece, by its first column, in the order of the levels."""
        depth: dict[int, int] = {}
        for start, column in sorted(self.before.items()):
            depth[start] = 0 if column < 0 else depth[self.first[column + 1]] + 1
        return dict(sorted(depth.items(), key=lambda item: item[1]))

    def with_context(self, size: int) -> tuple[Context, dict[str, Tensor]]:
        """Return all pieces, each after up to `size` columns before it, and their boundaries."""
        if size not in self.contexts:
            self.contexts[size] = self._with_context(size)
        return self.contexts[size]

    def _with_context(self, size: int) -> tuple[Context, dict[str, Tensor]]:
        columns, places, lengths, total = [], [], [], 0
        for start in sorted(self.before):
            before = [*itertools.islice(self._back(self.before[start]), size)][::-1]
            piece = np.arange(start, self.stops[start])
            places.append(total + len(before) + np.arange(len(piece)))
            lengths.append(len(before) + len(piece))
            total += lengths[-1]
            columns += [np.array(before, dtype=np.int64), piece]
        order, own = np.concatenate(columns), np.concatenate(places)
        repeats = np.delete(np.arange(total), own)
        context = Context(*(self._tensor(x) for x in (order, own, repeats, order[repeats])))
        return context, packed_arguments(np.array(lengths), self.device)

    def _back(self, column: int) -> Iterator[int]:
        """Yield the column and those of all tokens before it in its sequence, last first."""
        while column >= 0:
            start = self.first[column + 1]
            yield from range(column, start - 1, -1)
            column = self.before[start]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), self.device)


def prepare_layers(lm: nn.Module) -> bool:
    """Make the model's layers stop at boundaries and follow trees, in the transformers file that defines them.

    Return whether all of its layers that carry state follow trees.
    """
    wrappers, found = {CONVOLUTION: separated, DELTA_RULE: by_level}, set()
    for name in {type(module).__module__ for module in lm.modules()}:
        code = vars(sys.modules[name])
        for function in wrappers.keys() & code.keys():
            found.add(function)
            if not hasattr(plain := code[function], "plain"):
                code[function] = wrappers[function](plain)
                code[function].plain = plain
    kinds = STATEFUL.intersection(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    return bool(kinds) and all(BRANCHING.get(kind) in found for kind in kinds)


def has(package: str) -> bool:
    """Return whether it is installed. A mere folder of that name in the working directory has no origin."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def separated(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the convolution with arguments seq_idx, as in causal-conv1d, and cu_seq_lens_q, which may have a tree."""
    has_boundaries, kernel = has("causal_conv1d"), None
    if has("fla"):
        tune_quickly()
        kernel = None if has_boundaries else import_module("fla.modules.causal_conv1d").causal_conv1d

    @torch.compiler.disable
    @functools.wraps(convolution)
    def convolve(
        x: Tensor,  # (1, C, T)
        weight: Tensor,  # (C, K)
        *args: Any,
        seq_idx: Tensor | None = None,  # (1, T) int32, from 0
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # (1, C, T)
        tree, gap = getattr(seq_idx, "tree", None), weight.shape[-1] - 1
        if tree is not None:
            context, arguments = tree.with_context(gap)
            arguments = {"seq_idx": arguments["seq_idx"]} if cu_seq_lens_q is None else arguments
            x = _WithContext.apply(x.mT, context).mT
            return _Chosen.apply(convolve(x, weight, *args, **arguments, **kwargs).mT, context.places).mT
        if x.is_cuda and kernel is not None and (seq_idx is None) == (cu_seq_lens_q is None):
            return kernel(x.mT, weight, *args, cu_seqlens=cu_seq_lens_q, **kwargs)[0].mT
        if seq_idx is None or has_boundaries:
            return convolution(x, weight, *args, seq_idx=seq_idx, **kwargs)
        num_gaps = int(seq_idx[0, -1]) if cu_seq_lens_q is None else len(cu_seq_lens_q) - 2
        # Zeros between sequences, so that no output covers two of them.
        place = torch.arange(x.shape[-1], device=x.device) + gap * seq_idx[0]
        apart = x.new_zeros(*x.shape[:-1], x.shape[-1] + gap * num_gaps).index_copy(2, place, x)
        return _Chosen.apply(convolution(apart, weight, *args, **kwargs).mT, place).mT

    return convolve


def tune_quickly() -> None:
    """Shorten the tuning of flash-linear-attention's kernels.

    Otherwise its norms are tuned again whenever the heads in a row pass another multiple of 65,536, and its sums for
    every number of rows, which stalls training for seconds. Of the other kernels only configurations with 4 warps and
    up to 3 stages are tried: on an H200 one of them was within 5 % of the best, and 2 warps take longest to compile.
    """
    from triton import Config

    norms, sums = import_module("fla.modules.norm.l2norm"), import_module("fla.ops.utils.cumsum")
    for kernel in (norms.l2norm_fwd_kernel, norms.l2norm_bwd_kernel):
        kernel.configs = [Config({"BT": 16}, num_warps=4)]
    sums.chunk_local_cumsum_scalar_kernel.fn.configs = [Config({}, num_warps=2)]
    for name in SLOW_TO_TUNE:
        limit_configurations(import_module(f"fla.{name}"), num_warps=4, most_stages=3)
    tune_in_parallel()


def by_level(rule: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Return the gated delta rule for a cu_seqlens that may have a tree. Other rows run as one packed row.

    flash-linear-attention would compile kernels again, for seconds, for every number of rows.
    """
    has_kernels = has("fla")

    @torch.compiler.disable
    @functools.wraps(rule)
    def run(
        query: Tensor,  # (R, T, H, K)
        key: Tensor,  # (R, T, H, K)
        value: Tensor,  # (R, T, H, V)
        g: Tensor,  # (R, T, H)
        beta: Tensor,  # (R, T, H)
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        tree, shape = getattr(cu_seqlens, "tree", None), value.shape
        if cu_seqlens is None and has_kernels and query.is_cuda:
            cu_seqlens = equal_rows(*query.shape[:2], query.device)
            query, key, value, g, beta = (x.flatten(0, 1)[None] for x in (query, key, value, g, beta))
        if tree is None:
            output, states = rule(query, key, value, g=g, beta=beta, cu_seqlens=cu_seqlens, **kwargs)
            return output.reshape(shape), states
        columns, places = tree.by_level
        parts = [_Chosen.apply(x, columns) for x in (query, key, value, g, beta)]
        parts = [x.split([level.num_tokens for level in tree.levels], dim=1) for x in parts]
        outputs, states = [], None  # (pieces, H, K, V)
        for level, *own in zip(tree.levels, *parts, strict=True):
            begin = None if level.parents is None else states[level.parents]
            more = kwargs | {"initial_state": begin, "output_final_state": True, "seq_idx": None}
            output, ended = rule(*own[:3], g=own[3], beta=own[4], cu_seqlens=level.ends, **more)
            states = ended if states is None else torch.cat([states, ended])
            outputs.append(output)
        return _Chosen.apply(torch.cat(outputs, dim=1), places), None

    return run


@functools.lru_cache(maxsize=16)  # the package keeps what it computes from a tensor, if it is the same object
def equal_rows(num_rows: int, length: int, device: torch.device) -> Tensor:  # (R + 1,) int64
    return torch.arange(0, (num_rows + 1) * length, length, device=device)


# The gradients of indexing in autograd sort the indices or add atomically, which can take longer than the layers.
class _WithContext(torch.autograd.Function):
    """x.index_select(1, context.columns); only the few repeated tokens need a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:  # (1, T, C) -> (1, T', C)
        ctx.context = context
        return x.index_select(1, context.columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        context = ctx.context
        own = grad.index_select(1, context.places)
        own[0].index_put_((context.repeated,), grad[0].index_select(0, context.repeats), accumulate=True)
        return own, None


class _Chosen(torch.autograd.Function):
    """x.index_select(1, places) for different places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.places, ctx.length = places, x.shape[1]
        return x.index_select(1, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(grad.shape[0], ctx.length, *grad.shape[2:]).index_copy_(1, ctx.places, grad), None
