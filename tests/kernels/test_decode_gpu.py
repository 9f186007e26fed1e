"""Decode kernels on a GPU at real sizes: values, and CUDA graphs that read new lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.decode import attention, launch
from kernels.decode import block as decode_block
from kernels.decode.attention import decode_attention, decode_attention_reference, plan_step
from kernels.decode.draw import draw, draw_reference
from kernels.decode.linear import gated_linear, linear
from kernels.decode.lora import add_adapters, add_adapters_reference
from kernels.decode.state import advance, advance_reference, locate, locate_reference
from tests.kernels.decode_problems import Problem, error, make_problem
from tests.kernels.test_decode_block import LIMITS, make_heads
from tests.kernels.test_decode_linear import make_layers
from tests.kernels.test_decode_lora import whole_numbers
from tests.kernels.test_decode_state import CASES, assert_same, check_advance, check_locate, make_drawn, make_state
from tests.kernels.test_draw import check, check_chi_square, check_company, check_special_rows, inputs

pytestmark = pytest.mark.gpu
ATTENTION_LIMITS = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
QWEN = (16, 8, 128)


@pytest.fixture(autouse=True)
def exact_products():
    """Turn TF32 off for the float32 references."""
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(was)


@pytest.fixture(params=["few", "many"])
def kernel(request, monkeypatch) -> None:
    """Use the kernel for few or for many rows, whatever the shape."""
    monkeypatch.setattr(attention, "has_few", lambda *_: request.param == "few")


def grouped(num_groups: int, size: int, prefix: int, own: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """Build groups of uneven lengths up to these; every seventh group has no prefix."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, own + 1, (num_groups, size), generator=generator).tolist()
    prefixes = torch.randint(prefix // 2, prefix + 1, (num_groups,), generator=generator).tolist()
    return [(0 if g % 7 == 6 else prefixes[g], lengths[g]) for g in range(num_groups)]


def exact_attention(problem: Problem, window: int | None) -> Tensor:  # (B, H, K) float64
    wide = (x.double() for x in problem[:3])
    return decode_attention_reference(*wide, problem.rows, **problem.options, window=window)


SHAPES = {
    "512 rows": (grouped(64, 8, 256, 256), QWEN),
    "64 rows": (grouped(8, 8, 256, 512), QWEN),
    "one long group": ([(4000, [1, 100, 2000])], QWEN),
    "one row, long": ([(6000, [700])], (32, 8, 128)),
    "one row, long completion": ([(60, [9000])], QWEN),
    "7 query heads": (grouped(9, 5, 300, 100), (14, 2, 64)),
    "3 query heads": (grouped(9, 8, 300, 100), (9, 3, 64)),
    "12 query heads": (grouped(3, 17, 300, 100), (12, 1, 128)),
    "large heads": (grouped(5, 8, 300, 100), (8, 1, 256)),
    "small heads": (grouped(5, 8, 300, 100), (4, 4, 16)),
    "heads of 80": (grouped(5, 8, 300, 100), (8, 2, 80)),
    "heads of 96": (grouped(5, 8, 300, 100), (32, 32, 96)),
    "heads of 10": (grouped(3, 8, 300, 100), (4, 2, 10)),
}
OPTIONS = {  # heads, softcap, sinks
    "gpt-oss": ((64, 8, 64), None, True),
    "gemma2": ((8, 4, 256), 50.0, False),
    "both": ((8, 2, 96), 5.0, True),
}


@pytest.mark.parametrize("dtype", ATTENTION_LIMITS)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_with_capped_scores_and_sinks_is_exact(name, dtype, kernel):
    heads, softcap, sinks = OPTIONS[name]
    made = make_problem(grouped(9, 8, 300, 200), heads=heads, page=64, dtype=dtype, softcap=softcap, sinks=sinks)
    problem = made.to("cuda")
    for window in (None, 128):
        got = decode_attention(*problem[:4], **problem.options, window=window)
        off = error(got, exact_attention(problem, window))
        print(f"{name} {dtype} window {window}: {off:.1e}")
        assert off < ATTENTION_LIMITS[dtype] + 2e-7 * (softcap or 0)  # the cap multiplies the rounding of tanh


@pytest.mark.parametrize("dtype", ATTENTION_LIMITS)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_exact(name, dtype, kernel):
    groups, heads = SHAPES[name]
    problem = make_problem(groups, heads=heads, page=64, dtype=dtype).to("cuda")
    for window in (None, 128):
        got = decode_attention(*problem[:4], **problem.options, window=window)
        off = error(got, exact_attention(problem, window))
        print(f"{name} {dtype} window {window}: {off:.1e}")
        assert off < ATTENTION_LIMITS[dtype]


@pytest.mark.parametrize("page", [16, 48, 128])
def test_attention_with_other_page_sizes(page, kernel):
    problem = make_problem(grouped(9, 8, 300, 100), heads=QWEN, page=page, dtype=torch.bfloat16).to("cuda")
    got = decode_attention(*problem[:4], **problem.options)
    assert error(got, exact_attention(problem, None)) < ATTENTION_LIMITS[torch.bfloat16]


def test_attention_far_into_a_large_cache(kernel):
    """Slots times strides exceed 2**31."""
    places, head_dim = 1 << 21, 128
    problem = make_problem([(200, [70, 5])], heads=(16, 8, head_dim), page=64, dtype=torch.bfloat16).to("cuda")
    want = decode_attention(*problem[:4], **problem.options)
    shift = places - problem.keys.shape[1]
    keys, values = torch.empty(2, 8, places, head_dim, dtype=torch.bfloat16, device="cuda")
    keys[:, shift:], values[:, shift:] = problem.keys, problem.values
    rows = problem.rows._replace(table=problem.rows.table + shift // 64)
    assert keys.numel() >= 2**31 and shift % 64 == 0
    assert torch.equal(decode_attention(problem.query, keys, values, rows, **problem.options), want)


MERGES = {  # groups of rows; the merge depends on the order in which programs end
    "64 rows": [(256, [100 + n] * 8) for n in range(8)],
    "128 rows": [(256, [100 + n] * 8) for n in range(16)],
    "3 rows": [(256, [50, 700, 1])],
    "one long row": [(1000, [9000])],
    "200 uneven rows": [(256, [1 + 37 * (n + m) % 500 for m in range(8)]) for n in range(25)],
}


@pytest.mark.parametrize("name", MERGES)
def test_attention_gives_the_same_bits_in_every_call(name, kernel):
    problem = make_problem(MERGES[name], heads=QWEN, page=64, dtype=torch.bfloat16).to("cuda")
    want = decode_attention(*problem[:4], **problem.options)
    assert error(want, exact_attention(problem, None)) < ATTENTION_LIMITS[torch.bfloat16]
    for _ in range(20):
        assert torch.equal(decode_attention(*problem[:4], **problem.options), want)


# Linear layers of few rows

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
LINEAR_ROWS = [1, 7, 64, 100, 128]


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", LINEAR_ROWS)
def test_linear_is_more_exact_than_torch(num_rows, dtype):
    """Rounded sums of the parts have the error of torch's output; without adapters, the parts are not rounded."""
    for width, outs, bias in ((1024, [2048, 1024, 1024], True), (2048, [1024], False), (3072, [100, 7], True)):
        layers = make_layers(num_rows, width, outs, bias=bias, dtype=dtype).to("cuda")
        exact, parts = layers.exact(), layers.run()
        theirs, ours, rounded = (error(x, exact) for x in (layers.reference(), parts.sum(0), parts.sum(0).to(dtype)))
        print(f"{num_rows} rows, {width} to {sum(outs)}: {ours:.1e}; rounded, {rounded / theirs:.3f} of torch")
        assert ours < 0.1 * theirs and rounded < 1.1 * theirs
        assert torch.equal(layers.run(), parts)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", LINEAR_ROWS)
def test_linear_with_adapters_is_as_exact_as_torch(num_rows, dtype):
    """Adapters of several ranks, one layer without; torch's x A^T is rounded, too."""
    for width, outs, ranks, bias in ((1024, [2048, 1024, 1024], [16, 0, 40], True), (3072, [1024], [64], False)):
        layers = make_layers(num_rows, width, outs, ranks, bias=bias, dtype=dtype).to("cuda")
        exact = layers.exact()
        theirs, ours = (error(x, exact) for x in (layers.reference(), layers.run().sum(0).to(dtype)))
        print(f"{num_rows} rows, {width} to {sum(outs)}: {ours / theirs:.3f} of torch")
        assert ours < 1.1 * theirs


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", LINEAR_ROWS)
def test_gated_linear_is_as_exact_as_torch(num_rows, dtype):
    for width, outs, ranks in ((1024, [3072] * 2, None), (1024, [100] * 2, None), (1024, [4096] * 2, [64, 20])):
        layers = make_layers(num_rows, width, outs, ranks, dtype=dtype).to("cuda")
        exact = layers.exact(gated=True)
        theirs, ours = (error(x, exact) for x in (layers.reference(gated=True), layers.run(gated=True)))
        print(f"{num_rows} rows, {width} to {sum(outs)}: {ours / theirs:.3f} of torch")
        assert ours < 1.1 * theirs


# The operations of a block


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "heads"), [(512, QWEN), (1, (14, 2, 64)), (77, (9, 3, 64)), (5, (8, 1, 256))])
def test_rotate_append_is_exact(num_tokens, heads, dtype, norm):
    case = make_heads(num_tokens, heads, norm=norm, dtype=dtype).to("cuda")
    got, want = case.run(decode_block.rotate_append), case.run(decode_block.rotate_append_reference)
    for name, x in want.items():
        assert error(got[name], x) < (1e-6 if dtype == torch.float32 else 1e-3), name  # the same roundings
    assert torch.equal(got["values"], want["values"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(512, 1024), (3, 37), (64, 8192), (1, 2880)])
