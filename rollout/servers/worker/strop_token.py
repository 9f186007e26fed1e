"""Access check of a server: every route, including vLLM's control routes, needs the token of STROP_VLLM_TOKEN.

    python -m vllm.entrypoints.openai.api_server --middleware strop_token.TokenCheck ...

vLLM's own --api-key guards only part of its routes: /collective_rpc, /pause and /metrics stay open. Requests from web
pages are refused even with the token: only browsers send an Origin header. The server finds this file through
PYTHONPATH; it imports nothing outside the standard library.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "STROP_VLLM_TOKEN"
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class TokenCheck:
    """ASGI middleware: 401 without `Authorization: Bearer TOKEN`, 403 for a web page; websockets are closed."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str | None = None) -> None:
        token = os.environ.get(VARIABLE, "") if token is None else token
        if not token:  # an empty token would admit everybody or nobody
            raise ValueError(f"{VARIABLE}: is not set in the server's environment; set it, or leave out --middleware")
        self.app = app
        self.wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self.is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect; closing before accepting makes it a 403
            await send({"type": "websocket.close", "code": 1008})
        elif self.knows_token(scope):
            await reply(send, 403, {"error": "this server takes no requests from web pages (it has an Origin header)"})
        else:
            await refuse(send)

    def is_allowed(self, scope: dict[str, Any]) -> bool:
        return self.knows_token(scope) and not any(name == b"origin" for name, _ in scope.get("headers", ()))

    def knows_token(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.wanted)  # constant time


async def refuse(send: Send) -> None:
    error = f"this server needs the token of {VARIABLE}, sent as Authorization: Bearer TOKEN"
    await reply(send, 401, {"error": error}, (b"www-authenticate", b"Bearer"))


async def reply(send: Send, status: int, content: dict[str, Any], *more: tuple[bytes, bytes]) -> None:
    """Send a JSON reply, with `more` headers."""
    body = json.dumps(content, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read(receive: Receive) -> bytes | None:
    """The body of a request; None if the client disconnects before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
