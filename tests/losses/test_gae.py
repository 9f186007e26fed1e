"""GAE and the critic's loss against plain loops in float64, by hand, and at the ends of their ranges.

TRL 1.16 has no PPO any more (neither trl.trainer nor trl.experimental), so the golden values are worked out by hand.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.advantage import moments
from losses.gae import (
    clipped_value_loss,
    estimate_advantage,
    explained_variance,
    rewards_to_go,
    token_rewards,
    whiten,
)

LENGTHS = (5, 1, 9, 0, 3)
GAPS = {2: (3, 4, 5), 4: (0,)}  # of a completion: places of another's text


def make_mask(*, gaps: bool) -> Tensor:  # (B, T)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    for row, places in GAPS.items() if gaps else ():
        mask[row, list(places)] = False
    return mask


def draw(seed: int) -> Tensor:  # (B, T)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)


def loop(reward: list[float], value: list[float], *, gamma: float, lam: float) -> list[float]:
    """A_t = sum over k of (gamma lam)^k delta_t+k, written as it is read."""
    length = len(value)
    deltas = [reward[t] + (gamma * value[t + 1] if t + 1 < length else 0.0) - value[t] for t in range(length)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_the_loop_over_the_trained_tokens_of_each_completion(gamma, lam, gaps):
    reward, value, mask = draw(0), draw(1), make_mask(gaps=gaps)
    dirty = [torch.where(mask, x, math.nan) for x in (reward, value)]  # other places may hold anything
    advantage, target = estimate_advantage(*dirty, mask, gamma=gamma, lam=lam)
    assert advantage.dtype == torch.float64 and (advantage[~mask] == 0).all() and (target[~mask] == 0).all()
    for row in range(len(LENGTHS)):
        own = [x[row][mask[row]].tolist() for x in (reward, value)]
        assert advantage[row][mask[row]].tolist() == pytest.approx(loop(*own, gamma=gamma, lam=lam), abs=1e-12)
    torch.testing.assert_close(target, torch.where(mask, advantage + value, 0.0))


def test_gae_by_hand():
    """Three tokens, values 0.5, 0.25, 0.5, reward 1 at the end, gamma 0.5, lam 0.5."""
    reward, value, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.5]]), torch.ones(1, 3).bool()
    advantage, target = estimate_advantage(reward, value, mask, gamma=0.5, lam=0.5)
    # deltas: 0.5 * 0.25 - 0.5 = -0.375; 0.5 * 0.5 - 0.25 = 0; 1 - 0.5 = 0.5
    torch.testing.assert_close(advantage, torch.tensor([[-0.375 + 0.0625 * 0.5, 0.25 * 0.5, 0.5]]))
    torch.testing.assert_close(target, torch.tensor([[0.15625, 0.375, 1.0]]))


def test_lambda_one_is_what_was_earned_minus_the_value():
    reward, value, mask = draw(2), draw(3), make_mask(gaps=True)
    advantage, target = estimate_advantage(reward, value, mask, gamma=1.0, lam=1.0)
    earned = torch.where(mask, torch.where(mask, reward, 0.0).flip(1).cumsum(1).flip(1), 0.0)
    torch.testing.assert_close(advantage, torch.where(mask, earned - value, 0.0))
    torch.testing.assert_close(target, earned)
    torch.testing.assert_close(rewards_to_go(reward, mask, gamma=1.0), earned)
    for row in range(len(LENGTHS)):
        own = reward[row][mask[row]].tolist()
        want = [sum(0.9**k * x for k, x in enumerate(own[t:])) for t in range(len(own))]
        assert rewards_to_go(reward, mask, gamma=0.9)[row][mask[row]].tolist() == pytest.approx(want)


def test_lambda_zero_is_the_error_of_one_step():
    reward, value, mask = draw(4), draw(5), make_mask(gaps=False)
    following = torch.where(mask, value, 0.0).roll(-1, dims=1)
    following[:, -1] = 0
    advantage, _ = estimate_advantage(reward, value, mask, gamma=0.8, lam=0.0)
    torch.testing.assert_close(advantage, torch.where(mask, reward + 0.8 * following - value, 0.0))


def test_a_gap_changes_nothing_of_the_tokens_around_it():
    """Text of a tool between two trained tokens is no step in time."""
    reward, value, mask = draw(6), draw(7), make_mask(gaps=True)
    row, own = 2, make_mask(gaps=True)[2]
    settings = {"gamma": 0.9, "lam": 0.8}
    whole = estimate_advantage(reward, value, mask, **settings).advantage[row][own]
    closed = [x[row][own].unsqueeze(0) for x in (reward, value)]
    alone = estimate_advantage(*closed, torch.ones_like(closed[0]).bool(), **settings).advantage[0]
    torch.testing.assert_close(whole, alone)


def test_the_reward_is_at_the_last_trained_token_and_the_kl_at_each():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    kl = torch.where(mask, torch.tensor([[0.5, 1.0, 9.0, 9.0], [2.0, 9.0, -1.0, 9.0], [9.0] * 4]), math.nan)
    reward = torch.tensor([3.0, -1.0, 5.0])
    assert token_rewards(reward, mask).tolist() == [[0, 3, 0, 0], [0, 0, -1, 0], [0, 0, 0, 0]]
    with_kl = token_rewards(reward, mask, kl, beta=0.1)
    torch.testing.assert_close(with_kl, torch.tensor([[-0.05, 2.9, 0, 0], [-0.2, 0, -0.9, 0], [0, 0, 0, 0]]))
    empty = estimate_advantage(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0).bool(), gamma=1.0, lam=0.9)
    assert empty.advantage.shape == (0, 0)


def test_whitening_over_ranks_is_that_of_all_tokens():
    x = draw(8).flatten()
    parts = x.split([7, 30, len(x) - 37])
    sums = sum(moments(part) for part in parts)
    together = torch.cat([whiten(part, sums) for part in parts])
    torch.testing.assert_close(together, (x - x.mean()) / x.std(), rtol=1e-6, atol=1e-6)
    for few in (torch.tensor([2.0]), torch.tensor([2.0, 2.0]), torch.zeros(0)):
        assert torch.equal(whiten(few, moments(few)), few)


def test_value_loss_by_hand():
    """Near the old value: the plain error. Beyond the clip towards the target: the clipped one, without gradient."""
    value = torch.tensor([0.1, 0.9, -0.5, 0.6], dtype=torch.float64, requires_grad=True)
    old, target = torch.tensor([0.0, 0.0, 0.0, 0.5]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    out = clipped_value_loss(value, old, target, clip=0.2, coef=0.3)
    term = out.terms["value"]
    # token 1 is clipped to 0.2; token 2 has moved away from its target, so that its own error is the larger
    assert term.sum.item() == pytest.approx(0.5 * (0.9**2 + 0.8**2 + 1.5**2 + 0.6**2)) and term.weight == 0.3
    assert [x.item() for x in out.metrics["value/clip_frac"]] == [1, 4] and term.count.item() == 4
    (grad,) = torch.autograd.grad(term.sum, value)
    assert grad.tolist() == pytest.approx([-0.9, 0.0, -1.5, 0.6])
    free = clipped_value_loss(value, old, target, clip=None)
    assert free.terms["value"].sum.item() == pytest.approx(0.5 * (0.9**2 + 0.1**2 + 1.5**2 + 0.6**2))
    assert free.metrics == {}


def test_value_loss_is_the_loop():
    value, old, target = (draw(seed).flatten() for seed in (9, 10, 11))
    want, clipped = 0.0, 0
    for v, o, r in zip(value.tolist(), old.tolist(), target.tolist(), strict=True):
        near = min(max(v, o - 0.3), o + 0.3)
        want += 0.5 * max((v - r) ** 2, (near - r) ** 2)
        clipped += (near - r) ** 2 > (v - r) ** 2
    out = clipped_value_loss(value, old, target, clip=0.3)
    assert out.terms["value"].sum.item() == pytest.approx(want) and out.metrics["value/clip_frac"][0] == clipped > 0


def test_explained_variance():
    earned = draw(12).flatten()
    noise = 0.5 * draw(13).flatten()

    def found(value: Tensor) -> float:
        return explained_variance(moments(earned - value), moments(earned)).item()

    assert found(earned) == pytest.approx(1.0) and found(torch.full_like(earned, 0.7)) == pytest.approx(0.0)
    assert found(earned + noise) == pytest.approx(1 - (noise.var() / earned.var()).item())
    assert found(-earned) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(moments(noise), moments(torch.ones_like(noise))).item())
