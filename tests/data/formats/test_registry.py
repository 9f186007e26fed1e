"""User transforms, ShareGPT rows and format options."""

from __future__ import annotations

import json
import textwrap

import pytest

from data.rows.prompts import load_prompts
from data.rows.sft import load_examples

MODULE = """
from dataclasses import dataclass

@dataclass
class Count:
    rows: int = 0

def pair(cfg, **kwargs):
    def transform(example, tokenizer=None):
        return {"prompt": cfg["prefix"] + example["problem"], "length": len(tokenizer("abc")["input_ids"])}
    return transform, {"remove_columns": ["problem", "not_there"]}

def bare(cfg):
    return lambda example: {"prompt": example["problem"], "problem": "kept"}

def with_processing_class(cfg):
    def transform(example, processing_class=None):
        return {"prompt": example["problem"] + processing_class.eos_token}
    return transform, {"remove_columns": "__all__"}

def one_removed(cfg):
    return (lambda example: {"prompt": example["problem"]}), {"remove_columns": "problem"}

def sft(cfg):
    return lambda example: {"prompt": example["problem"], "completion": "!"}

def no_prompt(cfg):
    return lambda example: {"other": 1}

def raises(cfg):
    return lambda example: {"prompt": example["nothing"]}

def wrong(cfg):
    return lambda example: "text"

def batched(cfg):
    def transform(batch, tokenizer=None):
        assert tokenizer is not None
        return {"prompt": [f"{len(batch['problem'])}: {text}" for text in batch["problem"]]}
    return transform, {"batched": True, "batch_size": 2, "remove_columns": ["problem"], "num_proc": 4}

def twice(cfg):
    def transform(batch):
        return {"prompt": [text + end for text in batch["problem"] for end in "ab"]}
    return transform, {"batched": True, "remove_columns": ["problem", "level"]}

def odd_setting(cfg):
    return (lambda example: example), {"with_indices": True}

def uneven(cfg):
    return (lambda batch: {"prompt": ["a", "b"]}), {"batched": True}

def not_lists(cfg):
    return (lambda batch: {"prompt": "a"}), {"batched": True}

def not_a_factory(example):
    return {"prompt": "x"}

def broken_factory(cfg):
    raise RuntimeError("no such luck")

def numbered(cfg, dataset_idx):
    return lambda example: {"prompt": f"{dataset_idx}: {example['problem']}"}

def all_kwargs(cfg, **kwargs):
    return lambda example: {"prompt": f"{sorted(kwargs.items())}"}

NUMBER = 3
"""


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_transforms.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "my_pkg" / "inner.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "data.jsonl").write_text(json.dumps({"problem": "2+2=", "level": 3}) + "\n")
    return "data.jsonl"


@pytest.mark.parametrize("module", ["my_transforms", "my_pkg.inner"])
def test_pair_with_tokenizer_and_removed_columns(rows, chatml, module):
    (prompt,) = load_prompts([rows], chatml, data_format=f"{module}.pair", cfg={"prefix": "Q: "})
    assert prompt.prompt == "Q: 2+2="
    assert prompt.columns == {"level": 3, "length": 3}


def test_bare_function_and_format_in_the_spec(rows, chatml):
    (prompt,) = load_prompts([f"{rows}:format=my_transforms.bare"], chatml)
    assert prompt.prompt == "2+2=" and prompt.columns == {"problem": "kept", "level": 3}


def test_processing_class_and_remove_all(rows, chatml):
    (prompt,) = load_prompts([rows], chatml, data_format="my_transforms.with_processing_class")
    assert prompt.prompt == "2+2=<|endoftext|>" and prompt.columns == {}


def test_one_removed_column_as_a_string(rows, chatml):
    (prompt,) = load_prompts([rows], chatml, data_format="my_transforms.one_removed")
    assert prompt.columns == {"level": 3}


