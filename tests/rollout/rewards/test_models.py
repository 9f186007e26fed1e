"""Rewards from models on disk, compared with the models' own forward on one conversation at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from data.chat import render_conversation
from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards import models
from rollout.rewards.table import load_rewards
from trainer.tiny.build import make_tokenizer

COMMON = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.2, bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
QUESTIONS = ("2+2=", "17+25=", "What is a hundred and one?")
ANSWERS = ("4", "42", "")


def save(folder: Path, kind: str, *, num_labels: int, strop: dict[str, Any] | None = None, **changes: Any) -> Path:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_labels=num_labels, architectures=[f"LlamaFor{kind}"], **{**COMMON, **changes}
    )
    if strop is not None:
        config.strop = strop
    getattr(transformers, f"LlamaFor{kind}")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("rm"), "SequenceClassification", num_labels=1, strop={"system_prompt": None})


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Path:
    strop = {"step_separator": "\n\n"}
    return save(tmp_path_factory.mktemp("prm"), "TokenClassification", num_labels=2, strop=strop)


def score(spec: str, prompts: list[Any], texts: list[str]) -> list[float]:
    rewards = load_rewards([spec])
    assert rewards.names == [spec.partition(":")[0]]
    rows = [Prompt(source=f"test:{i}", prompt=prompt, ids=[]) for i, prompt in enumerate(prompts)]
    completions = [
        Completion(prompt_ids=[], ids=[9], logps=[0.0], finish_reason="stop", text=text, versions=[]) for text in texts
    ]
    table = rewards.score(rows, completions)
    return [row[0] for row in table.values]


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_conversations_are_scored_at_the_end_of_the_answer(outcome):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(outcome).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(outcome)
    found = score(f"model:{outcome}", [chat(q) for q in QUESTIONS], list(ANSWERS))
    for question, answer, value in zip(QUESTIONS, ANSWERS, found, strict=True):
        ids, mask = render_conversation(tokenizer, [*chat(question), {"role": "assistant", "content": answer}])
        ids = ids[: max(i for i, trained in enumerate(mask) if trained) + 1]
        assert tokenizer.decode(ids).endswith(f"{answer}<|im_end|>")
        assert value == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-5)
    assert len({round(value, 3) for value in found}) == 3


def test_plain_text_ends_with_the_eos_token(outcome):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(outcome).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(outcome)
    (found,) = score(f"model:{outcome}", ["2+2="], ["4"])
    ids = [*tokenizer("2+2=4")["input_ids"], tokenizer.eos_token_id]
    assert found == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, {"pad_token_id": None}, {"pad_token_id": 2}], ids=["pad", "none", "pad == eos"]
)
def test_a_score_does_not_depend_on_the_batch(changes, tmp_path, monkeypatch):
    """Even if the model's config has no padding token, or uses the eos token for padding."""
    folder = save(tmp_path, "SequenceClassification", num_labels=1, **changes)
    alone = [score(f"model:{folder}", [chat(q)], [a])[0] for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    for budget in (16384, 60, 1):
        monkeypatch.setattr(models, "MAX_TOKENS", budget)
        together = score(f"model:{folder}", [chat(q) for q in QUESTIONS], list(ANSWERS))
        assert together == pytest.approx(alone, abs=1e-5)


def test_other_models_are_scored_after_everything_their_template_writes(tmp_path):
    folder = save(tmp_path, "SequenceClassification", num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([*chat("2+2="), {"role": "assistant", "content": "4"}], tokenize=False)
    assert text.endswith("<|im_end|>\n")
    (found,) = score(f"model:{folder}", [chat("2+2=")], ["4"])
    assert found == pytest.approx(model(**tokenizer([text], return_tensors="pt")).logits.item(), abs=1e-5)


def test_the_system_prompt_from_training_is_used(tmp_path):
    strop = {"system_prompt": "Judge."}
    folder = save(tmp_path, "SequenceClassification", num_labels=1, strop=strop)
    system = {"role": "system", "content": "Judge."}
    bare, same, other = score(
        f"model:{folder}",
        [chat("2+2="), [system, *chat("2+2=")], [{**system, "content": "Be kind."}, *chat("2+2=")]],
        ["4", "4", "4"],
    )
    assert bare == pytest.approx(same, abs=1e-6) and abs(bare - other) > 1e-3


def test_steps_are_scored_at_their_separators(process):
    for how, combine in [("", min), (",min", min), (",mean", None), (",last", lambda p: p[-1])]:
        model = transformers.AutoModelForTokenClassification.from_pretrained(process).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(process)
        text = "2+2=4\n\n\n\n4+4=8\n\n8+8=15"  # the empty step between the first two is skipped
        (found,) = score(f"prm:{process}{how}", ["Double it:"], [text])
        ids, ends = tokenizer("Double it:")["input_ids"], []
        for step in ("2+2=4", "4+4=8", "8+8=15"):
            ids += tokenizer(step)["input_ids"] + tokenizer("\n\n")["input_ids"]
            ends.append(len(ids) - 1)
        right = model(torch.tensor([ids])).logits[0, ends].softmax(dim=-1)[:, 1].tolist()
        assert found == pytest.approx(combine(right) if combine else sum(right) / 3, abs=1e-5)
        assert len({round(p, 4) for p in right}) == 3


def test_a_completion_without_a_step_gets_0(process):
    assert score(f"prm:{process}", ["Double it:", "Double it:"], ["", "\n\n \n\n"]) == [0.0, 0.0]


def test_steps_do_not_depend_on_the_batch(process):
    texts = ["1+1=2", "2+2=4\n\n4+4=8\n\n8+8=16", "3"]
    prompts = ["Double it:", [{"role": "user", "content": "Double it:"}], "Once more:"]
    together = score(f"prm:{process},mean", prompts, texts)
    alone = [score(f"prm:{process},mean", [p], [t])[0] for p, t in zip(prompts, texts, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5) and all(0 < value < 1 for value in together)


def test_a_run_folder_means_its_final_model(outcome, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(outcome)
    assert score(f"model:{tmp_path}/run", ["2+2="], ["4"]) == score(f"model:{outcome}", ["2+2="], ["4"])


def test_load_reward_model_rejects(outcome, process, tmp_path):
    lm = tmp_path / "lm"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=275, **COMMON)).save_pretrained(lm)
    three = save(tmp_path / "three", "SequenceClassification", num_labels=3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for spec, message in (
        ("model", "model: .*model:PATH"),
        ("prm:", "prm: .*prm:PATH"),
        (f"model:{tmp_path}/gone", "gone: no such folder"),
        (f"model:{tmp_path}/empty", r"empty: .*\(no config.json\)"),
        (f"model:{tmp_path}/adapter", "adapter: an adapter"),
        (f"model:{lm}", r"LlamaForCausalLM has no SequenceClassification head\)"),
        (f"model:{process}", "LlamaForTokenClassification .*; did you mean prm:"),
        (f"prm:{outcome}", "LlamaForSequenceClassification .*; did you mean model:"),
        (f"model:{three}", "3 outputs, not 1"),
        (f"prm:{process},max", "'max'.*min, mean or last"),
    ):
        with pytest.raises(ValueError, match=f"^reward_funcs=.*{message}"):
            load_rewards([spec])


def test_a_model_without_its_head_is_rejected(outcome, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path, "SequenceClassification", num_labels=1)
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="score.weight"):
        load_rewards([f"model:{folder}"])


def test_a_row_longer_than_the_context_is_reported(outcome):
    with pytest.raises(ValueError, match="context of 64 on test:1"):
        score(f"model:{outcome}", ["2+2=", "2+2="], ["4", "4" * 70])


def test_the_template_settings_from_training_are_used(tmp_path):
    folders = []
    for name, strop in (("none", {}), ("set", {"chat_template_kwargs": {"style": "5"}})):
        folder = save(tmp_path / name, "SequenceClassification", num_labels=1, strop={"system_prompt": None, **strop})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "message['content']", "message['content'] + style | string"
        )
        tokenizer.chat_template = "{% set style = style or '' %}" + tokenizer.chat_template
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    bare, same = score(f"model:{folders[0]}", [chat("2+2="), chat("2+2=5")], ["4", "45"])
    (styled,) = score(f"model:{folders[1]}", [chat("2+2=")], ["4"])
    assert styled == pytest.approx(same, abs=1e-5) and abs(styled - bare) > 1e-3
