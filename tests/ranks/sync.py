"""Run by torchrun: sync weights from two ranks to a real vLLM server repeatedly, and compare log-probs.

    torchrun --nproc-per-node 2 -m tests.ranks.sync URL MODEL_FOLDER NUM_SYNCS CASE ...

A case is MODE:BACKEND, with +lora for an adapter and +broken for a transfer that is interrupted during the third sync.
Prints one JSON line per case on rank 0.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from data.types import Prompt
from rollout.engine import Request, Sampling
from rollout.servers.worker.strop_wire import PeerError
from rollout.sync import process_group as transfer
from trainer.cli import parse
from trainer.parallel.comm import is_main, pick_device, process_group
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy
from trainer.policy.sharding import parallelize
from trainer.rl import servers, setup
from trainer.rl.rank0_rollout import Rank0Rollout

PROBE_EVERY = 20
MODES = {
    "replicate": ("--parallel.mode", "replicate"),
    "fsdp": ("--parallel.mode", "fsdp"),
    "copies": ("--parallel.mode", "fsdp", "--parallel.shard", 1),  # sharded over one rank: the mesh of several machines
}


def make(url: str, folder: str, mode: str, backend: str, *, lora: bool) -> tuple[Any, Policy]:
    argv = [
        "--method", "grpo", "--model", folder, "--rollout.engine", "vllm", "--vllm.url", url, "--sync.backend", backend,
        "--sync.probe-every", PROBE_EVERY, *MODES[mode], "--max-completion-length", 8, "--data", "task:addition",
        "--reward-funcs", "exact_match",
    ]  # fmt: skip
    argv += [] if backend == "lora" else ["--sync.bucket-mb", 1]
    argv += ["--lora.r", 8, "--lora.alpha", 16] if lora else []
    _, cfg, _ = parse([str(word) for word in argv])
    torch.manual_seed(0)
    policy = load_policy(cfg.model, cfg.lora, pick_device(), with_reference=False)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return cfg, parallelize(cfg.parallel, policy)


@torch.no_grad()
def change(policy: Policy, first: list[torch.Tensor], version: int) -> None:
    """Change this rank's shards of every trained weight by a few percent."""
    for i, ((_, parameter), initial) in enumerate(zip(trained(policy), first, strict=True)):
        parameter.copy_(initial * (1 + 0.05 * math.sin(1.7 * version + i)))


def trained(policy: Policy) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)


def break_once(at_bucket: int) -> None:
    real, calls = transfer.fill, [0]

    def fill(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == at_bucket:
            raise PeerError("broken by the test")
        real(*args)

    transfer.fill = fill


class Case:
    """One engine, synced repeatedly; only rank 0 fills `seconds` and `gaps`."""

    def __init__(self, rank0: Rank0Rollout, policy: Policy) -> None:
        self.rank0, self.policy, self.engine = rank0, policy, rank0.engine
        self.first = [p.detach().clone() for _, p in trained(policy)]
        self.seconds: list[float] = []
        self.gaps: list[float] = []
        self.logps: list[list[float]] = []  # for the first and the last version

    def sync(self, version: int) -> None:
        started = time.perf_counter()
        self.engine.load(version)
        self.seconds.append(time.perf_counter() - started)
        self.gaps.append(self.engine.metrics()["policy/sync_gap"])

    def check(self) -> None:
        """Check that the server samples with this version and that log-probs agree."""
        engine = self.engine
        (completion,) = engine.generate([Request(prompt_ids=[5, 17, 33], seed=1)], Sampling(max_tokens=4))
        assert completion.versions == [(engine.version, len(completion.ids))], completion.versions
        assert engine.probe(engine._ready())
        self.gaps.append(engine.metrics()["policy/sync_gap"])
        self.logps.append(engine._probe.logps(engine._probe.sequences(32))[0])

    def restore(self, version: int) -> None:
        """Sync the server's initial weights: adapters of later cases need their base."""
        with torch.no_grad():
            for (name, parameter), initial in zip(trained(self.policy), self.first, strict=True):
                parameter.copy_(initial * 0 if "lora_B" in name else initial)
        self.rank0.run(partial(self.sync, version))

    def run(self, num_syncs: int) -> dict[str, Any]:
        for version in range(num_syncs):
            change(self.policy, self.first, version)
            self.rank0.run(partial(self.sync, version))
            if version in (0, num_syncs - 1):
                self.rank0.run(self.check)
        self.restore(num_syncs)
        if not is_main():
            return {}
        metrics = self.engine.metrics()
        return {
            "gap": max(self.gaps),
            "moved": max(abs(a - b) for a, b in zip(*self.logps, strict=True)),
            "mb": metrics["rollout/sync_mb"],
            "servers_out": metrics["rollout/server_out"],
            "first_s": self.seconds[0],
            "median_s": statistics.median(self.seconds[1:]),
            "max_s": max(self.seconds[1:]),
        }


def run_case(url: str, folder: str, num_syncs: int, case: str) -> dict[str, Any]:
    place, *options = case.split("+")
    mode, backend = place.split(":")
    cfg, policy = make(url, folder, mode, backend, lora="lora" in options)
    prompt = Prompt(source="row 1", prompt="x", ids=[5, 17, 33])
    with tempfile.TemporaryDirectory() as logs:
        run = SimpleNamespace(
            id="c0ffee00", dir=Path(logs), note=lambda text: print(text, file=sys.stderr), keep=lambda kept: kept
        )
        servers.check_servers(cfg, policy, run)
        rank0 = Rank0Rollout(policy, setup.start_engine(cfg, policy, run, [prompt]), [prompt])
        rank0.handlers |= servers.WeightCommands(policy).handlers
        if "broken" in options and is_main():
            buckets = len(rank0.engine.weights.sync.link.buckets)
            break_once(2 * buckets + buckets // 2 + 1)
        try:
            return Case(rank0, policy).run(num_syncs)
        finally:
            rank0.engine.close()


def main(url: str, folder: str, num_syncs: str, *cases: str) -> None:
    with process_group(120.0):
        for case in cases:
            started = time.perf_counter()
            result = run_case(url, folder, int(num_syncs), case)
            if is_main():
                seconds = time.perf_counter() - started
                print(json.dumps({"case": case, "syncs": int(num_syncs), **result, "all_s": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
