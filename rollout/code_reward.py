"""code[:SECONDS]: 1 when the program in a completion passes the tests of its row, else 0.

The program is the last fenced block of the completion, or all of it where there is none. The row brings

    tests        assert lines (a list or one text), or a text with check(candidate), as in HumanEval (its `test` works)
    entry_point  the function that check() is given

A completion may also be the rest of a function that the prompt began: prompt and completion are then run as one.
Without tests a row gets None.

Every program runs in an interpreter of its own: an empty folder, limits on time, memory, file size and processes, no
network where the system lets a process leave it, no connections otherwise. That is protection from accidents. It is not
a security boundary: code made to break out will, so run a policy you do not trust in a container.
"""

from __future__ import annotations

import ast
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

from rollout.reward_functions import text_of
from rollout.reward_workers import kill_group

CHILD = Path(__file__).with_name("code_child.py")
SECONDS = 10.0
START_SECONDS = 5.0  # for the interpreter, on a busy machine
MEMORY_GB = 1.0
FILE_MB = 16.0
AT_ONCE = 8
FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n`]*\n(.*?)(?:^[ ]{0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
KEPT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # of the environment: no keys, no tokens


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
    """(program, tests), or None where there is nothing to test."""
    tests = "\n".join(str(line) for line in tests) if isinstance(tests, (list, tuple)) else tests
    if not tests or not str(tests).strip():
        return None
    tests = str(tests)
    if entry_point and re.search(r"^def check\(", tests, re.MULTILINE):
        tests = f"{tests}\n\ncheck({entry_point})\n"
    return program(text, prompt, entry_point), tests


def program(text: str, prompt: Any, entry_point: str | None = None) -> str:
    """What to run: the completion's code, behind the prompt's where that is code, too."""
    found = last_block(text)
    begun = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    begun = begun if isinstance(prompt, str) else last_block(begun)
    if not _is_code(begun, entry_point):
        return found
    whole = f"{begun.rstrip()}\n\n{found}"  # the function again and in full: the later one counts
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
    """Python, perhaps of a function without its body, that does something: a word alone would parse, too."""
    return any(_parses(text + end) for end in ("", "\n    pass\n")) and bool(
        re.search(r"^(def|class|import|from|@)\b", text, re.MULTILINE) or _defines(text, entry_point)
    )


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what odd text makes the parser raise
        return False
    return True


def _defines(text: str, name: str | None) -> bool:
    return bool(name and re.search(rf"^(async def|def|class) {re.escape(name)}\b", text, re.MULTILINE))


def passes(source: str, tests: str, seconds: float) -> bool:
    """Whether the tests ran to their end; a program that ends the process early has not passed."""
    secret = secrets.token_hex(16)
    limits = {"seconds": seconds, "memory_gb": MEMORY_GB, "file_mb": FILE_MB}
    job = json.dumps({"program": source, "tests": tests, "limits": limits, "secret": secret})
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
            said, _ = process.communicate(job.encode(), timeout=seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            _end(process)
    return said == secret.encode()


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it may have started in spite of everything."""
    kill_group(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
