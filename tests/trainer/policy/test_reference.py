"""Each source of reference log-probs vs. transformers' forward of the reference model."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from data.packing import Item, make_batches
from tests.entry import metrics, repeatable
from tests.test_resume import copy_as_if_killed
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig, ReferenceConfig, RunConfig
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, as_reference, reference_logps, token_logps
from trainer.policy.reference import MovingReference, Reference, build_reference, wants_copy

CPU = torch.device("cpu")
TINY = ModelConfig(model="builtin:tiny")
OFF, RANK4 = LoraConfig(), LoraConfig(r=4)
RUN = RunConfig(max_tokens_per_micro_batch=24)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use the same number of threads as the subprocesses."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_items() -> list[Item]:
    lengths = ((3, 4), (3, 7), (5, 1), (2, 9))
    generator = torch.Generator().manual_seed(0)
    return [
        Item(ids=torch.randint(10, 200, (p + c,), generator=generator).tolist(), mask=[False] * p + [True] * c)
        for p, c in lengths
    ]


def load(
    lora: LoraConfig = OFF, model: ModelConfig = TINY, **reference: Any
) -> tuple[Policy, Reference, ReferenceConfig]:
    """Load a policy and its reference as a method does."""
    cfg = ReferenceConfig(**reference)
    policy = load_policy(model, lora, CPU, with_reference=wants_copy(cfg, lora))
    return policy, build_reference(cfg, model, RUN, policy, make_items()), cfg


def per_item(reference: Reference) -> list[Tensor]:
    """Log-probs of each item, computed in micro-batches of several items."""
    items, logps = make_items(), {}
    for batch in make_batches(items, max_tokens=24):
        logp = reference.token_logps(batch, items)
        logps |= {i: logp[batch.sequence == i] for i in batch.rows}
    return [logps[i] for i in range(len(items))]


@torch.no_grad()
def plain(model: Any) -> list[Tensor]:
    """Log-probs of each item from transformers' forward, one sequence at a time."""
    logps = []
    for item in make_items():
        ids = torch.tensor(item.ids)
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[1:, None]).squeeze(1)
        logps.append(logp[torch.tensor(item.mask[1:])])
    return logps


def shake(model: Any, size: float = 0.05) -> None:
    """Move every trained parameter, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=generator))


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-6)


def assert_other(got: list[Tensor], want: list[Tensor]) -> None:
    assert (torch.cat(got) - torch.cat(want)).abs().max() > 0.01


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_policy(TINY, OFF, CPU, with_reference=False).model.eval()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same architecture with other weights."""
    policy = load_policy(TINY, OFF, CPU, with_reference=False)
    shake(policy.model)
    folder = tmp_path_factory.mktemp("other")
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ref", ["auto", "adapter_off"])
def test_adapter_off_is_the_base_model(ref, tiny):
    policy, reference, _ = load(RANK4, ref=ref)
    assert policy.reference is None
    shake(policy.model)
    assert_same(per_item(reference), plain(tiny))
    assert_other(plain(policy.model.eval()), plain(tiny))


@pytest.mark.parametrize("ref", ["auto", "copy"])
def test_copy_keeps_the_initial_weights(ref, tiny):
    policy, reference, _ = load(ref=ref)
    before = per_item(reference)
    assert_same(before, plain(tiny))
    shake(policy.model)
    assert all(map(torch.equal, per_item(reference), before))
    assert_other(plain(policy.model.eval()), before)
    assert not any(p.requires_grad for p in policy.reference.parameters()) and not policy.reference.training


def test_no_reference_is_all_zeros():
    (batch,) = make_batches(make_items(), max_tokens=100)
    assert torch.equal(Reference(None).token_logps(batch, make_items()), torch.zeros(21))


