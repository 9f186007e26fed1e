"""The type checker passes on the files that pyproject.toml lists: no function of theirs takes an untyped config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("trainer", "rollout", "data", "losses", "kernels", "bench")


def test_mypy():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout


def test_no_config_is_untyped():
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in files if "cfg: Any" in path.read_text(encoding="utf-8")]
