"""Resolve a --model value to a folder or hub id; shared by the trainer and the servers it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.errors import UserError

TINY = Path(__file__).resolve().parents[2] / "trainer" / "tiny"
BUILTIN = {"builtin:tiny": TINY, "builtin:tiny_teacher": TINY / "teacher"}


def resolve_model(name: str) -> str:
    """A --model value -> hub id or folder that holds weights or an adapter."""
    if name in BUILTIN:
        return str(BUILTIN[name])
    if name.startswith("builtin:"):
        raise UserError(f"model={name}: unknown built-in model; there is {', '.join(BUILTIN)}")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.exists():
            raise UserError(f"model={name}: no such folder; pass a hub id, a model folder or a finished run folder")
        return name
    if (folder / "shards.json").exists():
        raise UserError(f"model={name}: a sharded checkpoint; convert it with python -m trainer.export {name} OUT")
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
        return str(folder)
    if (folder / "final").is_dir():
        return str(folder / "final")
    if (folder / "metrics.jsonl").exists() or (folder / "config.yaml").exists():
        raise UserError(f"model={name}: this run has not finished, it has no final/; finish it with --resume {name}")
    raise UserError(f"model={name}: holds neither config.json nor adapter_config.json nor a finished run")


def read_adapter(folder: str) -> dict[str, Any]:
    """The settings of a saved LoRA adapter."""
    try:
        saved = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"model={folder}: its adapter_config.json cannot be read ({reason})") from None
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA":
        raise UserError(f"model={folder}: adapter_config.json is not that of a LoRA adapter; only those are supported")
    if not saved.get("base_model_name_or_path"):
        raise UserError(f"model={folder}: adapter_config.json names no base_model_name_or_path; write it in")
    return saved


def check_adapter_weights(folder: str) -> None:
    """Refuse an adapter without safetensors: peft would fall back to adapter_model.bin, which is a pickle."""
    if not (Path(folder) / "adapter_model.safetensors").is_file():
        raise UserError(
            f"model={folder}: has no adapter_model.safetensors, and a .bin file is a pickle, which is never loaded; "
            "save the adapter again with peft's save_pretrained"
        )


def check_base(folder: str) -> None:
    """Refuse an adapter in place of a base model: transformers would apply it silently, even from a .bin file."""
    if (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"model={folder}: holds an adapter, not the base model of one; merge it into its base first")


def trust_hint(error: Exception) -> str:
    """What to append to the error of a model that needs its own code to be run."""
    return "; if you trust its code, pass --trust-remote-code" if "trust_remote_code" in str(error) else ""


def served_model(name: str) -> str:
    """What a server loads for a --model value: an adapter's base (the adapter is sent later), else the model."""
    found = resolve_model(name)
    if (Path(found) / "adapter_config.json").exists():
        found = resolve_model(str(read_adapter(found)["base_model_name_or_path"]))
    folder = Path(found).expanduser()
    return str(folder.resolve()) if folder.is_dir() else found
