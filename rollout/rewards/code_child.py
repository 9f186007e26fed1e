"""Run one program and its tests, and report whether they passed. Run as a script; imports nothing from the project.

    python -I code_child.py < {"program", "tests", "isolation", "limits": {...}, "secret"}  # JSON on stdin

There are two processes. The test process forks the program process before it reads its input, so the tests, the
expected values and the secret that reports a pass are never in the program's memory. In the test process the program's
functions are proxies: a call sends its arguments as data, receives the result as data, and the test process compares.
Lists, dicts and sets that were arguments or results stay equal in both processes: every message carries the changes.

A result whose class the program defined stays in the program process. The test process can iterate over it and read its
length, truth value and text, but it never equals data, whatever its __eq__ returns. Running such tests in the program
process instead would let a program choose that by returning such an object. No honest program returns one to tests that
compare a call with a literal or calculate with it, and only those tests are isolated.

If "isolation" is None the tests run in the program process. Some tests need this (classes, patched modules, captured
output), and there a program can tamper with them.

This protects the trainer from accidents (endless loops, memory, forks, downloads). It is not a security boundary.
"""

from __future__ import annotations

import builtins
import io
import itertools
import json
import math
import operator
import os
import pickle
import signal
import sys
from collections import Counter, OrderedDict, deque
from importlib import import_module

GIB = 2**30
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
NOBODY = 65534  # user and group id
CAPABILITIES_V3, DAC_READ_SEARCH = 0x20080522, 1 << 2
BLOCKED_EVENTS = (  # prefixes of audit events; creating a socket is allowed, because asyncio needs a pair
    "socket.connect", "socket.bind", "socket.send", "socket.get", "subprocess.Popen", "os.fork", "os.exec",
    "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "os.kill",
)  # fmt: skip
PURE = (  # modules that behave the same in any process; tests with other modules run in the program process
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "numpy", "operator", "random", "re", "statistics", "string", "time", "typing",
)  # fmt: skip
ALIASES = {"np": "numpy"}
HELPERS = ("unittest", "doctest", "pytest", "_pytest")  # reimported for tests that run in the program process
BUILTINS = dict(vars(builtins))  # saved before the program can change them
run_code, compile_code = exec, compile


def main() -> None:
    is_root = confine()
    from_tests, to_program = os.pipe()
    from_program, to_tests = os.pipe()
    if os.fork() == 0:
        try:
            os.close(to_program)
            os.close(from_program)
            silence()
            serve(Wire(from_tests, to_tests))
        finally:
            os._exit(1)
    os.close(from_tests)
    os.close(to_tests)
    job = json.load(sys.stdin)
    result = os.dup(1)
    silence()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)  # the program must not read this process through /proc
    limit(job["limits"])
    sys.addaudithook(block_event)
    verdict = run_tests(Wire(from_program, to_program, runs_tests=True), job)
    os.write(result, f"{job['secret']} {verdict} {is_root:d}".encode())
    os._exit(0)


def silence() -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.close(quiet)


# Messages are pickles without classes. Values other than numbers, texts, tuples and frozensets are persistent ids:
#     (type name, arguments)            data that its constructor rebuilds
#     (number, type name, contents)     a list, dict or set that both sides know by number; contents None: as last sent
#     (number, "object", None)          an object of the program

ATOMS = {bool, int, str, bytes, type(None), tuple, frozenset}
SHARED = {kind.__name__: kind for kind in (list, dict, set, bytearray, deque, Counter, OrderedDict)}
LIKE = {  # converts an instance of a subclass to the base type
    int: int.__int__, float: float.__float__, str: str.__str__, bytes: lambda x: b"".join([x]),
    tuple: lambda x: tuple(tuple.__iter__(x)), frozenset: lambda x: frozenset(frozenset.__iter__(x)),
}  # fmt: skip


def constructor(module: str, name: str) -> object:
    """Return a constructor that imports its module on the first call."""
    return lambda *arguments: getattr(import_module(module), name)(*arguments)


def zone(x: object) -> object:
    """Return the time zone of a datetime or time as a fixed offset, which preserves equality."""
    offset = x.utcoffset()
    return None if offset is None else import_module("datetime").timezone(offset)


