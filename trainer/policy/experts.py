"""Models with experts: grouped matmuls, training with the sampler's experts, and the load-balancing loss.

    use_grouped_matmuls()                                           # once per process, before such a model runs
    policy.replays_routes = prepare_replay(policy, layers, log)     # rollout/routes.py

    policy.router = RouterLoss(policy, coef)      # add hooks to the model's body
    policy.router.begin(micro_batches)            # once per step: count expert choices
    ...forward and backward as usual...
    metrics = policy.router.end()

transformers runs all experts of a layer in one grouped matmul (experts_implementation="grouped_mm"), in the dtype of
the weights, even under autocast. In float32 torch has no grouped kernel on a GPU: it loops over the experts after a
host sync, and blocks cannot be compiled. So under autocast the weights are rounded first, as autocast does for linear
layers.

The load-balancing loss is normalised over the whole optimizer step:

    loss = coef * E * sum_e f_e P_e               # E experts

f_e is how often tokens chose expert e, and P_e the sum of its probabilities, over all layers and tokens of the step on
all ranks, both divided by tokens times layers (Fedus et al. 2021, arXiv:2101.03961, as transformers defines it). P_e is
summed over micro-batches. f_e has no gradient and is counted in a separate pass before them, so the gradient does not
depend on how rows are packed into micro-batches. A step with one micro-batch skips that pass.

The gradient enters at the last hidden states, which every loss reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from data.errors import UserError
from data.packing import Batch, Item, make_batches, to_device
from rollout.engines.forward import uncompiled
from rollout.routes import accept_routes, expert_blocks, recording, stack
from trainer.config.errors import first_line
from trainer.parallel.comm import all_count, all_sum, context_size, world_size
from trainer.policy.logps import Policy, causal_lm, hidden_states


@functools.cache
def use_grouped_matmuls() -> None:
    """Replace transformers' grouped_mm by the same function on rounded weights."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    uncompiled_forward = torch.compiler.disable(grouped_mm_experts_forward)

    def grouped_mm(experts: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        if torch.is_autocast_enabled(kind):
            experts = RoundedExperts(experts, dtype)
        is_fallback = torch.compiler.is_compiling() and dtype != torch.bfloat16  # its backward cannot be compiled
        return (uncompiled_forward if is_fallback else grouped_mm_experts_forward)(experts, hidden, *routing)

    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = grouped_mm


class RoundedExperts:
    """Experts whose weights are read in another dtype."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def prepare_replay(policy: Policy, layers: Sequence[nn.Module], log: Callable[[str], None]) -> bool:
    """Let the model's decoder layers take routes; return whether they follow them. Without experts: False.

    All ranks call this together. The check runs a short sequence and then forces each token to other experts.
    """
    lm = causal_lm(policy.model)
    blocks = expert_blocks(lm)
    if not blocks:
        return False
    accept_routes(lm, layers, policy.device)
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
        problem = "" if torch.equal(stack(forced, num_experts), wanted) else "its layers ignore them"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        problem = first_line(error)
    if problem:
        log(f"rollout.replay_routes: off, {type(lm).__name__} cannot be trained with recorded experts ({problem})")
    return not problem


class RouterLoss:
    def __init__(self, policy: Policy, coef: float) -> None:
        self.policy, self.coef, self.lm = policy, coef, causal_lm(policy.model)
        config = self.lm.config.get_text_config()
        if not hasattr(config, "router_aux_loss_coef"):
            raise UserError(
                f"router_aux_loss_coef={coef:g}: {type(self.lm).__name__} has no experts with a load-balancing loss; "
                "remove --router-aux-loss-coef"
            )
        if context_size() > 1:
            raise UserError(
                f"router_aux_loss_coef={coef:g} is not supported with parallel.context={context_size()}; remove "
                "--router-aux-loss-coef"
            )
        self.top_k = config.num_experts_per_tok
        self.counting = False
        self._reset()
        body = self.lm.base_model
        self.hooks = (body.register_forward_pre_hook(self._ask, with_kwargs=True),
                      body.register_forward_hook(self._add, with_kwargs=True))  # fmt: skip

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _reset(self) -> None:
        self.masks: dict[int, Tensor] = {}  # address of a micro-batch's ids -> (R * T,) bool, True at tokens
        self.chosen: Tensor | None = None  # (E,) f_e times tokens and layers
        self.probability: Tensor | None = None  # (E,) P_e times tokens and layers, on this rank
        self.total = 0.0  # tokens of the step times layers

    @torch.no_grad()
    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """Count the expert choices of this step's tokens; more calls before end() have no effect."""
        if self.masks or not self.policy.model.training:
            return
        self.masks = {mb.input_ids.data_ptr(): is_token(mb) for mb in micro_batches}
        self.num_tokens = all_count(sum(mb.num_computed for mb in micro_batches), "tokens of the router")
        if len(micro_batches) == 1 and world_size() == 1:
            return  # counted during the training pass
        self.counting = True
        for mb in micro_batches:
            hidden_states(self.policy, self.lm, mb)
        self.counting = False
        self.chosen = all_sum(self.chosen, "choices of the router")

    def end(self) -> dict[str, float]:
        """Return the step's loss without its coefficient as a metric, and reset."""
        if self.probability is None or self.chosen is None:
            self._reset()
            return {}
        probability = all_sum(self.probability, "probabilities of the router")
        value = len(probability) * float((self.chosen.double() * probability.double()).sum()) / self.total**2
        self._reset()
        return {"loss/router_aux": value}

    def _is_trained(self) -> bool:
        return bool(self.masks) and self.policy.model.training and torch.is_grad_enabled()

    def _ask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not (self.counting or self._is_trained()):
            return None
        return args, {**kwargs, "output_router_logits": True}

    def _add(self, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        if not (self.counting or self._is_trained()) or kwargs["input_ids"].data_ptr() not in self.masks:
            return None
        keep = self.masks[kwargs["input_ids"].data_ptr()]
        logits = [layer.flatten(0, -2).float() for layer in out.router_logits]  # (R * T, E) each
        layers = [layer.softmax(dim=-1)[keep] for layer in logits]  # (tokens, E) each
        self.total = float(self.num_tokens * len(layers))
        if self.counting or self.chosen is None:
            chosen = torch.stack([choices(p, self.top_k) for p in layers]).sum(dim=0)
            self.chosen = chosen if self.chosen is None else self.chosen + chosen
        if self.counting:
            return None
        probability = torch.stack([p.sum(dim=0) for p in layers]).sum(dim=0)  # (E,)
        detached = probability.detach()
        self.probability = detached if self.probability is None else self.probability + detached
        # Divide twice: the square of the total is large.
        loss = self.coef * len(probability) * (self.chosen / self.total * probability / self.total).sum()
        out.last_hidden_state = WithGradientOf.apply(out.last_hidden_state, loss)
        return out


def is_token(batch: Batch) -> Tensor:  # (R * T,) bool
    """True at tokens, False at padding."""
    position = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    return (position < to_device(torch.tensor(batch.used), position.device)[:, None]).flatten()


def choices(probability: Tensor, top_k: int) -> Tensor:  # (tokens, E) -> (E,)
    chosen = probability.topk(top_k, dim=-1).indices.flatten()
    return torch.bincount(chosen, minlength=probability.shape[-1]).float()


class WithGradientOf(torch.autograd.Function):
    """Return `hidden`; its backward pass also back-propagates `loss`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)
