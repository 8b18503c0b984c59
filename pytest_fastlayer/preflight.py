"""What cannot be read or written is said before minutes are spent on measuring."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from pytest_fastlayer.options import Settings
from pytest_fastlayer.stored import Stored


class PreflightError(ValueError):
    """What was asked for cannot come out well. The message names the option and what to do."""


def check_outputs(settings: Settings) -> None:
    """Whether every file that the run is to write can be written.

    Raises:
        PreflightError: one cannot; or two would be one file, or HTML lacks what it needs.
    """
    taken: dict[Path, str] = {}
    for name in ("json", "markdown", "html"):
        path: Path | None = getattr(settings, name)
        if path is None:
            continue
        flag = f"--fastlayer-{name}={path}"
        _check_name(flag, path)
        if path.is_dir():
            raise PreflightError(f"{flag}: expected a file, got a folder")
        _check_folder(flag, path.parent)
        if path.exists() and not os.access(path, os.W_OK):
            raise PreflightError(f"{flag}: the file cannot be written")
        other = taken.setdefault(path.resolve(), name)
        if other != name:
            raise PreflightError(
                f"{flag}: --fastlayer-{other} writes to the same file; give each its own"
            )
    if settings.html is not None:
        from pytest_fastlayer.report import html

        try:
            html.check_dependencies()
        except html.ReportDependencyError as error:
            raise PreflightError(f"--fastlayer-html={settings.html}: {error}") from None
    if settings.trace is not None:
        flag = f"--fastlayer-trace={settings.trace}"
        _check_name(flag, settings.trace)
        _check_folder(flag, settings.trace)
    if settings.update_baseline:
        path = settings.baseline
        _check_name(f"--fastlayer-baseline={path}", path)
        is_file = path.is_file() or (path.suffix == ".json" and not path.is_dir())
        flag = f"--fastlayer-update-baseline, --fastlayer-baseline={path}"
        _check_folder(flag, path.parent if is_file else path)


def _check_name(flag: str, path: Path) -> None:
    """Can the system look ``path`` up? Not a name it cannot hold, nor a ring of symbolic links.

    Each name that does not exist yet is tried in the nearest folder that does: below another
    missing one, the system would not come to it.
    """
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    missing = path.relative_to(there).parts
    try:
        for one in (path, *(there / name for name in missing)):
            with suppress(FileNotFoundError, NotADirectoryError):
                one.stat()
    except OSError as error:
        raise PreflightError(f"{flag}: {error.strerror}; give another name") from None


def _check_folder(flag: str, folder: Path) -> None:
    """Can files be written to ``folder``, which is made if it does not exist?

    Nothing is left behind: the nearest folder that exists is tried.
    """
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        wrong = f"{there} is not a folder" if not there.is_dir() else f"{there}: {error.strerror}"
        raise PreflightError(
            f"{flag}: files cannot be written there: {wrong}; give another place"
        ) from None


def check_baseline(settings: Settings, stored: Stored) -> None:
    """Whether what the run is to be held against is there, can be read and is this device's.

    Torch, which says what devices there are, is asked only where something is stored or has to be.

    Raises:
        PreflightError: it is not.
    """
    from pytest_fastlayer.baselines import BaselineError

    given = settings.baseline
    _check_name(f"--fastlayer-baseline={given}", given)
    if settings.baseline_given and not settings.update_baseline and not given.exists():
        raise PreflightError(
            f"--fastlayer-baseline={given}: it does not exist; give a record or a folder of "
            "<device>.json files, or create it with --fastlayer-update-baseline"
        )
    if not (settings.require_baseline or given.exists()):
        return
    from pytest_fastlayer.environment import possible_devices

    try:
        stored.check(possible_devices(settings.device))
    except BaselineError as error:
        raise PreflightError(str(error)) from None
