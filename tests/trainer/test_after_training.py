"""What one does with a trained model: generate, evaluate, compare, push. On a run folder around the tiny model."""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import sys
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import yaml
from markdown_it import MarkdownIt

from data.rows.held_out import held_out_numbers
from rollout.model_folder import BUILTIN
from tests.trainer.metrics.test_report import CONFIG
from trainer import evaluate, generate, push, report
from trainer.metrics.card import model_card
from trainer.metrics.compare import names_of
from trainer.metrics.metrics import JsonlLog
from trainer.metrics.report import write_report
from trainer.report import defaults_of

ROWS = [("1+1=", "2"), ("2+5=", "7"), ("3+4=", "7"), ("8+5=", "14")]  # the tiny model knows sums without a carry


def asked(question):
    return [{"role": "user", "content": question}]


@pytest.fixture
def run(tmp_path):
    """A finished run whose model is the tiny one."""
    folder = tmp_path / "grpo-demo"
    folder.mkdir()
    shutil.copytree(BUILTIN["builtin:tiny"], folder / "final")
    rows = "".join(json.dumps({"prompt": asked(q), "answer": a}) + "\n" for q, a in ROWS)
    (tmp_path / "held_out.jsonl").write_text(rows)
    config = CONFIG | {
        "model": "org/base", "data": ["org/rows:split=train", str(tmp_path / "held_out.jsonl")], "max_steps": 40,
        "eval_data": [str(tmp_path / "held_out.jsonl")], "reward_funcs": ["exact_match"], "max_completion_length": 8,
        "output_dir": str(folder),
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_metrics(folder, slope=0.01)
    sample = {"prompt": asked("1+1="), "completion": "2", "rewards": {"exact_match": 1.0}, "advantage": 0.5, "step": 40}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return folder


def write_metrics(folder, *, slope, steps=40):
    log = JsonlLog(folder / "metrics.jsonl")
    for step in range(steps + 1):
        row = {"loss/total": 1 - slope * step, "reward/mean": slope * step, "time/wall_s": 2.0 * step}
        if step % 20 == 0:
            row["eval/reward/mean"] = 0.25 + slope * step
        log.write(step, row)


def test_generate_uses_the_runs_prompt_settings(run, capsys, monkeypatch):
    assert generate.main([str(run), "--prompt", "1+1=", "2+5="]) == 0
    assert capsys.readouterr().out.split() == ["2", "7"]
    assert not generate.trained_on_text(str(run))
    (run / "samples.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2", "step": 1}) + "\n")
    assert generate.trained_on_text(str(run))  # a prompt is text to continue


def test_generate_keeps_a_conversation_until_new(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(generate, "render_prompt", lambda tok, p, *rest: seen.append(p) or [21, 13, 22, 31])
    monkeypatch.setattr(sys, "stdin", io.StringIO("3+4=\n\nand again\n/new\n1+1=\n"))
    assert generate.main(["builtin:tiny", "--max-tokens", "4"]) == 0
    turns = [[m["content"] for m in p] for p in seen]
    answer = capsys.readouterr().out.splitlines()[0]
    assert turns == [["3+4="], ["3+4=", answer, "and again"], ["1+1="]]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["builtin:tiny", "--plain", "--system-prompt", "x"], "system_prompt: has no effect with --plain"),
        (["builtin:tiny", "--top-p", "0.9"], "top_p=0.9"),
        (["./nowhere"], "model=./nowhere: no such folder"),
    ],
)
def test_invalid_generate_settings(argv, words, capsys):
    assert generate.main(argv) == 2
    assert words in capsys.readouterr().err


