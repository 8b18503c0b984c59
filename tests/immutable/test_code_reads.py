"""A frozen reference notices when something that its code reads is changed, and only then."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_fastlayer.immutable import ReferenceMutatedError, freeze
from pytest_fastlayer.probes import run_probes

ITERS = 1
SCALES: dict[str, Any] = {"outer": [1.0, 2.0], "inner": 3}
OFFSET = torch.zeros(2)
LAYER = torch.nn.Linear(2, 2)
COUNT = 0
CACHE: dict[int, int] = {}
LOG: list[int] = []
HERE = sys.modules[__name__]


@dataclass
class Config:
    iterations: int = 1


CONFIG = Config()


def helper(x: torch.Tensor, power: int = 1, *, bias: float = 0.0) -> torch.Tensor:
    for _ in range(ITERS):
        x = x**power + bias + OFFSET
    return LAYER(x)


def function(x: torch.Tensor) -> torch.Tensor:
    return helper(x) * SCALES["inner"] * CONFIG.iterations + sum([0])


class Plain:
    STEPS = 2

    def __init__(self) -> None:
        self.gain = 1.0
        self.weight = torch.ones(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.STEPS * ITERS * self.weight


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(2)
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deeper(x)

    def deeper(self, x: torch.Tensor) -> torch.Tensor:
        return function(self.norm(x)) * self.config.iterations


def closure(x: torch.Tensor, turns: int = 1) -> Callable[..., Any]:
    steps = 1

    def inner(y: torch.Tensor) -> torch.Tensor:
        return y * x * turns * steps

    return inner


def other(x: torch.Tensor, power: int = 1, *, bias: float = 0.0) -> torch.Tensor:
    return x


CLOSED = closure(torch.ones(2))
PLAIN, NET = Plain(), Net()
COMPILED = torch.compile(function, backend="eager")


def _cell(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    cell = dict(zip(CLOSED.__code__.co_freevars, CLOSED.__closure__ or (), strict=True))[name]
    return lambda patch: patch.setattr(cell, "cell_contents", value)


CHANGES: list[tuple[Any, Callable[[pytest.MonkeyPatch], object], str]] = [
    (helper, lambda p: p.setitem(helper.__globals__, "ITERS", 8), "the global ITERS of helper"),
    (function, lambda p: p.setattr(HERE, "ITERS", 8), "the global ITERS of helper"),
    (function, lambda p: p.setattr(HERE, "ITERS", True), "the global ITERS of helper"),
    (function, lambda p: p.setitem(SCALES, "inner", 4), "the global SCALES of function"),
    (function, lambda p: p.setitem(SCALES, "outer", [1.0]), "the global SCALES of function"),
    (function, lambda p: p.setattr(HERE, "helper", other), "the global helper of function"),
    (function, lambda p: p.setattr(HERE, "OFFSET", torch.ones(2)), "the global OFFSET of helper"),
    (function, lambda p: p.setattr(helper, "__code__", other.__code__), "the global helper"),
    (function, lambda p: p.setattr(helper, "__defaults__", (3,)), "the default of power of helper"),
    (
        function,
        lambda p: p.setitem(helper.__kwdefaults__, "bias", 1.0),
        "the default of bias of helper",
    ),
    (function, lambda p: p.setattr(HERE, "sum", max, raising=False), "the global sum of function"),
    (function, lambda p: p.setattr(CONFIG, "iterations", 5), "the attribute iterations of Config"),
    (
        function,
        lambda p: p.setitem(LAYER._parameters, "weight", torch.nn.Parameter(torch.ones(2, 2))),
        "the tensor weight of Linear",
    ),
    (CLOSED, _cell("steps", 9), "the variable steps of closure.<locals>.inner"),
    (CLOSED, _cell("turns", 9), "the variable turns of closure.<locals>.inner"),
    (PLAIN, lambda p: p.setattr(PLAIN, "gain", 2.0), "the attribute gain of Plain"),
    (PLAIN.inner, lambda p: p.setattr(PLAIN, "gain", -1.0), "the attribute gain of Plain"),
    (PLAIN, lambda p: p.setattr(Plain, "STEPS", 3), "the attribute STEPS of Plain"),
    (PLAIN, lambda p: p.setattr(PLAIN, "STEPS", 3, raising=True), "the attribute STEPS of Plain"),
    (PLAIN, lambda p: p.setattr(Plain, "inner", other), "the method inner of Plain"),
    (PLAIN, lambda p: p.setattr(HERE, "ITERS", 2), "the global ITERS of Plain.inner"),
    (NET, lambda p: p.setattr(NET.norm, "eps", 1.0), "the attribute eps of LayerNorm"),
    (NET, lambda p: p.setattr(NET.config, "iterations", 2), "the attribute iterations of Config"),
    (NET, lambda p: p.setattr(HERE, "ITERS", 2), "the global ITERS of helper"),
    (NET, lambda p: p.setattr(Net, "deeper", other), "the method deeper of Net"),
    (COMPILED, lambda p: p.setattr(HERE, "ITERS", 2), "the global ITERS of helper"),
    (functools.partial(helper, power=2), lambda p: p.setattr(HERE, "ITERS", 2), "the global ITERS"),
    (functools.lru_cache(function), lambda p: p.setattr(HERE, "ITERS", 2), "the global ITERS"),
]


@pytest.mark.parametrize(("target", "change", "words"), CHANGES)
def test_a_change_of_what_the_code_reads_is_named(target: Any, change: Any, words: str) -> None:
    frozen = freeze(target)
    assert frozen.changes() == []
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert any(one.startswith(words) for one in frozen.changes()), frozen.changes()
        with pytest.raises(ReferenceMutatedError):
            frozen.verify()
    assert frozen.changes() == []


def test_a_container_edited_in_place_is_seen() -> None:
    frozen = freeze(function)
    SCALES["outer"].append(3.0)
    try:
        assert frozen.changes() == ["the global SCALES of function changed"]
    finally:
        SCALES["outer"].pop()


def counts(x: torch.Tensor, memo: dict[int, int] = {}) -> torch.Tensor:  # noqa: B006
    global COUNT
    COUNT += 1
    CACHE[len(x)] = COUNT
    LOG.append(COUNT)
    memo[COUNT] = 1
    return x


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.sizes: list[int] = []
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), 1)
        return x * self.mask


def test_what_a_reference_assigns_and_fills_itself_is_its_own() -> None:
    times = 0
    seen: list[int] = []

    def nonlocal_counter(x: torch.Tensor) -> torch.Tensor:
        nonlocal times
        times += 1
        return x

    for target in (counts, Counter(), nonlocal_counter, lambda x: seen.append(1) or x):
        frozen = freeze(target)
        for size in (2, 3):
            frozen(torch.ones(size, 2))
        assert frozen.changes() == []


def test_values_are_copied_and_bounded() -> None:
    endless: list[Any] = []
    endless.append(endless)
    large = list(range(100_000))

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x * len(endless) * len(large)

    frozen = freeze(reference)
    assert frozen.changes() == []


def test_a_candidate_that_slows_the_reference_by_a_global_is_caught() -> None:
    def inputs(seed: int) -> torch.Tensor:
        return torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))

    def reference(x: torch.Tensor) -> torch.Tensor:
        for _ in range(ITERS):
            y = functional.gelu(x)
        return y

    def candidate(x: torch.Tensor) -> torch.Tensor:
        reference.__globals__["ITERS"] = 8
        return functional.gelu(x)

    try:
        found = run_probes(reference, candidate, inputs, (1, 2))
    finally:
        reference.__globals__["ITERS"] = 1
    messages = {one.name: one.message for one in found if not one.passed}
    assert list(messages) == ["reference_unchanged"]
    assert "the global ITERS" in messages["reference_unchanged"]
