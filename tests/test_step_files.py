"""Files that one GRPO step runs (python -m tests.structure --step), and those that docs/extending.md lists."""

from __future__ import annotations

import re

from tests.entry import ROOT, run_python
from tests.structure import MOST_IN_A_STEP


def test_a_step_runs_few_files():
    # Without a GPU, which would run other kernels.
    done = run_python("-m", "tests.structure", "--step", cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout.partition("Files that one GRPO step runs")[2]
    files = re.findall(r"^ +(\w+/\S+\.py) +\d", table, flags=re.MULTILINE)
    assert {"trainer/methods/grpo.py", "rollout/engines/local.py", "losses/policy.py"} <= set(files)
    assert len(files) <= MOST_IN_A_STEP, table
    page = (ROOT / "docs" / "extending.md").read_text()
    listed = re.findall(
        r"^\| \d+ \| \[([\w/.]+)\]", page, flags=re.MULTILINE
    )  # the first link of each row: the local engine
    assert len(listed) == 13
    assert set(listed) - set(files) == {"data/rows/prompts.py"}  # runs before the first step
