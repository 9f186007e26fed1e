"""Test train() of trainer/api.py: objects instead of files and flags."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field, fields

import numpy as np
import pytest
import torch
import yaml

import trainer
from data.sources import load_rows, parse_spec
from rollout.model_folder import TINY
from tests.entry import run
from trainer import train

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]


@dataclass
class GRPOConfig:
    """The fields of TRL's class that a script sets; to_dict() lists all of them."""

    output_dir: str = "out"
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
    numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return (
        handlers,
        numbers,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )


def test_a_trl_script_runs_twice_and_after_errors(tmp_path, monkeypatch):
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    problem = [ValueError, KeyboardInterrupt, None]

    async def length_reward(prompts, completions, answer, **columns):
        await asyncio.sleep(0)
        if problem[:1] == [KeyboardInterrupt]:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, which the main thread handles
            await asyncio.sleep(60)
        if problem[:1] == [ValueError]:
            raise ValueError("wrong")
        return [float(len(text)) for text in completions]

    for kind in list(problem):
        arguments = dict(
            model=AutoModelForCausalLM.from_pretrained(TINY),
            processing_class=AutoTokenizer.from_pretrained(TINY),
            reward_funcs=[length_reward],
            args=GRPOConfig(learning_rate=1e-3, max_completion_length=4, max_steps=2),
            train_dataset=ROWS,
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        before = state_of_process()
        with pytest.raises(kind) if kind else nullcontext():
            made = train(**arguments)
        assert state_of_process() == before or kind is ValueError  # the first run imports libraries, which may draw
        problem.pop(0)
    assert list(made.metrics["step"]) == [1, 2] and made.metrics["reward/length_reward/mean"].min() > 0
    saved = yaml.safe_load((made.dir / "config.yaml").read_text())
    assert (
        saved["method"] == "grpo"
        and saved["lora"]["alpha"] == 8
        and saved["lora"]["target_modules"] == ["q_proj", "v_proj"]
    )
    assert saved["model"] == f"python:{TINY}" and saved["data"] == ["python:data"] and saved["learning_rate"] == 1e-3
    assert isinstance(made.generate("1+1=", max_tokens=3), str)
    assert len(made.generate(["1+1=", "2+2="], max_tokens=3)) == 2
    assert (made.save("final_model") / "adapter_model.safetensors").is_file()

    assert problem == []
    # The adapter continues, and a copy of it is the reference.
    options = {"reward_funcs": ["exact_match"], "max_completion_length": 4, "max_steps": 1, "output_dir": "again"}
    again = train("grpo", model=made.model, data=ROWS, beta=0.1, **options)
    assert again.model is made.model and list(again.model.peft_config) == ["default"]
    assert json.loads((again.dir / "metrics.jsonl").read_text())["policy/ref_kl_k3"] == pytest.approx(0, abs=1e-6)

    done = run("--resume", "out", "--max-steps", 3, cwd=tmp_path)
    assert done.returncode == 2 and "model=python:" in done.stderr.splitlines()[-1], done.stderr


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


@pytest.mark.parametrize(("settings", "words"), [
    ({"lora_q": 1, "max_stepz": 2}, ["lora_q", "lora.r", "max_stepz", "max_steps"]),
    ({"beta": "x"}, ["beta=x", "a number"]),
    ({"temperature": -1.0}, ["temperature=-1"]),
    ({"data": {"train": [], "test": []}}, ["data", "dataset['train']"]),
    ({"data": 3}, ["data", "not int"]),
    ({"train_dataset": ROWS}, ["train_dataset", "data"]),
    ({"args": GRPOConfig(), "method": "sft"}, ["GRPOConfig", "grpo", "sft"]),
    ({"args": {"num_generations": 4}, "method": None}, ["args", "method"]),
    ({"peft_config": 3}, ["peft_config", "LoraConfig"]),
    ({"callback": print}, ["callback: unknown key"]),
])  # fmt: skip
def test_mistakes_are_reported_as_by_the_command(settings, words):
    method = settings.pop("method", "grpo")
    with pytest.raises(ValueError) as error:
        train(method, **{"model": "builtin:tiny", "data": ROWS, **settings})
    assert all(word in str(error.value) for word in words), error.value


def test_rows_from_python_and_their_errors():
    from datasets import Dataset

    from data.user_code import PythonObject
    from trainer.api import _sources

    for rows in (ROWS, iter(ROWS), Dataset.from_list(ROWS), Dataset.from_list(ROWS).to_pandas()):
        (source,) = _sources(rows, "data")
        read = load_rows(parse_spec(source))
        assert [row.columns for row in read] == ROWS and read[1].source == "data[1]" and str(source) == "python:data"
    assert _sources(["a.jsonl", ROWS], "data")[0] == "a.jsonl" and _sources("task:addition", "data") == (
        "task:addition",
    )
    with pytest.raises(ValueError, match=r"data\[1\]: .*not int"):
        load_rows(parse_spec(PythonObject("python:data", [{}, 3])))
    with pytest.raises(ValueError, match="data=python:data: .*resume=FOLDER"):
        parse_spec("python:data")
    assert trainer.__getattr__("Run").__name__ == "Run"
