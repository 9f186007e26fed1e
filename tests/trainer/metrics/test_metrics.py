"""Test glossary, sums, JSON Lines files and sinks."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from trainer.metrics import metrics
from trainer.metrics.metrics import (
    GLOSSARY,
    JsonlLog,
    MetricSums,
    Timer,
    check_sinks,
    describe,
    open_sinks,
    read_jsonl,
    truncate_after,
)

LOGGED = """step reward/mean reward/std reward/zero_std_frac reward/exact_match/mean reward/exact_match/std
policy/entropy policy/clip_frac policy/ratio policy/behaviour_kl policy/ref_kl_k3 loss/total loss/policy loss/kl
loss/nll optim/grad_norm optim/lr rollout/len_mean rollout/len_max rollout/truncated_frac time/step_s time/rollout_s
time/reward_s time/train_s time/wall_s perf/tokens_per_s mem/peak_gib data/epoch data/tokens_total data/prompts_total
eval/reward/mean eval/exact_match/mean eval/len_mean eval/nll eval/rows health/entropy_low""".split()


def test_every_logged_name_is_described_in_one_line():
    for name in LOGGED:
        text = describe(name)
        assert text and "\n" not in text and text.endswith("."), name


def test_describe_prefers_the_exact_entry_and_accepts_odd_function_names():
    assert describe("eval/reward/mean") == GLOSSARY["eval/reward/mean"]
    assert describe("eval/last_number/mean") == GLOSSARY["eval/*/mean"]
    assert describe("reward/regex:^a/b\nc$/std") == GLOSSARY["reward/*/std"]
    assert describe("reward//mean") is None
    assert describe("policy/entropyy") is None


def test_means_divide_once_over_all_micro_batches():
    sums = MetricSums()
    sums.add({"loss/nll": (torch.tensor(6.0), torch.tensor(2)), "policy/entropy": (torch.tensor(1.0), torch.tensor(4))})
    sums.add({"loss/nll": (torch.tensor(0.0, requires_grad=True), torch.tensor(4)), "reward/mean": (3.0, 2)})
    assert sums.means() == {"loss/nll": 1.0, "policy/entropy": 0.25, "reward/mean": 1.5}


def test_a_mean_with_count_zero_is_dropped():
    sums = MetricSums()
    sums.add({"policy/entropy": (torch.tensor(0.0), torch.tensor(0)), "loss/nll": (1.0, 2)})
    assert sums.means() == {"loss/nll": 0.5}
    assert MetricSums().means() == {}


def test_means_reduce_once_in_sorted_order(monkeypatch):
    seen = []
    monkeypatch.setattr(metrics, "all_sum", lambda x, name: seen.append(x.tolist()) or 2 * x)
    sums = MetricSums()
    sums.add({"b/x": (3.0, 1), "a/x": (1.0, 2)})
    assert sums.means() == {"a/x": 0.5, "b/x": 3.0}
    assert seen == [[[1.0, 2.0], [3.0, 1.0]]]


def test_names_are_gathered_only_if_ranks_differ(monkeypatch):
    other, sent = torch.tensor(list(b'["a/x", "b/y"]'), dtype=torch.uint8), []
    monkeypatch.setattr(metrics, "data_size", lambda: 2)
    monkeypatch.setattr(metrics, "all_sum", lambda x, name: x + 1)
    monkeypatch.setattr(metrics, "all_gather", lambda x, name: sent.append(x) or [x, other])
    sums = MetricSums()
    sums.add({"b/x": (3.0, 1)})
    for differs, names in ((0, {"b/x"}), (1, {"a/x", "b/x", "b/y"})):
        monkeypatch.setattr(metrics, "all_max", lambda x, name, differs=differs: x + torch.tensor([differs, 0]))
        assert sums.means().keys() == names and len(sent) == differs


def test_means_may_be_read_later_than_they_are_summed():
    sums = MetricSums()
    sums.add({"loss/nll": (torch.tensor(6.0), 2)})
    later = sums.later()
    sums.add({"loss/nll": (torch.tensor(1.0), 1)})
    assert later() == {"loss/nll": 3.0} and sums.means() == {"loss/nll": 7 / 3}


def test_laps_add_up_and_moved_seconds_leave_no_negative_time():
    timer = Timer()
    timer.lap("rollout_s")
    timer.move("rollout_s", "reward_s", 5.0)
    timer.lap("train_s")
    timer.lap("train_s")
    found = timer.later(10)()
    assert found["time/reward_s"] == 5.0 and found["time/rollout_s"] == 0.0 < found["time/train_s"]
    assert found["perf/tokens_per_s"] == 10 / found["time/step_s"] and found["mem/peak_gib"] > 0


def test_lines_are_not_written_to_a_file_that_is_gone(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "m.jsonl"
    log = JsonlLog(path)
    log.write(1, {})
    (folder / "edited").write_bytes(path.read_bytes())
    (folder / "edited").replace(path)  # as an editor saves it
    log.write(2, {})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
    folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="m.jsonl: .*moved"):
        log.write(3, {})
    log.close()


def test_jsonl_round_trip_is_exact(tmp_path):
    log = JsonlLog(tmp_path / "m.jsonl")
    log.write(1, {"loss/nll": 0.1 + 0.2, "text": "caf\u00e9 \u2028 \ud800", "bad": float("inf")})
    log.write(2, {"rewards": {"f": float("nan")}, "list": [1.5, float("-inf")]})
    log.flush_to_disk()
    log.close()
    first, second = read_jsonl(tmp_path / "m.jsonl")
    assert first == {"step": 1, "loss/nll": 0.1 + 0.2, "text": "caf\u00e9 \u2028 ?", "bad": None}
    assert second == {"step": 2, "rewards": {"f": None}, "list": [1.5, None]}


def test_truncate_keeps_steps_byte_for_byte_and_drops_a_truncated_line(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [
        b'{"step": 0, "eval/nll":  1.50}',
        b'{"step": 1}',
        b'{"step": 1, "x": 2}',
        b'{"step": 2}',
        b'{"step": 3, "lo',
    ]
    path.write_bytes(b"\n".join(lines))
    assert [r["step"] for r in read_jsonl(path)] == [0, 1, 1, 2]
    truncate_after(path, 1)
    assert path.read_bytes() == b"".join(line + b"\n" for line in lines[:3])
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]
    truncate_after(path, 1)
    assert path.read_bytes() == b"".join(line + b"\n" for line in lines[:3])


def test_a_truncated_last_line_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    for tail in (b"\x00\x00\x00", b'{"step": 9', b"\xff\xfe", b"12\n", b'"step"'):
        path.write_bytes(b'{"step": 1}\n' + tail)
        truncate_after(path, 100)
        assert path.read_bytes() == b'{"step": 1}\n', tail


def test_a_complete_last_line_without_a_newline_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    truncate_after(path, 100)
    log = JsonlLog(path)
    log.write(3, {})
    log.close()
    assert [r["step"] for r in read_jsonl(path)] == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="m.jsonl:2: not a JSON object"):
        read_jsonl(path)


def test_missing_files_are_empty(tmp_path):
    assert read_jsonl(tmp_path / "none.jsonl") == []
    truncate_after(tmp_path / "none.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_can_read_its_sink(tmp_path):
    (sink,) = open_sinks(("tensorboard", "none"), tmp_path, {})
    for step in (1, 2, 3):
        sink.write(step, {"reward/mean": step / 4})
    sink.close()
    (sink,) = open_sinks(("tensorboard",), tmp_path, {}, start_step=1)  # resumed after step 1
    sink.write(2, {"reward/mean": 0.75})
    sink.close()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


def test_sinks_that_cannot_be_opened(monkeypatch):
    for name in ("wandb", "tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=f"report_to={name}: .*pip install {name}"):
            check_sinks(("none", name))
    with pytest.raises(ValueError, match="report_to=mlflow"):
        check_sinks(("mlflow",))


def test_wandb_resumes_the_same_run_and_plots_against_the_logged_step(tmp_path, monkeypatch):
    calls = []

    class Run:
        def define_metric(self, *args, **kwargs):
            calls.append(("define", args, kwargs))

        def log(self, record):
            calls.append(("log", record))

        def finish(self):
            calls.append(("finish",))

    fake = types.ModuleType("wandb")
    fake.init = lambda **kwargs: calls.append(("init", kwargs)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for _ in range(2):
        (sink,) = open_sinks(("wandb",), tmp_path, {"beta": 0.0})
        sink.write(5, {"reward/mean": 0.5})
        sink.close()
    inits = [c[1] for c in calls if c[0] == "init"]
    assert inits[0]["id"] == inits[1]["id"] and inits[0]["resume"] == "allow" and inits[0]["project"] == "strop"
    assert json.loads(json.dumps(inits[0]["config"])) == {"beta": 0.0}
    assert ("define", ("*",), {"step_metric": "step"}) in calls
    assert calls.count(("log", {"step": 5, "reward/mean": 0.5})) == 2 and calls.count(("finish",)) == 2


def test_trackio_continues_a_resumed_run(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(log=lambda *given, **named: calls.append((given, named)), finish=lambda: None)
    fake = types.ModuleType("trackio")
    fake.init = lambda **kwargs: calls.append(kwargs) or run
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setenv("TRACKIO_PROJECT", "p")
    for start_step, resume in ((0, "never"), (4, "allow")):
        (sink,) = open_sinks(("trackio",), tmp_path, {"beta": 0.0}, start_step=start_step)
        sink.write(5, {"reward/mean": 0.5})
        sink.close()
        begun, logged = calls[-2:]
        assert begun == {"project": "p", "name": tmp_path.name, "resume": resume, "config": {"beta": 0.0}}
        assert logged == (({"reward/mean": 0.5},), {"step": 5})
