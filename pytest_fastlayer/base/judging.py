"""What a measured base says of the head, and how that enters the case's verdict. Pure.

The base stands where the stored baseline would: both ask whether this tree is slower than another,
and the base was measured in the same minutes. So a head that the base calls SLOWER, FASTER or PASS
is judged by that, and the stored figure is told beside it. Where the base gave no figure, or none
that decides, the stored baseline decides as it would have without one.

A base takes the place of that one comparison and of nothing else. What the case says of itself
(wrong, dishonest, more memory, below its floor, inconclusive) stands, also where a drop against
the stored figure had been said first. And no base puts a figure into a baseline: NO_BASELINE,
OTHER_MACHINE and STALE_BASELINE stay where the base shows no drop, so that a missing entry is
seen, counted and red where a baseline is required.
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

#: Nothing comparable is stored, which no base mends.
_NOT_STORED = frozenset({Verdict.NO_BASELINE, Verdict.OTHER_MACHINE, Verdict.STALE_BASELINE})
#: Verdicts about other figures than the case's own, on which a base has a say.
_GIVES_WAY = frozenset({Verdict.PASS, Verdict.FASTER, Verdict.SLOWER}) | _NOT_STORED
_DECIDES = frozenset({Verdict.PASS, Verdict.FASTER, Verdict.SLOWER})
#: Highest floor under which "no drop beyond the floor" may pass, unless a higher minimum effect was
#: asked for. A tenth is the largest slowdown that a gate may be blind to and still be called one.
MAX_FLOOR = 0.1
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
    item that is judged before the others are known. PASS says nothing of drops within the floor,
    so it needs one that is low enough (``MAX_FLOOR``); what lies wholly beyond a floor does so
    however high that is.
    """
    assert timing.ci is not None
    high = timing.ci[1]
    share = policy.alpha / policy.family_size
    is_repeated = len(processes.ratios) >= MIN_SETS
    if high < _lower_bar(timing) and is_repeated and p_value(timing, processes) <= share:
        return Verdict.SLOWER
    if _is_gain(timing) and is_repeated and p_value(timing, processes, gain=True) <= share:
        return Verdict.FASTER
    passes = _shows_no_drop(timing) and not _is_blind(timing)
    return Verdict.PASS if passes else Verdict.INCONCLUSIVE


def wants_more(found: Verdict, timing: Timing, sets: int) -> bool:
    """Whether another set of processes could decide what so many did not."""
    if _shows_no_drop(timing) and (found is Verdict.PASS or _is_blind(timing)):
        return _is_gain(timing) and sets < MIN_SETS  # more sets can only raise the floor
    return sets < MAX_SETS and found is Verdict.INCONCLUSIVE


def _is_gain(timing: Timing) -> bool:
    return timing.ci is not None and timing.ci[0] > 1 + timing.noise_floor


def _shows_no_drop(timing: Timing) -> bool:
    return timing.ci is not None and timing.ci[0] >= _lower_bar(timing)


def _is_blind(timing: Timing) -> bool:
    """The floor is so high that no drop beyond it would say little."""
    asked = timing.floor_sources.min_effect if timing.floor_sources else 0.0
    return timing.noise_floor > max(MAX_FLOOR, asked)


def settle(case: CaseRecord, base: BaseArm, *, name: str, policy: gate.Policy) -> CaseRecord:
    """The case with its base, judged by it where it decides; see the module's docstring.

    A recorded PASS under a floor that is too high for one is INCONCLUSIVE here as in `verdict`.
    """
    if base.verdict is Verdict.PASS and base.timing is not None and _is_blind(base.timing):
        base = base.model_copy(update={"verdict": Verdict.INCONCLUSIVE})
    case = case.model_copy(update={"base": base})
    if case.verdict not in _GIVES_WAY:
        return case
    if base.verdict not in _DECIDES:
        told = f"{case.reason}; {said(base)}: held against the stored baseline alone"
        return case.model_copy(update={"reason": told})
    assert case.timing is not None
    is_told = case.verdict is Verdict.SLOWER or case.verdict in _NOT_STORED
    aside = f"; the stored baseline alone would say {case.verdict}" if is_told else ""
    own = gate.claim_of(case, policy)
    if own is not None:  # a drop against the stored figure had been said before it
        return case.model_copy(update={"verdict": own.verdict, "reason": own.reason + aside})
    is_slower, is_accepted = base.verdict is Verdict.SLOWER, name in policy.accepted
    if is_slower and not is_accepted:
        reason = _slower(base, f"p = {base.p_value:.2g}") + aside
        return case.model_copy(update={"verdict": Verdict.SLOWER, "reason": reason})
    told = f"{said(base)}, accepted by name, would be SLOWER" if is_slower else said(base)
    if case.verdict in _NOT_STORED:
        return case.model_copy(update={"reason": f"{case.reason}; {told}"})
    decided = Verdict.PASS if is_slower else base.verdict
    standing = case.reason if case.is_diagnostic else gate.standing_of(case.timing, policy)
    return case.model_copy(update={"verdict": decided, "reason": f"{standing}; {told}{aside}"})


def drop(case: CaseRecord) -> gate.Drop | None:
    """The one drop of a case that Holm's procedure over the run counts: of its base, or stored.

    A base's is counted, but turns no case SLOWER that has already failed by itself.
    """
    base = case.base
    if base is None or base.timing is None or base.p_value is None:
        return gate.stored_drop(case)
    assert base.timing.ci is not None
    is_beyond = case.verdict in _GIVES_WAY and base.timing.ci[1] < _lower_bar(base.timing)
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
    if shown is None and _shows_no_drop(timing):
        shown = (
            f"no drop beyond a floor of {floor}, which is above the {text.percent(MAX_FLOOR)} up "
            "to which that decides"
        )
    elif shown is None:
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
