"""Wide layers in float16 products: float16 operands, float32 sums, a float32 residual.

    r = x                                            float32, the residual without its biases
    per layer:  q, k, v = Wqkv' n(r + s) + b'        one product, float16
                r += Wo attention(q, k, v)           float32 sums added to r by the product itself
                r += Wout gelu(Win' n(r + s) + b')   likewise
    out = n(r + s) * weight + bias

n is LayerNorm without its affine part, which is folded into the weight that reads it (W', b');
s is the running sum of the biases that r has not been given. So nothing but two normalisations a
layer passes over memory between the products. What is rounded to float16 is what the reference
rounds to TF32's equal mantissa (normalised activations, q, k but for its bias, v, divided
probabilities), so most roundings are the same and cancel in a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastlayer.config import TransformerConfig
from fastlayer.contract import RuntimeContract
from fastlayer.errors import RouteRefused
from fastlayer.kernels.knobs import WIDEST as NARROW
from fastlayer.kernels.sizes import attends
from fastlayer.routes.base import Bound, Launch, check_launch, common_objections
from fastlayer.routes.body import serve_mask
from fastlayer.routes.folding import FoldedLayer, accumulate, fold
from fastlayer.routes.fused import has_triton, rounds_operands
from fastlayer.routes.sdpa import bind_sdpa
from fastlayer.weights import ModelState

_OPTIONS: dict[str, tuple[object, ...]] = {
    "execution": ("eager", "graph"),
    "parts": (1, 2),
    "attention": ("library", "kernel"),
}

#: Elements of an activation from which half a batch still fills the device with every product.
_WORTH_PARTS = 2**22

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
            (
                config.d_model <= NARROW,
                f"d_model = {config.d_model} is narrow enough to stay in registers: route 'fused'",
            ),
            (config.d_model > _WIDEST, f"d_model = {config.d_model} exceeds {_WIDEST}"),
            (
                needed > contract.available_bytes,
                f"it needs {needed:,} bytes and {contract.available_bytes:,} are available",
            ),
        ]
        found += [reason for applies, reason in checks if applies]
        refused = _REFUSED.get(_shape(contract))
        return [*found, refused] if refused else found

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        config, own = contract.config, _attentions(contract)[-1]
        # As graphs on an H200, case 8: 1.03 ms in one part, .99 to 1.02 in two, no less in four.
        # Eagerly the host takes longer to launch two parts than the device saves: 1.08 and 1.22.
        worth = config.activation_elements >= _WORTH_PARTS and config.batch_size > 1
        parts = 2 if worth else 1
        found: list[Launch] = [
            {"execution": "graph", "attention": kind, "parts": parts}
            for kind in dict.fromkeys((own, "library"))
        ]
        return [*found, {"execution": "eager", "attention": own, "parts": 1}]

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        """As in the protocol.

        Raises:
            ValueError: the launch holds an option or a value that does not exist here.
            RouteRefused: a kernel failed its first-use proof.
        """
        check_launch(self.name, launch, {**_OPTIONS, "attention": _attentions(contract)})
        layers = state.get(("half_gemm",), lambda: fold(state.layers, torch.float16))
        if not all(layer.fits for layer in layers):
            state.notes.append(
                "half_gemm: a folded weight, or an activation that the weights allow, leaves "
                "float16's range or precision; float32 attention ran instead"
            )
            return bind_sdpa("sdpa", state, contract, {})
        config, parts = contract.config, int(launch.get("parts") or 1)
        own_attention = launch.get("attention") == "kernel" and _without_key_mask(contract)
        _prove(contract, parts, own_attention, layers[0].qkv.device)
        body = HalfBody(
            layers,
            state.final_norm,
            heads=config.num_heads,
            causal=config.causal,
            capability=contract.device.capability,
            shape=(config.batch_size, config.seq_len, config.d_model),
            parts=parts,
            own_attention=own_attention,
        )
        run: Bound = body
        if launch.get("execution", "eager") == "graph":
            run = state.graphs.bind_staged(body, state.notes.append)
        return serve_mask(run, contract.mask)


#: Why a shape is refused on a device: what failed its proof in this process.
_REFUSED: dict[Hashable, str] = {}


def _shape(contract: RuntimeContract) -> Hashable:
    return (contract.device, contract.config)


def _attentions(contract: RuntimeContract) -> tuple[str, ...]:
    able = attends(contract.config.seq_len, contract.config.head_dim)
    return ("library", "kernel") if able else ("library",)


def _without_key_mask(contract: RuntimeContract) -> bool:
    """Whether attention needs no mask: under causality no valid token reads an invalid one."""
    return contract.config.causal or not contract.mask.masks


def _prove(
    contract: RuntimeContract, parts: int, own_attention: bool, device: torch.device
) -> None:
    from fastlayer.kernels.products_proof import Claim, refusal

    facts, config = contract.device, contract.config
    batches = {len(part) for part in torch.arange(config.batch_size).chunk(parts)}
    batches.add(config.batch_size)  # of the first and the last pass, which are not in parts
    for batch in sorted(batches):
        part = replace(config, batch_size=batch)
        claim = Claim(part, own_attention, device.index or 0, facts.name, facts.capability)
        reason = refusal(claim)
        if reason:
            _REFUSED[_shape(contract)] = reason
            raise RouteRefused(HalfGemmRoute.name, reason)


def half_bytes(config: TransformerConfig) -> int:
    """Peak bytes above parameters and input.

    Two float32 activations, and the most float16 that is alive at once: a normalised activation
    with q, k, v and the context, or with the hidden layer.
    """
    wide = max(5 * config.activation_elements, config.tokens * config.ffn_dim)
    return 2 * config.activation_bytes() + 2 * (wide + config.activation_elements)


@dataclass(frozen=True, slots=True)
class Activations:
    """Between the input and the output: the float32 residual and what the first layer reads.

    ``residual [B N, d]``; ``normed [B N, d]`` float16, the residual normalised.
    """

    residual: torch.Tensor
    normed: torch.Tensor


class HalfBody:
    """The forward pass over folded weights, in stages (``graphs.Staged``).

    Calling it makes new tensors only. Its first pass over memory reads the input and its last one
    writes the output, so a graph of what lies between needs no copy of either. On a GPU the batch
    passes in ``parts`` on as many streams, so that what one part moves through memory overlaps with
    what another multiplies.
    """

    def __init__(
        self,
        layers: list[FoldedLayer],
        final_norm: tuple[torch.Tensor, torch.Tensor],
        heads: int,
        causal: bool,
        capability: tuple[int, int],
        shape: torch.Size | tuple[int, int, int],
        parts: int = 1,
        own_attention: bool = False,
    ) -> None:
        self._layers = layers
        self._final = final_norm
        self.heads = heads
        self.causal = causal
        self.capability = capability
        self.shape = shape
        self._parts = parts
        self.own_attention = own_attention
        self._streams: list[torch.cuda.Stream] = []

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``x [B, N, d]`` and None or a right-padded ``mask [B, N]`` to ``[B, N, d]``."""
        state = self.enter(x)
        self.inside(state, mask)
        return self.leave(state, mask)

    def enter(self, x: torch.Tensor, into: Activations | None = None) -> Activations:
        """The input, which itself is never written, and what the first norm makes of it."""
        from fastlayer.kernels import rowwise

        rows = x.contiguous().view(-1, self.shape[-1])
        if into is None:
            into = Activations(torch.empty_like(rows), torch.empty_like(rows, dtype=torch.float16))
        rowwise.normalise(rows, self._layers[0].shift1, into.residual, into.normed)
        return into

    def inside(self, state: Activations, mask: torch.Tensor | None) -> None:
        """All layers, in the residual's place."""
        batch, tokens, _ = self.shape
        # Under causality no valid token reads an invalid one; otherwise keys are masked.
        keys = None if mask is None or self.causal else mask[:, None, None, :]
        parts = []
        for samples in torch.arange(batch).chunk(self._parts):
            first, end = int(samples[0]), int(samples[-1]) + 1
            rows = slice(first * tokens, end * tokens)
            own_keys = None if keys is None else keys[first:end]
            residual, normed = state.residual[rows], state.normed[rows]
            parts.append(_Part(self, end - first, residual, normed, own_keys))
        streams, device = self._streams, state.residual.device
        with torch.cuda.device_of(state.residual), _Streams(streams, device, len(parts)) as on:
            for layer in self._layers:
                for index, part in enumerate(parts):
                    on(index)
                    part.advance(layer)

    def leave(
        self, state: Activations, mask: torch.Tensor | None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The last norm of the residual, zero where ``mask`` is."""
        from fastlayer.kernels import rowwise

        out = state.residual.new_empty(self.shape) if into is None else into
        rowwise.finish(
            state.residual, self._layers[-1].owed, *self._final, out.view(-1, out.shape[-1])
        )
        return out if mask is None else out.masked_fill_(~mask[:, :, None], 0.0)


class _Part:
    """Some samples on their way through the layers."""

    def __init__(
        self,
        body: HalfBody,
        batch: int,
        residual: torch.Tensor,
        normed: torch.Tensor,
        keys: torch.Tensor | None,
    ) -> None:
        self._body = body
        self._batch = batch
        self._residual = residual
        self._normed: torch.Tensor | None = normed
        self._keys = keys

    def advance(self, layer: FoldedLayer) -> None:
        from fastlayer.kernels import products, rowwise

        h, self._normed = self._normed, None
        if h is None:
            h = rowwise.normalise(self._residual, layer.shift1)
        qkv = torch.addmm(layer.qkv_bias, h, layer.qkv.t())
        accumulate(self._residual, self._attend(qkv), layer.out)
        h = rowwise.normalise(self._residual, layer.shift2)
        tile = products.tile_for(self._body.capability)
        hidden = products.activated(h, layer.ffn_in, layer.ffn_in_bias, tile)
        accumulate(self._residual, hidden, layer.ffn_out)

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Context ``[B N, d]`` from ``qkv [B N, 3 d]`` on strided views of heads."""
        heads, width = self._body.heads, self._body.shape[-1]
        if self._body.own_attention:
            from fastlayer.kernels import products

            return products.attend(qkv, self._batch, heads, self._body.causal)
        shape = (self._batch, -1, 3, heads, width // heads)
        q, k, v = qkv.view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(_BACKENDS):
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=self._keys, is_causal=self._body.causal
            )
        return context.transpose(1, 2).reshape(-1, width)


class _Streams:
    """The current stream and as many beside it as parts need, forked on entry, joined on exit."""

    def __init__(self, known: list[torch.cuda.Stream], device: torch.device, parts: int) -> None:
        self._parts = parts if device.type == "cuda" else 1
        if self._parts == 1:
            return
        while len(known) < parts - 1:
            known.append(torch.cuda.Stream(device))
        self._main = torch.cuda.current_stream(device)
        self._all = [self._main, *known[: parts - 1]]

    def __enter__(self) -> Callable[[int], None]:
        if self._parts == 1:
            return lambda index: None
        for stream in self._all[1:]:
            stream.wait_stream(self._main)
        return lambda index: torch.cuda.set_stream(self._all[index])

    def __exit__(self, *_: object) -> None:
        if self._parts == 1:
            return
        torch.cuda.set_stream(self._main)
        for stream in self._all[1:]:
            self._main.wait_stream(stream)
