"""What the documents that users come with show: their rows, transforms, rewards and rollout functions run unchanged.

The documents are pages of the web that lost the white space at the beginning of their lines. So the Python is here with
its indentation, and a test holds each snippet to the lines of its document; the rows (JSON) are read from there.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from data.rows.pairs import load_pairs
from data.rows.prompts import load_prompts
from data.rows.stepwise import load_steps
from data.rows.targets import load_targets
from data.rows.transforms import BUILT_IN
from data.rows.unpaired import load_labelled
from rollout.model_folder import TINY
from rollout.rewards.__main__ import main as check
from tests.data.conftest import make_tokenizer
from tests.entry import metrics
from trainer.__main__ import main as train

# Python that defines something a run can be given. Name of a file -> its text.
SNIPPETS = {
    "agent_rewards": """
def my_reward(completions, **kwargs) -> list[float]:
    # completions[i][0]["content"] = text of i-th completion
    # **kwargs contains dataset columns not removed by transform
    return [score_for_each_completion]
""",
    "rewards": """
# rewards.py
import random
def rand_reward_func(completions, **kwargs) -> list[float]:
    return [random.uniform(0, 1) for _ in completions]
def oai_gsm8k_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        label = example["answer"].split("####")[-1].strip().replace(",", "")
        return {
            "prompt": [{"role": "user", "content": example["question"]},],
            "answer": label,
        }
    return transform_fn, {"remove_columns": ["question"]}
""",
    "math_env": r'''
# math_env.py
import re
def math_solver_rollout(model, processing_class, prompts, generation_config=None):
    """
    Custom rollout function that generates step-by-step math solutions.
    Args:
    model: The language model
    processing_class: The tokenizer/processing_class
    prompts: List of prompt dicts (with 'messages' key for chat format)
    generation_config: Optional generation configuration
    Returns:
    List of completion strings
    """
    completions = []
    for prompt in prompts:
        # Apply chat template to prompt
        messages = prompt.get("messages", [])
        formatted_prompt = processing_class.apply_chat_template(
            messages, processing_class=False, add_generation_prompt=True
        )
        # Generate step-by-step solution
        full_response = ""
        for step in range(5): # Max 5 reasoning steps
            current_input = formatted_prompt + full_response + "\nNext step:"
            inputs = processing_class(current_input, return_tensors="pt").to(model.device)
            outputs = model.generate(
                **inputs,
                max_new_tokens=100,
                generation_config=generation_config,
            )
            step_text = processing_class.decode(
                outputs[0][inputs.input_ids.shape[1]:],
                skip_special_tokens=True
            )
            # Check if solution is complete
            if "FINAL ANSWER:" in step_text:
                full_response += step_text
                break
            full_response += step_text + "\n"
        completions.append(full_response)
    return completions
def math_reward(prompts, completions, answers, **kwargs):
    """Reward function that checks mathematical correctness"""
    rewards = []
    for completion, correct_answer in zip(completions, answers):
        # Extract predicted answer
        match = re.search(r"FINAL ANSWER:\s*(.+)", completion)
        predicted = match.group(1).strip() if match else ""
        # Compare with correct answer
        reward = 1.0 if predicted == str(correct_answer) else 0.0
        rewards.append(reward)
    return rewards
def math_transform(cfg, *args, **kwargs):
    """Transform dataset to GRPO format with answer field"""
    def transform_fn(example, processing_class=None):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "answer": str(example["answer"]),
        }
    return transform_fn, {"remove_columns": ["question"]}
''',
    "gdpo_rewards": """
# rewards.py
def format_reward(completions, **kwargs) -> list[float]:
    return [1.0 if len(c) > 10 else 0.0 for c in completions]
def correctness_reward(completions, answers, **kwargs) -> list[float]:
    rewards = []
    for completion, answer in zip(completions, answers):
        # Your scoring logic here
        rewards.append(score)
    return rewards
