"""A run as GitHub-flavoured Markdown, in which no foreign text can become markup."""

from __future__ import annotations

import re

from pytest_fastlayer.records import RunRecord
from pytest_fastlayer.report import table as tables
from pytest_fastlayer.report import terminal, text
from pytest_fastlayer.report.table import Line, Mood, Table

_MARKS: dict[Mood, str] = {"good": "\N{WHITE HEAVY CHECK MARK}", "bad": "\N{CROSS MARK}"}
#: What means something in Markdown, HTML or to GitHub (mentions, issue references, links, emoji,
#: formulas), written as entities: the one form that holds inside a table too. GitHub looks for
#: mentions and references once more in the finished text, where an entity is its character again,
#: so these get a zero-width space as well.
_SPECIAL = re.compile(
    r"""[&<>|`*\[\]~@\#\\$]           # markup anywhere
    | (?<![A-Za-z0-9])_ | _(?![A-Za-z0-9])  # emphasis; an underscore within a word is none
    | :(?=//|\w+:) | w(?=ww\.)         # links and emoji
    | (?<=\bG)H(?=-\d)                # GH-1, an issue reference
    """,
    re.VERBOSE,
)
_REFERRING = dict.fromkeys("@#H", "&#8203;")
#: What would start a block inside a list item: another list, a heading's underline.
_BLOCK = re.compile(r"^[-+=]|(?<=^\d)[.)]")


def escape(value: object, limit: int = 400) -> str:
    """``value`` as literal text on one line."""
    return _SPECIAL.sub(_entity, text.plain(value, limit))


def _entity(match: re.Match[str]) -> str:
    return f"&#{ord(match[0])};" + _REFERRING.get(match[0], "")


def table(run: RunRecord) -> str:
    """The whole document: heading, table, reasons and notices, ending in a newline."""
    lines = [f"### fastlayer: {escape(terminal.heading(run))}", ""]
    if run.cases:
        built = tables.build(run)
        lines += [*_rows(built), ""]
        lines += [f"<sub>{built.legend}</sub>", ""] if built.legend else []
    else:
        lines += ["No case ran.", ""]
    lines += [_item(line) for line in [*tables.summary(run), *tables.explanations(run)]]
    return "\n".join(lines) + "\n"


def _rows(built: Table) -> list[str]:
    rows = [[escape(heading) for heading in built.headings]]
    rows.append(["---"] + ["---:"] * (len(built.headings) - 2) + ["---"])
    for row in built.rows:
        cells = [escape(cell.text) for cell in row]
        verdict = row[-1]
        cells[-1] = f"{_MARKS.get(verdict.mood, '')} {cells[-1]}".strip()
        rows.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _item(line: Line) -> str:
    shown = _BLOCK.sub(_entity, escape(line.text))
    return f"- **{shown}**" if line.mood == "bad" else f"- {shown}"
