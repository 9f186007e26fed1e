"""Random requests, turns and interrupts over few pages, with a toy model that hashes its input."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from rollout.engine import Sampling
from rollout.engines.local import cache_pages
from rollout.engines.scheduler import Job, Scheduler
from rollout.engines.stop import StopCheck


class ToyDecoder:
    """Each cache slot stores a token; the next token is a hash of the row's tokens, the seed and the step.

    A state is the tuple of the tokens that it has seen; it must equal the tokens in the cache. A window runs when it is
    launched, as on a device that runs everything in order, and is read later.
    """

    def __init__(self, num_pages: int, page: int, max_rows: int, num_prefixes: int) -> None:
        self.cache = SimpleNamespace(num_pages=num_pages, zero=max_rows)
        self.page, self.max_rows, self.num_prefixes, self.has_states = page, max_rows, num_prefixes, num_prefixes > 0
        self.prefill_tokens, self.tokens = 2**13, np.full(num_pages * page, -1)
        self.states: list[tuple[int, ...]] = [()] * (max_rows + 1 + num_prefixes)
        self.rows: list[list[int]] = []  # own_len, token, drawn, left of each row

    def prefill(self, fills) -> None:
        for fill in sorted(fills, key=lambda fill: fill.start > 0):
            assert len(fill.slots) == fill.start + len(fill.ids) == len(set(fill.slots.tolist())), "one slot per token"
            self.tokens[fill.slots[fill.start :]] = fill.ids
            self.states[fill.target] = self.states[fill.source] + tuple(fill.ids)

    def copy_states(self, source, target) -> None:
        for index, state in zip(target, [self.states[i] for i in source], strict=True):
            self.states[index] = state

    def wait(self) -> None:
        pass

    def keep_rows(self, kept) -> None:
        self.rows = [self.rows[row] for row in kept if row < len(self.rows)]
        self.copy_states(kept, range(len(kept)))

    def launch(self, rows, num_old, stop_ids, top, steps, temperature):
        ids = np.full((steps, len(rows.token)), -1)
        new = zip(rows.own_len, rows.token, rows.drawn, rows.left, strict=True)
        self.rows[num_old:] = list(map(list, new))[num_old:]
        for row, state in enumerate(self.rows):
            before, pages, seed = rows.prefix_len[row], rows.table[row].astype(np.int64), rows.seed[row]
            split = -(-before // self.page) * self.page
            for step in range(steps):
                own, token, drawn, left = state
                if left == 0:
                    self.states[row] += (-1,)  # a row that has ended runs on
                    continue
                at = np.r_[np.arange(before), split + np.arange(own)]
                assert pages[at // self.page].all(), "a row must not use the scratch page"
                slots = pages[at // self.page] * self.page + at % self.page
                self.tokens[slots[-1]] = token
                self.states[row] += (int(token),)
                assert not self.has_states or self.states[row] == tuple(self.tokens[slots].tolist())
                ids[step, row] = new_id = next_token(self.tokens[slots].tolist(), seed, drawn)
                left = 0 if new_id in stop_ids else left - 1
                state[:] = [own + 1, new_id, drawn + 1, left] if left else [own, token, drawn, 0]
        assert not self.has_states or self.states[self.cache.zero] == ()
        return SimpleNamespace(read=lambda: (ids, np.zeros(ids.shape, np.float32), None, None))


def next_token(tokens: list[int], seed: int, step: int) -> int:
    return hash((*tokens, int(seed), int(step))) % 50


def end(ids: list[int], before: int) -> int | None:
    """A stop id, or a "string" of two ids below 10."""
    ends = (n + 1 for n in range(before, len(ids)) if ids[n] == 3 or (n and max(ids[n - 1 : n + 1]) < 10))
    return next(ends, None)


@pytest.mark.parametrize(("steps_per_sync", "lag"), [(1, 0), (1, 2), (3, 1), (16, 0), (16, 1)])
def test_random_requests_over_few_pages(steps_per_sync, lag):
    for case in range(25 if lag < 2 else 8):
        rng, scheduler = random.Random(1000 * steps_per_sync + case), None
        page, rows, spare = rng.choice([2, 4, 16]), rng.choice([1, 2, 3, 8]), rng.choice([0, 0, 1, 4])
        prefixes = rng.choice([0, 1, 2, 8])  # 0: no states
        heads = [rng.choices(range(50), k=rng.choice([1, 2, 5, 17, 40])) for _ in range(3)]
        turns = [(rng.choice([None, key, key]), rng.choice(heads)) for key in range(rng.randint(1, 12))]
        for _ in range(3):
            asked = turns * rng.choice([1, 2])  # two branches of each conversation
            jobs = [Job(ids, rng.randrange(99), rng.choice([1, 7, 40]), key) for key, ids in asked]
            least, _ = cache_pages(jobs, page=page, rows=rows)
            if scheduler is None or scheduler.decoder.cache.num_pages < least:
                decoder = ToyDecoder(least + spare, page, rows, prefixes)
                scheduler = Scheduler(decoder, steps_per_sync=steps_per_sync, lag=lag)
            done, run = [], scheduler.run(jobs, Sampling(), SimpleNamespace(stop_ids={3}, end=end))
            for ended in run:
                done += ended
                if rng.random() < 0.05:
                    break
            run.close()
            for job in done:
                ids: list[int] = []
                while len(ids) < job.limit and end(ids, 0) is None:
                    ids.append(next_token(job.prompt_ids + ids, job.seed, len(ids)))
                assert job.ids == ids
            owners = [*scheduler.conversations.values(), *scheduler.prefixes.values()]
            pages = sorted(scheduler.free + [number for owner in owners for number in owner.pages])
            assert pages == list(range(1, scheduler.decoder.cache.num_pages)), "every page is free or used once"
            used = [prefix.state for ids, prefix in scheduler.prefixes.items() if ids] if prefixes else []
            assert sorted(scheduler.free_states + used) == list(range(rows + 1, rows + 1 + prefixes))
            last = [(job.conversation, job.prompt_ids + job.ids) for job in done] or turns
            turns = [(key, ids[: rng.choice([None, None, -1, 9])] + rng.choice([[], [5, 6]])) for key, ids in last[:20]]
            turns = [(key, ids or [1]) for key, ids in turns]
        scheduler.forget()
        assert len(scheduler.free) == scheduler.decoder.cache.num_pages - 1


def test_interrupted_runs_end_at_the_stop_strings_of_whole_texts(tokenizer, monkeypatch):
    """Stop strings and characters of several bytes cross windows. Unfinished jobs go on in the next run; others arrive
    during a run.
    """
    alphabet = [*tokenizer("ab é€")["input_ids"], 256, 257]
    plain, rng = next_token, random.Random(0)
    monkeypatch.setitem(globals(), "next_token", lambda *state: alphabet[plain(*state) % len(alphabet)])
    for _ in range(100):
        strings = rng.sample(["ab", "é", "€a", "a b", "aaa", "bé ", "<eos>"], rng.choice([0, 1, 3]))
        sampling = Sampling(stop=tuple(strings), stop_ids=tuple(rng.sample([256, alphabet[0]], rng.choice([0, 1]))))
        steps, page, rows = rng.choice([1, 2, 5, 8]), rng.choice([2, 16]), rng.choice([1, 2, 8])
        prompts = [rng.choices(alphabet, k=rng.choice([1, 2, 17])) for _ in range(3)]
        jobs = [Job(rng.choice(prompts), n, rng.choice([1, steps, 2 * steps, 23]), index=n) for n in range(9)]
        least, _ = cache_pages(jobs, page=page, rows=rows)
        decoder = ToyDecoder(least + rng.choice([0, 1, 5]), page, rows, rng.choice([0, 1, 4]))
        scheduler = Scheduler(decoder, steps_per_sync=steps, lag=rng.choice([0, 1, 2]))
        stop, late = StopCheck(tokenizer, sampling), jobs[rng.choice([3, 9]) :]
        while left := [job for job in jobs if not job.has_ended]:
            started = [Job(x.prompt_ids, x.seed, x.limit, index=x.index, ids=[*x.ids], logps=[*x.logps]) for x in left]
            for job in started:
                jobs[job.index] = job
            late = [jobs[job.index] for job in late]
            run = scheduler.run(
                [job for job in started if job not in late], sampling, stop,
                lambda late=late: [late.pop()] if late and rng.random() < 0.5 else [],
            )  # fmt: skip
            for ended in run:
                assert all(job.has_ended for job in ended)
                if rng.random() < 0.2:
                    break
            run.close()
            late = []
        for job in jobs:
            ids, text = [], ""
            while len(ids) < job.limit and not (ids and ids[-1] in stop.stop_ids):
                if any(string in text for string in stop.strings):
                    break
                ids.append(next_token(job.prompt_ids + ids, job.seed, len(ids)))
                text = tokenizer.decode(ids, skip_special_tokens=True)
            is_stop = ids[-1] in stop.stop_ids or any(string in text for string in stop.strings)
            assert (job.ids, job.stopped, len(job.logps)) == (ids, is_stop, len(ids))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_window_is_read_while_the_next_ones_run(lag):
    """A row at its limit leaves without waiting: in two rows, requests of 4, 8 and 4 tokens need two windows of 4."""
    decoder, events = ToyDecoder(40, 4, 2, 0), []
    launch, scheduler = decoder.launch, Scheduler(decoder, steps_per_sync=4, lag=lag)

    def spy(rows, *options):
        window, number = launch(rows, *options), events.count("launch")
        events.append("launch")
        return SimpleNamespace(read=lambda: events.append(number) or window.read())

    decoder.launch, free = spy, scheduler.free
    jobs = [Job([5, 6], seed, limit) for seed, limit in enumerate([4, 8, 4])]
    for _ in scheduler.run(jobs, Sampling(), SimpleNamespace(stop_ids=set(), end=lambda ids, before: None)):
        pass
    assert events == (["launch", 0, "launch", 1] if lag == 0 else ["launch", "launch", 0, 1])
    assert [len(job.ids) for job in jobs] == [4, 8, 4]
    assert scheduler.free is free, "taking pages must not copy the list of free pages"
