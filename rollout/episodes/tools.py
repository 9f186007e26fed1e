"""Tools that the model calls during an episode (tool_episode.py): load them, run a call, build their JSON schemas.

    toolset = load_tools(("lookup", "my_tools.py:weather"), timeout=10.0)
    toolset.schemas                                     # shown to the model by the chat template
    text, failed = await toolset.run(Call(name="weather", arguments={"city": "Bern"}), turns)

A tool is a function with type hints and a docstring. A synchronous tool runs in a thread, so it must be thread-safe. A
class is instantiated once per episode: its public methods are tools, and it may define reset(**columns), called with
the row's columns, and reward() and close(), called at the end. A parameter named `episode` gets the Turns below: the
row's columns, a dict for state, and reward(x) for the current turn. If a tool raises, or a call is invalid, the model
gets the error as the result.

The schema of a tool comes from its type hints and docstring (Args: or :param lines, which may omit parameters).
Built-in tools: `calculator`, and `lookup` in a table that the model cannot see.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import operator
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from data.errors import UserError
from data.hints import suggest
from data.limits import WorkTimeout, thread_clock, wait_for_thread
from data.types import Prompt
from data.user_code import describe_error, find_callable
from rollout.episodes.tool_calls import Call

MAX_THREADS = 64  # concurrent calls of synchronous tools
MAX_HUNG = 32  # hanging calls of one tool, whose threads cannot be stopped
RESERVED_METHODS = ("reset", "reward", "close")  # methods of a class that the model cannot call
EPISODE = "episode"  # parameter that gets the Turns
SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
PYTHON = {"string": str, "integer": int, "boolean": bool, "null": NoneType, "array": list, "object": dict}


class Turns:
    """One episode as its tools see it."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.columns = prompt.columns
        self.state: dict[str, Any] = {}
        self.turn = 0
        self.rewards: dict[int, float] = {}  # turn -> reward
        self.objects: dict[str, Any] = {}  # spec -> instance of a tool class

    def reward(self, value: float) -> None:
        """Add to this turn's reward. The reward function `env` returns the sum over all turns."""
        self.rewards[self.turn] = self.rewards.get(self.turn, 0.0) + float(value)