def test_evaluate_uses_the_runs_rows_and_rewards_and_appends_to_its_folder(run, tmp_path, capsys):
    out = tmp_path / "scored.jsonl"
    assert evaluate.main([str(run), "--out", str(out)]) == 0
    assert "reward/mean: 0.7500\n" in capsys.readouterr().out
    (record,) = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert record["step"] == 40 and record["decoding"] == "greedy" and record["reward_funcs"] == ["exact_match"]
    assert record["results"]["reward/mean"] == 0.75 and record["results"]["rows"] == 4
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["rewards"]["exact_match"] for row in scored] == [1, 1, 1, 0]
    assert [row["prompt"] for row in scored] == [asked(question) for question, _ in ROWS]
    page = write_report(run).read_text()
    assert "Evaluations after training" in page and ">0.750<" in page
    assert record["results"]["reward/standard_error"] == 0.25
    sampled = ["--temperature", "0.5", "--num-generations", "2", "--max-completion-length", "4"]
    assert evaluate.main([str(run), "--max-rows", "1", *sampled]) == 0
    assert evaluate.main([str(run), "--max-rows", "1"]) == 0
    assert "standard_error" not in capsys.readouterr().out.rpartition("rows")[0].rpartition("rows")[2]  # one row
    rows = dict.fromkeys(re.findall(r"held_out.jsonl +<span class=.tag.>([^<]*)<", write_report(run).read_text()))
    assert list(rows) == ["greedy", "temperature 0.5, 2 each, at most 4 tokens"]
    JsonlLog(run / "metrics.jsonl").write(41, {"reward/mean": 0.5})
    card = model_card(run, "me/x", defaults=defaults_of(run))
    assert "| held_out.jsonl (step 40, greedy) | reward/mean | 0.750 |" in card
    assert "| held_out.jsonl (step 40, temperature 0.5, 2 each, at most 4 tokens) | rows | 1 |" in card


def change_config(run, **settings):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | settings))


def test_evaluate_uses_the_rows_that_the_run_held_out(run, tmp_path, capsys):
    rows = [str(tmp_path / "held_out.jsonl")]
    change_config(run, method="grpo", data=rows, eval_data=[], val_set_size=0.5, dedup=False, max_eval_rows=500, seed=3)
    assert evaluate.main([str(run), "--out", str(tmp_path / "out.jsonl")]) == 0
    questions = [json.loads(line)["prompt"][-1]["content"] for line in (tmp_path / "out.jsonl").open()]
    assert questions == [ROWS[i][0] for i in sorted(held_out_numbers(4, 0.5, 3))]
    assert "rows: 2" in capsys.readouterr().out
    change_config(run, method="sft")
    assert evaluate.main([str(run)]) == 2
    assert "val_set_size=0.5 of sft" in capsys.readouterr().err


def test_evaluate_skips_the_long_prompts_that_the_run_skipped(run, capsys):
    change_config(run, max_prompt_length=1)
    assert evaluate.main([str(run)]) == 2
    assert "max_prompt_length=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [{"tools": ["calculator"]}, {"rollout_func": "m.f"}, {"openenv": {"env": "m.E"}}, {"verifiers": {"env": "toy"}}],
)
def test_evaluate_rejects_runs_with_tools_or_environments(settings, run, capsys):
    change_config(run, **settings)
    assert evaluate.main([str(run)]) == 2
    assert "the run was trained with it" in capsys.readouterr().err


def test_evaluate_any_model_with_several_samples(run, tmp_path, capsys):
    rows, flags = str(tmp_path / "held_out.jsonl"), ["--max-rows", "2", "--max-completion-length", "4"]
    argv = ["builtin:tiny", "--data", rows, "--num-generations", "3", "--temperature", "0.5", *flags]
    assert evaluate.main(argv) == 0
    assert "rows: 2\n" in capsys.readouterr().out
    assert not (run / "evaluations.jsonl").exists()


def test_evaluate_checks_the_default_reward_before_it_samples(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rollout.engines.local.LocalEngine.generate", None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}')
    assert evaluate.main(["builtin:tiny", "--data", str(tmp_path / "rows.jsonl")]) == 2
    assert re.search("reward_funcs=exact_match: .*'answer'.*pass --reward-funcs", capsys.readouterr().err)


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "--data is required"),
        (["--num-generations", "2"], "num_generations=2: greedy"),
        (["--limit", "3"], "limit=3: has no effect without --tasks"),
        (["--tasks", "x", "--data", "a.jsonl"], "has no effect with tasks=x"),
        (["--max-rows", "0"], "max_rows=0: must be 1 or more"),
    ],
)
def test_invalid_evaluate_settings(argv, words, capsys):
    assert evaluate.main(["builtin:tiny", *argv]) == 2
    assert words in capsys.readouterr().err


