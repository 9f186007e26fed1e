"""Rebuild the built-in tiny model (`make tiny`): a byte tokenizer, random Llama weights, then strop's SFT recipe.

The recipe's training data is sloppy: it forgets all carries in 6 of 10 sums, and puts 2 of 10 results in brackets. The
model learns both ways of adding and prefers the wrong way, so GRPO with an exact verifier has something to improve.

`python -m trainer.tiny.build teacher` rebuilds trainer/tiny/teacher (builtin:tiny_teacher), the teacher of the
distillation demo: an adapter for this model, trained by the GRPO demo. Rebuild it after the model.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "make_tiny.yaml"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
         "chat_template.jinja")  # fmt: skip

TEACHER_FILES = ("adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEACHER_FLAGS = ("--method", "grpo", "--lora.r", "8", "--learning-rate", "2e-3")

# One token per role name keeps prompts short; all other text is bytes, so any text can be encoded.
WORDS = ("user", "assistant", "system")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

USAGE = """usage: python -m trainer.tiny.build [teacher | FLAG ...]

Rebuild trainer/tiny in place by training with trainer/recipes/make_tiny.yaml.
Flags: as for python -m trainer --method sft. teacher: rebuild trainer/tiny/teacher with the GRPO demo instead."""


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*SPECIAL, *symbols])}
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if pair not in merges:
                merges.append(pair)
            vocab.setdefault(word[:end], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512
    )
    fast.chat_template = (HERE.parents[1] / "data" / "templates" / "chatml.jinja").read_text()
    return fast


def make_model(tokenizer, seed: int = 0):
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def build_teacher() -> None:
    from trainer.__main__ import main as train

    folder = HERE / "teacher"
    with tempfile.TemporaryDirectory() as scratch:
        train([*TEACHER_FLAGS, "--output-dir", str(Path(scratch) / "run")])
        final = Path(scratch) / "run" / "final"
        for name in TEACHER_FILES:
            shutil.copyfile(final / name, folder / name)
        settings = json.loads((final / "adapter_config.json").read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = "builtin:tiny"  # not a local folder
    settings["target_modules"].sort()
    text = json.dumps(settings, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(f"{text}\n", encoding="utf-8")
    print(f"rebuilt {folder}")


def main() -> None:
    from trainer.__main__ import main as train

    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
        return
    if sys.argv[1:] == ["teacher"]:
        return build_teacher()
    with tempfile.TemporaryDirectory() as scratch:
        start, run = Path(scratch) / "random", Path(scratch) / "run"
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(start)
        tokenizer.save_pretrained(start)
        train(["--config", str(RECIPE), "--model", str(start), "--output-dir", str(run), *sys.argv[1:]])
        for name in FILES:
            shutil.copyfile(run / "final" / name, HERE / name)
    print(f"rebuilt {HERE}")


if __name__ == "__main__":
    main()
