"""Rollouts: prompts -> completions -> rewards -> advantages -> mini-batches, as a source of batches for Training.

    rewards = open_rewards(cfg, run)                             # your functions, before the model is loaded
    policy = open_policy(cfg, with_reference=cfg.has_reference)
    rollouts = Rollouts(run, cfg, policy, rewards)               # reads all prompts
    training = Training(run, cfg, policy, rollouts)              # plans the run, checks servers and gyms
    for rollout in training.batches():                           # sync weights, sample, reward; groups for each rank
        advantage = rollouts.advantage(rollout)                  # (B,), or one number per id
        rollouts.keep_samples(rollout, advantage)                # some rows for samples.jsonl
        batches = rollouts.pack(rollout, advantage)              # one MiniBatch per mini-batch, on the device
        for batch in rollouts.updates(*batches):                 # optimizer steps
            sums = backward(cfg, policy, batch)                  # the method's: trainer/methods/grpo.py
            training.clip_and_step(sums)
            training.log(sums, batch.computed_tokens)

A method customizes Rollouts through optional arguments:

    rewards              any object with names, submit(prompts, completions, step=) and metrics(). With `handlers`
                         (command -> function of the other ranks) it may use all ranks (trainer/ebft/structured.py);
                         with `score` it serves the default evaluation
    advantage            estimator: (Rollout) -> (P, G), or one number per id. Default: --advantage-estimator
    prompts(specs)       reads rows other than prompts; needs `source`
    source(engine, sampling)   completions from elsewhere than the engine alone
    steps_per_rollout    optimizer steps per rollout. Default: minibatches_per_rollout x num_iterations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from data.command.checks import reject_unused
from data.errors import UserError
from data.loader import Loader
from data.packing import Batch
from data.rows.held_out import train_and_held_out
from data.types import Prompt
from rollout.engine import Engine, EngineSource, Sampling
from rollout.engine import Source as CompletionSource
from rollout.rewards import table
from rollout.rewards.calls import TrainerState
from rollout.schedule.partial import PartialProducer
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer, sync_due
from rollout.schedule.replay import Replay
from trainer.config.groups import GroupConfig, PolicyGradientConfig
from trainer.config.policy import check_policy_options
from trainer.config.sampling import RewardedConfig
from trainer.metrics.metrics import MetricSums
from trainer.parallel.comm import is_main, mean_over_ranks, world_size
from trainer.policy.logps import Policy
from trainer.rl import setup
from trainer.rl.engine_choice import resolve_engine
from trainer.rl.entropy_target import EntropyTarget
from trainer.rl.evaluate import completion_metrics, evaluate_rewards, packing_metrics, reward_metrics
from trainer.rl.groups import Estimator, Groups, MissingRewards, Rollout, sample_rows, sequence_kl
from trainer.rl.minibatch import Advantages, MiniBatch, pack
from trainer.rl.rank0_rollout import AllRanksRewards, Rank0Rollout
from trainer.run.run import Run
from trainer.run.training import Training


class AnyMiniBatch(Protocol):
    """The batch of an optimizer step: MiniBatch, or the method's own kind."""

    is_first: bool  # no optimizer step has been taken on the rollout yet

    @property
    def batches(self) -> list[Batch]: ...  # its forward passes


B = TypeVar("B", bound=AnyMiniBatch)


def open_rewards(cfg: RewardedConfig, run: Run) -> table.Rewards:
    """Import the reward functions of --reward-funcs; their workers end with the run."""
    rewards = table.open_rewards(cfg.reward, run.note, trust_remote_code=cfg.model.trust_remote_code)
    return run.keep(AllRanksRewards(rewards) if cfg.reward.reward_on_all_ranks and world_size() > 1 else rewards)


