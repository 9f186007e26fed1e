"""Weights in shards, read by rank 0 for servers that only it speaks with: the others take part in every gather.

    source = LentWeights(policy, torch.bfloat16)      # rank 0: what a server gets, after an order to the others
    Lender(policy, local).weights("bfloat16")         # they read the same tensors in the same order, and drop them

Rank 0 alone knows when weights are needed: after a step, when a server has come back, for a comparison. That is always
in its main thread and within Lead.run, where the others wait for orders; no copy is kept for other times. A tensor is
whole at a time, never the model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollout.engines.local import LocalEngine
from trainer.parallel import comm
from trainer.policy.logps import Policy
from trainer.policy.sharding import gathered_head
from trainer.policy.weights import PolicyWeights

Sequences = Sequence[tuple[list[int], list[int]]]


class LentWeights(PolicyWeights):
    """Rank 0's source: it tells the others before it reads, and reads to the end whatever a server does."""

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        comm.give_order(f"weights {name_of(self.dtype)}")
        tensors = super().tensors()
        try:
            while (pair := next(tensors, None)) is not None:  # `yield from` would close them with this generator
                yield pair
        finally:
            for _ in tensors:  # a transfer that broke off: the others are on their way through all of them
                pass

    def save_adapter(self, folder: Path) -> None:
        _ = self.adapter  # one that cannot be served is refused before the others are told
        comm.give_order(f"adapter {name_of(self.dtype)}")
        super().save_adapter(folder)


class LentScores(LocalEngine):
    """Rank 0's own log-probs of a sharded policy: all ranks run the same passes, block after block gathered."""

    def __init__(self, policy: Policy, local: LocalEngine) -> None:
        super().__init__(
            local.model, local.tokenizer, max_batch_size=local.max_batch_size, autocast_dtype=local.autocast_dtype
        )
        self.policy, self.local = policy, local

    def score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        comm.give_order("score")
        comm.from_main([sequences, temperature], "sequences to score")
        return score_together(self.policy, self.local, sequences, temperature)


class Lender:
    """What a rank other than 0 does for it."""

    def __init__(self, policy: Policy, local: LocalEngine) -> None:
        self.policy, self.local = policy, local
        self._weights: PolicyWeights | None = None
        self.orders = {"score": self.score, "weights": self.weights, "adapter": self.adapter}

    def weights(self, dtype: str) -> None:
        for _ in self._source(dtype).tensors():
            pass

    def adapter(self, dtype: str) -> None:
        self._source(dtype).adapter.read()

    def score(self) -> None:
        sequences, temperature = comm.from_main(None, "sequences to score")
        score_together(self.policy, self.local, sequences, temperature)

    def _source(self, dtype: str) -> PolicyWeights:
        if self._weights is None:
            self._weights = PolicyWeights(self.policy, getattr(torch, dtype))
        assert name_of(self._weights.dtype) == dtype, (self._weights.dtype, dtype)
        return self._weights


def score_together(policy: Policy, local: LocalEngine, sequences: Sequences, temperature: float) -> list[list[float]]:
    """Log-probs by all ranks at once; the model stays in shards, but for the block at work and the head."""
    with comm.inside("log-probs to compare"), gathered_head(policy):
        return local.score(sequences, temperature)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
