"""python -m rollout.rewards --check: score rows with reward functions and print the scores, without training."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from data.chat import set_chat_template, stop_ids
from data.command.checks import check_numbers
from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.formats.registry import PROMPT_FORMATS, formatted_rows
from data.formats.template_settings import JsonObject, check_kwargs
from data.rows.prompts import load_prompts
from data.rows.transforms import uses_transform
from data.sources import Row
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling, context_of
from rollout.engines.load import load_model
from rollout.rewards.functions import text_of
from rollout.rewards.table import RewardTable, load_rewards
from strop_config import config_for

MAX_SHOWN = 60  # characters per prompt or completion in the table


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Score rows with reward functions, without training.

    By default the column `completion` is scored. With --model, completions are sampled first.
    """

    check: tuple[str, ...]
    """Reward functions: built-ins, module.function, or path/to/file.py:function."""
    data: tuple[str, ...]
    """Rows to score, same syntax as the trainer's --data."""
    data_format: str = "auto"
    """Row format: auto, a format name or my_module.my_transform."""
    reward_weights: tuple[float, ...] = ()
    """One weight per function. Default: all 1."""
    num_rows: int = 8
    """Number of rows to score, from the start of the data."""
    model: str | None = None
    """Model that samples completions: hub id, model folder, run folder or builtin:tiny."""
    num_generations: int = 1
    """Completions to sample per row."""
    max_completion_length: int = 256
    """Maximum tokens per sampled completion."""
    temperature: float = 1.0
    """Sampling temperature. 0: greedy."""
    seed: int = 0
    """Sampling seed."""
    chat_template: str = "tokenizer_default"
    """tokenizer_default, chatml, llama3, gemma, qwen_25, qwen3, phi_3, phi_4, or a FILE.jinja."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Chat template settings, as a JSON object. A row's chat_template_kwargs column overrides them."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model, or with a reward model, to run."""

    def __post_init__(self) -> None:
        check_numbers(self, {"1 or more": "num_rows num_generations max_completion_length"})


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after an error, which is printed as one sentence."""
    return run_command(lambda: check(parse_command(CheckConfig, argv, "python -m rollout.rewards")))


def check(cfg: CheckConfig) -> None:
    rewards = load_rewards(cfg.check, cfg.reward_weights, trust_remote_code=cfg.trust_remote_code)
    prompts, completions = _read_completions(cfg) if cfg.model is None else _sample_completions(cfg)
    show(prompts, completions, rewards.score(prompts, completions))


def _data_config(cfg: CheckConfig) -> Any:
    """Return the config that a run would pass to the data transform; None without a transform."""
    if not uses_transform(cfg.data, cfg.data_format):
        return None
    flags = {"data": cfg.data, "data_format": cfg.data_format, "chat_template": cfg.chat_template}
    flags |= {"chat_template_kwargs": cfg.chat_template_kwargs} if cfg.chat_template_kwargs else {}
    return config_for("prompts", {"model": cfg.model or "builtin:tiny", "reward_funcs": cfg.check, **flags})


def _read_completions(cfg: CheckConfig) -> tuple[list[Prompt], list[Completion]]:
    prompts, completions = [], []
    options = {"data_format": cfg.data_format, "tokenizer": None, "cfg": _data_config(cfg)}
    for _, row in islice(formatted_rows(cfg.data, PROMPT_FORMATS, **options), cfg.num_rows):
        completion = row.columns.get("completion")
        if completion is None:
            raise UserError(
                f"{row.source}: no column 'completion' (columns: {', '.join(row.columns)}); add it, or pass --model to "
                "sample completions first"
            )
        prompts.append(prompt_of(row))
        completions.append(completion_of(_text(row.source, completion)))
    return prompts, completions


def prompt_of(row: Row) -> Prompt:
    """Return the prompt of a formatted row, without its ids."""
    columns = {name: value for name, value in row.columns.items() if name not in ("prompt", "completion")}
    return Prompt(source=row.source, prompt=row.columns["prompt"], ids=[], columns=columns)


def completion_of(text: str, ids: Sequence[int] = ()) -> Completion:
    """Return a completion that was not sampled."""
    return Completion(
        prompt_ids=[], ids=list(ids), logps=[0.0] * len(ids), finish_reason="stop", text=text, versions=[(0, len(ids))]
    )


def _text(source: str, completion: Any) -> str:
    messages = isinstance(completion, list) and all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in completion
    )
    if not isinstance(completion, str) and not messages:
        raise UserError(f"{source}: 'completion' is neither text nor a list of messages with text; fix the row")
    return text_of(completion)


def _sample_completions(cfg: CheckConfig) -> tuple[list[Prompt], list[Completion]]:
    from rollout.engines.local import LocalEngine

    model, tokenizer = load_model(cfg.model, trust_remote_code=cfg.trust_remote_code)
    set_chat_template(tokenizer, cfg.chat_template)
    check_kwargs(tokenizer, cfg.chat_template_kwargs)
    rows = load_prompts(
        cfg.data,
        tokenizer,
        data_format=cfg.data_format,
        system_prompt=cfg.system_prompt,
        chat_template_kwargs=cfg.chat_template_kwargs,
        context_length=context_of(model.config),
        max_completion_length=cfg.max_completion_length,
        cfg=_data_config(cfg),
    )
    prompts = [prompt for prompt in rows[: cfg.num_rows] for _ in range(cfg.num_generations)]
    requests = [Request(prompt_ids=prompt.ids, seed=cfg.seed + i) for i, prompt in enumerate(prompts)]
    sampling = Sampling(
        temperature=cfg.temperature,
        max_tokens=cfg.max_completion_length,
        stop_ids=stop_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None)),
    )
    return prompts, LocalEngine(model, tokenizer).generate(requests, sampling)


def show(prompts: Sequence[Prompt], completions: Sequence[Completion], table: RewardTable) -> None:
    """Print a line per completion, then the mean, std and number of None values of each function."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe or a file: no terminal width to fit
    has_total = len(table.names) > 1
    rows = Table(show_lines=False)
    for name in ("row", "prompt", "completion"):
        rows.add_column(name, overflow="fold")
    for name in (*table.names, *(["total"] if has_total else [])):
        rows.add_column(name, justify="right")
    for prompt, completion, values, total in zip(prompts, completions, table.values, table.totals, strict=True):
        cells = [prompt.source, _short(_last_text(prompt)), _short(completion.text)]
        cells += [_number(value) for value in (*values, *([total] if has_total else []))]
        rows.add_row(*(Text(cell) for cell in cells))
    console.print(rows)

    columns = [list(column) for column in zip(*table.values, strict=True)]
    if has_total:
        columns.append(table.totals)
    for name, column in zip((*table.names, "total"), columns, strict=False):
        scored = [value for value in column if value is not None]
        mean = _number(statistics.fmean(scored)) if scored else "-"
        std = _number(statistics.stdev(scored)) if len(scored) > 1 else "-"
        console.print(Text(f"{name}: mean {mean}, std {std}, None {len(column) - len(scored)} of {len(column)}"))
        if len(scored) > 1 and len(set(scored)) == 1:
            console.print(Text(f"{name}: all scores are equal; a group with equal rewards carries no signal"))

    for name, values in table.logged.items():
        console.print(Text(f"log_metric {name}: mean {_number(statistics.fmean(values))}"))


def _last_text(prompt: Prompt) -> str:
    return prompt.prompt if isinstance(prompt.prompt, str) else str(prompt.prompt[-1].get("content", ""))


def _short(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 3]}..."


def _number(value: float | None) -> str:
    return "None" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
