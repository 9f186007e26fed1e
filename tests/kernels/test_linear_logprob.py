"""linear_logprob with impl=torch at odd sizes: a prime vocabulary, token counts that no block divides, one, zero."""

from __future__ import annotations

import importlib.util
import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import kernels.linear_logprob as fast
from kernels import reference
from tests.kernels import heads
from tests.kernels.head_autograd import AROUND
from tests.kernels.head_checks import CHECKS
from tests.kernels.head_numerics import NUMERICS
from tests.kernels.heads import ENTRIES, IGNORE, LOSSES, OPTIONS, TORCH_16, TORCH_32, TORCH_64, Case, is_close, make
from tests.kernels.interpreter import IS_ON

N, D, V = 23, 16, 101  # 101 is prime: no block divides it
PATHS = {"float64": TORCH_64, "float32": TORCH_32, "bfloat16": TORCH_16}


@pytest.fixture(autouse=True)
def quiet():
    """Ignore the warning of CPUs without bfloat16 instructions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Use four tokens per block: 23 tokens take six blocks, the last partial."""
    monkeypatch.setattr(fast, "BLOCK_ELEMENTS", 4 * V + 3)


# Values and gradients


def test_value_by_hand():
    hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # logits 1, 2, 3
    out = fast.linear_logprob(hidden, weight, torch.tensor([1]))
    total = math.exp(1) + math.exp(2) + math.exp(3)
    p = [math.exp(z) / total for z in (1, 2, 3)]
    assert out.logp.item() == pytest.approx(math.log(p[1]), abs=1e-6)
    assert out.entropy.item() == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-6)
    assert out.logp.dtype == torch.float32


def test_sizes():
    for n, d, v in ((1, 16, 2), (1, 72, 1009), (5, 40, 331), (131, 16, 37), (131, 72, 1009)):
        heads.check(make(n, d, v), TORCH_32, temperature=0.7)
    for v in (1, 2):
        heads.check(make(1, D, v, path=TORCH_64), TORCH_64, temperature=0.7)


@pytest.mark.parametrize("path", PATHS)
def test_options(small_blocks, path):
    path = PATHS[path]
    for options in OPTIONS if path is TORCH_64 else ("plain", "all"):
        for bias, loss in ((True, "both"), (False, "logp"), (True, "entropy")):
            heads.check(make(N, D, V, path=path, bias=bias), path, loss=loss, **OPTIONS[options])
        heads.check(make(N, D, V, path=path), path, loss="logp", entropy=False, **OPTIONS[options])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("loss", "options"), [("logp", "plain"), ("entropy", "softcap"), ("both", "all")])
def test_bfloat16_error_is_close_to_plain_torch(small_blocks, options, loss, entry):
    """The error norm is at most 1.5 times that of plain bfloat16 torch, both against float64 on the same inputs.

    Not 1.0, because the weight gradient of each block is rounded before it is summed in float32.
    """
    case = make(61, 64, V, path=TORCH_16)
    got = ENTRIES[entry](case, TORCH_16, loss=loss, **OPTIONS[options])
    leaves = heads.leaves_of(case)
    plain = heads.with_gradients(*plain_torch(case._replace(**leaves), loss, leaves, **OPTIONS[options]))
    exact = heads.truth(case, loss=loss, **OPTIONS[options])
    assert [got[name].dtype for name in heads.NAMES] == [torch.bfloat16] * 3 and got["logp"].dtype == torch.float32
    for name, want in exact.items():
        error, torch_error = ((x[name].double() - want).norm().item() for x in (got, plain))
        assert error <= 1.5 * torch_error + 1e-6, f"{name}: {error}, plain torch {torch_error}"


