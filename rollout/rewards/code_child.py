"""Runs one program and its tests, and reports whether they passed. Run as a script; imports nothing of ours.

    python -I code_child.py < {"program", "tests", "together", "limits": {...}, "secret"}  # JSON on stdin

Two processes. The judge forks the program's process before it reads its input, so the tests, the values they expect and
the secret that reports a pass are never in the program's memory. The tests run in the judge, where the program's
functions are stand-ins: a call sends its arguments as data and gets the result back as data, and the judge compares.

A result that is an object of the program's own class stays in the program's process: the judge can iterate it and ask
for its length, truth value and text, but it never equals data, whatever its __eq__ returns. Running such tests together
instead would let a program choose that by returning such an object; and no honest program returns one to tests that
compare a call with a literal or calculate with it, and only those run apart.

With "together" the tests run in the program's process. Some tests need that (classes, patched modules, captured
output), and there a program can do what it wants with them.

This protects the trainer from accidents (endless loops, memory, forks, downloads). It is not a security boundary.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import signal
import sys
from importlib import import_module

GIB = 2**30
MAX_MESSAGE = 2**28  # bytes
EXACT_INT = 2**53  # larger ones are sent in hexadecimal: Python limits decimal digits
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 0x10000000, 0x40000000, 1, 4
REFUSED = (  # prefixes of audit events; creating a socket is allowed, since asyncio needs a pair
    "socket.connect", "socket.bind", "socket.send", "socket.get", "subprocess.Popen", "os.fork", "os.exec",
    "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "os.kill",
)  # fmt: skip
PURE = (  # modules that behave the same in any process; tests with others run together with the program
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "numpy", "operator", "random", "re", "statistics", "string", "time", "typing",
)  # fmt: skip
ALIASES = {"np": "numpy"}
HELPERS = ("unittest", "doctest", "pytest", "_pytest")  # imported again for tests that run together with a program
BUILTINS = dict(vars(builtins))  # before a program could change them
run_code, compile_code = exec, compile
CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # [math.nan] == [math.nan], by identity
MAX_CALLS, MAX_ASKED = 2000, 2**20  # limits apart (calls, bytes of arguments): larger tests run faster together


def rebuild(module: str, name: str) -> object:
    """A constructor that imports its module on the first call."""
    return lambda *arguments: getattr(import_module(module), name)(*arguments)


def zone(x: object) -> object:
    """The time zone of a datetime or time as a fixed offset, which keeps equality."""
    offset = x.utcoffset()
    return None if offset is None else import_module("datetime").timezone(offset)


# Data types besides None, bool, str, float, int and list: (value -> constructor arguments, constructor).
PLAIN = {
    "builtins.tuple": (lambda x: [list(x)], tuple),
    "builtins.set": (lambda x: [list(x)], set),
    "builtins.frozenset": (lambda x: [list(x)], frozenset),
    "builtins.dict": (lambda x: [list(x.keys()), list(x.values())], lambda keys, values: dict(zip(keys, values))),  # noqa: B905
    "builtins.dict_keys": (lambda x: [list(x)], lambda keys: dict.fromkeys(keys).keys()),
    "builtins.dict_values": (lambda x: [list(x)], lambda values: dict(enumerate(values)).values()),
    "builtins.dict_items": (lambda x: [list(x)], lambda pairs: dict(pairs).items()),
    "builtins.bytes": (lambda x: [x.decode("latin-1"), "latin-1"], bytes),
    "builtins.bytearray": (lambda x: [x.decode("latin-1"), "latin-1"], bytearray),
    "builtins.memoryview": (lambda x: [x.tobytes()], memoryview),
    "builtins.complex": (lambda x: [x.real, x.imag], complex),
    "builtins.range": (lambda x: [x.start, x.stop, x.step], range),
    "collections.deque": (lambda x: [list(x), x.maxlen], rebuild("collections", "deque")),
    "collections.Counter": (lambda x: [dict(x)], rebuild("collections", "Counter")),
    "collections.OrderedDict": (lambda x: [dict(x)], rebuild("collections", "OrderedDict")),
    "decimal.Decimal": (lambda x: [str(x)], rebuild("decimal", "Decimal")),
    "fractions.Fraction": (lambda x: [x.numerator, x.denominator], rebuild("fractions", "Fraction")),
    "uuid.UUID": (lambda x: [str(x)], rebuild("uuid", "UUID")),
    "datetime.timezone": (lambda x: [x.utcoffset(None)], rebuild("datetime", "timezone")),
    "datetime.timedelta": (lambda x: [x.days, x.seconds, x.microseconds], rebuild("datetime", "timedelta")),
    "datetime.datetime": (
        lambda x: [x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond, zone(x)],
        rebuild("datetime", "datetime"),
    ),
    "datetime.date": (lambda x: [x.year, x.month, x.day], rebuild("datetime", "date")),
    "datetime.time": (
        lambda x: [x.hour, x.minute, x.second, x.microsecond, zone(x)],
        rebuild("datetime", "time"),
    ),
    "numpy.ndarray": (
        lambda x: [x.tolist(), x.dtype.str] if x.dtype.kind in "biufcU" else None,
        rebuild("numpy", "array"),
    ),
}
for scalar in (
    "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
):  # fmt: skip
    PLAIN[f"numpy.{scalar}"] = (lambda x: [x.item()], rebuild("numpy", scalar))


def main() -> None:
    to_program, from_judge = pipe()
    to_judge, from_program = pipe()
    if os.fork() == 0:
        try:
            os.close(to_program)
            os.close(from_program)
            silence()
            serve(Link(from_judge, to_judge))
        finally:
            os._exit(1)
    os.close(from_judge)
    os.close(to_judge)
    job = json.load(sys.stdin)
    result = os.dup(1)
    silence()
    cut_off()
    hide()
    limit(job["limits"])
    sys.addaudithook(refuse)
    program = Link(from_program, to_program)
    verdict = judge(program, job)
    os.write(result, f"{job['secret']} {verdict}".encode())
    os._exit(0)


def pipe() -> tuple[int, int]:
    """(write end, read end)."""
    readable, writable = os.pipe()
    return writable, readable


def silence() -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.close(quiet)


class Link:
    """Messages between the two processes: a length, then JSON. Each side waits for the other's answer."""

    def __init__(self, readable: int, writable: int) -> None:
        self.readable, self.writable = readable, writable
        self.remote = None  # in the judge: makes a Remote of a number
        self.decode = json.JSONDecoder(object_hook=self.revive, parse_constant=CONSTANTS.__getitem__).decode

    def send(self, message: object, dumps=json.dumps, write=os.write) -> None:
        body = dumps(message).encode()
        if self.remote is not None and len(body) > MAX_ASKED:
            raise Unfit
        left = memoryview(len(body).to_bytes(8, "big") + body)
        while left:
            left = left[write(self.writable, left) :]

    def receive(self, read=os.read) -> object:
        got = bytearray()
        while len(got) < 8 or len(got) < 8 + int.from_bytes(got[:8], "big"):
            part = read(self.readable, 2**16)
            if not part:
                raise EOFError("the other process has ended")
            got += part
            if len(got) > MAX_MESSAGE:
                raise MemoryError("a message is too long")
        size = int.from_bytes(got[:8], "big")
        if len(got) > 8 + size:
            raise ValueError("a message that nobody asked for")
        return self.decode(got[8:].decode())

    def revive(self, found: dict[str, object]) -> object:
        """Decode what encode() produced; other dicts are messages."""
        if len(found) != 1:
            return found
        ((name, inner),) = found.items()
        if name == "int":
            return int(inner, 16)
        if self.remote is not None and name == "object":
            return self.remote(inner)
        if self.remote is not None and name == "like":
            return like(inner[0], self.remote(inner[1]))
        if self.remote is not None and name in ("builtins.set", "builtins.frozenset"):
            return in_order(PLAIN[name][1], *inner)
        return PLAIN[name][1](*inner) if name in PLAIN else found


