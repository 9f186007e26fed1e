"""README and docs cannot drift: links, paths, commands, flags, metrics, code and rows of data are checked."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
import subprocess
import tomllib
import typing
from pathlib import Path

import pytest
import tyro

from bench.__main__ import Settings as BenchSettings
from bench.runs import agents, smollm2
from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS
from data.formats.pairs import PAIR_FORMATS
from data.formats.registry import PROMPT_FORMATS, SFT_FORMATS
from data.rows.stepwise import STEP_FORMATS
from data.show import ShowConfig, load_tokenizer, read
from data.tasks import TASKS
from losses.policy import POLICY_LOSSES
from rollout.rewards.__main__ import CheckConfig
from rollout.rewards.functions import FACTORIES, FUNCTIONS
from rollout.serve import parse as parse_server
from strop_config import rows_of
from tests.data.conftest import make_tokenizer
from tests.entry import ROOT
from tests.test_slurm import reduced
from trainer.cli import flag_table, load_method, method_names, parse
from trainer.config.learning_rates import rates_of
from trainer.config.preference import PairLossType
from trainer.evaluate import EvaluateConfig
from trainer.generate import GenerateConfig
from trainer.metrics.metrics import describe
from trainer.plan import PlanConfig, planned_run
from trainer.push import PushConfig
from trainer.run.export import ExportConfig

DOCS = ROOT / "docs"
TEXTS = {
    path: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
}
README = TEXTS[ROOT / "README.md"]
FOLDERS = "kernels|losses|data|rollout|trainer|bench|tests|docs"
PLACEHOLDERS = ("run.yaml", "runs/NAME/config.yaml")  # a file of the reader's
TORCHRUN = {"--nproc-per-node", "--max-restarts", "--nnodes", "--shutdown-timeout"} | {
    f"--rdzv-{name}" for name in ("id", "backend", "endpoint")
}
# Flags of other programs: vLLM (for --vllm.extra-args), tests.structure, tests.record, bench, pip, torchrun.
OTHERS = {"--dry-run", "--kind", "--yaml", "--enable-auto-tool-choice", "--tool-call-parser", "--step", "--against",
          "--write", "--check", "--calibrate", "--turns", "--list", "--minutes", "--only",
          "--lora"} | TORCHRUN  # fmt: skip
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROWS = re.compile(r"^```json (.+)\n((?:.+\n)+?)```$", re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder_of(path: Path) -> Path:
    """Where the commands of a page are typed."""
    return DOCS / "examples" if path.name == "extending.md" else ROOT


def slug(heading: str) -> str:
    """The anchor that code hosts give a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def test_readme_is_short_and_the_index_names_every_page():
    assert len(README.splitlines()) <= 200
    named = re.findall(r"^\| \[([\w.]+)\]", TEXTS[DOCS / "README.md"], flags=re.MULTILINE)
    assert sorted([*named, "README.md"]) == sorted(
        path.name for path in DOCS.glob("*.*") if path.suffix in (".md", ".ipynb")
    )


def test_links_and_anchors_lead_somewhere():
    wrong = []
    for path, text in TEXTS.items():
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
            place = path if not target else (path.parent / target).resolve()
            if not place.exists():
                wrong.append(f"{name_of(path)}: {target}")
            elif anchor and anchor not in map(slug, re.findall(r"^#+ (.*)", place.read_text(), flags=re.MULTILINE)):
                wrong.append(f"{name_of(path)}: {target}#{anchor}")
    assert not wrong


def test_paths_and_metrics_exist():
    """Paths are written from the root, or from docs/ in the pages there."""
    wrong = []
    for path, text in TEXTS.items():
        for found in re.findall(rf"(?<![\w/~.-])(?:{FOLDERS})/[\w/*.-]*\w(?:/|\b)", text):
            is_file = re.search(r"\.(py|yaml|sh|md|svg|html)$", found)
            if is_file and not list(ROOT.glob(found.replace("NAME", "*"))):
                wrong.append(f"{name_of(path)}: {found}")
        areas = "reward|policy|loss|optim|rollout|time|perf|mem|data|eval|health"
        for found in re.findall(rf"`((?:{areas})/[a-z0-9_/]+)`", text):
            if describe(found) is None and not (ROOT / found).exists():
                wrong.append(f"{name_of(path)}: metric {found}")
    assert not wrong


def test_method_table_lists_the_methods_there_are():
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)) == method_names()


def test_lists_are_complete():
    """Losses, rewards and tasks that exist are named, and the learning rates are those of the code."""
    grpo, offline = TEXTS[DOCS / "grpo.md"], TEXTS[DOCS / "offline_methods.md"]
    rewards, data = TEXTS[DOCS / "rewards.md"], TEXTS[DOCS / "data.md"]
    for text, names in (
        (grpo, POLICY_LOSSES), (offline, typing.get_args(PairLossType)), (rewards, {**FUNCTIONS, **FACTORIES}),
        (data, TASKS),
    ):  # fmt: skip
        assert not [name for name in names if not re.search(rf"`{name}[`\[:]", text)]
    table = re.findall(r"^\| ([a-z_, ]+) \| (\S+e-\d) \| (\S+e-\d) \|", TEXTS[DOCS / "quickstart.md"], re.MULTILINE)
    found = {name: (float(full), float(lora)) for names, full, lora in table for name in names.split(", ")}
    assert found == {name: tuple(rates_of(load_method(name).Config)) for name in method_names()}


