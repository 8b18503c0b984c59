"""The whole model in one launch, one program for each tile of whole sequences.

A program owns ``ROWS`` rows: ``ROWS // SPAN`` sequences, each padded to ``SPAN`` rows, a power of
two. The float32 residual ``x [ROWS, W]`` stays in registers through all layers:

    h = norm(x);  for each head group g:  q, k, v = h Wq[g], h Wk[g], h Wv[g]
                                          x += softmax(q k^T) v Wo[g]
    h = norm(x);  for each chunk c:       x += gelu(h W1[c]) W2[c]

Operands are float16, sums float32. Attention is block-diagonal over the sequences of a tile.
Operands and their padding: ``packing.FusedWeights`` and ``sizes.FusedSizes``.
"""

# Triton types what it compiles; its parameters are tensors, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from fastlayer.kernels.primitives import feed_forward, finish, normalise, softmax_whole


@triton.jit
def single_kernel(
    x_ptr, out_ptr, qkv_ptr, wo_ptr, w1_ptr, w2_ptr, bias_ptr, final_ptr, length_ptr,
    batch, tokens,
    D: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, G: tl.constexpr, F: tl.constexpr, LAYERS: tl.constexpr,
    CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, SCALE: tl.constexpr, MAXIMUM: tl.constexpr, EXACT_GELU: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. ``HEADS`` heads share a group of ``GROUP`` columns; ``G = heads_width``."""
    PER: tl.constexpr = ROWS // SPAN
    first = tl.program_id(0) * PER
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    head = tl.arange(0, GROUP)
    sequence = rows // SPAN
    position = rows % SPAN
    inside = (position < tokens) & (first + sequence < batch)
    live = inside
    if LENGTHS:
        length = tl.load(length_ptr + first + sequence, mask=first + sequence < batch, other=0)
        live = position < length
    offsets = (sequence * tokens + position)[:, None] * D + cols[None, :]
    base = first.to(tl.int64) * tokens * D
    real = (cols < D)[None, :]
    x = tl.load(x_ptr + base + offsets, mask=live[:, None] & real, other=0.0)

    # A key is visible inside its own sequence, not after the query, and only if it is a token.
    visible = sequence[:, None] == sequence[None, :]
    if CAUSAL:
        visible &= rows[:, None] >= rows[None, :]
    else:
        if LENGTHS:
            length_of_key = tl.load(
                length_ptr + first + sequence, mask=first + sequence < batch, other=0
            )
            visible &= (position < tl.maximum(length_of_key, 1))[None, :]
        else:
            visible &= (position < tokens)[None, :]

    for layer in tl.range(0, LAYERS, num_stages=1):
        qkv = qkv_ptr + layer * (3 * W * G)
        wo = wo_ptr + layer * (G * W)
        bias = bias_ptr + layer * (3 * G + 2 * W + F)
        bo = tl.load(bias + 3 * G + cols)
        h = normalise(x, D).to(tl.float16)
        x += bo[None, :]
        for g in tl.range(0, GROUPS, num_stages=STAGES):
            column = g * GROUP + head
            weights = qkv + cols[:, None] * (3 * G) + column[None, :]
            wq = tl.load(weights)
            wk = tl.load(weights + G)
            wv = tl.load(weights + 2 * G)
            w_out = tl.load(wo + column[:, None] * W + cols[None, :])
            q = (tl.dot(h, wq) + tl.load(bias + column)[None, :]).to(tl.float16)
            k = tl.dot(h, wk) + tl.load(bias + G + column)[None, :]
            k = tl.trans(k.to(tl.float16))
            v = (tl.dot(h, wv) + tl.load(bias + 2 * G + column)[None, :]).to(tl.float16)
            if HEADS == 1:
                s = tl.where(visible, tl.dot(q, k), float("-inf"))
                o = softmax_whole(s, v, SCALE, MAXIMUM)
            else:
                o = tl.zeros([ROWS, GROUP], tl.float32)
                for i in tl.static_range(HEADS):
                    own = (head // (GROUP // HEADS) == i)[None, :]
                    s = tl.dot(tl.where(own, q, 0.0), k)
                    s = tl.where(visible, s, float("-inf"))
                    o = tl.where(own, softmax_whole(s, v, SCALE, MAXIMUM), o)
            x = tl.dot(o.to(tl.float16), w_out, x)
        ffn = bias + 3 * G + W
        x = feed_forward(
            x, w1_ptr + layer * (W * F), w2_ptr + layer * (F * W), ffn, ffn + F,
            D, W, F, CHUNK, EXACT_GELU, STAGES,
        )  # fmt: skip
    finish(x, out_ptr + base + offsets, inside[:, None] & real, live, final_ptr, D, W)
