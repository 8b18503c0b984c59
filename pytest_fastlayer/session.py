"""One run, on the controlling process: gather records, judge the whole, write, report.

Workers only measure and judge their own cases; each record travels on its test's report, so a
worker that dies loses the case it was on and no other. The controller alone writes, after every
verdict is in. A run over two kinds of device (pairs on the CPU beside pairs on a GPU) makes one
record for each: a record describes one device.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fastlayer.options import Settings
from pytest_fastlayer.selection import Selection

if TYPE_CHECKING:
    from pytest_fastlayer.baselines import Merge
    from pytest_fastlayer.gate import Policy
    from pytest_fastlayer.records import CaseRecord, RunRecord
    from pytest_fastlayer.stored import Stored


@dataclass
class Outcome:
    """One device's record, once the run is judged, and what became of its baseline."""

    record: RunRecord
    baseline: Path
    merge: Merge | None = None
    is_saved: bool = False  #: in a file, by itself or in the baseline


@dataclass
class Run:
    """Everything a run has gathered so far, and what it made of it."""

    settings: Settings
    commit: str | None = None
    root: Path | None = None  #: the project's folder, which node ids are relative to
    default_json: Path | None = None
    selected: int = 0  #: items left after deselection, in this process
    selection: Selection = field(default_factory=Selection)  #: of all processes
    exit_status: int = 0  #: pytest's, before anything here is judged
    complete: bool = False  #: nothing was left out, and all that was chosen came to its end
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)  #: by device name
    cases: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  #: case name -> nodeid
    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)  #: to be told, and no fault of the run
    outcomes: list[Outcome] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)

    @cached_property
    def stored(self) -> Stored:
        """What this process holds its cases against."""
        from pytest_fastlayer.stored import Stored

        return Stored(self.settings)

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
        unfinished = self.selection.unfinished
        if unfinished and self.exit_status == 0:
            self.errors.append(
                f"the run ended before {_named(unfinished)} came to an end, and yet without a "
                "failure: what was not judged is not green"
            )
        if not self.cases:
            if self.settings.update_baseline:
                self.errors.append("no case was measured, so no baseline was updated")
            return not self.errors
        from pytest_fastlayer import gate
        from pytest_fastlayer.records import RunRecord

        policy = make_policy(self.settings, family_size=sum(map(len, self.cases.values())))
        green = True
        for device, raw in self.cases.items():
            before = self._readable(raw, self.headers[device])
            if not before:
                continue
            after = self._judged(before, policy)
            self.errors += newly_red(before, after, policy)
            self.errors += self._unsaid(before, policy)
            green &= not any(gate.is_failure(case.verdict, policy) for case in after.values())
            record = RunRecord.model_validate(
                {
                    "created": _now(),
                    "commit": self.commit,
                    "cases": after,
                    **self.headers[device],
                }
            )
            self.outcomes.append(Outcome(record, self.stored.path(record.device)))
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
        self._rescue()
        return green and not self.errors

    def _unsaid(self, cases: Mapping[str, CaseRecord], policy: Policy) -> Iterable[str]:
        """Red cases whose test did not fail, so that pytest says nothing of why the run does."""
        from pytest_fastlayer import gate

        for name, case in cases.items():
            owner = self.owners[name]
            if gate.is_failure(case.verdict, policy) and owner not in self.selection.failed:
                yield (
                    f"{case.verdict}: {name}: {case.reason}; the run is red, although {owner} did "
                    "not fail (an xfail, a skip, or a failure that the test caught)"
                )

    def _judged(self, cases: dict[str, CaseRecord], policy: Policy) -> dict[str, CaseRecord]:
        """The cases after the whole run's judgement, or as their items judged them."""
        from pytest_fastlayer import gate
        from pytest_fastlayer.base import judging

        try:
            return gate.judge_run(cases, policy, judging.drop)
        except Exception as error:  # a fault of this plugin's, which must cost no figure
            self.errors.append(
                "the run as a whole could not be judged, and every case has the verdict of its "
                f"test alone: {type(error).__name__}: {error}"
            )
            return cases

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
        for outcome in self.outcomes:
            try:
                stored = self.stored.of(outcome.record.device)
            except baselines.BaselineError as error:
                self.errors.append(str(error))
                continue
            unused = self._gone(stored, outcome)
            if unused:
                self.errors.append(
                    f"{outcome.baseline.name} stores {', '.join(unused)}, which no test measures "
                    "any more; remove the entry with --fastlayer-update-baseline, or restore the "
                    "test"
                )

    def _gone(self, stored: RunRecord | None, outcome: Outcome) -> list[str]:
        """Stored cases that certainly no test measures any more, in the file's order.

        None in a run that left anything out, nor in a file outside the project, whose tests may be
        another's.
        """
        from pytest_fastlayer import baselines

        if stored is None or not self.complete or not self._is_own(outcome.baseline):
            return []
        return [
            name
            for name in baselines.unused(stored, set(self.owners))
            if self.selection.lacks(stored.cases[name].nodeid)
        ]

    def _is_own(self, path: Path) -> bool:
        return self.root is not None and path.resolve().is_relative_to(self.root.resolve())

    def _write(self) -> None:
        from pytest_fastlayer import baselines

        target = self.settings.json or (self.default_json if self.settings.bench else None)
        for index, outcome in enumerate(self.outcomes):
            if target is not None:
                # One device, one file; further devices get their name in theirs.
                slug = f".{outcome.record.device.slug}" if index else ""
                path = target.with_name(f"{target.stem}{slug}{target.suffix}")
                saved = self._attempt(path, partial(baselines.save, outcome.record, path))
                outcome.is_saved = outcome.is_saved or saved
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

    def _attempt(self, path: Path, write: Callable[[], object]) -> bool:
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
            return False
        self.written.append(path)
        return True

    def _rescue(self) -> None:
        """A record that should have gone to a file and went to none is kept in a temporary one.

        As text, unread: it may be what no reader accepts, and still hold what took hours.
        """
        wanted = self.settings.json or self.settings.update_baseline
        for outcome in self.outcomes if wanted else ():
            if outcome.is_saved:
                continue
            try:
                handle, name = tempfile.mkstemp(prefix="fastlayer-run-", suffix=".json")
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(outcome.record.to_json())
            except (OSError, ValueError) as error:
                self.errors.append(f"the record could not be kept in a temporary file: {error}")
            else:
                self.errors.append(f"the record was kept in {name}")

    def _update_baselines(self) -> None:
        from pytest_fastlayer import baselines

        objections = self._objections()
        if objections:
            self.errors.append(
                f"the baseline was not updated: {'; '.join(objections)}; the stored files are as "
                "they were"
            )
            return
        for outcome in self.outcomes:
            try:
                self._update_baseline(outcome)
            except (OSError, baselines.BaselineError) as error:
                self.errors.append(f"{outcome.baseline.name} was not updated: {error}")

    def _objections(self) -> list[str]:
        """Why no stored file may be touched: a baseline is of a run that is green throughout."""
        from pytest_fastlayer import baselines

        found: list[str] = []
        red: list[str] = []
        for outcome in self.outcomes:
            accepted = self.settings.accept & set(outcome.record.cases)
            alone = baselines.merge(None, outcome.record, accept=accepted, selected_all=False)
            red += alone.refused
        if red:
            found.append(
                f"not green: {', '.join(red)} (mend them, or accept one by name with "
                "--fastlayer-accept CASE)"
            )
        if self.selection.failed:
            found.append(f"failed: {_named(list(self.selection.failed))}")
        if self.selection.unfinished:
            found.append(f"not run to the end: {_named(self.selection.unfinished)}")
        if self.exit_status:
            found.append(f"pytest ends with exit status {int(self.exit_status)}")
        if self.errors:
            found.append("the run has the errors told above")
        return found

    def _update_baseline(self, outcome: Outcome) -> None:
        from pytest_fastlayer import baselines

        path = outcome.baseline
        path.parent.mkdir(parents=True, exist_ok=True)
        with baselines.locked(path):
            old = baselines.load(path) if path.exists() else None
            accepted = self.settings.accept & set(outcome.record.cases)
            gone = self._gone(old, outcome)
            if old is not None and gone:
                rest = {name: case for name, case in old.cases.items() if name not in gone}
                old = old.model_copy(update={"cases": rest})
            merge = baselines.merge(old, outcome.record, accept=accepted, selected_all=False)
            outcome.merge = merge
            if merge.refused:
                self.errors.append(
                    f"{path.name} was not updated: not green: {', '.join(merge.refused)}; "
                    "mend them, or accept one by name with --fastlayer-accept CASE"
                )
                return
            outcome.merge = replace(merge, unused=tuple(gone))
            baselines.save(merge.record, path)
            outcome.is_saved = True
            self.written.append(path)
        kept = [] if old is None else baselines.unused(old, set(outcome.record.cases))
        if kept:
            self.notices.append(
                f"{path.name}: {len(kept)} kept: not in this run: {_named(kept)}; 'fastlayer-gate "
                "update RECORD --complete' removes what a record lacks"
            )


