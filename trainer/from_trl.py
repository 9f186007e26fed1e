"""Convert a TRL config to a command line of strop.

    python -m trainer.from_trl grpo.yaml [--kind grpo] [--yaml]              # YAML or JSON with the fields of a config
    python -m trainer.from_trl train.py                                      # the GRPOConfig(...) in a script
    python -m trainer.from_trl trl grpo --model_name_or_path ...             # a command line of TRL
    python -m trainer.from_trl accelerate launch ... trl/scripts/sft.py ...

Prints the command, or with --yaml a file for --config; fields without effect or equivalent are listed on stderr.
docs/from_trl.md has the tables of configs and fields.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from data.command.config_file import load_config, to_yaml
from data.command.flags import build, flag_table, parse_command, read_tree, run_command
from data.errors import UserError
from trainer.cli import load_method
from trainer.translate.trl import DISTILLING, LAUNCH, SAMPLING, ranks_for_groups, translate
from trainer.translate.trl_kinds import KINDS, UNSUPPORTED, find_kind, kind_of_class

LAUNCHERS = ("trl", "accelerate", "torchrun", "python", "python3", "uv")
SCRIPTS = {"reward_modeling": "reward", "dpo_online": "online_dpo", "gspo": "grpo"}  # names of scripts -> kind
FILL = {"model": "builtin:tiny", "data": ["task:addition"], "teacher": "builtin:tiny"}  # to check a config without them


@dataclass(frozen=True, kw_only=True)
class FromTrlConfig:
    """Convert a TRL config, or a TRL command line (trl grpo --learning_rate 1e-6), to flags of python -m trainer."""

    file: tyro.conf.Positional[str]
    """YAML or JSON with the fields of a TRL config, a Python script that creates one, or TRL's command line."""
    kind: Literal[
        "auto", "grpo", "rloo", "dpo", "kto", "sft", "reward", "online_dpo", "ppo", "distillation", "gkd", "orpo",
        "cpo", "prm",
    ] = "auto"  # fmt: skip
    """TRL config class. auto: as named in the input, otherwise inferred from the fields."""
    yaml: bool = False
    """Print a file for --config instead of a command."""


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 after an error message."""
    argv = sys.argv[1:] if argv is None else argv
    start = next((i for i, word in enumerate(argv) if word in LAUNCHERS or re.match(r"[A-Z_]+=", word)), len(argv))
    own = argv[:start] + (["command"] if start < len(argv) else [])
    return run_command(lambda: _convert(parse_command(FromTrlConfig, own, "python -m trainer.from_trl"), argv[start:]))


def _convert(cfg: FromTrlConfig, command: Sequence[str]) -> None:
    try:
        notes: list[str] = []
        theirs = _read_command(command, cfg.kind, notes) if command else _read_file(Path(cfg.file), notes)
        kind, note = (cfg.kind, None) if cfg.kind != "auto" else find_kind(theirs)
        made, without = translate(theirs, kind)
    except ValueError as error:
        raise UserError(f"{cfg.file}: {str(error).removeprefix(f'{cfg.file}: ')}") from None
    notes += [note] if note else []
    needed = ["model", "data", *(["teacher"] if kind in DISTILLING else []),
              *(["reward_funcs"] if kind in SAMPLING and kind not in DISTILLING else [])]  # fmt: skip
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in made.tree]
    notes += [f"not in the config: add {', '.join(missing)}"] if missing else []
    for line in [*notes, *made.remarks(), *(f"no equivalent: {line}" for line in without)]:
        print(f"{cfg.file}: {line}", file=sys.stderr)
    words = _words(made.tree, cfg.file)
    print(to_yaml(made.tree).rstrip() if cfg.yaml else " \\\n    ".join(["python -m trainer", *words]))


def _read_file(path: Path, notes: list[str]) -> dict[str, Any]:
    if path.suffix == ".py":
        return _read_script(path, notes)
    tree = load_config(path)  # JSON is a subset of YAML
    if "distributed_type" in tree:
        kind = str(tree["distributed_type"])
        mode = " --parallel.mode fsdp" if kind in ("FSDP", "DEEPSPEED") else ""
        start = "python" if kind == "NO" else f"torchrun --nproc-per-node {tree.get('num_processes', 'N')}"
        raise UserError(f"distributed_type={kind}: a config of accelerate launch, not of a trainer; start strop with "
                        f"{start} -m trainer{mode}")  # fmt: skip
    return tree


def _read_script(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the literal arguments of the only TRL config that a script creates."""
    names = {entry.config for entry in KINDS.values()} | set(UNSUPPORTED)
    try:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read as Python; {error}") from None
    made = [(name, call) for call in calls if (name := ast.unparse(call.func).rpartition(".")[2]) in names]
    if len(made) != 1:
        found = ", ".join(name for name, _ in made) or "none"
        raise UserError(f"expected one config of TRL, found {len(made)} ({found}); move it to a separate file")
    name, call = made[0]
    kind_of_class(name)  # raises for a class that strop does not have
    fields: dict[str, Any] = {"config_class": name}
    for argument in [*(ast.keyword(None, value) for value in call.args), *call.keywords]:
        value = _literal(argument.value)
        if argument.arg is not None and value is not ...:
            fields[argument.arg] = value
        elif ast.unparse(argument.value) != "...":
            text = f"{argument.arg or ''}={ast.unparse(argument.value)}".lstrip("=")
            notes.append(f"{text}: skipped, not a literal keyword argument; set it by hand")
    notes.append(f"only the arguments of {name} are read; the script's model, data, rewards and peft_config are not")
    return fields


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, the name of a torch dtype, or ... for anything else."""
    text = ast.unparse(node)
    try:
        return text.removeprefix("torch.") if text.startswith("torch.") else ast.literal_eval(node)
    except ValueError:
        return ...


def _read_command(words: Sequence[str], kind: str, notes: list[str]) -> dict[str, Any]:
    """Read a command line of TRL: its kind from the subcommand or the script's name, its fields from the flags."""
    words = list(words)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    launcher = words.pop(0) if words else ""
    start = 0 if launcher == "trl" else next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if launcher not in LAUNCHERS or start is None or not words:
        raise UserError("not a TRL command; write trl KIND --FLAG VALUE, or python SCRIPT.py --FLAG VALUE")
    script = words[start]
    name = Path(script).stem
    if launcher in ("accelerate", "torchrun"):
        notes.append(f"{shlex.join([launcher, *words[:start]])}: {LAUNCH}")
    if launcher != "trl" and "trl/scripts" not in script:
        notes.append(f"{script}: its flags are read, not its code, which may set more or load other data")
    kind = _kind_of_script(name) if kind == "auto" else kind
    tree = {"config_class": KINDS[kind].config, **_flags(words[start + 1 :])}
    file = tree.pop("config", None)
    return tree if file is None else {**_read_file(Path(file), notes), **tree}


