"""python -m trainer.evaluate RUN: evaluate a run, or any model, on held-out rows or lm-evaluation-harness tasks.

    python -m trainer.evaluate runs/grpo-20261115-093000                  # the run's held-out rows and rewards
    python -m trainer.evaluate Qwen/Qwen3-0.6B --data test.jsonl --reward-funcs exact_match
    python -m trainer.evaluate runs/grpo-20261115-093000 --tasks gsm8k,arc_easy --limit 100

Decoding is greedy unless --temperature is set. Other defaults come from the run's config.yaml; a run with
--val-set-size is evaluated on the rows it held out. The result is printed and appended to evaluations.jsonl in the run
folder, which the report shows. Tasks need `pip install -e '.[eval]'`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import tyro

from data.chat import set_chat_template, set_special_tokens, stop_ids
from data.command.checks import check_numbers
from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.formats.template_settings import JsonObject, check_kwargs
from data.rows.held_out import train_and_held_out
from data.rows.prompts import load_prompts
from data.rows.transforms import uses_transform
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling, context_of
from strop_config import config_for, rows_of
from trainer.generate import run_settings
from trainer.metrics.metrics import read_jsonl

PART = 512  # completions per progress line
RESULTS = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluate a run, or any model, on held-out rows or lm-evaluation-harness tasks."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|MODEL")]
    """Finished run, model or LoRA adapter folder, hub id, or builtin:tiny."""
    data: tuple[str, ...] = ()
    """Data to evaluate on, all rows, same syntax as the trainer's --data. Default: the run's --eval-data."""
    data_format: str | None = None
    """Row format. None: the run's, or auto."""
    reward_funcs: tuple[str, ...] = ()
    """Reward functions. Default: the run's, or exact_match."""
    reward_weights: tuple[str, ...] = ()
    """One weight per reward function, for the total. Default: the run's, or 1 each."""
    max_rows: int | None = None
    """Use only the first rows. None: all rows."""
    num_generations: int = 1
    """Completions per row; more than 1 needs a temperature."""
    max_completion_length: int | None = None
    """Maximum tokens per completion. None: the run's, or 256."""
    temperature: float = 0.0
    """Sampling temperature. 0: greedy."""
    seed: int = 0
    """Sampling seed."""
    chat_template: str = "tokenizer_default"
    """Chat template; a trained model includes its own."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Variables for the chat template, as a JSON object. Empty: the run's."""
    system_prompt: str | None = None
    """System message for conversations without one. None: the run's."""
    tasks: str = ""
    """lm-evaluation-harness tasks to run instead of rows, separated by commas."""
    task_folder: str | None = None
    """Folder with custom task files."""
    num_fewshot: int | None = None
    """Examples before each question. None: the task's default."""
    limit: int | None = None
    """Use only the first questions of each task. None: all questions."""
    as_chat: bool = False
    """Send task questions as user messages, through the chat template."""
    batch_size: int = 16
    """Batch size for tasks that score given answers."""
    out: str | None = None
    """Also write all prompts, completions and rewards to this JSON Lines file."""
    trust_remote_code: bool = False
    """Allow running the Python code that comes with the model."""

    def __post_init__(self) -> None:
        check_numbers(self, {"1 or more": "max_rows num_generations max_completion_length limit batch_size"})
        if self.num_generations > 1 and self.temperature == 0:
            raise UserError(
                f"num_generations={self.num_generations}: greedy completions of a row are identical; set --temperature"
            )
        for_rows = ("data", "data_format", "reward_funcs", "reward_weights", "max_rows", "out", "max_completion_length")
        for_tasks = ("task_folder", "num_fewshot", "limit", "as_chat")
        for name in for_rows if self.tasks else for_tasks:
            if getattr(self, name):
                why = f"with tasks={self.tasks}" if self.tasks else "without --tasks"
                raise UserError(f"{name}={getattr(self, name)}: has no effect {why}; remove --{name.replace('_', '-')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after a one-line error."""
    return run_command(lambda: evaluate(parse_command(EvaluateConfig, argv, "python -m trainer.evaluate")))


def evaluate(cfg: EvaluateConfig) -> dict[str, float]:
    """Evaluate, print the result, and append it to the run folder."""
    if cfg.tasks:
        from trainer.harness import run_tasks

        tasks = [name.strip() for name in cfg.tasks.split(",") if name.strip()]
        names = ("num_fewshot", "limit", "task_folder", "system_prompt", "as_chat", "batch_size", "trust_remote_code")
        result = run_tasks(cfg.source, tasks, **{name: getattr(cfg, name) for name in names})
        settings = {"tasks": cfg.tasks, "num_fewshot": cfg.num_fewshot, "limit": cfg.limit}
    else:
        result, settings = evaluate_rows(cfg)
    for name, value in result.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    folder = Path(cfg.source).expanduser()
    if (folder / "config.yaml").is_file():
        steps = [record["step"] for record in read_jsonl(folder / "metrics.jsonl")]
        record = {"step": max(steps, default=0), "time": datetime.now(UTC).isoformat(timespec="seconds"), **settings}
        record["results"] = result
        with (folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"added to {folder / RESULTS}", file=sys.stderr)
    return result


def evaluate_rows(cfg: EvaluateConfig) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the mean rewards over the completions of all rows, and the settings to record."""
    print(f"loading {cfg.source}", file=sys.stderr, flush=True)  # importing torch takes seconds
    from rollout.rewards.options import DEFAULT_REWARD
    from rollout.rewards.table import load_rewards

    run = run_settings(cfg.source)
    check_single_turn(run)
    data = cfg.data or held_out_specs(run)
    names = cfg.reward_funcs or tuple(run.get("reward_funcs") or ()) or (DEFAULT_REWARD,)
    is_default = not cfg.reward_funcs and not run.get("reward_funcs")
    same = not cfg.reward_funcs or list(cfg.reward_funcs) == list(run.get("reward_funcs") or ())
    weights = cfg.reward_weights or (tuple(run.get("reward_weights") or ()) if same else ())
    rewards = load_rewards(names, weights, trust_remote_code=cfg.trust_remote_code)

    def check(prompts: Sequence[Prompt]) -> None:
        try:
            rewards.check_columns(prompts, "data")
        except UserError as error:
            raise UserError(f"{error}; pass --reward-funcs: {cfg.source} has none" if is_default else error) from None

    prompts, completions = sample(cfg, run, data, names, check)
    table = rewards.score(prompts, completions)
    totals = [total for total in table.totals if total is not None]
    result = {"reward/mean": statistics.fmean(totals) if totals else float("nan")}
    for name, column in zip(table.names, zip(*table.values, strict=True), strict=True):
        rewarded = [value for value in column if value is not None]
        if rewarded and len(table.names) > 1:
            result[f"{name}/mean"] = statistics.fmean(rewarded)
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
                record = {"source": prompt.source, "prompt": prompt.prompt, "completion": completion.text}
                record |= {"rewards": dict(zip(table.names, row, strict=True))}
                file.write(json.dumps(record | {"finish_reason": completion.finish_reason}) + "\n")
    decoding = "greedy" if cfg.temperature == 0 else f"temperature {cfg.temperature:g}, {cfg.num_generations} each"
    decoding += f", at most {cfg.max_completion_length} tokens" if cfg.max_completion_length else ""
    return result, {"data": list(data), "reward_funcs": [str(name) for name in names], "decoding": decoding}


def held_out_specs(run: dict[str, Any]) -> tuple[str, ...]:
    """Return the source of the run's held-out rows: its --eval-data, or the --data that --val-set-size splits."""
    if run.get("val_set_size") and rows_of(str(run.get("method"))) != "prompts":
        raise UserError(
            f"--data is required: the rows held out by val_set_size={run['val_set_size']:g} of {run.get('method')} are "
            "not prompts"
        )
    data = run.get("data") if run.get("val_set_size") else run.get("eval_data")
    if not data:
        raise UserError("--data is required: the source has no held-out rows")
    return tuple(data)


def check_single_turn(run: dict[str, Any]) -> None:
    """Raise if the run was trained with tools or an environment: without them the model would seem worse."""
    gym = run.get("nemo_gym") or {}
    for name, value in (
        ("tools", " ".join(run.get("tools") or ())),
        ("rollout_func", run.get("rollout_func")),
        ("harness", run.get("harness")),
        ("openenv.env", (run.get("openenv") or {}).get("env")),
        ("nemo_gym.datasets", " ".join(gym.get("datasets") or ())),
        ("verifiers.env", (run.get("verifiers") or {}).get("env")),
    ):
        if value:
            raise UserError(
                f"{name}={value}: the run was trained with it, but trainer.evaluate samples plain completions; use "
                "--eval-data in training, or evaluate the run's final/ as a model"
            )


def sample(
    cfg: EvaluateConfig,
    run: dict[str, Any],
    data: Sequence[str],
    rewards: Sequence[str],
    check: Callable[[Sequence[Prompt]], None],  # before anything is sampled
) -> tuple[list[Prompt], list[Completion]]:
    """Sample num_generations completions per row; each prompt is repeated for each completion."""
    from rollout.engines.load import load_model
    from rollout.engines.local import LocalEngine

    model, tokenizer = load_model(cfg.source, trust_remote_code=cfg.trust_remote_code)
    set_chat_template(tokenizer, cfg.chat_template)
    set_special_tokens(tokenizer, {}, allow_in_text=bool(run.get("allow_special_tokens")))
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
        context_length=context_of(model.config),
        max_completion_length=max_tokens,
        cfg=config_for("prompts", flags) if uses_transform(data, data_format) else None,
    )
    if run.get("val_set_size") and not cfg.data:
        names = ("data", "eval_data", "val_set_size", "dedup", "max_eval_rows")
        _, prompts = train_and_held_out(SimpleNamespace(**{name: run[name] for name in names}), run["seed"], read)
    else:
        prompts = read(data)
    prompts = prompts[: cfg.max_rows]
    check(prompts)
    prompts = [prompt for prompt in prompts for _ in range(cfg.num_generations)]
    requests = [Request.of(prompt, cfg.seed + i) for i, prompt in enumerate(prompts)]
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
