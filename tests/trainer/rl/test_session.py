"""When a session gives its engine weights. Whole runs: tests/test_smoke.py, test_extending.py, test_resume.py."""

from __future__ import annotations

from types import SimpleNamespace

from trainer.rl.session import Session


class Engine:
    def __init__(self, version: int, asleep: bool) -> None:
        self.version, self.asleep, self.loaded = version, asleep, []

    def load(self, version: int) -> None:
        self.loaded.append(version)


CASES = [
    (0, 0, False, 1, []),
    (1, 0, False, 1, [1]),
    (1, 1, True, 1, [1]),
    (3, 0, False, 4, []),
    (4, 0, False, 4, [4]),
    (0, -1, False, 4, [0]),  # a server that has no weights yet, without an evaluation before the first rollout
    (2, -1, False, 8, [2]),  # the same in a run that was resumed
]


def test_weights_are_loaded_when_due_asleep_or_never_loaded():
    for step, version, asleep, interval, loaded in CASES:
        engine = Engine(version, asleep)
        session = SimpleNamespace(engine=engine, step=step, overlap=SimpleNamespace(vllm_sync_interval=interval))
        Session._sync(session)
        assert engine.loaded == loaded, (step, version, asleep, interval)
