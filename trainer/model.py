"""Load a policy and take token log-probs from it.

Trained weights are float32, or bfloat16 where asked for; matrix products run in `compute_dtype` (autocast when that is
bfloat16). Frozen weights (the base of a LoRA run, a reference copy) are held in `compute_dtype`. Dropout of the base
model is switched off, so that the log-probs of the same weights are the same numbers in the trainer and in the rollout
engine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.chat import set_chat_template
from data.formats.template_settings import check_kwargs
from data.packing import Batch, Item, make_batches
from data.strided import StridedBatch
from kernels.linear_logprob import LossFn, TokenLogps, linear_log_collision, linear_logprob, linear_logprob_loss
from rollout.servers.model_folder import BUILTIN, check_base, read_adapter, resolve_model
from trainer.adapters import add_adapter, attach_adapter, continue_adapter
from trainer.attention import attention_masks, choose_attention, is_sliced, load_name, part_of, row_multiple, uses_flex
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.config.errors import first_line, why
from trainer.files.tensor_files import TensorFiles
from trainer.meta_load import files_of, make_hollow
from trainer.parallel.comm import is_main, world_size
from trainer.parallel.dtensor import whole
from trainer.parallel.watch import say


@dataclass
class Policy:
    """A model under training, its tokenizer, and how to ask the reference."""

    model: nn.Module  # transformers causal LM, or peft's wrapper around one
    tokenizer: Any
    source: str  # hub id or folder the base weights came from
    device: torch.device
    compute_dtype: torch.dtype
    reference: nn.Module | None = None  # a frozen copy (full fine-tuning with a KL term)
    reference_adapter: str | None = None  # a frozen adapter beside the trained one (continuing a LoRA run)
    is_sharded: bool = False  # weights lie in shards over ranks, which must run the same forward passes
    reshard_after_forward: bool = True  # of sharded blocks
    reduce_once: bool = False  # gradients of sharded weights are added up over ranks after the last micro-batch alone
    files: TensorFiles | None = None  # of a model without numbers: spread() reads what each rank holds of it

    @property
    def context_length(self) -> int | None:
        return getattr(causal_lm(self.model).config.get_text_config(), "max_position_embeddings", None)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return self.compute_dtype if self.compute_dtype == torch.bfloat16 else None

    @property
    def generation_eos(self) -> int | list[int] | None:
        return getattr(causal_lm(self.model).generation_config, "eos_token_id", None)

    @property
    def row_multiple(self) -> int:
        """What make_batches must fill rows up to."""
        return row_multiple(causal_lm(self.model).config)

    @property
    def is_lora(self) -> bool:
        return hasattr(self.model, "peft_config")


def load_policy(
    cfg: ModelConfig, lora: LoraConfig, device: torch.device, *, with_reference: bool, whole: bool = False
) -> Policy:
    """With several processes the numbers stay in their files, for spread() to read; `whole` reads them at once."""
    check_adapters(cfg, lora)
    compute_dtype = pick_dtype(cfg.dtype, device)
    path = resolve_model(cfg.model)
    adapter = path if (Path(path) / "adapter_config.json").exists() else None
    base = read_adapter(path)["base_model_name_or_path"] if adapter else path
    trains_base = lora.r == 0
    base_dtype = held_dtype(cfg, compute_dtype) if trains_base else compute_dtype
    tokenizer = load_tokenizer(path, cfg)
    later = world_size() > 1 and not whole and not (adapter and trains_base)  # which merges numbers
    model, files = load_hollow(base, cfg, base_dtype, device) if later else (None, None)
    if files is None:
        model = load_causal_lm(base, cfg, base_dtype, device)
    policy = Policy(
        model=model, tokenizer=tokenizer, source=base, device=device, compute_dtype=compute_dtype, files=files
    )
    if adapter and trains_base:
        # peft froze the base to attach the adapter, and leaves it frozen.
        policy.model = attach_adapter(model, adapter).merge_and_unload().requires_grad_(True)
    elif adapter:
        policy.model = continue_adapter(model, adapter, lora)
        if with_reference:  # a frozen copy of the adapter, not the bare base
            policy.model.load_adapter(adapter, "reference", is_trainable=False)
            policy.reference_adapter = "reference"
    elif not trains_base:
        policy.model = add_adapter(model, lora)
    if with_reference and trains_base:
        if files is None:
            policy.reference = load_causal_lm(base, cfg, compute_dtype, device)
        else:
            policy.reference, _ = load_hollow(base, cfg, compute_dtype, device)
        if adapter:
            policy.reference.load_state_dict(policy.model.state_dict())
        policy.reference.eval().requires_grad_(False)
    if files is None:
        for model in (policy.model, policy.reference):
            if model is not None:
                model.to(device)
    if cfg.gradient_checkpointing:
        causal_lm(policy.model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.model.train()
    if files is None:
        check_logps(policy)
    if cfg.compile:
        for model in (policy.model, policy.reference):
            if model is not None:
                compile_blocks(causal_lm(model), base)
    return policy


def check_adapters(cfg: ModelConfig, lora: LoraConfig) -> None:
    """Refuse settings that have no effect with adapters, or without."""
    if cfg.merge_lora and lora.r == 0:
        raise ValueError("merge_lora=True: has no effect with lora.r=0, all weights; set --lora.r, or leave it out")
    if cfg.trained_dtype != "float32" and lora.r > 0:
        raise ValueError(f"trained_dtype={cfg.trained_dtype}: adapters are always float32; leave it out with --lora.r")


def held_dtype(cfg: ModelConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """Of weights that train."""
    if cfg.trained_dtype == "bfloat16" and compute_dtype != torch.bfloat16:
        raise ValueError("trained_dtype=bfloat16: products would be in float32 on this device; add --dtype bfloat16")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[cfg.trained_dtype]


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_tokenizer(path: str, cfg: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:  # the tokenizers library raises just that for a damaged file
        raise ValueError(f"model={cfg.model}: no tokenizer could be loaded: {why(error, path)}") from None
    set_chat_template(tokenizer, cfg.chat_template)
    check_kwargs(tokenizer, cfg.chat_template_kwargs)
    return tokenizer


def refuse_quantised(path: str, cfg: ModelConfig) -> None:
    from transformers import PretrainedConfig

    try:
        quantised = PretrainedConfig.get_config_dict(path)[0].get("quantization_config")
    except (OSError, ValueError):  # no config, or a broken one: loading the model says so better
        return
    if quantised:
        kind = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else quantised
        raise ValueError(
            f"model={cfg.model}: its weights are quantised ({kind}), which is not supported; take the full model, "
            "with --lora.r 16 where memory is short"
        )


def load_hollow(
    path: str, cfg: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Any, TensorFiles | None]:
    """The model without its numbers, and the files to read them from; None where they can only be loaded whole."""
    model = load_causal_lm(path, cfg, dtype, device, on_meta=True)
    files = files_of(model, path)
    if files is None:
        if is_main():
            say(f"model={cfg.model}: laid out otherwise in its files than in memory; every process loads all of it")
        return None, None
    make_hollow(model)
    return model, files


def load_causal_lm(
    path: str, cfg: ModelConfig, dtype: torch.dtype, device: torch.device, *, on_meta: bool = False
) -> nn.Module:
    """Weights in main memory, or none (on_meta); attention as `device` will run it."""
    import transformers
    from transformers import AutoModelForCausalLM

    attn_implementation = load_name(cfg.attn_implementation, device)
    check_base(path)
    refuse_quantised(path, cfg)
    if path in map(str, BUILTIN.values()) or not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # a bar is for long loads, watched on a terminal
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=cfg.trust_remote_code,
            use_safetensors=True,  # a .bin file is a pickle, and nothing is unpickled here
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **({"device_map": "meta"} if on_meta else {}),
        )
    except Exception as error:  # damaged files and their own code make transformers raise anything
        raise ValueError(f"model={cfg.model}: could not be loaded: {why(error, path)}") from None
    wrong = sorted(found["missing_keys"]) + sorted(name for name, *_ in found["mismatched_keys"])
    if wrong:  # transformers would fill them with random numbers and go on
        raise ValueError(
            f"model={cfg.model}: its weights do not fit its config.json: {len(wrong)} tensors are missing or have "
            f"another shape, {wrong[0]} for one; get both files from one source"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    choose_attention(model, cfg.attn_implementation, device)
    return model


def causal_lm(model: nn.Module) -> Any:
    """The transformers model, with or without peft around it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def blocks_of(lm: Any, source: str) -> nn.ModuleList:
    """The blocks of a transformers model: its list of as many modules as it says it has layers."""
    num_layers = lm.config.get_text_config().num_hidden_layers
    for child in lm.base_model.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise ValueError(f"model={source}: its {num_layers} blocks were not found, so there are no features to take")


