"""What a red case or a kept one makes the run say, whatever became of its test."""

from __future__ import annotations

import pytest

from pytest_fastlayer import baselines
from pytest_fastlayer.records import Origin

WRONG = """
import pytest
def wrong(module):
    return lambda x: module(x) + 1
@pytest.mark.xfail
def test_expected(paired):
    module = Eager()
    paired("expected", reference=module, candidate=wrong(module), inputs=inputs)
def test_swallowed(paired):
    module = Eager()
    try:
        paired("swallowed", reference=module, candidate=wrong(module), inputs=inputs)
    except BaseException:
        pass
"""
FAILING = """
def test_failing(paired):
    module = Eager()
    paired("failing", reference=module, candidate=lambda x: module(x) + 1, inputs=inputs)
"""


@pytest.mark.parametrize("flags", [(), ("-q",), ("-n1",)])
def test_a_red_case_of_a_test_that_did_not_fail_is_told(project, pytester, flags):
    if "-n1" in flags:
        pytest.importorskip("xdist")
    project(WRONG)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *flags)
    result.assert_outcomes(passed=1, xfailed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for name in ("expected", "swallowed"):
        result.stdout.fnmatch_lines(
            [f"fastlayer: INCORRECT: {name}: * elements *although test_pair.py::test_{name} did*"]
        )


def test_a_red_case_of_a_test_that_failed_is_told_once(project, pytester):
    project(FAILING)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("fastlayer: INCORRECT*")


def test_a_kept_case_is_compared_with_its_own_run_s_software(project, bench, pytester, record):
    project("""
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs)
""")
    assert bench().ret == 0
    run = baselines.load(pytester.path / "run.json")
    before = run.software.model_copy(update={"torch": "2.11.0"})
    for software, said in ((before, "torch 2.11.0 -> "), (None, "not known: ")):
        kept = Origin(created=run.created, software=software)
        case = run.cases["layer_norm"].model_copy(update={"kept_from": kept})
        stored = run.model_copy(update={"cases": {"layer_norm": case}})
        baselines.save(stored, pytester.path / "base.json")
        assert bench("--fastlayer-baseline=base.json").ret == 0
        (told,) = record()["cases"]["layer_norm"]["comparison"]["changed_since"]
        assert told.startswith(said)
