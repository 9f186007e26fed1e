"""code[:SECONDS]: 1 if the program in a completion passes the tests of its row, else 0.

The program is the last fenced block of the completion, or all of it if there is none. Columns of the row:

    tests        assert lines (a list or one text), or a text with check(candidate), as in HumanEval (also as `test`)
    entry_point  the function that is passed to check()

A completion may also continue a function that the prompt began: prompt and completion are then run together. A row
without tests gets None.

Every program runs in its own interpreter: in an empty folder, with limits on time, memory, file size and processes, and
without network (a network namespace if the system allows it, otherwise connections are refused). This protects against
accidents. It is not a security boundary: code that tries to break out will, so run an untrusted policy in a container.

Tests that only compare return values with data (can_run_apart defines the forms) run in another process than the
program, which receives arguments as data, answers with data, and never sees the tests (code_child.py). Changing
builtins, modules, frames or __eq__, or writing files, then gains a program nothing. What can still earn an undeserved
reward:

    All other tests (classes, attributes and items of results, expected exceptions, arguments changed in place, globals,
    functions as arguments, modules such as sys or unittest, many calls) run in the program's own process. There an
    __eq__ that is always true passes, and code that walks frames can read the tests and answer for them; no check
    within one Python process can prevent that.
    Functions other than the tested one that the prompt defines and the tests use (encode in a test of decode): a
    program may redefine them.
    As root, if user namespaces are refused, a program can read the memory of the process that runs the tests.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout.rewards.code_child import ALIASES, PURE
from rollout.rewards.functions import text_of
from rollout.rewards.workers import kill_group

CHILD = Path(__file__).with_name("code_child.py")
SECONDS = 10.0
START_SECONDS = 5.0  # for the interpreter, on a busy machine
MEMORY_GB = 1.0
FILE_MB = 16.0
AT_ONCE = 8
FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n`]*\n(.*?)(?:^[ ]{0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
KEPT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # environment variables that are passed on: no keys, no tokens


def code(argument: str | None) -> Callable[..., list[float | None]]:
    seconds = SECONDS
    if argument is not None:
        try:
            seconds = float(argument)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= 3600:
            raise ValueError(f"reward_funcs=code:{argument}: write code:SECONDS, the time one program may take")

    def score(
        completions: Sequence[Any],
        prompts: Sequence[Any],
        tests: Sequence[Any] | None = None,
        test: Sequence[Any] | None = None,
        entry_point: Sequence[Any] | None = None,
    ) -> list[float | None]:
        if tests is None and test is None:
            raise ValueError("the data has neither a column 'tests' nor 'test'")
        nothing = [None] * len(completions)
        rows = zip(completions, prompts, tests or nothing, test or nothing, entry_point or nothing, strict=True)
        jobs = [_job(text_of(done), prompt, first or second, entry) for done, prompt, first, second, entry in rows]
        with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as threads:
            return list(threads.map(lambda job: None if job is None else float(passes(*job, seconds)), jobs))

    return score


def _job(text: str, prompt: Any, tests: Any, entry_point: str | None) -> tuple[str, str] | None:
    """(program, tests), or None without tests."""
    tests = "\n".join(str(line) for line in tests) if isinstance(tests, (list, tuple)) else tests
    if not tests or not str(tests).strip():
        return None
    tests = str(tests)
    if entry_point and re.search(r"^def check\(", tests, re.MULTILINE):
        tests = f"{tests}\n\ncheck({entry_point})\n"
    return program(text, prompt, entry_point), tests


def program(text: str, prompt: Any, entry_point: str | None = None) -> str:
    """What to run: the completion's code, after the prompt's if that is code too."""
    found = last_block(text)
    begun = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    begun = begun if isinstance(prompt, str) else last_block(begun)
    if not _is_code(begun, entry_point):
        return found
    whole = f"{begun.rstrip()}\n\n{found}"  # the completion repeats the whole function: the later definition counts
    if _defines(found, entry_point) and _parses(whole):
        return whole
    return begun + found if isinstance(prompt, str) else f"{begun.rstrip()}\n{found}"


def last_block(text: str) -> str:
    """
    >>> last_block("First\\n```python\\nx = 1\\n```\\nthen\\n```\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    blocks = FENCE.findall(text)
    return textwrap.dedent(blocks[-1][1]) if blocks else text


def _is_code(text: str, entry_point: str | None) -> bool:
    """Whether it is Python, perhaps a function without its body. A word alone parses too, so it needs a definition."""
    return any(_parses(text + end) for end in ("", "\n    pass\n")) and bool(
        re.search(r"^(def|class|import|from|@)\b", text, re.MULTILINE) or _defines(text, entry_point)
    )


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # odd text makes the parser raise these
        return False
    return True


def _defines(text: str, name: str | None) -> bool:
    return bool(name and re.search(rf"^(async def|def|class) {re.escape(name)}\b", text, re.MULTILINE))


def passes(source: str, tests: str, seconds: float) -> bool:
    """Whether the tests ran to their end; a program that exits early has not passed."""
    if can_run_apart(tests):
        verdict = _verdict(source, tests, seconds, together=False)
        if verdict != "unfit":  # only seen at run time, such as a test that passes a function to the program
            return verdict == "passed"
    return _verdict(source, tests, seconds, together=True) == "passed"


def can_run_apart(tests: str) -> bool:
    """Whether the tests mean the same when they run in another process than the program. Depends on the tests only, not
    on the program; unknown forms do not qualify."""
    try:
        _Reading(ast.parse(tests))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # from the parser, and _Unknown
        return False
    return True


class _Unknown(ValueError):
    """A form of test that might mean something else if results are copies."""


# Kinds of expressions in tests.
CONST = "const"  # a number, a string: nothing that a call could change
FRESH = "fresh"  # data in which no object occurs twice, referred to by at most one name
SHARED = "shared"  # data of which a name refers to at least a part
RESULT = "result"  # a return value of the program
PROGRAM = "program"  # a function of the program
MODULE = "module"
STALE = "stale"  # must not be used any more: a call may have changed it

TO_CONST = {"abs", "bool", "float", "int", "len", "print", "repr", "round", "str"}  # allowed on results too
TO_COPY = {"dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple"}  # likewise; they read all of it
TO_ITERATOR = {"enumerate", "filter", "map", "reversed", "zip"}
OF_DATA = {"all", "any", "bin", "bytearray", "bytes", "chr", "complex", "divmod", "hex", "oct", "ord", "pow", "range"}
TYPES = {"bool", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"}
DRAWS = ("randint", "random", "randrange", "uniform")
REPEATING = ("functools", "itertools", "operator", "random")  # may put one object in several places
BY_NAME = {"__import__", "compile", "eval", "exec", "globals", "input", "locals", "vars"}  # reach the program by name
STATE = ("seed", "setcontext", "seterr", "setstate")  # change what the program does
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)


class _Reading:
    """Reads tests in the order in which they would run, and raises _Unknown at the first form that might mean something
    else if arguments and results are copies. Tracks which names refer to data, which to a result, and which data a call
    may have changed. The body of a function is read at each call, that of a loop twice."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.alias))}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        if BY_NAME & {node.id for node in nodes if isinstance(node, ast.Name)}:
            raise _Unknown
        theirs = {node.id for node in nodes if isinstance(node, ast.Name)} - own - {*PURE, *ALIASES, *dir(builtins)}
        # As in code_child.wanted: if tests name only builtins, one of them is the program's function.
        self.builtins = set(dir(builtins)) if theirs else set()
        self.names: dict[str, Any] = {}  # a kind, or (function of the tests, whether it is global)
        self.globals: dict[str, Any] = self.names
        self.modules: dict[str, str] = {}
        self.parents: dict[str, list[str]] = {}  # loop variable -> names of the data it iterates over
        self.stale: set[str] = set()  # names, and items such as "case[0]"
        self.calls = self.depth = 0
        self.reads = False  # whether the last loop iterated over a result
        self.body(tree.body)

    # Statements.

    def body(self, statements: list[ast.stmt]) -> list[str]:
        """The kinds of its return values."""
        return [kind for node in statements for kind in self.statement(node)]

    def statement(self, node: ast.stmt) -> list[str]:
        match node:
            case ast.Assert(test=test):  # the message is evaluated only after the test failed
                self.value(test)
            case ast.Expr(value=ast.Name(id=name)) if name in self.builtins:
                pass
            case ast.Expr(value=value):
                self.value(value)
            case ast.Assign(targets=[target], value=value):
                self.bind(target, self.kept(value))
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                if self.named(name) != CONST or self.value(value) != CONST:
                    raise _Unknown
            case ast.FunctionDef(decorator_list=[]):
                self.names[node.name] = (node, self.depth == 0)
            case ast.Import() | ast.ImportFrom():
                self.imported(node)
            case ast.For(orelse=[]):
                return self.loop([(node.target, node.iter, [])], lambda: self.body(node.body), node)
            case ast.If():
                return self.branches(node)
            case ast.Return(value=value):
                return [CONST if value is None else self.value(value)]
            case ast.Pass() | ast.Continue() | ast.Break():
                pass
            case _:
                raise _Unknown
        return []

    def imported(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
            if module.partition(".")[0] not in PURE or alias.name in ("*", *STATE):
                raise _Unknown
            name = (alias.asname or alias.name).partition(".")[0]
            self.names[name], self.modules[name] = MODULE, module.partition(".")[0]

    def branches(self, node: ast.If) -> list[str]:
        self.value(node.test)
        before = dict(self.names)
        returned = self.body(node.body)
        after, self.names = self.names, before
        returned += self.body(node.orelse)
        for name in {*after, *self.names}:
            if after.get(name) != self.names.get(name):
                self.names[name] = STALE
        return returned

    def loop(self, parts: list[tuple[ast.expr, ast.expr, list[ast.expr]]], inner: Callable[[], Any], node: Any) -> Any:
        """A for statement or a comprehension; parts are (target, iterable, conditions)."""
        first = self.iterated(parts[0][1])
        kinds, calls = [first[0]], self.calls
        for _ in range(2):  # again, with what the first iteration changed
            for place, (target, iterable, conditions) in enumerate(parts):
                kind, parents = self.iterated(iterable) if place else first
                kinds.append(kind)
                self.bind(target, kind, parents)
                for condition in conditions:
                    self.value(condition)
            found = inner()
        leaves = any(isinstance(x, (ast.Break, ast.Return)) for x in ast.walk(node))
        self.reads = RESULT in kinds
        if self.reads and (leaves or self.calls > calls):
            raise _Unknown  # it may be endless, and the program must not decide how often it is called
        return found

    def iterated(self, node: ast.expr) -> tuple[str, list[str]]:
        """(kind of its items, names of the data that contains them)."""
        sources = [node]
        match node:
            case ast.List(elts=parts) | ast.Set(elts=parts) if parts and set(self.values(parts)) == {CONST}:
                return CONST, []
            case ast.Call(func=ast.Name(id="zip" | "enumerate" as name), args=sources) if name not in self.names:
                pass
            case ast.Call(func=ast.Attribute(value=ast.Name() as value, attr="items" | "keys" | "values")):
                sources = [value]
        holders = [x.id for x in sources if isinstance(x, ast.Name)]
        whole = all(self.names.get(name) == FRESH for name in holders) and len(set(holders)) == len(holders)
        kinds = self.values(sources)
        copied = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TO_COPY
        if RESULT in kinds and not copied:
            raise _Unknown  # a generator may change an item when it yields the next one
        if whole and all(
            isinstance(x, ast.Name) or kind in (CONST, FRESH) for x, kind in zip(sources, kinds, strict=True)
        ):
            return (FRESH if holders or FRESH in kinds else CONST), holders
        return self.either(kinds), holders

    def bind(self, target: ast.expr, kind: str, parents: Sequence[str] = ()) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self.bind(part, kind, parents)
        elif isinstance(target, ast.Name):
            self.names[target.id], self.parents[target.id] = kind, list(parents)
            self.stale = {path for path in self.stale if path.partition("[")[0] != target.id}
        else:
            raise _Unknown

    def kept(self, node: ast.expr) -> str:
        """The kind of a value that gets a name. A second name for the same data is not supported."""
        kind = self.value(node)
        if kind == SHARED or isinstance(node, ast.GeneratorExp):
            raise _Unknown
        return kind

    # Expressions.

    def value(self, node: ast.expr) -> str:
        kind = self.kind(node)
        if kind in (PROGRAM, MODULE, STALE):
            raise _Unknown
        return kind

    def values(self, nodes: Sequence[ast.expr]) -> list[str]:
        """Kinds in order of evaluation. A result, or data that a call may change, must not be held across a call."""
        kinds: list[str] = []
        for place, node in enumerate(nodes):
            calls = self.calls
            kinds.append(self.value(node))
            if self.calls > calls:
                early = [x.id for part in nodes[:place] for x in ast.walk(part) if isinstance(x, ast.Name)]
                if RESULT in kinds[:-1] or any(self.is_stale(name) for name in early):
                    raise _Unknown
        return kinds

    def is_stale(self, path: str) -> bool:
        name = path.partition("[")[0]
        if path == name:
            return any(other.partition("[")[0] == name for other in self.stale)
        return path in self.stale or name in self.stale

    def kind(self, node: ast.expr) -> str:
        match node:
            case ast.Constant():
                return CONST
            case ast.Name(id=name):
                return self.named(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                kind = self.either(self.values(parts))
                return FRESH if kind == CONST and not isinstance(node, ast.Tuple) else kind
            case ast.Dict(keys=keys, values=values):
                pairs = [x for pair in zip(keys, values, strict=True) for x in pair if x is not None]
                return self.either([FRESH, *self.values(pairs)])
            case ast.Starred(value=value):
                return self.value(value)
            case ast.Compare():
                return self.compared(node)
            case ast.BoolOp(values=parts):
                return self.either([self.value(part) for part in parts])
            case ast.UnaryOp(op=op, operand=operand):
                kind = self.value(operand)
                return CONST if isinstance(op, ast.Not) else kind
            case ast.BinOp():
                return self.computed(node)
            case ast.IfExp():
                return self.either([self.value(x) for x in (node.test, node.body, node.orelse)])
            case ast.Subscript():
                return self.indexed(node)
            case ast.Slice():
                return self.either(self.values([x for x in (node.lower, node.upper, node.step) if x is not None]))
            case ast.JoinedStr(values=parts):
                if RESULT in self.values([part.value for part in parts if isinstance(part, ast.FormattedValue)]):
                    raise _Unknown  # a subclass may define __format__
                return CONST
            case ast.Attribute() if self.module_of(node) and node.attr not in STATE:
                return CONST
            case ast.ListComp() | ast.SetComp() | ast.DictComp():
                return self.comprehension(node)
            case ast.GeneratorExp():
                calls, kind = self.calls, self.comprehension(node)
                if self.calls > calls or self.reads:
                    raise _Unknown  # unknown when it is consumed
                return kind
            case ast.Call():
                return self.called(node)
        raise _Unknown

    def named(self, name: str) -> str:
        if name in self.names:
            kind = self.names[name]
            if not isinstance(kind, str) or self.is_stale(name):
                return STALE
            return SHARED if kind == FRESH else kind
        if name in PURE or name in ALIASES:
            return MODULE
        is_class = name[:1].isupper() and "_" not in name  # tests may do anything with its objects
        return CONST if name == "__name__" else STALE if is_class or name in self.builtins else PROGRAM

    def module_of(self, node: ast.expr) -> str | None:
        """math of math.pi, datetime of datetime.timezone.utc."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name) or self.named(node.id) != MODULE:
            return None
        return self.modules.get(node.id, node.id)

    def either(self, kinds: Sequence[str]) -> str:
        return next((kind for kind in (RESULT, SHARED, FRESH) if kind in kinds), CONST)

    def compared(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        kinds = self.values(sides)
        for op, right, kind in zip(node.ops, node.comparators, kinds[1:], strict=True):
            if isinstance(op, (ast.In, ast.NotIn)) and kind == RESULT:
                raise _Unknown  # __contains__ need not agree with its items
            singleton = isinstance(right, ast.Constant) and any(right.value is x for x in (None, True, False))
            if isinstance(op, (ast.Is, ast.IsNot)) and not singleton:
                raise _Unknown
        return CONST

    def computed(self, node: ast.BinOp) -> str:
        sides = [node.left, node.right]
        kinds = self.values(sides)
        if RESULT in kinds:
            other = sides[kinds[0] == RESULT]
            number = not isinstance(other, ast.Constant) or isinstance(other.value, (int, float, complex))
            if not number or FRESH in kinds or not isinstance(node.op, ARITHMETIC):
                raise _Unknown
        elif FRESH in kinds and isinstance(node.op, ast.Mult):
            repeated = sides[kinds[0] != FRESH]
            flat = isinstance(repeated, ast.List) and all(isinstance(part, ast.Constant) for part in repeated.elts)
            return FRESH if flat else SHARED
        return self.either(kinds)

    def indexed(self, node: ast.Subscript) -> str:
        if (path := self.path(node)) is not None:
            return STALE if self.is_stale(path) else SHARED
        kinds = self.values([node.value, node.slice])
        if RESULT in kinds:
            raise _Unknown  # a defaultdict has items that are not sent
        return kinds[0]

    def path(self, node: ast.expr) -> str | None:
        """x or x[0], if x is a name of FRESH data."""
        holder = node.value if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) else node
        if isinstance(holder, ast.Name) and self.names.get(holder.id) == FRESH:
            return ast.unparse(node)
        return None

    def comprehension(self, node: Any) -> str:
        before = dict(self.names), dict(self.parents), set(self.stale), self.calls
        items = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        parts = [(part.target, part.iter, part.ifs) for part in node.generators]
        kind = self.either(self.loop(parts, lambda: self.values(items), node))
        if kind == RESULT and not self.reads:
            raise _Unknown  # the first result would be held until the last
        self.leave(*before)
        return FRESH if kind == CONST else kind

    def leave(self, names: dict[str, Any], parents: dict[str, list[str]], stale: set[str], calls: int) -> None:
        """Restore these names. Results among them are stale if the program was called since."""
        self.names, self.parents, self.stale = names, parents, stale | self.stale
        if self.calls > calls:
            self.spoil()

    def spoil(self) -> None:
        for names in (self.names, self.globals):
            names.update({name: STALE for name, kind in names.items() if kind == RESULT})

    # Calls.

    def called(self, node: ast.Call) -> str:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            return self.method(node.func, given)
        if not isinstance(node.func, ast.Name):
            raise _Unknown
        name, held = node.func.id, self.names.get(node.func.id)
        if isinstance(held, tuple):
            return self.inlined(*held, node)
        if held == MODULE:
            return self.of_module(self.modules[name], name, given)
        if self.named(name) == PROGRAM:
            return self.asked(given)
        if held is not None or name not in self.builtins:
            raise _Unknown
        return self.builtin(name, given)

    def asked(self, given: list[ast.expr]) -> str:
        """A call of the program, which may change its arguments."""
        for node in given:
            inner = node.value if isinstance(node, ast.Starred) else node
            path = self.path(inner)
            if path is None:
                if self.value(inner) not in (CONST, FRESH):
                    raise _Unknown
            elif self.is_stale(path):
                raise _Unknown
            else:
                self.spend(path)
        self.calls += 1
        self.spoil()
        return RESULT

    def spend(self, path: str) -> None:
        if path not in self.stale:
            self.stale.add(path)
            for parent in self.parents.get(path.partition("[")[0], []):
                self.spend(parent)

    def inlined(self, node: ast.FunctionDef, is_global: bool, call: ast.Call) -> str:
        """A call of a function of the tests."""
        plain = ast.unparse(node.args) == ", ".join(arg.arg for arg in node.args.args)
        if self.depth > 5 or call.keywords or len(call.args) != len(node.args.args) or not plain:
            raise _Unknown
        functions = [isinstance(x, ast.Name) and self.named(x.id) == PROGRAM for x in call.args]
        kinds = iter(self.values([x for x, is_function in zip(call.args, functions, strict=True) if not is_function]))
        names, before = self.names, (dict(self.parents), set(self.stale), self.calls)
        if self.depth == 0:
            self.globals = names
        self.names = dict(self.globals if is_global else names)
        self.depth += 1
        for parameter, is_function in zip(node.args.args, functions, strict=True):
            self.bind(ast.Name(parameter.arg), PROGRAM if is_function else next(kinds))
        returned = self.either(self.body(node.body))
        self.depth -= 1
        self.leave(names, *before)
        return returned

    def method(self, function: ast.Attribute, given: list[ast.expr]) -> str:
        if (module := self.module_of(function)) is not None:
            return self.of_module(module, function.attr, given)
        kinds = self.values([function.value, *given])
        if RESULT in kinds or SHARED in kinds[1:]:
            raise _Unknown
        return FRESH if kinds[0] == CONST else SHARED

    def of_module(self, module: str, name: str, given: list[ast.expr]) -> str:
        if name == "deepcopy" and len(given) == 1 and self.path(given[0]) is not None:
            self.value(given[0])
            return FRESH
        kinds = self.values(given)
        if RESULT in kinds and module != "math" or name in STATE:
            raise _Unknown
        if module == "math" or (module == "random" and name in DRAWS):
            return RESULT if RESULT in kinds else CONST
        return SHARED if SHARED in kinds or (FRESH in kinds and module in REPEATING) else FRESH

    def builtin(self, name: str, given: list[ast.expr]) -> str:
        if name == "isinstance" and len(given) == 2:
            kinds = given[1].elts if isinstance(given[1], ast.Tuple) else [given[1]]
            if not all(isinstance(kind, ast.Name) and kind.id in TYPES - self.names.keys() for kind in kinds):
                raise _Unknown
            self.value(given[0])
            return CONST
        if name not in TO_CONST | TO_COPY | TO_ITERATOR | OF_DATA:
            raise _Unknown
        if name in TO_COPY | {"all", "any"} and len(given) == 1 and (lazy := self.lazy(given[0])) is not None:
            kinds = [self.comprehension(lazy)]
            if name in ("all", "any") and self.reads:
                raise _Unknown  # they may stop early, and it may be endless
        else:
            kinds = self.values(given)
        if RESULT in kinds and name != "print":
            if name not in TO_CONST | TO_COPY:
                raise _Unknown
            return RESULT  # even a length: the program must not decide how often a loop calls it
        if name in TO_CONST:
            return CONST
        if name in TO_COPY - {"sum"} or (name == "sum" and len(given) > 1):
            return SHARED if SHARED in kinds else FRESH
        return SHARED if name in TO_ITERATOR else FRESH if name == "bytearray" else CONST

    def lazy(self, node: ast.expr) -> ast.GeneratorExp | None:
        """A generator that is consumed at once, or map(...) as one."""
        match node:
            case ast.GeneratorExp():
                return node
            case ast.Call(func=ast.Name(id="map"), args=[ast.Lambda() as function, iterable], keywords=[]):
                name = ast.unparse(function.args)
                return _generator(name, function.body, iterable) if name.isidentifier() else None
            case ast.Call(func=ast.Name(id="map"), args=[ast.Name() as function, iterable], keywords=[]):
                return _generator(" item", ast.Call(function, [ast.Name(" item")], []), iterable)
        return None


def _generator(name: str, item: ast.expr, iterable: ast.expr) -> ast.GeneratorExp:
    return ast.GeneratorExp(item, [ast.comprehension(ast.Name(name), iterable, [], 0)])


def _verdict(source: str, tests: str, seconds: float, *, together: bool) -> str:
    """passed, failed or unfit."""
    secret = secrets.token_hex(16)
    limits = {"seconds": seconds, "memory_gb": MEMORY_GB, "file_mb": FILE_MB}
    job = json.dumps({"program": source, "tests": tests, "together": together, "limits": limits, "secret": secret})
    with tempfile.TemporaryDirectory(prefix="code-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={name: os.environ[name] for name in KEPT if name in os.environ}
            | {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(job.encode(), timeout=seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            _end(process)
    word, _, verdict = output.decode("ascii", "replace").partition(" ")
    return verdict if word == secret else "failed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and whatever it may have started."""
    kill_group(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
