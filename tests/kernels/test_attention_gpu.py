"""flex_attend on a GPU: values and gradients, number of graphs, memory, and a model under activation checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from kernels import attention, reference
from kernels.attention import TILE, Spans, block_mask, dense_mask, flex_attend, with_window
from tests.kernels.layouts import Layout, lay_out, strided, tree_spans

pytestmark = pytest.mark.gpu
DEVICE = "cuda"

PACKED = [[(700, []), (1, []), (900, []), (333, [])]]
SHARED = [[(500, [300, 17, 256, 400]), (200, [129])], [(900, [100] * 5)]]
TREES = [(300, [(200, [(17, []), (400, [(100, []), (33, [])])]), (129, [])]), (90, [])]
STRIDED = {"prompt_length": 512, "stride": 16, "context": 64, "generated": 8, "samples": 5}


def spans_of(name: str) -> Spans:
    layouts = {"packed": lay_out(PACKED, multiple=TILE), "shared": lay_out(SHARED, multiple=TILE)}
    layouts["strided"] = strided(**STRIDED, multiple=TILE)
    kind = name.removesuffix(", window")
    spans = tree_spans(TREES, multiple=TILE)[0] if kind == "tree" else layouts[kind].spans
    return on_device(with_window(spans, 100) if name.endswith("window") else spans)


def on_device(spans: Spans) -> Spans:
    return tuple(bound.to(DEVICE) for bound in spans)


def draw_inputs(rows: int, length: int, heads: tuple[int, int, int], dtype=torch.bfloat16) -> list[Tensor]:
    """Return query, key, value as views of (R, T, H, K), as in models, and the gradient of the output."""
    query_heads, key_heads, size = heads
    draw = torch.Generator(DEVICE).manual_seed(length)
    shapes = [(rows, length, number, size) for number in (query_heads, key_heads, key_heads, query_heads)]
    made = [torch.randn(shape, generator=draw, device=DEVICE, dtype=dtype).transpose(1, 2) for shape in shapes]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def dense_attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Tensor:
    """Attend like transformers' sdpa with a mask: repeated key heads, torch's choice of backend."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(spans, key.shape[2]), scale=scale)


def with_gradients(out: Tensor, inputs: list[Tensor], weight: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, inputs, weight.to(out.dtype))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("packed", (16, 8, 128)),
        ("shared", (16, 8, 128)),
        ("strided", (16, 8, 128)),
        ("shared, window", (16, 8, 128)),
        ("packed", (8, 2, 64)),
        ("shared", (8, 2, 64)),
        ("strided", (8, 2, 64)),
        ("strided", (4, 4, 128)),
        ("tree", (16, 8, 128)),
        ("tree, window", (8, 2, 64)),
    ],
)
def test_flex_attend_is_as_exact_as_dense_sdpa(name, heads):
    spans = spans_of(name)
    rows, length = spans[0].shape
    *inputs, weight = draw_inputs(rows, length, heads)
    scale = heads[2] ** -0.5
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    truth = reference.attention(*exact_inputs, dense_mask(spans, length), scale=scale)
    truth = with_gradients(truth, exact_inputs, weight)
    dense = with_gradients(dense_attend(*inputs, spans, scale), inputs, weight)
    flex = with_gradients(flex_attend(*inputs, block_mask(spans, length), scale=scale), inputs, weight)
    for quantity, exact in truth.items():
        ours, theirs = error(flex[quantity], exact), error(dense[quantity], exact)
        print(f"{name} {heads} {quantity}: flex {ours:.2e}, dense sdpa {theirs:.2e}")
        assert ours <= 1.5 * theirs, (quantity, ours, theirs)


@pytest.mark.parametrize(
    ("heads", "softcap", "sinks", "dtype"),
    [
        ((16, 2, 64), None, True, torch.bfloat16),  # gpt-oss
        ((8, 4, 256), 50.0, False, torch.bfloat16),  # Gemma 2
        ((8, 8, 96), None, False, torch.bfloat16),
        ((8, 2, 80), 5.0, True, torch.float32),
    ],
)
def test_flex_attend_with_capped_scores_sinks_and_odd_heads(heads, softcap, sinks, dtype):
    for name in ("shared", "shared, window"):
        spans = spans_of(name)
        rows, length = spans[0].shape
        *inputs, weight = draw_inputs(rows, length, heads, dtype)
        logits = torch.linspace(-4, 4, heads[0], device=DEVICE).requires_grad_() if sinks else None
        scale, leaves = heads[2] ** -0.5, [*inputs, logits] if sinks else inputs
        exact = [x.detach().double().requires_grad_() for x in leaves]
        options = {"scale": scale, "softcap": softcap}
        truth = reference.attention(*exact[:3], dense_mask(spans, length), **options, sinks=exact[3] if sinks else None)
        got = flex_attend(*inputs, block_mask(spans, length), **options, sinks=logits)
        with torch.no_grad():
            assert torch.equal(flex_attend(*inputs, block_mask(spans, length), **options, sinks=logits), got)
        pairs = [(got, truth), *zip(torch.autograd.grad(got, leaves, weight),
                                    torch.autograd.grad(truth, exact, weight.double()), strict=True)]  # fmt: skip
        off = [error(one.detach(), other.detach()) for one, other in pairs]
        print(f"{heads} {softcap} {name} {dtype}: {' '.join(f'{x:.1e}' for x in off)}")
        assert max(off) < (1e-2 if dtype == torch.bfloat16 else 1e-4), off


