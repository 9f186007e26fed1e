"""What is sent to vLLM for one completion, and what makes a reply believable. Plain functions, no connection.

A reply that fails a check is a ValueError that says what is wrong with it; the server that sent it has failed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollout import engine
from rollout.engine import Sampling

SEED_MASK = 2**63 - 1
FINAL_ONLY = 2  # one reply at the end; 0.24 would otherwise build every prefix of it
LOGP_SLACK = 1e-3  # logit minus logsumexp may round to just above 0
NO_LOGP = -9999.0  # vLLM's mark for a log-prob that is missing or not a number
LOWEST_TEMPERATURE = 0.01  # vLLM raises anything between 0 and this to it
FINISHES = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens made by one request to one server, thus by one version of the weights."""

    ids: list[int]
    logps: list[float]
    finish: Literal["stop", "length", "abort"]


def check_sampling(sampling: Sampling, *, training: bool) -> None:
    """Refuse settings the server would not follow to the letter, and those that bias a training sample."""
    if not (sampling.temperature == 0 or LOWEST_TEMPERATURE <= sampling.temperature < math.inf):
        raise ValueError(
            f"temperature={sampling.temperature}: vLLM samples at {LOWEST_TEMPERATURE} or above; give 0 for greedy"
        )
    engine.check_sampling(replace(sampling, for_training=training))


def sampling_params(sampling: Sampling, seed: int | None, max_tokens: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": max_tokens,
        "logprobs": 0,  # only that of the sampled token
        # Only our own stop ids count, not those in the model's generation_config.
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),  # strings are looked for in text
        "output_kind": FINAL_ONLY,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.top_p < 1:
        params["top_p"] = sampling.top_p
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if seed is not None:
        params["seed"] = seed & SEED_MASK
    return params


def read_segment(
    reply: dict[str, Any], sampling: Sampling, *, max_tokens: int, vocab_size: int | None = None, tag: str | None = None
) -> Segment:
    """The one completion of a reply; `tag` is the version 0.32 must have marked every token with."""
    try:
        (choice,) = reply["choices"]
        ids, finish = choice["token_ids"] or [], choice["finish_reason"]
        logps = list(choice["logps"]) if "logps" in choice else _logps_of(choice["logprobs"])
        spans = choice.get("weight_versions") or []
        versions = {span["version"] for span in spans}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a reply of another shape ({type(error).__name__}: {error})") from error
    if not all(type(i) is int for i in ids):
        raise ValueError("token ids that are no integers")
    if finish not in FINISHES:
        raise ValueError(f"finish_reason={finish!r}: is none of {', '.join(FINISHES)}")
    if len(ids) > max_tokens or (finish == "length" and len(ids) != max_tokens):
        raise ValueError(f"{len(ids)} tokens (finish_reason={finish}) where {max_tokens} were asked for")
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        raise ValueError(f"a token id outside the vocabulary of {vocab_size}")
    if finish == "stop" and not sampling.stop and (not ids or ids[-1] not in sampling.stop_ids):
        raise ValueError(f"stopped at token {ids[-1:]}, which is none of stop_ids")
    _check_logps(logps, len(ids))
    if tag is not None and versions - {tag}:
        raise ValueError(f"tokens of weight version {', '.join(sorted(map(str, versions)))}, and it should hold {tag}")
    return Segment(ids, logps, finish)


def _logps_of(told: dict[str, Any] | None) -> list[float]:
    """Out of what vLLM's own route says of every token."""
    return [token["logprob"] for token in (told or {}).get("content") or []]


def read_scores(reply: dict[str, Any], ids: list[int]) -> list[float]:
    """Log-probs of ids[1:] out of prompt_logprobs: [None, {"7": {"logprob": -0.3, ..}}, ..]."""
    try:
        entries = reply["prompt_logprobs"]
        logps = [entry[str(i)]["logprob"] for entry, i in zip(entries[1:], ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"scores of another shape ({type(error).__name__}: {error})") from error
    _check_logps(logps, len(ids) - 1)
    return logps


def is_awake(metrics: str) -> bool:
    """Whether all engines of a server say so in /metrics; one that says nothing does not count as awake."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    said = [line.rpartition(" ")[2] for line in lines if 'sleep_state="awake"' in line]
    return bool(said) and all(float(value) == 1 for value in said)


def error_text(body: bytes) -> str:
    """The message inside an error reply, on one line."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)
        while isinstance(error, dict):
            error = error.get("error") or error.get("message") or error.get("detail") or ""
        text = str(error)
    except ValueError:
        text = text.strip()
    return " ".join(text.split())[:400]


def _check_logps(logps: list[Any], num_ids: int) -> None:
    if len(logps) != num_ids:
        raise ValueError(f"{len(logps)} log-probs for {num_ids} tokens")
    if not logps:
        return
    if not all(type(logp) in (float, int) for logp in logps):
        raise ValueError("log-probs that are no numbers")
    # Order matters: a sum tells of every NaN, which min and max may miss.
    if not math.isfinite(sum(logps)) or min(logps) <= NO_LOGP:
        raise ValueError("log-probs that are not finite; if every server says so, the weights have diverged")
    if max(logps) > LOGP_SLACK:
        raise ValueError(f"a log-prob of {max(logps):g}, above 0")
