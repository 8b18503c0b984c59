"""Baselines through the plugin: judge first, write after, lose nothing."""

from __future__ import annotations

import json

import pytest

MANY = """
import pytest

@pytest.mark.parametrize("number", range(12))
def test_many(paired, number):
    if number >= 3:
        paired.unsupported(f"case-{number}", "no such device")
    module = Eager()
    paired(f"case-{number}", reference=module, candidate=fast(module), inputs=inputs)
"""

ONE = """
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs)
"""

TWO = ONE + ONE.replace("layer_norm", "second")


def stored(pytester) -> dict:
    (path,) = (pytester.path / "base").glob("*.json")
    return json.loads(path.read_text())


def test_update_stores_what_was_measured(project, bench, pytester):
    project(TWO)
    assert bench("--fastlayer-update-baseline", "--fastlayer-baseline=base").ret == 0
    assert sorted(stored(pytester)["cases"]) == ["layer_norm", "second"]


def test_a_second_run_compares_with_the_first_record(project, bench, record):
    project(ONE)
    assert bench().ret == 0
    assert bench("--fastlayer-json=second.json", "--fastlayer-baseline=run.json").ret == 0
    comparison = record("second.json")["cases"]["layer_norm"]["comparison"]
    assert comparison["baseline"] == "run.json"
    assert 0.5 < comparison["ratio"] < 2


@pytest.mark.parametrize("content", [None, '{"schema_version": 999}', "{"])
def test_a_given_baseline_must_be_one(project, bench, pytester, content):
    project(ONE)
    if content is not None:
        (pytester.path / "given.json").write_text(content)
    result = bench("--fastlayer-baseline=given.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fastlayer-baseline*given.json*"])


def test_red_case_leaves_the_baseline_as_it_was(project, bench, pytester):
    project(TWO)
    bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    before = stored(pytester)
    project(TWO.replace("candidate=fast(module)", "candidate=lambda x: fast(module)(x) + 1", 1))
    result = bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*not updated*layer_norm*"])
    assert stored(pytester) == before


def test_worse_figure_is_accepted_by_name(project, bench, pytester):
    project(ONE)
    bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    before = stored(pytester)["cases"]["layer_norm"]["timing"]["speedup"]
    project(ONE.replace("fast(module)", "fast(module, 2 * FAST_S)"))
    update = ("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    assert bench(*update).ret == 1
    assert bench(*update, "--fastlayer-accept=layer_norm").ret == 0
    assert stored(pytester)["cases"]["layer_norm"]["timing"]["speedup"] < before


def test_accepting_an_unknown_case_names_the_known(project, bench):
    project(ONE)
    result = bench("--fastlayer-accept=layer_nrom")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*--fastlayer-accept=layer_nrom*layer_norm*"])


def test_corrupt_baseline_is_named_and_left_alone(project, bench, pytester):
    project(ONE)
    bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    (path,) = (pytester.path / "base").glob("*.json")
    path.write_text('{"schema_version": 1, "cases"')
    result = bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{path.name}*"])
    assert path.read_text() == '{"schema_version": 1, "cases"'


def test_stored_case_that_no_test_measures_fails_the_run(project, bench):
    project(TWO)
    bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    project(ONE)
    result = bench("--fastlayer-baseline=base")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*stores second, which no test measures*"])


def test_a_narrowed_run_says_nothing_of_the_rest(project, bench):
    project(TWO)
    bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    assert bench("--fastlayer-baseline=base", "-k", "layer_norm").ret == 0


def test_missing_entry_is_red_where_a_baseline_is_required(project, bench):
    project(ONE)
    bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    project(TWO)
    assert bench("--fastlayer-baseline=base").ret == 0
    result = bench("--fastlayer-baseline=base", "--fastlayer-require-baseline")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*NO_BASELINE*second*"])


def test_workers_merge_into_one_record(project, bench, record, pytester):
    """Timed cases and refused ones, by two workers that share the device."""
    pytest.importorskip("xdist")
    project(MANY)
    result = bench("-n2", "-q", "--fastlayer-update-baseline", "--fastlayer-baseline=base")
    result.assert_outcomes(passed=3, skipped=9)
    cases = record()["cases"]
    assert sorted(cases) == sorted(f"case-{n}" for n in range(12))
    assert [name for name, case in cases.items() if "timing" in case] == [
        "case-0",
        "case-1",
        "case-2",
    ]
    assert stored(pytester)["cases"].keys() == cases.keys()


def test_dist_each_is_refused(project, bench):
    pytest.importorskip("xdist")
    project(ONE)
    result = bench("-n2", "--dist=each")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--dist=each*"])


def test_crashed_worker_is_reported_and_its_baseline_kept(project, bench, pytester):
    pytest.importorskip("xdist")
    project(TWO)
    bench("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    before = stored(pytester)
    project(
        ONE
        + """
def test_second(paired):
    import os
    os._exit(3)
"""
    )
    result = bench("-n1", "--fastlayer-update-baseline", "--fastlayer-baseline=base")
    assert result.ret == 1
    assert "crashed" in result.stdout.str()
    assert stored(pytester) == before


def test_interrupted_run_keeps_the_baseline(project, bench, pytester):
    project(TWO)
    update = ("--fastlayer-update-baseline", "--fastlayer-baseline=base")
    bench(*update)
    before = stored(pytester)
    project(ONE + "\ndef test_second(paired):\n    raise KeyboardInterrupt\n")
    result = bench(*update, subprocess=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert stored(pytester) == before
