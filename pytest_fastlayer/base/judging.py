"""What a measured base says of the head, and how that enters the case's verdict. Pure.

The base stands where the stored baseline would: both ask whether this tree is slower than another,
and the base was measured in the same minutes. So a head that the base calls SLOWER, FASTER or PASS
is judged by that, and the stored figure is told beside it. Where the base gave no figure, or none
that decides, the stored baseline decides as it would have without one. What the case says of
itself (wrong, dishonest, below its floor, more memory) is not touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

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
#: Sets of fresh processes that a difference must be seen in, and the most that are tried.
MIN_SETS, MAX_SETS = 2, 4
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


@dataclass(frozen=True)
class Processes:
    """What each set of fresh processes showed, as logarithms, one entry a set.

    Two processes that run the same code differ by a few parts in a thousand on a GPU and by a few
    in a hundred on a CPU (placement in memory, huge pages, cache colouring), for as long as they
    live: no number of blocks averages that out. So a difference is believed only when sets of
    fresh processes show it again, and their scatter is its error.
    """

    ratios: tuple[float, ...]  #: of base time over head time
    controls: tuple[float, ...]  #: of the head's time in two processes, whose true value is 0
    edge: float  #: smallest effect that counts, as a fraction

    def p_value(self, *, gain: bool = False) -> float:
        """One-sided, of the hypothesis that the drop (or gain) is at most ``edge``.

        Student's t of the sets' mean ratio with n sets: the controls give n squares about their
        known mean, the ratios n - 1 about their own, of one variance: two processes' difference.
        """
        d, c = np.array(self.ratios), np.array(self.controls)
        n = len(d)
        freedom = 2 * n - 1
        error = math.sqrt((np.sum(c**2) + np.sum((d - d.mean()) ** 2)) / freedom / n)
        excess = (1 if gain else -1) * float(d.mean()) - math.log1p(self.edge)
        statistic = excess / error if error > 0 else math.copysign(math.inf, excess)
        return float(stats.t.sf(statistic, freedom))


def p_value(timing: Timing, processes: Processes, *, gain: bool = False) -> float:
    """One-sided, of the hypothesis that the drop (or gain) lies within the floor.

    The larger of that over quads and that over processes. Every further set is one more look: at
    the k-th, counted from 0, this is ``2**(k + 1)`` times the p-value of that look, as the
    interval's error there is ``alpha / 2**(k + 1)`` on a side. The errors of all looks then sum to
    less than alpha by the union bound.
    """
    pair = (UNITY, timing) if gain else (timing, UNITY)
    of_quads = statistics.compare_ratio(*pair).p_value
    return min(1.0, 2.0 ** (timing.extensions + 1) * max(of_quads, processes.p_value(gain=gain)))


def verdict(timing: Timing, processes: Processes, policy: gate.Policy) -> Verdict:
    """SLOWER, FASTER, PASS (no drop beyond the floor) or INCONCLUSIVE, of head against base.

    A change is called beyond the floor only if its interval lies wholly there, in at least two
    sets of processes, and its p-value passes Holm's first step over the run's cases, as of any
    item that is judged before the others are known.
    """
    assert timing.ci is not None
    low, high = timing.ci
    share = policy.alpha / policy.family_size
    is_repeated = len(processes.ratios) >= MIN_SETS
    if high < _lower_bar(timing) and is_repeated and p_value(timing, processes) <= share:
        return Verdict.SLOWER
    if _is_gain(timing) and is_repeated and p_value(timing, processes, gain=True) <= share:
        return Verdict.FASTER
    return Verdict.PASS if low >= _lower_bar(timing) else Verdict.INCONCLUSIVE


def wants_more(found: Verdict, timing: Timing, sets: int) -> bool:
    """Whether another set of processes could decide what so many did not."""
    unconfirmed = found is Verdict.PASS and _is_gain(timing) and sets < MIN_SETS
    return sets < MAX_SETS and (found is Verdict.INCONCLUSIVE or unconfirmed)


def _is_gain(timing: Timing) -> bool:
    return timing.ci is not None and timing.ci[0] > 1 + timing.noise_floor


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
        own = case.reason if case.is_diagnostic else gate.cleared(case.timing, policy)
        reason = f"{own}; {said(base)}"
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
        shown = (
            f"undecided about a drop beyond {floor} in {timing.extensions + 1} sets of processes"
        )
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
