"""Golden values of every loss type, checked against TRL 1.16.0: two completions, of three tokens and of one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from kernels import linear_logprob
from losses.entropy import entropy_bonus, keep_top_entropy
from losses.importance import sequence_length, sequence_mean, sequence_sum
from losses.kl import kl_penalty
from losses.policy import POLICY_LOSSES, PolicyLoss, Tokens, dapo, grpo, luspo, sequence_log_ratio, token_log_ratio
from losses.types import LossOut, merge

cispo, sapo, vespo, rloo, reinforce = map(POLICY_LOSSES.get, ("cispo", "sapo", "vespo", "rloo", "reinforce"))

LOGP = (-1.0, -0.5, -2.0, -0.7, 9.0, 9.0)
OLD = (-1.2, -0.5, -1.5, -1.2, 9.0, 9.0)
REF = (-1.1, -0.6, -1.8, -0.9, 9.0, 9.0)
ADVANTAGE = (1.0, 1.0, 1.0, -1.0, -1.0, -1.0)
MASK = (True, True, True, True, False, False)
SEQUENCE = (0, 0, 0, 1, 1, 1)
MAX_LENGTH = 4
CLIP = {"epsilon": 0.2, "epsilon_high": 0.2}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo")
BOUNDS = ("delta", "dual_clip")


class Case:
    """Packed completions; `tokens` builds what a loss takes, everything about whole completions first."""

    def __init__(self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, sequence: Tensor) -> None:
        self.logp = logp.clone().requires_grad_()
        self.old, self.advantage, self.mask, self.sequence = old, advantage, mask, sequence
        self.size = int(sequence.max()) + 1
        self.length = sequence_length(mask, sequence, num_sequences=self.size)
        self.weight: Tensor | None = None

    def tokens(self, rows: slice = slice(None), *, level: str = "token", logp: Tensor | None = None) -> Tokens:
        now = self.logp if logp is None else logp
        token = token_log_ratio(now, self.old, self.mask)
        total = sequence_sum(token, self.mask, self.sequence, num_sequences=self.size)
        mean = sequence_mean(token, self.mask, self.sequence, num_sequences=self.size)
        if level == "sequence":
            token = sequence_log_ratio(now, mean[self.sequence], self.mask)
        every = (now, token, self.advantage, self.mask, self.length[self.sequence], self.weight, total[self.sequence])
        return Tokens(*(None if x is None else x[rows] for x in every))

    def denominator(self, name: str) -> Tensor:
        return POLICY_LOSSES[name].denominator(
            num_tokens=self.mask.sum(), num_completions=(self.length > 0).sum(),
            num_micro_batches=torch.tensor(1), max_completion_length=MAX_LENGTH,
        )  # fmt: skip

    def value(self, name: str, **kwargs) -> Tensor:
        out = call(name, self.tokens(**kwargs), self)
        return out.terms["policy"].sum / self.denominator(name)

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logp)[0]


def call(name: str, t: Tokens, case: Case, **more) -> LossOut:
    options = {key: value for key, value in {**CLIP, **more}.items() if key in POLICY_LOSSES[name].options}
    return POLICY_LOSSES[name](t, **options, micro_batch_tokens=case.mask.sum(), max_completion_length=MAX_LENGTH)


def golden() -> Case:
    return Case(*(torch.tensor(x) for x in (LOGP, OLD, ADVANTAGE, MASK, SEQUENCE)))


def random_case(seed: int = 0, spread: float = 0.3) -> Case:
    """Five completions, one without a trained token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (7, 1, 12, 5, 16)
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    n = len(sequence)
    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    logp = old + spread * torch.randn(n, generator=generator, dtype=torch.float64)
    advantage = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[sequence]
    mask = (torch.rand(n, generator=generator) < 0.7) & (sequence != 3)
    case = Case(logp, old, advantage, mask, sequence)
    case.weight = torch.rand(n, generator=generator, dtype=torch.float64)
    return case


