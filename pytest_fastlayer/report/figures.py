"""What a README shows of stored baselines: a table and two pictures a device, all regenerable.

``fastlayer-gate figures`` writes them. A table replaces what stands between

    <!-- table:begin nvidia-h200.json -->
    <!-- table:end -->

in a document; the pictures are ``<name>-speedup.svg`` and ``<name>-budget.svg``. Nothing in them
depends on the day, the machine or a random number, so that one command shows whether they are
still what the baselines say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_fastlayer.records import RunRecord
from pytest_fastlayer.report import markdown

BEGIN, END = "<!-- table:begin {} -->", "<!-- table:end -->"
_TABLE = re.compile(r"<!-- table:begin (\S+) -->\n.*?<!-- table:end -->", re.DOTALL)


class FigureError(ValueError):
    """A document names a table whose record was not given."""


def pictures(name: str, run: RunRecord) -> dict[str, str]:
    """File name -> SVG: the speedup and the budget used of every case, with their device.

    ``name`` is the record's file name without suffix. A picture without a figure is left out.
    """
    from pytest_fastlayer.report import drawings, plots

    # "13" alone says nothing beside an axis.
    cases = {f"case {n}" if n.isdigit() else n: case for n, case in run.cases.items()}
    where = f"{run.device.name}, {run.provenance} {run.created[:10]}"
    drawn = {}
    rows = drawings.speedups(cases)
    if rows:
        drawn[f"{name}-speedup.svg"] = plots.intervals(
            rows,
            "reference time / candidate time (grey: 1 to 1 + noise floor)",
            title=f"Speedup: {where}",
        )
    used = drawings.budgets(cases)
    if used:
        drawn[f"{name}-budget.svg"] = plots.shares(
            used, "share of the tolerance (1 fails)", title=f"Worst element: {where}"
        )
    return {file: plots.standalone(svg) for file, svg in drawn.items()}


def with_tables(document: str, records: Mapping[str, RunRecord]) -> str:
    """``document`` with each marked table made anew from the record of that file name.

    Raises:
        FigureError: a table is marked for a record that is not among ``records``.
    """

    def made(match: re.Match[str]) -> str:
        name = match[1]
        if name not in records:
            given = ", ".join(sorted(records)) or "none"
            raise FigureError(f"a table is marked for {name}, which was not given (given: {given})")
        return f"{BEGIN.format(name)}\n\n{markdown.table(records[name])}\n{END}"

    return _TABLE.sub(made, document)


def expected(
    records: Mapping[Path, RunRecord], documents: Iterable[Path], folder: Path | None
) -> dict[Path, str]:
    """Every file that the records determine -> its text; nothing is written.

    ``records`` by the path of their files; ``documents`` hold marked tables, ``folder`` takes the
    pictures.
    """
    files = {
        document: with_tables(
            document.read_text(encoding="utf-8"), {path.name: run for path, run in records.items()}
        )
        for document in documents
    }
    if folder is not None:
        for path, run in records.items():
            files |= {folder / name: svg for name, svg in pictures(path.stem, run).items()}
    return files


def outdated(files: Mapping[Path, str]) -> list[Path]:
    """Those of ``files`` that do not exist or hold something else."""
    return [
        path
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
