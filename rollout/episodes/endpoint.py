"""An HTTP server on the loopback interface whose model is the policy in training, with either engine.

    endpoint = Endpoint(engine, tokenizer)
    endpoint.open()
    endpoint.url -> "http://127.0.0.1:40123/v1"
    with endpoint.session(sampling, seed=7) as (session, key):     # key: the API key of its clients
        ...                                                        # clients send requests
    session.completion(prompt.ids, {}) -> Completion               # what they sampled
    endpoint.advance()                                             # the thread that owns the weights, while it waits

A key contains a random token of the run and the number of its session, so other users of the machine cannot send
requests. With vLLM, requests go to the engine's servers. The in-process engine samples in advance(): requests join its
batch as they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from data.errors import UserError
from data.user_code import describe_error
from rollout.engine import POLL_S, Completion, Request, Sampling, context_of
from rollout.episodes import protocols
from rollout.episodes.protocols import Ask, Json
from rollout.episodes.session import ChatModel, OutOfTokens, Session, Turn, UnusableError
from rollout.servers.loop import Loop, together

HOST = "127.0.0.1"
MAX_BODY = 2**28  # bytes
SESSION = "x-session-id"  # header with the number of a session, for clients with one key for all
SESSION_FIELD = "strop_session"  # the same as a field of the body
Reply = tuple[int, bytes, str]  # status, body, content type


class Endpoint:
    def __init__(self, engine: Any, tokenizer: Any, *, token: str | None = None, tool_format: str = "auto") -> None:
        self.engine = engine
        self.token = token or secrets.token_urlsafe(16)
        self.loop = Loop("endpoint")
        self.local = None if engine.concurrent else ArrivingRequests(engine)
        config = (engine if self.local else engine.local).model.config
        context = context_of(config) or math.inf
        if self.local is None:
            context = min(context, *(member.server.info.model_len for member in engine.pool.members))
        self.model = ChatModel(
            self._ask, tokenizer, context=None if context == math.inf else int(context),
            vocab_size=config.get_text_config().vocab_size, tool_format=tool_format,
        )  # fmt: skip
        self._sessions: dict[str, Session] = {}
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._sampling: Sampling | None = None  # of the latest session
        self.url = ""

    def open(self, port: int = 0) -> None:
        """Listen for clients in other processes; 0: on any free port."""
        try:
            self._server = self.loop.run(asyncio.start_server(self._connection, HOST, port))
        except OSError as error:
            reason = f"the endpoint cannot listen there ({error.strerror}); choose another"
            raise UserError(f"port={port}: {reason}") from None
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}/v1"

    def attach(self, engine: Any) -> None:
        """Sample with another engine of the same policy: of all ranks instead of this one."""
        self.engine = engine
        if self.local is not None:
            self.local.engine = engine

    @contextlib.contextmanager
    def session(
        self, sampling: Sampling, *, seed: int, settings: Mapping[str, Any] | None = None, number: str | None = None
    ) -> Iterator[tuple[Session, str]]:
        """Accept requests of one episode, with the API key that is returned; raise at its end if the engine failed.

        This replaces an error of the episode, which may only be its reaction. number: a name instead of a number.
        """
        number = number or str(next(self._numbers))
        session = Session(self.model, sampling, seed=seed, settings=settings)
        self._sessions[number], self._sampling = session, sampling
        try:
            yield session, f"{self.token}.{number}"
        except Exception:
            if session.error is None:
                raise
        finally:
            del self._sessions[number]
        if session.error is not None:
            raise UnusableError(str(session.error)) from session.error

    def advance(self) -> bool:
        """Sample what has been requested, in process; return False if the engine samples in the background."""
        if self.local is None:
            return False
        self.local.sample(POLL_S)
        return True

    def wake(self) -> None:
        """End the wait of advance(): an episode has ended."""
        if self.local is not None:
            self.local.wake()

    def close(self) -> None:
        """May be called twice."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.run(self._close())
        self.loop.close()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _ask(self, request: Request, sampling: Sampling) -> Completion:
        if self.local is not None:
            return await asyncio.wrap_future(self.local.submit(request, sampling))
        sampling = replace(sampling, max_tokens=request.max_tokens or sampling.max_tokens)
        return await asyncio.wrap_future(self.engine.loop.start(self.engine.complete(request, sampling)))

    # HTTP.

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client may disconnect at any time, or not speak HTTP.
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, ValueError):
            while await self._exchange(reader, writer):
                pass

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        if size > MAX_BODY or "transfer-encoding" in headers:
            await write(writer, 413, error_body(f"body: send at most {MAX_BODY:,} bytes, with content-length"))
            return False
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(size)
        work = asyncio.ensure_future(self._answer(method, target.partition("?")[0], headers, body))
        gone = asyncio.ensure_future(reader.read(1))  # ends only if the client disconnects
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return False
            gone.cancel()
            await write(writer, *work.result())
            return headers.get("connection", "").lower() != "close" and not gone.done()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], content: bytes) -> Reply:
        key, route = key_and_route(path, headers)
        is_anthropic = route.startswith("messages")
        session = code = None
        try:
            body = json.loads(content) if content else {}
            if not isinstance(body, dict):
                raise UserError("body: must be a JSON object")
            token, _, number = key.partition(".")
            if not hmac.compare_digest(token.encode(), self.token.encode()):
                return 401, error_body("the API key does not belong to this run", is_anthropic), JSON
            if (method, route) == ("GET", "models"):
                return 200, dump({"object": "list", "data": [{"id": "policy", "object": "model"}]}), JSON
            name = number or headers.get(SESSION) or body.get(SESSION_FIELD)
            session = self._sessions.get(str(name))
            if name is None and self._sampling is not None:  # of a server of a gym that verifies: not trained
                session = Session(self.model, self._sampling, seed=secrets.randbits(32))
            if session is None:
                return 404, error_body("the episode of this API key is not running", is_anthropic), JSON
            if method != "POST" or route not in ROUTES:
                text = f"{method} {path}: no such route; use one of {', '.join(ROUTES)}"
                return 404, error_body(text, is_anthropic), JSON
            return await ROUTES[route](self, session, body)
        except UserError as error:
            code, text = "context_length_exceeded" if isinstance(error, OutOfTokens) else None, str(error)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            text = f"body: not a request of {path} ({describe_error(error)}); check its fields"
        if session is not None:
            session.rejected = text
        return 400, error_body(text, is_anthropic, code), JSON

    async def _turns(self, session: Session, ask: Ask) -> list[Turn]:
        limits = {"max_tokens": ask.max_tokens, "stop": ask.stop}
        if ask.prompts:
            work = [session.complete(prompt, **limits) for prompt in ask.prompts for _ in range(ask.count)]
        else:
            work = [session.chat(ask.messages, settings=ask.settings, **limits) for _ in range(ask.count)]
        return await together(work)

    async def _chat(self, session: Session, body: Json) -> Reply:
        turns = await self._turns(session, protocols.read_chat(body))
        reply = protocols.chat_reply(turns, body, secrets.token_hex(12), self.model.tokenizer)
        return answer(reply, body, protocols.chat_events, done=True)

    async def _completions(self, session: Session, body: Json) -> Reply:
        turns = await self._turns(session, protocols.read_completions(body))
        reply = protocols.completions_reply(turns, body, secrets.token_hex(12), self.model.tokenizer)
        return answer(reply, body, protocols.completions_events, done=True)

    async def _responses(self, session: Session, body: Json) -> Reply:
        (turn,) = await self._turns(session, protocols.read_responses(body, session.stored))
        reply = protocols.responses_reply(turn, body, secrets.token_hex(12))
        session.stored[reply["id"]] = turn.messages
        return answer(reply, body, protocols.responses_events, named=True)

    async def _messages(self, session: Session, body: Json) -> Reply:
        ask = protocols.read_messages(body)
        if ask.messages[-1]["role"] == "assistant":
            raise UserError("messages: the start of an answer cannot be given; end with a message of the user")
        (turn,) = await self._turns(session, ask)
        reply = protocols.messages_reply(turn, body, secrets.token_hex(12), self.model.tokenizer)
        return answer(reply, body, protocols.messages_events, named=True)

    async def _generate(self, session: Session, body: Json) -> Reply:
        """The token route of vLLM, which the package verifiers uses."""
        if body.get("features") or body.get("content_parts"):
            session.error = UserError("images are not supported; only text is")
            raise session.error
        params = body.get("sampling_params") or {}
        prompt, limits = body.get("token_ids"), (params.get("stop_token_ids") or [], [params.get("max_tokens") or 1])
        if not all(isinstance(ids, list) and all(type(x) is int for x in ids) for ids in (prompt, *limits)):
            raise UserError("token_ids, stop_token_ids, max_tokens: must be integers")
        turn = await session.complete(prompt, max_tokens=params.get("max_tokens"), stop_ids=limits[0])
        pairs = zip(turn.completion.ids, turn.completion.logps, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logp, "top_logprobs": []} for token, logp in pairs]
        choice = {"index": 0, "token_ids": turn.completion.ids, "logprobs": {"content": content}}
        choice["finish_reason"] = turn.completion.finish_reason
        return 200, dump({"request_id": secrets.token_hex(8), "choices": [choice]}), JSON

    async def _count_tokens(self, session: Session, body: Json) -> Reply:
        ask = protocols.read_messages(body)
        return 200, dump({"input_tokens": len(session.prompt_ids(ask.messages, session.settings | ask.settings))}), JSON


