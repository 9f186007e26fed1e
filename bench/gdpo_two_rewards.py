"""Two rewards of different scale under GRPO and GDPO: advantages of the same completions, and training results.

    python -m bench.gdpo_two_rewards                # 3 seeds of both with `python -m trainer`, then the figure
    python -m bench.gdpo_two_rewards --seeds 0 --max-steps 40 --figure /tmp/quick.svg --rows /tmp/quick.jsonl
    python -m bench.gdpo_two_rewards --draw         # only the figure, from existing rows

The recipe is trainer/recipes/gdpo_two_rewards.yaml. Both methods get about equally close to the answers, but GRPO
forgets the brackets. A weight for the brackets would also help GRPO; GDPO needs no tuning.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import tyro
from torch import Tensor

from bench.common import ROOT, append, environment, pyplot, read, save_figure
from data.chat import stop_ids
from data.command.config_file import load_config
from data.rows.prompts import load_prompts
from losses.advantage import Rewards, gdpo, group, weighted_sum
from rollout.engine import Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.rewards.table import load_rewards
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.parallel.comm import pick_device
from trainer.policy.load import load_policy

RECIPE = ROOT / "trainer" / "recipes" / "gdpo_two_rewards.yaml"
METHODS = ("grpo", "gdpo")
NUM_PROMPTS, GROUP = 32, 8
COLOURS = {"grpo": "#d1495b", "gdpo": "#00798c"}

Row = dict[str, Any]


def train(method: str, seed: int, max_steps: int | None) -> list[Row]:
    """Read the held-out rewards of one run at every evaluation."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "trainer", "--config", str(RECIPE), "--method", method, "--seed", str(seed),
                   "--save-steps", "0", "--logging-steps", "1000", "--output-dir", f"{scratch}/run"]  # fmt: skip
        command += ["--max-steps", str(max_steps)] if max_steps else []
        subprocess.run(command, cwd=scratch, env=environment(), check=True)
        metrics = read(Path(scratch, "run", "metrics.jsonl"))
    return [
        {"method": method, "seed": seed, "step": row["step"], "brackets": row["eval/regex/mean"],
         "distance": -row["eval/distance/mean"]}
        for row in metrics
        if "eval/regex/mean" in row
    ]  # fmt: skip


def effects() -> dict[str, list[float]]:
    """Measure how much brackets alone change the advantage of each completion of one batch."""
    recipe = load_config(RECIPE)
    policy = load_policy(
        ModelConfig(model="builtin:tiny", dtype="float32"), LoraConfig(), pick_device(), with_reference=False
    )
    prompts = load_prompts([f"task:subtraction:split=train,size={NUM_PROMPTS}"], policy.tokenizer)
    batch = [prompt for prompt in prompts for _ in range(GROUP)]
    sampling = Sampling(
        max_tokens=recipe["max_completion_length"], stop_ids=stop_ids(policy.tokenizer, policy.generation_eos)
    )
    requests = [Request(prompt_ids=prompt.ids, seed=seed) for seed, prompt in enumerate(batch)]
    completions = LocalEngine(policy.model, policy.tokenizer).generate(requests, sampling)
    table = load_rewards(recipe["reward_funcs"]).score(batch, completions)
    rewards = torch.tensor(table.values).view(NUM_PROMPTS, GROUP, 2)  # distance, brackets
    return {"grpo": changes(rewards, group), "gdpo": changes(rewards, gdpo)}


def rewards_of(rewards: Tensor) -> Any:  # (P, G, 2)
    weights = torch.ones(2)
    reward = weighted_sum(rewards, weights)
    return SimpleNamespace(rewards=rewards, weights=weights, reward=reward, completions=(), all_sum=lambda x: x)


def changes(rewards: Tensor, estimate: Callable[[Rewards], Tensor]) -> list[float]:
    """Advantage with brackets minus advantage without, for one completion of every group after the other."""
    made = []
    for place in range(GROUP):
        both = []
        for brackets in (1.0, 0.0):
            changed = rewards.clone()
            changed[:, place, 1] = brackets
            both.append(estimate(rewards_of(changed))[:, place])
        made += (both[0] - both[1]).tolist()
    return made