def check(case: Case, value: Tensor, loss: float, gradient: list[float], what: object = "") -> None:
    assert value.item() == pytest.approx(loss, abs=1e-6), what
    got = case.gradient(value)
    torch.testing.assert_close(got, torch.tensor([*gradient, 0.0, 0.0]), atol=1e-6, rtol=0, msg=str(what))


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
GOLDEN_OPTIONS = [
    ({"delta": 1.5}, -0.326633, [0, -0.25, -0.151633, 0]),
    ({"dual_clip": 1.5}, -0.326633, [0, -0.25, -0.151633, 0]),
    ({"epsilon_high": 0.28}, -0.294803, [-0.305351, -0.25, -0.151633, 0.412180]),
]


def test_golden_values():
    for name, level, loss, gradient in GOLDEN:
        case = golden()
        check(case, case.value(name, level=level), loss, gradient, (name, level))
    for options, loss, gradient in GOLDEN_OPTIONS:
        case = golden()
        check(case, dapo(case.tokens(), **{**CLIP, **options}).terms["policy"].sum / 4, loss, gradient, options)


def test_golden_values_of_weights():
    """An importance correction, the same folded into the weight of vespo, and the top-entropy mask."""
    case = golden()
    case.weight = torch.tensor([0.9, 1.1, 1.0, 2.0, math.nan, math.nan])
    check(case, case.value("dapo"), 0.127728, [0, -0.275, -0.151633, 0.824361])
    folded = sequence_sum(case.weight.log(), case.mask, case.sequence, num_sequences=2)[case.sequence]
    t = case.tokens()._replace(weight=None)
    value = vespo(t._replace(sequence_log_ratio=t.sequence_log_ratio + folded)).terms["policy"].sum / 4
    check(case, value, 0.983826, [-0.299205, -0.299205, -0.299205, 0.090560])
    entropy = torch.tensor([0.5, 1.5, 2.5, 0.1, 9.0, 9.0])
    case.weight = keep_top_entropy(entropy, torch.quantile(entropy[case.mask], 0.5)).float()
    check(case, case.value("dapo"), -0.401633, [0, -0.25, -0.151633, 0])


def test_golden_value_of_the_entropy_bonus():
    case = golden()
    bonus = entropy_bonus(torch.tensor([0.5, 1.5, 2.5, 0.1, 9.0, 9.0]), case.mask, coef=0.01).terms["entropy"]
    assert (case.value("dapo") + bonus.weight * bonus.sum / bonus.count).item() == pytest.approx(-0.300952, abs=1e-6)


def test_golden_value_on_policy():
    case = golden()
    t = case.tokens()._replace(log_ratio=token_log_ratio(case.logp, case.logp.detach(), case.mask))
    check(case, dapo(t, **CLIP).terms["policy"].sum / 4, -0.5, [-0.25, -0.25, -0.25, 0.25])


def test_vespo_gate_table():
    table = [(0.25, 0.59298, 0.07003), (0.5, 1.12042, 0.33979), (1, 1, 1), (2, 0.19915, 1.08268), (4, 0.00197, 0.15864)]
    for w, good, bad in table:
        one, log_w = torch.ones(2), torch.full((2,), math.log(w))
        logp = torch.zeros(2, requires_grad=True)
        t = Tokens(logp, 0 * one, torch.tensor([1.0, -1.0]), one.bool(), one, sequence_log_ratio=log_w)
        vespo(t).terms["policy"].sum.backward()
        assert logp.grad.tolist() == pytest.approx([-good, bad], abs=6e-6), w


def test_sapo_gate_table():
    logp = torch.zeros(1, requires_grad=True)
    for ratio, *gates in (
        (0.5, 1.51016, 0.94001, 1.41594, 0.93414),
        (1.0, 2.0, 1.0, 1.90476, 1.0),
        (1.5, 2.48984, 0.94001, 2.39359, 0.93414),
        (3.0, 3.52319, 0.41997, 3.39392, 0.38878),
    ):
        for advantage, value, slope in ((1.0, *gates[:2]), (-1.0, *gates[2:])):
            t = Tokens(logp, logp + math.log(ratio), torch.tensor([advantage]), torch.tensor([True]), torch.ones(1))
            total = sapo(t).terms["policy"].sum
            assert total.item() == pytest.approx(-advantage * value, abs=6e-6), ratio
            slope_found = torch.autograd.grad(total, logp)[0].item()
            assert slope_found == pytest.approx(-advantage * slope * ratio, abs=2e-5), ratio


