"""What holds of every timing and policy: no verdict flatters, and slower is never better."""

from __future__ import annotations

import math

import pytest
from gate_makers import H200, METHOD, baseline, case
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_fastlayer import gate, statistics
from pytest_fastlayer.gate import Policy, judge, judge_run
from pytest_fastlayer.records import CaseRecord, Comparison, Timing, Verdict

EXAMPLES = settings(max_examples=100, deadline=None)

#: From the worst to the best that a comparable, accurate case can be called.
RANK = {
    Verdict.SLOWER: 0,
    Verdict.BELOW_FLOOR: 1,
    Verdict.INCONCLUSIVE: 2,
    Verdict.PASS: 3,
    Verdict.FASTER: 4,
}

POLICIES = st.builds(
    Policy,
    alpha=st.floats(0.001, 0.2),
    min_speedup=st.floats(0.5, 2),
    family_size=st.integers(1, 200),
)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    speedup = draw(st.floats(0.1, 50))
    down, up = draw(st.floats(0, 0.2)), draw(st.floats(0, 0.2))
    return Timing(
        method=METHOD,
        reference_s=speedup,
        candidate_s=1,
        speedup=speedup,
        ci=(speedup * math.exp(-down), speedup * math.exp(up)),
        noise_floor=draw(st.floats(0, 0.2)),
        pairs=draw(st.integers(4, 500)),
        extensions=draw(st.integers(0, 4)),
    )


def scaled(timed: Timing, factor: float) -> Timing:
    assert timed.ci is not None
    ends = (timed.ci[0] * factor, timed.ci[1] * factor)
    return timed.model_copy(update={"speedup": timed.speedup * factor, "ci": ends})


def judged(now: Timing, then: Timing, policy: Policy) -> CaseRecord:
    stored = baseline(stored=case(then))
    return judge(case(now), stored, name="case", device=H200, policy=policy)


@EXAMPLES
@given(timings(), timings(), POLICIES)
def test_a_claim_is_backed_by_its_interval(now: Timing, then: Timing, policy: Policy) -> None:
    got = judged(now, then, policy)
    assert got.verdict in RANK
    assert now.ci is not None
    if RANK[got.verdict] >= RANK[Verdict.PASS]:
        assert now.ci[0] > policy.min_speedup * (1 + now.noise_floor)
    assert got.comparison is not None
    if got.verdict is Verdict.SLOWER:
        assert got.comparison.ratio < 1 / (1 + got.comparison.threshold)
        assert got.comparison.p_value <= policy.alpha / policy.family_size
    if got.verdict is Verdict.FASTER:
        assert got.comparison.ratio > 1 + got.comparison.threshold
    CaseRecord.model_validate(got.model_dump())


@EXAMPLES
@given(timings(), POLICIES)
def test_against_itself_nothing_is_slower_or_faster(now: Timing, policy: Policy) -> None:
    assert judged(now, now, policy).verdict not in (Verdict.SLOWER, Verdict.FASTER)


@EXAMPLES
@given(timings(), timings(), POLICIES, st.floats(0.3, 1))
def test_a_slower_candidate_is_never_judged_better(
    now: Timing, then: Timing, policy: Policy, factor: float
) -> None:
    worse = judged(scaled(now, factor), then, policy).verdict
    assert RANK[worse] <= RANK[judged(now, then, policy).verdict]


@EXAMPLES
@given(timings(), timings(), POLICIES, st.integers(2, 50))
def test_more_cases_in_the_run_alarm_less(
    now: Timing, then: Timing, policy: Policy, more: int
) -> None:
    larger = Policy(policy.alpha, policy.min_speedup, family_size=policy.family_size * more)
    few, many = judged(now, then, policy).verdict, judged(now, then, larger).verdict
    assert many is few or few in (Verdict.SLOWER, Verdict.FASTER)


@EXAMPLES
@given(timings(), timings())
def test_faster_and_slower_mirror_each_other(now: Timing, then: Timing) -> None:
    """With a claim that always holds, exchanging now and then exchanges the verdicts."""
    policy = Policy(min_speedup=1e-6)
    mirror = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    forward, backward = (judged(a, b, policy).verdict for a, b in ((now, then), (then, now)))
    # An interval may touch the threshold in one direction by rounding alone.
    margin = abs(statistics.compare_ratio(now, then).p_value - policy.alpha)
    if margin > 1e-9:
        assert backward is mirror.get(forward, forward)


@EXAMPLES
@given(timings(), POLICIES)
def test_extension_is_asked_only_of_the_inconclusive(now: Timing, policy: Policy) -> None:
    verdict = judge(case(now), None, name="case", device=H200, policy=policy).verdict
    open_ended = verdict is Verdict.INCONCLUSIVE and now.extensions < gate.MAX_EXTENSIONS
    assert gate.needs_extension(now, policy) is open_ended


@EXAMPLES
@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["PASS", "SLOWER", "BELOW_FLOOR"]))),
    st.floats(0.001, 0.2),
)
def test_the_end_of_a_run_only_adds_failures(rows: list[tuple[float, str]], alpha: float) -> None:
    timed = Timing(
        method=METHOD,
        reference_s=1,
        candidate_s=1,
        speedup=1,
        ci=(1, 1),
        noise_floor=0.01,
        pairs=100,
    )
    before = {}
    for number, (p_value, verdict) in enumerate(rows):
        comparison = Comparison(
            baseline="b",
            provenance="measured",
            ratio=0.9,
            ci=(0.88, 0.92),
            threshold=0.014,
            p_value=p_value,
        )
        before[str(number)] = case(timed, verdict=Verdict(verdict), comparison=comparison)
    after = judge_run(before, Policy(alpha=alpha))
    assert list(after) == list(before)
    rejected = statistics.holm([p for p, _ in rows], alpha)
    for name, is_slower in zip(before, rejected, strict=True):
        assert after[name].verdict is (Verdict.SLOWER if is_slower else before[name].verdict)


@pytest.mark.parametrize("family", [1, 14, 100])
def test_item_time_and_run_end_agree_on_the_first_step(family: int) -> None:
    """What the item failed at alpha / m, the whole run's Holm rejects too."""
    alpha = Policy().alpha
    p_values = [alpha / family] + [1.0] * (family - 1)
    assert statistics.holm(p_values, alpha) == [True] + [False] * (family - 1)
