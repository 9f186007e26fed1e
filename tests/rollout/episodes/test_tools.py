"""Tools: schemas, calls, limits and whole episodes."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest

from rollout.engine import Request, Sampling, run_groups
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.options import ToolConfig
from rollout.episodes.tool_calls import Call
from rollout.episodes.tool_episode import ToolEpisode, show_tools
from rollout.episodes.tools import Tool, Toolset, Turns, calculator, load_tools, schema_error, schema_of
from tests.rollout.episodes.test_turns import HERMES, with_template
from tests.rollout.scripted_engine import ScriptedEngine, tiny_tokenizer, user_prompt


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", where: list[float] | None = None) -> dict:
    """Forecast for a city.

    As the stations see it.

    Args:
        city (str): Its name,
            in full.
        days: How many.

    Returns:
        A dict.
    """
    return {"city": city, "days": days}


def test_a_schema_comes_from_hints_and_docstring():
    assert schema_of(weather, "tools=weather") == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast for a city. As the stations see it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name, in full."},
                    "days": {"type": "integer", "description": "How many."},
                    "unit": {"enum": ["C", "F"]},
                    "where": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    }


def test_a_schema_comes_from_param_lines():
    def f(a: dict[str, int], b: Any, episode: Turns) -> None:
        """Does it.

        :param a: The one.
        :param b: The other.
        :returns: nothing
        """

    function = schema_of(f, "tools=f")["function"]
    assert function["description"] == "Does it."
    assert function["parameters"]["properties"] == {
        "a": {"type": "object", "additionalProperties": {"type": "integer"}, "description": "The one."},
        "b": {"description": "The other."},
    }


def untyped(x):
    """Does it."""


def silent(x: int) -> int:
    return x


def exotic(x: complex) -> None:
    """Does it."""


def starred(*x: int) -> None:
    """Does it."""


def test_schema_of_rejects():
    for function, message in [
        (untyped, "untyped .*'x'"), (silent, "silent .*docstring"), (exotic, "'x' of exotic is a complex"),
        (starred, r"starred takes \*x"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"tools=my.f: {message}"):
            schema_of(function, "tools=my.f")


def test_values_are_checked_against_the_schema():
    for value, schema, error in [
        (1, {"type": "number"}, None),
        (True, {"type": "number"}, "must be number, not boolean"),
        (True, {"type": "integer"}, "must be integer, not boolean"),
        (1.5, {"type": "integer"}, "must be integer, not number"),
        ("1", {"type": "integer"}, "must be integer, not string"),
        (None, {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        (2, {"anyOf": [{"type": "string"}, {"type": "null"}]}, "cannot be integer"),
        ("K", {"enum": ["C", "F"]}, "must be one of ['C', 'F']"),
        ([1, "x"], {"type": "array", "items": {"type": "integer"}}, "holds one that must be integer, not string"),
        ({"a": 1}, {"type": "object", "additionalProperties": {"type": "string"}}, "holds one that must be string"),
        ({"a": 1}, {}, None),
    ]:
        assert (schema_error(value, schema) or "").startswith(error or "")
        assert (schema_error(value, schema) is None) == (error is None)


def test_the_calculator_evaluates_only_arithmetic():
    for expression, value in [
        ("2+3*4", "14"), ("(3+4)/2", "3.5"), ("8/2", "4"), ("-7//2", "-4"), ("2**10 % 1000", "24"),
        ("1/3", "0.333333333333"),
    ]:  # fmt: skip
        assert calculator(expression) == value
    for expression in [
        "__import__('os')", "9**9**9", "9**-9**9", "(-8)**0.5", "2+", "x", "1" * 300, "[1]", "1<<9", "'a'*9", "True+1",
    ]:  # fmt: skip
        started_at = time.monotonic()
        with pytest.raises(ValueError):
            calculator(expression)
        assert time.monotonic() - started_at < 10


def run(toolset: Toolset, call: Call, turns: Turns | None = None) -> tuple[str, bool]:
    return asyncio.run(toolset.run(call, turns or toolset.begin(user_prompt("ab?", table={"ab": "37"}))))


def of(*functions, timeout: float = 5.0) -> Toolset:
    return Toolset([Tool(f"my.{f.__name__}", f.__name__, f) for f in functions], timeout)


def test_a_call_returns_a_result_or_an_error():
    for call, text, failed in [
        (Call(name="lookup", arguments={"key": "ab"}), "37", False),
        (Call(name="lookup", positional=("ab",)), "37", False),
        (Call(name="lookup", arguments={"key": "cd"}), "error: KeyError: 'cd'", True),
        (Call(name="lookup", arguments={"key": 3}), "error: lookup 'key' must be string, not integer", True),
        (Call(name="lookup", arguments={}), "error: lookup needs 'key'", True),
        (Call(name="lookup", arguments={"k": "ab"}), "error: lookup has no argument 'k'; it takes key", True),
        (Call(name="lookup", positional=("ab",), arguments={"key": "ab"}), "error: lookup got 'key' twice", True),
        (Call(name="lookup", positional=("ab", "cd")), "error: lookup takes 1 arguments, not 2", True),
        (Call(name="lookup", arguments={"key": "ab", "episode": 1}), "error: lookup has no argument 'episode'", True),
        (Call(name="look"), "error: there is no tool 'look'; there is lookup, calculator", True),
        (Call(name="calculator", arguments={"expression": "1/0"}), "error: ZeroDivisionError: division by zero", True),
        (Call(error="is not valid JSON"), "error: the call is not valid JSON", True),
    ]:
        answer, error = run(load_tools(("lookup", "calculator")), call)
        assert answer.startswith(text) and error is failed


def test_results_that_are_not_text_become_json():
    def pair(x: int) -> Any:
        """Two."""
        return {"x": x, "y": None} if x else {1}

    async def later(x: int) -> list[int]:
        """Waits."""
        await asyncio.sleep(0)
        return [x]

    assert run(of(pair), Call(name="pair", positional=(1,))) == ('{"x": 1, "y": null}', False)
    assert run(of(pair), Call(name="pair", positional=(0,))) == ("{1}", False)
    assert run(of(later), Call(name="later", positional=(4,))) == ("[4]", False)


def test_a_hanging_tool_times_out_and_too_many_stop_the_run(monkeypatch):
    released = threading.Event()

    def hang() -> str:
        """Never returns."""
        released.wait(20)
        return ""

    async def sleep() -> None:
        """Never returns either."""
        await asyncio.sleep(20)

    def slow_socket() -> None:
        """Has its own time limit."""
        raise TimeoutError("timed out")

    toolset = of(hang, sleep, timeout=0.05)
    assert run(toolset, Call(name="hang")) == ("error: hang took more than 0.05 s", True)
    for _ in range(3):
        assert run(toolset, Call(name="sleep")) == ("error: sleep took more than 0.05 s", True)
    own_limit = of(slow_socket)
    assert run(own_limit, Call(name="slow_socket")) == ("error: TimeoutError: timed out", True)
    tools = toolset.tools | own_limit.tools
    assert {name: tool.num_hung for name, tool in tools.items()} == {"hang": 1, "sleep": 0, "slow_socket": 0}
    monkeypatch.setattr("rollout.episodes.tools.MAX_HUNG", 2)
    with pytest.raises(ValueError, match="tools=my.hang: 2 calls hang"):
        run(toolset, Call(name="hang"))
    released.set()


def test_the_model_gets_any_exception_of_a_tool():
    for error in [SystemExit(3), KeyboardInterrupt(), StopIteration(), MemoryError()]:

        def bad(error: Any = error) -> None:
            """Fails."""
            raise error

        text, failed = run(of(bad), Call(name="bad"))
        assert failed and type(error).__name__ in text


TOOLS = '''
class Counter:
    """Counts."""

    def reset(self, start=0):
        self.count = start

    def add(self, n: int, episode) -> str:
        """Add a number.

        Args:
            n: The number.
        """
        self.count += n
        episode.reward(0.25)
        episode.state["added"] = True
        return f"{self.count}"

    async def show(self) -> str:
        """Show the count."""
        return f"it is {self.count}"

    def reward(self):
        return float(self.count)

    def close(self):
        closed.append(self.count)


closed = []


class Empty:
    def reset(self): ...


def shout(text: str) -> str:
    """Make it loud."""
    return text.upper()


number = 3
'''


@pytest.fixture
def tools_file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path


def test_tools_are_found_by_name_file_and_module(tools_file, monkeypatch):
    monkeypatch.chdir(tools_file.parent)
    toolset = load_tools(("calculator", f"{tools_file}:shout", "my_tools.Counter"))
    assert list(toolset.tools) == ["calculator", "shout", "add", "show"]
    assert run(toolset, Call(name="shout", arguments={"text": "ab"})) == ("AB", False)
    assert list(toolset.tools["add"].parameters) == ["n"]


def test_load_tools_rejects(tools_file):
    for specs, message in [
        (("calculater",), "tools=calculater: .*'calculator'"),
        (("{}:nobody",), "'nobody'"),
        (("{}:number",), "my_tools.py:number: .*int"),
        (("{}:Empty",), "my_tools.py:Empty: "),
        (("calculator", "calculator"), "tools=calculator: two tools"),
        (("nowhere.fn",), "'nowhere'"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_tools([spec.format(tools_file) for spec in specs])


def test_rows_must_have_the_columns_of_a_tool():
    toolset = load_tools(("lookup",))
    toolset.check_rows([user_prompt("ab?", table={})], "data")
    with pytest.raises(ValueError, match="tools=lookup: .*'table', which rows.jsonl:7 of data"):
        toolset.check_rows([user_prompt("ab?", table={}), user_prompt("ab?", "rows.jsonl:7")], "data")


def play(reply, toolset: Toolset, *prompts, max_tokens: int = 200, **settings: Any):
    """Return one completion per prompt from a model that answers with `reply`."""
    engine = ScriptedEngine(reply)
    episode = ToolEpisode(toolset, tiny_tokenizer(), **{"tool_format": "pythonic", **settings})
    source = EpisodeSource(engine, Sampling(max_tokens=max_tokens, stop_ids=(2,)), episode)
    jobs = [[Request.of(prompt, seed)] for seed, prompt in enumerate(prompts)]
    completions = [group[0] for group in run_groups(source, jobs)]
    source.close()
    return completions


def answer_with_the_last_result(text: str, seed: int) -> str:
    """Call once, then repeat the tool's result."""
    if "<|im_start|>tool" not in text:
        key = text.split("user\n")[1].split("?")[0]
        return f"[lookup(key='{key}')]"
    return text.rsplit("<|im_start|>tool\n", 1)[1].split("<|im_end|>")[0]


