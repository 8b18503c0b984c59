"""The table and the lines below it."""

from __future__ import annotations

import math
import re

import pytest
from makers import accuracy, case, incorrect, run, timing, unsupported

from pytest_fastlayer.baselines import merge
from pytest_fastlayer.records import Comparison, Verdict
from pytest_fastlayer.report import terminal
from pytest_fastlayer.report.table import COLUMNS, build, geometric_mean


def change(**changes):
    fields = {
        "baseline": "baselines/x.json",
        "provenance": "measured",
        "ratio": 0.95,
        "ci": (0.94, 0.96),
        "threshold": 0.014,
        "p_value": 0.001,
    }
    return Comparison(**(fields | changes))


def lines(*args, **kwargs) -> str:
    return "\n".join(terminal.summary(run(*args, **kwargs)))


def test_a_row_says_everything():
    row = case(
        label="case 13 [64x1024x128 H4 L4]",
        timing=timing(15.8, 0.009, ci=(15.61, 15.98)),
        comparison=change(),
    )
    (shown,) = terminal.table(run({"13": row})).splitlines()[2:]
    assert re.sub(r"  +", " | ", shown.strip()) == (
        "case 13 [64x1024x128 H4 L4] | 15.80x [15.61, 15.98] | 4.000 / 0.2532 | 0.9% | +0.1% | "
        "2.0% | 0.43 | 0/8.4M | 103.1 / 75.0 | 0.950x [0.940, 0.960] | fused | PASS"
    )


def test_unit_stands_once_in_the_heading():
    shown = terminal.table(run())
    assert shown.count("(ms)") == 1
    assert " ms" not in shown.replace("(ms)", "")


def test_empty_columns_are_left_out():
    bare = case(Verdict.ACCURATE, None, peak_mib=None, route=None)
    assert build(run({"a": bare})).headings == ("case", "budget", "failed", "verdict")


def test_best_green_worst_red_verdicts_by_meaning():
    cases = {"a": case(speedup=2), "b": case(speedup=3), "c": case(Verdict.SLOWER, 4)}
    shown = terminal.table(run(cases), color=True)
    assert "\x1b[32m4.00x" in shown
    assert "\x1b[31m2.00x" in shown
    assert "\x1b[32m3.00x" not in shown
    assert "\x1b[31mSLOWER\x1b[0m" in shown
    assert "\x1b[32mPASS\x1b[0m" in shown
    assert terminal.table(run(cases)) == re.sub(r"\x1b\[\d*m", "", shown)


def test_a_single_value_is_neither_best_nor_worst():
    assert "\x1b[32m4.00x" not in terminal.table(run(), color=True)


def test_failed_elements_and_reasons_are_shown():
    shown = lines({"a": incorrect("1 of 8388608 elements out"), "b": unsupported("needs 10.2 TB")})
    assert "1/8.4M" in shown
    assert "INCORRECT  a: 1 of 8388608 elements out" in shown
    assert "UNSUPPORTED  b: needs 10.2 TB" in shown
    assert "2 cases: 1 INCORRECT, 1 UNSUPPORTED" in shown


def test_geometric_mean_never_covers_oracles():
    cases = {
        "a": case(speedup=2),
        "b": case(speedup=8),
        "oracle": case(speedup=1000, reference_kind="oracle"),
        "wrong": incorrect(),
    }
    mean, covered = geometric_mean(cases)
    assert math.isclose(mean, 4)
    assert covered == 2
    assert (
        "geometric mean speedup 4.00x over 2 timed cases; 1 timed against an oracle left out"
        in (lines(cases))
    )
    assert geometric_mean({"oracle": cases["oracle"]}) is None


def test_a_ratio_over_an_oracle_is_labelled_and_never_best():
    cases = {
        "a": case(speedup=2),
        "b": case(speedup=8),
        "oracle": case(timing=timing(38.9, ci=None), reference_kind="oracle"),
    }
    shown = terminal.table(run(cases), color=True)
    assert "(38.90x diagnostic)" in shown
    assert "\x1b[32m8.00x" in shown
    row = next(line for line in shown.splitlines() if "oracle" in line)
    assert "0.9%" not in row  # no floor: nothing is claimed


def test_notices():
    published = change(provenance="published", changed_since=("torch 2.11 -> 2.13",))
    shown = lines(
        {
            "a": case(comparison=published),
            "b": case(Verdict.NO_BASELINE),
            "c": case(Verdict.OTHER_MACHINE),
            "d": case(timing=timing(dropped_pairs=3, dropped_reasons=("clock moved",))),
            "e": case(timing=timing(warnings=("another process used the device",))),
        }
    )
    assert "held against published figures (baselines/x.json)" in shown
    assert "0.950x [0.940, 0.960] (published)" in shown
    assert "no baseline stored for 1: b" in shown
    assert "another device's for 1: c" in shown
    assert "changed since the baseline: torch 2.11 -> 2.13" in shown
    assert "case d: 3 pairs dropped (clock moved)" in shown
    assert "case e: another process used the device" in shown


def test_baseline_update_is_counted():
    record = run({"a": case(), "b": case(Verdict.SLOWER)})
    shown = "\n".join(terminal.summary(record, merge=merge(None, record, selected_all=True)))
    assert "baseline: 0 new, 0 changed, 0 unchanged, 0 unused, 1 refused; refused: b" in shown


def test_what_an_update_refused_as_too_old_is_named():
    late = run({"a": case(speedup=5)}, created="2026-11-29T08:00:00+00:00")
    refused = merge(run({"a": case()}), late, selected_all=True)
    shown = "\n".join(terminal.summary(late, merge=refused))
    assert "1 refused; refused: a; refused as older than stored: a" in shown


def test_heading():
    assert terminal.heading(run()) == (
        "NVIDIA H200 (132 SMs, 9.0), torch 2.13.0, triton 3.7.1, commit abc1234"
    )


def test_nothing_ran():
    assert "no case ran" in lines({})
    assert "0 cases: nothing ran" in lines({})


HOSTILE = "\x1b[2J\x1b]0;pwned\x07::error::x\n\n| a | \u202e<script>alert(1)</script> @all #1"


@pytest.mark.parametrize("color", [False, True])
def test_foreign_text_stays_text(color):
    bad = case(
        Verdict.SLOWER,
        label=HOSTILE,
        route=HOSTILE,
        reason=HOSTILE,
        timing=timing(warnings=(HOSTILE,), dropped_pairs=1, dropped_reasons=(HOSTILE,)),
        comparison=change(baseline=HOSTILE, changed_since=(HOSTILE,), provenance="published"),
    )
    record = run({HOSTILE: bad, "c": case(Verdict.NO_BASELINE, label=HOSTILE)}, notes=(HOSTILE,))
    shown = terminal.summary(record, color)
    for line in shown:
        bare = re.sub(r"\x1b\[(3[123]|0)m", "", line) if color else line
        assert bare.isprintable()
        assert not bare.lstrip().startswith("::")
    assert not any("pwned" in line for line in shown)


def test_every_column_shows_nothing_for_an_empty_case():
    assert {column.show(unsupported(), 1.0) for column in COLUMNS} == {""}


def test_budget_without_a_finite_pair():
    none = case(Verdict.INCORRECT, None, accuracy=accuracy(3, max_abs=None, budget_used=None))
    assert "3/8.4M" in terminal.table(run({"a": none}))
