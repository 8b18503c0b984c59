"""Further arms of a pair: its rivals, and the variants that its candidate could run as.

An arm is checked and timed against the same reference, in less time: enough to rank, not to claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from pytest_fastlayer.pairing.pair import FIRST_SEED, Draft, Pair, UnknownRivalError, first_line
from pytest_fastlayer.pairing.terms import Terms
from pytest_fastlayer.records import Arm, CaseRecord, Verdict

#: Share of a full measurement that a rival or a variant gets: enough to rank, not to claim.
RIVAL_EFFORT, VARIANT_EFFORT = 0.25, 0.1


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


def with_fastest(pair: Pair, arms: Sequence[Arm]) -> Pair:
    """The pair with the fastest variant that passes as its candidate.

    By the lower end of its interval, so that a lucky median does not win; by its own seconds
    where the ratio is a diagnostic and has no interval. Where none passes, the pair keeps its
    own candidate and is judged as it stands.
    """
    ranks = {
        arm.name: arm.timing.ci[0] if arm.timing.ci else 1 / arm.timing.candidate_s
        for arm in arms
        if arm.verdict is Verdict.PASS and arm.timing
    }
    if not ranks:
        return pair
    return replace(pair, candidate=pair.variants[max(ranks, key=ranks.__getitem__)]())


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
    except Exception as error:  # a stranger's code, beside a pair that must not suffer for it
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
    except Exception as error:  # right once, and then it raised
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
