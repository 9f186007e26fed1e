"""Composes losses, rollout, kernels and data into training runs.

The folders of this repository have plain names (`data`, `kernels`). Run from a clone they come first on sys.path; run
through an editable install from somewhere else they would come last, after a `data` folder of the user or Hugging
Face's `kernels` package. So the repository root is put first, and a foreign `kernels` that was imported earlier in this
process makes way for ours, which hands its names on (see kernels/__init__.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if sys.path[0] != str(ROOT):
    sys.path.insert(0, str(ROOT))

_loaded = sys.modules.get("kernels")
if _loaded is not None and Path(str(_loaded.__file__)).resolve().parent != ROOT / "kernels":
    del sys.modules["kernels"]  # what others took from it stays valid; its submodules stay loaded
