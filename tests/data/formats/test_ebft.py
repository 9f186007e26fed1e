"""The ebft_* formats: prompts, targets and thoughts."""

from __future__ import annotations

import pytest

from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS, reject_formats


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [SYSTEM, user("2+2="), assistant("4"), user("3+3="), assistant("6"), user("thanks")]


def convert(name, **columns):
    return {**EBFT_FORMATS, **EBFT_STRIDED_FORMATS}[name](columns)


def test_opencode_reads_a_question_with_its_answer():
    assert convert("ebft_opencode.transform", input="2+2=", output="4", level=1) == {
        "level": 1,
        "prompt": [user("2+2=")],
        "ground_truth": "4",
    }
    for row, message in (
        ({"input": "2+2="}, "has no 'output'"),
        ({"input": "2+2=", "output": " "}, "'output' is empty"),
        ({"input": 4, "output": "4"}, "'input' is of type int, not text"),
    ):
        with pytest.raises(ValueError, match=message):
            convert("ebft_opencode.transform", **row)


def test_multiturn_splits_at_the_first_assistant_turn():
    assert convert("ebft_chat_multiturn.transform", messages=CHAT, id=7) == {
        "id": 7,
        "prompt": CHAT[:2],
        "ground_truth": [assistant("4")],
        "remaining_turns": CHAT[3:5],
    }
    assert convert("ebft_chat_multiturn.transform", messages=[user("a"), assistant("b"), user("c")]) == {
        "prompt": [user("a")],
        "ground_truth": [assistant("b")],
    }


def test_last_turn_and_all_turns():
    last = {"prompt": CHAT[:4], "ground_truth": [assistant("6")]}
    assert convert("ebft_chat_multiturn.transform_last_turn", messages=CHAT) == last
    first = {"prompt": CHAT[:2], "ground_truth": [assistant("4")]}
    assert convert("ebft_chat_multiturn.transform_all_turns", messages=CHAT) == [first, last]


def test_sharegpt_conversations_are_read_as_messages():
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2+2="},
        {"from": "gpt", "value": "4"},
    ]
    expected = {"prompt": [SYSTEM, user("2+2=")], "ground_truth": [assistant("4")]}
    assert convert("ebft_chat_multiturn.transform", conversations=turns, messages=None) == expected
    assert convert("ebft_chat_multiturn.transform_last_turn", conversations=CHAT[:3]) == expected


def test_rows_without_a_target_are_rejected():
    for name in [name for name in EBFT_FORMATS if "opencode" not in name]:
        for messages, message in (
            ([user("2+2=")], "has no assistant turn"),
            ([assistant("4"), user("2+2=")], "starts with an assistant turn"),
            ([], "'messages' is empty"),
            ([{"role": "tutor", "content": "4"}], "role 'tutor' is unknown"),
        ):
            with pytest.raises(ValueError, match=message):
                convert(name, messages=messages)
        with pytest.raises(ValueError, match="has neither 'messages' nor 'conversations' .its columns: text"):
            convert(name, text="abc")


THOUGHTS = [
    ("<think>\nadd\n</think>\n\n4", "add", "4"),
    ("<reasoning>add</reasoning>4", "add", "4"),
    ("<|begin_of_thought|> add <|end_of_thought|> 4", "add", "4"),
    ("So: <think>a\nb</think> 4 <think>c</think>", "a\nb", "So:  4 <think>c</think>"),  # only the first
    ("<reasoning>r</reasoning><think>t</think>4", "t", "<reasoning>r</reasoning>4"),  # by kind of tag, not by position
    ("4", None, "4"),
    ("<think>never closed", None, "<think>never closed"),
]


def test_thoughts_are_split_off():
    for content, thought, answer in THOUGHTS:
        row = convert(
            "ebft_reasoning.transform_split_thinking", messages=[user("<think>x</think>2+2="), assistant(content)]
        )
        expected = answer if thought is None else f"<think>\n{thought}\n</think>\n\n{answer}"
        assert row == {"prompt": [user("<think>x</think>2+2=")], "ground_truth": [assistant(expected)]}
        earlier = [user("2+2="), assistant(content), user("3+3="), assistant("6")]
        row = convert("ebft_reasoning.transform_split_thinking", messages=earlier)
        turn = assistant(answer) if thought is None else assistant(answer, reasoning_content=thought)
        assert row == {"prompt": [user("2+2="), turn, user("3+3=")], "ground_truth": [assistant("6")]}


def test_thoughts_in_a_key_are_written_into_the_target():
    row = convert(
        "ebft_reasoning.transform_split_thinking", messages=[user("2+2="), assistant("4", reasoning_content="add")]
    )
    assert row["ground_truth"] == [assistant("<think>\nadd\n</think>\n\n4")]


def test_thinking_is_kept_or_removed():
    answer = "<think>a</think>\n\n4 <think>b\nc</think> is it. "
    row = {"messages": [user("2+2="), assistant(answer, reasoning_content="x")]}
    for name, target in (
        ("ebft_reasoning.transform", assistant(answer, reasoning_content="x")),
        ("ebft_reasoning.transform_answer_only", assistant("4 is it.")),
    ):
        assert convert(name, **row) == {"prompt": [user("2+2=")], "ground_truth": [target]}
    with pytest.raises(ValueError, match="empty without its thoughts"):
        convert("ebft_reasoning.transform_answer_only", messages=[user("2+2="), assistant("<think>4</think> ")])


def test_strided_formats_return_sft_rows():
    assert convert("ebft_reasoning.transform_strided", messages=CHAT) == {
        "prompt": CHAT[:4],
        "completion": [assistant("6")],
    }
    assert convert("ebft_strided_chat.transform", conversations=CHAT) == {"messages": CHAT}
    with pytest.raises(ValueError, match="has no assistant turn"):
        convert("ebft_strided_chat.transform", messages=CHAT[:2])
    for row in (
        {"input": "q", "output": "a"},
        {"prompt": "q", "completion": "a"},
        {"question": "q", "answer": "a"},
        {"input": "q", "prompt": "no", "output": "a", "answer": "no"},  # the first column present
    ):
        assert convert("ebft_strided_structured.transform", **row) == {"prompt": "q", "completion": "a"}
    with pytest.raises(ValueError, match="has none of 'output', 'completion', 'answer' .its columns: input"):
        convert("ebft_strided_structured.transform", input="q")


def test_formats_of_the_other_mode_are_rejected():
    reject_formats(["a.jsonl:format=alpaca"], "auto", EBFT_FORMATS, "structured")
    for specs, name in ((["a.jsonl"], "ebft_opencode.transform"), (["b", "a:format=ebft_opencode.transform"], "auto")):
        with pytest.raises(ValueError, match="^data_format=ebft_opencode.transform: .*--mode structured"):
            reject_formats(specs, name, EBFT_FORMATS, "structured")


def test_thoughts_in_text_parts_and_next_to_calls():
    parts = [{"type": "text", "text": "<think>two"}, {"type": "text", "text": "</think>4"}]
    calls = [{"function": {"name": "add", "arguments": {}}}]
    call = {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": calls}
    for name, answer, target in (
        ("transform_answer_only", assistant(parts), assistant("4")),
        ("transform_split_thinking", assistant(parts), assistant("<think>\ntwo\n</think>\n\n4")),
        ("transform_split_thinking", call, assistant("<think>\nadd\n</think>\n\n", tool_calls=calls)),
    ):
        assert convert(f"ebft_reasoning.{name}", messages=[user("2+2="), answer])["ground_truth"] == [target]
