"""The engine over vLLM servers: GRPO talks to it as to the one in its own process.

    engine = VllmEngine.start(VllmConfig(), SyncConfig(), model="Qwen/Qwen3-0.6B", source=weights, own=local, ...)
    engine.load(version=12)        # the trainer's weights go to every server; now and then both are asked to agree
    completions = engine.generate(requests, sampling)
    engine.close()                 # ends the servers that it started

The thread that makes the engine owns the weights: it alone calls load, and a server that came back gets its weights
when that thread waits in generate or calls load again. Requests run in a loop of their own (loop.py), so another
thread may call generate meanwhile; a completion that is interrupted by a load goes on with the new weights.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import torch

from rollout.local import LocalEngine, StopCheck
from rollout.loop import Loop
from rollout.options import SyncConfig, VllmConfig
from rollout.sync.base import SyncError, SyncReport, WeightSource
from rollout.sync.choose import make_sync, pick_backend
from rollout.types import Completion, Request, Sampling
from rollout.vllm_command import TOKEN
from rollout.vllm_launch import Launched, launch, wait_ready
from rollout.vllm_member import Member
from rollout.vllm_pool import Pool
from rollout.vllm_server import RefusedError, ServerError, VllmServer

PROBES, PROBE_TOKENS = 3, 32  # sequences whose log-probs are compared after a sync
LOOK_S = 0.5  # how often a thread that waits for completions looks after servers that need weights
MAX_PUSHES = 3  # of one version, each after a server that failed was left out
CLOSE_S = 30.0


class VllmEngine:
    """Engine over one or many vLLM servers, given by address or started here."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        launched: Sequence[Launched],  # those of ours, in the same order; empty: they were given
        *,
        cfg: VllmConfig,
        sync: SyncConfig,
        source: WeightSource,
        own: LocalEngine,  # scores with the trainer's own weights
        device: torch.device,
        colocate: bool,
        say: Callable[[str], None] = print,
    ) -> None:
        self.cfg, self.sync_cfg, self.own, self.device, self.say = cfg, sync, own, device, say
        self.launched, self.colocate = list(launched), colocate
        self.version = -1  # nothing has been loaded
        self.report: SyncReport | None = None  # of the last sync
        self._owner = threading.get_ident()
        self._asleep, self._num_syncs, self._seconds, self._gap = False, 0, 0.0, 0.0
        self.loop = Loop()
        self.sync = self._watch = None
        restart = self._restart if launched else None
        self.pool = Pool(
            servers, max_in_flight=cfg.max_in_flight, timeout=cfg.timeout, say=say, restart=restart, seeded=cfg.seeded
        )
        try:
            self._run(self.pool.connect())
            backend = pick_backend(sync.backend, servers, is_lora=source.is_lora, device_uuid=uuid_of(device))
            self._check_servers(servers, backend)
            self.sync = make_sync(sync, backend, source, self.loop, servers, device)
            self._watch = self.loop.start(self.pool.watch())
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(
        cls,
        cfg: VllmConfig,
        sync: SyncConfig,
        *,
        model: str,
        source: WeightSource,
        own: LocalEngine,
        device: torch.device,
        dtype: str,
        lora_rank: int,
        log_dir: Path,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        vocab_size: int | None = None,
        say: Callable[[str], None] = print,
    ) -> VllmEngine:
        """With the servers of --vllm.url, or with servers of our own."""
        colocate = shares_gpu(cfg, device)
        launched: list[Launched] = []
        try:
            for replica in range(0 if cfg.url else cfg.replicas):
                server = launch(
                    cfg, model=model, lora_rank=lora_rank, log_dir=log_dir, replica=replica, device=device.type,
                    dtype=dtype, colocate=colocate, first_gpu=0 if colocate else 1, max_model_len=max_model_len,
                    trust_remote_code=trust_remote_code, say=say,
                )  # fmt: skip
                launched.append(server)
            wait_ready(launched, cfg.startup_timeout, say)
            token = os.environ.get(TOKEN)
            places = [(s.url, s.token) for s in launched] or [(url, token) for url in cfg.url]
            servers = [VllmServer(url, token=t, timeout=cfg.timeout, vocab_size=vocab_size) for url, t in places]
            return cls(
                servers, launched, cfg=cfg, sync=sync, source=source, own=own, device=device, colocate=colocate, say=say
            )
        except BaseException:
            for server in launched:
                server.stop()
            raise

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order, whatever happens to single servers on the way."""
        assert self.version >= 0 and not self._asleep, "load() comes before generate()"
        decode = (lambda ids: self.own.tokenizer.decode(ids, skip_special_tokens=True)) if sampling.stop else None
        work = self.pool.generate_all(requests, sampling, training=sampling.for_training, decode=decode)
        future = self.loop.start(work)
        try:
            while True:
                try:
                    sampled = future.result(LOOK_S)
                    break
                except FutureTimeout:
                    self._look_after()
        except (ServerError, RefusedError) as error:
            raise ValueError(str(error)) from error
        finally:
            future.cancel()
        stop = StopCheck(self.own.tokenizer, sampling, torch.device("cpu"))
        texts = stop.texts([s.ids for s in sampled], [s.finish_reason == "stop" for s in sampled])
        return [
            Completion(
                prompt_ids=list(request.prompt_ids),
                ids=s.ids,
                logps=s.logps,
                finish_reason=s.finish_reason,
                text=text,
                versions=s.versions,
            )
            for request, s, text in zip(requests, sampled, texts, strict=True)
        ]

    def score(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """Log-probs of given completions by the first server that is ready; vLLM scores at temperature 1 only."""
        if temperature != 1.0:
            raise ValueError(f"temperature={temperature}: vLLM scores given tokens at temperature 1 only; use local")
        ready = [member for member in self.pool.members if member.state == "ready"]
        assert ready, "load() comes before score()"
        rows = self._scores(ready[0], [prompt + completion for prompt, completion in sequences])
        return [row[len(prompt) - 1 :] for row, (prompt, _) in zip(rows, sequences, strict=True)]

    def load(self, version: int) -> None:
        """Send the trainer's weights to every server, and compare log-probs after the first sync and every few."""
        assert threading.get_ident() == self._owner, "only the thread that trains may read its weights"
        waiting = [member for member in self.pool.members if member.needs_weights]
        if version == self.version and not self._asleep and not waiting:
            return
        started = time.monotonic()
        self._run(self.pool.expect(version))
        self._wake_weights()
        everyone = [member for member in self.pool.members if member.state != "out" or member.needs_weights]
        self._give(everyone, version)
        self.version, self._asleep = version, False
        self._seconds += time.monotonic() - started
        if self._num_syncs % self.sync_cfg.probe_every == 0:
            self.probe()
        self._num_syncs += 1

    def probe(self) -> None:
        """The same fixed ids, scored by each server and by the trainer; stops the run when they disagree."""
        vocab = self.own.model.config.get_text_config().vocab_size
        longest = min(member.server.info.model_len - 1 for member in self.pool.members if member.server.info)
        length = max(2, min(PROBE_TOKENS, longest))
        rows = [[(seed * i * i + 7 * i + seed) % vocab for i in range(length)] for seed in range(1, 1 + PROBES)]
        ours = [logp for row in self.own.score([(ids[:1], ids[1:]) for ids in rows], 1.0) for logp in row]
        worst, name, limit = self._tolerance()
        self._gap = 0.0
        for member in [member for member in self.pool.members if member.state == "ready"]:
            theirs = [logp for row in self._scores(member, rows) for logp in row]
            # Relative to unlikely tokens' log-probs: those of -50 have fewer digits after the point than those of -1.
            gap = worst([abs(a - b) / max(1.0, abs(a)) for a, b in zip(ours, theirs, strict=True)])
            self._gap = max(self._gap, gap)
            if not gap <= limit:
                raise ValueError(
                    f"sync: {member.server.url} should hold version {self.version}, but its log-probs differ from the "
                    f"trainer's by {gap:.3g} {name} (limit {limit:g}){self._claims(member)}; its weights are not ours: "
                    "try another --sync.backend, and report this with the model's name"
                )

    def pause(self) -> None:
        """No server makes tokens; completions in flight come back to us and go on at resume."""
        self._all(self.pool.empty, [member for member in self.pool.members if member.state == "ready"])

    def resume(self) -> None:
        self._open([member for member in self.pool.members if member.state == "updating"], self.version)

    def sleep(self) -> None:
        """With colocate: the servers give their memory to the trainer. Call load before the next generate."""
        if not self.colocate or self._asleep:
            return
        self.pause()
        # Level 2 forgets the weights, which load sends anyway; an adapter's base is not sent, so level 1 keeps it.
        level = 2 if self.sync is not None and self.sync.needs_pause else 1
        self._all(lambda member: member.server.sleep(level), self._updating())
        self._asleep = True

    def wake(self) -> None:
        """The weights that were loaded last, and memory for keys and values."""
        if self._asleep:
            self.load(self.version)

    def health(self) -> dict[str, Any]:
        states = [
            {"url": m.server.url, "state": m.state, "reason": m.reason, "version": m.version} for m in self.pool.members
        ]
        ready = any(member.state == "ready" for member in self.pool.members)
        return {"ok": ready, "engine": "vllm", "version": self.version, "servers": states}

    def metrics(self) -> dict[str, float]:
        """Of the syncs since the last call, and of the servers."""
        seconds, self._seconds = self._seconds, 0.0
        metrics = self.pool.metrics() | {"time/sync_s": seconds, "policy/sync_gap": self._gap}
        if self.report is not None:
            metrics["rollout/sync_mb"] = self.report.num_bytes / 1e6
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
        sync, self.sync = self.sync, None
        if sync is not None:
            with contextlib.suppress(Exception):
                sync.close()

    def _give(self, members: list[Member], version: int) -> None:
        """ready -> emptied and paused -> weights -> resumed. A server that fails on the way is put out and the rest
        go on; none is resumed before a push to it has gone through."""
        trouble = "no server was left"
        for _ in range(MAX_PUSHES):
            members = self._until_some(members)
            stopped = [m for m in members if self.sync.needs_pause or m.state != "ready"]
            failed = self._all(self.pool.empty, [m for m in stopped if m.state != "updating"])
            members = [m for m in members if m not in failed]
            if not members:
                continue
            try:
                self.report = self.sync.push([m.server for m in members], version)
            except SyncError as error:
                trouble = str(error)
                for i, reason in error.failed.items():
                    self._run(self.pool.fail(members[i], reason))
                members = [m for i, m in enumerate(members) if i not in error.failed]
                continue
            self._open(members, version)
            return
        raise ValueError(
            f"sync: version {version} could not be brought to any server in {MAX_PUSHES} attempts ({trouble}); "
            "the servers' logs may say more"
        )

    def _until_some(self, members: list[Member]) -> list[Member]:
        """These, or if none is left, the first that comes back; the pool says when there is no hope."""
        deadline = time.monotonic() + self.pool.patience
        while not members:
            self._check_watch()
            if time.monotonic() > deadline or all(member.lost for member in self.pool.members):
                reasons = "; ".join(f"{m.server.url}: {m.reason}" for m in self.pool.members)
                raise ValueError(f"vllm: no server is left ({reasons}); their logs may say more")
            members = [member for member in self.pool.members if member.needs_weights]
            time.sleep(0 if members else LOOK_S)
        return members

    def _open(self, members: list[Member], version: int) -> None:
        if self.colocate and self._asleep:
            self._all(lambda member: member.server.wake("kv_cache"), members)
        name = self.sync.model_name(version)
        self._all(lambda member: self.pool.refill(member, version, name), members)

    def _wake_weights(self) -> None:
        """Memory for the weights before they are sent, and for keys and values after: both at once may not fit."""
        if self.colocate and self._asleep:
            torch.cuda.empty_cache()
            self._all(lambda member: member.server.wake("weights"), self._updating())

    def _updating(self) -> list[Member]:
        return [member for member in self.pool.members if member.state == "updating"]

    def _look_after(self) -> None:
        """While waiting: servers that came back get weights, from the thread that owns them."""
        self._check_watch()
        waiting = [member for member in self.pool.members if member.needs_weights]
        if waiting and threading.get_ident() == self._owner:
            self._give(waiting, self.version)

    def _check_watch(self) -> None:
        if self._watch is not None and self._watch.done():
            self._watch.result()
            raise AssertionError("the watch over the servers has ended")

    def _restart(self, index: int) -> VllmServer:
        """Blocking, in a thread of the pool's watch."""
        server = self.launched[index]
        server.restart()
        wait_ready([server], self.cfg.startup_timeout, self.say)
        old = self.pool.members[index].server
        return VllmServer(server.url, token=server.token, timeout=self.cfg.timeout, vocab_size=old.vocab_size)

    def _check_servers(self, servers: Sequence[VllmServer], backend: str) -> None:
        lengths = {server.info.model_len for server in servers if server.info}
        self.say(
            f"vLLM: {len(servers)} server{'s' * (len(servers) > 1)}, context {min(lengths)}, weight sync by {backend}"
        )

    def _scores(self, member: Member, rows: Sequence[list[int]]) -> list[list[float]]:
        async def all_rows() -> list[list[float]]:
            return [await member.server.score(ids, model=member.model, version=member.version) for ids in rows]

        try:
            return self._run(all_rows())
        except (ServerError, RefusedError) as error:
            raise ValueError(str(error)) from error

    def _claims(self, member: Member) -> str:
        """What the server itself believes it holds."""
        info = member.server.info
        if info is None or not info.extension or not self.sync.needs_pause:
            return ""
        with contextlib.suppress(Exception):
            told = self.loop.run(member.server.rpc("strop_info", timeout=10.0), 20.0)
            return f", and it says it holds version {told[0].get('version')}"
        return ""

    def _tolerance(self) -> tuple[Callable[[list[float]], float], str, float]:
        is_exact = all(m.server.info is None or m.server.info.dtype == "float32" for m in self.pool.members)
        if is_exact:
            return max, "at most", self.sync_cfg.probe_tolerance or 1e-4
        return statistics.fmean, "on average", self.sync_cfg.probe_tolerance or 0.05

    def _all(self, work: Callable[[Member], Any], members: Sequence[Member]) -> list[Member]:
        """Do the same on several servers at a time; those that failed are out."""
        futures = [(member, self.loop.start(work(member))) for member in members]
        failed = []
        for member, future in futures:
            try:
                future.result()
            except (ServerError, RefusedError) as error:
                failed.append(member)
                self._run(self.pool.fail(member, str(error)))
        return failed

    def _run(self, work: Any) -> Any:
        return self.loop.run(work)


def uuid_of(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def shares_gpu(cfg: VllmConfig, device: torch.device) -> bool:
    """Whether server and trainer take turns on one GPU."""
    if device.type != "cuda":
        if cfg.colocate:
            raise ValueError("vllm.colocate=True: there is no GPU to share; leave it out")
        return False
    if cfg.colocate is not None:
        return cfg.colocate
    return not cfg.url and not cfg.devices and torch.cuda.device_count() == 1
