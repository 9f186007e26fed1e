"""Builds what `pip install -e .` installs: setuptools' editable wheel and one line that Python runs when it starts.

The line (see take_entry in strop_names.py) makes `python -m trainer` ours in a folder that has a trainer.py.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 the hooks that stay as they are

START = "strop_start.pth"  # read after setuptools' own, __editable__..., which names the folder
TRY = "try: import strop_names as s; s.take_entry()\nexcept Exception: s = None"  # the clone may be gone or broken
LINE = f"import sys; sys.argv[:1] == ['-m'] and exec({TRY!r})\n".encode()


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory) / name
    with zipfile.ZipFile(path) as wheel:
        files = {item: wheel.read(item) for item in wheel.namelist()}
    record = next(item for item in files if item.endswith(".dist-info/RECORD"))
    digest = base64.urlsafe_b64encode(hashlib.sha256(LINE).digest()).decode().rstrip("=")
    files[record] += f"{START},sha256={digest},{len(LINE)}\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for item, content in {START: LINE, **files}.items():
            wheel.writestr(item, content)
    return name
