"""Checks on outputs at hand, where no candidate of this machine shows the case."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
import torch._dynamo

from pytest_fastlayer.fingerprint import fingerprints
from pytest_fastlayer.probes.checks import held_output, still_changing
from pytest_fastlayer.probes.memory import (
    PoisonedAllocations,
    poisoned_allocations,
    storage_keys,
    veiled,
)


def test_an_output_that_torch_lets_nobody_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(mode="reduce-overhead") raises on access to an output it has reused."""

    def refuse(values: object) -> Any:
        raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten")

    monkeypatch.setattr("pytest_fastlayer.probes.checks.storage_keys", refuse)
    text = held_output(torch.ones(2), fingerprints(torch.ones(2)), torch.ones(2), ())
    assert "cannot be read any more" in text
    assert "CUDAGraphs" in text


def test_an_output_that_is_still_being_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    output = torch.zeros(4)
    assert not still_changing(output)
    monkeypatch.setattr("pytest_fastlayer.probes.checks.PATIENCE_S", 30.0)
    writer = threading.Timer(0.02, lambda: output.fill_(1))
    monkeypatch.setattr(
        "pytest_fastlayer.probes.checks.time.sleep", lambda seconds: writer.finished.wait(10)
    )
    writer.start()
    assert still_changing(output)
    writer.join()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(7),
        lambda: torch.empty(2, 3, dtype=torch.float16),
        lambda: torch.empty_like(torch.ones(4)),
        lambda: torch.ones(4).new_empty(3),
        lambda: torch.empty_strided((3, 2), (1, 3)),
        lambda: torch.empty(5, dtype=torch.complex64),
        lambda: torch.empty(3, dtype=torch.float64).expand(2, 3),
    ],
)
@pytest.mark.parametrize("has_dynamo", [True, False])
def test_every_way_to_allocate_is_poisoned(
    make: Any, has_dynamo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the mode that is used before anything has imported Dynamo."""
    if has_dynamo:
        monkeypatch.setitem(sys.modules, "torch._dynamo", torch._dynamo)
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    mode = poisoned_allocations()
    assert isinstance(mode, PoisonedAllocations)
    assert (type(mode) is PoisonedAllocations) is has_dynamo
    with mode:
        assert bool(make().isnan().all())
        assert int(torch.empty(2, dtype=torch.int32)[1]) == -1
        assert bool(torch.empty(2, dtype=torch.bool).all())
        assert float(torch.zeros(3).sum()) == 0.0
        assert torch.empty(0).numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float8_e5m2, torch.bool])
def test_a_veil_is_lifted_to_the_bit_even_after_an_exception(dtype: torch.dtype) -> None:
    output = (torch.randn(40) * 3).to(dtype)
    view, kept = output[3:9], output.clone()
    spared = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        _raise_under_veil((output, view, spared), spared)
    assert fingerprints(output) == fingerprints(kept)


def _raise_under_veil(outputs: tuple[torch.Tensor, ...], spared: torch.Tensor) -> None:
    before = fingerprints(outputs)
    with veiled(outputs, spare=storage_keys(spared)):
        during = fingerprints(outputs)
        assert during[2] == before[2]
        if outputs[0].dtype != torch.bool:
            assert during[0] != before[0]
            assert during[1] != before[1]
        raise ZeroDivisionError
