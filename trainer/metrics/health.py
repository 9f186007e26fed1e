"""Health monitor: check a run's metrics and report, in one sentence, what is wrong and what to do.

A rule fires on the median of the last 5 steps that logged its metric, so one odd step does not trigger it. A low reward
uses the mean of the last 20, because a step with few completions is noisy. While a rule fires, the step logs
`health/<name>` = 1.0; the message is shown when the rule first fires and then at most every 50 steps.

A successful run has little reward spread and little entropy, which is fine. A run counts as solved if every reward
function is at 0.8 or more (rewards are assumed to be 0 to 1; a negative reward is a penalty and ignored) and the total
is within a tenth of its best. The info `solved` then replaces the warnings about spread and low entropy.

All state follows from the metrics: after a resume, replaying metrics.jsonl restores it.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

WINDOW = 5  # steps per rule
REPEAT_STEPS = 50  # steps before a message is repeated
REWARD_PATIENCE = 20  # steps before a low reward is reported, and over which it is averaged

REWARD_LOW = 0.15
REWARD_STD_LOW = 0.1
ALIGNMENT_LOW = 0.1
ZERO_STD_HIGH = 0.5
ENTROPY_LOW, ENTROPY_HIGH = 0.01, 1.0
GRAD_NORM_HIGH = 10.0
REF_KL_HIGH = 0.5
TRUNCATED_HIGH = 0.8
# Mean over tokens of |trainer's log-prob - engine's|. Measured with equal weights: 1e-6 to 1e-4 in float32 (all tests
# with a real server), 0.007 to 0.012 in bfloat16 on a GPU (bench/results). Ten times that is not rounding. Samples from
# older weights also differ because of training, but a few steps should change less than a nat per token.
GAP_HIGH, GAP_HIGH_STALE = 0.1, 1.0
# k3 of the same differences, which is sensitive to single tokens: below 1e-3 if the gap is 0.01.
GAP_KL_HIGH, GAP_KL_HIGH_STALE = 0.1, 1.0
SOLVED_REWARD = 0.8
TRAINING_AREAS = ("loss/", "policy/", "reward/", "rollout/", "optim/")

CHECK_REWARD = "test it with `python -m rollout.rewards --check NAME --data FILE`, NAME as in --reward-funcs"
CHECK_ENGINE = (
    "check that --vllm.url serves this model and that no proxy rewrites its replies, compare with "
    "--rollout.engine local, and try --sync.probe-every 1"
)
SAMPLE_NEARER = (
    "lower --learning-rate, or sample less far ahead (--prefetch-depth, --vllm-sync-interval, --rollout.partial); "
)
# What is wrong, then what to do. {v} is the median that crossed its threshold.
MESSAGES = {
    "alignment_low": f"alignment is {{v:.2f}} after {{step}} steps (at most 2, want > {ALIGNMENT_LOW}): the features "
    "barely distinguish the target from other text; try other --feature-layers or --embed-method",
    "features_alike": "policy entropy is {v:.2g}, so all rollouts of a prompt are the same: raise --diversity-coef or "
    "--ce-coef, or lower --learning-rate",
    "reward_low": f"reward function {{function}} averages {{v:.3g}} over the last {{steps}} steps (want > "
    f"{REWARD_LOW}): {CHECK_REWARD}, check that the column it reads exists, or start with easier data",
    "penalty": "reward function {function} averages {v:.3g} over the last {steps} steps, which is fine for a penalty: "
    f"if it is not a penalty, {CHECK_REWARD}",
    "solved": "most groups are solved (reward {v:.2f}), so little is left to learn: use harder data, or stop here",
    "reward_std_low": f"reward std is {{v:.3g}} (want > {REWARD_STD_LOW}), so rewards barely distinguish completions: "
    "raise --temperature or --num-generations, give partial credit, or use easier or harder data",
    "reward_hacking": "reward model {function} rose from {before:.3g} to {v:.3g} in training, but held-out {companion} "
    "did not ({first:.3g} before, {last:.3g} now), so the policy may exploit the reward model: read samples.jsonl, "
    "raise --beta, or stop earlier",
    "zero_std": "{v:.0%} of groups give every completion the same reward and carry no signal: raise "
    "--num-generations or --temperature, or use data that is neither solved nor hopeless",
    "entropy_low": "policy entropy is {v:.2g} (healthy 0.05 to 0.5), so it has collapsed: lower --learning-rate, "
    "raise --temperature or --beta, and restart from a checkpoint before the collapse",
    "entropy_high": "policy entropy is {v:.2f} (healthy 0.05 to 0.5), so sampling is close to random: lower "
    "--temperature, or start from a model trained with --method sft on this format",
    "ref_kl_high": f"KL to the reference is {{v:.2f}} (want < {REF_KL_HIGH}), far from the starting point: "
    "lower --learning-rate or raise --beta",
    "truncated": "{v:.0%} of completions are truncated: raise --max-completion-length, and check that the model was "
    "trained to write the chat template's end-of-turn token",
    "behaviour_gap": "the engine's log-probs differ from the trainer's by {v:.2g} nats per token (want < {limit:g}; "
    "float32 has 1e-4, bfloat16 0.01), so the samples do not come from the trained policy: {todo}",
    "behaviour_kl": "the KL of the engine to the trainer is {v:.2g} (want < {limit:g}), so some tokens differ widely: "
    "{todo}",
    "grad_norm_high": f"gradient norm is {{v:.1f}} before clipping (want < {GRAD_NORM_HIGH:g}), so training is "
    "unstable: lower --learning-rate, raise --warmup-ratio, or raise the batch size",
    "grad_norm_zero": "gradient norm is exactly 0, so no weight changes: check that advantages are not all 0, that the "
    "loss has a gradient, that masks and filters keep some tokens, that chosen and rejected answers differ, and that "
    "the model has trainable weights",
    "groups_skipped": "gradient norm is 0 because in every group all completions got the same reward: use harder "
    "or easier data, or more --num-generations",
}


@dataclass(frozen=True)
class Finding:
    """A problem or remark about the run; `health/<name>` in the metrics."""

    name: str
    value: float  # median of the metric that crossed its threshold
    message: str  # one sentence, including what to do
    level: Literal["warning", "info"] = "warning"


def reward_function_of(name: str) -> str | None:
    """Return "exact_match" for "reward/exact_match/mean", and None for any other metric, including the total."""
    prefix, suffix = "reward/", "/mean"
    if name.startswith(prefix) and name.endswith(suffix) and len(name) > len(prefix) + len(suffix):
        return name[len(prefix) : -len(suffix)]
    return None


def is_reward_model(function: str) -> bool:
    return re.fullmatch(r"(model|prm)(_\d+)?", function) is not None


class Watch:
    """The state of all rules. `firing` contains the current findings; `observe` returns those to show now."""

    def __init__(self) -> None:
        self.firing: dict[str, Finding] = {}
        self._recent: dict[str, deque[float]] = {}
        self._rewards_of: dict[str, deque[float]] = {}  # by reward function
        self._odd_zeros: deque[bool] = deque(maxlen=WINDOW)  # gradient is exactly 0 although rewards differ in a group
        self._best_reward = -math.inf
        self._first: dict[str, list[float]] = {}  # the first values of rewards and evaluations
        self._shown_at: dict[str, int] = {}

    def observe(self, step: int, metrics: dict[str, Any]) -> list[Finding]:
        """Check a step, set `health/<name>` in its metrics, and return the findings to show now."""
        values = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        for name, value in values.items():
            if name.endswith("/mean") and len(self._first.setdefault(name, [])) < WINDOW:
                self._first[name].append(value)
        if not any(name.startswith(TRAINING_AREAS) for name in values):
            return []  # only an evaluation
        for name, value in values.items():
            self._recent.setdefault(name, deque(maxlen=WINDOW)).append(value)
            if (function := reward_function_of(name)) is not None:
                self._rewards_of.setdefault(function, deque(maxlen=REWARD_PATIENCE)).append(value)
        if "optim/grad_norm" in values:
            skipped = values.get("reward/zero_std_frac") == 1.0
            self._odd_zeros.append(values["optim/grad_norm"] == 0.0 and not skipped)
        findings = [*self._rewards(step, values), *self._policy(values), *self._engine(values), *self._optim(values)]
        if any(finding.name == "solved" for finding in findings):
            findings = [finding for finding in findings if finding.name != "groups_skipped"]  # implied by solved
        self.firing = {finding.name: finding for finding in findings}
        metrics.update({f"health/{name}": 1.0 for name in self.firing})
        due = [f for f in findings if step - self._shown_at.get(f.name, -REPEAT_STEPS) >= REPEAT_STEPS]
        self._shown_at.update({finding.name: step for finding in due})
        return due

    def _median(self, name: str, values: Mapping[str, float]) -> float | None:
        """Return the median of the window; None if it is not full or this step did not log the metric."""
        recent = self._recent.get(name, ())
        return median(recent) if name in values and len(recent) == WINDOW else None

    def _rewards(self, step: int, values: Mapping[str, float]) -> Iterator[Finding]:
        entropy, patient = self._median("policy/entropy", values), step >= REWARD_PATIENCE
        if "reward/cfm" in values:  # feature rewards have no scale, and similar rollouts are the goal
            alignment = self._median("reward/alignment/mean", values)
            if patient and alignment is not None and alignment < ALIGNMENT_LOW:
                yield finding("alignment_low", alignment, step=step)
            if entropy is not None and entropy < ENTROPY_LOW:
                yield finding("entropy_low", entropy, "features_alike")
            return
        functions = {f: self._median(name, values) for name in values if (f := reward_function_of(name)) is not None}
        for function in functions:
            rewards = self._rewards_of[function]
            if patient and len(rewards) >= WINDOW and (value := fmean(rewards)) < REWARD_LOW:
                message, level = ("penalty", "info") if value < 0 else ("reward_low", "warning")
                yield finding(f"reward_low/{function}", value, message, level, function=function, steps=len(rewards))
        yield from self._hacking(values, functions)
        total = self._median("reward/mean", values)
        is_judged = "judge" in functions and len(functions) > 1  # the other functions are only logged
        if total is None or is_judged or "policy/reverse_kl" in values or "policy/jsd" in values:
            return  # a judge or a teacher gives the signal
        self._best_reward = max(self._best_reward, total)
        std, zero_std = self._median("reward/std", values), self._median("reward/zero_std_frac", values)
        narrow = std is not None and std < REWARD_STD_LOW
        same = (
            zero_std is not None and zero_std > ZERO_STD_HIGH and "value/mean" not in values
        )  # a critic compares more
        collapsed = entropy is not None and entropy < ENTROPY_LOW
        if self._solved(total, functions.values()):
            if narrow or same or collapsed:
                yield finding("solved", total, level="info")
            return
        for fires, name, value in ((narrow, "reward_std_low", std), (same, "zero_std", zero_std),
                                   (collapsed, "entropy_low", entropy)):  # fmt: skip
            if fires:
                yield finding(name, value)

    def _hacking(self, values: Mapping[str, float], functions: Iterable[str]) -> Iterator[Finding]:
        """At an evaluation: a reward model clearly rose in training, but a held-out reward did not."""
        for function in filter(is_reward_model, functions):
            name = f"reward/{function}/mean"
            early, late = self._first[name], self._recent[name]
            if min(late) <= max(early):
                continue
            for companion in functions:
                first, last = self._first.get(f"eval/{companion}/mean"), values.get(f"eval/{companion}/mean")
                # a reward function is assumed to be 0 to 1, and near 1 it cannot rise
                if first and last is not None and last <= first[0] and (companion == function or last < SOLVED_REWARD):
                    yield finding("reward_hacking", median(late), before=median(early), function=function,
                                  companion=companion, first=first[0], last=last)  # fmt: skip
                    return

    def _solved(self, total: float, functions: Iterable[float | None]) -> bool:
        rewards = [value for value in functions if value is not None and value >= 0] or [total]
        near_best = total >= self._best_reward - 0.1 * abs(self._best_reward)
        return near_best and min(rewards) >= SOLVED_REWARD

    def _policy(self, values: Mapping[str, float]) -> Iterator[Finding]:
        # imitated text may have more than 1 nat per token, so high entropy is only a problem with rewards
        has_rewards = "reward/mean" in values and "reward/cfm" not in values
        for name, metric, limit in (
            ("entropy_high", "policy/entropy", ENTROPY_HIGH if has_rewards else math.inf),
            ("ref_kl_high", "policy/ref_kl_k3", REF_KL_HIGH),
            ("truncated", "rollout/truncated_frac", TRUNCATED_HIGH),
        ):
            value = self._median(metric, values)
            if value is not None and value > limit:
                yield finding(name, value)

    def _engine(self, values: Mapping[str, float]) -> Iterator[Finding]:
        """Check that the engine samples from the trained policy, using every token and no probe."""
        old = any(max(self._recent.get(f"rollout/{name}", (0.0,))) > 0 for name in ("staleness_max", "replayed_groups"))
        gap, kl = self._median("policy/behaviour_gap", values), self._median("policy/behaviour_kl", values)
        limit, kl_limit = (GAP_HIGH_STALE, GAP_KL_HIGH_STALE) if old else (GAP_HIGH, GAP_KL_HIGH)
        todo = (SAMPLE_NEARER if old else "") + CHECK_ENGINE
        if gap is not None and gap > limit:
            yield finding("behaviour_gap", gap, limit=limit, todo=todo)
        elif kl is not None and kl > kl_limit:
            yield finding("behaviour_kl", kl, limit=kl_limit, todo=todo)

    def _optim(self, values: Mapping[str, float]) -> Iterator[Finding]:
        norm = self._median("optim/grad_norm", values)
        if norm is not None and min(norm, values["optim/grad_norm"]) > GRAD_NORM_HIGH:  # and not falling below it
            yield finding("grad_norm_high", norm)
        elif norm == 0.0 and sum(self._odd_zeros) > WINDOW // 2:
            yield finding("grad_norm_zero", 0.0)
        elif norm == 0.0:
            yield finding("groups_skipped", 0.0, level="info")


def finding(name: str, value: float, message: str = "", level: str = "warning", **words: object) -> Finding:
    return Finding(name, value, MESSAGES[message or name].format(v=value, **words), level)


@dataclass
class Episode:
    """The history of one finding over a run, for the report."""

    finding: Finding  # its last occurrence
    first_step: int
    last_step: int
    num_steps: int
    now: bool  # still firing at the last step


def replay(records: Iterable[Mapping[str, Any]]) -> tuple[Watch, list[Episode]]:
    """Return a Watch that has observed these lines of metrics.jsonl, and its episodes: active ones first."""
    watch, episodes = Watch(), {}
    for record in records:
        step = record["step"]
        watch.observe(step, {k: v for k, v in record.items() if k != "step" and not k.startswith("health/")})
        for name, finding in watch.firing.items():
            episode = episodes.setdefault(name, Episode(finding, step, step, 0, False))
            episode.finding, episode.last_step, episode.num_steps = finding, step, episode.num_steps + 1
    for name, episode in episodes.items():
        episode.now = name in watch.firing
    return watch, sorted(episodes.values(), key=lambda e: (not e.now, e.finding.level != "warning", -e.num_steps))
