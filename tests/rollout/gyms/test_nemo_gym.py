"""NeMo Gym: recorded exchanges with the real servers, played back, and everything a server can do wrong."""

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
from rollout.gyms.gym_source import Turns, chains
from rollout.gyms.nemo_gym import (
    GymClient,
    RunSource,
    error_text,
    join_cookies,
    read_episode,
    read_places,
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
    said: list[str] = []
    gym = GymClient(
        NemoGymConfig(**{"datasets": ("rows.jsonl",), "head_port": replay.port, "server_timeout": 5.0, **settings}),
        said.append,
    )
    gym.said = said
    return gym


def prompt_of(row: dict[str, Any], server: str, index: int = 0) -> Prompt:
    columns = nemo_gym_columns(row, server, index)
    columns["nemo_gym_ref"]["source"] = f"rows.jsonl:{index + 1}"
    messages = columns.pop("prompt")
    return Prompt(source=f"rows.jsonl:{index + 1}", prompt=messages, ids=[1, 7, 9], columns=columns)


def said(text: str) -> Completion:
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


def test_recorded_verifications_come_back_in_order_with_a_session_each(recordings):
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
        table = rewards_of(gym).score(prompts, [said(text) for text in texts])
        gym.loop.run(gym.post(f"http://127.0.0.1:{replay.port}/seed_session", {}, "counter"))  # another row, later
        gym.close()
    assert [value for (value,) in table.values] == [1.0, 0.0, 1.0] * 4
    verified = [(body, cookies) for route, body, cookies in replay.requests if route == "/verify"]
    assert (len(verified), replay.sessions) == (12, 13)
    # No session is shared between rows, and the client keeps none.
    assert {cookies for _, cookies in verified} == {f"session={n}" for n in range(1, 13)}
    assert not any(cookies for route, _, cookies in replay.requests if route == "/seed_session")
    assert join_cookies("s=old; t=1", ["s=a.b=; path=/; httponly", "u=2"]) == "s=a.b=; t=1; u=2"
    sent = next(body for body, _ in verified if body.get("expected_count") == 6)
    assert sent["responses_create_params"] == counter["responses_create_params"]
    assert sent["response"]["output"][0]["content"] == [{"type": "output_text", "text": "done", "annotations": []}]


def test_a_system_prompt_of_ours_reaches_the_verifier_and_other_rows_get_no_reward(replay):
    replay.add("/verify", [{"content": "Think."}, {"content": "q"}], {"reward": 0.25}, said="a")
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    prompt = replace(prompt, prompt=[{"role": "system", "content": "Think."}, *prompt.prompt])
    other = Prompt(source="sums.jsonl:1", prompt=[{"role": "user", "content": "x"}], ids=[1], columns={"answer": "4"})
    gym = client(replay)
    gym.connect([prompt, other], multi_turn=False)
    table = rewards_of(gym).score([prompt, other], [said("a"), said("a")])
    gym.close()
    assert (table.values, table.failed) == ([[0.25], [None]], 0)


def test_a_row_that_is_refused_costs_its_own_reward_or_stops_the_run_by_name(replay):
    replay.add("/verify", "q", {"reward": 1.0}, said="a")
    prompts = [prompt_of(math_row(question), "reasoning_gym", i) for i, question in enumerate(("q", "unknown", "q"))]
    gym = client(replay)
    gym.connect(prompts, multi_turn=False)
    table = rewards_of(gym, "none").score(prompts, [said("a")] * 3)
    assert table.values == [[1.0], [None], [1.0]]
    assert table.failed == 1
    why = "rows.jsonl:2: reasoning_gym/verify answered 422 (body.question: Field required)"
    assert [line for line in gym.said if "422" in line] == [f"NeMo Gym: {why}; such completions get no reward"]
    rewards_of(gym, "none").score(prompts, [said("a")] * 3)
    assert sum("422" in line for line in gym.said) == 1
    with pytest.raises(ValueError) as caught:
        rewards_of(gym, "stop").score(prompts, [said("a")] * 3)
    gym.close()
    assert why in str(caught.value)
    assert "reward_funcs=nemo_gym:verify" in str(caught.value)
    assert sum(route == "/verify" and body["response"] is not None for route, body, _ in replay.requests) >= 6


@pytest.mark.parametrize("fault", [500, CLOSE], ids=["500", "closed"])
def test_a_server_that_fails_once_is_asked_again_with_a_new_session(replay, fault):
    replay.add("/verify", "q", {"reward": 1.0}, said="a")
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    gym = client(replay)
    gym.connect([prompt], multi_turn=False)
    replay.faults.extend([None, fault])
    table = rewards_of(gym, "none").score([prompt], [said("a")])
    gym.close()
    assert table.values == [[1.0]]
    assert replay.sessions == 2


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (500, "reasoning_gym/verify answered 500 (inner failure)"),
        (b"<html>", "reasoning_gym/verify answered b'<html>', which is not an object"),
        (b'{"reward": NaN}', "reward=nan: is not a finite number"),
        (b'{"reward": "1"}', "reward='1': is not a finite number"),
        (LATE, "reasoning_gym/verify has not answered for 2 s"),
    ],
    ids=["500", "garbage", "nan", "text", "late"],
)
def test_what_a_server_does_wrong_is_said_once_and_gives_no_reward(replay, fault, says):
    replay.add("/verify", "q", {"reward": 1.0}, said="a")
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    gym = client(replay, retries=0, verify_timeout=2.0 if fault == LATE else 60.0)
    gym.connect([prompt], multi_turn=False)
    replay.faults.extend([None, fault])
    table = rewards_of(gym, "none").score([prompt], [said("a")])
    gym.close()
    assert (table.values, table.failed) == ([[None]], 1)
    assert gym.said[-1] == f"NeMo Gym: rows.jsonl:1: {says}; such completions get no reward"


