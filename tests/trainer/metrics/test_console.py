"""Test plain lines without a terminal, and the live display in a pseudo-terminal."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.metrics import console as console_module
from trainer.metrics.console import (
    Console,
    duration,
    eval_decoding,
    eval_line,
    evaluation_lines,
    number,
    one_line,
    prompt_text,
    sparkline,
    train_decoding,
)  # fmt: skip
from trainer.metrics.figure import LiveFigure
from trainer.metrics.health import Finding

ROOT = Path(__file__).resolve().parents[3]
STEP = {
    "reward/mean": 0.5,
    "loss/total": 1e-4,
    "policy/entropy": 0.25,
    "rollout/len_mean": 3.4,
    "optim/grad_norm": 0.8,
    "perf/tokens_per_s": 12345.6,
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    return clock


def test_plain_lines(clock):
    out = io.StringIO()
    config = {"temperature": 1.0, "rollout": {"eval_temperature": 0.0}}
    console = Console(10, 0, "grpo tiny", logging_steps=4, stream=out, config=config)
    console.start()
    clock.now += 500  # the pace excludes an evaluation before training
    console.step(0, {"eval/reward/mean": 0.41, "eval/exact_match/mean": 0.41, "eval/len_mean": 3.0})
    for step in range(1, 11):
        clock.now += 30
        console.step(step, STEP | ({"eval/reward/mean": 0.9} if step == 10 else {}))
    console.stop()
    numbers = "reward (sampled) 0.500  entropy 0.250  length 3.40  grad norm 0.800  tokens/s 12.3k"
    assert out.getvalue().splitlines() == [
        "grpo tiny: 10 steps",
        "step  0/10  eval (greedy): reward 0.410  exact_match 0.410  length 3.00",
        f"step  4/10  {numbers}  left 3:00",
        f"step  8/10  {numbers}  left 1:00",
        f"step 10/10  {numbers}",
        "step 10/10  eval (greedy): reward 0.900",
    ]


PAIR = {"reward/chosen": 0.1, "reward/rejected": -0.2, "loss/total": 0.5}
SOLVED = STEP | {"reward/zero_std_frac": 1.0, "optim/grad_norm": 0.0, "perf/tokens_per_s": 0.0}
REASON = "nothing to learn: "


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (PAIR | {"reward/accuracy": 0.75, "reward/margin": 0.3}, "accuracy 0.750  margin 0.300  loss 0.500"),
        (PAIR, "chosen 0.100  rejected -0.200  loss 0.500"),  # kto
        ({"reward/step_accuracy": 0.5, "loss/total": 0.5}, "accuracy 0.500  loss 0.500"),  # prm
        (SOLVED | {"reward/mean": 1.0, "reward/std": 0.0}, f"length 3.40  {REASON}every completion got reward 1.00"),
        (SOLVED | {"reward/mean": 0.0, "reward/std": 0.0}, f"length 3.40  {REASON}every completion got reward 0"),
        (SOLVED | {"reward/std": 0.5}, f"length 3.40  {REASON}equal rewards within every group"),
        (SOLVED | {"optim/grad_norm": 0.1}, "grad norm 0.100  tokens/s 0"),  # replayed groups, or a KL term
    ],
)
def test_step_lines(metrics, line):
    out = io.StringIO()
    console = Console(1, 0, "t", stream=out)
    console.start()
    console.step(1, metrics)
    assert out.getvalue().rstrip().endswith(line)


def test_names_of_decoding():
    greedy = {"temperature": 0.7, "rollout": {"eval_temperature": 0}}
    names = {"eval/reward/mean": 1.0}
    assert eval_decoding(greedy, names) == "greedy" and train_decoding(greedy) == "sampled at temperature 0.7"
    assert eval_decoding(greedy | {"rollout": {"eval_temperature": 0.6}}, names) == "sampled at temperature 0.6"
    assert eval_decoding(greedy, {"eval/cfm": 1.0}) == "sampled at temperature 0.7"  # EBFT
    assert eval_decoding({}, names) == train_decoding({}) == ""  # nothing is sampled


def test_a_resumed_run_is_labelled_and_times_only_new_steps(clock):
    out = io.StringIO()
    console = Console(100, 90, "sft tiny", stream=out)
    console.start()
    clock.now += 10
    console.step(91, {"loss/total": 1.25, "loss/nll": 1.25, "optim/grad_norm": 2.0, "health/x": None})
    assert out.getvalue().splitlines() == [
        "sft tiny: 100 steps, resumed after step 90",
        "step  91/100  loss 1.25  grad norm 2.00  left 1:30",
    ]


def test_notes_warnings_and_samples_in_plain_text(clock):
    out = io.StringIO()
    console = Console(10, 0, "t", stream=out)
    console.start()
    console.note("saved [here]")
    console.warn(Finding("x", 1.0, "too high: lower it"))
    console.warn(Finding("x", 1.0, "all solved", "info"))
    sample = {
        "prompt": [{"role": "user", "content": "1+1=\n"}],
        "completion": "2\x1b[2J",
        "rewards": {"f": 1.0, "g": None},
    }
    console.sample(sample | {"advantage": -0.5})
    clock.now += 59
    console.sample(sample)
    clock.now += 2
    console.sample(sample | {"rewards": {}})
    assert out.getvalue().splitlines()[1:] == [
        "saved [here]",
        "warning: too high: lower it",
        "info: all solved",
        r"sample: 1+1=\n -> 2\x1b[2J  (f 1.00, advantage -0.50)",
        r"sample: 1+1=\n -> 2\x1b[2J",
    ]


def test_text_in_any_script_survives_an_ascii_stream():
    raw = io.BytesIO()
    console = Console(1, 0, "t", stream=io.TextIOWrapper(raw, encoding="ascii"))
    console.start()
    console.note("caf\u00e9 \u4f60")
    assert raw.getvalue() == b"t: 1 step\ncaf? ?\n"


def test_small_formats():
    values = [0, 0.0312, 3.414, 128.4, 9876, 12345.6, 1234567, 3.2e-5, -0.5, 5e9]
    assert [number(v) for v in values] == (
        ["0", "0.031", "3.41", "128", "9876", "12.3k", "1.23M", "3.2e-05", "-0.500", "5.0e+09"]
    )
    assert [duration(s) for s in (0, 42.4, 725, 10809, 183609)] == ["0:00", "0:42", "12:05", "3:00:09", "2d 3:00:09"]
    assert sparkline([0.0, 1.0]) == "\u2581\u2588" and sparkline([2.0] * 99) == "\u2581" * 16
    assert eval_line({"loss/total": 1.0}, {}) == ""
    assert one_line("a\tb" + "c" * 200, limit=10) == "a\\tbccccccc..."
    assert prompt_text("x" * 200 + "?", limit=4) == "...xxx?" and prompt_text([]) == ""


def test_evaluation_lines_compare_first_and_last():
    records = [
        {"step": 0, "eval/exact_match/mean": 0.25, "eval/len_mean": 4.0},
        {"step": 1, "loss/total": 1.0, "eval/once": 1.0},
        {"step": 50, "eval/exact_match/mean": 0.5, "eval/len_mean": None},
        {"step": 60, "eval/exact_match/mean": 0.9},
    ]
    config = {"temperature": 1.0, "rollout": {"eval_temperature": 0.0}}
    assert evaluation_lines(records, config) == ["held-out exact_match (greedy): 0.250 before, 0.900 after (60 steps)"]
    for step in range(1, 51):
        records.append({"step": step, "reward/mean": step / 50})
    lines = evaluation_lines(records, config, {"rollout.eval_temperature": [(40, "0.5")]})
    assert lines[0].startswith("held-out exact_match (greedy from step 41): ")
    assert lines[1] == (
        "training reward (sampled at temperature 1): 0.060 in the first 5 steps, 0.960 in the last 5"
    )  # greedy and sampled rewards may move in opposite directions
    ebft = {"eval/reward/mean": 0.1, "eval/cfm": 0.2, "eval/nll": 0.3}
    lines = evaluation_lines([{"step": 0, **ebft}, {"step": 4, **ebft}], config)
    assert [line.partition(":")[0].removeprefix("held-out ") for line in lines] == (
        ["cfm (sampled at temperature 1)", "reward (sampled at temperature 1)", "nll"]
    )
    assert eval_line(ebft, config).endswith("cfm 0.200  reward 0.100; on given answers: nll 0.300")
    ties, better = ({"eval/reward/accuracy": x, "eval/reward/margin": x, "eval/loss": 0.5} for x in (0.0, 0.75))
    assert evaluation_lines([{"step": 0, **ties}, {"step": 4, **better}], {})[0] == (
        "held-out reward/accuracy: all ties before, 0.750 after (4 steps)"
    )
    assert eval_line(ties, {}) == "eval: reward/accuracy all ties  reward/margin 0  loss 0.500"


def test_one_live_figure_in_a_notebook(monkeypatch):
    drawn = []
    handle = SimpleNamespace(update=drawn.append)
    display = SimpleNamespace(display=lambda curves, display_id: drawn.append(curves) or handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("trainer.metrics.figure.REDRAWN_S", 0.0)
    out = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    console = Console(3, 0, "t", stream=out)
    assert console.is_notebook
    console.figure = LiveFigure(3)
    console.start()
    for step in (1, 2, 3):
        values = {"loss/total": step / 8, "reward/mean": step / 2, "optim/grad_norm": math.nan}
        console.step(step, values | ({"eval/nll": 0.5} if step == 2 else {}))
    console.stop()
    console.note("done")
    assert out.getvalue().splitlines() == ["t: 3 steps", "step 2/3  eval: nll 0.500", "done"]
    assert len(drawn) == 4 and "step 1/3" in drawn[0].svg and "reward/mean: 1.5" in drawn[-1].svg
    assert "loss/total" not in drawn[-1].svg  # near zero by construction


SCRIPT = """
import time
from trainer.metrics.console import Console
from trainer.metrics.health import Finding
console = Console(8, 2, "grpo tiny")
console.start()
console.step(2, {"eval/reward/mean": 0.25})
for step in range(3, 9):
    time.sleep(0.05)
    console.step(step, {"reward/mean": step / 8, "policy/entropy": 0.25, "perf/tokens_per_s": 12345.6})
    console.sample({"prompt": "37+58=", "completion": "95[b]", "rewards": {"exact_match": 1.0}, "advantage": 0.5})
    if step == 5:
        print("printed by a reward")
        console.warn(Finding("x", 1.0, "something [odd] is up: do this"))
