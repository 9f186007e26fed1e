"""Lay out documents and the continuations sampled from their anchors in one row, with attention spans.

    plan = StridedPlan(stride=3, context_length=4, generate_max_len=2, n_samples_per_prompt=1)
    batch, *_ = make_strided([Document(ids)], plan, max_tokens=4096)      # 12 ids: anchors at 4, 7 and 10
    ids = ...                                                            # (A, n, G) sampled step by step, batch.step(s)
    batch = batch.with_generated(ids)                                    # one pass now trains everything

An anchor at token c of its document has the c tokens before it as context, and n continuations of G tokens each. Its
target is the next G tokens of the document, so c + G never exceeds the document's length. Documents too short for an
anchor are still trained by cross-entropy. In a conversation, an anchor requires a target written entirely by the
assistant: other roles' text is neither continued nor used as a target.

A document and its continuations share one row, ordered by anchor, sample and token:

    column     0 .. 11   12 13   14 15   16 17        a document of 12 tokens, and one sample of 2 per anchor
    position   0 .. 11    4  5    7  8   10 11        as in a separate sequence that continues the document
    prefix        -       0..3    0..6    0..9        document columns it attends to, plus its sample's earlier tokens
    predictor     -       3 12    6 14    9 16        the column whose state predicts it

Attention treats this row like any packed row, with two runs per column (kernels.attention.Spans).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from data.errors import UserError
from data.packing import to_device


@dataclass(frozen=True)
class Document:
    """One text without padding. Anchors come after its prompt, if it has one."""

    ids: list[int]
    prompt_length: int = 0  # number of leading ids that are context only: no anchors, no cross-entropy
    mask: list[bool] | None = None  # True = trained (cross-entropy, anchors); None: everything after the prompt
    source: str = ""  # file and line, for messages
    weight: float = 1.0  # number of times per epoch

    def __post_init__(self) -> None:
        assert 0 <= self.prompt_length <= len(self.ids), (self.prompt_length, len(self.ids))
        assert self.mask is None or len(self.mask) == len(self.ids), (len(self.mask or ()), len(self.ids))

    def trained(self) -> list[int]:
        """Return the positions that cross-entropy covers; never the first, which nothing predicts."""
        if self.mask is None:
            return list(range(max(1, self.prompt_length), len(self.ids)))
        return [position for position, chosen in enumerate(self.mask) if chosen and position > 0]


@dataclass(frozen=True, kw_only=True)
class StridedPlan:
    """Anchor positions and samples per anchor."""

    stride: int  # tokens from one anchor to the next
    context_length: int  # tokens before the first anchor; an anchor's context is the whole document before it
    generate_max_len: int  # tokens per continuation; the end-of-text token does not end it
    n_samples_per_prompt: int  # continuations per anchor
    min_completion_prefix: int = 0  # tokens between a prompt and the first anchor; no effect without a prompt

    def __post_init__(self) -> None:
        for field in fields(self):
            minimum = 0 if field.name == "min_completion_prefix" else 1
            if getattr(self, field.name) < minimum:
                raise UserError(f"{field.name}={getattr(self, field.name)}: must be {minimum} or more")

    def anchors(self, document: Document) -> list[int]:
        """Return the number of document tokens before each anchor. Empty if the document is too short."""
        mask, length = document.mask, self.generate_max_len
        return [i for i in self.unmasked_anchors(document) if mask is None or all(mask[i : i + length])]

    def unmasked_anchors(self, document: Document) -> range:
        """Return the anchors that the document would have without a mask."""
        earliest = document.prompt_length + self.min_completion_prefix if document.prompt_length else 0
        return range(max(self.context_length, earliest), len(document.ids) - self.generate_max_len + 1, self.stride)

    def size(self, document: Document) -> int:
        """Return the number of tokens of the document and its continuations."""
        return len(document.ids) + len(self.anchors(document)) * self.n_samples_per_prompt * self.generate_max_len


def require_anchors(documents: Sequence[Document], plan: StridedPlan) -> None:
    """Raise if no document has an anchor; some documents may be too short for one."""
    if any(plan.anchors(document) for document in documents):
        return
    if any(plan.unmasked_anchors(document) for document in documents):
        raise UserError(
            f"generate_max_len={plan.generate_max_len}: none of the {len(documents)} documents has this many trained "
            f"tokens in a row after an anchor (every stride={plan.stride} tokens); lower --generate-max-len or --stride"
        )
    longest = max((len(document.ids) for document in documents), default=0)
    prefix = plan.min_completion_prefix
    needed = f"min_completion_prefix + generate_max_len = {prefix + plan.generate_max_len}" if prefix else ""
    raise UserError(
        f"documents={len(documents)}: none has context_length + generate_max_len = "
        f"{plan.context_length + plan.generate_max_len} tokens, and {needed or 'generate_max_len'} tokens after its "
        f"prompt (longest: {longest}); use longer documents or lower these settings"
    )


@dataclass(frozen=True, kw_only=True)
class StridedBatch:
    """One row of T columns with whole documents and all their continuations, padded at the end.

    Shapes: A anchors in all documents, n samples per anchor, G tokens per sample. A place is a column of the row.
    All tensors are in row order: documents, anchors, samples, tokens.
    """

    input_ids: Tensor  # (1, T) int64; generated tokens are pad_id until with_generated
    position_ids: Tensor  # (1, T) int64
    prefix_start: Tensor  # (1, T) int64 a place attends to [prefix_start, prefix_stop) and [own_start, own_stop)
    prefix_stop: Tensor  # (1, T) int64
    own_start: Tensor  # (1, T) int64
    own_stop: Tensor  # (1, T) int64
    place: Tensor  # (A, n, G) int64 place of each generated token
    predictor: Tensor  # (A, n, G) int64 place whose state predicts it; the samples of an anchor share the first
    target_place: Tensor  # (A, G) int64 places of each anchor's target
    anchor: Tensor  # (A,) int64 number of document tokens before the anchor
    document: Tensor  # (A,) int64 index of the anchor's document in make_strided's documents
    text: Tensor  # (L,) int64 places of the document tokens, for the pass before generation
    ce_index: Tensor  # (M,) int64 place whose state predicts each cross-entropy target
    ce_target: Tensor  # (M,) int64 tokens trained by cross-entropy
    rows: list[int]  # indices of this batch's documents in make_strided's documents, in order
    num_computed: int  # number of tokens, including generated tokens

    @property
    def spans(self) -> tuple[Tensor, ...]:
        return self.prefix_start, self.prefix_stop, self.own_start, self.own_stop

    def step(self, index: int) -> tuple[Tensor, Tensor]:  # both (A * n,)
        """Return the places of token `index` of every sample, and the places whose states predict these tokens.

        The row's attention spans apply unchanged: no token attends to a token that has not been generated yet.
        """
        length = self.place.shape[2]
        if not 0 <= index < length:
            raise UserError(f"step={index}: must be between 0 and {length - 1}")
        return self.place[:, :, index].flatten(), self.predictor[:, :, index].flatten()

    def with_generated(
        self,
        ids: Tensor,  # (A, n, G) int64
    ) -> StridedBatch:
        """Return a copy with these generated tokens."""
        assert ids.shape == self.place.shape, f"ids {tuple(ids.shape)} vs {tuple(self.place.shape)}"
        input_ids = self.input_ids.clone()
        input_ids[0, self.place.flatten()] = ids.flatten()
        return replace(self, input_ids=input_ids)

    def per_token(
        self,
        value: Tensor,  # (A, n) one per continuation, such as an advantage
    ) -> Tensor:  # (A, n, G)
        """Broadcast to every token of a continuation."""
        assert value.shape == self.place.shape[:2], f"value {tuple(value.shape)} vs {tuple(self.place.shape)}"
        return value.unsqueeze(2).expand(self.place.shape)

    def to(self, device: torch.device | str) -> StridedBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: to_device(tensor, device) for name, tensor in tensors.items()})


def make_strided(
    documents: Sequence[Document],
    plan: StridedPlan,
    *,
    max_tokens: int,
    pad_id: int = 0,
    multiple: int = 1,
) -> list[StridedBatch]:
    """Pack documents in order, as many per row as fit max_tokens; a larger document gets its own row.

    Row lengths are padded to a multiple of `multiple`, which attention kernels require.
    """
    assert min(max_tokens, multiple) >= 1, (max_tokens, multiple)
    groups: list[list[int]] = []
    room = 0
    for index, document in enumerate(documents):
        assert document.ids, f"document {index} is empty"
        size = plan.size(document)
        if not groups or size > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(index)
        room -= size
    return [_build(documents, group, plan, pad_id, multiple) for group in groups]


def empty_strided(plan: StridedPlan, *, multiple: int) -> StridedBatch:
    """Return a row without documents: a forward pass for a rank without data."""
    (row,) = make_strided([Document([0])], plan, max_tokens=1, multiple=multiple)
    return replace(row, rows=[], num_computed=0)


def _build(
    documents: Sequence[Document], rows: list[int], plan: StridedPlan, pad_id: int, multiple: int
) -> StridedBatch:
    used = sum(plan.size(documents[row]) for row in rows)
    width = -(-used // multiple) * multiple
    input_ids = torch.full((width,), pad_id)
    position_ids, prefix_start, prefix_stop, own_start = (torch.zeros(width, dtype=torch.int64) for _ in range(4))
    own_start[used:] = used  # padding attends to padding
    samples, length = plan.n_samples_per_prompt, plan.generate_max_len
    parts: dict[str, list[Tensor]] = {
        name: [] for name in ("place", "predictor", "target_place", "anchor", "document", "text", "ce_index",
                              "ce_target")
    }  # fmt: skip
    first = 0
    for row in rows:
        ids = torch.tensor(documents[row].ids)
        stop = first + len(ids)
        text = torch.arange(first, stop)
        input_ids[text], position_ids[text], own_start[text] = ids, text - first, first

        anchor = torch.tensor(plan.anchors(documents[row]), dtype=torch.int64)  # (A,)
        size = len(anchor) * samples * length
        place = torch.arange(stop, stop + size).view(len(anchor), samples, length)
        ahead = anchor.unsqueeze(1) + torch.arange(length)  # (A, G) positions in the document
        position_ids[place] = ahead.unsqueeze(1).expand(place.shape)
        prefix_start[place] = first
        prefix_stop[place] = (first + anchor)[:, None, None].expand(place.shape)
        own_start[place] = place[:, :, :1].expand(place.shape)
        predictor = place - 1
        predictor[:, :, 0] = (first + anchor - 1).unsqueeze(1)

        trained = torch.tensor(documents[row].trained(), dtype=torch.int64)
        tensors = {
            "place": place, "predictor": predictor, "target_place": first + ahead, "anchor": anchor, "text": text,
            "document": torch.full_like(anchor, row), "ce_index": first + trained - 1, "ce_target": ids[trained],
        }  # fmt: skip
        for name, value in tensors.items():
            parts[name].append(value)
        first = stop + size
    assert first == used, (first, used)
    spans = {"prefix_start": prefix_start, "prefix_stop": prefix_stop, "own_start": own_start,
             "own_stop": torch.arange(1, width + 1)}  # fmt: skip
    whole = {"input_ids": input_ids, "position_ids": position_ids, **spans}
    return StridedBatch(
        **{name: value.unsqueeze(0) for name, value in whole.items()},
        **{name: torch.cat(values) for name, values in parts.items()},
        rows=rows, num_computed=used,
    )  # fmt: skip
