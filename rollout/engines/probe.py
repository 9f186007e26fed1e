"""Check that servers hold the trainer's weights: both score fixed tokens, and the log-probs must agree.

A transfer can succeed and still leave a server with other weights: a tied head kept in a packed copy, an adapter on
another base, a prefix cache of old keys. None of these raises an error; log-probs show them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from rollout.engines.local import LocalEngine
from rollout.servers.client import ServerError
from rollout.servers.pool import Member, Pool

SEQUENCES, TOKENS = 3, 32
ROUNDED = 0.2  # limit for servers of the full base beside a trainer that rounded it to 4 bits


class Probe:
    """The trainer's side of the comparison."""

    def __init__(self, local: LocalEngine, *, tolerance: float | None) -> None:
        self.local = local
        self.tolerance = tolerance
        self.rounded = False  # the trainer's base is the servers', rounded to 4 bits

    def sequences(self, longest: int) -> list[list[int]]:
        """Fixed ids, spread over the model's vocabulary."""
        vocab = self.local.model.config.get_text_config().vocab_size
        length = max(2, min(TOKENS, longest))
        return [[(seed * i * i + 7 * i + seed) % vocab for i in range(length)] for seed in range(1, 1 + SEQUENCES)]

    def logps(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """The trainer's log-probs of all ids but the first."""
        return self.local.logps([(ids[:1], ids[1:]) for ids in sequences], 1.0)

    def gap(self, ours: list[list[float]], theirs: list[list[float]], dtype: str) -> tuple[float, float, str]:
        """(gap, limit, kind of gap) for a server of that dtype.

        Relative for unlikely tokens, since a log-prob of -50 has fewer digits after the point than one of -1. In
        float32 the largest gap counts; in half precision single tokens differ by rounding, so the mean counts.
        """
        pairs = [(a, b) for row, other in zip(ours, theirs, strict=True) for a, b in zip(row, other, strict=True)]
        gaps = [abs(a - b) / max(1.0, abs(a)) for a, b in pairs]
        if self.rounded:
            return statistics.fmean(gaps), self.tolerance or ROUNDED, "on average"
        is_exact = dtype == "float32" and self.local.autocast_dtype in (None, torch.float32)
        if is_exact:
            return max(gaps), self.tolerance or 1e-4, "at most"
        return statistics.fmean(gaps), self.tolerance or 0.05, "on average"


async def server_logps(pool: Pool, member: Member, rows: Sequence[list[int]]) -> list[list[float]]:
    """Log-probs of ids[1:] for each row, by the version that the server serves.

    A server with adapters is drained first: vLLM 0.32 crashes on prompt log-probs when other requests are in the batch
    (it takes one adapter index per request, but there is one row of logits per prompt token). Completions that ran
    there are interrupted and continue afterwards.
    """
    server, version, model = member.server, member.version, member.model
    assert server.info is not None and version is not None, "a server must have weights before it scores"
    if not server.info.lora:
        return [await server.logps(ids, model=model, version=version) for ids in rows]
    await pool.empty(member)
    try:
        await server.resume()  # other requests stay away: the pool has it as updating
        return [await server.logps(ids, model=model, version=version) for ids in rows]
    except ServerError as error:
        await pool.fail(member, str(error))
        raise
    finally:
        await pool.refill(member, version, model)  # does nothing if it is out
