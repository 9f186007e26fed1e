"""User transforms, found from the working directory."""

from __future__ import annotations

import json
import textwrap

import pytest

from data.prompts import load_prompts
from data.sft import load_examples

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
    return (lambda example: example), {"batched": True}

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
        ("batched", "the setting 'batched' is not supported"),
        ("not_a_factory", "data_format=my_transforms.not_a_factory: returned dict"),
        ("broken_factory", "failed when called with the config .RuntimeError: no such luck"),
        ("missing", "data_format=my_transforms.missing: .*my_transforms.py has no 'missing'"),
        ("numbred", "has no 'numbred'; did you mean 'numbered'"),
        ("NUMBER", "data_format=my_transforms.NUMBER: is a int, not a function"),
    ],
)
def test_bad_transforms(rows, chatml, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts([rows], chatml, data_format=f"my_transforms.{name}")
    assert "\n" not in str(caught.value)


def test_unimportable(rows, chatml, tmp_path):
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    sentences = {
        "nowhere_at_all.fn": "there is no module 'nowhere_at_all', neither in .* nor installed; check the name",
        "broken_module.fn": r"cannot be imported \(SyntaxError: .*\(broken_module.py, line 1\)",
    }
    for name, sentence in sentences.items():
        with pytest.raises(ValueError, match=f"data_format={name}: {sentence}"):
            load_prompts([rows], chatml, data_format=name)


def test_the_factory_is_told_the_number_of_its_data_entry(rows, chatml):
    first, second = load_prompts([rows, rows], chatml, data_format="my_transforms.numbered")
    assert (first.prompt, second.prompt) == ("0: 2+2=", "1: 2+2=")
    entries = [f"{rows}:format=my_transforms.bare", f"{rows}:format=my_transforms.all_kwargs"]
    assert load_prompts(entries, chatml)[1].prompt == "[('dataset_idx', 1)]"


def test_transforms_of_one_file_share_it_and_cannot_replace_a_package_of_ours(rows, chatml, tmp_path):
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
