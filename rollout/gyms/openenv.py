"""Episodes in an OpenEnv environment: the model's turns are actions, observations are the turns in between.

    episode = load_episode(cfg.openenv, tokenizer)                  # OpenEnvEpisode: async (client, prompt, seed)
    source = OpenEnvSource(engine, sampling, episode)               # a Source, for either engine
    -> Completion(ids=[turns and observations], mask=[True for the model's turns], columns={"env_reward": 1.0, ...})

The first observation is appended to the prompt, in the user's turn. All episodes of a group start with the same
reset(seed=...): the row's column `seed`, or a hash of the row's source. If the adapter refuses an action (ValueError),
the model gets the message as the observation, and has used a turn.

A session is one episode of the environment, in this process or on a server: reset, step, close; observations are dicts.

    opener = find_environment("game.py:Guess", timeout=60)      # or a URL: the server's websocket
    session = opener.open()
    first = await session.reset(seed=3)
    after = await session.step({"message": "42"})
    await session.close()

Servers are used over their websocket: with plain HTTP they would build a new environment for every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import queue
import threading
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import httpx

from data.chat import render_prompt
from data.errors import UserError
from data.types import Messages, Prompt
from data.user_code import attribute_of, describe_error, load_file, load_module, where_raised
from rollout.engine import Completion, Request, Sampling, finished
from rollout.episodes.episode import Client, EpisodeSource
from rollout.episodes.turns import Continuation, Transcript, turn_seed
from rollout.gyms.options import REMOTE, OpenEnvConfig

NOT_SHOWN = {"reward", "done", "metadata"}  # fields of an observation that OpenEnv's own client leaves out


def load_episode(cfg: OpenEnvConfig, tokenizer: Any) -> OpenEnvEpisode:
    """Load the environment and its adapter; refuse what cannot work before anything is sampled."""
    assert cfg.env is not None, cfg
    opener = find_environment(cfg.env, cfg.timeout)
    if cfg.max_concurrent_envs > 1 and opener.concurrent is False:
        raise UserError(
            f"openenv.max_concurrent_envs={cfg.max_concurrent_envs}: {cfg.env} does not declare concurrent "
            "episodes; set SUPPORTS_CONCURRENT_SESSIONS = True in the class if it supports them, or leave it at 1"
        )
    opener.check_reset(cfg.reset_columns)
    return OpenEnvEpisode(cfg, opener, _adapter(cfg, opener), Continuation(tokenizer, role="user"))


class OpenEnvEpisode:
    """An Episode (episodes/episode.py) that plays the environment; at most max_concurrent_envs at a time."""

    def __init__(self, cfg: OpenEnvConfig, opener: Opener, adapter: Any, continuation: Continuation) -> None:
        self.cfg, self.opener, self.adapter, self.continuation = cfg, opener, adapter, continuation
        self.limit = cfg.max_concurrent_envs
        self._slots: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()  # by event loop

    async def __call__(self, client: Client, prompt: Prompt, seed: int) -> Completion:
        loop = asyncio.get_running_loop()
        async with self._slots.setdefault(loop, asyncio.Semaphore(self.limit)):
            try:
                session = self.opener.open()
                try:
                    return await self._play(session, client, prompt, seed)
                finally:
                    await session.close()
            except Failed as error:
                if self.cfg.on_error == "stop":
                    remedy = "fix it, or set --openenv.on-error none"
                    raise UserError(f"openenv.env={self.cfg.env}: {error}, at {prompt.source}; {remedy}") from None
                transcript = Transcript(prompt.ids)
                transcript.insert([self.continuation.end_id])  # masked: a completion cannot be empty
                columns = {"env_reward": None, "num_turns": 0, "env_failed": 1.0}
                return transcript.completion("stop", text="", messages=[], columns=columns)

    async def _play(self, session: Any, client: Client, prompt: Prompt, seed: int) -> Completion:
        columns = {name: prompt.columns.get(name) for name in self.cfg.reset_columns}
        first = await session.reset(seed=environment_seed(prompt), **columns)
        messages = opening(prompt, self._shown(first))
        transcript = Transcript(render_prompt(client.tokenizer, messages, settings=prompt.settings))
        played = Played(self.cfg.reward)
        finish, text = "length", ""
        for turn in range(self.cfg.max_turns):
            room = client.sampling.max_tokens - len(transcript)
            made = await client.generate(transcript.ids, turn_seed(seed, turn), max_tokens=room)
            transcript.add(made)
            text = made.text
            played.add("assistant", text)
            if made.finish_reason == "length":
                break  # a truncated action is not taken
            answer = await self._act(session, text, played)
            if played.done:
                finish = "stop"
                break
            reply = [{"role": "user", "content": answer}]
            between = self.continuation.ids(reply, transcript.last_id, prompt.settings)
            if turn + 1 == self.cfg.max_turns or len(transcript) + len(between) >= client.sampling.max_tokens:
                break  # no turn could follow
            transcript.insert(between)
        return transcript.completion(finish, text=text, messages=played.messages, columns=played.columns())

    def _shown(self, step: Step) -> str:
        try:
            return self.adapter.observation(step.observation)
        except Exception as error:  # the user's code may raise anything
            raise Failed(f"observation() of the adapter raised {describe_error(error)}") from None

    async def _act(self, session: Any, text: str, played: Played) -> str:
        """Take the action; returns the text that the model is shown."""
        try:
            action = self.adapter.action(text)
        except Exception as error:  # shown to the model, whatever the adapter raised
            shown = str(error) if isinstance(error, ValueError) else describe_error(error)
            played.num_refused += 1
        else:
            step = await session.step(action)
            shown = self._shown(step)
            played.done = step.done
            played.rewards += [] if step.reward is None else [step.reward]
        played.add("user", shown)
        return shown


class Played:
    """Record of an episode, for rewards and metrics."""

    def __init__(self, reward: str) -> None:
        self.reward = reward
        self.messages: Messages = []
        self.rewards: list[float] = []
        self.num_refused = 0
        self.done = False

    def add(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def columns(self) -> dict[str, Any]:
        total = self.rewards[-1] if self.reward == "last" and self.rewards else sum(self.rewards)
        return {
            "env_reward": float(total),  # 0 without any reward: an episode that ran out has earned none
            "num_turns": sum(message["role"] == "assistant" for message in self.messages),
            "env_done": float(self.done),
            "env_refused": self.num_refused,
            "env_failed": 0.0,
        }


def environment_seed(prompt: Prompt) -> int:
    """The row's seed, else a hash of its source: the same for all episodes of a group, and in every run."""
    given = prompt.columns.get("seed")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    return int.from_bytes(hashlib.blake2b(prompt.source.encode(), digest_size=4).digest(), "big") >> 1


