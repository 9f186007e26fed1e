"""Strided energy-based fine-tuning against plain loops: rewards, advantages and gradients, in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.strided import Document
from tests.trainer.ebft import naive_ebft
from tests.trainer.rl.group_cases import VOCAB
from trainer.config.blocks import LoraConfig, RunConfig
from trainer.config.ebft import FeatureConfig, StridedConfig
from trainer.ebft.features import FeatureNetwork
from trainer.ebft.strided import add_rewards, backward, check_gap, continue_all, evaluate, sample_rows, step_metrics
from trainer.policy.logps import Policy

STRIDED = StridedConfig(stride=3, context_length=4, generate_max_len=3, n_samples_per_prompt=4, max_length=64)


@cache
def two_layers(seed: int) -> Any:
    """Two blocks; features are the outputs of both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for module in (model.model, *model.model.layers):  # Llama's norm rounds to float32
        for name in [name for name, _ in module.named_children() if "norm" in name]:
            setattr(module, name, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model.double()


def make_policy(model: Any | None = None) -> Policy:
    return Policy(
        model=copy.deepcopy(model or two_layers(0)).train(), tokenizer=None, source="test", device=torch.device("cpu"),
        compute_dtype=torch.float64, reference=two_layers(1).eval().requires_grad_(False),
    )  # fmt: skip


def make_documents(*lengths: int) -> list[Document]:
    generator = torch.Generator().manual_seed(7)
    return [
        Document(torch.randint(VOCAB, (length,), generator=generator).tolist(), source=f"text:{row}")
        for row, length in enumerate(lengths)
    ]


def make_cfg(
    strided: StridedConfig = STRIDED, *, max_tokens: int = 4096, temperature: float = 0.7, **options: Any
) -> Any:
    features = FeatureConfig(**{"feature_layers": (0.4, 0.7), **options})
    return SimpleNamespace(
        features=features, strided=strided, temperature=temperature, lora=LoraConfig(),
        run=RunConfig(max_tokens_per_micro_batch=max_tokens),
    )  # fmt: skip


def run_step(cfg: Any, policy: Policy, documents: list[Document]) -> Any:
    network = FeatureNetwork(cfg.features, cfg.run, policy)
    assert network.layers == [1, 2]
    return add_rewards(network, continue_all(cfg, policy, documents, seed=3, numbers=range(len(documents))))


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def blocks_of(step: Any, documents: list[Document]) -> dict[tuple[int, int], list[list[int]]]:
    blocks = {}
    for row in step.rows:
        ids = row.input_ids[0, row.place]
        for i in range(len(row.anchor)):
            blocks[int(row.document[i]), int(row.anchor[i])] = ids[i].tolist()
    return blocks


OPTIONS = [
    {},
    {"feature_norm": "layer", "embed_method": "mean_pooling", "advantage_estimator": "rloo", "diversity_coef": 0.5},
    {"feature_norm": "none", "embed_method": "concat", "advantage_estimator": "grpo", "alignment_coef": 1.7},
    {"embed_method": "completion_mean", "advantage_estimator": "reinforce", "alignment": "dot", "rl_coef": 0.3},
    {"use_whitening": True, "ce_coef": 0.2},
    {"use_whitening": True, "whiten_gt": "sample", "embed_method": "concat", "ce_coef": 0.03, "rl_coef": 2.0},
    {"rl_coef": 0.0, "ce_coef": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "default")
def test_rewards_advantages_and_gradients_match_plain_loops(options):
    documents = [*make_documents(10, 6, 15, 11), *make_documents(7)]
    documents[2] = replace(documents[2], prompt_length=8)
    documents[3] = replace(documents[3], mask=[False, True, True, True, True, True, True, False, True, True, True])
    cfg, policy = make_cfg(**options), make_policy()
    step = run_step(cfg, policy, documents)
    sums = backward(cfg, policy, step).means()

    slow = make_policy().model
    loss, found = naive_ebft.strided_loss(
        slow, policy.reference, documents, blocks_of(step, documents), cfg, layers=[1, 2]
    )
    loss.backward()
    advantage = torch.tensor(found["advantage"], dtype=torch.float64)
    torch.testing.assert_close(torch.cat(step.advantage), advantage, rtol=1e-9, atol=1e-9)
    for name in ("alignment", "diversity"):
        ours = torch.cat([getattr(measured.reward, name) for measured in step.measured])
        torch.testing.assert_close(ours, torch.tensor(found[name], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    ours = torch.cat([measured.cfm for measured in step.measured])
    torch.testing.assert_close(ours, torch.tensor(found["cfm"], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(policy.model), gradients(slow), rtol=1e-9, atol=1e-9)
    assert gradients(slow).norm() > 1e-3
    assert sums["loss/total"] == pytest.approx(loss.item(), rel=1e-6)
    if cfg.features.rl_coef:
        assert sums["policy/behaviour_gap"] < 1e-6  # log-probs of sampling are stored in float32
        check_gap(cfg, policy, backward(cfg, policy, step), 1)


def test_the_gradient_does_not_depend_on_how_documents_are_packed():
    documents, found = make_documents(16, 6, 23, 11, 30), []
    for max_tokens, num_rows in ((4096, 1), (1, 5), (200, 2)):
        cfg, policy = make_cfg(ce_coef=0.1, max_tokens=max_tokens), make_policy()
        step = run_step(cfg, policy, documents)
        assert len(step.rows) == num_rows
        backward(cfg, policy, step)
        found.append(gradients(policy.model))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)


def test_continuations_of_a_document_do_not_depend_on_its_row():
    cfg, policy = make_cfg(), make_policy()
    documents = make_documents(16, 23, 11)
    together = blocks_of(continue_all(cfg, policy, documents, seed=3, numbers=[10, 11, 12]), documents)
    alone = {}
    for place, document in enumerate(documents):
        step = continue_all(cfg, policy, [document], seed=3, numbers=[10 + place])
        alone |= {(place, anchor): ids for (_, anchor), ids in blocks_of(step, [document]).items()}
    assert together == alone
    other = blocks_of(continue_all(cfg, policy, documents, seed=4, numbers=[10, 11, 12]), documents)
    assert other != together
    samples = [tuple(ids) for rows in together.values() for ids in rows]
    assert len(set(samples)) > len(samples) // 2


def test_equal_samples_have_equal_features_and_whitening_counts_them_as_one():
    """Diversity is 1/2 for four equal continuations of an anchor, and 0 for independent continuations."""
    cfg, policy = make_cfg(use_whitening=True), make_policy()
    documents = make_documents(16, 23)
    network = FeatureNetwork(cfg.features, cfg.run, policy)
    step = continue_all(cfg, policy, documents, seed=3, numbers=range(len(documents)))
    (row,) = step.rows
    ids = row.input_ids[0, row.place]
    same = row.with_generated(ids[:, :1].expand_as(ids))
    found = network.of_blocks(same)
    assert torch.equal(found.rollout, found.rollout[:, :1].expand_as(found.rollout))
    assert network.measure(found).reward.diversity == pytest.approx(torch.full(ids.shape[:2], 0.5), abs=1e-9)
    pair = ids.clone()
    pair[:, 1] = pair[:, 0]
    distinct = [len(set(map(tuple, rows))) for rows in pair.tolist()]
    diversity = network.measure(network.of_blocks(row.with_generated(pair))).reward.diversity
    for place, count in enumerate(distinct):
        if count == 3:
            assert diversity[place].tolist() == pytest.approx([1 / 3, 1 / 3, 0.0, 0.0], abs=1e-9)
    assert 3 in distinct


def test_a_continuation_equal_to_the_target_has_its_features():
    cfg, policy = make_cfg(), make_policy()
    documents = make_documents(16, 23)
    network = FeatureNetwork(cfg.features, cfg.run, policy)
    (row,) = continue_all(cfg, policy, documents, seed=3, numbers=range(len(documents))).rows
    true = row.input_ids[0, row.target_place]  # (A, G)
    found = network.of_blocks(row.with_generated(true.unsqueeze(1).expand(row.place.shape)))
    torch.testing.assert_close(found.rollout, found.target.unsqueeze(1).expand_as(found.rollout), rtol=0, atol=1e-12)
    measured = network.measure(found)
    assert measured.reward.alignment == pytest.approx(torch.full(row.place.shape[:2], 2.0), abs=1e-9)
    assert measured.cfm.abs().max() < 1e-20 and measured.cfm_unbiased.abs().max() < 1e-12


def test_documents_without_anchors_only_train_cross_entropy():
    cfg, policy = make_cfg(ce_coef=1.0), make_policy()
    documents = make_documents(5, 6)
    step = run_step(cfg, policy, documents)
    assert step_metrics(FeatureNetwork(cfg.features, cfg.run, policy), step) == {"rollout/anchors": 0.0}
    assert sample_rows(policy, documents, step) == []
    sums = backward(cfg, policy, step).means()
    slow = make_policy().model
    loss, _ = naive_ebft.strided_loss(slow, policy.reference, documents, {}, cfg, layers=[1, 2])
    loss.backward()
    torch.testing.assert_close(gradients(policy.model), gradients(slow), rtol=1e-9, atol=1e-12)
    assert sums["loss/ce"] == pytest.approx(loss.item()) and sums["loss/policy"] == 0.0


def test_a_step_without_trained_tokens_logs_zero_losses():
    """Documents too short for an anchor and without trained tokens have the same loss metrics as others."""
    documents = [replace(document, mask=[False] * len(document.ids)) for document in make_documents(5, 6)]
    for options in ({}, {"ce_coef": 0.5}, {"rl_coef": 0.0, "ce_coef": 1.0}):
        cfg, policy = make_cfg(**options), make_policy()
        logged = backward(cfg, policy, run_step(cfg, policy, documents)).means()
        usual = backward(cfg, policy, run_step(cfg, policy, make_documents(10))).means()
        losses = {name: value for name, value in logged.items() if name.startswith("loss/")}
        assert losses == {name: 0.0 for name in usual if name.startswith("loss/")} and len(losses) >= 2


def test_evaluation_does_not_depend_on_the_batch_size_and_matches_plain_loops():
    cfg, policy = make_cfg(), make_policy()
    documents = make_documents(16, 6, 23, 11)
    network = FeatureNetwork(cfg.features, cfg.run, policy)
    metrics = evaluate(cfg, policy, network, documents, batch_size=3)
    again = evaluate(cfg, policy, network, documents, batch_size=1)
    assert metrics == pytest.approx(again, rel=1e-6)
    total, count = 0.0, 0
    with torch.no_grad():
        for document in documents:
            logps = naive_ebft.logps(policy.model, document.ids, 1, 1.0)
            total, count = total - logps.sum().item(), count + len(logps)
    assert metrics["eval/nll"] == pytest.approx(total / count, rel=1e-6)
    assert metrics["eval/rows"] == 4 and 0 < metrics["eval/cfm_unbiased"] < metrics["eval/cfm"]


def test_different_logps_in_sampling_and_training_are_an_error():
    cfg, policy = make_cfg(), make_policy()
    step = run_step(cfg, policy, make_documents(16, 23))
    wrong = replace(step, behaviour=[logps - 0.5 for logps in step.behaviour])
    with pytest.raises(ValueError, match=r"^step 1: log-probs differ by 0\.5 .*--mode structured"):
        check_gap(cfg, policy, backward(cfg, policy, wrong), 1)
