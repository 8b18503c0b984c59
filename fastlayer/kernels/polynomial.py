"""Degree-2 polynomial attention as a chunked causal scan; the maths is in ``fastlayer.polynomial``.

For one head, with features ``phi(k) = (k_i k_j)``, in three launches:

    states    local[c]  = sum over the keys of chunk c of phi(k) v^T             float32
    scan      mean[c]   = sum of local[0..c] / number of those keys              float16
    outputs   past      = count * (c2 phi(q) mean + c1 q mean1 + c0 mean0)
              out       = (past + sum exp(s) v) / (its denominator)              keys of own chunk

``phi`` never lies in memory. Columns come in blocks of sixteen, and a pair of blocks ``a <= b``
makes 256 products by an outer product of the two; pairs ``a < b`` stand for both orders and count
twice. Sums are float32 throughout; only a *mean* is rounded to a float16 operand, because a sum
over 100,000 keys would not fit. The past is the initial state of an online softmax over the own
chunk, so one running maximum keeps both finite. The denominator needs ``[D, D]`` moments only.

Everything else that passes over all tokens is here too, so that nothing of a layer's attention is
converted, copied or squared by an operator of its own:

    moments   k v^T, k k^T and the sums of k and v over each chunk              float32
    along     a vector of each head, or each row itself, times each row         float32
    rows      exact attention of a few rows, their keys split over programs     float32

Shapes: ``q, k, v, out [H, N, D]`` views, float16. Products of columns load along tokens, so q and k
are best transposes of ``[H, D, P]`` with zeros from N on, P a multiple of the chunk (``columns``
says so, or makes such a copy); v and out have D contiguous.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fastlayer.kernels.readback import read
from fastlayer.kernels.sizes import power_of_two
from fastlayer.polynomial import KeyMoments, Operations, running_means

_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = tl.constexpr(16)
_PRODUCTS = tl.constexpr(256)
#: Products that enter one matrix product of ``outputs``: four columns of a against sixteen of b.
_PART = tl.constexpr(4)


@triton.jit
def _pair(p, BLOCKS: tl.constexpr):
    """The p-th pair of blocks ``(a, b)``, a <= b, by rows of the upper triangle."""
    a = 0
    for t in tl.static_range(1, BLOCKS):
        a += tl.where(p >= t * BLOCKS - t * (t - 1) // 2, 1, 0)
    return a, p - (a * BLOCKS - a * (a - 1) // 2) + a


@triton.jit
def states_kernel(
    kt_ptr, v_ptr, local_ptr,
    padded, v_head, v_row, chunks,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One pair of blocks of one chunk and head, ``[256, D]``. Grid (pairs, chunks, heads)."""
    pair = tl.program_id(0)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    a, b = _pair(pair, D // _BLOCK)
    block = tl.arange(0, _BLOCK)
    cols = tl.arange(0, D)
    rows = tl.arange(0, ROWS)
    start = (chunk * CHUNK).to(tl.int64)
    kt = kt_ptr + (head * D).to(tl.int64) * padded + start
    v = v_ptr + head.to(tl.int64) * v_head + start * v_row
    acc = tl.zeros([_PRODUCTS, D], tl.float32)
    for r in tl.range(0, CHUNK, ROWS, num_stages=STAGES):
        ka = tl.load(kt + (block + a * _BLOCK)[:, None] * padded + (rows + r)[None, :])
        kb = tl.load(kt + (block + b * _BLOCK)[:, None] * padded + (rows + r)[None, :])
        products = tl.reshape(ka[:, None, :] * kb[None, :, :], [_PRODUCTS, ROWS])
        values = tl.load(v + (rows + r)[:, None] * v_row + cols[None, :])
        acc = tl.dot(products, values, acc)
    acc *= tl.where(a == b, 1.0, 2.0)
    pairs = tl.num_programs(0)
    local = local_ptr + ((head.to(tl.int64) * chunks + chunk) * pairs + pair) * (_PRODUCTS * D)
    tl.store(local + tl.arange(0, _PRODUCTS)[:, None] * D + cols[None, :], acc)


@triton.jit
def moments_kernel(
    kt_ptr, v_ptr, linear_ptr, second_ptr, sums_ptr,
    padded, v_head, v_row, chunks,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``k v^T`` and ``k k^T [D, D]`` and the sums of k and v of one chunk. Grid (chunks, heads)."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    cols = tl.arange(0, D)
    rows = tl.arange(0, ROWS)
    start = (chunk * CHUNK).to(tl.int64)
    kt = kt_ptr + (head * D).to(tl.int64) * padded + start
    v = v_ptr + head.to(tl.int64) * v_head + start * v_row
    linear = tl.zeros([D, D], tl.float32)
    second = tl.zeros([D, D], tl.float32)
    keys = tl.zeros([D], tl.float32)
    values = tl.zeros([D], tl.float32)
    for r in tl.range(0, CHUNK, ROWS, num_stages=STAGES):
        k = tl.load(kt + cols[:, None] * padded + (rows + r)[None, :])
        x = tl.load(v + (rows + r)[:, None] * v_row + cols[None, :])
        linear = tl.dot(k, x, linear)
        second = tl.dot(k, tl.trans(k), second)
        keys += tl.sum(k.to(tl.float32), axis=1)
        values += tl.sum(x.to(tl.float32), axis=0)
    entry = head.to(tl.int64) * chunks + chunk
    square = entry * (D * D) + cols[:, None] * D + cols[None, :]
    tl.store(linear_ptr + square, linear)
    tl.store(second_ptr + square, second)
    tl.store(sums_ptr + entry * (2 * D) + cols, keys)
    tl.store(sums_ptr + entry * (2 * D) + D + cols, values)


@triton.jit
def along_kernel(
    t_ptr, vector_ptr, out_ptr, tokens, padded,
    D: tl.constexpr, SPAN: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """``t . vector`` of each row, or ``t . t`` with ``SQUARE``. Grid (spans, heads)."""
    head = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    cols = tl.arange(0, D)
    t = tl.load(t_ptr + head * D * padded + cols[:, None] * padded + places[None, :])
    wide = t.to(tl.float32)
    if SQUARE:
        result = tl.sum(wide * wide, axis=0)
    else:
        vector = tl.load(vector_ptr + head * D + cols).to(tl.float32)
        result = tl.sum(wide * vector[:, None], axis=0)
    tl.store(out_ptr + head * tokens + places, result, mask=places < tokens)


@triton.jit
def rows_kernel(
    q_ptr, rows_ptr, kt_ptr, v_ptr, out_ptr, stats_ptr,
    tokens, padded, v_head, v_row,
    D: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows ``q [H, ROWS, D]`` at ``rows`` against ``SPAN`` keys. Grid (spans, heads).

    ``out [H, S, ROWS, D]`` is not yet divided; ``stats [H, S, 2, ROWS]`` are maximum and sum.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * SPAN
    cols = tl.arange(0, D)
    row = tl.arange(0, ROWS)
    places = tl.load(rows_ptr + row)
    q = tl.load(q_ptr + (head * ROWS + row)[:, None] * D + cols[None, :])
    kt = kt_ptr + (head * D).to(tl.int64) * padded
    v_base = v_ptr + head.to(tl.int64) * v_head
    # Finite, so that a row that sees no key here has weights of zero and not of NaN.
    m = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for key in tl.range(first, tl.minimum(first + SPAN, tokens), KEYS, num_stages=STAGES):
        at = tl.arange(0, KEYS) + key
        k = tl.load(kt + cols[:, None] * padded + at[None, :])
        values = tl.load(
            v_base + at.to(tl.int64)[:, None] * v_row + cols[None, :],
            mask=(at < tokens)[:, None], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, k) * (SCALE * _LOG2E)
        s = tl.where(at[None, :] <= places[:, None], s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(m - higher)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.float16), values, acc * shrink[:, None])
        m = higher
    entry = head * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr + (entry * ROWS + row)[:, None] * D + cols[None, :], acc)
    tl.store(stats_ptr + entry * (2 * ROWS) + row, m)
    tl.store(stats_ptr + entry * (2 * ROWS) + ROWS + row, total)


@triton.jit
def scan_kernel(
    local_ptr, mean_ptr,
    chunks, elements,
    CHUNK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Running means over chunks, for ``SPAN`` elements. Grid (elements / SPAN, heads)."""
    at = tl.program_id(1).to(tl.int64) * chunks * elements
    at += tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    total = tl.zeros([SPAN], tl.float32)
    keys = 0.0
    for _ in tl.range(0, chunks):
        total += tl.load(local_ptr + at)
        keys += CHUNK
        tl.store(mean_ptr + at, (total / keys).to(tl.float16))
        at += elements


@triton.jit
def outputs_kernel(
    qt_ptr, kt_ptr, v_ptr, mean_ptr, mean1_ptr, moments_ptr, sums_ptr, coefficients_ptr, out_ptr,
    spread_ptr,
    tokens, padded, v_head, v_row, out_head, out_row, chunks, first_row,
    D: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, OWN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of one head. Grid (row tiles from ``first_row`` on, heads).

    ``mean [H, C, pairs, 256, D]``, ``mean1`` and ``moments [H, C, D, D]`` (of k v^T and k k^T) are
    float16; ``sums [H, C, 2, D]`` (means of k, then v) and ``coefficients [H, 4]`` float32. Entry
    c is over chunks 0 to c, so a row of chunk c reads entry c - 1. With ``OWN`` each row fits its
    own scores and ``coefficients`` are not read. ``spread [H, N]`` float32 receives the variance of
    each row's scores over the past.
    """
    head = tl.program_id(1)
    start = first_row + tl.program_id(0) * ROWS
    chunk = start // CHUNK
    count = (chunk * CHUNK).to(tl.float32)
    cols = tl.arange(0, D)
    rows = tl.arange(0, ROWS)
    columns = (head * D).to(tl.int64) * padded
    qt = qt_ptr + columns + start
    entry = head.to(tl.int64) * chunks + chunk - 1

    # The second order: 64 products at a time.
    BLOCKS: tl.constexpr = D // _BLOCK
    PAIRS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    PARTS: tl.constexpr = _BLOCK // _PART
    WIDE: tl.constexpr = _PART * _BLOCK
    part = tl.arange(0, _PART)
    block = tl.arange(0, _BLOCK)
    wide = tl.arange(0, WIDE)
    mean = mean_ptr + entry * (PAIRS * _PRODUCTS * D)
    acc = tl.zeros([ROWS, D], tl.float32)
    for t in tl.range(0, PAIRS * PARTS, num_stages=STAGES):
        pair = t // PARTS
        a, b = _pair(pair, BLOCKS)
        first = a * _BLOCK + (t - pair * PARTS) * _PART
        qa = tl.load(qt + (part + first)[:, None] * padded + rows[None, :])
        qb = tl.load(qt + (block + b * _BLOCK)[:, None] * padded + rows[None, :])
        products = tl.reshape(qa[:, None, :] * qb[None, :, :], [WIDE, ROWS])
        state = tl.load(mean + (wide + t * WIDE)[:, None] * D + cols[None, :])
        acc = tl.dot(tl.trans(products), state, acc)

    # The lower orders and the denominator.
    q = tl.trans(tl.load(qt + cols[:, None] * padded + rows[None, :]))
    square = entry * (D * D) + cols[:, None] * D + cols[None, :]
    linear = tl.dot(q, tl.load(mean1_ptr + square))
    wide_q = q.to(tl.float32)
    key_mean = tl.load(sums_ptr + entry * (2 * D) + cols)
    value_mean = tl.load(sums_ptr + entry * (2 * D) + D + cols)
    score = tl.sum(wide_q * key_mean[None, :], axis=1) * SCALE
    score2 = tl.sum(tl.dot(q, tl.load(moments_ptr + square)) * wide_q, axis=1) * (SCALE * SCALE)
    spread = score2 - score * score
    here = start + rows
    tl.store(spread_ptr + head.to(tl.int64) * tokens + here, spread, mask=here < tokens)
    if OWN:
        variance = tl.minimum(tl.maximum(spread, 0.0), 1.0)
        m = (score + 0.5 * variance) * _LOG2E
        c0 = 1.0 - 0.5 * variance - score + 0.5 * score * score
        c1 = 1.0 - score
        c2 = tl.zeros([ROWS], tl.float32) + 0.5
    else:
        one = tl.zeros([ROWS], tl.float32)
        coefficients = coefficients_ptr + head * 4
        m = (one + tl.load(coefficients)) * _LOG2E
        c0 = one + tl.load(coefficients + 1)
        c1 = one + tl.load(coefficients + 2)
        c2 = one + tl.load(coefficients + 3)
    acc = (c2 * (count * SCALE * SCALE))[:, None] * acc
    acc += (c1 * (count * SCALE))[:, None] * linear
    acc += (c0 * count)[:, None] * value_mean[None, :]
    total = (c0 + c1 * score + c2 * score2) * count

    # The row's own chunk, exactly: an online softmax that goes on from the past.
    v_base = v_ptr + head.to(tl.int64) * v_head
    for key in tl.range(chunk * CHUNK, start + ROWS, KEYS, num_stages=STAGES):
        places = tl.arange(0, KEYS) + key
        kt = tl.load(kt_ptr + columns + cols[:, None] * padded + places[None, :])
        values = tl.load(
            v_base + places.to(tl.int64)[:, None] * v_row + cols[None, :],
            mask=(places < tokens)[:, None], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, kt) * (SCALE * _LOG2E)
        s = tl.where(places[None, :] <= start + rows[:, None], s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(m - higher)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.float16), values, acc * shrink[:, None])
        m = higher
    places = start + rows
    out = out_ptr + head.to(tl.int64) * out_head + places.to(tl.int64)[:, None] * out_row
    result = (acc / total[:, None]).to(tl.float16)
    tl.store(out + cols[None, :], result, mask=(places < tokens)[:, None])


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch: ``kernel[grid](*tensors, *scalars, **constants, **options)``."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.tensors, *self.scalars, **self.constants, **self.options)


@dataclass(frozen=True, slots=True)
class PolynomialLaunch:
    """Knobs: rows of an output tile and of a state's step, keys of a step, warps, stages.

    The output tile and the keys' step must divide the chunk.
    """

    rows: int = 128
    keys: int = 64
    state_rows: int = 64
    span: int = 1024
    warps: int = 8
    state_warps: int = 8
    stages: int = 3


#: Head widths that compile well for sm_90 and sm_120: no spills, no 16- or 32-wide operands, which
#: ptxas before 13.3 miscompiles for sm_90. ``steps`` takes 16 and 32 too, for the interpreter.
HEAD_DIMS = (64,)


def pairs(head_dim: int) -> int:
    """Pairs of column blocks, ``b (b + 1) / 2`` for ``b = head_dim / 16``."""
    blocks = head_dim // 16
    return blocks * (blocks + 1) // 2


def workspace_per_head(tokens: int, head_dim: int, chunk: int) -> int:
    """Bytes that ``polynomial_attention`` allocates for each head of a group."""
    chunks = -(-tokens // chunk)
    state = pairs(head_dim) * 256 * head_dim * (4 + 2)
    return chunks * (state + 2 * head_dim * head_dim * 2)


def columns(t: torch.Tensor, chunk: int) -> torch.Tensor:
    """``t [H, N, D]``, or a copy of it, as the kernels read it: tokens contiguous.

    Beyond its N tokens the memory of each column holds zeros up to a whole chunk.
    """
    heads, tokens, dim = t.shape
    if t.stride(1) == 1 and t.stride(2) % chunk == 0 and t.stride(0) == dim * t.stride(2):
        return t
    whole = t.new_zeros(heads, dim, -(-tokens // chunk) * chunk)
    whole[:, :, :tokens] = t.transpose(1, 2)
    return whole[:, :, :tokens].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Operands:
    """What the three launches read and write for a group of G heads and C = chunks of the past.

    ``q`` and ``k`` as ``columns`` makes them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    spread: torch.Tensor
    coefficients: torch.Tensor | None
    mean1: torch.Tensor
    moments: torch.Tensor
    sums: torch.Tensor
    local: torch.Tensor
    mean: torch.Tensor


def operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    spread: torch.Tensor,
    coefficients: torch.Tensor | None,
    past: KeyMoments,
) -> Operands:
    """The lower moments in float16, and room for the states."""
    heads, _, dim = q.shape
    shape = (heads, past.sums.shape[1], pairs(dim), 256, dim)
    local = torch.empty(shape, dtype=torch.float32, device=q.device)
    mean = torch.empty(shape, dtype=torch.float16, device=q.device)
    if coefficients is not None:
        coefficients = coefficients.float().contiguous()
    linear, second = past.linear.half(), past.second.half()
    return Operands(q, k, v, out, spread, coefficients, linear, second, past.sums, local, mean)


def steps(given: Operands, *, first_row: int, chunk: int, launch: PolynomialLaunch) -> list[Step]:
    """The three launches that write rows from ``first_row`` on."""
    heads, tokens, dim = given.v.shape
    past = given.mean.shape[1]
    padded = given.k.stride(2)
    elements = pairs(dim) * 256 * dim
    states = Step(
        states_kernel,
        (pairs(dim), past, heads),
        (given.k, given.v, given.local),
        (padded, given.v.stride(0), given.v.stride(1), past),
        {"D": dim, "CHUNK": chunk, "ROWS": min(launch.state_rows, chunk), "STAGES": launch.stages},
        {"num_warps": launch.state_warps},
    )
    span = min(launch.span, elements)
    scan = Step(
        scan_kernel,
        (elements // span, heads),
        (given.local, given.mean),
        (past, elements),
        {"CHUNK": chunk, "SPAN": span},
        {"num_warps": 4},
    )
    outputs = Step(
        outputs_kernel,
        (-(-(tokens - first_row) // launch.rows), heads),
        (
            given.q, given.k, given.v, given.mean, given.mean1, given.moments, given.sums,
            given.sums if given.coefficients is None else given.coefficients, given.out,
            given.spread,
        ),
        (
            tokens, padded, given.v.stride(0), given.v.stride(1), given.out.stride(0),
            given.out.stride(1), past, first_row,
        ),
        {
            "D": dim, "SCALE": dim**-0.5, "CHUNK": chunk, "ROWS": launch.rows, "KEYS": launch.keys,
            "OWN": given.coefficients is None, "STAGES": launch.stages,
        },
        {"num_warps": launch.warps},
    )  # fmt: skip
    return [states, scan, outputs]


def polynomial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    coefficients: torch.Tensor | None,
    *,
    first_row: int,
    chunk: int,
    heads_at_once: int | None = None,
    launch: PolynomialLaunch | None = None,
    past: KeyMoments | None = None,
) -> torch.Tensor:
    """Writes rows from ``first_row`` on to ``out``; the module says how, and the shapes.

    Returns the variance of each row's scores over the past, ``[H, N]`` float32, zero before
    ``first_row``.

    ``first_row`` is a positive multiple of ``chunk`` and below N; ``coefficients [H, 4]``, or None
    to fit each row's own scores. Heads go in groups of
    ``heads_at_once`` (all by default), each taking ``workspace_per_head`` bytes a head. ``past`` is
    what ``moments`` found, where that is known already.

    Raises:
        ValueError: a shape, dtype, stride or row does not fit.
    """
    launch = launch or PolynomialLaunch()
    _check(q, k, v, out, coefficients, first_row, chunk, launch)
    heads = len(q)
    q, k = columns(q, chunk), columns(k, chunk)
    past = moments(k, v, chunk) if past is None else past
    group = heads_at_once or heads
    spread = torch.zeros(q.shape[:2], device=q.device)
    for at in range(0, heads, group):
        part = slice(at, at + group)
        fixed = None if coefficients is None else coefficients[part]
        given = operands(
            q[part], k[part], v[part], out[part], spread[part], fixed, past.heads(part)
        )
        for step in steps(given, first_row=first_row, chunk=chunk, launch=launch):
            step()
        del given
    return spread


def moments(k: torch.Tensor, v: torch.Tensor, chunk: int) -> KeyMoments:
    """``polynomial.key_moments`` in one pass over k and v."""
    k = columns(k, chunk)
    heads, tokens, dim = k.shape
    past = (tokens - 1) // chunk
    linear = torch.empty(heads, past, dim, dim, device=k.device)
    second = torch.empty_like(linear)
    sums = torch.empty(heads, past, 2, dim, device=k.device)
    for step in (moments_step(k, v, linear, second, sums, chunk),) if past else ():
        step()
    return KeyMoments(*(running_means(part, chunk) for part in (linear, second, sums)))


def moments_step(
    k: torch.Tensor,
    v: torch.Tensor,
    linear: torch.Tensor,
    second: torch.Tensor,
    sums: torch.Tensor,
    chunk: int,
) -> Step:
    heads, _, dim = k.shape
    past = sums.shape[1]
    return Step(
        moments_kernel,
        (past, heads),
        (k, v, linear, second, sums),
        (k.stride(2), v.stride(0), v.stride(1), past),
        {"D": dim, "CHUNK": chunk, "ROWS": min(64, chunk), "STAGES": 3},
        {"num_warps": 4},
    )


def along(t: torch.Tensor, vector: torch.Tensor | None, chunk: int) -> torch.Tensor:
    """``[H, N]`` float32: rows ``t [H, N, D]`` times their head's ``vector [H, D]`` or itself."""
    t = columns(t, chunk)
    out = torch.empty(t.shape[:2], device=t.device)
    along_step(t, t if vector is None else vector.contiguous(), out, vector is None)()
    return out


def along_step(t: torch.Tensor, vector: torch.Tensor, out: torch.Tensor, square: bool) -> Step:
    heads, tokens, dim = t.shape
    span = min(128, _step(t))
    return Step(
        along_kernel,
        (-(-tokens // span), heads),
        (t, vector, out),
        (tokens, t.stride(2)),
        {"D": dim, "SPAN": span, "SQUARE": square},
        {"num_warps": 4},
    )


def exact_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, chunk: int
) -> torch.Tensor:
    """``polynomial.exact_rows`` with float16 weights, in one pass over k and v."""
    k = columns(k, chunk)
    heads, tokens, dim = k.shape
    count = max(16, power_of_two(len(rows)))
    spare = rows[:1].expand(count - len(rows))
    places = torch.cat([rows, spare])
    queries = q[:, places].contiguous()
    spans = -(-tokens // _SPAN)
    out = torch.empty(heads, spans, count, dim, device=q.device)
    stats = torch.empty(heads, spans, 2, count, device=q.device)
    rows_step(queries, places.int(), k, v, out, stats)()
    top, total = stats.unbind(2)
    share = torch.exp2(top - top.amax(1, keepdim=True))
    result = (out * share[..., None]).sum(1) / (total * share).sum(1)[..., None]
    return result[:, : len(rows)]


#: Keys that one program of ``rows_kernel`` meets.
_SPAN = 4096


def rows_step(
    queries: torch.Tensor,
    places: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
) -> Step:
    heads, spans, count, dim = out.shape
    return Step(
        rows_kernel,
        (spans, heads),
        (queries, places, k, v, out, stats),
        (k.shape[1], k.stride(2), v.stride(0), v.stride(1)),
        {
            "D": dim, "SCALE": dim**-0.5, "ROWS": count, "KEYS": min(64, _step(k)), "SPAN": _SPAN,
            "STAGES": 3,
        },
        {"num_warps": 8 if count >= 128 else 4},
    )  # fmt: skip


def _step(t: torch.Tensor) -> int:
    """The largest power of two by which whole columns of ``columns(t)`` can be walked."""
    return t.stride(2) & -t.stride(2)


def operations(chunk: int) -> Operations:
    """What ``fastlayer.polynomial`` needs of a layer, by these kernels."""
    return Operations(
        moments=lambda k, v: moments(k, v, chunk),
        along=lambda t, vector: along(t, vector, chunk),
        exact_rows=lambda q, k, v, rows: exact_rows(q, k, v, rows, chunk),
        read=read,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    coefficients: torch.Tensor | None,
    first_row: int,
    chunk: int,
    launch: PolynomialLaunch,
) -> None:
    heads, tokens, dim = q.shape
    rules: list[tuple[bool, str, Any]] = [
        (k.shape == v.shape == out.shape == q.shape, "q, k, v and out of one shape", out.shape),
        (dim in (16, 32, 64), "a head_dim of 16, 32 or 64", dim),
        (all(t.dtype == torch.float16 for t in (q, k, v, out)), "float16 tensors", q.dtype),
        (all(t.stride(2) == 1 for t in (v, out)), "contiguous columns in v and out", v.stride()),
        (
            coefficients is None or coefficients.shape == (heads, 4),
            "coefficients [H, 4] or None",
            None if coefficients is None else tuple(coefficients.shape),
        ),
        (
            0 < first_row < tokens and first_row % chunk == 0,
            f"first_row a positive multiple of chunk = {chunk} below {tokens}",
            first_row,
        ),
        (
            chunk % launch.rows == 0 and launch.rows % launch.keys == 0,
            "chunk a multiple of rows, and rows of keys",
            (chunk, launch.rows, launch.keys),
        ),
        (chunk % launch.state_rows == 0, "chunk a multiple of state_rows", chunk),
    ]
    for holds, expected, given in rules:
        if not holds:
            raise ValueError(f"polynomial_attention: given {given}; expected {expected}")
