"""Episodes in an OpenEnv environment: the model's turns are actions, the turns in between are observations.

    source = load_episode(cfg.openenv, tokenizer).source(endpoint, sampling)
    -> Completion(ids=[turns and observations], mask=[True for the model's turns], columns={"env_reward": 1.0, ...})

The first observation is appended to the prompt, in the user's turn. All episodes of a group start with the same
reset(seed=...): the row's column `seed`, or a hash of the row's source. If the adapter rejects an action (ValueError),
the model gets the message as the observation, and the turn counts.

A session is one episode of the environment, in this process or on a server. Observations are dicts.

    opener = find_environment("game.py:Guess", timeout=60)      # or a URL: the server's websocket
    session = opener.open()
    first = await session.reset(seed=3)
    after = await session.step({"message": "42"})
    await session.close()

Servers are accessed over a websocket: with plain HTTP they would create a new environment for every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import queue
import threading
import time
import typing
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import httpx

from data.errors import UserError
from data.limits import thread_clock, wait_for_thread
from data.types import Messages, Prompt
from data.user_code import describe_error, find_attribute, where_raised
from rollout.engine import Completion, Request, Sampling
from rollout.episodes.endpoint import Endpoint
from rollout.episodes.session import OutOfTokens, Session, masked_completion
from rollout.episodes.tools import without_surrogates
from rollout.episodes.turns import Continuation
from rollout.gyms.gym_source import GymSource, UnusableError, read_reward, shorten
from rollout.gyms.options import REMOTE, OpenEnvConfig

MAX_SCHEMA = 2**24  # bytes
NOT_SHOWN = {"reward", "done", "metadata"}  # observation fields that OpenEnv's own client also omits


def load_episode(cfg: OpenEnvConfig, tokenizer: Any) -> OpenEnvEpisode:
    """Load the environment and its adapter; raise for unsupported settings before anything is sampled."""
    assert cfg.env is not None, cfg
    opener = find_environment(cfg.env, cfg.timeout)
    if cfg.max_concurrent_envs > 1 and opener.concurrent is False:
        raise UserError(
            f"openenv.max_concurrent_envs={cfg.max_concurrent_envs}: {cfg.env} does not declare concurrent episodes; "
            "use 1, or set SUPPORTS_CONCURRENT_SESSIONS = True in the class if it supports them"
        )
    opener.check_reset(cfg.reset_columns)
    Continuation(tokenizer, role="user")  # rejects templates that rewrite earlier turns
    return OpenEnvEpisode(cfg, opener, _adapter(cfg, opener))


class OpenEnvEpisode:
    """Episodes in the environment; at most max_concurrent_envs run at the same time."""

    columns = ("num_turns", "env_reward")

    def __init__(self, cfg: OpenEnvConfig, opener: Opener, adapter: Any) -> None:
        self.cfg, self.opener, self.adapter = cfg, opener, adapter
        self._slots = asyncio.Semaphore(cfg.max_concurrent_envs)

    def source(self, endpoint: Endpoint | None, sampling: Sampling) -> GymSource:
        """Return a source of episodes; `endpoint` is None on ranks that never start one."""

        async def play(endpoint: Endpoint, request: Request, index: int) -> Completion:
            assert request.prompt is not None
            with endpoint.session(sampling, seed=request.seed, settings=request.prompt.settings) as (session, _):
                return await self.play(session, request.prompt)

        return GymSource(play, endpoint, flag="openenv", title="OpenEnv", log_once=lambda *_: None, hint="")

    async def play(self, session: Session, prompt: Prompt) -> Completion:
        """Play one episode; its turns are the session's."""
        async with self._slots:
            try:
                environment = self.opener.open()
                try:
                    return await self._run_episode(environment, session, prompt)
                finally:
                    await environment.close()
            except EnvironmentFailure as error:
                if self.cfg.on_error == "stop":
                    message = f"openenv.env={self.cfg.env}: {error}, at {prompt.source}"
                    raise UnusableError(f"{message}; fix the environment or set --openenv.on-error none") from None
                columns = {"env_reward": None, "num_turns": 0, "env_failed": 1.0}
                return replace(masked_completion(prompt.ids, columns, []), finish_reason="stop")
            except ValueError as error:  # of the prompt or the engine
                raise UnusableError(str(error)) from None

    async def _run_episode(self, environment: Any, session: Session, prompt: Prompt) -> Completion:
        settings = {name: prompt.columns.get(name) for name in self.cfg.reset_columns}
        first = await environment.reset(seed=environment_seed(prompt), **settings)
        asked = opening(prompt, self._shown(first))
        messages: Messages = []  # after the prompt and the first observation
        rewards: list[float] = []
        finish, text, done, num_rejected = "length", "", False, 0
        for turn in range(self.cfg.max_turns):
            try:
                reply = await session.chat(asked)
            except OutOfTokens:
                if not turn:
                    raise
                break
            text = reply.completion.text
            messages.append({"role": "assistant", "content": text})
            if reply.completion.finish_reason == "length":
                break  # do not take a truncated action
            try:
                action = self.adapter.action(text)
            except Exception as error:  # user code may raise anything, and the model gets the error
                shown = str(error) if isinstance(error, ValueError) else describe_error(error)
                num_rejected += 1
            else:
                step = await environment.step(action)
                shown, done = self._shown(step), step.done
                rewards += [] if step.reward is None else [step.reward]
            messages.append({"role": "user", "content": shown})
            if done:
                finish = "stop"
                break
            asked = [*reply.messages, messages[-1]]
        total = rewards[-1] if self.cfg.reward == "last" and rewards else sum(rewards)
        columns = {
            "env_reward": float(total),  # 0 without any reward, e.g. if the episode ran out of turns
            "num_turns": sum(message["role"] == "assistant" for message in messages),
            "env_done": float(done),
            "env_refused": num_rejected,
            "env_failed": 0.0,
        }
        return replace(session.completion(prompt.ids, columns), finish_reason=finish, text=text, messages=messages)

    def _shown(self, step: Step) -> str:
        try:
            shown = self.adapter.observation(step.observation)
        except EnvironmentFailure:
            raise
        except Exception as error:  # user code may raise anything
            raise EnvironmentFailure(f"observation() of the adapter raised {describe_error(error)}") from None
        if not isinstance(shown, str):
            raise EnvironmentFailure(f"observation() of the adapter returned a {type(shown).__name__}, not text")
        return without_surrogates(shown)


