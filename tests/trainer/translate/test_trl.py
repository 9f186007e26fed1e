"""TRL's configs in our terms: the fields there are, defaults, and the command that is printed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.command.flags import build, flag_table, read_tree
from tests.entry import metrics, run_ok, run_python
from trainer.cli import load_method, parse
from trainer.config.defaults import default_tree
from trainer.from_trl import main
from trainer.translate.keys import find
from trainer.translate.trl import DEFAULTS, TABLE, translate
from trainer.translate.trl_kinds import KINDS, find_kind

# Class, field and default (JSON) of TRL 1.16's configs, of ModelConfig and of the arguments of its scripts.
# TrainingArguments: fields with one default for all configs. PPOConfig and PRMConfig: TRL 1.10.
DEFAULTS_OF_TRL = Path(__file__).parent / "trl_defaults.tsv"


def trls(name: str) -> dict[str, Any]:
    rows = [line.split("\t") for line in DEFAULTS_OF_TRL.read_text().splitlines()]
    return {field: json.loads(default) for config, field, default in rows if config == name}


def test_every_field_of_the_configs_is_in_the_table():
    fields = {line.split("\t")[1] for line in DEFAULTS_OF_TRL.read_text().splitlines()}
    assert len(fields) > 280
    assert [name for name in fields if find(name, TABLE) is None] == []
    assert [(kind, name) for kind, entry in KINDS.items() for name in trls(entry.config)
            if name not in entry.fields | {"learning_rate", "model_init_kwargs", "train_sampling_strategy",
                                           "remove_unused_columns", "push_to_hub"}] == []  # fmt: skip


def test_the_fields_are_those_of_trl():
    source = os.environ.get("TRL_SOURCE")
    if not source:
        pytest.skip("TRL_SOURCE is unset: it names the folder trl of a checkout")
    for path in Path(source).rglob("*_config.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and (known := trls(node.name)):
                names = {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
                assert names <= (trls("TrainingArguments") | known).keys(), node.name


@pytest.mark.parametrize(
    ("fields", "kind", "also"),
    [
        ({"num_generations": 8}, "grpo", "RLOOConfig"), ({"loss_type": "dr_grpo"}, "grpo", ""),
        ({"normalize_advantages": True, "num_generations": 2}, "rloo", ""), ({"packing": True}, "sft", "GKDConfig"),
        ({"desirable_weight": 1, "beta": 0.1}, "kto", ""), ({"center_rewards_coefficient": 0.01}, "reward", ""),
        ({"loss_type": "dft"}, "sft", ""), ({"cpo_alpha": 0, "beta": 1}, "cpo", ""), ({"lam": 1}, "ppo", ""),
        ({"teacher_model_name_or_path": "t"}, "distillation", "GKDConfig"), ({"lmbda": 0.5}, "gkd", ""),
        ({"step_separator": "x"}, "prm", ""), ({"max_new_tokens": 9, "use_vllm": True}, "online_dpo", ""),
    ],
)  # fmt: skip
def test_the_kind_is_found_from_the_fields_and_reported(fields, kind, also):
    found, note = find_kind(fields)
    assert found == kind and KINDS[kind].config in note and also in note
    assert find_kind({**fields, "config_class": "RLOOConfig"}) == ("rloo", None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": 1e-5, "output_dir": "x"}, "add --kind grpo, rloo, dpo"),
        ({"beta": 0.1}, "DPOConfig, KTOConfig.*ORPOConfig.*--kind"),
        ({"use_vllm": True}, "GRPOConfig, RLOOConfig, OnlineDPOConfig.*--kind"),
        ({"mixture_coef": 0.5, "use_vllm": True}, "mixture_coef.*NashMDConfig"),
        ({"alpha": 1e-5, "reward_model_path": "r"}, "XPOConfig"), ({"prompt_sample_size": 1, "beta": 1}, "BCOConfig"),
        ({"config_class": "GMPOConfig", "num_generations": 8}, "GMPOConfig"),
        ({"config_class": "MyConfig", "num_generations": 8}, "MyConfig.*--kind"),
    ],
)  # fmt: skip
def test_no_kind_is_guessed(fields, message):
    with pytest.raises(ValueError, match=message):
        find_kind(fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_config_of_defaults_is_a_config_without_fields(kind):
    """All of TRL's defaults are set, none is listed, and the command is one that the trainer takes."""
    saved = {**trls("TrainingArguments"), **trls("ModelConfig"), **trls(KINDS[kind].config)}
    given = {"model_name_or_path": "m", "dataset_name": "d", "teacher_model_name_or_path": "t"}
    given |= {"sft_model_path": "m", "reward_model_path": "r"} if kind == "ppo" else {}
    given = {name: value for name, value in given.items() if name in saved or name == "dataset_name"}
    made, without = translate({"config_class": KINDS[kind].config, **saved, **given}, kind)
    assert (without, made.idle) == ([], {})
    table = flag_table(config := load_method(KINDS[kind].method).Config)
    alone = translate(given, kind)[0].tree
    ours = [build(config, read_tree(tree, table, "x"), table, "x") for tree in (made.tree, alone)]
    assert ours[0] == ours[1]
    assert "special_tokens" not in made.tree  # <EOS_TOKEN> and <PAD_TOKEN> are no tokens
    unset = default_tree(config, {})
    assert {name: made.tree[name] for name in DEFAULTS[kind]} == DEFAULTS[kind]
    assert all(unset[name] != value for name, value in DEFAULTS[kind].items() if name != "learning_rate")


