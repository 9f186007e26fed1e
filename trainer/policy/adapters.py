"""Choose what is trained: LoRA adapters through peft, new or saved, or a part of the weights.

Parameters that --trained-parameters does not match have no gradient and no optimizer state. They keep the dtype of the
trained parameters, and checkpoints contain them, so that a checkpoint is still a complete model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from data.errors import UserError
from rollout.model_folder import attach_adapter, read_adapter
from trainer.config.blocks import LoraConfig
from trainer.config.errors import first_line
from trainer.parallel.comm import is_main
from trainer.parallel.watch import log

ADAPTER = "default"  # peft's name for the adapter under training
REFERENCE = "reference"  # name of a second adapter, which is not trained


def adapter_name(name: str) -> str:
    """Return a parameter's name in peft's files, which omit the adapter name."""
    magnitude = f".lora_magnitude_vector.{ADAPTER}.weight"  # DoRA
    return name.replace(magnitude, ".lora_magnitude_vector").replace(f".{ADAPTER}.", ".")


def add_adapter(model: nn.Module, lora: LoraConfig, revision: str | None = None) -> Any:
    """Wrap the model, of this revision on the hub, with a new adapter."""
    wrapped = wrap(model, lora, "CAUSAL_LM", revision=revision)
    lm = wrapped.get_base_model()
    head = lm.get_output_embeddings()
    if not is_saved(head) and (not isinstance(head, nn.Linear) or hasattr(head, "lora_A")):
        raise UserError("lora.target_modules: the output head cannot be adapted; remove lm_head")
    ends = (lm.get_input_embeddings(), head)
    if any(map(is_saved, ends)) and lm.config.get_text_config().tie_word_embeddings:
        raise UserError(
            f"lora.modules_to_save={' '.join(lora.modules_to_save)}: training would untie the model's head from its "
            "embeddings; remove both, or train all weights with --lora.r 0"
        )
    return wrapped


def is_saved(module: nn.Module) -> bool:
    """Return whether peft trains a full copy of the module."""
    return hasattr(module, "original_module")


def wrap(model: nn.Module, lora: LoraConfig, task: str, **options: Any) -> Any:
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    names = [name for name, _ in model.named_modules()]
    for name in lora.modules_to_save:
        if not any(f".{known}".endswith(f".{name}") for known in names):
            raise UserError(f"lora.modules_to_save={name}: no such module; name a module, e.g. embed_tokens")
    pattern = lora.pattern or ("all-linear" if lora.target_modules == ("all-linear",) else None)
    if fused := read_by_kernels(model):
        if named := [name for name in lora.target_modules if any(f".{x}".endswith(f".{name}") for x in fused)]:
            raise UserError(
                f"lora.target_modules={named[0]}: Mamba kernels read this weight without its adapter; remove {named[0]}"
            )
        options["exclude_modules"] = [*options.get("exclude_modules", ()), *fused]
    config = {
        "r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora, "use_dora": lora.dora,
        "target_modules": pattern or list(lora.target_modules), "task_type": task,
        "modules_to_save": [*options.pop("modules_to_save", ()), *lora.modules_to_save] or None,
    }  # fmt: skip
    try:
        wrapped = get_peft_model(model, PeftLora(**config, **options))
    except ValueError as error:
        raise UserError(f"lora.target_modules={' '.join(lora.target_modules)}: {first_line(error)}") from None
    if lora.modules_to_save:  # copied from the base, which may be bfloat16
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return wrapped


def read_by_kernels(model: nn.Module) -> list[str]:
    """Return the names of linear layers whose weights a fused Mamba kernel reads without calling the layer."""
    mixers = [(name, module) for name, module in model.named_modules() if hasattr(module, "A_log")]
    return [
        f"{name}.{child}"
        for name, mixer in mixers
        for child, layer in mixer.named_children()
        if hasattr(mixer, "D") and isinstance(layer, nn.Linear) and child != "in_proj"
    ]


def continue_adapter(model: nn.Module, adapter: str, lora: LoraConfig) -> Any:
    """Wrap the model with a saved adapter and continue its training."""
    saved = read_adapter(adapter)
    if saved["r"] != lora.r:
        raise UserError(
            f"lora.r={lora.r}: the adapter in {adapter} has rank {saved['r']}; continue it with --lora.r {saved['r']}, "
            "or merge it and train all weights with --lora.r 0"
        )
    settings = {
        "alpha": saved["lora_alpha"],
        "dropout": saved["lora_dropout"],
        "rslora": bool(saved.get("use_rslora")),
        "dora": bool(saved.get("use_dora")),
        "modules_to_save": tuple(saved.get("modules_to_save") or ()),
    }
    for flag, expected in settings.items():
        if getattr(lora, flag) != expected:
            value, expected = (" ".join(x) if isinstance(x, tuple) else x for x in (getattr(lora, flag), expected))
            raise UserError(f"lora.{flag}={value}: the adapter in {adapter} has {expected}; pass that value")
    adapted = saved["target_modules"]
    adapted = {adapted} if isinstance(adapted, str) else set(adapted)  # one pattern, or several names
    if lora.target_modules != ("all-linear",) and set(lora.target_modules) != adapted:
        raise UserError(
            f"lora.target_modules={' '.join(lora.target_modules)}: the adapter in {adapter} adapts "
            f"{' '.join(sorted(adapted))}; remove --lora.target-modules"
        )
    return attach_adapter(model, adapter, is_trainable=True)


def continue_object(model: Any, lora: LoraConfig, *, with_reference: bool) -> str | None:
    """Continue the adapter of a peft model from Python; return the name of a frozen copy of it `with_reference`."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    known = model.peft_config.get(ADAPTER)
    if known is None or known.peft_type.value != "LORA" or known.r != lora.r:
        raise UserError(
            f"model: the peft model needs a LoRA adapter named {ADAPTER!r} of rank lora.r={lora.r}; it has "
            f"{', '.join(f'{name} ({kind.peft_type.value})' for name, kind in model.peft_config.items())}"
        )
    model.set_adapter(ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if not with_reference:
        return None
    model.add_adapter(REFERENCE, known)
    weights = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    set_peft_model_state_dict(model, {name: x.clone() for name, x in weights.items()}, adapter_name=REFERENCE)
    model.set_adapter(ADAPTER)
    return REFERENCE


def freeze_except(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match no pattern from their start; without patterns, change nothing."""
    if not patterns:
        return
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.match(pattern, name) for name in names):
            hint = _advice(model, pattern)
            raise UserError(f"trained_parameters={pattern}: no parameter has a name that starts like this; {hint}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.match(pattern, name) for pattern in patterns))
    if is_main():
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        total = sum(p.numel() for p in model.parameters())
        log(f"trained_parameters: {sum(sizes):,} of {total:,} weights in {len(sizes)} tensors are trained")


def _advice(model: nn.Module, pattern: str) -> str:
    """Return the name that a tied parameter has, or similar names."""
    first = {id(p): name for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if re.match(pattern, name):
            return f"{name} is tied to {first[id(parameter)]}, which must be named instead"
    names = list(first.values())
    near = [name for name in names if re.search(pattern, name)] or difflib.get_close_matches(pattern, names, 3, 0.0)
    return f"did you mean {' or '.join(near[:3])}?"
