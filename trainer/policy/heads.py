"""Scorers: a language model's trunk with a small head, for reward models and process reward models.

    scorer = load_scorer(cfg.model, cfg.lora, device, kind="sequence")    # one number per sequence, at its last token
    scorer = load_scorer(cfg.model, cfg.lora, device, kind="token")       # two logits per token: wrong, right
    scores_at(scorer, batch)                                              # the head at every marked token of a batch

They are transformers' own classification models, so an export loads with AutoModelForSequenceClassification or
AutoModelForTokenClassification. Those take the last id that is not padding as the last token of a sequence, so a scorer
pads with a token that never ends a sequence: an end-of-text token that is also the padding token would be skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from data.chat import stop_ids
from data.errors import UserError
from data.packing import Batch, Item, make_batches
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.adapters import attach_adapter, wrap
from trainer.policy.attention import attention_masks, part_of
from trainer.policy.load import (
    check_adapters,
    check_offloading,
    checkpoint_blocks,
    find_model,
    held_dtype,
    load_causal_lm,
    load_model,
    load_tokenizer,
    pick_dtype,
    refuse_unfit,
    speed_up,
)
from trainer.policy.logps import Policy, causal_lm, refuse_if_failing, unsupported


class Kind(NamedTuple):
    auto_class: str  # of transformers
    labels: tuple[str, ...]
    task: str  # peft's name for it


KINDS = {
    "sequence": Kind("AutoModelForSequenceClassification", ("reward",), "SEQ_CLS"),
    "token": Kind("AutoModelForTokenClassification", ("wrong", "right"), "TOKEN_CLS"),
}
HUGE = 100.0  # no trained head has such weights; uninitialised memory does
NEW_PAD = "<|pad|>"


def load_scorer(
    cfg: ModelConfig,
    lora: LoraConfig,
    device: torch.device,
    *,
    kind: Literal["sequence", "token"],
    zero_head: bool = False,
) -> Policy:
    """A model with a scoring head; a head found in the folder is kept, else a new one is initialised, or is zero."""
    check_adapters(cfg, lora)
    check_offloading(cfg, device)
    if cfg.load_in_4bit:
        raise UserError("load_in_4bit=True: a reward model is exported merged, which needs the full base; leave it out")
    compute_dtype = pick_dtype(cfg.dtype, device)
    path, base, adapter = find_model(cfg.model)
    dtype = held_dtype(cfg, compute_dtype) if lora.r == 0 else compute_dtype
    tokenizer = load_tokenizer(path, cfg)
    model, is_new = load_classifier(base, cfg, dtype, KINDS[kind], device)
    if adapter:  # of a language model: merged into the trunk
        merged = attach_adapter(load_causal_lm(base, cfg, dtype, device), adapter).merge_and_unload()
        model.base_model.load_state_dict(merged.base_model.state_dict())
    set_padding(model, tokenizer)
    scorer = Policy(model=model, tokenizer=tokenizer, source=base, device=device, compute_dtype=compute_dtype)
    if lora.r:
        adapt_trunk(scorer, lora, KINDS[kind])
    head_of(scorer.model).float()  # its few weights stay float32
    scorer.model.to(device)
    if cfg.gradient_checkpointing:
        checkpoint_blocks(causal_lm(scorer.model), cfg, base, device)
    scorer.model.train()
    check_scores(scorer)  # a head of zeros would hide everything
    if is_new and zero_head:
        for parameter in head_of(scorer.model).parameters():
            nn.init.zeros_(parameter)
    speed_up(causal_lm(scorer.model), cfg, base, device)
    scorer.is_compiled = cfg.compile is True
    return scorer


def load_classifier(
    path: str, cfg: ModelConfig, dtype: torch.dtype, kind: Kind, device: torch.device
) -> tuple[Any, bool]:
    """The model, and whether its head is new."""
    with _quiet():
        model, unfit = load_model(kind.auto_class, path, cfg, dtype, device, num_labels=len(kind.labels))
    name = head_name(model, cfg.model)
    refuse_unfit(cfg, [key for key in unfit if not key.startswith(f"{name}.")])  # a head of another size is replaced
    is_new = bool(unfit) or is_garbage(getattr(model, name))
    if is_new:
        start_head(getattr(model, name), getattr(model.config, "initializer_range", None) or 0.02)
    model.config.id2label = dict(enumerate(kind.labels))
    model.config.label2id = {label: i for i, label in enumerate(kind.labels)}
    return model, is_new


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' warning that the head is new, which is intended here."""
    from transformers.utils import logging

    was = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(was)


def head_name(model: Any, shown: str) -> str:
    heads = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    if len(heads) != 1:
        raise UserError(f"model={shown}: {type(model).__name__} has no single linear head; this one is not supported")
    return heads[0]


