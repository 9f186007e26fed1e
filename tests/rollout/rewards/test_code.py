"""The `code` reward on real programs, good and bad."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.code import isolate, last_block, passes, program
from rollout.rewards.code_child import is_open
from rollout.rewards.table import load_rewards
from tests.rollout.rewards.code_programs import ASSERTS, ATTACKS, CHECK, HONEST


def score(prompts: list, texts: list[str], **columns: list) -> list[float | None]:
    rows = [
        Prompt(source=f"x:{i}", prompt=prompt, ids=[1], columns={name: values[i] for name, values in columns.items()})
        for i, prompt in enumerate(prompts)
    ]
    return load_rewards(["code:4"]).score(rows, completions(texts)).totals


def completions(texts: list[str]) -> list[Completion]:
    return [Completion(prompt_ids=[1], ids=[1], logps=[0.0], finish_reason="stop", text=t, versions=[]) for t in texts]


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\nThat was it."


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_assert_lines_decide():
    good, bad = "def double(x):\n    return 2 * x", "def double(x):\n    return x + 2"
    tests = ["assert double(2) == 4", "assert double(5) == 10"]
    assert score(
        [chat("Write a function that doubles a number.")] * 6,
        [fenced(good), fenced(bad), good, fenced(bad) + fenced(good), "I cannot.", fenced(good)],
        tests=[tests, tests, "\n".join(tests), tests, tests, None],
    ) == [1.0, 0.0, 1.0, 1.0, 0.0, None]


def test_the_last_block_is_the_program():
    for text, block in {
        "x = 1": "x = 1",
        "```python\nx = 1\n```": "x = 1\n",
        "a\n```\nx = 1\n```\nb\n~~~py\nx = 2\n~~~\nc": "x = 2\n",
        "so ```x``` then\n```py\nx = 1\n": "x = 1\n",
        "````\n```\nx\n```\n````": "```\nx\n```\n",
        "1.\n   ```python\n   def f():\n       pass\n   ```\n": "def f():\n    pass\n",
        "": "",
    }.items():
        assert last_block(text) == block, text


STUB = 'import math\n\ndef area(r):\n    """Of a circle."""\n'


def test_a_completion_may_continue_the_prompt():
    tests = "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.001\n"
    pairs = [
        (STUB, "    return math.pi * r**2\n"),
        (STUB, fenced(STUB + "    return math.pi * r**2\n")),
        (STUB, fenced("def area(r):\n    return math.pi * r**2\n")),
        (chat(f"Complete this:\n```python\n{STUB}```\n"), fenced("def area(r):\n    return math.pi * r**2\n")),
        (chat("The area of a circle, please."), fenced("import math\ndef area(r):\n    return math.pi * r**2\n")),
    ]
    prompts, texts = [list(column) for column in zip(*pairs, strict=True)]
    columns = {"test": [tests] * 6, "entry_point": ["area"] * 6}  # HumanEval's names
    wrong = texts[0].replace("**2", "**3")
    assert score([*prompts, STUB], [*texts, wrong], **columns) == [1.0] * 5 + [0.0]


def test_prose_is_not_run():
    assert program("x = 1", "yes", None) == "x = 1"
    assert program("x = 1", chat("Import taxes from (2010)?"), None) == "x = 1"


def test_humaneval_rows(asset):
    with gzip.open(asset("data/HumanEval.jsonl.gz"), "rt") as lines:
        rows = [json.loads(line) for line in lines]
    together = [i for i, row in enumerate(rows) if isolate(f"{row['test']}\ncheck({row['entry_point']})") is None]
    assert together == [32], "this test creates a random.Random"
    rows = [rows[number] for number in (0, 32, 33, 53)]
    columns = {name: [row[name] for row in rows for _ in range(2)] for name in ("test", "entry_point")}
    texts = [text for row in rows for text in (row["canonical_solution"], "    return None\n")]
    assert score([row["prompt"] for row in rows for _ in range(2)], texts, **columns) == [1.0, 0.0] * 4


def failures(cases: dict[str, tuple[str, str]], seconds: float) -> set[str]:
    """Return the names of the (program, tests) pairs that do not pass."""
    with ThreadPoolExecutor(4) as threads:
        passed = threads.map(lambda case: passes(textwrap.dedent(case[0]), case[1], seconds), cases.values())
        return {name for name, ok in zip(cases, passed, strict=True) if not ok}


def test_ending_early_is_not_passing():
    tests = "def check(candidate):\n    assert candidate == 1\n\ncheck(x)\n"
    sources = [
        "import os; os._exit(0)",
        "raise SystemExit",
        "def check(candidate): pass\nx = 2",
        "x = 1 +",
        "import os\nfor f in range(3, 20):\n    try: os.write(f, b'passed')\n    except OSError: pass\nos._exit(0)",
        "import signal, os; os.kill(os.getppid(), signal.SIGKILL)",
    ]
    assert failures({source: (source, tests) for source in sources}, 4.0) == {*sources}


def test_programs_that_exceed_a_limit_fail(monkeypatch):
    monkeypatch.setattr("data.limits.SLOWDOWN", 10.0)
    sources = [
        "while True: pass",
        "import signal, time; signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(100)",
        "x = bytearray(3 * 2**30)",
        "open('big', 'wb').write(b'0' * 2**26)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import os\nif os.system('true'): raise ValueError",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT', timeout=1)",
        "import socket; socket.getaddrinfo('localhost', PORT)",
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0))",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ]  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        started = time.perf_counter()
        cases = {source: (source.replace("PORT", port), "") for source in sources}
        cases["little CPU time"] = ("import time; time.sleep(2.2)", "")
        assert failures(cases, 1.0) == {*sources}
        assert time.perf_counter() - started < 30


HARMFUL = """
import ctypes, os
libc = ctypes.CDLL(None)
child = libc.fork()  # past Python's audit hook
if child == 0:
    os._exit(0)
