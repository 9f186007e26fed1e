"""The layout vs. separate sequences document[:anchor] + continuation; test_attention.py compares with a model."""

from __future__ import annotations

import itertools

import pytest
import torch

from data.strided import Document, StridedBatch, StridedPlan, make_strided, require_anchors
from kernels import reference
from kernels.attention import dense_mask
from tests.kernels.layouts import strided

# Lengths that are a multiple of the stride or not, exactly one block, one token too short, a single token.
LENGTHS = (24, 23, 12, 9, 6, 5, 1)
GRID = [  # stride, context, generated, samples: the corners, and sizes that do not divide
    StridedPlan(stride=stride, context_length=context, generate_max_len=generated, n_samples_per_prompt=samples)
    for stride, context, generated, samples in (
        (1, 1, 1, 1), (1, 4, 5, 3), (3, 1, 2, 3), (3, 4, 5, 1), (8, 1, 5, 3), (8, 4, 2, 1)
    )
]  # fmt: skip


def plan(**change: int) -> StridedPlan:
    sizes = {"stride": 3, "context_length": 4, "generate_max_len": 2, "n_samples_per_prompt": 1}
    return StridedPlan(**{**sizes, **change})


def documents_of(lengths: tuple[int, ...]) -> list[Document]:
    """Documents with unique ids, so that a token identifies its origin."""
    starts = itertools.accumulate(lengths, initial=1)
    return [Document(list(range(start, start + n))) for start, n in zip(starts, lengths, strict=False)]


def filled(batch: StridedBatch) -> StridedBatch:
    """Fill in unique generated ids from 1000."""
    return batch.with_generated(1000 + torch.arange(batch.place.numel()).view(batch.place.shape))


def visible_tokens(batch: StridedBatch, place: int) -> list[int]:
    """Ids that a place attends to, in row order."""
    a, b, c, d = (int(bound[0, place]) for bound in batch.spans)
    return batch.input_ids[0, a:b].tolist() + batch.input_ids[0, c:d].tolist()


def brute_force_anchors(length: int, sizes: StridedPlan, prompt_length: int = 0) -> list[int]:
    """Try every position: enough context, the whole target within the document, on the stride."""
    anchors = []
    for position in range(length):
        if position < sizes.context_length or position < prompt_length or position + sizes.generate_max_len > length:
            continue
        if not anchors or (position - anchors[0]) % sizes.stride == 0:
            anchors.append(position)
    return anchors


def test_layout_of_twelve_tokens_by_hand():
    """12 tokens, first anchor 4, stride 3, two tokens per sample."""
    (batch,) = make_strided([Document(list(range(100, 112)))], plan(), max_tokens=64, pad_id=9, multiple=4)
    assert batch.anchor.tolist() == [4, 7, 10]
    assert batch.input_ids.tolist() == [[*range(100, 112), *[9] * 8]]
    assert batch.position_ids[0, :18].tolist() == [*range(12), 4, 5, 7, 8, 10, 11]
    assert batch.place.tolist() == [[[12, 13]], [[14, 15]], [[16, 17]]]
    assert batch.predictor.tolist() == [[[3, 12]], [[6, 14]], [[9, 16]]]
    assert batch.target_place.tolist() == [[4, 5], [7, 8], [10, 11]]
    assert batch.prefix_stop[0, 12:18].tolist() == [4, 4, 7, 7, 10, 10]
    assert batch.own_start[0, 12:18].tolist() == [12, 12, 14, 14, 16, 16]
    assert batch.ce_index.tolist() == list(range(11))
    assert batch.ce_target.tolist() == list(range(101, 112))
    assert (batch.num_computed, batch.rows) == (18, [0])


def test_anchors_match_brute_force():
    for sizes in GRID:
        for length in LENGTHS:
            for prompt_length in {0, min(3, length), min(7, length)}:
                document = Document(list(range(length)), prompt_length)
                assert sizes.anchors(document) == brute_force_anchors(length, sizes, prompt_length)


def test_a_completion_prefix_moves_the_first_anchor_of_documents_with_a_prompt():
    text, prompted = Document(list(range(12))), Document(list(range(12)), prompt_length=3)
    for prefix, expected in ((0, [4, 7, 10]), (1, [4, 7, 10]), (2, [5, 8]), (7, [10]), (8, [])):
        sizes = plan(min_completion_prefix=prefix)
        assert sizes.anchors(prompted) == expected
        assert sizes.anchors(text) == [4, 7, 10]
        assert sizes.size(prompted) == 12 + 2 * len(expected)


