"""The endpoint over the in-process engine: exact ids, branches, tool calls, protocols, streams and errors."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rollout.engine import Completion, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.episodes.endpoint import ArrivingRequests, Endpoint
from rollout.episodes.session import Session, UnusableError
from rollout.gyms.gym_source import EpisodeError
from tests.entry import ROOT
from tests.rollout.scripted_engine import ScriptedEngine, tiny_tokenizer

SAMPLING = Sampling(max_tokens=200, stop_ids=(2,), for_training=True)
WEATHER = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '[weather(city="SF")]'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def play(endpoint: Endpoint, *episodes: Callable[[httpx.AsyncClient], Awaitable[Any]], sampling: Sampling = SAMPLING):
    """Run episodes, each with a client of its own session; return (session, what the episode returned) of each."""

    async def one(number: int) -> tuple[Session, Any]:
        with endpoint.session(sampling, seed=number) as (session, key):
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=endpoint.url, headers=headers, timeout=60) as client:
                return session, await episodes[number](client)

    async def everything() -> list[tuple[Session, Any]]:
        return await asyncio.gather(*map(one, range(len(episodes))))

    future = endpoint.loop.start(everything())
    while not future.done():
        endpoint.advance()
    return future.result()


@pytest.fixture
def scripted(monkeypatch):
    """scripted(reply) -> an endpoint whose model answers reply(text so far, seed)."""
    monkeypatch.setattr("rollout.episodes.endpoint.POLL_S", 0.01)
    opened = []

    def make(reply: Callable[[str, int], str], port: int = 0, **options: Any) -> Endpoint:
        engine = ScriptedEngine(reply)
        opened.append(Endpoint(engine, engine.tokenizer, **options))
        opened[-1].open(port)
        return opened[-1]

    yield make
    for endpoint in opened:
        endpoint.close()
        endpoint.close()  # may be called twice


def trained_ids(completion: Completion) -> list[int]:
    mask = completion.mask or [True] * len(completion.ids)
    return [token for token, sampled in zip(completion.ids, mask, strict=True) if sampled]


def test_trained_ids_are_sampled_ids_in_many_conversations(make_model, monkeypatch):
    """A random model samples any bytes, which clients get as text: tokenised again, they would be other ids."""
    monkeypatch.setattr("rollout.episodes.endpoint.POLL_S", 0.01)
    tokenizer = tiny_tokenizer()
    engine = LocalEngine(make_model(vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer)
    sampled: list[Completion] = []
    batch_sizes, stream = [], engine.stream

    def recorded(*args):
        for ended in stream(*args):
            sampled.extend(completion for _, completion in ended)
            batch_sizes.append(len(engine._scheduler.conversations))
            yield ended

    engine.stream = recorded

    def episode(number: int):
        async def run(client):
            messages = [user(f"{number}?")]
            for turn in range(3):
                reply = await client.post(
                    "/chat/completions", json={"messages": messages, "max_tokens": 2 + number % 3 + turn}
                )
                messages += [reply.json()["choices"][0]["message"], user(f"and {turn}?")]

        return run

    endpoint = Endpoint(engine, tokenizer)
    endpoint.open()
    try:
        results = play(endpoint, *map(episode, range(24)))
    finally:
        endpoint.close()
    by_prompt = {(*c.prompt_ids, -1, *c.ids): c for c in sampled}
    assert len(sampled) == 24 * 3
    retokenised = 0
    for session, _ in results:
        whole = session.completion([1], {})
        assert whole.columns == {"num_turns": 3, "tool_calls": 0, "branches": 0} and whole.branches == ()
        turns = [by_prompt.pop((*t.completion.prompt_ids, -1, *t.completion.ids)) for t in session.turns]
        assert trained_ids(whole) == [token for turn in turns for token in turn.ids]
        position = len(whole.prompt_ids)
        for turn in turns:  # each was sampled after exactly the ids before it
            context = whole.prompt_ids + whole.ids
            start = next(i for i in range(position, len(context) + 1) if context[:i] == turn.prompt_ids)
            assert context[start : start + len(turn.ids)] == turn.ids
            assert whole.logps[start - len(whole.prompt_ids) :][: len(turn.ids)] == turn.logps
            position = start + len(turn.ids)
            text = tokenizer.decode(turn.ids, skip_special_tokens=True)
            retokenised += tokenizer(text, add_special_tokens=False)["input_ids"] != turn.ids
        (expected,) = engine.logps([(whole.prompt_ids, whole.ids)], temperature=1.0)
        gaps = [abs(a - b) for a, b, m in zip(expected, whole.logps, whole.mask, strict=True) if m]
        assert max(gaps) < 1e-3
    assert not by_prompt and retokenised > 24  # so a second tokenisation would have changed what is trained


def test_requests_join_a_running_batch(make_model, monkeypatch):
    monkeypatch.setattr("rollout.episodes.endpoint.POLL_S", 0.01)
    tokenizer = tiny_tokenizer()
    engine = LocalEngine(make_model(vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer)
    calls, stream = [], engine.stream
    engine.stream = lambda *args: calls.append(1) or stream(*args)

    async def long(client):
        await client.post("/completions", json={"prompt": [5, 6], "max_tokens": 60})

    async def short(client):
        for _ in range(3):
            await client.post("/completions", json={"prompt": [7, 8], "max_tokens": 3})

    endpoint = Endpoint(engine, tokenizer)
    endpoint.open()
    try:
        play(endpoint, long, short, sampling=Sampling(max_tokens=300, for_training=True))
    finally:
        endpoint.close()
    assert len(calls) == 1


def test_requests_with_other_settings_are_not_delayed_forever():
    """An agent that always requests another turn while its batch is sampled must not starve one with a stop string."""
    sampled: list[tuple[str, ...]] = []

    class Engine:
        def stream(self, requests, sampling, more):
            count = 0
            while requests and len(sampled) < 9:
                sampled.append(sampling.stop)
                arriving.submit(Request(prompt_ids=[1], seed=0), SAMPLING)
                yield [(count + i, None) for i in range(len(requests))]
                count, requests = count + len(requests), more()

    arriving = ArrivingRequests(Engine())
    arriving.submit(Request(prompt_ids=[1], seed=0), SAMPLING)
    other = arriving.submit(Request(prompt_ids=[1], seed=0), replace(SAMPLING, stop=("END",)))
    arriving.sample(0.0)
    arriving.sample(0.0)
    assert other.done() and sampled == [(), ("END",)]


def test_a_longer_request_waits_until_the_cache_can_grow(make_model):
    tokenizer = tiny_tokenizer()
    engine = LocalEngine(make_model(vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer)
    from rollout.engine import Request

    late = [[Request(prompt_ids=[3] * 300, seed=1, max_tokens=9)], []]
    stream = engine.stream(
        [Request(prompt_ids=[5, 6], seed=0, max_tokens=4)], SAMPLING, lambda: late.pop(0) if late else []
    )
    assert {i: len(c.ids) <= 9 for ended in stream for i, c in ended} == {0: True, 1: True}


def test_rewritten_history_begins_a_branch_and_every_token_is_trained_once(scripted):
    endpoint = scripted(lambda text, seed: f"s{text.count('assistant')}")

    async def episode(client):
        async def ask(*messages):
            reply = await client.post("/chat/completions", json={"messages": messages})
            return reply.json()["choices"][0]["message"]

        one = await ask(user("a"))
        two = await ask(user("a"), one, user("b"))
        await ask(user("a"), one, user("b"), two, user("c"))
        await ask(user("a"), one, user("B"))  # a rewritten message: the branch shares the first turn
        await ask(user("a"), {"role": "assistant", "content": "mine"}, user("b"))  # a rewritten answer
        await ask(user("other agent"))

    ((session, _),) = play(endpoint, episode)
    whole = session.completion([1], {"x": 1})
    assert whole.columns == {"x": 1, "num_turns": 6, "tool_calls": 0, "branches": 3}
    parts = [whole, *whole.branches]
    sampled = sorted(turn.completion.ids for turn in session.turns)
    assert sorted(sum(map(trained_ids, parts), [])) == sorted(sum(sampled, []))
    texts = [tiny_tokenizer().decode(part.prompt_ids + part.ids) for part in parts]
    assert texts[0].count("<|im_start|>") == 2 and "other agent" in texts[0]  # the branch of the last turn
    first, second, third = texts[1:]
    assert first.endswith("c<|im_end|>\n<|im_start|>assistant\ns3<|im_end|>")
    assert "s1<|im_end|>" in second and trained_ids(whole.branches[1]) == session.turns[3].completion.ids
    assert "mine" in third and "s1<" not in third


def test_tool_calls_in_all_protocols(scripted):
    """One conversation in each protocol: a call, its result, and an answer that continues the sampled ids."""
    endpoint = scripted(lambda text, seed: "sunny" if "tool" in text else CALL, tool_format="pythonic")

    async def chat(client):
        body = {"messages": [user("SF?")], "tools": TOOLS, "logprobs": True}
        first = (await client.post("/chat/completions", json=body)).json()["choices"][0]
        assert first["finish_reason"] == "tool_calls" and first["message"]["content"] is None
        (call,) = first["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "SF"}'} and len(call["id"]) == 9
        assert [entry["token"] for entry in first["logprobs"]["content"]][-1] == "<|im_end|>"
        body["messages"] += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "18"}]
        reply = (await client.post("/chat/completions", json=body)).json()
        assert reply["usage"]["completion_tokens"] == len("sunny") + 1
        return reply["choices"][0]["message"]["content"]

    async def responses(client):
        tools = [{"type": "function", **WEATHER, "strict": True}]
        body = {"input": "SF?", "instructions": "Be brief.", "tools": tools}
        first = (await client.post("/responses", json=body)).json()
        (item,) = first["output"]
        assert item["type"] == "function_call" and item["arguments"] == '{"city": "SF"}', first
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "18"}
        items = [user("SF?"), {key: item[key] for key in ("type", "call_id", "name", "arguments")}, result]
        whole = (await client.post("/responses", json=body | {"input": items})).json()
        ending = body | {"previous_response_id": first["id"], "input": [result]}
        assert (await client.post("/responses", json=ending)).json()["output"][0]["content"] == whole["output"][0][
            "content"
        ]
        return whole["output"][0]["content"][0]["text"]

    async def anthropic(client):
        tools = [{"name": "weather", "input_schema": {"type": "object"}}]
        body = {"messages": [user("SF?")], "system": "Be brief.", "tools": tools, "max_tokens": 64}
        key = client.headers.pop("authorization").removeprefix("Bearer ")
        client.headers["x-api-key"] = key
        first = (await client.post("/messages", json=body)).json()
        assert first["stop_reason"] == "tool_use" and first["content"][-1]["input"] == {"city": "SF"}
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][-1]["id"],
            "content": [{"type": "text", "text": "18"}],
        }
        body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        assert (await client.post("/messages/count_tokens", json=body)).json()["input_tokens"] > 40
        return (await client.post("/messages", json=body)).json()["content"][0]["text"]

    results = play(endpoint, chat, responses, anthropic)
    assert [text for _, text in results] == ["sunny"] * 3
    for session, _ in results:
        whole = session.completion([1], {})
        retry = int(len(session.turns) == 3)  # of the turn after previous_response_id
        assert whole.columns == {"num_turns": 2 + retry, "tool_calls": 1, "branches": retry}
        assert [message["role"] for message in whole.messages] == ["assistant", "tool", "assistant"] or retry
        assert CALL in tiny_tokenizer().decode(whole.prompt_ids + whole.ids)


def test_a_template_that_drops_thoughts_keeps_the_sampled_ids(scripted):
    """Qwen3's template shows earlier turns without their thoughts; the next turn still follows the sampled ids."""
    endpoint = scripted(lambda text, seed: f"<think>\nhm\n</think>\n\n{text.count('assistant')}")
    endpoint.model.tokenizer = copy.deepcopy(endpoint.model.tokenizer)
    endpoint.model.tokenizer.chat_template = (ROOT / "data" / "templates" / "qwen3.jinja").read_text()

    async def episode(client):
        messages = [user("1")]
        for text in ("2", "3"):
            reply = await client.post("/chat/completions", json={"messages": messages})
            messages += [reply.json()["choices"][0]["message"], user(text)]

    ((session, _),) = play(endpoint, episode)
    whole = session.completion([1], {})
    assert whole.columns["branches"] == 0 and tiny_tokenizer().decode(whole.ids).count("<think>") == 2


