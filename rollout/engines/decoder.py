"""Run decode steps over fixed tensors: one CUDA graph per batch size on a GPU, a plain call on a CPU.

    decoder = Decoder(forward, num_pages=4096, page=64, max_rows=512, max_pages=16, captures=True)
    decoder.prefill([PrefillJob(ids, start=0, slots=slots, routes=[])])    # keys and values of prompts
    window = decoder.launch(rows, 0, stop_ids, TopFilter(), steps=8)       # returns before the steps have run
    ids, logps, *_ = window.read()                                         # (8, B) each; id -1 after a row's end

A step reads and writes only tensors with fixed addresses, so a graph is captured once and replayed with new values. The
host writes the state of new rows (RowState), replays some steps and can write and replay more before it reads the
sampled tokens: rows continue from the state on the device, and nothing but read() waits for the device.
A row that ends during these steps, by a stop id or at its limit, repeats its last token until the host drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.decode.attention import TILE_ROWS, Rows
from kernels.decode.draw import draw
from kernels.decode.draw_set import GAP, draw_set
from kernels.decode.state import advance, locate
from rollout.engines.exact import ExactForward
from rollout.engines.forward import Cache, Forward, PrefillBatch

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
STOP_IDS = 16  # capacity for stop ids in a captured step; grows on demand
PREFILL_TOKENS = 2**13  # maximum tokens per prefill pass, including padding; longer rows run in parts
PREFILL_KEYS = 2**16  # maximum tokens of several rows that a pass attends to: their keys are gathered
PREFILL_STATES = 64  # maximum rows per prefill pass of a model with states, which are copied for the pass


class RowState(NamedTuple):
    """State of the decode rows: numpy arrays on the host, tensors of the same names on the device."""

    table: np.ndarray  # (B, pages) int32 prefix pages, then the row's own pages
    prefix_len: np.ndarray  # (B,) int32
    own_len: np.ndarray  # (B,) int32 including the token to run
    token: np.ndarray  # (B,) int64 the token to run
    seed: np.ndarray  # (B,) int64
    drawn: np.ndarray  # (B,) int32 number of tokens drawn with this seed
    left: np.ndarray  # (B,) int32 number of tokens that may still be drawn
    temperature: np.ndarray  # (B,) float32
    tiles: np.ndarray  # (B, TILE_ROWS) int32 rows that share a prefix


CARRIED = ("own_len", "token", "drawn", "left")  # what a step changes


class Window(NamedTuple):
    """Tokens of some decode steps, in host memory once the device has run them."""

    ids: torch.Tensor  # (steps, B) int64
    logps: torch.Tensor  # (steps, B) float32
    routes: torch.Tensor | None  # (steps, B, L, k)
    sets: torch.Tensor | None  # (steps, B, 1 + most) int32
    ended: torch.cuda.Event | None  # None: the steps have run

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Wait for the steps: ids (-1 after a row's end), log-probs, experts of the tokens run, and sets with gaps."""
        if self.ended is not None:
            self.ended.synchronize()
        routes, sets = (None if x is None else x.numpy() for x in (self.routes, self.sets))
        return self.ids.numpy(), self.logps.numpy(), routes, sets


class PrefillJob(NamedTuple):
    """Tokens of one row to write into the cache."""

    ids: list[int]
    start: int  # position of ids[0]; earlier tokens are in the cache
    slots: np.ndarray  # (start + len(ids),) int64 slots of all tokens of the row so far
    routes: list[tuple[int, np.ndarray]]  # the pass appends (start, (len(ids), L, k) experts), if they are recorded
    source: int = 0  # state to start from
    target: int = 0  # state to write

    def part(self, first: int, stop: int) -> PrefillJob:
        """Return tokens first to stop, or to the end. All parts of a row must run in order."""
        start = self.start + first
        source = self.target if first else self.source
        return PrefillJob(
            self.ids[first:stop], start, self.slots[: start + stop - first], self.routes, source, self.target
        )


