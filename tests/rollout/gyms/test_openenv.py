"""Episodes in OpenEnv environments: in this process with plain pydantic models, and on the real package's server."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import importlib.util
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pydantic
import pytest

from data.chat import render_conversation, render_prompt
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling, run_groups
from rollout.engines.local import LocalEngine
from rollout.episodes.endpoint import Endpoint
from rollout.gyms.openenv import (
    EnvironmentFailure,
    RemoteSession,
    environment_seed,
    find_environment,
    load_episode,
    opening,
)
from rollout.gyms.options import OpenEnvConfig
from rollout.servers.loop import Loop
from tests.rollout.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[3]
HERE = f"{Path(__file__).resolve()}:"
real = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="openenv-core is not installed: pip install -e '.[openenv]'"
)


class Guess(pydantic.BaseModel):
    message: str
    metadata: dict = {}


class Answer(pydantic.BaseModel):
    text: str
    done: bool = False
    reward: float | None = None
    metadata: dict = {}


class Count(pydantic.BaseModel):
    low: int
    high: int
    done: bool = False
    reward: float | None = None


class HigherLower:
    """Guess a number below ten. The answer is higher or lower; a wrong guess costs 0.1, the right guess pays 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    open = 0
    most = 0

    def __init__(self) -> None:
        type(self).open += 1
        type(self).most = max(type(self).most, type(self).open)

    def reset(self, seed: int | None = None, low: int = 0) -> Answer:
        self.number = seed % 10
        return Answer(text=f"a number from {low} to 9")

    def step(self, action: Guess) -> Answer:
        if action.message == "raise":
            raise RuntimeError("the board is broken")
        if action.message == "sleep":
            time.sleep(3)
        guess = int(action.message) if action.message.isdigit() else -1
        if guess == self.number:
            return Answer(text="yes", done=True, reward=1.0)
        return Answer(text="higher" if guess < self.number else "lower", reward=-0.1)

    def close(self) -> None:
        type(self).open -= 1


class Alone(HigherLower):
    SUPPORTS_CONCURRENT_SESSIONS = False


class Later(HigherLower):
    """HigherLower with its own async methods."""

    async def reset_async(self, seed: int | None = None, **settings: Any) -> Answer:
        await asyncio.sleep(0)
        return self.reset(seed)

    async def step_async(self, action: Guess) -> Answer:
        await asyncio.sleep(0)
        return self.step(action)


class Program(pydantic.BaseModel):
    code: str
    language: str = "python"
    path: str = "main"


class TwoTexts(HigherLower):
    """Two more text fields of the action are optional; observations are numbers."""

    def reset(self) -> Count:
        return Count(low=0, high=0)

    def step(self, action: Program) -> Count:
        return Count(low=len(action.code), high=len(action.language), done=len(action.code) > 1, reward=2.0)


class Needy(HigherLower):
    def step(self, action: Both) -> Answer: ...


class Both(pydantic.BaseModel):
    code: str
    language: str


class Untyped:
    def reset(self): ...

    def step(self, action): ...


class Digits:
    """Adapter: the first digit in the text is the guess."""

    def action(self, text: str) -> dict[str, Any]:
        digit = re.search("[0-9]", text)
        if digit is None:
            raise ValueError("say a digit")
        return {"message": digit[0]}

    def observation(self, observation: dict[str, Any]) -> str:
        return observation["text"].upper()


def saying(turns: list[str]) -> ScriptedEngine:
    """Return an engine that answers with these turns in order."""
    return ScriptedEngine(lambda so_far, seed: turns[so_far.count("<|im_start|>assistant") - 1])


class Served(ScriptedEngine):
    """A scripted engine that behaves like servers: every request runs separately, in the engine's loop."""

    concurrent = True

    def __init__(self, reply: Any) -> None:
        super().__init__(reply)
        self.loop, self.local = Loop(), self
        info = SimpleNamespace(model_len=512)
        self.pool = SimpleNamespace(members=[SimpleNamespace(server=SimpleNamespace(info=info))])

    async def complete(self, request: Request, sampling: Sampling) -> Completion:
        await asyncio.sleep(0.01)
        return self.generate([request], sampling)[0]


@pytest.fixture(scope="module")
def tiny():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "trainer" / "tiny"
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def loaded(name: str = "HigherLower") -> Any:
    """Return the class that ran; a class named by its file is loaded as a separate module."""
    return getattr(sys.modules[f"_user_file_{Path(__file__).resolve()}"], name)