def compile_blocks(lm: Any, source: str) -> None:
    """In place, so that names and hooks stay. Rows differ in length: sizes are compiled as unknowns."""
    for block in blocks_of(lm, source):
        block.compile(dynamic=True)


def token_logps(policy: Policy, batch: Batch, *, temperature: float = 1.0) -> TokenLogps:
    """Log-prob (with gradient) and entropy of every trained token of the batch, in the batch's order."""
    return _token_logps(policy, policy.model, batch, temperature)


def token_loss(policy: Policy, batch: Batch, loss_fn: LossFn, *, temperature: float = 1.0) -> tuple[Tensor, list[Any]]:
    """A loss that is a sum over trained tokens, with a third less work at the head than token_logps and its backward.

    `loss_fn(tokens, rows)` gets the log-probs of the trained tokens numbered `rows`, some at a time, and returns a
    scalar and anything else. Gives the sum of the scalars, to call backward() on, and a list of the rest.

    Where ranks share rows, each of them gets the loss of all tokens, and the third is not saved.
    """
    lm = causal_lm(policy.model)
    if is_sliced(lm.config):
        tokens = token_logps(policy, batch, temperature=temperature)
        loss, more = loss_fn(tokens, torch.arange(len(batch.target), device=policy.device))
        return loss + tokens.logp[:0].sum(), [more]  # also a loss that makes nothing of them has a backward pass
    hidden = predictor_states(policy, lm, batch)
    return linear_logprob_loss(
        hidden, target=batch.target, loss_fn=loss_fn, temperature=temperature, ignore_index=None, **head_of(lm)
    )