def test_sft_transform(rows, chatml):
    (example,) = load_examples([rows], chatml, data_format="my_transforms.sft")
    assert chatml.decode(example.ids) == "2+2=!<|endoftext|>"
    assert example.mask == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_prompt", "data.jsonl:1: has neither 'prompt' nor 'messages'"),
        ("raises", "data.jsonl:1: data_format=my_transforms.raises failed on this row .KeyError: 'nothing'"),
        ("wrong", "data.jsonl:1: data_format=my_transforms.wrong returned str"),
        ("odd_setting", "'with_indices' is unknown; only batch_size, batched, remove_columns are"),
        (
            "uneven",
            "data.jsonl:1: data_format=my_transforms.uneven .* different lengths .problem: 1, ",
        ),
        ("not_lists", "data.jsonl:1: data_format=my_transforms.not_lists is batched; .* a dict of lists"),
        ("not_a_factory", "data_format=my_transforms.not_a_factory: returned dict"),
        ("broken_factory", "failed when called with the config .RuntimeError: no such luck"),
        ("missing", "data_format=my_transforms.missing: .*my_transforms.py has no 'missing'"),
        ("numbred", "has no 'numbred'; did you mean 'numbered'"),
        ("NUMBER", "data_format=my_transforms.NUMBER: must be a function, not int"),
    ],
)
def test_bad_transforms(rows, chatml, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts([rows], chatml, data_format=f"my_transforms.{name}")
    assert "\n" not in str(caught.value)


def test_batched_transforms_work_as_in_datasets_map(rows, chatml, tmp_path):
    problems = [{"problem": f"{n}"} | ({"level": n} if n else {}) for n in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    prompts = load_prompts([rows], chatml, data_format="my_transforms.batched")
    assert [prompt.prompt for prompt in prompts] == ["2: 0", "2: 1", "1: 2"]
    assert [prompt.columns for prompt in prompts] == [{"level": None}, {"level": 1}, {"level": 2}]
    assert [prompt.source for prompt in prompts] == ["data.jsonl:1", "data.jsonl:2", "data.jsonl:3"]
    prompts = load_prompts([rows], chatml, data_format="my_transforms.twice")
    assert [prompt.prompt for prompt in prompts] == ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert prompts[3].source == "data.jsonl:1 to data.jsonl:3#4" and prompts[3].columns == {}


SHARED = [
    {"from": "human", "value": "2+2?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "It is 4."},
]
SHARED_TEXT = (
    "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    "<|im_start|>assistant\nCALL add<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
    "<|im_start|>assistant\nIt is 4.<|im_end|>\n"
)


SHAREGPT_ROWS = [
    ({"conversations": SHARED, "system": "Be brief"}, ""),
    ({"messages": [{"from": "system", "value": "Be brief"}, *SHARED]}, ""),
    ({"conversations": SHARED, "system": "Be brief"}, ":format=sharegpt"),
    ({"dialog": SHARED, "system": "Be brief"}, ":format=sharegpt,field_messages=dialog"),
    ({"a": {"b": SHARED}, "system": "Be brief"}, ":format=chat_template,field_messages=a.b"),
]


def test_sharegpt_rows(write, chatml):
    for row, suffix in SHAREGPT_ROWS:
        chatml.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }}{% endif %}"
            "<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        spec = f"{write(row)}{suffix}"
        (example,) = load_examples([spec], chatml)
        assert chatml.decode(example.ids) == SHARED_TEXT
        trained = [token for token, is_trained in zip(example.ids, example.mask, strict=True) if is_trained]
        assert chatml.decode(trained) == "CALL add<|im_end|>It is 4.<|im_end|>"
        (prompt,) = load_prompts([spec], chatml)
        turns = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "2+2?"}]
        assert prompt.prompt == turns and "a.b" not in prompt.columns


def test_malformed_sharegpt_messages_are_rejected(write, chatml):
    bad = [
        ({"from": "narrator", "value": "x"}, "from='narrator' is unknown; use one of human, "),
        ({"from": "gpt", "value": None}, "value is None"),
        ({"from": "function_call", "value": "add(2)"}, "function_call is not JSON"),
    ]
    for turn, message in bad:
        with pytest.raises(ValueError, match=rf"rows.jsonl:1: conversations\[1\]: {message}"):
            load_examples([write({"conversations": [SHARED[0], turn]})], chatml)


def test_format_options_of_one_data_entry(write, chatml):
    """Nested names, keys and roles per entry; an option without effect is an error."""
    turns = [{"who": "person", "says": "2+2?"}, {"who": "bot", "says": "4"}]
    one, two = write({"request": {"input": turns}}, name="one.jsonl"), write({"prompt": "3+3?"}, name="two.jsonl")
    options = "field_messages=request.input,role_key=who,content_key=says,roles=user=person|human,assistant=bot"
    first, second = load_prompts([f"{one}:format=chat_template,{options}", two], chatml)
    assert first.prompt == [{"role": "user", "content": "2+2?"}] and second.prompt == "3+3?"
    for spec, message in {
        f"{two}:field_messages=x": "field_messages=x has no effect on format=auto; it is for chat",
        f"{one}:format=chat_template,prompt_format=Q{{prompt}}": "no format of this method reads it",
        f"{one}:format=chat_template,roles=usr=person": "role 'usr' is unknown",
        f"{one}:format=chat_template,field_messages=request.output": "has no 'request.output'",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_prompts([spec], chatml)


def test_a_null_column_is_reported_as_null(write, chatml):
    path = write({"question": None, "answer": "4"})
    with pytest.raises(ValueError, match="rows.jsonl:1: 'question' is null"):
        load_prompts([f"{path}:format=question_answer"], chatml)
    with pytest.raises(ValueError, match=r"none of 'messages', .*its columns: question \(null\), answer"):
        load_examples([path], chatml)


def test_unimportable(rows, chatml, tmp_path):
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    for name, message in {
        "nowhere_at_all.fn": "no module 'nowhere_at_all'",
        "broken_module.fn": r".*SyntaxError: .*\(broken_module.py, line 1\)",
    }.items():
        with pytest.raises(ValueError, match=f"data_format={name}: {message}"):
            load_prompts([rows], chatml, data_format=name)


def test_the_factory_gets_the_index_of_its_data_entry(rows, chatml):
    first, second = load_prompts([rows, rows], chatml, data_format="my_transforms.numbered")
    assert (first.prompt, second.prompt) == ("0: 2+2=", "1: 2+2=")
    entries = [f"{rows}:format=my_transforms.bare", f"{rows}:format=my_transforms.all_kwargs"]
    assert load_prompts(entries, chatml)[1].prompt == "[('dataset_idx', 1)]"


def test_transforms_of_one_file_share_it_and_cannot_replace_a_strop_package(rows, chatml, tmp_path):
    source = """
    made = []
    def count(cfg):
        made.append(1)
        return lambda example: {"prompt": str(len(made))}
    """
    for name in ("counting", "data"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        prompts = load_prompts([rows, rows], chatml, data_format=f"{name}.count")
        assert [prompt.prompt for prompt in prompts] == ["2", "2"]
        assert load_prompts([rows], chatml, data_format=f"{name}.count")[0].prompt == "3", "not executed again"
    import data

    assert hasattr(data, "__path__"), "still the package"