def a_prompt(tokenizer: Any, seed: int | None = 7, **columns: Any) -> Prompt:
    messages = [{"role": "user", "content": "Guess."}]
    given = columns if seed is None else {"seed": seed, **columns}
    return Prompt(source="rows.jsonl:3", prompt=messages, ids=render_prompt(tokenizer, messages), columns=given)


def source_of(engine: Any, sampling: Sampling, cfg: OpenEnvConfig, tokenizer: Any) -> Any:
    source = load_episode(cfg, tokenizer).source(Endpoint(engine, tokenizer), sampling)
    close = source.close

    def close_both() -> None:
        close()
        source.loop.close()

    source.close = close_both
    return source


def play(tiny, turns: list[str], *, max_tokens: int = 200, prompt: Prompt | None = None, **settings: Any):
    _, tokenizer = tiny
    engine = saying(turns)
    cfg = OpenEnvConfig(**{"env": f"{HERE}HigherLower", **settings})
    source = source_of(engine, Sampling(max_tokens=max_tokens), cfg, tokenizer)
    try:
        ((completion,),) = run_groups(source, [[Request.of(prompt or a_prompt(tokenizer), 11)]])
    finally:
        source.close()
    return completion, engine


def test_an_episode_is_one_sequence_with_the_model_turns_in_the_mask(tiny):
    _, tokenizer = tiny
    completion, engine = play(tiny, ["3", "9", "7"])
    opened = [{"role": "user", "content": "Guess.\n\na number from 0 to 9"}]
    assert completion.prompt_ids == render_prompt(tokenizer, opened)
    whole = [
        *opened,
        {"role": "assistant", "content": "3"}, {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "9"}, {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "7"},
    ]  # fmt: skip
    ids, mask = render_conversation(tokenizer, whole)
    end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)  # the template puts a newline after the last turn
    assert completion.prompt_ids + completion.ids == ids[:end]
    assert [False] * len(completion.prompt_ids) + completion.mask == mask[:end]
    assert completion.logps == [-0.5 if flag else 0.0 for flag in completion.mask]
    assert completion.versions == [(3, 6)] and completion.trained == 6
    assert completion.finish_reason == "stop" and completion.text == "7"
    assert completion.messages == [*whole[1:], {"role": "user", "content": "yes"}]
    assert completion.columns["env_reward"] == pytest.approx(0.8)
    assert completion.columns["num_turns"] == 3 and completion.columns["env_done"] == 1.0
    assert len({batch[0].seed for batch in engine.batches}) == 3, "every turn has its own seed"
    assert loaded().open == 0


def test_the_last_reward_can_be_the_reward_of_the_episode(tiny):
    completion, _ = play(tiny, ["3", "7"], reward="last")
    assert completion.columns["env_reward"] == 1.0


def test_an_episode_with_too_many_turns_is_truncated(tiny):
    completion, engine = play(tiny, ["1", "2", "3"], max_turns=2)
    assert completion.finish_reason == "length" and completion.columns["env_done"] == 0.0
    assert completion.columns["env_reward"] == pytest.approx(-0.2)
    assert len(engine.batches) == 2
    assert completion.mask[-1], "an observation that no turn follows is not added"


def test_max_tokens_limits_all_turns_together(tiny):
    _, tokenizer = tiny
    full, _ = play(tiny, ["1", "2", "7"])
    for limit in range(1, len(full.ids) + 1):
        completion, _ = play(tiny, ["1", "2", "7"], max_tokens=limit)
        assert 1 <= len(completion.ids) <= limit
        assert completion.ids == full.ids[: len(completion.ids)]
        assert completion.mask is None or completion.mask[-1]
        assert (completion.finish_reason == "stop") == (limit == len(full.ids))


def test_a_truncated_action_is_not_taken(tiny):
    completion, _ = play(tiny, ["1"], max_tokens=1)
    assert completion.columns["env_reward"] == 0.0 and completion.columns["num_turns"] == 1


def test_the_model_gets_the_error_of_a_rejected_action(tiny):
    completion, _ = play(tiny, ["seven", "it is 7"], adapter=f"{HERE}Digits")
    assert [message["content"] for message in completion.messages] == ["seven", "say a digit", "it is 7", "YES"]
    assert completion.columns["env_refused"] == 1 and completion.columns["env_reward"] == 1.0
    _, tokenizer = tiny
    assert "A NUMBER FROM 0 TO 9" in tokenizer.decode(completion.prompt_ids)


