"""reasoning-gym as data and as verifier, with the real package; skipped if it is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.rows.prompts import load_prompts
from data.sources import DataSpec, load_rows, parse_spec
from rollout.engine import Completion
from rollout.gyms.reasoning_gym import final_answer, score
from rollout.rewards.table import load_rewards

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
installed = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed: pip install -e '.[rewards]'")


def rows(spec: str) -> list[dict]:
    return [row.columns for row in load_rows(parse_spec(spec))]


def message_of(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def verdicts(examples: list[dict], texts: list[str]) -> list[float | None]:
    columns = {name: [row.get(name) for row in examples] for name in ("metadata", "answer", "reasoning_gym")}
    return score([message_of(text) for text in texts], **columns)


def test_the_answer_is_the_last_tag_or_the_whole_text():
    assert final_answer("<think>3</think><answer> 4 </answer> no: <answer>\n5</answer>") == "5"
    assert final_answer(" -4\n") == "-4"
    assert final_answer("<answer>4") == "<answer>4"


def test_a_spec_keeps_the_settings_of_the_task_as_text():
    assert parse_spec("reasoning_gym:chain_sum:size=5,seed=3,max_terms=2,split=eval,weight=0.5") == DataSpec(
        path="reasoning_gym:chain_sum", split="eval", weight=0.5, options={"size": 5, "seed": 3, "max_terms": "2"}
    )


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_without_the_package_the_error_names_the_extra():
    with pytest.raises(ValueError, match=r"pip install -e '.\[rewards\]'"):
        load_rows(parse_spec("reasoning_gym:chain_sum"))


@installed
def test_rows_of_a_task_with_its_settings():
    examples = rows("reasoning_gym:chain_sum:size=40,max_terms=2,max_digits=1")
    assert len(examples) == 40
    for row in examples:
        expression = row["metadata"]["expression"]
        assert row["answer"] == str(eval(expression))
        assert row["prompt"] == [{"role": "user", "content": f"State the final answer to the following arithmetic "
                                                              f"problem: {expression} ="}]  # fmt: skip
        assert row["reasoning_gym"] == {"task": "chain_sum", "options": {"max_terms": 2, "max_digits": 1}}
        assert row["metadata"]["num_terms"] == 2


@installed
def test_a_list_is_written_with_bars():
    examples = rows("reasoning_gym:basic_arithmetic:size=10,operators=+|-,max_terms=2,min_terms=2")
    assert all("*" not in row["prompt"][0]["content"] and "/" not in row["prompt"][0]["content"] for row in examples)
    assert examples[0]["reasoning_gym"]["options"]["operators"] == ["+", "-"]


@installed
def test_train_and_eval_share_no_question_whatever_the_seed():
    train = rows("reasoning_gym:chain_sum:size=400,max_terms=2,max_digits=1,seed=1")
    held_out = rows("reasoning_gym:chain_sum:split=eval,max_terms=2,max_digits=1,seed=2")
    questions = [row["prompt"][0]["content"] for row in held_out]
    assert len(set(questions)) == len(questions) > 5
    assert not {row["prompt"][0]["content"] for row in train} & set(questions)


@installed
@pytest.mark.parametrize("task", ["ransom_note", "list_functions"])
def test_rows_are_the_same_in_every_process(task):
    """Built in process, one task depends on the hash seed, the other also on the random module's state."""
    code = (
        "import json; from data.sources import load_rows, parse_spec;"
        f"print(json.dumps([row.columns for row in load_rows(parse_spec('reasoning_gym:{task}:size=4'))]))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert len(json.loads(outputs[0])) == 4


@installed
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:chainsum", "no such task; did you mean 'chain_sum'?"),
        ("reasoning_gym:composite", "no such task"),
        ("reasoning_gym:chain_sum:max_term=2", "unknown key 'max_term'; did you mean 'max_terms'?"),
        ("reasoning_gym:chain_sum:min_terms=3,max_terms=2", r"rejects these settings \(max_terms must be"),
        ("reasoning_gym:chain_sum:split=test", "split=test does not exist"),
        ("reasoning_gym:chain_sum:size=0", "size=0 must be 1 or more"),
        ("reasoning_gym:chain_sum:split=eval,size=100,max_terms=2,max_digits=1", "only 17 rows for split=eval"),
    ],
)  # fmt: skip
def test_bad_specs_are_rejected(spec, message):
    with pytest.raises(ValueError, match=message):
        load_rows(parse_spec(spec))


@installed
@pytest.mark.parametrize("task", ["arc_agi", "rearc", "countdown"])
def test_only_the_correct_answer_scores_1(task):
    """arc_agi and rearc compare tuples: naively read from JSON, the correct board scores 0.05."""
    examples = rows(f"reasoning_gym:{task}:size=3")
    through_json = json.loads(json.dumps(examples))
    assert verdicts(through_json, [row["answer"] for row in examples]) == [1.0, 1.0, 1.0]
    assert verdicts(through_json, [f"<answer>{row['answer']}</answer>" for row in examples]) == [1.0, 1.0, 1.0]
    assert max(verdicts(through_json, ["I do not know"] * 3)) < 0.5


@installed
def test_a_text_on_which_the_verifier_fails_scores_0():
    examples = rows("reasoning_gym:prime_factorization:size=2")
    assert verdicts(examples, ["two times three", examples[1]["answer"]]) == [0.0, 1.0]


@installed
def test_the_verifier_uses_the_settings_of_the_rows():
    """decimal_arithmetic rounds to the decimals in its settings; the defaults would compare more digits."""
    examples = rows("reasoning_gym:decimal_arithmetic:size=1,min_num_decimal_places=1,max_num_decimal_places=1")
    close = str(float(examples[0]["answer"]) + 0.01)
    assert verdicts(examples, [close]) == [1.0]
    without = [{**examples[0], "reasoning_gym": None}]
    assert verdicts(without, [close]) == [0.0]


@installed
def test_a_verifier_that_rewards_nonsense_is_reported(capsys):
    rows("reasoning_gym:game_of_life_halting:size=20")
    assert "scores nonsense up to 1" in capsys.readouterr().err


@installed
def test_rows_of_other_data_get_none():
    columns = {"metadata": [None, {"difficulty": 3}], "answer": ["1", "2"]}
    assert score([message_of("1"), message_of("2")], **columns) == [None, None]


@installed
def test_the_reward_scores_rows_from_a_file(asset):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "trainer" / "tiny")
    path = asset("data/rg_add1digit.jsonl.gz")
    prompts = load_prompts([f"{path}:split=train[:3],format=question_answer"], tokenizer)
    texts = [prompts[0].columns["answer"], "7", f"the result is {prompts[2].columns['answer']}"]
    completions = [
        Completion(prompt_ids=p.ids, ids=[5], logps=[0.0], finish_reason="stop", text=text, versions=[(0, 1)])
        for p, text in zip(prompts, texts, strict=True)
    ]
    table = load_rewards(["reasoning_gym"]).score(prompts, completions)
    gold = prompts[2].columns["answer"]
    assert table.totals == [1.0, 0.0, pytest.approx(len(gold) / len(texts[2]))]
