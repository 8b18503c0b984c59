"""A stranger's project: a plain LayerNorm pair, with no fastlayer in it."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import pkgutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo

# pytester drops every module that an in-process run imported first; C extensions (torch, scipy)
# do not survive a second import. So all are imported here, before the first such run.
import pytest_fastlayer
from pytest_fastlayer.stack import with_room

for module in pkgutil.walk_packages(pytest_fastlayer.__path__, "pytest_fastlayer."):
    importlib.import_module(module.name)

# Every timed case collects garbage, and torch's own heap makes that a third of a second.
gc.freeze()
# What is frozen would outlive the interpreter, and triton 3.9 lists all of it as leaked.
atexit.register(gc.unfreeze)

PAIR = """
import random

import torch
from torch import nn

SIZE = 64
EAGER_S, FAST_S = 1e-3, 1e-4

class Virtual:
    \"""Time that passes only when a forward says so: what a busy machine cannot disturb.\"""
    name, resolution_s, settle_s = "cpu_clock", 1e-9, 0.0
    now = 0.0
    noise = random.Random(7)

    @classmethod
    def spend(cls, seconds):
        cls.now += seconds * cls.noise.gauss(1, 0.002)

    def synchronize(self):
        pass

    def block(self, fn, forwards, *, cold=False):
        from pytest_fastlayer.clocks import BlockTime
        begin = Virtual.now
        for _ in range(forwards):
            fn()
        spent = Virtual.now - begin
        return BlockTime(seconds=spent, wall_s=spent)

class Eager(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x):
        Virtual.spend(EAGER_S)
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.norm.eps) * self.norm.weight + self.norm.bias

def fast(module, cost=FAST_S):
    def run(x):
        Virtual.spend(cost)
        n = module.norm
        return nn.functional.layer_norm(x, (SIZE,), n.weight, n.bias, n.eps)
    return run

def inputs(seed):
    return (torch.randn(32, SIZE, generator=torch.Generator().manual_seed(seed)),)
"""

#: Installed in the stranger's conftest unless a test wants the real clock.
VIRTUAL_CLOCK = """
import pytest

@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch):
    from pair import Virtual
    from pytest_fastlayer import timing
    monkeypatch.setattr(timing, "clock_for", lambda device: Virtual())
"""

QUICK = (
    "--fastlayer-pairs=24",
    "--fastlayer-settle=0",
    "--fastlayer-block-ms=1",
    "--fastlayer-seeds=2",
    "--fastlayer-device=cpu",
)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A whole pytest runs inside most tests, and collects garbage several times.

    So it is given room on the stack, and nothing to go through that was there before.
    """
    gc.collect()
    gc.freeze()
    test = pyfuncitem.obj
    pyfuncitem.obj = lambda **arguments: with_room(lambda: test(**arguments))
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operators gain nothing from a second thread and wait for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def project(pytester: pytest.Pytester) -> Callable[..., Path]:
    """Write a test module beside the pair and return the project's folder."""

    def write(body: str, **extra: str) -> Path:
        module = "from pair import *\n" + body
        files = {"pair": PAIR, "conftest": VIRTUAL_CLOCK, "test_pair": module}
        pytester.makepyfile(**(files | extra))
        return pytester.path

    return write


@pytest.fixture
def lean() -> tuple[str, ...]:
    """What a process of its own does without.

    To rewrite every assertion of the plugin, and to import hypothesis for a summary of nothing,
    would take longer than the run.
    """
    return ("-p", "no:hypothesispytest", "--assert=plain")


@pytest.fixture
def bench(pytester: pytest.Pytester, lean: tuple[str, ...]) -> Callable[..., pytest.RunResult]:
    """``pytest --fastlayer-bench`` in the stranger's project."""

    def start(*args: str, subprocess: bool = False) -> pytest.RunResult:
        runner = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        fixed = ("-p", "no:cacheprovider", "--fastlayer-bench", "--fastlayer-json=run.json")
        return runner(*fixed, *QUICK, *(lean if subprocess else ()), *args)

    return start


@pytest.fixture
def record(pytester: pytest.Pytester) -> Callable[..., dict[str, Any]]:
    def read(name: str = "run.json") -> dict[str, Any]:
        return json.loads((pytester.path / name).read_text())

    return read
