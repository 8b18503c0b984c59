"""One timed measurement of a pair: plan, pairs, A/A control, and extensions until it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pytest_fastlayer import accuracy, gate, timing
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.accuracy_message import explain
from pytest_fastlayer.feeding import Feed
from pytest_fastlayer.probes.run import loosened
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

#: Seeds of the contents that timed blocks work on: none that accuracy was checked with.
FIRST_TIMED_SEED = 1_000_000
MOST_QUADS = 100_000

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Schedule:
    """How long to measure. Seconds, except ``block_ms``; ``min_effect`` is a fraction.

    ``control`` is the share of ``pairs`` that the A/A control takes; 0 leaves it out. With
    ``diagnostic`` the ratio is one AB/BA quad that claims nothing, and the candidate's own time
    rests on a control, which is then never left out.
    """

    pairs: int
    settle_s: float
    block_ms: float
    budget_s: float
    l2: Literal["warm", "cold"]
    min_effect: float
    control: float = 1 / 3
    diagnostic: bool = False

    def shortest_s(self, cost: tuple[float, float]) -> float:
        """Seconds of the fewest pairs that will do, when a forward of each arm takes ``cost``."""
        if self.diagnostic:
            return 2 * sum(cost) + 2 * MIN_PAIRS * cost[1]
        return MIN_PAIRS * sum(cost)

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
        pairs = 2 if self.diagnostic else self.pairs
        return self._plan(pairs, 2 / 3 if self.control else 1.0)

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


class Tap:
    """An arm on a feed, which keeps the last output of each block.

    Both arms are called through one, so that what it costs is the same on both sides.
    """

    def __init__(self, function: Callable[..., Any], feed: Feed) -> None:
        self._function = function
        self._feed = feed
        self.last: Any = None

    def __call__(self) -> Any:
        self.last = output = self._function(*self._feed.args)
        return output


@dataclass
class Watchman:
    """Renews the feed before each quad, and now and then compares what the last quad computed."""

    feed: Feed
    reference: Tap
    candidate: Tap
    tolerance: accuracy.Tolerance | None
    first_seed: int = FIRST_TIMED_SEED
    checks: int = 0
    problem: str = ""

    def before_quad(self, quad: int) -> None:
        if quad and quad & (quad - 1) == 0:  # 1, 2, 4, 8, ...: often enough, whatever the length
            self.compare()
        self.feed.renew(self.first_seed + quad)

    def compare(self) -> None:
        """The two outputs of one quad's last blocks, computed from the same contents."""
        if self.tolerance is None or self.problem:
            return
        self.checks += 1
        found = accuracy.compare(self.candidate.last, self.reference.last, loosened(self.tolerance))
        if not found.passed:
            self.problem = (
                "an output of a timed block is not the reference's on the same contents, though "
                f"it was when it was not timed: {explain(found).splitlines()[0]}"
            )

    def probe(self) -> Probe:
        note = f"{self.checks} timed outputs compared"
        return Probe(name="timed_output", passed=not self.problem, message=self.problem or note)


def measure(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    feed: Feed,
    device: torch.device,
    cost: tuple[float, float],
    schedule: Schedule,
    policy: gate.Policy,
    progress: Progress,
    tolerance: accuracy.Tolerance | None = None,
) -> tuple[Timing, tuple[Probe, ...]]:
    """Time two callables on one feed and say what the pairs show.

    Args:
        reference: The reference itself, not a wrapper: what calls it is timed with it.
        candidate: What is timed against it.
        feed: Their arguments.
        device: Device that both run on; picks the clock.
        cost: Rough seconds of a forward of each.
        schedule: How long to measure.
        policy: Decides whether an interval that straddles the floor is extended.
        progress: Told what is going on.
        tolerance: With one, outputs of timed blocks are compared under it, loosened.

    Returns:
        The timing, and what watched it: the wall-clock cross-check and the timed outputs.

    Raises:
        statistics.SamplesError: the samples give no speedup; the error says which verdict fits.
        timing.TimerPatchedError: a timer was replaced.
    """
    clock = timing.clock_for(device)
    plan = schedule.plan()
    telemetry = timing.Telemetry()
    taps = Tap(reference, feed), Tap(candidate, feed)
    watchman = Watchman(feed, *taps, tolerance)

    def pairs(**options: Any) -> stats.PairedSamples:
        found = timing.measure(
            *taps,
            clock=clock,
            plan=plan,
            telemetry=telemetry,
            before_quad=watchman.before_quad,
            **options,
        )
        watchman.compare()
        watchman.first_seed += MOST_QUADS
        return found

    samples = pairs(progress=progress, cost=cost)
    # An arm against itself shows what the schedule alone reports; the cheaper arm serves where
    # the dearer would not fit the budget.
    affordable = not schedule.diagnostic and 2 * MIN_PAIRS * cost[0] <= schedule.budget_s / 3
    arm: Literal["reference", "candidate"] = "reference" if affordable else "candidate"
    control = None
    if schedule.control or schedule.diagnostic:
        progress(f"A/A control of the {arm}")
        tap, forwards = taps[not affordable], samples.forwards[not affordable]
        control = timing.measure(
            tap,
            tap,
            clock=clock,
            plan=schedule.control_plan(),
            skip_settle=True,
            forwards=(forwards, forwards),
            before_quad=lambda quad: feed.renew(FIRST_TIMED_SEED + quad),
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
            diagnostic=schedule.diagnostic,
        )
        if schedule.diagnostic or not (schedule.control and gate.needs_extension(summary, policy)):
            return summary, (telemetry.probe(), watchman.probe())
        extensions += 1
        progress(f"inconclusive, extension {extensions} of {gate.MAX_EXTENSIONS}")
        samples = samples.extended(pairs(skip_settle=True, forwards=samples.forwards))
