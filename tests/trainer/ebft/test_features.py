"""Features of completions against plain forward passes: values, batching, layers, models."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.packing import make_batches
from data.types import TargetPrompt
from losses.ebft import layer_indices
from rollout.engine import Completion
from tests.trainer.ebft import naive_ebft
from tests.trainer.ebft.test_strided import make_policy
from tests.trainer.rl.group_cases import VOCAB
from trainer.config.blocks import LoraConfig, ModelConfig, ParallelConfig, RunConfig
from trainer.config.ebft import FeatureConfig
from trainer.ebft.features import FeatureNetwork, Features, blocks_of, feature_policy
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy

CPU = torch.device("cpu")
TINY = ModelConfig(model="builtin:tiny")
METHODS = ("last_token", "mean_pooling", "completion_mean", "concat")
SIZE = 4


def draw(generator: torch.Generator, length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def completion(prompt: TargetPrompt, ids: list[int], mask: list[bool] | None = None) -> Completion:
    return Completion(
        prompt_ids=prompt.ids, ids=ids, logps=[0.0] * len(ids), finish_reason="stop", text="", mask=mask,
        versions=[(0, len(ids))],
    )  # fmt: skip


def make_groups(*sizes: tuple[int, int]) -> tuple[list[TargetPrompt], list[Completion]]:
    """A group of four per (prompt length, target length); prompts are repeated per completion."""
    generator, prompts, completions = torch.Generator().manual_seed(5), [], []
    for row, (head, tail) in enumerate(sizes):
        prompt = TargetPrompt(
            source=f"rows:{row}", prompt="", ids=draw(generator, head), target_ids=draw(generator, tail)
        )
        prompts += [prompt] * SIZE
        completions += [completion(prompt, draw(generator, length)) for length in (1, 3, 7, tail)]
    return prompts, completions


GROUPS = ((3, 5), (1, 1), (6, 9))


def network_of(policy: Policy | None = None, *, max_tokens: int = 4096, **options: Any) -> FeatureNetwork:
    options = {"feature_layers": (0.4, 0.7), **options}
    return FeatureNetwork(
        FeatureConfig(**options), RunConfig(max_tokens_per_micro_batch=max_tokens), policy or make_policy()
    )


def of_groups(network: FeatureNetwork, prompts: list[TargetPrompt], completions: list[Completion]) -> Features:
    return network.of_items(network.items_of(prompts, completions, num_generations=SIZE), SIZE)


def vector(model: Any, layers: list[int], cfg: FeatureConfig, prompt: list[int], ids: list[int]) -> Tensor:
    """The feature of one sequence, computed alone."""
    with torch.no_grad():
        tokens = naive_ebft.token_vectors(model, [*prompt, *ids], layers, cfg.feature_norm)
    return naive_ebft.pooled(tokens, cfg.embed_method, len(prompt))


def vectors(network: FeatureNetwork, model: Any, prompts: list[TargetPrompt], completions: list[Completion]):
    def one(prompt: list[int], ids: list[int]) -> Tensor:
        return vector(model, network.layers, network.cfg, prompt, ids)

    rollout = torch.stack([one(p.ids, c.ids) for p, c in zip(prompts, completions, strict=True)])
    target = torch.stack([one(p.ids, p.target_ids) for p in prompts[::SIZE]])
    return rollout.view(len(target), SIZE, -1), target


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# Values.


@pytest.mark.parametrize(
    ("method", "norm", "whitening"),
    [
        ("last_token", "token", "off"), ("mean_pooling", "layer", "off"), ("completion_mean", "none", "feature"),
        ("concat", "token", "sample"), ("concat", "layer", "feature"), ("completion_mean", "token", "sample"),
    ],
)  # fmt: skip
def test_features_and_rewards_match_plain_forward_passes(method, norm, whitening):
    options = {} if whitening == "off" else {"use_whitening": True, "whiten_gt": whitening}
    network = network_of(embed_method=method, feature_norm=norm, alignment_coef=1.3, diversity_coef=0.6, **options)
    prompts, completions = make_groups(*GROUPS)
    found = of_groups(network, prompts, completions)
    rollout, target = vectors(network, network.policy.reference, prompts, completions)
    assert network.layers == [1, 2] and rollout.shape[-1] == 16 * (3 if method == "concat" else 1)
    close(found.rollout, rollout)
    close(found.target, target)
    measured = network.measure(found)
    for place in range(len(GROUPS)):
        alignment, diversity, cfm = naive_ebft.reward_parts(rollout[place], target[place], network.cfg)
        assert measured.reward.alignment[place].tolist() == pytest.approx(alignment, rel=1e-9, abs=1e-9)
        assert measured.reward.diversity[place].tolist() == pytest.approx(diversity, rel=1e-9, abs=1e-9)
        assert measured.cfm[place].item() == pytest.approx(cfm, rel=1e-9, abs=1e-12)
        spread = sum(float((x - rollout[place].mean(dim=0)).square().sum()) for x in rollout[place]) / (SIZE - 1)
        assert measured.cfm_unbiased[place].item() == pytest.approx(cfm - spread / SIZE, rel=1e-9, abs=1e-12)


def test_whitening_treats_duplicates_as_one():
    prompts, completions = make_groups((3, 5), (4, 5))
    completions[2] = completions[0]  # two of four
    completions[5:8] = [completions[4]] * 3  # all four
    for method, whiten_gt in zip(METHODS, ("feature", "sample") * 2, strict=True):
        network = network_of(embed_method=method, use_whitening=True, whiten_gt=whiten_gt, max_tokens=30)
        found = of_groups(network, prompts, completions)
        assert torch.equal(found.rollout[0, 2], found.rollout[0, 0]) and not torch.equal(*found.rollout[0, :2])
        assert torch.equal(found.rollout[1], found.rollout[1, :1].expand(SIZE, -1)), method
        diversity = network.measure(found).reward.diversity
        assert diversity[0].tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 0.0], abs=1e-9), method
        assert diversity[1].tolist() == pytest.approx([1 / 2] * 4, abs=1e-9), method


def test_a_completion_equal_to_the_target_has_its_features():
    prompts, completions = make_groups(*GROUPS)
    completions[1] = completion(prompts[1], prompts[1].target_ids)
    completions[8:12] = [completion(prompts[8], prompts[8].target_ids)] * SIZE
    for method in METHODS:
        network = network_of(embed_method=method, max_tokens=1)
        found = of_groups(network, prompts, completions)
        assert torch.equal(found.rollout[0, 1], found.target[0]) and torch.equal(found.rollout[2, 3], found.target[2])
        measured = network.measure(found)
        assert measured.reward.alignment[0, 1].item() == pytest.approx(2.0, abs=1e-12), method
        assert measured.cfm[2].item() == 0.0 and measured.cfm[0].item() > 0, method


def test_only_the_models_tokens_are_averaged():
    """In two turns, the user's text in between is context and is not averaged, even in the target."""
    network = network_of(embed_method="completion_mean")
    prompts, completions = make_groups((3, 6))
    mask = [True, True, False, False, True, True]
    prompts = [replace(prompts[0], target_mask=mask)] * SIZE
    sampled_mask = [True, False, False, False, True, True, True]
    completions[2] = replace(completions[2], mask=sampled_mask)
    found = of_groups(network, prompts, completions)
    for got, ids, chosen in (
        (found.rollout[0, 2], completions[2].ids, sampled_mask),
        (found.target[0], prompts[0].target_ids, mask),
    ):
        with torch.no_grad():
            tokens = naive_ebft.token_vectors(network.policy.reference, [*prompts[0].ids, *ids], [1, 2], "token")
        trained = [tokens[3 + i] for i, is_trained in enumerate(chosen) if is_trained]
        close(got, sum(trained) / len(trained))


