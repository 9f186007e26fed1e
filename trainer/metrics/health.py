"""Health monitor: checks a run's metrics and says, in one sentence, what is wrong and what to do about it.

A rule fires on the median of the last 5 steps that logged its metric, so a single odd step does not trigger it; a low
reward on the mean of the last 20, because a step of few completions says little. While a rule fires, the step logs
`health/<name>` = 1.0; its message is shown when it first fires and then at most every 50 steps.

A run that has succeeded has little reward spread and little entropy, and that is fine. It counts as solved when every
reward function is at 0.8 or more (functions are taken to pay 0 to 1; a negative one is a penalty and ignored) and the
total is within a tenth of its best. `solved`, an information, then replaces the warnings about spread and low entropy.

All state follows from the metrics: replaying metrics.jsonl after a resume gives that of an uninterrupted run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

WINDOW = 5  # steps a rule looks at
REPEAT_STEPS = 50  # steps between two showings of the same message
REWARD_PATIENCE = 20  # steps a reward function may take to get going, and over which it is averaged

REWARD_LOW = 0.15
REWARD_STD_LOW = 0.1
ALIGNMENT_LOW = 0.1
ZERO_STD_HIGH = 0.5
ENTROPY_LOW, ENTROPY_HIGH = 0.01, 1.0
GRAD_NORM_HIGH = 10.0
REF_KL_HIGH = 0.5
TRUNCATED_HIGH = 0.8
# Mean over tokens of |trainer's log-prob - engine's|. Measured on the same weights: 1e-6 to 1e-4 in float32 (every test
# with a real server), 0.007 to 0.012 in bfloat16 on a GPU (bench/results): ten times that is no rounding. Samples from
# older weights also differ by what training has changed since; a nat per token is more than a few steps should bring.
GAP_HIGH, GAP_HIGH_STALE = 0.1, 1.0
# k3 of the same differences, which sees single tokens that are far off: below 1e-3 where the gap is 0.01.
GAP_KL_HIGH, GAP_KL_HIGH_STALE = 0.1, 1.0
SOLVED_REWARD = 0.8
TRAINING_AREAS = ("loss/", "policy/", "reward/", "rollout/", "optim/")

CHECK_REWARD = "try it on its own with `python -m rollout.rewards --check NAME --data FILE`, NAME as in --reward-funcs"
CHECK_ENGINE = (
    "check that --vllm.url serves this model and that nothing in between rewrites its replies, compare with "
    "--rollout.engine local, and try --sync.probe-every 1"
)
SAMPLE_NEARER = "lower --learning-rate, or sample less far ahead (--prefetch-depth, --vllm-sync-interval); "
# One sentence each: what is wrong, then what to do. {v} is the median that crossed its threshold.
MESSAGES = {
    "alignment_low": f"alignment is {{v:.2f}} after {{step}} steps (at most 2, want > {ALIGNMENT_LOW}): the features "
    "hardly tell the target from other text; try other --feature-layers or --embed-method",
    "features_alike": "policy entropy is {v:.2g}, so all rollouts of a prompt are the same: raise --diversity-coef or "
    "--ce-coef, or lower --learning-rate",
    "reward_low": f"reward function {{function}} averages {{v:.3g}} over the last {{steps}} steps (want > "
    f"{REWARD_LOW}): {CHECK_REWARD}, check that the column it reads exists, or begin with easier data",
    "penalty": "reward function {function} averages {v:.3g} over the last {steps} steps, which is fine for a penalty: "
    f"if it is not one, {CHECK_REWARD}",
    "solved": "most groups are solved (reward {v:.2f}), so little is left to learn: use harder data, or stop here",
    "reward_std_low": f"reward std is {{v:.3g}} (want > {REWARD_STD_LOW}), so rewards hardly tell completions apart: "
    "raise --temperature or --num-generations, give partial credit, or use easier or harder data",
    "zero_std": "{v:.0%} of groups give every completion the same reward, so nothing is learned from them: raise "
    "--num-generations or --temperature, or use data that is neither solved nor hopeless",
    "entropy_low": "policy entropy is {v:.2g} (healthy 0.05 to 0.5), so it has collapsed: lower --learning-rate, "
    "raise --temperature or --beta, and restart from a checkpoint before the fall",
    "entropy_high": "policy entropy is {v:.2f} (healthy 0.05 to 0.5), so sampling is close to random: lower "
    "--temperature, or start from a model trained with --method sft on this format",
    "ref_kl_high": f"KL to the reference is {{v:.2f}} (want < {REF_KL_HIGH}), far from where the run began: "
    "lower --learning-rate or raise --beta",
    "truncated": "{v:.0%} of completions are cut off before they end: raise --max-completion-length, and check that "
    "the model was trained to write the chat template's end-of-turn token",
    "behaviour_gap": "the engine's log-probs differ from the trainer's by {v:.2g} nats per token (want < {limit:g}; "
    "float32 has 1e-4, bfloat16 0.01), so the policy is trained on samples that are not its own: {todo}",
    "behaviour_kl": "the KL of the engine to the trainer is {v:.2g} (want < {limit:g}), so some tokens are far off: "
    "{todo}",
    "grad_norm_high": f"gradient norm is {{v:.1f}} before clipping (want < {GRAD_NORM_HIGH:g}), so training is "
    "unstable: lower --learning-rate, add --warmup-ratio 0.1, or raise the batch size",
    "grad_norm_zero": "gradient norm is exactly 0 although there was something to learn: check that the model has "
    "trainable weights and that the loss mask covers the completions",
    "groups_skipped": "gradient norm is 0 because within every group all completions got the same reward: use harder "
    "or easier data, or more --num-generations",
}


@dataclass(frozen=True)
class Finding:
    """One thing to know about the run; `health/<name>` in the metrics."""

    name: str
    value: float  # median over the window of the metric that crossed its threshold
    message: str  # one sentence, with what to do
    level: Literal["warning", "info"] = "warning"


def reward_function_of(name: str) -> str | None:
    """ "exact_match" for "reward/exact_match/mean", None for anything else, the total included."""
    prefix, suffix = "reward/", "/mean"
    if name.startswith(prefix) and name.endswith(suffix) and len(name) > len(prefix) + len(suffix):
        return name[len(prefix) : -len(suffix)]
    return None


class Watch:
    """Takes each step's metrics in turn; `firing` holds what is wrong now, `observe` returns what to show now."""

    def __init__(self) -> None:
        self.firing: dict[str, Finding] = {}
        self._recent: dict[str, deque[float]] = {}
        self._scores: dict[str, deque[float]] = {}  # of each reward function
        self._odd_zeros: deque[bool] = deque(maxlen=WINDOW)  # gradient exactly 0 though some group had a spread
        self._best_reward = -math.inf
        self._shown_at: dict[str, int] = {}

    def observe(self, step: int, metrics: dict[str, Any]) -> list[Finding]:
        """Judge a step, mark `health/<name>` in its metrics, and return the findings whose message is due."""
        values = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        if not any(name.startswith(TRAINING_AREAS) for name in values):
            return []  # a line that holds only an evaluation says nothing about training
        for name, value in values.items():
            self._recent.setdefault(name, deque(maxlen=WINDOW)).append(value)
            if (function := reward_function_of(name)) is not None:
                self._scores.setdefault(function, deque(maxlen=REWARD_PATIENCE)).append(value)
        if "optim/grad_norm" in values:
            skipped = values.get("reward/zero_std_frac") == 1.0
            self._odd_zeros.append(values["optim/grad_norm"] == 0.0 and not skipped)
        found = [*self._rewards(step, values), *self._policy(values), *self._engine(values), *self._optim(values)]
        if any(finding.name == "solved" for finding in found):
            found = [finding for finding in found if finding.name != "groups_skipped"]  # solved says it already
        self.firing = {finding.name: finding for finding in found}
        metrics.update({f"health/{name}": 1.0 for name in self.firing})
        due = [f for f in found if step - self._shown_at.get(f.name, -REPEAT_STEPS) >= REPEAT_STEPS]
        self._shown_at.update({finding.name: step for finding in due})
        return due

    def _median(self, name: str, values: Mapping[str, float]) -> float | None:
        """Median of the window, None while it is not full or when this step did not log the metric."""
        recent = self._recent.get(name, ())
        return median(recent) if name in values and len(recent) == WINDOW else None

    def _rewards(self, step: int, values: Mapping[str, float]) -> Iterator[Finding]:
        entropy, patient = self._median("policy/entropy", values), step >= REWARD_PATIENCE
        if "reward/cfm" in values:  # rewards from features have no scale, and agreeing rollouts are the aim
            alignment = self._median("reward/alignment/mean", values)
            if patient and alignment is not None and alignment < ALIGNMENT_LOW:
                yield finding("alignment_low", alignment, step=step)
            if entropy is not None and entropy < ENTROPY_LOW:
                yield finding("entropy_low", entropy, "features_alike")
            return
        functions = {f: self._median(name, values) for name in values if (f := reward_function_of(name)) is not None}
        for function in functions:
            scores = self._scores[function]
            if patient and len(scores) >= WINDOW and (value := fmean(scores)) < REWARD_LOW:
                message, level = ("penalty", "info") if value < 0 else ("reward_low", "warning")
                yield finding(f"reward_low/{function}", value, message, level, function=function, steps=len(scores))
        total = self._median("reward/mean", values)
        if total is None or "policy/reverse_kl" in values or "policy/jsd" in values:  # a teacher says more than rewards
            return
        self._best_reward = max(self._best_reward, total)
        std, zero_std = self._median("reward/std", values), self._median("reward/zero_std_frac", values)
        narrow = std is not None and std < REWARD_STD_LOW
        same = zero_std is not None and zero_std > ZERO_STD_HIGH
        collapsed = entropy is not None and entropy < ENTROPY_LOW
        if self._solved(total, functions.values()):
            if narrow or same or collapsed:
                yield finding("solved", total, level="info")
            return
        for fires, name, value in ((narrow, "reward_std_low", std), (same, "zero_std", zero_std),
                                   (collapsed, "entropy_low", entropy)):  # fmt: skip
            if fires:
                yield finding(name, value)

    def _solved(self, total: float, functions: Iterable[float | None]) -> bool:
        scores = [value for value in functions if value is not None and value >= 0] or [total]
        near_best = total >= self._best_reward - 0.1 * abs(self._best_reward)
        return near_best and min(scores) >= SOLVED_REWARD

    def _policy(self, values: Mapping[str, float]) -> Iterator[Finding]:
        # text that is imitated may well have more than 1 nat per token, so without rewards high entropy means nothing
        judged = "reward/mean" in values and "reward/cfm" not in values
        for name, metric, limit in (
            ("entropy_high", "policy/entropy", ENTROPY_HIGH if judged else math.inf),
            ("ref_kl_high", "policy/ref_kl_k3", REF_KL_HIGH),
            ("truncated", "rollout/truncated_frac", TRUNCATED_HIGH),
        ):
            value = self._median(metric, values)
            if value is not None and value > limit:
                yield finding(name, value)

    def _engine(self, values: Mapping[str, float]) -> Iterator[Finding]:
        """Whether the engine samples what is trained; needs no probe, and sees every token."""
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
        if norm is not None and norm > GRAD_NORM_HIGH:
            yield finding("grad_norm_high", norm)
        elif norm == 0.0 and sum(self._odd_zeros) > WINDOW // 2:
            yield finding("grad_norm_zero", 0.0)
        elif norm == 0.0:
            yield finding("groups_skipped", 0.0, level="info")


def finding(name: str, value: float, message: str = "", level: str = "warning", **words: object) -> Finding:
    return Finding(name, value, MESSAGES[message or name].format(v=value, **words), level)


@dataclass
class Episode:
    """Everything one finding did over a run, for the report."""

    finding: Finding  # as it last fired
    first_step: int
    last_step: int
    num_steps: int
    now: bool  # still firing at the last step


def replay(records: Iterable[Mapping[str, Any]]) -> tuple[Watch, list[Episode]]:
    """A Watch that has seen these lines of metrics.jsonl, and what it found: the still firing first."""
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
