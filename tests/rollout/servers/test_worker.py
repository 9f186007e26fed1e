"""Code that runs inside a vLLM server, tested without vLLM: garbage collection and grouped tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from rollout.servers.command import WORKER

GARBAGE = """
import asyncio, gc, weakref
import strop_gc, strop_generate, strop_worker

class Cycle:
    def __init__(self): self.itself = self

def garbage(): return weakref.ref(Cycle())

paths = []
async def app(scope, receive, send): paths.append(scope["path"])

middleware = strop_generate.Generate(app)
def request(path): asyncio.run(middleware({"type": "http", "path": path, "method": "POST"}, None, None))

before = gc.get_threshold()
left = garbage()
request("/resume")
assert left() is not None and gc.get_threshold() == before
request("/pause")  # the first pause freezes loaded objects and collects the others
assert left() is None and gc.get_freeze_count() > 1000 and gc.isenabled()
frozen = gc.get_freeze_count()
left = [garbage() for _ in range(5000)]  # the default threshold is 700
assert all(one() is not None for one in left)
request("/sleep")
assert not any(one() is not None for one in left) and paths == ["/resume", "/pause", "/sleep"]
assert gc.get_freeze_count() <= frozen, "frozen once"
left = garbage()
assert strop_worker.Worker().strop_mark("run:1")["freed"] >= 1 and left() is None
left = [garbage() for _ in range(3 * strop_gc.YOUNG)]  # never paused
assert sum(one() is not None for one in left) <= strop_gc.YOUNG + 1000
print("ok")
"""


def test_garbage_is_collected_at_pauses_and_bounded_without_pauses():
    env = {**os.environ, "PYTHONPATH": str(WORKER)}
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout == "ok\n", done.stderr


# grouped tokens --------------------------------------------------------------------------------------------------


class Lists(NamedTuple):
    """vLLM's LogprobsLists."""

    ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    cu_num_generated_tokens: None = None


class Output:
    """vLLM's EngineCoreOutput, with two of its many other fields."""

    __struct_fields__ = ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason", "nans", "stats")
    __struct_defaults__ = (None, None, None, 0, None)

    def __init__(self, name, tokens, *, finish=None, logps=True, stats=None):
        self.request_id, self.new_token_ids, self.finish_reason, self.stop_reason = name, tokens, finish, None
        column = np.array(tokens, dtype=np.int32)[:, None]
        self.new_logprobs = Lists(column, -column / 10, column[:, 0] + 1) if logps else None
        self.nans, self.stats = 0, stats


class Base:
    """A scheduler that returns the given outputs, for one client."""

    def __init__(self, **requests):
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(output_kind=kind, stop=stop))
            for name, (kind, stop) in requests.items()
        }

    def update_from_output(self, outputs, **more):
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return {0: SimpleNamespace(outputs=outputs, finished_requests=None, scheduler_stats=None, **more)}


FINAL = object()


@pytest.fixture
def make(monkeypatch):
    """make(a=(FINAL, [])): a grouping scheduler over Base with these requests."""
    monkeypatch.syspath_prepend(str(WORKER))
    import strop_scheduler

    def create(**requests):
        scheduler = type("Scheduler", (strop_scheduler.Grouped, Base), {})(**requests)
        scheduler.strop_final, scheduler.strop_is_plain = FINAL, strop_scheduler.plain_check(Output)
        return scheduler

    monkeypatch.setattr(strop_scheduler, "TOKENS", 4)
    return create


def sent(scheduler, *outputs):
    """Return (request, tokens) of the outputs sent to the API process after a step with these outputs."""
    return [(out.request_id, out.new_token_ids) for out in flat(scheduler.update_from_output(list(outputs)))]


def flat(batches):
    return [output for batch in batches.values() for output in batch.outputs]


def test_tokens_are_sent_in_groups(make):
    scheduler = make(a=(FINAL, []))
    assert [sent(scheduler, Output("a", [i])) for i in range(4)] == [[], [], [], [("a", [0, 1, 2, 3])]]
    assert scheduler.update_from_output([Output("a", [4])]) == {}, "not even an empty message"
    (last,) = flat(scheduler.update_from_output([Output("a", [5, 6], finish="stop")]))
    assert (last.new_token_ids, last.finish_reason) == ([4, 5, 6], "stop")
    np.testing.assert_array_equal(last.new_logprobs.ids, [[4], [5], [6]])
    np.testing.assert_array_equal(last.new_logprobs.logprobs, [[-0.4], [-0.5], [-0.6]])
    np.testing.assert_array_equal(last.new_logprobs.ranks, [5, 6, 7])
    assert scheduler.strop_buffers == {}


def test_streams_and_stop_strings_are_sent_immediately(make):
    scheduler = make(stream=(object(), []), text=(FINAL, ["END"]), one=(FINAL, []), plain=(FINAL, []))
    for name in ("stream", "text"):
        assert sent(scheduler, Output(name, [1])) == [(name, [1])]
    assert sent(scheduler, Output("one", [7], finish="length")) == [("one", [7])]
    # An output with other fields is never merged, and the order is preserved.
    assert sent(scheduler, Output("plain", [1], stats="prefill")) == [("plain", [1])]
    assert sent(scheduler, Output("plain", [2], logps=False)) == []
    assert sent(scheduler, Output("plain", [3], stats="more", logps=False)) == [("plain", [2]), ("plain", [3])]
    assert sent(scheduler, Output("plain", [4], logps=False), Output("stream", [2])) == [("stream", [2])]
    assert sent(scheduler, Output("plain", [5], finish="stop", logps=False)) == [("plain", [4, 5])]


def test_requests_that_start_together_are_sent_in_different_steps(make):
    names = "abcdefgh"
    scheduler = make(**dict.fromkeys(names, (FINAL, [])))
    steps = [sent(scheduler, *(Output(name, [step]) for name in names)) for step in range(8)]
    assert [len(step) for step in steps] == [2] * 8
    for name in names:
        tokens = [token for step in steps for other, ids in step if other == name for token in ids]
        assert tokens == list(range(len(tokens))) and len(tokens) >= 4, "in order, and at most 4 behind"


def test_buffers_of_aborted_requests_are_dropped(make):
    scheduler = make(a=(FINAL, []), b=(FINAL, []))
    sent(scheduler, Output("a", [1]), Output("b", [2]))
    del scheduler.requests["a"]
    sent(scheduler, Output("b", [3]))
    assert list(scheduler.strop_buffers) == ["b"]
