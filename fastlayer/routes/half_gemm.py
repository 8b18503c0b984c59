"""Wide layers in float16 products: float16 operands, float32 sums, a float32 residual.

    r = x                                            float32, the residual without its biases
    per layer:  q, k, v = Wqkv' n(r + s) + b'        one product, float16
                r += Wo attention(q, k, v)           float32 sums added to r by the product itself
                r += Wout gelu(Win' n(r + s) + b')   likewise
    out = n(r + s) * weight + bias

n is LayerNorm without its affine part, which is folded into the weight that reads it (W', b');
s is the running sum of the biases that r has not been given. So nothing but two normalisations and
a GELU a layer passes over memory between the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastlayer.config import TransformerConfig
from fastlayer.contract import RuntimeContract
from fastlayer.reference import zero_invalid
from fastlayer.routes.base import Bound, Launch, check_launch, common_objections
from fastlayer.routes.body import serve_mask
from fastlayer.routes.fused import has_triton, rounds_operands
from fastlayer.routes.sdpa import bind_sdpa
from fastlayer.weights import LayerWeights, ModelState

_OPTIONS: dict[str, tuple[object, ...]] = {"execution": ("eager", "graph")}

#: Elements of an activation from which the device takes longer than the host needs to launch: a
#: graph would only add a copy of the input and one of the output.
_HOST_BOUND = 2**22

#: 16-bit products read rows of sixteen bytes.
_MULTIPLE = 8

_WIDEST_HEAD = 256
_WIDEST = 16_384

_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class HalfGemmRoute:
    """For any width; ``fused`` is for models narrow enough to stay in registers."""

    name = "half_gemm"

    def objections(self, contract: RuntimeContract) -> list[str]:
        found = common_objections(contract)
        config, device = contract.config, contract.device
        widths = {
            "d_model": config.d_model,
            "ffn_dim": config.ffn_dim,
            "head_dim": config.head_dim,
        }
        needed = half_bytes(config)
        checks: list[tuple[bool, str]] = [
            (device.type != "cuda", f"its products run on CUDA devices, not on {device.type}"),
            (
                device.type == "cuda" and device.capability < (8, 0),
                f"compute capability {device.capability} is below (8, 0)",
            ),
            (not has_triton(), "Triton is not installed"),
            (
                contract.capturing,
                "a CUDA graph is being captured, and its replays would not follow edited weights",
            ),
            rounds_operands(contract),
            *(
                (value % _MULTIPLE > 0, f"{name} = {value} is no multiple of {_MULTIPLE}")
                for name, value in widths.items()
            ),
            (
                config.head_dim > _WIDEST_HEAD,
                f"head_dim = {config.head_dim} exceeds {_WIDEST_HEAD}, flash attention's widest",
            ),
            (config.d_model > _WIDEST, f"d_model = {config.d_model} exceeds {_WIDEST}"),
            (
                needed > contract.available_bytes,
                f"it needs {needed:,} bytes and {contract.available_bytes:,} are available",
            ),
        ]
        return found + [reason for applies, reason in checks if applies]

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        order = ("eager", "graph")
        if contract.config.activation_elements < _HOST_BOUND:
            order = ("graph", "eager")
        return [{"execution": execution} for execution in order]

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        """As in the protocol.

        Raises:
            ValueError: the launch holds an option or a value that does not exist.
        """
        check_launch(self.name, launch, _OPTIONS)
        layers = state.get(("half_gemm",), lambda: pack(state.layers))
        if not all(layer.finite for layer in layers):
            state.notes.append(
                "half_gemm: a weight folded with its norm leaves float16's range; float32 "
                "attention ran instead"
            )
            return bind_sdpa("sdpa", state, contract, {})
        config = contract.config
        run: Bound = HalfBody(layers, state.final_norm, config.num_heads, config.causal)
        if launch.get("execution", "eager") == "graph":
            run = state.graphs.bind(run, state.notes.append)
        return serve_mask(run, contract.mask)


def half_bytes(config: TransformerConfig) -> int:
    """Peak bytes above parameters and input.

    Two float32 activations, and the most float16 that is alive at once: a normalised activation
    with q, k, v and the context, or with the hidden layer.
    """
    wide = max(5 * config.activation_elements, config.tokens * config.ffn_dim)
    return 2 * config.activation_bytes() + 2 * (wide + config.activation_elements)


@dataclass(frozen=True, slots=True)
class HalfLayer:
    """One block, folded. Matrices ``[in, out]`` float16; ``shift*`` float32 ``[d]``.

    ``shift1`` and ``shift2`` are the biases owed to the residual where each norm reads it, and
    ``owed`` what is owed after the block.
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
        matrices = (self.qkv, self.out, self.ffn_in, self.ffn_out)
        biases = (self.qkv_bias, self.ffn_in_bias)
        return all(bool(tensor.isfinite().all()) for tensor in (*matrices, *biases))


