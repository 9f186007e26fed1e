"""SDPO: which completions the teacher sees, the gradient against a plain loop, rejected settings."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from losses.distill import generalized_jsd
from tests.trainer.methods.test_opd import gradient, groups_of, logits_by_transformers, rollout_of, tiny_policy
from tests.trainer.rl.group_cases import prepare
from trainer import cli
from trainer.methods import opd, sdpo
from trainer.methods.grpo import backward
from trainer.rl.groups import Rollout

NEEDED = ("--model", "builtin:tiny", "--data", "task:addition:size=8", "--reward-funcs", "exact_match")


def parse(*argv: str) -> sdpo.Config:
    return cli.parse(["--method", "sdpo", *NEEDED, *argv])[1]


def rewarded(*values: float | None) -> Rollout:
    """Two groups of two completions with these rewards."""
    groups = groups_of(tiny_policy())
    both = zip(groups, (values[:2], values[2:]), strict=True)
    return rollout_of([replace(group, values=[[x] for x in rewards]) for group, rewards in both])


def shown(rollout: Rollout, *argv: str) -> list[str | None]:
    policy = tiny_policy(reference=True)
    items = sdpo.SelfTeacher(parse(*argv), policy).reprompted(rollout)
    for item, c in zip(items, rollout.completions, strict=True):
        assert item is None or item.ids[item.prompt_length :] == c.ids
    return [None if x is None else policy.tokenizer.decode(x.ids[: x.prompt_length]) for x in items]


def test_the_teacher_sees_another_successful_completion_of_the_group():
    first, second, third, fourth = shown(rewarded(1.0, 0.0, 1.0, 1.0))
    assert first is None  # it is the only solution of its group
    assert "17+25=" in second and "A correct answer to this question:\n42\n" in second
    assert "question:\n11\n" in third and "question:\n12\n" in fourth
    assert shown(rewarded(0.5, 0.0, None, 0.9)) == [None] * 4
    lower = shown(rewarded(0.5, 0.0, None, 0.9), "--success-reward", "0.5")
    assert [x is None for x in lower] == [True, False, False, True]


def test_feedback_of_the_environment_is_shown_too():
    rollout = rewarded(1.0, 0.0, 0.0, 0.0)
    rollout.completions[1].columns["feedback"] = "too small"
    rollout.completions[2].columns["feedback"] = " "
    rollout.completions[3].columns["feedback"] = "carry the 1"
    first, second, third, fourth = shown(rollout)
    assert first is None and third is None
    assert "question:\n42\n" in second and "not correct:\ntoo small\n" in second
    assert "question:\n" not in fourth and "not correct:\ncarry the 1\n" in fourth


def test_a_custom_prompt_gets_the_solution_and_one_that_is_too_long_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def easy(row):\n    return row['solution'] + '+0=' * (1 + 500 * (row['answer'] == '12'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    easy, *rest = shown(rewarded(0.0, 1.0, 0.0, 1.0), "--teacher-prompt", "mine.easy")
    assert "3[2]+0=" in easy and rest == [None] * 3


@pytest.mark.parametrize("beta", [None, 0.5])
def test_gradients_match_a_loop_over_the_reprompted_completions(beta):
    """In float64, for several micro-batch sizes; completions without a solution count nowhere."""
    of_tiny = tiny_policy(reference=True)
    policy = replace(of_tiny, model=copy.deepcopy(of_tiny.model).double(), compute_dtype=torch.float64,
                     reference=copy.deepcopy(of_tiny.reference).double())  # fmt: skip
    with torch.no_grad():  # a student that has moved away from its teacher
        for p in policy.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    rollout, objective = rewarded(0.0, 1.0, 1.0, 1.0), () if beta is None else ("--jsd-beta", str(beta))
    found = []
    for limit in ("1", "70", "1000"):
        cfg = parse(*objective, "--max-tokens-per-micro-batch", limit, "--temperature", "0.8")
        if beta is None:
            cfg = replace(cfg, correction=replace(cfg.correction, vllm_importance_sampling_correction=False))
        teacher = sdpo.SelfTeacher(cfg, policy)
        items = teacher.reprompted(rollout)
        rows = [row for row, item in enumerate(items) if item is not None]
        assert rows == [0, 2, 3]
        advantage = sdpo.teacher_advantage(cfg, teacher, rollout, items, rows)
        batch = prepare(cfg, policy, [rollout.completions[row] for row in rows], [advantage[row] for row in rows]
                        if beta is None else advantage[rows])  # fmt: skip
        policy.model.zero_grad()
        if beta is None:
            backward(cfg, policy, batch, loss=opd.reverse_kl_loss)
        else:
            opd.backward_jsd(cfg, policy, teacher, batch, [items[rows[row]] for row in batch.rows])
        found.append(gradient(policy.model).clone())
    policy.model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        c, item = rollout.completions[row], items[row]
        with torch.no_grad():
            of_teacher = logits_by_transformers(policy.reference, item.ids[: item.prompt_length], c.ids)
        of_student = logits_by_transformers(policy.model, c.prompt_ids, c.ids)
        trained = torch.tensor(c.mask or [True] * len(c.ids))
        count += int(trained.sum())
        if beta is None:
            index = torch.arange(len(c.ids)), c.ids
            logp, teacher_logp = (x.div(0.8).log_softmax(-1)[index] for x in (of_student, of_teacher))
            total = total + ((logp - teacher_logp).detach() * logp)[trained].sum()
        else:
            total = total + generalized_jsd(of_student, of_teacher, beta=beta, temperature=0.8)[trained].sum()
    (total / count).backward()
    expected = gradient(policy.model)
    for vector in found:
        assert (vector - expected).norm() < 1e-6 * expected.norm()


REJECTED = {
    "another teacher": (("--teacher", "t"), "teacher=t: the teacher of sdpo is self"),
    "rewards in the loss": (("--reward-coef", "1"), "reward_coef=1.0: sdpo uses rewards only to choose"),
    "one completion": (("--num-generations", "1"), "num_generations=1: a group needs at least 2"),
    "estimator": (("--scale-rewards", "none"), "scale_rewards=none: has no effect with sdpo"),
    "reference": (("--sync-ref-model",), "sync_ref_model=True: the reference is the teacher"),
    "data": (("--student-data-fraction", "0.5", "--jsd-beta", "0"), "student_data_fraction=0.5: "),
    "dynamic sampling": (("--dynamic-sampling",), "dynamic_sampling=True: has no effect"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_settings_that_do_not_apply_are_rejected(case):
    argv, message = REJECTED[case]
    with pytest.raises(ValueError, match=message) as error:
        parse(*argv)
    assert "\n" not in str(error.value)


def test_settings_that_apply():
    assert parse().distill.teacher_update_rate == 0.05 and parse().num_generations == 8
    assert parse("--teacher-update-rate", "None").distill.teacher_update_rate is None
