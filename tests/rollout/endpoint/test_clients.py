"""Unmodified clients from PyPI over both engines, and agents as harnesses.

Needs STROP_CLIENT_PYTHON, an interpreter with openai, anthropic, openai-agents and mini-swe-agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.endpoint.server import Endpoint
from rollout.engine import Completion, Sampling
from rollout.engines.local import LocalEngine
from tests.rollout.scripted_engine import TINY

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def client_python() -> str:
    if not (python := os.environ.get("STROP_CLIENT_PYTHON")):
        pytest.skip("STROP_CLIENT_PYTHON is unset: set it to an interpreter with openai, anthropic and the agents")
    return python


def converse(endpoint: Endpoint, python: str, count: int, sampling: Sampling) -> list[tuple[Any, list[str]]]:
    """Run `count` conversations of clients.py; return (session, texts that the client got) of each."""

    async def run() -> list[tuple[Any, list[str]]]:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(endpoint.session(sampling, seed=number)) for number in range(count)]
            env = os.environ | {"OPENAI_BASE_URL": endpoint.url}
            process = await asyncio.create_subprocess_exec(
                python, str(HERE / "clients.py"), stdin=-1, stdout=-1, stderr=-1, env=env
            )
            out, errors = await process.communicate("\n".join(key for _, key in opened).encode())
            assert process.returncode == 0, errors.decode()[-2000:]
            texts = [json.loads(line) for line in out.decode().splitlines()]
            return [(session, got) for (session, _), got in zip(opened, texts, strict=True)]

    future = endpoint.loop.start(run())
    future.add_done_callback(lambda _: endpoint.wake())
    while not future.done():
        if not endpoint.advance():
            future.result()
    return future.result()


def check_conversations(results: list[tuple[Any, list[str]]], sampled: list[Completion]) -> None:
    """Each conversation trains exactly the ids of the engine's completions, in the context they were sampled in."""
    known = {(*c.prompt_ids, -1, *c.ids): c for c in sampled}
    for number, (session, texts) in enumerate(results):
        whole = session.completion([1], {})
        assert whole.columns["num_turns"] == len(texts) == 3, number
        assert whole.columns["branches"] == 0, (number, texts)
        turns = [known.pop((*turn.completion.prompt_ids, -1, *turn.completion.ids)) for turn in session.turns]
        position, ids = len(whole.prompt_ids), whole.prompt_ids + whole.ids
        mask = [False] * position + (whole.mask or [True] * len(whole.ids))
        assert [i for i, m in zip(ids, mask, strict=True) if m] == [i for turn in turns for i in turn.ids]
        for turn, text in zip(turns, texts, strict=True):
            end = len(turn.prompt_ids) + len(turn.ids)
            assert ids[:end] == turn.prompt_ids + turn.ids and all(mask[len(turn.prompt_ids) : end])
            assert turn.text == text
        assert [logp for logp, m in zip(whole.logps, mask[position:], strict=True) if m] == [
            logp for turn in turns for logp in turn.logps
        ]
    assert not known


@pytest.mark.proof
@pytest.mark.parametrize("count", [30])
def test_trained_ids_are_sampled_ids_in_process(client_python, count):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), tokenizer)
    sampled: list[Completion] = []
    stream = engine.stream

    def recorded(*args: Any) -> Any:
        for ended in stream(*args):
            sampled.extend(completion for _, completion in ended)
            yield ended

    engine.stream = recorded
    endpoint = Endpoint(engine, tokenizer)
    endpoint.open()
    try:
        sampling = Sampling(max_tokens=300, temperature=1.5, stop_ids=(2,), for_training=True)
        check_conversations(converse(endpoint, client_python, count, sampling), sampled)
    finally:
        endpoint.close()
