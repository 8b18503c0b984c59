"""The base's and the rivals' columns: there when measured, absent when not, told when refused."""

from __future__ import annotations

import pytest
from makers import accuracy, base, case, run, timing

from pytest_fastlayer import baselines
from pytest_fastlayer.records import Arm, Comparison, Verdict
from pytest_fastlayer.report import github, markdown, terminal
from pytest_fastlayer.report.table import build


def column(heading, cases):
    table = build(run(cases))
    index = table.headings.index(heading)
    return [row[index].text for row in table.rows]


def rival(name="sdpa", speedup=2.0, **changes):
    fields = {"verdict": Verdict.PASS, "accuracy": accuracy(), "timing": timing(speedup)}
    return Arm(**{"name": name} | fields | changes)


def test_no_column_without_a_base_or_a_rival():
    headings = build(run()).headings
    assert not {"vs base", "sdpa x / ms"} & set(headings)


def test_the_ratio_against_the_base_and_its_verdict():
    cases = {
        "0_slower": case(base=base(ratio=0.95)),
        "1_alike": case(base=base(Verdict.PASS, 1.0)),
        "2_faster": case(base=base(Verdict.FASTER, 1.2)),
        "3_gone": case(base=base(None, status="missing", reason="it has no such test")),
        "4_none": case(),
    }
    assert column("vs base", cases) == [
        "0.950x [0.945, 0.955] SLOWER",
        "1.000x [0.995, 1.005]",
        "1.200x [1.194, 1.206] FASTER",
        "missing",
        "",
    ]


def test_one_column_a_rival_with_its_time_or_its_refusal():
    refused = rival("sdpa", verdict=Verdict.INCORRECT, accuracy=accuracy(failed=1), timing=None)
    cases = {
        "a": case(rivals=(rival("sdpa", 2.0), rival("{compiled}", 8.0))),
        "b": case(rivals=(refused,)),
        "c": case(),
    }
    assert column("sdpa x / ms", cases) == ["2.00x / 2.000", "INCORRECT", ""]
    assert column("{compiled} x / ms", cases) == ["8.00x / 0.5000", "", ""]


def test_columns_reach_every_format_escaped(tmp_path):
    record = run({"a": case(base=base(), rivals=(rival("<b>|x"),))})
    assert "vs base" in terminal.table(record)
    page = markdown.table(record)
    assert "0.950x &#91;0.945, 0.955&#93; SLOWER" in page
    assert "<b>" not in page
    path = github.write_summary(record, {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")})
    assert path is not None
    assert "vs base" in path.read_text()


def test_what_a_base_did_not_say_is_a_notice():
    lost = base(None, status="crashed", reason="its process ended by SIGSEGV")
    shown = "\n".join(terminal.summary(run({"1": case(base=lost), "2": case(base=lost)})))
    assert "no figure of the base for 1, 2, held against the stored baseline alone" in shown
    assert "main~1 crashed: its process ended by SIGSEGV" in shown


DROP = Comparison(
    baseline="x.json", provenance="measured", ratio=0.9, ci=(0.89, 0.91), threshold=0.02, p_value=0
)


@pytest.mark.parametrize(("comparison", "is_told"), [(DROP, True), (None, False)])
def test_a_drop_that_the_base_explains_is_told_and_not_stored_unasked(comparison, is_told):
    row = case(base=base(Verdict.PASS, 1.0), comparison=comparison)
    record = run({"a": row})
    assert ("slower than stored" in "\n".join(terminal.summary(record))) == is_told
    merge = baselines.merge(run(), record, selected_all=True)
    assert merge.refused == (("a",) if is_told else ())
    accepted = baselines.merge(run(), record, accept={"a"}, selected_all=True)
    assert accepted.refused == ()
    assert accepted.record.cases["a"].base is None
