"""Run by torchrun: all tests that need two ranks, started once.

    torchrun --nproc-per-node 2 -m tests.ranks.main [--sharded FOLDER RUN] MODE:CASE ...

MODE is replicate, fsdp, copies or once; with MODE/N, N ranks share rows. Prints one JSON line per case on rank 0.
--sharded also saves and loads sharded models in FOLDER, and resumes RUN with a slow disk.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tests.ranks import compiled, sampled, slices, worker
from tests.ranks.sharded import check_sharded, check_slow_disk
from trainer.parallel.comm import is_main, of_all, process_group

CASES = worker.CASES | sampled.CASES | slices.CASES | compiled.CASES


def main(words: list[str]) -> None:
    folder = run = None
    if words[0] == "--sharded":
        folder, run, words = Path(words[1]), Path(words[2]), words[3:]
    with process_group(60.0):
        for word in words:
            where, _, name = word.partition(":")
            mode, _, context = where.partition("/")
            result = worker.compare(CASES[name](), mode, int(context or 1))
            if is_main():
                print(json.dumps({"case": word, **result}), flush=True)
        if folder is not None and run is not None:
            if is_main():  # files of an earlier attempt
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            of_all(None, "empty folder")
            check_sharded(folder)
            check_slow_disk(run)


if __name__ == "__main__":
    main(sys.argv[1:])