def naive_ratio(case: Case, row: int, level: str) -> Tensor:
    mine = case.mask & (case.sequence == case.sequence[row])
    log_ratio = case.logp - case.old
    return {"token": log_ratio[row], "sequence": log_ratio[mine].mean(), "product": log_ratio[mine].sum()}[level].exp()


def naive(case: Case, name: str, level: str) -> Tensor:
    """One token at a time, with the gradient going through the whole completion's ratio where there is one."""
    total = torch.zeros((), dtype=torch.float64)
    for n in range(len(case.logp)):
        if not case.mask[n]:
            continue
        length, a = case.length[case.sequence[n]].item(), case.advantage[n]
        r = naive_ratio(case, n, "product" if name in ("rloo", "vespo") else level)
        if name in CLIPPED:
            loss = -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
        elif name == "cispo":
            loss = -r.detach().clamp(max=5.0) * a * case.logp[n]
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            loss = -a * torch.sigmoid(tau * (r - 1)) * 4 / tau
        elif name == "vespo":
            k, lam = (2, 3) if a >= 0 else (3, 2)
            loss = -(lam + k * r.detach().log() - lam * r.detach()).exp() * a * case.logp[n]
        else:
            loss = -a * case.logp[n]
        per_completion = name in ("grpo", "sapo", "rloo")
        total = total + loss * (1.0 if case.weight is None else case.weight[n]) / (length if per_completion else 1)
    num_completions = (case.length > 0).sum()
    divisor = {"dapo": case.mask.sum(), "bnpo": case.mask.sum(), "cispo": case.mask.sum(), "vespo": case.mask.sum()}
    return total / divisor.get(name, num_completions * (MAX_LENGTH if name == "dr_grpo" else 1))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_and_gradient_agree_with_a_float64_loop(level):
    for name in POLICY_LOSSES:
        case = random_case()
        # one weight per completion
        case.weight = case.advantage.abs() if level == "sequence" or name == "rloo" else case.weight
        got, expected = case.value(name, level=level), naive(case, name, level)
        assert got.item() == pytest.approx(expected.item(), rel=1e-12), name
        torch.testing.assert_close(case.gradient(got), case.gradient(expected), atol=1e-13, rtol=1e-10, msg=name)


def test_gspo_of_one_token_is_token_level():
    """Completions of length 1 have the same ratio at both levels."""
    case = random_case(seed=4)
    case = Case(case.logp.detach(), case.old, case.advantage, case.mask, torch.arange(len(case.logp)))
    for name in POLICY_LOSSES:
        token, sequence = case.value(name, level="token"), case.value(name, level="sequence")
        assert token.item() == pytest.approx(sequence.item(), rel=1e-14), name
        torch.testing.assert_close(case.gradient(token), case.gradient(sequence), atol=1e-15, rtol=1e-13, msg=name)


def test_dapo_is_bnpo_on_one_micro_batch_and_not_on_two():
    """Why bnpo is the exception: its mean is over micro-batches."""
    case = random_case(seed=5)
    case.weight = None
    dapo_gradient = case.gradient(case.value("dapo"))
    torch.testing.assert_close(case.gradient(case.value("bnpo")), dapo_gradient, atol=1e-15, rtol=1e-13)
    halves = [slice(0, 8), slice(8, None)]
    parts = [
        POLICY_LOSSES["bnpo"](case.tokens(rows), **CLIP, micro_batch_tokens=case.mask[rows].sum()).terms["policy"]
        for rows in halves
    ]
    assert sum(p.count for p in parts).item() == pytest.approx(2)
    expected = [dapo(case.tokens(rows), **CLIP).terms["policy"] for rows in halves]
    two = sum(p.sum for p in parts) / 2
    assert two.item() == pytest.approx((sum(p.sum / p.count for p in expected) / 2).item(), rel=1e-13)
    assert (case.gradient(two) - dapo_gradient).abs().max() > 1e-3


