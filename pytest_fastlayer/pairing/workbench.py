"""One (reference, candidate) pair from inputs to a judged record.

The order is the point: accuracy on every seed, then the honesty probes, then time. A pair that
fails a step is recorded with its verdict and never reaches the next, so no speed is ever printed
for a wrong or dishonest candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from pytest_fastlayer import devices, environment, gate, probes
from pytest_fastlayer.base.client import Request
from pytest_fastlayer.feeding import arguments
from pytest_fastlayer.immutable import held_tensors
from pytest_fastlayer.pairing import arms, checking, judging, speed
from pytest_fastlayer.pairing.pair import FIRST_SEED, Draft, Pair, device_of, first_line
from pytest_fastlayer.pairing.terms import Terms
from pytest_fastlayer.records import CaseRecord, Device, Probe, Timing, Verdict
from pytest_fastlayer.session import payload_of
from pytest_fastlayer.stack import with_room
from pytest_fastlayer.stored import Stored

#: Ends a test, or the run, without a failure of it: recorded even before there is a figure.
_BREAKING_OFF = (KeyboardInterrupt, pytest.exit.Exception, pytest.skip.Exception)


@dataclass(frozen=True)
class Outcome:
    """A judged case, the run header (device, software, settings) and why elements failed.

    ``error`` is what was raised after something had been measured: the case is then UNJUDGED, and
    the error is the test's to raise once the case is recorded.
    """

    case: CaseRecord
    header: Mapping[str, Any]
    message: str
    error: BaseException | None = None


@dataclass
class Workbench:
    """Measures and judges pairs for one test item."""

    terms: Terms
    stored: Stored  #: what timed cases are held against
    base: Request | None = None  #: and the base, where the run has one
    watch: probes.Watch = field(default_factory=probes.Watch)  #: taken before the candidate runs

    def __post_init__(self) -> None:
        # Bound before the candidate runs, which could put another in its place.
        self._changes = self.watch.changes

    def run(self, pair: Pair) -> Outcome:
        """Measure and judge a pair.

        What can be known beforehand is looked at first, and raised before anything is measured.
        """
        settings = self.terms.settings
        draft = Draft(
            CaseRecord(
                verdict=Verdict.ACCURATE,
                label=pair.label or pair.name,
                workload=dict(pair.workload),
                work=pair.work,
                reference_sha256=pair.reference.sha256,
                reference_kind=pair.reference_kind,  # type: ignore[arg-type]
                precision=environment.precision_record(),
            )
        )
        device = device_of(arguments(pair.inputs, FIRST_SEED), held_tensors(pair.reference.target))
        header = self.header(device)
        payload_of(pair.name, draft.case, header)
        self.terms.tolerance(pair.tolerance)
        rivals: Sequence[str] = ()
        if settings.bench:
            rivals = arms.rivals_asked(pair, settings)
            self.terms.schedule(device, pair.reference_kind).plan()
            self.stored.of(Device.model_validate(header["device"]))
        checking.check_inputs(pair)
        try:
            with_room(lambda: self._measure(pair, draft, device, header, rivals))
        except BaseException as error:  # a skip or an interrupt, too, must not cost the figures
            if not (draft.has_figures or isinstance(error, _BREAKING_OFF)):
                raise
            why = f"{first_line(error).removesuffix(': ')}, raised while the case was {draft.step}"
            rest = "what" if draft.has_figures else "nothing"
            kept = f"{rest} had been measured{' is kept' if draft.has_figures else ''}"
            case = gate.unjudged(draft.case, f"{why}; {kept}")
            return Outcome(self._unless_tampered(case), header, draft.message, error)
        return Outcome(self._unless_tampered(draft.case), header, draft.message)

    def _unless_tampered(self, case: CaseRecord) -> CaseRecord:
        """The case; DISHONEST and without a speed if the gate is no longer what it was.

        Whatever ran last, a rival too, could have changed what judged it.
        """
        found = self._changes()
        if not found or case.verdict is Verdict.DISHONEST:
            return case
        caught = Probe(
            name="state_at_the_end",
            passed=False,
            message=f"the run was tampered with: {'; '.join(found)}",
        )
        return case.model_copy(
            update={
                "verdict": Verdict.DISHONEST,
                "reason": f"{caught.name}: {caught.message}",
                "probes": (*case.probes, caught),
                "timing": None,
                "rivals": (),
                "comparison": None,
                "base": None,
            }
        )

    def _measure(
        self,
        pair: Pair,
        draft: Draft,
        device: torch.device,
        header: Mapping[str, Any],
        rivals: Sequence[str],
    ) -> None:
        terms, settings = self.terms, self.terms.settings
        locked = partial(devices.device_lock, devices.lock_key_for(device.type))
        if settings.admit and pair.variants:
            with locked(exclusive=True), torch.no_grad():
                arms.time_variants(pair, terms, draft, device)
                pair = arms.with_fastest(pair, terms, draft.case.variants, device)
        with locked(exclusive=False), torch.no_grad():
            checking.check(pair, terms, draft, device, self.watch)
            checking.describe(pair, draft, header)
            if draft.is_accurate:
                draft.step = "stressed"
                checking.check_stress(pair, terms, draft)
        if draft.is_accurate and settings.bench:
            draft.step = "timed"
            with locked(exclusive=True), torch.no_grad():
                speed.time_pair(pair, terms, draft, device, self.watch)
                if draft.case.timing is not None:
                    arms.time_rivals(pair, terms, draft, rivals, device)
                    pair.reference.verify()
            draft.step = "judged"
            judging.judge(pair, terms, draft, header, self.stored)
        if self.base is not None and draft.case.timing is not None:
            draft.step = "held against its base"
            with locked(exclusive=True):
                judging.hold_against_base(pair, terms, draft, self.base, device)

    def time_callables(
        self,
        reference: Callable[..., Any],
        candidate: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Timing:
        """Paired timing alone, for the ``paired_timing`` fixture; judges nothing."""
        device = device_of(args, held_tensors(reference))
        key = devices.lock_key_for(device.type)
        with devices.device_lock(key, exclusive=True), torch.no_grad():
            return with_room(
                lambda: speed.time_callables(self.terms, reference, candidate, args, device)
            )

    def header(self, device: torch.device) -> dict[str, Any]:
        """What every record of this run says of machine and settings."""
        return {
            "device": environment.device_record(device).model_dump(mode="json"),
            "software": environment.software_record().model_dump(mode="json"),
            "settings": {
                name: self.terms.knob(name, device)
                for name in ("pairs", "settle_s", "block_ms", "l2", "min_effect")
            }
            | {"alpha": self.terms.settings.alpha},
        }
