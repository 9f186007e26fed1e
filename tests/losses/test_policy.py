"""Golden values of every loss type, checked against TRL 1.16.0: two completions, of three tokens and of one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from kernels import linear_logprob
from losses.entropy import keep_top_entropy
from losses.importance import sequence_length, sequence_sum
from losses.policy import POLICY_LOSSES, clip_bounds
from tests.losses.packed import MAX_LENGTH, Tokens, config
from trainer.methods.grpo import token_share

LOGP = (-1.0, -0.5, -2.0, -0.7)
OLD = (-1.2, -0.5, -1.5, -1.2)
REF = (-1.1, -0.6, -1.8, -0.9)
ADVANTAGE = (1.0, 1.0, 1.0, -1.0)
SEQUENCE = (0, 0, 0, 1)
CLIP = {"epsilon": 0.2, "epsilon_high": 0.2}
CLIPPED = [name for name, record in POLICY_LOSSES.items() if record.loss is None]
SEQUENCE_LEVEL = [name for name, record in POLICY_LOSSES.items() if record.ratio == "token"]  # others reject it
BOUNDS = ("delta", "dual_clip")


def golden(**columns: Tensor) -> Tokens:
    return Tokens(*(torch.tensor(x) for x in (LOGP, OLD, ADVANTAGE, SEQUENCE)), **columns)


def random_case(seed: int = 0, spread: float = 0.3, *, weighted: bool = True) -> Tokens:
    """Four completions of 5, 1, 9 and 11 tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 1, 9, 11]))
    n = len(sequence)
    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    logp = old + spread * torch.randn(n, generator=generator, dtype=torch.float64)
    advantage = torch.randn(4, generator=generator, dtype=torch.float64)[sequence]
    weight = torch.rand(n, generator=generator, dtype=torch.float64)
    return Tokens(logp, old, advantage, sequence, weight=weight if weighted else None)


def one(logp: list[float], log_ratio: float, advantage: list[float], **columns: Tensor) -> Tokens:
    """Tokens with this log-ratio, of one completion."""
    now = torch.tensor(logp)
    return Tokens(now, now - log_ratio, torch.tensor(advantage), torch.zeros(len(logp)).long(), **columns)


def check(case: Tokens, value: Tensor, loss: float, gradient: list[float], what: object = "") -> None:
    assert value.item() == pytest.approx(loss, abs=1e-6), what
    torch.testing.assert_close(case.gradient(value), torch.tensor(gradient), atol=1e-6, rtol=0, msg=str(what))


GOLDEN = [
    ("grpo", "token", 0.356606, [0, -0.166667, -0.101088, 0.824361]),
    ("bnpo", "token", -0.289452, [0, -0.25, -0.151633, 0.412180]),
    ("dapo", "token", -0.289452, [0, -0.25, -0.151633, 0.412180]),
    ("dr_grpo", "token", -0.144726, [0, -0.125, -0.075816, 0.206090]),
    ("luspo", "token", -0.578905, [0, -0.5, -0.303265, 0.824361]),
    ("cispo", "token", 0.445090, [-0.305351, -0.25, -0.151633, 0.412180]),
    ("sapo", "token", 0.292751, [-0.201093, -0.166667, -0.097275, 0.735676]),
    ("vespo", "token", 0.830704, [-0.298571, -0.298571, -0.298571, 0.306133]),
    ("grpo", "sequence", 0.371942, [-0.150806, -0.150806, -0.150806, 0.824361]),
    ("luspo", "sequence", -0.532896, [-0.452419, -0.452419, -0.452419, 0.824361]),
    ("dapo", "sequence", -0.266448, [-0.226209, -0.226209, -0.226209, 0.412180]),
]
GOLDEN_DPPO = [  # by hand: |p - mu| of the first token is 0.0667, its KL 0.00985; the others are not pushed away
    ("dppo_tv", 0.15, -0.294803, [-0.305351, -0.25, -0.151633, 0.412180]),
    ("dppo_tv", 0.05, 0.010548, [0, -0.25, -0.151633, 0.412180]),
    ("dppo_kl", 0.0099, -0.294803, [-0.305351, -0.25, -0.151633, 0.412180]),
    ("dppo_kl", 0.0098, 0.010548, [0, -0.25, -0.151633, 0.412180]),
]
GOLDEN_OPTIONS = [
    ({"delta": 1.5}, -0.326633, [0, -0.25, -0.151633, 0]),
    ({"dual_clip": 1.5}, -0.326633, [0, -0.25, -0.151633, 0]),
    ({"epsilon_high": 0.28}, -0.294803, [-0.305351, -0.25, -0.151633, 0.412180]),
]


