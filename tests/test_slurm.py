"""docs/slurm.sh on a real Slurm: two nodes in network namespaces, without GPUs.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge; their services need not run.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.entry import ROOT, environment, metrics
from tests.ranks.hosts import LINK, Host, hosts, problem
from tests.test_ranks import SFT

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch")
STEPS, EVERY = 400, 20  # Slurm reads time limits every 30 s
# What two nodes without GPUs cannot run: (documented text, its replacement). A web server stands in for vLLM.
REDUCED = (
    ("#SBATCH --gpus-per-node=8\n", ""),
    ("#SBATCH --cpus-per-task=64\n", ""),
    (" --gpus-per-task=8", ""),
    ("for port in 8000 8001 8002 8003; do", "for port in 8000; do"),
    ("python -m rollout.serve --config run.yaml --vllm.host", "python -m http.server --directory served --bind"),
    ("--vllm.port 8000 --vllm.replicas 4 --vllm.devices 4 5 6 7", "8000"),
    ("--nproc-per-node 4", "--nproc-per-node 1"),
    ("--parallel.shard 4", "--parallel.shard 1"),
    ('--rollout.engine vllm --vllm.url "${urls[@]}" --sync.backend process_group ', ""),
)


def reduced(script: str) -> str:
    for documented, replacement in REDUCED:
        assert documented in script, documented
        script = script.replace(documented, replacement)
    return script


class Cluster:
    """A controller and two nodes."""

    def __init__(self, folder: Path, controller: Host, nodes: list[Host]) -> None:
        self.folder, self.controller, self.nodes = folder, controller, nodes
        self.env = environment() | {"SLURM_CONF": str(folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": LINK}

    def run(self, *words: object, cwd: Path | None = None) -> str:
        done = subprocess.run(
            self.controller.command(*words), env=self.env, cwd=cwd or self.folder, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def field(self, job: str, name: str) -> str:
        (value,) = re.findall(rf"\b{name}=(\S+)", self.run("scontrol", "show", "job", job))
        return value


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        pytest.skip(f"needs Slurm: {missing[0]}")
    if reason := problem():
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    for name in ("state", "spool-node0", "spool-node1"):
        (folder / name).mkdir(parents=True)
    (folder / "key").touch(0o600)
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used; the default looks for mounted groups
    files = {"SlurmctldPidFile": "controller.pid", "SlurmdPidFile": "%n.pid", "StateSaveLocation": "state",
             "SlurmdSpoolDir": "spool-%n", "AuthInfo": "munge.socket"}  # fmt: skip
    lines = [f"{name}={'socket=' * (name == 'AuthInfo')}{folder / file}" for name, file in files.items()]
    lines += ["ClusterName=test", "SlurmctldHost=node2", "SlurmUser=root", "ReturnToService=2", "MpiDefault=none",
              "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SelectType=select/cons_tres",
              "NodeName=node[0-1] CPUs=2", "PartitionName=all Nodes=ALL Default=YES"]  # fmt: skip
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    munge = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in {
        "key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "seed",
    }.items())]  # fmt: skip
    with hosts(3) as (*nodes, controller), (folder / "munge.log").open("wb") as log:
        made = Cluster(folder, controller, nodes)
        server = subprocess.Popen(munge, stdout=log, stderr=log)
        try:
            wait_for((folder / "munge.socket").exists, 10)
            controller.start("slurmctld", "-D", "-i", log=folder / "controller.log", **made.env)
            for node in nodes:
                node.start("slurmd", "-D", "-N", node.name, log=folder / f"{node.name}.log", **made.env)
            with contextlib.suppress(AssertionError):  # the controller is not up yet
                made.run("sinfo")
            wait_for(lambda: made.run("sinfo", "-N").count("idle") == 2, 60)
            yield made
        finally:
            server.terminate()
            server.wait()


def wait_for(condition: Callable[[], object], seconds: float, text: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, text()[-4000:]
        time.sleep(0.2)


@pytest.mark.slow
def test_job_ends_before_its_time_limit_is_requeued_and_continues(cluster, tmp_path):
    """First the documented signal before the time limit, then a requeue by an administrator."""
    work = tmp_path / "clone"
    (work / ".venv" / "bin").mkdir(parents=True)
    (work / ".venv" / "bin" / "activate").write_text(f'PATH="{work}/.venv/bin:$PATH"\n')
    for name, module in {"python": "", "torchrun": "-m torch.distributed.run"}.items():
        command = work / ".venv" / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        command.chmod(0o755)
    (work / "served").mkdir()
    (work / "served" / "health").touch()
    flags = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(SFT[::2], SFT[1::2], strict=True)}
    flags |= {"save_steps": EVERY, "eval_steps": 0, "max_steps": STEPS, "per_device_train_batch_size": 4}
    flags |= {"data": "task:addition:split=sft,size=96", "eval_data": "task:addition:split=eval,size=4"}
    (work / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in flags.items()))
    (work / "slurm.sh").write_text(reduced((ROOT / "docs" / "slurm.sh").read_text()))
    job = cluster.run("sbatch", "--parsable", "slurm.sh", cwd=work).strip()
    run, log = work / "runs" / f"slurm-{job}", work / f"slurm-{job}.out"

    def text() -> str:
        return log.read_text() if log.exists() else cluster.run("scontrol", "show", "job", job)

    def steps() -> list[int]:
        return [row["step"] for row in metrics(run)] if (run / "metrics.jsonl").exists() else []

    def requeued(times: int) -> bool:
        return cluster.field(job, "Restarts") == str(times) and cluster.field(job, "JobState") == "PENDING"

    def resume() -> None:
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1440", "StartTime=now")  # instead of in 2 minutes

    wait_for(lambda: len(steps()) > 1, 300, text)
    hours, minutes, seconds = map(int, cluster.field(job, "RunTime").split(":"))
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 3}")
    signalled = time.monotonic()
    wait_for(lambda: requeued(1), 240, text)
    (saved,) = set(map(int, re.findall(r"stopped by SIGTERM after step (\d+), saved", text())))  # a line per node
    print(f"time limit: saved step {saved} and requeued after {time.monotonic() - signalled:.0f} s")
    assert 0 < saved < STEPS
    resume()
    wait_for(lambda: f"resuming after step {saved} of {STEPS}" in text(), 300, text)
    wait_for(lambda: steps()[-1] > saved + EVERY, 300, text)
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: requeued(2), 240, text)
    resume()
    wait_for(lambda: text().count("resuming after step") == 2, 300, text)
    again = int(re.findall(r"resuming after step (\d+)", text())[1])
    print(f"requeued by an administrator: resumed after step {again}")
    assert again > saved
    wait_for(lambda: cluster.field(job, "JobState") != "RUNNING", 400, text)
    print(text())
    assert cluster.field(job, "JobState") == "COMPLETED"
    assert steps() == list(range(STEPS + 1)) and (run / "final").is_dir()
