"""Run by four ranks: what rank 0 sends to each of them, and what they send to each other.

Prints one JSON line per check on rank 0: bytes that each rank received, by the name of the collective.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bench.handover import ScriptedEngine
from data.errors import UserError
from data.types import Prompt
from rollout.engine import Completion, Group, Request, Sampling
from rollout.rewards.table import Rewards, load_rewards
from trainer.parallel import comm
from trainer.rl.groups import Rollout
from trainer.rl.rank0_rollout import AllRanksRewards, Rank0Rollout, TokensElsewhere

GROUPS, SIZE, PROMPT = 6, 4, 500  # 24 requests for 4 ranks: groups are split between them
PROMPTS = [
    Prompt(source=f"row {row}", prompt=f"{row}", ids=[1000 * row + i for i in range(PROMPT)], columns={"answer": "yes"})
    for row in range(GROUPS)
]
RECEIVED: dict[str, int] = {}  # bytes of this rank since the last report


def completion(index: int, **fields: Any) -> Completion:
    count = 40 + 7 * index
    return Completion(
        prompt_ids=list(PROMPTS[index // SIZE].ids), ids=[index * 1000 + i for i in range(count)],
        logps=[-index - i / 7 for i in range(count)], finish_reason="stop", text=f"text {index}",
        versions=[(3, count)], **fields,
    )  # fmt: skip


COMPLETIONS = [completion(index) for index in range(GROUPS * SIZE)]


def grouped(completions: list[Completion]) -> Rollout:
    values = [[[float(row), None]] * SIZE for row in range(GROUPS)]
    groups = [
        Group(row + 7, PROMPTS[row], row, "fresh", completions[row * SIZE : (row + 1) * SIZE], values[row], row == 2)
        for row in range(GROUPS)
    ]
    return Rollout(groups, ["a", "b"], torch.tensor([1.0, 0.5]), {})


def count_bytes() -> None:
    exchange = dist.all_to_all_single

    def counted(received: Any, sent: Any, *sizes: Any, **options: Any) -> Any:
        name = comm._watch.activity.name
        RECEIVED[name] = RECEIVED.get(name, 0) + received.nbytes
        return exchange(received, sent, *sizes, **options)

    dist.all_to_all_single = counted


def report(name: str, **more: Any) -> None:
    received = comm.of_all(RECEIVED, "bytes")
    RECEIVED.clear()
    if comm.is_main():
        print(json.dumps({"check": name, "received": received, **more}), flush=True)


def check_groups(rollout: Rollout, expected: list[Completion], minibatches: int) -> None:
    """Every rank has its groups in full, and together they have all of them once."""
    assert len(rollout.minibatch_sizes) == minibatches and sum(rollout.minibatch_sizes) == len(rollout.groups)
    for group in rollout.groups:
        assert (group.number, group.kind, group.replayed) == (group.row + 7, "fresh", group.row == 2)
        assert group.prompt is PROMPTS[group.row] and group.values == [[float(group.row), None]] * SIZE
        assert group.completions == expected[group.row * SIZE : (group.row + 1) * SIZE], group.row
    rows = comm.of_all([group.row for group in rollout.groups], "rows")
    assert sorted(row for each in rows for row in each) == list(range(GROUPS)), rows


def sample_in_process(rank0: Rank0Rollout, stay: bool) -> None:
    requests = [Request.of(PROMPTS[i // SIZE], seed=i) for i in range(len(COMPLETIONS))]

    def sample() -> Rollout:
        completions = rank0.engine.generate(requests, Sampling(max_tokens=9, stop_ids=(2,), tokens_stay=stay))
        away = [isinstance(c.ids, TokensElsewhere) for c in completions]
        assert away == [stay and i >= GROUPS for i in range(len(completions))]  # rank 0 has sampled the first six
        assert [len(c.logps) for c in completions] == [len(c.ids) for c in COMPLETIONS]
        assert [c.text for c in completions] == [c.text for c in COMPLETIONS]
        if stay:
            try:
                raise AssertionError(completions[-1].ids[0])
            except RuntimeError as error:
                assert "rank 3" in str(error)
        return grouped(completions)

    full = rank0.run(sample)
    check_groups(rank0.scatter(full, 2), COMPLETIONS, 2)
    assert rank0.sampled_here == []
    report("stay" if stay else "to rank 0")


def sample_until_enough(rank0: Rank0Rollout) -> None:
    """Whole groups are dealt to the ranks in turn, with what is sampled already, and so is the number to finish."""
    requests = [Request.of(PROMPTS[i // SIZE], seed=i) for i in range(len(COMPLETIONS))]
    requests[-1] = replace(requests[-1], so_far=COMPLETIONS[0])
    groups = [requests[row * SIZE : (row + 1) * SIZE] for row in range(GROUPS)]
    sampled = rank0.run(lambda: rank0.engine.generate_groups(groups, Sampling(), count=5, due=[1, 4, 5]))
    asked = comm.of_all(rank0.local.asked, "asked")
    new, begun = [False] * SIZE, [False] * (SIZE - 1) + [True]
    assert asked == [[[new, new], 2, [1]], [[new, begun], 1, [0, 1]], [[new], 1, []], [[new], 1, []]], asked
    if comm.is_main():
        assert [c for group in sampled for c in group] == COMPLETIONS
    report("until enough")


def sample_on_servers(rank0: Rank0Rollout) -> None:
    """Rank 0 has everything: masks, columns, and prompts other than the prompts of the data."""
    mask = [i % 2 == 0 for i in range(len(COMPLETIONS[5].ids))]
    kept = {5: {"mask": mask, "messages": [{"role": "tool", "content": "x"}], "columns": {"turns": 2}}}
    sent = [replace(c, **kept.get(i, {})) for i, c in enumerate(COMPLETIONS)]
    for i in (8, 9, 10, 11):
        sent[i] = replace(sent[i], prompt_ids=[5] * 3 if i == 9 else [6] * 3)
    dropped = {15: {"columns": {"turns": 2, "client": print}}}
    rollout = rank0.run(lambda: grouped([replace(c, **dropped.get(i, {})) for i, c in enumerate(sent)]))
    mine = rank0.scatter(rollout)
    if any(group.row == 3 for group in mine.groups):
        columns = next(group for group in mine.groups if group.row == 3).completions[3].columns
        assert columns == ({"turns": 2, "client": print} if comm.is_main() else {"turns": 2})
        sent[15] = replace(sent[15], columns=columns)
    check_groups(mine, sent, 1)
    report("servers")


def long_enough(completions: list[str], answer: list[str], log_extra: Any, log_metric: Any) -> list[float | None]:
    assert set(answer) == {"yes"} and len(completions) % SIZE == 0
    log_extra("length", [len(text) for text in completions])
    log_metric("rows", len(completions))
    return [None if text.endswith("7") else float(len(text)) for text in completions]


def fails(completions: list[str]) -> list[float]:
    if any(text == "text 22" for text in completions):
        raise ValueError("cannot read it")
    return [1.0] * len(completions)


def reward() -> None:
    def table_of(rewards: Rewards) -> Any:
        rewards.check_columns(PROMPTS, "data")
        rank0 = Rank0Rollout(SimpleNamespace(is_sharded=False), None, PROMPTS)
        rank0.handlers |= getattr(rewards, "handlers", {})
        prompts = [prompt for prompt in PROMPTS for _ in range(SIZE)]

        def score() -> Any:
            try:
                return rewards.score(prompts, COMPLETIONS, step=2)
            except UserError as error:
                return str(error)

        return rank0.run(score), rewards.metrics()

    options = {"weights": ["0:1,4:3", "1"], "on_error": "none", "log": lambda _: None}
    alone, failed = table_of(load_rewards([long_enough, fails], **options))
    together, failed_together = table_of(AllRanksRewards(load_rewards([long_enough, fails], **options)))
    stopped, _ = table_of(AllRanksRewards(load_rewards([fails])))
    if comm.is_main():
        assert alone.logged == {"rows": [24]} and together.logged == {"rows": [8, 8, 8]}  # three ranks, two groups each
        assert replace(alone, logged={}) == replace(together, logged={}) and alone.failed == 1
        assert failed == failed_together == {"reward/failed_rows": 1.0}
        assert "row 5" in stopped and "cannot read it" in stopped, stopped
    report("rewards")


def wait_without_polling() -> None:
    """While a rank waits for a command, it sends nothing to the store, and its signal handlers run."""
    seen: list[float] = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
    pids = comm.of_all(os.getpid(), "processes")
    calls: list[str] = []
    store = comm._watch.command_store
    traced = SimpleNamespace(**{
        name: lambda *a, name=name: (calls.append(name), getattr(store, name)(*a))[1] for name in ("wait", "get")
    })  # fmt: skip
    comm._watch.command_store = traced

    def work() -> None:
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGUSR1)
        time.sleep(0.2)

    Rank0Rollout(SimpleNamespace(is_sharded=False), None, []).run(work)
    ended = time.monotonic()
    comm._watch.command_store = store
    report("wait", calls=comm.of_all(calls, "calls"), early=comm.of_all([ended - at for at in seen], "signals"))


def main() -> None:
    with comm.process_group(60.0):
        count_bytes()
        rank0 = Rank0Rollout(SimpleNamespace(is_sharded=False), ScriptedEngine(COMPLETIONS), PROMPTS)
        sample_in_process(rank0, stay=True)
        sample_in_process(rank0, stay=False)
        sample_until_enough(rank0)
        sample_on_servers(rank0)
        reward()
        wait_without_polling()


if __name__ == "__main__":
    main()