def test_the_tokenizers_response_template_parses_calls(scripted):
    tokenizer = ScriptedEngine(lambda text, seed: "").tokenizer
    endpoint = scripted(lambda text, seed: "x")
    endpoint.model._parse = None  # as if the tokenizer had a response_template
    parsed = {"content": "so", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "SF"}}}]}
    seen = []
    endpoint.model.tokenizer = type("Tokenizer", (), {
        "all_special_ids": tokenizer.all_special_ids,
        "parse_response": lambda self, ids, prefix, tools: seen.append((ids, prefix, tools)) or parsed,
    })()  # fmt: skip
    completion = Completion(prompt_ids=[1], ids=[9, 2], logps=[0.0, 0.0], finish_reason="stop", text="x", versions=[])
    message = endpoint.model.message(completion, TOOLS)
    assert seen == [([9], [1], TOOLS)]
    assert message["content"] == "so" and message["tool_calls"][0]["function"]["name"] == "weather"


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_streams(scripted):
    endpoint = scripted(lambda text, seed: CALL if "call" in text else "hello", tool_format="pythonic")

    async def episode(client):
        stream = {"stream": True, "messages": [user("call")], "tools": TOOLS, "stream_options": {"include_usage": True}}
        reply = await client.post("/chat/completions", json=stream)
        assert reply.headers["content-type"] == "text/event-stream" and reply.text.endswith("data: [DONE]\n\n")
        chunks = events_of(reply.text)
        assert chunks[1]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "weather"
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls" and chunks[-1]["usage"]["total_tokens"] > 0
        text = (await client.post("/completions", json={"prompt": "hi", "stream": True})).text
        assert events_of(text)[0]["choices"][0]["text"] == "hello"
        events = events_of((await client.post("/responses", json={"input": "hi", "stream": True})).text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
        assert next(e for e in events if e["type"] == "response.output_text.delta")["delta"] == "hello"
        body = {"messages": [user("hi")], "max_tokens": 9, "stream": True}
        kinds = [event["type"] for event in events_of((await client.post("/messages", json=body)).text)]
        assert kinds == ["message_start", "content_block_start", "content_block_delta", "content_block_stop",
                         "message_delta", "message_stop"]  # fmt: skip

    play(endpoint, episode)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_names_the_stop_sequence_that_ended_it(make_model, monkeypatch, stream):
    monkeypatch.setattr("rollout.episodes.endpoint.POLL_S", 0.01)
    tokenizer = tiny_tokenizer()
    engine = LocalEngine(make_model(vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer)
    letters = [chr(code) for code in range(32, 127)]

    async def episode(client):
        body = {"messages": [user("hi")], "max_tokens": 200, "stream": stream}
        limited = (await client.post("/messages", json=body | {"max_tokens": 1})).text
        stopped = (await client.post("/messages", json=body | {"stop_sequences": letters})).text
        return [events_of(text)[-2]["delta"] if stream else json.loads(text) for text in (limited, stopped)]

    endpoint = Endpoint(engine, tokenizer)
    endpoint.open()
    try:
        ((session, (limited, stopped)),) = play(endpoint, episode)
    finally:
        endpoint.close()
    assert (limited["stop_reason"], limited["stop_sequence"]) == ("max_tokens", None)
    last = tokenizer.decode(session.turns[-1].completion.ids[-1:])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", last) and last in letters


def test_text_completions_continue_the_sampled_ids(scripted):
    endpoint = scripted(lambda text, seed: "ab")

    async def episode(client):
        first = (await client.post("/completions", json={"prompt": "x", "max_tokens": 2, "logprobs": 0})).json()
        assert (
            first["choices"][0]["logprobs"]["tokens"] == ["a", "b"] and first["choices"][0]["finish_reason"] == "length"
        )
        await client.post("/completions", json={"prompt": "xab c", "max_tokens": 9})

    ((session, _),) = play(endpoint, episode)
    whole = session.completion([1], {})
    assert whole.columns["branches"] == 0 and tiny_tokenizer().decode(whole.ids) == "ab cab<|im_end|>"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/chat/completions", {"messages": []}, 400, "messages: "),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
        ("/chat/completions", {"messages": [user("x")], "n": 0.5}, 400, "n=0.5"),
        ("/chat/completions", {"messages": [user("x")], "tools": [{"type": "code"}]}, 400, "tools[0]"),
        (
            "/chat/completions",
            {"messages": [user("x")], "response_format": {"type": "json_object"}},
            400,
            "json_object",
        ),
        ("/chat/completions", {"messages": [user("x" * 600)]}, 400, "context length 512"),
        ("/completions", {"prompt": [10**6]}, 400, "vocabulary"),
        ("/completions", {"prompt": {}}, 400, "prompt: "),
        ("/responses", {"input": "x", "previous_response_id": "resp_1"}, 400, "previous_response_id=resp_1"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "image"),
        ("/messages", {"messages": [user("x"), {"role": "assistant", "content": "y"}]}, 400, "start of an answer"),
        (
            "/messages",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "not a request of /v1/messages",
        ),
        (
            "/messages",
            {"messages": [user("x")], "tools": [{"type": "bash_20250124", "name": "bash"}]},
            400,
            "tools[0]: only",
        ),
        ("/chat/completions", {"messages": [user("x")], "tools": [{"function": "f"}]}, 400, "tools[0]: has no name"),
        ("/chat/completions", {"messages": [user("x")], "stream": True, "stream_options": 3}, 400, "stream_options"),
        ("/responses", {"input": [{"type": "message"}]}, 400, "input[0]: has no role"),
        ("/embeddings", {}, 404, "/v1/embeddings"),
    ],
)
def test_bad_requests_are_explained(scripted, path, body, status, message):
    endpoint = scripted(lambda text, seed: "x")

    async def episode(client):
        return await client.post(path, json=body)

    ((session, reply),) = play(endpoint, episode)
    error = reply.json()["error"]
    assert reply.status_code == status and message in error["message"] and session.turns == [], reply.text
    assert not error["message"].startswith(("UserError", "responses_create_params"))
    assert (error["code"] == "context_length_exceeded") == ("context" in message)


