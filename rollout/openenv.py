"""Episodes in an OpenEnv environment: the model's turns are its actions, what it observes are the turns between.

    episode = load_episode(cfg.openenv, tokenizer)                  # OpenEnvEpisode: async (client, prompt, seed)
    source = OpenEnvSource(engine, sampling, episode)               # a Source, over either engine
    -> Completion(ids=[its turns and the observations], mask=[True for its own], columns={"env_reward": 1.0, ...})

The first observation stands at the end of the prompt, in the user's turn. All episodes of a group begin with the same
reset(seed=...): the row's column `seed`, or a number made from where the row came from. An action that the adapter
refuses (ValueError) is answered by its sentence and costs a turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from data.chat import render_prompt
from data.types import Messages, Prompt
from data.user_code import told
from rollout.engine import Completion, Sampling
from rollout.episodes.episode import Client, EpisodeSource
from rollout.episodes.turns import Continuation, Transcript, turn_seed
from rollout.openenv_options import OpenEnvConfig
from rollout.openenv_sessions import Failed, Opener, Session, Step, find_environment, load_class
from rollout.schedule.source import Job, finished


class Adapter(Protocol):
    """Between the model's text and the environment's objects."""

    def action(self, text: str) -> dict[str, Any]:
        """The action that a turn of the model means; a ValueError is told to the model."""

    def observation(self, observation: dict[str, Any]) -> str:
        """What the model is shown."""


class TextAdapter:
    """For environments that take and give one text."""

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


def load_episode(cfg: OpenEnvConfig, tokenizer: Any) -> OpenEnvEpisode:
    """Find the environment, how to talk to it, and refuse what cannot work before anything is sampled."""
    assert cfg.env is not None, cfg
    opener = find_environment(cfg.env, cfg.timeout)
    if cfg.max_concurrent_envs > 1 and opener.concurrent is False:
        raise ValueError(
            f"openenv.max_concurrent_envs={cfg.max_concurrent_envs}: {cfg.env} does not say that its episodes are kept "
            "apart; set SUPPORTS_CONCURRENT_SESSIONS = True in the class if they are, or leave it at 1"
        )
    opener.check_reset(cfg.reset_columns)
    return OpenEnvEpisode(cfg, opener, _adapter(cfg, opener), Continuation(tokenizer, role="user"))


def _adapter(cfg: OpenEnvConfig, opener: Opener) -> Adapter:
    if cfg.adapter is not None:
        adapter = load_class(cfg.adapter, f"openenv.adapter={cfg.adapter}")
        adapter = adapter() if isinstance(adapter, type) else adapter
        for name in ("action", "observation"):
            if not callable(getattr(adapter, name, None)):
                raise ValueError(f"openenv.adapter={cfg.adapter}: has no method {name}; give it action and observation")
        return adapter
    return TextAdapter(_text_field(cfg, opener.action_schema), cfg.observation_field)


def _text_field(cfg: OpenEnvConfig, schema: dict[str, Any]) -> str:
    """The field named, or the only text among those an action needs, or else among all it has."""
    known = {name: facts for name, facts in schema.get("properties", {}).items() if name != "metadata"}
    if cfg.action_field is not None:
        if cfg.action_field not in known:
            raise ValueError(
                f"openenv.action_field={cfg.action_field}: an action of {cfg.env} has no such field; it has "
                f"{', '.join(known) or 'none'}"
            )
        return cfg.action_field
    required = [name for name in schema.get("required", []) if name in known]
    texts = [name for name, facts in known.items() if facts.get("type") == "string"]
    for names in ([name for name in texts if name in required], texts):
        if len(names) == 1 and set(required) <= set(names):
            return names[0]
    raise ValueError(
        f"openenv.env={cfg.env}: an action has the fields {', '.join(known) or 'none'}, of which not one alone takes "
        "text; name it with --openenv.action-field, or write an --openenv.adapter"
    )


class OpenEnvEpisode:
    """Plays one episode for a client; any number of them at a time, up to what the environment bears."""

    def __init__(self, cfg: OpenEnvConfig, opener: Opener, adapter: Adapter, continuation: Continuation) -> None:
        self.cfg, self.opener, self.adapter, self.continuation = cfg, opener, adapter, continuation
        self.limit = cfg.max_concurrent_envs
        self._slots: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()  # one per event loop

    async def __call__(self, client: Client, prompt: Prompt, seed: int) -> Completion:
        loop = asyncio.get_running_loop()
        async with self._slots.setdefault(loop, asyncio.Semaphore(self.limit)):
            transcript = Transcript(prompt.ids)
            try:
                session = self.opener.open()
                try:
                    return await self._play(session, client, prompt, seed)
                finally:
                    await session.close()
            except Failed as error:
                if self.cfg.on_error == "none":
                    # One token that nobody trains on: a completion needs one.
                    transcript.insert([self.continuation.end_id])
                    columns = {"env_reward": None, "num_turns": 0, "env_failed": 1.0}
                    return transcript.completion("stop", text="", messages=[], columns=columns)
                raise ValueError(
                    f"openenv.env={self.cfg.env}: {error}, at {prompt.source}; fix it, or set --openenv.on-error none"
                ) from None

    async def _play(self, session: Session, client: Client, prompt: Prompt, seed: int) -> Completion:
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
            played.said(text)
            if made.finish_reason == "length":
                break  # an action that was cut off is none
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
            raise Failed(f"observation() of the adapter raised {told(error)}") from None

    async def _act(self, session: Session, text: str, played: Played) -> str:
        """Take the action, and return what the model is shown of it."""
        try:
            action = self.adapter.action(text)
        except Exception as error:  # whatever the model wrote, it is told what was wrong with it
            reason = str(error) if isinstance(error, ValueError) else told(error)
            played.refused(reason)
            return reason
        step = await session.step(action)
        shown = self._shown(step)
        played.stepped(step, shown)
        return shown


class Played:
    """What happened in an episode, for rewards and metrics."""

    def __init__(self, reward: str) -> None:
        self.reward = reward
        self.messages: Messages = []
        self.rewards: list[float] = []
        self.num_refused = 0
        self.done = False

    def said(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def stepped(self, step: Step, shown: str) -> None:
        self.done = step.done
        if step.reward is not None:
            self.rewards.append(step.reward)
        self.messages.append({"role": "user", "content": shown})

    def refused(self, reason: str) -> None:
        self.num_refused += 1
        self.messages.append({"role": "user", "content": reason})

    def columns(self) -> dict[str, Any]:
        total = self.rewards[-1] if self.reward == "last" and self.rewards else sum(self.rewards)
        return {
            "env_reward": float(total),  # 0 where nothing was paid: an episode that ran out has not earned it
            "num_turns": sum(message["role"] == "assistant" for message in self.messages),
            "env_done": float(self.done),
            "env_refused": self.num_refused,
            "env_failed": 0.0,
        }


def environment_seed(prompt: Prompt) -> int:
    """The row's own, else one made from its source: the same for all episodes of a group, and in every run."""
    given = prompt.columns.get("seed")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    return int.from_bytes(hashlib.blake2b(prompt.source.encode(), digest_size=4).digest(), "big") >> 1


def opening(prompt: Prompt, observation: str) -> Messages:
    """The prompt's messages with the first observation at the end of the last one."""
    if isinstance(prompt.prompt, str):
        raise ValueError(
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
    """Source of episodes in an environment; over the engine in this process never more at a time than it bears.

    There all episodes wait for each other before each sampling, so one that waited for its turn to begin would stop
    the others: they are started in portions instead.
    """

    def __init__(self, engine: Any, sampling: Sampling, episode: OpenEnvEpisode) -> None:
        self.episode = episode
        self._inner = EpisodeSource(engine, sampling, episode)
        self._in_portions = not engine.concurrent

    def start(self, groups: Sequence[Sequence[Job]]) -> list[Future[list[Completion]]]:
        if not self._in_portions:
            return self._inner.start(groups)
        jobs = [job for group in groups for job in group]
        made: list[Completion] = []
        for begin in range(0, len(jobs), self.episode.limit):
            portion = jobs[begin : begin + self.episode.limit]
            made += [future.result()[0] for future in self._inner.start([[job] for job in portion])]
        completions = iter(made)
        return [finished([next(completions) for _ in group]) for group in groups]

    def close(self) -> None:
        self._inner.close()
