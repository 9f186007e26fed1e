"""The samples of a run as HTML: prompt, completion and rewards, and the turns of an episode as a tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.rewards.weights import parse_weight
from trainer.metrics.console import number
from trainer.metrics.page import text
from trainer.metrics.trajectory import MAX_TEXT, shorten

LAST_SAMPLED_STEPS = 10  # recent steps to choose the best and worst samples from
SHOWN_SAMPLES = 3
MAX_EPISODE = 60_000  # characters of an episode


def samples_html(samples: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str:
    """Show the best and worst samples of the last steps, and some of the first step."""
    steps = sorted({sample["step"] for sample in samples})
    if not steps:
        return ""
    last = steps[-LAST_SAMPLED_STEPS:]
    recent = [sample for sample in samples if sample["step"] >= last[0]]
    distinct = {str([sample.get(name) for name in ("prompt", "completion", "branches")]): sample for sample in recent}
    ranked = sorted(reversed(distinct.values()), key=lambda sample: -total_reward(sample, config))
    # Completions of a solved group have no advantage: the model learns nothing from them.
    best = sorted(ranked, key=lambda sample: sample.get("advantage") is not None and sample["advantage"] <= 0)
    where = f"step {last[0]}" if len(last) == 1 else f"steps {last[0]} to {last[-1]}"
    if len({total_reward(sample, config) for sample in ranked}) > 1:
        count = min(SHOWN_SAMPLES, len(ranked) // 2)
        worst = [sample for sample in ranked[::-1] if sample not in best[:count]]
        tables = [(f"Best of {where}", best[:count]), (f"Worst of {where}", worst[:count])]
    else:
        tables = [(f"Samples of {where}, all with the same reward", best[:SHOWN_SAMPLES])]
    if steps[0] < last[0]:
        first = [sample for sample in samples if sample["step"] == steps[0]]
        tables.append((f"For comparison: step {steps[0]}", first[:SHOWN_SAMPLES]))
    expected = "<th>expected</th>" if any("truth" in sample for _, rows in tables for sample in rows) else ""
    head = f"<tr><th>prompt</th><th>completion</th>{expected}<th>rewards</th><th>advantage</th></tr>"
    return "<h2>Samples</h2>" + "\n".join(
        f'<h3>{title}</h3><div class="card"><table class="samples">{head}'
        f"{''.join(sample_row(sample, bool(expected)) + episode_row(sample, config) for sample in rows)}</table></div>"
        for title, rows in tables
    )


def total_reward(sample: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Return the weighted sum of a sample's rewards."""
    rewards = list((sample.get("rewards") or {}).values())
    specs = config.get("reward_weights") or []
    weights = (
        [parse_weight(x).at(sample["step"]) for x in specs] if len(specs) == len(rewards) else [1.0] * len(rewards)
    )
    return sum(weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None)


def sample_row(sample: Mapping[str, Any], with_expected: bool) -> str:
    prompt = sample.get("prompt", "")
    if not isinstance(prompt, str):  # a list of messages
        prompt = "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
    rewards = "".join(
        f"<div><span>{text(name)}</span>{'none' if value is None else number(value)}</div>"
        for name, value in (sample.get("rewards") or {}).items()
    )
    advantage = sample.get("advantage")
    expected = text(shorten(str(sample.get("truth", ""))))
    expected = f'<td class="expected" data-label="expected"><pre>{expected}</pre></td>' if with_expected else ""
    return (
        f'<tr><td class="text" data-label="prompt"><pre>{text(shorten(prompt))}</pre></td>'
        f'<td class="text" data-label="completion"><pre>{text(shorten(str(sample.get("completion", ""))))}</pre></td>'
        f'{expected}<td class="scores" data-label="rewards">{rewards}</td>'
        f'<td data-label="advantage">{"" if advantage is None else f"{advantage:+.2f}"}</td></tr>'
    )


def episode_row(sample: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Show the turns of an episode; a branch is nested before the turns of its parent that it replaces."""
    branches = sample.get("branches")
    if not branches:
        return ""
    masked = bool(config.get("mask_truncated_completions")) and sample.get("finish_reason") == "length"
    turns = [turn for branch in branches for turn in branch["turns"]]
    limit = min(MAX_TEXT, MAX_EPISODE // len(turns))
    advantage = sample.get("advantage")
    earned = "" if advantage is None else f", advantage {advantage:+.2f}"
    inside: dict[Any, list[str]] = defaultdict(list)  # by branch and turn; None: no fork
    for i, branch in reversed(list(enumerate(branches))):  # a parent comes before its branches
        items = []
        for index, turn in enumerate(branch["turns"]):
            items += [*inside[i, index], turn_html(turn, limit, masked)]
        body = f'<ol class="turns">{"".join([*items, *inside[i, len(branch["turns"])]])}</ol>'
        fork = branch.get("fork")
        title = f"Branch {i + 1}{', instead of the turns below' if fork else ''}"
        summary = f"<summary>{title}: {totals(branch['turns'], masked)}{earned}</summary>"
        nested = f'<li class="branch"><details open>{summary}{body}</details></li>'
        inside[tuple(fork) if fork else None].insert(0, nested if len(branches) > 1 else body)
    title = f"{plural(len(branches), 'branch', 'branches')}, " if len(branches) > 1 else ""
    body = "".join(inside[None])
    return (
        f'<tr class="episode"><td colspan="5"><details><summary>{title}{totals(turns, masked)}{earned}</summary>'
        f"{f'<ol class=turns>{body}</ol>' if len(branches) > 1 else body}</details></td></tr>"
    )


def totals(turns: Sequence[Mapping[str, Any]], masked: bool) -> str:
    """Return "2 turns, 1 tool call, 12 of 60 tokens trained"."""
    replies = [turn for turn in turns if turn["trained"]]
    calls = sum(len(turn.get("calls", ())) for turn in turns)
    trained = 0 if masked else sum(turn["tokens"] for turn in replies)
    called = f", {plural(calls, 'tool call')}" if calls else ""
    total = sum(turn["tokens"] for turn in turns)
    return f"{plural(len(replies), 'turn')}{called}, {trained:,} of {plural(total, 'token')} trained"


def plural(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def turn_html(turn: Mapping[str, Any], limit: int, masked: bool) -> str:
    trained = turn["trained"] and not masked
    facts = [plural(turn["tokens"], "token") + (", trained" if trained else "")]
    facts += [f"{name} {turn[name]:+.2f}" for name in ("reward", "advantage") if name in turn]
    calls = "".join(f' <span class="tag">calls {text(name)}</span>' for name in turn.get("calls", ()))
    shown = text(shorten(turn["text"], limit))
    return (
        f'<li><div class="turn"><b>{text(turn["role"])}</b> {", ".join(facts)}{calls}</div>'
        f"<pre>{f'<mark>{shown}</mark>' if trained else shown}</pre></li>"
    )
