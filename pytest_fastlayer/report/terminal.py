"""The table a run prints at its end."""

from __future__ import annotations

from tabulate import tabulate

from pytest_fastlayer.baselines import Merge
from pytest_fastlayer.records import RunRecord
from pytest_fastlayer.report import table as tables
from pytest_fastlayer.report import text
from pytest_fastlayer.report.table import Line, Mood

#: ANSI "select graphic rendition" codes: green, yellow, red.
_CODES: dict[Mood, str] = {"good": "32", "notice": "33", "bad": "31"}


def paint(shown: str, mood: Mood, color: bool) -> str:
    """``shown`` in the colour of its mood, or as it is when ``color`` is off."""
    code = _CODES.get(mood)
    return f"\x1b[{code}m{shown}\x1b[0m" if color and code and shown else shown


def table(run: RunRecord, color: bool = False) -> str:
    """One row a case. Green marks the best value of a column, red the worst."""
    built = tables.build(run)
    rows = [[paint(cell.text, cell.mood, color) for cell in row] for row in built.rows]
    # Everything is formatted already: without this, tabulate would reformat "1.50" to 1.5.
    return tabulate(rows, headers=list(built.headings), disable_numparse=True)


def heading(run: RunRecord) -> str:
    """Where and with what: ``NVIDIA H200 (132 SMs, 9.0), torch 2.13.0, commit abc1234``."""
    device, software = run.device, run.software
    units = "SMs" if device.type == "cuda" else "threads"
    capability = "" if device.capability is None else ", {}.{}".format(*device.capability)
    versions = [
        f"{name} {text.plain(version, 40)}"
        for name, version in (
            ("torch", software.torch),
            ("triton", software.triton),
            ("cuda", software.cuda),
            ("driver", software.driver),
        )
        if version
    ]
    commit = [f"commit {text.revision(run.commit)}"] if run.commit else []
    where = f"{text.plain(device.name)} ({device.multiprocessors} {units}{capability})"
    return ", ".join([where, *versions, *commit])


def summary(run: RunRecord, color: bool = False, merge: Merge | None = None) -> list[str]:
    """Everything a run has to say, line by line.

    Where and with what, the table, the reasons of verdicts that need one, the geometric mean,
    counts, notices, and what an update did to the baseline.
    """
    lines = [*tables.explanations(run), *tables.summary(run)]
    if merge is not None:
        kinds = ("new", "changed", "unused", "refused", "older")
        names = {kind: getattr(merge, kind) for kind in kinds}
        called = {"older": "refused as older than stored"}
        said = [
            f"{called.get(kind, kind)}: {text.listing(found)}"
            for kind, found in names.items()
            if found
        ]
        mood: Mood = "bad" if merge.refused else "notice"
        lines.append(Line("; ".join([f"baseline: {merge.summary()}", *said]), mood))
    body = table(run, color).splitlines() if run.cases else ["no case ran"]
    painted = [paint(line.text, line.mood, color) for line in lines]
    return [heading(run), "", *body, "", *painted]
