"""bench/runs/results.py: the list of runs, their order and failures, and the page from fake rows."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from bench import common
from bench.runs import lora_plus, objectives, results, results_page
from tests.test_docs import check_command
from tests.test_docs import commands as commands_of

SEEDS_OF = {run.name: run.seeds for run in results.RUNS}


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    """Set a commit, because tests may run outside a checkout."""
    for module in (common, results):
        monkeypatch.setattr(module, "commit", lambda: "abc1234")


def made_up(name: str, *, gain: float = 0.5, **changes) -> dict:
    """Return the row of a run that improves."""
    run, seed = results.all_jobs()[name]
    metrics = results.TASKS[run.task].metrics
    sign = {k: 1 if m.higher else -1 for k, m in metrics.items() if (run.method, k) != ("sft", "eval/cfm")}
    points = [{"step": step, **{key: 0.4 + s * gain * step / 60 for key, s in sign.items()}} for step in (0, 30, 60)]
    command = shlex.join(["python", "-m", "trainer", *results.words_of(name, run, seed, results.SHOWN)])
    return {
        "name": name, "run": run.name, "task": run.task, "method": run.method, "seed": seed, "wall_s": 60.0 + seed,
        "command": command, "judges": run.judges, "jobs": 4, "quick": False, "commit": "abc1234", "hardware": "H200",
        "versions": {"torch": "2.11", "transformers": "5.17"}, "points": points[:1] if run.judges else points,
        "steps": 60, "train_s": 30.0, "held_out": 400,
    } | changes  # fmt: skip


def all_rows(**changes: dict) -> list[dict]:
    return [made_up(name, **changes.get(name.replace("-", "_"), {})) for name in results.all_jobs()]


def test_list_matches_the_page():
    methods = {(run.method, run.task): len(run.seeds) for run in results.RUNS if not run.judges}
    assert [methods[key] for key in (("grpo", "arithmetic"), ("grpo", "needle"), ("gdpo", "word_problems"))] == [3] * 3
    assert methods["dpo", "harmless"] == 3
    assert {"kto", "rm", "ebft", "sft", "opd"} <= {method for method, _ in methods}
    assert all(run.task in results.TASKS for run in results.RUNS)
    assert all(results.needs(run) <= set(results.all_jobs()) for run in results.RUNS)


@pytest.mark.parametrize("quick", [False, True])
def test_trainer_accepts_every_command(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in results.RUNS:
        check_command("trainer", results.words_of(run.named(0), run, 0, results.SHOWN, quick))


def test_selection_adds_required_runs_and_skips_finished_runs():
    chosen = results.chosen_jobs(("opd-arithmetic", "dpo-harmless-1"), set())
    assert list(chosen) == ["start-0", "grpo-arithmetic-0", "opd-arithmetic-0", "dpo-harmless-1"]
    assert "start-0" not in results.chosen_jobs(("opd-arithmetic",), {"start-0"})
    with pytest.raises(SystemExit, match="only=dpo-helpful:"):
        results.chosen_jobs(("dpo-helpful",), set())


def test_splits_share_no_problem():
    keys = {}
    for part in ("sft", "train", "eval"):
        rows = results.apart(results.word_problems(part))
        keys[part] = {row["numbers"] for row in rows}
        assert len({row["prompt"][0]["content"] for row in rows}) == len(rows) > 100
    bare = {
        part: {row["prompt"][0]["content"].split("?")[0].removeprefix("What is ") for row in rows}
        for part in keys
        if (rows := results.tagged_arithmetic.rows(part))
    }
    for one, other in (("sft", "eval"), ("train", "eval"), ("sft", "train")):
        assert not (keys[one] | bare[one]) & (keys[other] | bare[other])


def test_conversations_become_messages_and_odd_conversations_are_skipped():
    text = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: Why?\n\nAssistant:"
    rows = [
        {"prompt": text, "chosen": " Because.", "rejected": " No."},
        {"prompt": text, "chosen": " Same.", "rejected": " Same."},
        {"prompt": "\n\nHuman: a\n\nHuman: b\n\nAssistant:", "chosen": "x", "rejected": "y"},
        {"prompt": text, "chosen": "x" * 2000, "rejected": "y"},
    ]
    (kept,) = results.pairs(rows)
    assert [(m["role"], m["content"]) for m in kept["prompt"]] == [
        ("user", "Hello"), ("assistant", "Hi."), ("user", "Why?"),
    ]  # fmt: skip
    assert (kept["chosen"], kept["rejected"]) == ("Because.", "No.")
    assert results.apart([kept], [kept]) == []
    assert [row["label"] for row in results.labelled([kept])] == [True, False]


STAND_IN = """
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--output-dir") + 1])
if folder.name == "sft-solutions-0":
    sys.exit("data=rows: broken")