def test_an_episode_contains_the_call_its_result_and_the_answer():
    prompt = user_prompt("ab?", table={"ab": "37"})
    (completion,) = play(answer_with_the_last_result, load_tools(("lookup",)), prompt)
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(completion.ids) == (
        "[lookup(key='ab')]<|im_end|>\n<|im_start|>tool\n37<|im_end|>\n<|im_start|>assistant\n37<|im_end|>"
    )
    trained = [token for token, flag in zip(completion.ids, completion.mask, strict=True) if flag]
    assert tokenizer.decode(trained) == "[lookup(key='ab')]<|im_end|>37<|im_end|>"
    assert completion.logps == [-0.5 if flag else 0.0 for flag in completion.mask]
    assert completion.prompt_ids == prompt.ids and completion.versions == [(3, len(trained))]
    assert completion.text == "37" and completion.finish_reason == "stop"
    call = {"name": "lookup", "arguments": {"key": "ab"}}
    assert [(m["role"], m["content"]) for m in completion.messages] == [
        ("assistant", ""), ("tool", "37"), ("assistant", "37")
    ]  # fmt: skip
    assert [c["function"] for c in completion.messages[0]["tool_calls"]] == [call]
    assert completion.columns == {"num_turns": 2, "tool_calls": 1, "tool_errors": 0}


