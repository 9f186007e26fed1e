"""Two real vLLM servers shared by all tests in this folder: the tiny model (tied, with LoRA) and an untied copy.

Each start takes most of a minute of CPU time. `python -m rollout.serve` starts the tied server, launch() the untied
one. test_end.py runs last and tests how both end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout.servers.command import TOKEN, device_of, find_python
from rollout.servers.launch import Launched, group_members, launch, wait_ready
from rollout.servers.options import VllmConfig
from tests.entry import ROOT

HERE = Path(__file__).parent
TINY = ROOT / "trainer" / "tiny"
LENGTH = 256
START_S = 400.0


@dataclass(frozen=True)
class Server:
    """A running server and the folder of its initial weights."""

    url: str
    token: str
    model_folder: Path
    log_path: Path
    group: int  # process group of API server and engine
    guard: int
    starter: subprocess.Popen[bytes] | Launched  # rollout.serve, or launch()'s result

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
    items.sort(key=lambda item: item.path == HERE / "test_end.py")  # stable: all other tests keep their order


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter with vLLM; skips without one."""
    try:
        return find_python(VllmConfig())
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tied: a copy of the tiny model; untied: a copy with a separate head, far from the embedding."""
    import torch
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("models")
    folders = {name: root / name for name in ("tied", "untied")}
    for folder in folders.values():
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    head = model.get_input_embeddings().weight.detach().clone()
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head + head.std() * noise)
    model.save_pretrained(folders["untied"])
    return folders


@pytest.fixture(scope="session")
def serve_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment for `python -m rollout.serve`, with separate empty folders for scratch files and tokens."""
    scratch = Path(tempfile.mkdtemp(prefix="strop-test-"))  # pytest's paths are too long for sockets
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": str(runtime)}
    env.pop(TOKEN, None)
    yield env
    shutil.rmtree(scratch)


def start_serve(env: dict[str, str], model: Path, log: Path, *argv: str) -> subprocess.Popen[bytes]:
    """Start `python -m rollout.serve` with a trainer's config."""
    config = log.with_suffix(".yaml")
    config.write_text(f"method: grpo\nmodel: {model}\nlearning_rate: 1e-4\nlora: {{r: 8}}\nvllm: {{port: 0}}\n")
    command = [sys.executable, "-m", "rollout.serve", "--config", str(config), *argv]
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=log.parent, env=env, stdout=out, stderr=subprocess.STDOUT)


@pytest.fixture(scope="session")
def _servers(
    vllm_python: str,
    model_folders: dict[str, Path],
    serve_env: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Server]]:
    """Start both servers concurrently: imports dominate, so two starts on two cores take little longer than one."""
    logs = tmp_path_factory.mktemp("vllm_logs")
    device = device_of(vllm_python)
    cuda = ("--vllm.devices", "0", "--vllm.gpu-memory-utilization", "0.1") if device == "cuda" else ()
    tied_log = logs / "serve.log"
    serve = start_serve(
        serve_env, model_folders["tied"], tied_log,
        "--dtype", "float32", "--vllm.max-model-len", str(LENGTH), *cuda,
    )  # fmt: skip
    launched = None
    try:
        shared = {"devices": (0,), "gpu_memory_utilization": 0.1} if device == "cuda" else {}
        # Only the untied server has vLLM's metrics.
        cfg = VllmConfig(max_model_len=LENGTH, dtype="float32", log_stats=True, **shared)
        launched = launch(cfg, model=str(model_folders["untied"]), log_dir=logs, device=device, grouped=True)
        wait_ready([launched], cfg.startup_timeout)
        wait_for(lambda: "now start the trainer" in tied_log.read_text() or serve.poll() is not None, START_S)
        assert serve.poll() is None, tied_log.read_text()[-3000:]
        (url,) = re.findall(r"--vllm\.url (http://127\.0\.0\.1:\d+)", tied_log.read_text())
        token = (Path(serve_env["XDG_RUNTIME_DIR"]) / "strop" / url.removeprefix("http://")).read_text()
        (guard,) = children(serve.pid)
        tied = Server(url, token, model_folders["tied"], tied_log, os.getpgid(children(guard)[0]), guard, serve)
        guard, api_server = launched.pids[:2]
        untied = Server(
            launched.url, str(launched.token), model_folders["untied"], launched.log_path, os.getpgid(api_server),
            guard, launched,
        )  # fmt: skip
        yield {"tied": tied, "untied": untied}
    finally:
        if launched is not None:
            launched.stop()
        serve.send_signal(signal.SIGINT)
        try:
            serve.wait(60)
        except subprocess.TimeoutExpired:
            serve.kill()
            serve.wait()


@pytest.fixture(scope="session")
def tied_server(_servers: dict[str, Server]) -> Server:
    """Embedding and head share a tensor; loads adapters up to rank 8."""
    return _servers["tied"]


@pytest.fixture(scope="session")
def untied_server(_servers: dict[str, Server]) -> Server:
    """Embedding and head differ; no adapters."""
    return _servers["untied"]


def processes_of(server: Server) -> list[int]:
    return [server.guard, *group_members(server.group)]


def engine_pids(server: Server) -> list[int]:
    """Return the processes that compute; another process serves /health and /metrics."""
    names = {pid: b" ".join(command_of(pid)) for pid in processes_of(server)}
    pids = [pid for pid, name in names.items() if b"EngineCore" in name]
    assert pids, names
    return pids


@contextlib.contextmanager
def slowed(server: Server) -> Iterator[None]:
    """Suspend the engine four fifths of the time, so that tests can act on unfinished completions on any machine."""
    pids = engine_pids(server)
    done = threading.Event()

    def send(signal_number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def brake() -> None:
        while not done.is_set():
            send(signal.SIGSTOP)
            done.wait(0.04)
            send(signal.SIGCONT)
            done.wait(0.01)

    thread = threading.Thread(target=brake)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> list[bytes]:
    """Return a process's argv; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds} s"
        time.sleep(0.05)
