"""Test that docs/quickstart.ipynb runs from top to bottom, as in Jupyter."""

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

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
# Jupyter shows the last expression of a cell.
RUN_CELLS = """
import ast, json, sys
space = {{}}
for cell in json.load(open({notebook!r}))["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell["id"], "exec"), space)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), cell["id"], "eval"), space)
        print("SHOWN", cell["id"], shown._repr_svg_() if hasattr(shown, "_repr_svg_") else repr(shown))
"""


# Shorter runs, which learn nothing.
SHORTER = {
    r"\"--max-steps\", \"60\", \"--eval-steps\", \"20\"": r"\"--max-steps\", \"2\", \"--max-eval-rows\", \"8\"",
    "max_steps=20,": "max_steps=2,",
    "per_device_train_batch_size=128": "per_device_train_batch_size=16",
}


def run_cells(notebook: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """Return what the cells print, and what Jupyter would show for each cell, by name."""
    script = folder / "cells.py"
    script.write_text(RUN_CELLS.format(notebook=str(notebook)))
    done = run_python(str(script), cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    shown = dict(re.findall(r"SHOWN (\S+) (.*)", done.stdout))
    drawn = [text for text in shown.values() if text.startswith("<svg")]
    assert [text.count("<polyline") >= 2 for text in drawn] == [True, True]
    assert (folder / "runs" / "own-reward" / "final" / "model.safetensors").is_file()
    return done.stdout, shown


def test_every_cell_runs(tmp_path):
    text = NOTEBOOK.read_text()
    for long, short in SHORTER.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    (tmp_path / "short.ipynb").write_text(text)
    printed, shown = run_cells(tmp_path / "short.ipynb", tmp_path)
    assert not {"0", "None"} & set(shown.values())  # exit codes of commands
    assert "held-out reward (greedy): " in printed and re.search(r"'\d{1,8}'", " ".join(shown.values()))


@pytest.mark.slow
def test_the_model_learns_and_answers(tmp_path):
    printed, shown = run_cells(NOTEBOOK, tmp_path)
    after = float(re.search(r"held-out reward \(greedy\): [\d.]+ before, ([\d.]+) after", printed)[1])
    assert after > 0.9
    assert "'62'" in shown.values()  # 38+24, with its carry


def test_the_notebook_is_valid_and_its_names_exist():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    text = "".join(line for cell in notebook["cells"] for line in cell["source"])
    for page in re.findall(r"\]\((\w+\.md)\)", text):
        assert (NOTEBOOK.parent / page).is_file(), page
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"jupyterlab>=4"} == {need for name in re.findall(r"'\.\[(\w+)\]'", text) for need in extras[name]}


def test_names_of_metrics_are_escaped(tmp_path):
    name = "reward/regex:<b>a&b</b>/mean"
    (tmp_path / "config.yaml").write_text("method: grpo\n")
    log = JsonlLog(tmp_path / "metrics.jsonl")
    for step in range(3):
        log.write(step, {name: 0.1 * step})
    drawn = ElementTree.fromstring(curves(tmp_path, name)._repr_svg_())
    assert f"{name}: 0.2" in [part.text for part in drawn.iter() if part.text]
