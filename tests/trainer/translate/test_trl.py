"""TRL's configs in our terms: the fields there are, defaults, and the command that is printed."""

from __future__ import annotations

import ast
import json
import os
import shlex
from pathlib import Path

import pytest
import yaml

from tests.entry import metrics, run_ok, run_python
from trainer.cli import load_method, parse
from trainer.config.defaults import default_tree
from trainer.from_trl import main
from trainer.translate.keys import find
from trainer.translate.trl import DEFAULTS, METHODS, TABLE, find_kind, translate

# The fields of TRL 1.16's configs and of transformers' TrainingArguments, one name a line.
FIELDS = Path(__file__).parent / "trl_fields.txt"


def test_every_field_of_the_six_configs_is_in_the_table():
    fields = FIELDS.read_text().split()
    assert len(fields) > 230
    assert [name for name in fields if find(name, TABLE) is None] == []


def test_the_fields_are_those_of_trl():
    source = os.environ.get("TRL_SOURCE")
    if not source:
        pytest.skip("TRL_SOURCE is unset: it names the folder trl of a checkout")
    names = set()
    for kind in ("base", "grpo", "rloo", "dpo", "kto", "sft", "reward", "model"):
        tree = ast.parse((Path(source) / "trainer" / f"{kind}_config.py").read_text())
        names |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    assert names <= set(FIELDS.read_text().split())


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"num_generations": 8}, "grpo"), ({"loss_type": "dr_grpo"}, "grpo"), ({"beta": 0.1}, "dpo"),
        ({"normalize_advantages": True, "num_generations": 2}, "rloo"), ({"desirable_weight": 1, "beta": 0.1}, "kto"),
        ({"center_rewards_coefficient": 0.01}, "reward"), ({"packing": True}, "sft"), ({"loss_type": "dft"}, "sft"),
    ],
)  # fmt: skip
def test_the_kind_is_found_from_the_fields(fields, kind):
    assert find_kind(fields) == kind


def test_fields_of_any_kind_need_the_flag():
    with pytest.raises(ValueError, match="add --kind grpo, rloo, dpo, kto, sft or reward"):
        find_kind({"learning_rate": 1e-5, "output_dir": "x"})


@pytest.mark.parametrize("kind", METHODS)
def test_trls_defaults_are_set_where_ours_differ(kind):
    made, without = translate({}, kind)
    assert {name: made.tree[name] for name in DEFAULTS[kind]} == DEFAULTS[kind] and not without
    ours = default_tree(load_method(METHODS[kind]).Config, {})
    assert made.tree["method"] == METHODS[kind]
    assert all(ours[name] != value for name, value in DEFAULTS[kind].items() if name != "learning_rate")


def test_grpo_fields():
    made, without = translate(
        {"model_name_or_path": "m", "dataset_name": "d", "dataset_config": "main", "learning_rate": "5e-6",
         "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8,
         "max_steps": 100, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "use_vllm": True,
         "reward_funcs": ["think_format_reward", "my.reward"], "top_p": 0.9, "report_to": "wandb", "bf16": True,
         "optim": "adamw_8bit", "beta": 0.0, "use_bias_correction_kl": True, "log_completions": True,
         "model_revision": "v1"},
        "grpo",
    )  # fmt: skip
    tree = made.tree
    assert (tree["model"], tree["revision"], tree["data"]) == ("m", "v1", [{"path": "d", "name": "main"}])
    assert (tree["learning_rate"], tree["max_steps"], tree["warmup_ratio"]) == (5e-6, 100, 0.1)
    assert (tree["minibatches_per_rollout"], tree["optim"], tree["report_to"]) == (4, "adamw_8bit", ["wandb"])
    assert tree["rollout"] == {"engine": "vllm"} and tree["vllm"] == {"colocate": True, "gpu_memory_utilization": 0.3}
    assert tree["vllm_importance_sampling_mode"] == "sequence_mask"
    assert tree["reward_funcs"][0].startswith("regex:") and tree["reward_funcs"][1] == "my.reward"
    assert "num_train_epochs" not in tree and "use_bias_correction_kl" not in tree
    assert without == ["top_p=0.9: training samples from the full distribution, which the loss assumes"]
    assert made.idle == {"samples.jsonl and report.html contain them": ["log_completions"]}


