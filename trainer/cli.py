"""Turn argv, and an optional YAML file, into one frozen config.

    python -m trainer --method grpo --learning-rate 3e-6
    python -m trainer --config runs/dev/config.yaml --max-steps 10
    python -m trainer --config axolotl.yml --dry-run        # an axolotl config, translated, and printed as ours
    python -m trainer --resume

Later wins: dataclass default (learning_rate: the method's for full weights or for LoRA) < tiny recipe (only if nothing
names a model) < saved config of the run being resumed < --config < flag. The method is read first, because it decides
which flags exist. --dry-run prints what the file and the flags set, as YAML for --config, and ends.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from data.command.config_file import PER_CALL, load_config, to_yaml
from data.command.flags import (
    CONFIG,
    HELP,
    REPEATABLE,
    Flag,
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
from data.sources import spec_entry
from data.user_code import import_beside, is_missing
from strop_names import NAMES, module_file
from trainer.config.blocks import RunConfig
from trainer.config.learning_rates import rates_of
from trainer.parallel.ranks import world_size
from trainer.translate.axolotl import is_axolotl, translate

DRY_RUN = "--dry-run"
# Two settings of one thing: either takes the place of both in a layer below.
INSTEAD = (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch"), ("warmup_steps", "warmup_ratio"),
           ("eval_data", "val_set_size"))  # fmt: skip
# Settings of adapters outside the block lora.
OF_LORA = ("merge_lora", "vllm_lora_sync", "load_in_4bit")
METHODS = Path(__file__).parent / "methods"
RECIPES = Path(__file__).parent / "recipes"
# Flags that exclude another one, which a recipe may set.
EXCLUSIVE = {"val_set_size": "eval_data", "warmup_steps": "warmup_ratio", "saves_per_epoch": "save_steps",
             "evals_per_epoch": "eval_steps"}  # fmt: skip
# The flags of ours that --help shows; of a module of the user's it shows all. --help-all shows all of both.
COMMON = """
    method model dtype gradient_checkpointing load_in_4bit chat_template system_prompt data data_format eval_data
    output_dir resume max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps
    max_tokens_per_micro_batch seed save_steps eval_steps report_to learning_rate lr_scheduler_type warmup_ratio
    lora.r lora.alpha parallel.mode max_length max_prompt_length bad_rows ref loss_type beta label_smoothing rpo_alpha
    desirable_weight undesirable_weight orpo_alpha cpo_alpha simpo_gamma center_rewards_coefficient step_separator
    train_on_last_step_only num_generations max_completion_length temperature rollout.engine
    vllm.url reward_funcs reward_weights tools scale_rewards epsilon
    mode feature_layers ce_coef stride generate_max_len n_samples_per_prompt
    teacher teacher_url teacher_prompt jsd_beta judge value_model gae_lambda critic_learning_rate
