"""Count the collectives of an optimizer step vs. bench/scaling/collectives.py. Run by tests/test_scaling.py.

    torchrun --nproc-per-node 2 -m tests.ranks.traffic fsdp:sft replicate/2:dpo      # MODE[/CONTEXT]:CASE
    python -m tests.ranks.traffic 1024 eights:sft       # rank 0 of 1,024, with torch's fake group: no data moves

Rank 0 prints one JSON line per case: counted and modelled calls, each as [kind, bytes, ranks, number].
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from bench.scaling.collectives import Layout, RowPass, Step, bookkeeping, calls, model_of, sync_calls
from tests.ranks import slices, worker
from tests.ranks.grid import in_float32
from tests.ranks.sampled import group_case
from trainer.config.blocks import ParallelConfig
from trainer.config.policy import PolicyLossConfig
from trainer.parallel import comm
from trainer.parallel.context import BatchSlice
from trainer.parallel.watch import Watch
from trainer.policy import sharding
from trainer.policy.load import blocks_of
from trainer.policy.logps import causal_lm
from trainer.policy.optim import launch_step
from trainer.policy.sharding import parallelize
from trainer.policy.weights import PolicyWeights

KINDS = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "broadcast_": "broadcast", "allgather_": "all_gather",
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
}  # fmt: skip
SILENT = {"wait_tensor", "_wrap_tensor_autograd"}
HAND_OVER = ("groups of the step", "tokens of the step")  # tests/trainer/rl/test_rank0_rollout.py counts their bytes
KL = PolicyLossConfig(beta=0.1)
MODES = worker.MODES | {"eights": {"mode": "fsdp", "shard": 8}}
CASES = worker.CASES | slices.CASES | {
    "grpo": lambda: group_case("grpo", policy_loss=KL),
    "grpo-lora": lambda: group_case("grpo", policy_loss=KL, lora=True),
    "sft-bf16": lambda: in_bfloat16(worker.sft_case(tied=False)),
    "dpo-bf16": lambda: in_bfloat16(worker.dpo_case()),
    "sft-all": lambda: worker.sft_case(tied=False)._replace(deal=worker.all_of_them),  # all rows on every rank
}  # fmt: skip


def in_bfloat16(case: worker.Case) -> worker.Case:
    """float32 weights, bfloat16 compute."""
    return case._replace(policy=lambda: replace(in_float32(case), compute_dtype=torch.bfloat16))


class Traffic(TorchDispatchMode):
    """Records every collective: kind, bytes of the full tensor, ranks, and the name that comm.py gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self.record(KINDS[name], args)
        return func(*args, **(kwargs or {}))

    def record(self, kind: str, args: Any) -> None:
        from torch.distributed import ProcessGroup
        from torch.distributed.distributed_c10d import _resolve_process_group

        boxed = [x for x in args if isinstance(x, torch.ScriptObject)]
        ranks = (ProcessGroup.unbox(boxed[0]) if boxed else _resolve_process_group(args[-1])).size()
        flat = torch.utils._pytree.tree_leaves(args)
        sizes = [x.nbytes for x in flat if isinstance(x, Tensor)]
        # A gather names its result, a list of results, or only its input.
        whole = max(sizes) if len(sizes) == 2 or kind != "all_gather" else min(sizes) * ranks
        self.calls.append((kind, whole, ranks, comm._watch.activity.name))


@contextlib.contextmanager
def row_passes() -> Iterator[list[RowPass]]:
    """Context manager: the passes of ranks that share rows, in order."""
    seen: list[RowPass] = []
    gather = BatchSlice.gather

    def record(self: BatchSlice, *values: Tensor | None) -> Any:
        if self.tokens is not None:
            rows = self.batch.input_ids.shape[0]
            numbers = sum(self.num_tokens for x in values if x is not None)
            seen.append(RowPass(rows * self.num_keys, numbers, torch.is_grad_enabled()))
        return gather(self, *values)

    BatchSlice.gather = record
    try:
        yield seen
    finally:
        BatchSlice.gather = gather


