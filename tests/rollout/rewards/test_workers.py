"""Reward functions in processes of their own, and what a fault of one costs: nothing here is simulated."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.calls import Fault, TrainerState, score_rows
from rollout.rewards.table import Rewards, load_rewards
from rollout.rewards.workers import shards

ROOT = Path(__file__).resolve().parents[3]


def rows(texts: list[str], *, group: int = 1, **columns: list) -> tuple[list[Prompt], list[Completion]]:
    """Row i is rows.jsonl:(i // group + 1)."""
    prompts = [
        Prompt(
            source=f"rows.jsonl:{i // group + 1}",
            prompt=f"q{i // group}",
            ids=[1],
            columns={name: values[i] for name, values in columns.items()},
        )
        for i in range(len(texts))
    ]
    completions = [
        Completion(prompt_ids=[1], ids=[7] * (len(text) + 1), logps=[], finish_reason="stop", text=text, versions=[])
        for text in texts
    ]
    return prompts, completions


@pytest.fixture
def open_rewards(tmp_path, monkeypatch):
    """open_rewards(source, *names, **options): functions of a file my_rewards.py, closed after the test."""
    monkeypatch.chdir(tmp_path)
    opened: list[Rewards] = []

    def load(source: str, *names: str, num_workers: int = 1, **options) -> Rewards:
        Path("my_rewards.py").write_text(textwrap.dedent(source))
        opened.append(load_rewards(names, num_workers=num_workers, **options))
        return opened[-1]

    yield load
    for rewards in opened:
        rewards.close()


def test_what_a_worker_logs_comes_back_in_the_order_of_the_rows(open_rewards):
    source = """
        def logs(completions, trainer_state, log_extra, log_metric):
            log_extra("step and text", [f"{trainer_state.global_step} {c}" for c in completions])
            log_extra("object", [object] * len(completions))
            log_metric("rows", len(completions))
            if "bad" in completions and len(completions) > 1:
                raise RuntimeError("not together with others")
            return [1.0] * len(completions)
    """
    rewards = open_rewards(source, "my_rewards.logs", num_workers=2, on_error="none", log=lambda text: None)
    rewards.run = TrainerState(max_steps=9)
    table = rewards.score(*rows(["a", "b", "bad", "c"]), step=3)
    assert [row["step and text"] for row in table.extra] == ["3 a", "3 b", "3 bad", "3 c"]
    assert table.extra[0]["object"] == "<class 'object'>"
    assert table.logged == {"rows": [2.0, 1.0, 1.0]}, "a call that failed logs nothing"


# scores -----------------------------------------------------------------------------------------------------------

MANY = """
    import os, asyncio, threading
    def whole_rows(completions, prompts, answer, completion_ids, **columns):
        assert threading.current_thread() is threading.main_thread()
        return [len(c) + 10 * len(i) + (a == p) for c, p, a, i in zip(completions, prompts, answer, completion_ids)]
    async def slow(completions):
        await asyncio.sleep(0.01)
        return [float(c) for c in completions]
    def process(completions):
        return [os.getpid()] * len(completions)
    class Counted:
        calls = 0
        def __call__(self, completions):
            self.calls += 1
            return [self.calls] * len(completions)
        def state_dict(self): return {"calls": self.calls}
        def load_state_dict(self, state): self.calls = state["calls"]
"""
NAMES = ("my_rewards.whole_rows", "my_rewards.slow", "exact_match")


def test_workers_give_the_numbers_of_this_process_in_the_same_order(open_rewards):
    """Each worker is one process for the whole run; functions with state stay in this one."""
    batch = rows([str(i) for i in range(15)], group=3, answer=[f"q{i // 5}" for i in range(15)])
    here = open_rewards(MANY, *NAMES, num_workers=0).score(*batch)
    extra = ("my_rewards.process", "my_rewards.Counted", "my_rewards.Counted")
    rewards = open_rewards(MANY, *NAMES, *extra, num_workers=2)
    tables = [rewards.score(*batch) for _ in range(2)]
    assert [row[:3] for row in tables[0].values] == here.values
    assert [row[1] for row in here.values] == [float(i) for i in range(15)]
    pids = {row[3] for table in tables for row in table.values}
    assert len(pids) <= 2 and os.getpid() not in pids
    assert [row[4:] for table in tables for row in table.values] == [[1.0, 1.0]] * 15 + [[2.0, 2.0]] * 15
    assert rewards.state_dict() == {"Counted": {"calls": 2}, "Counted_2": {"calls": 2}}


def test_groups_are_never_cut():
    five = rows(["x"] * 20, group=4)[0]
    assert shards(five, 2) == [(0, 12), (12, 20)], "5 groups for 2 workers: 3 and 2"
    assert shards(five, 8) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    assert shards(five, 1) == [(0, 20)] and shards([], 3) == []
    assert shards(five[:4], 3) == [(0, 4)]


def test_submitted_rows_are_scored_while_the_caller_does_something_else(open_rewards):
    source = """
        import os, time
        def nap(completions):
            open(f"{completions[0]}.begun", "w").close()
            while not os.path.exists("go_on"):
                time.sleep(0.01)
            return [len(c) for c in completions]
    """
    rewards = open_rewards(source, "my_rewards.nap", num_workers=2)
    scorings = [rewards.submit(*rows([text])) for text in ("a", "bb", "ccc", "dddd")]
    deadline = time.monotonic() + 60
    while len(begun := sorted(path.stem for path in Path().glob("*.begun"))) < 2:
        assert time.monotonic() < deadline, "two workers, but they do not work at the same time"
        time.sleep(0.05)
    assert begun == ["a", "bb"] and not any(scoring.done() for scoring in scorings)
    Path("go_on").touch()
    assert [scoring.result().totals for scoring in scorings] == [[1.0], [2.0], [3.0], [4.0]]
    assert scorings[3].done() and scorings[3].result() is scorings[3].result()


def test_without_workers_rows_are_scored_by_the_thread_that_asks(open_rewards):
    source = "import threading\ndef who(completions):\n    return [threading.get_ident()] * len(completions)\n"
    scoring = open_rewards(source, "my_rewards.who", num_workers=0).submit(*rows(["a"]))
    found = []
    thread = threading.Thread(target=lambda: found.append((threading.get_ident(), scoring.result().totals)))
    thread.start()
    thread.join()
    assert found[0][1] == [float(found[0][0])]


def test_a_worker_gets_values_as_they_are_and_calls_in_its_main_thread(open_rewards):
    """Values that JSON would change; verifiers built on alarms, which leave none behind."""
    source = """
        import datetime, signal, time
        class Late(Exception): pass
        def late(*_): raise Late
        def guarded(completions):
            signal.signal(signal.SIGALRM, late)
            scores = []
            for text in completions:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                try:
                    time.sleep(float(text))
                    scores.append(1.0)
                except Late:
                    scores.append(0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # forgotten
            return scores
        def next_one(completions):
            time.sleep(0.4)
            return [1.0] * len(completions)
        def kinds(completions, when, pair, table):
            good = zip(when, pair, table)
            return [type(w) is datetime.date and type(p) is tuple and t == {1: 2} for w, p, t in good]
    """
    rewards = open_rewards(source, "my_rewards.guarded", "my_rewards.next_one", "my_rewards.kinds")
    batch = rows(["0", "5", "0"], when=[datetime.date(2020, 1, 1)] * 3, pair=[(1, 2)] * 3, table=[{1: 2}] * 3)
    assert rewards.score(*batch).values == [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


# faults -----------------------------------------------------------------------------------------------------------

FAULTS = {  # what the function does to a row "bad", and what is said of it
    "raise": ("raise KeyError('no key')", "raised KeyError: 'no key' on rows.jsonl:3 \\(my_rewards.py, line"),
    "nan": ("return float('nan')", "returned nan for rows.jsonl:3; return a finite number"),
    "text": ("return 'high'", "returned 'high' for rows.jsonl:3, not a number"),
    "sys.exit": ("import sys; sys.exit(3)", "raised SystemExit: 3 on rows.jsonl:3"),
}
WORKER_FAULTS = {
    "hang": ("import time; time.sleep(1e6)", "did not return within reward_timeout=1 s on rows.jsonl:3; raise the lim"),
    "exit": ("import os; os._exit(3)", "ended its process \\(exit status 3\\) on rows.jsonl:3; a reward function must"),
    "crash": ("import os; os.abort()", "lost its process \\(killed by SIGABRT\\) on rows.jsonl:3; look for what"),
    "memory": ("return len(bytearray(2**30 + 2**28))",
               "ran out of memory \\(reward_memory_gb=1\\) on rows.jsonl:3 \\(my_rewards.py, line 5\\); use less"),
}  # fmt: skip
SOURCE = """
def one(text):
    if text != "bad":
        return len(text)
    {body}
def judge(completions):
    return [one(text) for text in completions]
def drops(completions):
    return [len(text) for text in completions if text != "bad"]
"""
TEXTS = ["a", "bb", "bad", "dddd"]
LEFT = [2.0, 4.0, None, 8.0]  # totals of judge and length-of-text together
HERE = [(name, 0) for name in FAULTS]


def options(num_workers: int) -> dict:
    return {"num_workers": num_workers, **({"timeout": 1.0, "memory_gb": 1.0} if num_workers else {})}


@pytest.mark.parametrize(("name", "num_workers"), [*HERE, ("raise", 1), ("crash", 1)])
def test_a_fault_stops_the_run_with_the_function_and_the_row(open_rewards, name, num_workers):
    body, sentence = (FAULTS | WORKER_FAULTS)[name]
    rewards = open_rewards(SOURCE.format(body=body), "exact_match", "my_rewards.judge", **options(num_workers))
    with pytest.raises(ValueError, match=f"^reward_funcs=my_rewards.judge: {sentence}") as caught:
        rewards.score(*rows(TEXTS, answer=TEXTS))
    assert "\n" not in str(caught.value)
    assert rewards.score(*rows(["a"], answer=["a"])).totals == [2.0], "what runs next has a worker again"


@pytest.mark.parametrize(("name", "num_workers"), [*HERE, ("nan", 1), ("hang", 1), ("exit", 1), ("memory", 1)])
def test_a_fault_costs_its_row_and_nothing_else(open_rewards, name, num_workers):
    body, sentence = (FAULTS | WORKER_FAULTS)[name]
    said: list[str] = []
    names = ("my_rewards.judge", "my_rewards.easy")
    source = SOURCE.format(body=body) + "def easy(completions):\n    return [len(text) for text in completions]\n"
    rewards = open_rewards(source, *names, on_error="none", log=said.append, **options(num_workers))
    table = rewards.score(*rows(TEXTS))
    assert table.totals == LEFT and table.failed == 1
    assert table.values[2] == [None, None], "half a reward would be another one"
    again = 2 if num_workers else 3  # in a worker the second call has no fault
    assert rewards.score(*rows(TEXTS[:again])).totals == LEFT[:again]
    failed = 1.0 if num_workers else 2.0
    assert [rewards.metrics(), rewards.metrics()] == [{"reward/failed_rows": failed}, {"reward/failed_rows": 0.0}]
    (text,) = said
    assert text.startswith("reward_funcs=my_rewards.judge: ") and "1 of the " in text and "reward_on_error=none" in text
    assert re.match(f"reward_funcs=my_rewards.judge: {sentence}", text), text


def test_a_list_of_the_wrong_length_names_its_rows(open_rewards):
    source = SOURCE.format(body="pass")
    rewards = open_rewards(source, "my_rewards.drops", num_workers=0)
    sentence = r"returned 3 scores for 4 completions \(rows rows.jsonl:1 to rows.jsonl:4\); return one per completion"
    with pytest.raises(ValueError, match=f"^reward_funcs=my_rewards.drops: {sentence}"):
        rewards.score(*rows(TEXTS))
    said: list[str] = []
    rewards = open_rewards(source, "my_rewards.drops", on_error="none", log=said.append, num_workers=0)
    assert rewards.score(*rows(TEXTS)).totals == [1.0, 2.0, None, 4.0]
    assert said == [
        "reward_funcs=my_rewards.drops: returned 0 scores for 1 completions (row rows.jsonl:3); return one per "
        "completion, None where it does not apply; 1 of the 4 rows of this call get no reward, and more of this kind "
        "are only counted (reward_on_error=none)"
    ]


def test_several_faults_of_different_kinds_in_one_call(open_rewards):
    source = """
        import os
        def one(text):
            if text == "exit": os._exit(1)
            if text == "raise": raise ValueError("no")
            return float("nan") if text == "nan" else 1.0
        def judge(completions):
            return [one(text) for text in completions]
    """
    said: list[str] = []
    rewards = open_rewards(source, "my_rewards.judge", on_error="none", log=said.append)
    table = rewards.score(*rows(["a", "exit", "nan", "raise"]))
    assert table.totals == [1.0, None, None, None] and table.failed == 3 and len(said) == 1


def test_when_every_row_hangs_the_search_is_given_up_in_time(monkeypatch):
    now, late = [0.0], Fault("timeout", "hung", "")
    monkeypatch.setattr("rollout.rewards.calls.time.monotonic", lambda: now[0])

    def call(low, high, seconds):
        now[0] += seconds
        return late

    assert score_rows(call, 32, first=late, timeout=8.0, stop=False).scores == [late] * 32
    assert now[0] < 5 * 8.0, "four limits for the search, and the call that was under way"


def test_a_hanging_worker_takes_its_own_children_with_it(open_rewards, tmp_path):
    source = """
        import subprocess, sys, time
        def judge(completions):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            open("pid", "w").write(str(child.pid))
            time.sleep(1e6)
    """
    rewards = open_rewards(source, "my_rewards.judge", on_error="none", log=lambda _: None, timeout=1.0)
    assert rewards.score(*rows(["a"])).totals == [None]
    assert not alive(int((tmp_path / "pid").read_text()))


def alive(pid: int) -> bool:
    """Also after the little while that its new parent takes to bury it."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            threads = len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z" and threads <= 1:  # while others of its threads end it cannot be waited for
            return False
        time.sleep(0.1)
    return True


def test_the_memory_limit_does_not_count_what_loading_took(open_rewards):
    source = """
        held = bytearray(2**28)
        def judge(completions):
            return [len(bytearray(2**27)) / 2**27 for _ in completions]
    """
    assert open_rewards(source, "my_rewards.judge", memory_gb=0.2).score(*rows(["a"])).totals == [1.0]


def test_a_worker_that_ended_between_two_calls_is_replaced(open_rewards):
    source = "import os\ndef judge(completions):\n    return [os.getpid()] * len(completions)\n"
    rewards = open_rewards(source, "my_rewards.judge")
    first = int(rewards.score(*rows(["a"])).totals[0])
    os.kill(first, signal.SIGKILL)
    assert not alive(first)
    assert int(rewards.score(*rows(["a"])).totals[0]) != first


def test_closing_ends_the_workers_also_in_the_middle_of_a_call(open_rewards):
    source = """
        import os, time
        def judge(completions):
            open(f"{os.getpid()}.pid", "w").close()
            time.sleep(1e6)
    """
    before = set(threading.enumerate())
    rewards = open_rewards(source, "my_rewards.judge", num_workers=2, timeout=1000.0)
    scoring, second = rewards.submit(*rows(["a"])), rewards.submit(*rows(["a"]))
    waiting = rewards.submit(*rows(["a"]))
    deadline = time.monotonic() + 60
    while len(pids := [int(path.stem) for path in Path().glob("*.pid")]) < 2:
        assert time.monotonic() < deadline, "the workers never called the function"
        time.sleep(0.05)
    started = time.perf_counter()
    rewards.close()
    assert time.perf_counter() - started < 30
    for one in (scoring, second, waiting):
        with pytest.raises(BaseException, match="closed|^$"):
            one.result()
    assert not any(alive(pid) for pid in pids)
    assert set(threading.enumerate()) == before
    rewards.close()  # a second time does nothing


def test_workers_end_with_a_trainer_that_was_killed(tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "import os, time\ndef judge(completions):\n    print(os.getpid(), flush=True)\n    time.sleep(1e6)\n"
    )
    code = (
        "from rollout.rewards.table import load_rewards\nfrom tests.rollout.rewards.test_workers import rows\n"
        "load_rewards(['my_rewards.judge'], num_workers=1).score(*rows(['a']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, env=environment)
    pid = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert not alive(pid)


def test_what_cannot_be_loaded_in_a_worker_is_said(open_rewards):
    source = """
        import os
        if os.path.exists("late"):
            raise RuntimeError("no licence")
        def judge(completions): return []
    """
    rewards = open_rewards(source, "my_rewards.judge", num_workers=0)
    Path("late").touch()
    rewards = open_rewards(source, "my_rewards.judge")  # this process has the module by now
    with pytest.raises(ValueError, match=r"cannot be imported \(RuntimeError: no licence .*\(in a worker\)$"):
        rewards.score(*rows(["a"]))


def test_a_missing_column_is_an_error_whatever_the_setting(open_rewards):
    rewards = open_rewards("", "exact_match", on_error="none")
    with pytest.raises(ValueError, match="asks for 'answer', which rows.jsonl:1 does not have"):
        rewards.score(*rows(["a"]))


def test_a_fault_that_no_part_has_loses_no_row(open_rewards):
    source = "def judge(completions):\n    assert len(completions) < 3, 'many'\n    return [1.0] * len(completions)\n"
    said: list[str] = []
    rewards = open_rewards(source, "my_rewards.judge", num_workers=0, on_error="none", log=said.append)
    assert rewards.score(*rows(list("abcdef"))).totals == [1.0] * 6
    assert "raised AssertionError: many (my_rewards.py, line 2)" in said[0] and "0 of the 6 rows" in said[0]


def test_a_call_on_a_part_gets_its_share_of_the_time():
    asked = []

    def call(low, high, seconds):
        asked.append((low, high, seconds))
        return Fault("timeout", "hung", "") if low <= 3 < high else [1.0] * (high - low)

    fault = Fault("timeout", "hung for 8 s", "")
    found = score_rows(call, 16, first=fault, timeout=8.0, stop=False)
    assert found.row == 3 and found.scores == [1.0] * 3 + [fault] + [1.0] * 12
    assert asked == [(0, 8, 4.0), (0, 4, 2.0), (0, 2, 1.0), (2, 4, 1.0), (2, 3, 1.0), (3, 4, 1.0), (4, 8, 2.0),
                     (8, 16, 4.0)]  # fmt: skip
    asked.clear()
    assert score_rows(call, 16, first=fault, timeout=8.0, stop=True).row == 3
    assert asked[-1] == (3, 4, 1.0), "nothing is asked for after the row is known"


def test_a_file_of_the_users_called_like_one_of_our_packages_is_left_to_the_user(open_rewards):
    Path("data.py").write_text("VALUE = 3\n")
    sys.path.insert(0, str(Path.cwd()))  # as after the first look for a module of theirs
    source = """
        def judge(completions):
            return [1.0] * len(completions)
    """
    try:
        assert open_rewards(source, "my_rewards.judge", num_workers=1).score(*rows(["a", "b"])).totals == [1.0, 1.0]
    finally:
        sys.path.remove(str(Path.cwd()))
