"""Online DPO: which pairs a group gives, their gradient by other ways, runs with rewards and with a judge, refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.types import Pair, Prompt
from losses.advantage import GroupRewards, weighted_sum
from losses.preference import PairScores, dpo_loss
from rollout.engine import Completion, Group
from tests.entry import metrics, repeatable
from tests.ranks.worker import ids, make_policy
from tests.second_device import second_device
from trainer import cli
from trainer.__main__ import main
from trainer.config.blocks import DataConfig, ModelConfig, PromptConfig, RunConfig
from trainer.methods import dpo, online_dpo
from trainer.offline.pairs import pack_pairs, pair_items
from trainer.offline.pairs_of_groups import pair_up, sides
from trainer.policy.logps import Policy
from trainer.policy.reference import Reference
from trainer.rl.groups import GroupBatch

NAN = float("nan")


def made(num_tokens: int = 2, *, prompt: int = 2, cut: bool = False, mask: list[bool] | None = None, seed: int = 0):
    rng = random.Random(seed)
    return Completion(
        prompt_ids=ids(rng, prompt), ids=ids(rng, num_tokens), logps=[-1.0] * num_tokens, text="", versions=[],
        finish_reason="length" if cut else "stop", mask=mask,
    )  # fmt: skip


def side_of(values: list[list[list[float]]], weights: list[float], completions: Any = None, **options: Any) -> list:
    rewards, weight = torch.tensor(values), torch.tensor(weights)
    completions = completions or [made() for _ in range(rewards.shape[0] * rewards.shape[1])]
    defaults = {"judged": False, "missing_eos_penalty": 0.0}
    r = GroupRewards(rewards, weight, weighted_sum(rewards, weight), completions, lambda x: x)
    return sides(r, **defaults | options).tolist()


def test_the_best_of_a_group_against_its_worst():
    """By the weighted sum; the first of several equals; a tie, and a group with fewer than two rewards, has no pair."""
    one = [[[0.2], [0.9], [0.1], [0.9]], [[1.0]] * 4, [[NAN], [0.5], [0.7], [NAN]], [[NAN], [0.5], [NAN], [NAN]]]
    assert side_of(one, [1.0]) == [[0, 1, -1, 0], [0] * 4, [0, -1, 1, 0], [0] * 4]
    assert side_of(one, [-1.0])[0] == [0, -1, 1, 0]
    two = [[[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]]]
    assert side_of(two, [1.0, 0.0]) == [[1, -1, 0]] and side_of(two, [1.0, 1.0]) == [[-1, 1, 0]]
    assert side_of(two, [1.0, 0.0], judged=True) == [[-1, 1, 0]]  # the last column is the judge's


def test_completions_that_are_cut_off_or_not_the_models_own():
    cut = [made(), made(cut=True), made()]
    assert side_of([[[1.0], [1.0], [1.0]]], [1.0], cut) == [[0, 0, 0]]
    assert side_of([[[1.0], [1.0], [1.0]]], [1.0], cut, missing_eos_penalty=0.5) == [[1, -1, 0]]
    assert side_of([[[1.0], [1.6], [1.2]]], [1.0], cut, missing_eos_penalty=0.5) == [[-1, 0, 1]]
    foreign = [made(mask=[False, False]), made(), made()]
    assert side_of([[[9.0], [1.0], [2.0]]], [1.0], foreign) == [[0, -1, 1]]


def test_loss_and_gradient_of_trl():
    """TRL 1.16's OnlineDPOTrainer.training_step on the same numbers, its model and generation replaced by tensors. It
    pairs the first half of a batch with the second, trains on ties too, and has IPO's loss on sums, ours is per token.
    """
    logp = -(torch.arange(24, dtype=torch.float64).remainder(7) + 1).view(6, 4) / 8
    ref = -(torch.arange(24, dtype=torch.float64).remainder(5) + 1).view(6, 4) / 4
    there = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    reward = torch.tensor([[0.5, 0.2], [0.1, 0.8], [0.9, 0.3]])  # of completions 0 and 3, 1 and 4, 2 and 5
    side = torch.tensor(side_of(reward.unsqueeze(-1).tolist(), [1.0])).T.flatten()  # (6,)
    chosen, rejected = ([p + 3 * int(side[p] != sign) for p in range(3)] for sign in (1, -1))
    logp.requires_grad_()
    sums = [(x * there).sum(1)[rows] for x in (logp, ref) for rows in (chosen, rejected)]
    lengths = [there.sum(1)[rows] for rows in (chosen, rejected)]
    out = dpo_loss(PairScores(*sums, *lengths), ("sigmoid",), (1.0,), beta=0.3)
    loss = out.terms["sigmoid"].sum / 3
    loss.backward()
    assert loss.item() == pytest.approx(0.5564011751331724, abs=1e-12)
    of_each = torch.tensor([-0.05, 0.04164168844827247, -0.035434369377420456, 0.05, -0.04164168844827247,
                            0.035434369377420456], dtype=torch.float64)  # fmt: skip
    torch.testing.assert_close(logp.grad, of_each.unsqueeze(1) * there, rtol=0, atol=1e-12)
    reward_w, count = out.metrics["reward/chosen"]
    assert float(reward_w / count) == pytest.approx(0.3875) and float(out.metrics["reward/accuracy"][0]) == 2


# One step, by other ways.


def config(**options: Any) -> online_dpo.Config:
    run = RunConfig(max_tokens_per_micro_batch=40, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    return online_dpo.Config(model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=run, **options)


def groups(masks: bool = False) -> list[Group]:
    """Four of four, the third a tie. masks: turns of an environment, and a prompt for each completion."""
    rng = random.Random(3)
    found = []
    for row in range(4):
        completions = []
        for place in range(4):
            length = rng.randrange(1, 9)
            mask = [rng.random() < 0.7 for _ in range(length - 1)] + [True] if masks else None
            prompt = 2 + row + (place if masks else 0)
            completions.append(made(length, prompt=prompt, mask=mask, seed=row if not masks else 10 * row + place))
            if not masks:
                completions[-1] = replace(completions[-1], ids=ids(rng, length))
        values = [[0.5 if row == 2 else rng.random()] for _ in range(4)]
        prompt = Prompt(source=f"rows:{row}", prompt="", ids=completions[0].prompt_ids)
        found.append(Group(row, prompt, row, "fresh", completions, values))
    return found


def one_step(cfg: online_dpo.Config, policy: Policy, made: list[Group]) -> tuple[Tensor, dict[str, float]]:
    """What train() does with a batch."""
    batch = GroupBatch(made, ["right"], [1.0], {})
    side = sides(batch.for_advantage(), judged=False, missing_eos_penalty=0.0).flatten()
    (step,) = pair_up(cfg, policy, batch, side)
    reference = Reference(None if cfg.reference_free else policy)
    policy.model.zero_grad(set_to_none=True)
    sums = dpo.run_pairs(cfg, policy, reference, step.items, step.pairs, train=True)
    sums.add(step.metrics)
    return gradient(policy), sums.means()


def gradient(policy: Policy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad])


def best_and_worst(group: Group) -> tuple[Completion, Completion] | None:
    scores = [row[0] for row in group.values]
    if max(scores) == min(scores):
        return None
    return group.completions[scores.index(max(scores))], group.completions[scores.index(min(scores))]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"loss_type": ("ipo",)}, {"loss_type": ("aot", "sft"), "loss_weights": (1.0, 0.2)},
        {"loss_type": ("discopop",), "discopop_tau": 0.1, "use_weighting": True}, {"reference_free": True},
        {"f_divergence_type": "js_divergence", "ld_alpha": 0.5, "rpo_alpha": 0.3, "label_smoothing": 0.1},
    ],
)  # fmt: skip
def test_a_step_is_that_of_dpo_on_the_same_pairs_from_a_file(options):
    policy, own = make_policy(reference=True), groups()
    found, told = one_step(config(**options), policy, own)
    pairs = [
        Pair(source="", prompt_ids=w.prompt_ids, chosen_ids=w.ids, rejected_ids=r.ids)
        for w, r in filter(None, map(best_and_worst, own))
    ]
    cfg = dpo.Config(model=ModelConfig(model="test"), data=DataConfig(data=("rows",)), run=config().run, **options)
    policy.model.zero_grad(set_to_none=True)
    reference = Reference(None if cfg.reference_free else policy)
    packed = pack_pairs(cfg.run, policy, pairs, accumulation=1)
    expected = dpo.run_pairs(cfg, policy, reference, pair_items(pairs), packed, train=True).means()
    assert (found - gradient(policy)).norm() < 1e-12 * gradient(policy).norm() > 0
    assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert told["pairs/ties_frac"] == 0.25 and 0 < told["pairs/reward_gap"] < 1


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_is_that_of_plain_loops_over_the_models_own_forward(lora):
    """With tokens of an environment among the completions' own, and a prompt for each completion."""
    policy, own = make_policy(reference=True, lora=lora), groups(masks=True)
    found, told = one_step(config(beta=0.3), policy, own)
    policy.model.zero_grad(set_to_none=True)

    def log_prob(c: Completion, *, reference: bool) -> Tensor:
        whole = torch.tensor([[*c.prompt_ids, *c.ids]])
        if not reference:
            logits = policy.model(input_ids=whole).logits
        elif lora:
            with torch.no_grad(), policy.model.disable_adapter():
                logits = policy.model(input_ids=whole).logits
        else:
            with torch.no_grad():
                logits = policy.reference(input_ids=whole).logits
        logp = logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None]).squeeze(1)
        return logp[len(c.prompt_ids) - 1 :][torch.tensor(c.mask)].sum()

    losses = []
    for w, r in filter(None, map(best_and_worst, own)):
        margins = [log_prob(c, reference=False) - log_prob(c, reference=True) for c in (w, r)]
        losses.append(-F.logsigmoid(0.3 * (margins[0] - margins[1])))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert len(losses) == 3 and told["loss/total"] == pytest.approx(loss.item(), rel=1e-6)
    assert (found - gradient(policy)).norm() < 1e-10 * gradient(policy).norm() > 0


