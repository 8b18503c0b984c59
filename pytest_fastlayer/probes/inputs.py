"""Are the inputs, and the reference, fit to judge a candidate by?

Asked before the candidate runs: inputs that differ between two calls with one seed, or a reference
that writes to them, would otherwise look like the candidate's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytest_fastlayer.fingerprint import fingerprint
from pytest_fastlayer.outputs import Leaf, leaves
from pytest_fastlayer.probes.memory import storage_keys

#: Leaves whose values can be compared by ``==``.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def check_inputs(inputs: Callable[[int], Any], seed: int) -> str | None:
    """What keeps ``inputs`` from being a function of its seed; None if nothing does.

    Calls ``inputs(seed)`` twice. Both calls must give the same values, dtypes, shapes, strides
    and devices, in memory of their own: neither shared between the calls nor the same object.
    """
    first, second = inputs(seed), inputs(seed)
    before, after = list(leaves(first, "inputs")), list(leaves(second, "inputs"))
    where = f"inputs({seed})"
    if [leaf.path for leaf in before] != [leaf.path for leaf in after]:
        return (
            f"{where} gives {len(before)} and then {len(after)} values, or others in their place: "
            "it must give the same structure for the same seed"
        )
    differing = [b.path for b, a in zip(before, after, strict=True) if _mark(b) != _mark(a)]
    if differing:
        return (
            f"two calls of {where} differ in {_some(differing)}: the same seed must give the same "
            "values; draw them from torch.Generator(device).manual_seed(seed)"
        )
    shared = [
        b.path
        for b, a in zip(before, after, strict=True)
        if isinstance(b.value, torch.Tensor) and storage_keys(b.value) & storage_keys(second)
    ]
    if shared:
        return (
            f"two calls of {where} share the memory of {_some(shared)}: each call must give "
            "tensors of its own, because contents are changed in place; build them inside, or "
            "return .clone()"
        )
    return None


def mutated_by(function: Callable[..., object], args: Sequence[Any]) -> str | None:
    """Run ``function(*args)`` once without gradients: which of its inputs did it change?

    Returns None if it changed none. Its exceptions pass through.
    """
    marks = [(leaf.path, _mark(leaf)) for leaf in leaves(tuple(args), "input")]
    with torch.no_grad():
        function(*args)
    now = {leaf.path: _mark(leaf) for leaf in leaves(tuple(args), "input")}
    edited = [path for path, mark in marks if now.get(path) != mark]
    edited += [path for path in now if path not in dict(marks)]
    if not edited:
        return None
    target = getattr(function, "target", function)  # what a frozen reference froze
    name = getattr(target, "__name__", None) or type(target).__name__
    return (
        f"{name} changed its own {_some(edited)}: the other arm would see other data; "
        "let it work on a copy (.clone())"
    )


def _mark(leaf: Leaf) -> object:
    """What a leaf is worth: a tensor's form and contents, a plain value, else its type."""
    value = leaf.value
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else ()
        return (fingerprint(value), strides, value.requires_grad)
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    return type(value)


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more
