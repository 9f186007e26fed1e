"""Export a trained model for other tools.

    python -m trainer.export runs/dpo-20261115-093000 out          # the newest checkpoint of a run, sharded or not

Full weights: a transformers folder for `AutoModelForCausalLM.from_pretrained` and `pipeline("text-generation")`, in the
dtype of the base model's files: float32 stays exact, bfloat16 is rounded once. LoRA: a peft adapter folder in the
training dtype (float32). It refers to a local base by absolute path, so the adapter loads from any working directory,
but the base must not move. Both contain the tokenizer, its chat template, and a generation_config.json with every stop
id.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from data.chat import stop_ids
from data.command.config_file import load_config
from data.errors import UserError
from rollout.model_folder import check_patterns, resolve_model
from rollout.tensor_header import aligned
from trainer.config.errors import load_error
from trainer.files.atomic_folder import atomic_folder
from trainer.files.tensor_files import TensorFiles, specs_of, write_tensors
from trainer.parallel.comm import is_main
from trainer.parallel.dtensor import gather, is_dtensor, reshard
from trainer.parallel.watch import log
from trainer.policy.adapters import ADAPTER, adapter_name
from trainer.policy.load import find_model, model_tensors
from trainer.policy.logps import causal_lm
from trainer.policy.model_files import ExportedModel, write_model
from trainer.run.checkpoint import INDEX, MANIFEST, find_problem, latest_valid, stored_tensors

SCORER_TASKS = ("SEQ_CLS", "TOKEN_CLS")  # peft's names for the models of trainer/policy/heads.py
OF_TRAINING = ("state.json", INDEX, MANIFEST)  # checkpoint files that do not belong in a model folder


def export_model(
    model: nn.Module, tokenizer: Any, folder: Path, *, merge_lora: bool, base: str, revision: str | None = None
) -> None:
    """Write or replace `folder` from a live transformers or peft model, which is not changed.

    `base` is the source of the weights: hub id (of this revision), folder or builtin:NAME.
    """
    base = loadable_base(base)
    is_lora = hasattr(model, "peft_config")
    # A scorer is always merged: an adapter folder has no place for its labels and padding token.
    is_scorer = is_lora and model.peft_config[ADAPTER].task_type in SCORER_TASKS
    reshard(model)
    if any(is_dtensor(p) for p in model.parameters()):
        dtype = dtype_on_disk(base, revision)
        as_adapter = is_lora and not merge_lora and not is_scorer
        export_shards(model, tokenizer, folder, as_adapter=as_adapter, base=base, dtype=dtype)
        return
    if not is_main():
        return
    generation = generation_config(model, tokenizer)
    if is_lora and not merge_lora and not is_scorer:
        with atomic_folder(folder, "export") as tmp:
            _save_adapter(model, tmp, base)
            generation.save_pretrained(tmp)
            tokenizer.save_pretrained(tmp)
        return
    full = _full_model(model, dtype_on_disk(base, revision))
    full.generation_config = generation
    full.config = copy.deepcopy(full.config)
    full.config.use_cache = True
    with atomic_folder(folder, "export") as tmp, _no_progress_bar():
        full.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)


def export_shards(
    model: Any, tokenizer: Any, folder: Path, *, as_adapter: bool, base: str, dtype: torch.dtype | None
) -> None:
    """Export a sharded model: all ranks gather one tensor at a time, and rank 0 writes it."""
    lm = causal_lm(model)
    shards = (model if as_adapter else lm).state_dict(keep_vars=True)

    def get(name: str) -> Tensor:
        return gather(shards[name].detach()).cpu()

    if as_adapter:
        names = {adapter_name(name): name for name in shards if ".lora_" in name and f".{ADAPTER}." in name}
        specs = specs_of({name: shards[names[name]] for name in names})
        tensors = (get(name) for name in names.values())
    else:
        exported = ExportedModel(lm, dtype or lm.dtype, get)
        tensors = exported.tensors()
    if not is_main():
        for _ in tensors:  # join every gather
            continue
        return
    with atomic_folder(folder, "export") as tmp:
        if as_adapter:
            write_tensors(tmp / "adapter_model.safetensors", specs, tensors)
            describe_model(model, tokenizer, tmp, base=base)
            change_json(tmp / "adapter_config.json", inference_mode=True)
        else:
            write_model(tmp, exported)
            _save_config(lm, tmp)
            finish_config(tmp, exported.dtype)
            generation_config(lm, tokenizer).save_pretrained(tmp)
            tokenizer.save_pretrained(tmp)


def finish_config(folder: Path, dtype: torch.dtype) -> None:
    """Set the values of config.json that differ during training."""
    change_json(folder / "config.json", dtype=str(dtype).removeprefix("torch."), use_cache=True)


def change_json(path: Path, **changes: Any) -> None:
    """Change settings in a JSON file, formatted as transformers and peft do."""
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


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
    """Return a name that loads from any working directory: a local folder becomes an absolute path."""
    folder = Path(resolve_model(base)).expanduser()
    return str(folder.resolve()) if folder.is_dir() else base


def generation_config(model: nn.Module, tokenizer: Any) -> Any:
    """Return the model's generation config with all stop ids, so that `generate` stops where rollouts stop."""
    from transformers import GenerationConfig

    original = getattr(model, "generation_config", None) or GenerationConfig()
    config = copy.deepcopy(original)
    try:
        config.validate(strict=True)
    except ValueError:  # some published configs cannot be saved (a temperature without sampling)
        config = GenerationConfig(bos_token_id=original.bos_token_id, eos_token_id=original.eos_token_id)
    config._from_model_config = False  # otherwise transformers may rebuild it from config.json without the stop ids
    eos = list(stop_ids(tokenizer, original.eos_token_id))
    config.eos_token_id = eos if eos else None
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos), None)
    return config