DATA = {  # type: (value -> constructor arguments, constructor)
    "builtins.complex": (lambda x: (x.real, x.imag), complex),
    "builtins.range": (lambda x: (x.start, x.stop, x.step), range),
    "builtins.dict_keys": (lambda x: (tuple(x),), lambda keys: dict.fromkeys(keys).keys()),
    "builtins.dict_values": (lambda x: (tuple(x),), lambda values: dict(enumerate(values)).values()),
    "builtins.dict_items": (lambda x: (tuple(x),), lambda pairs: dict(pairs).items()),
    "decimal.Decimal": (lambda x: (str(x),), constructor("decimal", "Decimal")),
    "fractions.Fraction": (lambda x: (x.numerator, x.denominator), constructor("fractions", "Fraction")),
    "datetime.timezone": (lambda x: (x.utcoffset(None),), constructor("datetime", "timezone")),
    "datetime.timedelta": (lambda x: (x.days, x.seconds, x.microseconds), constructor("datetime", "timedelta")),
    "datetime.datetime": (lambda x: (*x.timetuple()[:6], x.microsecond, zone(x)), constructor("datetime", "datetime")),
    "datetime.date": (lambda x: x.timetuple()[:3], constructor("datetime", "date")),
    "datetime.time": (lambda x: (x.hour, x.minute, x.second, x.microsecond, zone(x)), constructor("datetime", "time")),
    "numpy.ndarray": (
        lambda x: (x.tolist(), x.dtype.str) if x.dtype.kind in "biufcU" else None,
        constructor("numpy", "array"),
    ),
    "numpy.generic": (lambda x: (x.item(), x.dtype.str), lambda x, kind: import_module("numpy").dtype(kind).type(x)),
    "nan": (None, lambda: math.nan),  # one object, because [math.nan] == [math.nan] holds by identity
    "plain": (None, lambda x: x),
}


class Wire:
    """One end of the connection, with the values that both ends share: `things` by number, `numbers` by id, contents as
    last `sent`."""

    def __init__(self, readable: int, writable: int, *, runs_tests: bool = False) -> None:
        self.reader, self.writer = os.fdopen(readable, "rb"), os.fdopen(writable, "wb")
        self.runs_tests = runs_tests
        self.things: dict[int, object] = {}
        self.numbers: dict[int, int] = {}
        self.sent: dict[int, tuple[object, ...] | bytes] = {}  # without objects of the program
        self.next = itertools.count(int(runs_tests), 2)  # each end numbers the values that it sends first

    def send(self, message: object) -> None:
        """Send the message, changed contents, and the numbers of values that only this table still refers to.

        Both ends forget those values, so the cost of a message does not grow with the number of calls.
        """
        changed = []
        for number, before in self.sent.items():
            now = contents(self.things[number])
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                self.sent[number] = now
                changed.append((number, now))
        gone = [n for n in self.things if self.may_forget(n) and sys.getrefcount(self.things[n]) <= ALONE]
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, 5)
        pickler.persistent_id = self.persistent_id
        pickler.dump((message, tuple(changed), tuple(gone)))
        self.forget(gone)
        self.writer.write(buffer.getbuffer())
        self.writer.flush()

    def may_forget(self, number: int) -> bool:
        """The test process may forget anything; the program only exact types, not objects and subclasses."""
        return self.runs_tests or SHARED.get(type(self.things[number]).__name__) is type(self.things[number])

    def receive(self) -> object:
        unpickler = Unpickler(self.reader)
        unpickler.persistent_load = self.persistent_load
        message, changed, gone = unpickler.load()
        for number, now in changed:
            self.fill(number, now)
        self.forget(gone)
        return message

    def forget(self, gone: list[int] | tuple[int, ...]) -> None:
        for number in gone:
            del self.numbers[id(self.things.pop(number))]
            self.sent.pop(number, None)

    def share(self, thing: object, number: int | None = None) -> int:
        number = next(self.next) if number is None else number
        self.things[number], self.numbers[id(thing)] = thing, number
        if base_of(type(thing)) is not None:
            self.sent[number] = contents(thing)
        return number

    def fill(self, number: int, now: tuple[object, ...] | bytes) -> None:
        thing = self.things[number]
        thing.clear()
        if isinstance(thing, dict):
            for key, value in zip(now[::2], now[1::2]):  # noqa: B905
                thing[key] = value
        else:
            (thing.update if isinstance(thing, set) else thing.extend)(now)
        self.sent[number] = now

    def persistent_load(self, pid: tuple) -> object:
        if isinstance(pid[0], str):
            return DATA[pid[0]][1](*pid[1])
        number, name, now = pid
        if number not in self.things:
            self.share(SHARED[name]() if name in SHARED else Remote(self, number), number)
        if now is not None:
            self.fill(number, now)
        return self.things[number]

    def persistent_id(self, x: object) -> tuple | None:
        kind = type(x)
        if kind in ATOMS:
            return None
        if kind is float:
            return None if x == x else ("nan", ())
        base = base_of(kind)
        name = "object" if base is None else base.__name__
        name = "Missing" if base is dict and hasattr(kind, "__missing__") else name
        if id(x) in self.numbers:
            return self.numbers[id(x)], name, None
        if base is kind or (base is not None and not self.runs_tests):
            number = self.share(x)
            return number, name, self.sent[number]
        for base in kind.__mro__:
            if base in LIKE and not self.runs_tests:
                return "plain", (LIKE[base](x),)
            path = f"{base.__module__}.{base.__qualname__}"
            if path in DATA and (base is kind or not self.runs_tests or path == "numpy.generic"):
                if (arguments := DATA[path][0](x)) is not None:
                    return path, arguments
        if self.runs_tests:
            raise Unfit
        plain = as_plain(x)
        return (self.share(x), name, None) if plain is None else ("plain", (plain,))


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError("messages have no classes")