def random_spans(length: int, seed: int) -> Spans:
    """Fill a row of whole tiles with documents with shared prompts of random lengths."""
    draw = torch.Generator().manual_seed(seed)
    documents, left = [], length - 1
    while left > 60:
        prompt, *others = torch.randint(1, left // 4, (4,), generator=draw).tolist()
        documents.append((prompt, others))
        left -= prompt + sum(others)
    return on_device(lay_out([documents], multiple=length).spans)


def test_new_lengths_and_masks_do_not_recompile():
    heads = (16, 8, 128)

    def run(length: int) -> None:
        *inputs, weight = draw_inputs(1, length, heads)
        spans = random_spans(length, seed=length)
        mask = block_mask(spans, length)
        got = flex_attend(*inputs, mask, scale=0.125)
        got.backward(weight)
        with torch.no_grad():
            again = flex_attend(*inputs, mask, scale=0.125)
            want = dense_attend(*inputs, spans, 0.125)
        assert error(again, want) < 1e-2 and error(got, want) < 1e-2
        assert all(x.grad.isfinite().all() for x in inputs)

    run(1024)  # as many tiles as key heads: equal by chance, so they must not be tied together
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (512, 2048, 1280, 4096, 896, 3072):
            run(length)


def test_memory_is_not_quadratic_in_length():
    # At 16k tokens a byte mask would take 256 MiB; these inputs take 8.
    length, heads = 1 << 14, (2, 1, 64)
    *inputs, weight = draw_inputs(1, length, heads)
    spans = random_spans(length, seed=0)

    def run() -> None:
        flex_attend(*inputs, block_mask(spans, length), scale=0.125).backward(weight)

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    print(f"peak over inputs {peak:.1f} MiB")
    assert peak < 64


def test_mask_and_attention_do_not_sync_with_the_host():
    spans = spans_of("packed")
    rows, length = spans[0].shape
    *inputs, _ = draw_inputs(rows, length, (16, 8, 128))
    first = flex_attend(*inputs, block_mask(spans, length), scale=0.125)
    torch.cuda.set_sync_debug_mode("error")  # a host sync raises
    try:
        second = flex_attend(*inputs, block_mask(spans, length), scale=0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


def test_flex_attend_rejects_odd_lengths_and_wrong_masks():
    spans = on_device(lay_out([[(100, [30])]]).spans)
    *inputs, _ = draw_inputs(1, 130, (4, 2, 64))
    with pytest.raises(ValueError, match=r"lengths=\(130, 130\): .*128"):
        flex_attend(*inputs, block_mask(spans, 130), scale=0.125)
    *inputs, _ = draw_inputs(1, 256, (4, 2, 64))
    with pytest.raises(ValueError, match=r"block_mask.shape=\(1, 1, 384, 384\)"):
        flex_attend(*inputs, block_mask(random_spans(384, 0), 384), scale=0.125)


def test_flex_attend_inside_a_compiled_function():
    spans = spans_of("strided")
    rows, length = spans[0].shape
    query, key, value, _ = (x.detach() for x in draw_inputs(rows, length, (16, 8, 128)))
    mask = block_mask(spans, length)

    @torch.compile(dynamic=True, fullgraph=True)
    def doubled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2 * flex_attend(query, key, value, mask, scale=0.125)

    want = 2 * flex_attend(query, key, value, mask, scale=0.125)
    assert error(doubled(query, key, value), want) < 1e-3


# Through a model


def flex_function(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_kwargs):
    assert isinstance(attention_mask, BlockMask)
    return flex_attend(query, key, value, attention_mask, scale=scaling).transpose(1, 2).contiguous(), None


def make_model(dtype: torch.dtype):
    from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3Model

    AttentionInterface.register("test_flex", flex_function)
    AttentionMaskInterface.register("test_flex", AttentionMaskInterface()["sdpa"])
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=4096, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[DEVICE] if DEVICE == "cuda" else []):
        torch.manual_seed(0)
        model = Qwen3Model(config)
        for parameter in model.parameters():
            # Larger than the default init, so that a state depends measurably on every token it sees.
            torch.nn.init.normal_(parameter, std=0.08) if parameter.dim() == 2 else None
    return model.to(DEVICE, dtype)


def row_states(model, ids: Tensor, layout: Layout) -> Tensor:  # (T, D) of a batch of one row
    mask = block_mask(on_device(layout.spans), ids.shape[1])
    position_ids = layout.position_ids.to(DEVICE)
    return model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).last_hidden_state[0]


