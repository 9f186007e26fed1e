"""verifiers environments: recorded requests of its training client, what an episode becomes, and what is refused.

The tests of the last part run the real package over a scripted engine, and skip where it is not installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollout.engine import Completion, Request, Sampling, run_groups
from rollout.gyms import verifiers_env
from rollout.gyms.gym_source import EpisodeError, UnusableError
from rollout.gyms.verifiers_env import NO_ROOM, Talk, VerifiersEnv, import_verifiers, message_of, opening, read_episode
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


def test_flags_and_yaml_and_the_engine_that_they_need(tmp_path):
    cfg = parse("--verifiers.args", '{"agent": {"max_turns": 4}}', "--verifiers.rows", "5", "--val-set-size", "2")
    assert cfg.verifiers.args == {"agent": {"max_turns": 4}} and cfg.verifiers.rows == 5
    assert cfg.rollout.engine == "auto" and servers_asked(cfg) == "verifiers.env=toy"
    path = tmp_path / "run.yaml"
    path.write_text("method: grpo\nmodel: m\nreward_funcs: [env]\nverifiers: {env: toy, args: {taskset: {rows: 3}}}\n")
    assert cli.parse(["--config", str(path)])[1].verifiers.args == {"taskset": {"rows": 3}}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--rollout.engine", "local"), "rollout.engine=local: verifiers.env=toy asks vLLM servers"),
        (("--data", "rows.jsonl"), "verifiers.env=toy: brings its own rows"),
        (("--tools", "calculator"), "tools, verifiers.env: "),
        (("--system-prompt", "be"), "system_prompt=be: verifiers.env=toy has its own prompts"),
        (("--chat-template", "chatml"), "chat_template=chatml: verifiers.env=toy renders prompts"),
        (("--verifiers.timeout", "0"), "verifiers.timeout=0.0: must be"),
        (("--verifiers.rows", "0"), "verifiers.rows=0: must be 1 or more"),
        (("--verifiers.max-concurrent", "0"), "verifiers.max_concurrent=0: must be 1 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(argv, says, capsys):
    with pytest.raises((ValueError, SystemExit)) as caught:
        parse(*argv)
    assert says in f"{caught.value}{capsys.readouterr().err}"


def test_settings_without_an_environment_are_refused():
    for settings, says in [({"rows": 3}, "verifiers.rows=3"), ({"args": {"a": 1}}, "verifiers.args={'a': 1}")]:
        with pytest.raises(ValueError, match="has no effect without an environment") as caught:
            VerifiersConfig(**settings)
        assert str(caught.value).startswith(says)
    with pytest.raises(ValueError, match="verifiers.env='': is empty"):
        VerifiersConfig(env="")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ("--teacher-prompt", "hints.short", "--num-generations", "4"),
            "teacher_prompt=hints.short: conflicts with verifiers.env=toy",
        ),
        (
            ("--student-data-fraction", "0.5", "--jsd-beta", "0.5", "--reward-coef", "0"),
            "student_data_fraction=0.5: ",
        ),
    ],
)
def test_distillation_refuses_what_an_environment_takes_away(argv, says, capsys):
    with pytest.raises((ValueError, SystemExit)) as caught:
        parse("--teacher", "t", *argv, method="opd")
    assert says in f"{caught.value}{capsys.readouterr().err}"


@pytest.mark.parametrize("method", ["sft", "dpo", "ebft"])
def test_a_method_that_cannot_use_it_does_not_know_the_flag(method, capsys):
    with pytest.raises((ValueError, SystemExit)) as caught:
        cli.parse(["--method", method, "--model", "m", "--data", "d", "--verifiers.env", "toy"])
    assert "--verifiers.env: unknown flag" in f"{caught.value}{capsys.readouterr().err}"


def test_a_missing_package_and_another_version_are_refused_by_name(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"verifiers.env=x: the package verifiers is not installed; pip install -e"):
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
    """What we use of a Trace."""

    def __init__(self, **fields: Any) -> None:
        agent = SimpleNamespace(name=fields.pop("name", "agent"), trainable=fields.pop("trainable", True))
        defaults = {"id": "t", "agent": agent, "reward": 1.5, "rewards": {}, "errors": [], "branches": [],
                    "is_truncated": False, "stopped": None}  # fmt: skip
        super().__init__(**(defaults | fields))

    def stop(self, condition: str) -> None:
        self.stopped = condition


def talk_of(reply: Any = "0", *, trace: Trace | None = None, context: int = 256, **sampling: Any) -> Talk:
    """Talk to an engine that says `reply`; asked collects its (request, sampling)."""
    engine, asked = ScriptedEngine(lambda text, seed: reply), []

    async def ask(request: Request, sampling: Sampling) -> Completion:
        asked.append((request, sampling))
        if isinstance(reply, Exception):
            raise reply
        return engine._one(request, sampling)

    settings = {"max_tokens": 40, "stop_ids": (0,), "for_training": True, **sampling}
    talk = Talk(trace or Trace(), 7, Sampling(**settings), context, ask)
    talk.asked = asked
    return talk


def answer(talk: Talk, *bodies: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    async def all_of_them() -> list[tuple[int, dict[str, Any]]]:
        return [await talk.answer(body) for body in bodies]

    return asyncio.run(all_of_them())


def test_recorded_requests_are_answered_with_the_engines_tokens_and_join_to_one_sequence():
    talk = talk_of()
    (status, reply), _ = answer(talk, *RECORDED)
    (choice,) = reply["choices"]
    assert status == 200 and choice["token_ids"] == [18, 2] and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": []} for token in (18, 2)
    ]
    (first, sampling), (second, _) = talk.asked
    assert first.prompt_ids == PROMPT and first.seed == 7 and second.seed != 7
    assert sampling.stop_ids == (0, 2)  # ours, and those of the renderer
    assert sampling.max_tokens == 40 and talk.asked[1][1].max_tokens == 40 - 2 - len(BETWEEN)
    made = read_episode(episode_of(talk.trace), {"t": talk}, VerifiersConfig(env="x"), prompt_ids=[9])
    assert made.prompt_ids == PROMPT and made.ids == [18, 2, *BETWEEN, 18, 2]
    assert made.mask == [True, True, *[False] * len(BETWEEN), True, True]
    assert made.logps == [-0.5, -0.5, *[0.0] * len(BETWEEN), -0.5, -0.5]
    assert made.versions == [(3, 4)] and made.finish_reason == "stop"
    assert made.columns["env_reward"] == 1.5 and made.columns["num_turns"] == 2


def test_a_request_may_lower_the_limit_and_one_that_is_asked_again_counts_once():
    talk = talk_of("12345")
    short = RECORDED[0] | {"sampling_params": {"max_tokens": 3, "temperature": 0.1}}
    answer(talk, short, short)
    assert [sampling.max_tokens for _, sampling in talk.asked] == [3, 3] and talk.short
    assert {sampling.temperature for _, sampling in talk.asked} == {1.0}
    assert len(talk.turns) == 1 and talk.asked[0][0] == talk.asked[1][0]


def test_an_episode_without_room_for_another_turn_is_stopped_and_scored():
    for limits in ({"max_tokens": 15}, {"context": len(PROMPT) + 15}):
        talk = talk_of(**limits)
        (_, (status, reply)) = answer(talk, *RECORDED)
        assert status == 400 and NO_ROOM in reply["error"]["message"]
        assert talk.trace.stopped == NO_ROOM
        made = read_episode(episode_of(talk.trace), {"t": talk}, VerifiersConfig(env="x"), prompt_ids=[9])
        assert made.ids == [18, 2] and made.finish_reason == "length"


def test_an_error_of_our_servers_and_a_picture_stop_the_run():
    talk = talk_of(ValueError("vllm: no server is left"))
    ((status, _),) = answer(talk, RECORDED[0])
    assert status == 400 and str(talk.error) == "vllm: no server is left" and not talk.turns
    talk = talk_of()
    ((status, _),) = answer(talk, RECORDED[0] | {"features": {"mm_hashes": {}}})
    assert status == 400 and "only text is supported" in str(talk.error) and not talk.asked


# episodes --------------------------------------------------------------------------------------------------------


def episode_of(*traces: Trace, ok: bool = True, errors: Any = ()) -> Any:
    return SimpleNamespace(ok=ok, errors=list(errors), traces=list(traces))


def node(message: Any, sampled: bool = False) -> Any:
    return SimpleNamespace(message=SimpleNamespace(**message), sampled=sampled)


def read(*traces: Trace, agent: str | None = None, **settings: Any) -> Completion:
    talks = {trace.id: talk_of(trace=trace) for trace in traces}
    for talk in talks.values():
        answer(talk, RECORDED[0])
    return read_episode(episode_of(*traces, **settings), talks, VerifiersConfig(env="x", agent=agent), prompt_ids=[9])


def test_messages_begin_with_the_models_first_turn():
    call = SimpleNamespace(id="a", name="get", arguments='{"x": 1}')
    part = SimpleNamespace(type="text", text="cold")
    nodes = [
        node({"role": "user", "content": "q"}),
        node({"role": "assistant", "content": None, "tool_calls": [call]}, sampled=True),
        node({"role": "tool", "content": [part], "tool_call_id": "a"}),
        node({"role": "assistant", "content": "It is cold.", "tool_calls": None}, sampled=True),
    ]
    rewards = {"right": SimpleNamespace(score=3.0), "unscored": None}
    made = read(Trace(branches=[SimpleNamespace(nodes=nodes)], rewards=rewards))
    function = {"name": "get", "arguments": '{"x": 1}'}
    assert made.messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": "cold", "tool_call_id": "a"},
        {"role": "assistant", "content": "It is cold."},
    ]
    assert made.text == "It is cold." and made.columns["tool_calls"] == 1
    assert made.columns["reward_components"] == {"right": 3.0}


def test_one_agent_is_trained_and_has_to_be_the_only_one():
    helper = Trace(id="u", name="user", trainable=False, reward=9.0)
    assert read(Trace(name="solver"), helper).columns["env_reward"] == 1.5
    two = (Trace(name="solver"), Trace(id="u", name="critic", reward=2.5))
    assert read(*two, agent="critic").columns["env_reward"] == 2.5
    for agent, says in [(None, "has 2 conversations"), ("judge", "has 0 conversations")]:
        with pytest.raises(UnusableError, match=rf"verifiers.agent={agent}: an episode {says} .*critic, solver"):
            read(*two, agent=agent)


def test_an_episode_that_failed_says_why():
    error = SimpleNamespace(type="HarnessError", message="exit 1:\nno  such file")
    with pytest.raises(EpisodeError, match="HarnessError: exit 1: no such file") as caught:
        read(Trace(errors=[error]), ok=False)
    assert caught.value.kind == "HarnessError"
    with pytest.raises(EpisodeError, match="failed: no reason given"):
        read(ok=False)
    with pytest.raises(EpisodeError, match="reward=nan: is not a finite number"):
        read(Trace(reward=float("nan")))


def test_rows_open_with_what_the_model_will_see():
    row = SimpleNamespace(system_prompt="be", prompt="2+2=", description=None, name="sums")
    assert opening(row) == [{"role": "system", "content": "be"}, {"role": "user", "content": "2+2="}]
    row.prompt = None  # the environment opens the conversation
    assert opening(row)[-1] == {"role": "user", "content": "sums"}
    picture = SimpleNamespace(role="user", content=[SimpleNamespace(type="image_url")])
    with pytest.raises(ValueError, match="only text is supported"):
        message_of(picture)


# the real package ------------------------------------------------------------------------------------------------


class Engine:
    """A scripted engine as one with servers."""

    def __init__(self, reply: Any) -> None:
        self.loop, self.scripted = Loop(), ScriptedEngine(reply)
        info = SimpleNamespace(model_len=256)
        self.pool = SimpleNamespace(members=[SimpleNamespace(server=SimpleNamespace(info=info))])

    async def complete(self, request: Request, sampling: Sampling) -> Completion:
        return self.scripted._one(request, sampling)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(lambda text, seed: f"{seed % 10}")
    yield made
    made.loop.close()


def load(args: dict[str, Any] | None = None, env: str = str(TOY), **settings: Any) -> VerifiersEnv:
    said: list[str] = []
    made = VerifiersEnv(VerifiersConfig(env=env, args=args or {}, **settings), model=str(TINY), log=said.append)
    made.said = said
    return made


def run(env: VerifiersEnv, engine: Engine, copies: int = 2, sampling: Sampling = SAMPLING) -> list[list[Completion]]:
    prompts = env.prompts(tiny_tokenizer())
    env.open()
    try:
        source = env.source(engine, sampling)
        groups = [[Request.of(prompt, 10 * i + c) for c in range(copies)] for i, prompt in enumerate(prompts)]
        return run_groups(source, groups)
    finally:
        env.close()
        env.close()


@needs_package
def test_a_toy_environment_plays_its_rows_in_two_turns(engine):
    env = load(rows=3)
    prompts = env.prompts(tiny_tokenizer())
    assert [prompt.columns for prompt in prompts] == [{"start": i, "rounds": 2, "verifiers_index": i} for i in range(3)]
    groups = run(env, engine)
    assert [len(group) for group in groups] == [2, 2, 2]
    for prompt, group in zip(prompts, groups, strict=True):
        for number, made in enumerate(group):
            first, second = (tiny_tokenizer().decode(part) for part in sampled_parts(made))
            assert made.prompt_ids == prompt.ids  # as the package renders it: the same template
            assert first == f"{number}<|im_end|>"
            assert made.versions == [(3, 4)] and made.finish_reason == "stop"
            assert [m["role"] for m in made.messages] == ["assistant", "user", "assistant"]
            odd = sum(text[0] in "13579" for text in (first, second)) / 2
            assert made.columns["reward_components"] == {"odd": odd, "rounds": 2.0}
            assert made.columns["env_reward"] == odd + 0.5 * 2
            assert made.columns["left_out_turns"] == 0
    assert "tool calls are not read" in env.said[0]


def sampled_parts(made: Completion) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token, own in zip(made.ids, made.mask, strict=True):
        if own:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


@needs_package
@pytest.mark.parametrize("rule", ["last", "drop", "stop"])
def test_a_prompt_that_does_not_continue_the_turns_before_is_handled_by_the_rule(engine, rule):
    env = load({"agent": {"harness": {"id": "toy_verifiers", "rewrites": True}}}, rows=1, prefix_mismatch=rule)
    if rule == "stop":
        with pytest.raises(
            ValueError, match="verifiers.prefix_mismatch=stop: .*toy_verifiers.py:0: the prompt of a turn"
        ):
            run(env, engine)
        return
    ((made, _),) = run(env, engine)
    if rule == "last":
        assert made.columns["left_out_turns"] == 1 and made.trained == 2
        assert "hm<|im_end|>" in tiny_tokenizer().decode(made.prompt_ids)
    else:
        assert made.columns["env_failed"] == 1.0 and made.trained == 0
    assert sum("token by token" in line for line in env.said) == 1


@needs_package
def test_failed_episodes_cost_their_rows_and_too_many_stop_the_run(engine, monkeypatch):
    broken = {"agent": {"harness": {"id": "toy_verifiers", "fails": True}}}
    env = load(broken, rows=2)
    made = [one for group in run(env, engine) for one in group]
    assert {one.columns["env_failed"] for one in made} == {1.0} and {one.trained for one in made} == {0}
    assert {one.columns["env_reward"] for one in made} == {None}
    assert sum("the toy is broken" in line for line in env.said) == 1
    monkeypatch.setattr("rollout.gyms.gym_source.GIVE_UP", 3)
    with pytest.raises(ValueError, match=r"verifiers: \d episodes in a row have failed, the last one .*toy is broken"):
        run(load(broken, rows=2), engine)


@needs_package
def test_an_episode_ends_when_its_tokens_are_used_up_and_is_scored(engine):
    env = load({"taskset": {"rounds": 5}}, rows=1)
    ((made, _),) = run(env, engine, sampling=SAMPLING)
    assert len(made.ids) <= 40 and made.finish_reason == "length"
    assert made.columns["num_turns"] == 3 and made.columns["env_failed"] == 0.0
    assert made.columns["reward_components"]["rounds"] == 3.0


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
    ((made, _),) = run(env, engine)
    assert made.columns["env_failed"] == 1.0 and "has not ended for 3 s" in env.said[-1]
    assert len(cancelled) == 2  # on the servers, too

    async def dead(request, sampling):
        raise ValueError("vllm: no server is left")

    monkeypatch.setattr(engine, "complete", dead)
    with pytest.raises(UnusableError, match="vllm: no server is left"):
        run(load(rows=1), engine)


@needs_package
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"env": "no-such-env"}, "verifiers.env=no-such-env: there is no such environment, neither installed nor"),
        ({"env": "gone.py"}, "verifiers.env=gone.py: the file .*gone.py does not exist"),
        ({"args": {"taskset": {"nope": 1}}}, r"verifiers.args.taskset.nope: .*; see the settings of"),
        ({"args": {"taskset": {"rows": 0}}}, "has no rows; check verifiers.args"),
        ({"args": {"agent": {"harness": {"id": "bash"}}}}, r"its agent runs code \(harness bash\); say where"),
        ({"renderer": {"name": "nope"}}, "verifiers.renderer={'name': 'nope'}: "),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_before_anything_runs(settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        load(**settings)
    assert "\n" not in str(caught.value)


@needs_package
def test_an_environment_that_does_not_start_says_why(monkeypatch):
    async def start() -> None:
        raise RuntimeError("no port is free")

    env = load(rows=1)
    monkeypatch.setattr(env.env, "start", start)
    with pytest.raises(ValueError, match=r"did not start \(RuntimeError: no port is free\)"):
        env.open()
    assert env.said == [] and env.loop is None


@needs_package
def test_the_names_of_the_package_that_we_use_exist():
    vf = import_verifiers("x")
    assert all(verifiers_env._has(vf, name) for name in verifiers_env.NEEDED)