def test_golden_values():
    for name, level, loss, gradient in GOLDEN:
        case = golden()
        check(case, case.loss(name, level=level, **CLIP)[0], loss, gradient, (name, level))
    for options, loss, gradient in GOLDEN_OPTIONS:
        case = golden()
        check(case, case.loss("dapo", **CLIP | options)[0], loss, gradient, options)
    for name, threshold, loss, gradient in GOLDEN_DPPO:
        case = golden()
        value, metrics = case.loss(name, dppo_threshold=threshold)
        check(case, value, loss, gradient, (name, threshold))
        assert metrics["policy/dppo_masked_frac"][0].item() == (gradient[0] == 0), (name, threshold)
    case = golden()
    case.old = case.logp.detach()  # on policy
    check(case, case.loss("dapo", **CLIP)[0], -0.5, [-0.25, -0.25, -0.25, 0.25])


def test_golden_values_of_weights_and_the_entropy_bonus():
    """An importance correction, the same as part of vespo's weight, and the top-entropy mask."""
    weight = torch.tensor([0.9, 1.1, 1.0, 2.0])
    case = golden(weight=weight)
    check(case, case.loss("dapo", **CLIP)[0], 0.127728, [0, -0.275, -0.151633, 0.824361])
    moved = (torch.tensor(LOGP) - torch.tensor(OLD) + weight.log(), torch.tensor(SEQUENCE))
    case = golden(total_log_ratio=sequence_sum(*moved, num_sequences=2)[torch.tensor(SEQUENCE)])
    check(case, case.loss("vespo")[0], 0.983826, [-0.299205, -0.299205, -0.299205, 0.090560])
    entropy = torch.tensor([0.5, 1.5, 2.5, 0.1])
    case = golden(keep_entropy=keep_top_entropy(entropy, torch.quantile(entropy, 0.5)))
    check(case, case.loss("dapo", **CLIP)[0], -0.401633, [0, -0.25, -0.151633, 0])
    case = golden(entropy=entropy)
    assert case.loss("dapo", entropy_coef=0.01, **CLIP)[0].item() == pytest.approx(-0.300952, abs=1e-6)
    kept = golden(entropy=entropy, keep_entropy=entropy > 1)  # the bonus averages over kept tokens only
    without, with_bonus = (kept.loss("dapo", entropy_coef=coef)[0] for coef in (0.0, 1.0))
    assert (without - with_bonus).item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("weighted", "kl", "loss", "gradient"),
    [
        (False, 0.012452, -0.288207, [0.002379, -0.247621, -0.157168, 0.416712]),
        (True, 0.013652, -0.288087, [0.003054, -0.247500, -0.154665, 0.420424]),
    ],
)
def test_golden_values_of_the_kl_term(weighted, kl, loss, gradient):
    case = golden(ref=torch.tensor(REF))
    value, metrics = case.loss("dapo", beta=0.1, use_bias_correction_kl=weighted, **CLIP)
    check(case, value, loss, gradient)
    assert metrics["loss/kl"][0].item() / 4 == pytest.approx(kl, abs=1e-6)
    assert metrics["policy/ref_kl_k3"][0].item() / 4 == pytest.approx(0.012452, abs=1e-6)


