"""Further arms of a pair: its rivals, and the variants that its candidate could run as.

An arm is checked and timed against the same reference, in less time: enough to rank, not to claim.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from pytest_fastlayer import accuracy, environment, gate, measurement
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.feeding import Feed, Stopwatch, arguments
from pytest_fastlayer.memory import peak_memory
from pytest_fastlayer.options import Settings
from pytest_fastlayer.pairing.pair import (
    ENDS_RUN,
    FIRST_SEED,
    RAISED,
    Draft,
    Pair,
    UnknownRivalError,
    first_line,
)
from pytest_fastlayer.pairing.terms import Terms
from pytest_fastlayer.records import Arm, CaseRecord, Verdict

#: Share of a full measurement that a rival or a variant gets: enough to rank, not to claim.
RIVAL_EFFORT, VARIANT_EFFORT = 0.25, 0.1

#: Variants within so many times the seconds of the fastest are timed against it.
NEAR = 1.25


def rivals_asked(pair: Pair, settings: Settings) -> Sequence[str]:
    """Names of the pair's rivals that ``--fastlayer-rival`` asks for.

    Raises:
        UnknownRivalError: the pair offers rivals, and not this one.
    """
    unknown = [name for name in settings.rivals if name not in pair.rivals]
    if unknown and pair.rivals:
        raise UnknownRivalError(
            f"--fastlayer-rival={unknown[0]}: {pair.name} offers {', '.join(sorted(pair.rivals))}"
        )
    return [name for name in settings.rivals if name in pair.rivals]


def time_rivals(
    pair: Pair, terms: Terms, draft: Draft, names: Sequence[str], device: torch.device
) -> None:
    """These rivals, each measured with a quarter of the effort of the pair itself."""
    for name in names:
        arm = _arm(pair, terms, name, pair.rivals[name], device, RIVAL_EFFORT)
        draft.add(rivals=(*draft.case.rivals, arm))


def time_variants(pair: Pair, terms: Terms, draft: Draft, device: torch.device) -> None:
    """The variants that ``--fastlayer-variant`` leaves, all without it."""
    globs = terms.settings.variants or ("*",)
    for name, factory in pair.variants.items():
        if any(fnmatchcase(name, glob) for glob in globs):
            arm = _arm(pair, terms, name, factory, device, VARIANT_EFFORT)
            draft.add(variants=(*draft.case.variants, arm))


def with_fastest(pair: Pair, terms: Terms, arms: Sequence[Arm], device: torch.device) -> Pair:
    """The pair with the fastest variant that passes as its candidate; its notes say which.

    Their ratios to the reference do not rank them: an eager reference is as fast as the host is at
    that moment, which favours whoever meets it slow. Nor do their seconds, where they are near:
    clocks drift. So what is near the fastest is timed against it, pair by pair, and takes its place
    only if the whole interval says so. Where none passes, the pair keeps its own candidate and is
    judged as it stands.

    No more than two variants live at once. One that cannot be built again, or that raises beside
    what leads, is left out: what leads goes on leading, and the notes say so. Before the first
    that can, the pair's own candidate leads.
    """
    seconds = {
        arm.name: arm.timing.candidate_s
        for arm in arms
        if arm.verdict is Verdict.PASS and arm.timing
    }
    if not seconds:
        return pair
    ranked = sorted(seconds, key=seconds.__getitem__)
    notes: list[str] = []
    first: str | None = None
    champion = pair.candidate
    for name in ranked:
        if first is not None and seconds[name] > NEAR * seconds[first]:
            break
        terms.progress(f"arm {name}" if first is None else f"arm {name} against {first}")
        challenger = _built(pair, name, notes, device)
        if challenger is None:
            continue
        if first is None:
            first, champion = name, challenger
        else:
            cost = seconds[first], seconds[name]
            try:
                if _is_faster(pair, terms, challenger, champion, cost, device):
                    first, champion = name, challenger
            except ENDS_RUN:
                raise
            except RAISED as error:
                notes.append(
                    f"variant {name} beside {first}: {first_line(error)}; {first} went on leading"
                )
        del challenger  # before the next is built, which may need its memory
    took = "the pair's own candidate" if first is None else f"variant {first} for the candidate"
    notes.insert(0, f"--fastlayer-admit took {took}")
    return replace(pair, candidate=champion, describe=partial(_with_notes, pair.describe, notes))


def _built(
    pair: Pair, name: str, notes: list[str], device: torch.device
) -> Callable[..., Any] | None:
    """A variant built once more, in the memory of those that are gone; None where it cannot be."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return pair.variants[name]()
    except ENDS_RUN:
        raise
    except RAISED as error:
        notes.append(f"variant {name} could not be built again: {first_line(error)}")
        return None


