"""Test each rule at its threshold, its smoothing, and its findings after a resume."""

from __future__ import annotations

import json
import math
import random

import pytest

from trainer.metrics.health import Finding, Watch, replay

HEALTHY = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "reward/zero_std_frac": 0.2,
    "reward/exact_match/mean": 0.5,
    "policy/entropy": 0.3,
    "policy/ref_kl_k3": 0.01,
    "optim/grad_norm": 0.7,
    "rollout/truncated_frac": 0.1,
}


def watch_constant(num_steps=30, **changes):
    """Observe steps with equal metrics; return the last step's findings and the watch."""
    watch = Watch()
    step_metrics = {}
    for step in range(1, num_steps + 1):
        step_metrics = HEALTHY | {k.replace("__", "/"): v for k, v in changes.items()}
        watch.observe(step, step_metrics)
    marks = {k.removeprefix("health/") for k, v in step_metrics.items() if k.startswith("health/") and v == 1.0}
    assert marks == set(watch.firing)
    return marks


def test_a_low_reward_is_a_mean_over_many_steps():
    watch = Watch()  # one group per step: most rewards are low, some are 1
    for step in range(1, 41):
        watch.observe(step, HEALTHY | {"reward/exact_match/mean": 1.0 if step % 3 == 0 else 0.1})
        assert "reward_low/exact_match" not in watch.firing
    for step in range(41, 61):
        watch.observe(step, HEALTHY | {"reward/exact_match/mean": 0.1})
    assert watch.firing["reward_low/exact_match"].message.startswith(
        "reward function exact_match averages 0.1 over the last 20 steps (want > 0.15)"
    )


def test_a_healthy_run_is_silent():
    assert watch_constant() == set()


def test_thresholds():
    for metric, inside, outside, name in (
        ("reward/exact_match/mean", 0.16, 0.14, "reward_low/exact_match"),
        ("reward/std", 0.11, 0.09, "reward_std_low"),
        ("reward/zero_std_frac", 0.5, 0.51, "zero_std"),
        ("policy/entropy", 0.011, 0.009, "entropy_low"),
        ("policy/entropy", 1.0, 1.01, "entropy_high"),
        ("optim/grad_norm", 10.0, 10.1, "grad_norm_high"),
        ("policy/ref_kl_k3", 0.5, 0.51, "ref_kl_high"),
        ("rollout/truncated_frac", 0.8, 0.81, "truncated"),
        ("policy/behaviour_gap", 0.1, 0.11, "behaviour_gap"),
        ("policy/behaviour_kl", 0.1, 0.11, "behaviour_kl"),
    ):
        assert watch_constant(**{metric: inside}) == set(), name
        assert watch_constant(**{metric: outside}) == {name}


def test_equal_rewards_in_a_group_are_no_warning_if_something_else_gives_the_signal():
    assert watch_constant(**{"reward/zero_std_frac": 1.0, "value/mean": 0.4}) == set()  # PPO's critic
    equal = {"reward/zero_std_frac": 1.0, "reward/std": 0.0}
    assert watch_constant(**equal, **{"policy/reverse_kl": 0.4}) == set()  # a teacher
    assert watch_constant(**equal, **{"reward/judge/mean": 0.5}) == set()  # --judge: other functions are only logged
    assert watch_constant(**equal) == {"zero_std", "reward_std_low"}


