"""Reward weights, constant or scheduled over the run.

    0.5                        constant
    0:1.0,100:0.2              1.0 at step 0, 0.2 from step 100 on, linear in between
    0:0,50:0,51:1              off, then on

The weight is constant before the first point and after the last one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from data.errors import UserError


@dataclass(frozen=True)
class Weight:
    """Weight of one reward as a function of the step."""

    points: tuple[tuple[int, float], ...]  # (step, weight), in step order; one point: constant

    def at(self, step: int) -> float:
        """
        >>> Weight(((0, 1.0), (100, 0.2))).at(50)
        0.6
        """
        after = bisect_right([at for at, _ in self.points], step)
        if after == 0 or after == len(self.points):
            return self.points[max(after - 1, 0)][1]
        (start, low), (end, high) = self.points[after - 1 : after + 1]
        fraction = (step - start) / (end - start)
        return low * (1 - fraction) + high * fraction

    def __repr__(self) -> str:
        if len(self.points) == 1:
            return repr(self.points[0][1])
        return ",".join(f"{step}:{weight:g}" for step, weight in self.points)


def parse_weight(value: float | str) -> Weight:
    """Parse a number or step:weight points."""
    if isinstance(value, str) and ":" in value:
        points = _points(value)
    else:
        points = [(0, _number(value, value))]
    if not all(math.isfinite(weight) for _, weight in points):
        raise UserError(f"reward_weights={value}: every weight must be a finite number")
    return Weight(tuple(points))


def _points(value: str) -> list[tuple[int, float]]:
    points = []
    for part in value.split(","):
        step, colon, weight = part.partition(":")
        if not colon or not step.strip().isdecimal():
            raise UserError(
                f"reward_weights={value}: {part.strip()!r} is not step:weight; pass a number, or points such as "
                "0:1.0,100:0.2"
            )
        points.append((int(step), _number(weight, value)))
    steps = [step for step, _ in points]
    if len(points) < 2 or steps != sorted(set(steps)):
        raise UserError(f"reward_weights={value}: steps must increase over at least two points, as in 0:1.0,100:0.2")
    return points


def parse_weights(values: Sequence[float | str] | None, num_functions: int) -> list[Weight]:
    """Return one weight per function. Default: all 1."""
    if values is None or len(values) == 0:
        return [Weight(((0, 1.0),))] * num_functions
    weights = [parse_weight(value) for value in values]
    if len(weights) != num_functions:
        count = f"{num_functions} reward function{'s' * (num_functions != 1)}"
        raise UserError(f"reward_weights={weights}: {len(weights)} weights for {count}; pass one each")
    return weights


def _number(text: float | str, value: float | str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"reward_weights={value}: {text.strip()!r} is not a number; pass a number, or points such as 0:1.0,100:0.2"
        ) from None
