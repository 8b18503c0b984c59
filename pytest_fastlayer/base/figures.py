"""From the raw samples of sets of processes to the figures of a base. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_fastlayer import gate
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.base import judging
from pytest_fastlayer.base.rounds import ArmName, Rounds
from pytest_fastlayer.clocks import Clock
from pytest_fastlayer.measurement import Schedule
from pytest_fastlayer.records import Ratio
from pytest_fastlayer.samples import PairedSamples, usable_quads
from pytest_fastlayer.telemetry import Telemetry


@dataclass(frozen=True)
class ProcessSet:
    """What one set of processes gave: the rounds, and the head against itself in two of them."""

    rounds: Rounds
    control: PairedSamples


def summarize(
    sets: Sequence[ProcessSet],
    schedule: Schedule,
    clock: Clock,
    policy: gate.Policy,
    company: int = 0,
) -> dict[str, Any]:
    """Figures and verdict of all sets together, as fields of a `records.BaseArm`.

    ``company`` is the number of other processes on the device before ours were there.

    Raises:
        statistics.SamplesError: the samples give no ratio; the error says which verdict fits.
    """
    plan, cold = schedule.plan(), schedule.l2 == "cold"
    controls = [stats.summarize_control(one.control, "candidate").speedup for one in sets]
    # The floor covers the worst of the sets.
    worst = max(range(len(sets)), key=lambda i: abs(math.log(controls[i])))
    telemetry = Telemetry(settle_s=plan.settle(clock), other_processes=company)
    telemetry.requested_pairs = 2 * plan.quads * len(sets)
    telemetry.measured_pairs = sum(2 * len(one.rounds.orders) for one in sets)
    samples = pooled(sets, "base", "head", telemetry, cold=cold)
    timing = stats.summarize(
        samples,
        control=sets[worst].control,
        control_arm="candidate",
        method=telemetry.method(clock, plan),
        min_effect=schedule.min_effect,
        extensions=len(sets) - 1,
        dropped_reasons=telemetry.dropped_reasons(),
        clocks=telemetry.clocks(),
        warnings=telemetry.warnings(),
    )
    effect = stats.minimum_detectable_effect(timing, judging.UNITY)
    timing = timing.model_copy(update={"min_detectable_effect": effect})
    each = [pooled([one], "base", "head", Telemetry(), cold=cold) for one in sets]
    ratios = [float(np.median(usable_quads(one).quad_ratios)) for one in each]
    processes = judging.Processes(
        tuple(ratios), tuple(map(math.log, controls)), schedule.min_effect
    )
    return {
        "timing": timing,
        "verdict": judging.verdict(timing, processes, policy),
        "p_value": judging.p_value(timing, processes),
        "process_ratios": tuple(map(math.exp, ratios)),
        "process_controls": tuple(controls),
        **_over_reference(sets, cold),
    }


def _over_reference(sets: Sequence[ProcessSet], cold: bool) -> dict[str, Any]:
    """What head and base gain over the reference, where that was timed with them."""
    if "reference" not in sets[0].rounds.forwards:
        return {}
    found: dict[str, Any] = {}
    names: tuple[ArmName, ...] = ("head", "base")
    for name in names:
        usable = usable_quads(pooled(sets, "reference", name, Telemetry(), cold=cold))
        low, high = stats.interval(usable.quad_ratios)
        point = math.exp(float(np.median(usable.quad_ratios)))
        found[name] = Ratio(value=point, ci=(math.exp(low), math.exp(high)))
        found["reference_s"] = float(np.median(usable.reference_s))
    return found


def pooled(
    sets: Sequence[ProcessSet],
    first: ArmName,
    second: ArmName,
    telemetry: Telemetry,
    *,
    cold: bool,
) -> PairedSamples:
    """The samples of two arms over all sets, ``first`` in the place of the reference."""
    samples = [one.rounds.pair(first, second, telemetry, cold=cold) for one in sets]
    return functools.reduce(PairedSamples.extended, samples)
