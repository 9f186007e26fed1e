"""python -m data.show: how training sees rows: rendered text with trained tokens marked, and token counts.

python -m data.show --data pairs.jsonl --data-format chatml.intel --model Qwen/Qwen2.5-0.5B-Instruct
python -m data.show --config runs/my_run/config.yaml

Your own transform gets the config that training would pass to it: that of --config, else the defaults of a method that
reads such rows.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data.chat import ASSISTANT, Trained, set_chat_template, set_special_tokens
from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS
from data.formats.fields import with_nested
from data.formats.pairs import PAIR_FORMATS
from data.formats.registry import PROMPT_FORMATS, SFT_FORMATS, parse_specs
from data.formats.template_settings import JsonObject, check_kwargs
from data.hub import check_hub
from data.rows.bad_rows import BadRows
from data.rows.pairs import load_pairs
from data.rows.prompts import load_prompts
from data.rows.sft import load_examples
from data.rows.stepwise import STEP_FORMATS, UNLABELLED, load_steps
from data.rows.targets import load_targets
from data.rows.transforms import uses_transform
from data.rows.unpaired import load_labelled
from data.sources import load_rows
from strop_config import config_for, config_from

TINY_MODEL = Path(__file__).resolve().parent.parent / "trainer" / "tiny"
QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
STYLES = {0: "dim", 1: "bold green", 2: "bold red"}  # by mark: not trained, trained, labelled wrong
LEGEND = "Under each text: how many of its tokens, in order, are trained and how many are not."
# Flags that only apply to some kinds of rows.
USED_BY = {
    "max_length": ("pairs", "unpaired", "sft", "stepwise", "documents"),
    "max_prompt_length": ("pairs", "unpaired", "prompts", "truths"),
    "step_separator": ("stepwise",),
    "bad_rows": ("pairs", "unpaired", "stepwise"),
    "format": ("pairs", "unpaired", "truths"),
}
Kind = Literal["auto", "pairs", "unpaired", "prompts", "sft", "stepwise", "truths", "documents"]


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Show how training sees rows: rendered text, trained tokens, token counts and length quantiles."""

    data: tuple[str, ...] = ()
    """Rows to show, in the form of the trainer's --data."""
    config: str | None = None
    """YAML file of a training run: its rows are shown with its settings; flags win over it."""
    data_format: str = "auto"
    """How rows are read: auto, a format name, or my_module.my_transform."""
    kind: Kind = "auto"
    """What the rows are for; auto infers it from the format and the columns."""
    model: str = "builtin:tiny"
    """Model whose tokenizer is used: hub id, local folder, run folder, or builtin:tiny."""
    rows: int = 3
    """Number of rows printed; the quantiles are of all rows."""
    chat_template: str = "tokenizer_default"
    """tokenizer_default, chatml, llama3, gemma, qwen_25, qwen3, phi_3, phi_4, or a FILE.jinja."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Settings for the chat template, as a JSON object; a row's chat_template_kwargs override them."""
    special_tokens: JsonObject = field(default_factory=dict)
    """Tokens of the tokenizer to use as pad_token, eos_token, bos_token or unk_token, as a JSON object."""
    eot_tokens: tuple[str, ...] = ()
    """Further tokens that end a turn."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    max_length: int | None = None
    """As in training, longer rows are cut or left out; unset shows whole rows."""
    max_prompt_length: int | None = None
    """As in training, rows with longer prompts are left out (pairs, unpaired, prompts, truths)."""
    step_separator: str = "\n"
    """What ends a step (stepwise)."""
    bad_rows: BadRows = "error"
    """Stop at an unusable row, or skip and count it (pairs, unpaired, stepwise)."""
    trust_remote_code: bool = False
    """Allow running Python code that comes with the tokenizer."""
    format: FormatOptions = field(default_factory=FormatOptions)

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise UserError(f"rows={self.rows}: must be 0 or more")


class Part(NamedTuple):
    """One sequence of a row."""

    title: str
    ids: list[int]
    marks: list[int]  # keys of STYLES


class Shown(NamedTuple):
    source: str
    parts: list[Part]
    lengths: dict[str, int]  # name of a part -> tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error message of one line."""
    return run_command(lambda: run(parse_command(ShowConfig, argv, "python -m data.show")))


