"""Whatever a user gets wrong ends in one sentence that names it, before anything is trained.

Tables of cases run in a loop: through main() in this process, or the loader for what a loader refuses by itself. The
last test starts processes.
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest

from data.rows.prompts import load_prompts
from data.rows.sft import load_examples
from data.rows.targets import load_targets
from data.show import load_tokenizer
from rollout.model_folder import check_base
from tests.entry import run
from trainer.__main__ import main
from trainer.generate import main as generate
from trainer.policy.load import BUILTIN

TINY = BUILTIN["builtin:tiny"]
TOKENIZER = load_tokenizer("model", "builtin:tiny")
SMALL = ["--max-steps", 1, "--per-device-train-batch-size", 8]
GRPO = ["--method", "grpo", *SMALL, "--num-generations", 4, "--max-completion-length", 4]
SFT = ["--method", "sft", *SMALL]
MODEL, DATA = ["--model", "builtin:tiny"], ["--data", "rows.jsonl"]
ADDITION = ["--data", "task:addition:split=train,size=16"]
LOCAL, VLLM, URL = ["--rollout.engine", "local"], ["--rollout.engine", "vllm"], ["--vllm.url", "http://127.0.0.1:9"]
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


@pytest.fixture
def refused_all(refused):
    """refused_all({name: (argv, *parts)}): each is refused as above; a failure names its entry."""

    def check(cases: dict[str, tuple]) -> None:
        for name, (argv, *parts) in cases.items():
            try:
                refused(argv, *parts)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None

    return check


def check_sentences(cases: dict[str, tuple], load) -> None:
    """Of what load(case) raises, case by case, for rows that a loader refuses without a model."""
    for name, (case, *parts) in cases.items():
        with pytest.raises(ValueError) as caught:
            load(case)
        missing = [part for part in parts if part not in str(caught.value)]
        assert not missing and "\n" not in str(caught.value), f"{name}: {missing} not in: {caught.value}"


def prompts_in(text_or_spec: str, **options) -> list:
    return load_prompts((text_or_spec,), TOKENIZER, **options)


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
    "flag of another method": ([*SFT, "--num-generations", 4], "--num-generations: unknown", "gdpo, grpo, "),
    "value without a flag": (["grpo", *GRPO], "grpo"),
    "not a number": ([*GRPO, "--max-steps", "ten"], "--max-steps=ten"),
    "no model for the data": ([*GRPO, *MODEL], "--data: required"),
    "servers for local": ([*GRPO, *LOCAL, "--vllm.replicas", 2], "vllm.replicas=2", "rollout.engine=local"),
    "sync for local": ([*GRPO, *LOCAL, "--sync.probe-every", 2], "sync.probe_every=2", "--rollout.engine vllm"),
    "async for local": ([*GRPO, *LOCAL, "--async-prefetch"], "async_prefetch=True", "--rollout.engine vllm"),
    "partial rollouts of ebft": (
        ["--method", "ebft", *SMALL, *MODEL, *ADDITION, "--rollout.partial", 0.5],
        "rollout.partial=0.5: has no effect with this method",
    ),
    "batch for servers": (
        [*GRPO, "--rollout.max-batch-size", 4, "--vllm.replicas", 2],
        "rollout.max_batch_size=4",
        "vLLM servers, which vllm.replicas=2 needs",
    ),
    "cache for vllm": ([*GRPO, *VLLM, "--rollout.cache-gib", 4], "rollout.cache_gib=4.0: has no effect"),
    "cache on a CPU": ([*GRPO, *MODEL, *ADDITION, "--rollout.cache-gib", 4], "rollout.cache_gib=4.0", "on a CPU"),
    "no cache": ([*GRPO, "--rollout.cache-gib", 0], "rollout.cache_gib=0.0: must be above 0"),
    "no rows": ([*GRPO, "--rollout.max-batch-size", 0], "rollout.max_batch_size=0: must be 1 or more"),
    "batch for vllm": ([*GRPO, *VLLM, "--rollout.max-batch-size", 4], "rollout.max_batch_size=4", "max-in-flight"),
    "url without http": ([*GRPO, *VLLM, "--vllm.url", "here:8000"], "vllm.url=here:8000", "http://"),
    "url and replicas": ([*GRPO, *VLLM, *URL, "--vllm.replicas", 2], "vllm.replicas=2", "vllm.url"),
    "nobody at url": ([*GRPO, *MODEL, *ADDITION, *VLLM, *URL], "vllm.url=http://127.0.0.1:9", "refused"),
    "no vllm there": ([*GRPO, *MODEL, *ADDITION, *VLLM, "--vllm.python", "none"], "vllm.python=none", "vLLM"),
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
    "4 bit": ([*GRPO, "--load-in-4bit"], "load_in_4bit=True", "--lora.r 16"),
    "4 bit, merged": ([*GRPO, "--lora.r", 2, "--load-in-4bit", "--merge-lora"], "load_in_4bit=True", "trainer.export"),
    "dtype": ([*GRPO, "--dtype", "float16"], "--dtype=float16", "bfloat16"),
    "no weights for rewards": ([*GRPO, "--reward-weights", 1, 2], "reward_weights=[1.0, 2.0]", "1 reward function;"),
    "no data": ([*GRPO, "--data"], "--data: required"),
    "name of TRL": ([*GRPO, "--train-data", "x"], "--train-data: unknown flag; did you mean --data?"),
    "name of axolotl": ([*GRPO, "--base-model", "x"], "--base-model: unknown flag; did you mean --model?"),
    "method of TRL": (["--method", "gspo"], "--method=gspo", "it is a setting of grpo"),
    "no data for sft": (["--method", "sft", *MODEL, "--data"], "--data is empty"),
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


def test_settings(refused_all):
    refused_all(SETTINGS)


YAML = {
    "syntax": ("seed: 1\ndata: [a\n", "c.yaml: not valid YAML in line 3"),
    "nested 700 deep": ("seed: " + "[" * 700 + "]" * 700 + "\n", "c.yaml: is nested too deeply"),
    "two lines in a value": ('data: ["one\\ntwo.jsonl"]\n', "data=one two.jsonl: no such file"),
}


def test_yaml(refused):
    for text, *parts in YAML.values():
        Path("c.yaml").write_text(text)
        refused(["--method", "grpo", "--config", "c.yaml"], *parts)


def test_several_processes(refused, monkeypatch):
    for size in ("2", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        refused([*GRPO, *MODEL, *DATA], f"WORLD_SIZE={size}", "torchrun")


def test_reporting_to_a_package_that_is_not_there(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused([*GRPO, *MODEL, *DATA, "--report-to", "wandb"], "report_to=wandb", "pip install wandb")


def test_output_dir_that_cannot_be(refused):
    Path("file").touch()
    for place in ("file", "file/run-{time}"):
        refused([*GRPO, *MODEL, *DATA, "--output-dir", place], f"output_dir={place.removesuffix('{time}')}")


def test_broken_template_file_is_named(refused):
    Path("t.jinja").write_text("{% if %}")
    refused([*GRPO, "--chat-template", "t.jinja"], "t.jinja", "Expected an expression")


# data ------------------------------------------------------------------------------------------------------------

PROMPTS = {
    "malformed line": (rows(GOOD) + '{"prompt": "1+2=\n', "rows.jsonl:2: not valid JSON"),
    "number of 5000 digits": (rows(GOOD) + '{"answer": ' + "1" * 5000 + "}\n", "rows.jsonl:2: cannot be read as JSON"),
    "not objects": ("[1, 2]\n", "rows.jsonl:1: must be a JSON object"),
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
    "content null": (rows(GOOD, {"prompt": [message(None)]}), "rows.jsonl:2: messages[0]: content is None"),
    "ends with the answer": (rows({"prompt": [message("x"), message("y", "assistant")]}), "rows.jsonl:1", "assistant"),
    "no user turn": (rows({"messages": [message("x", "assistant")]}), "rows.jsonl:1: 'messages' has no user turn"),
    "half a character": (rows(GOOD) + '{"prompt": "\\ud83d"}\n', "rows.jsonl:2: the text contains half a character"),
    "over the context": (rows(GOOD, {"prompt": "1" * 600}), "rows.jsonl:2", "600 prompt tokens", "context of 512"),
}
EXAMPLES = {
    "completion only": ({"completion": "3"}, "rows.jsonl:2: has none of 'messages', 'conversations', 'prompt' with"),
    "prompt only": ({"prompt": "1+2="}, "rows.jsonl:2: has none of"),
    "empty prompt": ({"prompt": "", "completion": "3"}, "rows.jsonl:2: the prompt is empty"),
    "completion not text": ({"prompt": [message("x")], "completion": 3}, "rows.jsonl:2: the completion is of type int"),
    "text not text": ({"text": 3}, "rows.jsonl:2: the text is of type int"),
    "instruction not text": ({"instruction": 3, "output": "3"}, "rows.jsonl:2: 'instruction' or 'input'"),
    "half a character": ({"prompt": "x", "completion": "\ud83d"}, "rows.jsonl:2: the text contains half a character"),
}


def test_prompts(refused, here):
    def load(text: str) -> None:
        Path("rows.jsonl").write_text(text)
        prompts_in("rows.jsonl", max_completion_length=4, context_length=512)

    check_sentences(PROMPTS, load)
    refused([*GRPO, *MODEL, *DATA], "rows.jsonl:2", "600 prompt tokens", "context of 512")


def test_examples(refused, here):
    def load(row: dict) -> None:
        Path("rows.jsonl").write_text(rows(GOOD_SFT, row))
        load_examples(("rows.jsonl",), TOKENIZER, max_length=64)

    check_sentences(EXAMPLES, load)
    refused([*SFT, *MODEL, *DATA], "rows.jsonl:2: the text contains half a character")


def test_rows_of_another_method_name_it(refused):
    pair, labelled = {"prompt": "a", "chosen": "b", "rejected": "c"}, {**GOOD_SFT, "label": True}
    steps = {"prompt": "a", "completions": ["b"], "labels": [True]}
    for method, row, meant in (
        ("dpo", labelled, "prompt, completion, label are for --method kto"),
        ("dpo", GOOD_SFT, "prompt, completion are for --method sft"),
        ("rm", steps, "prompt, completions, labels are for --method prm"),
        ("kto", GOOD_SFT, "prompt, completion are for --method sft"),
        ("sft", pair, "chosen, rejected are for --method dpo, ipo, cpo, simpo, orpo and rm"),
        ("prm", pair, "chosen, rejected are for --method dpo, ipo, cpo, simpo, orpo and rm"),
    ):
        Path("rows.jsonl").write_text(rows(row))
        refused(["--method", method, *MODEL, *DATA], "rows.jsonl:1: has no", f"; rows with {meant}")


def test_nothing_to_imitate(refused):
    Path("rows.jsonl").write_text(rows({"messages": [message("x")]}))
    refused([*SFT, *MODEL, *DATA], "none of the 1 rows has an assistant turn")
    Path("rows.jsonl").write_text(rows(GOOD_SFT))
    refused([*SFT, *MODEL, *DATA, "--max-length", 2], "none of the 1 rows", "max_length=2")


FILES = {
    "csv without the column": ("r.csv", b"question,answer\n1+2,3\n", "r.csv:1", "'prompt'", "question, answer"),
    "csv of uneven rows": ("r.csv", b"prompt,answer\n1+2=,3\n1+2=,3,4\n", "r.csv:2", "header"),
    "csv of a header": ("r.csv", b"prompt,answer\n", "data=r.csv", "no rows"),
    "not utf-8": ("r.jsonl", b'{"prompt": "caf\xe9"}\n', "r.jsonl:1", "UTF-8", "byte 15"),
    "not parquet": ("r.parquet", b"x", "data=r.parquet", "parquet"),
    "not gzip": ("r.jsonl.gz", b"x", "data=r.jsonl.gz"),
    "damaged gzip": ("r.jsonl.gz", gzip.compress(rows(*[GOOD] * 9).encode())[:12] + b"x" * 40, "data=r.jsonl.gz"),
    "json of numbers": ("r.json", b"[1, 2]", "r.json:1", "must be a JSON object"),
    "json of one number": ("r.json", b"5", "data=r.json"),
    "of no known kind": ("r.txt", b"x", "data=r.txt", ".jsonl"),
}


def test_files(here):
    def load(file: tuple[str, bytes]) -> None:
        Path(file[0]).write_bytes(file[1])
        prompts_in(file[0])

    check_sentences({name: ((path, content), *parts) for name, (path, content, *parts) in FILES.items()}, load)


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


def test_specs(refused, here):
    check_sentences(SPECS, prompts_in)
    refused([*GRPO, *MODEL, *DATA, "--eval-data", "task:additoin"], *SPECS["unknown task"][1:])


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


def test_formats_and_transforms(refused, here):
    Path("mine.py").write_text(TRANSFORMS)
    Path("script.py").write_text("raise SystemExit('usage')\n")
    cases = {name: (name, *parts) for name, parts in FORMATS.items()}
    check_sentences(cases, lambda name: prompts_in("rows.jsonl", data_format=name))
    refused([*GRPO, *MODEL, *DATA, "--data-format", "mine.raises"], *FORMATS["mine.raises"])


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
    "regex:(": ("reward_funcs=regex:(", "invalid pattern"),
    "nowhere.fn": ("reward_funcs=nowhere.fn", "no module 'nowhere'"),
    "no_file.py:fn": ("reward_funcs=no_file.py:fn", "does not exist"),
    "mine.missing": ("reward_funcs=mine.missing", "has no 'missing'"),
    "mine.number": ("reward_funcs=mine.number", "int"),
    "broken.fn": ("reward_funcs=broken.fn", "SyntaxError", "(broken.py, line 1)"),
    "needs.fn": ("reward_funcs=needs.fn", "No module named 'nowhere'", "(needs.py, line 1)"),
    "script.fn": ("reward_funcs=script.fn", "SystemExit: usage"),
}
WRONG = {
    "count": ("returned 1 score for 8 completions", "rows.jsonl:"),
    "nan": ("returned nan for rows.jsonl:",),
    "scalar": ("returned float, not a list",),
    "text": ("returned 'good' for rows.jsonl:",),
    "raises": ("raised ZeroDivisionError: division by zero on rows.jsonl:2", "(mine.py, line 6)"),
    "raises_async": ("raised RuntimeError: two lines on rows.jsonl:", "(mine.py, line 7)"),
    "column": ("requires 'solution', which no row of data has (first: rows.jsonl:1", "answer"),
    "exits": ("raised SystemExit: 3 on rows.jsonl:",),
    "huge": ("returned 1e+308 for rows.jsonl:", "+-1e+15"),
    "long": ("returned a number of 5001 digits for rows.jsonl:", "+-1e+15"),
    "escape": ("raised RuntimeError: red \\x1b[31m and \\x07 bell on rows.jsonl:",),
}


def test_rewards_that_are_not_there(refused_all, here):
    Path("mine.py").write_text(REWARDS)
    Path("broken.py").write_text("def (:\n")
    Path("needs.py").write_text("import nowhere\n")
    Path("script.py").write_text("raise SystemExit('usage')\n")
    refused_all({name: ([*GRPO, *MODEL, *DATA, "--reward-funcs", name], *parts) for name, parts in NOT_FOUND.items()})


def test_rewards_that_go_wrong(refused):
    Path("mine.py").write_text(REWARDS)
    Path("rows.jsonl").write_text(rows(GOOD, {**GOOD, "answer": "4"}))
    for name, parts in WRONG.items():
        argv = [*GRPO, *MODEL, *DATA, "--reward-funcs", f"mine.{name}", "--output-dir", "run", "--overwrite-output-dir"]
        refused(argv, f"mine.{name}", *parts, leaves_folder=name != "column")


def test_weights_that_make_rewards_too_large(refused):
    argv = [*GRPO, *MODEL, *DATA, "--reward-funcs", "length", "--reward-weights", "1e300"]
    refused(argv, "reward_weights=1e+300: ", "+-1e+15", leaves_folder=True)


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
INDEX = "model.safetensors.index.json"


def shards(file: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": file}}).encode()


ALIASES = ["a: &a [x, x]", *(f"{b}: &{b} [*{a}, *{a}]" for a, b in itertools.pairwise("abcdefghijklmnopqrstuv"))]
SPOILED = {  # file -> its new content, None to take it away
    "no config": ({"config.json": None}, "contains neither config.json"),
    "config not json": ({"config.json": b"{"}, "config.json", "JSON"),
    "config of another kind": ({"config.json": b'{"model_type": "t5"}'}, "no CausalLM class for model_type=t5"),
    "config of an unknown kind": ({"config.json": b'{"model_type": "nosuch"}'}, "nosuch"),
    "config of more layers": (
        {"config.json": json.dumps({**CONFIG, "num_hidden_layers": 4}).encode()},
        "config.json: 9 tensors", "model.layers.3.input_layernorm.weight",
    ),
    "config of another vocabulary": (
        {"config.json": json.dumps({**CONFIG, "vocab_size": 9}).encode()},
        "config.json: 1 tensors", "model.embed_tokens.weight",
    ),
    "a reward model": (
        {"config.json": json.dumps({**CONFIG, "architectures": ["LlamaForSequenceClassification"]}).encode()},
        "a reward model (LlamaForSequenceClassification)", "--reward-funcs model:m",
    ),
    "no weights": ({"model.safetensors": None}, "model.safetensors"),
    "half the weights": ({"model.safetensors": (TINY / "model.safetensors").read_bytes()[:9999]}, "model.safetensors"),
    "a git-lfs pointer": ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "model.safetensors"),
    "weights in a pickle": ({"model.safetensors": None, INDEX: shards("w.bin"), "w.bin": b"x"}, INDEX, "w.bin"),
    "pickle named by config": (
        {"config.json": json.dumps({**CONFIG, "transformers_weights": "adapter_model.bin"}).encode()},
        "config.json", "adapter_model.bin",
    ),
    "no tokenizer": ({"tokenizer.json": None, "tokenizer_config.json": None}, "tokenizer could not be loaded"),
    "tokenizer not json": ({"tokenizer.json": b"{"}, "tokenizer could not be loaded"),
    "no template": ({"chat_template.jinja": None}, "task:addition:1: chat_template=tokenizer_default", "chatml"),
}  # fmt: skip


def test_model_folders(refused):
    for name, (spoiled, *parts) in SPOILED.items():
        shutil.rmtree("m", ignore_errors=True)
        shutil.copytree(TINY, "m")
        spoil(spoiled)
        refused([*GRPO, "--model", "m", *TASK], *parts, *([] if name == "no template" else ["model=m:"]))


def spoil(spoiled: dict[str, bytes | None]) -> None:
    for file, content in spoiled.items():
        Path("m", file).unlink(missing_ok=True)
        if content is not None:
            Path("m", file).write_bytes(content)


def config(**changes) -> dict[str, bytes]:
    return {"config.json": json.dumps({**CONFIG, **changes}).encode()}


BROKEN = {  # for trainer.generate, in addition to SPOILED
    "config of a list": ({"config.json": b"[]"}, "config.json"),
    "config nested too deep": ({"config.json": b"[" * 99999}, "config.json"),
    "config of bytes": ({"config.json": b"\xff\x00"}, "config.json"),
    "size of another type": (config(hidden_size="big"), "config.json", "hidden_size"),
    "size of another model": (config(num_key_value_heads=2), "model.safetensors", "config.json"),
    "negative size": (config(hidden_size=-1), "config.json", "hidden_size=-1"),
    "no heads": (config(num_attention_heads=0), "config.json", "num_attention_heads=0"),
    "unknown activation": (config(hidden_act="nosuch"), "config.json", "nosuch"),
    "quantised by an unknown method": (config(quantization_config="x"), "config.json"),
    "head that is not there": (config(tie_word_embeddings=False), "lm_head.weight"),
    "no tensors": ({"model.safetensors": b"\2\0\0\0\0\0\0\0{}"}, "weights lack"),
    "empty index": ({"model.safetensors": None, INDEX: b""}, INDEX),
    "index of numbers": ({"model.safetensors": None, INDEX: b"[1]"}, INDEX),
    "index without files": ({"model.safetensors": None, INDEX: b'{"metadata": {}, "weight_map": {}}'}, INDEX),
    "index of a missing shard": ({"model.safetensors": None, INDEX: shards("w.safetensors")}, "w.safetensors"),
    "tokenizer of a list": ({"tokenizer.json": b"[]"}, "tokenizer.json"),
    "tokenizer of an unknown model": ({"tokenizer.json": b'{"added_tokens": [], "model": {}}'}, "tokenizer.json"),
    "tokenizer config of a list": ({"tokenizer_config.json": b"[]"}, "tokenizer_config.json"),
    "template of bytes": ({"chat_template.jinja": b"\xff"}, "tokenizer"),
    "end of another type": ({"generation_config.json": b'{"eos_token_id": "x"}'}, "generation_config.json", "'x'"),
    "generation config of a list": ({"generation_config.json": b"[]"}, "generation_config.json"),
    "stop of a number": ({"config.yaml": b"stop: 5"}, "m/config.yaml", "stop=5"),
    "template set by a run": ({"config.yaml": b"chat_template_kwargs: {chat_template: x}"}, "chat_template"),
    "aliases of aliases": ({"config.yaml": "\n".join(ALIASES).encode()}, "m/config.yaml", "STROP_MAX_YAML_NODES"),
    "alias of itself": ({"config.yaml": b"a: &a [*a]"}, "m/config.yaml", "line 1"),
}  # fmt: skip


def test_generate_names_the_broken_file(here, capsys):
    spoiled_models = {name: (case[0], "model=m:") for name, case in SPOILED.items()}
    del spoiled_models["no template"], spoiled_models["config of another kind"]  # continues text; slow to import
    for name, (spoiled, *parts) in (spoiled_models | BROKEN).items():
        shutil.rmtree("m", ignore_errors=True)
        shutil.copytree(TINY, "m")
        spoil(spoiled)
        try:
            code = generate(["m", "--prompt", "1+1=", "--max-tokens", "1"])
            err = capsys.readouterr().err
            check_sentence(code, err[err.index("error: ") :], *parts)  # after transformers' own report
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from None


def test_pickles_and_adapters_on_the_hub(tmp_path, monkeypatch):
    def cached_file(_: str, name: str, revision: None) -> str:
        if not (tmp_path / name).exists():
            raise OSError(f"no {name}")
        return str(tmp_path / name)

    monkeypatch.setattr("rollout.model_folder.check_hub", lambda *_: None)
    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    check_base("some/model")
    for file, content, part in ((INDEX, shards("w.bin"), "w.bin"), ("adapter_config.json", b'{"r": 4}', "adapter")):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError, match=rf"model=some/model: .*{part}"):
            check_base("some/model")
        (tmp_path / file).unlink()


def test_tokenizer_that_gives_no_ids(refused):
    shutil.copytree(TINY, "m")
    Path("rows.jsonl").write_text(rows({"prompt": "28+31=", "answer": "59"}))
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"] = {word: i for word, i in tokenizer["model"]["vocab"].items() if word in special}
    tokenizer["model"]["merges"] = []
    Path("m/tokenizer.json").write_text(json.dumps(tokenizer))
    for data in (TASK, DATA):
        refused([*GRPO, "--model", "m", *data], ":1: tokenizer: returns no ids for the non-empty text", "+")


def test_models_that_are_not_there(refused_all, monkeypatch):
    """At once: nothing that looks like a path is asked of the hub, and a hub out of reach is asked once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "cache")
    names = {"./no": "no such folder", "/no": "no such folder", "~/no": "no such folder", "a/b/no": "no such folder",
             "builtin:huge": "builtin:tiny", "rows.jsonl": "no such folder", ".": "neither",
             "runs/no": "no such folder;", "no-such/model": "no such folder, not in the hub cache"}  # fmt: skip
    refused_all({"data": ([*GRPO, *MODEL, "--data", "no-such/data"], "data=no-such/data: no such local file")})
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("asks the hub"))
    refused_all({name: ([*GRPO, "--model", name, *TASK], f"model={name}:", part) for name, part in names.items()})
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("asks the hub"))
    rewards = {f"model:{name}": part for name, part in names.items() if "/no" in name or "-" in name}
    refused_all({spec: ([*GRPO, *MODEL, *TASK, "--reward-funcs", spec], f"error: reward_funcs={spec}: {part}")
                 for spec, part in rewards.items()})  # fmt: skip
    dpo = ["--method", "dpo", *SMALL, *MODEL, *TASK, "--ref-model"]
    refused_all({name: ([*dpo, name], f"error: ref_model={name}: no such folder;") for name in ("./no", "runs/no")})


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
    "base that is gone": (4, {"base_model_name_or_path": "/no/base"}, "model=/no/base:", "no such folder"),
    "not lora": (4, {"peft_type": "IA3"}, "model=m:", "LoRA"),
    "modules that are not there": (4, {"target_modules": ["no_proj"]}, "model=m:", "no_proj"),
    "modules it has no weights for": (4, {"target_modules": ["v_proj"]}, "model=m:", "v_proj", "adapter_model"),
    "rank it does not have": (8, {"r": 8}, "model=m:", "size mismatch"),
    "code in the working folder": (4, {"megatron_config": {"x": 1}}, "model=m:", "adapter_config.json", "megatron"),
    "pattern without end": (
        0, {"target_modules": "(([a-z_.0-9]+)+)+!"}, "model=m:", "adapter_config.json", "STROP_MAX_PATTERN_S", " 0.2 s",
    ),
}  # fmt: skip


