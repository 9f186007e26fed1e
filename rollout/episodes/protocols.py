"""Requests and replies of the endpoint's protocols, each with pure functions for request, reply and events.

    chat        POST /v1/chat/completions      OpenAI, with tools and log-probs
    completions POST /v1/completions           OpenAI, text or ids
    responses   POST /v1/responses             OpenAI, also with previous_response_id
    messages    POST /v1/messages              Anthropic

Sampling settings are the trainer's; a request sets only its token limit and stop strings. A streamed reply is sent when
the turn is complete, because its tool calls are only known then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.errors import UserError
from data.rows.nemo_gym import input_messages
from data.types import Messages
from rollout.episodes.session import Turn

Json = dict[str, Any]
MAX_CHOICES = 64


@dataclass(frozen=True)
class Ask:
    """What a request asks for."""

    messages: Messages = field(default_factory=list)
    prompts: Sequence[str | list[int]] = ()  # instead of messages
    settings: Json = field(default_factory=dict)  # of the chat template, with the tools
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    count: int = 1  # answers to the same prompt


# requests --------------------------------------------------------------------------------------------------------


def read_chat(body: Json) -> Ask:
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    settings = dict(_object(body, "chat_template_kwargs")) | _tools(body.get("tools"), body.get("tool_choice"))
    _check_format(body.get("response_format"), "response_format")
    _object(body, "stream_options")  # read after sampling
    messages = [_plain(message, f"messages[{i}]") for i, message in enumerate(_list(body, "messages"))]
    return Ask(messages, (), settings, _limit(limit), _stops(body.get("stop")), _count(body))


def read_completions(body: Json) -> Ask:
    prompts = [body.get("prompt")] if _is_prompt(body.get("prompt")) else body.get("prompt")
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise UserError("prompt: must be text, a list of ids, or a list of these")
    if body.get("echo"):
        raise UserError("echo=true: not supported; remove it")
    return Ask([], prompts, {}, _limit(body.get("max_tokens")), _stops(body.get("stop")), _count(body))


def read_responses(body: Json, stored: Mapping[str, Messages]) -> Ask:
    """`stored`: conversations by response id."""
    messages: Messages = []
    if (previous := body.get("previous_response_id")) is not None:
        if previous not in stored:
            raise UserError(f"previous_response_id={previous}: not a response of this episode")
        messages = list(stored[previous])
    _check_format((body.get("text") or {}).get("format"), "text.format")
    messages += [_plain(message, "input") for message in input_messages(body.get("input"), "input")]
    if isinstance(body.get("instructions"), str):
        messages = [{"role": "system", "content": body["instructions"]}, *_without_system(messages, previous)]
    settings = _tools(body.get("tools"), body.get("tool_choice"))
    return Ask(messages, (), settings, _limit(body.get("max_output_tokens")))


def read_messages(body: Json) -> Ask:
    messages: Messages = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for index, message in enumerate(_list(body, "messages")):
        messages += _from_anthropic(message, f"messages[{index}]")
    kinds = {None: "function", "custom": "function"}  # other tools are run by Anthropic, or have no schema
    tools = [
        tool | {"type": kinds.get(tool.get("type")), "parameters": tool.get("input_schema")}
        for tool in body.get("tools") or ()
    ]
    choice = (body.get("tool_choice") or {}).get("type")
    limit, stop = _limit(body.get("max_tokens")), _stops(body.get("stop_sequences"))
    return Ask(messages, (), _tools(tools, choice), limit, stop)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(x) is int for x in value))


def _without_system(messages: Messages, previous: str | None) -> Messages:
    """Drop the instructions of the previous request, which the new ones replace."""
    return messages[1:] if previous is not None and messages and messages[0]["role"] == "system" else messages


def _from_anthropic(message: Any, where: str) -> Messages:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise UserError(f"{where}: role must be user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise UserError(f"{where}: content must be text or a list of blocks")
    texts, calls, results = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block["text"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            text = _text(block.get("content") or "", where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):
            raise UserError(f"{where}: content has a block of type {kind!r}; only text and tools are supported")
    turn = {"role": message["role"], "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})
    return [*results, *([turn] if texts or calls or not results else [])]


def _plain(message: Any, where: str) -> Json:
    """Return a message without null fields; templates know developer messages as system messages."""
    if not isinstance(message, dict):
        raise UserError(f"{where}: must be an object")
    role = "system" if message.get("role") == "developer" else message.get("role")
    content = message.get("content")
    return message | {"role": role, "content": "" if content is None else _text(content, where)}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: content has a part that is not text; only text is supported")
    return "".join(texts)


def _tools(tools: Any, choice: Any) -> Json:
    """Return the tools as chat templates take them; the Responses protocol has the function's fields in the tool."""
    if not tools or choice == "none":
        return {}
    if not isinstance(tools, list):
        raise UserError("tools: must be a list")
    read = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise UserError(f"tools[{index}]: only tools of type function are supported")
        function = tool.get("function") or {key: tool.get(key) for key in ("name", "description", "parameters")}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"tools[{index}]: has no name")
        function = {key: value for key, value in function.items() if key != "strict" and value is not None}
        read.append({"type": "function", "function": {"description": "", "parameters": {}} | function})
    return {"tools": read}


