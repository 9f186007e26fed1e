"""Who trains on a server: what a trainer says of itself to take the lease, and what is said to one that is refused.

    owner = Owner.here(run="c0ffee12", folder="runs/a")
    owner.tag(12) -> "c0ffee12:12"        # what tokens and workers are marked with: a step number alone is no name

The server's side is rollout/servers/worker/strop_lease.py.
"""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

LEASE = "/strop/lease"
SESSION = "Strop-Session"  # the header by which a request names its session
RENEW_S = 15.0  # the lease lasts 60 s: three renewals may be lost
RENEW_LIMIT_S = 10.0  # for one answer


class LeaseError(ValueError):
    """Another trainer has the server: this one must not go on."""


@dataclass(frozen=True)
class Owner:
    """A trainer, as the server and other trainers know it."""

    run: str  # random, made once per run: --resume has the same
    folder: str
    session: str  # random, of this process
    host: str
    pid: int
    user: str

    @classmethod
    def here(cls, run: str | None = None, folder: str = "") -> Owner:
        """This process. Without the id of a run, a run of its own."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user need not have a name
            user = str(os.getuid())
        return cls(run or secrets.token_hex(8), folder, secrets.token_hex(16), socket.gethostname(), os.getpid(), user)

    def tag(self, version: int) -> str:
        return f"{self.run}:{version}"

    def ask(self, action: str) -> bytes:
        return json.dumps(asdict(self) | {"action": action}).encode()


def refusal(url: str, reply: bytes, run: str) -> LeaseError | None:
    """What to say to the trainer of `run` that was refused; None for a reply that is not the lease's."""
    try:
        lease = json.loads(reply)
        holder, left = lease["holder"], float(lease["expires_in"])
        return _error(url, holder, left, run) if holder is not None else None
    except (KeyError, TypeError, ValueError):
        return None


def _error(url: str, holder: dict[str, Any], left: float, run: str) -> LeaseError:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since"]))
    who = f"{holder['folder'] or 'a run'} (host {holder['host']}, pid {holder['pid']}, user {holder['user']})"
    if holder["run"] == run:
        return LeaseError(
            f"vllm.url={url}: this run was resumed elsewhere ({who}, since {since}), so this process stops"
        )
    if left == 0:
        return LeaseError(
            f"vllm.url={url}: {who} trained on it from {since} on, after this run had been silent for a minute, "
            "and left its own weights there; continue with --resume"
        )
    return LeaseError(
        f"vllm.url={url}: {who} has been training on it since {since}; wait until it ends (if it was killed, the "
        f"server is free in {left:.0f} s), or start a server of your own with python -m rollout.serve"
    )
