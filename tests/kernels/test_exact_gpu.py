"""Layers with a fixed order of sums on a GPU: bits, errors and gradients, and a sampler with the trainer's bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from kernels import exact
from kernels.attention import block_mask
from rollout.engine import Request, Sampling
from rollout.engines.local import LocalEngine
from tests.entry import ROOT
from tests.kernels.decode_problems import error
from tests.kernels.layouts import lay_out
from tests.kernels.test_exact import check_attention, check_linear, draw
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.load import load_policy, make_policy_exact
from trainer.policy.logps import logps_in_training

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 31, 64, 65, 128, 129, 512, 1000, 4096, 8192)  # all tiles of linear_tile
SIZES = [(1024, 2048), (1024, 1024), (1024, 3072), (3072, 1024), (2048, 1024), (136, 70), (896, 4864)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_linear_has_the_same_bits_for_1_to_8192_rows(sizes):
    check_linear(exact.exact_linear, torch.bfloat16, sizes, counts=COUNTS, device="cuda")


def test_linear_is_as_accurate_as_cublas():
    x, weight = (draw(*shape, seed=i, dtype=torch.bfloat16, device="cuda") for i, shape in enumerate([(777, 1024)] * 2))
    want = x.double() @ weight.double().T
    assert error(exact.exact_linear(x, weight), want) < 1.05 * error(x @ weight.T, want)


def test_gradients_of_a_linear_layer_are_those_of_torch():
    inputs = [
        draw(*shape, seed=i, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for i, shape in enumerate([(3, 70, 128), (96, 128), (96,)])
    ]
    grad = draw(3, 70, 96, seed=3, dtype=torch.bfloat16, device="cuda")
    got = torch.autograd.grad(exact.exact_linear(*inputs), inputs, grad)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    want = torch.autograd.grad(torch.nn.functional.linear(*wide), wide, grad.double())
    assert all(error(a, b) < 4e-3 for a, b in zip(got, want, strict=True))


LONG = [[(300, [5, 130, 64]), (3, [2])], [(1, [400]), (63, [1, 65])]]


@pytest.mark.parametrize("heads", [(16, 8, 128), (14, 2, 64), (9, 3, 64), (4, 4, 32), (6, 1, 80)], ids=str)
def test_attention_has_the_same_bits_packed_in_prefill_and_in_decode(heads):
    check_attention(exact.attend_in_order, heads, torch.bfloat16, documents=LONG, device="cuda")


def test_gradients_of_attention():
    layout = lay_out(LONG, multiple=128)
    spans = tuple(x.cuda() for x in layout.spans)
    rows, width = spans[0].shape
    inputs = [
        draw(rows, num, width, 64, seed=i, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for i, num in enumerate((4, 2, 2))
    ]
    grad = draw(rows, 4, width, 64, seed=3, dtype=torch.bfloat16, device="cuda")
    out = exact.exact_attention(*inputs, block_mask(spans, width), scale=0.125)
    got = torch.autograd.grad(out, inputs, grad)
    mask = exact.dense_mask(spans, width)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    want = torch.autograd.grad(exact.dense_attend(*wide, mask, scale=0.125), wide, grad.double())
    assert all(error(a, b) < 1e-2 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("trained_dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_have_the_same_bits(trained_dtype, tmp_path):
    """Also after a step: casts and CUDA graphs follow the weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=275, hidden_size=256, intermediate_size=640, num_hidden_layers=3, num_attention_heads=8, head_dim=64,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=2, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "trainer" / "tiny").save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path), trained_dtype=trained_dtype)
    policy = load_policy(model, LoraConfig(), torch.device("cuda"), with_reference=False)
    make_policy_exact(policy)
    exact_logps = partial(logps_in_training, policy)
    engine = LocalEngine(
        policy.model, policy.tokenizer, autocast_dtype=policy.autocast_dtype, exact_logps=exact_logps, max_batch_size=48
    )
    lengths = [1, 63, 64, 65, 200, 700]
    requests = [Request(prompt_ids=[3 + i % 197 for i in range(n)], seed=seed) for n in lengths for seed in range(12)]
    for version in range(3):
        completions = engine.generate(requests, Sampling(max_tokens=90))
        want = logps_in_training(policy, [(c.prompt_ids, c.ids) for c in completions])
        got = [c.logps for c in completions]
        different = sum(a != b for row, other in zip(got, want, strict=True) for a, b in zip(row, other, strict=True))
        assert different == 0, f"version {version}: {different} of {sum(map(len, want))} log-probs differ"
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        engine.load(version + 1)
