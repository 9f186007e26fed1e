"""Golden values of every loss type, checked against TRL 1.16.0: two completions, of three tokens and of one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import linear_logprob
from losses.entropy import entropy_bonus, entropy_threshold, keep_top_entropy
from losses.importance import sequence_length, sequence_mean, sequence_sum
from losses.kl import kl_penalty
from losses.policy import POLICY_LOSSES, Tokens, dapo, grpo, luspo, rloo, sequence_log_ratio, token_log_ratio
from losses.types import LossOut, merge

cispo, sapo, vespo, reinforce = (POLICY_LOSSES[name] for name in ("cispo", "sapo", "vespo", "reinforce"))

LOGP = (-1.0, -0.5, -2.0, -0.7, 9.0, 9.0)
OLD = (-1.2, -0.5, -1.5, -1.2, 9.0, 9.0)
REF = (-1.1, -0.6, -1.8, -0.9, 9.0, 9.0)
ADVANTAGE = (1.0, 1.0, 1.0, -1.0, -1.0, -1.0)
MASK = (True, True, True, True, False, False)
SEQUENCE = (0, 0, 0, 1, 1, 1)
MAX_LENGTH = 4
CLIP = {"epsilon": 0.2, "epsilon_high": 0.2}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo")


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

    def micro_batch_tokens(self) -> Tensor:
        return self.mask.sum()

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
    sizes = {"micro_batch_tokens": case.micro_batch_tokens(), "max_completion_length": MAX_LENGTH}
    return POLICY_LOSSES[name](t, **options, **sizes)


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


def check(case: Case, value: Tensor, loss: float, gradient: list[float]) -> None:
    assert value.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(case.gradient(value), torch.tensor([*gradient, 0.0, 0.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "level", "loss", "gradient"),
    [
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
    ],
)
def test_golden_values(name, level, loss, gradient):
    case = golden()
    check(case, case.value(name, level=level), loss, gradient)


@pytest.mark.parametrize(
    ("options", "loss", "gradient"),
    [
        ({"delta": 1.5}, -0.326633, [0, -0.25, -0.151633, 0]),
        ({"dual_clip": 1.5}, -0.326633, [0, -0.25, -0.151633, 0]),
        ({"epsilon_high": 0.28}, -0.294803, [-0.305351, -0.25, -0.151633, 0.412180]),
    ],
)
def test_golden_values_of_clip_options(options, loss, gradient):
    case = golden()
    check(case, dapo(case.tokens(), **{**CLIP, **options}).terms["policy"].sum / 4, loss, gradient)


def test_golden_values_of_importance_weights():
    case = golden()
    case.weight = torch.tensor([0.9, 1.1, 1.0, 2.0, math.nan, math.nan])
    check(case, case.value("dapo"), 0.127728, [0, -0.275, -0.151633, 0.824361])


def test_golden_value_of_vespo_with_the_correction_folded_in():
    case = golden()
    logs = torch.tensor([0.9, 1.1, 1.0, 2.0, math.nan, math.nan]).log()
    folded = sequence_sum(logs, case.mask, case.sequence, num_sequences=2)[case.sequence]
    t = case.tokens()
    value = vespo(t._replace(sequence_log_ratio=t.sequence_log_ratio + folded)).terms["policy"].sum / 4
    check(case, value, 0.983826, [-0.299205, -0.299205, -0.299205, 0.090560])


def test_golden_value_of_the_top_entropy_mask():
    case = golden()
    entropy = torch.tensor([0.5, 1.5, 2.5, 0.1, 9.0, 9.0])
    case.weight = keep_top_entropy(entropy, entropy_threshold(entropy[case.mask], top=0.5)).float()
    check(case, case.value("dapo"), -0.401633, [0, -0.25, -0.151633, 0])


def test_golden_value_of_the_entropy_bonus():
    case = golden()
    bonus = entropy_bonus(torch.tensor([0.5, 1.5, 2.5, 0.1, 9.0, 9.0]), case.mask, coef=0.01).terms["entropy"]
    assert (case.value("dapo") + bonus.weight * bonus.sum / bonus.count).item() == pytest.approx(-0.300952, abs=1e-6)


def test_golden_value_on_policy():
    case = golden()
    t = case.tokens()._replace(log_ratio=token_log_ratio(case.logp, case.logp.detach(), case.mask))
    check(case, dapo(t, **CLIP).terms["policy"].sum / 4, -0.5, [-0.25, -0.25, -0.25, 0.25])


@pytest.mark.parametrize(
    ("w", "good", "bad"),
    [(0.25, 0.59298, 0.07003), (0.5, 1.12042, 0.33979), (1, 1, 1), (2, 0.19915, 1.08268), (4, 0.00197, 0.15864)],
)
def test_vespo_gate_table(w, good, bad):
    one, log_w = torch.ones(2), torch.full((2,), math.log(w))
    logp = torch.zeros(2, requires_grad=True)
    t = Tokens(logp, 0 * one, torch.tensor([1.0, -1.0]), one.bool(), one, sequence_log_ratio=log_w)
    vespo(t).terms["policy"].sum.backward()
    assert logp.grad.tolist() == pytest.approx([-good, bad], abs=6e-6)


@pytest.mark.parametrize(
    ("ratio", "good", "good_slope", "bad", "bad_slope"),
    [
        (0.5, 1.51016, 0.94001, 1.41594, 0.93414),
        (1.0, 2.0, 1.0, 1.90476, 1.0),
        (1.5, 2.48984, 0.94001, 2.39359, 0.93414),
        (3.0, 3.52319, 0.41997, 3.39392, 0.38878),
    ],
)
def test_sapo_gate_table(ratio, good, good_slope, bad, bad_slope):
    logp = torch.zeros(1, requires_grad=True)
    for advantage, value, slope in ((1.0, good, good_slope), (-1.0, bad, bad_slope)):
        t = Tokens(logp, logp + math.log(ratio), torch.tensor([advantage]), torch.tensor([True]), torch.ones(1))
        total = sapo(t).terms["policy"].sum
        assert total.item() == pytest.approx(-advantage * value, abs=6e-6)
        assert torch.autograd.grad(total, logp)[0].item() == pytest.approx(-advantage * slope * ratio, abs=2e-5)


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
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_and_gradient_agree_with_a_float64_loop(name, level):
    case = random_case()
    case.weight = case.advantage.abs() if level == "sequence" or name == "rloo" else case.weight  # one per completion
    got, expected = case.value(name, level=level), naive(case, name, level)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(case.gradient(got), case.gradient(expected), atol=1e-13, rtol=1e-10)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradcheck(name):
    """Against finite differences of the loss in which what is detached stays as it was."""
    case = random_case(seed=3)
    fixed = case.tokens()

    def total(logp: Tensor) -> Tensor:
        t = fixed._replace(logp=logp, log_ratio=token_log_ratio(logp, case.old, case.mask))
        if name == "rloo":  # differentiate the completion's own ratio
            log_ratio = torch.zeros(case.size, dtype=torch.float64).index_add(0, case.sequence, t.log_ratio)
            r, a = log_ratio[case.sequence].exp(), case.advantage
            each = -torch.minimum(r * a, r.clamp(0.8, 1.2) * a) * case.mask / case.length[case.sequence].clamp(min=1)
            return each.sum()
        if name == "cispo":
            t = t._replace(log_ratio=fixed.log_ratio)
        return call(name, t, case).terms["policy"].sum

    assert torch.autograd.gradcheck(total, case.logp)
    if name == "rloo":
        case.weight = None
        mine = rloo(case.tokens(), **CLIP).terms["policy"].sum
        torch.testing.assert_close(case.gradient(mine), case.gradient(total(case.logp)), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("sizes", [(41,), (1, 40), (13, 14, 14), (20, 0, 21), (3,) * 13 + (2,)])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_pieces_cut_anywhere_sum_to_the_whole(name, sizes, level):
    case = random_case(seed=1)
    whole = call(name, case.tokens(level=level), case)
    edges = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    cuts = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    parts = [call(name, case.tokens(rows, level=level), case) for rows in cuts]
    total = sum(p.terms["policy"].sum for p in parts)
    assert total.item() == pytest.approx(whole.terms["policy"].sum.item(), rel=1e-12)
    torch.testing.assert_close(case.gradient(total), case.gradient(whole.terms["policy"].sum), atol=1e-14, rtol=1e-12)
    count = sum(p.terms["policy"].count for p in parts).item()
    assert count == pytest.approx(case.denominator(name).item(), rel=1e-12)
    for metric, (value, number) in whole.metrics.items():
        assert sum(p.metrics[metric][0] for p in parts).item() == pytest.approx(value.item(), rel=1e-12)
        assert sum(p.metrics[metric][1] for p in parts).item() == number.item()


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_never_enter(name, poison):
    case = random_case(seed=2)
    clean = call(name, case.tokens(), case)
    expected = case.gradient(clean.terms["policy"].sum)
    numbers = (torch.where(case.mask, x, poison) for x in (case.logp.detach(), case.old, case.advantage))
    dirty = Case(*numbers, case.mask, case.sequence)
    dirty.weight = torch.where(case.mask, case.weight, poison)
    out = call(name, dirty.tokens(), dirty)
    assert out.terms["policy"].sum.item() == clean.terms["policy"].sum.item()
    assert torch.equal(dirty.gradient(out.terms["policy"].sum), expected)
    assert {k: (s.item(), n.item()) for k, (s, n) in out.metrics.items()} == {
        k: (s.item(), n.item()) for k, (s, n) in clean.metrics.items()
    }


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("n", [0, 3])
def test_nothing_trained_is_a_differentiable_zero(name, n):
    logp, zero = torch.randn(n, requires_grad=True), torch.zeros(n)
    mask = torch.zeros(n, dtype=torch.bool)
    t = Tokens(logp, token_log_ratio(logp, zero, mask), zero + 1, mask, zero, zero, zero)
    options = {key: value for key, value in CLIP.items() if key in POLICY_LOSSES[name].options}
    options |= {"micro_batch_tokens": torch.tensor(0), "max_completion_length": MAX_LENGTH}
    term = POLICY_LOSSES[name](t, **options).terms["policy"]
    assert term.sum.item() == 0.0 and term.count.item() == 0
    term.sum.backward()
    assert logp.grad.tolist() == [0.0] * n


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
def test_policies_far_apart_stay_finite(name, gap):
    logp, old = torch.tensor([-1.0, -2.0, -1.5]), torch.tensor([-1.0, -2.0 - gap, -1.5])
    case = Case(logp, old, torch.tensor([1.0, -1.0, 1.0]), torch.tensor([True] * 3), torch.arange(3))
    for level in ("token", "sequence"):
        value = case.value(name, level=level)
        assert value.isfinite() and case.gradient(value).isfinite().all() and value.dtype == torch.float32


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gspo_of_one_token_is_token_level(name):
    """Must-show 2: completions of length 1 have the same ratio at both levels."""
    case = random_case(seed=4)
    case = Case(case.logp.detach(), case.old, case.advantage, case.mask, torch.arange(len(case.logp)))
    token, sequence = case.value(name, level="token"), case.value(name, level="sequence")
    assert token.item() == pytest.approx(sequence.item(), rel=1e-14)
    torch.testing.assert_close(case.gradient(token), case.gradient(sequence), atol=1e-15, rtol=1e-13)


def test_dapo_is_bnpo_on_one_micro_batch_and_not_on_two():
    """Must-show 2, and why bnpo is the exception: its mean is over micro-batches."""
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
    mean_of_means = sum(p.sum / p.count for p in expected) / 2
    two = sum(p.sum for p in parts) / 2
    assert two.item() == pytest.approx(mean_of_means.item(), rel=1e-13)
    assert (case.gradient(two) - dapo_gradient).abs().max() > 1e-3


def test_cispo_gradient_flows_through_capped_tokens():
    """Must-show 2: where clipping stops a token, CISPO caps its weight and goes on."""
    logp = torch.tensor([-1.0], requires_grad=True)
    old, mask, one = torch.tensor([-4.0]), torch.tensor([True]), torch.ones(1)
    t = Tokens(logp, token_log_ratio(logp, old, mask), one, mask, one)
    clipped = torch.autograd.grad(dapo(t, **CLIP).terms["policy"].sum, logp)[0]
    out = cispo(t, cispo_cap=5.0)
    assert clipped.item() == 0.0
    assert torch.autograd.grad(out.terms["policy"].sum, logp)[0].item() == -5.0
    assert out.metrics["policy/cispo_cap_frac"][0].item() == 1.0


def test_rloo_on_policy_has_the_gradient_of_reinforce():
    case = random_case(seed=7)
    case.old, case.weight = case.logp.detach().clone(), None
    a, b = (f(case.tokens(), **o).terms["policy"] for f, o in ((rloo, CLIP), (reinforce, {})))
    assert a.count.item() == pytest.approx(b.count.item())
    gradient = case.gradient(a.sum)
    torch.testing.assert_close(gradient, case.gradient(b.sum), atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(gradient, -(case.advantage * case.mask), atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "rloo"])  # whose ratio has |y| factors
def test_on_policy_gradient_is_the_advantage_times_the_share(name):
    """At ratio 1 every loss type agrees up to what it averages over."""
    case = random_case(seed=8)
    case.old, case.weight = case.logp.detach().clone(), None
    out = call(name, case.tokens(), case)
    share = POLICY_LOSSES[name].share(
        case.tokens(), micro_batch_tokens=case.mask.sum(), max_completion_length=MAX_LENGTH
    )
    expected = -(case.advantage * share.weight)
    torch.testing.assert_close(case.gradient(out.terms["policy"].sum), expected, atol=1e-14, rtol=1e-12)
    assert out.terms["policy"].count.item() == share.count.item()


def test_luspo_at_sequence_level_is_length_times_gspo():
    """One completion: |y| r A against r A."""
    case = golden()
    rows = slice(0, 3)
    summed, meant = (f(case.tokens(rows, level="sequence"), **CLIP).terms["policy"].sum for f in (luspo, grpo))
    assert summed.item() == pytest.approx(3 * meant.item())


def test_weight_zero_leaves_a_token_out_but_counts_it():
    case = random_case(seed=9)
    case.weight = (case.weight > 0.5).double()
    for name in ("dapo", "grpo"):
        out = call(name, case.tokens(), case)
        gradient = case.gradient(out.terms["policy"].sum)
        assert (gradient[case.weight == 0] == 0).all() and (gradient[case.mask & (case.weight == 1)] != 0).any()
        assert out.terms["policy"].count.item() == pytest.approx(case.denominator(name).item())


def test_weight_zero_hides_a_loss_that_is_not_finite():
    logp = torch.tensor([-math.inf, -1.0], requires_grad=True)
    mask, one = torch.tensor([True, True]), torch.ones(2)
    t = Tokens(logp, torch.zeros(2), one, mask, one, torch.tensor([0.0, 1.0]))
    total = reinforce(t).terms["policy"].sum
    total.backward()
    assert total.item() == 1.0 and logp.grad.tolist() == [0.0, -1.0]


def test_weight_has_no_gradient():
    case = random_case(seed=9)
    case.weight.requires_grad_()
    (gradient,) = torch.autograd.grad(case.value("dapo"), case.weight, allow_unused=True)
    assert gradient is None


@pytest.mark.parametrize("log_w", [-math.inf, -1e4, 1e4, math.inf])
def test_vespo_of_a_completion_far_away_has_no_gradient(log_w):
    logp, one = torch.tensor([-1.0, -2.0], requires_grad=True), torch.ones(2)
    t = Tokens(logp, 0 * one, torch.tensor([1.0, -1.0]), one.bool(), one, sequence_log_ratio=torch.full((2,), log_w))
    out = vespo(t)
    out.terms["policy"].sum.backward()
    assert logp.grad.abs().max() < 1e-12 and out.metrics["policy/vespo_phi"][0].item() < 1e-12


def test_clip_metrics_name_the_side():
    case = golden()
    case.old = torch.tensor([-1.2, -0.5, -1.5, 0.0, 9.0, 9.0])  # the last trained ratio is exp(-0.7), A < 0
    metrics = grpo(case.tokens(), **CLIP).metrics
    got = {name: metrics[f"policy/clip_{name}"][0].item() for name in ("low_frac", "high_frac", "capped_frac", "frac")}
    assert got == {"low_frac": 1.0, "high_frac": 1.0, "capped_frac": 0.0, "frac": 2.0}
    case = golden()
    metrics = grpo(case.tokens(), **CLIP, delta=1.5).metrics
    assert metrics["policy/clip_capped_frac"][0].item() == 1.0 and metrics["policy/clip_frac"][0].item() == 2.0
    case.advantage = -case.advantage  # the ratio beyond delta is now good: clipped, not capped
    metrics = grpo(case.tokens(), **CLIP, delta=1.5).metrics
    assert [metrics[f"policy/clip_{side}_frac"][0].item() for side in ("low", "high", "capped")] == [1.0, 1.0, 0.0]
    assert not any(total.requires_grad for total, _ in metrics.values())


@pytest.mark.parametrize("name", ["grpo", "luspo", "sapo", "rloo", "vespo"])
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


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "luspo", "bnpo"])
def test_kl_beside_a_loss_takes_its_average(name):
    """The sum over tokens of (policy + beta kl), averaged as the policy term is."""
    case, ref = golden(), torch.tensor(REF)
    t = case.tokens()
    share = POLICY_LOSSES[name].share(t, micro_batch_tokens=case.mask.sum(), max_completion_length=MAX_LENGTH)
    penalty = kl_penalty(case.logp, case.old, ref, case.mask, beta=0.1, share=share.weight, count=share.count)
    out = merge(call(name, t, case), penalty)
    assert out.terms["kl"].count.item() == out.terms["policy"].count.item()
    d = ref - case.logp
    each = (d.exp() - d - 1) * (case.logp - case.old).exp() * share.weight
    assert out.terms["kl"].sum.item() == pytest.approx(each[case.mask].sum().item(), rel=1e-5)
    # The measured divergence stays a mean over tokens.
    total, count = out.metrics["policy/ref_kl_k3"]
    assert (total / count).item() == pytest.approx(0.012452, abs=1e-6)
