"""What a checkpoint keeps besides weights, optimizer and schedule: the state of whatever a method names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from data.user_code import told, users_part
from trainer.config.errors import raised_on_purpose
from trainer.files.tensor_files import TensorFiles


class Stateful(Protocol):
    """Something whose state is part of a checkpoint; a plain dict will do as well.

    What holds tensors has tensors() and load_tensors(mapping) besides: state_dict is JSON.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


State = Mapping[str, Stateful | dict[str, Any]]  # name -> what to keep under it, e.g. {"loader": loader}


def states_of(state: State) -> dict[str, Any]:
    return {name: dict(item) if isinstance(item, dict) else item.state_dict() for name, item in state.items()}


def tensors_of(state: State) -> dict[str, Tensor]:
    holders = {name: item for name, item in state.items() if hasattr(item, "tensors")}
    return {f"{name}/{key}": value for name, item in holders.items() for key, value in item.tensors().items()}


def load_states(state: State, saved: dict[str, Any], tensors: TensorFiles, checkpoint: Path) -> None:
    if state.keys() != saved.keys():
        raise ValueError(
            f"resume={checkpoint}: holds the state of {', '.join(sorted(saved))}, but this method keeps "
            f"{', '.join(sorted(state))}; resume with the version of the method it was written by"
        )
    for name, item in state.items():
        try:
            if isinstance(item, dict):
                item.clear()
                item.update(saved[name])
            else:
                item.load_state_dict(saved[name])
            if hasattr(item, "load_tensors"):
                item.load_tensors(tensors.below(f"{name}/"))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if raised_on_purpose(error) or users_part(error):
                raise
            raise ValueError(
                f"resume={checkpoint}: the state of {name} in its state.json cannot be used ({told(error)}); resume "
                "from another checkpoint"
            ) from error
