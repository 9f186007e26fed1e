"""Health watch: checks a run's metrics and says, in one sentence, what is wrong and what to do about it.

A rule fires on the median of the last 5 steps that logged its metric, so a single odd step does not trigger it. While
it fires the step has `health/<name>` = 1.0; its message is shown when it first fires and then at most every 50 steps.

A run that has succeeded legitimately has little reward spread and little entropy. It counts as solved when every reward
function is at 0.8 or more (functions are taken to pay 0 to 1; one that is negative is a penalty and left aside) and the
total has not fallen more than a tenth from its best. Then `solved`, an information, takes the place of the warnings
about reward spread and low entropy.

All state follows from the metrics: replaying metrics.jsonl after a resume gives that of an uninterrupted run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

WINDOW = 5  # steps a rule looks at
REPEAT_STEPS = 50  # steps between two showings of the same message
REWARD_PATIENCE = 20  # steps a reward function may take to get going

REWARD_LOW = 0.15
REWARD_STD_LOW = 0.1
ALIGNMENT_LOW = 0.1
ZERO_STD_HIGH = 0.5
ENTROPY_LOW, ENTROPY_HIGH = 0.01, 1.0
GRAD_NORM_HIGH = 10.0
REF_KL_HIGH = 0.5
TRUNCATED_HIGH = 0.8
# Mean over tokens of |trainer's log-prob - engine's|. Measured on the same weights: 1e-6 to 1e-4 in float32 (every test
# with a real server), 0.007 to 0.012 in bfloat16 on a GPU (bench/results): ten times that is no rounding. Samples of
# older weights differ by what training has changed since, too; a nat per token is more than a few steps should bring.
GAP_HIGH, GAP_HIGH_STALE = 0.1, 1.0
# k3 of the same differences, which sees single tokens that are far off: below 1e-3 where the gap is 0.01.
GAP_KL_HIGH, GAP_KL_HIGH_STALE = 0.1, 1.0
SOLVED_REWARD = 0.8
TRAINING_AREAS = ("loss/", "policy/", "reward/", "rollout/", "optim/")


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

    def _features(self, step: int, values: Mapping[str, float]) -> Iterable[Finding]:
        """Rewards from features have no scale of their own, and their spread goes as rollouts come to agree."""
        alignment = self._median("reward/alignment/mean", values)
        if step >= REWARD_PATIENCE and alignment is not None and alignment < ALIGNMENT_LOW:
            yield Finding(
                "alignment_low",
                alignment,
                f"alignment is {alignment:.2f} after {step} steps (2 is the most, want > {ALIGNMENT_LOW}): the "
                "features hardly know the truth from anything else; try other --feature-layers or --embed-method",
            )
        entropy = self._median("policy/entropy", values)
        if entropy is not None and entropy < ENTROPY_LOW:
            yield Finding(
                "entropy_low",
                entropy,
                f"policy entropy is {entropy:.2g}, all rollouts of a prompt are the same: raise --diversity-coef or "
                "--ce-coef, or lower --learning-rate",
            )

    def _rewards(self, step: int, values: Mapping[str, float]) -> Iterable[Finding]:
        if "reward/cfm" in values:
            yield from self._features(step, values)
            return
        functions = {f: self._median(name, values) for name in values if (f := reward_function_of(name)) is not None}
        for function, value in functions.items():
            if step >= REWARD_PATIENCE and value is not None and value < REWARD_LOW:
                yield _reward_low(function, value, step)
        total = self._median("reward/mean", values)
        if total is None:
            return
        self._best_reward = max(self._best_reward, total)
        std, zero_std = self._median("reward/std", values), self._median("reward/zero_std_frac", values)
        entropy = self._median("policy/entropy", values)
        narrow = std is not None and std < REWARD_STD_LOW
        same = zero_std is not None and zero_std > ZERO_STD_HIGH
        collapsed = entropy is not None and entropy < ENTROPY_LOW
        if self._solved(total, functions.values()):
            if narrow or same or collapsed:
                yield Finding(
                    "solved",
                    total,
                    f"most groups are solved (reward {total:.2f}) and teach little more: use harder data, or stop here",
                    "info",
                )
            return
        if narrow:
            yield Finding(
                "reward_std_low",
                std,
                f"reward std is {std:.3g} (want > {REWARD_STD_LOW}): completions are hardly told apart; raise "
                "--temperature or --num-generations, give partial credit, or change the difficulty of the data",
            )
        if same:
            yield Finding(
                "zero_std",
                zero_std,
                f"{zero_std:.0%} of groups give every completion the same reward and teach nothing: raise "
                "--num-generations or --temperature, or use data that is neither solved nor hopeless",
            )
        if collapsed:
            yield Finding(
                "entropy_low",
                entropy,
                f"policy entropy is {entropy:.2g} (healthy 0.05 to 0.5), it has collapsed: lower --learning-rate, "
                "raise --temperature or --beta, and restart from a checkpoint before the fall",
            )

    def _solved(self, total: float, functions: Iterable[float | None]) -> bool:
        scores = [value for value in functions if value is not None and value >= 0] or [total]
        near_best = total >= self._best_reward - 0.1 * abs(self._best_reward)
        return near_best and min(scores) >= SOLVED_REWARD

    def _policy(self, values: Mapping[str, float]) -> Iterable[Finding]:
        entropy = self._median("policy/entropy", values)
        # text that is imitated may well have more than 1 nat per token, so without rewards this rule has no meaning
        judged = "reward/mean" in values and "reward/cfm" not in values
        if entropy is not None and entropy > ENTROPY_HIGH and judged:
            yield Finding(
                "entropy_high",
                entropy,
                f"policy entropy is {entropy:.2f} (healthy 0.05 to 0.5), the policy does not settle: lower "
                "--temperature, or start from a model trained with --method sft on this format",
            )
        kl = self._median("policy/ref_kl_k3", values)
        if kl is not None and kl > REF_KL_HIGH:
            yield Finding(
                "ref_kl_high",
                kl,
                f"KL to the reference is {kl:.2f} (want < {REF_KL_HIGH}), far from where the run began: "
                "lower --learning-rate or raise --beta",
            )
        truncated = self._median("rollout/truncated_frac", values)
        if truncated is not None and truncated > TRUNCATED_HIGH:
            yield Finding(
                "truncated",
                truncated,
                f"{truncated:.0%} of completions are cut off before they end: raise --max-completion-length, and check "
                "that the chat template's end-of-turn token is one the model was taught to write",
            )

    def _engine(self, values: Mapping[str, float]) -> Iterable[Finding]:
        """Whether what sampled is what is trained; needs no probe, and sees every token."""
        old = any(max(self._recent.get(f"rollout/{name}", (0.0,))) > 0 for name in ("staleness_max", "replayed_groups"))
        gap, kl = self._median("policy/behaviour_gap", values), self._median("policy/behaviour_kl", values)
        limit, kl_limit = (GAP_HIGH_STALE, GAP_KL_HIGH_STALE) if old else (GAP_HIGH, GAP_KL_HIGH)
        todo = (
            "; check that --vllm.url is a server of this model with nothing in between that rewrites replies, compare "
            "with --rollout.engine local, and try --sync.probe-every 1"
        )
        if old:
            todo = "; lower --learning-rate, or sample less far ahead (--prefetch-depth, --vllm-sync-interval)" + todo
        if gap is not None and gap > limit:
            yield Finding(
                "behaviour_gap",
                gap,
                f"the engine's log-probs differ from the trainer's by {gap:.2g} nats per token (want < {limit:g}; "
                f"float32 has 1e-4, bfloat16 0.01): the policy is trained on samples that are not its own{todo}",
            )
        elif kl is not None and kl > kl_limit:
            yield Finding(
                "behaviour_kl",
                kl,
                f"the KL of the engine to the trainer is {kl:.2g} (want < {kl_limit:g}): some tokens are far off{todo}",
            )

    def _optim(self, values: Mapping[str, float]) -> Iterable[Finding]:
        norm = self._median("optim/grad_norm", values)
        if norm is not None and norm > GRAD_NORM_HIGH:
            yield Finding(
                "grad_norm_high",
                norm,
                f"gradient norm is {norm:.1f} (want < {GRAD_NORM_HIGH:g}), training is unstable: "
                "lower --learning-rate, set --max-grad-norm 1.0, or add --warmup-ratio 0.1",
            )
        if norm != 0.0:
            return
        if sum(self._odd_zeros) > WINDOW // 2:
            yield Finding(
                "grad_norm_zero",
                0.0,
                "gradient norm is exactly 0 although there was something to learn from: check that the model has "
                "trainable weights and that the loss mask covers the completions",
            )
        else:
            yield Finding(
                "groups_skipped",
                0.0,
                "gradient norm is 0 because every group gave all its completions the same reward, so those steps "
                "changed nothing: use harder or easier data, or more --num-generations",
                "info",
            )


def _reward_low(function: str, value: float, step: int) -> Finding:
    check = "try it on its own with `python -m rollout.rewards --check NAME --data FILE`, NAME as in --reward-funcs"
    if value < 0:
        message = (
            f"reward function {function} averages {value:.3g} after {step} steps, as a penalty may: if not, {check}"
        )
        return Finding(f"reward_low/{function}", value, message, "info")
    return Finding(
        f"reward_low/{function}",
        value,
        f"reward function {function} still averages {value:.3g} after {step} steps (want > {REWARD_LOW}): {check}, "
        "check that the column it reads is there, or begin with easier data",
    )


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
