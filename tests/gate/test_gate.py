"""Every verdict, from hand-made records: which one, in what order, and with which sentence."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from gate_makers import H200, METHOD, SOFTWARE, accuracy, baseline, case, timing

from pytest_fastlayer import gate, records
from pytest_fastlayer.gate import Policy, judge, judge_failure, judge_run, needs_extension
from pytest_fastlayer.records import CaseRecord, Clocks, PeakMemory, Probe, RunRecord, Verdict
from pytest_fastlayer.statistics import NoUsablePairsError, UnresolvableError, compare_ratio


def judged(
    what: CaseRecord,
    against: RunRecord | None = None,
    policy: Policy | None = None,
    **more: Any,
) -> CaseRecord:
    arguments = {"name": "case", "device": H200, "baseline_path": "baselines/h200.json"} | more
    return judge(what, against, policy=policy or Policy(), **arguments)


class TestOnItsOwn:
    """The bar is min_speedup * (1 + floor) = 1.01 here."""

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [
            (1.0101, 1.02, Verdict.NO_BASELINE),
            (1.01, 1.02, Verdict.INCONCLUSIVE),
            (0.99, 1.0101, Verdict.INCONCLUSIVE),
            (0.99, 1.01, Verdict.BELOW_FLOOR),
            (0.5, 0.6, Verdict.BELOW_FLOOR),
        ],
    )
    def test_where_the_interval_lies(self, low: float, high: float, verdict: Verdict) -> None:
        timed = timing(math.sqrt(low * high), ci=(low, high))
        assert judged(case(timed)).verdict is verdict
        assert needs_extension(timed, Policy()) is (verdict is Verdict.INCONCLUSIVE)

    def test_reasons_say_numbers_and_what_to_try(self) -> None:
        below = judged(case(timing(1.005, 0.001)))
        assert below.reason == (
            "the speedup 1.005x [1.004, 1.006] does not reach 1.010x (1x and a floor of 1.0%): "
            "a faster candidate, a quieter machine or a lower min_speedup is needed"
        )
        open_ended = judged(case(timing(1.01, 0.01, extensions=4)))
        assert open_ended.reason == (
            "the speedup 1.010x [1.000, 1.020] straddles 1.010x (1x and a floor of 1.0%) after 4 "
            "extensions and 100 pairs: quieten the machine or measure more pairs"
        )

    @pytest.mark.parametrize(
        ("low", "high", "verb"),
        [(1.02, 1.03, "clears"), (1.0, 1.02, "straddles"), (0.5, 0.6, "does not reach")],
    )
    def test_nothing_is_said_to_clear_what_it_does_not(
        self, low: float, high: float, verb: str
    ) -> None:
        said = gate.standing_of(timing(math.sqrt(low * high), ci=(low, high)), Policy())
        assert f"] {verb} 1.010x (floor 1.0%)" in said

    def test_a_higher_claim_needs_a_higher_speedup(self) -> None:
        policy = Policy(min_speedup=2.0)
        assert judged(case(timing(2.0)), policy=policy).verdict is Verdict.BELOW_FLOOR
        assert judged(case(timing(2.1)), policy=policy).verdict is Verdict.NO_BASELINE
        assert "2.020x (2x and" in judged(case(timing(2.0)), policy=policy).reason

    def test_a_claim_below_one_allows_a_slower_candidate(self) -> None:
        assert judged(case(timing(0.95)), policy=Policy(min_speedup=0.9)).verdict is (
            Verdict.NO_BASELINE
        )

    def test_without_an_interval_the_floor_stands_in(self) -> None:
        assert judged(case(timing(1.3, ci=None, floor=0.1))).verdict is Verdict.NO_BASELINE
        assert judged(case(timing(1.2, ci=None, floor=0.1))).verdict is Verdict.INCONCLUSIVE
        assert judged(case(timing(0.99, ci=None, floor=0.1))).verdict is Verdict.BELOW_FLOOR

    def test_extension_ends_after_four(self) -> None:
        assert gate.MAX_EXTENSIONS == 4
        straddling = [timing(1.01, 0.01, extensions=n) for n in range(6)]
        asked = [needs_extension(timed, Policy()) for timed in straddling]
        assert asked == [True, True, True, True, False, False]
        assert not needs_extension(timing(2.0), Policy())
        assert needs_extension(timing(2.0, 0.03), Policy(min_speedup=2.0))

    def test_other_processes_are_red_only_when_quiet_is_required(self) -> None:
        busy = case(timing(clocks=Clocks(sm_mhz_min=1, sm_mhz_max=2, other_processes=3)))
        quiet = case(timing(clocks=Clocks(sm_mhz_min=1, sm_mhz_max=2)))
        required = Policy(require_quiet=True)
        assert judged(busy, baseline()).verdict is Verdict.PASS
        assert judged(quiet, baseline(), required).verdict is Verdict.PASS
        assert judged(case(timing()), baseline(), required).verdict is Verdict.PASS
        red = judged(busy, baseline(), required)
        assert red.verdict is Verdict.INCONCLUSIVE
        assert red.reason == (
            "3 other processes used the device while 2.00x [2.00, 2.00] was measured: stop them, "
            "or drop --fastlayer-require-quiet"
        )


class TestNoSpeedWithoutAPass:
    def test_incorrect_loses_its_timing(self) -> None:
        wrong = case(timing()).model_copy(update={"accuracy": accuracy(3, nonfinite=1)})
        got = judged(wrong, baseline())
        assert got.verdict is Verdict.INCORRECT
        assert got.timing is None
        assert got.comparison is None
        assert got.reason == (
            "3 of 1000 elements out of tolerance in 5 trials, 1 not finite, the worst at 1.75 of "
            "its budget: correct the candidate first, a wrong result has no speed"
        )
        CaseRecord.model_validate(got.model_dump())

    def test_no_finite_pair_has_no_budget(self) -> None:
        bad = accuracy(3).model_copy(update={"budget_used": None})
        assert "budget" not in judged(case(accuracy=bad)).reason

    def test_no_element_compared_is_incorrect(self) -> None:
        assert judged(case(accuracy=accuracy(0, total=0))).verdict is Verdict.INCORRECT

    def test_accuracy_not_measured_is_incorrect(self) -> None:
        got = judged(case(accuracy=None))
        assert got.verdict is Verdict.INCORRECT
        assert got.reason == (
            "accuracy was not measured: compare at least one trial, an unchecked result has no "
            "speed"
        )

    def test_dishonest_goes_before_incorrect_and_says_what_it_did(self) -> None:
        probes = (
            Probe(name="fresh contents", passed=False, message="replayed the first result"),
            Probe(name="inputs", passed=True),
            Probe(name="stream", passed=False),
        )
        cheat = case(timing(), probes=probes)
        cheat = cheat.model_copy(update={"accuracy": accuracy(1)})
        got = judged(cheat, baseline())
        assert got.verdict is Verdict.DISHONEST
        assert got.timing is None
        assert got.reason.startswith(
            "2 of 3 honesty probes caught the candidate (fresh contents: replayed the first "
            "result; stream: failed): make every call"
        )

    def test_passed_probes_do_not_matter(self) -> None:
        honest = case(timing(), probes=(Probe(name="inputs", passed=True),))
        assert judged(honest, baseline()).verdict is Verdict.PASS

    def test_not_timed_is_accurate(self) -> None:
        got = judged(case(), baseline())
        assert got.verdict is Verdict.ACCURATE
        assert got.reason == "0 of 1000 elements out of tolerance in 5 trials; not timed"

    @pytest.mark.parametrize(
        "settled", [Verdict.UNSUPPORTED, Verdict.UNRESOLVABLE, Verdict.INCONCLUSIVE]
    )
    def test_settled_without_a_figure_stays(self, settled: Verdict) -> None:
        for measured in (accuracy(), None):
            got = judged(case(verdict=settled, reason="needs 3 TiB", accuracy=measured))
            assert (got.verdict, got.reason) == (settled, "needs 3 TiB")

    def test_settled_does_not_hide_a_wrong_result_or_a_cheat(self) -> None:
        wrong = case(verdict=Verdict.UNSUPPORTED, accuracy=accuracy(1))
        assert judged(wrong).verdict is Verdict.INCORRECT
        caught = case(verdict=Verdict.UNRESOLVABLE, probes=(Probe(name="p", passed=False),))
        assert judged(caught).verdict is Verdict.DISHONEST

    def test_an_earlier_inconclusive_with_a_figure_is_judged_anew(self) -> None:
        again = case(timing(), verdict=Verdict.INCONCLUSIVE)
        assert judged(again, baseline()).verdict is Verdict.PASS

    @pytest.mark.parametrize(
        ("error", "verdict"),
        [
            (UnresolvableError("too short"), Verdict.UNRESOLVABLE),
            (NoUsablePairsError("all dropped"), Verdict.INCONCLUSIVE),
        ],
    )
    def test_samples_without_a_figure(self, error: Any, verdict: Verdict) -> None:
        got = judge_failure(case(timing()), error)
        assert (got.verdict, got.reason, got.timing) == (verdict, str(error), None)
        wrong = judge_failure(case(accuracy=accuracy(1)), error)
        assert wrong.verdict is Verdict.INCORRECT


class TestAgainstBaseline:
    """Floors of 1% on both sides combine to 1.42%; the intervals are narrow."""

    @pytest.mark.parametrize(
        ("speedup", "verdict"),
        [
            (1.90, Verdict.SLOWER),
            (1.96, Verdict.SLOWER),
            (1.975, Verdict.PASS),
            (2.0, Verdict.PASS),
            (2.025, Verdict.PASS),
            (2.04, Verdict.FASTER),
            (3.0, Verdict.FASTER),
        ],
    )
    def test_beyond_the_combined_floors(self, speedup: float, verdict: Verdict) -> None:
        got = judged(case(timing(speedup)), baseline())
        assert got.verdict is verdict
        assert got.comparison is not None
        assert got.comparison.ratio == pytest.approx(speedup / 2)
        assert got.comparison.baseline == "baselines/h200.json"

    def test_reasons(self) -> None:
        assert judged(case(timing(2.0)), baseline()).reason == (
            "the speedup 2.00x [2.00, 2.00] clears 1.010x (floor 1.0%) and is 1.000x [0.997, "
            "1.003] of the stored one, no drop beyond 1.4%; a slowdown under 1.9% could hide"
        )
        assert judged(case(timing(3.0)), baseline()).reason == (
            "the speedup 3.00x [2.99, 3.01] clears 1.010x (floor 1.0%) and is 1.500x [1.496, "
            "1.504] of the stored one, beyond the combined floors of 1.4%: keep the gain with "
            "--fastlayer-update-baseline"
        )
        slower = judged(case(timing(1.9)), baseline()).reason
        assert re.fullmatch(
            r"the speedup is 1\.900x \[1\.896, 1\.904\], 0\.950x \[0\.947, 0\.953\] of the stored "
            r"one, wholly beyond the combined floors of 1\.4% \(p = \S+\): find the change that "
            r"cost it, or accept the figure with --fastlayer-accept",
            slower,
        )

    def test_pass_without_a_known_effect_promises_nothing(self) -> None:
        got = judged(case(timing(min_detectable_effect=None)), baseline())
        assert got.reason.endswith("no drop beyond 1.4%")

    def test_software_explains_but_does_not_forbid(self) -> None:
        newer = SOFTWARE.model_copy(update={"torch": "2.14.0", "triton": None, "driver": "9"})
        got = judged(case(timing(1.9)), baseline(), software=newer)
        assert got.verdict is Verdict.SLOWER
        assert got.comparison is not None
        assert got.comparison.changed_since == ("torch 2.13.0 -> 2.14.0",)
        assert "; changed since: torch 2.13.0 -> 2.14.0): find" in got.reason
        same = judged(case(timing()), baseline(), software=SOFTWARE)
        assert same.comparison is not None
        assert same.comparison.changed_since == ()

    def test_every_change_is_named(self) -> None:
        newer = SOFTWARE.model_copy(update={"torch": "2.14.0", "python": "3.12.0"})
        got = judged(case(timing(1.9)), baseline(), software=newer)
        assert "; changed since: python 3.11.9 -> 3.12.0, torch 2.13.0 -> 2.14.0): find" in (
            got.reason
        )

    def test_percents_and_missing_intervals_in_words(self) -> None:
        got = judged(case(timing(2.0, ci=None, floor=0.25)))
        assert got.reason.startswith("the speedup 2.00x clears 1.250x (floor 25.0%); nothing")

    def test_a_comparison_from_an_earlier_judgement_does_not_survive(self) -> None:
        """A record judged before and now without a figure must not keep the old ratio."""
        earlier = judged(case(timing()), baseline()).comparison
        for now in (
            case(comparison=earlier),
            case(accuracy=accuracy(1), comparison=earlier),
            case(timing(), comparison=earlier),
        ):
            assert judged(now).comparison is None
        failed = judge_failure(case(comparison=earlier), NoUsablePairsError("all dropped"))
        assert failed.comparison is None

    def test_a_wide_interval_is_no_regression(self) -> None:
        assert judged(case(timing(1.9, 0.05)), baseline()).verdict is Verdict.PASS

    def test_a_high_floor_is_no_regression(self) -> None:
        assert judged(case(timing(1.9, floor=0.06)), baseline()).verdict is Verdict.PASS

    def test_slower_goes_before_below_floor(self) -> None:
        assert judged(case(timing(0.9)), baseline()).verdict is Verdict.SLOWER

    def test_faster_must_hold_its_own_claim(self) -> None:
        stored = case(timing(0.5))
        assert judged(case(timing(0.9)), baseline(stored=stored)).verdict is Verdict.BELOW_FLOOR

    def test_family_makes_the_item_stricter(self) -> None:
        """p is about 2%: enough for one case, not as the first of a hundred."""
        then = timing(2.0, 0.01)
        now = timing(1.9375, 0.01)
        comparison = compare_ratio(now, then)
        assert 0.05 / 100 < comparison.p_value < 0.025
        alone = judged(case(now), baseline(stored=case(then)))
        crowd = judged(case(now), baseline(stored=case(then)), Policy(family_size=100))
        assert alone.verdict is Verdict.SLOWER
        assert crowd.verdict is Verdict.PASS
        gain = judged(case(then), baseline(stored=case(now)))
        crowd = judged(case(then), baseline(stored=case(now)), Policy(family_size=100))
        assert gain.verdict is Verdict.FASTER
        assert crowd.verdict is Verdict.PASS

    def test_alpha_counts_at_its_edge(self) -> None:
        then, now = timing(2.0, 0.01), timing(1.9375, 0.01)
        p = compare_ratio(now, then).p_value
        stored = baseline(stored=case(then))
        assert judged(case(now), stored, Policy(alpha=p)).verdict is Verdict.SLOWER
        assert judged(case(now), stored, Policy(alpha=0.999 * p)).verdict is Verdict.PASS

    def test_a_large_alpha_does_not_replace_the_interval(self) -> None:
        then, now = timing(2.0, 0.01), timing(1.95, 0.01)
        comparison = compare_ratio(now, then)
        assert 0.025 < comparison.p_value < 0.5
        got = judged(case(now), baseline(stored=case(then)), Policy(alpha=0.9))
        assert got.verdict is Verdict.PASS

    def test_published_figures_compare_by_their_floor(self) -> None:
        published = METHOD.model_copy(update={"clock": "published"})
        stored = case(timing(2.0, ci=None, floor=0.05, method=published), reference_sha256=None)
        run = baseline(stored=stored, provenance="published")
        fine, slow = judged(case(timing(1.85)), run), judged(case(timing(1.5)), run)
        assert fine.verdict is Verdict.PASS
        assert slow.verdict is Verdict.SLOWER
        assert slow.comparison is not None
        assert slow.comparison.provenance == "published"


class TestMemory:
    @pytest.mark.parametrize(
        ("then", "now", "verdict"),
        [
            (100.0, 108.0, Verdict.PASS),
            (100.0, 108.1, Verdict.MORE_MEMORY),
            (1000.0, 1020.0, Verdict.PASS),
            (1000.0, 1020.1, Verdict.MORE_MEMORY),
            (0.0, 8.0, Verdict.PASS),
            (0.0, 8.1, Verdict.MORE_MEMORY),
            (100.0, 1.0, Verdict.PASS),
            (None, 900.0, Verdict.PASS),
            (100.0, None, Verdict.PASS),
        ],
    )
    def test_the_larger_of_two_percent_and_eight_mib(
        self, then: float | None, now: float | None, verdict: Verdict
    ) -> None:
        stored = case(timing(), peak_mib=PeakMemory(candidate=then))
        got = judged(case(timing(), peak_mib=PeakMemory(candidate=now)), baseline(stored=stored))
        assert got.verdict is verdict

    def test_the_candidates_peak_counts_not_the_references(self) -> None:
        stored = case(timing(), peak_mib=PeakMemory(reference=1, candidate=100))
        now = case(timing(), peak_mib=PeakMemory(reference=900, candidate=100))
        assert judged(now, baseline(stored=stored)).verdict is Verdict.PASS

    @pytest.mark.parametrize("side", ["now", "then"])
    def test_unread_memory_is_not_judged(self, side: str) -> None:
        blank = case(timing(), peak_mib=None)
        now, then = (blank, case(timing())) if side == "now" else (case(timing()), blank)
        assert judged(now, baseline(stored=then)).verdict is Verdict.PASS

    def test_zero_is_a_figure(self) -> None:
        """A candidate that allocated nothing, once or now, is judged like any other."""
        stored = case(timing(), peak_mib=PeakMemory(candidate=900))
        got = judged(case(timing(), peak_mib=PeakMemory(candidate=0)), baseline(stored=stored))
        assert got.verdict is Verdict.PASS

    def test_policy_and_reason(self) -> None:
        now = case(timing(), peak_mib=PeakMemory(candidate=130))
        policy = Policy(memory_tolerance=0.25, memory_slack_mib=3)
        got = judged(now, baseline(), policy)
        assert got.reason == (
            "the candidate's peak memory is 130.0 MiB, stored 100.0 MiB, limit 125.0 MiB: free "
            "intermediate tensors earlier, or accept the figure with --fastlayer-accept"
        )
        assert judged(now, baseline(), replace(policy, memory_slack_mib=30)).verdict is Verdict.PASS

    def test_memory_is_said_first(self) -> None:
        """Before SLOWER too: a base can take that verdict's place, and not this one's."""
        hungry = PeakMemory(candidate=900)
        slow = judged(case(timing(1.9), peak_mib=hungry), baseline())
        assert slow.verdict is Verdict.MORE_MEMORY
        assert slow.comparison is not None
        assert judge_run({"case": slow}, Policy())["case"].verdict is Verdict.MORE_MEMORY
        assert judged(case(timing(1.9)), baseline()).verdict is Verdict.SLOWER
        stored = case(timing(1.0))
        both = judged(case(timing(1.0), peak_mib=hungry), baseline(stored=stored))
        assert both.verdict is Verdict.MORE_MEMORY


class TestDiagnostic:
    """A ratio over an oracle claims nothing: accuracy, honesty and memory are what is judged."""

    @staticmethod
    def of(speedup: float = 38.9, **more: Any) -> CaseRecord:
        quad = timing(speedup, ci=None, pairs=2, min_detectable_effect=None)
        return case(quad, reference_kind="oracle", **more)

    @pytest.mark.parametrize("speedup", [0.2, 1.0, 38.9])
    def test_no_speed_is_claimed_or_compared(self, speedup: float) -> None:
        got = judged(self.of(speedup), baseline(stored=self.of(100.0)))
        assert got.verdict is Verdict.PASS
        assert got.comparison is None
        assert got.timing is not None
        assert "diagnostic" in got.reason
        assert "no speedup is claimed" in got.reason

    def test_memory_is_compared(self) -> None:
        more = self.of(peak_mib=PeakMemory(reference=200, candidate=150))
        stored = baseline(stored=self.of())
        assert judged(more, stored).verdict is Verdict.MORE_MEMORY
        accepting = Policy(accepted=frozenset({"case"}))
        assert judged(more, stored, accepting).verdict is Verdict.PASS

    def test_what_is_not_stored_is_a_notice(self) -> None:
        got = judged(self.of(), None)
        assert got.verdict is Verdict.NO_BASELINE
        assert "diagnostic" in got.reason

    def test_wrong_and_dishonest_as_ever(self) -> None:
        wrong = self.of().model_copy(update={"accuracy": accuracy(1)})
        assert judged(wrong).verdict is Verdict.INCORRECT
        caught = Probe(name="p", passed=False, message="m")
        assert judged(self.of(probes=(caught,))).verdict is Verdict.DISHONEST

    def test_a_quiet_device_is_required_as_ever(self) -> None:
        clocks = Clocks(sm_mhz_min=1, sm_mhz_max=1, other_processes=2)
        busy = timing(38.9, ci=None, clocks=clocks)
        got = judged(case(busy, reference_kind="oracle"), policy=Policy(require_quiet=True))
        assert got.verdict is Verdict.INCONCLUSIVE

    def test_it_takes_no_part_in_holms_correction(self) -> None:
        got = judged(self.of(), baseline(stored=self.of(100.0)))
        assert judge_run({"case": got}, Policy()) == {"case": got}


class TestComparability:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"workload": {"batch": 8, "seq_len": 128}}, "workload batch (4 then, 8 now)"),
            ({"workload": {"batch": 4}}, "workload seq_len (128 then, None now)"),
            ({"reference_sha256": "b" * 64}, f"reference ({'a' * 40} then, {'b' * 40} now)"),
            (
                {"precision": {"float32_matmul_precision": "highest", "allow_tf32": True}},
                "precision (high, TF32 on then, highest, TF32 on now)",
            ),
            (
                {"precision": {"float32_matmul_precision": "high", "allow_tf32": False}},
                "precision (high, TF32 on then, high, TF32 off now)",
            ),
            ({"precision": None}, "precision (high, TF32 on then, unstated now)"),
            (
                {"timing": timing(method=METHOD.model_copy(update={"l2": "cold"}))},
                "L2 state (warm then, cold now)",
            ),
            (
                {"timing": timing(method=METHOD.model_copy(update={"clock": "cpu_clock"}))},
                "clock (cuda_events then, cpu_clock now)",
            ),
        ],
    )
    def test_another_identity_is_stale_and_says_what(
        self, change: dict[str, Any], said: str
    ) -> None:
        got = judged(
            case(timing()).model_copy(update=case(timing(), **change).__dict__), baseline()
        )
        assert got.verdict is Verdict.STALE_BASELINE
        assert f"baselines/h200.json was stored for another {said}: restore" in got.reason
        assert got.reason.startswith("the speedup 2.00x [2.00, 2.00] clears 1.010x (floor 1.0%); ")
        assert got.reason.endswith(
            ": restore what changed, or accept it with --fastlayer-update-baseline and "
            "--fastlayer-accept=case"
        )
        assert got.comparison is None
        assert got.timing is not None

    def test_every_difference_is_said(self) -> None:
        now = case(timing(), workload={"batch": 5, "seq_len": 6})
        said = judged(now, baseline()).reason
        assert "workload batch (4 then, 5 now) and another workload seq_len (128 then" in said

    def test_what_does_not_decide(self) -> None:
        other = METHOD.model_copy(update={"settle_s": 1.0, "block_ms": 5.0})
        for now in (
            case(timing(method=other)),
            case(timing(), reference_sha256=None),
            case(timing(), route="fused", label="another"),
        ):
            assert judged(now, baseline()).verdict is Verdict.PASS

    def test_published_counts_as_cuda_events(self) -> None:
        published = METHOD.model_copy(update={"clock": "published"})
        for now, then in ((published, METHOD), (METHOD, published)):
            stored = baseline(stored=case(timing(method=then)))
            assert judged(case(timing(method=now)), stored).verdict is Verdict.PASS

    def test_a_reference_without_a_digest_was_stored(self) -> None:
        stored = baseline(stored=case(timing(), reference_sha256=None))
        assert judged(case(timing()), stored).verdict is Verdict.PASS

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                {"name": "NVIDIA H100"},
                "NVIDIA H100 (capability 9.0, 132 multiprocessors, 143771 MiB)",
            ),
            (
                {"multiprocessors": 78},
                "NVIDIA H200 (capability 9.0, 78 multiprocessors, 143771 MiB)",
            ),
            (
                {"capability": (8, 0)},
                "NVIDIA H200 (capability 8.0, 132 multiprocessors, 143771 MiB)",
            ),
            (
                {"memory_mib": 80000},
                "NVIDIA H200 (capability 9.0, 132 multiprocessors, 80000 MiB)",
            ),
            ({"type": "cpu", "capability": None}, "NVIDIA H200 (132 threads, 143771 MiB)"),
        ],
    )
    def test_another_machine_is_a_notice(self, change: dict[str, Any], said: str) -> None:
        run = baseline(device=H200.model_copy(update=change))
        got = judged(case(timing()), run)
        assert got.verdict is Verdict.OTHER_MACHINE
        assert got.comparison is None
        assert got.reason == (
            "the speedup 2.00x [2.00, 2.00] clears 1.010x (floor 1.0%); baselines/h200.json was "
            f"measured on {said}, this run on NVIDIA H200 (capability 9.0, 132 multiprocessors, "
            "143771 MiB): store this machine's own with --fastlayer-update-baseline"
        )

    def test_nothing_stored(self) -> None:
        empty = judged(case(timing()))
        assert empty.verdict is Verdict.NO_BASELINE
        assert "nothing is stored at baselines/h200.json: store this run" in empty.reason
        assert (
            "at the baseline: store"
            in judge(case(timing()), None, name="case", device=H200, policy=Policy()).reason
        )
        other = judged(case(timing()), baseline(name="another"))
        assert other.verdict is Verdict.NO_BASELINE
        assert other.reason.endswith(
            "holds 1 cases, not this one: add it with --fastlayer-update-baseline"
        )
        untimed = judged(case(timing()), baseline(stored=case()))
        assert untimed.verdict is Verdict.NO_BASELINE
        assert "holds 1 cases, no timing of this one: add it" in untimed.reason

    def test_a_notice_never_hides_a_red_claim(self) -> None:
        poor = case(timing(1.0))
        stale = baseline(stored=case(timing(), reference_sha256="b" * 64))
        elsewhere = baseline(device=H200.model_copy(update={"name": "x"}))
        for against in (None, stale, elsewhere):
            assert judged(poor, against).verdict is Verdict.BELOW_FLOOR


class TestAccept:
    accepted = Policy(accepted=frozenset({"case"}))

    @pytest.mark.parametrize(
        ("now", "stored", "waived"),
        [
            (case(timing(1.5)), case(timing()), "SLOWER"),
            (case(timing(), peak_mib=PeakMemory(candidate=900)), case(timing()), "MORE_MEMORY"),
            (case(timing()), case(timing(), reference_sha256="b" * 64), "STALE_BASELINE"),
        ],
    )
    def test_waives_what_is_relative_to_the_stored_figure(
        self, now: CaseRecord, stored: CaseRecord, waived: str
    ) -> None:
        run = baseline(stored=stored)
        assert judged(now, run).verdict == waived
        got = judged(now, run, self.accepted)
        assert got.verdict is Verdict.PASS
        assert got.reason.endswith(f"; accepted by name, would be {waived}")
        other = judged(now, run, Policy(accepted=frozenset({"another"})))
        assert other.verdict == waived

    def test_waives_nothing_else(self) -> None:
        def verdict(now: CaseRecord, against: RunRecord | None = None) -> Verdict:
            return judged(now, against, self.accepted).verdict

        assert verdict(case(timing(0.9)), baseline()) is Verdict.BELOW_FLOOR
        assert verdict(case(timing(1.01, 0.01)), baseline()) is Verdict.INCONCLUSIVE
        assert verdict(case(accuracy=accuracy(1)), baseline()) is Verdict.INCORRECT
        assert verdict(case(timing())) is Verdict.NO_BASELINE
        elsewhere = baseline(device=H200.model_copy(update={"name": "x"}))
        assert verdict(case(timing()), elsewhere) is Verdict.OTHER_MACHINE
        assert verdict(case(timing()), baseline()) is Verdict.PASS
        assert verdict(case(timing(3.0)), baseline()) is Verdict.FASTER


class TestWholeRun:
    """Ten cases with p-values set by hand; Holm's steps are alpha / (m - k)."""

    def run(
        self, p_values: dict[str, float], *, ratio: float = 0.9, **policy: Any
    ) -> dict[str, CaseRecord]:
        template = judged(case(timing()), baseline()).comparison
        assert template is not None
        cases = {}
        for name, p in p_values.items():
            update = {"p_value": p, "ratio": ratio, "ci": (0.98 * ratio, 1.02 * ratio)}
            comparison = template.model_copy(update=update)
            cases[name] = case(timing(), verdict=Verdict.PASS, comparison=comparison)
        return judge_run(cases, Policy(**policy))

    def test_step_down_turns_further_cases_slower(self) -> None:
        got = self.run({"a": 0.01, "b": 0.02, "c": 0.9}, family_size=3)
        assert [c.verdict for c in got.values()] == [Verdict.SLOWER, Verdict.SLOWER, Verdict.PASS]
        assert "(p = 0.02, Holm over 3 cases): find" in got["b"].reason
        assert got["c"].reason == ""

    def test_stops_at_the_first_that_holds(self) -> None:
        got = self.run({"a": 0.017, "b": 0.02, "c": 0.04})
        assert {c.verdict for c in got.values()} == {Verdict.PASS}

    def test_the_interval_must_lie_beyond_the_floors_too(self) -> None:
        got = self.run({"a": 1e-6}, ratio=0.97)
        assert got["a"].verdict is Verdict.PASS
        assert self.run({"a": 1e-6}, ratio=0.96)["a"].verdict is Verdict.SLOWER

    def test_an_interval_that_only_touches_the_floors_is_not_beyond(self) -> None:
        cases = self.run({"a": 1e-6})
        touching = cases["a"].comparison
        assert touching is not None
        touching = touching.model_copy(update={"threshold": 1.0, "ci": (0.4, 0.5), "ratio": 0.45})
        given = {"a": case(timing(), verdict=Verdict.PASS, comparison=touching)}
        assert judge_run(given, Policy())["a"].verdict is Verdict.PASS
        beyond = touching.model_copy(update={"ci": (0.4, 0.499)})
        given = {"a": case(timing(), verdict=Verdict.PASS, comparison=beyond)}
        assert judge_run(given, Policy())["a"].verdict is Verdict.SLOWER

    def test_accepted_stay(self) -> None:
        got = self.run({"a": 1e-6, "b": 1e-6}, accepted=frozenset({"a"}))
        assert [c.verdict for c in got.values()] == [Verdict.PASS, Verdict.SLOWER]

    def test_cases_without_a_comparison_do_not_count(self) -> None:
        cases = self.run({"a": 0.04})
        assert cases["a"].verdict is Verdict.SLOWER
        cases = {"x": judged(case()), "y": judged(case(timing())), **cases}
        got = judge_run(cases, Policy())
        assert list(got) == ["x", "y", "a"]
        assert [c.verdict for c in got.values()] == [
            Verdict.ACCURATE,
            Verdict.NO_BASELINE,
            Verdict.SLOWER,
        ]

    def test_nothing_turns_green_again(self) -> None:
        slower = judged(case(timing(1.9)), baseline())
        relaxed = slower.comparison
        assert relaxed is not None
        cases = {
            "a": slower.model_copy(
                update={"comparison": relaxed.model_copy(update={"p_value": 0.9})}
            )
        }
        assert judge_run(cases, Policy())["a"].verdict is Verdict.SLOWER

    def test_empty_run(self) -> None:
        assert judge_run({}, Policy()) == {}