def environment_seed(prompt: Prompt) -> int:
    """Return the row's seed, or a hash of its source: the same for all episodes of a group, and in every run."""
    seed = prompt.columns.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed
    return int.from_bytes(hashlib.blake2b(prompt.source.encode(), digest_size=4).digest(), "big") >> 1


def opening(prompt: Prompt, observation: str) -> Messages:
    """Return the prompt's messages, with the first observation appended to the last message."""
    if isinstance(prompt.prompt, str):
        raise UserError(
            f"{prompt.source}: the prompt is plain text, but episodes need messages; use "
            '[{"role": "user", "content": ...}]'
        )
    if not observation:
        return prompt.prompt
    *before, last = prompt.prompt
    if last["role"] != "user":
        return [*prompt.prompt, {"role": "user", "content": observation}]
    return [*before, {**last, "content": f"{last['content']}\n\n{observation}"}]


# adapters: between the model's text and the environment's objects ------------------------------------------------


class TextAdapter:
    """Converts the model's text to actions with one text field, and observations to text.

    A user adapter has the same two methods. The model gets the text of a ValueError that action() raises.
    """

    def __init__(self, action_field: str, observation_field: str | None) -> None:
        self.action_field, self.observation_field = action_field, observation_field

    def action(self, text: str) -> dict[str, Any]:
        return {self.action_field: text}

    def observation(self, observation: dict[str, Any]) -> str:
        if self.observation_field is not None:
            if self.observation_field not in observation:
                names = ", ".join(observation) or "none"
                raise EnvironmentFailure(f"returned an observation without {self.observation_field!r} (has: {names})")
            shown = observation[self.observation_field]
            return shown if isinstance(shown, str) else json.dumps(shown)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation)


