"""Axolotl's RL and reward examples, rewritten for local rows and the tiny model, train or are refused by name.

The files in examples/ have the keys of axolotl's own; the values are ours, and small.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.entry import metrics, repeatable, run, run_ok
from trainer.cli import parse

EXAMPLES = Path(__file__).parent / "examples"
# What only a GPU machine has: the file's own value is translated, and overridden here.
HERE = {"report_to": ("none",), "optim": ("adamw",), "compile": ("False",), "chat_template_kwargs": ("{}",),
        "rollout.engine": ("local",)}  # fmt: skip
REFUSED = {"falcon-e-3b-dpo": "use_onebitllms=True"}
SFT = ("sft-alpaca", "sft-chat-template", "sft-completion")
FAST = ("ebft-llama-1b-strided", "sft-chat-template")
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yml"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the examples, as the working folder."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    return tmp_path / "examples"


def overrides(name: str) -> list[str]:
    tree = yaml.safe_load((EXAMPLES / f"{name}.yml").read_text())
    samples = tree.get("rl") in ("grpo", "gdpo") or (tree.get("rl") == "ebft" and "mode" not in tree["ebft"])
    words = ["--lora.modules-to-save"] if "lora_modules_to_save" in tree else []  # the tiny model's are tied
    for key, value in HERE.items():
        if key != "rollout.engine" or samples:
            words += [f"--{key.replace('_', '-')}", *value]
    return words


def test_all_23_rl_and_reward_files_are_here_and_18_or_more_train():
    rl = [name for name in NAMES if name not in SFT]
    assert len(rl) == 23 and set(SFT) <= set(NAMES)
    assert len(rl) - len(REFUSED) >= 18


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_translated_or_refused_by_name(name, folder, capsys):
    argv = ["--config", f"{name}.yml", *overrides(name)]
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"^{name}.yml: {REFUSED[name]}: ") as caught:
            parse(argv)
        assert "remove it" in str(caught.value)
        return
    _, cfg, method = parse(argv)
    theirs = yaml.safe_load(Path(f"{name}.yml").read_text())
    assert method == theirs.get(
        "rl", "rm" if theirs.get("reward_model") else "prm" if "process" in str(theirs) else "sft"
    )
    assert cfg.optim.learning_rate == float(theirs["learning_rate"])
    assert cfg.run.per_device_train_batch_size == theirs["micro_batch_size"]
    assert cfg.lora.r == (theirs.get("lora_r", 0) if theirs.get("adapter") else 0)
    lines = [line for line in capsys.readouterr().err.splitlines() if "no effect here" in line]
    assert len(lines) <= 1


def train(name: str, folder: Path) -> None:
    out = folder / "out"
    run_ok("--config", f"{name}.yml", *overrides(name), "--max-steps", 2, "--output-dir", out, cwd=folder)
    rows = metrics(out)
    assert [row["step"] for row in rows if "loss/total" in row] == [1, 2]
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert saved["method"] and "base_model" not in saved and "datasets" not in saved  # in our terms


@pytest.mark.parametrize("name", FAST)
def test_it_trains_two_steps(name, folder):
    train(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*REFUSED, *FAST)])
def test_the_others_train_two_steps_too(name, folder):
    train(name, folder)


def test_a_file_and_the_same_settings_as_flags_give_the_same_metrics(folder):
    """Bit for bit on a CPU."""
    run_ok("--config", "llama3-qlora-1b-kto.yml", "--optim", "adamw", "--max-steps", 2, "--output-dir", "a", cwd=folder)
    run_ok(
        "--method", "kto", "--model", "builtin:tiny", "--beta", 0.5, "--desirable-weight", 0.2,
        "--data", "rows/labelled.jsonl:format=chatml.ultra,split=train", "--max-length", 256, "--long-rows", "drop",
        "--lora.r", 8, "--lora.alpha", 16, "--load-in-4bit", "--gradient-checkpointing",
        "--per-device-train-batch-size", 2, "--gradient-accumulation-steps", 1, "--learning-rate", 2e-4,
        "--warmup-steps", 4, "--weight-decay", 0.0, "--seed", 42, "--saves-per-epoch", 1, "--save-total-limit", 4,
        "--special-tokens", '{"pad_token": "<|endoftext|>"}', "--max-steps", 2, "--output-dir", "b", cwd=folder,
    )  # fmt: skip
    assert repeatable(metrics(folder / "a")) == repeatable(metrics(folder / "b"))
    a, b = (yaml.safe_load((folder / run / "config.yaml").read_text()) for run in ("a", "b"))
    assert {**a, "output_dir": ""} == {**b, "output_dir": ""}


def test_what_a_dry_run_prints_is_the_same_config(folder, capsys):
    argv = ["--config", "qwen2-prm.yml"]
    with pytest.raises(SystemExit) as ended:
        parse([*argv, "--max-steps", "7", "--dry-run"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["data"] == [
        {"path": "rows/steps.jsonl", "format": "stepwise_supervised"},
    ]
    Path("ours.yaml").write_text(printed)
    assert parse(["--config", "ours.yaml"])[1] == parse([*argv, "--max-steps", "7"])[1]
    with pytest.raises(SystemExit):  # of our own file too
        parse(["--config", "ours.yaml", "--dry-run"])
    assert capsys.readouterr().out == printed


def test_a_run_of_a_translated_file_is_resumed(folder):
    words = ("--config", "sft-completion.yml", "--save-steps", 1, "--output-dir", "r")  # instead of its saves_per_epoch
    run_ok(*words, "--max-steps", 1, cwd=folder)
    done = run_ok("--config", "sft-completion.yml", "--resume", "--output-dir", "r", "--max-steps", 2, cwd=folder)
    assert "resum" in done.stdout + done.stderr
    assert metrics(folder / "r")[-1]["step"] == 2


def test_errors_name_the_file(folder):
    Path("bad.yml").write_text("base_model: builtin:tiny\nrl: dpo\nlora_alfa: 8\ndatasets: [{path: x.jsonl, typ: y}]\n")
    done = run("--config", "bad.yml", cwd=folder)
    assert done.returncode == 2
    assert "error: bad.yml: lora_alfa: not a key of axolotl, did you mean lora_alpha?" in done.stderr
    assert "datasets[].typ: not a key of axolotl, did you mean datasets[].type?" in done.stderr