def dtype_on_disk(base: str, revision: str | None = None) -> torch.dtype | None:
    """Return the dtype in the base model's config.json; None if it is missing or cannot be read."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(base, revision=revision)
    except OSError:  # deleted from disk or hub: use the trained dtype, which is lossless
        return None
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def describe_model(model: Any, tokenizer: Any, folder: Path, *, base: str) -> None:
    """Write all files of an export except the weights; also makes a checkpoint folder loadable."""
    if hasattr(model, "peft_config"):
        model.peft_config[ADAPTER].save_pretrained(folder)
        change_json(folder / "adapter_config.json", base_model_name_or_path=loadable_base(base))
    else:
        _save_config(model, folder)
    generation_config(model, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _save_config(model: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # a scorer's config still names the class of its trunk
    config.save_pretrained(folder)


def _save_adapter(model: Any, folder: Path, base: str) -> None:
    # Never save base embeddings: they are not resized, and peft would query the hub to find out.
    model.save_pretrained(folder, selected_adapters=[ADAPTER], save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's unfilled model card
    change_json(folder / "adapter_config.json", base_model_name_or_path=base)


def _full_model(model: Any, dtype: torch.dtype | None) -> Any:
    """Return a transformers model whose attributes may be set without changing `model`; weights may be shared."""
    if hasattr(model, "peft_config"):
        # Merge in float32, then round once.
        merged = _cpu_copy(model, torch.float32).merge_and_unload(safe_merge=True, adapter_names=[ADAPTER])
        return merged.to(dtype or model.dtype)
    return copy.copy(model) if dtype in (None, model.dtype) else _cpu_copy(model, dtype)


def _cpu_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy to main memory, because training may have filled the GPU; tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        data = parameter.detach().to("cpu", dtype if parameter.is_floating_point() else parameter.dtype, copy=True)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, memo)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Export the model of a checkpoint, sharded or not, as a folder that other tools can load. Needs no GPU."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run folder (its newest checkpoint is exported) or a checkpoint in it."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not exist."""
    merge_lora: bool = False
    """Write merged weights instead of an adapter. A run with --merge-lora is always merged."""
    trust_remote_code: bool = False
    """Allow running the Python code that comes with the model. The run's config.yaml does not set this."""