def test_grpo_fields():
    made, without = translate(
        {"model_name_or_path": "m", "dataset_name": "d", "dataset_config": "main", "learning_rate": "5e-6",
         "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8,
         "max_steps": 100, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "use_vllm": True,
         "reward_funcs": ["think_format_reward", "my.reward"], "top_p": 0.9, "top_k": 50, "min_p": "0.1",
         "repetition_penalty": 1.1, "report_to": "wandb", "bf16": True,
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
    assert (tree["top_p"], tree["top_k"], tree["min_p"]) == (0.9, 50, 0.1)
    assert len(without) == 1 and without[0].startswith("repetition_penalty=1.1: ")
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
    assert "use constant_with_warmup" in made.notes[0]
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
    assert without == ["entropy_coef_min=0.1: not supported; the weight can fall to 0"]


def test_cispo_without_its_bound_is_noted():
    made, _ = translate({"loss_type": "cispo", "epsilon": 0.3}, "grpo")
    assert "epsilon" not in made.tree and "loss_kwargs" not in made.tree
    assert "TRL's bound is epsilon, 0.3, which is about every token's weight" in made.notes[0]
    made, _ = translate({"loss_type": "cispo", "epsilon_high": 4}, "grpo")
    assert made.tree["loss_kwargs"] == {"cispo_cap": 4} and made.notes == []


def test_a_local_file_has_no_test_split():
    fields = {"dataset_name": "rows.jsonl", "eval_strategy": "steps", "eval_steps": 50, "beta": 0.1}
    made, _ = translate(fields, "dpo")
    assert not {"eval_data", "eval_steps"} & made.tree.keys()
    assert "rows.jsonl is a file, which has no split test; add --eval-data FILE or" in made.notes[0]
    assert made.notes[0].endswith("--eval-steps 50")
    made, _ = translate({**fields, "dataset_test_split": "train[:10%]"}, "dpo")
    assert made.tree["eval_data"] == [{"path": "rows.jsonl", "split": "train[:10%]"}] and made.tree["eval_steps"] == 50
    mixture = {"datasets": [{"path": "a.jsonl"}], "test_split_size": 0.1, "eval_strategy": "epoch", "beta": 0.1}
    made, _ = translate(mixture, "dpo")
    assert (made.tree["val_set_size"], made.tree["evals_per_epoch"], made.notes) == (0.1, 1, [])


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="num_generation: not a key of TRL, did you mean num_generations?"):
        translate({"num_generation": 4}, "grpo")


@pytest.mark.parametrize(
    ("name", "value"),
    [("per_device_train_batch_size", "x"), ("num_generations", 0), ("loss_type", {}), ("datasets", "rows"),
     ("reward_funcs", 1), ("epsilon", [1, 2])],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        translate({name: value}, "grpo")


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
    assert main(["bad.yaml", "--kind", "grpo"]) == 2
    assert "bad.yaml: num_generation: not a key of TRL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "fields", "ours"),
    [
        ("ppo", {"sft_model_path": "p", "model_name_or_path": "p", "reward_model_path": "r", "response_length": 9,
                 "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_mini_batches": 4,
                 "total_episodes": 33, "num_ppo_epochs": 3, "kl_coef": 0.2, "lam": 0.9, "cliprange": 0.1},
         {"model": "p", "reward_funcs": ["model:r"], "value_model": "r", "max_completion_length": 9,
          "per_device_train_batch_size": 4, "minibatches_per_rollout": 2, "max_steps": 3 * 3 * 2, "num_iterations": 3,
          "beta": 0.2, "kl_in_reward": True, "gae_lambda": 0.9, "epsilon": 0.1, "critic_learning_rate": 3e-6}),
        ("ppo", {"num_mini_batches": 4, "gradient_accumulation_steps": 4, "kl_coef": 0, "vf_coef": 0.5},
         {"minibatches_per_rollout": 1, "beta": 0, "kl_in_reward": False, "vf_coef": 0.5}),
        ("online_dpo", {"reward_model_path": "r", "per_device_train_batch_size": 4, "max_new_tokens": 7, "beta": [0.2],
                        "missing_eos_penalty": 1.0},
         {"reward_funcs": ["model:r"], "per_device_train_batch_size": 8, "num_generations": 2, "beta": 0.2,
          "max_completion_length": 7, "missing_eos_penalty": 1.0}),
        ("gkd", {"teacher_model_name_or_path": "t", "lmbda": 1.0, "beta": 0.0, "max_new_tokens": 7},
         {"teacher": "t", "student_data_fraction": 1.0, "jsd_beta": 0.0, "max_completion_length": 7}),
        ("distillation", {"beta": 0.5, "use_vllm": True}, {"jsd_beta": 0.5, "rollout": {"engine": "vllm"}}),
        ("orpo", {"beta": 0.3}, {"orpo_alpha": 0.3}),
        ("cpo", {"loss_type": "simpo", "cpo_alpha": 0}, {"loss_type": "simpo", "cpo_alpha": 0, "simpo_gamma": 0.5}),
        ("prm", {"step_separator": "1", "train_on_last_step_only": True},
         {"step_separator": "1", "train_on_last_step_only": True}),
        ("rloo", {"use_vllm": True}, {"vllm_importance_sampling_correction": False}),
        ("grpo", {"reward_funcs": "accuracy_reward", "epsilon": 10.0},
         {"reward_funcs": ["math_verify"], "epsilon": 1.0, "epsilon_high": 10.0}),
        ("sft", {"model_init_kwargs": {"dtype": "bfloat16"}}, {"trained_dtype": "bfloat16", "dtype": "bfloat16"}),
        ("sft", {"router_aux_loss_coef": 0.01}, {"router_aux_loss_coef": 0.01}),
        ("sft", {"activation_offloading": True}, {"activation_offloading": True}),
        ("grpo", {"report_to": "trackio"}, {"report_to": ["trackio"]}),
        ("dpo", {"dataset_name": "d", "eval_strategy": "epoch", "load_best_model_at_end": True,
                 "metric_for_best_model": "eval_rewards/accuracies"},
         {"load_best_model_at_end": True, "metric_for_best_model": "eval/reward/accuracy"}),
        ("grpo", {"dataset_name": "d", "eval_strategy": "epoch", "load_best_model_at_end": True,
                  "greater_is_better": False}, {"metric_for_best_model": "eval/reward/mean"}),
    ],
)  # fmt: skip
def test_kinds_that_rename_fields(kind, fields, ours):
    made, without = translate(fields, kind)
    assert ours.items() <= made.tree.items() and not without


@pytest.mark.parametrize(
    ("kind", "fields", "reported"),
    [
        ("kto", {"sync_ref_model": True}, "sync_ref_model=True"), ("gkd", {"max_length": 99}, "max_length=99"),
        ("gkd", {"seq_kd": True}, "seq_kd=True"), ("ppo", {"whiten_rewards": True}, "whiten_rewards=True"),
        ("ppo", {"missing_eos_penalty": 1}, "missing_eos_penalty=1"), ("ppo", {"kl_estimator": "k3"}, "kl_estimator="),
        ("grpo", {"shuffle_dataset": False}, "shuffle_dataset=False"), ("dpo", {"dtype": "float16"}, "dtype=float16"),
        ("sft", {"train_sampling_strategy": "sequential"}, "train_sampling_strategy=sequential"),
        ("grpo", {"reward_funcs": ["reasoning_accuracy_reward"]}, "reward_funcs=reasoning_accuracy_reward"),
        ("gkd", {"eval_strategy": "steps", "dataset_name": "d"}, "eval_strategy"),
        ("grpo", {"router_aux_loss_coef": 0.01}, "router_aux_loss_coef=0.01"),
        ("sft", {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy=wrapped"),
        ("sft", {"num_processes": 4, "accelerate_config": "zero2"}, "num_processes=4"),
        ("sft", {"load_best_model_at_end": True, "metric_for_best_model": "f1", "test_split_size": 0.1,
                 "datasets": [{"path": "a"}]}, "metric_for_best_model=f1"),
    ],
)  # fmt: skip
def test_fields_without_equivalent_are_listed(kind, fields, reported):
    made, without = translate(fields, kind)
    assert without[0].startswith(reported) and not fields.keys() & made.tree.keys()


def test_notes():
    texts = {
        "grpo": ({"max_tool_calling_iterations": 4, "beta": 0.1, "dtype": "auto"},
                 ("--max-turns 5", "use_bias_correction_kl", "dtype=auto")),
        "dpo": ({"router_aux_loss_coef": 0.001, "datasets": [{"path": "a"}], "dataset_name": "b"},
                ("router_aux_loss_coef=0.001", "dataset_name=b")),
        "sft": ({"load_best_model_at_end": True}, ("load_best_model_at_end",)),
        "gkd": ({"temperature": 0.7}, ("temperature=0.7",)), "ppo": ({}, ("stop_token", "value_model")),
    }  # fmt: skip
    for kind, (fields, notes) in texts.items():
        made, without = translate(fields, kind)
        assert all(any(note in line for line in made.notes) for note in notes) and not without, made.notes
        assert "router_aux_loss_coef" not in made.tree
    assert [entry["path"] for entry in translate(texts["dpo"][0], "dpo")[0].tree["data"]] == ["a"]


def test_the_load_balancing_loss_is_the_models(tmp_path):
    """TRL's default: the weight in the model's config. A dense model has none."""
    (tmp_path / "config.json").write_text('{"router_aux_loss_coef": 0.02}')
    fields = {"model_name_or_path": str(tmp_path)}
    assert translate(fields, "sft")[0].tree["router_aux_loss_coef"] == 0.02
    assert translate({**fields, "router_aux_loss_coef": 0.001}, "sft")[0].tree["router_aux_loss_coef"] == 0.001
    assert "router_aux_loss_coef" not in translate({**fields, "router_aux_loss_coef": 0.0}, "sft")[0].tree
    assert translate(fields, "grpo")[1] == ["router_aux_loss_coef=0.02: only for offline methods"]


def test_command_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text("model_name_or_path: m\nlearning_rate: 1e-5\nmax_length: 64\n")

    def run(command: str) -> tuple[dict[str, Any], str]:
        assert main(["--yaml", *shlex.split(command)]) == 0
        printed = capsys.readouterr()
        return yaml.safe_load(printed.out), printed.err

    made, said = run("CUDA_VISIBLE_DEVICES=0 trl sft --config sft.yaml --learning-rate=2e-5 --packing --use_peft "
                     "--lora_target_modules q_proj k_proj --no_gradient_checkpointing --eval_strategy no --bf16 True "
                     "--model_init_kwargs '{\"dtype\": \"bfloat16\"}'")  # fmt: skip
    assert (made["method"], made["model"], made["max_length"], made["learning_rate"]) == ("sft", "m", 64, 2e-5)
    assert made["lora"]["target_modules"] == ["q_proj", "k_proj"] and made["gradient_checkpointing"] is False
    assert made["dtype"] == "bfloat16" and "add --data" in said
    made, said = run(
        "accelerate launch --num_processes 8 trl/scripts/dpo.py --loss_type sigmoid sft --loss_weights 1 2"
    )
    assert (made["method"], made["loss_type"], made["loss_weights"]) == ("dpo", ["sigmoid", "sft"], [1, 2])
    assert "accelerate launch --num_processes 8: start strop with torchrun" in said
    made, said = run("python examples/scripts/reward_modeling.py --max_length 8")
    assert made["method"] == "rm" and "reward_modeling.py" in said
    assert run("--kind kto python train.py --beta 0.2")[0]["method"] == "kto"
    made, _ = run("trl sft --use_peft no --save_strategy no")
    assert "lora" not in made and made["save_steps"] == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trl", "trl KIND"), ("trl xpo --beta 1", "XPOConfig"), ("python nash_md.py --beta 1", "NashMDConfig"),
        ("python train.py --beta 1", "train: .*--kind"), ("trl vllm-serve --model m", "rollout.serve"),
        ("accelerate launch examples/scripts/sft_vlm.py", "sft_vlm: images"), ("trl sft x --beta 1", "x: "),
        ("trl sft --packin", "packin: .*packing"), ("trl sft --config none.yaml", "none.yaml"),
    ],
)  # fmt: skip
def test_command_lines_that_are_rejected(command, message, capsys):
    assert main(shlex.split(command)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_scripts(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text("import trl\nx = 1\nargs = trl.RLOOConfig(beta=0.1, seed=x, model_init_kwargs={'dtype': 'auto'})\n")
    assert main([str(file)]) == 0
    printed = capsys.readouterr()
    assert "--method rloo" in printed.out and "--beta 0.1" in printed.out and "--seed 42" in printed.out
    assert "seed=x: skipped, not a literal" in printed.err and "peft_config" in printed.err
    for text, message in (("GRPOConfig(); DPOConfig()", "GRPOConfig, DPOConfig"), ("XPOConfig()", "XPOConfig"),
                          ("x = (", "Python")):  # fmt: skip
        file.write_text(text)
        assert main([str(file)]) == 2 and message in capsys.readouterr().err


def test_a_config_of_accelerate_is_named(tmp_path, capsys):
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    assert main([str(tmp_path / "zero3.yaml")]) == 2
    assert "torchrun --nproc-per-node 4 -m trainer --parallel.mode fsdp" in capsys.readouterr().err


def test_configs_of_the_documents(asset, tmp_path, monkeypatch, capsys):
    """Both have fewer completions in a step than in a group, which a run on one GPU rejects."""
    monkeypatch.chdir(tmp_path)
    found = []
    for path in sorted(asset("seeds").glob("*.txt")):
        found += re.findall(r"GRPOConfig\(\n.*?\n\)", path.read_text(encoding="utf-8"), re.S)
    assert len(found) == 2
    for text, (size, step, fitting) in zip(found, ((8, 4, 8), (16, 8, 4)), strict=True):
        Path("grpo.py").write_text(text)
        assert main(["grpo.py"]) == 0
        printed = capsys.readouterr()
        assert f"num_generations={size}: {step} completions" in printed.err
        assert f"--gradient-accumulation-steps {fitting}" in printed.err
        words = shlex.split(printed.out.replace("\\\n", " "))[3:]
        needed = ["--model", "builtin:tiny", "--data", "task:addition"]
        with pytest.raises(ValueError, match=f"num_generations={size}: {step} completions"):
            parse([*words, *needed])
        parse([*words, *needed, "--gradient-accumulation-steps", str(fitting)])


@pytest.mark.slow
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