def opening(prompt: Prompt, observation: str) -> Messages:
    """The prompt's messages, with the first observation appended to the last one."""
    if isinstance(prompt.prompt, str):
        raise UserError(
            f"{prompt.source}: its prompt is plain text; an episode of several turns needs messages, give "
            '[{"role": "user", "content": ...}]'
        )
    if not observation:
        return prompt.prompt
    *before, last = prompt.prompt
    if last["role"] != "user":
        return [*prompt.prompt, {"role": "user", "content": observation}]
    return [*before, {**last, "content": f"{last['content']}\n\n{observation}"}]


class OpenEnvSource:
    """Source of episodes in an environment.

    With the in-process engine, episodes run in lockstep, so an episode that waited for a free environment would block
    the others: they are started in portions of max_concurrent_envs instead.
    """

    def __init__(self, engine: Any, sampling: Sampling, episode: OpenEnvEpisode) -> None:
        self.episode = episode
        self._inner = EpisodeSource(engine, sampling, episode)
        self._in_portions = not engine.concurrent

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        if not self._in_portions:
            return self._inner.start(groups)
        requests = [request for group in groups for request in group]
        made: list[Completion] = []
        for begin in range(0, len(requests), self.episode.limit):
            portion = requests[begin : begin + self.episode.limit]
            made += [future.result()[0] for future in self._inner.start([[request] for request in portion])]
        completions = iter(made)
        return [finished([next(completions) for _ in group]) for group in groups]

    def close(self) -> None:
        self._inner.close()


