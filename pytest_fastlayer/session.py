"""One run, on the controlling process: gather records, judge the whole, write, report.

Workers only measure and judge their own cases; each record travels on its test's report, so a
worker that dies loses the case it was on and no other. The controller alone writes, after every
verdict is in. A run over two kinds of device (pairs on the CPU beside pairs on a GPU) makes one
record for each: a record describes one device.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fastlayer.options import Settings

if TYPE_CHECKING:
    from pytest_fastlayer.baselines import Merge
    from pytest_fastlayer.gate import Policy
    from pytest_fastlayer.records import CaseRecord, RunRecord


@dataclass
class Outcome:
    """One device's record, once the run is judged, and what became of its baseline."""

    record: RunRecord
    baseline: Path
    merge: Merge | None = None


@dataclass
class Run:
    """Everything a run has gathered so far, and what it made of it."""

    settings: Settings
    commit: str | None = None
    default_json: Path | None = None
    selected: int = 0  #: items left after deselection, in this process
    failed_without_record: int = 0  #: tests that failed before they had anything to record
    interrupted: bool = False
    complete: bool = False  #: every benchmark of the project was selected and ran
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)  #: by device name
    cases: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  #: case name -> nodeid
    errors: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)

    def add(self, payload: Mapping[str, Any], nodeid: str) -> None:
        """Take one case as a worker sent it: ``{"name", "case", "header"}``."""
        name, header = payload["name"], payload["header"]
        if self.owners.setdefault(name, nodeid) != nodeid:
            self.errors.append(
                f"case {name!r} was measured by {self.owners[name]} and by {nodeid}; "
                "give each call of 'paired' a name of its own"
            )
            return
        device = header["device"]["name"]
        self.headers.setdefault(device, dict(header))
        self.cases.setdefault(device, {})[name] = dict(payload["case"])

    def finish(self) -> bool:
        """Judge the run as a whole, write what was asked for; True if nothing is red."""
        if not self.cases:
            if self.settings.update_baseline:
                self.errors.append("no case was measured, so no baseline was updated")
            return not self.errors
        from pytest_fastlayer import baselines, gate
        from pytest_fastlayer.base import judging
        from pytest_fastlayer.records import RunRecord

        policy = make_policy(self.settings, family_size=sum(map(len, self.cases.values())))
        green = True
        for device, raw in self.cases.items():
            before = self._readable(raw, self.headers[device])
            if not before:
                continue
            after = gate.judge_run(before, policy, judging.drop)
            self.errors += newly_red(before, after, policy)
            green &= not any(gate.is_failure(case.verdict, policy) for case in after.values())
            record = RunRecord.model_validate(
                {
                    "created": _now(),
                    "commit": self.commit,
                    "cases": after,
                    **self.headers[device],
                }
            )
            where = baselines.find(self.settings.baseline, record.device)
            self.outcomes.append(Outcome(record, where))
        unknown = sorted(self.settings.accept - set(self.owners))
        if unknown:
            self.errors.append(
                f"--fastlayer-accept={unknown[0]}: this run measured no case of that name; it "
                f"measured {', '.join(sorted(self.owners))}"
            )
        if self.settings.bench:
            self._check_unused()
        self._write()
        if self.settings.update_baseline:
            self._update_baselines()
        return green and not self.errors

    def _readable(
        self, raw: Mapping[str, Mapping[str, Any]], header: Mapping[str, Any]
    ) -> dict[str, CaseRecord]:
        """The cases that a record can hold; one that it cannot is an error, and costs no other."""
        found = {}
        for name, case in raw.items():
            try:
                record = record_of({"name": name, "case": case, "header": header})
            except ValueError as error:  # a BaselineError is one
                self.errors.append(f"case {name!r} was left out of the record: {error}")
            else:
                found[name] = record.cases[name]
        return found

    def _check_unused(self) -> None:
        """A stored case that no test measures any more must be said, or it rots unseen."""
        from pytest_fastlayer import baselines

        if not self.complete or self.settings.update_baseline:
            return
        known = set(self.owners)
        for outcome in self.outcomes:
            try:
                stored = baselines.load(outcome.baseline) if outcome.baseline.exists() else None
            except baselines.BaselineError as error:
                self.errors.append(str(error))
                continue
            unused = [] if stored is None else baselines.unused(stored, known)
            if unused:
                self.errors.append(
                    f"{outcome.baseline.name} stores {', '.join(unused)}, which no test measures "
                    "any more; remove the entry with --fastlayer-update-baseline, or restore the "
                    "test"
                )

    def _write(self) -> None:
        from pytest_fastlayer import baselines

        target = self.settings.json or (self.default_json if self.settings.bench else None)
        for index, outcome in enumerate(self.outcomes):
            if target is not None:
                # One device, one file; further devices get their name in theirs.
                slug = f".{outcome.record.device.slug}" if index else ""
                path = target.with_name(f"{target.stem}{slug}{target.suffix}")
                self._attempt(path, partial(baselines.save, outcome.record, path))
        records = [outcome.record for outcome in self.outcomes]
        if self.settings.markdown is not None:
            from pytest_fastlayer.report import markdown

            def document() -> str:
                return "\n\n".join(markdown.table(record) for record in records) + "\n"

            self._attempt(
                self.settings.markdown, partial(_write_text, self.settings.markdown, document)
            )
        if self.settings.html is not None:
            from pytest_fastlayer.report import html

            page = partial(html.render, records)
            self._attempt(self.settings.html, partial(_write_text, self.settings.html, page))

    def _attempt(self, path: Path, write: Callable[[], object]) -> None:
        """Write one file; a failure is an error of the run, which keeps its other results."""
        from pytest_fastlayer import baselines
        from pytest_fastlayer.report.html import ReportDependencyError

        told = (OSError, baselines.BaselineError, ReportDependencyError)  # these speak for all
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
        except Exception as error:  # whatever a report trips over, the other files are written
            kind = "" if isinstance(error, told) else f"{type(error).__name__}: "
            self.errors.append(f"{path} was not written: {kind}{error}")
        else:
            self.written.append(path)

    def _update_baselines(self) -> None:
        from pytest_fastlayer import baselines

        if self.errors or self.interrupted or self.failed_without_record:
            self.errors.append(
                "no baseline was updated: the run was interrupted, has an error, or a test failed "
                "without a record; the stored files are as they were"
            )
            return
        for outcome in self.outcomes:
            try:
                self._update_baseline(outcome)
            except (OSError, baselines.BaselineError) as error:
                self.errors.append(f"{outcome.baseline.name} was not updated: {error}")

    def _update_baseline(self, outcome: Outcome) -> None:
        from pytest_fastlayer import baselines

        path = outcome.baseline
        path.parent.mkdir(parents=True, exist_ok=True)
        with baselines.locked(path):
            old = baselines.load(path) if path.exists() else None
            accepted = self.settings.accept & set(outcome.record.cases)
            merge = baselines.merge(
                old, outcome.record, accept=accepted, selected_all=self.complete
            )
            outcome.merge = merge
            if merge.refused:
                self.errors.append(
                    f"{path.name} was not updated: not green: {', '.join(merge.refused)}; "
                    "mend them, or accept one by name with --fastlayer-accept CASE"
                )
                return
            baselines.save(merge.record, path)
            self.written.append(path)


