"""A few numbers from the device to the host, past its copy engine.

A copy of twelve bytes waits for whatever was given to the copy engine before it: eight milliseconds
for a download of 400 MB, in which the device has nothing to do. A kernel writes to pinned memory by
itself.
"""

# Triton types what it compiles; its parameters are tensors, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayer.kernels.sizes import power_of_two


@triton.jit
def readback_kernel(values_ptr, host_ptr, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(host_ptr + at, tl.load(values_ptr + at, mask=at < count), mask=at < count)


def read(values: torch.Tensor) -> list[float]:
    """``values [n]`` float32 on any device; synchronises with the current stream."""
    if not values.is_cuda:
        return list(values.tolist())
    count = values.numel()
    host = torch.empty(count, dtype=values.dtype, pin_memory=True)
    with torch.cuda.device_of(values):
        readback_kernel[(1,)](values.contiguous(), host, count, SIZE=power_of_two(count))
        torch.cuda.current_stream().synchronize()
    return list(host.tolist())
