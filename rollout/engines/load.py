"""Load a model for sampling: a hub id, a folder, a finished run, an adapter, or builtin:tiny.

model, tokenizer = load_model("runs/grpo-20261115-093000")
"""

from __future__ import annotations

import sys
from typing import Any

from data.errors import UserError
from rollout.model_folder import (
    attach_adapter,
    check_base,
    find_base,
    finish_dequantised,
    load_failure,
    loading_options,
    read_settings,
    reject_reward_model,
    resolve_model,
)


def load_model(name: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer. Adapters are not merged."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source = resolve_model(name)
    base, revision = find_base(source)
    check_base(base, revision)
    settings = read_settings(base, revision)
    reject_reward_model(name, settings)
    options = loading_options(settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    what = "config.json"
    try:
        AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust_remote_code)
        what = "the tokenizer (tokenizer.json)"
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        what = "the model (config.json, model.safetensors)"
        model, info = AutoModelForCausalLM.from_pretrained(
            base,
            revision=revision,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never load pickled .bin files
            output_loading_info=True,
            **options,
        )
        if options:
            finish_dequantised(model, dtype)
    except Exception as error:  # libraries raise arbitrary errors for damaged files and remote code
        raise load_failure(f"model={name}: {what}", error) from None
    if info["missing_keys"]:
        missing = min(info["missing_keys"])
        raise UserError(f"model={name}: the weights lack {missing}, which would be random; download the model again")
    return (model if base == source else attach_adapter(model, source)).to(device).eval(), tokenizer
