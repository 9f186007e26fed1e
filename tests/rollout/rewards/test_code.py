"""Programs that are really run, good and bad."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import socket
import textwrap
import time
import uuid
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards import code_child
from rollout.rewards.code import can_run_apart, last_block, passes, program
from rollout.rewards.table import load_rewards
from tests.rollout.rewards.code_programs import ASSERTS, ATTACKS, CHECK, HONEST


def score(prompts: list, texts: list[str], **columns: list) -> list[float | None]:
    rows = [
        Prompt(source=f"x:{i}", prompt=prompt, ids=[1], columns={name: values[i] for name, values in columns.items()})
        for i, prompt in enumerate(prompts)
    ]
    done = [
        Completion(prompt_ids=[1], ids=[1], logps=[0.0], finish_reason="stop", text=text, versions=[]) for text in texts
    ]
    return load_rewards(["code:4"]).score(rows, done).totals


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\nThat was it."


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_assert_lines_decide():
    good, bad = "def double(x):\n    return 2 * x", "def double(x):\n    return x + 2"
    tests = ["assert double(2) == 4", "assert double(5) == 10"]
    asked = chat("Write a function that doubles a number.")
    assert score(
        [asked] * 6,
        [fenced(good), fenced(bad), good, fenced(bad) + fenced(good), "I cannot.", fenced(good)],
        tests=[tests, tests, "\n".join(tests), tests, tests, None],
    ) == [1.0, 0.0, 1.0, 1.0, 0.0, None]


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```\nx = 1\n```\nb\n~~~py\nx = 2\n~~~\nc", "x = 2\n"),
        ("so ```x``` then\n```py\nx = 1\n", "x = 1\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("1.\n   ```python\n   def f():\n       pass\n   ```\n", "def f():\n    pass\n"),
        ("", ""),
    ],
)
def test_the_last_block_is_the_program(text, block):
    assert last_block(text) == block


STUB = 'import math\n\ndef area(r):\n    """Of a circle."""\n'


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (STUB, "    return math.pi * r**2\n"),
        (STUB, fenced(STUB + "    return math.pi * r**2\n")),
        (STUB, fenced("def area(r):\n    return math.pi * r**2\n")),
        (chat(f"Complete this:\n```python\n{STUB}```\n"), fenced("def area(r):\n    return math.pi * r**2\n")),
        (chat("The area of a circle, please."), fenced("import math\ndef area(r):\n    return math.pi * r**2\n")),
    ],
)
def test_a_completion_may_go_on_where_the_prompt_stops(prompt, text):
    tests = "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.001\n"
    assert score([prompt], [text], tests=[tests], entry_point=["area"]) == [1.0]
    assert score([prompt], [text], test=[tests], entry_point=["area"]) == [1.0], "as HumanEval calls it"
    assert score([prompt], [text.replace("**2", "**3")], tests=[tests], entry_point=["area"]) == [0.0]


def test_prose_is_not_run():
    assert program("x = 1", "yes", None) == "x = 1"
    assert program("x = 1", chat("Import taxes from (2010)?"), None) == "x = 1"


@pytest.mark.parametrize("number", [0, 1, 2, 32, 38, 53, 163])
def test_humaneval_rows_as_they_ship(asset, number):
    with gzip.open(asset("data/HumanEval.jsonl.gz"), "rt") as lines:
        row = [json.loads(line) for line in lines][number]
    columns = {name: [row[name]] * 3 for name in ("test", "entry_point")}
    whole = row["prompt"] + row["canonical_solution"]
    texts = [row["canonical_solution"], fenced(whole), "    return None\n"]
    assert score([row["prompt"]] * 3, texts, **columns) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def check(candidate): pass\nx = 2",
        "x = 1 +",
        "print('passed')",
        "import os\nfor f in range(3, 20):\n    try: os.write(f, b'passed')\n    except OSError: pass\nos._exit(0)",
        "import signal, os; os.kill(os.getppid(), signal.SIGKILL)",
        "import atexit; atexit.register(lambda: print('x')); x = 0",
    ],
)
def test_ending_early_is_not_passing(source):
    assert not passes(source, "def check(candidate):\n    assert candidate == 1\n\ncheck(x)\n", 4.0)


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import signal, time; signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(100)",
        "x = bytearray(3 * 2**30)",
        "x = 'a'\nwhile True: x += x",
        "open('big', 'wb').write(b'0' * 2**26)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import os\nif os.system('true'): raise ValueError",
        "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=1)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT', timeout=1)",
        "import socket; socket.getaddrinfo('localhost', PORT)",
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0))",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ],
)  # fmt: skip
def test_what_the_limits_are_for(source):
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = source.replace("PORT", str(server.getsockname()[1]))
        started = time.perf_counter()
        assert not passes(source, "", 1.0)
        assert time.perf_counter() - started < 8


def test_ordinary_programs_have_what_they_need(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    source = """
        import asyncio, collections, dataclasses, os, tempfile, time
        @dataclasses.dataclass
        class P:
            x: int = 1
        async def f():
            await asyncio.sleep(0)
            return P().x
        assert asyncio.run(f()) == 1
        with open("notes.txt", "w") as file:
            file.write("fine")
        assert open("notes.txt").read() == "fine" and os.listdir() == ["notes.txt"]
        assert __name__ == "__main__" and "SECRET_TOKEN" not in os.environ
        print("some output")
        input = None
    """
    assert passes(textwrap.dedent(source), "assert P().x == 1", 10.0)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for source in ("open('a', 'w').write('x')", "import time; time.sleep(100)"):
        passes(source, "", 1.0)
    assert list(tmp_path.iterdir()) == []
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)


def test_in_workers_and_with_faults():
    rows = [Prompt(source=f"x:{i}", prompt="?", ids=[1], columns={"tests": "assert x == 1"}) for i in range(4)]
    texts = ["x = 1", "x = 2", "while True: pass", "x = 1"]
    done = [
        Completion(prompt_ids=[1], ids=[1], logps=[0.0], finish_reason="stop", text=text, versions=[]) for text in texts
    ]
    rewards = load_rewards(["code:1"], num_workers=2, memory_gb=1.0)
    assert rewards.names == ["code"]
    assert rewards.score(rows, done).totals == [1.0, 0.0, 0.0, 1.0], "a program that hangs has failed, and that is all"
    rewards.close()


def test_bad_settings_are_refused():
    for argument in ("", "fast", "0", "nan", "1e9"):
        with pytest.raises(ValueError, match=f"reward_funcs=code:{argument}: write code:SECONDS"):
            load_rewards([f"code:{argument}"])
    with pytest.raises(ValueError, match="raised ValueError: the data has neither a column 'tests' nor 'test' on x:0"):
        score(["?"], ["x = 1"])


@pytest.mark.parametrize("tests", [ASSERTS, CHECK], ids=["asserts", "check"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_tricks_earn_nothing(attack, tests):
    assert can_run_apart(tests)
    assert not passes(textwrap.dedent(ATTACKS[attack]), tests, 3.0)


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_keep_their_reward(name):
    source, tests = HONEST[name]
    assert passes(source, tests, 10.0)


@pytest.mark.parametrize(
    ("tests", "apart"),
    [
        ("assert f(2) == 4", True),
        ("METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n\n\ncheck(Strongest_One)\n", True),
        ("import math\nassert math.isclose(Find_It(2), 4)", True),
        ("assert not f([1], k='a') and f() is None and f(1) != {2: [3]}", True),
        ("assert round(f(1), 2) == 0.5 and abs(f(2) - 1e3) < 1e-6 and sorted(f([3, 1])) == [1, 3]", True),
        ("x = f(1)\nassert x == 2 and len(x) == 3\nx = f(2)\nassert x == 3", True),
        ("for x, y in [([1], 2), ([3], 4)]:\n    assert f(x) == y", True),
        ("cases = [([1], [2])]\nfor x, y in cases:\n    assert f(*x) == y", True),
        ("cases = [([1], [2])]\nassert all(map(lambda c: f(c[0]) == c[1], cases))", True),
        ("xs, ys = [1], [2]\nfor x, y in zip(xs, ys):\n    assert f(x) == y", True),
        ("assert all(f(x) == x * x for x in range(9))", True),
        ("x = [3, 1]\nassert f(x) == [1, 3]", True),
        ("import copy\nx = [3, 1]\nassert f(copy.deepcopy(x)) == sorted(x)", True),
        ("import datetime\nassert f(1) == datetime.datetime(2024, 1, 2, 3)", True),
        ("assert list(map(list, list(f(1)))) == [[1]] and {tuple(x) for x in sorted(f(2))} == {(1,)}", True),
        ("assert [list(x) for x in f(1)] == [[1]]", False),
        ("import decimal\ndecimal.setcontext(decimal.Context(prec=3))\nassert f(1) == 1", False),
        ("x = [3, 1]\nf(x)\nassert x == [1, 3]", False),
        ("cases = [[1]]\nfor x in cases:\n    assert f(x) == 1\nassert cases == [[1]]", False),
        ("cases = [([1], 2)]\nassert all(map(lambda c: f(c[0]) == len(c[0]), cases))", False),
        ("x = [1]\nassert f(x, x) == 2", False),
        ("x = [1]\ny = x\nassert f(x) == y", False),
        ("x = f(1)\nf(2)\nassert x == 1", False),
        ("def run(g, x):\n    g(1)\n    return x == 2\nassert run(f, f(2))", False),
        ("assert f(g(1)) == 2", False),
        ("assert f(1) == g(1)", False),
        ("assert f(1)[0] == 2", False),
        ("assert f(1).x == 2", False),
        ("assert f(1)(2) == 3", False),
        ("assert f(1) is x", False),
        ("assert 1 in f()", False),
        ("assert x == 1", False),
        ("assert all(map(f, [1]))", False),
        ("assert any(x == 3 for x in f())", False),
        ("for i in range(len(f(1))):\n    assert f(i) == i", False),
        ("for x in f(1):\n    assert f(2) == 2", False),
        ("with f() as x:\n    pass", False),
        ("assert Vec(1) == (1,)", False),
        ("assert Vec(1) + Vec(2) == Vec(3)", False),
        ("x = Stack()\nassert x.pop() == 1", False),
        ("try:\n    f(1)\nexcept MyError:\n    pass", False),
        ("import sys\nassert f(2) == 4", False),
        ("assert eval('f(2)') == 4", False),
        ("f.limit = 3\nassert f(2) == 4", False),
        ("assert f(2) ==", False),
    ],
)
def test_which_tests_run_apart_from_the_program(tests, apart):
    assert can_run_apart(tests) is apart


def test_a_result_cannot_end_a_loop_of_the_tests():
    tests = "cases = [(1, 2)]\nassert all(map(lambda c: double(c[0]) == c[1], cases))"
    assert not passes("def double(x): raise StopIteration", tests, 10.0)
    assert not passes("class T:\n    def __iter__(self): raise StopIteration\ndef double(x): return T()", tests, 10.0)
    assert passes("def double(x): return 2 * x", tests, 10.0)


def test_a_program_cannot_have_its_tests_run_together():
    always = "class Any:\n    def __eq__(self, other): return True\n    def __len__(self): return 10**6\n"
    for result in ("Any()", "[Any()] * 10**4", "lambda: 1", "(Any() for _ in range(10**4))"):
        source = f"{always}def double(x): return {result}\n"
        for tests in (ASSERTS, CHECK, "assert list(double(1)) == [2]", "x = double(2)\nassert x == 4"):
            assert can_run_apart(tests) and not passes(source, tests, 10.0)


def test_humaneval_runs_apart(asset):
    with gzip.open(asset("data/HumanEval.jsonl.gz"), "rt") as lines:
        rows = [json.loads(line) for line in lines]
    together = [i for i, row in enumerate(rows) if not can_run_apart(f"{row['test']}\ncheck({row['entry_point']})")]
    assert together == [32, 33, 38, 50], "they give a result to another function, or compare two"


def test_data_travels_as_it_is():
    link = code_child.Link(0, 0)
    zone = datetime.timezone(datetime.timedelta(hours=2))
    for value in (
        None, True, -1.5, float("inf"), "a\ud800", b"\xff", (1, (2,)), {1: {2: [3]}}, {1, 2}, frozenset({3}), 1j,
        range(3), 7**99, [1, 7**99], [True, None, 2**60], deque([1], 2), Counter("aab"), OrderedDict(a=1),
        Decimal("0.10"), Fraction(1, 3), datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 1, 2, 3, 4, zone),
        bytearray(b"x"), datetime.time(1, 2, tzinfo=zone), datetime.timedelta(1, 2, 3), zone, uuid.UUID(int=5),
        {1: 2}.keys(), {1: 2}.items(), memoryview(b"x"), np.float32(0.1), np.int64(3), np.bool_(True),
    ):  # fmt: skip
        again = link.decode(json.dumps(code_child.encode([value], None)))[0]
        assert again == value and type(again) is type(value) and repr(again)[:9] == repr(value)[:9]


def test_patched_test_helpers_are_put_back():
    _, tests = HONEST["unittest"]
    patched = "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef double(x): return 0\n"
    assert not passes(patched, tests, 10.0)
    emptied = "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\ndef double(x): return 0\n"
    assert not passes(emptied, tests, 10.0)