def test_a_reward_model_that_rises_alone_may_be_exploited():
    def last_step(model: tuple[float, float], held_out: dict[str, tuple[float, float]]) -> Watch:
        """Return the watch after 20 steps between two evaluations."""
        watch = Watch()
        watch.observe(0, {f"eval/{name}/mean": before for name, (before, _) in held_out.items()})
        for step in range(1, 21):
            reward = model[0] + (model[1] - model[0]) * step / 20
            evaluation = {f"eval/{name}/mean": after for name, (_, after) in held_out.items()} if step == 20 else {}
            watch.observe(step, HEALTHY | {"reward/model/mean": reward} | evaluation)
        return watch

    watch = last_step((0.2, 2.0), {"model": (0.2, 2.0), "exact_match": (0.41, 0.37)})
    message = watch.firing["reward_hacking"].message
    assert "held-out exact_match" in message and "0.41 before, 0.37 now" in message and "to 1.82 in" in message
    assert "reward_hacking" in last_step((0.2, 2.0), {"model": (1.5, 1.4)}).firing
    for model, held_out in (
        ((0.2, 2.0), {"model": (0.2, 2.0), "exact_match": (0.4, 0.6)}),  # both rise
        ((0.2, 2.0), {"model": (0.2, 2.0), "exact_match": (1.0, 1.0)}),  # cannot rise
        ((0.2, 0.2), {"exact_match": (0.4, 0.3)}),  # the reward model does not rise
        ((0.2, 2.0), {}),  # nothing is held out
    ):
        assert not last_step(model, held_out).firing


def test_messages_are_one_sentence_with_advice():
    watch = Watch()
    bad = {
        "reward/mean": 0.0,
        "reward/std": 0.0,
        "reward/zero_std_frac": 0.9,
        "reward/f/mean": 0.0,
        "policy/entropy": 0.001,
        "optim/grad_norm": 50.0,
        "policy/ref_kl_k3": 3.0,
        "rollout/truncated_frac": 1.0,
        "policy/behaviour_gap": 2.0,
    }
    shown = [finding for step in range(1, 21) for finding in watch.observe(step, dict(bad))]
    assert {f.name for f in shown} == {
        "reward_low/f", "reward_std_low", "zero_std", "entropy_low", "grad_norm_high", "ref_kl_high", "truncated",
        "behaviour_gap",
    }  # fmt: skip
    for finding in shown:
        assert finding.level == "warning" and ": " in finding.message and "\n" not in finding.message
        assert "--" in finding.message
    assert {f.name: f.value for f in shown}["ref_kl_high"] == 3.0
    assert "raise --warmup-ratio" in watch.firing["grad_norm_high"].message  # it may be set already


@pytest.mark.parametrize("shift", [2.0, -2.0])
def test_an_engine_whose_log_probs_are_shifted_is_a_warning_at_the_fifth_step(shift):
    """Like a proxy that adds two nats to every log-prob; the metrics are computed as in training."""
    watch, shown = Watch(), []
    for step in range(1, 7):
        gap, kl = abs(shift), math.expm1(-shift) + shift
        shown += [(step, f.name, f.level) for f in watch.observe(step, HEALTHY | engine_metrics(gap, kl))]
    assert shown == [(5, "behaviour_gap", "warning")]
    assert watch.firing["behaviour_gap"].value == 2.0 and "by 2 nats per token" in watch.firing["behaviour_gap"].message


def engine_metrics(gap: float, kl: float) -> dict[str, float]:
    return {"policy/behaviour_gap": gap, "policy/behaviour_kl": kl}


def test_rounding_of_float32_and_bfloat16_is_not_a_warning():
    for gap, kl in ((1e-6, 1e-12), (1e-4, 1e-8), (0.012, 5e-4), (0.03, 5e-3)):
        assert watch_constant(**engine_metrics(gap, kl)) == set()


@pytest.mark.parametrize("sign", ["rollout/staleness_max", "rollout/replayed_groups"])
def test_samples_of_older_weights_may_differ_more(sign):
    assert watch_constant(**engine_metrics(0.3, 0.1), **{sign: 2.0}) == set()
    assert watch_constant(**engine_metrics(0.3, 0.1), **{sign: 0.0}) == {"behaviour_gap"}
    assert watch_constant(**engine_metrics(2.0, 1.1), **{sign: 2.0}) == {"behaviour_gap"}
    assert watch_constant(**engine_metrics(0.3, 1.1), **{sign: 2.0}) == {"behaviour_kl"}


