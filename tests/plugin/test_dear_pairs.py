"""References that take long or hold much: few forwards, few copies, and nothing cut unasked."""

from __future__ import annotations

from dataclasses import replace

from pytest_fastlayer.measurement import Schedule

ORACLE = """
def test_oracle(paired):
    module = Eager()
    paired("oracle", reference=module, candidate=fast(module), inputs=inputs,
           reference_kind="oracle")
"""


def test_a_diagnostic_pair_is_timed_in_one_quad(project, bench, record):
    project(ORACLE)
    result = bench("--fastlayer-pairs=40", "-s")
    result.assert_outcomes(passed=1)
    case = record()["cases"]["oracle"]
    timing = case["timing"]
    assert timing["pairs"] == 2
    assert "ci" not in timing
    assert timing["aa"]["arm"] == "candidate"
    assert timing["aa"]["pairs"] >= 6
    assert "diagnostic" in case["reason"]
    result.stdout.fnmatch_lines(["*x diagnostic)*"])
    result.stdout.no_fnmatch_line("*geometric mean*")


def test_a_diagnostic_control_stays_without_a_full_one(project, bench, record):
    project(ORACLE)
    assert bench("--fastlayer-pairs=2").ret == 0
    assert record()["cases"]["oracle"]["timing"]["aa"]["pairs"] == 6


def test_seeds_that_were_asked_for_are_not_cut_by_the_budget(project, bench, record):
    project(ORACLE)
    assert bench("--fastlayer-seeds=5", "--fastlayer-budget=1e-9").ret == 0
    assert record()["cases"]["oracle"]["accuracy"]["trials"] == 5


def test_default_seeds_are_cut_by_the_budget(project, pytester, record):
    project(ORACLE)
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "--fastlayer-json=run.json", "--fastlayer-budget=1e-9"
    )
    result.assert_outcomes(passed=1)
    case = record()["cases"]["oracle"]
    assert case["accuracy"]["trials"] == 1
    assert "1 of 5 seeds fit the time budget" in case["reason"]


def test_variants_of_a_diagnostic_pair_rank_by_their_own_seconds(project, bench, record):
    project("""
def test_oracle(paired):
    module = Eager()
    costs = {"slow": 4e-4, "quick": 1e-4, "middle": 2e-4}
    paired("oracle", reference=module, candidate=fast(module, 8e-4), inputs=inputs,
           reference_kind="oracle", describe=lambda f: {"route": str(f.cost)},
           variants={name: (lambda c=c: variant(module, c)) for name, c in costs.items()})

def variant(module, cost):
    run = fast(module, cost)
    run.cost = cost
    return run
""")
    assert bench("--fastlayer-admit").ret == 0
    case = record()["cases"]["oracle"]
    assert case["route"] == "0.0001"
    assert {arm["timing"]["pairs"] for arm in case["variants"]} == {2}


LIVE = """
import gc, weakref

alive, most = [], 0

def counted(function):
    \"\"\"Notes how many outputs are alive whenever one more has been made.\"\"\"
    def run(x):
        global most
        output = function(x)
        alive.append(weakref.ref(output))
        most = max(most, sum(one() is not None for one in alive))
        return output
    return run

def test_live(paired):
    module = Eager()
    paired("live", reference=counted(module), candidate=counted(fast(module)), inputs=inputs,
           reference_kind="oracle")
    print("MOST", most)
"""


def test_the_shortest_run_counts_what_a_diagnostic_pair_needs():
    schedule = Schedule(60, 3.0, 50.0, 60.0, "warm", 0.01)
    assert schedule.shortest_s((35.0, 1.0)) == 6 * 36
    assert replace(schedule, diagnostic=True).shortest_s((35.0, 1.0)) == 2 * 36 + 12


def test_no_more_than_four_outputs_are_alive_at_any_time(project, bench):
    """At case 14 an output holds 13 GB: what is kept for probes and taps must not multiply."""
    project(LIVE)
    result = bench("--fastlayer-seeds=5", "-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*MOST 4"])