libc.kill(VICTIM, 9)
done = [child != -1]
for act in (lambda: open(FILE, "w"), lambda: os.unlink(FILE), lambda: os.setuid(0)):
    try:
        act()
        done.append(True)
    except OSError:
        done.append(False)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="the trainer is not root")
def test_programs_of_root_run_as_nobody(tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    victim = subprocess.Popen(["sleep", "60"])
    try:
        source = HARMFUL.replace("FILE", repr(str(mine))).replace("VICTIM", str(victim.pid))
        confined = passes(source + "import json, numpy\nassert not any(done)", "", 10.0)
        warned = "warning: reward code: programs run as root" in capsys.readouterr().err
        if confined or not warned:  # the container of the tests may not allow another user
            assert confined and mine.read_text() == "mine" and victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_only_folders_open_to_all_users_count_as_open(tmp_path):
    (tmp_path / "inner").mkdir()
    tmp_path.chmod(0o700)
    assert is_open("/") and not is_open(str(tmp_path)) and not is_open(str(tmp_path / "inner"))


def test_ordinary_programs_work(monkeypatch):
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
    monkeypatch.setattr("rollout.rewards.code.START_SECONDS", 1.0)
    monkeypatch.setattr("data.limits.SLOWDOWN", 10.0)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for source in ("open('a', 'w').write('x')", "import time; time.sleep(100)"):
        passes(source, "", 1.0)
    assert list(tmp_path.iterdir()) == []
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)


def test_in_workers_and_with_faults():
    rows = [Prompt(source=f"x:{i}", prompt="?", ids=[1], columns={"tests": "assert x == 1"}) for i in range(4)]
    texts = ["x = 1", "x = 2", "while True: pass", "x = 1"]
    rewards = load_rewards(["code:1"], num_workers=2, memory_gb=1.0)
    assert rewards.names == ["code"]
    assert rewards.score(rows, completions(texts)).totals == [1.0, 0.0, 0.0, 1.0], "a program that hangs only fails"
    rewards.close()


def test_bad_settings_are_rejected():
    for argument in ("", "fast", "0", "nan", "1e9"):
        with pytest.raises(ValueError, match=f"reward_funcs=code:{argument}: .*code:SECONDS"):
            load_rewards([f"code:{argument}"])
    with pytest.raises(ValueError, match="'tests' nor 'test' on x:0"):
        score(["?"], ["x = 1"])


def test_attacks_earn_nothing():
    assert isolate(ASSERTS) and isolate(CHECK)
    cases = {name: (source, CHECK) for name, source in ATTACKS.items()}
    cases |= {f"{name} (asserts)": (ATTACKS[name], ASSERTS) for name in ("equal to everything", "a tracer that jumps")}
    assert failures(cases, 3.0) == {*cases}


def test_honest_programs_pass():
    assert failures(HONEST, 10.0) == set()


