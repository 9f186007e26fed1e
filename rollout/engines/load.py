"""Load a model for sampling: a hub id, a folder, a finished run, an adapter, or builtin:tiny.

model, tokenizer = load_model("runs/grpo-20261115-093000")
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.hub import check_hub
from rollout.model_folder import (
    check_adapter_weights,
    check_base,
    read_adapter,
    read_settings,
    reject_reward_model,
    resolve_model,
    trust_hint,
)


def load_model(name: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer. Adapters are not merged."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source = resolve_model(name)
    if not Path(source).is_dir():
        check_hub("model", name)
    base = source
    is_adapter = (Path(source) / "adapter_config.json").is_file()
    if is_adapter:
        base = resolve_model(str(read_adapter(source)["base_model_name_or_path"]))
        check_adapter_weights(source)
        check_base(base)
    reject_reward_model(name, read_settings(base))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never load pickled .bin files
        )
        if is_adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, source)
    except (OSError, ValueError) as error:  # a missing or unreadable model
        reason = str(error).strip().split("\n")[0]
        remedy = trust_hint(error) or "; check the path or hub id"
        raise UserError(f"model={name}: cannot be loaded ({reason}){remedy}") from None
    return model.to(device).eval(), tokenizer
