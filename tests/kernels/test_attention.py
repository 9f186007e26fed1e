"""Masks against the slow reference, tile lists against the dense mask, packed rows against separate runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import attention, reference
from kernels.attention import TILE, Spans, block_mask, dense_attend, dense_mask, flex_attend, with_window
from tests.kernels.layouts import Layout, flex_settings, lay_out, stack, strided, strided_batch, tree_spans

STRIDED = [  # prompt, stride, context, generated, samples: even, ragged end, overlapping anchors, one anchor, one token
    {"prompt_length": 24, "stride": 4, "context": 4, "generated": 4, "samples": 2},
    {"prompt_length": 23, "stride": 5, "context": 3, "generated": 4, "samples": 3},
    {"prompt_length": 17, "stride": 1, "context": 2, "generated": 6, "samples": 1},
    {"prompt_length": 9, "stride": 7, "context": 5, "generated": 4, "samples": 2},
    {"prompt_length": 12, "stride": 3, "context": 1, "generated": 1, "samples": 2},
]


@st.composite
def layouts(draw, longest: int = 7) -> Layout:
    """Draw up to 3 rows of prompts with 0 to 3 continuations, some without a prompt, padded to one length."""
    continuations = st.lists(st.integers(1, longest), max_size=3)
    document = st.tuples(st.integers(0, longest), continuations).filter(
        lambda document: any((document[0], *document[1]))
    )
    rows = draw(st.lists(st.lists(document, min_size=1, max_size=3), min_size=1, max_size=3))
    return lay_out(rows, multiple=draw(st.sampled_from([1, 8])))


def labels(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    return layout.document, layout.branch, layout.position_ids


def windowed(spans: Spans, window: int | None) -> Spans:
    return spans if window is None else with_window(spans, window)


# Dense masks


def check_dense(layout: Layout, window: int | None) -> None:
    got = dense_mask(windowed(layout.spans, window), layout.document.shape[1])
    assert got.dtype == torch.bool
    assert torch.equal(got, reference.attention_mask(*labels(layout), window=window))
    assert got.diagonal(dim1=2, dim2=3).all()  # every position sees itself, so no softmax is empty


@settings(max_examples=20, deadline=None)
@given(layout=layouts(longest=5), window=st.one_of(st.none(), st.integers(1, 12)))
def test_dense_mask_equals_reference(layout, window):
    check_dense(layout, window)


def test_dense_mask_of_a_strided_row_equals_reference():
    for sizes, window in zip(STRIDED, (None, 1, 3, 8, None), strict=True):
        check_dense(strided(**sizes, multiple=8), window)


def test_dense_mask_by_hand():
    layout = lay_out([[(2, [1, 2]), (1, [])]], multiple=8)
    assert dense_mask(layout.spans, 8)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],  # prompt
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],  # first continuation
        [1, 1, 0, 1, 0, 0, 0, 0],  # second
        [1, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],  # another document
        [0, 0, 0, 0, 0, 0, 1, 0],  # padding
        [0, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_window_counts_the_position_itself_and_reaches_into_the_prefix():
    layout = lay_out([[(3, [1, 2])]])
    assert dense_mask(with_window(layout.spans, 2), 6)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_dense_mask_of_trees_by_hand():
    spans, _, _ = tree_spans([(1, [(1, [(1, [])]), (1, [(1, []), (2, [])])])])
    assert len(spans) == 6 and dense_mask(spans, 7)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],  # root
        [1, 1, 0, 0, 0, 0, 0],  # its first child
        [1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0],  # its second
        [1, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 0, 1, 0],
        [1, 0, 0, 1, 0, 1, 1],
    ]
    assert dense_mask(with_window(spans, 2), 7)[0, 0].sum(dim=1).tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert dense_mask(with_window(spans, 3), 7)[0, 0, 6].int().tolist() == [0, 0, 0, 1, 0, 1, 1]


def test_empty_window_is_rejected():
    with pytest.raises(ValueError, match="window=0"):
        with_window(lay_out([[(3, [])]]).spans, 0)


def tiles_of(mask: Tensor) -> tuple[Tensor, Tensor]:  # (R, 1, Q/128, K/128) bool each: partial, full
    """Classify tiles by every entry of the mask; positions beyond the last query or key are not visible."""
    rows, _, queries, keys = mask.shape
    height, width = -(-queries // TILE), -(-keys // TILE)
    padded = torch.zeros(rows, 1, height * TILE, width * TILE, dtype=torch.bool)
    padded[:, :, :queries, :keys] = mask
    tiles = padded.view(rows, 1, height, TILE, width, TILE)
    full = tiles.all(dim=5).all(dim=3)
    return tiles.any(dim=5).any(dim=3) & ~full, full


def listed(counts: Tensor, indices: Tensor) -> list[list[int]]:
    """Return the tiles in each row of a list."""
    pairs = zip(counts.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True)
    return [row[:count] for count, row in pairs]


def chosen(tiles: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in tiles.flatten(0, -2)]


def check_tiles(spans: Spans, num_keys: int) -> Tensor:  # (R, 1, Q/128, K/128) bool, full tiles
    dense, got = dense_mask(spans, num_keys), block_mask(spans, num_keys)
    partial, full = tiles_of(dense)
    assert got.shape == tuple(dense.shape)
    assert listed(got.kv_num_blocks, got.kv_indices) == chosen(partial)
    assert listed(got.full_kv_num_blocks, got.full_kv_indices) == chosen(full)
    assert listed(got.q_num_blocks, got.q_indices) == chosen(partial.transpose(2, 3))  # for the backward
    assert listed(got.full_q_num_blocks, got.full_q_indices) == chosen(full.transpose(2, 3))
    assert torch.equal(got.to_dense().bool(), partial | full)
    lists = [getattr(got, name) for name in attention._LISTS]
    assert all(x.is_contiguous() and x.storage_offset() == 0 and x.dtype == torch.int32 for x in lists)
    row, query, key = (torch.arange(size) for size in (len(dense), dense.shape[2], num_keys))
    seen = got.mask_mod(row.view(-1, 1, 1, 1), torch.tensor(0), query.view(-1, 1), key)
    assert torch.equal(seen, dense)
    return full


@settings(max_examples=12, deadline=None)
@given(layout=layouts(longest=300), window=st.one_of(st.none(), st.integers(1, 400)))
def test_block_mask_lists_exactly_the_tiles_of_the_dense_mask(layout, window):
    check_tiles(windowed(layout.spans, window), layout.document.shape[1])


def test_block_mask_of_whole_tiles():
    # Prompts and continuations start and stop at tile boundaries, next to them and across them.
    documents = [(256, [128, 128]), (255, [129, 127]), (257, [384]), (128, [1, 255]), (1, [])]
    layout = lay_out([documents, documents[::-1]], multiple=TILE)
    full = check_tiles(layout.spans, layout.document.shape[1])
    assert full.any(dim=(1, 2, 3)).all()
    # A prompt that ends inside a tile plus its first continuation: full, although neither run covers the tile.
    layout = lay_out([[(200, [312])]], multiple=TILE)
    assert check_tiles(layout.spans, 512)[0, 0].int().tolist() == [[0] * 4, [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]


def test_block_mask_of_strided_rows_and_of_single_steps():
    for sizes in (
        {"prompt_length": 640, "stride": 32, "context": 128, "generated": 16, "samples": 4},
        {"prompt_length": 500, "stride": 7, "context": 20, "generated": 9, "samples": 3},
    ):
        batch = strided_batch(**sizes)
        length = batch.input_ids.shape[1]
        check_tiles(batch.spans, length)
        check_tiles(strided_batch(**sizes, multiple=TILE).spans, length + -length % TILE)
        for step in (0, sizes["generated"] - 1):
            positions, _ = batch.step(step)
            check_tiles(tuple(bound[:, positions] for bound in batch.spans), length)


def test_block_mask_of_an_anchor_major_row_has_few_partial_tiles():
    # Counted entry by entry: 133 full and 79 partial tiles. Step-major order would give 28 and 520.
    spans = strided_batch(1024, stride=8, context=8, generated=8, samples=4, multiple=TILE).spans
    mask = block_mask(spans, spans[0].shape[1])
    assert (mask.full_kv_num_blocks.sum().item(), mask.kv_num_blocks.sum().item()) == (133, 79)


def test_block_mask_of_a_long_row_does_not_build_the_dense_mask():
    # 2^17 tokens: the dense mask would be 16 GiB. 32 documents of 32 tiles: full below the diagonal, partial on it.
    start = (torch.arange(1 << 17) // 4096 * 4096).unsqueeze(0)
    mask = block_mask((start, start, start, torch.arange(1, (1 << 17) + 1).unsqueeze(0)), 1 << 17)
    assert mask.kv_num_blocks.eq(1).all()
    assert torch.equal(mask.kv_indices[0, 0, :, 0], torch.arange(1024, dtype=torch.int32))
    assert torch.equal(mask.full_kv_num_blocks[0, 0], torch.arange(32, dtype=torch.int32).repeat(32))


TREES = st.recursive(
    st.tuples(st.integers(1, 200), st.just([])),
    lambda child: st.tuples(st.integers(1, 200), st.lists(child, min_size=1, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=12, deadline=None)
@given(trees=st.lists(TREES, min_size=1, max_size=2), window=st.one_of(st.none(), st.integers(1, 300)))
def test_masks_of_trees_show_the_path_to_the_root(trees, window):
    spans, visible, depth = tree_spans(trees, multiple=8)
    if window is not None:
        visible &= depth.unsqueeze(2) - depth.unsqueeze(1) < window
    spans, length = windowed(spans, window), depth.shape[1]
    assert torch.equal(dense_mask(spans, length), visible.unsqueeze(1))
    check_tiles(spans, length)


def test_block_mask_merges_a_chain_of_runs():
    spans, _, _ = tree_spans([(100, [(50, [(30, [(76, [])])])])])  # no run covers a tile of 128
    assert check_tiles(spans, 256)[0, 0].int().tolist() == [[0, 0], [1, 0]]


def test_tile_check_detects_an_off_by_one_bound():
    for bound in range(4):
        layout = lay_out([[(256, [256, 128])]])
        wrong = tuple(x + (i == bound) for i, x in enumerate(layout.spans))
        mask, exact = block_mask(wrong, 640), tiles_of(dense_mask(layout.spans, 640))
        got = (listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices))
        assert got != (chosen(exact[0]), chosen(exact[1]))


# The compiled call, forward only: flex_attention has no backward on a CPU


def test_flex_attend_is_rejected_on_a_cpu():
    layout = lay_out([[(128, [])]])
    query = torch.zeros(1, 2, 128, 16)
    with pytest.raises(ValueError, match="query.device=cpu.*dense_mask"):
        flex_attend(query, query, query, block_mask(layout.spans, 128), scale=0.25)


def tensors_of(layout: Layout, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rows, length = layout.document.shape
    return tuple(torch.randn(rows, heads, length, 16, generator=draw) for heads in (4, 2, 2))


def test_one_graph_serves_every_length_and_mask():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(attention._attend, backend=count, dynamic=True, fullgraph=True)
    # 256 and 512 have as many tiles as there are key and query heads; these sizes must not be tied together.
    for seed, length in enumerate([256, 384, 512, 640, 256, 1024]):
        layout = lay_out([[(100 + seed, [57, 30]), (40 + seed, [])]], multiple=length)
        query, key, value = tensors_of(layout, seed)
        mask = block_mask(layout.spans, length)
        lists = [getattr(mask, name) for name in attention._LISTS]
        with flex_settings(), torch.no_grad():
            got = run(query, key, value, mask.mask_mod.spans, lists, 0.25)
        want = reference.attention(query, key, value, dense_mask(layout.spans, length), scale=0.25)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    for seed, length in enumerate([256, 512]):  # a tree: one more graph for its number of runs
        spans, visible, _ = tree_spans([(30 + seed, [(40, [(20, []), (50, [])]), (10, [])])], multiple=length)
        query, key, value = (torch.randn(1, heads, length, 16) for heads in (4, 2, 2))
        mask = block_mask(spans, length)
        with flex_settings(), torch.no_grad():
            got = run(query, key, value, mask.mask_mod.spans, [getattr(mask, name) for name in attention._LISTS], 0.25)
        want = reference.attention(query, key, value, visible.unsqueeze(1), scale=0.25)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}], ids=str)
def test_dense_attend_is_exact(options):
    """Values and gradients in float64, including those of the sinks; a mask of None is causal."""
    layout = lay_out([[(10, [5, 3]), (4, [])]])
    inputs = [x.double().requires_grad_() for x in tensors_of(layout, 0)]
    sinks = torch.linspace(-3, 4, 4, dtype=torch.float64).requires_grad_() if "sinks" in options else None
    leaves, options = [*inputs, *([] if sinks is None else [sinks])], {"scale": 0.3, **options, "sinks": sinks}
    causal = torch.ones(22, 22, dtype=torch.bool).tril()
    spans = dense_mask(with_window(layout.spans, 6), 22)
    for mask, passed in ((spans, spans), (causal, None)):
        got = dense_attend(*inputs, passed, **options)
        want = reference.attention(*inputs, mask, **options)
        weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(got.shape)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
        for one, other in zip(*(torch.autograd.grad(x, leaves, weight) for x in (got, want)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    narrow = dense_attend(*(x.detach().bfloat16() for x in inputs), spans, **options)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), reference.attention(*inputs, spans, **options), rtol=0, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["group", "tree"])
def test_flex_attend_has_gradients_of_sinks_and_capped_scores(layout, monkeypatch):
    """Traced, with the dense backward that torch rejects on a CPU; its log-sum-exp is float32."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    group = lay_out([[(100, [57, 30]), (40, [])]], multiple=256).spans
    tree, _, _ = tree_spans([(30, [(40, [(20, []), (50, [(9, []), (7, [])])]), (10, [])])], multiple=256)
    spans = with_window({"group": group, "tree": tree}[layout], 50)
    mask = block_mask(spans, 256)
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 256, 24) for heads in (4, 2, 2)] + [(4,)]
    leaves = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    torch._dynamo.reset()
    run = torch.compile(attention._attend, backend="aot_eager", dynamic=True, fullgraph=True)
    lists = [getattr(mask, name) for name in attention._LISTS]
    with flex_settings():
        got = run(*leaves[:3], mask.mask_mod.spans, lists, 0.3, 2.0, leaves[3])
        weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(got.shape)
        gradients = torch.autograd.grad(got, leaves, weight)
    want = reference.attention(*leaves[:3], dense_mask(spans, 256), scale=0.3, softcap=2.0, sinks=leaves[3])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    for one, other in zip(gradients, torch.autograd.grad(want, leaves, weight), strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()


def test_every_thread_has_the_settings():
    """Since torch 2.12 settings are per thread, and autograd recomputes checkpointed blocks in another thread."""

    def limit() -> int:
        attention.share_graphs()
        return torch._dynamo.config.recompile_limit

    with flex_settings(), ThreadPoolExecutor(1) as thread:
        assert limit() == thread.submit(limit).result() == attention.MAX_GRAPHS


def test_uncompiled_flex_attention_raises_instead_of_running_dense():
    layout = lay_out([[(256, [])]])
    mask = block_mask(layout.spans, 256)
    arguments = (*tensors_of(layout, 0), mask.mask_mod.spans, [getattr(mask, name) for name in attention._LISTS], 0.25)
    with pytest.raises(RuntimeError, match="torch.compile is off"):
        attention._attend(*arguments)
    torch._dynamo.reset()
    run = torch.compile(attention._attend, backend="eager", dynamic=True, fullgraph=True)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="torch.compile is off"):
        run(*arguments)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        run(*arguments)
        double = [x.double() for x in arguments[:3]]
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            run(*double, *arguments[3:])