def test_anchors_require_a_fully_trained_target():
    for sizes in GRID:
        draw = torch.Generator().manual_seed(2)
        for length in LENGTHS:
            mask = (torch.rand(length, generator=draw) < 0.7).tolist()
            first = mask.index(True) if True in mask else length
            unmasked, size = brute_force_anchors(length, sizes, first), sizes.generate_max_len
            expected = [place for place in unmasked if sum(mask[place : place + size]) == size]
            document = Document(list(range(length)), first, mask)
            assert sizes.anchors(document) == expected
            (batch,) = make_strided([document], sizes, max_tokens=1)
            assert batch.anchor.tolist() == expected
            assert batch.num_computed == length + len(expected) * sizes.n_samples_per_prompt * sizes.generate_max_len
            assert set(batch.target_place.flatten().tolist()) <= {place for place in range(length) if mask[place]}


def test_every_generated_token_is_laid_out_as_in_a_separate_sample():
    for sizes in GRID:
        documents = documents_of(LENGTHS)
        (batch,) = make_strided(documents, sizes, max_tokens=10_000, multiple=16)
        batch = filled(batch)
        anchors = [(row, c) for row, d in enumerate(documents) for c in brute_force_anchors(len(d.ids), sizes)]
        assert list(zip(batch.document.tolist(), batch.anchor.tolist(), strict=True)) == anchors
        for number, (row, anchor) in enumerate(anchors):
            ids = documents[row].ids
            target = batch.input_ids[0, batch.target_place[number]].tolist()
            assert target == ids[anchor : anchor + sizes.generate_max_len]
            for sample in range(sizes.n_samples_per_prompt):
                places = batch.place[number, sample].tolist()
                alone = ids[:anchor] + batch.input_ids[0, places].tolist()
                for step, place in enumerate(places):
                    assert visible_tokens(batch, place) == alone[: anchor + step + 1]
                    assert batch.position_ids[0, place] == anchor + step
                    # The predictor attends to everything before the token, but not to the token.
                    predictor = int(batch.predictor[number, sample, step])
                    assert visible_tokens(batch, predictor) == alone[: anchor + step]


def test_documents_attend_only_to_themselves_and_padding_is_empty():
    for sizes in GRID[1::2]:
        documents = documents_of(LENGTHS)
        (batch,) = make_strided(documents, sizes, max_tokens=10_000, multiple=64)
        batch = filled(batch)
        text = batch.text.tolist()
        assert batch.input_ids[0, text].tolist() == [token for document in documents for token in document.ids]
        expected = [document.ids[: n + 1] for document in documents for n in range(len(document.ids))]
        assert [visible_tokens(batch, place) for place in text] == expected
        assert batch.position_ids[0, text].tolist() == [n for document in documents for n in range(len(document.ids))]

        # Every place below num_computed is a document token or a generated token; nothing points past it.
        assert sorted(text + batch.place.flatten().tolist()) == list(range(batch.num_computed))
        width = batch.input_ids.shape[1]
        assert width % 64 == 0 and width - batch.num_computed < 64
        for places in (batch.place, batch.predictor, batch.target_place, batch.ce_index):
            assert bool((places < batch.num_computed).all())
        assert not dense_mask(batch.spans, width)[0, 0, : batch.num_computed, batch.num_computed :].any()
        assert dense_mask(batch.spans, width)[0, 0].any(dim=1).all()


def test_one_document_matches_a_layout_built_token_by_token():
    for sizes in GRID:
        for length in LENGTHS[1:3]:
            (batch,) = make_strided([Document(list(range(length)))], sizes, max_tokens=1, multiple=8)
            labels = strided(
                length, stride=sizes.stride, context=sizes.context_length, generated=sizes.generate_max_len,
                samples=sizes.n_samples_per_prompt, multiple=8,
            )  # fmt: skip
            mask = reference.attention_mask(labels.document, labels.branch, labels.position_ids)
            assert torch.equal(dense_mask(batch.spans, batch.input_ids.shape[1]), mask)
            used = batch.num_computed
            assert torch.equal(batch.position_ids[:, :used], labels.position_ids[:, :used])
            samples = [(at, prefix) for at, prefix in labels.sequences() if prefix]
            assert batch.anchor.repeat_interleave(sizes.n_samples_per_prompt).tolist() == [
                prefix for _, prefix in samples
            ]
            assert batch.place.flatten().tolist() == [place for at, prefix in samples for place in at[prefix:]]
            assert batch.predictor.flatten().tolist() == [
                place for at, prefix in samples for place in at[prefix - 1 : -1]
            ]
            for step in range(sizes.generate_max_len):
                places, predictors = batch.step(step)
                assert places.tolist() == [at[prefix + step] for at, prefix in samples]
                assert predictors.tolist() == [at[prefix + step - 1] for at, prefix in samples]


