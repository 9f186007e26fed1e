"""linear_logprob on a GPU at real sizes: error against float64 and against plain torch, memory, compilation."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import kernels.linear_logprob as fast
from tests.kernels import heads
from tests.kernels.head_autograd import AROUND
from tests.kernels.head_checks import CHECKS
from tests.kernels.head_numerics import NUMERICS
from tests.kernels.heads import ENTRIES, Case, Path

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
AUTO_16 = Path("auto", torch.bfloat16, 3e-5, 1e-2, DEVICE)
TRITON_32 = Path("triton", torch.float32, 1e-5, 1e-5, DEVICE)
TORCH_64 = Path("torch", torch.float64, 1e-10, 1e-10, DEVICE)
GIB = 1 << 30

VOCABS = (1000, 50257, 128256, 129920, 151669, 151936, 152064, 262144)
WIDTHS = (64, 1536, 2048)
TOKENS = (1, 127, 128, 129, 1000)


@pytest.fixture(autouse=True)
def recomputed(monkeypatch, request) -> Iterator[list[int]]:
    yield heads.count_recomputed(monkeypatch, request)
    torch.cuda.empty_cache()


@pytest.fixture
def nan_in_unwritten_memory():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Deterministic behavior was enabled")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


def draw(n: int, d: int, v: int, *, peaked: bool = False, bias: bool = False) -> Case:
    """Build a case with logits of deviation 1 and random targets; peaked: deviation 3 and likely targets."""
    options = {"generator": torch.Generator(DEVICE).manual_seed(n + d + v), "device": DEVICE}
    weight = torch.randn(v, d, **options).mul_(d**-0.5).bfloat16()
    target = torch.randint(v, (n,), **options)
    hidden = torch.randn(n, d, **options)
    if peaked:  # the logsumexp of the noise is log V + 4.5; the target is about 6 above
        hidden = 3 * hidden + (math.log(v) + 10.5) * weight[target].float()
    b = torch.randn(v, **options).bfloat16() if bias else None
    return Case(hidden.bfloat16(), weight, b, target, torch.randn(2, n, **options))


def exact(case: Case) -> tuple[Tensor, Tensor]:  # (N,) log-probs, (N, V) gradient of sum(c[0] * logp) for the logits
    """Compute in float64, without bias and options, which the small tests cover."""
    z = case.hidden.double() @ case.weight.double().T
    logp = z.gather(1, case.target.unsqueeze(1)).squeeze(1) - z.logsumexp(dim=1)
    dz = z.softmax(dim=1).mul_(-case.c[0].double().unsqueeze(1))
    dz.scatter_add_(1, case.target.unsqueeze(1), case.c[0].double().unsqueeze(1))
    return logp, dz


def plain_torch(case: Case) -> dict[str, Tensor]:
    """Run plain torch with bfloat16 products, a float32 softmax and stored logits."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    logp = (hidden @ weight.T).float().log_softmax(dim=-1).gather(1, case.target.unsqueeze(1)).squeeze(1)
    gradients = torch.autograd.grad((case.c[0] * logp).sum(), (hidden, weight))
    return dict(zip(("hidden", "weight"), gradients, strict=True))


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@contextmanager
def peak_memory(limit_gib: float) -> Iterator[Callable[[Tensor], None]]:
    """Fail if the peak exceeds the limit, not counting tensors passed to the yielded function."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, results = torch.cuda.memory_allocated(), []
    yield lambda *tensors: results.extend(x.untyped_storage().nbytes() for x in tensors)
    peak = (torch.cuda.max_memory_allocated() - before - sum(results)) / GIB
    assert peak <= limit_gib, f"peak {peak:.3f} GiB, limit {limit_gib}"


# Real sizes


@pytest.mark.parametrize("peaked", [False, True], ids=["random", "peaked"])
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("v", VOCABS)
def test_grid(v, d, peaked):
    """Log-probs are within 3e-5 and bit-identical everywhere; gradients are as close to float64 as plain torch's."""
    full = draw(max(TOKENS), d, v, peaked=peaked)
    want_logp, dz = exact(full)
    want_hidden = dz @ full.weight.double()
    logp = heads.token_logps(full, AUTO_16, entropy=False).logp
    assert (logp - want_logp).abs().max().item() <= 3e-5
    for n in TOKENS if v > 1000 else TOKENS[-1:]:  # with fewer tiles than processors, each tile count recompiles
        case = full.select(slice(0, n))
        want = {"hidden": want_hidden[:n], "weight": dz[:n].T @ case.hidden.double()}
        torch_error = {name: error(x, want[name]) for name, x in plain_torch(case).items()}
        assert torch.equal(heads.token_logps(case, AUTO_16, entropy=False).logp, logp[:n])
        for entry, run in ENTRIES.items():
            got = run(case, AUTO_16, loss="logp", entropy=False)
            assert torch.equal(got["logp"], logp[:n]), f"{entry}, N={n}"
            for name in want:
                got_error = error(got.pop(name), want[name])
                # The error of one token is nearly a single rounding of the target entry: plain torch may be lucky.
                limit = torch_error[name] * (1.05 if n > 1 else 1.5)
                assert got_error <= limit, f"{entry}, N={n}, {name}: {got_error:.2e}, torch {torch_error[name]:.2e}"


