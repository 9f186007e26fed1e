"""Decode kernels under Triton's interpreter: small odd sizes on a CPU, against float64 loops.

Pages of 16 and few tokens, because the interpreter is slow. Unwritten memory and slots that no row sees contain NaN.
One file, because each file runs in its own subprocess.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels import set_rows
from kernels.decode import attention as decode_attention
from kernels.decode import attention_few, attention_many, draw, paged
from kernels.decode import block as decode_block
from kernels.decode import linear as decode_linear
from kernels.decode import state as decode_state
from kernels.decode.attention import decode_attention_kernel
from kernels.decode.draw import draw_kernel, uniform
from kernels.decode.lora import add_adapters_kernel
from kernels.decode.state import advance_kernel, locate_kernel
from tests.kernels.decode_problems import error, make_problem
from tests.kernels.interpreter import interpreted
from tests.kernels.test_decode_attention import GROUPS, OPTIONS, compare
from tests.kernels.test_decode_block import LIMITS, check_heads, check_norm, check_silu, make_heads
from tests.kernels.test_decode_block import draw as numbers
from tests.kernels.test_decode_linear import check_gated, check_linear, make_layers
from tests.kernels.test_decode_lora import SIZES
from tests.kernels.test_decode_lora import check as check_adapters
from tests.kernels.test_decode_lora import inputs as inputs_of_adapters
from tests.kernels.test_decode_state import CASES as STATE_CASES
from tests.kernels.test_decode_state import check_advance, check_locate, make_drawn, make_state
from tests.kernels.test_draw import SEEDS, check, check_company, check_special_rows, inputs
from tests.kernels.test_set_logprob import check_rows

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("nan_in_unwritten_memory"),
]


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """Use few programs, because the interpreter runs them sequentially, and short parts."""
    monkeypatch.setattr(attention_few, "_splits", lambda programs, tokens: 2)
    monkeypatch.setattr(attention_few, "LEAST_TOKENS", 16)
    use_parts(monkeypatch, 3)
    made: list[torch.Tensor] = []
    for module in (attention_few, attention_many):
        monkeypatch.setattr(module, "counters", lambda *args: made.append(paged.counters(*args)) or made[-1])
    yield
    assert not any(counters.any() for counters in made), "counters are zeros again"


def use_parts(monkeypatch, parts: int) -> None:
    monkeypatch.setattr(attention_many, "_layout", lambda *args: attention_many.Layout(parts, 16))


def attend(*args, **options) -> torch.Tensor:
    """Run both kernels, and return the output of that for many rows."""
    few, many = attend_few(*args, **options), attend_many(*args, **options)
    assert error(few, many) < (1e-6 if args[0].dtype == torch.float32 else 5e-3)
    return many


def attend_few(*args, **options) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_attention, "has_few", lambda *_: True)
        return decode_attention_kernel(*args, **options)


def attend_many(*args, **options) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_attention, "has_few", lambda *_: False)
        return decode_attention_kernel(*args, **options)


# Attention

HEADS = [(1, 1, 16), (4, 2, 32), (3, 1, 16), (4, 1, 16), (7, 1, 64), (8, 1, 16), (12, 1, 16)]


@interpreted
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_with_any_number_of_query_heads_per_key_head(heads):
    compare(attend, make_problem([(37, [1, 20]), (0, [3])], heads=heads), 1e-6)


@interpreted
@pytest.mark.parametrize("window", [None, 1, 7, 30])
def test_attention_with_a_window(window):
    compare(attend, make_problem(GROUPS[:3], heads=(2, 1, 16)), 1e-6, window)


@interpreted
@pytest.mark.parametrize(("page", "dtype", "limit"), [(48, torch.float32, 1e-6), (64, torch.bfloat16, 5e-3)])
def test_attention_with_longer_pages(page, dtype, limit):
    """Pages of 48 are read in blocks of 16."""
    compare(attend, make_problem([(70, [1, 65]), (0, [50])], heads=(2, 1, 16), page=page, dtype=dtype), limit)


@interpreted
def test_attention_with_holes_in_tiles_and_strided_inputs():
    problem = make_problem(GROUPS, holes=True, heads=(2, 1, 16))
    keys = problem.keys.transpose(0, 1).contiguous().transpose(0, 1)
    query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    compare(attend, problem._replace(keys=keys, query=query), 1e-6)


@interpreted
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_with_tokens_split_over_programs(splits, monkeypatch):
    """The last program merges with 1 part, the program of the last own part with 4."""
    monkeypatch.setattr(attention_few, "_splits", lambda programs, tokens: splits)
    compare(attend_few, make_problem([(37, [1, 20]), (0, [3])], heads=(12, 1, 10)), 1e-6)
    compare(attend_few, make_problem([(100, [4, 2]), (20, [90])], heads=(2, 1, 16), sinks=True), 1e-6)
    compare(attend_few, make_problem([(100, [4, 80])], heads=(2, 1, 16)), 1e-6, window=81)


@interpreted
@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_attention_with_tiles_cut_anywhere(parts, monkeypatch):
    """With 1 part a program has all tiles; with 40 there are fewer blocks than programs."""
    use_parts(monkeypatch, parts)
    compare(attend_many, make_problem([(37, [1, 20]), (0, [3]), (50, [2] * 9)], heads=(2, 1, 16), sinks=True), 1e-6)
    compare(attend_many, make_problem([(100, [4, 80])], heads=(2, 1, 10)), 1e-6, window=81)


@interpreted
@pytest.mark.parametrize("num_parts", [1, 2])
def test_attention_in_reverse_order(num_parts, monkeypatch):
    """Programs with tiles, and first parts, end last."""
    from triton.runtime.interpreter import interpreter_builder as builder

    def reverse(*index: int) -> None:
        builder.grid_idx = tuple(size - 1 - n for size, n in zip(builder.grid_dim, index, strict=True))

    monkeypatch.setattr(builder, "set_grid_idx", reverse)
    monkeypatch.setattr(attention_few, "_splits", lambda programs, tokens: num_parts)
    use_parts(monkeypatch, 2 * num_parts)
    compare(attend, make_problem([(37, [1, 20]), (0, [3])], heads=(12, 1, 10)), 1e-6)
    compare(attend, make_problem(GROUPS, holes=True, sinks=True, heads=(2, 1, 16)), 1e-6, window=18)


@interpreted
@pytest.mark.parametrize(
    ("size", "dtype", "limit"), [(9, torch.float32, 1e-6), (80, torch.bfloat16, 5e-3), (96, torch.float32, 1e-6)]
)
def test_attention_with_head_sizes_that_are_not_powers_of_two(size, dtype, limit):
    problem = make_problem([(20, [1, 17]), (0, [3])], heads=(2, 1, size), dtype=dtype)
    compare(attend, problem, limit, 10)


@interpreted
@pytest.mark.parametrize(
    ("options", "dtype", "limit", "window"),
    [*((options, torch.float32, 1e-6, None) for options in OPTIONS), (OPTIONS[-1], torch.bfloat16, 5e-3, 7)],
    ids=str,
)
def test_attention_with_capped_scores_and_sinks(options, dtype, limit, window):
    problem = make_problem([(20, [1, 17]), (0, [3])], heads=(3, 1, 20), dtype=dtype, **options)
    compare(attend, problem, limit, window)


# The operations of a block

CASES = [  # heads, dtype of the projections, of the cache
    ((6, 2, 16), torch.float32, torch.float32),
    ((7, 1, 10), torch.float32, torch.bfloat16),  # heads of a program that do not divide; a size that is no power of 2
    ((4, 4, 32), torch.bfloat16, torch.bfloat16),
]


@interpreted
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "dtype", "cache_dtype"), CASES, ids=str)
def test_rotates_and_appends(heads, dtype, cache_dtype, norm):
    case = make_heads(5, heads, norm=norm, dtype=dtype, cache_dtype=cache_dtype)
    check_heads(decode_block.rotate_append_kernel, case)
    want = case.run(decode_block.rotate_append_reference)
    for name, got in case.run(decode_block.rotate_append_kernel).items():
        assert error(got, want[name]) < LIMITS[cache_dtype], name


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_norm_and_activation(dtype):
    for num_tokens, width in ((1, 16), (3, 37), (2, 1500)):
        check_norm(decode_block.add_rms_norm_kernel, num_tokens, width, dtype)
        check_silu(decode_block.silu_mul_kernel, num_tokens, width, dtype)


@interpreted
def test_block_without_tokens():
    case = make_heads(0, (4, 2, 16))
    assert case.run(decode_block.rotate_append_kernel)["query"].shape == (0, 4, 16)
    assert decode_block.add_rms_norm_kernel(numbers(0, 8), None, numbers(8), 1e-6, torch.bfloat16).shape == (0, 8)
    assert decode_block.silu_mul_kernel(numbers(0, 8)).shape == (0, 4)


# Linear layers

# Parts are in float32, except that x A^T is rounded. A gated layer rounds all factors and the output. The interpreter
# truncates instead, which is biased: its errors are up to 4 times those of torch in bfloat16.
ADAPTED_LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
GATED_LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("programs", "parts"), [(4, 1), (8, 2), (132, 4)])
def test_linear(programs, parts, dtype, monkeypatch):
    """200 outputs are no multiple of a tile. With 4 or 8 programs, tiles have 64 outputs; with 132 they have 32."""
    monkeypatch.setattr(decode_linear, "PROGRAMS", programs)
    for num_rows in (1, 5, 130):
        assert check_linear(make_layers(num_rows, 512, [200], bias=True, dtype=dtype), 1e-6) == parts
    check_gated(make_layers(5, 256, [100, 100], dtype=dtype), GATED_LIMITS[dtype])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("programs", [6, 132])
def test_linear_with_adapters(programs, dtype, monkeypatch):
    """Stacked layers with adapters of two ranks and one without; an adapter's tile contains A of the next adapter."""
    monkeypatch.setattr(decode_linear, "PROGRAMS", programs)
    for num_rows, bias in ((1, True), (130, False)):
        layers = make_layers(num_rows, 256, [64, 128, 64], [8, 0, 20], bias=bias, dtype=dtype)
        check_linear(layers, ADAPTED_LIMITS[dtype])
        check_gated(make_layers(num_rows, 128, [128, 128], [8, 20], dtype=dtype), GATED_LIMITS[dtype])


