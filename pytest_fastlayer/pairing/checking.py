"""Is the candidate right and honest? Accuracy on every seed, then the probes, then stress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from pytest_fastlayer import accuracy, gate, handed, probes, stress
from pytest_fastlayer.accuracy_message import explain
from pytest_fastlayer.baselines import BaselineError
from pytest_fastlayer.feeding import Stopwatch, arguments
from pytest_fastlayer.immutable import FrozenReference, freeze
from pytest_fastlayer.pairing.pair import DEAR_S, FIRST_SEED, Draft, Pair, PairError
from pytest_fastlayer.pairing.terms import Terms
from pytest_fastlayer.records import Probe, RootMeanSquare, Verdict
from pytest_fastlayer.session import payload_of


def check_inputs(pair: Pair) -> None:
    """Raises PairError where the inputs are not a function of their seed."""
    problem = probes.check_inputs(partial(arguments, pair.inputs), FIRST_SEED)
    if problem is not None:
        raise PairError(f"{pair.name}: {problem}")


def check(
    pair: Pair, terms: Terms, draft: Draft, device: torch.device, watch: probes.Watch
) -> None:
    """Accuracy, error against float64, and honesty.

    Raises:
        PairError: the reference writes into what both arms are given.
    """
    _compare(pair, terms, draft, device, watch)
    if draft.case.verdict is not Verdict.ACCURATE:
        # Before the candidate is blamed: does the reference write into what both are given?
        problem = probes.mutated_by(pair.reference, arguments(pair.inputs, FIRST_SEED))
        if problem is not None:
            raise PairError(f"{pair.name}: {problem}")


def describe(pair: Pair, draft: Draft, header: Mapping[str, Any]) -> None:
    """What the candidate says of itself, now that it ran.

    Raises:
        HandedError: it is not what is documented, or a record cannot hold it.
    """
    if pair.describe is None:
        return
    described = handed.described(pair.describe(pair.candidate), pair.name)
    told = {name: getattr(described, name) for name in type(described).model_fields}
    try:
        payload_of(pair.name, draft.case.model_copy(update=told), header)
    except BaselineError as error:
        raise handed.HandedError(f"{pair.name}: describe: {error}") from None
    draft.add(**told)


def _compare(
    pair: Pair, terms: Terms, draft: Draft, device: torch.device, watch: probes.Watch
) -> None:
    tolerance = terms.tolerance(pair.tolerance)
    seeds = range(FIRST_SEED, FIRST_SEED + terms.knob("seeds", device))
    reference, candidate = Stopwatch(pair.reference, device), Stopwatch(pair.candidate, device)
    feed = partial(arguments, pair.inputs)
    merged = accuracy.Comparison(tolerance)
    used: list[int] = []
    expected: dict[int, object] = {}
    for seed in seeds:
        spent = (len(used) + 1) * (reference.shortest_s + candidate.shortest_s)
        if used and spent > terms.knob("budget_s", device) and not terms.seeds_are_asked:
            break
        terms.progress(f"accuracy, seed {seed}")
        # The probes start from the first two outputs; a dear reference is not run for them.
        trial = accuracy.check_trials(
            reference, candidate, feed, [seed], tolerance, keep=int(len(used) < 2)
        )
        expected |= trial.kept
        merged = merged.merge(trial.comparison)
        used.append(seed)
        draft.add(accuracy=accuracy.to_record(merged, used, tolerance, None))
    draft.cost = (reference.shortest_s, candidate.shortest_s)
    draft.spare = next(((s, out) for s, out in expected.items() if s != FIRST_SEED), None)
    known = expected.get(FIRST_SEED)
    rms = _rms(pair, terms, known, tolerance, device, draft.cost) if merged.passed else None
    del known
    pair.reference.verify()
    measured = accuracy.to_record(merged, used, tolerance, rms)
    verdict, reason = Verdict.ACCURATE, ""
    if not measured.passed:
        draft.message = explain(merged, seeds=used, replay=terms.rerun)
        verdict = Verdict.INCORRECT
        reason = f"{measured.failed:,} of {measured.total:,} elements are out of tolerance"
        if measured.nonfinite:
            reason += f", {measured.nonfinite:,} of them not finite"
    elif len(used) < len(seeds):
        reason = f"{len(used)} of {len(seeds)} seeds fit the time budget"
    draft.add(verdict=verdict, reason=reason, accuracy=measured)
    if not draft.is_accurate:
        return
    terms.progress("honesty probes")
    honesty = probes.run_probes(
        pair.reference,
        pair.candidate,
        feed,
        used,
        tolerance,
        device,
        expected=expected,
        cost=draft.cost,
        watch=watch,
    )
    draft.add(probes=honesty)
    caught = [probe for probe in honesty if not probe.passed]
    if caught:
        said = "; ".join(f"{probe.name}: {probe.message}" for probe in caught)
        draft.add(verdict=Verdict.DISHONEST, reason=said)


def _rms(
    pair: Pair,
    terms: Terms,
    known: object,
    tolerance: accuracy.Tolerance,
    device: torch.device,
    cost: tuple[float, float],
) -> RootMeanSquare | None:
    """Error of both arms against float64, where that fits; a diagnosis, never a gate.

    ``known`` is the reference's output for the first seed, which is not computed again.
    """
    # float64 takes a CPU at least twice as long; a GPU minutes where float32 takes seconds.
    share = 1 / DEAR_S if device.type == "cuda" else 12 / terms.knob("budget_s", device)
    affordable = share * cost[0] < 1
    if not (terms.settings.bench and affordable):
        return None
    terms.progress("accuracy against float64")
    exact = pair.float64 or accuracy.float64_twin(pair.reference)
    feed: Callable[[int], tuple[Any, ...]] = partial(arguments, pair.inputs)
    try:
        trial = accuracy.check_trials(
            lambda *_: known, pair.candidate, feed, [FIRST_SEED], tolerance, float64=exact
        )
    except (RuntimeError, TypeError):
        # It does not fit, or a captured float32 tensor or a kernel refuses float64: a figure
        # less in the record, no fault of the candidate's.
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return None
    return trial.record.rms_vs_float64


def check_stress(pair: Pair, terms: Terms, draft: Draft) -> None:
    """The stress grid, where one is asked for and the pair has one."""
    grid, seeds = pair.stress, terms.settings.stress
    if grid is None or seeds is None:
        return
    own = stress.arms_of(grid, pair.candidate)
    reference, candidate = own or (pair.reference, pair.candidate)
    frozen = reference if isinstance(reference, FrozenReference) else freeze(reference)
    found = stress.run(
        grid,
        frozen,
        candidate,
        range(FIRST_SEED, FIRST_SEED + seeds),
        terms.tolerance(pair.tolerance),
        terms.progress,
        terms.rerun,
        lambda record: draft.add(stress=record),
    )
    draft.message = found.message
    frozen.verify()
    if found.written:
        problem = f"{found.written}, the candidate overwrote its inputs: later calls see other data"
        caught = Probe(name="stress_inputs_unchanged", passed=False, message=problem)
        draft.add(
            probes=(*draft.case.probes, caught),
            verdict=Verdict.DISHONEST,
            reason=f"{caught.name}: {problem}",
        )
    elif found.record.failed:
        draft.add(verdict=Verdict.INCORRECT, reason=gate.stress_failure(found.record))
