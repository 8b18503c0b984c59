"""The rule itself: which elements pass, and what is counted."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fastlayer.accuracy import Tolerance, compare

LOOSE = Tolerance(atol=0.25, rtol=0.5)


@pytest.mark.parametrize(
    ("candidate", "reference", "passes"),
    [
        (0.25, 0.0, True),  # exactly atol
        (0.2501, 0.0, False),
        (6.0, 4.0, True),  # exactly rtol * |r|
        (6.01, 4.0, False),
        (-6.0, -4.0, True),  # |r|, not r
        (2.0, 4.0, True),
        (1.99, 4.0, False),
        (4.0, 6.5, True),  # relative to the reference, not to the candidate
        (4.0, 2.6, False),
    ],
)
def test_either_accepts_the_larger_of_the_two_tolerances(
    candidate: float, reference: float, passes: bool
) -> None:
    result = compare(torch.tensor([candidate]), torch.tensor([reference]), LOOSE)
    assert result.passed is passes
    assert result.failed == (0 if passes else 1)
    assert result.total == result.compared == 1


@pytest.mark.parametrize(
    ("difference", "mode", "passes"),
    [(2.0, "either", True), (2.1, "either", False), (2.25, "sum", True), (2.26, "sum", False)],
)
def test_sum_is_allclose(difference: float, mode: str, passes: bool) -> None:
    candidate, reference = torch.tensor([4.0 + difference]), torch.tensor([4.0])
    result = compare(candidate, reference, Tolerance(0.25, 0.5, mode))  # type: ignore[arg-type]
    assert result.passed is passes
    if mode == "sum":
        assert passes is torch.allclose(candidate, reference, atol=0.25, rtol=0.5)


def test_budget_is_the_share_of_the_worst_element() -> None:
    reference = torch.tensor([0.0, 8.0, 0.0])
    candidate = torch.tensor([0.125, 9.0, -0.0625])
    result = compare(candidate, reference, LOOSE)
    assert result.budget_used == 0.5
    assert result.max_abs == 1.0
    assert result.worst is not None
    assert result.worst.index == (0,)
    assert result.squared_error == pytest.approx(1 + 0.125**2 + 0.0625**2)
    assert result.rms == pytest.approx(math.sqrt(result.squared_error / 3))


def test_defaults_are_the_published_acceptance_rule() -> None:
    assert Tolerance() == Tolerance(atol=0.002, rtol=0.02, mode="either")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"atol": -1.0}, "atol"),
        ({"rtol": math.nan}, "rtol"),
        ({"atol": math.inf}, "atol"),
        ({"mode": "and"}, "mode"),
    ],
)
def test_a_tolerance_that_means_nothing_is_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Tolerance(**arguments)  # type: ignore[arg-type]


def test_zero_tolerance_accepts_equality_alone() -> None:
    exact = Tolerance(0.0, 0.0)
    same = compare(torch.zeros(3), torch.zeros(3), exact)
    assert same.passed
    assert same.budget_used == 0.0
    other = compare(torch.tensor([0.0, 1e-30]), torch.zeros(2), exact)
    assert other.failed == 1
    assert other.budget_used == math.inf


def test_failing_columns_are_counted_by_last_dimension() -> None:
    reference = torch.zeros(4, 5, 6)
    candidate = reference.clone()
    candidate[0, 0, 2] = candidate[3, 4, 2] = candidate[1, 2, 5] = 1.0
    (columns,) = compare(candidate, reference, chunk_elements=7).columns
    assert columns.counts == ((2, 2), (5, 1))
    assert columns.width == 6


def test_merge_adds_counts_and_keeps_the_worse_element() -> None:
    zeros = torch.zeros(2)
    mild = compare(torch.tensor([0.001, 0.0]), zeros, seed=1)
    bad = compare(torch.tensor([0.0, 1.0]), zeros, seed=2)
    for merged in (mild.merge(bad), bad.merge(mild)):
        assert (merged.total, merged.failed, merged.compared) == (4, 1, 4)
        assert merged.worst is not None
        assert (merged.worst.index, merged.worst.seed) == ((1,), 2)
        assert merged.max_abs == 1.0
        assert merged.failed_seeds == (2,)
        assert not merged.passed


def test_merge_refuses_two_tolerances() -> None:
    one = compare(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="one tolerance"):
        one.merge(compare(torch.zeros(1), torch.zeros(1), LOOSE))


def test_against_a_plain_double_loop() -> None:
    generator = torch.Generator().manual_seed(7)
    reference = torch.randn(37, 5, generator=generator)
    candidate = reference + 0.004 * torch.randn(37, 5, generator=generator)
    pairs = list(zip(candidate.flatten().tolist(), reference.flatten().tolist(), strict=True))
    expected = sum(not (abs(c - r) <= 0.002 or abs(c - r) <= 0.02 * abs(r)) for c, r in pairs)
    shares = [abs(c - r) / max(0.002, 0.02 * abs(r)) for c, r in pairs]
    result = compare(candidate, reference, chunk_elements=11)
    assert 0 < result.failed == expected
    assert result.budget_used == pytest.approx(max(shares))
    assert result.worst is not None
    position = result.worst.index[0] * 5 + result.worst.index[1]
    assert position == shares.index(max(shares))
    assert result.max_abs == max(abs(c - r) for c, r in pairs)
