"""Preference pairs as token ids: boundaries, lengths, options and bad rows."""

from __future__ import annotations

import gzip
import json

import pytest

from data.format_options import FormatOptions
from data.rows.pairs import load_pairs

USER = {"role": "user", "content": "2+2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
OPENING = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def row(prompt="2+2?", chosen="4", rejected="5", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def texts(tokenizer, pair):
    return tuple(tokenizer.decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))


def test_a_token_that_joins_prompt_and_response_counts_as_response(write, tokenizer_of, capsys):
    tokenizer = tokenizer_of("plain", merges=(("a", "b"),))
    (pair,) = load_pairs([write(row("xa", "b", "c"))], tokenizer)
    assert texts(tokenizer, pair) == ("x", "ab<|endoftext|>", "ac<|endoftext|>")
    assert pair.prompt_ids + pair.chosen_ids[:-1] == tokenizer("xab", add_special_tokens=False)["input_ids"]
    assert pair.prompt_ids + pair.rejected_ids[:-1] == tokenizer("xac", add_special_tokens=False)["input_ids"]
    assert "1 whose prompt ends inside a token of the response" in capsys.readouterr().err
    with pytest.raises(ValueError, match="rows.jsonl:1: the prompt's text merges"):
        load_pairs([write(row("a", "b", "c"))], tokenizer)


def test_bos_once_and_eos_once(write, tokenizer_of):
    tokenizer = tokenizer_of("llama3", bos="<|begin_of_text|>")
    for prompt in ("q", "<|begin_of_text|>q"):
        (pair,) = load_pairs([write(row(prompt, "a<|endoftext|>", "b"))], tokenizer)
        assert texts(tokenizer, pair) == ("<|begin_of_text|>q", "a<|endoftext|>", "b<|endoftext|>")


def test_text_that_ends_with_an_end_of_turn_token_gets_no_eos(write, tokenizer_of):
    tokenizer = tokenizer_of("chatml")
    (pair,) = load_pairs([write(row(chosen="4<|im_end|>", rejected="5<|im_end|>\n"))], tokenizer)
    assert texts(tokenizer, pair) == ("2+2?", "4<|im_end|>", "5<|im_end|>\n<|endoftext|>")


def test_tokenizer_without_eos(write, tokenizer_of):
    tokenizer = tokenizer_of("plain")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="rows.jsonl:1: tokenizer: has no eos token"):
        load_pairs([write(row())], tokenizer)


def test_templates_that_trim_or_add_an_empty_thought(write, tokenizer_of):
    from data.chat import set_chat_template

    tokenizer = tokenizer_of("llama3", bos="<|begin_of_text|>")
    set_chat_template(tokenizer, "llama3")  # trims contents
    (pair,) = load_pairs([write(row([USER], " 4 ", "\n5"))], tokenizer)
    assert texts(tokenizer, pair) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\n", "4<|eot_id|>", "5<|eot_id|>",
    )  # fmt: skip
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    (pair,) = load_pairs([write(row([USER], "4", "5"))], tokenizer)
    assert texts(tokenizer, pair) == (OPENING + "<think>", "</think>4<|im_end|>", "</think>5<|im_end|>")


def test_templates_that_are_missing_or_rewrite_the_prompt_are_rejected(write, tokenizer_of):
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match="rows.jsonl:1: chat_template: renders the prompt differently"):
        load_pairs([write(row([USER], "4", "5"))], tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="rows.jsonl:1: chat_template=tokenizer_default: .* has no chat template"):
        load_pairs([write(row([USER], "4", "5"))], tokenizer)


def test_a_response_that_repeats_the_prompt_is_split_correctly(write, chatml):
    for answer in ("user", "assistant", "2+2?", "[[", "<", "\n"):
        (pair,) = load_pairs([write(row([USER], "x" + answer, answer + "y"))], chatml)
        assert texts(chatml, pair) == (OPENING, f"x{answer}<|im_end|>", f"{answer}y<|im_end|>")


def test_lengths(write, tokenizer_of, capsys):
    tokenizer = tokenizer_of("plain")
    rows = [row("abc", "de", "f"), row("abc", "defgh", "f"), row("abcdef", "g", "h"), row("abcdefgh", "i", "j")]
    pairs = load_pairs([write(*rows)], tokenizer, max_length=6)
    assert [texts(tokenizer, pair) for pair in pairs] == [
        ("abc", "de<|endoftext|>", "f<|endoftext|>"),
        ("abc", "def", "f<|endoftext|>"),
    ]
    log = "data: of 4 rows, 1 truncated to max_length=6; 2 skipped, no room for a response within max_length=6\n"
    assert capsys.readouterr().err == log
    assert len(load_pairs([write(*rows)], tokenizer, max_length=6, long_rows="drop")) == 1
    assert "1 skipped, longer than max_length=6" in capsys.readouterr().err
    assert len(load_pairs([write(*rows)], tokenizer, max_prompt_length=3)) == 2
    assert capsys.readouterr().err == "data: of 4 rows, 2 skipped, prompt longer than max_prompt_length=3\n"
    assert len(load_pairs([write(*rows)], tokenizer, context_length=7)) == 3
    assert capsys.readouterr().err.startswith("data: of 4 rows, 2 truncated to max_length=7; 1 skipped")
    for pair in load_pairs([write(*rows)], tokenizer, max_length=4):
        assert len(pair.prompt_ids) == 3 and len(pair.chosen_ids) == len(pair.rejected_ids) == 1
    with pytest.raises(ValueError, match=r"max_length=3: none of the 4 rows fits \(4 skipped"):
        load_pairs([write(*rows)], tokenizer, max_length=3)
    with pytest.raises(ValueError, match="max_prompt_length=2: none of the 4 rows fits"):
        load_pairs([write(*rows)], tokenizer, max_prompt_length=2)
    assert len(load_pairs([write(row("a" * 2000, "b", "c"))], tokenizer, max_length=None)) == 1


