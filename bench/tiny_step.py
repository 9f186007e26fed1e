"""One GRPO step of the embedded model, part by part: sampling, and training packed against padded.

python -m bench.tiny_step [--out rows.jsonl]
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import tyro

from bench.common import Row, alternate, emit, make_row, relative_error, require_commit
from data.chat import stop_ids
from data.packing import Item, make_batches
from data.rows.prompts import load_prompts
from rollout.engine import Completion, Request, Sampling
from rollout.engines.local import LocalEngine
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.parallel.comm import pick_device
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, token_logps

NUM_PROMPTS, GROUP = 16, 8
LAYOUTS = {"packed, 512 tokens": (True, 512), "packed, 2048 tokens": (True, 2048), "padded": (False, 4096)}


def backward(policy: Policy, items: list[Item], packing: bool, max_tokens: int) -> torch.Tensor:
    policy.model.zero_grad()
    for batch in make_batches(items, max_tokens=max_tokens, packing=packing, multiple=policy.row_multiple):
        token_logps(policy, batch.to(policy.device)).logp.sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def measure() -> list[Row]:
    policy = load_policy(
        ModelConfig(model="builtin:tiny", dtype="float32"), LoraConfig(), pick_device(), with_reference=False
    )
    prompts = load_prompts([f"task:addition:size={NUM_PROMPTS}"], policy.tokenizer)
    engine = LocalEngine(policy.model, policy.tokenizer)
    sampling = Sampling(max_tokens=8, stop_ids=stop_ids(policy.tokenizer, policy.generation_eos))
    requests = [Request(prompt_ids=p.ids, seed=GROUP * i + g) for i, p in enumerate(prompts) for g in range(GROUP)]
    completions = engine.generate(requests, sampling)
    items = [Item([*c.prompt_ids, *c.ids], [False] * len(c.prompt_ids) + [True] * len(c.ids)) for c in completions]
    num_tokens = sum(len(item.ids) for item in items)

    exact = copy.copy(policy)
    exact.model, exact.compute_dtype = copy.deepcopy(policy.model).double(), torch.float64
    exact.model.set_attn_implementation("sdpa")  # flex attention has no float64
    truth = backward(exact, items, packing=False, max_tokens=4096)
    calls = {name: lambda layout=layout: backward(policy, items, *layout) for name, layout in LAYOUTS.items()}
    timings = alternate({"local engine": lambda: engine.generate(requests, sampling), **calls})
    shape = {"completions": len(completions), "tokens": num_tokens}
    made = sum(len(c.ids) for c in completions)
    rows = [make_row(
        "tiny_step/sampling", "local engine", timings["local engine"], shape=shape, dtype="float32", work=made,
        unit="tokens", errors={"logp": logp_error(exact, completions)},
    )]  # fmt: skip
    for name, layout in LAYOUTS.items():
        errors = {"gradient": relative_error(backward(policy, items, *layout), truth)}
        rows.append(make_row(
            "tiny_step/training", name, timings[name], shape=shape, dtype="float32", work=num_tokens, unit="tokens",
            errors=errors,
        ))  # fmt: skip
    return rows


def logp_error(exact: Policy, completions: list[Completion]) -> float:
    """How far the engine's log-probs are from float64 ones of the same tokens."""
    engine = LocalEngine(exact.model, exact.tokenizer)
    scored = engine.score([(c.prompt_ids, c.ids) for c in completions], temperature=1.0)
    ours = torch.tensor([x for c in completions for x in c.logps], dtype=torch.float64)
    theirs = torch.tensor([x for row in scored for x in row], dtype=torch.float64)
    return relative_error(ours, theirs)


def main(out: Path | None = None) -> None:
    require_commit()
    emit(measure(), out)


if __name__ == "__main__":
    tyro.cli(main)