def _adapter(cfg: OpenEnvConfig, opener: Opener) -> Any:
    if cfg.adapter is not None:
        adapter = load_class(cfg.adapter, f"openenv.adapter={cfg.adapter}")
        adapter = adapter() if isinstance(adapter, type) else adapter
        for name in ("action", "observation"):
            if not callable(getattr(adapter, name, None)):
                raise UserError(f"openenv.adapter={cfg.adapter}: no method {name}; define action and observation")
        return adapter
    return TextAdapter(_text_field(cfg, opener.action_schema), cfg.observation_field)


def _text_field(cfg: OpenEnvConfig, schema: dict[str, Any]) -> str:
    """Return the field that action_field names, the only required text field, or the only text field."""
    known = {name: facts for name, facts in schema.get("properties", {}).items() if name != "metadata"}
    if cfg.action_field is not None:
        if cfg.action_field not in known:
            raise UserError(
                f"openenv.action_field={cfg.action_field}: no such field in an action of {cfg.env}; use one of "
                f"{', '.join(known) or 'none'}"
            )
        return cfg.action_field
    required = [name for name in schema.get("required", []) if name in known]
    texts = [name for name, facts in known.items() if facts.get("type") == "string"]
    for names in ([name for name in texts if name in required], texts):
        if len(names) == 1 and set(required) <= set(names):
            return names[0]
    raise UserError(
        f"openenv.env={cfg.env}: cannot choose the text field of an action from {', '.join(known) or 'none'}; set "
        "--openenv.action-field or --openenv.adapter"
    )


# sessions: one episode of the environment, in this process or on a server ----------------------------------------


