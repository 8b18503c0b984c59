"""The columns of a run's table and the lines below it, before any layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_fastlayer.comparability import changed_since
from pytest_fastlayer.records import GREEN, NOTICE, Arm, CaseRecord, RunRecord, Verdict
from pytest_fastlayer.report import text

Mood = Literal["good", "notice", "bad", ""]
#: Verdicts that need no explanation below the table.
_SILENT = frozenset({Verdict.PASS, Verdict.FASTER, Verdict.ACCURATE})


@dataclass(frozen=True)
class Cell:
    """One cell: what is shown, how it is meant, and what it sorts by."""

    text: str
    mood: Mood = ""
    value: float | None = None


@dataclass(frozen=True)
class Column:
    """A column: its heading, the text of a case, and which end of its values is the good one.

    ``legend`` says what it holds, for formats with room to say it.
    """

    heading: str
    show: Callable[[CaseRecord, float], str]  #: (case, seconds per unit of time); "" = no value
    value: Callable[[CaseRecord], float | None] | None = None
    best: Callable[[list[float]], float] | None = None
    legend: str = ""


@dataclass(frozen=True)
class Table:
    """Headings and rows of equal length; the unit of time stands in its heading.

    ``legend`` says what the headings mean, of the columns that are there.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    legend: str = ""


def _speedup(case: CaseRecord) -> float | None:
    """A claim: a diagnostic ratio is no column's best or worst."""
    return None if case.timing is None or case.is_diagnostic else case.timing.speedup


def _show_speedup(case: CaseRecord, _: float) -> str:
    if case.timing is None:
        return ""
    return text.speedup(case.timing.speedup, case.timing.ci, diagnostic=case.is_diagnostic)


def _show_times(case: CaseRecord, unit: float) -> str:
    if case.timing is None:
        return ""
    arms = (case.timing.reference_s, case.timing.candidate_s)
    return " / ".join(text.significant(seconds / unit) for seconds in arms)


def _floor(case: CaseRecord) -> float | None:
    return None if case.timing is None or case.is_diagnostic else case.timing.noise_floor


def _show_floor(case: CaseRecord, _: float) -> str:
    floor = _floor(case)
    return "" if floor is None else text.percent(floor)


def _show_control(case: CaseRecord, _: float) -> str:
    if case.timing is None or case.timing.aa is None:
        return ""
    return text.percent(case.timing.aa.speedup - 1, signed=True)


def _show_effect(case: CaseRecord, _: float) -> str:
    if case.timing is None or case.timing.min_detectable_effect is None:
        return ""
    return text.percent(case.timing.min_detectable_effect)


def _budget(case: CaseRecord) -> float | None:
    return None if case.accuracy is None else case.accuracy.budget_used


def _show_budget(case: CaseRecord, _: float) -> str:
    used = _budget(case)
    return "" if used is None else "<0.01" if 0 < used < 0.01 else text.decimal(used)


def _stress(case: CaseRecord) -> float | None:
    return None if case.stress is None else case.stress.budget_used


def _show_stress(case: CaseRecord, _: float) -> str:
    grid = case.stress
    if grid is None:
        return ""
    ran_at = f", {text.plain(grid.note, 40)}" if grid.note else ""
    if grid.failed:
        return f"{text.count(grid.failed)}/{text.count(grid.elements)} failed{ran_at}"
    used = "-" if grid.budget_used is None else text.decimal(grid.budget_used)
    return f"{used} of {len(grid.cells)}x{len(grid.seeds)}{ran_at}"


def _show_failed(case: CaseRecord, _: float) -> str:
    if case.accuracy is None:
        return ""
    return f"{text.count(case.accuracy.failed)}/{text.count(case.accuracy.total)}"


def _show_peak(case: CaseRecord, _: float) -> str:
    peak = case.peak_mib
    if peak is None or (peak.reference is None and peak.candidate is None):
        return ""
    return f"{text.mib(peak.reference)} / {text.mib(peak.candidate)}"


