"""The trainer's side of a server lease: the trainer's identity, and the error if another trainer holds the lease.

    owner = Owner.here(run="c0ffee12", folder="runs/a")
    owner.tag(12) -> "c0ffee12:12"        # tags tokens and workers; a version number alone would be ambiguous

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
SESSION = "Strop-Session"  # request header
RENEW_S = 15.0  # the lease lasts 60 s: three renewals may be lost
RENEW_LIMIT_S = 10.0  # timeout per renewal


class LeaseError(UserError):
    """Another trainer has the server, so this one must stop."""


@dataclass(frozen=True)
class Owner:
    """A trainer's identity, as shown to the server and other trainers."""

    run: str  # random run id, the same after --resume
    folder: str
    session: str  # random process id
    host: str
    pid: int
    user: str

    @classmethod
    def here(cls, run: str | None = None, folder: str = "") -> Owner:
        """Return this process's identity; without a run id, as a new run."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # in a container, the user may have no name
            user = str(os.getuid())
        return cls(run or secrets.token_hex(8), folder, secrets.token_hex(16), socket.gethostname(), os.getpid(), user)

    def tag(self, version: int) -> str:
        return f"{self.run}:{version}"

    def ask(self, action: str) -> bytes:
        return json.dumps(asdict(self) | {"action": action}).encode()


def refusal(url: str, reply: bytes, run: str) -> LeaseError | None:
    """Return the error for a rejected trainer of `run`; None if the reply does not come from a lease."""
    try:
        lease = json.loads(reply)
        holder, left = lease["holder"], float(lease["expires_in"])
        return _error(url, holder, left, run) if holder is not None else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def _error(url: str, holder: dict[str, Any], left: float, run: str) -> LeaseError:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since"]))
    other = f"{holder['folder'] or 'a run'} (host {holder['host']}, pid {holder['pid']}, user {holder['user']})"
    if holder["run"] == run:
        return LeaseError(f"vllm.url={url}: this run was resumed elsewhere ({other}, since {since}); stopping")
    if left == 0:
        return LeaseError(
            f"vllm.url={url}: this run did not renew its lease for a minute; {other} took the server at {since} and "
            "replaced its weights; continue with --resume"
        )
    return LeaseError(
        f"vllm.url={url}: {other} has been training on this server since {since}; wait until it ends (if it was "
        f"killed, the server is free in {left:.0f} s), or start another server with python -m rollout.serve"
    )
