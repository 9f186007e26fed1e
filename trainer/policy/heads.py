"""Scorers: a language model's trunk with a small head, for reward models and process reward models.

    scorer = load_scorer(cfg.model, cfg.lora, device, kind="sequence")    # one score per sequence, at its last token
    scorer = load_scorer(cfg.model, cfg.lora, device, kind="token")       # two logits per token: wrong, right
    scores_at(scorer, batch)                                              # head output at every marked token

Scorers are transformers classification models, so an export loads with AutoModelForSequenceClassification or
AutoModelForTokenClassification. These models treat the last non-padding id as the last token of a sequence, so a scorer
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
from data.packing import Batch, Item
from data.user_code import PythonObject
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.metrics.startup import startup
from trainer.policy.adapters import attach_adapter, freeze_except, wrap
from trainer.policy.attention import rank_slice
from trainer.policy.load import (
    check_adapters,
    check_offloading,
    check_tokenizer,
    checkpoint_blocks,
    find_model,
    import_libraries,
    load_causal_lm,
    load_model,
    load_tokenizer,
    pick_dtype,
    reject_mismatched,
    speed_up,
    trained_dtype,
)
from trainer.policy.logps import (
    Policy,
    causal_lm,
    choose_layout,
    hidden_states,
    probe_batch,
    reject_gap,
    reject_if_failing,
    values_without_leak,
)


class Kind(NamedTuple):
    auto_class: str  # transformers class name
    labels: tuple[str, ...]
    task: str  # peft task type


KINDS = {
    "sequence": Kind("AutoModelForSequenceClassification", ("reward",), "SEQ_CLS"),
    "token": Kind("AutoModelForTokenClassification", ("wrong", "right"), "TOKEN_CLS"),
}
HUGE = 100.0  # weights above this are uninitialised memory, not a trained head
NEW_PAD = "<|pad|>"


def check_scorer(cfg: ModelConfig, lora: LoraConfig) -> None:
    """Raise for settings that a model with a scoring head does not support."""
    check_adapters(cfg, lora)
    if cfg.fp8_base:
        raise UserError("fp8_base=True: not supported for reward models; remove --fp8-base")
    if cfg.load_in_4bit:
        raise UserError(
            "load_in_4bit=True: a reward model is exported merged, which needs the full base; remove --load-in-4bit"
        )


def load_scorer(
    cfg: ModelConfig,
    lora: LoraConfig,
    device: torch.device,
    *,
    kind: Literal["sequence", "token"],
    zero_head: bool = False,
) -> Policy:
    """Load a model with a scoring head: the checkpoint's head, or a new head (random, or zeros with `zero_head`)."""
    import_libraries(lora)
    check_scorer(cfg, lora)
    check_offloading(cfg, device)
    if isinstance(cfg.model, PythonObject):
        raise UserError(f"model={cfg.model}: a scoring head is added to files; pass the model's folder or hub id")
    compute_dtype = pick_dtype(cfg.dtype, device)
    path, base, adapter, revision = find_model(cfg.model, cfg.revision)
    cfg = replace(cfg, revision=revision)
    dtype = trained_dtype(cfg, compute_dtype) if lora.r == 0 else compute_dtype
    tokenizer = load_tokenizer(path, cfg)
    model, is_new = load_classifier(base, cfg, dtype, KINDS[kind], device)
    if adapter:  # a language model's adapter: merge it into the trunk
        merged = attach_adapter(load_causal_lm(base, cfg, dtype, device), adapter).merge_and_unload()
        model.base_model.load_state_dict(merged.base_model.state_dict())
    check_tokenizer(cfg, tokenizer, model)
    set_padding(model, tokenizer)
    scorer = Policy(
        model=model, tokenizer=tokenizer, source=base, revision=revision, device=device, compute_dtype=compute_dtype
    )
    freeze_except(model, cfg.trained_parameters)
    if is_new and not all(p.requires_grad for p in head_of(model).parameters()):
        name = head_name(model, cfg.model)
        raise UserError(
            f"trained_parameters={' '.join(cfg.trained_parameters)}: the head {name} is new and must be trained; add "
            f"{name}"
        )
    if lora.r:
        adapt_trunk(scorer, lora, KINDS[kind])
    head_of(scorer.model).float()
    scorer.model.to(device)
    checkpoint_blocks(causal_lm(scorer.model), cfg, base, device)
    scorer.model.train()
    check_scores(scorer)  # before the head is zeroed, which would hide any difference
    if is_new and zero_head:
        for parameter in head_of(scorer.model).parameters():
            nn.init.zeros_(parameter)
    speed_up(causal_lm(scorer.model), cfg, base, device)
    scorer.is_compiled = cfg.compile is True
    startup.lap("weights")
    return scorer


