"""Gradient sums during the backward pass: buckets, timing and order (tests/test_ranks.py checks the sums)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer.parallel import overlap
from trainer.parallel.overlap import Overlap


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """Record events in order; sums are those of two ranks with the same gradients."""
    events: list[str] = []

    def begin_sum(flat: Tensor, name: str) -> Callable[[], None]:
        assert name == "gradients"
        index = sum(event.startswith("launch") for event in events)
        events.append(f"launch {index}")

        def wait() -> None:
            events.append(f"wait {index}")
            flat.mul_(2)

        return wait

    monkeypatch.setattr(overlap, "begin_sum", begin_sum)
    monkeypatch.setattr(overlap, "BUCKET", 1)  # one parameter per bucket
    return events


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))


def run(net: nn.Module, sums: Overlap) -> None:
    for x in sums.passes(list(torch.randn(1, 2))):
        net(x).square().sum().backward()


def test_bucket_is_launched_when_the_backward_pass_completes_it(log):
    net = model()
    sums = Overlap(net)
    for i in range(4):
        net[i].weight.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"layer {i}"))
    want = model()
    for i, x in enumerate(sums.passes(list(torch.randn(3, 2)))):
        log.append(f"pass {i}")
        net(x).square().sum().backward()
        want(x).square().sum().backward()
    layers = ["layer 3", "layer 2", "layer 1", "layer 0"]
    early = [event for i, layer in enumerate(layers) for event in (f"launch {i}", layer)]
    assert log == ["pass 0", *layers, "pass 1", *layers, "pass 2", *early]
    sums.finish()
    assert log[-4:] == [f"wait {i}" for i in range(4)]
    for p, other in zip(net.parameters(), want.parameters(), strict=True):
        assert torch.equal(p.grad, 2 * other.grad)
    sums.finish()  # no effect
    assert len(log) == 3 + 3 * 4 + 2 * 4


@pytest.mark.parametrize("skipped", ["the last", "all"])
def test_skipped_micro_batches_launch_their_buckets_at_the_end_in_order(log, skipped):
    net = model()
    sums = Overlap(net)
    for i, x in enumerate(sums.passes(list(torch.randn(2, 2)))):
        if i == 0 and skipped == "the last":
            net(x).square().sum().backward()
    assert log == [f"launch {i}" for i in range(4)]
    sums.finish()
    assert all((p.grad != 0).any() == (skipped == "the last") for p in net.parameters())


def test_unused_parameter_delays_later_buckets_until_the_end(log):
    net = model()
    sums = Overlap(net)
    used = nn.Sequential(net[0], net[1], net[3])
    for x in sums.passes(list(torch.randn(1, 2))):
        used(x).square().sum().backward()
        assert log == ["launch 0"]
    assert log == [f"launch {i}" for i in range(4)]
    sums.finish()
    assert (net[2].weight.grad == 0).all() and (net[1].weight.grad != 0).any()


def test_number_of_buckets_in_flight_is_limited(log, monkeypatch):
    monkeypatch.setattr(overlap, "MAX_IN_FLIGHT", 2)
    net = model()
    run(net, Overlap(net))
    assert log == ["launch 0", "launch 1", "launch 2", "wait 0", "launch 3", "wait 1"]


def test_gradient_that_changes_after_its_sum_is_an_error(log):
    net = model()
    sums = Overlap(net)
    run(net, sums)
    with pytest.raises(AssertionError, match=r"\(2, 2\)"):
        net(torch.randn(2)).square().sum().backward()
    sums.finish()
    net(torch.randn(2)).square().sum().backward()  # the next step


def test_buckets_have_one_dtype_and_a_maximum_size(monkeypatch):
    monkeypatch.setattr(overlap, "BUCKET", 100)
    sizes = [(10, "float32"), (10, "float32"), (10, "float32"), (40, "float32"), (10, "bfloat16"), (1, "float32")]
    parameters = [nn.Parameter(torch.zeros(size, dtype=getattr(torch, dtype))) for size, dtype in sizes]
    assert [[len(p) for p in bucket] for bucket in overlap.buckets(parameters)] == [[10, 10], [10], [40], [10], [1]]
