"""Reward model: gradients against the formula, and a whole run from pairs to a reward for GRPO."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from data.types import Pair
from tests.entry import metrics, run_ok
from trainer.config.blocks import DataConfig, LoraConfig, ModelConfig, RunConfig
from trainer.methods import rm
from trainer.policy.heads import load_scorer
from trainer.policy.logps import Policy

VOCAB = 37
PAIRS = 8
PROMPT_LENGTHS = (3, 1, 6, 2, 6, 4, 5, 3)
CHOSEN_LENGTHS = (1, 9, 4, 2, 12, 1, 7, 3)
REJECTED_LENGTHS = (5, 1, 4, 11, 2, 1, 3, 6)
MARGINS = (None, 0.5, None, 1.0, 0.0, 0.25, None, 2.0)
TOTAL = 2 * sum(PROMPT_LENGTHS) + sum(CHOSEN_LENGTHS) + sum(REJECTED_LENGTHS)
# Tokens per micro-batch, accumulation, packing: one pair, half of the pairs, all pairs.
CUTS = [(1, 1, True), (1, 4, False), (TOTAL // 2, 2, True), (TOTAL // 2, 1, False), (4 * TOTAL, 4, True),
        (4 * TOTAL, 2, False)]  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
CENTER = 0.05


@functools.cache
def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForSequenceClassification(config)


def make_scorer(dtype: torch.dtype) -> Policy:
    model = copy.deepcopy(make_llama()).to(dtype).train()
    return Policy(model=model, tokenizer=None, source="test", device=torch.device("cpu"), compute_dtype=dtype)


def make_pairs(margins: tuple[float | None, ...] = MARGINS) -> list[Pair]:
    generator = torch.Generator().manual_seed(2)

    def ids(length: int) -> list[int]:
        return torch.randint(1, VOCAB, (length,), generator=generator).tolist()

    lengths = zip(PROMPT_LENGTHS, CHOSEN_LENGTHS, REJECTED_LENGTHS, margins, strict=True)
    return [
        Pair(source=f"test:{i}", prompt_ids=ids(p), chosen_ids=ids(w), rejected_ids=ids(r), margin=margin)
        for i, (p, w, r, margin) in enumerate(lengths)
    ]


def make_config(budget: int = 4 * TOTAL, accumulation: int = 1, packing: bool = True, **settings: Any) -> rm.Config:
    size = RunConfig(
        per_device_train_batch_size=PAIRS // accumulation, gradient_accumulation_steps=accumulation,
        max_tokens_per_micro_batch=budget, packing=packing,
    )  # fmt: skip
    blocks = {"model": ModelConfig(model="test"), "data": DataConfig(data=("test",)), "run": size}
    return rm.Config(**blocks | settings)


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def by_hand(pairs: list[Pair], center: float) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics from the formula and transformers' forward, one sequence at a time, in float64."""
    model = make_scorer(torch.float64).model

    def scores(name: str) -> Tensor:
        rows = [[*pair.prompt_ids, *getattr(pair, name)] for pair in pairs]
        return torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])

    w, r = scores("chosen_ids"), scores("rejected_ids")
    margin = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float64)
    likelihood = (1 + (-(w - r - margin)).exp()).log().mean()
    total = likelihood + center * (w + r).pow(2).mean()
    total.backward()
    expected = {
        "loss/total": total.item(), "loss/bradley_terry": likelihood.item(), "reward/chosen": w.mean().item(),
        "reward/rejected": r.mean().item(), "reward/margin": (w - r).mean().item(),
        "reward/accuracy": (w > r).double().mean().item(),
    }  # fmt: skip
    return gradient(model), expected


@pytest.fixture(scope="module")
def expected() -> dict[float, tuple[Tensor, dict[str, float]]]:
    return {center: by_hand(make_pairs(), center) for center in (0.0, CENTER)}


