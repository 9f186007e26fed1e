"""Resolve a --model value to a folder or hub id, and check its files; shared by the trainer and its servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.hub import check_hub, is_path
from data.limits import input_limit
from data.user_code import refuse_python_object

TINY = Path(__file__).resolve().parents[1] / "trainer" / "tiny"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
JSON_FILES = ("adapter_config.json", "config.json", INDEX, "generation_config.json", "tokenizer_config.json",
              "special_tokens_map.json")  # fmt: skip
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
PATTERN_S = "STROP_MAX_PATTERN_S"
BUILTIN = {"builtin:tiny": TINY, "builtin:tiny_teacher": TINY / "teacher"}


def resolve_model(name: str) -> str:
    """Return the hub id, or the folder with weights or an adapter, of a --model value."""
    if name in BUILTIN:
        return str(BUILTIN[name])
    refuse_python_object(name, "model")
    if name.startswith("builtin:"):
        raise UserError(f"model={name}: unknown built-in model; use one of {', '.join(BUILTIN)}")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if is_path(name):
            raise UserError(f"model={name}: no such folder; pass a hub id, a model folder or a finished run folder")
        return name
    if (folder / "shards.json").exists():
        raise UserError(f"model={name}: a sharded checkpoint; convert it with python -m trainer.export {name} OUT")
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
        return str(folder)
    if (folder / "final").is_dir():
        return str(folder / "final")
    if (folder / "metrics.jsonl").exists() or (folder / "config.yaml").exists():
        raise UserError(f"model={name}: this run has not finished (no final/); finish it with --resume {name}")
    raise UserError(f"model={name}: contains neither config.json nor adapter_config.json nor a finished run")


def find_base(path: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the folder or hub id of a resolved model's base weights, and their revision; an adapter names both."""
    if revision is not None and Path(path).is_dir():
        raise UserError(f"revision={revision}: has no effect on a local folder (model={path}); remove --revision")
    if not (Path(path) / "adapter_config.json").exists():
        return path, revision
    settings = read_adapter(path)
    return resolve_model(settings["base_model_name_or_path"]), settings.get("revision")


def find_tokenizer(name: str) -> str:
    """Return the hub id or the absolute folder of a --tokenizer value; of a finished run, its final/."""
    refuse_python_object(name, "tokenizer")
    folder = Path(BUILTIN.get(name, name)).expanduser()
    folder = folder / "final" if (folder / "final").is_dir() else folder
    if folder.is_dir():
        return str(folder.resolve())
    check_hub("tokenizer", name)
    return name


def read_adapter(folder: str) -> dict[str, Any]:
    """Return the settings of a saved LoRA adapter."""
    settings = _read_json(folder, Path(folder) / "adapter_config.json")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"model={folder}: adapter_config.json is not a LoRA adapter's; only LoRA is supported")
    if not isinstance(settings.get("base_model_name_or_path"), str) or not settings["base_model_name_or_path"]:
        raise UserError(f"model={folder}: adapter_config.json lacks base_model_name_or_path (text); add it")
    if settings.get("megatron_config"):
        raise UserError(
            f"model={folder}: adapter_config.json sets megatron_config, for which peft would import a package "
            "megatron, even from the working folder; remove it"
        )
    return settings


def _read_json(model: str, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model={model}: {file.name} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"model={model}: {file.name} must contain a JSON object, not {type(value).__name__}")
    return value


def check_patterns(folder: str, names: Iterable[str]) -> None:
    """Raise if the patterns of an adapter take too long on these module names.

    A regular expression cannot be interrupted in this process, so another one tries them, with a limit on CPU time.
    """
    settings = read_adapter(folder)
    values = [settings.get(key) for key in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern",
                                            "alpha_pattern", "modules_to_save")]  # fmt: skip
    lists = [[value] if isinstance(value, str) else value for value in values if isinstance(value, (str, list, dict))]
    patterns = [text for texts in lists for text in texts if isinstance(text, str) and re.search(r"[^\w.]", text)]
    if not patterns:
        return
    seconds = input_limit(PATTERN_S)
    code = (
        "import json, re, signal, sys\n"
        f"signal.setitimer(signal.ITIMER_PROF, {seconds})\n"  # CPU time; the signal ends the process
        "patterns, names = json.load(sys.stdin)\n"
        "for text in patterns:\n"
        "    for form in (f'({text})$', f'(.*[.])?({text})($|[.].*)'):\n"  # as peft extends them
        "        [re.match(form, name) for name in names]\n"
    )
    job = subprocess.run(
        [sys.executable, "-ISc", code], input=json.dumps([patterns, list(names)]), text=True, capture_output=True
    )
    if job.returncode < 0:  # killed; peft reports an invalid pattern
        raise UserError(
            f"model={folder}: adapter_config.json: the patterns {', '.join(map(repr, patterns))} take longer than "
            f"{seconds:g} s; simplify them, or set {PATTERN_S}"
        )


def check_adapter_weights(folder: str) -> None:
    """Raise for an adapter without safetensors: peft would fall back to adapter_model.bin, which is a pickle."""
    if not (Path(folder) / "adapter_model.safetensors").is_file():
        raise UserError(
            f"model={folder}: has no adapter_model.safetensors, and .bin files (pickles) are never loaded; "
            "save the adapter again with peft's save_pretrained"
        )


