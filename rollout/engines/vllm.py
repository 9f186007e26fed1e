"""The engine over vLLM servers: GRPO talks to it as to the one in its own process.

    engine = VllmEngine.start(VllmConfig(), SyncConfig(), model="Qwen/Qwen3-0.6B", source=weights, local=local, ...)
    engine.load(version=12)        # the trainer's weights go to every server; now and then both are asked to agree
    completions = engine.generate(requests, sampling)
    engine.close()                 # ends the servers that it started

The thread that makes the engine owns the weights: it alone calls load, and a server that came back gets its weights
when that thread waits in generate, calls tend, or calls load again. Requests run in a loop of their own (loop.py), so
submit returns at once and the trainer may train and load meanwhile; a completion that is interrupted by a load goes on
with the new weights, and its spans say which version made what.
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

import torch

from rollout.engine import Completion, Request, Sampling
from rollout.engines.local import LocalEngine, StopCheck
from rollout.engines.probe import Probe
from rollout.engines.score import score_rows
from rollout.engines.weights import Weights
from rollout.servers.client import RefusedError, ServerError, VllmServer
from rollout.servers.command import check_build, find_python, shares_gpu, uuid_of
from rollout.servers.launch import Launched, launch, stop_all, wait_ready
from rollout.servers.lease import Owner
from rollout.servers.loop import Loop
from rollout.servers.options import SyncConfig, VllmConfig
from rollout.servers.pool import Member, Pool
from rollout.servers.token import find_token
from rollout.sync.base import WeightSource
from rollout.sync.choose import make_sync, pick_backend
from rollout.sync.lora import LoraSync

LOOK_S = 0.5  # how often a thread that waits for completions looks after servers that need weights
CLOSE_S = 30.0


class VllmEngine:
    """Engine over one or many vLLM servers, given by address or started here."""

    concurrent = True

    def __init__(
        self,
        servers: Sequence[VllmServer],
        launched: Sequence[Launched],  # those of ours, in the same order; empty: they were given
        *,
        cfg: VllmConfig,
        sync: SyncConfig,
        source: WeightSource,
        local: LocalEngine,  # scores with the trainer's own weights
        device: torch.device,
        dtype: str,  # of the weights that are sent
        colocate: bool,
        longest: int | None = None,  # prompt and completion that will be asked for
        log: Callable[[str], None] = print,
    ) -> None:
        self.cfg, self.sync_cfg, self.local, self.device, self.log = cfg, sync, local, device, log
        self.launched, self.colocate = list(launched), colocate
        self.version = -1  # nothing has been loaded
        self._probe = Probe(local, tolerance=sync.probe_tolerance)
        self._owner = threading.get_ident()
        self._keys = itertools.count()
        self._begun: dict[int, int] = {}  # completions in flight: the version of the weights when each began
        self._paused: list[Member] = []
        self._until_probe, self._seconds, self._gap = 0, 0.0, 0.0
        self.loop = Loop()
        self.weights = self._watch = None
        restart = self._restart if launched else None
        self.pool = Pool(
            servers, max_in_flight=cfg.max_in_flight, timeout=cfg.timeout, log=log, restart=restart, seeded=cfg.seeded
        )
        try:
            self._run(self.pool.connect())
            backend = pick_backend(sync.backend, servers, is_lora=source.is_lora, device_uuid=uuid_of(device))
            mover = make_sync(sync, backend, source, self.loop, servers, device)
            if isinstance(mover, LoraSync):
                mover.in_use = self.in_use
            self.weights = Weights(self.pool, self.loop, mover, self._check_watch)
            self._check_servers(servers, backend, dtype, longest)
            self._watch = self.loop.start(self.pool.watch())
        except BaseException as error:
            self.close()
            if isinstance(error, ServerError):
                raise ValueError(str(error)) from error
            raise

    @classmethod
    def start(
        cls,
        cfg: VllmConfig,
        sync: SyncConfig,
        *,
        model: str,
        source: WeightSource,
        local: LocalEngine,
        device: torch.device,
        own_gpus: int = 1,  # of this machine, that processes train on
        owner: Owner | None = None,  # who trains, for the servers' leases; None: a run of its own
        dtype: str,
        lora_rank: int,
        log_dir: Path,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        vocab_size: int | None = None,
        log: Callable[[str], None] = print,
    ) -> VllmEngine:
        """With the servers of --vllm.url, or with servers of our own."""
        colocate = shares_gpu(cfg, device)
        launched: list[Launched] = []
        try:
            for replica in range(0 if cfg.url else cfg.replicas):
                launched.append(launch(
                    cfg, model=model, lora_rank=lora_rank, log_dir=log_dir, replica=replica, device=device.type,
                    dtype=dtype, colocate=colocate, first_gpu=0 if colocate else own_gpus, max_model_len=max_model_len,
                    trust_remote_code=trust_remote_code, log=log,
                ))  # fmt: skip
            wait_ready(launched, cfg.startup_timeout, log)
            places = [(s.url, s.token) for s in launched] or [(url, find_token(url)) for url in cfg.url]
            owner = owner or Owner.here()
            servers = [
                VllmServer(url, token=token, timeout=cfg.timeout, vocab_size=vocab_size, owner=owner)
                for url, token in places
            ]
            return cls(
                servers,
                launched,
                cfg=cfg,
                sync=sync,
                source=source,
                local=local,
                device=device,
                dtype=dtype,
                colocate=colocate,
                longest=max_model_len,
                log=log,
            )
        except BaseException:
            stop_all(launched)
            raise

    @property
    def asleep(self) -> bool:
        return bool(self.weights.asleep)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order, whatever happens to single servers on the way."""
        future = self.submit(requests, sampling)
        try:
            while not wait([future], LOOK_S).done:
                self.tend()
            return future.result()
        finally:
            future.cancel()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Completion]]:
        """Begin and return; the completions go on over any number of loads. Cancelling the future ends them."""
        assert self.version >= 0 and not self.weights.asleep, "load() comes before submit()"
        return self.loop.start(self._complete_all(list(requests), sampling))

    async def complete(self, request: Request, sampling: Sampling) -> Completion:
        """One completion, for coroutines that run in `loop`."""
        (completion,) = await self._complete_all([request], sampling)
        return completion

    async def _complete_all(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        tokenizer = self.local.tokenizer
        decode = (lambda ids: tokenizer.decode(ids, skip_special_tokens=True)) if sampling.stop else None
        key = next(self._keys)
        # Not self.version: while weights are on their way to a server, requests still ask it for those before.
        self._begun[key] = min((m.version for m in self._ready() if m.version is not None), default=self.version)
        try:
            sampled = await self.pool.generate_all(requests, sampling, training=sampling.for_training, decode=decode)
        except (ServerError, RefusedError) as error:
            raise ValueError(str(error)) from error
        finally:
            del self._begun[key]
        stop = StopCheck(tokenizer, sampling, torch.device("cpu"))
        texts = stop.texts([s.ids for s in sampled], [s.finish_reason == "stop" for s in sampled])
        return [
            Completion(
                prompt_ids=list(request.prompt_ids), ids=s.ids, logps=s.logps, finish_reason=s.finish_reason, text=text,
                versions=s.versions,
            )
            for request, s, text in zip(requests, sampled, texts, strict=True)
        ]  # fmt: skip

    def in_use(self) -> range:
        """Versions that requests in flight may name: any since the oldest of them began."""
        return range(min(list(self._begun.values()), default=self.version), self.version + 1)

    def score(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """Log-probs of given completions by the first server that is ready; vLLM scores at temperature 1 only."""
        if temperature != 1.0:
            raise ValueError(f"temperature={temperature}: vLLM scores given tokens at temperature 1 only; use local")
        assert self._ready(), "load() comes before score()"
        try:
            rows = [prompt + completion for prompt, completion in sequences]
            rows = self._run(score_rows(self.pool, self._ready()[0], rows))
        except (ServerError, RefusedError) as error:
            raise ValueError(str(error)) from error
        return [row[len(prompt) - 1 :] for row, (prompt, _) in zip(rows, sequences, strict=True)]

    def load(self, version: int) -> None:
        """Send the trainer's weights to every server, and compare log-probs after the first sync and every few."""
        assert threading.get_ident() == self._owner, "only the thread that trains may read its weights"
        waiting = [member for member in self.pool.members if member.needs_weights]
        if version == self.version and not self.weights.asleep and not waiting:
            return
        self._check_watch()
        started = time.monotonic()
        self._run(self.pool.expect(version))
        self.version = version
        everyone = [member for member in self.pool.members if member.state != "out" or member.needs_weights]
        self.weights.give_all(everyone, version)
        self._seconds += time.monotonic() - started
        self._until_probe -= 1
        if self._until_probe < 0 and self.probe(self._ready()):
            self._until_probe = self.sync_cfg.probe_every - 1

    def probe(self, members: Sequence[Member]) -> bool:
        """Score fixed ids here and there; a server that disagrees stops the run. Whether any could be asked."""
        self._gap, compared = 0.0, False
        ids = self._probe.sequences(min(member.server.info.model_len for member in self.pool.members) - 1)
        ours = self._probe.score(ids) if members else []
        for member in members:
            try:
                theirs = self._run(score_rows(self.pool, member, ids))
            except ServerError as error:
                self._run(self.pool.fail(member, str(error)))
                continue
            compared = True
            gap, limit, kind = self._probe.gap(ours, theirs, member.server.info.dtype)
            self._gap = max(self._gap, gap)
            if not gap <= limit:
                raise ValueError(
                    f"sync: {member.server.url} should hold version {self.version}, but its log-probs differ from the "
                    f"trainer's by {gap:.3g} {kind} (limit {limit:g}){self._claims(member)}"
                )
        return compared

    def pause(self) -> None:
        """No server makes tokens; completions in flight come back to us and go on at resume."""
        self._paused = self._ready()
        self.weights.on_all(self.pool.empty, self._paused)

    def resume(self) -> None:
        assert not self.weights.asleep, "load() is what wakes a server"
        paused, self._paused = self._paused, []
        self.weights.open([member for member in paused if member.state == "updating"], self.version)

    def sleep(self) -> None:
        """With colocate: the servers give their memory to the trainer. Call load before the next generate."""
        if self.colocate:
            self.weights.sleep(self._ready())

    def wake(self) -> None:
        """The weights that were loaded last, and memory for keys and values."""
        self.load(self.version)

    def health(self) -> dict[str, Any]:
        states = [
            {"url": m.server.url, "state": m.state, "reason": m.reason, "version": m.version} for m in self.pool.members
        ]
        return {"ok": bool(self._ready()), "engine": "vllm", "version": self.version, "servers": states}

    def metrics(self) -> dict[str, float]:
        """Of the syncs since the last call, and of the servers."""
        seconds, self._seconds = self._seconds, 0.0
        metrics = self.pool.metrics() | {"time/sync_s": seconds, "policy/sync_gap": self._gap}
        if self.weights.report is not None:
            metrics["rollout/sync_mb"] = self.weights.report.num_bytes / 1e6
        return metrics

    def close(self) -> None:
        """End the servers that are ours, leave the others as they are; may be called twice."""
        for server in self.launched:
            self.pool.members[server.replica].lost = True  # it is not to be started again
        if self._watch is not None:
            self._watch.cancel()
        if not self.launched:  # they live on, and are told that we leave
            self._close_sync()
        with contextlib.suppress(Exception):
            self.loop.run(self.pool.close(), CLOSE_S)
        for server in self.launched:
            server.stop()
        self._close_sync()  # its folders go once nobody reads them
        self.loop.close()

    def _close_sync(self) -> None:
        weights, self.weights = self.weights, None
        if weights is not None:
            with contextlib.suppress(Exception):
                weights.sync.close()

    def tend(self, version: int | None = None) -> None:
        """While waiting: servers that came back get weights, from the thread that owns them, and are compared.

        `version` is what the trainer's weights are called by now. Where that is newer than what the other servers hold,
        all of them get it: one version must not name two sets of weights.
        """
        self._check_watch()
        waiting = [member for member in self.pool.members if member.needs_weights]
        if not waiting or threading.get_ident() != self._owner:
            return
        if version is not None and version != self.version:
            self.load(version)
            return
        stopped, _, _ = self.weights.give(waiting, self.version)
        # Once more for those that others have failed; after that they wait for the next load.
        self.weights.give(stopped, self.version)
        self.probe([member for member in waiting if member.state == "ready"])

    def _check_watch(self) -> None:
        if self._watch is not None and self._watch.done():
            self._watch.result()
            raise AssertionError("the watch over the servers has ended")

    def _restart(self, index: int) -> VllmServer:
        """Blocking, in a thread of the pool's watch."""
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
        for number, server in enumerate(servers):
            info = server.info
            if longest is not None and info.model_len < longest:
                raise ValueError(
                    f"vllm.url={server.url}: takes {info.model_len} tokens, and a prompt with its completion may have "
                    f"{longest}; start it with --vllm.max-model-len {longest}, or lower max_completion_length"
                )
            if info.dtype != dtype:
                raise ValueError(
                    f"vllm.url={server.url}: serves {info.dtype}, and the weights will come in {dtype}; start it with "
                    f"--vllm.dtype {dtype}, or pass --vllm.dtype {info.dtype} here"
                )
            if info.sleep_mode and self._run(server.is_sleeping()):  # left so by an earlier run
                self.weights.asleep.add(number)
            if server.owner is not None and not server.leased:
                self.log(
                    f"vllm.url={server.url}: has no lease to give (it was not started by python -m rollout.serve), so "
                    "nothing keeps a second trainer away; this run stops when it finds another's weights there"
                )
            if self.colocate and not info.sleep_mode:
                raise ValueError(
                    f"vllm.colocate=True: {server.url} cannot sleep; start it with python -m rollout.serve "
                    "--vllm.colocate True"
                )
            if (
                backend == "lora"
                and info.extension
                and any(w["dirty"] for w in self._run(server.rpc("strop_info", timeout=30.0)))
            ):
                raise ValueError(
                    f"vllm.url={server.url}: a transfer to it broke off, half its weights are old; restart it"
                )
        lengths = [server.info.model_len for server in servers]
        count = f"{len(servers)} server{'s' * (len(servers) > 1)}"
        self.log(f"vLLM: {count}, context {min(lengths)}, weight sync by {backend}")

    def _claims(self, member: Member) -> str:
        """What the server itself believes it holds, and what to do."""
        info: dict[str, Any] = {}
        if member.server.info.extension:
            with contextlib.suppress(Exception):
                info = self.loop.run(member.server.rpc("strop_info", timeout=10.0), 20.0)[0]
        if not self.weights.sync.needs_pause and info.get("version") is not None:
            return "; an earlier run has replaced the base weights under the adapter: restart that server"
        says = f", and it says it holds version {info['version']}" if self.weights.sync.needs_pause and info else ""
        return f"{says}; its weights are not ours: try another --sync.backend, and report this with the model's name"

    def _ready(self) -> list[Member]:
        return [member for member in self.pool.members if member.state == "ready"]

    def _run(self, work: Any) -> Any:
        return self.loop.run(work)


def check_start(cfg: VllmConfig, device: torch.device, run: str = "") -> None:
    """Refuse what can be known before a server is started: no vLLM, the wrong build, nobody at an address, or another
    run than `run` that trains there.
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
        raise ValueError(str(error)) from error
    finally:
        loop.close()
