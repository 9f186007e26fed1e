"""Tiny models of current architectures, in float32 and bfloat16: leak probe, one SFT step, one GRPO step, sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from rollout.engine import Request, Sampling
from rollout.engines.local import LocalEngine
from tests.entry import metrics, run_ok
from tests.models import ATTENTION, RECURRENT, SAMPLED, make_model, policy_of, save
from trainer.policy.logps import check_logps
from trainer.tiny.build import make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("dtype", ["float32", "bfloat16"]),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # a warning on CPUs without bfloat16 instructions
]


def flags_of(method: str, model: Path, dtype: str) -> list[Any]:
    rollout = ["--num-generations", 2, "--max-completion-length", 4] if method == "grpo" else []
    return [
        "--method", method, "--model", model, "--dtype", dtype, "--data", "task:addition", "--max-steps", 1,
        "--per-device-train-batch-size", 4, "--max-eval-rows", 2, "--save-steps", 0, *rollout,
        "--output-dir", model / method,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_models_pass_the_probe_and_train(tmp_path, kind, dtype):
    model = make_model(kind)
    check_logps(policy_of(model, dtype))
    folder = save(model, tmp_path)
    for method in ("sft", "grpo"):
        run_ok(*flags_of(method, folder, dtype), cwd=tmp_path)
        assert metrics(folder / method)[-1]["step"] == 1


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_models_train(tmp_path, kind, dtype):
    folder = save(make_model(kind), tmp_path)
    for method in ("sft", "grpo") if kind in SAMPLED else ("sft",):
        done = run_ok(*flags_of(method, folder, dtype), cwd=tmp_path)
        shares = kind.startswith("lfm2")  # the others need kernels of a GPU
        assert (f"layers of model_type={kind} carry state" in done.stderr) != shares
        assert metrics(folder / method)[-1]["step"] == 1


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_models_sample_or_give_a_one_line_error(kind, dtype):
    autocast_dtype = torch.bfloat16 if dtype == "bfloat16" else None
    engine = LocalEngine(make_model(kind), make_tokenizer(), autocast_dtype=autocast_dtype, log=lambda line: None)
    prompts = ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [11, 12], list(range(20, 30)))
    requests = [Request(prompt_ids=prompt, seed=i, max_tokens=3 + 3 * i) for i, prompt in enumerate(prompts)]
    try:
        completions = engine.generate(requests, Sampling())
    except UserError as error:
        assert kind not in SAMPLED and str(error).startswith("rollout.engine=local: "), error
        return
    logps = engine.logps([(c.prompt_ids, c.ids) for c in completions], 1.0)
    gaps = [abs(a - b) for c, row in zip(completions, logps, strict=True) for a, b in zip(c.logps, row, strict=True)]
    assert max(gaps) < (1e-3 if dtype == "float32" else 0.25), gaps
