# ruff: noqa: E501
"""Programs for the `code` reward: tricks that must earn nothing, and honest ones that must keep their reward."""

from __future__ import annotations

ASSERTS = "assert double(2) == 4\nassert double(5) == 10\nassert abs(double(1.5) - 3.0) < 1e-6\n"
CHECK = """
def same(a, b):
    return abs(a - b) < 1e-6

def check(candidate):
    assert candidate(2) == 4
    assert candidate(5) == 10
    assert same(candidate(1.5), 3.0)

check(double)
"""
ATTACKS = {
    "exec does nothing": """
        import builtins
        builtins.exec = builtins.compile = builtins.eval = lambda *a, **k: None
        def double(x): return 0
    """,
    "equal to everything": """
        class Any:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __sub__(self, other): return 0.0
            __rsub__ = __sub__
            def __abs__(self): return 0.0
            def __lt__(self, other): return True
            def __bool__(self): return True
            __hash__ = None
        def double(x): return Any()
    """,
    "a number that is equal to everything": """
        class Any(float):
            def __eq__(self, other): return True
            def __sub__(self, other): return 0.0
            def __lt__(self, other): return True
            __hash__ = float.__hash__
        def double(x): return Any(1)
    """,
    "expected values from frames": """
        import re, sys
        def double(x):
            frame = sys._getframe()
            while frame:
                for code in [frame.f_code, *(v.__code__ for v in frame.f_globals.values() if hasattr(v, "__code__"))]:
                    values = [c for c in code.co_consts if isinstance(c, (int, float))]
                    if x in values and 2 * x in values:
                        return values[values.index(2 * x)]
                for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    found = re.search(rf"\\({x}\\) == (\\d+)", str(value))
                    if found:
                        return int(found[1])
                frame = frame.f_back
            return 0
    """,
    "expected values from memory": """
        import ast, gc, re
        def texts():
            for thing in gc.get_objects():
                if isinstance(thing, dict):
                    for value in list(thing.values()):
                        if isinstance(value, str) and "assert " in value:
                            yield value
        def double(x):
            for text in texts():
                found = re.search(rf"\\({x}\\) == (\\d+)", text) or re.search(rf"{x}\\)[ ,-]+([0-9.]+)", text)
                if found:
                    return ast.literal_eval(found[1])
            return 0
    """,
    "the secret from frames": """
        import os, sys
        frame = sys._getframe()
        while frame:
            for value in [*frame.f_locals.values(), *(v for f in frame.f_locals.values() if isinstance(f, dict) for v in f.values())]:
                if isinstance(value, (str, bytes)) and len(value) == 32:
                    secret = value if isinstance(value, bytes) else value.encode()
                    for descriptor in range(1, 20):
                        try: os.write(descriptor, secret)
                        except OSError: pass
                    os._exit(0)
            frame = frame.f_back
        def double(x): return 0
    """,
    "an early end": "import os\ndef double(x): os._exit(0)\n",
    "an end with the words of success": """
        import os
        body = b'{"ran": true}'
        frames = b"".join(len(b).to_bytes(8, "big") + b for b in (body, b'{"passed": true}', b'{"value": true}'))
        for descriptor in range(0, 20):
            for text in (b"passed", b"ok", frames):
                try: os.write(descriptor, text)
                except OSError: pass
        os._exit(0)
    """,
    "modules of the check": """
        import json, os, sys
        json.dumps = json.loads = lambda *a, **k: {"value": 4, "passed": True}
        os.write = lambda *a: 0
        sys.stdout = sys.stderr = None
        def double(x): return 0
    """,
    "functions of the check": """
        import sys
        main = sys.modules["__main__"]
        for name in ("run", "main", "judge", "run_together", "answer", "refuse", "run_code", "compile_code"):
            if hasattr(main, name):
                setattr(main, name, lambda *a, **k: {"value": True, "changed": []})
        def double(x): return 0
    """,
    "builtins of its own": "abs = lambda x: 0.0\nint = float = object\ndef same(a, b): return True\ndef double(x): return 0\n",
    "check of its own": "def check(candidate): pass\ndef same(a, b): return True\ndef double(x): return 0\n",
    "no assertion errors": """
        import builtins
        class Quiet(BaseException): pass
        builtins.AssertionError = Quiet
        def double(x): return 0
    """,
    "exceptions that end well": "def double(x): raise SystemExit(0)\n",
    "a tracer that jumps": """
        import sys
        def trace(frame, event, argument):
            if frame.f_code.co_filename == "<tests>" and event == "line":
                try: frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)
                except ValueError: pass
            return trace
        def double(x):
            frame = sys._getframe(1)
            while frame:
                frame.f_trace = trace
                frame = frame.f_back
            sys.settrace(trace)
            return 0
    """,
    "at exit": """
        import atexit, os, sys
        sys.excepthook = lambda *a: os._exit(0)
        atexit.register(lambda: os.write(1, b"passed"))
        def double(x): return 0
    """,
    "a thread that answers": """
        import os, threading
        def shout():
            for _ in range(2000):
                for descriptor in range(1, 20):
                    try: os.write(descriptor, len(b'{"value": 4, "changed": []}').to_bytes(8, "big") + b'{"value": 4, "changed": []}')
                    except OSError: pass
        try: threading.Thread(target=shout, daemon=True).start()
        except RuntimeError: pass
        def double(x): return 0
    """,
    "collections that are equal to everything": """
        class Any(list):
            def __eq__(self, other): return True
        def double(x): return Any()
    """,
    "the files of the parent": """
        import os
        def double(x):
            for place in (os.getppid(), "self"):
                for name in ("cmdline", "environ", "fd/0", "fd/1"):
                    try: text = open(f"/proc/{place}/{name}", "r+b", buffering=0)
                    except OSError: continue
                    try: text.write(b"passed")
                    except OSError: pass
            return 0
    """,
}  # fmt: skip