# adapters: between the model's text and the environment's objects ------------------------------------------------


class TextAdapter:
    """Converts the model's text to actions, and observations to text, where each is one text.

    A user's adapter has the same two methods; the text of a ValueError of action() is shown to the model."""

    def __init__(self, action_field: str, observation_field: str | None) -> None:
        self.action_field, self.observation_field = action_field, observation_field

    def action(self, text: str) -> dict[str, Any]:
        return {self.action_field: text}

    def observation(self, observation: dict[str, Any]) -> str:
        if self.observation_field is not None:
            if self.observation_field not in observation:
                has = ", ".join(observation) or "nothing"
                raise Failed(f"gave an observation without {self.observation_field!r} (it has {has})")
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
                raise UserError(f"openenv.adapter={cfg.adapter}: has no method {name}; give it action and observation")
        return adapter
    return TextAdapter(_text_field(cfg, opener.action_schema), cfg.observation_field)


def _text_field(cfg: OpenEnvConfig, schema: dict[str, Any]) -> str:
    """The field that was named, or the only required text field, or else the only text field."""
    known = {name: facts for name, facts in schema.get("properties", {}).items() if name != "metadata"}
    if cfg.action_field is not None:
        if cfg.action_field not in known:
            raise UserError(
                f"openenv.action_field={cfg.action_field}: an action of {cfg.env} has no such field; it has "
                f"{', '.join(known) or 'none'}"
            )
        return cfg.action_field
    required = [name for name in schema.get("required", []) if name in known]
    texts = [name for name, facts in known.items() if facts.get("type") == "string"]
    for names in ([name for name in texts if name in required], texts):
        if len(names) == 1 and set(required) <= set(names):
            return names[0]
    raise UserError(
        f"openenv.env={cfg.env}: an action has the fields {', '.join(known) or 'none'}, and no single one takes "
        "text; name it with --openenv.action-field, or write an --openenv.adapter"
    )


# sessions: one episode of the environment, in this process or on a server ----------------------------------------