def test_only_clients_of_this_run_and_of_running_episodes_are_answered(scripted):
    endpoint = scripted(lambda text, seed: "x")
    assert endpoint.url.startswith("http://127.0.0.1:")

    async def episode(client):
        key = client.headers["authorization"]
        models = await client.get("/models")
        bad = [await client.get("/models", headers={"authorization": value}) for value in ("Bearer x.1", "Bearer")]
        body = {"messages": [user("x")]}
        unknown = await client.post("/chat/completions", json=body, headers={"authorization": key[:-1] + "99"})
        url = endpoint.url.replace("/v1", f"/{key.removeprefix('Bearer ')}/v1/chat/completions")
        in_path = await client.post(url, json=body, headers={"authorization": "none"})
        shared = {"authorization": key.rpartition(".")[0]}  # one key for all, and a field for the episode
        field = await client.post("/chat/completions", json=body | {"strop_session": "1"}, headers=shared)
        anonymous = await client.post("/chat/completions", json=body, headers=shared)  # a gym's verifier: not trained
        ended = await client.post("/chat/completions", json=body, headers=shared | {"x-session-id": "9"})
        assert (anonymous.status_code, ended.status_code) == (200, 404)
        named = await client.post("/chat/completions", json=body | {"return_tokens_as_token_ids": True})
        message = named.json()["choices"][0]["message"]  # as NeMo Gym's model server reads it
        assert message["generation_token_ids"][-1] == 2 and len(message["generation_log_probs"]) == 2
        return [reply.status_code for reply in (models, *bad, unknown, in_path, field)]

    ((session, statuses),) = play(endpoint, episode)
    assert statuses == [200, 401, 401, 404, 200, 200] and len(session.turns) == 3


