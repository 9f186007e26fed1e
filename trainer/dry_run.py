"""Print on stderr, for --dry-run, the first row as the model sees it and a plan of memory and time.

describe(cfg)        # reads the data, the tokenizer, reward functions and config.json, but no weights
"""

from __future__ import annotations

import sys
from dataclasses import replace

from data.errors import UserError
from data.rows.held_out import held_out_numbers
from data.show import ShowConfig, ShownRow, read, show, with_settings
from rollout.rewards.loading import MODELS, find_reward
from strop_config import kind_and_tree
from trainer import plan
from trainer.config.blocks import MethodConfig
from trainer.parallel.ranks import world_size
from trainer.policy.load import find_model, load_tokenizer


def describe(cfg: MethodConfig) -> None:
    if not cfg.data.data:
        print("rows: from an environment, read when the run starts", file=sys.stderr)
        return
    path, _, _, revision = find_model(cfg.model.model, cfg.model.revision)
    tokenizer = load_tokenizer(path, replace(cfg.model, revision=revision))
    shown, training = with_settings(ShowConfig(), cfg, *kind_and_tree(cfg))
    rows = read(shown, tokenizer, training)
    if cfg.data.eval_data:
        read(replace(shown, data=cfg.data.eval_data), tokenizer, training)
    for spec in cfg.reward.reward_funcs if hasattr(cfg, "reward") else ():
        if str(spec).partition(":")[0] not in MODELS:
            find_reward(spec)
    show(rows, tokenizer, 1, sys.stderr)
    for line in plan_lines(cfg, rows):
        print(line, file=sys.stderr)


def plan_lines(cfg: MethodConfig, rows: list[ShownRow]) -> list[str]:
    """Return lines on the steps of the run, and on memory and time if they can be estimated."""
    num_rows = len(rows)
    if cfg.data.val_set_size:
        num_rows -= len(held_out_numbers(num_rows, cfg.data.val_set_size, cfg.run.seed))
    samples = hasattr(cfg, "rollout")
    rows_per_batch = cfg.prompts_per_rollout if samples else cfg.run.sequences_per_step
    steps = cfg.run.total_steps(num_rows, rows_per_batch, cfg.steps_per_rollout if samples else 1)
    epochs = steps * rows_per_batch / (cfg.steps_per_rollout if samples else 1) / num_rows
    lines = [f"steps: {steps} of {cfg.run.sequences_per_step} sequences ({num_rows} rows, {epochs:.3g} epochs)"]
    try:
        s = plan.sizes_for(cfg)
        work = plan.work_of(cfg, s)
    except UserError as error:
        return [*lines, f"memory and time: unknown ({error})"]
    parts = plan.peak_parts(s, work)
    engine = plan.engine_memory_of(cfg, s, work)
    sizes = [f"{name} {size / plan.GIB:.3g}" for name, size in parts.items() if size]
    total, room = plan.peak_with_engine(s, work, engine, plan.memory_here()), plan.memory_here()
    limit = "" if room == float("inf") else f" of {room / plan.GIB:.3g}"
    sampling = f"sampling engine {sum(engine) / plan.GIB:.3g}" if engine else ""
    is_counted = bool(engine) and total > sum(parts.values())
    sizes += [sampling] if is_counted else []
    apart = f"; {sampling}, not during a step" if sampling and not is_counted else ""
    lines.append(
        f"memory: {total / plan.GIB:.3g} GiB{limit} per device at the peak of a step ({', '.join(sizes)}){apart}"
    )
    if plan.device_here() == "cpu":
        return [*lines, "time: not estimated on a CPU"]
    name, card = plan.pick_card(plan.PlanConfig(gpu="here"))
    length = sum(max(row.lengths.values()) for row in rows) / len(rows) + getattr(cfg, "max_completion_length", 0)
    rate = card.fp32 if work.compute == plan.BYTES["float32"] else card.bf16
    flops = plan.flops_per_token(s, work) * length * cfg.run.sequences_per_step * type(cfg).memory.sequences * steps
    hours = flops / (plan.PlanConfig.mfu * rate * 1e12 * world_size()) / 3600
    most = " at most, with completions of full length," if samples else ""
    return [*lines, f"time: about {hours:.2g} h{most} on {world_size()} x {name}, without sampling and evaluation"]
