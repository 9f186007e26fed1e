"""Reward flags, `--reward-*`: the functions, their weights, where they run, and what happens on a fault."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from data.command.checks import check_numbers
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
        "Reward functions: exact_match, regex:PATTERN, code, env, ..., my_module.fn, FILE.py:fn, model:RUN, prm:RUN. "
        "Default: exact_match, with a log line."
    )
    reward_weights: Common[tuple[str, ...]] = ()
    """One weight per function: a number, or step:weight points such as 0:1.0,100:0.2. Default: all 1."""
    reward_num_workers: int = 0
    """Processes that run the functions, each in its main thread. 0: run them in the trainer."""
    reward_timeout: float = TIMEOUT
    """Seconds that one call may work or wait before its worker is replaced. Waiting for a core does not count."""
    reward_memory_gb: float | None = None
    """Worker address space limit in GiB (RLIMIT_AS), on top of what loading the functions took. None: no limit."""
    reward_on_error: OnError = "stop"
    """If a row raises, returns no number, hangs or kills its worker: stop the run, or give the row no reward (none)."""
    reward_on_all_ranks: bool = False
    """With several GPUs: call the functions on every rank, each on a share of the groups, not only on rank 0."""
    reward_none_limit: int = 10
    """Stop after this many consecutive batches, or evaluations, without any reward. 0: never stop."""

    def __post_init__(self) -> None:
        if not isinstance(self.reward_funcs, (tuple, list)):  # from Python, a function instead of a tuple
            raise UserError(f"reward_funcs={self.reward_funcs}: must be a list; write [my_function]")
        parse_weights(self.reward_weights, len(self.reward_funcs) or 1)
        for name, zero in (("reward_num_workers", "no workers"), ("reward_none_limit", "never stop")):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must be 0 ({zero}) or more")
        check_numbers(self, {"above 0 and finite": "reward_timeout"})
        if self.reward_memory_gb is not None and not 0 < self.reward_memory_gb < math.inf:
            raise UserError(f"reward_memory_gb={self.reward_memory_gb}: must be above 0 and finite, or None")
        if not self.reward_num_workers:
            for name, default in (("reward_timeout", TIMEOUT), ("reward_memory_gb", None)):
                if getattr(self, name) != default:
                    raise UserError(f"{name}={getattr(self, name)}: limits workers; set --reward-num-workers")
