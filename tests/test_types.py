"""No function takes an untyped config. `make types` runs the type checker, in CI too."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("trainer", "rollout", "data", "losses", "kernels", "bench")


def test_no_config_is_untyped():
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in files if "cfg: Any" in path.read_text(encoding="utf-8")]
