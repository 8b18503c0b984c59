"""One self-contained HTML page of one or several records.

Jinja2 escapes every value; the page's content security policy forbids every request and every
script but its own sorter, so that even a mistake here could not fetch or run anything.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from pytest_fastlayer.records import Arm, CaseRecord, Device, RunRecord, StressCell, natural_key
from pytest_fastlayer.report import explain, roofline, terminal, text
from pytest_fastlayer.report import table as tables
from pytest_fastlayer.report.table import Cell, Line, Mood, Table

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

    from pytest_fastlayer.report.drawings import Plot

#: Plots and traces are drawn for so many cases; the table and the details hold all.
MAX_PLOTTED = 100
#: Heading of the roofline's column, and what it means.
ROOFLINE = "x roofline"
ROOFLINE_LEGEND = (
    "x roofline: candidate time over the least that the device's peak rates allow for this work."
)


class ReportDependencyError(ImportError):
    """jinja2 or matplotlib is not installed."""


def check_dependencies() -> None:
    """Raises ReportDependencyError where jinja2 or matplotlib cannot be imported."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportDependencyError(
            f"HTML reports need jinja2 and matplotlib ({error}): "
            "pip install 'pytest-fastlayer[report]'"
        ) from error


@dataclass(frozen=True)
class Detail:
    """One case in full."""

    anchor: str
    label: str
    verdict: str
    mood: Mood
    paragraphs: list[str]
    advice: list[str]
    traces: list[tuple[str, Markup]]
    wrote: tuple[str, ...]  #: last lines of the base's process
    facts: dict[str, str]
    objections: dict[str, list[str]]
    arms: list[tuple[str, ...]]
    probes: list[tuple[str, bool, str]]
    notes: tuple[str, ...]  #: what the candidate says of its run
    stress: list[tuple[str, ...]]  #: rows of the stress grid, the ungated cells last


@dataclass(frozen=True)
class Past:
    """One case over several records: its sparkline and the speedup in each."""

    label: str
    line: Markup
    speedups: list[str]


@dataclass(frozen=True)
class Section:
    """The records of one device: the newest in full, all of them as history."""

    anchor: str
    heading: str
    created: str
    published: bool
    mean: str
    lines: list[Line]
    table: Table
    details: list[Detail]
    plots: list[Plot]
    roofline: str  #: why there is no roofline, or whose figures it rests on
    environment: dict[str, str]
    dates: list[str] = field(default_factory=list)
    history: list[Past] = field(default_factory=list)


def render(records: Sequence[RunRecord]) -> str:
    """The page, as a string that needs nothing else.

    Records of one device form a section; its newest (by ``created``) is shown in full and all of
    them as history.

    Raises:
        ReportDependencyError: jinja2 or matplotlib is missing; says how to install them.
        ValueError: no record was given.
    """
    if not records:
        raise ValueError("a report needs at least one record")
    check_dependencies()
    script, style, page = _templates()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.render(
        sections=[_section(i, group) for i, group in enumerate(_by_device(records))],
        style=_markup(style),
        script=_markup(script),
        script_digest=digest,
    )


@functools.cache
def _templates() -> tuple[str, str, jinja2.Template]:
    """The script, the style and the compiled page."""
    import jinja2

    folder = resources.files("pytest_fastlayer.report") / "templates"
    sources = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return sources["report.js"], sources["report.css"], environment.get_template("report.html")


def _finalize(value: Any) -> Any:
    """Foreign text loses control characters; markup made here passes as it is."""
    return text.plain(value, 4000) if type(value) is str else value


def _markup(source: str) -> Markup:
    from markupsafe import Markup

    return Markup(source)  # only ever this package's own files and matplotlib's drawings


