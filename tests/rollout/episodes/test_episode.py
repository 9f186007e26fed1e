"""Episodes in lockstep with the in-process engine: joint sampling, and failures."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollout.engine import Request, Sampling, run_groups
from rollout.engines.local import LocalEngine
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.turns import Transcript, turn_seed
from tests.rollout.scripted_engine import ScriptedEngine, tiny_tokenizer, user_prompt

SAMPLING = Sampling(max_tokens=60, stop_ids=(2,))


def groups_of(prompts, copies):
    return [[Request.of(prompt, 100 * i + c) for c in range(copies)] for i, prompt in enumerate(prompts)]


def turns_of(count, between=(9,), cap=60):
    """Return an episode of `count` turns, unless the row's column `turns` overrides it."""

    async def episode(client, prompt, seed):
        transcript = Transcript(prompt.ids)
        for number in range(prompt.columns.get("turns", count)):
            if number:
                transcript.insert(between)
            limit = min(cap, client.sampling.max_tokens - len(transcript))
            completion = await client.generate(transcript.ids, turn_seed(seed, number), max_tokens=limit)
            transcript.add(completion)
        return transcript.completion("stop", text=completion.text, columns={"source": prompt.source})

    return episode


@pytest.fixture
def scripted():
    engine = ScriptedEngine(lambda text, seed: f"s{seed % 1000}")
    sources = []

    def make(episode, sampling=SAMPLING):
        sources.append(EpisodeSource(engine, sampling, episode))
        return engine, sources[-1]

    yield make
    for source in sources:
        source.close()
        source.close()  # may be called twice


def test_all_waiting_episodes_are_sampled_in_one_call(scripted):
    engine, source = scripted(turns_of(3))
    groups = run_groups(source, groups_of([user_prompt("a"), user_prompt("b")], 4))
    assert [len(batch) for batch in engine.batches] == [8, 8, 8]
    assert [[c.columns["source"] for c in group] for group in groups] == [["rows.jsonl:1"] * 4] * 2
    assert [[c.versions for c in group] for group in groups][0][0] == [(3, sum(groups[0][0].mask))]


def test_episodes_may_have_different_numbers_of_turns(scripted):
    prompts = [user_prompt("a", "a", turns=1), user_prompt("b", "b", turns=4), user_prompt("c", "c", turns=2)]
    engine, source = scripted(turns_of(0))
    run_groups(source, groups_of(prompts, 2))
    assert [len(batch) for batch in engine.batches] == [6, 4, 2, 2]


def test_order_and_seeds_follow_the_requests(scripted):
    engine, source = scripted(turns_of(1))
    groups = run_groups(source, groups_of([user_prompt("a"), user_prompt("b")], 3))
    assert [[c.text for c in group] for group in groups] == [["s0", "s1", "s2"], ["s100", "s101", "s102"]]
    assert sorted(request.seed for request in engine.batches[0]) == [0, 1, 2, 100, 101, 102]


def test_an_episode_may_send_several_requests(scripted):
    async def episode(client, prompt, seed):
        completion = await asyncio.gather(*(client.generate(prompt.ids, turn_seed(seed, n)) for n in range(3)))
        return completion[0]

    engine, source = scripted(episode)
    run_groups(source, groups_of([user_prompt("a")], 2))
    assert [len(batch) for batch in engine.batches] == [6]


def test_sampling_waits_for_an_episode_that_waits_for_something_else(scripted):
    async def episode(client, prompt, seed):
        if seed == 1:
            await asyncio.sleep(0.05)
        return await client.generate(prompt.ids, seed)

    engine, source = scripted(episode)
    run_groups(source, groups_of([user_prompt("a")], 3))
    assert [len(batch) for batch in engine.batches] == [3]


def test_an_episode_without_a_request_does_not_delay_the_others(scripted):
    async def episode(client, prompt, seed):
        completion = await client.generate(prompt.ids, 0) if seed != 100 else None
        return completion or "nothing"

    engine, source = scripted(episode)
    groups = run_groups(source, groups_of([user_prompt("a"), user_prompt("b")], 2))
    assert groups[1][0] == "nothing" and [len(batch) for batch in engine.batches] == [3]


