"""One episode of an OpenEnv environment, wherever it runs: reset, step, close; observations are plain dicts.

    opener = find_environment("game.py:Guess", timeout=60)      # or a URL: the server's websocket
    session = opener.open()
    first = await session.reset(seed=3)
    after = await session.step({"message": "42"})
    await session.close()

Plain HTTP to a server would build a fresh environment for every call, so a server is spoken to over its websocket.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import typing
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx

from data.user_code import attribute_of, load_file, load_module, place, told
from rollout.openenv_options import REMOTE

NOT_SHOWN = {"reward", "done", "metadata"}  # of an observation: what OpenEnv's own client leaves out


class Step(NamedTuple):
    """What the environment answered."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Failed(Exception):
    """The environment failed; the text is a sentence's middle part: what happened."""


class Session(Protocol):
    async def reset(self, **settings: Any) -> Step: ...

    async def step(self, action: dict[str, Any]) -> Step: ...

    async def close(self) -> None: ...


class Opener(Protocol):
    """Begins sessions; says what one takes and whether there may be several at the same time."""

    concurrent: bool | None  # None: only the server knows
    action_schema: dict[str, Any]  # JSON schema of an action

    def open(self) -> Session: ...

    def check_reset(self, names: tuple[str, ...]) -> None:
        """Refuse settings that reset() would not take."""


def find_environment(spec: str, timeout: float) -> Opener:
    """The environment that the user named, checked as far as it can be without an episode."""
    if spec.lower().startswith(REMOTE):
        return Server(spec, timeout)
    return InProcess(spec, load_class(spec, f"openenv.env={spec}"), timeout)


def load_class(spec: str, label: str) -> Any:
    """What the user named as module.Class or FILE.py:Class."""
    path, colon, attribute = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return attribute_of(load_file(Path(path).expanduser().resolve(), label), attribute, label)
    name, dot, attribute = spec.rpartition(".")
    if not dot or colon:
        raise ValueError(f"{label}: is not of the form module.Class or FILE.py:Class; write it so")
    return attribute_of(load_module(name, label), attribute, label)


# in this process -------------------------------------------------------------------------------------------------


