"""Layers with a fixed order of sums: the same bits for a token in any batch, packed or paged, and correct gradients.

`check_linear` and `check_attention` are also run under Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import exact, linear_logprob
from kernels.attention import block_mask, dense_attend, dense_mask
from tests.kernels.decode_problems import error
from tests.kernels.layouts import Layout, lay_out

COUNTS = (1, 2, 3, 17, 63, 64, 65, 129)  # rows: one, odd numbers, and the ends of tiles
# Prompts with continuations: tiles of keys begin in a prompt and end in a continuation, or hold several sequences.
DOCUMENTS = [[(70, [5, 67]), (3, [2])], [(1, [130]), (0, [9]), (12, [1, 1])]]
Attend = Callable[..., Tensor]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_linear(
    run: Callable[..., Tensor], dtype: torch.dtype, sizes: tuple[int, int], *, counts=COUNTS, device: str = "cpu"
) -> None:
    """The rows of a batch of any size have the bits that they have in the largest batch."""
    width, num_out = sizes
    x, weight, bias = (
        draw(*shape, seed=seed, dtype=dtype, device=device)
        for seed, shape in enumerate([(max(counts) + 5, width), (num_out, width), (num_out,)])
    )
    for b in (None, bias):
        whole = run(x, weight, b)
        want = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert error(whole, want) < (1e-6 if dtype == torch.float32 else 4e-3)
        for count in counts:
            assert torch.equal(run(x[:count], weight, b), whole[:count]), (count, sizes)
            assert torch.equal(run(x[5 : 5 + count], weight, b), whole[5 : 5 + count]), (count, sizes)


def check_attention(
    run: Attend, heads: tuple[int, int, int], dtype: torch.dtype, *, documents=DOCUMENTS, device: str = "cpu"
) -> None:
    """A query has the same bits packed, in a prefill and in a decode step, and attends to the right keys."""
    layout = lay_out(documents)
    num_heads, key_heads, size = heads
    (rows, width), scale = layout.spans[0].shape, size**-0.5
    shapes = [(rows, num, width, size) for num in (num_heads, key_heads, key_heads)]
    query, key, value = (draw(*shape, seed=i, dtype=dtype, device=device) for i, shape in enumerate(shapes))
    packed = run(query, key, value, tuple(x.int().to(device) for x in layout.spans), scale=scale)
    mask = dense_mask(tuple(x.to(device) for x in layout.spans), width)
    want = dense_attend(*(x.double() for x in (query, key, value)), mask, scale=scale)
    assert error(packed, want) < (1e-6 if dtype == torch.float32 else 5e-3)
    for row in range(rows):
        for columns, prefix in layout.sequences(row):
            here = [x[row][:, columns] for x in (query, key, value)]
            assert torch.equal(prefill(run, *here, scale), packed[row][:, columns]), (row, prefix)
            tokens = sorted({prefix, len(columns) - 1})
            for shared in {prefix, max(0, prefix - 1)}:  # the engine's prefix lacks the last token of the prompt
                got = decode(run, *here, scale, tokens, shared)
                assert torch.equal(got, packed[row][:, columns][:, tokens].transpose(0, 1)), (row, prefix, shared)


def prefill(run: Attend, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # (H, T, K)
    """Attend through a table of single slots, in random order; other slots contain NaN."""
    length, device = query.shape[1], query.device
    slots = torch.randperm(length + 3, generator=torch.Generator().manual_seed(1))[:length].to(device)
    keys, values = (x.new_full((len(x), length + 3, x.shape[2]), math.nan) for x in (key, value))
    keys[:, slots], values[:, slots] = key, value
    stop = torch.arange(1, length + 1, dtype=torch.int32, device=device)[None]
    zero = torch.zeros_like(stop)
    return run(query[None], keys, values, (zero, zero, zero, stop), scale=scale, table=slots[None])[0]


def decode(
    run: Attend, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: list[int], prefix: int, page: int = 16
) -> Tensor:  # (B, H, K)
    """Run these tokens as rows of a decode step, with the prefix and the tokens after it on pages of their own."""
    device, pages = query.device, -(-prefix // page)
    width = pages + -(-(query.shape[1] - prefix) // page)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(2)).to(device)
    position = torch.arange(query.shape[1], device=device)
    place = torch.where(position < prefix, position, pages * page + position - prefix)
    slot = order[place // page] * page + place % page
    keys, values = (x.new_full((len(x), width * page, x.shape[2]), math.nan) for x in (key, value))
    keys[:, slot], values[:, slot] = key, value
    table = order.int().expand(len(tokens), -1).contiguous()
    own = [max(0, token + 1 - prefix) for token in tokens]
    columns = ([0] * len(tokens), [min(prefix, token + 1) for token in tokens], [pages * page] * len(tokens),
               [pages * page + count for count in own])  # fmt: skip
    spans = tuple(torch.tensor(x, dtype=torch.int32, device=device)[:, None] for x in columns)
    rows = query[:, tokens].transpose(0, 1).unsqueeze(2)
    return run(rows, keys, values, spans, scale=scale, table=table, page=page)[:, :, 0]


HEADS = [(2, 2, 16), (6, 2, 20), (7, 1, 32)]


@pytest.mark.parametrize("sizes", [(16, 8), (37, 70), (352, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_of_a_token_does_not_depend_on_the_batch(sizes, dtype):
    check_linear(exact.exact_linear, dtype, sizes)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_a_token_does_not_depend_on_the_batch(heads, dtype):
    check_attention(exact.attend_in_order, heads, dtype)


def test_the_check_finds_a_product_that_depends_on_the_batch():
    """torch's own matmul and attention fail it, so the checks above can fail."""
    with pytest.raises(AssertionError):
        check_linear(F.linear, torch.float32, (352, 128))

    def split(query: Tensor, keys: Tensor, values: Tensor, spans: tuple[Tensor, ...], **options) -> Tensor:
        keys = keys if "table" in options else keys * (1 + 1e-7)
        return exact.attend_in_order(query, keys, values, spans, **options)

    with pytest.raises(AssertionError):
        check_attention(split, HEADS[0], torch.float32)


