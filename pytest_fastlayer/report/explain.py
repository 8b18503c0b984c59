"""Why a case has its verdict, in sentences: the numbers, the rule, and what to try."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fastlayer.records import Accuracy, CaseRecord, NoiseFloor, Timing, Verdict
from pytest_fastlayer.report import text
from pytest_fastlayer.report.table import label

#: The rule behind each verdict.
RULES: dict[Verdict, str] = {
    Verdict.PASS: "PASS: every element in tolerance, the speedup's interval lies above 1 + floor, "
    "and no regression against the baseline.",
    Verdict.FASTER: "FASTER: as PASS, and faster than the baseline beyond both noise floors.",
    Verdict.BELOW_FLOOR: "BELOW_FLOOR: accurate, but the speedup does not clear 1 + floor.",
    Verdict.SLOWER: "SLOWER: the drop against the baseline lies wholly beyond the combined noise "
    "floors, after Holm's correction over the cases of the run.",
    Verdict.MORE_MEMORY: "MORE_MEMORY: the candidate's peak memory exceeds the baseline's by more "
    "than the tolerance.",
    Verdict.INCORRECT: "INCORRECT: a single element out of tolerance, or not finite where the "
    "reference is, fails the case; no speed is reported for it.",
    Verdict.DISHONEST: "DISHONEST: a probe caught the candidate doing something other than the "
    "work; no speed is reported for it.",
    Verdict.INCONCLUSIVE: "INCONCLUSIVE: after every extension the interval still straddles the "
    "floor, so neither a pass nor a failure can be claimed.",
    Verdict.UNRESOLVABLE: "UNRESOLVABLE: the work is too short for the timer to resolve.",
    Verdict.NO_BASELINE: "NO_BASELINE: green on its own; there is no stored figure to hold it to.",
    Verdict.STALE_BASELINE: "STALE_BASELINE: the stored figure belongs to another reference, "
    "workload, precision or timing method, so the two cannot be compared.",
    Verdict.OTHER_MACHINE: "OTHER_MACHINE: green on its own; the stored figure is another "
    "device's.",
    Verdict.UNSUPPORTED: "UNSUPPORTED: this machine cannot hold the case or finish it in time.",
    Verdict.ACCURATE: "ACCURATE: accuracy and honesty were checked, and nothing was timed.",
}
_MORE_TIME = "take more pairs (--fastlayer-pairs) and settle longer (--fastlayer-settle)"
#: What helps against each verdict.
ADVICE: dict[Verdict, tuple[str, ...]] = {
    Verdict.BELOW_FLOOR: (
        "if the floor is high, quieten the machine: close other processes, fix the clocks",
        _MORE_TIME,
        "if the floor is low, the candidate is simply not faster",
    ),
    Verdict.SLOWER: (
        "compare the two commits named in the records, and the software that changed between them",
        "if the slowdown is intended, accept it by name (--fastlayer-accept CASE with "
        "--fastlayer-update-baseline)",
    ),
    Verdict.MORE_MEMORY: (
        "look for buffers that outlive the call, and for new intermediate copies",
        "if the memory is well spent, accept it by name (--fastlayer-accept CASE)",
    ),
    Verdict.INCORRECT: (
        "replay the failing seed with the command in the test's failure message",
        "compare precision settings (float32 matmul precision, TF32) of the two arms",
    ),
    Verdict.DISHONEST: ("read the probe's message below: it says what the candidate did",),
    Verdict.INCONCLUSIVE: (
        _MORE_TIME,
        "quieten the machine: another process on the device, or clocks that change, widen the "
        "interval",
    ),
    Verdict.UNRESOLVABLE: (
        "time a larger workload, or longer blocks (--fastlayer-block-ms) so that more forwards "
        "fit in one",
    ),
    Verdict.NO_BASELINE: ("store one with --fastlayer-update-baseline",),
    Verdict.STALE_BASELINE: (
        "restore the settings that differ, or accept the new figure by name (--fastlayer-accept "
        "CASE with --fastlayer-update-baseline)",
    ),
    Verdict.OTHER_MACHINE: ("record a baseline on this machine with --fastlayer-update-baseline",),
    Verdict.UNSUPPORTED: (
        "run it on a machine with more memory, or raise --fastlayer-max-case if it is time that "
        "rules it out",
    ),
    Verdict.ACCURATE: ("time it with --fastlayer-bench",),
}
#: Where a noise floor came from, and what lowers it.
_SOURCES = {
    "within_quad": ("the disagreement between the two orders of a quad", _MORE_TIME),
    "control": (
        "the A/A control, one arm timed against itself",
        "look for what differs between two equal arms: clocks, other processes, memory layout",
    ),
    "resolution": ("the timer's resolution over a block", "time longer blocks"),
    "min_effect": (
        "the configured minimum effect",
        "lower --fastlayer-min-effect if smaller changes matter to you",
    ),
}


def explain(name: str, case: CaseRecord) -> list[str]:
    """The explanation of one case, one sentence or point a line."""
    # Once more as a whole: a label of ":" must not make the line a runner's command.
    lines = [text.plain(f"{label(name, case)}: {case.verdict.value}")]
    if case.reason:
        lines.append(text.plain(case.reason, 1000))
    lines += ["", f"The rule. {RULES[case.verdict]}"]
    if case.accuracy is not None:
        lines += ["", *_accuracy(case.accuracy)]
    lines += [
        f"Probe {text.plain(probe.name)} failed: {text.plain(probe.message, 400)}"
        for probe in case.probes
        if not probe.passed
    ]
    if case.timing is not None:
        lines += ["", *_timing(case.timing)]
    if case.comparison is not None:
        lines += ["", *_comparison(case)]
    advice = [*ADVICE.get(case.verdict, ()), *_floor_advice(case)]
    if advice:
        lines += ["", "What to try:", *(f"- {item}" for item in dict.fromkeys(advice))]
    return lines


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
        share = text.decimal(100 * accuracy.budget_used, 0)
        largest = "" if accuracy.max_abs is None else f"; largest error {accuracy.max_abs:.3g}"
        yield f"The worst finite element used {share}% of its tolerance{largest}."
    if accuracy.rms_vs_float64 is not None:
        errors = accuracy.rms_vs_float64
        yield (
            f"Against float64, the candidate's RMS error is {errors.candidate:.3g} and the "
            f"reference's {errors.reference:.3g}."
        )


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
    because = f", set by {_SOURCES[source][0]}" if source else ""
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
    yield from (f"Warning: {text.plain(warning, 400)}" for warning in timing.warnings)


def _comparison(case: CaseRecord) -> Iterator[str]:
    change = case.comparison
    assert change is not None
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
    return max(_SOURCES, key=lambda name: float(getattr(sources, name)))


def _floor_advice(case: CaseRecord) -> list[str]:
    source = _source(case.timing.floor_sources) if case.timing else None
    wide = case.timing is not None and case.timing.noise_floor > 0.05
    return [_SOURCES[source][1]] if source and wide else []