@pytest.mark.parametrize("options", [{}, {"loss_type": ("aot_unpaired",), "use_weighting": False}])
def test_a_step_of_ties_alone_has_a_gradient_of_zero(options):
    policy = make_policy(reference=True)
    tied = [replace(group, values=[[1.0]] * 4) for group in groups()]
    found, told = one_step(config(**options), policy, tied)
    assert found.abs().max() == 0 and told["loss/total"] == 0 and told["pairs/ties_frac"] == 1
    assert "pairs/reward_gap" not in told


# Runs.

SMALL = (
    "--method", "online_dpo", "--per-device-train-batch-size", "16", "--max-steps", "4", "--save-steps", "2",
    "--data", "task:addition:split=train,size=64",
)  # fmt: skip
EVALUATED = ("--eval-steps", "2", "--eval-data", "task:addition:split=eval,size=4")
JUDGES = """
def right(prompts, completions, answer):
    assert len(prompts) == len(completions) == len(answer)
    verdicts = []
    for group, wanted in zip(completions, answer):
        right = [messages[-1]["content"].strip() == wanted for messages in group]
        ranks = sorted(range(len(group)), key=lambda i: not right[i])
        verdicts.append(ranks if len(set(right)) == 2 else None)
    return verdicts


def same(completions, **columns):
    return [1.0 for _ in completions]
"""