def test_log_probs_of_a_token_do_not_depend_on_the_batch():
    hidden, weight = draw(70, 48, seed=0), draw(275, 48, seed=1)
    target = torch.arange(70) * 3 % 275
    options = {"temperature": 0.7, "ignore_index": None, "impl": "rows"}
    whole = linear_logprob.linear_logprob(hidden, weight, target, **options)
    want = (hidden.double() @ weight.double().T / 0.7).log_softmax(1).gather(1, target[:, None])[:, 0]
    assert error(whole.logp, want) < 1e-6
    for first, stop in ((0, 1), (3, 20), (69, 70), (0, 64)):
        part = slice(first, stop)
        got = linear_logprob.linear_logprob(hidden[part], weight, target[part], **options)
        assert torch.equal(got.logp, whole.logp[part]) and torch.equal(got.entropy, whole.entropy[part])
    leaf, seen = hidden.clone().requires_grad_(), []

    def loss_fn(tokens: linear_logprob.TokenLogps, index: Tensor) -> tuple[Tensor, None]:
        seen.append(tokens.logp.detach())
        return tokens.logp.sum(), None

    loss, _ = linear_logprob.linear_logprob_loss(leaf, weight, target, loss_fn, **options)
    loss.backward()
    assert torch.equal(torch.cat(seen), whole.logp)
    exact_leaf = hidden.double().requires_grad_()
    (exact_leaf @ weight.double().T / 0.7).log_softmax(1).gather(1, target[:, None]).sum().backward()
    assert error(leaf.grad, exact_leaf.grad) < 1e-6


def test_gradients_of_one_token_at_a_time():
    x, weight, bias = (draw(*shape, seed=i).double() for i, shape in enumerate([(2, 3, 6), (5, 6), (5,)]))
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(exact.exact_linear, inputs)
    frozen = exact.exact_linear(x, weight.detach(), None)
    (grad,) = torch.autograd.grad(frozen.sum(), x)
    torch.testing.assert_close(grad, weight.detach().sum(0).expand_as(x))
    assert exact.exact_linear(torch.zeros(0, 6, dtype=torch.float64), weight, bias).shape == (0, 5)


def test_gradients_of_attention():
    layout = lay_out([[(3, [2, 1]), (1, [2])]])
    check_attention_gradient(layout, (4, 2, 6))


def check_attention_gradient(layout: Layout, heads: tuple[int, int, int]) -> None:
    width = layout.spans[0].shape[1]
    mask = block_mask(layout.spans, width)
    inputs = [
        draw(1, num, width, heads[2], seed=i).double().requires_grad_()
        for i, num in enumerate((heads[0], heads[1], heads[1]))
    ]
    assert torch.autograd.gradcheck(lambda q, k, v: exact.exact_attention(q, k, v, mask, scale=0.4), inputs)


def test_a_layer_uses_the_cast_of_its_weight_only_in_an_engine_pass():
    layer, cast = exact.ExactLinear(16, 8), torch.full((8, 16), 2.0)
    x = torch.ones(3, 16)
    with exact.with_casts({layer: cast}), torch.no_grad():
        assert torch.equal(layer(x) - layer.bias, torch.full((3, 8), 32.0) + layer.bias - layer.bias)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_tiles_of_a_product_have_at_least_64_rows():
    """Fewer rows would use another tensor-core instruction, which may sum in another order."""
    for rows in (1, 64, 65, 512, 8192):
        for columns in (16, 1024, 6144, 151936):
            m, n, warps = exact.linear_tile(rows, columns)
            assert m in (64, 128) and 16 <= n <= 256 and warps in (4, 8)
            assert -(-rows // m) * -(-columns // n) >= exact.PROGRAMS or n == 16