def load_classifier(
    path: str, cfg: ModelConfig, dtype: torch.dtype, kind: Kind, device: torch.device
) -> tuple[Any, bool]:
    """Return the model and whether its head is new."""
    with _quiet():
        model, mismatched = load_model(kind.auto_class, path, cfg, dtype, device, num_labels=len(kind.labels))
    name = head_name(model, cfg.model)
    # A head of another size is replaced.
    reject_mismatched(cfg, [key for key in mismatched if not key.startswith(f"{name}.")])
    is_new = bool(mismatched) or is_untrained(getattr(model, name))
    if is_new:
        start_head(getattr(model, name), getattr(model.config, "initializer_range", None) or 0.02)
    model.config.id2label = dict(enumerate(kind.labels))
    model.config.label2id = {label: i for i, label in enumerate(kind.labels)}
    return model, is_new


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' warning about a new head."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def head_name(model: Any, source: str) -> str:
    heads = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    if len(heads) != 1:
        raise UserError(
            f"model={source}: {type(model).__name__} has {len(heads)} linear heads, and scorers need exactly 1; use "
            "another model"
        )
    return heads[0]


def head_of(model: nn.Module) -> nn.Module:
    """Return the linear head, or peft's wrapper around it."""
    children = causal_lm(model).children()
    (head,) = (child for child in children if isinstance(child, nn.Linear) or hasattr(child, "modules_to_save"))
    return head


def is_untrained(head: nn.Linear) -> bool:
    """Return whether the head was never trained: all zeros, or uninitialised memory."""
    weight = head.weight.detach()
    return not bool(weight.isfinite().all()) or float(weight.abs().max()) > HUGE or not bool(weight.any())


def start_head(head: nn.Linear, std: float) -> None:
    """Initialise in float32, so that the same seed gives the same weights for any model dtype."""
    with torch.no_grad():
        head.weight.copy_(nn.init.normal_(torch.empty(head.weight.shape), std=std))
    if head.bias is not None:
        nn.init.zeros_(head.bias)


def set_padding(model: Any, tokenizer: Any) -> None:
    """Pad with a token that never ends a sequence, and set it in the config, where transformers reads it."""
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
    """Add adapters to the trunk; the head is trained in full."""
    name = head_name(scorer.model, scorer.source)
    if name in lora.target_modules:
        raise UserError(f"lora.target_modules={name}: the head is trained in full, not adapted; remove {name}")
    scorer.model = wrap(
        scorer.model, lora, kind.task, exclude_modules=[name], modules_to_save=[name], revision=scorer.revision
    )


def scores_at(scorer: Policy, batch: Batch) -> Tensor:  # (N, labels) float32
    """Return the head's output at each marked token (not at the token before it), in the batch's order."""
    model = causal_lm(scorer.model)
    assert batch.num_computed == batch.num_tokens, "after a shared prompt, the next position is not the next token"
    # batch.index is the position before the marked token, in the same sequence.
    part = rank_slice(model.config, replace(batch, index=batch.index + 1))
    hidden = hidden_states(scorer, model, part.batch, part.num_keys)  # (R * T, D)
    head = head_of(scorer.model)
    (scores,) = part.gather(head(hidden[part.batch.index].to(next(head.parameters()).dtype)))
    return scores


def marked_last(ids: list[int]) -> Item:
    """Return a sequence that is scored at its last token."""
    assert len(ids) > 1, ids
    return Item(ids=ids, mask=[False] * (len(ids) - 1) + [True])


def check_scores(scorer: Policy) -> None:
    """Choose the layout of rows; raise if scores differ from transformers' forward in every layout.

    This rejects heads that are more than one matmul and models that attend ahead (encoders).
    """
    choose_layout(scorer, _check_scores)


@torch.no_grad()
def _check_scores(scorer: Policy) -> None:
    model = causal_lm(scorer.model)
    vocab = model.get_input_embeddings().weight.shape[0]
    spare = (model.config.pad_token_id + 1) % vocab
    sequences = [[(step * i + 1) % vocab for i in range(length)] for step, length in ((7, 5), (5, 7))]
    sequences = [[spare if token == model.config.pad_token_id else token for token in ids] for ids in sequences]
    alone = []  # (labels,) each, or (T, labels)
    with (
        reject_if_failing(),
        torch.autocast(scorer.device.type, scorer.compute_dtype, enabled=scorer.autocast_dtype is not None),
    ):
        for ids in sequences:
            alone.append(scorer.model(input_ids=torch.tensor([ids], device=scorer.device)).logits[0].float())
    per_token = alone[0].ndim == 2
    items = [
        Item(ids=ids, mask=[False] + [True] * (len(ids) - 1)) if per_token else marked_last(ids) for ids in sequences
    ]
    batch = probe_batch(scorer, items)
    packed = values_without_leak(scorer, batch, batch.rows[-1:], scores_at)
    want = torch.cat([alone[i][1:] if per_token else alone[i].unsqueeze(0) for i in batch.rows])
    reject_gap(scorer, packed, want, "packed scores" if scorer.packs else "scores")