def _change(case: CaseRecord) -> float | None:
    return None if case.comparison is None else case.comparison.ratio


def _show_change(case: CaseRecord, _: float) -> str:
    change = case.comparison
    if change is None:
        return ""
    published = " (published)" if change.provenance == "published" else ""
    return text.ratio(change.ratio, change.ci) + published


def _base(case: CaseRecord) -> float | None:
    return None if case.base is None or case.base.timing is None else case.base.timing.speedup


def _show_base(case: CaseRecord, _: float) -> str:
    base = case.base
    if base is None:
        return ""
    if base.timing is None:
        return base.status
    shown = text.ratio(base.timing.speedup, base.timing.ci)
    return shown if base.verdict is Verdict.PASS else f"{shown} {base.verdict}"


def _show_route(case: CaseRecord, _: float) -> str:
    return text.plain(case.route, 32) if case.route else ""


COLUMNS = (
    Column(
        "speedup",
        _show_speedup,
        _speedup,
        max,
        "speedup: reference time / candidate time, with its interval; in brackets, over an oracle, "
        "it claims nothing",
    ),
    Column("ref / cand ({unit})", _show_times, legend="ref / cand: time of a forward of each"),
    Column("floor", _show_floor, _floor, min, "floor: noise floor"),
    Column("A/A", _show_control, legend="A/A: one arm against itself"),
    Column("detects", _show_effect, legend="detects: smallest change this run could detect"),
    Column(
        "budget",
        _show_budget,
        _budget,
        min,
        "budget: share of the tolerance that the worst element used",
    ),
    Column("failed", _show_failed, legend="failed: elements out of tolerance / all"),
    Column(
        "stress",
        _show_stress,
        _stress,
        min,
        "stress: the worst element's share of the tolerance over so many gated cells x seeds of "
        "the stress grid and what it ran at, or its elements out of tolerance / all",
    ),
    Column(
        "peak MiB ref / cand", _show_peak, legend="peak MiB: most memory of each above its start"
    ),
    Column("vs base", _show_base, _base, legend="vs base: speed of this candidate / the base's"),
    Column(
        "vs baseline", _show_change, _change, legend="vs baseline: speedup now / speedup stored"
    ),
    Column("route", _show_route, legend="route: how the candidate computed"),
)
_RIVAL_LEGEND = "a rival's column: reference time / rival time, and the rival's time"


def _rival_column(name: str) -> Column:
    """A rival's speedup over the same reference and its time, or the verdict that refused it."""

    def arm(case: CaseRecord) -> Arm | None:
        return next((rival for rival in case.rivals if rival.name == name), None)

    def value(case: CaseRecord) -> float | None:
        rival = arm(case)
        return None if rival is None or rival.timing is None else rival.timing.speedup

    def show(case: CaseRecord, unit: float) -> str:
        rival = arm(case)
        if rival is None:
            return ""
        if rival.timing is None:
            return rival.verdict.value
        seconds = text.significant(rival.timing.candidate_s / unit)
        ratio = text.speedup(rival.timing.speedup, diagnostic=case.is_diagnostic)
        return f"{ratio} / {seconds}"

    heading = text.plain(name, 32).replace("{", "{{").replace("}", "}}")
    return Column(f"{heading} x / {{unit}}", show, value, legend=_RIVAL_LEGEND)


def columns(run: RunRecord) -> tuple[Column, ...]:
    """The columns of every table, with one for each rival of the run before the baseline's."""
    rivals = dict.fromkeys(arm.name for case in run.cases.values() for arm in case.rivals)
    before = next(i for i, column in enumerate(COLUMNS) if column.heading == "vs base")
    return (*COLUMNS[:before], *map(_rival_column, rivals), *COLUMNS[before:])


