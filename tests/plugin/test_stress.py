"""The stress grid: more seeds in every corner, in the record, the table and the verdict."""

from __future__ import annotations

import pytest
import torch

from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.records import CaseRecord, Stress
from pytest_fastlayer.stress import Cell, StressError, as_stress, padding_and_scale, run
from pytest_fastlayer.stress import Stress as Grid

SEEDS = (1, 2, 3)


def draw(seed: int, scale: float = 1.0) -> tuple[torch.Tensor]:
    return (scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)),)


def evaluate(candidate, grid=None, reference=torch.sin, tolerance=None):
    grid = grid or Grid([Cell("small", draw), Cell("large", lambda s: draw(s, 3.0))])
    lines: list[str] = []
    found = run(grid, reference, candidate, SEEDS, tolerance or Tolerance(), lines.append, "replay")
    assert len(lines) == len(grid.cells)
    return found


def test_a_right_candidate():
    found = evaluate(lambda x: torch.sin(x) + 1e-3)
    record = found.record
    assert found.message == ""
    assert record.failed == 0
    assert record.elements == 2 * 3 * 32
    assert record.budget_used == pytest.approx(0.5, rel=1e-3)
    assert [cell.label for cell in record.cells] == ["small", "large"]
    assert record.seeds == SEEDS
    assert record.seed in SEEDS
    assert Stress.model_validate(record.model_dump(mode="json")) == record


def test_a_failure_is_found_named_and_explained():
    def candidate(x):
        y = torch.sin(x)
        if x[0, 0] == draw(2, 3.0)[0][0, 0]:  # one seed of one cell
            y[5, 1] += 0.5
        return y

    found = evaluate(candidate)
    record = found.record
    assert (record.failed, record.cell, record.seed) == (1, "large", 2)
    assert [cell.failed for cell in record.cells] == [0, 1]
    assert found.message.startswith("in the stress grid, large, seed 2:\n")
    assert "[5, 1]" in found.message
    assert "replay" in found.message


def test_a_nan_is_a_failure_and_the_worst():
    def candidate(x):
        y = torch.sin(x) + 1.9e-3
        if x[0, 0] == draw(3)[0][0, 0]:
            y[0, 0] = torch.nan
        return y

    record = evaluate(candidate).record
    assert (record.failed, record.cell, record.seed) == (1, "small", 3)


def test_what_differs_from_run_to_run_is_said():
    calls = iter(range(100))
    found = evaluate(lambda x: torch.sin(x) + (next(calls) == 0))
    assert found.record.failed == 32
    assert "not a function of its inputs" in found.message


@pytest.mark.parametrize(
    "candidate",
    [
        lambda x: torch.sin(x).double(),
        lambda x: torch.sin(x)[1:],
        lambda x: (torch.sin(x),),
        lambda x: None,
    ],
    ids=["type", "shape", "structure", "nothing"],
)
def test_another_form_is_a_failure(candidate):
    assert evaluate(candidate).record.failed > 0


def test_several_outputs_and_plain_values():
    def both(x):
        return {"a": torch.sin(x), "b": (x > 0), "n": 3}

    assert evaluate(both, reference=both).record.failed == 0
    assert evaluate(lambda x: both(x) | {"n": 4}, reference=both).record.failed > 0
    assert evaluate(lambda x: both(x) | {"b": x > 1}, reference=both).record.failed > 0


def test_cells_that_are_not_gated_are_reported_apart():
    grid = Grid([Cell("in", draw), Cell("out", lambda s: draw(s, 100.0), gated=False)])
    found = evaluate(lambda x: torch.where(x.abs() > 50, x, torch.sin(x)), grid)
    record = found.record
    assert record.failed == 0
    assert found.message == ""
    (apart,) = record.ungated
    assert apart.failed > 0
    assert [cell.label for cell in record.cells] == ["in"]


def test_empty_outputs_check_nothing():
    with pytest.raises(StressError, match="'small'"):
        evaluate(lambda x: x[:0], reference=lambda x: x[:0])