class Tool:
    """One function that the model can call, or one method of a class."""

    def __init__(self, spec: str, name: str, call: Callable[..., Any], owner: type | None = None) -> None:
        self.spec, self.name, self.owner = spec, name, owner
        self.schema = schema_of(call, f"tools={spec}", name, skip=("self",) if owner else ())
        self.parameters: dict[str, Any] = self.schema["function"]["parameters"]["properties"]
        self.required: list[str] = self.schema["function"]["parameters"]["required"]
        self.takes_episode = EPISODE in inspect.signature(call).parameters
        self.needs: tuple[str, ...] = getattr(call, "needs_columns", ())
        self.call = call
        self.is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        self.num_hung = 0  # abandoned threads that still run

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the function's arguments; a UserError's text is shown to the model."""
        if len(call.positional) > len(self.parameters):
            raise UserError(f"takes {len(self.parameters)} arguments, not {len(call.positional)}")
        arguments = dict(zip(self.parameters, call.positional, strict=False))
        if twice := arguments.keys() & call.arguments.keys():
            raise UserError(f"got {min(twice)!r} twice")
        arguments |= call.arguments
        for name, value in arguments.items():
            if name not in self.parameters:
                raise UserError(f"has no argument {name!r}; it takes {', '.join(self.parameters) or 'none'}")
            if error := schema_error(value, self.parameters[name]):
                raise UserError(f"{name!r} {error}")
        missing = [name for name in self.required if name not in arguments]
        if missing:
            raise UserError(f"needs {missing[0]!r}")
        return arguments


@contextmanager
def _blame(spec: str, what: str, prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise UserError(f"tools={spec}: {what} on {prompt.source} ({describe_error(error)})") from None


class Toolset:
    """All tools of a run."""

    def __init__(self, tools: Sequence[Tool], timeout: float) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.timeout = timeout
        self._gates: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()  # one per event loop
        # True if tools can give rewards; an episode without a reward then gets 0 rather than None.
        user_tools = [tool for tool in tools if tool.spec not in BUILTIN]
        self.pays = any(tool.takes_episode or hasattr(tool.owner, "reward") for tool in user_tools)
        self.owners = {tool.owner: tool.spec for tool in tools if tool.owner is not None}
        for tool in tools:
            if self.tools[tool.name] is not tool:
                raise UserError(f"tools={tool.spec}: two tools are called {tool.name!r}; rename one")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def check_rows(self, prompts: Sequence[Prompt], what: str) -> None:
        """Raise if a row lacks a column that a tool needs."""
        for tool in self.tools.values():
            for name in tool.needs:
                without = next((prompt.source for prompt in prompts if prompt.columns.get(name) is None), None)
                if without:
                    raise UserError(f"tools={tool.spec}: requires the column {name!r}, which {without} of {what} lacks")

    def begin(self, prompt: Prompt) -> Turns:
        """Start an episode: instantiate every tool class."""
        turns = Turns(prompt)
        for owner, spec in self.owners.items():
            with _blame(spec, "cannot start an episode", prompt):
                turns.objects[spec] = tool_object = owner()
                if hasattr(tool_object, "reset"):
                    tool_object.reset(**_accepted(tool_object.reset, prompt.columns))
        return turns

    def add_rewards(self, turns: Turns) -> None:
        """Add each object's reward() to the last turn."""
        for spec, tool_object in turns.objects.items():
            if hasattr(tool_object, "reward"):
                with _blame(spec, "reward() failed", turns.prompt):
                    turns.reward(tool_object.reward())

    def close(self, turns: Turns) -> None:
        """Close the objects of an episode, even if it failed or was cancelled."""
        for spec, tool_object in turns.objects.items():
            if hasattr(tool_object, "close"):
                with _blame(spec, "close() failed", turns.prompt):
                    tool_object.close()

    def named(self, call: Call) -> dict[str, Any]:
        """Return the call's arguments by name, including positional arguments."""
        tool = self.tools.get(call.name)
        names = list(tool.parameters) if tool else []
        names += [str(i) for i in range(len(names), len(call.positional))]
        return {**dict(zip(names, call.positional, strict=False)), **call.arguments}

    async def run(self, call: Call, turns: Turns) -> tuple[str, bool]:
        """Return (result as text for the model, whether it is an error)."""
        if call.error is not None:
            return f"error: the call {call.error}", True
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there is {', '.join(self.tools)}", True
        try:
            arguments = tool.arguments(call)
        except ValueError as error:
            return f"error: {tool.name} {error}", True
        if tool.takes_episode:
            arguments[EPISODE] = turns
        function = tool.call if tool.owner is None else getattr(turns.objects[tool.spec], tool.name)
        try:
            if tool.is_async:
                async with asyncio.timeout(self.timeout) as limit:
                    returned = await function(**arguments)
            else:
                gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
                async with gate:  # waiting for a thread does not count
                    returned = await self._in_thread(tool, function, arguments)
            return as_text(returned), False
        except TimeoutError as error:
            is_late = limit.expired() if tool.is_async else isinstance(error, WorkTimeout)
            text = f"{tool.name} took more than {self.timeout:g} s" if is_late else describe_error(error)
        except (Exception, SystemExit) as error:  # a tool may raise anything: the episode continues
            text = describe_error(error)
        if tool.num_hung >= MAX_HUNG:
            raise UserError(
                f"tools={tool.spec}: {tool.num_hung} calls hang, and their threads cannot be stopped; add a time limit "
                "to the tool, make it async, or raise --tool-timeout"
            )
        return f"error: {without_surrogates(text)}", True

    async def _in_thread(self, tool: Tool, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call the function in a daemon thread, which is abandoned if it takes too long or the caller is cancelled."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        clocks: list[Callable[[], float]] = []  # of the thread, once it runs

        def finish(set_outcome: Callable[[Any], None], value: Any) -> None:
            if outcome.done():
                tool.num_hung -= 1  # the thread was abandoned and has ended since
            else:
                set_outcome(value)

        def work() -> None:
            clocks.append(thread_clock())
            try:
                result = outcome.set_result, function(**arguments)
            except BaseException as error:  # passed to the caller instead of being printed by the thread
                # A future cannot store StopIteration, and a tool's SystemExit must not end the run.
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                result = outcome.set_exception, error if plain else RuntimeError(describe_error(error))
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, *result)

        threading.Thread(target=work, name="tool", daemon=True).start()
        try:
            return await wait_for_thread(outcome, clocks, self.timeout)
        finally:
            tool.num_hung += outcome.cancelled()


def load_tools(specs: Sequence[str], *, timeout: float = 10.0) -> Toolset:
    """Load the tools that --tools names."""
    tools: list[Tool] = []
    for spec in specs:
        label = f"tools={spec}"
        if spec in BUILTIN:
            tools.append(Tool(spec, spec, BUILTIN[spec]))
            continue
        if "." not in spec and ":" not in spec:
            raise UserError(
                f"{label}: no such built-in tool; {suggest(spec, BUILTIN)} or pass my_module.function or "
                "path/to/file.py:function"
            )
        name, function = find_callable(spec, label)
        if not inspect.isclass(function):
            tools.append(Tool(spec, name, function))
            continue
        methods = {name: call for name, call in vars(function).items() if inspect.isfunction(call)}
        public = {name: call for name, call in methods.items() if name[0] != "_" and name not in RESERVED_METHODS}
        if not public:
            raise UserError(f"{label}: the class has no public method for the model to call; add one")
        tools += [Tool(spec, name, call, owner=function) for name, call in public.items()]
    return Toolset(tools, timeout)


