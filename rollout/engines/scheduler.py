"""Continuous batching: assign requests to decode rows and cache pages, and detect their ends.

    scheduler = Scheduler(decoder, steps_per_sync=8, lag=1)
    for ended in scheduler.run(jobs, sampling, stop): ...        # more jobs than rows are allowed; each ends once

The tokens of a row are a prefix and the row's own tokens. The prefix is the prompt without its last token; requests
with the same prompt share its pages. The own tokens are the last prompt token, which predicts the first sampled token,
and the sampled tokens. So a prefill never needs logits, and the first token is drawn like any other.

The decoder runs windows of `steps_per_sync` tokens. Up to `lag` windows run on the device while the host reads the
window before them, looks for stop strings and plans the next window, so the device need not wait. A row that ends by a
stop is then found `lag` windows late, and what it sampled since is dropped; a row at its limit leaves immediately. The
device runs everything in order, so pages and states are reused as soon as the host frees them. Plans depend on the
windows read, never on time, so a run is repeatable, unless jobs arrive while it runs.

If pages run out, the scheduler evicts unused prefixes, then idle conversations, then (after reading all windows) the
row admitted last. That row returns to the queue with its sampled tokens, which are prefilled again later. One row
always fits (the engine rejects longer requests), so the oldest row always makes progress.

If the model has layers with a state, a prefix also keeps the state after its tokens, which is copied to each row that
starts from it. Conversations keep only their prefix: a row may have run past its end, so its last state is not usable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.decode.attention import TILE_ROWS
from kernels.decode.draw_set import GAP
from rollout import sets
from rollout.engine import Sampling
from rollout.engines.decoder import Decoder, PrefillJob, RowState, TopFilter, Window
from rollout.engines.stop import StopCheck
from rollout.routes import join


@dataclass(eq=False)
class Prefix:
    """Cached prompt tokens, shared by rows."""

    ids: tuple[int, ...]
    pages: list[int]
    state: int = 0  # index of the state after these tokens
    num_users: int = 0  # rows and cached conversations
    routes: list[tuple[int, np.ndarray]] = field(default_factory=list)  # (start, experts), if recorded


@dataclass(eq=False)
class Job:
    """One request and the state of its row."""

    prompt_ids: list[int]
    seed: int
    limit: int  # maximum tokens to sample
    conversation: Hashable | None = None
    index: int = 0  # request index
    ids: list[int] = field(default_factory=list)  # sampled
    logps: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # of tokens sampled before this run
    stopped: bool = False
    prefix: Prefix | None = None
    own_first: list[int] = field(default_factory=list)  # prompt tokens after the prefix
    pages: list[int] = field(default_factory=list)  # pages of the row's own tokens
    num_cached: int = 0  # own tokens in the cache
    in_flight: int = 0  # steps in windows not read yet: at most this many more tokens are sampled
    prefix_routes: list[tuple[int, np.ndarray]] = field(default_factory=list)  # (start, experts), if recorded
    own_routes: list[tuple[int, np.ndarray]] = field(default_factory=list)
    own_sets: list[np.ndarray] = field(default_factory=list)  # of the sampled tokens, if recorded

    @property
    def own(self) -> list[int]:
        return self.own_first + self.ids

    @property
    def num_own(self) -> int:
        return len(self.own_first) + len(self.ids)

    @property
    def routes(self) -> np.ndarray | None:  # (prompt and sampled tokens, L, k)
        return join([*self.own_routes, *self.prefix_routes], len(self.prompt_ids) + len(self.ids))

    @property
    def sets(self) -> np.ndarray | None:
        return sets.join(self.own_sets, len(self.ids))

    @property
    def left(self) -> int:
        return self.limit - len(self.ids)

    @property
    def has_ended(self) -> bool:
        return self.stopped or self.left == 0


@dataclass(eq=False)
class CachedConversation:
    """Cached tokens of a conversation that may continue."""

    prefix: Prefix
    own: list[int]  # cached tokens after the prefix
    pages: list[int]


class Scheduler:
    def __init__(
        self,
        decoder: Decoder,
        *,
        steps_per_sync: int,  # decode steps of a window
        lag: int = 0,  # windows that run while the host reads an earlier one
    ) -> None:
        self.decoder, self.steps_per_sync, self.lag = decoder, steps_per_sync, lag
        self.free = list(range(decoder.cache.num_pages - 1, 0, -1))  # page 0 is scratch
        self.prefixes: dict[tuple[int, ...], Prefix] = {}
        self.conversations: dict[Hashable, CachedConversation] = {}  # idle conversations, oldest first
        zero = decoder.cache.zero
        self.free_states = list(range(zero + decoder.num_prefixes, zero, -1))
        self.num_evicted = 0

    def run(
        self,
        jobs: Sequence[Job],
        sampling: Sampling,
        stop: StopCheck,
        more: Callable[[], Iterable[Job]] = tuple,  # jobs that have arrived since the last call
    ) -> Iterator[list[Job]]:
        """Sample all jobs to their end, including jobs that arrive during the run; yield jobs as they end."""
        waiting, active = deque(jobs), []
        windows: deque[tuple[list[Job], int, Window]] = deque()  # jobs, steps; not read yet
        num_old = 0  # rows that were in the last window
        stop_ids = sorted(stop.stop_ids)
        top = TopFilter(sampling.top_k, sampling.top_p, sampling.min_p, sampling.set_size)
        if sampling.temperature == 0:
            top = TopFilter()
        try:
            while True:
                waiting.extend(more())
                if not (waiting or active or windows):
                    break
                if len(windows) <= self.lag:
                    self._admit(waiting, active, must=not windows)
                    steps = min(self.steps_per_sync, max((job.left - job.in_flight for job in active), default=0))
                    if active and self._grow_rows(waiting, active, steps, may_requeue=not windows):
                        rows = self._row_state(active, sampling.temperature)
                        count = min(num_old, len(active))
                        window = self.decoder.launch(rows, count, stop_ids, top, steps, sampling.temperature)
                        windows.append((list(active), steps, window))
                        for job in active:
                            job.in_flight += steps
                        full = {job: None for job in active if job.in_flight >= job.left}
                        num_old = self._drop_rows(active, full, len(active))
                        continue
                ended = self._collect(*windows.popleft(), stop)
                num_old = self._drop_rows(active, ended, num_old)
                for job in ended:
                    self._finish(job)
                if ended:
                    yield list(ended)
        finally:
            if active or windows:  # interrupted: tokens that were not read are lost
                self.decoder.wait()
            for job in {*active, *(job for jobs, *_ in windows for job in jobs)}:
                self._release(job)
                job.in_flight = 0
            self._drop_prefixes()

    def _drop_rows(self, active: list[Job], leaving: dict[Job, None], num_old: int) -> int:
        """Remove jobs from the rows; return how many of the first `num_old` rows remain."""
        kept = [row for row, job in enumerate(active) if job not in leaving]
        self.decoder.keep_rows(kept)
        active[:] = [active[row] for row in kept]
        for job in leaving:
            if job.conversation is None:
                self._release(job)
        return sum(row < num_old for row in kept)

    def forget(self, conversations: Iterable[Hashable] | None = None) -> None:
        """Drop cached conversations. None: all of them, as after a weight update."""
        for key in list(self.conversations) if conversations is None else conversations:
            cached = self.conversations.pop(key, None)
            if cached is not None:
                self.free += cached.pages
                cached.prefix.num_users -= 1
        self._drop_prefixes()

    # Pages.

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.decoder.page)

    def _take_pages(self, count: int) -> list[int]:
        assert count <= len(self.free), f"{count} pages needed, {len(self.free)} free"
        first = len(self.free) - count
        taken = self.free[first:]
        del self.free[first:]
        return taken

    def _drop_prefixes(self) -> None:
        for ids, prefix in list(self.prefixes.items()):
            if prefix.num_users == 0:
                self.free += prefix.pages
                self.free_states += [prefix.state] * self._needs_state(ids)
                del self.prefixes[ids]

    def _needs_state(self, ids: Sequence[int]) -> bool:
        """Return whether a prefix of these tokens has a state of its own: not the zero state."""
        return self.decoder.has_states and len(ids) > 0

    def _evict(self, count: int, states: int = 0) -> bool:
        """Evict unused prefixes and idle conversations until this many pages and states are free; return success."""

        def fits() -> bool:
            return len(self.free) >= count and len(self.free_states) >= states

        if not fits():
            self._drop_prefixes()
        while not fits() and self.conversations:
            self.forget([next(iter(self.conversations))])
        return fits()

    def _grow_rows(self, waiting: deque[Job], active: list[Job], steps: int, *, may_requeue: bool) -> bool:
        """Give every row pages for its next tokens. If pages run out, requeue the last rows or return False."""
        row, spare = 0, 0
        while row < len(active):
            job = active[row]
            needed = self.pages_for(job.num_own + min(job.in_flight + steps, job.left) - 1) - len(job.pages)
            while needed > 0 and not self._evict(needed + (spare if len(active) > 1 else 0)):
                if not may_requeue:
                    return False
                assert len(active) > 1, f"a single row needs {needed} more pages, {len(self.free)} free"
                spare = len(active)  # a page for each row, because requeueing stops the overlap
                last = active.pop()
                self._release(last)
                waiting.appendleft(last)
                self.num_evicted += 1
                if last is job:
                    return True
            if needed > 0:
                job.pages += self._take_pages(needed)
            row += 1
        return True

    # Rows.

    def _admit(self, waiting: deque[Job], active: list[Job], *, must: bool) -> None:
        """Move waiting jobs into free rows (`must`: at least one into empty rows) and prefill their uncached tokens."""
        fills: list[PrefillJob] = []
        copies: list[tuple[int, int]] = []  # states of prefixes to rows
        while waiting and len(active) < self.decoder.max_rows:
            job = waiting[0]
            self._continue_conversation(job)
            prefix = self.prefixes.get(tuple(job.prompt_ids[:-1]))
            if job.prefix is None and prefix is not None:
                self._attach(job, prefix)  # now, so that _evict() keeps it
            prefix_pages = 0 if job.prefix else self.pages_for(len(job.prompt_ids) - 1)
            num_own = job.num_own if job.prefix else 1 + len(job.ids)
            own_pages = self.pages_for(num_own) - len(job.pages)
            reserve = len(active)  # each row may need a page before the next host sync
            states = int(job.prefix is None and self._needs_state(job.prompt_ids[:-1]))
            if not self._evict(prefix_pages + own_pages + reserve, states) and (active or not must):
                self._release(job)
                break
            waiting.popleft()
            if job.prefix is None:
                self._attach(job, self._new_prefix(job.prompt_ids[:-1], fills))
            prefix = job.prefix
            job.pages += self._take_pages(self.pages_for(job.num_own) - len(job.pages))
            uncached = job.own[job.num_cached : -1]  # the first decode step runs the last token
            if uncached:
                start, slots = len(prefix.ids) + job.num_cached, self._slots(job)[:-1]
                fills.append(
                    PrefillJob(uncached, start, slots, job.own_routes, source=prefix.state, target=len(active))
                )
                job.num_cached += len(uncached)
            else:
                copies.append((prefix.state, len(active)))
            active.append(job)
        if fills:
            self._prefill_ahead(waiting, fills)
            self.decoder.prefill(fills)
        self.decoder.copy_states([source for source, _ in copies], [row for _, row in copies])

    def _attach(self, job: Job, prefix: Prefix) -> None:
        job.prefix, job.own_first = prefix, job.prompt_ids[len(prefix.ids) :]
        job.prefix_routes = prefix.routes
        prefix.num_users += 1

    def _new_prefix(self, ids: Sequence[int], fills: list[PrefillJob]) -> Prefix:
        zero = self.decoder.cache.zero
        state = self.free_states.pop() if self._needs_state(ids) else zero
        prefix = Prefix(tuple(ids), self._take_pages(self.pages_for(len(ids))), state)
        self.prefixes[prefix.ids] = prefix
        slots = self._page_slots(prefix.pages, len(ids))
        fills.append(PrefillJob(list(ids), 0, slots, prefix.routes, source=zero, target=state))
        return prefix

    def _prefill_ahead(self, waiting: deque[Job], fills: list[PrefillJob]) -> None:
        """Add prompts of waiting jobs: a small prefill takes as long as a large one."""
        room = self.decoder.prefill_tokens - sum(len(fill.ids) for fill in fills)
        spare = len(self.free) // 2
        for job in waiting:
            ids = tuple(job.prompt_ids[:-1])
            pages = self.pages_for(len(ids))
            if room < len(ids) or spare < pages or len(self.free_states) < self._needs_state(ids):
                return
            if ids not in self.prefixes and job.conversation is None and not job.ids:
                self._new_prefix(ids, fills)
                room, spare = room - len(ids), spare - pages

    def _continue_conversation(self, job: Job) -> None:
        """Reuse the cached tokens of this conversation's earlier turns, if the prompt extends them."""
        if job.conversation not in self.conversations or job.prefix is not None:
            return
        cached = self.conversations.pop(job.conversation)
        start, count = len(cached.prefix.ids), len(cached.own)
        own = job.prompt_ids[start:]
        if tuple(job.prompt_ids[:start]) != cached.prefix.ids or own[:count] != cached.own or own == cached.own:
            self.free += cached.pages
            cached.prefix.num_users -= 1
            return
        job.prefix, job.own_first, job.pages, job.num_cached = cached.prefix, own, cached.pages, count

    def _release(self, job: Job) -> None:
        """Free a row's pages; the job keeps its sampled tokens."""
        self.free += job.pages
        job.pages, job.num_cached = [], 0
        if job.prefix is not None:
            job.prefix.num_users -= 1
            job.prefix, job.own_first = None, []

    def _finish(self, job: Job) -> None:
        if job.conversation is None:
            return
        self.forget([job.conversation])  # another branch of the same conversation
        job.num_cached = 0 if self.decoder.has_states else min(job.num_cached, job.num_own)
        assert job.prefix is not None
        keep = self.pages_for(job.num_cached)
        self.free += job.pages[keep:]
        cached = CachedConversation(job.prefix, job.own[: job.num_cached], job.pages[:keep])
        self.conversations[job.conversation] = cached
        job.prefix, job.pages = None, []

    def _page_slots(self, pages: Sequence[int], count: int) -> np.ndarray:  # (count,) int64
        page = self.decoder.page
        return (np.asarray(pages, np.int64)[:, None] * page + np.arange(page)).reshape(-1)[:count]

    def _slots(self, job: Job) -> np.ndarray:  # (tokens,) int64 prefix and own tokens
        assert job.prefix is not None
        prefix = self._page_slots(job.prefix.pages, len(job.prefix.ids))
        return np.concatenate([prefix, self._page_slots(job.pages, job.num_own)])

    # One run of the decoder.

    def _row_state(self, active: Sequence[Job], temperature: float) -> RowState:
        tables = [job.prefix.pages + job.pages for job in active]
        table = np.zeros((len(active), max(map(len, tables))), np.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = pages
        return RowState(
            table=table,
            prefix_len=np.array([len(job.prefix.ids) for job in active], np.int32),
            own_len=np.array([job.num_own for job in active], np.int32),
            token=np.array([job.ids[-1] if job.ids else job.own_first[-1] for job in active], np.int64),
            seed=np.array([job.seed for job in active], np.int64),
            drawn=np.array([len(job.ids) for job in active], np.int32),
            left=np.array([job.left for job in active], np.int32),
            temperature=np.full(len(active), temperature, np.float32),
            tiles=tiles_of([job.prefix for job in active]),
        )

    def _collect(self, jobs: Sequence[Job], steps: int, window: Window, stop: StopCheck) -> dict[Job, None]:
        """Append sampled tokens to the jobs; return the jobs that have ended."""
        ids, logps, routes, kept = window.read()
        counts = (ids >= 0).sum(axis=0).tolist()
        ended: dict[Job, None] = {}  # in row order
        sampled = zip(jobs, counts, ids.T.tolist(), logps.T.tolist(), strict=True)
        for row, (job, count, new_ids, new_logps) in enumerate(sampled):
            job.in_flight -= steps
            if job.stopped:  # in an earlier window
                continue
            before = len(job.ids)
            if routes is not None:  # the first step ran the token before the first sampled token
                job.own_routes.append((len(job.prompt_ids) + before - 1, routes[:count, row].copy()))
            if kept is not None:
                own = kept[:count, row]
                job.own_sets.append(own[own != GAP])
            job.ids += new_ids[:count]
            job.logps += new_logps[:count]
            length = stop.end(job.ids, before)
            job.num_cached = job.num_own - 1
            if length is not None:
                job.stopped = True
                del job.ids[length:], job.logps[length:]
            if job.has_ended:
                ended[job] = None
        return ended


def tiles_of(prefixes: Sequence[Prefix]) -> np.ndarray:  # (B, TILE_ROWS) int32
    """Group rows with the same prefix into tiles of up to TILE_ROWS; unused entries are -1."""
    tiles = np.full((len(prefixes), TILE_ROWS), -1, np.int32)
    open_tile: dict[int, tuple[int, int]] = {}  # prefix id -> (tile being filled, its row count)
    count = 0
    for row, prefix in enumerate(prefixes):
        tile, size = open_tile.get(id(prefix), (count, TILE_ROWS))
        if size == TILE_ROWS:
            tile, size, count = count, 0, count + 1
        tiles[tile, size] = row
        open_tile[id(prefix)] = tile, size + 1
    return tiles
