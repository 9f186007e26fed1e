"""Decode with transformers' DynamicCache, for models that cannot use the paged cache.

This supports every attention that the model's transformers forward supports. Batches run sequentially, with a host sync
after every token. Prompts are left-padded, so all rows are at the same cache index; padding would change the state of a
recurrent layer, so models with such layers are not sampled here. Equal prompts are prefilled once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.decode.draw import draw
from kernels.decode.draw_set import GAP, draw_set
from rollout.engine import Sampling
from rollout.engines.scheduler import Job
from rollout.engines.stop import StopCheck

DROP_FRAC = 0.125  # drop finished rows once they are this fraction of the batch; each drop copies the cache
PAD_ID = 0  # any valid id: padding is masked out


@dataclass
class DecodeBatch:
    """Rows still being decoded; all tensors have the same row order."""

    jobs: list[Job]
    cache: Any  # DynamicCache
    logits: Tensor  # (B, V) for the next token
    mask: Tensor  # (B, T) 1 = a real token in the cache
    lengths: Tensor  # (B,) tokens prefilled
    seeds: Tensor  # (B,)

    def select(self, keep: list[int]) -> None:
        """Keep only these rows. The logits are not selected: they have been used already."""
        index = torch.tensor(keep, device=self.mask.device)
        self.cache.reorder_cache(index)
        self.jobs = [self.jobs[row] for row in keep]
        self.mask, self.lengths, self.seeds = self.mask[index], self.lengths[index], self.seeds[index]


def sample_growing(model: Any, jobs: list[Job], sampling: Sampling, stop: StopCheck) -> Iterator[list[Job]]:
    """Sample all jobs to their end, in one batch; yield jobs as they end."""
    batch = _prefill(model, jobs)
    device = batch.mask.device
    step = 0
    while True:
        temperature = torch.full((len(batch.jobs),), sampling.temperature, device=device)
        drawn = torch.tensor([len(job.ids) for job in batch.jobs], dtype=torch.int32, device=device)
        top = {"top_k": sampling.top_k, "top_p": sampling.top_p} if sampling.temperature else {}
        draws = (batch.logits, batch.seeds, drawn, temperature)
        if sampling.set_size:
            token, logp, kept = draw_set(*draws, **top, min_p=sampling.min_p, most=sampling.set_size)
            sets = [row[row != GAP] for row in kept.cpu().numpy()]
        else:
            (token, logp), sets = draw(*draws, **top), [None] * len(batch.jobs)
        running = [job for job in batch.jobs if not job.has_ended]  # others have ended but are not dropped yet
        for job, job_id, job_logp, job_set in zip(batch.jobs, token.tolist(), logp.tolist(), sets, strict=True):
            if not job.has_ended:
                job.ids.append(job_id)
                job.logps.append(job_logp)
                if job_set is not None:
                    job.own_sets.append(job_set)
                job.stopped = stop.end(job.ids, len(job.ids) - 1) is not None
        if ended := [job for job in running if job.has_ended]:
            yield ended
        alive = [row for row, job in enumerate(batch.jobs) if not job.has_ended]
        if not alive:
            return
        if len(alive) <= (1 - DROP_FRAC) * len(batch.jobs):
            batch.select(alive)
            token = token[torch.tensor(alive, device=device)]
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.jobs), 1)], dim=1)
        position = (batch.lengths + step)[:, None]
        batch.logits = _forward(model, token[:, None], batch.mask, position, batch.cache)
        step += 1


def _prefill(model: Any, jobs: list[Job]) -> DecodeBatch:
    """Run each distinct prompt once, with tokens sampled so far, then expand the cache to one row per job."""
    from transformers import DynamicCache

    lm = model.get_base_model() if hasattr(model, "peft_config") else model
    if "past_key_values" not in inspect.signature(lm.forward).parameters:  # it would ignore the cache
        raise ValueError("its forward has no past_key_values")
    device = next(model.parameters()).device
    index: dict[tuple[int, ...], int] = {}
    prompt_of = [index.setdefault((*job.prompt_ids, *job.ids), len(index)) for job in jobs]
    width = max(len(prompt) for prompt in index)
    padded = [[PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in index]
    lengths = torch.tensor([len(prompt) for prompt in index])
    mask = (torch.arange(width) >= (width - lengths)[:, None]).long().to(device)  # (P, T)
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config.get_text_config())
    logits = _forward(model, torch.tensor(padded, device=device), mask, position_ids, cache)
    seeds, lengths = torch.tensor([job.seed for job in jobs], device=device), lengths.to(device)
    batch = DecodeBatch(jobs=list(jobs), cache=cache, logits=logits, mask=mask, lengths=lengths, seeds=seeds)
    if len(index) < len(jobs):
        expand = torch.tensor(prompt_of, device=device)
        cache.reorder_cache(expand)
        batch.logits, batch.mask, batch.lengths = logits[expand], mask[expand], lengths[expand]
    return batch


def _forward(model: Any, input_ids: Tensor, mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:  # (B, V)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    return model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, **options).logits[:, -1]