class TopFilter(NamedTuple):
    """Sampling filters; fixed in a captured step."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    most: int = 0  # ids per token to record, for training; 0: none


def bucket_of(num_rows: int) -> int:
    """Return the smallest graph batch size for this many rows."""
    return next((bucket for bucket in BUCKETS if bucket >= num_rows), -(-num_rows // 512) * 512)


class Decoder:
    """Owns the cache and the row state on the device. The scheduler maps requests to rows."""

    def __init__(
        self,
        forward: Forward,
        *,
        num_pages: int,
        page: int,
        max_rows: int,
        max_pages: int,  # per row; if a row needs more, graphs are recaptured
        captures: bool,
        num_prefixes: int = 0,  # number of prompts whose states are kept, if the model has states
        prefill_tokens: int | None = None,  # per pass; None: PREFILL_TOKENS
    ) -> None:
        self.forward, self.page, self.max_rows, self.captures = forward, page, max_rows, captures
        self.exact = forward if isinstance(forward, ExactForward) else None  # log-probs follow after a window
        self.device, self.prefill_tokens = forward.shape.device, prefill_tokens or PREFILL_TOKENS
        self.has_states, self.num_prefixes = bool(forward.states), num_prefixes
        self.cache = Cache(
            forward.shape, num_pages, page, states=forward.states, rows=max_rows, num_prefixes=num_prefixes
        )
        self.graphs: dict[tuple[int, TopFilter], torch.cuda.CUDAGraph] = {}
        self._allocate_state(max_pages=max_pages, num_stop=STOP_IDS, steps=32)

    def _allocate_state(self, *, max_pages: int, num_stop: int, steps: int) -> None:
        self.graphs.clear()
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None
        rows, device = self.max_rows, self.device
        dtypes = {"prefix_len": torch.int32, "own_len": torch.int32, "token": torch.int64, "seed": torch.int64,
                  "drawn": torch.int32, "left": torch.int32, "temperature": torch.float32}  # fmt: skip
        state = {name: torch.zeros(rows, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        state["table"] = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        state["tiles"] = torch.full((rows, TILE_ROWS), -1, dtype=torch.int32, device=device)
        self.state = RowState(**state)  # type: ignore[arg-type]
        self.stop_ids = torch.full((num_stop,), -1, dtype=torch.int64, device=device)
        self.ids = torch.zeros(steps, rows, dtype=torch.int64, device=device)
        self.logps = torch.zeros(steps, rows, dtype=torch.float32, device=device)
        self.tick = torch.zeros(1, dtype=torch.int64, device=device)
        self.routes, shape = None, self.forward.route_shape
        if shape is not None:
            self.routes = torch.zeros(steps, rows, shape.num_layers, shape.top_k, dtype=shape.dtype, device=device)
        self.sets: torch.Tensor | None = None  # (steps, rows, width) int32, with GAP; allocated when first needed
        if self.exact is not None:
            self.hidden = torch.zeros(steps, rows, self.exact.width, dtype=self.exact.shape.dtype, device=device)

    # Prompts.

    @torch.no_grad()
    def prefill(self, fills: Sequence[PrefillJob]) -> None:
        """Write keys and values, rows of similar length together. Jobs that start later may follow other jobs."""
        for is_later in (False, True):
            rows = [fill for fill in fills if fill.ids and (fill.start > 0) == is_later]
            for first in range(0, max((len(fill.ids) for fill in rows), default=0), self.prefill_tokens):
                parts = [fill.part(first, first + self.prefill_tokens) for fill in rows if len(fill.ids) > first]
                for group in by_length(parts) if self.has_states else [parts]:
                    self._prefill_group(sorted(group, key=lambda fill: (len(fill.ids), len(fill.slots))))

    def _prefill_group(self, fills: Sequence[PrefillJob]) -> None:
        """Run rows in order of length, as many per pass as its limits allow."""
        while fills:
            count, cached = 0, 0
            for fill in fills:
                rows, cached = count + 1, max(cached, fill.start)
                is_large = rows * len(fill.ids) > self.prefill_tokens or rows * (cached + len(fill.ids)) > PREFILL_KEYS
                if count and is_large or self.has_states and count == PREFILL_STATES:
                    break
                count = rows
            self._prefill(fills[:count])
            fills = fills[count:]

    def _prefill(self, fills: Sequence[PrefillJob]) -> None:
        width, cached = max(len(fill.ids) for fill in fills), max(fill.start for fill in fills)
        ids, position, slot = (np.zeros((len(fills), width), np.int64) for _ in range(3))
        index = np.zeros((len(fills), cached + width), np.int64)
        for row, fill in enumerate(fills):
            count = len(fill.ids)
            ids[row, :count] = fill.ids
            slot[row, :count] = fill.slots[fill.start :]
            position[row] = np.minimum(fill.start + np.arange(width), fill.start + count - 1)
            index[row, : len(fill.slots)] = fill.slots
        tensors = [self._send(x) for x in (ids, position.astype(np.int32), slot, index)]
        states = self._send([(fill.source, fill.target) for fill in fills]).unbind(1) if self.has_states else ()
        self.forward.prefill(PrefillBatch(*tensors, cached == 0, *states), self.cache)
        if self.forward.routes is not None:
            # Their values arrive before those of the next window.
            routes = self._fetch(self.forward.routes.unflatten(0, ids.shape)).numpy()
            for fill, row in zip(fills, routes, strict=True):
                fill.routes.append((fill.start, row[: len(fill.ids)]))

    @torch.no_grad()
    def copy_states(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy states, one layer at a time, as if all were read before the first is written."""
        pairs = [(a, b) for a, b in zip(source, target, strict=True) if a != b]
        if self.has_states and pairs:
            read, write = self._send(pairs).unbind(1)
            for state in self.cache.states:
                state.index_copy_(0, write, state.index_select(0, read))

    def _send(self, values: Any) -> torch.Tensor:
        """Copy an array to the device without waiting for it: from pageable memory the copy would wait."""
        return self._pinned(values).to(self.device, non_blocking=True)

    def _pinned(self, values: Any) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory() if self.captures else tensor

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying a tensor to host memory; its values are there once the device has run the copy."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.captures)
        return host.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait for the device, so that all fetched tensors have arrived."""
        if self.captures:
            torch.cuda.current_stream(self.device).synchronize()

    # Decode steps.

    @torch.no_grad()
    def keep_rows(self, rows: Sequence[int]) -> None:
        """Make these rows, in increasing order, the first ones."""
        if rows and rows[-1] >= len(rows):
            index = self._send(rows)
            for tensor in (getattr(self.state, name) for name in CARRIED):
                tensor[: len(rows)] = tensor[index]
            self.copy_states(rows, range(len(rows)))

    @torch.no_grad()
    def launch(
        self, rows: RowState, num_old: int, stop_ids: Sequence[int], top: TopFilter, steps: int,
        temperature: float = 1.0,  # of all rows, as exact as the trainer's
    ) -> Window:  # fmt: skip
        """Sample up to `steps` tokens per row. The first `num_old` rows continue where the last launch leaves them."""
        num_rows = len(rows.token)
        count = min(bucket_of(num_rows), self.max_rows) if self.captures else num_rows
        self._grow_state(rows.table.shape[1], len(stop_ids), steps)
        if top.most and (self.sets is None or self.sets.shape[2] != 1 + top.most):
            self.graphs.clear()
            shape = (len(self.ids), self.max_rows, 1 + top.most)
            self.sets = torch.full(shape, GAP, dtype=torch.int32, device=self.device)
        graph = self._graph(count, top) if self.captures else None
        self._write(rows, num_old, stop_ids, count)
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:
                self._step(count, top)
        if self.exact is not None:
            states, ids = self.hidden[:steps, :num_rows], self.ids[:steps, :num_rows].clamp(min=0)  # -1: has ended
            logps = self.exact.logps(states.flatten(0, 1), ids.flatten(), temperature)
            self.logps[:steps, :num_rows] = logps.view(steps, num_rows)
        results = (self.ids, self.logps, self.routes, self.sets if top.most else None)
        window = [None if x is None else self._fetch(x[:steps, :num_rows]) for x in results]
        ended = torch.cuda.Event() if self.captures else None
        if ended is not None:
            ended.record()
        return Window(*window, ended)

    def _grow_state(self, max_pages: int, num_stop: int, steps: int) -> None:
        """Enlarge the state if needed. Sizes double, because every change recaptures the graphs."""
        have = {"max_pages": self.state.table.shape[1], "num_stop": len(self.stop_ids), "steps": len(self.ids)}
        need = {"max_pages": max_pages, "num_stop": num_stop, "steps": steps}
        if any(need[name] > have[name] for name in have):
            before = self.state
            self._allocate_state(**{name: max(have[name], 1 << (need[name] - 1).bit_length()) for name in have})
            for name in CARRIED:
                getattr(self.state, name).copy_(getattr(before, name))

    def _write(self, rows: RowState, num_old: int, stop_ids: Sequence[int], count: int) -> None:
        num_rows = len(rows.token)
        for name, values in rows._asdict().items():
            first, target = num_old if name in CARRIED else 0, getattr(self.state, name)
            if name == "table":
                target = target[:, : values.shape[1]]
            if first < num_rows:
                target[first:num_rows].copy_(self._pinned(values[first:]), non_blocking=True)
        self._clear_rows(num_rows, count)
        padded = [*stop_ids, *[-1] * (len(self.stop_ids) - len(stop_ids))]
        self.stop_ids.copy_(self._pinned(padded), non_blocking=True)
        self.tick.zero_()

    def _clear_rows(self, first: int, stop: int) -> None:
        """Make rows idle: one token on the scratch page, nothing to draw."""
        if first >= stop:
            return
        for name, tensor in self.state._asdict().items():
            tensor[first:stop] = {"own_len": 1, "tiles": -1, "temperature": 1.0}.get(name, 0)
        self.state.tiles[first:stop, 0] = torch.arange(first, stop, dtype=torch.int32, device=self.device)

    def _graph(self, count: int, top: TopFilter) -> torch.cuda.CUDAGraph:
        if (count, top) not in self.graphs:
            before = [getattr(self.state, name).clone() for name in CARRIED]  # rows continue from these
            self._clear_rows(0, count)
            self.tick.zero_()
            states = self.cache.states
            # The rows' states must not change, and the layers can share scratch memory.
            scratch = {(x.shape, x.dtype): torch.zeros_like(x[:count]) for x in states}
            self.cache.states = [scratch[x.shape, x.dtype] for x in states]
            self._step(count, top)  # compile kernels and load libraries before the capture
            self.cache.states = states
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread may be copying a checkpoint off the device.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(count, top)
            self.graphs[count, top] = graph
            for name, values in zip(CARRIED, before, strict=True):
                getattr(self.state, name).copy_(values)
        return self.graphs[count, top]

    def _step(self, count: int, top: TopFilter) -> None:
        """Sample one token for each of the first `count` rows."""
        state = RowState(*(tensor[:count] for tensor in self.state))
        position, slot = locate(state.table, state.prefix_len, state.own_len, page=self.page)
        rows = Rows(state.table, state.prefix_len, state.own_len, state.tiles)
        logits = self.forward.decode(state.token, position, slot, rows, self.cache)
        if self.routes is not None:
            self.routes[:, :count].index_copy_(0, self.tick, self.forward.routes[None])
        if self.exact is not None:
            self.hidden[:, :count].index_copy_(0, self.tick, self.exact.hidden[None])
        options = {"scale": self.forward.scale, "softcap": self.forward.softcap}
        options |= {"top_k": top.top_k, "top_p": top.top_p}
        draws = (logits, state.seed, state.drawn, state.temperature)
        if top.most:
            ids, logps, sets = draw_set(*draws, **options, min_p=top.min_p, most=top.most)
            self.sets[:, :count, : sets.shape[1]].index_copy_(0, self.tick, sets[None])
        else:
            ids, logps = draw(*draws, **options)
        changed = {"token": state.token, "own_len": state.own_len, "drawn": state.drawn, "left": state.left}
        advance(ids, logps, self.stop_ids, self.tick, self.ids, self.logps, **changed)


def by_length(fills: Sequence[PrefillJob]) -> list[list[PrefillJob]]:
    """Split into groups of jobs with equally many tokens, in fewer passes than one per length if there are many.

    A job of 13 tokens is then run as parts of 8, 4 and 1 tokens, so at most one pass per power of two.
    """
    lengths = {len(fill.ids) for fill in fills}
    powers = [1 << bit for bit in reversed(range(max(lengths, default=0).bit_length()))]
    if len(lengths) <= len([power for power in powers if any(length & power for length in lengths)]):
        return [[fill for fill in fills if len(fill.ids) == length] for length in lengths]
    groups = []
    for power in powers:
        firsts = [len(fill.ids) & -(2 * power) for fill in fills]  # tokens in earlier parts
        parts = [fill.part(a, a + power) for fill, a in zip(fills, firsts, strict=True) if len(fill.ids) & power]
        groups += [[x for x in parts if x.start == 0], [x for x in parts if x.start > 0]]
    return [group for group in groups if group]
