"""Seconds to hand a rollout from rank 0 to the other ranks, per million tokens.

    torchrun --nproc-per-node 2 -m bench.rollout_to_ranks            # 128 groups of 8 completions of 1,024 tokens

What rank 0 does to turn completions into tensors and JSON is in it, and what the other ranks do to turn them back.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

from data.types import Prompt
from rollout.engine import Completion, Group
from trainer.parallel.comm import all_count, is_main, process_group
from trainer.rl.groups import GroupBatch
from trainer.rl.rank0_rollout import Rank0Rollout

GROUPS, SIZE, LENGTH, PROMPT, REPEATS = 128, 8, 1024, 128, 3


def make_groups() -> list[Group]:
    rng = random.Random(0)
    groups = []
    for number in range(GROUPS):
        ids = [rng.randrange(150_000) for _ in range(PROMPT)]
        completions = [
            Completion(
                prompt_ids=ids, ids=[rng.randrange(150_000) for _ in range(LENGTH)],
                logps=[-rng.random() for _ in range(LENGTH)], finish_reason="stop", text="word " * (LENGTH * 3 // 4),
                versions=[(0, LENGTH)],
            )
            for _ in range(SIZE)
        ]  # fmt: skip
        prompt = Prompt(source=f"rows:{number}", prompt="x", ids=ids)
        groups.append(Group(number, prompt, number, completions=completions, values=[[1.0]] * SIZE))
    return groups


def main() -> None:
    with process_group(600.0):
        groups = make_groups()
        rank0 = Rank0Rollout(SimpleNamespace(), SimpleNamespace(), [group.prompt for group in groups])
        batch = GroupBatch(groups, ["reward"], [1.0], {}) if is_main() else None
        seconds = []
        for _ in range(REPEATS):
            all_count(0, "ready", everyone=True)
            started = time.perf_counter()
            own = rank0.scatter(batch)
            all_count(0, "done", everyone=True)
            seconds.append(time.perf_counter() - started)
        assert own.groups and own.groups[0].completions[0].ids == groups[own.groups[0].number].completions[0].ids
        if is_main():
            tokens = GROUPS * SIZE * LENGTH
            best = min(seconds) / tokens * 1e6
            print(f"{tokens:,} tokens to the ranks: {best:.2f} s per million (best of {REPEATS}), each {seconds}")


if __name__ == "__main__":
    main()