@pytest.mark.parametrize("lora", [OFF, RANK4], ids=["all weights", "lora"])
def test_precomputed_is_the_initial_model_without_a_second_copy(lora, tiny, tmp_path):
    policy, reference, _ = load(lora, ref="precomputed", ref_cache=str(tmp_path / "cache"))
    assert reference.policy is None and policy.reference is None and policy.model.training
    shake(policy.model)
    assert_same(per_item(reference), plain(tiny))


def test_precomputed_is_cached_until_the_model_or_data_changes(tmp_path):
    cfg = ReferenceConfig(ref="precomputed", ref_cache=str(tmp_path))
    policy = load_policy(TINY, OFF, CPU, with_reference=False)
    items = make_items()

    def build(items: list[Item]) -> Reference:
        return build_reference(cfg, TINY, RUN, policy, items)

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    first = per_item(build(items))
    cached = files()
    assert len(cached) == 1 and all(name.endswith(".safetensors") for name in cached)
    assert all(map(torch.equal, per_item(build(items)), first)) and files() == cached
    build([*items, items[0]])  # a duplicate row is computed once
    assert files() == cached

    build(items[:-1])
    build([*items[:-1], dataclasses.replace(items[-1], mask=[False] * 3 + [True] * 8)])
    assert len(files()) == 3
    policy.model.config.rms_norm_eps *= 2  # same weights, different config
    build(items)
    assert len(files()) == 4
    shake(policy.model)
    assert_other(per_item(build(items)), first)
    assert len(files()) == 5 and {name: files()[name] for name in cached} == cached


@pytest.mark.parametrize(("ref", "lora"), [("auto", OFF), ("precomputed", RANK4)])
def test_ref_model_is_another_model(ref, lora, other, tiny, tmp_path):
    cache = {"ref_cache": str(tmp_path)} if ref == "precomputed" else {}
    model = dataclasses.replace(TINY, merge_lora=lora.r > 0)  # applies to the policy, not the reference
    policy, reference, _ = load(lora, model, ref=ref, ref_model=str(other), **cache)
    want = plain(load_policy(ModelConfig(model=str(other)), OFF, CPU, with_reference=False).model.eval())
    assert policy.reference is None
    assert_same(per_item(reference), want)
    assert_same(plain(policy.model.eval()), plain(tiny))
    shake(policy.model)
    assert_same(per_item(reference), want)


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_ref_model_is_stored_in_the_compute_dtype(kind, other, tmp_path):
    folder = str(other)
    if kind == "adapter":
        tuned = load_policy(ModelConfig(model=folder), RANK4, CPU, with_reference=False).model
        shake(tuned)
        folder = str(tmp_path / "adapter")
        tuned.save_pretrained(folder)
        load_policy(TINY, OFF, CPU, with_reference=False).tokenizer.save_pretrained(folder)
    _, reference, _ = load(OFF, dataclasses.replace(TINY, dtype="bfloat16"), ref_model=folder)
    model = reference.policy.reference
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    exact = load_policy(ModelConfig(model=folder), OFF, CPU, with_reference=False).model
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter.detach().bfloat16(), rtol=0, atol=0)


def test_ref_model_with_other_token_ids_is_rejected(other):
    policy = load_policy(TINY, OFF, CPU, with_reference=False)
    policy.tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match=f"^ref_model={other}: .*model=builtin"):
        build_reference(ReferenceConfig(ref_model=str(other)), TINY, RUN, policy, make_items())


def test_reference_of_a_continued_adapter_is_the_saved_adapter(tmp_path, tiny):
    first, _, _ = load(RANK4)
    shake(first.model)
    first.model.save_pretrained(tmp_path / "adapter")
    first.tokenizer.save_pretrained(tmp_path / "adapter")
    initial = plain(first.model.eval())
    assert_other(initial, plain(tiny))

    model = ModelConfig(model=str(tmp_path / "adapter"))
    policy, reference, _ = load(RANK4, model)
    _, precomputed, _ = load(RANK4, model, ref="precomputed", ref_cache=str(tmp_path / "cache"))
    assert_same(per_item(reference), initial)
    assert_same(per_item(precomputed), initial)
    shake(policy.model)
    assert_same(per_item(reference), initial)
    assert_other(plain(policy.model), initial)


