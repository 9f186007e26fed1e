from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.types import Prompt
from rollout.rewards.calls import TrainerState
from rollout.rewards.options import RewardConfig
from rollout.rewards.table import load_rewards, open_rewards
from tests.rollout.rewards.test_workers import rows


def write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """user_file(source) writes my_rewards.py in the working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda source, name="my_rewards.py": write(tmp_path / name, source)


def test_a_rollout_of_empty_completions_has_ids():
    prompts, completions = rows(["", ""])
    empty = [replace(completion, ids=[]) for completion in completions]
    assert load_rewards(["length"]).score(prompts, empty).values == [[0.0], [0.0]]


def test_weighted_totals_and_none(user_file):
    user_file("""
        def by_length(completions):
            return [len(c) for c in completions]
        def sometimes(completions, **columns):
            return [None if c == "bb" else 1 for c in completions]
        def never(completions):
            return [None] * len(completions)
    """)
    rewards = load_rewards(["my_rewards.by_length", "my_rewards.sometimes"], [1.0, 0.5])
    table = rewards.score(*rows(["a", "bb", "ccc"]))
    assert table.names == ["by_length", "sometimes"] and table.weights == [1.0, 0.5]
    assert table.values == [[1.0, 1.0], [2.0, None], [3.0, 1.0]]
    assert table.totals == [1.5, 2.0, 3.5]
    assert load_rewards(["my_rewards.never"], None).score(*rows(["a", "b"])).totals == [None, None]
    assert load_rewards(["my_rewards.never"], ()).weights_at(0) == [1.0]
    assert rewards.score([], []).totals == []


LOGS = """
    def logs(completions, trainer_state, log_extra, log_metric, **columns):
        assert not columns.keys() & {"trainer_state", "log_extra", "log_metric"}
        log_extra("length", [len(c) for c in completions])
        log_metric("mean_length", sum(map(len, completions)) / len(completions))
        log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
        log_metric("epoch", trainer_state.epoch)
        return [1.0] * len(completions)
    def plain(completions, **columns):
        return [float(len(columns))] * len(completions)
    def optional(completions, log_metric=None):
        log_metric("called", 1)
        return [0.0] * len(completions)
    def short(completions, log_extra):
        log_extra("length", [1])
        return [0.0] * len(completions)
