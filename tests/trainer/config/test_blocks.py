"""Settings that exclude each other, or have no effect, are refused in one sentence."""

from __future__ import annotations

import pytest

from trainer.config.blocks import DataConfig


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
