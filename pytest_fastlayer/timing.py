"""Paired interleaved timing: raw samples of two arms, A = reference and B = candidate.

Blocks run AB BA AB BA: a drift that is linear over a quad cancels in its mean log-ratio. A block
holds as many forwards as fill ``block_ms``. Before the first block both arms settle by wall time
(clocks ramp, allocators and caches fill), in the same alternation: clock and temperature then
stand where the timed pattern keeps them, not where one arm alone would. A budget in seconds
shrinks the settling and the number of quads, never the pairing. What the clocks, NVML and the host
saw beside the samples goes into ``Telemetry``. The statistics are elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

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
from pytest_fastlayer.plan import Plan
from pytest_fastlayer.samples import PairedSamples
from pytest_fastlayer.telemetry import Telemetry

__all__ = [
    "BlockTime",
    "Clock",
    "CpuClock",
    "CudaClock",
    "Plan",
    "Telemetry",
    "TimerPatchedError",
    "clock_for",
    "fill_block",
    "measure",
    "patched_timers",
    "peak_memory",
    "settle_arms",
]

_ARMS = {"A": "reference", "B": "candidate"}
#: Forwards a block may hold: beyond this the Python loop's own list of calls is what is measured.
MAX_FORWARDS = 1_000_000
#: A forward of so many seconds says what it costs at once; a quicker one may have been compiling.
LONG_FORWARD_S = 1.0

Arm = Callable[[], object]
Progress = Callable[[str], None]


class TimerPatchedError(RuntimeError):
    """A timer was replaced while an arm was being timed."""


def measure(
    reference: Arm,
    candidate: Arm,
    *,
    clock: Clock,
    plan: Plan | None = None,
    progress: Progress | None = None,
    skip_settle: bool = False,
    forwards: tuple[int, int] | None = None,
    cost: tuple[float, float] | None = None,
    telemetry: Telemetry | None = None,
    monitor: NvmlMonitor | None = None,
    before_quad: Callable[[int], None] | None = None,
) -> PairedSamples:
    """Time both arms in alternating blocks and return the raw samples.

    The callables take no argument and give fresh inputs themselves if they want any. An extension
    of an earlier measurement passes ``skip_settle=True`` and that measurement's ``forwards``
    (reference, candidate), so that the blocks are alike. ``cost`` is seconds per forward of both
    arms as an earlier step saw it: an arm whose forward outlasts the settling, and a second, is
    then taken as settled. ``before_quad`` is called, untimed, with the number of each quad before
    its first block, to renew what the arms are fed. ``progress`` receives one line now and then.
    ``telemetry`` is filled in place, and may follow a case through its extensions.

    Raises TimerPatchedError when a timer was replaced, before or meanwhile; an exception of an
    arm passes through.
    """
    plan = plan or Plan()
    telemetry = telemetry if telemetry is not None else Telemetry()
    if monitor is None and isinstance(clock, CudaClock):
        monitor = NvmlMonitor(clock.device)
    report: Progress = progress or (lambda text: None)
    _refuse_patched("before the first block")
    begin = _perf_counter()
    collect_garbage()
    _notice_company(telemetry, monitor)
    arms = {"A": reference, "B": candidate}
    if forwards is None or not skip_settle:
        settle = 0.0 if skip_settle else plan.settle(clock)
        costs = dict(zip(arms, cost or (0.0, 0.0), strict=True))
        lively = {k: arm for k, arm in arms.items() if costs[k] < max(LONG_FORWARD_S, settle)}
        if lively:
            telemetry.settle_s = max(telemetry.settle_s, settle)
            names = " and ".join(_ARMS[label] for label in lively)
            report(f"settling {names} for {settle:.1f} s")
            costs |= settle_arms(lively, settle, clock, plan)
        forwards = forwards or (fill_block(costs["A"], plan), fill_block(costs["B"], plan))
    counts = dict(zip("AB", forwards, strict=True))
    samples: dict[str, list[float]] = {"A": [], "B": []}
    readings: list[dict[str, ClockReading | None]] = []
    started = _perf_counter()
    quads, done = plan.quads, 0
    while done < quads:
        if before_quad is not None:
            before_quad(done)
        for order in ("AB", "BA"):
            seen: dict[str, ClockReading | None] = {}
            for label in order:
                block = clock.block(arms[label], counts[label], cold=plan.l2 == "cold")
                seen[label] = monitor.read() if monitor is not None else None
                samples[label].append(block.seconds / counts[label])
                telemetry.note(label, block, cold=plan.l2 == "cold")
            readings.append(seen)
        done += 1
        now = _perf_counter()
        quad_s = (now - started) / done
        quads = plan.quads_within(quad_s, now - begin, done)
        if done % max(1, quads // 10) == 0:
            report(_progress_line(samples, done, quads, quad_s))
    _refuse_patched("while the arms were timed")
    _notice_company(telemetry, monitor)
    telemetry.requested_pairs += 2 * plan.quads
    telemetry.measured_pairs += 2 * done
    keep = telemetry.usable(readings)
    return PairedSamples(
        reference_s=tuple(samples["A"]),
        candidate_s=tuple(samples["B"]),
        order=("AB", "BA") * done,
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


def _notice_company(telemetry: Telemetry, monitor: NvmlMonitor | None) -> None:
    if monitor is not None:
        telemetry.other_processes = max(telemetry.other_processes, monitor.other_processes())


def settle_arms(
    arms: Mapping[str, Arm], seconds: float, clock: Clock, plan: Plan
) -> dict[str, float]:
    """Run the arms in alternating blocks, AB BA, for ``seconds`` of wall time in all.

    Each runs at least twice unless one forward takes long. Blocks grow to what is timed. Returns
    seconds per forward: the median of an arm's last five blocks, so that neither a slow first
    call (lazy compilation, page faults) nor one lucky block decides.
    """
    cold = plan.l2 == "cold"
    latest: dict[str, list[float]] = {label: [] for label in arms}
    forwards = dict.fromkeys(arms, 1)

    def goes_on(label: str) -> bool:
        seen = latest[label]
        known = len(seen) > 1 or (len(seen) == 1 and seen[0] >= LONG_FORWARD_S)
        return not known or _perf_counter() - begin < seconds

    begin = _perf_counter()
    order = list(arms)
    while any(goes_on(label) for label in order):
        for label in filter(goes_on, order):
            block = clock.block(arms[label], forwards[label], cold=cold)
            latest[label].append(block.seconds / forwards[label])
            fill = fill_block(_recent(latest[label]), plan)
            forwards[label] = min(4 * forwards[label], fill)
        order.reverse()
    return {label: _recent(seen) for label, seen in latest.items()}


def _recent(seen: list[float]) -> float:
    return statistics.median(seen[-5:] if len(seen) > 2 else seen[-1:])


def fill_block(forward_s: float, plan: Plan) -> int:
    """Forwards that fill a block."""
    return max(1, min(MAX_FORWARDS, math.ceil(plan.block_ms / 1e3 / max(forward_s, 1e-9))))


def _progress_line(samples: dict[str, list[float]], done: int, quads: int, quad_s: float) -> str:
    ratios = [a / b for a, b in zip(samples["A"], samples["B"], strict=True) if b > 0]
    estimate = f"{statistics.median(ratios):.2f}x" if ratios else "below the timer's step"
    left = quad_s * (quads - done)
    return f"pair {2 * done}/{2 * quads}, {estimate} so far, about {left:.0f} s left"