class TestFailureAndExit:
    @pytest.mark.parametrize("verdict", Verdict)
    def test_green_notice_or_red(self, verdict: Verdict) -> None:
        green = {Verdict.PASS, Verdict.FASTER, Verdict.ACCURATE, Verdict.UNSUPPORTED}
        notice = {Verdict.NO_BASELINE, Verdict.OTHER_MACHINE}
        strict = Policy(require_baseline=True)
        assert gate.is_failure(verdict, Policy()) is (verdict not in green | notice)
        assert gate.is_failure(verdict, strict) is (verdict not in green)
        # Every failing verdict has an exit code of its own kind, and no other has one.
        assert (gate.exit_code([verdict], strict) != 0) is (verdict not in green)
        assert (gate.exit_code([verdict], Policy()) != 0) is (verdict not in green | notice)

    @pytest.mark.parametrize(
        ("verdicts", "code"),
        [
            ("", 0),
            ("PASS FASTER ACCURATE UNSUPPORTED", 0),
            ("PASS SLOWER", 10),
            ("MORE_MEMORY", 10),
            ("BELOW_FLOOR INCONCLUSIVE", 10),
            ("SLOWER INCORRECT", 11),
            ("DISHONEST STALE_BASELINE", 11),
            ("INCONCLUSIVE STALE_BASELINE", 12),
            ("UNRESOLVABLE NO_BASELINE", 12),
            ("STALE_BASELINE NO_BASELINE", 13),
            ("OTHER_MACHINE NO_BASELINE", 13),
            ("NO_BASELINE PASS", 14),
        ],
    )
    def test_the_most_serious_decides(self, verdicts: str, code: int) -> None:
        names = [Verdict(name) for name in verdicts.split()]
        strict = Policy(require_baseline=True)
        assert gate.exit_code(names, strict) == code
        assert gate.exit_code(reversed(names), strict) == code

    def test_notices_exit_zero_unless_required(self) -> None:
        assert gate.exit_code([Verdict.NO_BASELINE, Verdict.OTHER_MACHINE], Policy()) == 0


