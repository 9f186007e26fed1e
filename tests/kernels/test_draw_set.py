"""Sampling from the ids that top-k, top-p and min-p keep, against a loop in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.decode.draw import uniform
from kernels.decode.draw_set import GAP, draw_set
from tests.kernels.test_draw import chi_square, inputs


def kept_by_hand(p: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    order = sorted(range(len(p)), key=lambda i: -p[i])[: top_k or len(p)]
    total, before, kept = sum(p[i] for i in order), 0.0, []
    for i in order:
        if before >= top_p * total:
            break
        kept.append(i)
        before += p[i]
    kept = [i for i in kept if p[i] >= min_p * p[order[0]]]
    return {i for i in order if p[i] >= p[kept[-1]]}


FILTERS = ({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 7, "top_p": 0.8, "min_p": 0.05}, {"top_k": 1},
           {"top_p": 1e-6}, {"top_k": 99, "top_p": 0.9999})  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"scale": 1.5, "softcap": 5.0}], ids=str)
def test_sets_and_draws_by_hand(dtype, options):
    logits, seed, number, temperature = inputs(24, 37, dtype)
    temperature = temperature.clamp(min=0.4)
    z = logits.double() * options.get("scale", 1.0)
    z = z if not options else 5.0 * torch.tanh(z / 5.0)
    p = (z / temperature[:, None].double()).softmax(dim=1).tolist()
    u = uniform(seed, number).tolist()
    for filters in FILTERS:
        most = filters.get("top_k", 50)
        ids, logps, sets = draw_set(logits, seed, number, temperature, most=most, **options, **filters)
        for row in range(24):
            start, *others = [x for x in sets[row].tolist() if x != GAP]
            kept = kept_by_hand(p[row], **filters)
            assert ~start == ids[row] and {~start, *others} == kept and len(others) == len(kept) - 1
            total = sum(p[row][i] for i in kept)
            assert float(logps[row]) == pytest.approx(float(torch.tensor(p[row][ids[row]] / total).log()), abs=2e-6)
            before = sum(p[row][i] for i in kept if i < ids[row]) / total
            assert before - 1e-6 <= u[row] <= before + p[row][ids[row]] / total + 1e-6


def test_ids_as_likely_as_the_last_are_kept_and_wide_sets_are_seen():
    logits = torch.tensor([[1.0, 1.0, 2.0, 1.0, 0.0]])
    draws = (torch.tensor([3]), torch.tensor([0], dtype=torch.int32), torch.ones(1))
    sets = draw_set(logits, *draws, most=9, top_p=0.6)[2]  # 0.42 + 0.15 is less than 0.6, and three ids have 0.15
    assert sorted(x if x >= 0 else ~x for x in sets[0].tolist() if x != GAP) == [0, 1, 2, 3]
    for filters, size in (({"top_p": 0.95}, 4), ({"min_p": 0.3}, 4), ({"min_p": 0.5}, 1), ({"top_p": 0.1}, 1)):
        assert (draw_set(logits, *draws, most=4, **filters)[2] != GAP).sum() == size


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.sampled_from([0, 1, 3, 30]),
    st.sampled_from([1.0, 0.9999, 0.9, 0.5, 1e-9]), st.sampled_from([0.0, 0.01, 0.3, 0.999]), st.integers(0, 99),
)  # fmt: skip
def test_sets_of_equal_logits(z, top_k, top_p, min_p, seed):
    """Many ids are equally likely: of those in a set, all are in it, unless top_k leaves some out."""
    draws = torch.tensor([seed]), torch.tensor([0], dtype=torch.int32), torch.full((1,), 0.7)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    ids, logps, sets = draw_set(torch.tensor([z]).float(), *draws, most=top_k or 50, **filters)
    start, *others = [x for x in sets[0].tolist() if x != GAP]
    p = (torch.tensor(z).double() / 0.7).softmax(0).tolist()
    kept, want = {~start, *others}, kept_by_hand(p, **filters)
    assert ~start == ids[0] and ~start not in others
    assert sorted(z[i] for i in kept) == sorted(z[i] for i in want)
    assert top_k or kept == want
    assert float(logps[0].exp()) == pytest.approx(p[ids[0]] / sum(p[i] for i in want), rel=1e-5)


def test_draws_follow_the_distribution_and_ignore_the_batch():
    logits = torch.randn(1, 37, generator=torch.Generator().manual_seed(5)) * 2
    num = 20_000
    seed, number = torch.arange(num), torch.zeros(num, dtype=torch.int32)
    ids, logps, _ = draw_set(logits.expand(num, -1), seed, number, torch.ones(num), most=6, top_k=6)
    kept = logits[0].topk(6).indices.sort().values
    statistic, limit = chi_square(torch.searchsorted(kept, ids), logits[0, kept].double().softmax(0))
    assert statistic < limit
    one = draw_set(logits, seed[7:8], number[7:8], torch.ones(1), most=6, top_k=6)
    assert (one[0], one[1]) == (ids[7], logps[7])


def test_a_nan_logit_gives_a_nan_log_prob():
    logits, seed, number, _ = inputs(2, 37)
    logits[0, 3] = float("nan")
    ids, logps, _ = draw_set(logits, seed, number, torch.ones(2), most=37, top_p=0.9)
    assert logps[0].isnan() and logps[1].isfinite() and 0 <= ids[0] < 37


@pytest.mark.gpu
def test_draws_on_a_gpu_match_the_cpu():
    """Also in a CUDA graph, at the size of a vocabulary; logits are far apart, so that rounding decides nothing."""
    rows, vocab = 64, 151_936
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)]).float() * (20.0 / vocab)
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    number, temperature = torch.arange(rows, dtype=torch.int32), torch.full((rows,), 0.9)
    for filters in ({"top_k": 50}, {"top_p": 0.001}, {"min_p": 0.97}, {"top_k": 200, "top_p": 0.5, "min_p": 0.1}):
        options = {"most": filters.get("top_k", 1025), **filters}
        want = draw_set(logits, seed, number, temperature, **options)
        there = [x.cuda() for x in (logits, seed, number, temperature)]
        eager = draw_set(*there, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = draw_set(*there, **options)
        graph.replay()
        for got in (eager, replayed):
            ids, logps, sets = (x.cpu() for x in got)
            same = (sets.sort(1).values == want[2].sort(1).values).all(1)  # rounding may move the end of a set
            assert same.float().mean() > 0.9 and torch.equal(ids[same], want[0][same])
            torch.testing.assert_close(logps[same], want[1][same], rtol=1e-4, atol=1e-4)
