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


def read(num_chunks: int, out: io.StringIO, **settings) -> None:
    chunks = list(range(num_chunks))
    assert list(with_progress(chunks, 64 * num_chunks, "rows.jsonl", size=64, out=out, **settings)) == chunks


def test_a_short_read_is_silent():
    out = io.StringIO()
    read(16, out)
    assert out.getvalue() == ""


def test_a_long_read_reports_rows_and_time_left():
    out = io.StringIO()
    read(40, out, clock=Clock())
    # The clock is read after every chunk: second 16 is after 16 chunks.
    first, second = out.getvalue().splitlines()
    assert first == "data: rows.jsonl: 1,024 of 2,560 rows, 24 s left"
    assert second == "data: rows.jsonl: 2,048 of 2,560 rows, 8 s left"


def test_a_terminal_gets_one_line_that_is_cleared_at_the_end():
    out = Terminal()
    read(8, out, clock=Clock())
    output = out.getvalue()
    assert output.startswith("\rdata: rows.jsonl: 256 of 512 rows, ") and output.endswith("\r\033[K")
    assert "\n" not in output


def test_no_rows():
    out = io.StringIO()
    read(0, out, clock=Clock())
    assert out.getvalue() == ""
