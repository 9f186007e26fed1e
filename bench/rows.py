"""Rows per second and memory of reading chat rows: on one core, on several, and from the cache.

    python -m bench.rows --model HuggingFaceTB/SmolLM2-135M-Instruct [--num-rows 5000 40000 200000] [--cores 1 8 16]

Rows have three turns of a user and three of an assistant, in words of strop's docs, about 716 tokens in all; files
repeat 5,000 different rows. Each measurement is a process of its own that may use only these cores. Memory is the
peak of this process less its size before reading; each worker adds a few chunks of rows.
"""

from __future__ import annotations

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

from bench.common import ROOT

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


def measure(model: str, path: str, cores: int, folder: str) -> None:
    """Read the rows once on this many cores and print the figures."""
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
    loader = Loader(rows, batch_size=64, seed=0)
    loader.next()
    first_batch = time.perf_counter() - started
    fingerprint = loader.state_dict()["fingerprint"][:8]
    print(
        f"{cores:3} cores: {len(rows):,} rows of {tokens / len(rows):.0f} tokens in {seconds:.1f} s = "
        f"{len(rows) / seconds:,.0f} rows/s, memory +{peak / 2**20:,.0f} MiB = {peak / tokens:.1f} bytes/token; first "
        f"batch {first_batch:.1f} s; fingerprint {fingerprint}; load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main(model: str, num_rows: tuple[int, ...] = (5000, 40000), cores: tuple[int, ...] = (1, 8)) -> None:
    """Measure each number of rows on the same-numbered number of cores, then read the last file from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        for count, number in zip(num_rows, cores, strict=True):
            path = f"{folder}/{count}.jsonl"
            write_rows(Path(path), count)
            is_last = number == cores[-1]
            for _ in range(1 + is_last):
                call = f"measure({model!r}, {path!r}, {number}, {f'{folder}/cache' if is_last else 'none'!r})"
                subprocess.run([sys.executable, "-c", f"from bench.rows import measure; {call}"], check=True, cwd=ROOT)


if __name__ == "__main__":
    tyro.cli(main)