def test_cispo_gradient_flows_through_capped_tokens():
    """Where clipping stops a token, CISPO caps its weight and goes on."""
    logp = torch.tensor([-1.0], requires_grad=True)
    old, mask, one = torch.tensor([-4.0]), torch.tensor([True]), torch.ones(1)
    t = Tokens(logp, token_log_ratio(logp, old, mask), one, mask, one)
    clipped = torch.autograd.grad(dapo(t, **CLIP).terms["policy"].sum, logp)[0]
    out = cispo(t, cispo_cap=5.0)
    assert clipped.item() == 0.0
    assert torch.autograd.grad(out.terms["policy"].sum, logp)[0].item() == -5.0
    assert out.metrics["policy/cispo_cap_frac"][0].item() == 1.0


def test_on_policy_gradient_is_the_advantage_times_the_share():
    """At ratio 1 every loss type agrees up to what it averages over; rloo has the gradient of REINFORCE."""
    case = random_case(seed=8)
    case.old, case.weight = case.logp.detach().clone(), None
    sizes = {"micro_batch_tokens": case.mask.sum(), "max_completion_length": MAX_LENGTH}
    for name, record in POLICY_LOSSES.items():
        out = call(name, case.tokens(), case)
        share = record.share(case.tokens(), **sizes)
        expected = -(case.advantage * (case.mask if name == "rloo" else share.weight))
        gradient = case.gradient(out.terms["policy"].sum)
        torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=1e-12, msg=name)
        assert out.terms["policy"].count.item() == share.count.item(), name
        assert share.count.item() == pytest.approx(case.denominator(name).item()), name


def test_luspo_at_sequence_level_is_length_times_gspo():
    """One completion: |y| r A against r A."""
    case = golden()
    rows = slice(0, 3)
    summed, meant = (f(case.tokens(rows, level="sequence"), **CLIP).terms["policy"].sum for f in (luspo, grpo))
    assert summed.item() == pytest.approx(3 * meant.item())


def test_weights():
    """Weight 0 leaves a token out, even one that is not finite, but counts it; a weight has no gradient."""
    case = random_case(seed=9)
    case.weight = (case.weight > 0.5).double().requires_grad_()
    for name in ("dapo", "grpo"):
        out = call(name, case.tokens(), case)
        total = out.terms["policy"].sum
        assert torch.autograd.grad(total, case.weight, allow_unused=True, retain_graph=True) == (None,)
        gradient = case.gradient(total)
        assert (gradient[case.weight == 0] == 0).all() and (gradient[case.mask & (case.weight == 1)] != 0).any()
        assert out.terms["policy"].count.item() == pytest.approx(case.denominator(name).item())
    logp = torch.tensor([-math.inf, -1.0], requires_grad=True)
    mask, one = torch.tensor([True, True]), torch.ones(2)
    total = reinforce(Tokens(logp, torch.zeros(2), one, mask, one, torch.tensor([0.0, 1.0]))).terms["policy"].sum
    total.backward()
    assert total.item() == 1.0 and logp.grad.tolist() == [0.0, -1.0]


def test_rloo_of_a_long_completion_far_away_stays_finite():
    for total, advantage in itertools.product((-1e3, 1e3), (-1.0, 1.0)):
        logp, one = torch.tensor([-1.0, -2.0], requires_grad=True), torch.ones(2)
        far = torch.full((2,), total)
        value = rloo(Tokens(logp, 0 * one, advantage * one, one.bool(), 2 * one, sequence_log_ratio=far), **CLIP)
        loss = value.terms["policy"].sum
        assert loss.isfinite() and torch.autograd.grad(loss, logp)[0].isfinite().all(), (total, advantage)


def test_vespo_of_a_completion_far_away_has_no_gradient():
    for log_w in (-math.inf, -1e4, 1e4, math.inf):
        logp, one = torch.tensor([-1.0, -2.0], requires_grad=True), torch.ones(2)
        far = torch.full((2,), log_w)
        out = vespo(Tokens(logp, 0 * one, torch.tensor([1.0, -1.0]), one.bool(), one, sequence_log_ratio=far))
        out.terms["policy"].sum.backward()
        assert logp.grad.abs().max() < 1e-12 and out.metrics["policy/vespo_phi"][0].item() < 1e-12