def test_a_client_that_disconnects_leaves_no_turn(scripted):
    endpoint = scripted(lambda text, seed: "x")

    async def episode(client):
        body = json.dumps({"messages": [user("x")]}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: {client.headers['authorization']}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)

    endpoint.local.sample, sample = lambda timeout: None, endpoint.local.sample
    ((session, _),) = play(endpoint, episode)
    sample(0.0)
    assert session.turns == [] and endpoint.local._waiting == type(endpoint.local._waiting)()


def test_engine_errors_are_recorded(scripted):
    def fail(text, seed):
        raise ValueError("weights have diverged")

    endpoint = scripted(fail)

    async def episode(client):
        return (await client.post("/chat/completions", json={"messages": [user("x")]})).status_code

    with pytest.raises(ValueError, match="diverged"):
        play(endpoint, episode)


def test_an_engine_error_replaces_the_error_of_its_episode(scripted):
    """An agent whose requests fail may fail in its own way; the run must still stop with the cause."""
    endpoint = scripted(lambda text, seed: "x")
    with (
        pytest.raises(UnusableError, match="no server is left"),
        endpoint.session(SAMPLING, seed=0) as (session, _),
    ):
        session.error = ValueError("vllm: no server is left")
        raise EpisodeError("the agent answered 500", kind="500")
    with pytest.raises(EpisodeError), endpoint.session(SAMPLING, seed=0):
        raise EpisodeError("the agent answered 500", kind="500")


def test_the_port_is_free_again_after_close(scripted):
    endpoint = scripted(lambda text, seed: "x")
    port = int(endpoint.url.split(":")[2].removesuffix("/v1"))
    with pytest.raises(ValueError, match=f"port={port}"):
        scripted(lambda text, seed: "x", port=port)
    endpoint.close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
