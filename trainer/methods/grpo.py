"""GRPO: sample a group of completions per prompt, reward them, compare within the group, clip, step.

    prompts -> generate -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> clip and step -> log

Shao et al. 2024 (arXiv:2402.03300), with DAPO's token-level normaliser (Yu et al. 2025, arXiv:2503.14476): the sum
over all trained tokens of the step, divided once by their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from data.loader import Loader
from data.packing import Batch
from kernels.linear_logprob import TokenLogps
from losses.advantage import group_advantage
from losses.kl import k3, kl_penalty
from losses.policy_gradient import clipped_surrogate
from losses.types import LossOut, merge
from rollout.options import SyncConfig, VllmConfig
from rollout.rewards import load_rewards
from rollout.types import Completion, Request
from trainer import rollouts
from trainer.config import (
    DataConfig,
    Flat,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    check_engine,
    check_evaluation,
)  # fmt: skip
from trainer.counters import Counters, Timer
from trainer.dist import all_sum, pick_device
from trainer.metrics import MetricSums
from trainer.model import Policy, load_policy, reference_logps, token_logps, token_loss
from trainer.optim import build_optimizer, clip_and_step, term_metrics, total_loss
from trainer.run import open_run


@dataclass(frozen=True, kw_only=True)
class Config:
    """Group relative policy optimisation: sample, reward, compare within each group, clip, step."""

    model: Flat[ModelConfig]
    data: Flat[DataConfig]
    run: Flat[RunConfig] = field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)

    reward_funcs: tuple[str, ...] = ("exact_match",)
    """Rewards: exact_match, last_number, regex:PATTERN, ..., my_module.fn, FILE.py:fn, model:RUN, prm:RUN."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; none given means 1 each."""
    num_generations: int = 8
    """Completions per prompt: one group."""
    max_prompt_length: int | None = None
    """Prompts of more tokens are left out, and counted; None keeps all."""
    max_completion_length: int = 256
    """Tokens a completion may have."""
    temperature: float = 1.0
    """Sampling temperature; log-probs in the loss are those of the same temperature."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the model's own end tokens."""
    share_prompt: bool = True
    """Compute a prompt once for its group, with the same gradient; --no-packing lays out each completion in full."""
    num_iterations: int = 1
    """Optimizer steps taken on each batch of completions."""
    beta: float = 0.0
    """Weight of the KL term to the reference model; 0 loads no reference."""
    epsilon: float = 0.2
    """Clip range of the ratio, below 1 and above."""
    epsilon_high: float | None = None
    """Clip range above 1 when it differs (DAPO: 0.28); None uses epsilon."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not at all."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        check_engine(self.rollout, self.vllm, self.sync)
        if self.num_generations < 2:
            raise ValueError(f"num_generations={self.num_generations}: a group needs at least 2 completions to compare")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be above 0, a greedy group has nothing to compare")
        if "" in self.stop:
            raise ValueError("stop='': an empty stop string would end every completion; remove it")
        for name in ("max_completion_length", "num_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        for name in ("beta", "epsilon", "epsilon_high"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or above")
        if self.run.sequences_per_step % self.num_generations:
            raise ValueError(
                f"num_generations={self.num_generations}: per_device_train_batch_size x gradient_accumulation_steps = "
                f"{self.run.sequences_per_step} completions a step do not hold whole groups; use a multiple"
            )

    @property
    def prompts_per_step(self) -> int:
        return self.run.sequences_per_step // self.num_generations


@dataclass(frozen=True)
class Rollout:
    """One batch of completions, ready to train on; B completions, group after group."""

    completions: list[Completion]
    advantage: Tensor  # (B,)
    micro_batches: list[Batch]
    old_logps: list[Tensor]  # per micro-batch (N,); empty when the sampling policy is the current one


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = load_rewards(cfg.reward_funcs, cfg.reward_weights or None)
        policy = load_policy(cfg.model, cfg.lora, pick_device(), with_reference=cfg.beta > 0)
        prompts = rollouts.prompts_of(cfg, policy, cfg.data.data)
        held_out = rollouts.prompts_of(cfg, policy, cfg.data.eval_data)[: cfg.data.max_eval_rows]
        rewards.check_columns(prompts, "data")
        rewards.check_columns(held_out, "eval_data")
        sampling = rollouts.training_sampling(cfg, policy)
        held_out_sampling = rollouts.evaluation_sampling(sampling, cfg.rollout)
        loader = Loader(prompts, batch_size=cfg.prompts_per_step, seed=cfg.run.seed)
        total_steps = cfg.run.total_steps(loader.rows_per_epoch, cfg.prompts_per_step, cfg.num_iterations)
        optimizer, schedule = build_optimizer(policy.model, cfg.optim, total_steps)
        rollouts.check_servers(cfg, policy)
        state = {"loader": loader, "rewards": rewards, "counters": (counters := Counters())}
        run.begin(total_steps, f"grpo {cfg.model.model}")
        engine = rollouts.start_engine(cfg, policy, run, prompts + held_out)
        step = run.restore(policy, optimizer, schedule, state)
        if step == 0 and held_out:
            run.log(0, rollouts.evaluate(engine, step, held_out, rewards, held_out_sampling))

        while step < total_steps:
            timer = Timer()
            engine.load(version=step)
            batch = [prompt for prompt in loader.next() for _ in range(cfg.num_generations)]
            first = counters.prompts * cfg.num_generations
            seeds = (rollouts.sample_seed(cfg.run.seed, first + i) for i in range(len(batch)))
            requests = [Request(prompt_ids=p.ids, seed=seed) for p, seed in zip(batch, seeds, strict=True)]
            completions = engine.generate(requests, sampling)
            engine.sleep()
            counters.prompts += cfg.prompts_per_step
            timer.lap("rollout_s")
            table = rewards.score(batch, completions)
            reward = rollouts.reward_tensor(table).view(-1, cfg.num_generations)  # (P, G)
            advantage = group_advantage(reward, scale=cfg.scale_rewards).flatten()  # (B,)
            timer.lap("reward_s")
            rollout = pack(cfg, policy, completions, advantage)
            run.sample(step + 1, rollouts.sample_rows(batch, completions, table, advantage.tolist()))

            for _ in range(min(cfg.num_iterations, total_steps - step)):
                step += 1
                learning_rate = schedule.get_last_lr()[0]
                sums = backward(cfg, policy, rollout)
                where = f"step {step}, rank 0, prompts {', '.join(dict.fromkeys(p.source for p in batch))}"
                grad_norm = clip_and_step(policy.model, optimizer, schedule, cfg.optim.max_grad_norm, where)
                num_tokens = sum(mb.num_tokens for mb in rollout.micro_batches)
                timer.lap("train_s")
                counters.tokens += num_tokens
                metrics = {
                    **rollouts.reward_metrics(table, reward),
                    **rollouts.completion_metrics(completions),
                    **rollouts.packing_metrics(rollout.micro_batches),
                    **sums.means(),
                    "optim/grad_norm": grad_norm,
                    "optim/lr": learning_rate,
                    "data/epoch": loader.epoch,
                    **counters.metrics(),
                    **timer.metrics(num_tokens),
                }
                if held_out and cfg.run.eval_due(step, total_steps):
                    metrics |= rollouts.evaluate(engine, step, held_out, rewards, held_out_sampling)
                run.log(step, metrics | engine.metrics())
                timer = Timer()
            run.maybe_save(step, policy, optimizer, schedule, state)
        run.finish(policy)


def pack(cfg: Config, policy: Policy, completions: list[Completion], advantage: Tensor) -> Rollout:
    """Micro-batches, the same for every iteration; scored now if the first step will change the policy."""
    micro_batches = rollouts.pack_completions(cfg.run, policy, completions, share_prompt=cfg.share_prompt)
    old_logps = []
    if cfg.num_iterations > 1:
        with torch.no_grad():
            old_logps = [token_logps(policy, mb, temperature=cfg.temperature).logp for mb in micro_batches]
    return Rollout(completions, advantage.to(policy.device), micro_batches, old_logps)


def backward(cfg: Config, policy: Policy, rollout: Rollout) -> MetricSums:
    """Gradients of one optimizer step, the same however the completions are cut into micro-batches."""
    num_tokens = all_sum(torch.tensor(float(sum(len(mb.target) for mb in rollout.micro_batches)), device=policy.device))
    sums = MetricSums()
    for number, mb in enumerate(rollout.micro_batches):
        numbers = token_numbers(cfg, policy, rollout, number)

        def loss_of(tokens: TokenLogps, rows: Tensor, numbers=numbers) -> tuple[Tensor, LossOut]:
            out = loss(cfg, tokens, *(None if x is None else x[rows] for x in numbers))
            return total_loss(out, {"policy": num_tokens, "kl": num_tokens}), out

        total, outs = token_loss(policy, mb, loss_of, temperature=cfg.temperature)
        total.backward()
        for out in outs:
            sums.add({**out.metrics, **term_metrics(out)})
        sums.add({"loss/total": (total.detach() * num_tokens, len(mb.target))})
    return sums


def token_numbers(cfg: Config, policy: Policy, rollout: Rollout, number: int) -> tuple[Tensor | None, ...]:  # (N,) each
    """What the loss of a micro-batch needs of each trained token: advantage, and log-probs known beforehand."""
    mb = rollout.micro_batches[number]
    advantage = rollout.advantage[mb.sequence]
    behaviour_logp = torch.tensor([x for row in mb.rows for x in rollout.completions[row].logps], device=policy.device)
    old_logp = rollout.old_logps[number] if rollout.old_logps else None
    ref_logp = reference_logps(policy, mb, temperature=cfg.temperature) if cfg.beta > 0 else None
    return advantage, behaviour_logp, old_logp, ref_logp


def loss(
    cfg: Config,
    tokens: TokenLogps,
    advantage: Tensor,  # (N,)
    behaviour_logp: Tensor,  # (N,)
    old_logp: Tensor | None,  # (N,) None: the policy has not changed since it sampled
    ref_logp: Tensor | None,  # (N,)
) -> LossOut:
    """Clipped surrogate, plus beta times the KL to the reference, over some trained tokens."""
    logp = tokens.logp
    old_logp = logp.detach() if old_logp is None else old_logp
    mask = torch.ones_like(logp, dtype=torch.bool)
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    out = clipped_surrogate(logp, old_logp, advantage, mask, epsilon_low=cfg.epsilon, epsilon_high=high)
    if ref_logp is not None:
        out = merge(out, kl_penalty(logp, old_logp, ref_logp, mask, beta=cfg.beta))
    out.metrics["policy/entropy"] = (tokens.entropy.detach().sum(), mask.sum())
    out.metrics["policy/behaviour_kl"] = (k3(behaviour_logp, old_logp).sum(), mask.sum())
    out.metrics["policy/behaviour_gap"] = ((behaviour_logp - old_logp).abs().sum(), mask.sum())
    return out