def _by_device(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Records grouped by device in order of appearance, each group from oldest to newest."""
    groups: list[list[RunRecord]] = []
    for record in records:
        group = next((g for g in groups if g[0].device.matches(record.device)), None)
        if group is None:
            groups.append(group := [])
        group.append(record)
    return [sorted(group, key=lambda record: record.created) for group in groups]


def _section(number: int, records: list[RunRecord]) -> Section:
    from pytest_fastlayer.report import drawings

    run = records[-1]
    placed = sum(roofline.point(name, case) is not None for name, case in run.cases.items())
    mean = tables.geometric_mean(run.cases)
    several = len(records) > 1
    return Section(
        anchor=f"s{number}",
        heading=terminal.heading(run),
        created=run.created,
        published=run.provenance == "published",
        mean="-" if mean is None else text.speedup(mean[0]),
        lines=[*tables.explanations(run), *tables.summary(run)],
        table=_table(run),
        details=[
            _detail(f"s{number}c{i}", name, case, run.device, plotted=i < MAX_PLOTTED)
            for i, (name, case) in enumerate(run.cases.items())
        ],
        plots=drawings.draw(run, MAX_PLOTTED),
        roofline=roofline.sentence(run.device, len(run.cases), placed),
        environment=_environment(run),
        dates=[_when(record) for record in records] if several else [],
        history=_history(records) if several else [],
    )


def _table(run: RunRecord) -> Table:
    """The run's table with one more column before the verdict: times the roofline's floor."""
    built = tables.build(run)
    peaks = roofline.peaks_of(run.device)
    times = [roofline.times_floor(case, peaks) for case in run.cases.values()]
    if not any(times):
        return built
    cells = [Cell("" if t is None else f"{text.significant(t, 3)}x", "", t) for t in times]
    return Table(
        (*built.headings[:-1], ROOFLINE, built.headings[-1]),
        tuple((*row[:-1], cell, row[-1]) for row, cell in zip(built.rows, cells, strict=True)),
        f"{built.legend} {ROOFLINE_LEGEND}".strip(),
    )


def _when(record: RunRecord) -> str:
    commit = f" {text.revision(record.commit)}" if record.commit else ""
    return f"{record.created[:16].replace('T', ' ')}{commit}"


def _environment(run: RunRecord) -> dict[str, str]:
    data: dict[str, Any] = run.device.model_dump() | run.software.model_dump()
    if run.settings is not None:
        data |= run.settings.model_dump()
    data |= {"commit": run.commit, "schema_version": run.schema_version}
    return {name: _value(value) for name, value in data.items() if value is not None}


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ".".join(map(str, value)) if len(value) == 2 else ", ".join(map(str, value))
    return str(value)


# --------------------------------------------------------------------------------------------------
# Cases and history


def _detail(anchor: str, name: str, case: CaseRecord, device: Device, *, plotted: bool) -> Detail:
    traces = []
    if plotted:
        from pytest_fastlayer.report import drawings

        traces = drawings.traces(case)
    facts: dict[str, Any] = {
        "test": case.nodeid,
        "route": case.route,
        "launch": _mapping(case.launch),
        "workload": _mapping(case.workload),
        "reference": case.reference_kind,
        "reference sha256": case.reference_sha256,
    }
    if case.precision is not None:
        tf32 = "on" if case.precision.allow_tf32 else "off"
        facts["precision"] = f"{case.precision.float32_matmul_precision}, TF32 {tf32}"
    if case.timing is not None and case.timing.clocks is not None:
        clocks = case.timing.clocks
        facts["SM clock"] = f"{clocks.sm_mhz_min} to {clocks.sm_mhz_max} MHz"
        facts["throttling"] = text.listing(clocks.throttle_reasons)
    if case.base is not None:
        commit = f", commit {case.base.commit}" if case.base.commit else ""
        facts["base"] = f"{case.base.rev}{commit}, {case.base.status}"
        facts["base's route"] = case.base.route
        facts["base's launch"] = _mapping(case.base.launch)
    paragraphs, advice = _prose(explain.explain(name, case, device)[1:])
    return Detail(
        anchor=anchor,
        label=tables.label(name, case, 100),
        verdict=case.verdict.value,
        mood=tables.mood(case.verdict),
        paragraphs=paragraphs,
        advice=advice,
        traces=traces,
        wrote=case.base.tail if case.base else (),
        facts={key: str(value) for key, value in facts.items() if value},
        objections=case.objections or {},
        arms=[
            _arm(kind, arm, case.is_diagnostic)
            for kind, arms in (("rival", case.rivals), ("variant", case.variants))
            for arm in arms
        ],
        probes=[(probe.name, probe.passed, probe.message) for probe in case.probes],
        notes=case.notes,
        stress=[_cell(cell) for cell in (*case.stress.cells, *case.stress.ungated)]
        if case.stress
        else [],
    )


def _prose(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """An explanation's lines as paragraphs, and the points of its advice."""
    points = [line[2:] for line in lines if line.startswith("- ")]
    paragraphs, current = [], list[str]()
    for line in [*lines, ""]:
        if line and not line.startswith("- "):
            current.append(line)
        elif current:
            paragraphs.append(" ".join(current))
            current = []
    return paragraphs, points


def _mapping(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items())


def _cell(cell: StressCell) -> tuple[str, ...]:
    return (
        cell.label,
        text.count(cell.elements),
        text.count(cell.failed),
        "" if cell.budget_used is None else text.decimal(cell.budget_used),
        "" if cell.seed is None else str(cell.seed),
        cell.route or "",
        "yes" if cell.gated else "no",
    )


def _arm(kind: str, arm: Arm, diagnostic: bool) -> tuple[str, ...]:
    timing, accuracy = arm.timing, arm.accuracy
    return (
        kind,
        arm.name,
        text.speedup(timing.speedup, timing.ci, diagnostic=diagnostic) if timing else "",
        text.decimal(accuracy.budget_used) if accuracy and accuracy.budget_used is not None else "",
        arm.verdict.value,
        arm.reason,
    )


def _history(records: list[RunRecord]) -> list[Past]:
    from pytest_fastlayer.report import plots

    past = []
    names = {name for record in records for name in record.cases}
    for name in sorted(names, key=natural_key):
        cases = [record.cases.get(name) for record in records]
        timed = [case if case is not None and case.timing else None for case in cases]
        if not any(timed):
            continue
        newest = next(case for case in reversed(cases) if case is not None)
        ratios = [case.timing.speedup if case and case.timing else None for case in timed]
        past.append(
            Past(
                tables.label(name, newest),
                _markup(plots.history(ratios)),
                [
                    text.speedup(ratio, diagnostic=case.is_diagnostic) if case and ratio else ""
                    for case, ratio in zip(timed, ratios, strict=True)
                ],
            )
        )
    return past
