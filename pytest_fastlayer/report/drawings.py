"""Which plots a run gets, and what each of them says; ``plots`` draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fastlayer.records import CaseRecord, RunRecord, Timing, Verdict
from pytest_fastlayer.report import plots, roofline
from pytest_fastlayer.report import table as tables

if TYPE_CHECKING:
    from markupsafe import Markup

Key = tuple[str, str]  #: (CSS variable of a colour, what it means)
FIGURE: Key = ("--candidate", "figure and interval")
RED: Key = ("--bad", "red verdict")
ARMS: tuple[Key, ...] = (("--reference", "reference"), ("--candidate", "candidate"))


@dataclass(frozen=True)
class Plot:
    """A drawing, what it shows, and the keys of its colours."""

    title: str
    note: str
    svg: Markup
    keys: tuple[Key, ...] = ()


def draw(run: RunRecord, limit: int) -> list[Plot]:
    """The plots of a run's first ``limit`` cases; one that would be empty is left out."""
    cases = dict(list(run.cases.items())[:limit])
    timed = {name: case.timing for name, case in cases.items() if case.timing is not None}
    bad = frozenset(name for name, case in cases.items() if tables.mood(case.verdict) == "bad")
    return [
        *_speedup(cases),
        *_latency(run, cases),
        *_roofline(run, cases),
        *_against_base(cases),
        *_against_baseline(cases, bad),
        *_budget(cases),
        *_memory(cases),
        *_control(timed),
    ]


def _plot(title: str, note: str, svg: str, *keys: Key) -> Plot:
    from markupsafe import Markup

    return Plot(title, note, Markup(svg), keys)  # matplotlib's, whose texts are escaped


def speedups(cases: Mapping[str, CaseRecord]) -> list[plots.Interval]:
    """The rows of the speedup plot: the figure, its interval, and its own noise floor.

    A ratio over an oracle claims no speedup and has no row.
    """
    return [
        plots.Interval(
            n,
            t.speedup,
            *(t.ci or (t.speedup,) * 2),
            (1, 1 + t.noise_floor),
            tables.mood(case.verdict) == "bad",
        )
        for n, case in cases.items()
        if (t := case.timing) is not None and not case.is_diagnostic
    ]


def budgets(cases: Mapping[str, CaseRecord]) -> list[tuple[str, float]]:
    """The rows of the budget plot: the worst element's share of its tolerance."""
    return [
        (name, case.accuracy.budget_used)
        for name, case in cases.items()
        if case.accuracy is not None and case.accuracy.budget_used is not None
    ]


def _speedup(cases: Mapping[str, CaseRecord]) -> Iterator[Plot]:
    rows = speedups(cases)
    if rows:
        yield _plot(
            "Speedup over the reference",
            "A figure counts where its interval lies right of the noise floor.",
            plots.intervals(rows, "reference time / candidate time"),
            FIGURE,
            ("--band", "1 to 1 + noise floor"),
            RED,
        )


def _latency(run: RunRecord, cases: Mapping[str, CaseRecord]) -> Iterator[Plot]:
    unit, scale = tables.time_unit(run)
    peaks = roofline.peaks_of(run.device)
    rows = []
    for name, case in cases.items():
        if case.timing is not None:
            floor = peaks.floor_s(case.work) / scale if peaks and case.work else None
            arms = case.timing.reference_s / scale, case.timing.candidate_s / scale
            rows.append(plots.Two(name, *arms, floor))
    if rows:
        svg = plots.pairs(rows, f"time per forward ({unit}, logarithmic)")
        least: tuple[Key, ...] = (("--muted", "roofline: the least that this work can take"),)
        yield _plot("Latency", "", svg, *ARMS, *(least if any(r.limit for r in rows) else ()))


def _roofline(run: RunRecord, cases: Mapping[str, CaseRecord]) -> Iterator[Plot]:
    peaks = roofline.peaks_of(run.device)
    points = [p for n, case in cases.items() if (p := roofline.point(n, case)) is not None]
    if peaks is not None and points:
        yield _plot(
            "Roofline",
            "Work of the minimal algorithm over the time taken: on the roof nothing is left to "
            f"gain. {roofline.sentence(run.device, len(cases), len(points))}",
            plots.roofline(points, peaks),
            *ARMS,
            ("--muted", "fp16 tensor cores, and below it TF32"),
        )


