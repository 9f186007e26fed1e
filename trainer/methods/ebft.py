"""EBFT: match the features of the true completion, not its tokens (Jelassi et al. 2026, arXiv:2603.12248).

A frozen network gives a vector for each completion. Rollouts are rewarded for being like the true completion there, and
for being unlike each other (losses/ebft.py), so that their mean meets it: a policy gradient without a verifier.

    structured   prompts -> generate -> features -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> step
    strided      documents -> continue from anchors -> features -> rewards -> advantage -> (logps -> loss) -> step

Structured mode samples whole completions by any engine and takes GRPO's losses, corrections and overlap. Strided mode
continues a text by a few tokens every few tokens, all at once and in this process, and needs no prompts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

from data.loader import Loader
from data.rows.documents import load_documents
from data.rows.targets import load_targets
from data.strided import Document, require_anchors
from data.types import TargetPrompt
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.target import TargetEpisode
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer
from rollout.schedule.replay import Replay
from trainer.config.ebft import EbftConfig
from trainer.ebft import strided, structured
from trainer.ebft.features import FeatureNetwork, feature_policy
from trainer.metrics.counters import Counters, Timer
from trainer.offline.loop import Offline
from trainer.parallel.comm import all_count, is_main, pick_device, rank
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy
from trainer.policy.optim import BadSteps, build_optimizer, clip_and_step
from trainer.policy.sharding import parallelize
from trainer.rl import rollouts
from trainer.rl.groups import GroupBatch, Groups
from trainer.rl.rank0_rollout import Lead
from trainer.rl.setup import load_curriculum
from trainer.rl.step import backward, prepare
from trainer.run.run import Run, open_run


@dataclass(frozen=True, kw_only=True)
class Config(EbftConfig):
    """Energy-based fine-tuning: match the features of true completions with those of rollouts."""


def train(cfg: Config) -> None:
    overlap = cfg.overlap
    with open_run(cfg, cfg.run.method) as run:
        with_reference = cfg.features.feature_model is None or cfg.policy_loss.beta > 0
        policy = parallelize(
            cfg.parallel, load_policy(cfg.model, cfg.lora, pick_device(), with_reference=with_reference)
        )
        network = FeatureNetwork(cfg.features, cfg.run, feature_policy(cfg.features, cfg.model, policy, cfg.parallel))
        if cfg.mode == "strided":
            return train_strided(cfg, run, policy, network)

        prompts = targets_of(cfg, policy, network, cfg.data.data)
        held_out = targets_of(cfg, policy, network, cfg.data.eval_data)[: cfg.data.max_eval_rows]
        loader = Loader(prompts, batch_size=cfg.prompts_per_step, seed=cfg.run.seed)
        total_steps = cfg.run.total_steps(loader.rows_per_epoch, cfg.prompts_per_step, cfg.num_iterations)
        optimizer, schedule = build_optimizer(policy.model, cfg.optim, total_steps)
        rollouts.check_servers(cfg, policy, run)
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
        state = {"planner": planner, "counters": counters, "replay": replay}
        run.begin(total_steps, f"{run.method} {cfg.model.model}")
        lead = Lead(policy, rollouts.start_engine(cfg, policy, run, prompts + held_out), prompts)
        engine = lead.engine
        step = run.restore(policy, optimizer, schedule, state)
        multiplier = cfg.gt_length_multiplier if cfg.adaptive_max_tokens else None
        episode = TargetEpisode(policy.tokenizer, gt_length_multiplier=multiplier)
        sampling = rollouts.training_sampling(cfg, policy)
        evaluation = run.keep(EpisodeSource(engine, sampling, episode))
        producer = run.keep(
            Producer(
                EpisodeSource(engine, sampling, episode),
                planner,
                depth=overlap.prefetch_depth if overlap.async_prefetch else 0,
                max_staleness=overlap.max_staleness,
                steps_per_batch=cfg.num_iterations,
                last_step=total_steps,
                tend=engine.tend,
            )
        )
        rewards = structured.FeatureRewards(network, num_generations=cfg.num_generations)
        lead.orders[structured.ORDER] = rewards.follow
        groups = Groups(cfg, producer, rewards, replay, partial(structured.estimate, cfg))

        def sample(step: int) -> GroupBatch:
            rollouts.sync(engine, step, overlap.vllm_sync_interval)
            batch = groups.next(step, engine.version)
            if not overlap.async_prefetch:
                engine.sleep()
            return batch

        if step == 0 and held_out:
            run.log(0, structured.evaluate(cfg, policy, lead, evaluation, rewards, held_out, version=0))

        while step < total_steps:
            timer = Timer()
            whole = lead.run(partial(sample, step))  # on rank 0
            feature_metrics = structured.feature_metrics(cfg, rewards, whole)
            batch = lead.share(whole)  # whole groups, different ones on every rank
            timer.lap("rollout_s")
            timer.move("rollout_s", "reward_s", batch.reward_s)
            advantage = groups.advantage(batch)  # (B,)
            old_logps = batch.old_logps(overlap.replay_recompute_logps)
            # Losses grow in step with their advantages, so the weight of the policy loss can be theirs.
            weighted = advantage * cfg.features.rl_coef
            rollout = prepare(cfg, policy, batch.completions, weighted, old_logps=old_logps)
            targets = [group.prompt for group in batch.groups]
            run.sample(
                step + 1, rollouts.sample_rows(batch.prompts, batch.completions, batch.table, advantage.tolist())
            )
            sampled = batch.sampled or batch  # all there was, on rank 0
            counters.prompts = planner.consumed + len(sampled.groups)

            for iteration in range(min(cfg.num_iterations, total_steps - step)):
                step += 1
                learning_rate = float(schedule.get_last_lr()[0])
                sums = backward(cfg, policy, rollout, first=iteration == 0)
                num_target = structured.add_target(cfg, policy, targets, sums)
                sources = ", ".join(dict.fromkeys(prompt.source for prompt in batch.prompts))
                where, limit = f"step {step}, rank {rank()}, prompts {sources}", cfg.optim.max_grad_norm
                grad_norm = clip_and_step(policy.model, optimizer, schedule, limit, where, sums, bad_steps)
                num_tokens = num_target + sum(mb.num_tokens for mb in rollout.micro_batches)
                num_tokens = all_count(num_tokens, "tokens of the step")
                timer.lap("train_s")
                counters.tokens += num_tokens
                metrics = {
                    **rollouts.reward_metrics(sampled.table, sampled.reward),
                    **rollouts.completion_metrics(sampled.completions),
                    **rollouts.packing_metrics(rollout.micro_batches),
                    **batch.metrics,
                    **feature_metrics,
                    **producer.metrics(step - 1),
                    **sums.means(),
                    "optim/grad_norm": grad_norm,
                    "optim/lr": learning_rate,
                    "data/epoch": planner.epoch,
                    **counters.metrics(),
                    **timer.metrics(num_tokens),
                }
                if held_out and cfg.run.eval_due(step, total_steps):
                    metrics |= structured.evaluate(cfg, policy, lead, evaluation, rewards, held_out, version=step)
                run.log(step, metrics | engine.metrics())
                timer = Timer()
                if overlap.async_prefetch and iteration + 1 < cfg.num_iterations:
                    lead.run(partial(rollouts.go_on, engine, producer, step, overlap.vllm_sync_interval))
            if is_main():
                producer.done()
            run.maybe_save(step, policy, optimizer, schedule, state)
        run.finish(policy)


def train_strided(cfg: Config, run: Run, policy: Policy, network: FeatureNetwork) -> None:
    size = cfg.run.sequences_per_step
    documents = documents_of(cfg, policy, network, cfg.data.data)
    held_out = documents_of(cfg, policy, network, cfg.data.eval_data, limit=cfg.data.max_eval_rows)
    multiple = network.policy.row_multiple
    offline = Offline(run, cfg, policy, documents, size=cfg.strided.plan.size)

    def evaluate() -> dict[str, float]:
        return strided.evaluate(cfg, policy, network, held_out, batch_size=size)

    offline.begin(evaluate)
    for batch in offline.steps():
        # Of each document in the run: its seeds are those of a run that was not broken off, on any number of ranks.
        numbers = [(offline.step - 1) * size + place for place in offline.places]
        step = strided.continue_all(cfg, policy, batch, seed=cfg.run.seed, numbers=numbers, multiple=multiple)
        offline.timer.lap("rollout_s")
        step = strided.judge(network, step)
        run.sample(offline.step, strided.sample_rows(policy, batch, step))
        offline.timer.lap("reward_s")
        sums = strided.backward(cfg, policy, step)
        if offline.step == run.start_step + 1:  # once: it is about the model's code, and waits for the device
            strided.check_gap(cfg, policy, sums, offline.step)
        offline.take_step(sums)
        offline.log_and_save(sums, step.num_computed, evaluate, strided.step_metrics(network, step))
    run.finish(policy)


def context_of(policy: Policy, network: FeatureNetwork) -> int | None:
    """Tokens that both the policy and the feature network can read."""
    lengths = [both.context_length for both in (policy, network.policy) if both.context_length is not None]
    return min(lengths, default=None)


def targets_of(cfg: Config, policy: Policy, network: FeatureNetwork, specs: tuple[str, ...]) -> list[TargetPrompt]:
    if not specs:
        return []
    return load_targets(
        specs,
        policy.tokenizer,
        data_format=cfg.data.data_format,
        system_prompt=cfg.model.system_prompt,
        chat_template_kwargs=cfg.model.chat_template_kwargs,
        max_prompt_length=cfg.max_prompt_length,
        context_length=context_of(policy, network),
        max_completion_length=cfg.max_completion_length,
        options=cfg.format,
        cfg=cfg,
    )


def documents_of(
    cfg: Config, policy: Policy, network: FeatureNetwork, specs: tuple[str, ...], limit: int | None = None
) -> list[Document]:
    if not specs:
        return []
    documents = load_documents(
        specs,
        policy.tokenizer,
        data_format=cfg.data.data_format,
        system_prompt=cfg.model.system_prompt,
        chat_template_kwargs=cfg.model.chat_template_kwargs,
        max_length=cfg.strided.max_length,
        context_length=context_of(policy, network),
        cfg=cfg,
    )
    documents, plan = documents[:limit], cfg.strided.plan
    require_anchors(documents, plan)
    if plan.min_completion_prefix and not any(document.prompt_length for document in documents):
        raise ValueError(
            f"min_completion_prefix={plan.min_completion_prefix}: has no effect, no document has a prompt; use "
            "context_length"
        )
    if cfg.features.ce_coef:
        return documents  # one without an anchor still has tokens of its own
    kept = [document for document in documents if plan.anchors(document)]
    if len(kept) < len(documents):
        left_out = len(documents) - len(kept)
        print(f"data: left out {left_out} of {len(documents)} documents without room for an anchor", file=sys.stderr)
    return kept
