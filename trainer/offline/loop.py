"""The loop that methods on fixed rows share: data order, micro-batches, optimizer, counters, log, checkpoint.

offline = Offline(run, cfg, policy, rows)
offline.begin(evaluate)                        # restores a checkpoint; evaluates before the first step
for batch in offline.steps():                  # this rank's rows of each step
    micro_batches = pack_items(...)
    sums = backward(...)                       # the method's own
    offline.take_step(sums)
    offline.log_and_save(sums, num_tokens, evaluate)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from data.loader import Loader
from data.packing import Batch, Item, make_batches
from trainer.config.blocks import RunConfig, steps_per_epoch
from trainer.metrics.metrics import Counters, MetricSums, Timer
from trainer.parallel.comm import all_count, local_shard, rank, world_size
from trainer.policy.compile_choice import resolve_compile
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.noise import add_noise
from trainer.policy.optim import BadSteps, PendingStep, build_optimizer, launch_step
from trainer.policy.router import RouterLoss
from trainer.policy.sharding import to_device_and_pad
from trainer.run.run import Run

Evaluate = Callable[[], dict[str, float]]
T = TypeVar("T")


def read_rows(load: Callable[..., list[T]], cfg: Any, policy: Policy, specs: Sequence[str], **options: Any) -> list[T]:
    """Rows by a loader of data/rows, which gets what all of them take, and `options`; none without specs."""
    if not specs:
        return []
    shared = {
        "data_format": cfg.data.data_format,
        "system_prompt": cfg.model.system_prompt,
        "chat_template_kwargs": cfg.model.chat_template_kwargs,
        "context_length": policy.context_length,
        "cfg": cfg,
    }
    return load(specs, policy.tokenizer, **shared | options)


def read_responses(load: Callable[..., list[T]], cfg: Any, policy: Policy, specs: Sequence[str]) -> list[T]:
    """read_rows for a PreferenceConfig."""
    limits = {name: getattr(cfg.response, name) for name in ("max_length", "max_prompt_length", "bad_rows")}
    return read_rows(load, cfg, policy, specs, **limits, options=cfg.format)


def row_tokens(row: Any) -> int:
    """Approximate number of tokens of a row, to balance ranks."""
    return sum(len(value) for value in vars(row).values() if isinstance(value, list))


def indices_of_this_rank(rows: Sequence[Any], size: Callable[[Any], int] = row_tokens) -> list[int]:
    """Indices of this rank's rows, chosen so that all ranks have about the same number of tokens."""
    return local_shard(range(len(rows)), [size(row) for row in rows])


def rows_of_this_rank(rows: Sequence[Any]) -> list[Any]:
    return [rows[i] for i in indices_of_this_rank(rows)]


def pack_items(
    run: RunConfig, policy: Policy, items: Sequence[Item], *, accumulation: int, together: int = 1
) -> list[Batch]:
    """Micro-batches on the device, equally many on every rank; each run of `together` items stays in one."""
    host = make_host_batches(run, policy, items, accumulation=accumulation, together=together)
    batches = to_device_and_pad(policy, host)
    tell_router(policy, batches)
    return batches


def tell_router(policy: Policy, batches: Sequence[Batch]) -> None:
    """The loss that balances experts is over all micro-batches of a step."""
    if policy.router is not None:
        policy.router.begin(batches)


def make_host_batches(
    run: RunConfig,
    policy: Policy,
    items: Sequence[Item],
    *,
    accumulation: int,
    together: int = 1,
    share_prompt: bool = False,
) -> list[Batch]:
    """Micro-batches of this rank, in main memory."""
    return make_batches(
        items,
        accumulation=accumulation,
        max_tokens=run.max_tokens_per_micro_batch,
        packing=run.packing,
        together=together,
        share_prompt=share_prompt,
        multiple=policy.row_multiple,
        one_row=policy.packs_one_row,
    )


