"""python -m rollout.rewards --check: score some rows and show the scores of each reward function, without training."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.chat import set_chat_template, stop_ids
from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.formats.registry import PROMPT_FORMATS, formatted_rows
from data.formats.template_settings import JsonObject, check_kwargs
from data.rows.prompts import load_prompts
from data.rows.transforms import uses_transform
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling
from rollout.engines.load import load_model
from rollout.rewards.functions import text_of
from rollout.rewards.table import RewardTable, load_rewards
from strop_config import config_for

SHOWN = 60  # characters of a prompt or completion in the table


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Score rows with reward functions, without training.

    Rows with a column `completion` are scored as they are. With --model, completions are sampled first.
    """

    check: tuple[str, ...]
    """Reward functions: built-ins, module.function, or path/to/file.py:function."""
    data: tuple[str, ...]
    """Rows to score, in the form of the trainer's --data."""
    data_format: str = "auto"
    """How rows are read: auto, a format name, or my_module.my_transform."""
    reward_weights: tuple[float, ...] = ()
    """One weight per function; empty means 1 each."""
    num_rows: int = 8
    """Rows scored, from the first on."""
    model: str | None = None
    """Sample completions with this model: hub id, local folder, run folder, or builtin:tiny."""
    num_generations: int = 1
    """Completions sampled per row."""
    max_completion_length: int = 256
    """Tokens a sampled completion may have."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seeds the sampling."""
    chat_template: str = "tokenizer_default"
    """tokenizer_default, chatml, llama3, gemma, or a FILE.jinja."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Settings that the chat template reads, as a JSON object; a row's own column of that name wins over them."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    trust_remote_code: bool = False
    """Let Python code run that comes with the model, or with a reward model."""

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_generations", "max_completion_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be 1 or more")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error, which is printed as one sentence."""
    return run_command(lambda: check(parse_command(CheckConfig, argv, "python -m rollout.rewards")))


def check(cfg: CheckConfig) -> None:
    rewards = load_rewards(cfg.check, cfg.reward_weights, trust_remote_code=cfg.trust_remote_code)
    prompts, completions = _read_completions(cfg) if cfg.model is None else _sample_completions(cfg)
    show(prompts, completions, rewards.score(prompts, completions))


def _training(cfg: CheckConfig) -> Any:
    """The config that a data transform gets, as in a run."""
    if not uses_transform(cfg.data, cfg.data_format):
        return None
    flags = {"data": cfg.data, "data_format": cfg.data_format, "chat_template": cfg.chat_template}
    flags |= {"chat_template_kwargs": cfg.chat_template_kwargs} if cfg.chat_template_kwargs else {}
    return config_for("prompts", {"model": cfg.model or "builtin:tiny", "reward_funcs": cfg.check, **flags})


def _read_completions(cfg: CheckConfig) -> tuple[list[Prompt], list[Completion]]:
    prompts, completions = [], []
    rows = formatted_rows(cfg.data, PROMPT_FORMATS, data_format=cfg.data_format, tokenizer=None, cfg=_training(cfg))
    for _, row in rows:
        if len(prompts) == cfg.num_rows:
            break
        completion = row.columns.get("completion")
        if completion is None:
            raise UserError(
                f"{row.source}: has no 'completion' (its columns: {', '.join(row.columns)}); add that column, or give "
                "--model to sample completions first"
            )
        columns = {name: value for name, value in row.columns.items() if name not in ("prompt", "completion")}
        prompts.append(Prompt(source=row.source, prompt=row.columns["prompt"], ids=[], columns=columns))
        completions.append(
            Completion(
                prompt_ids=[], ids=[], logps=[], finish_reason="stop", text=_text(row.source, completion), versions=[]
            )
        )
    return prompts, completions


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
        context_length=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        max_completion_length=cfg.max_completion_length,
        cfg=_training(cfg),
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
    """Print a line per completion, then mean, std and the number of None of each function."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe or a file: no terminal width to fit
    several = len(table.names) > 1
    rows = Table(show_lines=False)
    for name in ("row", "prompt", "completion"):
        rows.add_column(name, overflow="fold")
    for name in (*table.names, *(["total"] if several else [])):
        rows.add_column(name, justify="right")
    for prompt, completion, values, total in zip(prompts, completions, table.values, table.totals, strict=True):
        cells = [prompt.source, _short(_last_text(prompt)), _short(completion.text)]
        cells += [_number(value) for value in (*values, *([total] if several else []))]
        rows.add_row(*(Text(cell) for cell in cells))
    console.print(rows)

    columns = [list(column) for column in zip(*table.values, strict=True)]
    if several:
        columns.append(table.totals)
    for name, column in zip((*table.names, "total"), columns, strict=False):
        scored = [value for value in column if value is not None]
        mean = _number(statistics.fmean(scored)) if scored else "-"
        std = _number(statistics.stdev(scored)) if len(scored) > 1 else "-"
        console.print(Text(f"{name}: mean {mean}, std {std}, None {len(column) - len(scored)} of {len(column)}"))
        if len(scored) > 1 and len(set(scored)) == 1:
            console.print(Text(f"{name}: every score is the same; a group like this teaches nothing"))

    for name, values in table.logged.items():
        console.print(Text(f"log_metric {name}: mean {_number(statistics.fmean(values))}"))


def _last_text(prompt: Prompt) -> str:
    return prompt.prompt if isinstance(prompt.prompt, str) else str(prompt.prompt[-1].get("content", ""))


def _short(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def _number(value: float | None) -> str:
    return "None" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
