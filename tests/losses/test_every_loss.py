"""What all losses promise: finite differences, pieces, padding, precision, extremes, nothing at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from losses.kl import KL_ESTIMATORS, token_kl
from losses.preference import DIVERGENCE_LOSSES, DIVERGENCES, PAIR_LOSSES, AotTargets, PairScores, aot_targets
from losses.reference_free import CPO_LOSSES, FreeScores, cpo_loss, orpo_loss
from losses.reward_model import UNLABELLED, bradley_terry, stepwise_loss
from losses.types import LossOut, Term, wide
from trainer.methods import dpo, kto, ppo, sft

SMOOTHING = {"exo_pair": 1e-3, "robust": 0.1}


class Case(NamedTuple):
    """A loss as a function of columns with one row for each token, pair or completion."""

    run: Callable[..., LossOut]
    columns: list[Tensor]
    trained: int = 1  # how many of the columns, from the first, get a gradient
    mask: bool = False  # whether the last column says which rows count; elsewhere the others may hold anything
    smooth: bool = True  # False: something is detached, so its gradient is not that of its value
    extremes: tuple[float, ...] = (-1e4, 1e4)  # values of a trained column at which the loss is still finite

    def leaves(self, *, rows: slice = slice(None), dtype: torch.dtype = torch.float64) -> list[Tensor]:
        made = [x[rows].to(dtype) if x.is_floating_point() else x[rows] for x in self.columns]
        return [x.clone().requires_grad_(n < self.trained) for n, x in enumerate(made)]

    @property
    def kept(self) -> Tensor:  # (n,) bool
        last = self.columns[-1]
        return last if last.dtype == torch.bool else last != UNLABELLED


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(n: int, k: int, seed: int = 0) -> list[Tensor]:
    """k columns of log-probs about 0.3 apart, and a mask."""
    base = -3 * draw(n, seed=seed).abs()
    return [*(base + 0.3 * draw(n, seed=seed + 10 + i) for i in range(k)), draw(n, seed=seed + 5) < 0.5]


def of_tokens(loss: Tensor, metrics: dict | None = None) -> LossOut:
    """The sum of a loss per token or completion, as the methods take it."""
    counted = {name: (torch.as_tensor(x).detach(), torch.as_tensor(n)) for name, (x, n) in (metrics or {}).items()}
    return LossOut({"loss": Term(1.0, loss.sum(), torch.tensor(len(loss)))}, counted)


def pair_cases() -> Iterator[tuple[str, Case]]:
    logp, ref = [-9 * draw(11, seed=i).abs() for i in (1, 2)], [-9 * draw(11, seed=i).abs() for i in (1, 2)]
    logp = [x + 2 * draw(11, seed=i) for i, x in enumerate(logp, 3)]
    lengths = list(torch.randint(1, 9, (2, 11), generator=torch.Generator().manual_seed(0)))
    weight = torch.linspace(0.1, 1, 11, dtype=torch.float64)

    def run(name: str, divergence, *columns: Tensor) -> LossOut:
        s = PairScores(*columns[:4], *columns[-2:], divergence)
        more = {"pair_weight": columns[4]} if len(columns) == 7 else {"targets": AotTargets(*columns[4:7])}
        smoothing = {"label_smoothing": SMOOTHING.get(name, 0.0), "discopop_tau": 0.05}
        cfg = SimpleNamespace(losses=((name,), (1.0,)), beta=0.1, **smoothing)
        terms = dpo.pair_losses(cfg, s, torch.zeros(()), **more)
        return LossOut({name: Term(1.0, terms[name], torch.tensor(len(s.c)))}, {})

    targets = list(aot_targets(PairScores(*logp, *ref, *lengths)))
    for name in PAIR_LOSSES:
        extra = targets if name.startswith("aot") else [weight]
        for kind, divergence in DIVERGENCES.items():
            if kind == "reverse_kl" or name in DIVERGENCE_LOSSES:
                columns = [*logp, *ref, *extra, *lengths]
                yield f"{name} {kind}", Case(partial(run, name, divergence), columns, 2, smooth=name != "aot_unpaired")

    free = [*(0.1 * x - 0.05 for x in ref), *lengths]
    for name in CPO_LOSSES:
        options = {"loss_type": name, "beta": 2.0, "gamma": 1.0, "alpha": 0.25, "label_smoothing": 0.1}
        cpo = partial(cpo_loss, cpo_alpha=0.3, **options)
        yield f"cpo {name}", Case(lambda *x, loss=cpo: loss(FreeScores(*x)), free, 2, extremes=(-1e4, 0.0))

    def orpo(*columns: Tensor) -> LossOut:
        return orpo_loss(FreeScores(*columns), -wide(columns[0]).sum(), columns[2].sum(), alpha=0.1)

    yield "orpo", Case(orpo, free, 2, extremes=(-1e4, 0.0))
    terry = partial(bradley_terry, center_coefficient=0.3)
    yield "bradley_terry", Case(terry, [*draw(2, 11), draw(11, seed=4).abs()], 2)


def cases() -> dict[str, Case]:
    logp, old, ref, mask = tokens(23, 3, seed=30)
    weights = SimpleNamespace(beta=0.1, desirable_weight=1.2, undesirable_weight=0.3)
    label = torch.where(draw(23, seed=7) < 0, UNLABELLED, (draw(23, seed=8) > 0).long())

    def value(cfg: SimpleNamespace, value: Tensor, old: Tensor, target: Tensor) -> LossOut:
        mb = SimpleNamespace(extra={"old_value": wide(old), "target": wide(target)})
        total, metrics = ppo.value_loss(cfg, value, mb)
        counted = {name: (x.detach(), torch.tensor(n)) for name, (x, n) in metrics.items()}
        return LossOut({"value": Term(1.0, total, torch.tensor(len(value)))}, counted)

    def labelled(logp: Tensor, ref: Tensor, label: Tensor) -> LossOut:
        return of_tokens(*kto.sequence_losses(weights, wide(logp), wide(ref), label, torch.tensor(0.25)))

    made = {
        "sft": Case(lambda logp: of_tokens(sft.token_losses(wide(logp), "nll")), [logp]),
        "dft": Case(
            lambda logp: of_tokens(sft.token_losses(wide(logp), "dft")), [logp], smooth=False, extremes=(-1e4, 0.0)
        ),  # weighted by sg[p]
        "kto": Case(labelled, [logp, ref, mask]),
        "value": Case(partial(value, SimpleNamespace(cliprange_value=0.2)), [logp, old, ref]),
        "value without a clip": Case(partial(value, SimpleNamespace(cliprange_value=None)), [logp, old, ref]),
        "steps": Case(stepwise_loss, [2 * draw(23, 2), label], mask=True),
    }
    for name, estimator in KL_ESTIMATORS.items():
        for weighted in (True, False):
            loss = partial(token_kl, estimator=estimator, ratio_weighted=weighted)
            smooth = not weighted or name != "k2"  # sg[ratio] k2
            run = lambda *x, loss=loss: of_tokens(loss(*map(wide, x)))  # noqa: E731
            made[f"kl {name} {weighted}"] = Case(run, [logp, old, ref], smooth=smooth)
    return made | dict(pair_cases())


CASES = cases()


def total(out: LossOut) -> Tensor:
    return torch.stack([term.weight * term.sum for term in out.terms.values()]).sum()


def gradients(case: Case, columns: list[Tensor], value: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, columns[: case.trained], materialize_grads=True)


def numbers(out: LossOut) -> dict[str, tuple[float, float]]:
    """Sum and count of every term and metric."""
    terms = {name: (term.sum.item(), term.count.item()) for name, term in out.terms.items()}
    assert not any(value.requires_grad for value, _ in out.metrics.values())
    return terms | {name: (value.item(), count.item()) for name, (value, count) in out.metrics.items()}


def test_gradient_is_that_of_finite_differences():
    for name, case in CASES.items():
        if case.smooth:
            columns = case.leaves()
            trained, rest = columns[: case.trained], columns[case.trained :]
            run = lambda *x, case=case, rest=rest: total(case.run(*x, *rest))  # noqa: E731
            assert torch.autograd.gradcheck(run, tuple(trained), fast_mode=True), name


@pytest.mark.parametrize("cuts", [(1, 9), (4, 4, 7)], ids=str)
def test_pieces_cut_anywhere_sum_to_the_whole(cuts):
    for name, case in CASES.items():
        columns = case.leaves()
        whole, edges = case.run(*columns), [0, *cuts, len(columns[0])]
        parts = [case.run(*(x[a:b] for x in columns)) for a, b in zip(edges, edges[1:], strict=False)]
        for key, (value, count) in numbers(whole).items():
            found = [numbers(part)[key] for part in parts]
            assert sum(x for x, _ in found) == pytest.approx(value, rel=1e-12, abs=1e-12), (name, key)
            assert sum(x for _, x in found) == pytest.approx(count, rel=1e-12), (name, key)
        ours = gradients(case, columns, sum(total(part) for part in parts))
        for got, want in zip(ours, gradients(case, columns, total(whole)), strict=True):
            torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-12, msg=name)


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_rows_that_do_not_count_may_hold_anything(poison):
    for name, case in CASES.items():
        if not case.mask:
            continue
        clean, dirty = case.leaves(), case.leaves()
        for x in dirty:
            if x.is_floating_point():
                x.data[~case.kept] = poison
        want, got = case.run(*clean), case.run(*dirty)
        assert numbers(got) == numbers(want), name
        for one, other in zip(*(gradients(case, x, total(y)) for x, y in ((clean, want), (dirty, got))), strict=True):
            assert torch.equal(one, other) and (one[~case.kept] == 0).all(), name


def test_low_precision_is_computed_in_float32():
    for name, case in CASES.items():
        rounded = case._replace(columns=[x.bfloat16() if x.is_floating_point() else x for x in case.columns])
        outs = [case.run(*rounded.leaves(dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
        assert {term.sum.dtype for term in outs[0].terms.values()} == {torch.float32}, name
        low, single, double = (numbers(out) for out in outs)
        for key in double:
            assert low[key] == pytest.approx(single[key], rel=1e-6), (name, key)
            assert single[key] == pytest.approx(double[key], rel=1e-4, abs=1e-5), (name, key)


def test_extremes_stay_finite():
    for name, case in CASES.items():
        for value in case.extremes:
            for which in range(case.trained + 1):  # one column, or all of them
                columns = case.leaves(dtype=torch.float32)
                for n, x in enumerate(columns[: case.trained]):
                    if which in (n, case.trained):
                        x.data.fill_(value) if x.dim() == 1 else x.data[:, 0].fill_(value)
                out = case.run(*columns)
                assert all(map(math.isfinite, sum(numbers(out).values(), ()))), (name, value)
                assert all(x.isfinite().all() for x in gradients(case, columns, total(out))), (name, value)


def test_nothing_is_a_differentiable_zero():
    for name, case in CASES.items():
        columns = case.leaves(rows=slice(0))
        found = [columns]
        if case.mask:
            found.append(case.leaves())
            found[-1][-1].fill_(False if found[-1][-1].dtype == torch.bool else UNLABELLED)
        for columns in found:
            out = case.run(*columns)
            assert set(sum(numbers(out).values(), ())) == {0}, name
            assert not any(x.any() for x in gradients(case, columns, total(out))), name
