"""The report's plots: matplotlib draws them as SVG whose colours the page's style sheet decides.

Every colour here is a placeholder that becomes a CSS variable, so that one drawing serves light
and dark; text stays text. Figures are 360 points wide, which a 400 px screen shows at full size.
All functions take plain values and return SVG markup.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pytest_fastlayer.report import text
from pytest_fastlayer.report.roofline import TERA, Peaks, Point

WIDTH = 5.0
ROW = 0.29
#: Placeholder -> CSS variable of the style sheet.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
REFERENCE, CANDIDATE, BAD, BAND = "#040404", "#050505", "#060606", "#070707"
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    REFERENCE: "--reference",
    CANDIDATE: "--candidate",
    BAD: "--bad",
    BAND: "--band",
}
_SETTINGS: dict[Any, Any] = {  # matplotlib's stubs want a literal for every key
    "text.parse_math": False,  # a dollar sign in a name is not a formula
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.xmargin": 0.04,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
}
#: Ticks of a logarithmic axis: (range as a ratio, steps within a decade).
_STEPS = ((30, (1, 1.5, 2, 3, 5, 7)), (300, (1, 2, 5)), (1e5, (1, 3)), (float("inf"), (1,)))


@dataclass(frozen=True)
class Interval:
    """One row of a plot: a value, its interval, and the band within which it means nothing."""

    name: str
    value: float
    low: float
    high: float
    band: tuple[float, float]
    bad: bool = False


@dataclass(frozen=True)
class Two:
    """One row of a plot: a figure of each arm and a limit, any of which may be unknown."""

    name: str
    reference: float | None
    candidate: float | None
    limit: float | None = None


def intervals(rows: Sequence[Interval], axis: str, *, log: bool = True, title: str = "") -> str:
    """Dots with intervals over the band of each row; a dot outside its band means something."""
    with _drawing(rows):
        figure, axes = _rows([row.name for row in rows], title)
        for y, row in enumerate(rows):
            color = BAD if row.bad else CANDIDATE
            value, low, high, *band = map(
                _bounded if log else float, (row.value, row.low, row.high, *row.band)
            )
            axes.plot(band, (y, y), color=BAND, linewidth=9, solid_capstyle="butt", zorder=1)
            axes.plot((low, high), (y, y), color=color, linewidth=2.2, zorder=3)
            axes.plot([value], [y], "o", color=color, markersize=5.5, zorder=4)
        neutral = 1.0 if log else 0.0
        axes.axvline(neutral, color=MUTED, linewidth=0.9, zorder=2)
        if log:
            values = [v for row in rows for v in (row.low, row.high, *row.band)]
            _log_axis(axes, values)
        axes.set_xlabel(axis)
        return _svg(figure, title or axis)


def pairs(rows: Sequence[Two], axis: str) -> str:
    """Both arms of each row on a logarithmic axis, joined by a line; a limit is a tick."""
    with _drawing(rows):
        figure, axes = _rows([row.name for row in rows])
        for y, row in enumerate(rows):
            arms = ((row.reference, REFERENCE), (row.candidate, CANDIDATE))
            known = [(_bounded(value), color) for value, color in arms if value]
            axes.plot([v for v, _ in known], [y] * len(known), color=BAND, linewidth=3, zorder=1)
            for value, color in known:
                axes.plot([value], [y], "o", color=color, markersize=5.5, zorder=3)
            if row.limit:
                x = _bounded(row.limit)
                axes.plot([x], [y], "|", color=MUTED, markersize=11, markeredgewidth=1.6, zorder=2)
        _log_axis(axes, [v for r in rows for v in (r.reference, r.candidate, r.limit) if v])
        axes.set_xlabel(axis)
        return _svg(figure, axis)


def shares(rows: Sequence[tuple[str, float]], axis: str, *, title: str = "") -> str:
    """Bars from zero with a limit at one; beyond it they are bad."""
    with _drawing(rows):
        figure, axes = _rows([name for name, _ in rows], title)
        largest = max(1.0, *(min(value, 4.0) for _, value in rows))
        for y, (_, value) in enumerate(rows):
            axes.barh(y, min(value, 4.0), height=0.5, color=BAD if value > 1 else CANDIDATE)
            axes.text(
                min(value, 4.0) + 0.012 * largest, y, text.decimal(value), va="center", fontsize=9
            )
        axes.axvline(1.0, color=MUTED, linewidth=0.9)
        axes.set_xlim(0, largest * 1.12)
        axes.set_xlabel(axis)
        return _svg(figure, title or axis)


def roofline(points: Sequence[Point], peaks: Peaks) -> str:
    """TFLOP/s over FLOP a byte, both arms of each case, under the roofs of fp16 and TF32."""
    with _drawing((points, peaks), {"axes.spines.left": True}):
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = figure.subplots()
        xs = [_bounded(point.intensity) for point in points]
        arms = [(_bounded(p.reference / TERA), _bounded(p.candidate / TERA)) for p in points]
        ridge = peaks.fp16 / peaks.bandwidth
        left, right = min(*xs, ridge) / 3, max(*xs, ridge) * 3
        for rate, style in ((peaks.fp16, "-"), (peaks.tf32, "--")):
            corners = [left, min(max(rate / peaks.bandwidth, left), right), right]
            roof = [peaks.attainable(x, rate) / TERA for x in corners]
            axes.plot(corners, roof, style, color=MUTED, linewidth=1.2, zorder=2)
        for x, (reference, candidate) in zip(xs, arms, strict=True):
            axes.plot((x, x), (reference, candidate), color=BAND, linewidth=2, zorder=1)
            axes.plot([x], [reference], "o", color=REFERENCE, markersize=5, zorder=3)
            axes.plot([x], [candidate], "o", color=CANDIDATE, markersize=5, zorder=4)
        low = min(*map(min, arms), peaks.attainable(left, peaks.tf32) / TERA) / 2
        _log_scale(axes, "x", left, right)
        _log_scale(axes, "y", low, 2 * max(peaks.fp16 / TERA, *map(max, arms)))
        names = [point.name for point in points]
        _label(axes, list(zip(xs, (candidate for _, candidate in arms), names, strict=True)))
        axes.grid(axis="both")
        axes.set_axisbelow(True)
        axes.set_xlabel("arithmetic intensity (FLOP / byte)")
        axes.set_ylabel("TFLOP / s")
        return _svg(figure, "achieved floating-point rate under the device's roofline")


def trace(ratios: Sequence[float], point: float, ci: tuple[float, float] | None) -> str:
    """The ratio of each pair in measured order, so that drift is seen; line and band as judged."""
    with _drawing(ratios, {"axes.spines.left": True}):
        figure = Figure(figsize=(WIDTH, 1.5))
        axes = figure.add_axes((0.12, 0.34, 0.87, 0.62))
        if ci is not None:
            axes.axhspan(*ci, color=BAND, linewidth=0)
        axes.axhline(point, color=MUTED, linewidth=0.9)
        axes.plot(
            range(1, len(ratios) + 1), ratios, ".-", color=CANDIDATE, linewidth=1, markersize=4
        )
        axes.set_xlabel("pair, in measured order")
        axes.set_ylabel("ratio")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure, "speedup of each pair in measured order")


def history(values: Sequence[float | None]) -> str:
    """A sparkline of one case over several records; a gap where a record has no figure."""
    with _drawing(values):
        figure = Figure(figsize=(1.6, 0.34))
        axes = figure.add_axes((0.03, 0.1, 0.94, 0.8))
        axes.plot(
            range(len(values)),
            [float("nan") if value is None else value for value in values],
            ".-",
            color=CANDIDATE,
            linewidth=1.3,
            markersize=5,
        )
        axes.set_axis_off()
        return _svg(figure, "history of the speedup")


#: The style sheet's colours for a picture that stands alone, on a panel of its own.
_STANDALONE = """\
:root { --page: #ffffff; --ink: #1b1f24; --muted: #57606a; --grid: #dde1e6;
  --reference: #8a93a0; --candidate: #1f6feb; --bad: #c2261c; --band: #c9d0da; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e4e8ed; --muted: #9aa4b1;
  --grid: #323a44; --reference: #8b96a5; --candidate: #5fa2ff; --bad: #ff7d72; --band: #3d4754; } }
text { font-family: system-ui, sans-serif !important; }
"""


def standalone(svg: str) -> str:
    """A drawing of this module as a file of its own, legible on a light page and a dark one.

    The colours follow the reader's scheme, and a panel lies behind them: where a site is dark and
    its reader's system light, the picture is a light card and still legible. The version of
    matplotlib is noted, since another one may lay the same figures out differently.
    """
    start = svg.index(">", svg.index("<svg")) + 1
    head = re.sub(r' style="max-width: [^"]*"', "", svg[:start])
    panel = '<rect width="100%" height="100%" rx="6" style="fill: var(--page)"/>'
    note = f"<!-- fastlayer-gate figures, matplotlib {matplotlib.__version__} -->"
    return f"{note}\n{head}\n<style>{_STANDALONE}</style>\n{panel}{svg[start:]}\n"


def _drawing(data: object, more: dict[Any, Any] | None = None) -> AbstractContextManager[None]:
    """matplotlib's settings; element ids follow from the data, so that output is reproducible."""
    return matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": repr(data)} | (more or {}))


def _rows(names: Sequence[str], title: str = "") -> tuple[Figure, Axes]:
    """A figure with one labelled row a name, the first at the top."""
    height = 0.65 + 0.25 * bool(title) + ROW * len(names)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    if title:
        figure.suptitle(text.plain(title, 70), x=0.02, ha="left", fontsize=10)
    axes = figure.subplots()
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), [text.plain(name, 20) for name in names])
    axes.tick_params(length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    return figure, axes


def _label(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside points of two logarithmic axes, moved down where they would overlap."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    # Height and width of a text in decades: so many points of the plot's own size.
    line = 9.0 / (3.4 * 72 * 0.8) * math.log10(top / bottom)
    letter = 5.5 / (WIDTH * 72 * 0.85) * math.log10(right / left)
    placed: list[tuple[float, float, float]] = []
    for x, y, name in sorted(points, key=lambda point: -point[1]):
        shown = text.plain(name, 10)
        start, height = math.log10(x), math.log10(y)
        for other_start, other_end, other_height in placed:
            apart = other_end < start or start + letter * len(shown) < other_start
            if not apart and other_height - height < line:
                height = other_height - line
        placed.append((start, start + letter * len(shown), height))
        axes.annotate(
            shown,
            (x, 10**height),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )


def _bounded(value: float) -> float:
    """Within twelve decades of one: a figure beyond is broken, and must not break the plot."""
    return min(max(value, 1e-12), 1e12)


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    low, high = _bounded(min(values)), _bounded(max(values))
    margin = (high / low) ** 0.05 * 1.01
    _log_scale(axes, "x", low / margin, high * margin)


def _log_scale(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """A logarithmic axis from ``low`` to ``high`` with plain figures at its ticks."""
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    if high / low < 4:  # less than a decade: evenly spaced figures read best
        ticks = list(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high))
    else:
        steps = next(steps for limit, steps in _STEPS if high / low < limit)
        ticks = [step * 10.0**decade for decade in range(-13, 14) for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set(**{f"{which}ticks": ticks, f"{which}ticklabels": [f"{tick:g}" for tick in ticks]})
    axes.minorticks_off()


def _svg(figure: Figure, title: str) -> str:
    """The figure as an ``<svg>`` element sized by the page, in the style sheet's colours."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        # Text is drawn by the browser; that matplotlib's font lacks a glyph does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<style.*?</style>", "", drawing, count=1, flags=re.DOTALL)
    drawing = re.sub(r' (width|height)="[\d.]+pt"', "", drawing, count=2)
    # Only what is referred to keeps its id: clip paths and markers, named by their content.
    drawing = re.sub(r' id="(?![pm][0-9a-f]{10}")[^"]*"', "", drawing)
    width = figure.get_size_inches()[0] * 72
    label = html.escape(text.plain(title))
    head = f'<svg role="img" aria-label="{label}" style="max-width: {width * 1.35:.0f}px"'
    for placeholder, variable in _VARIABLES.items():
        drawing = drawing.replace(placeholder, f"var({variable})")
    return drawing.replace("<svg", head, 1)
