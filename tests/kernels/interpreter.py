"""Run a file's tests under Triton's interpreter, which must be switched on before Triton is imported.

    @interpreted
    def test_something(size): ...

The first of these tests runs the whole file in a subprocess with TRITON_INTERPRET=1; every test reports its result
from this run. To debug a test, run pytest on its file with TRITON_INTERPRET=1 and -k.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.entry import ROOT, environment

IS_ON = os.environ.get("TRITON_INTERPRET") == "1"


def interpreted(test: Callable) -> Callable:
    if IS_ON:
        return test

    @functools.wraps(test)  # pytest sees the parameters of `test`
    def report(*args, **kwargs) -> None:
        file, name = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)").split("::")
        failures, output = outcomes(file)
        if name not in failures:
            pytest.fail(f"did not run in the interpreter:\n{output[-3000:]}", pytrace=False)
        if failures[name] is not None:
            pytest.fail(failures[name], pytrace=False)

    return report


@functools.cache
def outcomes(file: str) -> tuple[dict[str, str | None], str]:
    """Return the failure text of each test (None if it passed) and the whole output."""
    env = {key: value for key, value in environment().items() if not key.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        process = subprocess.run(
            [*command, f"--junitxml={out}", str(ROOT / file)],
            cwd=ROOT, env={**env, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        cases = ElementTree.parse(out).getroot().iter("testcase") if out.exists() else ()
        return {case.get("name", ""): failure_of(case) for case in cases}, process.stdout + process.stderr


def patch_once(patch: Callable) -> Callable:
    """Triton patches its whole language again for each call of a function: a quarter of the time."""
    patched = set()

    def patch_lang(fn: Any) -> Any:
        module = fn.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            patch(fn)
            tensor.__index__ = lambda self: self.handle.data.item()  # Triton 3.6 does not support numpy 2.4 here
        return SimpleNamespace(restore=lambda: None)  # nothing in this process uses the language unpatched

    return patch_lang


def failure_of(case: ElementTree.Element) -> str | None:
    return next((child.text or child.get("message") for child in case if child.tag != "system-out"), None)


if IS_ON and importlib.util.find_spec("triton"):
    from triton.language import tensor
    from triton.runtime import interpreter

    interpreter._patch_lang = patch_once(interpreter._patch_lang)
