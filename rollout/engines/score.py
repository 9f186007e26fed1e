"""Log-probs of given ids from a server that may be busy."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.servers.client import ServerError
from rollout.servers.pool import Member, Pool


async def score_rows(pool: Pool, member: Member, rows: Sequence[list[int]]) -> list[list[float]]:
    """Per row the log-probs of ids[1:], by the weights that requests to this server ask for.

    A server with adapters is emptied first: vLLM 0.32 dies of prompt log-probs when other requests are in the batch
    (it takes one adapter index per request, and there is one row of logits per prompt token). Completions that ran
    there come back with what they have, and go on afterwards.
    """
    server, version, model = member.server, member.version, member.model
    assert server.info is not None and version is not None, "a server has weights before it is asked about them"
    if not server.info.lora:
        return [await server.score(ids, model=model, version=version) for ids in rows]
    await pool.empty(member)
    try:
        await server.resume()  # the gate stays closed: it works for us alone
        return [await server.score(ids, model=model, version=version) for ids in rows]
    except ServerError as error:
        await pool.fail(member, str(error))
        raise
    finally:
        await pool.refill(member, version, model)  # does nothing for one that is out