def _check_format(value: Any, name: str) -> None:
    kind = (value or {}).get("type", "text")
    if kind != "text":
        raise UserError(f"{name}={kind}: the policy's answers are not constrained; describe the format in the prompt")


def _object(body: Json, name: str) -> Json:
    if not isinstance(body.get(name) or {}, dict):
        raise UserError(f"{name}: must be an object")
    return body.get(name) or {}


def _list(body: Json, name: str) -> list[Any]:
    if not isinstance(body.get(name), list) or not body[name]:
        raise UserError(f"{name}: must be a list of at least one message")
    return body[name]


def _limit(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise UserError(f"max_tokens={value!r}: must be a number above 0")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError("stop: must be text or a list of texts")
    return tuple(stops)


def _count(body: Json) -> int:
    count = body.get("n") or 1
    if type(count) is not int or not 1 <= count <= MAX_CHOICES:
        raise UserError(f"n={count!r}: must be between 1 and {MAX_CHOICES}")
    return count


# replies ---------------------------------------------------------------------------------------------------------


def chat_reply(turns: Sequence[Turn], body: Json, key: str, tokenizer: Any) -> Json:
    choices = []
    for index, turn in enumerate(turns):
        message = turn.message | {"refusal": None}
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
        if body.get("return_tokens_as_token_ids"):  # NeMo Gym's model server, which looks for these fields
            ids = {"prompt_token_ids": turn.completion.prompt_ids, "generation_token_ids": turn.completion.ids}
            message |= ids | {"generation_log_probs": turn.completion.logps}
        logprobs = None
        if body.get("logprobs"):
            entries = zip(_token_texts(turn, tokenizer), turn.completion.logps, strict=True)
            logprobs = {"content": [_logprob(text, logp) for text, logp in entries], "refusal": None}
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish(turn)})
        if body.get("return_token_ids"):
            choices[-1]["token_ids"] = turn.completion.ids
    head = _head(f"chatcmpl-{key}", "chat.completion", body)
    head |= {"prompt_token_ids": turns[0].completion.prompt_ids} if body.get("return_token_ids") else {}
    return head | {"choices": choices, "usage": _usage(turns)}


def completions_reply(turns: Sequence[Turn], body: Json, key: str, tokenizer: Any) -> Json:
    choices = []
    for index, turn in enumerate(turns):
        logprobs = None
        if body.get("logprobs") is not None:
            texts = _token_texts(turn, tokenizer)
            offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
            logprobs = {"tokens": texts, "token_logprobs": turn.completion.logps, "top_logprobs": None,
                        "text_offset": offsets}  # fmt: skip
        choices.append({"index": index, "text": turn.completion.text, "logprobs": logprobs,
                        "finish_reason": turn.completion.finish_reason})  # fmt: skip
    return _head(f"cmpl-{key}", "text_completion", body) | {"choices": choices, "usage": _usage(turns)}


