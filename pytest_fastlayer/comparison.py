"""What a comparison of outputs showed, as plain data: tolerance, counts, worst element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_fastlayer import records


@dataclass(frozen=True)
class Tolerance:
    """Per-element rule. ``either``: |c-r| <= atol OR |c-r| <= rtol*|r|; ``sum``: their sum.

    Raises ValueError for a negative, NaN or infinite tolerance and for an unknown mode.
    """

    atol: float = 0.002
    rtol: float = 0.02
    mode: Literal["either", "sum"] = "either"

    def __post_init__(self) -> None:
        for name in ("atol", "rtol"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: expected a finite number, zero or more")
        if self.mode not in ("either", "sum"):
            raise ValueError(f'mode is {self.mode!r}: expected "either" or "sum"')

    @property
    def rule(self) -> str:
        """The rule in the notation of the messages."""
        if self.mode == "sum":
            return f"|c-r| <= {self.atol:g} + {self.rtol:g}*|r|"
        return f"|c-r| <= {self.atol:g} OR |c-r| <= {self.rtol:g}*|r|"

    def allowed(self, reference: complex) -> float:
        """The largest difference accepted beside this reference value."""
        scaled = self.rtol * abs(reference)
        return self.atol + scaled if self.mode == "sum" else max(self.atol, scaled)

    def record(self) -> records.ToleranceRecord:
        return records.ToleranceRecord(atol=self.atol, rtol=self.rtol, mode=self.mode)


@dataclass(frozen=True)
class Element:
    """One element of an output, as both arms gave it."""

    path: str
    index: tuple[int, ...]
    candidate: complex
    reference: complex
    exact: bool = False  #: integer or boolean: any difference fails
    seed: int | None = None
    truth: complex | None = None  #: the float64 evaluation of the reference, where there was one

    @property
    def name(self) -> str:
        """``output[0][3, 17]``: the expression that reaches this element."""
        return self.path + (f"[{', '.join(map(str, self.index))}]" if self.index else "")

    @property
    def difference(self) -> float:
        return abs(complex(self.candidate) - complex(self.reference))


@dataclass(frozen=True)
class FailingColumns:
    """Failures of one leaf by position in its last dimension (the feature columns)."""

    path: str
    width: int
    counts: tuple[tuple[int, int], ...]  #: (column, failures), by column


@dataclass(frozen=True)
class Comparison:
    """What comparing one or more outputs showed.

    ``nonfinite`` counts the candidate's NaN and inf where the reference is not the same value;
    they are among the ``failed``. ``max_abs`` and ``budget_used`` are over the pairs finite in
    both arms, None where there was none. ``mismatches`` are differences of structure, shape,
    dtype or device; such a leaf counts as wholly failed.
    """

    tolerance: Tolerance
    total: int = 0
    failed: int = 0
    nonfinite: int = 0
    compared: int = 0
    max_abs: float | None = None
    budget_used: float | None = None
    squared_error: float = 0.0
    worst: Element | None = None
    first_nonfinite: Element | None = None
    candidate_nan: int = 0
    candidate_inf: int = 0
    reference_nan: int = 0
    reference_inf: int = 0
    columns: tuple[FailingColumns, ...] = ()
    mismatches: tuple[str, ...] = ()
    failed_seeds: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """No element failed, and there was at least one: empty outputs prove nothing."""
        return self.failed == 0 and not self.mismatches and self.total > 0

    @property
    def rms(self) -> float | None:
        """Root-mean-square difference over the pairs finite in both arms."""
        return math.sqrt(self.squared_error / self.compared) if self.compared else None

    def merge(self, other: Comparison) -> Comparison:
        """Both together; the worst element is the worse of the two.

        Raises ValueError if their tolerances differ: the shares would not compare.
        """
        if self.tolerance != other.tolerance:
            raise ValueError(
                f"cannot merge comparisons under {self.tolerance} and {other.tolerance}: "
                "compare both under one tolerance"
            )
        mine, theirs = self.budget_used, other.budget_used
        worse = self if theirs is None or (mine is not None and mine >= theirs) else other
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in (
                "total",
                "failed",
                "nonfinite",
                "compared",
                "squared_error",
                "candidate_nan",
                "candidate_inf",
                "reference_nan",
                "reference_inf",
                "mismatches",
                "failed_seeds",
            )
        }
        return Comparison(
            tolerance=self.tolerance,
            max_abs=_larger(self.max_abs, other.max_abs),
            budget_used=_larger(mine, theirs),
            worst=worse.worst,
            first_nonfinite=self.first_nonfinite or other.first_nonfinite,
            columns=_merge_columns((*self.columns, *other.columns)),
            **sums,
        )


def _larger(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


def _merge_columns(columns: Sequence[FailingColumns]) -> tuple[FailingColumns, ...]:
    merged: dict[tuple[str, int], dict[int, int]] = {}
    for one in columns:
        counts = merged.setdefault((one.path, one.width), {})
        for column, failures in one.counts:
            counts[column] = counts.get(column, 0) + failures
    return tuple(
        FailingColumns(path, width, tuple(sorted(counts.items())))
        for (path, width), counts in merged.items()
    )