# The clip.


def one_ratio(log_ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """Loss and gradient of one token."""
    logp, one = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True), torch.ones(1)
    a = torch.tensor([advantage], dtype=torch.float64)
    total = dapo(Tokens(logp, 1.0 * logp, a, one.bool(), one), **{**CLIP, **options}).terms["policy"].sum
    return total.item(), torch.autograd.grad(total, logp)[0].item()


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
        case = random_case(seed=5, spread=2.0)
        case.weight = None
        plain = case.gradient(dapo(case.tokens(), **CLIP).terms["policy"].sum)
        outs = [dapo(case.tokens(), **CLIP, **{name: bound}) for name in BOUNDS]
        beyond = case.mask & (case.advantage < 0) & ((case.logp - case.old).exp() > bound)
        assert beyond.any()
        for out in outs:
            gradient = case.gradient(out.terms["policy"].sum)
            torch.testing.assert_close(gradient, torch.where(beyond, 0.0, plain))
            assert out.metrics["policy/clip_frac"][0].item() == (case.mask & (gradient == 0)).sum().item()
        assert outs[0].terms["policy"].sum.item() == pytest.approx(outs[1].terms["policy"].sum.item(), rel=1e-14)


def test_a_loss_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"^loss_type=<lambda>: returned shape \(\) for \(6,\) tokens$"):
        PolicyLoss(lambda t: t.logp.sum())(golden().tokens())


def test_bounds_that_would_cut_inside_the_range_are_refused():
    for name, value, message in (("delta", 1.1, "delta=1.1: must be above"), ("dual_clip", 1.0, "dual_clip=1.0: must")):
        with pytest.raises(ValueError, match=message):
            one_ratio(0.0, 1.0, **{name: value})


def test_clip_metrics_name_the_side():
    case = golden()
    metrics = grpo(case.tokens(), **CLIP).metrics  # ratios 1.2214, 1, 0.6065 (A > 0), 1.6487 (A < 0)
    assert metrics["policy/clip_frac"][0].item() == 1.0 and metrics["policy/clip_frac"][1].item() == 4
    assert metrics["policy/ratio"][0].item() == pytest.approx(4.476655, abs=1e-5)
    case.old = torch.tensor([-1.2, -0.5, -1.5, 0.0, 9.0, 9.0])  # the last trained ratio is exp(-0.7), A < 0
    metrics = grpo(case.tokens(), **CLIP).metrics
    got = {name: metrics[f"policy/clip_{name}"][0].item() for name in ("low_frac", "high_frac", "capped_frac", "frac")}
    assert got == {"low_frac": 1.0, "high_frac": 1.0, "capped_frac": 0.0, "frac": 2.0}
    case = golden()
    for name in BOUNDS:
        metrics = grpo(case.tokens(), **CLIP, **{name: 1.5}).metrics
        assert metrics["policy/clip_capped_frac"][0].item() == 1.0 and metrics["policy/clip_frac"][0].item() == 2.0
    case.advantage = -case.advantage  # the ratio beyond delta is now good: clipped, not capped
    metrics = grpo(case.tokens(), **CLIP, delta=1.5).metrics
    assert [metrics[f"policy/clip_{side}_frac"][0].item() for side in ("low", "high", "capped")] == [1.0, 1.0, 0.0]
    case = golden()  # 1.2214 is within the upper range of 0.28; with 0.05 below, 0.6065 has A > 0: not clipped
    metrics = grpo(case.tokens(), epsilon=0.05, epsilon_high=0.28).metrics
    assert [metrics[f"policy/clip_{side}frac"][0].item() for side in ("low_", "high_", "")] == [0.0, 0.0, 0.0]
    case.advantage = -case.advantage  # 0.6065 is below 1 - 0.05, not below 1 - 0.5; 1.6487 is above 1.28
    for low, expected in ((0.05, [1.0, 1.0, 2.0]), (0.5, [0.0, 1.0, 1.0])):
        metrics = grpo(case.tokens(), epsilon=low, epsilon_high=0.28).metrics
        assert [metrics[f"policy/clip_{side}frac"][0].item() for side in ("low_", "high_", "")] == expected
    case.advantage = torch.zeros(6)  # nothing is pushed, so nothing is clipped
    out = grpo(case.tokens(), **CLIP)
    assert out.metrics["policy/clip_frac"][0].item() == 0.0
    assert out.terms["policy"].sum.item() == 0.0 and not case.gradient(out.terms["policy"].sum).any()