time.sleep(0.4)
console.step(8, {"eval/reward/mean": 0.75})
console.stop()
print("THE END")
"""


def run_in_terminal(columns, **environment):
    """Return the output of a process in a pseudo-terminal of this width."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", **environment}
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        env.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=follower, stdout=follower, stderr=follower, cwd=ROOT, env=env
    )
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # on Linux: the other end was closed
            break
        if not block:
            break
        output += block
    os.close(leader)
    assert process.wait() == 0, output.decode()
    return output.decode()


def test_live_display_in_a_terminal():
    raw = run_in_terminal(100)
    assert "\x1b[?25l" in raw and raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "the cursor must come back"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")
    for expected in (
        "grpo tiny: 8 steps, resumed after step 2",
        "step 2/8  eval: reward 0.250",
        "warning: something [odd] is up: do this",
        "printed by a reward",
        "37+58= 95[b]  exact_match 1.00, advantage +0.50",
        "0.250 -> 0.750",
        "12.3k",
    ):
        assert expected in text, expected
    last = [line.strip() for line in text.split("THE END")[0].splitlines() if line.strip()][-3:]
    assert "8/8" in last[0] and "elapsed" in last[0] and "left" not in last[0]
    assert last[1].split() == ["reward", "so", "far", "entropy", "tokens/s", "eval"]
    assert last[2].startswith("1.00") and last[2].endswith("0.250 -> 0.750")


def test_narrow_terminals_drop_numbers_instead_of_breaking_them():
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", run_in_terminal(36)).replace("\r", "\n")
    last = [line.strip() for line in text.split("THE END")[0].splitlines() if line.strip()][-2:]
    assert last[0].split() == ["reward", "entropy", "eval"]
    assert last[1].split() == ["1.00", "0.250", "0.250", "->", "0.750"]


def test_dumb_terminal_gets_plain_lines():
    raw = run_in_terminal(100, TERM="dumb")
    assert "\x1b" not in raw and "step 8/8  reward 1.00" in raw
