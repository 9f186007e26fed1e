"""Several processes where completions are made: rank 0 plans, samples and rewards; the others lend it their models.

    lead = Lead(policy, start_engine(...), prompts)              # lead.engine is what rank 0 samples with
    batch = lead.run(lambda: groups.next(step, version))         # rank 0 does it, the others do as they are told
    batch = lead.share(batch)                                    # whole groups, each of them on one rank

Within `run` rank 0 may ask its engine for completions at any time: those of the engine in process are then made by all
ranks, each a part of the requests. Servers are rank 0's to speak with, and get weights in shards from all (lend.py).
The others wait for orders without a limit, since a reward function or a server may take its time. What they get at the
end is different prompts for each rank: nobody repeats what another trains on.
Whatever else rank 0 may ask for within is an entry of `lead.orders`: its word, and what the others do at it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from data.types import Prompt
from rollout.engine import Completion, Engine, Group, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.schedule.replay import as_json, completion_of
from trainer.parallel import comm
from trainer.policy.logps import Policy
from trainer.policy.sharding import gathered_weights
from trainer.rl.groups import GroupBatch
from trainer.rl.lend import Lender, LentScores

T = TypeVar("T")


class Lead:
    """`engine` is the one to sample with: in process and on rank 0 that of all ranks together."""

    def __init__(self, policy: Policy, engine: Engine, prompts: Sequence[Prompt]) -> None:
        self.policy, self.local, self.prompts = policy, engine, prompts
        spreads = comm.world_size() > 1 and comm.is_main() and isinstance(engine, LocalEngine)
        self.engine: Engine = SpreadEngine(policy, engine) if spreads else engine
        self.orders: dict[str, Callable[..., Any]] = {"generate": self._generate_part}
        if isinstance(engine, LocalEngine):  # on rank 0 it may be that of servers, which lends nothing
            self.orders |= Lender(policy, engine).orders

    def run(self, work: Callable[[], T]) -> T | None:
        """What rank 0 does, and its result there; None elsewhere."""
        if comm.world_size() == 1:
            return work()
        if comm.is_main():
            with comm.leading():
                result = work()
                comm.give_order("done")
            return result
        while (order := comm.await_order()) != "done":
            name, *words = order.split()
            self.orders[name](*words)
        return None

    def share(self, batch: GroupBatch | None) -> GroupBatch:
        """Rank 0's groups dealt to all, about as many tokens for each. What was sampled stays whole on rank 0."""
        if comm.world_size() == 1:
            assert batch is not None
            return batch
        packed = None
        if batch is not None:
            sizes = [sum(len(c.prompt_ids) + len(c.ids) for c in group.completions) for group in batch.groups]
            packed = {
                "groups": [_packed(group) for group in batch.groups],
                "dealt": comm.shares(sizes, comm.data_size()),
                "names": batch.names,
                "weights": batch.weights,
            }
        packed = comm.from_main(packed, "groups of the step")
        own = [self._unpacked(packed["groups"][i]) for i in packed["dealt"][comm.data_rank()]]
        if batch is not None:
            return replace(batch, groups=own)
        return GroupBatch(own, packed["names"], packed["weights"], {})

    def _unpacked(self, saved: dict[str, Any]) -> Group:
        completions = [completion_of(completion) for completion in saved["completions"]]
        return Group(
            saved["number"],
            self.prompts[saved["row"]],
            saved["row"],
            saved["kind"],
            completions,
            saved["values"],
            saved["replayed"],
        )

    def _generate_part(self) -> None:
        requests, sampling, version = comm.from_main(None, "requests")
        self.local.version = version
        generate_part(self.policy, self.local, [Request(**r) for r in requests], _sampling(sampling))


class SpreadEngine(LentScores):
    """The engine in process over several ranks: rank 0 asks, all make their part."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        comm.give_order("generate")
        comm.from_main([[asdict(request) for request in requests], asdict(sampling), self.version], "requests")
        self.local.version = self.version
        return generate_part(self.policy, self.local, requests, sampling)


def generate_part(
    policy: Policy, local: LocalEngine, requests: Sequence[Request], sampling: Sampling
) -> list[Completion]:
    """This rank's part of the requests; all of them together on rank 0."""
    world, rank = comm.world_size(), comm.rank()
    first, stop = (len(requests) * part // world for part in (rank, rank + 1))
    with gathered_weights(policy):
        made = local.generate(requests[first:stop], sampling) if stop > first else []
    text = json.dumps([as_json(completion) for completion in made]).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(policy.device)
    parts = comm.all_gather(own, "completions", everyone=True)
    if not comm.is_main():
        return made
    return [completion_of(c) for part in parts for c in json.loads(bytes(part.cpu().numpy().tobytes()))]


def _packed(group: Group) -> dict[str, Any]:
    planned = group
    return {
        "number": planned.number, "row": planned.row, "kind": planned.kind, "values": group.values,
        "replayed": group.replayed, "completions": [as_json(completion) for completion in group.completions],
    }  # fmt: skip


def _sampling(saved: dict[str, Any]) -> Sampling:
    return Sampling(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})
