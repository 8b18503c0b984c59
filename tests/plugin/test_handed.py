"""What a test hands over wrongly is its own fault, told at once; every other record is written."""

from __future__ import annotations

import json

import pytest

from pytest_fastlayer import handed
from pytest_fastlayer.options import Settings
from pytest_fastlayer.session import Run

SOUND = """
def test_sound(paired):
    module = Eager()
    paired("sound", reference=module, candidate=fast(module), inputs=inputs)
"""
FAULTY = """
from pytest_fastlayer.stress import Cell, Stress

def test_faulty(paired):
    module = Eager()
    paired(**({"name": "faulty", "reference": module, "candidate": fast(module),
               "inputs": inputs} | GIVEN))
"""


WRONG = [
    ("{'describe': lambda f: 'fused'}", "describe gave 'fused' (str); expected a mapping"),
    ("{'describe': lambda f: None}", "describe gave None (NoneType); expected a mapping"),
    ("{'describe': lambda f: {'route': 3}}", "describe gave 3 (int) for route"),
    ("{'describe': lambda f: {'notes': 'one'}}", "describe gave 'one' (str) for notes"),
    ("{'describe': lambda f: {'rout': 'x'}}", "describe gave 'x' (str) for rout"),
    ("{'describe': lambda f: {'launch': {'x': float('nan')}}}", "for launch"),
    ("{'describe': lambda f: {'launch': {'x': torch.float16}}}", "for launch"),
    ("{'describe': lambda f: {'objections': {'a': 'b'}}}", "for objections.a"),
    ("{'describe': 3}", "describe: given 3 (int); expected a callable, or None"),
    ("{'stress': Stress([Cell('a', inputs)], describe=lambda f: 3)}",
     "the stress grid's describe gave 3 (int) after cell 'a'; expected a str"),
    ("{'stress': Stress([Cell('a', inputs)], arms=lambda f: None)}",
     "the stress grid's arms gave None (NoneType); expected two callables"),
    ("{'stress': [Cell('a', inputs)]}", "stress: given [Cell("),
    ("{'name': 7}", "name: given 7 (int); expected a str that is not empty"),
    ("{'label': 7}", "label: given 7 (int); expected a str"),
    ("{'workload': {'x': float('inf')}}", "workload: given {'x': inf} (dict)"),
    ("{'workload': {1: 2}}", "workload: given {1: 2} (dict); expected a mapping from str"),
    ("{'work': {'flops': -1, 'bytes': 1}}", "work: given {'flops': -1, 'bytes': 1} (dict)"),
    ("{'reference_kind': 'Oracle'}",
     "reference_kind: given 'Oracle' (str); expected 'dense' or 'oracle' or 'other'"),
    ("{'reference': 3}", "reference: given 3 (int); expected a callable"),
    ("{'candidate': None}", "candidate: given None (NoneType); expected a callable"),
    ("{'inputs': (1,)}", "inputs: given (1,) (tuple); expected a callable"),
    ("{'tolerance': 0.1}", "tolerance: given 0.1 (float); expected a Tolerance, or None"),
    ("{'float64': 'no'}", "float64: given 'no' (str)"),
    ("{'rivals': [fast(module)]}", "rivals: given ["),
    ("{'variants': {'a': 3}}", "variants: given {'a': 3} (dict)"),
]  # fmt: skip


def test_what_is_handed_over_wrongly_costs_no_other_case(project, bench, record):
    tests = [
        FAULTY.replace("GIVEN", given).replace("faulty", f"faulty_{number}")
        for number, (given, _) in enumerate(WRONG)
    ]
    project(SOUND + "".join(tests))
    result = bench("--fastlayer-stress=1")
    result.assert_outcomes(passed=1, failed=len(WRONG))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    shown = result.stdout.str()
    assert [told for _, told in WRONG if told not in shown] == []
    assert "INTERNALERROR" not in shown
    cases = record()["cases"]
    assert cases.pop("sound")["verdict"] == "NO_BASELINE"
    # What came to light only when the candidate had run costs none of its figures.
    late = [
        n
        for n, (_, told) in enumerate(WRONG)
        if told.startswith(("describe gave", "for ", "the stress"))
    ]
    assert cases.keys() == {f"faulty_{n}" for n in late}
    assert {case["verdict"] for case in cases.values()} == {"UNJUDGED"}
    assert {case["accuracy"]["failed"] for case in cases.values()} == {0}


MARKED_WRONG = [
    ("paired_timing(pairs=24.5)", "pairs: given 24.5 (float); expected an int"),
    ("paired_timing(pairs=1)", "pairs: given 1 (int); expected an int of at least 2"),
    ("paired_timing(min_effect=-1)", "min_effect: given -1 (int)"),
    ("paired_timing(block_ms=float('nan'))", "block_ms: given nan (float)"),
    ("paired_timing(l2='hot')", "l2: given 'hot' (str); expected 'warm' or 'cold'"),
    ("tolerance(atol='0.1')", "atol: given '0.1' (str)"),
    ("seeds(True)", "expected one positive integer, got (True,)"),
]


