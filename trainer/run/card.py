"""The model card of a run: README.md for the hub, from config.yaml, metrics.jsonl and evaluations.jsonl.

It names no path of this machine: a local file is shown by its name, a local model as "a local model".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.metrics.console import EVAL_HEADLINES, duration, number
from trainer.metrics.report import RunData, flatten, load_run

# A path of this machine, alone or behind a prefix as in model:/home/me/rm; and the address of a server.
PATH = re.compile(r"(?<![^\s:=,@\[(\"'])(?:~\w*|\.{1,2})?/[^\s\"']*")
ADDRESS = re.compile(r"\w+://\S+")
DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst", ".arrow")
SHOWN_STEPS = 8  # rows of the table of metrics
COLUMNS = ("loss/total", "reward/mean", "reward/accuracy", "policy/entropy")
# Settings that say where and how a run was made, not what was trained.
LEFT_OUT = ("output_dir", "run_id", "resume", "overwrite_output_dir", "report_to", "save_", "logging_steps", "vllm.",
            "sync.", "rollout.cache", "stop_grace_s", "parallel.timeout_s", "ref_cache")  # fmt: skip


def model_card(
    run_dir: Path,
    repo: str,
    *,
    base_model: str | None = None,  # hub id, where the run loaded it from a folder
    license: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> str:
    run = load_run(run_dir, defaults)
    method, given = str(run.config.get("method", "")), str(run.config.get("model", ""))
    base = base_model or (given if is_hub_id(given) else None)
    is_lora = (run_dir / "final" / "adapter_config.json").is_file()
    front = {
        "base_model": base,
        "datasets": [name for name in data_of(run.config) if is_hub_id(name)],
        "library_name": "peft" if is_lora else "transformers",
        "license": license,
        "pipeline_tag": None if method in ("rm", "prm") else "text-generation",
        "tags": ["strop", method, *(["lora"] if is_lora else [])],
    }
    front = {key: value for key, value in front.items() if value}
    parts = [
        "---\n" + yaml.safe_dump(front, sort_keys=True) + "---",
        f"# {repo.rpartition('/')[2]}",
        summary(run, method, base or "a local model", is_lora),
        results(run),
        progress(run),
        usage(repo, method, is_lora),
        settings(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def is_hub_id(name: str) -> bool:
    is_path = name.startswith((".", "/", "~")) or name.endswith(DATA_FILES) or Path(name).exists()
    return name.count("/") == 1 and ":" not in name and not is_path


def data_of(config: Mapping[str, Any]) -> list[str]:
    """Sources of rows without their options; a file by its name alone."""
    names = []
    for spec in config.get("data") or ():
        name = spec if str(spec).startswith(("task:", "reasoning_gym:")) else str(spec).partition(":")[0]
        names.append(name if is_hub_id(name) or ":" in name else Path(name).name)
    return names


def summary(run: RunData, method: str, base: str, is_lora: bool) -> str:
    wall = run.values("time/wall_s")
    took = duration(wall[-1] if wall else sum(run.values("time/step_s")))
    data = ", ".join(f"`{name}`" for name in data_of(run.config)) or "rows of an environment"
    link = f"[{base}](https://huggingface.co/{base})" if "/" in base else base
    kind = "A LoRA adapter of" if is_lora else "Fine-tuned from"
    return f"{kind} {link} by `{method}` with strop, on {data}: {run.last_step} steps in {took}."


def results(run: RunData) -> str:
    """Held-out metrics before and after, and later evaluations."""
    names = [name for name in run.logged if name.startswith("eval/") and run.values(name)]
    names.sort(key=lambda name: (EVAL_HEADLINES.index(name) if name in EVAL_HEADLINES else 99, name))
    rows = [f"| {name} | {number(run.values(name)[0])} | {number(run.values(name)[-1])} |" for name in names]
    parts = ["## Results\n\n| held-out metric | before | after |\n|---|---|---|\n" + "\n".join(rows)] if rows else []
    later = [
        f"| {one.get('tasks') or ' '.join(map(base_name, one.get('data', [])))} | {name} | {number(value)} |"
        for one in run.evaluations
        for name, value in (one.get("results") or {}).items()
        if isinstance(value, int | float)
    ]
    if later:
        parts.append("| evaluated on | metric | value |\n|---|---|---|\n" + "\n".join(later))
    return "\n\n".join(parts)


def base_name(spec: str) -> str:
    return spec if spec.startswith("task:") or is_hub_id(spec.partition(":")[0]) else Path(spec.partition(":")[0]).name


def progress(run: RunData) -> str:
    """Some steps of the run, spread evenly."""
    columns = [name for name in COLUMNS if len(run.values(name)) > 1]
    trained = [record for record in run.records if record["step"] > 0]
    if not columns or not trained:
        return ""
    count = min(SHOWN_STEPS, len(trained))
    picks = sorted({round(i * (len(trained) - 1) / max(1, count - 1)) for i in range(count)})
    rows = [
        f"| {trained[i]['step']} | "
        + " | ".join(number(x) if isinstance(x := trained[i].get(name), int | float) else "" for name in columns)
        + " |"
        for i in picks
    ]
    head = f"| step | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}"
    return "## Training\n\n" + "\n".join([head, *rows])


def usage(repo: str, method: str, is_lora: bool) -> str:
    if method in ("rm", "prm"):
        return ""
    lines = ["from transformers import pipeline", "", f'generate = pipeline("text-generation", model="{repo}")']
    if is_lora:
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{repo}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        ]
    code = "\n".join(lines)
    return f"## Use\n\n```python\n{code}\n```"


def settings(run: RunData) -> str:
    """What differs from the method's defaults, without what says where the run was made."""
    if run.defaults is None:
        return ""
    defaults = dict(flatten(run.defaults))
    changed = [
        (key, value)
        for key, value in flatten(run.config)
        if defaults.get(key) != value and key not in ("method", "model", "data", "eval_data") and not is_left_out(key)
    ]
    rows = "\n".join(f"| `{key}` | {shown(value)} |" for key, value in changed)
    return f"## Settings that differ from the defaults\n\n| setting | value |\n|---|---|\n{rows}" if rows else ""


def is_left_out(key: str, prefixes: Sequence[str] = LEFT_OUT) -> bool:
    return key.startswith(tuple(prefixes))


def shown(value: str) -> str:
    """A setting, with paths of this machine cut to the last name, and no address of a server."""
    value = PATH.sub(lambda found: Path(found[0]).name, ADDRESS.sub("(an address)", value))
    return value.replace("|", "\\|").replace("\n", " ")