def base_of(kind: type) -> type | None:
    return next((base for base in kind.__mro__ if SHARED.get(base.__name__) is base), None)


def contents(thing: object) -> tuple[object, ...] | bytes:
    base = base_of(type(thing))
    if base is bytearray:
        return bytes(thing)
    return tuple(itertools.chain.from_iterable(base.items(thing)) if issubclass(base, dict) else base.__iter__(thing))


def as_plain(x: object) -> object:
    """Convert mappings and numbers from libraries to plain data; return None for other objects."""
    import numbers
    from collections import UserList, UserString
    from collections.abc import Mapping

    kinds = {Mapping: dict, UserList: list, UserString: str, numbers.Integral: int, numbers.Real: float}
    for abstract, base in kinds.items():
        if isinstance(x, abstract):
            return base(x)
    try:
        return float(x) if hasattr(type(x), "__float__") else None
    except Exception:  # for example, a tensor with several elements
        return None


# The test process.


class Unfit(BaseException):
    """The tests pass a value to the program that cannot be sent, so they must run in the program process."""


def run_tests(wire: Wire, job: dict) -> str:
    try:
        isolation = job["isolation"]
        wire.send((job["program"], isolation["imports"] if isolation else "", job["limits"]))
        if wire.receive() is not True:
            return "failed"
        if isolation is None:
            word = os.urandom(16).hex()
            wire.send(("tests", job["tests"], word))
            return "passed" if wire.receive() == word else "failed"
        space = {"__name__": "__main__", "__builtins__": builtins}
        for name in isolation["names"]:
            module = ALIASES.get(name, name)
            if module in PURE:
                space[name] = import_module(module)
            elif (value := ask(wire, "name", name)) is not None:
                space[name] = value
        run_code(compile_code(job["tests"], "<tests>", "exec"), space)
    except Unfit:
        return "unfit"
    except BaseException:
        return "failed"
    return "passed"


def ask(wire: Wire, *request: object) -> object:
    """Send a request to the program process and return the reply.

    An exception there fails the test: tests that expect one may mean something else when isolated, and StopIteration
    would end a loop in the tests.
    """
    wire.send(request)
    reply = wire.receive()
    if not reply:
        raise RuntimeError("the program raised an exception")
    return reply[0]


class Remote:
    """Proxy of a function or object of the program. It never equals data, whatever its __eq__ returns.

    Operations that need its class (attributes, items, operators with another object) raise Unfit.
    """

    __slots__ = ("number", "wire")

    def __init__(self, wire: Wire, number: int) -> None:
        self.wire, self.number = wire, number

    def __call__(self, *arguments: object, **named: object) -> object:
        return ask(self.wire, "call", self, arguments, tuple(named), tuple(named.values()))

    def __iter__(self) -> object:
        """Fetch one item at a time, because the iterator may be endless or change an item later; after 100, 10000."""
        items, count = ask(self.wire, "iterate", self), itertools.count()
        while some := ask(self.wire, "take", items, 1 if next(count) < 100 else 10000):
            yield from some

    def __len__(self) -> int:
        length = ask(self.wire, "length", self)
        if length is None:  # a generator; list() also calls len()
            raise TypeError("the result has no len()")
        return length

    def __bool__(self) -> bool:
        return ask(self.wire, "truth", self)

    def __str__(self) -> str:
        return ask(self.wire, "text", self)

    def __repr__(self) -> str:
        return ask(self.wire, "repr", self)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Remote and unfit())

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> object:
        return unfit()

    __getitem__ = __contains__ = __getattr__

    def __add__(self, other: object) -> object:
        return unfit() if type(other) is Remote else NotImplemented

    __sub__ = __mul__ = __truediv__ = __add__


