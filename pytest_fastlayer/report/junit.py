"""JUnit XML of a comparison, by junit-xml. A run under pytest has pytest's own ``--junitxml``."""

from __future__ import annotations

from junit_xml import TestCase, TestSuite, to_xml_report_string

from pytest_fastlayer.records import CaseRecord, RunRecord, Verdict
from pytest_fastlayer.report import table as tables
from pytest_fastlayer.report import text


def render(run: RunRecord, suite: str = "fastlayer-gate") -> str:
    """The XML document: one test case a case; red verdicts are failures, UNSUPPORTED is skipped."""
    properties = {
        "device": text.plain(run.device.name),
        "commit": text.plain(run.commit or "unknown"),
        "created": text.plain(run.created),
        "schema_version": str(run.schema_version),
    }
    cases = [_case(name, case, suite) for name, case in run.cases.items()]
    document = TestSuite(suite, cases, properties=properties)
    xml: str = to_xml_report_string([document], encoding="utf-8")
    return xml


def _case(name: str, case: CaseRecord, suite: str) -> TestCase:
    seconds = None if case.timing is None else case.timing.candidate_s
    entry = TestCase(
        text.plain(name, 500), classname=suite, elapsed_sec=seconds, stdout=_figures(case)
    )
    reason = f"{case.verdict.value}: {text.plain(case.reason, 1000) or 'no reason recorded'}"
    if tables.mood(case.verdict) == "bad":
        entry.add_failure_info(message=reason, failure_type=case.verdict.value)
    elif case.verdict is Verdict.UNSUPPORTED:
        entry.add_skipped_info(message=reason)
    return entry


def _figures(case: CaseRecord) -> str:
    """The case's row of the table, one figure a line."""
    shown = [(c.heading.format(unit="ms"), c.show(case, 1e-3)) for c in tables.COLUMNS]
    return "\n".join(f"{heading}: {value}" for heading, value in shown if value)
