"""Continue documents from all their anchors at once, with one KV cache for the whole row.

    masks = functools.partial(span_masks, model.config)          # spans of keys -> the model's attention_mask
    made = continue_documents(model, batch, masks, seeds=seeds, temperature=0.6)
    batch = batch.with_generated(made.ids)

One pass over the documents' tokens fills the KV cache at their places and predicts the first token of every sample;
the samples of an anchor share that prediction. Each later token takes one pass with a single query per sample, which
writes its key and value at its place and attends to what the batch defines for that place. So a token costs one query,
not a pass over the whole sequence.

Row and places are those of training (data.strided), so the log-probs have the same mask and order as in training.

Shapes: A = anchors of the row, n = samples of each, G = tokens of a sample, Q = queries of a pass, T = places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.errors import UserError
from data.strided import StridedBatch
from kernels.attention import TILE, Spans
from kernels.draw import draw
from rollout.engine import Sampling, check_sampling
from rollout.engines.forward import logit_options
from rollout.engines.local import PAD_ID, evaluating

LOGITS = 2**26  # computed at once: 256 MB in fp32


class Continued(NamedTuple):
    """The sampled tokens, in the order of StridedBatch.place."""

    ids: Tensor  # (A, n, G) int64
    logps: Tensor  # (A, n, G) float32, of the distribution each was drawn from (temperature included)


def continue_documents(
    model: Any,
    batch: StridedBatch,
    masks: Callable[[Spans, int], Any],
    *,
    seeds: Tensor,  # (A, n) int64
    temperature: float,
    autocast_dtype: torch.dtype | None = None,
) -> Continued:
    """`model`: a transformers causal LM, with or without adapters in its layers; not peft's wrapper.

    `masks(spans, num_keys)` returns the model's attention_mask. The sample depends on the seed, its anchor's document
    and the weights, not on the rest of the row, except for draws within rounding of a boundary. Temperature 0 takes
    the most likely token, with its log-prob at temperature 1.
    """
    num_anchors, samples, length = batch.place.shape
    assert seeds.shape == (num_anchors, samples), f"seeds {tuple(seeds.shape)} vs {num_anchors, samples}"
    check_sampling(Sampling(temperature=temperature, max_tokens=length))
    ids = torch.zeros_like(batch.place)
    logps = torch.zeros(batch.place.shape, device=ids.device)
    if num_anchors == 0:
        return Continued(ids, logps)

    def next_token(states: Tensor, number: int) -> Tensor:  # (A * n,)
        token, logp = draw_next(model, states, seeds.flatten(), number, temperature)
        ids[:, :, number], logps[:, :, number] = token.view(num_anchors, samples), logp.view(num_anchors, samples)
        return token

    row = _Row(model, batch, masks)
    with evaluating(model, autocast_dtype):
        states = row.run(batch.text, batch.input_ids[0, batch.text])  # (L, D)
        first = torch.searchsorted(batch.text, batch.predictor[:, 0, 0].contiguous())  # index among the queries
        token = next_token(states[first], 0)
        for number in range(1, length):
            _, predictor = batch.step(number)  # places of the tokens just drawn
            token = next_token(row.run(predictor, token), number)
    if not bool(torch.isfinite(logps).all()):
        raise UserError(
            "logits: not finite; the model's weights have diverged, lower the learning rate or go back to an earlier "
            "checkpoint"
        )
    return Continued(ids, logps)


class _Row:
    """Runs the model on some places of the row at a time."""

    def __init__(self, model: Any, batch: StridedBatch, masks: Callable[[Spans, int], Any]) -> None:
        self.model, self.masks = model, masks
        self.position_ids = batch.position_ids[0]  # (T,)
        self.spans = Spans(*(x[0] for x in (batch.prefix_start, batch.prefix_stop, batch.own_start, batch.own_stop)))
        self.multiple = _multiple(batch.place.device)
        used = len(self.position_ids)
        self.scratch = -(-used // self.multiple) * self.multiple  # place of the first padding query
        self.cache = _RowCache(self.scratch + (self.multiple if self.multiple > 1 else 0))

    def run(
        self,
        places: Tensor,  # (Q,) int64
        ids: Tensor,  # (Q,) int64 the tokens there
    ) -> Tensor:  # (Q, D) last hidden states
        """Everything that these places attend to must have been run before, or be among them.

        Padding queries are placed behind the row, where no other query attends, and attend to themselves.
        """
        num_queries, device = len(places), places.device
        scratch = self.scratch + torch.arange(-num_queries % self.multiple, device=device)
        nothing = torch.zeros_like(scratch)
        behind = Spans(nothing, nothing, scratch, scratch + 1)
        spans = Spans(*(torch.cat([x[places], y]).unsqueeze(0) for x, y in zip(self.spans, behind, strict=True)))
        self.cache.places = torch.cat([places, scratch])
        hidden = self.model.base_model(
            input_ids=torch.cat([ids, nothing + PAD_ID]).unsqueeze(0),
            attention_mask=self.masks(spans, self.cache.width),
            position_ids=torch.cat([self.position_ids[places], nothing]).unsqueeze(0),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state  # (1, Q, D)
        return hidden[0, :num_queries]


class _RowCache:
    """A transformers cache over a whole row: each pass writes at its own places and reads all of them.

    transformers' own caches append, or write one place per pass. Not derived from theirs: models need no more than this
    from a cache when positions and masks are given.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()  # windows are in the masks

    def __init__(self, width: int) -> None:
        self.width = width
        self.places: Tensor | None = None  # (Q,) int64 of the pass that is running
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # (1, H_kv, T, K) keys and values of each layer

    def update(
        self,
        key: Tensor,  # (1, H_kv, Q, K)
        value: Tensor,  # (1, H_kv, Q, K)
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:  # (1, H_kv, T, K) both
        if layer_idx not in self.held:
            # Zeros, because places not written yet are read with weight 0. Under autocast, norms and rotations may
            # leave keys in float32; attention would round them to the values' dtype in every pass.
            self.held[layer_idx] = tuple(value.new_zeros(*x.shape[:2], self.width, x.shape[3]) for x in (key, value))
        keys, values = self.held[layer_idx]
        keys.index_copy_(2, self.places, key.to(keys.dtype))
        values.index_copy_(2, self.places, value)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Used only when positions and masks are not given."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.width, 0


def _multiple(device: torch.device) -> int:
    """Queries and keys are padded to this multiple, which the tiles of flex attention need on CUDA."""
    return TILE if device.type == "cuda" else 1


def draw_next(
    model: Any,
    states: Tensor,  # (S, D)
    seeds: Tensor,  # (S * copies,) int64
    number: int,  # of the token in its sample
    temperature: float,
) -> tuple[Tensor, Tensor]:  # (S * copies,) int64 ids, (S * copies,) float32 log-probs
    """Sample from the model's head, some states at a time; with more seeds than states, neighbours share a state."""
    head, copies = model.get_output_embeddings(), len(seeds) // len(states)
    scale, softcap = logit_options(model.config.get_text_config())
    rows = max(1, LOGITS // (head.weight.shape[0] * copies))
    numbers = torch.full_like(seeds, number, dtype=torch.int32)
    heat = torch.full(seeds.shape, temperature, device=seeds.device)
    made = []
    for part, *own in zip(states.split(rows), *(x.split(rows * copies) for x in (seeds, numbers, heat)), strict=True):
        made.append(draw(head(part).repeat_interleave(copies, dim=0), *own, scale=scale, softcap=softcap))
    return torch.cat([token for token, _ in made]), torch.cat([logp for _, logp in made])
