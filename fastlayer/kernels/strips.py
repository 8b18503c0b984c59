"""The whole model in one launch for small batches: a causal wavefront of low strips.

As in ``wavefront`` a program owns rows of one sequence through all layers, publishes K and V a
layer, and waits for the strips before its own; but a strip is only one or two matrix instructions
high, so that many programs share a sequence, and the chain of dependent steps is kept short:

    Attention runs in three-dimensional products ``[ITEMS, 16, .]`` with one warp to each item; an
    item is one head and sixteen of the strip's rows, so no result crosses a warp. With more items
    than warps the heads are taken in passes.

    Weights lie in memory in the order in which the matrix instruction holds its B operand, so they
    go from memory to registers without passing through shared memory (``fragments`` below), and
    each is asked for while the product before it runs (``EARLY``).

    h = norm(x);  K, V = h Wk, h Wv -> workspace, flag;  for each pass of heads:  q = h Wq + bq,
    x += softmax(q k^T) v Wo;  for each chunk:  x += gelu(norm(x) W1 + b1) W2
"""

# Triton types what it compiles; its parameters are tensors, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayer.kernels.primitives import (
    await_tiles,
    finish,
    gelu,
    normalise,
    publish,
    reciprocal,
)


def fragments(matrices: torch.Tensor, warps: int, depth: int) -> torch.Tensor:
    """``[L, K, N]`` float16 to ``[L, K * N]``, in pieces of ``depth`` rows, for ``_product``.

    A 16x8 B operand of mma.m16n8k16 gives lane ``4 n + q`` the elements ``k = 8 h + 2 q + p`` for
    h, p in 0..1 (PTX ISA, matrix fragments). Two such operands along K make sixteen bytes a lane;
    warps stand side by side along N, so a piece of whole columns is contiguous too.
    """
    layers, k, n = matrices.shape
    side = min(warps, n // 8)
    split = matrices.reshape(
        layers, k // depth, depth // 32, 2, 2, 4, 2, n // (8 * side), side, 8
    )  # 0       1           2           3  4  5  6        7          8    9
    order = (0, 1, 7, 2, 8, 9, 5, 3, 4, 6)
    return split.permute(order).reshape(layers, k * n).contiguous()


@triton.jit
def _piece(ptr, index, SIZE: tl.constexpr):
    return tl.load(ptr + index * SIZE + tl.arange(0, SIZE))


@triton.jit
def _product(a, flat, acc, K: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """``acc`` plus ``a [R, K]`` times the ``[K, N]`` that ``fragments`` laid down as ``flat``."""
    SIDE: tl.constexpr = WARPS if WARPS * 8 <= N else N // 8
    split = tl.reshape(flat, [N // (8 * SIDE), K // 32, SIDE, 8, 4, 2, 2, 2])
    b = tl.reshape(tl.permute(split, (1, 5, 6, 4, 7, 0, 2, 3)), [K, N])
    return tl.dot(a, b, acc)


@triton.jit
def strips_kernel(
    x_ptr, out_ptr, wq_ptr, wkv_ptr, wo_ptr, w1_ptr, w2_ptr, bias_ptr, final_ptr,
    length_ptr, keys_ptr, flag_ptr, batch, tokens, strips,
    D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, HEAD: tl.constexpr, F: tl.constexpr,
    LAYERS: tl.constexpr, LENGTHS: tl.constexpr, STRIPS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PASSES: tl.constexpr, QKV_CHUNK: tl.constexpr, CHUNK: tl.constexpr,
    WARPS: tl.constexpr, SCALE: tl.constexpr, MAXIMUM: tl.constexpr, EXACT_GELU: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """See the module. ``H`` heads of ``HEAD`` columns, both powers of two; ``KEYS >= tokens``."""
    G: tl.constexpr = H * HEAD
    HEIGHT: tl.constexpr = ROWS // 16
    HEADS: tl.constexpr = H // PASSES
    PART: tl.constexpr = HEADS * HEAD
    ITEMS: tl.constexpr = HEADS * HEIGHT
    KV_PIECE: tl.constexpr = W * QKV_CHUNK
    HEAD_PIECE: tl.constexpr = W * PART
    FFN_PIECE: tl.constexpr = W * CHUNK
    pid = tl.program_id(0)
    sequence = pid // strips
    strip = pid % strips
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    part = tl.arange(0, PART)
    chunk = tl.arange(0, CHUNK)
    qkv_chunk = tl.arange(0, QKV_CHUNK)
    slots = tl.arange(0, STRIPS)
    position = strip * ROWS + rows
    inside = position < tokens
    length = tokens
    if LENGTHS:
        length = tl.load(length_ptr + sequence)
    live = position < length
    base = (sequence.to(tl.int64) * tokens + strip * ROWS) * D
    offsets = rows[:, None] * D + cols[None, :]
    real = (cols < D)[None, :]
    x = tl.load(x_ptr + base + offsets, mask=live[:, None] & real, other=0.0)

    flags = flag_ptr + sequence * STRIPS
    start = tl.load(flags + strip)
    stride = tl.num_programs(0).to(tl.int64) * (ROWS * 2 * G)
    keys = keys_ptr + (sequence * strips * ROWS).to(tl.int64) * (2 * G)
    own = (strip * ROWS + rows)[:, None] * (2 * G) + qkv_chunk[None, :]

    item = tl.arange(0, ITEMS)
    key = tl.arange(0, KEYS)
    head = tl.arange(0, HEAD)
    reachable = key < (strip + 1) * ROWS
    of_item = item // HEIGHT * HEAD
    k_offsets = of_item[:, None, None] + head[None, :, None] + (key * (2 * G))[None, None, :]
    v_offsets = of_item[:, None, None] + (key * (2 * G))[None, :, None] + head[None, None, :]
    row_of_item = strip * ROWS + (item % HEIGHT * 16)[:, None] + tl.arange(0, 16)[None, :]
    visible = row_of_item[:, :, None] >= key[None, None, :]

    layers = tl.where(strip * ROWS < length, LAYERS, 0)
    served = True
    if EARLY:
        ahead = _piece(wkv_ptr, 0, KV_PIECE)
    for layer in tl.range(0, layers, num_stages=1):
        bias = bias_ptr + layer * (3 * G + 2 * W + F)
        here = keys + layer * stride
        wkv = wkv_ptr + layer * (2 * W * G)
        wq = wq_ptr + layer * (W * G)
        wo = wo_ptr + layer * (W * G)
        w1 = w1_ptr + layer * (W * F)
        w2 = w2_ptr + layer * (W * F)
        bo = tl.load(bias + 3 * G + cols)
        b2 = tl.load(bias + 3 * G + W + F + cols)
        h = normalise(x, D).to(tl.float16)
        for c in tl.static_range(2 * G // QKV_CHUNK):
            if EARLY:
                now = ahead
                if c + 1 < 2 * G // QKV_CHUNK:
                    ahead = _piece(wkv, c + 1, KV_PIECE)
                else:
                    ahead = _piece(wq, 0, HEAD_PIECE)
            else:
                now = _piece(wkv, c, KV_PIECE)
            # Added after the product, which has no cause to wait for it.
            bkv = tl.load(bias + G + c * QKV_CHUNK + qkv_chunk)
            zero = tl.zeros([ROWS, QKV_CHUNK], tl.float32)
            kv = _product(h, now, zero, W, QKV_CHUNK, WARPS) + bkv[None, :]
            tl.store(here + own + c * QKV_CHUNK, kv.to(tl.float16))
        publish(flags + strip, start + layer + 1)

        x += bo[None, :]
        for p in tl.static_range(PASSES):
            if EARLY:
                now = ahead
                ahead = _piece(wo, p, HEAD_PIECE)
            else:
                now = _piece(wq, p, HEAD_PIECE)
            bq = tl.load(bias + p * PART + part)
            zero = tl.zeros([ROWS, PART], tl.float32) + bq[None, :]
            q = _product(h, now, zero, W, PART, WARPS).to(tl.float16)
            q = tl.permute(tl.reshape(q, [HEIGHT, 16, HEADS, HEAD]), (2, 0, 1, 3))
            q = tl.reshape(q, [ITEMS, 16, HEAD])
            if p == 0:
                served &= await_tiles(flags + slots, slots < strip, start + layer + 1)
            k = tl.load(
                here + p * PART + k_offsets, mask=reachable[None, None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            v = tl.load(
                here + G + p * PART + v_offsets, mask=reachable[None, :, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            s = tl.where(visible, tl.dot(q, k), float("-inf"))
            top = tl.max(s, axis=2)[:, :, None] * SCALE if MAXIMUM else 0.0
            e = tl.exp2(s * SCALE - top)
            # Rounded are probabilities, as the reference rounds them: see ``softmax_whole``.
            e *= reciprocal(tl.sum(e, axis=2))[:, :, None]
            o = tl.dot(e.to(tl.float16), v).to(tl.float16)
            o = tl.permute(tl.reshape(o, [HEADS, HEIGHT, 16, HEAD]), (1, 2, 0, 3))
            o = tl.reshape(o, [ROWS, PART])
            if EARLY:
                now = ahead
                if p + 1 < PASSES:
                    ahead = _piece(wq, p + 1, HEAD_PIECE)
                else:
                    ahead = _piece(w1, 0, FFN_PIECE)
            else:
                now = _piece(wo, p, HEAD_PIECE)
            x = _product(o, now, x, PART, W, WARPS)

        h = normalise(x, D).to(tl.float16)
        x += b2[None, :]
        for c in tl.static_range(F // CHUNK):
            if EARLY:
                now = ahead
                ahead = _piece(w2, c, FFN_PIECE)
            else:
                now = _piece(w1, c, FFN_PIECE)
            b1 = tl.load(bias + 3 * G + W + c * CHUNK + chunk)
            zero = tl.zeros([ROWS, CHUNK], tl.float32) + b1[None, :]
            g = gelu(_product(h, now, zero, W, CHUNK, WARPS), EXACT_GELU).to(tl.float16)
            if EARLY:
                now = ahead
                if c + 1 < F // CHUNK:
                    ahead = _piece(w1, c + 1, FFN_PIECE)
                else:
                    following = tl.minimum(layer + 1, LAYERS - 1)
                    ahead = _piece(wkv_ptr + following * (2 * W * G), 0, KV_PIECE)
            else:
                now = _piece(w2, c, FFN_PIECE)
            x = _product(g, now, x, CHUNK, W, WARPS)
    if layers == 0:
        publish(flags + strip, start + LAYERS)
    x = tl.where(served, x, float("nan"))
    finish(x, out_ptr + base + offsets, inside[:, None] & real, live, final_ptr, D, W)
