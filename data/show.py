"""python -m data.show: print rows as training reads them, with trained tokens marked and token counts.

python -m data.show --data pairs.jsonl --data-format chatml.intel --model Qwen/Qwen2.5-0.5B-Instruct
python -m data.show --config runs/my_run/config.yaml

A custom transform gets the config that training would pass to it: --config, or the defaults of a method that reads this
kind of rows.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from data.chat import Trained, set_chat_template, set_special_tokens
from data.command.checks import check_numbers
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
from data.types import Example, Labelled, Pair, Steps, TargetPrompt
from strop_config import config_for, config_from

if TYPE_CHECKING:
    from data.strided import Document  # imports torch

TINY_MODEL = Path(__file__).resolve().parent.parent / "trainer" / "tiny"
QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
STYLES = {0: "dim", 1: "bold green", 2: "bold red"}  # mark -> style: not trained, trained, labelled wrong
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # could control the terminal; all but tab and newline
LEGEND = "Below each text: the lengths of its trained and untrained runs of tokens, in order."
# Flags that apply only to some kinds of rows.
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
    """Print rows as training reads them: rendered text, trained tokens, token counts and length quantiles."""

    data: tuple[str, ...] = ()
    """Rows to show, same syntax as the trainer's --data."""
    config: str | None = None
    """YAML file of a training run: show its rows with its settings. Flags override it."""
    data_format: str = "auto"
    """Row format: auto, a format name or my_module.my_transform."""
    kind: Kind = "auto"
    """Kind of rows. auto: inferred from the format and the columns."""
    model: str = "builtin:tiny"
    """Model whose tokenizer is used: hub id, local folder, run folder, or builtin:tiny."""
    revision: str | None = None
    """Branch, tag or commit of --model on the hub. None: its main branch."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's: a folder or a hub id."""
    rows: int = 3
    """Number of rows to print. The quantiles cover all rows."""
    chat_template: str = "tokenizer_default"
    """tokenizer_default, chatml, llama3, gemma, qwen_25, qwen3, phi_3, phi_4, or a FILE.jinja."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Settings for the chat template, as a JSON object; a row's chat_template_kwargs override them."""
    special_tokens: JsonObject = field(default_factory=dict)
    """Tokens of the tokenizer to use as pad_token, eos_token, bos_token or unk_token, as a JSON object."""
    eot_tokens: tuple[str, ...] = ()
    """Additional end-of-turn tokens."""
    allow_special_tokens: bool = False
    """Read special tokens in messages as tokens, not as plain text."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    max_length: int | None = None
    """Truncate or skip longer rows, as in training. None: no limit."""
    max_prompt_length: int | None = None
    """Skip rows with longer prompts, as in training (pairs, unpaired, prompts, truths)."""
    step_separator: str = "\n"
    """Text that ends a step (stepwise)."""
    bad_rows: BadRows = "error"
    """Stop at an unusable row, or skip and count it (pairs, unpaired, stepwise)."""
    trust_remote_code: bool = False
    """Allow running Python code from the tokenizer's repository."""
    format: FormatOptions = field(default_factory=FormatOptions)

    def __post_init__(self) -> None:
        check_numbers(self, {"0 or more": "rows"})


class Segment(NamedTuple):
    """One sequence of a row."""

    title: str
    ids: list[int]
    marks: list[int]  # keys of STYLES


class ShownRow(NamedTuple):
    source: str
    segments: list[Segment]
    lengths: dict[str, int]  # name -> number of tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after a one-line error message."""
    return run_command(lambda: run(parse_command(ShowConfig, argv, "python -m data.show")))


def run(cfg: ShowConfig) -> None:
    cfg, training = with_training(cfg)
    source = ("model", cfg.model, cfg.revision) if cfg.tokenizer is None else ("tokenizer", cfg.tokenizer, None)
    tokenizer = load_tokenizer(*source, trust_remote_code=cfg.trust_remote_code)
    set_special_tokens(tokenizer, cfg.special_tokens, cfg.eot_tokens, allow_in_text=cfg.allow_special_tokens)
    set_chat_template(tokenizer, cfg.chat_template)
    check_kwargs(tokenizer, cfg.chat_template_kwargs)
    show(read(cfg, tokenizer, training), tokenizer, cfg.rows)


def with_training(cfg: ShowConfig) -> tuple[ShowConfig, Any]:
    """Return the settings of --config, overridden by flags, and the config to pass to a transform."""
    default = ShowConfig()
    flags = {f.name: getattr(cfg, f.name) for f in fields(cfg) if getattr(cfg, f.name) != getattr(default, f.name)}
    names = ("data", "data_format", "model", "revision", "tokenizer", "chat_template", "system_prompt",
             "chat_template_kwargs", "special_tokens", "eot_tokens", "allow_special_tokens")  # fmt: skip
    passed = {name: flags[name] for name in names if name in flags}
    if cfg.config is None:
        if not cfg.data:
            raise UserError("--data is required, or --config with the YAML file of a run")
        if not uses_transform(cfg.data, cfg.data_format):
            return cfg, None
        kind = kind_of(cfg) if cfg.kind == "auto" else cfg.kind
        return replace(cfg, kind=kind), config_for(kind, {"model": cfg.model, **passed})
    return with_settings(cfg, *config_from(cfg.config, passed), flags)


