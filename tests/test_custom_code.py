"""Test that a model's code, in Python files or pickles, never runs without --trust-remote-code."""

from __future__ import annotations

import ast
import builtins
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest

from rollout.rewards.table import load_rewards
from tests.entry import ROOT
from trainer.__main__ import main as train

TINY = ROOT / "trainer" / "tiny"
EVIL = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

Path(r"{marker}").write_text("ran")


class EvilConfig(LlamaConfig):
    model_type = "evil"


class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig


class EvilScorer(LlamaForSequenceClassification):
    config_class = EvilConfig


class EvilTokenizer(PreTrainedTokenizerFast):
    pass


def generate(*arguments, **options):
    return None
"""
TASK = "--data task:addition:split=train,size=64 --max-steps 1"
CLASSES = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoModelForSequenceClassification": "evil.EvilScorer",
    "AutoModelForTokenClassification": "evil.EvilScorer",
    "AutoTokenizer": [None, "evil.EvilTokenizer"],
}


class Bomb:
    """An object that writes the marker when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "ran")


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """Return the file that a model's code would write. A prompt on stdin is answered with yes, and fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *prompt: asked.append(prompt) or "yes")
    yield tmp_path / "marker"
    assert not asked, "nothing may be asked on stdin"


@pytest.fixture
def evil(tmp_path, marker) -> Path:
    """Return a model folder with custom code for everything that can be loaded from it."""
    folder = tmp_path / "evil_model"
    shutil.copytree(TINY, folder)
    (folder / "evil.py").write_text(EVIL.format(marker=marker))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(EVIL.format(marker=marker))
    change(folder / "config.json", model_type="evil", auto_map=CLASSES, architectures=["EvilModel"], num_labels=1)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.EvilTokenizer"]},
           tokenizer_class="EvilTokenizer")  # fmt: skip
    return folder


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2=", "completion": "4", "answer": "4", "chosen": "4", "rejected": "5"}\n' * 16)
    return path


def failed(code: object) -> bool:
    return code not in (0, None)


def run_check(*argv: str) -> object:
    from rollout.rewards.__main__ import main

    return main([*argv])


def run_show(*argv: str) -> object:
    from data.show import main

    return main([*argv])


def run_plan(*argv: str) -> object:
    from trainer.plan import main

    return main([*argv])


ENTRIES = {
    "data.show": (run_show, "--data DATA --model EVIL"),
    "rewards --check --model": (run_check, "--check exact_match --data DATA --model EVIL"),
    "rewards --check model:": (run_check, "--check model:EVIL --data DATA"),
    "rewards --check prm:": (run_check, "--check prm:EVIL --data DATA"),
    "plan": (run_plan, "--model EVIL"),
    "sft": (lambda *argv: train([*argv]), f"--method sft --model EVIL {TASK}"),
    "grpo": (lambda *argv: train([*argv]), f"--method grpo --model EVIL {TASK}"),
    "grpo model:": (lambda *argv: train([*argv]), "--method grpo --reward-funcs model:EVIL --max-steps 1"),
    "rm": (lambda *argv: train([*argv]), f"--method rm --model EVIL {TASK}"),
    "dpo --ref-model": (lambda *argv: train([*argv]), "--method dpo --ref-model EVIL --data DATA --max-steps 1"),
    "ebft --feature-model": (lambda *argv: train([*argv]), "--method ebft --feature-model EVIL --max-steps 1"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_python_files_of_a_model_do_not_run(entry, evil, marker, data, capfd):
    run, line = ENTRIES[entry]
    argv = [word.replace("EVIL", str(evil)).replace("DATA", str(data)) for word in line.split()]
    code = run(*argv)
    printed = capfd.readouterr().err
    assert not marker.exists(), printed
    (message,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert failed(code) and "custom code" in message and "--trust-remote-code" in message, printed


def test_python_files_run_with_trust_remote_code(evil, marker, data):
    assert run_show("--data", str(data), "--model", str(evil), "--trust-remote-code") == 0
    assert marker.read_text() == "ran"
    marker.unlink()
    argv = ["--check", "exact_match", "--data", str(data), "--model", str(evil), "--max-completion-length", "2"]
    assert run_check(*argv, "--trust-remote-code") == 0


def test_an_export_ignores_trust_remote_code_of_the_run(evil, marker, tmp_path, capfd):
    import torch

    from trainer.export import main
    from trainer.run.checkpoint import save_checkpoint

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def describe(folder: Path) -> None:
        for path in (*evil.glob("*.json"), *evil.glob("*.py")):
            shutil.copy(path, folder / path.name)

    save_checkpoint(tmp_path / "run" / "checkpoints", 1, model, optimizer, schedule, {}, keep=1, describe=describe)
    (tmp_path / "run" / "config.yaml").write_text(f"method: sft\nmodel: {evil}\ntrust_remote_code: true\n")
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    printed = capfd.readouterr().err
    assert not marker.exists() and "--trust-remote-code" in printed and not (tmp_path / "out").exists(), printed


def pickled(folder: Path, marker: Path, name: str) -> None:
    """Replace the safetensors by a pickle that writes the marker."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / name).write_bytes(pickle.dumps({"weight": Bomb(marker)}))


