"""Process-wide settings that a candidate must leave alone."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from pytest_fastlayer.probes import lazy

#: Settings that change what other code computes, or how fast.
_SETTINGS: Mapping[str, Callable[[], object]] = {
    "the number of threads": torch.get_num_threads,
    "the number of interop threads": torch.get_num_interop_threads,
    "the CPUs of this thread": lambda: getattr(os, "sched_getaffinity", lambda _: None)(0),
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "autocast on cuda": lambda: torch.is_autocast_enabled("cuda"),
    "autocast on cpu": lambda: torch.is_autocast_enabled("cpu"),
    "autograd's anomaly mode": torch.is_anomaly_enabled,
    "autograd's profiler": lambda: torch._C._autograd._profiler_enabled(),
    "flush of denormals": lambda: bool((torch.tensor([1e-40]) * 1 == 0).item()),
    "oneDNN": lambda: torch._C._get_mkldnn_enabled(),
    "the fast path of attention": torch.backends.mha.get_fastpath_enabled,
    "TF32 in cuBLAS": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 in cuDNN": lambda: torch.backends.cudnn.allow_tf32,
    "reduced fp16 reductions": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "reduced bf16 reductions": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cuDNN": lambda: torch.backends.cudnn.enabled,
    "cuDNN benchmark mode": lambda: torch.backends.cudnn.benchmark,
    "cuDNN deterministic mode": lambda: torch.backends.cudnn.deterministic,
    "flash SDPA": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient SDPA": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math SDPA": torch.backends.cuda.math_sdp_enabled,
    "cuDNN SDPA": torch.backends.cuda.cudnn_sdp_enabled,
    lazy.ORDER: lambda: torch._C._get_sdp_priority_order(),
    "reduced precision in math SDPA": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    "fp16 accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "the preferred BLAS library": torch.backends.cuda.preferred_blas_library,
    "the preferred linear algebra library": torch.backends.cuda.preferred_linalg_library,
    "the filling of uninitialised memory": lambda: (
        torch._C._get_deterministic_fill_uninitialized_memory()
    ),
    "torch function modes": lambda: torch._C._len_torch_function_stack(),
    "torch dispatch modes": lambda: torch._C._len_torch_dispatch_stack(),
    "kernels of aten operators": lambda: _replaced_kernels(),
    "hooks of all modules": lambda: {
        name: len(hooks)
        for name, hooks in vars(nn_module).items()
        if name.startswith("_global_") and hasattr(hooks, "__len__")
    },
    "the thread switch interval": sys.getswitchinterval,
    "a trace function": lambda: sys.gettrace() is not None,
    "a profile function": lambda: sys.getprofile() is not None,
    "garbage collection": gc.isenabled,
    "the thresholds of garbage collection": gc.get_threshold,
}

#: Modes of the calling code: they may differ between two callers without anybody's doing.
_SCOPED: Mapping[str, Callable[[], object]] = {
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
}

#: Dispatch keys (their beginnings) under which an operator's computation is found.
_COMPUTING_KEYS = ("CPU", "CUDA", "Composite", "Autograd", "Autocast", "ADInplace", "Python")


def _replaced_kernels() -> list[str]:
    """Kernels for aten operators registered from Python, as aten/operator/dispatch key.

    Keys that compute are looked at: torch's own lazily imported modules register shape functions
    (Meta) and batching rules (FuncTorchBatched).
    """
    found: Any = getattr(torch.library, "_impls", ())
    return sorted(
        one
        for one in found
        if one.startswith("aten/") and one.rpartition("/")[2].startswith(_COMPUTING_KEYS)
    )


def _read(table: Mapping[str, Callable[[], object]]) -> dict[str, object]:
    state: dict[str, object] = {}
    for name, read in table.items():
        try:
            state[name] = read()
        except (RuntimeError, AttributeError):  # another API's setting, or another release's
            state[name] = None
    return state


def global_state() -> dict[str, object]:
    """Process-wide settings now, and the current CUDA device and stream.

    CUDA that is not initialised yet starts on device 0 and the default stream.
    """
    state = _read(_SETTINGS)
    state["the current CUDA device"] = state["the current CUDA stream"] = 0
    if torch.cuda.is_initialized():
        state["the current CUDA device"] = torch.cuda.current_device()
        state["the current CUDA stream"] = torch.cuda.current_stream().cuda_stream
    return state


def scoped_state() -> dict[str, object]:
    """Modes of the calling thread, to be compared within one caller's scope only."""
    return _read(_SCOPED)


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Settings whose value is another one now, each with both values where they are short."""
    return [
        name + _values(value, after.get(name))
        for name, value in sorted(before.items())
        if after.get(name) is not value and after.get(name) != value
    ]


def _values(before: object, after: object) -> str:
    text = f" (from {before} to {after})"
    return text if len(text) <= 60 else ""