def pack(layers: list[LayerWeights]) -> list[HalfLayer]:
    """Folds in float64, rounds once."""
    owed = torch.zeros_like(layers[0].out[1], dtype=torch.float64)
    folded = []
    for weights in layers:
        layer, owed = _fold(weights, owed)
        folded.append(layer)
    return folded


def _fold(weights: LayerWeights, owed: torch.Tensor) -> tuple[HalfLayer, torch.Tensor]:
    def half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float16).contiguous()

    qkv, qkv_bias = weights.packed_qkv()
    qkv, qkv_bias = _after_norm(qkv, qkv_bias, weights.norm1)
    ffn_in, ffn_in_bias = _after_norm(*weights.ffn_in, weights.norm2)
    between = owed + weights.out[1].double()
    after = between + weights.ffn_out[1].double()
    layer = HalfLayer(
        qkv=half(qkv.T),
        qkv_bias=half(qkv_bias),
        out=half(weights.out[0].T),
        ffn_in=half(ffn_in.T),
        ffn_in_bias=half(ffn_in_bias),
        ffn_out=half(weights.ffn_out[0].T),
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


class HalfBody:
    """The forward pass over folded weights. Calling it makes new tensors only."""

    def __init__(
        self,
        layers: list[HalfLayer],
        final_norm: tuple[torch.Tensor, torch.Tensor],
        heads: int,
        causal: bool,
    ) -> None:
        self._layers = layers
        self._final = final_norm
        self._heads = heads
        self._causal = causal

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``x [B, N, d]`` and None or a right-padded ``mask [B, N]`` to ``[B, N, d]``."""
        from fastlayer.kernels import rowwise

        batch, tokens, width = x.shape
        # Under causality no valid token reads an invalid one; otherwise keys are masked.
        key_mask = None if mask is None or self._causal else mask[:, None, None, :]
        residual = x.reshape(-1, width)
        own = False  # The input itself is never written.
        for layer in self._layers:
            h = rowwise.normalise(residual, layer.shift1)
            context = self._attend(product(h, layer.qkv, layer.qkv_bias), batch, tokens, key_mask)
            residual = accumulate(residual, context, layer.out, in_place=own)
            own = True
            h = rowwise.normalise(residual, layer.shift2)
            hidden = rowwise.activate_(product(h, layer.ffn_in, layer.ffn_in_bias))
            residual = accumulate(residual, hidden, layer.ffn_out, in_place=True)
        out = rowwise.finish(residual, self._layers[-1].owed, *self._final)
        return zero_invalid(out.view(batch, tokens, width), mask)

    def _attend(
        self, qkv: torch.Tensor, batch: int, tokens: int, key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Context ``[B N, d]`` from ``qkv [B N, 3 d]`` on strided views of heads."""
        q, k, v = qkv.view(batch, tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(_BACKENDS):
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=key_mask, is_causal=self._causal
            )
        return context.transpose(1, 2).reshape(batch * tokens, -1)


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``a [T, K] b [K, N] + bias [N]`` in float16."""
    return torch.addmm(bias, a, b)


def accumulate(
    residual: torch.Tensor, a: torch.Tensor, b: torch.Tensor, in_place: bool
) -> torch.Tensor:
    """``residual + a b`` in float32 from float16 operands; no sum is rounded to float16."""
    if not a.is_cuda:
        update = a.float() @ b.float()
        return residual.add_(update) if in_place else residual + update
    if in_place:
        return torch.addmm(residual, a, b, out_dtype=torch.float32, out=residual)
    return torch.addmm(residual, a, b, out_dtype=torch.float32)
