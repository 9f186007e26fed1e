"""Hand-computed values of SFT's token losses."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.methods.sft import token_losses


@pytest.mark.parametrize("kind", ["nll", "dft"])
def test_value_and_gradient_by_hand(kind):
    """dft weighs each token by its probability, without a gradient through the weight."""
    logp = torch.tensor([-1.0, -2.0, -0.7], requires_grad=True)
    weights = [math.exp(x) if kind == "dft" else 1.0 for x in logp.tolist()]
    loss = token_losses(logp, kind)
    assert loss.tolist() == pytest.approx([-w * x for w, x in zip(weights, logp.tolist(), strict=True)])
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-w for w in weights])
