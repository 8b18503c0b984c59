"""What a user would pick instead of this project, timed in the same run (``--fastlayer-rival``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fastlayer import TransformerConfig

Forward = Callable[..., Any]


class HalfSdpa(nn.Module):
    """The usual fast model: fp16 GEMM operands and SDPA, float32 residual and normalisation.

    Built from the reference's weights, converted once; serves inputs without a padding mask.
    """

    def __init__(self, reference: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        for name, tensor in reference.state_dict().items():
            is_norm = "norm" in name
            self.register_buffer(self._flat(name), tensor.clone() if is_norm else tensor.half())
        for i in range(config.num_layers):
            for kind in ("weight", "bias"):
                parts = [self._get(f"layers.{i}.attention.{p}_proj.{kind}") for p in "qkv"]
                self.register_buffer(self._flat(f"layers.{i}.qkv.{kind}"), torch.cat(parts))

    @staticmethod
    def _flat(name: str) -> str:
        return name.replace(".", "_")

    def _get(self, name: str) -> torch.Tensor:
        return self.get_buffer(self._flat(name))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        return functional.layer_norm(x, x.shape[-1:], weight, bias)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._get(f"{name}.weight"), self._get(f"{name}.bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.config.num_heads, width // self.config.num_heads)
        for i in range(self.config.num_layers):
            layer = f"layers.{i}"
            normed = self._norm(x, f"{layer}.norm1").half()
            q, k, v = self._linear(normed, f"{layer}.qkv").view(shape).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.config.causal)
            mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
            x = x + self._linear(mixed, f"{layer}.attention.out_proj")
            hidden = self._linear(self._norm(x, f"{layer}.norm2").half(), f"{layer}.ffn_in")
            x = x + self._linear(functional.gelu(hidden), f"{layer}.ffn_out")
        return self._norm(x, "final_norm")


def compiled_half_sdpa(reference: nn.Module, config: TransformerConfig) -> Forward:
    """``torch.compile`` with CUDA graphs over :class:`HalfSdpa`."""
    model = HalfSdpa(reference, config).eval()
    compiled: Forward = torch.compile(model, mode="reduce-overhead")
    return compiled


def transformer_encoder(reference: nn.Module, config: TransformerConfig) -> Forward:
    """``nn.TransformerEncoder`` with the reference's weights, its own inference path."""
    layer = nn.TransformerEncoderLayer(
        config.d_model,
        config.num_heads,
        config.ffn_dim,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
    encoder = nn.TransformerEncoder(
        layer, config.num_layers, nn.LayerNorm(config.d_model), enable_nested_tensor=False
    )
    weights = reference.state_dict()
    device = weights["final_norm.weight"].device
    encoder = encoder.to(device).eval()
    theirs = {}
    for i in range(config.num_layers):
        ours = {name: f"layers.{i}.{name}" for name in ("norm1", "norm2")}
        ours |= {"linear1": f"layers.{i}.ffn_in", "linear2": f"layers.{i}.ffn_out"}
        ours["self_attn.out_proj"] = f"layers.{i}.attention.out_proj"
        for kind in ("weight", "bias"):
            for theirs_name, name in ours.items():
                theirs[f"layers.{i}.{theirs_name}.{kind}"] = weights[f"{name}.{kind}"]
            packed = torch.cat([weights[f"layers.{i}.attention.{p}_proj.{kind}"] for p in "qkv"])
            theirs[f"layers.{i}.self_attn.in_proj_{kind}"] = packed
    theirs |= {f"norm.{kind}": weights[f"final_norm.{kind}"] for kind in ("weight", "bias")}
    encoder.load_state_dict(theirs, strict=True)
    mask = nn.Transformer.generate_square_subsequent_mask(config.seq_len, device=device)
    return partial(encoder, mask=mask, is_causal=True)


def graphed_reference(reference: nn.Module, config: TransformerConfig) -> Forward:
    """The reference itself as a CUDA graph: copy in, replay. No launch gaps, whatever the host.

    The result is the graph's own buffer, which the next call overwrites: the least that a replay
    can cost.
    """
    device = next(reference.parameters()).device
    static = torch.zeros(config.batch_size, config.seq_len, config.d_model, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(2):
            reference(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = reference(static)

    def forward(x: torch.Tensor) -> torch.Tensor:
        static.copy_(x)
        graph.replay()
        return result

    return forward


def rivals(
    reference: nn.Module, config: TransformerConfig, device: str
) -> Mapping[str, Callable[[], Forward]]:
    """The rivals that make sense on this device, built only when named."""
    found = {"transformer_encoder": partial(transformer_encoder, reference, config)}
    if device == "cuda":  # fp16 has no fast CPU path that anyone would pick
        found["compiled_half_sdpa"] = partial(compiled_half_sdpa, reference, config)
        found["graphed_reference"] = partial(graphed_reference, reference, config)
    return found
