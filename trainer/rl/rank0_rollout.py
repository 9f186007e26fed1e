"""Several processes: rank 0 plans, samples and rewards; the other ranks execute its commands meanwhile.

    rank0 = Rank0Rollout(policy, start_engine(...), prompts)     # rank0.engine is what rank 0 samples with
    batch = rank0.run(lambda: groups.next(step, version))        # on rank 0; None elsewhere
    batch = rank0.scatter(batch)                                 # whole groups to each rank

Inside `run` rank 0 may use its engine at any time. The in-process engine then samples on all ranks, each a part of the
requests. Servers are rank 0's alone to talk to; they get sharded weights by a gather in which all ranks take part. The
other ranks wait for commands without a time limit, since a reward function or a server may take long. `handlers` says
what they do at each command; a method adds its own there (EBFT measures features on all ranks).

Token ids, log-probs and masks travel as tensors, the rest of a completion as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.types import Prompt
from rollout.engine import Completion, Engine, Group, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.schedule.replay import is_json
from trainer.parallel import comm
from trainer.policy.logps import Policy
from trainer.policy.sharding import gathered_head, gathered_weights
from trainer.policy.weights import PolicyWeights
from trainer.rl.groups import GroupBatch

T = TypeVar("T")
Sequences = Sequence[tuple[list[int], list[int]]]


class Rank0Rollout:
    """`engine` is the one to sample with; for several ranks and in process it samples on all of them."""

    def __init__(self, policy: Policy, engine: Engine, prompts: Sequence[Prompt]) -> None:
        self.policy, self.local, self.prompts = policy, engine, prompts
        in_process = isinstance(engine, LocalEngine)
        on_all = comm.world_size() > 1 and comm.is_main() and in_process
        self.engine: Engine = AllRanksEngine(policy, engine) if on_all else engine
        self.handlers: dict[str, Callable[..., Any]] = {"generate": self._generate_part}
        if in_process:  # with servers, rank 0 has another engine here, and is sent no commands
            self.handlers |= {"load": lambda version: engine.load(int(version)), "sleep": engine.sleep}
            self.handlers |= CommandHandlers(policy, engine).handlers

    def run(self, work: Callable[[], T]) -> T | None:
        """What rank 0 does, and its result there; None on the other ranks, which do what it asks for meanwhile."""
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

    def scatter(self, batch: GroupBatch | None, num_parts: int = 1) -> GroupBatch:
        """Deal rank 0's groups to mini-batches, and those of each to ranks. `batch.sampled` stays whole on rank 0."""
        dealt = None
        if batch is not None:
            sizes = [sum(len(c.prompt_ids) + len(c.ids) for c in group.completions) for group in batch.groups]
            dealt = deal(sizes, num_parts, comm.data_size())
        if comm.world_size() == 1:
            assert batch is not None
            return with_groups(batch, dealt[0])
        header, tensors = None, None
        if batch is not None:
            rest, tensors = to_tensors([c for group in batch.groups for c in group.completions])
            header = {
                "groups": [[g.number, g.row, g.kind, g.values, g.replayed, len(g.completions)] for g in batch.groups],
                "completions": rest,
                "dealt": dealt,
                "names": batch.names,
                "weights": batch.weights,
            }
        header = comm.from_main(header, "groups of the step")
        tensors = comm.tensors_from_main(tensors, "tokens of the step")
        own = header["dealt"][comm.data_rank()]
        if batch is not None:
            return with_groups(batch, own)
        groups = self._groups(header, tensors, list(chain.from_iterable(own)))
        return GroupBatch(groups, header["names"], header["weights"], {}, part_sizes=tuple(map(len, own)))

    def _groups(self, header: dict[str, Any], tensors: list[Tensor], own: Sequence[int]) -> list[Group]:
        wanted = [place in own for place, group in enumerate(header["groups"]) for _ in range(group[-1])]
        completions = iter(from_tensors(header["completions"], tensors, wanted))
        groups = {}
        for place in sorted(own):  # as they were sent
            number, row, kind, values, replayed, count = header["groups"][place]
            made = [next(completions) for _ in range(count)]
            groups[place] = Group(number, self.prompts[row], row, kind, made, values, replayed)
        return [groups[place] for place in own]

    def _generate_part(self) -> None:
        requests, sampling, version = comm.from_main(None, "requests")
        self.local.version = version
        requests = [Request(prompt_ids=ids, seed=seed, max_tokens=limit) for ids, seed, limit in requests]
        generate_part(self.policy, self.local, requests, _sampling(sampling))


def deal(sizes: Sequence[int], num_parts: int, num_ranks: int) -> list[list[list[int]]]:
    """For each rank, for each mini-batch: places of its groups, which have so many tokens.

    Mini-batches take groups in turn, so that those at the end of a batch (re-rolled prompts) are not all in the last
    one; within each, ranks get about as many tokens.
    """
    dealt: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for part in range(num_parts):
        places = range(part, len(sizes), num_parts)
        for own, chosen in zip(dealt, comm.balanced_shards([sizes[place] for place in places], num_ranks), strict=True):
            own.append([places[i] for i in chosen])
    return dealt


def with_groups(batch: GroupBatch, own: Sequence[Sequence[int]]) -> GroupBatch:
    groups = [batch.groups[place] for part in own for place in part]
    return replace(batch, groups=groups, part_sizes=tuple(map(len, own)))


# Completions as tensors.


