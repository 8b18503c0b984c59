"""One small pair for all probe tests."""

from __future__ import annotations

import torch
from torch.nn import functional

WIDTH = 32


def make_inputs(seed: int, device: str = "cpu") -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(16, WIDTH, generator=generator).to(device),)


def honest(x: torch.Tensor) -> torch.Tensor:
    """The reference of most tests: a fresh output, nothing kept."""
    return functional.gelu(x) * 2 + 1
