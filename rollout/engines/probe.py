"""Check that servers have the trainer's weights by comparing log-probs of fixed tokens.

A transfer can succeed and still leave a server with different weights: a stale packed copy of a tied head, an adapter
on another base, a prefix cache of old keys. None of these raises an error, but log-probs show them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from rollout.engines.local import LocalEngine
from rollout.servers.client import ServerError
from rollout.servers.pool import Member, Pool

SEQUENCES, TOKENS = 3, 32
ROUNDED = 0.2  # limit if servers use the full base and the trainer a 4-bit base


class Probe:
    """Trainer side of the comparison."""

    def __init__(self, local: LocalEngine, *, tolerance: float | None) -> None:
        self.local = local
        self.tolerance = tolerance
        self.rounded = False  # the trainer uses a 4-bit copy of the servers' base

    def sequences(self, longest: int) -> list[list[int]]:
        """Return fixed ids, spread over the model's vocabulary."""
        vocab = self.local.model.config.get_text_config().vocab_size
        length = max(2, min(TOKENS, longest))
        return [[(seed * i * i + 7 * i + seed) % vocab for i in range(length)] for seed in range(1, 1 + SEQUENCES)]

    def logps(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return the trainer's log-probs of ids[1:] for each sequence."""
        return self.local.logps([(ids[:1], ids[1:]) for ids in sequences], 1.0)

    def gap(self, trainer: list[list[float]], server: list[list[float]], dtype: str) -> tuple[float, float, str]:
        """Return (gap, limit, kind of gap) for a server of this dtype.

        The gap is relative for unlikely tokens, because a log-prob of -50 has a larger rounding error than one of -1.
        In float32 the maximum counts; in half precision the mean, because single tokens differ by rounding.
        """
        pairs = [(a, b) for row, other in zip(trainer, server, strict=True) for a, b in zip(row, other, strict=True)]
        gaps = [abs(a - b) / max(1.0, abs(a)) for a, b in pairs]
        if self.rounded:
            return statistics.fmean(gaps), self.tolerance or ROUNDED, "on average"
        is_exact = dtype == "float32" and self.local.autocast_dtype in (None, torch.float32)
        if is_exact:
            return max(gaps), self.tolerance or 1e-4, "at most"
        return statistics.fmean(gaps), self.tolerance or 0.05, "on average"


async def server_logps(pool: Pool, member: Member, sequences: Sequence[list[int]]) -> list[list[float]]:
    """Return log-probs of ids[1:] for each sequence, under the version that the server serves.

    A server with adapters is drained first: vLLM 0.32 crashes on prompt log-probs if other requests are in the batch
    (it uses one adapter index per request, but there is one row of logits per prompt token). Running completions are
    interrupted and continue afterwards.
    """
    server, version, model = member.server, member.version, member.model
    assert server.info is not None and version is not None, "server_logps() called before the server has weights"
    if not server.info.lora:
        return [await server.logps(ids, model=model, version=version) for ids in sequences]
    await pool.empty(member)
    try:
        await server.resume()  # the pool sends no other requests while the member is updating
        return [await server.logps(ids, model=model, version=version) for ids in sequences]
    except ServerError as error:
        await pool.fail(member, str(error))
        raise
    finally:
        await pool.refill(member, version, model)  # does nothing if the member is out
