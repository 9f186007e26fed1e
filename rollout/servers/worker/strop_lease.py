"""One trainer at a time: only the holder of a server's lease may change its weights; others get 409.

    python -m vllm.entrypoints.openai.api_server --middleware strop_lease.Lease ...

    GET  /strop/lease -> {"holder": null, "expires_in": 0.0}
    POST /strop/lease {"action": "take", "session": "9f..", "run": "c0..", "folder", "host", "pid", "user"}
    -> 200 {"holder": {"run": "c0..", "folder": .., "since": 1794809412.0}, "expires_in": 60.0}
    -> 409 {"error": .., "holder": {..}, "expires_in": 41.3}

The lease lives in the API server's process, whose event loop runs one request at a time between awaits: taking it is
atomic, and it ends with the server. It expires LEASE_S after its last renewal. `run` is the same for every --resume of
a run, so a resumed run takes its lease back at once; `session` identifies one process, so the process that lost the
lease is refused from then on, even if it still runs. The server finds this file through PYTHONPATH; it imports nothing
outside the standard library.
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
FIELDS = ("run", "folder", "host", "pid", "user")  # of the holder, shown to those who are refused
# Allowed on a server that somebody else trains: completions and reads. Everything else changes it.
OPEN = (
    "/v1/", "/v2/", "/cohere/", "/strop/", "/inference/v1/generate", "/tokenize", "/detokenize", "/pooling", "/score",
    "/rerank", "/classify", "/generative_scoring", "/invocations", "/ping",
)  # fmt: skip
CLOSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
RPC = "/collective_rpc"
READS = ("strop_info", "check_health")  # worker methods that change nothing


class Lease:
    """ASGI middleware that serves PATH and refuses changes by anybody but the holder."""

    def __init__(self, app: Callable[..., Awaitable[None]], clock: Callable[[], float] = time.monotonic) -> None:
        self.app = app
        self.clock = clock
        self.holder: dict[str, Any] | None = None  # the last one, even after the lease has expired
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
                await self.refuse(send)
                return
            body = await read(receive)
            if body is None:
                return  # the client has left
            if not only_reads(body):
                await self.refuse(send)
                return
            receive = again(body, receive)
        await self.app(scope, receive, send)

    @property
    def left(self) -> float:
        """Seconds until the lease expires; 0 when nobody holds it."""
        return max(0.0, self.until - self.clock()) if self.holder is not None else 0.0

    def may_change(self, scope: dict[str, Any]) -> bool:
        """A session other than the last holder's has lost the lease, even if nobody holds it now: the weights are
        another trainer's. A request without a session does not come from a trainer, and may change a free server.
        """
        named = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == HEADER]
        if not named:
            return self.left == 0.0
        return self.holder is None or named == [self.session]

    async def answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await reply(send, 200, self.state())
            return
        body = await read(receive)
        if body is None:
            return
        try:
            asked = json.loads(body)
            action, session, run = asked["action"], str(asked["session"]), str(asked["run"])
            granted = {"take": self.can_take(run), "renew": self.can_renew(session), "release": session == self.session}
            allowed = granted[action]
        except (KeyError, TypeError, ValueError):
            await reply(send, 400, {"error": "lease: needs action (take, renew or release), session and run"})
            return
        # No await between the check and the change: two trainers that ask at the same time cannot both get it.
        if action == "release":
            if allowed:
                self.until = 0.0
        elif allowed:
            if session != self.session or self.holder is None:
                self.holder = {name: asked.get(name) for name in FIELDS} | {"since": time.time()}
                self.session = session
            self.until = self.clock() + LEASE_S
        else:
            await self.refuse(send)
            return
        await reply(send, 200, self.state())

    def can_take(self, run: str) -> bool:
        return self.left == 0.0 or self.holder is None or self.holder["run"] == run

    def can_renew(self, session: str) -> bool:
        """Also after it expired, if nobody took it meanwhile, and on a restarted server, which has no holder."""
        return self.holder is None or session == self.session

    def state(self) -> dict[str, Any]:
        left = self.left
        return {"holder": self.holder if left else None, "expires_in": left}

    async def refuse(self, send: Send) -> None:
        error = "another trainer holds the lease on this server, or has held it since"
        await reply(send, 409, {"error": error, "holder": self.holder, "expires_in": self.left})


def changes(scope: dict[str, Any]) -> bool:
    """Whether a request may change what a server computes."""
    path = scope["path"]
    return scope["method"] not in ("GET", "HEAD", "OPTIONS") and (path.startswith(CLOSED) or not path.startswith(OPEN))


def only_reads(body: bytes) -> bool:
    try:
        return json.loads(body).get("method") in READS
    except (AttributeError, ValueError):
        return False


def again(body: bytes, receive: Receive) -> Receive:
    """A receive() that replays a body that was read already."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def get() -> dict[str, Any]:
        return waiting.pop() if waiting else await receive()

    return get
