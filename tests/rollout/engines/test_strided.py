"""Continuing all anchors in one row, against a plain forward per anchor, sample and token, and against the row's own
training pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from data.strided import Document, StridedBatch, StridedPlan, make_strided
from kernels.attention import TILE, dense_mask
from kernels.draw import draw
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
LENGTHS = (17, 3, 12)  # the second has no room for most plans; no stride above 1 divides what is left of the others


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
    """A number of document, anchor and sample, not of their places in the row."""
    sample_number = torch.arange(batch.place.shape[1])
    return (batch.document * 1000 + batch.anchor).unsqueeze(1) * 100 + sample_number


def continued(model: Any, batch: StridedBatch, temperature: float = 0.6, **options: Any) -> Continued:
    masks = partial(span_masks, model.config)
    return continue_documents(model, batch, masks, seeds=seeds_of(batch), temperature=temperature, **options)


@torch.no_grad()
def one_by_one(model: Any, documents: list[Document], batch: StridedBatch, temperature: float = 0.6) -> Continued:
    """For every anchor the samples as plain causal sequences of their own, run whole for every token."""
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
    """Log-probs from one pass over the row that is trained on."""
    batch = batch.with_generated(ids)
    logits = model(
        input_ids=batch.input_ids, attention_mask=attention_masks(model.config, batch),
        position_ids=batch.position_ids, use_cache=False,
    ).logits[0, batch.predictor]  # (A, n, G, V)  # fmt: skip
    logps = (logits.float() / temperature).log_softmax(dim=-1)
    return logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def assert_near(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0.0)


def assert_same(got: Continued, want: Continued) -> None:
    assert torch.equal(got.ids, want.ids)
    assert_near(got.logps, want.logps)


@pytest.mark.parametrize("sizes", GRID, ids=lambda x: "-".join(map(str, vars(x).values())))
def test_every_sample_is_what_its_anchor_alone_would_give(sizes):
    model, documents = make_model(), documents_of(LENGTHS)
    batch = row_of(documents, sizes)
    made = continued(model, batch)
    assert made.ids.shape == batch.place.shape and made.logps.dtype == torch.float32 and len(batch.anchor) > 1
    assert_same(made, one_by_one(model, documents, batch))
    assert_near(made.logps, as_trained(model, batch, made.ids))


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_scores_as_its_own_forward_does(kind):
    model, documents = make_model(kind), documents_of(LENGTHS)
    batch = row_of(documents, plan())
    made = continued(model, batch, 1.0)
    assert_same(made, one_by_one(model, documents, batch, 1.0))
    assert_near(made.logps, as_trained(model, batch, made.ids, 1.0))
    assert made.logps.std() > 0.1 and len(made.ids.unique()) > 10


def test_float64_weights_give_the_float64_log_probs():
    model, documents = make_model("qwen3").double(), documents_of(LENGTHS)
    batch = row_of(documents, plan())
    made = continued(model, batch)
    want = one_by_one(model, documents, batch)
    assert torch.equal(made.ids, want.ids) and (made.logps - want.logps).abs().max() < 1e-6  # they leave as float32


def test_a_document_is_continued_alike_alone_and_among_others():
    model, documents = make_model("qwen2"), documents_of((11, 3, 20, 9))
    together = row_of(documents, plan(), multiple=64)
    made, stop = continued(model, together), 0
    for number, document in enumerate(documents):
        alone = row_of([document], plan())
        alone.document.fill_(number)  # what its seeds are made of
        start, stop = stop, stop + len(alone.anchor)
        assert_same(continued(model, alone), Continued(made.ids[start:stop], made.logps[start:stop]))
    assert stop == len(together.anchor) == 6


def test_samples_of_an_anchor_differ_and_follow_their_seeds():
    model = make_model()
    batch = row_of(documents_of((17,)), plan(n_samples_per_prompt=4))
    made = continued(model, batch, 1.0)
    assert all(len(samples.unique(dim=0)) == 4 for samples in made.ids)
    masks = partial(span_masks, model.config)
    turned = continue_documents(model, batch, masks, seeds=seeds_of(batch).flip(1), temperature=1.0)
    assert_same(turned, Continued(made.ids.flip(1), made.logps.flip(1)))


def test_a_continuation_that_is_the_true_one_scores_as_the_document_does():
    """A document that the model itself wrote, greedily: every anchor behind its beginning finds it again."""
    model, ids = make_model(), documents_of((4,))[0].ids
    with torch.no_grad():
        for _ in range(14):
            ids = [*ids, model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()]
        own = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)  # of tokens 1, 2, ...
    batch = row_of([Document(ids)], plan(stride=2))
    made = continued(model, batch, 0.0)
    target = batch.target_place.unsqueeze(1).expand(batch.place.shape)  # one document: its places are its positions
    tokens = torch.tensor(ids)
    assert torch.equal(made.ids, tokens[target]) and len(batch.anchor) == 5
    want = own[torch.arange(len(ids) - 1), tokens[1:]][target - 1]
    assert_near(made.logps, want)
    assert_near(as_trained(model, batch, made.ids, 1.0), want)


def test_adapters_count_and_every_module_gets_its_mode_back():
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
    want = one_by_one(wrapped.eval(), documents, batch)
    with wrapped.disable_adapter():
        assert not torch.equal(one_by_one(wrapped, documents, batch).ids, want.ids)
    wrapped.train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in wrapped.named_modules()}
    made = continued(model, batch)
    assert_same(made, want)
    assert {name: module.training for name, module in wrapped.named_modules()} == before
    assert len(set(before.values())) == 2 and not made.logps.requires_grad and torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 instructions says so, and goes on
@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # norms leave the keys of the second in float32
def test_autocast_stays_near_the_pass_that_is_trained_on(kind):
    model = make_model(kind)
    batch = row_of(documents_of(LENGTHS), plan())
    made = continued(model, batch, 1.0, autocast_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        want = as_trained(model, batch, made.ids, 1.0)
    assert 0 < (made.logps - as_trained(model, batch, made.ids, 1.0)).abs().max() < 0.2  # it did run in bfloat16
    assert_near(made.logps, want, 0.1)


def test_a_row_without_anchors_runs_nothing():
    model = make_model()
    batch = row_of(documents_of((3, 8)), plan())
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    made = continued(model, batch)
    assert made.ids.shape == made.logps.shape == (0, 2, 5)


def test_a_pass_has_one_query_per_sample():
    model, queries = make_model(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: queries.append(inputs[0].numel()))
    batch = row_of(documents_of(LENGTHS), plan())
    continued(model, batch)
    assert queries == [sum(LENGTHS), *[len(batch.anchor) * 2] * 4]


def test_the_head_works_on_few_states_at_a_time(monkeypatch):
    model, rows = make_model(), []
    batch = row_of(documents_of(LENGTHS), plan(n_samples_per_prompt=3))
    want = continued(model, batch)
    monkeypatch.setattr(strided, "LOGITS", 7 * VOCAB)
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: rows.append(out.shape[0]))
    assert_same(continued(model, batch), want)
    # 5 anchors: first their states, two at a time, of three samples each; then one state for each of 15 samples.
    assert rows == [2, 2, 1] + [7, 7, 1] * 4


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_whole_tiles_give_the_same(kind, monkeypatch):
    """As on CUDA, with flex_attend's dense twin: queries are filled up, and what fills them is seen by nobody."""
    shapes = []

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, scale: float) -> Tensor:
        shapes.append((query.shape[2], key.shape[2]))
        assert tuple(mask.shape) == (1, 1, *shapes[-1])
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        visible = dense_mask(mask.mask_mod.spans, key.shape[2])
        assert visible[0, 0, -1].nonzero().item() >= width  # one place, behind the row
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)

    model, documents = make_model(kind), documents_of((40, 3, 60))
    sizes = plan(n_samples_per_prompt=5)
    want = continued(model, row_of(documents, sizes))
    monkeypatch.setattr(attention, "flex_attend", attend)
    monkeypatch.setattr(strided, "_multiple", lambda device: TILE)
    use_flex(model)
    batch = row_of(documents, sizes, multiple=TILE)
    width = batch.input_ids.shape[1]
    assert_same(continued(model, batch), want)
    assert len(batch.anchor) == 29 and width == 896
    # 103 tokens of the documents, then 145 samples; the places behind the row are those of the filling.
    assert shapes == [(128, width + 128)] * 2 + [(256, width + 128)] * 2 * 4
    assert_same(continued(model, row_of(documents, sizes)), want)  # not laid out for tiles: the cache is, all the same


