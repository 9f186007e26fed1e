"""Distillation losses: values by hand, TRL 1.16.0, float64 loops, zero probabilities, and the sampled reverse KL."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.distill import generalized_jsd
from tests.losses.packed import Tokens
from trainer.methods.opd import reverse_kl_loss

BETAS = (0, 0.1, 0.5, 0.9, 1)
LOG_3 = math.log(3)

# Student and teacher of two tokens over five ids, and what TRL 1.16.0 makes of them in float64:
# GKDTrainer.generalized_jsd_loss(reduction="none"), summed over the vocabulary.
STUDENT = [[4.5, -1.0, -6.5, 1.75, -3.25], [-4.25, 1.25, 2.5, -2.25, -1.25]]
TEACHER = [[-1.75, 0.5, -2.5, 3.25, -3.25], [0.25, -1.75, 1.0, -2.75, -4.5]]
TRL = {
    (0, 1.0): [2.700314489, 1.591746343],
    (0, 0.7): [3.920014455, 1.967839622],
    (0.1, 1.0): [0.216917388, 0.07816381],
    (0.1, 0.7): [0.274458195, 0.067532657],
    (0.5, 1.0): [0.553637366, 0.141514216],
    (0.5, 0.7): [0.64142492, 0.120666489],
    (0.9, 1.0): [0.265402805, 0.046050564],
    (0.9, 0.7): [0.30691569, 0.040596147],
    (1, 1.0): [4.510409479, 0.514584062],
    (1, 0.7): [6.925746681, 0.467124012],
}
# IWOPDTrainer._compute_iw_opd_loss of the ids 1 and 4 with iw_opd_gamma=0 and no log-probs of the rollout: its gradient
# by the student's logits. Its loss is the mean of -logp sg[teacher_logp - logp], so only the gradient is comparable. A
# gamma above 0 weights tokens by how much of the completion's gap lies before them, which we do not.
SAMPLED = [1, 4]
TRL_SAMPLED_GRADIENT = [
    [1.283888444, -1.366539155, 2.1443e-05, 0.082076242, 0.000553025],
    [-0.000851501, -0.208355501, -0.727232157, -0.006291791, 0.942730951],
]


def wide(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def naive(student: Tensor, teacher: Tensor, beta: float) -> Tensor:  # (V,), (V,) -> ()
    """Entry by entry, in float64."""
    q, p = ((z.double() - z.double().max()).exp() for z in (student, teacher))
    q, p = q / q.sum(), p / p.sum()
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(p, q, strict=True):
        m = beta * a + (1 - beta) * b
        if beta == 0:
            total = total + a * (a / b).log()
        elif beta == 1:
            total = total + b * (b / a).log()
        else:
            total = total + beta * a * (a / m).log() + (1 - beta) * b * (b / m).log()
    return total


# ---- the whole vocabulary ----


def test_jsd_by_hand():
    """q = (1/4, 3/4), p = (3/4, 1/4)."""
    q, p = wide([0.0, LOG_3]), wide([LOG_3, 0.0])
    jsd = 0.75 * math.log(1.5) - 0.25 * math.log(2)
    for beta, want in ((0, LOG_3 / 2), (1, LOG_3 / 2), (0.5, jsd)):
        assert generalized_jsd(q, p, beta=beta).item() == pytest.approx(want, abs=1e-14)


@pytest.mark.parametrize(("beta", "temperature"), TRL)
def test_jsd_of_trl(beta, temperature):
    got = generalized_jsd(wide(STUDENT), wide(TEACHER), beta=beta, temperature=temperature)
    torch.testing.assert_close(got, wide(TRL[beta, temperature]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_and_gradient_agree_with_a_float64_loop(beta):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(4, 37, generator=generator, dtype=torch.float64) for _ in range(2))
    ours, loop = student.clone().requires_grad_(), student.clone().requires_grad_()
    got = generalized_jsd(ours, teacher, beta=beta)
    want = torch.stack([naive(z, t, beta) for z, t in zip(loop, teacher, strict=True)])
    torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-12)
    weight = torch.randn(4, generator=generator, dtype=torch.float64)
    for x, y in zip(torch.autograd.grad(got @ weight, ours), torch.autograd.grad(want @ weight, loop), strict=True):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=1e-12)
    single = generalized_jsd(student.bfloat16(), teacher.bfloat16(), beta=beta)
    assert single.dtype == torch.float32 and single.shape == (4,)
    torch.testing.assert_close(
        single.double(), generalized_jsd(student.bfloat16().double(), teacher.bfloat16().double(), beta=beta),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_gradient_is_that_of_finite_differences_and_of_the_closed_form(beta):
    student, teacher = wide(STUDENT).requires_grad_(), wide(TEACHER).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: generalized_jsd(x, teacher, beta=beta), student)
    divergence = generalized_jsd(student, teacher, beta=beta)
    got, of_teacher = torch.autograd.grad(divergence.sum(), (student, teacher), allow_unused=True)
    assert of_teacher is None
    q, p = student.detach().softmax(dim=-1), teacher.detach().softmax(dim=-1)
    m = p if beta == 1 else beta * p + (1 - beta) * q
    log_ratio = (q / m).log()
    want = (1 if beta == 1 else 1 - beta) * q * (log_ratio - (q * log_ratio).sum(dim=-1, keepdim=True))
    torch.testing.assert_close(got, q - p if beta == 0 else want, atol=1e-14, rtol=1e-12)


def test_ends_are_the_limits_of_the_divergence_per_beta():
    q, p = wide(STUDENT), wide(TEACHER)
    for beta, end, share in ((1e-7, 0, 1e-7), (1 - 1e-7, 1, 1e-7)):
        got = generalized_jsd(q, p, beta=beta) / share
        torch.testing.assert_close(got, generalized_jsd(q, p, beta=end), rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_of_equal_logits_is_zero_and_so_is_its_gradient(beta):
    student = wide(STUDENT).requires_grad_()
    divergence = generalized_jsd(student, wide(STUDENT), beta=beta)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert divergence.abs().max() < 1e-15 and gradient.abs().max() < 1e-15


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_of_extreme_logits_is_finite(beta):
    student = torch.tensor([[3000.0, 0.0, -3000.0], [0.0, 0.0, 0.0]], requires_grad=True)
    divergence = generalized_jsd(student, student.detach().flip(1), beta=beta)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert divergence.isfinite().all() and gradient.isfinite().all() and (divergence >= 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_ids_without_probability(beta):
    """Masked in both: as if not there. In one: infinite only by definition. Gradients are never NaN."""
    off = torch.full((2, 2), -math.inf, dtype=torch.float64)
    student, teacher = wide(STUDENT), wide(TEACHER)
    both = torch.cat([student, off], dim=1).requires_grad_()
    divergence = generalized_jsd(both, torch.cat([teacher, off], dim=1), beta=beta)
    torch.testing.assert_close(divergence, generalized_jsd(student, teacher, beta=beta), atol=1e-14, rtol=0)
    (gradient,) = torch.autograd.grad(divergence.sum(), both)
    assert gradient.isfinite().all() and (gradient[:, 5:] == 0).all()
    some = torch.tensor([True, False, False, False, False])
    for q, p, infinite in (
        (student.masked_fill(some, -math.inf), teacher, 0), (student, teacher.masked_fill(some, -math.inf), 1),
    ):  # fmt: skip
        q.requires_grad_()
        divergence = generalized_jsd(q, p, beta=beta)
        assert (divergence == math.inf).all() if beta == infinite else divergence.isfinite().all()
        if beta != infinite:
            assert torch.autograd.grad(divergence.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_logit_that_is_no_number_is_not_hidden(beta):
    bad = wide(STUDENT)
    bad[0, 2] = math.nan
    for pair in ((bad, wide(TEACHER)), (wide(TEACHER), bad)):
        divergence = generalized_jsd(*pair, beta=beta)
        assert divergence[0].isnan() and divergence[1].isfinite()


def test_jsd_names_what_it_cannot_take():
    for options, message in (({"beta": -0.1}, "beta=-0.1"), ({"beta": 0.5, "temperature": 0.0}, "temperature=0.0")):
        with pytest.raises(ValueError, match=message):
            generalized_jsd(wide(STUDENT), wide(TEACHER), **options)


# ---- the sampled token: trainer/methods/opd.py ----


def sampled(logp: Tensor, teacher: Tensor, old: Tensor | None = None, **options) -> tuple[Tokens, Tensor, dict]:
    case = Tokens(logp, logp if old is None else old, teacher)
    return case, *case.loss("dapo", function=reverse_kl_loss, divide=False, **options)


def test_sampled_value_and_gradient_by_hand():
    case, loss, metrics = sampled(wide([-1.0, -0.5, -2.0]), wide([-2.0, -0.5, -1.5]))
    assert loss.item() == pytest.approx(1.0 + 0.0 - 0.5)
    value, count = metrics["policy/reverse_kl"]
    assert (value.item(), count) == (pytest.approx(0.5), 3)
    torch.testing.assert_close(case.gradient(loss), wide([1.0, 0.0, -0.5]))  # logp - teacher_logp


def test_sampled_gradient_is_that_of_trl():
    logits = wide(STUDENT).requires_grad_()
    ids = torch.tensor(SAMPLED).unsqueeze(1)
    logp, teacher = (z.log_softmax(dim=-1).gather(1, ids).squeeze(1) for z in (logits, wide(TEACHER)))
    case = Tokens(logp.detach(), logp.detach(), teacher)
    loss, _ = case.loss("dapo", function=reverse_kl_loss, logp=logp)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wide(TRL_SAMPLED_GRADIENT), atol=1e-9, rtol=0)


def test_sampled_gradient_is_exactly_zero_where_the_student_is_the_teacher():
    logp = -3 * torch.rand(50, generator=torch.Generator().manual_seed(0))
    for old in (None, logp + 0.5):  # even if the policy has moved since it sampled
        case, loss, metrics = sampled(logp, logp, old)
        assert (case.gradient(loss) == 0).all() and metrics["policy/reverse_kl"][0] == 0


@pytest.mark.parametrize("moved", [False, True], ids=["on policy", "after steps"])
def test_sampled_gradient_is_that_of_the_reverse_kl_in_expectation(moved):
    """Over every token, weighted by the probability that the sampler had: no clip, so any ratio counts in full."""
    student, teacher = wide(STUDENT[0]).requires_grad_(), wide(TEACHER[0]).log_softmax(dim=0)
    old = (wide(STUDENT[0]) + (wide([0.5, -1.0, 0.0, 1.0, 2.0]) if moved else 0)).log_softmax(dim=0)
    logp = student.log_softmax(dim=0)
    case = Tokens(logp.detach(), old, teacher, weight=old.exp())
    loss, _ = case.loss("dapo", function=reverse_kl_loss, logp=logp, divide=False, epsilon=1.0, epsilon_high=1e9)
    (got,) = torch.autograd.grad(loss, student)
    (want,) = torch.autograd.grad(generalized_jsd(student, teacher, beta=1), student)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_sampled_is_dapo_with_the_gap_to_the_teacher_as_advantage():
    generator = torch.Generator().manual_seed(3)
    logp, old, teacher, reward = (-2 * torch.rand(40, generator=generator, dtype=torch.float64) for _ in range(4))
    options = {"epsilon": 0.1, "epsilon_high": 0.3, "dual_clip": 3.0}
    case, loss, metrics = sampled(logp, teacher + 0.5 * reward, old, **options)
    same = Tokens(logp, old, teacher + 0.5 * reward - logp)
    want, expected = same.loss("dapo", divide=False, **options)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(case.gradient(loss), same.gradient(want))
    assert metrics["policy/clip_frac"] == expected["policy/clip_frac"] and metrics["policy/clip_frac"][0] > 0
