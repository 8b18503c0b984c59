"""The Triton kernel: its arithmetic in the interpreter, its resources without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fastlayer.kernels import polynomial as kernel
from fastlayer.kernels import polynomial_resources as table
from fastlayer.kernels.compile import Resources
from fastlayer.routes import prefix_body

_SCRIPT = Path(__file__).with_name("interpreted_polynomial.py")
_BASELINE = Path(__file__).parents[2] / "baselines" / "polynomial_resources.json"
_NAMES = [
    line.split('"')[1] for line in _SCRIPT.read_text().splitlines() if line.startswith('    "')
    and "Check(" in line
]  # fmt: skip

#: Largest difference from the float32 algorithm: float16 operands and output. Scores of a spread of
#: two are the guard's to refuse; there the kernel shall only do what the algorithm does.
_BOUND = {"wide spread": 2e-3, "spikes in the chunk": 2e-3}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, float]]:
    done = subprocess.run([sys.executable, str(_SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row.pop("name"): row for row in rows}


def test_every_check_ran(results: dict[str, dict[str, float]]) -> None:
    assert sorted(results) == sorted(_NAMES)
    assert len(_NAMES) >= 8


@pytest.mark.parametrize("name", _NAMES)
def test_the_kernel_does_what_the_algorithm_does(
    name: str, results: dict[str, dict[str, float]]
) -> None:
    row = results[name]
    assert row["finite"], "rows were left unwritten, or are not finite"
    assert row["untouched"], "rows of the exact prefix were written"
    assert row["from_twin"] <= _BOUND.get(name, 2e-4)
    # And what remains is the polynomial's own error, not the kernel's.
    assert row["from_exact"] <= row["twin_from_exact"] + _BOUND.get(name, 2e-4)


@pytest.mark.parametrize("name", _NAMES)
def test_what_surveys_and_checks_is_the_same_by_kernels(
    name: str, results: dict[str, dict[str, float]]
) -> None:
    row = results[name]
    assert row["moments"] <= 1e-4
    assert row["along"] <= 1e-3
    assert row["spread"] <= 5e-3
    assert row["rows"] <= 1e-3


def test_a_narrow_spread_is_exact_to_float16(results: dict[str, dict[str, float]]) -> None:
    assert results["narrow spread"]["from_exact"] <= 2e-4


@pytest.mark.parametrize("capability", [90, 120])
def test_resources_hold_their_baseline(capability: int) -> None:
    baseline = table.read_baseline(_BASELINE)
    found = dict(table.measure(capability))
    assert len(found) == 6
    for name, taken in found.items():
        assert not table.complaints(capability, name, taken, baseline), taken


def test_the_resource_baseline_judges() -> None:
    tools = table.toolchain(90)
    rows = {tools: {"a": {"registers": 200, "stack": 0, "shared": 1000}}}
    assert table.complaints(90, "a", Resources(255, 0, 1000), rows) == []
    assert "stack grew" in table.complaints(90, "a", Resources(255, 800, 1000), rows)[0]
    assert "shared grew" in table.complaints(90, "a", Resources(255, 0, 2000), rows)[0]
    assert "no baseline" in table.complaints(90, "b", Resources(255, 0, 1000), rows)[0]
    assert table.complaints(90, "a", Resources(255, 0, 10**6), {})
    committed = table.read_baseline(_BASELINE)
    for row in (row for rows in committed.values() for row in rows.values()):
        assert row["stack"] == 0


def test_the_route_knows_the_kernels_widths() -> None:
    assert prefix_body._KERNEL_HEAD_DIMS == kernel.HEAD_DIMS


def test_case_14_fits_the_default_working_set_in_groups_of_heads() -> None:
    per_head = kernel.workspace_per_head(100_000, 64, 1024)
    assert 90e6 < per_head < 200e6
    assert per_head * 16 < 3 * 2**30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_row": 100}, "first_row a positive multiple of chunk = 64"),
        ({"first_row": 0}, "first_row a positive multiple"),
        ({"first_row": 256}, "below 256"),
        ({"chunk": 96, "first_row": 96}, "chunk a multiple of rows"),
        ({"coefficients": torch.zeros(2, 3)}, r"coefficients \[H, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    q = torch.zeros(2, 256, 64, dtype=torch.float16)
    given = {"coefficients": torch.zeros(2, 4), "first_row": 64, "chunk": 64} | changes
    coefficients = given.pop("coefficients")
    launch = kernel.PolynomialLaunch(rows=64)
    with pytest.raises(ValueError, match=message):
        kernel.polynomial_attention(q, q, q, q, coefficients, launch=launch, **given)


def test_types_and_widths_are_refused() -> None:
    q = torch.zeros(2, 256, 64)
    with pytest.raises(ValueError, match="float16 tensors"):
        kernel.polynomial_attention(q, q, q, q, torch.zeros(2, 4), first_row=128, chunk=128)
    q = torch.zeros(2, 256, 24).half()
    with pytest.raises(ValueError, match="given 24; expected a head_dim of 16, 32 or 64"):
        kernel.polynomial_attention(q, q, q, q, torch.zeros(2, 4), first_row=128, chunk=128)


def test_numbers_are_read_on_a_cpu_as_they_are() -> None:
    from fastlayer.kernels.readback import read

    assert read(torch.tensor([1.5, -2.0])) == [1.5, -2.0]
