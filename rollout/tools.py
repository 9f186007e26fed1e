"""Tools that the model calls in the middle of an episode (tool_episode.py has that).

    toolset = load_tools(("lookup", "my_tools.py:weather"), timeout=10.0)
    toolset.schemas                                     # what the chat template shows to the model
    text, failed = await toolset.run(Call(name="weather", arguments={"city": "Bern"}), turns)

A tool is a function with type hints and a docstring, asynchronous or not; one that is not runs in a thread of its own,
so it must stand being called several times at once. A class is one object per episode: its public methods are tools,
and it may have reset(**columns), called with the columns of the row, and reward() and close(), called at the end. A
parameter named `episode` gets the Turns below: the row's columns, a dict to remember things in, and reward(x) for the
turn at hand. What a tool raises is told to the model as its result, and so is a call that makes no sense.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from data.hints import suggest
from data.types import Prompt
from data.user_code import find_callable, told
from rollout.builtin_tools import BUILTIN
from rollout.tool_calls import Call
from rollout.tool_schemas import OWN, problem, schema_of

MAX_THREADS = 64  # calls of synchronous tools at a time
MAX_HUNG = 32  # calls of one tool that hang at a time: their threads cannot be ended
NOT_TOOLS = ("reset", "reward", "close")  # methods of a class that are not the model's to call


class Turns:
    """One episode as its tools see it."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.columns = prompt.columns
        self.state: dict[str, Any] = {}
        self.turn = 0
        self.rewards: dict[int, float] = {}  # by turn
        self.objects: dict[str, Any] = {}  # of the tools that are classes

    def reward(self, value: float) -> None:
        """Add to the reward of this turn; the sum over all turns is what the reward function `env` gives."""
        self.rewards[self.turn] = self.rewards.get(self.turn, 0.0) + float(value)


class Tool:
    """One function of the model's, or one method of a class."""

    def __init__(self, spec: str, name: str, call: Callable[..., Any], owner: type | None = None) -> None:
        self.spec, self.name, self.owner = spec, name, owner
        self.schema = schema_of(call, f"tools={spec}", name, skip=("self",) if owner else ())
        self.parameters: dict[str, Any] = self.schema["function"]["parameters"]["properties"]
        self.required: list[str] = self.schema["function"]["parameters"]["required"]
        self.takes_episode = OWN in inspect.signature(call).parameters
        self.needs: tuple[str, ...] = getattr(call, "needs_columns", ())
        self.call = call
        self.is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        self.num_hung = 0  # threads that were given up on and still run

    def arguments(self, call: Call) -> dict[str, Any]:
        """What the function is called with, or a ValueError in words for the model."""
        if len(call.positional) > len(self.parameters):
            raise ValueError(f"takes {len(self.parameters)} arguments, not {len(call.positional)}")
        arguments = dict(zip(self.parameters, call.positional, strict=False))
        twice = arguments.keys() & call.arguments.keys()
        if twice:
            raise ValueError(f"got {min(twice)!r} twice")
        arguments |= call.arguments
        for name, value in arguments.items():
            if name not in self.parameters:
                raise ValueError(f"has no argument {name!r}; it takes {', '.join(self.parameters) or 'none'}")
            wrong = problem(value, self.parameters[name])
            if wrong:
                raise ValueError(f"{name!r} {wrong}")
        missing = [name for name in self.required if name not in arguments]
        if missing:
            raise ValueError(f"needs {missing[0]!r}")
        return arguments


