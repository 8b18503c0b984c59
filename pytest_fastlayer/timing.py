"""Paired interleaved timing: raw samples of two arms, A = reference and B = candidate.

Blocks run AB BA AB BA: a drift that is linear over a quad cancels in its mean log-ratio. A block
holds as many forwards as fill ``block_ms``. Both arms settle by wall time before the first block
(clocks ramp, allocators and caches fill); a budget in seconds shrinks the settling and the number
of pairs, never the pairing. What the clocks, NVML and the host saw beside the samples goes into
``Telemetry``. The statistics are elsewhere.
"""

from __future__ import annotations

import math
import statistics as stdlib_statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from pytest_fastlayer import records
from pytest_fastlayer.clocks import (
    BlockTime,
    Clock,
    CpuClock,
    CudaClock,
    _perf_counter,
    clock_for,
    collect_garbage,
    patched_timers,
)
from pytest_fastlayer.memory import peak_memory
from pytest_fastlayer.nvml import ClockReading, NvmlMonitor
from pytest_fastlayer.statistics import PairedSamples

__all__ = [
    "BlockTime",
    "Clock",
    "CpuClock",
    "CudaClock",
    "Plan",
    "Telemetry",
    "TimerPatchedError",
    "clock_for",
    "measure",
    "patched_timers",
    "peak_memory",
]

#: Share of a budget that settling may take.
SETTLE_SHARE = 0.25
#: Forwards a block may hold: beyond this the Python loop's own list of calls is what is measured.
MAX_FORWARDS = 1_000_000
#: A pair is dropped when a block's SM clock differs from its arm's median by more than this.
CLOCK_TOLERANCE = 0.05
#: Hidden work: the device was busy after the timed stream by more than this share of the block
#: and by more than these seconds (a synchronisation call itself takes some microseconds).
HIDDEN_SHARE, HIDDEN_S = 0.03, 200e-6


class TimerPatchedError(RuntimeError):
    """A timer was replaced while an arm was being timed."""


@dataclass(frozen=True)
class Plan:
    """How to time one case.

    ``pairs`` pairs of blocks (rounded up to whole quads), ``settle_s`` seconds per arm before the
    first block (None: the clock's default, 10 s on CUDA, 0.5 s on CPU), blocks of ``block_ms``
    milliseconds, at most ``budget_s`` seconds in all but never fewer than ``min_pairs`` pairs,
    cache ``l2`` warm or cold.
    """

    pairs: int = 100
    settle_s: float | None = None
    block_ms: float = 50.0
    budget_s: float | None = None
    l2: Literal["warm", "cold"] = "warm"
    min_pairs: int = 6

    def __post_init__(self) -> None:
        rules: Sequence[tuple[str, bool, str]] = (
            ("pairs", self.pairs >= 2, "at least 2 (one AB/BA quad)"),
            ("min_pairs", self.min_pairs >= 2, "at least 2 (one AB/BA quad)"),
            ("settle_s", self.settle_s is None or self.settle_s >= 0, "zero or more seconds"),
            ("block_ms", self.block_ms > 0, "more than 0 milliseconds"),
            ("budget_s", self.budget_s is None or self.budget_s > 0, "more than 0 seconds"),
            ("l2", self.l2 in ("warm", "cold"), '"warm" or "cold"'),
        )
        for name, fine, rule in rules:
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected {rule}")

    def settle(self, clock: Clock) -> float:
        """Seconds of settling per arm under this plan's budget."""
        wanted = clock.settle_s if self.settle_s is None else self.settle_s
        if self.budget_s is None:
            return wanted
        return min(wanted, SETTLE_SHARE * self.budget_s / 2)

    def pairs_within(self, pair_s: float, spent_s: float) -> int:
        """Pairs that fit what is left of the budget: even, at least ``min_pairs``."""
        wanted = self.pairs + self.pairs % 2
        if self.budget_s is None:
            return wanted
        fit = math.floor((self.budget_s - spent_s) / max(pair_s, 1e-9))
        least = self.min_pairs + self.min_pairs % 2
        return min(wanted, max(least, fit - fit % 2))


