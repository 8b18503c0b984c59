"""The RTX 5080 baseline is the publication, figure for figure."""

from __future__ import annotations

import json

import pytest
from published import SHAPES, SOURCE, TARGET, convert

from pytest_fastlayer import baselines
from pytest_fastlayer.records import GREEN, RunRecord
from pytest_fastlayer.report.table import geometric_mean


@pytest.fixture(scope="module")
def stored() -> RunRecord:
    return baselines.load(TARGET)


@pytest.fixture(scope="module")
def source() -> dict:
    return json.loads(SOURCE.read_text(encoding="utf-8"))


def test_file_is_what_the_converter_makes(stored, source):
    assert stored == convert(source)
    assert baselines.find(TARGET.parent, stored.device) == TARGET


def test_says_that_it_is_published(stored):
    assert stored.provenance == "published"
    timed = [case.timing for case in stored.cases.values() if case.timing]
    assert len(timed) == 13
    assert {(t.method.clock, t.ci, t.pairs) for t in timed} == {("published", None, 100)}


def test_figures_are_exactly_the_published_ones(stored, source):
    assert list(stored.cases) == [str(case) for case in range(1, 15)]
    assert set(stored.cases) == set(source["cases"])
    for name, case in source["cases"].items():
        entry = stored.cases[name]
        assert entry.route == case["route"]
        assert entry.accuracy.max_abs == case["max_abs_error"]
        assert entry.accuracy.failed == case["failed_elements"]
        assert entry.accuracy.trials == len(entry.accuracy.seeds) == case["trials"]
        assert entry.peak_mib.candidate == case["peak_mib"]["candidate"]
        if entry.timing:
            assert f"{entry.timing.reference_s * 1e3:.10g}" == f"{case['reference_ms']:.10g}"
            assert f"{entry.timing.candidate_s * 1e3:.10g}" == f"{case['candidate_ms']:.10g}"
            assert entry.timing.speedup == case["speedup"]
            assert f"{entry.timing.noise_floor * 100:.10g}" == f"{case['noise_floor_percent']:.10g}"


def test_figures_agree_with_each_other(stored, source):
    for entry in stored.cases.values():
        assert entry.verdict in GREEN
        if entry.timing:
            quotient = entry.timing.reference_s / entry.timing.candidate_s
            assert entry.timing.speedup == pytest.approx(quotient, rel=1e-3)
            assert (
                entry.timing.speedup / (1 + entry.timing.noise_floor) > 1 + entry.timing.noise_floor
            )
    mean, cases = geometric_mean(stored.cases)
    assert (round(mean, 3), cases) == (source["geomean_speedup_cases_1_to_13"], 13)


def test_case_14_has_no_timing_because_no_floor_was_published(stored):
    entry = stored.cases["14"]
    assert entry.timing is None
    assert entry.reference_kind == "oracle"
    assert "67.0945" in entry.reason
    assert "601.975" in entry.reason


def test_workloads_are_the_disclosed_shapes(stored):
    for name, shape in SHAPES.items():
        batch, length, width = shape[:3]
        entry = stored.cases[name]
        assert tuple(entry.workload.values()).count(None) == 0
        assert entry.workload["batch_size"] == batch
        assert entry.workload["dtype"] == "float32"
        assert entry.accuracy.total == batch * length * width * 5
        assert entry.label.startswith(f"case {name} [{batch}x{length}x{width} ")
