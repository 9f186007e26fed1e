"""A second device for machines that have none: the CPU under another name, and an error where the two meet.

    with second_device():            # pick_device() is torch.device("cpu", 0)
        main(["--method", "dpo"])    # RuntimeError where on a GPU a tensor in main memory would meet one there

Tensors made on or moved to cpu:0 are marked, and so is whatever is computed from them; those on plain cpu are not.
Operations on both are refused as torch refuses them between CUDA and the CPU, backward passes left aside.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)  # torch itself takes it for the CPU, and it is not equal to torch.device("cpu")
MARK = "_on_second_device"
ALLOWED = {"copy_", "__get__", "__set__", "_has_compatible_shallow_copy_type"}  # between devices
SIZES = {"view_as", "expand_as", "reshape_as"}  # they read no more of the other tensor
INDEXING = {"__getitem__", "__setitem__"}  # indices may be in main memory


def is_marked(x: Tensor) -> bool:
    return getattr(x, MARK, False)


def mark(found: Any) -> Any:
    for x in tree_leaves(found):
        if isinstance(x, Tensor):
            setattr(x, MARK, True)
    return found


def target_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Where a call puts its result, if it says so."""
    name = func.__name__
    if name in ("cpu", "cuda"):
        return torch.device(name)
    device = kwargs.get("device")
    if name == "to" and device is None:
        given = [x for x in (*args[1:], kwargs.get("other")) if isinstance(x, torch.device | str | Tensor)]
        device = (DEVICE if is_marked(given[0]) else "cpu") if given and isinstance(given[0], Tensor) else None
        device = given[0] if given and device is None else device
    return None if device is None else torch.device(device)


class SecondDevice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            return DEVICE if is_marked(args[0]) else torch.device("cpu")
        if func == torch.Tensor.data.__set__:
            setattr(args[0], MARK, is_marked(args[1]))
            return func(*args)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = target_of(func, args, kwargs)
        if target is not None:
            found = func(*args, **kwargs)
            if any(found is x and is_marked(x) != (target == DEVICE) for x in tensors):  # torch sees nothing to move
                found = found.view_as(found)
            return mark(found) if target == DEVICE else found
        marked = any(map(is_marked, tensors[:1] if func.__name__ in SIZES else tensors))
        if marked and func.__name__ not in ALLOWED:
            self.refuse(func, args, tensors)
        found = func(*args, **kwargs)
        return mark(found) if marked and func.__name__ not in ("tolist", "item") else found

    def refuse(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        name, own = func.__name__, tensors[:1] if func.__name__ in SIZES else tensors
        if name == "numpy":
            raise RuntimeError("numpy: the tensor is on the second device; use cpu() first")
        if name in INDEXING and is_marked(args[0]):
            own = [x for x in args[2:] if isinstance(x, Tensor)]  # the value
        apart = [tuple(x.shape) for x in own if x.dim() > 0 and not is_marked(x)]
        if apart:
            raise RuntimeError(f"{name}: tensors on both devices, those of shape {apart} in main memory")


@contextlib.contextmanager
def second_device() -> Iterator[None]:
    import transformers

    from trainer.parallel import comm

    load = transformers.PreTrainedModel.from_pretrained.__func__

    def load_in_main_memory(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers fills buffers of a model within modes of its own, which ours would get in the way of.
        with _pop_mode_temporarily():
            return load(cls, *args, **kwargs)

    picked = comm.pick_device
    holders = [module for module in list(sys.modules.values()) if getattr(module, "pick_device", None) is picked]
    for module in holders:
        module.pick_device = lambda: DEVICE
    transformers.PreTrainedModel.from_pretrained = classmethod(load_in_main_memory)
    try:
        with SecondDevice():
            yield
    finally:
        transformers.PreTrainedModel.from_pretrained = classmethod(load)
        for module in holders:
            module.pick_device = picked
