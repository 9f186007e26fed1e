"""Tiny tokenizers made in code: byte level, so every text has ids, plus the special tokens templates need."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = {
    "plain": ["<|endoftext|>"],
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<|endoftext|>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
}


def make_tokenizer(kind: str = "chatml", *, bos: str | None = None, merges: tuple[tuple[str, str], ...] = ()):
    """Byte-level BPE with only the given merges; with bos, plain text is opened by it as Llama's tokenizers do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*alphabet, *(left + right for left, right in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS[kind])
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>", bos_token=bos
    )


def make_metaspace_tokenizer(*, bos: bool = True):
    """As SentencePiece makes them: a space is part of the word after it, and every text is opened with one."""
    words = ["\u2581Once", "\u2581upon", "\u2581a", "\u2581time", "\u2581ab", "bc"]
    letters = ["\u2581", *"Onceupatimb=+245 "]
    pieces = dict.fromkeys(["<unk>", "<s>", "</s>", *letters, *words])
    scores = [(piece, -1.0 if piece in words else -5.0) for piece in pieces]
    core = Tokenizer(models.Unigram(scores, unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def tokenizer_of():
    return make_tokenizer


@pytest.fixture
def metaspace_of():
    return make_metaspace_tokenizer


@pytest.fixture
def chatml():
    """A tokenizer with the chatml template set."""
    from data.chat import set_chat_template

    tokenizer = make_tokenizer("chatml")
    set_chat_template(tokenizer, "chatml")
    return tokenizer
