"""Offloaded inputs of checkpointed blocks: bit-identical gradients, and reused memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy import offload
from trainer.policy.heads import load_scorer
from trainer.policy.load import checkpoint_blocks, load_policy
from trainer.policy.offload import Offloader, Slabs, offload_inputs

CPU = torch.device("cpu")
LAYERS, VOCAB = 4, 50
TINY = ModelConfig(model="builtin:tiny", gradient_checkpointing=True, activation_offloading=True)


def make(device: torch.device = CPU, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """A random model whose blocks are checkpointed by torch."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **{**small, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def pair(**sizes: int) -> tuple[Any, Any, Offloader]:
    """The same model twice: with torch's checkpointing, and with offloaded inputs."""
    plain, offloaded = make(**sizes), make(**sizes)
    return plain, offloaded, offload_inputs(offloaded.model.layers, CPU)


def loss_of(model: Any, num_tokens: int, seed: int = 0) -> Tensor:
    ids = torch.randint(VOCAB, (1, num_tokens), generator=torch.Generator().manual_seed(seed))
    states = model.model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    return states.float().square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_equal(plain: nn.Module, offloaded: nn.Module) -> None:
    want, got = gradients(plain), gradients(offloaded)
    assert want.keys() == got.keys() and len(want) > LAYERS
    for name, grad in want.items():
        assert torch.equal(got[name], grad), name


