"""Replicate or shard (FSDP2) a model over several ranks.

    policy = parallelize(cfg.parallel, load_policy(...))             # before the optimizer is built
    micro_batches = to_device_and_pad(policy, micro_batches)         # the same number on every rank
    for mb in final_passes(policy, micro_batches): ...               # forward and backward; the last loop of the step
    sum_gradients(policy.model)                                      # after it

load_policy leaves the weights in their files, and each rank reads its shards here. `replicate`: every rank has the full
model, and gradients are summed during the last backward pass of a step (overlap.py), or after it if the loop does not
use final_passes. `fsdp`: each block is gathered for its forward and backward pass, and its gradients are
reduce-scattered. The log-prob kernels use the output head outside of any module's forward, so it is gathered explicitly
(dtensor.Gatherer).

Gradients are summed, never averaged: losses are divided by counts over all ranks (losses/types.py). All ranks must run
the same number of forward passes or a gather deadlocks, so ranks with fewer micro-batches append empty micro-batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from data.errors import UserError
from data.packing import Batch, empty_batch
from kernels.fp8 import is_fp8
from kernels.nf4 import is_4bit
from trainer.config.blocks import ParallelConfig
from trainer.files.tensor_files import TensorFiles
from trainer.parallel.comm import all_max, all_sum, context_size, is_main, of_all, passing, world_size
from trainer.parallel.dtensor import Gatherer, gather, is_dtensor, local, reshard
from trainer.parallel.overlap import Overlap, buckets, flat_gradients, write_gradients
from trainer.parallel.watch import log
from trainer.policy.load import blocks_of, fill, to_meta
from trainer.policy.logps import Policy, causal_lm, check_logps

T = TypeVar("T", bound=Any)
SMALL = 16 * 50_000_000  # maximum bytes of weights, gradients and moments for a replica on a CPU rank
ROOM = 0.4  # the same limit for a GPU, as a fraction of its memory
OVERLAPS: WeakKeyDictionary[nn.Module, Overlap] = WeakKeyDictionary()  # for replicated models


def parallelize(cfg: ParallelConfig, policy: Policy) -> Policy:
    """Replicate or shard the policy over all ranks; with one rank, return it unchanged."""
    if world_size() == 1:
        return policy
    assert context_size() == cfg.context, (context_size(), cfg.context)  # process_group got it from the same config
    mode = pick_mode(cfg, policy)
    models = [causal_lm(model) for model in (policy.model, policy.reference) if model is not None]
    files, policy.files = policy.files, None
    # Offloaded shards are created in main memory; reading shards from files would put them on the device.
    reads_shards = files is not None and mode == "fsdp" and not cfg.cpu_offload
    for model in models if files is not None else []:
        to_meta(model, files)
        if not reads_shards:
            fill(model, files, policy.device)
    if reads_shards:
        check_same_files(files)
    else:
        check_same_weights(policy.model)
    if mode == "fsdp":
        check_shardable(policy)
        mesh = make_mesh(cfg, policy.device)
        for model in models:
            shard_model(model, mesh, cfg, policy)
            if reads_shards:
                fill(model, files, policy.device)
        policy.is_sharded, policy.reshard_after_forward = True, cfg.reshard_after_forward
        policy.reduce_once = cfg.reduce_once
    elif cfg.context == 1:  # with context parallelism the backward pass contains other collectives
        OVERLAPS[policy.model] = Overlap(policy.model)
    if files is not None:  # load_policy had no weights to check
        with gathered_head(policy):
            check_logps(policy)
    return policy


def check_shardable(policy: Policy) -> None:
    """Raise if the adapter is more than two factors; a scorer's fully trained head can be sharded."""
    config = policy.model.peft_config["default"] if policy.is_lora else None
    if config is None or config.task_type != "CAUSAL_LM":
        return
    for flag, value in (("dora", config.use_dora), ("modules_to_save", config.modules_to_save)):
        if value:
            shown = value if isinstance(value, bool) else " ".join(value)
            raise UserError(
                f"lora.{flag}={shown} is not supported with parallel.mode=fsdp; use --parallel.mode replicate"
            )


