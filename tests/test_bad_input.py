"""Whatever a user gets wrong ends in one sentence that names it, before anything is trained.

Most cases call main() in this process, because a start costs seconds; the last ones are processes of their own.
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest

from tests.entry import run
from trainer.__main__ import main
from trainer.policy.load import BUILTIN

TINY = BUILTIN["builtin:tiny"]
SMALL = ["--max-steps", 1, "--per-device-train-batch-size", 8]
GRPO = ["--method", "grpo", *SMALL, "--num-generations", 4, "--max-completion-length", 4]
SFT = ["--method", "sft", *SMALL]
MODEL, DATA = ["--model", "builtin:tiny"], ["--data", "rows.jsonl"]
ADDITION = ["--data", "task:addition:split=train,size=16"]
VLLM, URL = ["--rollout.engine", "vllm"], ["--vllm.url", "http://127.0.0.1:9"]
GOOD = {"prompt": [{"role": "user", "content": "1+2="}], "answer": "3"}
GOOD_SFT = {"prompt": "1+2=", "completion": "3"}


def rows(*objects) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


def message(content, role="user"):
    return {"role": role, "content": content}


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, the leavings of Python and of locks aside."""
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.name != ".lock"}


def check_sentence(code: int, stderr: str, *parts: str) -> None:
    """One line that starts with `error: `, as the last word, and in it everything the user needs to find the place."""
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert code == 2 and "Traceback" not in stderr, f"exit code {code}\n{stderr}"
    assert len(errors) == 1 and stderr.endswith(f"{errors[0]}\n"), stderr
    missing = [part for part in parts if part not in errors[0]]
    assert not missing, f"{missing} not in: {errors[0]}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The user's working folder, with good rows in it; modules found in it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("STROP_DEBUG", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(logging, "raiseExceptions", False)  # transformers' logger may hold a stderr of an earlier test
    (tmp_path / "rows.jsonl").write_text(rows(GOOD))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def refused(here, capsys):
    """refused(argv, *parts): main says no in one sentence that holds the parts, and leaves the folder as it was."""

    def check(argv, *parts: str, leaves_folder: bool = False) -> None:
        before = files(here)
        code = main([str(word) for word in argv])
        check_sentence(code, capsys.readouterr().err, *parts)
        if leaves_folder:  # the rewards were called, so the run had begun
            check_nothing_trained(here)
        else:
            assert files(here) == before

    return check


def check_nothing_trained(folder: Path) -> None:
    steps = [json.loads(line)["step"] for path in folder.rglob("metrics.jsonl") for line in path.open()]
    assert all(step == 0 for step in steps)
    assert not list(folder.rglob("*.safetensors"))


def test_what_the_cases_below_spoil_is_good_by_itself(here, capsys):
    assert main([str(word) for word in [*GRPO, *MODEL, *DATA, "--output-dir", "one"]]) == 0
    Path("rows.jsonl").write_text(rows(GOOD_SFT))
    assert main([str(word) for word in [*SFT, *MODEL, *DATA, "--output-dir", "two"]]) == 0
    assert "error:" not in capsys.readouterr().err


# settings --------------------------------------------------------------------------------------------------------

