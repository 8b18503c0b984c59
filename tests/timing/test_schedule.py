"""The schedule of measure(), on a scripted clock."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from scripted_clock import ScriptedClock

from pytest_fastlayer.timing import Plan, Telemetry, TimerPatchedError, measure


def run(clock: ScriptedClock, plan: Plan, **more: Any) -> Any:
    return measure(clock.arm("A"), clock.arm("B"), clock=clock, plan=plan, **more)


def test_blocks_alternate_in_quads_after_both_arms_settled() -> None:
    clock = ScriptedClock()
    samples = run(clock, Plan(pairs=4, settle_s=0, block_ms=50))
    labels = "".join(label for label, _, _ in clock.blocks)
    assert labels == "ABBA" + "ABBA" * 2
    assert samples.order == ("AB", "BA") * 2
    assert samples.forwards == (3, 5)  # fill 50 ms
    assert [n for _, n, _ in clock.blocks[4:8]] == [3, 5, 5, 3]
    assert samples.reference_s == pytest.approx((0.020,) * 4)
    assert samples.candidate_s == pytest.approx((0.010,) * 4)
    assert samples.resolution_s == 1e-7
    assert samples.keep is None


@pytest.mark.parametrize(("pairs", "measured"), [(2, 2), (5, 6), (6, 6), (7, 8)])
def test_an_odd_number_of_pairs_is_rounded_up_to_quads(pairs: int, measured: int) -> None:
    samples = run(ScriptedClock(), Plan(pairs=pairs, settle_s=0))
    assert len(samples.order) == measured


def test_a_forward_longer_than_a_block_runs_once() -> None:
    clock = ScriptedClock(9.0, 1.4)
    samples = run(clock, Plan(pairs=2, settle_s=0))
    assert samples.forwards == (1, 1)
    assert [label for label, _, _ in clock.blocks] == ["A", "B", *"ABBA"]  # no second settling


def test_known_costs_spare_the_settling_of_long_arms() -> None:
    clock = ScriptedClock(9.0, 0.1)
    run(clock, Plan(pairs=2, settle_s=0), cost=(9.0, 0.1))
    assert [label for label, _, _ in clock.blocks] == ["B", "B", *"ABBA"]


def test_an_extension_repeats_the_blocks_of_the_first_measurement() -> None:
    clock = ScriptedClock()
    telemetry = Telemetry()
    plan = Plan(pairs=2, settle_s=0)
    first = run(clock, plan, telemetry=telemetry)
    clock.blocks.clear()
    clock.seconds = {"A": 1.0, "B": 1.0}
    second = run(clock, plan, skip_settle=True, forwards=first.forwards, telemetry=telemetry)
    assert [(label, n) for label, n, _ in clock.blocks] == [("A", 3), ("B", 5), ("B", 5), ("A", 3)]
    assert len(first.extended(second).order) == 4
    assert telemetry.measured_pairs == telemetry.requested_pairs == 4


class Ticking(ScriptedClock):
    """Moves the host's clock along with its own, so that budgets can be tested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        super().__init__(*seconds)
        for module in ("timing", "clocks"):
            monkeypatch.setattr(f"pytest_fastlayer.{module}._perf_counter", lambda: self.now)


@pytest.mark.parametrize(("budget", "pairs"), [(None, 100), (0.001, 6), (30.0, 28), (1000.0, 100)])
def test_a_budget_shrinks_the_pairs_never_below_six(
    monkeypatch: pytest.MonkeyPatch, budget: float | None, pairs: int
) -> None:
    clock = Ticking(monkeypatch, 0.9, 0.1)
    telemetry = Telemetry()
    plan = Plan(pairs=100, settle_s=0, block_ms=1, budget_s=budget)
    samples = run(clock, plan, telemetry=telemetry)
    assert len(samples.order) == pairs
    if budget:
        assert clock.now <= max(budget, 10.0)
    shrunk = [one for one in telemetry.warnings() if "time budget" in one]
    assert bool(shrunk) is (pairs < 100)


def test_an_extension_keeps_to_its_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch, 9.0, 1.0)
    samples = run(
        clock, Plan(pairs=100, budget_s=30, min_pairs=2), skip_settle=True, forwards=(1, 1)
    )
    assert len(samples.order) == 2


