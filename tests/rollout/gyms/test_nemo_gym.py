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
from rollout.gyms.gym_source import TurnChain, join_turns
from rollout.gyms.nemo_gym import (
    GymClient,
    RunSource,
    error_text,
    join_cookies,
    read_addresses,
    read_episode,
    response_of,
    set_up_rewards,
)
from rollout.gyms.options import NemoGymConfig, check_nemo_gym
from rollout.rewards.table import Rewards, load_rewards
from tests.rollout.gyms.nemo_replay import CLOSE, LATE, Replay

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


def item(prompt: list[int], ids: list[int] | None, text: str = "hm", **fields: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": [-0.5] * len(ids or [])}
    return {"type": "message", "role": "assistant", "content": content, **tokens, **fields}


def reply_of(*items: dict[str, Any], reward: Any = 1.0, **response: Any) -> dict[str, Any]:
    return {"reward": reward, "response": {"output": list(items), **response}}


def rewards_of(gym: GymClient, on_error: str = "stop") -> Rewards:
    rewards = load_rewards(["nemo_gym:verify"], on_error=on_error, log=lambda text: None)
    set_up_rewards(rewards, gym, on_error)
    return rewards


def read(reply: dict[str, Any], **settings: Any) -> Completion:
    return read_episode(reply, **{"prompt_ids": [1, 7, 9], "max_tokens": 64, "version": 4, **settings})


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
    assert [why in line for line in gym.lines if "422" in line] == [True]
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


def test_consecutive_turns_become_one_sequence_with_environment_tokens_masked():
    items = [item([10, 20], [30, 31]), item([10, 20, 30, 31, 100, 101, 102], [40, 41], text="done")]
    components = {"correctness": 1.0, "format": 0.5}
    completion = read(reply_of(*items, reward=0.5) | {"reward_components": components})
    assert completion.prompt_ids == [10, 20]
    assert completion.ids == [30, 31, 100, 101, 102, 40, 41]
    assert completion.mask == [True, True, False, False, False, True, True]
    assert completion.logps == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5, -0.5]
    assert completion.trained == 4
    assert completion.finish_reason == "stop"
    assert completion.text == "done"
    assert completion.versions == [(4, 4)]  # sampled tokens only
    assert completion.columns == {
        "env_reward": 0.5, "env_failed": 0.0, "num_turns": 2, "tool_calls": 0, "left_out_turns": 0,
        "reward_components": components,
    }  # fmt: skip


def test_the_recorded_episode_of_one_turn_keeps_its_ids_and_log_probs(recordings):
    reply = json.loads((recordings / "reasoning_gym_agent_run.json").read_text())["response"]
    completion = read(reply)
    assert completion.ids == [36, 731, 216, 35, 446, 216, 33, 2]
    assert completion.mask == [True] * 8
    assert completion.logps[0] == -1.3550559282302856
    assert len(completion.prompt_ids) == 44
    assert completion.messages == [{"role": "assistant", "content": "4 - 3 = 1"}]
    assert completion.columns["env_reward"] == 1 / 9


def test_a_turn_that_the_next_prompt_omits_is_not_trained(recordings):
    """SmolLM2's template omits tool calls: the second prompt continues the first prompt, not the call."""
    reply = json.loads((recordings / "single_tool_call_agent_run.json").read_text())["response"]
    completion = read(reply)
    assert completion.columns["left_out_turns"] == 1
    assert completion.columns["num_turns"] == 2
    assert completion.columns["tool_calls"] == 1
    assert len(completion.prompt_ids) == 71
    assert completion.ids[:3] == [504, 3947, 281] and len(completion.ids) == 16
    assert completion.finish_reason == "length"
    assert [message["role"] for message in completion.messages] == ["assistant", "tool", "assistant"]
    assert completion.messages[0]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_a_new_chain_starts_if_a_prompt_differs_by_a_token():
    turns = [
        TurnChain([1, 2], [3], [-1.0], [True]),
        TurnChain([1, 2, 3, 4], [5], [-1.0], [True]),
        TurnChain([1, 2, 3, 4, 6], [7], [-1.0], [True]),  # 5 came back as 6
        TurnChain([1, 2, 3, 4, 6, 7], [8], [-1.0], [True]),  # nothing in between
        TurnChain([1, 2, 3], [9], [-1.0], [True]),  # shorter than what was seen
    ]
    assert [(c.prompt_ids, c.ids, c.num_turns) for c in join_turns(turns)] == [
        ([1, 2], [3, 4, 5], 2),
        ([1, 2, 3, 4, 6], [7, 8], 2),
        ([1, 2, 3], [9], 1),
    ]


