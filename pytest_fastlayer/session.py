"""One run, on the controlling process: gather records, judge the whole, write, report.

Workers only measure and judge their own cases; each record travels on its test's report, so a
worker that dies loses the case it was on and no other. The controller alone writes, after every
verdict is in.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fastlayer.options import Settings

if TYPE_CHECKING:
    from pytest_fastlayer.baselines import Merge
    from pytest_fastlayer.gate import Policy
    from pytest_fastlayer.records import RunRecord


class DuplicateCaseError(ValueError):
    """Two tests of one run measured a case of the same name."""


@dataclass
class Run:
    """Everything a run has gathered so far."""

    settings: Settings
    default_json: Path | None = None
    commit: str | None = None
    header: dict[str, Any] | None = None  #: device, software and settings, from the first case
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  #: case -> nodeid
    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    selected: int = 0  #: items left after deselection, in this process
    failed_without_record: int = 0  #: tests that failed before they had anything to record
    interrupted: bool = False
    complete: bool = False  #: every benchmark of the project was selected and ran
    record: RunRecord | None = None
    merge: Merge | None = None
    written: list[Path] = field(default_factory=list)

    def add(self, payload: Mapping[str, Any], nodeid: str) -> None:
        """Take one case as a worker sent it: ``{"name", "case", "header"}``."""
        name = payload["name"]
        if name in self.owners and self.owners[name] != nodeid:
            self.errors.append(
                f"case {name!r} was measured by {self.owners[name]} and by {nodeid}; "
                "give each call of 'paired' a name of its own"
            )
            return
        self.owners[name] = nodeid
        self.cases[name] = dict(payload["case"])
        if self.header is None:
            self.header = dict(payload["header"])
        elif self.header["device"] != payload["header"]["device"]:
            # Workers on two GPUs of one model are the same device; anything else is two runs.
            self.errors.append(
                f"case {name!r} ran on {payload['header']['device']['name']}, others on "
                f"{self.header['device']['name']}: one record describes one device"
            )

    def finish(self) -> bool:
        """Judge the run as a whole, write what was asked for; True if nothing is red."""
        if self.header is None:
            return not self.errors
        from pytest_fastlayer import gate
        from pytest_fastlayer.records import CaseRecord, RunRecord

        policy = make_policy(self.settings, family_size=max(1, len(self.cases)))
        before = {name: CaseRecord.model_validate(case) for name, case in self.cases.items()}
        after = gate.judge_run(before, policy)
        for name, case in after.items():
            if gate.is_failure(case.verdict, policy) and not gate.is_failure(
                before[name].verdict, policy
            ):
                self.errors.append(f"case {name}: {case.reason}")
        self.record = RunRecord.model_validate(
            {
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": self.commit,
                "cases": after,
                **self.header,
            }
        )
        self._check_unused(policy)
        self._write()
        return not self.errors and not any(
            gate.is_failure(case.verdict, policy) for case in after.values()
        )

    def _check_unused(self, policy: Policy) -> None:
        """A stored case that no test measures any more must be said, or it rots unseen."""
        from pytest_fastlayer import baselines

        assert self.record is not None
        if not self.settings.bench:
            return
        path = baselines.find(self.settings.baseline, self.record.device)
        if not path.exists():
            return
        stored = baselines.load(path)
        unused = baselines.unused(stored, set(self.record.cases)) if self.complete else []
        if unused and not self.settings.update_baseline:
            self.errors.append(
                f"{path.name} stores {', '.join(unused)}, which no test measures any more; "
                "remove the entry with --fastlayer-update-baseline, or restore the test"
            )

    def _write(self) -> None:
        from pytest_fastlayer import baselines
        from pytest_fastlayer.report import markdown

        assert self.record is not None
        target = self.settings.json or self.default_json
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            baselines.save(self.record, target)
            self.written.append(target)
        if self.settings.markdown is not None:
            self.settings.markdown.parent.mkdir(parents=True, exist_ok=True)
            self.settings.markdown.write_text(markdown.table(self.record), encoding="utf-8")
            self.written.append(self.settings.markdown)
        if self.settings.html is not None:
            from pytest_fastlayer.report import html

            self.settings.html.parent.mkdir(parents=True, exist_ok=True)
            self.settings.html.write_text(html.render([self.record]), encoding="utf-8")
            self.written.append(self.settings.html)
        if self.settings.update_baseline:
            self._update_baseline()

    def _update_baseline(self) -> None:
        from pytest_fastlayer import baselines

        assert self.record is not None
        path = baselines.find(self.settings.baseline, self.record.device)
        if self.errors or self.interrupted or self.failed_without_record:
            self.notices.append(
                f"{path.name} was not updated: the run was interrupted, or a test failed without "
                "a record; the old file is as it was"
            )
            return
        old = baselines.load(path) if path.exists() else None
        self.merge = baselines.merge(
            old, self.record, accept=self.settings.accept, selected_all=self.complete
        )
        if self.merge.refused:
            self.errors.append(
                f"{path.name} was not updated: not green: {', '.join(self.merge.refused)}; "
                "mend them, or accept one by name with --fastlayer-accept CASE"
            )
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        baselines.save(self.merge.record, path)
        self.written.append(path)


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