def test_the_kl_term_is_averaged_as_the_policy_term():
    for name in ("grpo", "dr_grpo", "luspo", "bnpo"):
        case = golden(ref=torch.tensor(REF))
        plain, with_kl = golden().loss(name, **CLIP)[0], case.loss(name, beta=0.1, **CLIP)[0]
        d, logp = torch.tensor(REF) - torch.tensor(LOGP), torch.tensor(LOGP)
        each = 0.1 * (d.exp() - d - 1) * (logp - torch.tensor(OLD)).exp()
        share = {"grpo": torch.tensor([1 / 3, 1 / 3, 1 / 3, 1]), "bnpo": torch.full((4,), 0.25)}.get(name, 1.0)
        divisor = {"dr_grpo": 2 * MAX_LENGTH, "bnpo": 1}.get(name, 2)
        assert (with_kl - plain).item() == pytest.approx(((each * share).sum() / divisor).item(), rel=1e-4), name


def test_vespo_gate_table():
    table = [(0.25, 0.59298, 0.07003), (0.5, 1.12042, 0.33979), (1, 1, 1), (2, 0.19915, 1.08268), (4, 0.00197, 0.15864)]
    for w, good, bad in table:
        case = one([0.0, 0.0], 0.0, [1.0, -1.0], total_log_ratio=torch.full((2,), math.log(w)))
        assert case.gradient(case.loss("vespo", divide=False)[0]).tolist() == pytest.approx([-good, bad], abs=6e-6), w


def test_sapo_gate_table():
    for ratio, *gates in (
        (0.5, 1.51016, 0.94001, 1.41594, 0.93414),
        (1.0, 2.0, 1.0, 1.90476, 1.0),
        (1.5, 2.48984, 0.94001, 2.39359, 0.93414),
        (3.0, 3.52319, 0.41997, 3.39392, 0.38878),
    ):
        for advantage, value, slope in ((1.0, *gates[:2]), (-1.0, *gates[2:])):
            case = one([0.0], math.log(ratio), [advantage])
            total = case.loss("sapo")[0]
            assert total.item() == pytest.approx(-advantage * value, abs=6e-6), ratio
            assert case.gradient(total).item() == pytest.approx(-advantage * slope * ratio, abs=2e-5), ratio


def naive(case: Tokens, name: str, level: str) -> Tensor:
    """One token at a time, with the gradient going through the ratio of the whole completion if there is one."""
    total, log_ratio = torch.zeros((), dtype=torch.float64), case.logp - case.old
    lengths = sequence_length(case.sequence, num_sequences=4)
    for n in range(len(case.logp)):
        siblings, a = case.sequence == case.sequence[n], case.advantage[n]
        if name in ("rloo", "vespo"):
            r = log_ratio[siblings].sum().exp()
        else:
            r = (log_ratio[n] if level == "token" else log_ratio[siblings].mean()).exp()
        if name in CLIPPED:
            loss = -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
        elif name == "cispo":
            loss = -r.detach().clamp(max=5.0) * a * case.logp[n]
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            loss = -a * torch.sigmoid(tau * (r - 1)) * 4 / tau
        elif name.startswith("dppo"):
            p, mu = case.logp[n].exp().item(), case.old[n].exp().item()
            rest_p, rest_mu = max(1 - p, 1e-8), max(1 - mu, 1e-8)  # the case has probabilities above 1
            kl = mu * math.log(mu / p) + rest_mu * math.log(rest_mu / rest_p)
            far = abs(p - mu) > 0.15 if name == "dppo_tv" else kl > 0.05
            loss = -r * a * (0.0 if far and (p - mu) * a > 0 else 1.0)
        elif name == "vespo":
            k, lam = (2, 3) if a >= 0 else (3, 2)
            loss = -(lam + k * r.detach().log() - lam * r.detach()).exp() * a * case.logp[n]
        else:
            loss = -a * case.logp[n]
        weight = 1.0 if case.weight is None or name == "vespo" else case.weight[n]
        total = total + loss * weight / (lengths[case.sequence[n]] if name in ("grpo", "sapo", "rloo") else 1)
    divisors = dict.fromkeys(("dapo", "bnpo", "cispo", "vespo", "dppo_tv", "dppo_kl"), len(case.logp))
    return total / divisors.get(name, 4 * MAX_LENGTH if name == "dr_grpo" else 4)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_and_gradient_agree_with_a_float64_loop(level):
    for name in POLICY_LOSSES if level == "token" else SEQUENCE_LEVEL:
        case = random_case()
        if level == "sequence" or name == "rloo":  # one weight per completion
            case.weight = case.advantage.abs()
        got, expected = case.loss(name, level=level, **CLIP)[0], naive(case, name, level)
        assert got.item() == pytest.approx(expected.item(), rel=1e-12), name
        torch.testing.assert_close(case.gradient(got), case.gradient(expected), atol=1e-13, rtol=1e-10, msg=name)