def test_equal_sequences_with_different_masks_are_computed_separately():
    """One sequence in two groups, with different prompt lengths, and once with tokens of the user."""
    network = network_of(embed_method="completion_mean")
    ids = draw(torch.Generator().manual_seed(3), 9)
    first = TargetPrompt(source="a", prompt="", ids=ids[:3], target_ids=ids[3:])
    second = TargetPrompt(source="b", prompt="", ids=ids[:6], target_ids=ids[6:])
    turns = completion(first, ids[3:], mask=[True, False, True, True, True, True])
    completions = [turns, *[completion(first, ids[3:])] * 3, *[completion(second, ids[6:])] * 4]
    found = of_groups(network, [first] * 4 + [second] * 4, completions)
    model, layers = network.policy.reference, network.layers
    close(found.rollout[0, 1], vector(model, layers, network.cfg, ids[:3], ids[3:]))
    close(found.target[1], vector(model, layers, network.cfg, ids[:6], ids[6:]))
    with torch.no_grad():
        tokens = naive_ebft.token_vectors(model, ids, layers, "token")
    close(found.rollout[0, 0], (tokens[3] + tokens[5:].sum(dim=0)) / 5)


def test_features_of_a_completion_without_tokens():
    prompts, completions = make_groups((3, 5))
    completions[0] = completion(prompts[0], [])
    network = network_of(embed_method="completion_mean")
    found = of_groups(network, prompts, completions)
    assert found.rollout[0, 0].abs().max() == 0
    assert network.measure(found).reward.alignment[0, 0] == 0
    network = network_of(embed_method="last_token")
    found = of_groups(network, prompts, completions)
    close(found.rollout[0, 0], vector(network.policy.reference, [1, 2], network.cfg, prompts[0].ids, []))


