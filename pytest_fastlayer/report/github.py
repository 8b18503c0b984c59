"""GitHub Actions: annotations on standard output and the step summary.

The commands are lines of the form ``::error title=...::message``; GitHub asks that percent signs
and line breaks are encoded, and colons and commas too inside properties.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pytest_fastlayer.records import CaseRecord, RunRecord
from pytest_fastlayer.report import markdown, text
from pytest_fastlayer.report import table as tables

_LEVELS = {"bad": "error", "notice": "notice"}
_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


def commands(run: RunRecord) -> list[str]:
    """One workflow command for each case that is red or carries a notice."""
    return [
        _command(_LEVELS[mood], name, case)
        for name, case in run.cases.items()
        if (mood := tables.mood(case.verdict)) in _LEVELS
    ]


def _command(level: str, name: str, case: CaseRecord) -> str:
    title = f"{case.verdict.value} {tables.label(name, case)}".translate(_PROPERTY)
    reason = text.plain(case.reason, 1000) or "no reason recorded"
    path = text.plain(case.nodeid or "").partition("::")[0]
    file = f"file={path.translate(_PROPERTY)}," if path.endswith(".py") else ""
    return f"::{level} {file}title={title}::{reason.translate(_MESSAGE)}"


def write_summary(run: RunRecord, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Append the Markdown report to the step's summary; ``None`` outside GitHub Actions."""
    where = environment.get("GITHUB_STEP_SUMMARY")
    if not where:
        return None
    path = Path(where)
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown.table(run) + "\n")
    return path
