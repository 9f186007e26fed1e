"""Settings that users of other libraries bring, in whole runs of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data.rows.held_out import held_out_numbers
from data.tasks import make_rows
from tests.entry import metrics, repeatable
from trainer.__main__ import main
from trainer.policy.load import BUILTIN

SPLIT = {"sft": "sft"}  # of a method's task; train for the others
METHODS = ["sft", "dpo", "kto", "orpo", "cpo", "rm", "prm", "grpo", "ebft", "ebft, strided"]


def train(folder: Path, method: str, *argv: Any, steps: int = 2, code: int = 0) -> list[dict[str, Any]]:
    """Metrics of a short run, without clocks."""
    name, _, mode = method.partition(", ")
    words = ["--method", name, *(["--mode", mode] if mode else []), "--model", "builtin:tiny", "--save-steps", 0]
    words += ["--max-steps", steps, "--per-device-train-batch-size", 4, "--learning-rate", 1e-3]
    if name in ("grpo", "ebft") and not mode:
        words += ["--num-generations", 2, "--max-completion-length", 8]
    if name == "grpo":
        words += ["--reward-funcs", "exact_match"]
    if mode:
        words += ["--stride", 8]
    assert main([str(word) for word in [*words, *argv, "--output-dir", folder]]) == code
    return repeatable(metrics(folder)) if code == 0 else []


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_for(method: str, count: int = 12) -> list[dict[str, Any]]:
    if method in ("prm", "ebft, strided"):
        split = "train" if method == "prm" else "sft"
        return list(make_rows("steps", split=split, size=count, seed=0, difficulty=4))
    rows = list(make_rows("addition", split=SPLIT.get(method, "train"), size=count, seed=0, difficulty=2))
    if method == "kto":  # a pair would be two rows
        sides = ("chosen", "rejected")
        return [{"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row[sides[n % 2]]}],
                 "label": n % 2 == 0} for n, row in enumerate(rows)]  # fmt: skip
    return rows


@pytest.mark.parametrize("method", METHODS)
def test_held_out_rows_are_those_of_two_files(method, tmp_path, capfd):
    rows, more = rows_for(method), ["--train-on-last-step-only"] if method == "prm" else []
    chosen = held_out_numbers(len(rows), 0.25, 7)
    whole = write(tmp_path / "whole.jsonl", rows)
    kept = write(tmp_path / "kept.jsonl", [row for n, row in enumerate(rows) if n not in chosen])
    held_out = write(tmp_path / "held_out.jsonl", [rows[n] for n in sorted(chosen)])
    split = train(tmp_path / "split", method, "--data", whole, "--val-set-size", 0.25, "--seed", 7, *more, steps=1)
    assert "data: held out 3 of 12 rows (val_set_size=0.25)" in capfd.readouterr().err
    files = train(tmp_path / "files", method, "--data", kept, "--eval-data", held_out, "--seed", 7, *more, steps=1)
    assert split == files
    assert split[0]["eval/rows"] == split[-1]["eval/rows"] == 3


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_an_epoch_is_known_to_every_method(method, tmp_path, capfd):
    data = write(tmp_path / "rows.jsonl", rows_for(method, 20))
    argv = ["--data", data, "--val-set-size", 4, "--evals-per-epoch", 2, "--num-iterations", 1]
    argv = argv if method == "grpo" else argv[:-2]
    rows = train(tmp_path / "run", method, *argv, steps=9)
    # 16 rows left to train on; a step has 4 of them, or for grpo 2 prompts with 2 completions each
    gap = 2 if method == "sft" else 4
    assert [row["step"] for row in rows if "eval/rows" in row] == [0, *range(gap, 9, gap), 9]
    assert f"evals_per_epoch=2: every {gap} steps ({2 * gap} per epoch)" in capfd.readouterr().out


def test_special_and_eot_tokens_reach_the_exported_model(tmp_path, capfd):
    argv = ["--data", "task:addition:split=sft,size=8", "--eot-tokens", "<|im_start|>"]
    train(tmp_path / "run", "sft", *argv, "--special-tokens", '{"eos_token": "<|endoftext|>"}')
    final = tmp_path / "run" / "final"
    assert json.loads((final / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert sorted(json.loads((final / "generation_config.json").read_text())["eos_token_id"]) == [0, 1, 2]
    train(tmp_path / "no", "sft", *argv, "--special-tokens", '{"pad_token": "<pad>"}', code=2)
    assert "error: special_tokens=pad_token: the tokenizer has no token '<pad>'" in capfd.readouterr().err


def sft_by_hand(rows: list[dict[str, Any]], kind: str, *, users: bool) -> tuple[float, float]:
    """Loss and gradient norm of one step over these rows, by plain transformers; every sequence alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = BUILTIN["builtin:tiny"]
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    losses = []
    for row in rows:
        ids, trained = [], []
        for message in [*row["prompt"], {"role": "assistant", "content": row["completion"]}]:
            parts = (f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>", "\n")
            for number, part in enumerate(parts):
                found = tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += found
                trained += [number == 1 and (users or message["role"] == "assistant")] * len(found)
        ids, trained = torch.tensor(ids), torch.tensor(trained[1:])
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[1:, None])[trained, 0]
        losses.append(-logp if kind == "nll" else -logp * logp.detach().exp())
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize(("kind", "users"), [("nll", False), ("dft", False), ("nll", True), ("dft", True)])
def test_a_step_of_sft_is_that_of_plain_transformers(kind, users, tmp_path):
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows_for("sft", 4)]
    data = write(tmp_path / "rows.jsonl", rows)
    more = ["--train-on-inputs"] if users else []
    (first,) = train(tmp_path / "run", "sft", "--data", data, "--sft-loss", kind, *more, steps=1)
    loss, norm = sft_by_hand(rows, kind, users=users)
    assert first["loss/total"] == pytest.approx(loss, rel=1e-4) and first["optim/grad_norm"] == pytest.approx(
        norm, rel=1e-4
    )
    assert first[f"loss/{kind}"] == first["loss/total"] and "loss/nll" in first
