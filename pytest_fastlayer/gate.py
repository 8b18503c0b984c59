"""From one case's record, a baseline and a policy to a verdict with its reason. Pure.

Order of judgement, the first that applies: UNJUDGED, where measuring the case broke off; DISHONEST,
INCORRECT; then, of a case without a figure,
UNSUPPORTED, UNRESOLVABLE or INCONCLUSIVE as whoever measured it said, else ACCURATE; then against
the baseline MORE_MEMORY and SLOWER; then on its own BELOW_FLOOR and INCONCLUSIVE; then
STALE_BASELINE, OTHER_MACHINE, NO_BASELINE, FASTER, PASS.

A ratio over an oracle is a diagnostic: such a case is judged on accuracy, honesty and memory alone,
claims no speedup, and its seconds are not compared with stored ones (only ratios ever are).

Multiplicity: an item of a run is judged before the others are known, so it must pass Holm's
*first* step, ``p <= alpha / m`` with m the cases to be timed. `judge_run` takes the remaining
steps once the run is complete; it can only turn further cases SLOWER, never take one back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pytest_fastlayer import comparability, records, statistics
from pytest_fastlayer.records import GREEN, CaseRecord, Comparison, RunRecord, Timing, Verdict

MAX_EXTENSIONS = 4


@dataclass(frozen=True)
class Policy:
    """What a run demands. Fractions are fractions: 0.02 is 2%.

    ``min_speedup`` is the claim: the speedup's interval must clear ``min_speedup * (1 + floor)``.
    ``family_size`` is the number of cases timed in this run. Memory may grow by the larger of
    ``memory_tolerance`` (of the stored peak) and ``memory_slack_mib``. ``accepted`` names cases
    whose worse figure the user accepts: it waives what is relative to the stored figure (SLOWER,
    MORE_MEMORY, STALE_BASELINE) and nothing else.
    """

    alpha: float = 0.05
    min_speedup: float = 1.0
    require_baseline: bool = False
    require_quiet: bool = False
    memory_tolerance: float = 0.02
    memory_slack_mib: float = 8.0
    family_size: int = 1
    accepted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        allowed = {
            "alpha": (0 < self.alpha < 1, "a fraction between 0 and 1, such as 0.05"),
            "min_speedup": (0 < self.min_speedup < np.inf, "a positive ratio, such as 1.0"),
            "memory_tolerance": (0 <= self.memory_tolerance < np.inf, "a fraction, such as 0.02"),
            "memory_slack_mib": (0 <= self.memory_slack_mib < np.inf, "MiB, zero or more"),
            "family_size": (self.family_size >= 1, "the number of timed cases, at least 1"),
        }
        for name, (fine, expected) in allowed.items():
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)}: expected {expected}")


@dataclass(frozen=True)
class Finding:
    """A verdict and the sentence that gives its reason."""

    verdict: Verdict
    reason: str


def judge(
    case: CaseRecord,
    baseline: RunRecord | None,
    *,
    name: str,
    device: records.Device,
    policy: Policy,
    baseline_path: str = "",
    software: records.Software | None = None,
) -> CaseRecord:
    """A copy of ``case`` with verdict, reason and, where comparable, the comparison.

    ``name`` is the case's key in the baseline, ``device`` and ``software`` what it ran on;
    ``baseline_path`` is only told to the reader. A case without a timing that arrives as
    UNSUPPORTED, UNRESOLVABLE or INCONCLUSIVE keeps its verdict and reason.
    """
    blocked = _blocked(case)
    if blocked is not None:
        keeps = blocked.verdict is Verdict.UNJUDGED
        return _with(case, blocked, timing=case.timing if keeps else None, comparison=None)
    timing = case.timing
    if timing is None:
        text = f"{_accuracy(case)}; not timed"
        return _with(case, Finding(Verdict.ACCURATE, text), comparison=None)

    where = baseline_path or "the baseline"
    obstacle = comparability.obstacle(case, baseline, name=name, device=device, where=where)
    stored, comparison, complaint = None, None, None
    if obstacle is None:
        assert baseline is not None  # or there would be an obstacle
        stored = baseline.cases[name]
        assert stored.timing is not None
        complaint = _more_memory(case, stored, policy)
        if not case.is_diagnostic:
            comparison = statistics.compare_ratio(
                timing,
                stored.timing,
                baseline_path=baseline_path,
                provenance=baseline.provenance,
                changed_since=comparability.changed_since(software, baseline.software),
            )
            # Memory first: a base can take the place of the stored ratio, and of nothing else.
            complaint = complaint or _slowdown(timing, comparison, policy)
    standing = _diagnosis(timing) if case.is_diagnostic else standing_of(timing, policy)
    claim = claim_of(case, policy)
    notice = Finding(obstacle[0], f"{standing}; {obstacle[1]}") if obstacle else None

    if name in policy.accepted:
        worse = complaint or (notice if _is_stale(notice) else None)
        finding = claim or (_accepted(standing, worse) if worse else None)
    else:
        finding = complaint or claim
    if finding is None and notice is None and case.is_diagnostic:
        finding = Finding(Verdict.PASS, f"{standing}; no more memory than stored")
    finding = finding or notice or _green(timing, stored, comparison, policy)
    return _with(case, finding, comparison=comparison)


def _is_stale(finding: Finding | None) -> bool:
    return finding is not None and finding.verdict is Verdict.STALE_BASELINE


def _accepted(standing: str, worse: Finding) -> Finding:
    return Finding(Verdict.PASS, f"{standing}; accepted by name, would be {worse.verdict}")


def judge_failure(case: CaseRecord, error: statistics.SamplesError) -> CaseRecord:
    """A copy of ``case`` whose samples gave no speedup: UNRESOLVABLE or INCONCLUSIVE, and why."""
    finding = _blocked(case) or Finding(error.verdict, str(error))
    return _with(case, finding, timing=None, comparison=None)


def unjudged(case: CaseRecord, why: str) -> CaseRecord:
    """A copy of ``case`` with what was measured before something raised; ``why`` says what.

    A timing is kept unless the figures beside it have already shown that it is not earned.
    """
    if case.verdict is not Verdict.ACCURATE:
        why = f"{why}; until then {case.verdict}: {case.reason}"
    timing = case.timing if _blocked(case) is None else None
    return _with(case, Finding(Verdict.UNJUDGED, why), timing=timing)


def needs_extension(timing: Timing, policy: Policy) -> bool:
    """Whether more pairs could decide: the interval straddles the bar and looks remain."""
    low, high = _interval(timing)
    return low <= _bar(timing, policy) < high and timing.extensions < MAX_EXTENSIONS


@dataclass(frozen=True)
class Drop:
    """What Holm's procedure needs of one comparison, and the reason to give if it is SLOWER."""

    p_value: float
    is_beyond: bool  #: the whole interval lies beyond the floor
    tell: Callable[[str], str]  #: from the evidence to the reason


