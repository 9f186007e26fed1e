"""The table of axolotl's keys, and what a file becomes: methods, rows, defaults, blocks, refusals."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from trainer.cli import parse
from trainer.config.blocks import LoraConfig
from trainer.translate.axolotl import is_axolotl, translate
from trainer.translate.axolotl_table import TABLE
from trainer.translate.keys import find

KEYS = Path(__file__).parent / "axolotl_keys.tsv"  # key, RL and reward files of 23 with it, files of 250 with it
FIELDS = Path(__file__).parent / "axolotl_fields.txt"
BASE = {"base_model": "builtin:tiny", "learning_rate": "1e-5", "micro_batch_size": 2, "gradient_accumulation_steps": 4}
ROWS = [{"path": "rows.jsonl", "type": "chat_template.default"}]
CHAT = {"path": "chat.jsonl", "type": "chat_template"}


def tree_of(**settings) -> dict:
    return translate({**BASE, **settings}).tree


def test_every_key_of_axolotls_examples_is_in_the_table():
    keys = [line.split("\t")[0] for line in KEYS.read_text().splitlines()]
    assert len(keys) == 233
    found = {key: find(key, TABLE) for key in keys}
    assert [key for key, entry in found.items() if entry is None] == []
    counts = Counter(entry.outcome for entry in found.values())
    assert counts["translated"] > counts["no effect"] > counts["rejected"] > 0
    assert all(entry.text for entry in TABLE.values())


def test_every_field_of_axolotls_schema_is_in_the_table():
    fields = [line for line in FIELDS.read_text().splitlines() if not line.startswith("#")]
    assert len(fields) == 896
    assert [name for name in fields if find(name, TABLE) is None] == []


def test_a_refusal_says_what_to_do():
    for key, entry in TABLE.items():
        if entry.outcome == "rejected":
            assert any(word in entry.text for word in ("remove", "use ", "write", "name ", "rename")), key


@pytest.mark.parametrize(
    ("tree", "theirs"),
    [
        ({"base_model": "m"}, True),
        ({"rl": "dpo", "datasets": []}, True),
        ({"sequence_len": 4, "micro_batch_size": 1}, True),
        ({"method": "dpo", "model": "m"}, False),
        ({"rl": "dpo", "lora": {"r": 4}}, False),  # a mixture gets our hints
        ({}, False),
    ],
)
def test_a_file_is_recognised_by_its_keys(tree, theirs):
    assert is_axolotl(tree) is theirs


# methods


@pytest.mark.parametrize(
    ("settings", "processes", "rows", "minibatches"),
    [
        ({"rl": "grpo"}, 1, 8, None),
        ({"rl": "gdpo", "trl": {"num_generations": 4}}, 1, 4, None),
        ({"rl": "ebft", "trl": {"num_generations": 4}}, 2, 4, None),
        ({"rl": "grpo", "trl": {"num_generations": 4, "generation_batch_size": 16}}, 2, 4, 2),
        ({"rl": "kto"}, 2, 2, None),
        ({"rl": "kto", "gradient_accumulation_steps": 4}, 1, 1, None),
        ({"rl": "grpo", "micro_batch_size": 2}, 1, 2, None),
        ({"rl": "ebft", "ebft": {"mode": "strided"}}, 1, 1, None),
        ({"rl": "dpo", "trl": {"num_generations": 4}}, 1, 1, None),
    ],
)
def test_a_file_without_a_batch_size_gets_whole_groups(settings, processes, rows, minibatches, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    made = translate({"base_model": "m", **settings})
    assert made.tree["per_device_train_batch_size"] == rows
    assert made.tree.get("minibatches_per_rollout") == minibatches
    is_chosen = rows > 1 and "micro_batch_size" not in settings
    assert [note for note in made.remarks() if "micro_batch_size" in note and f" {rows} " in note] == (
        made.notes[:1] if is_chosen else []
    )
    assert ("not used by dpo" in made.idle) is (settings["rl"] == "dpo")


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, "sft"), ({"reward_model": True}, "rm"), ({"process_reward_model": True}, "prm"),
        ({"reward_model": False, "rl": "orpo"}, "orpo"), ({"rl": "ipo"}, "ipo"),
    ],
)  # fmt: skip
def test_the_method(settings, method):
    assert tree_of(**settings)["method"] == method


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match="rl=ppo: is not a method of axolotl; did you mean"):
        tree_of(rl="ppo")


def test_preference_settings():
    tree = tree_of(rl="dpo", rl_beta=0.3, dpo_loss_type="hinge", dpo_label_smoothing=0.0, rl_adapter_ref_model=True)
    assert (tree["beta"], tree["loss_type"], tree["ref"]) == (0.3, ["hinge"], "copy")
    assert "label_smoothing" not in tree
    assert tree_of(rl="dpo", dpo_beta=0.2)["beta"] == 0.2  # the name of before
    for method in ("dpo", "ipo", "kto", "simpo", "grpo"):
        assert tree_of(rl=method, rl_beta=0.3, orpo_alpha=0.4, trl={"beta": 0.5})["beta"] == 0.5
    assert tree_of(rl="orpo", orpo_alpha=0.4, trl={"beta": 0.5})["orpo_alpha"] == 0.5
    assert tree_of(rl="dpo", dpo_ld_alpha=0.5)["ld_alpha"] == 0.5
    made = translate({**BASE, "rl": "ipo", "dpo_label_smoothing": 0.1})
    assert made.idle == {"not used by ipo": ["dpo_label_smoothing"]} and "label_smoothing" not in made.tree
    assert tree_of(rl="dpo", precompute_ref_log_probs=True)["ref"] == "precomputed"
    kto = tree_of(rl="kto", rl_beta=0.5, kto_desirable_weight=0.2, kto_undesirable_weight=2)
    assert (kto["beta"], kto["desirable_weight"], kto["undesirable_weight"]) == (0.5, 0.2, 2.0)
    assert "desirable_weight" not in tree_of(rl="kto", kto_desirable_weight=0)  # 1, as in axolotl
    assert tree_of(rl="orpo", orpo_alpha=0.2)["orpo_alpha"] == 0.2
    simpo = tree_of(rl="simpo")  # axolotl's SimPO is CPO's
    assert (simpo["beta"], simpo["cpo_alpha"], simpo["simpo_gamma"]) == (0.1, 1.0, 0.5)
    assert tree_of(reward_model=True, center_rewards_coefficient=0.01)["center_rewards_coefficient"] == 0.01


def test_axolotls_defaults_are_set_where_ours_differ():
    tree = translate({"base_model": "m", "rl": "dpo"}).tree
    assert tree["per_device_train_batch_size"] == 1
    assert (tree["seed"], tree["max_length"], tree["warmup_ratio"]) == (42, 512, 0.03)
    assert (tree["saves_per_epoch"], tree["save_total_limit"]) == (1, 4)
    for settings, expected in (
        ({"saves_per_epoch": 4}, 25), ({"saves_per_epoch": 3, "num_epochs": 2}, 17), ({"save_steps": 0.1}, 10),
        ({}, None), ({"save_strategy": "epoch"}, None), ({"save_strategy": False}, 0),
    ):  # fmt: skip
        tree = translate({"base_model": "m", "max_steps": 100, **settings}).tree  # fractions of the run
        assert (tree.get("save_steps"), tree.get("saves_per_epoch")) == (expected, 1 if expected is None else None)
    assert translate({"base_model": "m", "adapter": "lora"}).tree["lora"] == {
        "r": 8, "alpha": 8, "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    made = translate({"base_model": "m", "rl": "grpo", "trl": {"beta": 0.1}})
    assert "trl.max_completion_length is not set: 512 tokens" in made.notes[1]
    sampled = made.tree
    assert (sampled["num_generations"], sampled["max_completion_length"]) == (8, 512)
    assert sampled["rollout"] == {"engine": "local"} and "use_bias_correction_kl" not in sampled  # true, as in TRL
    sampled = translate({"base_model": "m", "rl": "grpo", "trl": {"beta": 0.1, "use_data_producer": True}}).tree
    assert sampled["use_bias_correction_kl"] is False  # of axolotl's asynchronous trainer


def test_model_sources():
    assert tree_of(revision_of_model="v1")["revision"] == tree_of(model_revision="v1")["revision"] == "v1"
    assert tree_of(revision_of_model=6299)["revision"] == "6299"
    assert tree_of(tokenizer_config="a/b", special_tokens={"pad_token": "x"})["tokenizer"] == "a/b"
    same = tree_of(tokenizer_config="builtin:tiny", base_model_config="builtin:tiny", revision_of_model="v1")
    assert "tokenizer" not in same
    for settings in ({"base_model_config": "a/b"}, {"revision_of_model": "v1", "tokenizer_config": "a/b"},
                     {"revision_of_model": "v1", "lora_model_dir": "a", "adapter": "lora"}):  # fmt: skip
        name, value = next(iter(settings.items()))
        with pytest.raises(ValueError, match=f"^{name}={value}: "):
            tree_of(**settings)


def test_unfrozen_parameters():
    patterns = ["^model.embed_tokens.weight$", "model.layers.4[4-9]+.block_sparse_moe", "lm_head.*", "a.+b", "c.[0-7]."]
    tree = tree_of(unfrozen_parameters=patterns)
    assert tree["trained_parameters"] == [
        r"^model\.embed_tokens\.weight$", r"model\.layers\.4[4-9]+\.block_sparse_moe", r"lm_head\.*", "a.+b",
        r"c\.[0-7]\.",
    ]  # fmt: skip
    assert "trained_parameters" not in tree_of(unfrozen_parameters=[])
    for pattern in ("model.embed_tokens.weight$[:32000]", "w[5:]", "w[2:7]", "model.layers.[12]"):
        with pytest.raises(ValueError, match=f"^unfrozen_parameters={re.escape(pattern)}: .*rows"):
            tree_of(unfrozen_parameters=["lm_head", pattern])
    with pytest.raises(ValueError, match="^unfrozen_parameters=.*adapter=lora"):
        tree_of(unfrozen_parameters=["lm_head"], adapter="lora")


# rows


@pytest.mark.parametrize(
    ("method", "dataset", "entry"),
    [
        ("dpo", {"path": "a.jsonl", "type": "chatml.intel", "split": "train"},
         {"path": "a.jsonl", "format": "chatml.intel", "split": "train"}),
        ("dpo", {"path": "a.jsonl", "type": "axolotl.prompt_strategies.dpo.llama3.ultra"},
         {"path": "a.jsonl", "format": "llama3.ultra"}),
        ("dpo", {"path": "a.jsonl", "type": "chat_template.default", "field_messages": "conversation",
                 "field_chosen": "yes", "roles": {"user": ["human", "person"], "assistant": ["assistant"]}},
         {"path": "a.jsonl", "format": "chat_template.default", "field_messages": "conversation",
          "field_chosen": "yes", "roles": {"user": ["human", "person"]}}),
        ("dpo", {"path": "a.jsonl", "type": {"field_prompt": "q", "field_system": "system",
                                             "prompt_format": "[INST] {prompt} [/INST]"}},
         {"path": "a.jsonl", "format": "user_defined", "field_prompt": "q",
          "prompt_format": "[INST] {prompt} [/INST]"}),
        ("dpo", {"path": "a.jsonl"}, {"path": "a.jsonl"}),
        ("kto", {"path": "a.jsonl", "type": "llama3.argilla"}, {"path": "a.jsonl", "format": "llama3.argilla"}),
        ("orpo", {"path": "a.jsonl", "type": "chat_template.argilla"},
         {"path": "a.jsonl", "format": "chat_template.argilla"}),
        ("grpo", {"path": "openai/gsm8k", "name": "main", "type": "rewards.oai_gsm8k_transform"},
         {"path": "openai/gsm8k", "format": "rewards.oai_gsm8k_transform", "name": "main"}),
        ("ebft", {"path": "a.jsonl", "type": "ebft_opencode.transform", "split": "train[:500]"},
         {"path": "a.jsonl", "format": "ebft_opencode.transform", "split": "train[:500]"}),
        ("sft", {"path": "a.jsonl", "type": "completion", "field": "body"},
         {"path": "a.jsonl", "format": "completion", "field_text": "body", "long_text": "split"}),
        ("sft", {"path": "a.jsonl", "type": "chat_template",
                 "message_property_mappings": {"role": "from", "content": "value"}},
         {"path": "a.jsonl", "format": "chat_template", "role_key": "from", "content_key": "value"}),
        ("sft", {"path": "a.jsonl", "type": "chat_template", "message_field_role": "who",
                 "message_field_content": "said"},
         {"path": "a.jsonl", "format": "chat_template", "role_key": "who", "content_key": "said"}),
        ("sft", {"path": "a.jsonl", "type": {"field_instruction": "q", "field_output": "a",
                                             "format": "Q: {instruction}", "system_prompt": "Be {brief}. "}},
         {"path": "a.jsonl", "format": "user_defined", "field_prompt": "q", "field_completion": "a",
          "prompt_format": "{system}{prompt} ", "input_format": "{system}Q: {prompt}",
          "default_system": "Be {brief}. ", "tokenise": "apart"}),
        ("sft", {"path": "a.jsonl", "type": {"format": "{instruction}|{input}", "no_input_format": "{instruction}|",
                                             "field_input": "more", "field_system": "s",
                                             "system_format": "<{system}>"}},
         {"path": "a.jsonl", "format": "user_defined", "field_prompt": "instruction", "field_completion": "output",
          "field_input": "more", "prompt_format": "{system}{prompt}|", "input_format": "{system}{prompt}|{input}",
          "field_system": "s", "system_format": "<{system}>", "tokenise": "apart"}),
        ("sft", {"path": "a.jsonl", "type": {"field_system": "s", "system_format": ""}},
         {"path": "a.jsonl", "format": "user_defined", "field_prompt": "instruction", "field_completion": "output",
          "prompt_format": "{prompt} ", "input_format": "{prompt} {input} ", "tokenise": "apart"}),
        ("sft", {"path": "a.jsonl", "type": "chat_template", "drop_system_message": True},
         {"path": "a.jsonl", "format": "chat_template", "system_message": "drop"}),
        ("sft", {**CHAT, "weight": 0.5}, {"path": "chat.jsonl", "format": "chat_template", "weight": 0.5}),
        ("sft", {"path": "a.jsonl", "type": "input_output"}, {"path": "a.jsonl", "format": "input_output"}),
        ("sft", {"ds_type": "json", "data_files": ["b.jsonl"], "type": "alpaca"},
         {"path": "b.jsonl", "format": "alpaca"}),
    ],
)  # fmt: skip
def test_a_dataset_becomes_an_entry_of_data(method, dataset, entry):
    settings = {} if method == "sft" else {"rl": method}
    if method == "ebft":
        settings["ebft"] = {"use_whitening": False}
    assert tree_of(datasets=[dataset], **settings)["data"] == [entry]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"path": "a.jsonl", "type": "context_qa"}, "datasets[0].type=context_qa: there is no such format for sft"),
        ({"path": "a.jsonl", "type": "alpaca", "shards": 4}, "datasets[].shards=4: select part of a dataset"),
        ({"path": "s3://x/y.jsonl"}, "datasets[0].path=s3://x/y.jsonl: remote stores are not supported; download it"),
        ({"path": "a/b", "data_files": "c.jsonl"}, "datasets[0].data_files=c.jsonl: is in the dataset a/b"),
        ({"path": "a.jsonl", "type": "chat_template", "field_tools": "functions"},
         "datasets[0].field_tools=functions: is tools here; rename it in the rows"),
        ({"path": "a.jsonl", "type": {"field_prompt": "q"}}, "datasets[0].type.field_prompt: is not for sft"),
        ({"type": "alpaca"}, "datasets[0]: has neither path nor data_files"),
        ({**CHAT, "train_on_eos": True}, "datasets[0].train_on_eos=True: use one of none, last, turn, all"),
        ({**CHAT, "chat_template_jinja": "{{ x }}"}, "datasets[0].chat_template_jinja: axolotl reads it only with"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_read_are_refused(dataset, message):
    with pytest.raises(ValueError) as caught:
        tree_of(datasets=[dataset])
    assert message in str(caught.value)


def test_a_pretraining_dataset_is_split_into_chunks():
    made = translate({**BASE, "pretraining_dataset": [{"path": "a.jsonl", "text_column": "body"}]})
    assert made.tree["data"] == [
        {"path": "a.jsonl", "format": "completion", "field_text": "body", "long_text": "split"}
    ]
    assert any(note.startswith("pretraining_dataset") and "overlapping" in note for note in made.notes)


def test_settings_of_datasets_that_are_one_for_the_run():
    rows = [{"path": "a.jsonl", "type": "stepwise_supervised", "step_separator": "\n\n"}]
    tree = tree_of(process_reward_model=True, datasets=rows)
    assert tree["step_separator"] == "\n\n"
    with pytest.raises(ValueError, match="another dataset has"):
        tree_of(process_reward_model=True, datasets=[*rows, {**rows[0], "step_separator": None}])
    with pytest.raises(ValueError, match="the run has llama3, which applies to all datasets"):
        tree_of(chat_template="llama3", datasets=[{**CHAT, "chat_template": "chatml"}])
    assert tree_of(chat_template="llama3", datasets=[CHAT, {**CHAT, "chat_template": "tokenizer_default"}])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"roles_to_train": ["user"]}, {}),
        ({"train_on_eos": "none"}, {}),
        ({}, {"train_on_eot": "all"}),
        ({"chat_template": "chatml"}, {}),
        ({}, {"chat_template": "jinja", "chat_template_jinja": "{{ messages }}"}),
        ({"train_on_eos": "none"}, {"type": "completion"}),  # axolotl always trains the end of a text
        ({"roles_to_train": ["user"]}, {"type": "alpaca"}),
    ],
)
@pytest.mark.parametrize("key", ["datasets", "test_datasets"])
def test_a_setting_of_one_dataset_is_not_applied_to_another(first, second, key):
    changed = next(iter(set(first) | set(second) - {"type", "chat_template_jinja"}))
    changed = changed.replace("eot", "eos")
    rows = {"datasets": [{**CHAT, **first}], "test_datasets": []}
    rows[key] = [*rows[key], {**CHAT, **second}]
    with pytest.raises(ValueError, match=rf"{key}\[[01]\].{changed}=.*another dataset has"):
        tree_of(**rows)


@pytest.mark.parametrize(
    ("dataset", "ours"),
    [
        ({"train_on_eos": "turn", "roles_to_train": ["gpt"]}, {}),  # axolotl's defaults
        ({"train_on_eos": "none", "train_on_eot": "turn"}, {}),  # both are eos: trained if one of them trains it
        ({"train_on_eos": "last", "train_on_eot": "none"}, {"train_on_eos": "last"}),
        ({"train_on_eot": "all"}, {"train_on_eos": "all"}),
        ({"roles_to_train": ["human", "gpt"]}, {"roles_to_train": ["user", "assistant"]}),
        ({"roles": {"assistant": ["bot"]}, "roles_to_train": ["bot", "user"]},
         {"roles_to_train": ["assistant", "user"]}),
        ({"type": "alpaca", "train_on_eos": "none", "roles_to_train": ["user"]}, {}),  # axolotl reads neither
    ],
)  # fmt: skip
def test_trained_tokens_of_a_dataset(dataset, ours):
    made = translate({**BASE, "datasets": [{**CHAT, **dataset}]})
    assert {key: made.tree[key] for key in ("roles_to_train", "train_on_eos") if key in made.tree} == ours
    read = dataset.get("type") != "alpaca"
    assert any("does not read roles_to_train, train_on_eos" in note for note in made.notes) is not read


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"datasets": [CHAT]}, []),
        ({"datasets": [CHAT], "chat_template": "llama3"}, ["eot_tokens", "<|im_end|>"]),
        ({"datasets": [CHAT], "chat_template": "llama3", "eot_tokens": ["<|eot_id|>"]}, []),
        ({"datasets": [CHAT], "chat_template": "llama3", "special_tokens": {"eos_token": "<|eot_id|>"}}, []),
        ({"datasets": [{**CHAT, "train_on_eos": "none"}], "chat_template": "gemma"}, []),
        ({"datasets": [CHAT], "base_model": "some/model"}, ["eot_tokens"]),  # not on disk: it may end with another
        ({"datasets": [CHAT], "chat_template": "qwen3"}, ["<think>"]),
        ({"datasets": [CHAT], "chat_template": "qwen3", "chat_template_kwargs": {"enable_thinking": False}}, []),
        ({"datasets": [CHAT], "chat_template": "phi_4"}, ["chat_template=phi_4", "system message"]),
        ({"datasets": ROWS, "rl": "dpo", "chat_template": "qwen3"}, ["chat_template=qwen3", "generation prompt"]),
        ({"datasets": ROWS, "rl": "dpo"}, []),
        ({"datasets": ROWS, "rl": "dpo", "chat_template": "llama3"}, ["eos_token", "<|im_end|>"]),
        ({"datasets": [{"path": "a.jsonl", "type": "llama3.intel"}], "rl": "kto"}, ["eos_token", "<|im_end|>"]),
        ({"datasets": [{"path": "a.jsonl", "type": "chatml.intel"}], "rl": "kto", "base_model": "m"}, ["eos_token"]),
        ({"datasets": [{"path": "a.jsonl", "type": "chat_template.argilla"}], "rl": "orpo"}, ["argilla", "and eos"]),
        ({"datasets": [{"path": "a.jsonl", "type": "bradley_terry.chat_template"}], "reward_model": True},
         ["empty system", "score"]),
        ({"datasets": [{"path": "a.jsonl", "type": "stepwise_supervised"}], "process_reward_model": True,
          "special_tokens": {"bos_token": "<s>"}}, ["bos_token: <s>"]),
        ({"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, ["type=alpaca", "headings"]),
        ({"datasets": [{**CHAT, "weight": 0.5}]}, ["datasets[0].weight=0.5", "each epoch"]),
        ({"datasets": [{**ROWS[0], "weight": 0.5}], "rl": "dpo"}, ["datasets[0]", "does not read weight"]),
        ({"datasets": [{"path": "a.jsonl", "type": "completion"}], "chat_template": "phi_4"}, []),
    ],
)  # fmt: skip
def test_a_difference_that_is_intended_is_noted_if_it_applies(settings, words):
    made = translate({**BASE, **settings})
    assert len(made.notes) == bool(words)
    assert all(word in made.notes[0] for word in words)


def test_settings_without_effect_in_axolotl_have_none_here():
    settings = {"max_prompt_len": 9, "default_system_message": "Hi.", "roles_to_train": ["user"], "train_on_eos": "all"}
    made = translate({**BASE, **settings, "rl": "dpo", "dataset_shard_num": 2, "dataset_shard_idx": 0,
                      "chat_template_kwargs": {"enable_thinking": False}, "datasets": ROWS})  # fmt: skip
    ours = ("max_prompt_length", "system_prompt", "roles_to_train", "train_on_eos", "chat_template_kwargs")
    assert not set(ours) & made.tree.keys()
    listed = [key for keys in made.idle.values() for key in keys]
    assert {*settings, "dataset_shard_num", "chat_template_kwargs"} <= set(listed)
    assert "long_rows" not in tree_of(excess_length_strategy="truncate", datasets=[CHAT])
    made = translate({**BASE, "chat_template": "chatml", "chat_template_jinja": "{{ x }}", "datasets": [CHAT]})
    assert made.tree["chat_template"] == "chatml" and "chat_template_jinja" in str(made.idle)


def test_held_out_rows():
    tree = tree_of(rl="dpo", datasets=ROWS, test_datasets=[{"path": "held.jsonl", "type": "chatml"}], eval_steps=5)
    assert tree["eval_data"] == [{"path": "held.jsonl", "format": "chatml"}] and tree["eval_steps"] == 5
    assert tree_of(datasets=ROWS[:0], val_set_size=0.05, evals_per_epoch=4)["evals_per_epoch"] == 4
    assert "evals_per_epoch" not in tree_of(val_set_size=0.0, evals_per_epoch=4)  # nothing to evaluate on


def test_a_file_of_held_out_rows_has_one_split():
    held = {"path": "held.jsonl", "type": "chatml", "split": "test"}
    made = translate({**BASE, "rl": "dpo", "datasets": ROWS, "test_datasets": [held]})
    assert made.tree["eval_data"] == [{"path": "held.jsonl", "format": "chatml"}]
    assert "held.jsonl is one file, without a split test; all of its rows are used" in made.notes[0]
    same = tree_of(rl="dpo", datasets=ROWS, test_datasets=[{**held, "path": ROWS[0]["path"]}])
    assert same["eval_data"][0]["split"] == "test"  # refused when the rows are read: they would be trained on


# run, adapters, processes


def test_a_setting_that_axolotl_ignores_is_ignored():
    made = translate({"base_model": "m", "lr_scheduler": "linear", "cosine_min_lr_ratio": 0.1, "rl": "dpo",
                      "neftune_noise_alpha": 5})  # fmt: skip
    assert made.idle == {"not used by dpo": ["cosine_min_lr_ratio", "neftune_noise_alpha"]}
    assert not {"min_lr_ratio", "neftune_noise_alpha"} & made.tree.keys()
    assert not {"warmup_ratio", "warmup_steps"} & tree_of(warmup_steps=0, warmup_ratio=0.1).keys()


@pytest.mark.parametrize("settings", [{}, {"warmup_steps": 5}, {"warmup_ratio": 0.1}])
def test_constant_has_no_warmup(settings):
    made = translate({"base_model": "m", "lr_scheduler": "constant", **settings})
    assert made.tree["lr_scheduler_type"] == "constant"
    assert not {"warmup_ratio", "warmup_steps"} & made.tree.keys()
    assert any("constant_with_warmup" in note for note in made.notes) == bool(settings)


def test_entropy_and_the_asynchronous_trainer():
    trl = {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 0.3, "use_vllm": True,
           "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2, "log_multimodal": True,
           "replay_buffer_size": 9, "max_completion_length": 8}  # fmt: skip
    made = translate({**BASE, "rl": "grpo", "trl": trl})
    assert made.tree | {
        "entropy_coef": 0.1, "entropy_target": 0.3, "entropy_coef_step": 0.005, "entropy_coef_max": 1.0,
        "vllm_importance_sampling_min": 0.5, "vllm_importance_sampling_cap": 2.0, "replay_buffer_size": 9,
        "vllm_importance_sampling_mode": "sequence_mask",
    } == made.tree  # fmt: skip
    assert [note[:24] for note in made.notes] == ["trl.replay_buffer_size: "]  # axolotl does not read it then
    trl = {"use_vllm": True, "use_data_producer": True, "replay_buffer_size": 9, "max_completion_length": 8,
           "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    made = translate({**BASE, "rl": "grpo", "trl": trl})
    assert made.tree["vllm_importance_sampling_mode"] == "token_truncate"
    assert made.notes == ["trl.chat_template_kwargs: is used here; axolotl reads it only with rl: ebft"]
    assert made.idle == {"fixed in strop": ["trl.use_data_producer"]}


def test_the_bound_of_cispo():
    trl = {"loss_type": "cispo", "epsilon_high": 5.0}
    made = translate({"base_model": "m", "rl": "grpo", "trl": trl})
    assert made.tree["loss_kwargs"] == {"cispo_cap": 5.0} and "epsilon_high" not in made.tree


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"batch_size": 16, "gradient_accumulation_steps": None}, {"gradient_accumulation_steps": 8}),
        ({"batch_size": 8}, {"gradient_accumulation_steps": 4}),
        ({"full_determinism": True}, {"deterministic": True}),
        ({"use_dft": True}, {"sft_loss": "dft"}),
        ({"save_strategy": "steps"}, {"save_steps": 500}),
        ({"eval_strategy": "steps", "logging_steps": 7, "val_set_size": 0.1}, {"eval_steps": 7}),
        ({"max_steps": 5, "num_epochs": 3}, {"max_steps": 5}),
        ({"lr_scheduler": "constant_with_warmup"}, {"lr_scheduler_type": "constant", "warmup_ratio": 0.03}),
        ({"cosine_min_lr_ratio": 0}, {}),
        ({"cosine_min_lr_ratio": 0.1}, {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.1}),
        ({"warmup_steps": 7}, {"warmup_steps": 7}),
        ({"optimizer": "paged_adamw_8bit"}, {"optim": "adamw_8bit"}),
        ({"optimizer": "muon"}, {"optim": "muon"}),
        ({"save_strategy": "no"}, {"save_steps": 0}),
        ({"save_steps": 50}, {"save_steps": 50}),
        ({"bf16": "full"}, {"dtype": "bfloat16", "trained_dtype": "bfloat16"}),
        ({"bf16": False}, {"dtype": "float32"}),
        ({"sdp_attention": True}, {"attn_implementation": "sdpa"}),
        ({"torch_compile": True}, {"compile": True}),
        ({"torch_compile": "auto"}, {"compile": "auto"}),
        ({"torch_compile": False}, {"compile": False}),
        ({"model_config": {"output_router_logits": True}}, {"router_aux_loss_coef": 0.001}),
        ({"chat_template": "jinja", "chat_template_jinja": "{{ messages }}"}, {"chat_template": "{{ messages }}"}),
        ({"special_tokens": {"pad_token": "<p>", "eos_token": None}}, {"special_tokens": {"pad_token": "<p>"}}),
        ({"use_tensorboard": True, "use_trackio": True}, {"report_to": ["tensorboard", "trackio"]}),
        ({"adapter": "lora", "lora_target_linear": True, "loraplus_lr_ratio": 16}, {"loraplus_lr_ratio": 16}),
        ({"early_stopping_patience": 3, "val_set_size": 0.1},
         {"early_stopping_patience": 3, "metric_for_best_model": "eval/nll"}),
        ({"rl": "dpo", "load_best_model_at_end": True, "greater_is_better": False, "val_set_size": 0.1},
         {"load_best_model_at_end": True, "metric_for_best_model": "eval/loss", "greater_is_better": False}),
        ({"rl": "grpo", "load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/short/mean",
          "val_set_size": 0.1}, {"metric_for_best_model": "eval/short/mean"}),
        ({"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "peft_use_rslora": True},
         {"lora": {"r": 4, "alpha": 8, "rslora": True}}),
        ({"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ".*_proj"},
         {"lora": {"r": 4, "alpha": 8, "target_modules": [".*_proj"]}}),
        ({"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True,
          "lora_target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1},
         {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}),
        ({"adapter": "lora", "rl": "dpo", "lora_dropout": 0.1, "lora_target_linear": True},
         {"lora": {"r": 8, "alpha": 8}}),
        ({"context_parallel_size": 2}, {"parallel": {"context": 2}}),
        ({"context_parallel": {"size": 4, "backend": "ring"}}, {"parallel": {"context": 4}}),
        ({"lora_model_dir": "runs/a/final", "adapter": "lora", "lora_target_linear": True}, {"model": "runs/a/final"}),
        ({"noisy_embedding_alpha": 5}, {"neftune_noise_alpha": 5.0}),
        ({}, {"long_rows": "drop"}),
        ({"rl": "kto", "excess_length_strategy": "Drop"}, {"long_rows": "drop"}),
        ({"chat_template_kwargs": {"enable_thinking": False}, "datasets": [CHAT]},
         {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)  # fmt: skip
def test_a_setting(settings, ours):
    tree = tree_of(**settings)
    assert {key: tree[key] for key in ours} == ours


def test_a_flag_that_turns_lora_off_leaves_out_the_files_other_settings_of_it(tmp_path, capsys):
    settings = {**BASE, "adapter": "lora", "lora_r": 16, "lora_alpha": 32, "merge_lora": True,
                "datasets": [{"path": "rows.jsonl", "type": "alpaca"}]}  # fmt: skip
    (tmp_path / "lora.yml").write_text(yaml.safe_dump(settings))
    _, cfg, _ = parse(["--config", str(tmp_path / "lora.yml"), "--lora.r", "0"])
    assert cfg.lora == LoraConfig() and not cfg.model.merge_lora
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"--lora.r 0: dropped merge_lora, lora.alpha, lora.target_modules of {tmp_path / 'lora.yml'}"
    with pytest.raises(ValueError, match="lora.alpha=8: has no effect with lora.r=0"):  # both are flags
        parse(["--config", str(tmp_path / "lora.yml"), "--lora.r", "0", "--lora.alpha", "8"])


def test_fsdp_has_an_effect_only_with_several_processes(monkeypatch):
    settings = {"fsdp": ["full_shard"], "fsdp_config": {"fsdp_offload_params": True, "reshard_after_forward": False}}
    assert "parallel" not in tree_of(**settings)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert tree_of(**settings)["parallel"] == {"mode": "fsdp", "reshard_after_forward": False, "cpu_offload": True}
    assert tree_of(dp_shard_size=2)["parallel"] == {"mode": "fsdp", "shard": 2}


def test_settings_of_processes_have_no_effect_on_one():
    reason = "there is one process; torchrun starts several"
    settings = {"fsdp": ["full_shard"], "deepspeed": "zero3.json", "dp_shard_size": 2}
    assert translate({**BASE, "rl": "grpo", **settings}).idle[reason] == list(settings)


@pytest.mark.parametrize(
    ("deepspeed", "parallel"),
    [
        ("deepspeed_configs/zero1.json", {"mode": "fsdp", "reshard_after_forward": False}),
        ("zero2_torch_compile.json", {"mode": "fsdp", "reshard_after_forward": False}),
        ("deepspeed_configs/zero3_bf16.json", {"mode": "fsdp"}),
        ("zero3_bf16_cpuoffload_params.json", {"mode": "fsdp", "cpu_offload": True}),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
         {"mode": "fsdp", "cpu_offload": True}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
         {"mode": "fsdp", "reshard_after_forward": False}),
        ({"bf16": {"enabled": True}}, {"mode": "replicate"}),
    ],
)  # fmt: skip
def test_deepspeed_runs_on_fsdp(deepspeed, parallel, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    made = translate({**BASE, "deepspeed": deepspeed})
    assert made.tree["parallel"] == parallel and [note[:10] for note in made.notes] == ["deepspeed:"]
    (tmp_path / "ours.json").write_text(json.dumps(deepspeed))
    if isinstance(deepspeed, dict):  # the same in a file of any name
        assert tree_of(deepspeed=str(tmp_path / "ours.json"))["parallel"] == parallel
    assert tree_of(deepspeed=deepspeed, adapter="qlora", load_in_4bit=True)["parallel"] == {"mode": "replicate"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"special_tokens": "<pad>"}, "special_tokens=<pad>: must be a block of keys"),
        ({"rl": "grpo", "trl": True}, "trl=True: must be a block of keys"),
        ({"rl": "grpo", "trl": {"reward_funcs": "rwd.f"}}, "trl.reward_funcs=rwd.f: must be a list"),
        ({"datasets": [{**CHAT, "roles": ["user"]}]}, "datasets[].roles=['user']: must be a block of keys"),
        ({"datasets": [{**CHAT, "path": ["a.jsonl"]}]}, "datasets[].path=['a.jsonl']: must be text"),
        ({"adapter": "lora", "lora_target_modules": 3}, "lora_target_modules=3: must be a list or text"),
        ({"micro_batch_size": 2.5}, "micro_batch_size=2.5: is not a whole number"),
        ({"deepspeed": "auto.json"}, "deepspeed=auto.json: neither an existing file nor named after a ZeRO stage"),
        ({"batch_size": 16}, "batch_size=16: has no effect in axolotl"),
        ({"rl": "ipo", "dpo_loss_type": ["sigmoid"]}, "dpo_loss_type=['sigmoid']: has no effect with rl: ipo"),
        ({"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj", "embed_tokens"]},
         "lora_target_modules=embed_tokens: lora_target_linear adds all linear layers"),
        ({"rl": "grpo", "trl": {"use_adaptive_entropy": True, "entropy_coef_min": 0.1}}, "trl.entropy_coef_min=0.1: "),
        ({"rl": "ebft", "trl": {"scale_rewards": "batch"}}, "trl.scale_rewards=batch: is not supported by ebft"),
        ({"eval_strategy": "steps", "val_set_size": 0.1}, "eval_strategy=steps: needs eval_steps"),
        ({"peft": {"loftq_config": {"loftq_bits": 4}}}, "peft.loftq_config.loftq_bits=4: adapters are"),
        ({"scaling_softmax": True}, "scaling_softmax=True: changes what is trained"),
        ({"dense_mixer": True}, "dense_mixer=True: changes what is trained"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches=True: a batch is per"),
        ({"optimizer": "lion_8bit"}, "optimizer=lion_8bit: is not supported"),
        ({"lr_scheduler": "rex"}, "lr_scheduler=rex: is not supported"),
        ({"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins=axolotl.integrations.kd.KDPlugin: may change"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: is not supported"),
        ({"fp16": True}, "fp16=True: float16 is not supported; use bf16: true"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "f1", "val_set_size": 0.1},
         "metric_for_best_model=f1: "),
        ({"dataset_shard_num": 4, "dataset_shard_idx": 0}, "dataset_shard_num=4: shards of the shuffled rows"),
        ({"datasets": [{**CHAT, "train_on_eot": "none"}], "eot_tokens": ["<|im_end|>"]},
         "datasets[0].train_on_eot=none: train_on_eos is turn"),
        ({"pretraining_dataset": [{"path": "a.jsonl"}], "datasets": [CHAT]}, "pretraining_dataset: axolotl reads only"),
        ({"shuffle_merged_datasets": False}, "rows are shuffled by seed here; remove it"),
        ({"save_steps": 0.5}, "save_steps=0.5: a fraction of the run needs max_steps; use steps, or saves_per_epoch"),
        ({"chat_template": "alpaca"}, "chat_template=alpaca: is not built in"),
        ({"adapter": "llama-adapter"}, "adapter=llama-adapter: is not supported; use lora or qlora"),
        ({"datasets": "rows.jsonl"}, "datasets=rows.jsonl: must be a list of blocks; write - path: ..."),
        ({"sequence_length": 4}, "sequence_length: not a key of axolotl, did you mean sequence_len?"),
        ({"rl": "grpo", "trl": {"num_generation": 4}}, "trl.num_generation: not a key of axolotl, did you mean "
                                                       "trl.num_generations?"),
    ],
)  # fmt: skip
def test_what_has_no_equivalent_is_refused_by_name(settings, message):
    with pytest.raises(ValueError) as caught:
        tree_of(**settings)
    assert message in str(caught.value)


def test_null_false_and_empty_values_ask_for_nothing():
    made = translate({**BASE, "deepspeed": None, "gptq": False, "tokens": [], "wandb_project": None, "fsdp": None})
    assert "report_to" not in made.tree and made.remarks() == []


def test_keys_without_effect_are_listed_once_with_their_reason():
    made = translate(
        {**BASE, "rl": "dpo", "tf32": True, "strict": True, "kto_desirable_weight": 2.0, "group_by_length": True}
    )
    (line,) = made.remarks()
    assert line == (
        "no effect here: tf32, group_by_length (affects only speed or memory); strict (fixed in strop); "
        "kto_desirable_weight (not used by dpo)"
    )


def test_a_base_in_8_bits_becomes_a_bfloat16_one_with_a_note():
    made = translate({**BASE, "adapter": "lora", "load_in_8bit": True, "lora_target_linear": True})
    assert "load_in_4bit" not in made.tree and "the base stays in bfloat16" in made.notes[0]
    made = translate({**BASE, "adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True})
    assert made.tree["load_in_4bit"] is True and made.notes == []


def test_an_adapter_that_is_trained_further_keeps_its_settings(tmp_path):
    saved = {"peft_type": "LORA", "base_model_name_or_path": "m", "r": 16, "lora_alpha": 64, "lora_dropout": 0.1,
             "target_modules": ["q_proj"], "use_rslora": True}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    lora = {"r": 16, "alpha": 64, "dropout": 0.1, "rslora": True}
    made = translate({**BASE, "adapter": "lora", "lora_model_dir": str(tmp_path)})
    assert made.tree["lora"] == lora and made.tree["model"] == str(tmp_path)
    made = translate({**BASE, "adapter": "lora", "lora_model_dir": str(tmp_path), "rl": "dpo"})
    assert "lora_model_dir: its dropout of 0.1 is applied" in made.notes[-1]
    made = translate({**BASE, "adapter": "lora", "lora_model_dir": str(tmp_path), "lora_r": 8, "lora_alpha": 8})
    assert made.tree["lora"] == lora and any("has rank 16" in note for note in made.notes)
    with pytest.raises(ValueError, match="has no effect without an adapter; add adapter: lora"):
        tree_of(lora_model_dir=str(tmp_path))


def test_train_on_inputs_is_what_plain_text_does_anyway():
    rows = [{"path": "a.txt.jsonl", "type": "completion"}]
    assert "train_on_inputs" not in tree_of(datasets=rows, train_on_inputs=True)
    rows.append({"path": "b.jsonl", "type": "alpaca"})
    assert tree_of(datasets=rows, train_on_inputs=True)["train_on_inputs"] is True


@pytest.mark.parametrize(
    ("key", "hint"),
    [("lora_rank", "lora_r"), ("max_seq_length", "sequence_len"), ("epochs", "num_epochs"), ("lr", "learning_rate"),
     ("sequence_length", "sequence_len")],
)  # fmt: skip
def test_a_key_of_another_library_is_named_as_axolotl_has_it(key, hint):
    with pytest.raises(ValueError, match=f"{key}: not a key of axolotl, did you mean {hint}?"):
        tree_of(**{key: 1})


def test_the_default_warmup_is_at_most_100_steps():
    assert tree_of(max_steps=3333)["warmup_ratio"] == 0.03
    long = tree_of(max_steps=5000)
    assert long["warmup_steps"] == 100 and "warmup_ratio" not in long
    made = translate({**BASE, "max_steps": 5000}, max_steps="10")  # the command line's
    assert made.tree["warmup_ratio"] == 0.03


def test_services_get_their_project_by_the_environment():
    made = translate({**BASE, "wandb_project": "p", "wandb_entity": "team", "trackio_space_id": "s"})
    assert made.tree["report_to"] == ["wandb"]
    assert made.environment == {"WANDB_PROJECT": "p", "WANDB_ENTITY": "team", "TRACKIO_SPACE_ID": "s"}


# sampling


def test_settings_of_servers():
    server = {"use_vllm": True, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 300}
    block = {"gpu_memory_utilization": 0.85, "tensor_parallel_size": 2, "dtype": "auto", "host": "0.0.0.0"}
    made = translate({**BASE, "rl": "grpo", "trl": server, "vllm": block | {"port": 8000}})
    assert made.idle == {}
    tree = tree_of(rl="grpo", trl=server, vllm=block)
    assert tree["rollout"] == {"engine": "vllm"}
    assert tree["vllm"] == {"port": 8000, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.85, "timeout": 300.0}
    assert tree["vllm_importance_sampling_mode"] == "sequence_mask"  # TRL's, which axolotl takes
    assert tree_of(rl="grpo", trl={**server, "vllm_server_host": "node7"})["vllm"] == {
        "url": ["http://node7:8000"], "timeout": 300.0,
    }  # fmt: skip
    assert tree_of(rl="grpo", trl={"use_vllm": True, "vllm_mode": "colocate"})["vllm"] == {"colocate": True}
    local = translate({**BASE, "rl": "grpo", "trl": {**server, "async_prefetch": True}, "vllm": block}, engine="local")
    assert local.tree["rollout"] == {"engine": "local"} and "vllm" not in local.tree


def test_rewards_and_rollouts():
    trl = {"reward_funcs": ["rewards.a", "some/model"], "reward_weights": [1.0, 2.0], "reward_num_workers": 1,
           "generation_batch_size": 16, "scale_rewards": False, "sync_ref_model": True, "beta": 0.01}  # fmt: skip
    tree = tree_of(rl="grpo", trl=trl)
    assert tree["reward_funcs"] == ["rewards.a", "model:some/model"] and "reward_num_workers" not in tree
    assert tree["minibatches_per_rollout"] == 2 and tree["scale_rewards"] is False
    assert (tree["sync_ref_model"], tree["ref_model_mixup_alpha"], tree["ref_model_sync_steps"]) == (True, 0.9, 64)
    with pytest.raises(ValueError, match="is grpo; write rl: grpo"):
        tree_of(rl="gdpo", trl={"multi_objective_aggregation": "sum_then_normalize"})


def test_ebft_blocks():
    strided = {"mode": "strided", "stride": 4, "n_samples_per_prompt": 2, "advantage_estimator": "group_norm"}
    tree = tree_of(rl="ebft", ebft=strided, sequence_len=64)
    assert (tree["mode"], tree["stride"], tree["advantage_estimator"], tree["feature_norm"], tree["temperature"]) == (
        "strided", 4, "grpo", "layer", 0.6,
    )  # fmt: skip
    assert tree["max_length"] == 64 and "num_generations" not in tree
    structured = tree_of(rl="ebft", ebft={"use_whitening": True}, trl={"num_generations": 4})
    assert structured["advantage_estimator"] == "grpo" and structured["num_generations"] == 4
    assert "max_length" not in structured


def test_nemo_gym():
    gym = {
        "plugins": ["axolotl.integrations.nemo_gym.NemoGymPlugin"], "nemo_gym_enabled": True,
        "nemo_gym_auto_start": False, "nemo_gym_datasets": [{"path": "a.jsonl", "server_name": "s", "max_samples": 9}],
        "datasets": [{"path": "a.jsonl", "type": "chat_template"}],
        "trl": {"reward_funcs": ["axolotl.integrations.nemo_gym.rewards.reward_nemo_gym_verify"],
                "max_completion_length": 8},
    }  # fmt: skip
    made = translate({**BASE, "rl": "grpo", **gym})
    assert made.tree["nemo_gym"] == {"datasets": ["a.jsonl:split=train[:9]@s"], "dir": "~/Gym", "server_timeout": 360}
    assert made.tree["reward_funcs"] == ["nemo_gym:verify"] and "data" not in made.tree
    assert "datasets[].path" in str(made.idle)
    turns = translate({**BASE, "rl": "grpo", **gym, "nemo_gym_multi_turn": True, "nemo_gym_auto_start": None,
                       "nemo_gym_config_paths": ["a.yaml"], "nemo_gym_head_port": 11000, "nemo_gym_dir": "gym",
                       "trl": {"use_vllm": True, "async_prefetch": True, "vllm_lora_sync": True,
                               "max_completion_length": 8}})  # fmt: skip
    assert turns.tree["nemo_gym"] == {
        "datasets": ["a.jsonl:split=train[:9]@s"], "dir": "gym", "auto_start": True, "config_paths": ["a.yaml"],
        "multi_turn": True, "server_timeout": 360,
    }  # fmt: skip
    assert turns.tree["reward_funcs"] == ["env"] and "vllm" not in turns.tree and not turns.notes
    assert turns.tree["async_prefetch"] is True and turns.tree["sync"] == {"backend": "lora"}
    trl = {"use_vllm": True, "vllm_server_port": 8001, "max_completion_length": 8}
    served = translate({**BASE, "rl": "grpo", **gym, "nemo_gym_multi_turn": True, "trl": trl})
    assert served.tree["nemo_gym"]["endpoint_port"] == 8001 and "vllm" not in served.tree
    started = translate({**BASE, "rl": "grpo", **gym, "nemo_gym_auto_start": True, "nemo_gym_head_port": 12000})
    assert "head_port" not in started.tree["nemo_gym"] and "need no head server" in started.notes[0]
    assert translate({**BASE, "rl": "grpo", **gym, "nemo_gym_head_port": 12000}).tree["nemo_gym"]["head_port"] == 12000
    assert "nemo_gym" not in translate({**BASE, "rl": "grpo", **gym, "nemo_gym_enabled": False}).tree


def test_keys_that_another_setting_makes_unused_name_it():
    made = translate({"base_model": "m", "rl": "dpo", "trl": {"beta": 0.3}, "rl_beta": 0.1})
    assert made.tree["beta"] == 0.3 and made.idle == {"another key sets beta": ["rl_beta"]}
    made = translate({"base_model": "m", "rl": "grpo", "trl": {"entropy_target": 0.1, "vllm_mode": "server"}})
    assert made.idle["without trl.use_adaptive_entropy"] == ["trl.entropy_target"]
    assert made.idle["no server is used"] == ["trl.vllm_mode"]


def test_a_note_is_logged_once():
    fallback = {"chat_template": "tokenizer_default_fallback_chatml"}
    rows = {"path": "a.jsonl", "type": "chat_template", **fallback}
    made = translate({"base_model": "m", "datasets": [rows, {**rows, "path": "b.jsonl"}], **fallback})
    assert sum("tokenizer_default_fallback_chatml" in line for line in made.remarks()) == 1