def mood(verdict: Verdict) -> Mood:
    """How a verdict is meant: good, worth a notice, or bad; neutral where nothing ran."""
    if verdict is Verdict.UNSUPPORTED:
        return ""
    return "good" if verdict in GREEN else "notice" if verdict in NOTICE else "bad"


def label(name: str, case: CaseRecord, limit: int = 60) -> str:
    """What a case is called in reports: its label, or its name where it has none."""
    return text.plain(case.label or name, limit) or "(unnamed)"


def build(run: RunRecord) -> Table:
    """The table of a run. Columns in which no case has a value are left out."""
    unit, seconds = time_unit(run)
    headings, filled = ["case"], [[Cell(label(name, case)) for name, case in run.cases.items()]]
    meanings = []
    for column in columns(run):
        cells = _cells(column, list(run.cases.values()), seconds)
        if any(cell.text for cell in cells):
            headings.append(column.heading.format(unit=unit))
            filled.append(cells)
            meanings.append(column.legend)
    headings.append("verdict")
    verdicts = [case.verdict for case in run.cases.values()]
    filled.append([Cell(verdict.value, mood(verdict)) for verdict in verdicts])
    # Once each: every rival's column means the same.
    legend = "; ".join(dict.fromkeys(meanings))
    return Table(tuple(headings), tuple(zip(*filled, strict=True)), legend and f"{legend}.")


def _cells(column: Column, cases: list[CaseRecord], seconds: float) -> list[Cell]:
    values = [column.value(case) if column.value else None for case in cases]
    known = [value for value in values if value is not None]
    best = worst = None
    if column.best and len(set(known)) > 1:
        best = column.best(known)
        worst = min(known) if best == max(known) else max(known)
    moods: dict[float | None, Mood] = {worst: "bad", best: "good", None: ""}
    shown = [column.show(case, seconds) for case in cases]
    return [Cell(t, moods.get(v, ""), v) for t, v in zip(shown, values, strict=True)]


def time_unit(run: RunRecord) -> tuple[str, float]:
    """One unit of time for all cases of a run, as (name, seconds)."""
    timed = [case.timing for case in run.cases.values() if case.timing is not None]
    return text.unit_for(timing.candidate_s for timing in timed)


def geometric_mean(cases: Mapping[str, CaseRecord]) -> tuple[float, int] | None:
    """Geometric mean of the speedups over the reference, and how many cases it covers.

    Diagnostic ratios are left out: an oracle is built to be lean in memory, not fast. ``None``
    when no case qualifies.
    """
    speedups = [
        case.timing.speedup
        for case in cases.values()
        if case.timing is not None and not case.is_diagnostic
    ]
    if not speedups:
        return None
    return math.exp(math.fsum(map(math.log, speedups)) / len(speedups)), len(speedups)


@dataclass(frozen=True)
class Line:
    """A line of the summary and how it is meant."""

    text: str
    mood: Mood = ""


def explanations(run: RunRecord) -> list[Line]:
    """One line for each case whose verdict needs a reason."""
    return [
        Line(
            f"{case.verdict.value}  {label(name, case)}: "
            f"{text.plain(case.reason, 400) or 'no reason recorded'}",
            mood(case.verdict),
        )
        for name, case in run.cases.items()
        if case.verdict not in _SILENT
    ]


def summary(run: RunRecord) -> list[Line]:
    """Mean, verdict counts and notices of a run, in the order in which they are read."""
    lines = []
    mean = geometric_mean(run.cases)
    if mean is not None:
        oracles = sum(case.timing is not None and case.is_diagnostic for case in run.cases.values())
        left_out = f"; {oracles} timed against an oracle left out" if oracles else ""
        timed = f"{mean[1]} timed case{'' if mean[1] == 1 else 's'}"
        lines.append(Line(f"geometric mean speedup {text.speedup(mean[0])} over {timed}{left_out}"))
    counts = Counter(case.verdict for case in run.cases.values())
    tally = ", ".join(f"{counts[v]} {v.value}" for v in Verdict if counts[v])
    moods = {mood(verdict) for verdict in counts}
    worst: Mood = "bad" if "bad" in moods else "notice" if "notice" in moods else "good"
    total = len(run.cases)
    lines.append(Line(f"{total} case{'' if total == 1 else 's'}: {tally or 'nothing ran'}", worst))
    return lines + _notices(run)


