"""Write a trained model so that other tools can load it.

Full weights: a transformers folder, for `AutoModelForCausalLM.from_pretrained` and `pipeline("text-generation")`. They
are stored in the dtype the base model has on disk: float32 stays exact, a bfloat16 base gives bfloat16 rounded once.
LoRA: a peft adapter folder in the dtype it was trained in (float32) that names its base; a local base by absolute path,
so that the adapter may be loaded from any folder, but its base may not move. Either way the folder holds the tokenizer,
its chat template, and a generation_config.json with every stop id.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.chat import stop_ids
from trainer.checkpoint import ADAPTER, atomic_folder
from trainer.dist import is_main
from trainer.model import resolve_model
from trainer.shards import full, is_dtensor, settle

SCORER_TASKS = ("SEQ_CLS", "TOKEN_CLS")  # peft's words for the models of trainer/heads.py


def export_model(model: nn.Module, tokenizer: Any, folder: Path, *, merge_lora: bool, base: str) -> None:
    """Write `folder` (replacing an older one) from a live transformers or peft model, which stays as it is.

    `base` is what the weights were loaded from: hub id, folder or builtin:NAME.
    """
    base = loadable_base(base)
    is_lora = hasattr(model, "peft_config")
    settle(model)
    if any(is_dtensor(p) for p in model.parameters()):
        model = gathered(model)  # every rank takes part
    if not is_main():
        return
    # A scorer is merged always: an adapter folder has no place for what its head needs (labels, padding token).
    is_scorer = is_lora and model.peft_config[ADAPTER].task_type in SCORER_TASKS
    generation = generation_config(model, tokenizer)
    if is_lora and not merge_lora and not is_scorer:
        with atomic_folder(folder, "export") as tmp:
            _save_adapter(model, tmp, base)
            generation.save_pretrained(tmp)
            tokenizer.save_pretrained(tmp)
        return
    full = _full_model(model, dtype_on_disk(base))
    full.generation_config = generation
    full.config = copy.deepcopy(full.config)
    full.config.use_cache = True
    with atomic_folder(folder, "export") as tmp, _no_progress_bar():
        full.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def loadable_base(base: str) -> str:
    """A name that loads from any working directory: local folders become absolute, hub ids stay."""
    found = Path(resolve_model(base)).expanduser()
    return str(found.resolve()) if found.is_dir() else base


def generation_config(model: nn.Module, tokenizer: Any) -> Any:
    """The model's own, with all stop ids, so that `generate` ends where our rollouts end."""
    from transformers import GenerationConfig

    own = getattr(model, "generation_config", None) or GenerationConfig()
    config = copy.deepcopy(own)
    try:
        config.validate(strict=True)
    except ValueError:  # some published models contradict themselves (a temperature without sampling), unsavable as is
        config = GenerationConfig(bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id)
    config._from_model_config = False  # else transformers may rebuild it from config.json and drop the stop ids
    eos = list(stop_ids(tokenizer, own.eos_token_id))
    config.eos_token_id = eos if eos else None
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos), None)
    return config


def dtype_on_disk(base: str) -> torch.dtype | None:
    """The dtype named in the base model's config.json, or None when it names none or cannot be reached."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(base)
    except OSError:  # gone from disk or hub: the trained dtype, which loses nothing, is used
        return None
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def describe_model(model: Any, tokenizer: Any, folder: Path, *, base: str) -> None:
    """Everything of an export but the weights: beside a checkpoint's weights it makes that folder loadable too."""
    if hasattr(model, "peft_config"):
        model.peft_config[ADAPTER].save_pretrained(folder)
        _name_base(folder, loadable_base(base))
    else:
        model.config.save_pretrained(folder)
    generation_config(model, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _save_adapter(model: Any, folder: Path, base: str) -> None:
    # No base embeddings in the adapter: we never resize them, and peft would ask the hub whether we did.
    model.save_pretrained(folder, selected_adapters=[ADAPTER], save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's unfilled model card
    _name_base(folder, base)


def _name_base(folder: Path, base: str) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _full_model(model: Any, dtype: torch.dtype | None) -> Any:
    """A transformers model whose attributes may be set without touching the live one; weights may be shared."""
    if hasattr(model, "peft_config"):
        # Merged in float32, then rounded once.
        merged = _cpu_copy(model, torch.float32).merge_and_unload(safe_merge=True, adapter_names=[ADAPTER])
        return merged.to(dtype or model.dtype)
    return copy.copy(model) if dtype in (None, model.dtype) else _cpu_copy(model, dtype)


def gathered(model: Any) -> Any:
    """A model like a sharded one, its weights whole and in main memory; on rank 0 only, but every rank takes part."""
    known: dict[int, Tensor] = {}  # tied weights are gathered once
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            value = full(tensor.detach())
            known[id(tensor)] = value.cpu() if is_main() else value[:0]
        state[name] = known[id(tensor)]
    if not is_main():
        return None
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    with torch.device("meta"):
        plain = type(base)(copy.deepcopy(base.config))
        if hasattr(model, "peft_config"):
            from peft import get_peft_model

            plain = get_peft_model(plain, copy.deepcopy(model.peft_config[ADAPTER]))
    plain.load_state_dict({name: state[name] for name in plain.state_dict()}, assign=True)  # no frozen second adapter
    (plain.get_base_model() if hasattr(model, "peft_config") else plain).tie_weights()
    return plain


def _cpu_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose tensors lie in host memory, so that an accelerator filled by training is enough; ties stay ties."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        data = parameter.detach().to("cpu", dtype if parameter.is_floating_point() else parameter.dtype, copy=True)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, memo)
