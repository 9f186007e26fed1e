"""Train from Python, with objects instead of files and flags.

    from trainer import train

    run = train("grpo", model="Qwen/Qwen3-0.6B", data=rows, reward_funcs=[short], lora_r=16, max_steps=50)
    run.metrics, run.model, run.tokenizer
    run.generate("Why is the sky blue?")
    run.save("my_model")

Keywords are the flags of `python -m trainer`, with _ for - and for the dot of a block (lora_r), and the same checks.
docs/python.md describes objects, callbacks and TRL's arguments.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from data.command.config_file import load_config
from data.errors import UserError
from data.sources import without_fillers
from data.types import Messages
from data.user_code import PYTHON, PythonObject, import_name
from trainer.cli import load_method, parse_settings
from trainer.config.blocks import MethodConfig
from trainer.config.old_flags import without_old_defaults
from trainer.parallel.ranks import world_size

if TYPE_CHECKING:
    from trainer.policy.logps import Policy

SOURCE = "train()"  # in messages, where a file would be named
DATA = ("data", "eval_data")
LISTS = ("reward_funcs", "tools", "callbacks")  # one object instead of a list is a list of one, as in TRL
AS_THEY_ARE = ("reward_funcs", "loss_type", "advantage_estimator")  # settings that take functions as objects
THEIR_NAMES = {"train_dataset": "data", "eval_dataset": "eval_data", "processing_class": "tokenizer"}  # TRL's
PEFT = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules",
        "modules_to_save": "modules_to_save", "use_rslora": "rslora", "use_dora": "dora"}  # fmt: skip
NO_EFFECT = ("task_type", "peft_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
             "peft_version", "runtime_config")  # fields of peft's config  # fmt: skip


def train(
    method: str | type[MethodConfig] | MethodConfig | None = None,
    *,
    args: Any = None,
    peft_config: Any = None,
    config: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Train, and return the finished run.

    `method`: a name such as "grpo" or a Config class, with `settings`; or a Config alone. `model`: a hub id, a folder,
    or a loaded transformers or peft model, which is trained in place. `data` and `eval_data`: as on the command line,
    or rows (a list of dicts, a datasets.Dataset, a data frame, any iterable). `config`: a YAML file, which keywords
    override. `args`, `peft_config`, `train_dataset`, `eval_dataset` and `processing_class`: as in TRL's trainers.
    """
    if isinstance(method, MethodConfig):
        given = {**settings, "args": args, "peft_config": peft_config, "config": config}
        if extra := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{extra[0]}: not allowed with a Config; set it in the Config, or pass the method's name")
        return _run(sys.modules[type(method).__module__], _with_objects(method))
    for theirs, ours in THEIR_NAMES.items():
        if (value := settings.pop(theirs, None)) is not None:
            if settings.get(ours) is not None:
                raise UserError(f"{theirs}: means the same as {ours}; pass only one of them")
            settings[ours] = value
    name = method.__module__.removeprefix("trainer.methods.") if isinstance(method, type) else method
    layers: list[tuple[Mapping[str, Any], str]] = []
    if args is not None:
        layers.append((_trl_settings(args, name, held_out=settings.get("eval_data") is not None), "args"))
    if config is not None:
        layers.append((without_old_defaults(load_config(Path(config))), str(config)))
    name = name or next((str(tree["method"]) for tree, _ in layers[::-1] if "method" in tree), None)
    if name is None:
        raise UserError('train(): needs a method; pass it first, as in train("grpo", ...)')
    plain, objects = _split(settings)
    if "model" in objects and hasattr(objects["model"].value, "peft_config"):
        if peft_config is not None:
            raise UserError("peft_config: the model has an adapter already; remove one of the two")
        peft_config = objects["model"].value.peft_config.get("default")
    if peft_config is not None:
        layers.append(({"lora": _lora_settings(peft_config)}, "peft_config"))
    module = sys.modules[method.__module__] if isinstance(method, type) else load_method(name)
    chosen = method if isinstance(method, type) else module.Config
    return _run(module, parse_settings(module, chosen, name, [*layers, (plain, SOURCE)], objects))


