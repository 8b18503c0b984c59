"""What a run collected, what it brought to its end, and what it therefore knows to be gone.

A stored case may leave a baseline only when it is certain that no test measures it any more. That
a run lacks it proves nothing: its file may have been ignored, its test deselected or skipped, or
the test may choose its cases itself. What proves it is the file, collected without an error and
holding the test no longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

#: Options of pytest and its own plugins that leave items out, by their names in ``config.option``.
_NARROWING = (
    "keyword",
    "markexpr",
    "lf",
    "stepwise",
    "deselect",
    "ignore",
    "ignore_glob",
    "override_ini",  # what a file, a class and a function is called may be another
    "collectonly",
)


def file_of(nodeid: str) -> str:
    """The file's part of a node's id."""
    return nodeid.partition("::")[0]


def narrowed(session: pytest.Session) -> bool:
    """True when what was asked for may leave out some of the project's benchmarks."""
    config = session.config
    return bool(
        any(getattr(config.option, name, None) for name in _NARROWING)
        or config.args_source is pytest.Config.ArgsSource.ARGS
        # From a folder below the root pytest collects that folder alone.
        or config.invocation_params.dir != config.rootpath
        or session.shouldstop
        or session.shouldfail
    )


@dataclass(eq=False)
class Selection:
    """The items of one process, or of all its workers; registered as a plugin, it fills itself.

    Sets of node ids. A worker's comes to the controller by ``dump`` and ``take``.
    """

    timed_fixtures: frozenset[str] = frozenset()
    files: set[str] = field(default_factory=set)  #: collected without an error, also folders
    broken: set[str] = field(default_factory=set)  #: files of which some part was not collected
    collected: set[str] = field(default_factory=set)  #: items, before any was deselected
    chosen: set[str] = field(default_factory=set)  #: and those that were left to run
    deselected: set[str] = field(default_factory=set)  #: timed items that were left out
    finished: set[str] = field(default_factory=set)
    failed: dict[str, None] = field(default_factory=dict)  #: in setup, call or teardown, in order

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed:
            self.files.add(report.nodeid)
        else:
            self.broken.add(file_of(report.nodeid))

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.collected.add(item.nodeid)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            if self.timed_fixtures.intersection(getattr(item, "fixturenames", ())):
                self.deselected.add(item.nodeid)

    def begun(self, items: Iterable[pytest.Item]) -> None:
        """These are to run now."""
        self.chosen.update(item.nodeid for item in items)

    def ended(self, report: pytest.TestReport) -> None:
        """Take one report of a test, on the controlling process."""
        if report.failed:
            self.failed.setdefault(report.nodeid)
        if report.when not in ("setup", "call"):  # a crashed worker's has no phase
            self.finished.add(report.nodeid)

    def dump(self) -> dict[str, list[str]]:
        """What a worker has seen, of the types that xdist carries."""
        kinds = ("files", "broken", "collected", "chosen", "deselected")
        return {kind: sorted(getattr(self, kind)) for kind in kinds}

    def take(self, dumped: Mapping[str, Any]) -> None:
        """Add what a worker has seen."""
        for kind, nodeids in dumped.items():
            getattr(self, kind).update(nodeids)

    @property
    def unfinished(self) -> list[str]:
        """Items that were to run and did not come to their end."""
        return sorted(self.chosen - self.finished)

    def lacks(self, nodeid: str | None) -> bool:
        """Whether it is certain that this item no longer is: its file was read, and has it not."""
        if nodeid is None or file_of(nodeid) not in self.files - self.broken:
            return False
        ungrouped, _, _ = nodeid.rpartition("@")  # "--dist=loadgroup" appends "@group"
        return not {nodeid, ungrouped} & (self.collected | self.chosen)
