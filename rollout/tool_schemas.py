"""The JSON schema of a Python function, from its type hints and docstring, and whether values keep to one.

    def weather(city: str, days: int = 1) -> str:
        '''Forecast for a city.

        Args:
            city: Its name.
        '''
    schema_of(weather, "tools=my_tools.weather") ->
        {"type": "function", "function": {"name": "weather", "description": "Forecast for a city.", "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "description": "Its name."},
            "days": {"type": "integer"}}, "required": ["city"]}}}

A parameter called `episode` is not the model's: it gets the episode (tools.py), so it is not in the schema.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

OWN = "episode"  # the parameter that we fill
SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
PYTHON = {"string": str, "integer": int, "boolean": bool, "null": NoneType, "array": list, "object": dict}


def schema_of(
    function: Callable[..., Any], label: str, name: str | None = None, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What the model is shown of a function; `label` is what the user typed, as sentences about it begin."""
    name = name or function.__name__
    doc = inspect.getdoc(function)
    if not doc:
        raise ValueError(f"{label}: {name} has no docstring; say in it what the tool does, the model reads it")
    try:
        hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except Exception as error:  # names in hints that do not exist, whatever they raise
        raise ValueError(f"{label}: the type hints of {name} cannot be read ({error})") from None
    about, described = _read_doc(doc)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in (OWN, *skip):
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{label}: {name} takes {parameter}; give its parameters names, the model calls by name")
        if parameter.name not in hints:
            raise ValueError(f"{label}: {name} has no type hint for {parameter.name!r}; the schema is made from them")
        properties[parameter.name] = _type_schema(hints[parameter.name], f"{label}: {parameter.name!r} of {name}")
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def problem(value: Any, schema: dict[str, Any]) -> str | None:
    """What is wrong with a value, in words for the model; None when it keeps to the schema."""
    if "anyOf" in schema:
        return None if any(problem(value, one) is None for one in schema["anyOf"]) else f"cannot be {_kind(value)}"
    if "enum" in schema:
        return None if value in schema["enum"] else f"must be one of {schema['enum']}"
    kind = schema.get("type")
    if kind is None:
        return None
    if kind == "number":
        right = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        right = isinstance(value, PYTHON[kind]) and not (kind == "integer" and isinstance(value, bool))
    if not right:
        return f"must be {kind}, not {_kind(value)}"
    if kind == "array" and "items" in schema:
        inside = (problem(one, schema["items"]) for one in value)
    elif kind == "object" and "additionalProperties" in schema:
        inside = (problem(one, schema["additionalProperties"]) for one in value.values())
    else:
        return None
    return next((f"holds one that {wrong}" for wrong in inside if wrong), None)


def _kind(value: Any) -> str:
    if isinstance(value, float):
        return "number"
    return next((name for name, kind in PYTHON.items() if type(value) is kind), type(value).__name__)


def _type_schema(hint: Any, label: str) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, UnionType):
        return {"anyOf": [_type_schema(one, label) for one in args]}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _type_schema(args[0], label)} if args else {})}
    if hint is dict or (origin is dict and args[0] is str):
        return {"type": "object", **({"additionalProperties": _type_schema(args[1], label)} if args else {})}
    raise ValueError(
        f"{label} is a {getattr(hint, '__name__', hint)}, which JSON does not have; use str, int, float, bool, list, "
        "dict[str, ...], Literal or a union of them"
    )


def _read_doc(doc: str) -> tuple[str, dict[str, str]]:
    """Description and those of the parameters, from a docstring with Args: or :param lines or neither."""
    about = re.split(r"^\s*(?:Args|Arguments|Parameters|Returns|Raises|Examples?):|^\s*:\w+", doc, flags=re.MULTILINE)[
        0
    ]
    described = dict(re.findall(r"^\s*:param (?:[\w.\[\], ]+ )?(\w+):\s*(.+)$", doc, flags=re.MULTILINE))
    section = re.search(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\s*\n)+)", doc, flags=re.MULTILINE)
    if section:
        indent = len(section[1]) - len(section[1].lstrip())
        name = None
        for line in section[1].splitlines():
            found = re.match(r"^(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$", line)
            if found and len(found[1]) == indent:
                name = found[2]
                described[name] = found[3].strip()
            elif name and line.strip():
                described[name] += f" {line.strip()}"
    return " ".join(about.split()), described
