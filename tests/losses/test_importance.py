"""Corrections between engine and trainer, with golden values of TRL 1.16.0 and of axolotl as intended."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.advantage import effective_sample_frac, moments
from losses.importance import (
    CORRECTIONS,
    SEQUENCE_CORRECTIONS,
    Mismatch,
    correction_metrics,
    icepop,
    keep_geometric,
    keep_on_policy,
    mismatch,
    mismatch_metrics,
    sequence_drift,
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
)
from losses.policy import Tokens, dapo, token_log_ratio


def one_completion(d: list[float]) -> Mismatch:
    old = torch.tensor(d, dtype=torch.float64)
    n = len(d)
    return mismatch(old, torch.zeros_like(old), torch.ones(n, dtype=torch.bool), torch.zeros(n).long(), num_sequences=1)


def random_case(seed: int = 0, n: int = 60) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    behaviour = old + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, generator=generator) < 0.7
    sequence = torch.arange(n) // 9
    return old, behaviour, mask, sequence, int(sequence.max()) + 1


def test_golden_ratios():
    m = one_completion([0.5, -0.2, 0.9])
    assert m.token.exp().tolist() == pytest.approx([1.6487, 0.8187, 2.4596], abs=5e-5)
    assert m.total.exp().tolist() == pytest.approx([3.3201] * 3, abs=5e-5)
    assert m.mean.exp().tolist() == pytest.approx([1.4918] * 3, abs=5e-5)
    assert m.length.tolist() == [3, 3, 3]


def test_golden_corrections():
    for correction, high, expected in (
        (token_truncate, 2.0, [1.6487, 0.8187, 2.0]),
        (token_mask, 2.0, [1.6487, 0.8187, 0.0]),
        (sequence_truncate, 3.0, [3.0, 3.0, 3.0]),
        (sequence_mask, 3.0, [0.0, 0.0, 0.0]),
        (sequence_mask, 3.4, [3.3201, 3.3201, 3.3201]),
    ):
        got = correction(one_completion([0.5, -0.2, 0.9]), high=high).tolist()
        assert got == pytest.approx(expected, abs=5e-5), (correction, high)


def test_a_cap_masks_and_there_is_no_floor_by_default():
    m = one_completion([0.2, -2.0, 1.5])  # ratios 1.2214, 0.1353, 4.4817
    assert token_truncate(m, low=1 / 3, high=3.0).tolist() == pytest.approx([1.2214, 0.3333, 3.0], abs=5e-5)
    assert token_truncate(m, high=3.0).tolist() == pytest.approx([1.2214, 0.1353, 3.0], abs=5e-5)
    assert token_mask(m, high=3.0).tolist() == pytest.approx([1.2214, 0.1353, 0.0], abs=5e-5)
    assert token_mask(m, low=1 / 3, high=3.0).tolist() == pytest.approx([1.2214, 0.0, 0.0], abs=5e-5)
    assert token_mask(m, low=1 / 3, high=None).tolist() == pytest.approx([1.2214, 0.0, 4.4817], abs=5e-5)


def test_icepop_masks_on_both_sides():
    m = one_completion([0.0, math.log(0.49), math.log(0.51), math.log(4.9), math.log(5.1)])
    assert icepop(m).tolist() == pytest.approx([1.0, 0.0, 0.51, 4.9, 0.0])
    with pytest.raises(ValueError, match="icepop masks on both sides"):
        icepop(m, low=None)


def test_geometric_filter_keeps_or_drops_whole_completions_whatever_their_length():
    # Both drift by 0.05 per token; the product over the long one is exp(2.5).
    d = torch.full((52,), 0.05, dtype=torch.float64)
    sequence = torch.tensor([0] * 2 + [1] * 50)
    m = mismatch(d, 0 * d, torch.ones(52, dtype=torch.bool), sequence, num_sequences=2)
    assert keep_geometric(m, low=0.9, high=1.1).all() and not keep_geometric(m, low=0.99, high=1.01).any()
    assert (sequence_mask(m, high=3.0) > 0).tolist() == [True] * 2 + [False] * 50
    weight = token_truncate(m, high=2.0) * keep_geometric(m, low=0.9, high=1.1)
    torch.testing.assert_close(weight, d.exp())
    assert torch.equal(token_truncate(m) * keep_geometric(m, low=None, high=1.01), 0 * d)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_agrees_with_a_loop_over_completions(name):
    old, behaviour, mask, sequence, size = random_case()
    m = mismatch(old, behaviour, mask, sequence, num_sequences=size)
    got = CORRECTIONS[name](m, low=0.6, high=1.5)
    for n in range(len(old)):
        if not mask[n]:
            continue
        mine = [i for i in range(len(old)) if mask[i] and sequence[i] == sequence[n]] if "sequence" in name else [n]
        ratio = math.exp(sum(old[i].item() - behaviour[i].item() for i in mine))
        bounded = min(max(ratio, 0.6), 1.5)
        expected = bounded if "truncate" in name else (ratio if bounded == ratio else 0.0)
        assert got[n].item() == pytest.approx(expected, rel=1e-12), (name, n)
    assert (name in SEQUENCE_CORRECTIONS) == ("sequence" in name)


def test_equal_engines_need_no_correction():
    old, _, mask, sequence, size = random_case()
    m = mismatch(old, old, mask, sequence, num_sequences=size)
    for correction in CORRECTIONS.values():
        assert torch.equal(correction(m), torch.ones_like(old))


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_masked_and_missing_log_probs_count_as_no_difference(poison):
    old, behaviour, mask, sequence, size = random_case()
    clean = mismatch(old, behaviour, mask, sequence, num_sequences=size)
    dirty = mismatch(*(torch.where(mask, x, poison) for x in (old, behaviour)), mask, sequence, num_sequences=size)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    first = mask.nonzero()[0]
    missing = mismatch(old, behaviour.index_fill(0, first, math.nan), mask, sequence, num_sequences=size)
    same = mismatch(old, behaviour.index_copy(0, first, old[first]), mask, sequence, num_sequences=size)
    assert all(torch.equal(a, b) for a, b in zip(missing, same, strict=True))


def test_engines_far_apart_stay_finite():
    old = torch.tensor([0.0, -200.0, -1e4, -1.0])
    behaviour = torch.tensor([-200.0, 0.0, -1.0, -math.inf])
    m = mismatch(old, behaviour, torch.tensor([True] * 4), torch.tensor([0, 1, 2, 2]), num_sequences=3)
    for correction in CORRECTIONS.values():
        assert correction(m).isfinite().all()
    assert all(total.isfinite() for total, _ in mismatch_metrics(m, torch.tensor([True] * 4)).values())


def test_a_ratio_at_its_bound_is_kept():
    m = one_completion([0.0, 0.0])
    assert token_mask(m, low=1.0, high=2.0).tolist() == token_mask(m, low=0.5, high=1.0).tolist() == [1.0, 1.0]


def test_the_ratio_of_a_long_completion_does_not_overflow():
    m = one_completion([5.0] * 200)
    assert m.total.tolist() == [20.0] * 200 and m.mean.tolist() == pytest.approx([5.0] * 200)


def test_bounds_that_make_no_sense_are_refused():
    m = one_completion([0.0])
    with pytest.raises(ValueError, match="needs at least one bound"):
        token_truncate(m, low=None, high=None)
    with pytest.raises(ValueError, match="low must be below high"):
        sequence_mask(m, low=2.0, high=1.0)


def test_corrections_have_no_gradient():
    old, behaviour, mask, sequence, size = random_case()
    m = mismatch(old.requires_grad_(), behaviour, mask, sequence, num_sequences=size)
    assert not any(x.requires_grad for x in m)
    assert not sequence_drift(old, behaviour, mask, sequence, num_sequences=size).requires_grad


def test_off_policy_mask_drops_bad_completions_beyond_the_threshold():
    advantage, drift = torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.0, -1.0]), torch.tensor([0.6, 0.6, 0.4, 0.5, 9.0, -9.0])
    assert keep_on_policy(advantage, drift, threshold=0.5).tolist() == [False, True, True, True, True, True]


def test_off_policy_mask_of_whole_completions():
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, 7.0], dtype=torch.float64)
    logp = torch.tensor([-1.2, -2.0, -1.2, -2.0, -1.3, 9.0], dtype=torch.float64)  # drifts 0.6, 0.6 and 0.3
    mask, sequence = torch.tensor([True] * 5 + [False]), torch.tensor([0, 0, 1, 1, 2, 2])
    drift = sequence_drift(logp, behaviour, mask, sequence, num_sequences=3)
    assert drift.tolist() == pytest.approx([0.6, 0.6, 0.3])
    advantage = torch.tensor([-1.0, 1.0, -1.0])
    keep = keep_on_policy(advantage[sequence], drift[sequence], threshold=0.5)
    assert keep.tolist() == [False, False, True, True, True, True]
    # A log-prob that the engine did not report counts as no difference, but still in the length.
    behaviour[1] = math.nan
    missing = sequence_drift(logp, behaviour, mask, sequence, num_sequences=3)
    assert missing.tolist() == pytest.approx([0.1, 0.6, 0.3])


def test_raw_ratio_statistics_are_those_before_the_bound():
    m = one_completion([0.5, -0.2, 0.9])
    mask = torch.tensor([True] * 3)
    got = {name: (total / count).item() for name, (total, count) in mismatch_metrics(m, mask).items()}
    ratios = [1.648721, 0.818731, 2.459603]
    assert got == pytest.approx(
        {
            "policy/behaviour_ratio": sum(ratios) / 3,
            "policy/behaviour_chi2": sum(r * r - 1 for r in ratios) / 3,
            "policy/behaviour_sequence_ratio": 3.320117,
            "policy/behaviour_geometric_ratio": 1.491825,
        },
        rel=1e-6,
    )


def test_correction_metrics_say_what_was_done():
    m, mask = one_completion([0.5, -0.2, 0.9, 0.0]), torch.tensor([True, True, True, False])

    def metrics(weight: Tensor, log_weight: Tensor) -> dict[str, float]:
        return {k: total.item() for k, (total, _) in correction_metrics(weight, log_weight, mask).items()}

    assert metrics(token_truncate(m, high=2.0), m.token) == pytest.approx(
        {"policy/correction": 4.467452, "policy/correction_zero_frac": 0.0, "policy/correction_bound_frac": 1.0}
    )
    assert metrics(token_mask(m, high=2.0), m.token) == pytest.approx(
        {"policy/correction": 2.467452, "policy/correction_zero_frac": 1.0, "policy/correction_bound_frac": 0.0}
    )
    assert metrics(sequence_mask(m, high=3.0), m.total) == pytest.approx(
        {"policy/correction": 0.0, "policy/correction_zero_frac": 3.0, "policy/correction_bound_frac": 0.0}
    )


def test_metrics_of_micro_batches_sum_to_the_whole():
    old, behaviour, mask, sequence, size = random_case()
    m = mismatch(old, behaviour, mask, sequence, num_sequences=size)
    whole = {**mismatch_metrics(m, mask), **correction_metrics(token_truncate(m), m.token, mask)}
    for edge in (9, 27, 31):  # the last one cuts a completion, whose sums were computed over all of it
        sums: dict[str, list[float]] = {}
        for rows in (slice(0, edge), slice(edge, None)):
            piece = Mismatch(*(x[rows] for x in m))
            part = {
                **mismatch_metrics(piece, mask[rows]),
                **correction_metrics(token_truncate(piece), piece.token, mask[rows]),
            }
            for name, pair in part.items():
                sums[name] = [a + x.item() for a, x in zip(sums.get(name, [0, 0]), pair, strict=True)]
        for name, pair in whole.items():
            assert sums[name] == pytest.approx([x.item() for x in pair], rel=1e-12)


def test_effective_sample_size_of_weights():
    old, behaviour, mask, sequence, size = random_case()
    ratio = mismatch(old, behaviour, mask, sequence, num_sequences=size).token[mask].exp()
    expected = ratio.sum().square() / (len(ratio) * ratio.square().sum())
    assert effective_sample_frac(moments(ratio)).item() == pytest.approx(expected.item(), rel=1e-12)
    parts = sum(moments(piece) for piece in ratio.split(7))
    assert effective_sample_frac(parts).item() == pytest.approx(expected.item(), rel=1e-12)
    assert effective_sample_frac(moments(torch.full((5,), 3.0))).item() == pytest.approx(1.0)
    assert effective_sample_frac(moments(torch.tensor([0.0, 0.0, 2.0, 0.0]))).item() == pytest.approx(0.25)


def test_a_truncated_weight_on_dapo_is_decoupled_ppo():
    """Hilton et al. 2021, arXiv:2110.00641: (policy / proximal) x (proximal / behaviour) = policy / behaviour where
    neither bound is reached, and min(proximal / behaviour, cap) times the clipped surrogate elsewhere."""
    proximal, behaviour, mask, sequence, size = random_case(seed=11)
    generator = torch.Generator().manual_seed(12)
    logp = (proximal + 0.2 * torch.randn(60, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(60, generator=generator, dtype=torch.float64)
    m = mismatch(proximal, behaviour, mask, sequence, num_sequences=size)
    ratio, weight = (logp - proximal).exp(), (proximal - behaviour).exp()
    for epsilon, high, want in (
        ((1.0, 1e6), 1e6, (logp - behaviour).exp() * advantage),
        ((0.2, 0.2), 1.5, weight.clamp(max=1.5) * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)),
    ):
        t = Tokens(logp, token_log_ratio(logp, proximal, mask), advantage, mask, torch.ones(60))
        t = t._replace(weight=token_truncate(m, high=high))
        got, want = dapo(t, epsilon=epsilon[0], epsilon_high=epsilon[1]).terms["policy"].sum, -want[mask].sum()
        assert got.item() == pytest.approx(want.item(), rel=1e-12)
        torch.testing.assert_close(*(torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (got, want)))