def test_a_long_episode_is_truncated_after_a_sampled_token():
    items = [item([1], [2, 3]), item([1, 2, 3, 50, 51, 52], [4, 5])]
    cut = read(reply_of(*items), max_tokens=4)
    assert (cut.ids, cut.mask, cut.finish_reason) == ([2, 3], [True, True], "length")
    whole = read(reply_of(*items), max_tokens=7)
    assert (len(whole.ids), whole.finish_reason) == (7, "stop")
    assert read(reply_of(item([1], [2]), incomplete_details={"reason": "max_output_tokens"})).finish_reason == "length"


def test_an_episode_without_tokens_keeps_its_reward_and_is_not_trained():
    for output in ([], [item([], [], text="") | {"generation_token_ids": None}]):
        completion = read(reply_of(*output, reward=0.25, incomplete_details={"reason": "max_output_tokens"}))
        assert completion.mask == [False] and completion.trained == 0
        assert completion.prompt_ids == [1, 7, 9]
        assert completion.columns["env_reward"] == 0.25


def test_read_episode_rejects():
    for reply, message in [
        ({"reward": 1.0}, "response: no output"),
        (reply_of(item([1], [2]), reward=None), "reward=None"),
        (reply_of(item([1], [2], generation_log_probs=[])), r"output\[0\]: token ids and log-probs"),
        (reply_of(item([], [2])), r"output\[0\]: token ids and log-probs"),
        (reply_of(item([1], [2], generation_log_probs=[0.5])), r"output\[0\]: invalid log-prob"),
        (reply_of(item([1], [2], generation_log_probs=[-(10**400)])), r"output\[0\]: invalid log-prob"),
        (reply_of(item([1], [300])), r"output\[0\]: .*vocabulary of 275"),
        (reply_of(item([1], [2.5])), r"output\[0\]: token ids and log-probs"),
        (reply_of(item([1], [float("inf")])), r"output\[0\]: token ids and log-probs"),
        (reply_of(item([1], [2], role=["assistant"])), r"output\[0\]: has no role"),
        (reply_of(item([1], [2], type="\x1b[31m" + "x" * 999)), r"output\[0\]: type=\\x1b\[31mx{10,60} is"),
        (reply_of("text"), r"output\[0\]: a str"),
        (reply_of(item([1], None)), "return_token_id_information: true"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(reply, vocab_size=275)


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


def source_of(gym: GymClient, prompts: list[Prompt], **settings: Any) -> RunSource:
    gym.connect(prompts, multi_turn=True)
    return RunSource(gym, SAMPLING, version=lambda: 4, **settings)


def test_episodes_return_in_order_and_every_request_has_the_sampling_settings(replay):
    prompts = [prompt_of(math_row(q, x=1), "reasoning_gym", i) for i, q in enumerate(("q", "r"))]
    for question, reward in (("q", 1.0), ("r", 0.5)):
        replay.add("/run", question, reply_of(item([1, 2], [3]), reward=reward))
    gym = client(replay, max_connections=3)
    source = source_of(gym, prompts)
    replay.faults.extend([0.3, 0.0, 0.2])
    groups = run_groups(source, [[Request.of(prompt, seed=2**63 + i) for i in range(3)] for prompt in prompts])
    source.close()
    gym.close()
    assert [[c.columns["env_reward"] for c in group] for group in groups] == [[1.0] * 3, [0.5] * 3]
    assert not source._running
    bodies = sorted(
        (body for _, body, _ in replay.requests), key=lambda b: (b["_ng_task_index"], b["_ng_rollout_index"])
    )
    assert [(b["_ng_task_index"], b["_ng_rollout_index"]) for b in bodies] == [
        (i, k) for i in range(2) for k in range(3)
    ]
    first = bodies[0]
    assert first["x"] == 1
    assert first["agent_ref"] == {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"}
    params = first["responses_create_params"]
    assert (params["temperature"], params["top_p"], params["max_output_tokens"]) == (1.0, 1.0, 64)
    assert json.loads(params["metadata"]["extra_body"]) == {"stop_token_ids": [2], "ignore_eos": True, "seed": 0}
    assert [json.loads(b["responses_create_params"]["metadata"]["extra_body"])["seed"] for b in bodies[:3]] == [0, 1, 2]


def test_a_row_may_set_shorter_turns_and_extra_parameters(replay):
    row = math_row("q")
    row["responses_create_params"] |= {
        "max_output_tokens": 16, "temperature": 0.0, "user": None,
        "metadata": {"extra_body": '{"min_p": 0.0, "seed": 1}', "chat_template_kwargs": "{}"},
    }  # fmt: skip
    prompt = prompt_of(row, "reasoning_gym")
    gym = client(replay)
    source = RunSource(gym, SAMPLING, version=lambda: 0, seeded=False)
    params = source.body(prompt, "agent", 5, 0)["responses_create_params"]
    gym.close()
    assert (params["max_output_tokens"], params["temperature"]) == (16, 1.0)
    assert "user" not in params
    assert params["metadata"]["chat_template_kwargs"] == "{}"
    styled = replace(prompt, settings={"enable_thinking": False})
    metadata = source.body(styled, "agent", 5, 0)["responses_create_params"]["metadata"]
    assert json.loads(metadata["chat_template_kwargs"]) == {"enable_thinking": False}
    extra = json.loads(params["metadata"]["extra_body"])
    assert extra == {"min_p": 0.0, "seed": 1, "stop_token_ids": [2], "ignore_eos": True}


def test_a_failed_episode_is_not_trained_and_logged_once(replay):
    replay.add("/run", "q", reply_of(item([1, 2], [3])))
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    for fault, why in ((500, "answered 500 (inner failure)"), (LATE, "did not answer within 0.5 s"), (CLOSE, "failed")):
        gym = client(replay, retries=0, run_timeout=0.5 if fault == LATE else 60.0)
        source = source_of(gym, [prompt])
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


def test_consecutive_failures_stop_the_run(replay, monkeypatch):
    monkeypatch.setattr("rollout.gyms.gym_source.MAX_FAILURES", 5)
    replay.add("/run", "q", reply_of(item([1, 2], [3]), item([1, 2, 4], [5, 6])))
    prompts = [prompt_of(math_row(question), "reasoning_gym") for question in ("q", "unknown")]
    gym = client(replay, retries=0, prefix_mismatch="drop")
    for prompt in prompts:  # dropped, rejected
        source = source_of(gym, [prompt])
        with pytest.raises(ValueError, match="nemo_gym: 5 consecutive episodes failed, .*rows.jsonl:1"):
            run_groups(source, [[Request.of(prompt, i) for i in range(5)]])
    replay.add("/run", "r", reply_of(item([1], None)))
    prompt = prompt_of(math_row("r"), "reasoning_gym")  # no episode can be trained on: stops immediately
    with pytest.raises(ValueError, match="return_token_id_information: true"):
        run_groups(source_of(gym, [prompt]), [[Request.of(prompt, 1)]])
    gym.close()


def test_prefix_mismatch_decides_about_a_prompt_that_does_not_continue(replay):
    for rule in ["last", "drop", "stop"]:
        replay.add("/run", "q", reply_of(item([1, 2], [3]), item([1, 2, 4], [5, 6])))
        prompt = prompt_of(math_row("q"), "reasoning_gym")
        gym = client(replay, prefix_mismatch=rule)
        source = source_of(gym, [prompt])
        try:
            if rule == "stop":
                with pytest.raises(ValueError, match="nemo_gym.prefix_mismatch=stop: rows.jsonl:1: "):
                    run_groups(source, [[Request.of(prompt, 1)]])
                continue
            ((completion,),) = run_groups(source, [[Request.of(prompt, 1)]])
            assert sum("the prompt of a turn" in line for line in gym.lines) == 1
            if rule == "last":
                assert (completion.prompt_ids, completion.ids) == ([1, 2, 4], [5, 6])
                assert completion.columns["env_reward"] == 1.0
                assert completion.columns["left_out_turns"] == 1
            else:
                assert completion.trained == 0
                assert completion.columns["env_reward"] is None
        finally:
            gym.close()


def test_closing_the_source_cancels_running_episodes(replay):
    replay.add("/run", "q", reply_of(item([1, 2], [3])))
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    gym = client(replay)
    source = source_of(gym, [prompt])
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
        ({"datasets": (), "multi_turn": True}, "nemo_gym.multi_turn=True: has no effect"),
    ]:
        with pytest.raises(ValueError, match=message):
            NemoGymConfig(**{"datasets": ("rows.jsonl",), **settings})


def test_check_nemo_gym_rejects():
    cfg = NemoGymConfig(datasets=("rows.jsonl",), multi_turn=True)
    good: dict[str, Any] = {
        "reward_funcs": ("env",), "engine": "vllm", "vllm_url": ("http://127.0.0.1:8000",), "vllm_port": 0,
        "lora_sync": False, "in_flight": False,
    }  # fmt: skip
    verify = {"reward_funcs": ("nemo_gym:verify",)}
    check_nemo_gym(cfg, **good)
    for settings, changes, message in [
        (cfg, verify, "reward_funcs=nemo_gym:verify: .*--reward-funcs env"),
        (cfg, {"engine": "local"}, "rollout.engine=local"),
        (cfg, {"vllm_url": (), "vllm_port": 0}, "vllm.port=0"),
        (cfg, {"lora_sync": True}, "sync.backend=lora"),
        (cfg, {"in_flight": True}, "async_prefetch=True"),
        (cfg, {"stop": ("</a>",)}, "stop=</a>"),
        (NemoGymConfig(), verify, "reward_funcs=nemo_gym:verify: .*--nemo-gym.datasets"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_nemo_gym(settings, **good | changes)
    started = NemoGymConfig(datasets=("rows.jsonl",), multi_turn=True, auto_start=True, config_paths=("a.yaml",))
    check_nemo_gym(started, **good | {"vllm_url": (), "vllm_port": 0})  # the run chooses the port
