"""Real servers: who may talk to them, what a failed start says, and that nothing is left when their starter is gone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from rollout.servers.command import WORKER, device_of
from rollout.servers.launch import group_members, launch, sweep, wait_ready
from rollout.servers.options import VllmConfig
from rollout.servers.token import find_token
from tests.entry import ROOT

ROUTES = [
    ("GET", "/health"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/version"),
    ("POST", "/collective_rpc"), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/inference/v1/generate"),
    ("GET", "/strop/generate"), ("POST", "/strop/generate"),
    ("POST", "/v1/completions"), ("POST", "/v1/load_lora_adapter"), ("GET", "/nothing/here"), ("OPTIONS", "/pause"),
]  # fmt: skip


def call(server, method, path, **kwargs):
    return httpx.request(method, server.url + path, json={} if method == "POST" else None, timeout=30, **kwargs)


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[path for _, path in ROUTES])
def test_every_route_wants_the_token(tied_server, method, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": tied_server.token}):
        reply = call(tied_server, method, path, headers=headers)
        assert reply.status_code == 401 and "STROP_VLLM_TOKEN" in reply.json()["error"]


def test_routes_vllm_lists_want_the_token_too(tied_server):
    listed = call(tied_server, "GET", "/openapi.json", headers=tied_server.headers).json()["paths"]
    assert {"/health", "/collective_rpc", "/pause", "/inference/v1/generate"} <= set(listed)
    with httpx.Client(base_url=tied_server.url, timeout=30) as client:
        answers = {client.request(method, path).status_code for path in listed for method in listed[path]}
    assert answers == {401}


def test_websockets_are_refused_without_the_token(tied_server):
    handshake = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    handshake["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert call(tied_server, "GET", "/v1/realtime", headers=handshake).status_code == 403


def test_the_right_token_opens_the_server(tied_server, untied_server):
    for server in (tied_server, untied_server):
        assert call(server, "GET", "/health", headers=server.headers).status_code == 200
        models = call(server, "GET", "/v1/models", headers=server.headers).json()["data"]
        assert [model["id"] for model in models] == ["base"] and models[0]["max_model_len"] == 256
    assert call(tied_server, "GET", "/health", headers=untied_server.headers).status_code == 401


def test_the_token_is_not_on_the_command_line_and_the_path_holds_our_worker_folder_alone(tied_server):
    members = tied_server.launched.pids
    assert len(members) >= 4  # guard, API server, engine, worker
    for pid in members:
        assert tied_server.token not in Path(f"/proc/{pid}/cmdline").read_text()
    env = dict(entry.split("=", 1) for entry in Path(f"/proc/{members[1]}/environ").read_text().split("\0") if entry)
    assert env["PYTHONPATH"] == str(WORKER) and env["STROP_VLLM_TOKEN"] == tied_server.token
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in env


def test_a_port_in_use_is_a_sentence(tied_server):
    port = int(tied_server.url.rpartition(":")[2])
    with pytest.raises(ValueError, match=f"^vllm.port={port}: is in use; stop what uses it, or pass 0 for a free one$"):
        launch(VllmConfig(port=port), model=str(tied_server.model_folder), device=device_of_server(tied_server))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def device_of_server(server):
    return server.launched._serve["device"]


def test_a_failed_start_says_why(vllm_python, model_folders, tmp_path):
    device = device_of(vllm_python)
    cut = tmp_path / "cut"
    shutil.copytree(model_folders["tied"], cut)
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    cases = [
        (VllmConfig(extra_args="--no-such-flag 1"), model_folders["tied"], "no-such-flag"),
        (VllmConfig(), cut, "afetensor"),
    ]
    with contextlib.ExitStack() as stack:  # all at once: most of their time goes into imports
        servers = [
            stack.enter_context(launch(cfg, model=str(model), log_dir=tmp_path, replica=i, device=device))
            for i, (cfg, model, _) in enumerate(cases)
        ]
        for i, (server, (_, _, said)) in enumerate(zip(servers, cases, strict=True)):
            with pytest.raises(ValueError, match=rf"^vLLM server {i}: did not start: ") as raised:
                wait_ready([server], 240)
            text = str(raised.value)
            assert said in text and "\n" not in text and f"(log: {tmp_path}/vllm-{i}.log)" in text
            assert server.poll() != 0 and server.pids == []


def test_a_start_that_takes_too_long_is_a_sentence(vllm_python, model_folders, tmp_path):
    with launch(
        VllmConfig(), model=str(model_folders["tied"]), log_dir=tmp_path, device=device_of(vllm_python)
    ) as server:
        with pytest.raises(ValueError, match="^vllm.startup_timeout=1: server 0 is still importing vLLM; raise it"):
            wait_ready([server], 1)
        members = server.pids
        assert members
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


def asked_for_its_token(said: str, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody set one, yet nobody gets in without: neither a local user nor a web page. Its own user finds it."""
    (url,) = re.findall(r"--vllm\.url (http://127\.0\.0\.1:\d+)", said)
    path = runtime / "strop" / url.removeprefix("http://")
    assert f"every request needs the token in {path}, where" in said and path.stat().st_mode & 0o777 == 0o600
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    for route in ("/pause", "/collective_rpc", "/sleep", "/resume", "/strop/lease"):
        for headers in ({}, page):
            assert httpx.post(url + route, content=b"{}", headers=headers, timeout=30).status_code == 401
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    found = {"Authorization": f"Bearer {find_token(url)}"}
    assert httpx.get(url + "/is_paused", headers=found, timeout=30).json() == {"is_paused": False}
    assert httpx.post(url + "/pause", content=b"{}", headers=found | page, timeout=30).status_code == 403
    assert httpx.get(url + "/is_paused", headers=found, timeout=30).json() == {"is_paused": False}


