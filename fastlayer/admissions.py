"""Admissions: which route and launch a device may use for a case, and the evidence for it.

The choice of a route is a measurement. A row admits one route of one case on one device at one
precision and points at the baseline that proves it; a refused row keeps a negative result with its
reason. ``pytest --fastlayer-bench --fastlayer-admit`` writes both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fastlayer.contract import Precision, RuntimeContract
from fastlayer.errors import AdmissionError

SCHEMA_VERSION = 1

#: The file that ships with the package.
COMMITTED = Path(__file__).with_name("admissions.json")

LaunchItems = Mapping[str, bool | int | float | str | None]


@dataclass(frozen=True)
class Admission:
    """One admitted (device, precision, case) with its route; ``evidence`` is ``file#case``."""

    device: str
    precision: Precision
    case: int
    route: str
    launch: LaunchItems
    evidence: str


@dataclass(frozen=True)
class Refusal:
    """One measured (device, precision, case, route, launch) that was not admitted, and why."""

    device: str
    precision: Precision
    case: int
    route: str
    launch: LaunchItems
    reason: str


@dataclass(frozen=True)
class Admissions:
    """An immutable set of rows; ``admit`` and ``refuse`` return new sets."""

    admitted: tuple[Admission, ...] = ()
    refused: tuple[Refusal, ...] = field(default=())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Admissions:
        """Reads a file.

        Raises:
            OSError: the file cannot be read.
            AdmissionError: it is not JSON of this schema.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls.from_dict(json.loads(text))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise AdmissionError(
                f"{os.fspath(path)}: given {type(error).__name__} ({error}); expected an object "
                'with "schema_version", "admitted" and "refused" rows. Write it anew with '
                "pytest --fastlayer-bench --fastlayer-admit."
            ) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Admissions:
        """The rows of parsed JSON.

        Raises:
            AdmissionError: another schema version, or two rows for one key.
            KeyError, TypeError: a row lacks a field or holds an unknown one.
        """
        version = data["schema_version"]
        if version != SCHEMA_VERSION:
            raise AdmissionError(
                f"schema_version: given {version!r}; expected {SCHEMA_VERSION}. Measure the "
                "admissions again with this version of fastlayer."
            )
        found = cls(
            admitted=tuple(
                Admission(**_choice(row, "evidence")) for row in _rows(data, "admitted")
            ),
            refused=tuple(Refusal(**_choice(row, "reason")) for row in _rows(data, "refused")),
        )
        keys = [(row.device, row.precision, row.case) for row in found.admitted]
        for key in keys:
            if keys.count(key) > 1:
                raise AdmissionError(
                    f"admitted: given two rows for {key}; expected one. Remove the slower."
                )
        return found

    def to_dict(self) -> dict[str, object]:
        """Plain JSON data, rows sorted so that files differ only where measurements do."""

        def plain(rows: Iterable[Admission | Refusal]) -> list[dict[str, object]]:
            return sorted((asdict(row) for row in rows), key=_order)

        return {
            "schema_version": SCHEMA_VERSION,
            "admitted": plain(self.admitted),
            "refused": plain(self.refused),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically: a temporary file beside it, then a rename."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)

    def admit(self, row: Admission) -> Admissions:
        """With ``row`` in place of any other row for its device, precision and case.

        Another choice that was admitted so far is kept as refused: it is a result too.
        """
        key = (row.device, row.precision, row.case)
        replaced = [r for r in self.admitted if (r.device, r.precision, r.case) == key]
        kept = [r for r in self.admitted if r not in replaced]
        given_up = [
            Refusal(*key, r.route, r.launch, f"admitted until another route was ({r.evidence})")
            for r in replaced
            if not _same_choice(r, row)
        ]
        refused = [r for r in self.refused if not _same_choice(r, row)]
        return Admissions((*kept, row), (*refused, *given_up))

    def refuse(self, row: Refusal) -> Admissions:
        """With ``row`` added; an admission of the very same choice is withdrawn."""
        kept = [r for r in self.admitted if not _same_choice(r, row)]
        others = [r for r in self.refused if not _same_choice(r, row)]
        return Admissions(tuple(kept), (*others, row))

    def lookup(self, contract: RuntimeContract) -> Admission | None:
        """The row for the contract's device, precision and disclosed case, or None."""
        case = contract.case
        for row in self.admitted:
            if (
                row.case == case
                and row.device == contract.device.name
                and row.precision == contract.precision
            ):
                return row
        return None

    def refusal(self, contract: RuntimeContract, route: str, launch: LaunchItems) -> Refusal | None:
        """The refused row for this very choice, or None."""
        for row in self.refused:
            if (
                row.case == contract.case
                and row.route == route
                and row.device == contract.device.name
                and row.precision == contract.precision
                and dict(row.launch) == dict(launch)
            ):
                return row
        return None


@cache
def committed() -> Admissions:
    """The admissions that ship with the package, read once."""
    return Admissions.load(COMMITTED)


def _rows(data: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    rows = data[name]
    if not isinstance(rows, list):
        raise AdmissionError(f"{name}: given {type(rows).__name__}; expected a list of rows.")
    return rows


def _choice(row: Mapping[str, object], last: str) -> dict[str, Any]:
    """The fields of one row, checked, with ``last`` as its closing text field."""
    precision, case, launch = row["precision"], row["case"], row["launch"]
    expected = {"device", "precision", "case", "route", "launch", last}
    if row.keys() != expected:
        raise AdmissionError(
            f"row: given the fields {sorted(row)}; expected {sorted(expected)}. Correct the row."
        )
    if not isinstance(precision, Mapping) or not isinstance(launch, Mapping):
        raise AdmissionError(
            f"precision, launch: given {precision!r} and {launch!r}; expected two objects, the "
            'first with "float32_matmul_precision" and "allow_tf32". Correct the row.'
        )
    if not isinstance(case, int):
        raise AdmissionError(f"case: given {case!r}; expected an integer. Correct the row.")
    texts = {name: str(row[name]) for name in ("device", "route", last)}
    return {**texts, "precision": Precision(**precision), "case": case, "launch": dict(launch)}


def _order(row: Mapping[str, object]) -> tuple[str, str, int, str, str]:
    return (
        str(row["device"]),
        json.dumps(row["precision"], sort_keys=True),
        int(str(row["case"])),
        str(row["route"]),
        json.dumps(row["launch"], sort_keys=True),
    )


def _same_choice(a: Admission | Refusal, b: Admission | Refusal) -> bool:
    return (a.device, a.precision, a.case, a.route, dict(a.launch)) == (
        b.device,
        b.precision,
        b.case,
        b.route,
        dict(b.launch),
    )
