"""Process and thread state that a call's arithmetic follows from, read anew on every call.

Where torch's public function wraps one in C, that one is called; should it go, the public one is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

#: (inference mode, autocast dtype or "", float32 matmul precision, TF32 allowed, deterministic,
#: capturing), as in ``RuntimeContract`` and ``Precision``. Plain, for a named one takes longer.
Ambient = tuple[bool, str, str, bool, bool, bool]


def _public_fp32_precision(backend: str, operation: str) -> str:
    value: str = getattr(getattr(torch.backends, backend), operation).fp32_precision
    return value


#: ``torch.backends.<backend>.<operation>.fp32_precision``, without a lookup that must fail first.
_fp32_precision: Callable[[str, str], str] = getattr(
    torch._C, "_get_fp32_precision_getter", _public_fp32_precision
)
_matmul_precision: Callable[[], str] = getattr(
    torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision
)
_is_deterministic: Callable[[], bool] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
#: Whether autocast is on for CPUs, CUDA, or some others; where torch does not tell, it may be.
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_autocast_exists = cache(torch.amp.is_autocast_available)
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def ambient(x: torch.Tensor) -> Ambient:
    """The present state as it concerns ``x``."""
    on_cuda = x.is_cuda
    try:
        matmul = _matmul_precision()
    except RuntimeError:  # torch refuses to answer once its older and newer settings were mixed
        matmul = "mixed"
    return (
        torch.is_inference_mode_enabled(),
        _autocast(x.device.type) if _any_autocast() or not (on_cuda or x.is_cpu) else "",
        matmul,
        _fp32_precision("cuda", "matmul") == "tf32",
        _is_deterministic(),
        on_cuda and _is_capturing(),
    )


def _autocast(device_type: str) -> str:
    """The dtype of active autocast by name, or "" where it is off."""
    if not (_autocast_exists(device_type) and torch.is_autocast_enabled(device_type)):
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
