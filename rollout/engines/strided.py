"""Continue documents from all their anchors at once, with one cache for the whole row.

    masks = functools.partial(span_masks, model.config)          # how the model's attention takes runs of keys
    made = continue_documents(model, batch, masks, seeds=seeds, temperature=0.6)
    batch = batch.with_generated(made.ids)

One pass over the documents' own tokens fills a cache of keys and values at their places, and predicts the first token
of every sample; the samples of an anchor share that prediction. Each later token takes one pass over a single query per
sample, which writes its key and value at its place and sees what the batch says that place sees. So a token costs one
query, where running the sequence again for each would cost the whole sequence.

Row and places are those that are trained on (data.strided), hence also the log-probs: no other mask, no other order.

Shapes: A = anchors of the row, n = samples of each, G = tokens of a sample, Q = queries of a pass, T = places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.strided import StridedBatch
from kernels.attention import TILE, Spans
from rollout.engine import Sampling, check_sampling
from rollout.engines.local import PAD_ID, evaluating
from rollout.engines.sampling import sample, uniform

LOGITS = 2**26  # held at once: 256 MB in fp32


class Continued(NamedTuple):
    """What was drawn, in the order of StridedBatch.place."""

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
    """`model` is a causal LM of transformers, with adapters in its layers or without; not peft's wrapper.

    `masks(spans, num_keys)` is what the model takes as attention_mask. A seed, its anchor's document and the weights
    give the same sample whatever else is in the row, up to draws within rounding of a boundary. Temperature 0 takes the
    likeliest token, with its log-prob at temperature 1.
    """
    num_anchors, samples, length = batch.place.shape
    assert seeds.shape == (num_anchors, samples), f"seeds {tuple(seeds.shape)} vs {num_anchors, samples}"
    sampling = Sampling(temperature=temperature, max_tokens=length)
    check_sampling(sampling)
    ids = torch.zeros_like(batch.place)
    logps = torch.zeros(batch.place.shape, device=ids.device)
    if num_anchors == 0:
        return Continued(ids, logps)

    def next_token(states: Tensor, number: int) -> Tensor:  # (A * n,)
        uniforms = uniform(seeds.flatten(), number)
        token, logp = draw(model, states, uniforms, sampling)
        ids[:, :, number], logps[:, :, number] = token.view(num_anchors, samples), logp.view(num_anchors, samples)
        return token

    row = _Row(model, batch, masks)
    with evaluating(model, autocast_dtype):
        states = row.run(batch.text, batch.input_ids[0, batch.text])  # (L, D)
        first = torch.searchsorted(batch.text, batch.predictor[:, 0, 0].contiguous())  # numbers among the queries
        token = next_token(states[first], 0)
        for number in range(1, length):
            _, predictor = batch.step(number)  # where the tokens just drawn lie
            token = next_token(row.run(predictor, token), number)
    if not bool(torch.isfinite(logps).all()):
        raise ValueError(
            "logits: not finite; the model's weights have diverged, lower the learning rate or go back to an earlier "
            "checkpoint"
        )
    return Continued(ids, logps)


class _Row:
    """Passes of the model over some places of the row at a time."""

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
        """What these places see must have been run before, or be run now.

        Padding queries lie behind the row, where no other query looks, and see themselves.
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
    """What transformers asks of a cache, over a whole row: each pass writes at its own places, and gets all of them.

    Not one of transformers' own, which append or know one place per pass; and not derived from theirs, since models
    ask no more than this of a cache when positions and masks are given.
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
            # Zeros, as places not written yet are read, with weight 0. Under autocast norms and rotations may leave
            # keys in float32; attention would round them to the values' dtype in every pass.
            self.held[layer_idx] = tuple(value.new_zeros(*x.shape[:2], self.width, x.shape[3]) for x in (key, value))
        keys, values = self.held[layer_idx]
        keys.index_copy_(2, self.places, key.to(keys.dtype))
        values.index_copy_(2, self.places, value)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Only for positions and masks that are not given."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.width, 0


def _multiple(device: torch.device) -> int:
    """Of queries and keys: what the tiles of flex attention ask for, and next to nothing for any other on CUDA."""
    return TILE if device.type == "cuda" else 1


def draw(
    model: Any,
    states: Tensor,  # (S, D)
    uniforms: Tensor,  # (S * copies,) float64
    sampling: Sampling,
) -> tuple[Tensor, Tensor]:  # (S * copies,) int64 ids, (S * copies,) float32 log-probs
    """Tokens from the model's head, some states at a time; neighbouring draws share a state where there are more."""
    head, copies = model.get_output_embeddings(), len(uniforms) // len(states)
    rows = max(1, LOGITS // (head.weight.shape[0] * copies))
    made = []
    for part, numbers in zip(states.split(rows), uniforms.split(rows * copies), strict=True):
        logits = _as_the_model_does(model.config.get_text_config(), head(part))
        made.append(sample(logits.repeat_interleave(copies, dim=0), numbers, sampling))
    return torch.cat([token for token, _ in made]), torch.cat([logp for _, logp in made])


def _as_the_model_does(config: Any, logits: Tensor) -> Tensor:
    """What some architectures do behind their head; a policy that does anything else is refused as it is loaded."""
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1.0 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
