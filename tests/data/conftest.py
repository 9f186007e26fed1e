"""Tiny byte-level tokenizers built in code, with the special tokens that templates need."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = {
    "plain": ["<|endoftext|>"],
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<|endoftext|>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
    "qwen_25": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "phi_3": ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "phi_4": ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"],
    "harmony": ["<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>",
                "<|call|>"],
}  # fmt: skip


def make_tokenizer(kind: str = "chatml", *, bos: str | None = None, merges: tuple[tuple[str, str], ...] = ()):
    """Byte-level BPE with only the given merges; bos is prepended to plain text, as in Llama's tokenizers."""
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
    """Like SentencePiece: a space is part of the word after it, and one is prepended to every text."""
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
def write(tmp_path):
    """write(row, ...) writes a JSON lines file and returns its path."""

    def write_rows(*rows, name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write_rows


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


# Templates that imitate model families, written for these tests.
CALLS = (  # writes tools, calls, and a switch
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | string }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (style or '') }}{% endif %}"
)
QWEN3 = (  # keeps thoughts only after the last question; without thinking the prompt ends with an empty block
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{% set inside = parts[0].split('<think>')[-1] if parts | length > 1 else '' %}"
    "{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or inside).strip() + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
R1 = (  # opens a thought for the model, and removes thoughts from every turn
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>' + m.content.split('</think>')[-1].lstrip() + '<|im_end|>' }}"
    "{% else %}{{ '[' + m.role + ']' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}"
)


@pytest.fixture
def templated():
    """templated("R1") returns a tokenizer with that template."""

    def make(name: str):
        tokenizer = make_tokenizer("chatml")
        tokenizer.chat_template = {"CALLS": CALLS, "QWEN3": QWEN3, "R1": R1}.get(name, name)
        return tokenizer

    return make
