"""Turn argv and an optional YAML file into one frozen config.

    python -m trainer --method grpo --learning-rate 3e-6
    python -m trainer --config runs/dev/config.yaml --max-steps 10
    python -m trainer --config axolotl.yml --dry-run        # translate an axolotl config and print the result
    python -m trainer --resume

Later layers win: dataclass default < tiny recipe (only if nothing names a model) < saved config of the run to resume <
--config < flag. The method is read first, because it decides which flags exist. --dry-run prints the settings of the
file and the flags as YAML for --config; then, on stderr, the first row, its rewards and a plan (trainer/dry_run.py).
"""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, NoReturn

from data.command.config_file import PER_CALL, load_config, to_yaml
from data.command.flags import (
    CONFIG,
    HELP,
    REPEATABLE,
    Flag,
    FlagValue,
    Mistakes,
    Values,
    build,
    config_to_tree,
    flag_table,
    looks_like_flag,
    print_help,
    read_argv,
    read_tree,
)
from data.errors import UserError
from data.hints import method_hint
from data.sources import check_file, parse_spec, spec_entry
from data.user_code import check_function_file, import_beside, is_missing
from rollout.model_folder import resolve_model
from rollout.servers.options import LAUNCH_ONLY
from strop_names import NAMES, ROOT, module_file
from trainer.config.blocks import MethodConfig, RunConfig
from trainer.config.learning_rates import with_default_rate
from trainer.config.old_flags import replace_old, with_old_flags, without_old_defaults
from trainer.parallel.ranks import world_size
from trainer.translate.axolotl import is_axolotl, translate

DRY_RUN = "--dry-run"
# Two settings of one quantity: either one replaces both in a lower layer.
ALTERNATIVES = (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch"), ("warmup_steps", "warmup_ratio"),
                ("eval_data", "val_set_size"))  # fmt: skip
LORA_SETTINGS = ("merge_lora", "load_in_4bit", "fp8_base")  # outside the block lora
# Name in an annotation -> type: all that read_argv and read_tree need to know.
SOURCE_TYPES = {"bool": bool, "None": NoneType, "tuple": tuple[str, ...], "JsonObject": dict}
FUNCTIONS = ("reward_funcs", "tools", "rollout_func", "judge")  # flags that may name FILE.py:function
METHODS = Path(__file__).parent / "methods"
RECIPES = Path(__file__).parent / "recipes"