def test_norm_and_activation_are_exact(num_tokens, width, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    stream, weight = (torch.randn(n, width, generator=generator, device="cuda") for n in (num_tokens, 1))
    gate_up = torch.randn(num_tokens, 2 * width, generator=generator, device="cuda").to(dtype)
    for delta in (gate_up[:, :width], None):
        ours, theirs = stream.clone(), stream.clone()
        got = decode_block.add_rms_norm(ours, delta, weight[0], 1e-6, dtype)
        want = decode_block.add_rms_norm_reference(theirs, delta, weight[0], 1e-6, dtype)
        assert torch.equal(ours, theirs) and error(got, want) < min(LIMITS[dtype], 1e-3)
    assert error(decode_block.silu_mul(gate_up), decode_block.silu_mul_reference(gate_up)) < min(LIMITS[dtype], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "width", "rank"), [(1, 1024, 16), (64, 4096, 48), (512, 6144, 32), (700, 130, 208)]
)
def test_adapters_round_like_torch(num_tokens, width, rank, dtype):
    """Sums of whole numbers are exact in float32, so that only the places of rounding matter."""
    joint = whole_numbers(num_tokens, width + rank + 8, seed=1, limit=600).cuda()
    up, scale = whole_numbers(width, rank, seed=2).cuda().to(dtype), 2.0 ** (torch.arange(width, device="cuda") % 4)
    bias = whole_numbers(width, seed=3).cuda().to(dtype)
    assert torch.equal(add_adapters(joint, bias, up, scale), add_adapters_reference(joint, bias, up, scale))
    gated, want = (f(joint / 600, bias, up / 60, scale, gated=True) for f in (add_adapters, add_adapters_reference))
    assert error(gated, want) < min(LIMITS[dtype], 1e-3)


