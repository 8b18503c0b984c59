"""The whole forward pass in float32 with fused attention, as ``sdpa`` and ``batch_stream`` run it.

    h = x
    per layer:  q, k, v = Wqkv norm1(h) + b        one product where packed, else three
                h = h + Wo attention(q, k, v) + b  heads are strided views, nothing is copied
                h = h + Wout gelu(Win norm2(h) + b) + b
    out = final_norm(h), zero at invalid tokens

Invalid tokens are zero-filled once, at the end. The reference does it after every block as well,
but no valid token ever reads an invalid one: under right padding causality keeps them apart, and
without causality the key mask does. An irregular mask is made right-padded first: ``compacted``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastlayer.contract import RuntimeContract
from fastlayer.masks import MaskKind
from fastlayer.reference import zero_invalid
from fastlayer.routes.base import Bound
from fastlayer.weights import LayerWeights, ModelState

Affine = tuple[torch.Tensor, torch.Tensor]


class Projections(Protocol):
    """The linear layers of one block. ``tokens`` tensors are ``[B, N, width]``."""

    def qkv(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def out(self, context: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...
    def ffn(self, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...


class AtenProjections:
    """Through ``F.linear``: cuBLAS on CUDA, the BLAS that torch was built with on a CPU."""

    def __init__(self, weights: LayerWeights, packed_qkv: bool) -> None:
        self._weights = weights
        self._packed = weights.packed_qkv() if packed_qkv else None

    def qkv(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._packed is not None:
            q, k, v = F.linear(normed, *self._packed).chunk(3, dim=-1)
            return q, k, v
        w = self._weights
        return F.linear(normed, *w.q), F.linear(normed, *w.k), F.linear(normed, *w.v)

    def out(self, context: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.linear(context, *self._weights.out).add_(residual)

    def ffn(self, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(F.linear(normed, *self._weights.ffn_in))
        return F.linear(hidden, *self._weights.ffn_out).add_(residual)


class MkldnnProjections:
    """Through oneDNN on a CPU: weights in its own blocked layout, GELU and residual as post-ops.

    oneDNN picks its kernels by instruction set on every vendor's processors, and a weight that is
    reordered once saves that work in each call.
    """

    def __init__(self, weights: LayerWeights, packed_qkv: bool, tokens: int) -> None:
        def prepack(affine: Affine) -> Affine:
            weight, bias = affine
            ops = torch.ops.mkldnn
            return ops._reorder_linear_weight(weight.contiguous(), tokens), bias

        qkv = [weights.packed_qkv()] if packed_qkv else [weights.q, weights.k, weights.v]
        self._qkv = [prepack(affine) for affine in qkv]
        self._out = prepack(weights.out)
        self._ffn_in = prepack(weights.ffn_in)
        self._ffn_out = prepack(weights.ffn_out)

    def qkv(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if len(self._qkv) == 1:
            q, k, v = _pointwise(normed, self._qkv[0], "none").chunk(3, dim=-1)
        else:
            q, k, v = (_pointwise(normed, affine, "none") for affine in self._qkv)
        return q, k, v

    def out(self, context: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _add(context, residual, self._out)

    def ffn(self, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _add(_pointwise(normed, self._ffn_in, "gelu"), residual, self._ffn_out)


def _pointwise(x: torch.Tensor, affine: Affine, post: str) -> torch.Tensor:
    weight, bias = affine
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, post, [], "none")
    return result


def _add(x: torch.Tensor, residual: torch.Tensor, affine: Affine) -> torch.Tensor:
    weight, bias = affine
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        x, residual, weight, bias, "add"
    )
    return result


def mkldnn_linear_available() -> bool:
    """Whether this torch has oneDNN and the prepacked linear operators used above."""
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


@dataclass(frozen=True)
class Body:
    """The forward pass over fixed weights, for one mask kind. Calling it makes new tensors only."""

    heads: int
    causal: bool
    norms: tuple[tuple[Affine, Affine], ...]
    projections: tuple[Projections, ...]
    final_norm: Affine
    attend: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``x [B, N, d]`` and None or a right-padded ``mask [B, N]`` to ``[B, N, d]``."""
        width = x.shape[-1]
        key_mask = None if mask is None or self.causal else mask[:, None, None, :]
        h = x.contiguous()
        for (norm1, norm2), projections in zip(self.norms, self.projections, strict=True):
            normed = F.layer_norm(h, (width,), *norm1)
            h = projections.out(self._context(projections.qkv(normed), key_mask), h)
            normed = F.layer_norm(h, (width,), *norm2)
            h = projections.ffn(normed, h)
            del normed  # it would live on through the next layer's attention
        return zero_invalid(F.layer_norm(h, (width,), *self.final_norm), mask)

    def _context(
        self, qkv: tuple[torch.Tensor, ...], key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention's context ``[B, N, d]``; q, k and v die with this frame."""
        batch, tokens, width = qkv[0].shape
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in qkv)
        context = self.attend(q, k, v, attn_mask=key_mask, is_causal=self.causal)
        return context.transpose(1, 2).reshape(batch, tokens, width)


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """SDPA over ``[B, H, N, head_dim]`` views, by backends that never hold the scores.

    The math backend is not allowed: were a shape out of the others' reach, SDPA raises rather than
    allocating ``[B, H, N, N]`` in silence. In float32, flash attention serves CPUs and the
    memory-efficient kernel CUDA.
    """
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)


def make_body(state: ModelState, contract: RuntimeContract, packed_qkv: bool, linear: str) -> Body:
    """The body over the present weights; packing is shared by all contracts of the model."""
    tokens = max(32, contract.config.tokens)  # below that oneDNN lays weights out for one token

    def build() -> tuple[Projections, ...]:
        if linear == "mkldnn":
            return tuple(MkldnnProjections(w, packed_qkv, tokens) for w in state.layers)
        return tuple(AtenProjections(w, packed_qkv) for w in state.layers)

    layers = state.layers
    return Body(
        heads=contract.config.num_heads,
        causal=contract.config.causal,
        norms=tuple((w.norm1, w.norm2) for w in layers),
        projections=state.get(("projections", linear, packed_qkv), build),
        final_norm=state.final_norm,
        attend=fused_attention,
    )


def compacted(body: Bound) -> Bound:
    """``body``, which takes right-padded masks, made to serve any mask.

    Attention that skips invalid keys is attention over the valid tokens in their order, and
    everything else is per token; so the valid tokens move to the front, the body runs, and its
    results move back. Memory stays linear in N where a ``[B, 1, N, N]`` mask would be quadratic.
    """

    def run(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        assert mask is not None
        order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)
        packed = x.gather(1, order[:, :, None].expand_as(x))
        result = body(packed, mask.gather(1, order))
        return torch.empty_like(result).scatter_(1, order[:, :, None].expand_as(result), result)

    return run


def serve_mask(body: Bound, kind: MaskKind) -> Bound:
    """``body`` for right-padded masks, wrapped where ``kind`` needs more."""
    return compacted(body) if kind is MaskKind.IRREGULAR else body
