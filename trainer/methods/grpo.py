"""GRPO: sample a group of completions per prompt, reward them, compare within the group, clip, step.

    prompts -> generate -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> clip and step -> log

Shao et al. 2024 (arXiv:2402.03300), with DAPO's token-level normaliser (Yu et al. 2025, arXiv:2503.14476) by default:
the sum over all trained tokens of the step, divided once by their number. --loss-type picks another of
losses/policy.py. With --async-prefetch the next batches are sampled while this one is trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from data.loader import Loader
from rollout.episodes.options import ToolConfig
from rollout.gyms.options import NemoGymConfig, OpenEnvConfig
from rollout.rewards.calls import TrainerState
from rollout.rewards.options import RewardConfig
from rollout.rewards.table import open_rewards
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer
from rollout.schedule.replay import Replay
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.config.blocks import (
    Flat,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PromptConfig,
    RolloutConfig,
    RunConfig,
    check_engine,
    check_evaluation,
)  # fmt: skip
from trainer.config.groups import AdvantageConfig, AsyncConfig, check_overlap
from trainer.config.policy import CorrectionConfig, PolicyLossConfig, check_policy_options
from trainer.metrics.counters import Counters, Timer
from trainer.parallel.comm import all_count, is_main, mean_over_ranks, pick_device, rank
from trainer.policy.load import load_policy
from trainer.policy.optim import BadSteps, build_optimizer, clip_and_step
from trainer.policy.sharding import parallelize
from trainer.rl import rollouts
from trainer.rl.groups import GroupBatch, Groups, per_completion, sequence_kl
from trainer.rl.rank0_rollout import Lead
from trainer.rl.setup import Surroundings, check_surroundings, load_curriculum
from trainer.rl.step import backward, prepare
from trainer.rl.unrewarded import Unrewarded
from trainer.run.run import open_run


@dataclass(frozen=True, kw_only=True)
class Config:
    """Group relative policy optimisation: sample, reward, compare within each group, clip, step."""

    model: Flat[ModelConfig]
    data: Flat[PromptConfig] = field(default_factory=PromptConfig)
    run: Flat[RunConfig] = field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    reward: Flat[RewardConfig] = field(default_factory=RewardConfig)
    tools: Flat[ToolConfig] = field(default_factory=ToolConfig)
    openenv: OpenEnvConfig = field(default_factory=OpenEnvConfig)
    nemo_gym: NemoGymConfig = field(default_factory=NemoGymConfig)
    advantage: Flat[AdvantageConfig] = field(default_factory=AdvantageConfig)
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=PolicyLossConfig)
    correction: Flat[CorrectionConfig] = field(default_factory=CorrectionConfig)
    overlap: Flat[AsyncConfig] = field(default_factory=AsyncConfig)

    num_generations: int = 8
    """Completions per prompt: one group."""
    max_prompt_length: int | None = None
    """Prompts of more tokens are left out, and counted; None keeps all."""
    max_completion_length: int = 256
    """Tokens a completion may have, those of tools included."""
    temperature: float = 1.0
    """Sampling temperature; log-probs in the loss are those of the same temperature."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the model's own end tokens."""
    share_prompt: bool = True
    """Compute a prompt once for its group, with the same gradient; --no-packing lays out each completion in full."""
    num_iterations: int = 1
    """Optimizer steps taken on each batch of completions."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        check_engine(self.rollout, self.vllm, self.sync)
        check_overlap(self.overlap, self.rollout, self.sync, is_lora=self.lora.r > 0)
        check_surroundings(self)
        check_policy_options(
            self.policy_loss,
            self.correction,
            num_iterations=self.num_iterations,
            kl_in_reward=self.advantage.kl_in_reward,
        )
        if self.num_generations < 2:
            raise ValueError(f"num_generations={self.num_generations}: a group needs at least 2 completions to compare")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be above 0, a greedy group has nothing to compare")
        if "" in self.stop:
            raise ValueError("stop='': an empty stop string would end every completion; remove it")
        for name in ("max_completion_length", "num_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.advantage.overlong_margin > self.max_completion_length:
            margin = self.advantage.overlong_margin
            raise ValueError(
                f"overlong_margin={margin}: is more than max_completion_length={self.max_completion_length}; lower it"
            )
        if not self.overlap.replay_recompute_logps and self.correction.proximal_policy == "behaviour":
            raise ValueError(
                "replay_recompute_logps=False: proximal_policy=behaviour takes every ratio against the engine anyway; "
                "leave one of them out"
            )
        if self.run.sequences_per_step % self.num_generations:
            per_device = self.run.per_device_train_batch_size
            fitting = math.lcm(self.num_generations, per_device) // per_device
            raise ValueError(
                f"num_generations={self.num_generations}: per_device_train_batch_size x gradient_accumulation_steps = "
                f"{self.run.sequences_per_step} completions a step do not hold whole groups; use a multiple, for "
                f"example gradient_accumulation_steps={fitting}"
            )

    @property
    def prompts_per_step(self) -> int:
        return self.run.sequences_per_step // self.num_generations


def train(cfg: Config) -> None:
    overlap = cfg.overlap
    with open_run(cfg, cfg.run.method) as run:
        rewards = run.keep(open_rewards(cfg.reward, run.note, trust_remote_code=cfg.model.trust_remote_code))
        policy = parallelize(
            cfg.parallel, load_policy(cfg.model, cfg.lora, pick_device(), with_reference=cfg.policy_loss.beta > 0)
        )
        around = run.keep(Surroundings(cfg, policy, run.note))
        prompts = around.prompts(cfg.data.data)
        held_out = around.prompts(cfg.data.eval_data, held_out=True)[: cfg.data.max_eval_rows]
        rewards.check_columns(prompts, "data", around.columns)
        rewards.check_columns(held_out, "eval_data", around.columns)
        sampling = rollouts.training_sampling(cfg, policy)
        loader = Loader(prompts, batch_size=cfg.prompts_per_step, seed=cfg.run.seed)
        total_steps = cfg.run.total_steps(loader.rows_per_epoch, cfg.prompts_per_step, cfg.num_iterations)
        epochs = total_steps * cfg.prompts_per_step / (cfg.num_iterations * loader.rows_per_epoch)
        rewards.run = TrainerState(max_steps=total_steps, num_train_epochs=epochs)
        optimizer, schedule = build_optimizer(policy.model, cfg.optim, total_steps)
        rollouts.check_servers(cfg, policy, run)
        if is_main():
            around.connect(prompts, rewards)
        planner = Planner(
            loader,
            num_generations=cfg.num_generations,
            seed=cfg.run.seed,
            reroll_from=overlap.reroll_from(total_steps // cfg.num_iterations),
            reroll_max_groups=overlap.reroll_max_groups,
            order=load_curriculum(overlap.curriculum),
        )
        replay = Replay(
            size=overlap.replay_buffer_size, max_age=overlap.replay_max_age, seed=cfg.run.seed, prompts=prompts
        )
        counters = Counters()
        bad_steps = BadSteps(cfg.optim, counters, run.note)
        state = {"planner": planner, "rewards": rewards, "counters": counters, "replay": replay}
        run.begin(total_steps, f"{run.method} {cfg.model.model}")
        lead = Lead(policy, rollouts.start_engine(cfg, policy, run, prompts + held_out, unseen=around.unseen), prompts)
        engine = lead.engine
        step = run.restore(policy, optimizer, schedule, state)
        source = around.source(engine, sampling)
        evaluation = run.keep(around.source(engine, rollouts.evaluation_sampling(sampling, cfg.rollout)))
        producer = run.keep(
            Producer(
                source,
                planner,
                depth=overlap.prefetch_depth if overlap.async_prefetch else 0,
                max_staleness=overlap.max_staleness,
                steps_per_batch=cfg.num_iterations,
                last_step=total_steps,
                tend=engine.tend,
            )
        )
        unrewarded = Unrewarded(
            [function.spec for function in rewards.functions],
            counters,
            run.note,
            limit=cfg.reward.reward_none_limit,
            num_batches=math.ceil(total_steps / cfg.num_iterations),
        )
        groups = Groups(cfg, producer, rewards, replay, unrewarded=unrewarded)

        def evaluate(step: int) -> dict[str, float]:
            return lead.run(lambda: rollouts.evaluate(engine, evaluation, step, held_out, rewards, unrewarded)) or {}

        def sample(step: int) -> GroupBatch:
            rollouts.sync(engine, step, overlap.vllm_sync_interval)
            batch = groups.next(step, engine.version)
            if not overlap.async_prefetch:
                engine.sleep()
            return batch

        if step == 0 and held_out:
            run.log(0, evaluate(0))

        while step < total_steps:
            timer = Timer()
            batch = lead.share(lead.run(partial(sample, step)))  # whole groups, different ones on every rank
            timer.lap("rollout_s")
            timer.move("rollout_s", "reward_s", batch.reward_s)
            kl = sequence_kl(cfg, policy, batch.completions) if cfg.advantage.kl_in_reward else None
            advantage = groups.advantage(batch, kl)  # (B,), or a number for each id
            old_logps = batch.old_logps(overlap.replay_recompute_logps)
            rollout = prepare(cfg, policy, batch.completions, advantage, old_logps=old_logps)
            run.sample(
                step + 1, rollouts.sample_rows(batch.prompts, batch.completions, batch.table, per_completion(advantage))
            )
            sampled = batch.sampled or batch  # all there was, on rank 0
            counters.prompts = planner.consumed + len(sampled.groups)

            for iteration in range(min(cfg.num_iterations, total_steps - step)):
                step += 1
                learning_rate = float(schedule.get_last_lr()[0])
                sums = backward(cfg, policy, rollout, first=iteration == 0)
                sources = ", ".join(dict.fromkeys(prompt.source for prompt in batch.prompts))
                where, limit = f"step {step}, rank {rank()}, prompts {sources}", cfg.optim.max_grad_norm
                grad_norm = clip_and_step(policy.model, optimizer, schedule, limit, where, sums, bad_steps)
                num_tokens = all_count(sum(mb.num_tokens for mb in rollout.micro_batches), "tokens of the step")
                timer.lap("train_s")
                counters.tokens += num_tokens
                metrics = {
                    **rollouts.reward_metrics(sampled.table, sampled.reward),
                    **rollouts.completion_metrics(sampled.completions),
                    **rollouts.packing_metrics(rollout.micro_batches),
                    **batch.metrics,
                    **({} if kl is None else {"policy/ref_kl": mean_over_ranks(kl)}),
                    **rewards.metrics(),
                    **producer.metrics(step - 1),
                    **sums.means(),
                    "optim/grad_norm": grad_norm,
                    "optim/lr": learning_rate,
                    "data/epoch": planner.epoch,
                    **counters.metrics(),
                    **timer.metrics(num_tokens),
                }
                if held_out and cfg.run.eval_due(step, total_steps):
                    metrics |= evaluate(step)
                run.log(step, metrics | engine.metrics())
                timer = Timer()
                if overlap.async_prefetch and iteration + 1 < cfg.num_iterations:
                    lead.run(partial(rollouts.go_on, engine, producer, step, overlap.vllm_sync_interval))
            if is_main():
                producer.done()
            run.maybe_save(step, policy, optimizer, schedule, state)
        run.finish(policy)
