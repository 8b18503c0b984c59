"""Why a case has its verdict, in sentences: the numbers, the rule, and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_fastlayer.records import (
    Accuracy,
    Arm,
    BaseArm,
    CaseRecord,
    Device,
    NoiseFloor,
    PeakMemory,
    Stress,
    Timing,
    Verdict,
)
from pytest_fastlayer.report import roofline, text
from pytest_fastlayer.report.rules import (
    ADVICE,
    BASE_ADVICE,
    BASE_RULES,
    BASE_STATUS,
    DIAGNOSTIC_PASS,
    FLOOR_SOURCES,
    RULES,
)
from pytest_fastlayer.report.table import label


def explain(name: str, case: CaseRecord, device: Device | None = None) -> list[str]:
    """The explanation of one case, one sentence or point a line; "" parts paragraphs.

    With the ``device`` that it ran on, the case's time is held against what the device could do.
    """
    # Once more as a whole: a label of ":" must not make the line a runner's command.
    lines = [text.plain(f"{label(name, case)}: {case.verdict.value}")]
    if case.reason:
        lines.append(text.plain(case.reason, 1000))
    lines += ["", f"The rule. {_rule(case)}"]
    paragraphs = [
        [] if case.accuracy is None else list(_accuracy(case.accuracy)),
        [] if case.stress is None else [_stress(case.stress)],
        list(_probes(case)),
        list(_time(case)),
        list(_roofline(case, device)),
        list(_memory(case.peak_mib)),
        [_note(note) for note in case.notes],
        list(_comparison(case)),
        [] if case.base is None else list(_base(case.base, case)),
        [*_arms("Rival", case.rivals, case), *_arms("Variant", case.variants, case)],
    ]
    for paragraph in paragraphs:
        lines += ["", *paragraph] if paragraph else []
    advice = list(_advice(case))
    if advice:
        lines += ["", "What to try:", *(f"- {item}" for item in dict.fromkeys(advice))]
    return lines


def decided_by_base(case: CaseRecord) -> bool:
    """A measured base that shows a drop, a gain or neither replaces the stored baseline's rule."""
    return case.base is not None and case.base.verdict in BASE_RULES


def _stress(stress: Stress) -> str:
    at = f" at {text.plain(stress.note, 60)}" if stress.note else ""
    said = (
        f"Stress grid{at}. {stress.failed} of {stress.elements} elements out of tolerance over "
        f"{len(stress.seeds)} seeds of {len(stress.cells)} cells; worst share of the tolerance "
        f"{_share(stress.budget_used)}, in {text.plain(stress.cell, 60)} at seed {stress.seed}"
    )
    apart = [
        f"{text.plain(cell.label, 60)} {cell.failed} failed, worst {_share(cell.budget_used)}"
        for cell in stress.ungated
    ]
    return f"{said}; not gated: {'; '.join(apart)}." if apart else f"{said}."


def _share(used: float | None) -> str:
    return "none finite" if used is None else text.decimal(used)


def _rule(case: CaseRecord) -> str:
    if case.verdict is Verdict.PASS and case.is_diagnostic:
        return DIAGNOSTIC_PASS
    if decided_by_base(case) and case.verdict in BASE_RULES:
        return BASE_RULES[case.verdict]
    return RULES[case.verdict]


def _advice(case: CaseRecord) -> Iterator[str]:
    by_base = decided_by_base(case) and case.verdict in BASE_ADVICE
    yield from (BASE_ADVICE if by_base else ADVICE).get(case.verdict, ())
    if case.base is not None and BASE_STATUS[case.base.status][1]:
        yield f"for the base: {BASE_STATUS[case.base.status][1]}"
    source = _source(case.timing.floor_sources) if case.timing else None
    if source and case.timing is not None and case.timing.noise_floor > 0.05:
        yield FLOOR_SOURCES[source][1]


def _probes(case: CaseRecord) -> Iterator[str]:
    failed = [probe for probe in case.probes if not probe.passed]
    if case.probes:
        yield f"Honesty. {len(failed)} of {len(case.probes)} probes caught the candidate."
    for probe in failed:
        yield f"Probe {text.plain(probe.name)} failed: {text.plain(probe.message, 400)}"


def _time(case: CaseRecord) -> Iterator[str]:
    if case.timing is not None:
        yield from _diagnosis(case.timing) if case.is_diagnostic else _timing(case.timing)