def _write_text(path: Path, render: Callable[[], str]) -> None:
    path.write_text(render(), encoding="utf-8")


def _named(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _encodable(value: Any) -> Any:
    """Text that UTF-8 can hold, however deep it lies: a lone surrogate becomes its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return [_encodable(one) for one in value] if isinstance(value, list) else value


def payload_of(name: str, case: CaseRecord, header: Mapping[str, Any]) -> dict[str, Any]:
    """A case as it travels on its test's report, looked over while it is known whose it is.

    Raises:
        BaselineError: a record cannot hold it; says why.
    """
    dumped = {"name": name, "case": case.model_dump(mode="json"), "header": dict(header)}
    payload: dict[str, Any] = _encodable(dumped)
    record_of(payload)
    return payload


def recordable(name: str, case: CaseRecord, header: Mapping[str, Any], why: str) -> CaseRecord:
    """As much of a case as a record can hold, field by field, where it cannot hold the whole.

    Its verdict is UNJUDGED, for the reason ``why``.
    """
    from pytest_fastlayer import baselines
    from pytest_fastlayer.records import CaseRecord, Verdict

    kept = CaseRecord(verdict=Verdict.UNJUDGED, reason=why)
    for field_name in [
        each for each in CaseRecord.model_fields if each not in ("verdict", "reason")
    ]:
        more = kept.model_copy(update={field_name: getattr(case, field_name)})
        try:
            payload_of(name, more, header)
        except baselines.BaselineError:
            continue
        kept = more
    return kept


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
