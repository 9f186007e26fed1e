"""Hosts on one machine: network namespaces on a bridge, each with a name, an address and a loopback of its own.

    with hosts(2) as (a, b):
        a.start("torchrun", "--rdzv-endpoint", f"{a.address}:29500", ...)
        b.disappear()

The hosts share files and processors. The bridge has a namespace too, so the machine's own network does not change.
Needs root and the commands ip, unshare and hostname.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.entry import environment

LINK = "link0"  # name of the network interface in each host


def problem() -> str | None:
    """Return why this machine cannot have hosts, or None."""
    missing = [command for command in ("ip", "unshare", "hostname") if shutil.which(command) is None]
    if missing or os.geteuid() != 0:
        return f"needs {missing[0]}" if missing else "needs root"
    name = f"strop-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode == 0:
        _ip("netns", "delete", name)
    return done.stderr.strip() or None


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    """A host of `hosts`."""

    name: str
    address: str
    namespace: str

    def command(self, *words: Any) -> list[str]:
        """Return the command that runs `words` on this host."""
        rename = f'hostname {self.name} && exec "$@"'  # c10d's rendezvous compares host names
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", rename, "sh", *map(str, words)]

    def start(self, *words: Any, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start a command; its output is appended to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.command(*words), cwd=log.parent, env=environment() | {"GLOO_SOCKET_IFNAME": LINK} | env,
                stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank on this host."""
        found = {}
        for pid in map(int, _ip("netns", "pids", self.namespace).split()):
            with contextlib.suppress(OSError):  # the process has ended
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(word.removeprefix(b"RANK=")): pid for word in words if word.startswith(b"RANK=")}
        return found

    def kill(self) -> None:
        """Kill every process of this host."""
        while pids := _ip("netns", "pids", self.namespace).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def disappear(self) -> None:
        """Lose power: the link goes down first, so that no other host receives the end of a connection."""
        _ip("-n", self.namespace, "link", "set", LINK, "down")
        self.kill()

    def connect(self) -> None:
        for link in (LINK, "lo"):
            _ip("-n", self.namespace, "link", "set", link, "up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Context manager: `count` hosts that reach each other by name and by address, and nothing else."""
    prefix = f"strop-{os.getpid()}"
    switch = f"{prefix}-switch"
    made = [Host(f"node{i}", f"10.77.0.{i + 1}", f"{prefix}-node{i}") for i in range(count)]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for host in made:
            folder = Path("/etc/netns", host.namespace)  # `ip netns exec` mounts its files over those of /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(names)
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "add", LINK, "type", "veth", "peer", "name", host.name, "netns", switch)
            _ip("-n", switch, "link", "set", host.name, "master", "bridge0", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", LINK)
            host.connect()
        yield made
    finally:
        existing = {line.split()[0] for line in _ip("netns", "list").splitlines()}
        for host in made:
            if host.namespace in existing:
                host.kill()
                _ip("netns", "delete", host.namespace)
            shutil.rmtree(Path("/etc/netns", host.namespace), ignore_errors=True)
        if switch in existing:
            _ip("netns", "delete", switch)
