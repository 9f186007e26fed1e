"""Run a command in its own process group and end all its processes when the process that started the guard is gone.

    python strop_guard.py [--pid-fd N] [--scratch FOLDER] -- COMMAND ...

The starter has the other end of the guard's stdin. When the starter closes it or dies by any signal, the guard reads
end-of-file and sends the processes TERM and, 15 seconds later, KILL. SIGTERM to the guard does the same; SIGINT
shortens the delay to one second. If the command ends by itself, the guard returns its exit status and ends its
remaining processes. On Linux these include processes outside the group (setsid), because the guard adopts orphans.
Finally the guard removes the shared memory of a killed group and the --scratch folder. It writes the command's process
id, which is also the group's, to file descriptor --pid-fd.

A killed guard cannot clean up. So it records the names of the shared memory in --scratch, where
rollout/servers/launch.py finds them when it stops the server or starts the next one.
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
SHORT_GRACE = 1.0  # after SIGINT: the server has served no request yet
CHECK = 1.0  # seconds between checks of the parent: its fork may keep stdin open after its death
RECORD_S = 5.0  # seconds between searches for shared memory
RECORD = "shared_memory"  # file in --scratch: one path per line
# Names from Python's multiprocessing. Its resource tracker removes them unless it is killed too. vLLM's take 400 MB.
SHARED = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-)\w+)$", re.MULTILINE)
SUBREAPER, DEATH_SIGNAL = 36, 1  # Linux's prctl options


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; a no-op on other systems."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_guard() -> None:
    """Make kill -9 of the guard end the command too; runs in the command's process before it starts."""
    prctl(DEATH_SIGNAL, signal.SIGTERM)


def run(command: list[str], pid_fd: int | None, scratch: str | None = None) -> int:
    # Adopt orphans of the command: process 1 of a container may never reap them.
    prctl(SUBREAPER, 1)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(read_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    received: list[int] = []  # signals
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: received.append(got))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes select
    parent = os.getppid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_guard)
    if pid_fd is not None:
        os.write(pid_fd, f"{child.pid}\n".encode())
        os.close(pid_fd)
    watched = [0, read_end]
    recorded: set[str] = set()
    recorded_at = time.monotonic()
    while child.poll() is None and not received and os.getppid() == parent:
        ready, _, _ = select.select(watched, [], [], CHECK)
        if read_end in ready:
            os.read(read_end, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
        if scratch and time.monotonic() - recorded_at > RECORD_S:
            recorded = record(shared_memory(child.pid) | recorded, recorded, scratch)
            recorded_at = time.monotonic()
    end_group(child, SHORT_GRACE if signal.SIGINT in received else GRACE, recorded)
    status = child.wait()
    return 128 - status if status < 0 else status


def end_group(child: subprocess.Popen[bytes], grace: float, recorded: set[str]) -> None:
    """Send the group TERM and, after the grace period, KILL; return when no process is left.

    `recorded`: shared memory that the group had earlier, in case all its processes have been killed.
    """
    shared = set(recorded)
    try:
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            shared |= shared_memory(child.pid)  # again before KILL: a starting process may have allocated more
            if not signal_group(child, number, seconds):
                break
    finally:
        for path in shared:
            with contextlib.suppress(OSError):
                os.unlink(path)


def shared_memory(group: int) -> set[str]:
    """Return the shared-memory files mapped by processes of the group."""
    paths: set[str] = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):  # not a process, or it has ended
            if os.getpgid(int(name)) == group:
                paths |= shared_memory_of(int(name))
    return paths


def shared_memory_of(pid: int) -> set[str]:
    """Return the shared-memory files mapped by a process; empty if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return set(SHARED.findall(maps.read()))
    return set()


def record(names: set[str], recorded: set[str], scratch: str) -> set[str]:
    """Write the names to the scratch folder atomically; return the recorded names."""
    if names == recorded:
        return recorded
    path = os.path.join(scratch, RECORD)
    try:
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            file.write("".join(f"{name}\n" for name in sorted(names)))
        os.replace(f"{path}.tmp", path)
    except OSError:  # a full disk must not end the server; retried next time
        return recorded
    return names


def signal_group(child: subprocess.Popen[bytes], number: int, seconds: float) -> bool:
    """Send the signal; return whether a process is left after `seconds`."""
    deadline = time.monotonic() + seconds
    escaped: set[int] = set()  # processes outside the group that got the signal
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
    while is_alive(child):
        for pid in set(descendants()) - escaped:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) != child.pid:
                    os.kill(pid, number)
                    escaped.add(pid)
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def is_alive(child: subprocess.Popen[bytes]) -> bool:
    """Return whether a process is left; reap dead processes."""
    if child.poll() is not None:  # not earlier: Popen must reap the child itself to get its status
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return bool(descendants())
    return True


def descendants() -> list[int]:
    """Return the processes that the guard's children started, and the children; none without Linux's /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):  # not a process, or it has ended
            with open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as stat:
                children.setdefault(int(stat.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found = [os.getpid()]
    for pid in found:  # grows
        found += children.get(pid, [])
    return found[1:]


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
        print(f"{command[0]}: failed to start ({error.strerror})", file=sys.stderr)
        return 127
    finally:
        if "--scratch" in options:
            shutil.rmtree(options["--scratch"], ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
