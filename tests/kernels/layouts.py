"""Packed prompts and continuations for the attention tests: spans, and labels of every position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import Tensor

from data.strided import Document as Text
from data.strided import StridedBatch, StridedPlan, make_strided
from kernels import attention
from kernels.attention import Spans, share_graphs

Document = tuple[int, list[int]]  # prompt length, continuation lengths


@contextmanager
def flex_settings() -> Iterator[None]:
    """Apply the Dynamo settings of flex_attend and restore the old ones at the end."""
    settings = torch._dynamo.config
    before = {"recompile_limit": settings.recompile_limit, "specialize_float": settings.specialize_float}
    with settings.patch(**before), symbolic_shapes.patch(use_duck_shape=symbolic_shapes.use_duck_shape):
        attention._settings.is_set = False
        share_graphs()
        try:
            yield
        finally:
            attention._settings.is_set = False


class Layout(NamedTuple):
    spans: Spans
    document: Tensor  # (R, T) padding counts as the last document of its row
    branch: Tensor  # (R, T) -1 = the prompt
    position_ids: Tensor  # (R, T)

    def sequences(self, row: int = 0) -> list[tuple[list[int], int]]:
        """Return every prompt and continuation as a separate sequence: its positions in the row, its prefix length."""
        labels = list(zip(self.document[row].tolist(), self.branch[row].tolist(), strict=True))
        position = self.position_ids[row].tolist()
        sequences = []
        for document, branch in dict.fromkeys(labels):
            tokens = [i for i, label in enumerate(labels) if label == (document, branch)]
            prompt = [i for i, label in enumerate(labels) if label == (document, -1) and branch != -1]
            prefix = [i for i in prompt if position[i] < position[tokens[0]]]
            sequences.append((prefix + tokens, len(prefix)))
        return sequences


def lay_out(rows: list[list[Document]], *, multiple: int = 1) -> Layout:
    """Lay out documents in rows, each prompt followed by its continuations, padded to a multiple."""
    used = [sum(prompt + sum(others) for prompt, others in documents) for documents in rows]
    width = -(-max(used) // multiple) * multiple
    return stack([_row(documents, width - length) for documents, length in zip(rows, used, strict=True)])


def stack(layouts: list[Layout]) -> Layout:
    """Stack rows of equal length."""
    spans = Spans(*(torch.cat(bounds) for bounds in zip(*(layout.spans for layout in layouts), strict=True)))
    return Layout(spans, *(torch.cat([layout[n] for layout in layouts]) for n in (1, 2, 3)))


def strided_batch(
    prompt_length: int, *, stride: int, context: int, generated: int, samples: int, multiple=1
) -> StridedBatch:
    """Build the strided batch of one document, with continuations from its anchors."""
    plan = StridedPlan(stride=stride, context_length=context, generate_max_len=generated, n_samples_per_prompt=samples)
    (batch,) = make_strided([Text(list(range(prompt_length)))], plan, max_tokens=1, multiple=multiple)
    return batch


def spans_of(batch: StridedBatch) -> Spans:
    return Spans(batch.prefix_start, batch.prefix_stop, batch.own_start, batch.own_stop)


def strided(prompt_length: int, *, stride: int, context: int, generated: int, samples: int, multiple=1) -> Layout:
    """Return the spans of `strided_batch`, with labels computed token by token."""
    batch = strided_batch(
        prompt_length, stride=stride, context=context, generated=generated, samples=samples, multiple=multiple
    )
    labels = [(0, -1, position) for position in range(prompt_length)]
    anchor = 0
    while anchor * stride + context <= prompt_length - generated:
        for sample in range(samples):
            labels += [(0, anchor * samples + sample, anchor * stride + context + step) for step in range(generated)]
        anchor += 1
    labels += [(1, -1, position) for position in range(-len(labels) % multiple)]
    return Layout(spans_of(batch), *torch.tensor(labels).T.unsqueeze(1))


def _row(documents: list[Document], padding: int) -> Layout:
    labels: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int, int]] = []
    for document, (prompt, continuations) in enumerate([*documents, (padding, [])]):
        first = len(labels)
        labels += [(document, -1, position) for position in range(prompt)]
        spans += [(first, first, first)] * prompt
        for branch, length in enumerate(continuations):
            start = len(labels)
            labels += [(document, branch, prompt + position) for position in range(length)]
            spans += [(first, first + prompt, start)] * length
    prefix_start, prefix_stop, own_start = torch.tensor(spans).T.unsqueeze(1)
    own_stop = torch.arange(1, len(spans) + 1).unsqueeze(0)
    return Layout(Spans(prefix_start, prefix_stop, own_start, own_stop), *torch.tensor(labels).T.unsqueeze(1))
