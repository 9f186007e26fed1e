"""Episodes for prompts with a target: single turns, limits by the target's length, later turns."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from data.rows.targets import load_targets
from data.types import TargetPrompt
from rollout.engine import EngineSource, Request, Sampling, run_groups
from rollout.engines.local import LocalEngine
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.target import TargetEpisode, later_turns, turn_lengths
from rollout.episodes.turns import turn_seed
from tests.rollout.scripted_engine import TINY, ScriptedEngine, tiny_tokenizer

STOP = tiny_tokenizer().eos_token_id


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CHAT = [user("2+2="), assistant("4"), user("and"), user("3+3="), assistant("six"), user("0+0="), assistant("")]


@pytest.fixture
def conversation(tmp_path):
    """Return a target of three turns with the given last answer."""

    def make(last="0", **lengths) -> TargetPrompt:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [*CHAT[:-1], assistant(last)]}) + "\n")
        specs = [str(tmp_path / "rows.jsonl")]
        (prompt,) = load_targets(specs, tiny_tokenizer(), data_format="ebft_chat_multiturn.transform", **lengths)
        return prompt

    return make


def single(length, source="rows.jsonl:1"):
    ids = tiny_tokenizer()("2+2=", add_special_tokens=False)["input_ids"]
    return TargetPrompt(source=source, prompt="2+2=", ids=ids, target_ids=[*[40] * (length - 1), STOP])


def play(engine, episode, prompts, *, max_tokens, copies=1):
    source = EpisodeSource(engine, Sampling(max_tokens=max_tokens, stop_ids=(STOP,)), episode)
    try:
        return run_groups(source, [[Request.of(prompt, 7 + n) for n in range(copies)] for prompt in prompts])
    finally:
        source.close()


def answers(*texts):
    """Return an engine that gives these answers, by number of turns in the prompt."""
    return ScriptedEngine(lambda text, seed: texts[text.count("<|im_start|>assistant") - 1])


@pytest.fixture(scope="module")
def tiny_engine():
    from transformers import AutoModelForCausalLM

    return LocalEngine(AutoModelForCausalLM.from_pretrained(TINY).eval(), tiny_tokenizer())


def test_one_turn_is_bit_identical_to_the_engine_sample(tiny_engine):
    prompts = load_targets(["task:addition:size=6"], tiny_tokenizer(), max_completion_length=8)
    groups = [[Request.of(prompt, 100 * n + copy) for copy in range(3)] for n, prompt in enumerate(prompts)]
    sampling = Sampling(max_tokens=8, stop_ids=(STOP,))
    expected = run_groups(EngineSource(tiny_engine, sampling), groups)
    for multiplier in (None, 1.5):  # a limit of 64 or more has no effect here
        source = EpisodeSource(tiny_engine, sampling, TargetEpisode(tiny_tokenizer(), gt_length_multiplier=multiplier))
        assert run_groups(source, groups) == expected
        source.close()
    assert len({tuple(one.ids) for group in expected for one in group}) > 6


def test_a_limit_truncates_the_same_sample(tiny_engine):
    """At a high temperature completions are long: a target of 50 tokens allows 75, a target of 2 allows 64."""
    prompts = [single(50, "rows.jsonl:1"), single(2, "rows.jsonl:2"), single(200, "rows.jsonl:3")]
    groups = [[Request.of(prompt, n)] for n, prompt in enumerate(prompts)]
    sampling = Sampling(max_tokens=80, temperature=9.0)
    whole = run_groups(EngineSource(tiny_engine, sampling), groups)
    source = EpisodeSource(tiny_engine, sampling, TargetEpisode(tiny_tokenizer(), gt_length_multiplier=1.5))
    cut = run_groups(source, groups)
    source.close()
    assert [[len(one.ids) for one in group] for group in cut] == [[75], [64], [80]]
    for full, part in zip(sum(whole, []), sum(cut, []), strict=True):
        assert part.ids == full.ids[: len(part.ids)]
        assert part.logps == pytest.approx(full.logps[: len(part.ids)], abs=1e-5)
        assert part.finish_reason == "length"


def test_limits_by_hand():
    for length, multiplier, max_tokens, expected in [
        (50, 1.5, 256, 75),
        (51, 1.5, 256, 76),
        (50, 1.5, 70, 70),
        (2, 1.5, 256, 64),
        (2, 1.5, 9, 9),
        (200, 1.5, 256, 256),
        (100, 0.5, 256, 64),
        (200, 0.5, 256, 100),
        (2, None, 256, 256),
    ]:
        engine = ScriptedEngine(lambda text, seed: "x" * 400)
        episode = TargetEpisode(tiny_tokenizer(), gt_length_multiplier=multiplier)
        ((completion,),) = play(engine, episode, [single(length)], max_tokens=max_tokens)
        assert len(completion.ids) == expected and completion.finish_reason == "length"
        assert completion.mask is None and completion.messages is None and completion.columns == {}


def test_a_model_that_repeats_the_data_produces_the_target(conversation):
    prompt = conversation("0")
    engine = answers("4", "six", "0")
    ((one, other),) = play(engine, TargetEpisode(tiny_tokenizer()), [prompt], max_tokens=256, copies=2)
    assert one.prompt_ids == prompt.ids
    assert one.ids == other.ids == prompt.target_ids
    assert one.mask == prompt.target_mask and [logp == 0.0 for logp in one.logps] == [not flag for flag in one.mask]
    assert (one.finish_reason, one.text, one.columns) == ("stop", "0", {"num_turns": 3})
    assert one.messages == [*CHAT[1:-1], assistant("0")]
    assert one.versions == [(3, sum(one.mask))]
    seeds = [sorted(request.seed for request in batch) for batch in engine.batches]
    assert seeds == [sorted(turn_seed(seed, turn) for seed in (7, 8)) for turn in range(3)]


def test_the_user_turns_follow_any_answer(conversation):
    engine = answers("five", "no", "dunno")
    ((completion,),) = play(
        engine, TargetEpisode(tiny_tokenizer(), gt_length_multiplier=1.5), [conversation()], max_tokens=256
    )
    assert tiny_tokenizer().decode(completion.ids) == (
        "five<|im_end|>\n<|im_start|>user\nand<|im_end|>\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n"
        "no<|im_end|>\n<|im_start|>user\n0+0=<|im_end|>\n<|im_start|>assistant\ndunno<|im_end|>"
    )
    sampled = [token for token, flag in zip(completion.ids, completion.mask, strict=True) if flag]
    assert tiny_tokenizer().decode(sampled) == "five<|im_end|>no<|im_end|>dunno<|im_end|>"
    assert completion.messages == [assistant("five"), *CHAT[2:4], assistant("no"), CHAT[5], assistant("dunno")]


def test_a_truncated_turn_ends_the_episode(conversation):
    prompt = conversation()
    engine = answers("4", "x" * 99, "0")
    ((completion,),) = play(engine, TargetEpisode(tiny_tokenizer(), gt_length_multiplier=1.5), [prompt], max_tokens=256)
    start = prompt.target_mask.index(True, prompt.target_mask.index(False))  # of the second turn
    assert completion.finish_reason == "length" and len(completion.ids) == start + 64
    assert completion.columns == {"num_turns": 2} and completion.text == "x" * 64
    assert completion.messages == [assistant("4"), *CHAT[2:4], assistant("x" * 64)]
    assert len(engine.batches) == 2


@pytest.mark.parametrize("left", [-1, 0, 1, 3])
def test_the_episode_limit_includes_user_turns(conversation, left):
    """max_tokens leaves `left` tokens for the second answer, `six` and its end token."""
    prompt = conversation()
    start = prompt.target_mask.index(True, prompt.target_mask.index(False))
    ((completion,),) = play(
        answers("4", "six", "0"), TargetEpisode(tiny_tokenizer()), [prompt], max_tokens=start + left
    )
    assert completion.finish_reason == "length"
    expected = prompt.target_ids[: start + left] if left > 0 else prompt.target_ids[:2]
    assert completion.ids == expected and completion.columns == {"num_turns": 2 if left > 0 else 1}
    assert completion.mask == (prompt.target_mask[: len(expected)] if left > 0 else None)


def test_every_turn_is_limited_by_its_own_target(conversation):
    prompt = conversation("0" * 79)
    assert turn_lengths(prompt) == [2, 4, 80]
    ((completion,),) = play(
        answers("4", "six", "y" * 300), TargetEpisode(tiny_tokenizer(), gt_length_multiplier=1.25), [prompt],
        max_tokens=256,
    )  # fmt: skip
    assert completion.text == "y" * 100 and completion.columns == {"num_turns": 3}


def test_a_truncated_target_has_fewer_turns(conversation):
    whole = conversation()
    second = whole.target_mask.index(True, whole.target_mask.index(False))
    prompt = conversation(max_completion_length=second + 4)
    assert turn_lengths(prompt) == [2, 4]
    ((completion,),) = play(answers("4", "six", "0"), TargetEpisode(tiny_tokenizer()), [prompt], max_tokens=256)
    assert completion.ids == prompt.target_ids and (completion.finish_reason, completion.columns) == (
        "stop",
        {"num_turns": 2},
    )


def test_later_turns_lists_the_user_messages_before_each_answer():
    assert later_turns([]) == [] == later_turns([user("a")])
    assert later_turns(CHAT[2:]) == [[user("and"), user("3+3=")], [user("0+0=")]]


def test_target_episode_rejects(conversation):
    with pytest.raises(ValueError, match="^gt_length_multiplier=0"):
        TargetEpisode(tiny_tokenizer(), gt_length_multiplier=0)
    engine = answers("4", "six", "0")
    engine.tokenizer = bare = type(tiny_tokenizer()).from_pretrained(TINY)
    bare.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="^chat_template: .*special token"):
        play(engine, TargetEpisode(bare), [conversation()], max_tokens=256)
    single_turn = replace(conversation(), columns={}, target_mask=None)
    ((completion,),) = play(engine, TargetEpisode(bare), [single_turn], max_tokens=256)  # works with any template
    assert completion.text == "4"


def test_prompt_settings_apply_to_later_turns(conversation):
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (style or '') }}{% endif %}"
    )
    prompt = replace(conversation(), settings={"style": "!"})
    ((completion,),) = play(answers("4", "6", "0"), TargetEpisode(tokenizer), [prompt], max_tokens=200)
    assert tokenizer.decode(completion.ids).split("<|im_start|>assistant\n")[1:] == [
        "!6<|im_end|>\n<|im_start|>user\n0+0=<|im_end|>\n", "!0<|im_end|>"
    ]  # fmt: skip
