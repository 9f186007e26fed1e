"""CPU time of rank 0 for handing requests and completions to other ranks, on gloo processes without a model.

    python -m bench.handover --ranks 2 8

A scripted engine returns prepared completions, and its own time is subtracted. `completions` has short prompts and long
completions, `prompts` the opposite. With `local` every rank samples a share in process; with `servers` rank 0 has all
completions. Prompt ids count once per completion. `step ms` is the time of a step with two tokens per completion, and
`idle` the time that waiting ranks cost rank 0, in ms per second.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import tyro

from data.types import Prompt
from rollout.engine import Completion, Group, Request, Sampling
from rollout.engines.local import LocalEngine
from trainer.parallel import comm
from trainer.rl.groups import Rollout
from trainer.rl.rank0_rollout import Rank0Rollout

GROUPS, SIZE = 128, 8
LENGTHS = {"completions": (16, 1024), "prompts": (2048, 16), "neither": (2, 2)}  # prompt ids, completion ids
REPEATS = 5
IDLE_S = 3.0


class ScriptedEngine(LocalEngine):
    """Return prepared completions, chosen by the request's seed."""

    has_copy = True  # of no weights

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.model, self.tokenizer = torch.nn.Linear(1, 1), None
        self.max_batch_size, self.autocast_dtype, self.version = 1, None, 0
        self.completions = completions

    def generate_groups(
        self, groups: Sequence[Sequence[Request]], sampling: Sampling, *, count: int, due: Collection[int] = ()
    ) -> list[list[Completion]]:
        self.asked = [[request.so_far is not None for request in group] for group in groups], count, list(due)
        return [[self.completions[request.seed] for request in group] for group in groups]


def prepared(kind: str) -> tuple[list[Prompt], list[Completion]]:
    """Prompts, and SIZE completions for each."""
    rng = random.Random(0)
    num_prompt, num_ids = LENGTHS[kind]
    prompts = [
        Prompt(source=f"row {row}", prompt="", ids=rng.choices(range(150_000), k=num_prompt)) for row in range(GROUPS)
    ]
    completions = []
    for prompt in prompts:
        for _ in range(SIZE):
            count = rng.randrange(num_ids // 2, num_ids * 3 // 2)
            completions.append(
                Completion(
                    prompt_ids=list(prompt.ids), ids=rng.choices(range(150_000), k=count),
                    logps=[-rng.random() for _ in range(count)], finish_reason="stop", text=4 * count * "x",
                    versions=[(0, count)],
                )
            )  # fmt: skip
    return prompts, completions


def measure(kind: str, engine: str) -> float:
    """Return rank 0's CPU seconds per million completion tokens, or prompt ids."""
    prompts, completions = prepared(kind)
    scripted = ScriptedEngine(completions)
    rank0 = Rank0Rollout(SimpleNamespace(is_sharded=False), scripted, prompts)  # type: ignore[arg-type]
    sampling = Sampling(for_training=True, tokens_stay=True)
    requests = [Request.of(prompts[i // SIZE], seed=i) for i in range(len(completions))]

    def sample() -> Rollout:
        sampled = rank0.engine.generate(requests, sampling) if engine == "local" else completions
        groups = [
            Group(row, prompt, row, "fresh", sampled[row * SIZE : (row + 1) * SIZE], [[1.0]] * SIZE)
            for row, prompt in enumerate(prompts)
        ]
        return Rollout(groups, ["reward"], torch.ones(1), {})

    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        rank0.scatter(rank0.run(sample))
        times.append(time.process_time() - started)
        comm.of_all(None, "end of a repeat")
    ids = sum(len(c.ids if kind == "completions" else c.prompt_ids) for c in completions)
    return min(times) / ids * 1e6  # other processes on the machine can only add to it


def idle() -> float:
    """Return rank 0's CPU ms per second while the other ranks wait for commands."""
    started = time.process_time()
    Rank0Rollout(SimpleNamespace(is_sharded=False), None, []).run(lambda: time.sleep(IDLE_S))  # type: ignore[arg-type]
    used = time.process_time() - started
    comm.of_all(None, "end")  # the store ends with rank 0
    return used / IDLE_S * 1e3


def worker() -> None:
    torch.set_num_threads(1)
    with comm.process_group(120.0):
        row: dict[str, Any] = {"ranks": comm.world_size()}
        for engine in ("local", "servers"):
            row |= {f"{kind} {engine}": measure(kind, engine) for kind in ("completions", "prompts")}
            row[f"step ms {engine}"] = measure("neither", engine) * 2 * GROUPS * SIZE / 1e3
        row["idle"] = idle()
        if comm.is_main():
            print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)


def main(ranks: tuple[int, ...] = (2, 8)) -> None:
    """Print one line per number of ranks: CPU seconds of rank 0 per million tokens."""
    for world in ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", "from bench.handover import worker; worker()"],
                env=os.environ | {name: str(value) for name, value in (common | {"RANK": rank}).items()},
            )
            for rank in range(world)
        ]
        if any([process.wait() for process in processes]):
            raise SystemExit(1)


if __name__ == "__main__":
    tyro.cli(main)