# Adapters


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters(dtype):
    for size in SIZES:
        check_adapters(add_adapters_kernel, *size, dtype)
    assert add_adapters_kernel(*inputs_of_adapters(0, 4, 16, dtype)).shape == (0, 4)


# Draws, in chunks of 16


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(draw, "CHUNK", 16)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"scale": 1.5, "softcap": 5.0}], ids=str)
def test_draw_by_inverse_cdf(small_chunks, dtype, options):
    """37 and 7 are not multiples of the chunk, 64 is."""
    for vocab, rows in ((37, 8), (64, 3), (7, 3)):
        check(draw_kernel, *inputs(rows, vocab, dtype), **options)


@interpreted
def test_draw_hashes_like_the_reference(monkeypatch):
    """Among 4,096 equally likely ids, the sampled id is the first twelve bits of the hash."""
    seeds = torch.tensor(SEEDS)
    number = torch.tensor([0, 1, 2, 77, 511, 2**20, 2**31 - 2], dtype=torch.int32)
    monkeypatch.setattr(draw, "CHUNK", 1024)
    ids, _ = draw_kernel(torch.zeros(len(SEEDS), 4096), seeds, number, torch.ones(len(SEEDS)))
    assert ids.tolist() == (uniform(seeds, number) * 4096).long().tolist()