def test_ctrl_c_and_kill_9_of_serve_leave_nothing(model_folders, tmp_path, monkeypatch):
    """Three foreground servers: one is interrupted once it serves, the starter of the next is killed while it starts.

    Of the last one starter, guard and API server are killed: its engine ends by itself, and the next start removes
    the shared memory and the folder.
    """
    shared_before = set(os.listdir("/dev/shm"))
    config = tmp_path / "run.yaml"
    config.write_text(f"method: grpo\nmodel: {model_folders['tied']}\nlearning_rate: 1e-4\nvllm: {{port: 0}}\n")
    scratch = Path(tempfile.mkdtemp(prefix="strop-test-"))  # tmp_path is too long for the names of sockets
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": str(runtime)}
    env.pop("STROP_VLLM_TOKEN", None)
    command = [sys.executable, "-m", "rollout.serve", "--config", str(config), "--vllm.max-model-len", "64"]
    logs = [tmp_path / f"serve-{i}.log" for i in range(3)]
    running = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT) for log in logs
    ]
    calm, killed, orphaned = running
    try:
        wait_for(lambda: len(children(killed.pid)) == 1 and children(children(killed.pid)[0]), 60)
        group = server_group(killed.pid)
        wait_for(lambda: len(group_members(group)) >= 3, 240)  # API server, engine and a helper of theirs
        killed.kill()
        killed.wait()
        wait_for(lambda: not group_members(group), 30)

        wait_for(lambda: "now start the trainer" in logs[2].read_text() or orphaned.poll() is not None, 400)
        group = server_group(orphaned.pid)
        (guard,) = children(orphaned.pid)
        wait_for(lambda: len(list(scratch.glob("strop-vllm-*/shared_memory"))) == 2, 400)  # of both that are left
        for pid in (orphaned.pid, guard, group):
            os.kill(pid, signal.SIGKILL)
        orphaned.wait()
        wait_for(lambda: not group_members(group), 30)

        wait_for(lambda: "now start the trainer" in logs[0].read_text() or calm.poll() is not None, 400)
        assert "--rollout.engine vllm --vllm.url http://127.0.0.1:" in logs[0].read_text(), logs[0].read_text()[-2000:]
        group = server_group(calm.pid)
        assert len(group_members(group)) >= 3
        asked_for_its_token(logs[0].read_text(), runtime, monkeypatch)
        calm.send_signal(signal.SIGINT)
        assert calm.wait(30) == 0 and not group_members(group)
        assert "stopped: no server is left running" in logs[0].read_text()
        sweep(scratch)
        assert not list(scratch.iterdir()) and not list(runtime.iterdir())
        assert set(os.listdir("/dev/shm")) <= shared_before
    finally:
        for process in running:
            process.kill()
        shutil.rmtree(scratch)


def server_group(starter: int) -> int:
    """The process group of the one server that a process started."""
    (guard,) = children(starter)
    (server,) = children(guard)
    return os.getpgid(server)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.2)