def test_a_low_reward_is_reported_after_twenty_steps():
    watch = Watch()
    first = {}
    for step in range(1, 26):
        for finding in watch.observe(step, {"reward/f/mean": 0.05, "reward/g/mean": 0.3}):
            first[finding.name] = step
    assert first == {"reward_low/f": 20}


def test_one_odd_step_is_not_a_finding():
    watch = Watch()
    for step in range(1, 40):
        odd = {"optim/grad_norm": 1e4, "policy/entropy": 9.0, "reward/std": 0.0, "rollout/truncated_frac": 1.0}
        metrics = HEALTHY | (odd if step % 5 < 2 else {})
        assert watch.observe(step, metrics) == []
        assert not any(name.startswith("health/") for name in metrics)


def test_a_message_repeats_after_fifty_steps_and_the_metric_stays():
    watch, shown, marks = Watch(), [], []
    for step in range(1, 121):
        metrics = HEALTHY | {"optim/grad_norm": 20.0 if step <= 30 or step >= 40 else 1.0}
        shown += [(step, f.name) for f in watch.observe(step, metrics)]
        marks += [step] if "health/grad_norm_high" in metrics else []
    assert shown == [(5, "grad_norm_high"), (55, "grad_norm_high"), (105, "grad_norm_high")]
    assert marks == [*range(5, 31), *range(42, 121)]


def test_zero_gradient_is_information_only_when_every_group_was_skipped():
    skipped = {"optim/grad_norm": 0.0, "reward/zero_std_frac": 1.0}
    watch = Watch()
    for step in range(1, 11):
        watch.observe(step, HEALTHY | skipped)
    assert watch.firing["groups_skipped"].level == "info" and "grad_norm_zero" not in watch.firing
    assert watch_constant(**{"optim/grad_norm": 0.0}) == {"grad_norm_zero"}
    for step in range(1, 6):  # a run on rows has no rewards
        watch.observe(step, {"loss/total": 0.7, "optim/grad_norm": 0.0})
    assert watch.firing["grad_norm_zero"].level == "warning" and "reward" not in watch.firing["grad_norm_zero"].message
    assert watch_constant(**{"optim/grad_norm": 0.0, "reward/zero_std_frac": 0.9}) == {"zero_std", "grad_norm_zero"}


def test_a_solved_run_is_an_info_instead_of_warnings():
    watch, shown = Watch(), []
    for step in range(1, 101):
        skill = min(1.0, step / 40)
        solved = step >= 50
        shown += watch.observe(
            step,
            {
                "reward/mean": 0.4 + 0.58 * skill,
                "reward/std": 0.05 if solved else 0.45,
                "reward/zero_std_frac": 1.0 if solved else 0.3,
                "reward/exact_match/mean": 0.4 + 0.58 * skill,
                "policy/entropy": 0.004 if solved else 0.2,
                "optim/grad_norm": 0.0 if solved else 0.5,
            },
        )
    assert [(f.name, f.level) for f in shown] == [("solved", "info")]
    assert "harder data" in shown[0].message and set(watch.firing) == {"solved"}


@pytest.mark.parametrize("level", [0.2, 0.6])
def test_a_plateau_on_partial_credit_is_not_solved(level):
    names = watch_constant(
        **{"reward/mean": level, "reward/exact_match/mean": 0.0, "reward/tagged/mean": level, "reward/std": 0.01}
    )
    assert names == {"reward_low/exact_match", "reward_std_low"}


def test_a_collapse_after_success_is_a_warning_again():
    watch = Watch()
    for step in range(1, 61):
        level = 0.98 if step <= 40 else 0.82
        watch.observe(step, {"reward/mean": level, "reward/f/mean": level, "reward/std": 0.01, "policy/entropy": 0.001})
    assert set(watch.firing) == {"reward_std_low", "entropy_low"}