def test_adapters(refused, adapter, monkeypatch):
    monkeypatch.setenv("STROP_MAX_PATTERN_S", "0.2")
    Path("megatron").mkdir()
    Path("megatron/core.py").write_text("raise SystemExit('imported')")
    shutil.copytree(adapter, "m")
    saved = json.loads(Path("m/adapter_config.json").read_text())
    for rank, changes, *parts in ADAPTERS.values():
        Path("m/adapter_config.json").write_text(json.dumps({**saved, **changes}))
        refused([*GRPO, "--model", "m", *TASK, "--lora.r", rank], *parts)


def test_damaged_adapters(refused, adapter):
    for file, rank in (("adapter_model.safetensors", 4), ("adapter_model.safetensors", 0), ("adapter_config.json", 4)):
        shutil.copytree(adapter, "m", dirs_exist_ok=True)
        Path("m", file).write_bytes(b"{")
        refused([*GRPO, "--model", "m", *TASK, "--lora.r", rank], "model=m:", "adapter")


def test_lora_on_what_it_cannot_adapt(refused):
    for modules in ("nowhere", "lm_head", "norm"):
        argv = [*GRPO, *MODEL, *TASK, "--lora.r", 4, "--lora.target-modules", modules]
        refused(argv, "lora.target_modules", modules)