@pytest.mark.parametrize("lora", [RANK4, LoraConfig(r=4, dora=True), LoraConfig(r=4, modules_to_save=("norm",))])
def test_compiled_reference_without_adapter_matches_bit_for_bit(lora):
    """Compiled blocks multiply additive adapters by zero; other adapters are switched off."""
    policy, reference, _ = load(lora)
    shake(policy.model)
    trained, without = plain(policy.model), per_item(reference)
    assert_other(trained, without)
    policy.is_compiled = True
    assert all(map(torch.equal, per_item(reference), without))
    with pytest.raises(KeyError), as_reference(policy):
        raise KeyError
    assert all(map(torch.equal, plain(policy.model), trained))


@pytest.mark.slow
def test_compiled_policy_and_reference_run_the_same_operations(monkeypatch):
    """Otherwise the compiler would fuse, tile and round them differently. Log-probs match the uncompiled model's."""
    arithmetic = {"mm", "sum_products", "mul", "add", "mean", "rsqrt", "silu"}
    operations: list[Counter[str]] = []

    def record(graph, inputs):
        names = [str(node.target).split(".") for node in graph.graph.nodes if node.op == "call_function"]
        operations.append(Counter(name[1] for name in names if name[1:] and name[1] in arithmetic))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, options, **o: plain(forward, backend=backend, **o))
    policy, _, _ = load(RANK4, dataclasses.replace(TINY, compile=True, gradient_checkpointing=True))
    eager, _, _ = load(RANK4)
    shake(policy.model)
    eager.model.load_state_dict(policy.model.state_dict())
    (batch,) = make_batches(make_items(), max_tokens=1000)
    for _ in range(2):
        torch.testing.assert_close(token_logps(policy, batch).logp, token_logps(eager, batch).logp)
        torch.testing.assert_close(reference_logps(policy, batch), reference_logps(eager, batch))
    torch._dynamo.reset()
    # For all blocks and both iterations; the input of the reference's first block is marked as requiring a gradient.
    policy_blocks, first_of_reference, later_of_reference = operations
    assert policy_blocks["mm"] == policy_blocks["sum_products"] == 7
    assert policy_blocks == first_of_reference == later_of_reference


