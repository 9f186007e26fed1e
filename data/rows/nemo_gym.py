"""Load unmodified NeMo Gym rows: prompts for the engine, and the original row for the gym's servers.

    {"responses_create_params": {"input": [{"role": "user", "content": "2+2="}], "tools": [...]},
     "agent_ref": {"type": "responses_api_agents", "name": "math_simple_agent"}, "answer": "4"}

    prompts = load_nemo_gym(["math.jsonl:split=train[:500]@math"], tokenizer, folder="~/Gym")

The prompt contains every turn of the input, including system and developer messages. The columns for the rewards are
the row's fields plus three: `verify_extra`, the whole row as JSON (a table would fill missing fields with nulls, which
the servers reject), `nemo_gym_ref`, the server for the row, and `nemo_gym_index`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.formats.registry import apply
from data.rows.prompts import fits, log_left_out, tokenise_prompt
from data.sources import Row, load_rows, parse_spec
from data.types import Messages, Prompt
from data.user_code import printable

Columns = dict[str, Any]
RESERVED = ("verify_extra", "nemo_gym_ref", "nemo_gym_index")


def load_nemo_gym(
    datasets: Sequence[str], tokenizer: Any, *, folder: str | None = None, multi_turn: bool = False,
    system_prompt: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None, context_length: int | None = None, max_completion_length: int = 0,
) -> list[Prompt]:  # fmt: skip
    """Load the rows of all datasets, in order. Skip prompts longer than max_prompt_length and log how many."""
    prompts: list[Prompt] = []
    num_rows = num_tools = 0
    for text in datasets:
        path, server = split_dataset(text, folder)
        spec = parse_spec(path)
        for row in load_rows(spec):
            num_rows += 1
            columns = apply(nemo_gym_columns, row, server, num_rows - 1)
            columns["nemo_gym_ref"]["source"] = row.source
            params = row.columns["responses_create_params"]
            # A gym row's metadata contains its chat template settings, as JSON.
            kwargs = (params.get("metadata") or {}).get("chat_template_kwargs")
            prompt = Row(source=row.source, columns={"prompt": columns.pop("prompt"), "chat_template_kwargs": kwargs})
            rendered = apply(tokenise_prompt, prompt, tokenizer, system_prompt, chat_template_kwargs)
            if not fits(row.source, rendered.ids, max_prompt_length, context_length, max_completion_length):
                continue
            num_tools += bool(params.get("tools"))
            prompts.append(
                Prompt(source=row.source, prompt=rendered.prompt, ids=rendered.ids, columns=columns,
                       settings=rendered.settings, weight=spec.weight)
            )  # fmt: skip
    log_left_out(len(prompts), num_rows, max_prompt_length)
    if num_tools and not multi_turn:
        print(
            f"data: ignoring the tools of {num_tools} of {len(prompts)} rows, which need several turns; "
            "use --nemo-gym.multi-turn",
            file=sys.stderr,
        )
    return prompts


def split_dataset(text: str, folder: str | None) -> tuple[str, str | None]:
    """Split PATH[:split=...][@SERVER] into (data spec, server name or None); paths are relative to the folder.

    >>> split_dataset("math.jsonl:split=train[:5]@math", "/gym")
    ('/gym/math.jsonl:split=train[:5]', 'math')
    """
    path, at, server = text.rpartition("@")
    path, name = (path, server.strip()) if at else (text, None)
    if not path.strip() or name == "":
        raise UserError(f"nemo_gym.datasets={text}: must be PATH or PATH@SERVER")
    file = Path(path.strip()).expanduser()  # before joining: ~/rows.jsonl is not relative to the folder
    return str(file if file.is_absolute() or folder is None else Path(folder).expanduser() / file), name


def nemo_gym_columns(columns: Columns, server: str | None, index: int) -> Columns:
    """Return the row's fields, `prompt` and the RESERVED columns."""
    params = columns.get("responses_create_params")
    if not isinstance(params, dict):
        raise UserError("has no 'responses_create_params' object, so it is not a NeMo Gym row")
    name = _agent_name(columns)
    reserved = next((field for field in RESERVED if field in columns), None)
    if reserved:
        raise UserError(f"the field name {reserved!r} is reserved; rename it")
    if server is None and name is None:
        raise UserError("has no agent_ref, and its dataset has no server; write PATH@SERVER in --nemo-gym.datasets")
    fields = {key: value for key, value in columns.items() if key != "responses_create_params" and value is not None}
    return {
        **fields,
        "prompt": input_messages(params.get("input")),
        "verify_extra": json.dumps({key: value for key, value in columns.items() if value is not None}),
        "nemo_gym_ref": {"server": server, "name": name},
        "nemo_gym_index": index,
    }


def input_messages(items: Any, where: str = "responses_create_params.input") -> Messages:
    """Convert a Responses API input to chat messages: text, or a list of messages, tool calls and their outputs.

    Text and calls of a turn become one message.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise UserError(f"{where}: must be text, or a list of at least one message")
    messages: Messages = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise UserError(f"{where}[{index}]: must be an object, not {type(item).__name__}")
        kind = item.get("type") or "message"
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str):
                raise UserError(f"{where}[{index}]: has no role; use system, developer, user or assistant")
            messages.append({"role": role, "content": _text(item.get("content"), f"{where}[{index}]")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else json.dumps(output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
        elif kind != "reasoning":  # not a message; the token ids of an episode include it
            raise UserError(
                f"{where}[{index}]: type={printable(str(kind)[:60])} is unknown; use messages, calls and their outputs"
            )
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise UserError(f"{where}: content is not text; only text is supported")


def _agent_name(columns: Columns) -> str | None:
    """Return the name of an agent or, in older rows, a resource server; only the head server knows which."""
    ref = columns.get("agent_ref")
    if ref is None:
        return None
    if not isinstance(ref, dict) or not isinstance(ref.get("name"), str) or not ref["name"]:
        raise UserError(f"agent_ref={ref!r}: must be an object with a name")
    return ref["name"]
