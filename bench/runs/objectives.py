"""Objectives on the demo, three seeds each on a CPU: a section of docs/results.md.

    python -m bench.runs.objectives OUT/rows.jsonl docs/results.md --jobs 8
    python -m bench.runs.objectives OUT/rows.jsonl --only grpo max_rl --seeds 0      # prints the table

Every run is a `python -m trainer` process with one thread. Runs in the file of rows are not repeated.

The demo needs about 20 steps, so the table shows how fast each objective learns, not where it ends. DPPO masks nothing
while the ratio is 1, so it and the GRPO run next to it take four optimizer steps per rollout.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tyro

from bench.common import ROOT, append, commit, environment, mean_and_range, read, require_commit, versions
from trainer.metrics.metrics import read_jsonl
from trainer.recipes.rewards import same_answer

METRIC = "eval/exact_match/mean"
STEPS = (0, 10, 20)  # of evaluations
TITLE = "## Objectives on the demo"
EASIER = "--teacher-prompt bench.runs.objectives.easier"
OTHER = "OTHER"  # replaced by the folder of the teacher with another tokenizer
OBJECTIVES = {
    "grpo": ("GRPO", "--method grpo"),
    "max_rl": ("MaxRL", "--method grpo --advantage-estimator max_rl"),
    "opo": ("OPO", "--method grpo --advantage-estimator opo"),
    "rfpp": ("REINFORCE++", "--method grpo --advantage-estimator reinforce_plus_plus"),
    "rfpp_baseline": (
        "REINFORCE++, group baseline", "--method grpo --advantage-estimator reinforce_plus_plus_baseline"
    ),
    "partial": ("GRPO, partial rollouts", "--method grpo --rollout.partial 0.5"),
    "grpo_4": ("GRPO, four steps per rollout", "--method grpo --num-iterations 4"),
    "dppo_tv": (
        "DPPO, TV", "--method grpo --num-iterations 4 --loss-type dppo_tv --proximal-policy behaviour"
    ),
    "dppo_kl": (
        "DPPO, KL", "--method grpo --num-iterations 4 --loss-type dppo_kl --proximal-policy behaviour"
    ),
    "opd": ("OPD, a trained teacher", "--method opd"),
    "opd_other": ("OPD, the teacher with another tokenizer", f"--method opd --teacher {OTHER}"),
    "opd_moving": (
        "OPD, moving self-teacher", f"--method opd --teacher self --teacher-update-rate 0.05 {EASIER}"
    ),
    "sdpo": ("SDPO", "--method sdpo"),
}  # fmt: skip
TEXT = (
    "The demo (sums of two numbers, the built-in model) with each objective and otherwise the same settings. Held-out "
    "greedy accuracy over 500 rows: mean over seeds 0, 1 and 2 (lowest to highest), one thread of a CPU per run, torch "
    "{torch}, at commit {commits}.",
    "The differences between GRPO, MaxRL, OPO, REINFORCE++ and partial rollouts are within the range of the seeds. The "
    "first step on a rollout has ratio 1 and DPPO masks nothing, hence the runs with four steps per rollout. OPD's "
    "teacher is the demo's adapter (0.982); as the teacher with another tokenizer it has its ids in another order, so "
    "each span is a token of both and the results are equal. The teachers of the last two rows are the student itself, "
    "asked a sum with the same answer and no carry (`{easier}`; SDPO's prompt is in its recipe). There is none above "
    "99, so they learn only about half of the task.",
)


def easier(row: dict[str, Any]) -> Any:
    """The moving teacher's prompt: a sum with the same answer that needs no carry."""
    return same_answer({**row, "solution": row["answer"]})