class Step(NamedTuple):
    """The environment's answer to reset or step."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Failed(Exception):
    """The environment failed; the text says what happened, as the middle of a sentence."""


Opener = Any  # InProcess or Server; open() gives a session with reset(**settings), step(action) and close()


def find_environment(spec: str, timeout: float) -> Opener:
    """The environment that the user named, checked as far as possible without an episode."""
    if spec.lower().startswith(REMOTE):
        return Server(spec, timeout)
    return InProcess(spec, load_class(spec, f"openenv.env={spec}"), timeout)


def load_class(spec: str, label: str) -> Any:
    """Load module.Class or FILE.py:Class."""
    path, colon, attribute = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return attribute_of(load_file(Path(path).expanduser().resolve(), label), attribute, label)
    name, dot, attribute = spec.rpartition(".")
    if not dot or colon:
        raise UserError(f"{label}: is not a class name; give module.Class or FILE.py:Class")
    return attribute_of(load_module(name, label), attribute, label)


class InProcess:
    """Opener for a class in this process: a new object per episode."""

    def __init__(self, spec: str, cls: Any, timeout: float) -> None:
        label = f"openenv.env={spec}"
        if not inspect.isclass(cls) or not (hasattr(cls, "reset") and hasattr(cls, "step")):
            raise UserError(f"{label}: is not a class with reset and step; name an OpenEnv Environment")
        self.label, self.cls, self.timeout = label, cls, timeout
        self.concurrent = bool(getattr(cls, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self.action_class = _action_class(cls)
        if self.action_class is None:
            raise UserError(f"{label}: its step() has no annotation for the Action; annotate the parameter")
        self.action_schema = self.action_class.model_json_schema()

    def open(self) -> Any:
        try:
            environment = self.cls()
        except Exception as error:  # the user's code may raise anything
            raise Failed(
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
                    f"openenv.reset_columns={name}: reset() of {self.label.partition('=')[2]} does not take it, only "
                    f"{', '.join(known) or 'nothing'}; leave it out"
                )


class LocalSession:
    """Calls the object's methods: async ones in the loop, others in a thread, so that other episodes do not wait."""

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
        except ValueError as error:  # pydantic's, with many lines
            raise Failed(f"takes no such action ({' '.join(str(error).split())})") from None
        return _step(await self._call(_method(type(self.environment), "step"), "step", made))

    async def close(self) -> None:
        with contextlib.suppress(Failed):  # the episode is over, and its object is discarded
            if hasattr(self.environment, "close"):
                await self._call(type(self.environment).close, "close")
        self._thread.end()

    async def _call(self, method: Callable[..., Any], name: str, *args: Any, **settings: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            work = method(self.environment, *args, **settings)
        else:
            done = self._thread.run(lambda: method(self.environment, *args, **settings))
            work = asyncio.shield(asyncio.wrap_future(done))  # not cancelled: a close behind a slow step is still done
        try:
            return await asyncio.wait_for(work, self.timeout)
        except TimeoutError:
            raise Failed(f"{name}() took longer than timeout={self.timeout:g} s") from None
        except Exception as error:  # the environment may raise anything
            raise Failed(f"{name}() raised {describe_error(error)}{where_raised(error)}") from None


class Worker:
    """One thread for all calls of a session: an environment may have thread-bound objects, such as a database.

    A daemon, unlike the threads of an executor: a step that never ends must not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._started = False

    def run(self, call: Callable[[], Any]) -> Future[Any]:
        if not self._started:  # environments with async methods need no thread
            threading.Thread(target=self._work, name="openenv", daemon=True).start()
            self._started = True
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """Accept no more calls; queued ones are still made."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # of the environment, passed to the caller
                future.set_exception(error)


def _method(cls: Any, name: str) -> Callable[..., Any]:
    """reset_async or step_async if the class defines it, as OpenEnv's server chooses; else reset or step."""
    method = getattr(cls, f"{name}_async", None)
    inherited = method is None or getattr(method, "__module__", "").startswith("openenv.")
    return getattr(cls, name) if inherited else method


def _action_class(cls: Any) -> Any:
    """The Action that step() takes: from its annotation, or from Environment[Action, ...] in the bases."""
    method = _method(cls, "step")
    parameters = [p.name for p in inspect.signature(method).parameters.values() if p.name != "self"]
    try:
        hints = typing.get_type_hints(method)
    except Exception:  # names that exist only for a type checker
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
        """A server accepts any column, and ignores those that its environment does not know."""

    def _schema(self) -> dict[str, Any]:
        page = "http" + self.url[2:] if self.url.lower().startswith("ws") else self.url
        try:
            reply = httpx.get(f"{page}/schema", timeout=self.timeout)
            reply.raise_for_status()
            return reply.json()["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"openenv.env={self.url}: no OpenEnv server answers there ({describe_error(error)}); start it, or "
                "check the URL"
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
        except Exception as error:  # connection, protocol, or an error of the environment
            # A full server reports it and hangs up; which of the two is seen first is a matter of timing.
            if "CAPACITY_REACHED" in str(error) or (name == "reset" and "ConnectionClosed" in type(error).__name__):
                raise Failed("its server has no room for another episode (lower max_concurrent_envs)") from None
            raise Failed(f"{name}() failed ({describe_error(error)})") from None
