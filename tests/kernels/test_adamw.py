"""The plain-torch reference against the exact step, and stochastic rounding on average.

The kernel runs in test_interpreted.py, and on a GPU at the end of this file.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.adamw import (
    BLOCK,
    CHUNK,
    ParamTensors,
    Rates,
    StepGuard,
    Update,
    exact_step,
    reference_step,
    step_,
    step_all_,
    stochastic_round,
)

RATES = Rates(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1, t=3)


def problem(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> ParamTensors:
    """Weight, gradient, moments: values of many magnitudes, including zeros."""
    torch.manual_seed(len(shape))
    weight, grad, exp_avg = (torch.randn(shape) * 10.0 ** torch.randint(-4, 1, shape) for _ in range(3))
    grad.view(-1)[::7] = 0.0
    return ParamTensors(*(x.to(device, dtype) for x in (weight, grad, exp_avg, grad.square() * 0.5)))


def step_at(exact: torch.Tensor) -> torch.Tensor:
    """Distance between adjacent bfloat16 numbers at these values."""
    return 2.0 ** (exact.abs().clamp(min=1e-38).log2().floor() - 7)


def check_against_exact(run, *shape: int, device: str = "cpu") -> None:
    tensors = problem(*shape, device=device)
    before = ParamTensors(*(x.double() for x in tensors))
    exact = exact_step(before, RATES)
    run(tensors, RATES, 5)
    sizes = (before.weight.abs() + exact[0].abs(), before.exp_avg.abs() + before.grad.abs(), exact[2])
    for got, value, size in zip((tensors.weight, tensors.exp_avg, tensors.exp_avg_sq), exact, sizes, strict=True):
        apart = got.double() - value
        float32 = 1e-6 * size  # float32 rounding, which remains where terms cancel
        assert ((apart.abs() - float32) / step_at(value)).max() < 1.0  # one of the two neighbours
        if got.numel() > 4000:  # exact on average: rounding has a standard deviation of at most half a step
            steps = (apart / step_at(value))[float32 < 0.01 * step_at(value)]
            assert abs(steps.mean()) < 5 * 0.5 / len(steps) ** 0.5 and len(steps) > 0.7 * got.numel()
            assert steps.abs().mean() > 0.1  # random rather than to nearest


@pytest.mark.parametrize("shape", [(1,), (7, 13), (BLOCK,), (65, 129)])
def test_reference_rounds_to_a_neighbour_and_is_exact_on_average(shape):
    check_against_exact(reference_step, *shape)


def test_float32_is_adamw_itself():
    weight, grad, exp_avg, exp_avg_sq = problem(9, 11, dtype=torch.float32)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=RATES.lr, weight_decay=RATES.decay)
    state = {"step": torch.tensor(2.0), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    optimizer.state[parameter] = state
    optimizer.step()
    step_(ParamTensors(weight, grad, exp_avg, exp_avg_sq), RATES, 0)
    for got, expected in ((weight, parameter), (exp_avg, state["exp_avg"]), (exp_avg_sq, state["exp_avg_sq"])):
        torch.testing.assert_close(got, expected.detach(), rtol=2e-6, atol=0)


def test_rounding_is_exact_on_average_at_every_distance():
    generator = torch.Generator().manual_seed(0)
    for part in (0.0, 0.1, 0.5, 0.9):
        x = torch.full((100_000,), -(1.0 + part / 128))
        made = stochastic_round(x, generator).float()
        assert set(made.unique().tolist()) <= {-1.0, -(1.0 + 1 / 128)}
        assert made.mean().item() == pytest.approx(x[0].item(), abs=5 * 0.5 / 128 / 100_000**0.5)


def test_second_moment_moves_though_every_change_is_under_half_a_step():
    """Rounded to nearest it would stay at 1: a change of 1e-3 is a quarter of a step."""
    tensors = ParamTensors(*(torch.ones(4096, dtype=torch.bfloat16) for _ in range(4)))
    tensors.grad.zero_()
    for t in range(1, 101):
        reference_step(tensors, RATES._replace(t=t, lr=0.0), t)
    assert tensors[3].float().mean().item() == pytest.approx(0.999**100, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_scales_gradients_or_calls_the_step_off(dtype):
    quarter, scaled, left, was = (problem(9, 11, dtype=dtype) for _ in range(4))
    quarter.grad.mul_(0.25)
    step_(quarter, RATES, 1, StepGuard(torch.tensor(1.0), torch.tensor(0.0)))
    step_(scaled, RATES, 1, StepGuard(torch.tensor([4.0]), torch.tensor([0.0])))
    step_(left, RATES, 1, StepGuard(torch.tensor(math.nan), torch.tensor(1.0)))
    assert all(torch.equal(getattr(quarter, x), getattr(scaled, x)) for x in ("weight", "exp_avg", "exp_avg_sq"))
    assert all(map(torch.equal, left, was)) and not torch.equal(scaled.weight, was.weight)


def test_many_parameters_are_each_stepped_as_alone():
    """Some in float32, as a model may have them."""
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    alone, together = ([problem(5, 7, dtype=dtype) for dtype in dtypes] for _ in range(2))
    for seed, held in enumerate(alone):
        step_(held, RATES, seed)
    step_all_([Update(held, RATES, seed) for seed, held in enumerate(together)])
    assert all(all(map(torch.equal, *pair)) for pair in zip(alone, together, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1,), (7, 13), (BLOCK - 1,), (1025, 2049)])
def test_kernel_on_a_gpu_rounds_to_a_neighbour_and_is_exact_on_average(shape):
    check_against_exact(step_, *shape, device="cuda")


SIZES = [0, 1, 7, BLOCK, 4 * BLOCK, CHUNK - 1, CHUNK, 2048, 128, 6144 * 2048, 3 * CHUNK + 5, 151936 * 2048 // 8 + 3]


def many(sizes: list[int]) -> list[Update]:
    made = []
    for number, size in enumerate(sizes):
        generator = torch.Generator("cuda").manual_seed(number)
        held = ParamTensors(*(torch.randn(size, device="cuda", generator=generator).bfloat16() for _ in range(4)))
        held.exp_avg_sq.abs_()
        made.append(Update(held, RATES._replace(t=number + 1, decay=0.1 * (number % 2)), seed=number))
    return made


@pytest.mark.gpu
def test_one_launch_on_a_gpu_is_each_tensor_alone():
    together, alone, shuffled = many(SIZES), many(SIZES), many(SIZES)
    step_all_(together)
    for update in alone:
        step_(*update)
    step_all_(shuffled[::2] + shuffled[1::2])
    for one, two, three in zip(together, alone, shuffled, strict=True):
        assert all(map(torch.equal, one.held, two.held)) and all(map(torch.equal, one.held, three.held))


@pytest.mark.gpu
def test_gate_on_a_gpu():
    quarter, scaled, left, was = (many(SIZES) for _ in range(4))
    for update in quarter:
        update.held.grad.mul_(0.25)
    step_all_(quarter)
    step_all_(scaled, StepGuard(torch.tensor(4.0, device="cuda"), torch.tensor(0.0, device="cuda")))
    step_all_(left, StepGuard(torch.tensor(math.nan, device="cuda"), torch.tensor(1.0, device="cuda")))
    for one, two, three, four in zip(quarter, scaled, left, was, strict=True):
        assert all(torch.equal(getattr(one.held, x), getattr(two.held, x)) for x in ("weight", "exp_avg", "exp_avg_sq"))
        assert all(map(torch.equal, three.held, four.held))


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [1, 4])
def test_views_that_start_anywhere_on_a_gpu(shift):
    """Shards are views: at 2 or 8 bytes after a multiple of 16."""
    plain, shifted = many([5 * BLOCK + 3, CHUNK])
    for update in (plain, shifted):
        room = [torch.full((x.numel() + 2 * shift,), 3.0, device="cuda").bfloat16() for x in update.held]
        views = ParamTensors(*(whole[shift:-shift] for whole in room))
        for view, x in zip(views, update.held, strict=True):
            view.copy_(x)
        step_all_([update._replace(held=views)])
        step_all_([update])
        assert all(map(torch.equal, views, update.held))
        assert all((whole[:shift] == 3.0).all() and (whole[-shift:] == 3.0).all() for whole in room)