""".split()


def parse(argv: Sequence[str]) -> tuple[ModuleType, Any, str]:
    """Return (method module, its Config, the method as the user named it); SystemExit(0) after a listing or help."""
    argv = _spell_out_resume(argv)
    _check_first_word(argv)
    if _started_again() and _peek(argv, "resume") is None and _has_run_to_resume(argv):
        argv = [*argv, "--resume=latest"]
    is_dry_run, argv = DRY_RUN in argv, [word for word in argv if word != DRY_RUN]
    config_file = _peek(argv, "config")
    file_tree = _file_tree(argv, tell=True)
    wants_help = any(word in HELP for word in argv)
    name = _peek(argv, "method") or file_tree.get("method")
    resume = None if wants_help else _resume_point(argv, file_tree, name)
    if name is None and resume is not None:
        name = resume.saved["method"]
    if name is None:
        name = file_tree.get("rl")  # axolotl's: read_tree refuses it, together with the file's other unknown keys
    if name is None:
        if "model_name_or_path" in file_tree:
            raise UserError(
                f"{config_file}: is a config of TRL; python -m trainer.from_trl {config_file} prints it in our terms"
            )
        if any(word not in HELP for word in argv):
            raise UserError(f"--method: missing; pass one of {', '.join(method_names())} or a dotted module of yours")
        print(method_listing())
        raise SystemExit(0)

    module = load_method(str(name))
    table = flag_table(module.Config)
    if "method" not in table or "resume" not in table:
        raise UserError(f"--method={name}: its Config has no run block; add the field run: Flat[RunConfig]")
    prog = f"python -m trainer --method {name}"
    if wants_help:
        show_help(module.Config, table, prog, show_all="--help-all" in argv)

    values: Values = {}
    if resume is not None:
        values |= read_tree(resume.saved, table, str(resume.run_dir / "config.yaml"))
    values = _over(values, read_tree(file_tree, table, str(config_file)))
    values = _over(values, read_argv(argv, table | CONFIG))
    values.pop("config", None)
    if "model" not in values:
        values = _recipe_values(module, str(name), table, values) | values
    values |= read_tree({"method": str(name)}, table, "--method")
    if resume is None:
        values = _without_adapters(values)
    if resume is not None:
        if values["overwrite_output_dir"].words == ("True",):
            raise UserError("--overwrite-output-dir: would delete the run to resume; leave out one of the two")
        values |= read_tree({"output_dir": str(resume.run_dir), "resume": resume.checkpoint}, table, "--resume")
    cfg = build(module.Config, values, table, prog)
    if is_dry_run:
        print(_as_yaml(cfg, values), end="")
        raise SystemExit(0)
    return module, cfg if "learning_rate" in values else _with_learning_rate(cfg), str(name)


# methods ---------------------------------------------------------------------------------------------------------


def method_names() -> list[str]:
    """Every file in trainer/methods/ is a method; there is no registry to edit."""
    return sorted(path.stem for path in METHODS.glob("*.py") if not path.stem.startswith("_"))


def method_summary(name: str) -> str:
    """First line of the method's Config docstring, read without importing torch."""
    tree = ast.parse((METHODS / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


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
            "A method of your own: --method my_algo or my_pkg.my_algo (a module with Config and train).",
            "With no other flag a method runs on the built-in tiny model.",
        ]
    )


def load_method(name: str) -> ModuleType:
    """Import a built-in method by file name, or the user's own module, found from the working directory."""
    if name in method_names():
        return importlib.import_module(f"trainer.methods.{name}")
    if name == "__main__":
        raise UserError(
            "--method=__main__: the run's method is in the script that started it; resume it from there, with "
            "RunConfig(resume=FOLDER)"
        )
    if name.endswith(".py"):
        raise UserError(f"--method={name}: name the module, without .py: --method {Path(name).stem}")
    if "." not in name and module_file(Path.cwd(), name) is None:
        hint = method_hint(name, method_names())
        raise UserError(f"--method={name}: unknown method; {hint} (your own: a file here, or a dotted module path)")
    try:
        module = import_beside(name)
    except ModuleNotFoundError as error:
        if not is_missing(name, error):
            raise  # the module exists, but something it imports does not
        raise UserError(f"--method={name}: no module {error.name} here or installed; {_own_hint(name)}") from None
    except TypeError as error:
        if "frozen" not in str(error):
            raise
        raise UserError(f"--method={name}: its Config must be a @dataclass(frozen=True, kw_only=True)") from None
    for part in ("Config", "train"):
        if not hasattr(module, part):
            raise UserError(f"--method={name}: has no {part}; a method is a module with Config and train(cfg)")
    return module


def _own_hint(name: str) -> str:
    hint = method_hint(name, method_names())
    return hint if hint.startswith("did you") else "run from the folder that holds it, or install it"


def show_help(config: type, table: dict[str, Flag], prog: str, *, show_all: bool) -> NoReturn:
    """The flags by block, then SystemExit(0)."""
    note = "--config FILE.yaml gives the same keys from a file; flags win over it."
    if show_all:
        print_help(config, prog, note)
    theirs = {key for key, flag in table.items() if flag.module.partition(".")[0] not in NAMES}
    shown = (theirs | {*COMMON} - {*getattr(config, "refused", ())}) & table.keys()
    note = f"{len(shown)} of {len(table)} flags; --help-all shows all. {note}"
    print_help(config, prog, note, shown.__contains__)


# layers ----------------------------------------------------------------------------------------------------------


def _file_tree(argv: Sequence[str], *, tell: bool = False) -> dict[str, Any]:
    """The settings of --config in our terms; `tell`: of another library's file, say what has no effect here."""
    config_file = _peek(argv, "config")
    tree = load_config(Path(config_file)) if config_file else {}
    if not is_axolotl(tree):
        return _as_now(tree)
    try:
        names = {"method": "method", "engine": "rollout.engine", "max_steps": "max_steps"}
        made = translate(tree, **{name: _peek(argv, key) for name, key in names.items()})
    except ValueError as error:
        raise UserError(f"{config_file}: {error}") from None
    for variable, value in made.environment.items():
        os.environ.setdefault(variable, value)
    if tell and os.environ.get("RANK", "0") == "0":
        print(f"{config_file}: an axolotl config, translated; --dry-run prints the result", file=sys.stderr)
        for line in made.remarks():
            print(f"{config_file}: {line}", file=sys.stderr)
    return made.tree


