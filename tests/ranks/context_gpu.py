"""Run by torchrun on one GPU: two ranks share rows with flex attention, over gloo (NCCL needs a GPU per rank).

    torchrun --nproc-per-node 2 -m tests.ranks.context_gpu

Prints one JSON line on rank 0: relative errors of bfloat16 log-probs and gradients vs. float32 with dense masks, for
one process and for two ranks that share rows. Gradient checkpointing is on.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from data.packing import Item, make_batches
from tests.ranks.worker import one_process
from trainer.parallel.comm import context_size, is_main, process_group
from trainer.policy.attention import use_flex, use_sliced_attention
from trainer.policy.logps import Policy, token_logps
from trainer.policy.sharding import sum_gradients

VOCAB = 1000


def make_policy(dtype: torch.dtype) -> Policy:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).cuda().train()
    if dtype == torch.bfloat16:
        use_flex(model)
    if context_size() > 1:
        use_sliced_attention(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model=model, tokenizer=None, source="test", device=torch.device("cuda", 0), compute_dtype=dtype)


def results(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probs and gradient of completions that share prompts, packed."""
    rng = random.Random(0)
    items = []
    for prompt, *lengths in ((300, 200, 17, 256), (5, 333), (90, 400, 1, 64)):
        first = [rng.randrange(VOCAB) for _ in range(prompt)]
        for n in lengths:
            mask = [False] * prompt + [True] * n
            items.append(Item([*first, *(rng.randrange(VOCAB) for _ in range(n))], mask, prompt))
    policy = make_policy(dtype)
    (batch,) = make_batches(items, max_tokens=4096, share_prompt=True, multiple=policy.row_multiple)
    logp = token_logps(policy, batch.to(policy.device)).logp
    weight = torch.randn(len(logp), generator=torch.Generator().manual_seed(1)).to(logp)
    (logp * weight).sum().backward()
    sum_gradients(policy.model)
    return logp.detach(), torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def errors(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> dict[str, float]:
    names = ("logp", "gradient")
    return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, found, exact, strict=True)}


def main() -> None:
    os.environ["LOCAL_RANK"] = "0"
    join: Any = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, device_id=None, **options: join("gloo", **options)
    with process_group(120.0, context=2):
        with one_process():
            exact, one = results(torch.float32), results(torch.bfloat16)
        two = results(torch.bfloat16)
        if is_main():
            print(json.dumps({"one": errors(one, exact), "two": errors(two, exact), "apart": errors(two, one)}))


if __name__ == "__main__":
    main()
