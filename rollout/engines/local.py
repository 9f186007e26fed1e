"""The in-process engine: batched sampling from the module that is being trained.

    engine = LocalEngine(model, tokenizer)
    completions = engine.generate([Request(prompt_ids=[5, 6, 7], seed=11)], Sampling(max_tokens=8, stop_ids=(2,)))

Prompts are left-padded, so that all rows decode at the same cache index. Equal prompts are prefilled once. A seed fixes
the uniform numbers of its completion; logits still differ in the last bits between batch shapes, so "same seed, same
completion" holds except for draws within rounding (about 1e-7 in fp32) of a boundary.

A token is drawn by a seeded uniform number and an inverse CDF. Probabilities are summed as integers, in units of
2**-60: an integer sum is exact in any order, so a draw depends on nothing but its row, where torch's float cumsum on a
GPU depends on the order in which blocks finish.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rollout.engine import Completion, Request, Sampling, check_sampling, finished

SCORE_LOGITS = 2**26  # logits per scoring forward: 256 MB in fp32
DROP_FRAC = 0.125  # drop finished rows once they are this share of the batch, since each drop copies the cache
PAD_ID = 0  # any valid id: padding is masked out


class LocalEngine:
    """Engine over a transformers causal LM (or a PeftModel around one) in this process."""

    concurrent = False
    asleep = False

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        max_batch_size: int = 256,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size}: must be 1 or more")
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.autocast_dtype = autocast_dtype
        self.version = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order."""
        check_sampling(sampling)
        self._check_requests([request.prompt_ids for request in requests], sampling.max_tokens)
        # Longest first: little padding per chunk, and equal prompts share a chunk.
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), requests[i].prompt_ids))
        completions: dict[int, Completion] = {}
        with evaluating(self.model, self.autocast_dtype):
            for start in range(0, len(order), self.max_batch_size):
                chunk = order[start : start + self.max_batch_size]
                made = self._generate_chunk([requests[i] for i in chunk], sampling)
                completions.update(zip(chunk, made, strict=True))
        return [completions[i] for i in range(len(requests))]

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Completion]]:
        """Samples now: the future has its result already."""
        return finished(self.generate(requests, sampling))

    def tend(self, version: int | None = None) -> None:
        """Nothing to do: nothing runs in the background."""

    def score(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """Log-probs of given completions by a forward pass; temperature 0 counts as 1, as in generate."""
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: must be 0 or above")
        self._check_requests([prompt + completion for prompt, completion in sequences], 0)
        if any(not prompt for prompt, _ in sequences):
            raise ValueError("prompt_ids=[]: an empty prompt has nothing to predict from; give at least one token")
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]) + len(sequences[i][1]))
        logps: dict[int, list[float]] = {}
        with evaluating(self.model, self.autocast_dtype):
            for chunk in self._score_chunks(order, sequences):
                scored = self._score_chunk([sequences[i] for i in chunk], temperature or 1.0)
                logps.update(zip(chunk, scored, strict=True))
        return [logps[i] for i in range(len(sequences))]

    def load(self, version: int) -> None:
        """The module is shared with the trainer: only the version number changes."""
        self.version = version

    def sleep(self) -> None:
        """Nothing to release: the cache exists only inside generate."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing was started."""

    def _generate_chunk(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        batch = self._prefill(requests)
        device = batch.rows.device
        num_rows, max_tokens = len(requests), sampling.max_tokens
        ids = torch.zeros(num_rows, max_tokens, dtype=torch.long, device=device)
        logps = torch.zeros(num_rows, max_tokens, dtype=torch.float32, device=device)
        length = torch.full((num_rows,), max_tokens, device=device)
        stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)
        stop = StopCheck(self.tokenizer, sampling, device)

        for step in range(max_tokens):
            token, logp = sample(batch.logits, uniform(batch.seeds, step), sampling)
            ids[batch.rows, step] = token
            logps[batch.rows, step] = logp
            # A finished row that is still in the batch keeps being sampled; its extra tokens are cut off below.
            ended = ~stopped[batch.rows] & stop(ids, batch.rows, step)
            length[batch.rows[ended]] = step + 1
            stopped[batch.rows[ended]] = True
            alive = ~stopped[batch.rows]
            num_alive = int(alive.sum())
            if num_alive == 0 or step + 1 == max_tokens:
                break
            if num_alive <= (1 - DROP_FRAC) * len(alive):
                keep = alive.nonzero()[:, 0]
                batch.select(keep)
                token = token[keep]
            batch.logits = self._forward(token[:, None], batch.next_mask(), batch.next_position(step), batch.cache)

        return self._finish(requests, ids, logps, length, stopped, stop)

    def _prefill(self, requests: list[Request]) -> Batch:
        """Run each distinct prompt once, then expand the cache to one row per request."""
        from transformers import DynamicCache

        device = next(self.model.parameters()).device
        index: dict[tuple[int, ...], int] = {}
        prompt_of = [index.setdefault(tuple(request.prompt_ids), len(index)) for request in requests]
        width = max(len(prompt) for prompt in index)
        padded = [[PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in index]
        lengths = torch.tensor([len(prompt) for prompt in index])
        mask = (torch.arange(width) >= (width - lengths)[:, None]).long().to(device)  # (P, T)
        position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config.get_text_config())
        logits = self._forward(torch.tensor(padded, device=device), mask, position_ids, cache)

        batch = Batch(
            cache=cache,
            logits=logits,
            mask=mask,
            lengths=lengths.to(device),
            rows=torch.arange(len(requests), device=device),
            seeds=torch.tensor([signed_64(request.seed) for request in requests], device=device),
        )
        if len(index) < len(requests):
            expand = torch.tensor(prompt_of, device=device)
            cache.batch_select_indices(expand)
            batch.logits, batch.mask, batch.lengths = logits[expand], mask[expand], batch.lengths[expand]
        return batch

    def _forward(
        self, input_ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, cache: Any
    ) -> torch.Tensor:  # (B, V) logits at the last position
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _finish(
        self,
        requests: list[Request],
        ids: torch.Tensor,  # (B, max_tokens)
        logps: torch.Tensor,  # (B, max_tokens)
        length: torch.Tensor,  # (B,)
        stopped: torch.Tensor,  # (B,)
        stop: StopCheck,
    ) -> list[Completion]:
        """The only place where results become Python lists."""
        lengths, stops = length.tolist(), stopped.tolist()
        longest = max(lengths)
        id_rows = [row[:n] for row, n in zip(ids[:, :longest].tolist(), lengths, strict=True)]
        logp_rows = [row[:n] for row, n in zip(logps[:, :longest].tolist(), lengths, strict=True)]
        inside = torch.arange(longest, device=ids.device) < length[:, None]
        if not bool(torch.isfinite(logps[:, :longest]).logical_or(~inside).all()):
            raise ValueError(
                f"version={self.version}: the model's logits are not finite; its weights have diverged, "
                "lower the learning rate or go back to an earlier checkpoint"
            )
        texts = stop.texts(id_rows, stops)
        return [
            Completion(
                prompt_ids=list(request.prompt_ids),
                ids=id_rows[i],
                logps=logp_rows[i],
                finish_reason="stop" if stops[i] else "length",
                text=texts[i],
                versions=[(self.version, lengths[i])],
            )
            for i, request in enumerate(requests)
        ]

    def _score_chunks(self, order: list[int], sequences: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
        """Chunks in order of length, so that the sequence added last sets the width of its chunk."""
        vocab_size = self.model.config.get_text_config().vocab_size
        chunk: list[int] = []
        for i in order:
            width = len(sequences[i][0]) + len(sequences[i][1])
            too_big = (len(chunk) + 1) * width * vocab_size > SCORE_LOGITS
            if chunk and (too_big or len(chunk) == self.max_batch_size):
                yield chunk
                chunk = []
            chunk.append(i)
        if chunk:
            yield chunk

    def _score_chunk(self, sequences: list[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        device = next(self.model.parameters()).device
        joined = [prompt + completion for prompt, completion in sequences]
        width = max(len(ids) for ids in joined)
        input_ids = torch.tensor([ids + [PAD_ID] * (width - len(ids)) for ids in joined], device=device)
        mask = (torch.arange(width) < torch.tensor([len(ids) for ids in joined])[:, None]).long().to(device)
        positions = torch.arange(width, device=device).expand_as(input_ids)
        output = self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
        logits = output.logits[:, :-1].float() / temperature
        target = input_ids[:, 1:]
        logps = logits.gather(2, target[:, :, None])[:, :, 0] - logits.logsumexp(dim=-1)  # (B, T - 1)
        return [
            row[len(prompt) - 1 : len(prompt) + len(completion) - 1]
            for row, (prompt, completion) in zip(logps.tolist(), sequences, strict=True)
        ]

    def _check_requests(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Refuse prompts that would otherwise fail deep inside the model."""
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt_ids=[] (request {i}): an empty prompt; give at least one token")
            if context is not None and len(prompt) + max_tokens > context:
                raise ValueError(
                    f"max_tokens={max_tokens} (request {i}): the prompt of {len(prompt)} tokens and its completion do "
                    f"not fit the model's context of {context}; shorten the prompt or lower max_completion_length"
                )
            if max(prompt) >= config.vocab_size or min(prompt) < 0:
                raise ValueError(
                    f"prompt_ids (request {i}): an id outside the model's vocabulary of {config.vocab_size}; "
                    "the tokenizer does not belong to this model"
                )


@contextmanager
def evaluating(model: torch.nn.Module, autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """Evaluation mode without gradients; restores every submodule's mode afterwards.

    Evaluation mode also lets a model with gradient checkpointing keep a cache. no_grad, not inference_mode: buffers
    that a model creates on its first call must stay usable for training.
    """
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None),
        ):
            yield
    finally:
        for module in training:
            module.training = True


@dataclass
class Batch:
    """The rows still being decoded, all tensors in the same row order."""

    cache: Any  # DynamicCache
    logits: torch.Tensor  # (B, V) for the next token
    mask: torch.Tensor  # (B, T) 1 = a real token in the cache
    lengths: torch.Tensor  # (B,) prompt lengths
    rows: torch.Tensor  # (B,) number of each row's request
    seeds: torch.Tensor  # (B,)

    def select(self, keep: torch.Tensor) -> None:
        """Drop the other rows; the logits have been used already."""
        self.cache.batch_select_indices(keep)
        self.mask, self.lengths = self.mask[keep], self.lengths[keep]
        self.rows, self.seeds = self.rows[keep], self.seeds[keep]

    def next_mask(self) -> torch.Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        return self.mask

    def next_position(self, step: int) -> torch.Tensor:
        return (self.lengths + step)[:, None]


class StopCheck:
    """Which rows end with the token just sampled: stop ids are checked on the device, stop strings in decoded text."""

    def __init__(self, tokenizer: Any, sampling: Sampling, device: torch.device) -> None:
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        # Decoding drops special tokens, so a stop string that is one can only be found as an id.
        self.stop_ids = {*sampling.stop_ids, *(special[text] for text in sampling.stop if text in special)}
        self.strings = [text for text in sampling.stop if text not in special]
        self.tokenizer = tokenizer
        self.id_tensor = torch.tensor(sorted(self.stop_ids), dtype=torch.long, device=device)
        # Every token except special ones adds at least a byte; 8 more tokens for those and for a split character.
        self.window = max((len(text.encode()) for text in self.strings), default=0) + 8

    def __call__(self, ids: torch.Tensor, rows: torch.Tensor, step: int) -> torch.Tensor:
        """(B,) bool for the token at `step` of each row."""
        ended = torch.isin(ids[rows, step], self.id_tensor)
        if self.strings:
            ended = ended | torch.tensor(self._string_ended(ids[rows, : step + 1]), device=ids.device)
        return ended

    def texts(self, id_rows: list[list[int]], stopped: list[bool]) -> list[str]:
        """Decoded completions without the stop token or the stop string that ended them."""
        by_id = [stop and row[-1] in self.stop_ids for row, stop in zip(id_rows, stopped, strict=True)]
        texts = self._decode([row[:-1] if cut else row for row, cut in zip(id_rows, by_id, strict=True)])
        if not self.strings:
            return texts
        by_text = [stop and not cut for stop, cut in zip(stopped, by_id, strict=True)]
        return [text[: self._find(text)] if cut else text for text, cut in zip(texts, by_text, strict=True)]

    def _string_ended(self, ids: torch.Tensor) -> list[bool]:
        """Search the last tokens for a stop string; only on a hit decode the whole completion to confirm it."""
        tails = self._decode(ids[:, -self.window :].tolist())
        ended = [self._find(text) is not None for text in tails]
        for i, hit in enumerate(ended):
            if hit:
                ended[i] = self._find(self._decode([ids[i].tolist()])[0]) is not None
        return ended

    def _find(self, text: str) -> int | None:
        return min((at for at in (text.find(string) for string in self.strings) if at >= 0), default=None)

    def _decode(self, id_rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(id_rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# Drawing a token.

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # int64 constants of splitmix64; torch multiplies modulo 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
UNIT = 2.0**60  # probability 1: below int64's limit, finer than float64 near 1
SLAB = 2**24  # logits processed at once: keeps the float64 copies near 128 MB


def signed_64(seed: int) -> int:
    """Any Python integer, wrapped into int64."""
    return ((seed + 2**63) % 2**64) - 2**63


def uniform(
    seeds: torch.Tensor,  # (B,) int64
    position: int,  # number of the token within its completion
) -> torch.Tensor:  # (B,) float64 in [0, 1)
    """A hash of (seed, position): no generator state, so a row draws the same number in any batch."""
    bits = _mix(_mix(seeds) + signed_64(GOLDEN * (position + 1)))
    return _shift_right(bits, 11).double() * 2.0**-53


def sample(
    logits: torch.Tensor,  # (B, V)
    uniforms: torch.Tensor,  # (B,) float64
    sampling: Sampling,
) -> tuple[torch.Tensor, torch.Tensor]:  # (B,) int64 ids, (B,) float32 log-probs
    """Draw ids; their log-probs are those of the full distribution, before top-k and top-p."""
    rows = max(1, SLAB // logits.shape[1])
    if logits.shape[0] <= rows:
        return _sample(logits, uniforms, sampling)
    parts = [_sample(x, u, sampling) for x, u in zip(logits.split(rows), uniforms.split(rows), strict=True)]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logp for _, logp in parts])


def _sample(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    logps = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)  # (B, V)
    if sampling.temperature == 0:
        ids = logps.argmax(dim=-1, keepdim=True)
    else:
        weights = (logps.double().exp() * UNIT).long()
        if sampling.top_k > 0 or sampling.top_p < 1:
            weights = _keep_top(weights, sampling.top_k, sampling.top_p)
        cdf = weights.cumsum(dim=-1)
        target = (uniforms[:, None] * cdf[:, -1:]).long()
        # right=True takes the first id whose CDF is above the target, so an id of probability 0 is never drawn.
        ids = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
    return ids[:, 0], logps.gather(1, ids)[:, 0]


def _keep_top(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Zero all but the top_k ids, then all but the smallest set of those with top_p of the remaining mass."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        ranked[:, top_k:] = 0
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked[before >= top_p * ranked.sum(dim=-1, keepdim=True).double()] = 0
    return torch.zeros_like(weights).scatter(1, order, ranked)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's >> on int64 copies the sign bit in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