def with_settings(
    cfg: ShowConfig, training: Any, kind: Kind, tree: Mapping[str, Any], flags: Collection[str] = ()
) -> tuple[ShowConfig, Any]:
    """Return the settings of a training config, overridden by flags, and that config."""
    default = ShowConfig()
    # Only a flag may allow a model's code to run, not a file.
    copied = [f.name for f in fields(cfg) if f.name in tree and f.name not in (*flags, "trust_remote_code")]
    values = {name: tree[name] for name in copied}
    values |= {"format": training.format} if "format" in values else {}
    values |= {name: tuple(values[name]) for name in ("data", "eot_tokens") if name in values}
    cfg = replace(cfg, **({} if "kind" in flags else {"kind": kind}), **values)
    # Settings of the file that do not apply to this kind of rows are ignored.
    unused = {
        name: getattr(default, name) for name, kinds in USED_BY.items() if cfg.kind not in kinds and name in values
    }
    return replace(cfg, **unused), training


def load_tokenizer(setting: str, name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of --model or --tokenizer: from a hub id, a folder, or a finished run (its final/)."""
    from transformers import AutoTokenizer

    folder = TINY_MODEL if name == "builtin:tiny" else Path(name).expanduser()
    folder = folder / "final" if (folder / "final").is_dir() else folder
    if not folder.is_dir():
        check_hub(setting, name)
    elif revision is not None:
        raise UserError(f"revision={revision}: has no effect on a local folder ({setting}={name}); remove --revision")
    try:
        return AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises arbitrary errors for damaged files
        reason = str(error).strip().split("\n")[0]
        needs_code = "trust_remote_code" in str(error)
        remedy = "if you trust its code, pass --trust-remote-code" if needs_code else "check the path or hub id"
        raise UserError(f"{setting}={name}: its tokenizer cannot be loaded ({reason}); {remedy}") from None


def read(cfg: ShowConfig, tokenizer: Any, training: Any = None, context_length: int | None = None) -> list[ShownRow]:
    """Load all rows with the loader of their kind. context_length: the model's; None: no limit."""
    kind = kind_of(cfg) if cfg.kind == "auto" else cfg.kind
    for name, kinds in USED_BY.items():
        if kind not in kinds and getattr(cfg, name) != getattr(ShowConfig(), name):
            raise UserError(f"{name}: has no effect with kind={kind}; it is for {', '.join(kinds)}")
    common = {"data_format": cfg.data_format, "system_prompt": cfg.system_prompt,
              "chat_template_kwargs": cfg.chat_template_kwargs, "cfg": training}  # fmt: skip
    if kind == "prompts":
        limits = {"max_prompt_length": cfg.max_prompt_length, "context_length": context_length,
                  "max_completion_length": getattr(training, "max_completion_length", 0)}  # fmt: skip
        rows = load_prompts(cfg.data, tokenizer, **limits, **common)
        return [ShownRow(row.source, [_segment("prompt", row.ids, [])], {"prompt": len(row.ids)}) for row in rows]
    if kind == "truths":
        common |= {"max_prompt_length": cfg.max_prompt_length, "options": cfg.format}
        return [
            _show_target(row) for row in load_targets(cfg.data, tokenizer, max_completion_length=sys.maxsize, **common)
        ]
    common["context_length"] = context_length
    longest = sys.maxsize if cfg.max_length is None else cfg.max_length
    if kind == "documents":
        from data.rows.documents import load_documents  # imports torch

        return [_show_document(row) for row in load_documents(cfg.data, tokenizer, max_length=longest, **common)]
    if kind == "sft":
        if hasattr(training, "roles_to_train"):  # the config of an SFT run
            common["trained"] = Trained(training.roles_to_train, training.train_on_eos, training.train_on_inputs)
            common["long_rows"] = training.long_rows
        return [_show_example(row) for row in load_examples(cfg.data, tokenizer, max_length=longest, **common)]
    common |= {"max_length": cfg.max_length, "bad_rows": cfg.bad_rows}
    if kind == "stepwise":
        steps = load_steps(cfg.data, tokenizer, step_separator=cfg.step_separator, **common)
        return [_show_steps(row) for row in steps]
    common |= {"max_prompt_length": cfg.max_prompt_length, "options": cfg.format}
    if hasattr(training, "response"):  # the config of a preference method
        common["long_rows"] = training.response.long_rows
    if kind == "pairs":
        return [_show_pair(pair) for pair in load_pairs(cfg.data, tokenizer, **common)]
    return [_show_labelled(row) for row in load_labelled(cfg.data, tokenizer, **common)]


def kind_of(cfg: ShowConfig) -> Kind:
    """Infer the kind of rows from the name of their format, otherwise from the columns of the first row."""
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
    if name in ("chat_template", "sharegpt", "user_defined"):  # for pairs and for SFT rows
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
        return "pairs"  # a misspelt name: the loader suggests the correct one
    if name == "auto":
        raise UserError(f"columns {', '.join(first)}: {_format_hint(first, options)}")
    raise UserError(f"kind=auto: cannot be inferred from data_format={name} and the columns of the data; set --kind")


def _format_hint(row: dict[str, Any], options: FormatOptions) -> str:
    """Suggest the formats that can read a row, found by trying all of them."""

    def readers(formats: Mapping[str, Any], *args: Any) -> list[str]:
        names = []
        for name, function in formats.items():
            with contextlib.suppress(ValueError):
                function(row, *args)
                names.append(name)
        return names

    prompts = readers(PROMPT_FORMATS)
    examples = [name for name in readers(SFT_FORMATS) if name in prompts]  # gsm8k needs the #### of its answers
    names = examples or [name for name in readers(PAIR_FORMATS, options) if not name.endswith(".default")]
    if names:
        return f"set --data-format {' or '.join(sorted(names))}"
    if prompts:
        return f"set --data-format {' or '.join(sorted(prompts))} and --kind prompts"
    return "no format reads them; rename them, for example to prompt and completion, or set --kind"


def _segment(title: str, context: list[int], trained: list[int]) -> Segment:
    return Segment(title, context + trained, [0] * len(context) + [1] * len(trained))


def _show_example(row: Example) -> ShownRow:
    segment = Segment("example", row.ids, [int(trained) for trained in row.mask])
    return ShownRow(row.source, [segment], {"whole": len(row.ids), "trained": sum(row.mask)})


def _show_target(row: TargetPrompt) -> ShownRow:
    mask = row.target_mask or [True] * len(row.target_ids)
    segment = Segment("truth", row.ids + row.target_ids, [0] * len(row.ids) + [int(trained) for trained in mask])
    return ShownRow(row.source, [segment], {"prompt": len(row.ids), "truth": len(mask), "whole": len(segment.ids)})


def _show_document(row: Document) -> ShownRow:
    trained = set(row.trained())
    segment = Segment("document", row.ids, [int(i in trained) for i in range(len(row.ids))])
    return ShownRow(row.source, [segment], {"given": row.prompt_length, "whole": len(row.ids), "trained": len(trained)})


def _show_steps(row: Steps) -> ShownRow:
    marks = [0 if label == UNLABELLED else 2 - label for label in row.labels]
    title = f"steps ({', '.join({1: 'right', 2: 'wrong'}[mark] for mark in marks if mark)})"
    lengths = {"whole": len(row.ids), "steps": sum(map(bool, marks))}
    return ShownRow(row.source, [Segment(title, row.ids, marks)], lengths)


def _show_pair(pair: Pair) -> ShownRow:
    segments = [_segment(name, pair.prompt_ids, getattr(pair, f"{name}_ids")) for name in ("chosen", "rejected")]
    prompt, chosen, rejected = len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids)
    lengths = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "whole": prompt + max(chosen, rejected)}
    return ShownRow(pair.source, segments, lengths)


