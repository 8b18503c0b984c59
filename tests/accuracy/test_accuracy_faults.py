"""Faults seen in other comparers, each with the behaviour that is right."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fastlayer.accuracy import (
    ElementwiseError,
    OutputError,
    Tolerance,
    assert_elementwise,
    compare,
    to_record,
)

NAN, INF = math.nan, math.inf


def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype)


def test_half_differences_do_not_overflow() -> None:
    result = compare(one(60000.0, torch.float16), one(-60000.0, torch.float16))
    assert result.max_abs == 120000.0
    assert result.failed == 1
    assert result.nonfinite == 0


@pytest.mark.parametrize(
    ("candidate", "reference", "dtype"),
    [
        (200, 201, torch.uint8),
        (-128, 127, torch.int8),
        (2**62, -(2**62), torch.int64),
        (2**53, 2**53 + 1, torch.int64),
        (1, 2, torch.uint16),
        (True, False, torch.bool),
    ],
)
def test_integers_must_be_equal_whatever_the_tolerance(
    candidate: int, reference: int, dtype: torch.dtype
) -> None:
    c, r = torch.tensor([candidate, 1], dtype=dtype), torch.tensor([reference, 1], dtype=dtype)
    generous = Tolerance(atol=1e30, rtol=1e30)
    result = compare(c, r, generous)
    assert (result.failed, result.total) == (1, 2)
    assert result.max_abs == max(1.0, float(abs(int(candidate) - int(reference))))
    assert result.worst is not None
    assert result.worst.index == (0,)
    assert result.columns[0].counts == ((0, 1),)
    assert compare(r, r, generous).passed


def test_bfloat16_products_are_not_rounded_up() -> None:
    # In bfloat16 0.02 * 1.0 rounds to 0.02002: a difference between the two would pass.
    r, c = one(1.0, torch.bfloat16), one(1.0234375, torch.bfloat16)
    assert not compare(c, r, Tolerance(atol=0.0, rtol=0.0234)).passed
    assert compare(c, r, Tolerance(atol=0.0, rtol=0.0235)).passed


@pytest.mark.parametrize("name", [n for n in dir(torch) if n.startswith("float8")])
def test_float8_is_widened(name: str) -> None:
    dtype = getattr(torch, name)
    r = torch.tensor([1.0, 2.0]).to(dtype)
    c = torch.tensor([1.0, 4.0]).to(dtype)
    assert compare(r, r).passed
    result = compare(c, r)
    assert (result.failed, result.max_abs) == (1, 2.0)


def test_empty_outputs_prove_nothing() -> None:
    result = compare(torch.empty(0, 3), torch.empty(0, 3))
    assert result.total == result.failed == 0
    assert not result.passed
    with pytest.raises(ElementwiseError, match="nothing was compared"):
        assert_elementwise(torch.empty(0), torch.empty(0))
    assert compare((torch.empty(0), torch.ones(1)), (torch.empty(0), torch.ones(1))).passed


@pytest.mark.parametrize(
    ("candidate", "reference", "word"),
    [
        (torch.zeros(4, 1), torch.zeros(4), "shape"),
        (torch.zeros(()), torch.zeros(1), "shape"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64), "dtype"),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4), "dtype"),
        (torch.zeros(4, device="meta"), torch.zeros(4), "meta"),
    ],
)
def test_nothing_broadcasts_or_promotes(
    candidate: torch.Tensor, reference: torch.Tensor, word: str
) -> None:
    with pytest.raises((ElementwiseError, OutputError), match=word):
        assert_elementwise(candidate, reference)


def test_a_mismatched_leaf_counts_as_wholly_failed() -> None:
    result = compare(torch.zeros(4, 1), torch.zeros(4))
    assert (result.failed, result.total) == (4, 4)
    assert result.budget_used is None
    assert not to_record(result, [1]).passed
    assert compare(torch.zeros(0, 1), torch.zeros(0)).failed == 1


@pytest.mark.parametrize(
    ("candidate", "reference", "failed", "nonfinite"),
    [
        (NAN, 1.0, 1, 1),
        (INF, 1.0, 1, 1),
        (1.0, NAN, 1, 0),
        (1.0, INF, 1, 0),
        (-INF, INF, 1, 1),
        (NAN, INF, 1, 1),
        (INF, NAN, 1, 1),
        (NAN, NAN, 0, 0),
        (INF, INF, 0, 0),
        (-INF, -INF, 0, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nonfinite_passes_only_as_the_same_value(
    candidate: float, reference: float, failed: int, nonfinite: int, dtype: torch.dtype
) -> None:
    c = torch.tensor([0.0, candidate], dtype=dtype)
    r = torch.tensor([0.0, reference], dtype=dtype)
    result = compare(c, r)
    assert (result.failed, result.nonfinite, result.total) == (failed, nonfinite, 2)
    assert result.compared == 1
    assert result.max_abs == result.budget_used == 0.0
    if failed:
        assert result.first_nonfinite is not None
        assert result.first_nonfinite.index == (1,)
        assert result.columns[0].counts == ((1, 1),)


def test_one_nan_does_not_hide_the_worst_difference() -> None:
    r = torch.zeros(100)
    c = r.clone()
    c[3], c[50], c[70] = NAN, 0.5, 0.1
    result = compare(c, r, chunk_elements=8)
    assert result.failed == 3
    assert result.worst is not None
    assert result.worst.index == (50,)
    assert result.max_abs == 0.5
    assert result.first_nonfinite is not None
    assert result.first_nonfinite.index == (3,)


def test_no_finite_pair_leaves_the_figures_out() -> None:
    result = compare(one(NAN), one(NAN))
    assert result.passed
    assert result.max_abs is None
    assert result.budget_used is None
    record = to_record(result, [1])
    assert record.max_abs is None


def test_float64_overflow_is_a_finite_failure() -> None:
    result = compare(one(1.7e308, torch.float64), one(-1.7e308, torch.float64))
    assert (result.failed, result.nonfinite, result.compared) == (1, 0, 1)
    later = torch.zeros(6, dtype=torch.float64)
    later[5] = 1.7e308
    worst = compare(later, -later, chunk_elements=2).worst
    assert worst is not None
    assert worst.index == (5,)
    record = to_record(result, [1])
    assert record.max_abs is not None
    assert math.isfinite(record.max_abs)
    assert record.budget_used is not None
    assert math.isfinite(record.budget_used)


@pytest.mark.parametrize(
    ("candidate", "reference", "failed", "nonfinite"),
    [
        (3 + 4j, 3 + 4j, 0, 0),
        (3.1 + 4j, 3 + 4j, 0, 0),  # 0.1 is 2% of |3+4j|
        (3.11 + 4j, 3 + 4j, 1, 0),
        (-3 - 4j, 3 + 4j, 1, 0),  # same magnitude, another number
        (complex(NAN, 0), 1 + 0j, 1, 1),
        (complex(INF, 1), complex(INF, 1), 0, 0),
        (complex(INF, 1), complex(INF, 2), 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_compares_magnitudes_of_differences(
    candidate: complex, reference: complex, failed: int, nonfinite: int, dtype: torch.dtype
) -> None:
    c = torch.tensor([candidate], dtype=dtype)
    r = torch.tensor([reference], dtype=dtype)
    result = compare(c, r, Tolerance(0.0, 0.0201))
    assert (result.failed, result.nonfinite) == (failed, nonfinite)
    assert compare(c.conj(), r.conj(), Tolerance(0.0, 0.0201)).failed == failed


@pytest.mark.parametrize("arm", ["candidate", "reference"])
@pytest.mark.filterwarnings("ignore:.*Sparse CSR.*", "ignore:.*quantized tensor creation.*")
@pytest.mark.parametrize("layout", ["coo", "csr", "nested", "quantized"])
def test_what_has_no_elements_is_refused_with_advice(arm: str, layout: str) -> None:
    dense = torch.eye(3)
    odd = {
        "coo": lambda: dense.to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([dense[0], dense[1, :2]], layout=torch.jagged),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }[layout]()
    pair = (odd, dense) if arm == "candidate" else (dense, odd)
    with pytest.raises(OutputError, match=rf"{arm} output is .*call \."):
        compare(*pair)


def test_comparing_changes_neither_arm() -> None:
    for dtype in (torch.float32, torch.float64, torch.complex128):
        c, r = torch.randn(50, dtype=dtype), torch.randn(50, dtype=dtype)
        kept = c.clone(), r.clone()
        compare(c, r, Tolerance(mode="sum"))
        compare(c, r)
        assert torch.equal(c, kept[0])
        assert torch.equal(r, kept[1])


@pytest.mark.parametrize("other", [NAN, INF, -INF])
def test_a_nonfinite_reference_does_not_hide_the_worst_difference(other: float) -> None:
    r = torch.zeros(10)
    r[2] = other
    c = r.clone()
    c[7] = 0.5
    result = compare(c, r)
    assert (result.failed, result.compared) == (1, 9)
    assert result.budget_used == 250.0
    assert result.worst is not None
    assert result.worst.index == (7,)


def test_each_kind_of_nonfinite_is_counted_in_its_arm() -> None:
    c = torch.tensor([NAN, INF, INF, NAN, NAN, 0.0])
    r = torch.tensor([0.0, 0.0, INF, INF, INF, INF])
    result = compare(c, r, chunk_elements=2)
    assert (result.candidate_nan, result.candidate_inf) == (3, 2)
    assert (result.reference_nan, result.reference_inf) == (0, 4)
    result = compare(r, c, chunk_elements=2)
    assert (result.reference_nan, result.reference_inf) == (3, 2)


def test_equal_integers_use_no_budget_and_the_worst_is_the_farthest() -> None:
    r = torch.tensor([5, 5, 5])
    same = compare(r, r)
    assert (same.max_abs, same.budget_used, same.squared_error) == (0.0, 0.0, 0.0)
    result = compare(torch.tensor([101, 6, 7]), torch.tensor([100, 5, 5]))
    assert result.worst is not None
    assert result.worst.index == (2,)
    assert result.squared_error == pytest.approx(1 + 1 + 4)


def test_an_empty_leaf_adds_nothing() -> None:
    result = compare((torch.empty(0), torch.ones(3)), (torch.empty(0), torch.ones(3)))
    assert (result.total, result.compared, result.failed) == (3, 3, 0)
    assert (result.max_abs, result.budget_used, result.squared_error) == (0.0, 0.0, 0.0)
    empty = compare(torch.empty(0), torch.empty(0))
    assert (empty.compared, empty.max_abs, empty.budget_used, empty.rms) == (0, None, None, None)


@pytest.mark.parametrize(("limit", "listed"), [(5, False), (6, True)])
def test_very_wide_outputs_list_no_columns(
    monkeypatch: pytest.MonkeyPatch, limit: int, listed: bool
) -> None:
    monkeypatch.setattr("pytest_fastlayer.elementwise.MAX_COLUMNS", limit)
    assert bool(compare(torch.ones(2, 6), torch.zeros(2, 6)).columns) is listed


def test_the_first_nonfinite_element_is_the_first() -> None:
    r = torch.zeros(12)
    c = r.clone()
    c[5] = c[8] = NAN
    c[11] = 1.0
    result = compare(c, r, chunk_elements=3)
    assert result.first_nonfinite is not None
    assert result.first_nonfinite.index == (5,)


def test_columns_count_failures_not_elements_at_the_limit() -> None:
    result = compare(torch.tensor([[0.25, 1.0]]), torch.zeros(1, 2), Tolerance(0.25, 0.0))
    assert result.columns[0].counts == ((1, 1),)