# Draws


def draw_on_gpu(*arguments: Tensor, **options) -> tuple[Tensor, Tensor]:
    ids, logps = draw(*(x.cuda() for x in arguments), **options)
    return ids.cpu(), logps.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"scale": 1.5, "softcap": 5.0}], ids=str)
def test_draws_by_inverse_cdf(dtype, options):
    for vocab in (7, 4096, 9001):
        check(draw_on_gpu, *inputs(12, vocab, dtype), **options)


def test_draws_follow_the_distribution():
    check_chi_square(draw_on_gpu, 200_000)


def test_draws_with_ties_and_nan():
    check_special_rows(draw_on_gpu)


def test_row_draws_the_same_in_any_batch():
    check_company(draw_on_gpu, 9001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_match_the_reference(dtype):
    """50,000 draws per dtype from a large vocabulary; they differ only within rounding of a boundary."""
    num_rows, vocab, times = 500, 151_936, 100
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (3 * torch.randn(num_rows, vocab, generator=generator, device="cuda")).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator, device="cuda")
    temperature = 0.5 + torch.rand(num_rows, generator=generator, device="cuda")
    same = 0
    for n in range(times):
        number = torch.full((num_rows,), n, dtype=torch.int32, device="cuda")
        ids, logps = draw(logits, seeds, number, temperature)
        want, want_logps = draw_reference(logits, seeds, number, temperature)
        equal = ids == want
        same += int(equal.sum())
        assert (logps - want_logps)[equal].abs().max() < 2e-5
    print(f"{dtype}: {same} of {num_rows * times} ids equal")
    assert same >= 0.999 * num_rows * times