@dataclass
class Telemetry:
    """What was seen beside the samples. One object may follow a case through its extensions."""

    settle_s: float = 0.0
    readings: list[tuple[ClockReading | None, ClockReading | None]] = field(default_factory=list)
    tails: dict[str, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    host_excess: dict[str, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    other_processes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    requested_pairs: int = 0
    measured_pairs: int = 0

    def method(self, clock: Clock, plan: Plan) -> records.Method:
        """The record of how it was timed, with the settling that really took place."""
        return records.Method(
            clock=clock.name, l2=plan.l2, settle_s=self.settle_s, block_ms=plan.block_ms
        )

    def clocks(self) -> records.Clocks | None:
        """NVML's record; None where NVML gave no reading."""
        seen = [reading for pair in self.readings for reading in pair if reading is not None]
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
        shares = self.tails["B"]
        if not shares:
            return None
        share = stdlib_statistics.median(shares)
        reference = stdlib_statistics.median(self.tails["A"]) if self.tails["A"] else 0.0
        if share - reference <= HIDDEN_SHARE:
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
        if self.other_processes:
            found.append(
                f"{self.other_processes} other process(es) used the device meanwhile; "
                "stop them, or require a quiet device"
            )
        return tuple(found)


def measure(
    reference: Callable[[], object],
    candidate: Callable[[], object],
    *,
    clock: Clock,
    plan: Plan | None = None,
    progress: Callable[[str], None] | None = None,
    skip_settle: bool = False,
    forwards: tuple[int, int] | None = None,
    telemetry: Telemetry | None = None,
    monitor: NvmlMonitor | None = None,
) -> PairedSamples:
    """Time both arms in alternating blocks and return the raw samples.

    The callables take no argument and give fresh inputs themselves if they want any. An extension
    of an earlier measurement passes ``skip_settle=True`` and that measurement's ``forwards``
    (reference, candidate), so that the blocks are alike. ``progress`` receives one line now and
    then. ``telemetry`` is filled in place.

    Raises TimerPatchedError when a timer was replaced, before or meanwhile; an exception of an
    arm passes through.
    """
    plan = plan or Plan()
    telemetry = telemetry if telemetry is not None else Telemetry()
    if monitor is None and isinstance(clock, CudaClock):
        monitor = NvmlMonitor(clock.device)
    _refuse_patched("before the first block")
    begin = _perf_counter()
    collect_garbage()
    arms = {"A": reference, "B": candidate}
    estimates: dict[str, float] = {}
    if forwards is None or not skip_settle:
        settle = 0.0 if skip_settle else plan.settle(clock)
        telemetry.settle_s = settle
        for label, fn in arms.items():
            if progress:
                progress(f"settling {'reference' if label == 'A' else 'candidate'} {settle:.1f} s")
            estimates[label] = _settle(fn, settle, clock, cold=plan.l2 == "cold")
    if forwards is None:
        forwards = (_fill(estimates["A"], plan), _fill(estimates["B"], plan))
    counts = dict(zip("AB", forwards, strict=True))
    if estimates:
        pair_s = sum(counts[label] * seconds for label, seconds in estimates.items())
    else:
        pair_s = 2 * plan.block_ms / 1e3
    pairs = plan.pairs_within(pair_s, _perf_counter() - begin)
    telemetry.requested_pairs += plan.pairs
    telemetry.measured_pairs += pairs

    samples: dict[str, list[float]] = {"A": [], "B": []}
    orders = []
    readings: list[dict[str, ClockReading | None]] = []
    for pair in range(pairs):
        order = "AB" if pair % 2 == 0 else "BA"
        seen: dict[str, ClockReading | None] = {}
        for label in order:
            block = clock.block(arms[label], counts[label], cold=plan.l2 == "cold")
            seen[label] = monitor.read() if monitor is not None else None
            samples[label].append(block.seconds / counts[label])
            _note(telemetry, label, block, cold=plan.l2 == "cold")
        orders.append(order)
        readings.append(seen)
        if progress and (pair + 1) % max(1, pairs // 10) == 0:
            progress(_progress_line(samples, pair + 1, pairs, _perf_counter() - begin))
    _refuse_patched("while the arms were timed")
    if monitor is not None:
        telemetry.other_processes = max(telemetry.other_processes, monitor.other_processes())
    telemetry.readings += [(one["A"], one["B"]) for one in readings]
    keep = _keep(readings, telemetry.dropped)
    return PairedSamples(
        reference_s=tuple(samples["A"]),
        candidate_s=tuple(samples["B"]),
        order=tuple(orders),
        forwards=forwards,
        resolution_s=clock.resolution_s,
        keep=None if all(keep) else tuple(keep),
    )


def _refuse_patched(when: str) -> None:
    patched = patched_timers()
    if patched:
        raise TimerPatchedError(
            f"{', '.join(patched)} replaced {when}: whoever replaces a timer sets its own time. "
            "Remove the patch (freezegun and the like too) from the tests that are timed"
        )


def _settle(fn: Callable[[], object], seconds: float, clock: Clock, *, cold: bool) -> float:
    """Run ``fn`` for ``seconds`` of wall time, at least twice unless one call outlasts them.

    Returns seconds per forward: the least of the last blocks, which a slow first call (lazy
    compilation, page faults) does not touch.
    """
    begin = _perf_counter()
    first = clock.block(fn, 1, cold=cold).seconds
    latest = [first]
    repeat = 1
    while True:
        elapsed = _perf_counter() - begin
        if elapsed >= seconds and (len(latest) > 1 or first >= max(1.0, seconds)):
            return min(latest[-3:])
        per_forward = max(min(latest[-3:]), 1e-9)
        repeat = max(1, min(4 * repeat, math.ceil(0.02 / per_forward)))
        latest.append(clock.block(fn, repeat, cold=cold).seconds / repeat)


def _fill(forward_s: float, plan: Plan) -> int:
    """Forwards that fill a block."""
    return max(1, min(MAX_FORWARDS, math.ceil(plan.block_ms / 1e3 / max(forward_s, 1e-9))))


def _note(telemetry: Telemetry, label: str, block: BlockTime, *, cold: bool) -> None:
    """The wall-clock cross-check of one block."""
    whole = max(block.wall_s, 1e-9)
    telemetry.tails[label].append(block.tail_s / whole if block.tail_s > HIDDEN_S else 0.0)
    if not cold:
        telemetry.host_excess[label].append((block.wall_s - block.seconds) / whole)


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
        middle = stdlib_statistics.median(reading.sm_mhz for reading in known)
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


def _progress_line(samples: dict[str, list[float]], done: int, pairs: int, elapsed: float) -> str:
    ratios = [a / b for a, b in zip(samples["A"], samples["B"], strict=True) if b > 0]
    estimate = f"{stdlib_statistics.median(ratios):.2f}x" if ratios else "below the timer's step"
    left = elapsed / done * (pairs - done)
    return f"pair {done}/{pairs}, {estimate} so far, about {left:.0f} s left"


def device_of(clock: Clock) -> torch.device:
    """The device a clock times."""
    return clock.device if isinstance(clock, CudaClock) else torch.device("cpu")
