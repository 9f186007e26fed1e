"""Default learning rates of every method, and the note about a rate far from the default."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from data.command.flags import config_to_tree
from tests.entry import ROOT
from trainer import cli
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, MethodConfig, OptimConfig
from trainer.config.learning_rates import FAR_OFF_SMALL, far_off, rates_of, small_model_rates

RECIPES = ROOT / "trainer" / "recipes"
PUBLISHED = {  # (all weights, LoRA), as docs/quickstart.md has them
    "sft": (2e-5, 2e-4), "dpo": (1e-6, 5e-6), "ipo": (1e-6, 5e-6), "kto": (1e-6, 5e-6), "orpo": (8e-6, 8e-5),
    "cpo": (1e-6, 1e-5), "simpo": (1e-6, 1e-5), "rm": (1e-5, 1e-4), "prm": (1e-5, 1e-4), "grpo": (1e-6, 1e-5),
    "gdpo": (1e-6, 1e-5), "rloo": (1e-6, 1e-5), "ebft": (1e-6, 1e-5), "online_dpo": (1e-6, 5e-6), "opd": (1e-6, 1e-5),
    "sdpo": (1e-6, 1e-5),
    "ppo": (1e-6, 1e-5),
}  # fmt: skip


def parse(method: str, *argv: str):
    return cli.parse(["--method", method, *argv])[1]


def test_every_method_has_both_rates():
    assert {name: tuple(rates_of(cli.load_method(name).Config)) for name in cli.method_names()} == PUBLISHED


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
        assert small_model_rates(cli.load_method(method).Config).full == written
        assert written > FAR_OFF_SMALL * PUBLISHED[method][0]  # the default of larger models gets a note


def test_a_method_that_extends_a_built_in_method_has_its_rates():
    assert rates_of(type("Config", (cli.load_method("grpo").Config,), {})) == PUBLISHED["grpo"]
    assert rates_of(MethodConfig) is None and rates_of(OptimConfig) is None


FULL = "the usual rate of this method for all weights"
LORA = "the usual rate of this method with LoRA"
SMALL = "in models under 50 M parameters"


@pytest.mark.parametrize(
    ("method", "rank", "rate", "num_parameters", "text"),
    [
        ("grpo", 0, 1e-6, 10**8, None),
        ("grpo", 0, 2e-5, 10**8, None),
        ("grpo", 0, 4e-5, 10**8, f"learning_rate=4e-05: 40 times above 1e-06, {FULL}"),
        ("sft", 0, 5e-7, 10**8, f"learning_rate=5e-07: 40 times below 2e-05, {FULL}"),
        ("grpo", 16, 1e-5, 10**8, None),
        ("grpo", 16, 2e-6, 10**8, None),
        ("grpo", 16, 1e-6, 10**8, f"learning_rate=1e-06: 10 times below 1e-05, {LORA} (for all weights it is 1e-06)"),
        ("sft", 16, 1e-2, 10**8, f"learning_rate=0.01: 50 times above 0.0002, {LORA} (for all weights it is 2e-05)"),
        ("sft", 0, 3e-4, 10**6, None),
        ("sft", 0, 2e-5, 10**6, f"learning_rate=2e-05: 15 times below 0.0003, {FULL} {SMALL}"),
        ("sft", 0, 1e-2, 10**6, f"learning_rate=0.01: 33.3 times above 0.0003, {FULL} {SMALL}"),
        ("grpo", 8, 2e-3, 10**6, None),
        ("grpo", 8, 1e-5, 10**6,
         f"learning_rate=1e-05: 200 times below 0.002, {LORA} {SMALL} (for all weights it is 0.0002)"),
    ],
)  # fmt: skip
def test_a_rate_that_is_far_off_is_told_with_both_numbers(method, rank, rate, num_parameters, text):
    cfg = parse(method, "--model", "m", "--data", "d")
    cfg = replace(cfg, optim=OptimConfig(learning_rate=rate), lora=LoraConfig(r=rank))
    assert far_off(cfg, num_parameters) == text


def test_a_method_that_extends_a_built_in_method_has_its_rate_for_small_models():
    extended = type("Config", (cli.load_method("grpo").Config,), {"__module__": "my_algo"})
    assert small_model_rates(extended) == (2e-4, 2e-3) and small_model_rates(MethodConfig) is None


def test_a_run_saves_the_rate_it_used_and_tells_a_far_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = ["--method", "sft", "--model", "builtin:tiny", "--data", "task:addition:size=8", "--lora.r", "4",
            "--max-steps", "1", "--save-steps", "0", "--output-dir"]  # fmt: skip
    assert main([*base, "a", "--learning-rate", "0.06"]) == 0
    said = capsys.readouterr()
    assert "20 times above 0.003" in said.out + said.err
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["learning_rate"] == 0.06
