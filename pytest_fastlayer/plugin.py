"""pytest hooks, and nothing else. Importing this module imports neither torch nor numpy."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fastlayer import devices, originals  # noqa: F401  originals binds the timers first
from pytest_fastlayer.base.protocol import SERVER
from pytest_fastlayer.fixtures import (
    BASE,
    PAYLOADS,
    RUN,
    SETTINGS,
    assert_elementwise,
    paired,
    paired_timing,
    reference,
)
from pytest_fastlayer.options import Settings, add_options, read_settings
from pytest_fastlayer.selection import narrowed
from pytest_fastlayer.session import Run
from pytest_fastlayer.termination import Termination

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

__all__ = ["assert_elementwise", "paired", "paired_timing", "reference"]

MARKERS = (
    "tolerance(atol=0.002, rtol=0.02, mode='either'): per-element tolerance of this test's pairs; "
    "mode 'either' accepts |c-r| <= atol or |c-r| <= rtol*|r|, 'sum' is torch.allclose's rule.",
    "paired_timing(pairs=, settle_s=, block_ms=, min_effect=, l2=, budget_s=, max_case_s=): how "
    "this test's pairs are timed.",
    "seeds(n): accuracy trials of this test's pairs, seeded 1234, 1235, ...",
)
TIMED_FIXTURES = frozenset({"paired", "paired_timing"})


def is_worker(config: pytest.Config) -> bool:
    """True in an xdist worker, False in the controller and without xdist."""
    return hasattr(config, "workerinput")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def _leave_out_torch_trace(config: pytest.Config) -> None:
    """Keep torch's structured trace out of failure reports, live logs and log files.

    The logger ``torch.__trace`` is always at DEBUG and does not propagate. Recent pytest (9.2)
    captures such loggers too, and every torch.compile of a failing test then adds hundreds of
    records without a message (their content goes to TORCH_TRACE's files, as before). ``caplog``
    still sees them.
    """
    capturing = config.pluginmanager.get_plugin("logging-plugin")
    for name in ("report_handler", "log_cli_handler", "log_file_handler"):
        handler = getattr(capturing, name, None)
        if handler is not None:
            handler.addFilter(_is_no_torch_trace)


def _is_no_torch_trace(record: logging.LogRecord) -> bool:
    return record.name != "torch.__trace"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    # Before any conftest, and so before anything imports torch and reads the variable.
    devices.assign_gpu(os.environ)


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    settings = read_settings(config)
    config.stash[SETTINGS] = settings
    run = config.stash[RUN] = Run(settings, root=config.rootpath)
    if settings.bench:
        run.selection.timed_fixtures = TIMED_FIXTURES
        config.pluginmanager.register(run.selection, "fastlayer-selection")
    if is_worker(config):
        _take_base(config)
        return
    config.pluginmanager.register(Recorder(config, run), "fastlayer-recorder")


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    settings = config.stash[SETTINGS]
    _leave_out_torch_trace(config)
    if is_worker(config):
        return
    if settings.pins:
        from pytest_fastlayer.immutable import DigestError, check_pinned

        try:
            for path, digest in settings.pins:
                check_pinned(path, digest)
        except DigestError as error:
            raise pytest.UsageError(str(error)) from None
    _check_outputs(settings)
    if settings.device == "cuda":
        from pytest_fastlayer.environment import DeviceUnavailableError, choose_device

        try:
            choose_device(settings.device)
        except DeviceUnavailableError as error:
            raise pytest.UsageError(str(error)) from None
    if settings.reference is not None:
        from pytest_fastlayer.immutable import ReferenceLoadError, load_reference

        try:
            load_reference(settings.reference)
        except ReferenceLoadError as error:
            raise pytest.UsageError(f"--fastlayer-reference: {error}") from None
    if settings.bench and getattr(config.option, "dist", "no") == "each":
        raise pytest.UsageError(
            "--fastlayer-bench under --dist=each would time every case once per worker on the "
            "same device; use --dist=load (the default of -n), or no -n"
        )
    if SERVER in config.stash:
        return  # the run that this process serves an arm of holds its cases against what is stored
    if settings.bench and not config.option.collectonly:
        _check_baseline(config)
    if settings.base is not None:
        _check_out(settings.base, config)


def _check_outputs(settings: Settings) -> None:
    from pytest_fastlayer.preflight import PreflightError, check_outputs

    try:
        check_outputs(settings)
    except PreflightError as error:
        raise pytest.UsageError(str(error)) from None


def _check_baseline(config: pytest.Config) -> None:
    from pytest_fastlayer.preflight import PreflightError, check_baseline

    try:
        check_baseline(config.stash[SETTINGS], config.stash[RUN].stored)
    except PreflightError as error:
        raise pytest.UsageError(str(error)) from None


def _check_out(rev: str, config: pytest.Config) -> None:
    """The base of the run, once and for all workers; gone when the run is."""
    from pytest_fastlayer.base.trees import BaseRevisionError, Checkout

    if config.stash[SETTINGS].admit:
        raise pytest.UsageError(
            "--fastlayer-base with --fastlayer-admit: the variants of one tree cannot be held "
            "against another's candidate; admit first, then compare"
        )
    try:
        checkout = Checkout(rev, config.rootpath, config.invocation_params.dir)
    except BaseRevisionError as error:
        raise pytest.UsageError(str(error)) from None
    config.add_cleanup(checkout.close)
    config.stash[BASE] = checkout.base


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist: every worker is told where the base was checked out."""
    base = node.config.stash.get(BASE, None)
    if base is not None:
        node.workerinput["fastlayer_base"] = base.dump()


def _take_base(config: pytest.Config) -> None:
    from pytest_fastlayer.base.trees import Base

    dumped = getattr(config, "workerinput", {}).get("fastlayer_base")
    if dumped is not None:
        config.stash[BASE] = Base.load(dumped)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.stash[SETTINGS].bench:
        return
    # As --benchmark-only does: a timed run has no company.
    timed: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    for item in items:
        wanted = TIMED_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        (timed if wanted else rest).append(item)
    if rest:
        items[:] = timed
        config.hook.pytest_deselected(items=rest)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    run = session.config.stash[RUN]
    run.selected = len(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    config = session.config
    if config.stash[SETTINGS].bench and not config.option.collectonly:
        # Under xdist the controller has none: its workers tell of theirs.
        config.stash[RUN].selection.begun(getattr(session, "items", ()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    payloads = item.stash.get(PAYLOADS, [])
    # With the report of the test's call; where a fixture measured, and that is not to come or has
    # been, with the one there is.
    if payloads and (call.when != "setup" or not report.passed):
        # A plain attribute of JSON types: xdist carries it to the controller with the report.
        report.fastlayer = list(payloads)  # type: ignore[attr-defined]
        payloads.clear()
    return report


def _left_behind(session: pytest.Session) -> list[dict[str, Any]]:
    """Cases whose test got no report: the run was broken off while it was on them."""
    return [
        payload
        for item in getattr(session, "items", ())
        for payload in item.stash.get(PAYLOADS, [])
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """xdist: what a worker knows and no report carries goes to the controller at its end."""
    config = session.config
    if is_worker(config) and config.stash[SETTINGS].bench:
        config.workeroutput["fastlayer"] = {  # type: ignore[attr-defined]
            "selection": config.stash[RUN].selection.dump(),
            "cases": _left_behind(session),
        }


#: Exit statuses for which pytest's terminal asks for a summary; others get ours all the same.
_SUMMARIZED = frozenset(pytest.ExitCode) - {pytest.ExitCode.INTERNAL_ERROR}


class Recorder:
    """The controller's side: takes records off reports, judges and writes once all are in."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self.config = config
        self.run = run
        self._termination = Termination()

    def pytest_sessionstart(self) -> None:
        if self.run.settings.bench and SERVER not in self.config.stash:
            self._termination.begin()
            self.config.add_cleanup(self._termination.end)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        payloads: list[dict[str, Any]] = getattr(report, "fastlayer", [])
        for payload in payloads:
            self.run.add(payload, report.nodeid)
        self.run.selection.ended(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """xdist: a worker has ended, and left this unless it crashed."""
        told = getattr(node, "workeroutput", {}).get("fastlayer")
        if told is not None:
            self.run.selection.take(told["selection"])
            self._take(told["cases"])

    def _take(self, payloads: list[dict[str, Any]]) -> None:
        for payload in payloads:
            self.run.add(payload, payload["case"]["nodeid"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        run = self.run
        self._termination.hold()
        self._take(_left_behind(session))
        run.exit_status = exitstatus
        if run.cases:
            from pytest_fastlayer.environment import git_commit

            run.commit = git_commit(self.config.rootpath)
            run.default_json = self._default_json()
        seen = run.selection
        run.complete = not (
            exitstatus or seen.failed or seen.unfinished or seen.deselected or narrowed(session)
        )
        if not run.finish() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._describe_suite()
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and exitstatus not in _SUMMARIZED:
            self.pytest_terminal_summary(reporter)

    def _default_json(self) -> Path | None:
        """Where a benchmark's record goes without ``--fastlayer-json``: into pytest's cache.

        Made now, when there is something to write: a run that benchmarks nothing touches no disk.
        """
        settings, cache = self.run.settings, getattr(self.config, "cache", None)
        if not settings.bench or settings.json is not None or cache is None:
            return None
        try:
            folder: Path = cache.mkdir("fastlayer")
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            folder = Path(tempfile.mkdtemp(prefix="fastlayer-"))
            self.run.notices.append(
                f"pytest's cache cannot be written ({error}), so the record goes to a temporary "
                "folder; --fastlayer-json=PATH gives it another place"
            )
        return folder / "run.json"

    def _describe_suite(self) -> None:
        """Device and software as properties of the suite in pytest's ``--junitxml``.

        By the controller's own writer, not by the ``record_testsuite_property`` fixture: what a
        test records in an xdist worker never reaches the file. pytest writes it after this hook.
        """
        from _pytest.junitxml import xml_key

        xml = self.config.stash.get(xml_key, None)
        if xml is None or not self.run.outcomes:
            return
        from pytest_fastlayer.report import junit

        records = [outcome.record for outcome in self.run.outcomes]
        try:
            properties = junit.suite_properties(records)
        except Exception as error:  # pytest has yet to write its file, which must not suffer
            self.run.errors.append(f"the suite has no properties: {type(error).__name__}: {error}")
            return
        for name, value in properties.items():
            xml.add_global_property(name, value)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        run = self.run
        if run.outcomes and (run.settings.bench or terminalreporter.verbosity > 0):
            from pytest_fastlayer.report import terminal

            for outcome in run.outcomes:
                terminalreporter.section(f"fastlayer: {outcome.record.device.name}")
                color = terminalreporter.hasmarkup
                try:
                    lines = terminal.summary(outcome.record, color=color, merge=outcome.merge)
                except Exception as error:  # what was written, and what was not, is still to come
                    lines = [f"no summary: {type(error).__name__}: {error}"]
                for line in lines:
                    terminalreporter.write_line(line)
        for told in run.errors:
            terminalreporter.write_line(f"fastlayer: {told}", red=True, bold=True)
        for told in run.notices:
            terminalreporter.write_line(f"fastlayer: {told}", yellow=True)
        if terminalreporter.verbosity >= 0:
            for path in run.written:
                terminalreporter.write_line(f"fastlayer: wrote {path}")