def save_other_teacher(folder: Path, merged: Sequence[str] = ()) -> None:
    """Save the tiny teacher with its ids in another order, and untrained tokens for these pairs of characters."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny = ROOT / "trainer" / "tiny"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tiny / "teacher").merge_and_unload()
    order = [0, 1, 2, *(torch.randperm(272, generator=torch.Generator().manual_seed(0)) + 3).tolist()]  # new id of each
    weight = model.get_input_embeddings().weight.data.clone()
    model.resize_token_embeddings(275 + len(merged))
    model.get_input_embeddings().weight.data[order] = weight
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text((tiny / name).read_text())
    saved = json.loads((tiny / "tokenizer.json").read_text())
    saved["model"]["vocab"] = {token: order[number] for token, number in saved["model"]["vocab"].items()}
    for number, pair in enumerate(merged, start=275):
        saved["model"]["vocab"][pair] = number
        saved["model"]["merges"].append(list(pair))
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def train(name: str, seed: int, other: str) -> dict[str, Any]:
    """Run the demo; return a row with the held-out accuracy by step."""
    with tempfile.TemporaryDirectory() as scratch:
        flags = f"--max-steps {STEPS[-1]} --eval-steps {STEPS[1]} --save-steps 0 --seed {seed} --output-dir run".split()
        env = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        words = [other if word == OTHER else word for word in OBJECTIVES[name][1].split()]
        command = [sys.executable, "-m", "trainer", *words, *flags]
        subprocess.run(command, cwd=scratch, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = {row["step"]: row[METRIC] for row in read_jsonl(Path(scratch, "run", "metrics.jsonl")) if METRIC in row}
    accuracy = [found[step] for step in STEPS]
    return {"name": name, "seed": seed, "accuracy": accuracy, "commit": commit(), "torch": versions()["torch"]}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line per objective: mean and range over seeds at each evaluation."""
    lines = ["| | flags | before | after 10 steps | after 20 |", "|---|---|---|---|---|"]
    for name, (title, flags) in OBJECTIVES.items():
        runs = [row["accuracy"] for row in rows if row["name"] == name]
        cells = [mean_and_range(values) for values in zip(*runs, strict=True)]
        if runs:
            shown = flags.replace(OTHER, "FOLDER").replace(f" {EASIER}", "")
            lines.append(f"| {title} | `{shown}` | {' | '.join(cells)} |")
    return lines


def section(rows: Sequence[dict[str, Any]]) -> str:
    facts = {"commits": ", ".join(sorted({row["commit"] for row in rows})), "torch": rows[0]["torch"]}
    before, after = (textwrap.fill(text.format(**facts, easier=EASIER), 120, break_on_hyphens=False) for text in TEXT)
    command = "    python -m bench.runs.objectives OUT/rows.jsonl docs/results.md"
    return "\n".join([TITLE, "", before, "", *table(rows), "", after, "", command, ""])


def parts_of(page: str) -> tuple[list[str], list[str]]:
    """The sections of a page without this one, and this one."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    return [x for x in parts if not x.startswith(TITLE)], [x for x in parts if x.startswith(TITLE)]


def with_section(page: str, own: list[str]) -> str:
    """The page with this section before its last one."""
    others, _ = parts_of(page)
    return "".join([*others[:-1], *own, others[-1]])


def main(
    rows: tyro.conf.Positional[Path], page: tyro.conf.Positional[Path | None] = None,
    only: tuple[str, ...] = tuple(OBJECTIVES), seeds: tuple[int, ...] = (0, 1, 2), jobs: int = 1,
) -> None:  # fmt: skip
    """Train what the file of rows lacks, and print the table.

    Args:
        rows: JSON lines, one per run.
        page: Page whose section of objectives is replaced.
        only: Objectives to train.
        seeds: Seeds of each.
        jobs: Concurrent runs, one thread each.
    """
    require_commit()
    done = read(rows) if rows.exists() else []
    known = {(row["name"], row["seed"]) for row in done}
    todo = [(name, seed) for name in only for seed in seeds if (name, seed) not in known]
    with tempfile.TemporaryDirectory() as other, ThreadPoolExecutor(jobs) as pool:
        save_other_teacher(Path(other))
        for row in pool.map(lambda run: train(*run, other), todo):
            done.append(row)
            append(rows, row)
    print("\n".join(table(done)))
    if page is not None:
        page.write_text(with_section(page.read_text(), [f"{section(done)}\n"]))


if __name__ == "__main__":
    tyro.cli(main)
