"""Several ranks: rank 0 plans, samples and rewards while the other ranks execute its commands.

    rank0 = Rank0Rollout(policy, start_engine(...), prompts)     # rank 0 samples with rank0.engine
    rollout = rank0.run(lambda: groups.next(step, version))      # on rank 0; None on other ranks
    rollout = rank0.scatter(rollout)                             # whole groups to each rank

Inside `run` rank 0 may use its engine at any time. The in-process engine then samples on all ranks, each its share of
the requests. Only rank 0 talks to servers; sharded weights are gathered for them by all ranks. The other ranks wait for
commands without a time limit, since a reward function or a server may be slow. `handlers` maps each command to a
function; a method may add its own (EBFT measures features on all ranks).

Token ids, log-probs, masks and routes travel as tensors, the rest of a completion as JSON.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.types import Prompt
from losses.advantage import weighted_sum
from rollout.engine import Completion, Engine, Group, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.schedule.replay import is_json
from trainer.parallel import comm
from trainer.policy.logps import Policy
from trainer.policy.sharding import gathered_head, gathered_weights
from trainer.rl.groups import Rollout

T = TypeVar("T")
Sequences = Sequence[tuple[list[int], list[int]]]


class Rank0Rollout:
    """Run work on rank 0. `engine` samples; in process and with several ranks, it samples on all of them."""

    def __init__(self, policy: Policy, engine: Engine, prompts: Sequence[Prompt]) -> None:
        self.policy, self.engine, self.prompts = policy, engine, prompts
        self.handlers: dict[str, Callable[..., Any]] = {}
        if isinstance(engine, LocalEngine):  # with servers, rank 0 has a different engine and receives no commands
            self.local = engine
            self.handlers |= {"generate": self._generate_share, "logps": self._logps}
            self.handlers |= {"load": lambda version: engine.load(int(version)), "sleep": engine.sleep}
            if comm.world_size() > 1 and comm.is_main():
                self.engine = AllRanksEngine(policy, engine)

    def _logps(self) -> None:
        sequences, temperature = comm.from_main(None, "sequences")
        logps_on_all_ranks(self.policy, self.local, sequences, temperature)

    def run(self, work: Callable[[], T]) -> T | None:
        """Run on rank 0 and return its result there; other ranks serve its commands and return None."""
        if comm.world_size() == 1:
            return work()
        if comm.is_main():
            with comm.rank0_alone():
                result = work()
                comm.send_command("done")
            return result
        while (command := comm.next_command()) != "done":
            name, *words = command.split()
            self.handlers[name](*words)
        return None

    def scatter(self, rollout: Rollout | None, num_minibatches: int = 1) -> Rollout:
        """Assign rank 0's groups to mini-batches and ranks; `rollout.sampled` stays complete on rank 0."""
        dealt = None
        if rollout is not None:
            sizes = [sum(len(c.prompt_ids) + len(c.ids) for c in group.completions) for group in rollout.groups]
            dealt = deal(sizes, num_minibatches, comm.data_size())
        if comm.world_size() == 1:
            assert rollout is not None and dealt is not None
            return with_groups(rollout, dealt[0])
        header: dict[str, Any] = {}
        tensors: list[Tensor] | None = None
        if rollout is not None:
            rest, tensors = to_tensors(rollout.completions)
            header = {
                "groups": [[g.number, g.row, g.kind, g.values, g.replayed, len(g.completions)] for g in rollout.groups],
                "completions": rest,
                "dealt": dealt,
                "names": rollout.names,
                "weights": rollout.weights.tolist(),
            }
        header = comm.from_main(header, "groups of the step")
        tensors = comm.tensors_from_main(tensors, "tokens of the step")
        indices = header["dealt"][comm.data_rank()]
        if rollout is not None:
            return with_groups(rollout, indices)
        groups = self._groups(header, tensors, list(chain.from_iterable(indices)))
        weights = torch.tensor(header["weights"])
        return Rollout(groups, header["names"], weights, {}, minibatch_sizes=tuple(map(len, indices)))

    def _groups(self, header: dict[str, Any], tensors: list[Tensor], indices: Sequence[int]) -> list[Group]:
        wanted = [index in indices for index, group in enumerate(header["groups"]) for _ in range(group[-1])]
        completions = iter(from_tensors(header["completions"], tensors, wanted))
        groups = {}
        for index in sorted(indices):  # in the order they were sent
            number, row, kind, values, replayed, count = header["groups"][index]
            sampled = [next(completions) for _ in range(count)]
            groups[index] = Group(number, self.prompts[row], row, kind, sampled, values, replayed)
        return [groups[index] for index in indices]

    def _generate_share(self) -> None:
        requests, sampling, version = comm.from_main(None, "requests")
        self.local.version = version
        requests = [Request(prompt_ids=ids, seed=seed, max_tokens=limit) for ids, seed, limit in requests]
        generate_share(self.policy, self.local, requests, _sampling(sampling))