def run(cfg: ShowConfig) -> None:
    cfg, training = with_training(cfg)
    tokenizer = load_tokenizer(cfg.model, trust_remote_code=cfg.trust_remote_code)
    set_special_tokens(tokenizer, cfg.special_tokens, cfg.eot_tokens)
    set_chat_template(tokenizer, cfg.chat_template)
    check_kwargs(tokenizer, cfg.chat_template_kwargs)
    show(read(cfg, tokenizer, training), tokenizer, cfg.rows)


def with_training(cfg: ShowConfig) -> tuple[ShowConfig, Any]:
    """The settings of --config, overridden by flags, and the config that a transform gets."""
    default = ShowConfig()
    given = {f.name: getattr(cfg, f.name) for f in fields(cfg) if getattr(cfg, f.name) != getattr(default, f.name)}
    names = ("data", "data_format", "model", "chat_template", "system_prompt", "chat_template_kwargs", "special_tokens",
             "eot_tokens")  # fmt: skip
    passed = {name: given[name] for name in names if name in given}
    if cfg.config is None:
        if not cfg.data:
            raise UserError("data: required; give --data, or --config with the YAML file of a run")
        if not uses_transform(cfg.data, cfg.data_format):
            return cfg, None
        kind = kind_of(cfg) if cfg.kind == "auto" else cfg.kind
        return replace(cfg, kind=kind), config_for(kind, {"model": cfg.model, **passed})
    training, kind, tree = config_from(cfg.config, passed)
    # Only a flag may allow a model's own code to run, not a file.
    copied = [f.name for f in fields(cfg) if f.name in tree and f.name not in (*given, "trust_remote_code")]
    values = {name: tree[name] for name in copied}
    values |= {"format": training.format} if "format" in values else {}
    values |= {name: tuple(values[name]) for name in ("data", "eot_tokens") if name in values}
    cfg = replace(cfg, **({} if "kind" in given else {"kind": kind}), **values)
    # Settings of the method that do not apply to this kind of rows are ignored, not refused.
    unused = {
        name: getattr(default, name) for name, kinds in USED_BY.items() if cfg.kind not in kinds and name in values
    }
    return replace(cfg, **unused), training


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer from a hub id, a folder, or a finished run (its final/)."""
    from transformers import AutoTokenizer

    place = TINY_MODEL if name == "builtin:tiny" else Path(name).expanduser()
    place = place / "final" if (place / "final").is_dir() else place
    if not place.is_dir():
        check_hub("model", name)
    try:
        return AutoTokenizer.from_pretrained(
            str(place) if place.is_dir() else name, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:  # what transformers raises if it is missing or unreadable
        reason = str(error).strip().split("\n")[0]
        needs_code = "trust_remote_code" in str(error)
        remedy = "if you trust its code, pass --trust-remote-code" if needs_code else "check the path or hub id"
        raise UserError(f"model={name}: its tokenizer cannot be loaded ({reason}); {remedy}") from None


def trained_of(training: Any) -> Trained:
    """What an SFT run trains of a conversation."""
    if not hasattr(training, "roles_to_train"):
        return ASSISTANT
    return Trained(training.roles_to_train, training.train_on_eos, training.train_on_inputs)


def read(cfg: ShowConfig, tokenizer: Any, training: Any = None) -> list[Shown]:
    """All rows, as returned by the loader of their kind."""
    kind = kind_of(cfg) if cfg.kind == "auto" else cfg.kind
    for name, kinds in USED_BY.items():
        if kind not in kinds and getattr(cfg, name) != getattr(ShowConfig(), name):
            raise UserError(f"{name}: has no effect on rows of kind={kind}; it is for {', '.join(kinds)}")
    common = {"data_format": cfg.data_format, "system_prompt": cfg.system_prompt,
              "chat_template_kwargs": cfg.chat_template_kwargs, "cfg": training}  # fmt: skip
    if kind == "prompts":
        rows = load_prompts(cfg.data, tokenizer, max_prompt_length=cfg.max_prompt_length, **common)
        return [Shown(row.source, [_part("prompt", row.ids, [])], {"prompt": len(row.ids)}) for row in rows]
    if kind == "truths":
        common |= {"max_prompt_length": cfg.max_prompt_length, "options": cfg.format}
        return [
            _shown_target(row) for row in load_targets(cfg.data, tokenizer, max_completion_length=sys.maxsize, **common)
        ]
    longest = sys.maxsize if cfg.max_length is None else cfg.max_length
    if kind == "documents":
        from data.rows.documents import load_documents  # imports torch

        return [_shown_document(row) for row in load_documents(cfg.data, tokenizer, max_length=longest, **common)]
    if kind == "sft":
        common |= {"trained": trained_of(training)}
        return [_shown_example(row) for row in load_examples(cfg.data, tokenizer, max_length=longest, **common)]
    common |= {"max_length": cfg.max_length, "bad_rows": cfg.bad_rows}
    if kind == "stepwise":
        steps = load_steps(cfg.data, tokenizer, step_separator=cfg.step_separator, **common)
        return [_shown_steps(row) for row in steps]
    common |= {"max_prompt_length": cfg.max_prompt_length, "options": cfg.format}
    if kind == "pairs":
        return [_shown_pair(pair) for pair in load_pairs(cfg.data, tokenizer, **common)]
    return [_shown_labelled(row) for row in load_labelled(cfg.data, tokenizer, **common)]


def kind_of(cfg: ShowConfig) -> Kind:
    """What rows are for, inferred from the name of their format, else from the columns of the first row."""
    spec = parse_specs(cfg.data)[0]
    name = spec.format or cfg.data_format
    options = replace(cfg.format, **spec.format_options)
    first = with_nested(load_rows(spec)[0].columns, options)
    columns = {column for column, value in first.items() if value is not None}
    pair = {options.field_chosen, options.field_rejected} <= columns or {
        "chosen_response",
        "rejected_response",
    } <= columns
    labelled = options.field_label in columns and (options.field_completion in columns or not pair)
    if labelled and (name in PAIR_FORMATS or name == "auto"):
        return "unpaired"
    if name in ("chat_template", "sharegpt", "user_defined"):  # for pairs and for examples
        return "pairs" if pair else "sft"
    if name != "auto":
        kinds = {"stepwise": STEP_FORMATS, "pairs": PAIR_FORMATS, "sft": SFT_FORMATS, "truths": EBFT_FORMATS,
                 "documents": EBFT_STRIDED_FORMATS}  # fmt: skip
        for kind, formats in kinds.items():
            if name in formats:
                return kind
    by_columns: tuple[tuple[set[str], Kind], ...] = (
        ({"completions", "labels"}, "stepwise"), ({"chosen", "rejected"}, "pairs"), ({"messages"}, "sft"),
        ({"conversations"}, "sft"),
        ({"prompt", "completion"}, "sft"), ({"text"}, "sft"), ({"instruction", "output"}, "sft"),
        ({"prompt"}, "prompts"),
    )  # fmt: skip
    for needed, kind in by_columns:
        if needed <= columns and "." not in name:
            return kind
    if any(known.startswith(name.partition(".")[0] + ".") for known in PAIR_FORMATS):
        return "pairs"  # a misspelt name, for which the loader suggests the right one
    if name == "auto":
        raise UserError(f"columns {', '.join(first)}: {_format_hint(first, options)}")
    raise UserError(f"kind=auto: cannot be inferred from data_format={name} and the columns of the data; give --kind")


def _format_hint(row: dict[str, Any], options: FormatOptions) -> str:
    """What to set for a row that no loader reads without a format: the formats that read it, found by trying them."""

    def read_by(formats: Mapping[str, Any], *args: Any) -> list[str]:
        found = []
        for name, function in formats.items():
            with contextlib.suppress(ValueError):
                function(row, *args)
                found.append(name)
        return found

    prompts = read_by(PROMPT_FORMATS)
    examples = [name for name in read_by(SFT_FORMATS) if name in prompts]  # gsm8k needs the #### of its answers
    found = examples or [name for name in read_by(PAIR_FORMATS, options) if not name.endswith(".default")]
    if found:
        return f"set --data-format {' or '.join(sorted(found))}"
    if prompts:
        return f"set --data-format {' or '.join(sorted(prompts))} and --kind prompts"
    return "no format reads them; rename them, for example to prompt and completion, or give --kind"


def _part(title: str, context: list[int], trained: list[int]) -> Part:
    return Part(title, context + trained, [0] * len(context) + [1] * len(trained))


def _shown_example(row: Any) -> Shown:
    part = Part("example", row.ids, [int(trained) for trained in row.mask])
    return Shown(row.source, [part], {"whole": len(row.ids), "trained": sum(row.mask)})


def _shown_target(row: Any) -> Shown:
    mask = row.target_mask or [True] * len(row.target_ids)
    part = Part("truth", row.ids + row.target_ids, [0] * len(row.ids) + [int(trained) for trained in mask])
    return Shown(row.source, [part], {"prompt": len(row.ids), "truth": len(mask), "whole": len(part.ids)})


def _shown_document(row: Any) -> Shown:
    trained = set(row.trained())
    part = Part("document", row.ids, [int(place in trained) for place in range(len(row.ids))])
    return Shown(row.source, [part], {"given": row.prompt_length, "whole": len(row.ids), "trained": len(trained)})


def _shown_steps(row: Any) -> Shown:
    marks = [0 if label == UNLABELLED else 2 - label for label in row.labels]
    title = f"steps ({', '.join({1: 'right', 2: 'wrong'}[mark] for mark in marks if mark)})"
    return Shown(row.source, [Part(title, row.ids, marks)], {"whole": len(row.ids), "steps": sum(map(bool, marks))})


def _shown_pair(pair: Any) -> Shown:
    parts = [_part(name, pair.prompt_ids, getattr(pair, f"{name}_ids")) for name in ("chosen", "rejected")]
    prompt, chosen, rejected = len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids)
    lengths = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "whole": prompt + max(chosen, rejected)}
    return Shown(pair.source, parts, lengths)


def _shown_labelled(row: Any) -> Shown:
    part = _part("desirable" if row.label else "undesirable", row.prompt_ids, row.completion_ids)
    lengths = {"prompt": len(row.prompt_ids), part.title: len(row.completion_ids), "whole": len(part.ids)}
    return Shown(row.source, [part], lengths)


def show(rows: Sequence[Shown], tokenizer: Any, num_rows: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if rows[:num_rows]:
        console.print(LEGEND + "\n")
    for row in rows[:num_rows]:
        for part in row.parts:
            trained = sum(map(bool, part.marks))
            console.print(
                Text(f"{row.source} {part.title}: {len(part.ids)} tokens, {trained} trained", style="bold cyan")
            )
            text, runs, end = Text(), [], 0
            for mark, run in groupby(part.marks):
                length = len(list(run))
                start, end = end, end + length
                text.append(tokenizer.decode(part.ids[start:end]), style=STYLES[mark])
                runs.append(f"{length} {'trained' if mark else 'not trained'}")
            console.print(text)
            console.print(Text(f"({', '.join(runs)})\n", style="italic"))
    table = Table(title=f"tokens in {len(rows)} rows")
    table.add_column("")
    for quantile in QUANTILES:
        title = {0.0: "least", 1.0: "most"}.get(quantile, f"{quantile:.0%}")
        table.add_column(title, justify="right")
    for name in dict.fromkeys(name for row in rows for name in row.lengths):
        values = [row.lengths[name] for row in rows if name in row.lengths]
        table.add_row(name, *(str(quantile_of(values, quantile)) for quantile in QUANTILES))
    console.print(table)


def quantile_of(values: Sequence[int], quantile: float) -> int:
    """The smallest value that at least this fraction of the values does not exceed."""
    return sorted(values)[max(math.ceil(quantile * len(values)) - 1, 0)]


if __name__ == "__main__":
    sys.exit(main())
