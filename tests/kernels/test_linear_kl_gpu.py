"""linear_kl on a GPU at real sizes: error against float64, memory, large offsets, repeatability."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels.linear_kl as fast
from kernels import reference
from kernels.linear_kl import Head, linear_kl_loss
from tests.kernels import kl_cases
from tests.kernels.kl_cases import BETAS, NAMES, Case, Path, check, make, run

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
AUTO_16 = Path("auto", torch.bfloat16, 3e-5, 1e-2, DEVICE)
AUTO_32 = Path("auto", torch.float32, 3e-5, 1e-5, DEVICE)
AUTO_64 = Path("auto", torch.float64, 1e-11, 1e-11, DEVICE)
GIB = 1 << 30
VOCAB = 151_936


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()


def draw(n: int, d: int, e: int, v: int, *, spread: float = 3.0) -> Case:
    """Build a case with logits of deviation `spread`. If d <= e, student and teacher share half of their features."""
    options = {"generator": torch.Generator(DEVICE).manual_seed(n + d + e + v), "device": DEVICE}
    weight, teacher_weight = (torch.randn(v, k, **options) * k**-0.5 for k in (d, e))
    hidden, teacher_hidden = (torch.randn(n, k, **options) * spread for k in (d, e))
    if d <= e:
        teacher_hidden[:, : d // 2] = hidden[:, : d // 2] * (e / d) ** 0.5
        teacher_weight[:, : d // 2] = weight[:, : d // 2] * (d / e) ** 0.5
    token_weight = torch.rand(n, **options)
    heads = Head(weight.bfloat16()), Head(teacher_weight.bfloat16())
    return Case(hidden.bfloat16(), heads[0], teacher_hidden.bfloat16(), heads[1], token_weight)


def exact(case: Case, *, beta: float, chunk: int = 250) -> dict[str, Tensor]:
    """Compute in float64, in chunks of tokens."""
    total = torch.zeros_like(case.head.weight, dtype=torch.float64)
    parts = []
    for part in torch.arange(len(case.hidden), device=DEVICE).split(chunk):
        hidden, weight = (x.double().requires_grad_() for x in (case.hidden[part], case.head.weight))
        teacher = case.teacher_head._replace(weight=case.teacher_head.weight.double())
        divergence = reference.linear_kl(
            hidden, case.head._replace(weight=weight), case.teacher_hidden[part].double(), teacher, beta=beta
        )
        loss = (divergence * case.token_weight[part].double()).sum()
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
        total += grad_weight
        parts.append((divergence.detach(), grad_hidden))
    divergence, grad_hidden = (torch.cat(x) for x in zip(*parts, strict=True))
    return {"divergence": divergence, "hidden": grad_hidden, "weight": total}


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("beta", BETAS)
def test_real_size(beta):
    """3,000 tokens in two chunks, with a teacher wider than the student."""
    case = draw(3000, 1024, 2048, VOCAB)
    got, want = run(case, AUTO_16, beta=beta), exact(case, beta=beta)
    assert (got["divergence"] - want["divergence"]).abs().max() < 1e-4  # values up to 10, sums over all ids
    assert got["loss"].item() == pytest.approx((want["divergence"] * case.token_weight).sum().item(), rel=1e-5)
    for name in ("hidden", "weight"):
        assert got[name].dtype == torch.bfloat16 and error(got[name], want[name]) < 4e-3, name


@pytest.mark.parametrize("v", [1, 37, 2048, 4095, 4097, 50_257, 262_144])
@pytest.mark.parametrize("n", [1, 130])
def test_odd_sizes(n, v):
    if n * v > 10_000_000:
        n = 7
    for path in (AUTO_16, AUTO_32):
        for beta in (0, 0.1, 1):
            check(make(n, v, d=64, e=72, path=path, bias=v != 4097), path, beta=beta)


@pytest.mark.parametrize("beta", BETAS)
def test_options(beta):
    options = {"head": {"scale": 1.5, "softcap": 4.0}, "teacher": {"scale": 0.7, "softcap": 2.0}}
    for path in (AUTO_16, AUTO_32, AUTO_64):
        check(make(131, 331, d=72, e=40, path=path, **options), path, beta=beta, temperature=1.7)


@pytest.mark.parametrize("beta", BETAS)
def test_identical_teacher_gives_zero_divergence_and_gradient(beta):
    case = kl_cases.same_head(draw(300, 128, 128, 50_257))
    assert all((x == 0).all() for x in run(case, AUTO_16, beta=beta).values())
    assert all(x.abs().max() < 1e-5 for x in run(case, AUTO_16, beta=beta, temperature=0.7).values())


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_impl_torch_matches(beta):
    """bfloat16 hidden states with a float32 student head, as in mixed precision."""
    case = draw(600, 256, 512, 50_257)
    case = case._replace(head=case.head._replace(weight=case.head.weight.float()))
    got, want = run(case, AUTO_16, beta=beta), run(case, AUTO_16._replace(impl="torch"), beta=beta)
    assert got["weight"].dtype == torch.float32
    torch.testing.assert_close(got["divergence"], want["divergence"], atol=3e-5, rtol=1e-5)
    assert all(error(got[name], want[name].double()) < 4e-3 for name in ("hidden", "weight"))


def test_chunks_do_not_change_the_result(monkeypatch):
    case = draw(1000, 256, 256, 50_257)
    want, whole = exact(case, beta=0.5), run(case, AUTO_16, beta=0.5)
    monkeypatch.setattr(fast, "CHUNK", 150)
    got = run(case, AUTO_16, beta=0.5)
    assert (got["divergence"] - whole["divergence"]).abs().max() < 1e-5
    for name in ("hidden", "weight"):
        assert error(got[name], want[name]) <= 1.05 * error(whole[name], want[name]) + 1e-4, name


def test_one_chunk_beyond_2_to_31(monkeypatch):
    """2.5e9 logits: offsets of the last tokens exceed 32 bits."""
    monkeypatch.setattr(fast, "CHUNK", 16_384)
    case = draw(16_384, 128, 64, VOCAB)
    got = run(case, AUTO_16, beta=0.5, needs=("hidden",))
    few = case._replace(
        hidden=case.hidden[-64:], teacher_hidden=case.teacher_hidden[-64:], token_weight=case.token_weight[-64:]
    )
    want = exact(few, beta=0.5)
    assert (got["divergence"][-64:] - want["divergence"]).abs().max() < 3e-5
    assert error(got["hidden"][-64:], want["hidden"]) < 4e-3


def test_two_runs_give_the_same_bits():
    case = draw(3000, 512, 512, 50_257)
    first, second = (run(case, AUTO_16, beta=0.5) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen head"])
def test_memory(frozen):
    """Two chunks of fp32 logits and the fp32 sum of d weight; all logits of both heads would take 18.5 GiB."""
    n, d = 16_384, 1024
    case = draw(n, d, 2048, VOCAB)
    leaves = [case.hidden.requires_grad_()] + ([] if frozen else [case.head.weight.requires_grad_()])
    run(draw(64, d, 2048, 5000), AUTO_16, beta=0.5)  # cuBLAS allocates its workspace once
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = linear_kl_loss(*case[:4], beta=0.5, token_weight=case.token_weight)
    gradients = torch.autograd.grad(out.loss, leaves)
    peak = torch.cuda.max_memory_allocated() - before - sum(x.untyped_storage().nbytes() for x in gradients)
    buffers, sums = 2 * fast.CHUNK * VOCAB * 4, 0 if frozen else VOCAB * d * 4
    assert peak <= 1.05 * (buffers + sums), f"{peak / GIB:.2f} GiB, expected {(buffers + sums) / GIB:.2f}"
    assert peak < 0.2 * 2 * n * VOCAB * 4


def test_auto_uses_torch_for_unsupported_inputs():
    case = make(5, 100, path=AUTO_64)
    got = run(case, AUTO_64, beta=0.5)
    assert got["divergence"].dtype == torch.float64
    with pytest.raises(ValueError, match="impl=triton: hidden torch.float64:"):
        run(case, AUTO_64._replace(impl="triton"), beta=0.5)
    assert set(NAMES) <= got.keys()