def test_an_answer_without_a_call_is_one_turn():
    (completion,) = play(lambda text, seed: "12", load_tools(("lookup",)), user_prompt("ab?", table={}))
    assert completion.mask is None and completion.messages == [{"role": "assistant", "content": "12"}]
    assert completion.columns == {"num_turns": 1, "tool_calls": 0, "tool_errors": 0}


def test_errors_go_back_to_the_model_and_are_counted():
    replies = ["[lookup(", "[nothing()]", "[lookup('ab'), lookup('cd')]", "done"]
    (completion,) = play(
        lambda text, seed: replies[text.count("<|im_start|>assistant") - 1],
        load_tools(("lookup",)),
        user_prompt("ab?", table={"ab": "37"}),
        max_tokens=400,
    )
    assert completion.columns == {"num_turns": 4, "tool_calls": 4, "tool_errors": 3}
    results = [m["content"] for m in completion.messages if m["role"] == "tool"]
    assert results == [
        "error: the call is not a list of calls such as [name(key='value')]",
        "error: there is no tool 'nothing'; there is lookup",
        "37",
        "error: KeyError: 'cd'",
    ]
    assert completion.messages[0] == {"role": "assistant", "content": "[lookup("}
    assert completion.messages[4]["tool_calls"][1]["function"] == {"name": "lookup", "arguments": {"key": "cd"}}


