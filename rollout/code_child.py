"""Runs one program and its tests, and says whether they passed. A file of its own, without imports of ours.

    python -I rollout/code_child.py < {"program": ..., "tests": ..., "limits": {...}, "secret": ...}  # JSON on stdin

Started by rollout/code_reward.py. What follows the limits below is not trusted to be friendly, only not to be hostile:
this keeps accidents (endless loops, gigabytes, forks, downloads) from the trainer. It is not a security boundary.
"""

from __future__ import annotations

import json
import os
import signal
import sys

GIB = 2**30
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x10000000, 0x40000000, 1
REFUSED = (  # beginnings of audit events; making a socket is not among them, asyncio needs a pair
    "socket.connect", "socket.bind", "socket.send", "socket.get", "subprocess.Popen", "os.fork", "os.exec",
    "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "os.kill",
)  # fmt: skip


def main() -> None:
    job = json.load(sys.stdin)
    result = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    cut_off()
    limit(job["limits"])
    sys.addaudithook(refuse)  # cannot be taken off again
    secret, space = job.pop("secret").encode(), {"__name__": "__main__", "__builtins__": __builtins__}
    run(job["program"], space, "program")
    run(job["tests"], space, "tests")  # in the names of the program, after it: what the tests define is theirs
    os.write(result, secret)
    os._exit(0)  # no atexit of the program


def run(source: str, space: dict[str, object], name: str) -> None:
    exec(compile(source, f"<{name}>", "exec"), space)


def cut_off() -> None:
    """Out of the network where the system lets us, and dead when whoever started us dies."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)  # refused in some containers: the audit hook is what is left then
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after unshare, which may reset it


def limit(limits: dict[str, float]) -> None:
    seconds = max(1, int(limits["seconds"]))
    signal.alarm(seconds + 1)  # also ends a program that sleeps, should nobody be left to kill it
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    lower(resource, resource.RLIMIT_CPU, seconds + 1)
    lower(resource, resource.RLIMIT_AS, int(limits["memory_gb"] * GIB))
    lower(resource, resource.RLIMIT_FSIZE, int(limits["file_mb"] * 2**20))
    lower(resource, resource.RLIMIT_NOFILE, 64)
    lower(resource, resource.RLIMIT_CORE, 0)
    lower(resource, resource.RLIMIT_NPROC, 0)  # nor threads; counts all of this user, and does not bind root


def lower(resource: object, which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not available to code under test")


if __name__ == "__main__":
    main()
