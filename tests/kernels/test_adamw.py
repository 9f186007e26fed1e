"""AdamW: the plain-torch reference, and checks that test_interpreted.py and the GPU tests below run on the kernel."""

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
    step_all_,
    stochastic_round,
)

RATES = Rates(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1, t=3)


def problem(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> ParamTensors:
    """Return values of many magnitudes, including zeros."""
    torch.manual_seed(len(shape))
    weight, grad, exp_avg = (torch.randn(shape) * 10.0 ** torch.randint(-4, 1, shape) for _ in range(3))
    grad.view(-1)[::7] = 0.0
    return ParamTensors(*(x.to(device, dtype) for x in (weight, grad, exp_avg, grad.square() * 0.5)))


def step_at(exact: torch.Tensor) -> torch.Tensor:
    """Return the distance between adjacent bfloat16 values at these values."""
    return 2.0 ** (exact.abs().clamp(min=1e-38).log2().floor() - 7)


def check_against_exact(run, *shape: int, device: str = "cpu") -> None:
    tensors = problem(*shape, device=device)
    before = ParamTensors(*(x.double() for x in tensors))
    exact = exact_step(before, RATES)
    run(tensors, RATES, 5)
    sizes = (before.weight.abs() + exact[0].abs(), before.exp_avg.abs() + before.grad.abs(), exact[2])
    for got, value, size in zip((tensors.weight, tensors.exp_avg, tensors.exp_avg_sq), exact, sizes, strict=True):
        error = got.double() - value
        float32 = 1e-6 * size  # float32 rounding, which dominates if terms cancel
        assert ((error.abs() - float32) / step_at(value)).max() < 1.0  # one of the two neighbours
        if got.numel() > 4000:  # unbiased: the rounding error has a standard deviation of at most half a step
            steps = (error / step_at(value))[float32 < 0.01 * step_at(value)]
            assert abs(steps.mean()) < 5 * 0.5 / len(steps) ** 0.5 and len(steps) > 0.7 * got.numel()
            assert steps.abs().mean() > 0.1  # not rounded to nearest


@pytest.mark.parametrize("shape", [(1,), (7, 13), (BLOCK,), (65, 129)])
def test_reference_rounds_to_a_neighbour_without_bias(shape):
    check_against_exact(reference_step, *shape)


def test_float32_matches_torch_adamw():
    weight, grad, exp_avg, exp_avg_sq = problem(9, 11, dtype=torch.float32)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=RATES.lr, weight_decay=RATES.decay)
    state = {"step": torch.tensor(2.0), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    optimizer.state[parameter] = state
    optimizer.step()
    step_all_([Update(ParamTensors(weight, grad, exp_avg, exp_avg_sq), RATES, 0)])
    for got, expected in ((weight, parameter), (exp_avg, state["exp_avg"]), (exp_avg_sq, state["exp_avg_sq"])):
        torch.testing.assert_close(got, expected.detach(), rtol=2e-6, atol=0)


def test_rounding_is_unbiased():
    generator = torch.Generator().manual_seed(0)
    for part in (0.0, 0.1, 0.5, 0.9):
        x = torch.full((100_000,), -(1.0 + part / 128))
        rounded = stochastic_round(x, generator).float()
        assert set(rounded.unique().tolist()) <= {-1.0, -(1.0 + 1 / 128)}
        assert rounded.mean().item() == pytest.approx(x[0].item(), abs=5 * 0.5 / 128 / 100_000**0.5)


def test_second_moment_shrinks_although_every_change_is_below_half_a_step():
    """Rounding to nearest would keep it at 1: a change of 1e-3 is a quarter of a step."""
    tensors = ParamTensors(*(torch.ones(4096, dtype=torch.bfloat16) for _ in range(4)))
    tensors.grad.zero_()
    for t in range(1, 101):
        reference_step(tensors, RATES._replace(t=t, lr=0.0), t)
    assert tensors[3].float().mean().item() == pytest.approx(0.999**100, rel=0.02)


def many_updates(sizes: list[int], *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[Update]:
    """Return one update per size, each with its own seed and rates."""
    updates = []
    for i, size in enumerate(sizes):
        generator = torch.Generator(device).manual_seed(i)
        tensors = ParamTensors(*(torch.randn(size, device=device, generator=generator).to(dtype) for _ in range(4)))
        tensors.exp_avg_sq.abs_()
        updates.append(Update(tensors, RATES._replace(t=i % 3 + 1, decay=0.1 * (i % 2)), seed=7 + i))
    return updates


def check_launch(run, sizes: list[int], **options) -> None:
    """The result of a parameter does not depend on the other parameters of the launch."""
    together, alone, split, before = (many_updates(sizes, **options) for _ in range(4))
    run(together)
    for update in alone:
        run([update])
    for part in (split[::2], split[1::2]):
        run(part[::-1])
    for updates in zip(together, alone, split, before, strict=True):
        first, second, third, old = (update.tensors for update in updates)
        assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, third))
        assert torch.equal(first.grad, old.grad)
        assert len(old.grad) < 100 or not any(map(torch.equal, (first[0], *first[2:]), (old[0], *old[2:])))