SUMS = """
task: sums{kind}
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
output_type: {output}
test_split: train
doc_to_text: "{{{{prompt}}}}"
doc_to_target: {target}
target_delimiter: ""
{more}
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""


def test_harness_tasks_match_its_huggingface_backend(run, tmp_path, capsys):
    lm_eval = pytest.importorskip("lm_eval", reason="needs pip install -e '.[eval]'")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from rollout.engines.load import load_model

    rows = tmp_path / "task_rows.jsonl"
    sums = [(a, b) for a in range(2, 10) for b in range(1, 6)]
    task_rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "choices": [str(a + b - 1), str(a + b), str(a)]} for a, b in sums
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in task_rows))
    texts = {
        "": ("generate_until", '"{{answer}}"', "generation_kwargs: {until: ['\\n'], max_gen_toks: 6}", "exact_match"),
        "_choice": ("multiple_choice", "1", 'doc_to_choice: "{{choices}}"', "acc"),
    }
    folder = tmp_path / "tasks"
    folder.mkdir()
    for kind, (output, target, more, metric) in texts.items():
        text = SUMS.format(kind=kind, rows=rows, output=output, target=target, more=more, metric=metric)
        (folder / f"sums{kind}.yaml").write_text(text)
    assert evaluate.main([str(run), "--tasks", "sums,sums_choice", "--task-folder", str(folder), "--as-chat"]) == 0
    results = json.loads((run / "evaluations.jsonl").read_text())["results"]
    model, tokenizer = load_model("builtin:tiny")
    expected = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer), tasks=["sums", "sums_choice"], log_samples=False,
        apply_chat_template=True, task_manager=TaskManager(include_path=str(folder)),
    )["results"]  # fmt: skip
    assert 0 < results["sums/exact_match"] < 1
    assert results["sums/exact_match"] == expected["sums"]["exact_match,none"]
    assert results["sums_choice/acc"] == expected["sums_choice"]["acc,none"]
    assert evaluate.main([str(run), "--tasks", "no_such_task"]) == 2
    assert "tasks=no_such_task" in capsys.readouterr().err


def test_comparison_of_two_runs(run, tmp_path, capsys):
    other = tmp_path / "other" / "grpo-demo"
    shutil.copytree(run, other)
    (other / "metrics.jsonl").unlink()
    write_metrics(other, slope=0.005, steps=20)
    segments = {0: {"learning_rate": "0.003", "seed": "0"}, 10: {"learning_rate": "0.001"}, 15: {"seed": "<b>1</b>"}}
    (other / "segments.yaml").write_text(yaml.safe_dump(segments))
    change_config(other, learning_rate=0.001, model="<b>org</b>", seed="<b>1</b>", eval_data=["secret/rows.jsonl"])
    out = tmp_path / "both.html"
    assert report.main([str(run), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text()
    assert "<b>org" not in page and "<script" not in page  # names are escaped
    assert f"{tmp_path.name}/grpo-demo" in page and "other/grpo-demo" in page
    for name, across in [
        ("eval/reward/mean", "steps"),
        ("eval/reward/mean", "seconds"),
        ("loss/total", "steps"),
    ]:
        chart = page[page.index(f'aria-label="{name} over {across}"') :].partition("</svg>")[0]
        assert len(re.findall(r'<polyline class="run run-[01]"', chart)) == 2, (name, across)
    differing = page[page.index("Settings that differ") :].partition("</table>")[0]
    assert ">0.003 until step 10, then 0.001<" in differing and "lr_scheduler_type" not in differing
    page = write_report(other, defaults_of(other)).read_text()
    assert "settings after step 10: learning_rate; after step 15: seed<" in page and "<b>" not in page
    assert page.count("0.003 until step 10, then 0.001") == 2  # different from the defaults, and all settings
    segments |= {18: {"eval_data": "secret/rows.jsonl"}}
    (other / "segments.yaml").write_text(yaml.safe_dump(segments))
    card = model_card(other, "me/x", defaults=defaults_of(other))
    assert "| `learning_rate` | 0.003 until step 10, then 0.001 |" in card and "secret" not in card
    assert "| `eval_data` | changed after step 18 |" in card
    page = out.read_text()
    assert "0.250 &rarr; 0.650" in page and "0.250 &rarr; 0.350" in page
    assert page.count('data-label="held-out reward"') == 2  # the labels on a narrow page
    assert (
        page.count('aria-label="eval/reward/mean over steps"') == 2
    )  # a large chart, and a small one for narrow pages


def test_run_names_are_the_shortest_distinct_paths(tmp_path):
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert names_of([tmp_path / "x" / "a", tmp_path / "y" / "a"]) == ["x/a", "y/a"]


@pytest.mark.parametrize(
    "argv, words", [(["RUN", "--out"], "--out: no file"), (["RUN", "--out", "p.html"], "--out=p.html"),
                   (["RUN", "--fast"], "--fast: "), ([], "RUN: ")]
)  # fmt: skip
def test_invalid_report_arguments(argv, words, run, capsys):
    assert report.main([str(run) if word == "RUN" else word for word in argv]) == 2
    assert words in capsys.readouterr().err


CARD = """\
---
base_model: org/base
datasets:
- org/rows
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
tags:
- strop
- grpo
---

