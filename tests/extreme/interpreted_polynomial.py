"""Runs the polynomial kernel in Triton's interpreter and prints one JSON line a check.

A process of its own: whether a kernel is interpreted is decided when its module is imported.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.nn import functional as F

from fastlayer import polynomial
from fastlayer.kernels.polynomial import PolynomialLaunch, columns
from fastlayer.kernels.polynomial import operations as kernel_operations
from fastlayer.kernels.polynomial import polynomial_attention as launch_kernel


@dataclass(frozen=True)
class Check:
    """``heads`` of width ``dim`` over ``tokens``; ``spread`` and ``mean`` of the scores."""

    tokens: int
    dim: int
    heads: int = 2
    spread: float = 0.33
    mean: float = 0.0
    spike: float = 0.0
    group: int | None = None
    kind: str = "rows"
    chunk: int = 128


CHECKS: dict[str, Check] = {
    "heads of 64": Check(384, 64, heads=1),
    "heads of 32, ragged, in groups": Check(300, 32, heads=3, group=2, chunk=64),
    "heads of 16, one row beyond a chunk": Check(257, 16),
    "shifted scores": Check(384, 16, mean=0.8),
    "Taylor": Check(400, 16, kind="taylor"),
    "one fit for a head": Check(400, 16, heads=3, group=2, mean=0.3, kind="hermite"),
    "narrow spread": Check(384, 16, spread=0.02),
    "wide spread": Check(384, 16, spread=2.0),
    "spikes in the chunk": Check(512, 16, spike=150.0),
}


def run(check: Check) -> dict[str, object]:
    generator = torch.Generator().manual_seed(7)
    shape = (check.tokens, 3, check.heads, check.dim)
    packed = torch.randn(shape, generator=generator)
    packed[:, 0] *= check.spread
    packed[:, 0, :, 0] = check.mean * check.dim**0.5
    packed[:, 1, :, 0] = 1.0
    if check.spike:
        packed[400, 0] = packed[390, 1] * check.spike / check.dim
    packed = packed.half()
    # Views of a packed projection, as the route has them.
    q, k, v = (packed[:, i].transpose(0, 1) for i in range(3))
    out = torch.full((check.tokens, check.heads, check.dim), float("nan")).half().transpose(0, 1)
    first = 2 * check.chunk
    found = polynomial.survey(q, k, v, first_row=first, chunk=check.chunk).scores
    coefficients = polynomial.coefficients_of(check.kind, found)
    launch = PolynomialLaunch(rows=64, keys=64, state_rows=64)
    spread = launch_kernel(
        q, k, v, out, coefficients, first_row=first, chunk=check.chunk,
        heads_at_once=check.group, launch=launch,
    )  # fmt: skip
    wide = [t.float() for t in (q, k, v)]
    twin = torch.zeros_like(wide[0])
    wide_spread = polynomial.polynomial_attention(
        *wide, twin, coefficients, first_row=first, chunk=check.chunk
    )
    exact = F.scaled_dot_product_attention(*(t[None] for t in wide), is_causal=True)[0]
    late = slice(first, None)
    ours, theirs = kernel_operations(check.chunk), polynomial.operations(check.chunk)
    # As the route has them when the kernels are to run: tokens contiguous, nothing is copied.
    across = columns(q, check.chunk), columns(k, check.chunk)
    assert all(columns(t, check.chunk) is t for t in across)
    norms = polynomial.Norms.of(q, k, theirs)
    rows = polynomial.check_rows(q, k, norms, spread, first_row=first, by=theirs)
    rows = torch.cat([rows, torch.tensor([0, check.tokens - 1])])
    return {
        "finite": bool(out[:, late].isfinite().all()),
        "untouched": bool(out[:, :first].isnan().all()),
        "from_twin": float((out[:, late] - twin[:, late]).abs().max()),
        "from_exact": float((out[:, late] - exact[:, late]).abs().max()),
        "moments": max(
            float((a - b).abs().max())
            for a, b in zip(
                astuple(ours.moments(across[1], v)), astuple(theirs.moments(k, v)), strict=True
            )
        ),
        "spread": float((spread - wide_spread).abs().max() / wide_spread.max()),
        "along": max(
            float((ours.along(t, vector) / theirs.along(t, vector) - 1).abs().max())
            for t, vector in ((across[0], None), (k, k[:, 3]))
        ),
        "rows": float(
            (ours.exact_rows(q, across[1], v, rows) - theirs.exact_rows(q, k, v, rows)).abs().max()
        ),
        "twin_from_exact": float((twin[:, late] - exact[:, late]).abs().max()),
    }


if __name__ == "__main__":
    for name, check in CHECKS.items():
        print(json.dumps({"name": name, **run(check)}), flush=True)
