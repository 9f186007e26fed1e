"""Learning rates: the default of every method for all weights and for LoRA, and the note where one is far off."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import yaml

import trainer.run.run
from data.command.flags import config_to_tree
from tests.entry import ROOT
from trainer import cli
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, OptimConfig
from trainer.config.learning_rates import RATES, far_off, rates_of

RECIPES = ROOT / "trainer" / "recipes"
PUBLISHED = {  # (all weights, LoRA), as docs/quickstart.md has them
    "sft": (2e-5, 2e-4), "dpo": (1e-6, 5e-6), "ipo": (1e-6, 5e-6), "kto": (1e-6, 5e-6), "orpo": (8e-6, 8e-5),
    "cpo": (1e-6, 1e-5), "simpo": (1e-6, 1e-5), "rm": (1e-5, 1e-4), "prm": (1e-5, 1e-4), "grpo": (1e-6, 1e-5),
    "gdpo": (1e-6, 1e-5), "rloo": (1e-6, 1e-5), "ebft": (1e-6, 1e-5), "online_dpo": (1e-6, 5e-6), "opd": (1e-6, 1e-5),
    "ppo": (1e-6, 1e-5),
}  # fmt: skip


def parse(method: str, *argv: str):
    return cli.parse(["--method", method, *argv])[1]


def test_every_method_has_both_rates_and_says_where_they_are_from():
    assert sorted(RATES) == cli.method_names()
    assert {name: (rates.full, rates.lora) for name, rates in RATES.items()} == PUBLISHED
    assert all(rates.source for rates in RATES.values())


def test_the_default_follows_the_rank_and_a_given_rate_wins(tmp_path):
    own = ("--model", "m", "--data", "d")
    for method, (full, lora) in PUBLISHED.items():
        needed = (*own, "--teacher", "t") if method == "opd" else own
        assert parse(method, *needed).optim.learning_rate == full
        cfg = parse(method, *needed, "--lora.r", "8")
        assert cfg.optim.learning_rate == lora and cfg.lora.r == 8
        assert config_to_tree(cfg)["learning_rate"] == lora  # what config.yaml is written from
    assert parse("sft", *own, "--lora.r", "8", "--learning-rate", "3e-6").optim.learning_rate == 3e-6
    (tmp_path / "c.yaml").write_text("model: m\ndata: [d]\nlearning_rate: 4e-6\nlora: {r: 4}\n")
    assert parse("sft", "--config", str(tmp_path / "c.yaml")).optim.learning_rate == 4e-6


def test_tiny_recipes_keep_their_own_rates():
    for path in RECIPES.glob("*_*tiny.yaml"):
        assert float(yaml.safe_load(path.read_text())["learning_rate"]) > 0, path
    for method in cli.method_names():
        written = float(yaml.safe_load((RECIPES / f"{method}_tiny.yaml").read_text())["learning_rate"])
        assert parse(method, "--lora.r", "4").optim.learning_rate == written


def test_a_method_that_extends_one_of_ours_has_its_rates_and_another_has_none():
    grpo = import_module("trainer.methods.grpo").Config
    assert rates_of(type("Config", (grpo,), {})) == RATES["grpo"]
    assert rates_of(OptimConfig) is None


def test_the_help_of_the_flag_has_every_number():
    source = (ROOT / "trainer" / "config" / "blocks.py").read_text()
    text = source.partition("learning_rate: float")[2].partition("lr_scheduler")[0]
    for rate in {rate for pair in PUBLISHED.values() for rate in pair}:
        assert f"{rate:.0e}".replace("e-0", "e-") in text, rate


@pytest.mark.parametrize(
    ("method", "rank", "rate", "text"),
    [
        ("grpo", 0, 1e-6, None),
        ("grpo", 0, 2e-5, None),
        ("grpo", 0, 4e-5, "learning_rate=4e-05: 40 times above 1e-06, the default of this method for all weights"),
        ("sft", 0, 5e-7, "learning_rate=5e-07: 40 times below 2e-05, the default of this method for all weights"),
        ("grpo", 16, 1e-5, None),
        ("grpo", 16, 2e-6, None),
        ("grpo", 16, 1e-6, "learning_rate=1e-06: 10 times below 1e-05, the default of this method with LoRA (for all "
                           "weights it is 1e-06)"),
        ("sft", 16, 1e-2, "learning_rate=0.01: 50 times above 0.0002, the default of this method with LoRA (for all "
                          "weights it is 2e-05)"),
    ],
)  # fmt: skip
def test_a_rate_that_is_far_off_is_told_with_both_numbers(method, rank, rate, text):
    cfg = parse(method, "--model", "m", "--data", "d")
    cfg = replace(cfg, optim=OptimConfig(learning_rate=rate), lora=LoraConfig(r=rank))
    assert far_off(cfg) == text


def test_a_run_saves_the_rate_it_used_and_tells_a_far_one(tmp_path, monkeypatch, capsys):
    """The embedded model is too small to be told anything, as its own recipes have higher rates, unless it counts."""
    monkeypatch.chdir(tmp_path)
    base = ["--method", "sft", "--model", "builtin:tiny", "--data", "task:addition:size=8", "--lora.r", "4",
            "--max-steps", "1", "--save-steps", "0", "--learning-rate", "0.02"]  # fmt: skip
    for name, size in (("a", trainer.run.run.SMALL_MODEL), ("b", 0)):
        monkeypatch.setattr(trainer.run.run, "SMALL_MODEL", size)
        assert main([*base, "--output-dir", name]) == 0
        said = capsys.readouterr()
        assert ("100 times above 0.0002" in said.out + said.err) == (name == "b"), name
    assert yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())["learning_rate"] == 0.02
