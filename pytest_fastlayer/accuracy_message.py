"""The words of a failed comparison: what failed, how far, where, in which arm, how to replay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_fastlayer.comparison import Comparison, Element
from pytest_fastlayer.records import RootMeanSquare

#: Columns and mismatches named before "and N more".
SHOWN = 8


def explain(
    comparison: Comparison,
    *,
    seed: int | None = None,
    seeds: Sequence[int] = (),
    replay: str | None = None,
    rms: RootMeanSquare | None = None,
) -> str:
    """Several lines for a person: the first alone says what happened."""
    lines = [_headline(comparison)]
    lines += [f"  {text}" for text in _limited(comparison.mismatches)]
    lines += [f"  {text}" for text in _elements(comparison)]
    lines += [f"  {text}" for text in _columns(comparison)]
    lines += [f"  {text}" for text in _nonfinite(comparison)]
    if rms is not None:
        lines.append(
            f"  rms against float64: candidate {rms.candidate:.3g}, reference {rms.reference:.3g}"
        )
    if seed is None and comparison.failed_seeds:
        failing = ", ".join(_limited([str(s) for s in comparison.failed_seeds]))
        lines.append(f"  failing seeds: {failing} ({len(comparison.failed_seeds)} of {len(seeds)})")
    elif seed is not None:
        lines.append(f"  seed: {seed}")
    if replay:
        lines.append(f"  replay: {replay}")
    return "\n".join(lines)


def _headline(comparison: Comparison) -> str:
    if comparison.total == 0:
        return "nothing was compared: the outputs hold no element"
    share = 100 * comparison.failed / comparison.total
    what = "differs in structure" if comparison.mismatches else "is out of tolerance"
    return (
        f"candidate {what}: {comparison.failed:,} of {comparison.total:,} elements "
        f"({share:.3g}%) fail {comparison.tolerance.rule}"
    )


def _elements(comparison: Comparison) -> Iterator[str]:
    worst, budget = comparison.worst, comparison.budget_used
    if worst is None or budget is None:
        return
    if budget <= 1:
        if comparison.failed:
            yield f"worst finite element uses {budget:.3g} of its tolerance, at {worst.name}"
        return
    if worst.exact:
        yield (
            f"worst: {worst.name}: candidate {worst.candidate}, reference {worst.reference} "
            f"(integers and booleans must be equal){_of_seed(worst)}"
        )
        return
    allowed = comparison.tolerance.allowed(worst.reference)
    yield (
        f"worst by budget: {worst.name}: candidate {worst.candidate:.9g}, "
        f"reference {worst.reference:.9g}, difference {worst.difference:.3g}, "
        f"allowed {allowed:.3g} ({_times(budget)}){_of_seed(worst)}"
    )
    if worst.truth is not None:
        yield _arm(worst, worst.truth)
    if comparison.max_abs is not None and comparison.max_abs > worst.difference:
        yield f"largest difference anywhere: {comparison.max_abs:.3g}"


def _arm(element: Element, truth: complex) -> str:
    """Which arm is off at this element, by the float64 evaluation."""
    c, r = (abs(complex(value) - truth) for value in (element.candidate, element.reference))
    if not (math.isfinite(c) and math.isfinite(r)):
        return f"float64 says {truth:.9g} there"
    arm = "candidate" if c >= r else "reference"
    return (
        f"float64 says {truth:.9g} there: the {arm} is the arm that is off "
        f"(candidate by {c:.3g}, reference by {r:.3g})"
    )


def _columns(comparison: Comparison) -> Iterator[str]:
    for one in comparison.columns:
        if len(one.counts) == one.width:
            yield f"failing feature columns of {one.path}: all {one.width}"
            continue
        listed = [f"{column} ({count})" for column, count in one.counts]
        yield (
            f"failing feature columns of {one.path}: {', '.join(_limited(listed))} "
            f"({len(one.counts)} of {one.width})"
        )


def _nonfinite(comparison: Comparison) -> Iterator[str]:
    counts = (
        comparison.candidate_nan,
        comparison.candidate_inf,
        comparison.reference_nan,
        comparison.reference_inf,
    )
    if not any(counts):
        return
    c_nan, c_inf, r_nan, r_inf = counts
    yield (
        f"not finite: candidate {c_nan:,} NaN and {c_inf:,} inf, "
        f"reference {r_nan:,} NaN and {r_inf:,} inf"
    )
    if comparison.nonfinite and not (r_nan or r_inf):
        yield "arm: the candidate alone is not finite"
    elif not (c_nan or c_inf):
        yield "arm: the reference alone is not finite: check the inputs before the candidate"
    first = comparison.first_nonfinite
    if first is not None:
        yield (
            f"first of them: {first.name}: candidate {first.candidate}, "
            f"reference {first.reference}{_of_seed(first)}"
        )


def _of_seed(element: Element) -> str:
    return "" if element.seed is None else f", seed {element.seed}"


def _times(budget: float) -> str:
    return "no difference is allowed" if math.isinf(budget) else f"{budget:.3g}x its tolerance"


def _limited(items: Sequence[str]) -> list[str]:
    shown = list(items[:SHOWN])
    if len(items) > SHOWN:
        shown.append(f"and {len(items) - SHOWN} more")
    return shown