def stored_drop(case: CaseRecord) -> Drop | None:
    """Of the case against the stored baseline; None where the two were not compared."""
    comparison, timing = case.comparison, case.timing
    if comparison is None or timing is None:
        return None
    return Drop(comparison.p_value, _beyond(comparison), partial(_slower, comparison, timing))


def judge_run(
    cases: Mapping[str, CaseRecord],
    policy: Policy,
    drop_of: Callable[[CaseRecord], Drop | None] = stored_drop,
) -> dict[str, CaseRecord]:
    """All cases after Holm's full procedure over the run's comparisons; same keys, same order.

    Further cases may turn SLOWER; none that the item-time step failed turns green again, nor
    does a case change of which something worse than SLOWER was said, or MORE_MEMORY, or whose
    judgement broke off. Names in
    ``policy.accepted`` stay as they are. ``drop_of`` says which comparison of a case counts.
    """
    found = {name: drop_of(case) for name, case in cases.items()}
    drops = {name: drop for name, drop in found.items() if drop is not None}
    rejected = statistics.holm([drop.p_value for drop in drops.values()], policy.alpha)
    judged = dict(cases)
    for (name, drop), is_slower in zip(drops.items(), rejected, strict=True):
        fails_worse = cases[name].verdict in (Verdict.MORE_MEMORY, Verdict.UNJUDGED)
        if is_slower and drop.is_beyond and not fails_worse and name not in policy.accepted:
            text = drop.tell(f"p = {drop.p_value:.2g}, Holm over {len(drops)} cases")
            judged[name] = _with(cases[name], Finding(Verdict.SLOWER, text))
    return judged


def is_failure(verdict: Verdict, policy: Policy) -> bool:
    """Whether the verdict fails its test item under this policy."""
    if verdict in records.NOTICE:
        return policy.require_baseline
    return verdict not in GREEN


#: Exit codes of ``fastlayer-gate`` for failing verdicts, most serious first.
EXIT_CODES: dict[Verdict, int] = {
    Verdict.INCORRECT: 11,
    Verdict.DISHONEST: 11,
    Verdict.SLOWER: 10,
    Verdict.MORE_MEMORY: 10,
    Verdict.BELOW_FLOOR: 10,
    Verdict.INCONCLUSIVE: 12,
    Verdict.UNRESOLVABLE: 12,
    Verdict.UNJUDGED: 12,
    Verdict.STALE_BASELINE: 13,
    Verdict.OTHER_MACHINE: 13,
    Verdict.NO_BASELINE: 14,
}


