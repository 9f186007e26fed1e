"""Reference log-probs for the offline methods: from a frozen model at every step, or precomputed and cached on disk."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.errors import UserError
from data.packing import Batch, Item, make_batches, to_device
from losses.types import wide
from rollout.model_folder import resolve_model
from trainer.config.blocks import LoraConfig, ModelConfig, ParallelConfig, ReferenceConfig, RunConfig
from trainer.files.atomic_folder import sync
from trainer.parallel.comm import all_count, all_gather, balanced_shards, data_rank, data_size, is_main, world_size
from trainer.parallel.dtensor import copy_into_shard, gather, reshard
from trainer.policy.adapters import ADAPTER, REFERENCE
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, causal_lm, reference_logps, share_batches, token_logps
from trainer.policy.sharding import parallelize, to_device_and_pad


class Reference:
    def __init__(self, policy: Policy | None, table: dict[bytes, Tensor] | None = None) -> None:
        self.policy = policy  # None: no reference, log-probs are 0
        self.table = table  # precomputed log-probs of each sequence, keyed by key_of

    def token_logps(self, batch: Batch, items: Sequence[Item]) -> Tensor:  # (N,)
        """Return the reference log-probs of a micro-batch's trained tokens."""
        if self.table is not None:
            return to_device(torch.cat([self.table[key_of(items[i])] for i in batch.rows]), batch.target.device)
        if self.policy is None:
            return torch.zeros(len(batch.target), device=batch.target.device)
        return reference_logps(self.policy, batch)


