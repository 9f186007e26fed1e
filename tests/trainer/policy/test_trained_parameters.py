"""--trained-parameters: a part of the weights is trained, the other parameters are frozen."""

from __future__ import annotations

import pytest
import torch

from data.packing import Item, make_batches
from trainer.config.blocks import LoraConfig, ModelConfig, OptimConfig
from trainer.policy.heads import load_scorer
from trainer.policy.load import load_policy
from trainer.policy.logps import reference_logps, token_logps
from trainer.policy.optim import build_optimizer, launch_step

CPU = torch.device("cpu")
PART = ("model.layers.1.self_attn", r"model\.norm")


def settings(*patterns: str, **options) -> ModelConfig:
    return ModelConfig(model="builtin:tiny", trained_parameters=patterns, **options)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch warns once on a CPU without bfloat16 matmuls
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "muon"])
def test_only_matching_parameters_change_and_have_optimizer_state(optim, capfd):
    if optim == "adamw_8bit":
        pytest.importorskip("torchao")
    policy = load_policy(settings(*PART), LoraConfig(), CPU, with_reference=True)
    assert "trained_parameters: 65,664 of 638,208 weights" in capfd.readouterr().err
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    optimizer, schedule = build_optimizer(policy.model, OptimConfig(optim=optim, learning_rate=1e-2), 10)
    (batch,) = make_batches([Item([5, 9, 40, 7, 100, 3], [False] + [True] * 5)], max_tokens=16)
    reference = reference_logps(policy, batch)
    assert torch.equal(token_logps(policy, batch).logp, reference)
    (-token_logps(policy, batch).logp.sum()).backward()
    assert {name for name, p in policy.model.named_parameters() if p.grad is None} == {
        name for name in before if not name.startswith(("model.layers.1.self_attn", "model.norm"))
    }
    with torch.compiler.set_stance("force_eager"):  # compiling torchao's code takes a minute on a CPU
        launch_step(policy.model, optimizer, schedule, 1.0, "step 1").wait()
    changed = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkvo"} | {"model.norm.weight"}
    assert len(optimizer.state) == len(changed)
    assert torch.equal(reference_logps(policy, batch), reference)
    assert not torch.equal(token_logps(policy, batch).logp, reference)


@pytest.mark.parametrize(
    ("patterns", "lora", "message"),
    [
        (("model.norm", "layers.1.mlp.up"), 0, "layers.1.mlp.up: .*model.layers.1.mlp.up_proj.weight"),
        (("model.nrom",), 0, "model.nrom: .*model.norm.weight"),
        (("lm_head",), 0, "lm_head: .*lm_head.weight is tied to model.embed_tokens.weight"),
        (PART, 4, "LoRA .*lora.r=4.*--lora.modules-to-save"),
    ],
)
def test_patterns_that_cannot_be_trained(patterns, lora, message):
    with pytest.raises(ValueError, match=f"^trained_parameters.*{message}"):
        load_policy(settings(*patterns), LoraConfig(r=lora), CPU, with_reference=False)


def test_other_settings_are_checked():
    with pytest.raises(ValueError, match=r"trained_parameters=\(a: "):
        settings("(a")
    with pytest.raises(ValueError, match="load_in_4bit=True: .*cannot be trained"):
        load_policy(settings(*PART, load_in_4bit=True), LoraConfig(), CPU, with_reference=False)
    other = settings(*PART, revision="v1", tokenizer="t")
    assert other.for_model("m") == ModelConfig(model="m")
    assert other.for_model("builtin:tiny") == settings(revision="v1", tokenizer="t")


def test_new_head_of_a_scorer_must_be_trained():
    with pytest.raises(ValueError, match="trained_parameters=.*score"):
        load_scorer(settings(*PART), LoraConfig(), CPU, kind="sequence")
    scorer = load_scorer(settings("score", "model.norm"), LoraConfig(), CPU, kind="sequence")
    assert [name for name, p in scorer.model.named_parameters() if p.requires_grad] == [
        "model.norm.weight", "score.weight",
    ]  # fmt: skip
