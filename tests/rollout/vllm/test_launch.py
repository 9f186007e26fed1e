"""Real servers: access control, and starts that fail or are interrupted."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from rollout.servers.command import WORKER, device_of
from rollout.servers.launch import group_members, launch, wait_ready
from rollout.servers.options import VllmConfig
from rollout.servers.token import find_token
from tests.rollout.vllm.conftest import children, command_of, processes_of, start_serve, wait_for

ROUTES = [
    ("GET", "/health"), ("GET", "/strop/generate"), ("POST", "/strop/generate"), ("GET", "/strop/lease"),
    ("POST", "/strop/lease"), ("GET", "/nothing/here"), ("OPTIONS", "/pause"),
]  # fmt: skip


def call(server, method, path, **kwargs):
    return httpx.request(method, server.url + path, json={} if method == "POST" else None, timeout=30, **kwargs)


def test_every_route_needs_the_token(tied_server, untied_server):
    listed = call(tied_server, "GET", "/openapi.json", headers=tied_server.headers).json()["paths"]
    assert {"/health", "/collective_rpc", "/pause", "/inference/v1/generate"} <= set(listed)
    routes = ROUTES + [(method, path) for path in listed for method in listed[path]]
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": tied_server.token}, untied_server.headers)
    with httpx.Client(base_url=tied_server.url, timeout=30) as client:
        for i, (method, path) in enumerate(routes):
            reply = client.request(method, path, headers=wrong[i % 4])
            assert reply.status_code == 401 and "STROP_VLLM_TOKEN" in reply.json()["error"], (method, path)
    handshake = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    handshake["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert call(tied_server, "GET", "/v1/realtime", headers=handshake).status_code == 403


def test_correct_token_gives_access(tied_server, untied_server):
    for server in (tied_server, untied_server):
        assert call(server, "GET", "/health", headers=server.headers).status_code == 200
        models = call(server, "GET", "/v1/models", headers=server.headers).json()["data"]
        assert (models[0]["id"], models[0]["max_model_len"]) == ("base", 256)


def test_random_token_of_serve_is_in_a_private_file(tied_server, serve_env, monkeypatch):
    """Without a configured token, access still needs one, for other users of the machine and for web pages."""
    runtime, url = Path(serve_env["XDG_RUNTIME_DIR"]), tied_server.url
    path = runtime / "strop" / url.removeprefix("http://")
    log = tied_server.log_path.read_text()
    assert f"token in {path};" in log and path.stat().st_mode & 0o777 == 0o600
    assert f" --vllm.url {url}" in log and "python -m trainer --config " in log
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    for route in ("/pause", "/collective_rpc", "/sleep", "/resume", "/strop/lease"):
        assert httpx.post(url + route, content=b"{}", headers=page, timeout=30).status_code == 401
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("STROP_VLLM_TOKEN", raising=False)
    headers = {"Authorization": f"Bearer {find_token(url)}"}
    before = httpx.get(url + "/is_paused", headers=headers, timeout=30).json()
    other = "/resume" if before["is_paused"] else "/pause"
    assert httpx.post(url + other, content=b"{}", headers=headers | page, timeout=30).status_code == 403
    assert httpx.get(url + "/is_paused", headers=headers, timeout=30).json() == before


def test_token_is_not_on_the_command_line_and_only_the_worker_folder_is_on_the_path(tied_server):
    for pid in processes_of(tied_server):
        assert tied_server.token.encode() not in b" ".join(command_of(pid))
    environ = Path(f"/proc/{tied_server.group}/environ").read_text()
    env = dict(entry.split("=", 1) for entry in environ.split("\0") if entry)
    assert env["PYTHONPATH"] == str(WORKER) and env["STROP_VLLM_TOKEN"] == tied_server.token
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in env


def test_port_of_a_running_server_is_rejected(vllm_python, untied_server):
    port = int(untied_server.url.rpartition(":")[2])
    with pytest.raises(ValueError, match=f"^vllm.port={port}: in use"):
        launch(VllmConfig(port=port), model=str(untied_server.model_folder), device=device_of(vllm_python))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_failed_start_reports_its_cause_and_kill_9_of_serve_ends_its_server(
    vllm_python, model_folders, serve_env, tmp_path
):
    """Two concurrent starts, to share import time: one server has truncated weights, the other loses its starter."""
    truncated = tmp_path / "truncated"
    shutil.copytree(model_folders["tied"], truncated)
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    serve = start_serve(serve_env, model_folders["tied"], tmp_path / "serve.log")
    try:
        with launch(VllmConfig(), model=str(truncated), log_dir=tmp_path, device=device_of(vllm_python)) as server:
            wait_for(lambda: children(serve.pid) and children(children(serve.pid)[0]))
            group = os.getpgid(children(children(serve.pid)[0])[0])
            assert group_members(group)
            serve.kill()
            with pytest.raises(ValueError, match=r"^vLLM server 0: failed to start: .*afetensor") as raised:
                wait_ready([server], 400)
            assert "\n" not in str(raised.value) and f"(log: {tmp_path}/vllm-0.log)" in str(raised.value)
            assert server.poll() != 0 and server.pids == []
        wait_for(lambda: not group_members(group), 30)
    finally:
        serve.kill()
        serve.wait()