def _over(values: Values, later: Values) -> Values:
    """Both layers, of which the later wins."""
    replaced = {other for pair in INSTEAD for one, other in (pair, pair[::-1]) if one in later and other not in later}
    return {key: given for key, given in values.items() if key not in replaced} | later


def _without_adapters(values: Values) -> Values:
    """With --lora.r 0 on the command line a file's other settings of adapters would be refused: leave them out."""
    rank = values.get("lora.r")
    if rank is None or rank.source is not None or rank.words != ("0",):
        return values
    dropped = [key for key, given in values.items()
               if given.source is not None and (key.startswith("lora.") or key in OF_LORA)]  # fmt: skip
    if dropped and os.environ.get("RANK", "0") == "0":
        print(f"--lora.r 0: {', '.join(dropped)} of {values[dropped[0]].source} left out", file=sys.stderr)
    return {key: given for key, given in values.items() if key not in dropped}


def _as_yaml(cfg: Any, values: Values) -> str:
    """What was set, not the defaults, as --config reads it."""
    tree, chosen = config_to_tree(cfg), {}
    for key in values:
        block, dot, name = key.rpartition(".")
        if key not in PER_CALL and dot:
            chosen.setdefault(block, {})[name] = tree[block][name]
        elif key not in PER_CALL:
            chosen[key] = [spec_entry(spec) for spec in tree[key]] if key in REPEATABLE else tree[key]
    return to_yaml(chosen)


def _recipe_values(module: ModuleType, name: str, table: dict[str, Any], given: Values) -> Values:
    """The recipe of the tiny model: in trainer/recipes/, or beside the user's module; a mode may have its own."""
    stem = name.rpartition(".")[2]
    folder = RECIPES if name in method_names() else Path(str(module.__file__)).parent
    recipe = folder / f"{stem}_tiny.yaml"
    if "mode" in given:
        of_mode = folder / f"{stem}_{given['mode'].words[0]}_tiny.yaml"
        recipe = of_mode if of_mode.is_file() else recipe
    if not recipe.is_file():
        return {}
    if os.environ.get("RANK", "0") == "0":
        print(f"no model given: settings not named elsewhere come from {_shown(recipe)}", file=sys.stderr)
    tree = load_config(recipe)
    tree.pop("method", None)
    if "num_train_epochs" in given:
        tree.pop("max_steps", None)  # else the recipe would override a flag
    if "data" in given:
        for key in ("eval_data", "eval_steps"):  # the recipe's held-out rows do not fit other data
            tree.pop(key, None)
    for key, instead in EXCLUSIVE.items():
        if key in given:
            tree.pop(instead, None)
    return read_tree(tree, table, _shown(recipe))