class Rollouts:
    def __init__(
        self,
        run: Run,
        cfg: GroupConfig,
        policy: Policy,
        rewards: Any,
        *,
        advantage: Estimator | None = None,
        prompts: Callable[[Sequence[str]], Sequence[Prompt]] | None = None,
        source: Callable[[Engine, Sampling], CompletionSource] | None = None,
        steps_per_rollout: int | None = None,
    ) -> None:
        self.run, self.cfg, self.policy, self.rewards, self.overlap = run, cfg, policy, rewards, cfg.overlap
        self._estimator = advantage
        self.rows_per_batch, self.steps_per_batch = cfg.prompts_per_rollout, steps_per_rollout or cfg.steps_per_rollout
        if self.steps_per_batch % cfg.minibatches_per_rollout:
            raise UserError(
                f"minibatches_per_rollout={cfg.minibatches_per_rollout}: does not divide the {self.steps_per_batch} "
                "optimizer steps that this method takes on a rollout; remove --minibatches-per-rollout"
            )
        check_policy_options(
            cfg.policy_loss,
            cfg.correction,
            num_iterations=self.steps_per_batch // cfg.minibatches_per_rollout,
            minibatches=cfg.minibatches_per_rollout,
            kl_in_reward=cfg.advantage.kl_in_reward,
        )
        if source is not None:
            why = "with this method, which has its own source of completions"
            reject_unused(cfg.rollout, why, ("partial",), "rollout.")
        self.sampling = setup.training_sampling(cfg, policy)
        self.setup: setup.RolloutSetup | None = None
        read_eval = None  # the same as prompts
        if prompts is None:
            assert isinstance(cfg, RewardedConfig), f"{type(cfg).__name__} has no tools and gyms: pass prompts="
            self.setup = run.keep(setup.RolloutSetup(cfg, policy, run.note))
            prompts, read_eval = self.setup.prompts, partial(self.setup.prompts, held_out=True)
            source = source or self.setup.source
        elif source is None:
            raise UserError("Rollouts(prompts=...): needs source=, which completes these rows")
        self._open_source = source
        self.prompts, held_out = train_and_held_out(cfg.data, cfg.run.seed, prompts, read_eval)
        self.held_out = held_out[: cfg.data.max_eval_rows]
        self.holds_out = bool(self.held_out)
        if hasattr(rewards, "check_columns"):
            columns = () if self.setup is None else self.setup.columns
            rewards.check_columns(self.prompts, "data", columns)
            rewards.check_columns(self.held_out, "eval_data", columns)
        self.extra_tokens = 0 if self.setup is None else self.setup.extra_tokens  # in addition to prompt and completion

    # Called by Training, in this order: whatever can be wrong with the input shows before the run folder exists.

    def resolve(self, modules: list[nn.Module]) -> GroupConfig:
        rows = [*self.prompts, *self.held_out]
        self.cfg = resolve_engine(self.cfg, self.policy, rows, modules, extra_tokens=self.extra_tokens)
        self.loader = Loader(self.prompts, batch_size=self.rows_per_batch, seed=self.cfg.run.seed)
        return self.cfg

    def plan(self, training: Training) -> dict[str, Any]:
        self.training, cfg, overlap, run = training, self.cfg, self.overlap, self.run
        if training.evaluate == self.evaluate and not hasattr(self.rewards, "score"):
            raise UserError("Rollouts(rewards=...): has no score(), so --eval-data needs Training(evaluate=...)")
        if hasattr(self.rewards, "run"):  # reward functions may ask for the progress of the run
            rows = training.total_steps * self.rows_per_batch
            epochs = rows / (self.steps_per_batch * self.loader.rows_per_epoch)
            self.rewards.run = TrainerState(max_steps=training.total_steps, num_train_epochs=epochs)
        setup.check_engine_setup(cfg, self.policy, run)
        if is_main() and self.setup is not None:
            self.setup.connect(self.prompts, self.rewards)
        self.planner = Planner(
            self.loader,
            num_generations=cfg.num_generations,
            seed=cfg.run.seed,
            reroll_from=overlap.reroll_from(training.total_steps // self.steps_per_batch),
            reroll_max_groups=overlap.reroll_max_groups,
            order=setup.load_curriculum(overlap.curriculum),
            num_queued=cfg.queued_groups,
        )
        self.replay = Replay(
            size=overlap.replay_buffer_size, max_age=overlap.replay_max_age, seed=cfg.run.seed, prompts=self.prompts,
            sampling=self.sampling,
        )  # fmt: skip
        self.entropy = None if cfg.policy_loss.entropy_target is None else EntropyTarget(cfg.policy_loss)
        state = {"planner": self.planner, "replay": self.replay, "entropy": self.entropy}
        state["rewards"] = self.rewards if hasattr(self.rewards, "state_dict") else None
        return {name: holder for name, holder in state.items() if holder is not None}

    def start(self) -> None:
        """Start the engine, and what samples and rewards with it."""
        cfg, run, overlap, total_steps = self.cfg, self.run, self.overlap, self.training.total_steps
        rows = [*self.prompts, *self.held_out]
        engine = setup.start_engine(cfg, self.policy, run, rows, extra_tokens=self.extra_tokens)
        if is_main() and self.setup is not None:
            self.setup.start(engine, run.dir)
        self.rank0 = Rank0Rollout(self.policy, engine, self.prompts)
        self.engine = self.rank0.engine
        if cfg.rollout.engine == "vllm":
            from trainer.rl.servers import WeightCommands

            self.rank0.handlers |= WeightCommands(self.policy).handlers
        self.rank0.handlers |= getattr(self.rewards, "handlers", {})
        self.held_out_source = run.keep(self._source(setup.evaluation_sampling(self.sampling, cfg.rollout)))
        limits: dict[str, Any] = {"max_staleness": overlap.max_staleness, "steps_per_batch": self.steps_per_batch}
        producer: Producer
        if cfg.rollout.partial:
            producer = PartialProducer(self.engine, self.sampling, self.planner, **limits)
        else:
            producer = Producer(
                self._source(self.sampling),
                self.planner,
                depth=overlap.prefetch_depth if overlap.async_prefetch else 0,
                last_step=total_steps,
                poll=self.engine.poll,
                **limits,
            )
        self.producer = run.keep(producer)
        self.missing_rewards = None
        if hasattr(self.rewards, "functions"):  # which may return None
            assert isinstance(cfg, RewardedConfig)
            self.missing_rewards = MissingRewards(
                [function.spec for function in self.rewards.functions],
                self.training.counters,
                run.note,
                limit=cfg.reward.reward_none_limit,
                num_batches=math.ceil(total_steps / self.steps_per_batch),
            )
        self.groups = Groups(cfg, self.producer, self.rewards, self.replay, self._estimator, self.missing_rewards)

    def _source(self, sampling: Sampling) -> CompletionSource:
        source = self._open_source(self.engine, sampling)
        # Episodes, replay, and an estimator called by dynamic sampling may read tokens on rank 0.
        needs_tokens = self.overlap.replay_buffer_size or self.overlap.dynamic_sampling
        if type(source) is EngineSource and not needs_tokens and not getattr(self.rewards, "reads_ids", True):
            source.sampling = replace(sampling, tokens_stay=True)
        return source

    # One rollout.

    def next(self) -> Rollout:
        """Sync weights if due, sample and reward on rank 0, and assign whole groups to the ranks.

        On rank 0, `sampled` is everything that was sampled, before groups were replaced, and `full_rollout` the rollout
        of all ranks. On other ranks, `sampled` is the rank's rollout and `full_rollout` is None.
        """
        self.rank0.run(self._sync_weights)
        self.full_rollout = self.rank0.run(self._sample)
        rollout = self.rank0.scatter(self.full_rollout, self.cfg.minibatches_per_rollout)
        timer = self.training.timer
        timer.lap("rollout_s")
        timer.move("rollout_s", "reward_s", rollout.reward_s)
        self.rollout, self.sampled = rollout, rollout.sampled or rollout
        self.kl: Tensor | None = None  # (B,) logged if the KL is a cost in the reward
        self.training.counters.prompts = self.planner.consumed + len(self.sampled.groups)
        return rollout

    def _sync_weights(self) -> None:
        """Send the weights to the engine if its own are vllm_sync_interval steps old, or if it is asleep."""
        has_none = self.engine.version < 0  # servers, before the first load
        due = sync_due(self.training.step, self.engine.version, self.overlap.vllm_sync_interval)
        if has_none or due or self.engine.asleep:
            self.engine.load(self.training.step)

    def _sample(self) -> Rollout:
        rollout = self.groups.next(self.training.step, self.engine.version)
        if not self.overlap.async_prefetch:
            self.engine.sleep()
        return rollout

    @property
    def _policy_gradient(self) -> PolicyGradientConfig:
        assert isinstance(self.cfg, PolicyGradientConfig), f"{type(self.cfg).__name__} has no flags of a policy loss"
        return self.cfg

    def advantage(self, rollout: Rollout) -> Advantages:
        if self.cfg.advantage.kl_in_reward:  # --kl-in-reward: r - beta KL, before the advantage
            self.kl = sequence_kl(self._policy_gradient, self.policy, rollout.completions)
        return self.groups.advantage(rollout, self.kl)

    def pack(
        self,
        rollout: Rollout,
        advantage: Advantages,
        *,
        rows: Iterable[int] | None = None,
        extra: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> list[MiniBatch]:
        """Pack each mini-batch of the rollout; its loss is divided by its own counts.

        `rows`: indices into rollout.completions of those to train on; None: all. MiniBatch.rows are such indices.
        `extra`: columns of the method, for each completion one number per id.
        """
        completions = rollout.completions
        replayed = rollout.replayed_logps(self.overlap.replay_recompute_logps)
        wanted = set(range(len(completions)) if rows is None else rows)
        packed, stop = [], 0
        for number, minibatch in enumerate(rollout.minibatches):
            start, stop = stop, stop + len(minibatch.completions)
            kept = [row for row in range(start, stop) if row in wanted]
            batch = pack(
                self._policy_gradient,
                self.policy,
                [completions[row] for row in kept],
                advantage[kept] if isinstance(advantage, Tensor) else [advantage[row] for row in kept],
                replayed_logps=replayed and [replayed[row] for row in kept],
                extra={name: [values[row] for row in kept] for name, values in (extra or {}).items()},
            )
            batch.rows, batch.number = [kept[row] for row in batch.rows], number
            packed.append(batch)
        return packed

    def keep_samples(self, rollout: Rollout, advantage: Advantages) -> None:
        """Write some completions to samples.jsonl."""
        self.run.sample(self.training.step + 1, sample_rows(rollout, advantage, self.policy.tokenizer))

    def updates(self, *batches: B) -> Iterator[B]:
        """Yield the mini-batches in turn for the optimizer steps on this rollout, within total_steps."""
        num_minibatches = self.cfg.minibatches_per_rollout
        if num_minibatches > 1 and len(batches) != num_minibatches:
            raise UserError(
                f"minibatches_per_rollout={num_minibatches}: this method trains on {len(batches)}; remove "
                "--minibatches-per-rollout, or pack mini-batches with rollouts.pack(rollout, advantage)"
            )
        needs_old = self.steps_per_batch > 1 and self.cfg.correction.proximal_policy == "step"
        assert len(batches) <= self.steps_per_batch, f"{len(batches)} batches for {self.steps_per_batch} steps"
        with_ratio = [batch for batch in batches if isinstance(batch, MiniBatch)]  # a method may have its own kind
        assert not (needs_old and any(batch.at_start is None for batch in with_ratio)), (
            "several steps on a rollout: call logps_at_start(cfg, policy, batches, rollouts.steps_per_batch)"
        )
        steps = min(self.steps_per_batch, self.training.total_steps - self.training.step)
        for number in range(steps):
            self.training.step += 1
            batch = batches[number % len(batches)]
            batch.is_first = number == 0
            if self.entropy is not None and isinstance(batch, MiniBatch):  # --entropy-target
                batch.entropy_coef = self.entropy.coef
            self.batch: AnyMiniBatch = batch
            yield batch
            if self.overlap.async_prefetch and number + 1 < self.steps_per_batch:
                self.rank0.run(self._refresh)

    def _refresh(self) -> None:
        """Between two steps on a rollout: continue sampling ahead with the current weights."""
        self._sync_weights()
        self.producer.top_up(self.engine.version)

    def finish(self) -> None:
        if is_main():
            self.producer.done()

    # Metrics and evaluation.

    @property
    def epoch(self) -> float:
        return self.planner.epoch

    def describe(self) -> str:
        return f"prompts {', '.join(dict.fromkeys(prompt.source for prompt in self.rollout.prompts))}"

    def metrics(self, sums: MetricSums) -> dict[str, float]:
        sampled = self.sampled
        return {
            **reward_metrics(sampled.names, sampled.values, sampled.reward),
            **completion_metrics(sampled.completions),
            **packing_metrics(self.batch.batches),
            **self.rollout.metrics,
            **({} if self.kl is None else {"policy/ref_kl": mean_over_ranks(self.kl)}),
            **self.rewards.metrics(),
            **self._adapt_entropy(sums),
            **self.producer.metrics(self.training.step - 1),
        }

    def _adapt_entropy(self, sums: MetricSums) -> dict[str, float]:
        """Adapt the entropy coefficient of the next step to the entropy of this one, which needs a host sync."""
        if self.entropy is None:
            return {}
        if not isinstance(self.batch, MiniBatch) or "policy/entropy" not in sums.pairs:
            target = self.cfg.policy_loss.entropy_target
            raise UserError(f"entropy_target={target}: this method measures no entropy; remove --entropy-target")
        means = sums.means()
        if "policy/entropy" in means:  # missing if no token was trained
            self.entropy.observe(means["policy/entropy"])
        return {"policy/entropy_coef": self.batch.entropy_coef}

    def engine_metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    def evaluate(self) -> dict[str, float]:
        """Rewards of the held-out prompts; all ranks call it."""
        return self.rank0.run(self._evaluate) or {}

    def _evaluate(self) -> dict[str, float]:
        check = None if self.missing_rewards is None else self.missing_rewards.evaluated
        num, step = self.cfg.num_generations_eval, self.training.step
        return evaluate_rewards(self.engine, self.held_out_source, step, self.held_out, self.rewards, check, num)
