"""Load a model for sampling: a hub id, a folder, a finished run, an adapter, or builtin:tiny.

model, tokenizer = load_model("runs/grpo-20261115-093000")
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from data.errors import UserError
from rollout.model_folder import (
    check_adapter_weights,
    check_base,
    check_patterns,
    read_adapter,
    resolve_model,
    trust_hint,
)


def load_model(name: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer. Adapters are not merged."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source = base = resolve_model(name)
    is_adapter = (Path(source) / "adapter_config.json").exists()
    if is_adapter:
        base = resolve_model(read_adapter(source)["base_model_name_or_path"])
    check_base(base)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    what = "config.json"
    try:
        AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        what = "the tokenizer (tokenizer.json)"
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        what = "the model (config.json, model.safetensors)"
        model, info = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never load pickled .bin files
            output_loading_info=True,
        )
    except Exception as error:  # libraries raise arbitrary errors for damaged files and remote code
        raise load_failure(f"model={name}: {what}", error) from None
    if info["missing_keys"]:
        missing = min(info["missing_keys"])
        raise UserError(f"model={name}: the weights lack {missing}, which would be random; download the model again")
    return (attach_adapter(model, source) if is_adapter else model).to(device).eval(), tokenizer


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
