"""Process reward model: gradients against the formula, and a whole run from steps to a reward."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from data.types import Steps
from tests.entry import metrics, run_ok
from trainer.config.blocks import DataConfig, ModelConfig, RunConfig
from trainer.methods import prm
from trainer.policy.logps import Policy

VOCAB = 37
LENGTHS = (9, 3, 14, 6, 2, 11, 5, 7)
LABELLED = ({4: 1, 8: 0}, {2: 1}, {3: 1, 7: 1, 10: 0, 13: 0}, {5: 0}, {1: 1}, {2: 1, 10: 1}, {4: 0}, {3: 1, 6: 1})
TOTAL = sum(LENGTHS)
# Tokens per micro-batch, accumulation, packing: one solution, half of the solutions, all solutions.
CUTS = [(1, 1, True), (1, 4, False), (TOTAL // 2, 2, True), (TOTAL // 2, 1, False), (4 * TOTAL, 4, True),
        (4 * TOTAL, 2, False)]  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@functools.cache
def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForTokenClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, num_labels=2, pad_token_id=0,
        classifier_dropout=0.0,
    )  # fmt: skip
    return LlamaForTokenClassification(config)


def make_scorer(dtype: torch.dtype) -> Policy:
    model = copy.deepcopy(make_llama()).to(dtype).train()
    return Policy(model=model, tokenizer=None, source="test", device=torch.device("cpu"), compute_dtype=dtype)


def make_solutions() -> list[Steps]:
    generator = torch.Generator().manual_seed(2)
    return [
        Steps(
            source=f"test:{i}", ids=torch.randint(VOCAB, (length,), generator=generator).tolist(),
            labels=[labels.get(position, -100) for position in range(length)],
        )
        for i, (length, labels) in enumerate(zip(LENGTHS, LABELLED, strict=True))
    ]  # fmt: skip


def make_config(budget: int = 4 * TOTAL, accumulation: int = 1, packing: bool = True, **settings: Any) -> prm.Config:
    size = RunConfig(
        per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
        max_tokens_per_micro_batch=budget, packing=packing,
    )  # fmt: skip
    blocks = {"model": ModelConfig(model="test"), "data": DataConfig(data=("test",)), "run": size}
    return prm.Config(**blocks | settings)


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def by_hand() -> tuple[Tensor, float, list[tuple[int, int]]]:
    """Gradient, loss and (label, answer) of each step, from transformers' forward and loss in float64."""
    model, losses, answers = make_scorer(torch.float64).model, [], []
    for solution in make_solutions():
        logits = model(input_ids=torch.tensor([solution.ids])).logits[0]
        labels = torch.tensor(solution.labels)
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        answers += [(label, int(logits[i].argmax())) for i, label in enumerate(solution.labels) if label >= 0]
    loss = torch.stack(losses).sum() / len(answers)
    loss.backward()
    return gradient(model), loss.item(), answers


def test_the_gradient_does_not_depend_on_micro_batches(by_hand):
    want, loss, answers = by_hand
    for dtype, cut in itertools.product(TOLERANCE, CUTS):
        scorer, solutions, cfg = make_scorer(dtype), make_solutions(), make_config(*cut)
        micro_batches = prm.pack(cfg, scorer, solutions, cut[1])
        logged = prm.backward(scorer, micro_batches, solutions).means()
        assert (gradient(scorer.model).double() - want).norm() < TOLERANCE[dtype] * want.norm(), (dtype, cut)
        assert logged["loss/total"] == logged["loss/steps"] == pytest.approx(loss, rel=1e-5), (dtype, cut)
        assert logged["reward/step_accuracy"] == pytest.approx(sum(a == b for a, b in answers) / len(answers))
        assert cut[0] > 1 or len(micro_batches) == len(solutions)


def f1_by_hand(answers: list[tuple[int, int]]) -> float:
    scores = []
    for which in (0, 1):
        hit = sum(label == answer == which for label, answer in answers)
        scores.append(2 * hit / (sum(label == which for label, _ in answers) + sum(a == which for _, a in answers)))
    return sum(scores) / 2


def test_evaluation_reports_accuracy_and_f1_also_of_the_majority_class(by_hand):
    _, loss, answers = by_hand
    scorer = make_scorer(torch.float32)
    held_out = DataConfig(data=("test",), eval_data=("test",))
    logged = prm.evaluate(make_config(TOTAL // 3, data=held_out), scorer, make_solutions())
    majority = [(label, 1) for label, _ in answers]
    assert logged == pytest.approx({
        "eval/loss": loss,
        "eval/reward/step_accuracy": sum(a == b for a, b in answers) / len(answers),
        "eval/reward/macro_f1": f1_by_hand(answers),
        "eval/reward/macro_f1_majority": f1_by_hand(majority),
        "eval/rows": len(LENGTHS),
    }, rel=1e-4)  # fmt: skip
    assert 0 < logged["eval/reward/step_accuracy"] < 1


def test_invalid_settings_are_rejected():
    for settings, message in (
        ({"max_length": 1}, "max_length=1: .*2"),
        ({"max_completion_length": 0}, "max_completion_length=0: .*1"),
        ({"step_separator": ""}, "step_separator"),
    ):
        with pytest.raises(ValueError, match=message):
            make_config(**settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("prm")
    run_ok(
        "--method", "prm", "--max-steps", "2", "--eval-data", "task:steps:split=eval,size=12",
        "--per-device-train-batch-size", "8", "--data", "task:steps:split=train,size=64",
        "--train-on-last-step-only", "--step-separator", ";\n", "--output-dir", "judge", cwd=cwd,
    )  # fmt: skip
    return cwd


def test_export_reproduces_the_evaluation_in_plain_transformers(finished):
    """The evaluation covers all steps, although only the last step of each solution was trained."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from data.tasks import make_rows

    folder = finished / "judge" / "final"
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.strop == {"step_separator": ";\n", "system_prompt": None, "chat_template_kwargs": {}}
    assert model.config.id2label == {0: "wrong", 1: "right"}
    losses = []
    for row in make_rows("steps", split="eval", size=12, seed=0):
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text)["input_ids"]
        for step, label in zip(row["completions"], row["labels"], strict=True):
            ids += tokenizer(step)["input_ids"] + tokenizer(";\n")["input_ids"]
            with torch.no_grad():
                logp = model(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1)
            losses.append(-logp[int(label)].item())
    assert metrics(finished / "judge")[-1]["eval/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_trained_prm_is_a_reward(finished):
    from data.types import Prompt
    from rollout.engine import Completion
    from rollout.rewards.table import load_rewards

    prompt = Prompt(source="test:0", prompt=[{"role": "user", "content": "3+8+5="}], ids=[])
    fields = {"prompt_ids": [], "ids": [], "logps": [], "finish_reason": "stop", "versions": []}
    completions = [Completion(text=text, **fields) for text in ("3+8=11;\n11+5=16", "3+8=11;\n11+5=17", "")]
    scores = []
    for how in ("min", "mean", "last"):
        rewards = load_rewards([f"prm:{finished / 'judge'},{how}"])
        assert rewards.names == ["prm"]
        scores.append([row[0] for row in rewards.score([prompt] * 3, completions).values])
    for worst, mean, last in list(zip(*scores, strict=True))[:2]:  # two steps: the worst is the first or the last
        assert 0 < worst <= mean < 1 and min(abs(worst - last), abs(2 * mean - last - worst)) < 1e-6
    assert [row[2] for row in scores] == [0.0, 0.0, 0.0]
