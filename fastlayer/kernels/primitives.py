"""Triton pieces that the fused kernels share: normalisation, GELU, softmax, and the tile flags.

The flags order row tiles of one sequence. A tile publishes ``start + step`` after step ``step``,
where ``start`` is what its own flag held when the launch began: every launch adds the same number,
so nothing has to be cleared between launches. Differences are taken modulo 2**32.
"""

# Triton types what it compiles; its parameters are tensors, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

#: Polls (each about a microsecond) before a wait gives up and poisons the output with NaN.
PATIENCE = tl.constexpr(1 << 22)

# gelu(x) = x / (1 + exp2(x p(t))), t = min(x^2, 30), with the p of degree five that is nearest to
# the erf form in the largest absolute error: 6.0e-7 over all x, 1.2e-6 in float32. One that is near
# to 2.5e-5 is quicker by three operations and costs accuracy elsewhere: see ``packing``.
_GELU_0 = tl.constexpr(-2.30217388998399)
_GELU_1 = tl.constexpr(-0.10492880161259266)
_GELU_2 = tl.constexpr(1.6675172310408706e-4)
_GELU_3 = tl.constexpr(1.364276849381671e-4)
_GELU_4 = tl.constexpr(-8.07889456666544e-6)
_GELU_5 = tl.constexpr(1.6345712010312763e-7)
_GELU_CLAMP = tl.constexpr(30.0)
# Triton's interpreter reduces by a function of one's own element by element, far too slowly.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_RSQRT2 = tl.constexpr(0.7071067811865476)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def normalise(x, D: tl.constexpr):
    """LayerNorm without its affine part over the first ``D`` columns; the others are zero in x."""
    if _INTERPRETED:
        total = tl.sum(x, axis=1)
        squares = tl.sum(x * x, axis=1)
    else:
        total, squares = tl.reduce((x, x * x), 1, _add_pairs)
    mean = total * (1.0 / D)
    square = squares * (1.0 / D)
    scale = tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + 1e-5)
    return x * scale[:, None] - (mean * scale)[:, None]


@triton.jit
def reciprocal(x):
    """``1 / x`` to one unit in the last place, in one instruction where division takes eight."""
    if _INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def gelu(x, EXACT: tl.constexpr):
    """GELU by erf, or by the fit above, which lies within 2e-6 of it."""
    if EXACT:
        return 0.5 * x * (1.0 + tl.erf(x * _RSQRT2))
    t = tl.minimum(x * x, _GELU_CLAMP)
    p = _GELU_2 + t * (_GELU_3 + t * (_GELU_4 + t * _GELU_5))
    power = x * (_GELU_0 + t * (_GELU_1 + t * p))
    return x * reciprocal(1.0 + tl.exp2(power))


@triton.jit
def publish(flag_ptr, value):
    """Sets this tile's flag once every thread's stores before it are visible to the device."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, value, sem="release")


@triton.jit
def await_tiles(flags_ptr, waits, target):
    """Waits until every flag that ``waits`` selects has reached ``target``; whether they did.

    ``flags_ptr`` and ``waits`` are ``[T]``. What those tiles stored before is visible afterwards.
    """
    reached = tl.min(tl.where(waits, -1, 0), axis=0)
    polls = 0
    while (reached < 0) & (polls < PATIENCE):
        seen = tl.atomic_add(flags_ptr, 0, mask=waits, sem="acquire")
        reached = tl.min(tl.where(waits, seen - target, 0), axis=0)
        polls += 1
    return reached >= 0


@triton.jit
def softmax_step(s, m, total, acc, v, goes_on, SCALE: tl.constexpr, MAXIMUM: tl.constexpr):
    """One step of online softmax in powers of two; starts afresh unless it ``goes_on``.

    ``s [R, K]`` are products of q and k (-inf where masked) and, times ``SCALE``, powers of two;
    ``v [K, C]`` float16; ``m [R]``, ``total [R]`` and ``acc [R, C]`` the running maximum, sum and
    weighted values. Without ``MAXIMUM`` the powers are known to stay within float16's exponents.
    """
    if MAXIMUM:
        m = tl.where(goes_on, m, -1e30)
        higher = tl.maximum(m, tl.max(s, axis=1) * SCALE)
        p = tl.exp2(s * SCALE - higher[:, None])
        shrink = tl.where(goes_on, tl.exp2(m - higher), 0.0)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.float16), v, acc * shrink[:, None])
        return higher, total, acc
    p = tl.exp2(s * SCALE)
    keep = tl.where(goes_on, 1.0, 0.0)
    total = total * keep + tl.sum(p, axis=1)
    acc = tl.dot(p.to(tl.float16), v, acc * keep)
    return m, total, acc


@triton.jit
def softmax_whole(s, v, SCALE: tl.constexpr, MAXIMUM: tl.constexpr):
    """Softmax over all keys at once, then times ``v``; shapes as in ``softmax_step``.

    What is rounded are probabilities, at most one. So without ``MAXIMUM`` the powers need only stay
    within float32's exponents.
    """
    p = tl.exp2(s * SCALE - (tl.max(s, axis=1) * SCALE)[:, None] if MAXIMUM else s * SCALE)
    p *= reciprocal(tl.sum(p, axis=1))[:, None]
    return tl.dot(p.to(tl.float16), v)


@triton.jit
def feed_forward(
    x, w1_ptr, w2_ptr, b1_ptr, b2_ptr,
    D: tl.constexpr, W: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr,
    EXACT_GELU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``x + gelu(norm(x) W1 + b1) W2 + b2`` for ``x [R, W]``, ``CHUNK`` hidden columns at once."""
    cols = tl.arange(0, W)
    part = tl.arange(0, CHUNK)
    b2 = tl.load(b2_ptr + cols)
    h = normalise(x, D).to(tl.float16)
    x += b2[None, :]
    for c in tl.range(0, F, CHUNK, num_stages=STAGES):
        w1 = tl.load(w1_ptr + cols[:, None] * F + (c + part)[None, :])
        w2 = tl.load(w2_ptr + (c + part)[:, None] * W + cols[None, :])
        b1 = tl.load(b1_ptr + c + part)
        g = gelu(tl.dot(h, w1) + b1[None, :], EXACT_GELU)
        x = tl.dot(g.to(tl.float16), w2, x)
    return x


@triton.jit
def finish(x, out_ptrs, keep, live, final_ptr, D: tl.constexpr, W: tl.constexpr):
    """The last LayerNorm, zero where not ``live``, stored where ``keep``."""
    cols = tl.arange(0, W)
    weight = tl.load(final_ptr + cols)
    bias = tl.load(final_ptr + W + cols)
    y = normalise(x, D) * weight[None, :] + bias[None, :]
    tl.store(out_ptrs, tl.where(live[:, None], y, 0.0), mask=keep)
