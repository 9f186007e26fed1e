"""Weights of rewards, which may change over a run.

    0.5                        constant
    0:1.0,100:0.2              1.0 at step 0, 0.2 from step 100 on, linear in between
    0:0,50:0,51:1              off, then on

Before the first point and after the last one, the weight is that of the point.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from data.errors import UserError


@dataclass(frozen=True)
class Weight:
    """One reward's weight at every step."""

    points: tuple[tuple[int, float], ...]  # (step, weight), steps increasing; one point = constant

    def at(self, step: int) -> float:
        """
        >>> Weight(((0, 1.0), (100, 0.2))).at(50)
        0.6
        """
        after = bisect_right([at for at, _ in self.points], step)
        if after == 0 or after == len(self.points):
            return self.points[max(after - 1, 0)][1]
        (start, low), (end, high) = self.points[after - 1 : after + 1]
        share = (step - start) / (end - start)
        return low * (1 - share) + high * share

    def __repr__(self) -> str:
        return ",".join(f"{at}:{weight:g}" for at, weight in self.points) if len(self.points) > 1 else self._only()

    def _only(self) -> str:
        return repr(self.points[0][1])


def parse_weight(given: float | str) -> Weight:
    """Parse a number or points; ValueError with a complete message."""
    if not isinstance(given, str):
        return _checked(Weight(((0, float(given)),)), given)
    if ":" not in given:
        return _checked(Weight(((0, _number(given, given)),)), given)
    points = []
    for part in given.split(","):
        step, colon, weight = part.partition(":")
        if not colon or not step.strip().isdecimal():
            raise UserError(
                f"reward_weights={given}: {part.strip()!r} is not step:weight; write a number, or points such as "
                "0:1.0,100:0.2"
            )
        points.append((int(step), _number(weight, given)))
    steps = [step for step, _ in points]
    if len(points) < 2 or steps != sorted(set(steps)):
        raise UserError(f"reward_weights={given}: needs two points or more, their steps rising, as in 0:1.0,100:0.2")
    return _checked(Weight(tuple(points)), given)


def parse_weights(given: Sequence[float | str] | None, num_functions: int) -> list[Weight]:
    """One weight per function; none given means 1 each."""
    if given is None or len(given) == 0:
        return [Weight(((0, 1.0),))] * num_functions
    weights = [parse_weight(weight) for weight in given]
    if len(weights) != num_functions:
        raise UserError(
            f"reward_weights={weights}: {len(weights)} weights for {num_functions} reward functions; give one each"
        )
    return weights


def _number(text: str, given: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"reward_weights={given}: {text.strip()!r} is not a number; write a number, or points such as 0:1.0,100:0.2"
        ) from None


def _checked(weight: Weight, given: float | str) -> Weight:
    if not all(math.isfinite(value) for _, value in weight.points):
        raise UserError(f"reward_weights={given}: every weight must be a finite number")
    return weight
