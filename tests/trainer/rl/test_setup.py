"""GRPO runs with tools and with rollout functions, by the real command."""

from __future__ import annotations

import json

import pytest

from tests.entry import metrics, run_ok

SMALL = (
    "--method", "grpo", "--model", "builtin:tiny", "--data", "task:lookup:split=train,size=16", "--max-steps", 1,
    "--per-device-train-batch-size", 8, "--num-generations", 4, "--max-completion-length", 40, "--save-steps", 0,
    "--reward-funcs", "exact_match", "env", "length",
)  # fmt: skip
MINE = '''
from rollout.episodes.turns import Transcript, turn_seed


def greet(name: str, episode) -> str:
    """Say hello.

    Args:
        name: To whom.
    """
    episode.reward(1.0)
    return f"hello {name}"


async def twice(client, prompt, seed):
    transcript = Transcript(prompt.ids)
    for turn in range(2):
        if turn:
            transcript.insert([20, 21, 22])
        transcript.add(completion := await client.generate(transcript.ids, turn_seed(seed, turn), max_tokens=6))
    return transcript.completion("stop", text=completion.text, columns={"env_reward": 0.5, "num_turns": 2})


def batch(prompts, trainer):
    tokenizer = trainer.processing_class
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    completions = trainer.generate([tokenizer(text)["input_ids"] for text in texts], max_tokens=6)
    return {
        "prompt_ids": [c.prompt_ids for c in completions], "completion_ids": [c.ids for c in completions],
        "logprobs": [c.logps for c in completions], "env_reward": [0.25] * len(completions),
    }


def texts(model, processing_class, prompts, generation_config):
    return [f"[{number}]" for number in range(len(prompts))]
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def run(folder, *words):
    run_ok(*SMALL, *words, "--output-dir", folder / "run", cwd=folder)
    rows = metrics(folder / "run")
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss/total" in row] == [1]
    return rows[-1], samples


def test_a_run_with_tools(folder):
    last, samples = run(
        folder, "--tools", "lookup", "mine.greet", "--tool-format", "pythonic", "--max-turns", 3,
        "--eval-data", "task:lookup:split=eval,size=4",
    )  # fmt: skip
    assert 1 <= last["rollout/num_turns"] <= 3 and last["rollout/tool_calls"] >= last["rollout/tool_errors"] >= 0
    assert last["eval/rows"] == 4 and last["rollout/len_max"] <= 40
    assert samples[0]["messages"][0]["role"] == "assistant"


def test_a_run_with_an_async_rollout_function(folder):
    last, _ = run(folder, "--rollout-func", "mine.twice")
    assert last["reward/env/mean"] == 0.5 and last["rollout/num_turns"] == 2
    # Engine and trainer log-probs agree over both turns and the tokens in between.
    assert last["policy/behaviour_gap"] < 1e-4


def test_a_run_with_a_rollout_function_for_trl(folder):
    last, _ = run(folder, "--rollout-func", f"{folder}/mine.py:batch")
    assert last["reward/env/mean"] == 0.25 and last["policy/behaviour_gap"] < 1e-4


@pytest.mark.slow
def test_a_run_with_a_rollout_function_that_returns_texts(folder):
    last, samples = run(folder, "--rollout-func", "mine.texts", "--per-device-train-batch-size", 32)
    assert last["rollout/retokenised_frac"] == 1.0 and last["policy/behaviour_gap"] < 1e-4
    assert samples[0]["completion"] == "[0]"