def test_a_failing_episode_fails_only_its_group(scripted):
    async def episode(client, prompt, seed):
        completion = await client.generate(prompt.ids, seed)
        if seed == 101:
            raise RuntimeError("no luck")
        return await client.generate(prompt.ids, turn_seed(seed, 1)) if completion else None

    engine, source = scripted(episode)
    first, second, third = source.start(groups_of([user_prompt("a"), user_prompt("b"), user_prompt("c")], 2))
    assert len(first.result()) == len(third.result()) == 2
    with pytest.raises(RuntimeError, match="no luck"):
        second.result()
    with pytest.raises(RuntimeError, match="no luck"):
        run_groups(source, groups_of([user_prompt("a"), user_prompt("b")], 2))
    assert len(run_groups(source, groups_of([user_prompt("a")], 2))[0]) == 2  # the source still works


def test_an_engine_error_reaches_every_group(scripted):
    engine, source = scripted(turns_of(1))
    engine.reply = lambda text, seed: 1 / 0
    for future in source.start(groups_of([user_prompt("a"), user_prompt("b")], 2)):
        with pytest.raises(ZeroDivisionError):
            future.result()


def test_an_interrupt_leaves_nothing_behind(scripted):
    engine, source = scripted(turns_of(2))
    reply, engine.reply = engine.reply, lambda text, seed: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        source.start(groups_of([user_prompt("a")], 2))
    engine.reply = reply
    assert len(run_groups(source, groups_of([user_prompt("a")], 2))[0]) == 2


def test_every_turn_has_its_own_limit_in_a_joint_call(scripted):
    async def episode(client, prompt, seed):
        return await client.generate(prompt.ids, seed, max_tokens=seed + 1)

    engine, source = scripted(episode)
    engine.reply = lambda text, seed: "abcdef"
    (group,) = run_groups(source, [[Request.of(user_prompt("a"), seed) for seed in (0, 3, 9)]])
    assert [c.finish_reason for c in group] == ["length", "length", "stop"]
    assert [c.text for c in group] == ["a", "abcd", "abcdef"]
    assert [(len(c.ids), len(c.logps), c.versions) for c in group] == [
        (1, 1, [(3, 1)]), (4, 4, [(3, 4)]), (7, 7, [(3, 7)])
    ]  # fmt: skip
    assert len(engine.batches) == 1


def test_a_long_turn_and_a_long_limit_are_sampled_together(scripted):
    async def episode(client, prompt, seed):
        return await client.generate(prompt.ids, seed, max_tokens=prompt.columns["limit"])

    engine, source = scripted(episode)
    prompts = [user_prompt("a", limit=80), user_prompt("a" * 60, limit=10), user_prompt("b", limit=20)]
    run_groups(source, groups_of(prompts, 1))
    assert [sorted(len(request.prompt_ids) for request in batch) for batch in engine.batches] == [[9, 9, 68]]
    assert sorted(request.max_tokens for request in engine.batches[0]) == [10, 20, 80]


def test_a_limit_below_one_is_rejected(scripted):
    async def episode(client, prompt, seed):
        return await client.generate(prompt.ids, seed, max_tokens=0)

    _, source = scripted(episode)
    with pytest.raises(ValueError, match="max_tokens=0: must be 1 or more"):
        run_groups(source, groups_of([user_prompt("a")], 1))


def test_tasks_and_threads_do_not_pile_up(scripted):
    async def episode(client, prompt, seed):
        asyncio.get_running_loop().create_task(asyncio.sleep(60))  # never awaited
        return await client.generate(prompt.ids, seed)

    _, source = scripted(episode)
    for _ in range(3):
        run_groups(source, groups_of([user_prompt("a")], 4))
        assert not asyncio.all_tasks(source._lockstep._loop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncio")]


def test_log_probs_of_several_turns_match_one_forward_pass(make_model):
    engine = LocalEngine(make_model(vocab_size=275), tiny_tokenizer())
    sampling = Sampling(max_tokens=24, stop_ids=tuple(range(0, 275, 5)))
    source = EpisodeSource(engine, sampling, turns_of(3, between=(11, 12, 13), cap=6))
    prompts = [user_prompt("ab"), user_prompt("cd")]
    for completions in run_groups(source, groups_of(prompts, 3)):
        all_logps = engine.logps([(c.prompt_ids, c.ids) for c in completions], 1.0)
        for completion, logps in zip(completions, all_logps, strict=True):
            assert len(completion.ids) == len(completion.mask) and completion.mask.count(False) == 6
            expected = [logp if flag else 0.0 for logp, flag in zip(logps, completion.mask, strict=True)]
            assert completion.logps == pytest.approx(expected, abs=1e-5)
    alone = engine.generate([Request(prompt_ids=prompts[0].ids, seed=0)], sampling)[0]
    source.close()
    first = run_groups(EpisodeSource(engine, sampling, turns_of(1)), [[Request.of(prompts[0], 0)]])[0][0]
    assert first.ids == alone.ids and first.mask is None
