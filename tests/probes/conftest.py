"""One small pair for all probe tests, and a way to ask for the probes that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.probes import run_probes

WIDTH = 32


def make_inputs(seed: int, device: str = "cpu") -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(16, WIDTH, generator=generator).to(device),)


def honest(x: torch.Tensor) -> torch.Tensor:
    """The reference of most tests: a fresh output, nothing kept."""
    return functional.gelu(x) * 2 + 1


Caught = dict[str, str]


@pytest.fixture
def probe() -> Callable[..., Caught]:
    """Run the probes; returns {probe: message} of those that did not pass."""

    def run(
        candidate: Any, reference: Any = honest, inputs: Any = make_inputs, **kw: Any
    ) -> Caught:
        found = run_probes(
            reference, candidate, inputs, (1234, 1235), Tolerance(), kw.pop("device", "cpu"), **kw
        )
        names = [one.name for one in found]
        assert len(names) == len(set(names))
        return {one.name: one.message for one in found if not one.passed}

    return run
