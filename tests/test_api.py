"""Test train() of trainer/api.py: objects instead of files and flags."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import trainer
from data.sources import load_rows, parse_spec
from rollout.model_folder import TINY
from trainer import train
from trainer.__main__ import main
from trainer.config.blocks import OptimConfig
from trainer.methods import grpo
from trainer.policy.optim import build_optimizer, check_groups
from trainer.run.callbacks import Callback

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]


class OwnConfig(grpo.Config):
    """Its module has no train(cfg)."""


@dataclass
class GRPOConfig:
    """The fields of TRL's class that a script sets; to_dict() lists all of them."""

    output_dir: str | None = None
    learning_rate: float = 1e-6
    per_device_train_batch_size: int = 8
    num_generations: int = 8
    max_completion_length: int = 512
    max_steps: int = -1
    report_to: list = field(default_factory=lambda: ["none"])

    def to_dict(self):
        return {item.name: getattr(self, item.name) for item in fields(self)}


def state_of_process():
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    return handlers, torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_num_threads()


class Misnamed(Callback):
    def on_step_end(self, training, metrics):
        """Its name in transformers."""


def test_a_trl_script_runs_twice_and_after_ctrl_c(tmp_path, monkeypatch, capsys):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    problem = [KeyboardInterrupt, None]

    async def length_reward(prompts, completions, answer, **columns):
        await asyncio.sleep(0)
        if problem[:1] == [KeyboardInterrupt]:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, which the main thread handles
            await asyncio.sleep(60)
        return [float(len(text)) for text in completions]

    for kind in list(problem):
        arguments = dict(
            model=AutoModelForCausalLM.from_pretrained(TINY),
            processing_class=AutoTokenizer.from_pretrained(TINY),
            reward_funcs=length_reward,  # one function, as TRL allows
            args=GRPOConfig("out", 1e-3, per_device_train_batch_size=4, max_completion_length=4, max_steps=2),
            train_dataset=ROWS,
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        before = state_of_process()
        with pytest.raises(kind) if kind else nullcontext():
            made = train(**arguments)
        assert state_of_process() == before
        problem.pop(0)
    assert list(made.metrics["step"]) == [1, 2] and made.metrics["reward/length_reward/mean"].min() > 0
    saved = yaml.safe_load((made.dir / "config.yaml").read_text())
    assert saved["method"] == "grpo" and saved["gradient_accumulation_steps"] == 2  # 4 of 8 completions in a batch
    assert saved["lora"]["alpha"] == 8 and saved["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert saved["model"] == f"python:{TINY}" and saved["data"] == ["python:data"] and saved["learning_rate"] == 1e-3
    assert isinstance(made.generate("1+1=", max_tokens=3), str)
    assert len(made.generate(["1+1=", "2+2="], max_tokens=3)) == 2
    assert len(made.generate(Dataset.from_list(ROWS[:2])["prompt"], max_tokens=3)) == 2
    for prompts, options, words in (
        (3, {}, "prompts"),
        (ROWS, {}, "prompts"),
        ("1", {"max_new": 3}, "max_new.*max_tok"),
    ):
        with pytest.raises(ValueError, match=rf"generate\(\): {words}"):
            made.generate(prompts, **options)
    for _ in range(2):  # the second replaces the first
        assert (made.save("final_model") / "adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match="not a model folder"):
        made.save(made.dir)
    assert (made.dir / "config.yaml").is_file()

    assert problem == []
    # The adapter continues, and a copy of it is the reference.
    options = {"reward_funcs": ["exact_match"], "max_completion_length": 4, "max_steps": 1, "output_dir": "again"}
    again = train("grpo", model=made.model, data=ROWS, beta=0.1, **options)
    assert again.model is made.model and list(again.model.peft_config) == ["default"]
    assert json.loads((again.dir / "metrics.jsonl").read_text())["policy/ref_kl_k3"] == pytest.approx(0, abs=1e-6)

    assert main(["--resume", "out", "--max-steps", "3"]) == 2
    assert "reward_funcs=python:" in capsys.readouterr().err.splitlines()[-1]


def test_a_model_object_is_trained_in_place(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    before = model.get_input_embeddings().weight.detach().float().clone()
    rows = ({"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(4))
    options = {"learning_rate": 1e-3, "max_steps": 1, "neftune_noise_alpha": 5.0, "output_dir": str(tmp_path / "run")}
    made = train("sft", model=model, data=rows, eval_data=[{"prompt": "1+1=", "completion": "2"}], **options)
    assert made.model is model and not model.training and not model.get_input_embeddings()._forward_hooks
    assert (before - model.get_input_embeddings().weight).abs().max() > 5e-4
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape[1] <= 4


class Record(Callback):
    def __init__(self):
        self.calls = []

    def on_rollout(self, training, rollout):
        self.calls.append(("rollout", len(rollout.completions)))

    def on_step(self, training, metrics):
        self.calls.append(("step", training.step))
        if training.step == 2:
            training.stop("enough")

    def on_eval(self, training, metrics):
        self.calls.append(("eval", training.step))

    def on_save(self, training, folder):
        self.calls.append(("save", folder.name))

    def on_end(self, training):
        self.calls.append(("end", training.step))


def test_callbacks_stop_a_run_and_the_best_weights_are_exported(tmp_path):
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(4)]
    record, folder = Record(), str(tmp_path / "run")
    options = {"data": rows, "eval_data": rows, "lora_r": 2, "loraplus_lr_ratio": 4.0, "eval_steps": 1,
               "learning_rate": 5.0, "metric_for_best_model": "eval/nll", "load_best_model_at_end": True}  # fmt: skip
    made = train("sft", model="builtin:tiny", callbacks=[record], max_steps=9, output_dir=folder, **options)
    assert record.calls == [("eval", 0), ("eval", 1), ("step", 1), ("eval", 2), ("step", 2), ("save", "step-00000002"),
                            ("end", 2)]  # fmt: skip
    nll = made.metrics["eval/nll"]
    assert nll[0] < min(nll[1:]) and (made.dir / "final").is_dir()  # the rate is far too high: step 0 was best
    again = train("sft", model="builtin:tiny", max_steps=3, resume=folder, **options)  # the checkpoint has the weights
    assert list(again.metrics["step"]) == [0, 1, 2, 3]
    for finished in (made, again):
        assert all((p == 0).all() for name, p in finished.model.named_parameters() if "lora_B" in name)


def test_parameters_have_their_own_rates():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 2)})
            self.lora_B = nn.ModuleDict({"d": nn.Linear(2, 2)})
            self.norm = nn.LayerNorm(2)

    model = nn.ModuleDict({"x": Model()})
    groups = {"norm": {"learning_rate": "1e-5", "weight_decay": 0.5}}
    cfg = OptimConfig(learning_rate=1e-3, weight_decay=0.1, loraplus_lr_ratio=16.0, param_groups=groups)
    optimizer, schedule = build_optimizer(model, cfg, 10)
    found = {name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups
             for name, p in model.named_parameters() if any(p is other for other in group["params"])}  # fmt: skip
    assert found["x.lora_A.default.weight"] == (1e-3, 0.1) and found["x.lora_A.default.bias"] == (1e-3, 0.0)
    assert found["x.lora_B.d.weight"] == (16e-3, 0.1) and found["x.norm.weight"] == (1e-5, 0.5)
    assert len(found) == 6 and schedule.get_last_lr()[0] == 1e-3
    for changes, words in (({"param_groups": {"nowhere": {"learning_rate": 1.0}}}, "param_groups=nowhere"),
                           ({"param_groups": {}}, "loraplus_lr_ratio=16: .*--lora.r")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            check_groups(model, replace(cfg, **changes))


@pytest.mark.parametrize(("settings", "words"), [
    ({"early_stopping_patience": 2}, ["early_stopping_patience=2", "--metric-for-best-model"]),
    ({"metric_for_best_model": "eval/x"}, ["metric_for_best_model=eval/x", "--early-stopping-patience"]),
    ({"param_groups": {"x": {"lr": 1.0}}}, ["param_groups=x", "learning_rate"]),
    ({"lora_q": 1, "max_stepz": 2}, ["lora_q", "lora.r", "max_stepz", "max_steps"]),
    ({"beta": "x"}, ["beta=x", "a number"]),
    ({"temperature": -1.0, "method": grpo.Config}, ["temperature=-1"]),
    ({"method": OwnConfig}, ["tests.test_api", "train(cfg)"]),
    ({"data": {"train": [], "test": []}}, ["data", "dataset['train']"]),
    ({"data": 3}, ["data", "not int"]),
    ({"model": 3}, ["model: must be an id, a folder or a transformers model, not int"]),
    ({"train_dataset": ROWS}, ["train_dataset", "data"]),
    ({"args": GRPOConfig(), "method": "sft"}, ["GRPOConfig", "grpo", "sft"]),
    ({"args": {"num_generations": 4}, "method": None}, ["args", "method"]),
    ({"peft_config": 3}, ["peft_config", "LoraConfig"]),
    ({"callback": print}, ["callback: unknown key"]),
    ({"callbacks": Misnamed()}, ["Misnamed", "on_step_end", "on_step, "]),
    ({"data": ["1+1=", "2+2="]}, ["data=1+1=", "no such local file", "hub id"]),
])  # fmt: skip
def test_mistakes_are_reported_as_by_the_command(settings, words):
    method = settings.pop("method", "grpo")
    with pytest.raises(ValueError) as error:
        train(method, **{"model": "builtin:tiny", "data": ROWS, **settings})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(("method", "row", "words"), [
    ("sft", {"prompt": "1+1=", "completion": "2"}, ["data.jsonl:1 example", "4 not trained", ": 3, with 2 rows"]),
    ("grpo", {"prompt": "1+1=", "answer": "2"}, ["data.jsonl:1 prompt: 4 tokens", "steps: 2, with 8 completions"]),
])  # fmt: skip
def test_a_dry_run_shows_the_first_row_and_a_plan(method, row, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    size = ["--per-device-train-batch-size", "2"] if method == "sft" else ["--max-steps", "2"]
    argv = ["--method", method, "--model", "builtin:tiny", "--data", "data.jsonl", *size, "--dry-run"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["data"] == ["data.jsonl"]
    assert all(word in shown.err for word in (*words, "memory: ", "GiB", "time: ")), shown.err
    assert not Path("runs").exists()


def test_a_dry_run_applies_the_context_of_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(json.dumps({"prompt": "1+1=", "chosen": "1" * 600, "rejected": "3", "answer": "2"}))
    argv = ["--model", "builtin:tiny", "--data", "data.jsonl", "--dry-run"]
    assert main(["--method", "dpo", *argv]) == 0
    assert "1 truncated to max_length=512" in capsys.readouterr().err
    assert main(["--method", "grpo", "--max-completion-length", "512", *argv]) == 2
    assert "max_completion_length=512: leaves no room for a prompt" in capsys.readouterr().err


def test_a_dry_run_checks_that_kto_has_two_prompts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": prompt, "completion": "2", "label": prompt == "1+1="} for prompt in ("1+1=", "2+2=")]
    Path("one.jsonl").write_text(f"{json.dumps(rows[0])}\n" * 2)
    Path("two.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    argv = ["--method", "kto", "--model", "builtin:tiny", "--dry-run", "--data"]
    for setting, *words in (
        ("data", "one.jsonl"),
        ("data", "two.jsonl", "--val-set-size", "1"),
        ("eval_data=one.jsonl", "two.jsonl", "--eval-data", "one.jsonl"),
    ):
        assert main([*argv, *words]) == 2
        assert f"error: {setting}: all rows have the same prompt" in capsys.readouterr().err
    assert main([*argv, "two.jsonl"]) == main([*argv, "one.jsonl", "--loss-type", "apo_zero_unpaired"]) == 0


REWARDS = """
print("imported")
async def shouts(completions):
    print("called")
    return [len(text) for text in completions]
def ids(completions, completion_ids):
    return [10.0 * len(ids) for ids in completion_ids]
def broken(completions):
    raise KeyError("x")
def solved(completions, solution):
    raise AssertionError("not called")
"""


def test_a_dry_run_calls_the_rewards_on_the_first_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dry_rewards.py").write_text(REWARDS)
    Path("data.jsonl").write_text('{"prompt": "6+6=", "answer": "12"}\n{"prompt": "1+1=", "answer": "2"}\n')
    argv = ["--method", "grpo", "--model", "builtin:tiny", "--max-steps", "1", "--dry-run", "--data"]
    names = ["dry_rewards.shouts", "dry_rewards.ids", "dry_rewards.broken", "dry_rewards.solved", "model:none", "env"]
    assert main([*argv, "data.jsonl", "--reward-funcs", *names]) == 2
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["reward_funcs"] == names, "what functions print goes to stderr"
    assert all(word in shown.err.splitlines() for word in ("imported", "called"))
    lines = [line for line in shown.err.splitlines() if line.startswith("reward")]
    assert lines == [
        "reward dry_rewards.shouts on data.jsonl:1: 2 with its answer as the completion",
        "reward dry_rewards.ids on data.jsonl:1: 20 with its answer as the completion",
        "reward_funcs=dry_rewards.broken: raised KeyError: 'x' on data.jsonl:1 (dry_rewards.py, line 9); fix it, or "
        "return None for such rows; completions are strings, because the prompts are text",
        "reward_funcs=dry_rewards.solved: requires 'solution', which data.jsonl:1 does not have; available: prompts, "
        "completions, answer, completion_ids",
        "reward model:none on data.jsonl:1: not called, because it loads a model",
        "reward env on data.jsonl:1: not called, because the environment computes it",
    ]
    assert "reward_funcs: 2 of 6 failed on the first row" in shown.err

    assert main([*argv, "data.jsonl", "--reward-funcs", names[3], "--tools", "calculator"]) == 0
    assert "not called, because the row has no 'solution', which an episode may add" in capsys.readouterr().err
    Path("chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "6+6="}]}\n')
    assert main([*argv, "chat.jsonl", "--reward-funcs", "length"]) == 0
    assert "reward length on chat.jsonl:1: 2 with the placeholder '42' as the completion" in capsys.readouterr().err
    assert main([*argv, "chat.jsonl"]) == 2
    assert "reward_funcs=exact_match: requires 'answer', which chat.jsonl:1" in capsys.readouterr().err
    assert main([*argv, "data.jsonl", "--reward-funcs", "dry_rewards.missing"]) == 2
    assert "error: reward_funcs=dry_rewards.missing" in capsys.readouterr().err


def test_an_interrupted_run_of_objects_is_resumed_by_the_same_call(tmp_path):
    class Interrupts(Callback):
        def on_step(self, training, metrics):
            raise KeyboardInterrupt

    size = {"per_device_train_batch_size": 8, "max_completion_length": 4, "max_steps": 2}
    with pytest.raises(KeyboardInterrupt, match=r"step 0: the same call and resume='.*/run'"):
        train("grpo", model="builtin:tiny", data=ROWS, callbacks=Interrupts(), output_dir=tmp_path / "run", **size)


def test_rows_from_python_and_their_errors():
    from datasets import Dataset

    from data.user_code import PythonObject
    from trainer.api import _sources

    table = Dataset.from_list(ROWS)
    for rows in (ROWS, iter(ROWS), table, table.to_iterable_dataset(), table.to_pandas()):
        (source,) = _sources(rows, "data")
        read = load_rows(parse_spec(source))
        assert [row.columns for row in read] == ROWS and read[1].source == "data:2" and str(source) == "python:data"
    assert _sources(["a.jsonl", ROWS], "data")[0] == "a.jsonl" and _sources("task:addition", "data") == (
        "task:addition",
    )
    with pytest.raises(ValueError, match="data:2: .*not int"):
        list(load_rows(parse_spec(PythonObject("python:data", [{}, 3]))))
    with pytest.raises(ValueError, match="data=python:data: .*resume=FOLDER"):
        parse_spec("python:data")
    assert trainer.__getattr__("Run").__name__ == "Run"
