"""Honest but unusual candidates, which every probe must let pass; and the cost of the probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from probe_pair import WIDTH, honest, make_inputs
from torch.nn import functional

from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.probes import run_probes


def in_place_on_own_workspace(x: torch.Tensor) -> torch.Tensor:
    work = x.clone()
    return functional.gelu(work).mul_(2).add_(1)


class KeepsAWorkspace:
    """Scratch memory kept between calls, an output that is fresh each time."""

    def __init__(self) -> None:
        self.scratch = torch.empty(16, WIDTH)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch.copy_(x)
        return functional.gelu(self.scratch) * 2 + 1


def view_of_a_fresh_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(2 * len(x), WIDTH + 3)
    output = buffer[1 : 1 + len(x), 2 : 2 + WIDTH]
    return output.copy_(honest(x))


def non_contiguous(x: torch.Tensor) -> torch.Tensor:
    return honest(x.t()).t()


class LazilyCompiled:
    """torch.compile on the first call, as a library would do it."""

    def __init__(self) -> None:
        self.compiled: Any = None

    def __call__(self, x: torch.Tensor) -> Any:
        if self.compiled is None:
            self.compiled = torch.compile(honest, backend="aot_eager")
        return self.compiled(x)


@pytest.mark.parametrize(
    "candidate",
    [
        honest,
        in_place_on_own_workspace,
        KeepsAWorkspace(),
        view_of_a_fresh_buffer,
        non_contiguous,
        LazilyCompiled(),
        torch.compile(honest, backend="aot_eager"),
    ],
    ids=[
        "plain",
        "in place on its own workspace",
        "workspace kept",
        "view of a fresh buffer",
        "non-contiguous",
        "lazily compiled",
        "compiled",
    ],
)
def test_honest_candidates_pass(probe: Any, candidate: Any) -> None:
    assert probe(candidate) == {}


@dataclass
class Output:
    hidden: torch.Tensor
    pooled: torch.Tensor


@pytest.mark.parametrize(
    "pack",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, (b, None)],
        lambda a, b: {"hidden": a, "pooled": b},
        lambda a, b: Output(a, b),
        lambda a, b: (a, 3, True),
    ],
    ids=["tuple", "nested list", "dict", "dataclass", "numbers"],
)
def test_nested_outputs_pass(probe: Any, pack: Any) -> None:
    def reference(x: torch.Tensor) -> Any:
        return pack(honest(x), honest(x).mean(0))

    def candidate(x: torch.Tensor) -> Any:
        both = torch.cat([honest(x), honest(x).mean(0, keepdim=True)])  # two views of one buffer
        return pack(both[:-1], both[-1])

    assert probe(candidate, reference) == {}


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool],
)
def test_every_dtype_passes(probe: Any, dtype: torch.dtype) -> None:
    def inputs(seed: int) -> torch.Tensor:
        return (make_inputs(seed)[0] * 3).to(dtype)

    def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), x[0, 0].clone()

    expected = {1234: reference(inputs(1234))}
    assert (
        probe(
            lambda x: (x + 0 if x.dtype != torch.bool else x | False, x[0, 0].clone()),
            reference,
            inputs,
            expected=expected,
        )
        == {}
    )


def test_an_output_that_aliases_as_the_references_does_passes(probe: Any) -> None:
    assert probe(lambda x: x.view(-1), lambda x: x.view(-1)) == {}


def test_inference_tensors_and_expanded_inputs(probe: Any) -> None:
    def inference(seed: int) -> tuple[torch.Tensor]:
        with torch.inference_mode():
            return (make_inputs(seed)[0] + 0,)

    assert probe(honest, honest, inference) == {}
    assert probe(honest, honest, lambda seed: make_inputs(seed)[0][:1].expand(16, WIDTH)) == {}


def test_what_could_not_be_checked_is_said() -> None:
    found = run_probes(honest, honest, lambda seed: make_inputs(1), (1, 2))
    notes = {one.name: one.message for one in found if one.message}
    assert all(one.passed for one in found)
    assert "same contents for both seeds" in notes["fresh_contents"]
    assert "weights_of" in notes["stale_weights"]
    flat = torch.nn.Linear(WIDTH, WIDTH)
    other = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
    other[0].load_state_dict(flat.state_dict())
    found = run_probes(flat, other, make_inputs, (1, 2))
    notes = {one.name: one.message for one in found}
    assert "no weights of the same names" in notes["stale_weights"]


class Counting(torch.nn.Module):
    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("known", "cost", "forwards"), [(0, None, 2), (1, None, 2), (2, None, 1), (2, 9.0, 0)]
)
def test_probes_cost_few_forwards(known: int, cost: float | None, forwards: int) -> None:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    reference, candidate = Counting(layer), Counting(layer)
    seeds = (5, 6)
    expected = {seed: layer(*make_inputs(seed)).detach() for seed in seeds[:known]}
    found = run_probes(
        reference,
        candidate,
        make_inputs,
        seeds,
        Tolerance(),
        expected=expected,
        cost=None if cost is None else (cost, 1.0),
    )
    assert all(one.passed for one in found)
    assert reference.forwards == forwards
    assert candidate.forwards <= 5
    (stale,) = (one for one in found if one.name == "stale_weights")
    assert ("over 5 s" in stale.message) is (cost is not None)


def test_an_exception_of_an_arm_says_what_was_probed() -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError) as caught:
        run_probes(honest, candidate, make_inputs, (1, 2))
    assert caught.value.__notes__ == ["raised by the candidate while probing: a plain call"]


def test_a_candidate_near_its_tolerance_is_imprecise_not_dishonest(probe: Any) -> None:
    """Scaled weights scale its error too; that is for the accuracy check to judge."""
    layer = torch.nn.Linear(WIDTH, WIDTH)

    class Imprecise(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.0199 + 0.0019 * self.weight.mean().sign()

    assert probe(Imprecise(layer), layer) == {}


def symmetric(seed: int) -> tuple[torch.Tensor]:
    (x,) = make_inputs(seed)
    return (x @ x.T,)


def lower_half(x: torch.Tensor) -> torch.Tensor:
    """What an honest candidate may do with a matrix that is symmetric, and with no other."""
    lower = x.tril()
    return lower + x.tril(-1).T


def refusing(x: torch.Tensor) -> torch.Tensor:
    if not torch.equal(x, x.T):
        raise ArithmeticError("not symmetric")
    return x * 1.0


@pytest.mark.parametrize(
    ("candidate", "note"),
    [(lower_half, ""), (refusing, "not run: a mixture of two inputs raises ArithmeticError")],
)
def test_a_mixture_that_is_no_input_accuses_nobody(
    candidate: Callable[[torch.Tensor], torch.Tensor], note: str
) -> None:
    found = run_probes(lambda x: x * 1.0, candidate, symmetric, (1, 2), Tolerance())
    assert [one.name for one in found if not one.passed] == []
    assert {one.name: one.message for one in found}["few_elements"] == note


@pytest.mark.parametrize(
    "inputs",
    [
        lambda seed: (make_inputs(seed)[0][:2],),
        lambda seed: (make_inputs(seed)[0][:, :1].expand(16, WIDTH),),
        {seed: make_inputs(seed) for seed in (1, 2)}.__getitem__,
    ],
    ids=["small", "expanded", "kept by the test"],
)
def test_inputs_that_cannot_be_mixed_accuse_nobody(inputs: Callable[[int], Any]) -> None:
    found = run_probes(honest, honest, inputs, (1, 2), Tolerance())
    assert [one.name for one in found if not one.passed] == []
