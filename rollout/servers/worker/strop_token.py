"""Require the token in STROP_VLLM_TOKEN on every route of a server, including vLLM's control routes.

    python -m vllm.entrypoints.openai.api_server --middleware strop_token.TokenCheck ...

vLLM's --api-key protects only part of its routes: /collective_rpc, /pause and /metrics stay open. Requests from web
pages are rejected even with the token: only browsers send an Origin header. Imports only the standard library.
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
        if not token:
            raise ValueError(f"{VARIABLE}: not set in the server's environment; set it, or remove --middleware")
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self.is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect; closing before accepting becomes a 403
            await send({"type": "websocket.close", "code": 1008})
        elif self.has_token(scope):
            await reply(send, 403, {"error": "requests from web pages (with an Origin header) are not allowed"})
        else:
            error = f"this server requires the token in {VARIABLE}, sent as Authorization: Bearer TOKEN"
            await reply(send, 401, {"error": error}, (b"www-authenticate", b"Bearer"))

    def is_allowed(self, scope: dict[str, Any]) -> bool:
        return self.has_token(scope) and not any(name == b"origin" for name, _ in scope.get("headers", ()))

    def has_token(self, scope: dict[str, Any]) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self.expected)  # constant time


async def reply(send: Send, status: int, content: dict[str, Any], *extra: tuple[bytes, bytes]) -> None:
    """Send a JSON reply with `extra` headers."""
    body = json.dumps(content, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read(receive: Receive) -> bytes | None:
    """Return a request's body; None if the client disconnects first."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
