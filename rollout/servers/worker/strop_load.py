"""Replace all weights of a running vLLM model with vLLM's layerwise reload.

    with Loading(worker) as loading:
        loading.begin()                 # initialize_layerwise_reload: every parameter moves to the meta device
        loading.add(piece)              # once per bucket: model.load_weights fills layers in order
        loading.finish()                # check everything, then finalize_layerwise_reload

vLLM packs, fuses and shards weights as it loads them, so they cannot simply be copied; its reload takes checkpoint
names. Between begin and finish the model cannot run, so everything happens within one worker call.

In addition to vLLM's reload, this file unwraps LoRA layers during the load, checks that every parameter receives all
its elements and that bytes match the sender's checksum, and after a failure restores the old tensors of every
incomplete layer. Uses only functions that vLLM 0.24 and 0.32 both have.
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
    """One replacement of all weights: begin, add pieces, finish. Exiting without finish restores the old tensors."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.model: nn.Module = worker.model_runner.get_model()
        self.config = worker.vllm_config
        self.started = False
        self.num_bytes = 0
        self.seconds = {"wait": 0.0, "load": 0.0, "finish": 0.0}
        self._matches: list[Tensor] = []  # per piece: whether its checksum matches
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
            if self.started:
                self._restore()
        finally:
            self._contexts.close()

    def begin(self) -> None:
        """Unwrap LoRA layers and empty every parameter."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._lap("wait")
        self._contexts.enter_context(without_lora(self.model, self.config.lora_config is not None))
        self._contexts.enter_context(torch.device(self.worker.device))
        self.started = True
        initialize_layerwise_reload(self.model)
        self._lap("load")

    def add(self, piece: Piece) -> None:
        """Load the tensors of one bucket, then release its buffer."""
        self._lap("wait")
        self.num_bytes += piece.num_bytes
        self._names.update(name for name, _ in piece.tensors)
        if piece.matches is not None:
            self._matches.append(piece.matches)
        self.model.load_weights(iter(piece.tensors))
        copy_pending(self.model, piece)
        synchronize(self.worker.device)
        piece.release()
        self._lap("load")

    def finish(self) -> None:
        """Check that all bytes arrived and every layer is complete, then make the model runnable again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self.started:
            raise ValueError("no weights were sent")
        corrupted = [i for i, matches in enumerate(self._matches) if not bool(matches)]
        if corrupted:
            raise ValueError(f"{len(corrupted)} buckets arrived corrupted (checksum mismatch), first: {corrupted[0]}")
        tied = is_tied(self.config)
        if tied and "lm_head.weight" in self._names:
            raise ValueError("lm_head.weight was sent, but this server ties it to the embeddings and would ignore it")
        missing = incomplete(self.model, tied)
        if missing:
            raise ValueError(f"{len(missing)} layers did not receive all their weights, e.g. {missing[0]}")
        finalize_layerwise_reload(self.model, self.config.model_config)
        repack(self.model)
        self.started = False
        self._contexts.close()  # restores the LoRA wrappers
        # Drop caches computed with the old weights; the pause has already cleared the prefix cache.
        self.worker.reset_mm_cache()
        self.worker.reset_encoder_cache()
        runner = self.worker.model_runner
        if hasattr(runner, "reset_lora_state"):  # 0.32: reload adapters with the new base
            runner.reset_lora_state()
        synchronize(self.worker.device)
        self._lap("finish")

    def _restore(self) -> None:
        """Restore the old tensors of every incomplete layer, so that no layer stays on the meta device."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for _, info in unfinished(self.model):
            info.loaded_weights, info.load_numel = [], 0  # tells finalize that nothing was loaded
        finalize_layerwise_reload(self.model, self.config.model_config)
        repack(self.model)
        synchronize(self.worker.device)

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] += now - self._clock
        self._clock = now


def unfinished(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield layers that were emptied and are not loaded yet, each with vLLM's record."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            yield layer, info


def copy_pending(model: nn.Module, piece: Piece) -> None:
    """Copy the tensors that vLLM keeps until their layer is complete: their buffer will be reused."""
    if not piece.is_borrowed:
        return
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in piece.tensors}
    for _, info in unfinished(model):
        for _, bound in info.loaded_weights:
            for key, value in bound.arguments.items():
                if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                    bound.arguments[key] = value.clone()


def incomplete(model: nn.Module, tied: bool) -> list[str]:
    """Return the names of layers that received fewer elements than they have."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    names = {module: name for name, module in model.named_modules()}
    missing = []
    for layer, info in unfinished(model):
        if isinstance(layer, Attention | MLAAttention):  # scales of a quantised KV cache are not in the checkpoint
            continue
        if tied and isinstance(layer, ParallelLMHead):  # shares the embedding tensor
            continue
        num_elements = count_elements(layer)
        if info.load_numel < num_elements:
            missing.append(f"{names[layer]} ({info.load_numel} of {num_elements} elements)")
    return missing


def count_elements(layer: nn.Module) -> int:
    """Count the elements of the layer's own parameters in a checkpoint, without vocabulary padding."""
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


def repack(model: nn.Module) -> None:
    """Repack every layer that still has its weight: on a CPU, matrix products use a packed copy of the weight.

    vLLM's reload packs only loaded layers. A head tied to the embeddings is a separate layer and would silently keep
    its old copy. Layers whose weight is dropped after packing were packed when they were loaded.
    """
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel() > 0 and not weight.is_meta:
            layer.quant_method.process_weights_after_loading(layer)


@contextlib.contextmanager
def without_lora(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Replace LoRA wrappers, whose names no checkpoint has, with their base layers inside the context."""
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
    """Yield the safetensors files in a folder, in name order."""
    from safetensors import safe_open

    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"path={folder}: no safetensors files are visible to this server")
    for path in paths:
        with safe_open(path, "pt", device="cpu") as file:
            tensors = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118, not a dict
        yield Piece(tensors=tensors, num_bytes=sum(tensor.nbytes for _, tensor in tensors))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
