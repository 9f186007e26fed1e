"""Training on samples that top-k, top-p or min-p limited: the kept ids, from the sampler to the loss."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from data.errors import UserError
from data.packing import make_batches
from rollout.engine import Completion, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.episodes.turns import Transcript
from rollout.schedule.replay import as_json, completion_of
from rollout.sets import join
from tests.entry import metrics
from trainer import cli
from trainer.__main__ import main
from trainer.policy.logps import Policy, token_logps
from trainer.rl.minibatch import completion_item
from trainer.rl.rank0_rollout import packed, unpacked

FILTERS = ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8, "min_p": 0.02})
T = 0.8


def sampled(model: Any, tokenizer: Any, growing: bool = False, **options: Any) -> list[Completion]:
    engine = LocalEngine(model, tokenizer)
    engine.choose_forward()
    engine._uses_growing_cache = growing
    prompts = [[5, 6, 7], [5, 6, 7], [3, 1, 4, 1, 5]]
    sampling = Sampling(temperature=T, max_tokens=8, for_training=True, **options)
    return engine.generate([Request(prompt_ids=p, seed=i) for i, p in enumerate(prompts)], sampling)


def kept_of(completion: Completion) -> list[list[int]]:
    parts = np.split(completion.sets, np.flatnonzero(completion.sets < 0))[1:]
    return [[i if i >= 0 else ~i for i in x.tolist()] for x in parts]


@pytest.mark.parametrize("growing", [False, True])
def test_engines_record_what_the_filters_keep(make_model, tokenizer, growing):
    model = make_model(vocab_size=101).eval()
    for filters in FILTERS[1 + growing :]:
        for completion in sampled(model, tokenizer, growing, **filters):
            with torch.no_grad():
                z = model(torch.tensor([completion.prompt_ids + completion.ids])).logits[0].double() / T
            rows = z[len(completion.prompt_ids) - 1 : -1].softmax(dim=1)
            for row, kept, token, logp in zip(rows, kept_of(completion), completion.ids, completion.logps, strict=True):
                ranked, order = row.sort(descending=True)
                assert kept[0] == token and {*kept} == {*order[: len(kept)].tolist()}
                assert logp == pytest.approx(float((row[token] / row[kept].sum()).log()), abs=1e-5)
                ranked = ranked[: filters.get("top_k")]
                most = int((ranked.cumsum(0) - ranked < filters.get("top_p", 1.0) * ranked.sum()).sum())
                most = min(most, int((ranked >= filters.get("min_p", 0.0) * ranked[0]).sum()))
                assert len(kept) == most
    assert sampled(model, tokenizer, growing)[0].sets is None


def test_stop_strings_cut_sets_and_other_lengths_do_not_change_them(make_model, tokenizer):
    model = make_model()
    plain = sampled(model, tokenizer, top_k=4)
    text = tokenizer.decode(plain[0].ids[3:5])
    for stopped, whole in zip(sampled(model, tokenizer, top_k=4, stop=(text,)), plain, strict=True):
        assert stopped.ids == whole.ids[: len(stopped.ids)] and kept_of(stopped) == kept_of(whole)[: len(stopped.ids)]
    assert len(sampled(model, tokenizer, top_k=4, stop=(text,))[0].ids) < 8


@pytest.mark.parametrize("growing", [False, True])
def test_a_continued_completion_has_the_sets_of_an_unbroken_one(make_model, tokenizer, growing):
    engine = LocalEngine(make_model(), tokenizer)
    engine.choose_forward()
    engine._uses_growing_cache = growing
    sampling = Sampling(temperature=T, max_tokens=8, for_training=True, top_k=4)
    request = Request(prompt_ids=[5, 6, 7], seed=3)
    whole = engine.generate([request], sampling)[0]
    assert len(whole.ids) == 8
    begun = replace(
        whole, ids=whole.ids[:3], logps=whole.logps[:3], versions=[(0, 3)], sets=join([whole.sets], 3),
        finish_reason="unfinished",
    )  # fmt: skip
    again = engine.generate([replace(request, so_far=begun)], sampling)[0]
    assert again.ids == whole.ids and np.array_equal(again.sets, whole.sets)


def test_sets_above_the_limit_are_rejected(make_model, tokenizer):
    wide = make_model(vocab_size=1300, initializer_range=0.02)  # close to uniform
    with pytest.raises(UserError, match=r"token \d+ of a completion: .*1,025 ids or more .*1,024.*--top-k to 1024"):
        sampled(wide, tokenizer, top_p=0.95)
    assert len(kept_of(sampled(wide, tokenizer, top_p=0.95, top_k=1024)[0])) == 8
    with pytest.raises(UserError, match="top_k=1025: .*1,024"):
        sampled(wide, tokenizer, top_k=1025)


def policy_of(model: Any) -> Policy:
    return Policy(model=model, tokenizer=None, source="", device=torch.device("cpu"), compute_dtype=torch.float32)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_trainer_computes_the_samplers_log_probs(make_model, tokenizer, filters):
    """In any packing, with the same gradient; over the whole vocabulary they would be lower."""
    model = make_model("qwen3")
    completions = sampled(model, tokenizer, **filters)
    policy, items, results = policy_of(model), [completion_item(c) for c in completions], []
    for layout in (
        {"max_tokens": 1000, "share_prompt": True},
        {"max_tokens": 14},
        {"max_tokens": 40, "packing": False},
    ):
        model.zero_grad()
        logps: dict[int, list[float]] = {}
        for batch in make_batches(items, **layout):
            out = token_logps(policy, batch, temperature=T)
            (out.logp * torch.cos(batch.target + 1.0) + 0.1 * out.entropy).sum().backward()
            logps |= {i: out.logp[batch.sequence == i].tolist() for i in batch.rows}
        results.append([p.grad.clone() for p in model.parameters()])
        for i, completion in enumerate(completions):
            assert logps[i] == pytest.approx(completion.logps, abs=2e-5)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    (whole,) = make_batches([x.__class__(x.ids, x.mask, x.prompt_length) for x in items], max_tokens=1000)
    full = token_logps(policy, whole, temperature=T).logp.mean()
    assert full < sum(map(sum, logps.values())) / len(whole.target) - 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_captured_steps_record_sets(make_model, tokenizer, filters):
    """On a GPU, where a step is a CUDA graph: uneven sets and lengths, several host syncs, two calls."""
    torch.set_float32_matmul_precision("highest")
    model = make_model("qwen3").cuda()
    engine = LocalEngine(model, tokenizer)
    sampling = Sampling(temperature=T, max_tokens=80, for_training=True, stop_ids=(3, 30), **filters)
    policy = replace(policy_of(model), device=torch.device("cuda"))
    for seed in (0, 1000):
        requests = [Request(prompt_ids=[5, 6, 7 + i % 3], seed=seed + i) for i in range(70)]
        completions = engine.generate(requests, sampling)
        for batch in make_batches([completion_item(c) for c in completions], max_tokens=2000, share_prompt=True):
            logp = token_logps(policy, batch.to("cuda"), temperature=T).logp.tolist()
            assert logp == pytest.approx([x for row in batch.rows for x in completions[row].logps], abs=1e-4)
        assert engine.generate(requests[:3], replace(sampling, for_training=False, min_p=0.0))[0].sets is None


def test_sets_travel_with_completions():
    sets = np.array([~4, 9, 8, ~5, ~6, 1, ~7, 2], np.int32)
    plain = dict(prompt_ids=[1], ids=[4, 5, 6, 7], logps=[-1.0] * 4, finish_reason="stop", text="", versions=[(0, 4)])
    for completion in (Completion(**plain, sets=sets), Completion(**plain)):
        sent = unpacked(pickle.loads(pickle.dumps(packed(completion))), [1])
        saved = completion_of(json.loads(json.dumps(as_json(completion))))
        for got in (sent, saved):
            assert np.array_equal(got.sets, completion.sets) if completion.sets is not None else got.sets is None
    old = as_json(completion)
    del old["sets"]
    assert completion_of(old).sets is None
    transcript = Transcript([1])
    transcript.add(Completion(**plain | {"ids": [4, 5], "logps": [-1.0] * 2}, sets=sets[:4]))
    transcript.insert([3, 3])
    transcript.add(Completion(**plain | {"prompt_ids": [1, 4, 5, 3, 3], "ids": [6], "logps": [0.0]}, sets=sets[4:6]))
    episode = transcript.completion("stop", text="")
    assert episode.sets.tolist() == sets[:6].tolist()
    (batch,) = make_batches([completion_item(episode), completion_item(Completion(**plain, sets=sets))], max_tokens=99)
    assert batch.candidates[:, 0].tolist() == batch.target.tolist()
    first = batch.candidates[batch.sequence == 0].tolist()
    assert first == [[4, 9, 8], [5, -1, -1], [6, 1, -1]]
    assert join([], 3) is None


def test_two_steps_of_grpo_are_on_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(
        ["--method", "grpo", "--max-steps", "2", "--seed", "5", "--per-device-train-batch-size", "16", "--top-k", "5",
         "--data", "task:addition:split=train,size=64", "--top-p", "0.9", "--min-p", "0.1", "--temperature", "0.8",
         "--learning-rate", "1e-3", "--beta", "0.1", "--save-steps", "0", "--output-dir", "run"]
    )  # fmt: skip
    for row in metrics(tmp_path / "run"):
        assert row["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert row["policy/behaviour_gap"] < 2e-6 and row["policy/behaviour_ratio"] == pytest.approx(1.0, abs=1e-6)


GRPO = ["--method", "grpo", "--model", "m", "--data", "d", "--reward-funcs", "length"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*GRPO, "--top-k", "1025"], "top_k=1025: .*1,024"),
        ([*GRPO, "--top-p", "0"], "top_p=0"),
        ([*GRPO, "--min-p", "1"], "min_p=1"),
        ([*GRPO, "--top-p", "0.9", "--rollout-func", "my.function"], "top_p=0.9: .*rollout_func=my.function"),
        (["--method", "opd", "--model", "m", "--data", "d", "--teacher", "t", "--top-k", "9"], "top_k=9: .*opd"),
    ],
)
def test_settings_that_cannot_work_are_rejected(argv, message):
    with pytest.raises((UserError, SystemExit), match=message):
        cli.parse(argv)
    cfg = cli.parse([*GRPO, "--top-k", "50", "--top-p", "0.9", "--min-p", "0.05"])[1]
    assert (cfg.top_k, cfg.top_p, cfg.min_p) == (50, 0.9, 0.05)