# energy-based fine-tuning ----------------------------------------------------------------------------------------

STRUCTURED = ["--method", "ebft", *SMALL, "--max-completion-length", 4]
STRIDED = ["--method", "ebft", "--mode", "strided", *SMALL, "--context-length", 4, "--generate-max-len", 2]
REINFORCE = ["--advantage-estimator", "reinforce"]
EBFT = {  # tests/trainer/config/test_ebft.py has the others
    "unknown mode": ([*STRUCTURED, "--mode", "stridded"], "--mode=stridded", "strided"),
    "unknown estimator": ([*STRUCTURED, "--advantage-estimator", "loo"], "--advantage-estimator=loo", "rloo_split"),
    "1 sample, whitened": ([*STRIDED, "--n-samples-per-prompt", 1, *REINFORCE, "--use-whitening"], "use_whitening"),
    "a server in strided": ([*STRIDED, *VLLM], "rollout.engine=vllm", "mode=strided"),
    "stride in structured": ([*STRUCTURED, "--stride", 2], "stride=2", "mode=structured"),
    "no room for a block": ([*STRIDED, "--max-length", 5], "max_length=5", "= 6"),
    "feature model": ([*STRUCTURED, "--feature-model", "./no"], "error: feature_model=./no", "no such folder"),
}  # fmt: skip


