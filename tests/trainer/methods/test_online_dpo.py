"""Online DPO: pairs of a group, gradients against DPO and plain loops, runs with rewards and a judge, rejections."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.types import Pair, Prompt
from losses.advantage import weighted_sum
from losses.preference import PairScores, pair_metrics
from rollout.engine import Completion, Group
from tests.entry import metrics, repeatable
from tests.ranks.worker import ids, make_policy
from tests.second_device import second_device
from trainer import cli
from trainer.__main__ import main
from trainer.config.blocks import DataConfig, ModelConfig, PromptConfig, RunConfig
from trainer.methods import dpo, online_dpo
from trainer.methods.online_dpo import sides
from trainer.offline.pairs import pack_pairs, pair_items
from trainer.offline.pairs_of_groups import pair_up
from trainer.policy.logps import Policy
from trainer.policy.reference import Reference
from trainer.rl.groups import Rollout

NAN = float("nan")


def completion(
    num_tokens: int = 2, *, prompt: int = 2, cut: bool = False, mask: list[bool] | None = None, seed: int = 0
):
    rng = random.Random(seed)
    return Completion(
        prompt_ids=ids(rng, prompt), ids=ids(rng, num_tokens), logps=[-1.0] * num_tokens, text="", versions=[],
        finish_reason="length" if cut else "stop", mask=mask,
    )  # fmt: skip


def side_of(values: list[list[list[float]]], weights: list[float], completions: Any = None, **options: Any) -> list:
    rewards = torch.tensor(values)
    completions = completions or [completion() for _ in range(rewards.shape[0] * rewards.shape[1])]
    reward = weighted_sum(rewards, torch.tensor(weights))
    return sides(config(**options), SimpleNamespace(rewards=rewards, reward=reward, completions=completions)).tolist()


def test_a_pair_is_the_best_and_the_worst_completion():
    """By the weighted sum. The first of equals is taken. A tie, or a group with fewer than two rewards, has no pair."""
    one = [[[0.2], [0.9], [0.1], [0.9]], [[1.0]] * 4, [[NAN], [0.5], [0.7], [NAN]], [[NAN], [0.5], [NAN], [NAN]]]
    assert side_of(one, [1.0]) == [[0, 1, -1, 0], [0] * 4, [0, -1, 1, 0], [0] * 4]
    assert side_of(one, [-1.0])[0] == [0, -1, 1, 0]
    two = [[[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]]]
    assert side_of(two, [1.0, 0.0]) == [[1, -1, 0]] and side_of(two, [1.0, 1.0]) == [[-1, 1, 0]]
    assert side_of(two, [1.0, 0.0], judge="a.b") == [[-1, 1, 0]]  # the judge is the last column


def test_truncated_completions_and_completions_without_trained_tokens():
    cut = [completion(), completion(cut=True), completion()]
    assert side_of([[[1.0], [1.0], [1.0]]], [1.0], cut) == [[0, 0, 0]]
    assert side_of([[[1.0], [1.0], [1.0]]], [1.0], cut, missing_eos_penalty=0.5) == [[1, -1, 0]]
    assert side_of([[[1.0], [1.6], [1.2]]], [1.0], cut, missing_eos_penalty=0.5) == [[-1, 0, 1]]
    foreign = [completion(mask=[False, False]), completion(), completion()]
    assert side_of([[[9.0], [1.0], [2.0]]], [1.0], foreign) == [[0, -1, 1]]


def test_loss_and_gradient_of_trl():
    """Numbers of TRL 1.16's OnlineDPOTrainer.training_step, with model and generation replaced by tensors.

    It pairs the first half of a batch with the second, and also trains on ties.
    """
    logp = -(torch.arange(24, dtype=torch.float64).remainder(7) + 1).view(6, 4) / 8
    ref = -(torch.arange(24, dtype=torch.float64).remainder(5) + 1).view(6, 4) / 4
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    reward = torch.tensor([[0.5, 0.2], [0.1, 0.8], [0.9, 0.3]])  # of completions 0 and 3, 1 and 4, 2 and 5
    side = torch.tensor(side_of(reward.unsqueeze(-1).tolist(), [1.0])).T.flatten()  # (6,)
    chosen, rejected = ([p + 3 * int(side[p] != sign) for p in range(3)] for sign in (1, -1))
    logp.requires_grad_()
    sums = [(x * mask).sum(1)[rows] for x in (logp, ref) for rows in (chosen, rejected)]
    lengths = [mask.sum(1)[rows] for rows in (chosen, rejected)]
    s = PairScores(*sums, *lengths)
    loss = dpo.pair_losses(config(beta=0.3), s, torch.zeros(()))["sigmoid"] / 3
    loss.backward()
    assert loss.item() == pytest.approx(0.5564011751331724, abs=1e-12)
    of_each = torch.tensor([-0.05, 0.04164168844827247, -0.035434369377420456, 0.05, -0.04164168844827247,
                            0.035434369377420456], dtype=torch.float64)  # fmt: skip
    torch.testing.assert_close(logp.grad, of_each.unsqueeze(1) * mask, rtol=0, atol=1e-12)
    logged = pair_metrics(0.3 * s.c, 0.3 * s.r, s.logp_w, s.logp_l)
    reward_w, count = logged["reward/chosen"]
    assert float(reward_w / count) == pytest.approx(0.3875) and float(logged["reward/accuracy"][0]) == 2


# One step.


def config(**options: Any) -> online_dpo.Config:
    run = RunConfig(max_tokens_per_micro_batch=40, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    return online_dpo.Config(model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=run, **options)


def groups(masks: bool = False) -> list[Group]:
    """Four groups of four, the third a tie. masks: environment turns, and a prompt for each completion."""
    rng = random.Random(3)
    result = []
    for row in range(4):
        completions = []
        for i in range(4):
            length = rng.randrange(1, 9)
            mask = [rng.random() < 0.7 for _ in range(length - 1)] + [True] if masks else None
            prompt = 2 + row + (i if masks else 0)
            completions.append(completion(length, prompt=prompt, mask=mask, seed=10 * row + i if masks else row))
            if not masks:
                completions[-1] = replace(completions[-1], ids=ids(rng, length))
        values = [[0.5 if row == 2 else rng.random()] for _ in range(4)]
        prompt = Prompt(source=f"rows:{row}", prompt="", ids=completions[0].prompt_ids)
        result.append(Group(row, prompt, row, "fresh", completions, values))
    return result


def one_step(cfg: online_dpo.Config, policy: Policy, groups: list[Group]) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of a rollout, as in train()."""
    rollout = Rollout(groups, ["right"], torch.ones(1), {})
    (step,) = pair_up(cfg.run, policy, rollout, sides(cfg, rollout).flatten())
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
def test_a_step_equals_dpo_on_the_same_pairs_from_a_file(options):
    policy, sampled = make_policy(reference=True), groups()
    vector, logged = one_step(config(**options), policy, sampled)
    pairs = [
        Pair(source="", prompt_ids=w.prompt_ids, chosen_ids=w.ids, rejected_ids=r.ids)
        for w, r in filter(None, map(best_and_worst, sampled))
    ]
    cfg = dpo.Config(model=ModelConfig(model="test"), data=DataConfig(data=("rows",)), run=config().run, **options)
    policy.model.zero_grad(set_to_none=True)
    reference = Reference(None if cfg.reference_free else policy)
    packed = pack_pairs(cfg.run, policy, pairs, accumulation=1)
    expected = dpo.run_pairs(cfg, policy, reference, pair_items(pairs), packed, train=True).means()
    assert (vector - gradient(policy)).norm() < 1e-12 * gradient(policy).norm() > 0
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert logged["pairs/ties_frac"] == 0.25 and 0 < logged["pairs/reward_gap"] < 1


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_equals_plain_loops_over_the_models_forward(lora):
    """With environment tokens in the completions, and a prompt for each completion."""
    policy, sampled = make_policy(reference=True, lora=lora), groups(masks=True)
    vector, logged = one_step(config(beta=0.3), policy, sampled)
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
    for w, r in filter(None, map(best_and_worst, sampled)):
        margins = [log_prob(c, reference=False) - log_prob(c, reference=True) for c in (w, r)]
        losses.append(-F.logsigmoid(0.3 * (margins[0] - margins[1])))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert len(losses) == 3 and logged["loss/total"] == pytest.approx(loss.item(), rel=1e-6)
    assert (vector - gradient(policy)).norm() < 1e-10 * gradient(policy).norm() > 0


