"""What kind of work a kernel's or operator's name tells.

One row a kind; the first row that matches wins, so what is told more surely comes first: a fused
attention kernel is often built of a GEMM library's parts and named after it. What no row matches is
"other", never guessed into a kind; the trace's table lists the largest kernels by name as well.
"""

from __future__ import annotations

import re

OTHER = "other"

#: (kind, names) of kernels by cuBLAS, cuDNN, CUTLASS, torch, Inductor and Triton, and of aten
#: operators. A name without regular-expression signs is looked for anywhere, case ignored.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Whole layers in one launch, by the names of Triton functions: the work is of all kinds.
    ("fused layers", (r"^(single|wavefront|layer|strips)_kernel",)),
    (
        "attention",
        (
            "attention",
            "flash",
            "fmha",
            "sdpa",
            "mem_eff",
            "softmax",
            r"^(states|moments|scan|outputs|along|rows)_kernel",  # a causal scan of states
        ),
    ),
    ("normalisation", (r"norm(?!al_)", "moments", "welford", r"^(normalise|finish)_kernel")),
    (
        "GEMM",
        (
            "gemm",
            "gemv",
            "cutlass",
            "cublas",
            "nvjet",
            "xmma",
            "wgmma",
            "splitk",
            "matmul",
            "addmm",
            "bmm",
            "linear",
            r"\bmm\b",
        ),
    ),
    ("elementwise", ("masked_fill", r"triton_poi", "where")),
    (
        "copies",
        (
            "memcpy",
            "memset",
            "copy",
            "clone",
            "contiguous",
            "transpose",
            r"\bcat\b",
            "CatArray",
            "fill",
        ),
    ),
    ("reductions", ("reduce", r"::(sum|mean|amax|amin|max|min)\b", r"triton_(red|per)")),
    (
        "elementwise",
        (
            "elementwise",
            "gelu",
            "relu",
            r"\badd_?\b",
            r"\bsub_?\b",
            r"\bmul_?\b",
            r"\bdiv_?\b",
            "vectorized",
            r"triu|tril",
            r"^activate_kernel",
        ),
    ),
)

_COMPILED = tuple((kind, re.compile("|".join(names), re.IGNORECASE)) for kind, names in KINDS)


def kind_of(name: str) -> str:
    """The kind of work that a name tells, or "other"."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)
