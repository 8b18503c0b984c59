"""The batch in slices: peak memory is bounded by a working set, whatever the batch."""

from __future__ import annotations

import torch

from fastlayer.contract import RuntimeContract
from fastlayer.graphs import GraphedCall
from fastlayer.routes.base import Bound, Launch, check_launch, common_objections
from fastlayer.routes.body import make_body, serve_mask
from fastlayer.routes.execution import execute
from fastlayer.routes.sdpa import options, sdpa_launches, within_capture
from fastlayer.weights import ModelState


class BatchStreamRoute:
    """``sdpa`` over slices of the batch, into one preallocated output.

    Samples do not interact, so slicing changes nothing but memory. A slice is as large as the
    contract's working set and the free memory allow, and is halved when an allocation fails.
    """

    name = "batch_stream"

    def objections(self, contract: RuntimeContract) -> list[str]:
        found = common_objections(contract)
        whole = contract.config.linear_bytes(contract.itemsize)
        if whole <= contract.working_set_bytes:
            found.append(
                f"the whole batch needs {whole:,} bytes, within the working set of "
                f"{contract.working_set_bytes:,}, so slices would only add launches"
            )
        sample = contract.with_batch(1).config.linear_bytes(contract.itemsize)
        room = min(contract.working_set_bytes, contract.available_bytes)
        if sample > room:
            found.append(f"one sample alone needs {sample:,} bytes and the bound is {room:,}")
        return found

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        return [
            launch for launch in sdpa_launches(contract) if "compiled" not in str(launch["execution"])
        ]

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        check_launch(self.name, launch, {**options(contract), "slice": ()})
        launch = within_capture(state, contract, launch)
        size = int(launch.get("slice") or slice_samples(contract))
        part = contract.with_batch(size)
        eager = make_body(
            state,
            part,
            packed_qkv=bool(launch.get("packed_qkv", True)),
            linear=str(launch.get("linear", "aten")),
        )
        whole_slice = execute(eager, str(launch.get("execution", "eager")), state, part)
        return serve_mask(_Stream(eager, whole_slice, size, state), contract.mask)


def slice_samples(contract: RuntimeContract) -> int:
    """Samples in a slice, at least one: as many as the working set and free memory hold."""
    one = contract.with_batch(1).config.linear_bytes(contract.itemsize)
    room = min(contract.working_set_bytes, contract.available_bytes)
    return max(1, min(contract.config.batch_size, room // one))


class _Stream:
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
        """Smaller slices from now on."""
        self._size = failed // 2
        torch.cuda.empty_cache()
        self._state.notes.append(
            f"a slice of {failed} samples ran out of memory; slices of {self._size} are used"
        )
