"""What the honesty probes are made of: poison, veils, snapshots of global state."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
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


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor as a flat uint8 tensor that aliases it."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def storage_keys(values: object) -> set[tuple[str, int]]:
    """(device, address) of every storage behind the tensors of a nested object."""
    return {
        (str(tensor.device), tensor.untyped_storage().data_ptr())
        for tensor in tensors(values)
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes()
    }


def _poison(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.untyped_storage().nbytes():
        storage_bytes(tensor).fill_(_POISON)


class PoisonedAllocations(TorchDispatchMode):
    """While active, memory from torch.empty and its kin is full of NaN.

    Reaches allocations made through torch's dispatcher on this thread. A torch.compile'd callable
    runs its eager form meanwhile (Dynamo steps aside under a dispatch mode).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY_OPS and result.device.type != "meta":
            _poison(result)
        return result


def poison_free_memory(like: object) -> None:
    """Fill CUDA's cached free blocks of these outputs' sizes with NaN, then free them again.

    So memory that the reference has freed does not hold its results any more. On CPU the heap
    gives no such handle; ``PoisonedAllocations`` covers it.
    """
    sizes = [
        (tensor.device, tensor.untyped_storage().nbytes())
        for tensor in tensors(like)
        if tensor.is_cuda
    ]
    blocks = []
    for device, size in sizes:
        for _ in range(4):
            free, _total = torch.cuda.mem_get_info(device)
            if size > free // 4:
                break
            block = torch.empty(size, dtype=torch.uint8, device=device)
            blocks.append(block.fill_(_POISON))
    del blocks


@contextmanager
def veiled(*outputs: object, spare: Iterable[tuple[str, int]] = ()) -> Iterator[None]:
    """Flip every bit of these outputs' memory for the duration, in place and exactly reversible.

    A candidate that finds the reference's results lying about (through gc, frames or freed
    memory) then finds rubbish. ``spare`` names storages that must keep their contents (inputs).
    """
    kept = set(spare)
    flats: dict[tuple[str, int], torch.Tensor] = {}
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


#: Process-wide settings that change what other code computes or how fast.
_SETTINGS: Mapping[str, Callable[[], object]] = {
    "the number of threads": torch.get_num_threads,
    "the number of interop threads": torch.get_num_interop_threads,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "autocast on cuda": lambda: torch.is_autocast_enabled("cuda"),
    "autocast on cpu": lambda: torch.is_autocast_enabled("cpu"),
    "flush of denormals": lambda: float(torch.tensor(1e-40) * 1) == 0.0,
    "TF32 in cuBLAS": lambda: torch._C._get_cublas_allow_tf32(),
    "TF32 in cuDNN": lambda: torch._C._get_cudnn_allow_tf32(),
    "reduced fp16 reductions": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuDNN benchmark mode": lambda: torch.backends.cudnn.benchmark,
    "flash SDPA": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient SDPA": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math SDPA": torch.backends.cuda.math_sdp_enabled,
    "cuDNN SDPA": torch.backends.cuda.cudnn_sdp_enabled,
    "the recursion limit": sys.getrecursionlimit,
    "the thread switch interval": sys.getswitchinterval,
}


def global_state() -> dict[str, object]:
    """Process-wide settings now, and on CUDA the current device and stream."""
    state: dict[str, object] = {}
    for name, read in _SETTINGS.items():
        try:
            state[name] = read()
        except RuntimeError:  # old getter of a setting made through a newer API
            state[name] = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["the current CUDA device"] = torch.cuda.current_device()
        state["the current CUDA stream"] = torch.cuda.current_stream().cuda_stream
    return state


def _watched() -> tuple[tuple[str, Any], ...]:
    return (
        ("time", time),
        ("torch", torch),
        ("torch.Tensor", torch.Tensor),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.nn.Module", torch.nn.Module),
        ("torch.nn.Linear", torch.nn.Linear),
        ("torch.nn.LayerNorm", torch.nn.LayerNorm),
        ("torch.cuda", torch.cuda),
    )


def public_functions() -> dict[str, object]:
    """The functions of time, torch, torch.nn.functional and the basic classes, by name."""
    return {
        f"{label}.{name}": value
        for label, owner in _watched()
        for name, value in list(vars(owner).items())
        if callable(value) and not isinstance(value, ModuleType)
    }


def replaced_functions(before: Mapping[str, object]) -> list[str]:
    """Watched functions that are others now, unless by torch's own code (lazy imports do that)."""
    home = str(Path(torch.__file__).parent)
    now = public_functions()
    return [
        name
        for name in changed(before, now)
        if not getattr(getattr(now.get(name), "__code__", None), "co_filename", "").startswith(home)
    ]


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names whose value is another one now. Names that appeared (lazy imports) do not count."""
    return sorted(
        name
        for name, value in before.items()
        if after.get(name) is not value and after.get(name) != value
    )


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
