"""The stress grid: more seeds in every corner, in the record, the table and the verdict."""

from __future__ import annotations

import pytest
import torch

from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.handed import HandedError
from pytest_fastlayer.records import CaseRecord, Stress
from pytest_fastlayer.stress import (
    Cell,
    StressError,
    arms_of,
    as_stress,
    padding_and_scale,
    run,
)
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


def erasing(x):
    """Right only where the reference is given what is left of the inputs."""
    return x.zero_() if x.numel() == 7 else 2 * x


@pytest.mark.parametrize("reference", [lambda x: 2 * x, lambda x: x], ids=["new", "alias"])
def test_a_candidate_cannot_spoil_the_references_inputs(reference):
    grid = Grid([Cell("seven", lambda s: torch.arange(1.0, 8.0)), Cell("usual", draw)])
    found = evaluate(erasing, grid, reference=reference)
    assert found.record.cells[0].failed > 0
    assert found.message.startswith("in the stress grid, ")
    assert found.written == "in the stress grid, seven, seed 1"


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(-1),
        lambda x: x.data.zero_(),
        lambda x: x[3:4].fill_(torch.nan),
        lambda x: x.resize_(1),
        lambda x: torch._foreach_neg_([x]),
    ],
    ids=["whole", "silently", "in part", "form", "another operator"],
)
def test_a_candidate_that_writes_to_its_inputs_is_named_though_it_is_right(write):
    def candidate(x):
        y = torch.sin(x)
        if x[0, 0] == draw(2, 3.0)[0][0, 0]:  # one seed of one cell
            write(x)
        return y

    found = evaluate(candidate)
    assert found.record.failed == 0
    assert found.written == "in the stress grid, large, seed 2"


def test_inputs_of_every_kind_that_are_left_alone():
    values = {
        "nan": torch.tensor([torch.nan, -0.0, 1.0]),
        "complex": torch.randn(3, dtype=torch.complex128).conj(),
        "bool": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.float16).expand(4, 3),
        "eighth": torch.ones(3).to(torch.float8_e4m3fn),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.ones(0),
        "plain": [3, None],
    }
    grid = Grid([Cell("all", lambda s: (draw(s)[0], values))])
    found = evaluate(lambda x, _: torch.sin(x), grid, reference=lambda x, _: torch.sin(x))
    assert (found.record.failed, found.written) == (0, "")
    found = evaluate(
        lambda x, v: torch.sin(x) + 0 * v["bool"].logical_not_()[0],
        grid,
        reference=lambda x, _: torch.sin(x),
    )
    assert found.written == "in the stress grid, all, seed 1"


def test_a_reference_that_writes_to_its_inputs_is_named_before_the_candidate():
    def writing(x):
        return x.add_(1)

    with pytest.raises(StressError, match=r"seed \d: writing changed its own input\[0\]"):
        evaluate(lambda x: x, reference=writing)


def test_the_host_waits_once_a_cell():
    """What a device would make it wait for: an element read, or contents copied to it."""
    waits = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten.equal.default,
                torch.ops.aten.nonzero.default,
            ):
                waits.append(function)
            return function(*args, **(kwargs or {}))

    counts = []
    for seeds in ((1,), tuple(range(9))):
        waits.clear()
        with Watched():
            grid = Grid([Cell("small", draw)])
            run(grid, torch.sin, torch.sin, seeds, Tolerance(), lambda text: None)
        counts.append(len(waits))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: as_stress([Cell("a", draw)]), "stress: given .*list.*expected {label: inputs}"),
        (lambda: as_stress({"a": 3}), "'a': inputs: given 3 .int.; expected a callable"),
        (lambda: as_stress({3: draw}), "label: given 3 .int.; expected a str"),
        (lambda: Cell("a", draw, {"x": torch.ones(1)}), "workload: given .*JSON"),
        (lambda: Cell("a", draw, gated="no"), "gated: given 'no'"),
        (lambda: Grid([draw]), "given <function.*expected a Cell"),
        (lambda: Grid(Cell("a", draw)), "cells: given .*expected a list of Cell"),
        (lambda: Grid([Cell("a", draw)], arms=3), "arms: given 3"),
        (lambda: Grid([Cell("a", draw)], describe="r"), "describe: given 'r'"),
        (lambda: Grid([Cell("a", draw)], note=8), "note: given 8 .int.; expected a str"),
        (
            lambda: evaluate(torch.sin, Grid([Cell("a", draw)], describe=lambda f: {"route": 1})),
            "describe gave {'route': 1} .dict. after cell 'a'; expected a str",
        ),
        (
            lambda: arms_of(Grid([Cell("a", draw)], arms=lambda f: f), torch.sin),
            "arms gave .*expected two callables",
        ),
    ],
)
def test_what_is_no_grid_is_refused_with_what_was_given(make, told):
    with pytest.raises(HandedError, match=told):
        make()


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
    cells = [(one["label"], one["failed"], one["elements"]) for one in case["stress"]["cells"]]
    assert cells == [("usual", 0, 3 * 32 * 64), ("large", 3 * 32 * 64, 3 * 32 * 64)]


def test_writing_to_a_cells_inputs_is_dishonest(project, bench, record):
    writing = "(x.mul_(2) if x.abs().max() > 20 else x)"
    right = PAIR.replace("return y +", f"{writing}; return y +")
    project(right.replace("SPOILT", "0").replace("GRID", MAPPING))
    assert bench().ret == 0  # it writes to none of the inputs that are used by default
    result = bench("--fastlayer-stress=3")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*DISHONEST: layer_norm: *in the stress grid, large, seed 1234,*"])
    case = record()["cases"]["layer_norm"]
    assert "timing" not in case
    assert [one["failed"] for one in case["stress"]["cells"]] == [0, 0]
    (caught,) = [one for one in case["probes"] if not one["passed"]]
    assert caught["name"] == "stress_inputs_unchanged"


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
