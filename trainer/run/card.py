"""The model card of a run: README.md for the hub, from config.yaml, metrics.jsonl and evaluations.jsonl.

It names no path of this machine: a local file is shown by its name, a local model as "a local model".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.metrics.console import EVAL_HEADLINES, duration, figure, number
from trainer.metrics.report import RunData, flatten, load_run

# A path of this machine, alone or behind a prefix as in model:/home/me/rm; and the address of a server.
PATH = re.compile(r"(?<![^\s:=,@\[(\"'])(?:~\w*|\.{1,2})?/[^\s\"']*")
ADDRESS = re.compile(r"\w+://\S+")
DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst", ".arrow")
SHOWN_STEPS = 8  # rows of the table of metrics
COLUMNS = ("loss/total", "reward/mean", "reward/accuracy", "policy/entropy")
# Settings that say where and how a run was made, not what was trained, and prompts, which are not published.
LEFT_OUT = ("system_prompt", "output_dir", "run_id", "resume", "overwrite_output_dir", "report_to", "save_",
            "logging_steps", "vllm.", "sync.", "rollout.cache", "stop_grace_s", "parallel.timeout_s",
            "ref_cache")  # fmt: skip


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
    base = base_model or (given if is_hub_id(given, run_dir) else None)
    is_lora = (run_dir / "final" / "adapter_config.json").is_file()
    front = {
        "base_model": base,
        "datasets": [name for name in data_of(run.config, run_dir) if is_hub_id(name, run_dir)],
        "library_name": "peft" if is_lora else "transformers",
        "license": license,
        "pipeline_tag": None if method in ("rm", "prm") else "text-generation",
        "tags": ["strop", method, *(["lora"] if is_lora else [])],
    }
    front = {key: value for key, value in front.items() if value}
    parts = [
        "---\n" + yaml.safe_dump(front, sort_keys=True) + "---",
        f"# {repo.rpartition('/')[2]}",
        summary(run, run_dir, method, base or "a local model", is_lora),
        results(run, run_dir),
        progress(run),
        usage(repo, method, is_lora),
        settings(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def is_hub_id(name: str, run_dir: Path) -> bool:
    """Whether it is OWNER/NAME. A path such as models/base looks the same: it is one if something is there, seen from
    here or from a folder above the run, since a run mostly writes below the folder that it was started in."""
    if name.count("/") != 1 or ":" in name or name.startswith((".", "/", "~")) or name.endswith(DATA_FILES):
        return False
    return not any((folder / name).exists() for folder in (Path.cwd(), *run_dir.resolve().parents))


def data_of(config: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Sources of rows without their options; a file by its name alone."""
    return [base_name(str(spec), run_dir) for spec in config.get("data") or ()]


def base_name(spec: str, run_dir: Path) -> str:
    if spec.startswith(("task:", "reasoning_gym:")):
        return spec
    name = spec.partition(":")[0]
    return name if is_hub_id(name, run_dir) else Path(name).name


def summary(run: RunData, run_dir: Path, method: str, base: str, is_lora: bool) -> str:
    wall = run.values("time/wall_s")
    took = duration(wall[-1] if wall else sum(run.values("time/step_s")))
    data = ", ".join(f"`{name}`" for name in data_of(run.config, run_dir)) or "rows of an environment"
    link = f"[{base}](https://huggingface.co/{base})" if "/" in base else base
    kind = "A LoRA adapter of" if is_lora else "Fine-tuned from"
    return f"{kind} {link} by `{method}` with strop, on {data}: {run.last_step} steps in {took}."


def results(run: RunData, run_dir: Path) -> str:
    """Held-out metrics before and after, and later evaluations."""
    names = [name for name in run.logged if name.startswith("eval/") and run.values(name)]
    names.sort(key=lambda name: (EVAL_HEADLINES.index(name) if name in EVAL_HEADLINES else 99, name))
    rows = [f"| {cell(name)} | {figure(run.values(name)[0])} | {figure(run.values(name)[-1])} |" for name in names]
    parts = ["## Results\n\n| held-out metric | before | after |\n|---|---|---|\n" + "\n".join(rows)] if rows else []
    later = [
        f"| {cell(one.get('tasks') or ' '.join(base_name(spec, run_dir) for spec in one.get('data', [])))} | "
        f"{cell(name)} | {figure(value)} |"
        for one in run.evaluations
        for name, value in (one.get("results") or {}).items()
        if isinstance(value, int | float)
    ]
    if later:
        parts.append("| evaluated on | metric | value |\n|---|---|---|\n" + "\n".join(later))
    return "\n\n".join(parts)


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
    rows = "\n".join(f"| `{key}` | {cell(shown(value))} |" for key, value in changed)
    return f"## Settings that differ from the defaults\n\n| setting | value |\n|---|---|\n{rows}" if rows else ""


def is_left_out(key: str, prefixes: Sequence[str] = LEFT_OUT) -> bool:
    return key.startswith(tuple(prefixes))


def shown(value: str) -> str:
    """A setting, with paths of this machine cut to the last name, and no address of a server."""
    return PATH.sub(lambda found: Path(found[0]).name, ADDRESS.sub("(an address)", value))


def cell(value: object) -> str:
    """Text in a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")
