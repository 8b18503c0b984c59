"""Nested outputs, strides, chunks and memory."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_fastlayer.accuracy import Tolerance, compare
from pytest_fastlayer.elementwise import blocks, default_chunk, squared_error, unravel
from pytest_fastlayer.memory import peak_memory
from pytest_fastlayer.outputs import leaves, map_tensors

Pair = namedtuple("Pair", "logits state")


@dataclass
class Output:
    hidden: torch.Tensor
    cache: tuple[Any, ...]


ZERO, ONE = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda t: t, "output"),
        (lambda t: (ZERO, t), "output[1]"),
        (lambda t: [ZERO, [t]], "output[1][0]"),
        (lambda t: {"a": ZERO, "b": t}, "output['b']"),
        (lambda t: OrderedDict(b=t), "output['b']"),
        (lambda t: Pair(ZERO, t), "output.state"),
        (lambda t: Output(ZERO, (None, t)), "output.cache[1]"),
    ],
)
def test_nested_outputs_name_the_failing_leaf(make: Any, path: str) -> None:
    assert compare(make(ZERO), make(ZERO)).passed
    result = compare(make(ONE), make(ZERO))
    assert result.failed == 2
    assert result.worst is not None
    assert result.worst.path == path


@pytest.mark.parametrize(
    ("candidate", "reference", "word"),
    [
        ((ZERO,), (ZERO, ZERO), "nothing"),
        ((ZERO, ZERO), (ZERO,), "nothing"),
        ({"a": ZERO}, {"b": ZERO}, "nothing where reference has output['b']"),
        ((ZERO, None), (ZERO, ZERO), "None"),
        ((ZERO, "x"), (ZERO, "y"), "'y'"),
        ((ZERO, 1), (ZERO, 1.0), "dtype"),
        (ZERO, None, "None"),
        ({"a": ZERO, "b": ONE}, {"b": ONE, "a": ZERO}, None),
    ],
)
def test_structure_must_be_the_same(candidate: Any, reference: Any, word: str | None) -> None:
    result = compare(candidate, reference)
    if word is None:  # the order of a dict's keys is no part of its meaning
        assert result.passed
    else:
        assert not result.passed
        assert word in result.mismatches[0]


def test_what_is_no_tensor_must_be_equal_and_a_missing_leaf_fails_once() -> None:
    assert compare((ZERO, "x", None), (ZERO, "x", None)).passed
    assert compare((ZERO, None), (ZERO, 3)).failed == 1
    assert compare((ZERO, 3), (ZERO, None)).failed == 1
    assert compare((ZERO, "x"), (ZERO, 3)).failed == 1
    assert compare((ZERO,), (ZERO, ONE)).failed == 1
    assert compare((ZERO, ONE), (ZERO,)).failed == 1


def test_numbers_are_compared_by_the_same_rule() -> None:
    assert compare((1.0, 3), (1.001, 3)).passed
    assert not compare((1.0, 3), (1.1, 3)).passed
    assert not compare((1.0, 3), (1.0, 4)).passed
    assert not compare(1.0 + 1e-12, 1.0, Tolerance(0.0, 0.0)).passed  # not rounded to float32
    assert compare((1.0, Output), (1.0, Output)).passed


def test_map_tensors_keeps_the_nesting() -> None:
    nested = {"a": Pair(ZERO, [ZERO, 3]), "b": Output(ZERO, (ZERO,))}
    mapped = map_tensors(nested, lambda t: t + 1)
    assert [leaf.path for leaf in leaves(mapped)] == [leaf.path for leaf in leaves(nested)]
    assert compare(mapped["a"].logits, ONE).passed
    assert type(mapped) is dict
    assert type(map_tensors(OrderedDict(a=ZERO), torch.clone)) is OrderedDict
    assert map_tensors((3, Output), torch.clone) == (3, Output)  # a class is no container
    assert type(mapped["a"]) is Pair
    assert type(mapped["b"]) is Output


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (5, 1, 2, 3), (0, 4)])
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 1000])
def test_blocks_cover_the_index_space_once_in_order(shape: tuple[int, ...], limit: int) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    seen = []
    for offset, index in blocks(shape, limit):
        block = numbers[index].reshape(-1)
        assert 0 < block.numel() <= limit
        assert int(block[0]) == offset
        seen += block.tolist()
    assert seen == list(range(numbers.numel()))


def test_unravel_is_the_inverse_of_flattening() -> None:
    shape = (3, 4, 5)
    numbers = torch.arange(60).reshape(shape)
    assert all(int(numbers[unravel(i, shape)]) == i for i in range(60))


@pytest.mark.parametrize("chunk", [1, 3, 10, 64, None])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "strided", "expanded"])
def test_chunks_and_strides_change_nothing(chunk: int | None, kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(6, 4, 10, generator=generator)
    candidate = reference + 0.003 * torch.randn(6, 4, 10, generator=generator)
    candidate[2, 3, 4] = float("nan")
    candidate[5, 0, 9] = reference[5, 0, 9] + 10
    form = {
        "contiguous": lambda t: t,
        "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
        "strided": lambda t: torch.stack([t, t], -1)[..., 0],
        "expanded": lambda t: t,
    }[kind]
    if kind == "expanded":
        reference = reference[:1].expand(6, 4, 10)
    expected = compare(candidate.contiguous(), reference.contiguous(), chunk_elements=10**6)
    result = compare(form(candidate), reference, chunk_elements=chunk)
    assert result.failed == expected.failed > 1
    assert result.worst == expected.worst
    assert result.worst is not None
    assert result.first_nonfinite is not None
    assert result.first_nonfinite.index == (2, 3, 4)
    assert result.columns == expected.columns
    assert result.squared_error == pytest.approx(expected.squared_error)


def test_chunk_elements_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_elements is 0"):
        compare(ZERO, ZERO, chunk_elements=0)


def test_squared_error_takes_two_dtypes_and_refuses_two_shapes() -> None:
    total, count = squared_error(torch.ones(3), torch.zeros(3, dtype=torch.float64), chunk=2)
    assert (total, count) == (pytest.approx(3.0), 3)
    assert squared_error(torch.tensor([1.0, float("nan")]), torch.zeros(2)) == (1.0, 1)
    assert squared_error(torch.full((2,), 3.0), torch.ones(2)) == (pytest.approx(8.0), 2)
    assert squared_error(torch.zeros(0), torch.zeros(0)) == (0.0, 0)
    with pytest.raises(ValueError, match="shapes differ"):
        squared_error(torch.ones(3), torch.ones(1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("is_complex", "width"), [(False, 8), (True, 16)])
def test_default_chunks_keep_the_temporaries_under_the_bound(
    device: str, is_complex: bool, width: int
) -> None:
    like: Any = SimpleNamespace(device=torch.device(device), is_complex=lambda: is_complex)
    temporaries = 9 * width * default_chunk(like)
    assert 2 << 20 <= temporaries < 256 << 20


@pytest.mark.parametrize("contiguous", [True, False])
def test_comparison_is_bounded_in_memory(contiguous: bool) -> None:
    reference = torch.ones(4096, 8192)
    if not contiguous:
        reference = reference.t()
    candidate = torch.full_like(reference, 1.0001)
    compare(candidate, reference)  # brings back pages of the inputs that the kernel put aside
    peak = peak_memory(lambda: compare(candidate, reference), "cpu")
    if peak is None:
        pytest.skip("the resident set's high-water mark cannot be reset here")
    assert peak < 100  # the inputs are 128 MiB each: one copy of either would show
