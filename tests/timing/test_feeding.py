"""New contents at the same address between quads: seen by what computes, not by what remembers."""

from __future__ import annotations

import gc

import pytest
import torch

from pytest_fastlayer import gate, measurement
from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.feeding import Feed


def inputs(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, generator=generator), torch.randint(9, (4,), generator=generator)


def test_data_is_renewed_silently_and_indices_are_not() -> None:
    data, index = inputs(1)
    feed = Feed((data, index), inputs)
    versions = data._version, index._version
    feed.renew(2)
    assert feed.args[0] is data
    assert torch.equal(data, inputs(2)[0])
    assert torch.equal(index, inputs(2)[1])
    assert data._version == versions[0]
    assert index._version > versions[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_was_made_in_any_mode_is_renewed(mode: type[torch.no_grad]) -> None:
    with mode():
        feed = Feed(inputs(1), inputs)
    feed.renew(2)
    assert torch.equal(feed.args[0], inputs(2)[0])


def test_what_cannot_be_written_is_replaced() -> None:
    def expanded(seed: int) -> tuple[torch.Tensor, ...]:
        return (inputs(seed)[0][:1].expand(3),)

    feed = Feed(expanded(1), expanded)
    feed.renew(2)
    assert torch.equal(feed.args[0], expanded(2)[0])


class Remembering:
    """Computes when it is not timed; while it is, only if address or version are new to it."""

    known: object = None
    output: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        known = x.data_ptr(), x._version
        if self.output is None or gc.isenabled() or known != self.known:
            self.known, self.output = known, torch.relu(x)
        return self.output


def reference(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def test_a_result_kept_by_version_is_caught_while_it_is_timed() -> None:
    schedule = measurement.Schedule(6, 0.0, 1.0, 1.0, "warm", 0.01, control=0.0)
    for candidate, passes in ((reference, True), (Remembering(), False)):
        feed = Feed(inputs(1234), inputs)
        _, watched = measurement.measure(
            reference,
            candidate,
            feed,
            torch.device("cpu"),
            (1e-5, 1e-5),
            schedule,
            gate.Policy(),
            lambda line: None,
            Tolerance(),
        )
        (probe,) = [one for one in watched if one.name == "timed_output"]
        assert probe.passed is passes, probe.message