# The process of the judge.


class Unfit(BaseException):
    """The tests pass something to the program that cannot be sent: they must run together with it."""


def judge(link: Link, job: dict) -> str:
    try:
        link.send({"limits": job["limits"], "program": job["program"]})
        if link.receive() != {"ran": True}:
            return "failed"
        if job["together"]:
            word = os.urandom(16).hex()
            link.send({"op": "tests", "tests": job["tests"], "word": word})
            return "passed" if link.receive() == {"passed": word} else "failed"
        link.remote = lambda number: Remote(link, number)
        code = compile_code(job["tests"], "<tests>", "exec")
        space = {"__name__": "__main__", "__builtins__": builtins}
        ask(link, "imports", source=imports(job["tests"]))
        for name in wanted(code):
            module = ALIASES.get(name, name)
            if module in PURE:
                space[name] = import_module(module)
            elif (found := ask(link, "name", name=name)) is not None:
                space[name] = found
        run_code(code, space)
    except Unfit:
        return "unfit"
    except BaseException:
        return "failed"
    return "passed"


def imports(tests: str) -> str:
    """The import statements of the tests, whose names a program may use, as it could in one process."""
    import ast

    found = [node for node in ast.parse(tests).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join(ast.unparse(node) for node in found)


def wanted(code: object) -> list[str]:
    """Names that the tests may take from the program. Builtins count only if there is no other name: a program that has
    to define `sum` does so, one that has to define `area` must not replace `abs`."""
    names = list(dict.fromkeys(names_in(code, "LOAD_NAME", "LOAD_GLOBAL")))
    theirs = {*names_in(code, "STORE_NAME", "STORE_GLOBAL"), *PURE, *ALIASES}
    others = [name for name in names if name not in BUILTINS]
    return others if any(name not in theirs for name in others) else names


def names_in(code: object, *operations: str) -> list[str]:
    import dis

    own = [step.argval for step in dis.get_instructions(code) if step.opname in operations]
    inner = [constant for constant in code.co_consts if hasattr(constant, "co_consts")]
    return own + [name for part in inner for name in names_in(part, *operations)]


def ask(link: Link, op: str, **details: object) -> object:
    """Ask the program's process. An exception there fails the test: tests that expect one may not mean the same apart,
    and StopIteration would end a loop of the tests."""
    link.send({"op": op, **details})
    reply = link.receive()
    if "value" not in reply:
        raise RuntimeError("the program raised an exception")
    return reply["value"]


class Remote:
    """A function or object of the program. It never equals data, whatever its __eq__ returns."""

    calls = 0

    def __init__(self, link: Link, number: int) -> None:
        self.link, self.number = link, number

    def __call__(self, *arguments: object, **named: object) -> object:
        Remote.calls += 1
        if Remote.calls > MAX_CALLS:
            raise Unfit
        return self.ask("call", arguments=encode([*arguments, *named.values()], unfit), named=list(named))

    def ask(self, op: str, **details: object) -> object:
        return ask(self.link, op, on=self.number, **details)

    def __iter__(self) -> object:
        return iter(self.ask("items"))

    def __len__(self) -> int:
        length = self.ask("length")
        if length is None:  # a generator; list() asks for the length too
            raise TypeError("the result has no len()")
        return length

    def __bool__(self) -> bool:
        return self.ask("truth")

    def __str__(self) -> str:
        return self.ask("text")

    def __repr__(self) -> str:
        return self.ask("repr")


def unfit(value: object) -> object:
    raise Unfit


def like(plain: object, remote: Remote) -> object:
    """Data of a subclass, such as a namedtuple: equal to a value of its base, but printed as the program prints it."""
    kind = type(plain)
    if kind not in LIKE:
        own = {"__str__": lambda self: str(self.remote), "__repr__": lambda self: repr(self.remote)}
        LIKE[kind] = type(kind.__name__, (kind,), own)
    made = LIKE[kind](plain)
    made.remote = remote
    return made


LIKE: dict[type, type] = {}


def in_order(kind: type, items: list[object]) -> object:
    """A set that iterates in the same order as in the program."""
    made = kind(items)
    if list(made) == items:
        return made
    made = type(kind.__name__, (kind,), {"__iter__": lambda self: iter(self.items)})(items)
    made.items = items
    return made


# The process of the program.


def serve(link: Link) -> None:
    start = link.receive()
    cut_off()
    limit(start["limits"])
    sys.addaudithook(refuse)  # cannot be removed again
    space = {"__name__": "__main__", "__builtins__": builtins}
    run_code(compile_code(start["program"], "<program>", "exec"), space)
    link.send({"ran": True})
    objects: list[object] = []
    while True:
        request = link.receive()
        if request["op"] == "tests":
            run_together(request["tests"], space)
            link.send({"passed": request["word"]})
            continue
        try:
            reply = answer(request, space, objects)
        except BaseException as error:  # the program's
            reply = {"raised": type(error).__name__}
        link.send(reply)


def run_together(tests: str, space: dict[str, object]) -> None:
    """Run the tests in the program's namespace, after restoring builtins and test helpers."""
    vars(builtins).update(BUILTINS)
    sys.settrace(None)
    sys.setprofile(None)
    for name in [name for name in sys.modules if name.partition(".")[0] in HELPERS]:
        del sys.modules[name]
    run_code(compile_code(tests, "<tests>", "exec"), space)


def answer(request: dict, space: dict[str, object], objects: list[object]) -> dict[str, object]:
    def hold(value: object) -> dict[str, int]:
        objects.append(value)
        return {"object": len(objects) - 1}

    def keep(value: object) -> object:
        base, plain = as_plain(value, keep)
        if base is None:
            return hold(value)
        return {"like": [plain, hold(value)["object"]]} if base in WRITTEN else plain

    op = request["op"]
    if op == "imports":
        run_code(compile_code(request["source"], "<imports>", "exec"), space)
        return {"value": None}
    if op == "name":
        return {"value": hold(space[request["name"]]) if request["name"] in space else None}
    thing = objects[request["on"]]
    if op == "call":
        given, named = request["arguments"], request["named"]
        first = len(given) - len(named)
        value = thing(*given[:first], **dict(zip(named, given[first:], strict=True)))
    else:
        value = {"items": list, "length": length, "truth": bool, "text": str, "repr": repr}[op](thing)
    return {"value": encode(value, keep)}


def length(thing: object) -> int | None:
    return len(thing) if hasattr(type(thing), "__len__") else None


# Types whose subclasses can print differently: see like().
WRITTEN = (int, float, str, list, tuple, set, frozenset, dict, bytes, bytearray, complex)


COPIES = {int: int.__int__, float: float.__float__, str: str.__str__, list: list.copy}  # a subclass as its base type


def as_plain(value: object, other: object) -> tuple[type | None, object]:
    """(data type it can stand for, the encoded value), for subclasses, mappings and numbers of libraries."""
    import numbers
    from collections import UserList, UserString
    from collections.abc import Mapping

    for base in type(value).__mro__:
        if base in COPIES:
            return base, encode(COPIES[base](value), other)
        make, _ = PLAIN.get(name_of(base), (None, None))
        arguments = make(value) if make is not None else None
        if arguments is not None:
            return base, {name_of(base): encode(arguments, other)}
    kinds = {Mapping: dict, UserList: list, UserString: str, numbers.Integral: int, numbers.Real: float}
    for abstract, base in kinds.items():
        if isinstance(value, abstract):
            return base, encode(base(value), other)
    if hasattr(type(value), "__float__"):
        try:
            return float, float(value)
        except Exception:  # for example, a tensor with several elements
            return None, None
    return None, None


# Both.


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def encode(value: object, other: object) -> object:
    """Data as JSON; other(value) for values that are not data."""
    kind = type(value)
    if kind is list:
        kinds = set(map(type, value))
        if kinds <= SIMPLE and (int not in kinds or fits(value, kinds)):
            return value
        return [encode(item, other) for item in value]
    if kind is int:
        return value if -EXACT_INT < value < EXACT_INT else {"int": hex(value)}
    if kind in SIMPLE:
        return value
    make, _ = PLAIN.get(name_of(kind), (None, None))
    arguments = make(value) if make is not None else None
    return other(value) if arguments is None else {name_of(kind): encode(arguments, other)}


SIMPLE = {bool, float, int, str, type(None)}


def fits(items: list[object], kinds: set[type]) -> bool:
    """Whether these integers are small enough for decimal."""
    return kinds <= {int, bool} and -EXACT_INT < min(items) and max(items) < EXACT_INT


def cut_off() -> None:
    """Leave the network if the system allows it, and die with the parent process."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)  # some containers refuse it: then only the audit hook is left
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after unshare, which may reset it


def hide() -> None:
    """Prevent the program from reading this process through /proc; root outside a user namespace still can."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)


def limit(limits: dict[str, float]) -> None:
    seconds = max(1, int(limits["seconds"]))
    signal.alarm(seconds + 1)  # ends a sleeping program even if nobody is left to kill it
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    lower(resource, resource.RLIMIT_CPU, seconds + 1)
    lower(resource, resource.RLIMIT_AS, int(limits["memory_gb"] * GIB))
    lower(resource, resource.RLIMIT_FSIZE, int(limits["file_mb"] * 2**20))
    lower(resource, resource.RLIMIT_NOFILE, 64)
    lower(resource, resource.RLIMIT_CORE, 0)
    lower(resource, resource.RLIMIT_NPROC, 0)  # no threads either; counts all of the user's, and does not bind root


def lower(resource: object, which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not available to code under test")


if __name__ == "__main__":
    main()
