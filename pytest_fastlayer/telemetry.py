"""What was seen beside the samples: clocks, throttling, hidden work, company on the device."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_fastlayer import records
from pytest_fastlayer.clocks import BlockTime, Clock
from pytest_fastlayer.nvml import ClockReading
from pytest_fastlayer.plan import Plan

#: A pair is dropped when a block's SM clock differs from its arm's median by more than this.
CLOCK_TOLERANCE = 0.05
#: Hidden work: the device was busy after the timed stream by more than this share of the block
#: and by more than these seconds (a synchronisation call itself takes some microseconds).
HIDDEN_SHARE, HIDDEN_S = 0.03, 200e-6
#: A warning is due when the candidate's blocks take this much more of the host's time than of the
#: clock's, beyond what the reference's do.
HOST_EXCESS = 0.10


@dataclass
class Telemetry:
    """What was seen beside the samples. One object may follow a case through its extensions."""

    settle_s: float = 0.0
    readings: list[ClockReading | None] = field(default_factory=list)
    tails: dict[str, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    host_excess: dict[str, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    other_processes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    requested_pairs: int = 0
    measured_pairs: int = 0

    def note(self, arm: str, block: BlockTime, *, cold: bool) -> None:
        """The wall-clock cross-check of one block (flushing in cold mode is the host's own)."""
        whole = max(block.wall_s, 1e-9)
        self.tails[arm].append(block.tail_s / whole if block.tail_s > HIDDEN_S else 0.0)
        if not cold:
            self.host_excess[arm].append((block.wall_s - block.seconds) / whole)

    def usable(self, readings: Sequence[dict[str, ClockReading | None]]) -> list[bool]:
        """Note the readings of each pair ({arm: reading}); says which pairs to keep."""
        self.readings += [reading for pair in readings for reading in pair.values()]
        return _keep(readings, self.dropped)

    def method(self, clock: Clock, plan: Plan) -> records.Method:
        """The record of how it was timed, with the settling that really took place."""
        return records.Method(
            clock=clock.name,
            l2=plan.l2,
            settle_s=self.settle_s,
            settling="alternating",
            block_ms=plan.block_ms,
        )

    def clocks(self) -> records.Clocks | None:
        """NVML's record; None where NVML gave no reading."""
        seen = [reading for reading in self.readings if reading is not None]
        if not seen:
            return None
        reasons = frozenset[str]().union(*(reading.reasons for reading in seen))
        return records.Clocks(
            sm_mhz_min=min(reading.sm_mhz for reading in seen),
            sm_mhz_max=max(reading.sm_mhz for reading in seen),
            throttle_reasons=tuple(sorted(reasons)),
            other_processes=self.other_processes,
        )

    def dropped_reasons(self) -> tuple[str, ...]:
        """Why pairs were dropped, each reason with its count."""
        return tuple(f"{reason} ({count})" for reason, count in sorted(self.dropped.items()))

    def hidden_work(self) -> str | None:
        """A sentence if the candidate's blocks left the device working after their events."""
        share = _median(self.tails["B"])
        if share - _median(self.tails["A"]) <= HIDDEN_SHARE:
            return None
        return (
            f"the device worked on for {share:.0%} of each block after the candidate's stream had "
            "finished: work runs on another stream that the timed stream does not wait for"
        )

    def probe(self) -> records.Probe:
        """The wall-clock cross-check as an honesty probe."""
        message = self.hidden_work()
        return records.Probe(name="hidden_work", passed=message is None, message=message or "")

    def warnings(self) -> tuple[str, ...]:
        """Sentences for the report: cause first, then what to try."""
        found = []
        if self.measured_pairs < self.requested_pairs:
            found.append(
                f"{self.measured_pairs} of {self.requested_pairs} pairs fitted the time budget; "
                "a larger budget narrows the interval"
            )
        excess = _median(self.host_excess["B"]) - _median(self.host_excess["A"])
        if excess > HOST_EXCESS:
            found.append(
                f"{excess:.0%} of the candidate's wall time is not in its events, more than the "
                "reference's: look for work outside the timed stream"
            )
        if self.other_processes:
            found.append(
                f"{self.other_processes} other process(es) used the device meanwhile; "
                "stop them, or require a quiet device"
            )
        return tuple(found)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _keep(readings: Sequence[dict[str, ClockReading | None]], dropped: Counter[str]) -> list[bool]:
    """Which pairs to keep: no clock off its arm's median, no throttle reason out of the usual.

    Per arm, because two arms may draw different power and so settle at different clocks.
    """
    keep = [True] * len(readings)
    for label in "AB":
        seen = [one[label] for one in readings]
        known = [reading for reading in seen if reading is not None]
        if not known:
            continue
        middle = statistics.median(reading.sm_mhz for reading in known)
        usual = Counter(reading.telling for reading in known).most_common(1)[0][0]
        for pair, reading in enumerate(seen):
            if reading is None or not keep[pair]:
                continue
            if abs(reading.sm_mhz - middle) > CLOCK_TOLERANCE * middle:
                dropped["SM clock moved by more than 5%"] += 1
                keep[pair] = False
            elif reading.telling != usual:
                changed = ", ".join(sorted(reading.telling ^ usual))
                dropped[f"throttle reason changed: {changed}"] += 1
                keep[pair] = False
    return keep
