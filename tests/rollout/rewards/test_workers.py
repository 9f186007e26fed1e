"""Reward functions in real worker processes, and the consequences of their faults."""

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


def rows(
    texts: list[str], *, group: int = 1, chat: bool = False, **columns: list
) -> tuple[list[Prompt], list[Completion]]:
    """Return a Prompt and a Completion per text; row i comes from rows.jsonl:(i // group + 1)."""
    prompts = [
        Prompt(
            source=f"rows.jsonl:{i // group + 1}",
            prompt=[{"role": "user", "content": f"q{i // group}"}] if chat else f"q{i // group}",
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
    """open_rewards(source, *names, **options) loads functions from my_rewards.py and closes them after the test."""
    monkeypatch.chdir(tmp_path)
    opened: list[Rewards] = []

    def load(source: str, *names: str, num_workers: int = 1, **options) -> Rewards:
        Path("my_rewards.py").write_text(textwrap.dedent(source))
        opened.append(load_rewards(names, num_workers=num_workers, **options))
        return opened[-1]

    yield load
    for rewards in opened:
        rewards.close()


def test_values_logged_by_workers_come_back_in_row_order(open_rewards):
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


def test_workers_return_the_same_scores_as_the_trainer_process(open_rewards):
    """Each worker is one process for the whole run; functions with state stay in the trainer."""
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


def test_groups_are_never_split():
    five = rows(["x"] * 20, group=4)[0]
    assert shards(five, 2) == [(0, 12), (12, 20)], "5 groups for 2 workers: 3 and 2"
    assert shards(five, 8) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    assert shards(five, 1) == [(0, 20)] and shards([], 3) == []
    assert shards(five[:4], 3) == [(0, 4)]


def test_submitted_rows_are_scored_in_the_background(open_rewards):
    source = """
        import os, time
        def nap(completions):
            open(f"{completions[0]}.started", "w").close()
            while not os.path.exists("continue"):
                time.sleep(0.01)
            return [len(c) for c in completions]
    """
    rewards = open_rewards(source, "my_rewards.nap", num_workers=2)
    scorings = [rewards.submit(*rows([text])) for text in ("a", "bb", "ccc", "dddd")]
    deadline = time.monotonic() + 60
    while len(started := sorted(path.stem for path in Path().glob("*.started"))) < 2:
        assert time.monotonic() < deadline, "the two workers do not run at the same time"
        time.sleep(0.05)
    assert started == ["a", "bb"] and not any(scoring.done() for scoring in scorings)
    Path("continue").touch()
    assert [scoring.result().totals for scoring in scorings] == [[1.0], [2.0], [3.0], [4.0]]
    assert scorings[3].done() and scorings[3].result() is scorings[3].result()


def test_without_workers_the_calling_thread_scores(open_rewards):
    source = "import threading\ndef who(completions):\n    return [threading.get_ident()] * len(completions)\n"
    scoring = open_rewards(source, "my_rewards.who", num_workers=0).submit(*rows(["a"]))
    results = []
    thread = threading.Thread(target=lambda: results.append((threading.get_ident(), scoring.result().totals)))
    thread.start()
    thread.join()
    assert results[0][1] == [float(results[0][0])]


def test_a_worker_gets_unchanged_values_and_runs_functions_in_its_main_thread(open_rewards, monkeypatch):
    """Values that JSON would change arrive unchanged; verifiers may use alarms, and a leftover alarm is cancelled.

    The calls take longer than their limit, but less CPU time, as on a busy machine.
    """
    monkeypatch.setattr("rollout.rewards.workers.process_seconds", lambda pid: time.monotonic() / 90)
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
    names = ("my_rewards.guarded", "my_rewards.next_one", "my_rewards.kinds")
    rewards = open_rewards(source, *names, timeout=0.1)
    batch = rows(["0", "5", "0"], when=[datetime.date(2020, 1, 1)] * 3, pair=[(1, 2)] * 3, table=[{1: 2}] * 3)
    assert rewards.score(*batch).values == [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


# faults -----------------------------------------------------------------------------------------------------------

FAULTS = {  # code that runs on a row "bad", and the message
    "raise": ("raise KeyError('no key')", r"raised KeyError: 'no key' on rows.jsonl:3 \(my_rewards.py, line"),
    "nan": ("return float('nan')", "returned nan for rows.jsonl:3"),
    "text": ("return 'high'", "returned 'high' for rows.jsonl:3"),
    "sys.exit": ("import sys; sys.exit(3)", "raised SystemExit: 3 on rows.jsonl:3"),
}
WORKER_FAULTS = {
    "hang": ("while True: pass", "did not return within reward_timeout=1 s on rows.jsonl:3"),
    "exit": ("import os; os._exit(3)", r"ended its process \(exit status 3\) on rows.jsonl:3"),
    "crash": ("import os; os.abort()", r"lost its process \(killed by SIGABRT\) on rows.jsonl:3"),
    "memory": ("return len(bytearray(2**30 + 2**28))",
               r"ran out of memory \(reward_memory_gb=1\) on rows.jsonl:3 \(my_rewards.py, line 5\)"),
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
TOTALS = [2.0, 4.0, None, 8.0]  # judge plus length of the text
HERE = [(name, 0) for name in FAULTS]


def options(num_workers: int) -> dict:
    return {"num_workers": num_workers, **({"timeout": 1.0, "memory_gb": 1.0} if num_workers else {})}


@pytest.mark.parametrize(("name", "num_workers"), [*HERE, ("raise", 1), ("crash", 1)])
def test_a_fault_stops_the_run_and_names_the_function_and_the_row(open_rewards, name, num_workers):
    body, message = (FAULTS | WORKER_FAULTS)[name]
    rewards = open_rewards(SOURCE.format(body=body), "exact_match", "my_rewards.judge", **options(num_workers))
    with pytest.raises(ValueError, match=f"^reward_funcs=my_rewards.judge: {message}") as caught:
        rewards.score(*rows(TEXTS, answer=TEXTS))
    assert "\n" not in str(caught.value)
    assert rewards.score(*rows(["a"], answer=["a"])).totals == [2.0], "the worker is replaced"


@pytest.mark.parametrize(("name", "num_workers"), [*HERE, ("nan", 1), ("hang", 1), ("exit", 1), ("memory", 1)])
def test_a_fault_affects_only_its_row(open_rewards, name, num_workers):
    body, message = (FAULTS | WORKER_FAULTS)[name]
    lines: list[str] = []
    names = ("my_rewards.judge", "my_rewards.easy")
    source = SOURCE.format(body=body) + "def easy(completions):\n    return [len(text) for text in completions]\n"
    rewards = open_rewards(source, *names, on_error="none", log=lines.append, **options(num_workers))
    table = rewards.score(*rows(TEXTS))
    assert table.totals == TOTALS and table.failed == 1
    assert table.values[2] == [None, None], "no partial reward"
    num_rows = 2 if num_workers else 3  # in a worker the second call has no fault
    assert rewards.score(*rows(TEXTS[:num_rows])).totals == TOTALS[:num_rows]
    failed = 1.0 if num_workers else 2.0
    assert [rewards.metrics(), rewards.metrics()] == [{"reward/failed_rows": failed}, {"reward/failed_rows": 0.0}]
    (line,) = lines
    assert re.match(f"reward_funcs=my_rewards.judge: {message}.*1 of 4 rows.*reward_on_error=none", line), line


def test_a_list_of_the_wrong_length_names_its_rows(open_rewards):
    source = SOURCE.format(body="pass")
    rewards = open_rewards(source, "my_rewards.drops", num_workers=0)
    named = r"\(rows rows.jsonl:1, rows.jsonl:2, rows.jsonl:3 and 1 more\)"
    message = f"my_rewards.drops: returned 3 scores for 4 completions {named}"
    with pytest.raises(ValueError, match=message):
        rewards.score(*rows(TEXTS))
    lines: list[str] = []
    rewards = open_rewards(source, "my_rewards.drops", on_error="none", log=lines.append, num_workers=0)
    assert rewards.score(*rows(TEXTS)).totals == [1.0, 2.0, None, 4.0]
    assert re.search(r"returned 0 scores for 1 completions \(row rows.jsonl:3\).*1 of 4 rows", *lines)


def test_one_call_may_have_several_kinds_of_fault(open_rewards):
    source = """
        import os
        def one(text):
            if text == "exit": os._exit(1)
            if text == "raise": raise ValueError("no")
            return float("nan") if text == "nan" else 1.0
        def judge(completions):
            return [one(text) for text in completions]
    """
    lines: list[str] = []
    rewards = open_rewards(source, "my_rewards.judge", on_error="none", log=lines.append)
    table = rewards.score(*rows(["a", "exit", "nan", "raise"]))
    assert table.totals == [1.0, None, None, None] and table.failed == 3 and len(lines) == 1


def test_the_search_ends_in_time_if_every_row_hangs(monkeypatch):
    now, late = [0.0], Fault("timeout", "hung", "")
    monkeypatch.setattr("rollout.rewards.calls.time.monotonic", lambda: now[0])

    def call(low, high, seconds):
        now[0] += seconds
        return late

    assert score_rows(call, 32, first=late, timeout=8.0, stop=False).scores == [late] * 32
    assert now[0] < 5 * 8.0, "four time limits for the search, and the last call"


def test_a_hanging_worker_is_killed_with_its_children(open_rewards, tmp_path):
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
    """Return whether the process is alive, after waiting up to 5 s for its new parent to reap it."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            threads = len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z" and threads <= 1:  # a zombie with running threads cannot be reaped yet
            return False
        time.sleep(0.1)
    return True


def test_the_memory_limit_does_not_count_memory_used_by_loading(open_rewards):
    source = """
        loaded = bytearray(2**28)
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


def test_closing_ends_the_workers_even_during_a_call(open_rewards):
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
    for pending in (scoring, second, waiting):
        with pytest.raises(BaseException, match="closed|^$"):
            pending.result()
    assert not any(alive(pid) for pid in pids)
    assert set(threading.enumerate()) <= before
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


def test_an_import_error_in_a_worker_is_reported(open_rewards):
    source = """
        import os
        if os.path.exists("late"):
            raise RuntimeError("no licence")
        def judge(completions): return []
    """
    rewards = open_rewards(source, "my_rewards.judge", num_workers=0)
    Path("late").touch()
    rewards = open_rewards(source, "my_rewards.judge")  # this process has already imported the module
    with pytest.raises(ValueError, match=r"\(RuntimeError: no licence .*\(in a worker\)$"):
        rewards.score(*rows(["a"]))


def test_a_missing_column_is_an_error_even_with_on_error_none(open_rewards):
    rewards = open_rewards("", "exact_match", on_error="none")
    with pytest.raises(ValueError, match="requires 'answer', which rows.jsonl:1 "):
        rewards.score(*rows(["a"]))


def test_a_fault_that_retries_do_not_reproduce_loses_no_row(open_rewards):
    source = "def judge(completions):\n    assert len(completions) < 3, 'many'\n    return [1.0] * len(completions)\n"
    lines: list[str] = []
    rewards = open_rewards(source, "my_rewards.judge", num_workers=0, on_error="none", log=lines.append)
    assert rewards.score(*rows(list("abcdef"))).totals == [1.0] * 6
    assert "raised AssertionError: many (my_rewards.py, line 2)" in lines[0] and "0 of 6 rows" in lines[0]


def test_a_retry_gets_its_fraction_of_the_time_limit():
    calls = []

    def call(low, high, seconds):
        calls.append((low, high, seconds))
        return Fault("timeout", "hung", "") if low <= 3 < high else [1.0] * (high - low)

    fault = Fault("timeout", "hung for 8 s", "")
    result = score_rows(call, 16, first=fault, timeout=8.0, stop=False)
    assert result.row == 3 and result.scores == [1.0] * 3 + [fault] + [1.0] * 12
    assert calls == [(0, 8, 4.0), (0, 4, 2.0), (0, 2, 1.0), (2, 4, 1.0), (2, 3, 1.0), (3, 4, 1.0), (4, 8, 2.0),
                     (8, 16, 4.0)]  # fmt: skip
    calls.clear()
    assert score_rows(call, 16, first=fault, timeout=8.0, stop=True).row == 3
    assert calls[-1] == (3, 4, 1.0), "no call after the row is known"


def test_a_user_file_named_like_a_strop_package_does_not_shadow_it(open_rewards):
    Path("data.py").write_text("VALUE = 3\n")
    sys.path.insert(0, str(Path.cwd()))  # as after loading a user module
    source = "def judge(completions):\n    return [1.0] * len(completions)\n"
    try:
        assert open_rewards(source, "my_rewards.judge", num_workers=1).score(*rows(["a", "b"])).totals == [1.0, 1.0]
    finally:
        sys.path.remove(str(Path.cwd()))