def to_tensors(completions: Sequence[Completion]) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """(the rest of each as JSON, [ids, log-probs, masks] of all of them one after the other).

    A prompt is sent once for completions in a row that share it. What a column or message holds that is not JSON stays
    behind: rewards have been computed by now.
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
        })  # fmt: skip
    logps = [c.logps for c in completions]
    return rest, [_flat(ids, np.int32), _flat(logps, np.float64), _flat(masks, np.bool_)]


def _flat(lists: Sequence[Sequence[Any]], dtype: Any) -> Tensor:  # (N,)
    count = sum(map(len, lists))
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), dtype, count))


def from_tensors(
    rest: Sequence[dict[str, Any]],
    tensors: Sequence[Tensor],
    wanted: Sequence[bool] | None = None,  # which of them to build; None: all
) -> list[Completion]:
    ids, logps, masks = tensors
    place = at_logp = at_mask = 0
    prompt = ids[:0]
    completions = []
    for saved, build in zip(rest, wanted or [True] * len(rest), strict=True):
        if saved["prompt"] >= 0:
            prompt = ids[place : place + saved["prompt"]]
            place += saved["prompt"]
        count, num_masked = saved["ids"], saved["ids"] if saved["masked"] else 0
        if build:
            mask = masks[at_mask : at_mask + count].tolist() if saved["masked"] else None
            completions.append(
                Completion(
                    prompt_ids=prompt.tolist(), ids=ids[place : place + count].tolist(), mask=mask,
                    logps=logps[at_logp : at_logp + count].tolist(), finish_reason=saved["finish_reason"],
                    text=saved["text"], versions=[(version, made) for version, made in saved["versions"]],
                    messages=saved["messages"], columns=saved["columns"],
                )
            )  # fmt: skip
        place, at_logp, at_mask = place + count, at_logp + count, at_mask + num_masked
    return completions


# Engines and weights for which rank 0 needs the other ranks.


class AllRanksScores(LocalEngine):
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


class AllRanksEngine(AllRanksScores):
    """The in-process engine over several ranks: rank 0 asks, every rank samples its part."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        comm.send_command("generate")
        # A later turn may come to another rank, so none continues a conversation.
        requests = [replace(request, conversation=None) for request in requests]
        asked = [[request.prompt_ids, request.seed, request.max_tokens] for request in requests]
        comm.from_main([asked, asdict(sampling), self.version], "requests")
        self.local.version = self.version
        return generate_part(self.policy, self.local, requests, sampling)

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[tuple[int, Completion]]]:
        """All at once: ranks send their parts when all of them are done."""
        yield list(enumerate(self.generate(requests, sampling)))

    def load(self, version: int) -> None:
        self.version = version
        comm.send_command(f"load {version}")
        self.local.load(version)

    def sleep(self) -> None:
        comm.send_command("sleep")
        self.local.sleep()

    def metrics(self) -> dict[str, float]:
        """Of rank 0's part."""
        return self.local.metrics()


def generate_part(
    policy: Policy, local: LocalEngine, requests: Sequence[Request], sampling: Sampling
) -> list[Completion]:
    """This rank's part of the requests; rank 0 gets all of them."""
    world, rank = comm.world_size(), comm.rank()
    first, stop = (len(requests) * part // world for part in (rank, rank + 1))
    with gathered_weights(policy):
        made = local.generate(requests[first:stop], sampling) if stop > first else []
    rest, tensors = to_tensors(made)
    all_rest = comm.of_all(rest, "completions")
    parts = [comm.all_gather(x, "tokens of completions", everyone=True) for x in tensors]
    if not comm.is_main():
        return made
    by_rank = zip(all_rest, zip(*parts, strict=True), strict=True)
    return [completion for rest, own in by_rank for completion in from_tensors(rest, own)]


class SharedWeights(PolicyWeights):
    """Sharded weights for servers that rank 0 talks to: the other ranks take part in every gather.

    Rank 0 alone knows when weights are needed: after a step, when a server has come back, for a comparison. That is
    always in its main thread and inside Rank0Rollout.run. One tensor is gathered at a time, never the model.
    """

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        comm.send_command(f"weights {name_of(self.dtype)}")
        tensors = super().tensors()
        try:
            while (pair := next(tensors, None)) is not None:  # `yield from` would close them with this generator
                yield pair
        finally:
            for _ in tensors:  # if the transfer broke off: the other ranks gather all tensors
                pass

    def save_adapter(self, folder: Path) -> None:
        _ = self.adapter  # an adapter that cannot be served is refused before the command is sent
        comm.send_command(f"adapter {name_of(self.dtype)}")
        super().save_adapter(folder)


class CommandHandlers:
    """Commands of rank 0 about weights and scores, as the other ranks execute them."""

    def __init__(self, policy: Policy, local: LocalEngine) -> None:
        self.policy, self.local = policy, local
        self._weights: PolicyWeights | None = None
        self.handlers = {"logps": self.logps, "weights": self.weights, "adapter": self.adapter}

    def weights(self, dtype: str) -> None:
        for _ in self._source(dtype).tensors():
            pass

    def adapter(self, dtype: str) -> None:
        self._source(dtype).adapter.read()

    def logps(self) -> None:
        sequences, temperature = comm.from_main(None, "sequences")
        logps_on_all_ranks(self.policy, self.local, sequences, temperature)

    def _source(self, dtype: str) -> PolicyWeights:
        if self._weights is None:
            self._weights = PolicyWeights(self.policy, getattr(torch, dtype))
        assert name_of(self._weights.dtype) == dtype, (self._weights.dtype, dtype)
        return self._weights


def logps_on_all_ranks(
    policy: Policy, local: LocalEngine, sequences: Sequences, temperature: float
) -> list[list[float]]:
    """Log-probs by all ranks at once; the model stays sharded, but for the current block and the head."""
    with comm.inside("log-probs to compare"), gathered_head(policy):
        return local.logps(sequences, temperature)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sampling(saved: dict[str, Any]) -> Sampling:
    return Sampling(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})