def test_dppo_masks_some_tokens_of_the_random_case():
    """Otherwise the loop above would not test the mask."""
    for name in ("dppo_tv", "dppo_kl"):
        masked, count = random_case().loss(name)[1]["policy/dppo_masked_frac"]
        assert 0 < masked.item() < count / 2, name


def test_dppo_kl_of_certain_tokens_is_finite():
    for logp, log_ratio, advantage, masked in ((0.0, 0.0, 1.0, 0), (0.0, 3.0, 1.0, 1), (-3.0, -3.0, -1.0, 1)):
        case = one([logp], log_ratio, [advantage])
        loss, metrics = case.loss("dppo_kl")
        assert loss.isfinite() and metrics["policy/dppo_masked_frac"][0].item() == masked, (logp, log_ratio)


def test_gspo_of_one_token_is_token_level():
    case = random_case(seed=4)
    case.sequence = torch.arange(len(case.logp))
    for name in SEQUENCE_LEVEL:
        token, sequence = (case.loss(name, level=level, **CLIP)[0] for level in ("token", "sequence"))
        assert token.item() == pytest.approx(sequence.item(), rel=1e-14), name
        torch.testing.assert_close(case.gradient(token), case.gradient(sequence), atol=1e-15, rtol=1e-13, msg=name)


def test_slices_cut_anywhere_sum_to_the_whole():
    for name, level in [*((name, "token") for name in POLICY_LOSSES), *((name, "sequence") for name in SEQUENCE_LEVEL)]:
        case = random_case(seed=3)
        whole, metrics = case.loss(name, level=level, **CLIP)
        gradient = case.gradient(whole)
        for cuts in ((1, 9), (4, 4, 17)):
            edges = [0, *cuts, len(case.logp)]
            pieces = [case.loss(name, level=level, rows=slice(a, b), **CLIP) for a, b in itertools.pairwise(edges)]
            assert sum(x for x, _ in pieces).item() == pytest.approx(whole.item(), rel=1e-12), name
            torch.testing.assert_close(case.gradient(sum(x for x, _ in pieces)), gradient)
            for key, (value, count) in metrics.items():
                assert sum(m[key][0].item() for _, m in pieces) == pytest.approx(value.item(), abs=1e-12), (name, key)
                assert sum(float(m[key][1]) for _, m in pieces) == pytest.approx(float(count)), (name, key)


def test_cispo_gradient_flows_through_capped_tokens():
    case = one([-1.0], 3.0, [1.0])
    assert case.gradient(case.loss("dapo", **CLIP)[0]).item() == 0.0
    loss, metrics = case.loss("cispo")
    assert case.gradient(loss).item() == -5.0 and metrics["policy/cispo_cap_frac"][0].item() == 1.0


def test_on_policy_gradient_is_the_advantage_times_the_share():
    """At ratio 1 every loss type agrees up to its average; rloo has the gradient of REINFORCE."""
    case = random_case(seed=8, weighted=False)
    case.old = case.logp.detach().clone()
    for name in POLICY_LOSSES:
        gradient = case.gradient(case.loss(name, divide=False, **CLIP)[0])
        share = token_share(config(name, "token", False, {}), case.micro_batch(case.logp.detach()))
        expected = -case.advantage * (1.0 if name == "rloo" else share)
        torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=1e-12, msg=name)


def test_luspo_at_sequence_level_is_length_times_gspo():
    case, rows = golden(), slice(0, 3)
    summed, mean = (case.loss(name, level="sequence", rows=rows, divide=False)[0] for name in ("luspo", "grpo"))
    assert summed.item() == pytest.approx(3 * mean.item())


