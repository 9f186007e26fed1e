"""The gap between engine and trainer, with golden values of TRL 1.16.0 and of axolotl as intended."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.advantage import effective_sample_frac, moments
from losses.importance import (
    EngineGap,
    bounded_ratio,
    correction_metrics,
    engine_gap,
    gap_metrics,
    keep_geometric,
    keep_on_policy,
    sequence_drift,
)
from tests.losses.packed import Tokens


def one_completion(d: list[float]) -> EngineGap:
    old = torch.tensor(d, dtype=torch.float64)
    return engine_gap(old, torch.zeros_like(old), torch.zeros(len(d)).long(), num_sequences=1)


def random_case(seed: int = 0, n: int = 60) -> tuple[Tensor, Tensor, Tensor, int]:
    """Log-probs of trainer and engine, the completion of each token, and their number."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    engine = old + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    sequence = torch.arange(n) // 9
    return old, engine, sequence, int(sequence.max()) + 1


def test_golden_ratios():
    gap = one_completion([0.5, -0.2, 0.9])
    assert gap.token.exp().tolist() == pytest.approx([1.6487, 0.8187, 2.4596], abs=5e-5)
    assert gap.total.exp().tolist() == pytest.approx([3.3201] * 3, abs=5e-5)
    assert gap.mean.exp().tolist() == pytest.approx([1.4918] * 3, abs=5e-5)
    assert gap.length.tolist() == [3, 3, 3]


LOGS = [0.2, -2.0, 1.5]  # ratios 1.2214, 0.1353, 4.4817


@pytest.mark.parametrize(
    ("log_ratio", "low", "high", "drop", "expected"),
    [
        ([0.5, -0.2, 0.9], None, 2.0, False, [1.6487, 0.8187, 2.0]),  # token_truncate
        ([0.5, -0.2, 0.9], None, 2.0, True, [1.6487, 0.8187, 0.0]),  # token_mask
        ([1.2] * 3, None, 3.0, False, [3.0, 3.0, 3.0]),  # sequence_truncate: 1.2 is the sum over the completion
        ([1.2] * 3, None, 3.0, True, [0.0, 0.0, 0.0]),  # sequence_mask
        ([1.2] * 3, None, 3.4, True, [3.3201, 3.3201, 3.3201]),
        (LOGS, 1 / 3, 3.0, False, [1.2214, 0.3333, 3.0]),
        (LOGS, None, 3.0, False, [1.2214, 0.1353, 3.0]),  # no floor by default
        (LOGS, None, 3.0, True, [1.2214, 0.1353, 0.0]),
        (LOGS, 1 / 3, 3.0, True, [1.2214, 0.0, 0.0]),
        (LOGS, 1 / 3, None, True, [1.2214, 0.0, 4.4817]),
        ([0.0, math.log(0.49), math.log(0.51), math.log(4.9), math.log(5.1)], 0.5, 5.0, True,
         [1.0, 0.0, 0.51, 4.9, 0.0]),  # icepop
        ([0.0, 0.0], 1.0, 2.0, True, [1.0, 1.0]),  # a ratio at its bound is kept
        ([0.0, 0.0], 0.5, 1.0, True, [1.0, 1.0]),
    ],
)  # fmt: skip
def test_bounded_ratio(log_ratio, low, high, drop, expected):
    got = bounded_ratio(torch.tensor(log_ratio, dtype=torch.float64), low, high, drop=drop)
    assert got.tolist() == pytest.approx(expected, abs=5e-5)


def test_bounds_that_make_no_sense_are_rejected():
    for low, high in ((None, None), (2.0, 1.0)):
        with pytest.raises(ValueError, match=f"low={low}, high={high}"):
            bounded_ratio(torch.zeros(1), low, high, drop=False)


