"""From a file to a valid record, or to an error that names the file and the place in it.

Whatever a file holds, nothing of it is executed and at most ``MAX_BYTES`` of it are read.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pytest_fastlayer.records import SCHEMA_VERSION, RunRecord, Timing
from pytest_fastlayer.runner_commands import defuse

#: Largest file that is read at all. A run of 200 cases with 1,000 pairs each takes about 5 MB.
MAX_BYTES = 16 * 2**20
#: Deepest nesting accepted; the schema itself needs 7 levels, workloads may add their own.
MAX_DEPTH = 32
#: A disagreement by this factor is an error of unit, which is one of 1000, not of measurement.
_UNIT_ERROR = 300.0
#: Errors shown for one file; the rest are counted.
MAX_ERRORS = 5

Migration = Callable[[dict[str, Any]], dict[str, Any]]
#: From version N to N + 1, on the parsed JSON. Version 1 is the first, so there is none yet; the
#: first change of schema adds its row here together with a stored file of the old version.
MIGRATIONS: Mapping[int, Migration] = {}


class BaselineError(ValueError):
    """A record cannot be read, merged or written. The message names file and place.

    It goes to a log that a CI runner reads, and quotes keys, values and names of files.
    """

    def __init__(self, message: str) -> None:
        super().__init__(defuse(message))


class BaselineNotFoundError(BaselineError):
    """There is no file at the given path."""


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
            f"{source}: $.schema_version: {shown(version)} is newer than {SCHEMA_VERSION}, the "
            f"newest that this version reads; pip install {package}"
        )
    for step in range(version, SCHEMA_VERSION):
        if step not in MIGRATIONS:
            raise BaselineError(
                f"{source}: $.schema_version: no way to read version {shown(version)}; the oldest "
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
    # In logarithms, where no two positive floats overflow.
    quotient = math.log(timing.reference_s) - math.log(timing.candidate_s)
    if abs(math.log(timing.speedup) - quotient) >= math.log(_UNIT_ERROR):
        yield (
            "speedup",
            f"{timing.speedup:g} does not agree with reference_s / candidate_s = "
            f"{timing.reference_s:g} / {timing.candidate_s:g}; are both in seconds?",
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
