"""Token files of servers started on this machine. A trainer of the same user finds them by address.

    file = TokenFile("127.0.0.1", 8000, "secret")     # $XDG_RUNTIME_DIR/strop/127.0.0.1:8000, mode 0600
    find_token("http://localhost:8000") -> "secret"
    file.close()                                      # deletes the file

A trainer on another machine gets the token from STROP_VLLM_TOKEN, which overrides a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from data.errors import UserError
from rollout.servers.command import TOKEN
from rollout.servers.options import LOOPBACK

ANY = ("0.0.0.0", "::")  # hosts of a server that listens on all addresses


class TokenFile:
    """A file with one server's token, readable only by its user, while the process that started the server lives."""

    def __init__(self, host: str, port: int, token: str) -> None:
        folder = folders()[0]
        for _ in range(10):  # another process may delete the empty folder in between
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700)
            if not is_private(folder):
                raise UserError(
                    f"{folder}: not a private folder of this user, so it cannot store a server's token; delete it, or "
                    "set XDG_RUNTIME_DIR to a folder with mode 0700"
                )
            sweep(folder)
            self.path = folder / f"{host}:{port}"
            with contextlib.suppress(FileNotFoundError):
                handle, new = tempfile.mkstemp(prefix="new-", dir=folder)  # mode 0600
                break
        else:
            raise UserError(f"{folder}: not writable; set XDG_RUNTIME_DIR to a writable folder")
        self._file = os.fdopen(handle, "w")
        # The lock shows that the owner is alive. A killed owner loses it, and the next start deletes the file.
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.write(token)
        self._file.flush()
        os.replace(new, self.path)  # never visible unlocked; replaces a killed server's file

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._file.closed:
            return
        self.path.unlink(missing_ok=True)
        self._file.close()
        sweep(self.path.parent)
        with contextlib.suppress(OSError):  # the folder contains other tokens
            self.path.parent.rmdir()


def find_token(url: str) -> str | None:
    """Return the token for this address: STROP_VLLM_TOKEN, or the file of a server started here by this user."""
    if token := os.environ.get(TOKEN):
        return token
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    hosts = [host]
    if host == "localhost":
        hosts += ["127.0.0.1", "::1"]
    if host in LOOPBACK or host == socket.gethostname().lower():  # never send the token to another machine
        hosts += ANY
    for folder in folders():
        for name in hosts if is_private(folder) else ():
            path = folder / f"{name}:{port}"
            try:
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                continue
            with os.fdopen(handle) as file:
                if os.fstat(handle).st_uid == os.getuid():
                    return file.read().strip() or None
    return None


def folders() -> list[Path]:
    """Return the folders that may contain tokens; new files go to the first. A session without XDG_RUNTIME_DIR (cron,
    ssh with a command) also searches the default folder of a session that has it.
    """
    user = os.getuid()
    runtime = [Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}"), Path(f"/run/user/{user}")]
    temporary = [Path(tempfile.gettempdir()), Path("/tmp")]
    private = [root / "strop" for root in runtime if is_private(root)]
    return list(dict.fromkeys([*private, *(root / f"strop-{user}" for root in temporary)]))


def is_private(path: Path) -> bool:
    """Return whether `path` is a folder of this user (not a link) that others can neither read nor enter."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def sweep(folder: Path) -> None:
    """Delete token files whose owner was killed."""
    for path in folder.glob("*:*"):
        with contextlib.suppress(OSError), path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while the owner is alive
            path.unlink()