"""


def test_functions_get_the_trl_arguments_they_name(user_file):
    user_file(LOGS)
    rewards = load_rewards(["my_rewards.logs", "my_rewards.plain", "my_rewards.optional"])
    rewards.run = TrainerState(max_steps=8, num_train_epochs=2.0)
    table = rewards.score(*rows(["a", "bbb"], trainer_state=["x", "y"]), step=4)
    assert table.extra == [{"length": 1}, {"length": 3}]
    assert table.logged == {"mean_length": [2.0], "progress": [0.5], "epoch": [1.0], "called": [1.0]}
    assert [row[1] for row in table.values] == [3.0, 3.0], "prompts, completion_ids and the data column"
    with pytest.raises(ValueError, match="short: logged 1 values of 'length' for 2 completions"):
        load_rewards(["my_rewards.short"]).score(*rows(["a", "b"]))


def test_the_default_reward_is_logged_once_with_the_number_of_answers():
    lines = []
    prompts, _ = rows(["a", "b", "c"], answer=["1", None, "3"])
    rewards = open_rewards(RewardConfig(), lines.append)
    rewards.check_columns(prompts, "data")
    rewards.check_columns(prompts, "eval_data")
    open_rewards(RewardConfig(reward_funcs=("exact_match",)), lines.append).check_columns(prompts, "data")
    assert len(lines) == 1 and "exact_match" in lines[0] and "2 of 3 rows" in lines[0]


def test_functions_get_only_arguments_in_their_signature(user_file):
    user_file("""
        seen = {}
        def few(completions, answer):
            seen["few"] = (completions, answer)
            return [0.0] * len(completions)
        def all_of_it(completions, prompts=None, answer=None, **columns):
            seen["all"] = (completions, prompts, answer, columns)
            return [0.0] * len(completions)
        def optional(prompts, nothing=5):
            seen["optional"] = (prompts, nothing)
            return [0.0] * len(prompts)
    """)
    rewards = load_rewards(["my_rewards.few", "my_rewards.all_of_it", "my_rewards.optional"])
    prompts, completions = rows(["x", "yz"], answer=["1", "2"], level=[3, 4], prompt=["hidden", "hidden"])
    rewards.score(prompts, completions)
    seen = rewards.functions[0].call.__globals__["seen"]
    assert seen["few"] == (["x", "yz"], ["1", "2"])
    assert seen["all"] == (
        ["x", "yz"], ["q0", "q1"], ["1", "2"], {"level": [3, 4], "completion_ids": [[7, 7], [7, 7, 7]]},
    )  # fmt: skip
    assert seen["optional"] == (["q0", "q1"], 5)


def test_chat_prompts_have_chat_completions(user_file):
    user_file("""
        seen = []
        def record(completions, prompts):
            seen.append((completions, prompts))
            completions.clear()
            return [1.0, 2.0]
    """)
    rewards = load_rewards(["my_rewards.record", "my_rewards.record"])
    prompts, completions = rows(["x", "y"], chat=True)
    table = rewards.score(prompts, completions)
    assert table.names == ["record", "record_2"]
    assert table.values == [[1.0, 1.0], [2.0, 2.0]], "a function that clears its lists does not affect the next"
    assert rewards.functions[0].call.__globals__["seen"][1][1] == [p.prompt for p in prompts]
    user_file("def is_x(completions): return [c[0]['content'] == 'x' for c in completions]", "one.py")
    assert load_rewards(["one.is_x"]).score(prompts, completions).values == [[1.0], [0.0]]


def test_episodes_provide_messages_and_columns(user_file):
    user_file("""
        seen = []
        def record(completions, answer, num_turns, hint=None, **columns):
            seen.append((completions, answer, num_turns, hint, sorted(columns)))
            return [float(len(c)) for c in completions]
    """)
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4"},
    ]
    prompts, completions = rows(["It is 4", "5"], chat=True, answer=["4", "4"], hint=["old", "old"])
    completions[0] = replace(completions[0], messages=turns, columns={"num_turns": 2, "hint": "new", "prompts": "no"})
    rewards = load_rewards(["my_rewards.record", "last_number", "exact_match"])
    table = rewards.score(prompts, completions)
    assert table.values == [[3.0, 1.0, 0.0], [1.0, 0.0, 0.0]], "built-ins read the model's last turn"
    ((seen, answer, num_turns, hint, others),) = rewards.functions[0].call.__globals__["seen"]
    assert seen == [turns, [{"role": "assistant", "content": "5"}]]
    assert answer == ["4", "4"] and num_turns == [2, None] and hint == ["new", "old"]
    assert others == ["completion_ids", "prompts"]
    seen[0].clear()
    assert len(turns) == 3, "a function cannot modify the transcript"
    text_prompts, texts = rows(["It is 4"], answer=["4"])
    texts[0] = replace(texts[0], messages=turns, columns={"num_turns": 2})
    rewards.score(text_prompts, texts)
    assert rewards.functions[0].call.__globals__["seen"][1][0] == ["It is 4"], "a text prompt has a text completion"


def test_env_returns_the_reward_of_the_environment():
    prompts, completions = rows(["a", "b", "c"])
    completions[0] = replace(completions[0], columns={"env_reward": 0.5})
    completions[1] = replace(completions[1], columns={"env_reward": None})
    rewards = load_rewards(["env"])
    assert rewards.names == ["env"]
    assert rewards.score(prompts, completions).totals == [0.5, None, None]
    assert rewards.score(prompts[2:], completions[2:]).totals == [None]


def test_columns_added_by_episodes_satisfy_the_check(user_file):
    user_file("def turns(completions, num_turns):\n    return [None if n is None else -n for n in num_turns]")
    prompts, completions = rows(["a"], answer=["1"])
    for name, column in (("env", "env_reward"), ("my_rewards.turns", "num_turns")):
        with pytest.raises(ValueError, match=f"reward_funcs={name}: requires '{column}'"):
            load_rewards([name]).check_columns(prompts, "data")
        for added in ((column,), None):
            rewards = load_rewards([name])
            rewards.check_columns(prompts, "data", added=added)
            assert rewards.score(prompts, completions).totals == [None], "a failed episode lacks the column"


def test_environment_rewards_are_imported_when_named(monkeypatch):
    class Gym:
        def __call__(self, completions):
            return [2.0] * len(completions)

    for module, attribute, spec, value in (
        ("rollout.gyms.nemo_gym", "VerifyReward", "nemo_gym:verify", Gym),
        ("rollout.gyms.reasoning_gym", "score", "reasoning_gym", Gym().__call__),
    ):
        fake = types.ModuleType(module)
        setattr(fake, attribute, value)
        monkeypatch.setitem(sys.modules, module, fake)
        rewards = load_rewards([spec])
        assert rewards.names == [spec.partition(":")[0]] and rewards.score(*rows(["a"])).totals == [2.0]
    for wrong, right in (("nemo_gym", "nemo_gym:verify"), ("reasoning_gym:chain_sum", "reasoning_gym")):
        with pytest.raises(ValueError, match=f"reward_funcs={wrong}: .*{right}$"):
            load_rewards([wrong])


def test_async_functions_run_concurrently_with_each_other_and_with_sync_functions(user_file):
    user_file("""
        import asyncio, time
        started = []
        def waits():  # until all four calls of a batch have started
            started.append(True)
            deadline = time.monotonic() + 30
            while len(started) % 4:
                assert time.monotonic() < deadline, "the four calls do not run at the same time"
                yield
        async def slow(completions):
            for _ in waits():
                await asyncio.sleep(0.01)
            return [1.0] * len(completions)
        class Judge:
            def __init__(self):
                self.loops = set()
            async def __call__(self, completions, **columns):
                self.loops.add(id(asyncio.get_running_loop()))
                for _ in waits():
                    await asyncio.sleep(0.01)
                return [2.0] * len(completions)
        async def immediate(completions):
            return [1.0] * len(completions)
        def wrapped(completions):
            return immediate(completions)
        def blocking(completions):
            for _ in waits():
                time.sleep(0.01)
            return [3.0] * len(completions)
    """)
    rewards = load_rewards(["my_rewards.slow", "my_rewards.Judge", "my_rewards.blocking", "my_rewards.slow"])
    table = rewards.score(*rows(["a"]))
    assert table.values == [[1.0, 2.0, 3.0, 1.0]]
    rewards.score(*rows(["a"]))
    assert len(rewards.functions[1].call.loops) == 1, "one loop for the whole run, so that clients can keep connections"
    assert load_rewards(["my_rewards.wrapped"]).score(*rows(["a"])).values == [[1.0]]


def test_async_functions_work_inside_a_running_loop(user_file):
    import asyncio

    user_file("async def fine(completions):\n    return [1.0] * len(completions)")

    async def notebook():
        return load_rewards(["my_rewards.fine"]).score(*rows(["a"]))

    assert asyncio.run(notebook()).totals == [1.0]


def test_a_callable_object_keeps_its_state(user_file):
    user_file("""
        class Curriculum:
            def __init__(self):
                self.calls = 0
            def __call__(self, completions):
                self.calls += 1
                return [self.calls] * len(completions)
            def state_dict(self):
                return {"calls": self.calls}
            def load_state_dict(self, state):
                self.calls = state["calls"]
        shared = Curriculum()
    """)
    first = load_rewards(["my_rewards.Curriculum", "exact_match", "my_rewards.shared"])
    for _ in range(3):
        first.score(*rows(["a"], answer=["a"]))
    state = first.state_dict()
    assert state == {"Curriculum": {"calls": 3}, "shared": {"calls": 3}}
    second = load_rewards(["my_rewards.Curriculum", "exact_match", "my_rewards.shared"])
    second.load_state_dict(state)
    assert second.score(*rows(["a"], answer=["b"])).values == [[4.0, 0.0, 4.0]]
    with pytest.raises(ValueError, match=r"reward_funcs=\['exact_match'\]: .*Curriculum"):
        load_rewards(["exact_match"]).load_state_dict(state)


def test_numpy_and_torch_scores_are_converted(user_file):
    user_file("""
        import numpy as np, torch
        def array(completions): return np.arange(len(completions), dtype=np.float32)
        def tensor(completions): return torch.arange(len(completions))
        def scalars(completions): return (np.float64(0.5), torch.tensor(1.5), np.bool_(True), True)
    """)
    table = load_rewards([f"my_rewards.{n}" for n in ("array", "tensor", "scalars")]).score(*rows(list("abcd")))
    assert table.values == [[0.0, 0.0, 0.5], [1.0, 1.0, 1.5], [2.0, 2.0, 1.0], [3.0, 3.0, 1.0]]
    assert all(type(value) is float for row in table.values for value in row)
    assert np.isfinite(table.totals).all() and torch.tensor(table.totals).sum() == 16.0


BAD_SCORES = [
    ("return [1.0]", "returned 1 score for 3 completions \\(rows rows.jsonl:1, rows.jsonl:2, rows.jsonl:3\\)"),
    ("return None", "returned NoneType, not a list \\(rows rows.jsonl:1, rows.jsonl:2, rows.jsonl:3\\)"),
    ("return 1.0", "returned float, not a list"),
    ("return [0.0, 'high', 0.0]", "returned 'high' for rows.jsonl:2, not a number"),
    ("return [0.0, [1.0], 0.0]", "returned \\[1.0\\] for rows.jsonl:2, not a number"),
    ("return [0.0, 0.0, float('nan')]", "returned nan for rows.jsonl:3"),
    ("return [float('-inf'), 0.0, 0.0]", "returned -inf for rows.jsonl:1"),
    ("return [1 / int(c) for c in completions]",
     "raised ZeroDivisionError: .* on rows.jsonl:2 \\(my_rewards.py, line 2"),
    ("raise RuntimeError('two\\nlines')", "raised RuntimeError: two lines on rows.jsonl:1"),
    ("assert len(completions) < 3, 'many'; return [0.0]*3", "raised AssertionError: many \\(my_rewards.py, line 2"),
    ("return [c[-1]['content'] for c in completions]",
     "raised TypeError: .* on rows.jsonl:1 .*; completions are strings, because the prompts are text$"),
    ("import json; json.loads('{')", "raised JSONDecodeError: .*\\(my_rewards.py, line 2\\)"),
]  # fmt: skip


def test_bad_scores_report_the_function_and_the_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [("def", *case) for case in BAD_SCORES] + [("async def", *BAD_SCORES[number]) for number in (0, 3, 7)]
    cases.append(("async def", "raise SystemExit(3)", "raised RuntimeError: SystemExit"))
    for i, (kind, body, message) in enumerate(cases):
        write(tmp_path / f"bad_{i}.py", f"{kind} bad(completions):\n    {body}\n")
        rewards = load_rewards(["exact_match", f"bad_{i}.bad"])
        message = message.replace("my_rewards.py", f"bad_{i}.py")
        with pytest.raises(ValueError, match=f"^reward_funcs=bad_{i}.bad: {message}") as caught:
            rewards.score(*rows(["1", "0", "2"], answer=["1", "2", "3"]))
        assert "\n" not in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__, "the cause's traceback is hidden"


def test_an_error_hints_that_completions_are_messages(user_file):
    user_file("def strip(completions):\n    return [len(c.strip()) for c in completions]")
    with pytest.raises(ValueError, match="raised AttributeError: .* on rows.jsonl:1 .*completions are lists of mess"):
        load_rewards(["my_rewards.strip"]).score(*rows(["a", "b"], chat=True))


def test_a_missing_column_is_reported(user_file):
    user_file("async def wants(completions, solution):\n    return []")
    for name in ("my_rewards.wants", "exact_match"):
        with pytest.raises(ValueError, match=f"{name}: requires '(solution|answer)', which rows.jsonl:1 "):
            load_rewards([name]).score(*rows(["a"], level=[1]))


def test_missing_columns_are_reported_before_scoring(user_file, capsys):
    user_file("""
        def fine(completions, prompts, completion_ids, answer, *rest, style=None, **columns): return []
        async def wants(completions, answer, *, solution): return []
        def reserved(completion): return []
        class Judge:
            def __call__(self, completions, rubric): return []
    """)
    prompts, _ = rows(["a", "b"], answer=["1", None], completion=["c", "c"])
    load_rewards(["my_rewards.fine", "exact_match", "length", "regex:a"]).check_columns(prompts, "data")
    load_rewards(["my_rewards.wants"]).check_columns([], "eval_data")
    assert capsys.readouterr().err == ""
    for name, column in {"wants": "solution", "Judge": "rubric", "reserved": "completion"}.items():
        rewards = load_rewards(["exact_match", f"my_rewards.{name}"])
        message = f"=my_rewards.{name}: requires '{column}', .* eval_data .*rows.jsonl:1.*completion_ids, answer$"
        with pytest.raises(ValueError, match=message):
            rewards.check_columns(prompts, "eval_data")


def test_a_column_that_only_some_rows_have_is_none_in_the_other_rows(user_file, capsys):
    user_file("""
        def hint(completions, hint, style=None, **columns):
            return [None if h is None and s is None else 1.0 for h, s in zip(hint, style)]
    """)
    prompts, completions = rows(["x", "y", "z"])
    prompts[1].columns["hint"] = "look left"
    prompts[2].columns["style"] = "short"
    rewards = load_rewards(["my_rewards.hint"])
    with pytest.raises(ValueError, match="requires 'hint', which rows.jsonl:1 "):
        rewards.score(prompts[:1], completions[:1])
    assert rewards.score(prompts, completions).totals == [None, 1.0, 1.0]
    rewards.check_columns(prompts, "data")
    assert capsys.readouterr().err.startswith("data: 2 of 3 rows have no 'hint' (first: rows.jsonl:1)")
    assert [rewards.score([p], [c]).totals for p, c in zip(prompts, completions, strict=True)] == [[None], [1.0], [1.0]]


def test_a_reward_and_a_transform_in_one_file_share_the_module(user_file):
    from data.formats.registry import PROMPT_FORMATS, formatted_rows

    user_file("""
        calls = []
        def transform(cfg):
            return lambda example: {"prompt": example["problem"], "calls": calls.append(1)}
        def count(completions):
            return [len(calls)] * len(completions)
    """, "shared_file.py")  # fmt: skip
    Path("problems.jsonl").write_text('{"problem": "a"}\n{"problem": "b"}\n')
    rewards = load_rewards(["shared_file.count"])
    options = {"data_format": "shared_file.transform", "tokenizer": None, "cfg": None}
    formatted = formatted_rows(["problems.jsonl"], PROMPT_FORMATS, **options)
    assert [row.columns["prompt"] for _, row in formatted] == ["a", "b"]
    assert rewards.score(*rows(["x"])).totals == [2.0]
    assert load_rewards(["shared_file.count"]).score(*rows(["x"])).totals == [2.0]


def test_load_rewards_rejects(user_file):
    user_file("""
        LIMIT = 3
        max = max
        def fn(completions): return []
        class Needy:
            def __init__(self, url): pass
        class Half:
            def __call__(self): return []
            def state_dict(self): return {}
    """)
    user_file("def fn(:\n", "broken.py")
    user_file("import os\nimport absent_package\n", "needs.py")
    user_file("raise RuntimeError('no key')\n", "raises.py")
    for names, weights, message in [
        ([], None, r"reward_funcs=\(\)"),
        (["exact_match"], [1.0, 2.0], r"reward_weights=.*: 2 weights for 1 "),
        (["exact_match"], [float("nan")], "reward_weights=nan"),
        (["exact_mach"], None, "reward_funcs=exact_mach: .*'exact_match'"),
        (["regexp:a+"], None, "'regex'"),
        (["my_rewards"], None, "my_rewards.fn$"),
        (["my_rewards.py"], None, "my_rewards.fn$"),
        (["broken"], None, "broken.my_function"),
        (["nowhere.fn"], None, "'nowhere'"),
        (["nowhere.deep.fn"], None, "'nowhere.deep'"),
        (["my_rewards.fm"], None, "'fm'.*'fn'"),
        (["my_rewards.LIMIT"], None, "my_rewards.LIMIT: .*int"),
        (["my_rewards.max"], None, "my_rewards.max: .*signature"),
        (["my_rewards.Needy"], None, r"my_rewards.Needy: .*\(TypeError: .*'url'"),
        (["my_rewards.Half"], None, "my_rewards.Half: .*load_state_dict"),
        (["broken.fn"], None, r"\(SyntaxError: .*broken.py, line 1"),
        (["needs.fn"], None, r"ModuleNotFoundError: No module named 'absent_package' \(needs.py, line 2"),
        (["raises.fn"], None, r"\(RuntimeError: no key \(raises.py, line 1"),
        (["other/file.py:fn"], None, "other/file.py"),
        (["./broken.py:fn"], None, r"\(SyntaxError"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_rewards(names, weights)
        assert "\n" not in str(caught.value)


def test_state_must_be_json(user_file):
    user_file("""
        class Odd:
            def __call__(self, completions): return [0.0]
            def state_dict(self): return {"seen": {1, 2}}
            def load_state_dict(self, state): pass
    """)
    with pytest.raises(ValueError, match=r"my_rewards.Odd: state_dict\(\)"):
        load_rewards(["my_rewards.Odd"]).state_dict()


def test_the_working_folder_is_searched_first(tmp_path, monkeypatch):
    """Before strop's packages, libraries, and folders searched earlier."""
    for number, folder in enumerate(("one", "two"), 1):
        for name in ("my_rewards.py", "data.py", "random.py"):
            write(tmp_path / folder / name, f"def fn(completions):\n    return [{number}] * len(completions)\n")
        monkeypatch.chdir(tmp_path / folder)
        by_path = f"{Path('data.py').resolve()}:fn"
        for name in ("my_rewards.fn", "data.fn", "random.fn", "./my_rewards.py:fn", by_path):
            table = load_rewards([name]).score(*rows(["a"]))
            assert table.names == ["fn"] and table.totals == [number], name
    import random

    import data.types

    assert data.types.Prompt is Prompt and random.random() < 1, "imported modules are not replaced"