def _with_learning_rate(cfg: Any) -> Any:
    """The one default that depends on another flag: adapters take a higher rate. It is saved like any other value."""
    rates = rates_of(type(cfg))
    if rates is None or cfg.lora.r == 0:
        return cfg
    return replace(cfg, optim=replace(cfg.optim, learning_rate=rates.lora))


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _started_again() -> bool:
    """Whether torchrun has restarted the processes after one died."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _has_run_to_resume(argv: Sequence[str]) -> bool:
    """Whether a run was started before the restart; if not, the command starts from the beginning."""
    tree = _file_tree(argv)
    output_dir, method = (_peek(argv, key) or tree.get(key) for key in ("output_dir", "method"))
    try:
        _latest_run(str(output_dir or RunConfig.output_dir), method)
    except ValueError:
        return False
    return True


# resume ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """A run to continue: its folder, the checkpoint asked for ("latest" or a path) and its saved config."""

    run_dir: Path
    checkpoint: str
    saved: dict[str, Any]


def _resume_point(argv: Sequence[str], file_tree: dict[str, Any], method: str | None) -> ResumePoint | None:
    given = _peek(argv, "resume") or file_tree.get("resume")
    if given in (None, "None"):
        return None
    output_dir = _peek(argv, "output_dir") or file_tree.get("output_dir")
    if given != "latest":
        run_dir = _run_of(Path(str(given)))
        if output_dir is not None and "{" not in output_dir and Path(output_dir).resolve() != run_dir.resolve():
            raise UserError(
                f"--output-dir={output_dir}: the run to resume is in {run_dir} and stays there; leave it out"
            )
        checkpoint = "latest" if run_dir.samefile(str(given)) else str(given)
    else:
        run_dir, checkpoint = _latest_run(str(output_dir or RunConfig.output_dir), method), "latest"
    saved = _as_now(load_config(run_dir / "config.yaml"))
    if method is not None and saved.get("method") != method:
        raise UserError(f"--method={method}: the run in {run_dir} used {saved.get('method')}; leave it out to resume")
    if "method" not in saved:
        raise UserError(f"{run_dir}/config.yaml: names no method, so it is not the config of a run; name another run")
    return ResumePoint(run_dir, checkpoint, {**_as_launched(saved), "resume": None, "overwrite_output_dir": False})


def _as_now(tree: dict[str, Any]) -> dict[str, Any]:
    """Drop defaults of before from the config.yaml of an older run, if they are refused as settings now.

    Such a file has rollout.max_batch_size=256, also where no local engine samples, and no rollout.cache_gib.
    """
    rollout, is_strided = tree.get("rollout"), tree.get("mode") == "strided"
    if not isinstance(rollout, dict) or "cache_gib" in rollout:
        return tree
    old = {"max_batch_size": 256} if is_strided or rollout.get("engine") == "vllm" else {}
    old |= {"engine": "local"} if is_strided else {}
    return {**tree, "rollout": {name: value for name, value in rollout.items() if old.get(name) != value}}


def _as_launched(saved: dict[str, Any]) -> dict[str, Any]:
    """Drop saved parallel settings that do not fit the present number of processes."""
    parallel = saved.get("parallel")
    if not isinstance(parallel, dict):
        return saved
    world = world_size()

    def fits(name: str, value: Any) -> bool:
        return name not in ("shard", "context") or not isinstance(value, int) or value < 1 or world % value == 0

    kept = {} if world == 1 else {name: value for name, value in parallel.items() if fits(name, value)}
    return {**saved, "parallel": kept}


def _run_of(path: Path) -> Path:
    """The run folder that `path` is, or that holds it as RUN/checkpoints/step-N."""
    if not path.exists():
        raise UserError(f"--resume={path}: no such folder; name a run folder or a checkpoint in it")
    for folder in (path.resolve(), *path.resolve().parents[:2]):
        if (folder / "config.yaml").is_file():
            return Path(_shown(folder))
    raise UserError(f"--resume={path}: not a run folder (no config.yaml) nor a checkpoint in one")


def _latest_run(template: str, method: str | None) -> Path:
    """The run folder of a plain output_dir; if it contains {time}, the matching run written to last."""
    name = method.rpartition(".")[2] if method else None
    if "{time}" not in template:
        run_dir = Path(template.replace("{method}", name or "{method}"))
        if not (run_dir / "config.yaml").is_file():
            raise UserError(f"--resume: {run_dir} holds no run (no config.yaml); check --output-dir or start a new run")
        return run_dir
    parent = Path(template).parent
    found = []
    for config in parent.glob("*/config.yaml"):
        if method is None or load_config(config).get("method") == method:
            written = [path.stat().st_mtime_ns for path in (config, config.with_name("metrics.jsonl")) if path.exists()]
            found.append((max(written), config.parent))
    if not found:
        raise UserError(f"--resume: no earlier {f'{method} ' if method else ''}run in {parent}; name its folder")
    return max(found)[1]


# argv ------------------------------------------------------------------------------------------------------------


def _check_first_word(argv: Sequence[str]) -> None:
    """Refuse `trl dpo` and `axolotl train run.yaml` forms with the flag to write."""
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


def _peek(argv: Sequence[str], key: str) -> str | None:
    """The last value of one flag, before the flag table is known."""
    value = None
    for i, word in enumerate(argv):
        name, attached, inline = word.partition("=")
        if name.replace("_", "-") != f"--{key.replace('_', '-')}":
            continue
        value = inline if attached else next((w for w in argv[i + 1 : i + 2] if not looks_like_flag(w)), "")
        if not value:
            raise UserError(f"{name}: needs a value")
    return value
