"""Log-probs of given token ids, from a server that may be busy with completions."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.servers.client import ServerError
from rollout.servers.pool import Member, Pool


async def score_rows(pool: Pool, member: Member, rows: Sequence[list[int]]) -> list[list[float]]:
    """Log-probs of ids[1:] for each row, by the version that the server serves.

    A server with adapters is drained first: vLLM 0.32 crashes on prompt log-probs when other requests are in the batch
    (it takes one adapter index per request, but there is one row of logits per prompt token). Completions that ran
    there are interrupted and continue afterwards.
    """
    server, version, model = member.server, member.version, member.model
    assert server.info is not None and version is not None, "a server must have weights before it scores"
    if not server.info.lora:
        return [await server.score(ids, model=model, version=version) for ids in rows]
    await pool.empty(member)
    try:
        await server.resume()  # other requests stay away: the pool has it as updating
        return [await server.score(ids, model=model, version=version) for ids in rows]
    except ServerError as error:
        await pool.fail(member, str(error))
        raise
    finally:
        await pool.refill(member, version, model)  # does nothing if it is out