class Offline:
    """State of one run; `step` counts optimizer steps done."""

    def __init__(
        self,
        run: Run,
        cfg: Any,
        policy: Policy,
        rows: Sequence[Any],
        *,
        extra: dict[str, Any] | None = None,
        size: Callable[[Any], int] = row_tokens,  # cost of a row, to balance ranks
    ) -> None:
        self.run, self.policy, self.size = run, policy, size
        if cfg.model.neftune_noise_alpha is not None:
            add_noise(causal_lm(policy.model), cfg.model.neftune_noise_alpha)
        if cfg.model.router_aux_loss_coef is not None:
            policy.router = RouterLoss(policy, cfg.model.router_aux_loss_coef)
        # Noise is scaled by the length of each sequence, and the router's loss is a mean over all their tokens.
        policy.shares_prompts = cfg.model.neftune_noise_alpha is None and policy.router is None
        self.loader: Loader[Any] = Loader(rows, batch_size=cfg.run.sequences_per_step, seed=cfg.run.seed)
        num_rows, per_step = self.loader.rows_per_epoch, cfg.run.sequences_per_step
        self.total_steps = cfg.run.total_steps(num_rows, per_step)
        self.steps_per_epoch = steps_per_epoch(num_rows, per_step)
        self.cfg = run.cfg = resolve_compile(cfg, policy, self.total_steps)
        self.optimizer, self.schedule = build_optimizer(policy.model, cfg.optim, self.total_steps)
        self.counters = Counters()
        self.bad_steps = BadSteps(cfg.optim, self.counters, run.note)
        self.state = {"loader": self.loader, "counters": self.counters, **(extra or {})}
        self.step = 0
        self.begun: PendingStep | None = None  # the last optimizer step

    def begin(self, evaluate: Evaluate) -> None:
        """Make the run folder or restore the checkpoint; evaluate the model before training as step 0."""
        title = f"{self.run.method} {self.cfg.model.model}"
        self.run.begin(self.total_steps, title, self.steps_per_epoch)
        self.step = self.run.restore(self.policy, self.optimizer, self.schedule, self.state)
        if self.step == 0 and (before := self._evaluate(evaluate)):
            self.run.log(0, before)

    @torch.no_grad()
    def _evaluate(self, evaluate: Evaluate) -> dict[str, float]:
        """All ranks call it, also one without held-out rows."""
        self.policy.model.eval()
        metrics = evaluate()
        self.policy.model.train()
        return metrics

    def steps(self) -> Iterator[list[Any]]:
        """This rank's rows of each remaining step."""
        while self.step < self.total_steps:
            self.step += 1
            self.timer = Timer()
            rows = self.loader.next()
            self.num_rows = len(rows)
            self.places = indices_of_this_rank(rows, self.size)  # of this rank's rows in the step
            self.batch = [rows[i] for i in self.places]
            yield self.batch
        self._wait()

    def _wait(self) -> None:
        """Wait until it is known whether the last step was finite. Whatever depends on that comes after this call."""
        if self.begun is not None:
            self.begun.wait()

    def take_step(self, sums: MetricSums | None = None) -> None:
        """Clip, check and apply the accumulated gradients.

        Whether they were finite is read with the metrics, on a GPU during the next step: the host prepares that one
        meanwhile.
        """
        self._wait()
        self.learning_rate = float(self.schedule.get_last_lr()[0])
        where = f"step {self.step}, rank {rank()}, rows {', '.join(row.source for row in self.batch)}"
        limit = self.cfg.optim.max_grad_norm
        self.begun = launch_step(self.policy.model, self.optimizer, self.schedule, limit, where, sums, self.bad_steps)
        if world_size() > 1:  # only rank 0 reads metrics
            self._wait()

    def log_and_save(
        self, sums: MetricSums, num_tokens: int, evaluate: Evaluate, more: Mapping[str, float] | None = None
    ) -> None:
        """Log the step, with `more` metrics of the method; evaluate and save when due."""
        self.timer.lap("train_s")
        num_tokens = all_count(num_tokens, "tokens of the step")
        self.counters.prompts += self.num_rows
        self.counters.tokens += num_tokens
        means = sums.later()
        if self.policy.router is not None:
            more = {**(more or {}), **self.policy.router.end()}
        begun = self.begun
        known = {
            "optim/lr": self.learning_rate,
            "data/epoch": self.loader.epoch,
            **self.counters.metrics(),
        }
        times = self.timer.later(num_tokens)

        def metrics() -> dict[str, float]:
            norm = {"optim/grad_norm": begun.wait()}
            return {**(more or {}), **means(), **known, **norm, **begun.skipped, **times()}

        if self.run.eval_due(self.step):
            self.run.write_pending()
            self.run.log(self.step, metrics() | self._evaluate(evaluate))
        else:
            self.run.log_later(self.step, metrics)
        self.run.maybe_save(self.step, self.policy, self.optimizer, self.schedule, self.state)
