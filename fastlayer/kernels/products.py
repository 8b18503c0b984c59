"""What ``half_gemm`` computes with matrix units of its own.

    linear    gelu(a W^T + bias), float16
    attend    softmax(q k^T) v of short sequences, all keys at once, float16

Operands are float16, sums float32; a weight is ``[N, K]``, as torch keeps it.
"""

# Triton types what it compiles; its parameters are tensors, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from fastlayer.kernels.primitives import gelu, reciprocal
from fastlayer.kernels.sizes import ATTEND_COLUMNS, NARROWEST, power_of_two
from fastlayer.kernels.warm import Warm, WarmLaunch


@triton.jit
def linear_kernel(
    a_ptr, w_ptr, bias_ptr, out_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``EVEN``: tiles divide every dimension. Bands of ``BAND`` row tiles share operands in L2."""
    down, across = tl.cdiv(tokens, ROWS), tl.cdiv(N, COLS)
    pid = tl.program_id(0)
    first = pid // (BAND * across) * BAND
    height = tl.minimum(down - first, BAND)
    row = (first + pid % (BAND * across) % height) * ROWS
    col = pid % (BAND * across) // height * COLS
    rows = tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    part = tl.arange(0, DEPTH)
    a_ptrs = a_ptr + row.to(tl.int64) * K + rows[:, None] * K + part[None, :]
    w_ptrs = w_ptr + cols.to(tl.int64)[None, :] * K + part[:, None]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        if EVEN:
            a = tl.load(a_ptrs)
            w = tl.load(w_ptrs)
        else:
            there = k + part < K
            a = tl.load(a_ptrs, mask=(row + rows < tokens)[:, None] & there[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=there[:, None] & (cols < N)[None, :], other=0.0)
        acc = tl.dot(a, w, acc)
        a_ptrs += DEPTH
        w_ptrs += DEPTH
    y = gelu(acc + tl.load(bias_ptr + cols, mask=cols < N, other=0.0)[None, :], False)
    out = out_ptr + row.to(tl.int64) * N + rows[:, None] * N + cols[None, :]
    if EVEN:
        tl.store(out, y.to(tl.float16))
    else:
        tl.store(out, y.to(tl.float16), mask=(row + rows < tokens)[:, None] & (cols < N)[None, :])


@triton.jit
def attend_kernel(
    qkv_ptr, out_ptr, tokens,
    H: tl.constexpr, HEAD: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``ROWS`` queries of one head a program; ``CHUNK`` of its columns are staged at once.

    Probabilities are divided by their sum before they are rounded, as the reference's are: much of
    both roundings is then the same.
    """
    D: tl.constexpr = H * HEAD
    tiles = tl.cdiv(tokens, ROWS)
    pid = tl.program_id(0)
    first = (pid // tiles // H).to(tl.int64) * tokens
    head = pid // tiles % H
    rows = pid % tiles * ROWS + tl.arange(0, ROWS)
    keys = tl.arange(0, KEYS)
    part = tl.arange(0, CHUNK)
    here = (rows < tokens)[:, None]
    limit = tokens
    visible = (keys < tokens)[None, :]
    if CAUSAL:
        limit = tl.minimum(tokens, (pid % tiles + 1) * ROWS)
        visible = rows[:, None] >= keys[None, :]
    base = qkv_ptr + first * (3 * D) + head * HEAD
    q_ptrs = base + rows[:, None] * (3 * D) + part[None, :]
    k_ptrs = base + D + keys[None, :] * (3 * D) + part[:, None]
    v_ptrs = base + 2 * D + keys[:, None] * (3 * D) + part[None, :]
    s = tl.zeros([ROWS, KEYS], tl.float32)
    for c in tl.range(0, HEAD, CHUNK, num_stages=STAGES):
        q = tl.load(q_ptrs + c, mask=here, other=0.0)
        k = tl.load(k_ptrs + c, mask=(keys < limit)[None, :], other=0.0)
        s = tl.dot(q, k, s)
    s = tl.where(visible, s * SCALE, float("-inf"))
    p = tl.exp2(s - tl.max(s, axis=1)[:, None])
    p = (p * reciprocal(tl.sum(p, axis=1))[:, None]).to(tl.float16)
    out = out_ptr + first * D + head * HEAD + rows[:, None] * D + part[None, :]
    for c in tl.range(0, HEAD, CHUNK, num_stages=STAGES):
        v = tl.load(v_ptrs + c, mask=(keys < limit)[:, None], other=0.0)
        tl.store(out + c, tl.dot(p, v).to(tl.float16), mask=here)


_linear = Warm(linear_kernel)
_attend = Warm(attend_kernel)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: a program's rows and columns, the depth of one step."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


#: The tile of ``activated`` from compute capability 9.0 on (H200, case 8: 34 us; the library's
#: product and a GELU in a pass of its own 29 + 13) and below, or with little shared memory.
_WIDE = Tile(rows=128, cols=256, depth=64, warps=8, stages=3)
_NARROW = Tile(rows=128, cols=128, depth=64, warps=8, stages=3)
_WIDE_CAPABILITIES = ((9, 0), (10, 0))

#: Queries of a program of ``attend``.
_QUERIES = 64


def tile_for(capability: tuple[int, int]) -> Tile:
    """The tile of ``activated`` on a device."""
    return _WIDE if capability in _WIDE_CAPABILITIES else _NARROW


@cache
def linear_launch(tokens: int, n: int, k: int, tile: Tile) -> WarmLaunch:
    """What ``activated`` launches."""
    constants = {
        "N": n,
        "K": k,
        "EVEN": tokens % tile.rows == 0 and n % tile.cols == 0 and k % tile.depth == 0,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEPTH": tile.depth,
        "BAND": 8,
        "STAGES": tile.stages,
    }
    programs = -(-tokens // tile.rows) * -(-n // tile.cols)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return WarmLaunch(programs, (tokens,), constants, options)


@cache
def attend_launch(batch: int, tokens: int, heads: int, head_dim: int, causal: bool) -> WarmLaunch:
    """What ``attend`` launches."""
    keys = max(NARROWEST, power_of_two(tokens))
    rows = min(keys, _QUERIES)
    constants = {
        "H": heads,
        "HEAD": head_dim,
        "SCALE": head_dim**-0.5 * math.log2(math.e),
        "CHUNK": ATTEND_COLUMNS,
        "ROWS": rows,
        "KEYS": keys,
        "CAUSAL": causal,
        "STAGES": 3,
    }
    programs = batch * heads * -(-tokens // rows)
    return WarmLaunch(programs, (tokens,), constants, {"num_warps": 4})


def activated(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    tile: Tile,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gelu(a weight^T + bias)``, ``a [T, K]``, ``weight [N, K]`` and ``bias [N]`` float16."""
    tokens, n = a.shape[0], weight.shape[0]
    out = a.new_empty(tokens, n) if out is None else out
    _linear(linear_launch(tokens, n, a.shape[1], tile), a, weight, bias, out)
    return out


def attend(
    qkv: torch.Tensor, batch: int, heads: int, causal: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Context ``[B N, d]`` from ``qkv [B N, 3 d]``, float16; sizes as ``sizes.attends``."""
    tokens, d = qkv.shape[0] // batch, qkv.shape[1] // 3
    out = qkv.new_empty(qkv.shape[0], d) if out is None else out
    _attend(attend_launch(batch, tokens, heads, d // heads, causal), qkv, out)
    return out