@pytest.mark.parametrize(("turn", "reason"), [("raise", "RuntimeError: the board is broken"), ("sleep", "timeout=1 s")])
def test_a_failing_environment_stops_the_run_or_fails_its_episode(tiny, turn, reason):
    timeout = 1 if turn == "sleep" else 60
    with pytest.raises(ValueError, match=rf"HigherLower: step\(\) .*{reason}.*, at rows.jsonl:3"):
        play(tiny, [turn], timeout=timeout)
    completion, _ = play(tiny, [turn], timeout=timeout, on_error="none")
    assert completion.columns["env_reward"] is None and completion.columns["env_failed"] == 1.0
    assert completion.trained == 0 and len(completion.ids) == len(completion.mask) == len(completion.logps) == 1
    deadline = time.monotonic() + 30
    while loaded().open and time.monotonic() < deadline:
        time.sleep(0.05)  # a hanging environment is closed when its step ends
    assert loaded().open == 0


def test_async_methods_are_awaited(tiny):
    completion, _ = play(tiny, ["3", "7"], env=f"{HERE}Later")
    assert completion.columns["env_reward"] == pytest.approx(0.9)


def test_columns_of_the_row_reach_reset(tiny):
    _, tokenizer = tiny
    completion, _ = play(tiny, ["7"], prompt=a_prompt(tokenizer, low=3), reset_columns=("low",))
    assert "a number from 3 to 9" in tokenizer.decode(completion.prompt_ids)
    with pytest.raises(ValueError, match=r"reset_columns=height: .*seed, low"):
        play(tiny, ["7"], reset_columns=("height",))


def test_all_episodes_of_a_group_have_the_same_environment_seed(tiny):
    _, tokenizer = tiny
    unseeded = a_prompt(tokenizer, seed=None)
    assert environment_seed(a_prompt(tokenizer)) == 7
    assert environment_seed(unseeded) == environment_seed(unseeded) < 2**31
    other = Prompt(source="rows.jsonl:4", prompt=unseeded.prompt, ids=unseeded.ids, columns={})
    assert environment_seed(other) != environment_seed(unseeded)


def test_max_concurrent_envs_with_the_in_process_engine(tiny):
    model, tokenizer = tiny
    jobs = [[Request.of(a_prompt(tokenizer, seed=n), 10 * n + k) for k in range(2)] for n in range(2)]
    made = []
    for env, limit in (("HigherLower", 3), ("Alone", 1)):
        cfg = OpenEnvConfig(env=f"{HERE}{env}", max_concurrent_envs=limit, max_turns=2)
        sampling = Sampling(max_tokens=24, stop_ids=(2,))
        source = source_of(LocalEngine(model, tokenizer), sampling, cfg, tokenizer)
        loaded(env).open = loaded(env).most = 0
        groups = run_groups(source, jobs)
        source.close()
        assert loaded(env).most == limit and loaded(env).open == 0
        made.append([[completion.ids for completion in group] for group in groups])
    assert made[0] == made[1], "concurrent episodes do not affect each other"
    assert [len(group) for group in made[0]] == [2, 2]


def test_max_concurrent_envs_with_servers(tiny):
    _, tokenizer = tiny
    limit = 3
    engine = Served(lambda so_far, seed: ["3", "9", "7"][so_far.count("<|im_start|>assistant") - 1])
    cfg = OpenEnvConfig(env=f"{HERE}HigherLower", max_concurrent_envs=limit)
    source = source_of(engine, Sampling(max_tokens=200), cfg, tokenizer)
    loaded().open = loaded().most = 0
    try:
        groups = run_groups(
            source, [[Request.of(a_prompt(tokenizer), n), Request.of(a_prompt(tokenizer), n + 9)] for n in range(4)]
        )
    finally:
        source.close()
        engine.loop.close()
    assert [[c.columns["env_reward"] for c in group] for group in groups] == [[pytest.approx(0.8)] * 2] * 4
    assert loaded().most == limit and loaded().open == 0


