"""python -m trainer.evaluate RUN: score a run, or any model, on held-out rows or on tasks of lm-evaluation-harness.

    python -m trainer.evaluate runs/grpo-20261115-093000                  # its own held-out rows and rewards, all rows
    python -m trainer.evaluate Qwen/Qwen3-0.6B --data test.jsonl --reward-funcs exact_match
    python -m trainer.evaluate runs/grpo-20261115-093000 --tasks gsm8k,arc_easy --limit 100

Greedy unless --temperature is set. What is not given is taken from the run's config.yaml; of a run with --val-set-size
the rows that it held out. The result is printed and added to evaluations.jsonl in the run folder, which the report
shows. Tasks need `pip install -e '.[eval]'`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import tyro

from data.chat import set_chat_template, stop_ids
from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.formats.template_settings import JsonObject, check_kwargs
from data.rows.held_out import train_and_held_out
from data.rows.prompts import load_prompts
from data.rows.transforms import uses_transform
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling
from strop_config import config_for, rows_of
from trainer.generate import run_settings
from trainer.metrics.metrics import read_jsonl

PART = 512  # completions between two lines of progress
RESULTS = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Score a run, or any model, on held-out rows or on tasks of lm-evaluation-harness."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|MODEL")]
    """A finished run, a model or adapter folder, a hub id, or builtin:tiny."""
    data: tuple[str, ...] = ()
    """Rows to evaluate on, all of them, in the form of the trainer's --data. None given: the run's --eval-data."""
    data_format: str | None = None
    """How rows are read. None: as the run did, or auto."""
    reward_funcs: tuple[str, ...] = ()
    """Reward functions. None given: those of the run, or exact_match."""
    reward_weights: tuple[str, ...] = ()
    """One weight per function, for the total; none given means those of the run, or 1 each."""
    max_rows: int | None = None
    """Use the first rows only. None: all."""
    num_generations: int = 1
    """Completions per row; more than 1 needs a temperature."""
    max_completion_length: int | None = None
    """Most tokens of a completion. None: that of the run, or 256."""
    temperature: float = 0.0
    """Sampling temperature. 0: greedy."""
    seed: int = 0
    """Seed of the sampling."""
    chat_template: str = "tokenizer_default"
    """Chat template; a trained model carries its own."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Variables for the chat template, as a JSON object. Empty: those of the run."""
    system_prompt: str | None = None
    """System message for conversations without one. None: that of the run."""
    tasks: str = ""
    """Instead of rows: tasks of lm-evaluation-harness, separated by commas."""
    task_folder: str | None = None
    """Folder with task files of your own."""
    num_fewshot: int | None = None
    """Examples before each question. None: what the task says."""
    limit: int | None = None
    """Questions per task, the first ones. None: all."""
    as_chat: bool = False
    """Ask the questions of tasks as user messages, through the chat template."""
    batch_size: int = 16
    """Sequences scored at once by a task."""
    out: str | None = None
    """Also write every prompt, completion and score to this JSON Lines file."""
    trust_remote_code: bool = False
    """Allow running the Python code that comes with the model."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "num_generations", "max_completion_length", "limit", "batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.num_generations > 1 and self.temperature == 0:
            raise UserError(
                f"num_generations={self.num_generations}: greedy completions of a row are all equal; set --temperature"
            )
        of_rows = ("data", "data_format", "reward_funcs", "reward_weights", "max_rows", "out", "max_completion_length")
        of_tasks = ("task_folder", "num_fewshot", "limit", "as_chat")
        for name in of_rows if self.tasks else of_tasks:
            if getattr(self, name):
                why = f"with tasks={self.tasks}" if self.tasks else "without --tasks"
                raise UserError(f"{name}={getattr(self, name)}: has no effect {why}; leave it out")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after one sentence about what is wrong."""
    return run_command(lambda: evaluate(parse_command(EvaluateConfig, argv, "python -m trainer.evaluate")))


def evaluate(cfg: EvaluateConfig) -> dict[str, float]:
    """Evaluate, print, and add the result to the run folder."""
    if cfg.tasks:
        from trainer.harness import run_tasks

        result, what = run_tasks(cfg), {"tasks": cfg.tasks, "num_fewshot": cfg.num_fewshot, "limit": cfg.limit}
    else:
        result, what = score_rows(cfg)
    for name, value in result.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    folder = Path(cfg.source).expanduser()
    if (folder / "config.yaml").is_file():
        steps = [record["step"] for record in read_jsonl(folder / "metrics.jsonl")]
        record = {"step": max(steps, default=0), "time": datetime.now(UTC).isoformat(timespec="seconds"), **what}
        record["results"] = result
        with (folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"added to {folder / RESULTS}", file=sys.stderr)
    return result