""",
    "template_reward": '''
def reward_function_name(
    prompts, # List[List[Dict]]: Original prompts
    completions, # List[List[Dict]]: Model generations
    answer=None, # Optional: Ground truth from dataset
    **kwargs # Additional dataset columns
) -> list[float]:
    """Evaluate completions and return rewards (one per completion)."""
    responses = [comp[0]['content'] for comp in completions]
    rewards = []
    for response in responses:
        score = compute_score(response)
        rewards.append(score)
    return rewards
''',
    "correctness": '''
def correctness_reward(prompts, completions, answer, **kwargs):
    """Reward correct answers with high score."""
    responses = [comp[0]['content'] for comp in completions]
    extracted = [extract_final_answer(r) for r in responses]
    return [2.0 if ans == gt else 0.0
            for ans, gt in zip(extracted, answer)]
''',
    "format": r'''
import re
def format_reward(completions, **kwargs):
    """Reward XML-like structured format."""
    pattern = r'<reasoning>.*?</reasoning>\s*<answer>.*?</answer>'
    responses = [comp[0]['content'] for comp in completions]
    return [1.0 if re.search(pattern, r, re.DOTALL) else 0.0
            for r in responses]
''',
    "partial_format": '''
def incremental_format_reward(completions, **kwargs):
    """Award partial credit for format compliance."""
    responses = [comp[0]['content'] for comp in completions]
    rewards = []
    for r in responses:
        score = 0.0
        if '<reasoning>' in r: score += 0.25
        if '</reasoning>' in r: score += 0.25
        if '<answer>' in r: score += 0.25
        if '</answer>' in r: score += 0.25
        # Penalize extra text after closing tag
        if r.count('</answer>') == 1:
            extra_text = r.split('</answer>')[-1].strip()
            score -= len(extra_text) * 0.001
        rewards.append(score)
    return rewards
''',
    "adaptive": '''
class AdaptiveReward:
    def __init__(self, base_reward_func, initial_weight=1.0):
        self.func = base_reward_func
        self.weight = initial_weight
    def __call__(self, *args, **kwargs):
        rewards = self.func(*args, **kwargs)
        return [r * self.weight for r in rewards]
    def adjust_weight(self, success_rate):
        """Increase weight if model struggling, decrease if succeeding."""
        if success_rate < 0.3:
            self.weight *= 1.2
        elif success_rate > 0.8:
            self.weight *= 0.9
''',
    "debug": """
def debug_reward(completions, **kwargs):
    responses = [comp[0]['content'] for comp in completions]
    for i, r in enumerate(responses[:2]):
        print(f"Response {i}: {r[:200]}...")
    return [1.0] * len(responses)
