"""Fixed rows: load them, give each rank its share of a step, and pack it into micro-batches.

rows = read_rows(load_examples, cfg, policy, cfg.data.data)
training = Training(run, cfg, policy, Rows(cfg, rows))
for batch in training.steps():                 # this rank's rows
    micro_batches = pack_items(cfg.run, policy, items, accumulation=cfg.run.gradient_accumulation_steps)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from data.loader import Loader
from data.packing import Batch, Item, make_batches
from data.rows.cache import load_cached
from data.rows.stored import Stored
from trainer.config.blocks import MethodConfig, RunConfig
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import PreferenceConfig
from trainer.parallel.comm import local_shard
from trainer.policy.logps import Policy
from trainer.policy.sharding import to_device_and_pad
from trainer.run.training import Training

T = TypeVar("T")


def read_rows(
    load: Callable[..., Stored[T]], cfg: MethodConfig, policy: Policy, specs: Sequence[str], **options: Any
) -> Sequence[T]:
    """Load rows with a loader of data/rows and `options`, or from --row-cache; no rows without specs."""
    if not specs:
        return []
    shared = {
        "data_format": cfg.data.data_format,
        "system_prompt": cfg.model.system_prompt,
        "chat_template_kwargs": cfg.model.chat_template_kwargs,
        "context_length": policy.context_length,
        "cfg": cfg,
    }
    return load_cached(load, specs, policy.tokenizer, folder=cfg.data.row_cache, **shared | options)


def read_responses(
    load: Callable[..., Stored[T]], cfg: PreferenceConfig, policy: Policy, specs: Sequence[str]
) -> Sequence[T]:
    """Load pairs or labelled responses, with the limits of cfg.response."""
    names = ("max_length", "long_rows", "max_prompt_length", "bad_rows")
    limits = {name: getattr(cfg.response, name) for name in names}
    return read_rows(load, cfg, policy, specs, **limits, options=cfg.format)


def row_tokens(row: Any) -> int:
    """Approximate number of tokens of a row, to balance ranks."""
    return sum(len(value) for value in vars(row).values() if isinstance(value, list))


def indices_of_this_rank(rows: Sequence[Any], size: Callable[[Any], int] = row_tokens) -> list[int]:
    """Indices of this rank's rows, balanced by token count."""
    return local_shard(range(len(rows)), [size(row) for row in rows])


def rows_of_this_rank(rows: Sequence[Any]) -> list[Any]:
    return [rows[i] for i in indices_of_this_rank(rows)]


class Rows:
    """The rows of each optimizer step, as a source of batches for Training."""

    steps_per_batch = 1

    def __init__(
        self,
        cfg: MethodConfig,
        rows: Sequence[Any],
        *,
        size: Callable[[Any], int] = row_tokens,  # cost of a row, to balance ranks
    ) -> None:
        self.cfg, self.holds_out, self.size = cfg, cfg.data.holds_out, size
        self.rows_per_batch = cfg.run.sequences_per_step
        self.loader: Loader[Any] = Loader(rows, batch_size=self.rows_per_batch, seed=cfg.run.seed)

    def resolve(self, modules: list[nn.Module]) -> MethodConfig:
        return self.cfg

    def plan(self, training: Training) -> dict[str, Any]:
        self.counters = training.counters
        return {"loader": self.loader}

    @property
    def epoch(self) -> float:
        return self.loader.epoch

    def start(self) -> None:
        """Nothing to start."""

    def next(self) -> list[Any]:
        numbers = self.loader.next_numbers()
        rows = [self.loader.rows[number] for number in numbers]
        self.counters.prompts += len(rows)
        self.indices = indices_of_this_rank(rows, self.size)  # this rank's rows within the step
        self.numbers = [numbers[i] for i in self.indices]  # and within all rows
        self.batch = [rows[i] for i in self.indices]
        return self.batch

    def finish(self) -> None:
        """The loader counts rows when it returns them."""

    def describe(self) -> str:
        return f"rows {', '.join(row.source for row in self.batch)}"

    def metrics(self, sums: MetricSums) -> dict[str, float]:
        return {}

    def engine_metrics(self) -> dict[str, float]:
        return {}

    def evaluate(self) -> dict[str, float]:
        return {}


def pack_items(
    run: RunConfig, policy: Policy, items: Sequence[Item], *, accumulation: int, together: int = 1
) -> list[Batch]:
    """Pack micro-batches on the device, equally many on every rank; `together` adjacent items stay in one."""
    host = make_host_batches(run, policy, items, accumulation=accumulation, together=together)
    batches = to_device_and_pad(policy, host)
    begin_router(policy, batches)
    return batches


def begin_router(policy: Policy, batches: Sequence[Batch]) -> None:
    """Start the loss that balances experts: it covers all micro-batches of a step."""
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
    """Pack this rank's micro-batches in main memory."""
    return make_batches(
        items,
        accumulation=accumulation,
        max_tokens=run.max_tokens_per_micro_batch,
        together=together,
        **policy.layout(packing=run.packing, share_prompt=share_prompt),
    )
