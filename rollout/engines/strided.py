"""Continue documents from all their anchors in parallel, with one KV cache for the whole packed row.

    masks = functools.partial(span_masks, model.config)          # key spans -> the model's attention_mask
    sampled = continue_documents(model, batch, masks, seeds=seeds, temperature=0.6)
    batch = batch.with_generated(sampled.ids)

One pass over the documents fills the KV cache and predicts the first token of every sample; all samples of an anchor
share this prediction. Each later token takes one pass with a single query per sample. The query writes its key and
value at its position and attends to the spans that the batch defines there. So a token costs one query, not a pass over
the whole sequence.

Row and positions are the same as in training (data.strided), so the log-probs have the same mask and order.

Shapes: A = anchors per row, n = samples per anchor, G = tokens per sample, Q = queries per pass, T = row positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.errors import UserError
from data.strided import StridedBatch
from kernels.attention import TILE, Spans
from kernels.decode.draw import draw
from rollout.engine import Sampling, check_sampling
from rollout.engines.forward import logit_options
from rollout.engines.growing import PAD_ID
from rollout.engines.local import evaluating

LOGITS = 2**26  # per head call: 256 MB in fp32


class Continued(NamedTuple):
    """Sampled tokens, in the order of StridedBatch.place."""

    ids: Tensor  # (A, n, G) int64
    logps: Tensor  # (A, n, G) float32, under the sampling distribution, including temperature


def continue_documents(
    model: Any,
    batch: StridedBatch,
    masks: Callable[[Spans, int], Any],
    *,
    seeds: Tensor,  # (A, n) int64
    temperature: float,
    autocast_dtype: torch.dtype | None = None,
) -> Continued:
    """Sample n continuations of G tokens at every anchor.

    `model` is a transformers causal LM, with or without adapters, but not a PeftModel. `masks(spans, num_keys)` returns
    its attention_mask. A sample depends on its seed, its document and the weights, but not on the rest of the row,
    except for draws within rounding error of a boundary. Temperature 0 selects the most likely token, with its log-prob
    at temperature 1.
    """
    num_anchors, samples, length = batch.place.shape
    assert seeds.shape == (num_anchors, samples), f"seeds {tuple(seeds.shape)} vs {num_anchors, samples}"
    check_sampling(Sampling(temperature=temperature, max_tokens=length))
    ids = torch.zeros_like(batch.place)
    logps = torch.zeros(batch.place.shape, device=ids.device)
    if num_anchors == 0:
        return Continued(ids, logps)

    def next_token(states: Tensor, step: int) -> Tensor:  # (A * n,)
        token, logp = draw_next(model, states, seeds.flatten(), step, temperature)
        ids[:, :, step], logps[:, :, step] = token.view(num_anchors, samples), logp.view(num_anchors, samples)
        return token

    row = _Row(model, batch, masks)
    with evaluating(model, autocast_dtype):
        states = row.run(batch.text, batch.input_ids[0, batch.text])  # (L, D)
        first = torch.searchsorted(batch.text, batch.predictor[:, 0, 0].contiguous())  # query index
        token = next_token(states[first], 0)
        for step in range(1, length):
            _, predictor = batch.step(step)  # positions of the tokens just drawn
            token = next_token(row.run(predictor, token), step)
    if not bool(torch.isfinite(logps).all()):
        raise UserError(
            "the logits are not finite because the weights have diverged; lower --learning-rate or resume from an "
            "earlier checkpoint"
        )
    return Continued(ids, logps)


class _Row:
    """Runs the model on selected positions of the row."""

    def __init__(self, model: Any, batch: StridedBatch, masks: Callable[[Spans, int], Any]) -> None:
        self.model, self.masks = model, masks
        self.position_ids = batch.position_ids[0]  # (T,)
        self.spans = tuple(x[0] for x in batch.spans)
        self.multiple = _multiple(batch.place.device)
        used = len(self.position_ids)
        self.scratch = -(-used // self.multiple) * self.multiple  # position of the first padding query
        self.cache = _RowCache(self.scratch + (self.multiple if self.multiple > 1 else 0))

    def run(
        self,
        index: Tensor,  # (Q,) int64 positions in the row
        ids: Tensor,  # (Q,) int64 tokens at these positions
    ) -> Tensor:  # (Q, D) last hidden states
        """Run these positions. All positions that they attend to must be among them or have been run before.

        Padding queries come after the row, where no other query attends, and attend to themselves.
        """
        num_queries, device = len(index), index.device
        scratch = self.scratch + torch.arange(-num_queries % self.multiple, device=device)
        zeros = torch.zeros_like(scratch)
        padding = (zeros, zeros, scratch, scratch + 1)
        spans = tuple(torch.cat([x[index], y]).unsqueeze(0) for x, y in zip(self.spans, padding, strict=True))
        self.cache.index = torch.cat([index, scratch])
        hidden = self.model.base_model(
            input_ids=torch.cat([ids, zeros + PAD_ID]).unsqueeze(0),
            attention_mask=self.masks(spans, self.cache.width),
            position_ids=torch.cat([self.position_ids[index], zeros]).unsqueeze(0),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state  # (1, Q, D)
        return hidden[0, :num_queries]


class _RowCache:
    """A transformers cache over a whole row: each pass writes at its positions and reads all positions.

    transformers' caches only append or write one position per pass. This is not a subclass: models need no more than
    this from a cache if positions and masks are passed in.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()  # windows are in the masks

    def __init__(self, width: int) -> None:
        self.width = width
        self.index: Tensor | None = None  # (Q,) int64 positions of the current pass
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # (1, H_kv, T, K) keys and values per layer

    def update(
        self,
        key: Tensor,  # (1, H_kv, Q, K)
        value: Tensor,  # (1, H_kv, Q, K)
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:  # (1, H_kv, T, K) both
        if layer_idx not in self.layers:
            # Zeros, because unwritten positions are read with weight 0. In the values' dtype: under autocast, norms and
            # rotations may leave keys in float32, which attention would round in every pass.
            self.layers[layer_idx] = tuple(value.new_zeros(*x.shape[:2], self.width, x.shape[3]) for x in (key, value))
        keys, values = self.layers[layer_idx]
        keys.index_copy_(2, self.index, key.to(keys.dtype))
        values.index_copy_(2, self.index, value)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused, because positions and masks are passed in."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.width, 0


def _multiple(device: torch.device) -> int:
    """Return the multiple to pad queries and keys to: flex attention needs full tiles on CUDA."""
    return TILE if device.type == "cuda" else 1


def draw_next(
    model: Any,
    states: Tensor,  # (S, D)
    seeds: Tensor,  # (S * copies,) int64
    step: int,  # token index in its sample
    temperature: float,
) -> tuple[Tensor, Tensor]:  # (S * copies,) int64 ids, (S * copies,) float32 log-probs
    """Sample from the model's head, a few states at a time. Consecutive seeds share a state if there are more seeds."""
    head, copies = model.get_output_embeddings(), len(seeds) // len(states)
    scale, softcap = logit_options(model.config.get_text_config())
    size = max(1, LOGITS // (head.weight.shape[0] * copies))
    steps = torch.full_like(seeds, step, dtype=torch.int32)
    heat = torch.full(seeds.shape, temperature, device=seeds.device)
    draws = []
    for chunk, *args in zip(states.split(size), *(x.split(size * copies) for x in (seeds, steps, heat)), strict=True):
        draws.append(draw(head(chunk).repeat_interleave(copies, dim=0), *args, scale=scale, softcap=softcap))
    return torch.cat([token for token, _ in draws]), torch.cat([logp for _, logp in draws])