def plain_torch(case: Case, loss: str, leaves: dict, *, scale=1.0, softcap=None, temperature=1.0) -> tuple:
    """Run plain torch: products in the input dtype, softmax in float32, all logits stored."""
    y = (case.hidden @ case.weight.T + case.bias).float() * scale
    y = y if softcap is None else softcap * torch.tanh(y / softcap)
    z = (y / temperature).log_softmax(dim=-1)
    logp, entropy = z.gather(1, case.target.unsqueeze(1)).squeeze(1), -(z.exp() * z).sum(dim=-1)
    return LOSSES[loss](logp, entropy, case.c), leaves, logp, entropy


def test_gradcheck(small_blocks):
    case = make(5, 3, 7, path=TORCH_64)
    target = case.target.clone()
    target[2] = IGNORE

    def function(h, w, b):
        return tuple(fast.linear_logprob(h, w, target, bias=b, scale=1.3, softcap=2.0, temperature=0.8))

    assert torch.autograd.gradcheck(function, tuple(heads.leaves_of(case).values()))


@pytest.mark.parametrize("path", ["float32", "bfloat16"])
def test_head_gets_its_gradient_in_its_own_dtype(path):
    """bfloat16 hidden states of a float32 model under autocast, and the reverse."""
    path = PATHS[path]
    other = torch.float32 if path.dtype == torch.bfloat16 else torch.bfloat16
    case = make(N, D, V, path=TORCH_16)  # exact in both
    want = heads.truth(case)
    mixed = Case(case.hidden.to(path.dtype), case.weight.to(other), case.bias.to(other), case.target, case.c)
    same = case._replace(hidden=mixed.hidden, weight=mixed.weight.to(path.dtype), bias=mixed.bias.to(path.dtype))
    for entry in ENTRIES.values():
        got = entry(mixed, path)
        assert [got[name].dtype for name in heads.NAMES] == [path.dtype, other, other]
        assert torch.equal(got["logp"], entry(same, path)["logp"])
        heads.assert_same(got, want, TORCH_16)


# Blocks


@pytest.mark.parametrize("elements", [1, 2 * V - 1, 7 * V + 5, N * V])
def test_blocks_do_not_change_the_result(monkeypatch, elements):
    case = make(N, D, V, path=TORCH_64)
    case.c[:, 3:8] = 0
    want = {name: entry(case, TORCH_64, softcap=3.0) for name, entry in ENTRIES.items()}
    monkeypatch.setattr(fast, "BLOCK_ELEMENTS", elements)
    for name, entry in ENTRIES.items():
        got = entry(case, TORCH_64, softcap=3.0)
        heads.assert_same(got, want[name], TORCH_64._replace(values=1e-13, gradients=1e-13))


def test_order_and_other_tokens_hardly_change_a_log_prob():
    case = make(N, D, V)
    logp = heads.token_logps(case, TORCH_32).logp
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    assert (heads.token_logps(case.select(order), TORCH_32).logp - logp[order]).abs().max() <= 1e-6
    for part in (slice(0, 1), slice(4, 11), slice(20, N)):
        assert (heads.token_logps(case.select(part), TORCH_32).logp - logp[part]).abs().max() <= 1e-6