# Through a model: packed sequences match separate runs


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            # Larger than the default init, so that a state depends measurably on every token it sees.
            torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() == 2 else None
    return model


def row_states(model, ids: Tensor, layout: Layout, spans: Spans | None = None) -> Tensor:  # (R, T, D)
    mask = dense_mask(layout.spans if spans is None else spans, ids.shape[1])
    return model.model(input_ids=ids, attention_mask=mask, position_ids=layout.position_ids).last_hidden_state


def separate_states(model, ids: Tensor, layout: Layout) -> Tensor:  # (R, T, D)
    """Run every prompt and continuation separately after its prefix, and arrange the states as in the row."""
    rows = []
    for row in range(len(ids)):
        states = {}
        for positions, prefix in layout.sequences(row):
            hidden = model.model(input_ids=ids[row, positions].unsqueeze(0)).last_hidden_state[0]
            states |= dict(zip(positions[prefix:], hidden[prefix:], strict=True))
        rows.append(torch.stack([states[position] for position in sorted(states)]))
    return torch.stack(rows)


LAYOUTS = {
    "packed": lay_out([[(5, []), (9, []), (3, [])], [(12, []), (1, [])]], multiple=8),
    "shared": lay_out([[(7, [4, 1, 6]), (3, [5])], [(10, [3, 3])]], multiple=8),
    "strided": strided(**STRIDED[0]),
    "strided, ragged": stack([strided(**STRIDED[1], multiple=8)] * 2),
}


