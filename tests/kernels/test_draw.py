"""Sampling tokens: the hash, and the reference against a float64 loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.decode import draw as module
from kernels.decode.draw import draw_reference, uniform

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321987654321]


def chi_square(ids: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the chi-square statistic and its 0.9999 quantile (Wilson-Hilferty); each cell expects five or more."""
    counts = torch.bincount(ids, minlength=len(exact)).double()
    expected = exact.double() * len(ids)
    assert expected.min() >= 5
    df = len(exact) - 1
    limit = df * (1 - 2 / (9 * df) + 3.719 * (2 / (9 * df)) ** 0.5) ** 3
    return ((counts - expected).square() / expected).sum().item(), limit


def naive(logits: Tensor, seed: Tensor, number: Tensor, temperature: Tensor, scale=1.0, softcap=None):
    """Compute row by row, in float64 and Python."""
    ids, logps = [], []
    for x, s, n, t in zip(logits, seed, number, temperature, strict=True):
        z = x.double() * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        logp = torch.log_softmax(z / (t.double() if t > 0 else 1.0), dim=0)
        if t == 0:
            at = max(range(len(z)), key=lambda v, z=z: (z[v].item(), -v))
        else:
            u, at, below = splitmix(int(s), int(n)), -1, 0.0
            while below <= u:
                at += 1
                below += logp[at].exp().item()
        ids.append(at)
        logps.append(logp[at])
    return torch.tensor(ids), torch.stack(logps)


def inputs(num_rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """Return logits, seeds, numbers and temperatures; the last row is greedy."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(num_rows, vocab, generator=generator)).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    number = torch.randint(1000, (num_rows,), generator=generator, dtype=torch.int32)
    temperature = torch.tensor([1.0, 0.6, 1.7]).repeat(num_rows)[:num_rows].clone()
    temperature[-1] = 0
    return logits, seeds, number, temperature


def check(run, *arguments: Tensor, **options) -> None:
    ids, logps = run(*arguments, **options)
    want, exact = naive(*arguments, **options)
    assert ids.dtype == torch.int64 and ids.tolist() == want.tolist()
    assert (logps.double() - exact).abs().max() < (1e-5 if logps.dtype == torch.float32 else 1e-12)


def check_chi_square(run, num: int) -> None:
    logits = torch.linspace(-2, 2, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    ids, _ = run(logits.expand(num, -1), torch.arange(num), torch.arange(num).int() % 7, torch.full((num,), 0.8))
    statistic, limit = chi_square(ids, torch.softmax(logits.double() / 0.8, dim=0))
    assert statistic < limit
    assert chi_square(ids, torch.softmax(logits.double() / 0.9, dim=0))[0] > limit  # it can tell


def check_special_rows(run, copies: int = 40) -> None:
    """Check ties, -inf and NaN, each sampled and greedy."""
    infinite = torch.full((1, 37), -math.inf)
    tied, only, late, bad = infinite.clone(), infinite.clone(), torch.zeros(1, 37), torch.zeros(1, 37)
    tied[0, [5, 9, 30]], only[0, 36], bad[0, 20] = 2.0, -3.0, math.nan
    late[0, :36] = -200.0  # their probability is 0 in float32
    all_bad, high = torch.full((1, 37), math.nan), late.clone()
    high[0, 7] = math.inf
    logits = torch.cat([tied, only, late, bad, all_bad, high, infinite]).repeat_interleave(copies, dim=0)
    num = len(logits)
    for temperature in (1.0, 0.0):
        number = torch.zeros(num, dtype=torch.int32)
        ids, logps = (
            x.view(7, copies) for x in run(logits, torch.arange(num), number, torch.full((num,), temperature))
        )
        found = set(ids[0].tolist())
        assert (found <= {5, 9, 30} and len(found) > 1) if temperature else found == {5}
        assert torch.allclose(logps[0], torch.tensor(-math.log(3)))
        assert (ids[1:3] == 36).all() and (logps[1:3].abs() < 1e-6).all()
        assert logps[3:].isnan().all() and (0 <= ids).all() and (ids < 37).all()


def check_company(run, vocab: int) -> None:
    """Check that a row gets the same id and log-prob alone, in another order and with other strides."""
    arguments = inputs(7, vocab)
    ids, logps = run(*arguments)
    order = torch.tensor([4, 2, 0, 6, 1])
    for some in (order, torch.tensor([3])):
        got = run(*(x[some] for x in arguments))
        assert torch.equal(got[0], ids[some]) and torch.equal(got[1], logps[some])
    wide = torch.cat([arguments[0], torch.full((7, 3), math.nan)], dim=1)
    got = run(wide[:, :vocab], *arguments[1:])
    assert torch.equal(got[0], ids) and torch.equal(got[1], logps)


def splitmix(seed: int, number: int) -> float:
    """Apply the finaliser of splitmix64 twice, in Python integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    return (mix((mix(seed % 2**64) + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64) >> 11) / 2**53


@pytest.mark.parametrize("number", [0, 1, 511, 2**31 - 2])
def test_uniform_is_a_hash_of_seed_and_number(number):
    seeds = torch.tensor(SEEDS)
    want = torch.tensor([splitmix(seed, number) for seed in SEEDS], dtype=torch.float64)
    assert torch.equal(uniform(seeds, number), want)
    assert torch.equal(uniform(seeds, torch.full_like(seeds, number, dtype=torch.int32)), want)
    assert module.signed_64(2**64 + 5) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"scale": 1.5, "softcap": 5.0}], ids=str)
def test_reference_draws_by_inverse_cdf(dtype, options):
    check(draw_reference, *inputs(24, 37, dtype), **options)


def test_reference_works_in_slabs(monkeypatch):
    arguments = inputs(7, 37)
    want = draw_reference(*arguments)
    monkeypatch.setattr(module, "SLAB", 75)
    assert all(torch.equal(a, b) for a, b in zip(draw_reference(*arguments), want, strict=True))


def test_reference_follows_the_distribution():
    check_chi_square(draw_reference, 20_000)


def test_reference_with_ties_and_nan():
    check_special_rows(draw_reference)


def test_reference_draws_the_same_in_any_batch():
    check_company(draw_reference, 37)
