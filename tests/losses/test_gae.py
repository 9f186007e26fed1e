"""GAE and the critic's loss against float64 loops and values by hand; TRL 1.16 has no PPO to compare with."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from losses.advantage import moments
from losses.gae import (
    estimate_advantage,
    explained_variance,
    rewards_to_go,
    token_rewards,
    whiten,
)
from losses.types import Metrics
from trainer.methods import ppo

LENGTHS = (5, 1, 9, 0, 3)
GAPS = {2: (3, 4, 5), 4: (0,)}  # completion -> masked positions


def make_mask(*, gaps: bool) -> Tensor:  # (B, T)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    for row, positions in GAPS.items() if gaps else ():
        mask[row, list(positions)] = False
    return mask


def draw(seed: int) -> Tensor:  # (B, T)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)


def loop(reward: list[float], value: list[float], *, gamma: float, lam: float) -> list[float]:
    """A_t = sum over k of (gamma lam)^k delta_t+k."""
    length = len(value)
    deltas = [reward[t] + (gamma * value[t + 1] if t + 1 < length else 0.0) - value[t] for t in range(length)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_gae_matches_a_loop_over_trained_tokens(gamma, lam, gaps):
    reward, value, mask = draw(0), draw(1), make_mask(gaps=gaps)
    dirty = [torch.where(mask, x, math.nan) for x in (reward, value)]
    advantage, target = estimate_advantage(*dirty, mask, gamma=gamma, lam=lam)
    assert advantage.dtype == torch.float64 and (advantage[~mask] == 0).all() and (target[~mask] == 0).all()
    for row in range(len(LENGTHS)):
        inputs = [x[row][mask[row]].tolist() for x in (reward, value)]
        assert advantage[row][mask[row]].tolist() == pytest.approx(loop(*inputs, gamma=gamma, lam=lam), abs=1e-12)
    torch.testing.assert_close(target, torch.where(mask, advantage + value, 0.0))


def test_gae_by_hand():
    """Three tokens, values 0.5, 0.25, 0.5, reward 1 at the end, gamma 0.5, lam 0.5."""
    reward, value, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.5]]), torch.ones(1, 3).bool()
    advantage, target = estimate_advantage(reward, value, mask, gamma=0.5, lam=0.5)
    # deltas: 0.5 * 0.25 - 0.5 = -0.375; 0.5 * 0.5 - 0.25 = 0; 1 - 0.5 = 0.5
    torch.testing.assert_close(advantage, torch.tensor([[-0.375 + 0.0625 * 0.5, 0.25 * 0.5, 0.5]]))
    torch.testing.assert_close(target, torch.tensor([[0.15625, 0.375, 1.0]]))


def test_lambda_one_gives_the_return_minus_the_value():
    reward, value, mask = draw(2), draw(3), make_mask(gaps=True)
    advantage, target = estimate_advantage(reward, value, mask, gamma=1.0, lam=1.0)
    returns = torch.where(mask, torch.where(mask, reward, 0.0).flip(1).cumsum(1).flip(1), 0.0)
    torch.testing.assert_close(advantage, torch.where(mask, returns - value, 0.0))
    torch.testing.assert_close(target, returns)
    torch.testing.assert_close(rewards_to_go(reward, mask, gamma=1.0), returns)
    for row in range(len(LENGTHS)):
        rewards = reward[row][mask[row]].tolist()
        want = [sum(0.9**k * x for k, x in enumerate(rewards[t:])) for t in range(len(rewards))]
        assert rewards_to_go(reward, mask, gamma=0.9)[row][mask[row]].tolist() == pytest.approx(want)


def test_lambda_zero_gives_the_one_step_error():
    reward, value, mask = draw(4), draw(5), make_mask(gaps=False)
    next_value = torch.where(mask, value, 0.0).roll(-1, dims=1)
    next_value[:, -1] = 0
    advantage, _ = estimate_advantage(reward, value, mask, gamma=0.8, lam=0.0)
    torch.testing.assert_close(advantage, torch.where(mask, reward + 0.8 * next_value - value, 0.0))


def test_gap_does_not_change_the_advantages_around_it():
    reward, value, mask = draw(6), draw(7), make_mask(gaps=True)
    row, trained = 2, mask[2]
    settings = {"gamma": 0.9, "lam": 0.8}
    with_gap = estimate_advantage(reward, value, mask, **settings).advantage[row][trained]
    closed = [x[row][trained].unsqueeze(0) for x in (reward, value)]
    without_gap = estimate_advantage(*closed, torch.ones_like(closed[0]).bool(), **settings).advantage[0]
    torch.testing.assert_close(with_gap, without_gap)


def test_the_reward_is_at_the_last_trained_token_and_the_kl_at_each():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    kl = torch.where(mask, torch.tensor([[0.5, 1.0, 9.0, 9.0], [2.0, 9.0, -1.0, 9.0], [9.0] * 4]), math.nan)
    reward = torch.tensor([3.0, -1.0, 5.0])
    assert token_rewards(reward, mask).tolist() == [[0, 3, 0, 0], [0, 0, -1, 0], [0, 0, 0, 0]]
    with_kl = token_rewards(reward, mask, kl, beta=0.1)
    torch.testing.assert_close(with_kl, torch.tensor([[-0.05, 2.9, 0, 0], [-0.2, 0, -0.9, 0], [0, 0, 0, 0]]))
    empty = estimate_advantage(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0).bool(), gamma=1.0, lam=0.9)
    assert empty.advantage.shape == (0, 0)


def test_whitening_per_rank_equals_whitening_all_tokens():
    x = draw(8).flatten()
    shards = x.split([7, 30, len(x) - 37])
    total_moments = sum(moments(shard) for shard in shards)
    whitened = torch.cat([whiten(shard, total_moments) for shard in shards])
    torch.testing.assert_close(whitened, (x - x.mean()) / x.std(), rtol=1e-6, atol=1e-6)
    for few in (torch.tensor([2.0]), torch.tensor([2.0, 2.0]), torch.zeros(0)):
        assert torch.equal(whiten(few, moments(few)), few)


def value_loss(value: Tensor, old: Tensor, target: Tensor, clip: float | None) -> tuple[Tensor, Metrics]:
    columns = SimpleNamespace(extra={"old_value": old, "target": target})
    return ppo.value_loss(SimpleNamespace(cliprange_value=clip), value, columns)


def test_value_loss_by_hand():
    """Beyond the clip towards the target, the clipped error applies, without gradient; otherwise the plain error."""
    value = torch.tensor([0.1, 0.9, -0.5, 0.6], dtype=torch.float64, requires_grad=True)
    old, target = torch.tensor([0.0, 0.0, 0.0, 0.5]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    loss, metrics = value_loss(value, old, target, clip=0.2)
    # token 1 is clipped to 0.2; token 2 has moved away from its target, so the plain error is larger
    assert loss.item() == pytest.approx(0.5 * (0.9**2 + 0.8**2 + 1.5**2 + 0.6**2))
    assert [float(x) for x in metrics["value/clip_frac"]] == [1, 4]
    (grad,) = torch.autograd.grad(loss, value)
    assert grad.tolist() == pytest.approx([-0.9, 0.0, -1.5, 0.6])
    free, metrics = value_loss(value, old, target, clip=None)
    assert free.item() == pytest.approx(0.5 * (0.9**2 + 0.1**2 + 1.5**2 + 0.6**2))
    assert metrics == {}


def test_value_loss_matches_a_loop():
    value, old, target = (draw(seed).flatten() for seed in (9, 10, 11))
    want, num_clipped = 0.0, 0
    for v, o, r in zip(value.tolist(), old.tolist(), target.tolist(), strict=True):
        clipped = min(max(v, o - 0.3), o + 0.3)
        want += 0.5 * max((v - r) ** 2, (clipped - r) ** 2)
        num_clipped += (clipped - r) ** 2 > (v - r) ** 2
    loss, metrics = value_loss(value, old, target, clip=0.3)
    assert loss.item() == pytest.approx(want)
    assert metrics["value/clip_frac"][0] == num_clipped > 0


def test_explained_variance():
    returns = draw(12).flatten()
    noise = 0.5 * draw(13).flatten()

    def explained(value: Tensor) -> float:
        return explained_variance(moments(returns - value), moments(returns)).item()

    assert explained(returns) == pytest.approx(1.0) and explained(torch.full_like(returns, 0.7)) == pytest.approx(0.0)
    assert explained(returns + noise) == pytest.approx(1 - (noise.var() / returns.var()).item())
    assert explained(-returns) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(moments(noise), moments(torch.ones_like(noise))).item())
