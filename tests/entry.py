"""Run the real entry point in a process of its own, as a user does."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.forked import TIMED_OUT

ROOT = Path(__file__).resolve().parents[1]
NOT_REPRODUCIBLE = ("time/", "perf/", "mem/")  # clocks and memory: everything else must repeat bit for bit


def environment(threads: int = 1) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def run(*argv: Any, cwd: Path, timeout: float = 300, threads: int = 1, **env: str) -> subprocess.CompletedProcess:
    """`python -m trainer ARGV` with its output: in a copy of a loaded process if nothing about its start is special."""
    words = ["-m", "trainer", *map(str, argv)]
    if threads == 1 and not env:
        return run_python(*words, cwd=cwd, timeout=timeout)
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment(threads) | env, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


@functools.cache
def _loaded_process() -> subprocess.Popen[str]:
    """One per test process; it ends when the test process does, because its stdin ends then."""
    command = [sys.executable, "-m", "tests.forked"]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_python(*words: str, cwd: Path, timeout: float = 300, **env: str) -> subprocess.CompletedProcess:
    """`python -m MODULE ...` or `python SCRIPT ...` in a copy of a process that has loaded torch and the trainer."""
    return _run_copies(words, [environment() | env], cwd, timeout)


def run_ranks(*words: str, cwd: Path, num_ranks: int = 2, nodes: bool = False, timeout: float = 300, **env: str) -> Any:
    """As run_python, with a copy for each rank of one run: what torchrun starts, without its own start."""
    return _run_copies(words, [each | env for each in rank_environments(num_ranks, nodes=nodes)], cwd, timeout)


def rank_environments(num_ranks: int, *, nodes: bool = False) -> list[dict[str, str]]:
    """The environment of each rank.

    nodes: each rank is a node with one GPU, and all of them share GPU 0. NCCL rejects two ranks on one GPU unless their
    host ids differ; they communicate over sockets, as nodes without InfiniBand do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks: list[dict[str, Any]] = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    if nodes:
        node = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
        ranks = [settings | node | {"NCCL_HOSTID": f"node{settings['RANK']}"} for settings in ranks]
    return [environment() | {name: str(value) for name, value in settings.items()} for settings in ranks]


def _run_copies(
    words: tuple[str, ...], environments: list[dict[str, str]], cwd: Path, timeout: float
) -> subprocess.CompletedProcess:
    server = _loaded_process()
    with tempfile.TemporaryDirectory() as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        request = {"argv": words, "cwd": str(cwd), "env": environments, "out": str(out), "err": str(err)}
        print(json.dumps(request | {"timeout": timeout}), file=server.stdin, flush=True)
        code = json.loads(server.stdout.readline())
        if code == TIMED_OUT:
            raise subprocess.TimeoutExpired(words, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def run_ok(*argv: Any, cwd: Path, timeout: float = 300, threads: int = 1, **env: str) -> subprocess.CompletedProcess:
    done = run(*argv, cwd=cwd, timeout=timeout, threads=threads, **env)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def processes_with(setting: str) -> list[int]:
    """Living processes that were started with NAME=value in their environment: what a run has left behind."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if setting.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def repeatable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(NOT_REPRODUCIBLE)} for row in rows]


def small_model(folder: Path, *, width: int = 16, heads: int = 2, head_dim: int = 8) -> str:
    """A model of one block, narrow by default: without bfloat16 instructions the tiny one takes seconds for a pass."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tiny = ROOT / "trainer" / "tiny"
    config = AutoConfig.from_pretrained(tiny)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = width, 2 * width, 1
    config.num_attention_heads = config.num_key_value_heads = heads
    config.head_dim = head_dim
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)
