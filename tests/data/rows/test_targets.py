"""Prompts with targets: formats, token boundaries, several turns, lengths and errors."""

from __future__ import annotations

import pytest

from data.formats.pairs import PAIR_FORMATS
from data.formats.registry import SFT_FORMATS
from data.rows.prompts import load_prompts
from data.rows.sft import load_examples
from data.rows.targets import TARGET_FORMATS, load_targets


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


USER, ANSWER = user("2+2="), assistant("4")
OPENING = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n"
CHAT = [USER, ANSWER, user("3+3="), assistant("6"), user("thanks")]


def texts(tokenizer, prompt):
    return tokenizer.decode(prompt.ids), tokenizer.decode(prompt.target_ids)


KINDS_OF_ROWS = [
    ({"prompt": "2+2=", "ground_truth": "4"}, "auto", "2+2=", "4<|endoftext|>"),
    ({"prompt": [USER], "ground_truth": "4"}, "auto", OPENING, "4<|im_end|>"),
    ({"prompt": [USER], "ground_truth": "4", "messages": CHAT, "completion": "5"}, "auto", OPENING, "4<|im_end|>"),
    ({"prompt": "2+2=", "completion": "4"}, "auto", "2+2=", "4<|endoftext|>"),
    ({"prompt": "2+2=", "completion": "4", "ground_truth": None}, "auto", "2+2=", "4<|endoftext|>"),
    ({"prompt": [USER], "completion": "4"}, "auto", OPENING, "4<|im_end|>"),
    ({"prompt": [USER], "completion": [ANSWER]}, "auto", OPENING, "4<|im_end|>"),
    ({"prompt": [USER], "completion": "4", "chosen": "5", "rejected": "6"}, "auto", OPENING, "4<|im_end|>"),
    ({"messages": [USER, ANSWER]}, "auto", OPENING, "4<|im_end|>"),
    ({"messages": CHAT}, "auto", OPENING + "4<|im_end|>" + BETWEEN, "6<|im_end|>"),
    ({"instruction": "2+2=", "output": "4"}, "auto", OPENING, "4<|im_end|>"),
    ({"prompt": "2+2=", "chosen": "4"}, "auto", "2+2=", "4<|endoftext|>"),
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "auto", "2+2=", "4<|endoftext|>"),
    ({"prompt": "2+2=", "chosen": [USER, ANSWER]}, "auto", OPENING, "4<|im_end|>"),
    ({"prompt": [USER], "chosen": "4"}, "auto", OPENING, "4<|im_end|>"),
    ({"chosen": [USER, ANSWER], "rejected": [USER, assistant("5")]}, "auto", OPENING, "4<|im_end|>"),
    ({"question": "2+2=", "answer": "4"}, "question_answer", OPENING, "4<|im_end|>"),
    ({"question": "2+2=", "answer": "so\n#### 4"}, "gsm8k", OPENING, "so\n#### 4<|im_end|>"),
    ({"instruction": "2+2=", "input": "", "output": "4"}, "alpaca", OPENING, "4<|im_end|>"),
    ({"question": "2+2=", "chosen": "4", "rejected": "5"}, "chatml.intel", OPENING, "4<|im_end|>"),
    ({"input": "2+2=", "chosen": "4", "rejected": "5"}, "bradley_terry.chat_template", OPENING, "4<|im_end|>"),
    ({"messages": [USER], "chosen": ANSWER, "rejected": ANSWER}, "chat_template", OPENING, "4<|im_end|>"),
    ({"input": "2+2=", "output": "4"}, "ebft_opencode.transform", OPENING, "4<|im_end|>"),
    ({"messages": [USER, assistant("<think>a</think>4")]}, "ebft_reasoning.transform_answer_only", OPENING,
     "4<|im_end|>"),
]  # fmt: skip


def test_kinds_of_rows(write, chatml):
    for row, name, before, target in KINDS_OF_ROWS:
        (prompt,) = load_targets([write(row)], chatml, data_format=name)
        assert texts(chatml, prompt) == (before, target)
        assert prompt.target_mask is None and "remaining_turns" not in prompt.columns
        assert prompt.conversational == (before != "2+2=" and name != "chatml.intel")
        assert prompt.source.endswith("rows.jsonl:1")


def test_all_formats_are_there():
    assert SFT_FORMATS.keys() - {"completion", "input_output"} <= TARGET_FORMATS.keys() | PAIR_FORMATS.keys()
    assert PAIR_FORMATS.keys() & TARGET_FORMATS.keys() == {"auto", "sharegpt"}


