"""Print on stderr, for --dry-run, the first row as the model sees it, its rewards, and a plan of memory and time.

describe(cfg)        # reads the data, the tokenizer and config.json, but no weights; calls the reward functions once
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from data.errors import UserError
from data.formats.registry import PROMPT_FORMATS, formatted_rows
from data.rows.held_out import train_and_held_out
from data.rows.prompts import tokenise_prompt
from data.show import ShowConfig, ShownRow, read, show, with_settings
from rollout.engine import context_of
from rollout.rewards.__main__ import completion_of, prompt_of
from rollout.rewards.calls import OFFERED, required_columns
from rollout.rewards.loading import MODELS
from rollout.rewards.options import DEFAULT_REWARD
from rollout.rewards.table import load_rewards
from strop_config import kind_and_tree
from trainer import plan
from trainer.config.blocks import MethodConfig
from trainer.config.sampling import RewardedConfig
from trainer.offline.labelled import check_prompts
from trainer.parallel.ranks import world_size
from trainer.policy.load import find_model, load_tokenizer

NOT_CALLED = {
    **dict.fromkeys(MODELS, "because it loads a model"),
    "nemo_gym": "because it needs the gym's servers",
    "env": "because the environment computes it",
}


def describe(cfg: MethodConfig) -> None:
    plan.check_loading(cfg)
    with contextlib.redirect_stdout(sys.stderr):  # the user's functions may print, and stdout is the YAML
        if not cfg.data.data:
            print("rows: from an environment, read when the run starts")
            return
        path, _, _, revision = find_model(cfg.model.model, cfg.model.revision)
        tokenizer = load_tokenizer(path, replace(cfg.model, revision=revision))
        shown, training = with_settings(ShowConfig(), cfg, *kind_and_tree(cfg))
        context_length = None
        with contextlib.suppress(UserError):  # plan_lines reports it
            lm = plan.meta_model(cfg.model.model, cfg.model.revision, trust_remote_code=cfg.model.trust_remote_code)
            context_length = context_of(lm.config)

        def load(specs: Sequence[str]) -> list[ShownRow]:
            return read(replace(shown, data=tuple(specs)), tokenizer, training, context_length) if specs else []

        rows, held_out = train_and_held_out(replace(cfg.data, dedup=False), cfg.run.seed, load)
        if getattr(cfg, "loss_type", None) == "kto":
            for part, setting in ((rows, "data"), (held_out[: cfg.data.max_eval_rows], cfg.data.held_out_by)):
                check_prompts((row.segments[0].ids[: row.lengths["prompt"]] for row in part), setting)
        rewards = list(reward_lines(cfg, tokenizer)) if isinstance(cfg, RewardedConfig) else []
        show(rows, tokenizer, 1)
        print("\n".join([*map(str, rewards), *plan_lines(cfg, rows)]))
    if failed := [line for line in rewards if isinstance(line, UserError)]:
        raise UserError(f"reward_funcs: {len(failed)} of {len(rewards)} failed on the first row, as shown above")


def reward_lines(cfg: RewardedConfig, tokenizer: Any) -> Iterator[str | UserError]:
    """Call each reward function on the first row, with its answer or a short text as the completion; yield errors."""
    needs_none = cfg.run.method == "opd" or getattr(cfg, "judge", None)
    specs = cfg.reward.reward_funcs or (() if needs_none else (DEFAULT_REWARD,))
    called = [spec for spec in specs if str(spec).partition(":")[0] not in NOT_CALLED]
    loaded = {spec: load_rewards([spec]) for spec in called}  # a name that does not exist is an error
    options = {"data_format": cfg.data.data_format, "tokenizer": tokenizer, "cfg": cfg}
    row = next((row for _, row in formatted_rows(cfg.data.data, PROMPT_FORMATS, **options)), None)
    if row is None:
        return
    rendered = tokenise_prompt(row.columns, tokenizer, cfg.model.system_prompt, cfg.model.chat_template_kwargs)
    prompt = replace(prompt_of(row), prompt=rendered.prompt, ids=rendered.ids)
    answer = prompt.columns.get("answer")
    text, what = ("42", "the placeholder '42'") if answer is None else (str(answer), "its answer")
    completion = completion_of(text, tokenizer.encode(text, add_special_tokens=False))
    has_episodes = cfg.tools.tools or cfg.tools.rollout_func or cfg.tools.harness or cfg.openenv.env
    for spec in specs:
        label = f"reward {spec} on {row.source}"
        if spec not in loaded:
            yield f"{label}: not called, {NOT_CALLED[spec.partition(':')[0]]}"
            continue
        needed = required_columns(loaded[spec].functions[0])
        missing = [name for name in needed if name not in (*OFFERED, *prompt.columns)]
        if missing and has_episodes:
            yield f"{label}: not called, because the row has no {missing[0]!r}, which an episode may add"
            continue
        try:
            value = loaded[spec].score([prompt] * 2, [completion] * 2).totals[0]
            yield f"{label}: {value if value is None else format(value, '.4g')} with {what} as the completion"
        except UserError as error:
            yield error
        finally:
            loaded[spec].close()


def plan_lines(cfg: MethodConfig, rows: Sequence[ShownRow]) -> list[str]:
    """Return lines on the steps of the run, and on memory and time if they can be estimated."""
    num_rows = len(rows)
    samples = hasattr(cfg, "rollout")
    rows_per_batch = cfg.prompts_per_rollout if samples else cfg.run.sequences_per_step
    steps = cfg.run.total_steps(num_rows, rows_per_batch, cfg.steps_per_rollout if samples else 1)
    epochs = steps * rows_per_batch / (cfg.steps_per_rollout if samples else 1) / num_rows
    passes = f"{num_rows} rows, {epochs:.3g} epoch{'s' * (epochs != 1)}"
    unit = "completion" if samples else "row"
    size = f"{cfg.run.sequences_per_step} {unit}{'s' * (cfg.run.sequences_per_step != 1)}"
    lines = [f"steps: {steps}, with {size} per step ({passes})"]
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
