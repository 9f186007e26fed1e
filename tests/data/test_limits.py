from __future__ import annotations

import pytest

from data import limits


@pytest.mark.parametrize(
    ("elapsed", "used", "reached"),
    [
        (9.0, 9.0, False),
        (10.5, 10.5, True),  # works on an idle machine
        (10.5, 0.001, True),  # waits for something else than a core
        (500.0, 9.5, False),  # works, on a busy machine
        (600.0, 10.5, True),
        (1000.0, 9.5, True),  # wakes up now and then
        (9.0, 40.0, False),  # several threads
        (10.5, 40.0, True),
    ],
)
def test_work_and_waiting_have_the_same_limit_and_waiting_for_a_core_has_none(monkeypatch, elapsed, used, reached):
    now = [100.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    limit = limits.WorkLimit(10.0, lambda: used)
    now[0] += elapsed
    assert (limit.left() <= 0) is reached
