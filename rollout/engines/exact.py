"""Forward pass of the in-process engine for --exact-sampling: log-probs with the same bits as the trainer's.

    forward = ExactForward(lm, dtype, autocast_dtype=...)    # lm: made exact by trainer/policy/fuse.py

The engine runs the trainer's own modules, whose kernels do not depend on the batch (kernels/exact.py). Only attention
differs, because keys are in pages. Weights in another dtype are cast once per update, not once per token.
Log-probs are computed from the last hidden states after a window of decode steps, by the trainer's own function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.attention import Rows
from kernels.exact import ExactLinear, attend_in_order, with_casts
from kernels.linear_logprob import Impl, linear_logprob
from rollout.engines.forward import Cache, PrefillBatch, TransformersForward, float32_product


def head_impl(device: torch.device) -> Impl:
    """Return the implementation of the head whose log-probs do not depend on the batch."""
    return "triton" if device.type == "cuda" else "rows"


class ExactForward(TransformersForward):
    hidden: Tensor  # (B, D) last hidden states of the last decode step, as the head takes them

    def __init__(self, lm: Any, dtype: torch.dtype, *, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__(lm, dtype, autocast_dtype=autocast_dtype)
        head = lm.get_output_embeddings()
        layers = [module for module in lm.modules() if isinstance(module, ExactLinear)]
        assert layers, "the model is not exact: call make_exact()"
        is_cast = head.weight.dtype != dtype
        self._casts = {x: torch.empty_like(x.weight, dtype=dtype) for x in (*layers, head) if is_cast}
        self.head = self._casts.get(head, head.weight).detach()
        self.width = head.weight.shape[1]

    @torch.no_grad()
    def refresh(self) -> bool:
        for module, cast in self._casts.items():
            cast.copy_(module.weight)
        return super().refresh()

    def decode(
        self,
        token: Tensor,  # (B,) int64
        position: Tensor,  # (B,) int32
        slot: Tensor,  # (B,) int64
        rows: Rows,
        cache: Cache,
    ) -> Tensor:  # (B, V)
        own_start = -(-rows.prefix_len // cache.page) * cache.page  # own tokens start on a new page
        zero = torch.zeros_like(own_start)
        spans = tuple(x[:, None] for x in (zero, rows.prefix_len, own_start, own_start + rows.own_len))

        def attend(layer: int, query: Tensor, *, scale: float, **_: Any) -> Tensor:  # (B, 1, H, K)
            keys, values = cache.keys[layer], cache.values[layer]
            out = attend_in_order(query, keys, values, spans, scale=scale, table=rows.table, page=cache.page)
            return out.transpose(1, 2)

        hidden = self._run(token[:, None], position[:, None], slot, cache, attend, ())[:, 0]
        self.hidden = hidden.to(self.shape.dtype)
        return float32_product(self.hidden, self.head)

    def prefill(self, batch: PrefillBatch, cache: Cache) -> Tensor:
        zero = torch.zeros_like(batch.position)
        spans = (zero, zero, zero, batch.position + 1)

        def attend(layer: int, query: Tensor, *, scale: float, **_: Any) -> Tensor:  # (R, T, H, K)
            keys, values = cache.keys[layer], cache.values[layer]
            return attend_in_order(query, keys, values, spans, scale=scale, table=batch.index).transpose(1, 2)

        return self._run(batch.ids, batch.position, batch.slot.flatten(), cache, attend, ())

    def logps(
        self,
        hidden: Tensor,  # (N, D) `self.hidden` of some steps
        ids: Tensor,  # (N,) int64
        temperature: float,  # 0 counts as 1
    ) -> Tensor:  # (N,) float32
        """Return the log-probs of sampled ids."""
        options = {"scale": self.scale, "temperature": temperature or 1.0, "impl": head_impl(hidden.device)}
        return linear_logprob(hidden, self.head, ids, ignore_index=None, **options).logp

    def _call(self, *args: Any) -> Tensor:
        with with_casts(self._casts):
            return super()._call(*args)
