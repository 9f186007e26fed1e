"""Resolve a --model value to a folder or hub id; shared by the trainer and the servers it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.hub import is_path

TINY = Path(__file__).resolve().parents[1] / "trainer" / "tiny"
BUILTIN = {"builtin:tiny": TINY, "builtin:tiny_teacher": TINY / "teacher"}


def resolve_model(name: str) -> str:
    """Return the hub id, or the folder with weights or an adapter, of a --model value."""
    if name in BUILTIN:
        return str(BUILTIN[name])
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


def read_adapter(folder: str) -> dict[str, Any]:
    """Return the settings of a saved LoRA adapter."""
    try:
        settings = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"model={folder}: adapter_config.json cannot be read ({reason})") from None
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise UserError(f"model={folder}: adapter_config.json is not a LoRA adapter's; only LoRA is supported")
    if not settings.get("base_model_name_or_path"):
        raise UserError(f"model={folder}: adapter_config.json lacks base_model_name_or_path; add it")
    return settings


def check_adapter_weights(folder: str) -> None:
    """Raise for an adapter without safetensors: peft would fall back to adapter_model.bin, which is a pickle."""
    if not (Path(folder) / "adapter_model.safetensors").is_file():
        raise UserError(
            f"model={folder}: has no adapter_model.safetensors, and .bin files (pickles) are never loaded; "
            "save the adapter again with peft's save_pretrained"
        )


def check_base(folder: str) -> None:
    """Raise for an adapter in place of a base model: transformers would apply it silently, even from a .bin file."""
    if (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"model={folder}: contains an adapter, not a base model; merge it into its base first")


def read_settings(path: str) -> dict[str, Any]:
    """Return config.json of a model folder or hub id; {} if it is missing or broken, which loading reports better."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(path)[0]
    except (OSError, ValueError):
        return {}


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


def trust_hint(error: Exception) -> str:
    """Return the hint to append if a model failed to load because it needs custom code; otherwise an empty string."""
    return "; if you trust its code, pass --trust-remote-code" if "trust_remote_code" in str(error) else ""


def served_model(name: str) -> str:
    """Return the model that a server loads for a --model value: an adapter's base, since the adapter is sent later."""
    model = resolve_model(name)
    if (Path(model) / "adapter_config.json").exists():
        model = resolve_model(str(read_adapter(model)["base_model_name_or_path"]))
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model
