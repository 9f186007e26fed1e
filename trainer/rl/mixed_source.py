"""--student-data-fraction: sample only a fraction of the prompts of each step, and take the others from the data.

prompts = rows_of(cfg, policy, cfg.data.data)                        # TargetPrompts: each has its completion
source = MixedSource(EngineSource(engine, sampling), fraction=0.5)
futures = source.start(groups)                                       # half of the groups come from the data
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from data.rows.cache import load_cached
from data.rows.targets import load_targets
from data.types import Prompt
from rollout.engine import Completion, EngineSource, Request, finished
from trainer.config.sampling import SamplingConfig
from trainer.policy.logps import Policy
from trainer.rl.setup import prompt_options, prompts_of


def rows_of(cfg: SamplingConfig, policy: Policy, specs: tuple[str, ...]) -> list[Prompt]:
    """Load rows: those to train on must have a completion, held-out rows need none."""
    if specs != cfg.data.data:
        return prompts_of(cfg, policy, specs)
    options = {"data_format": cfg.data.data_format, "cfg": cfg, **prompt_options(cfg, policy)}
    return [*load_cached(load_targets, specs, policy.tokenizer, folder=cfg.data.row_cache, **options)]


class MixedSource:
    """A Source that samples this fraction of the groups; the others get the completion of their row.

    The choice depends only on the seeds of the batch, so a resumed run makes the same. Evaluations sample all groups.
    """

    def __init__(self, source: EngineSource, *, fraction: float) -> None:
        self.source, self.fraction = source, fraction if source.sampling.for_training else 1.0

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        shuffled = sorted(range(len(groups)), key=lambda index: random.Random(groups[index][0].seed).random())
        indices = sorted(shuffled[: round(self.fraction * len(groups))])
        futures = self.source.start([groups[index] for index in indices]) if indices else []
        sampled = dict(zip(indices, futures, strict=True))
        return [
            sampled[index] if index in sampled else finished([self._from_row(request) for request in group])
            for index, group in enumerate(groups)
        ]

    def close(self) -> None:
        self.source.close()

    def _from_row(self, request: Request) -> Completion:
        row: Any = request.prompt
        return Completion(
            prompt_ids=row.ids, ids=row.target_ids, mask=row.target_mask, logps=[float("nan")] * len(row.target_ids),
            finish_reason="stop", text=row.columns["ground_truth"],
            versions=[(self.source.engine.version, len(row.target_ids))],
        )  # fmt: skip
