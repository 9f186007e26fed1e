"""Triton kernels under Triton's interpreter: small odd sizes on a CPU, against float64.

The interpreter is slow, so sizes are small. Checks of threads, compilation and autocast run with impl=torch and on a
GPU. Recomputing tokens with a very unlikely target could hide a broken kernel, so it fails every test that does not use
the fixture `recomputed`. Unwritten memory contains NaN.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels
import kernels.linear_logprob as fast
from kernels import adamw
from tests.kernels import heads
from tests.kernels.head_checks import CHECKS
from tests.kernels.head_numerics import NUMERICS
from tests.kernels.heads import ENTRIES, OPTIONS, TRITON_16, TRITON_32, Case, make
from tests.kernels.interpreter import IS_ON, interpreted
from tests.kernels.test_adamw import (
    RATES,
    ParamTensors,
    check_against_exact,
    check_guard,
    check_launch,
    check_unaligned,
    many_updates,
    problem,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("nan_in_unwritten_memory"),
]
PATHS = {"float32": TRITON_32, "bfloat16": TRITON_16}


@pytest.fixture(autouse=True)
def recomputed(monkeypatch, request) -> list[int]:
    return heads.count_recomputed(monkeypatch, request) if IS_ON else []  # off: the test runs in a subprocess


# Values and gradients


@interpreted
@pytest.mark.parametrize(
    ("loss", "options"), [("logp", "plain"), ("entropy", "softcap"), ("both", "temperature"), ("both", "all")]
)
def test_options(loss, options):
    """Two vocabulary blocks of 64."""
    bias = loss != "logp"
    heads.check(make(3, 16, 67, path=TRITON_32, bias=bias), TRITON_32, loss=loss, **OPTIONS[options])


@interpreted
@pytest.mark.parametrize("options", ["plain", "all"])
def test_without_entropy(options):
    heads.check(make(3, 16, 37, path=TRITON_32), TRITON_32, loss="logp", entropy=False, **OPTIONS[options])


SIZES = [("float32", 1, 16, 2), ("float32", 3, 40, 131), ("float32", 33, 72, 7), ("bfloat16", 3, 72, 259)]


@interpreted
@pytest.mark.parametrize(("path", "n", "d", "v"), SIZES, ids=lambda x: str(x))
def test_sizes(path, n, d, v):
    """Tiles of tokens x vocabulary x width: 32 x 64 x 32 in float32, 128 x 256 x 64 in bfloat16; most are partial."""
    heads.check(make(n, d, v, path=PATHS[path], bias=v != 131), PATHS[path], **OPTIONS["all" if v == 259 else "plain"])


KERNEL_CHECKS = (  # other checks concern code that all implementations share
    "no_tokens", "views", "ignored_tokens", "all_tokens_ignored", "tokens_without_a_gradient_are_skipped",
    "tokens_without_a_gradient_are_not_skipped", "nan_tokens_without_a_gradient", "expanded_gradient",
    "frozen_parts",
)  # fmt: skip


@interpreted
@pytest.mark.parametrize("check", KERNEL_CHECKS)
def test_check(check):
    CHECKS[check](TRITON_32)


@interpreted
@pytest.mark.parametrize(("path", "check"), [*(("float32", x) for x in NUMERICS), ("bfloat16", "confident_targets")])
def test_numerics(path, check):
    NUMERICS[check](PATHS[path])


@interpreted
def test_float32_head_of_bfloat16_hidden_states():
    """The weight gradient is float32 and is never rounded to bfloat16."""
    case = make(13, 16, 37, path=TRITON_16)
    want = heads.truth(case)
    for entry in ENTRIES.values():
        got = entry(case._replace(weight=case.weight.float(), bias=case.bias.float()), TRITON_16)
        assert [got[name].dtype for name in heads.NAMES] == [torch.bfloat16, torch.float32, torch.float32]
        assert torch.equal(got["logp"], heads.token_logps(case, TRITON_16).logp)
        heads.assert_same(got, want, TRITON_16)
        assert (got["weight"] != got["weight"].bfloat16()).float().mean() > 0.9


# Chunks and order

CHUNK = 10  # splits 37 tokens of width 16 into four chunks


def in_four() -> contextlib.AbstractContextManager:
    return heads.in_chunks(make(0, 16, 11), TRITON_32, size=CHUNK)


@interpreted
@pytest.mark.parametrize(("path", "loss"), [("float32", "both"), ("bfloat16", "logp")])
def test_chunks_do_not_change_the_result(path, loss):
    """One full chunk, two with gaps, one without gradients. The chunk after a full chunk is assumed to be full."""
    path = PATHS[path]
    case = make(37, 16, 11, path=path)
    case.c[:, 12:28:2] = 0
    case.c[:, 30:] = 0
    want = heads.truth(case, loss=loss)
    with in_four(), heads.counted_tokens(path) as counts:
        chunked = {name: entry(case, path, loss=loss) for name, entry in ENTRIES.items()}
    active = (case.c != 0).any(dim=0).split(CHUNK)
    assert counts[0] == CHUNK and counts[1] in (CHUNK, active[1].sum()) and counts[2:] == [active[2].sum(), 0]
    logp = heads.token_logps(case, path).logp
    for name, got in chunked.items():
        assert torch.equal(got["logp"], logp), name
        assert (got["hidden"][30:] == 0).all() and (got["hidden"][12:28:2] == 0).all()
        heads.assert_same(got, want, path, what=name)


@interpreted
@pytest.mark.parametrize("n", [1, 130])
def test_hidden_gradient_is_computed_in_multiples_of_128_tokens(n, monkeypatch):
    """Otherwise cuBLAS would load another kernel for every token count."""
    from kernels import linear_logprob_triton as module

    rows: list[int] = []
    product, add_product = module._product, module._add_product
    monkeypatch.setattr(module, "_product", lambda a, b: rows.append(len(a)) or product(a, b))
    monkeypatch.setattr(module, "_add_product", lambda t, a, b: rows.append(len(a)) or add_product(t, a, b))
    case = make(n, 16, 11, path=TRITON_32)
    want = heads.truth(case, loss="logp")
    for name, entry in ENTRIES.items():
        rows.clear()
        heads.assert_same(entry(case, TRITON_32, loss="logp"), want, TRITON_32, what=name)
        assert set(rows) == {11, 128 if n <= 128 else 256}, name  # d weight, d hidden


@interpreted
def test_nan_token_without_a_gradient_does_not_spread_in_a_chunk_assumed_full():
    case = make(37, 16, 11, path=TRITON_32)
    case.c[:, 14] = 0
    want = heads.truth(case)
    case.hidden[14] = math.nan
    with in_four():
        got = heads.one_pass(case, TRITON_32)
    assert (got["hidden"][14] == 0).all()
    heads.assert_same({key: got[key] for key in heads.NAMES}, want, TRITON_32)


@interpreted
@pytest.mark.parametrize(("path", "n"), [("float32", 35), ("bfloat16", 9)])
def test_order_and_other_tokens_do_not_change_a_log_prob(path, n):
    path = PATHS[path]
    case = make(n, 40, 131, path=path)
    logp, entropy = heads.token_logps(case, path)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    for index in (order, slice(0, 1), slice(n - 5, n), order[:7]):
        part = heads.token_logps(case.select(index), path)
        assert torch.equal(part.logp, logp[index]) and torch.equal(part.entropy, entropy[index])


@interpreted
def test_active_rows_move_to_the_front():
    from kernels.linear_logprob_triton import _pack_active

    generator = torch.Generator().manual_seed(5)
    for density in (0.0, 0.1, 0.5, 0.9, 1.0):
        for n in (1, 2, 7, 131):
            active = torch.rand(n, generator=generator) < density
            count = int(active.sum())
            source = _pack_active(active)[:count]
            assert sorted(source.tolist()) == active.nonzero().squeeze(1).tolist(), (density, n)
            moved = source != torch.arange(count)
            assert (source[moved] >= count).all() and not active[:count][moved].any()  # only into gaps


@interpreted
def test_gradients_are_scaled_in_place():
    """linear_logprob_loss uses this on a GPU for the incoming gradient."""
    from kernels.linear_logprob_triton import scale_unless_one

    for dtype in (torch.bfloat16, torch.float32):
        for factor in (1.0, 1 / 3):
            x = torch.linspace(-2, 2, 33).to(dtype)
            want = x.clone() if factor == 1 else x.float() * factor
            assert scale_unless_one(x, torch.tensor(factor)) is x
            heads.is_close(x, want, 1e-2 if dtype == torch.bfloat16 else 1e-7, absolute=0)


# Targets so unlikely that exponentials overflow


def unlikely(path: heads.Path, first: float = -60.0) -> Case:
    """Build a case with ordinary tokens and tokens with log-probs from about -60 to -300."""
    case = make(13, 16, 37, path=path)
    lift = torch.zeros(13)
    lift[[1, 4, 5, 9, 12]] = torch.tensor([first, -75.0, -110.0, -200.0, -260.0])
    return heads.lifted(case, lift)


CAPPED = {"softcap": 150.0, "temperature": 0.8}
UNLIKELY = [("float32", "entropy", {}), ("float32", "both", CAPPED), ("bfloat16", "both", {})]


@interpreted
@pytest.mark.parametrize(("path", "loss", "options"), UNLIKELY, ids=lambda x: "softcap" if x is CAPPED else str(x))
def test_unlikely_targets(recomputed, path, loss, options):
    path = PATHS[path]
    case = unlikely(path)
    want = heads.truth(case, loss=loss, **options)
    limit = -99 * math.log(2)  # kernels.linear_logprob_triton.OVERFLOW_LIMIT, as a log-prob
    expected = int((want["logp"] < limit).sum())
    assert 3 <= expected <= 5 and want["logp"].min() < -200
    # A step of fp32 at logits of 250 is 2e-5. The log of a probability rounded to bfloat16 is off by up to 0.008, which
    # matters if the entropy is small.
    rounded = path is TRITON_16 and loss != "logp"
    loose = path._replace(values=1e-4, gradients=0.1 if rounded else max(path.gradients, 5e-4))
    tokens = heads.token_logps(case, path, **options)
    assert recomputed == [expected]
    heads.assert_same(tokens._asdict(), want, loose)
    for name, entry in ENTRIES.items():
        recomputed.clear()
        got = entry(case, path, loss=loss, **options)
        assert recomputed == [expected], name
        heads.assert_same(got, want, loose, what=name)
        heads.is_close(got["logp"], tokens.logp, 1e-6, what=name)


@interpreted
@pytest.mark.parametrize("chunk", [1, 3])
def test_unlikely_targets_in_any_chunk(recomputed, chunk):
    """Chunk 1 follows a full chunk."""
    case = make(37, 16, 11, path=TRITON_32)
    lift = torch.zeros(37)
    lift[CHUNK * chunk + 3] = -150.0
    case = heads.lifted(case, lift)
    want = heads.truth(case)
    with in_four():
        got = heads.one_pass(case, TRITON_32)
    assert recomputed == [1]
    heads.assert_same(got, want, TRITON_32._replace(values=1e-4, gradients=1e-4))
    heads.is_close(got["loss"], (case.c * torch.stack([want["logp"], want["entropy"]])).sum(), 1e-5)


@interpreted
def test_loss_function_runs_once_per_chunk_with_recomputed_tokens(recomputed):
    case = make(37, 16, 11, path=TRITON_32)
    lift = torch.zeros(37)
    lift[[5, 24]] = -150.0
    case = heads.lifted(case, lift)
    leaf = case.hidden.clone().requires_grad_()

    def loss_fn(tokens: fast.TokenLogps, index: torch.Tensor):
        return tokens.logp.sum(), (index, tokens.logp.detach().clone())

    with in_four():
        total, extra = fast.linear_logprob_loss(leaf, case.weight, case.target, loss_fn, impl="triton", bias=case.bias)
    assert torch.equal(torch.cat([index for index, _ in extra]), torch.arange(37)) and len(extra) == 4
    logp = torch.cat([logp for _, logp in extra])
    heads.is_close(logp, heads.truth(case)["logp"], 1e-6)
    heads.is_close(total.detach(), logp.sum(), 1e-6)
    assert recomputed == [1, 1]


@interpreted
def test_unlikely_targets_of_a_frozen_head(recomputed):
    case = unlikely(TRITON_32)
    want = heads.truth(case, loss="logp")
    for name, entry in ENTRIES.items():
        heads.assert_same(entry(case, TRITON_32, loss="logp", needs=("hidden",)), want, TRITON_32, what=name)
    assert sum(recomputed) > 0


@interpreted
def test_unlikely_targets_without_a_gradient(recomputed):
    """Their sums overflow, and other rows of the chunk replace them."""
    case = unlikely(TRITON_32)
    case.c[:, [0, 4, 9]] = 0
    want = heads.truth(case)
    for name, entry in ENTRIES.items():
        got = entry(case, TRITON_32)
        assert (got["hidden"][[0, 4, 9]] == 0).all()
        heads.assert_same(got, want, TRITON_32, what=name)
    assert sum(recomputed) > 0


@interpreted
def test_log_probs_around_the_limit(recomputed):
    """Log-prob and gradient are continuous at the limit beyond which tokens are recomputed."""
    n = 16
    logits = torch.zeros(n, 37)
    target = torch.arange(n)
    logits[torch.arange(n), target] = -torch.linspace(57, 72, n).round()
    case = heads.table(logits, target, TRITON_32)
    want = heads.truth(case)
    for name, entry in ENTRIES.items():
        recomputed.clear()
        heads.assert_same(entry(case, TRITON_32), want, TRITON_32, what=name)
        assert len(recomputed) == 1 and 0 < recomputed[0] < n


# Errors and NaN


@interpreted
def test_unsupported_inputs_are_rejected():
    case = make(5, 16, 37, path=TRITON_16)
    for wrong, message in (
        ({"hidden": case.hidden.half()}, "dtype torch.float16:"),
        ({"hidden": case.hidden.double()}, "dtype torch.float64:"),
        ({"hidden": case.hidden[:, :12], "weight": case.weight[:, :12]}, "width 12: .* 16 bytes"),
    ):
        for entry in ENTRIES.values():
            with pytest.raises(ValueError, match=f"impl=triton: {message}.*; use impl=torch"):
                entry(case._replace(**wrong), TRITON_16)


@interpreted
def test_unchecked_target_outside_the_vocabulary_is_nan():
    case = make(5, 16, 37, path=TRITON_32)
    want = heads.token_logps(case, TRITON_32).logp
    case.target[[0, 1, 3, 4]] = torch.tensor([-100, -1, 37, 1 << 40])
    tokens = heads.token_logps(case, TRITON_32, ignore_index=None)
    assert tokens.logp.isnan().tolist() == tokens.entropy.isnan().tolist() == [True, True, False, True, True]
    assert tokens.logp[2] == want[2]


# Deliberate errors

ERRORS = {
    "sign": ("-k * g / t", "k * g / t"),
    "column": ("(column[None, :] == target_column[:, None])", "(column[None, :] == target_column[:, None] + 1)"),
    "last block": ("num_n = tl.cdiv(vocab, BLOCK_N)", "num_n = vocab // BLOCK_N"),
}


@interpreted
@pytest.mark.parametrize("error", ERRORS)
def test_deliberate_error_is_detected(error, tmp_path, monkeypatch):
    source = Path(sys.modules["kernels.linear_logprob_triton"].__file__).read_text()
    right, wrong = ERRORS[error]
    assert source.count(right) == 1, f"{right}: not in kernels/linear_logprob_triton.py; update ERRORS"
    source = source.replace(right, wrong)
    file = tmp_path / "altered_triton.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("altered_triton", file)
    altered = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(altered)
    monkeypatch.setattr(kernels, "linear_logprob_triton", altered)
    case = make(5, 16, 67, path=TRITON_32)
    assert fast._pick(*case[:4], 1.0, None, 1.0, "triton") is altered.TritonHead
    for entry in ENTRIES.values():
        with pytest.raises(AssertionError, match="off by"):
            heads.assert_same(entry(case, TRITON_32, loss="logp"), heads.truth(case, loss="logp"), TRITON_32)


# AdamW


def kernel_step(*update) -> None:
    adamw.kernel_step_all([adamw.Update(*update)])


@interpreted
def test_adamw_rounds_to_a_neighbour_without_bias():
    for shape in ((1,), (7, 13), (adamw.BLOCK - 1,), (65, 129)):
        check_against_exact(kernel_step, *shape)


@interpreted
def test_adamw_depends_on_the_seed_and_does_not_write_past_the_tensor():
    weights = []
    for seed in (5, 5, 6):
        tensors = problem(33, 65)
        kernel_step(tensors, RATES, seed)
        weights.append(tensors.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    storage = torch.full((4, 200), 3.0, dtype=torch.bfloat16)
    kernel_step(ParamTensors(*(row[:130] for row in storage)), RATES, 1)
    assert (storage[:, 130:] == 3.0).all() and (storage[0, :130] != 3.0).any()


@interpreted
def test_adamw_of_many_parameters(monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK", 8 * adamw.BLOCK)  # two iterations per program instead of eight
    check_launch(adamw.kernel_step_all, [0, 1, 33, 4096, adamw.CHUNK + 5, 0, 5000])
    check_guard(adamw.kernel_step_all, [5, 4096, 5000])
    check_unaligned(adamw.kernel_step_all, [1, 4096, 9000], shift=3)


@interpreted
def test_adamw_of_no_weights_launches_nothing(monkeypatch):
    monkeypatch.setattr("kernels.adamw._step", {})  # a launch would be a KeyError
    with pytest.raises(KeyError):
        adamw.kernel_step_all(many_updates([1]))
    adamw.kernel_step_all([])
    adamw.kernel_step_all(many_updates([0, 0]))


@interpreted
def test_adamw_rounds_weight_and_moments_independently():
    """Rounding errors are pairwise uncorrelated, within a weight and between weights of one Philox call."""
    num = 32 * adamw.BLOCK
    ones = torch.ones(num, dtype=torch.bfloat16)
    rates = RATES._replace(lr=0.002, decay=0.0, t=10**6, beta1=0.999)  # every change is less than a step
    tensors = ParamTensors(ones.clone(), ones * 0.5, ones.clone(), ones.clone())
    kernel_step(tensors, rates, 3)
    errors = torch.stack([x.double() for x in (tensors.weight, tensors.exp_avg, tensors.exp_avg_sq)])
    assert all(len(row.unique()) == 2 for row in errors)
    errors = (errors - errors.mean(1, keepdim=True)) / errors.std(1, keepdim=True)
    for shift in (0, 1, adamw.BLOCK, 2 * adamw.BLOCK):
        products = errors @ errors.roll(shift, 1).T / num
        expected = torch.eye(3, dtype=torch.float64) if shift == 0 else torch.zeros(3, 3, dtype=torch.float64)
        assert (products - expected).abs().max() < 5 / num**0.5