def parse(
    argv: Sequence[str], *, starts_run: bool = False, skipped: dict[str, Flag] = CONFIG
) -> tuple[ModuleType, MethodConfig, str]:
    """Return (method module, its Config, the method as the user named it); SystemExit(0) after a listing or help.

    Importing the method imports torch, which takes seconds. Before that, the names of flags and keys are checked and,
    with `starts_run`, the files that they name; the console gets its first line. `skipped`: flags that are no settings
    of the method.
    """
    argv = _spell_out_resume(argv)
    _check_first_word(argv)
    if _started_again() and peek(argv, "resume") is None and _has_run_to_resume(argv):
        argv = [*argv, "--resume=latest"]
    is_dry_run, argv = DRY_RUN in argv, [word for word in argv if word != DRY_RUN]
    config_file = peek(argv, "config")
    file_tree = _file_tree(argv, log=True)
    wants_help = any(word in HELP for word in argv)
    name = peek(argv, "method") or file_tree.get("method")
    mistakes: list[str] = []
    resume = None if wants_help else _resume_point(argv, file_tree, name)
    if name is None and resume is not None:
        name = resume.saved["method"]
    if name is None:
        name = file_tree.get("rl")  # axolotl's: read_tree rejects it, together with the file's other unknown keys
    if name is None:
        if "model_name_or_path" in file_tree:
            raise UserError(
                f"{config_file}: this is a TRL config; convert it with python -m trainer.from_trl {config_file}"
            )
        if any(word not in HELP for word in argv):
            tables = (source_flags(f"trainer.methods.{name}") for name in method_names())
            read_argv(argv, with_old_flags(functools.reduce(operator.or_, tables)) | skipped, mistakes)
            if mistakes:
                raise Mistakes(mistakes)
            raise UserError(f"--method is required: one of {', '.join(method_names())}, or the dotted path of a module")
        print(method_listing())
        raise SystemExit(0)

    check_method(str(name))
    if str(name) in method_names() and not wants_help:
        _check_before_import(str(name), argv, file_tree, skipped, files=starts_run and not is_dry_run)
    if starts_run and "torch" not in sys.modules:
        _log(f"loading {name} and PyTorch")
    module = load_method(str(name))
    table = flag_table(module.Config)
    if "method" not in table or "resume" not in table:
        raise UserError(f"--method={name}: its Config has no run block; add the field run: Flat[RunConfig]")
    prog = f"python -m trainer --method {name}"
    if wants_help:
        show_help(module.Config, table, prog, show_all="--help-all" in argv)

    values: Values = {}
    readable = with_old_flags(table)
    if resume is not None:
        values = read_tree(resume.saved, readable, str(resume.run_dir / "config.yaml"), mistakes)
        values = _over({}, values, table, mistakes)
    values = _over(values, read_tree(file_tree, readable, str(config_file), mistakes, methods_with), table, mistakes)
    values = _over(values, read_argv(argv, readable | skipped, mistakes, methods_with), table | skipped, mistakes)
    values = {key: given for key, given in values.items() if key in table}
    if "model" not in values and not mistakes:
        values = _over(_recipe_values(module, str(name), table, values), values, table, mistakes)
    values |= read_tree({"method": str(name)}, table, "--method")
    if resume is None:
        values = _without_overridden(values)
    else:
        if values["overwrite_output_dir"].words == ("True",):
            raise UserError("--overwrite-output-dir would delete the run to resume; remove it or --resume")
        values |= read_tree({"output_dir": str(resume.run_dir), "resume": resume.checkpoint}, table, "--resume")
        _check_working_folder(resume, values)
    cfg = build(module.Config, values, table, prog, mistakes)
    if is_dry_run:
        print(_as_yaml(cfg, values), end="", flush=True)
        if not starts_run:  # otherwise trainer/__main__.py calls dry_run.describe()
            raise SystemExit(0)
    return module, cfg if "learning_rate" in values else with_default_rate(cfg), str(name)


def parse_settings(
    module: ModuleType, config: type[MethodConfig], name: str, layers: Sequence[tuple[Mapping[str, Any], str]],
    objects: Mapping[str, Any],
) -> MethodConfig:  # fmt: skip
    """Return a Config of the method for settings from Python, with the checks and defaults of parse().

    A layer is a mapping as in a YAML file, and its name in messages; later layers win. `objects`: values by key that
    are not plain data, such as functions. lora_r is read as lora.r.
    """
    table = flag_table(config)
    dotted = {key.replace(".", "_"): key for key in table if "." in key and key.replace(".", "_") not in table}
    values: Values = {}
    mistakes: list[str] = []
    for tree, source in layers:
        tree = {dotted.get(key, key): value for key, value in tree.items() if key != "method"}
        read = read_tree(tree, with_old_flags(table), source, mistakes, methods_with)
        values = _over(values, read, table, mistakes)
    objects = {dotted.get(key, key): value for key, value in objects.items()}
    read_tree(dict.fromkeys(objects, "object"), table, layers[-1][1], mistakes, methods_with)  # unknown keys
    values = {key: given for key, given in values.items() if key not in objects}
    if "model" not in (*values, *objects) and not mistakes:
        recipe = _recipe_values(module, name, table, values | dict.fromkeys(objects, FlagValue(("",))))
        values = _over({key: given for key, given in recipe.items() if key not in objects}, values, table, mistakes)
    values |= read_tree({"method": name}, table, "method")
    cfg = build(config, values, table, f"train({name!r})", mistakes, objects)
    return cfg if "learning_rate" in values else with_default_rate(cfg)