def responses_reply(turn: Turn, body: Json, key: str) -> Json:
    message, output = turn.message, []
    if message["content"] or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        output.append({"id": f"msg_{key}", "type": "message", "role": "assistant", "status": "completed",
                       "content": [text]})  # fmt: skip
    for index, call in enumerate(message.get("tool_calls") or ()):
        output.append({"id": f"fc_{key}_{index}", "type": "function_call", "call_id": call["id"],
                       "status": "completed", **call["function"]})  # fmt: skip
    cut = turn.completion.finish_reason == "length"
    num_in, num_out = len(turn.completion.prompt_ids), len(turn.completion.ids)
    usage = {"input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out,
             "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
             "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
    return {
        "id": f"resp_{key}", "object": "response", "created_at": time.time(), "model": body.get("model") or "policy",
        "status": "incomplete" if cut else "completed", "error": None, "usage": usage, "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True, "temperature": body.get("temperature"), "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [],
        "previous_response_id": body.get("previous_response_id"),
    }  # fmt: skip


def messages_reply(turn: Turn, body: Json, key: str, tokenizer: Any) -> Json:
    message, content, stops, stop = turn.message, [], _stops(body.get("stop_sequences")), None
    if stops and turn.completion.finish_reason == "stop":  # the first one in the sampled text has ended it
        text = tokenizer.decode(turn.completion.ids)
        stop = min((word for word in stops if word in text), key=text.index, default=None)
    if message["content"] or not message.get("tool_calls"):
        content.append({"type": "text", "text": message["content"], "citations": None})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"],
                        "input": json.loads(function["arguments"])})  # fmt: skip
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[_finish(turn)]
    reason = "stop_sequence" if stop is not None and reason == "end_turn" else reason
    usage = {"input_tokens": len(turn.completion.prompt_ids), "output_tokens": len(turn.completion.ids)}
    return {"id": f"msg_{key}", "type": "message", "role": "assistant", "model": body.get("model") or "policy",
            "content": content, "stop_reason": reason, "stop_sequence": stop, "usage": usage}  # fmt: skip


def _head(key: str, kind: str, body: Json) -> Json:
    return {"id": key, "object": kind, "created": int(time.time()), "model": body.get("model") or "policy"}


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.message.get("tool_calls") else turn.completion.finish_reason


def _usage(turns: Sequence[Turn]) -> Json:
    prompt, sampled = len(turns[0].completion.prompt_ids), sum(len(turn.completion.ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _token_texts(turn: Turn, tokenizer: Any) -> list[str]:
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in turn.completion.ids]


def _logprob(text: str, logp: float) -> Json:
    return {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}


# events ----------------------------------------------------------------------------------------------------------


def chat_events(reply: Json, body: Json) -> Iterator[Json]:
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(index: int, delta: Json, finish: str | None = None, logprobs: Any = None) -> Json:
        return head | {"choices": [{"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]}

    for choice in reply["choices"]:
        message, index = choice["message"], choice["index"]
        yield chunk(index, {"role": "assistant", "content": message["content"] or ""}, None, choice["logprobs"])
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield chunk(index, {"tool_calls": [call | {"index": number}]})
        yield chunk(index, {}, choice["finish_reason"])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield head | {"choices": [], "usage": reply["usage"]}


def completions_events(reply: Json, body: Json) -> Iterator[Json]:
    for choice in reply["choices"]:
        yield {key: reply[key] for key in ("id", "object", "created", "model")} | {"choices": [choice]}


def responses_events(reply: Json, body: Json) -> Iterator[Json]:
    """Number the events, as clients expect."""
    for number, event in enumerate(_responses_events(reply)):
        yield event | {"sequence_number": number}


def _responses_events(reply: Json) -> Iterator[Json]:
    started = reply | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(reply["output"]):
        where = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            where |= {"content_index": 0}
            yield {"type": "response.output_item.added", "output_index": index,
                   "item": item | {"status": "in_progress", "content": []}}  # fmt: skip
            yield {"type": "response.content_part.added", **where, "part": part | {"text": ""}}
            yield {"type": "response.output_text.delta", **where, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **where, "part": part}
        else:
            yield {"type": "response.output_item.added", "output_index": index,
                   "item": item | {"status": "in_progress", "arguments": ""}}  # fmt: skip
            yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **where, "name": item["name"],
                   "arguments": item["arguments"]}  # fmt: skip
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{reply['status']}", "response": reply}


def messages_events(reply: Json, body: Json) -> Iterator[Json]:
    usage = reply["usage"]
    started = reply | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": started}
    for index, block in enumerate(reply["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}
