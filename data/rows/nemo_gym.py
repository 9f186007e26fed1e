"""NeMo Gym rows, unmodified: prompts for the engine, and the row itself for the gym's servers.

    {"responses_create_params": {"input": [{"role": "user", "content": "2+2="}], "tools": [...]},
     "agent_ref": {"type": "responses_api_agents", "name": "math_simple_agent"}, "answer": "4"}

    prompts = load_nemo_gym(["math.jsonl:split=train[:500]@math"], tokenizer, folder="~/Gym")

Every turn of the input stays in the prompt, system and developer messages included. The columns for the rewards are the
row's own fields plus three: `verify_extra`, the whole row as JSON (in a table, rows with different fields would be
filled with nulls, which the servers refuse), `nemo_gym_ref`, the server the row is for, and `nemo_gym_index`.
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

Columns = dict[str, Any]
OWN = ("verify_extra", "nemo_gym_ref", "nemo_gym_index")


def load_nemo_gym(
    datasets: Sequence[str], tokenizer: Any, *, folder: str | None = None, multi_turn: bool = False,
    system_prompt: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None, context_length: int | None = None, max_completion_length: int = 0,
) -> list[Prompt]:  # fmt: skip
    """All rows of all datasets, in order. Prompts over max_prompt_length tokens are left out; the number is logged."""
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
            # A gym row has its settings of the chat template in its metadata, as JSON.
            own = (params.get("metadata") or {}).get("chat_template_kwargs")
            shown = Row(source=row.source, columns={"prompt": columns.pop("prompt"), "chat_template_kwargs": own})
            made = apply(tokenise_prompt, shown, tokenizer, system_prompt, chat_template_kwargs)
            if not fits(row.source, made.ids, max_prompt_length, context_length, max_completion_length):
                continue
            num_tools += bool(params.get("tools"))
            prompts.append(
                Prompt(source=row.source, prompt=made.prompt, ids=made.ids, columns=columns, settings=made.settings,
                       weight=spec.weight)
            )  # fmt: skip
    log_left_out(len(prompts), num_rows, max_prompt_length)
    if num_tools and not multi_turn:
        print(
            f"data: {num_tools} of {len(prompts)} rows offer tools, which a single turn cannot call and is not shown; "
            "use --nemo-gym.multi-turn",
            file=sys.stderr,
        )
    return prompts


def split_dataset(text: str, folder: str | None) -> tuple[str, str | None]:
    """(data spec, server name or None) of PATH[:split=...][@SERVER]; relative paths start from the folder.

    >>> split_dataset("math.jsonl:split=train[:5]@math", "/gym")
    ('/gym/math.jsonl:split=train[:5]', 'math')
    """
    path, at, server = text.rpartition("@")
    path, name = (path, server.strip()) if at else (text, None)
    if not path.strip() or name == "":
        raise UserError(f"nemo_gym.datasets={text}: is not of the form PATH@SERVER; give a path, and a name after @")
    place = Path(path.strip()).expanduser()  # before joining: ~/rows.jsonl is not relative to the folder
    return str(place if place.is_absolute() or folder is None else Path(folder).expanduser() / place), name


def nemo_gym_columns(columns: Columns, server: str | None, index: int) -> Columns:
    """The row's own fields, `prompt`, and OWN."""
    params = columns.get("responses_create_params")
    if not isinstance(params, dict):
        raise UserError("has no 'responses_create_params' object; it is not a row of NeMo Gym")
    name = _agent_name(columns)
    taken = next((field for field in OWN if field in columns), None)
    if taken:
        raise UserError(f"has a field {taken!r}, which is ours; rename it")
    if server is None and name is None:
        raise UserError("has no agent_ref, and its dataset no server; write PATH@SERVER in nemo_gym.datasets")
    fields = {key: value for key, value in columns.items() if key != "responses_create_params" and value is not None}
    return {
        **fields,
        "prompt": input_messages(params.get("input")),
        "verify_extra": json.dumps({key: value for key, value in columns.items() if value is not None}),
        "nemo_gym_ref": {"server": server, "name": name},
        "nemo_gym_index": index,
    }


def input_messages(items: Any) -> Messages:
    """Chat messages of a Responses API input: text, or a list of messages, tool calls and their outputs."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise UserError("responses_create_params.input: must be text, or a list of at least one message")
    return item_messages(items, "responses_create_params.input")


def item_messages(items: Sequence[Any], where: str) -> Messages:
    """Responses API items as chat messages; text and calls of one model turn become one message."""
    messages: Messages = []
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise UserError(f"{where}[{number}]: is a {type(item).__name__}, not an object")
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}[{number}]")})
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
        elif kind != "reasoning":  # reasoning is not a message; the token ids of an episode include it
            raise UserError(f"{where}[{number}]: type={kind} is not known; give messages, calls and their outputs")
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise UserError(f"{where}: its content is not text; only text is supported")


def _agent_name(columns: Columns) -> str | None:
    """Name of an agent, or in older rows of a resource server; only the head server knows which."""
    ref = columns.get("agent_ref")
    if ref is None:
        return None
    if not isinstance(ref, dict) or not isinstance(ref.get("name"), str) or not ref["name"]:
        raise UserError(f"agent_ref={ref!r}: must be an object with a name")
    return ref["name"]