def test_many_tokens():
    """N beyond 65,536 and N V beyond 2^31, in 18 chunks."""
    case = draw(70_000, 128, 32_000, peaked=True)
    assert case.hidden.shape[0] * case.weight.shape[0] > 1 << 31
    results = {name: run(case, AUTO_16, loss="logp") for name, run in ENTRIES.items()}
    logp = heads.token_logps(case, AUTO_16).logp
    want_weight = torch.zeros(32_000, 128, dtype=torch.float64, device=DEVICE)
    worst = {name: 0.0 for name in results}
    for index in torch.arange(70_000, device=DEVICE).split(7_000):
        part = case.select(index)
        want_logp, dz = exact(part)
        assert (logp[index] - want_logp).abs().max().item() <= 3e-5
        want_weight += dz.T @ part.hidden.double()
        want_hidden = dz @ part.weight.double()
        worst = {name: max(worst[name], error(got["hidden"][index], want_hidden)) for name, got in results.items()}
    for name, got in results.items():
        assert torch.equal(got["logp"], logp), name
        assert worst[name] < 4e-3 and error(got["weight"], want_weight) < 4e-3, name


@pytest.mark.parametrize("active", ["all", "last"])
def test_one_chunk_beyond_2_to_31(active):
    """16,384 tokens of a wide model are one chunk: 2.5e9 exponentials, so offsets exceed 32 bits."""
    case = draw(16_384, 8192, 151_936)
    if active == "last":
        case.c[:, :-64] = 0
    few = case.select(slice(-64, None))
    want_logp, dz = exact(few)
    got = heads.one_pass(case, AUTO_16, loss="logp", entropy=False)
    assert (got["logp"][-64:] - want_logp).abs().max().item() <= 3e-5
    assert error(got["hidden"][-64:], dz @ few.weight.double()) < 4e-3
    if active == "last":  # moved to the front
        assert (got["hidden"][:-64] == 0).all()
        want_weight = (dz.float().T @ few.hidden.float()).double()
        assert error(got["weight"], want_weight) < 4e-3


# Small sizes, all options


@pytest.mark.parametrize("check", CHECKS | AROUND)
def test_check(check, nan_in_unwritten_memory):
    (CHECKS | AROUND)[check](AUTO_16)


@pytest.mark.parametrize("check", NUMERICS)
def test_numerics(check):
    NUMERICS[check](AUTO_16)


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("path", [AUTO_16, TRITON_32], ids=["bfloat16", "float32"])
def test_options(path, options, nan_in_unwritten_memory):
    heads.check(heads.make(131, 72, 331, path=path), path, **heads.OPTIONS[options])