def summary(rows: Sequence[Row]) -> str:
    """Summarize the first and last values of each method, averaged over seeds."""
    lines = []
    for method in METHODS:
        runs = [row for row in rows if row["method"] == method]
        first, last = min(row["step"] for row in runs), max(row["step"] for row in runs)
        cells = []
        for name in ("brackets", "distance"):
            before, after = (
                statistics.fmean(row[name] for row in runs if row["step"] == step) for step in (first, last)
            )
            cells.append(f"{name} {before:.2f} -> {after:.2f}")
        lines.append(f"{method}: {', '.join(cells)} after {last} steps, {len({row['seed'] for row in runs})} seeds")
    return "\n".join(lines)


def draw_figure(rows: Sequence[Row], effects: dict[str, list[float]], figure: Path) -> None:
    plt = pyplot(**{"svg.fonttype": "none", "font.size": 9})
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(9.6, 3.0))
    draw_effects(left, effects)
    for axes, name, label in (
        (middle, "brackets", "answers in brackets"),
        (right, "distance", "distance to the answer"),
    ):
        for method in METHODS:
            draw_course(axes, [row for row in rows if row["method"] == method], name, method)
        axes.set(xlabel="optimizer step", title=f"{label}, held out")
        axes.grid(alpha=0.3)
    middle.set_ylim(-0.03, 1.03)
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    save_figure(fig, figure)
    plt.close(fig)


def draw_effects(axes: Any, effects: dict[str, list[float]]) -> None:
    """Draw a dot per completion and a bar at the median."""
    noise = torch.Generator().manual_seed(0)
    for place, method in enumerate(METHODS):
        values = effects[method]
        spread = (torch.rand(len(values), generator=noise) - 0.5) * 0.6 + place
        axes.scatter(spread.tolist(), values, s=5, alpha=0.3, color=COLOURS[method], linewidths=0)
        median = statistics.median(values)
        axes.plot([place - 0.4, place + 0.4], [median, median], color="black", linewidth=1.5)
        axes.annotate(f"{median:.2f}", (place + 0.42, median), va="center")
    axes.set_xticks(range(2), [method.upper() for method in METHODS])
    axes.set(title="what brackets add to the advantage", xlim=(-0.6, 1.8))
    axes.set_ylim(bottom=-0.1)
    axes.grid(axis="y", alpha=0.3)


def draw_course(axes: Any, rows: Sequence[Row], name: str, method: str) -> None:
    """Draw every seed as a light line and the mean as a strong line."""
    for seed in sorted({row["seed"] for row in rows}):
        points = [(row["step"], row[name]) for row in rows if row["seed"] == seed]
        axes.plot(*zip(*points, strict=True), color=COLOURS[method], alpha=0.35, linewidth=1)
    steps = sorted({row["step"] for row in rows})
    means = [statistics.fmean(row[name] for row in rows if row["step"] == step) for step in steps]
    axes.plot(steps, means, color=COLOURS[method], linewidth=2, label=method.upper())


def main(
    seeds: tuple[int, ...] = (0, 1, 2),
    max_steps: int | None = None,
    figure: Path = ROOT / "docs" / "gdpo_two_rewards.svg",
    rows: Path = ROOT / "docs" / "gdpo_two_rewards.jsonl",
    draw: bool = False,
) -> None:
    """Train both methods and draw the figure.

    Args:
        seeds: Runs of each method.
        max_steps: Steps of a run; None: the recipe's.
        figure: Where the figure is written.
        rows: Where the numbers are written.
        draw: Take the numbers from --rows instead of training.
    """
    if draw:
        results = read(rows)
    else:
        results = [row for seed in seeds for method in METHODS for row in train(method, seed, max_steps)]
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.unlink(missing_ok=True)
        append(rows, *results)
    changed = effects()
    for method in METHODS:
        print(f"{method}: brackets add {statistics.median(changed[method]):.3f} to an advantage (median)")
    print(summary(results))
    draw_figure(results, changed, figure)


if __name__ == "__main__":
    tyro.cli(main)
