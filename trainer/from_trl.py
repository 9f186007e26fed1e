"""Convert a TRL config to a command line: python -m trainer.from_trl grpo.yaml [--kind grpo] [--yaml].

Reads YAML or JSON with the fields of a GRPOConfig, RLOOConfig, DPOConfig, KTOConfig, SFTConfig or RewardConfig, and of
TRL's ModelConfig and ScriptArguments. Prints the command, or with --yaml a file for --config; what has no effect or no
equivalent goes to stderr. docs/from_trl.md has the table of fields.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from data.command.config_file import load_config, to_yaml
from data.command.flags import build, flag_table, parse_command, read_tree, run_command
from data.errors import UserError
from trainer.cli import load_method
from trainer.translate.trl import find_kind, translate


@dataclass(frozen=True, kw_only=True)
class FromTrlConfig:
    """Convert a TRL config to flags of python -m trainer."""

    file: tyro.conf.Positional[str]
    """YAML or JSON with fields of a TRL config."""
    kind: Literal["auto", "grpo", "rloo", "dpo", "kto", "sft", "reward"] = "auto"
    """Which config it is. auto: found from its fields."""
    yaml: bool = False
    """Print a file for --config instead of a command."""


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 after an error message."""
    return run_command(lambda: _convert(parse_command(FromTrlConfig, argv, "python -m trainer.from_trl")))


def _convert(cfg: FromTrlConfig) -> None:
    theirs = load_config(Path(cfg.file))  # JSON is a subset of YAML
    try:
        made, without = translate(theirs, find_kind(theirs) if cfg.kind == "auto" else cfg.kind)
    except ValueError as error:
        raise UserError(f"{cfg.file}: {error}") from None
    for line in [*made.remarks(), *(f"no equivalent: {line}" for line in without)]:
        print(f"{cfg.file}: {line}", file=sys.stderr)
    words = _words(made.tree, cfg.file)
    print(
        to_yaml(made.tree) if cfg.yaml else " \\\n    ".join(["python -m trainer", *words]),
        end="" if cfg.yaml else "\n",
    )


def _words(tree: dict[str, Any], source: str) -> list[str]:
    """Return a flag with its values for each setting; check the whole config if it has model and data."""
    config = load_method(tree["method"]).Config
    table = flag_table(config)
    values = read_tree(tree, table, source)
    if {"model", "data"} <= values.keys():
        build(config, values, table, "python -m trainer")
    lines = []
    for key, given in values.items():
        flag = table[key]
        if flag.is_bool:
            lines.append(flag.name if given.words == ("True",) else _negated(flag.name))
        else:
            lines.append(shlex.join([flag.name, *given.words]))
    return lines


def _negated(name: str) -> str:
    """--packing -> --no-packing, --parallel.mode -> --parallel.no-mode."""
    head, dot, last = name.rpartition(".")
    return f"{head}.no-{last}" if dot else f"--no-{name.removeprefix('--')}"


if __name__ == "__main__":
    sys.exit(main())