def test_a_user_package_may_import_its_own_modules(tmp_path, monkeypatch):
    write(tmp_path / "scoring_pkg" / "__init__.py", "")
    write(tmp_path / "scoring_pkg" / "parts.py", "VALUE = 4.0\n")
    write(tmp_path / "neighbour_mod.py", "VALUE = 1.0\n")
    write(
        tmp_path / "scoring_pkg" / "main.py",
        """
        from .parts import VALUE
        def fn(completions):
            import neighbour_mod
            return [VALUE + neighbour_mod.VALUE] * len(completions)
        def other(completions):
            return [VALUE] * len(completions)
        """,
    )
    monkeypatch.chdir(tmp_path)
    rewards = load_rewards(["scoring_pkg.main.fn", "scoring_pkg.main.other"])
    assert rewards.score(*rows(["a"])).values == [[5.0, 4.0]]


def test_importing_rewards_imports_no_heavy_library():
    heavy = ("torch", "transformers", "datasets")
    code = f"import sys, rollout.rewards.table; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_may_modify_its_arguments_without_side_effects(user_file, is_async):
    user_file(f"""
        {"async " if is_async else ""}def spoils(completions, prompts, completion_ids, **columns):
            scores = [len(tests) for tests in columns["tests"]]
            for prompt, completion in zip(prompts, completions):
                prompt[0]["content"] = "changed"
                prompt.append("more")
                completion[0]["tool_calls"][0]["function"]["name"] = "changed"
            for ids in completion_ids:
                ids.clear()
            for values in columns.values():
                for value in values:
                    value.clear()
                values.clear()
            prompts.clear()
            return scores
        seen = []
        def records(completions, prompts, completion_ids, **columns):
            seen.append((completions, prompts, completion_ids, columns))
            return [0.0] * len(completions)
    """)
    prompts, completions = rows(
        ["a", "b"], chat=True, tests=[["t1", "t2"], ["t3"]], meta=[{"deep": {"er": [1]}}] * 2, when=[{1, 2}, {3}]
    )
    turns = [{"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}]
    completions = [replace(completion, messages=turns, columns={"trace": [1, 2]}) for completion in completions]
    before = copy.deepcopy((prompts, completions))
    names = ["my_rewards.records", "my_rewards.spoils", "my_rewards.records", "my_rewards.spoils"]
    rewards = load_rewards(names)
    for _ in range(2):  # steps
        assert rewards.score(prompts, completions).values == [[0.0, 2.0, 0.0, 2.0], [0.0, 1.0, 0.0, 1.0]]
    assert (prompts, completions) == before
    seen = rewards.functions[0].call.__globals__["seen"]
    assert len(seen) == 4 and all(arguments == seen[0] for arguments in seen)
    assert seen[0][3] == {
        "tests": [["t1", "t2"], ["t3"]], "meta": [{"deep": {"er": [1]}}] * 2, "when": [{1, 2}, {3}],
        "trace": [[1, 2], [1, 2]],
    }  # fmt: skip
    rewards.close()


def test_values_that_cannot_be_copied_are_passed_unchanged(user_file):
    user_file("""
        def takes(completions, lock):
            return [float(one.acquire(blocking=False)) for one in lock]
    """)
    lock = threading.Lock()
    assert load_rewards(["my_rewards.takes"]).score(*rows(["a", "b"], lock=[lock, lock])).totals == [1.0, 0.0]
