"""Documents continued from anchors: where the generated tokens lie, what each sees, and what is trained.

    plan = StridedPlan(stride=3, context_length=4, generate_max_len=2, n_samples_per_prompt=1)
    batch, *_ = make_strided([Document(ids)], plan, max_tokens=4096)      # 12 ids: anchors at 4, 7 and 10
    ids = ...                                                            # (A, n, G) a step at a time, batch.step(s)
    batch = batch.with_generated(ids)                                    # now one pass trains on everything

An anchor stands before token number c of its document, sees the c tokens before it, and is continued by G tokens, n
times. The document has the true continuation of each: c + G is never past its end, and padding has no anchor. Documents
that are shorter have none; their own tokens are still there for cross-entropy. In a conversation an anchor stands only
where the whole true continuation is the assistant's: what others wrote is neither continued nor compared with.

Document and continuations share one row, anchor-major: the tokens of a sample, the samples of an anchor, the anchors of
a document lie side by side.

    place     0 .. 11   12 13   14 15   16 17        the document of 12, and a sample of 2 for each anchor
    position  0 .. 11    4  5    7  8   10 11        as if each stood alone behind its part of the document
    prefix       -       0..3    0..6    0..9        what it sees of the document, besides the earlier tokens of its own
    scored at    -       3 12    6 14    9 16        the place whose state predicts it

Attention takes such a row as it takes any packed one: two runs of places (kernels.attention.Spans).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One text, without padding. Anchors stand behind its prompt, if it has one."""

    ids: list[int]
    prompt_length: int = 0  # how many of the ids, from the first on, are given: no anchor within, no cross-entropy
    mask: list[bool] | None = None  # which ids are trained: cross-entropy, anchors; None: all behind the prompt
    source: str = ""  # where it came from, for messages
    weight: float = 1.0  # how often it appears in one epoch

    def __post_init__(self) -> None:
        assert 0 <= self.prompt_length <= len(self.ids), (self.prompt_length, len(self.ids))
        assert self.mask is None or len(self.mask) == len(self.ids), (len(self.mask or ()), len(self.ids))

    def trained(self) -> list[int]:
        """Positions that cross-entropy covers; never the first, which nothing precedes."""
        if self.mask is None:
            return list(range(max(1, self.prompt_length), len(self.ids)))
        return [position for position, chosen in enumerate(self.mask) if chosen and position > 0]


@dataclass(frozen=True, kw_only=True)
class StridedPlan:
    """Where to continue documents, and how often."""

    stride: int  # tokens from one anchor to the next
    context_length: int  # tokens before the first one; later ones see all that is before them
    generate_max_len: int  # tokens of a continuation; the end-of-text token does not end it
    n_samples_per_prompt: int  # continuations of each anchor
    min_completion_prefix: int = 0  # tokens between a prompt and the first anchor; of no effect without a prompt

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "min_completion_prefix" else 1
            if getattr(self, field.name) < least:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: too small; use {least} or more")

    def anchors(self, document: Document) -> list[int]:
        """How many tokens of the document each anchor sees. Empty for one too short to have a single anchor."""
        mask, length = document.mask, self.generate_max_len
        return [place for place in self.places(document) if mask is None or all(mask[place : place + length])]

    def places(self, document: Document) -> range:
        """Where anchors would stand if all behind the prompt were trained."""
        behind = document.prompt_length + self.min_completion_prefix if document.prompt_length else 0
        return range(max(self.context_length, behind), len(document.ids) - self.generate_max_len + 1, self.stride)

    def size(self, document: Document) -> int:
        """Places that the document and its continuations take in a row."""
        return len(document.ids) + len(self.anchors(document)) * self.n_samples_per_prompt * self.generate_max_len


def require_anchors(documents: Sequence[Document], plan: StridedPlan) -> None:
    """To be asked of a whole data set: single short documents are no error, but one of these must have an anchor."""
    if any(plan.anchors(document) for document in documents):
        return
    if any(plan.places(document) for document in documents):
        raise ValueError(
            f"generate_max_len={plan.generate_max_len}: none of the {len(documents)} documents has that many trained "
            f"tokens in a row behind one of its anchors, which stand every stride={plan.stride} tokens; lower either"
        )
    longest = max((len(document.ids) for document in documents), default=0)
    prefix = plan.min_completion_prefix
    behind = f"min_completion_prefix + generate_max_len = {prefix + plan.generate_max_len}" if prefix else ""
    raise ValueError(
        f"documents={len(documents)}: none has room for context_length + generate_max_len = "
        f"{plan.context_length + plan.generate_max_len} tokens, or for {behind or 'generate_max_len'} behind its "
        f"prompt (longest: {longest}); use longer documents or lower the {'three' if prefix else 'two'}"
    )


