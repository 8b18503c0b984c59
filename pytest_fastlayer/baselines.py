"""Baseline files: read with every check, merge without losing a case, replace atomically.

A baseline is a run record that was accepted, so one reader serves both. Whatever a file holds,
``load`` either returns a valid record or raises ``BaselineError`` with the file and the place in
it; it executes nothing and reads at most ``MAX_BYTES``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pytest_fastlayer.records import (
    GREEN,
    NOTICE,
    SCHEMA_VERSION,
    CaseRecord,
    Device,
    RunRecord,
    Timing,
    Verdict,
)

#: Largest file that is read at all. A run of 200 cases with 1,000 pairs each takes about 5 MB.
MAX_BYTES = 16 * 2**20
#: Deepest nesting accepted; the schema itself needs 7 levels, workloads may add their own.
MAX_DEPTH = 32
#: A disagreement by this factor is an error of unit, which is one of 1000, not of measurement.
_UNIT_ERROR = 300.0
#: Errors shown for one file; the rest are counted.
MAX_ERRORS = 5
#: A temporary file older than this was left by a process that was killed in mid-write.
STALE_SECONDS = 3600.0

#: Verdicts that ``--fastlayer-accept`` may store: the candidate is right, its figure is worse.
ACCEPTABLE = frozenset(
    {
        Verdict.SLOWER,
        Verdict.BELOW_FLOOR,
        Verdict.MORE_MEMORY,
        Verdict.INCONCLUSIVE,
        Verdict.STALE_BASELINE,
    }
)
#: Verdicts about the *comparison*; once stored, the entry stands on its own.
_ABOUT_COMPARISON = NOTICE | {Verdict.FASTER}

Migration = Callable[[dict[str, Any]], dict[str, Any]]
#: From version N to N + 1, on the parsed JSON. Version 1 is the first, so there is none yet; the
#: first change of schema adds its row here together with a stored file of the old version.
MIGRATIONS: Mapping[int, Migration] = {}


class BaselineError(ValueError):
    """A record cannot be read, merged or written. The message names file and place."""


class BaselineNotFoundError(BaselineError):
    """There is no file at the given path."""


# --------------------------------------------------------------------------------------------------
# Reading


def load(path: str | os.PathLike[str]) -> RunRecord:
    """Read and validate a run record or baseline.

    Args:
        path: a JSON file of any schema version up to ``records.SCHEMA_VERSION``.

    Raises:
        BaselineNotFoundError: no such file.
        BaselineError: anything else: not a regular file, larger than ``MAX_BYTES``, not UTF-8,
            not JSON, nested deeper than ``MAX_DEPTH``, another tool's file, a newer schema, or
            values that the schema refuses. The message names file and JSON path of each entry.
    """
    return parse(_read(Path(path)), source=str(path))


def parse(text: str, *, source: str) -> RunRecord:
    """Validate the text of a record; ``source`` names it in errors. Raises as ``load`` does."""
    data = _parse_json(text, source)
    _check_tree(data, source)
    data = _migrate(data, source)
    try:
        # Strict JSON mode: "2.7" and true are not numbers, but lists are tuples.
        record = RunRecord.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise BaselineError(_describe(error, source)) from None
    _check_plausible(record, source)
    return record


def _read(path: Path) -> str:
    try:
        # Non-blocking, so that opening a named pipe cannot hang.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise BaselineNotFoundError(
            f"{path}: no such file. A run writes one with --fastlayer-json, and a baseline with "
            "--fastlayer-update-baseline."
        ) from None
    except (OSError, ValueError) as error:
        raise BaselineError(f"{path}: cannot be read: {error}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise BaselineError(f"{path}: expected a JSON file, this is not a regular file")
    with os.fdopen(handle, "rb") as file:
        raw = b"" if status.st_size > MAX_BYTES else file.read(MAX_BYTES + 1)
    size = max(status.st_size, len(raw))
    if size > MAX_BYTES:
        raise BaselineError(
            f"{path}: {size / 2**20:.0f} MiB is larger than the {MAX_BYTES // 2**20} MiB that a "
            "record may have; is this the right file?"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: not UTF-8 text (byte {error.start}); expected JSON") from None


def _parse_json(text: str, source: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = min(key for key, times in Counter(k for k, _ in pairs).items() if times > 1)
            raise BaselineError(f"{source}: key {shown(twice)} occurs twice in one object")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        hint = ""
        if not text.strip():
            hint = "; the file is empty"
        elif error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
            hint = "; the file seems truncated"
        elif "<<<<<<<" in text:
            hint = "; the file holds a merge conflict"
        elif text.startswith("version https://git-lfs"):
            hint = "; this is a Git LFS pointer, fetch the file itself"
        raise BaselineError(
            f"{source}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}{hint}"
        ) from None
    except RecursionError:
        raise BaselineError(f"{source}: nested deeper than {MAX_DEPTH} levels") from None
    except BaselineError:
        raise
    except ValueError as error:  # an integer beyond Python's limit of digits
        raise BaselineError(f"{source}: not valid JSON: {error}") from None


#: Where a value sits: None at the root, else (place of the parent, key).
Place = tuple["Place", str | int] | None


def _check_tree(value: Any, source: str, place: Place = None, depth: int = 0) -> None:
    """Refuse deep nesting and non-finite numbers anywhere, free-form workloads included."""
    problem = ""
    if depth > MAX_DEPTH:
        problem = f"nested deeper than {MAX_DEPTH} levels"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"{value} is not a finite number"
    elif isinstance(value, str) and not _encodable(value):
        problem = f"unpaired surrogate in {shown(value)}"
    if problem:
        raise BaselineError(f"{source}: {_path(place)}: {problem}")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_tree(key, source, (place, key), depth)
            _check_tree(item, source, (place, key), depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_tree(item, source, (place, index), depth + 1)


def _path(place: Place) -> str:
    steps = []
    while place is not None:
        place, key = place
        steps.append(_step(key))
    return "$" + "".join(reversed(steps))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _step(key: str | int) -> str:
    """One step of a JSON path: ``.name``, ``['any text']`` or ``[3]``."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() and len(key) <= 40 else f"[{shown(key)}]"