def test_sharegpt_rows(write, chatml):
    human, gpt = {"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}
    rows = [{"conversations": [human, gpt]}, {"conversations": [human], "chosen": gpt, "rejected": human | gpt}]
    for name in ("auto", "sharegpt"):
        prompts = load_targets([write(*rows)], chatml, data_format=name)
        assert [prompt.columns["ground_truth"] for prompt in prompts] == ["4", "4"]
        assert [chatml.decode(prompt.ids) for prompt in prompts] == [OPENING] * 2


def test_ids_match_rollouts_and_sft(write, chatml):
    """Prompts match load_prompts; prompt and target match SFT's ids, except for the template's last newline."""
    row = {"prompt": [USER, ANSWER, user("3+3=")], "completion": "6", "answer": 6}
    for change in ({}, {"prompt": "3+3="}):
        path = write({**row, **change})
        system = None if change else "Be brief."
        (prompt,) = load_targets([path], chatml, system_prompt=system)
        (plain,) = load_prompts([path], chatml, system_prompt=system)
        (example,) = load_examples([path], chatml, system_prompt=system)
        assert (prompt.prompt, prompt.ids) == (plain.prompt, plain.ids)
        whole = prompt.ids + prompt.target_ids
        assert whole == example.ids[: len(whole)] and not any(example.mask[len(whole) :])
        assert example.mask[: len(whole)] == [False] * len(prompt.ids) + [True] * len(prompt.target_ids)
        assert prompt.columns == {"completion": "6", "answer": 6, "ground_truth": "6"}


def test_task_rows_are_compared_with_their_completion(chatml):
    prompts = load_targets(["task:addition:size=20,split=sft,sloppy=1.0,weight=0.5"], chatml)
    assert len(prompts) == 20 and {prompt.weight for prompt in prompts} == {0.5}
    for prompt in prompts:
        columns = prompt.columns
        assert texts(chatml, prompt)[1] == f"{columns['completion']}<|im_end|>"
        assert columns["ground_truth"] == columns["completion"]
    assert any(prompt.columns["completion"] != prompt.columns["chosen"] for prompt in prompts)
    assert prompts[0].ids == load_prompts(["task:addition:size=20,split=sft"], chatml)[0].ids


def test_a_token_that_spans_prompt_and_target_belongs_to_the_target(write, tokenizer_of, metaspace_of, capsys):
    tokenizer = tokenizer_of("plain", merges=(("a", "b"),))
    (prompt,) = load_targets([write({"prompt": "xa", "completion": "bc"})], tokenizer)
    assert texts(tokenizer, prompt) == ("x", "abc<|endoftext|>")
    assert prompt.ids + prompt.target_ids[:-1] == tokenizer("xabc", add_special_tokens=False)["input_ids"]
    assert "data: of 1 rows, 1 whose prompt ends inside a token" in capsys.readouterr().err
    tokenizer = metaspace_of()
    (prompt,) = load_targets([write({"prompt": "Once upon", "completion": " a time"})], tokenizer)
    assert tokenizer.convert_ids_to_tokens(prompt.ids) == ["<s>", "\u2581Once", "\u2581upon"]
    assert tokenizer.convert_ids_to_tokens(prompt.target_ids) == ["\u2581a", "\u2581time", "</s>"]


def test_user_turns_of_a_conversation_are_masked(write, chatml):
    (prompt,) = load_targets([write({"messages": CHAT, "id": 7})], chatml, data_format="ebft_chat_multiturn.transform")
    assert texts(chatml, prompt) == (OPENING, f"4<|im_end|>{BETWEEN}6<|im_end|>")
    unmasked = [token for token, on in zip(prompt.target_ids, prompt.target_mask, strict=True) if on]
    assert chatml.decode(unmasked) == "4<|im_end|>6<|im_end|>"
    assert prompt.target_mask == [True] * 2 + [False] * (len(prompt.target_mask) - 4) + [True] * 2
    assert prompt.columns == {"id": 7, "ground_truth": "4", "remaining_turns": CHAT[2:4]}
    whole, _ = load_examples([write({"messages": CHAT[:4]}, {"text": "x"})], chatml)
    assert prompt.ids + prompt.target_ids == whole.ids[:-1]
    rows = [
        {"prompt": [USER], "completion": CHAT[1:]},
        {"prompt": [USER], "ground_truth": "4", "remaining_turns": CHAT[2:]},
    ]
    for same in load_targets([write(*rows)], chatml):
        assert (same.target_ids, same.target_mask) == (prompt.target_ids, prompt.target_mask)
        assert same.columns["remaining_turns"] == CHAT[2:4]


def test_one_row_per_turn(write, chatml):
    path = write({"messages": [USER, ANSWER]}, {"messages": CHAT})
    prompts = load_targets([path], chatml, data_format="ebft_chat_multiturn.transform_all_turns")
    assert [prompt.source.rpartition(":")[2] for prompt in prompts] == ["1#1", "2#1", "2#2"]
    assert [texts(chatml, prompt) for prompt in prompts] == [
        (OPENING, "4<|im_end|>"),
        (OPENING, "4<|im_end|>"),
        (f"{OPENING}4<|im_end|>{BETWEEN}", "6<|im_end|>"),
    ]
    with pytest.raises(ValueError, match="rows.jsonl:1#2: the prompt ends with an assistant turn"):
        twice = write({"messages": [USER, ANSWER, ANSWER]})
        load_targets([twice], chatml, data_format="ebft_chat_multiturn.transform_all_turns")


def test_lengths(write, tokenizer_of, capsys):
    tokenizer = tokenizer_of("plain")
    rows = [{"prompt": "ab", "completion": text} for text in ("cd", "cde", "cdef")]
    path = write(*rows, {"prompt": "abcdefg", "completion": "h"})
    prompts = load_targets([path], tokenizer, max_completion_length=3, max_prompt_length=4, context_length=9)
    assert [texts(tokenizer, prompt)[1] for prompt in prompts] == ["cd<|endoftext|>", "cde", "cde"]
    assert [prompt.columns["ground_truth"] for prompt in prompts] == ["cd", "cde", "cdef"]
    assert capsys.readouterr().err == (
        "data: skipped 1 of 4 prompts longer than max_prompt_length=4\n"
        "data: of 4 rows, 2 with the target truncated to max_completion_length=3\n"
    )
    for limits, message in (
        (dict(max_completion_length=3, context_length=9), r"rows.jsonl:4: 7 prompt tokens \+ max_completion_length=3"),
        (dict(max_completion_length=9, context_length=9), "^max_completion_length=9: leaves no room"),
        (dict(max_completion_length=0), "^max_completion_length=0: "),
        (dict(max_prompt_length=1), "^max_prompt_length=1: all 4 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            load_targets([path], tokenizer, **limits)


def test_a_truncated_target_ends_with_an_assistant_token(write, chatml, capsys):
    path = write({"messages": CHAT})
    name = "ebft_chat_multiturn.transform"
    (whole,) = load_targets([path], chatml, data_format=name)
    length = len(whole.target_ids)
    for limit in range(1, length + 1):
        (prompt,) = load_targets([path], chatml, data_format=name, max_completion_length=limit)
        stop = limit if limit < 2 or limit > length - 2 else 2  # "4" and its end, then the user's turn, then "6" ...
        assert prompt.target_ids == whole.target_ids[:stop]
        assert prompt.target_mask == (None if stop <= 2 else whole.target_mask[:stop])


NO_TARGET = [
    ({"text": "abc"}, "auto", "has 'text' but no prompt .*--mode strided"),
    ({"prompt": "2+2="}, "auto", "has no target: none of 'messages'"),
    ({"prompt": "2+2=", "ground_truth": None}, "auto", "has no target: none of 'messages'"),
    ({"prompt": "2+2=", "ground_truth": ""}, "auto", "the target is empty"),
    ({"prompt": [USER], "ground_truth": " \n"}, "auto", "the target is empty"),
    ({"prompt": [USER], "ground_truth": 4}, "auto", "the target is of type int"),
    ({"prompt": "2+2=", "ground_truth": [ANSWER]}, "auto", "the prompt is text but the target is not"),
    ({"prompt": "2+2=", "ground_truth": "4", "remaining_turns": CHAT[2:]}, "auto", "'remaining_turns' need"),
    ({"prompt": [USER], "completion": [USER]}, "auto", "the target starts with a user message"),
    ({"prompt": [USER], "completion": [assistant("")]}, "auto", "the target has an empty assistant turn"),
    ({"prompt": [USER], "completion": [ANSWER, ANSWER]}, "auto", "the target has two consecutive assistant turns"),
    ({"messages": [USER, assistant(" ")]}, "auto", "the target has an empty assistant turn"),
    ({"messages": [USER]}, "auto", "has no assistant turn"),
    ({"prompt": "", "completion": "4"}, "auto", "the prompt is empty"),
    ({"prompt": [user(" ")], "completion": "4"}, "auto", "the prompt is empty"),
    ({"question": "2+2="}, "gsm8k", "has no 'answer'"),
    ({"prompt": [USER], "completion": [ANSWER, {"role": "tool", "content": "x"}, ANSWER]}, "auto",
     "the target contains a tool message, .*transform_last_turn"),
]  # fmt: skip


def test_a_row_without_a_target_is_an_error_that_names_it(write, chatml):
    for row, name, message in NO_TARGET:
        good = {"prompt": [USER], "completion": "4", "question": "2+2=", "answer": "#### 4"}
        with pytest.raises(ValueError, match=rf"rows.jsonl:2: {message}"):
            load_targets([write(good, row)], chatml, data_format=name)


def test_strided_and_misspelt_formats_are_rejected(write, chatml):
    path = write({"messages": CHAT})
    with pytest.raises(ValueError, match="^data_format=ebft_strided_chat.transform: .*--mode strided"):
        load_targets([path], chatml, data_format="ebft_strided_chat.transform")
    for wrong, meant in (("ebft_opencode.transfrom", "ebft_opencode.transform"), ("chatml.intl", "chatml.intel")):
        with pytest.raises(ValueError, match=f"^data_format={wrong}: no such format; .*{meant}"):
            load_targets([path], chatml, data_format=wrong)


def test_a_users_transform(write, chatml, tmp_path, monkeypatch):
    (tmp_path / "target_rows.py").write_text(
        "def pick(cfg, dataset_idx):\n"
        "    def transform(example, tokenizer=None):\n"
        "        prompt = [{'role': 'user', 'content': example['q'] + cfg}]\n"
        "        return {'prompt': prompt, 'ground_truth': example['a'], 'set': dataset_idx}\n"
        "    return transform, {'remove_columns': '__all__'}\n"
    )
    monkeypatch.chdir(tmp_path)
    specs = [write({"q": "2+2", "a": "4"}), write({"q": "2+2", "a": ""}, name="bad.jsonl")]
    (prompt,) = load_targets(specs[:1], chatml, data_format="target_rows.pick", cfg="=")
    assert texts(chatml, prompt) == (OPENING, "4<|im_end|>")
    assert prompt.columns == {"set": 0, "ground_truth": "4"}
    with pytest.raises(ValueError, match="bad.jsonl:1: the target is empty"):
        load_targets(specs, chatml, data_format="target_rows.pick", cfg="=")


def test_system_prompts_and_plain_text_are_logged(write, chatml, capsys):
    path = write({"prompt": "2+2=", "completion": "4", "question": "2+2=", "chosen": "4", "rejected": "5"})
    load_targets([path], chatml)
    assert "the prompts are plain text" in capsys.readouterr().err
    with pytest.raises(ValueError, match="^system_prompt: has no effect"):
        load_targets([path], chatml, system_prompt="Be brief.")
    capsys.readouterr()
    (prompt,) = load_targets([path], chatml, data_format="chatml.intel", system_prompt="Be brief.")
    assert texts(chatml, prompt)[0] == f"<|im_start|>system\nBe brief.<|im_end|>\n{OPENING}"
    assert capsys.readouterr().err == ""


def test_tools_of_a_pair_and_calls_as_a_target(write, chatml):
    chatml.chat_template = (
        "{% if tools %}<|im_start|>system\n{{ tools[0].name }}<|im_end|>\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    row = {"messages": [USER], "chosen": call, "rejected": ANSWER, "tools": [{"name": "add"}]}
    (prompt,) = load_targets([write(row)], chatml, data_format="chat_template.default")
    assert texts(chatml, prompt) == (f"<|im_start|>system\nadd<|im_end|>\n{OPENING}", "[add]<|im_end|>")
    assert prompt.columns == {"ground_truth": "[add]"}


def test_gsm8k_asset(chatml, asset):
    path = f"{asset('data/gsm8k_test.jsonl.gz')}:split=train[:50]"
    prompts = load_targets([path], chatml, data_format="gsm8k", max_completion_length=10_000)
    plain = load_prompts([path], chatml, data_format="gsm8k")
    assert [prompt.ids for prompt in prompts] == [prompt.ids for prompt in plain]
    for prompt in prompts:
        assert texts(chatml, prompt)[1] == prompt.columns["ground_truth"] + "<|im_end|>"
        assert prompt.columns["ground_truth"].endswith(f"#### {prompt.columns['answer']}")
