"""Write the model card of a run: README.md for the hub, from config.yaml, metrics.jsonl and evaluations.jsonl.

The card contains no local paths: a local file is shown by its name, a local model as "a local model".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from data.command.config_file import flatten
from trainer.metrics.console import NOT_SAMPLED, duration, eval_decoding, figure, headlines_first, number
from trainer.metrics.report import RunData, conditions, load_run, shown_values

# A local path, alone or after a prefix as in model:/home/me/rm; the address of a server.
PATH = re.compile(r"(?<![^\s:=,@\[(\"'])(?:~\w*|\.{1,2})?/[^\s\"']*")
ADDRESS = re.compile(r"\w+://\S+")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst", ".arrow")
SHOWN_STEPS = 8  # rows of the metrics table
COLUMNS = ("loss/total", "reward/mean", "reward/accuracy", "policy/entropy")
# Prefixes of settings that describe where the run took place rather than the training, and prompts, which are private.
HIDDEN = ("system_prompt", "output_dir", "run_id", "resume", "overwrite_output_dir", "report_to", "save_",
          "logging_steps", "vllm.", "sync.", "rollout.cache", "stop_grace_s", "parallel.timeout_s", "ref_cache",
          "row_cache")  # fmt: skip
SHOWN_ABOVE = ("method", "model", "data", "eval_data")


def model_card(
    run_dir: Path,
    repo: str,  # OWNER/NAME
    *,
    base_model: str | None = None,  # hub id, if the run loaded it from a folder
    license: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> str:
    run = load_run(run_dir, defaults)
    method, model = str(run.config.get("method", "")), str(run.config.get("model", ""))
    base = base_model or (model if is_hub_id(model, run_dir) else None)
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
    """Return whether the name is OWNER/NAME on the hub rather than a path such as models/base, which exists relative to
    the working directory or to a folder above the run (usually where the run was started)."""
    if not HUB_ID.fullmatch(name) or name.endswith(DATA_FILES):
        return False
    return not any((folder / name).exists() for folder in (Path.cwd(), *run_dir.resolve().parents))


def data_of(config: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Return the data sources without their options, and files without their folder."""
    return [base_name(str(spec), run_dir) for spec in config.get("data") or ()]


def base_name(spec: str, run_dir: Path) -> str:
    if spec.startswith(("task:", "reasoning_gym:")):
        return spec
    name = spec.partition(":")[0]
    return name if is_hub_id(name, run_dir) else Path(name).name


def summary(run: RunData, run_dir: Path, method: str, base: str, is_lora: bool) -> str:
    wall = run.values("time/wall_s")
    elapsed = duration(wall[-1] if wall else sum(run.values("time/step_s")))
    data = ", ".join(map(code, data_of(run.config, run_dir))) or "rows of an environment"
    revision = str(run.config.get("revision") or "")
    link = f"[{plain(base)}](https://huggingface.co/{base})" if HUB_ID.fullmatch(base) else plain(base)
    link += f" (revision {code(revision)})" if revision else ""
    origin = f"A LoRA adapter for {link}, trained" if is_lora else f"Fine-tuned from {link}"
    return f"{origin} with strop's {code(method)} on {data}: {run.last_step} steps in {elapsed}."


def results(run: RunData, run_dir: Path) -> str:
    """Tabulate held-out metrics before and after training, and later evaluations."""
    names = [name for name in run.logged if name.startswith("eval/") and run.values(name)]
    names.sort(key=lambda name: (headlines_first(name), name))
    decoding = eval_decoding(run.config, names, run.earlier)
    rows = []
    for name in names:
        label = name + (f" ({decoding})" if decoding and name not in (*NOT_SAMPLED, "eval/rows") else "")
        values = shown_values(run, name)
        rows.append(f"| {plain(label)} | {values[0]} | {values[-1]} |")
    parts = ["## Results\n\n| held-out metric | before | after |\n|---|---|---|\n" + "\n".join(rows)] if rows else []

    def evaluated_on(record: Mapping[str, Any]) -> str:
        on = record.get("tasks") or " ".join(base_name(str(spec), run_dir) for spec in record.get("data", []))
        return f"{on} ({under})" if (under := conditions(run, record)) else str(on)

    later = [
        f"| {plain(evaluated_on(record))} | {plain(name)} | {figure(value)} |"
        for record in run.evaluations
        for name, value in (record.get("results") or {}).items()
        if isinstance(value, int | float)
    ]
    if later:
        parts.append("| evaluated on | metric | value |\n|---|---|---|\n" + "\n".join(later))
    return "\n\n".join(parts)


def progress(run: RunData) -> str:
    """Tabulate evenly spaced steps of the run."""
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
    lines = ["from transformers import pipeline", "", f'generate = pipeline("text-generation", model="{repo}")']
    head = {"rm": "SequenceClassification", "prm": "TokenClassification"}.get(method)  # exported with merged adapters
    if is_lora or head:
        module, kind = ("transformers", f"AutoModelFor{head}") if head else ("peft", "AutoPeftModelForCausalLM")
        lines = [
            f"from {module} import {kind}",
            "from transformers import AutoTokenizer",
            "",
            f'model = {kind}.from_pretrained("{repo}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        ]
    code = "\n".join(lines)
    return f"## Use\n\n```python\n{code}\n```"


def settings(run: RunData) -> str:
    """Tabulate the settings that differ from the method's defaults, without HIDDEN."""
    if run.defaults is None:
        return ""
    defaults, rows = dict(flatten(run.defaults)), []
    for key, value in run.settings().items():
        if key in SHOWN_ABOVE:  # without values, which may be local paths
            value = ", ".join(f"changed after step {step}" for step, _ in run.earlier.get(key, []))
        if value and defaults.get(key) != value and not key.startswith(HIDDEN):
            rows.append(f"| {code(key)} | {plain(shown(value))} |")
    head = "## Settings that differ from the defaults\n\n| setting | value |\n|---|---|\n"
    return head + "\n".join(rows) if rows else ""


def shown(value: str) -> str:
    """Cut local paths to their last part and hide server addresses."""
    return PATH.sub(lambda match: Path(match[0]).name, ADDRESS.sub("(an address)", value))


def plain(value: object) -> str:
    """Return text that Markdown and HTML show as it is. Entities never have a meaning in Markdown, unlike backslashes
    in some tables."""
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return re.sub(r"[^\w\s./:,;=+()'%-]|(?<!\w)_|_(?!\w)", lambda match: f"&#{ord(match[0])};", text)


def code(name: str) -> str:
    """Return a code span, or plain text if the name contains characters with a meaning there or in a table."""
    return f"`{name}`" if re.fullmatch(r"[\w ./:,=+-]+", name) and name.strip() == name else plain(name)
