from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.rewards.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_rows(path: Path, *columns: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in columns))
    return str(path)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "def shout(completions, prompts, **columns):\n"
        "    return [None if '?' in p else float(c.isupper()) for c, p in zip(completions, prompts)]\n"
        "def chatty(completions):\n"
        "    return [len(c[0]['content']) for c in completions]\n"
        "def broken(completions):\n"
        "    return [float('nan')] * len(completions)\n"
    )
    return tmp_path


def test_the_completion_column_is_scored(files, capsys):
    data = write_rows(
        files / "rows.jsonl",
        {"prompt": "2+2=", "completion": "4", "answer": "4"},
        {"prompt": "2+3=", "completion": "FIVE", "answer": "5"},
        {"prompt": "2+4?", "completion": "6", "answer": "6"},
    )
    assert main(["--check", "my_rewards.shout", "exact_match", "--data", data, "--reward-weights", "1", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "rows.jsonl:3" in out and "FIVE" in out and "2+4?" in out
    assert "shout: mean 0.5, std 0.7071, None 1 of 3" in out
    assert "exact_match: mean 0.6667, std 0.5774, None 0 of 3" in out
    assert "total: mean 0.6667, std 0.2887, None 0 of 3" in out


def test_formats_messages_and_the_row_limit(files, capsys):
    rows = [{"question": f"{i}+1=", "answer": f"so #### {i + 1}", "completion": "7"} for i in range(5)]
    data = write_rows(files / "rows.jsonl", *rows)
    assert main(["--check", "exact_match", "--data", data, "--data-format", "gsm8k", "--num-rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "None 0 of 2" in out and "exact_match: all scores are equal" in out and "total" not in out
    messages = [{"role": "assistant", "content": "hello"}]
    data = write_rows(files / "chat.jsonl", {"prompt": [{"role": "user", "content": "hi"}], "completion": messages})
    assert main(["--check", "my_rewards.chatty", "--data", data]) == 0
    assert "chatty: mean 5, std -, None 0 of 1" in capsys.readouterr().out


def test_completions_are_sampled_with_a_model(files, capsys, make_model, tokenizer):
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    make_model("qwen3").save_pretrained(files / "run" / "final")
    tokenizer.save_pretrained(files / "run" / "final")
    data = write_rows(files / "rows.jsonl", *({"prompt": [{"role": "user", "content": f"{i}"}]} for i in range(3)))
    arguments = ["--check", "length", "my_rewards.chatty", "--data", data, "--model", "run"]
    arguments += ["--max-completion-length", "6", "--temperature", "0.9", "--num-generations", "2"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "length: mean" in first and "None 0 of 6" in first
    assert main(arguments) == 0
    assert capsys.readouterr().out == first, "the same seed samples the same completions"
    assert main([*arguments, "--seed", "100"]) == 0
    assert capsys.readouterr().out != first


BAD = {  # arguments: text of the error
    "--check exact_match --data rows.jsonl": "rows.jsonl:2: no column 'completion' (columns: prompt",
    "--check exact_mach --data rows.jsonl": "did you mean 'exact_match'",
    "--check exact_match --data gone.jsonl": "data=gone.jsonl: no such file",
    "--check my_rewards.broken --data one.jsonl": "my_rewards.broken: returned nan for one.jsonl:1",
    "--check length --data one.jsonl": "requires 'completion_ids', which one.jsonl:1",
    "--check exact_match --data odd.jsonl": "odd.jsonl:1: 'completion' is neither text nor a list",
    "--check length --data one.jsonl --model ./nowhere": "model=./nowhere: no such folder",
    "--check length --data one.jsonl --num-rows 0": "num_rows=0",
}


def test_bad_input_prints_one_sentence(files, capsys):
    write_rows(files / "rows.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a"})
    write_rows(files / "one.jsonl", {"prompt": "a", "completion": "b"})
    write_rows(files / "odd.jsonl", {"prompt": "a", "completion": 5, "answer": "5"})
    for arguments, message in BAD.items():
        assert main(arguments.split()) == 2, arguments
        err = capsys.readouterr().err
        assert err.startswith("error: ") and message in err and err.count("\n") == 1, arguments


def test_sampling_with_the_built_in_model_prints_only_the_scores(files, capfd):
    data = write_rows(files / "rows.jsonl", {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"})
    arguments = ["--check", "exact_match", "--data", data, "--model", "builtin:tiny", "--max-completion-length", "4"]
    assert main(arguments) == 0
    printed = capfd.readouterr()
    assert "exact_match: mean" in printed.out
    assert printed.err == "", "no progress bar without a terminal"


def test_the_module_runs_as_a_command(files):
    command = [sys.executable, "-m", "rollout.rewards", "--check", "exact_match", "--data", "gone.jsonl"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=files, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"error: data=gone.jsonl: no such file in {files}; check the path\n"


def test_chat_template_kwargs_reach_the_prompts(files, capsys, make_model, tokenizer, monkeypatch):
    import copy

    from rollout.engines.local import LocalEngine

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT.replace("[assistant]{%", "[assistant]{{ style }}{%")
    make_model("llama").save_pretrained(files / "model")
    tokenizer.save_pretrained(files / "model")
    data = write_rows(files / "rows.jsonl", {"prompt": [{"role": "user", "content": "2"}]})
    arguments = ["--check", "length", "--data", data, "--model", "model", "--max-completion-length", "2"]
    seen, generate = [], LocalEngine.generate

    def spy(engine, requests, sampling):
        seen.extend(tokenizer.decode(request.prompt_ids) for request in requests)
        return generate(engine, requests, sampling)

    monkeypatch.setattr(LocalEngine, "generate", spy)
    for extra in ([], ["--chat-template-kwargs", '{"style": "12345"}']):
        assert main([*arguments, *extra]) == 0
    assert seen == ["[user]2<eos>[assistant]", "[user]2<eos>[assistant]12345"]
    capsys.readouterr()
    assert main([*arguments, "--chat-template-kwargs", '{"stile": 1}']) == 2
    assert "the chat template does not read 'stile'" in capsys.readouterr().err
