"""The kernels' arithmetic, masks and flags on the CPU, against the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

_SCRIPT = Path(__file__).with_name("interpreted.py")
_NAMES = [
    line.split('"')[1]
    for line in _SCRIPT.read_text().splitlines()
    if line.startswith('    "') and "Check(" in line
]

_PRODUCTS = ("products 32", "products 24", "products 77")
_OTHERS = ("proof", "proof of a wrong kernel", "rowwise", *_PRODUCTS, "wrong products")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, object]]:
    done = subprocess.run([sys.executable, str(_SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["name"]: row for row in rows}


def test_every_check_ran(results: dict[str, dict[str, object]]) -> None:
    assert sorted(results) == sorted([*_NAMES, *_OTHERS])


def test_the_proof_passes_a_right_kernel_and_no_wrong_one(
    results: dict[str, dict[str, object]],
) -> None:
    assert results["proof"]["refusal"] == ""
    assert "differs from the reference" in str(results["proof of a wrong kernel"]["refusal"])


@pytest.mark.parametrize("name", _NAMES)
def test_agrees_with_the_reference(name: str, results: dict[str, dict[str, object]]) -> None:
    """Fresh weights with real biases, outputs poisoned with NaN, padding holding NaN."""
    row = results[name]
    assert row["finite"], f"{name} left elements unwritten or not finite"
    assert float(str(row["budget"])) <= 0.6, row


def test_rowwise_kernels_round_once(results: dict[str, dict[str, object]]) -> None:
    """float16 results lie within half a unit of exact ones below 8; ``finish`` stays float32."""
    row = results["rowwise"]
    assert float(str(row["normalise"])) <= 2e-3
    assert row["copied"]
    assert float(str(row["finish"])) <= 1e-4


@pytest.mark.parametrize("name", _PRODUCTS)
def test_products_pass_their_proof(name: str, results: dict[str, dict[str, object]]) -> None:
    assert results[name]["refusal"] == ""


def test_wrong_products_do_not(results: dict[str, dict[str, object]]) -> None:
    assert "activated differs from float64" in str(results["wrong products"]["refusal"])
