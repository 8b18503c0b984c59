"""Blocks with their norms and biases folded away: what is left between products is few passes.

    r = x                                            float32, the residual without its biases
    per block:  q, k, v = Wqkv' n(r + s) + b'
                r += Wo attention(q, k, v)
                r += Wout gelu(Win' n(r + s) + b')

n is LayerNorm without its affine part, which goes into the weight that reads it. s is the running
sum of the biases that r has not been given. q, k and v keep theirs: softmax cannot tell that of k,
and that of v could be owed like the others, but the reference rounds them with their biases, and
errors that are the same on both sides cancel in a comparison (see ``kernels.packing``). Weights
that float16 would spoil are mended first, and biases that dwarf what they are added to are taken
out (``half_range``).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn import functional as F

from fastlayer.kernels.half_range import Affine, Block
from fastlayer.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class FoldedLayer:
    """One block. Matrices ``[out, in]`` and their biases in the compute dtype.

    ``shift1``, ``shift2`` and ``owed``, float32 ``[d]``, are the biases owed to the residual where
    each norm reads it, and after the block. ``fits``: whether weights and, for any input, q, k, v
    and the hidden layer keep within the dtype's range and precision.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    ffn_in: torch.Tensor
    ffn_in_bias: torch.Tensor
    ffn_out: torch.Tensor
    shift1: torch.Tensor
    shift2: torch.Tensor
    owed: torch.Tensor
    fits: bool


def fold(layers: list[LayerWeights], dtype: torch.dtype) -> list[FoldedLayer]:
    """Folds in float64, rounds once; synchronises with the device."""
    owed = torch.zeros_like(layers[0].out[1], dtype=torch.float64)
    folded = []
    for weights in layers:
        layer, owed = _fold(weights, owed, dtype)
        folded.append(layer)
    return folded


def _fold(
    weights: LayerWeights, owed: torch.Tensor, dtype: torch.dtype
) -> tuple[FoldedLayer, torch.Tensor]:
    block = Block(
        q=_after_norm(weights.q, weights.norm1),
        k=_after_norm(weights.k, weights.norm1),
        v=_after_norm(weights.v, weights.norm1),
        out=_exact(weights.out),
        ffn_in=_after_norm(weights.ffn_in, weights.norm2),
        ffn_out=_exact(weights.ffn_out),
    ).mended()
    qkv = (block.q, block.k, block.v)
    operands = {
        "qkv": torch.cat([each.weight for each in qkv]),
        "qkv_bias": torch.cat([each.bias for each in qkv]),
        "out": block.out.weight,
        "ffn_in": block.ffn_in.weight,
        "ffn_in_bias": block.ffn_in.bias,
        "ffn_out": block.ffn_out.weight,
    }
    rounded = {name: operand.to(dtype) for name, operand in operands.items()}
    finite = torch.stack([operand.isfinite().all() for operand in rounded.values()]).all()
    between = owed + block.out.bias
    after = between + block.ffn_out.bias
    layer = FoldedLayer(
        **rounded,
        shift1=owed.float(),
        shift2=between.float(),
        owed=after.float(),
        fits=bool(finite) and (dtype != torch.float16 or block.fits()),
    )
    return layer, after


def _exact(linear: tuple[torch.Tensor, torch.Tensor]) -> Affine:
    return Affine(*(tensor.double() for tensor in linear))


def _after_norm(
    linear: tuple[torch.Tensor, torch.Tensor], norm: tuple[torch.Tensor, torch.Tensor]
) -> Affine:
    """``W (n * gamma + beta) + b`` as ``W' n + b'``."""
    (weight, bias), (gamma, beta) = _exact(linear), _exact(norm)
    return Affine(weight * gamma, bias + weight @ beta)


def normalise(x: torch.Tensor, shift: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``n(x + shift)`` of contiguous float32 rows ``x [T, d]``, in ``dtype``."""
    if x.is_cuda and dtype == torch.float16 and find_spec("triton"):
        from fastlayer.kernels import rowwise

        return rowwise.normalise(x, shift)
    return F.layer_norm(x + shift, x.shape[1:]).to(dtype)


def finish_(
    x: torch.Tensor, shift: torch.Tensor, affine: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """``n(x + shift) * weight + bias`` of contiguous float32 rows ``x [T, d]``, in place."""
    if x.is_cuda and find_spec("triton"):
        from fastlayer.kernels import rowwise

        rowwise.finish(x, shift, *affine, out=x)
    else:
        x.copy_(F.layer_norm(x.add_(shift), x.shape[1:], *affine))


def accumulate(residual: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> None:
    """``residual += a W^T`` in float32 ``[T, d]``; no sum is rounded to the operands' dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(residual, a, weight.t(), out_dtype=torch.float32, out=residual)
    else:
        residual.addmm_(a.float(), weight.float().t())