# objects ---------------------------------------------------------------------------------------------------------


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that are plain data, as a YAML file has them, and the objects by key."""
    plain: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, value in settings.items():
        is_one = name in LISTS and value is not None and not isinstance(value, (list, tuple, set, str))
        value = _named(name, [value] if is_one else value)
        items = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, PythonObject) or callable(item) for item in items):
            objects[name] = value
        else:
            plain[name] = list(value) if isinstance(value, tuple) else value
    return plain, objects


def _named(name: str, value: Any) -> Any:
    """Return the value of a setting as a Config stores it: lists as tuples, models, rows and functions with a name."""
    if name in DATA and value is not None:
        return _sources(value, name)
    if name in ("model", "tokenizer") and value is not None and not isinstance(value, (str, Path)):
        if name == "model" and not hasattr(value, "config"):
            raise UserError(f"model: must be an id, a folder or a transformers model, not {type(value).__name__}")
        return PythonObject(f"{PYTHON}:{_name_of(value)}", value)
    if isinstance(value, (list, tuple, set)):
        return tuple(_named(name, item) for item in value)
    if (callable(value) and name not in AS_THEY_ARE) or (name == "callbacks" and not isinstance(value, str)):
        return PythonObject(import_name(value), value)
    return str(value) if isinstance(value, Path) else value


def _name_of(given: Any) -> str:
    """Return the id or folder that a model or tokenizer was loaded from, or the name of its class."""
    name = str(getattr(given, "name_or_path", "") or "")
    is_gone = Path(name).is_absolute() and not Path(name).is_dir()
    return name if name and not is_gone else type(given).__name__


def _sources(value: Any, name: str) -> tuple[str, ...]:
    """Return the sources of rows: paths, and rows from Python."""
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], Mapping):
        return tuple(_source(item, name if len(value) == 1 else f"{name}_{i}") for i, item in enumerate(value, 1))
    return (_source(value, name),)


def _source(value: Any, name: str) -> str:
    if isinstance(value, (str, Path)):
        return value if isinstance(value, str) else str(value)
    if isinstance(value, Mapping):  # a DatasetDict, or one row
        first = next(iter(value), "train")
        raise UserError(f"{name}: a {type(value).__name__} with {', '.join(map(str, value))}; pass a list of rows, or "
                        f"one split, as {name}=dataset[{first!r}]")  # fmt: skip
    if not isinstance(value, Iterable):
        raise UserError(f"{name}: must be a path, a list of dicts or a dataset, not {type(value).__name__}")
    if hasattr(value, "columns") and hasattr(value, "to_dict"):  # a data frame
        value = value.to_dict("records")
    if not (hasattr(value, "features") and hasattr(value, "__len__")):  # a Dataset reads rows from its files
        value = [without_fillers(row) if hasattr(value, "features") else row for row in value]
    return PythonObject(f"{PYTHON}:{name}", value)


def _with_objects(cfg: MethodConfig) -> MethodConfig:
    """Return the Config with its objects named."""
    data = {name: _named(name, value) for name in DATA if (value := getattr(cfg.data, name))}
    model = {name: _named(name, getattr(cfg.model, name)) for name in ("model", "tokenizer")}
    run = replace(cfg.run, callbacks=_named("callbacks", cfg.run.callbacks))
    return replace(cfg, model=replace(cfg.model, **model), data=replace(cfg.data, **data), run=run)


# TRL and peft ----------------------------------------------------------------------------------------------------


def _trl_settings(args: Any, method: str | None, *, held_out: bool) -> dict[str, Any]:
    """Translate a TRL config, as trainer.from_trl does; print the fields without effect or equivalent."""
    from trainer.translate.trl import translate
    from trainer.translate.trl_kinds import KINDS, kind_of_class

    kind = next((kind for kind, entry in KINDS.items() if entry.method == method), None)
    if isinstance(args, Mapping):
        theirs = dict(args)
        kind = kind_of_class(str(theirs["config_class"])) if "config_class" in theirs else kind
    else:
        names = [base.__name__ for base in type(args).__mro__]
        kind = kind_of_class(next((name for name in names if any(name == k.config for k in KINDS.values())), names[0]))
        changed = args.to_dict() if hasattr(args, "to_dict") else vars(args)
        theirs = {name: value for name, value in changed.items() if not _is_default(args, name, value)}
    if kind is None:
        raise UserError('args: pass the method first, as in train("grpo", args=...)')
    made, without = translate(theirs, kind, held_out=held_out, ranks=world_size())
    for line in [*made.remarks(), *(f"no equivalent: {line}" for line in without)]:
        print(f"args: {line}", file=sys.stderr)
    if method is not None and made.tree["method"] != method:
        raise UserError(f"args: a {type(args).__name__} is for method {made.tree['method']}, not {method}")
    return made.tree


def _is_default(args: Any, name: str, value: Any) -> bool:
    """Return whether a field has its default: translate() knows TRL's defaults, and lists only what was set."""
    known = {field.name: field.default for field in fields(args)} if is_dataclass(args) else {}
    return name in known and known[name] == value


def _lora_settings(theirs: Any) -> dict[str, Any]:
    """Convert peft's LoraConfig to strop's settings."""
    if not hasattr(theirs, "r"):
        raise UserError(f"peft_config: {type(theirs).__name__} is not supported; pass a LoraConfig")
    default = vars(type(theirs)())
    for name, value in vars(theirs).items():
        if name not in PEFT and name not in NO_EFFECT and value != default.get(name) and value:
            raise UserError(f"peft_config: {name}={value} is not supported; remove it")
    chosen = {ours: getattr(theirs, name) for name, ours in PEFT.items()}
    chosen |= {name: sorted(value) for name, value in chosen.items() if isinstance(value, (set, list, tuple))}
    return {name: value for name, value in chosen.items() if value is not None}


# the run ---------------------------------------------------------------------------------------------------------


