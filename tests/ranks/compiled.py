"""Compiled blocks on several ranks vs. uncompiled blocks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.worker import Case, dpo_case, sft_case
from trainer.parallel.comm import context_size, world_size
from trainer.policy.load import compile_blocks
from trainer.policy.logps import Policy, causal_lm


def compiled_case(
    base: Case, *, graphs: int, on_cpu: str = "aot_eager", recomputes: bool = False, after_sharding: bool = False
) -> Case:
    """Compile with `on_cpu` on a CPU, where inductor takes a minute for two graphs, and with inductor on a GPU.

    `graphs`: most of them, for three blocks and any length. `after_sharding`: as with --compile auto.
    """
    import torch._dynamo as dynamo

    def compiled(policy: Policy) -> Policy:
        if world_size() == 1:
            return policy
        plain = torch.compile
        with pytest.MonkeyPatch.context() as patch:
            if on_cpu != "inductor" and policy.device.type == "cpu":
                patch.setattr(torch, "compile", lambda f, options, **o: plain(f, backend=on_cpu, **o))
            for model in (policy.model, policy.reference):
                if model is not None:
                    compile_blocks(causal_lm(model), "test")
        policy.is_compiled = True
        return policy

    def make() -> Policy:
        policy = base.policy()
        if recomputes:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        return policy if after_sharding else compiled(policy)

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        if world_size() == 1:
            return base.step(policy, rows)
        dynamo.reset()
        counters = dynamo.utils.counters
        counters.clear()
        metrics = base.step(compiled(policy) if after_sharding else policy, rows)
        if context_size() == 1:  # gather_row breaks graphs
            assert not counters["graph_break"] and 0 < counters["stats"]["unique_graphs"] <= graphs, counters
        return metrics

    return base._replace(policy=make, step=step)


CASES = {  # two graphs each, for one row and for several
    "compiled": lambda: compiled_case(sft_case(), graphs=2, on_cpu="inductor"),
    "compiled-recomputed": lambda: compiled_case(
        sft_case(tied=False), graphs=2, on_cpu="inductor", recomputes=True, after_sharding=True
    ),
    "compiled-lora": lambda: compiled_case(sft_case(lora=True), graphs=4),  # the first block's input has no gradient
    "compiled-lora-recomputed": lambda: compiled_case(dpo_case(policy={"lora": True}), graphs=6, recomputes=True),
    "compiled-reference": lambda: compiled_case(dpo_case(), graphs=4, recomputes=True, after_sharding=True),
}
