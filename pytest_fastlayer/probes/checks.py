"""Checks on outputs already at hand. Each returns a sentence on what is wrong, or nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch

from pytest_fastlayer.clocks import _perf_counter
from pytest_fastlayer.comparison import Comparison
from pytest_fastlayer.fingerprint import fingerprints
from pytest_fastlayer.probes.memory import storage_keys

#: How long a wrong output is watched for changes, to tell a late one from a wrong one.
PATIENCE_S = 0.5

CHANGED_LATER = (
    "an output changed after it had been returned: it is computed lazily, on another thread or on "
    "another stream"
)

_PLAIN: frozenset[type] = frozenset(
    {
        torch.Tensor,
        torch.nn.Parameter,
        tuple,
        list,
        dict,
        bool,
        int,
        float,
        complex,
        str,
        type(None),
    }
)


def brief(comparison: Comparison) -> str:
    """A failed comparison in half a line."""
    if comparison.mismatches:
        return comparison.mismatches[0]
    text = f"{comparison.failed:,} of {comparison.total:,} elements out of tolerance"
    return text + (f", {comparison.nonfinite:,} not finite" if comparison.nonfinite else "")


def lazy_type(output: object, want: object) -> str:
    """Plain tensors in plain containers: anything else may compute when it is looked at.

    Types that the reference's own output holds are fine too.
    """
    odd = _types(output) - _types(want) - _PLAIN
    if not odd:
        return ""
    names = ", ".join(sorted(one.__name__ for one in odd))
    return (
        f"the output holds {names}, which can compute lazily when it is read: return plain "
        "tensors in tuples, lists or dicts"
    )


def _types(output: object) -> set[type]:
    """Types of all containers and leaves of a nested output."""
    children: Sequence[object] = ()
    if isinstance(output, Mapping):
        children = list(output.values())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        children = [getattr(output, one.name) for one in dataclasses.fields(output)]
    elif isinstance(output, tuple | list):
        children = output
    return {type(output)}.union(*(_types(child) for child in children))


def aliased_input(output: object, want: object, args: object) -> str:
    """The output is not an input's memory, unless the reference's is too."""
    allowed = storage_keys(want) & storage_keys(args)
    if storage_keys(output) & storage_keys(args) - allowed:
        return "the output shares memory with an input: writing to one changes the other"
    return ""


def held_output(output: object, snapshot: object, again: object, args: object) -> str:
    """An output stays what it was when it was returned, whatever is called after it.

    Not asked of an output that is an input's memory: that one follows the input.
    """
    try:
        if storage_keys(output) & storage_keys(args):
            return ""
        shared = storage_keys(output) & storage_keys(again)
        moved = fingerprints(output) != snapshot
    except RuntimeError as error:  # torch.compile's graphs refuse access to overwritten outputs
        return f"an earlier output cannot be read any more after later calls: {error}"
    if shared:
        return (
            "two calls returned the same memory: the second overwrites an output that the caller "
            "still holds (copy out of a cached buffer)"
        )
    return CHANGED_LATER if moved else ""


def still_changing(output: object) -> bool:
    """Whether an output changes by itself within ``PATIENCE_S``."""
    snapshot = fingerprints(output)
    begin = _perf_counter()
    while _perf_counter() - begin < PATIENCE_S:
        time.sleep(PATIENCE_S / 50)
        if fingerprints(output) != snapshot:
            return True
    return False