def _run(module: ModuleType, cfg: MethodConfig) -> Run:
    from trainer.parallel.comm import process_group
    from trainer.plan import blocks_to_recompute, is_out_of_memory, out_of_memory
    from trainer.policy.load import recomputing, release
    from trainer.run.stop import end_on_sigterm
    from trainer.run.training import OPENED, Training

    if getattr(module, "train", train) is train:
        raise UserError(f"{module.__name__}: does not define train(cfg); define it, and call trainer.train(...)")
    opened: list[Training] = []
    token = OPENED.set(opened)
    try:
        with (
            _settings_restored(),
            end_on_sigterm() as stop,
            process_group(cfg.parallel.timeout_s, cfg.parallel.context),
        ):
            stop.grace_s = cfg.run.stop_grace_s
            with recomputing(blocks_to_recompute(cfg)):
                module.train(cfg)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory(error, cfg)) from error
    finally:
        OPENED.reset(token)
        for training in opened:
            release(training.policy)
    if not opened:
        raise UserError(f"{cfg.run.method}: its train(cfg) created no Training; call it directly")
    return Run(opened[-1].run.dir, opened[-1].policy, opened[-1].cfg)


@contextlib.contextmanager
def _settings_restored() -> Iterator[None]:
    """Restore the random generators and settings of the process that a run changes."""
    import numpy as np
    import torch
    from transformers.utils import logging

    state, state_of_numpy, shown = random.getstate(), np.random.get_state(), logging.is_progress_bar_enabled()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # as in trainer/__main__.py
            yield
    finally:
        random.setstate(state)
        np.random.set_state(state_of_numpy)
        if shown:
            logging.enable_progress_bar()


class Run:
    """A finished run: its folder `dir`, `config`, `model`, `tokenizer` and `metrics`."""

    def __init__(self, folder: Path, policy: Policy, config: MethodConfig) -> None:
        self.dir, self.config, self._policy = folder, config, policy
        self._chat: dict[tuple[Any, ...], Any] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    @property
    def model(self) -> Any:
        """The trained transformers model, or peft's wrapper around it, on the device of the run."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        return self._policy.tokenizer

    @property
    def metrics(self) -> Any:
        """metrics.jsonl: a pandas.DataFrame if pandas is installed, otherwise a list of dicts."""
        from trainer.metrics.metrics import read_jsonl

        rows = read_jsonl(self.dir / "metrics.jsonl")
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def generate(self, prompts: str | Messages | Sequence[str | Messages], *, seed: int = 0, **options: Any) -> Any:
        """Answer a prompt (text or messages) with the trained model, or each prompt of a list.

        `options` are those of python -m trainer.generate: max_tokens, temperature, top_p, system_prompt, plain.
        """
        from trainer.generate import ChatModel, GenerateConfig

        known = [field.name for field in fields(GenerateConfig) if field.name not in ("source", "prompt")]
        for name in options:
            if name not in known:
                raise UserError(f"generate(): {name}: unknown option; use one of {', '.join(known)}")
        key = tuple(sorted(options.items()))
        if key not in self._chat:
            cfg = GenerateConfig(source=str(self.dir), **options)
            self._chat = {key: ChatModel(cfg, (self.model, self.tokenizer))}
        chat = self._chat[key]
        is_one = isinstance(prompts, str) or _are_messages(prompts)
        listed: list[Any] = [prompts] if is_one or not isinstance(prompts, Iterable) else list(prompts)
        if not all(isinstance(p, str) or _are_messages(p) for p in listed):
            raise UserError("generate(): prompts must be a text, messages, or a list of these; for a dataset, pass "
                            'dataset["prompt"]')  # fmt: skip
        messages = [([], prompt) if isinstance(prompt, str) else (prompt[:-1], prompt[-1]["content"])
                    for prompt in listed]  # fmt: skip
        answers = [chat.answer(line, list(before), seed + i) for i, (before, line) in enumerate(messages)]
        return answers[0] if is_one else answers

    def save(self, folder: str | Path, *, merge_lora: bool = False) -> Path:
        """Write the model and its tokenizer to a folder: the adapter of a LoRA run, unless `merge_lora`.

        A model in the folder is replaced.
        """
        from trainer.run.export import export_model

        folder, policy = Path(folder).expanduser(), self._policy
        is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
        if folder.exists() and not is_model and (folder.is_file() or any(folder.iterdir())):
            raise UserError(f"save(): {folder}: exists and is not a model folder; choose another name")
        export_model(policy.model, policy.tokenizer, folder, merge_lora=merge_lora, base=policy.source,
                     revision=policy.revision)  # fmt: skip
        return folder

    def push(self, repo: str, **options: Any) -> None:
        """Upload the model to the hub; `options` are those of python -m trainer.push: private, base_model, license."""
        from trainer.push import PushConfig, push

        push(PushConfig(run=str(self.dir), repo=repo, **options))


def _are_messages(prompt: Any) -> bool:
    is_list = isinstance(prompt, (list, tuple)) and bool(prompt)
    return is_list and all(isinstance(message, Mapping) and "content" in message for message in prompt)