class TestPolicy:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("alpha", 0.0),
            ("alpha", 1.0),
            ("alpha", math.nan),
            ("min_speedup", 0.0),
            ("min_speedup", math.inf),
            ("memory_tolerance", -0.01),
            ("memory_tolerance", math.inf),
            ("memory_slack_mib", -1.0),
            ("memory_slack_mib", math.inf),
            ("family_size", 0),
        ],
    )
    def test_nonsense_is_refused_by_name(self, field: str, value: float) -> None:
        expected = {
            "alpha": "a fraction between 0 and 1, such as 0.05",
            "min_speedup": "a positive ratio, such as 1.0",
            "memory_tolerance": "a fraction, such as 0.02",
            "memory_slack_mib": "MiB, zero or more",
            "family_size": "the number of timed cases, at least 1",
        }
        with pytest.raises(ValueError, match="expected") as caught:
            Policy(**{field: value})
        assert str(caught.value) == f"{field} is {value}: expected {expected[field]}"

    def test_edges_are_fine(self) -> None:
        Policy(memory_tolerance=0, memory_slack_mib=0, family_size=1, alpha=0.999)

    def test_defaults_are_the_documented_ones(self) -> None:
        assert Policy() == Policy(
            alpha=0.05,
            min_speedup=1.0,
            require_baseline=False,
            require_quiet=False,
            memory_tolerance=0.02,
            memory_slack_mib=8.0,
            family_size=1,
            accepted=frozenset(),
        )