# name: (program, tests)
HONEST = {
    "plain": ("def double(x): return 2 * x", ASSERTS),
    "builtin name": ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
    "a long number": ("def power(n): return 7 ** n", "assert power(9999) == 7 ** 9999"),
    "data of every kind": (
        "def same(x): return x",
        "import datetime\nfrom collections import Counter, deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "for x in (None, True, -1.5, float('inf'), 'a\\ud800', b'\\xff', (1, (2,)), {1: {2: [3]}}, {1, 2}, frozenset({3}),"
        " 1j, range(3), deque([1]), Counter('aab'), Decimal('0.1'), Fraction(1, 3), datetime.date(2024, 2, 29),"
        " datetime.timedelta(1, 2, 3), bytearray(b'x')):\n    assert same(x) == x, x\n",
    ),
    "subclasses": (
        "import collections, enum\nP = collections.namedtuple('P', 'x y')\nclass E(enum.IntEnum):\n    A = 1\n"
        "def point(): return P(1, 2)\ndef one(): return E.A\ndef groups():\n    d = collections.defaultdict(list)\n    d[1].append(2)\n    return d",
        "assert point() == (1, 2)\nassert one() == 1\nassert groups() == {1: [2]}",
    ),
    "a generator": ("def upto(n):\n    yield from range(n)", "assert list(upto(3)) == [0, 1, 2]\nassert sum(upto(4)) == 6"),
    "an endless generator": (
        "def count():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]\nit = count()\nassert next(it) == 0 and next(it) == 1",
    ),
    "a function that makes functions": ("def adder(n): return lambda x: x + n", "assert adder(2)(3) == 5"),
    "in place": (
        "def order(x, seen):\n    x.sort()\n    x[0][0] = 9\n    seen.add(1)",
        "x, seen = [[3], [1]], set()\norder(x, seen)\nassert x == [[9], [3]] and seen == {1}",
    ),
    "an expected exception": (
        "class Wrong(ValueError): pass\ndef root(x):\n    if x < 0: raise Wrong('negative', x)\n    return x ** 0.5",
        "try:\n    root(-1)\n    assert False\nexcept ValueError as error:\n    assert error.args == ('negative', -1)\nassert root(4) == 2",
    ),
    "a function as argument": ("def twice(f, x): return f(f(x))", "assert twice(lambda x: x + 1, 3) == 5"),
    "modules of the program": ("import math\ndef area(r): return math.pi * r * r", "assert math.isclose(area(1), math.pi)"),
    "keywords and defaults": ("def f(a, *, b=2, **c): return a + b + sum(c.values())", "assert f(1) == 3 and f(1, b=1, c=5) == 7"),
    "objects with attributes": (
        "class node:\n    def __init__(self, v): self.v, self.next = v, None\ndef chain(n):\n    head = node(n)\n    head.next = node(n + 1)\n    return head",
        "head = chain(1)\nassert head.v == 1 and head.next.v == 2 and head.next.next is None\nassert chain(1) is not None",
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(3)\nassert len(s) == 1 and s.items == [3] and isinstance(s, Stack)",
    ),
    "printed output": (
        "def hello(): print('hi')",
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    hello()\nassert out.getvalue() == 'hi\\n'",
    ),
    "unittest": (
        "def double(x): return 2 * x",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(double(2), 4)\n"
        "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
    ),
    "a datetime": (
        "import datetime\ndef at(h): return datetime.datetime(2024, 2, 29, h, tzinfo=datetime.timezone.utc)\ndef clock(h): return datetime.time(h, 30)",
        "import datetime\nassert at(3) == datetime.datetime(2024, 2, 29, 3, tzinfo=datetime.timezone.utc)\nassert clock(4) == datetime.time(4, 30)",
    ),
    "attributes of results": (
        "import collections, enum\nP = collections.namedtuple('P', 'x y')\nclass E(enum.IntEnum):\n    A = 1\ndef point(): return P(1, 2)\ndef one(): return E.A",
        "assert point().x == 1\nassert one().name == 'A'",
    ),
    "texts of results": (
        "import collections\nP = collections.namedtuple('P', 'x')\nclass Q:\n    def __str__(self): return 'q'\n    def __repr__(self): return 'Q()'\n"
        "class E(str, __import__('enum').Enum):\n    A = 'a'\ndef point(): return [P(1)]\ndef q(): return Q()\ndef e(): return E.A",
        "assert str(point()) == '[P(x=1)]'\nassert str(q()) == 'q' and repr(q()) == 'Q()'\nassert e() == 'a' and str(e()) == 'E.A'",
    ),
    "operators of results": (
        "class T:\n    def __init__(self, n): self.n = n\n    def __add__(self, o): return T(self.n + o.n)\n    def __eq__(self, o): return self.n == o.n\ndef make(n): return T(n)",
        "assert make(1) + make(2) == make(3)",
    ),
    "an object that contains": ("class T:\n    def __contains__(self, x): return x == 1\ndef make(): return T()", "assert 1 in make()"),
    "keys of a dict": ("def keys(): return {1: 2}.keys()", "assert keys() == {1}\nassert list(keys()) == [1]"),
    "items of a defaultdict": ("import collections\ndef groups(): return collections.defaultdict(list)", "d = groups()\nassert d[5] == []"),
    "mappings": ("import collections, types\ndef f(): return collections.ChainMap({1: 2})\ndef g(): return types.MappingProxyType({1: 2})", "assert f() == {1: 2}\nassert g() == {1: 2}"),
    "numbers of numpy": ("import numpy\ndef half(x): return numpy.float32(x) / 2\ndef big(x): return numpy.int64(x) > 2", "assert half(1) == 0.5 and round(half(3), 1) == 1.5\nassert not big(1)"),
    "a global that changes": ("count = 0\ndef hit():\n    global count\n    count += 1", "hit()\nhit()\nassert count == 2"),
    "a result that changes": ("held = []\ndef add(x):\n    held.append(x)\n    return held", "a = add(1)\nadd(2)\nassert a == [1, 2]"),
    "results that change": ("held = []\ndef add(x):\n    held.append(x)\n    return held", "assert add(1) == add(2)\nassert [add(3) for _ in range(2)] == [[1, 2, 3, 3]] * 2"),
    "one list for all items": (
        "def f():\n    x = []\n    for i in range(2):\n        x.append(i)\n        yield x",
        "assert [list(x) for x in f()] == [[0], [0, 1]]\nassert list(f()) == [[0, 1], [0, 1]]",
    ),
    "one argument twice": ("def f(m): m[0][0] = 9", "r = [1]\nm = [r, r]\nf(m)\nassert r == [9]"),
    "an argument before the call": ("def f(x):\n    x.append(1)\n    return x", "x = []\nassert x == f(x)"),
    "rows that are one": ("def f(m):\n    m[0][0] = 9\n    return m", "assert f([[0]] * 2) == [[9], [9]]"),
    "a module of the tests": ("def area(r): return math.pi * r * r", "import math\nassert math.isclose(area(1), math.pi)"),
    "the name of a module": ("def bisect(x): return x / 2", "assert bisect(4) == 2"),
    "many calls": ("def double(x): return 2 * x", "for x in range(20000):\n    assert double(x) == 2 * x"),
    "a long list": ("def same(x): return x", "assert same(list(range(10**5))) == list(range(10**5))"),
    "arguments that the tests keep": ("def total(x): return sum(x)", "rows = [list(range(1000)) for _ in range(800)]\nfor row in rows:\n    assert total(row) == 499500"),
    "arguments that the program keeps": (
        "held = []\ndef keep(x):\n    held.append(x)\n    return len(held)\ndef add(): held[0].append(9)",
        "rows = [[i] for i in range(9)]\nassert [keep(row) for row in rows] == list(range(1, 10))\nadd()\nassert rows[0] == [0, 9]\nrows[0].clear()\nadd()\nassert rows[0] == [9] and rows[1] == [1]",
    ),
    "a result that comes back": ("def row(): return [1]\ndef grow(x): x.append(2)", "a = row()\nrow()\nrow()\na.append(5)\ngrow(a)\nassert a == [1, 5, 2]"),
    "not a number": ("import math\ndef f(): return [math.nan]", "import math\nassert f() == [math.nan]"),
    "a seed": ("import random\ndef draw(): return random.random()", "import random\nrandom.seed(1)\na = draw()\nrandom.seed(1)\nassert a == draw()"),
}  # fmt: skip
