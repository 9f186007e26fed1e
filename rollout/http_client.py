"""HTTP/1.1 to one server over asyncio streams: only what the vLLM client needs.

512 requests at a time cost httpx 9 s of CPU (each looks through the whole connection pool) and this 0.1 s, measured
with replies of 256 tokens; reading their JSON takes 0.4 s more either way.

    client = HttpClient("http://127.0.0.1:8000", token="secret")
    status, body = await client.send("POST", "/pause", b"{}", timeout=60)
"""

from __future__ import annotations

import asyncio
import errno
import resource
import ssl
import time
from collections import deque
from collections.abc import Mapping
from urllib.parse import urlsplit

KEEP_S = 2.0  # below the 5 s after which uvicorn closes an idle connection: a request never meets a closing one
CONNECT_S = 10.0
STREAM_LIMIT = 2**20
BODY_LIMIT = 2**30  # more than any reply of ours; a length beyond it is garbage

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ConnectError(OSError):
    """Nothing was sent: there is no connection. Says why in a few words."""


class HttpClient:
    """Connections to one server; as many as there are requests at a time."""

    def __init__(self, url: str, token: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"vllm.url={url}: is no address; give one such as http://127.0.0.1:8000")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("STROP_VLLM_TOKEN: holds what a header cannot; use letters and digits")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.base = parts.path.rstrip("/")
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.head = f"Host: {name}:{self.port}\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        if token:
            self.head += f"Authorization: Bearer {token}\r\n"
        self.head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self.idle: deque[tuple[float, Connection]] = deque()  # oldest first

    async def send(
        self, method: str, path: str, body: bytes = b"", *, timeout: float, reuse: bool = False
    ) -> tuple[int, bytes]:
        """Status and body. ConnectError without a connection; OSError, EOFError or ValueError when the server fails us,
        TimeoutError after `timeout`.

        `reuse` takes an open connection where there is one. A server may close it in that very moment, so only
        requests that can be sent again should.
        """
        end = asyncio.get_running_loop().time() + timeout
        reader, writer = (self._take() if reuse else None) or await self._connect(min(CONNECT_S, timeout))
        try:
            async with asyncio.timeout_at(end):
                length = f"Content-Length: {len(body)}\r\n\r\n"
                writer.write(f"{method} {self.base}{path} HTTP/1.1\r\n{self.head}{length}".encode() + body)
                status, reply, stays_open = await _read(reader)
        except BaseException:
            # Also when cancelled: the server sees the connection close and drops the request.
            writer.transport.abort()
            raise
        if stays_open:
            self._keep(reader, writer)
        else:
            writer.close()
        return status, reply

    def close(self) -> None:
        while self.idle:
            self.idle.popleft()[1][1].close()

    async def _connect(self, seconds: float) -> Connection:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.open_connection(self.host, self.port, ssl=self.ssl, limit=STREAM_LIMIT)
        except TimeoutError as error:
            raise ConnectError(f"no connection within {seconds:g} s") from error
        except OSError as error:
            # A name with several addresses fails with all of their errors in one text.
            refused = isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error)
            raise ConnectError("connection refused" if refused else (error.strerror or str(error)).lower()) from error

    def _take(self) -> Connection | None:
        """The connection used last, if it is fresh and still open."""
        while self.idle:
            since, (reader, writer) = self.idle.pop()
            if time.monotonic() - since < KEEP_S and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return None

    def _keep(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = time.monotonic()
        while self.idle and now - self.idle[0][0] >= KEEP_S:
            self.idle.popleft()[1][1].close()
        self.idle.append((now, (reader, writer)))


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """(status, body, whether the connection stays open) of one reply."""
    status = 100
    while status < 200:  # 1xx replies only announce the real one
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ValueError(f"the reply begins with {lines[0][:60]!r}, which is not HTTP")
        status = int(words[1])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    stays_open = words[0] == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return status, await _read_chunks(reader), stays_open
    if "content-length" in headers:
        return status, await reader.readexactly(_length(headers["content-length"], 10)), stays_open
    if status in (204, 304):
        return status, b"", stays_open
    return status, await reader.read(), False


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while size := _length((await reader.readuntil(b"\r\n")).split(b";")[0].decode("latin-1").strip(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        continue
    return b"".join(parts)


def _length(text: str, base: int) -> int:
    size = int(text, base)
    if not 0 <= size <= BODY_LIMIT:
        raise ValueError(f"a reply of {text} bytes is not one of vLLM's")
    return size


def allow_connections(wanted: int) -> None:
    """Each request is an open file; many systems allow a process just 1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
