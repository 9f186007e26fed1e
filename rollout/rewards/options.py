"""Flags of rewards, `--reward-*`: which functions, their weights, where they run, and what happens on a fault."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from data.command.flags import Common
from data.errors import UserError
from rollout.rewards.weights import parse_weights

OnError = Literal["stop", "none"]
TIMEOUT = 60.0  # seconds
DEFAULT_REWARD = "exact_match"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward functions and how they run."""

    reward_funcs: Common[tuple[str, ...]] = ()
    (
        "Rewards: exact_match, regex:PATTERN, code, env, ..., my_module.fn, FILE.py:fn, model:RUN, prm:RUN. "
        "None given: exact_match, and the run says so."
    )
    reward_weights: Common[tuple[str, ...]] = ()
    """A weight per function: a number, or step:weight points such as 0:1.0,100:0.2; none given means 1 each."""
    reward_num_workers: int = 0
    """Processes that run the functions, each in its main thread; 0: they run in the trainer itself."""
    reward_timeout: float = TIMEOUT
    """Seconds one call in a worker may take before the worker is replaced."""
    reward_memory_gb: float | None = None
    """GiB of address space a worker may take beyond what loading the functions took (RLIMIT_AS); None: no limit."""
    reward_on_error: OnError = "stop"
    """A row that raises, returns no number, hangs or kills its worker: stop the run, or none = no reward for it."""
    reward_none_limit: int = 10
    """Stop after this many batches, or evaluations, in a row in which no completion got a reward; 0 never stops."""

    def __post_init__(self) -> None:
        if not isinstance(self.reward_funcs, (tuple, list)):  # from Python: a single function instead of a tuple
            raise UserError(f"reward_funcs={self.reward_funcs}: must be a tuple; write (my_function,)")
        parse_weights(self.reward_weights, len(self.reward_funcs) or 1)
        if self.reward_num_workers < 0:
            raise UserError(f"reward_num_workers={self.reward_num_workers}: must be 0 (in this process) or more")
        if self.reward_none_limit < 0:
            raise UserError(f"reward_none_limit={self.reward_none_limit}: must be 0 (never stop) or more")
        if not 0 < self.reward_timeout < math.inf:
            raise UserError(f"reward_timeout={self.reward_timeout}: must be above 0 and finite")
        if self.reward_memory_gb is not None and not 0 < self.reward_memory_gb < math.inf:
            raise UserError(f"reward_memory_gb={self.reward_memory_gb}: must be above 0 and finite, or None")
        if not self.reward_num_workers:
            for name, default in (("reward_timeout", TIMEOUT), ("reward_memory_gb", None)):
                if getattr(self, name) != default:
                    raise UserError(
                        f"{name}={getattr(self, name)}: limits workers, and there are none; set reward_num_workers"
                    )