def as_text(returned: Any) -> str:
    """Convert a result for the model: text unchanged, other values as JSON if possible."""
    if not isinstance(returned, str):
        try:
            returned = json.dumps(returned, ensure_ascii=False)
        except (TypeError, ValueError):
            returned = str(returned)
    return without_surrogates(returned)


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and tokenizers reject, by question marks."""
    return text.encode("utf-8", "replace").decode()


def _accepted(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}


# schemas ---------------------------------------------------------------------------------------------------------
# Not transformers.utils.get_json_schema: it rejects docstrings that omit a parameter, ignores :param lines, and writes
# Optional and return types differently, which would change the prompts of existing runs.


def schema_of(
    function: Callable[..., Any], label: str, name: str | None = None, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the JSON schema of a function. `label` starts error messages: tools=SPEC."""
    name = name or function.__name__
    doc = inspect.getdoc(function)
    if not doc:
        raise UserError(f"{label}: {name} has no docstring; add one that describes the tool to the model")
    try:
        hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except Exception as error:  # evaluating hints may raise anything
        raise UserError(f"{label}: cannot read the type hints of {name} ({error})") from None
    description, parameter_docs = _read_doc(doc)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in (EPISODE, *skip):
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{label}: {name} takes {parameter}; use named parameters, because the model calls by name")
        if parameter.name not in hints:
            raise UserError(f"{label}: {name} has no type hint for {parameter.name!r}; add one for the schema")
        properties[parameter.name] = _type_schema(hints[parameter.name], f"{label}: {parameter.name!r} of {name}")
        if parameter.name in parameter_docs:
            properties[parameter.name]["description"] = parameter_docs[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def schema_error(value: Any, schema: dict[str, Any]) -> str | None:
    """Return why a value does not match the schema, as text for the model, or None."""
    if "anyOf" in schema:
        matches = any(schema_error(value, option) is None for option in schema["anyOf"])
        return None if matches else f"cannot be {_type_name(value)}"
    if "enum" in schema:
        return None if value in schema["enum"] else f"must be one of {schema['enum']}"
    kind = schema.get("type")
    if kind is None:
        return None
    if kind == "number":
        is_valid = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        is_valid = isinstance(value, PYTHON[kind]) and not (kind == "integer" and isinstance(value, bool))
    if not is_valid:
        return f"must be {kind}, not {_type_name(value)}"
    if kind == "array" and "items" in schema:
        errors = (schema_error(item, schema["items"]) for item in value)
    elif kind == "object" and "additionalProperties" in schema:
        errors = (schema_error(item, schema["additionalProperties"]) for item in value.values())
    else:
        return None
    return next((f"holds one that {error}" for error in errors if error), None)


def _type_name(value: Any) -> str:
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
        return {"anyOf": [_type_schema(option, label) for option in args]}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _type_schema(args[0], label)} if args else {})}
    if hint is dict or (origin is dict and args[0] is str):
        return {"type": "object", **({"additionalProperties": _type_schema(args[1], label)} if args else {})}
    raise UserError(
        f"{label} is a {getattr(hint, '__name__', hint)}, which JSON cannot express; use str, int, float, bool, list, "
        "dict[str, ...], Literal or a union of these"
    )


def _read_doc(doc: str) -> tuple[str, dict[str, str]]:
    """Return (description, parameter descriptions) from a docstring with Args: lines, :param lines or neither."""
    sections = r"^\s*(?:Args|Arguments|Parameters|Returns|Raises|Examples?):|^\s*:\w+"
    description = re.split(sections, doc, flags=re.MULTILINE)[0]
    parameter_docs = dict(re.findall(r"^\s*:param (?:[\w.\[\], ]+ )?(\w+):\s*(.+)$", doc, flags=re.MULTILINE))
    section = re.search(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\s*\n)+)", doc, flags=re.MULTILINE)
    if section:
        indent = len(section[1]) - len(section[1].lstrip())
        name = None
        for line in section[1].splitlines():
            match = re.match(r"^(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$", line)
            if match and len(match[1]) == indent:
                name = match[2]
                parameter_docs[name] = match[3].strip()
            elif name and line.strip():
                parameter_docs[name] += f" {line.strip()}"
    return " ".join(description.split()), parameter_docs


# built-in tools --------------------------------------------------------------------------------------------------


MAX_LENGTH = 200  # characters per expression
MAX_BITS = 512  # per intermediate integer; nested powers would otherwise never end
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, for example (3+4)*2.
    """
    if len(expression) > MAX_LENGTH:
        raise UserError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{expression!r} is not an expression") from None
    value = _evaluate(tree)
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e15):
        return f"{value:.12g}"
    return str(int(value))


def _evaluate(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and _bits(left) * max(abs(right), 1) > MAX_BITS:
            raise UserError("a power is too large")
        value = OPERATORS[type(node.op)](left, right)
        if isinstance(value, complex) or _bits(value) > MAX_BITS:
            raise UserError("a number is too large, or not a real one")
        return value
    raise UserError("only numbers, + - * / // % ** and parentheses are allowed")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def lookup(key: str, episode: Any) -> str:
    """Look up what is stored under a key.

    Args:
        key: The key.
    """
    table = episode.columns["table"]
    if key not in table:
        raise KeyError(key)
    return str(table[key])


lookup.needs_columns = ("table",)  # type: ignore[attr-defined]

BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator, "lookup": lookup}
