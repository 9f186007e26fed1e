"""README and docs cannot drift: links, method table, tree, commands and flags are checked against the repository."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess

import pytest

from data.show import ShowConfig
from rollout.serve import parse as parse_server
from tests.entry import ROOT
from trainer.cli import flag_table, load_method, method_names, parse
from trainer.plan import PlanConfig

TEXT = (ROOT / "README.md").read_text()
PAGES = {"README.md": ROOT, "docs/extending.md": ROOT / "docs" / "examples"}  # page -> where its commands are typed
RENDEZVOUS = ("--rdzv-id", "--rdzv-backend", "--rdzv-endpoint")


def text_of(page: str) -> str:
    return (ROOT / page).read_text().replace("\\\n", " ")


COMMAND = r"python -m trainer (--[^\n#`]*)"
COMMANDS = [(page, command) for page in PAGES for command in re.findall(COMMAND, text_of(page))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", text_of(page))
    assert links
    assert not [link for link in links if not ((ROOT / page).parent / link).exists()]


def test_method_table_lists_the_methods_there_are():
    assert sorted(re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.MULTILINE)) == method_names()


def test_tree_names_folders_that_exist():
    tree = TEXT.split("## Where things are")[1].split("\n\n")[1]
    names = re.findall(r"(?<!\S)([\w.]+)/(?=[\s;,]|$)", tree)
    assert {"kernels", "losses", "data", "rollout", "trainer", "methods", "bench", "tests", "docs"} <= set(names)
    above = [ROOT, *(ROOT / package for package in ("data", "rollout", "trainer"))]
    assert not [name for name in names if not any((folder / name).is_dir() for folder in above)]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_parse(page, command, monkeypatch):
    monkeypatch.chdir(PAGES[page])
    words = shlex.split(command)
    if "--help" in words:
        words.remove("--help")
    _, cfg, name = parse(words)
    assert cfg.run.method == name and (name in method_names() or page != "README.md")


@pytest.mark.parametrize("page", PAGES)
def test_flags_named_in_text_exist(page, monkeypatch):
    monkeypatch.chdir(PAGES[page])
    methods = [*method_names(), *(["raft"] if page == "docs/extending.md" else [])]
    known = {flag.name for name in methods for flag in flag_table(load_method(name).Config).values()}
    known |= {name.replace("--", "--no-", 1) for name in known}  # what switches a flag off
    known |= {"--config", "--help", "--check", "--step"}  # --step: of tests.structure
    others = [field.name for block in (PlanConfig, ShowConfig) for field in dataclasses.fields(block)]
    known |= {"--" + name.replace("_", "-") for name in others}
    known |= {"--enable-auto-tool-choice", "--tool-call-parser"}  # vLLM's own, for --vllm.extra-args
    known |= {"--nproc-per-node", "--max-restarts", "--nnodes", "--shutdown-timeout", *RENDEZVOUS}  # of torchrun
    text = re.sub(r"--\w+\.\*", "", text_of(page))  # --format.* is a block
    mentioned = set(re.findall(r"(--[a-z][a-z0-9.-]+)", text))
    assert not mentioned - known, sorted(mentioned - known)


def test_the_slurm_job_is_bash_with_flags_that_exist():
    script = ROOT / "docs" / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", " ")
    assert "NOT RUN BY US" in text
    (serve,) = re.findall(r"-m rollout\.serve (--[^\n']*)", text)
    words = ["--model", "M", *serve.replace('"$SLURMD_NODENAME"', "node").split()]
    words.remove("--config"), words.remove("run.yaml")
    cfg = parse_server(words)
    assert cfg.vllm.replicas == len(cfg.vllm.devices) == 4
    (train,) = re.findall(r"-m trainer (.*)", text)
    assert set(re.findall(r"--[a-z.-]+", train)) <= {
        flag.name for flag in flag_table(load_method("grpo").Config).values()
    }
