"""Time of startup by part, and the folders of compiled code."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

from trainer.__main__ import main
from trainer.metrics import startup as module
from trainer.metrics.startup import Startup, importing, keep_compiled_code

NAMES = {"TORCHINDUCTOR_CACHE_DIR": "graphs", "TRITON_CACHE_DIR": "kernels"}


@pytest.fixture
def environment(monkeypatch, tmp_path):
    for name in (*NAMES, "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what is set later
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "strop"


def test_compiled_code_is_kept_in_the_cache_folder(environment, monkeypatch):
    keep_compiled_code()
    assert {name: os.environ[name] for name in NAMES} == {name: str(environment / x) for name, x in NAMES.items()}
    assert all((environment / folder).is_dir() for folder in NAMES.values())
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    keep_compiled_code()
    assert os.environ["TRITON_CACHE_DIR"] == str(environment / "kernels"), "a folder that is set is not changed"


@pytest.mark.parametrize(("name", "value"), [("XDG_CACHE_HOME", "/proc/none"), ("TRITON_HOME", "/elsewhere")])
def test_other_folders_are_left_alone(environment, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    keep_compiled_code()
    assert "TRITON_CACHE_DIR" not in os.environ
    assert ("TORCHINDUCTOR_CACHE_DIR" in os.environ) == (name == "TRITON_HOME")


def test_objects_of_the_first_imports_are_exempt_from_collection(monkeypatch):
    calls = []
    names = ("disable", "freeze", "unfreeze", "enable")
    collector = {name: lambda name=name: calls.append(name) for name in names}
    monkeypatch.setattr(module, "gc", SimpleNamespace(isenabled=lambda: True, **collector))
    monkeypatch.setattr(module, "atexit", SimpleNamespace(register=lambda function: function()))
    monkeypatch.setitem(sys.modules, "torch", None)
    with importing():
        assert not calls, "torch is imported already"
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(SystemExit), importing():
        assert calls == ["disable"]
        raise SystemExit
    assert calls == [*names]


def test_compiling_is_a_part_of_its_own(monkeypatch):
    now, graphs = [module.STARTED], [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module, "graph_seconds", lambda: graphs[0])
    clock = Startup()
    clock.lap("weights")
    assert clock.end() == "", "runs from Python are not measured"
    clock.begin()
    now[0] += 3
    clock.lap("imports")
    now[0] += 10
    graphs[0] += 4
    clock._add_kernel(times=SimpleNamespace(total=1_500_000))
    clock.lap("weights")
    now[0] += 1
    clock.lap("imports")
    now[0] += 2
    text = "startup: 16.0 s to the end of the first step: imports 4.0, graphs 4.0, kernels 1.5, weights 4.5, first step"
    assert clock.end() == f"{text} 2.0"
    now[0] += 100
    clock.begin()
    now[0] += 6
    clock._add_kernel(times=SimpleNamespace(total=18_000_000))  # in three threads
    text = "startup: 6.0 s to the end of the first step: kernels 6.0"
    assert clock.end() == text, "no longer than the wall time"
    clock.begin()
    now[0] += 1
    assert clock.end() == "startup: 1.0 s to the end of the first step: first step 1.0", "a second run in this process"


def test_a_run_logs_the_parts(environment, tmp_path, monkeypatch, capsys):
    clock = itertools.count(1.0)  # every look at it takes a second
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(module, "graph_seconds", lambda: 0.0)
    monkeypatch.setattr(module.startup, "last", 0.0)  # not the first run of this process
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--method", "sft", "--model", "builtin:tiny", "--data", str(tmp_path / "rows.jsonl"), "--max-steps", "2"]
    assert main([*flags, "--output-dir", str(tmp_path / "run"), "--per-device-train-batch-size", "4"]) == 0
    text = "".join(capsys.readouterr())
    [line] = re.findall(r"startup: ([\d.]+) s to the end of the first step: (.*)", text)
    parts = dict(part.rsplit(" ", 1) for part in line[1].split(", "))
    assert set(parts) == {"imports", "weights", "rows", "run folder and engine", "first step"}
    assert float(line[0]) == sum(map(float, parts.values()))