def _with_notes(
    describe: Callable[[Callable[..., Any]], Any] | None,
    notes: Sequence[str],
    candidate: Callable[..., Any],
) -> Any:
    """What ``describe`` says of the candidate, with further notes; what is no such is passed on."""
    described = {} if describe is None else describe(candidate)
    if not isinstance(described, Mapping):
        return described
    own = described.get("notes", ())
    return {**described, "notes": [*notes, *own] if isinstance(own, list | tuple) else own}


def _is_faster(
    pair: Pair,
    terms: Terms,
    challenger: Callable[..., Any],
    champion: Callable[..., Any],
    cost: tuple[float, float],
    device: torch.device,
) -> bool:
    args = arguments(pair.inputs, FIRST_SEED)
    for function in (champion, challenger):
        function(*args)  # compiles and captures: not its price
    try:
        found, _ = measurement.measure(
            champion,
            challenger,
            Feed(args, pair.inputs),
            device,
            cost,
            terms.schedule(device, pair.reference_kind).screening(VARIANT_EFFORT),
            terms.policy(),
            terms.progress,
        )
    except stats.SamplesError:  # no pairs to compare
        return False
    return found.ci is not None and found.ci[0] > 1.0


def _arm(
    pair: Pair,
    terms: Terms,
    name: str,
    factory: Callable[[], Callable[..., Any]],
    device: torch.device,
    effort: float,
) -> Arm:
    terms.progress(f"arm {name}")
    tolerance = terms.tolerance(pair.tolerance)
    feed = partial(arguments, pair.inputs)
    reference = Stopwatch(pair.reference, device)
    try:
        function = factory()
        candidate = Stopwatch(function, device)
        args = feed(FIRST_SEED)
        candidate(*args)  # compiles and captures: not its price
        candidate.shortest_s = math.inf
        trial = accuracy.check_trials(reference, candidate, feed, [FIRST_SEED], tolerance)
    except ENDS_RUN:
        raise
    except RAISED as error:  # a stranger's code, beside a pair that must not suffer for it
        return Arm(name=name, verdict=Verdict.UNSUPPORTED, reason=first_line(error))
    measured = trial.record
    if not measured.passed:
        return Arm(
            name=name,
            verdict=Verdict.INCORRECT,
            reason=f"{measured.failed:,} of {measured.total:,} elements out of tolerance",
            accuracy=measured,
        )
    try:
        summary, watched = measurement.measure(
            pair.reference.target,
            function,
            Feed(args, pair.inputs),
            device,
            (reference.shortest_s, candidate.shortest_s),
            terms.schedule(device, pair.reference_kind).screening(effort),
            terms.policy(),
            terms.progress,
            tolerance,
        )
        peak = peak_memory(partial(function, *args), device)
    except stats.SamplesError as error:
        return Arm(name=name, verdict=error.verdict, reason=str(error), accuracy=measured)
    except ENDS_RUN:
        raise
    except RAISED as error:  # right once, and then it raised
        reason = first_line(error)
        return Arm(name=name, verdict=Verdict.UNSUPPORTED, reason=reason, accuracy=measured)
    policy = replace(terms.policy(), require_baseline=False)
    judged = gate.judge(
        CaseRecord(
            verdict=Verdict.ACCURATE,
            accuracy=measured,
            timing=summary,
            probes=watched,
            reference_kind=pair.reference_kind,  # type: ignore[arg-type]
        ),
        None,
        name=name,
        device=environment.device_record(device),
        policy=policy,
    )
    # An arm has no baseline to compare with: its pass reads NO_BASELINE.
    passed = not gate.is_failure(judged.verdict, policy)
    return Arm(
        name=name,
        verdict=Verdict.PASS if passed else judged.verdict,
        reason="" if passed else judged.reason,
        accuracy=measured,
        timing=judged.timing and judged.timing.model_copy(update={"log_ratios": None}),
        peak_mib=peak,
    )
