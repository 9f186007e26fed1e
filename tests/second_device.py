"""Simulate a second device on a CPU-only machine: the CPU under another name, with errors for mixed operations.

    with second_device():            # pick_device() is torch.device("cpu", 0)
        main(["--method", "dpo"])    # RuntimeError wherever a GPU run would mix CPU and GPU tensors

Tensors created on or moved to cpu:0 are marked, and so are results computed from them; tensors on plain cpu are not.
Operations that mix both raise an error, as torch does for CUDA and CPU. Backward passes are not checked.
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

DEVICE = torch.device("cpu", 0)  # torch treats it as the CPU, but it does not equal torch.device("cpu")
MARK = "_on_second_device"
ALLOWED = {"copy_", "__get__", "__set__", "_has_compatible_shallow_copy_type"}  # between devices
SIZES = {"view_as", "expand_as", "reshape_as"}  # read only the size of the other tensor
INDEXING = {"__getitem__", "__setitem__"}  # indices may be on the CPU


def is_marked(x: Tensor) -> bool:
    return getattr(x, MARK, False)


def mark(result: Any) -> Any:
    for x in tree_leaves(result):
        if isinstance(x, Tensor):
            setattr(x, MARK, True)
    return result


def target_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the explicit device of a call's result, or None."""
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
            result = func(*args, **kwargs)
            if any(result is x and is_marked(x) != (target == DEVICE) for x in tensors):  # torch moves nothing
                result = result.view_as(result)
            return mark(result) if target == DEVICE else result
        marked = any(map(is_marked, tensors[:1] if func.__name__ in SIZES else tensors))
        if marked and func.__name__ not in ALLOWED:
            self.check(func, args, tensors)
        result = func(*args, **kwargs)
        return mark(result) if marked and func.__name__ not in ("tolist", "item") else result

    def check(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        """Raise if the call mixes tensors of both devices."""
        name, operands = func.__name__, tensors[:1] if func.__name__ in SIZES else tensors
        if name == "numpy":
            raise RuntimeError("numpy: the tensor is on the second device; use cpu() first")
        if name in INDEXING and is_marked(args[0]):
            operands = [x for x in args[2:] if isinstance(x, Tensor)]  # the assigned value
        on_cpu = [tuple(x.shape) for x in operands if x.dim() > 0 and not is_marked(x)]
        if on_cpu:
            raise RuntimeError(f"{name}: tensors on both devices; shapes on the CPU: {on_cpu}")


@contextlib.contextmanager
def second_device() -> Iterator[None]:
    import transformers

    from trainer.parallel import comm

    load = transformers.PreTrainedModel.from_pretrained.__func__

    def load_on_cpu(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers fills buffers under its own torch function modes, which SecondDevice would disturb.
        with _pop_mode_temporarily():
            return load(cls, *args, **kwargs)

    pick_device = comm.pick_device
    modules = [module for module in list(sys.modules.values()) if vars(module).get("pick_device") is pick_device]
    for module in modules:
        module.pick_device = lambda: DEVICE
    transformers.PreTrainedModel.from_pretrained = classmethod(load_on_cpu)
    try:
        with SecondDevice():
            yield
    finally:
        transformers.PreTrainedModel.from_pretrained = classmethod(load)
        for module in modules:
            module.pick_device = pick_device
