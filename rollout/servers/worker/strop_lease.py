"""Limit a server to one trainer at a time: only the lease holder may change its weights; others get 409.

    python -m vllm.entrypoints.openai.api_server --middleware strop_lease.Lease ...

    GET  /strop/lease -> {"holder": null, "expires_in": 0.0}
    POST /strop/lease {"action": "take", "session": "9f..", "run": "c0..", "folder", "host", "pid", "user"}
    -> 200 {"holder": {"run": "c0..", "folder": .., "since": 1794809412.0}, "expires_in": 60.0}
    -> 409 {"error": .., "holder": {..}, "expires_in": 41.3}

The lease lives in the API server's process, whose event loop runs one request at a time between awaits: taking the
lease is atomic, and the lease ends with the server. It expires LEASE_S after its last renewal. `run` is the same for
every --resume of a run, so a resumed run takes its lease back immediately. `session` identifies one process, so a
process that lost the lease stays locked out, even if it still runs. Imports only the standard library.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from strop_token import Receive, Send, read, reply

PATH = "/strop/lease"
HEADER = b"strop-session"
LEASE_S = 60.0
FIELDS = ("run", "folder", "host", "pid", "user")  # the holder, as shown to rejected trainers
# Allowed without the lease: completions and reads. Everything else changes the server.
OPEN = (
    "/v1/", "/v2/", "/cohere/", "/strop/", "/inference/v1/generate", "/tokenize", "/detokenize", "/pooling", "/score",
    "/rerank", "/classify", "/generative_scoring", "/invocations", "/ping",
)  # fmt: skip
CLOSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
RPC = "/collective_rpc"
READS = ("strop_info", "check_health")  # worker methods that change nothing


class Lease:
    """ASGI middleware that serves PATH and rejects changes by anyone but the lease holder."""

    def __init__(self, app: Callable[..., Awaitable[None]], clock: Callable[[], float] = time.monotonic) -> None:
        self.app = app
        self.clock = clock
        self.holder: dict[str, Any] | None = None  # the last holder, even after the lease has expired
        self.session: str | None = None
        self.until = 0.0

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"] == PATH:
            await self.answer(scope, receive, send)
            return
        if changes(scope) and not self.may_change(scope):
            if scope["path"] != RPC:
                await self.reject(send)
                return
            body = await read(receive)
            if body is None:
                return  # the client has disconnected
            if not only_reads(body):
                await self.reject(send)
                return
            receive = replay(body, receive)
        await self.app(scope, receive, send)

    @property
    def left(self) -> float:
        """Seconds until the lease expires; 0 if the lease is free."""
        return max(0.0, self.until - self.clock()) if self.holder is not None else 0.0

    def may_change(self, scope: dict[str, Any]) -> bool:
        """Return whether the request may change the server. A session other than the last holder's has lost the lease,
        even if the lease is free: the weights are another trainer's. A request without a session does not come from a
        trainer and may change a free server.
        """
        sessions = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == HEADER]
        if not sessions:
            return self.left == 0.0
        return self.holder is None or sessions == [self.session]

    async def answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await reply(send, 200, self.state())
            return
        body = await read(receive)
        if body is None:
            return
        try:
            request = json.loads(body)
            action, session, run = request["action"], str(request["session"]), str(request["run"])
            granted = {"take": self.can_take(run), "renew": self.can_renew(session), "release": session == self.session}
            allowed = granted[action]
        except (KeyError, TypeError, ValueError):
            await reply(send, 400, {"error": "lease: requires action (take, renew or release), session and run"})
            return
        # No await between the check and the change: two concurrent trainers cannot both get the lease.
        if action == "release":
            if allowed:
                self.until = 0.0
        elif allowed:
            if session != self.session or self.holder is None:
                self.holder = {name: request.get(name) for name in FIELDS} | {"since": time.time()}
                self.session = session
            self.until = self.clock() + LEASE_S
        else:
            await self.reject(send)
            return
        await reply(send, 200, self.state())

    def can_take(self, run: str) -> bool:
        return self.left == 0.0 or self.holder is None or self.holder["run"] == run

    def can_renew(self, session: str) -> bool:
        """Return whether the session may renew: even an expired lease, unless another trainer took it since. On a
        restarted server, which has no holder, any session may.
        """
        return self.holder is None or session == self.session

    def state(self) -> dict[str, Any]:
        left = self.left
        return {"holder": self.holder if left else None, "expires_in": left}

    async def reject(self, send: Send) -> None:
        error = "another trainer holds the lease on this server, or has held it since"
        await reply(send, 409, {"error": error, "holder": self.holder, "expires_in": self.left})


def changes(scope: dict[str, Any]) -> bool:
    """Return whether a request may change the server's results."""
    path = scope["path"]
    return scope["method"] not in ("GET", "HEAD", "OPTIONS") and (path.startswith(CLOSED) or not path.startswith(OPEN))


def only_reads(body: bytes) -> bool:
    try:
        return json.loads(body).get("method") in READS
    except (AttributeError, ValueError):
        return False


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive() that first replays a body that was already read."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def get() -> dict[str, Any]:
        return messages.pop() if messages else await receive()

    return get
