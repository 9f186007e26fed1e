"""EBFT against hand-computed values, plain Python loops and the exact expectations of an enumerable model."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from losses.ebft import (
    ADVANTAGES,
    PairedFeatures,
    Reward,
    advantage_of,
    cfm_distance,
    cfm_unbiased,
    diversity,
    dot_alignment,
    feature_reward,
    grpo,
    last_token,
    layer_indices,
    mean_pooling,
    plain,
    pool,
    quarter_points,
    reinforce,
    rloo,
    rloo_split,
    token_features,
    unit,
    whiten,
)

METHODS = ("last_token", "mean_pooling", "completion_mean", "concat")


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Tensor, want, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, tensor(want) if not isinstance(want, Tensor) else want, atol=atol, rtol=0)


# Features


def test_layer_fractions_become_blocks():
    for fractions, num_layers, expected in (
        ([0.25, 0.5, 0.75], 32, [8, 16, 24]),
        ([0.25, 0.5, 0.75], 28, [7, 14, 21]),
        ([0.25, 0.5, 0.75], 4, [1, 2, 3]),
        ([0.1], 4, [1]),  # not 0, the embeddings
        ([0.0, 1.0], 12, [1, 12]),
        ([0.25, 0.5, 0.75], 3, [1, 2]),  # 0.75 and 1.5 both give the first block
        ([0.29], 100, [29]),  # the product is 28.999999999999996
    ):
        assert layer_indices(fractions, num_layers) == expected, (fractions, num_layers)


def test_rejections():
    one, mask = draw(2, 1, 3), torch.ones(1, 2, dtype=torch.bool)
    single = feature_reward(plain(one, draw(2, 3, seed=1)))
    for call, message in (
        *((partial(layer_indices, [0.5, x], 12), f"feature_layers={x}:") for x in (-0.1, 1.01, math.nan)),
        (partial(layer_indices, [], 12), r"feature_layers=\[\]:"),
        (partial(pool, draw(1, 2, 3), mask, mask, embed_method="median"),
         "embed_method=median: .* completion_mean, concat, last_token, mean_pooling$"),
        (partial(whiten, one, draw(2, 3)), "rollouts=1: .*use_whitening"),
        (partial(whiten, *WORKED, whiten_target="both"), "whiten_target=both: .*feature or sample$"),
        (partial(advantage_of, PARTS, advantage_estimator="gae"),
         "advantage_estimator=gae: .* grpo, reinforce, rloo, rloo_split$"),
        *((partial(advantage_of, single, advantage_estimator=name), f"rollouts=1: .*{name} .*reinforce$")
          for name in sorted(set(ADVANTAGES) - {"reinforce"})),
        (partial(cfm_unbiased, one, draw(2, 3)), "rollouts=1: .*cfm_distance$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
    close(advantage_of(single, advantage_estimator="reinforce"), single.alignment)  # diversity is 0


def test_layers_are_normalized_jointly_separately_or_not():
    layers = [tensor([[3.0, 4.0]]), tensor([[0.0, 12.0]])]
    close(token_features(layers), [[3 / 13, 4 / 13, 0, 12 / 13]])
    close(token_features(layers, normalize="layer"), [[0.6, 0.8, 0, 1]])
    close(token_features(layers, normalize="none"), [[3, 4, 0, 12]])
    assert token_features([x.bfloat16() for x in layers]).dtype == torch.float32
    close(unit(torch.zeros(2, 3, dtype=torch.float64)), [[0, 0, 0]] * 2)


def naive_pool(tokens: list[list[float]], num_prompt: int, method: str) -> list[float]:
    """Pool one sequence without padding, token by token."""

    def mean(rows: list[list[float]]) -> list[float]:
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    length = len(tokens)
    return {
        "last_token": lambda: tokens[-1],
        "mean_pooling": lambda: mean(tokens),
        "completion_mean": lambda: mean(tokens[num_prompt:]),
        "concat": lambda: tokens[length // 4] + tokens[length // 2] + tokens[3 * length // 4],
    }[method]()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
def test_pooling_ignores_padding(method, side):
    sizes = [(8, 3), (5, 4), (1, 0), (3, 1)]  # length and prompt length; the second completion is one token
    features = torch.full((4, 8, 2), math.nan, dtype=torch.float64)
    mask, completion = torch.zeros(2, 4, 8, dtype=torch.bool)
    want = []
    for row, (length, num_prompt) in enumerate(sizes):
        first = 0 if side == "right" else 8 - length
        features[row, first : first + length] = draw(length, 2, seed=row)
        mask[row, first : first + length] = True
        completion[row, first + num_prompt : first + length] = True
        want.append(naive_pool(draw(length, 2, seed=row).tolist(), num_prompt, method))
    close(pool(features, mask, completion, embed_method=method), want)
    # Groups and blocks are leading dimensions.
    nested = pool(features.view(2, 2, 8, 2), mask.view(2, 2, 8), completion.view(2, 2, 8), embed_method=method)
    close(nested.flatten(0, 1), want)


@pytest.mark.parametrize("function", [last_token, mean_pooling, quarter_points])
def test_empty_sequence_pools_to_zero(function):
    got = function(torch.full((1, 4, 2), math.nan), torch.zeros(1, 4, dtype=torch.bool))
    assert got.unique().tolist() == [0.0]


# Whitening

WORKED = tensor([[[1, 0, 0], [0.6, 0.8, 0]]]), tensor([[0.8, 0.36, 0.48]])


def test_whitening_two_rollouts_by_hand():
    features = whiten(*WORKED)
    close(features.rollout, [[[0.9487, -0.3162, 0], [0.3162, 0.9487, 0]]], atol=5e-5)
    close(features.target, [[[0.6451, 0.2593, 0]] * 2], atol=5e-5)
    close(feature_reward(features).alignment / 2, [[0.7623, 0.6472]], atol=5e-5)


def test_whitening_the_target_by_samples_keeps_its_direction():
    features = whiten(*WORKED, whiten_target="sample")
    close(features.rollout, whiten(*WORKED).rollout)
    close(feature_reward(features).alignment / 2, [[0.6451, 0.5945]], atol=5e-5)
    close(unit(features.target).abs(), unit(WORKED[1]).expand(1, 2, 3))


@pytest.mark.parametrize(("num_rollouts", "width"), [(2, 5), (4, 30), (5, 3)])
def test_whitening_equals_the_formula_with_a_full_matrix(num_rollouts, width):
    rollout, target = draw(3, num_rollouts, width, seed=1), draw(3, width, seed=2)
    rollout[0, 1] = rollout[0, 0]  # one group with a duplicate
    for p in range(3):
        u, s, vh = torch.linalg.svd(rollout[p], full_matrices=False)
        inverse = torch.where(s > 1e-5 * s.max(), 1 / s, 0.0)
        by_feature, by_sample = vh.T @ inverse.diag() @ vh, u @ inverse.diag() @ u.T
        close(whiten(rollout, target).rollout[p], rollout[p] @ by_feature, atol=1e-9)
        close(whiten(rollout, target).rollout[p], by_sample @ rollout[p], atol=1e-9)
        close(whiten(rollout, target).target[p], (target[p] @ by_feature).expand(num_rollouts, width), atol=1e-9)
        sample = whiten(rollout, target, whiten_target="sample").target[p]
        close(sample, by_sample @ target[p].expand(num_rollouts, width), atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_whitened_independent_rollouts_are_orthonormal_with_zero_diversity(dtype):
    rollout = draw(6, 4, 50).to(dtype)
    rollout[:, 1] = rollout[:, 0] + 1e-3 * rollout[:, 1]  # close to each other, but distinct
    white = whiten(rollout, rollout[:, 0]).rollout
    assert white.dtype == dtype
    tolerance = 1e-9 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(
        white @ white.transpose(1, 2), torch.eye(4, dtype=dtype).expand(6, 4, 4), atol=tolerance, rtol=0
    )
    torch.testing.assert_close(diversity(white), torch.zeros(6, 4, dtype=dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("picks", "expected"),
    [([0, 0, 1, 2], [1 / 3, 1 / 3, 0, 0]), ([0, 0, 0, 0], [1 / 2] * 4), ([0, 1, 0, 1], [1 / 3] * 4)],
    ids=["two equal", "all equal", "two pairs"],
)
def test_whitened_diversity_penalizes_only_duplicates(picks, expected):
    rollout = draw(1, 3, 10)[:, picks]
    close(diversity(whiten(rollout, rollout[:, 0]).rollout), [expected], atol=1e-9)
    # The same for duplicates that differ by rounding.
    noisy = (rollout + 1e-7 * draw(1, 4, 10, seed=3)).float()
    close(diversity(whiten(noisy, noisy[:, 0]).rollout).double(), [expected], atol=1e-5)


def test_whitening_is_per_prompt():
    rollout, target = draw(5, 3, 7), draw(5, 7, seed=1)
    separate = [whiten(rollout[p : p + 1], target[p : p + 1]) for p in range(5)]
    for joint, parts in zip(whiten(rollout, target), zip(*separate, strict=True), strict=True):
        close(joint, torch.cat(parts))


def test_whitening_zeros_stays_finite():
    features = whiten(torch.zeros(1, 3, 4), torch.ones(1, 4))
    assert features.rollout.unique().tolist() == [0.0] and features.target.unique().tolist() == [0.0]


# Rewards


def test_rewards_of_unit_vectors_by_hand():
    rollout, target = tensor([[[1, 0, 0], [0.6, 0.8, 0]]]), tensor([[0.8, 0.6, 0]])
    reward = feature_reward(plain(rollout, target))
    close(reward.alignment, [[1.6, 1.92]])
    close(reward.diversity, [[1.2, 1.2]])
    close(reinforce(reward), [[0.4, 0.72]])
    close(rloo(reward), [[-0.32, 0.32]])
    close(cfm_distance(rollout, target), [0.04])


@pytest.mark.parametrize("alignment", ["cosine", "dot"])
@pytest.mark.parametrize("num_rollouts", [1, 2, 4])
def test_rewards_equal_plain_loops_with_coefficients(alignment, num_rollouts):
    rollout, target = draw(3, num_rollouts, 5), draw(3, 5, seed=1)

    def dot(x, y):
        return sum(a * b for a, b in zip(x, y, strict=True))

    aligned, diverse, distance = [], [], []
    for group, g in zip(rollout.tolist(), target.tolist(), strict=True):
        scale = [math.sqrt(dot(x, x) * dot(g, g)) if alignment == "cosine" else 1.0 for x in group]
        aligned.append([0.7 * 2 * dot(x, g) / s for x, s in zip(group, scale, strict=True)])
        pairs = [sum(dot(x, y) for k, y in enumerate(group) if k != j) for j, x in enumerate(group)]
        diverse.append([0.3 * 2 * total / max(1, num_rollouts - 1) for total in pairs])
        mean = [sum(column) / num_rollouts for column in zip(*group, strict=True)]
        distance.append(sum((a - b) ** 2 for a, b in zip(mean, g, strict=True)))
    reward = feature_reward(plain(rollout, target), alignment_coef=0.7, diversity_coef=0.3, alignment=alignment)
    close(reward.alignment, aligned)
    close(reward.diversity, diverse)
    close(cfm_distance(rollout, target), distance)


def test_rewards_of_half_precision_features_are_float32():
    rollout, target = draw(2, 3, 4).bfloat16(), draw(2, 4).bfloat16()
    reward = feature_reward(plain(rollout, target))
    assert {x.dtype for x in (*reward, cfm_distance(rollout, target), *whiten(rollout, target))} == {torch.float32}
    expected = feature_reward(plain(rollout.double(), target.double()))
    close(reinforce(reward).double(), reinforce(expected), atol=1e-5)


# Advantages

PARTS = Reward(tensor([[1.2, 0.8, 1.0, 0.6]]), tensor([[0.5, 0.3, 0.4, 0.2]]))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("reinforce", [0.7, 0.5, 0.6, 0.4]),
        ("rloo", [0.2, -0.0667, 0.0667, -0.2]),
        ("rloo_split", [0.1, -0.0333, 0.0333, -0.1]),
        ("grpo", [1.1619, -0.3873, 0.3873, -1.1619]),
    ],
)
def test_advantages_of_four_rollouts_by_hand(estimator, expected):
    close(advantage_of(PARTS, advantage_estimator=estimator), [expected], atol=5e-5)


def test_the_split_baseline_is_the_diversity_among_the_other_rollouts():
    rollout = draw(1, 5, 3)
    d = diversity(rollout)
    baseline = d + rloo_split(Reward(torch.zeros_like(d), d))  # d_j - (d_j - b_j)
    for j in range(5):
        others = [(a, b) for a, b in itertools.permutations(range(5), 2) if j not in (a, b)]
        mean = sum(2 * float(rollout[0, a] @ rollout[0, b]) for a, b in others) / len(others)
        assert float(baseline[0, j]) == pytest.approx(mean, abs=1e-12)


def test_rloo_ignores_the_diversity_of_two_rollouts_and_rloo_split_does_not():
    reward = feature_reward(plain(draw(3, 2, 4), draw(3, 4, seed=1)))
    aligned = reward.alignment[:, 0] - reward.alignment[:, 1]
    close(rloo(reward), torch.stack([aligned, -aligned], dim=1))
    close(rloo_split(reward), torch.stack([aligned, -aligned], dim=1) - reward.diversity)


def test_rewards_that_differ_only_by_rounding_have_no_group_advantage():
    alignment = torch.full((1, 4), 1.7)
    alignment[0, 2] += 2e-7
    assert alignment.unique().numel() == 2
    reward = Reward(alignment, torch.full((1, 4), 0.5))
    assert grpo(reward).tolist() == [[0.0] * 4]
    assert grpo(Reward(torch.zeros(1, 3), torch.zeros(1, 3))).tolist() == [[0.0] * 3]


# A model whose sequences and their probabilities can be enumerated


class Enumerable:
    """Sequences of one or two tokens, the second conditioned on the first; every sequence has features."""

    def __init__(self, vocabulary: int, length: int, embed_method: str) -> None:
        self.sequences = torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))  # (S, T)
        self.first = draw(vocabulary, seed=1).requires_grad_()
        self.second = draw(vocabulary, vocabulary, seed=2).requires_grad_()
        layers = draw(2, len(self.sequences) + 1, length, 3, seed=3)  # a token's state depends on the tokens before it
        mask = torch.ones(len(self.sequences) + 1, length, dtype=torch.bool)
        pooled = pool(token_features(list(layers)), mask, mask, embed_method=embed_method)
        self.features, self.target = pooled[1:], pooled[0]  # (S, D), (D,)
        self.parameters = [self.first, self.second] if length == 2 else [self.first]

    def logp(self) -> Tensor:  # (S, T)
        parts = [self.first.log_softmax(-1)[self.sequences[:, 0]]]
        if self.sequences.shape[1] == 2:
            parts.append(self.second.log_softmax(-1)[self.sequences[:, 0], self.sequences[:, 1]])
        return torch.stack(parts, dim=1)

    def cfm(self) -> Tensor:  # ()
        return (self.logp().sum(dim=1).exp() @ self.features - self.target).square().sum()

    def groups(self, num_rollouts: int) -> tuple[Tensor, Tensor]:  # (P, G) sequences of each group, (P,) probability
        index = torch.tensor(list(itertools.product(range(len(self.sequences)), repeat=num_rollouts)))
        return index, self.logp().sum(dim=1)[index].sum(dim=1).exp().detach()

    def expected_gradient(self, advantage: Tensor, num_rollouts: int) -> list[Tensor]:
        """Expected gradient of the training loss over all possible groups, per rollout of the group."""
        index, probability = self.groups(num_rollouts)
        logp = self.logp()[index]  # (P, G, T)
        tokens = (probability.unsqueeze(1) * advantage).unsqueeze(2).expand_as(logp)
        return list(torch.autograd.grad(-(logp * tokens).sum() / num_rollouts, self.parameters))

    def reward(self, num_rollouts: int, **coefficients: float) -> Reward:
        index, _ = self.groups(num_rollouts)
        target = self.target.expand(len(index), -1)
        return feature_reward(plain(self.features[index], target), alignment="dot", **coefficients)


ENUMERABLE = [(5, 1, 2, "last_token"), (3, 1, 4, "concat"), (3, 2, 3, "completion_mean")]


@pytest.mark.parametrize(("vocabulary", "length", "num_rollouts", "embed_method"), ENUMERABLE)
@pytest.mark.parametrize("estimator", ["reinforce", "rloo_split"])
def test_expected_loss_gradient_is_the_gradient_of_the_feature_distance(
    estimator, vocabulary, length, num_rollouts, embed_method
):
    model = Enumerable(vocabulary, length, embed_method)
    advantage = advantage_of(model.reward(num_rollouts), advantage_estimator=estimator)
    expected = torch.autograd.grad(model.cfm(), model.parameters)
    assert all(x.abs().max() > 1e-2 for x in expected)
    for got, want in zip(model.expected_gradient(advantage, num_rollouts), expected, strict=True):
        close(got, want, atol=1e-10)


@pytest.mark.parametrize(("vocabulary", "length", "num_rollouts", "embed_method"), ENUMERABLE)
def test_rloo_shrinks_the_diversity_gradient(vocabulary, length, num_rollouts, embed_method):
    model = Enumerable(vocabulary, length, embed_method)
    got = model.expected_gradient(rloo(model.reward(num_rollouts)), num_rollouts)
    shrunk = model.reward(num_rollouts, diversity_coef=(num_rollouts - 2) / (num_rollouts - 1))
    for x, y in zip(got, model.expected_gradient(reinforce(shrunk), num_rollouts), strict=True):
        close(x, y, atol=1e-10)


@pytest.mark.parametrize(("vocabulary", "length", "num_rollouts", "embed_method"), ENUMERABLE)
def test_cfm_distance_is_biased_by_the_variance_and_cfm_unbiased_is_not(vocabulary, length, num_rollouts, embed_method):
    model = Enumerable(vocabulary, length, embed_method)
    index, probability = model.groups(num_rollouts)
    rollout, target = model.features[index], model.target.expand(len(index), -1)
    p = model.logp().sum(dim=1).exp().detach()
    variance = float((p @ model.features.square() - (p @ model.features).square()).sum())
    assert float(probability @ cfm_unbiased(rollout, target)) == pytest.approx(model.cfm().tolist(), abs=1e-12)
    expected = model.cfm().tolist() + variance / num_rollouts
    assert float(probability @ cfm_distance(rollout, target)) == pytest.approx(expected, abs=1e-12)


def test_dot_alignment_uses_lengths_and_cosine_does_not():
    features = PairedFeatures(tensor([[[2.0, 0.0]]]), tensor([[[3.0, 4.0]]]))
    close(dot_alignment(features), [[12.0]])
    close(feature_reward(features).alignment, [[1.2]])


@pytest.mark.parametrize("estimator", ["rloo", "rloo_split", "grpo"])
@pytest.mark.parametrize("num_rollouts", [3, 16])
def test_equal_rollouts_have_no_advantage_despite_rounding(estimator, num_rollouts):
    """Diversity sums over the other rollouts in different orders, so equal rollouts differ by rounding."""
    generator = torch.Generator().manual_seed(num_rollouts)
    one = unit(torch.randn(200, 1, 48, generator=generator))
    target = unit(torch.randn(200, 48, generator=generator))
    rollout = one.expand(200, num_rollouts, 48)
    for features in (plain(rollout, target), whiten(rollout, target)):
        reward = feature_reward(features)
        assert (advantage_of(reward, advantage_estimator=estimator) == 0).all()
        nudged = reward._replace(alignment=reward.alignment + 1e-4 * torch.eye(num_rollouts)[0])
        assert (advantage_of(nudged, advantage_estimator=estimator) != 0).any(dim=1).all()
