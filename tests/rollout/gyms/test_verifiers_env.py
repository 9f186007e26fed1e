"""verifiers environments: recorded requests of its training client, episodes, and rejected settings.

The tests in the last part run the real package with a scripted engine; they are skipped if it is not installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollout.engine import Completion, Request, Sampling, run_groups
from rollout.episodes.endpoint import Endpoint
from rollout.gyms import verifiers_env
from rollout.gyms.gym_source import EpisodeError, UnusableError
from rollout.gyms.verifiers_env import (
    OUT_OF_TOKENS,
    VerifiersEnv,
    import_verifiers,
    message_of,
    opening,
    read_episode,
)
from rollout.gyms.verifiers_options import VerifiersConfig
from rollout.servers.loop import Loop
from tests.rollout.scripted_engine import TINY, ScriptedEngine, tiny_tokenizer
from trainer import cli
from trainer.config.groups import servers_asked

TOY = Path(__file__).with_name("toy_verifiers.py")
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed: pip install -e '.[verifiers]'"
)
SAMPLING = Sampling(max_tokens=40, stop_ids=(2,), for_training=True)
# Two requests of verifiers 0.4.0 (TrainClient, renderers 0.1.12), recorded: "0+1=", and after "0" the next "0+2=".
PROMPT = [1, 261, 201, 18, 13, 19, 31, 2, 201, 1, 269, 201]
BETWEEN = [201, 1, 261, 201, 18, 13, 20, 31, 2, 201, 1, 269, 201]
RECORDED = [
    {"model": "policy", "token_ids": ids,
     "sampling_params": {"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}}
    for ids in (PROMPT, [*PROMPT, 18, 2, *BETWEEN])
]  # fmt: skip


# flags -----------------------------------------------------------------------------------------------------------


def parse(*argv: str, method: str = "grpo") -> Any:
    flags = ["--method", method, "--model", "m", "--reward-funcs", "env", "--verifiers.env", "toy", *argv]
    return cli.parse(flags)[1]


def test_flags_yaml_and_the_required_engine(tmp_path):
    cfg = parse("--verifiers.args", '{"agent": {"max_turns": 4}}', "--verifiers.rows", "5", "--val-set-size", "2")
    assert cfg.verifiers.args == {"agent": {"max_turns": 4}} and cfg.verifiers.rows == 5
    assert cfg.rollout.engine == "auto" and servers_asked(cfg) is None
    path = tmp_path / "run.yaml"
    path.write_text("method: grpo\nmodel: m\nreward_funcs: [env]\nverifiers: {env: toy, args: {taskset: {rows: 3}}}\n")
    assert cli.parse(["--config", str(path)])[1].verifiers.args == {"taskset": {"rows": 3}}


TEACHER = ("--teacher", "t")


@pytest.mark.parametrize(
    ("method", "argv", "message"),
    [
        ("grpo", ("--data", "rows.jsonl"), "verifiers.env=toy: "),
        ("grpo", ("--tools", "calculator"), "tools, verifiers.env: "),
        ("grpo", ("--system-prompt", "be"), "system_prompt=be: verifiers.env=toy"),
        ("grpo", ("--chat-template", "chatml"), "chat_template=chatml: verifiers.env=toy"),
        ("grpo", ("--verifiers.timeout", "0"), "verifiers.timeout=0.0"),
        ("grpo", ("--verifiers.rows", "0"), "verifiers.rows=0"),
        ("grpo", ("--verifiers.max-concurrent", "0"), "verifiers.max_concurrent=0"),
        ("opd", (*TEACHER, "--teacher-prompt", "hints.short", "--num-generations", "4"), "teacher_prompt=hints.short"),
        (
            "opd",
            (*TEACHER, "--student-data-fraction", "0.5", "--jsd-beta", "0.5", "--reward-coef", "0"),
            "student_data",
        ),
        *((method, ("--data", "d"), "--verifiers.env") for method in ("sft", "dpo", "ebft")),
    ],
)
def test_settings_that_cannot_work_are_rejected(method, argv, message, capsys):
    with pytest.raises((ValueError, SystemExit)) as caught:
        parse(*argv, method=method)
    assert message in f"{caught.value}{capsys.readouterr().err}"


def test_verifiers_config_rejects():
    for settings, message in [
        ({"rows": 3}, "verifiers.rows=3: has no effect"),
        ({"args": {"a": 1}}, "verifiers.args={'a': 1}: has no effect"),
        ({"env": ""}, "verifiers.env=''"),
    ]:
        with pytest.raises(ValueError, match=message):
            VerifiersConfig(**settings)


def test_a_missing_package_and_a_wrong_version_are_reported(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match="verifiers.env=x: .*pip install -e"):
        import_verifiers("x")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.14")
    old = ModuleType("verifiers")
    old.__path__ = []
    monkeypatch.setitem(sys.modules, "verifiers", old)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(ValueError, match=r"verifiers 0.1.14 has no verifiers.v1; pip install"):
        import_verifiers("x")
    other = ModuleType("verifiers.v1")
    other.Env = type("Env", (), {"serving": 1, "slots": 1})
    monkeypatch.setitem(sys.modules, "verifiers.v1", other)
    old.v1 = other
    with pytest.raises(ValueError, match=r"verifiers 0.1.14 has no Env.run_slot, EnvConfig.agent_harnesses, .*0.4"):
        import_verifiers("x")


# requests for tokens ---------------------------------------------------------------------------------------------


class Trace(SimpleNamespace):
    """The parts of a Trace that strop uses."""

    def __init__(self, **fields: Any) -> None:
        agent = SimpleNamespace(name=fields.pop("name", "agent"), trainable=fields.pop("trainable", True))
        defaults = {"id": "t", "agent": agent, "reward": 1.5, "rewards": {}, "errors": [], "branches": [],
                    "is_truncated": False, "stopped": None}  # fmt: skip
        super().__init__(**(defaults | fields))

    def stop(self, condition: str) -> None:
        self.stopped = condition


class Talk:
    """A session of an endpoint that answers `reply`; `asked` collects (request, sampling)."""

    def __init__(self, reply: Any = "0", *, trace: Trace | None = None, context: int = 256, **sampling: Any) -> None:
        self.trace, self.asked, engine = trace or Trace(), [], ScriptedEngine(lambda text, seed: reply, context)

        async def ask(request: Request, sampling: Sampling) -> Completion:
            self.asked.append((request, sampling))
            if isinstance(reply, Exception):
                raise reply
            return engine._one(request, sampling)

        settings = {"max_tokens": 40, "stop_ids": (0,), "for_training": True, **sampling}
        self.endpoint, self.sampling = Endpoint(engine, engine.tokenizer), Sampling(**settings)
        self.endpoint.model.ask = ask

    def answer(self, *bodies: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        with self.endpoint.session(self.sampling, seed=7, number=self.trace.id) as (self.session, _):
            self.session.on_full = lambda: self.trace.stop(OUT_OF_TOKENS)
            path, headers = f"/{self.endpoint.token}/inference/v1/generate", {"x-session-id": self.trace.id}
            work = [self.endpoint._answer("POST", path, headers, json.dumps(body).encode()) for body in bodies]
            replies = [self.endpoint.loop.run(one) for one in work]
        self.endpoint.close()
        return [(status, json.loads(body)) for status, body, _ in replies]


def read_one(talk: Talk) -> Completion:
    sessions = {talk.trace.id: talk.session}
    return read_episode(episode_of(talk.trace), sessions, VerifiersConfig(env="x"), prompt_ids=[9])


def test_recorded_requests_get_the_engine_tokens_and_become_one_sequence():
    talk = Talk()
    (status, reply), _ = talk.answer(*RECORDED)
    (choice,) = reply["choices"]
    assert status == 200 and choice["token_ids"] == [18, 2] and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": []} for token in (18, 2)
    ]
    (first, sampling), (second, _) = talk.asked
    assert first.prompt_ids == PROMPT and first.seed == 7 and second.seed != 7
    assert sampling.stop_ids == (0, 2)  # the run's and the renderer's
    assert first.max_tokens == 40 and second.max_tokens == 40 - 2 - len(BETWEEN)
    completion = read_one(talk)
    assert completion.prompt_ids == PROMPT and completion.ids == [18, 2, *BETWEEN, 18, 2]
    assert completion.mask == [True, True, *[False] * len(BETWEEN), True, True]
    assert completion.logps == [-0.5, -0.5, *[0.0] * len(BETWEEN), -0.5, -0.5]
    assert completion.versions == [(3, 4)] and completion.finish_reason == "stop"
    assert completion.columns["env_reward"] == 1.5 and completion.columns["num_turns"] == 2


def test_a_request_may_lower_the_limit_and_a_retry_is_a_branch():
    talk = Talk("12345")
    truncated = RECORDED[0] | {"sampling_params": {"max_tokens": 3, "temperature": 0.1}}
    talk.answer(truncated, truncated)
    assert [request.max_tokens for request, _ in talk.asked] == [3, 3] and talk.session.truncated
    assert {sampling.temperature for _, sampling in talk.asked} == {1.0}
    assert len(read_one(talk).branches) == 1


def test_an_episode_without_tokens_left_is_stopped_and_scored():
    for limits in ({"max_tokens": 15}, {"context": len(PROMPT) + 15}):
        talk = Talk(**limits)
        (_, (status, reply)) = talk.answer(*RECORDED)
        assert status == 400 and OUT_OF_TOKENS in reply["error"]["message"]
        assert talk.trace.stopped == OUT_OF_TOKENS
        completion = read_one(talk)
        assert completion.ids == [18, 2] and completion.finish_reason == "length"


def test_a_request_that_is_not_one_is_rejected():
    changes = [
        {"token_ids": None}, {"token_ids": []}, {"token_ids": "12"}, {"token_ids": [1.5]}, {"token_ids": [-1]},
        {"sampling_params": {"max_tokens": "9"}}, {"sampling_params": {"stop_token_ids": 5}},
        {"sampling_params": {"stop_token_ids": [None]}},
    ]  # fmt: skip
    talk = Talk()
    for status, reply in talk.answer(*(RECORDED[0] | change for change in changes)):
        assert status == 400 and reply["error"]["message"]
    assert not talk.asked and talk.session.error is None


def test_a_server_error_and_an_image_stop_the_run():
    talk = Talk(ValueError("vllm: no server is left"))
    with pytest.raises(UnusableError, match="vllm: no server is left"):
        talk.answer(RECORDED[0])
    assert not talk.session.turns
    talk = Talk()
    with pytest.raises(UnusableError, match="images are not supported"):
        talk.answer(RECORDED[0] | {"features": {"mm_hashes": {}}})
    assert not talk.asked


# episodes --------------------------------------------------------------------------------------------------------


def episode_of(*traces: Trace, ok: bool = True, errors: Any = ()) -> Any:
    return SimpleNamespace(ok=ok, errors=list(errors), traces=list(traces))


def node(message: Any, sampled: bool = False) -> Any:
    return SimpleNamespace(message=SimpleNamespace(**message), sampled=sampled)


def read(*traces: Trace, agent: str | None = None, **settings: Any) -> Completion:
    talks = {trace.id: Talk(trace=trace) for trace in traces}
    for talk in talks.values():
        talk.answer(RECORDED[0])
    sessions = {name: talk.session for name, talk in talks.items()}
    cfg = VerifiersConfig(env="x", agent=agent)
    return read_episode(episode_of(*traces, **settings), sessions, cfg, prompt_ids=[9])


def test_messages_start_with_the_first_model_turn():
    call = SimpleNamespace(id="a", name="get", arguments='{"x": 1}')
    part = SimpleNamespace(type="text", text="cold")
    nodes = [
        node({"role": "user", "content": "q"}),
        node({"role": "assistant", "content": None, "tool_calls": [call]}, sampled=True),
        node({"role": "tool", "content": [part], "tool_call_id": "a"}),
        node({"role": "assistant", "content": "It is cold.", "tool_calls": None}, sampled=True),
    ]
    rewards = {"right": SimpleNamespace(score=3.0), "unscored": None}
    completion = read(Trace(branches=[SimpleNamespace(nodes=nodes)], rewards=rewards))
    function = {"name": "get", "arguments": '{"x": 1}'}
    assert completion.messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": "cold", "tool_call_id": "a"},
        {"role": "assistant", "content": "It is cold."},
    ]
    assert completion.text == "It is cold." and completion.columns["tool_calls"] == 1
    assert completion.columns["reward_components"] == {"right": 3.0}


def test_exactly_one_agent_is_trained():
    helper = Trace(id="u", name="user", trainable=False, reward=9.0)
    assert read(Trace(name="solver"), helper).columns["env_reward"] == 1.5
    two = (Trace(name="solver"), Trace(id="u", name="critic", reward=2.5))
    assert read(*two, agent="critic").columns["env_reward"] == 2.5
    for agent, count in [(None, 2), ("judge", 0)]:
        with pytest.raises(UnusableError, match=rf"verifiers.agent={agent}: .*{count} conversations .*critic, solver"):
            read(*two, agent=agent)


def test_a_failed_episode_reports_the_reason():
    error = SimpleNamespace(type="HarnessError", message="exit 1:\nno  such file")
    with pytest.raises(EpisodeError, match="HarnessError: exit 1: no such file") as caught:
        read(Trace(errors=[error]), ok=False)
    assert caught.value.kind == "HarnessError"
    with pytest.raises(EpisodeError, match="failed: no reason given"):
        read(ok=False)
    for reward, shown in [(float("nan"), "nan"), (None, "None"), ("1", "'1'"), (10**400, "1000"), (1e300, r"1e\+300")]:
        with pytest.raises(ValueError, match=f"reward={shown}"):
            read(Trace(reward=reward))


def test_a_row_starts_with_the_messages_that_the_model_sees():
    row = SimpleNamespace(system_prompt="be", prompt="2+2=", description=None, name="sums")
    assert opening(row) == [{"role": "system", "content": "be"}, {"role": "user", "content": "2+2="}]
    row.prompt = None  # the environment opens the conversation
    assert opening(row)[-1] == {"role": "user", "content": "sums"}
    picture = SimpleNamespace(role="user", content=[SimpleNamespace(type="image_url")])
    with pytest.raises(ValueError, match="images are not supported"):
        message_of(picture)


# the real package ------------------------------------------------------------------------------------------------


class Engine:
    """A scripted engine with the interface of an engine with servers."""

    concurrent = True

    def __init__(self, reply: Any) -> None:
        self.loop, self.scripted = Loop(), ScriptedEngine(reply)
        self.local = self.scripted
        info = SimpleNamespace(model_len=256)
        self.pool = SimpleNamespace(members=[SimpleNamespace(server=SimpleNamespace(info=info))])

    async def complete(self, request: Request, sampling: Sampling) -> Completion:
        return self.scripted._one(request, sampling)


@pytest.fixture
def engine() -> Iterator[Engine]:
    completion = Engine(lambda text, seed: f"{seed % 10}")
    yield completion
    completion.loop.close()


def load(args: dict[str, Any] | None = None, env: str = str(TOY), **settings: Any) -> VerifiersEnv:
    lines: list[str] = []
    completion = VerifiersEnv(VerifiersConfig(env=env, args=args or {}, **settings), model=str(TINY), log=lines.append)
    completion.lines = lines
    return completion


def run(env: VerifiersEnv, engine: Engine, copies: int = 2, sampling: Sampling = SAMPLING) -> list[list[Completion]]:
    prompts = env.prompts(tiny_tokenizer())
    env.open()
    endpoint = Endpoint(engine, tiny_tokenizer())
    endpoint.open()
    try:
        source = env.source(endpoint, sampling)
        groups = [[Request.of(prompt, 10 * i + c) for c in range(copies)] for i, prompt in enumerate(prompts)]
        return run_groups(source, groups)
    finally:
        env.close()
        env.close()
        endpoint.close()


@needs_package
def test_a_toy_environment_plays_its_rows_in_two_turns(engine):
    env = load(rows=3)
    prompts = env.prompts(tiny_tokenizer())
    assert [prompt.columns for prompt in prompts] == [{"start": i, "rounds": 2, "verifiers_index": i} for i in range(3)]
    groups = run(env, engine)
    assert [len(group) for group in groups] == [2, 2, 2]
    for prompt, group in zip(prompts, groups, strict=True):
        for number, completion in enumerate(group):
            first, second = (tiny_tokenizer().decode(part) for part in sampled_parts(completion))
            assert completion.prompt_ids == prompt.ids  # as the package renders it: the same template
            assert first == f"{number}<|im_end|>"
            assert completion.versions == [(3, 4)] and completion.finish_reason == "stop"
            assert [m["role"] for m in completion.messages] == ["assistant", "user", "assistant"]
            odd = sum(text[0] in "13579" for text in (first, second)) / 2
            assert completion.columns["reward_components"] == {"odd": odd, "rounds": 2.0}
            assert completion.columns["env_reward"] == odd + 0.5 * 2
            assert completion.columns["branches"] == 0
    assert "--verifiers.renderer" in env.lines[0]


def sampled_parts(completion: Completion) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token, own in zip(completion.ids, completion.mask, strict=True):
        if own:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


@needs_package
@pytest.mark.parametrize("rule", ["branch", "drop", "stop"])
def test_prefix_mismatch_decides_about_a_prompt_that_does_not_continue(engine, rule):
    env = load({"agent": {"harness": {"id": "toy_verifiers", "rewrites": True}}}, rows=1, prefix_mismatch=rule)
    if rule == "stop":
        with pytest.raises(ValueError, match="verifiers.prefix_mismatch=stop: .*toy_verifiers.py:0: "):
            run(env, engine)
        return
    ((completion, _),) = run(env, engine)
    if rule == "branch":
        assert completion.columns["branches"] == 1 and completion.trained == completion.branches[0].trained == 2
        assert "hm<|im_end|>" in tiny_tokenizer().decode(completion.prompt_ids)
    else:
        assert completion.columns["env_failed"] == 1.0 and completion.trained == 0
        assert sum("do not continue" in line for line in env.lines) == 1


@needs_package
def test_failed_episodes_are_not_trained_and_too_many_stop_the_run(engine, monkeypatch):
    broken = {"agent": {"harness": {"id": "toy_verifiers", "fails": True}}}
    env = load(broken, rows=2)
    completion = [one for group in run(env, engine) for one in group]
    assert {one.columns["env_failed"] for one in completion} == {1.0} and {one.trained for one in completion} == {0}
    assert {one.columns["env_reward"] for one in completion} == {None}
    assert sum("the toy is broken" in line for line in env.lines) == 1
    monkeypatch.setattr("rollout.gyms.gym_source.MAX_FAILURES", 3)
    with pytest.raises(ValueError, match=r"verifiers: \d consecutive episodes failed, .*toy is broken"):
        run(load(broken, rows=2), engine)


@needs_package
def test_an_episode_that_runs_out_of_tokens_is_scored(engine):
    env = load({"taskset": {"rounds": 5}}, rows=1)
    ((completion, _),) = run(env, engine, sampling=SAMPLING)
    assert len(completion.ids) <= 40 and completion.finish_reason == "length"
    assert completion.columns["num_turns"] == 3 and completion.columns["env_failed"] == 0.0
    assert completion.columns["reward_components"]["rounds"] == 3.0


@needs_package
def test_a_late_episode_fails_and_dead_servers_stop_the_run(engine, monkeypatch):
    cancelled: list[Request] = []

    async def never(request, sampling):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(request)
            raise

    monkeypatch.setattr(engine, "complete", never)
    env = load(rows=1, timeout=3.0)
    ((completion, _),) = run(env, engine)
    assert completion.columns["env_failed"] == 1.0 and "timeout=3 s" in env.lines[-1]
    assert len(cancelled) == 2  # also on the servers

    async def dead(request, sampling):
        raise ValueError("vllm: no server is left")

    monkeypatch.setattr(engine, "complete", dead)
    with pytest.raises(UnusableError, match="vllm: no server is left"):
        run(load(rows=1), engine)


@needs_package
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "no-such-env"}, "verifiers.env=no-such-env: no such environment"),
        ({"env": "gone.py"}, "verifiers.env=gone.py: .*gone.py"),
        ({"args": {"taskset": {"nope": 1}}}, "verifiers.args.taskset.nope: "),
        ({"args": {"taskset": {"rows": 0}}}, "no rows; .*--verifiers.args"),
        ({"args": {"agent": {"harness": {"id": "bash"}}}}, r"agent runs code \(harness bash\)"),
        ({"renderer": {"name": "nope"}}, "verifiers.renderer={'name': 'nope'}: "),
    ],
)
def test_a_bad_environment_is_rejected_before_anything_runs(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(**settings)
    assert "\n" not in str(caught.value)


@needs_package
def test_an_environment_that_fails_to_start_reports_the_reason(monkeypatch):
    async def start() -> None:
        raise RuntimeError("no port is free")

    env = load(rows=1)
    monkeypatch.setattr(env.env, "start", start)
    with pytest.raises(ValueError, match=r"\(RuntimeError: no port is free\)"):
        env.open()
    assert env.lines == [] and env.loop is None


@needs_package
def test_the_package_has_all_needed_names():
    vf = import_verifiers("x")
    assert all(verifiers_env._has(vf, name) for name in verifiers_env.NEEDED)