def test_diverged_weights_and_temperatures_below_zero_are_refused():
    model = make_model()
    batch = row_of(documents_of((17,)), plan())
    with pytest.raises(ValueError, match="^temperature=-1: must be above 0"):
        continued(model, batch, -1)
    model.get_output_embeddings().weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="^logits: not finite; the model's weights have diverged"):
        continued(model, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_flex_attention_continues_as_dense_masks_do(kind):
    model = make_model(kind).cuda()
    documents, sizes = documents_of((200, 3, 150)), plan(stride=8, n_samples_per_prompt=3)
    batch = row_of(documents, sizes, multiple=TILE).to("cuda")
    masks = partial(span_masks, model.config)
    seeds = torch.arange(batch.place[:, :, 0].numel(), device="cuda").view(batch.place.shape[:2])
    dense = continue_documents(model, batch, masks, seeds=seeds, temperature=0.6)
    use_flex(model)
    flex = continue_documents(model, batch, masks, seeds=seeds, temperature=0.6)
    # A draw on a boundary may differ, and all behind it; the log-probs of what was drawn may not.
    assert (flex.ids == dense.ids).float().mean() > 0.9
    assert_near(flex.logps, as_trained(model, batch, flex.ids), 1e-3)
    assert_near(dense.logps, as_trained(model, batch, dense.ids), 1e-3)
