"""linear_kl with impl=torch against float64 loops, finite differences, TRL and values by hand."""

from __future__ import annotations

import math

import pytest
import torch

import kernels.linear_kl as fast
from kernels import reference
from kernels.linear_kl import Head, linear_kl_loss
from losses.distill import generalized_jsd
from tests.kernels import kl_cases
from tests.kernels.kl_cases import BETAS, NAMES, TORCH_16, TORCH_32, TORCH_64, check, make, run, truth

PATHS = {"float64": TORCH_64, "float32": TORCH_32, "bfloat16": TORCH_16}
OPTIONS = {  # student head, teacher head, call
    "plain": ({}, {}, {}),
    "temperature": ({}, {}, {"temperature": 0.6}),
    "scale": ({"scale": 0.25}, {"scale": 1.5}, {}),
    "softcap": ({"softcap": 3.0}, {}, {}),
    "all": ({"scale": 1.5, "softcap": 4.0}, {"scale": 0.7, "softcap": 2.0}, {"temperature": 1.7}),
}


# Values and gradients


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", PATHS)
@pytest.mark.parametrize(("n", "v"), [(1, 37), (7, 1000), (130, 37), (7, 4097)])
def test_matches_a_loop_over_the_full_softmax(n, v, dtype, beta):
    check(make(n, v, path=PATHS[dtype], bias=v != 1000), PATHS[dtype], beta=beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_both_heads(options, beta):
    head, teacher, call = OPTIONS[options]
    for path in (TORCH_64, TORCH_32, TORCH_16):
        check(make(7, 101, path=path, head=head, teacher=teacher), path, beta=beta, **call)


@pytest.mark.parametrize("beta", BETAS)
def test_matches_the_slow_reference_and_the_loss_of_logits(beta):
    head, teacher, call = OPTIONS["all"]
    case = make(9, 53, path=TORCH_64, head=head, teacher=teacher)
    got = run(case, TORCH_64, beta=beta, **call)["divergence"]
    want = reference.linear_kl(*case[:4], beta=beta, **call)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    logits = [reference._logits(x, *own, 1.0) for x, own in (case[:2], case[2:4])]
    torch.testing.assert_close(generalized_jsd(*logits, beta=beta, **call), want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_gradient_matches_finite_differences(beta):
    """Central differences of every entry; gradcheck would call backward twice."""
    case = make(3, 11, d=4, e=5, path=TORCH_64, head={"softcap": 3.0})
    gradients = run(case, TORCH_64, beta=beta, temperature=0.8)
    step = 1e-5
    for name, x in case.leaves().items():
        for place in range(x.numel()):
            ends = []
            for sign in (step, -step):
                moved = x.detach().clone()
                moved.view(-1)[place] += sign
                ends.append(
                    run(case.with_leaves({name: moved}), TORCH_64, beta=beta, temperature=0.8, needs=())["loss"]
                )
            slope = (ends[0] - ends[1]).item() / (2 * step)
            assert slope == pytest.approx(gradients[name].view(-1)[place].item(), rel=1e-6, abs=1e-8), (name, place)


def test_values_by_hand():
    """q = (1/4, 3/4), p = (3/4, 1/4): KL is log(3) / 2 either way, and m = (1/2, 1/2) at beta 1/2."""
    logits = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)
    case = kl_cases.table(logits, logits.flip(1), TORCH_64)
    jsd = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    for beta, want in ((0, math.log(3) / 2), (1, math.log(3) / 2), (0.5, jsd)):
        assert run(case, TORCH_64, beta=beta)["divergence"].item() == pytest.approx(want, abs=1e-12)


# TRL 1.16.0: GKDTrainer.generalized_jsd_loss on these logits with reduction="none", summed over the vocabulary; its
# gradient by autograd. Student and teacher of two tokens over five ids.
STUDENT = [[4.5, -1.0, -6.5, 1.75, -3.25], [-4.25, 1.25, 2.5, -2.25, -1.25]]
TEACHER = [[-1.75, 0.5, -2.5, 3.25, -3.25], [0.25, -1.75, 1.0, -2.75, -4.5]]
TRL = {  # (beta, temperature): divergences, gradients
    (0, 1.0): (
        [2.700314489, 1.591746343],
        [
            [0.929658849, -0.0556234, -0.002944126, -0.870096375, -0.000994948],
            [-0.301157035, 0.176197326, 0.118237148, -0.00848281, 0.015205371],
        ],
    ),
    (0.1, 0.7): (
        [0.274458195, 0.067532657],
        [
            [0.046944138, -0.000905461, -9.95e-07, -0.046028456, -9.227e-06],
            [-0.000436724, 0.012634658, -0.012254606, -0.000315752, 0.000372423],
        ],
    ),
    (0.5, 1.0): (
        [0.553637366, 0.141514216],
        [
            [0.083706149, -0.005011361, -3.9574e-05, -0.078390876, -0.000264339],
            [-0.002358342, 0.037333452, -0.036143136, -0.002214394, 0.003382419],
        ],
    ),
    (0.9, 1.0): (
        [0.265402805, 0.046050564],
        [
            [0.029269632, -0.001750538, -1.1052e-05, -0.027383024, -0.000125018],
            [-0.000544745, 0.019451223, -0.019991645, -0.000778399, 0.001863566],
        ],
    ),
    (1, 0.7): (
        [6.925746681, 0.467124012],
        [
            [0.30508518, -0.005882059, -3.025e-06, -0.299010397, -0.000189699],
            [-0.000701848, 0.373212572, -0.382656357, -0.002397, 0.012542634],
        ],
    ),
}


@pytest.mark.parametrize(("beta", "temperature"), TRL)
def test_values_and_gradients_match_trl(beta, temperature):
    """The hidden states are a unit matrix, so the gradient of the weight is the gradient of the logits."""
    values, gradients = TRL[beta, temperature]
    case = kl_cases.table(torch.tensor(STUDENT), torch.tensor(TEACHER), TORCH_64)
    got = run(case, TORCH_64, beta=beta, temperature=temperature)
    torch.testing.assert_close(got["divergence"], torch.tensor(values, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(got["weight"].T, torch.tensor(gradients, dtype=torch.float64), atol=1e-9, rtol=0)


# Identical teacher, extremes, zero probabilities


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", PATHS)
def test_identical_teacher_gives_zero_divergence_and_gradient(dtype, beta):
    path = PATHS[dtype]
    got = run(kl_cases.same_head(make(7, 101, path=path, head={"softcap": 3.0})), path, beta=beta)
    assert all((x == 0).all() for x in got.values())


@pytest.mark.parametrize("beta", BETAS)
def test_gradient_is_accurate_for_a_similar_teacher(beta):
    """Logits differ by 1e-3: the divergence is about 1e-7, and its gradient is still accurate to a percent."""
    case = make(7, 101, path=TORCH_32, bias=False)
    case = kl_cases.same_head(case)
    case = case._replace(teacher_hidden=case.hidden * (1 + 5e-4))
    got, want = run(case, TORCH_32, beta=beta), truth(case, beta=beta)
    for name in ("hidden", "weight"):
        assert (got[name].double() - want[name]).norm() < 1e-2 * want[name].norm(), name


@pytest.mark.parametrize("beta", BETAS)
def test_extreme_logits_stay_finite(beta):
    """Each distribution underflows where the other has all of the mass."""
    logits = torch.tensor([[2000.0, 0.0, -2000.0, 5.0], [0.0, 0.0, 0.0, 0.0], [-90.0, 90.0, 0.0, 1.0]])
    case = kl_cases.table(logits, logits.flip(1), TORCH_32)
    got = run(case, TORCH_32, beta=beta)
    assert all(x.isfinite().all() for x in got.values()) and (got["divergence"] >= 0).all()
    if beta == 0.5:
        assert got["divergence"][0].item() == pytest.approx(math.log(2))
    if beta in (0, 1):
        assert got["divergence"][0].item() == pytest.approx(1995)


@pytest.mark.parametrize("beta", BETAS)
def test_ids_masked_in_both_heads_have_no_effect(beta):
    case = make(7, 40, path=TORCH_64)
    dead = torch.arange(40) >= 37
    masked = case._replace(
        head=case.head._replace(bias=case.head.bias.masked_fill(dead, -math.inf)),
        teacher_head=case.teacher_head._replace(bias=case.teacher_head.bias.masked_fill(dead, -math.inf)),
    )
    short = case._replace(head=case.head.first(37), teacher_head=case.teacher_head.first(37))
    got, want = run(masked, TORCH_64, beta=beta), run(short, TORCH_64, beta=beta)
    for name in ("loss", "divergence", "hidden"):
        torch.testing.assert_close(got[name], want[name], atol=1e-12, rtol=1e-12, msg=name)
    torch.testing.assert_close(got["weight"][:37], want["weight"], atol=1e-12, rtol=1e-12)
    assert (got["weight"][37:] == 0).all() and (got["bias"][37:] == 0).all()


def test_ids_masked_in_one_head():
    case = make(7, 40, path=TORCH_64)
    dead = torch.arange(40) >= 37
    student = case._replace(head=case.head._replace(bias=case.head.bias.masked_fill(dead, -math.inf)))
    teacher = case._replace(
        teacher_head=case.teacher_head._replace(bias=case.teacher_head.bias.masked_fill(dead, -math.inf))
    )
    for masked, infinite in ((student, 0), (teacher, 1)):
        for beta in BETAS:
            got = run(masked, TORCH_64, beta=beta)
            assert (got["divergence"] == math.inf).all() if beta == infinite else got["divergence"].isfinite().all()
            if beta != infinite:
                assert all(x.isfinite().all() for x in got.values())
                assert beta in (0, 1) or (got["divergence"] <= math.log(2)).all()


@pytest.mark.parametrize("beta", BETAS)
def test_nan_is_not_hidden(beta):
    case = make(7, 40, path=TORCH_32)
    for name in ("hidden", "teacher_hidden"):
        bad = getattr(case, name).clone()
        bad[0, 2] = math.nan
        got = run(case._replace(**{name: bad}), TORCH_32, beta=beta)
        assert got["divergence"][0].isnan() and got["loss"].isnan() and got["divergence"][1:].isfinite().all()
        assert name == "teacher_hidden" or got["hidden"][0].isnan().all()


# Chunks, frozen inputs, autograd


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_chunks_do_not_change_the_result(monkeypatch, size):
    case = make(23, 101, path=TORCH_64)
    whole = run(case, TORCH_64, beta=0.3)
    monkeypatch.setattr(fast, "BLOCK_ELEMENTS", size * 101)
    got = run(case, TORCH_64, beta=0.3)
    kl_cases.assert_same(got, whole, TORCH_64)


def test_no_tokens():
    for path in (TORCH_32, TORCH_16):
        got = run(make(0, 37, path=path), path, beta=0.5)
        assert got["loss"].item() == 0 and got["divergence"].shape == (0,) and got["hidden"].shape == (0, 16)
        assert got["weight"].shape == (37, 16) and not got["weight"].any() and not got["bias"].any()


@pytest.mark.parametrize("needs", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ()], ids=str)
def test_only_requested_gradients_are_computed(needs):
    case = make(7, 37, path=TORCH_64)
    full, got = run(case, TORCH_64, beta=0.5), run(case, TORCH_64, beta=0.5, needs=needs)
    assert got.keys() == {"loss", "divergence", *needs}
    assert all(torch.equal(got[name], full[name]) for name in got)


def test_tokens_with_weight_zero_have_no_effect():
    case = make(7, 37, path=TORCH_64)
    assert case.token_weight[3] == 0
    got = run(case, TORCH_64, beta=0)
    assert (got["hidden"][3] == 0).all() and got["divergence"][3] > 0
    bias = case.head.bias.clone()
    bias[5] = -math.inf  # forward KL is infinite: of a token that counts, it is the loss; of one that does not, nothing
    only = case._replace(head=case.head._replace(bias=bias), token_weight=torch.zeros(7))
    got = run(only, TORCH_64, beta=0)
    assert got["loss"].item() == 0 and (got["divergence"] == math.inf).all()
    assert not any(got[name].any() for name in NAMES)


def test_teacher_and_token_weights_get_no_gradient():
    case = make(7, 37, path=TORCH_64)
    teacher = case.teacher_hidden.requires_grad_(), case.teacher_head.weight.requires_grad_()
    weight = case.token_weight.double().requires_grad_()
    case.hidden.requires_grad_()
    linear_kl_loss(*case[:4], beta=0.5, token_weight=weight).loss.backward()
    assert all(x.grad is None for x in (*teacher, weight)) and case.hidden.grad is not None


def test_backward_scales_and_runs_once():
    case = make(7, 37, path=TORCH_64)
    want = run(case, TORCH_64, beta=0.5)
    leaves = case.leaves()
    loss = linear_kl_loss(*case.with_leaves(leaves)[:4], beta=0.5, token_weight=case.token_weight).loss
    (3 * loss).backward(retain_graph=True)
    for name, x in leaves.items():
        torch.testing.assert_close(x.grad, 3 * want[name], atol=1e-12, rtol=1e-12)
    with pytest.raises(RuntimeError, match="linear_kl_loss: backward.. has already run"):
        loss.backward()


def test_float32_head_of_bfloat16_hidden_states_under_autocast():
    case = make(13, 37, path=TORCH_16)
    want = truth(case, beta=0.5)
    master = case._replace(
        head=case.head._replace(weight=case.head.weight.float(), bias=case.head.bias.float()),
        teacher_hidden=case.teacher_hidden.float(),
        teacher_head=case.teacher_head._replace(weight=case.teacher_head.weight.float()),
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = run(master, TORCH_16, beta=0.5)
    assert [got[name].dtype for name in NAMES] == [torch.bfloat16, torch.float32, torch.float32]
    kl_cases.assert_same(got, want, TORCH_16)


def test_views_of_any_layout():
    case = make(9, 37, path=TORCH_32)
    want = run(case, TORCH_32, beta=0.5)
    strange = case._replace(
        hidden=case.hidden.T.contiguous().T, head=case.head._replace(weight=case.head.weight.T.contiguous().T),
        teacher_hidden=torch.repeat_interleave(case.teacher_hidden, 2, dim=0)[::2],
        token_weight=torch.stack([case.token_weight, case.token_weight], dim=1)[:, 0],
    )  # fmt: skip
    kl_cases.assert_same(run(strange, TORCH_32, beta=0.5), want, TORCH_32)


def test_compiled_model_keeps_it_eager():
    case = make(5, 37, path=TORCH_32)
    compiled = torch.compile(lambda h: linear_kl_loss(h * 1.0, *case[1:4], beta=0.5).loss, backend="eager")
    hidden = case.hidden.clone().requires_grad_()
    compiled(hidden).backward()
    want = run(case._replace(token_weight=None), TORCH_32, beta=0.5)
    torch.testing.assert_close(hidden.grad, want["hidden"])


# Arguments


def test_invalid_arguments_are_rejected():
    case = make(3, 37)
    good = dict(zip(("hidden", "head", "teacher_hidden", "teacher_head"), case[:4], strict=True)) | {"beta": 0.5}
    short = Head(case.teacher_head.weight[:30])
    for changes, message in (
        ({"beta": 1.5}, "beta=1.5:"),
        ({"beta": math.nan}, "beta=nan:"),
        ({"temperature": 0.0}, "temperature=0.0:"),
        ({"impl": "cuda"}, "impl=cuda:"),
        ({"impl": "triton"}, "impl=triton: device cpu:"),
        ({"teacher_head": short}, r"teacher_head.weight: 30 ids, .* 37; .*head.first\(V\)"),
        ({"teacher_hidden": case.teacher_hidden[:2]}, "teacher_hidden: 2 tokens, .* 3;"),
        ({"hidden": case.hidden[:, :3]}, r"hidden \(3, 3\), head.weight \(37, 16\): expected"),
        ({"hidden": case.hidden.half()}, "hidden is float16"),
        ({"head": case.head._replace(bias=case.head.bias[:3])}, r"head.bias \(3,\): expected \(37,\)"),
        ({"teacher_head": case.teacher_head._replace(softcap=-1.0)}, "teacher_head.softcap=-1.0:"),
        ({"token_weight": torch.ones(4)}, r"token_weight \(4,\): expected \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_kl_loss(**(good | changes))
    sliced = linear_kl_loss(**(good | {"head": case.head.first(30), "teacher_head": short}))
    assert sliced.divergence.shape == (3,)
