"""Runs on several hosts: a host that disappears and returns, fewer hosts, vLLM servers on a third host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.servers.command import TOKEN, find_python
from rollout.servers.options import VllmConfig
from tests.entry import metrics, run_ok
from tests.ranks.hosts import Host, hosts, problem
from tests.test_ranks import SFT, alike
from tests.test_slurm import wait_for
from trainer.parallel.watch import HUNG

STEPS, TIMEOUT_S = 16, 30
ROWS = (*SFT, "--data", "task:addition:split=sft,size=96", "--eval-data", "task:addition:split=eval,size=4",
        "--max-steps", STEPS)  # fmt: skip
REPLACE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun would not give a new torchrun rank 0's address again
HSDP = ("--parallel.mode", "fsdp", "--parallel.shard", 2, "--parallel.timeout-s", TIMEOUT_S)


@pytest.fixture
def three() -> Any:
    if reason := problem():
        pytest.skip(reason)
    with hosts(3) as made:
        yield made


def torchrun(host: Host, log: Path, *argv: Any, first: Host, nodes: int = 2, **env: str) -> subprocess.Popen[bytes]:
    launcher = ("--nnodes", nodes, "--nproc-per-node", 2, "--rdzv-id", 1, "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{first.name}:29500", "--max-restarts", 3)  # fmt: skip
    return host.start(sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "trainer", *argv, log=log, **env)


def steps(run: Path) -> list[int]:
    return [row["step"] for row in metrics(run)] if (run / "metrics.jsonl").exists() else []


def seconds_until(words: str, log: Path, limit: float) -> float:
    begin = time.monotonic()
    wait_for(lambda: words in log.read_text(), limit, log.read_text)
    print(*(line for line in log.read_text().splitlines() if words in line), sep="\n")
    return time.monotonic() - begin


@pytest.mark.slow
def test_run_survives_a_host_that_disappears_and_resumes_on_fewer_hosts(three, tmp_path):
    """Two hosts of two ranks: each host has a copy of the model, sharded over its ranks."""
    a, b, _ = three
    logs, run = [tmp_path / "a.log", tmp_path / "b.log"], tmp_path / "run"
    argv = (*ROWS, *HSDP, "--per-device-train-batch-size", 4, "--output-dir", run)
    started = [torchrun(host, log, *argv, first=a, **REPLACE) for host, log in zip((a, b), logs, strict=True)]
    wait_for(lambda: len(steps(run)) > 3, 400, logs[0].read_text)
    b.disappear()
    assert seconds_until("has waited", logs[0], 3 * TIMEOUT_S) < 2 * TIMEOUT_S
    assert "rank 2 has not reported" in logs[0].read_text() and "rank 3 has not reported" in logs[0].read_text()
    seconds_until(f"exitcode: {HUNG}", logs[0], 60)
    fewer = shutil.copytree(run, tmp_path / "fewer")
    assert started[0].poll() is None, "torchrun waits for the second host"

    b.connect()
    again = torchrun(b, logs[1], *argv, first=a, **REPLACE)
    assert started[0].wait(400) == 0, logs[0].read_text()[-4000:]
    assert again.wait(60) == 0, logs[1].read_text()[-4000:]
    assert "resuming after step" in logs[0].read_text()
    log = tmp_path / "fewer.log"
    resumed = torchrun(a, log, "--resume", fewer, "--gradient-accumulation-steps", 2, first=a, nodes=1)
    assert resumed.wait(400) == 0 and "resuming after step" in log.read_text(), log.read_text()[-4000:]

    run_ok(*ROWS, "--per-device-train-batch-size", 16, "--output-dir", tmp_path / "one", cwd=tmp_path)
    for folder in (run, fewer):
        alike(metrics(folder), metrics(tmp_path / "one"), limit=1e-3)


@pytest.mark.slow
def test_hosts_that_count_restarts_differently_form_a_group(three, tmp_path):
    """A rank of one host is killed, and the other host's ranks do not notice: its torchrun does not count a restart."""
    a, b, _ = three
    logs, run = [tmp_path / "a.log", tmp_path / "b.log"], tmp_path / "run"
    argv = (*ROWS, *HSDP, "--per-device-train-batch-size", 4, "--output-dir", run)
    started = [torchrun(host, log, *argv, first=a) for host, log in zip((a, b), logs, strict=True)]
    wait_for(lambda: len(steps(run)) > 3, 400, logs[0].read_text)
    for pid in a.ranks().values():
        os.kill(pid, signal.SIGSTOP)
    os.kill(b.ranks()[3], signal.SIGKILL)
    seconds_until("resuming after step", logs[0], 200)
    assert [launcher.wait(200) for launcher in started] == [0, 0], logs[0].read_text()[-4000:]
    assert "RuntimeError" not in logs[0].read_text(), "the first restart succeeds"
    assert steps(run) == list(range(STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("retries", [15, 5])
def test_ranks_end_if_the_host_of_rank_0_disappears(retries, three, tmp_path):
    """Its store no longer answers, and its connections stay open until the kernel has resent data `retries` times.

    15, the default, takes about 15 minutes: torchrun waits that long, the ranks only for their timeout.
    """
    a, b, _ = three
    logs, run = [tmp_path / "a.log", tmp_path / "b.log"], tmp_path / "run"
    subprocess.run(b.command("sysctl", "-qw", f"net.ipv4.tcp_retries2={retries}"), check=True)
    argv = (*ROWS, *HSDP, "--per-device-train-batch-size", 4, "--output-dir", run)
    launcher = [torchrun(host, log, *argv, first=a) for host, log in zip((a, b), logs, strict=True)][1]
    wait_for(lambda: len(steps(run)) > 3, 400, logs[0].read_text)
    a.disappear()
    begin = time.monotonic()
    if retries == 15:
        words = f"MASTER_ADDR={a.name} has not answered"
    else:
        words = "lost another rank"
        assert launcher.wait(2 * TIMEOUT_S) != 0
        print(f"torchrun ended after {time.monotonic() - begin:.0f} s")
    assert seconds_until(words, logs[1], 2 * TIMEOUT_S) < 2 * TIMEOUT_S
    print(f"ranks ended after {time.monotonic() - begin:.0f} s")
    assert "trainer/__main__.py" not in logs[1].read_text(), "no traceback"


@pytest.mark.slow
@pytest.mark.vllm
def test_servers_on_a_third_host_sync_and_sample(three, tmp_path):
    try:
        find_python(VllmConfig())
    except ValueError as error:
        pytest.skip(str(error))
    a, b, servers = three
    env = {TOKEN: "a-token-of-this-test", "XDG_RUNTIME_DIR": str(tmp_path)}
    log, url = tmp_path / "serve.log", f"http://{servers.name}:8000"
    serve = ("--model", "builtin:tiny", "--vllm.host", servers.name, "--vllm.port", 8000, "--vllm.max-model-len", 256)
    served = servers.start(sys.executable, "-m", "rollout.serve", *serve, "--dtype", "float32", log=log, **env)
    wait_for(lambda: "now start the trainer" in log.read_text() or served.poll() is not None, 400, log.read_text)
    grpo = ("--method", "grpo", "--max-steps", 3, "--max-eval-rows", 20, "--eval-steps", 0, "--sync.probe-every", 1,
            "--rollout.engine", "vllm", "--vllm.url", url, "--per-device-train-batch-size", 8)  # fmt: skip
    wrong = tmp_path / "wrong.log"
    alone = a.start(sys.executable, "-m", "trainer", *grpo, log=wrong, **env | {TOKEN: "wrong"})
    assert alone.wait(200) != 0 and f"{url}: wrong token" in wrong.read_text(), wrong.read_text()
    for backend, folder in {"process_group": (), "filesystem": ("--sync.folder", tmp_path / "weights")}.items():
        run, logs = tmp_path / backend, [tmp_path / f"{backend}-{host}.log" for host in "ab"]
        argv = (*grpo, *HSDP[:4], "--sync.backend", backend, *folder, "--output-dir", run)
        for launcher in [torchrun(host, log, *argv, first=a, **env) for host, log in zip((a, b), logs, strict=True)]:
            assert launcher.wait(400) == 0, logs[0].read_text()[-4000:] + log.read_text()[-2000:]
        rows = metrics(run)
        print(*(line for line in logs[0].read_text().splitlines() if "server" in line or "sync" in line), sep="\n")
        print(backend, [row["policy/sync_gap"] for row in rows[1:]], [row["time/sync_s"] for row in rows[1:]])
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert all(row["policy/sync_gap"] < 1e-3 and row["rollout/server_out"] == 0 for row in rows[1:])