class MovingReference:
    """TR-DPO (Gorbatovski et al. 2024, arXiv:2404.09656): the reference slowly follows the policy.

        reference <- (1 - alpha) reference + alpha policy,   every `every` steps

    Its weights are in the checkpoint, because the base model cannot restore them. `exact` averages in float32: bfloat16
    would round the small steps of an exponential moving average away. With LoRA the reference is a second adapter.
    """

    def __init__(self, policy: Policy, alpha: float, every: int, *, exact: bool = False) -> None:
        self.policy, self.alpha, self.every = policy, alpha, every
        if policy.is_lora and policy.reference_adapter is None:
            add_reference_adapter(policy)
        self._average = {name: wide(x.detach()) for name, x in self._weights().items()} if exact else None

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if step % self.every == 0:
            reshard(self.policy.model)
            trained = dict(self.policy.model.named_parameters())
            for name, parameter in self.tensors().items():
                parameter.lerp_(trained[name].to(parameter.dtype), self.alpha)
            self._round()

    def state_dict(self) -> dict[str, float]:
        return {"alpha": self.alpha, "every": self.every}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the saved values: both come from the config, and only the tensors are restored."""

    def tensors(self) -> dict[str, Tensor]:
        return self._weights() if self._average is None else self._average

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.tensors().items():
            copy_into_shard(parameter, tensors[name])
        self._round()

    def _weights(self) -> dict[str, Tensor]:
        """The weights of the reference, by the names of the trained weights."""
        if self.policy.reference_adapter is not None:
            return adapter_copies(self.policy)
        reshard(self.policy.reference)  # no backward pass has done it
        return dict(self.policy.reference.named_parameters())

    def _round(self) -> None:
        """Copy the float32 average to the reference."""
        for name, parameter in self._weights().items() if self._average is not None else ():
            parameter.copy_(self._average[name])


def add_reference_adapter(policy: Policy) -> None:
    """Add a frozen copy of the adapter under training."""
    if policy.is_sharded:
        raise UserError(
            "teacher_update_rate: an adapter of a sharded model cannot be copied; use --parallel.mode replicate"
        )
    policy.model.add_adapter(REFERENCE, policy.model.peft_config[ADAPTER])
    policy.model.set_adapter(ADAPTER)
    policy.reference_adapter = REFERENCE
    trained = dict(policy.model.named_parameters())
    for name, copy in adapter_copies(policy).items():
        copy.data.copy_(trained[name].data)
        copy.requires_grad_(False)


def adapter_copies(policy: Policy) -> dict[str, Tensor]:
    """Parameters of the reference adapter, by the names of the trained ones."""
    parts = ((name.split("."), parameter) for name, parameter in policy.model.named_parameters())
    return {
        ".".join(ADAPTER if part == policy.reference_adapter else part for part in name): parameter
        for name, parameter in parts
        if policy.reference_adapter in name
    }


def wants_copy(cfg: ReferenceConfig, lora: LoraConfig) -> bool:
    """Return whether load_policy must load a reference; raise if settings contradict each other."""
    if cfg.ref == "adapter_off" and lora.r == 0:
        raise UserError("ref=adapter_off: there is no adapter to switch off; set --lora.r or use --ref copy")
    if cfg.ref == "adapter_off" and cfg.ref_model:
        raise UserError(
            f"ref_model={cfg.ref_model} has no effect with ref=adapter_off; use --ref copy or --ref precomputed"
        )
    if cfg.ref == "copy" and lora.r > 0 and not cfg.ref_model:
        raise UserError("ref=copy: with LoRA the base is the reference; use --ref adapter_off")
    if cfg.ref != "precomputed" and cfg.ref_cache != ReferenceConfig.ref_cache:  # not the default
        raise UserError(f"ref_cache={cfg.ref_cache} has no effect with ref={cfg.ref}; use --ref precomputed")
    if cfg.ref_model:
        with named_as("ref_model"):
            resolve_model(cfg.ref_model)  # before the policy is loaded
    return cfg.ref != "precomputed" and not cfg.ref_model


def build_reference(
    cfg: ReferenceConfig,
    model: ModelConfig,
    run: RunConfig,
    policy: Policy,
    items: Sequence[Item],
    parallel: ParallelConfig | None = None,
) -> Reference:
    """Build the reference before a checkpoint is restored: until then the policy equals its reference.

    Another model (ref_model) is sharded with the settings in `parallel` if the policy is sharded.
    """
    source = policy
    if cfg.ref_model:
        source = load_frozen("ref_model", cfg.ref_model, model, policy, parallel)
        if cfg.ref != "precomputed":
            share_batches(policy, source)
            policy.companions.append(source)
            return Reference(dataclasses.replace(source, reference=source.model))
    if cfg.ref == "precomputed":
        return Reference(None, precompute(Path(cfg.ref_cache).expanduser(), run, source, items))
    return Reference(policy)


@contextmanager
def named_as(setting: str) -> Iterator[None]:
    """Context manager: start errors with `setting=NAME` instead of model=NAME, as load_policy does."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise UserError(f"{setting}={text[6:]}" if text.startswith("model=") else text) from None


def load_frozen(
    setting: str,
    name: str,
    model: ModelConfig,
    policy: Policy,
    parallel: ParallelConfig | None,
    *,
    same_tokens: bool = True,
) -> Policy:
    """Load another model, frozen, in the policy's compute_dtype; sharded if the policy is sharded."""
    with named_as(setting):
        is_adapter = (Path(resolve_model(name)) / "adapter_config.json").exists()
        dtype = "bfloat16" if policy.compute_dtype == torch.bfloat16 and not is_adapter else "float32"
        other = model.for_model(name, merge_lora=False, load_in_4bit=False, fp8_base=False, trained_dtype=dtype)
        source = load_policy(other, LoraConfig(), policy.device, with_reference=False, load_now=not policy.is_sharded)
    if is_adapter:  # merge in float32, then round once; buffers (rotary frequencies) keep their precision
        for parameter in source.model.parameters():
            parameter.data = parameter.data.to(policy.compute_dtype)
    if same_tokens:
        check_same_tokens(policy, source, f"{setting}={name}", model.model)
    source.model.requires_grad_(False)
    if policy.is_sharded:
        source = parallelize(dataclasses.replace(parallel, mode="fsdp"), source)
    source.model.eval()  # load_policy leaves it in training mode
    return source