ERRORS = [
    (dict(max_length=1), "max_length=1"),
    (dict(max_prompt_length=0), "max_prompt_length=0"),
    (dict(long_rows="x"), "long_rows=x: must be truncate or drop"),
    (dict(bad_rows="x"), "bad_rows=x: must be error or skip"),
    (dict(data_format="chatml.intell"), "data_format=chatml.intell: no such format; did you mean 'chatml.intel'?"),
    (dict(data_format="passtrough"), "did you mean 'passthrough'?"),
    (dict(data_format="llama3.intel"), "data_format=llama3.intel: the delimiter '<|start_header_id|>' is 19 tokens"),
    (dict(system_prompt="Be brief"), "system_prompt: has no effect"),
    (dict(options=FormatOptions(roles="user=human")), "format.roles=user=human: has no effect on data_format=auto"),
    (dict(options=FormatOptions(field_label="x"), data_format="user_defined"), "field_label=x: has no effect"),
]


def test_errors(write, chatml):
    for settings, message in ERRORS:
        with pytest.raises(ValueError, match=message.replace("|", r"\|").replace("?", r"\?")):
            load_pairs([write(row())], chatml, **settings)


def test_system_prompt_replaces_a_missing_system(write, chatml):
    system = "<|im_start|>system\nBe brief<|im_end|>\n"
    rows = [{"question": "2+2?", "chosen": "4", "rejected": "5", "system": text} for text in (None, "", "Be long")]
    pairs = load_pairs([write(*rows)], chatml, data_format="chatml.intel", system_prompt="Be brief")
    prompts = [texts(chatml, pair)[0] for pair in pairs]
    assert prompts == [system + OPENING, system + OPENING, system.replace("brief", "long") + OPENING]
    (pair,) = load_pairs([write(row([USER]))], chatml, system_prompt="Be brief")
    assert texts(chatml, pair) == (system + OPENING, "4<|im_end|>", "5<|im_end|>")
    options = FormatOptions(prompt_format="{system}|{prompt}")
    (pair,) = load_pairs([write(row())], chatml, data_format="user_defined", options=options, system_prompt="S")
    assert texts(chatml, pair)[0] == "S|2+2?"


def test_margin(write, chatml):
    values = (1.5, "2", None, 0)
    pairs = load_pairs([write(*(row(margin=value) for value in values))], chatml, margins=True)
    assert [pair.margin for pair in pairs] == [1.5, 2.0, None, 0.0]
    for value in ("much", True, [1], float("nan")):
        with pytest.raises(ValueError, match="rows.jsonl:1: 'margin' is .*, not a number"):
            load_pairs([write(row(margin=value))], chatml, margins=True)
    (pair,) = load_pairs([write(row(margin="large"))], chatml)
    assert pair.margin is None and texts(chatml, pair)[1:] == ("4<|endoftext|>", "5<|endoftext|>")


def test_several_datasets_with_formats_and_weights(write, chatml):
    one = write(row(), name="one.jsonl")
    two = write({"question": "2+2?", "chosen": "4", "rejected": "5"}, name="two.jsonl")
    pairs = load_pairs([one, f"{two}:format=chatml.intel,weight=0.5"], chatml)
    sources = [(pair.source.rsplit("/")[-1], pair.weight) for pair in pairs]
    assert sources == [("one.jsonl:1", 1.0), ("two.jsonl:1", 0.5)]
    assert texts(chatml, pairs[1]) == (OPENING, "4<|im_end|>", "5<|im_end|>")
    with pytest.raises(ValueError, match="data_format=llama3.intel: .* is 19 tokens"):
        load_pairs([one, f"{two}:format=llama3.intel"], chatml)