def test_a_weight_of_zero_drops_a_token_even_if_its_loss_is_not_finite():
    case = random_case(seed=9)
    case.weight = (case.weight > 0.5).double()
    for name in ("dapo", "grpo"):
        gradient = case.gradient(case.loss(name, **CLIP)[0])
        assert (gradient[case.weight == 0] == 0).all() and (gradient[case.weight == 1] != 0).any()
    case = one([-math.inf, -1.0], 0.0, [1.0, 1.0], weight=torch.tensor([0.0, 1.0]))
    total = case.loss("reinforce", divide=False)[0]
    assert total.item() == 1.0 and case.gradient(total).tolist() == [0.0, -1.0]


def test_completions_far_away_stay_finite():
    for total, advantage in itertools.product((-1e3, 1e3), (-1.0, 1.0)):
        case = one([-1.0, -2.0], 0.0, [advantage] * 2, total_log_ratio=torch.full((2,), total))
        loss = case.loss("rloo", **CLIP)[0]
        assert loss.isfinite() and case.gradient(loss).isfinite().all(), (total, advantage)
    for log_w in (-math.inf, -1e4, 1e4, math.inf):
        case = one([-1.0, -2.0], 0.0, [1.0, -1.0], total_log_ratio=torch.full((2,), log_w))
        loss, metrics = case.loss("vespo")
        assert case.gradient(loss).abs().max() < 1e-12 and metrics["policy/vespo_phi"][0].item() < 1e-12
    for name, log_ratio, advantage in itertools.product(POLICY_LOSSES, (-1e4, 1e4), (-1.0, 1.0)):
        case = one([-1.0, -2.0], log_ratio, [advantage] * 2)
        loss, metrics = case.loss(name)
        assert loss.isfinite() and case.gradient(loss).isfinite().all(), (name, log_ratio)
        assert all(math.isfinite(value.item()) for value, _ in metrics.values()), (name, log_ratio)


def test_no_tokens_give_a_differentiable_zero():
    none = torch.zeros(0)
    for name in POLICY_LOSSES:
        case = Tokens(none, none, none)
        loss, metrics = case.loss(name)
        assert loss.item() == 0 and {value.item() for value, _ in metrics.values()} == {0.0}, name
        loss.backward()


# The clip.


