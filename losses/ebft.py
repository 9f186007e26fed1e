"""Energy-based fine-tuning: rewards from the features of a frozen network (Jelassi et al. 2026, arXiv:2603.12248).

phi_j are the features of rollout j of a prompt (n rollouts), and phi_* the features of the target completion. The
objective is the conditional feature matching distance (cfm). In expectation, the policy gradient of the paper's reward
(eq. 7) is minus its gradient:

    cfm = || E phi - phi_* ||^2
    r_j = 2 phi_j . phi_*  -  2 / (n - 1) sum_{k != j} phi_j . phi_k          alignment - diversity

In practice (eq. 49) alignment is the cosine, 2 cos(phi_j, phi_*), from -2 to 2; `dot_alignment` is eq. 7.

Whitening is per prompt. X = U S V^T are the (n, D) features of its rollouts, not centred; S_k at noise level are
dropped:

    X~ = X V S^-1 V^T = U V^T         phi_*~ = phi_* V S^-1 V^T               target "feature", the paper's text
                                      phi_*~_j = (U S^-1 U^T 1)_j phi_*       target "sample", the authors' code

If the rollouts are linearly independent, the rows of X~ are orthonormal: diversity is 0 and its coefficient has no
effect. Diversity then only penalizes duplicates: 1/3 for each of two equal rollouts among four, 1/2 if all four are
equal. The paper's values are n times larger, because its covariance has a factor 1 / n.

Advantages of a group, with a = alignment_coef alignment, d = diversity_coef diversity, r = a - d:

    reinforce   r_j
    rloo        r_j - mean_{k != j} r_k
    rloo_split  a_j - mean_{k != j} a_k - (d_j - b_j),   b_j = (sum_k d_k - 2 d_j) / (n - 2), or 0 for n = 2
    grpo        (r_j - mean r) / (std r + 1e-8),   std with ddof = 1

rloo_split is the authors' estimator: b_j is the diversity among the other rollouts only. In rloo the r_k contain
phi_k . phi_j, so the baseline of rollout j depends on rollout j. In expectation this scales the diversity gradient by
(n - 2) / (n - 1), which is 0 for n = 2.

Shapes: P prompts, or document anchors in strided mode; G = n rollouts per prompt; T positions; D feature width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from losses.advantage import leave_one_out_advantage, nan_std
from losses.types import wide

RANK_TOLERANCE = 1e-5  # singular values below this fraction of the largest count as 0
EPSILON = 1e-8  # in the denominator of grpo


# Features


def layer_indices(fractions: Sequence[float], num_layers: int) -> list[int]:
    """Return the indices of the hidden states to use: k = floor(fraction * num_layers) is the output of block k.

    At least 1, because the embeddings (0) carry no context. Duplicates are removed.
    """
    if not fractions:
        raise ValueError("feature_layers=[]: must not be empty; pass fractions of the network's depth, e.g. 0.5")
    for fraction in fractions:
        if not 0 <= fraction <= 1:  # true for NaN
            raise ValueError(f"feature_layers={fraction}: must be a fraction of the network's depth, from 0 to 1")
    # The 1e-9 guards against rounding: 0.29 * 100 is just below 29.
    return list(dict.fromkeys(max(1, math.floor(fraction * num_layers + 1e-9)) for fraction in fractions))


def unit(
    x: Tensor,  # (..., D)
) -> Tensor:  # (..., D)
    """Scale to length 1; zeros stay zeros."""
    x = wide(x)
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def token_features(
    layers: Sequence[Tensor],  # (..., D) hidden states of each chosen layer
    *,
    normalize: Literal["token", "layer", "none"] = "token",
) -> Tensor:  # (..., layers * D)
    """Concatenate the layers; normalize the concatenated vector of each token (token), or each layer (layer)."""
    if normalize == "layer":
        return torch.cat([unit(layer) for layer in layers], dim=-1)
    assert normalize in ("token", "none"), normalize
    joined = wide(torch.cat(list(layers), dim=-1))
    return unit(joined) if normalize == "token" else joined


def last_token(
    features: Tensor,  # (..., T, D) NaN is allowed at masked positions
    mask: Tensor,  # (..., T) bool, True = a token of the sequence
) -> Tensor:  # (..., D)
    """Return the features of the last token in the mask, for padding on either side; 0 for an empty mask."""
    position = torch.arange(mask.shape[-1], device=mask.device)
    return _at(features, torch.where(mask, position, -1).amax(dim=-1))


def mean_pooling(
    features: Tensor,  # (..., T, D) NaN is allowed at masked positions
    mask: Tensor,  # (..., T) bool, True = a token to average over
) -> Tensor:  # (..., D)
    """Average over the tokens in the mask; 0 for an empty mask."""
    total = torch.where(mask.unsqueeze(-1), wide(features), 0.0).sum(dim=-2)
    return total / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def quarter_points(
    features: Tensor,  # (..., T, D) NaN is allowed at masked positions
    mask: Tensor,  # (..., T) bool, True = a token of the sequence
) -> Tensor:  # (..., 3 * D)
    """Concatenate the features of tokens L // 4, L // 2 and 3 L // 4 (from 0) of the L tokens in the mask."""
    length = mask.sum(dim=-1)
    order = mask.long().argsort(dim=-1, descending=True, stable=True)  # positions in the mask first, in order
    points = []
    for quarter in (1, 2, 3):
        position = order.gather(-1, (length * quarter // 4).unsqueeze(-1)).squeeze(-1)
        points.append(_at(features, torch.where(length > 0, position, -1)))
    return torch.cat(points, dim=-1)


def pool(
    features: Tensor,  # (..., T, D) NaN is allowed at masked positions
    mask: Tensor,  # (..., T) bool, True = a token of prompt or completion
    completion: Tensor,  # (..., T) bool, True = a token of the completion
    *,
    embed_method: str,
) -> Tensor:  # (..., D), or 3 * D for concat
    """Pool each sequence to one vector. In strided mode both masks are the block's tokens, so both means are equal."""
    if embed_method == "completion_mean":
        return mean_pooling(features, completion)
    methods = {"last_token": last_token, "mean_pooling": mean_pooling, "concat": quarter_points}
    if embed_method not in methods:
        names = ", ".join(sorted([*methods, "completion_mean"]))
        raise ValueError(f"embed_method={embed_method}: must be one of {names}")
    return methods[embed_method](features, mask)


def _at(features: Tensor, position: Tensor) -> Tensor:
    """Gather features (..., D) at one position (...) per sequence; 0 for position -1. NaN elsewhere does not leak."""
    index = position.clamp(min=0)[..., None, None].expand(*position.shape, 1, features.shape[-1])
    return torch.where(position.unsqueeze(-1) < 0, 0.0, wide(features).gather(-2, index).squeeze(-2))


# Whitening


class PairedFeatures(NamedTuple):
    """Features of rollouts and their targets. After whitening, the rollouts of a prompt may have different targets."""

    rollout: Tensor  # (P, G, D)
    target: Tensor  # (P, G, D)


def plain(
    rollout: Tensor,  # (P, G, D)
    target: Tensor,  # (P, D) target completion
) -> PairedFeatures:
    """Pair the features without whitening."""
    _check(rollout, target)
    return PairedFeatures(wide(rollout), wide(target).unsqueeze(1).expand_as(rollout))


def whiten(
    rollout: Tensor,  # (P, G, D)
    target: Tensor,  # (P, D) target completion
    *,
    whiten_target: Literal["feature", "sample"] = "feature",
    tolerance: float = RANK_TOLERANCE,
) -> PairedFeatures:
    """Whiten both by the rollouts of their prompt. Rollouts closer than tolerance count as one direction.

    U and S come from the Gram matrix of the rollouts, X X^T = U S^2 U^T, in float64. A batch of (G, G) problems is fast
    on any device, unlike a batch of (G, D) problems, and small S keep more digits than in a float32 SVD of X.
    """
    _check(rollout, target)
    if rollout.shape[1] < 2:
        raise ValueError(f"rollouts={rollout.shape[1]}: whitening needs 2 or more per prompt; set use_whitening=False")
    if whiten_target not in ("feature", "sample"):
        raise ValueError(f"whiten_target={whiten_target}: must be feature or sample")
    x, g = rollout.double(), target.double()
    square, u = torch.linalg.eigh(x @ x.transpose(1, 2))  # (P, G), (P, G, G)
    s = square.clamp(min=0).sqrt()
    kept = s > tolerance * s.amax(dim=1, keepdim=True)
    inverse = torch.where(kept, 1 / torch.where(kept, s, 1.0), 0.0)  # (P, G)
    v = inverse.unsqueeze(2) * (u.transpose(1, 2) @ x)  # (P, G, D) rows of V^T, 0 where dropped
    white = u @ v
    if whiten_target == "feature":
        white_target = ((g.unsqueeze(1) @ v.transpose(1, 2)) * inverse.unsqueeze(1)) @ v  # (P, 1, D)
    else:
        factor = u @ (inverse * u.sum(dim=1)).unsqueeze(2)  # (P, G, 1)
        white_target = factor * g.unsqueeze(1)
    dtype = wide(rollout).dtype
    return PairedFeatures(white.to(dtype), white_target.expand_as(white).to(dtype))


def _check(rollout: Tensor, target: Tensor) -> None:
    assert rollout.dim() == 3, f"rollout {tuple(rollout.shape)} is not (P, G, D)"
    assert target.shape == (rollout.shape[0], rollout.shape[2]), f"{tuple(target.shape)} vs {tuple(rollout.shape)}"


# Rewards


class Reward(NamedTuple):
    """The two parts of the reward, alignment - diversity; rloo_split uses them separately."""

    alignment: Tensor  # (P, G)
    diversity: Tensor  # (P, G)


def cosine_alignment(features: PairedFeatures) -> Tensor:  # (P, G)
    """2 cos(phi_j, phi_*), paper eq. 49."""
    return 2 * (unit(features.rollout) * unit(features.target)).sum(dim=-1)


def dot_alignment(features: PairedFeatures) -> Tensor:  # (P, G)
    """2 phi_j . phi_*, paper eq. 7."""
    return 2 * (wide(features.rollout) * wide(features.target)).sum(dim=-1)


def diversity(
    rollout: Tensor,  # (P, G, D)
) -> Tensor:  # (P, G)
    """2 / (n - 1) sum_{k != j} phi_j . phi_k; 0 for a single rollout."""
    products = wide(rollout) @ wide(rollout).transpose(1, 2)  # (P, G, G)
    # Mask the diagonal rather than subtract it from the sum, where it is by far the largest term.
    diagonal = torch.eye(rollout.shape[1], dtype=torch.bool, device=rollout.device)
    return 2 * products.masked_fill(diagonal, 0.0).sum(dim=-1) / max(1, rollout.shape[1] - 1)


def feature_reward(
    features: PairedFeatures,
    *,
    alignment_coef: float = 1.0,
    diversity_coef: float = 1.0,
    alignment: Literal["cosine", "dot"] = "cosine",
) -> Reward:
    aligned = {"cosine": cosine_alignment, "dot": dot_alignment}[alignment](features)
    return Reward(alignment_coef * aligned, diversity_coef * diversity(features.rollout))


def cfm_distance(
    rollout: Tensor,  # (P, G, D) not whitened
    target: Tensor,  # (P, D) not whitened
) -> Tensor:  # (P,)
    """|| mean_j phi_j - phi_* ||^2. Biased upwards by var(phi) / n, so only values with equal n are comparable."""
    _check(rollout, target)
    return (wide(rollout).mean(dim=1) - wide(target)).square().sum(dim=-1)


def cfm_unbiased(
    rollout: Tensor,  # (P, G, D) not whitened, G at least 2
    target: Tensor,  # (P, D) not whitened
) -> Tensor:  # (P,) may be negative
    """cfm_distance minus its bias: the expectation is || E phi - phi_* ||^2 for any number of rollouts."""
    num_rollouts = rollout.shape[1]
    if num_rollouts < 2:
        raise ValueError(f"rollouts={num_rollouts}: a variance needs 2 or more; sample more, or use cfm_distance")
    centred = wide(rollout) - wide(rollout).mean(dim=1, keepdim=True)
    variance = centred.square().sum(dim=(1, 2)) / (num_rollouts - 1)  # (P,) summed over features
    return cfm_distance(rollout, target) - variance / num_rollouts


# Advantages


def reinforce(reward: Reward) -> Tensor:  # (P, G)
    return reward.alignment - reward.diversity


def rloo(reward: Reward) -> Tensor:  # (P, G)
    return _without_noise(leave_one_out_advantage(reward.alignment - reward.diversity), reward)


def rloo_split(reward: Reward) -> Tensor:  # (P, G)
    """Unbiased, unlike rloo: the baseline of each part does not depend on the rollout itself."""
    d, num_rollouts = reward.diversity, reward.diversity.shape[1]
    if num_rollouts > 2:
        baseline = (d.sum(dim=1, keepdim=True) - 2 * d) / (num_rollouts - 2)
    else:
        baseline = torch.zeros_like(d)
    return _without_noise(leave_one_out_advantage(reward.alignment) - (d - baseline), reward)


def grpo(reward: Reward) -> Tensor:  # (P, G)
    """Return 0, not unit-size noise, if rewards differ only by rounding, as for equal rollouts."""
    total = reward.alignment - reward.diversity
    deviation = nan_std(total, dim=1).unsqueeze(1)  # (P, 1)
    return torch.where(
        deviation > _noise(reward), (total - total.mean(dim=1, keepdim=True)) / (deviation + EPSILON), 0.0
    )


def _noise(reward: Reward) -> Tensor:  # (P, 1)
    """Largest difference that counts as rounding; sums over the other rollouts depend on their order."""
    largest = (reward.alignment.abs() + reward.diversity.abs()).amax(dim=1, keepdim=True)
    return 16 * torch.finfo(largest.dtype).eps * largest


def _without_noise(
    advantage: Tensor,  # (P, G)
    reward: Reward,
) -> Tensor:  # (P, G)
    """Set groups whose advantages are rounding noise to 0; the optimizer would take a full-size step on them."""
    return torch.where(advantage.abs().amax(dim=1, keepdim=True) > _noise(reward), advantage, 0.0)


ADVANTAGES: dict[str, Callable[[Reward], Tensor]] = {
    "rloo": rloo,
    "rloo_split": rloo_split,
    "grpo": grpo,
    "reinforce": reinforce,
}


def advantage_of(reward: Reward, *, advantage_estimator: str) -> Tensor:  # (P, G)
    """Apply an estimator of ADVANTAGES. Rewards must not be NaN."""
    if advantage_estimator not in ADVANTAGES:
        names = ", ".join(sorted(ADVANTAGES))
        raise ValueError(f"advantage_estimator={advantage_estimator}: must be one of {names}")
    num_rollouts = reward.alignment.shape[1]
    if num_rollouts < 2 and advantage_estimator != "reinforce":
        reason = f"advantage_estimator={advantage_estimator} needs 2 or more per prompt"
        raise ValueError(f"rollouts={num_rollouts}: {reason}; sample more, or use reinforce")
    return ADVANTAGES[advantage_estimator](reward)