def test_many_rows_are_verified_at_a_time_but_no_more_than_allowed(replay):
    replay.add("/verify", "q", {"reward": 1.0}, said="a")
    prompts = [prompt_of(math_row("q"), "reasoning_gym", i) for i in range(12)]
    gym = client(replay, max_connections=4)
    gym.connect(prompts, multi_turn=False)
    replay.faults.extend([0.1] * 24)
    table = rewards_of(gym).score(prompts, [said("a")] * 12)
    gym.close()
    assert table.values == [[1.0]] * 12
    assert replay.most_at_once == 4


def test_the_reward_without_the_trainer_is_a_sentence():
    rewards = load_rewards(["nemo_gym:verify"])
    with pytest.raises(ValueError, match="see --nemo-gym.datasets"):
        rewards.score([prompt_of(math_row("q"), "reasoning_gym")], [said("a")])


# discovery -------------------------------------------------------------------------------------------------------


def test_servers_are_found_whether_the_configuration_is_wrapped_once_or_twice(replay):
    import yaml

    once = yaml.safe_dump(replay.config())
    for text in (once, json.dumps(once)):
        places = read_places(text, "http://h:1", "10.0.0.7")
        assert places.servers["reasoning_gym"] == f"http://10.0.0.7:{replay.port}"  # it listens everywhere; we go there
        assert places.agents["reasoning_gym_simple_agent"] == (f"http://10.0.0.7:{replay.port}", "reasoning_gym")
        assert "policy_model" not in {**places.servers, **places.agents}
    with pytest.raises(ValueError, match="http://h:1: is not the head server of NeMo Gym"):
        read_places("[1, 2", "http://h:1", "h")


PLACES = [  # server of the dataset, of the row -> its resource server, its agent, or what is said
    ("a", None, "a", "a_agent"),
    ("a_agent", None, "a", "a_agent"),
    (None, "a_agent", "a", "a_agent"),
    (None, "a", "a", "a_agent"),
    ("b", "a_agent", "b", ValueError("agents b_agent, c_agent all have the server b; write PATH@AGENT")),
    ("b", "c_agent", "b", "c_agent"),
    ("nope", "a_agent", ValueError("knows no such resource server"), ValueError("knows no such agent")),
]