@torch.no_grad()
def reference_logps(policy: Policy, batch: Batch, *, temperature: float = 1.0) -> Tensor:  # (N,)
    with as_reference(policy) as model:
        return _token_logps(policy, model, batch, temperature).logp


@contextlib.contextmanager
def as_reference(policy: Policy) -> Iterator[nn.Module]:
    """The model whose log-probs the KL term compares with."""
    if policy.reference is not None:
        yield policy.reference
    elif policy.reference_adapter is not None:
        was_training = policy.model.training
        policy.model.set_adapter(policy.reference_adapter)
        policy.model.eval()  # the saved adapter may have dropout
        try:
            yield policy.model
        finally:
            policy.model.set_adapter("default")
            policy.model.train(was_training)
    else:
        assert policy.is_lora, "load_policy(with_reference=True) was not asked for a reference"
        with policy.model.disable_adapter():
            yield policy.model


def _token_logps(policy: Policy, model: nn.Module, batch: Batch, temperature: float) -> TokenLogps:
    lm = causal_lm(model)
    part = part_of(lm.config, batch)
    hidden = predictor_states(policy, lm, part.batch, part.num_keys)
    own = linear_logprob(hidden, target=part.batch.target, temperature=temperature, ignore_index=None, **head_of(lm))
    return TokenLogps(*part.whole(*own))


@torch.no_grad()
def token_log_collision(policy: Policy, batch: Batch) -> Tensor:  # (N,)
    """log sum_v p(v)^2 of the distribution that each trained token was drawn from."""
    lm = causal_lm(policy.model)
    part = part_of(lm.config, batch)
    (found,) = part.whole(linear_log_collision(predictor_states(policy, lm, part.batch, part.num_keys), **head_of(lm)))
    return found


