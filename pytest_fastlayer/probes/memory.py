"""Memory that a candidate must not rely on: uninitialised, freed, or the reference's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fastlayer.outputs import tensors

#: Allocations whose contents are undefined until the caller writes them.
_EMPTY_OPS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)

#: Every byte of the poison: NaN in all IEEE types and in fp8, -1 in integers.
_POISON = 0xFF
#: Freed blocks of each output's size that are poisoned, if they fit.
_BLOCKS = 4
#: On CPU the heap keeps small blocks only; large ones go back to the system, which clears them.
_CPU_LIMIT = 64 << 20

Key = tuple[str, int]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor as a flat uint8 tensor that aliases it."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def storage_keys(values: object) -> set[Key]:
    """(device, address) of every storage behind the tensors of a nested object."""
    return {
        (str(tensor.device), tensor.untyped_storage().data_ptr())
        for tensor in tensors(values)
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes()
    }


class PoisonedAllocations(TorchDispatchMode):
    """While active, memory from torch.empty and its kin is full of NaN.

    Reaches allocations made through torch's dispatcher on this thread. A torch.compile'd callable
    runs its eager form meanwhile (Dynamo steps aside under a dispatch mode).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY_OPS and result.device.type != "meta":
            if result.dtype == torch.bool:
                result.fill_(True)
            elif result.untyped_storage().nbytes():
                storage_bytes(result).fill_(_POISON)
        return result


class _Undecorated(PoisonedAllocations):
    """The same without what torch puts around the dispatch of every mode to keep Dynamo out."""


_Undecorated.__torch_dispatch__ = inspect.unwrap(  # type: ignore[method-assign]
    PoisonedAllocations.__torch_dispatch__
)


def poisoned_allocations() -> PoisonedAllocations:
    """A ``PoisonedAllocations`` to enter, after the candidate has run at least once.

    What torch puts around a mode's dispatch imports Dynamo, which takes a second of CPU: it is
    done without where nothing has imported Dynamo yet, and so nothing that ran is compiled.
    """
    mode = PoisonedAllocations if "torch._dynamo" in sys.modules else _Undecorated
    return mode()  # type: ignore[no-untyped-call]  # torch's own __init__


def poison_free_memory(like: object) -> None:
    """Fill freed memory of these outputs' sizes with NaN, so that no earlier result is left in it.

    CUDA's caching allocator hands the same blocks out again; so does the C heap for small ones.
    """
    blocks = []
    for tensor in tensors(like):
        size = tensor.untyped_storage().nbytes()
        for _ in range(_BLOCKS):
            if tensor.is_cuda:
                fits = size <= torch.cuda.mem_get_info(tensor.device)[0] // 4
            else:
                fits = size <= _CPU_LIMIT
            if fits:
                block = torch.empty(size, dtype=torch.uint8, device=tensor.device)
                blocks.append(block.fill_(_POISON))
    del blocks


@contextmanager
def veiled(*outputs: object, spare: Iterable[Key] = ()) -> Iterator[None]:
    """Flip every bit of these outputs' memory for the duration, in place and exactly reversible.

    A candidate that finds the reference's results lying about (through gc, frames or freed
    memory) then finds rubbish. ``spare`` names storages that must keep their contents (inputs).
    """
    kept = set(spare)
    flats: dict[Key, torch.Tensor] = {}
    for tensor in tensors(outputs):
        for key in storage_keys(tensor) - kept:
            if tensor.dtype != torch.bool:  # a flipped bool is no bool
                flats[key] = storage_bytes(tensor)
    for flat in flats.values():
        flat.bitwise_not_()
    try:
        yield
    finally:
        for flat in flats.values():
            flat.bitwise_not_()
