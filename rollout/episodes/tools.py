"""Tools that the model calls during an episode (tool_episode.py): loading them, running a call, their JSON schemas.

    toolset = load_tools(("lookup", "my_tools.py:weather"), timeout=10.0)
    toolset.schemas                                     # shown to the model by the chat template
    text, failed = await toolset.run(Call(name="weather", arguments={"city": "Bern"}), turns)

A tool is a function with type hints and a docstring. A synchronous one runs in a thread, so it must be thread-safe. A
class makes one object per episode: its public methods are tools, and it may have reset(**columns), called with the
columns of the row, and reward() and close(), called at the end. A parameter named `episode` gets the Turns below: the
row's columns, a dict for state, and reward(x) for the current turn. If a tool raises, or a call is invalid, the model
gets the error as the result.

The schema of a tool comes from its type hints and docstring (Args: or :param lines, which may leave parameters out).
Built-in tools: `calculator`, and `lookup` in a table that only the tool can see.
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
from data.types import Prompt
from data.user_code import describe_error, find_callable
from rollout.episodes.tool_calls import Call

MAX_THREADS = 64  # concurrent calls of synchronous tools
MAX_HUNG = 32  # hanging calls of one tool: their threads cannot be ended
NOT_TOOLS = ("reset", "reward", "close")  # methods of a class that the model cannot call
EPISODE = "episode"  # the parameter that gets the Turns
SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
PYTHON = {"string": str, "integer": int, "boolean": bool, "null": NoneType, "array": list, "object": dict}


class Turns:
    """One episode as its tools see it."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.columns = prompt.columns
        self.state: dict[str, Any] = {}
        self.turn = 0
        self.rewards: dict[int, float] = {}  # by turn
        self.objects: dict[str, Any] = {}  # of tools that are classes, by spec

    def reward(self, value: float) -> None:
        """Add to the reward of this turn; the reward function `env` returns the sum over all turns."""
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
        self.num_hung = 0  # threads that were abandoned and still run

    def arguments(self, call: Call) -> dict[str, Any]:
        """The arguments of the function, or a ValueError whose text is for the model."""
        if len(call.positional) > len(self.parameters):
            raise UserError(f"takes {len(self.parameters)} arguments, not {len(call.positional)}")
        arguments = dict(zip(self.parameters, call.positional, strict=False))
        twice = arguments.keys() & call.arguments.keys()
        if twice:
            raise UserError(f"got {min(twice)!r} twice")
        arguments |= call.arguments
        for name, value in arguments.items():
            if name not in self.parameters:
                raise UserError(f"has no argument {name!r}; it takes {', '.join(self.parameters) or 'none'}")
            wrong = problem(value, self.parameters[name])
            if wrong:
                raise UserError(f"{name!r} {wrong}")
        missing = [name for name in self.required if name not in arguments]
        if missing:
            raise UserError(f"needs {missing[0]!r}")
        return arguments


@contextmanager
def _blaming(spec: str, what: str, prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"tools={spec}: {what} on {prompt.source} ({describe_error(error)})") from None


class Toolset:
    """All tools of a run."""

    def __init__(self, tools: Sequence[Tool], timeout: float) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.timeout = timeout
        self._gates: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()  # by event loop
        # Whether tools can give rewards: then an episode without any has reward 0, not None.
        users = [tool for tool in tools if tool.spec not in BUILTIN]
        self.pays = any(tool.takes_episode or hasattr(tool.owner, "reward") for tool in users)
        self.owners = {tool.owner: tool.spec for tool in tools if tool.owner is not None}
        for tool in tools:
            if self.tools[tool.name] is not tool:
                raise UserError(f"tools={tool.spec}: there is another tool called {tool.name!r}; rename one")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def check_rows(self, prompts: Sequence[Prompt], what: str) -> None:
        """Refuse rows without a column that a tool needs."""
        for tool in self.tools.values():
            for name in tool.needs:
                without = next((prompt.source for prompt in prompts if prompt.columns.get(name) is None), None)
                if without:
                    raise UserError(
                        f"tools={tool.spec}: reads the column {name!r}, which {without} of {what} does not have"
                    )

    def begin(self, prompt: Prompt) -> Turns:
        """Start an episode: a new object of every class."""
        turns = Turns(prompt)
        for owner, spec in self.owners.items():
            with _blaming(spec, "cannot begin an episode", prompt):
                turns.objects[spec] = made = owner()
                if hasattr(made, "reset"):
                    made.reset(**_taken(made.reset, prompt.columns))
        return turns

    def add_rewards(self, turns: Turns) -> None:
        """Add the rewards of the objects to the last turn."""
        for spec, made in turns.objects.items():
            if hasattr(made, "reward"):
                with _blaming(spec, "reward() failed", turns.prompt):
                    turns.reward(made.reward())

    def close(self, turns: Turns) -> None:
        """End the objects of an episode, also of one that failed or was cancelled."""
        for spec, made in turns.objects.items():
            if hasattr(made, "close"):
                with _blaming(spec, "close() failed", turns.prompt):
                    made.close()

    def named(self, call: Call) -> dict[str, Any]:
        """The call's arguments by name, positional ones included."""
        tool = self.tools.get(call.name)
        names = list(tool.parameters) if tool else []
        names += [str(number) for number in range(len(names), len(call.positional))]
        return {**dict(zip(names, call.positional, strict=False)), **call.arguments}

    async def run(self, call: Call, turns: Turns) -> tuple[str, bool]:
        """(the result as text for the model, whether it is an error)."""
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
                async with gate, asyncio.timeout(self.timeout) as limit:  # waiting for a thread does not count
                    returned = await self._in_thread(tool, function, arguments)
            return as_text(returned), False
        except TimeoutError as error:
            text = f"{tool.name} took more than {self.timeout:g} s" if limit.expired() else describe_error(error)
        except (Exception, SystemExit) as error:  # a tool may raise anything: the episode continues
            text = describe_error(error)
        if tool.num_hung >= MAX_HUNG:
            raise UserError(
                f"tools={tool.spec}: {tool.num_hung} calls of it hang, and their threads cannot be ended; give it a "
                "limit of its own, make it asynchronous, or raise --tool-timeout"
            )
        return f"error: {without_surrogates(text)}", True

    async def _in_thread(self, tool: Tool, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call it in a daemon thread, which is abandoned if the caller gives up."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def finish(set_outcome: Callable[[Any], None], value: Any) -> None:
            if outcome.done():
                tool.num_hung -= 1  # it was abandoned, and has ended after all
            else:
                set_outcome(value)

        def work() -> None:
            try:
                done = outcome.set_result, function(**arguments)
            except BaseException as error:  # passed to the caller instead of being printed by the thread
                # A future cannot hold StopIteration, and SystemExit of a tool must not end the run.
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                done = outcome.set_exception, error if plain else RuntimeError(describe_error(error))
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, *done)

        threading.Thread(target=work, name="tool", daemon=True).start()
        try:
            return await outcome
        except asyncio.CancelledError:
            tool.num_hung += 1
            raise