for flag in ("--model", "--teacher"):
    value = words[words.index(flag) + 1] if flag in words else "self"
    assert value == "self" or pathlib.Path(value).is_dir(), value
(folder / "final").mkdir(parents=True)
points = [{"step": 0, "eval/exact_match/mean": 0.25}, {"step": 1, "eval/exact_match/mean": 0.5, "time/step_s": 2.0}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\\n" for point in points))
"""


def test_failed_run_stops_only_dependent_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    for folder in ("model", "rows"):
        (tmp_path / folder).mkdir()
    for run in results.RUNS:
        if "eval-data" in run.flags:
            (tmp_path / run.flags["eval-data"].format(data=tmp_path / "rows")).write_text("{}\n" * 3)
    monkeypatch.setattr(results, "TRAINER", (sys.executable, str(tmp_path / "stand_in.py")))
    monkeypatch.setattr(results, "POLL_S", 0.02)
    places = {"model": tmp_path / "model", "data": tmp_path / "rows", "out": tmp_path / "out"}
    only = ("opd-arithmetic", "sft-solutions-features", "grpo-needle")
    with pytest.raises(SystemExit, match="failed: sft-solutions-0, sft-solutions-features-0"):
        results.run(**places, only=only, jobs=2)
    rows = {row["name"]: row for row in results.read(tmp_path / "out" / "results.jsonl")}
    assert rows["sft-solutions-0"]["failed"] == "exit status 1: data=rows: broken"
    assert rows["sft-solutions-features-0"]["failed"] == "needs sft-solutions-0, which failed"
    one = rows["opd-arithmetic-0"]
    assert (one["points"][-1], one["train_s"], one["held_out"]) == ({"step": 1, "eval/exact_match/mean": 0.5}, 2.0, 3)
    assert str(tmp_path) not in one["command"] and sys.executable not in one["command"]
    assert "--teacher runs/grpo-arithmetic-0" in one["command"]
    assert not (tmp_path / "out" / "runs" / "grpo-needle-1" / "final").exists()  # nobody reads it
    assert "accuracy 0.250 -> 0.500" in capsys.readouterr().out
    results.run(**places, only=("grpo-needle", "rm-harmless"), jobs=2)  # again: only what is missing
    names = [row["name"] for row in results.read(tmp_path / "out" / "results.jsonl")]
    assert names.count("grpo-needle-0") == 1 and names[-1] == "rm-harmless-0"
    results.run(**places, only=("kto-harmless",), stop_after=-1.0)
    assert "not started after -1 s: kto-harmless-0" in capsys.readouterr().out


def test_page_shows_every_task_and_every_command_parses(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    page = tmp_path / "results.md"
    seeds = {"grpo_needle_0": {"gain": 0.49}, "grpo_needle_1": {"gain": 0.51}}
    results_page.write_page(all_rows(**seeds), page)
    text = page.read_text()
    assert text.isascii() and max(map(len, text.splitlines())) <= 220
    for name, task in results.TASKS.items():
        assert f"## {task.title}" in text
        assert (tmp_path / f"results_{name}.svg").is_file() == bool(task.metrics)
    assert "| `grpo-needle` | accuracy | 0.400 | 0.900 (0.890 to 0.910) | 0, 1, 2 | 60 | 61 s |" in text
    assert "sft-solutions` | CFM | 0.400 | 0.400 |" in text  # its judge found it where EBFT began
    monkeypatch.chdir(tmp_path)
    parsed = [words for _, module, words in commands_of(text) if module == "trainer"]
    assert len(parsed) == len(results.RUNS)
    for words in parsed:
        check_command("trainer", words)
    again = tmp_path / "again" / "results.md"
    results_page.write_page(all_rows(), again)
    figure = "results_word_problems.svg"
    assert (tmp_path / figure).read_text() == (tmp_path / "again" / figure).read_text()
    with_objectives = objectives.with_section(text, [f"{objectives.TITLE}\n\nrows\n\n"])
    page.write_text(with_objectives)
    results_page.write_page(all_rows(**seeds), page)
    assert page.read_text() == with_objectives


def test_section_of_objectives():
    rows = [
        {"name": "max_rl", "seed": seed, "accuracy": [0.3, 0.5, x], "commit": "c", "torch": "t"}
        for seed, x in enumerate((0.7, 0.8, 0.9))
    ]
    page, own = "# Page\n\n## Runs\n\n## What did not work\n", [f"{objectives.section(rows)}\n"]
    for _ in range(2):  # replaced
        page = objectives.with_section(page, own)
    assert objectives.parts_of(page) == (["# Page\n\n", "## Runs\n\n", "## What did not work\n"], own)
    assert page.endswith("\n\n## What did not work\n") and max(map(len, page.splitlines())) <= 220
    flags = "--method grpo --advantage-estimator max_rl"
    assert f"| MaxRL | `{flags}` | 0.300 | 0.500 | 0.800 (0.700 to 0.900) |\n" in page


def test_table_of_lora_plus():
    runs = [{"ratio": 16.0, "rate": 1e-4, "seed": seed, "nll": {"0": 3.0, "15": x}} for seed, x in ((0, 1.0), (1, 2.0))]
    lines = lora_plus.table([*runs, {"ratio": 1.0, "rate": 1e-3, "seed": 0, "nll": {0: 3.0, 15: 0.5}}])
    assert lines[0] == "| | rate of A | rate of B | seeds | step 0 | step 15 |"
    assert lines[2] == "| LoRA | 0.001 | 0.001 | 0 | 3.000 | 0.500 |"
    assert lines[3] == "| LoRA+, 16 | 0.0001 | 0.0016 | 0, 1 | 3.000 | 1.500 (1.000 to 2.000) |"


def test_failures_are_detected():
    rows = all_rows(
        grpo_needle_1={"gain": 0.01},  # within the noise of 400 rows
        dpo_harmless_0={"gain": 0.05},  # below guessing
        kto_harmless_0={"failed": "exit status 2: no memory", "points": []},
    )
    found = results_page.with_features(results_page.latest(row for row in rows if row["run"] != "rm-harmless"))
    said = results_page.failures(found)
    assert any("`grpo-needle-1`: held-out accuracy went from 0.400 to 0.410" in line for line in said)
    assert any("`dpo-harmless-0`" in line and "(guessing: 0.50)" in line for line in said)
    assert "`kto-harmless-0` did not run to the end (exit status 2: no memory)." in said
    assert "Not run: `rm-harmless-0`." in said
    assert any("`sft-solutions-0`: held-out CFM went from 0.400 to 0.400" in line for line in said)
    assert not any("grpo-arithmetic" in line for line in said)
    assert any("`grpo-needle`: held-out accuracy depends on the seed; it ended between 0.410" in line for line in said)
    closer = [made_up(name, gain=0.1 if name == "ebft-solutions-0" else 0.5) for name in ("ebft-solutions-0",)]
    sft = made_up("sft-solutions-0", gain=0.3)
    lines = results_page.ebft_losses({row["name"]: row for row in [*closer, sft]})
    assert lines == ["EBFT ended at cross-entropy 0.300, SFT on the same rows at 0.100."]


def test_quick_rows_are_rejected():
    with pytest.raises(SystemExit, match="start-0: .*--quick"):
        results_page.latest([made_up("start-0", quick=True)])
    row = json.loads(json.dumps(made_up("start-0")))
    assert results_page.latest([{**row, "wall_s": 1.0}, row])["start-0"]["wall_s"] == 60.0  # the last one counts
