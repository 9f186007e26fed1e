"""What methods that sample share: prompts, engine, seeds, packing, evaluation, and what is logged of it all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from data.chat import stop_ids
from data.packing import Batch, Item, make_batches
from data.rows.prompts import load_prompts
from data.types import Prompt
from losses.advantage import nan_std, zero_std_frac
from rollout.engine import Completion, Engine, Request, Sampling, Source, run_groups
from rollout.engines.local import LocalEngine
from rollout.engines.vllm import VllmEngine, check_start
from rollout.rewards.table import Rewards, RewardTable
from rollout.schedule.producer import Producer, sync_due
from rollout.servers.command import shares_gpu
from rollout.servers.lease import Owner
from rollout.servers.options import VllmConfig
from rollout.sync.base import time_limit
from trainer.config.blocks import RolloutConfig, RunConfig
from trainer.parallel.comm import (
    all_count,
    await_order,
    context_size,
    data_size,
    give_order,
    is_main,
    leading,
    world_size,
)
from trainer.parallel.ranks import local_world_size
from trainer.policy.logps import Policy
from trainer.policy.sharding import to_device_and_pad
from trainer.policy.weights import PolicyWeights
from trainer.rl.lend import LentScores, LentWeights
from trainer.rl.unrewarded import Unrewarded
from trainer.run.run import Run

SAMPLES_PER_STEP = 4  # completions kept in samples.jsonl
EPISODE_COLUMNS = ("num_turns", "tool_calls", "tool_errors", "env_done", "env_refused", "env_failed", "left_out_turns",
                   "retokenised")  # fmt: skip


def prompts_of(cfg: Any, policy: Policy, specs: Sequence[str]) -> list[Prompt]:
    """Prompts of a method that samples, with its limits on length."""
    if not specs:
        return []
    return load_prompts(
        specs,
        policy.tokenizer,
        data_format=cfg.data.data_format,
        system_prompt=cfg.model.system_prompt,
        chat_template_kwargs=cfg.model.chat_template_kwargs,
        max_prompt_length=cfg.max_prompt_length,
        context_length=policy.context_length,
        max_completion_length=cfg.max_completion_length,
        cfg=cfg,
    )


def check_servers(cfg: Any, policy: Policy, run: Run) -> None:
    """What would keep a server from starting or answering, as far as it shows at once: before there is a run folder."""
    if cfg.prompts_per_step < data_size():
        those = "processes" if context_size() == 1 else f"times {context_size()} processes that share theirs"
        raise ValueError(
            f"per_device_train_batch_size={cfg.run.per_device_train_batch_size}: a step holds {cfg.prompts_per_step} "
            f"groups for {data_size()} {those}; raise it, or gradient_accumulation_steps, so that each has one"
        )
    if cfg.rollout.engine == "vllm":
        if world_size() > 1:
            check_places(cfg, policy)
        if is_main():
            check_start(cfg.vllm, policy.device, run.id)
        if cfg.overlap.vllm_sync_interval > 1 and shares_gpu(cfg.vllm, policy.device):
            raise ValueError(
                f"vllm_sync_interval={cfg.overlap.vllm_sync_interval}: has no effect on a server that shares the "
                "trainer's GPU, which gets its weights whenever it wakes; leave it out"
            )
        if cfg.overlap.async_prefetch and shares_gpu(cfg.vllm, policy.device):
            raise ValueError(
                "async_prefetch=True: the server shares the trainer's GPU and sleeps while it trains; give it another "
                "by --vllm.devices or --vllm.url, or let both run at a time with --vllm.colocate False "
                "--vllm.devices 0 --vllm.gpu-memory-utilization 0.3"
            )


def check_places(cfg: Any, policy: Policy) -> None:
    """Servers beside several processes: they have GPUs of their own, and may be as slow as the others can wait."""
    if policy.device.type == "cuda":
        if shares_gpu(cfg.vllm, policy.device):
            raise ValueError(
                f"vllm.colocate={cfg.vllm.colocate}: a server shares the GPU of one process, and {world_size()} train "
                "on one each; give servers GPUs of their own by --vllm.devices or --vllm.url"
            )
        if cfg.sync.backend == "ipc":
            raise ValueError(
                f"sync.backend=ipc: is for a server on the trainer's GPU, and {world_size()} processes have one each; "
                "use --sync.backend process_group"
            )
        if is_main():  # servers of ours run on its machine
            check_gpus(cfg.vllm, local_world_size(), torch.cuda.device_count())
    backend = "lora" if cfg.overlap.vllm_lora_sync else cfg.sync.backend
    if policy.is_sharded and (backend == "process_group" or (backend == "auto" and not policy.is_lora)):
        size = sum(p.numel() for p in policy.model.parameters()) * getattr(torch, serving_dtype(cfg, policy)).itemsize
        if cfg.parallel.timeout_s < (longest := time_limit(size)):
            raise ValueError(
                f"parallel.timeout_s={cfg.parallel.timeout_s:g}: processes wait for each other while weights go to "
                f"servers, which may take {longest:.0f} s when one hangs; raise it, or use --sync.backend filesystem"
            )


def check_gpus(vllm: VllmConfig, ours: int, there_are: int) -> None:
    """Servers of our own on this machine: on GPUs that no process trains on."""
    if vllm.url:
        return
    taken = [number for number in vllm.devices if number < ours]
    if taken:
        raise ValueError(
            f"vllm.devices={' '.join(map(str, vllm.devices))}: GPU {taken[0]} is that of a process that trains here, "
            f"as are all below {ours}; name others"
        )
    needed = vllm.replicas * vllm.tensor_parallel_size
    if not vllm.devices and ours + needed > there_are:
        raise ValueError(
            f"vllm.replicas={vllm.replicas}: {needed} GPUs for servers beside {ours} that train, and this machine has "
            f"{there_are}; start fewer processes, or servers elsewhere, and name them by --vllm.url"
        )


def start_engine(cfg: Any, policy: Policy, run: Run, prompts: Sequence[Prompt], *, unseen: int = 0) -> Engine:
    """The engine of a method that samples, ended with the run; `prompts` are all it will be asked about.

    `unseen` is how many tokens besides a prompt and its completion a sequence may get.
    """
    local = LocalEngine(
        policy.model, policy.tokenizer, max_batch_size=cfg.rollout.max_batch_size, autocast_dtype=policy.autocast_dtype
    )
    if cfg.rollout.engine == "local":
        return local
    if not is_main():
        await_order()  # servers take minutes to start, and the next collective has a limit
        return local
    dtype = serving_dtype(cfg, policy)
    sync = replace(cfg.sync, backend="lora") if cfg.overlap.vllm_lora_sync else cfg.sync
    longest = max(len(prompt.ids) for prompt in prompts) + cfg.max_completion_length + unseen
    engine = VllmEngine.start(
        cfg.vllm,
        sync,
        model=policy.source,
        source=(LentWeights if policy.is_sharded else PolicyWeights)(policy, getattr(torch, dtype)),
        local=LentScores(policy, local) if policy.is_sharded else local,
        device=policy.device,
        own_gpus=local_world_size(),
        owner=Owner.here(run.id, str(run.dir.resolve())),
        dtype=dtype,
        lora_rank=cfg.lora.r if sync.backend in ("auto", "lora") else 0,
        log_dir=run.dir / "logs",
        max_model_len=min(longest, policy.context_length or longest),
        trust_remote_code=cfg.model.trust_remote_code,
        vocab_size=policy.model.config.get_text_config().vocab_size,
        log=run.note,
    )
    run.keep(engine)
    if world_size() > 1:
        with leading():
            give_order("started")
    return engine


def serving_dtype(cfg: Any, policy: Policy) -> str:
    return str(policy.compute_dtype).removeprefix("torch.") if cfg.vllm.dtype == "auto" else cfg.vllm.dtype


def training_sampling(cfg: Any, policy: Policy) -> Sampling:
    """The full distribution at the method's temperature, up to the model's end tokens or a stop string."""
    return Sampling(
        temperature=cfg.temperature,
        max_tokens=cfg.max_completion_length,
        stop_ids=stop_ids(policy.tokenizer, policy.generation_eos),
        stop=cfg.stop,
        for_training=True,
    )


def evaluation_sampling(sampling: Sampling, cfg: RolloutConfig) -> Sampling:
    return replace(
        sampling, temperature=cfg.eval_temperature, top_p=cfg.eval_top_p, top_k=cfg.eval_top_k, for_training=False
    )


def pack_completions(
    run: RunConfig, policy: Policy, completions: Sequence[Completion], *, share_prompt: bool
) -> list[Batch]:
    """Micro-batches of prompts and completions, the completions trained; a group may lie behind one prompt."""
    items = [
        Item([*c.prompt_ids, *c.ids], [False] * len(c.prompt_ids) + (c.mask or [True] * len(c.ids)), len(c.prompt_ids))
        for c in completions
    ]
    batches = make_batches(
        items,
        accumulation=run.gradient_accumulation_steps,
        max_tokens=run.max_tokens_per_micro_batch,
        packing=run.packing,
        share_prompt=share_prompt,
        multiple=policy.row_multiple,
    )
    return to_device_and_pad(policy, batches)


def reward_tensor(table: RewardTable) -> Tensor:  # (B,) NaN = no reward applies
    return torch.tensor([float("nan") if total is None else total for total in table.totals])


def reward_metrics(
    table: RewardTable,
    reward: Tensor,  # (P, G)
) -> dict[str, float]:
    metrics = {
        "reward/mean": reward.nanmean().item(),
        "reward/std": nan_std(reward.flatten(), dim=0).item(),
        "reward/zero_std_frac": zero_std_frac(reward).item(),
    }
    for name, scores in scores_by_function(table).items():
        metrics[f"reward/{name}/mean"] = statistics.fmean(scores)
        metrics[f"reward/{name}/std"] = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return metrics


def scores_by_function(table: RewardTable) -> dict[str, list[float]]:
    """Scores that apply, per function; a function that applied to no completion is left out."""
    columns = zip(table.names, zip(*table.values, strict=True), strict=True)
    applied = {name: [score for score in scores if score is not None] for name, scores in columns}
    return {name: scores for name, scores in applied.items() if scores}


def logged_metrics(logged: dict[str, list[float]], kind: str) -> dict[str, float]:
    """Means of what reward functions logged by log_metric, over the calls of a step or of an evaluation."""
    return {f"{kind}/log/{name}": statistics.fmean(values) for name, values in logged.items() if values}


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    lengths = [len(completion.ids) for completion in completions]
    return {
        "rollout/len_mean": statistics.fmean(lengths),
        "rollout/len_max": float(max(lengths)),
        "rollout/truncated_frac": statistics.fmean(c.finish_reason == "length" for c in completions),
        **episode_metrics(completions),
    }


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Means over episodes of what they say of themselves."""
    metrics = {}
    for name in EPISODE_COLUMNS:
        values = [float(c.columns[name]) for c in completions if c.columns.get(name) is not None]
        if values:
            name = {"retokenised": "retokenised_frac"}.get(name, name)
            metrics[f"rollout/{name}"] = statistics.fmean(values)
    return metrics


