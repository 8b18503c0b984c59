"""Inputs that are no function of their seed, and functions that change their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe_pair import make_inputs

from pytest_fastlayer.immutable import freeze
from pytest_fastlayer.probes import check_inputs, mutated_by

SHARED = torch.ones(4)


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def counting(*values: Any) -> Callable[[int], Any]:
    given = iter(values)
    return lambda seed: next(given)


@pytest.mark.parametrize(
    "inputs",
    [
        make_inputs,
        lambda seed: seeded(seed, 3),
        lambda seed: (seeded(seed, 3), 3, 0.5, None, "mode"),
        lambda seed: ({"x": seeded(seed, 3), "y": [seeded(seed, 2, 2).t()]},),
        lambda seed: (seeded(seed, 3).fill_(float("nan")), float("nan")),
        lambda seed: (),
        lambda seed: torch.empty(0),
        lambda seed: seeded(seed, 3)[:1].expand(5),
        lambda seed: torch.eye(3).to_sparse(),
        lambda seed: seeded(seed, 6).split(3),
    ],
)
def test_repeatable_inputs_pass(inputs: Any) -> None:
    assert check_inputs(inputs, 7) is None


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (lambda seed: torch.randn(5), "differ in inputs:"),
        (lambda seed: (seeded(seed, 2), torch.randn(2)), "differ in inputs[1]:"),
        (lambda seed: {"x": seeded(seed, 2), "y": [torch.randn(2)]}, "differ in inputs['y'][0]:"),
        (counting((torch.zeros(2), 1), (torch.zeros(2), 2)), "differ in inputs[1]:"),
        (counting(torch.zeros(2), -torch.zeros(2)), "differ in inputs:"),
        (counting(torch.zeros(2), torch.zeros(2).double()), "differ in inputs:"),
        (counting(torch.zeros(2, 2), torch.zeros(2, 2).t()), "differ in inputs:"),
        (counting(1, True), "differ in inputs:"),
        (counting((torch.zeros(2),), (torch.zeros(2), 1)), "1 and then 2 values"),
        (lambda seed: tuple(torch.randn(2) for _ in range(9)), "inputs[2] and 6 more"),
        (lambda seed: SHARED, "share the memory of inputs:"),
        (lambda seed: (seeded(seed, 2), SHARED[1:]), "share the memory of inputs[1]:"),
    ],
)
def test_other_inputs_are_named(inputs: Any, words: str) -> None:
    text = check_inputs(inputs, 7)
    assert text is not None
    assert words in text
    assert "inputs(7)" in text


def doubles(x: torch.Tensor, out: Any = None) -> torch.Tensor:
    return x.mul_(2)


class Stateful(torch.nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        x["y"].zero_()
        return x["x"]


def adds(x: dict[str, Any]) -> torch.Tensor:
    x["z"] = 1
    return torch.zeros(1)


def silently(x: torch.Tensor) -> torch.Tensor:
    x.data[-1] += 1  # leaves the version counter as it is
    return x


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (doubles, (torch.ones(2),), "doubles changed its own input[0]:"),
        (freeze(doubles), (torch.ones(2),), "doubles changed its own input[0]:"),
        (freeze(Stateful()), ({"x": torch.ones(2), "y": torch.ones(2)},), "input[0]['y']:"),
        (Stateful(), ({"x": torch.ones(2), "y": torch.ones(2)},), "Stateful changed"),
        (adds, ({"x": torch.ones(2)},), "input[0]['z']:"),
        (silently, (torch.ones(2),), "input[0]:"),
        (lambda a, b: b.t_(), (torch.ones(2), torch.ones(2, 3)), "input[1]:"),
    ],
)
def test_a_function_that_changes_its_inputs_is_named(
    function: Any, args: tuple[Any, ...], words: str
) -> None:
    text = mutated_by(function, args)
    assert text is not None
    assert words in text


def test_a_function_that_leaves_its_inputs_alone_passes() -> None:
    x = torch.ones(2, requires_grad=True)
    calls: list[bool] = []

    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return x * n

    assert mutated_by(function, (x, 3)) is None
    assert calls == [False]
    assert mutated_by(torch.nn.LayerNorm(2), (torch.ones(2),)) is None
    with pytest.raises(ZeroDivisionError):
        mutated_by(lambda x: 1 // 0, (x,))