def count(name: str, mode: str, context: int) -> dict[str, Any]:
    """Count the second step, after one-time collectives."""
    case, method = CASES[name](), name.partition("-")[0]
    passes: list[bool] = []
    with worker.sharing_rows(context), row_passes() as shared:
        policy = case.policy()
        model = model_of(causal_lm(policy.model), list(blocks_of(causal_lm(policy.model), "test")))
        cfg = ParallelConfig(**MODES[mode], context=context) if comm.world_size() > 1 else ParallelConfig()
        policy = parallelize(cfg, policy)
        embedding = causal_lm(policy.model).get_input_embeddings()
        embedding.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        optimizer = SGD([p for p in policy.model.parameters() if p.requires_grad], lr=0.0)
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        for _ in range(2):
            passes.clear(), shared.clear(), optimizer.zero_grad()
            with Traffic() as traffic:
                case.step(policy, case.deal(case.rows))
                launch_step(policy.model, optimizer, schedule, 1.0, "step").wait()
        with Traffic() as sync:
            for _ in PolicyWeights(policy, policy.compute_dtype).tensors():
                pass
    layout = Layout(comm.world_size(), layout_shards(cfg), cfg.reduce_once, context)
    widths = (2, 4, 4) if name.endswith("bf16") else (8, 8, 8)
    step = Step(sum(passes), int(method != "sft"), *widths, tuple(shared), name.endswith("recomputed"))
    small = bookkeeping(method, layout)
    counted = [call for call in traffic.calls if not call[3].startswith(HAND_OVER)]
    is_small = [call[3] in small and call[0] != "reduce_scatter" for call in counted]
    names = Counter(call[3] for call, yes in zip(counted, is_small, strict=True) if yes)
    largest = max((call[1] for call, yes in zip(counted, is_small, strict=True) if yes), default=0)
    return {
        "counted": table(Counter(call[:3] for call, yes in zip(counted, is_small, strict=True) if not yes)),
        "modelled": table(calls(model, layout, step)),
        "small": dict(names), "modelled_small": dict(small), "largest_small": largest,
        "sync": table(Counter(call[:3] for call in sync.calls)),
        "modelled_sync": table(sync_calls(model, layout, step.compute)),
    }  # fmt: skip


def layout_shards(cfg: ParallelConfig) -> int:
    return 1 if cfg.mode == "replicate" or comm.world_size() == 1 else cfg.shard or comm.world_size()


def table(found: Counter[Any]) -> list[list[Any]]:
    """Return [kind, bytes, ranks, number], without calls within one rank."""
    merged: Counter[Any] = Counter()
    for (kind, size, ranks, *_), number in found.items():
        merged[kind, size, ranks] += number * (ranks > 1)
    return sorted([*call, number] for call, number in merged.items() if number)


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Context manager: this process is rank 0 of many. Collectives are recorded, but no data moves."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    comm._watch = Watch(60.0, dist.HashStore(), on_cuda=False)  # names the collectives

    from_bytes = json.loads

    def loads(text: bytes | str) -> Any:  # the other ranks send zeros
        return from_bytes(text.strip(b"\0") or b"[]" if isinstance(text, bytes) else text)

    def exchange(parts: list[Any], name: str) -> list[Any]:
        return [parts[0], *[None] * (ranks - 1)]

    with (
        mock.patch.object(sharding, "check_same_weights"),
        mock.patch.object(json, "loads", loads),
        mock.patch.object(comm, "exchange", exchange),
    ):
        yield
    dist.destroy_process_group()


def main(words: list[str]) -> None:
    fake = int(words.pop(0)) if words[0].isdigit() else 0
    with fake_group(fake) if fake else comm.process_group(60.0):
        for word in words:
            where, _, name = word.partition(":")
            mode, _, context = where.partition("/")
            with worker.small_buckets():
                result = count(name, mode, int(context or 1))
            if comm.is_main():
                print(json.dumps({"case": word, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
