"""Episodes with a real server: token-exact, across syncs, and cancelled by close."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.engine import Request, Sampling, run_groups
from rollout.engines.vllm import VllmEngine
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.rollout_func import RolloutFunction
from rollout.episodes.tool_calls import Call, Parsed
from rollout.episodes.tool_episode import ToolEpisode
from rollout.episodes.tools import load_tools
from rollout.episodes.turns import turn_seed
from tests.rollout.scripted_engine import user_prompt
from tests.rollout.vllm.conftest import wait_for
from tests.rollout.vllm.test_engine import LIMIT, change, make_engine, make_policy

SAMPLING = Sampling(max_tokens=90, stop_ids=(2, 0), for_training=True)


@pytest.fixture
def engine(tied_server: Any, monkeypatch: Any) -> Iterator[VllmEngine]:
    policy = make_policy(tied_server.model_folder)
    engine = make_engine(tied_server, policy, "process_group", monkeypatch)
    engine.policy = policy
    engine.load(0)
    yield engine
    engine.close()


def always_calls(engine: VllmEngine, max_turns: int = 3) -> ToolEpisode:
    """Return an episode that parses any text as a call, since the tiny model cannot call tools."""
    episode = ToolEpisode(load_tools(("lookup",)), engine.local.tokenizer, tool_format="pythonic", max_turns=max_turns)
    episode.parse = lambda text: Parsed("", [Call(name="lookup", arguments={"key": "ab"})])
    return episode


def groups_of(count: int, copies: int = 4) -> list[list[Request]]:
    prompts = [user_prompt(f"{i}+{i}=", f"rows:{i}", table={"ab": f"value {i}"}) for i in range(count)]
    return [[Request.of(prompt, 100 * i + c) for c in range(copies)] for i, prompt in enumerate(prompts)]


def check(engine: VllmEngine, completions: Any) -> None:
    """Check that log-probs match the trainer's, given the full context with tool results."""
    local = engine.local.logps([(c.prompt_ids, c.ids) for c in completions], 1.0)
    for completion, logps in zip(completions, local, strict=True):
        mask = completion.mask or [True] * len(completion.ids)
        expected = [logp if sampled else 0.0 for logp, sampled in zip(logps, mask, strict=True)]
        assert completion.logps == pytest.approx(expected, abs=LIMIT)


def test_episodes_with_tools_are_token_exact(engine):
    source = EpisodeSource(engine, SAMPLING, always_calls(engine))
    groups = run_groups(source, groups_of(4), engine.poll)
    completions = [c for group in groups for c in group]
    check(engine, completions)
    assert [len(group) for group in groups] == [4] * 4
    for i, group in enumerate(groups):
        for completion in group:
            assert completion.prompt_ids == user_prompt(f"{i}+{i}=").ids and len(completion.ids) <= 90
            assert completion.versions == [(0, completion.trained)]
            results = [m["content"] for m in completion.messages if m["role"] == "tool"]
            assert set(results) <= {f"value {i}"}
            text = engine.local.tokenizer.decode(completion.ids)
            assert text.count(f"<|im_start|>tool\nvalue {i}<|im_end|>") == len(results)
    assert max(c.columns["num_turns"] for c in completions) == 3
    assert run_groups(source, groups_of(4), engine.poll) == groups  # seeds determine every turn


def test_sync_during_episodes_is_recorded_in_their_versions(engine):
    loaded = threading.Event()

    async def episode(client, prompt, seed):
        while seed % 100 == 3 and not loaded.is_set():  # one episode per group starts after the sync
            await asyncio.sleep(0.01)
        return await always_calls(engine)(client, prompt, seed)

    source = EpisodeSource(engine, SAMPLING, episode)
    futures = source.start(groups_of(4))
    wait_for(lambda: any(member.tasks for member in engine.pool.members))
    change(engine.policy, seed=1)
    engine.load(1)
    loaded.set()
    completions = [c for future in futures for c in future.result(60)]
    for c in completions:
        versions = [version for version, _ in c.versions]
        assert sum(count for _, count in c.versions) == c.trained and versions == sorted(set(versions))
    used = {version for c in completions for version, _ in c.versions}
    assert used <= {0, 1} and 1 in used


def test_user_coroutine_samples_from_the_server(engine, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "async def twice(client, prompt, seed):\n"
        "    made = await client.generate(prompt.ids, seed, max_tokens=8)\n"
        "    return {'completion_ids': made.ids, 'logprobs': made.logps, 'version': client.version}\n"
    )
    source = RolloutFunction(f"{path}:twice").source(engine, SAMPLING)
    completions = [c for group in run_groups(source, groups_of(2), engine.poll) for c in group]
    check(engine, completions)
    assert [c.columns for c in completions] == [{"version": 0}] * 8


def test_close_cancels_episodes_and_leaves_the_engine_usable(engine):
    async def episode(client, prompt, seed):
        for turn in range(1000):
            await client.generate(prompt.ids, turn_seed(seed, turn), max_tokens=4)

    source = EpisodeSource(engine, SAMPLING, episode)
    futures = source.start(groups_of(2))
    wait_for(lambda: any(member.tasks for member in engine.pool.members))
    source.close()
    assert all(future.cancelled() for future in futures)
    with contextlib.closing(EpisodeSource(engine, SAMPLING, always_calls(engine))) as again:
        check(engine, run_groups(again, groups_of(1), engine.poll)[0])
