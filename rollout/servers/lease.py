"""The trainer's side of the lease on a server: who it is, and the error when another trainer holds the lease.

    owner = Owner.here(run="c0ffee12", folder="runs/a")
    owner.tag(12) -> "c0ffee12:12"        # marks tokens and workers; a step number alone would be ambiguous

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

from data.errors import UserError

LEASE = "/strop/lease"
SESSION = "Strop-Session"  # header with the session of a request
RENEW_S = 15.0  # the lease lasts 60 s: three renewals may be lost
RENEW_LIMIT_S = 10.0  # for one answer


class LeaseError(UserError):
    """Another trainer has the server: this one must stop."""


@dataclass(frozen=True)
class Owner:
    """A trainer, as the server and other trainers see it."""

    run: str  # random id of the run, the same after --resume
    folder: str
    session: str  # random id of this process
    host: str
    pid: int
    user: str

    @classmethod
    def here(cls, run: str | None = None, folder: str = "") -> Owner:
        """This process; without a run id, as a new run."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
        return cls(run or secrets.token_hex(8), folder, secrets.token_hex(16), socket.gethostname(), os.getpid(), user)

    def tag(self, version: int) -> str:
        return f"{self.run}:{version}"

    def ask(self, action: str) -> bytes:
        return json.dumps(asdict(self) | {"action": action}).encode()


def refusal(url: str, reply: bytes, run: str) -> LeaseError | None:
    """The error for a trainer of `run` that was refused; None if the reply is not that of the lease."""
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