def test_truncated_completions_are_in_no_sum_and_no_count():
    """The loss is that of a batch without them, denominators included."""
    case = golden()
    mask = case.mask & (case.sequence == 0)
    alone = Case(case.logp.detach(), case.old, case.advantage, mask, case.sequence)
    for loss in (dapo, grpo):
        got = loss(alone.tokens(), **CLIP).terms["policy"]
        expected = loss(case.tokens(slice(0, 3)), **CLIP).terms["policy"]
        assert got.sum.item() == expected.sum.item() and got.count.item() == expected.count.item()


@pytest.mark.parametrize("name", ["luspo", "rloo", "vespo"])
def test_head_in_chunks_gives_the_gradient_of_whole_completions(name, monkeypatch):
    """As GRPO calls it: some rows of hidden states at a time, against a loop with the ratio of the whole completion."""
    monkeypatch.setattr(linear_logprob, "BLOCK_ELEMENTS", 30)  # a few rows at a time
    case = random_case(seed=10)
    case.weight = None
    generator = torch.Generator().manual_seed(10)
    hidden = torch.randn(len(case.logp), 4, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(7, (len(case.logp),), generator=generator)
    target = torch.where(case.mask, target, -100)
    logp = (hidden @ head.T).log_softmax(dim=1).gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    case.old = logp.detach() + 0.1 * torch.randn(len(logp), generator=generator, dtype=torch.float64)
    known = case.tokens(logp=logp.detach())  # the pass before, without gradient
    mean = known.sequence_log_ratio / known.length.clamp(min=1)
    chunks = []

    def loss_of(tokens, rows):
        log_ratio = sequence_log_ratio(tokens.logp, mean[rows], known.mask[rows])
        rest = (None if x is None else x[rows] for x in known[2:])
        chunks.append(len(rows))
        return call(name, Tokens(tokens.logp, log_ratio, *rest), case).terms["policy"].sum, None

    total, _ = linear_logprob.linear_logprob_loss(hidden, head, target, loss_of, impl="torch")
    total.backward()
    assert len(chunks) > 3
    case.logp = logp
    expected = naive(case, name, "sequence") * case.denominator(name)
    assert total.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected, hidden)[0], atol=1e-10, rtol=1e-9)


def test_kl_beside_a_loss_takes_its_average():
    """The sum over tokens of (policy + beta kl), averaged as the policy term is."""
    case, ref = golden(), torch.tensor(REF)
    t = case.tokens()
    for name in ("grpo", "dr_grpo", "luspo", "bnpo"):
        share = POLICY_LOSSES[name].share(t, micro_batch_tokens=case.mask.sum(), max_completion_length=MAX_LENGTH)
        penalty = kl_penalty(case.logp, case.old, ref, case.mask, beta=0.1, share=share.weight, count=share.count)
        out = merge(call(name, t, case), penalty)
        assert out.terms["kl"].count.item() == out.terms["policy"].count.item()
        d = ref - case.logp
        each = (d.exp() - d - 1) * (case.logp - case.old).exp() * share.weight
        assert out.terms["kl"].sum.item() == pytest.approx(each[case.mask].sum().item(), rel=1e-5), name
        total, count = out.metrics["policy/ref_kl_k3"]  # stays a mean over tokens
        assert (total / count).item() == pytest.approx(0.012452, abs=1e-6)
    with pytest.raises(AssertionError, match="kl"):
        merge(penalty, penalty)
