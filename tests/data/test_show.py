"""python -m data.show: text, masks, kinds of rows and errors."""

from __future__ import annotations

import pytest

from data.show import ShowConfig, main, quantile_of, with_training

PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "five"}
USER = {"role": "user", "content": "2+2?"}
OPENING = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_pairs(write, capsys):
    assert main(["--data", write(PAIR, PAIR), "--data-format", "chatml.prompt_pairs", "--rows", "1"]) == 0
    output = capsys.readouterr().out
    assert f"rows.jsonl:1 chosen: 14 tokens, 2 trained\n{OPENING}4<|im_end|>\n(12 not trained, 2 trained)\n" in output
    assert (
        f"rows.jsonl:1 rejected: 17 tokens, 5 trained\n{OPENING}five<|im_end|>\n(12 not trained, 5 trained)\n" in output
    )
    assert "rows.jsonl:2" not in output and "tokens in 2 rows" in output and output.count("Below each text") == 1
    assert [line.split()[1::2] for line in output.split("\n") if "prompt" in line][-1] == ["prompt"] + ["12"] * 6


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2+2?", "completion": "4", "label": False}, "undesirable: 6 tokens, 2 trained"),
        ({"prompt": "2+2?", "completion": "4"}, "example: 6 tokens, 2 trained"),
        ({"prompt": "2+2?"}, "prompt: 4 tokens, 0 trained"),
        ({"prompt": "2+2?", "completions": ["a", "b"], "labels": [True, False]}, "steps (right, wrong): 8 tokens"),
        ({"messages": [USER, {"role": "assistant", "content": "4"}]}, "example: 15 tokens, 2 trained"),
        (PAIR, "chosen: 6 tokens, 2 trained"),
        ({**PAIR, "label": 1}, "chosen: 6 tokens, 2 trained"),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            "15 tokens, 2 trained",
        ),
        (
            {"conversations": [USER], "chosen": {"from": "gpt", "value": "4"}, "rejected": "5"},
            "chosen: 14 tokens, 2 trained",
        ),
    ],
)
def test_kind_is_inferred_from_the_columns(write, capsys, row, expected):
    assert main(["--data", write(row)]) == 0
    assert expected in capsys.readouterr().out


def test_targets_and_documents(write, capsys):
    answer = {"role": "assistant", "content": "4"}
    path = write({"messages": [USER, answer, USER, answer]})
    assert main(["--data", path, "--data-format", "ebft_chat_multiturn.transform"]) == 0
    target = f"{OPENING}4<|im_end|>\n{OPENING}4<|im_end|>"
    assert (
        f"rows.jsonl:1 truth: 29 tokens, 4 trained\n{target}\n(12 not trained, 2 trained, 13 not trained, 2 trained)\n"
        in capsys.readouterr().out
    )
    assert main(["--data", path, "--data-format", "ebft_strided_chat.transform", "--max-length", "28"]) == 0
    output = capsys.readouterr()
    assert (
        "rows.jsonl:1 document: 28 tokens, 3 trained\n" in output.out
        and "(12 not trained, 2 trained, 13 not trained, 1 trained)\n" in output.out
    )
    assert "truncated 1 of 1 rows to 28 tokens" in output.err
    assert main(["--data", write({"prompt": "2+2=", "ground_truth": "4"}), "--kind", "truths"]) == 0
    assert "truth: 6 tokens, 2 trained\n2+2=4<|im_end|>\n(4 not trained, 2 trained)\n" in capsys.readouterr().out


TRANSFORM = """
def make(cfg):
    seen = f"{type(cfg).__module__} {cfg.num_generations} {cfg.data.data_format} {cfg.model.system_prompt}: "
    return lambda example: {"prompt": seen + example["q"]}
"""


