"""Every recipe is read without a complaint, and those that are no bare command begin to train."""

from __future__ import annotations

import pytest
import yaml

from tests.entry import ROOT, metrics, run_ok
from trainer.cli import method_names, parse

RECIPES = ROOT / "trainer" / "recipes"
UNFINISHED = {"two_stage_2_correct.yaml", "make_tiny.yaml"}  # begin from a model that an earlier command made
SMALL = (
    "--max-steps", 1, "--per-device-train-batch-size", 16, "--gradient-accumulation-steps", 1, "--max-eval-rows", 8,
    "--save-steps", 0, "--eval-steps", 0,
)  # fmt: skip


def test_recipes_are_read_and_begin_by_saying_what_they_are_for(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in sorted(RECIPES.glob("*.yaml")):
        argv = ["--config", str(path.relative_to(ROOT))]
        argv += ["--model", "builtin:tiny"] if path.name in UNFINISHED else []
        _, cfg, method = parse(argv)
        written = yaml.safe_load(path.read_text())
        assert method == written["method"] and method in method_names(), path
        assert cfg.run.max_steps == written.get("max_steps"), path
        assert path.read_text().startswith("# "), path


def test_grpo_gsm8k_begins_with_three_rewards(asset, tmp_path):
    """The real rows with the embedded model, which knows nothing of them: the first step is what is looked at."""
    rows = asset("data/gsm8k_train.jsonl.gz")
    # A byte is a token here: the question, and the system prompt of the recipe, must fit the small context.
    run_ok(
        "--config", RECIPES / "grpo_gsm8k.yaml", *SMALL, "--model", "builtin:tiny", "--system-prompt", "Think.",
        "--data", f"{rows}:split=train[:300],format=gsm8k", "--eval-data", f"{rows}:split=train[300:600],format=gsm8k",
        "--max-prompt-length", 300, "--max-completion-length", 32, "--output-dir", tmp_path / "run", cwd=tmp_path,
    )  # fmt: skip
    last = metrics(tmp_path / "run")[-1]
    assert {f"reward/{name}/mean" for name in ("last_number", "tagged_format", "tagged_format_partial")} <= last.keys()
    assert last["step"] == 1 and last["rollout/len_max"] <= 32 and last["eval/rows"] == 8


def test_the_rewards_of_grpo_gsm8k_tell_the_three_things_apart():
    from data.types import Prompt
    from rollout.engine import Completion
    from rollout.rewards.table import load_rewards

    recipe = yaml.safe_load((RECIPES / "grpo_gsm8k.yaml").read_text())
    texts = [
        "<think>6 times 7</think><answer>42</answer>",
        "<think>6 times 7</think><answer>41</answer>",
        "<think>6 times 7</think> so it is 42",
        "I do not know",
    ]
    prompts = [Prompt(source=f"row {n}", prompt="q", ids=[1], columns={"answer": "42"}) for n in range(4)]
    completions = [
        Completion(prompt_ids=[1], ids=[5], logps=[0.0], finish_reason="stop", text=text, versions=[(0, 1)])
        for text in texts
    ]
    weights = [float(weight) for weight in recipe["reward_weights"]]
    table = load_rewards(recipe["reward_funcs"], weights).score(prompts, completions)
    assert table.totals == pytest.approx([1 + 0.25 + 0.25, 0.5, 1 + 0.25 * 2 / 5, 0.0])


def test_gdpo_two_rewards_begins_with_either_method(tmp_path):
    """With grpo it is read, with gdpo it trains a step."""
    argv = ["--config", RECIPES / "gdpo_two_rewards.yaml", *SMALL, "--output-dir", tmp_path / "run", "--method"]
    assert parse([*map(str, argv), "grpo"])[2] == "grpo"
    run_ok(*argv, "gdpo", cwd=tmp_path)
    last = metrics(tmp_path / "run")[-1]
    assert last["step"] == 1 and -100 <= last["reward/distance/mean"] < -1
    assert 0 <= last["reward/regex/mean"] < 0.5


@pytest.mark.vllm
@pytest.mark.slow  # starts a server of its own; async runs on the shared one are in tests/rollout/vllm
def test_grpo_async_begins_and_keeps_its_bound_on_staleness(tmp_path):
    run_ok(
        "--config", RECIPES / "grpo_async.yaml", *SMALL, "--max-steps", 4, "--output-dir", tmp_path / "run",
        cwd=tmp_path, timeout=400,
    )  # fmt: skip
    rows = [row for row in metrics(tmp_path / "run") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["rollout/staleness_max"] for row in rows) <= 2