def packing_metrics(micro_batches: Sequence[Batch]) -> dict[str, float]:
    num_tokens = all_count(sum(mb.num_tokens for mb in micro_batches), "tokens")
    num_computed = all_count(sum(mb.num_computed for mb in micro_batches), "computed tokens")
    return {"data/shared_frac": 1 - num_computed / num_tokens} if num_tokens else {}


def go_on(engine: Engine, producer: Producer, step: int, interval: int) -> None:
    """Between two steps on one batch: what runs ahead goes on with the weights of today."""
    sync(engine, step, interval)
    producer.top_up(engine.version)


def sync(engine: Engine, step: int, interval: int) -> None:
    """The engine's weights are never `interval` steps old when it is asked for more."""
    if engine.asleep or sync_due(step, engine.version, interval):
        engine.load(step)


def evaluate(
    engine: Engine,
    source: Source,
    version: int,
    prompts: Sequence[Prompt],
    rewards: Rewards,
    unrewarded: Unrewarded | None = None,
) -> dict[str, float]:
    """Completions of held-out prompts by the weights as they are, scored by the same rewards; always the same seeds."""
    engine.load(version)
    groups = run_groups(source, [[Request.of(prompt, seed)] for seed, prompt in enumerate(prompts)], engine.tend)
    engine.sleep()
    completions = [completion for group in groups for completion in group]
    table = rewards.score(list(prompts), completions, step=version)
    if unrewarded is not None:
        unrewarded.evaluated(version, table)
    totals = [total for total in table.totals if total is not None]
    metrics = {"eval/reward/mean": statistics.fmean(totals) if totals else float("nan")}
    metrics |= {f"eval/{name}/mean": statistics.fmean(scores) for name, scores in scores_by_function(table).items()}
    metrics |= logged_metrics(table.logged, "eval")
    return {**metrics, "eval/len_mean": statistics.fmean(len(c.ids) for c in completions), "eval/rows": len(prompts)}


def sample_rows(
    prompts: Sequence[Prompt], completions: Sequence[Completion], table: RewardTable, advantage: Sequence[float]
) -> list[dict[str, Any]]:
    """Rows for samples.jsonl, from groups spread over the batch."""
    stride = max(1, len(completions) // SAMPLES_PER_STEP)
    return [
        {
            "prompt": prompts[i].prompt,
            "completion": completions[i].text,
            "rewards": dict(zip(table.names, table.values[i], strict=True)),
            "advantage": advantage[i],
            "source": prompts[i].source,
            "finish_reason": completions[i].finish_reason,
            **({"messages": completions[i].messages} if completions[i].messages else {}),
            **({"extra": table.extra[i]} if table.extra and table.extra[i] else {}),
        }
        for i in range(0, len(completions), stride)
    ][:SAMPLES_PER_STEP]
