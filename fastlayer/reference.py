"""The immutable reference: a dense causal Transformer in plain PyTorch arithmetic.

    x -> L blocks -> final LayerNorm
    block:      x = x + attention(norm1(x));  x = x + ffn_out(gelu_erf(ffn_in(norm2(x))))
    attention:  softmax(q k^T * head_dim**-0.5 + mask) v, softmax in float32

Every other implementation in this repository is judged against this file, whose digest is pinned
in ``pyproject.toml``. It favours readability over speed and depends on torch alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class ConfigLike(Protocol):
    """What the reference reads of a configuration; any object with these attributes serves."""

    @property
    def d_model(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def causal(self) -> bool: ...


class ReferenceAttention(nn.Module):
    """Multi-head self-attention that materialises its ``[B, H, N, N]`` scores."""

    def __init__(self, d_model: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.causal = causal
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, tokens, d_model = x.shape
        q = self._split_heads(self.q_proj(x))
        k = self._split_heads(self.k_proj(x))
        v = self._split_heads(self.v_proj(x))

        scores = torch.matmul(q, k.transpose(-2, -1)) * self.head_dim**-0.5
        if self.causal:
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if valid_token_mask is not None:
            scores = scores.masked_fill(~valid_token_mask[:, None, None, :], float("-inf"))
        probabilities = torch.softmax(scores.float(), dim=-1).to(x.dtype)

        context = torch.matmul(probabilities, v)
        context = context.transpose(1, 2).reshape(batch, tokens, d_model)
        return zero_invalid(self.out_proj(context), valid_token_mask)


class ReferenceBlock(nn.Module):
    """One pre-norm Transformer block."""

    def __init__(self, d_model: int, num_heads: int, ffn_dim: int, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = ReferenceAttention(d_model, num_heads, causal)
        self.norm2 = nn.LayerNorm(d_model)
        self.ffn_in = nn.Linear(d_model, ffn_dim)
        self.ffn_out = nn.Linear(ffn_dim, d_model)

    def forward(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), valid_token_mask)
        x = x + self.ffn_out(nn.functional.gelu(self.ffn_in(self.norm2(x))))
        return zero_invalid(x, valid_token_mask)


class ReferenceTransformer(nn.Module):
    """The dense model: ``forward(x [B, N, d_model], valid_token_mask [B, N] | None)``.

    The mask is bool with True for a valid token. Invalid keys receive no attention; the output is
    zero at invalid tokens, and so is all of a sample without any valid token. Parameters carry
    torch's default initialisation, drawn from the global generator in the order of construction.
    """

    def __init__(self, config: ConfigLike) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            ReferenceBlock(config.d_model, config.num_heads, config.ffn_dim, config.causal)
            for _ in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(config.d_model)

    def forward(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, valid_token_mask)
        return zero_invalid(self.final_norm(x), valid_token_mask)


def zero_invalid(x: torch.Tensor, valid_token_mask: torch.Tensor | None) -> torch.Tensor:
    """``x [B, N, d]`` with zeros, not NaN times zero, at the invalid tokens of the mask."""
    if valid_token_mask is None:
        return x
    return x.masked_fill(~valid_token_mask[:, :, None], 0.0)
