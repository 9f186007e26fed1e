"""A proxy in front of a real vLLM server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollout.servers.client import GENERATE_ROUTE, HttpClient
from rollout.servers.lease import LEASE, SESSION

Change = Callable[[str, int, bytes], tuple[int, bytes]]


class Proxy:
    """Forwards requests. `change(path, status, body)` rewrites replies; `hang` and `cut` are sets of failing paths.

    A `plain` proxy acts like vLLM without the lease: it has no lease route and drops the session header.
    """

    def __init__(self, url: str, token: str, *, plain: bool = False) -> None:
        self.upstream = HttpClient(url, token)
        self.target, self.plain = (url, token), plain
        self.change: Change = lambda path, status, body: (status, body)
        self.hang: set[str] = set()  # never reply
        self.cut: set[str] = set()  # send half a reply, then close the connection
        self.seen: list[tuple[str, dict[str, Any]]] = []  # requests
        self.dropped = 0  # requests whose client disconnected first
        self.port = 0
        self.clients: set[asyncio.StreamWriter] = set()
        self.server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Act like a killed server process: stop listening and break open connections."""
        assert self.server is not None
        self.server.close()
        for writer in list(self.clients):
            writer.transport.abort()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.add(writer)
        try:
            while await self._answer_one(reader, writer):
                continue
        except (OSError, EOFError):
            writer.transport.abort()
        finally:
            self.clients.discard(writer)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split(" ")
        (length,) = (line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length"))
        body = await reader.readexactly(int(length))
        self.seen.append((path, json.loads(body) if body else {}))
        session = [line.partition(":")[2].strip() for line in head.split("\r\n") if line.startswith(f"{SESSION}:")]
        work = asyncio.ensure_future(self._upstream(method, path, body, session))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            self.dropped += 1
            return False
        status, reply = work.result()
        answer = f"HTTP/1.1 {status} X\r\nContent-Length: {len(reply)}\r\nConnection: close\r\n\r\n".encode() + reply
        writer.write(answer[: len(answer) // 2] if path in self.cut else answer)
        await writer.drain()
        gone.cancel()
        return False

    async def _upstream(self, method: str, path: str, body: bytes, session: list[str]) -> tuple[int, bytes]:
        is_probe = (method, path) == ("GET", GENERATE_ROUTE)  # the client checks for the route
        if path in self.hang and not is_probe:
            await asyncio.sleep(3600)
        if self.plain and path == LEASE:
            return 404, b'{"detail": "Not Found"}'
        upstream = self.upstream if self.plain or not session else HttpClient(*self.target, {SESSION: session[0]})
        status, reply = await upstream.send(method, path, body, timeout=60)
        return (status, reply) if is_probe else self.change(path, status, reply)


def rewrite(path: str, edit: Callable[[dict[str, Any]], None]) -> Change:
    """Return a change that edits the JSON replies of one path."""

    def change(this: str, status: int, body: bytes) -> tuple[int, bytes]:
        if this != path:
            return status, body
        value = json.loads(body)
        edit(value)
        return status, json.dumps(value).encode()

    return change


@asynccontextmanager
async def proxies(url: str, token: str, count: int = 1) -> AsyncIterator[list[Proxy]]:
    started = [Proxy(url, token) for _ in range(count)]
    for proxy in started:
        await proxy.start()
    try:
        yield started
    finally:
        for proxy in started:
            await proxy.kill()
