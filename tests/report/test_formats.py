"""Markdown, GitHub, JUnit and the explanations."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import accuracy, base, case, incorrect, run, timing, unsupported
from test_html import full_case
from test_terminal import HOSTILE, change

from pytest_fastlayer.records import (
    Arm,
    BaseStatus,
    NoiseFloor,
    Probe,
    RootMeanSquare,
    Stress,
    StressCell,
    Verdict,
    Work,
)
from pytest_fastlayer.report import explain, github, junit, markdown, rules
from pytest_fastlayer.report.table import COLUMNS


def mixed():
    return run(
        {
            "green": case(),
            "slow": case(Verdict.SLOWER, comparison=change(), reason="the drop, in full: 5%\nx"),
            "first": case(Verdict.NO_BASELINE, reason="nothing stored"),
            "wrong": incorrect(),
            "huge": unsupported(),
        }
    )


# Markdown


def test_markdown_table_is_rectangular():
    rows = [line for line in markdown.table(mixed()).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 5
    assert len({row.count("|") for row in rows}) == 1
    (first,) = [row for row in rows if row.startswith("| first ")]
    assert first.endswith("NO_BASELINE |")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a|b", "a&#124;b"),
        ("<img src=x onerror=alert(1)>", "&#60;img src=x onerror=alert(1)&#62;"),
        ("[x](http://evil)", "&#91;x&#93;(http&#58;//evil)"),
        ("@all see #1", "&#64;&#8203;all see &#35;&#8203;1"),
        ("GH-7 of GH-x", "G&#72;&#8203;-7 of GH-x"),
        ("`code` *b* $m$", "&#96;code&#96; &#42;b&#42; &#36;m&#36;"),
        ("compiled_sdpa", "compiled_sdpa"),
        ("_emphasis_", "&#95;emphasis&#95;"),
        ("www.evil.example", "&#119;ww.evil.example"),
        (":tada: 5: x", "&#58;tada: 5: x"),
        ("-5.0% of 3.0", "-5.0% of 3.0"),
    ],
)
def test_markdown_escapes(given, shown):
    assert markdown.escape(given) == shown


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(alphabet="a|<>`\n\r\\*_[]()@#!&;: \x1b", max_size=30))
def test_markdown_fuzz(name):
    document = markdown.table(run({name: case(label=name, route=name)}))
    rows = [line for line in document.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert len({row.count("|") for row in rows}) == 1
    assert not re.search(r"<(?!/?sub>)", document)


def test_github_finds_no_mention_in_the_finished_text():
    """It looks for them after entities have become characters."""
    document = markdown.table(run({"@all": case(reason="cc @octo/team, closes #1, GH-2")}))
    finished = html.unescape(document)
    assert not re.search(r"@\w|#\d|GH-\d", finished)


def test_markdown_notes_stay_items_of_one_list():
    document = markdown.table(run(notes=("- nested", "1. numbered", "# heading", "plain")))
    items = document.splitlines()[-4:]
    assert items == ["- &#45; nested", "- 1&#46; numbered", "- &#35;&#8203; heading", "- plain"]


def test_markdown_without_cases():
    assert "No case ran." in markdown.table(run({}))


# GitHub


def test_annotations():
    assert github.commands(mixed()) == [
        "::notice title=NO_BASELINE first::nothing stored",
        "::error title=SLOWER slow::the drop, in full: 5%25 x",
        "::error title=INCORRECT wrong::1 of 8388608 elements out of tolerance",
    ]


def test_annotation_points_at_the_test():
    red = case(Verdict.SLOWER, nodeid="tests/a,b.py::test[x::y]", label="x:y,z")
    (command,) = github.commands(run({"a": red}))
    assert command.startswith("::error file=tests/a%2Cb.py,title=SLOWER x%3Ay%2Cz::")


def test_annotations_cannot_be_forged():
    red = case(Verdict.SLOWER, label=HOSTILE, reason="x\n::error::forged", nodeid=HOSTILE)
    (command,) = github.commands(run({"a": red}))
    assert "\n" not in command
    assert command.isprintable()


def test_step_summary_is_appended(tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert github.write_summary(run(), {"GITHUB_STEP_SUMMARY": str(path)}) == path
    assert path.read_text() == "before\n" + markdown.table(run()) + "\n"
    assert github.write_summary(run(), {}) is None


# JUnit


def test_junit():
    suite = ET.fromstring(junit.render(mixed())).find("testsuite")
    assert suite.attrib["tests"] == "5"
    assert suite.attrib["failures"] == "2"
    assert suite.attrib["skipped"] == "1"
    cases = {entry.attrib["name"]: entry for entry in suite.iter("testcase")}
    assert cases["slow"].find("failure").attrib["type"] == "SLOWER"
    assert cases["slow"].find("failure").attrib["message"] == "SLOWER: the drop, in full: 5% x"
    assert cases["green"].find("failure") is None
    assert "speedup: 4.00x" in cases["green"].find("system-out").text
    properties = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
    assert properties["device"] == "NVIDIA H200"


def test_junit_shows_rivals():
    rival = Arm(name="compiled", verdict=Verdict.PASS, accuracy=case().accuracy, timing=timing(2))
    document = ET.fromstring(junit.render(run({"a": case(rivals=(rival,)), "b": case()})))
    cases = document.iter("testcase")
    shown = {entry.attrib["name"]: entry.find("system-out").text for entry in cases}
    assert "compiled x / ms: 2.00x / " in shown["a"]
    assert "compiled" not in shown["b"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.text(max_size=20))
def test_junit_is_always_well_formed(name):
    red = case(Verdict.SLOWER, label=name, reason=name, route=name)
    document = ET.fromstring(junit.render(run({name: red})).encode())
    assert len(list(document.iter("testcase"))) == 1


# Explanations


def test_every_verdict_has_its_rule():
    assert set(explain.RULES) == set(Verdict)
    assert set(explain.ADVICE) == set(Verdict) - {Verdict.PASS, Verdict.FASTER}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_is_explained(verdict):
    untimed = verdict in (Verdict.INCORRECT, Verdict.DISHONEST)
    lines = explain.explain("a", case(verdict, None if untimed else 4.0, reason="because"))
    assert lines[:2] == [f"a: {verdict.value}", "because"]
    assert any(line.startswith(f"The rule. {verdict.value}:") for line in lines)
    assert all("\n" not in line for line in lines)


def test_numbers_are_in_the_sentences():
    inconclusive = case(
        Verdict.INCONCLUSIVE,
        accuracy=accuracy(rms_vs_float64=RootMeanSquare(candidate=1e-4, reference=2e-4)),
        comparison=change(provenance="published", changed_since=("torch 1 -> 2",)),
        timing=timing(
            1.1,
            0.1,
            ci=(1.05, 1.15),
            extensions=4,
            floor_sources=NoiseFloor(
                within_quad=0.01, control=0.1, resolution=0.001, min_effect=0.01
            ),
            dropped_pairs=2,
            dropped_reasons=("throttled",),
            warnings=("hot",),
        ),
    )
    said = "\n".join(explain.explain("a", inconclusive))
    for part in (
        "used 43% of its tolerance",
        "candidate's RMS error is 0.0001 and the reference's 0.0002",
        "1.10x [1.05, 1.15] from 6 pairs after 4 extensions",
        "Noise floor 10.0%, set by the A/A control",
        "[1.050, 1.150] lies on both sides of 1 + floor = 1.100",
        "the reference against itself gave +0.1%",
        "smallest change detectable here is 2.0%",
        "2 pairs were dropped: throttled",
        "Warning: hot",
        "0.950x [0.940, 0.960]; below 1 is slower",
        "published, not a measurement of this machine",
        "Changed since: torch 1 -> 2",
        "- take more pairs",
        "- look for what differs between two equal arms",
    ):
        assert part in said


def test_probes_and_missing_interval():
    caught = case(Verdict.DISHONEST, None, probes=(Probe(name="p", passed=False, message="m"),))
    assert "Probe p failed: m" in explain.explain("a", caught)
    said = "\n".join(explain.explain("a", case(timing=timing(ci=None))))
    assert "noise floor stands in" in said


def test_a_diagnostic_ratio_is_explained_as_one():
    oracle = case(timing=timing(38.9, ci=None), reference_kind="oracle")
    said = "\n".join(explain.explain("a", oracle))
    assert "ratio of 38.90x is a diagnostic" in said
    assert "claims no speedup" in said
    assert "1 + floor" not in said
    assert "38.90x diagnostic" in markdown.table(run({"a": oracle}))


def test_every_ratio_over_an_oracle_is_labelled():
    arm = Arm(name="other", verdict=Verdict.PASS, accuracy=case().accuracy, timing=timing(31.7))
    oracle = case(
        timing=timing(38.9, ci=None),
        reference_kind="oracle",
        rivals=(arm,),
        variants=(arm.model_copy(update={"name": "way"}),),
        base=base(Verdict.PASS),
    )
    said = "\n".join(explain.explain("a", oracle))
    assert "Rival other: (31.70x [31.54, 31.86] diagnostic) PASS." in said
    assert "Variant way: (31.70x [31.54, 31.86] diagnostic) PASS." in said
    assert "the head came to (4.00x [3.98, 4.02] diagnostic) and the base to (4.20x" in said
    assert "(31.70x diagnostic) / " in markdown.table(run({"a": oracle}))
    assert "(31.70x diagnostic) / " in junit.render(run({"a": oracle}))


def test_the_legend_is_of_the_columns_that_are_shown():
    plain = markdown.table(run({"a": case()}))
    assert "speedup: reference time / candidate time" in plain
    for absent in ("vs base:", "vs baseline:", "stress:", "a rival's column"):
        assert absent not in plain, absent
    arm = Arm(name="one", verdict=Verdict.PASS, accuracy=case().accuracy, timing=timing(2))
    cell = StressCell(label="wide", elements=9, failed=0, budget_used=0.5, seed=3)
    whole = case(
        base=base(Verdict.PASS),
        stress=Stress.of([cell], seeds=[1]),
        rivals=(arm, arm.model_copy(update={"name": "two"})),
    )
    full = markdown.table(run({"a": whole}))
    for shown in ("vs base:", "stress:", "a rival's column"):
        assert full.count(shown) == 1, shown
    for column in COLUMNS:  # none without a word
        assert column.legend.startswith(column.heading.partition(" ")[0]), column.heading


# Explanations of a base


@pytest.mark.parametrize(
    ("verdict", "parts"),
    [
        (Verdict.SLOWER, ("The rule. SLOWER: the drop against the base", "both revisions ran")),
        (Verdict.PASS, ("The rule. PASS", "no drop against the base")),
        (Verdict.FASTER, ("faster than the base", "no other day's clock")),
        (Verdict.INCONCLUSIVE, ("so the stored baseline does",)),
    ],
)
def test_a_measured_base_is_explained(verdict, parts):
    whole = Verdict.PASS if verdict is Verdict.INCONCLUSIVE else verdict
    said = "\n".join(explain.explain("a", case(whole, base=base(verdict))))
    for part in (
        "Base. main~1 (commit fedcba9876), timed in the same schedule",
        "base 4.000 ms, head 4.211 ms",
        "0.950x [0.945, 0.955], and below 1 the head is slower",
        "noise floor of 1.0%; one-sided p = 0.0004",
        "the head came to 4.00x [3.98, 4.02] and the base to 4.20x [4.18, 4.22]",
        *parts,
    ):
        assert part in said, part


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FASTER, Verdict.SLOWER])
@pytest.mark.parametrize("own", [None, Verdict.NO_BASELINE])
def test_a_base_takes_the_place_of_what_is_stored_only_where_something_is(verdict, own):
    takes, alone = "This takes the place of the stored baseline", "No stored speed was compared"
    held = case(own or verdict, base=base(verdict), comparison=None if own else change())
    said = "\n".join(explain.explain("a", held))
    assert (takes in said, alone in said) == ((False, True) if own else (True, False))
    assert "no other day's clock is involved" in said


def test_a_base_beside_an_oracle_takes_no_stored_ratio_s_place():
    oracle = case(Verdict.PASS, base=base(Verdict.PASS), reference_kind="oracle")
    assert "No stored speed was compared" in "\n".join(explain.explain("a", oracle))


@pytest.mark.parametrize("status", sorted(set(rules.BASE_STATUS) - {"measured"}))
def test_every_base_without_a_figure_is_explained(status):
    verdict = Verdict.INCORRECT if status == "incorrect" else None
    without = base(verdict, status=status, reason="because\n", tail=("Traceback\x1b[0m",))
    said = explain.explain("a", case(base=without))
    (line,) = [line for line in said if line.startswith("Base.")]
    assert line.startswith("Base. main~1 (commit fedcba9876) gives no figure: it")
    assert "because" in line
    assert "It wrote: Traceback" in said
    assert "So the stored baseline decides, where there is one." in said


def test_base_statuses_are_all_there():
    assert set(rules.BASE_STATUS) == set(get_args(BaseStatus))


def test_memory_probes_arms_and_roofline_are_in_the_sentences():
    whole = full_case(
        notes=("guard: 0.3", "--fastlayer-admit took variant b for the candidate"),
        work=Work(flops=989e9, bytes=1),
        timing=timing(reference_s=8e-3, candidate_s=2e-3),
    )
    said = "\n".join(explain.explain("a", whole, run().device))
    for part in (
        "Memory. The candidate's peak is 75.0 MiB; reference 103.1 MiB.",
        "Honesty. 0 of 1 probes caught the candidate.",
        "The candidate says: guard: 0.3",
        "\n--fastlayer-admit took variant b for the candidate",
        "Rival compiled: 2.00x [1.99, 2.01] PASS.",
        "Variant sdpa: INCORRECT, 3 elements out.",
        "peak rates this work takes 1.000 ms; the candidate takes 2.00 times that (NVIDIA H200",
    ):
        assert part in said, part
    assert "Roofline" not in "\n".join(explain.explain("a", whole))