def _write_text(path: Path, render: Callable[[], str]) -> None:
    path.write_text(render(), encoding="utf-8")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def record_of(payload: Mapping[str, Any]) -> RunRecord:
    """The record of one case alone, from ``{"name", "case", "header"}``.

    Raises:
        BaselineError: it would not read back as it is, and so could not be written; says why.
    """
    from pytest_fastlayer import baselines
    from pytest_fastlayer.records import RunRecord

    name = payload["name"]
    try:
        record = RunRecord.model_validate(
            {"created": _now(), "cases": {name: payload["case"]}, **payload["header"]}
        )
        text = record.to_json()
        text.encode("utf-8")
        again = baselines.parse(text, source=f"the record of {name!r}")
    except baselines.BaselineError:
        raise
    except ValueError as error:  # pydantic's and the encoders' are such
        raise baselines.BaselineError(
            f"the record of {name!r} cannot be written: {error}"
        ) from None
    if again != record:
        raise baselines.BaselineError(
            f"the record of {name!r} cannot be written: it would read back as another"
        )
    return record


def newly_red(
    before: Mapping[str, CaseRecord], after: Mapping[str, CaseRecord], policy: Policy
) -> Iterable[str]:
    """Cases that only the judgement of the whole run turned red: their items have passed."""
    from pytest_fastlayer import gate

    for name, case in after.items():
        was = gate.is_failure(before[name].verdict, policy)
        if gate.is_failure(case.verdict, policy) and not was:
            yield f"{case.verdict}: {name}: {case.reason}"


def make_policy(settings: Settings, *, family_size: int) -> Policy:
    """The gate's rules for this run."""
    from pytest_fastlayer.gate import Policy

    return Policy(
        alpha=settings.alpha,
        min_speedup=settings.min_speedup,
        require_baseline=settings.require_baseline,
        require_quiet=settings.require_quiet,
        memory_tolerance=settings.memory_tolerance,
        family_size=family_size,
        accepted=settings.accept,
    )