def check_same_tokens(policy: Policy, other: Policy, setting: str, model: str) -> None:
    """Raise unless both tokenizers assign the same ids to the policy's tokens."""
    vocab = other.tokenizer.get_vocab()
    if any(vocab.get(token) != i for token, i in policy.tokenizer.get_vocab().items()):
        raise UserError(f"{setting}: token ids differ from model={model}; use a model with the same tokenizer")


def precompute(folder: Path, run: RunConfig, source: Policy, items: Sequence[Item]) -> dict[bytes, Tensor]:
    """Compute the log-probs of every distinct sequence, or read them from disk if model and data are the same."""
    distinct = list({key_of(item): item for item in items}.values())
    path = folder / f"{fingerprint(source, distinct)}.safetensors"
    if all_count(path.exists(), "precomputed log-probs", everyone=True) == world_size():
        flat = load_file(path)["logp"]
    else:
        flat = all_logps(run, source, distinct)
        if is_main():
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".tmp-{run.seed}")
            save_file({"logp": flat}, partial)
            sync(partial)
            partial.rename(path)
    logps = flat.split([sum(item.mask) for item in distinct])
    return {key_of(item): logp for item, logp in zip(distinct, logps, strict=True)}


def all_logps(run: RunConfig, source: Policy, items: Sequence[Item]) -> Tensor:  # (all trained tokens,)
    """Compute this rank's shard of the log-probs, then gather all of them."""
    shards = balanced_shards([len(item.ids) for item in items], data_size())
    logp = item_logps(run, source, [items[i] for i in shards[data_rank()]])
    gathered = all_gather(logp.to(source.device), "reference log-probs")
    logps: dict[int, Tensor] = {}
    for indices, flat in zip(shards, gathered, strict=True):
        logps |= zip(indices, flat.cpu().split([sum(items[i].mask) for i in indices]), strict=True)
    return torch.cat([logps[i] for i in range(len(items))])


@torch.no_grad()
def item_logps(run: RunConfig, source: Policy, items: Sequence[Item]) -> Tensor:  # (all trained tokens,)
    was_training = source.model.training
    source.model.eval()
    logps = values_of_items(run, source, items, lambda batch: token_logps(source, batch).logp.cpu(), share_prompt=True)
    source.model.train(was_training)
    return torch.cat([torch.zeros(0), *logps])


def values_of_items(
    run: RunConfig, policy: Policy, items: Sequence[Item], of_batch: Callable[[Batch], Tensor], *, share_prompt: bool
) -> list[Tensor]:
    """Return of_batch's values for the trained tokens of each item. All ranks call this together."""
    batches = make_batches(
        items, max_tokens=run.max_tokens_per_micro_batch,
        **policy.layout(packing=run.packing, share_prompt=share_prompt),
    )  # fmt: skip
    values: dict[int, Tensor] = {}
    for batch in to_device_and_pad(policy, batches):
        sizes = [sum(items[i].mask) for i in batch.rows]
        values |= zip(batch.rows, of_batch(batch).split(sizes), strict=True)
    return [values[i] for i in range(len(items))]


def key_of(item: Item) -> bytes:
    digest = hashlib.sha256(array.array("q", item.ids).tobytes())
    digest.update(bytes(item.mask))
    return digest.digest()


def fingerprint(source: Policy, items: Sequence[Item]) -> str:
    """Hash everything that the log-probs depend on: weights, model config, compute dtype, sequences."""
    digest = hashlib.sha256(str(source.compute_dtype).encode())
    settings = causal_lm(source.model).config.to_dict()
    settings.pop("_name_or_path", None)  # the path does not matter
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, parameter in source.model.named_parameters():
        digest.update(name.encode())
        digest.update(gather(parameter.detach()).cpu().flatten().view(torch.uint8).numpy().tobytes())
    for item in items:
        digest.update(key_of(item))
    return digest.hexdigest()[:32]
