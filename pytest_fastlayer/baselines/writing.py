"""Where a device's baseline lies, and how it is replaced without ever being half there."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_fastlayer.baselines.reading import BaselineError, load
from pytest_fastlayer.records import Device, RunRecord

#: A temporary file older than this was left by a process that was killed in mid-write.
STALE_SECONDS = 3600.0


def find(where: str | os.PathLike[str], device: Device) -> Path:
    """Baseline file for ``device``: ``where`` itself, or ``<where>/<device slug>.json``.

    A path that does not exist is taken for a file when its name ends in ``.json``.
    """
    path = Path(where)
    if path.is_dir() or (not path.exists() and path.suffix != ".json"):
        return path / f"{device.slug}.json"
    return path


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold this while reading, merging and saving one file, so that no other update is lost.

    The lock is a file in the user's own temporary folder, not beside the baseline, where it would
    be committed by mistake.
    """
    from filelock import FileLock

    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"pytest-fastlayer-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    with FileLock(folder / f"baseline-{digest[:32]}.lock"):
        yield


def save(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Replace ``path`` by ``record``, or leave it as it was.

    Written to a temporary file beside the target, flushed to the disk, read back and renamed over
    it, so that an interruption at any point (a kill, a full disk) leaves the old file whole. A
    symbolic link is followed and kept.

    Raises:
        BaselineError: the file cannot be written, with the system's reason.
    """
    target = Path(os.path.realpath(path))
    text = record.to_json()
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=_prefix(target), suffix=".tmp")
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _check_written(temporary, record, path)
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
        temporary = None
        _sync_directory(target.parent)
    except OSError as error:
        full = " (disk full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise BaselineError(
            f"{path}: not written{full}: {error}; the old file, if any, is unchanged"
        ) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def _check_written(temporary: Path, record: RunRecord, path: str | os.PathLike[str]) -> None:
    """The old file may only go once the new one reads back as the record it was made from."""
    try:
        same = load(temporary) == record
    except BaselineError as error:
        raise BaselineError(f"{path}: not written: it would not read back: {error}") from None
    if not same:
        raise BaselineError(f"{path}: not written: it would read back as another record")


def _prefix(target: Path) -> str:
    return f".{target.name[:100]}."


def _remove_stale(target: Path) -> None:
    """Remove what a killed process left behind; a live one's file is younger."""
    limit = time.time() - STALE_SECONDS
    for path in target.parent.iterdir():
        if path.name.startswith(_prefix(target)) and path.name.endswith(".tmp"):
            with suppress(OSError):
                if path.lstat().st_mtime < limit:
                    path.unlink()


def _mode(target: Path) -> int:
    """Permissions of the file replaced, or what the umask gives a new one (mkstemp gives 0600)."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _sync_directory(directory: Path) -> None:
    """Make the rename durable where the platform can open a directory."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
