"""The whole model in one launch for small batches: a causal wavefront of strips of sixteen rows.

As in ``wavefront`` a program owns rows of one sequence through all layers, publishes K and V a
layer, and waits for the strips before its own; but a strip is one matrix-instruction high, so that
many programs share a sequence, and the chain of dependent steps is kept short:

    all heads run at once in three-dimensional products ``[B, 16, .]``, one warp to each batch item;
    ``B = H * SPLIT``: each head's keys are split into ``SPLIT`` parts, merged after the softmax;
    weights lie in memory in the order in which the matrix instruction holds its B operand, so they
    go from memory to registers without passing through shared memory (``fragments`` below).

    h = norm(x);  K, V = h Wk, h Wv -> workspace, flag;  q = h Wq + bq
    x += (softmax(q k^T) v) Wo + bo;  x += gelu(norm(x) W1 + b1) W2 + b2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayer.kernels.primitives import await_tiles, finish, gelu, normalise, publish

STRIP = 16


def fragments(matrices: torch.Tensor, warps: int) -> torch.Tensor:
    """``[L, K, N]`` float16 to ``[L, K * N]`` in the order ``_fragment`` reads.

    A 16x8 B operand of mma.m16n8k16 gives lane ``4 n + q`` the elements ``k = 8 h + 2 q + p`` for
    h, p in 0..1 (PTX ISA, matrix fragments). Two such operands along K make sixteen bytes a lane;
    warps stand side by side along N.
    """
    layers, k, n = matrices.shape
    side = min(warps, n // 8)
    split = matrices.reshape(layers, k // 32, 2, 2, 4, 2, n // (8 * side), side, 8)
    #                        0       1        2  3  4  5  6               7     8
    return split.permute(0, 6, 1, 7, 8, 4, 2, 3, 5).reshape(layers, k * n).contiguous()


@triton.jit
def _fragment(flat, K: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """The matrix ``[K, N]`` that ``fragments`` laid down as ``flat [K * N]``."""
    SIDE: tl.constexpr = WARPS if WARPS * 8 <= N else N // 8
    split = tl.reshape(flat, [N // (8 * SIDE), K // 32, SIDE, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, (1, 5, 6, 4, 7, 0, 2, 3)), [K, N])


@triton.jit
def strips_kernel(
    x_ptr, out_ptr, wq_ptr, wkv_ptr, wo_ptr, w1_ptr, w2_ptr, bias_ptr, final_ptr,
    length_ptr, keys_ptr, flag_ptr, batch, tokens, strips,
    D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, HEAD: tl.constexpr, F: tl.constexpr,
    LAYERS: tl.constexpr, LENGTHS: tl.constexpr, STRIPS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr, MAXIMUM: tl.constexpr,
    EXACT_GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See the module. ``H`` heads of ``HEAD`` columns, both powers of two; ``KEYS >= tokens``."""
    G: tl.constexpr = H * HEAD
    ITEMS: tl.constexpr = H * SPLIT
    PART: tl.constexpr = KEYS // SPLIT
    pid = tl.program_id(0)
    sequence = pid // strips
    strip = pid % strips
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    columns = tl.arange(0, G)
    both = tl.arange(0, 2 * G)
    hidden = tl.arange(0, F)
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
    stride = (batch * strips * ROWS).to(tl.int64) * (2 * G)
    keys = keys_ptr + (sequence * strips * ROWS).to(tl.int64) * (2 * G)
    own = (strip * ROWS + rows)[:, None] * (2 * G) + both[None, :]

    item = tl.arange(0, ITEMS)
    part = tl.arange(0, PART)
    head = tl.arange(0, HEAD)
    key = (item % SPLIT)[:, None] * PART + part[None, :]
    reachable = key < (strip + 1) * ROWS
    key_offsets = key * (2 * G) + (item // SPLIT * HEAD)[:, None]
    k_offsets = key_offsets[:, None, :] + head[None, :, None]
    v_offsets = key_offsets[:, :, None] + head[None, None, :]
    visible = position[None, :, None] >= key[:, None, :]

    layers = tl.where(strip * ROWS < length, LAYERS, 0)
    served = True
    wide = tl.arange(0, 2 * W * G)
    square = tl.arange(0, W * G)
    oblong = tl.arange(0, W * F)
    # With EARLY, weights are asked for a stage or two before their use, at the price of registers.
    if EARLY:
        kv_flat = tl.load(wkv_ptr + wide)
    for layer in tl.range(0, layers, num_stages=1):
        bias = bias_ptr + layer * (G + 2 * W + F)
        here = keys + layer * stride
        if EARLY:
            wq_flat = tl.load(wq_ptr + layer * (W * G) + square)
        else:
            kv_flat = tl.load(wkv_ptr + layer * (2 * W * G) + wide)
        bq = tl.load(bias + columns)
        bo = tl.load(bias + G + cols)
        b1 = tl.load(bias + G + W + hidden)
        b2 = tl.load(bias + G + W + F + cols)
        h = normalise(x, D).to(tl.float16)
        kv = tl.dot(h, _fragment(kv_flat, W, 2 * G, WARPS)).to(tl.float16)
        if EARLY:
            wo_flat = tl.load(wo_ptr + layer * (W * G) + square)
        else:
            wq_flat = tl.load(wq_ptr + layer * (W * G) + square)
        tl.store(here + own, kv)
        publish(flags + strip, start + layer + 1)

        q = (tl.dot(h, _fragment(wq_flat, W, G, WARPS)) + bq[None, :]).to(tl.float16)
        q = tl.permute(tl.reshape(q, [ROWS, H, HEAD]), (1, 0, 2))
        if SPLIT > 1:
            q = tl.reshape(
                tl.broadcast_to(q[:, None, :, :], [H, SPLIT, ROWS, HEAD]), [ITEMS, ROWS, HEAD]
            )
        if EARLY:
            w1_flat = tl.load(w1_ptr + layer * (W * F) + oblong)
        served &= await_tiles(flags + slots, slots < strip, start + layer + 1)
        k = tl.load(
            here + k_offsets, mask=reachable[:, None, :], other=0.0, cache_modifier=".cg"
        )
        v = tl.load(
            here + G + v_offsets, mask=reachable[:, :, None], other=0.0, cache_modifier=".cg"
        )
        s = tl.where(visible, tl.dot(q, k), float("-inf"))
        if MAXIMUM:
            # A part may hold no visible key: its maximum stays finite, its sum zero.
            m = tl.maximum(tl.max(s, axis=2), -1e30)
            p = tl.exp2(s - m[:, :, None])
        else:
            p = tl.exp2(s)
        total = tl.sum(p, axis=2)
        o = tl.dot(p.to(tl.float16), v)
        if EARLY:
            w2_flat = tl.load(w2_ptr + layer * (W * F) + oblong)
        else:
            wo_flat = tl.load(wo_ptr + layer * (W * G) + square)
        if SPLIT > 1:
            total = tl.reshape(total, [H, SPLIT, ROWS])
            o = tl.reshape(o, [H, SPLIT, ROWS, HEAD])
            if MAXIMUM:
                m = tl.reshape(m, [H, SPLIT, ROWS])
                shrink = tl.exp2(m - tl.max(m, axis=1)[:, None, :])
                total *= shrink
                o *= shrink[:, :, :, None]
            total = tl.sum(total, axis=1)
            o = tl.sum(o, axis=1)
        o = (o * (1.0 / total)[:, :, None]).to(tl.float16)
        o = tl.reshape(tl.permute(o, (1, 0, 2)), [ROWS, G])
        x = tl.dot(o, _fragment(wo_flat, G, W, WARPS), x + bo[None, :])

        if EARLY:
            following = tl.minimum(layer + 1, LAYERS - 1)
            kv_flat = tl.load(wkv_ptr + following * (2 * W * G) + wide)
        else:
            w1_flat = tl.load(w1_ptr + layer * (W * F) + oblong)
        h = normalise(x, D).to(tl.float16)
        g = gelu(tl.dot(h, _fragment(w1_flat, W, F, WARPS)) + b1[None, :], EXACT_GELU)
        if not EARLY:
            w2_flat = tl.load(w2_ptr + layer * (W * F) + oblong)
        x = tl.dot(g.to(tl.float16), _fragment(w2_flat, F, W, WARPS), x + b2[None, :])
    if layers == 0:
        publish(flags + strip, start + LAYERS)
    x = tl.where(served, x, float("nan"))
    finish(x, out_ptr + base + offsets, inside[:, None] & real, live, final_ptr, D, W)