def predictor_states(policy: Policy, lm: Any, batch: Batch, num_keys: int | None = None) -> Tensor:  # (N, D)
    """Last hidden states at the positions that predict trained tokens."""
    return as_head_takes(policy, hidden_states(policy, lm, batch, num_keys)[batch.index])


def hidden_states(
    policy: Policy, lm: Any, batch: Batch | StridedBatch, num_keys: int | None = None
) -> Tensor:  # (R * T, D)
    """Last hidden states at all positions of a batch, row by row; of a slice, where its rows have more keys."""
    with torch.autocast(policy.device.type, policy.compute_dtype, enabled=policy.autocast_dtype is not None):
        hidden = lm.base_model(
            input_ids=batch.input_ids,
            attention_mask=attention_masks(lm.config, batch, num_keys),
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state  # (R, T, D)
    return hidden.flatten(0, 1)


def as_head_takes(policy: Policy, hidden: Tensor) -> Tensor:
    """Autocast leaves the last norm in float32; the engine's head runs in compute_dtype, and so must ours."""
    return hidden if policy.autocast_dtype is None else hidden.to(policy.autocast_dtype)


def head_of(lm: Any) -> dict[str, Any]:
    """The output head as the log-prob kernels take it: weight, bias, and what the architecture does to its logits."""
    head, config = lm.get_output_embeddings(), lm.config.get_text_config()
    return {
        "weight": whole(head.weight),
        "bias": getattr(head, "bias", None),
        "scale": getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
        "softcap": getattr(config, "final_logit_softcapping", None),
    }


def unsupported(policy: Policy) -> str:
    """The end of the sentence that refuses a model."""
    flex = uses_flex(causal_lm(policy.model).config)
    return "this architecture is not supported" + (" with flex; try --attn-implementation sdpa" if flex else "")


@torch.no_grad()
def check_logps(policy: Policy) -> None:
    """Short sequences packed together must score as they do alone through the model's own forward.

    Two of them share a prompt. Catches what we cannot list: an architecture that scales its logits in a way of its
    own, or that lets one packed sequence see the other, or only what lies next to it (recurrent layers do).
    """
    vocab = causal_lm(policy.model).get_output_embeddings().weight.shape[0]
    alone, prompt, *completions = (
        [(step * i + 1) % vocab for i in range(n)] for step, n in ((7, 5), (5, 4), (3, 3), (11, 2))
    )
    items = [Item(alone, [False] + [True] * (len(alone) - 1))]
    items += [Item(prompt + ids, [False] * len(prompt) + [True] * len(ids), len(prompt)) for ids in completions]
    (batch,) = make_batches(items, max_tokens=64, share_prompt=True, multiple=policy.row_multiple)
    batch = batch.to(policy.device)
    policy.model.eval()
    try:
        ours = token_logps(policy, batch).logp
    except torch.OutOfMemoryError:
        raise  # says nothing about its code
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # whatever its own code raises
        raise ValueError(
            f"model={policy.source}: packed sequences fail in its own code ({type(error).__name__}: "
            f"{first_line(error)}); {unsupported(policy)}"
        ) from None
    own = []
    with torch.autocast(policy.device.type, policy.compute_dtype, enabled=policy.autocast_dtype is not None):
        for row in batch.rows:
            ids = torch.tensor([items[row].ids], device=policy.device)
            logp = policy.model(input_ids=ids).logits[0, :-1].float().log_softmax(dim=-1)
            trained = torch.tensor(items[row].mask[1:], device=policy.device)
            own.append(logp.gather(1, ids[0, 1:, None]).squeeze(1)[trained])
    policy.model.train()
    gap = (ours - torch.cat(own)).abs()  # (N,)
    limit = 1e-3 if policy.compute_dtype == torch.float32 else 0.25  # bfloat16 rounds log-probs of size 10 by 0.03
    if not gap.max() < limit:
        packed = gap[batch.sequence == 0].max() < limit
        what = "log-probs of completions behind one prompt" if packed else "packed log-probs"
        raise ValueError(
            f"model={policy.source}: {what} differ from its own forward by {gap.max():.3g} (limit {limit}); "
            f"{unsupported(policy)}"
        )
