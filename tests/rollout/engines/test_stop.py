"""Texts of completions: without what ended them, and the same whether rows are decoded together or one by one."""

from __future__ import annotations

import random

from rollout.engine import Sampling
from rollout.engines.stop import StopCheck
from tests.rollout.scripted_engine import tiny_tokenizer


def test_rows_are_decoded_together_as_they_are_one_by_one(monkeypatch):
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    rows = [[rng.randrange(len(tokenizer)) for _ in range(rng.randrange(30))] for _ in range(50)]
    check = StopCheck(tokenizer, Sampling(stop_ids=(2,)))
    ended = [bool(row) and row[-1] == 2 for row in rows] + [True]
    texts = check.texts([*rows, [72, 105, 2]], ended)
    assert texts == [tokenizer.decode(row, skip_special_tokens=True) for row in [*rows, [72, 105]]]

    class Own(type(tokenizer)):
        def _decode(self, token_ids, **options):
            return f"{len(token_ids)} tokens"

    monkeypatch.setattr(tokenizer, "__class__", Own)
    assert check.texts([[72, 105, 2]], [True]) == ["2 tokens"], "a tokenizer that decodes in its own way"