def _show_labelled(row: Labelled) -> ShownRow:
    segment = _segment("desirable" if row.label else "undesirable", row.prompt_ids, row.completion_ids)
    lengths = {"prompt": len(row.prompt_ids), segment.title: len(row.completion_ids), "whole": len(segment.ids)}
    return ShownRow(row.source, [segment], lengths)


def show(rows: Sequence[ShownRow], tokenizer: Any, num_rows: int) -> None:
    """Print the first rows and the length quantiles of all rows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if rows[:num_rows]:
        console.print(LEGEND + "\n")
    for row in rows[:num_rows]:
        for segment in row.segments:
            trained = sum(map(bool, segment.marks))
            title = f"{without_control(row.source)} {segment.title}: {len(segment.ids)} tokens, {trained} trained"
            console.print(Text(title, style="bold cyan"))
            text, runs, end = Text(), [], 0
            for mark, run in groupby(segment.marks):
                length = len(list(run))
                start, end = end, end + length
                text.append(without_control(tokenizer.decode(segment.ids[start:end])), style=STYLES[mark])
                runs.append(f"{length} {'trained' if mark else 'not trained'}")
            console.print(text)
            console.print(Text(f"({', '.join(runs)})\n", style="italic"))
    table = Table(title=f"tokens in {len(rows)} rows")
    table.add_column("")
    for quantile in QUANTILES:
        title = {0.0: "min", 1.0: "max"}.get(quantile, f"{quantile:.0%}")
        table.add_column(title, justify="right")
    for name in dict.fromkeys(name for row in rows for name in row.lengths):
        values = [row.lengths[name] for row in rows if name in row.lengths]
        table.add_row(name, *(str(quantile_of(values, quantile)) for quantile in QUANTILES))
    console.print(table)


def without_control(text: str) -> str:
    """Escape control characters such as \\x1b."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def quantile_of(values: Sequence[int], quantile: float) -> int:
    """Return the smallest value that is not exceeded by at least this fraction of the values."""
    return sorted(values)[max(math.ceil(quantile * len(values)) - 1, 0)]


if __name__ == "__main__":
    sys.exit(main())
