"""Documents continued from anchors: the layout of generated tokens, what each attends to, and what is trained.

    plan = StridedPlan(stride=3, context_length=4, generate_max_len=2, n_samples_per_prompt=1)
    batch, *_ = make_strided([Document(ids)], plan, max_tokens=4096)      # 12 ids: anchors at 4, 7 and 10
    ids = ...                                                            # (A, n, G) one step at a time, batch.step(s)
    batch = batch.with_generated(ids)                                    # one pass now trains everything

An anchor at token c of its document has the c tokens before it as context, and n continuations of G tokens each. Its
target is the document's own continuation: c + G never exceeds the document. Documents too short for an anchor are still
trained by cross-entropy. In a conversation, an anchor requires a target written entirely by the assistant: other roles'
text is neither continued nor compared with.

A document and its continuations share one row, anchor-major: the tokens of a sample are adjacent, then the samples of
an anchor, then the anchors of a document.

    place     0 .. 11   12 13   14 15   16 17        a document of 12 tokens, and one sample of 2 per anchor
    position  0 .. 11    4  5    7  8   10 11        as in a separate sequence after its part of the document
    prefix       -       0..3    0..6    0..9        what it attends to in the document, besides its own earlier tokens
    scored at    -       3 12    6 14    9 16        the place whose state predicts it

Attention handles such a row like any packed one: two runs of places (kernels.attention.Spans).
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
    """One text, without padding. Anchors come after its prompt, if it has one."""

    ids: list[int]
    prompt_length: int = 0  # leading ids that are context only: no anchors, no cross-entropy
    mask: list[bool] | None = None  # ids that are trained (cross-entropy, anchors); None: all after the prompt
    source: str = ""  # where it came from, for messages
    weight: float = 1.0  # how often it appears in one epoch

    def __post_init__(self) -> None:
        assert 0 <= self.prompt_length <= len(self.ids), (self.prompt_length, len(self.ids))
        assert self.mask is None or len(self.mask) == len(self.ids), (len(self.mask or ()), len(self.ids))

    def trained(self) -> list[int]:
        """Positions that cross-entropy covers; never the first, which nothing predicts."""
        if self.mask is None:
            return list(range(max(1, self.prompt_length), len(self.ids)))
        return [position for position, chosen in enumerate(self.mask) if chosen and position > 0]


@dataclass(frozen=True, kw_only=True)
class StridedPlan:
    """Where to continue documents, and with how many samples."""

    stride: int  # tokens from one anchor to the next
    context_length: int  # tokens before the first anchor; later anchors see the whole document before them
    generate_max_len: int  # tokens of a continuation; the end-of-text token does not end it
    n_samples_per_prompt: int  # continuations of each anchor
    min_completion_prefix: int = 0  # tokens between a prompt and the first anchor; no effect without a prompt

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "min_completion_prefix" else 1
            if getattr(self, field.name) < least:
                raise UserError(f"{field.name}={getattr(self, field.name)}: too small; use {least} or more")

    def anchors(self, document: Document) -> list[int]:
        """Anchors, as the number of document tokens before each. Empty if the document is too short."""
        mask, length = document.mask, self.generate_max_len
        return [place for place in self.places(document) if mask is None or all(mask[place : place + length])]

    def places(self, document: Document) -> range:
        """Anchors if everything after the prompt were trained."""
        earliest = document.prompt_length + self.min_completion_prefix if document.prompt_length else 0
        return range(max(self.context_length, earliest), len(document.ids) - self.generate_max_len + 1, self.stride)

    def size(self, document: Document) -> int:
        """Places that the document and its continuations occupy in a row."""
        return len(document.ids) + len(self.anchors(document)) * self.n_samples_per_prompt * self.generate_max_len


def require_anchors(documents: Sequence[Document], plan: StridedPlan) -> None:
    """Refuse a dataset without a single anchor; some documents may be too short for one."""
    if any(plan.anchors(document) for document in documents):
        return
    if any(plan.places(document) for document in documents):
        raise UserError(
            f"generate_max_len={plan.generate_max_len}: none of the {len(documents)} documents has that many trained "
            f"tokens in a row after one of its anchors, which are every stride={plan.stride} tokens; lower either"
        )
    longest = max((len(document.ids) for document in documents), default=0)
    prefix = plan.min_completion_prefix
    needed = f"min_completion_prefix + generate_max_len = {prefix + plan.generate_max_len}" if prefix else ""
    raise UserError(
        f"documents={len(documents)}: none has room for context_length + generate_max_len = "
        f"{plan.context_length + plan.generate_max_len} tokens, or for {needed or 'generate_max_len'} after its "
        f"prompt (longest: {longest}); use longer documents or lower the {'three' if prefix else 'two'}"
    )


@dataclass(frozen=True, kw_only=True)
class StridedBatch:
    """One row of T places with whole documents and all their continuations, padded at the end.

    Shapes: A anchors of all its documents, n samples of each, G tokens per sample. Places are indices into the row.
    Everything is ordered as in the row: documents, anchors, samples, tokens.
    """

    input_ids: Tensor  # (1, T) int64; generated tokens are pad_id until with_generated
    position_ids: Tensor  # (1, T) int64
    prefix_start: Tensor  # (1, T) int64 a place attends to [prefix_start, prefix_stop) and [own_start, own_stop)
    prefix_stop: Tensor  # (1, T) int64
    own_start: Tensor  # (1, T) int64
    own_stop: Tensor  # (1, T) int64
    place: Tensor  # (A, n, G) int64 place of each generated token
    predictor: Tensor  # (A, n, G) int64 the place whose state predicts it; samples of an anchor share the first
    target_place: Tensor  # (A, G) int64 places of each anchor's target, the true continuation
    anchor: Tensor  # (A,) int64 document tokens before the anchor
    document: Tensor  # (A,) int64 index of its document in those given to make_strided
    text: Tensor  # (L,) int64 places of the documents' own tokens, for the pass before generation
    ce_index: Tensor  # (M,) int64 the place whose state predicts each token that cross-entropy covers
    ce_target: Tensor  # (M,) int64 those tokens
    rows: list[int]  # the documents in this batch, in order
    num_computed: int  # places with a token, generated ones included

    def step(self, number: int) -> tuple[Tensor, Tensor]:  # both (A * n,)
        """Places of token `number`, from 0, of every sample, and the places whose states predict them.

        The row's attention spans apply unchanged: tokens not generated yet are later ones or those of other samples.
        """
        length = self.place.shape[2]
        if not 0 <= number < length:
            raise UserError(f"step={number}: outside the {length} tokens of a continuation; count from 0")
        return self.place[:, :, number].flatten(), self.predictor[:, :, number].flatten()

    def with_generated(
        self,
        ids: Tensor,  # (A, n, G) int64
    ) -> StridedBatch:
        """The batch with these generated tokens filled in."""
        assert ids.shape == self.place.shape, f"ids {tuple(ids.shape)} vs {tuple(self.place.shape)}"
        input_ids = self.input_ids.clone()
        input_ids[0, self.place.flatten()] = ids.flatten()
        return replace(self, input_ids=input_ids)

    def per_token(
        self,
        value: Tensor,  # (A, n) one per continuation, such as an advantage
    ) -> Tensor:  # (A, n, G)
        """Broadcast to every token of a continuation, in the order of `place` and `predictor`."""
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
    """Documents in order, as many per row as fit max_tokens; a larger one gets its own row.

    Row lengths are padded to a multiple of `multiple`, which attention kernels require.
    """
    assert min(max_tokens, multiple) >= 1, (max_tokens, multiple)
    groups: list[list[int]] = []
    room = 0
    for number, document in enumerate(documents):
        assert document.ids, f"document {number} is empty"
        size = plan.size(document)
        if not groups or size > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(number)
        room -= size
    return [_build(documents, group, plan, pad_id, multiple) for group in groups]


def empty_strided(plan: StridedPlan, *, pad_id: int = 0, multiple: int = 1) -> StridedBatch:
    """A row without documents: a forward pass for a rank without data."""
    (row,) = make_strided([Document([pad_id])], plan, max_tokens=1, pad_id=pad_id, multiple=multiple)
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
        found = {
            "place": place, "predictor": predictor, "target_place": first + ahead, "anchor": anchor, "text": text,
            "document": torch.full_like(anchor, row), "ce_index": first + trained - 1, "ce_target": ids[trained],
        }  # fmt: skip
        for name, value in found.items():
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