""",
}
# Python of the documents that is no row, transform, reward or rollout function: by its first line, and what it is.
OTHERS = {
    "from datasets import load_dataset, Dataset": "maps a whole table; extract_answer is nowhere defined",
    "def load_custom_knowledge_base(csv_path):": "reads a table; Dataset and CUSTOM_SYSTEM_PROMPT are nowhere defined",
    "from trl import GRPOConfig": "settings of TRL's trainer",
    "training_args = GRPOConfig(": "settings of TRL's trainer",
    "import torch": "a script for TRL's trainer",
    "from unsloth import FastLanguageModel": "a script for Unsloth",
    "# Stage 1: Format compliance": "a script for TRL's trainer",
    "if hasattr(trainer.model, 'merge_and_unload'):": "export of a TRL model",
    "from transformers import pipeline": "inference",
}
# Functions that fail by their own code, whoever calls them, and the sentence a user gets.
BROKEN = {
    "agent_rewards.my_reward": "NameError: name 'score_for_each_completion' is not defined",
    "gdpo_rewards.correctness_reward": "NameError: name 'score' is not defined",
    "template_reward.reward_function_name": "NameError: name 'compute_score' is not defined",
    "correctness.correctness_reward": "NameError: name 'extract_final_answer' is not defined",
}


@pytest.fixture
def seeds(asset) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(asset("seeds").glob("*.txt"))]


@pytest.fixture
def snippets(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, source in SNIPPETS.items():
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


def lines_of(text: str) -> list[str]:
    """Without the white space at either end, and without the rules (|) that a page put between lines."""
    return [line.strip() for line in text.splitlines() if line.strip() not in ("", "|")]


def blocks(text: str, language: str) -> list[tuple[list[str], list[str]]]:
    """(headings above it, lines) of each fenced block."""
    found, headings, block = [], [], None
    for line in lines_of(text):
        if line.startswith("```"):
            if block is not None and block[0] == language:
                found.append((list(headings), block[1:]))
            block = [line[3:].strip()] if block is None else None
        elif block is not None:
            block.append(line)
        elif re.match(r"#+ ", line):
            headings.append(line)
    return found


def write_rows(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_python_block_of_the_documents_is_here_word_for_word(seeds):
    known = {"\n".join(lines_of(source)) for source in SNIPPETS.values()}
    found = [lines for text in seeds for _, lines in blocks(text, "python")]
    assert len(found) == 19, "the documents have changed: sort the new blocks into SNIPPETS and OTHERS"
    for lines in found:
        if lines[0] in OTHERS:
            continue
        own = lines[: lines.index("# Test without training")] if "# Test without training" in lines else lines
        assert "\n".join(own) in known, own[0]
    for name, source in SNIPPETS.items():
        ast.parse(source)
        own = lines_of(source)
        assert any(own == lines[: len(own)] for lines in found), name


ANSWERS = [
    "<reasoning>2 and 2</reasoning>\n<answer>4</answer>",
    "<reasoning>no end",
    "<answer>5</answer> and more",
]
REWARDS = {
    "rewards.rand_reward_func": None,
    "gdpo_rewards.format_reward": [0.0, 0.0, 0.0],  # of a list of one message
    "format.format_reward": [1.0, 0.0, 0.0],
    "partial_format.incremental_format_reward": [1.0, 0.25, 0.492],
    "adaptive.by_format": [2.0, 0.0, 0.0],
    "debug.debug_reward": [1.0, 1.0, 1.0],
}


def test_rewards_go_through_the_check(snippets, capsys):
    with (snippets / "adaptive.py").open("a") as file:  # a class with an argument is made by whoever uses it
        file.write("from format import format_reward\nby_format = AdaptiveReward(format_reward, initial_weight=2.0)\n")
    prompt = [{"role": "user", "content": "2+2="}]
    data = write_rows(snippets / "rows.jsonl", *({"prompt": prompt, "completion": text} for text in ANSWERS))
    assert check(["--check", *REWARDS, "--data", data]) == 0
    said = capsys.readouterr().out
    for name, scores in REWARDS.items():
        mean = f"{sum(scores) / 3:.4g}" if scores is not None else ""
        function = name.partition(".")[2]
        assert re.search(rf"{function}(_2)?: mean {mean}.*None 0 of 3", said), name


def test_rewards_that_are_broken_say_how(snippets, capsys):
    row = {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4", "answer": "4", "answers": "4"}
    data = write_rows(snippets / "rows.jsonl", row)
    for name, sentence in BROKEN.items():
        assert check(["--check", name, "--data", data]) == 2
        assert f"reward_funcs={name}: raised {sentence}" in capsys.readouterr().err


def test_the_reward_of_math_env_takes_texts_and_not_what_its_own_transform_makes(snippets, capsys):
    """It asks for `answers` and searches a text; its transform gives `answer` and messages."""
    text = {"prompt": "2+2=", "completion": "FINAL ANSWER: 4", "answers": 4}
    assert check(["--check", "math_env.math_reward", "--data", write_rows(snippets / "a.jsonl", text)]) == 0
    assert "math_reward: mean 1" in capsys.readouterr().out
    row = {"question": "2+2=", "answer": 4, "completion": "FINAL ANSWER: 4"}
    data = write_rows(snippets / "b.jsonl", row)
    assert check(["--check", "math_env.math_reward", "--data", data, "--data-format", "math_env.math_transform"]) == 2
    assert "reward_funcs=math_env.math_reward: requires 'answers', which" in capsys.readouterr().err


def test_transforms(snippets):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = [{"role": "user", "content": "2+2="}]
    row = write_rows(snippets / "rows.jsonl", {"question": "2+2=", "answer": "It is so.\n#### 1,004"})
    (made,) = load_prompts([row], tokenizer, data_format="rewards.oai_gsm8k_transform")
    assert (made.prompt, made.columns) == (prompt, {"answer": "1004"})
    row = write_rows(snippets / "rows.jsonl", {"question": "2+2=", "answer": 4})
    (made,) = load_prompts([row], tokenizer, data_format="math_env.math_transform")
    assert (made.prompt, made.columns) == (prompt, {"answer": "4"})


def test_the_rollout_function_trains(snippets):
    write_rows(snippets / "rows.jsonl", *({"question": f"{n}+1=", "answer": n + 1} for n in range(2)))
    line = (
        "--method grpo --model builtin:tiny --data rows.jsonl --data-format math_env.math_transform "
        "--rollout-func math_env.math_solver_rollout --reward-funcs rewards.rand_reward_func --num-generations 2 "
        "--per-device-train-batch-size 2 --max-completion-length 16 --max-steps 1 --scale-rewards true --output-dir run"
    )
    assert train(line.split()) in (0, None)
    (step,) = metrics(snippets / "run")
    assert step["rollout/retokenised_frac"] == 1.0 and step["optim/grad_norm"] > 0
    (first, _) = [json.loads(line) for line in (snippets / "run" / "samples.jsonl").read_text().splitlines()]
    assert first["prompt"][0]["content"] in ("0+1=", "1+1=") and first["completion"]


# rows -------------------------------------------------------------------------------------------------------------


def example_row(lines: list[str]) -> dict:
    """A row as documents write it: comments, a comma too many, and ... for every text."""
    text = re.sub(r",(\s*[}\]])", r"\1", re.sub(r"//[^\n]*", "", "\n".join(lines)))
    count = iter(range(1000))
    return json.loads(re.sub(r'"\.\.\."', lambda _: f'"text {next(count)}"', text))


def shared(row: dict) -> dict:
    """Conversations of a pair are the same up to their last message, as the documents say beside them."""
    for name in ("chosen", "rejected"):
        if isinstance(row.get(name), list) and len(row[name]) > 1:
            row[name][0]["content"] = "asked"
    return row


def test_rows(seeds, tmp_path):
    """Every row that the documents show, in the format of the heading above it."""
    loaded = []
    for headings, lines in blocks(seeds[2], "json"):
        section = next(heading for heading in reversed(headings) if re.match(r"### ", heading)).removeprefix("### ")
        name = headings[-1].removeprefix("#### ")
        row = shared(example_row(lines))
        path = write_rows(tmp_path / "rows.jsonl", row)
        kind = name.partition(".")[0]
        tokenizer = make_tokenizer("llama3" if kind == "llama3" else "chatml")
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        if section in ("DPO", "ORPO"):
            (pair,) = load_pairs([path], tokenizer, data_format=name)
            assert pair.chosen_ids != pair.rejected_ids
        else:
            assert section == "KTO"
            if "label" not in row:  # none of these rows says whether its completion is desirable: KTO cannot do without
                with pytest.raises(ValueError, match="rows.jsonl:1: has no 'label'"):
                    load_labelled([path], tokenizer, data_format=name)
            path = write_rows(tmp_path / "rows.jsonl", {**row, "label": "true"})
            (labelled,) = load_labelled([path], tokenizer, data_format=name)
            assert labelled.label is True
        loaded.append(f"{section} {name}")
    assert len(loaded) == 28 and len(set(loaded)) == 28, loaded
    (inline,) = re.findall(r"Dataset format: `(\{.*\})`", seeds[3])
    path = write_rows(tmp_path / "rows.jsonl", example_row([inline]))
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (pair,) = load_pairs([path], tokenizer, data_format="bradley_terry.chat_template")
    assert tokenizer.decode(pair.prompt_ids) == "<system>text 0<user>text 1"


def test_formats_that_yaml_names(seeds, snippets):
    """Every `type:` of a dataset is a format here, or a transform of one of the snippets."""
    names = set()
    for text in seeds:
        for _, lines in blocks(text, "yaml"):
            inside = lines[lines.index("datasets:") :] if "datasets:" in lines else []
            names |= {line.removeprefix("type:").split("#")[0].strip() for line in inside if line.startswith("type:")}
    names.discard("")  # a mapping of fields, which is user_defined here
    assert names - BUILT_IN == {
        "rewards.oai_gsm8k_transform",
        "math_env.math_transform",
        "rewards.prompt_transform",  # which the document does not show
    }
    assert {"chatml", "chatml.intel", "chat_template", "ebft_opencode.transform", "stepwise_supervised"} <= names


def test_fields_that_yaml_names(seeds, snippets):
    """field_messages: responses_create_params.input, user_defined and a gym's rows, as options of --data."""
    told = lines_of(seeds[2])
    for line in ("field_messages: responses_create_params.input", "message_field_role: role", 'field_prompt: "prompt"',
                 'prompt_format: "{prompt}"', 'field_completion: "completion"'):  # fmt: skip
        assert line in told
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "2+2="}]
    data = write_rows(snippets / "gym.jsonl", {"responses_create_params": {"input": turns}, "id": 7})
    options = "field_messages=responses_create_params.input,content_key=content,role_key=role"
    (prompt,) = load_prompts([f"{data}:format=chat_template,{options}"], tokenizer)
    assert prompt.prompt == turns and prompt.columns["id"] == 7
    data = write_rows(snippets / "pairs.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b"})
    options = "field_prompt=prompt,field_chosen=chosen,field_rejected=rejected,prompt_format={prompt}"
    (pair,) = load_pairs([f"{data}:format=user_defined,{options}"], tokenizer)
    assert tokenizer.decode(pair.prompt_ids) == "q"
    data = write_rows(snippets / "targets.jsonl", {"input": "q", "output": "a"})
    (target,) = load_targets([data], tokenizer, data_format="ebft_opencode.transform")
    assert target.columns["ground_truth"] == "a"
    data = write_rows(snippets / "steps.jsonl", {"prompt": "q", "completions": ["a"], "labels": [True]})
    (steps,) = load_steps([data], tokenizer, data_format="stepwise_supervised")
    assert steps.labels[-1] == 1


