"""The whole model in one launch, several programs for each sequence: a causal wavefront.

A program owns ``ROWS`` rows of one sequence through all layers, with their float32 residual
``x [ROWS, W]`` in registers. In each layer it

    writes  norm(x) [Wq Wk Wv], float16, to the workspace, publishes its flag,
    waits   for the flags of the tiles before it in the sequence (none after it: causal),
    adds    softmax(q k^T) v Wo for each head group, reading K and V of all tiles up to its own,
    adds    gelu(norm(x) W1) W2.

A tile waits only on programs of lower id, so whatever part of the grid is resident advances.
Operands and their padding: ``packing.FusedWeights``, ``sizes.FusedSizes``; flags: ``primitives``.
"""

# Triton types what it compiles; its parameters are tensors, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from fastlayer.kernels.primitives import (
    await_tiles,
    feed_forward,
    finish,
    normalise,
    publish,
    reciprocal,
    softmax_step,
    softmax_whole,
)


@triton.jit
def by_head(columns, length, GROUP: tl.constexpr):
    """Where ``columns`` of the first row lie in ``[columns / GROUP, length, GROUP]``."""
    return columns // GROUP * (length * GROUP) + columns % GROUP


@triton.jit
def project(
    x, out, qkv_ptr, bias_ptr, length,
    D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Stores ``norm(x) [Wq Wk Wv]`` with its bias at ``out [ROWS, 3 G]``.

    ``BY_HEAD``, it stores at ``out [3 G / GROUP, length, GROUP]`` instead, each head in one piece.
    """
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    part = tl.arange(0, CHUNK)
    h = normalise(x, D).to(tl.float16)
    for c in tl.range(0, 3 * G, CHUNK, num_stages=STAGES):
        w = tl.load(qkv_ptr + cols[:, None] * (3 * G) + (c + part)[None, :])
        b = tl.load(bias_ptr + c + part)
        y = tl.dot(h, w) + b[None, :]
        if BY_HEAD:
            at = rows[:, None] * GROUP + by_head(c + part, length, GROUP)[None, :]
            tl.store(out + at, y.to(tl.float16))
        else:
            tl.store(out + rows[:, None] * (3 * G) + (c + part)[None, :], y.to(tl.float16))


@triton.jit
def attend_once(
    x, sequence_ptr, wo_ptr, tile, limit,
    W: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    SCALE: tl.constexpr, MAXIMUM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``x + softmax(q k^T) v Wo`` where all keys below ``limit`` fit one block of ``KEYS``."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    head = tl.arange(0, GROUP)
    keys = tl.arange(0, KEYS)
    there = keys < limit
    q_ptrs = sequence_ptr + rows[:, None] * (3 * G) + head[None, :]
    k_ptrs = sequence_ptr + G + keys[None, :] * (3 * G) + head[:, None]
    v_ptrs = sequence_ptr + 2 * G + keys[:, None] * (3 * G) + head[None, :]
    for g in tl.range(0, GROUPS, num_stages=STAGES):
        column = g * GROUP
        q = tl.load(q_ptrs + column, cache_modifier=".cg")
        k = tl.load(k_ptrs + column, mask=there[None, :], other=0.0, cache_modifier=".cg")
        v = tl.load(v_ptrs + column, mask=there[:, None], other=0.0, cache_modifier=".cg")
        w = tl.load(wo_ptr + (column + head)[:, None] * W + cols[None, :])
        o = tl.zeros([ROWS, GROUP], tl.float32)
        for i in tl.static_range(HEADS):
            own = (head // (GROUP // HEADS) == i)[None, :]
            query = q
            if HEADS > 1:
                query = tl.where(own, q, 0.0)
            visible = there[None, :]
            if CAUSAL:
                visible = rows[:, None] >= keys[None, :]
            s = tl.where(visible, tl.dot(query, k), float("-inf"))
            o = tl.where(own, softmax_whole(s, v, SCALE, MAXIMUM), o)
        x = tl.dot(o.to(tl.float16), w, x)
    return x


@triton.jit
def attend_blocks(
    x, sequence_ptr, wo_ptr, tile, limit,
    W: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    SCALE: tl.constexpr, MAXIMUM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``x + softmax(q k^T) v Wo`` over blocks of ``KEYS`` keys, of which the last needs a mask.

    One loop runs through the blocks of all heads, so that the loads of a head's first blocks are
    under way while the head before it ends. Blocks reach past ``limit`` into finite memory.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    head = tl.arange(0, GROUP)
    keys = tl.arange(0, KEYS)
    q_ptrs = sequence_ptr + rows[:, None] * (3 * G) + head[None, :]
    k_ptrs = sequence_ptr + G + keys[None, :] * (3 * G) + head[:, None]
    v_ptrs = sequence_ptr + 2 * G + keys[:, None] * (3 * G) + head[None, :]
    blocks = (limit + KEYS - 1) // KEYS
    m = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, GROUP], tl.float32)
    for i in tl.range(0, GROUPS * HEADS * blocks, num_stages=STAGES):
        block = i % blocks
        column = i // blocks // HEADS * GROUP
        start = block * KEYS
        q = tl.load(q_ptrs + column, cache_modifier=".cg")
        k = tl.load(k_ptrs + start * (3 * G) + column, cache_modifier=".cg")
        v = tl.load(v_ptrs + start * (3 * G) + column, cache_modifier=".cg")
        w = tl.load(wo_ptr + (column + head)[:, None] * W + cols[None, :])
        if HEADS > 1:
            own = (head // (GROUP // HEADS) == i // blocks % HEADS)[None, :]
            q = tl.where(own, q, 0.0)
        s = tl.dot(q, k)
        if block == blocks - 1:
            if CAUSAL:
                s = tl.where(rows[:, None] >= (start + keys)[None, :], s, float("-inf"))
            else:
                s = tl.where((start + keys < limit)[None, :], s, float("-inf"))
        m, total, acc = softmax_step(s, m, total, acc, v, block > 0, SCALE, MAXIMUM)
        if block == blocks - 1:
            o = acc * reciprocal(total)[:, None]
            if HEADS > 1:
                o = tl.where(own, o, 0.0)
            x = tl.dot(o.to(tl.float16), w, x)
    return x


@triton.jit
def attend_heads(
    x, sequence_ptr, wo_ptr, tile, limit,
    W: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    SCALE: tl.constexpr, MAXIMUM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As ``attend_blocks``, a loop a head; a head's masked block waits in registers meanwhile."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    head = tl.arange(0, GROUP)
    keys = tl.arange(0, KEYS)
    last = (limit - 1) // KEYS * KEYS
    q_ptrs = sequence_ptr + rows[:, None] * (3 * G) + head[None, :]
    k_ptrs = sequence_ptr + G + keys[None, :] * (3 * G) + head[:, None]
    v_ptrs = sequence_ptr + 2 * G + keys[:, None] * (3 * G) + head[None, :]
    visible = (last + keys < limit)[None, :]
    if CAUSAL:
        visible = rows[:, None] >= (last + keys)[None, :]
    next_q = tl.load(q_ptrs, cache_modifier=".cg")
    next_k = tl.load(k_ptrs + last * (3 * G), cache_modifier=".cg")
    next_v = tl.load(v_ptrs + last * (3 * G), cache_modifier=".cg")
    next_w = tl.load(wo_ptr + head[:, None] * W + cols[None, :])
    for unit in tl.range(0, GROUPS * HEADS, num_stages=1):
        column = unit // HEADS * GROUP
        q, k_last, v_last, w = next_q, next_k, next_v, next_w
        following = tl.minimum(unit + 1, GROUPS * HEADS - 1) // HEADS * GROUP
        next_q = tl.load(q_ptrs + following, cache_modifier=".cg")
        next_k = tl.load(k_ptrs + last * (3 * G) + following, cache_modifier=".cg")
        next_v = tl.load(v_ptrs + last * (3 * G) + following, cache_modifier=".cg")
        next_w = tl.load(wo_ptr + (following + head)[:, None] * W + cols[None, :])
        if HEADS > 1:
            own = (head // (GROUP // HEADS) == unit % HEADS)[None, :]
            q = tl.where(own, q, 0.0)
        m = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, GROUP], tl.float32)
        for start in tl.range(0, last, KEYS, num_stages=STAGES):
            k = tl.load(k_ptrs + start * (3 * G) + column, cache_modifier=".cg")
            v = tl.load(v_ptrs + start * (3 * G) + column, cache_modifier=".cg")
            m, total, acc = softmax_step(tl.dot(q, k), m, total, acc, v, True, SCALE, MAXIMUM)
        s = tl.where(visible, tl.dot(q, k_last), float("-inf"))
        m, total, acc = softmax_step(s, m, total, acc, v_last, True, SCALE, MAXIMUM)
        o = acc * reciprocal(total)[:, None]
        if HEADS > 1:
            o = tl.where(own, o, 0.0)
        x = tl.dot(o.to(tl.float16), w, x)
    return x


@triton.jit
def add_attention(
    x, sequence_ptr, wo_ptr, tile, limit,
    W: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ONCE: tl.constexpr,
    FLAT: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, MAXIMUM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``x + attention``, bias apart, from the Q, K, V stored at ``sequence_ptr [., 3 G]``."""
    if ONCE:
        return attend_once(
            x, sequence_ptr, wo_ptr, tile, limit,
            W, GROUPS, GROUP, HEADS, G, ROWS, KEYS, CAUSAL, SCALE, MAXIMUM, STAGES,
        )  # fmt: skip
    if FLAT:
        return attend_blocks(
            x, sequence_ptr, wo_ptr, tile, limit,
            W, GROUPS, GROUP, HEADS, G, ROWS, KEYS, CAUSAL, SCALE, MAXIMUM, STAGES,
        )  # fmt: skip
    return attend_heads(
        x, sequence_ptr, wo_ptr, tile, limit,
        W, GROUPS, GROUP, HEADS, G, ROWS, KEYS, CAUSAL, SCALE, MAXIMUM, STAGES,
    )  # fmt: skip


@triton.jit
def wavefront_kernel(
    x_ptr, out_ptr, qkv_ptr, wo_ptr, w1_ptr, w2_ptr, bias_ptr, final_ptr, length_ptr,
    keys_ptr, flag_ptr, batch, tokens, tiles,
    D: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, G: tl.constexpr, F: tl.constexpr, LAYERS: tl.constexpr,
    LENGTHS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ONCE: tl.constexpr, FLAT: tl.constexpr, BY_TILE: tl.constexpr, QKV_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr, SCALE: tl.constexpr, MAXIMUM: tl.constexpr, EXACT_GELU: tl.constexpr,
    STAGES: tl.constexpr, ATTENTION_STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. ``keys_ptr [L, batch, tiles * ROWS, 3 G]``, ``flag_ptr [batch, TILES]``.

    ``BY_TILE`` orders programs by tile first, so that what runs together does equal work.
    """
    pid = tl.program_id(0)
    if BY_TILE:
        tile = pid // batch
        sequence = pid % batch
    else:
        sequence = pid // tiles
        tile = pid % tiles
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    slots = tl.arange(0, TILES)
    position = tile * ROWS + rows
    inside = position < tokens
    length = tokens
    if LENGTHS:
        length = tl.load(length_ptr + sequence)
    live = position < length
    base = (sequence.to(tl.int64) * tokens + tile * ROWS) * D
    offsets = rows[:, None] * D + cols[None, :]
    real = (cols < D)[None, :]
    x = tl.load(x_ptr + base + offsets, mask=live[:, None] & real, other=0.0)

    flags = flag_ptr + sequence * TILES
    start = tl.load(flags + tile)
    stride = tl.num_programs(0).to(tl.int64) * (ROWS * 3 * G)
    keys = keys_ptr + (sequence * tiles * ROWS).to(tl.int64) * (3 * G)
    # A tile of padding alone has nothing to add, and no valid row looks at it.
    layers = tl.where(tile * ROWS < length, LAYERS, 0)
    served = True
    for layer in tl.range(0, layers, num_stages=1):
        bias = bias_ptr + layer * (3 * G + 2 * W + F)
        here = keys + layer * stride
        bo = tl.load(bias + 3 * G + cols)
        project(
            x, here + tile * (ROWS * 3 * G), qkv_ptr + layer * (3 * W * G), bias, 0,
            D, W, GROUP, G, ROWS, QKV_CHUNK, STAGES, False,
        )  # fmt: skip
        publish(flags + tile, start + layer + 1)
        served &= await_tiles(flags + slots, slots < tile, start + layer + 1)
        x = add_attention(
            x + bo[None, :], here, wo_ptr + layer * (G * W), tile, (tile + 1) * ROWS,
            W, GROUPS, GROUP, HEADS, G, ROWS, KEYS, ONCE, FLAT, True, SCALE, MAXIMUM,
            ATTENTION_STAGES,
        )  # fmt: skip
        ffn = bias + 3 * G + W
        x = feed_forward(
            x, w1_ptr + layer * (W * F), w2_ptr + layer * (F * W), ffn, ffn + F,
            D, W, F, CHUNK, EXACT_GELU, STAGES,
        )  # fmt: skip
    if layers == 0:
        publish(flags + tile, start + LAYERS)
    x = tl.where(served, x, float("nan"))
    finish(x, out_ptr + base + offsets, inside[:, None] & real, live, final_ptr, D, W)


@triton.jit
def attend_by_head(
    sequence_ptr, tile, limit, length,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
    MAXIMUM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Stores ``softmax(q k^T) v`` of a tile in the place of its queries, which nobody else reads.

    ``sequence_ptr [3 G / GROUP, length, GROUP]``, as ``project`` stores it. Blocks reach past
    ``limit`` into finite memory. A head's masked block waits in registers while the others pass.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, GROUP)
    keys = tl.arange(0, KEYS)
    last = (limit - 1) // KEYS * KEYS
    q_ptrs = sequence_ptr + rows[:, None] * GROUP + head[None, :]
    k_ptrs = sequence_ptr + G * length + keys[None, :] * GROUP + head[:, None]
    v_ptrs = sequence_ptr + 2 * G * length + keys[:, None] * GROUP + head[None, :]
    visible = (last + keys < limit)[None, :]
    if CAUSAL:
        visible = rows[:, None] >= (last + keys)[None, :]
    for unit in tl.range(0, GROUPS * HEADS, num_stages=1):
        group = unit // HEADS * (GROUP * length)
        own = (head // (GROUP // HEADS) == unit % HEADS)[None, :]
        q = tl.load(q_ptrs + group, cache_modifier=".cg")
        k_last = tl.load(k_ptrs + group + last * GROUP, cache_modifier=".cg")
        v_last = tl.load(v_ptrs + group + last * GROUP, cache_modifier=".cg")
        if HEADS > 1:
            q = tl.where(own, q, 0.0)
        m = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, GROUP], tl.float32)
        for start in tl.range(0, last, KEYS, num_stages=STAGES):
            k = tl.load(k_ptrs + group + start * GROUP, cache_modifier=".cg")
            v = tl.load(v_ptrs + group + start * GROUP, cache_modifier=".cg")
            m, total, acc = softmax_step(tl.dot(q, k), m, total, acc, v, True, SCALE, MAXIMUM)
        s = tl.where(visible, tl.dot(q, k_last), float("-inf"))
        m, total, acc = softmax_step(s, m, total, acc, v_last, True, SCALE, MAXIMUM)
        o = (acc * reciprocal(total)[:, None]).to(tl.float16)
        # Every thread has read its queries before any overwrites one.
        tl.debug_barrier()
        if HEADS > 1:
            tl.store(q_ptrs + group, o, mask=own & (rows >= 0)[:, None])
        else:
            tl.store(q_ptrs + group, o)


@triton.jit
def add_projected(
    x, sequence_ptr, wo_ptr, tile, length,
    W: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``x + context Wo``, the context being where ``attend_by_head`` stored it."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    part = tl.arange(0, CHUNK)
    for c in tl.range(0, G, CHUNK, num_stages=STAGES):
        at = rows[:, None] * GROUP + by_head(c + part, length, GROUP)[None, :]
        o = tl.load(sequence_ptr + at, cache_modifier=".cg")
        w = tl.load(wo_ptr + (c + part)[:, None] * W + cols[None, :])
        x = tl.dot(o, w, x)
    return x


@triton.jit
def layer_kernel(
    x_ptr, state_ptr, qkv_ptr, wo_ptr, w1_ptr, w2_ptr, bias_ptr, final_ptr, length_ptr,
    keys_ptr, batch, tokens, tiles, layer,
    D: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, G: tl.constexpr, F: tl.constexpr, LAYERS: tl.constexpr,
    ATTEND: tl.constexpr, PROJECT: tl.constexpr, LAST: tl.constexpr, CAUSAL: tl.constexpr,
    LENGTHS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, QKV_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr, SCALE: tl.constexpr, MAXIMUM: tl.constexpr, EXACT_GELU: tl.constexpr,
    STAGES: tl.constexpr, ATTENTION_STAGES: tl.constexpr,
):  # fmt: skip
    """A part of one layer, where tiles cannot wait on one another (full attention) or need not.

    ``ATTEND`` finishes layer ``layer - 1`` from its Q, K, V; ``PROJECT`` stores those of ``layer``;
    ``LAST`` normalises instead. The residual is read at ``x_ptr`` and, where it changed, left in
    ``state_ptr``, both ``[batch, tokens, D]``; the latter is the output in the end. ``keys_ptr`` is
    ``[2, batch, 3 G / GROUP, tiles * ROWS, GROUP]``, written and read alternately: a head in one
    piece is read faster (case 13 on an H200: .668 ms against .715 for rows of all heads). The
    residual is read after attention, so that attention alone fits the registers of three blocks a
    multiprocessor (.596).
    """
    pid = tl.program_id(0)
    # Longest tiles first: a causal tile's work grows with its place.
    tile = tiles - 1 - pid // batch
    sequence = pid % batch
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    position = tile * ROWS + rows
    inside = position < tokens
    length = tokens
    if LENGTHS:
        length = tl.load(length_ptr + sequence)
    live = position < length
    base = (sequence.to(tl.int64) * tokens + tile * ROWS) * D
    offsets = rows[:, None] * D + cols[None, :]
    real = (cols < D)[None, :]
    residual = x_ptr + base + offsets
    if not ATTEND:
        x = tl.load(residual, mask=live[:, None] & real, other=0.0)
    stride = tl.num_programs(0).to(tl.int64) * (ROWS * 3 * G)
    span = tiles * ROWS
    keys = keys_ptr + (sequence * span).to(tl.int64) * (3 * G)
    if ATTEND:
        done = layer - 1
        bias = bias_ptr + done * (3 * G + 2 * W + F)
        limit = tl.maximum(length, 1)
        if CAUSAL:
            limit = (tile + 1) * ROWS
        here = keys + (done % 2) * stride
        attend_by_head(
            here, tile, limit, span,
            GROUPS, GROUP, HEADS, G, ROWS, KEYS, CAUSAL, SCALE, MAXIMUM, ATTENTION_STAGES,
        )  # fmt: skip
        tl.debug_barrier()
        x = tl.load(residual, mask=live[:, None] & real, other=0.0)
        x = add_projected(
            x + tl.load(bias + 3 * G + cols)[None, :], here, wo_ptr + done * (G * W), tile, span,
            W, GROUP, G, ROWS, 64 if G >= 64 else G, STAGES,
        )  # fmt: skip
        ffn = bias + 3 * G + W
        x = feed_forward(
            x, w1_ptr + done * (W * F), w2_ptr + done * (F * W), ffn, ffn + F,
            D, W, F, CHUNK, EXACT_GELU, STAGES,
        )  # fmt: skip
    out = state_ptr + base + offsets
    keep = inside[:, None] & real
    if LAST:
        finish(x, out, keep, live, final_ptr, D, W)
    elif ATTEND:
        tl.store(out, x, mask=keep)
    if PROJECT:
        bias = bias_ptr + layer * (3 * G + 2 * W + F)
        project(
            x, keys + (layer % 2) * stride + tile * (ROWS * GROUP),
            qkv_ptr + layer * (3 * W * G), bias, span,
            D, W, GROUP, G, ROWS, QKV_CHUNK, STAGES, True,
        )  # fmt: skip