def test_an_advantage_covers_the_tokens_of_its_own_sample():
    (batch,) = make_strided([Document(list(range(12)))], plan(n_samples_per_prompt=2), max_tokens=1)
    advantage = torch.tensor([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])
    row = torch.zeros(batch.input_ids.shape[1])
    row[batch.place.flatten()] = batch.per_token(advantage).flatten()
    assert row.tolist() == [0] * 12 + [1, 1, -1, -1, 2, 2, -2, -2, 3, 3, -3, -3]


def test_cross_entropy_covers_the_mask_but_never_the_first_token():
    masked = Document([10, 11, 12, 13], mask=[True, False, True, True])
    prompted = Document([20, 21, 22, 23], prompt_length=2)
    bare = Document([30])
    (batch,) = make_strided([masked, prompted, bare], plan(context_length=9), max_tokens=100)
    assert batch.ce_target.tolist() == [12, 13, 22, 23]
    assert batch.input_ids[0, batch.ce_index].tolist() == [11, 12, 21, 22]
    assert batch.place.shape == (0, 1, 2) and batch.input_ids.shape == (1, 9)


def test_a_short_document_has_no_anchor_and_keeps_its_cross_entropy():
    short, exact = Document([1, 2, 3, 4, 5]), Document([11, 12, 13, 14, 15, 16])
    (batch,) = make_strided([short, exact], plan(), max_tokens=100)
    assert batch.document.tolist() == [1] and batch.anchor.tolist() == [4]
    assert batch.ce_target.tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16]


def test_rows_keep_to_the_budget_and_to_the_order_of_documents():
    documents = documents_of((12, 12, 6, 40, 5, 5))
    batches = make_strided(documents, plan(), max_tokens=30)
    assert [batch.rows for batch in batches] == [[0], [1, 2], [3], [4, 5]]  # 18 | 18 + 8 | 40 + 24 | 5 + 5
    assert [batch.num_computed for batch in batches] == [18, 26, 64, 10]
    assert [sorted(set(batch.document.tolist())) for batch in batches] == [[0], [1, 2], [3], []]


def test_generated_ids_are_written_to_a_copy():
    (batch,) = make_strided(documents_of((12,)), plan(), max_tokens=1, pad_id=7)
    full = batch.with_generated(torch.tensor([[[50, 51]], [[52, 53]], [[54, 55]]]))
    assert full.input_ids[0, 12:].tolist() == [50, 51, 52, 53, 54, 55]
    assert batch.input_ids[0, 12:].tolist() == [7] * 6
    assert torch.equal(full.to("cpu").place, batch.place)


def test_sizes_below_the_minimum_are_rejected_by_name():
    names = ("stride", "context_length", "generate_max_len", "n_samples_per_prompt")
    for name, size in (*((name, 0) for name in names), *((name, -1) for name in names), ("min_completion_prefix", -1)):
        with pytest.raises(ValueError, match=f"^{name}={size}: "):
            plan(**{name: size})


def test_data_without_a_single_anchor_is_rejected_and_one_is_enough():
    short = documents_of((5, 3))
    with pytest.raises(ValueError, match=r"^documents=2: none .*generate_max_len = 6 tokens.*longest: 5\)"):
        require_anchors(short, plan())
    with pytest.raises(ValueError, match=r"^documents=1: none .*longest: 12\)"):
        require_anchors([Document(list(range(12)), prompt_length=11)], plan())
    require_anchors([*short, Document([1] * 6)], plan())
    with pytest.raises(ValueError, match=r"^documents=1: none .* min_completion_prefix \+ generate_max_len = 9 "):
        require_anchors([Document(list(range(12)), prompt_length=4)], plan(min_completion_prefix=7))
    require_anchors([Document(list(range(12)))], plan(min_completion_prefix=7))


def test_data_whose_mask_leaves_no_anchor_is_rejected():
    holes = Document(list(range(12)), 1, [False, *[True, False] * 5, True])
    with pytest.raises(ValueError, match=r"^generate_max_len=2: none of the 2 documents .* stride=3 "):
        require_anchors([holes, Document([1, 2])], plan())
    require_anchors([holes], plan(generate_max_len=1))


def test_a_step_outside_the_continuation_is_rejected():
    (batch,) = make_strided(documents_of((12,)), plan(), max_tokens=1)
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"^step={index}: .* 0 and 1"):
            batch.step(index)