def score_rows(cfg: EvaluateConfig) -> tuple[dict[str, float], dict[str, Any]]:
    """Mean rewards over the completions of all rows, and what was evaluated."""
    from rollout.rewards.options import DEFAULT_REWARD
    from rollout.rewards.table import load_rewards

    run = run_settings(cfg.source)
    check_single_turn(run)
    data = cfg.data or held_out_specs(run)
    names = cfg.reward_funcs or tuple(run.get("reward_funcs") or ()) or (DEFAULT_REWARD,)
    same = not cfg.reward_funcs or list(cfg.reward_funcs) == list(run.get("reward_funcs") or ())
    weights = cfg.reward_weights or (tuple(run.get("reward_weights") or ()) if same else ())
    rewards = load_rewards(names, weights, trust_remote_code=cfg.trust_remote_code)
    prompts, completions = sample(cfg, run, data, names)
    table = rewards.score(prompts, completions)
    totals = [total for total in table.totals if total is not None]
    result = {"reward/mean": statistics.fmean(totals) if totals else float("nan")}
    for name, column in zip(table.names, zip(*table.values, strict=True), strict=True):
        scored = [value for value in column if value is not None]
        if scored and len(table.names) > 1:
            result[f"{name}/mean"] = statistics.fmean(scored)
    if len(totals) > 1:
        result["reward/standard_error"] = statistics.stdev(totals) / len(totals) ** 0.5
    result |= {
        "len_mean": statistics.fmean(len(completion.ids) for completion in completions),
        "truncated_frac": statistics.fmean(completion.finish_reason == "length" for completion in completions),
        "rows": len(prompts) // cfg.num_generations,
    }
    if cfg.out:
        with Path(cfg.out).open("w", encoding="utf-8") as file:
            for prompt, completion, row in zip(prompts, completions, table.values, strict=True):
                scores = dict(zip(table.names, row, strict=True))
                kept = {"source": prompt.source, "prompt": prompt.prompt, "completion": completion.text}
                file.write(json.dumps(kept | {"rewards": scores, "finish_reason": completion.finish_reason}) + "\n")
    decoding = "greedy" if cfg.temperature == 0 else f"temperature {cfg.temperature:g}, {cfg.num_generations} each"
    return result, {"data": list(data), "reward_funcs": [str(name) for name in names], "decoding": decoding}


def held_out_specs(run: dict[str, Any]) -> tuple[str, ...]:
    """Where the run's held-out rows are: its --eval-data, or the --data that --val-set-size took them from."""
    if run.get("val_set_size") and rows_of(str(run.get("method"))) != "prompts":
        raise UserError(
            f"--data: required, since val_set_size={run['val_set_size']:g} of {run.get('method')} holds out rows that "
            "are not prompts"
        )
    data = run.get("data") if run.get("val_set_size") else run.get("eval_data")
    if not data:
        raise UserError("--data: required, since the source names no held-out rows of its own")
    return tuple(data)


def check_single_turn(run: dict[str, Any]) -> None:
    """Refuse a run whose completions are not only the model's own text: without the rest it would look worse."""
    gym = run.get("nemo_gym") or {}
    for name, value in (
        ("tools", " ".join(run.get("tools") or ())),
        ("rollout_func", run.get("rollout_func")),
        ("openenv.env", (run.get("openenv") or {}).get("env")),
        ("nemo_gym.datasets", " ".join(gym.get("datasets") or ())),
        ("verifiers.env", (run.get("verifiers") or {}).get("env")),
    ):
        if value:
            raise UserError(
                f"{name}={value}: the run was trained with it, and evaluate samples plain completions; evaluate such a "
                "run with --eval-data in training, or its final/ as a model"
            )


def sample(
    cfg: EvaluateConfig, run: dict[str, Any], data: Sequence[str], rewards: Sequence[str]
) -> tuple[list[Prompt], list[Completion]]:
    """num_generations completions of each row; the prompts are repeated."""
    from rollout.engines.load import load_model
    from rollout.engines.local import LocalEngine

    model, tokenizer = load_model(cfg.source, trust_remote_code=cfg.trust_remote_code)
    set_chat_template(tokenizer, cfg.chat_template)
    kwargs = cfg.chat_template_kwargs or run.get("chat_template_kwargs") or {}
    check_kwargs(tokenizer, kwargs)
    data_format = cfg.data_format or run.get("data_format") or "auto"
    max_tokens = cfg.max_completion_length or run.get("max_completion_length") or 256
    flags = {"model": "builtin:tiny", "data": tuple(data), "data_format": data_format, "reward_funcs": tuple(rewards)}
    read = partial(
        load_prompts,
        tokenizer=tokenizer,
        data_format=data_format,
        system_prompt=run.get("system_prompt") if cfg.system_prompt is None else cfg.system_prompt,
        chat_template_kwargs=kwargs,
        max_prompt_length=None if cfg.data else run.get("max_prompt_length"),
        context_length=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        max_completion_length=max_tokens,
        cfg=config_for("prompts", flags) if uses_transform(data, data_format) else None,
    )
    if run.get("val_set_size") and not cfg.data:
        names = ("data", "eval_data", "val_set_size", "dedup", "max_eval_rows")
        _, prompts = train_and_held_out(SimpleNamespace(**{name: run[name] for name in names}), run["seed"], read)
    else:
        prompts = read(data)
    prompts = prompts[: cfg.max_rows]
    prompts = [prompt for prompt in prompts for _ in range(cfg.num_generations)]
    requests = [Request.of(prompt, cfg.seed + number) for number, prompt in enumerate(prompts)]
    sampling = Sampling(
        temperature=cfg.temperature,
        max_tokens=max_tokens,
        stop_ids=stop_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None)),
        stop=tuple(run.get("stop") or ()),
    )
    engine, completions = LocalEngine(model, tokenizer), []
    for start in range(0, len(requests), PART):
        completions += engine.generate(requests[start : start + PART], sampling)
        if len(requests) > PART:
            print(f"evaluate: {len(completions):,} of {len(requests):,} completions", file=sys.stderr, flush=True)
    return prompts, completions


if __name__ == "__main__":
    sys.exit(main())