ROUTES: dict[str, Callable[[Endpoint, Session, Json], Any]] = {
    "chat/completions": Endpoint._chat,
    "completions": Endpoint._completions,
    "responses": Endpoint._responses,
    "messages": Endpoint._messages,
    "messages/count_tokens": Endpoint._count_tokens,
    "generate": Endpoint._generate,
}
JSON, EVENTS = "application/json", "text/event-stream"
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}


def key_and_route(path: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the API key, which may also be the first part of the path, and the route after /v1/."""
    before, _, route = path.partition("/v1/")
    key = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
    return before.removesuffix("/inference").strip("/") or key, route


def answer(
    reply: Json, body: Json, events: Callable[[Json, Json], Iterator[Json]], *, named: bool = False, done: bool = False
) -> Reply:
    """Return the reply as JSON or, if the request asks for it, as events."""
    if not body.get("stream"):
        return 200, dump(reply), JSON
    text = ""
    for event in events(reply, body):
        text += (f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n"
    return 200, (text + "data: [DONE]\n\n" * done).encode(), EVENTS


def dump(value: Json) -> bytes:
    return json.dumps(value).encode()


def error_body(text: str, is_anthropic: bool = False, code: str | None = None) -> bytes:
    inner = {"type": "invalid_request_error", "message": text, "code": code, "param": None}
    return dump({"type": "error", "error": inner} if is_anthropic else {"error": inner})


async def write(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = JSON) -> None:
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


class ArrivingRequests:
    """Requests of other threads, sampled by the thread that owns the weights; they join its batch as they arrive."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._waiting: deque[tuple[Request, Sampling, Future[Completion]]] = deque()
        self._arrived = threading.Condition()
        self._woken = False

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        future: Future[Completion] = Future()
        with self._arrived:
            self._waiting.append((request, sampling, future))
            self._arrived.notify()
        return future

    def wake(self) -> None:
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def sample(self, timeout: float) -> None:
        """Wait for a request or wake(), then sample until no request is left."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting or self._woken, timeout)
            self._woken = False
            if not self._waiting:
                return
            sampling = self._waiting[0][1]
        futures: list[Future[Completion]] = []

        def arrived() -> list[Request]:
            """Take the requests with the same settings; others wait for the next batch."""
            with self._arrived:
                if futures and any(item[1] != sampling for item in self._waiting):
                    return []  # otherwise the others would wait until no agent of this batch requests another turn
                taken = [item for item in self._waiting if item[1] == sampling]
                self._waiting = deque(item for item in self._waiting if item[1] != sampling)
            taken = [item for item in taken if item[2].set_running_or_notify_cancel()]
            futures.extend(future for _, _, future in taken)
            return [request for request, _, _ in taken]

        try:
            for ended in self.engine.stream(arrived(), sampling, arrived):
                for index, completion in ended:
                    futures[index].set_result(completion)
        except BaseException as error:
            for future in futures:
                if not future.done():
                    stopped = RuntimeError("sampling was stopped")  # by Ctrl-C
                    future.set_exception(error if isinstance(error, Exception) else stopped)
            raise