def test_logits_are_not_saved_for_the_backward(small_blocks):
    case = make(400, 4, V, path=TORCH_64)
    sizes = []

    def save(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        full = case._replace(**heads.leaves_of(case))
        fast.linear_logprob(full.hidden, full.weight, full.target, bias=full.bias, softcap=3.0)
    assert sizes and max(sizes) <= max(case.hidden.numel(), case.weight.numel()) < 400 * V / 20


# Checks shared with impl=triton


@pytest.mark.parametrize("check", CHECKS | AROUND)
def test_check(check):
    for path in (TORCH_32, TORCH_16) if check in CHECKS else (TORCH_32,):
        (CHECKS | AROUND)[check](path)


def test_numerics():
    for path in (TORCH_64, TORCH_32):
        for check in NUMERICS.values():
            check(path)


def test_custom_ignore_index():
    case = make(N, D, V)
    case.target[4] = 7
    out = heads.token_logps(case, TORCH_32, ignore_index=7)
    kept = case.target != 7
    assert out.logp[4] == 0 and out.entropy[4] == 0
    is_close(out.logp[kept], heads.truth(case)["logp"][kept], 1e-6)


def test_unlikely_targets(small_blocks):
    """Log-probs of -70 to -300, which impl=triton must recompute."""
    case = make(N, D, V)
    case = heads.lifted(case, -torch.linspace(50, 260, N))
    want = heads.truth(case)
    assert want["logp"].max() < -50 and want["logp"].min() < -250
    for entry in ENTRIES.values():
        heads.assert_same(entry(case, TORCH_32), want, TORCH_32._replace(values=1e-4))


def test_large_logits_stay_finite():
    case = make(N, D, V, bias=False)
    for entry in ENTRIES.values():
        got = entry(case._replace(hidden=case.hidden * 1e4), TORCH_32)
        assert got["logp"].isfinite().all() and (got["entropy"].abs() < 1e-2).all()
        assert got["hidden"].isfinite().all() and got["weight"].isfinite().all()


# Errors

RUNS = {**ENTRIES, "logps": heads.token_logps}


@pytest.mark.parametrize("entry", RUNS)
def test_invalid_arguments_are_rejected(entry):
    case, run = make(N, D, V), RUNS[entry]
    for wrong, message in (
        ({"weight": case.weight[:, :-1]}, r"hidden \(23, 16\), weight \(101, 15\)"),
        ({"hidden": case.hidden.unsqueeze(0)}, r"expected \(N, D\) and \(V, D\)"),
        ({"target": case.target[:-1]}, r"target \(22,\): expected \(23,\)"),
        ({"bias": case.bias[:1]}, r"bias \(1,\): expected \(101,\)"),  # would broadcast silently
    ):
        with pytest.raises(ValueError, match=message):
            run(case._replace(**wrong), TORCH_32)
    for option in ("temperature", "scale", "softcap"):
        for value in (0.0, math.nan):
            with pytest.raises(ValueError, match=f"{option}={value}:"):
                run(case, TORCH_32, **{option: value})
    with pytest.raises(ValueError, match="impl=cuda:"):
        run(case, TORCH_32._replace(impl="cuda"))
    if importlib.util.find_spec("triton") is not None and not IS_ON:  # Triton's interpreter accepts a CPU
        with pytest.raises(ValueError, match="impl=triton: .*; use impl=torch"):
            run(make(N, D, V, path=TORCH_16), TORCH_16._replace(impl="triton"))


def test_unchecked_target_outside_the_vocabulary_is_an_error():
    case = make(N, D, V)
    case.target[3] = V
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        heads.token_logps(case, TORCH_32, ignore_index=None)


def test_dtensor_head_is_rejected():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # takes seconds

    case = make(N, D, V)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Replicate(), Shard(0)):
            weight = distribute_tensor(case.weight, mesh, [placement])
            for run in RUNS.values():
                with pytest.raises(ValueError, match=r"weight is a DTensor; .*full_tensor\("):
                    run(case._replace(weight=weight), TORCH_32)
            want = heads.token_logps(case, TORCH_32).logp
            assert torch.equal(heads.token_logps(case._replace(weight=weight.full_tensor()), TORCH_32).logp, want)
    finally:
        torch.distributed.destroy_process_group()


def test_auto_is_torch_on_a_cpu():
    case = make(N, D, V)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        head = fast._pick(case.hidden.to(dtype), case.weight, None, case.target, 1.0, None, 1.0, "auto")
        assert head is fast.TorchHead


def test_slow_reference_by_hand():
    """A vocabulary of two with logits 0 and log 3, temperature 2."""
    logp, entropy = reference.linear_logprob(
        torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3.0)]]), torch.tensor([1]), temperature=2.0
    )
    p = math.sqrt(3) / (1 + math.sqrt(3))
    assert logp.item() == pytest.approx(math.log(p), abs=1e-6)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)