def test_other_kinds():
    dpo, _ = translate({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "max_length": None,
                        "precompute_ref_log_probs": True, "use_peft": True}, "dpo")  # fmt: skip
    assert dpo.tree["loss_type"] == ["sigmoid", "sft"] and dpo.tree["ref"] == "precomputed"
    assert dpo.tree["lora"] == {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert dpo.tree["max_length"] > 100_000
    dpo, _ = translate({"model_revision": "main", "beta": 0.1}, "dpo")  # the default, which a folder has, too
    assert "revision" not in dpo.tree
    dpo, _ = translate({"model_init_kwargs": {"revision": "v1"}, "beta": 0.1}, "dpo")
    assert dpo.tree["revision"] == "v1"
    sft, _ = translate({"packing": True, "dataset_name": "d", "dataset_text_field": "body", "eval_strategy": "epoch",
                        "completion_only_loss": False, "max_seq_length": 64, "eos_token": "<e>"}, "sft")  # fmt: skip
    assert sft.tree["data"] == [{"path": "d", "format": "completion", "field_text": "body"}]
    assert sft.tree["eval_data"][0]["split"] == "test" and sft.tree["evals_per_epoch"] == 1
    assert (sft.tree["max_length"], sft.tree["train_on_inputs"]) == (64, True)
    assert sft.tree["special_tokens"] == {"eos_token": "<e>"}
    assert any("assistant_only_loss" in note for note in translate({"packing": False}, "sft")[0].notes)
    reward, _ = translate({"center_rewards_coefficient": 0.01}, "reward")
    assert (reward.tree["method"], reward.tree["learning_rate"]) == ("rm", 1e-4)


def test_fields_of_older_versions():
    fields = {"evaluation_strategy": "steps", "eval_steps": 5, "dataset_name": "org/rows", "padding_value": 1,
              "force_use_ref_model": True, "torch_dtype": "bfloat16", "bf16": True}  # fmt: skip
    made, without = translate(fields, "dpo")
    assert (made.tree["eval_steps"], made.tree["ref"], without, made.notes) == (5, "copy", [], [])
    assert made.idle == {"preparation and caching of rows": ["padding_value"]}
    assert made.tree["trained_dtype"] == made.tree["dtype"] == "bfloat16"  # auto is float32 on a CPU


def test_constant_has_no_warmup():
    made, _ = translate({"lr_scheduler_type": "constant", "warmup_ratio": 0.1, "beta": 0.1}, "dpo")
    assert made.tree["lr_scheduler_type"] == "constant" and "warmup_ratio" not in made.tree
    assert "constant_with_warmup has" in made.notes[0]
    made, _ = translate({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, "dpo")
    assert (made.tree["lr_scheduler_type"], made.tree["warmup_steps"]) == ("constant", 5)


def test_what_sampling_cannot_do_is_named_and_not_passed_on():
    fields = {"num_generations_eval": 4, "neftune_noise_alpha": 5, "entropy_target": 0.2, "entropy_coef_min": 0.1,
              "vllm_guided_decoding_regex": "a+"}  # fmt: skip
    made, without = translate(fields, "grpo")
    assert not set(fields) & made.tree.keys()
    assert {line.partition("=")[0] for line in without} == {*list(fields)[:2], "vllm_guided_decoding_regex"}


def test_adaptive_entropy():
    made, without = translate({"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_delta": 0.001}, "grpo")
    ours = {"entropy_coef": 0.01, "entropy_target": 0.2, "entropy_coef_step": 0.001, "entropy_coef_max": 1.0}
    assert ours.items() <= made.tree.items() and without == []
    made, without = translate({"use_adaptive_entropy": True, "entropy_coef_min": 0.1}, "grpo")
    assert without == ["entropy_coef_min=0.1: the weight falls to 0 here"]


def test_cispo_without_its_bound_is_noted():
    made, _ = translate({"loss_type": "cispo", "epsilon": 0.3}, "grpo")
    assert "epsilon" not in made.tree and "loss_kwargs" not in made.tree
    assert "TRL's bound is epsilon, 0.3, and all tokens weigh about that much" in made.notes[0]
    made, _ = translate({"loss_type": "cispo", "epsilon_high": 4}, "grpo")
    assert made.tree["loss_kwargs"] == {"cispo_cap": 4} and made.notes == []


def test_a_local_file_has_no_test_split():
    fields = {"dataset_name": "rows.jsonl", "eval_strategy": "steps", "eval_steps": 50, "beta": 0.1}
    made, _ = translate(fields, "dpo")
    assert not {"eval_data", "eval_steps"} & made.tree.keys()
    assert "rows.jsonl is one file, without a split test; add --eval-data FILE or" in made.notes[0]
    assert made.notes[0].endswith("--eval-steps 50")
    made, _ = translate({**fields, "dataset_test_split": "train[:10%]"}, "dpo")
    assert made.tree["eval_data"] == [{"path": "rows.jsonl", "split": "train[:10%]"}] and made.tree["eval_steps"] == 50
    mixture = {"datasets": [{"path": "a.jsonl"}], "test_split_size": 0.1, "eval_strategy": "epoch", "beta": 0.1}
    made, _ = translate(mixture, "dpo")
    assert (made.tree["val_set_size"], made.tree["evals_per_epoch"], made.notes) == (0.1, 1, [])


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="num_generation: not a key of TRL, did you mean num_generations?"):
        translate({"num_generation": 4}, "grpo")


def test_the_command_and_the_file_are_the_same_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fields = {"model_name_or_path": "builtin:tiny", "dataset_name": "task:addition", "num_generations": 4,
              "per_device_train_batch_size": 8, "max_completion_length": 8, "epsilon": 0.3, "deepspeed": "z.json",
              "scale_rewards": "none", "gradient_checkpointing": False}  # fmt: skip
    Path("grpo.json").write_text(json.dumps(fields))
    assert main(["grpo.json"]) == 0
    printed = capsys.readouterr()
    assert "no equivalent: deepspeed=z.json: start with torchrun" in printed.err
    words = shlex.split(printed.out.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "trainer"] and "--no-gradient-checkpointing" in words
    _, from_flags, _ = parse(words[3:])
    assert main(["grpo.json", "--yaml"]) == 0
    Path("ours.yaml").write_text(capsys.readouterr().out)
    _, from_file, _ = parse(["--config", "ours.yaml"])
    assert from_flags == from_file
    assert (from_flags.policy_loss.epsilon, from_flags.optim.lr_scheduler_type, from_flags.run.seed) == (
        0.3,
        "linear",
        42,
    )
    Path("bad.yaml").write_text("num_generation: 4\nbeta: 1\n")
    assert main(["bad.yaml"]) == 2
    assert "bad.yaml: num_generation: not a key of TRL" in capsys.readouterr().err


def test_a_converted_file_trains(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: builtin:tiny\ndataset_name: rows.jsonl\npacking: false\nmax_steps: 2\n"
        "save_strategy: 'no'\nper_device_train_batch_size: 2\nlearning_rate: 2e-5\noutput_dir: out\nbf16: false\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ", "completion": "2"}\n' * 4)
    done = run_python("-m", "trainer.from_trl", "sft.yaml", "--yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["lr_scheduler_type"] == "linear"
    (tmp_path / "ours.yaml").write_text(done.stdout)
    run_ok("--config", "ours.yaml", cwd=tmp_path)
    assert metrics(tmp_path / "out")[-1]["step"] == 2