def exit_code(verdicts: Iterable[Verdict], policy: Policy) -> int:
    """0 when nothing fails, else the code of the most serious failing verdict.

    10 slower (also more memory, or below its floor), 11 incorrect or dishonest, 12 inconclusive
    (also unresolvable or unjudged), 13 not comparable, 14 missing baseline. 2 is left to usage
    errors.
    """
    failing = {verdict for verdict in verdicts if is_failure(verdict, policy)}
    return next((code for verdict, code in EXIT_CODES.items() if verdict in failing), 0)


def memory_limit_mib(stored_mib: float, policy: Policy) -> float:
    """Most that the candidate's peak memory may be, given the stored peak, both MiB."""
    return stored_mib + max(policy.memory_tolerance * stored_mib, policy.memory_slack_mib)


def _with(case: CaseRecord, finding: Finding, **updates: Any) -> CaseRecord:
    return case.model_copy(update={"verdict": finding.verdict, "reason": finding.reason, **updates})


def _interval(timing: Timing) -> tuple[float, float]:
    if timing.ci is not None:
        return timing.ci
    return timing.speedup / (1 + timing.noise_floor), timing.speedup * (1 + timing.noise_floor)


def _bar(timing: Timing, policy: Policy) -> float:
    return policy.min_speedup * (1 + timing.noise_floor)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def _ratio(value: float, ci: tuple[float, float] | None) -> str:
    """Three decimals near 1, where the third decides; two further away."""
    digits = 3 if 0.1 < value < 2 else 2
    ends = f" [{ci[0]:.{digits}f}, {ci[1]:.{digits}f}]" if ci else ""
    return f"{value:.{digits}f}x{ends}"


def _accuracy(case: CaseRecord) -> str:
    assert case.accuracy is not None
    return (
        f"{case.accuracy.failed} of {case.accuracy.total} elements out of tolerance "
        f"in {case.accuracy.trials} trials"
    )


def stress_failure(stress: records.Stress) -> str:
    """Where a stress grid failed."""
    bad = [cell for cell in stress.cells if cell.failed]
    used = stress.budget_used
    worst = "" if used is None else f", {used:.2f} of its budget"
    return (
        f"{stress.failed} of {stress.elements} elements out of tolerance in {len(bad)} of "
        f"{len(stress.cells)} cells of the stress grid, the worst in {stress.cell} (seed "
        f"{stress.seed}{worst}): correct the candidate first, a wrong result has no speed"
    )


#: What whoever measured has settled already: there is no figure to judge.
_SETTLED = frozenset({Verdict.UNSUPPORTED, Verdict.UNRESOLVABLE, Verdict.INCONCLUSIVE})


def _blocked(case: CaseRecord) -> Finding | None:
    """What forbids judging speed at all."""
    if case.verdict is Verdict.UNJUDGED:
        return Finding(case.verdict, case.reason)
    caught = [probe for probe in case.probes if not probe.passed]
    if caught:
        said = "; ".join(f"{probe.name}: {probe.message or 'failed'}" for probe in caught)
        return Finding(
            Verdict.DISHONEST,
            f"{len(caught)} of {len(case.probes)} honesty probes caught the candidate "
            f"({said}): make every call compute its result from its inputs alone",
        )
    if case.accuracy is not None and not case.accuracy.passed:
        detail = f"{_accuracy(case)}, {case.accuracy.nonfinite} not finite"
        if case.accuracy.budget_used is not None:
            detail += f", the worst at {case.accuracy.budget_used:.2f} of its budget"
        return Finding(
            Verdict.INCORRECT,
            f"{detail}: correct the candidate first, a wrong result has no speed",
        )
    if case.stress is not None and case.stress.failed:
        return Finding(Verdict.INCORRECT, stress_failure(case.stress))
    if case.timing is None and case.verdict in _SETTLED:
        return Finding(case.verdict, case.reason)
    if case.accuracy is None:
        return Finding(
            Verdict.INCORRECT,
            "accuracy was not measured: compare at least one trial, an unchecked result has no "
            "speed",
        )
    return None


def _beyond(comparison: Comparison) -> bool:
    """The whole interval of the ratio lies below the combined floors."""
    return comparison.ci is not None and comparison.ci[1] < 1 / (1 + comparison.threshold)


def _is_regression(comparison: Comparison, policy: Policy) -> bool:
    """Holm's first step: all that an item may use before the others are known."""
    return _beyond(comparison) and comparison.p_value <= policy.alpha / policy.family_size


