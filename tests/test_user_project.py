"""Test strop in a user's project whose packages have the same names as strop's."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import strop_names
from tests import structure
from tests.entry import ROOT, environment

PROJECT = {
    "data/__init__.py": "from .x import double\n",
    "data/x.py": "from data.loader import FACTOR\n\n\ndef double(v):\n    return FACTOR * v\n",
    "data/loader.py": "FACTOR = 2\n",  # strop also has a loader.py
    "losses/__init__.py": "HALF = 0.5\n",
    "rollout/__init__.py": "",
    "rollout/types.py": "def third():\n    return 3\n",
    "trainer.py": "MINE = 7\n",
    "helper.py": "import data.loader\n\nFOUR = 2 * data.loader.FACTOR\n",
    "rows.jsonl": json.dumps({"prompt": "1+1=", "completion": "2", "answer": "2"}) + "\n",
    "mine.py": """
import data.x
import data.loader as own
import helper
import losses
import trainer
from data import double
from rollout.rewards.functions import FUNCTIONS  # missing in the user's rollout, so strop's


def score(completions, **columns):
    from rollout.types import third  # at the time of the call

    assert "exact_match" in FUNCTIONS
    parts = [data.x.double(1), own.FACTOR, double(1), losses.HALF, trainer.MINE, third(), helper.FOUR]
    return [sum(parts)] * len(completions)
""",
}
TOTAL = 2 + 2 + 2 + 0.5 + 7 + 3 + 4
ENTRIES = ("trainer", "trainer --method grpo", "data.show", "data.reasoning_gym", "rollout.rewards", "rollout.serve",
           "trainer.plan", "trainer.export", "trainer.report", "trainer.generate", "trainer.evaluate", "trainer.push",
           "trainer.from_trl", "trainer.translate", "trainer.tiny.build", "bench.table")  # fmt: skip
# Started only by strop.
CHILDREN = {
    "rollout.gyms.launcher", "rollout.rewards.code_child",
    "rollout.servers.worker.strop_guard", "rollout.servers.worker.strop_probe",
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return the Python of an environment after `pip install -e .`: strop's folder last, plus the strop_build line."""
    build = pytest.importorskip("strop_build", reason="setuptools is not installed")
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "__editable__.strop.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    (site / build.START).write_bytes(build.LINE)
    return folder / "bin" / "python"


