"""Session: what every sampling method builds and keeps, so that a method file is its loop.

    with Session(cfg) as s:                         # reads all input, makes the run folder, starts the engine, restores
        for rollout in s.rollouts():                # new weights to the engine if due; whole groups to each rank
            advantage = s.advantage(rollout)        # by the estimator that sampling judged groups with
            s.keep_samples(rollout, advantage)      # some rows for samples.jsonl
            batches = s.pack(rollout, advantage)    # one for each mini-batch, on the device
            for batch in s.updates(*batches):       # s.step counts optimizer steps
                sums = backward(cfg, s.policy, batch)   # the method's own: trainer/methods/grpo.py
                s.clip_and_step(sums, batch)        # clip, check for non-finite numbers, step, schedule
                s.log(sums, batch)                  # one line per optimizer step; evaluates when due

What a method does differently it passes in, as functions of the session, called once s.policy is loaded:

    rewards(s)                 an object with names, submit(prompts, completions, step=) and metrics(), instead of
                               reward functions. With `handlers`, command -> function of the other ranks, it may
                               use all ranks (trainer/ebft/structured.py); with `score` it is evaluated by default
    prompts(s, specs)          other rows than prompts
    source(s, sampling)        other completions than the engine's own
    evaluate(s)                another evaluation, called by all ranks
    advantage                  another estimator: (GroupRewards) -> (P, G), or one number per id
    frozen(s)                  further models without gradient, by name: s.frozen["teacher"]; one with `read_prompts`
                               gets all prompts of the training rows before there is a run folder
    trained(s)                 further trained modules, by name: s.trained["critic"]. Each has an optimizer of its own,
                               by cfg.optim or, for a pair (module, OptimConfig), by that one; it is stepped with the
                               policy, clipped on its own and checkpointed. All ranks begin with rank 0's weights, and
                               their gradients are added up: divide by a count over all ranks.
    extra_state                anything with state_dict and load_state_dict that a checkpoint keeps, by name
    with_reference             whether to load a reference model; by default cfg.has_reference: if beta is above 0
    steps_per_rollout          optimizer steps on one batch, if not minibatches_per_rollout x num_iterations: the
                               schedule, staleness and the number of rollouts follow from it
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from data.errors import UserError
from data.loader import Loader
from data.rows.held_out import train_and_held_out
from data.types import Prompt
from losses.advantage import Advantage, GroupRewards
from rollout.engine import Sampling, Source
from rollout.rewards.calls import TrainerState
from rollout.rewards.table import open_rewards
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer, sync_due
from rollout.schedule.replay import Replay
from trainer.config.blocks import OptimConfig, steps_per_epoch
from trainer.config.checks import reject_unused
from trainer.config.policy import check_policy_options
from trainer.metrics.metrics import Counters, MetricSums, Timer
from trainer.parallel.comm import all_count, is_main, mean_over_ranks, pick_device, rank
from trainer.policy.compile_choice import resolve_compile
from trainer.policy.load import load_policy
from trainer.policy.optim import BadSteps, TrainedModule, build_optimizer, launch_step
from trainer.policy.reference import MovingReference
from trainer.policy.sharding import parallelize
from trainer.rl import setup
from trainer.rl.engine_choice import resolve_engine
from trainer.rl.entropy_target import EntropyTarget
from trainer.rl.evaluate import completion_metrics, evaluate_rewards, packing_metrics, reward_metrics, sample_rows
from trainer.rl.groups import GroupBatch, Groups, MissingRewards, per_completion, sequence_kl
from trainer.rl.minibatch import MiniBatch, pack
from trainer.rl.rank0_rollout import Rank0Rollout
from trainer.run.run import open_run


class Session:
    def __init__(
        self,
        cfg: Any,
        *,
        rewards: Callable[[Session], Any] | None = None,
        prompts: Callable[[Session, Sequence[str]], list[Prompt]] | None = None,
        source: Callable[[Session, Sampling], Source] | None = None,
        evaluate: Callable[[Session], dict[str, float]] | None = None,
        advantage: Callable[[GroupRewards], Advantage] | None = None,
        frozen: Callable[[Session], Mapping[str, Any]] | None = None,
        trained: Callable[[Session], Mapping[str, nn.Module | tuple[nn.Module, OptimConfig]]] | None = None,
        extra_state: Mapping[str, Any] | None = None,
        with_reference: bool | None = None,
        steps_per_rollout: int | None = None,
    ) -> None:
        self.cfg, self.step = cfg, 0
        self.timer: Timer | None = None
        self.steps_per_rollout = steps_per_rollout or cfg.steps_per_rollout
        if self.steps_per_rollout % cfg.minibatches_per_rollout:
            raise UserError(
                f"minibatches_per_rollout={cfg.minibatches_per_rollout}: this method takes {self.steps_per_rollout} "
                "optimizer steps on a rollout, which is no multiple; leave it out"
            )
        check_policy_options(
            cfg.policy_loss,
            cfg.correction,
            num_iterations=self.steps_per_rollout // cfg.minibatches_per_rollout,
            minibatches=cfg.minibatches_per_rollout,
            kl_in_reward=cfg.advantage.kl_in_reward,
        )
        if evaluate is not None:
            reject_unused(cfg, "on the evaluation of this method; leave it out", ("num_generations_eval",))
        if prompts is not None and source is None:
            raise UserError("Session(prompts=...): needs source=, which says how such rows are completed")
        self.overlap = cfg.overlap
        self._own_evaluate, self._own_source = evaluate, source
        self.run = open_run(cfg, cfg.run.method)
        try:
            self._read_input(rewards, prompts, frozen, trained, with_reference)
            self._make_plan(extra_state or {})
            self._start(advantage)
        except BaseException:
            self.run.__exit__(*sys.exc_info())
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self.run.__exit__(*error)

    # Set-up, in this order: whatever can be wrong with the input shows before there is a run folder.

    def _read_input(self, rewards: Any, prompts: Any, frozen: Any, trained: Any, with_reference: bool | None) -> None:
        cfg, run = self.cfg, self.run
        if rewards is None:
            self.rewards = run.keep(open_rewards(cfg.reward, run.note, trust_remote_code=cfg.model.trust_remote_code))
        with_reference = cfg.has_reference if with_reference is None else with_reference
        policy = load_policy(cfg.model, cfg.lora, pick_device(), with_reference=with_reference)
        self.policy = parallelize(cfg.parallel, policy)
        self.frozen = frozen(self) if frozen else {}
        self.sampling = setup.training_sampling(cfg, self.policy)
        self.setup = run.keep(setup.RolloutSetup(cfg, self.policy, run.note)) if prompts is None else None
        read = self.setup.prompts if prompts is None else partial(prompts, self)
        read_eval = partial(self.setup.prompts, held_out=True) if prompts is None else read
        self.prompts, held_out = train_and_held_out(cfg.data, cfg.run.seed, read, read_eval)
        self.held_out = held_out[: cfg.data.max_eval_rows]
        for model in self.frozen.values():
            if hasattr(model, "read_prompts"):
                model.read_prompts(self.prompts)
        if rewards is not None:
            self.rewards = rewards(self)
        else:
            columns = () if self.setup is None else self.setup.columns
            self.rewards.check_columns(self.prompts, "data", columns)
            self.rewards.check_columns(self.held_out, "eval_data", columns)
        if self.held_out and self._own_evaluate is None and not hasattr(self.rewards, "score"):
            raise UserError("Session(rewards=...): has no score(), so --eval-data needs evaluate=")
        modules = trained(self) if trained else {}
        self._trained = {name: x if isinstance(x, tuple) else (x, cfg.optim) for name, x in modules.items()}
        self.trained = {name: module.to(self.policy.device) for name, (module, _) in self._trained.items()}
        self.extra_tokens = (
            0 if self.setup is None else self.setup.extra_tokens
        )  # tokens in addition to prompt and completion
        rows = self.prompts + self.held_out
        self.cfg = run.cfg = resolve_engine(
            cfg, self.policy, rows, self.trained.values(), extra_tokens=self.extra_tokens
        )

    def _make_plan(self, extra_state: Mapping[str, Any]) -> None:
        """How many steps there are, the optimizer, and which prompts come when."""
        cfg, run, overlap, steps = self.cfg, self.run, self.overlap, self.steps_per_rollout
        loader = Loader(self.prompts, batch_size=cfg.prompts_per_rollout, seed=cfg.run.seed)
        self.total_steps = cfg.run.total_steps(loader.rows_per_epoch, cfg.prompts_per_rollout, steps)
        self.steps_per_epoch = steps_per_epoch(loader.rows_per_epoch, cfg.prompts_per_rollout, steps)
        cfg = self.cfg = run.cfg = resolve_compile(cfg, self.policy, self.total_steps)
        if hasattr(self.rewards, "run"):  # reward functions may ask for the progress of the run
            epochs = self.total_steps * cfg.prompts_per_rollout / (steps * loader.rows_per_epoch)
            self.rewards.run = TrainerState(max_steps=self.total_steps, num_train_epochs=epochs)
        self.optimizer, self.schedule = build_optimizer(self.policy.model, cfg.optim, self.total_steps)
        self.trained_modules = [
            TrainedModule(name, module, optim, self.total_steps, run.note)
            for name, (module, optim) in self._trained.items()
        ]
        setup.check_servers(cfg, self.policy, run)
        if is_main() and self.setup is not None:
            self.setup.connect(self.prompts, self.rewards)
        self.planner = Planner(
            loader,
            num_generations=cfg.num_generations,
            seed=cfg.run.seed,
            reroll_from=overlap.reroll_from(self.total_steps // steps),
            reroll_max_groups=overlap.reroll_max_groups,
            order=setup.load_curriculum(overlap.curriculum),
        )
        self.replay = Replay(
            size=overlap.replay_buffer_size, max_age=overlap.replay_max_age, seed=cfg.run.seed, prompts=self.prompts
        )
        self.counters = Counters()
        self.bad_steps = BadSteps(cfg.optim, self.counters, run.note)
        self.state = {"planner": self.planner, "counters": self.counters, "replay": self.replay}
        if hasattr(self.rewards, "state_dict"):
            self.state["rewards"] = self.rewards
        moving, self.moving = cfg.moving, None
        if moving.sync_ref_model:
            self.moving = MovingReference(self.policy, moving.ref_model_mixup_alpha, moving.ref_model_sync_steps)
            self.state["reference"] = self.moving
        self.entropy = None if cfg.policy_loss.entropy_target is None else EntropyTarget(cfg.policy_loss)
        if self.entropy is not None:
            self.state["entropy"] = self.entropy
        self.state |= {f"trained.{module.name}": module for module in self.trained_modules} | dict(extra_state)

    def _start(self, advantage: Callable[[GroupRewards], Advantage] | None) -> None:
        """Make the run folder, start the engine, restore a checkpoint, evaluate before the first step."""
        cfg, run, overlap = self.cfg, self.run, self.overlap
        run.begin(self.total_steps, f"{run.method} {cfg.model.model}", self.steps_per_epoch)
        engine = setup.start_engine(cfg, self.policy, run, self.prompts + self.held_out, extra_tokens=self.extra_tokens)
        if is_main() and self.setup is not None:
            self.setup.start(engine, run.dir / "logs")
        self.rank0 = Rank0Rollout(self.policy, engine, self.prompts)
        self.engine = self.rank0.engine
        for name, handler in getattr(self.rewards, "handlers", {}).items():
            self.rank0.handlers[name] = handler
        self.step = run.restore(self.policy, self.optimizer, self.schedule, self.state)
        source = self._source(self.sampling)
        self.held_out_source = run.keep(self._source(setup.evaluation_sampling(self.sampling, cfg.rollout)))
        self.producer = run.keep(
            Producer(
                source,
                self.planner,
                depth=overlap.prefetch_depth if overlap.async_prefetch else 0,
                max_staleness=overlap.max_staleness,
                steps_per_batch=self.steps_per_rollout,
                last_step=self.total_steps,
                poll=self.engine.poll,
            )
        )
        self.missing_rewards = None
        if hasattr(self.rewards, "functions"):  # which may return None
            self.missing_rewards = MissingRewards(
                [function.spec for function in self.rewards.functions],
                self.counters,
                run.note,
                limit=cfg.reward.reward_none_limit,
                num_batches=math.ceil(self.total_steps / self.steps_per_rollout),
            )
        self.groups = Groups(
            cfg, self.producer, self.rewards, self.replay, advantage, missing_rewards=self.missing_rewards
        )
        if self.step == 0 and self.held_out:
            run.log(0, self.evaluate())

    def _source(self, sampling: Sampling) -> Source:
        if self._own_source is not None:
            return self._own_source(self, sampling)
        assert self.setup is not None, "a session with prompts of its own needs a source of its own"
        return self.setup.source(self.engine, sampling)

    # One rollout.

    def rollouts(self) -> Iterator[GroupBatch]:
        """Each rollout of the run, sampled by weights that are new enough. After the body of the loop it counts as
        consumed, and a checkpoint is taken if due; after the last one the model is exported."""
        while self.step < self.total_steps:
            self.sync_weights()
            yield self.sample()
            self.finish_rollout()
        self.finish()

    def sync_weights(self) -> None:
        """Send the current weights to the engine if its own are vllm_sync_interval steps old, or if it sleeps."""
        self.timer = Timer()
        self.rank0.run(self._sync)

    def _sync(self) -> None:
        nothing_loaded = self.engine.version < 0  # servers, before the first load
        due = sync_due(self.step, self.engine.version, self.overlap.vllm_sync_interval)
        if nothing_loaded or due or self.engine.asleep:
            self.engine.load(self.step)

    def sample(self) -> GroupBatch:
        """The next batch: sampled and rewarded by rank 0, dealt to the ranks in whole groups.

        On rank 0, `s.sampled` is all that was sampled for it, before replacements, and `s.whole` the batch of all
        ranks. On other ranks, `s.sampled` is the batch and `s.whole` None.
        """
        assert self.timer is not None, "sync_weights() comes before sample()"
        self.whole = self.rank0.run(self._sample)
        batch = self.rank0.scatter(self.whole, self.cfg.minibatches_per_rollout)
        self.timer.lap("rollout_s")
        self.timer.move("rollout_s", "reward_s", batch.reward_s)
        self.batch, self.sampled = batch, batch.sampled or batch
        self.kl = None  # until advantage(); a method may have advantages of its own
        self.counters.prompts = self.planner.consumed + len(self.sampled.groups)
        return batch

    def _sample(self) -> GroupBatch:
        batch = self.groups.next(self.step, self.engine.version)
        if not self.overlap.async_prefetch:
            self.engine.sleep()
        return batch

    def advantage(self, batch: GroupBatch) -> Tensor | list[list[float]]:  # (B,), or for each completion one per id
        in_reward = self.cfg.advantage.kl_in_reward
        self.kl = sequence_kl(self.cfg, self.policy, batch.completions) if in_reward else None
        return self.groups.advantage(batch, self.kl)

    def old_logps(self, batch: GroupBatch) -> list[list[float] | None] | None:
        """Log-probs that the ratios of replayed groups are taken against, if not those of the current weights."""
        return batch.old_logps(self.overlap.replay_recompute_logps)

    def pack(
        self,
        rollout: GroupBatch,
        advantage: Tensor | Sequence[Sequence[float]],  # (B,), or for each completion one number per id
        *,
        rows: Iterable[int] | None = None,
        own: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> list[MiniBatch]:
        """One MiniBatch for each mini-batch of the rollout; losses are divided by its own counts.

        `rows`: places of the completions to train on, in rollout.completions; None: all. MiniBatch.rows are such
        places. `own`: further columns, for each completion one number per id.
        """
        completions, old_logps = rollout.completions, self.old_logps(rollout)
        wanted = set(range(len(completions)) if rows is None else rows)
        packed, stop = [], 0
        for number, part in enumerate(rollout.parts):
            start, stop = stop, stop + len(part.completions)
            kept = [row for row in range(start, stop) if row in wanted]
            batch = pack(
                self.cfg,
                self.policy,
                [completions[row] for row in kept],
                advantage[kept] if isinstance(advantage, Tensor) else [advantage[row] for row in kept],
                old_logps=old_logps and [old_logps[row] for row in kept],
                own={name: [values[row] for row in kept] for name, values in (own or {}).items()},
            )
            batch.rows, batch.number = [kept[row] for row in batch.rows], number
            packed.append(batch)
        return packed

    def keep_samples(self, batch: GroupBatch, advantage: Tensor | Sequence[Sequence[float]]) -> None:
        self.run.sample(self.step + 1, sample_rows(batch, per_completion(advantage)))

    # Optimizer steps on that rollout.

    def updates(self, *batches: MiniBatch) -> Iterator[MiniBatch]:
        """Each of the batches in turn, as often as there are steps on a rollout, within total_steps."""
        num_parts = self.cfg.minibatches_per_rollout
        if num_parts > 1 and len(batches) != num_parts:
            raise UserError(
                f"minibatches_per_rollout={num_parts}: this method trains on a rollout as a whole; leave it out, or "
                "let the method pack its mini-batches with s.pack(rollout, advantage)"
            )
        needs_old = self.steps_per_rollout > 1 and self.cfg.correction.proximal_policy == "step"
        assert len(batches) <= self.steps_per_rollout, f"{len(batches)} batches for {self.steps_per_rollout} steps"
        ours = [batch for batch in batches if isinstance(batch, MiniBatch)]  # a method may have a kind of its own
        assert not (needs_old and any(batch.at_start is None for batch in ours)), (
            "several steps on a rollout: score_at_start(cfg, s.policy, batches, s.steps_per_rollout) keeps log-probs"
        )
        for number in range(min(self.steps_per_rollout, self.total_steps - self.step)):
            self.step += 1
            self._steps_left = self.steps_per_rollout - number - 1  # on this rollout
            batch = batches[number % len(batches)]
            batch.first = number == 0
            if self.entropy is not None and isinstance(batch, MiniBatch):
                batch.entropy_coef = self.entropy.coef
            yield batch
            self.refresh_ahead()

    def clip_and_step(self, sums: MetricSums, part: MiniBatch, *, extra_tokens: int = 0) -> None:
        """Clip, check and apply the gradients of the policy, then those of `s.trained`.

        `extra_tokens`: what the method computed besides the batch, for the count of tokens.
        """
        sources = ", ".join(dict.fromkeys(prompt.source for prompt in self.batch.prompts))
        where, limit = f"step {self.step}, rank {rank()}, prompts {sources}", self.cfg.optim.max_grad_norm
        self.learning_rate = float(self.schedule.get_last_lr()[0])
        begun = launch_step(self.policy.model, self.optimizer, self.schedule, limit, where, sums, self.bad_steps)
        self.grad_norm = begun.wait()
        skipped = self.counters.skipped_in_a_row > 0  # by --nan-policy skip: nothing learns from this step
        for module in self.trained_modules:
            module.step(where, skip=skipped)
        if self.moving is not None:
            self.moving.after_step(self.step)
        own = extra_tokens + sum(mb.num_tokens for mb in part.batches)
        self.num_tokens = all_count(own, "tokens of the step")
        self.timer.lap("train_s")
        self.counters.tokens += self.num_tokens

    def log(self, sums: MetricSums, part: MiniBatch, more: Mapping[str, float] | None = None) -> None:
        """One line of metrics.jsonl; `more` are metrics of the method's own."""
        sampled = self.sampled
        if self.entropy is not None:
            more = {**(more or {}), **self._adapt_entropy(sums, part)}
        rollout = {
            **reward_metrics(sampled.names, sampled.rows, sampled.reward),
            **completion_metrics(sampled.completions),
            **packing_metrics(part.batches),
            **self.batch.metrics,
            **({} if self.kl is None else {"policy/ref_kl": mean_over_ranks(self.kl)}),
            **self.rewards.metrics(),
            **(more or {}),
            **self.producer.metrics(self.step - 1),
        }
        means = sums.later()
        known = {
            "optim/grad_norm": self.grad_norm,
            "optim/lr": self.learning_rate,
            "data/epoch": self.planner.epoch,
            **self.counters.metrics(),
        }
        times = self.timer.later(self.num_tokens)

        def metrics() -> dict[str, float]:
            return {**rollout, **means(), **known, **times()}

        if self.held_out and self.run.eval_due(self.step):
            self.run.write_pending()
            self.run.log(self.step, metrics() | self.evaluate() | self.engine.metrics())
        else:
            engine = self.engine.metrics()
            self.run.log_later(self.step, lambda: metrics() | engine)
        self.timer = Timer()

    def _adapt_entropy(self, sums: MetricSums, part: MiniBatch) -> dict[str, float]:
        """Adapt the coefficient for the next step to the entropy of this one, which the host waits for."""
        if not isinstance(part, MiniBatch) or "policy/entropy" not in sums.pairs:
            target = self.cfg.policy_loss.entropy_target
            raise UserError(f"entropy_target={target}: this method measures no entropy; leave it out")
        means = sums.means()
        if "policy/entropy" in means:  # not if no token was trained
            self.entropy.observe(means["policy/entropy"])
        return {"policy/entropy_coef": part.entropy_coef}

    def refresh_ahead(self) -> None:
        """Between two steps on one batch: sampling ahead continues with the current weights."""
        if self.overlap.async_prefetch and self._steps_left:
            self.rank0.run(self._refresh)

    def _refresh(self) -> None:
        self._sync()
        self.producer.top_up(self.engine.version)

    # The end of a rollout, the end of the run, evaluation.

    def finish_rollout(self) -> None:
        """Mark the batch as consumed. Checkpoints are only taken here, between rollouts."""
        if is_main():
            self.producer.done()
        self.run.maybe_save(self.step, self.policy, self.optimizer, self.schedule, self.state)

    def finish(self) -> None:
        self.run.finish(self.policy)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out prompts; all ranks call it."""
        if self._own_evaluate is not None:
            return self._own_evaluate(self)
        return self.rank0.run(self._evaluate) or {}

    def _evaluate(self) -> dict[str, float]:
        check = None if self.missing_rewards is None else self.missing_rewards.evaluated
        num = self.cfg.num_generations_eval
        return evaluate_rewards(self.engine, self.held_out_source, self.step, self.held_out, self.rewards, check, num)