def test_a_rows_server_and_agent_are_the_datasets_or_else_its_own(replay):
    def inner(port: int, of: str | None = None) -> dict[str, Any]:
        fields = {"host": "127.0.0.1", "port": port} | ({"resources_server": {"name": of}} if of else {})
        return {"responses_api_agents" if of else "resources_servers": {"any": fields}}

    replay.places = {"a": inner(1), "b": inner(2), "a_agent": inner(3, "a")}
    replay.places |= {"b_agent": inner(4, "b"), "c_agent": inner(5, "b")}
    gym = client(replay)
    gym.connect([], multi_turn=False)
    for server, name, resource, agent in PLACES:
        ref = {"server": server, "name": name}
        for found, wanted in ((gym.server_of, resource), (gym.agent_of, agent)):
            if isinstance(wanted, ValueError):
                with pytest.raises(ValueError, match=str(wanted)):
                    found(ref)
            else:
                assert found(ref)[0] == wanted, ref
    gym.close()


def test_a_gym_that_is_not_there_or_lacks_a_server_stops_the_run_before_it_begins(replay):
    prompt = prompt_of(math_row("q"), "reasoning_gim")
    gym = client(replay)
    with pytest.raises(ValueError, match="rows.jsonl:1: .*@reasoning_gim: .* did you mean 'reasoning_gym'"):
        gym.connect([prompt], multi_turn=False)
    gym.close()
    replay.server.shutdown()
    replay.server.server_close()
    gym = client(replay, server_timeout=0.5)
    with pytest.raises(ValueError, match=f"nemo_gym.head_port={replay.port}: the gym's head server at .* is not ready"):
        gym.connect([prompt], multi_turn=False)
    gym.close()


def test_a_refusal_is_told_in_few_words():
    detail = [{"loc": ["body", "question"], "msg": "Field required"}] * 4
    assert error_text(json.dumps({"detail": detail}).encode()) == "body.question: Field required and 3 more"
    assert error_text(b'"inner\\nfailure"') == "inner failure"
    assert error_text(b"") == "no reason given"


# episodes --------------------------------------------------------------------------------------------------------


def test_turns_that_continue_each_other_are_one_sequence_with_the_environments_tokens_masked():
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
    assert completion.versions == [(4, 4)]  # those that the model made
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


def test_the_recorded_tool_call_is_not_in_the_next_prompt_so_only_the_answer_is_trained(recordings):
    """SmolLM2's template leaves tool calls out: the second prompt goes on after the first one, not after the call."""
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


def test_a_chain_is_cut_wherever_a_prompt_differs_by_a_token():
    turns = [
        Turns([1, 2], [3], [-1.0], [True]),
        Turns([1, 2, 3, 4], [5], [-1.0], [True]),
        Turns([1, 2, 3, 4, 6], [7], [-1.0], [True]),  # 5 came back as 6
        Turns([1, 2, 3, 4, 6, 7], [8], [-1.0], [True]),  # nothing in between
        Turns([1, 2, 3], [9], [-1.0], [True]),  # shorter than what was seen
    ]
    assert [(c.prompt_ids, c.ids, c.num_turns) for c in chains(turns)] == [
        ([1, 2], [3, 4, 5], 2),
        ([1, 2, 3, 4, 6], [7, 8], 2),
        ([1, 2, 3], [9], 1),
    ]


def test_an_episode_over_the_limit_is_cut_and_ends_with_a_token_of_the_model():
    items = [item([1], [2, 3]), item([1, 2, 3, 50, 51, 52], [4, 5])]
    cut = read(reply_of(*items), max_tokens=4)
    assert (cut.ids, cut.mask, cut.finish_reason) == ([2, 3], [True, True], "length")
    whole = read(reply_of(*items), max_tokens=7)
    assert (len(whole.ids), whole.finish_reason) == (7, "stop")
    assert read(reply_of(item([1], [2]), incomplete_details={"reason": "max_output_tokens"})).finish_reason == "length"


