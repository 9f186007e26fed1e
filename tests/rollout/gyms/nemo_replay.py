"""A small HTTP server that answers as NeMo Gym's servers did: the head, resource servers and agents at one address.

    with Replay(assets / "data" / "nemo_gym") as replay:
        client = GymClient(NemoGymConfig(datasets=("x",), head_port=replay.port))

It replays recorded exchanges: a request gets the reply of the recording with the same route, input and completion.
Like the real servers it verifies 0.0 without an error if the cookie of /seed_session is missing.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

ROUTES = {"seed_session": "/seed_session", "verify": "/verify", "run": "/run"}
CLOSE = object()  # a fault: the connection ends without a reply
LATE = 60.0  # a fault: seconds before the reply, more than any test waits


class Replay:
    def __init__(self, folder: Path | None = None) -> None:
        self.exchanges: list[tuple[str, dict[str, Any]]] = []  # (route, recording)
        for path in sorted(folder.glob("*.json")) if folder else ():
            route = next((route for word, route in ROUTES.items() if word in path.stem), None)
            if route:
                self.exchanges.append((route, json.loads(path.read_text())))
        self.requests: list[tuple[str, dict[str, Any], str]] = []  # (route, body, cookies)
        self.faults: deque[Any] = deque()  # for the next POSTs: None, a status, seconds to sleep, bytes, or CLOSE
        self.places: dict[str, Any] | None = None
        self.endpoint: Any = None  # if set, the agent requests a turn from it for each message list in `turns`
        self.turns: list[list[dict[str, str]]] = [[{"role": "user", "content": "q"}]]
        self.sessions = 0
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.server.handle_error = lambda *_: None  # some tests disconnect the client
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Replay:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def add(self, route: str, input_: Any, reply: dict[str, Any], text: str | None = None) -> None:
        """Add an exchange that was not recorded."""
        request: dict[str, Any] = {"responses_create_params": {"input": input_}}
        if text is not None:
            request["response"] = {"output": [{"content": [{"text": text}]}]}
        self.exchanges.append((route, {"request": request, "status": 200, "response": reply}))

    def ask(self, extra: dict[str, Any]) -> None:
        """Do what the gym's agent and model server do."""
        headers = {"authorization": f"Bearer {self.endpoint.token}"}
        for messages in self.turns:
            body = {"messages": messages, "model": "policy", **extra}
            url = f"{self.endpoint.url}/chat/completions"
            httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).raise_for_status()

    def config(self) -> dict[str, Any]:
        """Return the head server's configuration in the real format; servers listen on every interface."""
        place = {"entrypoint": "app.py", "host": "0.0.0.0", "port": self.port}
        tree: dict[str, Any] = {"head_server": {"host": "127.0.0.1", "port": self.port}}
        for name in ("reasoning_gym", "example_session_state_mgmt", "example_single_tool_call"):
            tree[name] = {"resources_servers": {name: place}}
            ref = {"type": "resources_servers", "name": name}
            agent = {**place, "resources_server": ref, "model_server": {"name": "policy_model"}}
            tree[f"{name}_simple_agent"] = {"responses_api_agents": {"simple_agent": agent}}
        tree["policy_model"] = {"responses_api_models": {"vllm_model": place}}
        return tree if self.places is None else self.places

    def answer(self, route: str, body: dict[str, Any], cookies: str) -> tuple[int, Any, str | None]:
        """(status, reply, cookie to set)"""
        self.requests.append((route, body, cookies))
        if route == "/seed_session":
            self.sessions += 1
            return 200, {}, f"session={self.sessions}; path=/; Max-Age=1209600; httponly"
        for known, exchange in self.exchanges:
            if known == route and fingerprint(exchange["request"]) == fingerprint(body):
                reply = exchange["response"]
                if route == "/run" and self.endpoint is not None:
                    self.ask(json.loads(body["responses_create_params"]["metadata"]["extra_body"]))
                if route == "/verify" and "expected_count" in body and "session=" not in cookies:
                    reply = reply | {"reward": 0.0}
                return exchange["status"], reply, None
        detail = [{"type": "missing", "loc": ["body", "question"], "msg": "Field required", "input": {}}]
        return 422, {"detail": detail}, None


def fingerprint(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the input and the texts of the output."""
    given = body.get("responses_create_params", {}).get("input", "")
    asked = given if isinstance(given, str) else "|".join(str(item.get("content")) for item in given)
    output = body.get("response", {}).get("output", [])
    texts = [part["text"] for item in output for part in item.get("content", [])]
    return (asked, *texts)


def handler_of(replay: Replay) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/global_config_dict_yaml":
                self.reply(200, yaml.safe_dump(replay.config()))  # a string, as JSON: YAML wrapped twice
            else:
                self.reply(200, {"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with replay.lock:
                fault = replay.faults.popleft() if replay.faults else None
                replay.at_once += 1
                replay.most_at_once = max(replay.most_at_once, replay.at_once)
            try:
                if isinstance(fault, float):
                    time.sleep(fault)
                with replay.lock:
                    status, reply, cookie = replay.answer(self.path, body, self.headers.get("Cookie", ""))
            finally:
                with replay.lock:
                    replay.at_once -= 1
            if fault is CLOSE:
                self.close_connection = True
            elif isinstance(fault, bytes):
                self.reply(200, fault)
            elif isinstance(fault, int):
                self.reply(fault, "inner failure")
            else:
                self.reply(status, reply, cookie)

        def reply(self, status: int, value: Any, cookie: str | None = None) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            if cookie:
                self.send_header("Set-Cookie", cookie)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
