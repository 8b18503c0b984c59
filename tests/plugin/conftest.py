"""A stranger's project: a plain LayerNorm pair, with no fastlayer in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAIR = """
import torch
from torch import nn

SIZE = 64

class Eager(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(-1, keepdim=True)
        for _ in range(WORK):  # a reference that a fast candidate can beat beyond any noise
            variance = (centred * centred).mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.norm.eps) * self.norm.weight + self.norm.bias

WORK = 60

def fast(module):
    def run(x):
        n = module.norm
        return nn.functional.layer_norm(x, (SIZE,), n.weight, n.bias, n.eps)
    return run

def inputs(seed):
    return (torch.randn(256, SIZE, generator=torch.Generator().manual_seed(seed)),)
"""

#: Timing that is short and still makes an interval: these tests prove wiring, not precision.
QUICK = (
    "--fastlayer-pairs=8",
    "--fastlayer-settle=0.01",
    "--fastlayer-block-ms=2",
    "--fastlayer-seeds=2",
    "--fastlayer-device=cpu",
)


@pytest.fixture
def project(pytester: pytest.Pytester) -> Callable[..., Path]:
    """Write a test module beside the pair and return its path."""

    def write(body: str, name: str = "test_pair", **extra: str) -> Path:
        pytester.makepyfile(pair=PAIR, **{name: "from pair import *\n" + body}, **extra)
        return pytester.path

    return write


@pytest.fixture
def bench(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """``pytest --fastlayer-bench`` in the stranger's project."""

    def run(*args: str, quick: bool = True) -> pytest.RunResult:
        given = QUICK if quick else ()
        return pytester.runpytest_inprocess(
            "-p",
            "no:cacheprovider",
            "--fastlayer-bench",
            "--fastlayer-json=run.json",
            *given,
            *args,
        )

    return run


@pytest.fixture
def record(pytester: pytest.Pytester) -> Callable[..., dict[str, Any]]:
    def read(name: str = "run.json") -> dict[str, Any]:
        return json.loads((pytester.path / name).read_text())

    return read