def test_an_episode_in_which_the_model_said_nothing_keeps_its_reward_and_trains_nothing():
    for output in ([], [item([], [], text="") | {"generation_token_ids": None}]):
        completion = read(reply_of(*output, reward=0.25, incomplete_details={"reason": "max_output_tokens"}))
        assert completion.mask == [False] and completion.trained == 0
        assert completion.prompt_ids == [1, 7, 9]
        assert completion.columns["env_reward"] == 0.25


def test_an_episode_that_makes_no_sense_is_refused():
    for reply, says in [
        ({"reward": 1.0}, "response: has no output"),
        (reply_of(item([1], [2]), reward=None), "reward=None: is not a finite number"),
        (reply_of(item([1], [2], generation_log_probs=[])), "output[0]: its token ids and log-probs do not match"),
        (reply_of(item([], [2])), "output[0]: its token ids and log-probs do not match"),
        (reply_of(item([1], [2], generation_log_probs=[0.5])), "output[0]: has an invalid log-prob"),
        (reply_of(item([1], [300])), "output[0]: an id outside the vocabulary of 275; is it another model's?"),
        (reply_of("text"), "output[0]: is a str, not an object"),
        (reply_of(item([1], None)), "set return_token_id_information: true"),
    ]:
        with pytest.raises(ValueError) as caught:
            read(reply, vocab_size=275)
        assert says in str(caught.value)


def test_messages_go_to_the_verifier_as_items_of_a_response():
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


def test_episodes_of_a_group_come_back_in_order_with_our_sampling_in_every_request(replay):
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
    assert not source._episodes._running
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


def test_a_row_may_ask_for_shorter_turns_and_for_more_of_the_model_server(replay):
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


def test_an_episode_that_fails_costs_its_own_row_and_is_said_once(replay):
    replay.add("/run", "q", reply_of(item([1, 2], [3])))
    prompt = prompt_of(math_row("q"), "reasoning_gym")
    for fault, why in ((500, "answered 500 (inner failure)"), (LATE, "has not answered for 0.5 s"), (CLOSE, "failed")):
        gym = client(replay, retries=0, run_timeout=0.5 if fault == LATE else 60.0)
        source = source_of(gym, [prompt])
        for _ in range(2):
            replay.faults.append(fault)
            ((completion,),) = run_groups(source, [[Request.of(prompt, 1)]])
            assert completion.mask == [False] and completion.trained == 0
            assert completion.columns["env_reward"] is None
            assert completion.columns["env_failed"] == 1.0
            assert completion.prompt_ids == [1, 7, 9]
        assert sum(why in line for line in gym.said) == 1
        if fault != LATE:
            ((good,),) = run_groups(source, [[Request.of(prompt, 1)]])
            assert good.columns["env_reward"] == 1.0
        gym.close()


def test_nothing_but_failures_stops_the_run(replay, monkeypatch):
    monkeypatch.setattr("rollout.gyms.gym_source.GIVE_UP", 5)
    replay.add("/run", "q", reply_of(item([1, 2], [3]), item([1, 2, 4], [5, 6])))
    prompts = [prompt_of(math_row(question), "reasoning_gym") for question in ("q", "unknown")]
    gym = client(replay, retries=0, prefix_mismatch="drop")
    for prompt in prompts:  # dropped, refused
        source = source_of(gym, [prompt])
        with pytest.raises(ValueError, match="nemo_gym: 5 episodes in a row have failed, the last one rows.jsonl:1"):
            run_groups(source, [[Request.of(prompt, i) for i in range(5)]])
    replay.add("/run", "r", reply_of(item([1], None)))
    prompt = prompt_of(math_row("r"), "reasoning_gym")  # no episode can be trained on: it stops at once
    with pytest.raises(ValueError, match="set return_token_id_information: true in the gym's model server"):
        run_groups(source_of(gym, [prompt]), [[Request.of(prompt, 1)]])
    gym.close()


