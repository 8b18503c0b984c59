"""One (reference, candidate) pair from inputs to a judged record.

The order is the point: accuracy on every seed, then the honesty probes, then time. A pair that
fails a step is recorded with its verdict and never reaches the next, so no speed is ever printed
for a wrong or dishonest candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pytest_fastlayer import devices, environment, probes
from pytest_fastlayer.base.client import Request
from pytest_fastlayer.feeding import arguments
from pytest_fastlayer.immutable import held_tensors
from pytest_fastlayer.pairing import arms, checking, judging, speed
from pytest_fastlayer.pairing.pair import FIRST_SEED, Draft, Pair, device_of
from pytest_fastlayer.pairing.terms import Terms
from pytest_fastlayer.records import CaseRecord, Timing, Verdict


@dataclass(frozen=True)
class Outcome:
    """A judged case, the run header (device, software, settings) and why elements failed."""

    case: CaseRecord
    header: Mapping[str, Any]
    message: str


@dataclass
class Workbench:
    """Measures and judges pairs for one test item."""

    terms: Terms
    base: Request | None = None  #: the base that timed cases are held against
    watch: probes.Watch = field(default_factory=probes.Watch)  #: taken before the candidate runs

    def run(self, pair: Pair) -> Outcome:
        """Measure and judge a pair."""
        terms, settings = self.terms, self.terms.settings
        device = device_of(arguments(pair.inputs, FIRST_SEED), held_tensors(pair.reference.target))
        header = self.header(device)
        locked = partial(devices.device_lock, devices.lock_key_for(device.type))
        checking.check_inputs(pair)
        rivals = arms.rivals_asked(pair, settings)
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
        if settings.admit and pair.variants:
            with locked(exclusive=True), torch.no_grad():
                draft.add(variants=arms.time_variants(pair, terms, device))
                pair = arms.with_fastest(pair, draft.case.variants)
        with locked(exclusive=False), torch.no_grad():
            checking.check(pair, terms, draft, device, self.watch)
            if draft.is_accurate:
                checking.check_stress(pair, terms, draft)
        if draft.is_accurate and settings.bench:
            with locked(exclusive=True), torch.no_grad():
                speed.time_pair(pair, terms, draft, device, self.watch)
                if draft.case.timing is not None:
                    draft.add(rivals=arms.time_rivals(pair, terms, rivals, device))
                    pair.reference.verify()
            judging.judge(pair, terms, draft, header)
        if self.base is not None and draft.case.timing is not None:
            with locked(exclusive=True):
                judging.hold_against_base(pair, terms, draft, self.base, device)
        return Outcome(draft.case, header, draft.message)

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
            return speed.time_callables(self.terms, reference, candidate, args, device)

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
