"""Weight sync from two ranks to a real server: every backend, an interrupted transfer and complete runs."""

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
        assert result["gap"] < 1e-3, result  # log-prob difference after the first, the last and some other syncs
        assert result["moved"] > 0.1, result  # difference between the first and the last version
    return results


@pytest.mark.slow
def test_every_backend_syncs_from_two_ranks(tied_server, monkeypatch, tmp_path):
    own_weights(tied_server, monkeypatch)
    results = sync(tied_server, 4, "fsdp:lora+lora", "fsdp:filesystem", "fsdp:process_group+lora+broken", cwd=tmp_path)
    assert results[-1]["servers_out"] > 0


@pytest.mark.slow
def test_untied_head_with_fsdp_copies_and_replicate(untied_server, tmp_path):
    sync(untied_server, 4, "fsdp:process_group", "copies:filesystem", "replicate:process_group", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp:process_group", "fsdp:filesystem", "fsdp:lora+lora"])
def test_200_consecutive_syncs(case, tied_server, monkeypatch, tmp_path):
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
def test_two_ranks_train_like_one(flags, tied_server, monkeypatch, tmp_path):
    own_weights(tied_server, monkeypatch)
    server = ("--vllm.url", tied_server.url)
    alone = [*RUN, *server, *flags[2:], "--per-device-train-batch-size", 32, "--output-dir", tmp_path / "one"]
    run_ok(*alone, cwd=tmp_path, **{TOKEN: tied_server.token})
    own_weights(tied_server, monkeypatch)
    together = [*RUN, *server, *flags, "--per-device-train-batch-size", 16, "--output-dir", tmp_path / "two"]
    two_ok("trainer", *together, cwd=tmp_path, **{TOKEN: tied_server.token})
    two, one = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert [row["step"] for row in two] == [row["step"] for row in one] == [0, 1, 2, 3]
    for row in two[1:]:
        assert row["policy/sync_gap"] < 1e-3 and row["rollout/server_out"] == 0, row
    if "--async-prefetch" in flags:  # weight versions of completions depend on timing
        assert max(row["rollout/staleness_max"] for row in two[1:]) > 0
    else:
        alike(two, one, limit=2e-4)
