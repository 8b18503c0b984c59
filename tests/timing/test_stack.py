"""Calls below ``with_room`` take no memory for their frames, however deep they are."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from pytest_fastlayer.stack import with_room

CALLS = 500


def leaf() -> None:
    pass


def hot() -> int:
    """Pages that calls touched for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int) -> int:
    return hot() if depth == 0 else at_depth(depth - 1)


def most(call: Callable[[Callable[[], int]], int]) -> int:
    def below(depth: int) -> int:
        return call(lambda: at_depth(depth))

    return max(min(below(depth) for _ in range(2)) for depth in range(300))


def test_no_call_maps_memory_for_its_frame() -> None:
    if most(lambda function: function()) < CALLS:
        pytest.skip("this Python keeps its chunks")  # then there is nothing to make room for
    assert most(with_room) < CALLS / 10


def test_what_is_called_is_what_comes_back() -> None:
    assert with_room(lambda: 3) == 3
    with pytest.raises(KeyError):
        with_room(lambda: {}["a"])