@pytest.mark.slow
def test_the_trl_script_runs_with_other_import_constructor_and_save_lines(seeds, snippets):
    """The script with model and data of this machine, where flash-attn, torchao and wandb are not installed."""
    found = {lines[0]: lines for text in seeds for _, lines in blocks(text, "python")}
    script = [*found["from trl import GRPOConfig"], *found["import torch"]]
    changed = {
        "from trl import GRPOConfig": "from trainer import train",
        "from trl import GRPOTrainer": "",
        "training_args = GRPOConfig(": "training_args = dict(",
        "trainer = GRPOTrainer(": 'trainer = train("grpo",',
        "trainer.train()": "",
        'trainer.save_model("final_model")': 'trainer.save("final_model")',
        'model_name = "Qwen/Qwen2.5-1.5B-Instruct"': 'model_name = "model"',
        **{line: "" for line in script if re.match("attn_implementation|optim=|report_to", line)},
    }
    assert changed.keys() <= set(script) and len(changed) == 10
    shutil.copytree(TINY, "model")
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(2)]
    space = {"dataset": Dataset.from_list(rows), "extract_final_answer": str.strip}
    for name in ("partial_format", "format", "correctness"):
        exec(SNIPPETS[name], space)
    exec("\n".join(changed.get(line, line) for line in script), space)
    assert list(space["trainer"].metrics["step"]) == [1, 2] and Path("final_model/adapter_config.json").is_file()
    # The document's export and inference.
    space["trainer"].model.merge_and_unload().save_pretrained("production_model")
    space["tokenizer"].save_pretrained("production_model")
    exec("\n".join(found["from transformers import pipeline"]), space | {"SYSTEM_PROMPT": "Add."})
