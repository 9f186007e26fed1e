"""The entropy threshold: the tokens of highest entropy that are trained."""

from __future__ import annotations

import math

import pytest
import torch

from losses.entropy import adapted_coef, entropy_threshold, keep_top_entropy


def test_threshold_is_the_interpolated_quantile():
    for n in (1, 2, 7, 50):
        entropy = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        for top in (0.01, 0.2, 0.5, 1.0):
            expected = torch.quantile(entropy, 1 - top)
            torch.testing.assert_close(entropy_threshold(entropy, top=top), expected, atol=1e-12, rtol=1e-12)


def test_what_is_kept():
    entropy = torch.arange(50.0)
    assert keep_top_entropy(entropy, entropy_threshold(entropy, top=1.0)).all()
    assert keep_top_entropy(entropy, entropy_threshold(entropy, top=0.2)).nonzero().flatten().tolist() == [
        *range(40, 50)
    ]
    assert entropy_threshold(torch.zeros(0), top=0.2).item() == -math.inf
    large = torch.arange(2**24 + 2, dtype=torch.float64)  # torch.quantile takes no more than 2**24
    assert entropy_threshold(large, top=0.25).item() == pytest.approx(0.75 * (2**24 + 1), rel=1e-6)


def test_a_fraction_outside_its_range_is_refused():
    for top in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            entropy_threshold(torch.rand(3), top=top)


def test_the_adaptive_coefficient_moves_by_delta_within_its_bounds():
    # The target is 0.2, delta 0.2 and the bound 0.5: below, above, at the target, and at both bounds.
    moves = [(0.1, 0.1, 0.3), (0.3, 0.3, 0.1), (0.1, 0.2, 0.1), (0.1, 0.3, 0.0), (0.4, 0.1, 0.5)]
    for coef, entropy, want in moves:
        moved = adapted_coef(coef, entropy, target=0.2, delta=0.2, most=0.5)
        assert moved == pytest.approx(want), (coef, entropy)
    assert adapted_coef(5.0, 0.1, target=0.2, delta=0.25) == 5.25
