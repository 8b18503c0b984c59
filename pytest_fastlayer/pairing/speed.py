"""Paired timing of what was found right and honest, and what is asked of it once it was timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pytest_fastlayer import gate, measurement, probes, timing, tracing
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.feeding import Feed, Stopwatch, arguments
from pytest_fastlayer.memory import peak_memory
from pytest_fastlayer.pairing.pair import DEAR_S, FIRST_SEED, Draft, Pair, first_line
from pytest_fastlayer.pairing.terms import Terms
from pytest_fastlayer.records import PeakMemory, Probe, Timing, Verdict


def time_pair(
    pair: Pair, terms: Terms, draft: Draft, device: torch.device, watch: probes.Watch
) -> None:
    """Peak memory, paired timing, one more accuracy check, and traces where asked for."""
    schedule, cost = terms.schedule(device, pair.reference_kind), draft.cost
    shortest, limit = schedule.shortest_s(cost), terms.knob("max_case_s", device)
    if shortest > limit:
        draft.add(
            verdict=Verdict.UNSUPPORTED,
            reason=f"the shortest timing would take {shortest:,.0f} s of the {limit:,.0f} s a "
            "case may take (--fastlayer-max-case)",
        )
        return
    args = arguments(pair.inputs, FIRST_SEED)
    reference = partial(pair.reference, *args)
    candidate = partial(pair.candidate, *args)
    peak = PeakMemory(
        reference=peak_memory(reference, device), candidate=peak_memory(candidate, device)
    )
    try:
        measured, watched = measurement.measure(
            pair.reference.target,
            pair.candidate,
            Feed(args, pair.inputs),
            device,
            cost,
            schedule,
            terms.policy(),
            terms.progress,
            terms.tolerance(pair.tolerance),
        )
    except stats.SamplesError as error:
        draft.case = gate.judge_failure(draft.case, error)
        return
    except timing.TimerPatchedError as error:
        draft.add(verdict=Verdict.DISHONEST, reason=str(error))
        return
    draft.add(timing=measured, peak_mib=peak, probes=(*draft.case.probes, *watched))
    after = (*_after_timing(pair, terms, draft), watch.probe("state_after_timing"))
    draft.add(probes=(*draft.case.probes, *after))
    lost = _traces(pair, terms, draft, device, reference, candidate)
    if lost:
        warnings = (*measured.warnings, *lost)
        draft.add(timing=measured.model_copy(update={"warnings": warnings}))


def _after_timing(pair: Pair, terms: Terms, draft: Draft) -> tuple[Probe, ...]:
    """Still right once it has been timed, on contents that it was not timed on?

    Left out where it would take another forward of a reference that takes seconds.
    """
    seed, expected = draft.spare or (FIRST_SEED + 1, None)
    if expected is None and draft.cost[0] > DEAR_S:
        return ()
    feed = partial(arguments, pair.inputs)
    tolerance = terms.tolerance(pair.tolerance)
    return (
        probes.after_timing(
            pair.reference, pair.candidate, feed, seed, tolerance, expected=expected
        ),
    )


def _traces(
    pair: Pair,
    terms: Terms,
    draft: Draft,
    device: torch.device,
    reference: Callable[[], Any],
    candidate: Callable[[], Any],
) -> list[str]:
    """A trace of each arm, where asked for. Returns what became of those that failed.

    The case has been measured: what an arm does under a profiler does not undo that.
    """
    lost: list[str] = []
    if terms.settings.trace is None:
        return lost
    for arm, function, route, module, forward_s in (
        ("reference", reference, pair.reference_kind, pair.reference.target, draft.cost[0]),
        ("candidate", candidate, draft.case.route or "", None, draft.cost[1]),
    ):
        terms.progress(f"trace of the {arm}")
        try:
            tracing.trace(
                function,
                device,
                terms.settings.trace,
                f"{pair.name}-{arm}",
                route=route,
                module=module,
                forward_s=forward_s,
            )
        except Exception as error:  # an arm's own, the profiler's, or the disk's
            lost.append(f"no trace of the {arm}: {first_line(error)}")
    return lost


def time_callables(
    terms: Terms,
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    args: tuple[Any, ...],
    device: torch.device,
) -> Timing:
    """Paired timing alone; judges nothing."""
    watches = Stopwatch(reference, device), Stopwatch(candidate, device)
    for watch in watches:
        watch(*args)
    measured, _ = measurement.measure(
        getattr(reference, "target", reference),
        candidate,
        Feed(args),
        device,
        (watches[0].shortest_s, watches[1].shortest_s),
        terms.schedule(device),
        terms.policy(),
        terms.progress,
    )
    return measured