def test_the_gradient_does_not_depend_on_micro_batches(expected):
    centers = itertools.cycle((CENTER, 0.0, 0.0, CENTER))  # every cut with and without, in one dtype each
    cases = zip(centers, itertools.product(TOLERANCE, CUTS), strict=False)
    for center, (dtype, (budget, accumulation, packing)) in cases:
        want, numbers = expected[center]
        scorer, pairs = make_scorer(dtype), make_pairs()
        cfg = make_config(budget, accumulation, packing, center_rewards_coefficient=center or None)
        micro_batches = rm.pack(cfg, scorer, pairs, accumulation)
        logged = rm.backward(cfg, scorer, micro_batches, pairs).means()
        assert (gradient(scorer.model).double() - want).norm() < TOLERANCE[dtype] * want.norm(), (dtype, cfg.run)
        assert {name: logged[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6), (dtype, cfg.run)
        assert budget > 1 or len(micro_batches) == PAIRS


def test_the_gradient_depends_on_margins_but_not_on_row_order(expected):
    want, _ = expected[0.0]
    for change, same in ((lambda pairs: pairs[::-1], True), (lambda pairs: make_pairs((None,) * PAIRS), False)):
        scorer, pairs, cfg = make_scorer(torch.float64), change(make_pairs()), make_config(TOTAL // 2)
        rm.backward(cfg, scorer, rm.pack(cfg, scorer, pairs, 1), pairs)
        gap = (gradient(scorer.model) - want).norm() / want.norm()
        assert gap < 1e-9 if same else gap > 1e-2


def test_evaluation_matches_the_formula(expected):
    _, numbers = expected[CENTER]
    held_out = DataConfig(data=("test",), eval_data=("test",))
    cfg = make_config(TOTAL // 3, center_rewards_coefficient=CENTER, data=held_out)
    scorer = make_scorer(torch.float32)
    logged = rm.evaluate(cfg, scorer, make_pairs())
    assert logged.pop("eval/rows") == PAIRS
    assert logged.pop("eval/loss") == pytest.approx(numbers["loss/total"], rel=1e-4)
    assert logged == pytest.approx({f"eval/{n}": v for n, v in numbers.items() if n.startswith("reward/")}, rel=1e-4)


def test_invalid_settings_are_rejected():
    for name, value in (("max_length", 1), ("center_rewards_coefficient", -0.1)):
        with pytest.raises(ValueError, match=f"{name}={value}: "):
            make_config(**{name: value})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short LoRA run on built-in pairs; the export is merged."""
    cwd = tmp_path_factory.mktemp("rm")
    run_ok(
        "--method", "rm", "--max-steps", "2", "--lora.r", "4", "--eval-data", "task:addition:split=eval,size=12",
        "--save-steps", "1", "--learning-rate", "1e-3", "--per-device-train-batch-size", "8",
        "--data", "task:addition:split=train,size=64",
        "--output-dir", "scorer", cwd=cwd,
    )  # fmt: skip
    return cwd


def test_export_reproduces_the_evaluation_in_plain_transformers(finished):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from data.tasks import make_rows

    folder = finished / "scorer" / "final"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def scores(name: str) -> Tensor:
        chats = [[*row["prompt"], {"role": "assistant", "content": row[name]}] for row in rows]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False).rstrip() for chat in chats]
        return model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]

    rows = make_rows("addition", split="eval", size=12, seed=0)
    margin = scores("chosen") - scores("rejected")
    last = metrics(finished / "scorer")[-1]
    assert last["eval/rows"] == 12
    assert last["eval/loss"] == pytest.approx((1 + (-margin).exp()).log().mean().item(), abs=1e-5)
    assert last["eval/reward/margin"] == pytest.approx(margin.mean().item(), abs=1e-5)
    assert last["eval/reward/accuracy"] == pytest.approx((margin > 0).float().mean().item())


def test_a_resumed_run_equals_an_uninterrupted_run(finished, tmp_path):
    shutil.copytree(finished / "scorer", tmp_path / "scorer")
    run_ok("--resume", tmp_path / "scorer" / "checkpoints" / "step-00000001", cwd=tmp_path)
    for name in ("loss/total", "eval/loss", "optim/grad_norm"):
        assert metrics(tmp_path / "scorer")[-1][name] == metrics(finished / "scorer")[-1][name]


def test_a_trained_reward_model_is_a_reward_for_grpo(finished):
    run_ok(
        "--method", "grpo", "--max-steps", "1", "--reward-funcs", "model:scorer", "--per-device-train-batch-size", "16",
        "--eval-data", "task:addition:split=eval,size=4", "--output-dir", "policy", cwd=finished,
    )  # fmt: skip
    last = metrics(finished / "policy")[-1]
    assert last["reward/model/mean"] == pytest.approx(last["reward/mean"]) and last["reward/model/std"] > 0
    samples = [json.loads(line) for line in (finished / "policy" / "samples.jsonl").read_text().splitlines()]
    assert all("model" in sample["rewards"] for sample in samples)


def test_pairs_over_max_length_are_skipped_and_counted(tmp_path, capsys):
    rows = [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": "Say it at length:", "chosen": "4" * 30, "rejected": "5"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scorer = load_scorer(ModelConfig(model="builtin:tiny"), LoraConfig(), torch.device("cpu"), kind="sequence")
    data = (str(tmp_path / "pairs.jsonl"),)
    (kept,) = rm.pairs_of(make_config(max_length=20), scorer, data)
    assert kept.source.endswith("pairs.jsonl:1") and kept.chosen_ids[-1] == scorer.tokenizer.eos_token_id
    assert "of 2 rows, 1 skipped, longer than max_length=20" in capsys.readouterr().err
    assert len(rm.pairs_of(make_config(max_length=60), scorer, data)) == 2
    with pytest.raises(ValueError, match=r"max_length=5: none of the 2 rows fits"):
        rm.pairs_of(make_config(max_length=5), scorer, data)
