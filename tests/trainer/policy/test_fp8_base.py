"""--fp8-base: the policy vs. the same adapter on a full base, and settings that do not go with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from data.packing import Item, make_batches
from kernels.fp8 import Linear8, is_fp8
from trainer.cli import parse
from trainer.config.blocks import LoraConfig, ModelConfig, ParallelConfig, check_fp8
from trainer.plan import Work, meta_model, persistent_bytes, sizes_of
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, causal_lm, reference_logps, token_logps

CPU = torch.device("cpu")
LORA = LoraConfig(r=4)


def load(**settings: Any) -> Policy:
    torch.manual_seed(0)
    cfg = ModelConfig(model="builtin:tiny", **settings)
    return load_policy(cfg, LORA, CPU, with_reference=True)


def losses(policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of policy and reference before the first step, and the gradient of the adapter."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(100, (n,), generator=generator).tolist() for n in (9, 4, 7)]
    batch = make_batches([Item(ids, [False] + [True] * (len(ids) - 1)) for ids in rows], max_tokens=64)[0]
    logp = token_logps(policy, batch).logp
    logp.sum().backward()
    grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return logp.detach(), reference_logps(policy, batch), torch.cat(grads)


def test_first_loss_is_exact_and_the_gradient_is_near():
    policy, plain = load(fp8_base=True), load()
    layers = [m for m in causal_lm(policy.model).modules() if isinstance(m, Linear8)]
    assert len(layers) == 7 * 3 and is_fp8(policy.model) and not is_fp8(plain.model)
    assert {name for name, p in policy.model.named_parameters() if p.requires_grad} == {
        name for name, p in plain.model.named_parameters() if p.requires_grad
    }
    (logp, ref, grad), (exact, _, exact_grad) = losses(policy), losses(plain)
    assert torch.equal(logp, ref), "the ratio to the reference, which is the same base, starts at 1"
    assert 1e-4 < (logp - exact).norm() / exact.norm() < 0.02
    assert (grad - exact_grad).norm() < 0.15 * exact_grad.norm()
    recomputed = losses(load(fp8_base=True, gradient_checkpointing=True))
    assert torch.equal(recomputed[2], grad)
    s = sizes_of(meta_model("builtin:tiny"))
    more = [persistent_bytes(s, Work(tokens=1, lora_r=4, fp8=x))["weights"] for x in (True, False)]
    assert more[0] - more[1] == sum(m.fp8.nbytes + m.fp8_t.nbytes for m in layers)


@pytest.mark.parametrize(
    ("settings", "lora", "parallel", "words"),
    [
        ({}, LoraConfig(), None, "--lora.r 16"),
        ({"load_in_4bit": True}, LORA, None, "load_in_4bit"),
        ({}, LoraConfig(r=4, dora=True), None, "lora.dora"),
        ({}, LORA, {"mode": "fsdp"}, "replicate"),
        ({}, LORA, {"cpu_offload": True}, "replicate"),
    ],
)
def test_settings_that_do_not_go_together(settings, lora, parallel, words, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=words):
        check_fp8(
            ModelConfig(model="builtin:tiny", fp8_base=True, **settings), lora, ParallelConfig(**(parallel or {}))
        )


def test_methods_that_sample_reject_it():
    with pytest.raises(ValueError, match="fp8_base=True"):
        parse(["--method", "grpo", "--model", "builtin:tiny", "--lora.r", "4", "--fp8-base", "--data", "task:addition"])
