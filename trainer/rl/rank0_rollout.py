"""Several ranks: rank 0 plans, samples and rewards while the other ranks execute its commands.

    rank0 = Rank0Rollout(policy, start_engine(...), prompts)     # rank 0 samples with rank0.engine
    rollout = rank0.run(lambda: groups.next(step, version))      # on rank 0; None on other ranks
    rollout = rank0.scatter(rollout)                             # whole groups to each rank

Inside `run` rank 0 may use its engine at any time. The in-process engine then samples on all ranks, each its share of
the requests. Only rank 0 talks to servers; sharded weights are gathered for them by all ranks. The other ranks wait for
commands without a time limit, since a reward function or a server may be slow. `handlers` maps each command to a
function; a method may add its own (EBFT measures features on all ranks).

Every rank receives only its own requests and groups, and every prompt once. With Sampling.tokens_stay, ids and
log-probs stay on the rank that sampled them until `scatter` sends them to the rank that trains on them; on rank 0 they
are TokensElsewhere, which have only a length.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from data.errors import UserError
from data.types import Prompt
from losses.advantage import weighted_sum
from rollout.engine import Completion, Engine, Group, Request, Sampling, finished
from rollout.engines.local import LocalEngine
from rollout.rewards.table import Gap, Rewards, RewardTable
from rollout.rewards.workers import shards
from rollout.schedule.replay import is_json
from trainer.parallel import comm
from trainer.policy.logps import Policy
from trainer.policy.sharding import gathered_head, gathered_weights
from trainer.rl.groups import Rollout

T = TypeVar("T")
Sequences = Sequence[tuple[list[int], list[int]]]
Asked = tuple[list[int], int, int | None, Completion | None]  # prompt_ids, seed, max_tokens, so_far of a request
NO_PROMPT = Prompt(source="", prompt="", ids=[])  # ranks other than 0 take the prompt from the data


class Rank0Rollout:
    """Run work on rank 0. `engine` samples; in process and with several ranks, it samples on all of them."""

    def __init__(self, policy: Policy, engine: Engine, prompts: Sequence[Prompt]) -> None:
        self.policy, self.engine, self.prompts = policy, engine, prompts
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.sampled_here: list[Completion] = []  # since the last scatter, if their tokens stay
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
                return work()
        while (command := comm.next_command()) != "done":
            name, *words = command.split()
            self.handlers[name](*words)
        return None

    def scatter(self, rollout: Rollout | None, num_minibatches: int = 1) -> Rollout:
        """Assign rank 0's groups to mini-batches and ranks; `rollout.sampled` stays complete on rank 0."""
        dealt: list[list[list[int]]] = []
        if rollout is not None:
            sizes = [sum(map(num_tokens, group.completions)) for group in rollout.groups]
            dealt = deal(sizes, num_minibatches, comm.data_size())
        if comm.world_size() == 1:
            assert rollout is not None
            groups = [rollout.groups[index] for indices in dealt[0] for index in indices]
            return with_groups(rollout, groups, tuple(map(len, dealt[0])))
        shares = [None] * comm.world_size() if rollout is None else shares_of(rollout, dealt)
        share: Share = comm.exchange(shares, "groups of the step")[0]
        sent: list[list[Any] | None] = [None] * comm.world_size()
        for receiver, where in share.to_send.items():
            completions = [self.sampled_here[each] if isinstance(each, int) else each for each in where]
            sent[receiver] = completions if receiver == comm.rank() else list(map(packed, completions))
        self.sampled_here = []
        received = [iter(each or ()) for each in comm.exchange(sent, "tokens of the step")]
        groups = [self._group(assigned, received) for assigned in share.groups]
        if rollout is not None:
            return with_groups(rollout, groups, share.minibatch_sizes)
        weights = torch.tensor(share.weights)
        return Rollout(groups, share.names, weights, {}, minibatch_sizes=share.minibatch_sizes)

    def _group(self, assigned: AssignedGroup, received: Sequence[Iterator[Any]]) -> Group:
        group, senders, prompts = assigned
        prompt = group.prompt if comm.is_main() else self.prompts[group.row]
        completions = []
        for sender, prompt_ids in zip(senders, prompts or [prompt.ids] * len(senders), strict=True):
            each = next(received[sender])
            completions.append(each if isinstance(each, Completion) else unpacked(each, prompt_ids))
        return replace(group, prompt=prompt, completions=completions)

    def _generate_share(self) -> None:
        nothing = [None] * comm.world_size()
        *share, self.local.version = comm.exchange(nothing, "requests")[0]
        completions, sampling = generate_share(self.policy, self.local, *share), share[1]
        reply = list(map(packed, completions))
        if sampling.tokens_stay:
            first = len(self.sampled_here)
            self.sampled_here += completions
            for index, completion in enumerate(completions):
                tokens = TokensElsewhere(comm.rank(), first + index, len(completion.ids))
                reply[index] = (tokens, tokens, *reply[index][2:-1], None)  # routes and sets stay too
        comm.exchange([reply, *nothing[1:]], "completions")


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