def test_contradictory_settings_are_rejected():
    for settings, lora, message in (
        ({"ref": "adapter_off"}, OFF, "ref=adapter_off: .*--lora.r"),
        ({"ref": "adapter_off", "ref_model": "x"}, RANK4, "ref_model=x .*ref=adapter_off"),
        ({"ref": "copy"}, RANK4, "ref=copy: .*--ref adapter_off"),
        ({"ref": "copy", "ref_cache": "x"}, OFF, "ref_cache=x .*ref=copy"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            wants_copy(ReferenceConfig(**settings), lora)


def test_when_a_copy_is_needed():
    assert wants_copy(ReferenceConfig(), OFF) and wants_copy(ReferenceConfig(), RANK4)
    assert wants_copy(ReferenceConfig(ref="copy"), OFF) and wants_copy(ReferenceConfig(ref="adapter_off"), RANK4)
    for settings in ({"ref": "precomputed"}, {"ref_model": "x"}, {"ref": "copy", "ref_model": "x"}):
        assert not wants_copy(ReferenceConfig(**settings), OFF)


def test_an_exact_reference_averages_in_float32():
    """Steps of 1e-3 times a weight are rounded away in bfloat16, and again after each restore."""
    weights = {"w": torch.full((4,), 1.0)}
    student, teacher = torch.nn.ParameterDict(weights), torch.nn.ParameterDict(weights).bfloat16()
    plain = {"is_lora": False, "reference_adapter": None}
    policy = SimpleNamespace(model=student, reference=teacher.requires_grad_(False), **plain)
    frozen = SimpleNamespace(model=student, reference=copy.deepcopy(teacher), **plain)
    rounded = MovingReference(frozen, alpha=0.05, every=1)
    exact, average = MovingReference(policy, alpha=0.05, every=1, exact=True), 1.0
    for step in range(60):
        student["w"].data += 1e-3
        average += 0.05 * (student["w"][0].item() - average)
        exact.after_step(step)
        rounded.after_step(step)
        if step == 30:
            saved = {name: x.clone() for name, x in exact.tensors().items()}
            exact = MovingReference(policy, alpha=0.05, every=1, exact=True)
            exact.load_tensors(saved)
    torch.testing.assert_close(exact.tensors()["w"], torch.full((4,), average))
    assert teacher["w"].dtype == torch.bfloat16 and torch.equal(teacher["w"], exact.tensors()["w"].bfloat16())
    assert average > 1.03 and rounded.tensors()["w"].max() < 1.01


def test_with_lora_a_second_adapter_follows_the_trained_one():
    policy, _, _ = load(lora=RANK4)
    moving = MovingReference(policy, alpha=0.25, every=1, exact=True)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    before = {name: x.clone() for name, x in moving.tensors().items()}
    assert set(before) == set(trained) and all(torch.equal(before[name], p) for name, p in trained.items())
    with torch.no_grad():
        for p in trained.values():
            p.add_(0.1)
    moving.after_step(1)
    for name, x in moving.tensors().items():
        torch.testing.assert_close(x, 0.75 * before[name] + 0.25 * trained[name])
    with as_reference(policy) as model:
        assert model.active_adapter == policy.reference_adapter
    assert policy.model.active_adapter == "default" and all(p.requires_grad for p in trained.values())
    assert not any(x.requires_grad for x in moving.tensors().values())


def test_moving_reference_moves_by_alpha_every_n_steps():
    policy, reference, _ = load()
    moving = MovingReference(policy, alpha=0.6, every=3)
    shake(policy.model)
    before = copy.deepcopy(policy.reference.state_dict())
    logps_before = per_item(reference)
    for step in (1, 2, 4, 5):
        moving.after_step(step)
    assert all(torch.equal(value, before[name]) for name, value in policy.reference.state_dict().items())
    moving.after_step(6)
    trained = policy.model.state_dict()
    for name, value in policy.reference.state_dict().items():
        torch.testing.assert_close(value, 0.4 * before[name] + 0.6 * trained[name])
    assert_other(per_item(reference), logps_before)
    assert not any(p.requires_grad for p in policy.reference.parameters())

    saved = {name: value.detach().clone() for name, value in moving.tensors().items()}
    moving.after_step(9)
    moved = per_item(reference)
    moving.load_tensors(saved)
    assert_other(per_item(reference), moved)
    assert all(torch.equal(value, saved[name]) for name, value in moving.tensors().items())


def test_moving_reference_survives_a_resume(tmp_path):
    """The resumed run matches an uninterrupted run bit for bit; the checkpoint contains the moved reference."""
    argv = [
        "--method", "dpo", "--max-steps", "4", "--save-steps", "2", "--per-device-train-batch-size", "2", "--seed", "5",
        "--data", "task:addition:split=train,size=16", "--eval-data", "task:addition:split=eval,size=4",
        "--eval-steps", "2", "--sync-ref-model", "--ref-model-sync-steps", "2", "--ref-model-mixup-alpha", "0.5",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*argv, "--output-dir", str(whole)]) == 0
    copy_as_if_killed(whole, killed, saved=2, logged=3)
    saved = load_file(killed / "checkpoints" / "step-00000002" / "extra.safetensors")
    base = load_policy(TINY, OFF, CPU, with_reference=False).model.state_dict()
    assert saved and all(not torch.equal(value, base[name.removeprefix("reference/")]) for name, value in saved.items())
    assert main(["--resume", str(killed)]) == 0
    assert [row["step"] for row in metrics(killed)] == list(range(5))
    assert repeatable(metrics(killed)) == repeatable(metrics(whole))
