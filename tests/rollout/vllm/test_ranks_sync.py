"""Weights from two processes to a real server: each way they can go, a transfer that breaks off, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.servers.command import TOKEN
from tests.entry import metrics, run_ok
from tests.rollout.vllm.conftest import Server
from tests.rollout.vllm.test_engine import own_weights
from tests.test_ranks import alike, two_ok

RUN = ("--method", "grpo", "--rollout.engine", "vllm", "--max-steps", 3, "--max-eval-rows", 20, "--eval-steps", 0,
       "--sync.probe-every", 1, "--num-iterations", 1)  # fmt: skip


def sync(server: Server, num_syncs: int, *cases: str, cwd: Path, timeout: float = 240) -> list[dict[str, Any]]:
    argv = ("tests.ranks.sync", server.url, server.model_folder, num_syncs, *cases)
    done = two_ok(*argv, cwd=cwd, timeout=timeout, **{TOKEN: server.token})
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == list(cases)
    print(*(line for line in done.stderr.splitlines() if line.startswith("server ")), sep="\n")
    for result in results:
        print(json.dumps(result))
        assert result["gap"] < 1e-3, result  # of log-probs, after the first sync, the last and some between
        assert result["moved"] > 0.1, result  # what the first and the last version differ by
    return results


@pytest.mark.slow
def test_weights_of_two_processes_reach_a_server_each_way(tied_server, monkeypatch, tmp_path):
    own_weights(tied_server, monkeypatch)
    results = sync(tied_server, 4, "fsdp:lora+lora", "fsdp:filesystem", "fsdp:process_group+lora+broken", cwd=tmp_path)
    assert results[-1]["servers_out"] > 0


@pytest.mark.slow
def test_untied_heads_copies_of_shards_and_whole_copies(untied_server, tmp_path):
    sync(untied_server, 4, "fsdp:process_group", "copies:filesystem", "replicate:process_group", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp:process_group", "fsdp:filesystem", "fsdp:lora+lora"])
def test_two_hundred_syncs_in_a_row(case, tied_server, monkeypatch, tmp_path):
    own_weights(tied_server, monkeypatch)
    (result,) = sync(tied_server, 200, case, cwd=tmp_path, timeout=900)
    assert result["servers_out"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--parallel.mode", "fsdp", "--sync.backend", "process_group"),
        ("--parallel.mode", "fsdp", "--sync.backend", "filesystem", "--async-prefetch", "--num-iterations", 2),
        ("--parallel.mode", "fsdp", "--lora.r", 8, "--sync.backend", "lora"),
        ("--parallel.mode", "replicate", "--sync.backend", "process_group"),
    ],
)
def test_a_run_of_two_processes_is_that_of_one(flags, tied_server, monkeypatch, tmp_path):
    own_weights(tied_server, monkeypatch)
    server = ("--vllm.url", tied_server.url)
    alone = [*RUN, *server, *flags[2:], "--per-device-train-batch-size", 32, "--output-dir", tmp_path / "one"]
    run_ok(*alone, cwd=tmp_path, **{TOKEN: tied_server.token})
    own_weights(tied_server, monkeypatch)
    together = [*RUN, *server, *flags, "--per-device-train-batch-size", 16, "--output-dir", tmp_path / "two"]
    two_ok("trainer", *together, cwd=tmp_path, **{TOKEN: tied_server.token})
    ours, theirs = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [0, 1, 2, 3]
    for row in ours[1:]:
        assert row["policy/sync_gap"] < 1e-3 and row["rollout/server_out"] == 0, row
    if "--async-prefetch" in flags:  # what a completion was made by depends on the clock
        assert max(row["rollout/staleness_max"] for row in ours[1:]) > 0
    else:
        alike(ours, theirs, limit=2e-4)