def with_groups(rollout: Rollout, groups: list[Group], minibatch_sizes: tuple[int, ...]) -> Rollout:
    dealt = replace(rollout, groups=groups, minibatch_sizes=minibatch_sizes)
    dealt.reward = weighted_sum(dealt.rewards, dealt.weights)
    return dealt


# Completions on their way between ranks.


class TokensElsewhere(Sequence[Any]):
    """Stand-in on rank 0 for the ids or log-probs of a completion that stay on another rank; has only a length."""

    def __init__(self, rank: int, number: int, length: int) -> None:
        self.rank, self.number, self.length = rank, number, length  # index into sampled_here of that rank

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError(
            f"tokens of a completion: rank {self.rank} sampled them, and rank 0 has only their number "
            f"({self.length}); read them from the rollout that rollouts.next() returns, on the rank that trains on them"
        )


class AssignedGroup(NamedTuple):
    """A group for one rank, without its completions."""

    group: Group  # without a prompt on other ranks, which have the data
    senders: list[int]  # for each completion, the rank that sends it
    prompts: list[list[int]] | None  # for each completion, its prompt ids; None: the ids of the row


class Share(NamedTuple):
    """Everything that rank 0 sends to one rank for a step."""

    groups: list[AssignedGroup]
    minibatch_sizes: tuple[int, ...]
    names: list[str]  # K reward names
    weights: list[float]  # K reward weights
    to_send: dict[int, list[Any]]  # receiver -> completions: on rank 0 themselves, elsewhere indices into sampled_here


