"""Exact causal attention for long sequences: fused backends only, or an error that says why.

SDPA's math backend would allocate ``[H, N, N]`` scores, and choosing among backends in silence is
how a 100,000-token call ends there. So backends are named here and everything else is forbidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastlayer.errors import FastlayerError

#: Backends by the name a launch gives them, in order of preference. On one H200 at N = 100,000,
#: 16 heads of 64, float16: cuDNN 44.4 ms, flash 65.5 ms, memory-efficient 149 ms.
_BACKENDS: dict[str, list[SDPBackend]] = {
    "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "FA3": [SDPBackend.FLASH_ATTENTION],
    "FA4": [SDPBackend.FLASH_ATTENTION],
}

BACKEND_NAMES: tuple[str, ...] = tuple(_BACKENDS)

#: Float32 has one fused kernel on CUDA.
_FLOAT32 = [SDPBackend.EFFICIENT_ATTENTION]

#: On a CPU flash attention serves every dtype; float16 is computed in float32 and rounded.
_CPU = [SDPBackend.FLASH_ATTENTION]


class NoFusedAttentionError(FastlayerError, RuntimeError):
    """No allowed backend can compute this attention without holding all scores."""

    def __init__(self, q: torch.Tensor, backend: str, reason: str) -> None:
        heads, tokens, dim = q.shape
        scores = heads * tokens * tokens * q.element_size()
        super().__init__(
            f"attention of {heads} heads of {dim} over {tokens:,} tokens in {q.dtype} on "
            f"{q.device}: backend {backend!r} is not available ({reason}), and the dense form "
            f"would hold {scores:,} bytes of scores. Choose another of {', '.join(BACKEND_NAMES)} "
            'as launch={"backend": ...}, or use float16 on a GPU of capability 8.0 or newer.'
        )


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str = "auto"
) -> torch.Tensor:
    """Causal softmax attention of views ``[H, N, D]``: ``[N, H * D]``, dtype as q.

    Raises:
        NoFusedAttentionError: no backend of that name serves these tensors here.
    """
    heads, tokens, dim = q.shape
    emulated = not q.is_cuda and q.dtype == torch.float16
    # Four dimensions: SDPA's fused kernels do not take three.
    wide_q, wide_k, wide_v = (
        (t.float() if emulated else t if t.stride(-1) == 1 else t.contiguous())[None]
        for t in (q, k, v)
    )
    if not q.is_cuda:
        allowed = _CPU
    else:
        allowed = _FLOAT32 if q.dtype == torch.float32 else _BACKENDS[backend]
    with _implementation(backend, q), sdpa_kernel(allowed, set_priority=True):
        try:
            result = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True)[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise NoFusedAttentionError(q, backend, reason) from error
    return result.transpose(0, 1).reshape(tokens, heads * dim).to(q.dtype)


@contextmanager
def _implementation(backend: str, q: torch.Tensor) -> Iterator[None]:
    """Registers FA3 or FA4 as torch's flash attention where asked for; restored afterwards."""
    if backend not in ("FA3", "FA4"):
        yield
        return
    before = attention.current_flash_attention_impl()
    if before != backend:
        try:
            attention.activate_flash_attention_impl(backend)
        except (ValueError, ImportError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise NoFusedAttentionError(q, backend, reason) from error
    try:
        yield
    finally:
        if before != backend:
            attention.restore_flash_attention_impl()
            if before is not None:
                attention.activate_flash_attention_impl(before)
