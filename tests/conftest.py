"""What every test may use: outside assets, and skips for machines without a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def assets() -> Path:
    """The folder with models and data from outside the repository."""
    folder = os.environ.get("STROP_ASSETS")
    if not folder:
        pytest.skip("STROP_ASSETS is unset: it names a folder with models and data from outside the repository")
    if not Path(folder).is_dir():
        pytest.skip(f"STROP_ASSETS={folder}: no such folder")
    return Path(folder).resolve()


@pytest.fixture
def asset(assets: Path):
    """asset("data/gsm8k/train.jsonl") is that path under STROP_ASSETS, or a skip that names it."""

    def find(relative: str) -> Path:
        path = assets / relative
        if not path.exists():
            pytest.skip(f"{relative} is not in STROP_ASSETS")
        return path

    return find


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job; tests of Ctrl-C inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_gpu() -> bool:
    import torch  # only when a gpu test is collected: the structure tests stay torch-free

    return torch.cuda.is_available()