def _roofline(case: CaseRecord, device: Device | None) -> Iterator[str]:
    peaks = None if device is None else roofline.peaks_of(device)
    times = roofline.times_floor(case, peaks)
    if peaks is not None and case.work is not None and times is not None:
        least = peaks.floor_s(case.work)
        unit, scale = text.unit_for([least])
        yield (
            f"Roofline. At the device's peak rates this work takes "
            f"{text.significant(least / scale)} {unit}; the candidate takes "
            f"{text.significant(times, 3)} times that ({peaks.source})."
        )


def _memory(peak: PeakMemory | None) -> Iterator[str]:
    if peak is not None and peak.candidate is not None:
        beside = f"; reference {text.mib(peak.reference)} MiB" if peak.reference is not None else ""
        yield f"Memory. The candidate's peak is {text.mib(peak.candidate)} MiB{beside}."


def _note(note: str) -> str:
    """A note of the candidate's, or of how it became the candidate, which names its option."""
    said_by = "" if note.startswith("--fastlayer-admit ") else "The candidate says: "
    return f"{said_by}{text.plain(note, 400)}"


def _base(base: BaseArm, case: CaseRecord) -> Iterator[str]:
    rev = text.plain(base.rev, 80)
    commit = f" (commit {text.revision(base.commit)})" if base.commit else ""
    timing = base.timing
    if timing is None:
        reason = f": {text.plain(base.reason, 400)}" if base.reason else ""
        yield f"Base. {rev}{commit} gives no figure: {BASE_STATUS[base.status][0]}{reason}."
        yield from (f"It wrote: {text.plain(line, 200)}" for line in base.tail)
        yield "So the stored baseline decides, where there is one."
        return
    unit, scale = text.unit_for([timing.candidate_s])
    yield (
        f"Base. {rev}{commit}, timed in the same schedule in a process of its own: base "
        f"{text.significant(timing.reference_s / scale)} {unit}, head "
        f"{text.significant(timing.candidate_s / scale)} {unit}; base time over head time "
        f"{text.ratio(timing.speedup, timing.ci)}, and below 1 the head is slower."
    )
    p_value = "" if base.p_value is None else f"; one-sided p = {base.p_value:.3g}"
    yield f"A change counts beyond a noise floor of {text.percent(timing.noise_floor)}{p_value}."
    if base.head is not None and base.base is not None:
        diagnostic = case.is_diagnostic
        yield (
            f"Over the reference, in that schedule, the head came to "
            f"{text.speedup(base.head.value, base.head.ci, diagnostic=diagnostic)} and the base to "
            f"{text.speedup(base.base.value, base.base.ci, diagnostic=diagnostic)}."
        )
    if base.verdict is Verdict.INCONCLUSIVE:
        yield "That decides nothing, so the stored baseline does, where there is one."
    elif case.comparison is not None:
        yield "This takes the place of the stored baseline: no other day's clock is involved."
    else:
        yield (
            "No stored speed was compared with this one: the base alone says whether it became "
            "slower, and no other day's clock is involved."
        )
    yield from _warnings(timing)


def _arms(kind: str, arms: Sequence[Arm], case: CaseRecord) -> Iterator[str]:
    for arm in arms:
        figure = ""
        if arm.timing is not None:
            ratio, ci = arm.timing.speedup, arm.timing.ci
            figure = f" {text.speedup(ratio, ci, diagnostic=case.is_diagnostic)}"
        reason = f", {text.plain(arm.reason, 300)}" if arm.reason else ""
        yield f"{kind} {text.plain(arm.name, 60)}:{figure} {arm.verdict.value}{reason}."


def _accuracy(accuracy: Accuracy) -> Iterator[str]:
    rule = accuracy.tolerance
    bound = {
        "either": f"|c-r| <= {rule.atol:g} or |c-r| <= {rule.rtol:g}*|r|",
        "sum": f"|c-r| <= {rule.atol:g} + {rule.rtol:g}*|r|",
    }[rule.mode]
    yield (
        f"Accuracy. {accuracy.failed} of {accuracy.total} elements out of tolerance ({bound}) "
        f"over {accuracy.trials} trials; {accuracy.nonfinite} not finite."
    )
    if accuracy.budget_used is not None:
        used = 100 * accuracy.budget_used
        share = "under 1" if 0 < used < 1 else text.decimal(used, 0)
        largest = "" if accuracy.max_abs is None else f"; largest error {accuracy.max_abs:.3g}"
        yield f"The worst finite element used {share}% of its tolerance{largest}."
    if accuracy.rms_vs_float64 is not None:
        errors = accuracy.rms_vs_float64
        yield (
            f"Against float64, the candidate's RMS error is {errors.candidate:.3g} and the "
            f"reference's {errors.reference:.3g}."
        )


