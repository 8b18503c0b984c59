"""What arms are called with, and how: arguments of a seed, contents renewed in place, rough costs.

Nothing heavy besides torch is imported: the process of a served arm needs no statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pytest_fastlayer.originals import perf_counter


def arguments(inputs: Callable[[int], Any], seed: int) -> tuple[Any, ...]:
    """The positional arguments of one forward; ``inputs`` may return a tuple or one tensor."""
    given = inputs(seed)
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """A callable that notes its shortest wall time: a rough cost, for planning only."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._device = device
        self.shortest_s = math.inf

    def __call__(self, *args: Any) -> Any:
        synchronize(self._device)
        start = perf_counter()
        result = self._function(*args)
        synchronize(self._device)
        self.shortest_s = min(self.shortest_s, perf_counter() - start)
        return result


def is_overlapping(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory (expanded tensors): such a tensor cannot be written."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def overwrite(target: torch.Tensor, source: torch.Tensor, *, silently: bool) -> None:
    """Write new contents to the same address; ``silently`` leaves the version counter as it is.

    Kernels launched outside torch write silently too, so a cache keyed on address and version is
    not a safe one for data.
    """
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        (target.data if silently else target).copy_(source)


#: Elements of a tensor that ``overwrite_most`` leaves: so many at either end, and spread evenly.
LEFT = 16


def overwrite_most(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write new contents silently to all but a few elements, those at the ends among them."""
    count = target.numel()
    ends = (*range(LEFT), *range(count - LEFT, count))
    spread = range(0, count, max(1, count // LEFT))
    index = torch.tensor(sorted({*ends, *spread}), device=target.device)
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        left = target.data.take(index)
        target.data.copy_(source)
        target.data.put_(index, left)


class Feed:
    """The arguments that both arms are called with, renewed in place between quads.

    The same addresses with new contents are what a fast path meets in use, and what a recorded
    result does not survive. Data is written silently, so that one kept by address and version does
    not either; masks and indices are not, as in the probe ``fresh_contents``. Where a seed's
    tensors have other shapes, or cannot be written, the arguments are replaced.
    """

    def __init__(self, args: tuple[Any, ...], inputs: Callable[[int], Any] | None = None) -> None:
        self.args = args
        self._inputs = inputs

    def renew(self, seed: int) -> None:
        """Contents of ``inputs(seed)``; nothing without ``inputs``."""
        if self._inputs is None:
            return
        fresh = arguments(self._inputs, seed)
        pairs = list(zip(self.args, fresh, strict=False))
        alike = len(self.args) == len(fresh) and all(
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            and not is_overlapping(a)
            for a, b in pairs
        )
        if not alike:
            self.args = fresh
            return
        for mine, new in pairs:
            overwrite(mine, new, silently=mine.is_floating_point() or mine.is_complex())
