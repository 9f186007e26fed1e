"""Record which experts a model chooses for each token, and force these choices in another pass.

    with recording(lm) as chosen:                    # in the engine: chosen is (N, k) per expert layer, in order
        lm.base_model(input_ids=ids)
    routes = stack(chosen, num_experts)              # (N, L, k)

    accept_routes(lm, device)                        # in the trainer, once
    lm.base_model(input_ids=ids, routes=routes)      # every layer uses the experts in `routes`

Sampler and trainer compute router logits with different rounding, so they disagree on the experts of some tokens, and
the log-probs of such a token differ by more than rounding (arXiv:2510.11370). With forced experts the gate weights
still come from the trainer's router logits, by the model's own code: only the result of its topk is replaced. Gradients
therefore reach the router as usual.

Routes are uint8 (int16 from 255 experts). The dtype's maximum marks a token without a recorded choice, such as the last
token of a completion, which the engine never ran; the model chooses its experts.

Shapes: N = tokens, L = expert layers, k = experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def expert_blocks(lm: nn.Module) -> list[nn.Module]:
    """Return the modules that route tokens to their child `experts`, in layer order; empty without experts."""
    blocks = (module for name, module in lm.named_modules() if "original_module" not in name)  # peft's frozen copies
    return [block for block in blocks if isinstance(getattr(getattr(block, "experts", None), "num_experts", None), int)]


def dtype_of(num_experts: int) -> torch.dtype:
    return torch.uint8 if num_experts < torch.iinfo(torch.uint8).max else torch.int16


class RouteShape:
    """Dimensions of a model's routes."""

    def __init__(self, lm: Any) -> None:
        blocks = expert_blocks(lm)
        self.num_layers, self.top_k = len(blocks), getattr(lm.config.get_text_config(), "num_experts_per_tok", 0)
        self.num_experts = blocks[0].experts.num_experts if blocks else 0
        self.dtype = dtype_of(self.num_experts)


@contextmanager
def recording(lm: nn.Module) -> Iterator[list[Tensor]]:
    """Context manager: append the experts chosen in each expert layer, (N, k), to the list that it yields."""
    chosen: list[Tensor] = []

    def record(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen.append(next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point()))

    hooks = [block.experts.register_forward_pre_hook(record, with_kwargs=True) for block in expert_blocks(lm)]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def stack(chosen: Sequence[Tensor], num_experts: int) -> Tensor:  # (N, L, k)
    return torch.stack(list(chosen), dim=1).to(dtype_of(num_experts))


# Arrays of a completion, on the host.


def unrecorded(dtype: Any) -> int:
    return int(np.iinfo(dtype).max)


def join(parts: Sequence[tuple[int, np.ndarray]], length: int) -> np.ndarray | None:  # (length, L, k)
    """Join (start, routes) parts of one sequence; where they overlap, the first part counts."""
    if not parts:
        return None
    routes = np.full((length, *parts[0][1].shape[1:]), unrecorded(parts[0][1].dtype), parts[0][1].dtype)
    for start, part in reversed(parts):
        part = part[: max(0, length - start)]
        stop = start + len(part)
        routes[start:stop] = np.where(part == unrecorded(part.dtype), routes[start:stop], part)
    return routes


def from_server(routes: np.ndarray, lm: Any) -> np.ndarray:  # (N, layers, k) -> (N, L, k)
    """Convert vLLM's routes, which have zeros for layers without experts."""
    layers = [i for i, layer in enumerate(lm.base_model.layers) if expert_blocks(layer)]
    if routes.shape[1] != len(layers):
        routes = routes[:, layers]
    return routes.astype(np.uint8 if RouteShape(lm).dtype == torch.uint8 else np.int16)


# The trainer's side.


def accept_routes(lm: Any, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Let the decoder `layers` take `routes` (N, L, k), which the base model passes on to them.

    The hook of a layer runs again when gradient checkpointing recomputes it, with the same routes, and resets the
    block's routes in passes without them.
    """
    blocks = expert_blocks(lm)
    for layer in layers:
        block = next((module for module in layer.modules() if module in blocks), None)
        if block is None:
            layer.register_forward_pre_hook(_drop, with_kwargs=True)
            continue
        if hasattr(block, "route_index"):  # called before
            continue
        layer.expert_block = (block,)  # a tuple: not a child module
        # A tensor, because compiled layers share one graph, which would be specialised for an int.
        block.route_index = torch.tensor([blocks.index(block)], device=device)
        block.routes = None
        layer.register_forward_pre_hook(_take, with_kwargs=True)
        _force_choices(block)


def _drop(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name != "routes"}


def _take(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    (block,), routes = layer.expert_block, kwargs.get("routes")
    block.routes = None if routes is None else routes.index_select(1, block.route_index)[:, 0]  # (N, k)
    return _drop(layer, args, kwargs)


def _force_choices(block: Any) -> None:
    forward, num_experts = block.forward, block.experts.num_experts

    def call(*args: Any, **kwargs: Any) -> Any:
        if block.routes is None:
            return forward(*args, **kwargs)
        with ForcedChoice(block.routes, num_experts):
            return forward(*args, **kwargs)

    block.forward = call


class ForcedChoice(TorchFunctionMode):
    """Replace the experts that topk chooses among all experts by recorded experts."""

    def __init__(self, routes: Tensor, num_experts: int) -> None:
        super().__init__()
        self.routes, self.num_experts = routes, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Other topk calls choose groups of experts; their inputs have other shapes.
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[1] != self.num_experts:
            return result
        chosen = torch.where(self.routes < self.num_experts, self.routes.long(), result[1])
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))
