"""Runs a command in its own process group, and ends the group when the process that started this one is gone.

    python strop_guard.py [--pid-fd N] [--scratch FOLDER] -- COMMAND ...

The starter holds the other end of our stdin. When it closes it, or dies by any signal, stdin reaches its end and the
group gets TERM, 15 seconds, KILL. SIGTERM to this process does the same; SIGINT gives the group only one second. If the
command ends by itself, its exit status is passed on and what it left running is ended too. Then the shared memory that
a killed group leaves behind is removed, and the folder --scratch. The command's process id, which is also the group's,
is written to file descriptor --pid-fd.

If this process itself is killed, none of that happens. So the names of the shared memory are recorded in --scratch,
where rollout/servers/launch.py finds them when it stops the server or starts the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

GRACE = 15.0  # seconds between TERM and KILL
SHORT_GRACE = 1.0  # after SIGINT: the server has not served anybody yet
CHECK = 1.0  # seconds between checks of our parent: a fork of it may keep stdin open after its death
RECORD_S = 5.0  # seconds between searches for shared memory
RECORD = "shared_memory"  # file in --scratch: one path a line
# Names of Python's multiprocessing, whose resource tracker removes them unless it is killed too. vLLM's are 400 MB.
SHARED = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-)\w+)$", re.MULTILINE)
SUBREAPER, DEATH_SIGNAL = 36, 1  # of Linux's prctl


def prctl(option: int, value: int) -> None:
    """Linux only; other systems go without."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_guard() -> None:
    """Runs in the command's process before it starts: kill -9 of the guard must end the command too."""
    prctl(DEATH_SIGNAL, signal.SIGTERM)


def run(command: list[str], pid_fd: int | None, scratch: str | None = None) -> int:
    # Adopt orphans of the command: process 1 of a container may never reap them.
    prctl(SUBREAPER, 1)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(read_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: asked.append(got))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes select
    parent = os.getppid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_guard)
    if pid_fd is not None:
        os.write(pid_fd, f"{child.pid}\n".encode())
        os.close(pid_fd)
    watched = [0, read_end]
    recorded: set[str] = set()
    looked = time.monotonic()
    while child.poll() is None and not asked and os.getppid() == parent:
        ready, _, _ = select.select(watched, [], [], CHECK)
        if read_end in ready:
            os.read(read_end, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
        if scratch and time.monotonic() - looked > RECORD_S:
            recorded = record(shared_memory(child.pid) | recorded, recorded, scratch)
            looked = time.monotonic()
    end_group(child, SHORT_GRACE if signal.SIGINT in asked else GRACE, recorded)
    status = child.wait()
    return 128 - status if status < 0 else status


def end_group(child: subprocess.Popen[bytes], grace: float, recorded: set[str]) -> None:
    """TERM, grace, KILL for what is left of the group; returns when nothing is.

    `recorded`: shared memory that the group had earlier, in case all its processes have been killed.
    """
    shared = set(recorded)
    try:
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            shared |= shared_memory(child.pid)  # again before KILL: a starting process may have made more
            if not signal_group(child, number, seconds):
                break
    finally:
        for path in shared:
            with contextlib.suppress(OSError):
                os.unlink(path)


def shared_memory(group: int) -> set[str]:
    """Shared-memory files that processes of the group have mapped."""
    found: set[str] = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):  # not a process, or gone meanwhile
            if os.getpgid(int(name)) == group:
                found |= shared_memory_of(int(name))
    return found


def shared_memory_of(pid: int) -> set[str]:
    """Shared-memory files that a process has mapped; none if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return set(SHARED.findall(maps.read()))
    return set()


def record(found: set[str], recorded: set[str], scratch: str) -> set[str]:
    """Write the names to the scratch folder, atomically; returns those that are recorded."""
    if found == recorded:
        return recorded
    path = os.path.join(scratch, RECORD)
    try:
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            file.write("".join(f"{name}\n" for name in sorted(found)))
        os.replace(f"{path}.tmp", path)
    except OSError:  # a full disk must not end the server; tried again next time
        return recorded
    return found


def signal_group(child: subprocess.Popen[bytes], number: int, seconds: float) -> bool:
    """Send the signal; returns whether the group still has a member after that many seconds."""
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not is_alive(child):
            return False
        time.sleep(0.05)
    return True


def is_alive(child: subprocess.Popen[bytes]) -> bool:
    """Whether the group has a living member; reaps the dead ones."""
    if child.poll() is not None:  # not before: Popen must reap the child itself, for its status
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-child.pid, os.WNOHANG)[0]:
                pass
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[:cut], argv[cut + 1 :]
    options = dict(zip(words[::2], words[1::2], strict=False))
    if not command or len(words) % 2 or not set(options) <= {"--pid-fd", "--scratch"}:
        print("usage: python strop_guard.py [--pid-fd N] [--scratch FOLDER] -- COMMAND ...", file=sys.stderr)
        return 2
    try:
        return run(command, int(options["--pid-fd"]) if "--pid-fd" in options else None, options.get("--scratch"))
    except OSError as error:
        print(f"{command[0]}: could not be started ({error.strerror})", file=sys.stderr)
        return 127
    finally:
        if "--scratch" in options:
            shutil.rmtree(options["--scratch"], ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