def export_checkpoint(cfg: ExportConfig) -> Path:
    """Export tensor by tensor, without a GPU or memory for the full model; return the checkpoint."""
    out = Path(cfg.out).expanduser()
    if out.exists():
        raise UserError(f"out={cfg.out}: already exists; choose a new folder")
    run, checkpoint = find_checkpoint(cfg.source)
    settings = load_config(run / "config.yaml")
    _, base, _, revision = find_model(str(settings["model"]), settings.get("revision"))
    weights = stored_tensors(checkpoint).below("weights/")
    adapter = checkpoint / "adapter_config.json"
    merge = cfg.merge_lora or bool(settings.get("merge_lora"))
    if adapter.exists() and json.loads(adapter.read_text())["task_type"] in SCORER_TASKS:
        raise UserError(
            f"source={cfg.source}: adapters of reward models cannot be exported; finish the run and use its final/"
        )
    with atomic_folder(out, "out") as tmp:
        for path in checkpoint.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name not in OF_TRAINING:
                shutil.copy(path, tmp / path.name)
        if adapter.exists() and not merge:
            specs = aligned(specs_of(weights.records))
            write_tensors(tmp / "adapter_model.safetensors", specs, (weights.read(name) for name in specs))
            change_json(tmp / "adapter_config.json", inference_mode=True)
            return checkpoint
        (tmp / "adapter_config.json").unlink(missing_ok=True)
        lm = skeleton(checkpoint, base, revision, trust_remote_code=cfg.trust_remote_code)
        trained_dtype = next(iter(weights.records.values())).dtype
        exported = ExportedModel(lm, dtype_on_disk(base, revision) or trained_dtype, getter(weights, base, revision))
        write_model(tmp, exported)
        _save_config(lm, tmp)
        finish_config(tmp, exported.dtype)
    return checkpoint


def find_checkpoint(source: str) -> tuple[Path, Path]:
    """Return the run folder and an undamaged checkpoint in it."""
    folder = Path(source).expanduser().resolve()
    if (folder / MANIFEST).exists():
        if problem := find_problem(folder):
            raise UserError(f"source={source}: damaged, {problem}; pass another checkpoint")
        run, checkpoint = folder.parents[1], folder
    else:
        run, checkpoint = folder, latest_valid(folder / "checkpoints", log)
    if checkpoint is None or not (run / "config.yaml").is_file():
        raise UserError(f"source={source}: not a run folder with a checkpoint, nor a checkpoint in a run folder")
    return run, checkpoint


def skeleton(checkpoint: Path, base: str, revision: str | None, *, trust_remote_code: bool) -> Any:
    """Build the model of a checkpoint on the meta device, adapters included."""
    import transformers

    adapter = checkpoint / "adapter_config.json"
    source = base if adapter.exists() else checkpoint
    try:
        config = transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if kind is None:
                lm = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            else:
                lm = kind(config)
    except Exception as error:  # damaged files and remote code make transformers raise anything
        raise UserError(f"model={source}: cannot be built: {load_error(error, str(source))}") from None
    with torch.device("meta"):
        if adapter.exists():
            from peft import PeftConfig, get_peft_model

            check_patterns(str(checkpoint), [name for name, _ in lm.named_modules()])
            lm = get_peft_model(lm, PeftConfig.from_pretrained(checkpoint)).get_base_model()
    return lm


def getter(weights: TensorFiles, base: str, revision: str | None) -> Callable[[str], Tensor]:
    """Return a function that reads a skeleton's tensor from the checkpoint or, if untrained, the base model's files."""
    files: list[TensorFiles] = []

    def get(name: str) -> Tensor:
        saved = f"base_model.model.{adapter_name(name)}"
        for key in (name, saved, saved.replace(".modules_to_save.", ".")):
            if key in weights.records:
                return weights.read(key)
        files[:] = files or [model_tensors(base, revision)]
        plain = name.replace(".base_layer.", ".")
        if plain not in files[0].records:
            raise UserError(f"model={base}: its files have no {plain}; export the adapter and merge it with peft")
        return files[0].read(plain)

    return get