def _diagnosis(timing: Timing) -> Iterator[str]:
    unit, scale = text.unit_for([timing.candidate_s])
    yield (
        f"Timing. Candidate {text.significant(timing.candidate_s / scale)} {unit}, oracle "
        f"{text.significant(timing.reference_s / scale)} {unit}. Their ratio of "
        f"{text.speedup(timing.speedup)} is a diagnostic from {timing.pairs} pairs: an oracle is "
        "built to be lean in memory, not fast, so no speedup is claimed and none is compared."
    )
    if timing.aa is not None:
        yield (
            f"A/A control: the {timing.aa.arm} against itself gave "
            f"{text.percent(timing.aa.speedup - 1, signed=True)} over {timing.aa.pairs} pairs."
        )
    yield from _warnings(timing)


def _timing(timing: Timing) -> Iterator[str]:
    unit, scale = text.unit_for([timing.candidate_s])
    yield (
        f"Timing. Reference {text.significant(timing.reference_s / scale)} {unit}, candidate "
        f"{text.significant(timing.candidate_s / scale)} {unit}: speedup "
        f"{text.speedup(timing.speedup, timing.ci)} from {timing.pairs} pairs"
        + (f" after {timing.extensions} extensions." if timing.extensions else ".")
    )
    floor = timing.noise_floor
    source = _source(timing.floor_sources)
    because = f", set by {FLOOR_SOURCES[source][0]}" if source else ""
    yield f"Noise floor {text.percent(floor)}{because}."
    if timing.ci is not None:
        low, high = timing.ci
        needed = 1 + floor
        side = "above" if low > needed else "below" if high < needed else "on both sides of"
        interval = f"[{text.decimal(low, 3)}, {text.decimal(high, 3)}]"
        yield f"The interval {interval} lies {side} 1 + floor = {text.decimal(needed, 3)}."
    else:
        yield "No interval was recorded, so the noise floor stands in for its half-width."
    if timing.aa is not None:
        yield (
            f"A/A control: the {timing.aa.arm} against itself gave "
            f"{text.percent(timing.aa.speedup - 1, signed=True)}."
        )
    if timing.min_detectable_effect is not None:
        effect = text.percent(timing.min_detectable_effect)
        yield f"The smallest change detectable here is {effect}."
    if timing.dropped_pairs:
        why = text.listing(timing.dropped_reasons) or "no reason recorded"
        yield f"{timing.dropped_pairs} pairs were dropped: {why}."
    yield from _warnings(timing)


def _warnings(timing: Timing) -> Iterator[str]:
    yield from (f"Warning: {text.plain(warning, 400).rstrip('.')}." for warning in timing.warnings)


def _comparison(case: CaseRecord) -> Iterator[str]:
    change = case.comparison
    if change is None:
        alone = case.verdict is Verdict.PASS and not (case.is_diagnostic or decided_by_base(case))
        if alone and case.timing is not None:
            yield (
                "Baseline. This record holds no comparison, as a stored baseline holds none; "
                "fastlayer-gate compare makes one."
            )
        return
    yield (
        f"Baseline. Speedup now over speedup stored in {text.plain(change.baseline)}: "
        f"{text.ratio(change.ratio, change.ci)}; below 1 is slower. A change counts beyond the "
        f"combined noise floors of {text.percent(change.threshold)}; one-sided p = "
        f"{change.p_value:.3g}."
    )
    if change.provenance == "published":
        yield "The stored figure is published, not a measurement of this machine."
    if change.changed_since:
        yield f"Changed since: {text.listing(change.changed_since)}."


def _source(sources: NoiseFloor | None) -> str | None:
    if sources is None:
        return None
    return max(FLOOR_SOURCES, key=lambda name: float(getattr(sources, name)))
