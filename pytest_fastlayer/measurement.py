"""One timed measurement of a pair: plan, pairs, A/A control, and extensions until it decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pytest_fastlayer import gate, timing
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.records import Probe, Timing

#: Fewest pairs that still make an interval: three AB/BA quads.
MIN_PAIRS = 6

#: What a setting is when neither command line, marker nor ini says otherwise. A CPU's clock is
#: fine and its work slow, so blocks are short and a case must fit a budget.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "pairs": 60,
        "settle_s": 3.0,
        "block_ms": 50.0,
        "budget_s": 60.0,
        "max_case_s": 600.0,
        "min_effect": 0.01,
        "l2": "warm",
        "seeds": 5,
    },
    "cpu": {
        "pairs": 30,
        "settle_s": 0.3,
        "block_ms": 40.0,
        "budget_s": 9.0,
        "max_case_s": 120.0,
        "min_effect": 0.02,
        "l2": "warm",
        "seeds": 5,
    },
}

Progress = Callable[[str], None]


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """A callable that notes its shortest wall time: a rough cost, for planning only."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._device = device
        self.shortest_s = math.inf

    def __call__(self, *args: Any) -> Any:
        synchronize(self._device)
        start = time.perf_counter()
        result = self._function(*args)
        synchronize(self._device)
        self.shortest_s = min(self.shortest_s, time.perf_counter() - start)
        return result


@dataclass(frozen=True)
class Schedule:
    """How long to measure. Seconds, except ``block_ms``; ``min_effect`` is a fraction.

    ``control`` is the share of ``pairs`` that the A/A control takes; 0 leaves it out.
    """

    pairs: int
    settle_s: float
    block_ms: float
    budget_s: float
    l2: Literal["warm", "cold"]
    min_effect: float
    control: float = 1 / 3

    def screening(self, effort: float) -> Schedule:
        """A shorter schedule, without a control, for arms that are compared, not claimed."""
        return replace(
            self,
            pairs=max(MIN_PAIRS, round(effort * self.pairs)),
            settle_s=effort * self.settle_s,
            budget_s=effort * self.budget_s,
            control=0.0,
        )

    def plan(self) -> timing.Plan:
        """The pairs of the arms: two thirds of the budget, or all where there is no control."""
        return self._plan(self.pairs, 2 / 3 if self.control else 1.0)

    def control_plan(self) -> timing.Plan:
        return self._plan(max(MIN_PAIRS, round(self.control * self.pairs)), 1 / 3)

    def _plan(self, pairs: int, share: float) -> timing.Plan:
        return timing.Plan(
            pairs=pairs,
            settle_s=self.settle_s,
            block_ms=self.block_ms,
            budget_s=share * self.budget_s,
            l2=self.l2,
            min_pairs=MIN_PAIRS,
        )


def measure(
    reference: Callable[[], Any],
    candidate: Callable[[], Any],
    device: torch.device,
    cost: tuple[float, float],
    schedule: Schedule,
    policy: gate.Policy,
    progress: Progress,
) -> tuple[Timing, Probe]:
    """Time two callables and say what the pairs show.

    Args:
        reference: A forward of the reference, no arguments.
        candidate: The same of the candidate.
        device: Device that both run on; picks the clock.
        cost: Rough seconds of a forward of each.
        schedule: How long to measure.
        policy: Decides whether an interval that straddles the floor is extended.
        progress: Told what is going on.

    Returns:
        The timing, and the wall-clock cross-check as a probe.

    Raises:
        statistics.SamplesError: the samples give no speedup; the error says which verdict fits.
        timing.TimerPatchedError: a timer was replaced.
    """
    clock = timing.clock_for(device)
    plan = schedule.plan()
    telemetry = timing.Telemetry()
    samples = timing.measure(
        reference,
        candidate,
        clock=clock,
        plan=plan,
        progress=progress,
        telemetry=telemetry,
        cost=cost,
    )
    # An arm against itself shows what the schedule alone reports; the cheaper arm serves where
    # the dearer would not fit the budget.
    affordable = 2 * MIN_PAIRS * cost[0] <= schedule.budget_s / 3
    arm: Literal["reference", "candidate"] = "reference" if affordable else "candidate"
    control = None
    if schedule.control:
        progress(f"A/A control of the {arm}")
        function, forwards = (reference, candidate)[not affordable], samples.forwards
        control = timing.measure(
            function,
            function,
            clock=clock,
            plan=schedule.control_plan(),
            skip_settle=True,
            forwards=(forwards[not affordable],) * 2,
        )
    extensions = 0
    while True:
        summary = stats.summarize(
            samples,
            control=control,
            control_arm=arm,
            method=telemetry.method(clock, plan),
            min_effect=schedule.min_effect,
            extensions=extensions,
            dropped_reasons=telemetry.dropped_reasons(),
            clocks=telemetry.clocks(),
            warnings=telemetry.warnings(),
        )
        if not (schedule.control and gate.needs_extension(summary, policy)):
            return summary, telemetry.probe()
        extensions += 1
        progress(f"inconclusive, extension {extensions} of {gate.MAX_EXTENSIONS}")
        more = timing.measure(
            reference,
            candidate,
            clock=clock,
            plan=plan,
            skip_settle=True,
            forwards=samples.forwards,
            telemetry=telemetry,
        )
        samples = samples.extended(more)