def pick_mode(cfg: ParallelConfig, policy: Policy) -> str:
    mode, reason = cfg.mode, ""
    if is_4bit(policy.model):
        assert mode != "fsdp" and cfg.shard is None, "check_4bit() rejects this"
        mode, reason = "replicate", " (4-bit weights are not sharded)"
    elif is_fp8(policy.model):
        assert mode != "fsdp" and cfg.shard is None, "check_fp8() rejects this"
        mode, reason = "replicate", " (FP8 weights are not sharded)"
    elif cfg.must_shard:
        mode = "fsdp"
    elif mode == "auto":
        # Weights, gradients and two moments, all of one dtype; 8-bit moments take less.
        trained = 4 * sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() * p.element_size() for p in policy.model.parameters() if not p.requires_grad)
        if policy.reference is not None:
            frozen += sum(p.numel() * p.element_size() for p in policy.reference.parameters())
        needed, room = trained + frozen, room_for_a_copy(policy.device)
        mode = "replicate" if needed <= room else "fsdp"
        reason = f" (a replica needs {needed / 2**30:.2f} GiB, limit {room / 2**30:.2f} GiB)"
    if is_main():
        sharing = f", {cfg.context} ranks per micro-batch" if cfg.context > 1 else ""
        log(f"parallel: {mode} over {world_size()} ranks{sharing}{reason}")
    return mode


def room_for_a_copy(device: torch.device) -> float:
    """Return the maximum bytes of weights, gradients and moments for which auto replicates."""
    return ROOM * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else SMALL


def check_same_weights(model: nn.Module) -> None:
    """Raise unless all ranks have loaded the same weights."""
    checksum = torch.stack([p.detach().double().sum().cpu() for p in model.parameters()]).sum()
    device = next(model.parameters()).device
    mean = all_sum(checksum.to(device), "check of weights", everyone=True).cpu() / world_size()
    if not torch.isclose(checksum, mean, rtol=1e-12, atol=0):
        raise UserError("model: ranks loaded different weights; give every rank the same files")


def check_same_files(files: TensorFiles) -> None:
    """Raise unless all ranks have files with the same tensors and sizes."""
    specs = {name: [list(record.shape), str(record.dtype)] for name, record in files.records.items()}
    sizes = {part.file: (files.folder / part.file).stat().st_size for r in files.records.values() for part in r.parts}
    digest = hashlib.sha256(json.dumps([specs, sizes], sort_keys=True).encode()).hexdigest()
    if len(set(of_all(digest, "check of files"))) > 1:
        raise UserError("model: ranks have different files; give every rank the same files")


@contextlib.contextmanager
def gathered_head(policy: Policy) -> Iterator[None]:
    """Context manager: gather the output head on every rank for transformers' forward; FSDP gathers only blocks."""
    if not policy.is_sharded:
        yield
        return
    reshard(policy.model)
    head = causal_lm(policy.model).get_output_embeddings()
    shard = head.weight
    rounded = shard.detach().to(policy.autocast_dtype or shard.dtype)  # as autocast would, after the gather
    head.weight = nn.Parameter(gather(rounded), requires_grad=False)
    try:
        yield
    finally:
        head.weight = shard
        reshard(policy.model)


