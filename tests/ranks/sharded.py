"""Checkpoints of a sharded model, saved by two ranks and read by any number; called by tests/ranks/main.py.

check_sharded asserts everything that needs two ranks. It leaves FOLDER/fsdp and FOLDER/copies, with the full tensors
that rank 0 gathered, for the tests of the parent process.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from tests.clip import clip_gradients
from tests.ranks.loading import check_loading
from tests.ranks.worker import MODES, PART, VOCAB, make_policy, one_process
from trainer.config.blocks import ParallelConfig
from trainer.files.tensor_files import TensorFiles
from trainer.parallel import comm
from trainer.parallel.comm import all_sum, is_main, of_all, rank, world_size
from trainer.parallel.dtensor import Gatherer, gather
from trainer.policy.logps import Policy
from trainer.policy.reference import MovingReference
from trainer.policy.sharding import parallelize, sum_gradients
from trainer.run import checkpoint as saving
from trainer.run.checkpoint import Saver, find_problem, list_checkpoints, load_checkpoint, save_checkpoint


def optimizer_of(policy: Policy) -> tuple[AdamW, LambdaLR]:
    optimizer = AdamW([p for p in policy.model.parameters() if p.requires_grad], lr=1e-2)
    return optimizer, LambdaLR(optimizer, lambda step: 1.0)


def take_step(policy: Policy, optimizer: AdamW, seed: int) -> float:
    """Step on the same rows on every rank, with the loss divided by the world size, because gradients are summed."""
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed)).to(policy.device)
    hidden = policy.model.model(input_ids=ids).last_hidden_state
    logits = hidden @ Gatherer()(policy.model.lm_head.weight).T
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / world_size()
    loss.backward()
    sum_gradients(policy.model)
    clip_gradients(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(all_sum(loss.detach(), "loss"))


def everything(policy: Policy, optimizer: AdamW) -> dict[str, Tensor]:
    """Gather all weights and moments on every rank."""
    found = {f"weights/{name}": gather(p.detach()).clone() for name, p in policy.model.named_parameters()}
    names = {p: name for name, p in policy.model.named_parameters()}
    for p, slots in optimizer.state.items():
        found |= {f"moments/{names[p]}.{key}": gather(value).clone() for key, value in slots.items()}
    return found


def trained(mode: str) -> tuple[Policy, AdamW, LambdaLR]:
    policy = parallelize(ParallelConfig(**MODES[mode]), make_policy(tied=False, part=PART if mode == "part" else ()))
    optimizer, schedule = optimizer_of(policy)
    for seed in (1, 2):
        take_step(policy, optimizer, seed)
    return policy, optimizer, schedule


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


def check_saving(folder: Path, mode: str) -> None:
    """The checkpoint contains the state at the start of the save, even if training continues."""
    policy, optimizer, schedule = trained(mode)
    before, saver = everything(policy, optimizer), Saver()
    target = save_checkpoint(folder / mode, 2, policy.model, optimizer, schedule, {}, keep=2, saver=saver)
    loss = take_step(policy, optimizer, 3)
    saver.wait()
    assert find_problem(target) is None
    shards = sorted(path.name for path in target.glob("shard-*"))
    assert len(shards) == (1 if mode == "copies" else 2), shards  # only the first replica writes
    assert not list(target.glob(".*"))
    if is_main():
        save_file(before | {"loss": torch.tensor(loss, dtype=torch.float64)}, folder / f"{mode}.safetensors")

    other, other_optimizer, other_schedule = trained(mode)
    counted = count_reads()
    load_checkpoint(target, other.model, other_optimizer, other_schedule)
    same(everything(other, other_optimizer), before)
    assert take_step(other, other_optimizer, 3) == loss
    total = sum(value.numel() * value.element_size() for value in before.values())
    assert counted[0] < (1.1 if mode == "copies" else 0.6) * total, (counted, total)


def count_reads() -> list[int]:
    """Count the bytes that this rank reads from files."""
    counted, block = [0], TensorFiles._block

    def counting(self: TensorFiles, *args: Any) -> Tensor:
        tensor = block(self, *args)
        counted[0] += tensor.numel() * tensor.element_size()
        return tensor

    TensorFiles._block = counting
    return counted


def check_old_files(folder: Path) -> None:
    """One process saves an unsharded checkpoint; two ranks load it sharded or replicated."""
    target = folder / f"alone-{rank()}"
    with one_process():
        alone = make_policy(tied=False)
        optimizer, schedule = optimizer_of(alone)
        take_step(alone, optimizer, 5)
        target = save_checkpoint(target, 1, alone.model, optimizer, schedule, {}, keep=1)
        expected = everything(alone, optimizer)
    assert (target / "model.safetensors").exists() and not list(target.glob("shard*"))
    for mode in ("fsdp", "replicate"):
        policy, optimizer, schedule = trained(mode)
        load_checkpoint(target, policy.model, optimizer, schedule)
        same(everything(policy, optimizer), expected)
    policy, optimizer, schedule = trained("replicate")
    load_checkpoint(folder / "fsdp" / "step-00000002", policy.model, optimizer, schedule)  # sharded to replicated
    assert not any(hasattr(p, "full_tensor") for p in policy.model.parameters())


def check_full_disk(folder: Path) -> None:
    """If one of two ranks cannot write, both raise and the previous checkpoint remains."""
    policy, optimizer, schedule = trained("fsdp")
    write, saver = saving.write_tensors, Saver()

    def fail(path: Path, *args: Any) -> Any:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    saving.write_tensors = fail if rank() == 1 else write
    save_checkpoint(folder / "fsdp", 4, policy.model, optimizer, schedule, {}, keep=1, saver=saver)
    try:
        save_checkpoint(folder / "fsdp", 6, policy.model, optimizer, schedule, {}, keep=1, saver=saver)
    except ValueError as error:
        assert "step-00000004: could not be written (rank 1: No space left on device)" in str(error), error
    else:
        raise AssertionError("the failed save was not reported")
    of_all(None, "before listing")
    assert [path.name for path in (folder / "fsdp").iterdir()] == ["step-00000002"]
    assert [(step, find_problem(path)) for step, path in list_checkpoints(folder / "fsdp")] == [(2, None)]
    of_all(None, "after listing")
    saving.write_tensors = write
    save_checkpoint(folder / "fsdp", 6, policy.model, optimizer, schedule, {}, keep=2)
    assert [step for step, _ in list_checkpoints(folder / "fsdp")] == [2, 6]


def check_moving() -> None:
    """A sharded reference moves like a full one, even right after a pass, which leaves embeddings gathered."""
    policy = parallelize(ParallelConfig(mode="fsdp"), make_policy(reference=True))
    moving = MovingReference(policy, alpha=0.6, every=1)
    before = {name: gather(p).clone() for name, p in moving.tensors().items()}
    trained = {name: gather(p.detach()) for name, p in policy.model.named_parameters()}
    ids = torch.arange(8)[None]

    def states() -> Tensor:
        with torch.no_grad():
            return policy.reference.model(input_ids=ids).last_hidden_state

    first = states()
    moving.after_step(1)
    states()
    moved = {name: gather(p).clone() for name, p in moving.tensors().items()}
    for name, value in moved.items():
        torch.testing.assert_close(value, 0.4 * before[name] + 0.6 * trained[name])
    moving.load_tensors(before)
    same({name: gather(p) for name, p in moving.tensors().items()}, before)
    assert torch.equal(states(), first)


def check_slow_disk(run: Path) -> None:
    """Verifying a checkpoint may take longer than the timeout. If it is damaged, rank 0 raises and other ranks exit."""
    from trainer.cli import parse
    from trainer.run.run import open_run

    sha256_of = saving.sha256_of

    def slow(path: Path) -> str:
        time.sleep(6)
        return sha256_of(path)

    saving.sha256_of, comm._watch.timeout_s = slow, 4.0
    _, cfg, _ = parse(["--resume", str(run)])
    with open_run(cfg, "sft") as opened:
        checkpoint = opened.checkpoint
    of_all(None, "both ranks have opened it")
    if is_main():
        (checkpoint / "model.safetensors").write_bytes(b"short")
    of_all(None, "rank 0 has damaged it")
    try:
        open_run(cfg, "sft")
    except ValueError as error:
        assert is_main() and "no undamaged checkpoint (1 tried)" in str(error), error
    except SystemExit as error:
        assert not is_main() and error.code == 2, error.code
    else:
        raise AssertionError("a damaged checkpoint was opened")


def check_sharded(folder: Path) -> None:
    check_moving()
    for mode in ("fsdp", "copies", "part"):
        check_saving(folder, mode)
    check_old_files(folder)
    check_full_disk(folder)
    check_loading(folder)