def ids_of(layout: Layout) -> Tensor:
    return torch.randint(61, layout.document.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_and_gradients_of_a_packed_row_match_separate_runs(model, name):
    layout = LAYOUTS[name]
    ids = ids_of(layout)
    packed, separate = row_states(model, ids, layout), separate_states(model, ids, layout)
    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-5)

    weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(2))
    parameters = list(model.model.parameters())
    got = torch.autograd.grad((packed * weight).sum(), parameters)
    want = torch.autograd.grad((separate * weight).sum(), parameters)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * y.abs().max().item())


def test_comparison_detects_an_off_by_one_bound(model):
    for bound in (1, 2, 3):  # prefix_stop, own_start, own_stop
        layout = LAYOUTS["strided"]
        ids, spans = ids_of(layout), list(layout.spans)
        spans[bound] = (spans[bound] - 1).clamp(min=int(bound == 3))
        wrong = tuple(spans)
        difference = (row_states(model, ids, layout, wrong) - separate_states(model, ids, layout)).abs().max()
        assert difference > 1e-2


class RowCache:
    """Keys and values of every layer at their final positions in the row; unwritten positions contain garbage."""

    def __init__(self, length: int, num_layers: int) -> None:
        self.rows = [torch.full((2, 1, 2, length, 8), 50.0) for _ in range(num_layers)]
        self.positions = torch.arange(0)

    def update(self, key: Tensor, value: Tensor, layer: int, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        self.rows[layer][0][:, :, self.positions] = key
        self.rows[layer][1][:, :, self.positions] = value
        return self.rows[layer][0], self.rows[layer][1]

    def get_seq_length(self, *_args) -> int:
        return 0


@pytest.mark.parametrize("sizes", STRIDED[1:3])
@torch.no_grad()
def test_generation_with_a_cache_equals_the_training_forward(model, sizes):
    batch = strided_batch(**sizes)
    spans, length = batch.spans, batch.input_ids.shape[1]
    draw = torch.Generator().manual_seed(3)
    ids = torch.zeros(1, length, dtype=torch.long)
    states = torch.zeros(1, length, 32)
    cache = RowCache(length, num_layers=2)

    def run(positions: Tensor) -> None:
        cache.positions = positions
        states[:, positions] = model.model(
            input_ids=ids[:, positions], attention_mask=dense_mask(tuple(x[:, positions] for x in spans), length),
            position_ids=batch.position_ids[:, positions], past_key_values=cache, use_cache=True,
        ).last_hidden_state  # fmt: skip

    prompt = torch.arange(sizes["prompt_length"])
    ids[:, prompt] = torch.randint(61, (1, len(prompt)), generator=draw)
    run(prompt)
    for step in range(sizes["generated"]):
        positions, predictors = batch.step(step)  # the states of predictors predict this step's tokens
        probabilities = model.lm_head(states[0, predictors]).softmax(dim=-1)
        ids[0, positions] = torch.multinomial(probabilities, 1, generator=draw).flatten()
        run(positions)

    trained = model.model(
        input_ids=ids, attention_mask=dense_mask(spans, length), position_ids=batch.position_ids
    ).last_hidden_state
    torch.testing.assert_close(states, trained, rtol=1e-5, atol=1e-5)
    # Predictor states match separate runs of each sample.
    for positions, prefix in strided(**sizes).sequences()[1:]:
        separate = model.model(input_ids=ids[:, positions]).last_hidden_state[0, prefix - 1 : -1]
        index = torch.tensor(positions[prefix:]) - sizes["prompt_length"]
        torch.testing.assert_close(trained[0, batch.predictor.flatten()[index]], separate, rtol=1e-5, atol=1e-5)


# FlashAttention 4


def test_flash_needs_its_package_a_size_hopper_and_nondeterministic_algorithms(monkeypatch):
    assert "not installed" in attention.flash_obstacle(128)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # an earlier run may set it
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name)
    assert "head size 96" in attention.flash_obstacle(96)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "Hopper" in attention.flash_obstacle(128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert attention.flash_obstacle(128) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic" in attention.flash_obstacle(128)


def test_flash_is_passed_to_flex_attention_for_inputs_that_it_can_compute(monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "flex_attention", lambda *args, **options: seen.append(options) or args[0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    layout = lay_out([[(100, [28])]], multiple=TILE)
    mask = block_mask(layout.spans, layout.document.shape[1])
    length = layout.document.shape[1]
    monkeypatch.setattr(attention, "_flash_is_on", True)
    for dtype, size, want in ((torch.bfloat16, 64, True), (torch.float32, 64, False), (torch.bfloat16, 32, False)):
        x = torch.zeros(1, 2, length, size, dtype=dtype)
        flex_attend(x, x, x, mask, scale=1.0)
        assert seen.pop()["kernel_options"] == ({"BACKEND": "FLASH"} if want else None)
    attention.use_flash(False)
    x = torch.zeros(1, 2, length, 64, dtype=torch.bfloat16)
    flex_attend(x, x, x, mask, scale=1.0)
    assert seen.pop()["kernel_options"] is None, "Triton's kernels as before"
