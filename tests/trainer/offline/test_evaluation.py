"""Recompute the held-out metrics of a run from its exported model, with plain transformers and peft."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tasks import make_rows
from tests.entry import metrics
from trainer.__main__ import main
from trainer.policy.load import BUILTIN

BASE = BUILTIN["builtin:tiny"]
NUM_ROWS = 8
ARGV = [
    "--max-steps", "2", "--per-device-train-batch-size", "8", "--save-steps", "0", "--learning-rate", "1e-3",
    "--warmup-ratio", "0", "--data", "task:addition:split=train,size=16",
    "--eval-data", f"task:addition:split=eval,size={NUM_ROWS}", "--eval-steps", "0",
]  # fmt: skip


class Sequence(NamedTuple):
    response: Tensor  # log-probs of the response's tokens
    whole: Tensor  # log-probs of every token but the first


@functools.cache
def held_out() -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, prompt + chosen, prompt + rejected, rendered by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    render = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    rows = []
    for row in make_rows("addition", split="eval", size=NUM_ROWS, seed=0, difficulty=2):
        whole = []
        for side in ("chosen", "rejected"):
            ids = render([*row["prompt"], {"role": "assistant", "content": row[side]}])
            whole.append(ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)])  # a response ends with its turn
        rows.append((render(row["prompt"], add_generation_prompt=True), *whole))
    return rows


@torch.no_grad()
def logps_of(model: Any) -> list[tuple[Sequence, Sequence]]:
    """Log-probs of chosen and rejected, one sequence at a time."""
    rows = []
    for prompt, *responses in held_out():
        sides = []
        for response in responses:
            assert response[: len(prompt)] == prompt
            ids = torch.tensor(response)
            logp = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(dim=-1)
            logp = logp.gather(1, ids[1:, None]).squeeze(1)
            sides.append(Sequence(logp[len(prompt) - 1 :], logp))
        rows.append((sides[0], sides[1]))
    return rows


def rewards(scored: list[tuple[Sequence, Sequence]]) -> Tensor:  # (rows, 2) log-probs of whole responses
    return torch.stack([torch.stack([w.response.sum(), r.response.sum()]) for w, r in scored])


def nll(scored: list[tuple[Sequence, Sequence]], field: str) -> Tensor:
    return -torch.cat([getattr(w, field) for w, _ in scored]).mean()


def dpo_formula(trained: Any, base: Any, beta: float) -> tuple[Tensor, Tensor]:
    """Loss and (rows, 2) rewards."""
    reward = beta * (rewards(logps_of(trained)) - rewards(logps_of(base)))
    return -F.logsigmoid(reward[:, 0] - reward[:, 1]).mean(), reward


def orpo_formula(trained: Any, base: Any, alpha: float) -> tuple[Tensor, Tensor]:
    scored = logps_of(trained)
    mean = torch.stack([torch.stack([w.response.mean(), r.response.mean()]) for w, r in scored])
    log_odds = mean - torch.log1p(-mean.exp())
    return nll(scored, "whole") - alpha * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1]).mean(), alpha * mean


def cpo_formula(trained: Any, base: Any, beta: float) -> tuple[Tensor, Tensor]:
    scored = logps_of(trained)
    reward = beta * rewards(scored)
    return -F.logsigmoid(reward[:, 0] - reward[:, 1]).mean() + nll(scored, "response"), reward


def plain_model(folder: Path) -> Any:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    kind = AutoPeftModelForCausalLM if (folder / "adapter_config.json").exists() else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


CASES: dict[str, tuple[list[str], Callable[[Any, Any], tuple[Tensor, Tensor]]]] = {
    "dpo, adapter": (
        ["--method", "dpo", "--beta", "0.2", "--lora.r", "4", "--lora.dropout", "0.2", "--no-packing"],
        functools.partial(dpo_formula, beta=0.2),
    ),
    "orpo": (["--method", "orpo", "--orpo-alpha", "0.3"], functools.partial(orpo_formula, alpha=0.3)),
    "cpo": (["--method", "cpo", "--beta", "0.2"], functools.partial(cpo_formula, beta=0.2)),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_transformers_reproduces_the_evaluation(name, tmp_path, capfd):
    argv, formula = CASES[name]
    assert main([*argv, *ARGV, "--output-dir", str(tmp_path / "run")]) == 0
    first, *_, last = metrics(tmp_path / "run")
    base, trained = plain_model(BASE), plain_model(tmp_path / "run" / "final")
    assert (tmp_path / "run" / "final" / "adapter_config.json").exists() == ("adapter" in name)
    assert abs(last["eval/loss"] - first["eval/loss"]) > 1e-3  # training moved it
    for row, model in ((first, base), (last, trained)):
        loss, reward = formula(model, base)
        assert row["eval/rows"] == NUM_ROWS
        assert row["eval/loss"] == pytest.approx(loss.item(), abs=1e-5)
        margin = reward[:, 0] - reward[:, 1]
        wanted = {
            "accuracy": (margin > 1e-9).double().mean(), "margin": margin.mean(),  # before training, ties
            "chosen": reward[:, 0].mean(), "rejected": reward[:, 1].mean(),
        }  # fmt: skip
        for key, value in wanted.items():
            assert row[f"eval/reward/{key}"] == pytest.approx(value.item(), abs=1e-5), key
