"""Test that the notebooks run from top to bottom, as in Jupyter."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.entry import ROOT, run_python
from trainer.metrics.metrics import JsonlLog
from trainer.notebook import curves

QUICKSTART = ROOT / "docs" / "quickstart.ipynb"
OTHERS = ROOT / "docs" / "notebooks"
# Cells run in __main__, and Jupyter shows the last expression of a cell.
RUN_CELLS = """
import ast as _ast, json as _json
for _cell in _json.load(open({notebook!r}))["cells"]:
    if _cell["cell_type"] != "code":
        continue
    _tree = _ast.parse("".join(_cell["source"]))
    _last = _tree.body.pop() if isinstance(_tree.body[-1], _ast.Expr) else None
    exec(compile(_tree, _cell["id"], "exec"), globals())
    if _last is not None:
        _shown = eval(compile(_ast.Expression(_last.value), _cell["id"], "eval"), globals())
        print("SHOWN", _cell["id"], _shown._repr_svg_() if hasattr(_shown, "_repr_svg_") else repr(_shown))
"""


def run_cells(notebook: Path, folder: Path, shorter: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return what the cells print, and what Jupyter would show for each cell, by name."""
    text = notebook.read_text()
    for long, short in shorter.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    (folder / "notebook.ipynb").write_text(text)
    script = folder / "cells.py"
    script.write_text(RUN_CELLS.format(notebook=str(folder / "notebook.ipynb")))
    done = run_python(str(script), cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    shown = dict(re.findall(r"SHOWN (\S+) (.*)", done.stdout))
    assert all(text.count("<polyline") >= 2 for text in shown.values() if text.startswith("<svg"))
    return done.stdout, shown


def test_every_cell_of_the_quickstart_runs(tmp_path):
    shorter = {  # which learn nothing
        r"\"--max-steps\", \"60\", \"--eval-steps\", \"20\"": r"\"--max-steps\", \"2\", \"--max-eval-rows\", \"8\"",
        "max_steps=20,": "max_steps=2,",
        "per_device_train_batch_size=128": "per_device_train_batch_size=16",
    }
    printed, shown = run_cells(QUICKSTART, tmp_path, shorter)
    assert not {"0", "None"} & set(shown.values())  # exit codes of commands
    assert "held-out reward (greedy): " in printed and re.search(r"'\d{1,8}'", " ".join(shown.values()))
    assert (tmp_path / "runs" / "own-reward" / "final" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_quickstart_learns_and_answers(tmp_path):
    printed, shown = run_cells(QUICKSTART, tmp_path, {})
    after = float(re.search(r"held-out reward \(greedy\): [\d.]+ before, ([\d.]+) after", printed)[1])
    assert after > 0.9
    assert "'62'" in shown.values()  # 38+24, with its carry


def test_pairs_from_python_are_trained(tmp_path):
    shorter = {
        "max_steps=20": "max_steps=2",
        "eval_steps=5": "eval_steps=2",
        "range(10, 90) if a": "range(10, 20) if a",
    }
    printed, shown = run_cells(OTHERS / "dpo.ipynb", tmp_path, shorter)
    assert "of 20 are right" in printed and shown["curves"].startswith("<svg") and "my_model" in shown["save"]


@pytest.mark.slow
def test_the_other_notebooks_learn_what_they_show(tmp_path):
    for name in ("dpo", "reward", "method"):
        (tmp_path / name).mkdir()
    printed, _ = run_cells(OTHERS / "dpo.ipynb", tmp_path / "dpo", {})
    assert int(re.search(r"(\d+) of 20 are right", printed)[1]) >= 18
    printed, shown = run_cells(OTHERS / "reward.ipynb", tmp_path / "reward", {})
    assert (shown["first"], shown["second"], shown["ask"]) == ("[0.0]", "[1.0, 0.0]", "['62', '38']")
    assert "reward_funcs=python:__main__.close" in printed and "more than 95%" in printed
    _, shown = run_cells(OTHERS / "method.ipynb", tmp_path / "method", {})
    assert shown["ask"] == "['62', '38']"


@pytest.mark.parametrize("path", [QUICKSTART, *OTHERS.glob("*.ipynb")], ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_its_names_exist(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    text = "".join(line for cell in notebook["cells"] for line in cell["source"])
    for page in re.findall(r"\]\(([\w./]+\.(?:md|ipynb))\)", text):
        assert (path.parent / page).is_file(), page
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needs = {need for name in re.findall(r"'\.\[(\w+)\]'", text) for need in extras[name]}
    assert needs == ({"jupyterlab>=4"} if path == QUICKSTART else set())


def test_names_of_metrics_are_escaped(tmp_path):
    name = "reward/regex:<b>a&b</b>/mean"
    (tmp_path / "config.yaml").write_text("method: grpo\n")
    log = JsonlLog(tmp_path / "metrics.jsonl")
    for step in range(3):
        log.write(step, {name: 0.1 * step})
    drawn = ElementTree.fromstring(curves(tmp_path, name)._repr_svg_())
    assert f"{name}: 0.2" in [part.text for part in drawn.iter() if part.text]