class InProcess:
    """A new object of the environment's class for every episode."""

    def __init__(self, spec: str, cls: Any, timeout: float) -> None:
        label = f"openenv.env={spec}"
        if not inspect.isclass(cls) or not (hasattr(cls, "reset") and hasattr(cls, "step")):
            raise ValueError(f"{label}: is not a class with reset and step; name an OpenEnv Environment")
        self.label, self.cls, self.timeout = label, cls, timeout
        self.concurrent = bool(getattr(cls, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self.action_class = _action_class(cls)
        if self.action_class is None:
            raise ValueError(f"{label}: its step() does not say which Action it takes; annotate the parameter")
        self.action_schema = self.action_class.model_json_schema()

    def open(self) -> Session:
        try:
            environment = self.cls()
        except Exception as error:  # the user's code, whatever it raises
            raise Failed(f"cannot be made without arguments ({told(error)}{place(error)})") from None
        return OwnSession(environment, self.action_class, self.timeout)

    def check_reset(self, names: tuple[str, ...]) -> None:
        parameters = inspect.signature(_method(self.cls, "reset")).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = [p.name for p in parameters if p.name != "self"]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"openenv.reset_columns={name}: reset() of {self.label.partition('=')[2]} does not take it, only "
                    f"{', '.join(known) or 'nothing'}; leave it out"
                )


class OwnSession:
    """Calls the object's methods: async ones in the loop, the others in a thread, so that nobody else waits."""

    def __init__(self, environment: Any, action_class: Any, timeout: float) -> None:
        self.environment, self.action_class, self.timeout = environment, action_class, timeout
        self._thread = Worker()

    async def reset(self, **settings: Any) -> Step:
        call = _method(type(self.environment), "reset")
        parameters = inspect.signature(call).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            settings = {name: value for name, value in settings.items() if name in {p.name for p in parameters}}
        return _step(await self._call(call, "reset", **settings))

    async def step(self, action: dict[str, Any]) -> Step:
        try:
            made = self.action_class.model_validate(action)
        except ValueError as error:  # pydantic's, of many lines
            raise Failed(f"takes no such action ({' '.join(str(error).split())})") from None
        return _step(await self._call(_method(type(self.environment), "step"), "step", made))

    async def close(self) -> None:
        with contextlib.suppress(Failed):  # the episode is over, and its object goes away
            if hasattr(self.environment, "close"):
                await self._call(type(self.environment).close, "close")
        self._thread.end()

    async def _call(self, method: Callable[..., Any], name: str, *args: Any, **settings: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            work = method(self.environment, *args, **settings)
        else:
            done = self._thread.run(lambda: method(self.environment, *args, **settings))
            work = asyncio.shield(asyncio.wrap_future(done))  # not taken back: a close behind a slow step is done yet
        try:
            return await asyncio.wait_for(work, self.timeout)
        except TimeoutError:
            raise Failed(f"{name}() took longer than timeout={self.timeout:g} s") from None
        except Exception as error:  # the environment's code, whatever it raises
            raise Failed(f"{name}() raised {told(error)}{place(error)}") from None


class Worker:
    """One thread for all calls of a session: an environment may hold what belongs to a thread (a database, say).

    A daemon, unlike the threads of an executor: a step that never ends must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._started = False

    def run(self, call: Callable[[], Any]) -> Future[Any]:
        if not self._started:  # an environment with async methods needs none
            threading.Thread(target=self._work, name="openenv", daemon=True).start()
            self._started = True
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """No more calls; those before are still made."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # of the environment, for whoever waits
                future.set_exception(error)


def _method(cls: Any, name: str) -> Callable[..., Any]:
    """reset_async or step_async where the class has its own, as OpenEnv's server does; else reset or step."""
    own = getattr(cls, f"{name}_async", None)
    inherited = own is None or getattr(own, "__module__", "").startswith("openenv.")
    return getattr(cls, name) if inherited else own


def _action_class(cls: Any) -> Any:
    """The Action that step() takes: by its annotation, or by what the class gives for Environment[Action, ...]."""
    method = _method(cls, "step")
    parameters = [p.name for p in inspect.signature(method).parameters.values() if p.name != "self"]
    try:
        hints = typing.get_type_hints(method)
    except Exception:  # names that only a type checker can see
        hints = {}
    found = [hints.get(parameters[0])] if parameters else []
    for base in (base for parent in cls.__mro__ for base in getattr(parent, "__orig_bases__", ())):
        found += typing.get_args(base)[:1]
    return next((kind for kind in found if inspect.isclass(kind) and hasattr(kind, "model_validate")), None)


def _step(observation: Any) -> Step:
    if not hasattr(observation, "model_dump"):
        raise Failed(f"answered a {type(observation).__name__}, not an Observation")
    return Step(
        observation.model_dump(mode="json", exclude=NOT_SHOWN),
        _reward(getattr(observation, "reward", None)),
        bool(getattr(observation, "done", False)),
    )


def _reward(value: Any) -> float | None:
    return None if value is None else float(value)


# on a server -----------------------------------------------------------------------------------------------------


class Server:
    """A websocket connection for every episode: the server keeps one environment for each."""

    concurrent = None

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        try:
            from openenv.core import GenericEnvClient
        except ImportError:
            raise ValueError(
                f"openenv.env={url}: the package openenv-core is not installed; pip install -e '.[openenv]'"
            ) from None
        self._client = GenericEnvClient
        self.action_schema = self._schema()

    def open(self) -> Session:
        return RemoteSession(
            self._client(base_url=self.url, connect_timeout_s=self.timeout, message_timeout_s=self.timeout),
            self.timeout,
        )

    def check_reset(self, names: tuple[str, ...]) -> None:
        """A server takes any, and leaves out what its environment does not know."""

    def _schema(self) -> dict[str, Any]:
        page = "http" + self.url[2:] if self.url.lower().startswith("ws") else self.url
        try:
            reply = httpx.get(f"{page}/schema", timeout=self.timeout)
            reply.raise_for_status()
            return reply.json()["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"openenv.env={self.url}: no OpenEnv server answers there ({told(error)}); start it, or check the URL"
            ) from None


class RemoteSession:
    def __init__(self, client: Any, timeout: float) -> None:
        self.client, self.timeout = client, timeout

    async def reset(self, **settings: Any) -> Step:
        return await self._call("reset", self.client.reset(**settings))

    async def step(self, action: dict[str, Any]) -> Step:
        return await self._call("step", self.client.step(action))

    async def close(self) -> None:
        await self.client.close()

    async def _call(self, name: str, work: Any) -> Step:
        try:
            result = await work
            return Step(dict(result.observation), _reward(result.reward), bool(result.done))
        except TimeoutError:
            raise Failed(f"{name}() took longer than timeout={self.timeout:g} s") from None
        except Exception as error:  # connection, protocol, or what the server says of its environment
            # A server without room says so and hangs up; which of the two is seen first depends on the clock.
            if "CAPACITY_REACHED" in str(error) or (name == "reset" and "ConnectionClosed" in type(error).__name__):
                raise Failed("its server has no room for another episode (lower max_concurrent_envs)") from None
            raise Failed(f"{name}() failed ({told(error)})") from None
