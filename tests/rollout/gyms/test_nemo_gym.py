"""NeMo Gym: replayed exchanges with the real servers, and server faults."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.rows.nemo_gym import nemo_gym_columns
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling, run_groups
from rollout.episodes.endpoint import Endpoint
from rollout.gyms.nemo_gym import (
    GymClient,
    RunSource,
    error_text,
    join_cookies,
    read_addresses,
    read_reply,
    response_of,
    set_up_rewards,
)
from rollout.gyms.options import NemoGymConfig, check_nemo_gym
from rollout.rewards.table import Rewards, load_rewards
from tests.rollout.gyms.nemo_replay import CLOSE, LATE, Replay
from tests.rollout.scripted_engine import ScriptedEngine, tiny_tokenizer

SAMPLING = Sampling(max_tokens=64, stop_ids=(2,), for_training=True)


@pytest.fixture
def recordings(asset) -> Path:
    return asset("data/nemo_gym")


@pytest.fixture
def replay():
    with Replay() as server:
        yield server


def client(replay: Replay, **settings: Any) -> GymClient:
    lines: list[str] = []
    gym = GymClient(
        NemoGymConfig(**{"datasets": ("rows.jsonl",), "head_port": replay.port, "server_timeout": 5.0, **settings}),
        lines.append,
    )
    gym.lines = lines
    return gym


def prompt_of(row: dict[str, Any], server: str, index: int = 0) -> Prompt:
    columns = nemo_gym_columns(row, server, index)
    columns["nemo_gym_ref"]["source"] = f"rows.jsonl:{index + 1}"
    messages = columns.pop("prompt")
    return Prompt(source=f"rows.jsonl:{index + 1}", prompt=messages, ids=[1, 7, 9], columns=columns)


def completion_of(text: str) -> Completion:
    return Completion(prompt_ids=[1], ids=[5], logps=[-1.0], finish_reason="stop", text=text, versions=[(0, 1)])


def math_row(question: str, **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": question}]}, **fields}


def item(text: str = "hm") -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def reply_of(*items: dict[str, Any], reward: Any = 1.0, **response: Any) -> dict[str, Any]:
    return {"reward": reward, "response": {"output": list(items), **response}}


def rewards_of(gym: GymClient, on_error: str = "stop") -> Rewards:
    rewards = load_rewards(["nemo_gym:verify"], on_error=on_error, log=lambda text: None)
    set_up_rewards(rewards, gym, on_error)
    return rewards


# single turn -----------------------------------------------------------------------------------------------------


def test_recorded_verifications_return_in_order_with_one_session_each(recordings):
    correct, wrong, counter = (
        json.loads((recordings / f"{name}.json").read_text())["request"]
        for name in ("reasoning_gym_verify_correct", "reasoning_gym_verify_wrong", "counter_verify")
    )
    requests = [(correct, "reasoning_gym"), (wrong, "reasoning_gym"), (counter, "example_session_state_mgmt")] * 4
    rows = [({k: v for k, v in request.items() if k != "response"}, name) for request, name in requests]
    texts = [request["response"]["output"][0]["content"][0]["text"] for request, _ in requests]
    prompts = [prompt_of(row, name, i) for i, (row, name) in enumerate(rows)]
    with Replay(recordings) as replay:
        gym = client(replay)
        gym.connect(prompts, multi_turn=False)
        table = rewards_of(gym).score(prompts, [completion_of(text) for text in texts])
        gym.loop.run(gym.post(f"http://127.0.0.1:{replay.port}/seed_session", {}, "counter"))  # another row, later
        gym.close()
    assert [value for (value,) in table.values] == [1.0, 0.0, 1.0] * 4
    verified = [(body, cookies) for route, body, cookies in replay.requests if route == "/verify"]
    assert (len(verified), replay.sessions) == (12, 13)
    # Rows do not share sessions, and the client stores none.
    assert {cookies for _, cookies in verified} == {f"session={n}" for n in range(1, 13)}
    assert not any(cookies for route, _, cookies in replay.requests if route == "/seed_session")
    assert join_cookies("s=old; t=1", ["s=a.b=; path=/; httponly", "u=2"]) == "s=a.b=; t=1; u=2"
    sent = next(body for body, _ in verified if body.get("expected_count") == 6)
    assert sent["responses_create_params"] == counter["responses_create_params"]
    assert sent["response"]["output"][0]["content"] == [{"type": "output_text", "text": "done", "annotations": []}]


def test_an_added_system_prompt_reaches_the_verifier_and_other_rows_get_no_reward(replay):
    replay.add("/verify", [{"content": "Think."}, {"content": "q"}], {"reward": 0.25}, text="a")
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    prompt = replace(prompt, prompt=[{"role": "system", "content": "Think."}, *prompt.prompt])
    other = Prompt(source="sums.jsonl:1", prompt=[{"role": "user", "content": "x"}], ids=[1], columns={"answer": "4"})
    gym = client(replay)
    gym.connect([prompt, other], multi_turn=False)
    table = rewards_of(gym).score([prompt, other], [completion_of("a"), completion_of("a")])
    gym.close()
    assert (table.values, table.failed) == ([[0.25], [None]], 0)


def test_a_rejected_row_loses_its_reward_or_stops_the_run(replay):
    replay.add("/verify", "q", {"reward": 1.0}, text="a")
    prompts = [prompt_of(math_row(question), "reasoning_gym", i) for i, question in enumerate(("q", "unknown", "q"))]
    gym = client(replay)
    gym.connect(prompts, multi_turn=False)
    table = rewards_of(gym, "none").score(prompts, [completion_of("a")] * 3)
    assert table.values == [[1.0], [None], [1.0]]
    assert table.failed == 1
    why = "rows.jsonl:2: reasoning_gym/verify answered 422 (body.question: Field required)"
    rewards_of(gym, "none").score(prompts, [completion_of("a")] * 3)
    assert [why in line for line in gym.lines if "answered 422" in line] == [True]
    with pytest.raises(ValueError) as caught:
        rewards_of(gym, "stop").score(prompts, [completion_of("a")] * 3)
    gym.close()
    assert why in str(caught.value)
    assert "reward_funcs=nemo_gym:verify" in str(caught.value)
    assert sum(route == "/verify" and body["response"] is not None for route, body, _ in replay.requests) >= 6


@pytest.mark.parametrize("fault", [500, CLOSE], ids=["500", "closed"])
def test_a_request_that_fails_once_is_retried_with_a_new_session(replay, fault):
    replay.add("/verify", "q", {"reward": 1.0}, text="a")
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    gym = client(replay)
    gym.connect([prompt], multi_turn=False)
    replay.faults.extend([None, fault])
    table = rewards_of(gym, "none").score([prompt], [completion_of("a")])
    gym.close()
    assert table.values == [[1.0]]
    assert replay.sessions == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (500, "reasoning_gym/verify answered 500 (inner failure)"),
        (b"<html>", "reasoning_gym/verify answered b'<html>'"),
        (b'{"reward": NaN}', "reward=nan"),
        (b'{"reward": "1"}', "reward='1'"),
        (b'{"reward": 1%s}' % (b"0" * 400), "reward=1000000"),
        (b'{"reward": 1e300}', "reward=1e+300"),
        (b"{}", "reward=None"),
        (b'{"reward": 1, "x": %s}' % (b"[" * 100_000), "reasoning_gym/verify answered b'"),
        (b'{"reward": 1, "x": %s1%s}' % (b"[" * 200, b"]" * 200), "reasoning_gym/verify answered b'"),
        (b" " * 5000, "reasoning_gym/verify failed (the reply exceeds 4,096 bytes)"),
        (LATE, "reasoning_gym/verify did not answer within 2 s"),
    ],
    ids=["500", "garbage", "nan", "text", "digits", "large", "empty", "unparsable", "deep", "endless", "late"],
)
def test_a_server_fault_is_logged_once_and_gives_no_reward(replay, fault, message, monkeypatch):
    if fault == b" " * 5000:
        monkeypatch.setattr("rollout.gyms.nemo_gym.MAX_REPLY", 4096)
    replay.add("/verify", "q", {"reward": 1.0}, text="a")
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    gym = client(replay, retries=0, verify_timeout=2.0 if fault == LATE else 60.0)
    gym.connect([prompt], multi_turn=False)
    replay.faults.extend([None, fault])
    table = rewards_of(gym, "none").score([prompt], [completion_of("a")])
    gym.close()
    assert (table.values, table.failed) == ([[None]], 1)
    assert gym.lines[-1].startswith(f"NeMo Gym: rows.jsonl:1: {message}")


def test_max_connections_limits_concurrent_verifications(replay):
    replay.add("/verify", "q", {"reward": 1.0}, text="a")
    prompts = [prompt_of(math_row("q"), "reasoning_gym", i) for i in range(12)]
    gym = client(replay, max_connections=4)
    gym.connect(prompts, multi_turn=False)
    replay.faults.extend([0.1] * 24)
    table = rewards_of(gym).score(prompts, [completion_of("a")] * 12)
    gym.close()
    assert table.values == [[1.0]] * 12
    assert replay.most_at_once == 4


def test_the_reward_requires_a_training_run():
    rewards = load_rewards(["nemo_gym:verify"])
    with pytest.raises(ValueError, match="--nemo-gym.datasets"):
        rewards.score([prompt_of(math_row("q"), "reasoning_gym")], [completion_of("a")])


# discovery -------------------------------------------------------------------------------------------------------


def test_addresses_are_read_from_yaml_and_from_yaml_in_json(replay):
    import yaml

    once = yaml.safe_dump(replay.config())
    for text in (once, json.dumps(once)):
        addresses = read_addresses(text, "http://h:1", "10.0.0.7")
        assert addresses.servers["reasoning_gym"] == f"http://10.0.0.7:{replay.port}"  # it listens on all interfaces
        assert addresses.agents["reasoning_gym_simple_agent"] == (f"http://10.0.0.7:{replay.port}", "reasoning_gym")
        assert "policy_model" not in {**addresses.servers, **addresses.agents}
    for text in ("[1, 2", "<html></html>", "x: " + "9" * 5000):
        with pytest.raises(ValueError, match="http://h:1: "):
            read_addresses(text, "http://h:1", "h")


SERVERS = [  # server of the dataset, of the row -> its resource server, its agent, or the error
    ("a", None, "a", "a_agent"),
    ("a_agent", None, "a", "a_agent"),
    (None, "a_agent", "a", "a_agent"),
    (None, "a", "a", "a_agent"),
    ("b", "a_agent", "b", ValueError("agents b_agent, c_agent .* b; write PATH@AGENT")),
    ("b", "c_agent", "b", "c_agent"),
    ("nope", "a_agent", ValueError("@nope: no such resource server"), ValueError("@nope: no such agent")),
]


def test_the_dataset_overrides_the_server_and_agent_of_a_row(replay):
    def inner(port: int, of: str | None = None) -> dict[str, Any]:
        fields = {"host": "127.0.0.1", "port": port} | ({"resources_server": {"name": of}} if of else {})
        return {"responses_api_agents" if of else "resources_servers": {"any": fields}}

    replay.places = {"a": inner(1), "b": inner(2), "a_agent": inner(3, "a")}
    replay.places |= {"b_agent": inner(4, "b"), "c_agent": inner(5, "b")}
    gym = client(replay)
    gym.connect([], multi_turn=False)
    for server, name, resource, agent in SERVERS:
        ref = {"server": server, "name": name}
        for find, expected in ((gym.server_of, resource), (gym.agent_of, agent)):
            if isinstance(expected, ValueError):
                with pytest.raises(ValueError, match=str(expected)):
                    find(ref)
            else:
                assert find(ref)[0] == expected, ref
    gym.close()


def test_a_missing_gym_or_server_stops_the_run_before_it_starts(replay):
    prompt = prompt_of(math_row("q"), "reasoning_gim")
    gym = client(replay)
    with pytest.raises(ValueError, match="rows.jsonl:1: .*@reasoning_gim: .* did you mean 'reasoning_gym'"):
        gym.connect([prompt], multi_turn=False)
    gym.close()
    replay.places = {"x": {"resources_servers": {"y": {"host": "127.0.0.1", "port": 99_999_999}}}}
    gym = client(replay, server_timeout=0.5)
    with pytest.raises(ValueError, match="nemo_gym: x: port=99999999"):
        gym.connect([prompt_of(math_row("q"), "x")], multi_turn=False)
    gym.close()
    replay.server.shutdown()
    replay.server.server_close()
    gym = client(replay, server_timeout=0.5)
    with pytest.raises(ValueError, match=f"nemo_gym.head_port={replay.port}: "):
        gym.connect([prompt], multi_turn=False)
    gym.close()


def test_error_text_is_short():
    detail = [{"loc": ["body", "question"], "msg": "Field required"}] * 4
    assert error_text(json.dumps({"detail": detail}).encode()) == "body.question: Field required and 3 more"
    assert error_text(b'"inner\\nfailure"') == "inner failure"
    assert error_text(b"") == "no reason given"
    assert error_text(b'{"detail": [{"loc": 5}]}') == "[{'loc': 5}]"
    assert error_text(b"[" * 100_000) == "[" * 200
    assert error_text(b'"\\u001b[31m"') == r"\x1b[31m"


# episodes --------------------------------------------------------------------------------------------------------


def test_read_reply():
    reply = reply_of(item("done"), reward=0.5) | {"reward_components": {"format": 0.5}}
    columns = {"env_reward": 0.5, "env_failed": 0.0, "reward_components": {"format": 0.5}}
    assert read_reply(reply, has_turns=True, url="u") == columns
    assert read_reply(reply_of(item("")), has_turns=False, url="u")["env_reward"] == 1.0
    for reply, message in [
        ({"reward": 1.0}, "response: no output"),
        (reply_of(item(""), reward=None), "reward=None"),
        (reply_of("text"), "output: a str"),
        (reply_of(item("x")), "nemo_gym.multi_turn=True: .*base_url .* u$"),
        (reply_of({"type": "function_call"}), "base_url"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_reply(reply, has_turns=False, url="u")


def test_messages_become_items_of_a_response():
    call = {"id": "a", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "cold", "tool_call_id": "a"},
        {"role": "assistant", "content": "It is cold."},
    ]
    response = response_of(messages, "policy")
    assert [entry["type"] for entry in response["output"]] == ["function_call", "function_call_output", "message"]
    assert response["output"][1] == {"type": "function_call_output", "call_id": "a", "output": "cold"}
    assert response["output"][2]["content"] == [{"type": "output_text", "text": "It is cold.", "annotations": []}]


# multi turn ------------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint(replay):
    """An endpoint that the replayed agents use; its model answers `1`, `2`, ..."""
    engine = ScriptedEngine(lambda text, seed: str(text.count("assistant")))
    replay.endpoint = Endpoint(engine, engine.tokenizer)
    replay.endpoint.open()
    yield replay.endpoint
    replay.endpoint.close()


def source_of(gym: GymClient, prompts: list[Prompt], endpoint: Endpoint) -> RunSource:
    gym.connect(prompts, multi_turn=True)
    return RunSource(gym, SAMPLING, endpoint)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_episodes_return_in_order_with_the_turns_of_their_session(replay, endpoint):
    prompts = [prompt_of(math_row(q, x=1), "reasoning_gym", i) for i, q in enumerate(("q", "r"))]
    replay.turns = [[user("q")], [user("q"), {"role": "assistant", "content": "1"}, user("sure?")]]
    for question, reward in (("q", 1.0), ("r", 0.5)):
        replay.add("/run", question, reply_of(item("2"), reward=reward))
    gym = client(replay, max_connections=3)
    source = source_of(gym, prompts, endpoint)
    replay.faults.extend([0.3, 0.0, 0.2])
    groups = run_groups(source, [[Request.of(prompt, seed=2**63 + i) for i in range(3)] for prompt in prompts])
    source.close()
    gym.close()
    assert [[c.columns["env_reward"] for c in group] for group in groups] == [[1.0] * 3, [0.5] * 3]
    for completion in (c for group in groups for c in group):
        assert completion.columns["num_turns"] == 2 and completion.columns["branches"] == 0
        assert [m["role"] for m in completion.messages] == ["assistant", "user", "assistant"]
        assert tiny_tokenizer().decode(completion.ids).startswith("1<|im_end|>") and completion.text == "2"
        assert completion.trained == 4 and completion.versions == [(3, 4)]
    assert not source._running
    bodies = [body for _, body, _ in replay.requests]
    indices = sorted((body["_ng_task_index"], body["_ng_rollout_index"]) for body in bodies)
    assert indices == [(i, k) for i in range(2) for k in range(3)]
    first = bodies[0]
    assert first["x"] == 1
    assert first["agent_ref"] == {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"}
    sessions = [json.loads(b["responses_create_params"]["metadata"]["extra_body"])["strop_session"] for b in bodies]
    assert len(set(sessions)) == 6


def test_a_row_may_set_extra_parameters(replay):
    row = math_row("q")
    row["responses_create_params"] |= {"user": None, "metadata": {"extra_body": '{"max_tokens": 9}', "x": "{}"}}
    gym = client(replay)
    params = RunSource(gym, SAMPLING, None).body(prompt_of(row, "reasoning_gym"), "agent", "5", 0)
    gym.close()
    params = params["responses_create_params"]
    assert "user" not in params and params["metadata"]["x"] == "{}"
    assert json.loads(params["metadata"]["extra_body"]) == {"max_tokens": 9, "strop_session": "5"}


def test_a_failed_episode_is_not_trained_and_logged_once(replay, endpoint):
    replay.add("/run", "q", reply_of(item("1")))
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    for fault, why in ((500, "answered 500 (inner failure)"), (LATE, "did not answer within 0.5 s"), (CLOSE, "failed")):
        gym = client(replay, retries=0, run_timeout=0.5 if fault == LATE else 60.0)
        source = source_of(gym, [prompt], endpoint)
        for _ in range(2):
            replay.faults.append(fault)
            ((completion,),) = run_groups(source, [[Request.of(prompt, 1)]])
            assert completion.mask == [False] and completion.trained == 0
            assert completion.columns["env_reward"] is None
            assert completion.columns["env_failed"] == 1.0
            assert completion.prompt_ids == [1, 7, 9]
        assert sum(why in line for line in gym.lines) == 1
        if fault != LATE:
            ((good,),) = run_groups(source, [[Request.of(prompt, 1)]])
            assert good.columns["env_reward"] == 1.0
        gym.close()


REWRITES = [[user("q")], [user("q"), {"role": "assistant", "content": "other"}, user("sure?")]]


def test_consecutive_failures_stop_the_run(replay, endpoint, monkeypatch):
    monkeypatch.setattr("rollout.gyms.gym_source.MAX_FAILURES", 5)
    replay.add("/run", "q", reply_of(item("1")))
    prompts = [prompt_of(math_row(question), "reasoning_gym") for question in ("q", "unknown")]
    gym = client(replay, retries=0, prefix_mismatch="drop")
    replay.turns = REWRITES
    for prompt in prompts:  # dropped, rejected
        source = source_of(gym, [prompt], endpoint)
        with pytest.raises(ValueError, match="nemo_gym: 5 consecutive episodes failed, .*rows.jsonl:1"):
            run_groups(source, [[Request.of(prompt, i) for i in range(5)]])
    replay.turns = []
    with pytest.raises(ValueError, match=f"base_url of the gym's model server to {endpoint.url}"):
        run_groups(source_of(gym, [prompts[0]], endpoint), [[Request.of(prompts[0], 1)]])
    gym.close()


@pytest.mark.parametrize("rule", ["branch", "last", "drop", "stop"])
def test_prefix_mismatch_decides_about_rewritten_history(replay, endpoint, rule):
    replay.add("/run", "q", reply_of(item("1")))
    replay.turns = REWRITES
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    gym = client(replay, prefix_mismatch=rule)
    source = source_of(gym, [prompt], endpoint)
    try:
        if rule == "stop":
            with pytest.raises(ValueError, match="nemo_gym.prefix_mismatch=stop: rows.jsonl:1: "):
                run_groups(source, [[Request.of(prompt, 1)]])
            return
        ((completion,),) = run_groups(source, [[Request.of(prompt, 1)]])
        if rule == "drop":
            assert completion.trained == 0 and completion.columns["env_reward"] is None
            assert sum("do not continue" in line for line in gym.lines) == 1
        else:
            assert completion.columns["branches"] == 1 and completion.trained == 2
            assert [branch.trained for branch in completion.branches] == ([2] if rule == "branch" else [])
    finally:
        gym.close()


def test_closing_the_source_cancels_running_episodes(replay, endpoint):
    replay.add("/run", "q", reply_of(item("1")))
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    gym = client(replay)
    source = source_of(gym, [prompt], endpoint)
    replay.faults.extend([LATE] * 4)
    futures = source.start([[Request.of(prompt, i) for i in range(4)]])
    time.sleep(0.2)
    started = time.monotonic()
    source.close()
    gym.close()
    assert time.monotonic() - started < 20
    assert futures[0].cancelled()


# settings --------------------------------------------------------------------------------------------------------


def test_nemo_gym_config_rejects():
    for settings, message in [
        ({"auto_start": True}, "nemo_gym.auto_start=True: .*--nemo-gym.config-paths"),
        ({"auto_start": True, "config_paths": ("a",), "head_port": 1}, "nemo_gym.head_port=1: "),
        ({"config_paths": ("a.yaml",)}, "nemo_gym.config_paths, .*--nemo-gym.auto-start"),
        ({"server_timeout": 0.0}, "nemo_gym.server_timeout=0.0"),
        ({"head_port": 70000}, "nemo_gym.head_port=70000"),
        ({"run_timeout": 0.0}, "nemo_gym.run_timeout=0.0"),
        ({"retries": -1}, "nemo_gym.retries=-1"),
        ({"max_connections": 0}, "nemo_gym.max_connections=0"),
        ({"endpoint_port": 5}, "nemo_gym.endpoint_port=5: has no effect"),
        ({"endpoint_port": 70000, "multi_turn": True}, "nemo_gym.endpoint_port=70000"),
        ({"datasets": (), "multi_turn": True}, "nemo_gym.multi_turn=True: has no effect"),
    ]:
        with pytest.raises(ValueError, match=message):
            NemoGymConfig(**{"datasets": ("rows.jsonl",), **settings})


def test_check_nemo_gym_rejects():
    cfg, verify = NemoGymConfig(datasets=("rows.jsonl",), multi_turn=True), ("nemo_gym:verify",)
    check_nemo_gym(cfg, reward_funcs=("env",))
    for settings, message in [(cfg, "--reward-funcs env"), (NemoGymConfig(), "--nemo-gym.datasets")]:
        with pytest.raises(ValueError, match=f"reward_funcs=nemo_gym:verify: .*{message}"):
            check_nemo_gym(settings, reward_funcs=verify)


def test_the_port_of_the_endpoint():
    assert NemoGymConfig(datasets=("x",), multi_turn=True).policy_port == 11001
    assert NemoGymConfig(datasets=("x",), multi_turn=True, auto_start=True, config_paths=("a",)).policy_port == 0
    assert NemoGymConfig(datasets=("x",), multi_turn=True, endpoint_port=9).policy_port == 9