def python(*argv: str, cwd: Path, executable: Path | str = sys.executable) -> subprocess.CompletedProcess:
    env = environment() | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    if executable != sys.executable:
        del env["PYTHONPATH"]
    return subprocess.run([executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_every_command_starts_in_the_project(project, installed):
    """Run --help of every command: one per folder as a process, the others in one process."""
    note = (
        f"python -m trainer: runs {ROOT / 'trainer'}, not {project / 'trainer.py'}; to run yours, rename it or use an "
        "environment without strop\n"
    )
    for entry in ("trainer", "data.show", "rollout.serve", "bench.table"):
        done = python("-m", entry, "--help", cwd=project, executable=installed)
        assert done.returncode == 0 and done.stderr == (note if entry == "trainer" else ""), done.stderr
        assert done.stdout.startswith("usage: "), done.stdout
    code = (
        "import runpy, sys\nsys.path.remove('')\n"
        f"for entry in {ENTRIES}:\n"
        "    sys.argv = [*entry.split(), '--help']\n"
        "    try:\n        runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "        stop = SystemExit(0)\n    except SystemExit as stopped:\n        stop = stopped\n"
        "    print(entry, 'ends with', stop.code)\n"
    )
    done = python("-c", code, cwd=project)
    assert [f"{entry} ends with 0" in done.stdout for entry in ENTRIES] == [True] * len(ENTRIES), done.stderr


def test_the_list_of_commands_is_complete():
    names = [name for name in structure.sources() if '__name__ == "__main__"' in (ROOT / name).read_text()]
    modules = {name.removesuffix(".py").removesuffix("/__main__").replace("/", ".") for name in names}
    typed = {entry.split()[0] for entry in ENTRIES}
    assert {name for name in modules - CHILDREN if not name.startswith("bench")} == typed - {"bench.table"}


def test_every_package_with_a_command_claims_its_names():
    ours = [path for package in strop_names.NAMES for path in (ROOT / package).rglob("*.py")]
    packages = {p.relative_to(ROOT).parts[0] for p in ours if '__name__ == "__main__"' in p.read_text()}
    assert packages == {"bench", "data", "rollout", "trainer"}
    assert all("strop_names.take()" in (ROOT / package / "__init__.py").read_text() for package in packages)


def test_an_install_does_not_affect_other_programs(project, installed, tmp_path):
    (project / "data" / "show.py").write_text("print('by path')\n")
    (project / "data" / "pairs.py").write_text("print('not an entry of ours')\n")
    for argv, output in {
        ("-c", "import data, sys; print(data.__file__, 'strop_names' in sys.modules)"):
            f"{project / 'data' / '__init__.py'} False",
        ("data/show.py", "-m", "trainer"): "by path",
        ("-m", "data.pairs"): "not an entry of ours",
    }.items():  # fmt: skip
        done = python(*argv, cwd=project, executable=installed)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{output}\n", "")
    (project / "data" / "show.py").unlink()
    clone = tmp_path / "clone"  # the working directory wins
    (clone / "trainer").mkdir(parents=True)
    (clone / "strop_names.py").write_text("def take(): ...\n")
    (clone / "trainer" / "__init__.py").touch()
    (clone / "trainer" / "__main__.py").write_text("print('of the clone')\n")
    assert python("-m", "trainer", cwd=clone, executable=installed).stdout == "of the clone\n"


def test_an_editable_install_has_the_line(tmp_path):
    build = pytest.importorskip("strop_build", reason="setuptools is not installed")
    code = f"import strop_build; print(strop_build.build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        assert wheel.read(build.START) == build.LINE and wheel.testzip() is None
        record = next(name for name in wheel.namelist() if name.endswith("RECORD"))
        listed = [line.partition(",")[0] for line in wheel.read(record).decode().splitlines()]
        assert sorted(listed) == sorted(wheel.namelist())
        assert f"{ROOT}\n" in [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".pth")]


def test_a_reward_imports_the_users_modules_and_otherwise_strops(project):
    done = python("-P", "-m", "rollout.rewards", "--check", "mine.py:score", "--data", "rows.jsonl", cwd=project)
    assert done.returncode == 0 and f"score: mean {TOTAL:g}" in done.stdout, done.stderr


def test_a_reward_file_is_found_with_its_packages_from_elsewhere(project, tmp_path):
    spec, rows = f"{project / 'mine.py'}:score", str(project / "rows.jsonl")
    (project / "mine.py").write_text(PROJECT["mine.py"].replace("import helper\n", "").replace(", helper.FOUR", ", 4"))
    done = python("-P", "-m", "rollout.rewards", "--check", spec, "--data", rows, cwd=tmp_path)
    (project / "mine.py").write_text(PROJECT["mine.py"])
    assert done.returncode == 0 and f"score: mean {TOTAL:g}" in done.stdout, done.stderr


def test_training_in_the_project(project, tmp_path):
    argv = ["--method", "grpo", "--max-steps", "1", "--reward-funcs", "mine.score", "--reward-num-workers", "1",
            "--model", "builtin:tiny", "--data", "rows.jsonl", "--per-device-train-batch-size", "4",
            "--num-generations", "4", "--max-completion-length", "4"]  # fmt: skip
    argv += ["--output-dir", str(tmp_path / "run")]
    done = python("-P", "-m", "trainer", *argv, cwd=project)
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1 and last["reward/score/mean"] == TOTAL


def test_a_dynamic_import_of_a_shared_name_is_an_error(project):
    (project / "by_name.py").write_text("import importlib\nimportlib.import_module('data.x')\n\ndef score(): ...\n")
    done = python("-P", "-m", "rollout.rewards", "--check", "by_name.score", "--data", "rows.jsonl", cwd=project)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for part in (
        "reward_funcs=by_name.score",
        str(ROOT / "data"),
        str(project / "data" / "x.py"),
        "rename the package",
    ):
        assert part in done.stderr, done.stderr


def test_a_package_imported_before_strops_is_an_error(project):
    code = "import data, sys\nsys.path.remove('')\nimport trainer.cli"  # like a script that trains from Python
    done = python("-c", code, cwd=project)
    last = done.stderr.splitlines()[-1]
    assert str(project / "data") in last and str(ROOT / "data") in last and "rename your package" in last, done.stderr


def test_strops_modules_stay_after_the_users_folder_was_searched(project):
    code = (
        "import sys; sys.path.remove(''); from data.user_code import import_beside; mine = import_beside('mine')\n"
        "import losses, kernels, trainer.cli, data.loader\n"
        f"assert all(m.__file__.startswith({str(ROOT)!r}) for m in (losses, kernels, trainer.cli, data.loader))\n"
        f"assert mine.losses.__file__ == {str(project / 'losses' / '__init__.py')!r}\n"
        "assert mine.data.x.double.__globals__['FACTOR'] == 2 and import_beside('helper') is mine.helper\n"
        "assert import_beside('data.x') is mine.data.x and import_beside('data.rows.sft').__name__ == 'data.rows.sft'"
    )
    done = python("-c", code, cwd=project)
    assert done.returncode == 0, done.stderr


def test_without_a_shared_name_imports_are_unchanged(tmp_path):
    (tmp_path / "data").mkdir()  # a folder without modules
    (tmp_path / "data" / "rows.jsonl").write_text("")
    (tmp_path / "plain.py").write_text("PLAIN = __builtins__['__import__']\n")
    code = (
        "import builtins, sys; sys.path.remove(''); from data.user_code import import_beside\n"
        "assert import_beside('plain').PLAIN is builtins.__import__"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