def test_load_episode_rejects(tiny):
    with pytest.raises(ValueError, match="rows.jsonl:9: the prompt is plain text"):
        opening(Prompt(source="rows.jsonl:9", prompt="Guess.", ids=[1], columns={}), "a number")
    for settings, message in [
        ({"env": f"{HERE}Alone", "max_concurrent_envs": 2}, "openenv.max_concurrent_envs=2"),
        ({"env": f"{HERE}Untyped"}, r"Untyped: step\(\)"),
        ({"env": f"{HERE}ROOT"}, "ROOT: not a class"),
        ({"env": f"{HERE}Missing"}, "'Missing'"),
        ({"env": "HigherLower"}, "openenv.env=HigherLower: "),
        ({"env": f"{HERE}HigherLower", "action_field": "move"}, "openenv.action_field=move: .*message"),
        ({"env": f"{HERE}Needy"}, "Needy: .*code, language; .*--openenv.action-field"),
        ({"env": f"{HERE}HigherLower", "adapter": f"{HERE}Untyped"}, "no method action"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_episode(OpenEnvConfig(**settings), tiny[1])


def test_openenv_config_rejects():
    for settings, message in [
        ({"max_turns": 3}, "openenv.max_turns=3: has no effect"),
        ({"env": "m.E", "max_turns": 0}, "openenv.max_turns=0"),
        ({"env": "m.E", "timeout": 0.0}, "openenv.timeout=0.0"),
        ({"env": "m.E", "adapter": "m.A", "action_field": "x"}, "openenv.action_field, .*openenv.adapter=m.A"),
        ({"env": "m.E", "reset_columns": ("seed",)}, "openenv.reset_columns=seed"),
        ({"env": ""}, "openenv.env, "),
    ]:
        with pytest.raises(ValueError, match=message):
            OpenEnvConfig(**settings)


def test_an_observation_of_several_fields_is_shown_as_json(tiny):
    completion, _ = play(tiny, ["1", "12"], env=f"{HERE}TwoTexts")
    assert [m["content"] for m in completion.messages] == ["1", '{"low": 1, "high": 6}', "12", '{"low": 2, "high": 6}']
    named, _ = play(tiny, ["1", "12"], env=f"{HERE}TwoTexts", action_field="code", observation_field="high")
    assert [m["content"] for m in named.messages] == ["1", "6", "12", "6"]
    with pytest.raises(ValueError, match=r"without .width. \(has: low, high\), at rows.jsonl:3"):
        play(tiny, ["1"], env=f"{HERE}TwoTexts", observation_field="width")
    with pytest.raises(ValueError, match="rejects the action .*code Field required"):
        play(tiny, ["1"], env=f"{HERE}TwoTexts", action_field="language")


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    message: str

class Answer(Observation):
    text: str

class HigherLower(Environment[Guess, Answer, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.number, self.taken = None, 0
    def reset(self, seed=None, episode_id=None, **kwargs) -> Answer:
        self.number, self.taken = seed % 10, 0
        return Answer(text="a number from 0 to 9")
    def step(self, action: Guess, timeout_s=None, **kwargs) -> Answer:
        if action.message == "raise":
            raise RuntimeError("the board is broken")
        self.taken += 1
        guess = int(action.message) if action.message.isdigit() else -1
        if guess == self.number:
            return Answer(text=f"yes, after {self.taken}", done=True, reward=1.0)
        return Answer(text="higher" if guess < self.number else "lower", reward=-0.1)
    @property
    def state(self) -> State:
        return State(step_count=self.taken)

if __name__ == "__main__":
    app = create_fastapi_app(HigherLower, Guess, Answer, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory, free_port):
    """The package's own server, on loopback, with room for two episodes."""
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    process = subprocess.Popen([sys.executable, str(file), str(free_port), "2"], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{free_port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/health", timeout=1).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)
        yield url, file
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "reply",
    [b"<html>", b"{}", b'{"action": []}', b'{"action": {"properties": []}}', b'{"action": {"properties": {"a": 1}}}',
     b'{"action": {"required": 5}}', b'{"action": {"required": [{}]}}', b"[" * 100_000, b" " * 5000],
    ids=["html", "empty", "list", "properties", "field", "required", "names", "deep", "endless"],
)  # fmt: skip
def test_a_server_with_an_invalid_schema_is_rejected(reply, monkeypatch):
    monkeypatch.setattr("rollout.gyms.openenv.MAX_SCHEMA", 4096 if reply[:1] == b" " else 2**20)
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", SimpleNamespace(GenericEnvClient=None))
    with answering(reply) as url, pytest.raises(ValueError, match=f"openenv.env={url}: no OpenEnv server"):
        find_environment(url, timeout=5)


@contextlib.contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A server that answers every GET with these bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


BAD_STEPS = [
    ({"reward": float("nan")}, "reward=nan"),
    ({"reward": "1.0"}, "reward='1.0'"),
    ({"reward": 10**400}, "reward=1000"),
    ({"reward": [1.0]}, r"reward=\[1.0\]"),
    ({"done": "false"}, "done='false'"),
    ({"observation": "text"}, "observation='text'"),
    ({"observation": None}, "observation=None"),
]


def test_invalid_replies_of_a_server_fail_the_episode():
    def step(**fields: Any) -> Any:
        async def reply(action: Any) -> Any:
            return SimpleNamespace(**({"observation": {"text": "a"}, "reward": 1, "done": False} | fields))

        return asyncio.run(RemoteSession(SimpleNamespace(step=reply), 5.0).step({}))

    async def break_off() -> None:
        raise ConnectionError("the server is gone")

    asyncio.run(RemoteSession(SimpleNamespace(close=break_off), 5.0).close())
    assert step(done=None, reward=True) == ({"text": "a"}, 1.0, False)
    for fields, message in BAD_STEPS:
        with pytest.raises(EnvironmentFailure, match=message):
            step(**fields)


@real
def test_a_websocket_episode_equals_the_in_process_episode(tiny, server):
    url, file = server
    remote, _ = play(tiny, ["3", "9", "7"], env=url)
    here, _ = play(tiny, ["3", "9", "7"], env=f"{file}:HigherLower")
    assert remote == here
    assert remote.columns["env_reward"] == pytest.approx(0.8)
    assert remote.messages[-1]["content"] == "yes, after 3", "the server kept the episode over its steps"


@real
def test_a_server_runs_episodes_concurrently_up_to_its_capacity(tiny, server):
    model, tokenizer = tiny
    url, _ = server
    jobs = [[Request.of(a_prompt(tokenizer, seed=n), 10 * n + k) for k in range(2)] for n in range(3)]
    sampling = Sampling(max_tokens=40, stop_ids=(2,))

    def source(limit: int) -> Any:
        cfg = OpenEnvConfig(env=url, max_concurrent_envs=limit, max_turns=3)
        return source_of(LocalEngine(model, tokenizer), sampling, cfg, tokenizer)

    one, two = ([[c.ids for c in group] for group in run_groups(source(limit), jobs)] for limit in (1, 2))
    assert one == two
    with pytest.raises(ValueError, match="the server is full"):
        run_groups(source(6), jobs)


@real
def test_an_error_on_the_server_is_reported(tiny, server):
    with pytest.raises(ValueError, match=r"step\(\) failed \(RuntimeError: Server error: the board is broken"):
        play(tiny, ["raise"], env=server[0])


@real
def test_an_address_without_a_server_is_rejected(free_port):
    with pytest.raises(ValueError, match="openenv.env=.*no OpenEnv server"):
        find_environment("http://127.0.0.1:9", timeout=2)


def test_a_session_in_this_process_returns_plain_dicts():
    async def go():
        session = find_environment(f"{HERE}HigherLower", timeout=5).open()
        first = await session.reset(seed=4, unknown=1)
        second = await session.step({"message": "4"})
        with pytest.raises(EnvironmentFailure, match="rejects the action"):
            await session.step({"text": "4"})
        await session.close()
        return first, second

    first, second = asyncio.run(go())
    assert first == ({"text": "a number from 0 to 9"}, None, False)
    assert second == ({"text": "yes"}, 1.0, True)


def test_prompt_settings_apply_to_all_turns(tiny):
    model, tokenizer = tiny
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (style or '') }}{% endif %}"
    )
    engine = saying(["3", "7"])
    engine.tokenizer = tokenizer
    cfg = OpenEnvConfig(env=f"{HERE}HigherLower")
    source = source_of(engine, Sampling(max_tokens=200), cfg, tokenizer)
    prompt = dataclasses.replace(a_prompt(tokenizer), settings={"style": "!"})
    ((completion,),) = run_groups(source, [[Request.of(prompt, 11)]])
    source.close()
    assert tokenizer.decode(completion.prompt_ids).endswith("<|im_start|>assistant\n!")
    assert tokenizer.decode(completion.ids) == (
        "3<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n!7<|im_end|>"
    )
