"""Flags of earlier versions, on the command line, in a file and in the saved config of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from data.command.flags import config_to_tree
from data.errors import UserError
from trainer import cli

BASE = ("--method", "grpo", "--model", "m", "--data", "d")
OLD_DEFAULTS = {
    "cispo_cap": 5.0, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "vllm_lora_sync": False,
    "multi_objective_aggregation": "sum_then_normalize", "use_data_producer": False,
}  # fmt: skip


def parse(*argv: str, method: str = "grpo"):
    return cli.parse([*BASE, "--method", method, *argv])[1]


def test_an_old_flag_is_read_and_one_line_names_the_new_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for argv, field, value, form in (
        (("--loss-type", "cispo", "--cispo-cap", "3"), "policy_loss.loss_options", {"cispo_cap": 3.0}, "--loss-kwargs"),
        (("--vllm-lora-sync", "--lora.r", "4"), "sync.backend", "lora", "--sync.backend lora"),
        (("--no-vllm-lora-sync",), "sync.backend", "auto", None),
        (("--multi-objective-aggregation", "normalize_then_sum"), "advantage.advantage_estimator", "normalize_then_sum",
         "--advantage-estimator normalize_then_sum"),
    ):  # fmt: skip
        cfg = parse(*argv)
        block, name = field.split(".")
        assert getattr(getattr(cfg, block), name) == value
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (form is not None) and all(form in line for line in lines)


def test_old_keys_of_two_layers_are_merged(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("loss_type: sapo\nsapo_temperature_pos: 2\nloss_kwargs: {}\n")
    cfg = parse("--config", str(path), "--sapo-temperature-neg", "3")
    assert cfg.policy_loss.loss_options == {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}
    assert f"{path}: sapo_temperature_pos is an old key; write loss_kwargs: " in capsys.readouterr().err


def test_the_saved_config_of_an_old_run_resumes_silently(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for method in ("grpo", "gdpo", "rloo", "opd"):
        cfg = parse(*(("--teacher", "t") if method == "opd" else ()), method=method)
        tree = config_to_tree(cfg) | OLD_DEFAULTS
        if method == "gdpo":
            tree |= {"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "group"}
        Path("config.yaml").write_text(yaml.safe_dump(tree))
        capsys.readouterr()
        resumed = cli.parse(["--resume", "."])[1]
        assert (resumed.policy_loss, resumed.advantage, resumed.sync) == (cfg.policy_loss, cfg.advantage, cfg.sync)
        assert len(capsys.readouterr().err.splitlines()) == (method == "gdpo")


def test_a_wrong_old_flag_is_a_mistake_like_any_other():
    for argv, start in (
        (["--cispo-cap", "x"], "cispo_cap=x: expected a number"),
        (["--use-data-producer"], "use_data_producer=True: not supported"),
        (["--cispo-cap", "3"], "loss_kwargs.cispo_cap=3.0: not an option of loss_type=dapo"),
    ):
        with pytest.raises(UserError) as error:
            parse(*argv)
        assert str(error.value).startswith(start)
    with pytest.raises(UserError, match="--cispo-cap: unknown flag"):
        cli.parse(["--method", "sft", "--model", "m", "--data", "d", "--cispo-cap", "3"])