def _kind_of_script(name: str) -> str:
    name = SCRIPTS.get(name, name)
    if "vlm" in name:
        raise UserError(f"{name}: images are not supported")
    if name == "vllm-serve":
        raise UserError("trl vllm-serve: starts a server; use python -m rollout.serve")
    for unsupported in UNSUPPORTED:
        if name.replace("_", "") == unsupported.removesuffix("Config").lower():
            return kind_of_class(unsupported)
    kinds = [kind for kind in KINDS if name == kind or name.startswith(f"{kind}_")]
    if not kinds:
        raise UserError(f"{name}: not a supported TRL trainer; add --kind {', '.join(KINDS)} before it")
    return max(kinds, key=len)


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """--a_b 1 --c-d x y --e=2 --f --no_g -> {a_b: 1, c_d: [x, y], e: 2, f: True, g: False}."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            flag, equals, value = word.removeprefix("--").partition("=")
            name = flag.replace("-", "_")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        else:
            raise UserError(f"{word}: expected a flag of TRL, such as --learning_rate")
    read = {name: [_value(word) for word in given] for name, given in found.items()}
    fields = {name: given[0] if len(given) == 1 else given or True for name, given in read.items()}
    return {name.removeprefix("no_") if given is True else name: False if name.startswith("no_") and given is True
            else given for name, given in fields.items()}  # fmt: skip


def _value(word: str) -> Any:
    try:
        return json.loads(word.lower() if word in ("True", "False") else word)
    except ValueError:
        return word


def _words(tree: Mapping[str, Any], source: str) -> list[str]:
    """Return a flag with its values for each setting, after checking the config as the trainer does."""
    config = load_method(tree["method"]).Config
    table = flag_table(config)
    values = read_tree(tree, table, source)
    checked = {name: value for name, value in FILL.items() if name in table} | dict(tree)
    checked["gradient_accumulation_steps"] = ranks_for_groups(tree) * tree.get("gradient_accumulation_steps", 1)
    build(config, read_tree(checked, table, source), table, "python -m trainer")
    lines = []
    for key, given in values.items():
        flag = table[key]
        if bool in flag.members and given.words in (("True",), ("False",)):
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
