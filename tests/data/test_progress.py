"""Progress of reading rows: silent when short, a line now and then when long."""

from __future__ import annotations

import io

from data.progress import shown


class Clock:
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_come_through_in_order_and_a_short_reading_is_silent():
    out = io.StringIO()
    rows = list(range(1000))
    assert list(shown(rows, "rows.jsonl", out=out)) == rows
    assert out.getvalue() == ""


def test_a_long_reading_says_how_far_it_is_and_how_long_it_takes():
    out = io.StringIO()
    rows = list(range(64 * 40))
    assert list(shown(rows, "rows.jsonl", out=out, clock=Clock())) == rows
    # A look every 64 rows: the 16th second is at row 64 * 15, where 64 rows take 16 / 15 seconds.
    first, second = out.getvalue().splitlines()
    assert first == "data: rows.jsonl: 960 of 2,560 rows, 27 s left"
    assert second == "data: rows.jsonl: 1,984 of 2,560 rows, 9 s left"


def test_a_terminal_gets_one_line_that_is_wiped_at_the_end():
    out = Terminal()
    list(shown(list(range(64 * 8)), "rows.jsonl", out=out, clock=Clock()))
    said = out.getvalue()
    assert "\n" not in said and said.startswith("\rdata: rows.jsonl: 192 of 512 rows, ") and said.endswith("\r\033[K")


def test_no_rows():
    out = io.StringIO()
    assert list(shown([], "rows.jsonl", out=out, clock=Clock())) == [] and out.getvalue() == ""