def test_a_call_in_the_last_turn_is_not_answered():
    (completion,) = play(
        lambda text, seed: "[lookup('ab')]", load_tools(("lookup",)), user_prompt("ab?", table={"ab": "1"}), max_turns=3
    )
    assert completion.columns == {"num_turns": 3, "tool_calls": 2, "tool_errors": 0}
    assert completion.finish_reason == "length" and completion.mask[-1] is True
    assert [m["role"] for m in completion.messages] == ["assistant", "tool"] * 2 + ["assistant"]


def test_max_tokens_limits_the_whole_episode():
    for max_tokens in (10, 18, 19, 20, 33, 34, 35, 36, 49):  # at and around the end of each turn
        prompt = user_prompt("ab?", table={"ab": "37"})
        (completion,) = play(answer_with_the_last_result, load_tools(("lookup",)), prompt, max_tokens=max_tokens)
        assert len(completion.ids) <= max_tokens and len(completion.ids) == len(completion.logps)
        assert completion.finish_reason == ("stop" if max_tokens >= 19 + 14 + 3 else "length")
        assert completion.mask is None or completion.mask[-1]  # results that no turn follows are dropped
        if max_tokens <= 19 + 14:
            assert len(completion.ids) == min(19, max_tokens) and completion.columns["num_turns"] == 1


def test_a_long_result_is_truncated():
    prompt = user_prompt("ab?", table={"ab": "0123456789"})
    (completion,) = play(answer_with_the_last_result, load_tools(("lookup",)), prompt, max_tool_tokens=4)
    assert completion.messages[1]["content"] == completion.text == "0123"


def test_every_episode_has_its_own_object_state_and_rewards(tools_file):
    def reply(text: str, seed: int) -> str:
        turn = text.count("<|im_start|>assistant")
        return ("[add(n=2)]", "[add(n=3), show()]", "bye")[turn - 1]

    toolset = load_tools((f"{tools_file}:Counter",))
    prompts = [user_prompt("a", start=10), user_prompt("b", start=100, other=1)]
    first, second = play(reply, toolset, *prompts)
    assert [m["content"] for m in second.messages if m["role"] == "tool"] == ["102", "105", "it is 105"]
    assert first.columns["turn_rewards"] == [0.25, 0.25, 15.0] and first.columns["env_reward"] == 15.5
    assert second.columns["env_reward"] == 105.5
    assert toolset.tools["add"].call.__globals__["closed"] == [15, 105]


def test_an_episode_that_fails_closes_its_objects(tools_file):
    toolset = load_tools((f"{tools_file}:Counter",))
    with pytest.raises(ZeroDivisionError):
        play(lambda text, seed: "x" if "0" in text else 1 / 0, toolset, user_prompt("a", start=7))
    assert toolset.tools["add"].call.__globals__["closed"] == [7]


def test_errors_of_an_object_name_the_row(tools_file):
    for method, line, error in [
        ("reward", "def reward(self):", r"reward\(\) failed"),
        ("close", "def close(self):", r"close\(\) failed"),
        ("reset", "def reset(self, start=0):", "cannot start an episode"),
    ]:
        path = tools_file.with_name(f"{method}.py")
        path.write_text(TOOLS.replace(line, f"{line}\n        1 / 0\n"))
        with pytest.raises(ValueError, match=rf"Counter: {error} on rows.jsonl:1 \(ZeroDivisionError"):
            play(lambda text, seed: "x", load_tools((f"{path}:Counter",)), user_prompt("a"))


