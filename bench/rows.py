"""Rows per second and memory of reading chat rows: on one core, on several, and from the cache.

    python -m bench.rows [--model SmolLM2-135M-Instruct] [--num-rows 5000 40000 200000] [--cores 1 8 16]

Rows have three turns of a user and three of an assistant, in words of strop's docs, about 716 tokens in all; files
repeat 5,000 different rows. Each measurement is a process of its own that may use only these cores. Memory is the
peak of this process less its size before reading; each worker adds a few chunks of rows. The error is 1 if the
first rows have other tokens than in the first measurement.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

from bench.common import ROOT, Timing, emit, make_row, require_commit

DIFFERENT = 5000
ROLES = ("user", "assistant") * 3


def write_rows(path: Path, num_rows: int) -> None:
    words = re.findall(r"[A-Za-z]+", "".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md"))))
    rng = random.Random(0)

    def turns() -> list[dict[str, str]]:
        texts = (rng.choices(words, k=rng.randint(low, 3 * low)) for low in (20, 77) * 3)
        return [{"role": role, "content": " ".join(text)} for role, text in zip(ROLES, texts, strict=True)]

    lines = [json.dumps({"messages": turns()}) + "\n" for _ in range(min(DIFFERENT, num_rows))]
    with path.open("w") as file:
        file.writelines(lines[i % DIFFERENT] for i in range(num_rows))


def measure(model: str, path: str, cores: int, folder: str, compared: int) -> None:
    """Read the rows once on this many cores and print the figures as JSON."""
    from transformers import AutoTokenizer

    from data.loader import Loader
    from data.rows.cache import load_cached
    from data.rows.sft import load_examples

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    tokenizer = AutoTokenizer.from_pretrained(model)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    started = time.perf_counter()
    rows = load_cached(load_examples, [path], tokenizer, folder=folder, max_length=4096)
    seconds, tokens = time.perf_counter() - started, int(rows.lengths["ids"].sum())
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    started = time.perf_counter()
    Loader(rows, batch_size=64, seed=0).next()
    first_batch = time.perf_counter() - started
    ids = hashlib.sha256(str([list(rows[i].ids) for i in range(compared)]).encode()).hexdigest()
    extra = {"tokens_per_row": tokens / len(rows), "bytes_per_token": peak / tokens, "first_batch_s": first_batch}
    extra["load_average"] = os.getloadavg()[0]
    print(json.dumps({"ms": 1000 * seconds, "gib": peak / 2**30, "ids": ids, "extra": extra}))


def main(
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    out: Path | None = None,
    num_rows: tuple[int, ...] = (5000, 40000),
    cores: tuple[int, ...] = (1, 8),
) -> None:
    """Measure each number of rows on the same-numbered number of cores, then read the last file from the cache.

    Args:
        model: Tokenizer with a chat template.
        out: File to append the rows to.
        num_rows: Rows per file.
        cores: Cores per file.
    """
    require_commit()
    first = ""
    with tempfile.TemporaryDirectory() as folder:
        for i, (count, number) in enumerate(zip(num_rows, cores, strict=True)):
            path = f"{folder}/{count}.jsonl"
            write_rows(Path(path), count)
            is_last = i == len(cores) - 1
            for way in ("read", "read from the cache")[: 1 + is_last]:
                arguments = (model, path, number, f"{folder}/cache" if is_last else "none", min(num_rows))
                code = f"from bench.rows import measure; measure(*{arguments!r})"
                child = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.PIPE)
                found = json.loads(child.stdout.splitlines()[-1])
                first = first or found["ids"]
                row = make_row(
                    "rows", way, Timing([found["ms"]], found["gib"]), shape={"rows": count, "cores": number},
                    dtype="int32", work=count, unit="rows", errors={"other_rows": float(found["ids"] != first)},
                    extra=found["extra"],
                )  # fmt: skip
                emit([row], out)


if __name__ == "__main__":
    tyro.cli(main)