def test_geometric_filter_keeps_or_drops_whole_completions_whatever_their_length():
    # Both drift by 0.05 per token; the product over the long one is exp(2.5).
    d = torch.full((52,), 0.05, dtype=torch.float64)
    gap = engine_gap(d, 0 * d, torch.tensor([0] * 2 + [1] * 50), num_sequences=2)
    assert keep_geometric(gap, low=0.9, high=1.1).all() and not keep_geometric(gap, low=0.99, high=1.01).any()
    assert not keep_geometric(gap, low=None, high=1.01).any()
    assert (bounded_ratio(gap.total, None, 3.0, drop=True) > 0).tolist() == [True] * 2 + [False] * 50


def test_gap_agrees_with_a_loop_over_completions():
    old, engine, sequence, size = random_case()
    gap = engine_gap(old, engine, sequence, num_sequences=size)
    for n in range(len(old)):
        siblings = [old[i].item() - engine[i].item() for i in range(len(old)) if sequence[i] == sequence[n]]
        assert gap.token[n].item() == pytest.approx(old[n].item() - engine[n].item(), rel=1e-12)
        assert gap.total[n].item() == pytest.approx(sum(siblings), rel=1e-12)
        assert gap.mean[n].item() == pytest.approx(sum(siblings) / len(siblings), rel=1e-12)
        assert gap.length[n].item() == len(siblings)


def test_missing_log_probs_count_as_no_gap():
    old, engine, sequence, size = random_case()
    first = torch.tensor([0])
    missing = engine_gap(old, engine.index_fill(0, first, math.nan), sequence, num_sequences=size)
    same = engine_gap(old, engine.index_copy(0, first, old[first]), sequence, num_sequences=size)
    assert all(torch.equal(a, b) for a, b in zip(missing, same, strict=True))
    equal = engine_gap(old, old, sequence, num_sequences=size)
    assert torch.equal(bounded_ratio(equal.total, 0.5, 2.0, drop=True), torch.ones_like(old))


def test_engines_far_apart_stay_finite():
    old = torch.tensor([0.0, -200.0, -1e4, -1.0])
    engine = torch.tensor([-200.0, 0.0, -1.0, -math.inf])
    gap = engine_gap(old, engine, torch.tensor([0, 1, 2, 2]), num_sequences=3)
    assert all(bounded_ratio(x, None, 2.0, drop=False).isfinite().all() for x in (gap.token, gap.total))
    assert all(total.isfinite() for total, _ in gap_metrics(gap).values())
    long = one_completion([5.0] * 200)
    assert long.total.tolist() == [20.0] * 200 and long.mean.tolist() == pytest.approx([5.0] * 200)


def test_gaps_have_no_gradient():
    old, engine, sequence, size = random_case()
    assert not any(x.requires_grad for x in engine_gap(old.requires_grad_(), engine, sequence, num_sequences=size))
    assert not sequence_drift(old, engine, sequence, num_sequences=size).requires_grad


def test_off_policy_mask_drops_bad_completions_beyond_the_threshold():
    advantage, drift = torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.0, -1.0]), torch.tensor([0.6, 0.6, 0.4, 0.5, 9.0, -9.0])
    assert keep_on_policy(advantage, drift, threshold=0.5).tolist() == [False, True, True, True, True, True]


def test_drift_of_whole_completions():
    engine = torch.full((5,), -1.0, dtype=torch.float64)
    logp = torch.tensor([-1.2, -2.0, -1.2, -2.0, -1.3], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1, 2])
    assert sequence_drift(logp, engine, sequence, num_sequences=3).tolist() == pytest.approx([0.6, 0.6, 0.3])
    engine[1] = math.nan  # not reported: no drift, but it counts in the length
    assert sequence_drift(logp, engine, sequence, num_sequences=3).tolist() == pytest.approx([0.1, 0.6, 0.3])


