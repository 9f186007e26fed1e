"""Inputs of checkpointed blocks in main memory: the same gradients, bit by bit, and memory that is used again."""

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
    """A model of random weights whose blocks are checkpointed, by torch itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **{**small, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def pair(**sizes: int) -> tuple[Any, Any, Offloader]:
    """The same model twice: as torch keeps its inputs, and as we do."""
    plain, ours = make(**sizes), make(**sizes)
    return plain, ours, offload_inputs(ours.model.layers, CPU)


def loss_of(model: Any, num_tokens: int, seed: int = 0) -> Tensor:
    ids = torch.randint(VOCAB, (1, num_tokens), generator=torch.Generator().manual_seed(seed))
    states = model.model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    return states.float().square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_equal(plain: nn.Module, ours: nn.Module) -> None:
    want, got = gradients(plain), gradients(ours)
    assert want.keys() == got.keys() and len(want) > LAYERS
    for name, grad in want.items():
        assert torch.equal(got[name], grad), name


@pytest.fixture
def small_slabs(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(offload, "SLAB", 1000)  # an input fills several, and not exactly


@pytest.mark.usefixtures("small_slabs")
def test_gradients_are_the_same_bit_by_bit_over_several_micro_batches():
    plain, ours, offloader = pair()
    for seed, num_tokens in enumerate((40, 7, 64, 40)):
        for model in (plain, ours):
            loss_of(model, num_tokens, seed).backward()
        check_equal(plain, ours)
    most = -(-64 * 32 * 4 // 1000)
    assert offloader.slabs.count == len(offloader.slabs.free) == (LAYERS - 1) * most  # of the longest micro-batch
    assert not offloader.leaving


def test_all_inputs_but_the_last_are_in_main_memory(monkeypatch):
    _, ours, offloader = pair()
    made: list[offload.OffloadedInput] = []
    pack = offloader.pack

    def seen(*args: Any) -> Any:
        made.append(pack(*args))
        return made[-1]

    monkeypatch.setattr(offloader, "pack", seen)
    loss = loss_of(ours, 16)
    assert [len(kept.slabs) for kept in made] == [1, 1, 1, 0]
    assert [kept.tensor is not None for kept in made] == [False, False, False, True]
    order: list[int] = []
    bring_back = offloader._bring_back
    monkeypatch.setattr(offloader, "_bring_back", lambda kept: (order.append(made.index(kept)), bring_back(kept)))
    loss.backward()
    assert order == [3, 2, 2, 1, 1, 0, 0]  # each is fetched while the block behind it runs


def test_a_graph_that_is_kept_gives_the_same_gradient_twice():
    plain, ours, offloader = pair()
    for model in (plain, ours):
        loss = loss_of(model, 12)
        loss.backward(retain_graph=True)
        loss.backward()
    del loss
    check_equal(plain, ours)
    assert offloader.slabs.count == len(offloader.slabs.free)


def test_two_forward_passes_before_a_backward_pass():
    plain, ours, _ = pair()
    for model in (plain, ours):
        (loss_of(model, 12, 1) * 2 + loss_of(model, 20, 2)).backward()
    check_equal(plain, ours)


def test_passes_without_gradient_keep_nothing():
    plain, ours, offloader = pair()
    with torch.no_grad():
        loss_of(ours, 12)
    ours.eval()
    with torch.no_grad():
        evaluated = loss_of(ours, 12)
    ours.train()
    assert offloader.slabs.count == 0
    assert torch.equal(evaluated, loss_of(plain.eval(), 12))
    loss_of(ours, 12)  # never differentiated: its graph is gone
    gc.collect()
    assert offloader.slabs.count == len(offloader.slabs.free) == LAYERS - 1


@pytest.mark.parametrize("block", [0, 2])
def test_an_error_in_the_backward_pass_leaves_nothing_wrong_behind(block):
    plain, ours, offloader = pair()

    def fail(grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    hook = ours.model.layers[block].mlp.down_proj.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(ours, 12).backward()
    hook.remove()
    ours.zero_grad(set_to_none=True)
    for seed in (1, 2, 3):
        for model in (plain, ours):
            loss_of(model, 30, seed).backward()
        check_equal(plain, ours)
    lost = offloader.slabs.count - len(offloader.slabs.free)
    assert lost <= block + 1  # torch never frees the blocks that a failed backward pass has not reached
    assert offloader.slabs.count <= LAYERS - 1 + lost


def test_one_block_keeps_its_input_where_it_is():
    plain, ours, offloader = pair(num_hidden_layers=1)
    for model in (plain, ours):
        loss_of(model, 12).backward()
    assert torch.equal(plain.model.embed_tokens.weight.grad, ours.model.embed_tokens.weight.grad)
    assert offloader.slabs.count == 0


def test_memory_that_cannot_be_locked_is_plain(monkeypatch):
    slabs = Slabs(torch.device("cuda"))
    lines: list[str] = []
    monkeypatch.setattr(offload, "log", lines.append)
    monkeypatch.setattr(torch, "empty", failing_where_pinned(torch.empty))
    taken = slabs.take(2 * offload.SLAB + 1)
    assert [x.shape for x in taken] == 3 * [(offload.SLAB,)] and not slabs.is_locked
    assert lines == ["only 0 GiB of main memory could be locked; other copies are slower"]
    slabs.give_back(taken)
    assert slabs.take(1)[0] is taken[2] and slabs.count == 3


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def failing_where_pinned(plain: Any) -> Any:
    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*sizes, **options)

    return empty


def test_it_is_refused_where_it_has_no_effect():
    with pytest.raises(ValueError, match="activation_offloading=True: .* add --gradient-checkpointing"):
        replace(TINY, gradient_checkpointing=False)
    for load in (load_policy, load_scorer):
        options = {"with_reference": False} if load is load_policy else {"kind": "sequence"}
        with pytest.raises(ValueError, match="activation_offloading=True: has no effect on a CPU, where"):
            load(TINY, LoraConfig(), CPU, **options)


def test_blocks_that_transformers_does_not_checkpoint_are_refused():
    model = make()
    model.model.layers[0] = nn.Identity()
    with pytest.raises(ValueError, match="activation_offloading=True: a/b does not checkpoint its blocks one by one"):
        checkpoint_blocks(model, TINY, "a/b", CPU)


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_the_same_and_memory_falls(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses products that may differ
    device, layers, num_tokens, width = torch.device("cuda"), 12, 8192, 1024
    sizes = {"hidden_size": width, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    found, peaks, slabs = [], [], None
    for offloads in (False, True):
        model = make(device, torch.bfloat16, num_hidden_layers=layers, **sizes)
        if offloads:
            slabs = offload_inputs(model.model.layers, device).slabs
        with deterministic():
            for seed in (1, 2, 3):  # the first takes memory for good
                model.zero_grad(set_to_none=False)  # gradients are there in both
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
