"""Engine over vLLM servers, with the interface of the in-process engine.

    engine = VllmEngine(VllmConfig(), SyncConfig(), model="Qwen/Qwen3-0.6B", source=weights, local=local, ...)
    engine.load(version=12)        # send the trainer's weights to all servers; periodically compare log-probs
    completions = engine.generate(requests, sampling)
    engine.close()                 # stop the servers that the engine started

The thread that creates the engine owns the weights: only this thread calls load. A restarted server gets its weights
when this thread waits in generate or calls poll or load. Requests run in a background loop (servers/loop.py), so submit
returns immediately and the trainer can train and load in the meantime. A completion interrupted by a load continues
with the new weights; its `versions` record which version sampled which tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.errors import UserError
from kernels.nf4 import is_4bit
from rollout import sets
from rollout.engine import POLL_S, Completion, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.engines.probe import Probe, server_logps
from rollout.engines.stop import StopCheck
from rollout.engines.weights import ColocatedMemory, Weights
from rollout.routes import from_server, join
from rollout.servers.client import RefusedError, ServerError, VllmServer, num_logprobs
from rollout.servers.command import check_build, find_python, shares_gpu, uuid_of
from rollout.servers.launch import Launched, launch, stop_all, wait_ready
from rollout.servers.lease import Owner
from rollout.servers.loop import Loop
from rollout.servers.options import SyncConfig, VllmConfig
from rollout.servers.pool import Member, Pool, Sampled
from rollout.servers.token import find_token
from rollout.sync.base import WeightSource
from rollout.sync.choose import check_served, make_sync, pick_backend, wants_adapters
from rollout.sync.lora import LoraSync

CLOSE_S = 30.0


class VllmEngine:
    """Engine over one or more vLLM servers, given by --vllm.url or started here."""

    concurrent = True

    def __init__(
        self,
        cfg: VllmConfig,
        sync: SyncConfig,
        *,
        model: str,
        revision: str | None = None,
        tokenizer: str | None = None,  # folder or hub id; None: the model's
        source: WeightSource,
        local: LocalEngine,  # computes log-probs with the trainer's weights
        device: torch.device,
        own_gpus: int = 1,  # number of GPUs that the trainer uses on this machine
        owner: Owner | None = None,  # lease owner; None: a new run
        dtype: str,  # dtype of the weights sent
        lora_rank: int,
        log_dir: Path,
        max_model_len: int | None = None,  # maximum tokens per prompt plus completion
        trust_remote_code: bool = False,
        samples_ahead: bool = False,  # weights are synced while completions are in flight
        vocab_size: int | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Connect to the servers at --vllm.url, or start servers."""
        self.cfg, self.sync_cfg, self.local, self.device, self.log = cfg, sync, local, device, log
        self.colocate = shares_gpu(cfg, device)
        self.version = -1  # nothing loaded yet
        self._first_sampled: int | None = None  # version of the first completions
        self._colocated_memory = ColocatedMemory(device, log)
        self._probe = Probe(local, tolerance=sync.probe_tolerance)
        self._owner = threading.get_ident()
        self._keys = itertools.count()
        self._oldest_version: dict[int, int] = {}  # per call in flight: oldest version that its requests may name
        self._until_probe, self._seconds, self._gap = 0, 0.0, 0.0
        self.launched: list[Launched] = []  # servers started here; empty with --vllm.url
        self.loop = Loop()
        self.pool = self.weights = self._watch = None
        # A 4-bit base is sent dequantised, unless --sync.backend lora sends adapters for the servers' full base.
        is_quantised = is_4bit(local.model)
        is_lora = source.is_lora and not (is_quantised and sync.backend == "auto")
        lora_rank = lora_rank if is_lora and wants_adapters(sync.backend) else 0
        check_served(model, revision, lora_rank=lora_rank)
        try:
            for replica in range(0 if cfg.url else cfg.replicas):
                self.launched.append(launch(
                    cfg, model=model, revision=revision, tokenizer=tokenizer, lora_rank=lora_rank, log_dir=log_dir,
                    replica=replica, device=device.type, dtype=dtype, colocate=self.colocate,
                    first_gpu=0 if self.colocate else own_gpus, max_model_len=max_model_len,
                    trust_remote_code=trust_remote_code, grouped=not samples_ahead, log=log,
                ))  # fmt: skip
            wait_ready(self.launched, cfg.startup_timeout, log)
            places = [(s.url, s.token) for s in self.launched] or [(url, find_token(url)) for url in cfg.url]
            owner = owner or Owner.here()
            servers = [
                VllmServer(url, token=token, timeout=cfg.timeout, vocab_size=vocab_size, owner=owner)
                for url, token in places
            ]
            self.pool = Pool(
                servers, max_in_flight=cfg.max_in_flight, timeout=cfg.timeout, log=log, seeded=cfg.seeded,
                restart=self._restart if self.launched else None,
            )  # fmt: skip
            self.loop.run(self.pool.connect())
            backend = pick_backend(sync.backend, servers, is_lora=is_lora, device_uuid=uuid_of(device))
            if backend == "lora" and is_quantised:
                self._probe.rounded = True
                log(
                    "vLLM: servers use the full base, the trainer a 4-bit base; importance weights correct the "
                    "difference (policy/behaviour_gap)"
                )
            weight_sync = make_sync(sync, backend, source, self.loop, servers, device)
            if isinstance(weight_sync, LoraSync):
                weight_sync.in_use = self.in_use
            self.weights = Weights(self.pool, self.loop, weight_sync, self._check_watch)
            self._check_servers(servers, backend, dtype, max_model_len)
            self._watch = self.loop.start(self.pool.watch())
        except BaseException as error:
            self.close()
            if isinstance(error, ServerError):
                raise UserError(str(error)) from error
            raise

    @property
    def asleep(self) -> bool:
        return bool(self.weights.asleep)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in order, even if some servers fail."""
        future = self.submit(requests, sampling)
        try:
            while not wait([future], POLL_S).done:
                self.poll()
            return future.result()
        finally:
            future.cancel()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Completion]]:
        """Start sampling. Completions continue across loads; cancelling the future cancels them."""
        assert self.version >= 0 and not self.weights.asleep, "submit() called before load()"
        if self._first_sampled is None:
            self._first_sampled = self.version
        return self.loop.start(self._complete_all(list(requests), sampling))

    async def complete(self, request: Request, sampling: Sampling) -> Completion:
        """Return one completion; for coroutines that run in `loop`."""
        (completion,) = await self._complete_all([request], sampling)
        return completion

    async def _complete_all(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        tokenizer = self.local.tokenizer
        decode = (lambda ids: tokenizer.decode(ids, skip_special_tokens=True)) if sampling.stop else None
        key = next(self._keys)
        # Not self.version: during a load, requests still name the previous version.
        versions = (m.version for m in self._ready() if m.version is not None)
        self._oldest_version[key] = min(versions, default=self.version)
        try:
            sampled = await self.pool.generate_all(requests, sampling, training=sampling.for_training, decode=decode)
        except (ServerError, RefusedError) as error:
            raise UserError(str(error)) from error
        finally:
            del self._oldest_version[key]
        stop = StopCheck(tokenizer, sampling)
        texts = stop.texts([s.ids for s in sampled], [s.finish_reason == "stop" for s in sampled])
        return [
            Completion(
                prompt_ids=list(request.prompt_ids), ids=s.ids, logps=s.logps, finish_reason=s.finish_reason, text=text,
                versions=s.versions,
                routes=self._routes(s, len(request.prompt_ids)) if sampling.for_training else None,
                sets=sets.join(s.sets, len(s.ids), num_logprobs(sampling) - 1),
            )
            for request, s, text in zip(requests, sampled, texts, strict=True)
        ]  # fmt: skip

    def _routes(self, sampled: Sampled, prompt_length: int) -> np.ndarray | None:
        """Return the experts of prompt and completion as the in-process engine records them."""
        if not (sampled.routes and self.local.records_routes):
            return None
        parts = [(0, from_server(routes, self.local.lm)) for routes in sampled.routes]
        return join(parts, prompt_length + len(sampled.ids))

    def in_use(self) -> range:
        """Versions that requests in flight may name."""
        return range(min(list(self._oldest_version.values()), default=self.version), self.version + 1)

    def load(self, version: int) -> None:
        """Send the trainer's weights to all servers; compare log-probs on the first and every probe_every-th sync."""
        assert threading.get_ident() == self._owner, "load() called outside the training thread"
        waiting = [member for member in self.pool.members if member.needs_weights]
        if version == self.version and not self.weights.asleep and not waiting:
            return
        self._check_watch()
        started = time.monotonic()
        self.version = self.pool.version = version
        members = [member for member in self.pool.members if member.state != "out" or member.needs_weights]
        self.weights.give_all(members, version)
        self._seconds += time.monotonic() - started
        self._until_probe -= 1
        if self._until_probe < 0 and self.probe(self._ready()):
            self._until_probe = self.sync_cfg.probe_every - 1

    def probe(self, members: Sequence[Member]) -> bool:
        """Compare log-probs of fixed ids and raise on a mismatch; return whether any server answered."""
        self._gap, compared = 0.0, False
        ids = self._probe.sequences(min(member.server.info.model_len for member in self.pool.members) - 1)
        trainer_logps = self._probe.logps(ids) if members else []
        for member in members:
            try:
                logps = self.loop.run(server_logps(self.pool, member, ids))
            except ServerError as error:
                self.loop.run(self.pool.fail(member, str(error)))
                continue
            compared = True
            gap, limit, kind = self._probe.gap(trainer_logps, logps, member.server.info.dtype)
            self._gap = max(self._gap, gap)
            if not gap <= limit:
                raise UserError(
                    f"sync: {member.server.url} should have version {self.version}, but its log-probs differ from the "
                    f"trainer's by {gap:.3g} {kind} (limit {limit:g}){self._explain_gap(member)}"
                )
        return compared

    def sleep(self) -> None:
        """With colocate, release the servers' memory to the trainer, unless training has shown that both fit.

        Call load before the next generate.
        """
        if self.colocate and not self._can_stay():
            self.weights.sleep(self._ready())

    def _can_stay(self) -> bool:
        """True if the servers can stay awake: only on this rank's GPU, because other ranks' memory is unknown here."""
        # The first optimizer step allocates the optimizer state, so the second is the first with the full peak.
        has_trained = self._first_sampled is not None and self.version >= self._first_sampled + 2
        device = {uuid_of(self.device)}
        return (
            has_trained
            and all(set(member.server.info.device_uuids) == device for member in self.pool.members)
            and self._colocated_memory.has_room()
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics of the servers, and of weight syncs since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        metrics = self.pool.metrics() | {"time/sync_s": seconds, "policy/sync_gap": self._gap}
        if self.weights.report is not None:
            metrics["rollout/sync_mb"] = self.weights.report.num_bytes / 1e6
        return metrics

    def close(self) -> None:
        """Stop the servers started here and leave the others running. May be called twice."""
        if self._watch is not None:
            self._watch.cancel()
        if not self.launched:  # servers keep running, so their workers must leave the link
            self._close_sync()
        if self.pool is not None:
            for server in self.launched:
                self.pool.members[server.replica].lost = True  # keeps the watch from restarting it
            with contextlib.suppress(Exception):
                self.loop.run(self.pool.close(), CLOSE_S)
        stop_all(self.launched)
        self._close_sync()  # deletes its folders, which no server reads anymore
        self.loop.close()

    def _close_sync(self) -> None:
        weights, self.weights = self.weights, None
        if weights is not None:
            with contextlib.suppress(Exception):
                weights.sync.close()

    def poll(self, version: int | None = None) -> None:
        """Send weights to restarted servers and compare log-probs, if called in the thread that owns the weights.

        `version`: version of the trainer's current weights. If it is newer than the servers', all servers get it,
        because one version must not name two sets of weights.
        """
        self._check_watch()
        waiting = [member for member in self.pool.members if member.needs_weights]
        if not waiting or threading.get_ident() != self._owner:
            return
        if version is not None and version != self.version:
            self.load(version)
            return
        stopped, _, _ = self.weights.give(waiting, self.version)
        # Retry once for servers whose push failed because of others; after that they wait for the next load.
        self.weights.give(stopped, self.version)
        self.probe([member for member in waiting if member.state == "ready"])

    def _check_watch(self) -> None:
        if self._watch is not None and self._watch.done():
            self._watch.result()
            raise AssertionError("the server watch has ended")

    def _restart(self, index: int) -> VllmServer:
        """Restart a server. Blocks, in a thread of the pool's watch."""
        server = self.launched[index]
        server.restart()
        if self.weights is not None:
            self.weights.asleep.discard(index)
        wait_ready([server], self.cfg.startup_timeout, self.log)
        old = self.pool.members[index].server
        return VllmServer(
            server.url, token=server.token, timeout=self.cfg.timeout, vocab_size=old.vocab_size, owner=old.owner
        )

    def _check_servers(self, servers: Sequence[VllmServer], backend: str, dtype: str, longest: int | None) -> None:
        for i, server in enumerate(servers):
            info = server.info
            if longest is not None and info.model_len < longest:
                raise UserError(
                    f"vllm.url={server.url}: accepts {info.model_len} tokens, but prompt and completion may have "
                    f"{longest}; start it with --vllm.max-model-len {longest}, or lower --max-completion-length"
                )
            if info.dtype != dtype:
                raise UserError(
                    f"vllm.url={server.url}: serves {info.dtype}, but the trainer sends {dtype}; start the server with "
                    f"--vllm.dtype {dtype}, or train with --vllm.dtype {info.dtype}"
                )
            if info.sleep_mode and self.loop.run(server.is_sleeping()):  # left asleep by an earlier run
                self.weights.asleep.add(i)
            if server.owner is not None and not server.leased:
                self.log(
                    f"vllm.url={server.url}: has no lease (it was not started by python -m rollout.serve), so a second "
                    "trainer could use it; this run stops if it finds another trainer's weights there"
                )
            if self.colocate and not info.sleep_mode:
                raise UserError(
                    f"vllm.colocate=True: {server.url} has no sleep mode; start it with python -m rollout.serve "
                    "--vllm.colocate True"
                )
            if (
                backend == "lora"
                and info.extension
                and any(w["dirty"] for w in self.loop.run(server.rpc("strop_info", timeout=30.0)))
            ):
                raise UserError(
                    f"vllm.url={server.url}: a weight sync was interrupted and its weights are inconsistent; restart it"
                )
        lengths = [server.info.model_len for server in servers]
        count = f"{len(servers)} server{'s' * (len(servers) > 1)}"
        self.log(f"vLLM: {count}, context {min(lengths)}, weight sync by {backend}")

    def _explain_gap(self, member: Member) -> str:
        """Return the rest of the probe's error message: the version that the server reports, and what to do."""
        info: dict[str, Any] = {}
        if member.server.info.extension:
            with contextlib.suppress(Exception):
                info = self.loop.run(member.server.rpc("strop_info", timeout=10.0), 20.0)[0]
        if not self.weights.sync.needs_pause and info.get("version") is not None:
            return "; an earlier run replaced the base weights under the adapter; restart the server"
        reported = f"; it reports version {info['version']}" if self.weights.sync.needs_pause and info else ""
        return f"{reported}; try another --sync.backend, and report this with the model's name"

    def _ready(self) -> list[Member]:
        return [member for member in self.pool.members if member.state == "ready"]


def check_start(cfg: VllmConfig, device: torch.device, run: str = "") -> None:
    """Raise before any server is started if vLLM is missing or the wrong build, a --vllm.url does not answer, or a run
    other than `run` trains there.
    """
    shares_gpu(cfg, device)
    if not cfg.url:
        check_build(find_python(cfg), device.type)
    loop = Loop()
    try:
        for url in cfg.url:
            server = VllmServer(url, token=find_token(url))
            loop.run(server.connect())
            loop.run(server.refuse_other(run))
            loop.run(server.close())
    except ServerError as error:
        raise UserError(str(error)) from error
    finally:
        loop.close()
