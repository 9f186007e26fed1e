"""A step on two ranks has the gradient and metrics of one rank. Ranks are threads that meet to sum."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.entropy import entropy_threshold
from losses.policy import POLICY_LOSSES
from tests.trainer.rl.group_cases import (
    ADVANTAGE,
    by_hand,
    close,
    gradient,
    iterations,
    make_completions,
    make_config,
    make_llama,
    make_policy,
    moved_llama,
    prepare,
    step,
)
from trainer.methods.grpo import backward
from trainer.metrics import metrics
from trainer.parallel import quantile
from trainer.parallel.quantile import tolerance_of, top_threshold
from trainer.rl import lookahead, minibatch, step_metrics

TOGETHER = {
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_cap": 1.5,
    "geometric_min": 0.85,
    "off_policy_mask_threshold": 0.1,
}
FIRST = range(4)  # the first group; the other rank has the other two


class Meeting:
    """Collectives of two threads: each contributes a tensor and gets both, or their sum."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.tensors: dict[str, Tensor] = {}

    def all_gather(self, x: Tensor, name: str = "") -> list[Tensor]:
        self.tensors[threading.current_thread().name] = x
        self.barrier.wait()
        both = [self.tensors[name] for name in sorted(self.tensors)]
        self.barrier.wait()  # both threads have read before the next call
        return both

    def all_sum(self, x: Tensor, name: str = "") -> Tensor:
        a, b = self.all_gather(x)
        assert a.shape == b.shape, (a.shape, b.shape)
        return a + b


def on_two_ranks(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> list[Any]:
    meeting, results, errors = Meeting(), [None, None], []
    for module in (minibatch, lookahead, step_metrics, metrics):
        monkeypatch.setattr(module, "all_sum", meeting.all_sum)
    monkeypatch.setattr(quantile, "all_gather", meeting.all_gather)

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # reraised in the test's thread
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def step_on_two_ranks(
    monkeypatch: pytest.MonkeyPatch, cfg: Any, advantage: Tensor, shares: Sequence[Sequence[int]]
) -> list[tuple[Tensor, dict[str, float]]]:
    """Return gradient and metrics of each rank."""
    completions = make_completions()
    models = [[copy.deepcopy(model) for model in (make_llama(0), moved_llama())] for _ in range(2)]

    def work(rank: int) -> tuple[Tensor, dict[str, float]]:
        policy, rows = make_policy(models[rank][0]), list(shares[rank])
        policy.reference = copy.deepcopy(policy.reference)
        batch = prepare(cfg, policy, [completions[row] for row in rows], advantage[rows])
        if cfg.num_iterations > 1:
            policy.model = models[rank][1].train()
        sums = backward(cfg, policy, replace(batch, is_first=cfg.num_iterations == 1))
        return gradient(policy.model), sums.means()

    for model in models[0] + models[1]:
        model.zero_grad(set_to_none=True)
    return on_two_ranks(monkeypatch, work)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_two_ranks_have_the_gradient_of_one(monkeypatch, kind):
    """With all options that count over a step: quantile, bonus, KL, filters. bnpo averages over both micro-batches."""
    cfg = make_config(
        num_iterations=iterations(kind), loss_type=kind, beta=0.1, entropy_coef=0.05, top_entropy_quantile=0.7,
        correction=TOGETHER,
    )  # fmt: skip
    shares = [FIRST, range(len(FIRST), len(ADVANTAGE))]
    want, loss = by_hand(cfg, [FIRST, range(len(FIRST), 10)])
    (got, logged), (other, logged_too) = step_on_two_ranks(monkeypatch, cfg, ADVANTAGE, shares)
    assert close(got + other, want)
    assert logged == logged_too and logged["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    monkeypatch.undo()
    alone = step(cfg)[1]
    assert alone.keys() == logged.keys()
    for name in alone.keys() - ({"loss/total", "loss/policy", "loss/kl"} if kind == "bnpo" else set()):
        assert logged[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-7), name


def test_a_rank_without_signal_has_the_same_metrics_and_zero_gradients(monkeypatch):
    """It joins every collective, and its skipped completions still count."""
    advantage = ADVANTAGE.clone()
    advantage[len(FIRST) :] = 0
    cfg = make_config(correction={"vllm_importance_sampling_cap": 1.5})
    (got, logged), (other, logged_too) = step_on_two_ranks(
        monkeypatch, cfg, advantage, [FIRST, range(4, len(ADVANTAGE))]
    )
    assert close(got, by_hand(cfg, advantage=advantage)[0]) and not other.any()
    assert logged == logged_too and logged["policy/skipped_frac"] == pytest.approx(6 / 10)


def test_a_rank_without_completions_joins_the_entropy_quantile(monkeypatch):
    cfg = make_config(top_entropy_quantile=0.6)
    (got, _), (other, _) = step_on_two_ranks(monkeypatch, cfg, ADVANTAGE, [range(len(ADVANTAGE)), ()])
    assert close(got, by_hand(cfg)[0]) and not other.any()


# Quantiles.


def test_the_tolerance_lowers_the_threshold_in_proportion():
    x = torch.tensor([0.5, 2.0, 2.0 + 2e-7, 2.0 - 2e-7, 3.0])
    exact, lowered = (top_threshold(x, top=0.5, tolerance=tolerance) for tolerance in (0.0, 1e-4))
    assert lowered.item() == pytest.approx(exact.item() * (1 - 1e-4), rel=1e-6)
    assert (x >= exact).sum() < 4 and (x >= lowered).tolist() == [False, True, True, True, True]
    assert top_threshold(torch.zeros(0), top=0.5, tolerance=1e-4) == -torch.inf
    assert [tolerance_of(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)] == [1e-4, 1e-4, 2**-7]


def test_two_ranks_keep_or_drop_all_copies_of_a_token(monkeypatch):
    """Copies on both ranks are within rounding of the global quantile."""
    parts = [torch.tensor([1.0, 2.0, 2.0 + 2e-7]), torch.tensor([2.0 - 2e-7, 2.0, 3.0, 0.1])]
    found = on_two_ranks(monkeypatch, lambda rank: top_threshold(parts[rank], top=0.5, tolerance=1e-4))
    assert found[0] == found[1]
    kept = [(part >= threshold).tolist() for part, threshold in zip(parts, found, strict=True)]
    assert kept == [[False, True, True], [True, True, True, False]]


def test_two_ranks_find_the_global_threshold(monkeypatch):
    x = torch.rand(501, generator=torch.Generator().manual_seed(0))
    parts = [x[:37], x[37:]]
    found = on_two_ranks(monkeypatch, lambda rank: [top_threshold(parts[rank], top=top) for top in (0.2, 0.7)])
    assert found[0] == found[1] == [entropy_threshold(x, top=top) for top in (0.2, 0.7)]
    nothing = on_two_ranks(monkeypatch, lambda rank: top_threshold(torch.zeros(0), top=0.2))
    assert nothing == [-torch.inf, -torch.inf]
