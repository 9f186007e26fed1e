"""vLLM's scheduler, with sampled tokens sent on in groups: `--scheduler-cls strop_scheduler.scheduler`.

vLLM's engine sends every token of every request to the API process at once, each with three small arrays for its
log-prob. With 512 requests that costs the engine 6 ms and the API process 14 ms a step (vLLM 0.32, on a slow core).
Our completions are read only when they are finished (RequestOutputKind.FINAL_ONLY), so here TOKENS tokens of such a
request are kept and sent as one output, in the form that vLLM itself uses for several tokens of one step: 0.4 and 3 ms.
What is sampled, and when a request ends, does not change: that is decided before.

Sent at once, as always: tokens of requests with stop strings, which the API process searches for, and outputs that
carry more than tokens and log-probs.

Not for a server that may be paused while it generates (--async-prefetch, or one started by hand): what is kept back
then would be lost and sampled again, unless the completion has ended meanwhile. That second try would make completions
shorter than the model's.

vLLM finds this file through PYTHONPATH. It says that its scheduler interface is not public, so strop_probe.py looks for
what is used here; a version that lacks it runs with its own scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_
from typing import Any, NamedTuple

TOKENS = 16
MERGED = ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason")  # fields that merge() handles


def scheduler(vllm_config: Any, **options: Any) -> Any:
    """The scheduler that vLLM would have made, with Grouped in front of it."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as Base
    if len(LogprobsLists._fields) != 4 or not set(MERGED) <= set(EngineCoreOutput.__struct_fields__):
        print("strop: this vLLM's outputs have other fields, so tokens are sent one by one", flush=True)
        return Base(vllm_config=vllm_config, **options)
    made = type("Scheduler", (Grouped, Base), {})(vllm_config=vllm_config, **options)
    made.strop_final = RequestOutputKind.FINAL_ONLY
    made.strop_is_plain = plain_check(EngineCoreOutput)
    return made


class Kept(NamedTuple):
    """Outputs of a request that are not sent yet. Requests take turns, so that every step sends about the same."""

    turn: int
    outputs: list[Any]


class Grouped:
    """Mixin for a vLLM scheduler that groups what update_from_output returns."""

    strop_final: Any  # RequestOutputKind.FINAL_ONLY
    strop_is_plain: Callable[[Any], bool]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.strop_kept: dict[str, Kept] = {}  # by request
        self.strop_steps = 0

    def update_from_output(self, *args: Any, **options: Any) -> dict[int, Any]:
        made = super().update_from_output(*args, **options)
        self.strop_steps += 1
        for client, batch in list(made.items()):
            batch.outputs = [sent for output in batch.outputs for sent in self.strop_group(output)]
            if not batch.outputs and batch.finished_requests is None and batch.scheduler_stats is None:
                del made[client]
        if len(self.strop_kept) > len(self.requests):  # some were aborted
            self.strop_kept = {name: kept for name, kept in self.strop_kept.items() if name in self.requests}
        return made

    def strop_group(self, output: Any) -> list[Any]:
        """What to send now: nothing, or what was kept and this output."""
        name, is_plain, is_last = output.request_id, self.strop_is_plain(output), output.finish_reason is not None
        kept = self.strop_kept.get(name)
        if is_plain and not is_last:
            if kept is None and self.strop_may_wait(name):
                kept = self.strop_kept[name] = Kept(turn=len(self.strop_kept), outputs=[])
            if kept is not None and len(kept.outputs) < TOKENS - 1 and (self.strop_steps + kept.turn) % TOKENS:
                kept.outputs.append(output)
                return []
        if kept is None:
            return [output]
        before = kept.outputs[:]
        kept.outputs.clear()
        if is_last:
            del self.strop_kept[name]
        if not before:
            return [output]
        return [merge([*before, output])] if is_plain else [merge(before), output]

    def strop_may_wait(self, name: str) -> bool:
        request = self.requests.get(name)
        params = None if request is None else request.sampling_params
        return params is not None and params.output_kind is self.strop_final and not params.stop


def plain_check(kind: Any) -> Callable[[Any], bool]:
    """A function that tells whether an output of this class carries tokens and log-probs only."""
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__  # of the last fields; the first have none
    others = [
        (name, default)
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True)
        if name not in MERGED
    ]
    read, empty = attrgetter(*(name for name, _ in others)), [default for _, default in others]
    return lambda output: all(map(is_, read(output), empty))


def merge(outputs: list[Any]) -> Any:
    """One output with the tokens of all, which belong to one request; it ends as the last one does."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    if last.new_logprobs is not None:
        last.new_logprobs = join([output.new_logprobs for output in outputs])
    return last


def join(parts: list[Any]) -> Any:
    """LogprobsLists of several tokens as one."""
    import numpy as np

    ids, logprobs, ranks, _ = zip(*parts, strict=True)
    return type(parts[0])(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks), None)
