"""LoRA adapters through peft: add a new one, or load a saved one to merge or to train further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from data.errors import UserError
from rollout.servers.model_folder import check_adapter_weights, read_adapter
from trainer.config.blocks import LoraConfig
from trainer.config.errors import first_line, load_error

ADAPTER = "default"  # peft's name for the adapter under training


def adapter_name(name: str) -> str:
    """peft omits the adapter's name in files."""
    magnitude = f".lora_magnitude_vector.{ADAPTER}.weight"  # of DoRA
    return name.replace(magnitude, ".lora_magnitude_vector").replace(f".{ADAPTER}.", ".")


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
        raise UserError(f"model={adapter}: its adapter could not be loaded: {load_error(error, adapter)}") from None
    lacking = get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys() - saved
    if lacking:  # peft would initialise them silently
        raise UserError(
            f"model={adapter}: its adapter_config.json asks for {len(lacking)} tensors that adapter_model.safetensors "
            f"lacks, {min(lacking)} for one; get both files from one source"
        )
    return wrapped


def add_adapter(model: nn.Module, lora: LoraConfig) -> Any:
    """The model with a new adapter."""
    wrapped = wrap(model, lora, "CAUSAL_LM")
    lm = wrapped.get_base_model()
    head = lm.get_output_embeddings()
    if not is_saved(head) and (not isinstance(head, nn.Linear) or hasattr(head, "lora_A")):
        raise UserError("lora.target_modules: the output head cannot be adapted; leave lm_head out")
    ends = (lm.get_input_embeddings(), head)
    if any(map(is_saved, ends)) and lm.config.get_text_config().tie_word_embeddings:
        raise UserError(
            f"lora.modules_to_save={' '.join(lora.modules_to_save)}: this model's head shares its weights with the "
            "embeddings, and would not after training; leave them out, or train all weights with --lora.r 0"
        )
    return wrapped


def is_saved(module: nn.Module) -> bool:
    """Whether peft trains the module in full, beside the original."""
    return hasattr(module, "original_module")


def wrap(model: nn.Module, lora: LoraConfig, task: str, **options: Any) -> Any:
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    alone = lora.pattern or (lora.target_modules[0] if lora.target_modules == ("all-linear",) else None)
    targets = alone or list(lora.target_modules)
    sizes = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    kinds = {"use_rslora": lora.rslora, "use_dora": lora.dora}
    saved = [*options.pop("modules_to_save", ()), *lora.modules_to_save]
    names = [name for name, _ in model.named_modules()]
    for name in lora.modules_to_save:
        if not any(f".{known}".endswith(f".{name}") for known in names):
            raise UserError(f"lora.modules_to_save={name}: the model has no such module; name one, as embed_tokens")
    try:
        config = PeftLora(
            **sizes, **kinds, target_modules=targets, task_type=task, modules_to_save=saved or None, **options
        )
        wrapped = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora.target_modules={' '.join(lora.target_modules)}: {first_line(error)}") from None
    if lora.modules_to_save:  # copies of the base's, which may be bfloat16
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return wrapped


def continue_adapter(model: nn.Module, adapter: str, lora: LoraConfig) -> Any:
    """The model with a saved adapter, to be trained further."""
    saved = read_adapter(adapter)
    if saved["r"] != lora.r:
        raise UserError(
            f"lora.r={lora.r}: the adapter in {adapter} has rank {saved['r']}; continue it with --lora.r {saved['r']}, "
            "or use --lora.r 0 to merge it and train all weights"
        )
    kept = {"alpha": saved["lora_alpha"], "dropout": saved["lora_dropout"]}
    kept |= {"rslora": bool(saved.get("use_rslora")), "dora": bool(saved.get("use_dora"))}
    kept |= {"modules_to_save": tuple(saved.get("modules_to_save") or ())}
    for flag, was in kept.items():
        if getattr(lora, flag) != was:
            value, had = (" ".join(x) if isinstance(x, tuple) else x for x in (getattr(lora, flag), was))
            raise UserError(f"lora.{flag}={value}: the adapter in {adapter} has {had}; pass that value")
    adapted = saved["target_modules"]
    adapted = {adapted} if isinstance(adapted, str) else set(adapted)  # a pattern, or names
    if lora.target_modules != ("all-linear",) and set(lora.target_modules) != adapted:
        raise UserError(
            f"lora.target_modules={' '.join(lora.target_modules)}: the adapter in {adapter} adapts "
            f"{' '.join(sorted(adapted))}; leave the flag out"
        )
    return attach_adapter(model, adapter, is_trainable=True)