# my-model

Fine-tuned from [org/base](https://huggingface.co/org/base) with strop's `grpo` on `org/rows`, `held_out.jsonl`: 40 \
steps in 1:20.

## Results

| held-out metric | before | after |
|---|---|---|
| eval/reward/mean (greedy) | 0.250 | 0.650 |

| evaluated on | metric | value |
|---|---|---|
| held_out.jsonl | reward/mean | 0.750 |

## Training

| step | loss/total | reward/mean |
|---|---|---|
| 1 | 0.990 | 0.010 |
| 7 | 0.930 | 0.070 |
| 12 | 0.880 | 0.120 |
| 18 | 0.820 | 0.180 |
| 23 | 0.770 | 0.230 |
| 29 | 0.710 | 0.290 |
| 34 | 0.660 | 0.340 |
| 40 | 0.600 | 0.400 |

## Use

```python
from transformers import pipeline

generate = pipeline("text-generation", model="me/my-model")
```

## Settings that differ from the defaults

"""


def test_the_card_of_a_pushed_model(run, tmp_path, capsys):
    evaluated = {"step": 40, "data": [str(tmp_path / "held_out.jsonl")], "results": {"reward/mean": 0.75}}
    (run / "evaluations.jsonl").write_text(json.dumps(evaluated) + "\n")
    out = tmp_path / "folder"
    assert push.main([str(run), "me/my-model", "--out", str(out), "--license", "apache-2.0"]) == 0
    assert "hf upload me/my-model" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert card.startswith(CARD), card
    assert "| `learning_rate` | 0.0003 |" in card and "`num_generations`" not in card  # 8 is the default
    assert {path.name for path in out.iterdir()} >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
    }
    assert not (out / "report.html").exists() and not (out / "samples.jsonl").exists()
    for path in (out / "README.md", out / "metrics.jsonl"):
        assert str(tmp_path) not in path.read_text()


def test_the_card_of_a_reward_model_shows_how_to_load_it(run):
    for method, kind in (("rm", "SequenceClassification"), ("prm", "TokenClassification")):
        change_config(run, method=method)
        card = model_card(run, "me/x", defaults=defaults_of(run))
        assert f'model = AutoModelFor{kind}.from_pretrained("me/x")\n' in card and "text-generation" not in card


def test_the_card_contains_no_path_or_address(run, tmp_path, monkeypatch):
    secret = ("/home/bob", "rows/train", "10.0.0.7")
    change_config(
        run, reward_funcs=["model:/home/bob/secret/rm", "/home/bob/rewards.py:fn", "model:org/rm"], model="/home/bob/m",
        data=["rows/train.jsonl"], chat_template="~bob/t.jinja", openenv={"env": "http://10.0.0.7:8000"},
        verifiers={"env": "/home/bob/env.py", "args": {"taskset": {"file": "/home/bob/x.jsonl"}}},
    )  # fmt: skip
    card = model_card(run, "me/x", defaults=defaults_of(run))
    assert not any(part in card for part in secret)
    assert "| `reward_funcs` | model:rm rewards.py:fn model:org/rm |" in card and "datasets:" not in card


def test_the_card_shows_no_prompt_and_escapes_names(run, tmp_path, monkeypatch):
    evaluated = {"step": 40, "data": ["org/held"], "results": {"regex:a|b/mean": 0.5, "rows": 32}}
    (run / "evaluations.jsonl").write_text(json.dumps(evaluated) + "\n")
    change_config(run, system_prompt="You are Bob's secret helper.")
    card = model_card(run, "me/x", defaults=defaults_of(run))
    assert "system_prompt" not in card and "helper" not in card
    assert "| org/held | regex:a&#124;b/mean | 0.500 |" in card and "| org/held | rows | 32 |" in card


def test_markup_in_names_is_text_on_the_card(run):
    evil = "a<img src=x onerror=alert(1)>|`b`[c](#d)*e* _f_\n# g\\|h &amp; ~~i~~"
    (run / "evaluations.jsonl").write_text(json.dumps({"step": 40, "tasks": evil, "results": {evil: 0.5}}) + "\n")
    JsonlLog(run / "metrics.jsonl").write(41, {f"eval/{evil}": 0.5})
    change_config(run, model=evil, data=[evil], reward_funcs=[evil], lora={evil: evil})
    front, body = model_card(run, "me/x", base_model=evil, defaults=defaults_of(run)).split("---\n", 2)[1:]
    assert yaml.safe_load(front)["base_model"] == evil and "datasets" not in yaml.safe_load(front)
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(body)
    inline = [child for token in tokens for child in token.children or []]
    kinds = {token.type for token in [*tokens, *inline]}
    assert not kinds & {"html_inline", "html_block", "link_open", "em_open", "s_open", "image"}
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", *["h2"] * 4]
    shown = "".join(token.content for token in inline)
    assert shown.count(evil.replace("\n", " ")) == 8, shown


def test_a_relative_path_is_not_a_hub_id(run, tmp_path, monkeypatch):
    (tmp_path / "models" / "base").mkdir(parents=True)  # next to the run, where it was started
    change_config(run, model="models/base", data=["models/base", "org/rows"])
    card = model_card(run, "me/x", defaults=defaults_of(run))
    assert "Fine-tuned from a local model" in card and "on `base`, `org/rows`" in card and "models/base" not in card


def test_invalid_pushes(run, tmp_path, capsys, monkeypatch):
    def check(argv, words):
        assert push.main(argv) == 2
        assert words in capsys.readouterr().err

    check([str(run), "my-model"], "repo=my-model: must be OWNER/NAME")
    check([str(tmp_path), "me/x", "--out", str(tmp_path / "o")], "no config.yaml")
    check([str(run), "me/x", "--out", str(run)], "already exists")
    check([str(run), "me/x", "--with-report", "--out", str(tmp_path / "o")], "has no report.html")
    (run / "final" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    check([str(run), "me/x", "--out", str(tmp_path / "o")], "--base-model")
    (run / "final" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone/base"}))
    check([str(run), "me/x", "--out", str(tmp_path / "o")], "--base-model")
    tiny = str(BUILTIN["builtin:tiny"])
    (run / "final" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": tiny}))
    check([str(run), "me/x", "--out", str(tmp_path / "o")], "builtin:tiny")
    assert not (tmp_path / "o").exists()
    assert push.main([str(run), "me/x", "--out", str(tmp_path / "o"), "--base-model", "org/base"]) == 0
    assert json.loads((tmp_path / "o" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    assert "library_name: peft" in (tmp_path / "o" / "README.md").read_text()
    from huggingface_hub import HfApi

    for client in filter(find_spec, ("httpx", "httpx2")):  # the hub's client depends on its version
        error = importlib.import_module(client).ConnectError("no network")
        monkeypatch.setattr(HfApi, "create_repo", Mock(side_effect=error))
        check(
            [str(run), "me/x", "--base-model", "org/base"],
            "repo=me/x: upload failed (no network); write the folder with --out",
        )
