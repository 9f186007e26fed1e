"""--entropy-target: adapt the weight of the entropy bonus from step to step (rule in losses/entropy.py)."""

from __future__ import annotations

from typing import Any

from losses.entropy import adapted_coef
from trainer.config.policy import PolicyLossConfig


class EntropyTarget:
    """Weight of an entropy bonus that keeps the entropy at or above a target.

    It follows the metrics of the last step, which are the same on all ranks.
    """

    def __init__(self, options: PolicyLossConfig) -> None:
        assert options.entropy_target is not None
        self.options, self.target, self.weight = options, options.entropy_target, options.entropy_coef
        self.is_low = False  # the last step's entropy was at or below the target

    @property
    def coef(self) -> float:
        """Entropy coefficient for the next step."""
        return self.weight if self.is_low else 0.0

    def observe(self, entropy: float) -> None:
        options = self.options
        self.is_low = entropy <= self.target
        self.weight = adapted_coef(
            self.weight, entropy, target=self.target, delta=options.entropy_coef_step, most=options.entropy_coef_max
        )

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "is_low": self.is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.is_low = state["weight"], state["is_low"]
