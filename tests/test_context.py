"""Context parallelism (--parallel.context): slices, runs, rejected settings; test_ranks.py checks gradients."""

from __future__ import annotations

import random

import pytest
import torch

from data.packing import Batch, Item, empty_batch, make_batches
from kernels.attention import dense_mask
from tests.entry import metrics, run_ok
from tests.test_ranks import alike, results_of, two_ok
from trainer.config.blocks import ParallelConfig
from trainer.config.ebft import EbftConfig
from trainer.parallel import context
from trainer.policy import attention


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("dpo", ("--parallel.mode", "fsdp")),
        ("rm", ("--parallel.mode", "replicate", "--lora.r", "4")),
        ("grpo", ("--parallel.mode", "fsdp", "--lora.r", "4", "--beta", "0.05")),
    ],
)
def test_run_matches_one_process(method, flags, tmp_path):
    common = ("--method", method, "--max-steps", "2", "--max-eval-rows", "20")
    alone = [flag for flag in flags if flag not in ("--parallel.mode", "replicate", "fsdp")]
    run_ok(*common, *alone, "--per-device-train-batch-size", "32", "--output-dir", tmp_path / "one", cwd=tmp_path)
    two_ok(
        "trainer", *common, *flags, "--parallel.context", "2", "--per-device-train-batch-size", "16",
        "--output-dir", tmp_path / "two", cwd=tmp_path, timeout=500,
    )  # fmt: skip
    alike(metrics(tmp_path / "two"), metrics(tmp_path / "one"), limit=2e-4)


@pytest.mark.gpu
def test_flex_attention_over_slices_is_as_accurate_as_over_rows(tmp_path):
    (result,) = results_of("tests.ranks.context_gpu", cwd=tmp_path)
    for name in ("logp", "gradient"):
        assert result["two"][name] < 1.2 * result["one"][name] < 0.05, result


def batches() -> list[Batch]:
    rng = random.Random(0)
    items = []
    for prompt, *lengths in ((4, 3, 5, 2), (1, 1), (6, 9, 1)):
        first = [rng.randrange(50) for _ in range(prompt)]
        items += [
            Item(first + [rng.randrange(50) for _ in range(n)], [False] * prompt + [True] * n, prompt) for n in lengths
        ]
    packed = {"max_tokens": 26, "share_prompt": True}
    branches = [[7, 7, *a, *b] for a in ([1, 1], [2, 2, 2]) for b in ([3], [4, 4])]
    forks = [Item(ids, [False, False] + [True] * (len(ids) - 2), 2, episode=0) for ids in branches]
    (tree,) = make_batches(forks, max_tokens=60, share_prompt=True)
    assert len(tree.spans) == 6
    return [*make_batches(items, **packed), *make_batches(items, max_tokens=60, packing=False), empty_batch(), tree]


@pytest.mark.parametrize(("size", "multiple"), [(2, 2), (3, 128), (4, 2)])
def test_slices_cover_a_batch_and_keep_its_masks(size, multiple, monkeypatch):
    monkeypatch.setattr(context, "context_size", lambda: size)
    for batch in batches():
        num_rows, length = batch.input_ids.shape
        whole = dense_mask(batch.spans, length).squeeze(1)
        tokens, covered = [], []
        for rank in range(size):
            monkeypatch.setattr(context, "context_rank", lambda rank=rank: rank)
            part = context.slice_batch(batch, multiple=multiple)
            cut, num_queries = part.batch, part.batch.input_ids.shape[1]
            assert num_queries % multiple == 0 and part.num_keys == size * num_queries
            mask = dense_mask(cut.spans, part.num_keys)
            assert mask.any(dim=-1).all()  # a softmax over nothing would be NaN
            # own_stop is the position after the query, in a row and in a slice
            position = cut.spans[-1] - 1
            covered.append(position)
            for row in range(num_rows):
                real = position[row] < length
                at = position[row][real]
                assert (
                    torch.equal(mask[row, 0, real, :length], whole[row, at]) and not mask[row, 0, real, length:].any()
                )
                assert torch.equal(cut.input_ids[row, real], batch.input_ids[row, at])
                assert torch.equal(cut.position_ids[row, real], batch.position_ids[row, at])
            at = cut.index // num_queries * length + position.flatten()[cut.index]  # positions in the batch
            assert torch.equal(at, batch.index[part.tokens]) and torch.equal(cut.target, batch.target[part.tokens])
            tokens.append(part.tokens)
        assert torch.equal(torch.cat(tokens).sort().values, torch.arange(len(batch.target)))
        everywhere = torch.cat(covered, dim=1).sort(dim=1).values
        assert torch.equal(everywhere, torch.arange(everywhere.shape[1]).expand_as(everywhere))


def test_keys_are_gathered_in_row_order_and_gradients_scattered_back(monkeypatch):
    """Three simulated ranks: keys are gathered to their positions, and each rank gets the gradients of its keys."""
    size, length, row = 3, 12, torch.arange(12.0).view(1, 1, 12, 1)
    monkeypatch.setattr(context, "context_size", lambda: size)
    slices = []
    for rank in range(size):
        monkeypatch.setattr(context, "context_rank", lambda rank=rank: rank)
        (batch,) = make_batches([Item(list(range(length)), [False] + [True] * (length - 1))], max_tokens=length)
        slices.append(row[:, :, context.slice_batch(batch, multiple=2).batch.input_ids[0]])
    monkeypatch.setattr(context, "context_gather", lambda x, name: torch.stack([x.repeat(1, 1, 1, 2) for x in slices]))
    monkeypatch.setattr(context, "context_scatter_sum", lambda x, name: x[1])
    key = slices[1].clone().requires_grad_()
    gathered, _ = context.gather_row(key, key)
    assert torch.equal(gathered, row)
    (gathered * row).sum().backward()
    assert torch.equal(key.grad, slices[1])


def test_unsupported_methods_and_models_are_rejected(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer.config.blocks import DataConfig, ModelConfig

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ParallelConfig(mode="replicate", context=2).context == 2
    with pytest.raises(ValueError, match=r"^parallel\.context=2: "):
        EbftConfig(model=ModelConfig(model="test"), data=DataConfig(data=("x",)), parallel=ParallelConfig(context=2))
    monkeypatch.setattr(attention, "context_size", lambda: 2)
    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for choice, settings, message in (
        ("eager", {"attn_implementation": "eager"}, "LlamaForCausalLM uses eager"),
        ("auto", {"rope_parameters": dynamic}, "the rotary frequencies of LlamaForCausalLM"),
    ):
        with pytest.raises(ValueError, match=rf"^parallel\.context=2: {message}"):
            model = LlamaForCausalLM(LlamaConfig(**sizes, **settings))
            attention.choose_attention(model, choice, torch.device("cpu"))