def attach_adapter(model: Any, adapter: str, *, is_trainable: bool = False) -> Any:
    """Wrap the model with a saved adapter."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    check_adapter_weights(adapter)
    check_patterns(adapter, (name for name, _ in model.named_modules()))
    try:
        wrapped = PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable)
        with safe_open(Path(adapter) / "adapter_model.safetensors", "pt") as file:
            saved = set(file.keys())
    except Exception as error:  # peft raises arbitrary errors for damaged files
        raise load_failure(
            f"model={adapter}: the adapter (adapter_config.json, adapter_model.safetensors)", error
        ) from None
    missing = get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys() - saved
    if missing:  # peft would initialise them silently
        raise UserError(
            f"model={adapter}: adapter_model.safetensors lacks {len(missing)} tensors of adapter_config.json, "
            f"e.g. {min(missing)}; download both again from one source"
        )
    return wrapped


def load_failure(label: str, error: Exception) -> UserError:
    """Return a library's error as one sentence that starts with the label."""
    reason = " ".join(str(error).split())[:300]
    if "ignore_mismatched_sizes" in reason:
        reason = "the weights' shapes do not match config.json"
    return UserError(f"{label} cannot be loaded ({type(error).__name__}: {reason}){trust_hint(error)}")


def check_base(path: str, revision: str | None = None) -> None:
    """Raise if a model folder or hub id is an adapter, names .bin files as weights, or has damaged files.

    transformers would apply an adapter silently, and would unpickle a .bin file that an index names.
    """
    from safetensors import SafetensorError, safe_open
    from transformers.utils import cached_file

    is_folder = Path(path).is_dir()
    if not is_folder:
        check_hub("model", path)
    contents: dict[str, dict[str, Any]] = {}
    for name in JSON_FILES if is_folder else JSON_FILES[:3]:
        try:
            file = cached_file(path, name, revision=revision)
        except OSError:  # missing, or the hub is unreachable, which loading the model reports
            file = None
        contents[name] = _read_json(path, Path(file)) if file else {}
    if contents["adapter_config.json"]:
        raise UserError(f"model={path}: contains an adapter, not a base model; merge it into its base first")
    for name in SIZES:
        value = contents["config.json"].get(name)
        if isinstance(value, int) and value < 1:
            raise UserError(f"model={path}: config.json has {name}={value}, which must be 1 or more")
    index = contents[INDEX] or {"weight_map": {"": ONE_FILE}, "metadata": {}}
    if not all(isinstance(index.get(key), dict) for key in ("weight_map", "metadata")) or not index["weight_map"]:
        raise UserError(f"model={path}: {INDEX} lacks weight_map or metadata; download it again")
    files = list(index["weight_map"].values())
    files.append(contents["config.json"].get("transformers_weights", ONE_FILE))
    if bad := [name for name in files if not isinstance(name, str) or not name.endswith(".safetensors")]:
        raise UserError(
            f"model={path}: {INDEX} or config.json names {bad[0]!r} as weights, and only .safetensors files are "
            "loaded; convert the weights"
        )
    for file in sorted({Path(path) / name for name in files} if is_folder else ()):
        if file.is_file():
            try:
                with safe_open(file, "pt"):
                    pass
            except SafetensorError as error:
                raise UserError(f"model={path}: {file.name} cannot be read ({error}); download it again") from None


def read_settings(path: str, revision: str | None = None) -> dict[str, Any]:
    """Return config.json of a model folder or hub id; {} if it is missing or broken, which loading reports better."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(path, revision=revision)[0]
    except (OSError, ValueError):
        return {}


def loading_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return from_pretrained's options for the released files of gpt-oss, whose experts are in MXFP4."""
    quantised = settings.get("quantization_config")
    if not isinstance(quantised, dict) or quantised.get("quant_method") != "mxfp4":
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def finish_dequantised(model: Any, dtype: Any) -> None:
    """Make transformers save the experts in bfloat16, as it has loaded them, and not as MXFP4 blocks."""
    model.to(dtype)
    model._weight_conversions = None


def reject_reward_model(name: str, settings: Mapping[str, Any]) -> None:
    """Raise for a reward model: with tied embeddings transformers would load it as a language model without a word."""
    kinds = settings.get("architectures")
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    if kind.endswith("Classification"):
        prefix = "prm" if "Token" in kind else "model"
        raise UserError(
            f"model={name}: a reward model ({kind}), not a language model; pass the model it was trained from, or "
            f"score with it: --reward-funcs {prefix}:{name}"
        )


def read_local(model: str, name: str, revision: str | None = None) -> str | None:
    """Return the text of a file in a model folder or the hub's cache; None if it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(BUILTIN.get(model, model)).expanduser()
    try:
        file = folder / name if folder.is_dir() else try_to_load_from_cache(model, name, revision=revision)
        return Path(file).read_text(encoding="utf-8") if isinstance(file, str | Path) else None
    except (OSError, ValueError):  # no such file, or not a hub id
        return None


def trust_hint(error: Exception) -> str:
    """Return the hint to append if a model failed to load because it needs custom code; otherwise an empty string."""
    return "; if you trust its code, pass --trust-remote-code" if "trust_remote_code" in str(error) else ""


def served_model(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the model that a server loads for a --model value, and its revision: an adapter's base, since the adapter
    is sent later."""
    model, revision = find_base(resolve_model(name), revision)
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model, revision