@pytest.mark.parametrize("options", [{}, {"loss_type": ("aot_unpaired",), "use_weighting": False}])
def test_a_step_with_only_ties_has_zero_gradients(options):
    policy = make_policy(reference=True)
    tied = [replace(group, values=[[1.0]] * 4) for group in groups()]
    vector, logged = one_step(config(**options), policy, tied)
    assert vector.abs().max() == 0 and logged["loss/total"] == 0 and logged["pairs/ties_frac"] == 1
    assert "pairs/reward_gap" not in logged


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


def test_a_judge_that_compares_answers_gives_the_run_of_exact_match(tmp_path, monkeypatch):
    """The verdict is the last column of samples.jsonl, and rewards only measure. A judge needs no reward function."""
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


def test_a_run_with_only_ties_continues(tmp_path, monkeypatch):
    (tmp_path / "my_judge.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    with second_device():
        rows = run(tmp_path / "run", "--reward-funcs", "my_judge.same", "--lora.r", 2)
    assert [row["pairs/ties_frac"] for row in rows] == [1.0] * 4 and all(row["optim/grad_norm"] == 0 for row in rows)
    assert all(row["loss/total"] == 0 for row in rows)


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(
            ("--sync-ref-model", "--ref-model-sync-steps", 2, "--num-iterations", 2, "--num-generations", 2),
            marks=pytest.mark.slow,  # the next moves its reference too
        ),
        ("--sync-ref-model", "--ref-model-sync-steps", 1, "--minibatches-per-rollout", 2),
        ("--lora.r", 4, "--lora.dropout", 0.1, "--replay-buffer-size", 8, "--dynamic-sampling", "--loss-type", "aot"),
    ],
)  # fmt: skip
def test_a_resumed_run_equals_an_uninterrupted_run(argv, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rows = run(whole, *argv, *EVALUATED)
    from tests.test_resume import copy_as_if_killed

    copy_as_if_killed(whole, broken, saved=2, logged=3)
    assert main(["--resume", "--output-dir", str(broken)]) == 0
    assert repeatable(metrics(broken)) == repeatable(rows) and rows[-1]["step"] == 4
    assert (broken / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


# Rejections.

OWN = ("--method", "online_dpo", "--model", "m", "--data", "d", "--per-device-train-batch-size", "8")
REJECTED = {
    "ref": (("--ref", "precomputed"), "ref=precomputed"),
    "one": (("--num-generations", "1"), "num_generations=1: .*2"),
    "groups": (("--num-generations", "3"), "num_generations=3: .*8"),
    "replay": (("--replay-buffer-size", "4", "--no-replay-recompute-logps"), "replay_recompute_logps=False"),
    "aot": (("--loss-type", "aot", "--num-generations", "8"), "per_device_train_batch_size=8: loss_type=aot"),
    "penalty": (("--missing-eos-penalty", "-1"), "missing_eos_penalty=-1.0"),
    "judged penalty": (("--judge", "a.b", "--missing-eos-penalty", "1"), "missing_eos_penalty=1.0: .* judge"),
    "judged ranks": (("--judge", "a.b", "--reward-on-all-ranks"), "reward_on_all_ranks=True: .* judge"),
    "rerolls": (("--judge", "a.b", "--reroll-start-fraction", "0.5"), "reroll_start_fraction=0.5: .* judge"),
    "evaluation": (("--judge", "a.b", "--eval-data", "e"), "eval_data=e: .*judge"),
    "rows held out": (("--judge", "a.b", "--val-set-size", "4"), "val_set_size=4: .*judge"),
    "workers": (("--judge", "a.b", "--reward-num-workers", "2"), "reward_num_workers=2: .* judge"),
    "smoothing": (("--loss-type", "ipo", "--label-smoothing", "0.1"), "label_smoothing=0.1: .*ipo"),
    "moving": (("--sync-ref-model", "--lora.r", "4"), "sync_ref_model=True: .*LoRA"),
    "free": (("--reference-free", "--ref-model", "x"), "ref_model=x: .*reference_free"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_settings_that_do_not_apply_are_rejected(name):
    argv, message = REJECTED[name]
    with pytest.raises(ValueError, match=message):
        cli.parse([*OWN, *argv])


def test_there_are_no_flags_of_a_policy_loss():
    for flag in ("--epsilon", "--vllm-importance-sampling-cap", "--scale-rewards", "--top-entropy-quantile",
                 "--share-prompt", "--advantage-estimator", "--kl-in-reward"):  # fmt: skip
        with pytest.raises(ValueError, match=f"{flag}: unknown flag"):
            cli.parse([*OWN, flag, "0.5"])
    cfg = cli.parse([*OWN, "--loss-type", "sigmoid", "sft", "--loss-weights", "1", "0.5", "--num-iterations", "3"])[1]
    assert cfg.losses == (("sigmoid", "sft"), (1.0, 0.5)) and cfg.num_generations == 4


def test_a_missing_judge_is_an_error_before_the_run_folder_exists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--judge", "no_such.judge", "--output-dir", "run"]) == 2
    assert "judge=no_such.judge: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