class Step(NamedTuple):
    """Result of reset or step."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class EnvironmentFailure(Exception):
    """The environment failed; the text is the middle of a sentence."""


Opener = Any  # InProcess or Server; open() returns a session with reset(**settings), step(action) and close()


def find_environment(spec: str, timeout: float) -> Opener:
    """Load the environment and check it as far as possible without an episode."""
    if spec.lower().startswith(REMOTE):
        return Server(spec, timeout)
    return InProcess(spec, load_class(spec, f"openenv.env={spec}"), timeout)


def load_class(spec: str, label: str) -> Any:
    """Load module.Class or FILE.py:Class."""
    return find_attribute(spec, label, "not the name of a class; pass module.Class or FILE.py:Class")[1]


class InProcess:
    """Opener for a class in this process, with a new object per episode."""

    def __init__(self, spec: str, cls: Any, timeout: float) -> None:
        label = f"openenv.env={spec}"
        if not inspect.isclass(cls) or not (hasattr(cls, "reset") and hasattr(cls, "step")):
            raise UserError(f"{label}: not a class with reset and step; name an OpenEnv Environment")
        self.label, self.cls, self.timeout = label, cls, timeout
        self.concurrent = bool(getattr(cls, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self.action_class = _action_class(cls)
        if self.action_class is None:
            raise UserError(f"{label}: step() has no annotation for the Action; annotate the parameter")
        self.action_schema = self.action_class.model_json_schema()

    def open(self) -> Any:
        try:
            environment = self.cls()
        except Exception as error:  # user code may raise anything
            raise EnvironmentFailure(
                f"cannot be created without arguments ({describe_error(error)}{where_raised(error)})"
            ) from None
        return LocalSession(environment, self.action_class, self.timeout)

    def check_reset(self, names: tuple[str, ...]) -> None:
        parameters = inspect.signature(_method(self.cls, "reset")).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = [p.name for p in parameters if p.name != "self"]
        for name in names:
            if name not in known:
                raise UserError(
                    f"openenv.reset_columns={name}: not a parameter of reset() of {self.label.partition('=')[2]}; use "
                    f"{', '.join(known) or 'none'}"
                )


class LocalSession:
    """Calls the object's methods: async methods in the loop, other methods in a thread, so no other episode waits."""

    def __init__(self, environment: Any, action_class: Any, timeout: float) -> None:
        self.environment, self.action_class, self.timeout = environment, action_class, timeout
        self._thread = SessionThread()

    async def reset(self, **settings: Any) -> Step:
        call = _method(type(self.environment), "reset")
        parameters = inspect.signature(call).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            settings = {name: value for name, value in settings.items() if name in {p.name for p in parameters}}
        return _step(await self._call(call, "reset", **settings))

    async def step(self, action: dict[str, Any]) -> Step:
        try:
            validated = self.action_class.model_validate(action)
        except ValueError as error:  # pydantic's message has many lines
            raise EnvironmentFailure(f"rejects the action ({' '.join(str(error).split())})") from None
        return _step(await self._call(_method(type(self.environment), "step"), "step", validated))

    async def close(self) -> None:
        with contextlib.suppress(EnvironmentFailure):  # the episode is over and its object is discarded
            if hasattr(self.environment, "close"):
                await self._call(type(self.environment).close, "close")
        self._thread.end()

    async def _call(self, method: Callable[..., Any], name: str, *args: Any, **settings: Any) -> Any:
        clocks: list[Callable[[], float]] = []  # of the thread, once it runs

        def work() -> Any:
            clocks.append(thread_clock())
            return method(self.environment, *args, **settings)

        try:
            if inspect.iscoroutinefunction(method):
                return await asyncio.wait_for(method(self.environment, *args, **settings), self.timeout)
            outcome = asyncio.wrap_future(self._thread.run(work))
            # Not cancelled, so close() still runs after a slow step.
            return await wait_for_thread(asyncio.shield(outcome), clocks, self.timeout)
        except TimeoutError:
            raise EnvironmentFailure(f"{name}() took longer than timeout={self.timeout:g} s") from None
        except Exception as error:  # the environment may raise anything
            raise EnvironmentFailure(f"{name}() raised {describe_error(error)}{where_raised(error)}") from None


class SessionThread:
    """One thread for all calls of a session, because an environment may have thread-bound objects, e.g. a database.

    The thread is a daemon, unlike an executor's: a step that never ends must not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._started = False

    def run(self, call: Callable[[], Any]) -> Future[Any]:
        if not self._started:  # an environment with async methods needs no thread
            threading.Thread(target=self._work, name="openenv", daemon=True).start()
            self._started = True
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # raised by the environment; passed to the caller
                future.set_exception(error)


def _method(cls: Any, name: str) -> Callable[..., Any]:
    """Return reset_async or step_async if the class defines it, like OpenEnv's server, otherwise reset or step."""
    method = getattr(cls, f"{name}_async", None)
    inherited = method is None or getattr(method, "__module__", "").startswith("openenv.")
    return getattr(cls, name) if inherited else method


def _action_class(cls: Any) -> Any:
    """Return the Action that step() takes, from its annotation or from Environment[Action, ...] in the bases."""
    method = _method(cls, "step")
    parameters = [p.name for p in inspect.signature(method).parameters.values() if p.name != "self"]
    try:
        hints = typing.get_type_hints(method)
    except Exception:  # names that exist only for a type checker
        hints = {}
    kinds = [hints.get(parameters[0])] if parameters else []
    for base in (base for parent in cls.__mro__ for base in getattr(parent, "__orig_bases__", ())):
        kinds += typing.get_args(base)[:1]
    return next((kind for kind in kinds if inspect.isclass(kind) and hasattr(kind, "model_validate")), None)


def _step(observation: Any) -> Step:
    if not hasattr(observation, "model_dump"):
        raise EnvironmentFailure(f"returned a {type(observation).__name__}, not an Observation")
    fields = observation.model_dump(mode="json", exclude=NOT_SHOWN)
    return checked_step(fields, getattr(observation, "reward", None), getattr(observation, "done", False))


