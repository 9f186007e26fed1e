"""Gatherer: the dtype of the gather, and when gradients are summed (tests/test_ranks.py checks the sums)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.parallel import dtensor
from trainer.parallel.dtensor import Gatherer, is_dtensor, local


@pytest.fixture
def weight() -> Iterator[nn.Parameter]:
    """A float32 weight, sharded over one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        yield nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def sums(monkeypatch) -> list[torch.dtype]:
    """Record the dtypes of gradients that are summed over ranks."""
    dtypes: list[torch.dtype] = []
    scatter_sum = dtensor.scatter_sum

    def record(full, like):
        dtypes.append(full.dtype)
        return scatter_sum(full, like)

    monkeypatch.setattr(dtensor, "scatter_sum", record)
    return dtypes


def test_weight_is_cast_before_the_gather_and_its_gradient_summed_in_float32(weight, sums):
    gather, x = Gatherer(torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16)
    full = gather(weight)
    assert full.dtype == torch.bfloat16 and not is_dtensor(full)
    assert torch.equal(full, local(weight).detach().bfloat16())
    for count in (1, 2):
        (x @ gather(weight).T).sum().backward()
        assert sums == count * [torch.float32]
    assert is_dtensor(weight.grad) and weight.grad.dtype == torch.float32
    assert torch.allclose(local(weight.grad), 2 * x.float().sum(0).expand(6, 4), rtol=1e-2)
    with torch.no_grad():
        assert not gather(weight).requires_grad


def test_reduce_once_sums_after_the_last_micro_batch(weight, sums):
    once, each = Gatherer(reduce_once=True), Gatherer()
    rows = torch.randn(3, 2, 4)
    for row in rows:
        (row @ each(weight).T).square().sum().backward()
    want, weight.grad = weight.grad, None
    sums.clear()
    for row in rows:
        (row @ once(weight).T).square().sum().backward()
    assert sums == [] and weight.grad is None
    once.end(weight)
    assert sums == [torch.float32] and torch.equal(local(weight.grad), local(want))
    once.end(weight)  # no gradient left
    assert sums == [torch.float32]
    (rows[0] @ once(weight).T).sum().backward()
    once.end(weight)  # added to an existing gradient, as with a tied embedding
    assert torch.allclose(local(weight.grad), local(want) + rows[0].sum(0))


def test_plain_weight_is_returned_unchanged():
    weight = nn.Parameter(torch.randn(2, 2))
    assert Gatherer(torch.bfloat16)(weight) is weight