def test_metrics_are_of_raw_ratios_and_of_what_the_correction_did():
    gap = one_completion([0.5, -0.2, 0.9])
    ratios = [1.648721, 0.818731, 2.459603]
    got = {name: (total / count).item() for name, (total, count) in gap_metrics(gap).items()}
    assert got == pytest.approx(
        {
            "policy/behaviour_ratio": sum(ratios) / 3,
            "policy/behaviour_chi2": sum(r * r - 1 for r in ratios) / 3,
            "policy/behaviour_sequence_ratio": 3.320117,
            "policy/behaviour_geometric_ratio": 1.491825,
        },
        rel=1e-6,
    )
    for log_ratio, high, drop, expected in (
        (gap.token, 2.0, False, [4.467452, 0.0, 1.0]),
        (gap.token, 2.0, True, [2.467452, 1.0, 0.0]),
        (gap.total, 3.0, True, [0.0, 3.0, 0.0]),
    ):
        metrics = correction_metrics(bounded_ratio(log_ratio, None, high, drop=drop), log_ratio)
        names = [f"policy/correction{part}" for part in ("", "_zero_frac", "_bound_frac")]
        assert [metrics[name][0].item() for name in names] == pytest.approx(expected)


def test_metrics_of_slices_sum_to_the_whole():
    old, engine, sequence, size = random_case()
    gap = engine_gap(old, engine, sequence, num_sequences=size)

    def metrics(gap: EngineGap) -> dict:
        weight = bounded_ratio(gap.token, None, 2.0, drop=False)
        return {**gap_metrics(gap), **correction_metrics(weight, gap.token)}

    for edge in (9, 27, 31):  # the last one cuts a completion, whose sums were computed over all of it
        pieces = [metrics(EngineGap(*(x[rows] for x in gap))) for rows in (slice(0, edge), slice(edge, None))]
        for name, pair in metrics(gap).items():
            sums = [sum(float(piece[name][i]) for piece in pieces) for i in (0, 1)]
            assert sums == pytest.approx([float(x) for x in pair], rel=1e-12), name


def test_effective_sample_size_of_weights():
    old, engine, sequence, size = random_case()
    ratio = engine_gap(old, engine, sequence, num_sequences=size).token.exp()
    expected = ratio.sum().square() / (len(ratio) * ratio.square().sum())
    assert effective_sample_frac(moments(ratio)).item() == pytest.approx(expected.item(), rel=1e-12)
    pieces = sum(moments(piece) for piece in ratio.split(7))
    assert effective_sample_frac(pieces).item() == pytest.approx(expected.item(), rel=1e-12)
    assert effective_sample_frac(moments(torch.full((5,), 3.0))).item() == pytest.approx(1.0)
    assert effective_sample_frac(moments(torch.tensor([0.0, 0.0, 2.0, 0.0]))).item() == pytest.approx(0.25)


def test_a_truncated_weight_on_dapo_is_decoupled_ppo():
    """Hilton et al. 2021, arXiv:2110.00641: (policy / proximal) x (proximal / behaviour) = policy / behaviour if
    neither bound is reached, otherwise min(proximal / behaviour, cap) times the clipped surrogate."""
    proximal, engine, sequence, size = random_case(seed=11)
    generator = torch.Generator().manual_seed(12)
    logp = proximal + 0.2 * torch.randn(60, generator=generator, dtype=torch.float64)
    advantage = torch.randn(60, generator=generator, dtype=torch.float64)
    gap = engine_gap(proximal, engine, sequence, num_sequences=size)
    for epsilon, high in (((1.0, 1e6), 1e6), ((0.2, 0.2), 1.5)):
        case = Tokens(logp, proximal, advantage, sequence, weight=bounded_ratio(gap.token, None, high, drop=False))
        got = case.loss("dapo", divide=False, epsilon=epsilon[0], epsilon_high=epsilon[1])[0]
        ratio, weight = (case.logp - proximal).exp(), (proximal - engine).exp().clamp(max=high)
        clipped = ratio.clamp(1 - epsilon[0], 1 + epsilon[1])
        want = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
        assert got.item() == pytest.approx(want.item(), rel=1e-12)
        torch.testing.assert_close(case.gradient(got), case.gradient(want))
