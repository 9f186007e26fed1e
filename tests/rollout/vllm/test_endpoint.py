"""The endpoint over a real vLLM server, with unmodified clients: the ids it trains are those that vLLM sampled."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine import Completion, Sampling
from rollout.episodes.endpoint import Endpoint
from tests.rollout.endpoint.test_clients import check_conversations, client_python, converse  # noqa: F401
from tests.rollout.vllm.test_engine import make_engine, make_policy


@pytest.mark.proof
@pytest.mark.parametrize("count", [1000])
def test_trained_ids_are_sampled_ids(client_python, tied_server, monkeypatch, count):  # noqa: F811
    engine = make_engine(tied_server, make_policy(tied_server.model_folder), "process_group", monkeypatch)
    sampled: list[Completion] = []
    complete = engine.complete

    async def recorded(*args: Any) -> Completion:
        sampled.append(await complete(*args))
        return sampled[-1]

    engine.complete = recorded
    endpoint = Endpoint(engine, engine.local.tokenizer)
    endpoint.open()
    try:
        engine.load(0)
        sampling = Sampling(max_tokens=150, temperature=1.5, stop_ids=(2,), for_training=True)
        check_conversations(converse(endpoint, client_python, count, sampling), sampled)
    finally:
        endpoint.close()
        engine.close()
