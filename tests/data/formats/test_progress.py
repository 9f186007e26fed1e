"""Progress of reading rows: no output if it is quick, otherwise a line at intervals."""

from __future__ import annotations

import io

from data.formats.progress import with_progress


class Clock:
    """Advances by a second per call."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_are_in_order_and_a_short_read_is_silent():
    out = io.StringIO()
    rows = list(range(1000))
    assert list(with_progress(rows, "rows.jsonl", out=out)) == rows
    assert out.getvalue() == ""


def test_a_long_read_reports_rows_and_time_left():
    out = io.StringIO()
    rows = list(range(64 * 40))
    assert list(with_progress(rows, "rows.jsonl", out=out, clock=Clock())) == rows
    # The clock is read every 64 rows: second 16 is at row 64 * 15, where 64 rows take 16 / 15 seconds.
    first, second = out.getvalue().splitlines()
    assert first == "data: rows.jsonl: 960 of 2,560 rows, 27 s left"
    assert second == "data: rows.jsonl: 1,984 of 2,560 rows, 9 s left"


def test_a_terminal_gets_one_line_that_is_cleared_at_the_end():
    out = Terminal()
    list(with_progress(list(range(64 * 8)), "rows.jsonl", out=out, clock=Clock()))
    output = out.getvalue()
    assert output.startswith("\rdata: rows.jsonl: 192 of 512 rows, ") and output.endswith("\r\033[K")
    assert "\n" not in output


def test_no_rows():
    out = io.StringIO()
    assert list(with_progress([], "rows.jsonl", out=out, clock=Clock())) == [] and out.getvalue() == ""