def test_settling_alternates_as_the_timing_does_for_its_time_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Ticking(monkeypatch, 0.010, 0.002)
    telemetry = Telemetry()
    plan = Plan(pairs=2, settle_s=3.0)
    run(clock, plan, telemetry=telemetry)
    settling = clock.blocks[:-4]
    labels = "".join(label for label, _, _ in settling)
    assert labels.startswith("ABBAABBA")
    assert abs(labels.count("A") - labels.count("B")) <= 1
    assert [n for _, n, _ in settling[:8]] == [1, 1, 4, 4, 5, 16, 25, 5]  # to 50 ms, by fours
    assert sum(n * clock.seconds[label] for label, n, _ in settling) == pytest.approx(3.0, abs=0.05)
    assert telemetry.settle_s == 3.0
    method = telemetry.method(clock, plan)
    assert (method.settle_s, method.settling) == (3.0, "alternating")


def test_a_long_arm_is_not_run_again_for_the_other_ones_second_look() -> None:
    clock = ScriptedClock(9.0, 0.1)
    run(clock, Plan(pairs=2, settle_s=0))
    assert [label for label, _, _ in clock.blocks] == ["A", "B", "B", *"ABBA"]


def test_arms_that_need_no_settling_had_none() -> None:
    clock = ScriptedClock(9.0, 8.0)
    telemetry = Telemetry()
    run(clock, Plan(pairs=2, settle_s=3.0), cost=(9.0, 8.0), telemetry=telemetry)
    assert [label for label, _, _ in clock.blocks] == [*"ABBA"]
    assert telemetry.settle_s == 0.0


def test_a_slow_first_call_does_not_set_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch, 0.010, 0.8)  # compiling

    def candidate() -> str:
        clock.seconds["B"] = 0.8 if not any(one == "B" for one, _, _ in clock.blocks) else 0.005
        return "B"

    samples = measure(
        clock.arm("A"), candidate, clock=clock, plan=Plan(pairs=2, settle_s=2.0, block_ms=50)
    )
    assert samples.forwards == (5, 10)


def test_a_budget_limits_the_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch, 0.010, 0.002)
    telemetry = Telemetry()
    plan = Plan(pairs=2, settle_s=10.0, budget_s=4.0)
    run(clock, plan, telemetry=telemetry)
    assert telemetry.settle_s == 1.0
    assert telemetry.method(clock, plan).settle_s == 1.0


def test_cold_reaches_the_clock_and_the_record() -> None:
    clock = ScriptedClock()
    telemetry = Telemetry()
    plan = Plan(pairs=2, settle_s=0, l2="cold")
    run(clock, plan, telemetry=telemetry)
    assert all(cold for _, _, cold in clock.blocks)
    assert telemetry.method(clock, plan).l2 == "cold"


def test_progress_says_what_how_far_and_the_estimate() -> None:
    lines: list[str] = []
    run(ScriptedClock(), Plan(pairs=40, settle_s=0), progress=lines.append)
    assert lines[0] == "settling reference and candidate for 0.0 s"
    assert lines[-1].startswith("pair 40/40, 2.00x so far")
    assert len(lines) == 11


def test_a_patched_timer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    with pytest.raises(TimerPatchedError, match=r"time\.perf_counter replaced before the first"):
        run(ScriptedClock(), Plan(pairs=2, settle_s=0))


def test_a_timer_patched_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ScriptedClock()

    def candidate() -> str:
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
        return "B"

    with pytest.raises(TimerPatchedError, match="while the arms were timed"):
        measure(clock.arm("A"), candidate, clock=clock, plan=Plan(pairs=2, settle_s=0))


def test_an_exception_of_an_arm_passes_through_and_collection_is_on_again() -> None:
    from pytest_fastlayer.timing import clock_for

    def fails() -> object:
        assert not gc.isenabled()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        measure(fails, fails, clock=clock_for("cpu"), plan=Plan(pairs=2, settle_s=0))
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"pairs": 1}, "pairs is 1"),
        ({"min_pairs": 0}, "min_pairs"),
        ({"settle_s": -1.0}, "settle_s"),
        ({"block_ms": 0.0}, "block_ms"),
        ({"budget_s": 0.0}, "budget_s"),
        ({"l2": "hot"}, "l2 is 'hot'"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Plan(**arguments)