def deal(sizes: Sequence[int], num_minibatches: int, num_ranks: int) -> list[list[list[int]]]:
    """For each rank and mini-batch: group indices, balanced by token count.

    Mini-batches take groups round-robin, so that groups at the end of a rollout (replanned prompts) are not all in the
    last mini-batch.
    """
    dealt: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for first in range(num_minibatches):
        indices = range(first, len(sizes), num_minibatches)
        shards = comm.balanced_shards([sizes[index] for index in indices], num_ranks)
        for of_rank, shard in zip(dealt, shards, strict=True):
            of_rank.append([indices[i] for i in shard])
    return dealt


def with_groups(rollout: Rollout, indices: Sequence[Sequence[int]]) -> Rollout:
    groups = [rollout.groups[index] for minibatch in indices for index in minibatch]
    dealt = replace(rollout, groups=groups, minibatch_sizes=tuple(map(len, indices)))
    dealt.reward = weighted_sum(dealt.rewards, dealt.weights)
    return dealt


# Completions as tensors.


def to_tensors(completions: Sequence[Completion]) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Return (JSON for each completion, [ids, log-probs, masks, bytes of routes] of all of them, concatenated).

    Adjacent completions with the same prompt send it once. Columns and messages that are not JSON are dropped: rewards
    have already been computed.
    """
    rest, ids, masks = [], [], []
    before: list[int] | None = None
    for c in completions:
        same = c.prompt_ids == before
        ids += [c.ids] if same else [c.prompt_ids, c.ids]
        masks += [] if c.mask is None else [c.mask]
        before = c.prompt_ids
        rest.append({
            "prompt": -1 if same else len(c.prompt_ids), "ids": len(c.ids), "masked": c.mask is not None,
            "finish_reason": c.finish_reason, "text": c.text, "versions": c.versions,
            "messages": c.messages if is_json(c.messages) else None,
            "columns": {name: value for name, value in c.columns.items() if is_json(value)},
            "routes": None if c.routes is None else [c.routes.dtype.name, *c.routes.shape],
        })  # fmt: skip
    logps = [c.logps for c in completions]
    routes = [c.routes.reshape(-1).view(np.uint8) for c in completions if c.routes is not None]
    flat = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *routes]))
    return rest, [_flat(ids, np.int32), _flat(logps, np.float64), _flat(masks, np.bool_), flat]


def _flat(lists: Sequence[Sequence[Any]], dtype: Any) -> Tensor:  # (N,)
    count = sum(map(len, lists))
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), dtype, count))


def from_tensors(
    rest: Sequence[dict[str, Any]],
    tensors: Sequence[Tensor],
    wanted: Sequence[bool] | None = None,  # completions to build; None: all
) -> list[Completion]:
    ids, logps, masks, routes = tensors
    at_id = at_logp = at_mask = at_route = 0
    prompt = ids[:0]
    completions = []
    for saved, build in zip(rest, wanted or [True] * len(rest), strict=True):
        if saved["prompt"] >= 0:
            prompt = ids[at_id : at_id + saved["prompt"]]
            at_id += saved["prompt"]
        count, num_masked = saved["ids"], saved["ids"] if saved["masked"] else 0
        dtype, *shape = saved["routes"] or ("uint8", 0)
        num_routes = math.prod(shape) * np.dtype(dtype).itemsize
        if build:
            mask = masks[at_mask : at_mask + count].tolist() if saved["masked"] else None
            array = routes[at_route : at_route + num_routes].numpy()
            completions.append(
                Completion(
                    prompt_ids=prompt.tolist(), ids=ids[at_id : at_id + count].tolist(), mask=mask,
                    logps=logps[at_logp : at_logp + count].tolist(), finish_reason=saved["finish_reason"],
                    text=saved["text"], versions=[(version, count) for version, count in saved["versions"]],
                    messages=saved["messages"], columns=saved["columns"],
                    routes=saved["routes"] and array.view(dtype).reshape(shape),
                )
            )  # fmt: skip
        at_id, at_logp, at_mask = at_id + count, at_logp + count, at_mask + num_masked
        at_route += num_routes
    return completions


# Engines and weights that need all ranks.


class AllRanksLogps(LocalEngine):
    """Rank 0's log-probs of a sharded policy: all ranks run the same passes, one block gathered at a time."""

    def __init__(self, policy: Policy, local: LocalEngine) -> None:
        super().__init__(
            local.model, local.tokenizer, max_batch_size=local.max_batch_size, autocast_dtype=local.autocast_dtype
        )
        self.policy, self.local = policy, local

    def logps(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        comm.send_command("logps")
        comm.from_main([sequences, temperature], "sequences")
        return logps_on_all_ranks(self.policy, self.local, sequences, temperature)


class AllRanksEngine(AllRanksLogps):
    """The in-process engine over several ranks: each samples its share of rank 0's requests."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        comm.send_command("generate")
        # The next turn may go to another rank, so no conversation is cached.
        requests = [replace(request, conversation=None) for request in requests]
        asked = [[request.prompt_ids, request.seed, request.max_tokens] for request in requests]
        comm.from_main([asked, asdict(sampling), self.version], "requests")
        self.local.version = self.version
        return generate_share(self.policy, self.local, requests, sampling)

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[tuple[int, Completion]]]:
        """Yield all completions together: ranks send their shares when all of them are done."""
        yield list(enumerate(self.generate(requests, sampling)))

    def load(self, version: int) -> None:
        self.version = version
        comm.send_command(f"load {version}")
        self.local.load(version)

    def sleep(self) -> None:
        comm.send_command("sleep")
        self.local.sleep()

    def metrics(self) -> dict[str, float]:
        """Metrics of rank 0's share."""
        return self.local.metrics()


def generate_share(
    policy: Policy, local: LocalEngine, requests: Sequence[Request], sampling: Sampling
) -> list[Completion]:
    """Sample this rank's share of the requests; rank 0 returns all completions."""
    world, rank = comm.world_size(), comm.rank()
    first, stop = (len(requests) * r // world for r in (rank, rank + 1))
    if policy.is_sharded and comm.any_rank(local.needs_copy()):
        with comm.inside("weights for sampling"):
            if not local.is_chosen:
                with gathered_head(policy):
                    local.choose_forward()
            local.refresh(always=True)
    with contextlib.nullcontext() if local.has_copy else gathered_weights(policy):
        completions = local.generate(requests[first:stop], sampling) if stop > first else []
    rest, tensors = to_tensors(completions)
    all_rest = comm.of_all(rest, "completions")
    gathered = [comm.all_gather(x, "tokens of completions", everyone=True) for x in tensors]
    if not comm.is_main():
        return completions
    by_rank = zip(all_rest, zip(*gathered, strict=True), strict=True)
    return [completion for rest, arrays in by_rank for completion in from_tensors(rest, arrays)]


def logps_on_all_ranks(
    policy: Policy, local: LocalEngine, sequences: Sequences, temperature: float
) -> list[list[float]]:
    """Log-probs computed by all ranks together; only the current block and the head are gathered."""
    with comm.inside("log-probs to compare"), gathered_head(policy):
        return local.logps(sequences, temperature)


def _sampling(saved: dict[str, Any]) -> Sampling:
    options: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    return Sampling(**options)
