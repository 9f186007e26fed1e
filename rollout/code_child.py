"""Runs one program and its tests, and says whether they passed. A file of its own, without imports of ours.

    python -I rollout/code_child.py < {"program", "tests", "together", "limits": {...}, "secret"}  # JSON on stdin

Two processes. The judge forks a process for the program before it reads its input, so the tests, the values they
expect, and the secret by which a pass is reported are never in the memory of the program. The tests run in the judge.
The program's functions are stand-ins there: a call sends arguments as data and gets the result back as data, and the
judge compares. An object that is no plain data stays where it is; the judge can call it, iterate it and read its
attributes, but it never equals data, whatever its __eq__ says.

With "together" the tests run in the process of the program. Some tests need that (classes, patched modules, captured
output), and there a program can do what it wants with them.

This keeps accidents (endless loops, gigabytes, forks, downloads) from the trainer. It is not a security boundary.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
from importlib import import_module

GIB = 2**30
MAX_MESSAGE = 2**28  # bytes
EXACT_INT = 2**53  # beyond it in hexadecimal: Python limits the decimal digits it reads
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 0x10000000, 0x40000000, 1, 4
REFUSED = (  # beginnings of audit events; making a socket is not among them, asyncio needs a pair
    "socket.connect", "socket.bind", "socket.send", "socket.get", "subprocess.Popen", "os.fork", "os.exec",
    "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "os.kill",
)  # fmt: skip
PURE = (  # modules that are the same in any process; tests that need others run together with the program
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "numpy", "operator", "random", "re", "statistics", "string", "time", "typing",
)  # fmt: skip
ALIASES = {"np": "numpy"}
HELPERS = ("unittest", "doctest", "pytest", "_pytest")  # imported anew for tests that run together with a program
BUILTINS = dict(vars(builtins))  # as they are before a program could change them
run_code, compile_code = exec, compile
# Plain data besides None, bool, str, float, int and list: how to build it again, as arguments for its type.
PLAIN = {
    "builtins.tuple": lambda x: [list(x)],
    "builtins.set": lambda x: [list(x)],
    "builtins.frozenset": lambda x: [list(x)],
    "builtins.dict": lambda x: [[[key, value] for key, value in x.items()]],
    "builtins.bytes": lambda x: [x.decode("latin-1"), "latin-1"],
    "builtins.bytearray": lambda x: [x.decode("latin-1"), "latin-1"],
    "builtins.complex": lambda x: [x.real, x.imag],
    "builtins.range": lambda x: [x.start, x.stop, x.step],
    "collections.deque": lambda x: [list(x), x.maxlen],
    "collections.Counter": lambda x: [dict(x)],
    "collections.OrderedDict": lambda x: [dict(x)],
    "decimal.Decimal": lambda x: [str(x)],
    "fractions.Fraction": lambda x: [x.numerator, x.denominator],
    "datetime.date": lambda x: [x.year, x.month, x.day],
    "datetime.timedelta": lambda x: [x.days, x.seconds, x.microseconds],
    "numpy.ndarray": lambda x: [x.tolist(), x.dtype.str] if x.dtype.kind in "biufcU" else None,
}
MAKERS = {"numpy.ndarray": "array"}  # where not the type itself
MUTABLE = ("builtins.bytearray", "builtins.dict", "builtins.list", "builtins.set", "collections.deque")


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
    """(end to write to, end to read from)."""
    readable, writable = os.pipe()
    return writable, readable


def silence() -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.close(quiet)


class Link:
    """Messages to the other process and back: JSON behind its length."""

    def __init__(self, readable: int, writable: int) -> None:
        self.readable, self.writable = readable, writable

    def send(self, message: object, dumps=json.dumps, write=os.write) -> None:
        body = dumps(message).encode()
        left = memoryview(len(body).to_bytes(8, "big") + body)
        while left:
            left = left[write(self.writable, left) :]

    def receive(self, loads=json.loads) -> object:
        size = int.from_bytes(self._read(8), "big")
        if size > MAX_MESSAGE:
            raise MemoryError("a message is too long")
        return loads(self._read(size))

    def _read(self, size: int, read=os.read) -> bytes:
        parts = []
        while size:
            part = read(self.readable, min(size, 2**20))
            if not part:
                raise EOFError("the other process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


# The process of the judge.


class Unfit(BaseException):
    """The tests hand something to the program that cannot be sent: they have to run together with it."""


def judge(link: Link, job: dict) -> str:
    try:
        link.send({"limits": job["limits"], "program": job["program"]})
        if link.receive() != {"ran": True}:
            return "failed"
        if job["together"]:
            word = os.urandom(16).hex()
            link.send({"op": "tests", "tests": job["tests"], "word": word})
            return "passed" if link.receive() == {"passed": word} else "failed"
        code = compile_code(job["tests"], "<tests>", "exec")
        space = {"__name__": "__main__", "__builtins__": builtins}
        for name in wanted(code):
            module = ALIASES.get(name, name)
            if module in PURE:
                space[name] = import_module(module)
            elif (found := ask(link, "name", name=name)) is not None:
                space[name] = found[0]
        run_code(code, space)
    except Unfit:
        return "unfit"
    except BaseException:
        return "failed"
    return "passed"


def wanted(code: object) -> list[str]:
    """Names that the tests may take from the program. A builtin's is among them only where there is no other: a program
    that was asked for a function `sum` defines it, one that was asked for `area` must not change what `abs` is."""
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
    """What the program's process makes of it; an exception there is one here, of the nearest built-in type."""
    link.send({"op": op, **details})
    reply = link.receive()
    if "raised" in reply:
        arguments = decode(reply["arguments"], lambda number: Remote(link, number))
        for name in reply["raised"]:
            kind = BUILTINS.get(name)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                try:
                    error = kind(*arguments)
                except TypeError:  # one that takes other arguments
                    continue
                raise error
        raise RuntimeError("the program raised something")
    value = decode(reply["value"], lambda number: Remote(link, number))
    return (value, reply["changed"]) if "changed" in reply else value