def make_mesh(cfg: ParallelConfig, device: torch.device) -> Any:
    """Return a mesh that shards over all ranks, or over groups of ranks with a replica each (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh

    world, shard = world_size(), cfg.shard or world_size()
    if shard == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // shard, shard), mesh_dim_names=("copy", "shard"))


def shard_model(lm: Any, mesh: Any, cfg: ParallelConfig, policy: Policy) -> None:
    """Shard the blocks, then the remaining trunk, then the head."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    precision = MixedPrecisionPolicy(param_dtype=policy.autocast_dtype, reduce_dtype=torch.float32)
    options = {
        "mesh": mesh,
        "mp_policy": precision if policy.autocast_dtype else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if cfg.cpu_offload else OffloadPolicy(),
    }
    head = lm.get_output_embeddings()
    tied = head is not None and head.weight is lm.get_input_embeddings().weight
    blocks = blocks_of(lm, policy.source)
    for block in blocks:
        fully_shard(block, reshard_after_forward=cfg.reshard_after_forward, **options)
        for module in block.modules():
            module._is_fsdp_managed_module = False  # torch.compile would treat its integers (head size) as unknown
    fully_shard(lm.base_model, **options)
    for module in lm.base_model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for block, following in zip(blocks, list(blocks)[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
    if tied:
        head.weight = lm.get_input_embeddings().weight  # fully_shard replaced it
    elif head is not None:
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        sharded = distribute_tensor(head.weight.detach(), mesh, placements)
        sharded = sharded.cpu() if cfg.cpu_offload else sharded
        head.weight = nn.Parameter(sharded, requires_grad=head.weight.requires_grad)
    if head is not None:
        head.gather = Gatherer(policy.autocast_dtype, reduce_once=cfg.reduce_once)


@contextlib.contextmanager
def gathered_weights(policy: Policy) -> Iterator[None]:
    """Context manager: gather all weights on every rank (a collective), so that ranks can run independent passes."""
    if not policy.is_sharded:
        yield
        return
    lm = causal_lm(policy.model)
    blocks = list(blocks_of(lm, policy.source))
    head = lm.get_output_embeddings()
    shard = head.weight
    for module in (lm.base_model, *blocks):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    head.weight = nn.Parameter(gather(shard.detach()), requires_grad=False)
    try:
        yield
    finally:
        head.weight = shard
        for module in (lm.base_model, *blocks):
            module.reshard()
        for block in blocks:
            block.set_reshard_after_forward(policy.reshard_after_forward, recurse=False)


def to_device_and_pad(policy: Policy, batches: Sequence[Batch]) -> list[Batch]:
    """Move micro-batches to the device, and pad to the same number on all ranks, at least one."""
    return pad_to_equal_count(policy, [batch.to(policy.device) for batch in batches], empty_batch(policy.row_multiple))


def pad_to_equal_count(policy: Policy, micro_batches: list[T], empty: T) -> list[T]:
    """Append `empty` until all ranks have the same number of micro-batches, at least one."""
    if world_size() == 1:
        return micro_batches
    count = int(all_max(torch.tensor(max(1, len(micro_batches)), device=policy.device), "number of micro-batches"))
    micro_batches = micro_batches + [empty.to(policy.device) for _ in range(count - len(micro_batches))]
    return Passes(policy, micro_batches) if policy.is_sharded else micro_batches


class Passes(list[T]):
    """Micro-batches of a sharded model; iteration reports each pass to the hang detection (comm.passing)."""

    def __init__(self, policy: Policy, micro_batches: Iterable[T]) -> None:
        super().__init__(micro_batches)
        self.policy = policy

    def __iter__(self) -> Iterator[T]:
        trunk = causal_lm(self.policy.model).base_model
        # Reduce gradients, or only sum their shards over copies, once, in the last backward pass.
        reduces = trunk.set_requires_gradient_sync if self.policy.reduce_once else trunk.set_requires_all_reduce
        for i, micro_batch in enumerate(super().__iter__(), start=1):
            reduces(i == len(self))
            with passing(f"forward and backward of micro-batch {i} of {len(self)}"):
                yield micro_batch


def final_passes(policy: Policy, micro_batches: Sequence[T]) -> Iterable[T]:
    """Return the micro-batches for the last loop of a step; replicas sum gradients during its last backward pass."""
    overlap = OVERLAPS.get(policy.model)
    return micro_batches if overlap is None else overlap.passes(micro_batches)


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over ranks, except gradients that FSDP has already reduced."""
    if world_size() == 1:
        return
    for module in model.modules():
        if isinstance(getattr(module, "gather", None), Gatherer):
            module.gather.end(module.weight)
    overlap = OVERLAPS.get(model)
    if overlap is not None and overlap.launched:
        overlap.finish()
        return
    for bucket in buckets(p for p in model.parameters() if p.requires_grad and not is_dtensor(p)):
        write_gradients(bucket, all_sum(flat_gradients(bucket), "gradients", everyone=True))


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:  # ()
    """Return the global gradient norm in float32 or wider, equal on every rank, without a host sync."""
    grads = [p.grad for p in parameters if p.grad is not None]
    sharded = [g for g in grads if is_dtensor(g)]
    plain = [g for g in grads if not is_dtensor(g)]
    if not sharded:
        return norm_of(plain, torch.float32)
    copies = world_size() // sharded[0].device_mesh.size(-1)
    squares = norm_of([local(g) for g in sharded], torch.float64).square() / copies
    total = all_sum(squares, "gradient norm", everyone=True)
    if plain:
        total = total + norm_of(plain, torch.float64).square()
    return total.sqrt()


def norm_of(tensors: Sequence[torch.Tensor], min_dtype: torch.dtype) -> torch.Tensor:  # ()
    """Return the joint norm of all tensors, in `min_dtype` or wider: torch would round bfloat16 norms to bfloat16."""
    norms: list[torch.Tensor] = []
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        same = [x for x in tensors if x.dtype == dtype]
        norms += torch._foreach_norm(same, 2, dtype=torch.promote_types(dtype, min_dtype))  # few launches on a GPU
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize, default=min_dtype)
    return torch.stack([norm.to(widest) for norm in norms]).norm() if norms else torch.zeros((), dtype=min_dtype)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Clip gradients of global norm `norm` to the norm `limit`."""
    scale = limit / (norm + 1e-6)
    if scale < 1.0:
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        for dtype in dict.fromkeys(g.dtype for g in grads):
            torch._foreach_mul_([g for g in grads if g.dtype == dtype], scale)