class Toolset:
    """All tools of a run."""

    def __init__(self, tools: Sequence[Tool], timeout: float) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.timeout = timeout
        self._gates: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()  # by event loop
        # Whether episodes have a reward of their own: then one in which nothing was paid has 0, not none.
        own = [tool for tool in tools if tool.spec not in BUILTIN]
        self.pays = any(tool.takes_episode or hasattr(tool.owner, "reward") for tool in own)
        self.owners = {tool.owner: tool.spec for tool in tools if tool.owner is not None}
        for tool in tools:
            if self.tools[tool.name] is not tool:
                raise ValueError(f"tools={tool.spec}: there is another tool called {tool.name!r}; rename one")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def check_rows(self, prompts: Sequence[Prompt], what: str) -> None:
        """Refuse rows that a tool could not work on."""
        for tool in self.tools.values():
            for name in tool.needs:
                without = next((prompt.source for prompt in prompts if prompt.columns.get(name) is None), None)
                if without:
                    raise ValueError(
                        f"tools={tool.spec}: reads the column {name!r}, which {without} of {what} does not have"
                    )

    def begin(self, prompt: Prompt) -> Turns:
        """A fresh object of every class."""
        turns = Turns(prompt)
        for owner, spec in self.owners.items():
            try:
                turns.objects[spec] = made = owner()
                if hasattr(made, "reset"):
                    made.reset(**_taken(made.reset, prompt.columns))
            except Exception as error:  # the user's code may raise anything
                raise ValueError(f"tools={spec}: cannot begin an episode on {prompt.source} ({told(error)})") from None
        return turns

    def add_rewards(self, turns: Turns) -> None:
        """Those of the objects, to the last turn."""
        for spec, made in turns.objects.items():
            if not hasattr(made, "reward"):
                continue
            try:
                turns.reward(made.reward())
            except Exception as error:  # as above
                raise ValueError(f"tools={spec}: reward() failed on {turns.prompt.source} ({told(error)})") from None

    def close(self, turns: Turns) -> None:
        """End the objects of an episode, also of one that failed or was called off."""
        for spec, made in turns.objects.items():
            try:
                if hasattr(made, "close"):
                    made.close()
            except Exception as error:  # as above
                raise ValueError(f"tools={spec}: close() failed on {turns.prompt.source} ({told(error)})") from None

    def named(self, call: Call) -> dict[str, Any]:
        """The arguments as the model meant them, by name."""
        tool = self.tools.get(call.name)
        names = list(tool.parameters) if tool else []
        names += [str(number) for number in range(len(names), len(call.positional))]
        return {**dict(zip(names, call.positional, strict=False)), **call.arguments}

    async def run(self, call: Call, turns: Turns) -> tuple[str, bool]:
        """(what the model is told, whether it is an error)."""
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
            arguments[OWN] = turns
        function = tool.call if tool.owner is None else getattr(turns.objects[tool.spec], tool.name)
        try:
            if tool.is_async:
                async with asyncio.timeout(self.timeout) as limit:
                    returned = await function(**arguments)
            else:
                gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
                async with gate, asyncio.timeout(self.timeout) as limit:  # the wait for a thread is not the tool's time
                    returned = await self._in_thread(tool, function, arguments)
            return as_text(returned), False
        except TimeoutError as error:
            text = f"{tool.name} took more than {self.timeout:g} s" if limit.expired() else told(error)
        except (Exception, SystemExit) as error:  # a tool may fail in any way: the episode goes on
            text = told(error)
        self._check_hung(tool)
        return f"error: {without_surrogates(text)}", True

    def _check_hung(self, tool: Tool) -> None:
        if tool.num_hung >= MAX_HUNG:
            raise ValueError(
                f"tools={tool.spec}: {tool.num_hung} calls of it hang, and their threads cannot be ended; give it a "
                "limit of its own, make it asynchronous, or raise --tool-timeout"
            )

    async def _in_thread(self, tool: Tool, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call it in a thread that does not keep the process alive; who gives up on it leaves the thread to itself."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def tell(returned: Any, failure: Exception | None) -> None:
            if outcome.done():
                tool.num_hung -= 1  # it was given up on, and has come to its end after all
            elif failure is None:
                outcome.set_result(returned)
            else:
                outcome.set_exception(failure)

        threading.Thread(target=_work, args=(function, arguments, loop, tell), name="tool", daemon=True).start()
        try:
            return await outcome
        except asyncio.CancelledError:
            tool.num_hung += 1
            raise


def _work(function: Callable[..., Any], arguments: dict[str, Any], loop: Any, tell: Callable[..., None]) -> None:
    returned = failure = None
    try:
        returned = function(**arguments)
    except BaseException as error:  # whatever it is goes to who waits, not into a thread's last words
        # A future takes no StopIteration, and an exit of a tool is no exit of the run.
        plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        failure = error if plain else RuntimeError(told(error))
    if not loop.is_closed():
        loop.call_soon_threadsafe(tell, returned, failure)


def load_tools(specs: Sequence[str], *, timeout: float = 10.0) -> Toolset:
    """Tools by what the user typed."""
    tools: list[Tool] = []
    for spec in specs:
        label = f"tools={spec}"
        if spec in BUILTIN:
            tools.append(Tool(spec, spec, BUILTIN[spec]))
            continue
        if "." not in spec and ":" not in spec:
            raise ValueError(
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
            raise ValueError(f"{label}: the class has no public method for the model to call; write one")
        tools += [Tool(spec, name, call, owner=found) for name, call in public.items()]
    return Toolset(tools, timeout)


def as_text(returned: Any) -> str:
    """A result as the model reads it: text as it is, anything else as JSON where it can be."""
    if not isinstance(returned, str):
        try:
            returned = json.dumps(returned, ensure_ascii=False)
        except (TypeError, ValueError):
            returned = str(returned)
    return without_surrogates(returned)


def without_surrogates(text: str) -> str:
    """Half a character, which JSON can write and no tokenizer takes, becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _taken(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The columns that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}