def check_guard(run, sizes: list[int], **options) -> None:
    """The guard divides gradients by a scale, or skips the step."""
    device = options.get("device", "cpu")
    quarter, scaled, skipped, before = (many_updates(sizes, **options) for _ in range(4))
    for update in quarter:
        update.tensors.grad.mul_(0.25)  # exact in bfloat16
    run(quarter)
    run(scaled, StepGuard(torch.tensor([4.0], device=device), torch.tensor([0.0], device=device)))
    run(skipped, StepGuard(torch.tensor(math.nan, device=device), torch.tensor(1.0, device=device)))
    for updates in zip(quarter, scaled, skipped, before, strict=True):
        expected, got, unchanged, old = (update.tensors for update in updates)
        assert all(map(torch.equal, (expected[0], *expected[2:]), (got[0], *got[2:])))
        assert all(map(torch.equal, unchanged, old)) and (
            len(old.grad) < 100 or not torch.equal(got.weight, old.weight)
        )


def check_unaligned(run, sizes: list[int], shift: int, **options) -> None:
    """Views whose addresses are not multiples of 16 bytes, as in shards, get the same result; nothing else changes."""
    for update in many_updates(sizes, **options):
        storage = [torch.full((len(x) + 2 * shift,), 3.0, device=x.device).bfloat16() for x in update.tensors]
        views = ParamTensors(*(x[shift:-shift] for x in storage))
        for view, x in zip(views, update.tensors, strict=True):
            view.copy_(x)
        assert all(view.data_ptr() % 16 for view in views)
        run([update._replace(tensors=views)])
        run([update])
        assert all(map(torch.equal, views, update.tensors))
        assert all((x[:shift] == 3.0).all() and (x[-shift:] == 3.0).all() for x in storage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guard(dtype):
    check_guard(step_all_, [99, 0, 1], dtype=dtype)


def test_mixed_dtypes_are_each_stepped_as_alone():
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    alone, together = ([problem(5, 7, dtype=dtype) for dtype in dtypes] for _ in range(2))
    for seed, tensors in enumerate(alone):
        step_all_([Update(tensors, RATES, seed)])
    step_all_([Update(tensors, RATES, seed) for seed, tensors in enumerate(together)])
    assert all(all(map(torch.equal, *pair)) for pair in zip(alone, together, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1,), (7, 13), (BLOCK - 1,), (1025, 2049)])
def test_kernel_on_a_gpu_rounds_to_a_neighbour_without_bias(shape):
    check_against_exact(lambda *update: step_all_([Update(*update)]), *shape, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_launch, check_guard])
def test_many_parameters_on_a_gpu(check):
    sizes = [0, 1, 7, BLOCK, 4 * BLOCK, CHUNK - 1, CHUNK, 2048, 128, 6144 * 2048, 3 * CHUNK + 5, 151936 * 256 + 3]
    check(step_all_, sizes, device="cuda")