def test_a_transform_gets_the_config_of_training(write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show_transform.py").write_text(TRANSFORM)
    path = write({"q": "a"}, {"q": "b"})
    assert main(["--data", path, "--data-format", "show_transform.make", "--kind", "prompts"]) == 0
    assert "\ntrainer.methods.grpo 8 show_transform.make None: a\n" in capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(
        "method: rloo\nmodel: builtin:tiny\ndata_format: show_transform.make\nnum_generations: 4\n"
        "data:\n- path: rows.jsonl\n  split: train[1:]\nmax_completion_length: 32\n"
    )
    assert main(["--config", "run.yaml"]) == 0
    output = capsys.readouterr().out
    assert "\ntrainer.methods.rloo 4 show_transform.make None: b\n" in output and "tokens in 1 rows" in output
    assert main(["--config", "run.yaml", "--data", path]) == 0
    assert "tokens in 2 rows" in capsys.readouterr().out
    assert main([]) == 2
    assert "error: --data is required" in capsys.readouterr().err


def test_options_and_lengths(write, capsys):
    path = write({"q": "2+2?", "chosen": "4", "rejected": "5"})
    flags = ["--data", path, "--data-format", "user_defined", "--format.field-prompt", "q", "--max-length", "5"]
    assert main([*flags, "--format.prompt-format", "{prompt}"]) == 0
    output = capsys.readouterr()
    assert "chosen: 5 tokens, 1 trained\n2+2?4\n(4 not trained, 1 trained)\n" in output.out
    assert "1 truncated to max_length=5" in output.err


def test_control_characters_are_escaped(write, capsys):
    assert main(["--data", write({"text": "a\x1b[31mb\r\x9bc"})]) == 0
    assert "\na\\x1b[31mb\\r\\x9bc<|im_end|>\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "-1"], "error: rows=-1"),
        (["--model", "no/such/folder"], "error: model=no/such/folder: no such folder"),
        (["--kind", "sft", "--bad-rows", "skip"], "error: bad_rows: has no effect with kind=sft"),
        (["--data-format", "chatml.intell"], "did you mean 'chatml.intel'"),
        (["--data-format", "my_module.fn"], "error: kind=auto: cannot be inferred"),
        (["--kind", "stepwise"], "rows.jsonl:1: has no 'completions'"),
    ],
)
def test_errors_are_one_sentence(write, capsys, monkeypatch, flags, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["--data", write(PAIR), *flags]) == 2
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1


def test_unknown_columns_name_the_formats_that_read_them(write, capsys):
    for row, sentence in (
        ({"question": "2+2?", "answer": "2+2 #### 4"},
         "columns question, answer: set --data-format gsm8k or question_answer"),
        ({"question": "2+2?", "answer": "4"}, "columns question, answer: set --data-format question_answer"),
        ({"question": "2+2?", "level": 1},
         "columns question, level: set --data-format question_answer and --kind prompts"),
        ({"query": "2+2?", "response": "4"}, "columns query, response: no format reads them"),
        ({"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"},
         "columns instruction, chosen_response, rejected_response: set --data-format chatml or chatml.argilla or"),
    ):  # fmt: skip
        assert main(["--data", write(row)]) == 2
        output = capsys.readouterr().err
        assert output.startswith(f"error: {sentence}") and output.count("\n") == 1, output


def test_quantiles():
    values = list(range(1, 101))
    assert [quantile_of(values, q) for q in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 50, 90, 99, 100]
    assert quantile_of([7], 0.5) == 7


def test_settings_of_the_chat_template(write, tmp_path, capsys):
    (tmp_path / "styled.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (style or '') }}{% endif %}"
    )
    template = ["--chat-template", str(tmp_path / "styled.jinja")]
    kwargs = ["--chat-template-kwargs", '{"style": "Well: "}']
    path = write({"prompt": [USER]}, {"prompt": [USER], "chat_template_kwargs": {"style": "Hm: "}})
    assert main(["--data", path, *template, *kwargs]) == 0
    output = capsys.readouterr().out
    assert f"{OPENING}Well: \n" in output and f"{OPENING}Hm: \n" in output
    assert main(["--data", path, *kwargs]) == 2
    assert "the chat template does not read 'style'" in capsys.readouterr().err


def test_a_config_file_cannot_enable_remote_code(write, tmp_path):
    rows = write({"prompt": "2+2=", "answer": "4"})
    file = tmp_path / "run.yaml"
    text = "method: grpo\nmodel: builtin:tiny\ntrust_remote_code: true\nsystem_prompt: Hi\n"
    file.write_text(f"{text}data: ['{rows}']\n")
    cfg, training = with_training(ShowConfig(config=str(file)))
    assert not cfg.trust_remote_code and cfg.system_prompt == "Hi" and training.model.trust_remote_code
