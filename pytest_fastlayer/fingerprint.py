"""Digests of tensor contents, computed on the tensor's own device in bounded memory.

Not cryptographic: two sums modulo 2**64 of each element's bits mixed with its position, enough to
see single changes, sign flips and permutations. Nothing here copies a tensor as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pytest_fastlayer.elementwise import blocks, default_chunk
from pytest_fastlayer.outputs import tensors

#: Odd multipliers (2**64 / golden ratio, and a prime from xxHash64), as signed 64-bit.
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)

#: Integer type of the same width, to read any element's bits.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(chunk: torch.Tensor) -> torch.Tensor:
    """The elements' bits as int64, flat; complex numbers as their two parts."""
    chunk = chunk.detach().resolve_conj().resolve_neg()
    if chunk.is_complex():
        chunk = torch.view_as_real(chunk)
    chunk = chunk.contiguous()
    return chunk.view(BITS[chunk.element_size()]).reshape(-1).to(torch.int64)


def fingerprint(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, device and a digest of the values. One synchronisation on CUDA."""
    identity = (tuple(tensor.shape), tensor.dtype, str(tensor.device))
    if tensor.is_meta or tensor.layout != torch.strided:
        return (*identity, tensor._version if not tensor.is_inference() else 0)
    sums = []
    with torch.no_grad():
        for offset, index in blocks(tuple(tensor.shape), default_chunk(tensor)):
            bits = _bits(tensor[index])
            place = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device)
            mixed = (bits ^ place.add_(offset).mul_(_MULTIPLIERS[0])).mul_(_MULTIPLIERS[1])
            # Fold the high bits down before summing: two flipped sign bits would cancel.
            mixed ^= mixed >> 32
            first = mixed.mul_(_MULTIPLIERS[0]).sum()
            second = (mixed ^ (mixed >> 29)).mul_(_MULTIPLIERS[1]).sum()
            sums.append(torch.stack([first, second]))
        digest = torch.stack(sums).sum(0).tolist() if sums else [0, 0]
    return (*identity, *digest)


def fingerprints(objects: object | Iterable[object]) -> tuple[tuple[Any, ...], ...]:
    """Fingerprint of every tensor in a nested object."""
    return tuple(fingerprint(tensor) for tensor in tensors(objects))
