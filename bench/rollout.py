"""Completion tokens per second of the vLLM engine, as GRPO asks for them: prompts, G completions each, log-probs back.

    python -m bench.rollout [--shape qwen3-0.6b] [--prompts 64] [--group 8] [--prompt 256] [--completion 256]

All completions have full length. Seeded gives each request a seed of its own, unseeded leaves the random numbers to the
server; both through the whole client, against the same server in the same loop. The error is the mean gap between the
engine's log-probs and the trainer's own of the same tokens.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import torch
import tyro

from bench.common import Timing, emit, make_row, require_commit
from bench.served import SHAPES, serving
from rollout.engine import Completion, Request, Sampling
from rollout.engines.vllm import VllmEngine
from rollout.servers.options import SyncConfig, VllmConfig


def main(
    out: Path | None = None,
    shape: Literal["tiny", "qwen3-0.6b", "qwen3-1.7b"] | None = None,
    prompts: int | None = None,
    group: int = 8,
    prompt: int | None = None,
    completion: int | None = None,
    rounds: int = 3,
    vllm: VllmConfig = VllmConfig(max_in_flight=1024),  # noqa: B008  frozen
) -> None:
    """Print the table; append every row as JSON to `out`."""
    require_commit()
    on_cuda = torch.cuda.is_available()
    shape = shape or ("qwen3-0.6b" if on_cuda else "tiny")
    prompts = prompts or (64 if on_cuda else 4)
    prompt, completion = prompt or (256 if on_cuda else 16), completion or (256 if on_cuda else 32)
    with serving(shape, vllm=vllm, sync=SyncConfig(), lora_rank=0) as (policy, engine):
        engine.load(version=0)
        vocab = SHAPES[shape]["vocab_size"]
        ids = torch.randint(vocab, (prompts, prompt), generator=torch.Generator().manual_seed(0)).tolist()
        requests = [Request(prompt_ids=row, seed=i * group + j) for i, row in enumerate(ids) for j in range(group)]
        sampling = Sampling(max_tokens=completion, for_training=True)
        times: dict[str, list[float]] = {"seeded": [], "unseeded": []}
        made: dict[str, list[Completion]] = {}
        for number in range(rounds + 1):
            for name in times:
                engine.pool.seeded = name == "seeded"
                started = time.perf_counter()
                made[name] = engine.generate(requests, sampling)
                if number:  # the first round warms up
                    times[name].append(1000 * (time.perf_counter() - started))
        rows = []
        size = {"prompts": prompts, "G": group, "P": prompt, "R": completion, "D": SHAPES[shape]["hidden_size"]}
        for name in times:
            lengths = sum(len(c.ids) for c in made[name])
            assert lengths == len(requests) * completion, f"{lengths} tokens, not {len(requests) * completion}"
            rows.append(
                make_row(
                    "rollout", name, Timing(times[name], None), shape=size,
                    dtype=str(policy.compute_dtype).removeprefix("torch."), work=lengths, unit="tokens",
                    errors={"logp_gap": logp_gap(engine, made[name][:8])},
                )
            )  # fmt: skip
    emit(rows, out)


def logp_gap(engine: VllmEngine, completions: list[Completion]) -> float:
    """Mean absolute difference to the trainer's log-probs."""
    own = engine.local.score([(c.prompt_ids, c.ids) for c in completions], 1.0)
    gaps = [abs(a - b) for c, row in zip(completions, own, strict=True) for a, b in zip(c.logps, row, strict=True)]
    return sum(gaps) / len(gaps)


if __name__ == "__main__":
    tyro.cli(main)
