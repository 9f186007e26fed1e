"""The README cannot drift: its links, method table, tree and command lines are checked against the repository."""

from __future__ import annotations

import dataclasses
import re
import subprocess

import pytest

from rollout.serve import parse as parse_server
from tests.entry import ROOT
from trainer.cli import flag_table, load_method, method_names, parse
from trainer.plan import PlanConfig

TEXT = (ROOT / "README.md").read_text()
RENDEZVOUS = ("--rdzv-id", "--rdzv-backend", "--rdzv-endpoint")
COMMANDS = re.findall(r"python -m trainer (--[^\n#`]*)", TEXT.replace("\\\n", " "))


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_method_table_lists_the_methods_there_are():
    assert sorted(re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.MULTILINE)) == method_names()


def test_tree_names_folders_that_exist():
    tree = TEXT.split("## Where things are")[1].split("\n\n")[1]
    names = re.findall(r"^ +([\w./]+)/ ", tree, flags=re.MULTILINE)
    assert {"kernels", "losses", "data", "rollout", "methods", "bench", "tests"} <= set(names)
    assert not [name for name in names if not ((ROOT / name).is_dir() or (ROOT / "trainer" / name).is_dir())]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = command.split()
    if "--help" in words:
        words.remove("--help")
    _, cfg, name = parse(words)
    assert name in method_names() and cfg.run.method == name


def test_flags_named_in_text_exist():
    known = {flag.name for name in method_names() for flag in flag_table(load_method(name).Config).values()}
    known |= {name.replace("--", "--no-", 1) for name in known}  # what switches a flag off
    known |= {"--config", "--help", "--check"}
    known |= {"--" + field.name.replace("_", "-") for field in dataclasses.fields(PlanConfig)}
    known |= {"--enable-auto-tool-choice", "--tool-call-parser"}  # vLLM's own, for --vllm.extra-args
    known |= {"--nproc-per-node", "--max-restarts", "--nnodes", "--shutdown-timeout", *RENDEZVOUS}  # of torchrun
    mentioned = set(re.findall(r"(--[a-z][a-z0-9.-]+)", re.sub(r"--\w+\.\*", "", TEXT)))  # --format.* is a block
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
