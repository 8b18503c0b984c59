"""Peak memory of a call on CPU, by the kernel's own high-water mark."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_fastlayer.memory import _cpu_peak, peak_memory

MIB = 1 << 20


def allocate(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8)


def measured(fn: object) -> float:
    peak = peak_memory(fn, "cpu")  # type: ignore[arg-type]
    if peak is None:
        pytest.skip("the resident set's high-water mark cannot be reset here")
    return peak


@pytest.mark.parametrize("mib", [16, 64])
def test_peak_is_what_the_call_allocates(mib: int) -> None:
    assert measured(lambda: allocate(mib)) == pytest.approx(mib, abs=4)


def test_peak_counts_temporaries_not_only_the_output() -> None:
    assert measured(lambda: allocate(48).amax()) == pytest.approx(48, abs=4)


def test_earlier_allocations_do_not_count() -> None:
    held = allocate(64)
    measured(lambda: allocate(96))
    assert measured(lambda: allocate(16)) == pytest.approx(16, abs=4)
    assert held.numel() == 64 * MIB


def test_nothing_allocated_is_nothing() -> None:
    assert measured(lambda: None) < 2


def test_where_the_mark_cannot_be_reset_there_is_no_figure(tmp_path: Path) -> None:
    called: list[int] = []
    assert _cpu_peak(lambda: called.append(1), tmp_path / "absent") is None
    assert not called
    (tmp_path / "status").write_text("VmPeak: 3 kB\n")
    assert _cpu_peak(lambda: None, tmp_path) is None


def test_other_devices_have_no_figure() -> None:
    assert peak_memory(lambda: None, "meta") is None


def test_what_others_allocate_meanwhile_does_not_count_if_it_passes() -> None:
    """The least of several quick readings."""
    calls: list[torch.Tensor] = []

    def fn() -> None:
        if not calls:
            calls.append(allocate(64))  # as another thread might, once

    assert measured(fn) < 4
    assert len(calls) == 1


def test_a_slow_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr("pytest_fastlayer.memory._perf_counter", lambda: float(next(ticks)))
    calls: list[int] = []
    measured(lambda: calls.append(1))
    assert len(calls) == 1
