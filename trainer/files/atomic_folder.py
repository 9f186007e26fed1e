"""Atomic folders: written next to their target, synced to disk, then renamed, so that they are complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from data.errors import UserError

TMP = ".tmp-"  # prefix of unfinished files and folders, which a crash may leave


@contextmanager
def atomic_folder(target: Path, what: str) -> Iterator[Path]:
    """Context manager: yield a folder to write to; on exit it is synced to disk and replaces `target`.

    If writing fails, `target` is unchanged and the new folder is removed.
    """
    tmp = target.with_name(f"{TMP}{target.name}-{os.getpid()}")
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        yield tmp
        for path in sorted(tmp.rglob("*"), reverse=True):  # the contents of a folder before the folder
            if path.is_file():  # safetensors files are readable only by the owner; the folder follows the umask
                path.chmod(tmp.stat().st_mode & 0o666)
            sync(path)
        sync(tmp)
        remove_folder(target)
        tmp.rename(target)
        sync(target.parent)
    except BaseException as error:
        shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise UserError(could_not_write(what, target, reason_of(error))) from None
        raise


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def could_not_write(what: str, target: Path, reason: str) -> str:
    return (
        f"{what}={target}: could not be written ({reason}); free disk space or fix the permissions, then use --resume "
        "(earlier checkpoints are unchanged)"
    )


def remove_folder(folder: Path) -> None:
    """Delete a folder if it exists, after renaming it, so that a crash never leaves half of it under its name."""
    if folder.is_symlink():  # not what it points to
        folder.unlink()
    elif folder.exists():
        doomed = folder.with_name(f"{TMP}{folder.name}-{os.getpid()}-removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Delete unfinished writes in `parent`. Only for the process that owns the run folder."""
    for path in parent.glob(f"{TMP}*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync(path: Path) -> None:
    """fsync a file or a folder; only then is a new file or a rename safe on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
