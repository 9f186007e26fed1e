"""Every method there is runs out of the box: `python -m trainer --method X --max-steps 2`, no other flag.

One that samples and one that reads rows are run so every time, the others with fewer rows of the same data: to render
the thousands of a recipe takes longer than all that follows. Tests marked slow run all of them without a flag.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.entry import metrics, repeatable, run_ok
from trainer.cli import method_names, parse
from trainer.metrics.metrics import describe

ALWAYS = {"step", "loss/total", "optim/grad_norm", "optim/lr", "perf/tokens_per_s", "time/step_s", "data/tokens_total"}
GRPO = {
    "reward/mean", "reward/std", "reward/exact_match/mean", "reward/exact_match/std", "policy/entropy",
    "policy/clip_frac", "policy/behaviour_kl", "loss/policy", "rollout/len_mean", "time/rollout_s",
}  # fmt: skip


CLASSES = {
    "grpo": "AutoModelForCausalLM",
    "rm": "AutoModelForSequenceClassification",
    "prm": "AutoModelForTokenClassification",
}  # of each kind of export, by one method that makes it


BARE = ("grpo", "sft")


def few_rows(method: str) -> list[str]:
    """Flags for the beginning of the data that the method takes by itself."""
    data = parse(["--method", method])[1].data
    (train,), (held_out,) = data.data, data.eval_data
    rows = re.sub("size=[0-9]+", "size=256", train), re.sub("size=[0-9]+", "size=16", held_out)
    return ["--data", rows[0], "--eval-data", rows[1]]


@pytest.mark.parametrize("method", [name for name in method_names() if name not in BARE])
def test_every_method_trains_two_steps(method, tmp_path):
    check_two_steps(method, few_rows(method), tmp_path)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in BARE else [pytest.mark.slow]) for name in method_names()]
)
def test_bare_command_trains_two_steps(method, tmp_path):
    check_two_steps(method, [], tmp_path)


def check_two_steps(method: str, flags: list[str], tmp_path: Path) -> None:
    run_ok("--method", method, "--max-steps", "2", *flags, cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    wanted = ALWAYS | (GRPO if method == "grpo" else set())
    assert wanted <= rows[1].keys(), f"missing {wanted - rows[1].keys()}"
    assert rows[1]["optim/grad_norm"] > 0
    assert rows[2]["data/tokens_total"] > rows[1]["data/tokens_total"] > 0
    assert not {name for row in rows for name in row if describe(name) is None}, "every metric is in the glossary"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["method"] == method and saved["max_steps"] == 2 and saved["model"] == "builtin:tiny"
    assert "<html" in (folder / "report.html").read_text()
    assert (folder / "checkpoints" / "step-00000002" / "manifest.json").exists()
    if method == "grpo":
        samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert {row["step"] for row in samples} == {1, 2}
        assert {"prompt", "completion", "rewards", "advantage"} <= samples[0].keys()
        answer_in_plain_transformers(folder)
        run_ok("--config", folder / "config.yaml", "--output-dir", tmp_path / "again", cwd=tmp_path)
        assert repeatable(metrics(tmp_path / "again")) == repeatable(rows)
    if method in CLASSES:
        checkpoint_is_a_model_folder(folder, CLASSES[method])


def answer_in_plain_transformers(folder: Path) -> None:
    from transformers import pipeline

    answer = pipeline("text-generation", model=str(folder / "final"))(
        [{"role": "user", "content": "12+13="}], max_new_tokens=8, do_sample=False
    )
    reply = answer[0]["generated_text"][-1]
    assert reply["role"] == "assistant" and 0 < len(reply["content"]) < 8


def checkpoint_is_a_model_folder(folder: Path, class_name: str) -> None:
    """Any checkpoint can be loaded, or trained on, as it lies there."""
    import torch
    import transformers

    kind, last = getattr(transformers, class_name), folder / "checkpoints" / "step-00000002"
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(last)("12+13=")["input_ids"]])
    logits = [kind.from_pretrained(path)(ids).logits for path in (last, folder / "final")]
    assert torch.equal(*logits)


LOGGING = """
def logs(completions, trainer_state, log_extra, log_metric, **columns):
    lengths = [len(c) for c in completions]
    log_extra("characters", lengths)
    log_metric("characters", sum(lengths) / len(lengths))
    log_metric("step", trainer_state.global_step)
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return lengths
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_rewards_log_is_in_the_files_of_the_run(tmp_path, num_workers):
    (tmp_path / "my_rewards.py").write_text(LOGGING)
    workers = ["--reward-num-workers", num_workers] if num_workers else []
    run_ok("--method", "grpo", "--max-steps", 2, "--reward-funcs", "my_rewards.logs", "--output-dir", "run", *workers,
           "--max-eval-rows", 8, "--per-device-train-batch-size", 16, cwd=tmp_path)  # fmt: skip
    rows = metrics(tmp_path / "run")
    assert [row["reward/log/step"] for row in rows[1:]] == [0.0, 1.0]
    assert [row["reward/log/progress"] for row in rows[1:]] == [0.0, 0.5]
    assert [row["reward/log/characters"] for row in rows[1:]] == pytest.approx([row["reward/mean"] for row in rows[1:]])
    assert rows[0]["eval/log/characters"] == pytest.approx(rows[0]["eval/reward/mean"])
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples and all(row["extra"] == {"characters": row["rewards"]["logs"]} for row in samples)