def test_markers_that_cannot_be_followed(project, pytester, record):
    tests = [
        SOUND.replace("sound", f"marked_{number}").replace("def ", f"@pytest.mark.{mark}\ndef ")
        for number, (mark, _) in enumerate(MARKED_WRONG)
    ]
    project(f"import pytest\n{SOUND}{''.join(tests)}")
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "--fastlayer-json=run.json", "--fastlayer-device=cpu"
    )
    result.assert_outcomes(passed=1, errors=len(MARKED_WRONG))
    shown = result.stdout.str()
    assert [told for _, told in MARKED_WRONG if told not in shown] == []
    assert list(record()["cases"]) == ["sound"]


def test_a_refusal_is_checked_too(project, bench):
    project("""
def test_large(paired):
    paired.unsupported("large", 10.24)
""")
    result = bench()
    result.assert_outcomes(failed=1)
    assert "reason: given 10.24 (float); expected a str" in result.stdout.str()


def test_text_that_utf8_cannot_hold_is_escaped(project, bench, record):
    odd = SOUND.replace("sound", "odd").replace(
        "inputs=inputs",
        "inputs=inputs, label='\\ud800', workload={'a': ['\\udfff']},"
        " describe=lambda f: {'notes': ['\\ud801']}",
    )
    project(SOUND + odd)
    assert bench("--fastlayer-html=r.html", "--fastlayer-markdown=r.md").ret == 0
    case = record()["cases"]["odd"]
    assert (case["label"], case["workload"], case["notes"]) == (
        "\\ud800", {"a": ["\\udfff"]}, ["\\ud801"],
    )  # fmt: skip


def test_a_workload_too_deep_to_be_read_back_fails_its_own_test(project, bench, record):
    deep = SOUND.replace("sound", "deep").replace(
        "inputs=inputs", "inputs=inputs, workload={'a': nested}"
    )
    nested = "nested = 1\nfor _ in range(80):\n    nested = [nested]\n"
    project(SOUND + nested + deep)
    result = bench()
    result.assert_outcomes(passed=1, failed=1)
    assert "the record of 'deep'" in result.stdout.str()
    assert list(record()["cases"]) == ["sound"]


def payload(name: str, **case: object) -> dict:
    return {
        "name": name,
        "case": {"verdict": "UNSUPPORTED", "reason": "too large", **case},
        "header": {
            "device": {
                "type": "cpu", "name": "a", "capability": None, "multiprocessors": 1,
                "memory_mib": 1,
            },
            "software": {"python": "3.11", "platform": "linux"},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    "bad", [{"route": 3}, {"workload": {"x": float("nan")}}, {"label": "\ud800"}, {"odd": 1}]
)
def test_one_bad_case_never_costs_the_others_their_record(bad, tmp_path):
    """Whatever got past the test that made it."""
    run = Run(Settings(json=tmp_path / "run.json", html=tmp_path / "r.html"))
    run.add(payload("first"), "test_a")
    run.add(payload("bad", **bad), "test_b")
    run.add(payload("last"), "test_c")
    assert run.finish() is False
    (error,) = run.errors
    assert error.startswith("case 'bad' was left out of the record: ")
    assert list(json.loads((tmp_path / "run.json").read_text())["cases"]) == ["first", "last"]
    assert (tmp_path / "r.html").exists()


def test_a_run_of_bad_cases_alone_is_red():
    run = Run(Settings())
    run.add(payload("bad", route=3), "test_a")
    assert run.finish() is False
    assert run.outcomes == []


def test_a_report_that_cannot_be_drawn_costs_no_other_file(tmp_path, monkeypatch):
    from pytest_fastlayer.report import markdown

    def fail(record):
        raise KeyError("columns")

    monkeypatch.setattr(markdown, "table", fail)
    run = Run(
        Settings(json=tmp_path / "run.json", markdown=tmp_path / "r.md", html=tmp_path / "r.html")
    )
    run.add(payload("first"), "test_a")
    assert run.finish() is False
    (error,) = run.errors
    assert error == f"{tmp_path / 'r.md'} was not written: KeyError: 'columns'"
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "r.html"}


def test_every_argument_of_paired_has_a_rule():
    import inspect

    from pytest_fastlayer.fixtures import Paired

    named = set(inspect.signature(Paired.__call__).parameters) - {"self", "stress"}
    assert named == set(handed.PAIR)
    refused = set(inspect.signature(Paired.unsupported).parameters) - {"self"}
    assert refused == set(handed.REFUSAL)