def test_a_prompt_that_does_not_continue_is_treated_as_configured(replay):
    for rule in ["last", "drop", "stop"]:
        replay.add("/run", "q", reply_of(item([1, 2], [3]), item([1, 2, 4], [5, 6])))
        prompt = prompt_of(math_row("q"), "reasoning_gym")
        gym = client(replay, prefix_mismatch=rule)
        source = source_of(gym, [prompt])
        try:
            if rule == "stop":
                with pytest.raises(
                    ValueError, match="nemo_gym.prefix_mismatch=stop: rows.jsonl:1: the prompt of a turn"
                ):
                    run_groups(source, [[Request.of(prompt, 1)]])
                continue
            ((completion,),) = run_groups(source, [[Request.of(prompt, 1)]])
            assert sum("not the turns before it" in line for line in gym.said) == 1
            if rule == "last":
                assert (completion.prompt_ids, completion.ids) == ([1, 2, 4], [5, 6])
                assert completion.columns["env_reward"] == 1.0
                assert completion.columns["left_out_turns"] == 1
            else:
                assert completion.trained == 0
                assert completion.columns["env_reward"] is None
        finally:
            gym.close()


def test_closing_the_source_ends_what_runs_at_once(replay):
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


def test_settings_that_cannot_be_are_refused():
    for settings, says in [
        ({"auto_start": True}, "nemo_gym.auto_start=True: needs to know which servers; name the gym's YAML files with"),
        ({"auto_start": True, "config_paths": ("a",), "head_port": 1}, "there is no head server then; leave it out"),
        ({"config_paths": ("a.yaml",)}, "have no effect on servers that run already; leave them out, or give"),
        ({"server_timeout": 0.0}, "nemo_gym.server_timeout=0.0: must be above 0 and finite"),
        ({"head_port": 70000}, "nemo_gym.head_port=70000: must be between 1 and 65535"),
        ({"run_timeout": 0.0}, "nemo_gym.run_timeout=0.0: must be above 0 and finite"),
        ({"retries": -1}, "nemo_gym.retries=-1: must be 0 or more"),
        ({"max_connections": 0}, "nemo_gym.max_connections=0: must be 1 or more"),
        ({"datasets": (), "multi_turn": True}, "nemo_gym.multi_turn=True: has no effect without rows of the gym"),
    ]:
        with pytest.raises(ValueError) as caught:
            NemoGymConfig(**{"datasets": ("rows.jsonl",), **settings})
        assert says in str(caught.value)


def test_combinations_that_cannot_work_are_refused():
    for changes, says in [
        ({"reward_funcs": ("nemo_gym:verify",)}, "verified by its agent, and would be counted twice"),
        ({"engine": "local"}, "rollout.engine=local: the agents of nemo_gym.multi_turn ask a vLLM server"),
        ({"vllm_url": (), "vllm_port": 0}, "vllm.port=0: the gym's model server must know our vLLM server beforehand"),
        ({"lora_sync": True}, "sync.backend=lora: every version of an adapter has another name"),
        ({"in_flight": True}, "async_prefetch=True: new weights end the requests of the gym's agents"),
        ({"stop": ("</a>",)}, "stop=</a>: does not reach the gym's agents"),
    ]:
        cfg = NemoGymConfig(datasets=("rows.jsonl",), multi_turn=True)
        good: dict[str, Any] = {
            "reward_funcs": ("env",), "engine": "vllm", "vllm_url": ("http://127.0.0.1:8000",), "vllm_port": 0,
            "lora_sync": False, "in_flight": False,
        }  # fmt: skip
        check_nemo_gym(cfg, **good)
        with pytest.raises(ValueError) as caught:
            check_nemo_gym(cfg, **good | changes)
        assert says in str(caught.value)
    with pytest.raises(ValueError, match="reward_funcs=nemo_gym:verify: needs rows of the gym"):
        check_nemo_gym(NemoGymConfig(), **good | {"reward_funcs": ("nemo_gym:verify",)})
    started = NemoGymConfig(datasets=("rows.jsonl",), multi_turn=True, auto_start=True, config_paths=("a.yaml",))
    check_nemo_gym(started, **good | {"vllm_url": (), "vllm_port": 0})  # the run tells it the port