@dataclass(frozen=True, kw_only=True)
class StridedBatch:
    """One row of T places with whole documents and all their continuations, padded at its end.

    Shapes: A = anchors of all its documents, n = samples of each, G = tokens of a sample. Places are those of the row.
    Order is that of the row everywhere: documents, anchors, samples, tokens.
    """

    input_ids: Tensor  # (1, T) int64; generated tokens are pad_id until with_generated
    position_ids: Tensor  # (1, T) int64
    prefix_start: Tensor  # (1, T) int64 each place sees [prefix_start, prefix_stop) and [own_start, own_stop)
    prefix_stop: Tensor  # (1, T) int64
    own_start: Tensor  # (1, T) int64
    own_stop: Tensor  # (1, T) int64
    place: Tensor  # (A, n, G) int64 where each generated token lies
    predictor: Tensor  # (A, n, G) int64 the place whose state predicts it; the samples of an anchor share their first
    target_place: Tensor  # (A, G) int64 where the true continuation of each anchor lies
    anchor: Tensor  # (A,) int64 tokens of its document that the anchor sees
    document: Tensor  # (A,) int64 which of the documents given to make_strided it is of
    text: Tensor  # (L,) int64 places of the documents' own tokens: the pass before generation
    ce_index: Tensor  # (M,) int64 the place whose state predicts each token that cross-entropy covers
    ce_target: Tensor  # (M,) int64 those tokens
    ce_document: Tensor  # (M,) int64 which of the documents they are of
    rows: list[int]  # the documents in this batch, in order
    num_computed: int  # places that hold a token, generated ones included

    def step(self, number: int) -> tuple[Tensor, Tensor]:  # both (A * n,)
        """Places of token `number`, from 0, of every sample, and the places whose states predict them.

        What these places see is what the row says they see: tokens not written yet are later or of other samples.
        """
        length = self.place.shape[2]
        if not 0 <= number < length:
            raise ValueError(f"step={number}: outside the {length} tokens of a continuation; count from 0")
        return self.place[:, :, number].flatten(), self.predictor[:, :, number].flatten()

    def with_generated(
        self,
        ids: Tensor,  # (A, n, G) int64
    ) -> StridedBatch:
        assert ids.shape == self.place.shape, f"ids {tuple(ids.shape)} vs {tuple(self.place.shape)}"
        input_ids = self.input_ids.clone()
        input_ids[0, self.place.flatten()] = ids.flatten()
        return replace(self, input_ids=input_ids)

    def per_token(
        self,
        value: Tensor,  # (A, n) of each continuation: an advantage
    ) -> Tensor:  # (A, n, G)
        """The same for every token of a continuation, in the order of `place` and `predictor`."""
        assert value.shape == self.place.shape[:2], f"value {tuple(value.shape)} vs {tuple(self.place.shape)}"
        return value.unsqueeze(2).expand(self.place.shape)

    def to(self, device: torch.device | str) -> StridedBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def make_strided(
    documents: Sequence[Document],
    plan: StridedPlan,
    *,
    max_tokens: int,
    pad_id: int = 0,
    multiple: int = 1,
) -> list[StridedBatch]:
    """Documents in order, as many to a row as max_tokens holds; one that is larger has a row of its own.

    Rows are filled up to a `multiple` of places, which attention kernels ask for.
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
    """A row without documents: a forward pass for a rank that has nothing to compute."""
    (row,) = make_strided([Document([pad_id])], plan, max_tokens=1, pad_id=pad_id, multiple=multiple)
    return replace(row, rows=[], num_computed=0)


def _build(
    documents: Sequence[Document], rows: list[int], plan: StridedPlan, pad_id: int, multiple: int
) -> StridedBatch:
    used = sum(plan.size(documents[row]) for row in rows)
    width = -(-used // multiple) * multiple
    input_ids = torch.full((width,), pad_id)
    position_ids, prefix_start, prefix_stop, own_start = (torch.zeros(width, dtype=torch.int64) for _ in range(4))
    own_start[used:] = used  # padding sees padding
    samples, length = plan.n_samples_per_prompt, plan.generate_max_len
    parts: dict[str, list[Tensor]] = {
        name: [] for name in ("place", "predictor", "target_place", "anchor", "document", "text", "ce_index",
                              "ce_target", "ce_document")
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
            "ce_document": torch.full_like(trained, row),
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