def shares_of(rollout: Rollout, dealt: Sequence[Sequence[Sequence[int]]]) -> list[Share]:
    """Return the share of each rank."""
    weights = rollout.weights.tolist()
    to_send: list[dict[int, list[Any]]] = [{} for _ in range(comm.world_size())]
    shares = []
    for receiver in range(comm.world_size()):
        minibatches = dealt[receiver // comm.context_size()]
        groups = []
        for group in [rollout.groups[index] for indices in minibatches for index in indices]:
            senders = []
            for c in group.completions:
                sender, each = (c.ids.rank, c.ids.number) if isinstance(c.ids, TokensElsewhere) else (0, c)
                senders.append(sender)
                to_send[sender].setdefault(receiver, []).append(each)
            sent = group if receiver == 0 else replace(group, prompt=NO_PROMPT, completions=[], extra=None)
            groups.append(AssignedGroup(sent, senders, other_prompts(group)))
        shares.append(Share(groups, tuple(map(len, minibatches)), rollout.names, weights, to_send[receiver]))
    return shares


def num_tokens(c: Completion) -> int:
    return len(c.prompt_ids) + len(c.ids) + sum(map(num_tokens, c.branches))


def other_prompts(group: Group) -> list[list[int]] | None:
    """Return the prompt ids of each completion, equal ids as one object; None if all are the ids of the row."""
    known = [group.prompt.ids]
    for c in group.completions:
        if c.prompt_ids not in known:
            known.append(c.prompt_ids)
    return [known[known.index(c.prompt_ids)] for c in group.completions] if len(known) > 1 else None


def packed(c: Completion) -> tuple[Any, ...]:
    """Return the fields of a completion, except its prompt, as plain values.

    Columns and messages that are not JSON are dropped: rewards have already been computed.
    """
    columns = {name: json.loads(json.dumps(value)) for name, value in c.columns.items() if is_json(value)}
    messages = json.loads(json.dumps(c.messages)) if c.messages is not None and is_json(c.messages) else None
    branches = [(branch.prompt_ids, packed(branch)) for branch in c.branches]
    return c.ids, c.logps, c.finish_reason, c.text, c.versions, c.mask, messages, columns, branches, (c.routes, c.sets)


def unpacked(fields: Sequence[Any], prompt_ids: list[int]) -> Completion:
    ids, logps, finish_reason, text, versions, mask, messages, columns, branches, arrays = fields
    routes, sets = arrays or (None, None)
    return Completion(
        prompt_ids=prompt_ids, ids=ids, logps=logps, finish_reason=finish_reason, text=text, versions=versions,
        mask=mask, messages=messages, columns=columns, routes=routes, sets=sets,
        branches=tuple(unpacked(part, prompt) for prompt, part in branches),
    )  # fmt: skip


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
        world = comm.world_size()
        firsts = [len(requests) * r // world for r in range(world + 1)]
        shares = [[requests[first:stop]] for first, stop in itertools.pairwise(firsts)]
        return list(itertools.chain(*self._generate(shares, sampling, [(1, [])] * world)))

    def generate_groups(
        self, groups: Sequence[Sequence[Request]], sampling: Sampling, *, count: int, due: Collection[int] = ()
    ) -> list[list[Completion]]:
        """Distribute the groups over the ranks round-robin; each stops when its share of `count` has finished."""
        world = comm.world_size()
        shares = [groups[r::world] for r in range(world)]
        limits = [(len(range(r, count, world)), [g // world for g in due if g % world == r]) for r in range(world)]
        sampled = list(map(iter, self._generate(shares, sampling, limits)))
        return [[next(sampled[g % world]) for _ in group] for g, group in enumerate(groups)]

    def _generate(
        self,
        shares: Sequence[Sequence[Sequence[Request]]],  # groups of each rank
        sampling: Sampling,
        limits: Sequence[tuple[int, list[int]]],  # of each rank: count and due
    ) -> list[list[Completion]]:
        """Return the completions of each rank."""
        comm.send_command("generate")
        # A pickle has each prompt once, because requests for the same prompt have the same list.
        asked = [
            [[(r.prompt_ids, r.seed, r.max_tokens, r.so_far) for r in group] for group in share] for share in shares
        ]
        asked_of = [(groups, sampling, *limit, self.version) for groups, limit in zip(asked, limits, strict=True)]
        comm.exchange(asked_of, "requests")
        self.local.version = self.version
        completions = [generate_share(self.policy, self.local, asked[0], sampling, *limits[0])]
        replies = comm.exchange([None] * len(shares), "completions")
        for share, reply in zip(shares[1:], replies[1:], strict=True):
            requests = itertools.chain(*share)
            completions.append([unpacked(each, r.prompt_ids) for each, r in zip(reply, requests, strict=True)])
        return completions

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, more: Callable[[], Sequence[Request]] = tuple
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Yield all completions together: ranks send their shares when all of them are done. `more` must wait."""
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
    policy: Policy,
    local: LocalEngine,
    asked: Sequence[Sequence[Asked]],  # groups
    sampling: Sampling,
    count: int,
    due: Sequence[int],
) -> list[Completion]:
    """Sample this rank's share. No conversation is cached: the next turn may go to another rank."""
    groups = [
        [Request(prompt_ids=ids, seed=seed, max_tokens=limit, so_far=so_far) for ids, seed, limit, so_far in group]
        for group in asked
    ]
    if policy.is_sharded and comm.any_rank(local.needs_copy()):
        with comm.inside("weights for sampling"):
            local.choose_forward(lambda: gathered_head(policy))
            local.refresh(always=True)
    with contextlib.nullcontext() if local.has_copy else gathered_weights(policy):
        return list(itertools.chain(*local.generate_groups(groups, sampling, count=count, due=due)))


def logps_on_all_ranks(
    policy: Policy, local: LocalEngine, sequences: Sequences, temperature: float
) -> list[list[float]]:
    """Log-probs computed by all ranks together; only the current block and the head are gathered."""
    with comm.inside("log-probs to compare"), gathered_head(policy):
        return local.logps(sequences, temperature)


# Rewards.


class AllRanksRewards(Rewards):
    """--reward-on-all-ranks: every rank calls the reward functions on a share of the groups.

    A function sees whole groups, but not the whole batch, as with --reward-num-workers. Prompts are sent as indices:
    every rank has the data.
    """

    def __init__(self, rewards: Rewards) -> None:
        vars(self).update(vars(rewards))
        self.handlers = {"reward": self._score_share}
        self._prompts: list[Prompt] = []
        for function in self.functions:
            if function.in_process and function.spec != "env":
                raise UserError(
                    f"reward_on_all_ranks=True: {function.setting}={function.spec} has state, a model or connections, "
                    "so it runs only on rank 0; remove --reward-on-all-ranks"
                )

    def check_columns(self, prompts: Sequence[Prompt], what: str, added: Sequence[str] | None = ()) -> None:
        super().check_columns(prompts, what, added)
        self._prompts += prompts

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int = 0) -> Any:
        """Compute the batch's rewards now, on all ranks; the future has the result."""
        sent = [(*packed(c)[:-2], [], None) for c in completions]  # rewards need no branches, routes and sets
        for completion, (*_, messages, columns, _, _) in zip(completions, sent, strict=True):
            lost = [name for name in completion.columns if name not in columns]
            if lost or (messages is None and completion.messages is not None):
                raise UserError(
                    f"reward_on_all_ranks=True: {lost[0] if lost else 'messages'!r} of a completion is not JSON, so "
                    "other ranks cannot receive it; remove --reward-on-all-ranks"
                )
        comm.send_command("reward")
        index = {id(prompt): i for i, prompt in enumerate(self._prompts)}
        rows = [index[id(prompt)] for prompt in prompts]
        spans = shards(prompts, comm.world_size())
        spans += [(0, 0)] * (comm.world_size() - len(spans))
        tables = self._score_share([(rows[low:high], sent[low:high], step) for low, high in spans])
        errors = [table for table in tables if isinstance(table, str)]
        if errors:
            raise UserError(errors[0])
        self._failed += sum(table.failed for table in tables[1:])
        return finished(joined(tables))

    def _score_share(self, shares: Sequence[Any] | None = None) -> list[Any]:
        """Return on rank 0 the table of each rank, or the message of its error."""
        nothing: list[Any] = [None] * comm.world_size()
        rows, sent, step = comm.exchange(shares or nothing, "completions to reward")[0]
        prompts = [self._prompts[row] for row in rows]
        completions = [unpacked(fields, prompt.ids) for fields, prompt in zip(sent, prompts, strict=True)]
        if not comm.is_main():
            self._log = comm.log_once  # the run's log of other ranks is not shown
        try:
            scored: RewardTable | str = super().submit(prompts, completions, step=step).result()
        except UserError as error:  # rank 0 raises it
            scored = str(error)
        return comm.exchange([scored, *nothing[1:]], "rewards")


def joined(tables: Sequence[RewardTable]) -> RewardTable:
    """Join the tables of consecutive rows."""
    logged: dict[str, list[float]] = {}
    for table in tables:
        for name, values in table.logged.items():
            logged.setdefault(name, []).extend(values)
    extra = [row for table in tables for row in table.extra or [{}] * len(table.values)]
    gaps = [
        Gap(sum(g.none for g in each), sum(g.failed for g in each), next((g.last for g in each[::-1] if g.last), None))
        for each in zip(*(table.gaps for table in tables if table.gaps), strict=True)
    ]
    return RewardTable(
        names=tables[0].names, weights=tables[0].weights, failed=sum(table.failed for table in tables), logged=logged,
        values=list(itertools.chain.from_iterable(table.values for table in tables)),
        totals=list(itertools.chain.from_iterable(table.totals for table in tables)),
        extra=extra if any(extra) else None, gaps=gaps,
    )  # fmt: skip