def unfit() -> object:
    raise Unfit


class Missing(dict):
    """A defaultdict from the program."""

    def __missing__(self, key: object) -> object:
        return unfit()


SHARED["Missing"] = Missing
ALONE = (lambda things: sys.getrefcount(things[0]))({0: []})  # reference count of a value that only one dict refers to


# The program process.


def serve(wire: Wire) -> None:
    program, imports, limits = wire.receive()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limit(limits)
    sys.addaudithook(block_event)  # cannot be removed
    space = {"__name__": "__main__", "__builtins__": builtins}
    run_code(compile_code(program, "<program>", "exec"), space)
    run_code(compile_code(imports, "<imports>", "exec"), space)  # the program may use these names, as in one process
    wire.send(True)
    while True:
        op, *details = wire.receive()
        if op == "tests":
            run_together(details[0], space)
            wire.send(details[1])
            continue
        try:
            wire.send((ANSWERS[op](*details) if op != "name" else space.get(*details),))
        except BaseException:  # raised by the program
            wire.send(())


def run_together(tests: str, space: dict[str, object]) -> None:
    """Run the tests in the program's namespace, after restoring builtins and test helpers."""
    vars(builtins).update(BUILTINS)
    sys.settrace(None)
    sys.setprofile(None)
    for name in [name for name in sys.modules if name.partition(".")[0] in HELPERS]:
        del sys.modules[name]
    run_code(compile_code(tests, "<tests>", "exec"), space)


ANSWERS = {
    "call": lambda function, arguments, names, values: function(*arguments, **dict(zip(names, values))),  # noqa: B905
    "iterate": iter,
    "take": lambda items, number: tuple(itertools.islice(items, number)),
    "length": lambda thing: len(thing) if hasattr(type(thing), "__len__") else None,
    "truth": bool,
    "text": str,
    "repr": repr,
}


# Both processes.


def confine() -> bool:
    """Give up root's rights and the network, as far as the system allows; return whether this process is still root."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1)
    offline = reads = False
    if os.geteuid() == 0:
        offline = libc.unshare(CLONE_NEWNET) == 0
        header, rights = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
        libc.capget(header, rights)  # effective, permitted and inheritable rights 0 to 31, then the others
        libc.prctl(PR_SET_KEEPCAPS, 1)
        reads = rights[1] & DAC_READ_SEARCH  # keep only this one: Python itself may be in /root
        reads *= become_nobody(can_read=bool(reads))
        libc.capset(header, (ctypes.c_uint32 * 6)(reads, reads))
    is_root = os.geteuid() == 0
    if not offline and not reads:  # a user namespace ends the right to read
        libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)  # not allowed in some containers, where only the audit hook blocks
    return is_root


def become_nobody(*, can_read: bool) -> bool:
    """Return False, as root, if the system does not allow it or nobody could not import modules."""
    folders = [path for path in sys.path if os.path.isdir(path)]
    if not can_read and not all(map(is_open, [os.path.dirname(os.getcwd()), *folders])):
        return False
    try:
        os.chown(".", NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        os.chown(".", 0, 0)
        return False
    return True


def is_open(folder: str) -> bool:
    """Return whether every user can enter the folder."""
    names = os.path.realpath(folder).split(os.sep)
    return all(os.stat(os.sep.join(names[:i]) or os.sep).st_mode & 0o001 for i in range(1, len(names) + 1))


def prctl(option: int, value: int) -> None:
    """Change a setting of this process, on Linux."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def limit(limits: dict[str, float]) -> None:
    seconds = max(1, int(limits["seconds"]))
    signal.setitimer(signal.ITIMER_REAL, limits["alarm"])  # ends a sleeping program even if its parent is gone
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    lower(resource, resource.RLIMIT_CPU, seconds + 1)
    lower(resource, resource.RLIMIT_AS, int(limits["memory_gb"] * GIB))
    lower(resource, resource.RLIMIT_FSIZE, int(limits["file_mb"] * 2**20))
    lower(resource, resource.RLIMIT_NOFILE, 64)
    lower(resource, resource.RLIMIT_CORE, 0)
    lower(resource, resource.RLIMIT_NPROC, 0)  # also no threads; counts all processes of the user; not for root


def lower(resource: object, which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def block_event(event: str, _arguments: tuple[object, ...]) -> None:
    if event.startswith(BLOCKED_EVENTS):
        raise PermissionError(f"{event} is not available to code under test")


if __name__ == "__main__":
    main()