SETTINGS = {
    "unknown method": (["--method", "grop"], "--method=grop", "did you mean grpo?"),
    "unknown module": (["--method", "my.algo"], "--method=my.algo", "no module my"),
    "no method": (["--max-steps", 1], "--method", "grpo"),
    "unknown flag": ([*GRPO, "--num-generation", 4], "--num-generation:", "did you mean --num-generations?"),
    "flag of another method": ([*SFT, "--num-generations", 4], "--num-generations: unknown flag"),
    "value without a flag": (["grpo", *GRPO], "grpo"),
    "not a number": ([*GRPO, "--max-steps", "ten"], "--max-steps=ten"),
    "no model for the data": ([*GRPO, *MODEL], "--data: required"),
    "servers for local": ([*GRPO, "--vllm.replicas", 2], "vllm.replicas=2", "rollout.engine=local"),
    "sync for local": ([*GRPO, "--sync.probe-every", 2], "sync.probe_every=2", "--rollout.engine vllm"),
    "batch for vllm": ([*GRPO, *VLLM, "--rollout.max-batch-size", 4], "rollout.max_batch_size=4", "max-in-flight"),
    "url without http": ([*GRPO, *VLLM, "--vllm.url", "here:8000"], "vllm.url=here:8000", "http://"),
    "url and replicas": ([*GRPO, *VLLM, *URL, "--vllm.replicas", 2], "vllm.replicas=2", "vllm.url"),
    "nobody at url": ([*GRPO, *MODEL, *ADDITION, *VLLM, *URL], "vllm.url=http://127.0.0.1:9", "refused"),
    "no vllm there": ([*GRPO, *MODEL, *ADDITION, *VLLM, "--vllm.python", "none"], "vllm.python=none", "no vLLM"),
    "colocate on a CPU": ([*GRPO, *MODEL, *ADDITION, *VLLM, "--vllm.colocate", "True"], "vllm.colocate=True", "no GPU"),
    "num_generations 1": ([*GRPO, "--num-generations", 1], "num_generations=1"),
    "no whole groups": ([*GRPO, "--num-generations", 3], "num_generations=3", "8 completions"),
    "temperature 0": ([*GRPO, "--temperature", 0], "temperature=0.0"),
    "temperature below 0": ([*GRPO, "--temperature", -1], "temperature=-1.0"),
    "temperature nan": ([*GRPO, "--temperature", "nan"], "temperature=nan"),
    "temperature inf": ([*GRPO, "--temperature", "inf"], "temperature=inf"),
    "epsilon_high": ([*GRPO, "--epsilon-high", -1], "epsilon_high=-1.0"),
    "empty stop": ([*GRPO, "--stop", ""], "stop=''"),
    "learning rate": ([*GRPO, "--learning-rate", "inf"], "learning_rate=inf"),
    "beta of adam": ([*GRPO, "--adam-beta1", 1.5], "adam_beta1=1.5"),
    "weight decay": ([*GRPO, "--weight-decay", -1], "weight_decay=-1.0"),
    "grad norm": ([*GRPO, "--max-grad-norm", "nan"], "max_grad_norm=nan"),
    "epochs": ([*GRPO, "--num-train-epochs", "inf"], "num_train_epochs=inf"),
    "eval rows": ([*GRPO, "--max-eval-rows", -1], "max_eval_rows=-1"),
    "max_length": ([*SFT, "--max-length", 1], "max_length=1"),
    "4 bit": ([*GRPO, "--load-in-4bit"], "load_in_4bit=True"),
    "dtype": ([*GRPO, "--dtype", "float16"], "--dtype=float16", "bfloat16"),
    "no weights for rewards": ([*GRPO, "--reward-weights", 1, 2], "reward_weights=[1.0, 2.0]", "1 reward functions"),
    "no data": ([*GRPO, "--data"], "--data: required"),
    "no data for sft": (["--method", "sft", *MODEL, "--data"], "data: empty"),
    "empty output_dir": ([*GRPO, "--output-dir="], "output_dir: empty"),
    "lora without a rank": ([*GRPO, "--lora.target-modules", "q_proj"], "lora.target_modules", "q_proj", "--lora.r"),
    "lora on nothing": ([*GRPO, "--lora.r", 2, "--lora.target-modules"], "lora.target_modules: empty"),
    "merge without lora": ([*GRPO, "--merge-lora"], "merge_lora=True", "lora.r=0"),
    "template": ([*GRPO, "--chat-template", "chatmll"], "chat_template=chatmll", "chatml"),
    "template of other tokens": ([*GRPO, "--chat-template", "llama3"], "chat_template=llama3", "<|start_header_id|>"),
    "no config file": ([*GRPO, "--config", "no.yaml"], "no.yaml", "No such file"),
    "nothing to resume": (["--resume"], "--resume", "no earlier run in runs"),
    "nothing to resume for it": ([*SFT, "--resume"], "--resume", "sft"),
    "no such run": (["--resume", "runs/no"], "--resume=runs/no"),
    "not a run": (["--resume", "."], "--resume=.", "config.yaml"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(refused, name):
    argv, *parts = SETTINGS[name]
    refused(argv, *parts)


YAML = {
    "unknown key": ("learning_rat: 1\n", "c.yaml: learning_rat: unknown key; did you mean learning_rate?"),
    "unknown key in a block": ("lora: {rank: 4}\n", "c.yaml: lora.rank: unknown key; did you mean lora.r?"),
    "syntax": ("seed: 1\ndata: [a\n", "c.yaml: not valid YAML in line 3"),
    "nested 3,000 deep": ("seed: " + "[" * 3000 + "]" * 3000 + "\n", "c.yaml: is nested too deeply"),
    "two lines in a value": ('data: ["one\\ntwo.jsonl"]\n', "data=one two.jsonl: no such file"),
}


@pytest.mark.parametrize("name", YAML)
def test_yaml(refused, name):
    text, *parts = YAML[name]
    Path("c.yaml").write_text(text)
    refused(["--method", "grpo", "--config", "c.yaml"], *parts)


@pytest.mark.parametrize("size", ["2", "many"])
def test_several_processes(refused, monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    refused([*GRPO, *MODEL, *DATA], f"WORLD_SIZE={size}", "torchrun")


def test_reporting_to_a_package_that_is_not_there(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused([*GRPO, *MODEL, *DATA, "--report-to", "wandb"], "report_to=wandb", "pip install wandb")


@pytest.mark.parametrize("place", ["file", "file/run", "file/run-{time}"])
def test_output_dir_that_cannot_be(refused, place):
    Path("file").touch()
    refused([*GRPO, *MODEL, *DATA, "--output-dir", place], f"output_dir={place.removesuffix('{time}')}")


def test_broken_template_file_is_named(refused):
    Path("t.jinja").write_text("{% if %}")
    refused([*GRPO, "--chat-template", "t.jinja"], "t.jinja", "Expected an expression")


# data ------------------------------------------------------------------------------------------------------------

PROMPTS = {
    "malformed line": (rows(GOOD) + '{"prompt": "1+2=\n', "rows.jsonl:2: is not valid JSON"),
    "number of 5000 digits": (rows(GOOD) + '{"answer": ' + "1" * 5000 + "}\n", "rows.jsonl:2: cannot be read as JSON"),
    "not objects": ("[1, 2]\n", "rows.jsonl:1: is a JSON list"),
    "no rows": ("", "data=rows.jsonl", "no rows"),
    "no prompt": (rows(GOOD, {"question": "1+2?"}), "rows.jsonl:2: has neither 'prompt' nor", "question"),
    "prompt null": (rows(GOOD, {"prompt": None}), "rows.jsonl:2: has neither 'prompt' nor"),
    "empty prompt": (rows(GOOD, {"prompt": ""}), "rows.jsonl:2: the prompt is empty"),
    "blank prompt": (rows(GOOD, {"prompt": " \n"}), "rows.jsonl:2: the prompt is empty"),
    "no messages": (rows(GOOD, {"prompt": []}), "rows.jsonl:2: the prompt is empty"),
    "empty message": (rows(GOOD, {"prompt": [message("")]}), "rows.jsonl:2: the prompt is empty"),
    "not a prompt": (rows(GOOD, {"prompt": 5}), "rows.jsonl:2: messages=5"),
    "wrong key": (rows(GOOD, {"prompt": [{"by": "human", "value": "x"}]}), "rows.jsonl:2: messages[0]", "'by'"),
    "wrong role": (rows(GOOD, {"prompt": [message("x", "usr")]}), "rows.jsonl:2: messages[0]: role='usr'"),
    "content null": (rows(GOOD, {"prompt": [message(None)]}), "rows.jsonl:2: messages[0]: its content is None"),
    "ends with the answer": (rows({"prompt": [message("x"), message("y", "assistant")]}), "rows.jsonl:1", "assistant"),
    "no user turn": (rows({"messages": [message("x", "assistant")]}), "rows.jsonl:1: 'messages' has no user turn"),
    "half a character": (rows(GOOD) + '{"prompt": "\\ud83d"}\n', "rows.jsonl:2: the text holds half a character"),
    "over the context": (rows(GOOD, {"prompt": "1" * 600}), "rows.jsonl:2", "600 tokens", "context of 512"),
}
EXAMPLES = {
    "completion only": ({"completion": "3"}, "rows.jsonl:2: has none of 'messages', 'conversations', 'prompt' with"),
    "prompt only": ({"prompt": "1+2="}, "rows.jsonl:2: has none of"),
    "empty prompt": ({"prompt": "", "completion": "3"}, "rows.jsonl:2: the prompt is empty"),
    "completion not text": ({"prompt": [message("x")], "completion": 3}, "rows.jsonl:2: the completion is a int"),
    "text not text": ({"text": 3}, "rows.jsonl:2: the text is a int"),
    "instruction not text": ({"instruction": 3, "output": "3"}, "rows.jsonl:2: its 'instruction' or 'input'"),
    "role of another tool": ({"messages": [message("x", "human")]}, "rows.jsonl:2: messages[0]: role='human'"),
    "opens with the answer": ({"messages": [message("x", "assistant")]}, "rows.jsonl:2: messages", "assistant turn"),
    "half a character": ({"prompt": "x", "completion": "\ud83d"}, "rows.jsonl:2: the text holds half a character"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(refused, name):
    text, *parts = PROMPTS[name]
    Path("rows.jsonl").write_text(text)
    refused([*GRPO, *MODEL, *DATA], *parts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(refused, name):
    row, *parts = EXAMPLES[name]
    Path("rows.jsonl").write_text(rows(GOOD_SFT, row))
    refused([*SFT, *MODEL, *DATA], *parts)


def test_nothing_to_imitate(refused):
    Path("rows.jsonl").write_text(rows({"messages": [message("x")]}))
    refused([*SFT, *MODEL, *DATA], "none of the 1 rows has an assistant turn")
    Path("rows.jsonl").write_text(rows(GOOD_SFT))
    refused([*SFT, *MODEL, *DATA, "--max-length", 2], "none of the 1 rows", "max_length=2")


FILES = {
    "csv without the column": ("r.csv", b"question,answer\n1+2,3\n", "r.csv:1", "'prompt'", "question, answer"),
    "csv of uneven rows": ("r.csv", b"prompt,answer\n1+2=,3\n1+2=,3,4\n", "r.csv:2", "header"),
    "csv of a header": ("r.csv", b"prompt,answer\n", "data=r.csv", "no rows"),
    "not utf-8": ("r.jsonl", b'{"prompt": "caf\xe9"}\n', "data=r.jsonl", "UTF-8", "byte 15"),
    "not parquet": ("r.parquet", b"x", "data=r.parquet", "parquet"),
    "not gzip": ("r.jsonl.gz", b"x", "data=r.jsonl.gz"),
    "damaged gzip": ("r.jsonl.gz", gzip.compress(rows(*[GOOD] * 9).encode())[:12] + b"x" * 40, "data=r.jsonl.gz"),
    "json of numbers": ("r.json", b"[1, 2]", "r.json:1", "must be an object"),
    "json of one number": ("r.json", b"5", "data=r.json"),
    "of no known kind": ("r.txt", b"x", "data=r.txt", ".jsonl"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(refused, name):
    path, content, *parts = FILES[name]
    Path(path).write_bytes(content)
    refused([*GRPO, *MODEL, "--data", path], *parts)


SPECS = {
    "missing file": ("no.jsonl", "data=no.jsonl: no such file"),
    "unknown task": ("task:additoin", "task:additoin", "did you mean 'addition'?"),
    "unknown split of a task": ("task:addition:split=test", "split=test"),
    "too few held-out problems": ("task:addition:split=eval,size=99999", "size=99999"),
    "unknown option": ("rows.jsonl:spilt=train", "'spilt'", "did you mean 'split'?"),
    "split of a file": ("rows.jsonl:split=test", "data=rows.jsonl: split=test"),
    "split that makes no sense": ("rows.jsonl:split=train[5", "split=train[5"),
    "split beyond the end": ("rows.jsonl:split=train[5:]", "data=rows.jsonl: split=train[5:]"),
    "weight": ("rows.jsonl:weight=0", "weight=0.0"),
    "unknown format": ("rows.jsonl:format=gsm8", "data_format=gsm8", "did you mean 'gsm8k'?"),
}


@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
@pytest.mark.parametrize("name", SPECS)
def test_specs(refused, name, flag):
    spec, *parts = SPECS[name]
    refused([*GRPO, *MODEL, *([] if flag == "--data" else DATA), flag, spec], *parts)


TRANSFORMS = """
def raises(cfg):
    return lambda example: {"prompt": example["nope"]}
def nothing(cfg):
    return lambda example: None
def no_prompt(cfg):
    return lambda example: {"x": 1}, {"remove_columns": ["prompt"]}
def broken(cfg):
    raise RuntimeError("two\\nlines")
"""
FORMATS = {
    "gsm8": ("data_format=gsm8", "did you mean 'gsm8k'?"),
    "gsm8k": ("rows.jsonl:1: has no 'question'",),
    "mine.raises": ("rows.jsonl:1: data_format=mine.raises", "KeyError: 'nope'"),
    "mine.nothing": ("rows.jsonl:1: data_format=mine.nothing", "NoneType"),
    "mine.no_prompt": ("rows.jsonl:1: has neither 'prompt'", "answer, x"),
    "mine.broken": ("data_format=mine.broken", "RuntimeError: two lines"),
    "mine.missing": ("data_format=mine.missing", "no 'missing'"),
    "nowhere.fn": ("data_format=nowhere.fn", "no module 'nowhere'"),
    "script.fn": ("data_format=script.fn", "SystemExit: usage"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_and_transforms(refused, name):
    Path("mine.py").write_text(TRANSFORMS)
    Path("script.py").write_text("raise SystemExit('usage')\n")
    refused([*GRPO, *MODEL, *DATA, "--data-format", name], *FORMATS[name])


def test_completions_that_fill_the_context(refused):
    refused([*GRPO, *MODEL, *DATA, "--max-completion-length", 512], "max_completion_length=512", "context of 512")


def test_prompts_all_too_long(refused):
    refused([*GRPO, *MODEL, *DATA, "--max-prompt-length", 3], "max_prompt_length=3", "all 1 prompts")


# rewards ---------------------------------------------------------------------------------------------------------

REWARDS = """
def count(completions): return [1.0]
def nan(completions): return [1.0] * 7 + [float("nan")]
def scalar(completions): return 1.0
def text(completions): return ["good"] * len(completions)
def raises(completions, answer): return [1 / (int(one) - 4) for one in answer]
async def raises_async(completions): raise RuntimeError("two\\nlines")
def column(completions, solution): return [1.0] * len(completions)
def exits(completions): raise SystemExit(3)
def never(completions): return [None] * len(completions)
def huge(completions): return [1e308] * len(completions)
def long(completions): return [-(10**5000)] * len(completions)
def escape(completions): raise RuntimeError("red \x1b[31m and \x07 bell")
number = 5
"""
NOT_FOUND = {
    "exact_mach": ("reward_funcs=exact_mach", "did you mean 'exact_match'?"),
    "regex:(": ("reward_funcs=regex:(", "not a valid pattern"),
    "nowhere.fn": ("reward_funcs=nowhere.fn", "no module 'nowhere'"),
    "no_file.py:fn": ("reward_funcs=no_file.py:fn", "does not exist"),
    "mine.missing": ("reward_funcs=mine.missing", "has no 'missing'"),
    "mine.number": ("reward_funcs=mine.number", "int"),
    "broken.fn": ("reward_funcs=broken.fn", "SyntaxError", "(broken.py, line 1)"),
    "needs.fn": ("reward_funcs=needs.fn", "No module named 'nowhere'", "(needs.py, line 1)"),
    "script.fn": ("reward_funcs=script.fn", "SystemExit: usage"),
}
WRONG = {
    "count": ("returned 1 scores for 8 completions", "rows.jsonl:"),
    "nan": ("returned nan for rows.jsonl:",),
    "scalar": ("returned float, not a list",),
    "text": ("returned 'good' for rows.jsonl:",),
    "raises": ("raised ZeroDivisionError: division by zero on rows.jsonl:2", "(mine.py, line 6)"),
    "raises_async": ("raised RuntimeError: two lines on rows.jsonl:", "(mine.py, line 7)"),
    "column": ("asks for 'solution', which no row of data has (not rows.jsonl:1", "answer"),
    "exits": ("raised SystemExit: 3 on rows.jsonl:",),
    "huge": ("returned 1e+308 for rows.jsonl:", "rewards are float32, return one within +-1e+15"),
    "long": ("returned a number of 5001 digits for rows.jsonl:", "within +-1e+15"),
    "escape": ("raised RuntimeError: red \\x1b[31m and \\x07 bell on rows.jsonl:",),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_rewards_that_are_not_there(refused, name):
    Path("mine.py").write_text(REWARDS)
    Path("broken.py").write_text("def (:\n")
    Path("needs.py").write_text("import nowhere\n")
    Path("script.py").write_text("raise SystemExit('usage')\n")
    refused([*GRPO, *MODEL, *DATA, "--reward-funcs", name], *NOT_FOUND[name])


@pytest.mark.parametrize("name", WRONG)
def test_rewards_that_go_wrong(refused, name):
    Path("mine.py").write_text(REWARDS)
    Path("rows.jsonl").write_text(rows(GOOD, {**GOOD, "answer": "4"}))
    argv = [*GRPO, *MODEL, *DATA, "--reward-funcs", f"mine.{name}"]
    refused(argv, f"mine.{name}", *WRONG[name], leaves_folder=name != "column")


def test_weights_that_make_rewards_too_large(refused):
    argv = [*GRPO, *MODEL, *DATA, "--reward-funcs", "length", "--reward-weights", "1e300"]
    refused(argv, "reward_weights=1e+300: give a total of", "keep them within +-1e+15", leaves_folder=True)


def test_rows_without_what_the_reward_asks_for(refused):
    Path("rows.jsonl").write_text(rows({"prompt": "1+2="}))
    refused([*GRPO, *MODEL, *DATA], "reward_funcs=exact_match", "'answer'", "rows.jsonl:1")


def test_rewards_that_never_apply_are_no_crash(refused, capsys):
    Path("mine.py").write_text(REWARDS)
    argv = [*GRPO, *MODEL, *DATA, "--eval-data", "rows.jsonl", "--reward-funcs", "mine.never"]
    refused(argv, "reward_funcs=mine.never", "never returned None for all 8 rows", leaves_folder=True)
    argv += ["--reward-none-limit", 0, "--output-dir", "run"]
    assert main([str(word) for word in argv]) == 0
    assert "Held-out evaluation" in Path("run/report.html").read_text()


# models ----------------------------------------------------------------------------------------------------------

TASK = ["--data", "task:addition:size=8"]
CONFIG = json.loads((TINY / "config.json").read_text())
SPOILED = {  # file -> its new content, None to take it away
    "no config": ({"config.json": None}, "holds neither config.json"),
    "config not json": ({"config.json": b"{"}, "config.json", "not a valid JSON"),
    "config of another kind": ({"config.json": b'{"model_type": "t5"}'}, "T5Config"),
    "config of an unknown kind": ({"config.json": b'{"model_type": "nosuch"}'}, "nosuch"),
    "config of more layers": (
        {"config.json": json.dumps({**CONFIG, "num_hidden_layers": 4}).encode()},
        "do not fit its config.json: 9 tensors", "model.layers.3.input_layernorm.weight",
    ),
    "config of another vocabulary": (
        {"config.json": json.dumps({**CONFIG, "vocab_size": 9}).encode()},
        "do not fit its config.json: 1 tensors", "model.embed_tokens.weight",
    ),
    "no weights": ({"model.safetensors": None}, "model.safetensors"),
    "half the weights": ({"model.safetensors": (TINY / "model.safetensors").read_bytes()[:9999]}, "SafetensorError"),
    "a git-lfs pointer": ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "SafetensorError"),
    "no tokenizer": ({"tokenizer.json": None, "tokenizer_config.json": None}, "no tokenizer could be loaded"),
    "tokenizer not json": ({"tokenizer.json": b"{"}, "no tokenizer could be loaded"),
    "no template": ({"chat_template.jinja": None}, "task:addition:1: chat_template=tokenizer_default", "chatml"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_model_folders(refused, name):
    spoiled, *parts = SPOILED[name]
    shutil.copytree(TINY, "m")
    for file, content in spoiled.items():
        Path("m", file).unlink()
        if content is not None:
            Path("m", file).write_bytes(content)
    refused([*GRPO, "--model", "m", *TASK], *parts, *([] if name == "no template" else ["model=m:"]))


@pytest.mark.parametrize("data", [TASK, DATA], ids=["chat", "text"])
def test_tokenizer_that_gives_no_ids(refused, data):
    shutil.copytree(TINY, "m")
    Path("rows.jsonl").write_text(rows({"prompt": "28+31=", "answer": "59"}))
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"] = {word: i for word, i in tokenizer["model"]["vocab"].items() if word in special}
    tokenizer["model"]["merges"] = []
    Path("m/tokenizer.json").write_text(json.dumps(tokenizer))
    refused([*GRPO, "--model", "m", *data], ":1: tokenizer: gives no ids for the non-empty text", "+")


@pytest.mark.parametrize(
    ("name", "part"),
    [("./no", "no such folder"), ("builtin:huge", "builtin:tiny"), ("rows.jsonl", "no such folder"), (".", "neither")],
)
def test_models_that_are_not_there(refused, name, part):
    refused([*GRPO, "--model", name, *TASK], f"model={name}:", part)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A LoRA adapter of rank 4 on the tiny model's q_proj."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    lora = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), lora).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    return folder


ADAPTERS = {  # rank asked for, changes to adapter_config.json
    "another rank": (8, {}, "lora.r=8", "rank 4"),
    "no base": (4, {"base_model_name_or_path": None}, "model=m:", "base_model_name_or_path"),
    "base that is gone": (4, {"base_model_name_or_path": "/no/base"}, "model=m:", "/no/base is no folder here"),
    "not lora": (4, {"peft_type": "IA3"}, "model=m:", "LoRA"),
    "modules that are not there": (4, {"target_modules": ["no_proj"]}, "model=m:", "no_proj"),
    "modules it has no weights for": (4, {"target_modules": ["v_proj"]}, "model=m:", "v_proj", "adapter_model"),
    "rank it does not have": (8, {"r": 8}, "model=m:", "size mismatch"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(refused, adapter, name):
    rank, changes, *parts = ADAPTERS[name]
    shutil.copytree(adapter, "m")
    saved = json.loads(Path("m/adapter_config.json").read_text())
    Path("m/adapter_config.json").write_text(json.dumps({**saved, **changes}))
    refused([*GRPO, "--model", "m", *TASK, "--lora.r", rank], *parts)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("rank", [0, 4])
def test_damaged_adapters(refused, adapter, file, rank):
    shutil.copytree(adapter, "m")
    Path("m", file).write_bytes(b"{")
    refused([*GRPO, "--model", "m", *TASK, "--lora.r", rank], "model=m:", "adapter")


@pytest.mark.parametrize("modules", ["nowhere", "lm_head", "norm"])
def test_lora_on_what_it_cannot_adapt(refused, modules):
    argv = [*GRPO, *MODEL, *TASK, "--lora.r", 4, "--lora.target-modules", modules]
    refused(argv, "lora.target_modules", modules)


# energy-based fine-tuning ----------------------------------------------------------------------------------------

STRUCTURED = ["--method", "ebft", *SMALL, "--max-completion-length", 4]
STRIDED = ["--method", "ebft", "--mode", "strided", *SMALL, "--context-length", 4, "--generate-max-len", 2]
REINFORCE = ["--advantage-estimator", "reinforce"]
EBFT = {
    "unknown mode": ([*STRUCTURED, "--mode", "stridded"], "--mode=stridded", "strided"),
    "unknown pooling": ([*STRUCTURED, "--embed-method", "first"], "--embed-method=first", "last_token"),
    "unknown estimator": ([*STRUCTURED, "--advantage-estimator", "loo"], "--advantage-estimator=loo", "rloo_split"),
    "layer out of range": ([*STRUCTURED, "--feature-layers", 0.5, 1.5], "feature_layers=1.5", "from 0 to 1"),
    "no layer": ([*STRIDED, "--feature-layers"], "feature_layers=[]"),
    "1 rollout, rloo": ([*STRUCTURED, "--num-generations", 1, "--advantage-estimator", "rloo"], "num_generations=1"),
    "1 rollout, grpo": ([*STRUCTURED, "--num-generations", 1, "--advantage-estimator", "grpo"], "num_generations=1"),
    "1 rollout": ([*STRUCTURED, "--num-generations", 1], "num_generations=1", "rloo_split"),
    "1 sample": ([*STRIDED, "--n-samples-per-prompt", 1], "n_samples_per_prompt=1", "rloo_split"),
    "1 rollout, whitened": ([*STRUCTURED, "--num-generations", 1, *REINFORCE, "--use-whitening"], "use_whitening"),
    "1 sample, whitened": ([*STRIDED, "--n-samples-per-prompt", 1, *REINFORCE, "--use-whitening"], "use_whitening"),
    "no whole groups": ([*STRUCTURED, "--num-generations", 3], "num_generations=3", "8 completions"),
    "nothing to learn from": ([*STRIDED, "--rl-coef", 0, "--ce-coef", 0], "rl_coef=0, ce_coef=0"),
    "temperature 0": ([*STRUCTURED, "--temperature", 0], "temperature=0.0"),
    "temperature 0, strided": ([*STRIDED, "--temperature", 0], "temperature=0.0"),
    "groups in strided": ([*STRIDED, "--num-generations", 8], "num_generations=8", "mode=strided"),
    "a server in strided": ([*STRIDED, *VLLM], "rollout.engine=vllm", "mode=strided"),
    "running ahead in strided": ([*STRIDED, "--async-prefetch"], "async_prefetch=True", "mode=strided"),
    "padding in strided": ([*STRIDED, "--no-packing"], "packing=False", "mode=strided"),
    "stride in structured": ([*STRUCTURED, "--stride", 2], "stride=2", "mode=structured"),
    "no room for a block": ([*STRIDED, "--max-length", 5], "max_length=5", "= 6 tokens"),
    "feature model": ([*STRUCTURED, "--feature-model", "./no"], "model=./no", "no such folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", EBFT)
def test_ebft_settings(refused, name):
    argv, *parts = EBFT[name]
    refused(argv, *parts)


GOOD_TARGET, GOOD_TEXT = GOOD_SFT, {"text": "1+2=3 and 3+4=7"}
TARGETS = {
    "no target": ({"prompt": "1+2="}, "rows.jsonl:2: has no true completion", "prompt"),
    "target null": ({"prompt": "1+2=", "ground_truth": None}, "rows.jsonl:2: has no true completion"),
    "empty target": ({"prompt": "1+2=", "completion": " "}, "rows.jsonl:2: the true completion is empty"),
    "no assistant": ({"messages": [message("x")]}, "rows.jsonl:2: has no assistant turn"),
    "plain text": (GOOD_TEXT, "rows.jsonl:2: has a 'text' but no prompt", "--mode strided"),
    "target not text": (
        {"prompt": "1+2=", "completion": 3},
        "rows.jsonl:2: the prompt is text but the true completion",
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_ebft_rows(refused, name):
    row, *parts = TARGETS[name]
    Path("rows.jsonl").write_text(rows(GOOD_TARGET, row))
    refused([*STRUCTURED, *MODEL, *DATA], *parts)
    refused([*STRUCTURED, *MODEL, *ADDITION, "--eval-data", "rows.jsonl"], *parts)


def test_ebft_formats_of_the_other_mode(refused):
    argv = [*STRUCTURED, *MODEL, *DATA, "--data-format", "ebft_strided_chat.transform"]
    refused(argv, "data_format=ebft_strided_chat.transform", "--mode strided")
    argv = [*STRIDED, *MODEL, *DATA, "--data-format", "ebft_opencode.transform"]
    refused(argv, "data_format=ebft_opencode.transform", "--mode structured")


def test_ebft_documents_without_room_for_an_anchor(refused):
    long = ["--context-length", 40, "--generate-max-len", 8]
    Path("rows.jsonl").write_text(rows(GOOD_TEXT, GOOD_TEXT))
    for more in ([], ["--ce-coef", 0.1]):
        argv = [*STRIDED, *long, *more, *MODEL]
        refused([*argv, *DATA], "documents=2: none has room for context_length + generate_max_len = 48 tokens")
    Path("long.jsonl").write_text(rows({"text": "1+2=3 " * 20}))
    refused(
        [*STRIDED, *long, *MODEL, "--data", "long.jsonl", "--eval-data", "rows.jsonl"], "documents=2: none has room"
    )


@pytest.mark.parametrize("ce_coef", [0, 0.1])
def test_ebft_short_documents_are_left_out_and_counted_or_kept_for_their_own_tokens(here, capsys, ce_coef):
    Path("rows.jsonl").write_text(rows(*[{"text": "1+2"}] * 3, *[GOOD_TEXT] * 2))
    argv = [*STRIDED, *MODEL, *DATA, "--per-device-train-batch-size", 5, "--ce-coef", ce_coef, "--output-dir", "run"]
    assert main([str(word) for word in argv]) == 0
    left_out = "data: left out 3 of 5 documents without room for an anchor" in capsys.readouterr().err
    assert left_out == (ce_coef == 0)
    (last,) = [json.loads(line) for line in Path("run/metrics.jsonl").open()]
    assert last["rollout/anchors"] == 2 * (5 if ce_coef == 0 else 2)  # a batch of five, two anchors in each long one


def test_ebft_feature_model_of_a_shorter_context(refused):
    """What the policy can read and its judge cannot is refused by row, before any work."""
    shutil.copytree(TINY, "m")
    Path("m/config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 7}))
    Path("rows.jsonl").write_text(rows(GOOD_TARGET))
    refused([*STRUCTURED, *MODEL, *DATA, "--feature-model", "m"], "rows.jsonl:1", "prompt of 4 tokens", "context of 7")
    Path("rows.jsonl").write_text(rows(GOOD_TEXT))
    argv = [*STRIDED, "--generate-max-len", 4, "--feature-model", "m", *MODEL, *DATA]
    refused(argv, "documents=1: none has room", "longest: 7")


def test_ebft_what_the_cases_above_spoil_is_good_by_itself(here, capsys):
    Path("rows.jsonl").write_text(rows(GOOD_TARGET))
    assert main([str(word) for word in [*STRUCTURED, *MODEL, *DATA, "--output-dir", "one"]]) == 0
    Path("rows.jsonl").write_text(rows(GOOD_TEXT))
    assert main([str(word) for word in [*STRIDED, *MODEL, *DATA, "--output-dir", "two"]]) == 0
    assert "error:" not in capsys.readouterr().err


# runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps with a checkpoint of each, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "rows.jsonl").write_text(rows(GOOD, {**GOOD, "answer": "4"}))
    argv = [*GRPO, *MODEL, "--data", folder / "rows.jsonl", "--max-steps", 2, "--save-steps", 1]
    assert main([str(word) for word in [*argv, "--output-dir", folder / "run"]]) == 0
    return folder / "run"


RESUMES = {
    "other data": (["--resume", "run", *TASK], "2 rows, now 8"),
    "data that is gone": (["--resume", "run", "--data", "no.jsonl"], "data=no.jsonl"),
    "other weights": (["--resume", "run", "--lora.r", 4], "resume=run/checkpoints/step-00000002", "lora_A"),
    "other method": (["--resume", "run", "--method", "sft"], "--method=sft", "grpo"),
    "other folder": (["--resume", "run", "--output-dir", "other"], "--output-dir=other"),
    "overwrite": (["--resume", "run", "--overwrite-output-dir"], "--overwrite-output-dir"),
    "no such checkpoint": (["--resume", "run/checkpoints/step-00000009"], "step-00000009"),
    "a new run in it": ([*GRPO, *MODEL, *TASK, "--output-dir", "run"], "output_dir=run: already holds a run"),
}


@pytest.mark.parametrize("name", RESUMES)
def test_resume_leaves_the_run_as_it_was(refused, finished, name):
    argv, *parts = RESUMES[name]
    shutil.copytree(finished, "run")
    refused(argv, *parts)


def test_damaged_run(refused, finished):
    shutil.copytree(finished, "run")
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    Path("run/metrics.jsonl").write_text("\n".join([lines[0][:9], *lines[1:]]) + "\n")
    refused(["--resume", "run"], "run/metrics.jsonl:1: not a JSON object")
    for state in Path("run/checkpoints").glob("*/state.json"):
        state.write_text("{}")
    refused(["--resume", "run"], "resume=run/checkpoints", "no undamaged checkpoint (2 tried)")
    Path("run/config.yaml").write_text("method: [\n")
    refused(["--resume", "run"], "run/config.yaml: not valid YAML")


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.jsonl"])
def test_unfinished_run_as_a_model(refused, finished, kept):
    Path("run").mkdir()
    shutil.copy(finished / kept, "run")
    refused([*GRPO, "--model", "run", *TASK], "model=run: this run has not finished", "--resume run")


# the command itself ----------------------------------------------------------------------------------------------

REAL = {
    "unknown method": (["--method", "grop"], "--method=grop", "did you mean grpo?"),
    "malformed line": ([*GRPO, *MODEL, "--data", "bad.jsonl"], "bad.jsonl:2: is not valid JSON"),
    "model from a hub out of reach": ([*GRPO, "--model", "no-such/model", *TASK], "model=no-such/model", "no folder"),
    "data from a hub out of reach": ([*GRPO, *MODEL, "--data", "no-such/data"], "data=no-such/data", "no local file"),
}


@pytest.mark.parametrize("name", REAL)
def test_the_command_itself(here, name):
    argv, *parts = REAL[name]
    Path("bad.jsonl").write_text(rows(GOOD) + "{\n")
    before = files(here)
    done = run(*argv, cwd=here, timeout=60)
    check_sentence(done.returncode, done.stderr, *parts)
    assert files(here) == before


def test_the_command_itself_when_a_reward_raises_after_the_folder_is_made(here):
    Path("mine.py").write_text(REWARDS)
    Path("rows.jsonl").write_text(rows(GOOD, {**GOOD, "answer": "4"}))
    argv = [*GRPO, *MODEL, *DATA, "--reward-funcs", "mine.raises", "--output-dir", "run"]
    done = run(*argv, cwd=here, timeout=60)
    check_sentence(done.returncode, done.stderr, "mine.raises", "ZeroDivisionError", "rows.jsonl:2")
    check_nothing_trained(here)
    Path("mine.py").write_text(REWARDS.replace("1 / (int(one) - 4)", "1.0 * int(one)"))
    done = run(*argv, "--max-steps", "1", cwd=here, timeout=60)  # nothing was trained, so the folder may be used again
    assert done.returncode == 0, done.stderr
    done = run(*argv, cwd=here, timeout=60)
    check_sentence(done.returncode, done.stderr, "output_dir=run: already holds a run", "--resume run")
