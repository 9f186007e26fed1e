"""Parse tool calls in the model's text, in the formats that models are trained on.

    hermes        <tool_call>{"name": "lookup", "arguments": {"key": "ab"}}</tool_call>     Hermes, Qwen
    llama3_json   {"name": "lookup", "parameters": {"key": "ab"}}                           Llama 3.1 and later
    pythonic      [lookup(key="ab")]                                                        Llama 3.2, Llama 4
    harmony       <|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key": "ab"}       gpt-oss

    parse = find_format("auto", tokenizer)
    parse('[lookup(key="ab")]') -> Parsed(content="", calls=[Call(name="lookup", arguments={"key": "ab"})])

A malformed call is returned as a Call with an error, which is shown to the model.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data.chat import is_harmony
from data.errors import UserError
from rollout.engine import Completion
from rollout.harmony import Message, split_messages

CONSTANTS = {"true": True, "false": False, "null": None}  # JSON names that models also write in Python calls


@dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()  # arguments without a name, if the format allows them
    error: str | None = None  # not None: the call is malformed


class Parsed(NamedTuple):
    content: str  # the text around the calls
    calls: list[Call]


Parse = Callable[[str], Parsed]


def hermes(text: str) -> Parsed:
    """Parse any number of <tool_call> blocks; ignore text inside <think>."""
    thinking, closed, answer = text.rpartition("</think>")
    parts = re.split(r"(<tool_call>.*?(?:</tool_call>|\Z))", answer, flags=re.DOTALL)
    calls = []
    for block in parts[1::2]:
        body = block.removeprefix("<tool_call>")
        if not body.endswith("</tool_call>"):
            calls.append(Call(error="<tool_call> is not closed by </tool_call>"))
        else:
            calls.append(_json_call(body.removesuffix("</tool_call>")))
    return Parsed((thinking + closed + "".join(parts[::2])).strip(), calls)


def llama3_json(text: str) -> Parsed:
    """Parse a text that is one object, or several separated by semicolons. An object without a name is an answer."""
    tagged = text.lstrip().startswith("<|python_tag|>")
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not tagged and not re.match(r'\{\s*"(name|type)"', body):
        return Parsed(text.strip(), [])
    calls = []
    while body:
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError):
            calls.append(Call(error="is not valid JSON"))
            break
        calls.append(_object_call(value))
        body = body[end:].lstrip(" ;\n")
    return Parsed("", calls)


def pythonic(text: str) -> Parsed:
    """Parse a text that is a Python list of calls with literal arguments."""
    body = text.strip()
    if not re.match(r"\[\s*[A-Za-z_]\w*\s*\(", body):
        return Parsed(body, [])
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Parsed("", [Call(error="is not a list of calls such as [name(key='value')]")])
    if not isinstance(tree, ast.List):
        return Parsed("", [Call(error="is not a list of calls such as [name(key='value')]")])
    return Parsed("", [_python_call(node) for node in tree.elts])


def harmony(text: str) -> Parsed:
    """Parse messages to tools; ignore thoughts (the analysis channel) and calls inside them."""
    messages = split_messages(text)
    calls = [_function_call(message) for message in messages if message.recipient]
    if not messages:
        return Parsed(text.strip(), [])
    shown = [message.text for message in messages if not message.recipient and message.channel != "analysis"]
    return Parsed("".join(shown).strip(), calls)


def parse_turn(turn: Completion, parse: Parse, tokenizer: Any) -> Parsed:
    """Parse the calls of a complete turn from its text with special tokens, because some formats start with one."""
    if turn.finish_reason == "length":
        return Parsed(turn.text, [])
    ids = turn.ids[:-1] if turn.ids and turn.ids[-1] in tokenizer.all_special_ids else turn.ids
    parsed = parse(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return parsed if parsed.calls else Parsed(turn.text, [])


FORMATS: dict[str, Parse] = {
    "hermes": hermes, "llama3_json": llama3_json, "pythonic": pythonic, "harmony": harmony,
}  # fmt: skip


def find_format(name: str, tokenizer: Any) -> Parse:
    """Return the parser of this name; auto: detect the format from the chat template."""
    if name != "auto":
        return FORMATS[name]
    template = str(tokenizer.chat_template or "")
    if is_harmony(tokenizer):
        return harmony
    if "<tool_call>" in template:
        return hermes
    if '"parameters"' in template and ("ipython" in template or "python_tag" in template):
        return llama3_json
    if "func_name1(params_name1=params_value1" in template.replace(" ", ""):
        return pythonic
    raise UserError(
        f"tool_format=auto: the chat template defines no format for tool calls; set --tool-format to one of "
        f"{', '.join(FORMATS)}, and describe it in the system prompt or train it by SFT"
    )


def _json_call(text: str) -> Call:
    try:
        return _object_call(json.loads(text))
    except (ValueError, RecursionError):
        return Call(error="is not valid JSON")


def _object_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(error="is not an object with a name and its arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return Call(name=value["name"], error="its arguments are not an object")
    return Call(name=value["name"], arguments=arguments)


def _function_call(message: Message) -> Call:
    return _object_call({"name": str(message.recipient).removeprefix("functions."), "arguments": message.text})


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return Call(error="is not a list of calls such as [name(key='value')]")
    name = node.func.id
    if any(keyword.arg is None for keyword in node.keywords):
        return Call(name=name, error="its arguments are not plain values")
    try:
        positional = tuple(_literal(value) for value in node.args)
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Call(name=name, error="its arguments are not plain values")
    return Call(name=name, arguments=arguments, positional=positional)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    return _plain(ast.literal_eval(node))


def _plain(value: Any) -> Any:
    """Convert to JSON values, because arguments are logged; raise for other literals: sets, bytes, complex numbers."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"{type(value).__name__} is not JSON")
