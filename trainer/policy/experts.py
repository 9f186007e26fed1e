"""Let a policy train each token with the experts that the sampler used for it (rollout/routes.py).

policy.replays_routes = prepare_replay(policy, log)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from data.packing import Item, make_batches
from rollout.engines.forward import uncompiled
from rollout.routes import accept_routes, expert_blocks, recording, stack
from trainer.config.errors import first_line
from trainer.policy.load import blocks_of
from trainer.policy.logps import Policy, causal_lm, hidden_states


def prepare_replay(policy: Policy, log: Callable[[str], None]) -> bool:
    """Let the policy's model take routes; return whether it follows them. Without experts: False.

    All ranks call this together. The check runs a short sequence and then forces each token to other experts.
    """
    lm = causal_lm(policy.model)
    blocks = expert_blocks(lm)
    if not blocks:
        return False
    accept_routes(lm, blocks_of(lm, policy.source), policy.device)
    vocab, num_experts = lm.get_input_embeddings().num_embeddings, blocks[0].experts.num_experts
    item = Item([i % vocab for i in range(8)], [False] * 8)
    (batch,) = make_batches([item], max_tokens=8, multiple=policy.row_multiple)
    batch = batch.to(policy.device)
    probed = replace(policy, replays_routes=True)
    try:
        with torch.no_grad(), uncompiled(policy.model):
            with recording(lm) as own:
                hidden_states(probed, lm, batch)
            wanted = (stack(own, num_experts) + 1) % num_experts
            with recording(lm) as forced:
                hidden_states(probed, lm, replace(batch, routes=wanted.unflatten(0, batch.input_ids.shape)))
        problem = "" if torch.equal(stack(forced, num_experts), wanted) else "its layers choose other experts"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        problem = first_line(error)
    if problem:
        log(f"rollout.replay_routes: off, {type(lm).__name__} cannot be trained with recorded experts ({problem})")
    return not problem
