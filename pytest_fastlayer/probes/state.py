"""Process-wide state that a candidate must leave alone: settings and public functions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch

#: Settings that change what other code computes, or how fast.
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
    "flush of denormals": lambda: bool((torch.tensor([1e-40]) * 1 == 0).item()),
    "TF32 in cuBLAS": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 in cuDNN": lambda: torch.backends.cudnn.allow_tf32,
    "reduced fp16 reductions": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuDNN benchmark mode": lambda: torch.backends.cudnn.benchmark,
    "flash SDPA": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient SDPA": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math SDPA": torch.backends.cuda.math_sdp_enabled,
    "cuDNN SDPA": torch.backends.cuda.cudnn_sdp_enabled,
    "the thread switch interval": sys.getswitchinterval,
}

#: Where the functions live that arms, timers and comparison have in common.
_WATCHED: tuple[tuple[str, object], ...] = (
    ("time", time),
    ("torch", torch),
    ("torch.Tensor", torch.Tensor),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.nn.Module", torch.nn.Module),
    ("torch.nn.Linear", torch.nn.Linear),
    ("torch.nn.LayerNorm", torch.nn.LayerNorm),
    ("torch.cuda", torch.cuda),
)


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


def public_functions() -> dict[str, object]:
    """The functions of time, torch, torch.nn.functional and the basic classes, by name."""
    return {
        f"{label}.{name}": value
        for label, owner in _WATCHED
        for name, value in list(vars(owner).items())
        if callable(value) and not isinstance(value, ModuleType)
    }


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names whose value is another one now. Names that appeared (lazy imports) do not count."""
    return sorted(
        name
        for name, value in before.items()
        if after.get(name) is not value and after.get(name) != value
    )


def replaced_functions(before: Mapping[str, object]) -> list[str]:
    """Watched functions that are others now, unless by torch's own code (lazy imports do that)."""
    home = str(Path(torch.__file__).parent)
    now = public_functions()
    return [
        name
        for name in changed(before, now)
        if not getattr(getattr(now.get(name), "__code__", None), "co_filename", "").startswith(home)
    ]