def test_float64_with_impl_torch():
    for check in (AROUND["scaled_loss"], CHECKS["frozen_parts"], CHECKS["ignored_tokens"]):
        check(TORCH_64)


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_chunks_do_not_change_the_result(monkeypatch, entropy):
    """One chunk rounds the weight gradient twice; several chunks sum it in float32."""
    from kernels import linear_logprob_triton

    case = draw(1000, 64, 50257, peaked=True)
    case.c[:, 600:800] = 0
    loss = "both" if entropy else "logp"
    whole = heads.one_pass(case, AUTO_16, loss=loss, entropy=entropy)
    for name, value in (("CHUNK", 150), ("PART", 70), ("SLICE", 1000 * 5000)):
        monkeypatch.setattr(linear_logprob_triton, name, value)
    want = heads.truth(case, loss=loss)
    for name, run in ENTRIES.items():
        got = run(case, AUTO_16, loss=loss, entropy=entropy)
        assert torch.equal(got["logp"], whole["logp"]), name
        for key in ("hidden", "weight"):
            limit = 1.05 * error(whole[key], want[key]) + 1e-4
            assert error(got[key], want[key]) <= limit, f"{name}, {key}"


@pytest.mark.parametrize("entry", ENTRIES)
def test_half_the_tokens_without_a_gradient(entry):
    case = draw(1000, 1536, 50257)
    case.c[:, ::2] = 0
    full = ENTRIES[entry](draw(1000, 1536, 50257), AUTO_16, loss="logp")
    with heads.counted_tokens(AUTO_16) as counts:
        got = ENTRIES[entry](case, AUTO_16, loss="logp")
    assert counts == ([500] if entry == "one pass" else [])
    assert (got["hidden"][::2] == 0).all() and torch.equal(got["logp"], full["logp"])
    _, dz = exact(case)
    assert error(got["hidden"], dz @ case.weight.double()) < 4e-3
    assert error(got["weight"], dz.T @ case.hidden.double()) < 4e-3


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("loss", ["logp", "both"])
def test_unlikely_targets(recomputed, loss, entry):
    case = draw(300, 64, 50257)
    lift = torch.zeros(300, device=DEVICE)
    lift[::10] = -torch.linspace(80, 300, 30, device=DEVICE)
    case = heads.lifted(case, lift)
    want = heads.truth(case, loss=loss)
    got = ENTRIES[entry](case, AUTO_16, loss=loss)
    assert sum(recomputed) == (want["logp"] < -99 * math.log(2)).sum() > 20
    heads.is_close(got["logp"], want["logp"], 1e-6, absolute=1e-4)
    heads.is_close(got["entropy"], want["entropy"], 1e-4, absolute=1e-4)
    for name in ("hidden", "weight"):
        limit = 4e-3 if loss == "logp" else 3e-2  # the log of a rounded probability matters if the entropy is small
        assert error(got[name], want[name]) < limit, name


