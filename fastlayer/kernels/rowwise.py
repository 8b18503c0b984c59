"""What ``half_gemm`` needs between its matrix products, each in one pass over memory.

    normalise   [T, D] float32 -> [T, D] float16:  n(x + shift), LayerNorm without its affine part
    finish      [T, D] float32 -> [T, D] float32:  n(x + shift) * weight + bias

``shift [D]`` is the sum of the biases that the residual owes: products add to it without them.
"""

# Triton types what it compiles; its parameters are tensors, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fastlayer.kernels.sizes import power_of_two
from fastlayer.kernels.warm import Warm, WarmLaunch

_ROWS = 4


@triton.jit
def _normal(x_ptr, shift_ptr, base, real, cols, D: tl.constexpr):
    """``n(x + shift)`` of rows whose elements ``base + cols`` selects; two passes in registers."""
    shift = tl.load(shift_ptr + cols, mask=cols < D, other=0.0)
    x = tl.load(x_ptr + base + cols[None, :], mask=real, other=0.0) + shift[None, :]
    mean = tl.sum(x, axis=1) * (1.0 / D)
    centred = tl.where(real, x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) * (1.0 / D)
    return centred * tl.rsqrt(variance + 1e-5)[:, None]


@triton.jit
def normalise_kernel(
    x_ptr, shift_ptr, out_ptr, copy_ptr, tokens,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    base = rows.to(tl.int64)[:, None] * D
    real = (rows < tokens)[:, None] & (cols < D)[None, :]
    normal = _normal(x_ptr, shift_ptr, base, real, cols, D)
    tl.store(out_ptr + base + cols[None, :], normal.to(tl.float16), mask=real)
    if COPY:
        x = tl.load(x_ptr + base + cols[None, :], mask=real, other=0.0)
        tl.store(copy_ptr + base + cols[None, :], x, mask=real)


@triton.jit
def finish_kernel(
    x_ptr, shift_ptr, weight_ptr, bias_ptr, out_ptr, tokens,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    base = rows.to(tl.int64)[:, None] * D
    real = (rows < tokens)[:, None] & (cols < D)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=cols < D, other=0.0)
    normal = _normal(x_ptr, shift_ptr, base, real, cols, D)
    tl.store(out_ptr + base + cols[None, :], normal * weight[None, :] + bias[None, :], mask=real)


_normalise = Warm(normalise_kernel)
_finish = Warm(finish_kernel)


@cache
def launch_of(tokens: int, width: int, **constants: bool) -> WarmLaunch:
    """How a kernel is launched over ``[tokens, width]``."""
    sizes = {"D": width, "W": power_of_two(width), "ROWS": _ROWS}
    return WarmLaunch(triton.cdiv(tokens, _ROWS), (tokens,), {**sizes, **constants}, {})


def normalise(
    x: torch.Tensor,
    shift: torch.Tensor,
    copy: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``n(x + shift)`` in float16 for contiguous float32 ``x [T, D]`` and ``shift [D]``.

    It is written to ``out`` or a new tensor, and ``x`` to ``copy`` where one is given.
    """
    out = torch.empty_like(x, dtype=torch.float16) if out is None else out
    tokens, width = x.shape
    launch = launch_of(tokens, width, COPY=copy is not None)
    _normalise(launch, x, shift, out, x if copy is None else copy)
    return out


def finish(
    x: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``n(x + shift) * weight + bias`` in float32, in ``out`` or a new tensor."""
    out = torch.empty_like(x) if out is None else out
    tokens, width = x.shape
    _finish(launch_of(tokens, width), x, shift, weight, bias, out)
    return out