def test_bad_rows_are_skipped_and_the_first_is_shown(write, chatml, capsys):
    rows = [row(), row(chosen=""), {"prompt": "{x}"}, row(prompt=[{"role": "poet", "content": "q"}])]
    (pair,) = load_pairs([write(*rows)], chatml, bad_rows="skip")
    assert pair.source.endswith("rows.jsonl:1")
    output = capsys.readouterr().err
    assert output.startswith("data: of 4 rows, 3 skipped as bad, the first: ")
    assert "rows.jsonl:2: 'chosen' is empty" in output
    with pytest.raises(ValueError, match="rows.jsonl:2: 'chosen' is empty"):
        load_pairs([write(*rows)], chatml)
    with pytest.raises(ValueError, match="bad_rows=skip: none of the 1 rows .*rows.jsonl:1"):
        load_pairs([write(rows[1])], chatml, bad_rows="skip")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_that_are_not_json_are_bad_rows(pack, tmp_path, chatml, capsys):
    path = tmp_path / ("rows.jsonl" if pack is bytes else "rows.jsonl.gz")
    path.write_bytes(pack(f'{{"prompt": \n{json.dumps(row())}\n[1]\n'.encode()))
    (pair,) = load_pairs([str(path)], chatml, bad_rows="skip")
    assert pair.source == f"{path}:2"
    found = f"data: of 3 rows, 2 skipped as bad, the first: {path}:1: not valid JSON"
    assert capsys.readouterr().err.startswith(found)
    with pytest.raises(ValueError, match=f"{path}:1: not valid JSON"):
        load_pairs([str(path)], chatml)


def test_plain_prompts_are_logged_if_the_model_has_a_template(write, chatml, tokenizer_of, capsys):
    path = write(row())
    load_pairs([path], chatml)
    assert "the prompts are plain text and are not rendered with the chat template" in capsys.readouterr().err
    load_pairs([path], tokenizer_of("plain"))
    load_pairs([path], chatml, data_format="user_defined")
    load_pairs([write(row(prompt=[USER]))], chatml)
    assert "plain text" not in capsys.readouterr().err


def test_equal_responses_are_skipped_and_counted(write, chatml, capsys):
    (pair,) = load_pairs([write(row(chosen="5"), row())], chatml)
    assert pair.source.endswith("rows.jsonl:2")
    assert capsys.readouterr().err.startswith("data: of 2 rows, 1 skipped, chosen equals rejected\n")
    with pytest.raises(ValueError, match=r"^data: none of the 2 rows .*2 skipped, chosen equals rejected"):
        load_pairs([write(row(chosen="5"), row(chosen="5"))], chatml)
    length = len(pair.prompt_ids) + 1  # truncated to one token, both responses are equal
    with pytest.raises(ValueError, match=f"^max_length={length}: none of the 1 rows .*1 skipped, chosen equals"):
        load_pairs([write(row(chosen="12", rejected="13"))], chatml, max_length=length)


def test_a_users_transform(write, chatml, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def pair(cfg):\n    return lambda row: {'prompt': row['q'], 'chosen': row['a'][0], 'rejected': row['a'][1]}\n"
    )
    monkeypatch.chdir(tmp_path)
    (pair,) = load_pairs([write({"q": "2+2?", "a": ["4", "5"]})], chatml, data_format="mine.pair")
    assert texts(chatml, pair) == ("2+2?", "4<|endoftext|>", "5<|endoftext|>")


def test_built_in_tasks_are_length_balanced_pairs(chatml):
    for name in ("addition", "steps"):
        pairs = load_pairs([f"task:{name}:size=50"], chatml)
        assert len(pairs) == 50
        for pair in pairs:
            assert pair.chosen_ids != pair.rejected_ids and len(pair.chosen_ids) == len(pair.rejected_ids)
            assert chatml.decode(pair.chosen_ids).endswith("<|im_end|>")


def test_real_rows_with_other_names(asset, chatml):
    options = FormatOptions(
        field_messages="conversations", role_key="from", content_key="value", roles="user=human,assistant=gpt"
    )
    path = f"{asset('data/llamafactory_dpo_en_demo.jsonl.gz')}:split=train[:40]"
    pairs = load_pairs([path], chatml, data_format="chat_template.default", options=options, max_length=None)
    assert len(pairs) == 40
    prompt, chosen, rejected = texts(chatml, pairs[0])
    assert prompt.startswith("<|im_start|>user\nHi! I'd like to create") and prompt.endswith("<|im_start|>assistant\n")
    assert chosen.startswith("That sounds like") and chosen.endswith("<|im_end|>") and rejected.endswith("<|im_end|>")


@pytest.mark.parametrize("name", ["hh_harmless_test", "alpaca_eval_pref_train"])
def test_real_rows_of_text(asset, chatml, capsys, name):
    path = f"{asset(f'data/{name}.jsonl.gz')}:split=train[:40]"
    assert len(load_pairs([path], chatml, max_length=None)) == 40
    for pair in load_pairs([path], chatml, max_length=300):
        assert len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) <= 300
        assert pair.prompt_ids and pair.chosen_ids and pair.rejected_ids
    assert "data: of 40 rows" in capsys.readouterr().err


def test_a_response_that_the_template_does_not_close_is_rejected(write, tokenizer_of):
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}"
        "{% if m.content != 'open' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    with pytest.raises(ValueError, match="rows.jsonl:1: the chat template does not close the response's turn"):
        load_pairs([write(row([USER], "open", "5"))], tokenizer)
