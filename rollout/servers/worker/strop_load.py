"""Replace all weights of a running vLLM model, through vLLM's layerwise reload.

    with Loading(worker) as loading:
        loading.begin()                 # initialize_layerwise_reload: every parameter goes to the meta device
        loading.add(piece)              # model.load_weights fills layer after layer; once per bucket
        loading.finish()                # check everything, then finalize_layerwise_reload

vLLM packs, fuses and shards weights while it loads them, so they cannot simply be copied; its reload takes checkpoint
names. Between begin and finish the model cannot run, so all of it happens within one call of the worker.

Added here: layers wrapped for LoRA are unwrapped meanwhile, every parameter must get all its elements, bytes are
checked against the sender's checksum, and after a failure every incomplete layer gets its old tensors back.

Uses functions that vLLM 0.24 and 0.32 both have.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from strop_wire import Piece
from torch import Tensor, nn


class Loading:
    """One change of all weights: begin, add pieces, finish. Leaving without finish restores the old tensors."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.model: nn.Module = worker.model_runner.get_model()
        self.config = worker.vllm_config
        self.begun = False
        self.num_bytes = 0
        self.num_tensors = 0
        self.seconds = {"wait": 0.0, "load": 0.0, "finish": 0.0}
        self._right: list[Tensor] = []  # per piece: whether its checksum matches
        self._names: set[str] = set()
        self._contexts = contextlib.ExitStack()
        self._clock = time.monotonic()

    def __enter__(self) -> Loading:
        from vllm.config import set_current_vllm_config

        self._contexts.enter_context(set_current_vllm_config(self.config))
        self._contexts.enter_context(torch.no_grad())
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self.begun:
                self._restore()
        finally:
            self._contexts.close()

    def begin(self) -> None:
        """Unwrap LoRA layers and empty every parameter."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._lap("wait")
        self._contexts.enter_context(without_lora(self.model, self.config.lora_config is not None))
        self._contexts.enter_context(torch.device(self.worker.device))
        self.begun = True
        initialize_layerwise_reload(self.model)
        self._lap("load")

    def add(self, piece: Piece) -> None:
        """Load the tensors of one bucket, then release its buffer."""
        self._lap("wait")
        self.num_bytes += piece.num_bytes
        self.num_tensors += len(piece.tensors)
        self._names.update(name for name, _ in piece.tensors)
        if piece.right is not None:
            self._right.append(piece.right)
        self.model.load_weights(iter(piece.tensors))
        keep_pending(self.model, piece)
        synchronize(self.worker.device)
        piece.release()
        self._lap("load")

    def finish(self) -> None:
        """Check that all bytes arrived and every layer is complete, then make the model runnable again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self.begun:
            raise ValueError("no weights were sent")
        wrong = [i for i, right in enumerate(self._right) if not bool(right)]
        if wrong:
            raise ValueError(f"bucket {wrong[0]} arrived with other bytes than were sent ({len(wrong)} such buckets)")
        self._check_names()
        missing = incomplete(self.model, is_tied(self.config))
        if missing:
            raise ValueError(f"{len(missing)} layers did not get all their weights, {missing[0]} for one")
        finalize_layerwise_reload(self.model, self.config.model_config)
        pack_again(self.model)
        self.begun = False
        self._contexts.close()  # LoRA wrappers are back from here on
        self._drop_caches()
        synchronize(self.worker.device)
        self._lap("finish")

    def _check_names(self) -> None:
        if is_tied(self.config) and "lm_head.weight" in self._names:
            raise ValueError("lm_head.weight was sent, but this server ties it to the embeddings and would ignore it")

    def _drop_caches(self) -> None:
        """Drop what was computed with the old weights; pausing the server has cleared the prefix cache already."""
        self.worker.reset_mm_cache()
        self.worker.reset_encoder_cache()
        runner = self.worker.model_runner
        if hasattr(runner, "reset_lora_state"):  # 0.32: adapters are read again with the new base
            runner.reset_lora_state()

    def _restore(self) -> None:
        """Restore the old tensors of every incomplete layer, so that none stays on the meta device."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for _, info in unfinished(self.model):
            info.loaded_weights, info.load_numel = [], 0  # tells finalize that nothing was loaded
        finalize_layerwise_reload(self.model, self.config.model_config)
        pack_again(self.model)
        synchronize(self.worker.device)

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] += now - self._clock
        self._clock = now


def unfinished(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Layers that initialize has emptied and that are not loaded again yet, with vLLM's record of each."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            yield layer, info


def keep_pending(model: nn.Module, piece: Piece) -> None:
    """Copy the tensors that vLLM keeps until the rest of their layer arrives: their buffer will be reused."""
    if not piece.is_borrowed:
        return
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in piece.tensors}
    for _, info in unfinished(model):
        for _, bound in info.loaded_weights:
            for key, value in bound.arguments.items():
                if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                    bound.arguments[key] = value.clone()


def incomplete(model: nn.Module, tied: bool) -> list[str]:
    """Names of layers that got fewer elements than they have."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    names = {module: name for name, module in model.named_modules()}
    missing = []
    for layer, info in unfinished(model):
        if isinstance(layer, Attention | MLAAttention):  # scales of a quantised KV cache stay as they are
            continue
        if tied and isinstance(layer, ParallelLMHead):  # shares the tensor of the embeddings
            continue
        need = elements(layer)
        if info.load_numel < need:
            missing.append(f"{names[layer]} ({info.load_numel} of {need} elements)")
    return missing


def elements(layer: nn.Module) -> int:
    """Elements of the layer's own parameters that a checkpoint holds, so without padding of the vocabulary."""
    total = 0
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        rows = getattr(getattr(layer, "shard_indices", None), "num_org_elements", None)
        if name == "weight" and rows is not None and parameter.dim() == 2:
            total += rows * parameter.shape[1]
        else:
            total += getattr(parameter, "weight_loader_numel", parameter.numel())
    return total


def is_tied(config: Any) -> bool:
    return bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))


def pack_again(model: nn.Module) -> None:
    """On a CPU, matrix products use a packed copy of the weight: pack again every layer that still has its weight.

    vLLM's reload packs the layer that was loaded. A head tied to the embeddings is another layer and would keep its old
    copy, without an error. Layers whose weight is dropped after packing were packed when they were loaded.
    """
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel() > 0 and not weight.is_meta:
            layer.quant_method.process_weights_after_loading(layer)


@contextlib.contextmanager
def without_lora(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Put plain layers in place of those wrapped for LoRA, whose names no checkpoint has, for the duration."""
    wrapped = []
    if enabled:
        from vllm.lora.layers import BaseLayerWithLoRA

        for parent in model.modules():
            wrapped += [
                (parent, n, child) for n, child in parent._modules.items() if isinstance(child, BaseLayerWithLoRA)
            ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def files(folder: str, device: torch.device) -> Iterator[Piece]:
    """The safetensors files of a folder, in the order of their names."""
    from safetensors import safe_open

    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"path={folder}: holds no safetensors files that this server can see")
    for path in paths:
        with safe_open(path, "pt", device="cpu") as file:
            tensors = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118, not a dict
        yield Piece(tensors=tensors, num_bytes=sum(tensor.nbytes for _, tensor in tensors))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
