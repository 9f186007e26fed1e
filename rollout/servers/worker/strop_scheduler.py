"""vLLM's scheduler, but sampled tokens are sent in groups: `--scheduler-cls strop_scheduler.scheduler`.

vLLM's engine sends every token of every request to the API process immediately, with three small arrays for its
log-prob. With 512 requests this takes the engine 6 ms and the API process 14 ms per step (vLLM 0.32, slow core). The
trainer reads completions only when they are finished (RequestOutputKind.FINAL_ONLY), so the scheduler buffers TOKENS
tokens per request and sends them as one output, in vLLM's own format for several tokens per step: 0.4 and 3 ms. This
does not change which tokens are sampled or when a request ends.

Two kinds of output are still sent immediately: tokens of requests with stop strings, which the API process matches, and
outputs with more than tokens and log-probs.

Do not use this scheduler on a server that may be paused during sampling (--async-prefetch, or a server started by
hand): buffered tokens would be lost and sampled again, unless the completion had already ended. This would bias
completions towards shorter lengths.

vLLM finds this file through PYTHONPATH. Its scheduler interface is not public, so strop_probe.py checks for the names
used here; a version that lacks them runs with its own scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_
from typing import Any, NamedTuple

TOKENS = 16
MERGED = ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason")  # fields that merge() handles


def scheduler(vllm_config: Any, **options: Any) -> Any:
    """Return vLLM's default scheduler with Grouped mixed in."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as Base
    if len(LogprobsLists._fields) != 4 or not set(MERGED) <= set(EngineCoreOutput.__struct_fields__):
        print("strop: this vLLM version has different output fields; sending tokens individually", flush=True)
        return Base(vllm_config=vllm_config, **options)
    grouped = type("Scheduler", (Grouped, Base), {})(vllm_config=vllm_config, **options)
    grouped.strop_final = RequestOutputKind.FINAL_ONLY
    grouped.strop_is_plain = plain_check(EngineCoreOutput)
    return grouped


class Buffer(NamedTuple):
    """Unsent outputs of a request. Requests take turns, so that every step sends about the same amount."""

    turn: int
    outputs: list[Any]


class Grouped:
    """Mixin for a vLLM scheduler that groups the outputs of update_from_output."""

    strop_final: Any  # RequestOutputKind.FINAL_ONLY
    strop_is_plain: Callable[[Any], bool]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.strop_buffers: dict[str, Buffer] = {}  # request id -> unsent outputs
        self.strop_steps = 0

    def update_from_output(self, *args: Any, **options: Any) -> dict[int, Any]:
        batches = super().update_from_output(*args, **options)
        self.strop_steps += 1
        for client, batch in list(batches.items()):
            batch.outputs = [sent for output in batch.outputs for sent in self.strop_group(output)]
            if not batch.outputs and batch.finished_requests is None and batch.scheduler_stats is None:
                del batches[client]
        if len(self.strop_buffers) > len(self.requests):  # some requests were aborted
            self.strop_buffers = {name: buffer for name, buffer in self.strop_buffers.items() if name in self.requests}
        return batches

    def strop_group(self, output: Any) -> list[Any]:
        """Return the outputs to send now: none, or the buffered outputs and this output."""
        name, is_plain, is_last = output.request_id, self.strop_is_plain(output), output.finish_reason is not None
        buffer = self.strop_buffers.get(name)
        if is_plain and not is_last:
            if buffer is None and self.strop_may_wait(name):
                buffer = self.strop_buffers[name] = Buffer(turn=len(self.strop_buffers), outputs=[])
            if buffer is not None and len(buffer.outputs) < TOKENS - 1 and (self.strop_steps + buffer.turn) % TOKENS:
                buffer.outputs.append(output)
                return []
        if buffer is None:
            return [output]
        unsent = buffer.outputs[:]
        buffer.outputs.clear()
        if is_last:
            del self.strop_buffers[name]
        if not unsent:
            return [output]
        return [merge([*unsent, output])] if is_plain else [merge(unsent), output]

    def strop_may_wait(self, name: str) -> bool:
        request = self.requests.get(name)
        params = None if request is None else request.sampling_params
        return params is not None and params.output_kind is self.strop_final and not params.stop


def plain_check(kind: Any) -> Callable[[Any], bool]:
    """Return a predicate: an output of this class contains only tokens and log-probs."""
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__  # only the last fields have defaults
    others = [
        (name, default)
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True)
        if name not in MERGED
    ]
    read, empty = attrgetter(*(name for name, _ in others)), [default for _, default in others]
    return lambda output: all(map(is_, read(output), empty))


def merge(outputs: list[Any]) -> Any:
    """Merge outputs of one request into the last output, which has the finish reason."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    if last.new_logprobs is not None:
        last.new_logprobs = join([output.new_logprobs for output in outputs])
    return last


def join(parts: list[Any]) -> Any:
    """Concatenate LogprobsLists."""
    import numpy as np

    ids, logprobs, ranks, _ = zip(*parts, strict=True)
    return type(parts[0])(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks), None)
