from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout.episodes.tool_calls import Call, find_format, hermes, llama3_json, pythonic

LOOKUP = Call(name="lookup", arguments={"key": "ab"})


def test_every_format_parses_a_call():
    for parse, text in [
        (hermes, '<tool_call>\n{"name": "lookup", "arguments": {"key": "ab"}}\n</tool_call>'),
        (hermes, '<tool_call>{"name": "lookup", "arguments": "{\\"key\\": \\"ab\\"}"}</tool_call>'),
        (llama3_json, '{"name": "lookup", "parameters": {"key": "ab"}}'),
        (llama3_json, '<|python_tag|>{"type": "function", "name": "lookup", "parameters": {"key": "ab"}}'),
        (pythonic, "[lookup(key='ab')]"),
        (pythonic, ' [lookup(\n  key="ab"\n)]\n'),
    ]:
        assert parse(text) == ("", [LOOKUP])


def test_an_answer_is_not_a_call():
    for parse, text in [
        (hermes, "The answer is 4."),
        (hermes, ""),
        (llama3_json, '{"answer": 4}'),
        (llama3_json, "The answer is 4."),
        (pythonic, "[37]"),
        (pythonic, "f(x) = 2"),
        (pythonic, "[1, 2, 3]"),
    ]:
        assert parse(text) == (text, [])


def test_several_calls_and_the_text_around_them():
    call = '<tool_call>{{"name": "f", "arguments": {{"n": {}}}}}</tool_call>'
    parsed = hermes(f"First. {call.format(1)} Then. {call.format(2)}")
    assert parsed.content == "First.  Then." and [c.arguments for c in parsed.calls] == [{"n": 1}, {"n": 2}]
    two = '{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}'
    assert llama3_json(two).calls == [Call(name="f", arguments={"n": 1}), Call(name="g")]
    assert pythonic("[f(n=1), g()]").calls == [Call(name="f", arguments={"n": 1}), Call(name="g")]


def test_calls_inside_think_are_ignored():
    thought = '<think>I could <tool_call>{"name": "f"}</tool_call></think>\nNo.'
    assert hermes(thought) == (thought, [])
    assert len(hermes('<think>hm</think><tool_call>{"name": "f"}</tool_call>').calls) == 1


def test_python_literals_of_every_kind():
    (call,) = pythonic("[f('a', -2, n=[1, {'x': None}], yes=true, no=False, nothing=null)]").calls
    assert call.positional == ("a", -2)
    assert call.arguments == {"n": [1, {"x": None}], "yes": True, "no": False, "nothing": None}


def test_a_malformed_call_has_an_error():
    for parse, text, error in [
        (hermes, '<tool_call>{"name": "f", </tool_call>', "is not valid JSON"),
        (hermes, '<tool_call>{"name": "f"}', "is not closed by </tool_call>"),
        (hermes, "<tool_call>[1]</tool_call>", "is not an object with a name"),
        (hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "its arguments are not an object"),
        (hermes, "<tool_call>" + "[" * 100_000 + "</tool_call>", "is not valid JSON"),
        (llama3_json, '{"name": "f", "parameters": {', "is not valid JSON"),
        (llama3_json, "<|python_tag|>print(1)", "is not valid JSON"),
        (pythonic, "[f(key='ab'", "is not a list of calls"),
        (pythonic, "[f(key=open('x'))]", "its arguments are not plain values"),
        (pythonic, "[f(**{'key': 1})]", "its arguments are not plain values"),
        (pythonic, "[f(key=1), 3]", "is not a list of calls"),
        (pythonic, "[f(" + "(" * 10_000 + ")]", "is not a list of calls"),
        (pythonic, "[f(1)\0]", "is not a list of calls"),
    ]:
        assert error in parse(text).calls[-1].error


def test_auto_detects_the_format_from_the_chat_template():
    for template, parse in [
        ("... <tool_call>{{ call | tojson }}</tool_call>", hermes),
        ('respond {"name": ..., "parameters": ...} {{ "ipython" }}', llama3_json),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...)]", pythonic),
    ]:
        assert find_format("auto", SimpleNamespace(chat_template=template)) is parse
        assert find_format("hermes", SimpleNamespace(chat_template=template)) is hermes
    for template in ["{{ messages }}", None]:
        with pytest.raises(ValueError, match="tool_format=auto: .*hermes, llama3_json, pythonic"):
            find_format("auto", SimpleNamespace(chat_template=template))


def test_arguments_that_json_cannot_express_are_an_error():
    for argument in ["{'a', 'b'}", "b'a'", "1j", "...", "{1: 2}", "[{3}]"]:
        (call,) = pythonic(f"[lookup({argument})]").calls
        assert call.error == "its arguments are not plain values"
