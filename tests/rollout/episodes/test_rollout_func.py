"""A user function that samples instead of the engine: the three signatures, and checks of their results."""

from __future__ import annotations

import pytest
import torch

from data.types import Prompt
from rollout.engine import Request, Sampling, run_groups
from rollout.engines.local import LocalEngine
from rollout.episodes.rollout_func import RolloutFunction, kind_of
from tests.rollout.scripted_engine import tiny_tokenizer, user_prompt

SAMPLING = Sampling(max_tokens=12, stop_ids=(2,), for_training=True)
FUNCTIONS = """
import random
import torch
from dataclasses import replace

SEEN = {}


def batch(prompts, trainer):
    SEEN.update(prompts=prompts, args=vars(trainer.args), step=trainer.state.global_step, model=trainer.model)
    tokenizer = trainer.processing_class
    ids = [
        tokenizer(tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True))["input_ids"]
        for p in prompts
    ]
    made = trainer.generate(ids, max_tokens=6)
    return {
        "prompt_ids": [c.prompt_ids for c in made],
        "completion_ids": [[*c.ids, 50, 51] for c in made],
        "logprobs": [[*c.logps, -9.0, -9.0] for c in made],
        "env_mask": [[1] * len(c.ids) + [0, 0] for c in made],
        "env_reward": [float(i) for i in range(len(made))],
    }


def without_logprobs(prompts, trainer):
    made = batch(prompts, trainer)
    del made["logprobs"]
    return made


def texts(model, processing_class, prompts, generation_config=None):
    SEEN.update(prompts=prompts, config=generation_config, training=model.training, grad=torch.is_grad_enabled())
    SEEN["draw"] = torch.rand(1).item()
    return ["twelve", "a" * 40, "", "7"][: len(prompts)]


def documented(model, processing_class, prompts, generation_config=None):
    SEEN["prompt"] = prompts[0]
    messages = prompts[0].get("messages", [])
    SEEN["written"] = processing_class.apply_chat_template(
        messages, processing_class=False, add_generation_prompt=True
    )
    SEEN["ids"] = list(processing_class(SEEN["written"])["input_ids"])
    return ["7" for _ in prompts]


async def episode(client, prompt, seed):
    made = await client.generate(prompt.ids, seed, max_tokens=5)
    return replace(made, columns={"turns": 1})


async def as_dict(client, prompt, seed):
    made = await client.generate(prompt.ids, seed, max_tokens=5)
    return {"completion_ids": made.ids, "logprobs": made.logps, "score": 2.0}


class Callable:
    async def __call__(self, client, prompt, seed):
        return await client.generate(prompt.ids, seed)


callable_object = Callable()
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "rollouts.py"
    path.write_text(FUNCTIONS)
    return lambda name: RolloutFunction(f"{path}:{name}")


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=275, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3)
    )  # fmt: skip


@pytest.fixture
def engine(model):
    engine = LocalEngine(model, tiny_tokenizer())
    engine.load(5)
    return engine


def jobs(*texts: str, copies: int = 2) -> list[list[Request]]:
    return [
        [Request.of(user_prompt(text, f"rows.jsonl:{i + 1}"), 10 * i + c) for c in range(copies)]
        for i, text in enumerate(texts)
    ]


def check_logps(engine, completions, temperature=1.0):
    all_logps = engine.logps([(c.prompt_ids, c.ids) for c in completions], temperature)
    for completion, logps in zip(completions, all_logps, strict=True):
        mask = completion.mask or [True] * len(completion.ids)
        expected = [logp if flag else 0.0 for logp, flag in zip(logps, mask, strict=True)]
        assert completion.logps == pytest.approx(expected, abs=1e-5)


def test_the_trl_signature_returns_tokens_masks_and_columns(functions, engine):
    function = functions("batch")
    groups = run_groups(function.source(engine, SAMPLING, num_generations=2), jobs("a", "b"))
    made = [c for group in groups for c in group]
    assert function.kind == "batch" and [len(group) for group in groups] == [2, 2]
    assert [c.columns for c in made] == [{"env_reward": float(i)} for i in range(4)]
    assert all(c.mask == [True] * (len(c.ids) - 2) + [False] * 2 and c.logps[-2:] == [0.0, 0.0] for c in made)
    assert all(c.versions == [(5, c.trained)] and c.finish_reason == "stop" for c in made)
    check_logps(engine, made)
    seen = function.call.__globals__["SEEN"]
    assert seen["prompts"] == [[{"role": "user", "content": text}] for text in "aabb"]
    assert seen["args"] == dict(
        max_completion_length=12, temperature=1.0, top_p=1.0, top_k=0, num_generations=2
    ) and seen["step"] == 5  # fmt: skip
    assert len({tuple(c.ids) for c in made}) == 4  # each copy of a prompt has its own seed
    again = run_groups(function.source(engine, SAMPLING, num_generations=2), jobs("a", "b"))
    assert again == groups


def test_the_axolotl_signature_gets_dicts_and_a_tokenizer_that_accepts_processing_class(functions, engine):
    """axolotl's example writes processing_class=False for tokenize=False; the run's tokenizer is unchanged."""
    function = functions("documented")
    original = engine.tokenizer.apply_chat_template
    (group,) = run_groups(function.source(engine, SAMPLING), jobs("ab", copies=1))
    assert group[0].text == "7"
    seen = function.call.__globals__["SEEN"]
    assert seen["written"] == engine.tokenizer.decode(user_prompt("ab").ids)
    assert seen["ids"] == user_prompt("ab").ids
    assert engine.tokenizer.apply_chat_template == original
    plain = Prompt(source="rows.jsonl:1", prompt="2+2=", ids=[50], columns={"answer": "4"})
    function.source(engine, SAMPLING).start([[Request.of(plain, 0)]])
    turn = [{"role": "user", "content": "2+2="}]
    assert seen["prompt"] == {"answer": "4", "prompt": "2+2=", "messages": turn}


def test_missing_log_probs_are_computed_at_the_run_temperature(functions, engine):
    sampling = Sampling(max_tokens=12, stop_ids=(2,), temperature=0.7, for_training=True)
    (group,) = run_groups(functions("without_logprobs").source(engine, sampling), jobs("a"))
    check_logps(engine, group, temperature=0.7)
    assert "retokenised" not in group[0].columns


def test_texts_are_encoded_once_and_get_log_probs(functions, engine, model):
    function = functions("texts")
    model.train()
    (group,) = run_groups(function.source(engine, SAMPLING), jobs("ab", copies=4))
    tokenizer = tiny_tokenizer()
    assert function.kind == "texts" and model.training
    assert tokenizer.decode(group[0].ids) == "twelve<|im_end|>" and group[0].finish_reason == "stop"
    assert group[1].ids == tokenizer("a" * 12)["input_ids"] and group[1].finish_reason == "length"
    assert group[1].text == "a" * 12 and group[2].ids == [2]
    assert all(c.prompt_ids == user_prompt("ab").ids and c.columns == {"retokenised": 1.0} for c in group)
    check_logps(engine, group)
    seen = function.call.__globals__["SEEN"]
    assert seen["training"] is False and seen["grad"] is False
    messages = [{"role": "user", "content": "ab"}]
    assert seen["prompts"] == [{**user_prompt("ab").columns, "prompt": messages, "messages": messages}] * 4
    assert seen["config"].max_new_tokens == 12 and seen["config"].eos_token_id == [2] and seen["config"].do_sample
    draw = seen["draw"]
    run_groups(function.source(engine, SAMPLING), jobs("ab", copies=4))
    assert seen["draw"] == draw  # a resumed run draws the same


def test_the_async_signature_runs_one_episode_per_request(functions, engine):
    function = functions("episode")
    groups = run_groups(function.source(engine, SAMPLING), jobs("a", "b"))
    assert function.kind == "episode"
    check_logps(engine, [c for group in groups for c in group])
    assert all(c.columns == {"turns": 1} and len(c.ids) <= 5 for group in groups for c in group)
    dicts = run_groups(functions("as_dict").source(engine, SAMPLING), jobs("a", "b"))
    assert [[c.ids for c in group] for group in dicts] == [[c.ids for c in group] for group in groups]
    assert dicts[0][0].columns == {"score": 2.0} and dicts[0][0].versions == [(5, len(dicts[0][0].ids))]
    assert functions("callable_object").kind == "episode"


def test_without_requests_the_function_is_not_called(functions, engine):
    assert run_groups(functions("texts").source(engine, SAMPLING), []) == []


def f1(prompts, trainer=None): ...
def f2(prompts, trainer, *, extra=1): ...
def f3(model, processing_class, prompts): ...
async def f4(a, b, c, more=1): ...
def g0(): ...
def g1(prompts): ...
def g2(prompts, args, processing_class): ...
def g3(model, prompts): ...
def g4(client, prompt, seed): ...
async def g5(prompts, trainer): ...  # fmt: skip


def test_the_signature_decides_the_kind():
    for call, kind in [(f1, "batch"), (f2, "batch"), (f3, "texts"), (f4, "episode")]:
        assert kind_of(call, "rollout_func=f") == kind
    for call in [g0, g1, g2, g3, g4, g5]:
        with pytest.raises(ValueError, match=r"rollout_func=f: .*def fn\(prompts, trainer\), "):
            kind_of(call, "rollout_func=f")


GOOD = {"prompt_ids": [[5, 6]], "completion_ids": [[7, 2]], "logprobs": [[-1.0, -2.0]]}


def test_return_values_are_checked(functions, engine):
    async def episode(client, prompt, seed):
        return returned

    calls = {
        "batch": lambda prompts, trainer: returned,
        "texts": lambda model, processing_class, prompts: returned,
        "episode": episode,
    }
    for name, returned, message in [  # noqa: B007
        ("batch", [1], "returned list; "),
        ("batch", {"prompt_ids": [[1]]}, "'completion_ids'"),
        ("batch", {**GOOD, "completion_ids": [[7, 2]] * 2}, r"completion_ids=a list of 2: .*\(1\)"),
        ("batch", {**GOOD, "score": 3.0}, r"score=3.0: .*\(1\)"),
        ("batch", {**GOOD, "completion_ids": ["ab"]}, "rows.jsonl:1: completion_ids='ab'"),
        ("batch", {**GOOD, "completion_ids": [[7, 2.0]]}, "rows.jsonl:1: completion_ids=a list of 2"),
        ("batch", {**GOOD, "completion_ids": [[7, 275]]}, "rows.jsonl:1: completion_ids contains 275, .*275 tokens"),
        ("batch", {**GOOD, "completion_ids": [[]], "logprobs": [[]]}, "rows.jsonl:1: .*no tokens"),
        ("batch", {**GOOD, "completion_ids": [[7] * 13]}, "13 completion_ids .* max_completion_length=12"),
        ("batch", {**GOOD, "logprobs": [[-1.0]]}, "rows.jsonl:1: 1 logprobs for 2 completion_ids"),
        ("batch", {**GOOD, "logprobs": [[-1.0, float("nan")]]}, "logprobs is not a list of finite"),
        ("batch", {**GOOD, "logprobs": [[-1.0, [-2.0]]]}, "logprobs is not a list of finite"),
        ("batch", {**GOOD, "env_mask": [[1]]}, "rows.jsonl:1: 1 env_mask for 2 completion_ids"),
        ("batch", {**GOOD, "env_mask": [[1, 2]]}, "env_mask is not a list of 0 and 1"),
        ("batch", {**GOOD, "finish_reason": ["done"]}, "finish_reason='done'"),
        ("batch", {**GOOD, "completions": ["x"]}, "'completions'"),
        ("texts", "abc", r"completions='abc': .*\(1\)"),
        ("texts", [3], "returned 3 for rows.jsonl:1"),
        ("texts", ["x<|im_end|>y"], "rows.jsonl:1: the response: "),
        ("episode", "abc", "rows.jsonl:1: returned str; "),
        ("episode", {"completion_ids": [7]}, "rows.jsonl:1: no logprobs"),
    ]:
        function = functions(name)
        function.call = calls[name]
        with pytest.raises(ValueError, match=message):
            run_groups(function.source(engine, SAMPLING), jobs("a", copies=1))


@pytest.mark.parametrize("name", ["batch", "episode"])
def test_an_exception_is_reported_with_the_function_and_the_rows(tmp_path, engine, name):
    signature = {"batch": "def f(prompts, trainer):", "episode": "async def f(client, prompt, seed):"}[name]
    path = tmp_path / "bad.py"
    path.write_text(f"{signature}\n    raise KeyError('oops')\n")
    function = RolloutFunction(f"{path}:f")
    with pytest.raises(ValueError, match=r"bad.py:f: KeyError: 'oops' on .*rows.jsonl:1.* \(bad.py, line 2\)"):
        run_groups(function.source(engine, SAMPLING), jobs("a"))


def test_numpy_and_torch_values_are_converted_to_lists(functions, engine):
    import numpy

    function = functions("batch")
    function.call = lambda prompts, trainer: {
        "prompt_ids": torch.tensor([[5, 6]]), "completion_ids": numpy.array([[7, 8]]), "logprobs": (numpy.zeros(2),)
    }  # fmt: skip
    ((completion,),) = run_groups(function.source(engine, SAMPLING), jobs("a", copies=1))
    assert (completion.prompt_ids, completion.ids, completion.logps) == ([5, 6], [7, 8], [0.0, 0.0])
    assert completion.finish_reason == "length"  # no end token


def test_texts_are_rendered_with_the_prompt_settings(functions, engine):
    from dataclasses import replace

    from data.chat import render_prompt

    prompt = user_prompt("ab")
    tokenizer = engine.tokenizer
    plain = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ greeting or '' }}" + plain
        settings = {"greeting": "hello "}
        prompt = replace(prompt, ids=render_prompt(tokenizer, prompt.prompt, settings=settings), settings=settings)
        (group,) = run_groups(functions("texts").source(engine, SAMPLING), [[Request.of(prompt, 1)]])
        assert group[0].prompt_ids == prompt.ids and tokenizer.decode(group[0].ids) == "twelve<|im_end|>"
    finally:
        tokenizer.chat_template = plain