@pytest.fixture
def small_slabs(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(offload, "SLAB", 1000)  # an input fills several slabs, the last partly


@pytest.mark.usefixtures("small_slabs")
def test_gradients_match_bit_for_bit_over_several_micro_batches():
    plain, offloaded, offloader = pair()
    for seed, num_tokens in enumerate((40, 7, 64, 40)):
        for model in (plain, offloaded):
            loss_of(model, num_tokens, seed).backward()
        check_equal(plain, offloaded)
    most = -(-64 * 32 * 4 // 1000)  # slabs per input of the longest micro-batch
    assert offloader.slabs.count == len(offloader.slabs.free) == (LAYERS - 1) * most
    assert not offloader.leaving


def test_all_inputs_but_the_last_are_in_main_memory(monkeypatch):
    _, offloaded, offloader = pair()
    inputs: list[offload.OffloadedInput] = []
    pack = offloader.pack

    def record(*args: Any) -> Any:
        packed = pack(*args)
        inputs.extend([packed] * isinstance(packed, offload.OffloadedInput))  # older torch packs other arguments too
        return packed

    monkeypatch.setattr(offloader, "pack", record)
    loss = loss_of(offloaded, 16)
    assert [len(packed.slabs) for packed in inputs] == [1, 1, 1, 0]
    assert [packed.tensor is not None for packed in inputs] == [False, False, False, True]
    order: list[int] = []
    load = offloader._load
    monkeypatch.setattr(offloader, "_load", lambda packed: (order.append(inputs.index(packed)), load(packed)))
    loss.backward()
    assert order == [3, 2, 2, 1, 1, 0, 0]  # each input is copied back while the following block runs


def test_retained_graph_gives_the_same_gradient_twice():
    plain, offloaded, offloader = pair()
    for model in (plain, offloaded):
        loss = loss_of(model, 12)
        loss.backward(retain_graph=True)
        loss.backward()
    del loss
    check_equal(plain, offloaded)
    assert offloader.slabs.count == len(offloader.slabs.free)


def test_two_forward_passes_before_a_backward_pass():
    plain, offloaded, _ = pair()
    for model in (plain, offloaded):
        (loss_of(model, 12, 1) * 2 + loss_of(model, 20, 2)).backward()
    check_equal(plain, offloaded)


def test_no_grad_passes_offload_nothing():
    plain, offloaded, offloader = pair()
    with torch.no_grad():
        loss_of(offloaded, 12)
    offloaded.eval()
    with torch.no_grad():
        evaluated = loss_of(offloaded, 12)
    offloaded.train()
    assert offloader.slabs.count == 0
    assert torch.equal(evaluated, loss_of(plain.eval(), 12))
    loss_of(offloaded, 12)  # no backward pass: its graph is freed
    gc.collect()
    assert offloader.slabs.count == len(offloader.slabs.free) == LAYERS - 1


@pytest.mark.parametrize("block", [0, 2])
def test_error_in_the_backward_pass_does_not_affect_later_passes(block):
    plain, offloaded, offloader = pair()

    def fail(grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    hook = offloaded.model.layers[block].mlp.down_proj.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(offloaded, 12).backward()
    hook.remove()
    offloaded.zero_grad(set_to_none=True)
    for seed in (1, 2, 3):
        for model in (plain, offloaded):
            loss_of(model, 30, seed).backward()
        check_equal(plain, offloaded)
    lost = offloader.slabs.count - len(offloader.slabs.free)
    assert lost <= block + 1  # torch never frees blocks that a failed backward pass did not reach
    assert offloader.slabs.count <= LAYERS - 1 + lost


def test_single_block_does_not_offload_its_input():
    plain, offloaded, offloader = pair(num_hidden_layers=1)
    for model in (plain, offloaded):
        loss_of(model, 12).backward()
    assert torch.equal(plain.model.embed_tokens.weight.grad, offloaded.model.embed_tokens.weight.grad)
    assert offloader.slabs.count == 0


def test_memory_that_cannot_be_locked_is_pageable(monkeypatch):
    slabs = Slabs(torch.device("cuda"))
    lines: list[str] = []
    monkeypatch.setattr(offload, "log", lines.append)
    monkeypatch.setattr(torch, "empty", failing_if_pinned(torch.empty))
    taken = slabs.take(2 * offload.SLAB + 1)
    assert [x.shape for x in taken] == 3 * [(offload.SLAB,)] and not slabs.is_locked
    assert len(lines) == 1 and "only 0 GiB" in lines[0]
    slabs.give_back(taken)
    assert slabs.take(1)[0] is taken[2] and slabs.count == 3


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def failing_if_pinned(plain: Any) -> Any:
    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*sizes, **options)

    return empty


def test_offloading_without_effect_is_rejected():
    model = make()
    model.model.layers[0] = nn.Identity()
    for call, message in (
        (lambda: replace(TINY, gradient_checkpointing=False), "--gradient-checkpointing"),
        (lambda: load_policy(TINY, LoraConfig(), CPU, with_reference=False), "CPU"),
        (lambda: load_scorer(TINY, LoraConfig(), CPU, kind="sequence"), "CPU"),
        (lambda: checkpoint_blocks(model, TINY, "a/b", CPU), "a/b"),
    ):
        with pytest.raises(ValueError, match=f"activation_offloading=True.*{message}"):
            call()


@pytest.mark.gpu
def test_on_a_gpu_gradients_match_and_memory_falls(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic matmuls
    device, layers, num_tokens, width = torch.device("cuda"), 12, 8192, 1024
    sizes = {"hidden_size": width, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    found, peaks, slabs = [], [], None
    for offloads in (False, True):
        model = make(device, torch.bfloat16, num_hidden_layers=layers, **sizes)
        if offloads:
            slabs = offload_inputs(model.model.layers, device).slabs
        with deterministic():
            for seed in (1, 2, 3):  # the first allocates permanent memory
                model.zero_grad(set_to_none=False)  # keep gradients allocated in both cases
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                loss_of(model, num_tokens, seed).backward()
                torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append({name: grad.cpu() for name, grad in gradients(model).items()})
        del model
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        assert torch.equal(found[1][name], grad), name
    one = 2 * num_tokens * width
    assert slabs.is_locked and slabs.count == len(slabs.free) == (layers - 1) * -(-one // offload.SLAB)
    assert peaks[0] - peaks[1] > 0.8 * (layers - 2) * one, [peak / one for peak in peaks]