# The state of rows

STATE_ROWS = [1, 2, 48, 64, 512, 1500, 2048, 3000]


@pytest.mark.parametrize("page", [16, 48, 64])
def test_rows_are_located(page):
    for num_rows in STATE_ROWS:
        check_locate(locate, num_rows, page, "cuda")


@pytest.mark.parametrize("case", CASES)
def test_rows_advance(case):
    for num_rows in (64, 512, 3000):
        check_advance(advance, num_rows, case, "cuda", room=100)


# CUDA graphs


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("dtype", ATTENTION_LIMITS)
@pytest.mark.parametrize("window", [None, 100])
def test_captured_attention_reads_new_lengths(dtype, window, kernel):
    """Tables, lengths and tiles change in place."""
    problems = []
    for seed in range(3):
        groups = grouped(16, 8, 200, 150, seed)
        groups[0] = (200, [150] * 8)  # tables of one width
        problems.append(make_problem(groups, heads=QWEN, page=64, dtype=dtype, seed=seed).to("cuda"))
    places = max(p.keys.shape[1] for p in problems)
    widest = max(p.rows.table.shape[1] for p in problems)

    def padded(problem: Problem) -> Problem:
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, places - x.shape[1])).contiguous() for x in problem[1:3])
        table = torch.nn.functional.pad(problem.rows.table, (0, widest - problem.rows.table.shape[1])).contiguous()
        return problem._replace(keys=keys, values=values, rows=problem.rows._replace(table=table))

    first, *others = (padded(p) for p in problems)
    held = first._replace(
        query=first.query.clone(), keys=first.keys.clone(), values=first.values.clone(),
        rows=type(first.rows)(*(x.clone() for x in first.rows)),
    )  # fmt: skip
    out = torch.empty_like(held.query)

    def step() -> None:
        out.copy_(decode_attention(*held[:4], **held.options, window=window))

    graph = captured(step)
    for problem in (*others, first):
        for target, source in zip((*held[:3], *held.rows), (*problem[:3], *problem.rows), strict=True):
            target.copy_(source)
        graph.replay()
        assert torch.equal(out, decode_attention(*problem[:4], **problem.options, window=window))
        assert error(out, exact_attention(problem, window)) < ATTENTION_LIMITS[dtype]


@needs_hopper
@pytest.mark.parametrize("num_rows", [3, 64])
def test_captured_chain_gives_the_same_bits_with_dependent_launches(num_rows, kernel, monkeypatch):
    """Four blocks, in which every kernel is launched before the end of the kernel before it."""
    shapes = ((1024, [2048, 1024, 1024]), (2048, [1024]), (1024, [3072, 3072]), (3072, [1024]))
    qkv, o, up, down = (make_layers(num_rows, *x, dtype=torch.bfloat16).to("cuda").weight for x in shapes)
    problem = make_problem(MERGES[f"{num_rows} rows"], heads=QWEN, page=64, dtype=torch.bfloat16).to("cuda")
    keys, values = problem.keys.nan_to_num(), problem.values.nan_to_num()
    case = make_heads(num_rows, QWEN, dtype=torch.bfloat16).to("cuda")
    weight, first = torch.rand(1024, device="cuda"), torch.randn(num_rows, 1024, device="cuda")

    def run() -> Tensor:
        plan = plan_step(keys, problem.rows, num_heads=QWEN[0], page=64)
        stream, delta = first.clone(), None
        for _ in range(4):
            x = decode_block.add_rms_norm(stream, delta, weight, 1e-6, torch.bfloat16)
            query = decode_block.rotate_append(linear(x, qkv), *case[1:5], keys, values, **case.options)
            x = decode_attention(query, keys, values, problem.rows, plan=plan, **problem.options)
            x = decode_block.add_rms_norm(stream, linear(x.view(num_rows, -1), o), weight, 1e-6, torch.bfloat16)
            delta = linear(gated_linear(x, up), down)
        return decode_block.add_rms_norm(stream, delta, weight, 1e-6, torch.bfloat16)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "is_supported", lambda x: False)
        want = run()
    out = torch.empty_like(want)
    graph = captured(lambda: out.copy_(run()))
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