def _notices(run: RunRecord) -> list[Line]:
    notices = []
    if run.provenance == "published":
        notices.append("these figures are published, not measured by this project")
    published = {
        case.comparison.baseline
        for case in run.cases.values()
        if case.comparison is not None and case.comparison.provenance == "published"
    }
    for path in sorted(published):
        notices.append(
            f"held against published figures ({text.plain(path)}), not against a measurement of "
            "this machine; record one with --fastlayer-update-baseline"
        )
    missing = [n for n, case in run.cases.items() if case.verdict is Verdict.NO_BASELINE]
    if missing:
        notices.append(
            f"no baseline stored for {len(missing)}: {text.listing(missing)}; "
            "record them with --fastlayer-update-baseline"
        )
    foreign = [n for n, case in run.cases.items() if case.verdict is Verdict.OTHER_MACHINE]
    if foreign:
        notices.append(
            f"stored figures are another device's for {len(foreign)}: {text.listing(foreign)}"
        )
    notices += _base_notices(run)
    changes = [c for case in run.cases.values() if case.comparison for c in _changed(case)]
    if changes:
        notices.append(f"changed since the baseline: {text.listing(dict.fromkeys(changes))}")
    notices += _timing_notices(run)
    origins: dict[str, list[str]] = {}
    for name, case in run.cases.items():
        if case.kept_from is not None:
            then = case.kept_from
            told = text.plain(f"{then.created}, commit {then.commit or 'unknown'}", 120)
            # What the heading says is the last run's.
            changed = changed_since(run.software, then.software) if then.software else ()
            told += f" ({text.listing(changed)} since)" if changed else ""
            origins.setdefault(told, []).append(name)
    notices += [f"kept from {told}: {text.listing(names)}" for told, names in origins.items()]
    notices += [text.plain(note, 400) for note in run.notes]
    return [Line(notice, "notice") for notice in notices]


def _base_notices(run: RunRecord) -> list[str]:
    """Bases that gave no figure, each reason said once, and what a base let pass."""
    reasons: dict[str, list[str]] = {}
    for name, case in run.cases.items():
        if case.base is not None and case.base.timing is None:
            told = text.plain(f"{case.base.rev} {case.base.status}: {case.base.reason}", 300)
            reasons.setdefault(told, []).append(name)
    notices = [
        f"no figure of the base for {text.listing(names)}, held against the stored baseline "
        f"alone: {told}"
        for told, names in reasons.items()
    ]
    below = [
        name for name, case in run.cases.items() if case.is_below_stored and case.verdict in GREEN
    ]
    if below:
        notices.append(
            f"slower than stored, though not than the base, so not by this change: "
            f"{text.listing(below)}"
        )
    return notices


def _changed(case: CaseRecord) -> tuple[str, ...]:
    return () if case.comparison is None else case.comparison.changed_since


def _timing_notices(run: RunRecord) -> list[str]:
    """Dropped pairs and warnings, each said once with the cases it concerns."""
    concerned: dict[str, list[str]] = {}
    for name, case in run.cases.items():
        if case.timing is None:
            continue
        warnings = list(case.timing.warnings)
        if case.timing.dropped_pairs:
            why = text.listing(case.timing.dropped_reasons) or "no reason recorded"
            warnings.append(f"{case.timing.dropped_pairs} pairs dropped ({why})")
        for warning in warnings:
            concerned.setdefault(text.plain(warning, 300), []).append(name)
    return [f"case {text.listing(names)}: {warning}" for warning, names in concerned.items()]