def test_weights_in_pickles_are_an_error(marker, tmp_path, data, capfd):
    folder = tmp_path / "pickled"
    shutil.copytree(TINY, folder)
    change(folder / "config.json", num_labels=1, architectures=["LlamaForSequenceClassification"])
    pickled(folder, marker, "pytorch_model.bin")
    assert run_check("--check", f"model:{folder}", "--data", str(data)) == 2
    assert "no file named model.safetensors" in capfd.readouterr().err
    assert train(["--method", "rm", "--model", str(folder), *TASK.split()]) == 2
    assert "no file named model.safetensors" in capfd.readouterr().err
    change(folder / "config.json", architectures=["LlamaForCausalLM"])
    assert train(["--method", "sft", "--model", str(folder), *TASK.split()]) == 2
    assert "no file named model.safetensors" in capfd.readouterr().err
    assert run_check("--check", "exact_match", "--data", str(data), "--model", str(folder)) == 2
    assert "no file named model.safetensors" in capfd.readouterr().err
    assert not marker.exists()


def test_adapters_in_pickles_are_an_error(marker, tmp_path, data, capfd):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "adapter"
    lora = LoraConfig(r=2, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), lora).save_pretrained(folder)
    shutil.copy(TINY / "tokenizer.json", folder)
    shutil.copy(TINY / "tokenizer_config.json", folder)
    pickled(folder, marker, "adapter_model.bin")
    for run in (
        lambda: train(["--method", "sft", "--model", str(folder), *TASK.split()]),
        lambda: train(["--method", "rm", "--model", str(folder), *TASK.split()]),
        lambda: run_check("--check", "exact_match", "--data", str(data), "--model", str(folder)),
    ):
        assert failed(run())
        assert "has no adapter_model.safetensors" in capfd.readouterr().err
    inner = tmp_path / "adapter_of_adapter"  # transformers applies an adapter in a base folder
    shutil.copytree(folder, inner)
    shutil.copy(TINY / "model.safetensors", inner / "adapter_model.safetensors")
    change(inner / "adapter_config.json", base_model_name_or_path=str(folder))
    assert train(["--method", "sft", "--model", str(inner), *TASK.split()]) == 2
    assert "contains an adapter, not a base model" in capfd.readouterr().err
    assert not marker.exists()


def test_reward_models_in_workers_do_not_run_custom_code(evil, marker):
    with pytest.raises(ValueError, match=r"custom code.*--trust-remote-code"):
        load_rewards([f"model:{evil}"], num_workers=1)
    assert not marker.exists()


LOADERS = [path for folder in ("data", "rollout", "trainer") for path in (ROOT / folder).rglob("*.py")]
PICKLES = {"rollout/rewards/worker_child.py", "trainer/parallel/comm.py"}  # between processes of one run


def test_every_loading_call_passes_trust_remote_code():
    texts = {path: path.read_text() for path in LOADERS}
    texts = {path: text for path, text in texts.items() if re.search(r"\.(from_pretrained|from_config|loads?)\b", text)}
    for path, node in ((path, node) for path, text in texts.items() for node in ast.walk(ast.parse(text))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        where = f"{path.relative_to(ROOT)}:{node.lineno} {called}"
        if called.endswith((".from_pretrained", ".from_config")) and not called.startswith("Peft"):
            assert "trust_remote_code" in given, where
            weightless = ("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained", ".from_config")
            assert "use_safetensors" in given or called.endswith(weightless), where
        assert called not in ("torch.load", "pickle.load", "joblib.load"), where
        assert called != "np.load" or "allow_pickle=False" in ast.unparse(node), where
        assert called != "pickle.loads" or path.relative_to(ROOT).as_posix() in PICKLES, where
