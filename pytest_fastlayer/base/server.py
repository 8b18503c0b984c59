"""In the process of one arm: pytest's events and the pair, told and commanded over the channel.

``Server`` is a pytest plugin. The ``paired`` fixture hands its pair to it instead of judging it;
the one that the run asked for is then served until the run has had enough.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fastlayer.base.protocol import SERVER, Channel, Closed
from pytest_fastlayer.records import CaseRecord, Verdict

if TYPE_CHECKING:
    from pytest_fastlayer.base.arms import ServedPair

#: How much of a traceback travels; the log holds all of it.
TEXT_LIMIT = 4000


class Server:
    """Tells the run what becomes of the test, and serves its pair."""

    def __init__(self, channel: Channel, job: dict[str, Any]) -> None:
        self._channel = channel
        self._job = job
        self._others: list[str] = []
        self._is_done = False

    def _tell(self, event: str, **facts: Any) -> None:
        with suppress(Closed):  # nobody is left to be told
            self._channel.send({"event": event} | facts)

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[SERVER] = self

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell("uncollected", text=str(report.longrepr)[-TEXT_LIMIT:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_done:
            if report.when == "teardown":
                # The test has been torn down. What other plugins make of a session's end, and
                # what libraries do at an interpreter's, only keeps the run waiting.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self._tell("skipped", text=str(reason)[:TEXT_LIMIT])
        elif report.failed:
            self._tell("failed", text=str(report.longrepr)[-TEXT_LIMIT:])

    def finished(self, code: int) -> None:
        """The test is over, and the pair was never asked for, or was served to its end."""
        self._tell("end", code=code, others=self._others)

    def unsupported(self, name: str, reason: str) -> None:
        """The test refused a case on this machine."""
        if name == self._job["case"]:
            self._tell("unsupported", text=reason)

    def serve(self, pair: ServedPair) -> CaseRecord:
        """Serve ``pair`` if it is the one; another of the same test is passed over.

        Raises:
            pytest.skip.Exception: once the run has had enough, so that the test is torn down.
        """
        if pair.name != self._job["case"]:
            self._others.append(pair.name)
            return CaseRecord(verdict=Verdict.ACCURATE, reason="not the case that is served")
        from pytest_fastlayer.base.arms import Arms
        from pytest_fastlayer.stack import with_room

        with suppress(Closed):
            with_room(lambda: Arms(pair, self._job).obey(self._channel))
        self._is_done = True
        pytest.skip("the pair was served")