def head_of(model: nn.Module) -> nn.Module:
    """The linear head, or peft's wrapper around it."""
    children = causal_lm(model).children()
    (head,) = (child for child in children if isinstance(child, nn.Linear) or hasattr(child, "modules_to_save"))
    return head


def is_garbage(head: nn.Linear) -> bool:
    """Whether the head was never trained: zeros from a file, or uninitialised memory."""
    weight = head.weight.detach()
    return not bool(weight.isfinite().all()) or float(weight.abs().max()) > HUGE or not bool(weight.any())


def start_head(head: nn.Linear, std: float) -> None:
    """Initialise in float32, so that a seed gives the same numbers for any model dtype."""
    with torch.no_grad():
        head.weight.copy_(nn.init.normal_(torch.empty(head.weight.shape), std=std))
    if head.bias is not None:
        nn.init.zeros_(head.bias)


def set_padding(model: Any, tokenizer: Any) -> None:
    """Pad with a token that ends no sequence, and set it in the config, where transformers reads it."""
    ends = set(stop_ids(tokenizer))
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        special = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i not in ends}
        named = [t for word in ("pad", "reserved", "unk") for t in special if word in t.lower()]
        if named:
            tokenizer.pad_token = named[0]
        else:
            tokenizer.add_special_tokens({"pad_token": NEW_PAD})
    if tokenizer.pad_token_id >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(tokenizer.pad_token_id + 1, mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def adapt_trunk(scorer: Policy, lora: LoraConfig, kind: Kind) -> None:
    """Adapters in the trunk; the head is fully trained."""
    name = head_name(scorer.model, scorer.source)
    if name in lora.target_modules:
        raise UserError(f"lora.target_modules={name}: the head is trained whole, not adapted; leave it out")
    scorer.model = wrap(scorer.model, lora, kind.task, exclude_modules=[name], modules_to_save=[name])


def scores_at(scorer: Policy, batch: Batch) -> Tensor:  # (N, number of labels) float32
    """Output of the head at each marked token (not at the one before it), in the batch's order."""
    model = causal_lm(scorer.model)
    assert batch.num_computed == batch.num_tokens, "behind a shared prompt the next place is not the next token"
    # index is that of the token before the marked one, in the same sequence.
    part = part_of(model.config, replace(batch, index=batch.index + 1))
    own = part.batch
    with torch.autocast(scorer.device.type, scorer.compute_dtype, enabled=scorer.autocast_dtype is not None):
        hidden = model.base_model(
            input_ids=own.input_ids,
            attention_mask=attention_masks(model.config, own, part.num_keys),
            position_ids=own.position_ids,
            use_cache=False,
        ).last_hidden_state  # (R, T, D)
    head = head_of(scorer.model)
    selected = hidden.flatten(0, 1)[own.index]  # (N, D)
    (scores,) = part.gather(head(selected.to(next(head.parameters()).dtype)))
    return scores


def marked_last(ids: list[int]) -> Item:
    """A sequence scored at its last token."""
    assert len(ids) > 1, ids
    return Item(ids=ids, mask=[False] * (len(ids) - 1) + [True])


@torch.no_grad()
def check_scores(scorer: Policy) -> None:
    """Two short sequences packed together must score as they do alone through the model's own forward.

    Refuses heads that are more than one product, models that attend ahead (encoders), recurrent models.
    """
    model = causal_lm(scorer.model)
    vocab = model.get_input_embeddings().weight.shape[0]
    spare = (model.config.pad_token_id + 1) % vocab
    sequences = [[(step * i + 1) % vocab for i in range(length)] for step, length in ((7, 5), (5, 7))]
    sequences = [[spare if token == model.config.pad_token_id else token for token in ids] for ids in sequences]
    scorer.model.eval()
    alone = []  # (labels,) each, or (T, labels)
    with torch.autocast(scorer.device.type, scorer.compute_dtype, enabled=scorer.autocast_dtype is not None):
        for ids in sequences:
            alone.append(scorer.model(input_ids=torch.tensor([ids], device=scorer.device)).logits[0].float())
    per_token = alone[0].ndim == 2
    items = [
        Item(ids=ids, mask=[False] + [True] * (len(ids) - 1)) if per_token else marked_last(ids) for ids in sequences
    ]
    (batch,) = make_batches(items, max_tokens=64, multiple=scorer.row_multiple)
    with refuse_if_failing(scorer):
        ours = scores_at(scorer, batch.to(scorer.device))
    scorer.model.train()
    want = torch.cat([alone[row][1:] if per_token else alone[row].unsqueeze(0) for row in batch.rows])
    gap = (ours - want).abs().max().item()
    limit = 1e-3 if scorer.compute_dtype == torch.float32 else 0.25
    if not gap < limit:
        raise UserError(
            f"model={scorer.source}: packed scores differ from its own forward by {gap:.3g} (limit {limit}); "
            f"{unsupported(scorer)}"
        )
