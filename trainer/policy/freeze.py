"""Train a part of the weights: the parameters whose names match --trained-parameters.

The other parameters have no gradient and no optimizer state. They keep the dtype of the trained parameters, and
checkpoints contain them, so that a checkpoint is still a complete model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from torch import nn

from data.errors import UserError
from trainer.parallel.comm import is_main
from trainer.parallel.watch import log


def freeze_except(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match no pattern; without patterns, change nothing."""
    if not patterns:
        return
    names = matching_names(model, patterns)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    if is_main():
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        log(f"trained_parameters: {trained:,} of {total:,} weights in {len(names)} tensors are trained")


def matching_names(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the names of parameters that match a pattern from their start; raise for a pattern without a match."""
    first = {id(p): name for name, p in model.named_parameters()}
    names, found = list(first.values()), set()
    for pattern in patterns:
        matches = {name for name in names if re.match(pattern, name)}
        if not matches:
            raise UserError(f"trained_parameters={pattern}: no parameter has a name that starts like this; "
                            f"{_advice(model, pattern, names, first)}")  # fmt: skip
        found |= matches
    return found


def _advice(model: nn.Module, pattern: str, names: list[str], first: dict[int, str]) -> str:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if re.match(pattern, name):
            return f"{name} is tied to {first[id(parameter)]}, which must be named instead"
    near = [name for name in names if re.search(pattern, name)] or difflib.get_close_matches(pattern, names, 3, 0.0)
    return f"did you mean {' or '.join(near[:3])}?"
