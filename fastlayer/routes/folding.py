"""Blocks with their norms and biases folded away: what is left between products is few passes.

    r = x                                            float32, the residual without its biases
    per block:  q, k, v = Wqkv' n(r + s) + b'
                r += Wo attention(q, k, v)
                r += Wout gelu(Win' n(r + s) + b')

n is LayerNorm without its affine part, which goes into the weight that reads it. s is the running
sum of the biases that r has not been given. q, k and v keep theirs: softmax cannot tell that of k,
and that of v could be owed like the others, but the reference rounds them with their biases, and
errors that are the same on both sides cancel in a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn import functional as F

from fastlayer.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class FoldedLayer:
    """One block. Matrices ``[out, in]`` and their biases in the compute dtype.

    ``shift1``, ``shift2`` and ``owed``, float32 ``[d]``, are the biases owed to the residual where
    each norm reads it, and after the block.
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

    @property
    def finite(self) -> bool:
        """Whether nothing left the dtype's range; synchronises with the device."""
        tensors = (self.qkv, self.qkv_bias, self.out, self.ffn_in, self.ffn_in_bias, self.ffn_out)
        return all(bool(tensor.isfinite().all()) for tensor in tensors)


def fold(layers: list[LayerWeights], dtype: torch.dtype) -> list[FoldedLayer]:
    """Folds in float64, rounds once."""
    owed = torch.zeros_like(layers[0].out[1], dtype=torch.float64)
    folded = []
    for weights in layers:
        layer, owed = _fold(weights, owed, dtype)
        folded.append(layer)
    return folded


def _fold(
    weights: LayerWeights, owed: torch.Tensor, dtype: torch.dtype
) -> tuple[FoldedLayer, torch.Tensor]:
    qkv, qkv_bias = _after_norm(*weights.packed_qkv(), weights.norm1)
    ffn_in, ffn_in_bias = _after_norm(*weights.ffn_in, weights.norm2)
    between = owed + weights.out[1].double()
    after = between + weights.ffn_out[1].double()
    layer = FoldedLayer(
        qkv=qkv.to(dtype),
        qkv_bias=qkv_bias.to(dtype),
        out=weights.out[0].to(dtype),
        ffn_in=ffn_in.to(dtype),
        ffn_in_bias=ffn_in_bias.to(dtype),
        ffn_out=weights.ffn_out[0].to(dtype),
        shift1=owed.float(),
        shift2=between.float(),
        owed=after.float(),
    )
    return layer, after


def _after_norm(
    weight: torch.Tensor, bias: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``W (n * gamma + beta) + b`` as ``W' n + b'``, float64."""
    gamma, beta = (tensor.double() for tensor in norm)
    exact = weight.double()
    return exact * gamma, bias.double() + exact @ beta


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
