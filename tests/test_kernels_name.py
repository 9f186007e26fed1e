"""Test that strop's `kernels` coexists with Hugging Face's package `kernels`, which is optional."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Modules of Hugging Face's kernels 0.17.2, which a file of the same name would hide.
TAKEN = {
    "archs", "backends", "benchmark", "benchmarks", "cli", "compat", "deps", "hf_hub", "importer", "install", "layer",
    "load", "locking", "python_deps", "resolver", "status", "utils", "validate", "variants", "verify", "_rust",
    "_system", "_versions", "_windows",
}  # fmt: skip

# Supports what transformers does with the imported names: combine, call, decorate with use_kernel_*.
STAND_IN = """
class Anything:
    def __getattr__(self, name):
        return Anything()
    def __call__(self, *args, **kwargs):
        return Anything()
    def __or__(self, other):
        return self
    def __hash__(self):
        return 1
    def __eq__(self, other):
        return True

def decorator(*args, **kwargs):
    return lambda target: target

"""

MODEL = """
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

config = Qwen3Config(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                     vocab_size=50, intermediate_size=64)
logits = AutoModelForCausalLM.from_config(config)(torch.tensor([[1, 2, 3]])).logits
assert logits.shape == (1, 3, 50)
"""

STROP = f"""
import kernels, kernels.attention
assert kernels.__file__ == {str(ROOT / "kernels" / "__init__.py")!r}, kernels.__file__
assert kernels.attention.__file__ == {str(ROOT / "kernels" / "attention.py")!r}
"""

HUGGING_FACE = """
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available()
import kernels.layer, sys
from kernels import get_kernel, LayerRepository
assert get_kernel is kernels.layer.get_kernel
assert LayerRepository is sys.modules["transformers.integrations.hub_kernels"].LayerRepository
"""


@pytest.fixture(scope="session")
def neighbour(tmp_path_factory) -> Path:
    """Return a fake site-packages with Hugging Face's package and the names transformers imports."""
    import transformers
    from transformers.utils import import_utils

    site = tmp_path_factory.mktemp("site")
    version = import_utils.KERNELS_MIN_VERSION
    source = (Path(transformers.__file__).parent / "integrations" / "hub_kernels.py").read_text(encoding="utf-8")
    blocks = re.findall(r"^    from kernels import (?:\(([^)]*)\)|([^\n(]+))", source, re.MULTILINE)
    names = {part.split()[0] for block in blocks for part in "".join(block).split(",") if part.strip()}
    assert "LayerRepository" in names, "transformers no longer imports these names from kernels: look again"
    (site / "kernels").mkdir()
    names |= {"get_kernel"}
    made = [f"{name} = {'decorator' if name.startswith('use_kernel') else 'Anything()'}\n" for name in sorted(names)]
    (site / "kernels" / "layer.py").write_text(STAND_IN + "".join(made))
    (site / "kernels" / "__init__.py").write_text(f"from kernels.layer import {', '.join(sorted(names))}\n")
    info = site / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return site


def python(code: str, *path: Path, cwd: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_neighbour_alone_is_what_transformers_expects(neighbour, tmp_path):
    python(MODEL + HUGGING_FACE, neighbour, cwd=tmp_path)


def test_clone_comes_first(neighbour, tmp_path):
    """The other tests show that models load without it."""
    python("import trainer\n" + MODEL + STROP + HUGGING_FACE, ROOT, neighbour, cwd=tmp_path)


@pytest.mark.slow
def test_editable_install_comes_last(neighbour, tmp_path):
    (tmp_path / "data").mkdir()  # a user's folder in the working directory
    code = "import trainer, data.types\n" + MODEL + STROP + HUGGING_FACE
    python(code, neighbour, ROOT, cwd=tmp_path)


@pytest.mark.slow
def test_neighbour_imported_before_the_trainer(neighbour, tmp_path):
    code = f"""
import sys, transformers.activations
assert sys.modules["kernels"].__file__ == {str(neighbour / "kernels" / "__init__.py")!r}
import trainer
"""
    python(code + MODEL + STROP + HUGGING_FACE, neighbour, ROOT, cwd=tmp_path)


UNKNOWN = """
import sys, kernels
assert not {"torch", "triton", "transformers"} & set(sys.modules), "importing kernels imports something heavy"
for name in ("no_such_name", "__no_such_name__"):
    try:
        getattr(kernels, name)
    except AttributeError as error:
        assert name in str(error)
    else:
        raise AssertionError(name)
"""


def test_importing_kernels_is_light_and_an_unknown_name_is_still_an_error(neighbour, tmp_path):
    python(UNKNOWN, ROOT, cwd=tmp_path)
    python(UNKNOWN, ROOT, neighbour, cwd=tmp_path)


def test_no_file_hides_one_of_hugging_face():
    ours = {path.stem for path in (ROOT / "kernels").iterdir()} - {"__init__", "__pycache__"}
    assert not ours & TAKEN


def test_no_distribution_of_strop_owns_the_name():
    """transformers checks the version of the distribution that has a top-level `kernels`."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "trainer" in setuptools["packages"] and "kernels" not in setuptools["packages"]
    assert "strop" not in importlib.metadata.packages_distributions().get("kernels", [])


@pytest.mark.slow
def test_demo_starts_with_the_other_package_installed(neighbour, tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{neighbour}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", "--method", "grpo", "--max-steps", "1", "--max-eval-rows", "8",
               "--output-dir", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["step"] == 1