def test_captured_block_and_draw_read_new_values():
    case = make_heads(64, QWEN, dtype=torch.bfloat16).to("cuda")
    arguments = [x.cuda() for x in inputs(64, 9001)]
    stream = torch.randn(64, 1024, device="cuda")
    weight = torch.rand(1024, device="cuda")
    made: dict[str, Tensor] = {}

    def step() -> None:
        made["query"] = decode_block.rotate_append(*case[:7], **case.options)
        made["ids"], made["logps"] = draw(*arguments)
        made["normal"] = decode_block.add_rms_norm(stream, case.qkv[:, :1024], weight, 1e-6, torch.bfloat16)
        made["silu"] = decode_block.silu_mul(case.qkv)

    graph = captured(step)
    replayed = dict(made)
    for seed in (1, 2):
        generator = torch.Generator("cuda").manual_seed(seed)
        case.qkv.normal_(generator=generator)
        case.position.random_(50, generator=generator)
        case.place.copy_(torch.randperm(128, generator=generator, device="cuda")[:64])
        for target, source in zip(arguments, inputs(64, 9001, seed=seed), strict=True):
            target.copy_(source)
        caches = case.keys.clone(), case.values.clone()
        before = stream.clone()
        graph.replay()
        got = {name: x.clone() for name, x in replayed.items()}
        after = case.keys.clone(), case.values.clone(), stream.clone()
        for target, source in zip((case.keys, case.values, stream), (*caches, before), strict=True):
            target.copy_(source)
        step()
        assert all(torch.equal(got[name], made[name]) for name in made)
        assert all(torch.equal(a, b) for a, b in zip(after, (case.keys, case.values, stream), strict=True))


@pytest.mark.parametrize("num_rows", STATE_ROWS)
def test_captured_state_advances_like_the_reference(num_rows):
    """Five replays with different ids from one upload, and again from another upload."""
    page = 64
    held = make_state(num_rows, page, room=5).clone("cuda")
    ids, logps = (x.cuda() for x in make_drawn(num_rows, seed=0))
    made: list[Tensor] = []

    def step() -> None:
        made[:] = held.locate(locate, page)
        held.advance(advance, ids, logps)

    graph = captured(step)
    for seed in (1, 2):
        want = make_state(num_rows, page, room=5, seed=seed)
        held.copy_(want)
        for replay in range(5):
            drawn = make_drawn(num_rows, seed=10 * seed + replay)
            ids.copy_(drawn[0])
            logps.copy_(drawn[1])
            graph.replay()
            located = want.locate(locate_reference, page)
            assert all(torch.equal(got.cpu(), x) for got, x in zip(made, located, strict=True))
            want.advance(advance_reference, *drawn)
            assert_same(held, want)
        assert held.tick.tolist() == [6]


def test_captured_state_can_be_replayed_without_a_host_sync():
    """5,000 consecutive steps: if a warp read the tick too late, it would write to another line."""
    num_rows, steps = 2048, 5000
    held = make_state(num_rows, 64, "all live").clone("cuda")
    out_ids = torch.full((steps, num_rows), -5, device="cuda")
    out_logps = torch.full((steps, num_rows), -5.0, device="cuda")
    held = held._replace(out_ids=out_ids, out_logps=out_logps)
    ids, logps = (x.cuda() for x in make_drawn(num_rows, seed=0))
    graph = captured(lambda: held.advance(advance, ids, logps))
    out_ids.fill_(-5)
    out_logps.fill_(-5.0)
    held.tick.zero_()
    held.left.fill_(steps + 1)
    before = held.own_len.clone()
    for _ in range(steps):
        graph.replay()
    assert held.tick.tolist() == [steps] and (held.left == 1).all() and (held.own_len - before == steps).all()
    assert (out_ids == ids).all() and (out_logps == logps).all()