# Batching.


def test_features_do_not_depend_on_micro_batches_or_group_order():
    prompts, completions = make_groups(*GROUPS)
    order = [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    for method, max_tokens in zip(METHODS, (1, 17, 60, 17), strict=True):
        whole = of_groups(network_of(embed_method=method), prompts, completions)
        network = network_of(embed_method=method, max_tokens=max_tokens)
        cut = of_groups(network, [prompts[i] for i in order], [completions[i] for i in order])
        close(cut.rollout, whole.rollout[[2, 0, 1]], 1e-12)
        close(cut.target, whole.target[[2, 0, 1]], 1e-12)


def test_every_distinct_sequence_is_computed_once(monkeypatch):
    prompts, completions = make_groups((3, 5))
    completions = [completions[0]] * 3 + [completion(prompts[0], prompts[0].target_ids)]
    seen = []
    monkeypatch.setattr(
        "trainer.ebft.features.make_batches", lambda items, **k: seen.append(items) or make_batches(items, **k)
    )
    of_groups(network_of(), prompts, completions)
    assert [len(items) for items in seen] == [2]


def test_a_sequence_may_fill_the_context():
    """With learned position embeddings, which end there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=12, n_embd=8, n_layer=3, n_head=2, initializer_range=0.4)
    model = GPT2LMHeadModel(config).double().eval()
    policy = replace(make_policy(), model=model, reference=model)
    prompts, completions = make_groups((5, 7), (3, 9))
    for method in METHODS:
        network = network_of(policy, embed_method=method)
        found = of_groups(network, prompts, completions)
        rollout, target = vectors(network, model, prompts, completions)
        close(found.rollout, rollout)
        close(found.target, target)


# Layers.


@pytest.mark.parametrize(
    ("fractions", "layers"), [((0.25, 0.5, 0.75), [1, 2]), ((0.0,), [1]), ((0.75, 0.25), [2, 1]), ((0.34, 1.0), [1, 3])]
)
def test_feature_layers_are_fractions_of_the_depth(fractions, layers):
    network = network_of(feature_layers=fractions, feature_norm="none")
    assert network.layers == layers == layer_indices(fractions, 3)
    prompts, completions = make_groups((3, 5))
    model, kept = network.policy.reference, []
    hooks = [block.register_forward_hook(lambda _, __, out: kept.append(out)) for block in model.model.layers]
    with torch.no_grad():
        model(input_ids=torch.tensor([[*prompts[0].ids, *prompts[0].target_ids]]))
    for hook in hooks:
        hook.remove()
    want = torch.cat([kept[number - 1][0, -1] for number in sorted(layers)])
    close(of_groups(network, prompts, completions).target[0], want)


def test_hooks_are_removed_from_the_network(monkeypatch):
    network = network_of()
    prompts, completions = make_groups((3, 5))

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in network.policy.reference.modules())

    before, within = hooks(), []  # transformers keeps hooks for output_hidden_states
    of_groups(network, prompts, completions)
    assert hooks() == before

    def fail(*_: Any) -> None:
        within.append(hooks())
        raise ZeroDivisionError

    monkeypatch.setattr("trainer.ebft.features.hidden_states", fail)
    with pytest.raises(ZeroDivisionError):
        of_groups(network, prompts, completions)
    assert within == [before + 2] and hooks() == before


def test_a_model_without_a_list_of_blocks_is_rejected():
    config = SimpleNamespace(num_hidden_layers=3)
    lm = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: config),
        base_model=torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Identity()])),
    )
    with pytest.raises(ValueError, match=r"^model=mine: .*3 decoder blocks"):
        blocks_of(lm, "mine")


# Models.


def of_tiny(policy: Policy, source: Policy | None = None) -> Tensor:
    """Features of fixed completions."""
    network = network_of(source or policy, feature_layers=(0.34, 0.67))
    prompts, completions = make_groups(*GROUPS)
    found = of_groups(network, prompts, completions)
    return torch.cat([found.rollout, found.target.unsqueeze(1)], dim=1)


def of_model(model: Any) -> Tensor:
    cfg = FeatureConfig(feature_layers=(0.34, 0.67))
    layers = layer_indices(cfg.feature_layers, model.config.num_hidden_layers)
    prompts, completions = make_groups(*GROUPS)
    rollout, target = vectors(SimpleNamespace(layers=layers, cfg=cfg), model, prompts, completions)
    return torch.cat([rollout, target.unsqueeze(1)], dim=1)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_policy(TINY, LoraConfig(), CPU, with_reference=False).model.eval()


def train_a_little(policy: Policy) -> Tensor:
    """Take a few optimizer steps; return the initial parameters."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten().clone() for p in parameters])
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    ids = torch.arange(20, 40)[None]
    for _ in range(3):
        policy.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (torch.cat([p.detach().flatten() for p in parameters]) - before).abs().max() > 1e-3
    return before


def test_with_lora_the_base_computes_the_features(tiny):
    cfg = replace(TINY, gradient_checkpointing=True)
    policy = load_policy(cfg, LoraConfig(r=4, dropout=0.5), CPU, with_reference=True)
    assert policy.reference is None and policy.reference_adapter is None
    expected = of_model(tiny)
    close(of_tiny(policy), expected, 1e-5)
    train_a_little(policy)
    before = of_tiny(policy)
    close(before, expected, 1e-5)
    assert policy.model.training and torch.equal(of_tiny(policy), before)  # without dropout
    assert (of_model(policy.model.eval()) - expected).abs().max() > 1e-2


def test_with_full_training_the_initial_weights_compute_the_features(tiny):
    policy = load_policy(TINY, LoraConfig(), CPU, with_reference=True)
    before = of_tiny(policy)
    close(before, of_model(tiny), 1e-5)
    train_a_little(policy)
    assert torch.equal(of_tiny(policy), before)


def test_with_a_loaded_adapter_the_initial_weights_compute_the_features(tiny, tmp_path):
    first = load_policy(TINY, LoraConfig(r=4), CPU, with_reference=False)
    train_a_little(first)
    first.model.save_pretrained(tmp_path / "adapter")
    first.tokenizer.save_pretrained(tmp_path / "adapter")
    adapted = of_model(first.model.eval())
    assert (adapted - of_model(tiny)).abs().max() > 1e-2

    policy = load_policy(ModelConfig(model=str(tmp_path / "adapter")), LoraConfig(r=4), CPU, with_reference=True)
    assert policy.reference is None and policy.reference_adapter == "reference"
    close(of_tiny(policy), adapted, 1e-5)
    before = train_a_little(policy)
    close(of_tiny(policy), adapted, 1e-5)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == len(before) and policy.model.active_adapter == "default"
    merged = load_policy(ModelConfig(model=str(tmp_path / "adapter")), LoraConfig(), CPU, with_reference=True)
    train_a_little(merged)
    close(of_tiny(merged), adapted, 1e-5)


def saved(policy: Policy, folder: Path) -> str:
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


def test_another_model_can_compute_the_features(tiny, tmp_path):
    other = load_policy(TINY, LoraConfig(), CPU, with_reference=False)
    train_a_little(other)
    cfg = FeatureConfig(feature_model=saved(other, tmp_path / "other"))
    policy = load_policy(TINY, LoraConfig(), CPU, with_reference=False)
    source = feature_policy(cfg, TINY, policy, ParallelConfig())
    assert policy.reference is None and not source.reference.training
    assert not any(p.requires_grad for p in source.reference.parameters())
    close(of_tiny(policy, source), of_model(other.model.eval()), 1e-5)
    assert (of_tiny(policy, source) - of_model(tiny)).abs().max() > 1e-2
    assert feature_policy(FeatureConfig(), TINY, policy, ParallelConfig()) is policy


def test_another_model_with_other_tokens_is_rejected(tmp_path):
    policy = load_policy(TINY, LoraConfig(), CPU, with_reference=False)
    other = copy.copy(policy)
    folder = saved(other, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    text = path.read_text()
    assert text.count('"+": ') == 1 and text.count('"-": ') == 1
    path.write_text(text.replace('"+": ', '"@@": ').replace('"-": ', '"+": ').replace('"@@": ', '"-": '))
    with pytest.raises(ValueError, match=r"^feature_model=.*other: .*model="):
        feature_policy(FeatureConfig(feature_model=folder), TINY, policy, ParallelConfig())