def _check_before_import(
    name: str, argv: Sequence[str], file_tree: Mapping[str, Any], skipped: dict[str, Flag], *, files: bool
) -> None:
    """Raise for unknown flags and keys and, if `files`, for files and folders that do not exist."""
    mistakes: list[str] = []
    table = with_old_flags(source_flags(f"trainer.methods.{name}"))
    values = read_tree(file_tree, table, str(peek(argv, "config")), mistakes, methods_with)
    values |= read_argv(argv, table | skipped, mistakes, methods_with)
    for key, given in values.items() if files else ():
        for word in given.words:
            try:
                _check_exists(key, word)
            except UserError as error:
                mistakes.append(str(error))
    if mistakes:
        raise Mistakes(mistakes)


def _check_exists(key: str, word: str) -> None:
    if key in REPEATABLE:
        check_file(parse_spec(word).path)
    elif key == "model":
        resolve_model(word)
    elif key in FUNCTIONS:
        check_function_file(word, f"{key}={word}")


# methods ---------------------------------------------------------------------------------------------------------


def method_names() -> list[str]:
    """Every file in trainer/methods/ is a method."""
    return sorted(path.stem for path in METHODS.glob("*.py") if not path.stem.startswith("_"))


def method_summary(name: str) -> str:
    """Return the first line of the method's Config docstring, without importing torch."""
    tree = ast.parse((METHODS / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def source_flags(module: str, name: str = "Config") -> dict[str, Flag]:
    """Return the flags of a Config or block by key, read from its source; types are reduced to SOURCE_TYPES.

    The same keys as flag_table(), without importing the module. Empty if it is not a class of strop.
    """
    tree = _source(module)
    config = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    imported = {alias.name: str(node.module)
                for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip

    def flags_of(node: ast.expr) -> dict[str, Flag]:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # grpo.Config
            return source_flags(f"{imported[node.value.id]}.{node.value.id}", node.attr)
        return source_flags(imported.get(node.id, module), node.id) if isinstance(node, ast.Name) else {}

    flags: dict[str, Flag] = {}
    for base in config.bases if config else ():
        flags |= flags_of(base)
    for field in config.body if config else ():
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        annotation, key = field.annotation, field.target.id
        names = {ast.unparse(node) for node in ast.walk(annotation) if isinstance(node, (ast.Name, ast.Constant))}
        flat = annotation.slice if isinstance(annotation, ast.Subscript) and "Flat" in names else None
        if block := flags_of(flat or annotation):
            prefix = "" if flat else f"{key}."
            flags |= {prefix + inner: replace(flag, key=prefix + inner) for inner, flag in block.items()}
        elif "ClassVar" not in names:
            kinds = [kind for word, kind in SOURCE_TYPES.items() if word in names] or [str]
            flags[key] = Flag(key, functools.reduce(operator.or_, kinds), required=False, module=module)
    return flags


@functools.cache
def _source(module: str) -> ast.Module:
    file = module_file(ROOT, module) if module.partition(".")[0] in NAMES else None
    return ast.parse(file.read_text(encoding="utf-8") if file else "")


def method_listing() -> str:
    width = max(len(name) for name in method_names())
    rows = [f"  {name:<{width}}  {method_summary(name)}" for name in method_names()]
    return "\n".join(
        [
            "usage: python -m trainer --method NAME [--config FILE.yaml] [--help | --help-all] [flags]",
            "",
            "methods:",
            *rows,
            "",
            "A custom method: --method my_algo or my_pkg.my_algo (a module with Config and train).",
            "With no other flags a method trains the built-in tiny model on arithmetic.",
        ]
    )


def check_method(name: str) -> None:
    """Raise if the name cannot be a method; a custom module is not imported."""
    if name == "__main__":
        raise UserError(
            "--method=__main__: the method is in the script that started the run; resume it from that script, with "
            "RunConfig(resume=FOLDER)"
        )
    if name.endswith(".py"):
        raise UserError(f"--method={name}: name the module, without .py: --method {Path(name).stem}")
    if name not in method_names() and "." not in name and module_file(Path.cwd(), name) is None:
        hint = method_hint(name, method_names())
        raise UserError(
            f"--method={name}: unknown method; {hint} (a custom method is a file here or a dotted module path)"
        )


def load_method(name: str) -> ModuleType:
    """Import a built-in method by name, or a module found from the working directory."""
    check_method(name)
    if name in method_names():
        return importlib.import_module(f"trainer.methods.{name}")
    try:
        module = import_beside(name)
    except ModuleNotFoundError as error:
        if not is_missing(name, error):
            raise  # the module exists, but something it imports does not
        raise UserError(f"--method={name}: no module {error.name} here or installed; {_module_hint(name)}") from None
    except TypeError as error:
        if "frozen" not in str(error):
            raise
        raise UserError(f"--method={name}: its Config must be a @dataclass(frozen=True, kw_only=True)") from None
    for part in ("Config", "train"):
        if not hasattr(module, part):
            raise UserError(f"--method={name}: has no {part}; a method is a module with Config and train(cfg)")
    return module


def _module_hint(name: str) -> str:
    hint = method_hint(name, method_names())
    return hint if hint.startswith("did you") else "run from the folder that contains it, or install it"


def methods_with(key: str) -> str:
    """Return the hint for a flag that only other methods have, or ""."""
    names = [name for name in method_names() if key in source_flags(f"trainer.methods.{name}")]
    return f"only {', '.join(names)} {'have' if len(names) > 1 else 'has'} it" if names else ""


def show_help(config: type, table: dict[str, Flag], prog: str, *, show_all: bool) -> NoReturn:
    """Print the common flags of the built-in blocks and all flags of custom modules, by block; then exit."""
    note = (
        "--config FILE.yaml sets the same keys from a file; flags override the file. --dry-run shows the settings, the "
        "first row, its rewards and the memory, and exits."
    )
    if show_all:
        print_help(config, prog, note)
    refused = getattr(config, "refused", ())
    shown = {key for key, flag in table.items()
             if flag.module.partition(".")[0] not in NAMES or (flag.is_common and key not in refused)}  # fmt: skip
    note = f"{len(shown)} of {len(table)} flags; --help-all shows all. {note}"
    print_help(config, prog, note, shown.__contains__)


# layers ----------------------------------------------------------------------------------------------------------


def _file_tree(argv: Sequence[str], *, log: bool = False) -> dict[str, Any]:
    """Return the settings of --config; translate an axolotl config and, if `log`, print what has no effect here."""
    config_file = peek(argv, "config")
    tree = load_config(Path(config_file)) if config_file else {}
    if not is_axolotl(tree):
        return without_old_defaults(tree)
    try:
        names = {"method": "method", "engine": "rollout.engine", "max_steps": "max_steps"}
        translation = translate(tree, **{name: peek(argv, key) for name, key in names.items()})
    except ValueError as error:
        raise UserError(f"{config_file}: {error}") from None
    for variable, value in translation.environment.items():
        os.environ.setdefault(variable, value)
    if "model" not in translation.tree and peek(argv, "model") is None and peek(argv, "resume") is None:
        raise UserError(f"{config_file}: has no base_model; add it, or pass --model")
    if log:
        _log(f"{config_file}: an axolotl config, translated; --dry-run prints the result")
        _log(*(f"{config_file}: {line}" for line in translation.remarks()))
    return translation.tree


def _log(*lines: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(line, file=sys.stderr)


def _over(values: Values, later: Values, table: Mapping[str, Flag], mistakes: list[str]) -> Values:
    """Merge two layers of values; the second wins, and its old flags become the flags of today."""
    try:
        later, notes = replace_old(later, table, below=values)
        _log(*notes)
    except UserError as error:
        mistakes.append(str(error))
        later = {key: given for key, given in later.items() if key in table}
    replaced = {
        other for pair in ALTERNATIVES for one, other in (pair, pair[::-1]) if one in later and other not in later
    }
    return {key: given for key, given in values.items() if key not in replaced} | later


def _without_overridden(values: Values) -> Values:
    """Drop a file's settings that a flag makes meaningless, because they would be rejected: the other LoRA settings if
    the command line has --lora.r 0, and settings of servers to start if it has --vllm.url.
    """
    lora = [key for key in values if key.startswith("lora.") or key in LORA_SETTINGS]
    for flag, value, keys in (("lora.r", "0", lora), ("vllm.url", None, [f"vllm.{name}" for name in LAUNCH_ONLY])):
        given = values.get(flag)
        if given is None or given.source is not None or (value is not None and given.words != (value,)):
            continue
        dropped = [key for key in values if key in keys and values[key].source is not None]
        if dropped:
            _log(f"--{flag} {' '.join(given.words)}: dropped {', '.join(dropped)} of {values[dropped[0]].source}")
        values = {key: value for key, value in values.items() if key not in dropped}
    return values


def _as_yaml(cfg: MethodConfig, values: Values) -> str:
    """Return what was set, without defaults, as YAML for --config."""
    tree = config_to_tree(cfg)
    chosen: dict[str, Any] = {}
    for key in values:
        block, dot, name = key.rpartition(".")
        if key not in PER_CALL and dot:
            chosen.setdefault(block, {})[name] = tree[block][name]
        elif key not in PER_CALL:
            chosen[key] = [spec_entry(spec) for spec in tree[key]] if key in REPEATABLE else tree[key]
    return to_yaml(chosen)


def _recipe_values(module: ModuleType, name: str, table: dict[str, Flag], given: Values) -> Values:
    """Read the tiny model's recipe, in trainer/recipes/ or next to a custom module; a mode may have its own."""
    stem = name.rpartition(".")[2]
    folder = RECIPES if name in method_names() else Path(getattr(module, "__file__", "")).parent
    recipe = folder / f"{stem}_tiny.yaml"
    if "mode" in given:
        mode_recipe = folder / f"{stem}_{given['mode'].words[0]}_tiny.yaml"
        recipe = mode_recipe if mode_recipe.is_file() else recipe
    if not recipe.is_file():
        return {}
    _log(f"no model given: settings not named elsewhere come from {_shown(recipe)}")
    tree = load_config(recipe)
    tree.pop("method", None)
    if "num_train_epochs" in given:
        tree.pop("max_steps", None)  # the recipe must not override a flag
    if "data" in given:
        for key in ("eval_data", "eval_steps"):  # the recipe's held-out rows do not fit other data
            tree.pop(key, None)
    return read_tree(tree, table, _shown(recipe))


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _started_again() -> bool:
    """Return whether torchrun has restarted the processes after one died."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _has_run_to_resume(argv: Sequence[str]) -> bool:
    """Return whether a run was started before the restart; otherwise the command starts from the beginning."""
    tree = _file_tree(argv)
    output_dir, method = (peek(argv, key) or tree.get(key) for key in ("output_dir", "method"))
    try:
        _latest_run(str(output_dir or RunConfig.output_dir), method)
    except ValueError:
        return False
    return True


# resume ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """A run to resume: its folder, the checkpoint ("latest" or a path) and its saved config."""

    run_dir: Path
    checkpoint: str
    saved: dict[str, Any]


def _resume_point(argv: Sequence[str], file_tree: dict[str, Any], method: str | None) -> ResumePoint | None:
    given = peek(argv, "resume") or file_tree.get("resume")
    if given in (None, "None"):
        return None
    output_dir = peek(argv, "output_dir") or file_tree.get("output_dir")
    if given != "latest":
        run_dir = _run_of(Path(str(given)))
        if output_dir is not None and "{" not in output_dir and Path(output_dir).resolve() != run_dir.resolve():
            raise UserError(f"--output-dir={output_dir}: cannot be changed when resuming {run_dir}; remove it")
        checkpoint = "latest" if run_dir.samefile(str(given)) else str(given)
    else:
        run_dir, checkpoint = _latest_run(str(output_dir or RunConfig.output_dir), method), "latest"
    saved = without_old_defaults(load_config(run_dir / "config.yaml"))
    if method is not None and saved.get("method") != method:
        raise UserError(
            f"--method={method}: the run in {run_dir} used {saved.get('method')}; remove --method to resume it"
        )
    if "method" not in saved:
        raise UserError(f"{run_dir}/config.yaml: names no method, so this is not the config of a run; name another run")
    return ResumePoint(run_dir, checkpoint, {**_as_launched(saved), "resume": None, "overwrite_output_dir": False})


def _check_working_folder(resume: ResumePoint, values: Values) -> None:
    """Raise if a relative path of the config exists only in the folder in which the run was started."""
    template = Path(str(resume.saved.get("output_dir", "/")))
    parents = resume.run_dir.resolve().parents
    depth = len(template.parts)
    if template.is_absolute() or ".." in template.parts or not 0 < depth <= len(parents):  # fewer: the run was moved
        return
    start = parents[depth - 1]
    for key, given in values.items():
        for word in given.words:
            path, module = word.partition(":")[0], ""
            if key in FUNCTIONS and not path.endswith(".py"):  # my_module.function
                module = path.rpartition(".")[0].replace(".", "/")
                path = f"{module}.py"
            is_path = "." in path or "/" in path or key == "model"
            is_gone = is_path and os.path.exists(start / path) and not os.path.exists(path)  # also takes long texts
            if is_gone and not (module and find_spec(module.split("/")[0])):
                raise UserError(
                    f"{key}={word}: not found in the working folder {Path.cwd()}, but in {start}, where the run was "
                    "started; resume the run from there"
                )


def _as_launched(saved: dict[str, Any]) -> dict[str, Any]:
    """Drop saved parallel settings that do not fit the number of processes."""
    parallel = saved.get("parallel")
    if not isinstance(parallel, dict):
        return saved
    world = world_size()

    def fits(name: str, value: Any) -> bool:
        return name not in ("shard", "context") or not isinstance(value, int) or value < 1 or world % value == 0

    kept = {} if world == 1 else {name: value for name, value in parallel.items() if fits(name, value)}
    return {**saved, "parallel": kept}


def _run_of(path: Path) -> Path:
    """Return the run folder of a path: the path itself, or the run that contains it as RUN/checkpoints/step-N."""
    if not path.exists():
        raise UserError(f"--resume={path}: no such folder; name a run folder or a checkpoint in it")
    for folder in (path.resolve(), *path.resolve().parents[:2]):
        if (folder / "config.yaml").is_file():
            return Path(_shown(folder))
    raise UserError(f"--resume={path}: not a run folder (no config.yaml) or a checkpoint in one")


def _latest_run(template: str, method: str | None) -> Path:
    """Return the run folder of a plain output_dir; if it contains {time}, the matching run written to last."""
    name = method.rpartition(".")[2] if method else None
    if "{time}" not in template:
        run_dir = Path(template.replace("{method}", name or "{method}"))
        if not (run_dir / "config.yaml").is_file():
            raise UserError(
                f"--resume: {run_dir} contains no run (no config.yaml); check --output-dir or start a new run"
            )
        return run_dir
    parent = Path(template).parent
    runs = []
    for config in parent.glob("*/config.yaml"):
        if method is None or load_config(config).get("method") == method:
            written = [path.stat().st_mtime_ns for path in (config, config.with_name("metrics.jsonl")) if path.exists()]
            runs.append((max(written), config.parent))
    if not runs:
        raise UserError(f"--resume: no earlier {f'{method} ' if method else ''}run in {parent}; name its folder")
    return max(runs)[1]


# argv ------------------------------------------------------------------------------------------------------------


def _check_first_word(argv: Sequence[str]) -> None:
    """Reject `trl dpo` and `axolotl train run.yaml` forms, naming the flag to write."""
    word = argv[0] if argv and not looks_like_flag(argv[0]) else ""
    if word.endswith((".yaml", ".yml")):
        raise UserError(f"{word}: write --config {word}")
    if word in method_names():
        raise UserError(f"{word}: write --method {word}")


def _spell_out_resume(argv: Sequence[str]) -> list[str]:
    """A bare --resume means the latest checkpoint; tyro has no flag with an optional value."""
    argv = list(argv)
    for i, word in enumerate(argv):
        if word == "--resume" and (i + 1 == len(argv) or looks_like_flag(argv[i + 1])):
            argv[i] = "--resume=latest"
    return argv


def peek(argv: Sequence[str], key: str) -> str | None:
    """Return the last value of one flag, before the flag table is known."""
    value = None
    for i, word in enumerate(argv):
        name, attached, inline = word.partition("=")
        if name.replace("_", "-") != f"--{key.replace('_', '-')}":
            continue
        value = inline if attached else next((w for w in argv[i + 1 : i + 2] if not looks_like_flag(w)), "")
        if not value:
            raise UserError(f"{name}: needs a value")
    return value
