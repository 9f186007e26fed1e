"""LoRA adapters through peft: add a new one, or load a saved one to merge or to train further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from rollout.servers.model_folder import check_adapter_weights, read_adapter
from trainer.config.blocks import LoraConfig
from trainer.config.errors import first_line, load_error

ADAPTER = "default"  # peft's name for the adapter under training


def adapter_name(name: str) -> str:
    """peft omits the adapter's name in files."""
    return name.replace(f".{ADAPTER}.", ".")


def attach_adapter(model: nn.Module, adapter: str, *, is_trainable: bool = False) -> Any:
    """The model with a saved adapter."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    check_adapter_weights(adapter)
    try:
        wrapped = PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable)
        with safe_open(Path(adapter) / "adapter_model.safetensors", "pt") as file:
            saved = set(file.keys())
    except Exception as error:  # damaged files make peft raise anything
        raise ValueError(f"model={adapter}: its adapter could not be loaded: {load_error(error, adapter)}") from None
    lacking = get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys() - saved
    if lacking:  # peft would initialise them silently
        raise ValueError(
            f"model={adapter}: its adapter_config.json asks for {len(lacking)} tensors that adapter_model.safetensors "
            f"lacks, {min(lacking)} for one; get both files from one source"
        )
    return wrapped


def add_adapter(model: nn.Module, lora: LoraConfig) -> Any:
    """The model with a new adapter."""
    wrapped = wrap(model, lora, "CAUSAL_LM")
    head = wrapped.get_base_model().get_output_embeddings()
    if not isinstance(head, nn.Linear) or hasattr(head, "lora_A"):
        raise ValueError("lora.target_modules: the output head cannot be adapted; leave lm_head out")
    return wrapped


def wrap(model: nn.Module, lora: LoraConfig, task: str, **options: Any) -> Any:
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    targets = lora.target_modules[0] if lora.target_modules == ("all-linear",) else list(lora.target_modules)
    sizes = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    try:
        return get_peft_model(model, PeftLora(**sizes, target_modules=targets, task_type=task, **options))
    except ValueError as error:
        raise ValueError(f"lora.target_modules={' '.join(lora.target_modules)}: {first_line(error)}") from None


def continue_adapter(model: nn.Module, adapter: str, lora: LoraConfig) -> Any:
    """The model with a saved adapter, to be trained further."""
    saved = read_adapter(adapter)
    if saved["r"] != lora.r:
        raise ValueError(
            f"lora.r={lora.r}: the adapter in {adapter} has rank {saved['r']}; continue it with --lora.r {saved['r']}, "
            "or use --lora.r 0 to merge it and train all weights"
        )
    for flag, was in (("alpha", saved["lora_alpha"]), ("dropout", saved["lora_dropout"])):
        if getattr(lora, flag) != was:
            raise ValueError(f"lora.{flag}={getattr(lora, flag)}: the adapter in {adapter} has {was}; pass that value")
    if lora.target_modules != ("all-linear",) and set(lora.target_modules) != set(saved["target_modules"]):
        raise ValueError(
            f"lora.target_modules={' '.join(lora.target_modules)}: the adapter in {adapter} adapts "
            f"{' '.join(sorted(saved['target_modules']))}; leave the flag out"
        )
    return attach_adapter(model, adapter, is_trainable=True)
