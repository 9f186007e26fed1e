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
Tree = tuple[int, list["Tree"]]  # tokens, and the trees that continue them


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
    spans = tuple(torch.cat(bounds) for bounds in zip(*(layout.spans for layout in layouts), strict=True))
    return Layout(spans, *(torch.cat([layout[n] for layout in layouts]) for n in (1, 2, 3)))


def strided_batch(
    prompt_length: int, *, stride: int, context: int, generated: int, samples: int, multiple=1
) -> StridedBatch:
    """Build the strided batch of one document, with continuations from its anchors."""
    plan = StridedPlan(stride=stride, context_length=context, generate_max_len=generated, n_samples_per_prompt=samples)
    (batch,) = make_strided([Text(list(range(prompt_length)))], plan, max_tokens=1, multiple=multiple)
    return batch


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
    return Layout(batch.spans, *torch.tensor(labels).T.unsqueeze(1))


def tree_spans(trees: list[Tree], *, multiple: int = 1) -> tuple[Spans, Tensor, Tensor]:
    """Lay out trees in one row, depth first. Return spans, one run per node, and the ancestors and depths of tokens."""
    runs: list[list[tuple[int, int]]] = []  # of each token, from the root
    chains: list[list[int]] = []  # columns of each token's sequence up to itself

    def add(tree: Tree, prefix: list[tuple[int, int]], chain: list[int]) -> None:
        start = len(runs)
        for column in range(start, start + tree[0]):
            runs.append([*prefix, (start, column + 1)])
            chain = [*chain, column]
            chains.append(chain)
        for child in tree[1]:
            add(child, [*prefix, (start, start + tree[0])], chain)

    for tree in trees:
        add(tree, [], [])
    add((-len(runs) % multiple, []), [], [])
    depth = max(map(len, runs))
    bounds = torch.tensor([[(0, 0)] * (depth - len(each)) + each for each in runs]).flatten(1)  # (T, 2 * depth)
    visible = torch.zeros(1, len(runs), len(runs), dtype=torch.bool)
    for column, chain in enumerate(chains):
        visible[0, column, chain] = True
    return tuple(bounds.T.unsqueeze(1)), visible, torch.tensor([list(map(len, chains))])


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
    return Layout((prefix_start, prefix_stop, own_start, own_stop), *torch.tensor(labels).T.unsqueeze(1))
