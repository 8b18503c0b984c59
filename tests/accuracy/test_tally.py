"""The quick tally agrees with the full comparison, element for element."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fastlayer.accuracy import Tolerance, compare
from pytest_fastlayer.elementwise import tally

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("mode", ["either", "sum"])
@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.001, 3.1]),
        ([NAN, 2.0], [1.0, 2.0]),
        ([NAN, 2.0], [NAN, 2.0]),
        ([INF, -INF], [INF, INF]),
        ([1.0, 1.0], [INF, NAN]),
        ([NAN], [NAN]),
        ([0.0, 0.0], [0.0, 1e-9]),
    ],
)
def test_as_the_comparison(mode, candidate, reference):
    c, r = torch.tensor(candidate), torch.tensor(reference)
    tolerance = Tolerance(0.002, 0.02, mode)
    whole = compare(c, r, tolerance)
    failed, budget = tally(c, r, 0.002, 0.02, mode, chunk=2).tolist()
    assert failed == whole.failed
    assert budget == pytest.approx(-1.0 if whole.budget_used is None else whole.budget_used)


@pytest.mark.parametrize("atol", [0.0, 1e-3])
def test_large_random_outputs(atol):
    generator = torch.Generator().manual_seed(7)
    r = torch.randn(37, 129, generator=generator)
    c = r + 0.003 * torch.randn(37, 129, generator=generator)
    c[3, 5] = NAN
    whole = compare(c, r, Tolerance(atol, 0.01))
    failed, budget = tally(c, r, atol, 0.01, "either", chunk=500).tolist()
    assert failed == whole.failed > 0
    assert budget == pytest.approx(whole.budget_used)


def test_integers_must_be_equal():
    c, r = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert tally(c, r, 1.0, 1.0, "either", chunk=8).tolist() == [1.0, INF]
    assert tally(r, r, 0.0, 0.0, "either", chunk=8).tolist() == [0.0, 0.0]


def test_an_overflowing_difference_fails():
    c, r = torch.tensor([1.7e308], dtype=torch.float64), torch.tensor([-1.7e308]).double()
    r = torch.tensor([-1.7e308], dtype=torch.float64)
    assert tally(c, r, 0.002, 0.02, "either", chunk=8)[0] == 1
