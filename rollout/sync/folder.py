"""The folder that weights are written to: where it is, whose it is, and what happens when it is full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/dev/shm")
LOCK = "owner.lock"


class WeightFolder:
    """A folder of our own inside `parent`, deleted in the end, and by the next run if this one is killed.

    A lock on a file in it tells whether its run lives; a killed process loses the lock.
    """

    def __init__(self, parent: str | None, prefix: str, *, need_bytes: int = 0) -> None:
        if parent is not None:
            root = Path(parent).expanduser()
            try:
                root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"sync.folder={parent}: cannot be made ({error.strerror}); name another") from None
        else:
            root = roomy(need_bytes)
        sweep(root, prefix)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root)).resolve()
            self._lock = (self.path / LOCK).open("w")
        except OSError as error:
            raise ValueError(f"sync.folder={root}: cannot be written to ({error.strerror}); name another") from None
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end = weakref.finalize(self, delete, self.path, os.getpid())  # also when the interpreter ends

    @contextlib.contextmanager
    def full_disk_is_a_sentence(self, partial: Path) -> Iterator[None]:
        """Whatever goes wrong inside, `partial` is gone; a full disk is a ValueError that says so."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_full(error):
                raise ValueError(
                    f"sync.folder={self.path}: no room for the weights; free some, or name another by --sync.folder"
                ) from None
            raise

    def close(self) -> None:
        self._end()
        self._lock.close()


def delete(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process that ends is not the run
        shutil.rmtree(path, ignore_errors=True)


def roomy(need_bytes: int) -> Path:
    """Main memory if it has room for what is asked, with some to spare; else the folder for temporary files."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1.2 * need_bytes:
        return MEMORY
    return Path(tempfile.gettempdir())


def sweep(root: Path, prefix: str) -> None:
    """Delete folders of ours whose run was killed."""
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or another run is deleting it
            if path.stat().st_uid == os.getuid():
                _delete_if_free(path)


def _delete_if_free(path: Path) -> None:
    with (path / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while its run lives
        shutil.rmtree(path)


def is_full(error: BaseException) -> bool:
    """Out of room, also where a library says it in its own words."""
    return (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or "os error 28" in str(error)


def fsync_folder(folder: Path) -> None:
    """Every file of the folder and the folder itself are on disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
