"""The reference's arithmetic in memory linear in N: what case 14 is judged against.

The reference holds ``[B, H, N, N]`` scores; at N = 100,000 these take 20 TB. Here a block of query
rows of a few heads meets all keys it may see, and nothing else of the scores exists at that time:

    for each sample, for rows [a, b) of some heads:
        softmax(q[a:b] k[:b]^T * head_dim**-0.5 + mask) v[:b]      (all keys where not causal)

A whole row of scores is softmaxed at once, by the same operations in the same dtypes as in the
reference, and one matrix product sums over all its keys. So only the order of summation inside
matrix products differs: torch's own choice, which depends on their sizes. Products are IEEE float32
or TF32 as the process-wide setting says, because the reference's are. Layers are the reference's
own modules, called on blocks of rows.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn

from fastlayer.alterations import call_alteration
from fastlayer.arguments import check_mask, check_shape
from fastlayer.config import TransformerConfig, workspace_size
from fastlayer.errors import InputError
from fastlayer.reference import ReferenceAttention, ReferenceBlock, ReferenceTransformer

#: Bytes alive at once for each score of a block: scores and probabilities, and one more copy while
#: the scale or a mask is applied, in float32 or wider.
_SCORE_COPIES = 3


class Oracle(nn.Module):
    """A reference in bounded memory: same parameters, same forward, same rounding.

    Above input, output and parameters a call takes four activations of one sample (``4 N d``
    elements) and at most ``workspace_bytes`` more, whatever the batch; a single row of one head's
    scores must fit, ``12 N`` bytes in float32. Autograd never follows it.

    The equality is that of finite values. The reference multiplies the zero probability of a token
    that a row may not see, invalid or future, with that token's value; so one token with inf or NaN
    makes NaN of every row of its sample. Here it does so in the rows of its own and later blocks,
    and in none if it follows the last valid token: such tokens are not read at all.

    Args:
        reference: the model to compute; its parameters are shared, not copied. A judge must be the
            reference itself, so one whose call would run otherwise is refused, here and in every
            call. A class that is no ``ReferenceTransformer`` is taken at its word.
        workspace_bytes: bound on the score and feed-forward blocks.

    Raises:
        InputError: ``workspace_bytes`` is not positive, or, when called, cannot hold one row; the
            reference has a forward, a hook, a submodule or a setting of its own; an input does not
            fit.
    """

    reference: ReferenceTransformer

    def __init__(
        self, reference: ReferenceTransformer, *, workspace_bytes: int = 2 * 2**30
    ) -> None:
        super().__init__()
        object.__setattr__(self, "reference", reference)
        self.workspace_bytes = workspace_size(workspace_bytes)
        self._take_parts()

    def _take_parts(self) -> None:
        """Registers the reference's parts, so that parameters have its own names.

        Raises:
            InputError: a call of the reference would not run as the plain one's does.
        """
        reason = call_alteration(self.reference, self.config)
        if reason:
            raise InputError(
                "Oracle",
                f"an altered reference: {reason}",
                "one that runs as its class was written",
                "A judge must be the reference itself: undo the alteration.",
            )
        self.layers = self.reference.layers
        self.final_norm = self.reference.final_norm

    @property
    def config(self) -> TransformerConfig:
        return TransformerConfig.of(self.reference.config)

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reference's result for ``x [B, N, d_model]`` and a bool mask ``[B, N]`` or None."""
        self._take_parts()
        self._check(x, valid_token_mask)
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if not out.numel():
            return out
        for index in range(len(x)):
            if valid_token_mask is None:
                self._sample(x[index], None, out[index])
                continue
            valid = valid_token_mask[index]
            places = valid.nonzero()
            if not len(places):
                continue
            # What follows the last valid token is zero, and so is its part in all that precedes it.
            end = int(places[-1]) + 1
            mask = None if len(places) == end else valid[:end]
            self._sample(x[index, :end], mask, out[index, :end])
        return out

    def _check(self, x: object, mask: object) -> None:
        """Raises ``InputError`` unless both are dense tensors that fit the model and each other."""
        width = self.config.d_model
        if not isinstance(x, torch.Tensor) or x.is_nested or x.layout is not torch.strided:
            raise InputError(
                "x",
                type(x).__name__ if not isinstance(x, torch.Tensor) else f"layout {x.layout}",
                f"a dense tensor [batch, tokens, {width}]",
                "Pass the activations, padded where lengths differ.",
            )
        check_shape(x, width)
        if mask is not None:
            check_mask(mask, x)

    def _sample(self, x: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor) -> None:
        """One sample ``[n, d]`` into ``out``, which serves as the residual on the way."""
        out.copy_(x)
        for layer in cast("list[ReferenceBlock]", list(self.layers)):
            context = self._attention(layer, out, mask)
            for rows in self._row_blocks(out):
                h = out[rows]
                h = h + _zeroed(layer.attention.out_proj(context[rows]), mask, rows)
                h = h + layer.ffn_out(nn.functional.gelu(layer.ffn_in(layer.norm2(h))))
                out[rows] = _zeroed(h, mask, rows)
            del context
        for rows in self._row_blocks(out):
            out[rows] = _zeroed(self.final_norm(out[rows]), mask, rows)

    def _row_blocks(self, x: torch.Tensor) -> list[slice]:
        """Rows whose normalised, hidden and activated values fit the workspace together."""
        config = self.config
        row = (4 * config.d_model + 2 * config.ffn_dim) * x.element_size()
        return _blocks(len(x), max(1, self.workspace_bytes // row))

    def _attention(
        self, layer: ReferenceBlock, x: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The context ``[n, d]`` of one layer, before its output projection."""
        attention: ReferenceAttention = layer.attention
        tokens = len(x)
        q, k, v = (torch.empty_like(x) for _ in range(3))
        for rows in self._row_blocks(x):
            normed = layer.norm1(x[rows])
            for target, projection in (
                (q, attention.q_proj),
                (k, attention.k_proj),
                (v, attention.v_proj),
            ):
                target[rows] = projection(normed)
        q, k, v = (
            t.view(tokens, attention.num_heads, attention.head_dim).transpose(0, 1)
            for t in (q, k, v)
        )
        heads, size = self._score_block(tokens, x)
        context = torch.empty_like(x)
        scale = attention.head_dim**-0.5
        # A power of two multiplies without rounding, before a product as after it: then two passes
        # over all scores are saved, and not a bit is different.
        beforehand = math.frexp(scale)[0] == 0.5 and x.dtype != torch.float16
        if beforehand:
            q.mul_(scale)
        by_head = context.view(tokens, attention.num_heads, attention.head_dim).transpose(0, 1)
        for group in _blocks(attention.num_heads, heads):
            for rows in _blocks(tokens, size):
                seen = rows.stop if attention.causal else tokens
                scores = torch.matmul(q[group, rows], k[group, :seen].transpose(-2, -1))
                if not beforehand:
                    scores.mul_(scale)
                if attention.causal:
                    own = scores[:, :, rows]
                    future = torch.ones(own.shape[-2:], dtype=torch.bool, device=x.device).triu_(1)
                    own.masked_fill_(future, float("-inf"))
                if mask is not None:
                    scores.masked_fill_(~mask[None, None, :seen], float("-inf"))
                probabilities = torch.softmax(scores.float(), dim=-1).to(x.dtype)
                del scores
                by_head[group, rows] = torch.matmul(probabilities, v[group, :seen])
                del probabilities
        return context

    def _score_block(self, tokens: int, x: torch.Tensor) -> tuple[int, int]:
        """Heads and query rows of one block of scores."""
        row = _SCORE_COPIES * tokens * max(4, x.element_size())
        rows = self.workspace_bytes // row
        if rows < 1:
            raise InputError(
                "workspace_bytes",
                f"{self.workspace_bytes:,}",
                f"at least {row:,}, one row of one head's scores over {tokens:,} tokens",
                "Raise workspace_bytes.",
            )
        heads = min(self.config.num_heads, max(1, rows // min(tokens, _LEAST_ROWS)))
        return heads, min(tokens, rows // heads)


#: Query rows below which a matrix product leaves a GPU idle; more heads share a block only beyond.
_LEAST_ROWS = 256


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _zeroed(x: torch.Tensor, mask: torch.Tensor | None, rows: slice) -> torch.Tensor:
    """``x [rows, d]`` with zeros at the invalid tokens of ``mask [n]``."""
    return x if mask is None else x.masked_fill(~mask[rows, None], 0.0)
