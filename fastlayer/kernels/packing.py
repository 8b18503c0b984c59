"""Exact folding of a model's parameters into the operands of the fused kernels.

With LayerNorm written as ``norm(x) = n(x) * gamma + beta``, everything that depends on parameters
alone is folded once, in float64, and rounded once, to float16 (biases to float32):

    gamma       into the rows of the weight that reads the norm,  W' = diag(gamma) W^T
    beta        into that weight's bias,                          b' = b + W beta
    scale       head_dim**-0.5 * log2(e) into Q, so that softmax is exp2 of the raw product
    K's bias    dropped: it adds one constant to all scores of a query, and softmax ignores it

V's bias would fit the output projection's, but the reference rounds V with it: rounding the same
numbers as the reference rounds, most errors are the same, and cancel in a comparison with it.

``score_bounds`` bound the raw product of each layer, in powers of two, over every possible input:
``|n(x)| <= sqrt(d)`` and ``n(x)`` has no mean, so with ``A = Wq' (I - 11^T/d)`` and ``B`` likewise
for K, ``|s| <= d ||A^T B|| + sqrt(d) ||B^T bq'||`` (spectral norms, the largest over heads). It is
what permits a softmax without its maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastlayer.kernels.sizes import FusedSizes

#: Rounding Q and K to float16 moves a score by at most this share beyond the exact bound.
_ROUNDING_MARGIN = 1.01


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """Operands of the fused kernels. W is ``width``, G ``heads_width``, F ``hidden``.

    Attributes:
        qkv: ``[L, W, 3 G]`` float16, columns Q, K, V, each by head group.
        out: ``[L, G, W]`` float16.
        ffn_in, ffn_out: ``[L, W, F]`` and ``[L, F, W]`` float16.
        biases: ``[L, 3 G + W + F + W]`` float32: of Q, K (zero) and V, of the output projection, of
            both FFN layers.
        final: ``[2, W]`` float32, the last norm's weight and bias.
        score_bounds: per layer, the largest possible ``|q k|`` in powers of two.
        overflow: whether a folded weight left float16's range, in which case no kernel may run.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    ffn_in: torch.Tensor
    ffn_out: torch.Tensor
    biases: torch.Tensor
    final: torch.Tensor
    score_bounds: tuple[float, ...]
    overflow: bool


def pack(state: Mapping[str, torch.Tensor], sizes: FusedSizes) -> FusedWeights:
    """Folds the model's parameters by name (see ``fastlayer.reference``) for ``sizes``.

    It computes on the CPU: small matrices, and float64 is slow on most GPUs.
    """
    device = state["final_norm.weight"].device
    exact = {name: value.detach().cpu().double() for name, value in state.items()}
    layers = [_Layer(exact, f"layers.{index}.", sizes) for index in range(sizes.num_layers)]

    def stack(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([getattr(layer, name) for layer in layers]).to(device, dtype)

    affine = torch.stack([exact["final_norm.weight"], exact["final_norm.bias"]])
    final = _pad(affine, 1, sizes.width).to(device, torch.float32)
    halves = {name: stack(name, torch.float16) for name in ("qkv", "out", "ffn_in", "ffn_out")}
    biases = stack("biases", torch.float32)
    finite = all(bool(value.isfinite().all()) for value in (*halves.values(), biases, final))
    return FusedWeights(
        **halves,
        biases=biases,
        final=final,
        score_bounds=tuple(layer.score_bound for layer in layers),
        overflow=not finite,
    )


class _Layer:
    """One block folded in float64."""

    def __init__(self, exact: Mapping[str, torch.Tensor], prefix: str, sizes: FusedSizes) -> None:
        def linear(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            return exact[f"{prefix}{name}.weight"], exact[f"{prefix}{name}.bias"]

        gamma1, beta1 = linear("norm1")
        gamma2, beta2 = linear("norm2")
        (wq, bq), (wk, _), (wv, bv), (wo, bo) = (
            linear(f"attention.{name}_proj") for name in ("q", "k", "v", "out")
        )
        (w1, b1), (w2, b2) = linear("ffn_in"), linear("ffn_out")

        scale = sizes.head_dim**-0.5 * math.log2(math.e)
        query = scale * wq * gamma1
        query_bias = scale * (bq + wq @ beta1)
        key = wk * gamma1
        width, hidden, d = sizes.width, sizes.hidden, sizes.d_model

        heads = [_by_group(m, sizes) for m in (query.T, key.T, (wv * gamma1).T)]
        self.qkv = _pad(torch.cat(heads, dim=1), 0, width)
        self.out = _pad(_by_group(wo, sizes).T, 1, width)
        self.ffn_in = _pad(_pad((w1 * gamma2).T, 0, width), 1, hidden)
        self.ffn_out = _pad(_pad(w2.T, 0, hidden), 1, width)
        self.biases = torch.cat(
            [
                *_by_group(torch.stack([query_bias, 0 * bv, bv + wv @ beta1]), sizes),
                _pad(bo, 0, width),
                _pad(b1 + w1 @ beta2, 0, hidden),
                _pad(b2, 0, width),
            ]
        )
        self.score_bound = _score_bound(query, query_bias, key, sizes.num_heads, d)


def _by_group(columns: torch.Tensor, sizes: FusedSizes) -> torch.Tensor:
    """``[M, H * head_dim]`` to ``[M, heads_width]``, each head padded, missing heads zero."""
    rows = columns.shape[0]
    by_head = columns.reshape(rows, sizes.num_heads, sizes.head_dim)
    by_head = _pad(by_head, 2, sizes.padded_head)
    return _pad(by_head.reshape(rows, -1), 1, sizes.heads_width)


def _pad(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``tensor`` with zeros appended along ``dim`` up to ``size``."""
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return tensor if shape[dim] == 0 else torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def _score_bound(
    query: torch.Tensor, query_bias: torch.Tensor, key: torch.Tensor, num_heads: int, d: int
) -> float:
    """See the module's docstring; ``query`` and ``key`` are ``[d, d]``, rows by head."""
    a = (query - query.mean(1, keepdim=True)).reshape(num_heads, -1, d)
    b = (key - key.mean(1, keepdim=True)).reshape(num_heads, -1, d)
    # ||A^T B|| is the norm of the small product of both triangular factors.
    ra = torch.linalg.qr(a.transpose(1, 2)).R
    rb = torch.linalg.qr(b.transpose(1, 2)).R
    norms = torch.linalg.matrix_norm(ra @ rb.transpose(1, 2), 2)
    shifts = (query_bias.reshape(num_heads, 1, -1) @ b).flatten(1).norm(dim=1)
    return float((_ROUNDING_MARGIN * (d * norms + d**0.5 * shifts)).max())