def test_ebft_settings(refused_all):
    refused_all(EBFT)


GOOD_TARGET, GOOD_TEXT = GOOD_SFT, {"text": "1+2=3 and 3+4=7"}
TARGETS = {
    "no target": ({"prompt": "1+2="}, "rows.jsonl:2: has no target", "prompt"),
    "target null": ({"prompt": "1+2=", "ground_truth": None}, "rows.jsonl:2: has no target"),
    "empty target": ({"prompt": "1+2=", "completion": " "}, "rows.jsonl:2: the target is empty"),
    "no assistant": ({"messages": [message("x")]}, "rows.jsonl:2: has no assistant turn"),
    "plain text": (GOOD_TEXT, "rows.jsonl:2: has 'text' but no prompt", "--mode strided"),
    "target not text": (
        {"prompt": "1+2=", "completion": 3},
        "rows.jsonl:2: the prompt is text but the target",
    ),
}


def test_ebft_rows(refused):
    def load(row: dict) -> None:
        Path("rows.jsonl").write_text(rows(GOOD_TARGET, row))
        load_targets(("rows.jsonl",), TOKENIZER, max_completion_length=4)

    check_sentences(TARGETS, load)
    refused([*STRUCTURED, *MODEL, *ADDITION, "--eval-data", "rows.jsonl"], "rows.jsonl:2: the prompt is text but")


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
        refused([*argv, *DATA], "documents=2: none has context_length + generate_max_len = 48 tokens")
    Path("long.jsonl").write_text(rows({"text": "1+2=3 " * 20}))
    refused([*STRIDED, *long, *MODEL, "--data", "long.jsonl", "--eval-data", "rows.jsonl"], "documents=2: none has")


