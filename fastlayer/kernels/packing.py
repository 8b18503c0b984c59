"""Exact folding of a model's parameters into the operands of the fused kernels.

With LayerNorm written as ``norm(x) = n(x) * gamma + beta``, everything that depends on parameters
alone is folded once, in float64, and rounded once, to float16 (biases to float32):

    gamma       into the rows of the weight that reads the norm,  W' = diag(gamma) W^T
    beta        into that weight's bias,                          b' = b + W beta

More would fold: the scale into Q, K's bias into nothing (softmax ignores it), V's into the output
projection's. But the reference rounds q, k and v as they are, and probabilities, to TF32, which has
float16's mantissa. If the kernels round the same numbers, most of their errors are the reference's
own, and cancel in a comparison with it; one number rounded otherwise loses that for all that
follow. With inputs of a third of unit variance, and float32 arithmetic emulated on a CPU, the
difference had an rms of 1.8e-4 with everything alike and 2.9e-4 with any one of these folded.

Only weights that float16 would spoil, by its range or its subnormals, are mended beforehand, where
that is exact (``half_range``).

``score_bounds`` bound the scores of each layer, in powers of two, over every possible input:
``|n(x)| <= sqrt(d)`` and ``n(x)`` has no mean, so with ``A = Wq' (I - 11^T/d)``, ``B`` likewise for
K, and c the scale times log2(e),

    |s| <= c (d ||A^T B|| + sqrt(d) (||B^T bq'|| + ||A^T bk'||) + |bq' bk'|)

(spectral norms, the largest over heads). It is what permits a softmax without its maximum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastlayer.kernels.half_range import Affine, Block
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
        biases: ``[L, 3 G + W + F + W]`` float32: of Q, K and V, of the output projection, of both
            FFN layers.
        final: ``[2, W]`` float32, the last norm's weight and bias.
        score_bounds: per layer, the largest possible score in powers of two, either sign.
        overflow: whether a folded weight, or an activation of some input, leaves float16's range or
            precision, in which case no kernel may run.
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
    fits = finite and all(layer.fits for layer in layers)
    return FusedWeights(
        **halves,
        biases=biases,
        final=final,
        score_bounds=tuple(layer.score_bound for layer in layers),
        overflow=not fits,
    )


class _Layer:
    """One block folded in float64."""

    def __init__(self, exact: Mapping[str, torch.Tensor], prefix: str, sizes: FusedSizes) -> None:
        def affine(name: str) -> Affine:
            return Affine(exact[f"{prefix}{name}.weight"], exact[f"{prefix}{name}.bias"])

        def after(norm: str, name: str) -> Affine:
            (gamma, beta), (weight, bias) = affine(norm), affine(name)
            return Affine(weight * gamma, bias + weight @ beta)

        block = Block(
            q=after("norm1", "attention.q_proj"),
            k=after("norm1", "attention.k_proj"),
            v=after("norm1", "attention.v_proj"),
            out=affine("attention.out_proj"),
            ffn_in=after("norm2", "ffn_in"),
            ffn_out=affine("ffn_out"),
        ).mended()
        self.fits = block.fits()
        self.score_bound = sizes.score_scale * _score_bound(
            block.q, block.k, sizes.num_heads, sizes.d_model
        )

        width, hidden = sizes.width, sizes.hidden
        attended = (block.q, block.k, block.v)
        heads = [_by_group(each.weight.T, sizes) for each in attended]
        self.qkv = _pad(torch.cat(heads, dim=1), 0, width)
        self.out = _pad(_by_group(block.out.weight, sizes).T, 1, width)
        self.ffn_in = _pad(_pad(block.ffn_in.weight.T, 0, width), 1, hidden)
        self.ffn_out = _pad(_pad(block.ffn_out.weight.T, 0, hidden), 1, width)
        self.biases = torch.cat(
            [
                *_by_group(torch.stack([each.bias for each in attended]), sizes),
                _pad(block.out.bias, 0, width),
                _pad(block.ffn_in.bias, 0, hidden),
                _pad(block.ffn_out.bias, 0, width),
            ]
        )


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
    queries: tuple[torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    d: int,
) -> float:
    """See the module's docstring, without c; ``[d, d]`` and ``[d]``, rows by head."""
    (query, query_bias), (key, key_bias) = queries, keys
    a = (query - query.mean(1, keepdim=True)).reshape(num_heads, -1, d)
    b = (key - key.mean(1, keepdim=True)).reshape(num_heads, -1, d)
    # ||A^T B|| is the norm of the small product of both triangular factors.
    ra = torch.linalg.qr(a.transpose(1, 2)).R
    rb = torch.linalg.qr(b.transpose(1, 2)).R
    norms = torch.linalg.matrix_norm(ra @ rb.transpose(1, 2), 2)
    bq, bk = (bias.reshape(num_heads, 1, -1) for bias in (query_bias, key_bias))
    shifts = (bq @ b).flatten(1).norm(dim=1) + (bk @ a).flatten(1).norm(dim=1)
    constant = (bq * bk).sum((1, 2)).abs()
    return float((_ROUNDING_MARGIN * (d * norms + d**0.5 * shifts + constant)).max())