def _slowdown(timing: Timing, comparison: Comparison, policy: Policy) -> Finding | None:
    """SLOWER than stored."""
    if not _is_regression(comparison, policy):
        return None
    text = _slower(comparison, timing, f"p = {comparison.p_value:.2g}")
    return Finding(Verdict.SLOWER, text)


def _more_memory(case: CaseRecord, stored: CaseRecord, policy: Policy) -> Finding | None:
    """MORE_MEMORY than stored."""
    now = case.peak_mib.candidate if case.peak_mib else None
    then = stored.peak_mib.candidate if stored.peak_mib else None
    if now is not None and then is not None and now > memory_limit_mib(then, policy):
        return Finding(
            Verdict.MORE_MEMORY,
            f"the candidate's peak memory is {now:.1f} MiB, stored {then:.1f} MiB, limit "
            f"{memory_limit_mib(then, policy):.1f} MiB: free intermediate tensors earlier, or "
            "accept the figure with --fastlayer-accept",
        )
    return None


def _slower(comparison: Comparison, timing: Timing, evidence: str) -> str:
    since = ", ".join(comparison.changed_since)
    since = f"; changed since: {since}" if since else ""
    return (
        f"the speedup is {_ratio(timing.speedup, timing.ci)}, "
        f"{_ratio(comparison.ratio, comparison.ci)} of the stored one, wholly beyond the combined "
        f"floors of {_percent(comparison.threshold)} ({evidence}{since}): find the change that "
        "cost it, or accept the figure with --fastlayer-accept"
    )


def claim_of(case: CaseRecord, policy: Policy) -> Finding | None:
    """BELOW_FLOOR or INCONCLUSIVE: what the case's figure is on its own, whatever is stored.

    None where it clears its bar, and for a case without a timing.
    """
    timing = case.timing
    if timing is None or case.is_diagnostic:
        return None if timing is None else _company(timing, policy)
    bar = _bar(timing, policy)
    low, high = _interval(timing)
    said = f"{_ratio(timing.speedup, (low, high))}"
    against = f"{bar:.3f}x ({policy.min_speedup:g}x and a floor of {_percent(timing.noise_floor)})"
    if high <= bar:
        return Finding(
            Verdict.BELOW_FLOOR,
            f"the speedup {said} does not reach {against}: a faster candidate, a quieter machine "
            "or a lower min_speedup is needed",
        )
    if low <= bar:
        return Finding(
            Verdict.INCONCLUSIVE,
            f"the speedup {said} straddles {against} after {timing.extensions} extensions and "
            f"{timing.pairs} pairs: quieten the machine or measure more pairs",
        )
    return _company(timing, policy)


def _company(timing: Timing, policy: Policy) -> Finding | None:
    """INCONCLUSIVE where a quiet device is required and was not."""
    others = timing.clocks.other_processes if timing.clocks else 0
    if not (policy.require_quiet and others):
        return None
    return Finding(
        Verdict.INCONCLUSIVE,
        f"{others} other processes used the device while {_ratio(timing.speedup, timing.ci)} was "
        "measured: stop them, or drop --fastlayer-require-quiet",
    )


def _diagnosis(timing: Timing) -> str:
    return (
        f"accurate and honest; {_ratio(timing.speedup, timing.ci)} over an oracle is a diagnostic, "
        "no speedup is claimed"
    )


def standing_of(timing: Timing, policy: Policy) -> str:
    """One clause: whether the speedup clears its bar."""
    bar = _bar(timing, policy)
    low, high = _interval(timing)
    verb = "clears" if low > bar else "straddles" if high > bar else "does not reach"
    return (
        f"the speedup {_ratio(timing.speedup, timing.ci)} {verb} {bar:.3f}x "
        f"(floor {_percent(timing.noise_floor)})"
    )


def _green(
    timing: Timing, stored: CaseRecord | None, comparison: Comparison | None, policy: Policy
) -> Finding:
    assert stored is not None
    assert stored.timing is not None
    assert comparison is not None
    said = (
        f"{standing_of(timing, policy)} and is {_ratio(comparison.ratio, comparison.ci)} of the "
        f"stored one"
    )
    # A gain is a drop seen from the other side.
    gain = statistics.compare_ratio(stored.timing, timing)
    if _is_regression(gain, policy):
        return Finding(
            Verdict.FASTER,
            f"{said}, beyond the combined floors of {_percent(comparison.threshold)}: keep the "
            "gain with --fastlayer-update-baseline",
        )
    effect = timing.min_detectable_effect
    blind = f"; a slowdown under {_percent(effect)} could hide" if effect is not None else ""
    return Finding(Verdict.PASS, f"{said}, no drop beyond {_percent(comparison.threshold)}{blind}")
