"""One-digit arithmetic with tagged answers: the rows of a small training run.

    python -m bench.tagged_arithmetic rows FOLDER   # sft.jsonl, train.jsonl, eval.jsonl

A row asks "What is 7 + 5? ..." and its answer is "<answer>12</answer>", so `exact_match` needs both the number and
the format. The files share no problem; 7 + 5 and 5 + 7 count as one. Held-out problems are repeated, because at
temperature 1 each row is one sample.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

PARTS = {"sft": range(0, 35), "train": range(35, 80), "eval": range(80, 100)}  # percent of the problems
COPIES = {"sft": 1, "train": 1, "eval": 8}


def rows(part: str) -> list[dict]:
    made = []
    for op in "+-*":
        for a in range(10):
            for b in range(10):
                key = f"{a}{op}{b}" if op == "-" else f"{min(a, b)}{op}{max(a, b)}"
                if int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100 not in PARTS[part]:
                    continue
                answer = f"<answer>{ {'+': a + b, '-': a - b, '*': a * b}[op] }</answer>"
                question = f"What is {a} {op} {b}? Reply with the number only, as <answer>number</answer>."
                prompt = [{"role": "user", "content": question}]
                made += [{"prompt": prompt, "completion": answer, "answer": answer}] * COPIES[part]
    return made


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(part)))


def main(argv: list[str]) -> None:
    if argv[:1] == ["rows"] and len(argv) == 2:
        return write(Path(argv[1]))
    sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