def test_a_penalty_is_information_and_does_not_hide_success():
    watch = Watch()
    for step in range(1, 31):
        watch.observe(step, {"reward/mean": 0.9, "reward/f/mean": 1.0, "reward/penalty/mean": -0.1, "reward/std": 0.02})
    assert {n: f.level for n, f in watch.firing.items()} == {"reward_low/penalty": "info", "solved": "info"}


def test_supervised_runs_only_check_the_gradient():
    watch = Watch()
    for step in range(1, 31):
        watch.observe(step, {"loss/total": 2.0, "loss/nll": 2.0, "policy/entropy": 2.2, "optim/grad_norm": 30.0})
    assert set(watch.firing) == {"grad_norm_high"}
    watch.observe(31, {"loss/total": 2.0, "optim/grad_norm": 5.0})  # large at first is normal
    assert set(watch.firing) == set()


def test_evaluation_lines_change_nothing():
    watch = Watch()
    for step in range(1, 11):
        watch.observe(step, HEALTHY | {"optim/grad_norm": 20.0})
    assert watch.observe(10, {"eval/reward/mean": 0.5, "time/wall_s": 3.0}) == []
    assert set(watch.firing) == {"grad_norm_high"}


def test_replay_continues_like_an_unbroken_run():
    rng = random.Random(0)
    lines = []
    for step in range(1, 201):
        lines.append(
            {
                "step": step,
                "reward/mean": rng.random(),
                "reward/std": rng.choice([0.05, 0.09, 0.2]),
                "reward/zero_std_frac": rng.choice([0.4, 0.6, 1.0]),
                "reward/f/mean": rng.choice([0.1, 0.2]),
                "policy/entropy": rng.choice([0.005, 0.05, 1.5]),
                "optim/grad_norm": rng.choice([0.0, 1.0, 11.0, float("inf")]),
                "rollout/truncated_frac": rng.choice([0.7, 0.9]),
            }
        )
    whole, unbroken, written = Watch(), [], []
    for line in lines:
        metrics = {k: v for k, v in line.items() if k != "step"}
        unbroken.append(whole.observe(line["step"], metrics))
        finite = {k: None if v == float("inf") else v for k, v in metrics.items()}  # like JsonlLog
        written.append(json.dumps({"step": line["step"], **finite}))
    assert sum(map(len, unbroken)) > 10
    for cut in (0, 3, 77, 150):
        resumed, _ = replay(json.loads(text) for text in written[:cut])
        again = [resumed.observe(x["step"], {k: v for k, v in x.items() if k != "step"}) for x in lines[cut:]]
        assert again == unbroken[cut:]
        assert resumed.firing == whole.firing


def test_replay_returns_when_each_finding_fired():
    records = [
        {"step": s, **HEALTHY, "optim/grad_norm": 20.0 if s <= 10 else 1.0, "policy/entropy": 0.3 if s <= 20 else 2.0}
        for s in range(1, 31)
    ]
    _, (entropy, norm) = replay(records)
    assert (entropy.finding.name, entropy.first_step, entropy.last_step, entropy.now) == ("entropy_high", 23, 30, True)
    assert (norm.finding.name, norm.first_step, norm.last_step, norm.num_steps, norm.now) == (
        "grad_norm_high", 5, 10, 6, False,
    )  # fmt: skip
    assert isinstance(norm.finding, Finding)


def test_feature_rewards_check_alignment_and_not_spread():
    watch = Watch()
    fine = {"reward/cfm": 0.1, "reward/mean": -0.2, "reward/std": 0.01, "reward/zero_std_frac": 0.9,
            "reward/alignment/mean": 1.2, "reward/diversity/mean": 0.05, "policy/entropy": 2.5}  # fmt: skip
    for step in range(1, 31):
        watch.observe(step, dict(fine))
        assert not watch.firing, watch.firing
    for step in range(31, 37):
        watch.observe(step, {**fine, "reward/alignment/mean": 0.02, "policy/entropy": 0.001})
    assert set(watch.firing) == {"alignment_low", "entropy_low"}
    assert watch.firing["alignment_low"].value == 0.02
