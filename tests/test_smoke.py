"""Every method there is runs out of the box: `python -m trainer --method X --max-steps 2`, no other flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.entry import metrics, run_ok
from trainer.cli import method_names
from trainer.metrics.metrics import describe

ALWAYS = {"step", "loss/total", "optim/grad_norm", "optim/lr", "perf/tokens_per_s", "time/step_s", "data/tokens_total"}
GRPO = {
    "reward/mean", "reward/std", "reward/exact_match/mean", "reward/exact_match/std", "policy/entropy",
    "policy/clip_frac", "policy/behaviour_kl", "loss/policy", "rollout/len_mean", "time/rollout_s",
}  # fmt: skip


SCORERS = {"rm": "AutoModelForSequenceClassification", "prm": "AutoModelForTokenClassification"}  # others write text


@pytest.fixture(scope="module", params=method_names())
def finished(request, tmp_path_factory) -> tuple[str, Path]:
    """(method, its run folder) after the bare command."""
    cwd = tmp_path_factory.mktemp(request.param)
    run_ok("--method", request.param, "--max-steps", "2", cwd=cwd)
    (folder,) = (cwd / "runs").iterdir()
    return request.param, folder


def test_bare_command_trains_two_steps(finished):
    method, folder = finished
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    wanted = ALWAYS | (GRPO if method == "grpo" else set())
    assert wanted <= rows[1].keys(), f"missing {wanted - rows[1].keys()}"
    assert rows[1]["optim/grad_norm"] > 0
    assert rows[2]["data/tokens_total"] > rows[1]["data/tokens_total"] > 0


def test_every_metric_is_in_the_glossary(finished):
    _, folder = finished
    unknown = {name for row in metrics(folder) for name in row if describe(name) is None}
    assert not unknown


def test_run_folder_is_whole(finished):
    method, folder = finished
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["method"] == method and saved["max_steps"] == 2 and saved["model"] == "builtin:tiny"
    assert "<html" in (folder / "report.html").read_text()
    assert (folder / "checkpoints" / "step-00000002" / "manifest.json").exists()
    if method == "grpo":
        samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert {row["step"] for row in samples} == {1, 2}
        assert {"prompt", "completion", "rewards", "advantage"} <= samples[0].keys()


def test_saved_config_reruns_the_same_numbers(finished, tmp_path):
    method, folder = finished
    if method not in ("grpo", "dpo"):
        pytest.skip("the loops of dpo and grpo stand for the rest")
    run_ok("--config", folder / "config.yaml", "--output-dir", tmp_path / "again", cwd=tmp_path)
    first, again = metrics(folder)[-1], metrics(tmp_path / "again")[-1]
    assert again["loss/total"] == first["loss/total"]
    assert again["optim/grad_norm"] == first["optim/grad_norm"]


def test_export_answers_in_plain_transformers(finished):
    from transformers import pipeline

    method, folder = finished
    if method in SCORERS:
        pytest.skip("scores, does not answer")
    answer = pipeline("text-generation", model=str(folder / "final"))(
        [{"role": "user", "content": "12+13="}], max_new_tokens=8, do_sample=False
    )
    reply = answer[0]["generated_text"][-1]
    assert reply["role"] == "assistant" and 0 < len(reply["content"]) < 8


def test_checkpoint_is_a_model_folder(finished):
    """Any checkpoint can be loaded, or trained on, as it lies there."""
    import torch
    import transformers
    from transformers import AutoTokenizer

    method, folder = finished
    kind = getattr(transformers, SCORERS.get(method, "AutoModelForCausalLM"))
    last = folder / "checkpoints" / "step-00000002"
    ids = torch.tensor([AutoTokenizer.from_pretrained(last)("12+13=")["input_ids"]])
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
           "--eval-steps", 2, cwd=tmp_path)  # fmt: skip
    rows = metrics(tmp_path / "run")
    assert [row["reward/log/step"] for row in rows[1:]] == [0.0, 1.0]
    assert [row["reward/log/progress"] for row in rows[1:]] == [0.0, 0.5]
    assert [row["reward/log/characters"] for row in rows[1:]] == pytest.approx([row["reward/mean"] for row in rows[1:]])
    assert rows[0]["eval/log/characters"] == pytest.approx(rows[0]["eval/reward/mean"])
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples and all(row["extra"] == {"characters": row["rewards"]["logs"]} for row in samples)