@pytest.mark.parametrize("ce_coef", [0, 0.1])
def test_ebft_short_documents_are_left_out_and_counted_or_kept_for_their_own_tokens(here, capsys, ce_coef):
    Path("rows.jsonl").write_text(rows(*[{"text": "1+2"}] * 3, *[GOOD_TEXT] * 2))
    argv = [*STRIDED, *MODEL, *DATA, "--per-device-train-batch-size", 5, "--ce-coef", ce_coef, "--output-dir", "run"]
    assert main([str(word) for word in argv]) == 0
    assert ("data: skipped 3 of 5 documents" in capsys.readouterr().err) == (ce_coef == 0)
    (last,) = [json.loads(line) for line in Path("run/metrics.jsonl").open()]
    assert last["rollout/anchors"] == 2 * (5 if ce_coef == 0 else 2)  # a batch of five, two anchors in each long one


def test_ebft_feature_model_of_a_shorter_context(refused):
    """What the policy can read and its judge cannot is refused by row, before any work."""
    shutil.copytree(TINY, "m")
    Path("m/config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 7}))
    Path("rows.jsonl").write_text(rows(GOOD_TARGET))
    refused([*STRUCTURED, *MODEL, *DATA, "--feature-model", "m"], "rows.jsonl:1", "4 prompt tokens", "context of 7")
    Path("rows.jsonl").write_text(rows(GOOD_TEXT))
    argv = [*STRIDED, "--generate-max-len", 4, "--feature-model", "m", *MODEL, *DATA]
    refused(argv, "documents=1: none has", "longest: 7")


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
    "other data": (["--resume", "run", *TASK], "2 rows then, 8 now"),
    "data that is gone": (["--resume", "run", "--data", "no.jsonl"], "data=no.jsonl"),
    "other weights": (["--resume", "run", "--lora.r", 4], "resume=run/checkpoints/step-00000002", "lora_A"),
    "other method": (["--resume", "run", "--method", "sft"], "--method=sft", "grpo"),
    "other folder": (["--resume", "run", "--output-dir", "other"], "--output-dir=other"),
    "overwrite": (["--resume", "run", "--overwrite-output-dir"], "--overwrite-output-dir"),
    "no such checkpoint": (["--resume", "run/checkpoints/step-00000009"], "step-00000009"),
    "a new run in it": ([*GRPO, *MODEL, *TASK, "--output-dir", "run"], "output_dir=run: already contains a run"),
}


def test_resume_leaves_the_run_as_it_was(refused_all, finished):
    shutil.copytree(finished, "run")
    refused_all(RESUMES)


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


def test_unfinished_run_as_a_model(refused, finished):
    for kept in ("config.yaml", "metrics.jsonl"):
        Path(kept).mkdir()
        shutil.copy(finished / kept, kept)
        refused([*GRPO, "--model", kept, *TASK], f"model={kept}: this run has not finished", f"--resume {kept}")


# the command itself ----------------------------------------------------------------------------------------------


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
    before = files(here)
    done = run(*argv, cwd=here, timeout=60)
    check_sentence(done.returncode, done.stderr, "output_dir=run: already contains a run", "--resume run")
    assert files(here) == before
