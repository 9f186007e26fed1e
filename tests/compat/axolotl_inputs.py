"""What replaces an example's model and data: a tiny model with its special tokens, and rows with its columns."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.chat import DELIMITERS, TEMPLATES

# A part of a model's name -> its chat template; the first match counts.
NAMES = {
    "llama-3.": "llama3",
    "llama-3-": "llama3",
    "gemma": "gemma",
    "phi-4": "phi_4",
    "phi": "phi_3",
    "qwen3": "qwen3",
}
ENDS = {  # template -> (eos, bos) of the models it is for
    "llama3": ("<|eot_id|>", "<|begin_of_text|>"),
    "gemma": ("<eos>", "<bos>"),
    "phi_3": ("<|endoftext|>", "<s>"),
}
TURNS = (  # conversations: (role, text)
    (("user", "2 + 1"), ("assistant", "3")),
    (("system", "Answer with a number."), ("user", "2 + 2"), ("assistant", "4")),
    (("user", "2 + 3"), ("assistant", "5"), ("user", "and one more"), ("assistant", "6")),
    (("system", "Sei kurz.\nBitte."), ("user", " 2 + 4 "), ("assistant", "Das ist 6 \u2013 glaube ich.\n")),
)
ADDRESS = (
    "name",
    "split",
    "data_files",
    "ds_type",
    "revision",
    "trust_remote_code",
    "rows",
)  # where data is, with its path


def localised(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the model and the data of `folder`."""
    made = copy.deepcopy(dict(tree))
    made |= {"base_model": str(model_for(tree, folder.parent)), "output_dir": str(folder / "out")}
    for key in ("tokenizer_config", "base_model_config", "lora_model_dir", "revision_of_model"):
        if isinstance(made.pop(key, None), str) and key == "tokenizer_config":
            made[key] = made["base_model"]
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        given = [made[key]] if isinstance(made.get(key), (str, Mapping)) else made.get(key) or []
        parts = [{"path": part} if isinstance(part, str) else part for part in given]
        for number, part in enumerate(parts):
            file = folder / f"{key}{number}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows_for(part, tree)))
            parts[number] = {name: part[name] for name in part if name not in ADDRESS} | {"path": str(file)}
        if parts:
            made[key] = parts
    return made


def model_for(tree: Mapping[str, Any], folder: Path) -> Path:
    """The tiny model, with a chat template and every special token that the file names."""
    name = str(tree.get("chat_template"))
    if name not in DELIMITERS:
        model = str(tree.get("base_model")).lower()
        name = next((template for part, template in NAMES.items() if part in model), "chatml")
    named = [value for value in (tree.get("special_tokens") or {}).values() if isinstance(value, str)]
    return _make_model(name, tuple(dict.fromkeys([*named, *(tree.get("eot_tokens") or ())])), folder)


@functools.cache
def _make_model(name: str, tokens: tuple[str, ...], folder: Path) -> Path:
    import transformers
    from tokenizers import processors

    source = Path(__file__).parents[2] / "trainer" / "tiny"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    eos, bos = ENDS.get(name, ("<|im_end|>", None))
    tokens = (*DELIMITERS[name], eos, *([bos] if bos else []), *tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(tokens))})
    tokenizer.eos_token, tokenizer.chat_template = eos, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    if bos:
        tokenizer.bos_token = bos
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.eos_token_id, model.config.max_position_embeddings = tokenizer.eos_token_id, 1 << 17
    tokenizer.model_max_length = 1 << 17
    target = folder / f"model{len(list(folder.glob('model*')))}"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def rows_for(dataset: Mapping[str, Any], tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows with the columns and keys that the dataset's type and settings name."""
    if "rows" in dataset:
        return dataset["rows"]
    kind = dataset.get("type") or ""
    if isinstance(kind, Mapping):
        columns = {kind.get(f"field_{name}") or name: name for name in ("instruction", "input", "output", "system")}
        return [{column: f"{name} {n}" for column, name in columns.items()} for n in range(4)]
    if kind.startswith("alpaca") or kind == "jeopardy":
        rows = [{"instruction": f"Add {n}.", "input": f"{n} + 1" if n % 2 else "", "output": str(n + 1)}
                for n in range(4)]  # fmt: skip
        return [row | {"text": "", "category": "c", "question": "q", "answer": "a"} for row in rows]
    if not kind:  # rows that are tokenised already
        return [{"input_ids": [5, 6, 7, n], "attention_mask": [1] * 4, "labels": [-100, 6, 7, n]} for n in range(4, 8)]
    if kind == "completion" or "pretrain" in kind:
        column = dataset.get("field") or dataset.get("text_column") or "text"
        return [{column: f"{n} + 1 = {n + 1}. " * 20, "text": f"{n}" * 30} for n in range(8)]
    if kind.startswith("ebft") or "gsm8k" in kind:
        return [{"input": f"{n} + 1", "output": f"{n + 1}." * 20, "question": f"{n} + 1", "answer": f"#### {n + 1}"}
                for n in range(8)]  # fmt: skip
    if kind == "stepwise_supervised":
        steps = [[f"{n} + 1 = {n + 1}", f"so {n + 2}"] for n in range(4)]
        return [{"prompt": f"{n} + 2", "completions": steps[n], "labels": [True, n % 2 == 0]} for n in range(4)]
    return _conversations(dataset, tree, kind)


def _conversations(dataset: Mapping[str, Any], tree: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    keys = dict(dataset.get("message_property_mappings") or {})
    role_key = keys.get("role") or dataset.get("message_field_role") or "role"
    content_key = keys.get("content") or dataset.get("message_field_content") or "content"
    roles = (dataset.get("roles") or {}).items()
    aliases = {role: names if isinstance(names, str) else names[0] for role, names in roles}
    if role_key == "from" and not aliases:
        aliases = {"user": "human", "assistant": "gpt"}

    def message(role: str, text: str) -> dict[str, Any]:
        made = {role_key: aliases.get(role, role), content_key: text}
        if dataset.get("field_thinking"):
            made[dataset["field_thinking"]] = "I add." if role == "assistant" else None
        return made

    rows = []
    for turns in TURNS:
        messages = [message(*turn) for turn in turns]
        if not tree.get("rl") and not tree.get("reward_model"):
            rows.append({dataset.get("field_messages") or "messages": messages})
            continue
        column = dataset.get("field_messages") or "messages"
        chosen, rejected = messages[-1], message("assistant", "I do not know")
        prompt = next(text for role, text in turns if role == "user")
        row = {"prompt": prompt, "input": prompt, "completion": turns[-1][1], "label": len(rows) % 2 == 0}
        if kind.startswith("bradley"):
            row["system"] = turns[0][1] if turns[0][0] == "system" else ""
        names = dataset.get("field_chosen") or "chosen", dataset.get("field_rejected") or "rejected"
        if kind.endswith((".ultra", "argilla")):
            opening = [message("user", prompt)]
            sides = [[*opening, chosen], [*opening, rejected]]
        else:
            sides = [chosen, rejected] if tree.get("rl") and not kind.startswith("bradley") else ["4", "none"]
        rows.append(row | dict(zip(names, sides, strict=True)) | {column: messages[:-1]})
    return rows