def run(folder: Path, *argv: Any) -> list[dict[str, Any]]:
    assert main([*map(str, (*SMALL, *argv)), "--output-dir", str(folder)]) == 0
    return metrics(folder)


def test_a_judge_picks_the_pairs_that_the_answer_would(tmp_path, monkeypatch):
    """Its verdict is the last column of samples.jsonl; rewards only measure. Of two completions, ranking by the answer
    gives the run that exact_match gives; a judge alone needs no reward function."""
    (tmp_path / "my_judge.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    two = ("--seed", 1, "--num-generations", 2)
    by_reward = run(tmp_path / "reward", *two, *EVALUATED)
    judged = run(tmp_path / "judged", *two, *EVALUATED, "--judge", "my_judge.right")
    assert [row.get("loss/total") for row in judged] == [row.get("loss/total") for row in by_reward]
    assert judged[-1]["eval/exact_match/mean"] == by_reward[-1]["eval/exact_match/mean"]
    assert judged[1]["pairs/reward_gap"] == 1 and judged[1]["reward/mean"] == by_reward[1]["reward/mean"]
    samples = [json.loads(line) for line in (tmp_path / "judged" / "samples.jsonl").read_text().splitlines()]
    assert all(list(row["rewards"]) == ["exact_match", "judge"] for row in samples)
    assert {row["advantage"] for row in samples} <= {-1, 0, 1}
    alone = ("--reward-funcs", "--max-steps", 2, "--judge", "my_judge.right")
    rows = run(tmp_path / "alone", *two, *alone)
    assert rows[0]["loss/total"] == by_reward[1]["loss/total"] and "eval/rows" not in rows[-1]


def test_a_run_of_ties_alone_goes_on(tmp_path, monkeypatch):
    (tmp_path / "my_judge.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    with second_device():
        rows = run(tmp_path / "run", "--reward-funcs", "my_judge.same", "--lora.r", 2)
    assert [row["pairs/ties_frac"] for row in rows] == [1.0] * 4 and all(row["optim/grad_norm"] == 0 for row in rows)
    assert all(row["loss/total"] == 0 for row in rows)


@pytest.mark.parametrize(
    "argv",
    [
        ("--sync-ref-model", "--ref-model-sync-steps", 2, "--num-iterations", 2, "--num-generations", 2),
        ("--sync-ref-model", "--ref-model-sync-steps", 1, "--minibatches-per-rollout", 2),
        ("--lora.r", 4, "--lora.dropout", 0.1, "--replay-buffer-size", 8, "--dynamic-sampling", "--loss-type", "aot"),
    ],
)  # fmt: skip
def test_goes_on_from_a_checkpoint_as_if_unbroken(argv, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rows = run(whole, *argv, *EVALUATED)
    from tests.test_resume import copy_as_if_killed

    copy_as_if_killed(whole, broken, saved=2, logged=3)
    assert main(["--resume", "--output-dir", str(broken)]) == 0
    assert repeatable(metrics(broken)) == repeatable(rows) and rows[-1]["step"] == 4
    assert (broken / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


# Refusals.

OWN = ("--method", "online_dpo", "--model", "m", "--data", "d", "--per-device-train-batch-size", "8")
REFUSED = {
    "ref": (("--ref", "precomputed"), "ref=precomputed: completions are new in every step"),
    "one": (("--num-generations", "1"), "num_generations=1: a group needs at least 2"),
    "groups": (("--num-generations", "3"), "num_generations=3: .* not a multiple"),
    "replay": (
        ("--replay-buffer-size", "4", "--no-replay-recompute-logps"), "replay_recompute_logps=False: has no effect here"
    ),
    "aot": (("--loss-type", "aot", "--num-generations", "8"), "per_device_train_batch_size=8: loss_type=aot"),
    "penalty": (("--missing-eos-penalty", "-1"), "missing_eos_penalty=-1.0: must be 0 or above"),
    "judged penalty": (("--judge", "a.b", "--missing-eos-penalty", "1"), "missing_eos_penalty=1.0: .* with a judge"),
    "rerolls": (("--judge", "a.b", "--reroll-start-fraction", "0.5"), "reroll_start_fraction=0.5: .* with a judge"),
    "evaluation": (("--judge", "a.b", "--eval-data", "e"), "eval_data=e: a judge compares completions"),
    "rows held out": (("--judge", "a.b", "--val-set-size", "4"), "val_set_size=4: a judge compares completions"),
    "workers": (("--judge", "a.b", "--reward-num-workers", "2"), "reward_num_workers=2: has no effect with a judge"),
    "smoothing": (("--loss-type", "ipo", "--label-smoothing", "0.1"), "label_smoothing=0.1: has no effect"),
    "moving": (("--sync-ref-model", "--lora.r", "4"), "sync_ref_model=True: "),
    "free": (("--reference-free", "--ref-model", "x"), "ref_model=x: has no effect with reference_free"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_apply_is_refused_by_name(name):
    argv, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        cli.parse([*OWN, *argv])


def test_flags_of_a_policy_loss_are_not_there():
    for flag in ("--epsilon", "--vllm-importance-sampling-cap", "--scale-rewards", "--top-entropy-quantile",
                 "--share-prompt", "--advantage-estimator", "--kl-in-reward"):  # fmt: skip
        with pytest.raises(ValueError, match=f"{flag}: unknown flag"):
            cli.parse([*OWN, flag, "0.5"])
    cfg = cli.parse([*OWN, "--loss-type", "sigmoid", "sft", "--loss-weights", "1", "0.5", "--num-iterations", "3"])[1]
    assert cfg.losses == (("sigmoid", "sft"), (1.0, 0.5)) and cfg.num_generations == 4


def test_a_judge_that_cannot_be_found_stops_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--judge", "no_such.judge", "--output-dir", "run"]) == 2
    assert "judge=no_such.judge: no module 'no_such'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