def shown(value: object, limit: int = 60) -> str:
    """A foreign value for a message: escaped to ASCII and cut."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _migrate(data: Any, source: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BaselineError(f"{source}: $: expected a JSON object, got {type(data).__name__}")
    version = data.get("schema_version")
    if type(version) is not int:
        keys = ", ".join(shown(key, 24) for key in list(data)[:6]) or "none"
        raise BaselineError(
            f"{source}: $.schema_version: expected an integer, got {shown(version)}; this is not a "
            f"record of pytest-fastlayer (keys found: {keys})"
        )
    if version > SCHEMA_VERSION:
        software = data.get("software")
        writer = software.get("pytest_fastlayer") if isinstance(software, dict) else None
        known = isinstance(writer, str) and re.fullmatch(r"[0-9][0-9A-Za-z.+]{0,30}", writer)
        package = f"'pytest-fastlayer>={writer}'" if known else "--upgrade pytest-fastlayer"
        raise BaselineError(
            f"{source}: $.schema_version: {version} is newer than {SCHEMA_VERSION}, the newest "
            f"that this version reads; pip install {package}"
        )
    for step in range(version, SCHEMA_VERSION):
        if step not in MIGRATIONS:
            raise BaselineError(
                f"{source}: $.schema_version: no way to read version {version}; the oldest "
                f"readable version is {min(MIGRATIONS, default=SCHEMA_VERSION)}"
            )
        data = {**MIGRATIONS[step](data), "schema_version": step + 1}
    return dict(data)


def _describe(error: ValidationError, source: str) -> str:
    problems = error.errors(include_url=False)
    lines = []
    for problem in problems[:MAX_ERRORS]:
        place = "$" + "".join(_step(key) for key in problem["loc"])
        given = problem["input"]
        got = "" if isinstance(given, dict | list) else f", got {shown(given)}"
        hint = ""
        if problem["type"] == "extra_forbidden":
            hint = "; fields carry their unit in the name, such as reference_s or memory_mib"
        lines.append(f"{source}: {place}: {problem['msg']}{got}{hint}")
    if len(problems) > MAX_ERRORS:
        lines.append(f"{source}: and {len(problems) - MAX_ERRORS} more")
    return "\n".join(lines)


def _check_plausible(record: RunRecord, source: str) -> None:
    """Catch milliseconds among the seconds, which a schema of plain numbers lets through."""
    for name, case in record.cases.items():
        if case.timing is not None:
            for field, problem in _implausible(case.timing):
                place = f"$.cases{_step(name)}.timing.{field}"
                raise BaselineError(f"{source}: {place}: {problem}")


def _implausible(timing: Timing) -> Iterator[tuple[str, str]]:
    # Under drift (a factor of 60 within one run has been seen) a median of ratios is not the ratio
    # of medians, nor does a block keep its length.
    quotient = timing.reference_s / timing.candidate_s
    if not 1 / _UNIT_ERROR < timing.speedup / quotient < _UNIT_ERROR:
        yield (
            "speedup",
            f"{timing.speedup:g} does not agree with reference_s / candidate_s = {quotient:g}; "
            "are both in seconds?",
        )
    if timing.forwards_per_block is not None:
        block_s = timing.method.block_ms / 1e3
        for arm in ("reference", "candidate"):
            forwards = getattr(timing.forwards_per_block, arm)
            seconds = getattr(timing, f"{arm}_s")
            if forwards > 1 and forwards * seconds > _UNIT_ERROR * block_s:
                yield (
                    f"{arm}_s",
                    f"{forwards} forwards of {seconds:g} s cannot fill a block of "
                    f"{timing.method.block_ms:g} ms; is this figure in milliseconds?",
                )


# --------------------------------------------------------------------------------------------------
# Finding and writing


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


# --------------------------------------------------------------------------------------------------
# Merging


@dataclass(frozen=True)
class Merge:
    """Outcome of merging a run into a baseline. Names are case names, in the run's order.

    ``record`` is what the file shall hold: with anything ``refused``, the old cases alone.
    ``unused`` are stored cases that the run no longer has; they are dropped from ``record``.
    """

    record: RunRecord
    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def summary(self) -> str:
        """``12 new, 1 changed, 0 unchanged, 0 unused, 0 refused``."""
        kinds = ("new", "changed", "unchanged", "unused", "refused")
        return ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in kinds)


def merge(
    old: RunRecord | None,
    run: RunRecord,
    *,
    accept: Collection[str] = frozenset(),
    selected_all: bool,
) -> Merge:
    """Merge a judged run into a baseline, all or nothing.

    Args:
        old: the stored baseline, ``None`` for a first one.
        run: a run whose every case has its verdict.
        accept: names of cases whose worse figure is accepted. Incorrect, dishonest and
            unresolvable cases cannot be accepted.
        selected_all: the run covered every case that exists; only then are stored cases it lacks
            unused. A partial run cannot update a baseline of another provenance.

    A timed entry is never replaced by an untimed one (an accuracy-only run, a case that this
    machine could not finish): it counts as unchanged.

    Raises:
        BaselineError: another device's baseline, a name in ``accept`` that the run does not have,
            or a partial run over a baseline of another provenance.
    """
    unknown = sorted(set(accept) - set(run.cases))
    if unknown:
        raise BaselineError(
            f"accepted but not in this run: {', '.join(map(shown, unknown))}; the run has "
            f"{', '.join(map(shown, list(run.cases)[:20])) or 'no case'}"
        )
    if old is not None and not old.device.matches(run.device):
        raise BaselineError(
            f"the baseline was recorded on {shown(old.device.name)} and this run on "
            f"{shown(run.device.name)} (or its size differs); update a file of its own"
        )
    refused = tuple(name for name, case in run.cases.items() if not _storable(name, case, accept))
    if refused:
        return Merge(old or run.model_copy(update={"cases": {}}), refused=refused)

    stored = {} if old is None else dict(old.cases)
    missing = [name for name in stored if name not in run.cases]
    other_provenance = old is not None and old.provenance != run.provenance
    if old is not None and other_provenance and missing and not selected_all:
        raise BaselineError(
            f"the baseline is {old.provenance} and this run {run.provenance}, and one file must "
            f"not mix the two: run the {len(missing)} other stored cases as well, or update "
            "another file with --fastlayer-baseline"
        )
    names: dict[str, list[str]] = {kind: [] for kind in ("new", "changed", "unchanged", "unused")}
    cases = {} if selected_all else dict(stored)
    for name, case in run.cases.items():
        entry, before = _entry(case), stored.get(name)
        keeps_figure = before is not None and before.timing is not None and entry.timing is None
        if before is not None and keeps_figure and not other_provenance:
            entry = before
        kind = "new" if before is None else "unchanged" if entry == before else "changed"
        names[kind].append(name)
        cases[name] = entry
    names["unused" if selected_all else "unchanged"] += missing

    notes = run.notes
    if old is not None and not selected_all and missing:
        kept = f"{len(missing)} cases kept from {old.created}, commit {old.commit or 'unknown'}"
        notes = tuple(dict.fromkeys((*old.notes, *run.notes, kept)))
    record = run.model_copy(update={"cases": cases, "notes": notes})
    return Merge(record, **{kind: tuple(found) for kind, found in names.items()})


def _storable(name: str, case: CaseRecord, accept: Collection[str]) -> bool:
    accepted = name in accept and case.verdict in ACCEPTABLE
    return case.verdict in GREEN | NOTICE or accepted


def _entry(case: CaseRecord) -> CaseRecord:
    """The case as a baseline keeps it: no comparison with its predecessor, no per-pair trace."""
    timing = case.timing and case.timing.model_copy(update={"log_ratios": None})
    update: dict[str, Any] = {"timing": timing, "comparison": None}
    if case.verdict in _ABOUT_COMPARISON:
        settled = Verdict.ACCURATE if timing is None else Verdict.PASS
        update |= {"verdict": settled, "reason": ""}
    return case.model_copy(update=update)


def unused(baseline: RunRecord, known_names: Collection[str]) -> list[str]:
    """Stored cases that no longer exist, in the file's order."""
    return [name for name in baseline.cases if name not in known_names]