def _against_base(cases: Mapping[str, CaseRecord]) -> Iterator[Plot]:
    rows = [
        plots.Interval(
            n,
            t.speedup,
            *(t.ci or (t.speedup,) * 2),
            (1 / (1 + t.noise_floor), 1 + t.noise_floor),
            case.base.verdict is Verdict.SLOWER,
        )
        for n, case in cases.items()
        if case.base is not None and (t := case.base.timing) is not None
    ]
    if rows:
        yield _plot(
            "Against the base revision",
            "Timed in the same schedule. Left of 1 the head is slower.",
            plots.intervals(rows, "base time / head time"),
            FIGURE,
            ("--band", "noise floor"),
            ("--bad", "slower"),
        )


def traces(case: CaseRecord) -> list[tuple[str, Markup]]:
    """The ratio of each pair over the run, with its title: the case's, then the base's."""
    from markupsafe import Markup

    over = ", over an oracle (diagnostic)" if case.is_diagnostic else ""
    kept = [(f"Ratio of each pair{over}", case.timing)]
    if case.base is not None:
        kept.append(("Ratio of each pair, base over head", case.base.timing))
    drawn = []
    for title, timing in kept:
        if timing is not None and timing.log_ratios:
            # A record may hold any finite logarithm, a float not every ratio.
            ratios = [math.exp(min(logarithm, 300)) for logarithm in timing.log_ratios]
            drawn.append((title, Markup(plots.trace(ratios, timing.speedup, timing.ci))))
    return drawn


def _against_baseline(cases: Mapping[str, CaseRecord], bad: frozenset[str]) -> Iterator[Plot]:
    rows = [
        plots.Interval(
            n,
            c.ratio,
            *(c.ci or (c.ratio,) * 2),
            (1 / (1 + c.threshold), 1 + c.threshold),
            n in bad,
        )
        for n, case in cases.items()
        if (c := case.comparison) is not None
    ]
    if rows:
        yield _plot(
            "Against the baseline",
            "Left of 1 is slower; within the band a change cannot be told from noise.",
            plots.intervals(rows, "speedup now / speedup stored"),
            FIGURE,
            ("--band", "combined noise floors"),
            RED,
        )


def _budget(cases: Mapping[str, CaseRecord]) -> Iterator[Plot]:
    used = budgets(cases)
    if used:
        yield _plot(
            "Accuracy budget used by the worst element",
            "1 is the tolerance: a pass at 0.99 is not a pass at 0.4.",
            plots.shares(used, "share of the tolerance"),
        )


def _memory(cases: Mapping[str, CaseRecord]) -> Iterator[Plot]:
    peaks = [
        plots.Two(n, c.peak_mib.reference, c.peak_mib.candidate)
        for n, c in cases.items()
        if c.peak_mib and (c.peak_mib.reference or c.peak_mib.candidate)
    ]
    if peaks:
        svg = plots.pairs(peaks, "MiB above the start (logarithmic)")
        yield _plot("Peak memory", "", svg, *ARMS)


def _control(timed: Mapping[str, Timing]) -> Iterator[Plot]:
    rows = []
    for name, timing in timed.items():
        if timing.aa is not None:
            low, high = timing.aa.ci or (timing.aa.speedup,) * 2
            # In percent from one.
            value, low, high = (100 * (ratio - 1) for ratio in (timing.aa.speedup, low, high))
            floor = 100 * timing.noise_floor
            rows.append(plots.Interval(name, value, low, high, (-floor, floor)))
    if rows:
        yield _plot(
            "A/A control: one arm against itself",
            "What is left here is the method's own error; the floor must cover it.",
            plots.intervals(rows, "deviation from 1 (%)", log=False),
            FIGURE,
            ("--band", "noise floor"),
        )
