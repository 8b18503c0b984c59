"""Slices of the batch, one after another, into one preallocated output.

Samples do not interact, so slicing changes nothing but memory: the working set of
``batch_stream``, or how much of the activations a CPU's caches hold.
"""

from __future__ import annotations

import torch

from fastlayer.graphs import GraphedCall
from fastlayer.routes.base import Bound
from fastlayer.weights import ModelState


class Slices:
    """A body over slices of at most ``size`` samples.

    ``whole_slice`` computes a slice of exactly ``size`` (and may have been captured for it),
    ``eager`` any other. When an allocation fails, the slices are halved from then on and the
    state's notes say so; with single samples the out-of-memory error is the caller's.
    """

    def __init__(self, eager: Bound, whole_slice: Bound, size: int, state: ModelState) -> None:
        self._eager = eager
        self._whole_slice = whole_slice
        self._planned = size
        self._size = size
        self._state = state

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        start = 0
        while start < len(x):
            stop = min(start + self._size, len(x))
            part = None if mask is None else mask[start:stop]
            try:
                self._one(out[start:stop], x[start:stop], part)
            except torch.OutOfMemoryError:
                if stop - start == 1:
                    raise
                self._halve(stop - start)
                continue
            start = stop
        return out

    def _one(self, out: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        if len(x) != self._planned:
            out.copy_(self._eager(x, mask))
        elif isinstance(self._whole_slice, GraphedCall):
            self._whole_slice.into(out, x, mask)
        else:
            out.copy_(self._whole_slice(x, mask))

    def _halve(self, failed: int) -> None:
        self._size = failed // 2
        torch.cuda.empty_cache()
        self._state.notes.append(
            f"a slice of {failed} samples ran out of memory; slices of {self._size} are used"
        )
