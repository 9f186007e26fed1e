"""Run by torchrun: every method, two ranks vs. one process, over 20 steps of SGD in float64, and a float32 gradient.

    torchrun --nproc-per-node 2 -m tests.ranks.grid replicate|fsdp [METHOD ...]

Each step has different rows, sometimes a single row, so that one rank is idle. Gradients come from the method's
functions and steps from launch_step. Prints one JSON line per method, full and lora.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from tests.ranks import worker
from tests.ranks.sampled import distill_case, group_case, online_dpo_case, ppo_case, strided_case, structured_case
from tests.ranks.worker import MODES, Case, one_process
from trainer.config.blocks import ParallelConfig
from trainer.config.policy import PolicyLossConfig
from trainer.parallel.comm import is_main, process_group
from trainer.parallel.dtensor import gather
from trainer.policy.logps import Policy
from trainer.policy.optim import launch_step
from trainer.policy.sharding import parallelize, sum_gradients

STEPS = 20
ALONE = {4, 13}  # steps with as few rows as a step can have
KL = PolicyLossConfig(beta=0.1)

METHODS: dict[str, Callable[..., Case]] = {
    "sft": worker.sft_case,
    "dpo": worker.dpo_case,
    "ipo": partial(worker.dpo_case, "ipo"),
    "orpo": partial(worker.pair_case, "orpo"),
    "cpo": partial(worker.pair_case, "cpo"),
    "simpo": partial(worker.pair_case, "simpo"),
    "kto": worker.kto_case,
    "rm": worker.rm_case,
    "prm": worker.prm_case,
    "grpo": partial(group_case, "grpo", policy_loss=KL),
    "gdpo": partial(group_case, "gdpo", policy_loss=KL),
    "rloo": partial(group_case, "rloo"),
    "opd": distill_case,
    "opd jsd": partial(distill_case, 0.0),
    "online_dpo": online_dpo_case,
    "ppo": ppo_case,
    "ebft structured": structured_case,
    "ebft strided": strided_case,
}


def weights(policy: Policy) -> Tensor:
    return torch.cat([gather(p.detach()).flatten() for p in policy.model.parameters() if p.requires_grad])


def train(case: Case, policy: Policy) -> tuple[Tensor, list[dict[str, float]]]:
    """Return the final weights and the metrics of each step."""
    rng = random.Random(7)
    optimizer = SGD([p for p in policy.model.parameters() if p.requires_grad], lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    logged = []
    for step in range(STEPS):
        count = case.least if step in ALONE else rng.randrange(case.least, len(case.rows) + 1)
        rows = [case.rows[place] for place in sorted(rng.sample(range(len(case.rows)), count))]
        metrics = case.step(policy, case.deal(rows))
        metrics["norm"] = launch_step(policy.model, optimizer, schedule, 1.0, f"step {step}").wait()
        logged.append(metrics)
    return weights(policy), logged


def trajectory(case: Case, mode: str) -> dict[str, float]:
    with one_process():
        alone = case.policy()
        start = weights(alone).clone()
        expected, expected_metrics = train(case, alone)
    found, found_metrics = train(case, parallelize(ParallelConfig(**MODES[mode]), case.policy()))
    moved = (expected - start).norm()
    assert moved > 0.05, moved
    return {
        "moved": float(moved / start.norm()),
        "weights": float((found - expected).norm() / moved),
        "metrics": max(difference(a, b) for a, b in zip(found_metrics, expected_metrics, strict=True)),
    }


def difference(found: dict[str, float], expected: dict[str, float]) -> float:
    """Return the largest difference of a step's metrics, which are summed in float32; inf if the names differ."""
    if not is_main():  # only rank 0 has rollout metrics
        return 0.0
    if found.keys() != expected.keys():
        return float("inf")
    return max(abs(found[name] - value) / max(1.0, abs(value)) for name, value in expected.items())


def in_float32(case: Case) -> Policy:
    policy = case.policy()
    for model in (policy.model, policy.reference):
        if model is not None:
            model.float()
    policy.compute_dtype = torch.float32
    return policy


def gradient32(case: Case, mode: str) -> float:
    def gradient(policy: Policy) -> Tensor:
        case.step(policy, case.deal(case.rows))
        sum_gradients(policy.model)
        return torch.cat([gather(p.grad).flatten() for p in policy.model.parameters() if p.requires_grad])

    with one_process():
        expected = gradient(in_float32(case))
    found = gradient(parallelize(ParallelConfig(**MODES[mode]), in_float32(case)))
    return float((found - expected).norm() / expected.norm())


def main(mode: str, names: list[str]) -> None:
    with process_group(120.0), contextlib.redirect_stdout(sys.stdout if is_main() else sys.stderr):
        for name in names or METHODS:
            for lora in (False, True):
                case: Any = METHODS[name](lora=lora)
                result = {**trajectory(case, mode), "float32": gradient32(case, mode)}
                if is_main():
                    print(json.dumps({"method": name, "trains": "lora" if lora else "full", **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
