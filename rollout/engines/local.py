"""In-process engine: sample from the model being trained, inside the trainer process.

    engine = LocalEngine(model, tokenizer)
    completions = engine.generate([Request(prompt_ids=[5, 6, 7], seed=11)], Sampling(max_tokens=8, stop_ids=(2,)))

scheduler.py assigns requests to decode rows, decoder.py runs decode steps (CUDA graphs on a GPU), and forward.py runs
the model over a paged KV cache. Models that cannot use a paged cache fall back to growing.py.

On a GPU the engine normally samples from a copy of the weights in the compute dtype, refreshed after load(). On a CPU,
and if a copy is impossible or not worth its memory (_ways), it uses the trainer's weights directly. With exact_logps it
runs the trainer's own modules (exact.py), and its log-probs must have the same bits as these.

A seed fixes a completion's uniform draws. Logits still vary in the last bits with the batch shape, so equal seeds give
equal completions unless a draw falls within rounding error (about 1e-7 in fp32) of a boundary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from data.user_code import describe_error
from kernels.decode.draw import signed_64
from kernels.nf4 import num_weights
from rollout.engine import Completion, Request, Sampling, check_sampling, context_of, finished, join_versions
from rollout.engines.adapter_share import LOW, AdapterShare, adapter_share, small_adapter
from rollout.engines.decoder import PREFILL_STATES, PREFILL_TOKENS, Decoder
from rollout.engines.exact import ExactForward
from rollout.engines.forward import (
    BlockForward,
    Cache,
    Forward,
    PrefillBatch,
    TransformersForward,
    adapters_obstacle,
    block_obstacle,
    device_of,
    is_sharded,
    paged_obstacle,
    unchanged,
    uncompiled,
)
from rollout.engines.growing import PAD_ID, sample_growing
from rollout.engines.memory import FULL, GIB, MemoryPolicy, available, restart_peak
from rollout.engines.scheduler import Job, Scheduler
from rollout.engines.stop import StopCheck
from rollout.routes import expert_blocks
from rollout.state_layers import carried_state

Pairs = Sequence[tuple[list[int], list[int]]]  # prompts and completions
LOGITS_PER_PASS = 2**26  # in logps(): 256 MB in fp32
ROWS = {"cuda": 512, "cpu": 256}  # default max_batch_size
PAGE = {"cuda": 64, "cpu": 16}  # tokens per cache page
STEPS_PER_SYNC = {"cuda": 8, "cpu": 1}  # decode steps of a window
LAG = {"cuda": 1, "cpu": 0}  # windows that run on the device while the host reads an earlier one
NARROW = 2048  # largest hidden size of a narrow model
PARITY_FLOAT32, PARITY_BFLOAT16 = 1e-3, 0.1  # maximum mean gap to the trainer's log-probs
PARITY_GROWING = 0.25  # in bfloat16 with the growing cache: above it the model is rejected
SHARE_STEPS, SHARE_EVERY = (2, 5, 10, 20), 50  # weight versions at which the adapter's share is measured, then every 50
SHARE_ROWS, SHARE_TOKENS = 4, 16  # rows and positions per row: more would cost memory for (R, T, V) log-probs
SHARE_ERROR = 0.25  # do not report a share with a larger standard error, unless it is low


def log_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class LocalEngine:
    """Engine over a transformers causal LM (or a PeftModel around one) in this process."""

    concurrent = False
    asleep = False

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        max_batch_size: int | None = None,  # concurrent completions; others wait. None: 512 on a GPU, 256 on a CPU
        autocast_dtype: torch.dtype | None = None,
        cache_gib: float | None = None,  # maximum cache size on a GPU; None: free memory
        gather: Callable[[Tensor], Tensor] = unchanged,  # returns the full tensor of a shard, on all ranks
        records_routes: bool = False,  # completions for training have routes, if the model has experts
        exact_logps: Callable[[Pairs], list[list[float]]] | None = None,  # the trainer's, to be equal bit for bit
        log: Callable[[str], None] = log_line,
    ) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise UserError(f"max_batch_size={max_batch_size}: must be 1 or more")
        self.model, self.tokenizer, self.log = model, tokenizer, log
        self.device = device_of(model)
        self.kind = "cuda" if self.device.type == "cuda" else "cpu"
        self.max_batch_size = max_batch_size or ROWS[self.kind]
        self.autocast_dtype, self.cache_gib, self.gather = autocast_dtype, cache_gib, gather
        self.records_routes = records_routes and bool(expert_blocks(self.lm))
        self.exact_logps = exact_logps
        self.version = 0
        self.memory_policy = MemoryPolicy(self.device, log) if self.kind == "cuda" else None
        self._make_forward: Callable[[], Forward] | None = None  # None: not chosen yet, or sampled by growing.py
        self._uses_growing_cache = False  # sampled by growing.py
        self._forward: Forward | None = None  # None: not built yet, or freed for training
        self._scheduler: Scheduler | None = None
        self._loaded: int | None = None  # weight version of the forward
        self._engine_bytes = 0  # cache, graphs and weight copy
        self._is_full = False  # the cache is as large as memory allows
        self._longest = 1  # tokens of the longest prompt and completion
        self._prefill_peaks: dict[int, int] = {}  # bytes of a prefill pass by sequence length
        self._measures_share = hasattr(model, "peft_config")
        self._share_due = self._warned = False
        self._measured_until: int | None = None  # version of the last load(); None: none yet
        self._share: float | None = None  # not reported yet

    # Sampling.

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in order."""
        return self.generate_groups([requests], sampling, count=1)[0]

    def generate_groups(
        self, groups: Sequence[Sequence[Request]], sampling: Sampling, *, count: int, due: Collection[int] = ()
    ) -> list[list[Completion]]:
        """Sample until `count` groups have finished, and the groups with index in `due`; others may be unfinished."""
        group_of = [g for g, group in enumerate(groups) for _ in group]
        left = [len(group) for group in groups]  # completions to finish

        def enough(ended: Sequence[int]) -> bool:
            for i in ended:
                left[group_of[i]] -= 1
            return left.count(0) >= count and not any(left[g] for g in due)

        requests = [request for group in groups for request in group]
        completions = dict(pair for ended in self._stream(requests, sampling, enough) for pair in ended)
        in_order = (completions[i] for i in range(len(requests)))
        return [[next(in_order) for _ in group] for group in groups]

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, more: Callable[[], Sequence[Request]] = tuple
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Yield completions as they finish, each with the index of its request.

        `more` returns requests that have arrived since it was last called; they join the batch. Their indices continue
        those of `requests`.
        """
        return self._stream(requests, sampling, lambda ended: False, more)

    def _stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        enough: Callable[[Sequence[int]], bool],
        more: Callable[[], Sequence[Request]] = tuple,
    ) -> Iterator[list[tuple[int, Completion]]]:
        """As stream(); once enough(indices that have just finished) is true, yield the unfinished ones and return."""
        check_sampling(sampling)
        jobs = self._jobs(requests, sampling, 0)
        if not jobs:
            return
        stop = StopCheck(self.tokenizer, sampling)
        self.choose_forward()
        # Longest first, so shorter prompts fill the gaps. Equal prompts are adjacent and share a tile.
        jobs.sort(key=lambda job: (not job.ids, -len(job.prompt_ids), job.prompt_ids))

        def arriving() -> list[Job]:
            new = self._jobs(more(), sampling, len(jobs))
            jobs.extend(new)
            return new

        sample = self._sample_growing if self._uses_growing_cache else self._sample_paged
        run = sample(jobs, sampling, stop, arriving)
        try:
            while True:
                # Not around the yield: the caller must see gradients and training mode unchanged.
                with evaluating(self.model, self.autocast_dtype if self._uses_growing_cache else None):
                    ended = next(run, None)
                    if ended is None:
                        self._measure_share(jobs)
                if ended is None:
                    return
                if enough([job.index for job in ended]):
                    run.close()
                    ended = [*ended, *(job for job in jobs if not job.has_ended)]
                yield self._completions(ended, stop, with_routes=sampling.for_training)
        finally:
            run.close()

    def _jobs(self, requests: Sequence[Request], sampling: Sampling, first: int) -> list[Job]:
        """Check the requests and return their jobs, with indices from `first`."""
        limits = [sampling.max_tokens if request.max_tokens is None else request.max_tokens for request in requests]
        if min(limits, default=1) < 1:
            raise UserError(f"max_tokens={min(limits)} (request {limits.index(min(limits))}): must be 1 or more")
        self._check_requests([request.prompt_ids for request in requests], limits)
        jobs = [
            Job(request.prompt_ids, signed_64(request.seed), limit, request.conversation, index=i)
            for i, (request, limit) in enumerate(zip(requests, limits, strict=True), first)
        ]
        for job, request in zip(jobs, requests, strict=True):
            if (so_far := request.so_far) is not None:
                job.ids, job.logps, job.versions = list(so_far.ids), list(so_far.logps), so_far.versions
                job.own_routes += [] if so_far.routes is None else [(0, so_far.routes)]
                job.own_sets += [] if so_far.sets is None else [so_far.sets]
        return jobs

    def _sample_paged(
        self, jobs: Sequence[Job], sampling: Sampling, stop: StopCheck, more: Callable[[], list[Job]] = list
    ) -> Iterator[Sequence[Job]]:
        """Run the scheduler. A generator, so that even _prepare_scheduler() runs inside `evaluating`."""
        waiting = list(jobs)
        while waiting:
            scheduler, late = self._prepare_scheduler(waiting), []  # arrived during the run, and too long for the cache
            longest = max(len(job.prompt_ids) + job.limit for job in waiting)
            limits = 1 << (longest - 1).bit_length(), scheduler.decoder.cache.num_pages  # as cover() rounds

            def fits(job: Job, limits: tuple[int, int] = limits) -> bool:
                pages, _ = cache_pages([job], page=PAGE[self.kind], rows=1)
                return len(job.prompt_ids) + job.limit <= limits[0] and pages <= limits[1]

            def fitting(late: list[Job] = late, fits: Callable[[Job], bool] = fits) -> list[Job]:
                new = more()
                late += [job for job in new if not fits(job)]
                return [job for job in new if fits(job)]

            yield from scheduler.run(waiting, sampling, stop, fitting)
            waiting = late

    def _sample_growing(
        self, jobs: Sequence[Job], sampling: Sampling, stop: StopCheck, more: Callable[[], list[Job]] = list
    ) -> Iterator[Sequence[Job]]:
        waiting = list(jobs)
        while waiting:
            for start in range(0, len(waiting), self.max_batch_size):
                chunk = waiting[start : start + self.max_batch_size]
                yield from sample_growing(self.model, chunk, sampling, stop)
            waiting = more()

    def _completions(self, jobs: Sequence[Job], stop: StopCheck, *, with_routes: bool) -> list[tuple[int, Completion]]:
        if not all(math.isfinite(sum(job.logps)) for job in jobs):
            raise UserError(
                f"version={self.version}: the logits are not finite because the weights have diverged; lower "
                "--learning-rate or resume from an earlier checkpoint"
            )
        texts = stop.texts([job.ids if job.has_ended else [] for job in jobs], [job.stopped for job in jobs])
        return [
            (job.index, Completion(
                prompt_ids=list(job.prompt_ids), ids=job.ids, logps=job.logps, text=text,
                finish_reason="stop" if job.stopped else "length" if job.has_ended else "unfinished",
                versions=join_versions([*job.versions, (self.version, len(job.ids))], len(job.ids)),
                routes=job.routes if with_routes else None, sets=job.sets if job.own_sets else None,
            ))
            for job, text in zip(jobs, texts, strict=True)
        ]  # fmt: skip

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Completion]]:
        """Sample now and return a finished future."""
        return finished(self.generate(requests, sampling))

    def poll(self, version: int | None = None) -> None:
        """Do nothing: nothing runs in the background."""

    def _check_requests(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> None:
        """Reject prompts that would fail deep inside the model."""
        config = self.lm.config.get_text_config()
        context = context_of(config)
        checked: set[int] = set()  # completions of a group share their prompt
        for i, (prompt, max_tokens) in enumerate(zip(prompts, limits, strict=True)):
            if not prompt:
                raise UserError(f"prompt_ids=[] (request {i}): the prompt is empty; pass at least one token")
            if context is not None and len(prompt) + max_tokens > context:
                raise UserError(
                    f"max_tokens={max_tokens} (request {i}): with {len(prompt)} prompt tokens it exceeds the model's "
                    f"context of {context}; shorten the prompt or lower --max-completion-length"
                )
            if id(prompt) not in checked and (max(prompt) >= config.vocab_size or min(prompt) < 0):
                raise UserError(
                    f"prompt_ids (request {i}): contains an id outside the model's vocabulary of {config.vocab_size}; "
                    "use the model's own tokenizer"
                )
            checked.add(id(prompt))

    # Log-probs of given completions.

    def logps(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """Return log-probs of (prompt, completion) pairs. As in generate, temperature 0 counts as 1."""
        if temperature < 0:
            raise UserError(f"temperature={temperature}: must be 0 or above")
        self._check_requests([prompt + completion for prompt, completion in sequences], [0] * len(sequences))
        if any(not prompt for prompt, _ in sequences):
            raise UserError("prompt_ids=[]: the prompt is empty; pass at least one token")
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]) + len(sequences[i][1]))
        logps: dict[int, list[float]] = {}
        with evaluating(self.model, self.autocast_dtype):
            for chunk in self._logps_chunks(order, sequences):
                chunk_logps = self._chunk_logps([sequences[i] for i in chunk], temperature or 1.0)
                logps.update(zip(chunk, chunk_logps, strict=True))
        return [logps[i] for i in range(len(sequences))]

    def _logps_chunks(self, order: list[int], sequences: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
        """Split `order` (shortest first) into chunks; the last sequence of a chunk sets its width."""
        vocab_size = self.model.config.get_text_config().vocab_size
        chunk: list[int] = []
        for i in order:
            width = len(sequences[i][0]) + len(sequences[i][1])
            too_big = (len(chunk) + 1) * width * vocab_size > LOGITS_PER_PASS
            if chunk and (too_big or len(chunk) == self.max_batch_size):
                yield chunk
                chunk = []
            chunk.append(i)
        if chunk:
            yield chunk

    def _chunk_logps(self, sequences: list[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        device = self.device
        joined = [prompt + completion for prompt, completion in sequences]
        width = max(len(ids) for ids in joined)
        input_ids = torch.tensor([ids + [PAD_ID] * (width - len(ids)) for ids in joined], device=device)
        mask = (torch.arange(width) < torch.tensor([len(ids) for ids in joined])[:, None]).long().to(device)
        positions = torch.arange(width, device=device).expand_as(input_ids)
        output = self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
        logits = output.logits[:, :-1].float() / temperature
        target = input_ids[:, 1:]
        logps = logits.gather(2, target[:, :, None])[:, :, 0] - logits.logsumexp(dim=-1)  # (B, T - 1)
        return [
            row[len(prompt) - 1 : len(prompt) + len(completion) - 1]
            for row, (prompt, completion) in zip(logps.tolist(), sequences, strict=True)
        ]

    # Between sampling and training.

    @property
    def has_copy(self) -> bool:
        """Whether the engine samples from a copy of the weights, so that the trainer's may be sharded meanwhile."""
        return self._forward is not None and not self._forward.in_place

    def needs_copy(self) -> bool:
        """Return whether the engine can sample from a copy of the weights, which is missing or out of date."""
        if self.kind == "cpu" or self._uses_growing_cache or adapters_obstacle(self.lm) is not None:
            return False
        return self._forward is None or self._loaded != self.version

    def refresh(self, *, always: bool = False) -> None:
        """Use the trainer's current weights: fill the copy if it is out of date, or always.

        Sharded weights are gathered one at a time, so all ranks must do the same.
        """
        if self._make_forward is None:  # sampled by growing.py, without a copy
            return
        if self._forward is None:
            self._forward, self._loaded = self._make_forward(), None
        is_stale = self._loaded != self.version
        if (is_stale or always or self._forward.in_place) and not self._forward.refresh():
            self._clear_graphs()
        if is_stale:
            self._loaded = self.version
            self.forget()

    def _clear_graphs(self) -> None:
        """Drop CUDA graphs, after an address that they captured has changed."""
        if self._scheduler is not None:
            self._scheduler.decoder.graphs.clear()

    def prepare(self, *, prompt_length: int, max_tokens: int, prompts: int, group: int) -> None:
        """Before training: choose the forward pass, check lengths and allocate the cache."""
        self.choose_forward()
        if not self._uses_growing_cache:
            longest = [[i] * prompt_length for i in range(prompts)]
            with evaluating(self.model, None):
                self._prepare_scheduler([Job(prompt, 0, max_tokens) for prompt in longest for _ in range(group)])

    def _measure_share(self, jobs: Sequence[Job]) -> None:
        """If due, measure how much of the adapter's effect the engine keeps: policy/adapter_retained_frac."""
        if not self._share_due or self.dtype == torch.float32:
            return
        self._share_due = False
        rows = list({tuple(job.prompt_ids): [*job.prompt_ids, *job.ids] for job in jobs}.values())[:SHARE_ROWS]
        length = min(SHARE_TOKENS, *map(len, rows))
        share = self._adapter_share([row[-length:] for row in rows])
        if share is None:
            return
        is_low = share.retained + 2 * share.error < LOW
        if is_low or share.error <= SHARE_ERROR:
            self._share = share.retained
        if is_low and not self._warned:
            self._warned = True
            self.log(
                f"warning: policy/adapter_retained_frac is {share.retained:.2f} (want {LOW} or more): completions "
                "come from a policy closer to the base model than the trained one; use --dtype float32 or "
                "--rollout.engine vllm"
            )

    def _adapter_share(self, rows: list[list[int]]) -> AdapterShare | None:
        """Return the share of the adapter's effect that the engine keeps, if it can be measured."""
        if not self._measures_share or self._forward is None or self._is_sharded:
            return None  # sharded: the other ranks would have to compute the exact log-probs too
        try:
            return adapter_share(self.model, self._forward, torch.tensor(rows, device=self.device))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # or out of memory
            self._measures_share = False
            self.log(f"rollout: policy/adapter_retained_frac is not measured ({describe_error(error)})")
            return None

    def load(self, version: int) -> None:
        """Mark the weight copy, if there is one, for a refresh before the next token."""
        self._share_due |= self._measures_share and is_measured(version, self._measured_until)
        self.version, self._loaded, self._measured_until = version, None, version
        if self.memory_policy is not None:
            self.memory_policy.training_ended()

    def forget(self) -> None:
        """Drop cached conversations and free their pages."""
        if self._scheduler is not None:
            self._scheduler.forget()

    def sleep(self) -> None:
        """On a GPU, free cache, graphs and weight copy for training, unless everything fits."""
        if self.memory_policy is None or self._scheduler is None:
            return
        if not self.memory_policy.resident:
            self._engine_bytes = self._release()
        self.memory_policy.training_begins(self._engine_bytes)

    def metrics(self) -> dict[str, float]:
        metrics = {} if self._share is None else {"policy/adapter_retained_frac": self._share}
        self._share = None
        if self._scheduler is not None and self._scheduler.num_evicted:
            metrics["rollout/evicted_rows"] = float(self._scheduler.num_evicted)
            self._scheduler.num_evicted = 0
        return metrics

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self._release()

    # The forward pass, the cache and the graphs.

    @property
    def lm(self) -> Any:
        """The transformers model, without peft's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def _is_sharded(self) -> bool:
        return is_sharded(next(self.model.parameters()))

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast_dtype or next(self.model.parameters()).dtype

    @property
    def _prefill_tokens(self) -> int | None:
        """Return the tokens per prefill pass, or None for the default.

        A GPU runs a pass of a narrow model faster than the host launches its kernels, so these models use longer ones.
        """
        is_narrow = getattr(self.lm.config.get_text_config(), "hidden_size", NARROW + 1) <= NARROW
        return 2 * PREFILL_TOKENS if self.kind == "cuda" and is_narrow else None

    def choose_forward(self, gathered: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """On the first call, choose the fastest forward pass whose log-probs match the trainer's.

        `gathered`: entered for passes of the trainer's model, whose head may be sharded.
        """
        if self._make_forward is not None or self._uses_growing_cache:
            return
        name, skipped = type(self.lm).__name__, paged_obstacle(self.lm, needs_kernels=self.kind == "cuda")
        ways: list[Callable[[], Forward] | None] = [] if skipped else [*self._ways()]
        has_states = carried_state(self.lm.config, type(self.lm)) is not None
        if not has_states and self.exact_logps is None:  # growing.py pads on the left, which changes states
            ways.append(None)  # growing.py
        for make in ways:
            try:
                self._make_forward, self._forward = make, None if make is None else make()
                obstacle = self._check_parity(gathered, paged=make is not None)
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                obstacle = (
                    f"its code fails with a {'growing' if make is None else 'paged'} KV cache ({type(error).__name__}: "
                    f"{' '.join(str(error).split())})"
                )
            if obstacle is None:
                self._uses_growing_cache = make is None
                if skipped:
                    how = "without a paged KV cache" if make is None else "with its transformers forward"
                    self.log(f"rollout: sampling {name} {how} (slower): {skipped}")
                return
            self._release()
            self._make_forward, skipped = None, obstacle
        if self.exact_logps is not None:
            raise UserError(f"exact_sampling=True: {name} cannot be sampled: {skipped}; remove --exact-sampling")
        raise UserError(f"rollout.engine=local: {name} cannot be sampled: {skipped}; use --rollout.engine vllm")

    def _ways(self) -> list[Callable[[], Forward]]:
        """Constructors of the possible forward passes, fastest first."""
        lm, dtype = self.lm, self.dtype
        if self.exact_logps is not None:
            return [lambda: ExactForward(lm, dtype, autocast_dtype=self.autocast_dtype)]
        if self.kind == "cpu":
            records = self.records_routes
            return [lambda: TransformersForward(lm, dtype, autocast_dtype=self.autocast_dtype, records_routes=records)]
        in_place = lm is self.model and all(p.dtype == dtype for p in lm.parameters()) and not self._is_sharded
        copied = not in_place and adapters_obstacle(lm) is None
        options = {"autocast_dtype": self.autocast_dtype, "copied": copied, "gather": self.gather}
        options["records_routes"] = self.records_routes
        ways: list[Callable[[], Forward]] = [lambda: TransformersForward(lm, dtype, **options)]
        copy_bytes = num_weights(lm) * dtype.itemsize
        is_tight = available(self.device) - torch.cuda.memory_allocated(self.device) < 2 * copy_bytes
        if block_obstacle(lm) is None and not (in_place and is_tight):
            records = self.records_routes
            ways.insert(0, lambda: BlockForward(lm, dtype, gather=self.gather, records_routes=records))
        return ways

    def _check_parity(self, gathered: Callable[[], AbstractContextManager[None]], *, paged: bool) -> str | None:
        """Compare a few sampled tokens with the trainer's log-probs; return the problem, or None."""
        vocab = self.lm.config.get_text_config().vocab_size
        longest = min(20 if self.exact_logps is None else 150, (context_of(self.lm.config) or 26) - 6)
        shapes = ((7, longest, 6), (7, longest, 6), (5, 3, 2))
        jobs = [
            Job([(step * i + 1) % vocab for i in range(length)], seed, limit)
            for seed, (step, length, limit) in enumerate(shapes)
        ]
        sampling = Sampling(max_tokens=6)
        sample = self._sample_paged if paged else self._sample_growing
        with evaluating(self.model, None if paged else self.autocast_dtype), nullcontext() if paged else gathered():
            for _ in sample(jobs, sampling, StopCheck(self.tokenizer, sampling)):
                pass
        sampled = torch.tensor([logp for job in jobs for logp in job.logps])
        if self.exact_logps is not None:
            expected = torch.tensor(sum(self.exact_logps([(job.prompt_ids, job.ids) for job in jobs]), []))
            if torch.equal(sampled, expected):
                return None
            count, gap = int((sampled != expected).sum()), float((sampled - expected).abs().max())
            return f"{count} of {len(sampled)} log-probs differ from the trainer's, by up to {gap:.3g}"
        if self._is_sharded and self.has_copy:  # the trainer's pass gathers weights, and refresh() fills a new copy
            self._release()
        with gathered():
            expected = torch.tensor(sum(self.logps([(job.prompt_ids, job.ids) for job in jobs], 1.0), []))
        gap = float((sampled - expected).abs().mean())
        in_bfloat16 = PARITY_BFLOAT16 if paged else PARITY_GROWING
        limit = PARITY_FLOAT32 if self.dtype == torch.float32 else in_bfloat16
        if bool(expected.isfinite().all()) and not gap <= limit:
            kind = "paged" if paged else "growing"
            return f"its log-probs with a {kind} KV cache differ from the trainer's by {gap:.3g} (limit {limit:g})"
        if not self._measures_share or not self.has_copy:  # without a copy the engine runs the trainer's adapters
            return None
        with evaluating(self.model, None), small_adapter(self.model):
            rows = [[(i * i + seed * i + 1) % vocab for i in range(SHARE_TOKENS)] for seed in range(SHARE_ROWS)]
            share = self._adapter_share(rows)
        self.refresh(always=True)
        if share is not None and share.retained + 4 * share.error < LOW:  # 4: a slower way must not be chosen by chance
            return f"it keeps {share.retained:.2f} of a small adapter's effect on log-probs (limit {LOW})"
        return None

    def _prepare_scheduler(self, jobs: Sequence[Job]) -> Scheduler:
        """Return a scheduler with the current weights and a cache large enough for these jobs."""
        assert self._make_forward is not None, "_prepare_scheduler() called before choose_forward()"
        self.refresh()
        assert self._forward is not None
        if not self._forward.cover(max(len(job.prompt_ids) + job.limit for job in jobs)):
            self._clear_graphs()
        least, most = cache_pages(jobs, page=PAGE[self.kind], rows=self.max_batch_size)
        have = have_rows = have_prefixes = 0
        cached: Collection[Hashable] = ()  # conversations, which have a prefix already
        if self._scheduler is not None:
            decoder, cached = self._scheduler.decoder, self._scheduler.conversations
            have, have_rows, have_prefixes = decoder.cache.num_pages, decoder.max_rows, decoder.num_prefixes
        rows, prefixes = self.max_batch_size, 0
        if self._forward.states:
            rows = min(rows, len(jobs))
            prefixes = min(rows, len({tuple(job.prompt_ids) for job in jobs if job.conversation not in cached}))
        lacks = have < most or have_rows < rows or have_prefixes < prefixes
        if have < least or (lacks and not self._is_full):
            self._scheduler = None  # free the old cache first: both may not fit
            self._longest = max(len(job.prompt_ids) + job.limit for job in jobs)
            budget = self._page_budget()
            wanted = rows, prefixes = max(have_rows, rows), max(have_prefixes, prefixes)
            if self._forward.states:
                rows, prefixes, budget = self._fit_states(rows, prefixes, budget)
            # With some headroom when it grows, so that slowly growing batches do not reallocate every time.
            num_pages = min(most + most // 4 if have else most, budget if self._forward.states else max(have, budget))
            self._is_full = num_pages < most or (rows, prefixes) != wanted
            if num_pages < least:
                page_gib = self._forward.shape.bytes_per_token * PAGE[self.kind] / GIB
                raise UserError(
                    f"rollout.engine=local: the longest prompt and completion need {least * page_gib:.2f} GiB of KV "
                    f"cache but only {num_pages * page_gib:.2f} GiB is available; lower --max-completion-length, raise "
                    "--rollout.cache-gib if it is set, or use --rollout.engine vllm"
                )
            decoder = Decoder(
                self._forward, num_pages=num_pages, page=PAGE[self.kind], max_rows=rows,
                max_pages=least, captures=self.kind == "cuda", num_prefixes=prefixes,
                prefill_tokens=self._prefill_tokens,
            )  # fmt: skip
            self._scheduler = Scheduler(decoder, steps_per_sync=STEPS_PER_SYNC[self.kind], lag=LAG[self.kind])
        return self._scheduler

    def _fit_states(self, rows: int, prefixes: int, budget: int) -> tuple[int, int, int]:
        """Return the rows and prefixes whose states fit in half of a budget of pages, and the pages left."""
        assert self._forward is not None
        page_bytes = max(1, self._forward.shape.bytes_per_token) * PAGE[self.kind]
        pages = sum(state.bytes for state in self._forward.states) / page_bytes  # per sequence
        scale = min(1.0, budget / 2 / pages / (rows + prefixes + 1))
        rows, prefixes = max(1, int(scale * rows)), max(1, int(scale * prefixes))
        return rows, prefixes, max(0, budget - math.ceil((rows + prefixes + 1) * pages))

    def _page_budget(self) -> int:
        """Number of pages that free GPU memory and --rollout.cache-gib allow."""
        if self.kind == "cpu":
            return sys.maxsize
        assert self._forward is not None
        torch.cuda.empty_cache()
        logits = self.max_batch_size * self.lm.config.get_text_config().vocab_size * 4
        blocks = 4 * self.max_batch_size * self._longest  # bytes at most; see Plan in kernels/decode/attention_many.py
        used = torch.cuda.memory_allocated(self.device) + 2 * logits + blocks + self._prefill_bytes() + GIB
        free_bytes = available(self.device) - used
        if self.cache_gib is not None:
            free_bytes = min(free_bytes, self.cache_gib * GIB)
        return max(0, int(FULL * free_bytes / (max(1, self._forward.shape.bytes_per_token) * PAGE[self.kind])))

    def _prefill_bytes(self) -> int:
        """Return the peak memory of a prefill pass, measured once per power of two of the longest sequence."""
        assert self._forward is not None
        length = 1 << (self._longest - 1).bit_length()
        if length not in self._prefill_peaks:
            tokens = self._prefill_tokens or PREFILL_TOKENS
            width = min(self._longest, tokens)
            rows = min(tokens // width, PREFILL_STATES if self._forward.states else tokens)
            ids = torch.zeros(rows, width, dtype=torch.int64, device=self.device)
            index = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
            position = torch.arange(width, dtype=torch.int32, device=self.device).repeat(rows, 1)
            cache = Cache(self._forward.shape, 1, PAGE[self.kind], states=self._forward.states)  # scratch only
            before = torch.cuda.memory_allocated(self.device)
            restart_peak()
            with torch.no_grad():
                self._forward.prefill(PrefillBatch(ids, position, ids, index, fresh=False), cache)
            self._prefill_peaks[length] = restart_peak() - before
        return self._prefill_peaks[length]

    def _release(self) -> int:
        """Free cache, graphs and weight copy; return their size in GPU bytes."""
        on_gpu = self.kind == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device) if on_gpu else 0
        self._scheduler = self._forward = self._loaded = None
        self._is_full = False
        if not on_gpu:
            return 0
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self.device)