def one_ratio(log_ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """Loss and gradient of one token."""
    case = Tokens(*(torch.tensor([x], dtype=torch.float64) for x in (log_ratio, 0.0, advantage)))
    total = case.loss("dapo", **{**CLIP, **options})[0]
    return total.item(), case.gradient(total).item()


def test_clips_only_in_the_direction_the_advantage_pushes():
    for log_ratio, advantage, gradient in (
        (0.5, 2.0, 0.0),  # already more likely than the edge, and good: no more of it
        (0.5, -2.0, 2.0 * math.exp(0.5)),  # more likely, and bad: pushed back
        (-0.5, 2.0, -2.0 * math.exp(-0.5)),  # less likely, and good: pushed back
        (-0.5, -2.0, 0.0),  # already less likely than the edge, and bad: no more of it
        (0.0, -2.0, 2.0),  # at ratio 1 both arguments of the minimum tie: all of -A, not half
    ):
        assert one_ratio(log_ratio, advantage)[1] == pytest.approx(gradient, abs=1e-14), (log_ratio, advantage)
    assert one_ratio(0.4, 1.0, epsilon=0.1, epsilon_high=3.0) == pytest.approx((-math.exp(0.4), -math.exp(0.4)))


def test_bounds_change_only_bad_tokens_beyond_them():
    """delta and dual_clip are the same function above the range; clip_frac counts the tokens without a gradient."""
    for bound in (1.3, 2.0, 4.0):
        case = random_case(seed=5, spread=2.0, weighted=False)
        plain = case.gradient(case.loss("dapo", divide=False, **CLIP)[0])
        outs = [case.loss("dapo", divide=False, **CLIP, **{name: bound}) for name in BOUNDS]
        beyond = (case.advantage < 0) & ((case.logp - case.old).exp() > bound)
        assert beyond.any()
        for loss, metrics in outs:
            gradient = case.gradient(loss)
            torch.testing.assert_close(gradient, torch.where(beyond, 0.0, plain))
            assert metrics["policy/clip_frac"][0].item() == (gradient == 0).sum().item()
        assert outs[0][0].item() == pytest.approx(outs[1][0].item(), rel=1e-14)


def test_bounds_inside_the_range_are_rejected():
    with pytest.raises(ValueError, match=r"delta=1\.1.*1\.2"):
        clip_bounds(delta=1.1)
    with pytest.raises(ValueError, match=r"dual_clip=1\.0"):
        clip_bounds(dual_clip=1.0)
    assert clip_bounds(epsilon=0.1, epsilon_high=0.3, delta=4.0, dual_clip=3.0) == (0.9, 1.3, 3.0)


def test_clip_metrics_name_the_side():
    def fractions(case: Tokens, **options: float) -> list[float]:
        metrics = case.loss("grpo", **CLIP | options)[1]
        return [metrics[f"policy/clip_{side}frac"][0].item() for side in ("low_", "high_", "capped_", "")]

    case = golden()  # ratios 1.2214, 1, 0.6065 (A > 0), 1.6487 (A < 0)
    assert fractions(case) == [0.0, 1.0, 0.0, 1.0]
    ratio, count = case.loss("grpo", **CLIP)[1]["policy/ratio"]
    assert ratio.item() == pytest.approx(4.476655, abs=1e-5) and count == 4
    for name in BOUNDS:
        assert fractions(case, **{name: 1.5}) == [0.0, 1.0, 1.0, 2.0]
    case.old = torch.tensor([-1.2, -0.5, -1.5, 0.0])  # the last ratio is exp(-0.7), A < 0
    assert fractions(case) == [1.0, 1.0, 0.0, 2.0]
    case = golden()
    assert fractions(case, epsilon=0.05, epsilon_high=0.28) == [0.0] * 4  # 0.6065 has A > 0: not clipped
    case.advantage = -case.advantage  # 0.6065 is below 1 - 0.05, not below 1 - 0.5; 1.6487 is above 1.28
    assert fractions(case, delta=1.5) == [1.0, 1.0, 0.0, 2.0]  # the ratio beyond delta is now good: not capped
    for low, expected in ((0.05, [1.0, 1.0, 0.0, 2.0]), (0.5, [0.0, 1.0, 0.0, 1.0])):
        assert fractions(case, epsilon=low, epsilon_high=0.28) == expected
    case.advantage = torch.zeros(4)  # nothing is pushed, so nothing is clipped
    loss = case.loss("grpo", **CLIP)[0]
    assert fractions(case) == [0.0] * 4 and loss.item() == 0.0 and not case.gradient(loss).any()


@pytest.mark.parametrize("name", ["luspo", "rloo", "vespo"])
def test_head_in_chunks_gives_the_gradient_of_whole_completions(name, monkeypatch):
    """As training calls it: some rows of hidden states at a time, against a loop with the ratio of the completion."""
    monkeypatch.setattr(linear_logprob, "BLOCK_ELEMENTS", 30)  # a few rows at a time
    case, generator = random_case(seed=10, weighted=False), torch.Generator().manual_seed(10)
    n = len(case.logp)
    hidden = torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(7, (n,), generator=generator)
    logp = (hidden @ head.T).log_softmax(dim=1).gather(1, target.unsqueeze(1)).squeeze(1)
    case.old = logp.detach() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    case.logp, chunks = logp, []
    level = "sequence" if name in SEQUENCE_LEVEL else "token"

    def loss_of(tokens, rows):
        chunks.append(len(rows))
        return case.loss(name, level=level, rows=rows, logp=tokens.logp, divide=False, **CLIP)[0], None

    total, _ = linear_logprob.linear_logprob_loss(hidden, head, target, loss_of, impl="torch")
    total.backward()
    assert len(chunks) > 3
    divisor = {"luspo": 4, "rloo": 4, "vespo": n}[name]
    expected = naive(case, name, "sequence") * divisor
    assert total.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected, hidden)[0], atol=1e-10, rtol=1e-9)
