"""Given completions beside sampled ones: a part of the prompts of each step is not sampled (--student-data-fraction).

prompts = rows_of(cfg, policy, cfg.data.data)                        # TargetPrompts: each has its completion
source = MixedSource(EngineSource(engine, sampling), fraction=0.5)
futures = source.start(groups)                                       # half of the groups are given
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from data.rows.targets import load_targets
from data.types import Prompt
from rollout.engine import Completion, EngineSource, Request, finished
from trainer.policy.logps import Policy
from trainer.rl.setup import prompt_options, prompts_of


def rows_of(cfg: Any, policy: Policy, specs: tuple[str, ...]) -> list[Prompt]:
    """Rows to train on must have a completion; held-out ones need none."""
    if specs != cfg.data.data:
        return prompts_of(cfg, policy, specs)
    options = {"data_format": cfg.data.data_format, "cfg": cfg, **prompt_options(cfg, policy)}
    return load_targets(specs, policy.tokenizer, **options)


class MixedSource:
    """A Source that samples this fraction of the groups of a batch; the others have the completion of their row.

    The seeds of a batch decide which, so a resumed run has the same. An evaluation samples all.
    """

    def __init__(self, source: EngineSource, *, fraction: float) -> None:
        self.source, self.fraction = source, fraction if source.sampling.for_training else 1.0

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        by_chance = sorted(range(len(groups)), key=lambda place: random.Random(groups[place][0].seed).random())
        places = sorted(by_chance[: round(self.fraction * len(groups))])
        futures = self.source.start([groups[place] for place in places]) if places else []
        sampled = dict(zip(places, futures, strict=True))
        return [
            sampled[place] if place in sampled else finished([self._given(request) for request in group])
            for place, group in enumerate(groups)
        ]

    def close(self) -> None:
        self.source.close()

    def _given(self, request: Request) -> Completion:
        row: Any = request.prompt
        return Completion(
            prompt_ids=row.ids, ids=row.target_ids, mask=row.target_mask, logps=[float("nan")] * len(row.target_ids),
            finish_reason="stop", text=row.columns["ground_truth"],
            versions=[(self.source.engine.version, len(row.target_ids))],
        )  # fmt: skip
