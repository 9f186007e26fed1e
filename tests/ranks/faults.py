"""`torchrun -m tests.ranks.faults kill|full [trainer flags]`: run the trainer with a fault in rank 1's second save.

kill: SIGKILL while the shard is written. full: a file size limit, like a full disk.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from trainer import __main__ as entry
from trainer.parallel.comm import rank
from trainer.run import checkpoint


def break_second_save(fault: str) -> None:
    write = checkpoint.write_tensors

    def broken(path: Path, *args: Any) -> Any:
        if "step-00000004" in str(path) and path.name.startswith("shard-"):
            if fault == "kill":
                path.write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return write(path, *args)

    if rank() == 1:
        checkpoint.write_tensors = broken


if __name__ == "__main__":
    break_second_save(sys.argv.pop(1))
    sys.exit(entry.main())
