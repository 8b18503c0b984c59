"""The precision that the disclosed benchmark runs at, for the cases alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def disclosed_precision() -> Iterator[None]:
    """TF32 'high', as the disclosed benchmark sets it; restored, for no global may leak."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)