def checked_step(observation: Any, reward: Any, done: Any) -> Step:
    """Check the values, which a server may send in any type; a text "false" must not end the episode."""
    if not isinstance(observation, dict):
        raise EnvironmentFailure(f"returned observation={shorten(observation)}, not an object")
    if done not in (True, False, None):
        raise EnvironmentFailure(f"returned done={shorten(done)}, not true or false")
    reward = float(reward) if isinstance(reward, bool) else reward  # OpenEnv allows it
    try:
        return Step(observation, None if reward is None else read_reward(reward), bool(done))
    except ValueError as error:
        raise EnvironmentFailure(f"returned {error}") from None


class Server:
    """Opener for a server: a websocket connection per episode, each with its own environment."""

    concurrent = None

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        try:
            from openenv.core import GenericEnvClient
        except ImportError:
            raise UserError(
                f"openenv.env={url}: the package openenv-core is not installed; pip install -e '.[openenv]'"
            ) from None
        self._client = GenericEnvClient
        self.action_schema = self._schema()

    def open(self) -> Any:
        return RemoteSession(
            self._client(base_url=self.url, connect_timeout_s=self.timeout, message_timeout_s=self.timeout),
            self.timeout,
        )

    def check_reset(self, names: tuple[str, ...]) -> None:
        """A server accepts any column and ignores columns that its environment does not know."""

    def _schema(self) -> dict[str, Any]:
        page = "http" + self.url[2:] if self.url.lower().startswith("ws") else self.url
        try:
            schema = json.loads(self._get(f"{page}/schema"))["action"]
            fields, required = schema.get("properties", {}), schema.get("required", [])
            if not all(isinstance(x, dict) for x in fields.values()) or not all(isinstance(x, str) for x in required):
                raise UserError("the schema of an action is not a JSON schema")
            return schema
        except (
            httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            raise UserError(
                f"openenv.env={self.url}: no OpenEnv server at this URL ({describe_error(error)}); start it, or check "
                "the URL"
            ) from None

    def _get(self, url: str) -> bytes:
        """Return the body; one that does not end must neither fill the memory nor take forever."""
        content, deadline = bytearray(), time.monotonic() + self.timeout
        with httpx.stream("GET", url, timeout=self.timeout) as reply:
            reply.raise_for_status()
            for chunk in reply.iter_bytes():
                content += chunk
                if len(content) > MAX_SCHEMA or time.monotonic() > deadline:
                    raise OSError(f"the reply exceeds {MAX_SCHEMA:,} bytes or timeout={self.timeout:g} s")
        return bytes(content)


class RemoteSession:
    def __init__(self, client: Any, timeout: float) -> None:
        self.client, self.timeout = client, timeout

    async def reset(self, **settings: Any) -> Step:
        return await self._call("reset", self.client.reset(**settings))

    async def step(self, action: dict[str, Any]) -> Step:
        return await self._call("step", self.client.step(action))

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the episode is over, and the server may be gone
            await asyncio.wait_for(self.client.close(), self.timeout)

    async def _call(self, name: str, work: Any) -> Step:
        try:
            result = await work
            return checked_step(result.observation, result.reward, result.done)
        except EnvironmentFailure:
            raise
        except TimeoutError:
            raise EnvironmentFailure(f"{name}() took longer than timeout={self.timeout:g} s") from None
        except Exception as error:  # of the connection, the protocol or the environment
            # A full server reports CAPACITY_REACHED and closes the connection; either may arrive first.
            if "CAPACITY_REACHED" in str(error) or (name == "reset" and "ConnectionClosed" in type(error).__name__):
                raise EnvironmentFailure("the server is full (lower --openenv.max-concurrent-envs)") from None
            raise EnvironmentFailure(f"{name}() failed ({describe_error(error)})") from None
