"""Energy-based fine-tuning in plain loops: every anchor, sample and token by itself, with plain forward passes.

Written from the formulas; uses nothing of losses.ebft, trainer.ebft.features or trainer.ebft.strided.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def states(model: Any, ids: list[int], layers: list[int]) -> list[Tensor]:
    """Outputs of the blocks `layers` (from 1), (T, D) each, from a forward pass of this sequence alone."""
    hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [hidden[number][0] for number in layers]


def token_vectors(model: Any, ids: list[int], layers: list[int], norm: str) -> Tensor:  # (T, layers * D)
    rows = []
    for parts in zip(*states(model, ids, layers), strict=True):
        if norm == "layer":
            rows.append(torch.cat([part / part.norm() for part in parts]))
        else:
            joined = torch.cat(list(parts))
            rows.append(joined / joined.norm() if norm == "token" else joined)
    return torch.stack(rows)


def pooled(vectors: Tensor, method: str, prompt_length: int) -> Tensor:
    """The feature of a whole sequence from the `vectors` of its tokens, prompt first."""
    length = len(vectors)
    if method == "last_token":
        return vectors[length - 1]
    if method == "mean_pooling":
        return vectors.sum(dim=0) / length
    if method == "completion_mean":
        return vectors[prompt_length:].sum(dim=0) / (length - prompt_length)
    assert method == "concat"
    return torch.cat([vectors[length // 4], vectors[length // 2], vectors[3 * length // 4]])


def whitened(x: Tensor, g: Tensor, how: str) -> tuple[Tensor, list[Tensor]]:  # (n, D), one target per rollout
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    keep = s > 1e-5 * s.max()
    u, s, vh = u[:, keep], s[keep], vh[keep]
    if how == "feature":
        return u @ vh, [(g @ vh.T / s) @ vh] * len(x)
    operator = u @ torch.diag(1 / s) @ u.T  # (n, n)
    return u @ vh, list(operator @ torch.stack([g] * len(x)))


def reward_parts(x: Tensor, g: Tensor, options: Any) -> tuple[list[float], list[float], float]:
    """Alignment and diversity of each rollout, with coefficients, and the distance from the mean to the target."""
    distance = float((x.mean(dim=0) - g).square().sum())
    targets = [g] * len(x)
    if options.use_whitening:
        x, targets = whitened(x, g, options.whiten_gt)
    alignment, diversity = [], []
    for j, (own, target) in enumerate(zip(x, targets, strict=True)):
        product = float(own @ target)
        if options.alignment == "cosine":
            product /= float(own.norm() * target.norm())
        alignment.append(options.alignment_coef * 2 * product)
        others = [float(own @ x[k]) for k in range(len(x)) if k != j]
        diversity.append(options.diversity_coef * 2 * sum(others) / max(1, len(others)))
    return alignment, diversity, distance


def advantages(alignment: list[float], diversity: list[float], estimator: str) -> list[float]:
    n, reward = len(alignment), [a - d for a, d in zip(alignment, diversity, strict=True)]
    if estimator == "reinforce":
        return reward
    if estimator == "rloo":
        return [r - (sum(reward) - r) / (n - 1) for r in reward]
    if estimator == "rloo_split":
        found = []
        for a, d in zip(alignment, diversity, strict=True):
            baseline = (sum(diversity) - 2 * d) / (n - 2) if n > 2 else 0.0
            found.append(a - (sum(alignment) - a) / (n - 1) - (d - baseline))
        return found
    mean = sum(reward) / n
    deviation = math.sqrt(sum((r - mean) ** 2 for r in reward) / (n - 1))
    return [(r - mean) / (deviation + 1e-8) for r in reward]


def logps(model: Any, ids: list[int], first: int, temperature: float) -> Tensor:
    """Log-probs of ids[first:], each given the ids before it."""
    logits = model(input_ids=torch.tensor([ids])).logits[0] / temperature
    return torch.stack([logits[place - 1].log_softmax(dim=-1)[ids[place]] for place in range(first, len(ids))])


def strided_loss(
    model: Any, frozen: Any, documents: list[Any], blocks: dict[tuple[int, int], list[list[int]]], cfg: Any,
    layers: list[int],
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """The loss of a step, and its parts. `blocks` has the generated ids by document and anchor."""
    options = cfg.features
    policy_sum, num_generated, ce_sum, num_text = 0.0, 0, 0.0, 0
    found: dict[str, Any] = {"advantage": [], "cfm": [], "alignment": [], "diversity": []}
    for number, document in enumerate(documents):
        trained = document.mask or [place >= document.prompt_length for place in range(len(document.ids))]
        first = max(cfg.strided.context_length, document.prompt_length)
        size = cfg.strided.generate_max_len
        for anchor in range(first, len(document.ids) - size + 1, cfg.strided.stride):
            if not all(trained[anchor : anchor + size]):
                continue
            rows = blocks[number, anchor]
            with torch.no_grad():
                vectors = [
                    token_vectors(frozen, document.ids[:anchor] + block, layers, options.feature_norm)[anchor:]
                    for block in (*rows, document.ids[anchor : anchor + size])
                ]
                method = "mean_pooling" if options.embed_method == "completion_mean" else options.embed_method
                features = torch.stack([pooled(v, method, 0) for v in vectors])
            alignment, diversity, distance = reward_parts(features[:-1], features[-1], options)
            advantage = advantages(alignment, diversity, options.advantage_estimator)
            found["advantage"].append(advantage)
            found["alignment"].append(alignment)
            found["diversity"].append(diversity)
            found["cfm"].append(distance)
            for block, a in zip(rows, advantage, strict=True):
                policy_sum = (
                    policy_sum - (a * logps(model, document.ids[:anchor] + block, anchor, cfg.temperature)).sum()
                )
                num_generated += len(block)
        own = logps(model, document.ids, 1, 1.0)
        places = [place for place in range(1, len(document.ids)) if trained[place]]
        ce_sum = ce_sum - sum(own[place - 1] for place in places)
        num_text += len(places)
    loss = options.rl_coef * policy_sum / max(1, num_generated) + options.ce_coef * ce_sum / max(1, num_text)
    return loss, found