def test_grids_that_cannot_fail_are_refused():
    with pytest.raises(StressError, match="no gated cell"):
        Grid([])
    with pytest.raises(StressError, match="'a'"):
        Grid([Cell("a", draw), Cell("a", draw)])


def test_the_usual_grid():
    cells = padding_and_scale(lambda *given: given)
    assert len(cells) == 4 * 3 + 2
    assert [cell.gated for cell in cells] == [True] * 12 + [False] * 2
    assert cells[4].inputs(7) == (7, 0.1, 1.0)
    assert cells[4].label == "padding 0.1, scale 1"
    assert cells[-1].workload == {"padding_ratio": 0.0, "input_scale": 10.0}


def test_a_mapping_is_a_grid():
    grid = as_stress({"a": draw})
    assert grid is not None
    assert [cell.label for cell in grid.cells] == ["a"]
    assert as_stress(None) is None


PAIR = """
from pytest_fastlayer.stress import Cell, Stress

def scaled(scale):
    return lambda seed: tuple(scale * one for one in inputs(seed))

def small(seed):
    return tuple(one[:4] for one in inputs(seed))

def test_layer_norm(paired):
    module = Eager()
    def candidate(x):
        y = fast(module)(x)
        return y + SPOILT * (x.abs().max() > 20)
    paired("layer_norm", reference=module, candidate=candidate, inputs=inputs, stress=GRID)
"""
MAPPING = "{'usual': inputs, 'large': scaled(10)}"


def test_a_failing_cell_makes_the_case_incorrect(project, bench, record):
    project(PAIR.replace("SPOILT", "0.1").replace("GRID", MAPPING))
    assert bench().ret == 0  # right on what is checked by default
    result = bench("--fastlayer-stress=3")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*INCORRECT: layer_norm: * in large (seed 123*"])
    result.stdout.fnmatch_lines(["*in the stress grid, large, seed 123*"])
    case = record()["cases"]["layer_norm"]
    assert case["verdict"] == "INCORRECT"
    assert "timing" not in case
    assert case["stress"]["failed"] == 3 * 32 * 64
    assert case["stress"]["cell"] == "large"


def test_the_grid_is_recorded_and_shown(project, bench, record):
    project(PAIR.replace("SPOILT", "0").replace("GRID", MAPPING))
    result = bench("--fastlayer-stress=2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*stress*", "*0.00 of 2x2*"])
    case = record()["cases"]["layer_norm"]
    assert case["stress"]["seeds"] == [1234, 1235]
    assert case["timing"]["speedup"] > 2
    plain = bench()
    plain.stdout.no_fnmatch_line("*of 2x2*")
    assert "stress" not in record()["cases"]["layer_norm"]


def test_arms_of_the_grids_own(project, bench, record):
    grid = (
        "Stress([Cell('small', small)], arms=lambda f: (Eager(), fast(module)), "
        "describe=lambda f: 'quick', note='4 rows')"
    )
    project(PAIR.replace("SPOILT", "0").replace("GRID", grid))
    assert bench("--fastlayer-stress=2").ret == 0
    stress = record()["cases"]["layer_norm"]["stress"]
    assert stress["elements"] == 2 * 4 * 64
    assert stress["note"] == "4 rows"
    assert stress["cells"][0]["route"] == "quick"


def test_no_speed_with_a_failed_cell():
    failed = evaluate(lambda x: torch.cos(x)).record
    timing = {
        "method": {"clock": "cpu_clock", "settle_s": 0, "block_ms": 1},
        "reference_s": 1.0,
        "candidate_s": 1.0,
        "speedup": 1.0,
        "noise_floor": 0.0,
        "pairs": 2,
    }
    accuracy = {
        "trials": 1,
        "seeds": [1],
        "failed": 0,
        "nonfinite": 0,
        "total": 1,
        "tolerance": {"atol": 0, "rtol": 0},
    }
    with pytest.raises(ValueError, match="stress grid with no failed element"):
        CaseRecord(verdict="PASS", accuracy=accuracy, timing=timing, stress=failed)
