"""Micro-batches: layout, attention spans, shared prompts and token budgets."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import Item, make_batches


@st.composite
def grouped_items(draw):
    """Groups that share a prompt, half of them with branches. Prompts and completions may be empty.

    Ids are unique, except that branches start with ids of an earlier branch.
    """
    items, first = [], 1
    for _ in range(draw(st.integers(1, 5))):
        num_prompt, has_branches, episode = draw(st.integers(0, 6)), draw(st.booleans()), []
        prompt, first = list(range(first, first + num_prompt)), first + num_prompt
        for length in draw(st.lists(st.integers(0 if prompt else 1, 7), min_size=1, max_size=5)):
            ids = [*prompt, *range(first, first + length)]
            if episode and draw(st.booleans()):
                other = draw(st.sampled_from(episode)).ids
                ids = other[: draw(st.integers(num_prompt, len(other)))] + ids[num_prompt:]
            else:
                episode, number = [], first if has_branches else None
            mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            mask[: max(1, num_prompt)] = [False] * max(1, num_prompt)
            item = Item(ids, mask, num_prompt, episode=number)
            items.append(item)
            episode += [item] * has_branches
            first += length
    return items


def spans(batch):
    return [bound.tolist() for bound in batch.spans]


def visible_tokens(batch, row, column):
    """Ids that a token attends to, in row order."""
    bounds = [int(bound[row, column]) for bound in batch.spans]
    runs = zip(bounds[::2], bounds[1::2], strict=True)
    return [token for start, stop in runs for token in batch.input_ids[row, start:stop].tolist()]


def followed_tokens(batch, row, column):
    """Ids on the way along the runs, from the first to this token."""
    before, position, tokens = dict(batch.runs), row * batch.input_ids.shape[1] + column, []
    while position >= 0:
        tokens.append(int(batch.input_ids.flatten()[position]))
        position = before.get(position, position - 1)
    return tokens[::-1]


def is_token(batch):
    """(R, T) False at padding; item ids in these tests are never 0."""
    return batch.input_ids > 0


def trained(batches):
    return sorted((int(s), int(t)) for batch in batches for s, t in zip(batch.sequence, batch.target, strict=True))


def test_packed_values():
    items = [Item([5, 6, 7], [False, True, True]), Item([8, 9], [False, True])]
    (batch,) = make_batches(items, max_tokens=5)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert spans(batch) == [[[0] * 5], [[0] * 5], [[0, 0, 0, 3, 3]], [[1, 2, 3, 4, 5]]]
    assert batch.index.tolist() == [0, 1, 3]
    assert batch.target.tolist() == [6, 7, 9]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert batch.rows == [0, 1] and batch.lengths == [3, 2] and batch.num_tokens == batch.num_computed == 5


def test_padded_values():
    items = [Item([8, 9], [False, True]), Item([5, 6, 7], [False, False, True])]
    (batch,) = make_batches(items, max_tokens=6, packing=False, pad_id=77)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 77]]  # longest first
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert spans(batch) == [[[0] * 3] * 2, [[0] * 3] * 2, [[0, 0, 0], [0, 0, 2]], [[1, 2, 3]] * 2]
    assert batch.index.tolist() == [1, 3]
    assert batch.target.tolist() == [7, 9]
    assert batch.sequence.tolist() == [1, 0]
    assert batch.num_tokens == batch.num_computed == 5


def test_shared_prompt_values():
    group = [Item([5, 6, 7, *rest], [False] * 3 + [True] * len(rest), 3) for rest in ([8, 9], [10], [11, 12])]
    items = [*group, Item([20, 21], [False, True])]
    (batch,) = make_batches(items, max_tokens=10, share_prompt=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 20, 21]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 3, 4, 0, 1]]
    assert spans(batch) == [
        [[0] * 10],
        [[0, 0, 0, 3, 3, 3, 3, 3, 0, 0]],
        [[0, 0, 0, 3, 3, 5, 6, 6, 8, 8]],
        [list(range(1, 11))],
    ]
    assert batch.index.tolist() == [2, 3, 2, 2, 6, 8]  # the prompt's last token predicts three first tokens
    assert batch.target.tolist() == [8, 9, 10, 11, 12, 21]
    assert batch.sequence.tolist() == batch.slot.tolist() == [0, 0, 1, 2, 2, 3]
    assert batch.rows == [0, 1, 2, 3] and batch.lengths == [5, 4, 5, 2]
    assert batch.num_tokens == 16 and batch.num_computed == 10


def test_second_shared_prompt_has_its_own_spans():
    items = [Item([p, p, c], [False, False, True], 2) for p, c in ((1, 2), (1, 3), (4, 5), (4, 6))]
    (batch,) = make_batches(items, max_tokens=8, share_prompt=True)
    assert batch.input_ids.tolist() == [[1, 1, 2, 3, 4, 4, 5, 6]]
    assert spans(batch) == [
        [[0, 0, 0, 0, 0, 0, 4, 4]],
        [[0, 0, 2, 2, 0, 0, 6, 6]],
        [[0, 0, 2, 3, 4, 4, 6, 7]],
        [list(range(1, 9))],
    ]
    assert batch.index.tolist() == [1, 1, 5, 5]


def test_only_adjacent_items_with_the_same_prompt_share_it():
    a, b = [Item([p, p, 3], [False, False, True], 2) for p in (1, 2)]
    for items, computed in (([a, a, b], 7), ([a, b, a], 9), ([b], 3)):
        (batch,) = make_batches(items, max_tokens=100, share_prompt=True)
        assert batch.num_computed == computed
    shorter = Item([1, 1, 3], [False, False, True], 1)  # the same first ids, but not the same prompt
    (batch,) = make_batches([a, shorter], max_tokens=100, share_prompt=True)
    assert batch.num_computed == 6


def test_shared_prompts_need_the_flag_and_packing():
    items = [Item([1, 2, 3], [False, False, True], 2)] * 2
    for how in ({}, {"packing": False, "share_prompt": True}):
        (batch,) = make_batches(items, max_tokens=100, **how)
        assert batch.num_computed == 6 and batch.spans[1].eq(0).all()


def test_group_over_the_budget_is_split_with_a_prompt_each():
    lengths = (4, 1, 3, 2, 2)  # a prompt of 2 leaves 6 tokens: 4 + 2 and 3 + 2 + 1
    items = [Item([7, 7, *[9] * n], [False] * 2 + [True] * n, 2) for n in lengths]
    batches = make_batches(items, max_tokens=8, share_prompt=True)
    assert sorted(batch.rows for batch in batches) == [[0, 3], [1, 2, 4]]
    assert [batch.num_computed for batch in batches] == [8, 8]
    assert all(batch.input_ids[0, :2].tolist() == [7, 7] for batch in batches)
    # A completion that does not fit gets its own batch, with its prompt.
    batches = make_batches(items, max_tokens=5, share_prompt=True)
    assert {tuple(batch.rows): batch.num_computed for batch in batches} == {(0,): 6, (1, 3): 5, (2,): 5, (4,): 4}
    # The group has 14 tokens.
    for max_tokens, rows in ((14, [[0, 1, 2, 3, 4]]), (13, [[0, 2, 3, 4], [1]])):
        assert [batch.rows for batch in make_batches(items, max_tokens=max_tokens, share_prompt=True)] == rows


def test_groups_are_split_between_accumulation_chunks():
    items = [Item([7, 7, n], [False, False, True], 2) for n in range(4)]
    batches = make_batches(items, accumulation=2, max_tokens=100, share_prompt=True)
    assert [batch.rows for batch in batches] == [[0, 1], [2, 3]] and [b.num_computed for b in batches] == [4, 4]


def test_a_trained_prompt_is_predicted_from_the_shared_one():
    """ORPO trains the prompt of the chosen response alone."""
    items = [Item([1, 2, 3], [False, True, True], 2), Item([1, 2, 9], [False, False, True], 2)]
    (batch,) = make_batches(items, max_tokens=8, share_prompt=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 9]]
    assert batch.target.tolist() == [2, 3, 9] and batch.index.tolist() == [0, 1, 1]


def test_pairs_share_a_prompt_only_within_a_pair():
    shared, other = [Item([1, 2, n], [False, False, True], 2) for n in (5, 6)], [7, 8, 9]
    (batch,) = make_batches([*shared, *shared], max_tokens=99, together=2, share_prompt=True)
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 1, 2, 5, 6]] and batch.num_computed == 8 < batch.num_tokens == 12
    assert batch.rows == [0, 1, 2, 3] and batch.slot.tolist() == [0, 1, 2, 3]
    (batch,) = make_batches(
        [shared[0], Item(other, [False, False, True], 2)], max_tokens=99, together=2, share_prompt=True
    )
    assert batch.input_ids.tolist() == [[1, 2, 5, *other]]
    for how in ({"packing": False, "share_prompt": True}, {}):
        assert make_batches(shared, max_tokens=99, together=2, **how)[0].num_computed == 6


def branch(*ids, trained=1, prompt=2, episode=0, **options):
    """A branch that trains its last ids."""
    mask = [False] * (len(ids) - trained) + [True] * trained
    return Item(list(ids), mask, prompt, episode=episode, **options)


def test_branches_are_laid_out_as_a_tree():
    items = [
        branch(1, 2, 3, 4, trained=2),
        branch(1, 2, 3, 5, 6, 7),  # 3 was sampled in the first branch
        branch(1, 2, 3, 5, 6, 8),
        branch(1, 2, 3, 9, episode=1),  # another episode shares the prompt only
        branch(1, 2, 3, 9, 10, episode=1),
    ]
    (batch,) = make_batches(items, max_tokens=99, share_prompt=True)
    assert batch.rows == [2, 1, 0, 4, 3]
    assert batch.input_ids.tolist() == [[1, 2, 3, 5, 6, 8, 7, 4, 3, 9, 10]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 5, 3, 2, 3, 4]]
    assert spans(batch) == [
        [[0] * 11],
        [[0, 0, 2, 2, 2, 2, 5, 3, 2, 2, 2]],
        [[0, 0, 2, 2, 2, 2, 6, 7, 8, 8, 8]],
        [list(range(1, 12))],
    ]
    assert batch.index.tolist() == [4, 4, 1, 2, 9, 8] and batch.target.tolist() == [8, 7, 3, 4, 10, 9]
    assert batch.sequence.tolist() == [2, 1, 0, 0, 4, 3] and batch.slot.tolist() == [0, 1, 2, 2, 3, 4]
    assert batch.num_computed == 11 and batch.num_tokens == 25
    deeper = [*items, branch(1, 2, 3, 9, 11, episode=1), branch(1, 2, 3, 9, 11, 12, episode=1)]
    (batch,) = make_batches(deeper, max_tokens=99, share_prompt=True)
    assert len(batch.spans) == 6 and visible_tokens(batch, 0, 11) == [1, 2, 3, 5, 6, 7]  # two prefix runs
    for how in ({}, {"packing": False, "share_prompt": True}):
        assert sum(batch.num_computed for batch in make_batches(items, max_tokens=99, **how)) == 25


def test_a_tree_over_the_budget_is_cut_between_branches():
    items = [branch(1, 2, *range(10, 10 + n), 50 + n, 60 + n) for n in range(6)]  # leaves of 2 along a chain of 5
    batches = make_batches(items, max_tokens=11, share_prompt=True)
    cut = sorted((sorted(batch.rows), batch.num_computed) for batch in batches)
    assert cut == [([0], 4), ([1, 2, 3], 11), ([4, 5], 11)]
    assert all(batch.num_computed == 4 for batch in make_batches(items[:1], max_tokens=1, share_prompt=True))


def test_groups_are_adjacent_episodes_with_a_prompt_in_common():
    a = [branch(1, 2, 3), branch(7, 8, 3)]  # a sub-agent with another prompt
    b = [branch(1, 2, 4, episode=1), branch(7, 8, 4, episode=1)]
    other = [branch(1, 5, 3, episode=2)]
    for items, computed in (([*a, *b], 8), ([*a, *other, *b], 15), ([*b, *other], 9)):
        assert sum(batch.num_computed for batch in make_batches(items, max_tokens=99, share_prompt=True)) == computed


def test_routes_of_a_shared_token_are_those_of_the_turn_that_sampled_after_it():
    def routes(*numbers):
        return np.array(numbers, np.uint8)[:, None, None]

    items = [
        branch(1, 2, 3, 4, trained=2, routes=routes(1, 2, 3, 255)),
        branch(1, 2, 3, 5, 6, 7, routes=routes(11, 12, 13, 14, 15, 255)),
        branch(1, 2, 3, 5, 6, 7, 8, routes=routes(255, 22, 23, 24, 25, 26, 255)),
    ]
    for as_mask in (list, bytes):
        made = [replace(item, mask=as_mask(item.mask)) for item in items]
        (batch,) = make_batches(made, max_tokens=99, share_prompt=True)
        assert batch.input_ids.tolist() == [[1, 2, 3, 5, 6, 7, 8, 4]]
        trained = [[i for i, is_trained in zip(x.ids, x.mask, strict=True) if is_trained] for x in items]
        assert batch.target.tolist() == [i for row in batch.rows for i in trained[row]]
        assert batch.routes.flatten().tolist() == [11, 22, 3, 24, 15, 26, 255, 255]


def test_rows_are_padded_to_a_multiple():
    items = [Item([5, 6, 7], [False, True, True], 1), Item([5, 9], [False, True], 1)]
    (batch,) = make_batches(items, max_tokens=5, share_prompt=True, multiple=8, pad_id=77)
    assert batch.input_ids.tolist() == [[5, 6, 7, 9, 77, 77, 77, 77]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 1, 0, 0, 0, 0]]
    assert spans(batch) == [
        [[0] * 8],
        [[0, 1, 1, 1, 0, 0, 0, 0]],
        [[0, 1, 1, 3, 4, 4, 4, 4]],
        [list(range(1, 9))],
    ]
    assert batch.index.tolist() == [0, 1, 0] and batch.num_computed == 4 and batch.num_tokens == 5
    (batch,) = make_batches(items, max_tokens=8, packing=False, multiple=4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [5, 9, 0, 0]]
    assert batch.own_start.tolist() == [[0, 0, 0, 3], [0, 0, 2, 2]]
    assert batch.index.tolist() == [0, 1, 4]
    assert len(make_batches(items, max_tokens=7, packing=False, multiple=4)) == 2  # padding counts
    (batch,) = make_batches(items, max_tokens=5, multiple=5)
    assert batch.input_ids.shape == (1, 5)


def test_chunks_are_in_order_and_even():
    items = [Item([n, n], [False, True]) for n in range(7)]
    batches = make_batches(items, accumulation=3, max_tokens=100)
    assert [batch.rows for batch in batches] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [batch.rows for batch in make_batches(items[:1], accumulation=4, max_tokens=9)] == [[0]]


def test_first_fit_fills_gaps():
    items = [Item([1] * n, [False] + [True] * (n - 1)) for n in (6, 5, 4, 3)]
    assert [batch.rows for batch in make_batches(items, max_tokens=10)] == [[0, 2], [1, 3]]


def test_rows_are_as_long_as_the_longest_sequence_for_dense_masks():
    items = [Item([n] * n, [False] + [True] * (n - 1)) for n in (2, 4, 1, 3, 2)]
    (batch,) = make_batches(items, max_tokens=12, one_row=False)
    assert batch.input_ids.tolist() == [[4, 4, 4, 4], [3, 3, 3, 1], [2, 2, 2, 2]] and batch.rows == [1, 3, 2, 0, 4]
    assert batch.own_start.tolist() == [[0, 0, 0, 0], [0, 0, 0, 3], [0, 0, 2, 2]]
    assert batch.index.tolist() == [0, 1, 2, 4, 5, 8, 10] and batch.target.tolist() == [4, 4, 4, 3, 3, 2, 2]
    first, second = make_batches(items, max_tokens=11, one_row=False)  # two rows of 4 fit, not three
    assert first.input_ids.tolist() == [[4, 4, 4, 4], [3, 3, 3, 0]] and first.rows == [1, 3]
    assert second.input_ids.tolist() == [[2, 2], [2, 2], [1, 0]] and second.rows == [0, 4, 2]
    group = [Item([7, 7, n], [False, False, True], 2) for n in (1, 2, 3)]
    (batch,) = make_batches([*group, items[3]], max_tokens=99, share_prompt=True, one_row=False, multiple=4)
    assert batch.input_ids.tolist() == [[7, 7, 1, 2, 3, 3, 3, 3]], "both fit into the padded length"


def test_rows_of_similar_length_limit_the_padding():
    """The lengths of bench/vs_trl.py."""
    rng = random.Random(0)
    items = [Item([0] * (256 + min(767, max(8, round(rng.lognormvariate(5.3, 0.6))))), [False]) for _ in range(64)]
    items = [replace(item, mask=[False] * len(item.ids)) for item in items]

    def padding(max_padding, **options):
        options = {"max_tokens": 8192, "accumulation": 4, "packing": False, "max_padding": max_padding} | options
        batches = make_batches(items, **options)
        assert sorted(row for batch in batches for row in batch.rows) == list(range(64))
        parts = [1 - batch.num_tokens / batch.input_ids.numel() for batch in batches]
        total = 1 - sum(batch.num_tokens for batch in batches) / sum(batch.input_ids.numel() for batch in batches)
        return len(batches), max(parts), total

    num_batches, most, total = padding(0.1)
    assert most <= 0.1 and total < 0.1 and num_batches <= 15
    assert padding(1.0)[1] > 0.25
    alone = padding(1.0, accumulation=32, together=2)[2]  # within each pair
    num_batches, _, total = padding(0.1, together=2)
    assert alone < total < alone + 0.1 and num_batches <= 15


def test_small_micro_batches_may_have_any_padding():
    items = [Item([0] * length, [False] * length) for length in (9, 8, 4, 3, 2)]
    options = {"max_tokens": 99, "packing": False, "max_padding": 0.1, "multiple": 4}
    assert [batch.rows for batch in make_batches(items, **options)] == [[0], [1], [2], [3], [4]]
    assert [batch.rows for batch in make_batches(items, small=36, **options)] == [[0, 1, 2], [3, 4]]


def test_first_token_cannot_be_trained():
    with pytest.raises(AssertionError, match="item 1"):
        make_batches([Item([1, 2], [False, True]), Item([1, 2], [True, True])], max_tokens=8)


def test_no_trained_token_gives_an_empty_index():
    (batch,) = make_batches([Item([1, 2], [False, False])], max_tokens=8)
    assert batch.index.shape == batch.target.shape == batch.sequence.shape == (0,)
    assert batch.index.dtype == torch.int64


def test_to_moves_every_tensor():
    (batch,) = make_batches([Item([1, 2], [False, True])], max_tokens=8)
    moved = batch.to("meta")
    devices = {name: value.device.type for name, value in vars(moved).items() if isinstance(value, torch.Tensor)}
    assert len(devices) == 6 and set(devices.values()) == {bound.device.type for bound in moved.spans} == {"meta"}
    assert moved.rows == batch.rows


@settings(max_examples=60, deadline=None)
@given(
    items=grouped_items(),
    budget=st.integers(1, 40) | st.just(999),
    accumulation=st.integers(1, 3),
    share_prompt=st.booleans(),
    packing=st.booleans(),
    one_row=st.booleans(),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_every_token_attends_to_its_sequence_up_to_itself(
    items, budget, accumulation, share_prompt, packing, one_row, multiple
):
    """The whole contract: a predictor attends to its item from the first token to itself, in order."""
    how = dict(accumulation=accumulation, packing=packing, one_row=one_row, share_prompt=share_prompt)
    how["multiple"] = multiple
    batches = make_batches(items, max_tokens=budget, **how)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(items)))
    if not (share_prompt and packing):  # every token once
        seen = torch.cat([batch.input_ids[is_token(batch)] for batch in batches]).tolist()
        assert sorted(seen) == sorted(token for item in items for token in item.ids)
    elif accumulation == 1 and len(batches) == 1:
        assert batches[0].num_computed == len({token for item in items for token in item.ids})
    for batch in batches:
        num_rows, width = batch.input_ids.shape
        if one_row or not packing:
            assert num_rows == (1 if packing else len(batch.rows))
        assert width % multiple == 0
        if len(batch.rows) > 1 and packing and one_row:
            assert batch.num_computed <= budget
        elif num_rows > 1:
            assert num_rows * width <= budget
        assert batch.num_computed == int(is_token(batch).sum()) <= batch.num_tokens
        assert batch.num_tokens == sum(len(items[row].ids) for row in batch.rows)
        order = []
        for flat, target, number, slot in zip(batch.index, batch.target, batch.sequence, batch.slot, strict=True):
            item = items[number]
            seen = visible_tokens(batch, int(flat) // width, int(flat) % width)
            assert seen == item.ids[: len(seen)] and item.ids[len(seen)] == target and item.mask[len(seen)]
            assert batch.rows[slot] == number and batch.position_ids.flatten()[flat] == len(seen) - 1
            order.append((int(slot), len(seen)))
        assert order == sorted(order)
        for row in range(num_rows):
            for column in range(width):
                seen = visible_tokens(batch, row, column)
                assert seen and seen[-1] == batch.input_ids[row, column]  # itself last: nothing from later columns
                assert all(seen) == (seen[-1] > 0) and (all(seen) or not any(seen))  # tokens attend only to tokens
                assert not any(seen) or seen == followed_tokens(batch, row, column)
    expected = sorted((n, t) for n, item in enumerate(items) for t, m in zip(item.ids, item.mask, strict=True) if m)
    assert trained(batches) == expected


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_pairs_stay_together(pairs, max_tokens, accumulation, packing, share_prompt, one_row):
    items = [Item(list(range(1, n + 1)), [False] + [True] * (n - 1), min(pair)) for pair in pairs for n in pair]
    how = dict(accumulation=accumulation, packing=packing, share_prompt=share_prompt, one_row=one_row, together=2)
    batches = make_batches(items, max_tokens=max_tokens, **how)
    for batch in batches:
        assert all(
            first % 2 == 0 and second == first + 1
            for first, second in zip(batch.rows[::2], batch.rows[1::2], strict=True)
        )
        assert batch.input_ids.numel() <= max_tokens or len(batch.rows) == 2
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(items)))