def load_tools(specs: Sequence[str], *, timeout: float = 10.0) -> Toolset:
    """Load the tools that the user named with --tools."""
    tools: list[Tool] = []
    for spec in specs:
        label = f"tools={spec}"
        if spec in BUILTIN:
            tools.append(Tool(spec, spec, BUILTIN[spec]))
            continue
        if "." not in spec and ":" not in spec:
            raise UserError(
                f"{label}: no such built-in tool; {suggest(spec, BUILTIN)} or give my_module.function or "
                "path/to/file.py:function"
            )
        name, found = find_callable(spec, label)
        if not inspect.isclass(found):
            tools.append(Tool(spec, name, found))
            continue
        methods = {name: call for name, call in vars(found).items() if inspect.isfunction(call)}
        public = {name: call for name, call in methods.items() if name[0] != "_" and name not in NOT_TOOLS}
        if not public:
            raise UserError(f"{label}: the class has no public method for the model to call; write one")
        tools += [Tool(spec, name, call, owner=found) for name, call in public.items()]
    return Toolset(tools, timeout)


def as_text(returned: Any) -> str:
    """A result for the model: text unchanged, anything else as JSON if possible."""
    if not isinstance(returned, str):
        try:
            returned = json.dumps(returned, ensure_ascii=False)
        except (TypeError, ValueError):
            returned = str(returned)
    return without_surrogates(returned)


def without_surrogates(text: str) -> str:
    """Lone surrogates, which JSON can hold and tokenizers refuse, become question marks."""
    return text.encode("utf-8", "replace").decode()


def _taken(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The columns for which the function has parameters."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}


# schemas ---------------------------------------------------------------------------------------------------------
# Ours, not transformers.utils.get_json_schema: that one refuses docstrings that leave a parameter out, reads no :param
# lines, and writes Optional and return types differently, which would change the prompts of existing runs.


def schema_of(
    function: Callable[..., Any], label: str, name: str | None = None, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """JSON schema of a function; `label` starts error messages: tools=what the user typed."""
    name = name or function.__name__
    doc = inspect.getdoc(function)
    if not doc:
        raise UserError(f"{label}: {name} has no docstring; describe the tool in one, the model reads it")
    try:
        hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except Exception as error:  # evaluating hints may raise anything
        raise UserError(f"{label}: the type hints of {name} cannot be read ({error})") from None
    about, described = _read_doc(doc)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in (EPISODE, *skip):
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{label}: {name} takes {parameter}; give its parameters names, the model calls by name")
        if parameter.name not in hints:
            raise UserError(
                f"{label}: {name} has no type hint for {parameter.name!r}; add one, the schema is built from type hints"
            )
        properties[parameter.name] = _type_schema(hints[parameter.name], f"{label}: {parameter.name!r} of {name}")
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def problem(value: Any, schema: dict[str, Any]) -> str | None:
    """What is wrong with a value, in words for the model; None if it matches the schema."""
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
    raise UserError(
        f"{label} is a {getattr(hint, '__name__', hint)}, which JSON cannot express; use str, int, float, bool, list, "
        "dict[str, ...], Literal or a union of them"
    )


def _read_doc(doc: str) -> tuple[str, dict[str, str]]:
    """(description, descriptions of parameters) of a docstring, with Args: or :param lines or neither."""
    sections = r"^\s*(?:Args|Arguments|Parameters|Returns|Raises|Examples?):|^\s*:\w+"
    about = re.split(sections, doc, flags=re.MULTILINE)[0]
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


# built-in tools --------------------------------------------------------------------------------------------------


MAX_LENGTH = 200  # characters of an expression
MAX_BITS = 512  # of an intermediate integer: powers of powers would otherwise never end
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