def test_which_tests_run_in_a_separate_process():
    for tests in (
        "assert f(2) == 4",
        "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n\n\ncheck(Strongest_One)\n",
        "import math\nassert math.isclose(Find_It(2), 4)",
        "assert not f([1], k='a') and f() is None and f(1) != {2: [3]}",
        "assert round(f(1), 2) == 0.5 and abs(f(2) - 1e3) < 1e-6 and sorted(f([3, 1])) == [1, 3]",
        "x = f(1)\nassert x == 2 and len(x) == 3\nx = f(2)\nassert x == 3",
        "for x, y in [([1], 2), ([3], 4)]:\n    assert f(x) == y",
        "cases = [([1], [2])]\nfor x, y in cases:\n    assert f(*x) == y",
        "cases = [([1], [2])]\nassert all(map(lambda c: f(c[0]) == c[1], cases))",
        "xs, ys = [1], [2]\nfor x, y in zip(xs, ys):\n    assert f(x) == y",
        "assert all(f(x) == x * x for x in range(9))",
        "x = [3, 1]\nassert f(x) == [1, 3]",
        "import copy\nx = [3, 1]\nassert f(copy.deepcopy(x)) == sorted(x)",
        "import datetime\nassert f(1) == datetime.datetime(2024, 1, 2, 3)",
        "assert list(map(list, list(f(1)))) == [[1]] and {tuple(x) for x in sorted(f(2))} == {(1,)}",
        "x = [3, 1]\nf(x)\nassert x == [1, 3]",
        "cases = [[1]]\nfor x in cases:\n    assert f(x) == 1\nassert cases == [[1]]",
        "cases = [([1], 2)]\nassert all(map(lambda c: f(c[0]) == len(c[0]), cases))",
        "x = [1]\nassert f(x, x) == 2",
        "x = [1]\ny = x\nassert f(x) == y",
        "x = f(1)\nf(2)\nassert x == 1",
        "def run(g, x):\n    g(1)\n    return x == 2\nassert run(f, f(2))",
        "assert f(g(1)) == 2",
        "assert [list(x) for x in f(1)] == [[1]]",
        "assert f(1) == g(1)",
        "assert f(1)[0] == 2",
        "assert f(1)(2) == 3",
        "assert 1 in f()",
        "assert all(map(f, [1]))",
        "assert any(x == 3 for x in f())",
        "for i in range(len(f(1))):\n    assert f(i) == i",
        "for x in f(1):\n    assert f(2) == 2",
        "x = [1]\nf(x)\nfor y in x:\n    assert f(y) == 1",
    ):
        assert isolate(tests) is not None, tests
    for tests in (
        "import decimal\ndecimal.setcontext(decimal.Context(prec=3))\nassert f(1) == 1",
        "assert f(1).x == 2",
        "assert f(1) is x",
        "assert x == 1",
        "with f() as x:\n    pass",
        "assert Vec(1) == (1,)",
        "assert Vec(1) + Vec(2) == Vec(3)",
        "x = Stack()\nassert x.pop() == 1",
        "try:\n    f(1)\nexcept MyError:\n    pass",
        "import sys\nassert f(2) == 4",
        "assert eval('f(2)') == 4",
        "f.limit = 3\nassert f(2) == 4",
        "assert f(2) ==",
        "assert str(f(1)) == '2'",
        "for x in range(20000):\n    assert f(x) == x",
    ):
        assert isolate(tests) is None, tests


def test_a_result_cannot_end_a_loop_in_the_tests():
    tests = "cases = [(1, 2)]\nassert all(map(lambda c: double(c[0]) == c[1], cases))"
    assert not passes("def double(x): raise StopIteration", tests, 10.0)
    assert not passes("class T:\n    def __iter__(self): raise StopIteration\ndef double(x): return T()", tests, 10.0)
    assert passes("def double(x): return 2 * x", tests, 10.0)


def test_a_program_cannot_pull_its_tests_into_its_process():
    always = "class Any:\n    def __eq__(self, other): return True\n    def __len__(self): return 10**6\n"
    for result, tests in {
        "Any()": ASSERTS,
        "[Any()] * 10**4": "assert list(double(1)) == [2]",
        "lambda: 1": CHECK,
        "(Any() for _ in range(10**4))": "x = double(2)\nassert x == 4",
        "x.append(Any())": "x = []\ndouble(x)\nassert x == [1]",
    }.items():
        assert isolate(tests) and not passes(f"{always}def double(x): return {result}\n", tests, 10.0)


def test_patched_test_helpers_are_restored():
    _, tests = HONEST["unittest"]
    patched = "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef double(x): return 0\n"
    assert not passes(patched, tests, 10.0)
    emptied = "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\ndef double(x): return 0\n"
    assert not passes(emptied, tests, 10.0)