@pytest.mark.parametrize("entry", ENTRIES)
def test_two_runs_give_the_same_bits(entry):
    """Targets repeat, so the order of additions to a vocabulary row matters."""
    case = draw(1000, 2048, 151_936, bias=True)
    case.target[::3] = 7
    first, second = (ENTRIES[entry](case, AUTO_16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_concurrent_threads():
    """Each thread has its own stream, as when reference log-probs are computed during the policy's pass."""
    case = draw(500, 64, 50257)
    want = {name: run(case, AUTO_16, loss="logp") for name, run in ENTRIES.items()}
    results: dict[str, dict[str, Tensor]] = {}

    def work(name: str) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                results[name] = ENTRIES[name](case, AUTO_16, loss="logp")
        stream.synchronize()

    workers = [threading.Thread(target=work, args=(name,)) for name in ENTRIES]
    torch.cuda.synchronize()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for name in ENTRIES:
        assert all(torch.equal(results[name][key], want[name][key]) for key in ("logp", "hidden", "weight")), name


# Choice of implementation


def test_auto_uses_torch_for_unsupported_inputs():
    case = draw(5, 64, 1000)

    def head_class(hidden: Tensor, weight: Tensor) -> type:
        return fast._pick(hidden, weight, None, case.target, 1.0, None, 1.0, "auto")

    assert head_class(case.hidden, case.weight) is not fast.TorchHead
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert head_class(case.hidden.to(dtype), case.weight.to(dtype)) is fast.TorchHead
    assert head_class(case.hidden[:, :12], case.weight[:, :12]) is fast.TorchHead
    narrow = case._replace(hidden=case.hidden[:, :12], weight=case.weight[:, :12])
    with pytest.raises(ValueError, match=r"impl=triton: width 12: .*; use impl=torch"):
        heads.general(narrow, AUTO_16._replace(impl="triton"))


def test_unchecked_target_outside_the_vocabulary_is_nan():
    case = draw(5, 64, 1000)
    want = heads.token_logps(case, AUTO_16).logp
    case.target[3] = 1 << 40
    logp = heads.token_logps(case, AUTO_16, ignore_index=None).logp
    assert logp[3].isnan() and torch.equal(logp[[0, 1, 2, 4]], want[[0, 1, 2, 4]])


# Memory


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_forward_stores_no_logits(entropy):
    case = draw(8192, 1536, 151_936)
    case.hidden.requires_grad_()
    with peak_memory(0.1):  # the logits would take 2.3 GiB
        heads.token_logps(case, AUTO_16, entropy=entropy)


@pytest.mark.parametrize(("d", "v", "limit"), [(2048, 151_936, 1.75), (4096, 128_256, 2.0)])
def test_memory_of_a_loss_in_one_pass(d, v, limit):
    """Not counting the inputs and the returned gradients."""
    case = draw(8192, d, v)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    torch.mm(case.hidden[:64].detach(), case.hidden[:64].detach().T)  # cuBLAS allocates its workspace once

    def loss_fn(tokens: fast.TokenLogps, index: Tensor):
        return (case.c[0, index] * tokens.logp).sum(), None

    with peak_memory(limit) as returns:
        loss, _ = fast.linear_logprob_loss(hidden, weight, case.target, loss_fn, entropy=False)
        returns(*torch.autograd.grad(loss, (hidden, weight)))


# Compilation


class Model(nn.Module):
    def __init__(self, d: int, v: int) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(d, d), nn.Linear(d, v, bias=False)

    def forward(self, x: Tensor, target: Tensor, temperature: float) -> Tensor:
        hidden = torch.nn.functional.gelu(self.mix(x))
        logp, entropy = fast.linear_logprob(hidden, self.head.weight, target, temperature=temperature)
        policy, _ = fast.linear_logprob_loss(
            hidden, self.head.weight, target, lambda tokens, index: (tokens.logp.sum(), None), temperature=temperature
        )
        return logp.sum() + 0.1 * entropy.sum() + policy


def test_compiled_model_does_not_recompile(monkeypatch):
    """Neither graphs nor kernels recompile for new temperatures and token counts; results match the eager model."""
    import triton
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(64, 50257).to(DEVICE, torch.bfloat16)
    compiled, builds = torch.compile(model), []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: builds.append(kwargs["fn"]))

    def step(run: nn.Module, n: int, temperature: float) -> list[Tensor]:
        x = torch.randn(n, 64, generator=torch.Generator(DEVICE).manual_seed(n), device=DEVICE, dtype=torch.bfloat16)
        loss = run(x, torch.arange(n, device=DEVICE) * 7, temperature)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    for n, temperature in ((301, 1.0), (303, 0.7), (302, 0.8)):  # a value is a constant until it changes
        step(compiled, n, temperature)
    graphs = counters["stats"]["unique_graphs"]
    builds.clear()
    for n, temperature in ((301, 0.9), (305, 1.1), (309, 1.3), (311, 2.0)):
        got, want = step(compiled, n, temperature), step(model, n, temperature)
        for a, b in zip(got, want, strict=True):
            assert error(a, b.double()) < 2e-2  # bfloat16 hidden states are rounded at different points
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert not [fn.name for fn in builds if fn.module == "kernels.linear_logprob_triton"]