def test_the_input_is_not_touched() -> None:
    now = case(timing(1.9))
    before = now.model_dump()
    judged(now, baseline())
    assert now.model_dump() == before


def test_every_reason_is_one_sentence_with_a_number() -> None:
    """For each verdict the gate gives: one line, no full stop inside, a figure in it."""
    busy = case(timing(clocks=Clocks(sm_mhz_min=1, sm_mhz_max=2, other_processes=3)))
    given = [
        judged(case(timing()), baseline()),
        judged(case(timing(3.0)), baseline()),
        judged(case(timing(1.0)), None),
        judged(case(timing(1.9)), baseline()),
        judged(case(timing(), peak_mib=PeakMemory(candidate=900)), baseline()),
        judged(case(accuracy=accuracy(1))),
        judged(case(probes=(Probe(name="p", passed=False),))),
        judged(case(timing(1.01, 0.01))),
        judged(busy, baseline(), Policy(require_quiet=True)),
        judged(case(timing())),
        judged(case(timing(), precision=None), baseline()),
        judged(case(timing()), baseline(device=H200.model_copy(update={"name": "x"}))),
        judged(case()),
    ]
    elsewhere = {Verdict.UNSUPPORTED, Verdict.UNRESOLVABLE, Verdict.UNJUDGED}
    assert {c.verdict for c in given} == set(Verdict) - elsewhere
    for got in given:
        assert "\n" not in got.reason
        assert ". " not in got.reason
        assert re.search(r"\d", got.reason)
    assert isinstance(given[0], records.CaseRecord)
