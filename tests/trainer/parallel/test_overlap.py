"""Gradients summed during the backward pass: which buckets, when, in which order (tests/test_ranks.py: the sums)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer.parallel import overlap
from trainer.parallel.overlap import Overlap


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What happens, in order. Sums are those of two ranks with the same gradients."""
    events: list[str] = []

    def begin_sum(flat: Tensor, name: str) -> Callable[[], None]:
        assert name == "gradients"
        number = sum(event.startswith("launch") for event in events)
        events.append(f"launch {number}")

        def wait() -> None:
            events.append(f"wait {number}")
            flat.mul_(2)

        return wait

    monkeypatch.setattr(overlap, "begin_sum", begin_sum)
    monkeypatch.setattr(overlap, "BUCKET", 1)  # a parameter each
    return events


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))


def test_a_bucket_is_launched_when_the_backward_pass_has_completed_it(log):
    net = model()
    made = Overlap(net)
    for number in range(4):
        net[number].weight.register_post_accumulate_grad_hook(lambda _, n=number: log.append(f"layer {n}"))
    want = model()
    for number, row in enumerate(made.passes(list(torch.randn(3, 2)))):
        log.append(f"row {number}")
        net(row).square().sum().backward()
        want(row).square().sum().backward()
    layers = ["layer 3", "layer 2", "layer 1", "layer 0"]
    early = [event for n, layer in enumerate(layers) for event in (f"launch {n}", layer)]
    assert log == ["row 0", *layers, "row 1", *layers, "row 2", *early]
    made.finish()
    assert log[-4:] == [f"wait {n}" for n in range(4)]
    for p, other in zip(net.parameters(), want.parameters(), strict=True):
        assert torch.equal(p.grad, 2 * other.grad)
    made.finish()  # nothing to do
    assert len(log) == 3 + 3 * 4 + 2 * 4


@pytest.mark.parametrize("skipped", ["the last", "all"])
def test_what_a_skipped_micro_batch_leaves_is_launched_at_the_end_in_the_same_order(log, skipped):
    net = model()
    made = Overlap(net)
    for number, row in enumerate(made.passes(list(torch.randn(2, 2)))):
        if number == 1 or skipped == "all":
            continue
        net(row).square().sum().backward()
    assert log == [f"launch {n}" for n in range(4)]
    made.finish()
    assert all((p.grad != 0).any() == (skipped == "the last") for p in net.parameters())


def test_an_unused_parameter_holds_back_those_behind_it_until_the_end(log):
    net = model()
    made = Overlap(net)
    used = nn.Sequential(net[0], net[1], net[3])
    for row in made.passes(list(torch.randn(1, 2))):
        used(row).square().sum().backward()
        assert log == ["launch 0"]
    assert log == [f"launch {n}" for n in range(4)]
    made.finish()
    assert (net[2].weight.grad == 0).all() and (net[1].weight.grad != 0).any()


def test_few_buckets_are_under_way_at_a_time(log, monkeypatch):
    monkeypatch.setattr(overlap, "UNDER_WAY", 2)
    net = model()
    made = Overlap(net)
    for row in made.passes(list(torch.randn(1, 2))):
        net(row).square().sum().backward()
    assert log == ["launch 0", "launch 1", "launch 2", "wait 0", "launch 3", "wait 1"]


def test_a_gradient_that_changes_after_its_sum_is_an_error(log):
    net = model()
    made = Overlap(net)
    for row in made.passes(list(torch.randn(1, 2))):
        net(row).square().sum().backward()
    with pytest.raises(AssertionError, match=r"the gradient of a \(2, 2\) parameter has changed after it was summed"):
        net(row).square().sum().backward()
    made.finish()
    net(row).square().sum().backward()  # of the next step


def test_buckets_are_of_one_dtype_and_bounded(monkeypatch):
    monkeypatch.setattr(overlap, "BUCKET", 100)
    sizes = [(10, "float32"), (10, "float32"), (10, "float32"), (40, "float32"), (10, "bfloat16"), (1, "float32")]
    made = [nn.Parameter(torch.zeros(size, dtype=getattr(torch, dtype))) for size, dtype in sizes]
    assert [[len(p) for p in some] for some in overlap.buckets(made)] == [[10, 10], [10], [40], [10], [1]]
