"""Rank 0 of several, alone: the run of tests.ranks.memory with torch's fake process group.

    python -m tests.ranks.fake 8 --model qwen3-32b --method grpo ...

One rank of eight of a 32B model, about two minutes on an H200:

    python -m tests.ranks.fake 8 --model qwen3-32b --method grpo --data task:addition:split=train,size=256 \\
        --rollout.engine local --parallel.mode fsdp --trained-dtype bfloat16 --gradient-checkpointing \\
        --per-device-train-batch-size 32 --max-prompt-length 64 --max-completion-length 128 --max-steps 2 \\
        --save-steps 0 --output-dir /tmp/run-32b

The other ranks exist only as copies of this one: they sample what it samples and send the shards that it has. So
weights are finite, memory and kernels are those of a real rank, and numbers mean nothing. --model may be a name of
trainer.plan.KNOWN: a model of that shape whose random weights are created on the device, shard by shard.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

from rollout.model_folder import BUILTIN, ONE_FILE
from rollout.tensor_header import Spec, aligned, file_header
from trainer import plan
from trainer.files.tensor_files import TensorFiles
from trainer.parallel import comm
from trainer.parallel.dtensor import local


def main(argv: list[str]) -> int:
    world, *words = argv
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "-"}
    os.environ.setdefault("MASTER_PORT", "0")
    copy_this_rank(int(world))
    from tests.ranks import memory  # after comm has changed: other modules import its functions by name
    from trainer.policy import optim
    from trainer.rl import rank0_rollout
    from trainer.run import run

    run.export_model = lambda *args, **options: None
    optim.gradient_norm = finite_norm(optim.gradient_norm)
    rank0_rollout.generate_share = remember(rank0_rollout.generate_share)
    plan.KNOWN["small"] = ("qwen3", 64, 128, 2, 4, 2, 16, 512, False)
    at = words.index("--model") + 1
    with tempfile.TemporaryDirectory() as folder:
        if words[at] in plan.KNOWN:
            write_shape(Path(folder), words[at])
            TensorFiles.read = random_weights
            words[at] = folder
        return memory.main([*words, "--reward-funcs", f"{__file__}:spread"])


def spread(completions: list[Any], **columns: Any) -> list[float]:
    """Rewards that differ within each group: without an advantage there is nothing to train on."""
    return [float(i % 2) for i in range(len(completions))]


# Collectives: every other rank has what this rank has.

sampled: list[Any] = []  # this rank's last completions


def copy_this_rank(world: int) -> None:
    join = dist.init_process_group
    dist.rendezvous = lambda *args, **options: iter([(dist.HashStore(), 0, world)])
    dist.init_process_group = lambda backend, *, store, rank, world_size, **options: join(
        "fake", store=store, rank=rank, world_size=world_size
    )
    comm.all_gather = all_gather
    comm.exchange = exchange


def all_gather(x: torch.Tensor, name: str = "gather", *, everyone: bool = False) -> list[torch.Tensor]:
    return [x] * (comm.world_size() if everyone else comm.data_size())


def exchange(parts: Sequence[Any], name: str) -> list[Any]:
    """Only a reply to rank 0 is read: the completions of the others."""
    reply = None
    if name == "completions":
        from trainer.rl.rank0_rollout import packed

        reply = list(map(packed, sampled))
    return [parts[0], *[reply] * (len(parts) - 1)]


def finite_norm(norm_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Some versions of torch do not write the result of a fake reduce-scatter."""

    def call(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        trained = list(parameters)
        for parameter in trained:
            if parameter.grad is not None:
                local(parameter.grad).nan_to_num_(0.0, 0.0, 0.0)
        return norm_of(trained)

    return call


def remember(generate: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        sampled[:] = generate(*args)
        return list(sampled)

    return call


# Weights.


def write_shape(folder: Path, name: str) -> None:
    """Write a model folder whose safetensors file is a header and a hole, which takes no disk."""
    config = plan.known_config(name)
    lm = plan.build(config)
    config.architectures = [type(lm).__name__]
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(BUILTIN["builtin:tiny"] / file, folder)
    tensors = dict(lm.named_parameters())  # a tied head once
    specs = aligned({name: Spec(tuple(x.shape), torch.bfloat16) for name, x in tensors.items()})
    with (folder / ONE_FILE).open("wb") as file:
        header = file_header(specs)
        file.write(header)
        file.truncate(len(header) + sum(spec.num_bytes for spec in specs.values()))


def random_weights(self: TensorFiles, name: str, at: Any = None) -> torch.Tensor:
    """As TensorFiles.read, on the device: norms are 1, other weights are small."""
    record = self.records[name]
    shape = record.shape if at is None else [piece.stop - piece.start for piece in at]
    full = torch.ones if len(shape) == 1 else torch.randn
    x = full(shape, dtype=record.dtype, device=comm.pick_device())
    return x if len(shape) == 1 else x.mul_(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
