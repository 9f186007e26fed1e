"""Settings that exclude each other, or have no effect, are refused in one sentence."""

from __future__ import annotations

import pytest

from trainer.config.blocks import DataConfig, ModelConfig, OptimConfig, RunConfig, check_evaluation
from trainer.methods import sft


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val_set_size": -1}, "val_set_size=-1: must be 0 (none) or above"),
        ({"val_set_size": float("nan")}, "val_set_size=nan: must be 0 (none) or above"),
        ({"val_set_size": 1.5}, "val_set_size=1.5: is neither a fraction below 1 nor a whole number of rows"),
        ({"val_set_size": 0.1, "eval_data": ("b",)}, "val_set_size=0.1: holds out rows of --data, but eval_data names"),
    ],
)
def test_held_out_rows_are_named_once(settings, message):
    with pytest.raises(ValueError) as error:
        DataConfig(data=("a",), **settings)
    assert str(error.value).startswith(message)


def test_rows_are_held_out_by_either_setting():
    assert not DataConfig(data=("a",)).holds_out
    assert DataConfig(data=("a",), eval_data=("b",)).holds_out and DataConfig(data=("a",), val_set_size=5).holds_out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup_steps=3: warmup_ratio=0.1 sets the same; leave one out"),
        ({"warmup_steps": -1}, "warmup_steps=-1: must be 0 or more"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio=0.1: has no effect with lr_scheduler_type=cosine; use cosine_with_min"),
        ({"decay_ratio": 0.2}, "decay_ratio=0.2: has no effect with lr_scheduler_type=cosine; use warmup_stable"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type=cosine_with_min_lr: needs a minimum; set"),
        ({"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.0}, "decay_ratio=0.0: must be above 0 and at"),
    ],
)
def test_schedules_take_only_their_own_settings(settings, message):
    with pytest.raises(ValueError) as error:
        OptimConfig(**settings)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"saves_per_epoch": 1, "save_steps": 5}, "save_steps=5: has no effect beside saves_per_epoch=1, which sets"),
        ({"evals_per_epoch": 4, "eval_steps": 5}, "eval_steps=5: has no effect beside evals_per_epoch=4, which sets"),
        ({"evals_per_epoch": -1}, "evals_per_epoch=-1: must be 0 (off) or more"),
        ({"loss_watchdog_patience": 5}, "loss_watchdog_patience=5: has no effect without a threshold; set --loss-wat"),
        ({"loss_watchdog_threshold": 5, "loss_watchdog_patience": 0}, "loss_watchdog_patience=0: must be 1 or more"),
        ({"loss_watchdog_threshold": float("nan")}, "loss_watchdog_threshold=nan: must be a number"),
    ],
)
def test_saves_evaluations_and_watchdog_are_set_once(settings, message):
    with pytest.raises(ValueError) as error:
        RunConfig(**settings)
    assert str(error.value).startswith(message)


def test_evaluations_need_held_out_rows():
    with pytest.raises(ValueError, match="evals_per_epoch=4: has no effect without held-out rows; name them"):
        check_evaluation(DataConfig(data=("a",)), RunConfig(evals_per_epoch=4))
    check_evaluation(DataConfig(data=("a",)), RunConfig(evals_per_epoch=0))
    check_evaluation(DataConfig(data=("a",), val_set_size=0.1), RunConfig(evals_per_epoch=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"roles_to_train": ("human",)}, "roles_to_train=human: is unknown; use system, developer, user, assistant"),
        ({"roles_to_train": ()}, "roles_to_train: empty, so nothing would be trained; name a role"),
        (
            {"roles_to_train": ("user",), "train_on_inputs": True},
            "roles_to_train=user: has no effect with train_on_inp",
        ),
    ],
)
def test_roles_of_sft(settings, message):
    with pytest.raises(ValueError) as error:
        sft.Config(model=ModelConfig(model="builtin:tiny"), data=DataConfig(data=("a",)), **settings)
    assert str(error.value).startswith(message)
