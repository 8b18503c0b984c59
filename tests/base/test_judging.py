"""The base's say in a case's verdict: when it decides, when it does not, over how many cases."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "baselines"))
from makers import DEVICE, base, case, run, timing

from pytest_fastlayer import gate, statistics
from pytest_fastlayer.base import judging
from pytest_fastlayer.records import Comparison, NoiseFloor, PeakMemory, Verdict
from pytest_fastlayer.report import explain

POLICY = gate.Policy()


def against(ratio, low, high, floor=0.02, **changes):
    return timing(ratio, floor, ci=(low, high), pairs=60, **changes)


def sets(ratio, number=2, control=1.001):
    logs = math.log(ratio), math.log(control)
    return judging.Processes((logs[0],) * number, (logs[1],) * number, 0.01)


@pytest.mark.parametrize(
    ("ratio", "ci", "expected"),
    [
        (0.95, (0.945, 0.955), Verdict.SLOWER),
        (0.95, (0.945, 0.985), Verdict.INCONCLUSIVE),
        (1.00, (0.99, 1.01), Verdict.PASS),
        (0.99, (0.985, 0.995), Verdict.PASS),
        (1.10, (1.09, 1.11), Verdict.FASTER),
        (1.10, (1.01, 1.19), Verdict.PASS),
        (1.00, (0.95, 1.05), Verdict.INCONCLUSIVE),
    ],
)
def test_verdict_of_an_interval(ratio, ci, expected):
    assert judging.verdict(against(ratio, *ci), sets(ratio), POLICY) is expected


def asked_for(min_effect, floor):
    return NoiseFloor(within_quad=floor, control=floor, resolution=0, min_effect=min_effect)


@pytest.mark.parametrize(
    ("floor", "ratio", "expected"),
    [
        (judging.MAX_FLOOR, 1.0, Verdict.PASS),
        (0.11, 1.0, Verdict.INCONCLUSIVE),
        (0.67, 0.7, Verdict.INCONCLUSIVE),
        (6.38, 0.2, Verdict.INCONCLUSIVE),
        (6.38, 1.0, Verdict.INCONCLUSIVE),
        # What lies wholly beyond a floor does so however high that is.
        (0.67, 0.5, Verdict.SLOWER),
        (0.67, 2.0, Verdict.FASTER),
    ],
)
def test_a_floor_that_hides_any_drop_passes_nothing(floor, ratio, expected):
    seen = against(ratio, 0.99 * ratio, 1.01 * ratio, floor)
    found = judging.verdict(seen, sets(ratio), POLICY)
    assert found is expected
    assert not judging.wants_more(found, seen, 2)
    if expected is Verdict.INCONCLUSIVE:
        assert not judging.wants_more(found, seen, 1)


def test_a_floor_as_high_as_was_asked_for_is_what_was_asked_for():
    sources = asked_for(0.2, 0.2)
    seen = against(1.0, 0.99, 1.01, 0.2, floor_sources=sources)
    assert judging.verdict(seen, sets(1.0), POLICY) is Verdict.PASS
    noisier = against(1.0, 0.99, 1.01, 0.25, floor_sources=asked_for(0.2, 0.25))
    assert judging.verdict(noisier, sets(1.0), POLICY) is Verdict.INCONCLUSIVE


def test_a_gain_above_a_high_floor_is_looked_at_again():
    seen = against(2.0, 1.9, 2.1, 0.67)
    first = judging.verdict(seen, sets(2.0, 1), POLICY)
    assert first is Verdict.INCONCLUSIVE
    assert judging.wants_more(first, seen, 1)


@pytest.mark.parametrize(("floor", "becomes"), [(0.02, Verdict.PASS), (0.67, Verdict.SLOWER)])
def test_a_recorded_base_that_shows_nothing_leaves_the_stored_baseline_in_charge(floor, becomes):
    """Also of a record that was written before there was a ceiling."""
    beside = base(Verdict.PASS, timing=against(1.0, 0.99, 1.01, floor))
    after = judging.settle(case(Verdict.SLOWER), beside, name="a", policy=POLICY)
    assert after.verdict is becomes
    assert after.base is not None
    assert (after.base.verdict is UNDECIDED) is (becomes is SLOWER)
    if becomes is SLOWER:
        assert (
            "no drop beyond a floor of 67.0%, which is above the 10.0% up to which that decides"
        ) in after.reason
        assert after.reason.endswith("held against the stored baseline alone")


def test_a_run_of_many_cases_asks_for_more():
    weak = against(0.965, 0.951, 0.979), sets(0.965)
    assert judging.verdict(*weak, POLICY) is Verdict.SLOWER
    assert judging.verdict(*weak, gate.Policy(family_size=100)) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("ratio", "once"), [(0.9, Verdict.INCONCLUSIVE), (1.1, Verdict.PASS)])
def test_a_difference_is_believed_when_fresh_processes_show_it_again(ratio, once):
    seen = against(ratio, 0.99 * ratio, 1.01 * ratio)
    first = judging.verdict(seen, sets(ratio, 1), POLICY)
    assert first is once
    assert judging.wants_more(first, seen, 1)
    again = judging.verdict(seen, sets(ratio, 2), POLICY)
    assert again is (Verdict.SLOWER if ratio < 1 else Verdict.FASTER)
    assert not judging.wants_more(again, seen, 2)


def test_what_one_process_has_for_life_is_no_difference_of_trees():
    """However tight the interval: the control says that processes differ by as much."""
    seen = against(0.95, 0.949, 0.951)
    assert judging.verdict(seen, sets(0.95, 2, control=0.96), POLICY) is Verdict.INCONCLUSIVE
    split = judging.Processes((math.log(0.9), 0.0), (0.0, 0.0), 0.01)
    assert judging.verdict(seen, split, POLICY) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("verdict", "number", "more"),
    [
        (Verdict.INCONCLUSIVE, 3, True),
        (Verdict.INCONCLUSIVE, 4, False),
        (Verdict.PASS, 1, False),
        (Verdict.SLOWER, 2, False),
    ],
)
def test_how_long_it_goes_on(verdict, number, more):
    assert judging.wants_more(verdict, against(1.0, 0.99, 1.01), number) is more


def test_every_look_is_paid_for():
    def raw(timing):
        return statistics.compare_ratio(timing, judging.UNITY).p_value

    for extensions, price in ((0, 2), (1, 4), (3, 16)):
        seen = against(0.965, 0.945, 0.985, extensions=extensions)
        assert judging.p_value(seen, sets(0.965)) == pytest.approx(price * raw(seen))
    assert judging.p_value(against(1.0, 0.9, 1.1), sets(1.0)) == 1


def test_gain_and_drop_mirror_each_other():
    drop, gain = against(0.95, 0.94, 0.96), against(1 / 0.95, 1 / 0.96, 1 / 0.94)
    mirrored = judging.p_value(gain, sets(1 / 0.95), gain=True)
    assert judging.p_value(drop, sets(0.95)) == pytest.approx(mirrored)


def test_identical_sets_without_scatter_are_certain():
    exact = judging.Processes((math.log(0.9),) * 2, (0.0, 0.0), 0.01)
    assert exact.p_value() == 0
    assert exact.p_value(gain=True) == 1


SLOWER, PASS, FASTER = Verdict.SLOWER, Verdict.PASS, Verdict.FASTER
UNDECIDED = Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("was", "said", "becomes"),
    [
        # Verdicts against something stored give way to a base that decides.
        (PASS, SLOWER, SLOWER),
        (SLOWER, PASS, PASS),
        (FASTER, PASS, PASS),
        (Verdict.NO_BASELINE, SLOWER, SLOWER),
        (Verdict.STALE_BASELINE, SLOWER, SLOWER),
        # That nothing comparable is stored is not mended by a base.
        (Verdict.NO_BASELINE, PASS, Verdict.NO_BASELINE),
        (Verdict.OTHER_MACHINE, FASTER, Verdict.OTHER_MACHINE),
        (Verdict.STALE_BASELINE, PASS, Verdict.STALE_BASELINE),
        # What a case is on its own does not.
        (Verdict.BELOW_FLOOR, PASS, Verdict.BELOW_FLOOR),
        (Verdict.MORE_MEMORY, FASTER, Verdict.MORE_MEMORY),
        (UNDECIDED, PASS, UNDECIDED),
        # A base that does not decide leaves what was stored in charge.
        (SLOWER, UNDECIDED, SLOWER),
        (PASS, UNDECIDED, PASS),
        (Verdict.NO_BASELINE, UNDECIDED, Verdict.NO_BASELINE),
    ],
)
def test_settle(was, said, becomes):
    before = case(was, reason="as stored")
    after = judging.settle(before, base(said), name="a", policy=POLICY)
    assert after.verdict is becomes
    assert after.base is not None
    if becomes is was and said is UNDECIDED:
        assert "held against the stored baseline alone" in after.reason


@pytest.mark.parametrize("status", ["missing", "crashed", "timeout", "import_error", "failed"])
def test_a_base_without_a_figure_falls_back_and_says_so(status):
    lost = base(None, status=status, reason="it has no such test")
    after = judging.settle(case(SLOWER, reason="slower than stored"), lost, name="a", policy=POLICY)
    assert after.verdict is SLOWER
    assert after.reason == (
        f"slower than stored; the base main~1 = fedcba9876 gave no figure ({status}: it has no "
        "such test): held against the stored baseline alone"
    )


def test_an_accepted_case_stays_green_against_its_base():
    policy = gate.Policy(accepted=frozenset({"a"}))
    after = judging.settle(case(), base(SLOWER), name="a", policy=policy)
    assert after.verdict is PASS
    assert "accepted by name" in after.reason


def test_a_stored_complaint_that_gives_way_is_told():
    after = judging.settle(case(SLOWER), base(PASS, 1.0), name="a", policy=POLICY)
    assert "the stored baseline alone would say SLOWER" in after.reason


@pytest.mark.parametrize(
    ("now", "own"),
    [
        # Each is far below the stored 4.00x, and the base sees no drop.
        ({"timing": timing(0.8)}, Verdict.BELOW_FLOOR),
        ({"timing": timing(1.0, ci=(0.9, 1.1))}, UNDECIDED),
        ({"timing": timing(3.0), "peak_mib": PeakMemory(candidate=900)}, Verdict.MORE_MEMORY),
        ({"timing": timing(3.0)}, PASS),
    ],
    ids=["below floor", "inconclusive", "more memory", "only slower than stored"],
)
@pytest.mark.parametrize("said", [PASS, FASTER])
def test_a_base_takes_the_place_of_the_stored_comparison_and_of_nothing_else(now, own, said):
    judged = gate.judge(case(**now), run(), name="a", device=DEVICE, policy=POLICY)
    assert judged.verdict is (own if own is Verdict.MORE_MEMORY else SLOWER)
    beside = base(said, 1.0)
    after = judging.settle(judged, beside, name="a", policy=POLICY)
    assert after.verdict is (said if own is PASS else own)
    assert ("clears" in after.reason) is (own is PASS)
    assert gate.judge_run({"a": after}, POLICY, judging.drop)["a"] == after
    shown = "\n".join(explain.explain("a", after))
    assert not ("lies above" in shown and "lies below" in shown)


def test_a_claim_below_one_is_not_explained_as_both_above_and_below():
    policy = gate.Policy(min_speedup=0.7)
    after = judging.settle(case(timing=timing(0.8)), base(PASS, 1.0), name="a", policy=policy)
    assert after.verdict is PASS
    shown = "\n".join(explain.explain("a", after))
    assert "lies above 1 + floor" not in shown
    assert "lies below 1 + floor" in shown


def test_what_a_case_fails_by_itself_outlives_the_run_s_holm_too():
    of_its_own = case(Verdict.BELOW_FLOOR, base=base(SLOWER, p_value=1e-9), reason="own")
    assert gate.judge_run({"a": of_its_own}, POLICY, judging.drop)["a"] == of_its_own


@pytest.mark.parametrize("verdict", ["NO_BASELINE", "OTHER_MACHINE", "STALE_BASELINE"])
def test_what_is_not_stored_is_told_beside_the_base(verdict):
    before = case(Verdict(verdict), reason="nothing comparable is stored")
    after = judging.settle(before, base(PASS, 1.0), name="a", policy=POLICY)
    assert after.reason.startswith("nothing comparable is stored; the speed is 1.000x")
    assert gate.is_failure(after.verdict, gate.Policy(require_baseline=True))
    slower = judging.settle(before, base(SLOWER), name="a", policy=POLICY)
    assert slower.verdict is SLOWER
    assert f"the stored baseline alone would say {verdict}" in slower.reason


def test_accepting_a_drop_stores_nothing():
    policy = gate.Policy(accepted=frozenset({"a"}))
    after = judging.settle(case(Verdict.NO_BASELINE), base(SLOWER), name="a", policy=policy)
    assert after.verdict is Verdict.NO_BASELINE
    assert "accepted by name, would be SLOWER" in after.reason


def test_an_oracle_s_ratio_is_no_claim_beside_the_base_either():
    before = case(reference_kind="oracle", reason="a diagnostic")
    after = judging.settle(before, base(PASS, 1.0), name="a", policy=POLICY)
    assert after.verdict is PASS
    assert after.reason.startswith("a diagnostic; the speed is 1.000x")


STORED = Comparison(
    baseline="x", provenance="measured", ratio=0.9, ci=(0.89, 0.91), threshold=0.02, p_value=1e-9
)


def test_the_run_counts_one_comparison_a_case():
    decided = case(base=base(PASS, 1.0, p_value=0.9), comparison=STORED)
    drop = judging.drop(decided)
    assert drop is not None
    assert (drop.p_value, drop.is_beyond) == (0.9, False)
    fallen_back = case(base=base(None, status="missing"), comparison=STORED)
    assert judging.drop(fallen_back).p_value == 1e-9
    assert judging.drop(case()) is None


def test_holm_over_the_run_reaches_further_bases():
    """Three drops: the first step passes only the smallest, the later steps the others."""
    cases = {
        name: case(base=base(UNDECIDED, 0.95, p_value=p))
        for name, p in (("a", 0.01), ("b", 0.02), ("c", 0.03))
    }
    judged = gate.judge_run(cases, gate.Policy(family_size=3), judging.drop)
    assert [one.verdict for one in judged.values()] == [SLOWER] * 3
    assert "of the base's (main~1 = fedcba9876)" in judged["c"].reason
    assert "Holm over 3 cases" in judged["c"].reason
    stored_only = gate.judge_run(cases, gate.Policy(family_size=3))
    assert stored_only == cases
