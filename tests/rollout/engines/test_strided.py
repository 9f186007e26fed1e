"""Compare strided continuation with one plain forward per anchor, sample and token, and with the training pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from data.strided import Document, StridedBatch, StridedPlan, make_strided
from kernels.attention import TILE, dense_mask
from kernels.decode.draw import draw
from rollout.engines import strided
from rollout.engines.strided import Continued, continue_documents
from trainer.policy import attention
from trainer.policy.attention import attention_masks, span_masks, use_flex

VOCAB = 60
WINDOW = 4  # shorter than the documents below, and than context + generated
COMMON = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2, bos_token_id=None,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "sdpa", {}),
    "llama eager": ("llama", "eager", {}),
    "qwen2": ("qwen2", "sdpa", {**SLIDING, "use_sliding_window": True}),
    "qwen3": ("qwen3", "sdpa", {}),  # norms on queries and keys
    "mistral": ("mistral", "sdpa", {"sliding_window": WINDOW}),  # every layer slides
    "gemma2": (
        "gemma2", "eager",
        {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "granite": ("granite", "sdpa", {"logits_scaling": 0.4, "attention_multiplier": 0.2}),
    "cohere": ("cohere", "sdpa", {"logit_scale": 0.7}),
}  # fmt: skip
GRID = [
    StridedPlan(stride=stride, context_length=context, generate_max_len=generated, n_samples_per_prompt=samples)
    for stride, context, generated, samples in (
        (1, 1, 5, 3), (1, 4, 1, 1), (3, 1, 2, 1), (3, 4, 5, 3), (8, 1, 1, 3), (8, 4, 5, 1)
    )
]  # fmt: skip
LENGTHS = (17, 3, 12)  # the second is too short for most plans; no stride above 1 divides the others' remainder


def make_model(kind: str = "llama") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    name, implementation, settings = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **settings})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def plan(**changes: int) -> StridedPlan:
    sizes = dict(stride=3, context_length=4, generate_max_len=5, n_samples_per_prompt=2)
    return StridedPlan(**{**sizes, **changes})


def documents_of(lengths: tuple[int, ...], seed: int = 1) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    return [Document(torch.randint(VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def row_of(documents: list[Document], sizes: StridedPlan, multiple: int = 1) -> StridedBatch:
    (batch,) = make_strided(documents, sizes, max_tokens=10_000, multiple=multiple)
    return batch


def seeds_of(batch: StridedBatch) -> Tensor:  # (A, n)
    """Seeds that depend on document, anchor and sample, but not on their position in the row."""
    sample_number = torch.arange(batch.place.shape[1])
    return (batch.document * 1000 + batch.anchor).unsqueeze(1) * 100 + sample_number


def continued(model: Any, batch: StridedBatch, temperature: float = 0.6, **options: Any) -> Continued:
    masks = partial(span_masks, model.config)
    return continue_documents(model, batch, masks, seeds=seeds_of(batch), temperature=temperature, **options)


@torch.no_grad()
def one_by_one(model: Any, documents: list[Document], batch: StridedBatch, temperature: float = 0.6) -> Continued:
    """Sample every anchor as separate causal sequences, with a full forward per token."""
    ids, logps = torch.zeros_like(batch.place), torch.zeros(batch.place.shape)
    seeds = seeds_of(batch)
    for a, (number, seen) in enumerate(zip(batch.document.tolist(), batch.anchor.tolist(), strict=True)):
        sequence = torch.tensor(documents[number].ids[:seen]).expand(ids.shape[1], -1)  # (n, c)
        for step in range(ids.shape[2]):
            logits = model(input_ids=sequence, use_cache=False).logits[:, -1]
            heat, count = torch.full((len(sequence),), temperature), torch.full((len(sequence),), step)
            ids[a, :, step], logps[a, :, step] = draw(logits, seeds[a], count, heat)
            sequence = torch.cat([sequence, ids[a, :, step : step + 1]], dim=1)
    return Continued(ids, logps)


@torch.no_grad()
def as_trained(model: Any, batch: StridedBatch, ids: Tensor, temperature: float = 0.6) -> Tensor:  # (A, n, G)
    """Return log-probs from one training pass over the row."""
    batch = batch.with_generated(ids)
    logits = model(
        input_ids=batch.input_ids, attention_mask=attention_masks(model.config, batch),
        position_ids=batch.position_ids, use_cache=False,
    ).logits[0, batch.predictor]  # (A, n, G, V)  # fmt: skip
    logps = (logits.float() / temperature).log_softmax(dim=-1)
    return logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def assert_near(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0.0)


def assert_same(actual: Continued, expected: Continued) -> None:
    assert torch.equal(actual.ids, expected.ids)
    assert_near(actual.logps, expected.logps)


@pytest.mark.parametrize("sizes", GRID, ids=lambda x: "-".join(map(str, vars(x).values())))
def test_every_sample_matches_its_anchor_sampled_alone(sizes):
    model, documents = make_model(), documents_of(LENGTHS)
    batch = row_of(documents, sizes)
    sampled = continued(model, batch)
    assert sampled.ids.shape == batch.place.shape and sampled.logps.dtype == torch.float32 and len(batch.anchor) > 1
    assert_same(sampled, one_by_one(model, documents, batch))
    assert_near(sampled.logps, as_trained(model, batch, sampled.ids))


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_matches_its_plain_forward(kind):
    model, documents = make_model(kind), documents_of(LENGTHS)
    batch = row_of(documents, plan())
    sampled = continued(model, batch, 1.0)
    assert_same(sampled, one_by_one(model, documents, batch, 1.0))
    assert_near(sampled.logps, as_trained(model, batch, sampled.ids, 1.0))
    assert sampled.logps.std() > 0.1 and len(sampled.ids.unique()) > 10


def test_float64_weights_give_the_float64_log_probs():
    model, documents = make_model("qwen3").double(), documents_of(LENGTHS)
    batch = row_of(documents, plan())
    sampled = continued(model, batch)
    expected = one_by_one(model, documents, batch)
    assert torch.equal(sampled.ids, expected.ids) and (sampled.logps - expected.logps).abs().max() < 1e-6


def test_a_document_is_continued_identically_alone_and_in_a_row():
    model, documents = make_model("qwen2"), documents_of((11, 3, 20, 9))
    together = row_of(documents, plan(), multiple=64)
    sampled, stop = continued(model, together), 0
    for number, document in enumerate(documents):
        alone = row_of([document], plan())
        alone.document.fill_(number)  # determines its seeds
        start, stop = stop, stop + len(alone.anchor)
        assert_same(continued(model, alone), Continued(sampled.ids[start:stop], sampled.logps[start:stop]))
    assert stop == len(together.anchor) == 6


def test_samples_of_an_anchor_differ_and_follow_their_seeds():
    model = make_model()
    batch = row_of(documents_of((17,)), plan(n_samples_per_prompt=4))
    sampled = continued(model, batch, 1.0)
    assert all(len(samples.unique(dim=0)) == 4 for samples in sampled.ids)
    masks = partial(span_masks, model.config)
    turned = continue_documents(model, batch, masks, seeds=seeds_of(batch).flip(1), temperature=1.0)
    assert_same(turned, Continued(sampled.ids.flip(1), sampled.logps.flip(1)))


def test_greedy_continuation_reproduces_a_greedy_document_and_its_log_probs():
    """The model wrote the document greedily, so every anchor after its beginning continues it exactly."""
    model, ids = make_model(), documents_of((4,))[0].ids
    with torch.no_grad():
        for _ in range(14):
            ids = [*ids, model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()]
        logps = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)  # tokens 1, 2, ...
    batch = row_of([Document(ids)], plan(stride=2))
    sampled = continued(model, batch, 0.0)
    target = batch.target_place.unsqueeze(1).expand(batch.place.shape)  # one document at the start of the row
    tokens = torch.tensor(ids)
    assert torch.equal(sampled.ids, tokens[target]) and len(batch.anchor) == 5
    expected = logps[torch.arange(len(ids) - 1), tokens[1:]][target - 1]
    assert_near(sampled.logps, expected)
    assert_near(as_trained(model, batch, sampled.ids, 1.0), expected)


def test_adapters_are_applied_and_training_modes_are_restored():
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(make_model("qwen3"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5))
    torch.manual_seed(3)
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model = wrapped.get_base_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    documents = documents_of(LENGTHS)
    batch = row_of(documents, plan())
    expected = one_by_one(wrapped.eval(), documents, batch)
    with wrapped.disable_adapter():
        assert not torch.equal(one_by_one(wrapped, documents, batch).ids, expected.ids)
    wrapped.train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in wrapped.named_modules()}
    sampled = continued(model, batch)
    assert_same(sampled, expected)
    assert {name: module.training for name, module in wrapped.named_modules()} == before
    assert len(set(before.values())) == 2 and not sampled.logps.requires_grad and torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16 instructions
@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # qwen3's norms leave its keys in float32
def test_autocast_stays_close_to_the_training_pass(kind):
    model = make_model(kind)
    batch = row_of(documents_of(LENGTHS), plan())
    sampled = continued(model, batch, 1.0, autocast_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = as_trained(model, batch, sampled.ids, 1.0)
    assert 0 < (sampled.logps - as_trained(model, batch, sampled.ids, 1.0)).abs().max() < 0.2  # it ran in bfloat16
    assert_near(sampled.logps, expected, 0.1)


def test_a_row_without_anchors_does_not_run_the_model():
    model = make_model()
    batch = row_of(documents_of((3, 8)), plan())
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    sampled = continued(model, batch)
    assert sampled.ids.shape == sampled.logps.shape == (0, 2, 5)


def test_each_pass_has_one_query_per_sample():
    model, queries = make_model(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: queries.append(inputs[0].numel()))
    batch = row_of(documents_of(LENGTHS), plan())
    continued(model, batch)
    assert queries == [sum(LENGTHS), *[len(batch.anchor) * 2] * 4]


def test_the_head_runs_in_chunks(monkeypatch):
    model, rows = make_model(), []
    batch = row_of(documents_of(LENGTHS), plan(n_samples_per_prompt=3))
    expected = continued(model, batch)
    monkeypatch.setattr(strided, "LOGITS", 7 * VOCAB)
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: rows.append(out.shape[0]))
    assert_same(continued(model, batch), expected)
    # First 5 anchor states, two per chunk of three samples each; then one state for each of 15 samples.
    assert rows == [2, 2, 1] + [7, 7, 1] * 4


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_padding_to_full_tiles_changes_nothing(kind, monkeypatch):
    """As on CUDA, with a dense version of flex_attend: no query attends to the padding queries."""
    shapes = []

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, scale: float, **_: Any) -> Tensor:
        shapes.append((query.shape[2], key.shape[2]))
        assert tuple(mask.shape) == (1, 1, *shapes[-1])
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        visible = dense_mask(mask.mask_mod.spans, key.shape[2])
        assert visible[0, 0, -1].nonzero().item() >= width  # one position, after the row
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)

    model, documents = make_model(kind), documents_of((40, 3, 60))
    sizes = plan(n_samples_per_prompt=5)
    expected = continued(model, row_of(documents, sizes))
    monkeypatch.setattr(attention, "flex_attend", attend)
    monkeypatch.setattr(strided, "_multiple", lambda device: TILE)
    use_flex(model)
    batch = row_of(documents, sizes, multiple=TILE)
    width = batch.input_ids.shape[1]
    assert_same(continued(model, batch), expected)
    assert len(batch.anchor) == 29 and width == 896
    # 103 document tokens, then 145 samples; the positions after the row are for padding.
    assert shapes == [(128, width + 128)] * 2 + [(256, width + 128)] * 2 * 4
    assert_same(continued(model, row_of(documents, sizes)), expected)  # a row without tile padding


def test_diverged_weights_and_negative_temperatures_are_rejected():
    model = make_model()
    batch = row_of(documents_of((17,)), plan())
    with pytest.raises(ValueError, match="^temperature=-1: "):
        continued(model, batch, -1)
    model.get_output_embeddings().weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        continued(model, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_flex_attention_matches_dense_masks(kind):
    model = make_model(kind).cuda()
    documents, sizes = documents_of((200, 3, 150)), plan(stride=8, n_samples_per_prompt=3)
    batch = row_of(documents, sizes, multiple=TILE).to("cuda")
    masks = partial(span_masks, model.config)
    seeds = torch.arange(batch.place[:, :, 0].numel(), device="cuda").view(batch.place.shape[:2])
    dense = continue_documents(model, batch, masks, seeds=seeds, temperature=0.6)
    use_flex(model)
    flex = continue_documents(model, batch, masks, seeds=seeds, temperature=0.6)
    # A draw at a boundary, and all tokens after it, may differ; the log-probs of the drawn tokens must match.
    assert (flex.ids == dense.ids).float().mean() > 0.9
    assert_near(flex.logps, as_trained(model, batch, flex.ids), 1e-3)
    assert_near(dense.logps, as_trained(model, batch, dense.ids), 1e-3)