def is_measured(version: int, before: int | None) -> bool:
    """Return whether a version to measure the adapter's share at is reached, after version `before`.

    A resumed run has no version before its first, and measures at the same versions as an unbroken run.
    """
    before = max(0, version - 1) if before is None else before
    return version // SHARE_EVERY > before // SHARE_EVERY or any(before < step <= version for step in SHARE_STEPS)


def cache_pages(jobs: Sequence[Job], *, page: int, rows: int) -> tuple[int, int]:
    """Return (least, most): pages needed for any single job, and for `rows` concurrent jobs."""

    def pages(tokens: int) -> int:
        return -(-tokens // page)

    sampled = [pages(1 + job.limit) for job in jobs]
    prompts = [pages(len(job.prompt_ids) - 1) for job in jobs]
    shared: dict[tuple[int, ...], int] = {}  # pages of each distinct prompt
    unshared = []  # pages of each job
    for job, sampled_pages, prompt_pages in zip(jobs, sampled, prompts, strict=True):
        if job.conversation is None:
            shared[tuple(job.prompt_ids)] = prompt_pages
            unshared.append(sampled_pages)
        else:  # prompts of later turns differ
            unshared.append(sampled_pages + prompt_pages + 1)
    scratch, spare = 1, min(rows, len(jobs))  # spare: admission reserves a page per row
    least = max(a + b for a, b in zip(sampled, prompts, strict=True)) + 1 + scratch
    return least, sum(sorted(unshared)[-rows:]) + sum(shared.values()) + spare + scratch


@contextmanager
def evaluating(model: torch.nn.Module, autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """Context manager: run a model in evaluation mode, uncompiled and without gradients; then restore all modes.

    In evaluation mode a model with gradient checkpointing can use a cache. no_grad, not inference_mode: buffers that a
    model creates on its first call must stay usable for training.
    """
    training = [module for module in model.modules() if module.training]
    device = device_of(model)
    model.eval()
    try:
        with (
            uncompiled(model),
            torch.no_grad(),
            torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None),
        ):
            yield
    finally:
        for module in training:
            module.training = True
