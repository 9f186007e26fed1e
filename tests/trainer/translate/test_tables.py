"""The tables in the documentation are those of the code."""

from __future__ import annotations

from trainer.translate.__main__ import main


def test_tables_of_the_pages_are_those_of_the_code(capsys):
    assert main([]) == 0, capsys.readouterr().out
