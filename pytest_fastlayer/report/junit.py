"""JUnit XML of a comparison, by junit-xml; and what pytest's own ``--junitxml`` is told of a run.

Properties belong to the suite: a property of a single test case is not in the xunit2 schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from junit_xml import TestCase, TestSuite, to_xml_report_string

from pytest_fastlayer.records import CaseRecord, RunRecord, Verdict
from pytest_fastlayer.report import table as tables
from pytest_fastlayer.report import text
from pytest_fastlayer.report.table import Column


def render(run: RunRecord, suite: str = "fastlayer-gate") -> str:
    """The XML document: one test case a case; red verdicts are failures, UNSUPPORTED is skipped."""
    columns = tables.columns(run)
    cases = [_case(name, case, suite, columns) for name, case in run.cases.items()]
    document = TestSuite(suite, cases, properties=properties(run))
    xml: str = to_xml_report_string([document], encoding="utf-8")
    return xml


def properties(run: RunRecord) -> dict[str, str]:
    """Where and with what a run was measured; what is unknown is left out."""
    device, software = run.device, run.software
    known = {
        "device": device.name,
        "capability": None if device.capability is None else "{}.{}".format(*device.capability),
        "driver": software.driver,
        "cuda": software.cuda,
        "torch": software.torch,
        "triton": software.triton,
        "python": software.python,
        "commit": run.commit,
        "base": next((c.base.commit or c.base.rev for c in run.cases.values() if c.base), None),
        "created": run.created,
        "schema_version": run.schema_version,
    }
    return {name: text.plain(value) for name, value in known.items() if value is not None}


def suite_properties(runs: Sequence[RunRecord]) -> dict[str, str]:
    """The properties for pytest's own JUnit suite, ``fastlayer.device`` and so on.

    A run over several devices has a record for each; further ones are numbered from 2.
    """
    return {
        f"fastlayer.{name}" if number == 1 else f"fastlayer.{number}.{name}": value
        for number, run in enumerate(runs, 1)
        for name, value in properties(run).items()
    }


def _case(name: str, case: CaseRecord, suite: str, columns: Sequence[Column]) -> TestCase:
    seconds = None if case.timing is None else case.timing.candidate_s
    entry = TestCase(
        text.plain(name, 500), classname=suite, elapsed_sec=seconds, stdout=_figures(case, columns)
    )
    reason = f"{case.verdict.value}: {text.plain(case.reason, 1000) or 'no reason recorded'}"
    if tables.mood(case.verdict) == "bad":
        entry.add_failure_info(message=reason, failure_type=case.verdict.value)
    elif case.verdict is Verdict.UNSUPPORTED:
        entry.add_skipped_info(message=reason)
    return entry


def _figures(case: CaseRecord, columns: Sequence[Column]) -> str:
    """The case's row of the table, one figure a line."""
    shown = [(c.heading.format(unit="ms"), c.show(case, 1e-3)) for c in columns]
    return "\n".join(f"{heading}: {value}" for heading, value in shown if value)