def test_the_template_shows_tools_and_lengths_include_them():
    tokenizer, toolset, lines = with_template(HERMES), load_tools(("lookup",)), []
    prompts = [user_prompt("ab?"), user_prompt("a" * 50)]
    rendered = show_tools(prompts, tokenizer, toolset.schemas, log=lines.append)
    assert "Look up what is stored under a key." in tokenizer.decode(rendered[0].ids) and lines == []
    short = len(rendered[0].ids)
    assert len(show_tools(prompts, tokenizer, toolset.schemas, max_prompt_length=short, log=lines.append)) == 1
    assert lines == [f"data: skipped 1 of 2 prompts longer than max_prompt_length={short} with the tools"]
    assert show_tools(prompts, tiny_tokenizer(), toolset.schemas, log=lines.append) == prompts
    assert lines[1].startswith("tools: the chat template does not show")
    for rows, limits, message in [
        (prompts, {"longest": short}, f"rows.jsonl:1: the prompt has {short + 47} tokens"),
        (prompts, {"max_prompt_length": 5}, "max_prompt_length=5"),
        ([replace(prompts[0], prompt="ab?")], {}, "rows.jsonl:1: plain text"),
    ]:
        with pytest.raises(ValueError, match=message):
            show_tools(rows, tokenizer, toolset.schemas, **limits)


def test_tool_config_rejects():
    for settings, message in [
        (dict(max_turns=3), "max_turns=3: has no effect"),
        (dict(tool_format="hermes"), "tool_format=hermes: has no effect"),
        (dict(tools=("lookup",), max_turns=1), "max_turns=1"),
        (dict(tools=("lookup",), max_tool_tokens=0), "max_tool_tokens=0"),
        (dict(tools=("lookup",), tool_timeout=0.0), "tool_timeout=0.0"),
        (dict(tools=("lookup", "")), "tools=''"),
        (dict(rollout_func=""), "rollout_func=''"),
        (dict(tools=("lookup",), rollout_func="a.b"), "rollout_func=a.b: .*tools=lookup"),
    ]:
        with pytest.raises(ValueError, match=message):
            ToolConfig(**settings)


def test_waiting_for_a_thread_or_a_core_does_not_count_toward_the_timeout(monkeypatch):
    monkeypatch.setattr("rollout.episodes.tools.MAX_THREADS", 2)
    # As on a busy machine: little CPU time in the time that the call takes.
    monkeypatch.setattr("rollout.episodes.tools.thread_clock", lambda: partial(since, time.monotonic()))

    def since(started: float) -> float:
        return (time.monotonic() - started) / 90

    def slow() -> str:
        """Takes its time."""
        time.sleep(0.3)
        return "ok"

    toolset = of(slow, timeout=0.2)
    turns = toolset.begin(user_prompt("?"))

    async def many() -> list:
        return await asyncio.gather(*(toolset.run(Call(name="slow"), turns) for _ in range(12)))

    assert asyncio.run(many()) == [("ok", False)] * 12


def test_a_late_call_that_ends_no_longer_counts_as_hanging():
    released = threading.Event()

    def late() -> str:
        """Takes too long."""
        while not released.is_set():
            pass
        return "ok"

    toolset = of(late, timeout=0.05)

    async def count_hanging() -> int:
        await toolset.run(Call(name="late"), toolset.begin(user_prompt("?")))
        hanging = toolset.tools["late"].num_hung
        released.set()
        deadline = time.monotonic() + 20
        while toolset.tools["late"].num_hung and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return hanging

    assert asyncio.run(count_hanging()) == 1
    assert toolset.tools["late"].num_hung == 0


def test_a_lone_surrogate_in_a_result_is_replaced():
    def echo(text: str) -> str:
        """Repeats the text."""
        return text

    toolset = of(echo)
    assert run(toolset, Call(name="echo", arguments={"text": "a\ud83d"})) == ("a?", False)


STYLED = (
    "{% if tools %}{{ (tools | tojson) }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (style or '') }}{% endif %}"
)


def test_prompt_settings_apply_to_all_turns():
    tokenizer, toolset = with_template(STYLED), load_tools(("lookup",))
    prompt = replace(user_prompt("ab?", table={"ab": "37"}), settings={"style": "!", "tools": [{"name": "unused"}]})
    (rendered,) = show_tools([prompt], tokenizer, toolset.schemas)
    text = tokenizer.decode(rendered.ids)
    assert text.endswith("<|im_start|>assistant\n!") and '"lookup"' in text and "unused" not in text
    source = EpisodeSource(
        ScriptedEngine(answer_with_the_last_result),
        Sampling(max_tokens=200, stop_ids=(tokenizer.eos_token_id,)),
        ToolEpisode(toolset, tokenizer, tool_format="pythonic"),
    )
    ((completion,),) = run_groups(source, [[Request.of(rendered, 5)]])
    source.close()
    assert tokenizer.decode(completion.ids).split("<|im_start|>assistant\n")[1] == "!37<|im_end|>"