def separate_states(model, ids: Tensor, layout: Layout) -> Tensor:  # (T, D)
    """Run every prompt and continuation separately after its prefix, and arrange the states as in the row."""
    parts, places = [], []
    for at, prefix in layout.sequences():
        parts.append(model(ids[:, at], use_cache=False).last_hidden_state[0, prefix:])
        places += at[prefix:]
    return torch.cat(parts)[torch.tensor(places).argsort().to(DEVICE)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_model_over_rows_is_as_exact_as_separate_runs(checkpointing):
    # Two lengths whose backwards run after both forwards: recomputation must not use the other length's graph or mask.
    layouts = [
        lay_out([[(200, [60, 1, 33]), (90, [])]], multiple=TILE),
        strided(prompt_length=128, stride=16, context=32, generated=4, samples=3, multiple=TILE),
    ]
    draw = torch.Generator(DEVICE).manual_seed(1)
    ids = [torch.randint(512, layout.document.shape, generator=draw, device=DEVICE) for layout in layouts]
    weights = [torch.randn(x.shape[1], 256, generator=draw, device=DEVICE) for x in ids]

    def run(model, states) -> tuple[Tensor, Tensor]:
        hidden = [states(model, x, layout) for x, layout in zip(ids, layouts, strict=True)]
        loss = sum((state.float() * weight).sum() for state, weight in zip(hidden, weights, strict=True))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat(hidden).detach(), torch.cat([gradient.flatten() for gradient in gradients])

    half = make_model(torch.bfloat16)
    exact = copy.deepcopy(half).double()  # the same rounded weights
    truth = run(exact, separate_states)
    apart = run(half, separate_states)
    half.set_attn_implementation("test_flex")
    if checkpointing:
        half.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        half.train()
    together = run(half, row_states)
    for quantity, one, other, true in zip(("states", "gradients"), together, apart, truth, strict=True):
        ours, theirs = error(one, true), error(other, true)
        print(f"{quantity}: row with flex {ours:.2e}, separate runs {theirs:.2e}")
        assert ours <= 1.5 * theirs, (quantity, ours, theirs)


@pytest.mark.parametrize("name", ["packed", "shared", "shared, window"])
def test_slices_of_queries_over_all_keys_match_the_row(name):
    """As in context parallelism: queries from both ends, keys and values as views of one tensor."""
    spans = spans_of(name)
    rows, length = spans[0].shape
    query, key, value, weight = draw_inputs(rows, length, (4, 2, 64))
    out = flex_attend(query, key, value, block_mask(spans, length), scale=0.125)
    whole = with_gradients(out, [query, key, value], weight)
    piece = -(-length // (2 * TILE)) * TILE // 2
    sums: dict[str, Tensor] = {"dk": torch.zeros_like(key), "dv": torch.zeros_like(value)}
    for own in range(2):
        steps = torch.arange(piece, device=DEVICE)
        places = torch.cat([own * piece + steps, (3 - own) * piece + steps])
        at, real = places.clamp(max=length - 1), places < length
        fill = (0, 0, places, places + 1)
        cut = tuple(torch.where(real, bound[:, at], other) for bound, other in zip(spans, fill, strict=True))
        both = torch.nn.functional.pad(torch.cat([key, value], dim=-1), (0, 0, 0, 4 * piece - length))
        keys, values = both.split([64, 64], dim=-1)
        part = flex_attend(query[:, :, at], keys, values, block_mask(cut, 4 * piece), scale=0.125)
        real_weight = weight[:, :, at] * real.view(1, 1, -1, 1)
        found = with_gradients(part, [query, key, value], real_weight)
        assert error(part[:, :, real], whole["out"][:, :, at[real]]) < 1e-2
        assert error(found["dq"][:, :, at[real]], whole["dq"][:, :, at[real]]) < 1e-2
        sums = {side: total + found[side] for side, total in sums.items()}
    assert error(sums["dk"], whole["dk"]) < 2e-2 and error(sums["dv"], whole["dv"]) < 2e-2


@pytest.mark.parametrize(("heads", "softcap"), [((16, 8, 128), None), ((8, 8, 64), 30.0)])
def test_flash_matches_triton_where_it_is_installed(heads, softcap):
    if obstacle := attention.flash_obstacle(heads[2]):
        pytest.skip(obstacle)
    spans = spans_of("shared")
    rows, length = spans[0].shape
    *inputs, weight = draw_inputs(rows, length, heads)
    assert attention.can_flash(inputs[0], inputs[2], None) and len(spans) == 4
    found = []
    for on in (False, True):
        attention.use_flash(on)
        try:
            out = flex_attend(*inputs, block_mask(spans, length), scale=heads[2] ** -0.5, softcap=softcap)
            found.append(with_gradients(out, inputs, weight))
        finally:
            attention.use_flash(False)
    assert all(error(found[1][name], exact) < 0.02 for name, exact in found[0].items())
