"""What methods that sample groups can be set to, and what is refused, in one sentence each and before any work."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.blocks import LoraConfig, ModelConfig, MovingReferenceConfig, PromptConfig
from trainer.config.policy import PolicyLossConfig
from trainer.methods import ebft, grpo, rloo

MOVING = MovingReferenceConfig(sync_ref_model=True)
WITH_KL = PolicyLossConfig(beta=0.1)


def make(method: Any = grpo, **settings: Any) -> Any:
    return method.Config(model=ModelConfig(model="m"), **{"data": PromptConfig(data=("d",)), **settings})


def refusal(work: Any) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


BLOCK = [
    ({"sync_ref_model": True, "ref_model_sync_steps": 0}, "ref_model_sync_steps=0: must be above 0"),
    ({"sync_ref_model": True, "ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha=1.5: must be above 0 and at most"),
    ({"ref_model_mixup_alpha": 0.5}, "ref_model_mixup_alpha=0.5: has no effect without sync_ref_model"),
    ({"ref_model_sync_steps": 5}, "ref_model_sync_steps=5: has no effect without sync_ref_model"),
]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (grpo, {"moving": MOVING}, "sync_ref_model=True: there is no reference to move with beta=0; set --beta"),
    (
        grpo,
        {"moving": MOVING, "policy_loss": WITH_KL, "lora": LoraConfig(r=4)},
        "sync_ref_model=True: with LoRA the reference is the base itself, which cannot move",
    ),
    (ebft, {"moving": MOVING}, "sync_ref_model=True: there is no KL to a reference with beta=0"),
    (
        ebft,
        {"moving": MOVING, "policy_loss": WITH_KL},
        "sync_ref_model=True: the reference is also the feature network, which must not move",
    ),
    (grpo, {"num_generations_eval": 0}, "num_generations_eval=0: must be 1 or more"),
    (grpo, {"num_generations_eval": 4}, "num_generations_eval=4: has no effect without held-out rows"),
    (
        grpo,
        {"num_generations_eval": 4, "data": PromptConfig(data=("d",), eval_data=("e",))},
        "num_generations_eval=4: greedy completions of a prompt are all the same; set --rollout.eval-temperature",
    ),
    (ebft, {"num_generations_eval": 4}, "num_generations_eval=4: has no effect here, held-out groups are sampled"),
    (ebft, {"num_generations_eval": 4, "mode": "strided"}, "num_generations_eval=4: has no effect in mode=strided"),
    (ebft, {"moving": MOVING, "mode": "strided"}, "sync_ref_model=True: has no effect in mode=strided"),
]


def test_what_cannot_work_is_refused_by_name():
    for settings, sentence in BLOCK:
        assert refusal(lambda settings=settings: MovingReferenceConfig(**settings)).startswith(sentence)
    for method, settings, sentence in REFUSED:
        said = refusal(lambda method=method, settings=settings: make(method, **settings))
        assert said.startswith(sentence), settings


def test_what_goes_together_is_taken():
    assert make(rloo, moving=MOVING).has_reference and not make().has_reference
    assert make(moving=MOVING, policy_loss=WITH_KL).moving.sync_ref_model