@interpreted
def test_draw_with_ties_and_nan(small_chunks):
    check_special_rows(draw_kernel, copies=3)


@interpreted
def test_draw_the_same_in_any_batch(small_chunks):
    check_company(draw_kernel, 37)


@interpreted
def test_draw_with_whole_chunks():
    check(draw_kernel, *inputs(2, draw.CHUNK + 5))


@interpreted
def test_draw_without_rows():
    assert [len(x) for x in draw_kernel(*(x[:0] for x in inputs(2, 37)))] == [0, 0]


# The state of rows, in blocks of 16


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(decode_state, "LOCATE_ROWS", 16)
    monkeypatch.setattr(decode_state, "ADVANCE_ROWS", 16)


@interpreted
@pytest.mark.parametrize("page", [1, 16, 48])
def test_state_locates(small_blocks, page):
    for num_rows in (1, 16, 37):
        check_locate(locate_kernel, num_rows, page)


@interpreted
@pytest.mark.parametrize("case", STATE_CASES)
def test_state_advances(small_blocks, case):
    """20 and 37 rows end within a block, 32 rows at its end."""
    for num_rows, room in ((20, 3), (32, 0), (37, 11)):
        check_advance(advance_kernel, num_rows, case, room=room)


@interpreted
def test_state_with_whole_blocks():
    check_locate(locate_kernel, decode_state.LOCATE_ROWS + 5, 16)
    check_advance(advance_kernel, decode_state.ADVANCE_ROWS + 5, "mixed")


@interpreted
def test_state_without_rows():
    """The tick still advances."""
    state = make_state(0, 16)
    assert [len(x) for x in state.locate(locate_kernel, 16)] == [0, 0]
    state.advance(advance_kernel, *make_drawn(0, seed=0))
    assert state.tick.tolist() == [2] and (state.out_ids == -5).all()


# Rows of the head that the sets of tokens name


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "width"), [([1, 17, 3], 7), ([40, 2], 300), ([16], 256)], ids=str)
def test_rows_of_sets(sizes, width, dtype):
    check_rows(set_rows.dot_rows_kernel, set_rows.sum_rows_kernel, sizes, width, dtype, 1e-5)