class Remote:
    """A function or object of the program. It equals others of the program if that says so, and never plain data."""

    def __init__(self, link: Link, number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def _ask(self, op: str, **details: object) -> object:
        return ask(self._link, op, on=self._number, **details)

    def __call__(self, *arguments: object, **named: object) -> object:
        sent = [encode(value, send_remote) for value in (*arguments, *named.values())]
        value, changed = self._ask("call", arguments=sent, named=list(named))
        given = [*arguments, *named.values()]
        for place, now in changed:
            refill(given[place], decode(now, lambda number: Remote(self._link, number)))
        return value

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", name=name)

    def __getitem__(self, key: object) -> object:
        return self._ask("item", key=encode(key, send_remote))

    def __iter__(self) -> object:
        return self._ask("iterate")

    def __next__(self) -> object:
        return self._ask("next")

    def __len__(self) -> int:
        return self._ask("length")

    def __bool__(self) -> bool:
        return self._ask("truth")

    def __str__(self) -> str:
        return self._ask("text")

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask("same", other=other._number) is True

    def __hash__(self) -> int:
        return self._number


def send_remote(value: object) -> object:
    if type(value) is Remote:
        return {"object": value._number}
    raise Unfit


def refill(old: object, new: object) -> None:
    """What a function did to a list, dict or set that it was given."""
    if isinstance(old, (list, bytearray)):
        old[:] = new
    else:
        old.clear()
        (old.extend if hasattr(old, "extend") else old.update)(new)


# The process of the program.


def serve(link: Link) -> None:
    start = link.receive()
    cut_off()
    limit(start["limits"])
    sys.addaudithook(refuse)  # cannot be taken off again
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
        except BaseException as error:  # the program's: the tests may expect it
            names = [kind.__name__ for kind in type(error).__mro__]
            reply = {"raised": names, "arguments": encode(list(error.args), str)}
        link.send(reply)


def run_together(tests: str, space: dict[str, object]) -> None:
    """The tests in the names of the program, after it. What they are built of is put back first."""
    vars(builtins).update(BUILTINS)
    sys.settrace(None)
    sys.setprofile(None)
    for name in [name for name in sys.modules if name.partition(".")[0] in HELPERS]:
        del sys.modules[name]
    run_code(compile_code(tests, "<tests>", "exec"), space)


def answer(request: dict, space: dict[str, object], objects: list[object]) -> dict[str, object]:
    def keep(value: object) -> object:
        plain = as_plain(value)
        if plain is not None:
            return encode(plain[0], keep)
        objects.append(value)
        return {"object": len(objects) - 1}

    op = request["op"]
    if op == "name":
        name = request["name"]
        return {"value": encode([space[name]] if name in space else None, keep)}
    thing = objects[request["on"]]
    if op == "call":
        sent, named = request["arguments"], request["named"]
        values = [decode(value, objects.__getitem__) for value in sent]
        first = len(values) - len(named)
        value = thing(*values[:first], **dict(zip(named, values[first:], strict=True)))
        after = [(place, encode(x, keep)) for place, x in enumerate(values) if name_of(type(x)) in MUTABLE]
        changed = [[place, now] for place, now in after if now != sent[place]]
        return {"value": encode(value, keep), "changed": changed}
    if op == "attribute":
        value = getattr(thing, request["name"])
    elif op == "item":
        value = thing[decode(request["key"], objects.__getitem__)]
    elif op == "same":
        value = bool(thing == objects[request["other"]])
    elif op == "iterate":
        value = iter(thing)
        objects.append(value)
        return {"value": {"object": len(objects) - 1}}
    else:
        value = {"next": next, "length": len, "truth": bool, "text": str}[op](thing)
    return {"value": encode(value, keep)}


def as_plain(value: object) -> list[object] | None:
    """[plain data] that stands for it: of subclasses, and of the numbers of libraries."""
    for kind in (bool, int, float, str, bytes, list, tuple, set, frozenset, dict):
        if isinstance(value, kind):
            return [kind(value)]
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__complex__"):
        return None
    import numbers

    for abstract, kind in ((numbers.Integral, int), (numbers.Real, float), (numbers.Complex, complex)):
        if isinstance(value, abstract):
            return [kind(value)]
    return [bool(value)] if name_of(type(value)) in ("numpy.bool", "numpy.bool_") else None


# Both.


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def encode(value: object, other: object) -> object:
    """Plain data as JSON has it; other(value) for what is none."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -EXACT_INT < value < EXACT_INT):
        return value
    if kind is list:
        return [encode(item, other) for item in value]
    if kind is int:
        return {"int": hex(value)}
    make = PLAIN.get(name_of(kind))
    arguments = make(value) if make is not None else None
    return other(value) if arguments is None else {name_of(kind): encode(arguments, other)}


def decode(value: object, other: object) -> object:
    """other(number) for what stayed in the other process."""
    if isinstance(value, list):
        return [decode(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "int":
        return int(inner, 16)
    if name == "object":
        return other(inner)
    assert name in PLAIN, name
    module, _, kind = name.partition(".")
    return getattr(import_module(module), MAKERS.get(name, kind))(*decode(inner, other))


def cut_off() -> None:
    """Out of the network where the system lets us, and dead when whoever started us dies."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)  # refused in some containers: the audit hook is what is left then
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after unshare, which may reset it


def hide() -> None:
    """Keep the program from reading this process through /proc; root outside a user namespace still can."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)


def limit(limits: dict[str, float]) -> None:
    seconds = max(1, int(limits["seconds"]))
    signal.alarm(seconds + 1)  # also ends a program that sleeps, should nobody be left to kill it
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    lower(resource, resource.RLIMIT_CPU, seconds + 1)
    lower(resource, resource.RLIMIT_AS, int(limits["memory_gb"] * GIB))
    lower(resource, resource.RLIMIT_FSIZE, int(limits["file_mb"] * 2**20))
    lower(resource, resource.RLIMIT_NOFILE, 64)
    lower(resource, resource.RLIMIT_CORE, 0)
    lower(resource, resource.RLIMIT_NPROC, 0)  # nor threads; counts all of this user, and does not bind root


def lower(resource: object, which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not available to code under test")


if __name__ == "__main__":
    main()
