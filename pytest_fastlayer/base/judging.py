"""What a measured base says of the head, and how that enters the case's verdict. Pure.

The base stands where the stored baseline would: both ask whether this tree is slower than another,
and the base was measured in the same minutes. So a head that the base calls SLOWER, FASTER or PASS
is judged by that, and the stored figure is told beside it. Where the base gave no figure, or none
that decides, the stored baseline decides as it would have without one. What the case says of
itself (wrong, dishonest, below its floor, more memory) is not touched.
"""

from __future__ import annotations

from functools import partial

from pytest_fastlayer import gate, statistics
from pytest_fastlayer.records import BaseArm, CaseRecord, Method, Timing, Verdict
from pytest_fastlayer.report import text

#: Verdicts about other figures than the case's own: a base that decides replaces them.
_GIVES_WAY = frozenset(
    {
        Verdict.PASS,
        Verdict.FASTER,
        Verdict.SLOWER,
        Verdict.NO_BASELINE,
        Verdict.OTHER_MACHINE,
        Verdict.STALE_BASELINE,
    }
)
_DECIDES = frozenset({Verdict.PASS, Verdict.FASTER, Verdict.SLOWER})
#: A ratio that is exactly 1, to hold a ratio of this run against.
UNITY = Timing(
    method=Method(clock="published", settle_s=0, block_ms=1),
    reference_s=1,
    candidate_s=1,
    speedup=1,
    ci=(1, 1),
    noise_floor=0,
    pairs=1_000_000,
)


def p_value(timing: Timing, *, gain: bool = False) -> float:
    """One-sided, of the hypothesis that the drop (or gain) lies within the floor.

    Every extension was one more look: at the k-th, counted from 0, this is ``2**(k + 1)`` times
    the p-value of that look, as the interval's error there is ``alpha / 2**(k + 1)`` on a side.
    The errors of all looks then sum to less than alpha by the union bound.
    """
    pair = (UNITY, timing) if gain else (timing, UNITY)
    return min(1.0, 2.0 ** (timing.extensions + 1) * statistics.compare_ratio(*pair).p_value)


def verdict(timing: Timing, policy: gate.Policy) -> Verdict:
    """SLOWER, FASTER, PASS (no drop beyond the floor) or INCONCLUSIVE, of head against base.

    A change is called beyond the floor only if its interval lies wholly there and its p-value
    passes Holm's first step over the run's cases, as of any item that is judged before the others
    are known.
    """
    assert timing.ci is not None
    low, high = timing.ci
    share = policy.alpha / policy.family_size
    if high < _lower_bar(timing) and p_value(timing) <= share:
        return Verdict.SLOWER
    if low > 1 + timing.noise_floor and p_value(timing, gain=True) <= share:
        return Verdict.FASTER
    return Verdict.PASS if low >= _lower_bar(timing) else Verdict.INCONCLUSIVE


def settle(case: CaseRecord, base: BaseArm, *, name: str, policy: gate.Policy) -> CaseRecord:
    """The case with its base, judged by it where it decides; see the module's docstring."""
    case = case.model_copy(update={"base": base})
    if case.verdict not in _GIVES_WAY:
        return case
    if base.verdict not in _DECIDES:
        told = f"{case.reason}; {said(base)}: held against the stored baseline alone"
        return case.model_copy(update={"reason": told})
    assert case.timing is not None
    stored = f"; the stored baseline alone would say {case.verdict}"
    aside = stored if case.verdict in (Verdict.SLOWER, Verdict.STALE_BASELINE) else ""
    decided = base.verdict
    if decided is Verdict.SLOWER:
        reason = _slower(base, f"p = {base.p_value:.2g}")
        if name in policy.accepted:
            decided, reason = Verdict.PASS, f"{said(base)}, accepted by name, would be SLOWER"
    else:
        reason = f"{gate.cleared(case.timing, policy)}; {said(base)}"
    return case.model_copy(update={"verdict": decided, "reason": reason + aside})


def drop(case: CaseRecord) -> gate.Drop | None:
    """The one drop of a case that Holm's procedure over the run counts: of its base, or stored."""
    base = case.base
    if base is None or base.timing is None or base.p_value is None:
        return gate.stored_drop(case)
    assert base.timing.ci is not None
    is_beyond = base.timing.ci[1] < _lower_bar(base.timing)
    return gate.Drop(base.p_value, is_beyond, partial(_slower, base))


def said(base: BaseArm) -> str:
    """One clause: the ratio and what it shows, or why there is none."""
    name = _name(base)
    timing = base.timing
    if timing is None:
        return f"the base {name} gave no figure ({base.status}: {base.reason})"
    ratio = text.ratio(timing.speedup, timing.ci)
    floor = text.percent(timing.noise_floor)
    shown = {
        Verdict.SLOWER: f"slower beyond the floor of {floor}",
        Verdict.FASTER: f"faster beyond the floor of {floor}",
        Verdict.PASS: f"no drop beyond the floor of {floor}",
    }.get(base.verdict or Verdict.INCONCLUSIVE)
    if shown is None:
        shown = f"undecided about a drop beyond {floor} after {timing.extensions} extensions"
    effect = timing.min_detectable_effect
    blind = ""
    if effect is not None and base.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE):
        blind = f"; a slowdown under {text.percent(effect)} could hide"
    return f"the speed is {ratio} of the base's ({name}), {shown}{blind}"


def _name(base: BaseArm) -> str:
    return base.rev if base.commit is None else f"{base.rev} = {base.commit[:10]}"


def _lower_bar(timing: Timing) -> float:
    return 1 / (1 + timing.noise_floor)


def _slower(base: BaseArm, evidence: str) -> str:
    timing = base.timing
    assert timing is not None
    return (
        f"the speed is {text.ratio(timing.speedup, timing.ci)} of the base's "
        f"({_name(base)}), measured in the same schedule and wholly beyond the floor of "
        f"{text.percent(timing.noise_floor)} ({evidence}): find the change that cost it, or "
        "accept the figure with --fastlayer-accept"
    )