def test_quoted_messages_are_those_of_the_code():
    source = "".join(
        path.read_text() for folder in ("data", "rollout", "trainer") for path in ROOT.glob(f"{folder}/**/*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a message over several lines
    cells = re.findall(r"^\| ([^|]+) \|", TEXTS[DOCS / "troubleshooting.md"], flags=re.MULTILINE)
    quoted = [part for cell in cells for part in re.findall(r"`([^`]+ [^`]+)`", cell)]
    assert len(quoted) > 8
    pieces = [piece.strip(" :.") for part in quoted for piece in part.removeprefix("vllm: ").split("...")]
    assert not [piece for piece in pieces if piece.replace("900 s", "") not in source]


def test_tree_names_folders_that_exist():
    tree = README.split("## Where things are")[1].split("\n\n")[1]
    names = re.findall(r"(?<!\S)([\w.]+)/(?=[\s;,)]|$)", tree)
    assert {"kernels", "losses", "data", "rollout", "trainer", "methods", "bench", "tests", "docs"} <= set(names)
    above = [ROOT, *(ROOT / package for package in ("data", "rollout", "trainer"))]
    assert not [name for name in names if not any((folder / name).is_dir() for folder in above)]


# Commands and flags.


AFTER_TRAINING = {
    "trainer.generate": GenerateConfig,
    "trainer.evaluate": EvaluateConfig,
    "trainer.push": PushConfig,
}


def commands(text: str) -> list[tuple[int, str, list[str]]]:
    """(processes, module, arguments) of every `python -m` and torchrun command of a page."""
    found = []
    joined = re.sub(r"\\\n\s*", " ", text)
    pattern = r"(?:python(?: -P)?|torchrun([^\n`]*?)) -m ((?:trainer|data|rollout|bench|tests)[\w.]*)([^\n`#|]*)"
    for launcher, module, words in re.findall(pattern, joined):
        sizes = re.findall(r"--n(?:nodes|proc-per-node) (\d+)", launcher)
        found.append((max(1, *(int(sizes[0]) * int(n) for n in sizes[1:] or [1])) if sizes else 1, module, words))
    return [(processes, module, shlex.split(re.sub(r" \.\.\. &$", "", words))) for processes, module, words in found]


def check_command(module: str, words: list[str]) -> None:
    """Parse the command as its program would, up to what it would do."""
    parsers = {"data.show": ShowConfig, "rollout.rewards": CheckConfig,
               "bench.runs.agents": agents.Settings, **AFTER_TRAINING}  # fmt: skip
    words = [str(ROOT / "trainer/recipes/grpo_tiny.yaml") if word in PLACEHOLDERS else word for word in words]
    if module == "trainer" and words[:1] == ["--method"] and len(words) == 2:
        assert words[1] in {*method_names(), "raft"}, words  # tests/test_smoke.py runs them
    elif module == "trainer" and words and "--resume" not in words:
        words = [word for word in words if word not in ("--help", "--help-all", "--dry-run")]
        _, cfg, name = parse(words)
        assert cfg.run.method == name
    elif module == "trainer.plan" and words:
        with planned_run(words):
            pass
    elif module in parsers and words and words != ["--check"]:
        tyro.cli(parsers[module], args=words)
    elif module == "trainer.export":
        tyro.cli(ExportConfig, args=words)
    elif module == "rollout.serve" and words:
        parse_server(words)
    elif module == "tests.proof":
        proofs = importlib.import_module("tests.proof").PROOFS
        assert set(words) <= {*proofs, "NAME", "..."}, words
    else:
        assert importlib.util.find_spec(module), f"there is no module {module}"


def test_commands_parse(monkeypatch, capsys):
    wrong, seen = [], set()
    for path, text in TEXTS.items():
        monkeypatch.chdir(folder_of(path))
        for processes, module, words in commands(text):
            if (key := (processes, module, *words)) in seen:
                continue
            seen.add(key)
            monkeypatch.setenv("WORLD_SIZE", str(processes))
            try:
                check_command(module, words)
            except (ValueError, AssertionError, SystemExit) as error:
                wrong.append(f"{name_of(path)}: python -m {module} {shlex.join(words)}: {error!r}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 40


def test_flags_named_in_text_exist(monkeypatch):
    monkeypatch.chdir(DOCS / "examples")
    known = {flag.name for name in [*method_names(), "raft"] for flag in flag_table(load_method(name).Config).values()}
    known |= {name.replace("--", "--no-", 1) for name in known}  # what switches a flag off
    known |= {"--config", "--help", "--help-all"} | OTHERS
    blocks = (PlanConfig, ShowConfig, CheckConfig, BenchSettings, agents.Settings, *AFTER_TRAINING.values())
    others = [field.name for block in blocks for field in dataclasses.fields(block)]
    known |= {"--" + name.replace("_", "-") for name in (*others, *inspect.signature(smollm2.run).parameters)}
    wrong = []
    for path, text in TEXTS.items():
        plain = re.sub(r"--\w+\.\*|(?<=\]\()[^)]*", "", text)  # --format.* is a block
        wrong += [f"{name_of(path)}: {flag}" for flag in re.findall(r"(?<!\S)`?(--[a-z][a-z0-9.-]*[a-z0-9])", plain)
                  if flag not in known]  # fmt: skip
    assert not wrong


def test_make_targets_extras_and_tests_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path, text in TEXTS.items():
        assert set(re.findall(r"(?:`|    )make ([a-z-]+)", text)) <= targets, path
        assert set(re.findall(r"'\.\[(\w+)\]'", text)) <= extras.keys(), path


def test_python_code_is_valid_and_its_imports_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    for path, text in TEXTS.items():
        for code in PYTHON.findall(text):
            for node in ast.walk(ast.parse(code, name_of(path))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), (path, node.module)


def test_the_reward_of_the_pages_reads_messages_and_plain_text():
    for page in (ROOT / "README.md", DOCS / "rewards.md"):
        (code,) = (code for code in PYTHON.findall(TEXTS[page]) if "def correct" in code)
        names: dict = {}
        exec(code, names)
        completions = [[{"role": "assistant", "content": " 42\n"}], "42 ", "32"]
        assert names["correct"](completions, answer=["42"] * 3, task=["a"] * 3) == [1.0, 1.0, 0.0], page


def test_yaml_of_the_pages_parses(tmp_path):
    found = [
        code for text in TEXTS.values() for code in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    assert found
    for code in found:
        (tmp_path / "run.yaml").write_text(code)
        parse(["--config", str(tmp_path / "run.yaml")])


def test_the_slurm_job_is_bash_with_flags_that_exist():
    script = DOCS / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", " ")
    reduced(script.read_text())  # has every line that tests/test_slurm.py replaces
    (serve,) = re.findall(r"-m rollout\.serve (--[^\n']*)", text)
    words = ["--model", "M", *serve.replace('"$SLURMD_NODENAME"', "node").split()]
    words.remove("--config"), words.remove("run.yaml")
    cfg = parse_server(words)
    assert cfg.vllm.replicas == len(cfg.vllm.devices) == 4
    (train,) = re.findall(r"-m trainer (.*)", text)
    grpo = {flag.name for flag in flag_table(load_method("grpo").Config).values()}
    assert set(re.findall(r"--[a-z.-]+", train)) <= grpo


# Rows of data: ```json METHOD[:FORMAT[,option=value]] ...


@pytest.fixture(scope="module")
def tokenizers():
    return {"llama3": make_tokenizer("llama3"), "builtin:tiny": load_tokenizer("model", "builtin:tiny")}


def load(target: str, file: Path, tokenizers) -> int:
    """Rows that the loader of this method makes of the file."""
    method, _, options = target.partition(":")
    tokenizer = tokenizers["llama3" if options.startswith("llama3") else "builtin:tiny"]
    if method == "nemo_gym":
        from data.rows.nemo_gym import load_nemo_gym

        return len(load_nemo_gym([str(file)], tokenizer))
    kind = "documents" if method == "ebft-strided" else rows_of(method)
    spec = f"{file}:format={options}" if options else str(file)
    return len(read(ShowConfig(data=(spec,), kind=kind), tokenizer))


def test_rows_of_data_are_read_by_the_loaders(tmp_path, tokenizers):
    wrong, shown = [], {path: set() for path in TEXTS}
    for path, text in TEXTS.items():
        for number, (targets, rows) in enumerate(ROWS.findall(text)):
            file = tmp_path / f"{path.stem}-{number}.jsonl"
            file.write_text(rows)
            for target in targets.split():
                method, _, options = target.partition(":")
                shown[path].add((method, options.partition(",")[0]))
                try:
                    assert load(target, file, tokenizers) >= len(rows.splitlines()), "rows were left out"
                except (ValueError, AssertionError) as error:
                    wrong.append(f"{name_of(path)}: {target}: {error}")
    assert not wrong, "\n".join(wrong)
    assert {method for method, _ in shown[ROOT / "README.md"]} == set(method_names())
    registries = {"grpo": PROMPT_FORMATS, "sft": SFT_FORMATS, "dpo": PAIR_FORMATS, "prm": STEP_FORMATS}
    registries |= {"ebft": {**EBFT_FORMATS, "auto": None}, "ebft-strided": EBFT_STRIDED_FORMATS}
    missing = [f"{method}:{name}" for method, formats in registries.items() for name in formats
               if (method, name) not in shown[DOCS / "data.md"]]  # fmt: skip
    assert not missing, "formats without a row in docs/data.md"
